//! Counters that several gateways share: this gateway's portion of each, taken in advance.
//!
//! A gateway leases portions of a counter from the shared store and serves most requests from its portion, without asking. Only who
//! finds the portion too small asks. A store that is slow is waited for: by a request under a limit that is closed for at most
//! [`WAIT_CLOSED`], by others for at most [`WAIT_OPEN`], and then the limit's `on_store_failure` decides for that request: open, the
//! gateway's own counters are all there is; closed, the request is refused. A store that is gone (the connection broke, or nothing at all
//! was heard of it in that second or for a whole report) is left alone for [`DOWN_FOR`], in which nobody waits. What was
//! used is told behind the requests, by one task, some times a second; what a portion has left goes back when nobody has used it
//! for a while. The gateway's own book always counts too, so one gateway alone never lets in more than the limit.
//!
//! What is used is told under a number: where the answer to that is lost, the same is told again under the same number, before anything
//! else is, and the store does it once.
//!
//! A store that has been away may have lost what it had. It says so, or is asked when it is back ([`Counters::begin`]); then days and
//! months are restored from the ledger, which is the truth, and each gateway says what it leases. Until that is done the store is as good
//! as away.
//!
//! Here is what a request waits for; [`report`] is what the one task says behind them.
//!
//! ```text
//! store:  used = spent + leases                     here:  leased = held by requests + left
//! take:   leases += portion                         request: left → held      settle: held → spent (told later)
//! ```

mod report;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_govern::{Claim, Measure, OnStoreFailure, Span, Unit, began};
use penstock_store::{Ask, Counters, Kept, Settlement, StoreError, Window};
use tokio::sync::RwLock;
use tokio::time::timeout_at;

use super::restore::{Sum, Sums};
use crate::clock;

/// Longest wait of a request for the store, where a limit is closed: without an answer it is refused.
const WAIT_CLOSED: Duration = Duration::from_secs(1);
/// The same where all limits are open: without an answer it is counted here.
const WAIT_OPEN: Duration = Duration::from_millis(100);
/// A store that has failed is left alone for this long; one that is slow, by requests that can do without it.
const DOWN_FOR: Duration = Duration::from_secs(1);
/// That the store is slow is said again after this long without it.
const SLOW_QUIET: Duration = Duration::from_secs(30);
/// A portion that nobody has used for this long goes back.
const IDLE: Duration = Duration::from_secs(2);
/// Parts of a limit that are leased at once.
const PORTIONS: u64 = 100;
/// A lease of what is in flight lapses after this many seconds without a sign of life of its gateway.
const IN_FLIGHT_SECONDS: u64 = 15;
/// Times that a request asks: others may take what was leased for it.
const TRIES: u32 = 3;

/// Longest wait of a start for counters that begin anew.
pub(super) const BEGIN_MAX: Duration = Duration::from_secs(5);

/// The shared counters, and this gateway's portions.
pub(super) struct Shared {
    counters: Arc<dyn Counters>,
    /// This life of this gateway.
    holder: String,
    /// Says what is spent, where that was lost; `None`: nobody knows.
    ledger: Option<Sums>,
    state: Mutex<State>,
    /// Asks take it together; to say what is leased here, alone: an ask is answered before that, or has been given up. Nobody holds it for
    /// longer than a store has to answer.
    turn: RwLock<()>,
    /// Times that what was lost has been restored.
    restored: AtomicU64,
    /// Requests that stopped waiting for a store that was slow.
    slow: AtomicU64,
}

#[derive(Default)]
struct State {
    cells: HashMap<Key, Cell>,
    down_until: Option<Instant>,
    /// Requests under open limits do not ask until then.
    slow_until: Option<Instant>,
    /// Answers of the store so far.
    heard: u64,
    /// Whether what the store says can be believed: it has been asked since it was away.
    is_begun: bool,
    /// What it had is to be restored; nothing is granted until then.
    owed: Option<Instant>,
    /// The number of what was settled last.
    nth: u64,
    /// That, until it is known to be done; it is in no cell.
    doubted: Vec<Settlement>,
    /// Counters of which a portion is being asked for: who finds them too small meanwhile asks for no more than it needs, or a crowd
    /// that comes at once would lease the whole limit.
    asking: HashSet<Key>,
    /// Counters that were asked for more by requests that did not stay for the answer: their portion is to be told.
    unheard: HashSet<Key>,
    looked_at: Option<Instant>,
}

/// A counter's name and stretch of time.
type Key = (String, Window);

#[derive(Debug, Default)]
struct Cell {
    leased: u64,
    held: u64,
    /// To be told: parts of the lease that are over, and what was spent.
    over: u64,
    spent: u64,
    /// Unix seconds.
    lapses: u64,
    used_at: Option<Instant>,
    renewed_at: Option<Instant>,
    /// What all gateways had used when the store was last asked, our portion included.
    seen: u64,
}

/// What a request has of the shared counters.
#[derive(Debug)]
pub(super) struct Portion {
    key: Key,
    unit: Unit,
    tag: u16,
    /// 0: the store did not answer, and the limit is open.
    held: u64,
    amount: u64,
}

/// Why a request does not get what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// That claim does not fit; so much is used by all together.
    Full { claim: usize, used: u64 },
    /// The store does not answer, and that claim's limit is closed.
    Away { claim: usize },
}

/// A question to the store; whoever asked may leave before it is answered.
struct Asked<'a> {
    shared: &'a Shared,
    asks: &'a [Ask],
    /// Those of which it asks for a portion.
    portions: Vec<Key>,
    is_answered: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        for key in &self.portions {
            state.asking.remove(key);
        }
        drop(state);
        if !self.is_answered {
            self.shared.unheard(self.asks);
        }
    }
}

fn key(ask: &Ask) -> Key {
    (ask.counter.clone(), ask.window)
}

struct Want {
    key: Key,
    sliding: bool,
    max: u64,
    amount: u64,
    lapses: u64,
}

impl Shared {
    pub(super) fn new(counters: Arc<dyn Counters>, holder: String, ledger: Option<Sums>) -> Self {
        let (state, turn) = (Mutex::default(), RwLock::default());
        Self { counters, holder, ledger, state, turn, restored: AtomicU64::new(0), slow: AtomicU64::new(0) }
    }

    /// Requests that stopped waiting for a store that was slow.
    pub(super) fn slow(&self) -> u64 {
        self.slow.load(Ordering::Relaxed)
    }

    /// Times that what the store had lost has been restored.
    pub(super) fn restored(&self) -> u64 {
        self.restored.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what is claimed, all or nothing. `policy` says for each claim what happens while the store is away.
    pub(super) async fn take(
        &self,
        claims: &[Claim<'_>],
        policy: impl Fn(usize) -> OnStoreFailure,
    ) -> Result<Vec<Portion>, Refused> {
        let wants: Vec<Want> = claims.iter().map(want).collect();
        let closed = (0..claims.len()).find(|at| policy(*at) == OnStoreFailure::Closed);
        let wait_max = if closed.is_some() { WAIT_CLOSED } else { WAIT_OPEN };
        let deadline = tokio::time::Instant::now() + wait_max;
        for _ in 0..TRIES {
            let asks = match self.hold_all(&wants) {
                None => return Ok(portions(claims, wants, true)),
                Some(asks) => asks,
            };
            match self.ask(&wants, &asks, closed.is_some(), deadline).await {
                Ok(None) => {}
                Ok(Some((at, used))) => return Err(Refused::Full { claim: asks[at], used }),
                Err(()) => {
                    return match closed {
                        Some(claim) => Err(Refused::Away { claim }),
                        None => Ok(portions(claims, wants, false)),
                    };
                }
            }
        }
        Err(Refused::Full { claim: 0, used: claims[0].measure.max })
    }

    /// Holds everything in this gateway's portions; else says which wants need more, and holds nothing.
    fn hold_all(&self, wants: &[Want]) -> Option<Vec<usize>> {
        let (mut state, now) = (self.state(), clock::unix_seconds());
        let lacking = |state: &State, want: &Want| {
            state.cells.get(&want.key).is_none_or(|cell| cell.left(now) < want.amount) && want.amount > 0
        };
        let asks: Vec<usize> = (0..wants.len()).filter(|at| lacking(&state, &wants[*at])).collect();
        if !asks.is_empty() {
            return Some(asks);
        }
        for want in wants {
            let cell = state.cells.entry(want.key.clone()).or_default();
            cell.held += want.amount;
            cell.used_at = Some(Instant::now());
        }
        None
    }

    /// Asks the store for more; `Some`: that ask does not fit. An error: it does not answer. `needed`: without an answer the request is
    /// refused.
    async fn ask(
        &self,
        wants: &[Want],
        which: &[usize],
        needed: bool,
        deadline: tokio::time::Instant,
    ) -> Result<Option<(usize, u64)>, ()> {
        let heard = {
            let (state, now) = (self.state(), Instant::now());
            let is_slow = !needed && state.slow_until.is_some_and(|until| now < until);
            if !state.is_begun || is_slow || state.down_until.is_some_and(|until| now < until) {
                return Err(());
            }
            state.heard
        };
        let Ok(_turn) = timeout_at(deadline, self.turn.read()).await else { return Err(()) };
        let now = clock::unix_seconds();
        let mut portions = Vec::new();
        let asks: Vec<Ask> = {
            let mut state = self.state();
            let ask = |at: &usize| {
                let want = &wants[*at];
                let left = state.cells.get(&want.key).map_or(0, |cell| cell.left(now));
                let least = want.amount.saturating_sub(left).max(1);
                let is_first = state.asking.insert(want.key.clone());
                portions.extend(is_first.then(|| want.key.clone()));
                Ask {
                    counter: want.key.0.clone(),
                    window: want.key.1,
                    sliding: want.sliding,
                    max: want.max,
                    want: if is_first { least.max(want.max / PORTIONS) } else { least },
                    least,
                    until: want.lapses,
                }
            };
            which.iter().map(ask).collect()
        };
        let mut asked = Asked { shared: self, asks: &asks, portions, is_answered: false };
        let answer = timeout_at(deadline, self.counters.take(&self.holder, &asks, true, now)).await;
        asked.is_answered = true;
        match answer {
            Ok(Ok(grants)) => {
                let full = asks.iter().zip(&grants).position(|(ask, grant)| grant.granted < ask.least);
                self.up();
                let mut state = self.state();
                for (ask, grant) in asks.iter().zip(&grants) {
                    let cell = state.cells.entry(key(ask)).or_default();
                    cell.leased += grant.granted;
                    cell.seen = grant.used;
                    cell.lapses = cell.lapses.max(ask.until);
                    cell.renewed_at = Some(Instant::now());
                }
                Ok(full.map(|at| (at, grants[at].used)))
            }
            Ok(Err(StoreError::Lost)) => self.lost(),
            Ok(Err(error)) => self.unknown(&asks, &error.to_string()),
            Err(_) if needed && self.state().heard == heard => self.unknown(&asks, "no answer in time"),
            Err(_) => self.late(&asks),
        }
    }

    /// The store is slow: others were answered meanwhile, or it was not waited for long. That concerns this request only.
    fn late<T>(&self, asks: &[Ask]) -> Result<T, ()> {
        self.unheard(asks);
        let now = Instant::now();
        let before = self.state().slow_until.replace(now + DOWN_FOR);
        if self.slow.fetch_add(1, Ordering::Relaxed) == 0 || before.is_none_or(|until| now > until + SLOW_QUIET) {
            tracing::warn!("the shared counters answer slowly: requests go on without waiting");
        }
        Err(())
    }

    /// Nobody knows what was granted: that is told when the store is back.
    fn unknown<T>(&self, asks: &[Ask], why: &str) -> Result<T, ()> {
        self.unheard(asks);
        self.down(why)
    }

    /// The same, of a store that may well answer.
    fn unheard(&self, asks: &[Ask]) {
        let mut state = self.state();
        for ask in asks {
            let cell = state.cells.entry(key(ask)).or_default();
            cell.lapses = cell.lapses.max(ask.until);
            cell.used_at = cell.used_at.or_else(|| Some(Instant::now()));
        }
        state.unheard.extend(asks.iter().map(key));
    }

    /// What was counted is gone: it is restored at once.
    fn lost<T>(&self) -> Result<T, ()> {
        let mut state = self.state();
        (state.is_begun, state.down_until) = (false, None);
        Err(())
    }

    fn failed(&self, why: &StoreError) {
        let _ = match why {
            StoreError::Lost => self.lost::<()>(),
            why => self.down(&why.to_string()),
        };
    }

    fn down<T>(&self, why: &str) -> Result<T, ()> {
        let mut state = self.state();
        let was_up = state.down_until.is_none();
        state.down_until = Some(Instant::now() + DOWN_FOR);
        // It may come back without what it had.
        state.is_begun = false;
        drop(state);
        if was_up {
            tracing::error!(
                why,
                "the shared counters cannot be reached: limits with on_store_failure = open count at this gateway alone, the others refuse requests"
            );
        }
        Err(())
    }

    fn up(&self) {
        let mut state = self.state();
        state.heard = state.heard.wrapping_add(1);
        let was_down = state.down_until.take().is_some();
        drop(state);
        if was_down {
            tracing::info!("the shared counters answer again");
        }
    }

    /// Whether the store answers.
    pub(super) fn is_up(&self) -> bool {
        let state = self.state();
        state.down_until.is_none() && state.is_begun
    }

    /// What all gateways have used of the counters that are claimed, as far as it is known here.
    pub(super) fn used(&self, claims: &[Claim<'_>]) -> Vec<u64> {
        let wants: Vec<Want> = claims.iter().map(want).collect();
        let (state, now) = (self.state(), clock::unix_seconds());
        let of = |want: &Want| state.cells.get(&want.key).map_or(0, |cell| cell.seen.saturating_sub(cell.left(now)));
        wants.iter().map(of).collect()
    }

    /// What was held has ended; `spent` as in the book.
    pub(super) fn settle(&self, portions: Vec<Portion>, mut spent: impl FnMut(u16, Unit) -> Option<u64>) {
        let mut state = self.state();
        for portion in portions {
            let Portion { key, unit, tag, held, amount } = portion;
            let cell = state.cells.entry(key).or_default();
            cell.held = cell.held.saturating_sub(held);
            if unit == Unit::InFlight {
                // A place is free for the next one here.
                continue;
            }
            let spent = spent(tag, unit).unwrap_or(amount);
            // What was not used stays in the portion.
            let over = spent.min(held).min(cell.leased);
            cell.leased -= over;
            cell.over += over;
            cell.spent += spent;
        }
    }
}

/// About how long until a span lets more in.
pub(super) fn wait_ms(span: Span) -> Option<u64> {
    let window = window(span, clock::unix_seconds()).0;
    let end = window.end()? * 1000;
    Some(end.saturating_sub(clock::since_epoch().as_millis() as u64))
}

impl Cell {
    /// All of it, as the store has it.
    fn kept(&self, (counter, window): &Key) -> Kept {
        Kept { counter: counter.clone(), window: *window, amount: self.leased + self.over, until: self.lapses }
    }

    /// What the portion has left.
    fn left(&self, now: u64) -> u64 {
        if self.lapses <= now { 0 } else { self.leased.saturating_sub(self.held) }
    }
}

fn portions(claims: &[Claim<'_>], wants: Vec<Want>, is_held: bool) -> Vec<Portion> {
    let portion = |(claim, want): (&Claim<'_>, Want)| Portion {
        key: want.key,
        unit: claim.measure.unit,
        tag: claim.tag,
        held: if is_held { want.amount } else { 0 },
        amount: want.amount,
    };
    claims.iter().zip(wants).map(portion).collect()
}

/// What the ledger says of a counter.
fn kept(sum: &Sum, now: u64) -> Kept {
    let counter = name(&sum.limit, &sum.subject, sum.measure);
    Kept { counter, window: window(sum.measure.span, now).0, amount: sum.amount, until: 0 }
}

fn name(limit: &str, subject: &str, measure: Measure) -> String {
    format!("{limit}/{subject}/{}", measure.name())
}

/// The stretch of time that is counted together, and whether the one before counts in part.
fn window(span: Span, now: u64) -> (Window, bool) {
    match span {
        Span::Now => (Window { start: 0, seconds: 0 }, false),
        Span::Second => (Window::at(now, 1), true),
        Span::Minute => (Window::at(now, 60), true),
        Span::Hour => (Window::at(now, 3600), true),
        Span::Day => (Window::at(now, 86_400), false),
        Span::Month => {
            let start = began(now * 1000).1 / 1000;
            // Into the next month, and back to its beginning.
            let end = began((start + 32 * 86_400) * 1000).1 / 1000;
            (Window { start, seconds: end - start }, false)
        }
    }
}

fn want(claim: &Claim<'_>) -> Want {
    let now = clock::unix_seconds();
    let (window, sliding) = window(claim.measure.span, now);
    let lapses = window.end().unwrap_or(now + IN_FLIGHT_SECONDS);
    let counter = name(claim.limit, claim.subject, claim.measure);
    Want { key: (counter, window), sliding, max: claim.measure.max, amount: claim.amount, lapses }
}

#[cfg(test)]
mod faults;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use async_trait::async_trait;
    use penstock_store::{Grant, MemoryCounters};

    use super::report::REPORTS;
    use super::*;

    /// A store that can be cut off, and counts round trips.
    #[derive(Default)]
    struct Store {
        inner: MemoryCounters,
        away: AtomicBool,
        /// Settles what it is told, and does not say so.
        mute: AtomicBool,
        trips: AtomicU64,
        /// Its answers come after so many milliseconds.
        late_ms: AtomicU64,
    }

    #[async_trait]
    impl Counters for Store {
        async fn take(&self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Result<Vec<Grant>, StoreError> {
            self.trips.fetch_add(1, Ordering::Relaxed);
            let late = self.late_ms.load(Ordering::Relaxed);
            // Who comes at the same time asks before this is answered.
            tokio::task::yield_now().await;
            if self.away.load(Ordering::Relaxed) {
                // It does what it is asked, and nobody hears of it.
                self.inner.take(holder, asks, whole, now).await?;
                return std::future::pending().await;
            }
            let answer = self.inner.take(holder, asks, whole, now).await;
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
            if self.mute.load(Ordering::Relaxed) { std::future::pending().await } else { Ok(()) }
        }
    }

    fn measure(unit: Unit, span: Span, max: u64) -> Measure {
        Measure { unit, span, max }
    }

    /// A gateway's side, that has asked the store.
    fn begun(store: &Arc<Store>, name: &str) -> Shared {
        let shared = Shared::new(store.clone(), name.into(), None);
        shared.state().is_begun = true;
        shared
    }

    async fn try_take(shared: &Shared, measure: Measure, amount: u64) -> Result<Vec<Portion>, Refused> {
        let limit: Arc<str> = "l".into();
        shared.take(&[Claim { limit: &limit, subject: "k", measure, amount, tag: 0 }], |_| OnStoreFailure::Open).await
    }

    async fn take_closed(shared: &Shared, measure: Measure, amount: u64) -> Result<Vec<Portion>, Refused> {
        let limit: Arc<str> = "l".into();
        shared.take(&[Claim { limit: &limit, subject: "k", measure, amount, tag: 0 }], |_| OnStoreFailure::Closed).await
    }

    /// Answers that come late refuse nobody: each request waits for its own.
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

    /// One answer is too late and others are not: that one request is refused, and the next are not.
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
        // What it was granted after it had left is nobody's: it is told so, and fits again.
        assert!(gateway.correct().await);
        take_closed(&gateway, day, 1000).await.expect("answered in time");
    }

    /// What is told of a counter is what all have used, not what this gateway has.
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
        assert!(
            taken.iter().all(|taken| taken.as_ref().is_ok_and(|portions| portions[0].held == 17)),
            "all of it fits"
        );
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

    /// More counters than fit one report: the first one is done and not answered, the second is never sent.
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
        // What is left of each portion goes back, too.
        gateway.report_once(Instant::now() + IDLE * 2).await;
        for subject in &subjects {
            let Want { key: (counter, window), lapses: until, .. } = want(&claim(subject, 0));
            let ask = Ask { counter, window, sliding: false, max: 1000, want: 0, least: 0, until };
            let grant = store.inner.take("a", &[ask], false, clock::unix_seconds()).await.expect("asked")[0];
            assert_eq!((grant.leased, grant.used), (0, 7), "{subject}");
        }
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
}
