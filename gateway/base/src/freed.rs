//! Notice of freed memory, which an allocator keeps for a while unless it is told to return it.
//!
//! Whoever holds large buffers under a budget counts here what it lets go. A thread of its own returns the memory, so
//! that no request waits for it, and so that what the process has resident stays near what its budgets say.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

/// Freed bytes from which it pays to return them.
const LEAST_BYTES: usize = 8 << 20;
/// Time before a return: a buffer is freed a moment after or before its bytes are counted, and others follow.
const PAUSE: Duration = Duration::from_millis(5);

static FREED: AtomicUsize = AtomicUsize::new(0);
static KEEPER: OnceLock<Thread> = OnceLock::new();

/// Counts `bytes` of buffers that are freed now.
pub fn count(bytes: usize) {
    let before = FREED.fetch_add(bytes, Ordering::Relaxed);
    if before + bytes >= LEAST_BYTES
        && let Some(keeper) = KEEPER.get()
    {
        keeper.unpark();
    }
}

/// Starts the thread that calls `give_back` when much memory was freed. A second call changes nothing.
///
/// # Errors
/// The system gives no thread.
pub fn keep(give_back: fn()) -> io::Result<()> {
    if KEEPER.get().is_some() {
        return Ok(());
    }
    let keeper = thread::Builder::new().name("freed-memory".into()).spawn(move || {
        loop {
            thread::park();
            while FREED.load(Ordering::Relaxed) >= LEAST_BYTES {
                // Before the pause: what is counted during it may be freed behind this return, and gets another one.
                FREED.store(0, Ordering::Relaxed);
                thread::sleep(PAUSE);
                give_back();
            }
        }
    })?;
    let _ = KEEPER.set(keeper.thread().clone());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    static CALLS: AtomicUsize = AtomicUsize::new(0);

    #[test]
    fn much_freed_memory_is_given_back_and_little_is_not() {
        let counted = || {
            CALLS.fetch_add(1, Ordering::Relaxed);
        };
        keep(counted).expect("a thread");
        count(LEAST_BYTES / 2);
        thread::sleep(4 * PAUSE);
        assert_eq!(CALLS.load(Ordering::Relaxed), 0);
        for round in 1..=3 {
            count(LEAST_BYTES);
            let due = Instant::now() + Duration::from_secs(20);
            while CALLS.load(Ordering::Relaxed) < round && Instant::now() < due {
                thread::sleep(PAUSE);
            }
            assert_eq!(CALLS.load(Ordering::Relaxed), round);
        }
    }
}
