//! Orphaned entries of the ledger: entries whose gateway was killed or lost.
//!
//! Orphans are settled with the amounts reserved for them: what nobody can prove unspent counts as spent. With a store
//! of its own a gateway does that at its start. In a shared store each gateway sends a heartbeat every [`BEAT`], and
//! the others settle the entries of one that has been silent for [`SILENT`]. A gateway that was only cut off from the
//! store settles its entries itself when it is back, and the true amounts replace the assumed ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use penstock_store::{Entry, Held, Ledger, OpenEntry, Store, StoreError, Tokens};
use tokio::time::sleep;

use penstock_base::clock;

/// Interval of the heartbeat that a gateway writes to the shared store.
pub(super) const BEAT: Duration = Duration::from_secs(5);
/// Silence after which a gateway counts as dead.
const SILENT: Duration = Duration::from_secs(30);
/// Age in seconds at which an open entry in a shared store is an orphan, if its gateway sends no heartbeats.
const SHARED_ORPHAN_SECONDS: u64 = 3600;
/// Most orphaned ledger entries settled per call of the store.
const ORPHANS: u32 = 500;
/// Deadline of one turn with the store: heartbeat and orphans.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Settles entries opened before `before` in a store of this gateway's own, except this process's (`own`). Returns their number.
pub(super) async fn settle(store: &dyn Ledger, before: u64, own: &str) -> Result<u64, StoreError> {
    let mut count = 0;
    loop {
        let found = store.orphans(before, None, ORPHANS).await?;
        let orphans: Vec<_> = found.into_iter().filter(|orphan| *orphan.gateway != *own).collect();
        if orphans.is_empty() {
            return Ok(count);
        }
        count += assume(store, orphans).await?;
    }
}

async fn assume(store: &dyn Ledger, orphans: Vec<OpenEntry>) -> Result<u64, StoreError> {
    let entries = orphans.into_iter().map(assumed).collect();
    let counted = store.settle_entries(entries).await?.into_iter().filter(|counted| *counted).count() as u64;
    if counted > 0 {
        tracing::warn!(orphans = counted, "open requests of a dead process were settled with the amounts reserved");
    }
    Ok(counted)
}

fn assumed(opened: OpenEntry) -> Entry {
    let Held { input, output, micro_usd } = opened.held;
    let tokens = Tokens { input, output, ..Tokens::default() };
    Entry { opened, tokens, micro_usd, outcome: "assumed".into(), assumed: true, ..Entry::default() }
}

/// Heartbeat of this gateway and watch over the others of the store.
pub(super) struct Watch {
    store: Arc<dyn Store>,
    gateway: Arc<str>,
    /// Number of orphaned entries settled with assumed amounts, for the metric.
    count: Arc<AtomicU64>,
}

impl Watch {
    pub(super) fn new(store: Arc<dyn Store>, gateway: Arc<str>, count: Arc<AtomicU64>) -> Self {
        Self { store, gateway, count }
    }

    /// Runs without end: a heartbeat, the settling of orphans, a pause.
    pub(super) async fn keep(&self) {
        // While the store was away no gateway could send heartbeats: each gets the full silence again.
        let mut quiet = Instant::now();
        loop {
            let turn = self.turn(clock::unix_seconds(), quiet.elapsed() >= SILENT);
            match StoreError::in_time(ANSWER_MAX, turn).await {
                Ok(count) => drop(self.count.fetch_add(count, Ordering::Relaxed)),
                Err(error) => {
                    quiet = Instant::now();
                    tracing::debug!(%error, "the heartbeat of this gateway could not be written to the store");
                }
            }
            sleep(BEAT).await;
        }
    }

    /// Sends a heartbeat; with `settles`, settles the entries of dead gateways. Returns their number.
    async fn turn(&self, now: u64, settles: bool) -> Result<u64, StoreError> {
        self.store.alive(&self.gateway, now).await?;
        if !settles {
            return Ok(0);
        }
        settle_left(self.store.as_ref(), now, &self.gateway).await
    }
}

/// Settles the entries that dead gateways have left in a shared store. Returns their number.
pub(super) async fn settle_left(store: &dyn Ledger, now: u64, own: &str) -> Result<u64, StoreError> {
    let (silent, ancient) = (now.saturating_sub(SILENT.as_secs()), now.saturating_sub(SHARED_ORPHAN_SECONDS));
    let mut count = 0;
    loop {
        let left = store.left(silent, ancient, ORPHANS).await?;
        let orphans: Vec<_> = left.into_iter().filter(|orphan| *orphan.gateway != *own).collect();
        if orphans.is_empty() {
            return Ok(count);
        }
        count += assume(store, orphans).await?;
    }
}

#[cfg(test)]
mod tests {
    use penstock_store::{EntryFilter, Sqlite, SqliteOptions, UsageQuery};

    use super::*;

    fn open(request: &str, gateway: &str, at: u64) -> OpenEntry {
        let held = Held { input: 10, output: 20, micro_usd: 50 };
        OpenEntry { request: request.into(), gateway: gateway.into(), at, held, ..OpenEntry::default() }
    }

    async fn spent(store: &dyn Store) -> u64 {
        let filter = EntryFilter { until: u64::MAX >> 1, ..EntryFilter::default() };
        let query = UsageQuery { filter, limit: 1, ..UsageQuery::default() };
        store.usage(&query).await.expect("summed").items.first().map_or(0, |row| row.micro_usd)
    }

    #[tokio::test]
    async fn what_the_dead_left_is_settled_once_and_what_the_living_have_is_left_alone() {
        let store: Arc<dyn Store> =
            Arc::new(Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("a database"));
        let watch = |name: &str| Watch::new(store.clone(), name.into(), Arc::default());
        let (one, two, three) = (watch("one"), watch("two"), watch("three"));
        let at = 1_800_000_000;
        for gateway in [&one, &two, &three] {
            assert_eq!(gateway.turn(at, true).await, Ok(0));
        }
        let entries = vec![open("a", "one", at), open("b", "two", at), open("c", "three", at), open("d", "old", at)];
        store.open_entries(entries.into()).await.expect("opened");
        let dead = at + SILENT.as_secs() + 1;
        // Two has been silent for as long as one, and sends its heartbeat first.
        assert_eq!(two.turn(dead, false).await, Ok(0), "the store was away a moment ago");
        assert_eq!(three.turn(dead, true).await, Ok(1), "what one left, and nothing of the others");
        assert_eq!(two.turn(dead, true).await, Ok(0), "once");
        assert_eq!(spent(store.as_ref()).await, 50);
        // One was only cut off: its true amount replaces the assumed one.
        let truth = Entry { opened: open("a", "one", at), micro_usd: 7, ..Entry::default() };
        assert_eq!(store.settle_entries([truth].into()).await, Ok(vec![true]));
        assert_eq!(spent(store.as_ref()).await, 7);
        // A gateway without heartbeats gets an hour; a request of a gateway that lives may take longer.
        let late = at + SHARED_ORPHAN_SECONDS + 1;
        assert_eq!(three.turn(late, false).await, Ok(0));
        assert_eq!(two.turn(late, true).await, Ok(1));
        assert_eq!(store.entry(at, "d").await.expect("read").map(|entry| entry.assumed), Some(true));
        assert_eq!(two.turn(late + SILENT.as_secs() + 1, true).await, Ok(1), "three is silent by now");
        let left = store.orphans(late, None, 10).await.expect("found");
        assert_eq!(left.iter().map(|one| one.request.as_str()).collect::<Vec<_>>(), ["b"]);
    }
}
