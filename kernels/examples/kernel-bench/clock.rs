//! Clocks in seconds.

/// Clock of a measurement, [`wall`] or [`cpu`].
pub(crate) type Clock = fn() -> f64;

/// Clock for `threads` threads: one thread is measured by the time that it computes, so that other work on the machine counts less.
pub(crate) fn of(threads: usize) -> Clock {
    if threads == 1 { cpu } else { wall }
}

/// Time that passes.
fn wall() -> f64 {
    seconds(libc::CLOCK_MONOTONIC)
}

/// Time that the calling thread computes: what it waits for a core that others use does not count. Contention for memory does.
fn cpu() -> f64 {
    seconds(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn seconds(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock is one of the system's, and `time` is a place for the result.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
