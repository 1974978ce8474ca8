//! Counters shared by several gateways: this gateway's portion of each, leased in advance.
//!
//! A gateway leases portions of a counter from the shared store and serves most requests from its portion, without a
//! round trip. Only a request that finds the portion too small asks the store. A slow store is waited for: at most
//! [`WAIT_CLOSED`] by a request under a closed limit, at most [`WAIT_OPEN`] by others. After that the limit's
//! `on_store_failure` decides for that request: open, only the gateway's own counters count; closed, the request is
//! refused. A store that is gone (a broken connection, or no answer at all within that second or to a whole report) is
//! not asked for [`DOWN_FOR`], in which no request waits. A question that the store cannot be asked (more counters than one
//! call takes) concerns its own request alone. One background task reports the used amounts a few times per
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

mod look;
mod report;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_govern::{Claim, Measure, OnStoreFailure, Span, Unit, began};
use penstock_store::{Ask, Counters, Kept, Settlement, StoreError, Window, is_counter_name};
use tokio::sync::RwLock;
use tokio::time::{sleep_until, timeout_at};

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
/// Length of a day, the shortest window that does not slide, in seconds.
const DAY_SECONDS: u64 = 86_400;
/// Most questions of one request to the store: others may take what was leased for it. After that the limit decides as if
/// the store were away.
const TRIES: u32 = 3;
/// Longest pause before a request asks again, in milliseconds; the pauses are random, so that those who compete for a
/// portion do not meet again.
const PAUSE_MS_MAX: u64 = 8;

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
    /// Uses by all gateways, for those who look at counters.
    looks: Mutex<look::Looks>,
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
    /// Instant until which questions that the store cannot be asked are not logged again.
    refused_until: Option<Instant>,
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
    /// True while amounts that were taken out of the cells, or leases after questions that were given up, are being reported.
    is_reporting: bool,
    /// True once the process ends: no rest of a portion is kept for further requests.
    is_ending: bool,
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
    /// The store does not answer, or others have used what it granted each time, and the limit of this claim is closed.
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
        let looks = Mutex::default();
        Self { counters, holder, ledger, state, turn, looks, restored: AtomicU64::new(0), slow: AtomicU64::new(0) }
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
        let closed = (0..claims.len()).find(|at| policy(*at) == OnStoreFailure::Closed);
        let wait_max = if closed.is_some() { WAIT_CLOSED } else { WAIT_OPEN };
        let deadline = tokio::time::Instant::now() + wait_max;
        for nth in 0..TRIES {
            if nth > 0 {
                sleep_until(deadline.min(tokio::time::Instant::now() + pause())).await;
            }
            // Anew for each try: a window may have ended meanwhile.
            let wants: Vec<Want> = claims.iter().map(want).collect();
            let asks = match self.hold_all(&wants) {
                None => return Ok(portions(claims, wants, true)),
                Some(asks) => asks,
            };
            match self.ask(&wants, &asks, closed.is_some(), deadline).await {
                Ok(None) => {}
                Ok(Some((at, used))) => return Err(Refused::Full { claim: asks[at], used }),
                Err(()) => break,
            }
            // At once, before others take it.
            let wants: Vec<Want> = claims.iter().map(want).collect();
            if self.hold_all(&wants).is_none() {
                return Ok(portions(claims, wants, true));
            }
        }
        // Without an answer, or with answers that others were quicker to use: no reason to say that there is no room.
        match closed {
            Some(claim) => Err(Refused::Away { claim }),
            None => Ok(portions(claims, claims.iter().map(want).collect(), false)),
        }
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
            Ok(Err(StoreError::Misuse(why))) => self.refused(asks.len(), why),
            Ok(Err(error)) => self.unknown(&asks, &error.to_string()),
            Err(_) if needed && self.state().heard == heard => self.unknown(&asks, "no answer in time"),
            Err(_) => self.late(&asks),
        }
    }

    /// Handles a question that the store cannot be asked. Affects this request only: nothing was sent.
    fn refused<T>(&self, counters: usize, why: &str) -> Result<T, ()> {
        let now = Instant::now();
        let before = self.state().refused_until.replace(now + SLOW_QUIET);
        if before.is_none_or(|until| now > until) {
            tracing::error!(
                counters,
                why,
                "the shared counters cannot be asked for a request: its limits decide by on_store_failure"
            );
        }
        Err(())
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

    /// Adds the amounts of claims that were not asked for before: another provider than the expected ones has answered.
    pub(super) fn spend(&self, claims: &[Claim<'_>]) {
        let wants = claims.iter().map(want).filter(|want| want.amount > 0 && is_counter_name(&want.key.0));
        let mut state = self.state();
        for want in wants {
            let cell = state.cells.entry(want.key).or_default();
            cell.spent = cell.spent.saturating_add(want.amount);
        }
    }

    /// Ends the holds of a request. `spent`: as for the book, `None` for the reserved amount.
    pub(super) fn settle(&self, portions: Vec<Portion>, mut spent: impl FnMut(u16, Unit) -> Option<u64>) {
        let mut state = self.state();
        for portion in portions {
            let Portion { key, unit, tag, held, amount } = portion;
            if held == 0 && !is_counter_name(&key.0) {
                // The store has no such counter, and would refuse the whole report.
                continue;
            }
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
            cell.spent = cell.spent.saturating_add(spent);
        }
    }

    /// Returns true if the store was told every amount and has every portion back, but for what requests hold, or if it is
    /// away. For a process that ends: from the first call on, each report returns the rests of portions, which would stay
    /// leased until their windows end.
    pub(super) fn is_returned(&self) -> bool {
        let is_up = self.is_up();
        let mut state = self.state();
        state.is_ending = true;
        let is_done = |cell: &Cell| cell.leased <= cell.held && cell.over == 0 && cell.spent == 0;
        let is_heard = state.doubted.is_empty() && state.unheard.is_empty();
        !is_up || !state.is_reporting && is_heard && state.cells.values().all(is_done)
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

    /// Returns true if the store need not be told of the cell, and no request holds a part of it: its window counts no
    /// more, or there is nothing in it.
    fn is_needless(&self, window: &Window, now: u64) -> bool {
        // A sliding window counts the one before it, too.
        let counts = if window.seconds < DAY_SECONDS { window.seconds } else { 0 };
        let is_past = window.end().is_some_and(|end| end.saturating_add(counts) <= now);
        // A lease that has not lapsed is reported even as 0: the store may have granted more than is known here.
        let is_empty = self.leased == 0 && self.over == 0 && self.spent == 0 && self.lapses <= now && !self.is_lost;
        self.held == 0 && (is_past || is_empty)
    }

    /// Free rest of the portion; 0 after the lease has lapsed.
    fn left(&self, now: u64) -> u64 {
        if self.lapses <= now { 0 } else { self.leased.saturating_sub(self.held) }
    }
}

/// Random pause of up to [`PAUSE_MS_MAX`]; the longest if there are no random numbers.
fn pause() -> Duration {
    Duration::from_millis(getrandom::u64().map_or(PAUSE_MS_MAX, |random| 1 + random % PAUSE_MS_MAX))
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
fn kept(sum: &Sum) -> Kept {
    let counter = name(&sum.limit, &sum.subject, sum.measure);
    Kept { counter, window: window(sum.measure.span, sum.from).0, amount: sum.amount, until: 0 }
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
        Span::Day => (Window::at(now, DAY_SECONDS), false),
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
impl Shared {
    /// Portions of a gateway that has checked the store.
    pub(super) fn with_store(counters: Arc<dyn Counters>, holder: &str) -> Self {
        let shared = Self::new(counters, holder.into(), None);
        shared.state().is_begun = true;
        shared
    }
}

#[cfg(test)]
mod faults;

#[cfg(test)]
mod restoring;

#[cfg(test)]
mod tests;
