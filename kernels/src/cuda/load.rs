//! Rows of weights as a matrix on the GPU: bf16 is copied, other numbers are rounded, by several threads, while the GPU takes the rows before.

use half::bf16;

use super::driver::{DriverError, Memory, Staging, Stream};
use crate::device::DType;
use crate::source::Source;

/// Size of a piece: 32 MiB take a millisecond at the rate of PCIe 4 and 5, so that launches and waits do not count.
const PIECE_BYTES: usize = 32 << 20;
/// Threads that fill a piece; more are of no use to the memory of one socket.
const THREADS_MAX: usize = 8;
/// Bytes for which another thread is worth its start.
const PER_THREAD_BYTES: usize = 1 << 20;

/// A row of a tensor, or zeros.
pub(super) type Row<'a> = Option<(&'a Source<'a>, usize)>;

/// Allocates memory that holds `rows` as bf16, each padded with zeros to `stride` values. `staging` is created when it is first needed. The last copies
/// are under way on `stream` at return.
pub(super) fn upload(
    stream: &Stream,
    staging: &mut Option<Staging>,
    rows: &[Row<'_>],
    stride: usize,
) -> Result<Memory, DriverError> {
    let row_bytes = stride * size_of::<bf16>();
    let memory = stream.allocate_unfilled(rows.len() * row_bytes)?;
    if staging.as_ref().is_none_or(|staging| staging.bytes() < row_bytes) {
        *staging = Some(Staging::new(stream, PIECE_BYTES.max(row_bytes))?);
    }
    let staging = staging.as_mut().expect("created above");
    let piece_rows = staging.bytes() / row_bytes;
    for (piece, rows) in rows.chunks(piece_rows).enumerate() {
        let (offset, bytes) = (piece * piece_rows * row_bytes, rows.len() * row_bytes);
        staging.send(&memory, offset, bytes, |out| fill(out, rows, row_bytes))?;
    }
    Ok(memory)
}

/// Writes `rows` to `out`, by several threads where that pays.
fn fill(out: &mut [u8], rows: &[Row<'_>], row_bytes: usize) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (out.len() / PER_THREAD_BYTES).clamp(1, cores.min(THREADS_MAX));
    let part_rows = rows.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let mut parts = out.chunks_mut(part_rows * row_bytes).zip(rows.chunks(part_rows));
        let own = parts.next();
        parts.for_each(|(out, rows)| {
            scope.spawn(move || fill_rows(out, rows, row_bytes));
        });
        own.into_iter().for_each(|(out, rows)| fill_rows(out, rows, row_bytes));
    });
}

fn fill_rows(out: &mut [u8], rows: &[Row<'_>], row_bytes: usize) {
    let mut values = Vec::new();
    for (out, row) in out.chunks_exact_mut(row_bytes).zip(rows) {
        let Some((source, row)) = *row else {
            out.fill(0);
            continue;
        };
        let (own, padding) = out.split_at_mut(source.columns * size_of::<bf16>());
        padding.fill(0);
        if source.dtype == DType::Bf16 {
            own.copy_from_slice(source.row(row));
            continue;
        }
        values.resize(source.columns, 0.0);
        source.read(row, &mut values);
        for (to, value) in own.as_chunks_mut().0.iter_mut().zip(&values) {
            *to = bf16::from_f32(*value).to_le_bytes();
        }
    }
}
