//! One target: an upstream, how it does, and what it costs. Shared by all models that name it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::balance::{self, Latency, View};
use super::breaker::{Admission, Breaker, Rules, Ticket};
use super::models::TargetState;
use crate::prices::{ModelFacts, Price};
use crate::upstream::Upstream;

/// Longest time that a target may ask to be left alone.
const COOLING_MAX: Duration = Duration::from_secs(60);

/// Bad checks in a row that open the breaker: one can be an accident.
const MISSES_MAX: u32 = 2;

/// An upstream among others.
pub(crate) struct Target {
    /// `pool` or `provider/model`.
    pub(crate) id: Arc<str>,
    pub(crate) upstream: Arc<dyn Upstream>,
    /// What the price table says of it.
    pub(crate) facts: Option<ModelFacts>,
    hash: u64,
    state: Arc<State>,
}

/// What outlives a reload.
struct State {
    in_flight: AtomicUsize,
    /// Tokens of prompts that were sent there and have not been answered.
    pending_tokens: AtomicU64,
    health: Mutex<Health>,
}

struct Health {
    /// Active checks in a row that found it bad.
    misses: u32,
    breaker: Breaker,
    /// To the first event: of streams, of whole answers.
    latency: [Latency; 2],
}

/// What a request would need, for a rough price.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) stream: bool,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
}

impl Target {
    pub(crate) fn new(id: &str, upstream: Arc<dyn Upstream>, facts: Option<ModelFacts>) -> Self {
        let health = Health { misses: 0, breaker: Breaker::new(Rules::DEFAULT), latency: Default::default() };
        let state = Arc::new(State {
            in_flight: AtomicUsize::new(0),
            pending_tokens: AtomicU64::new(0),
            health: Mutex::new(health),
        });
        Self { id: id.into(), upstream, facts, hash: balance::hash(id.as_bytes()), state }
    }

    /// The same target under another config: what is known of its health goes on, and so do requests that are there.
    pub(crate) fn carried(&self, upstream: Arc<dyn Upstream>, facts: Option<ModelFacts>) -> Self {
        Self { id: self.id.clone(), upstream, facts, hash: self.hash, state: self.state.clone() }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.state.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request may go there. One that says itself that it is not ready is the last choice.
    pub(crate) fn look(&self, now: Instant) -> Admission {
        let admission = self.health().breaker.look(now);
        match admission {
            Admission::Yes if self.upstream.unready().is_some() => Admission::Last,
            other => other,
        }
    }

    /// What a choice needs to know.
    pub(crate) fn view(&self, index: usize, weight: u32, price: Option<Price>, size: Size, now: Instant) -> View {
        let seconds = self.health().latency[usize::from(!size.stream)].expected(now);
        let usd = price.map_or(0.0, |price| price.usd(size.prompt_tokens, 0, 0, size.completion_tokens));
        let in_flight = self.state.in_flight.load(Ordering::Relaxed);
        let pending_tokens = self.state.pending_tokens.load(Ordering::Relaxed);
        View { index, weight, in_flight, seconds, usd, pending_tokens, own_tokens: size.prompt_tokens, hash: self.hash }
    }

    /// Longest sequence, by its own word or the table's; 0: not known.
    pub(crate) fn context_tokens(&self) -> u32 {
        match self.upstream.card().context_tokens {
            0 => self.facts.map_or(0, |facts| facts.context_tokens),
            own => own,
        }
    }

    /// Requests there now.
    pub(crate) fn in_flight(&self) -> usize {
        self.state.in_flight.load(Ordering::Relaxed)
    }

    /// State of the breaker, as the metric shows it.
    pub(crate) fn level(&self, now: Instant) -> u8 {
        self.health().breaker.level(now)
    }

    /// For people.
    pub(crate) fn state(&self, weight: u32, now: Instant) -> TargetState {
        let (level, in_flight) = (self.level(now), self.in_flight());
        TargetState { id: self.id.clone(), weight, level, in_flight, unready: self.upstream.unready() }
    }

    /// What an active check found. One takes the place of the probe, when that is due; two bad ones in a row open the breaker. A good one
    /// does not excuse failures of requests.
    pub(crate) fn checked(&self, is_good: bool, now: Instant) {
        let mut health = self.health();
        health.misses = if is_good { 0 } else { health.misses + 1 };
        if health.breaker.is_due(now) {
            let ticket = health.breaker.enter(now);
            match is_good {
                true => health.breaker.succeed(ticket, now),
                false => health.breaker.fail(ticket, now),
            }
        } else if health.misses >= MISSES_MAX {
            health.breaker.trip(now);
        }
    }

    /// A request goes there, and has so many tokens to be computed.
    pub(crate) fn enter(self: &Arc<Self>, now: Instant, stream: bool, tokens: u64) -> Permit {
        self.state.in_flight.fetch_add(1, Ordering::Relaxed);
        self.state.pending_tokens.fetch_add(tokens, Ordering::Relaxed);
        let ticket = Some(self.health().breaker.enter(now));
        Permit { target: self.clone(), ticket, began: now, stream, tokens }
    }
}

/// One request at a target. Dropped without an outcome it says nothing about the target's health.
pub(crate) struct Permit {
    pub(crate) target: Arc<Target>,
    ticket: Option<Ticket>,
    began: Instant,
    stream: bool,
    /// Of its prompt, not computed yet.
    tokens: u64,
}

impl Permit {
    /// The first event is there.
    pub(crate) fn answered(&mut self, now: Instant) {
        self.computed();
        let Some(ticket) = self.ticket.take() else { return };
        let seconds = now.saturating_duration_since(self.began).as_secs_f64();
        let mut health = self.target.health();
        health.latency[usize::from(!self.stream)].add(seconds, now);
        health.breaker.succeed(ticket, now);
    }

    fn computed(&mut self) {
        self.target.state.pending_tokens.fetch_sub(std::mem::take(&mut self.tokens), Ordering::Relaxed);
    }

    /// The target works, whatever it said to this request.
    pub(crate) fn refused(&mut self, now: Instant, cooling: Option<Duration>) {
        let mut health = self.target.health();
        if let Some(ticket) = self.ticket.take() {
            health.breaker.succeed(ticket, now);
        }
        if let Some(time) = cooling {
            health.breaker.cool(now + time.min(COOLING_MAX));
        }
    }

    /// The target failed, before or after its first event.
    pub(crate) fn failed(&mut self, now: Instant, cooling: Option<Duration>) {
        let mut health = self.target.health();
        match self.ticket.take() {
            Some(ticket) => health.breaker.fail(ticket, now),
            None => health.breaker.broke(now),
        }
        if let Some(time) = cooling {
            health.breaker.cool(now + time.min(COOLING_MAX));
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.computed();
        self.target.state.in_flight.fetch_sub(1, Ordering::Relaxed);
        if let Some(ticket) = self.ticket.take() {
            // The time of the beginning is early enough: an abandoned probe may be repeated at once.
            self.target.health().breaker.abandon(ticket, self.began);
        }
    }
}
