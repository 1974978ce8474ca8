//! Counters shared by several gateways: this gateway's portion of each, leased in advance.
//!
//! A gateway leases portions of a counter from the shared store and serves most requests from its portion, without a
//! round trip. Only a request that finds the portion too small asks the store. A slow store is waited for: at most
//! [`WAIT_CLOSED`] by a request under a closed limit, at most [`WAIT_OPEN`] by others. After that the limit's
//! `on_store_failure` decides for that request: open, only the gateway's own counters count; closed, the request is
//! refused. A store that is gone (a broken connection, or no answer at all within that second or to a whole report) is
//! not asked for [`DOWN_FOR`], in which no request waits. One background task reports the used amounts a few times per
//! second; an idle portion's rest is returned. The gateway's own book always counts too, so a single gateway never lets
//! in more than the limit.
//!
//! Settlements carry a number as an idempotency key: if the answer is lost, the settlement is repeated under the same
//! number before any other, and the store applies it once.
//!
//! A store that was away may have lost its counters. It reports that itself, or is asked when it is back
//! ([`Counters::begin`]). Then days and months are restored from the ledger, which is the source of truth, and each
//! gateway reports its leases. Until then the store counts as away.
//!
//! A lease of places in flight lapses where it is not renewed for [`IN_FLIGHT_SECONDS`]: others may then take the places of
//! requests that still run here. Such a loss is logged, once, and so is the return: places in use are leased again as
//! soon as the store answers, whatever the maximum is.
//!
//! This file holds the part that requests wait for; [`report`] is the background task.
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
use penstock_base::clock;

/// Longest wait of a request for the store under a closed limit: without an answer the request is refused.
const WAIT_CLOSED: Duration = Duration::from_secs(1);
/// Longest wait of a request for the store under open limits: without an answer only the gateway's own counters count.
const WAIT_OPEN: Duration = Duration::from_millis(100);
/// Back-off after a failure of the store; after a slow answer, the same for requests under open limits.
const DOWN_FOR: Duration = Duration::from_secs(1);
/// Time without slow answers after which the next one is logged again.
const SLOW_QUIET: Duration = Duration::from_secs(30);
/// Idle time after which the rest of a portion is returned.
const IDLE: Duration = Duration::from_secs(2);
/// Fraction of a limit leased at once: 1/100.
const PORTIONS: u64 = 100;
/// Life of a lease of places in flight, in seconds, unless its gateway renews it.
const IN_FLIGHT_SECONDS: u64 = 15;
/// Most questions of one request to the store: others may take what was leased for it.
const TRIES: u32 = 3;

/// Longest wait at start for the shared counters.
pub(super) const BEGIN_MAX: Duration = Duration::from_secs(5);

/// Counters in a store that several gateways share, and the portions leased to this gateway.
pub(super) struct Shared {
    counters: Arc<dyn Counters>,
    /// Random id of this gateway process, the holder of its leases.
    holder: String,
    /// Reader of the ledger, for restoring lost counters; `None`: they cannot be restored.
    ledger: Option<Sums>,
    state: Mutex<State>,
    /// Lock between questions and reports of leases. Questions take it shared; a report of the leases takes it alone,
    /// so that each question is answered or given up before. Held no longer than the store's deadline.
    turn: RwLock<()>,
    /// Number of times that lost counters were restored from the ledger.
    restored: AtomicU64,
    /// Number of requests that stopped waiting for a slow store.
    slow: AtomicU64,
}

#[derive(Default)]
struct State {
    cells: HashMap<Key, Cell>,
    down_until: Option<Instant>,
    /// Instant until which requests under open limits do not ask the store.
    slow_until: Option<Instant>,
    /// Number of answers from the store so far; tells a slow store from a dead one.
    heard: u64,
    /// True if the store has been checked since it was away, so that its answers can be trusted.
    is_begun: bool,
    /// Instant until which the store grants nothing, while lost counters are to be restored.
    owed: Option<Instant>,
    /// Number of the last settlement that was sent to the store.
    nth: u64,
    /// Settlements whose answer has not come; their amounts are in no cell.
    doubted: Vec<Settlement>,
    /// Counters for which a portion is being asked: meanwhile other requests ask only for their own need, or a burst
    /// would lease the whole limit.
    asking: HashSet<Key>,
    /// Counters with a question that was given up: the store may have granted more than this gateway knows, so the leases are reported.
    unheard: HashSet<Key>,
    looked_at: Option<Instant>,
}

/// Name of a shared counter, and the time window that it counts in.
type Key = (String, Window);

#[derive(Debug, Default)]
struct Cell {
    leased: u64,
    held: u64,
    /// Ended part of the lease and spent amount, to be reported.
    over: u64,
    spent: u64,
    /// End of this gateway's lease on the counter, in Unix seconds.
    lapses: u64,
    used_at: Option<Instant>,
    renewed_at: Option<Instant>,
    /// Use by all gateways when the store was last asked, leases included.
    seen: u64,
    /// True if the lease was logged as lost and is not held again.
    is_lost: bool,
}

/// Amount that one request holds of one shared counter, taken from the gateway's lease.
#[derive(Debug)]
pub(super) struct Portion {
    key: Key,
    unit: Unit,
    tag: u16,
    /// Amount held in the cell; 0: the store did not answer, and the limit is open.
    held: u64,
    amount: u64,
}

impl Portion {
    /// Returns true if the store has granted the portion, or nothing had to be granted.
    pub(super) fn is_counted(&self) -> bool {
        self.held == self.amount
    }
}

/// Reason why a request does not get its claims on shared counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// The claim with this index does not fit; `used`: by all gateways together.
    Full { claim: usize, used: u64 },
    /// The store does not answer, and the limit of this claim is closed.
    Away { claim: usize },
}

/// Question to the store, whose caller may leave before the answer.
struct Asked<'a> {
    shared: &'a Shared,
    asks: &'a [Ask],
    /// Counters for which the question asks for a portion.
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

    /// Number of requests that stopped waiting for a slow store.
    pub(super) fn slow(&self) -> u64 {
        self.slow.load(Ordering::Relaxed)
    }

    /// Number of times that lost counters were restored from the ledger, for the metric.
    pub(super) fn restored(&self) -> u64 {
        self.restored.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves the claims, all or nothing. `policy`: the behaviour of each claim's limit while the store is away.
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

    /// Holds all wants in this gateway's portions, or returns the indexes of those that need more and holds nothing.
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

    /// Asks the store for larger portions. `Some`: this want does not fit, with the use by all gateways. `needed`:
    /// without an answer the request is refused.
    ///
    /// # Errors
    /// The store does not answer.
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
                    // Only a renewal finds out that a lease is lost, so an answer does not put the renewal off. Where the
                    // store has less than this gateway believes, the next report renews at once; answers that overtake
                    // each other look the same, and cost one renewal.
                    match grant.leased < cell.leased {
                        true => cell.renewed_at = None,
                        false => cell.renewed_at = cell.renewed_at.or_else(|| Some(Instant::now())),
                    }
                }
                Ok(full.map(|at| (at, grants[at].used)))
            }
            Ok(Err(StoreError::Lost)) => self.lost(),
            Ok(Err(error)) => self.unknown(&asks, &error.to_string()),
            Err(_) if needed && self.state().heard == heard => self.unknown(&asks, "no answer in time"),
            Err(_) => self.late(&asks),
        }
    }

    /// Handles an answer that came too late, from a store that answers others or was not waited for long. Affects this request only.
    fn late<T>(&self, asks: &[Ask]) -> Result<T, ()> {
        self.unheard(asks);
        let now = Instant::now();
        let before = self.state().slow_until.replace(now + DOWN_FOR);
        if self.slow.fetch_add(1, Ordering::Relaxed) == 0 || before.is_none_or(|until| now > until + SLOW_QUIET) {
            tracing::warn!("the shared counters answer slowly: requests go on without waiting");
        }
        Err(())
    }

    /// Handles an unknown grant of a store that is gone: the leases are reported when it is back.
    fn unknown<T>(&self, asks: &[Ask], why: &str) -> Result<T, ()> {
        self.unheard(asks);
        self.down(why)
    }

    /// Notes an unknown grant of a store that may be up.
    fn unheard(&self, asks: &[Ask]) {
        let mut state = self.state();
        for ask in asks {
            let cell = state.cells.entry(key(ask)).or_default();
            cell.lapses = cell.lapses.max(ask.until);
            cell.used_at = cell.used_at.or_else(|| Some(Instant::now()));
        }
        state.unheard.extend(asks.iter().map(key));
    }

    /// Handles a store that has lost its counters: they are restored at once.
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
        // The store may come back without its counters.
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

    /// Returns true if the store answers and is not being restored.
    pub(super) fn is_up(&self) -> bool {
        let state = self.state();
        state.down_until.is_none() && state.is_begun
    }

    /// Use of the claimed counters by all gateways, as far as this one knows.
    pub(super) fn used(&self, claims: &[Claim<'_>]) -> Vec<u64> {
        let wants: Vec<Want> = claims.iter().map(want).collect();
        let (state, now) = (self.state(), clock::unix_seconds());
        let of = |want: &Want| state.cells.get(&want.key).map_or(0, |cell| cell.seen.saturating_sub(cell.left(now)));
        wants.iter().map(of).collect()
    }

    /// Ends the holds of a request. `spent`: as for the book, `None` for the reserved amount.
    pub(super) fn settle(&self, portions: Vec<Portion>, mut spent: impl FnMut(u16, Unit) -> Option<u64>) {
        let mut state = self.state();
        for portion in portions {
            let Portion { key, unit, tag, held, amount } = portion;
            let cell = state.cells.entry(key).or_default();
            cell.held = cell.held.saturating_sub(held);
            if unit == Unit::InFlight {
                // The place stays in the portion, for the next request here.
                continue;
            }
            let spent = spent(tag, unit).unwrap_or(amount);
            // The unused rest stays in the portion.
            let over = spent.min(held).min(cell.leased);
            cell.leased -= over;
            cell.over += over;
            cell.spent += spent;
        }
    }
}

/// Milliseconds until a window ends; `None` for a count of requests in flight.
pub(super) fn wait_ms(span: Span) -> Option<u64> {
    let window = window(span, clock::unix_seconds()).0;
    let end = window.end()? * 1000;
    Some(end.saturating_sub(clock::since_epoch().as_millis() as u64))
}

impl Cell {
    /// Whole lease of this gateway, as the store holds it.
    fn kept(&self, (counter, window): &Key) -> Kept {
        Kept { counter: counter.clone(), window: *window, amount: self.leased + self.over, until: self.lapses }
    }

    /// Returns true if the lease is in use and was not logged as lost, so that its loss is news.
    fn is_loss(&self) -> bool {
        self.held > 0 && !self.is_lost
    }

    /// Free rest of the portion; 0 after the lease has lapsed.
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

/// Restored use of a counter from the ledger's sum.
fn kept(sum: &Sum, now: u64) -> Kept {
    let counter = name(&sum.limit, &sum.subject, sum.measure);
    Kept { counter, window: window(sum.measure.span, now).0, amount: sum.amount, until: 0 }
}

fn name(limit: &str, subject: &str, measure: Measure) -> String {
    format!("{limit}/{subject}/{}", measure.name())
}

/// Time window that is counted together, and whether the previous window counts in part (sliding).
fn window(span: Span, now: u64) -> (Window, bool) {
    match span {
        Span::Now => (Window { start: 0, seconds: 0 }, false),
        Span::Second => (Window::at(now, 1), true),
        Span::Minute => (Window::at(now, 60), true),
        Span::Hour => (Window::at(now, 3600), true),
        Span::Day => (Window::at(now, 86_400), false),
        Span::Month => {
            let start = began(now * 1000).1 / 1000;
            // A date of the next month, whose beginning is this month's end.
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

    /// Store double that can be cut off and counts round trips.
    #[derive(Default)]
    struct Store {
        inner: MemoryCounters,
        away: AtomicBool,
        /// True if settlements take effect without an answer.
        mute: AtomicBool,
        trips: AtomicU64,
        /// Delay of the store's answers, in milliseconds.
        late_ms: AtomicU64,
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

    /// A gateway that has checked the store.
    fn begun(store: &Arc<Store>, name: &str) -> Shared {
        let shared = Shared::new(store.clone(), name.into(), None);
        shared.state().is_begun = true;
        shared
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
        let lines: Vec<_> = log.lines().filter(|line| line.contains("a lease of a limit")).collect();
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
            ("a lease of a limit is lost", "further leases of limits are lost", 2),
            ("a lease of a limit is held again", "further leases of limits are held again", 1),
            ("a lost lease of a limit is not needed", "further lost leases of limits are not needed", 1),
        ] {
            assert_eq!((lines(named), lines(more)), (16 * times, times), "{named}: {log}");
        }
        assert_eq!(lines(&format!("leases={}", MANY - 16)), 4, "{log}");
    }

    async fn take_closed(shared: &Shared, measure: Measure, amount: u64) -> Result<Vec<Portion>, Refused> {
        let limit: Arc<str> = "l".into();
        shared.take(&[Claim { limit: &limit, subject: "k", measure, amount, tag: 0 }], |_| OnStoreFailure::Closed).await
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
