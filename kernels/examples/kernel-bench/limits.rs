//! Limits of the machine: arithmetic from registers, and reading memory that no cache holds.

use std::fmt;
use std::sync::Barrier;

use penstock_kernels::cpu::Path;
use penstock_kernels::host::Arena;

/// Medians over several runs, all threads together.
pub(crate) struct Limit {
    /// Rate of the path's multiply-adds, two operations each.
    pub(crate) gflops: f64,
    /// Rate of reading 1 GiB of memory, in gigabytes per second.
    pub(crate) gigabytes: f64,
    instruction: &'static str,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "limits {:.0} GFLOP/s ({}), {:.1} GB/s (1 GiB)", self.gflops, self.instruction, self.gigabytes)
    }
}

/// Clock in seconds.
pub(crate) type Clock = fn() -> f64;

/// Time that passes.
pub(crate) fn wall() -> f64 {
    seconds(libc::CLOCK_MONOTONIC)
}

/// Time that the calling thread computes: what it waits for a core that others use does not count. Contention for memory does.
pub(crate) fn cpu() -> f64 {
    seconds(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn seconds(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock is one of the system's, and `time` is a place for the result.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Measures compute and memory limits of the machine, with `threads` threads and the instructions of `path`. `clock`: comparable
/// between threads if there are several.
pub(crate) fn measure(threads: usize, path: Path, clock: Clock) -> Limit {
    let (instruction, work): (_, fn(usize) -> f64) = match path {
        #[cfg(target_arch = "x86_64")]
        Path::Avx512Bf16 => ("vdpbf16ps", x86::dot),
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 => ("vfmadd 512", x86::fma),
        #[cfg(target_arch = "x86_64")]
        _ if is_x86_feature_detected!("fma") => ("vfmadd 256", x86::fma_256),
        _ => ("scalar multiply-add", scalar),
    };
    let rounds = 4_000_000;
    let gflops = median(5, || together(threads, clock, |_| work(rounds)) / 1e9);
    let words = (1 << 30) / 4;
    let mut memory = Arena::default().alloc::<u32>(words, "the memory limit").expect("1 GiB");
    memory.fill(1);
    let part = words / threads;
    let gigabytes = median(7, || together(threads, clock, |thread| read(&memory[thread * part..][..part])) / 1e9);
    Limit { gflops, gigabytes, instruction }
}

fn median(runs: usize, run: impl FnMut() -> f64) -> f64 {
    let mut run = run;
    let mut all: Vec<f64> = (0..runs).map(|_| run()).collect();
    all.sort_by(f64::total_cmp);
    all[runs / 2]
}

/// Rate of all threads together, started at the same time.
fn together(threads: usize, clock: Clock, work: impl Fn(usize) -> f64 + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let run = |thread| {
        pin(thread);
        barrier.wait();
        let start = clock();
        (work(thread), start, clock())
    };
    let run = &run;
    let done: Vec<(f64, f64, f64)> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        all.into_iter().map(|thread| thread.join().expect("a thread that only computes")).collect()
    });
    let start = done.iter().map(|d| d.1).fold(f64::INFINITY, f64::min);
    let end = done.iter().map(|d| d.2).fold(0.0, f64::max);
    done.iter().map(|d| d.0).sum::<f64>() / (end - start)
}

/// Pins the thread: it inherits the one core of its parent, which the device has pinned.
fn pin(core: usize) {
    // SAFETY: an all-zero cpu_set_t is a valid empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the number is below CPU_SETSIZE on any machine that has so few threads.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: pid 0 is the calling thread; the set is valid and of the size given.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) };
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

    /// Independent chains: latency times throughput of any machine so far.
    const CHAINS: usize = 24;

    pub(crate) fn dot(rounds: usize) -> f64 {
        // SAFETY: chosen for the path whose device could be made.
        unsafe { dot_loop(rounds) };
        (rounds * CHAINS * 64) as f64
    }

    pub(crate) fn fma(rounds: usize) -> f64 {
        // SAFETY: chosen for the path whose device could be made.
        unsafe { fma_loop(rounds) };
        (rounds * CHAINS * 32) as f64
    }

    pub(crate) fn fma_256(rounds: usize) -> f64 {
        // SAFETY: chosen where FMA was detected.
        unsafe { fma_256_loop(rounds) };
        (rounds * 12 * 16) as f64
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
