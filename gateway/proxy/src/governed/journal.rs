//! The ledger's writer: one entry per request, opened when something is reserved for it, settled when it has ended.
//!
//! Requests leave their entries here and go on; one thread writes what has gathered, so that a request pays no commit. What was
//! opened and settled between two commits is written once. A write that fails is tried again, with the same ids: the ledger knows each
//! request by its id, so nothing counts twice. The queue is bounded; entries beyond it are lost and counted (the counters of the limits
//! have them all the same), and limits with `on_store_failure = "closed"` refuse requests while entries wait for too long.
//!
//! A crash loses what began within the last `GATHER` before it. What was open then is settled at the next start by what was
//! reserved for it ([`orphans`](super::orphans)): spent is what nobody can prove unspent.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::orphans::Watch;
use penstock_store::{Entry, LEDGER_BATCH_MAX, OpenEntry, Store, StoreError};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// Time in which entries gather for one commit.
const GATHER: Duration = Duration::from_millis(100);
/// Entries that wait at most: ten seconds of ten thousand requests each.
const WAITING_MAX: usize = 100_000;
/// Longest wait for a write.
const WRITE_MAX: Duration = Duration::from_secs(5);
/// Pause after one that failed.
const PAUSE: Duration = Duration::from_millis(500);

/// Where requests leave their entries.
#[derive(Clone)]
pub(super) struct Journal {
    queue: Arc<Queue>,
    /// This life of this gateway.
    pub(super) gateway: Arc<str>,
}

#[derive(Default)]
struct Queue {
    pending: Mutex<Pending>,
    changed: Notify,
    lost: AtomicU64,
    failing: AtomicBool,
}

#[derive(Default)]
struct Pending {
    opened: HashMap<String, OpenEntry>,
    settled: Vec<Entry>,
    /// What the thread has taken and not written yet.
    writing: usize,
}

impl Journal {
    /// Starts the thread that writes to `store`, and keeps `watch`.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub(super) fn start(store: Arc<dyn Store>, gateway: Arc<str>, watch: Option<Watch>) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let shared = queue.clone();
        std::thread::Builder::new().name("ledger".into()).spawn(move || {
            runtime.block_on(async {
                match watch {
                    Some(watch) => drop(tokio::join!(shared.write(store), watch.keep())),
                    None => shared.write(store).await,
                }
            });
        })?;
        Ok(Self { queue, gateway })
    }

    /// A request begins.
    pub(super) fn open(&self, entry: OpenEntry) {
        let mut pending = self.queue.pending();
        if pending.opened.len() < WAITING_MAX {
            pending.opened.insert(entry.request.clone(), entry);
            drop(pending);
            self.queue.changed.notify_one();
        }
    }

    /// A request has ended.
    pub(super) fn settle(&self, entry: Entry) {
        let mut pending = self.queue.pending();
        pending.opened.remove(&entry.request);
        if pending.settled.len() < WAITING_MAX {
            pending.settled.push(entry);
        } else {
            self.queue.lost.fetch_add(1, Ordering::Relaxed);
        }
        drop(pending);
        self.queue.changed.notify_one();
    }

    /// Whether entries have waited for longer than a write may take.
    pub(super) fn is_failing(&self) -> bool {
        self.queue.failing.load(Ordering::Relaxed)
    }

    /// Whether everything is written.
    pub(super) fn is_idle(&self) -> bool {
        let pending = self.queue.pending();
        pending.opened.is_empty() && pending.settled.is_empty() && pending.writing == 0
    }

    /// Entries that wait, and entries that were lost.
    pub(super) fn counts(&self) -> (usize, u64) {
        let pending = self.queue.pending();
        (pending.opened.len() + pending.settled.len() + pending.writing, self.queue.lost.load(Ordering::Relaxed))
    }
}

impl Queue {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never ends.
    async fn write(&self, store: Arc<dyn Store>) {
        loop {
            self.changed.notified().await;
            sleep(GATHER).await;
            while let Some((opened, settled)) = self.take() {
                let begun = Instant::now();
                while let Err(error) = written(store.as_ref(), &opened, &settled).await {
                    if begun.elapsed() >= WRITE_MAX && !self.failing.swap(true, Ordering::Relaxed) {
                        tracing::error!(%error, "the ledger cannot be written; limits that are closed refuse requests");
                    }
                    sleep(PAUSE).await;
                }
                if self.failing.swap(false, Ordering::Relaxed) {
                    tracing::info!("the ledger is written again");
                }
                self.pending().writing = 0;
            }
        }
    }

    /// What is written next.
    fn take(&self) -> Option<(Vec<OpenEntry>, Vec<Entry>)> {
        let mut pending = self.pending();
        let ids: Vec<String> = pending.opened.keys().take(LEDGER_BATCH_MAX).cloned().collect();
        let opened: Vec<_> = ids.iter().filter_map(|id| pending.opened.remove(id)).collect();
        let count = pending.settled.len().min(LEDGER_BATCH_MAX);
        let settled: Vec<_> = pending.settled.drain(..count).collect();
        pending.writing = opened.len() + settled.len();
        (pending.writing > 0).then_some((opened, settled))
    }
}

async fn written(store: &dyn Store, opened: &[OpenEntry], settled: &[Entry]) -> Result<(), StoreError> {
    let write = async {
        if !opened.is_empty() {
            store.open_entries(opened.to_vec()).await?;
        }
        if !settled.is_empty() {
            store.settle_entries(settled.to_vec()).await?;
        }
        Ok(())
    };
    timeout(WRITE_MAX, write).await.unwrap_or(Err(StoreError::Busy))
}
