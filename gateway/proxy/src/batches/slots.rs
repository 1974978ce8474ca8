//! Concurrency limit of batch lines: as many slots as the config in force says, also when that number changes while
//! lines run.
//!
//! When the number shrinks, running lines go on to their end, and their slots are not given out again.

use std::sync::Mutex;
use std::sync::PoisonError;

use penstock_store::StoreError;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Concurrency limit of the lines of all batches: a semaphore whose size follows the config.
pub(super) struct Slots {
    semaphore: Semaphore,
    count: Mutex<Count>,
}

struct Count {
    /// Slots that exist, given out or not.
    have: usize,
    /// Slots that should exist, by the config.
    want: usize,
}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        Self { semaphore: Semaphore::new(count), count: Mutex::new(Count { have: count, want: count }) }
    }

    /// Sets the number of slots to `want`.
    pub(super) fn resize(&self, want: usize) {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        count.want = want;
        if want > count.have {
            self.semaphore.add_permits(want - count.have);
            count.have = want;
        } else {
            // Permits that are given out are forgotten by the next `take` that gets one.
            count.have -= self.semaphore.forget_permits(count.have - want);
        }
    }

    /// Waits for a slot. Cancel-safe.
    ///
    /// # Errors
    /// The slots are never closed, so there is none.
    pub(super) async fn take(&self) -> Result<SemaphorePermit<'_>, StoreError> {
        loop {
            let slot = self.semaphore.acquire().await.map_err(|_| StoreError::Misuse("slots that were closed"))?;
            let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
            if count.have <= count.want {
                return Ok(slot);
            }
            count.have -= 1;
            slot.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn as_many_run_as_the_last_config_says() {
        let slots = Arc::new(Slots::new(4));
        let running = Arc::new(AtomicUsize::new(0));
        let (release, held) = tokio::sync::watch::channel(0usize);
        let tasks: Vec<_> = (0..100)
            .map(|at| {
                let (slots, running, mut held) = (slots.clone(), running.clone(), held.clone());
                tokio::spawn(async move {
                    let _slot = slots.take().await.expect("never closed");
                    running.fetch_add(1, Ordering::SeqCst);
                    held.wait_for(|released| *released > at).await.expect("the test goes on");
                    running.fetch_sub(1, Ordering::SeqCst);
                })
            })
            .collect();
        for (want, released) in [(4, 0), (9, 0), (2, 20), (0, 60), (1, 60), (5, 60), (5, 97)] {
            slots.resize(want);
            release.send_replace(released);
            for _ in 0..2000 {
                yield_now().await;
            }
            // In the order in which they came: those up to `released` have run, and then as many wait in their slots as there are.
            let expected = if released == 60 && want == 0 { 0 } else { want.min(100 - released) };
            assert_eq!(running.load(Ordering::SeqCst), expected, "{want} {released}");
        }
        release.send_replace(100);
        for task in tasks {
            task.await.expect("done");
        }
    }
}
