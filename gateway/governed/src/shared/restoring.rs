//! Counters that a store loses while requests go on: what was spent is restored from the ledger, and counts once.

use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use penstock_govern::{By, For, Limit, Reserve, Unmetered};
use penstock_store::{
    Begun, Entry, EntryFilter, Grant, Ledger, MemoryCounters, OpenEntry, Sqlite, SqliteOptions, Subject, UsageQuery,
};

use super::*;
use crate::journal::Journal;
use crate::restore::{InForce, tag};

const DAY: Measure = Measure { unit: Unit::Requests, span: Span::Day, max: 1_000_000 };
/// Pause between two requests: the ledger always has entries to write.
const PACE: Duration = Duration::from_millis(2);
/// Time that a loss leaves to restore what was counted, as that of Redis.
const YOUNG: Duration = Duration::from_millis(1500);
/// The same where several gateways restore: the last of them has seconds to read the ledger in the pause of the first one, also
/// on a slow machine.
const YOUNG_OF_SEVERAL: Duration = Duration::from_secs(6);
/// Longest wait for what the test waits for.
const PATIENCE: Duration = Duration::from_secs(30);

/// Server of counters that can lose them.
#[derive(Default)]
struct Server {
    inner: Mutex<Arc<MemoryCounters>>,
    /// Number of times that the counters were lost.
    era: AtomicU64,
    /// Number of settlements that the server was told.
    told: AtomicU64,
    /// Last era of which the server was told that it is restored.
    whole: AtomicU64,
}

impl Server {
    fn lose(&self) {
        let mut inner = self.inner.lock().expect("no panic");
        self.era.fetch_add(1, Ordering::SeqCst);
        *inner = Arc::default();
    }

    fn inner(&self) -> Arc<MemoryCounters> {
        self.inner.lock().expect("no panic").clone()
    }

    /// Use of a counter by all gateways, leases included.
    async fn used(&self, counter: &str, window: Window) -> u64 {
        let now = clock::unix_seconds();
        let ask = Ask { counter: counter.into(), window, sliding: false, max: 0, want: 0, least: 0, until: now };
        self.inner().take("reader", &[ask], false, now).await.expect("read")[0].used
    }
}

/// Client of the server, of one gateway.
struct Losing {
    server: Arc<Server>,
    era: AtomicU64,
    /// Time that each loss leaves to restore what was counted.
    young: Duration,
}

impl Losing {
    fn of(server: &Arc<Server>, young: Duration) -> Arc<Self> {
        Arc::new(Self { server: server.clone(), era: AtomicU64::new(0), young })
    }

    fn inner(&self) -> Result<Arc<MemoryCounters>, StoreError> {
        let inner = self.server.inner();
        let is_lost = self.era.load(Ordering::SeqCst) != self.server.era.load(Ordering::SeqCst);
        if is_lost { Err(StoreError::Lost) } else { Ok(inner) }
    }
}

#[async_trait]
impl Counters for Losing {
    async fn take(&self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Result<Vec<Grant>, StoreError> {
        self.inner()?.take(holder, asks, whole, now).await
    }

    async fn begin(&self) -> Result<Begun, StoreError> {
        let era = self.server.era.load(Ordering::SeqCst);
        let was_lost = self.era.swap(era, Ordering::SeqCst) != era;
        Ok(if was_lost { Begun::Anew(self.young) } else { Begun::Whole })
    }

    async fn restore(&self, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        self.inner()?.restore(kept, now).await
    }

    async fn restored(&self) -> Result<(), StoreError> {
        self.inner()?;
        self.server.whole.store(self.era.load(Ordering::SeqCst), Ordering::SeqCst);
        Ok(())
    }

    async fn lease(&self, holder: &str, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        self.inner()?.lease(holder, kept, now).await
    }

    async fn settle(&self, holder: &str, nth: u64, told: &[Settlement], now: u64) -> Result<(), StoreError> {
        self.server.told.fetch_add(told.len() as u64, Ordering::SeqCst);
        self.inner()?.settle(holder, nth, told, now).await
    }
}

fn limit() -> Limit {
    Limit {
        id: "l".into(),
        measures: vec![DAY],
        by: By::Key,
        applies: For::Everyone,
        models: Vec::new(),
        reserve: Reserve::default(),
        unmetered: Unmetered::default(),
        on_store_failure: OnStoreFailure::Open,
        max_tokens_default: None,
        max_tokens_max: None,
        surge: None,
    }
}

/// One request, counted and noted as requests are.
async fn request(number: u64, shared: &Shared, journal: &Journal) {
    let limit: Arc<str> = "l".into();
    let claim = Claim { limit: &limit, subject: "k", measure: DAY, amount: 1, tag: 0 };
    let portions = shared.take(&[claim], |_| OnStoreFailure::Open).await.expect("room");
    let subject = Subject { key: "k".into(), tags: vec![tag("l")], ..Subject::default() };
    let (at, request) = (clock::unix_seconds(), format!("r{number}"));
    let slot = journal.open(OpenEntry { at, request, subject: subject.into(), ..OpenEntry::default() });
    journal.settle(slot, |opened| Entry { opened, ..Entry::default() });
    shared.settle(portions, |_, _| Some(1));
}

/// Gateway with a writer of its own for the ledger that all gateways share.
fn gateway(store: &Arc<Sqlite>, server: &Arc<Server>, name: &str, young: Duration) -> (Arc<Shared>, Journal) {
    let journal = Journal::start(store.clone(), name.into(), None).expect("a thread");
    let in_force = || InForce { limits: vec![Arc::new(limit())], ..InForce::default() };
    let sums = Sums::new(store.clone(), in_force, Some(journal.clone()));
    (Arc::new(Shared::new(Losing::of(server, young), name.into(), Some(sums))), journal)
}

/// Counters are lost while requests go on at the first of these gateways; the others notice it as much later.
async fn lose_under_load(young: Duration, later: &[Duration]) {
    let store = Arc::new(Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("a database"));
    let server = Arc::new(Server::default());
    let (shared, journal) = gateway(&store, &server, "g", young);
    let (begun, _begun) = std::sync::mpsc::sync_channel(1);
    let reports = shared.clone();
    let reports = tokio::spawn(async move { reports.report(begun).await });
    let others: Vec<_> =
        (0..later.len()).map(|nth| gateway(&store, &server, &format!("other{nth}"), young).0).collect();
    for other in &others {
        other.turn().await;
    }

    let goes_on = Arc::new(AtomicBool::new(true));
    let load = {
        let (goes_on, shared, journal) = (goes_on.clone(), shared.clone(), journal.clone());
        tokio::spawn(async move {
            let mut number = 0;
            while goes_on.load(Ordering::Relaxed) {
                number += 1;
                request(number, &shared, &journal).await;
                tokio::time::sleep(PACE).await;
            }
            number
        })
    };
    let began = Instant::now();
    while !shared.is_up() || began.elapsed() < Duration::from_secs(1) {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(PACE).await;
    }
    server.lose();
    let lost = Instant::now();
    let others: tokio::task::JoinSet<()> = others
        .into_iter()
        .zip(later.to_owned())
        .map(|(other, later)| async move {
            tokio::time::sleep(later).await;
            other.lost::<()>().expect_err("noticed");
            other.turn().await;
            assert_eq!(other.restored(), 1);
        })
        .collect();
    while shared.restored() == 0 {
        assert!(lost.elapsed() < PATIENCE, "it is not restored");
        tokio::time::sleep(PACE).await;
    }
    others.join_all().await;
    goes_on.store(false, Ordering::Relaxed);
    let count = load.await.expect("no panic");

    let window = Window::at(clock::unix_seconds(), 86_400);
    let counter = name("l", "k", DAY);
    let filter = EntryFilter { until: u64::MAX >> 1, ..EntryFilter::default() };
    let query = UsageQuery { filter, limit: 1, ..UsageQuery::default() };
    let end = Instant::now() + PATIENCE;
    let (mut used, mut noted) = (0, 0);
    // The rest of the portion is returned after a while.
    while (used, noted) != (count, count) {
        assert!(Instant::now() < end, "{used} are counted and {noted} noted of {count}");
        tokio::time::sleep(Duration::from_millis(50)).await;
        used = server.used(&counter, window).await;
        noted = store.usage(&query).await.expect("summed").items.first().map_or(0, |row| row.requests);
    }
    reports.abort();
}

#[tokio::test]
async fn what_is_spent_while_lost_counters_are_restored_counts_once() {
    lose_under_load(YOUNG, &[]).await;
}

/// Gateways that restore at the same time: each reads the ledger while the first one has amounts that it has not told.
#[tokio::test]
async fn what_is_spent_while_several_gateways_restore_counts_once() {
    lose_under_load(YOUNG_OF_SEVERAL, &[150, 400, 700].map(Duration::from_millis)).await;
}

/// Windows that end during a restore, of which each second may have one.
#[tokio::test]
async fn what_counts_no_more_after_a_restore_is_not_told() {
    let store = Arc::new(Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("a database"));
    let server = Arc::new(Server::default());
    let (shared, _journal) = gateway(&store, &server, "g", Duration::ZERO);
    shared.turn().await;
    server.lose();
    shared.lost::<()>().expect_err("noticed");
    let now = clock::unix_seconds();
    for at in now - 100..now - 50 {
        let spent = Cell { spent: 1, ..Cell::default() };
        shared.state().cells.insert(("c".into(), Window::at(at, 1)), spent);
    }
    let goes_on = ("c".to_owned(), Window { start: 0, seconds: 2 * now });
    shared.state().cells.insert(goes_on, Cell { spent: 1, ..Cell::default() });
    shared.turn().await;
    assert_eq!((shared.restored(), server.told.load(Ordering::SeqCst)), (1, 1));
    assert_eq!(server.whole.load(Ordering::SeqCst), 1, "whoever comes now need not restore");
}

/// A process that ends while it reads the ledger: entries that the pause holds back would be lost with it.
#[tokio::test]
async fn a_pause_holds_nothing_back_when_the_process_ends() {
    let store = Arc::new(Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("a database"));
    let journal = Journal::start(store.clone(), "g".into(), None).expect("a thread");
    let shared = Shared::with_store(Losing::of(&Arc::default(), YOUNG), "g");
    request(1, &shared, &journal).await;
    let began = Instant::now();
    while journal.counts().0 > 0 {
        assert!(began.elapsed() < PATIENCE, "the first is not written");
        tokio::time::sleep(PACE).await;
    }
    let pause = journal.pause();
    request(2, &shared, &journal).await;
    // Longer than entries gather.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(pause.is_reached() && journal.counts().0 == 1, "the second is held back");
    let began = Instant::now();
    while !journal.is_emptied() {
        assert!(began.elapsed() < PATIENCE, "what the pause holds back is not written");
        tokio::time::sleep(PACE).await;
    }
    let filter = EntryFilter { until: u64::MAX >> 1, ..EntryFilter::default() };
    let sum = store.usage(&UsageQuery { filter, limit: 1, ..UsageQuery::default() }).await.expect("summed");
    assert_eq!(sum.items[0].requests, 2);
    drop(pause);
}
