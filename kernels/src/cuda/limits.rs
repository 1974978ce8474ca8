//! Bandwidth of a GPU's memory, by copies inside of it. No kernel moves bytes much faster.

use super::driver::{Context, DriverError, Memory, Ordinal, Stream};
use super::{Gpu, fault};
use crate::device::KernelError;

/// Bytes of the pattern that fills the source: not zeros, on which a GPU takes less power and runs faster.
const PATTERN_BYTES: usize = 16 << 20;
/// Measurements whose median is the result, and the time that one of them takes at least.
const RUNS: usize = 7;
const RUN_SECONDS: f64 = 0.01;

/// Bytes that a GPU moves in a second, those read plus those written, by copies of `bytes` bytes (more than its caches hold) from one place of its
/// memory to another. `clock`: seconds from any origin.
///
/// # Errors
/// [`KernelError::Memory`] if twice as many bytes are not free; [`KernelError::Fault`] if the driver fails.
pub fn bandwidth(gpu: &Gpu, bytes: usize, clock: fn() -> f64) -> Result<f64, KernelError> {
    measure(gpu, bytes, clock).map_err(|error| match error.is_memory() {
        true => KernelError::Memory { what: "the memory limit", bytes: 2 * bytes },
        false => fault(gpu, error),
    })
}

fn measure(gpu: &Gpu, bytes: usize, clock: fn() -> f64) -> Result<f64, DriverError> {
    let stream = Stream::new(&Context::new(Ordinal::new(gpu.index as i32)?)?)?;
    let (from, to) = (filled(&stream, bytes)?, stream.allocate(bytes)?);
    let seconds = |copies: usize| -> Result<f64, DriverError> {
        let begun = clock();
        (0..copies).try_for_each(|_| stream.copy(&to, 0, &from, bytes))?;
        stream.wait()?;
        Ok((clock() - begun) / copies as f64)
    };
    seconds(1)?;
    // So many copies that neither the first launch nor the wait counts.
    let copies = (RUN_SECONDS / seconds(2)?.max(1e-6)).ceil().max(1.0) as usize;
    let mut all = (0..RUNS).map(|_| seconds(copies)).collect::<Result<Vec<_>, _>>()?;
    all.sort_by(f64::total_cmp);
    Ok(2.0 * bytes as f64 / all[RUNS / 2])
}

/// Memory with a pattern in it.
fn filled(stream: &Stream, bytes: usize) -> Result<Memory, DriverError> {
    let memory = stream.allocate_unfilled(bytes)?;
    let mut state = 0x9e37_79b9_u32;
    let word = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    let pattern: Vec<u32> = (0..PATTERN_BYTES.min(bytes) / size_of::<u32>()).map(word).collect();
    stream.write(&memory, 0, &pattern)?;
    let mut done = size_of_val(&*pattern);
    while done > 0 && done < bytes {
        let more = done.min(bytes - done);
        stream.copy(&memory, done, &memory, more)?;
        done += more;
    }
    stream.wait()?;
    Ok(memory)
}
