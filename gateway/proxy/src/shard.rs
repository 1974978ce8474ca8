//! Which part of something divided a thread uses: memory that two threads write to with every request costs more than what is written.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Parts; threads above as many share.
pub(crate) const COUNT: usize = 16;

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed);
}

/// The part of this thread, below [`COUNT`].
pub(crate) fn of_thread() -> usize {
    THREAD.with(|thread| thread % COUNT)
}
