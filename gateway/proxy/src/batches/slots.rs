//! Concurrency limit of batch lines: as many slots as the config in force says, also when that number changes while
//! lines run.
//!
//! When the number shrinks, running lines go on to their end, and their slots are not given out again. Tenants take
//! turns at free slots, however many batches and lines each of them has waiting.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use penstock_store::{StoreError, Tenant};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Concurrency limit of the lines of all batches: a semaphore whose size follows the config.
pub(super) struct Slots {
    semaphore: Semaphore,
    count: Mutex<Count>,
    /// Queues of tenants with batches that run.
    queues: Mutex<HashMap<Tenant, Weak<Queue>>>,
}

/// Lines of one tenant that wait for a slot: the first of them stands in the queue of all tenants.
pub(super) type Queue = tokio::sync::Mutex<()>;

struct Count {
    /// Slots that exist, given out or not.
    have: usize,
    /// Slots that should exist, by the config.
    want: usize,
}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        let semaphore = Semaphore::new(count);
        Self { semaphore, count: Mutex::new(Count { have: count, want: count }), queues: Mutex::default() }
    }

    /// Queue of a tenant's lines, the same for all of its batches.
    pub(super) fn queue(&self, tenant: &Tenant) -> Arc<Queue> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get(tenant).and_then(Weak::upgrade) {
            return queue;
        }
        queues.retain(|_, queue| queue.strong_count() > 0);
        let queue = Arc::<Queue>::default();
        queues.insert(tenant.clone(), Arc::downgrade(&queue));
        queue
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

    /// Waits for a slot, in the queue of a tenant first. Cancel-safe.
    ///
    /// # Errors
    /// The slots are never closed, so there is none.
    pub(super) async fn take(&self, queue: &Queue) -> Result<SemaphorePermit<'_>, StoreError> {
        let _first = queue.lock().await;
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
        let queue = slots.queue(&Tenant::new("a"));
        let running = Arc::new(AtomicUsize::new(0));
        let (release, held) = tokio::sync::watch::channel(0usize);
        let tasks: Vec<_> = (0..100)
            .map(|at| {
                let (slots, queue) = (slots.clone(), queue.clone());
                let (running, mut held) = (running.clone(), held.clone());
                tokio::spawn(async move {
                    let _slot = slots.take(&queue).await.expect("never closed");
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

    #[tokio::test]
    async fn tenants_take_turns() {
        let slots = Arc::new(Slots::new(1));
        let got = Arc::new(Mutex::new(Vec::new()));
        let first = slots.take(&Queue::default()).await.expect("never closed");
        let tasks: Vec<_> = ["a"; 100]
            .into_iter()
            .chain(["b"; 3])
            .map(|name| {
                let (slots, got, queue) = (slots.clone(), got.clone(), slots.queue(&Tenant::new(name)));
                tokio::spawn(async move {
                    let _slot = slots.take(&queue).await.expect("never closed");
                    got.lock().expect("no panic").push(name);
                })
            })
            .collect();
        for _ in 0..200 {
            yield_now().await;
        }
        drop(first);
        for task in tasks {
            task.await.expect("done");
        }
        let got = got.lock().expect("no panic");
        assert!(got[..8].iter().filter(|name| **name == "b").count() == 3, "{:?}", &got[..8]);
    }
}
