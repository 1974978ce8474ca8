//! Global allocator of the binary, and the return of freed memory to the system.
//!
//! mimalloc keeps freed pages for a second, and looks at that second only when a thread has allocated many times again:
//! large buffers that were freed stay resident beside those that replaced them, and for longer in a quiet process.
//! [`give_back`] returns them now. A purge of every freed page at once (`MIMALLOC_PURGE_DELAY=0`) needs no such call,
//! but costs a small request a tenth more CPU time.

pub use mimalloc::MiMalloc as Allocator;

/// Returns to the system all pages of the process that hold no allocation. Takes about as long as unmapping them does.
pub fn give_back() {
    // A thread that never allocated has no heap, and the call below would do nothing.
    std::hint::black_box(Box::new(0_u8));
    // SAFETY: the function has no preconditions; it may be called by any thread at any time.
    unsafe { libmimalloc_sys::mi_collect(true) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: Allocator = Allocator;

    const MIB: usize = 1 << 20;

    /// Resident bytes of this process without mapped files.
    fn resident() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or_default();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or_default() * 1024
    }

    #[test]
    fn freed_buffers_of_other_threads_go_back() {
        let before = resident();
        let buffers = || (0..8).map(|_| vec![1_u8; 8 * MIB]).collect::<Vec<_>>();
        let made: Vec<_> = std::thread::scope(|scope| {
            let threads = [scope.spawn(buffers), scope.spawn(buffers)];
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        assert!(resident() > before + 100 * MIB);
        drop(made);
        std::thread::scope(|scope| scope.spawn(give_back).join()).unwrap();
        assert!(resident() < before + 16 * MIB, "{} MiB are still resident", (resident() - before) / MIB);
    }
}
