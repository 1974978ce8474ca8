//! Writer of the ledger: one entry per request, opened at the reservation and settled at the request's end.
//!
//! Requests leave their entries in a queue and go on; one thread writes the queue in batches, so that a request waits
//! for no commit. An open entry is kept once, in the slot of its request, and settling takes it from there: an entry
//! opened and settled between two commits is written once, and nothing is looked up. A failed write is retried with the
//! same ids: the ledger knows each request by its id, so nothing counts twice. The queue is bounded; entries beyond it
//! are lost and counted (the limits' own counters have them all the same), and limits with `on_store_failure =
//! "closed"` refuse requests while entries wait for too long. A write that panics is retried as well, [`PANICS_MAX`]
//! times: then its entries are lost and counted, and the next ones are written. Limits are closed until a write succeeds.
//!
//! A crash loses entries of requests that began within the last `GATHER`, or whose write was still failing. Entries
//! open at a crash are settled at the next start with the amounts reserved for them ([`orphans`](super::orphans)): what
//! nobody can prove unspent counts as spent.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::orphans::{BEAT, Watch};
use penstock_base::panics::{caught, supervised};
use penstock_store::{Entry, LEDGER_BATCH_MAX, Ledger, OpenEntry, StoreError};
use tokio::sync::Notify;
use tokio::time::sleep;

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
/// Most panics in the writing of one batch, after which its entries are lost: what they have in them would panic again.
const PANICS_MAX: u32 = 5;

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
    pub(super) fn start(store: Arc<dyn Ledger>, gateway: Arc<str>, watch: Option<Watch>) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let shared = queue.clone();
        std::thread::Builder::new().name("ledger".into()).spawn(move || {
            let write = supervised("ledger", || shared.write(store.as_ref()), || shared.pause_after_panic());
            runtime.block_on(async {
                match watch {
                    Some(watch) => {
                        let keep = supervised("heartbeat", || watch.keep(), || sleep(BEAT));
                        let _ = tokio::join!(write, keep);
                    }
                    None => write.await,
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

    /// Returns true if writes have been failing for longer than [`WRITE_MAX`], or since a panic, and none has succeeded since.
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

    /// Ends the writing of a batch.
    fn end(&mut self, batch: &Batch) {
        self.writing = 0;
        self.written_count += batch.settled.len() as u64;
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
    async fn write(&self, store: &dyn Ledger) {
        // What waits since before a panic woke nobody.
        self.changed.notify_one();
        loop {
            self.changed.notified().await;
            sleep(GATHER).await;
            loop {
                let batch = self.pending().take();
                let Some(batch) = batch else {
                    if !self.failing.load(Ordering::Relaxed) || self.probe(store).await {
                        break;
                    }
                    sleep(RETRY).await;
                    continue;
                };
                let is_written = self.write_batch(store, &batch).await;
                let is_full = batch.settled.len().max(batch.opened.len()) >= LEDGER_BATCH_MAX;
                // After a full batch the next is written at once; else entries gather first, since a commit costs as
                // much for one as for hundreds.
                if is_written && !is_full {
                    break;
                }
            }
        }
    }

    /// Writes a batch, again and again while the store fails. False if the batch is lost: it panicked too often.
    async fn write_batch(&self, store: &dyn Ledger, batch: &Batch) -> bool {
        let (begun, mut panics) = (Instant::now(), 0);
        loop {
            match caught(written(store, batch)).await {
                Ok(Ok(())) => break,
                Ok(Err(error)) if begun.elapsed() >= WRITE_MAX => self.fails(&error.to_string()),
                Ok(Err(_)) => {}
                Err(panic) => {
                    self.fails(&format!("panic: {panic}"));
                    panics += 1;
                    if panics >= PANICS_MAX {
                        self.lose(batch);
                        return false;
                    }
                }
            }
            sleep(RETRY).await;
        }
        self.works();
        self.pending().end(batch);
        true
    }

    /// Sends the ledger a write without entries. True if it succeeds, as the next ones then do: after entries were lost,
    /// others may not come while closed limits refuse requests.
    async fn probe(&self, store: &dyn Ledger) -> bool {
        let write = StoreError::in_time(WRITE_MAX, store.settle_entries(Arc::<[Entry]>::default()));
        let is_written = matches!(caught(write).await, Ok(Ok(_)));
        if is_written {
            self.works();
        }
        is_written
    }

    fn fails(&self, error: &str) {
        if !self.failing.swap(true, Ordering::Relaxed) {
            tracing::error!(
                error,
                "the ledger cannot be written: limits with on_store_failure = closed refuse requests"
            );
        }
    }

    fn works(&self) {
        if self.failing.swap(false, Ordering::Relaxed) {
            tracing::info!("the ledger is written again");
        }
    }

    /// Gives up a batch. Entries that it opens are written when their requests end, and the settled ones are lost.
    fn lose(&self, batch: &Batch) {
        let (settled, opened) = (batch.settled.len(), batch.opened.len());
        self.lost.fetch_add(settled as u64, Ordering::Relaxed);
        tracing::error!(settled, opened, "entries of the ledger are lost: writing them panics");
        self.pending().end(batch);
    }

    async fn pause_after_panic(&self) {
        self.fails("panic");
        sleep(RETRY).await;
    }
}

/// Writes both kinds concurrently, so that a store that groups commits makes one: no request is in both.
async fn written(store: &dyn Ledger, Batch { opened, settled }: &Batch) -> Result<(), StoreError> {
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
    StoreError::in_time(WRITE_MAX, write).await
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use penstock_store::{EntryFilter, Listing, Page, Sqlite, SqliteOptions, UsageQuery, UsageRow};

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

    /// Ledger that writes what it is sent, and then panics as often as it is to.
    struct Panicking {
        inner: Sqlite,
        panics: AtomicU64,
    }

    impl Panicking {
        fn new(panics: u64) -> Arc<Self> {
            let inner = Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("a database");
            Arc::new(Self { inner, panics: panics.into() })
        }

        fn answer<T>(&self, answer: T) -> T {
            let left = self.panics.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            assert!(left.is_err(), "as a test");
            answer
        }

        /// Number of settled entries, and their cost.
        async fn sums(&self) -> (u64, u64) {
            let filter = EntryFilter { until: u64::MAX >> 1, ..EntryFilter::default() };
            let query = UsageQuery { filter, limit: 1, ..UsageQuery::default() };
            let sums = self.inner.usage(&query).await.expect("summed").items;
            sums.first().map_or((0, 0), |row| (row.requests, row.micro_usd))
        }
    }

    #[async_trait]
    impl Ledger for Panicking {
        async fn open_entries(&self, entries: Arc<[OpenEntry]>) -> Result<(), StoreError> {
            self.answer(self.inner.open_entries(entries).await)
        }

        async fn settle_entries(&self, entries: Arc<[Entry]>) -> Result<Vec<bool>, StoreError> {
            self.answer(self.inner.settle_entries(entries).await)
        }

        async fn orphans(&self, before: u64, gateway: Option<&str>, limit: u32) -> Result<Vec<OpenEntry>, StoreError> {
            self.inner.orphans(before, gateway, limit).await
        }

        async fn alive(&self, gateway: &str, now: u64) -> Result<(), StoreError> {
            self.inner.alive(gateway, now).await
        }

        async fn left(&self, before: u64, ancient: u64, limit: u32) -> Result<Vec<OpenEntry>, StoreError> {
            self.inner.left(before, ancient, limit).await
        }

        async fn entry(&self, at: u64, request: &str) -> Result<Option<Entry>, StoreError> {
            self.inner.entry(at, request).await
        }

        async fn entries(&self, filter: &EntryFilter, page: &Page) -> Result<Listing<Entry>, StoreError> {
            self.inner.entries(filter, page).await
        }

        async fn usage(&self, query: &UsageQuery) -> Result<Listing<UsageRow>, StoreError> {
            self.inner.usage(query).await
        }

        async fn sweep_entries(&self, before: u64) -> Result<u64, StoreError> {
            self.inner.sweep_entries(before).await
        }
    }

    /// Opens and settles the entries of requests that cost 7 each.
    fn requests(journal: &Journal, numbers: std::ops::Range<u64>) {
        for number in numbers {
            let slot = journal.open(entry(number));
            journal.settle(slot, |opened| Entry { opened, micro_usd: 7, ..Entry::default() });
        }
    }

    async fn until(what: &str, is_done: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_done() {
            assert!(began.elapsed() < Duration::from_secs(30), "{what}");
            sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn a_write_that_panics_is_seen_and_tried_again_and_counts_once() {
        let store = Panicking::new(2);
        let journal = Journal::start(store.clone(), "g".into(), None).expect("a thread");
        requests(&journal, 0..3);
        until("closed limits refuse", || journal.is_failing()).await;
        assert_eq!(journal.counts(), (3, 0), "they wait");
        until("written again", || !journal.is_failing()).await;
        requests(&journal, 3..5);
        until("the thread goes on", || journal.is_emptied()).await;
        assert_eq!((store.sums().await, journal.counts()), ((5, 35), (0, 0)));
    }

    /// The entries that wait behind those that panic are written, and a pause of the ledger ends.
    #[tokio::test]
    async fn entries_that_always_panic_are_given_up_and_counted() {
        let store = Panicking::new(PANICS_MAX.into());
        let journal = Journal::start(store.clone(), "g".into(), None).expect("a thread");
        let open = journal.open(entry(100));
        requests(&journal, 0..3);
        until("closed limits refuse", || journal.is_failing()).await;
        requests(&journal, 3..5);
        until("three are lost", || journal.counts() == (0, 3) && !journal.is_failing()).await;
        assert!(journal.pause().is_reached());
        journal.settle(open, |opened| Entry { opened, micro_usd: 7, ..Entry::default() });
        until("the thread goes on", || journal.is_emptied()).await;
        assert_eq!(journal.counts(), (0, 3));
        for request in ["r3", "r4", "r100"] {
            let known = store.entry(1, request).await.expect("read");
            assert_eq!(known.map(|entry| entry.micro_usd), Some(7), "{request}");
        }
    }

    /// Nothing waits behind the entries that are lost, and nothing comes.
    #[tokio::test]
    async fn a_loss_does_not_open_closed_limits_before_a_write_succeeds() {
        let store = Panicking::new(u64::MAX);
        let journal = Journal::start(store.clone(), "g".into(), None).expect("a thread");
        requests(&journal, 0..3);
        until("three are lost", || journal.counts() == (0, 3)).await;
        sleep(2 * RETRY).await;
        assert!(journal.is_failing(), "nothing was written");
        store.panics.store(0, Ordering::Relaxed);
        until("closed limits open", || !journal.is_failing()).await;
        assert_eq!(journal.counts(), (0, 3));
        requests(&journal, 3..4);
        until("the thread goes on", || journal.is_emptied()).await;
        let known = store.entry(1, "r3").await.expect("read");
        assert_eq!(known.map(|entry| entry.micro_usd), Some(7));
    }
}
