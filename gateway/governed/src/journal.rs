//! Writer of the ledger: one entry per request, opened at the reservation and settled at the request's end.
//!
//! Requests leave their entries in a queue and go on; one thread writes the queue in batches, so that a request waits
//! for no commit. An open entry is kept once, in the slot of its request, and settling takes it from there: an entry
//! opened and settled between two commits is written once, and nothing is looked up. A failed write is retried with the
//! same ids: the ledger knows each request by its id, so nothing counts twice. The queue is bounded; entries beyond it
//! are lost and counted (the limits' own counters have them all the same), and limits with `on_store_failure =
//! "closed"` refuse requests while entries wait for too long.
//!
//! A crash loses entries of requests that began within the last `GATHER`, or whose write was still failing. Entries
//! open at a crash are settled at the next start with the amounts reserved for them ([`orphans`](super::orphans)): what
//! nobody can prove unspent counts as spent.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::orphans::Watch;
use penstock_store::{Entry, LEDGER_BATCH_MAX, OpenEntry, Store, StoreError};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// Time in which entries gather before one commit writes them.
const GATHER: Duration = Duration::from_millis(100);
/// Most entries that wait: ten seconds at ten thousand requests per second.
const WAITING_MAX: usize = 100_000;
/// Number of waiting entries from which on a pause of the ledger does not hold them back.
const HELD_MAX: usize = WAITING_MAX / 2;
/// Timeout of one write, and the time of failing writes after which the ledger counts as failing.
const WRITE_MAX: Duration = Duration::from_secs(5);
/// Pause before a failed write of the ledger is retried.
const RETRY: Duration = Duration::from_millis(500);

/// Queue of ledger entries from the requests to the thread that writes them.
#[derive(Clone)]
pub(super) struct Journal {
    queue: Arc<Queue>,
    /// Random id of this gateway process, which open entries carry.
    pub(super) gateway: Arc<str>,
}

/// Index of the place that holds a request's open entry.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Slot(usize);

#[derive(Default)]
struct Queue {
    pending: Mutex<Pending>,
    changed: Notify,
    lost: AtomicU64,
    failing: AtomicBool,
}

#[derive(Default)]
struct Pending {
    /// Places of open requests; as many as were ever open at once.
    open: Vec<Place>,
    free: Vec<usize>,
    /// Indexes of places opened since the last commit, each once.
    fresh: Vec<usize>,
    settled: Vec<Entry>,
    /// Number of settled entries that the thread has taken and not written yet.
    writing: usize,
    /// Numbers of settled entries that have ever come, were taken by the thread, and are written.
    settled_count: u64,
    taken_count: u64,
    written_count: u64,
    /// Number of settled entries after which the thread takes no more; `None`: it takes all.
    held_at: Option<u64>,
    /// True once the process ends: a pause holds nothing back any more.
    is_ending: bool,
}

#[derive(Default)]
struct Place {
    entry: Option<OpenEntry>,
    is_fresh: bool,
    /// True if the ledger has the entry, or is being sent it.
    is_written: bool,
}

/// Pause of the ledger after the entries that were settled before it; the next ones wait in the queue until it is dropped.
pub(super) struct Pause<'a> {
    queue: &'a Queue,
    mark: u64,
}

impl Pause<'_> {
    /// Returns true if every entry settled before the pause is written.
    pub(super) fn is_reached(&self) -> bool {
        self.queue.pending().written_count >= self.mark
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        self.queue.pending().held_at = None;
        self.queue.changed.notify_one();
    }
}

/// Opened and settled entries that one write sends to the ledger.
struct Batch {
    opened: Arc<[OpenEntry]>,
    settled: Arc<[Entry]>,
}

impl Journal {
    /// Starts the thread that writes to `store` and runs `watch`.
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

    /// Opens the entry of a request. The caller settles it with the returned slot.
    pub(super) fn open(&self, entry: OpenEntry) -> Slot {
        let mut pending = self.queue.pending();
        let (slot, first) = pending.open(entry);
        drop(pending);
        if first {
            self.queue.changed.notify_one();
        }
        slot
    }

    /// Settles the entry of a request that has ended; `end` turns the opened entry into the settled one.
    pub(super) fn settle(&self, slot: Slot, end: impl FnOnce(OpenEntry) -> Entry) {
        let mut pending = self.queue.pending();
        let Some(opened) = pending.close(slot) else { return };
        if pending.settled.len() >= WAITING_MAX {
            drop(pending);
            self.queue.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        pending.settled.push(end(opened));
        pending.settled_count += 1;
        let is_due = pending.settled.len() == 1 || pending.settled.len() == HELD_MAX;
        drop(pending);
        if is_due {
            self.queue.changed.notify_one();
        }
    }

    /// Pauses the ledger after what is settled by now, so that a reader of it knows which entries it has. One at a time.
    /// A queue that is half full is written all the same, and so is that of a process that ends.
    pub(super) fn pause(&self) -> Pause<'_> {
        let mut pending = self.queue.pending();
        let mark = pending.settled_count;
        pending.held_at = Some(mark);
        drop(pending);
        Pause { queue: &self.queue, mark }
    }

    /// Returns true if writes have been failing for longer than [`WRITE_MAX`].
    pub(super) fn is_failing(&self) -> bool {
        self.queue.failing.load(Ordering::Relaxed)
    }

    /// Returns true if every entry queued so far is written, for a process that ends: what it has not written by then is
    /// lost. So a pause is over with the first call, and no later one holds entries back.
    pub(super) fn is_emptied(&self) -> bool {
        let mut pending = self.queue.pending();
        let was_ending = std::mem::replace(&mut pending.is_ending, true);
        let is_empty = pending.waiting() == 0;
        drop(pending);
        if !was_ending {
            self.queue.changed.notify_one();
        }
        is_empty
    }

    /// Number of entries that wait, and of entries that were lost.
    pub(super) fn counts(&self) -> (usize, u64) {
        (self.queue.pending().waiting(), self.queue.lost.load(Ordering::Relaxed))
    }
}

impl Pending {
    /// Stores an opened entry. True if it is the first since the last commit.
    fn open(&mut self, entry: OpenEntry) -> (Slot, bool) {
        let at = self.free.pop().unwrap_or_else(|| {
            self.open.push(Place::default());
            self.open.len() - 1
        });
        let place = &mut self.open[at];
        (place.entry, place.is_written) = (Some(entry), false);
        let first = self.fresh.is_empty();
        if !std::mem::replace(&mut place.is_fresh, true) {
            self.fresh.push(at);
        }
        (Slot(at), first)
    }

    #[expect(clippy::needless_pass_by_value, reason = "a slot ends here")]
    fn close(&mut self, slot: Slot) -> Option<OpenEntry> {
        self.free.push(slot.0);
        self.open.get_mut(slot.0)?.entry.take()
    }

    /// Next batch, at most [`LEDGER_BATCH_MAX`] entries of each kind.
    fn take(&mut self) -> Option<Batch> {
        let (mut opened, mut looked) = (Vec::new(), 0);
        while looked < self.fresh.len() && opened.len() < LEDGER_BATCH_MAX {
            let place = &mut self.open[self.fresh[looked]];
            looked += 1;
            place.is_fresh = false;
            if let Some(entry) = place.entry.as_ref().filter(|_| !place.is_written) {
                opened.push(entry.clone());
                place.is_written = true;
            }
        }
        self.fresh.drain(..looked);
        let may_take = self.held_at.filter(|_| !self.is_ending && self.settled.len() < HELD_MAX);
        let may_take = may_take.map_or(usize::MAX, |mark| mark.saturating_sub(self.taken_count) as usize);
        let count = self.settled.len().min(LEDGER_BATCH_MAX).min(may_take);
        let settled: Arc<[Entry]> = self.settled.drain(..count).collect();
        self.taken_count += count as u64;
        self.writing = opened.len() + settled.len();
        (self.writing > 0).then(|| Batch { opened: opened.into(), settled })
    }

    /// Number of entries, open or settled, that the ledger does not have yet.
    fn waiting(&self) -> usize {
        let opened = self.fresh.iter().filter(|at| self.open[**at].entry.is_some() && !self.open[**at].is_written);
        opened.count() + self.settled.len() + self.writing
    }
}

impl Queue {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs without end: waits for entries, lets more gather, writes a batch.
    async fn write(&self, store: Arc<dyn Store>) {
        loop {
            self.changed.notified().await;
            sleep(GATHER).await;
            loop {
                let batch = self.pending().take();
                let Some(batch) = batch else { break };
                self.write_batch(store.as_ref(), &batch).await;
                let is_full = batch.settled.len().max(batch.opened.len()) >= LEDGER_BATCH_MAX;
                // After a full batch the next is written at once; else entries gather first, since a commit costs as
                // much for one as for hundreds.
                if !is_full {
                    break;
                }
            }
        }
    }

    async fn write_batch(&self, store: &dyn Store, batch: &Batch) {
        let begun = Instant::now();
        while let Err(error) = written(store, batch).await {
            if begun.elapsed() >= WRITE_MAX && !self.failing.swap(true, Ordering::Relaxed) {
                tracing::error!(%error, "the ledger cannot be written: limits with on_store_failure = closed refuse requests");
            }
            sleep(RETRY).await;
        }
        if self.failing.swap(false, Ordering::Relaxed) {
            tracing::info!("the ledger is written again");
        }
        let mut pending = self.pending();
        pending.writing = 0;
        pending.written_count += batch.settled.len() as u64;
    }
}

/// Writes both kinds concurrently, so that a store that groups commits makes one: no request is in both.
async fn written(store: &dyn Store, Batch { opened, settled }: &Batch) -> Result<(), StoreError> {
    let open = async {
        match opened.is_empty() {
            true => Ok(()),
            false => store.open_entries(opened.clone()).await,
        }
    };
    let settle = async {
        match settled.is_empty() {
            true => Ok(()),
            false => store.settle_entries(settled.clone()).await.map(drop),
        }
    };
    let write = async { tokio::try_join!(open, settle).map(drop) };
    timeout(WRITE_MAX, write).await.unwrap_or(Err(StoreError::Busy))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(number: u64) -> OpenEntry {
        OpenEntry { at: 1, request: format!("r{number}"), ..OpenEntry::default() }
    }

    fn end(opened: OpenEntry) -> Entry {
        Entry { opened, ..Entry::default() }
    }

    fn ids(batch: &Batch) -> (Vec<&str>, Vec<&str>) {
        let opened = batch.opened.iter().map(|entry| entry.request.as_str());
        (opened.collect(), batch.settled.iter().map(|entry| entry.opened.request.as_str()).collect())
    }

    #[test]
    fn what_ends_between_two_commits_is_written_once() {
        let mut pending = Pending::default();
        let (short, first) = pending.open(entry(1));
        let (long, second) = pending.open(entry(2));
        assert!(first && !second, "the thread is woken once");
        let closed = pending.close(short).map(end);
        pending.settled.extend(closed);
        assert_eq!(pending.waiting(), 2);
        let batch = pending.take().expect("something");
        assert_eq!(ids(&batch), (vec!["r2"], vec!["r1"]));
        assert_eq!(pending.waiting(), 2, "it is being written");
        pending.writing = 0;
        assert!(pending.waiting() == 0 && pending.take().is_none(), "what is open and written does not wait");
        let closed = pending.close(long).map(end);
        pending.settled.extend(closed);
        assert_eq!(ids(&pending.take().expect("its end")), (vec![], vec!["r2"]));
    }

    #[test]
    fn a_place_that_is_used_again_is_written_for_whom_it_is_now() {
        let mut pending = Pending::default();
        for number in 0..5 {
            let (slot, _) = pending.open(entry(number));
            assert_eq!(pending.close(slot).map(|entry| entry.request), Some(format!("r{number}")));
        }
        assert_eq!((pending.open.len(), pending.fresh.len()), (1, 1));
        let (slot, _) = pending.open(entry(7));
        assert_eq!(ids(&pending.take().expect("one")), (vec!["r7"], vec![]));
        pending.close(slot);
        let _open = pending.open(entry(8));
        assert_eq!(ids(&pending.take().expect("another")), (vec!["r8"], vec![]));
    }

    #[test]
    fn what_is_written_at_once_is_bounded() {
        let mut pending = Pending::default();
        let slots: Vec<_> = (0..LEDGER_BATCH_MAX as u64 + 5).map(|number| pending.open(entry(number)).0).collect();
        let sizes = |batch: Batch| (batch.opened.len(), batch.settled.len());
        assert_eq!(pending.take().map(sizes), Some((LEDGER_BATCH_MAX, 0)));
        assert_eq!(pending.take().map(sizes), Some((5, 0)));
        for slot in slots {
            let closed = pending.close(slot).map(end);
            pending.settled.extend(closed);
        }
        assert_eq!(pending.take().map(sizes), Some((0, LEDGER_BATCH_MAX)));
        assert_eq!(pending.take().map(sizes), Some((0, 5)));
    }
}
