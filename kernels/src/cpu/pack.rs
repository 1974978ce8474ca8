//! The right operand: weights packed once, in the layout that every kernel reads.
//!
//! ```text
//! [n / 32 panels][k / 32][2 tiles][16 k-pairs][16 columns][2]   bf16, zero padded, 64-byte aligned, huge pages
//! ```
//!
//! One KiB of it is an AMX B tile, and 64 bytes are an AVX-512 register with two consecutive k of sixteen columns. A
//! panel of one matrix is contiguous, so a product with few rows streams memory. Gate and up share panels: tile 0 has
//! sixteen columns of gate, tile 1 the same sixteen of up. The embedding table looks its rows up in this layout, so a
//! tied head exists once.

use super::lanes::to_bf16;
use super::operand::Shared;
use super::pool::{Items, Pool};
use crate::device::KernelError;
use crate::host::{Arena, Region};
use crate::source::Source;

/// Values in 32 k of one panel.
pub(super) const BLOCK: usize = 1024;

/// Matrix of a linear layer `y = x·Wᵀ`, packed in bf16 panels of 32 outputs.
pub(super) struct Packed {
    values: Region<u16>,
    pub(super) panels: usize,
    /// Number of columns of x divided by 32, rounded up.
    pub(super) k_blocks: usize,
    /// Number of columns of x: inputs of the layer.
    pub(super) columns: usize,
    /// Number of columns of y: rows of the checkpoint's matrix (of gate alone where gate and up are interleaved).
    pub(super) rows: usize,
    /// Bias, padded to whole panels, in their order of columns.
    pub(super) bias: Option<Vec<f32>>,
}

impl Packed {
    /// Stacks `parts` (equal columns, checked) along their rows.
    pub(super) fn stack(
        arena: &mut Arena,
        pool: &mut Pool,
        parts: &[Source<'_>],
        bias: Option<Vec<f32>>,
    ) -> Result<Self, KernelError> {
        let rows = parts.iter().map(|part| part.rows).sum::<usize>();
        let find = |n: usize| {
            let mut n = n;
            parts.iter().find_map(|part| {
                let here = (n < part.rows).then_some((*part, n));
                n = n.wrapping_sub(part.rows);
                here
            })
        };
        let mut packed = Self::new(arena, rows.div_ceil(32), parts[0].columns, rows)?;
        packed.bias = bias.map(|mut bias| {
            bias.resize(packed.panels * 32, 0.0);
            bias
        });
        packed.fill(pool, &|panel, n| find(panel * 32 + n));
        Ok(packed)
    }

    /// Interleaves gate and up, of equal shape (checked).
    pub(super) fn gate_up(
        arena: &mut Arena,
        pool: &mut Pool,
        gate: Source<'_>,
        up: Source<'_>,
        biases: Option<[Vec<f32>; 2]>,
    ) -> Result<Self, KernelError> {
        let mut packed = Self::new(arena, gate.rows.div_ceil(16), gate.columns, gate.rows)?;
        packed.bias = biases.map(|biases| {
            let column = |n: usize| biases[n % 32 / 16].get(n / 32 * 16 + n % 16).copied().unwrap_or(0.0);
            (0..packed.panels * 32).map(column).collect()
        });
        packed.fill(pool, &|panel, n| {
            let (source, row) = (if n < 16 { gate } else { up }, panel * 16 + n % 16);
            (row < gate.rows).then_some((source, row))
        });
        Ok(packed)
    }

    fn new(arena: &mut Arena, panels: usize, columns: usize, rows: usize) -> Result<Self, KernelError> {
        let k_blocks = columns.div_ceil(32);
        let count = panels.checked_mul(k_blocks).and_then(|n| n.checked_mul(BLOCK)).unwrap_or(usize::MAX);
        let values = arena.alloc(count, "a packed weight")?;
        Ok(Self { values, panels, k_blocks, columns, rows, bias: None })
    }

    /// Fills each panel from the rows that `find(panel, n)` names; columns without a row stay zero.
    fn fill<'a>(&mut self, pool: &mut Pool, find: &(dyn Fn(usize, usize) -> Option<(Source<'a>, usize)> + Sync)) {
        let (k_blocks, columns, size) = (self.k_blocks, self.columns, self.panel_size());
        let (items, values) = (Items::new(self.panels), Shared::new(&mut self.values));
        pool.run(&|_| {
            let mut row = vec![0.0f32; columns];
            while let Some(panel) = items.take() {
                // SAFETY: borrowed for this run; each panel is one item, so one thread has it.
                let out = unsafe { values.slice(panel * size, size) };
                for n in 0..32 {
                    if let Some((source, index)) = find(panel, n) {
                        source.read(index, 0, &mut row);
                        scatter(out, n, &row, k_blocks);
                    }
                }
            }
        });
    }

    pub(super) fn panel_size(&self) -> usize {
        self.k_blocks * BLOCK
    }

    /// The bf16 values of panel `panel`, blocks of 32 k in order.
    pub(super) fn panel(&self, panel: usize) -> &[u16] {
        &self.values[panel * self.panel_size()..][..self.panel_size()]
    }

    /// Row `row` of the checkpoint's matrix as f32, zero beyond its columns. `out`: `[32 · k_blocks]`.
    pub(super) fn gather(&self, row: usize, out: &mut [f32]) {
        let (blocks, start) = (self.panel(row / 32).as_chunks::<BLOCK>().0, column_start(row % 32));
        for (block, out) in blocks.iter().zip(out.as_chunks_mut::<32>().0) {
            for (pair, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let at = start + pair * 32;
                *out = [f32::from_bits(u32::from(block[at]) << 16), f32::from_bits(u32::from(block[at + 1]) << 16)];
            }
        }
    }
}

/// Index at which column `n` of a panel begins inside of a block.
fn column_start(n: usize) -> usize {
    n / 16 * 512 + n % 16 * 2
}

/// Writes `row` as column `n` of the panel `out`.
fn scatter(out: &mut [u16], n: usize, row: &[f32], k_blocks: usize) {
    let start = column_start(n);
    for k_block in 0..k_blocks {
        let block = &mut out[k_block * BLOCK..][..BLOCK];
        for (k, &value) in row[k_block * 32..].iter().take(32).enumerate() {
            block[start + k / 2 * 32 + k % 2] = to_bf16(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DType, HostTensor};

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn rows_come_back_from_the_packed_layout() {
        let (n, k) = (45, 50);
        let values: Vec<f32> = (0..n * k).map(|i| (i % 251) as f32 - 100.0).collect();
        let raw = bytes(&values);
        let shapes = [[20, k], [25, k]];
        let part = |shape: &'static [usize], bytes| HostTensor { name: "w", dtype: DType::F32, shape, bytes };
        let shapes: &'static [[usize; 2]; 2] = Box::leak(Box::new(shapes));
        let sources = [
            Source::new(&part(&shapes[0], &raw[..20 * k * 4]), 2).unwrap(),
            Source::new(&part(&shapes[1], &raw[20 * k * 4..]), 2).unwrap(),
        ];
        let (mut arena, mut pool) = (Arena::default(), Pool::new(2, None).unwrap());
        let packed = Packed::stack(&mut arena, &mut pool, &sources, Some(vec![1.0; n])).unwrap();
        assert_eq!((packed.panels, packed.k_blocks, packed.rows), (2, 2, n));
        assert_eq!(packed.bias.as_ref().map(Vec::len), Some(64));
        for row in 0..n {
            let mut out = vec![9.0; 64];
            packed.gather(row, &mut out);
            assert_eq!((&out[..k], &out[k..]), (&values[row * k..][..k], &[0.0; 14][..]));
        }
    }

    #[test]
    fn gate_and_up_share_panels() {
        let (gate, up): (Vec<f32>, Vec<f32>) = (0..40).map(|i| (i as f32, 100.0 + i as f32)).unzip();
        let (gate, up) = (bytes(&gate), bytes(&up));
        let tensor = |bytes| HostTensor { name: "w", dtype: DType::F32, shape: &[20, 2], bytes };
        let source = |bytes| Source::new(&tensor(bytes), 2).unwrap();
        let (mut arena, mut pool) = (Arena::default(), Pool::new(1, None).unwrap());
        let biases = [0.5, 0.25].map(|bias| (0..20).map(|n| bias + n as f32).collect());
        let packed = Packed::gate_up(&mut arena, &mut pool, source(&gate), source(&up), Some(biases)).unwrap();
        assert_eq!((packed.panels, packed.k_blocks), (2, 1));
        let pair = |panel: usize, tile: usize, n: usize| &packed.panel(panel)[tile * 512 + n * 2..][..2];
        assert_eq!(pair(1, 0, 3), [38.0f32, 39.0].map(to_bf16));
        assert_eq!(pair(1, 1, 3), [138.0f32, 139.0].map(to_bf16));
        assert_eq!(pair(1, 1, 4), [0, 0]);
        let bias = packed.bias.as_ref().unwrap();
        assert_eq!((bias.len(), bias[2], bias[16 + 2], bias[32 + 3]), (64, 2.5, 2.25, 19.5));
        assert_eq!((bias[48 + 3], bias[48 + 4]), (19.25, 0.0));
    }
}
