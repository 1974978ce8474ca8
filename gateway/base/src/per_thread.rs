//! Per-thread shard index, against false sharing between cores: a cache line that two threads write to with every
//! request costs more than the write itself.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of shards; with more threads than that, some share one.
pub const COUNT: usize = 16;

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed);
}

/// Shard index of this thread, below [`COUNT`].
pub fn of_thread() -> usize {
    THREAD.with(|thread| thread % COUNT)
}
