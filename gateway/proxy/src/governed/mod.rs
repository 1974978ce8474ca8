//! Limits and money on the way of a request: reserved before it is sent on, settled when it has ended, however it ends.
//!
//! [`admit`] finds the limits that a call is under ([`Rules`]), guesses what it will use ([`estimate`]), and asks the book for all of it at
//! once. What it gets is a [`Reservation`], which settles itself when it is dropped: it travels with the call until the answer's events
//! carry it ([`events`]), so there is no way for a request to end that does not pass there. Where no limit applies nothing of this
//! happens, and nothing is paid for it.
//!
//! The arithmetic is `penstock_govern`'s; here is what surrounds it: who is counted as what ([`rules`]), prices ([`bill`]), what clients
//! are told ([`told`]).

mod bill;
mod emitted;
mod estimate;
mod events;
mod reservation;
mod rules;
mod status;
mod told;

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_govern::{Book, BookState, Calendar, Claim, Hold, Learned, Limit, Now, Unit, Unmetered};
use penstock_proto::ErrorKind;

pub(crate) use bill::Billing;
pub(crate) use events::Governed;
pub(crate) use reservation::Reservation;
pub use rules::Rules;
pub(crate) use status::status;
pub use status::{CounterState, LimitState};
pub use told::Refusal;

use crate::auth::Principal;
use crate::call::Call;
use crate::clock;
use crate::error::Failure;
use crate::relay::models::Entry;
use crate::serving::Serving;
use crate::telemetry::{Gauge, Metric, Metrics};
use crate::upgrade::Give;
use estimate::Guess;
use rules::Who;

/// The clock of the windows begins here, so that what another process counted before this one began has a place before it.
const CLOCK_BASE: Duration = Duration::from_secs(10 * 86_400);

/// What limits keep for as long as the process lives.
pub struct Governor {
    state: Mutex<State>,
    began: Instant,
    metrics: Arc<Metrics>,
}

struct State {
    book: Book,
    calendar: Calendar,
    learned: HashMap<Arc<str>, Learned>,
    swept_ms: u64,
    /// Another process goes on with the book: it is told what is settled here.
    give: Option<Give>,
}

/// Counters that say nothing any more are dropped this often.
const SWEEP_MS: u64 = 60_000;

/// What a request was to use and what it used, for the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Tokens that were reserved.
    pub reserved_tokens: u64,
    /// Billionths of a dollar that were reserved.
    pub reserved_nano_usd: u64,
    /// Tokens that were counted.
    pub tokens: u64,
    /// Billionths of a dollar that were counted: every attempt that may bill.
    pub nano_usd: u64,
    /// The upstream did not say what it used.
    pub estimated: bool,
}

impl Governor {
    /// With empty counters; counts itself in `metrics`.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        let base = CLOCK_BASE.as_millis() as u64;
        let calendar = Calendar::new(base, clock::since_epoch().as_millis() as u64);
        let state = State { book: Book::new(), calendar, learned: HashMap::new(), swept_ms: base, give: None };
        Self { state: Mutex::new(state), began: Instant::now(), metrics }
    }

    /// The state and the time, for a few look-ups.
    fn state(&self) -> (MutexGuard<'_, State>, Now) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mono_ms = (CLOCK_BASE + self.began.elapsed()).as_millis() as u64;
        let now = state.calendar.now(mono_ms, clock::since_epoch().as_millis() as u64);
        if now.mono_ms >= state.swept_ms + SWEEP_MS {
            state.swept_ms = now.mono_ms;
            state.book.sweep(now);
        }
        (state, now)
    }

    fn learned(&self, model: &str) -> Learned {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).learned.get(model).copied().unwrap_or_default()
    }

    /// Everything that is counted and held, for a process that goes on with it; from now on it is told what is settled here.
    pub(crate) fn give_away(&self, give: Give) -> BookState {
        let (mut state, now) = self.state();
        state.give = Some(give);
        state.book.export(now)
    }

    /// Nobody is told any more.
    pub(crate) fn keep(&self) {
        self.state().0.give = None;
    }

    /// Goes on with what another process gives away.
    pub(crate) fn import(&self, book: BookState) {
        let (mut state, now) = self.state();
        state.book.import(book, now);
    }

    /// That process has settled one of its holds.
    pub(crate) fn settle_adopted(&self, id: u64, amounts: &[(u16, Unit, u64)]) {
        let (mut state, now) = self.state();
        let of = |tag, unit| amounts.iter().find(|one| (one.0, one.1) == (tag, unit)).map_or(0, |one| one.2);
        state.book.settle_id(id, now, of);
    }

    /// That process has ended: what it has not settled counts as it was reserved.
    pub(crate) fn end_adopted(&self) {
        let (mut state, now) = self.state();
        state.book.end_adopted(now);
    }

    /// Gauges, for `/metrics`.
    pub(crate) fn gauges(&self, out: &mut Vec<(Gauge, String, f64)>) {
        let (state, _) = self.state();
        out.push((Gauge::LimitCounters, String::new(), state.book.len() as f64));
        out.push((Gauge::LimitHolds, String::new(), state.book.open() as f64));
    }
}

/// Reserves what a call will use; `None`: no limit counts it. Bounds of its output are put into the call. `free`: it is answered here.
///
/// # Errors
/// 429: what the limits leave is not enough; 403: a limit counts what nobody can know of this model.
pub(crate) async fn admit(
    governor: &Arc<Governor>,
    serving: &Serving,
    principal: &Principal,
    call: &mut Call,
    entry: &Entry,
    free: bool,
) -> Result<Option<Reservation>, Failure> {
    let limits = serving.rules.of(principal, &entry.name)?;
    if limits.is_empty() {
        return Ok(None);
    }
    call.bound_output(bounds(&limits));
    let guess = match !free && limits.iter().any(|limit| limit.needs_tokens()) {
        true => {
            check_metered(&limits, entry)?;
            Guess::of(call, entry, &governor.learned(&entry.name))
        }
        false => Guess::default(),
    };
    let from = call.client;
    let who = Who { principal, model: &entry.name, providers: &entry.billing.providers, from };
    let reservation = Reservation::new(governor.clone(), call, entry, guess);
    reserve(governor, &limits, &who, reservation).map(Some)
}

/// The same for what is passed on without being understood: its requests are counted, its tokens cannot be.
///
/// # Errors
/// As [`admit`].
pub(crate) fn admit_opaque(
    governor: &Arc<Governor>,
    serving: &Serving,
    principal: &Principal,
    entry: &Entry,
    from: Option<IpAddr>,
) -> Result<Option<Reservation>, Failure> {
    let limits = serving.rules.of(principal, &entry.name)?;
    if limits.is_empty() {
        return Ok(None);
    }
    let strict = limits.iter().find(|limit| limit.needs_tokens() && limit.unmetered == Unmetered::Refuse);
    if let Some(limit) = strict {
        return Err(unmetered(limit, "what this operation uses cannot be counted"));
    }
    let who = Who { principal, model: &entry.name, providers: &entry.billing.providers, from };
    reserve(governor, &limits, &who, Reservation::opaque(governor.clone(), entry)).map(Some)
}

fn reserve(
    governor: &Governor,
    limits: &[&Arc<Limit>],
    who: &Who<'_>,
    mut reservation: Reservation,
) -> Result<Reservation, Failure> {
    let subjects = rules::subjects(limits, who);
    let mut claims = Vec::with_capacity(subjects.len() * 2);
    for (limit, subject) in &subjects {
        for measure in &limit.measures {
            let amount = reservation.guess.of_unit(measure.unit, limit.reserve);
            claims.push(Claim {
                limit: &limit.id,
                subject,
                measure: *measure,
                amount,
                tag: reservation.tag(limit, subject),
            });
        }
    }
    let (mut state, now) = governor.state();
    let held: Result<Hold, _> = state.book.reserve(&claims, now);
    let standings = told::standings(&mut state.book, &claims, now);
    drop(state);
    match held {
        Ok(hold) => {
            reservation.hold(hold, told::fields(reservation.dialect, &standings, now));
            limits.iter().for_each(|limit| governor.count(limit, "allowed"));
            Ok(reservation)
        }
        Err(denied) => {
            let claim = &claims[denied.claim];
            governor.metrics.count(Metric::LimitDecisions, &[("limit", claim.limit), ("decision", "denied")]);
            let by = limits.iter().find(|limit| limit.id == *claim.limit).map_or("key", |limit| limit.by.name());
            Err(told::denied(claim, &denied, by, told::fields(reservation.dialect, &standings, now)))
        }
    }
}

impl Governor {
    fn count(&self, limit: &Limit, decision: &str) {
        self.metrics.count(Metric::LimitDecisions, &[("limit", &limit.id), ("decision", decision)]);
    }
}

/// The tightest bounds of output: for requests without one, and for all.
fn bounds(limits: &[&Arc<Limit>]) -> (Option<u32>, Option<u32>) {
    let of = |bound: fn(&Limit) -> Option<u32>| limits.iter().filter_map(|limit| bound(limit)).min();
    (of(|limit| limit.max_tokens_default), of(|limit| limit.max_tokens_max))
}

/// Money is only counted where it is known what things cost.
fn check_metered(limits: &[&Arc<Limit>], entry: &Entry) -> Result<(), Failure> {
    if !entry.billing.unpriced {
        return Ok(());
    }
    let strict = limits
        .iter()
        .find(|limit| limit.measures(penstock_govern::Unit::NanoUsd) && limit.unmetered == Unmetered::Refuse);
    strict.map_or(Ok(()), |limit| Err(unmetered(limit, "the model has no price here")))
}

fn unmetered(limit: &Limit, why: &str) -> Failure {
    let message = format!("The limit {:?} does not allow this request: {why}.", limit.id);
    Failure::new(ErrorKind::Forbidden, message).log("set a price, or unmetered = \"allow\" on the limit")
}
