//! Restore of this gateway's own counters at its start: days and months go on from the ledger.
//!
//! The start waits until everything is read, a try has failed, or [`SUMMED_MAX`] has passed. The rest is read behind it,
//! again and again until all of it is there, and added to what was counted meanwhile: only entries from before the
//! first request of this process are summed then. A limit whose use is not read yet counts from zero until it is; one with
//! `on_store_failure = "closed"` refuses its requests.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use penstock_govern::{Claim, Span};
use penstock_store::{Keys, Ledger, Store, StoreError};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::restore::{ALWAYS, DOUBLINGS_MAX, InForce, Known, Part, SUMMED_MAX, Sum, parts, sum};
use super::{Governor, orphans};
use penstock_base::clock;
use penstock_base::panics::caught;

/// Pause before what could not be read is asked for again.
const AGAIN: Duration = Duration::from_secs(5);
/// Interval at which the log says that the ledger still cannot be read.
const SAY: Duration = Duration::from_secs(60);

/// Reader of the ledger for the counters of one process.
pub(super) struct AtStart {
    governor: Weak<Governor>,
    ledger: Arc<dyn Ledger>,
    keys: Arc<dyn Keys>,
    /// Limits in force at the start.
    in_force: InForce,
    /// Id of this process in the ledger.
    gateway: Arc<str>,
    /// True if entries that are open may belong to other gateways of the store.
    is_shared: bool,
    progress: Mutex<Progress>,
    /// Second from which on this process counts its requests itself; [`ALWAYS`]: it serves none yet.
    counts_from: AtomicU64,
    /// Signal that a try has failed.
    failed: Notify,
}

#[derive(Default)]
struct Progress {
    /// True once the entries of dead processes are settled, which the sums then have.
    has_orphans: bool,
    /// Limits and spans whose use is in the counters.
    done: Vec<(Arc<str>, Span)>,
    /// Number of tries in which a sum took all its time.
    late: u32,
}

impl AtStart {
    pub(super) fn new(
        governor: &Arc<Governor>,
        store: &Arc<dyn Store>,
        in_force: InForce,
        gateway: Arc<str>,
        is_shared: bool,
    ) -> Self {
        Self::of(governor, store.clone(), store.clone(), in_force, gateway, is_shared)
    }

    fn of(
        governor: &Arc<Governor>,
        ledger: Arc<dyn Ledger>,
        keys: Arc<dyn Keys>,
        in_force: InForce,
        gateway: Arc<str>,
        is_shared: bool,
    ) -> Self {
        let unread = parts(&in_force).into_iter().map(|part| part.limit.id.clone()).collect();
        governor.unread.store(Arc::new(unread));
        let governor = Arc::downgrade(governor);
        let (progress, failed) = (Mutex::default(), Notify::new());
        let counts_from = AtomicU64::new(ALWAYS);
        Self { governor, ledger, keys, in_force, gateway, is_shared, progress, counts_from, failed }
    }

    /// Waits for `run` as long as the start does. `false`: this process serves now, and the rest is to be read behind it.
    pub(super) async fn wait(&self, run: &mut (impl Future<Output = ()> + Unpin)) -> bool {
        let is_done = tokio::select! {
            biased;
            () = run => true,
            () = self.failed.notified() => false,
            () = sleep(SUMMED_MAX) => false,
        };
        if !is_done {
            self.counts_from.store(clock::unix_seconds(), Ordering::Release);
            let done = self.progress().done.len();
            let all = parts(&self.in_force).len();
            tracing::error!(
                done,
                all,
                "the gateway serves before the ledger is read: limits count from zero until it is, and those with on_store_failure = closed refuse requests"
            );
        }
        is_done
    }

    /// Runs until the counters have everything, or the gateway is gone.
    pub(super) async fn run(&self) {
        let mut said: Option<Instant> = None;
        loop {
            let late = self.progress().late;
            let attempt = self.attempt(SUMMED_MAX * 2_u32.pow(late.min(DOUBLINGS_MAX)));
            let read = caught(attempt).await.unwrap_or_else(|panic| Err(StoreError::Broken(format!("panic: {panic}"))));
            let Err(error) = read else { break };
            if self.governor.strong_count() == 0 {
                return;
            }
            if said.is_none_or(|said| said.elapsed() >= SAY) {
                said = Some(Instant::now());
                tracing::warn!(%error, done = self.progress().done.len(), all = parts(&self.in_force).len(), "the use of limits could not be read from the ledger: it is tried again");
            }
            self.failed.notify_one();
            sleep(AGAIN).await;
        }
        if self.counts_from.load(Ordering::Acquire) != ALWAYS {
            tracing::info!("the ledger is read: limits go on with what was used before this process");
        }
    }

    /// Settles the entries of dead processes, and then reads what is missing: a sum that fails or takes longer than `allowed`
    /// does not keep the others back.
    async fn attempt(&self, allowed: Duration) -> Result<(), StoreError> {
        if !self.progress().has_orphans {
            let began = Instant::now();
            let settled = StoreError::in_time(allowed, self.settle_orphans()).await.inspect_err(|error| {
                self.progress().late += u32::from(is_late(error, began, allowed));
            })?;
            if let Some(governor) = self.governor.upgrade() {
                governor.assumed.fetch_add(settled, Ordering::Relaxed);
            }
            self.progress().has_orphans = true;
        }
        let mut known = Known::new(self.keys.as_ref());
        let (mut outcome, mut has_late) = (Ok(()), false);
        for part in parts(&self.in_force) {
            let name = (part.limit.id.clone(), part.span);
            if self.progress().done.contains(&name) {
                continue;
            }
            let (began, mut sums) = (Instant::now(), Vec::new());
            let mut take = |sum: Sum| sums.push(sum);
            let until = || self.counts_from.load(Ordering::Acquire);
            let read = sum(self.ledger.as_ref(), &mut known, &self.in_force, &part, allowed, &until, &mut take).await;
            match read {
                Ok(()) if parts(&self.in_force).contains(&part) => {
                    self.count(&sums);
                    self.progress().done.push(name);
                    self.note_read(&part.limit.id);
                }
                // The day or month has ended meanwhile.
                Ok(()) => outcome = outcome.and(Err(StoreError::Busy)),
                Err(error) => {
                    has_late |= is_late(&error, began, allowed);
                    outcome = outcome.and(Err(error));
                }
            }
        }
        self.progress().late += u32::from(has_late);
        outcome
    }

    /// Number of entries of dead processes that were settled with the amounts reserved for them.
    async fn settle_orphans(&self) -> Result<u64, StoreError> {
        let (ledger, now) = (self.ledger.as_ref(), clock::unix_seconds());
        match self.is_shared {
            // An open entry may belong to another gateway that lives.
            true => orphans::settle_left(ledger, now, &self.gateway).await,
            // All open entries are from before this process, even with timestamps of a clock that was ahead.
            false => orphans::settle(ledger, now + 86_400, &self.gateway).await,
        }
    }

    fn count(&self, sums: &[Sum]) {
        let Some(governor) = self.governor.upgrade() else { return };
        let (mut state, now) = governor.state();
        // Counters that were taken over have what the ledger has.
        if state.is_imported {
            return;
        }
        for Sum { limit, subject, measure, amount, .. } in sums {
            let claim = Claim { limit, subject, measure: *measure, amount: *amount, tag: 0 };
            state.book.restore(&claim, now);
        }
    }

    /// Notes that a limit has its use, if nothing of it is left to be read.
    fn note_read(&self, limit: &Arc<str>) {
        let (Some(governor), progress) = (self.governor.upgrade(), self.progress()) else { return };
        let is_done = |part: &Part| progress.done.contains(&(part.limit.id.clone(), part.span));
        if parts(&self.in_force).iter().filter(|part| part.limit.id == *limit).all(is_done) {
            governor.unread.rcu(|unread| {
                let mut unread = HashSet::clone(unread);
                unread.remove(limit);
                unread
            });
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns true if a question took all the time that it was allowed: one that is busy before does not say that it needs more.
fn is_late(error: &StoreError, began: Instant, allowed: Duration) -> bool {
    *error == StoreError::Busy && began.elapsed() >= allowed
}

impl Governor {
    /// Returns true if a limit counts from zero until the ledger is read: a process that took over these counters would never
    /// read the rest.
    pub fn is_reading(&self) -> bool {
        !self.unread.load().is_empty() && self.shared.get().is_none()
    }

    /// Returns true if what a limit counts in a day or month is not read from the ledger yet, and no other store counts it.
    pub(super) fn is_unread(&self, limit: &str) -> bool {
        self.is_reading() && self.unread.load().contains(limit)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use penstock_govern::{Limit, OnStoreFailure};

    use super::super::restore::tag;
    use super::super::restore::tests::{Slow, asked, limit, nobody};
    use super::*;

    fn closed(id: &str) -> Arc<Limit> {
        Arc::new(Limit { on_store_failure: OnStoreFailure::Closed, ..Limit::clone(&limit(id)) })
    }

    fn reader(governor: &Arc<Governor>, ledger: &Arc<Slow>, limits: &[&str]) -> Arc<AtStart> {
        let in_force = InForce { limits: limits.iter().map(|id| closed(id)).collect(), teams: HashMap::new() };
        Arc::new(AtStart::of(governor, ledger.clone(), nobody(), in_force, "g".into(), false))
    }

    fn used(governor: &Governor, id: &str) -> u64 {
        governor.standing(id, "all", limit(id).measures[0]).used
    }

    /// One of the two limits is summed within the time of the start.
    #[tokio::test(start_paused = true)]
    async fn what_the_start_has_not_read_is_read_behind_it() {
        let governor = Arc::new(Governor::new(Arc::default()));
        let ledger = Slow::new(Duration::from_secs(40));
        let reader = reader(&governor, &ledger, &["a", "b"]);
        assert!(governor.is_unread("a") && governor.is_unread("b"));
        let running = reader.clone();
        let mut run = Box::pin(async move { running.run().await });
        let began = Instant::now();
        assert!(!reader.wait(&mut run).await);
        assert_eq!(began.elapsed().as_secs(), SUMMED_MAX.as_secs());
        assert_eq!((used(&governor, "a"), governor.is_unread("a")), (5, false));
        assert_eq!((used(&governor, "b"), governor.is_unread("b")), (0, true));
        assert!(governor.is_reading(), "nobody may take the counters over");
        // A request is let in meanwhile, as an open limit does it.
        let (id, measure) = ("b".into(), limit("b").measures[0]);
        let claim = Claim { limit: &id, subject: "all", measure, amount: 1, tag: 0 };
        let _held = governor.hold(&[claim]).0.expect("room");
        run.await;
        assert_eq!((used(&governor, "b"), governor.is_unread("b")), (6, false));
        assert!(!governor.is_reading());
        // The question of before the first request of this process is asked again, without them.
        let tags: Vec<_> = asked(&ledger).into_iter().map(|(tag, _)| tag).collect();
        assert_eq!(tags, [tag("a"), tag("b"), tag("b")]);
        let ends = ledger.ends.lock().expect("no panic").clone();
        assert_eq!(ends[..2], [ALWAYS; 2]);
        assert!(ends[2] <= clock::unix_seconds(), "{ends:?}");
    }

    /// A sum that takes all of its time gets twice as much, and a store that is away is asked again.
    #[tokio::test(start_paused = true)]
    async fn a_ledger_that_is_slow_or_away_is_read_in_the_end() {
        for (takes, is_busy, patience) in [(100, false, vec![60, 60, 120, 120]), (1, true, vec![60; 4])] {
            let governor = Arc::new(Governor::new(Arc::default()));
            let ledger = Slow::new(Duration::from_secs(takes));
            ledger.is_busy.store(is_busy, Ordering::Relaxed);
            let reader = reader(&governor, &ledger, &["a", "b"]);
            let running = reader.clone();
            let mut run = Box::pin(async move { running.run().await });
            assert!(!reader.wait(&mut run).await, "the start goes on");
            assert!(governor.is_unread("a") && governor.is_unread("b"));
            ledger.is_busy.store(false, Ordering::Relaxed);
            run.await;
            assert_eq!([used(&governor, "a"), used(&governor, "b")], [5, 5]);
            let told: Vec<_> = asked(&ledger).into_iter().map(|(_, patience)| patience).collect();
            assert_eq!(told, patience, "{takes}");
        }
    }

    /// The counters of the process before have what the ledger has.
    #[tokio::test(start_paused = true)]
    async fn what_is_taken_over_is_not_read_as_well() {
        let governor = Arc::new(Governor::new(Arc::default()));
        let ledger = Slow::new(Duration::from_secs(100));
        let reader = reader(&governor, &ledger, &["a"]);
        let running = reader.clone();
        let mut run = Box::pin(async move { running.run().await });
        assert!(!reader.wait(&mut run).await);
        let before = Governor::new(Arc::default());
        let (id, measure) = ("a".into(), limit("a").measures[0]);
        let _held = before.hold(&[Claim { limit: &id, subject: "all", measure, amount: 7, tag: 0 }]).0.expect("room");
        let book = {
            let (state, now) = before.state();
            state.book.export(now)
        };
        governor.import(book);
        assert!(!governor.is_unread("a"));
        run.await;
        assert_eq!(used(&governor, "a"), 7);
    }
}
