use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use penstock_store::{Grant, MemoryCounters};

use super::report::REPORTS;
use super::*;

/// Store double that can be cut off and counts round trips.
#[derive(Default)]
struct Store {
    inner: MemoryCounters,
    away: AtomicBool,
    /// True if settlements take effect without an answer.
    mute: AtomicBool,
    /// Number of settlements that take effect and then panic.
    panics: AtomicU64,
    trips: AtomicU64,
    /// Delay of the store's answers, in milliseconds.
    late_ms: AtomicU64,
    /// Gateway whose other portions are taken by its other requests while the store answers.
    crowded: OnceLock<Arc<Shared>>,
}

#[async_trait]
impl Counters for Store {
    async fn take(&self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Result<Vec<Grant>, StoreError> {
        self.trips.fetch_add(1, Ordering::Relaxed);
        let late = self.late_ms.load(Ordering::Relaxed);
        // Concurrent requests ask before this answer.
        tokio::task::yield_now().await;
        if self.away.load(Ordering::Relaxed) {
            // Cut off: the call takes effect and never returns.
            self.inner.take(holder, asks, whole, now).await?;
            return std::future::pending().await;
        }
        let answer = self.inner.take(holder, asks, whole, now).await;
        if let Some(gateway) = self.crowded.get() {
            let mut state = gateway.state();
            let others = state.cells.iter_mut().filter(|(other, _)| !asks.iter().any(|ask| key(ask) == **other));
            others.for_each(|(_, cell)| cell.held = cell.leased);
        }
        if late > 0 {
            tokio::time::sleep(Duration::from_millis(late)).await;
        }
        answer
    }

    async fn lease(&self, holder: &str, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        self.inner.lease(holder, kept, now).await
    }

    async fn settle(&self, holder: &str, nth: u64, told: &[Settlement], now: u64) -> Result<(), StoreError> {
        if self.away.load(Ordering::Relaxed) {
            return std::future::pending().await;
        }
        self.inner.settle(holder, nth, told, now).await?;
        let left = self.panics.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        assert!(left.is_err(), "as a test");
        if self.mute.load(Ordering::Relaxed) { std::future::pending().await } else { Ok(()) }
    }
}

fn measure(unit: Unit, span: Span, max: u64) -> Measure {
    Measure { unit, span, max }
}

/// A gateway that has checked the store.
fn begun(store: &Arc<Store>, name: &str) -> Shared {
    Shared::with_store(store.clone(), name)
}

async fn try_take(shared: &Shared, measure: Measure, amount: u64) -> Result<Vec<Portion>, Refused> {
    let limit: Arc<str> = "l".into();
    shared.take(&[Claim { limit: &limit, subject: "k", measure, amount, tag: 0 }], |_| OnStoreFailure::Open).await
}

/// Two gateways, of which the first holds the only place; and lines that `run` logs.
fn logged_with_a_place(run: impl AsyncFnOnce(&Store, &Shared)) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    penstock_base::testing::logged(|| {
        runtime.block_on(async {
            let store = Arc::new(Store::default());
            let (gateway, other) = (begun(&store, "a"), begun(&store, "b"));
            let place = take_closed(&gateway, measure(Unit::InFlight, Span::Now, 1), 1).await.expect("room");
            run(&store, &gateway).await;
            assert!(
                matches!(
                    take_closed(&other, measure(Unit::InFlight, Span::Now, 1), 1).await,
                    Err(Refused::Full { .. })
                ),
                "the place is in use, and counted again"
            );
            gateway.settle(place, |_, _| Some(1));
            gateway.report_once(Instant::now() + IDLE * 2).await;
            take_closed(&other, measure(Unit::InFlight, Span::Now, 1), 1).await.expect("given back");
        })
    })
}

#[track_caller]
fn check_lease_lines(log: &str) {
    let lines: Vec<_> = log.lines().filter(|line| line.contains("lease of places in flight")).collect();
    assert_eq!(lines.len(), 2, "{log}");
    for (line, parts) in lines.iter().zip([["WARN", "is lost"], ["INFO", "is held again"]]) {
        for part in parts.iter().chain(&["counter=\"l/k/in_flight\"", "in_use=1"]) {
            assert!(line.contains(part), "{part} is not in: {line}");
        }
    }
}

/// The store is away for longer than a lease of places lasts, and another gateway has not asked meanwhile.
#[test]
fn a_lease_that_lapses_is_told_once_and_held_again_when_the_store_is_back() {
    let log = logged_with_a_place(async |store, gateway| {
        let _ = gateway.down::<()>("away");
        for cell in gateway.state().cells.values_mut() {
            cell.lapses = 1;
        }
        // The store lets it lapse, too.
        let lapsed: Vec<Kept> = gateway.state().cells.keys().map(|key| Cell::default().kept(key)).collect();
        store.inner.lease("a", &lapsed, clock::unix_seconds()).await.expect("a lease of nothing");
        (0..3).for_each(|_| gateway.tell_lapsed());
        gateway.state().down_until = None;
        assert!(gateway.begin().await && gateway.begin().await);
        gateway.tell_lapsed();
    });
    check_lease_lines(&log);
}

/// The store answers, and does not have the lease any more.
#[test]
fn a_lease_that_the_store_has_dropped_is_told_once_and_held_again() {
    let log = logged_with_a_place(async |store, gateway| {
        let dropped: Vec<Kept> = gateway.state().cells.keys().map(|key| Cell::default().kept(key)).collect();
        store.inner.lease("a", &dropped, clock::unix_seconds()).await.expect("a lease of nothing");
        for round in 1..3 {
            gateway.report_once(Instant::now() + Duration::from_secs(6 * round)).await;
        }
        assert!(gateway.correct().await && gateway.correct().await);
    });
    check_lease_lines(&log);
}

/// Requests go on asking for more than the store has, so that it answers all the time.
#[tokio::test]
async fn a_lease_that_the_store_has_dropped_is_noticed_although_requests_are_refused_all_the_time() {
    let store = Arc::new(Store::default());
    let (gateway, other) = (begun(&store, "a"), begun(&store, "b"));
    let places = measure(Unit::InFlight, Span::Now, 10);
    let ours = take_closed(&gateway, places, 10).await.expect("room");
    let dropped: Vec<Kept> = gateway.state().cells.keys().map(|key| Cell::default().kept(key)).collect();
    store.inner.lease("a", &dropped, clock::unix_seconds()).await.expect("a lease of nothing");
    let theirs = take_closed(&other, places, 10).await.expect("they seem to be free");
    for _ in 0..3 {
        assert!(matches!(take_closed(&gateway, places, 1).await, Err(Refused::Full { .. })));
        gateway.report_once(Instant::now()).await;
        assert!(gateway.correct().await);
    }
    other.settle(theirs, |_, _| Some(10));
    other.report_once(Instant::now() + IDLE * 2).await;
    let refused = take_closed(&other, places, 1).await.expect_err("the places are in use");
    assert_eq!(refused, Refused::Full { claim: 0, used: 10 });
    gateway.settle(ours, |_, _| Some(10));
    gateway.report_once(Instant::now() + IDLE * 2).await;
    take_closed(&other, places, 10).await.expect("given back");
}

/// More leases than one call of the store takes are lost and held again at once, then not needed any more.
#[test]
fn of_many_leases_the_log_names_sixteen_and_counts_the_others() {
    const MANY: usize = 2 * REPORTS + 22;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let store = Arc::new(Store::default());
    let (gateway, place) = (begun(&store, "a"), measure(Unit::InFlight, Span::Now, 1));
    let take = async |nth: usize| {
        let (limit, subject): (Arc<str>, _) = ("l".into(), nth.to_string());
        let claim = Claim { limit: &limit, subject: &subject, measure: place, amount: 1, tag: 0 };
        gateway.take(&[claim], |_| OnStoreFailure::Open).await.expect("room")
    };
    let drop_all = async || {
        let gone: Vec<Kept> = gateway.state().cells.keys().map(|key| Cell::default().kept(key)).collect();
        for chunk in gone.chunks(REPORTS) {
            store.inner.lease("a", chunk, clock::unix_seconds()).await.expect("leases of nothing");
        }
    };
    let log = penstock_base::testing::logged(|| {
        runtime.block_on(async {
            let mut held = Vec::new();
            for nth in 0..MANY {
                held.extend(take(nth).await);
            }
            let at = |seconds| Instant::now() + Duration::from_secs(seconds);
            drop_all().await;
            gateway.report_once(at(6)).await;
            assert!(gateway.correct().await);
            drop_all().await;
            gateway.report_once(at(12)).await;
            gateway.settle(held, |_, _| Some(1));
            gateway.report_once(at(20)).await;
        });
    });
    let lines = |part: &str| log.lines().filter(|line| line.contains(part)).count();
    for (named, more, times) in [
        ("a lease of places in flight is lost", "further leases of places in flight are lost", 2),
        ("a lost lease of places in flight is held again", "further lost leases of places in flight are held again", 1),
        ("a lost lease of places in flight is not needed", "further lost leases of places in flight are not needed", 1),
    ] {
        assert_eq!((lines(named), lines(more)), (16 * times, times), "{named}: {log}");
    }
    assert_eq!(lines(&format!("leases={}", MANY - 16)), 4, "{log}");
}

async fn take_closed(shared: &Shared, measure: Measure, amount: u64) -> Result<Vec<Portion>, Refused> {
    let limit: Arc<str> = "l".into();
    shared.take(&[Claim { limit: &limit, subject: "k", measure, amount, tag: 0 }], |_| OnStoreFailure::Closed).await
}

/// Claims of one amount each on the use of a chain of keys, and one of all of them that fits no call of the store.
#[tokio::test]
async fn a_request_with_too_many_counters_concerns_nobody_else() {
    let store = Arc::new(Store::default());
    let gateway = begun(&store, "a");
    let limit: Arc<str> = "l".into();
    let spans = [Span::Minute, Span::Hour, Span::Day];
    let units = [Unit::Requests, Unit::Tokens, Unit::InputTokens];
    let measures: Vec<_> = units.iter().flat_map(|unit| spans.map(|span| measure(*unit, span, 1_000_000))).collect();
    let take = async |keys: usize, prefix: &str, policy: OnStoreFailure| {
        let subjects: Vec<String> = (0..keys).map(|key| format!("{prefix}{key}")).collect();
        let claims: Vec<_> = subjects
            .iter()
            .flat_map(|subject| measures.iter().map(move |measure| (subject, *measure)))
            .map(|(subject, measure)| Claim { limit: &limit, subject, measure, amount: 1, tag: 0 })
            .collect();
        gateway.take(&claims, |_| policy).await
    };
    // Nine measures of a key and the seven above it.
    let portions = take(8, "k", OnStoreFailure::Closed).await.expect("room");
    assert!(portions.len() == 72 && portions.iter().all(Portion::is_counted) && gateway.is_up());

    // The portions of the first eight are large enough for them.
    let many = penstock_store::ASKS_MAX / measures.len() + 10;
    let refused = take(many, "k", OnStoreFailure::Closed).await.expect_err("more than the store can be asked");
    assert!(refused == Refused::Away { claim: 0 } && gateway.is_up(), "others are asked for as before");
    let portions = take(many, "k", OnStoreFailure::Open).await.expect("open");
    gateway.settle(portions, |_, _| Some(1));
    // Nor do names that no counter can have.
    let portions = take(1, &"k".repeat(1000), OnStoreFailure::Open).await.expect("open");
    gateway.settle(portions, |_, _| Some(1));
    gateway.report_once(Instant::now() + IDLE * 2).await;
    assert!(gateway.is_up() && gateway.state().doubted.is_empty(), "the report is done");
    let other = begun(&store, "b");
    let day = measure(Unit::Requests, Span::Day, 1_000_000);
    try_take_of(&other, "k0", day).await.expect("room");
    let claim = Claim { limit: &limit, subject: "k0", measure: day, amount: 1, tag: 0 };
    assert_eq!(other.used(&[claim]), [3], "one is in progress, one was let in without a question, one is its own");
}

async fn try_take_of(shared: &Shared, subject: &str, measure: Measure) -> Result<Vec<Portion>, Refused> {
    let limit: Arc<str> = "l".into();
    shared.take(&[Claim { limit: &limit, subject, measure, amount: 1, tag: 0 }], |_| OnStoreFailure::Open).await
}

/// Slow answers refuse nobody: each request waits for its own.
#[tokio::test(start_paused = true)]
async fn a_slow_store_is_waited_for() {
    let store = Arc::new(Store::default());
    let gateway = Arc::new(begun(&store, "a"));
    store.late_ms.store(700, Ordering::Relaxed);
    let day = measure(Unit::Tokens, Span::Day, 100_000);
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..300 {
        let gateway = gateway.clone();
        crowd.spawn(async move { take_closed(&gateway, day, 10).await.map(|portions| portions[0].held) });
    }
    let taken = crowd.join_all().await;
    assert!(taken.iter().all(|taken| *taken == Ok(10)), "{taken:?}");
    assert!(gateway.is_up() && gateway.slow() == 0);
}

/// A late answer among others refuses one request, and not the next ones.
#[tokio::test(start_paused = true)]
async fn an_answer_that_is_too_late_concerns_one_request() {
    let store = Arc::new(Store::default());
    let gateway = Arc::new(begun(&store, "a"));
    let (day, hour) = (measure(Unit::Tokens, Span::Day, 1000), measure(Unit::Tokens, Span::Hour, 1000));
    store.late_ms.store(1500, Ordering::Relaxed);
    let unlucky = {
        let gateway = gateway.clone();
        tokio::spawn(async move { take_closed(&gateway, day, 1000).await.map(drop) })
    };
    tokio::task::yield_now().await;
    store.late_ms.store(300, Ordering::Relaxed);
    take_closed(&gateway, hour, 10).await.expect("answered in time");
    assert_eq!(unlucky.await.expect("no panic"), Err(Refused::Away { claim: 0 }));
    assert!(gateway.is_up() && gateway.slow() == 1, "slow, not gone");
    // The grant of the request that left is unknown here: the leases are reported, and it fits again.
    assert!(gateway.correct().await);
    take_closed(&gateway, day, 1000).await.expect("answered in time");
}

/// Answers that come in the next second: the window that was asked for has ended.
#[tokio::test]
async fn a_window_that_ends_before_the_answer_is_no_refusal() {
    let store = Arc::new(Store::default());
    let gateway = begun(&store, "a");
    store.late_ms.store(60, Ordering::Relaxed);
    let second = measure(Unit::Tokens, Span::Second, 1000);
    loop {
        let left = 1_000 - clock::since_epoch().as_millis() as u64 % 1_000;
        tokio::time::sleep(Duration::from_millis((left + 970) % 1_000)).await;
        let began = clock::unix_seconds();
        // More than what an answer before has left here.
        let taken = take_closed(&gateway, second, 500).await;
        assert!(!matches!(taken, Err(Refused::Full { .. })), "there is room: {taken:?}");
        let Ok(portions) = taken else { continue };
        let windows: Vec<u64> = portions.iter().map(|portion| portion.key.1.start).collect();
        gateway.settle(portions, |_, _| Some(0));
        gateway.report_once(Instant::now() + IDLE * 2).await;
        if windows[0] > began {
            break;
        }
    }
}

/// A request with two counters: while the store answers for one, others here use what it had of the other.
#[tokio::test(start_paused = true)]
async fn a_request_that_others_are_quicker_than_is_not_told_that_there_is_no_room() {
    let store = Arc::new(Store::default());
    let gateway = Arc::new(begun(&store, "a"));
    assert!(store.crowded.set(gateway.clone()).is_ok());
    let limit = Arc::<str>::from("l");
    let claims = [Span::Day, Span::Hour].map(|span| Claim {
        limit: &limit,
        subject: "k",
        measure: measure(Unit::Tokens, span, 100_000),
        amount: 10,
        tag: 0,
    });
    // The day's portion is there, so that only the hour is asked for at first.
    let ahead = gateway.take(&claims[..1], |_| OnStoreFailure::Closed).await.expect("room");
    gateway.settle(ahead, |_, _| Some(0));
    let policy = |at| if at == 1 { OnStoreFailure::Closed } else { OnStoreFailure::Open };
    assert_eq!(gateway.take(&claims, policy).await.expect_err("closed"), Refused::Away { claim: 1 });
    assert_eq!(store.trips.load(Ordering::Relaxed), 1 + u64::from(TRIES));
    let portions = gateway.take(&claims, |_| OnStoreFailure::Open).await.expect("open: its gateway alone counts it");
    assert!(!portions.iter().any(Portion::is_counted));
    assert!(gateway.is_up() && gateway.slow() == 0, "the store answers");
}

/// The reported use of a counter is that of all gateways, not of this one.
#[tokio::test]
async fn what_others_have_used_is_told() {
    let store = Arc::new(Store::default());
    let gateways = ["a", "b"].map(|name| begun(&store, name));
    let (limit, day) = (Arc::<str>::from("l"), measure(Unit::Requests, Span::Day, 10));
    let claim = Claim { limit: &limit, subject: "k", measure: day, amount: 1, tag: 0 };
    for _ in 0..6 {
        try_take(&gateways[0], day, 1).await.expect("room");
    }
    assert_eq!(gateways[1].used(&[claim]), [0], "it has not asked");
    try_take(&gateways[1], day, 1).await.expect("room");
    assert_eq!(gateways[1].used(&[claim]), [7]);
}

#[tokio::test]
async fn two_gateways_let_in_no_more_than_one_would() {
    let store = Arc::new(Store::default());
    let gateways = ["a", "b"].map(|name| begun(&store, name));
    let month = measure(Unit::NanoUsd, Span::Month, 10_000);
    let (mut spent, mut open) = (0, [Vec::new(), Vec::new()]);
    for turn in 0..2000u64 {
        let at = (turn % 3 % 2) as usize;
        if let Ok(portions) = try_take(&gateways[at], month, 17).await {
            open[at].push(portions);
        }
        if turn % 5 == 0
            && let Some(portions) = open[at].pop()
        {
            gateways[at].settle(portions, |_, _| Some(9));
            spent += 9;
        }
        if turn % 50 == 0 {
            gateways[0].report_once(Instant::now()).await;
            gateways[1].report_once(Instant::now()).await;
        }
        let held = open.iter().map(|open| open.len() as u64 * 17).sum::<u64>();
        assert!(spent + held <= 10_000, "{spent} {held}");
    }
    let held = open.iter().map(|open| open.len() as u64 * 17).sum::<u64>();
    assert!(spent + held > 9_500, "what one leaves the other gets: {spent} {held}");
    assert!(store.trips.load(Ordering::Relaxed) < 1700, "full counters are asked, others seldom");
}

#[tokio::test]
async fn a_crowd_that_comes_at_once_leases_little_more_than_it_needs() {
    let store = Arc::new(Store::default());
    let gateways = ["a", "b"].map(|name| Arc::new(begun(&store, name)));
    let month = measure(Unit::NanoUsd, Span::Month, 10_000);
    let mut crowd = tokio::task::JoinSet::new();
    for number in 0..400 {
        let gateway = gateways[number % 2].clone();
        crowd.spawn(async move { try_take(&gateway, month, 17).await });
    }
    let taken = crowd.join_all().await;
    assert!(taken.iter().all(|taken| taken.as_ref().is_ok_and(|portions| portions[0].held == 17)), "all of it fits");
    let leased = |gateway: &Shared| gateway.state().cells.values().map(|cell| cell.leased).sum::<u64>();
    assert!(gateways.iter().all(|gateway| leased(gateway) <= 200 * 17 + 100));
    assert!(gateways.iter().all(|gateway| gateway.state().asking.is_empty()));
}

#[tokio::test]
async fn most_requests_ask_nobody() {
    let store = Arc::new(Store::default());
    let gateway = begun(&store, "a");
    for _ in 0..1000 {
        let portions = try_take(&gateway, measure(Unit::Requests, Span::Month, 100_000), 1).await.expect("room");
        gateway.settle(portions, |_, _| Some(1));
    }
    assert_eq!(store.trips.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn places_in_flight_come_back() {
    let store = Arc::new(Store::default());
    let gateways = ["a", "b"].map(|name| begun(&store, name));
    let places = measure(Unit::InFlight, Span::Now, 2);
    let first = try_take(&gateways[0], places, 1).await.expect("room");
    let second = try_take(&gateways[1], places, 1).await.expect("room");
    assert!(matches!(try_take(&gateways[0], places, 1).await, Err(Refused::Full { claim: 0, used: 2 })));
    gateways[1].settle(second, |_, _| Some(1));
    assert!(try_take(&gateways[0], places, 1).await.is_err(), "it is still the other's place");
    gateways[1].report_once(Instant::now() + IDLE * 2).await;
    let again = try_take(&gateways[0], places, 1).await.expect("given back");
    gateways[0].settle(again, |_, _| Some(1));
    gateways[0].settle(first, |_, _| Some(1));
}

#[tokio::test]
async fn what_was_granted_to_whoever_left_comes_back() {
    let store = Arc::new(Store::default());
    let (gateway, other) = (begun(&store, "a"), begun(&store, "b"));
    let month = measure(Unit::NanoUsd, Span::Month, 1000);
    let known = try_take(&gateway, month, 100).await.expect("room");
    store.away.store(true, Ordering::Relaxed);
    tokio::select! {
        biased;
        _ = try_take(&gateway, month, 900) => panic!("nobody answers"),
        () = tokio::task::yield_now() => {}
    }
    store.away.store(false, Ordering::Relaxed);
    assert!(matches!(try_take(&other, month, 1).await, Err(Refused::Full { used: 1000, .. })), "it was granted");
    assert!(gateway.is_up(), "who leaves says nothing about the store");
    assert!(gateway.correct().await);
    let rest = try_take(&other, month, 900).await.expect("it is nobody's");
    gateway.settle(known, |_, _| Some(100));
    gateway.report_once(Instant::now()).await;
    other.settle(rest, |_, _| Some(900));
    other.report_once(Instant::now()).await;
    assert!(matches!(try_take(&gateway, month, 1).await, Err(Refused::Full { used: 1000, .. })));
}

/// More counters than one report holds: the first chunk is done without an answer, the second is never sent.
#[tokio::test(start_paused = true)]
async fn what_was_told_and_not_answered_counts_once() {
    let store = Arc::new(Store::default());
    let gateway = begun(&store, "a");
    let limit = Arc::<str>::from("l");
    let subjects: Vec<String> = (0..2 * REPORTS).map(|number| format!("k{number}")).collect();
    let day = measure(Unit::Tokens, Span::Day, 1000);
    let claim = |subject, amount| Claim { limit: &limit, subject, measure: day, amount, tag: 0 };
    for subject in &subjects {
        let portions = gateway.take(&[claim(subject, 10)], |_| OnStoreFailure::Closed).await.expect("room");
        gateway.settle(portions, |_, _| Some(7));
    }
    store.mute.store(true, Ordering::Relaxed);
    gateway.report_once(Instant::now()).await;
    assert!(!gateway.is_up() && gateway.state().doubted.len() == REPORTS);
    store.mute.store(false, Ordering::Relaxed);
    gateway.state().down_until = None;
    assert!(gateway.begin().await && gateway.correct().await && gateway.is_up());
    // The rest of each portion is returned, too.
    gateway.report_once(Instant::now() + IDLE * 2).await;
    for subject in &subjects {
        let Want { key: (counter, window), lapses: until, .. } = want(&claim(subject, 0));
        let ask = Ask { counter, window, sliding: false, max: 1000, want: 0, least: 0, until };
        let grant = store.inner.take("a", &[ask], false, clock::unix_seconds()).await.expect("asked")[0];
        assert_eq!((grant.leased, grant.used), (0, 7), "{subject}");
    }
}

/// More counters than one report holds: the panic is in the first chunk, which the store has counted.
#[tokio::test]
async fn a_report_that_panics_is_made_again_and_counts_once() {
    let store = Arc::new(Store { panics: AtomicU64::new(1), ..Store::default() });
    let gateway = Arc::new(begun(&store, "a"));
    let limit = Arc::<str>::from("l");
    let subjects: Vec<String> = (0..2 * REPORTS).map(|number| format!("k{number}")).collect();
    let day = measure(Unit::Tokens, Span::Day, 1000);
    let claim = |subject, amount| Claim { limit: &limit, subject, measure: day, amount, tag: 0 };
    for subject in &subjects {
        let portions = gateway.take(&[claim(subject, 10)], |_| OnStoreFailure::Closed).await.expect("room");
        gateway.settle(portions, |_, _| Some(7));
    }
    let (begun, _begun) = std::sync::mpsc::sync_channel(1);
    let reports = gateway.clone();
    let reports = tokio::spawn(async move { reports.report(begun).await });
    let wait = async |what: &str, is_done: &dyn Fn() -> bool| {
        let began = Instant::now();
        while !is_done() {
            assert!(began.elapsed() < Duration::from_secs(30), "{what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    wait("closed limits refuse", &|| !gateway.is_up()).await;
    wait("the reports go on", &|| gateway.is_up() && gateway.is_returned()).await;
    for subject in &subjects {
        let Want { key: (counter, window), lapses: until, .. } = want(&claim(subject, 0));
        let ask = Ask { counter, window, sliding: false, max: 1000, want: 0, least: 0, until };
        let grant = store.inner.take("a", &[ask], false, clock::unix_seconds()).await.expect("asked")[0];
        assert_eq!((grant.leased, grant.used), (0, 7), "{subject}");
    }
    reports.abort();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_delays_one_request_and_decides_by_the_limit() {
    let store = Arc::new(Store::default());
    let gateway = begun(&store, "a");
    store.away.store(true, Ordering::Relaxed);
    let day = measure(Unit::Tokens, Span::Day, 1000);
    let portions = try_take(&gateway, day, 10).await.expect("open");
    assert!(gateway.is_up(), "after so short a time it may be slow");
    try_take(&gateway, day, 10).await.expect("open");
    assert_eq!(store.trips.load(Ordering::Relaxed), 1, "who can do without it leaves it alone");
    assert_eq!(take_closed(&gateway, day, 1).await.expect_err("closed"), Refused::Away { claim: 0 });
    assert!(!gateway.is_up(), "nothing was heard of it in a second");
    take_closed(&gateway, day, 1).await.expect_err("closed");
    assert_eq!(store.trips.load(Ordering::Relaxed), 2, "everybody leaves it alone");
    gateway.settle(portions, |_, _| Some(7));
    store.away.store(false, Ordering::Relaxed);
    assert!(!gateway.begin().await, "it is left alone");
    gateway.state().down_until = None;
    assert!(gateway.begin().await && gateway.is_up(), "asked, and it lost nothing");
    gateway.report_once(Instant::now()).await;
    let other = begun(&store, "b");
    assert!(matches!(try_take(&other, day, 994).await, Err(Refused::Full { used: 7, .. })), "told when it is back");
}

/// Number of milliseconds that a look at the day's counter takes, and the use that it tells.
async fn looked(shared: &Shared) -> (u128, u64) {
    let (began, limit) = (tokio::time::Instant::now(), Arc::<str>::from("l"));
    let day = measure(Unit::Tokens, Span::Day, 1000);
    let used = shared.look(&[Claim { limit: &limit, subject: "k", measure: day, amount: 0, tag: 0 }]).await;
    (began.elapsed().as_millis(), used[0])
}

/// Nothing is leased and nothing reported, so only looks find out that the store is away.
#[tokio::test(start_paused = true)]
async fn one_look_in_a_while_waits_for_a_store_that_is_away() {
    let store = Arc::new(Store::default());
    let (gateway, other) = (begun(&store, "a"), begun(&store, "b"));
    let day = measure(Unit::Tokens, Span::Day, 1000);
    take_closed(&other, day, 30).await.expect("room");
    store.away.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        let trips = store.trips.load(Ordering::Relaxed);
        assert_eq!(looked(&gateway).await, (500, 0), "nothing is known of it");
        for _ in 0..20 {
            assert_eq!(looked(&gateway).await, (0, 0), "nobody else waits");
        }
        assert_eq!(store.trips.load(Ordering::Relaxed), trips + 1);
        tokio::time::advance(look::AWAY).await;
    }
    // While one finds out whether the store is back, the others go on.
    let (first, second) = tokio::join!(looked(&gateway), looked(&gateway));
    assert_eq!((first, second), ((500, 0), (0, 0)));
    store.away.store(false, Ordering::Relaxed);
    tokio::time::advance(look::AWAY).await;
    assert_eq!(looked(&gateway).await, (0, 30));
}

/// Callers of `/status` while the store is silent and no deadline has passed yet.
#[tokio::test(start_paused = true)]
async fn looks_that_begin_while_one_waits_wait_no_longer_than_it() {
    let store = Arc::new(Store::default());
    let crowd = async |gateway: &Shared, starts: [u64; 5]| {
        let looks = starts.map(|start| async move {
            tokio::time::sleep(Duration::from_millis(start)).await;
            looked(gateway).await.0
        });
        let [a, b, c, d, e] = looks;
        let (a, b, c, d, e) = tokio::join!(a, b, c, d, e);
        [a, b, c, d, e]
    };
    let gateway = begun(&store, "a");
    store.away.store(true, Ordering::Relaxed);
    assert_eq!(crowd(&gateway, [0, 100, 200, 400, 499]).await, [500, 400, 300, 100, 1]);
    assert_eq!(looked(&gateway).await, (0, 0), "and then nobody does");

    // A slow store answers the first in time, so that those behind it wait for their own answers.
    let gateway = begun(&store, "b");
    store.away.store(false, Ordering::Relaxed);
    store.late_ms.store(300, Ordering::Relaxed);
    assert_eq!(crowd(&gateway, [0, 100, 200, 250, 299]).await, [300; 5]);
    assert!(gateway.looks().away_until.is_none());
}

/// Windows of a second, in each of which requests are let in while the store is away.
#[tokio::test]
async fn what_counts_no_more_is_forgotten_while_the_store_is_away() {
    let store = Arc::new(Store::default());
    let gateway = begun(&store, "a");
    let _ = gateway.down::<()>("away");
    let spent = |counter: &str, window: Window, unit: Unit| {
        let portion = Portion { key: (counter.into(), window), unit, tag: 0, held: 0, amount: 5 };
        gateway.settle(vec![portion], |_, _| Some(5));
    };
    let now = clock::unix_seconds();
    for second in now - 1000..now - 10 {
        spent("l/k/tokens_per_second", Window::at(second, 1), Unit::Tokens);
    }
    spent("l/k/in_flight", Window::default(), Unit::InFlight);
    let (hour, day) = (Window::at(now - 3600, 3600), Window::at(now, DAY_SECONDS));
    // The window before this one counts in a sliding window.
    spent("l/k/tokens_per_hour", hour, Unit::Tokens);
    spent("l/k/tokens_per_day", day, Unit::Tokens);
    gateway.turn().await;
    let mut kept: Vec<_> = gateway.state().cells.keys().cloned().collect();
    kept.sort();
    assert_eq!(kept, [("l/k/tokens_per_day".to_owned(), day), ("l/k/tokens_per_hour".to_owned(), hour)]);
    gateway.state().down_until = None;
    gateway.turn().await;
    for (counter, window) in kept {
        let ask = Ask { counter, window, sliding: false, max: 0, want: 0, least: 0, until: now };
        assert_eq!(store.inner.take("b", &[ask], false, now).await.expect("asked")[0].used, 5, "told when it is back");
    }
}

/// The rest of the portion would be leased until the day ends, and no other gateway could use it.
#[tokio::test]
async fn a_gateway_that_ends_returns_its_portions() {
    let store = Arc::new(Store::default());
    let (gateway, other) = (begun(&store, "a"), begun(&store, "b"));
    let (day, place) = (measure(Unit::Tokens, Span::Day, 1000), measure(Unit::InFlight, Span::Now, 2));
    let (ended, open) = (take_closed(&gateway, day, 2).await.expect("room"), take_closed(&gateway, day, 3).await);
    let places = take_closed(&gateway, place, 2).await.expect("room");
    gateway.settle(ended, |_, _| Some(1));
    gateway.turn().await;
    assert!(take_closed(&other, day, 995).await.is_err(), "ten are leased, of which one is spent");
    assert!(!gateway.is_returned());
    gateway.turn().await;
    assert!(gateway.is_returned(), "but for what requests hold");
    let rest = take_closed(&other, day, 996).await.expect("one is spent, three are held");
    other.settle(rest, |_, _| Some(0));
    gateway.settle(open.expect("room"), |_, _| Some(3));
    gateway.settle(places, |_, _| Some(0));
    assert!(!gateway.is_returned());
    gateway.turn().await;
    assert!(gateway.is_returned());
    take_closed(&other, place, 2).await.expect("given back");
    assert!(!other.is_returned());
    other.turn().await;
    assert_eq!(take_closed(&other, day, 997).await.expect_err("four are spent"), Refused::Full { claim: 0, used: 4 });
    // Nobody waits for a store that is away.
    let more = take_closed(&gateway, day, 1).await.expect("room");
    gateway.settle(more, |_, _| Some(1));
    assert!(!gateway.is_returned());
    let _ = gateway.down::<()>("away");
    assert!(gateway.is_returned());
}

/// A provider may report any count; those of the other counters in the report are told all the same.
#[tokio::test]
async fn an_amount_that_no_store_takes_loses_no_other() {
    let store = Arc::new(Store::default());
    let gateway = begun(&store, "a");
    let (day, hour) = (measure(Unit::Tokens, Span::Day, 1000), measure(Unit::Tokens, Span::Hour, 1000));
    for (measure, used) in [(day, u64::MAX), (day, u64::MAX), (hour, 7)] {
        let portions = take_closed(&gateway, measure, 1).await.expect("room");
        gateway.settle(portions, |_, _| Some(used));
    }
    gateway.report_once(Instant::now() + IDLE * 2).await;
    let other = begun(&store, "b");
    assert!(matches!(take_closed(&other, hour, 1000).await, Err(Refused::Full { used: 7, .. })));
    assert!(matches!(take_closed(&other, day, 1).await, Err(Refused::Full { .. })));
}
