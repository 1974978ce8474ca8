//! One target: an upstream, its health, and its price. Shared by all models that name it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::balance::{Latency, View};
use penstock_types::Surface;
use tokio::sync::Semaphore;

use super::models::TargetState;
use penstock_govern::prices::{ModelFacts, Price};
use penstock_upstream::breaker::{Admission, Breaker, Rules, Ticket};
use penstock_upstream::debounce::{Line, Logs};
use penstock_upstream::lane::{Change, Lane, Pass, Why};
use penstock_upstream::{Asker, Upstream};

/// Longest Retry-After of a target that is respected; a longer one counts as this.
const COOLING_MAX: Duration = Duration::from_secs(60);

/// Consecutive failed checks that open the breaker: a single one can be an accident.
const MISSES_MAX: u32 = 2;

/// One target of one or more models: its upstream and its health.
pub(crate) struct Target {
    /// Id of the target: `pool` or `provider/model`.
    pub(crate) id: Arc<str>,
    pub(crate) upstream: Arc<dyn Upstream>,
    /// Entry of the model in the price table; `None`: none is known.
    pub(crate) facts: Option<ModelFacts>,
    /// Address at which another proxy can reach the target itself; `None`: it has none.
    pub(crate) endpoint: Option<Endpoint>,
    hash: u64,
    state: Arc<State>,
}

/// Address of a target for a proxy that forwards requests itself.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Address and port of the server.
    pub address: SocketAddr,
    /// Places for requests in flight (`in_flight_max`), shared with those that this gateway forwards.
    pub places: Arc<Semaphore>,
}

/// Load and health of a target, which outlive a reload.
struct State {
    in_flight: AtomicUsize,
    /// Prompt tokens sent to the target and not answered yet.
    pending_tokens: AtomicU64,
    health: Mutex<Health>,
}

struct Health {
    /// Consecutive failed active checks; two open the breaker `down`.
    misses: u32,
    /// Breaker of the active checks alone; applies to everybody.
    down: Breaker,
    /// Breakers fed by requests, per surface: an operation that does not exist says nothing of the others.
    lanes: Vec<(Surface, Lane)>,
    /// TTFT of streams, and time to the first event of whole answers.
    latency: [Latency; 2],
    /// Debounced logs of changes: a target that flaps fills no log.
    logs: Logs<Subject>,
}

/// Subject of a log line about a target, one for each breaker: the surface (`None`: the active check), and the key's id
/// (empty for everybody). Several surfaces have the same operation, which the line names.
type Subject = (Option<Surface>, Arc<str>);

/// Client key and operation of a request, which breakers are kept for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Who {
    pub(crate) asker: Asker,
    pub(crate) surface: Surface,
}

impl Health {
    fn lane(&self, surface: Surface) -> Option<&Lane> {
        self.lanes.iter().find(|(other, _)| *other == surface).map(|(_, lane)| lane)
    }

    fn lane_mut(&mut self, surface: Surface) -> &mut Lane {
        let at = self.lanes.iter().position(|(other, _)| *other == surface).unwrap_or_else(|| {
            self.lanes.push((surface, Lane::new(Rules::DEFAULT)));
            self.lanes.len() - 1
        });
        &mut self.lanes[at].1
    }

    fn look(&self, who: Who, now: Instant) -> Admission {
        let lane = self.lane(who.surface);
        let seen = lane.map_or(Admission::Yes, |lane| lane.look(who.asker, now));
        match self.down.look(now) {
            Admission::No(until) if lane.is_none_or(|lane| lane.has_trial(who.asker, now)) => {
                seen.worse(Admission::Trial(until))
            }
            down => seen.worse(down),
        }
    }

    /// Logs a change, if there is one, and what has waited.
    fn log(&self, target: &str, (surface, key): Subject, change: Option<Change>, now: Instant) {
        let Some(change) = change else { return self.logs.due(target, now, Self::write) };
        let key = if change.everybody { "".into() } else { key };
        self.logs.note(target, (surface, key), change, now, Self::write);
    }

    fn write(target: &str, line: &Line<Subject>) {
        let Line { subject: (about, key), change, unlogged } = line;
        let about = about.map_or("health_check", Surface::operation);
        let (key, state, why) = (&**key, change.name(), change.why.name());
        match (change.everybody, change.level) {
            (true, 0) => tracing::info!(target_id = target, about, state, unlogged, "a target is healthy again"),
            (true, _) => tracing::warn!(
                target_id = target,
                about,
                state,
                why,
                unlogged,
                "a target is unhealthy: its circuit breaker opened"
            ),
            (false, 0) => {
                tracing::info!(target_id = target, about, key, state, unlogged, "a target is healthy again for one key")
            }
            (false, _) => tracing::warn!(
                target_id = target,
                about,
                key,
                state,
                why,
                unlogged,
                "a target is unhealthy for one key: its circuit breaker opened"
            ),
        }
    }

    fn level(&self, now: Instant) -> u8 {
        let lanes = self.lanes.iter().map(|(_, lane)| lane.level(now));
        lanes.chain([self.down.level(now)]).max().unwrap_or(0)
    }
}

/// Estimated tokens of a request, for its price at a target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) stream: bool,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
}

impl Target {
    pub(crate) fn new(id: &str, upstream: Arc<dyn Upstream>, facts: Option<ModelFacts>) -> Self {
        let down = Breaker::new(Rules::DEFAULT);
        let (latency, logs) = Default::default();
        let health = Health { misses: 0, down, lanes: Vec::new(), latency, logs };
        let state = Arc::new(State {
            in_flight: AtomicUsize::new(0),
            pending_tokens: AtomicU64::new(0),
            health: Mutex::new(health),
        });
        Self { id: id.into(), upstream, facts, endpoint: None, hash: penstock_base::hash::stable(id.as_bytes()), state }
    }

    /// Target with the address at which another proxy reaches it.
    pub(crate) fn at(self, endpoint: Option<Endpoint>) -> Self {
        Self { endpoint, ..self }
    }

    /// Returns true if the other target is this one, under the same config or an earlier one.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// This target under a new config: health and requests in flight are carried over.
    pub(crate) fn carried(&self, upstream: Arc<dyn Upstream>, facts: Option<ModelFacts>) -> Self {
        Self { id: self.id.clone(), upstream, facts, endpoint: None, hash: self.hash, state: self.state.clone() }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.state.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request may go to the target. A target that reports itself unready is the last choice.
    pub(crate) fn look(&self, who: Who, now: Instant) -> Admission {
        let admission = self.health().look(who, now);
        match admission {
            Admission::Yes if self.upstream.unready().is_some() => Admission::Last,
            other => other,
        }
    }

    /// Reason that such a request is not sent to the target.
    pub(crate) fn why(&self, who: Who, now: Instant) -> Why {
        let health = self.health();
        let is_down = matches!(health.down.look(now), Admission::No(_));
        let lane = health.lane(who.surface).filter(|_| !is_down);
        lane.map_or(Why::Checks, |lane| lane.why(who.asker, now))
    }

    /// Snapshot of the target's load, latency and price for one choice.
    pub(crate) fn view(&self, index: usize, weight: u32, price: Option<Price>, size: Size, now: Instant) -> View {
        let seconds = self.health().latency[usize::from(!size.stream)].expected(now);
        let usd = price.map_or(0.0, |price| price.usd(size.prompt_tokens, 0, 0, size.completion_tokens));
        let in_flight = self.state.in_flight.load(Ordering::Relaxed);
        let pending_tokens = self.state.pending_tokens.load(Ordering::Relaxed);
        View { index, weight, in_flight, seconds, usd, pending_tokens, own_tokens: size.prompt_tokens, hash: self.hash }
    }

    /// Context length by the upstream's own report or the price table; 0: unknown.
    pub(crate) fn context_tokens(&self) -> u32 {
        match self.upstream.card().context_tokens {
            0 => self.facts.map_or(0, |facts| facts.context_tokens),
            own => own,
        }
    }

    /// Requests in flight at the target, over all models.
    pub(crate) fn in_flight(&self) -> usize {
        self.state.in_flight.load(Ordering::Relaxed)
    }

    /// State of the breaker as the metric shows it.
    pub(crate) fn level(&self, now: Instant) -> u8 {
        self.health().level(now)
    }

    /// Health of the target for the admin API, with `weight` as the model's config has it.
    pub(crate) fn state(&self, weight: u32, now: Instant) -> TargetState {
        let (level, in_flight) = (self.level(now), self.in_flight());
        TargetState { id: self.id.clone(), weight, level, in_flight, unready: self.upstream.unready() }
    }

    /// Takes in the result of an active check. A check serves as the probe when one is due; two failed checks in a row
    /// open the breaker. A good check does not excuse failures of requests.
    pub(crate) fn checked(&self, is_good: bool, now: Instant) {
        let mut health = self.health();
        let before = health.down.kind(now);
        health.misses = if is_good { 0 } else { health.misses + 1 };
        if health.down.is_due(now) {
            let ticket = health.down.enter(now);
            match is_good {
                true => health.down.succeed(ticket, now),
                false => health.down.fail(ticket, now),
            }
        } else if health.misses >= MISSES_MAX {
            health.down.trip(now);
        }
        let level = health.down.kind(now);
        let change = (level != before).then_some(Change { everybody: true, level, why: Why::Checks });
        health.log(&self.id, (None, "".into()), change, now);
    }

    /// Admits a request. `need`: whether it is streamed, and the prompt tokens to compute.
    pub(crate) fn enter(self: &Arc<Self>, who: Who, key: &Arc<str>, now: Instant, need: (bool, u64)) -> Permit {
        let (stream, tokens) = need;
        self.state.in_flight.fetch_add(1, Ordering::Relaxed);
        self.state.pending_tokens.fetch_add(tokens, Ordering::Relaxed);
        let mut health = self.health();
        let trial = matches!(health.look(who, now), Admission::Trial(_) | Admission::No(_));
        let down = health.down.enter(now);
        let pass = health.lane_mut(who.surface).enter(who.asker, trial, now);
        drop(health);
        Permit { target: self.clone(), who, key: key.clone(), ticket: Some((down, pass)), began: now, stream, tokens }
    }
}

/// One request at a target. A drop without an outcome says nothing of the target's health.
pub(crate) struct Permit {
    pub(crate) target: Arc<Target>,
    who: Who,
    /// Id of the client's key (its tenant), for the log.
    key: Arc<str>,
    ticket: Option<(Ticket, Pass)>,
    began: Instant,
    stream: bool,
    /// Prompt tokens of the request that count as pending until its first event.
    tokens: u64,
}

impl Permit {
    /// Counts the first event of the answer: its latency, and a success for the breakers.
    pub(crate) fn answered(&mut self, now: Instant) {
        self.computed();
        let seconds = now.saturating_duration_since(self.began).as_secs_f64();
        let Some(ticket) = self.ticket.take() else { return };
        let mut health = self.target.health();
        health.latency[usize::from(!self.stream)].add(seconds, now);
        self.works(&mut health, ticket, now);
    }

    fn computed(&mut self) {
        self.target.state.pending_tokens.fetch_sub(std::mem::take(&mut self.tokens), Ordering::Relaxed);
    }

    fn works(&self, health: &mut Health, (down, pass): (Ticket, Pass), now: Instant) {
        match pass.is_trial() {
            true => health.down.prove(now),
            false => health.down.succeed(down, now),
        }
        let change = health.lane_mut(self.who.surface).succeed(pass, now);
        self.log(health, change, now);
    }

    fn log(&self, health: &mut Health, change: Option<Change>, now: Instant) {
        health.log(&self.target.id, (Some(self.who.surface), self.key.clone()), change, now);
    }

    /// Counts a refusal by a target that works. `cooling`: its Retry-After, and the reason.
    pub(crate) fn refused(&mut self, now: Instant, cooling: Option<(Duration, Why)>) {
        let target = self.target.clone();
        let mut health = target.health();
        match (self.ticket.take(), cooling) {
            (Some(ticket), None) => self.works(&mut health, ticket, now),
            // A request told to come later was not answered.
            (Some((down, pass)), Some(_)) => {
                health.down.abandon(down, now);
                health.lane_mut(self.who.surface).abandon(pass, now);
            }
            (None, _) => {}
        }
        self.cools(&mut health, cooling, now);
    }

    fn cools(&self, health: &mut Health, cooling: Option<(Duration, Why)>, now: Instant) {
        if let Some((time, why)) = cooling {
            let until = now + time.min(COOLING_MAX);
            let change = health.lane_mut(self.who.surface).cool(self.who.asker, until, why, now);
            self.log(health, change, now);
        }
    }

    /// Counts a failure, before or after the first event.
    pub(crate) fn failed(&mut self, why: Why, now: Instant, cooling: Option<Duration>) {
        let target = self.target.clone();
        let mut health = target.health();
        let change = match self.ticket.take() {
            Some((down, pass)) => {
                match down.is_probe() {
                    true => health.down.fail(down, now),
                    false => health.down.abandon(down, now),
                }
                health.lane_mut(self.who.surface).fail(pass, why, now)
            }
            None => health.lane_mut(self.who.surface).broke(self.who.asker, why, now),
        };
        self.log(&mut health, change, now);
        self.cools(&mut health, cooling.map(|time| (time, why)), now);
    }

    /// Returns the permit of a request that was never sent.
    pub(crate) fn unused(&mut self, now: Instant) {
        let Some((down, pass)) = self.ticket.take() else { return };
        let mut health = self.target.health();
        health.down.abandon(down, now);
        health.lane_mut(self.who.surface).abandon(pass, now);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.computed();
        self.target.state.in_flight.fetch_sub(1, Ordering::Relaxed);
        // The permit's start is early enough: an abandoned probe may be repeated at once.
        self.unused(self.began);
    }
}
