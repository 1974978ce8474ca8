//! Limits of the machine: arithmetic from registers, and reading memory that no cache holds. No program computes or reads faster.

use std::fmt;
use std::sync::Barrier;

use super::Path;
use crate::device::KernelError;
use crate::host::Arena;

/// Medians over several runs, all threads together.
#[derive(Clone, Copy, Debug)]
pub struct MachineLimits {
    /// Rate of the path's multiply-adds on bf16 or f32, two operations each, in 10⁹ per second.
    pub gflops: f64,
    /// Name of the instruction that multiplies and adds.
    pub instruction: &'static str,
    /// Rate of reading memory, in 10⁹ bytes per second.
    pub gigabytes: f64,
}

impl fmt::Display for MachineLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} GFLOP/s ({}), {:.1} GB/s", self.gflops, self.instruction, self.gigabytes)
    }
}

/// Clock in seconds from any fixed origin. All threads read it.
pub type Clock = fn() -> f64;

/// Measures compute and memory limits of the machine with `threads` threads, pinned to `cores` in order if there are enough of them,
/// and the instructions of `path` ([`Path::Auto`] and those without an instruction of their own here: the widest multiply-add of f32).
/// `bytes` of memory are read, more than the caches hold.
///
/// # Errors
/// [`KernelError`] if there is no memory for `bytes`.
///
/// # Panics
/// If `threads` is 0.
pub fn measure(
    threads: usize,
    cores: &[usize],
    path: Path,
    bytes: usize,
    clock: Clock,
) -> Result<MachineLimits, KernelError> {
    let (instruction, work): (_, fn(usize) -> f64) = match path {
        #[cfg(target_arch = "x86_64")]
        Path::Avx512Bf16 if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") => {
            ("vdpbf16ps", x86::dot)
        }
        #[cfg(target_arch = "x86_64")]
        Path::Amx if path.missing().is_none() => ("tdpbf16ps", x86::tiles),
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 if is_x86_feature_detected!("avx512f") => ("vfmadd 512", x86::fma),
        #[cfg(target_arch = "x86_64")]
        _ if is_x86_feature_detected!("fma") => ("vfmadd 256", x86::fma_256),
        _ => ("scalar multiply-add", scalar),
    };
    let rounds = 4_000_000;
    let crew = Crew { threads, cores, clock };
    let gflops = median(5, || crew.together(|_| work(rounds)) / 1e9);
    let words = bytes / 4;
    let mut memory = Arena::default().alloc::<u32>(words, "the memory limit")?;
    memory.fill(1);
    let part = words / threads;
    let gigabytes = median(7, || crew.together(|thread| read(&memory[thread * part..][..part])) / 1e9);
    Ok(MachineLimits { gflops, instruction, gigabytes })
}

fn median(runs: usize, run: impl FnMut() -> f64) -> f64 {
    let mut run = run;
    let mut all: Vec<f64> = (0..runs).map(|_| run()).collect();
    all.sort_by(f64::total_cmp);
    all[runs / 2]
}

/// Threads that work at the same time.
struct Crew<'a> {
    threads: usize,
    cores: &'a [usize],
    clock: Clock,
}

impl Crew<'_> {
    /// Rate of all threads together. `work` gets the thread's number and returns how much it did.
    fn together(&self, work: impl Fn(usize) -> f64 + Sync) -> f64 {
        let barrier = Barrier::new(self.threads);
        let run = |thread: usize| {
            if let Some(&core) = self.cores.get(thread) {
                super::pool::pin(core);
            }
            barrier.wait();
            let start = (self.clock)();
            (work(thread), start, (self.clock)())
        };
        let run = &run;
        let done: Vec<(f64, f64, f64)> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..self.threads).map(|thread| scope.spawn(move || run(thread))).collect();
            all.into_iter().map(|thread| thread.join().expect("a thread that only computes")).collect()
        });
        let start = done.iter().map(|d| d.1).fold(f64::INFINITY, f64::min);
        let end = done.iter().map(|d| d.2).fold(0.0, f64::max);
        done.iter().map(|d| d.0).sum::<f64>() / (end - start)
    }
}

/// Reads all words; returns the number of bytes.
fn read(words: &[u32]) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: AVX-512 was just detected.
        std::hint::black_box(unsafe { x86::sum(words) });
        return size_of_val(words) as f64;
    }
    std::hint::black_box(words.iter().fold(0u32, |sum, word| sum.wrapping_add(*word)));
    size_of_val(words) as f64
}

fn scalar(rounds: usize) -> f64 {
    let mut sums = [1.0f32; 16];
    for _ in 0..rounds {
        let (a, b) = std::hint::black_box((0.999, 0.001));
        sums.iter_mut().for_each(|sum| *sum = *sum * a + b);
    }
    std::hint::black_box(sums);
    rounds as f64 * 32.0
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::tile::amx::configure;

    /// Independent chains: latency times throughput of any machine so far.
    const CHAINS: usize = 24;

    pub(crate) fn dot(rounds: usize) -> f64 {
        // SAFETY: chosen where AVX-512 BF16 was detected.
        unsafe { dot_loop(rounds) };
        (rounds * CHAINS * 64) as f64
    }

    pub(crate) fn fma(rounds: usize) -> f64 {
        // SAFETY: chosen where AVX-512 was detected.
        unsafe { fma_loop(rounds) };
        (rounds * CHAINS * 32) as f64
    }

    pub(crate) fn fma_256(rounds: usize) -> f64 {
        // SAFETY: chosen where FMA was detected.
        unsafe { fma_256_loop(rounds) };
        (rounds * 12 * 16) as f64
    }

    /// Products of four pairs of tiles in each round, each of 16 × 16 outputs and 32 values of k.
    pub(crate) fn tiles(rounds: usize) -> f64 {
        // SAFETY: chosen where AMX was detected; the program touches tiles alone, and they are configured.
        unsafe {
            configure(32, 16);
            std::arch::asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds.max(1) => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
        (rounds * 4 * 16 * 16 * 32 * 2) as f64
    }

    #[target_feature(enable = "avx,fma")]
    fn fma_256_loop(rounds: usize) {
        let mut sums = [_mm256_setzero_ps(); 12];
        let x = std::hint::black_box(_mm256_set1_ps(0.01));
        for _ in 0..rounds {
            sums.iter_mut().for_each(|sum| *sum = _mm256_fmadd_ps(x, x, *sum));
        }
        std::hint::black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn dot_loop(rounds: usize) {
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        // SAFETY: 512 bits each, any pattern is a value.
        let x: __m512bh = unsafe { std::mem::transmute(std::hint::black_box(_mm512_set1_epi32(0x3c00_3c00))) };
        for _ in 0..rounds {
            sums.iter_mut().for_each(|sum| *sum = _mm512_dpbf16_ps(*sum, x, x));
        }
        std::hint::black_box(sums);
    }

    #[target_feature(enable = "avx512f")]
    fn fma_loop(rounds: usize) {
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        let x = std::hint::black_box(_mm512_set1_ps(0.01));
        for _ in 0..rounds {
            sums.iter_mut().for_each(|sum| *sum = _mm512_fmadd_ps(x, x, *sum));
        }
        std::hint::black_box(sums);
    }

    #[target_feature(enable = "avx512f")]
    pub(crate) fn sum(words: &[u32]) -> i64 {
        let mut sums = [_mm512_setzero_si512(); 4];
        for chunk in words.as_chunks::<64>().0 {
            for (i, sum) in sums.iter_mut().enumerate() {
                let from = chunk[i * 16..].as_ptr();
                _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(4096));
                // SAFETY: sixteen words from `i * 16` on are inside of the chunk.
                *sum = _mm512_add_epi64(*sum, unsafe { _mm512_loadu_si512(from.cast()) });
            }
        }
        let both = _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
        _mm512_reduce_add_epi64(both)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_of_this_machine_has_limits() {
        /// Seconds that go on with every look.
        fn clock() -> f64 {
            use std::sync::atomic::{AtomicU64, Ordering};
            static LOOKS: AtomicU64 = AtomicU64::new(0);
            LOOKS.fetch_add(1, Ordering::Relaxed) as f64
        }
        for path in crate::cpu::CpuDevice::paths_available() {
            let limits = measure(1, &[], path, 1 << 16, clock).expect("64 KiB");
            // One thread looks twice: a second for each run.
            assert!((limits.gigabytes - 65_536.0 / 1e9).abs() < 1e-12, "{limits}");
            assert!(limits.gflops > 0.01 && !limits.instruction.is_empty(), "{limits}");
        }
    }
}
