//! One run: arrivals, bindings, steps, frames, deaths, in order of time.

mod apart;
mod replicas;

use super::ablation::Parts;
use super::ask::{Ask, Outcome};
use super::engine::{Emitted, Engine, Sizes, Speed, Store, Sums, store};
use super::peer::Foreign;
use super::placement::{Bound, Frame, Next, Placement, Policy};
use super::report::{Ledger, Report, Slo};
use super::trace::Trace;
use crate::random::Random;
use penstock_proto::frames::{Batch, EngineState};
use penstock_router::{Ahead, Limits, Weights};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::time::Duration;

pub use apart::Apart;
pub use replicas::{Replicas, Spent};

/// Death of an engine; a new one begins in its place, with an empty cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kill {
    /// Index of the engine that dies.
    pub engine: usize,
    /// Time of the death, in seconds of the run.
    pub at: f64,
    /// Seconds from the death until the replacement serves.
    pub away: f64,
}

/// Settings of a run, beside its trace.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Placement policy: a policy of the router, or a rule to compare with.
    pub policy: Policy,
    /// Number of engines; with [`Self::replicas`] their maximum.
    pub engines: usize,
    /// Speed of all engines, except those in `slow`.
    pub speed: Speed,
    /// Capacities of each engine.
    pub sizes: Sizes,
    /// Engines of another speed: (index, speed relative to the others).
    pub slow: Vec<(usize, f64)>,
    /// Deaths of engines during the run.
    pub kills: Vec<Kill>,
    /// Factor on the recorded rate of arrivals.
    pub rate: f64,
    /// Standard deviation of the factor on the seconds of a step.
    pub noise: f64,
    /// Latency of a frame between gateway and worker, one way, in seconds.
    pub wire: f64,
    /// Seed of everything random: noise, and ties of the router.
    pub seed: u64,
    /// Weights of the terms in the router's cost.
    pub weights: Weights,
    /// Limits of the router: queue, objectives and others.
    pub limits: Limits,
    /// Parts of the router that are on.
    pub parts: Parts,
    /// KV transfers between engines, and prefill for others.
    pub apart: Apart,
    /// Rules by which the number of engines follows the load; `None` keeps all engines running.
    pub replicas: Option<Replicas>,
    /// Weights of the rule for foreign servers.
    pub foreign: Foreign,
    /// Objectives that count a request as in SLO.
    pub slo: Slo,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            policy: Policy::Router(penstock_router::Policy::CacheAware),
            engines: 8,
            speed: Speed::default(),
            sizes: Sizes::default(),
            slow: Vec::new(),
            kills: Vec::new(),
            rate: 1.0,
            noise: 0.1,
            wire: 0.000_2,
            seed: 1,
            weights: Weights::default(),
            limits: Limits { queue_max: usize::MAX, slo: Some(penstock_router::Slo::default()), ..Limits::default() },
            parts: Parts::default(),
            apart: Apart::default(),
            replicas: None,
            foreign: Foreign::default(),
            slo: Slo::default(),
        }
    }
}

/// Replays `trace` and returns the report. The same arguments give the same report.
///
/// # Panics
/// If there are no engines, or more than a pool may have.
pub fn run(trace: &Trace, setup: &Setup) -> Report {
    World::new(trace, setup).run().0
}

/// Replays `trace` as [`run`] does, and also returns the outcome of every request.
///
/// # Panics
/// As [`run`].
pub fn run_with_outcomes(trace: &Trace, setup: &Setup) -> (Report, Vec<Outcome>) {
    World::new(trace, setup).run()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The request with this index in the trace arrives at the gateway.
    Arrive(usize),
    /// Messages of the gateway reach an engine.
    Deliver { engine: usize, life: u32 },
    /// A step of an engine ends.
    StepEnd { engine: usize, life: u32 },
    /// A frame of an engine reaches the gateway.
    Frame { engine: usize, life: u32 },
    /// The engine with this index dies.
    Kill(usize),
    /// The gateway notices that the session with an engine is lost.
    Lost { engine: usize },
    /// A new engine replaces a dead one.
    Restart { engine: usize },
    /// An engine's read from a tier is complete.
    Read { engine: usize, life: u32 },
    /// KV from another engine has arrived.
    Come { engine: usize, life: u32, request: usize, attempt: u32, tokens: usize },
    /// The planners of roles and of the number of engines run.
    Look,
}

/// An engine, its connection to the gateway, and the number of its life.
struct Seat {
    life: u32,
    alive: bool,
    /// True if the engine gets no new requests and ends when it is empty.
    leaving: bool,
    stepping: Option<f64>,
    /// Seconds that the tier read in progress takes.
    reading: f64,
    down: VecDeque<Ask>,
    up: VecDeque<(Frame, Vec<Emitted>)>,
    /// Requests that the gateway has bound to it and whose end it has not seen.
    bound: Vec<usize>,
    random: Random,
}

struct World<'a> {
    trace: &'a Trace,
    setup: &'a Setup,
    placement: Placement,
    engines: Vec<Engine>,
    /// Store that all engines share, if there is one.
    store: Option<Store>,
    /// Engine that prefetches the blocks of a waiting request, by the request's index.
    announced: HashMap<usize, usize>,
    seats: Vec<Seat>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    serial: u64,
    now: u64,
    asks: Vec<Option<Ask>>,
    outcomes: Vec<Outcome>,
    ledger: Ledger,
    past: Vec<Sums>,
    roads: apart::Roads,
    scaler: replicas::Scaler,
}

impl<'a> World<'a> {
    fn new(trace: &'a Trace, setup: &'a Setup) -> Self {
        assert!(setup.engines > 0 && setup.engines <= penstock_router::WORKERS_MAX, "engines");
        let placement = Placement::new(setup);
        let store = store(&setup.sizes);
        let engines = (0..setup.engines).map(|at| engine(setup, at, store.clone())).collect();
        let scaler = replicas::Scaler::new(setup);
        let seat = |at: usize| Seat {
            life: 0,
            alive: scaler.has(at),
            leaving: false,
            stepping: None,
            reading: 0.0,
            down: VecDeque::new(),
            up: VecDeque::new(),
            bound: Vec::new(),
            random: Random::new(setup.seed ^ (at as u64 + 1) << 32),
        };
        let mut world = Self {
            trace,
            setup,
            placement,
            engines,
            store,
            announced: HashMap::new(),
            seats: (0..setup.engines).map(seat).collect(),
            events: BinaryHeap::new(),
            serial: 0,
            now: 0,
            asks: vec![None; trace.requests.len()],
            outcomes: vec![Outcome::default(); trace.requests.len()],
            ledger: Ledger::default(),
            past: vec![Sums::default(); setup.engines],
            roads: apart::Roads::new(setup),
            scaler,
        };
        for (at, request) in trace.requests.iter().enumerate() {
            world.at(request.arrival / setup.rate, Event::Arrive(at));
        }
        for (at, kill) in setup.kills.iter().enumerate().filter(|(_, kill)| kill.engine < setup.engines) {
            world.at(kill.at, Event::Kill(at));
        }
        for at in (0..setup.engines).filter(|at| world.scaler.has(*at)) {
            world.placement.join(at, &world.engines[at]);
        }
        if setup.apart.follow || setup.replicas.is_some() {
            world.at(1.0, Event::Look);
        }
        world
    }

    fn at(&mut self, seconds: f64, event: Event) {
        self.serial += 1;
        self.events.push(Reverse(((seconds * 1e9) as u64, self.serial, event)));
    }

    fn after(&mut self, seconds: f64, event: Event) {
        self.serial += 1;
        self.events.push(Reverse((self.now.saturating_add((seconds * 1e9) as u64), self.serial, event)));
    }

    fn seconds(&self) -> f64 {
        self.now as f64 / 1e9
    }

    fn run(mut self) -> (Report, Vec<Outcome>) {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            self.now = at;
            self.event(event);
        }
        for (engine, past) in self.engines.iter().zip(&mut self.past) {
            add(past, &engine.sums);
        }
        let spent = self.scaler.end(self.seconds());
        let report = Report::of(self.trace, self.setup, &self.outcomes, &self.past, &self.ledger, spent);
        (Report { flips: self.roads.flips, ..report }, self.outcomes)
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Arrive(request) => self.arrive(request),
            Event::Deliver { engine, life } => {
                if self.seats[engine].life == life {
                    if let Some(ask) = self.seats[engine].down.pop_front() {
                        let now = self.seconds();
                        self.engines[engine].take(ask, now);
                    }
                    self.read(engine);
                    self.step(engine);
                }
            }
            Event::StepEnd { engine, life } => {
                if self.seats[engine].life == life {
                    self.step_end(engine);
                }
            }
            Event::Frame { engine, life } => {
                if self.seats[engine].life == life {
                    self.frame(engine);
                }
            }
            Event::Kill(at) => self.kill(self.setup.kills[at]),
            Event::Lost { engine } => self.lost(engine),
            Event::Restart { engine } => {
                self.seats[engine].alive = true;
                self.placement.join(engine, &self.engines[engine]);
                self.dispatch();
            }
            Event::Read { engine, life } => {
                if self.seats[engine].life == life {
                    self.read_end(engine);
                }
            }
            Event::Come { engine, life, request, attempt, tokens } => {
                if self.seats[engine].life == life {
                    self.engines[engine].arrive(request, attempt, tokens);
                    self.step(engine);
                }
            }
            Event::Look => self.look(),
        }
    }

    fn arrive(&mut self, at: usize) {
        let request = &self.trace.requests[at];
        self.outcomes[at].arrival = self.seconds();
        let ask = Ask {
            request: at,
            attempt: 0,
            input: request.input,
            output: request.output,
            hashes: self.trace.hashes(at),
            session: request.session,
            tenant: request.tenant,
            resumed: false,
            given: None,
            recorded: request.engine,
            turn: 0,
            source: None,
            lent: None,
            brought: 0,
        };
        self.enqueue(ask);
        self.dispatch();
    }

    fn enqueue(&mut self, ask: Ask) {
        let request = ask.request;
        if self.placement.enqueue(self.trace, &ask, Duration::from_nanos(self.now)) {
            self.asks[request] = Some(ask);
        } else {
            self.outcomes[request].rejected = true;
        }
    }

    /// Binds all requests that can be bound now.
    fn dispatch(&mut self) {
        loop {
            let bound = match self.placement.next(&self.engines, Duration::from_nanos(self.now)) {
                Next::Bind(bound) => bound,
                Next::Refuse(request) => {
                    self.end_ahead(request, None);
                    self.outcomes[request].rejected = true;
                    self.asks[request] = None;
                    continue;
                }
                Next::Hold => return self.announce(),
            };
            let Bound { request, engine, cached, source, turn } = bound;
            self.end_ahead(request, Some(engine));
            let now = self.seconds();
            let outcome = &mut self.outcomes[request];
            (outcome.engine, outcome.bound, outcome.believed) = (engine, now, cached);
            let ask = self.asks[request].clone().expect("it waited");
            let ask = Ask { source, turn, ..ask };
            let seat = &mut self.seats[engine];
            seat.bound.push(request);
            if let Placement::Peer(peer) = &mut self.placement {
                // The next choice must see this binding: a rule gets the true state at once.
                let given = peer.given(&ask);
                self.engines[engine].take(Ask { given, ..ask }, now);
                let life = seat.life;
                self.after(0.0, Event::Deliver { engine, life });
            } else if seat.alive {
                seat.down.push_back(ask);
                let life = seat.life;
                self.after(self.setup.wire, Event::Deliver { engine, life });
            }
        }
    }

    /// Announces waiting requests to engines that can prefetch their blocks.
    fn announce(&mut self) {
        if !self.setup.sizes.has_slow_tiers() || !self.setup.parts.prefetch {
            return;
        }
        let now = self.seconds();
        for Ahead { request, worker, wait, .. } in self.placement.ahead(Duration::from_nanos(self.now)) {
            let (request, engine) = (request.0 as usize, usize::from(worker.0));
            let Some(ask) = self.asks[request].clone().filter(|_| self.seats[engine].alive) else { continue };
            self.announced.insert(request, engine);
            self.engines[engine].announce(ask, wait.as_secs_f64(), now);
            self.read(engine);
        }
    }

    /// Ends an announcement: engines other than the chosen one load nothing more for it.
    fn end_ahead(&mut self, request: usize, engine: Option<usize>) {
        if let Some(ahead) = self.announced.remove(&request).filter(|ahead| Some(*ahead) != engine) {
            self.engines[ahead].end_ahead(request);
        }
    }

    /// Begins a read if none is in progress.
    fn read(&mut self, engine: usize) {
        let now = self.seconds();
        if let Some(seconds) = self.engines[engine].read(now) {
            let seat = &mut self.seats[engine];
            seat.reading = seconds * factor(&mut seat.random, self.setup.noise);
            let (seconds, life) = (seat.reading, seat.life);
            self.after(seconds, Event::Read { engine, life });
        }
    }

    fn read_end(&mut self, engine: usize) {
        let (seconds, now) = (self.seats[engine].reading, self.seconds());
        if self.engines[engine].arrived(seconds, now) {
            self.say(engine, Vec::new(), None);
        }
        self.read(engine);
        self.step(engine);
    }

    /// Begins a step if none is in progress.
    fn step(&mut self, engine: usize) {
        if self.seats[engine].stepping.is_some() {
            return;
        }
        let planned = self.engines[engine].plan();
        let wants = self.engines[engine].take_wants();
        if let Some(seconds) = planned {
            let seat = &mut self.seats[engine];
            let seconds = seconds * factor(&mut seat.random, self.setup.noise);
            seat.stepping = Some(seconds);
            let life = seat.life;
            self.after(seconds, Event::StepEnd { engine, life });
        } else {
            self.moved(engine, 0.0);
            let refused = self.engines[engine].take_refused();
            if !wants.is_empty() || !refused.is_empty() {
                self.say(engine, refused, None);
            }
        }
        wants.into_iter().for_each(|want| self.want(engine, want));
    }

    fn step_end(&mut self, engine: usize) {
        let seconds = self.seats[engine].stepping.take().expect("a step ends once");
        let emitted = self.engines[engine].finish(seconds);
        let batch = self.engines[engine].batch();
        self.moved(engine, seconds);
        self.watch(engine, &batch);
        self.say(engine, emitted, Some(batch));
        self.step(engine);
    }

    /// Sends a frame from an engine to the gateway, where it arrives after the latency of the wire.
    fn say(&mut self, engine: usize, emitted: Vec<Emitted>, batch: Option<Batch>) {
        let truth = &mut self.engines[engine];
        // A rule reads the true state and no frames.
        let is_read = matches!(self.placement, Placement::Router(..));
        let state = if is_read { truth.state() } else { EngineState::default() };
        let frame = Frame { state, kv: truth.take_events(), accepted: truth.accepted(), batch };
        let seat = &mut self.seats[engine];
        seat.up.push_back((frame, emitted));
        let life = seat.life;
        self.after(self.setup.wire, Event::Frame { engine, life });
    }

    fn frame(&mut self, engine: usize) {
        let (frame, emitted) = self.seats[engine].up.pop_front().expect("what was sent");
        self.placement.frame(engine, &frame);
        for emitted in emitted {
            self.token(engine, &emitted);
        }
        self.dispatch();
    }

    fn token(&mut self, engine: usize, emitted: &Emitted) {
        let request = emitted.request;
        let now = self.seconds();
        let is_current = self.asks[request].as_ref().is_some_and(|ask| ask.attempt == emitted.attempt);
        if !is_current {
            return;
        }
        let outcome = &mut self.outcomes[request];
        if emitted.refused {
            outcome.rejected = true;
        } else {
            outcome.tokens += 1;
            if outcome.tokens > 1 {
                self.ledger.gap(now - outcome.latest);
            }
            if let Some(cached) = emitted.cached {
                if outcome.resumes > 0 {
                    outcome.gap = outcome.gap.max(now - outcome.latest);
                }
                (outcome.cached, outcome.brought) = (cached, emitted.brought);
                let is_first = outcome.first.replace(outcome.first.unwrap_or(now)).is_none();
                self.placement.first(request);
                if is_first {
                    self.first_token(request, now);
                }
            }
            self.placement.emitted(request);
            let outcome = &mut self.outcomes[request];
            outcome.latest = now;
            outcome.done = emitted.last;
        }
        if emitted.last {
            self.placement.end(request);
            self.asks[request] = None;
            self.seats[engine].bound.retain(|bound| *bound != request);
        }
    }

    fn kill(&mut self, kill: Kill) {
        let seat = &mut self.seats[kill.engine];
        if !seat.alive {
            return;
        }
        seat.alive = false;
        seat.life += 1;
        seat.stepping = None;
        seat.down.clear();
        seat.up.clear();
        add(&mut self.past[kill.engine], &self.engines[kill.engine].sums);
        let role = self.engines[kill.engine].role;
        self.engines[kill.engine] = engine(self.setup, kill.engine, self.store.clone());
        self.engines[kill.engine].role = role;
        self.forsake(kill.engine);
        self.after(self.setup.wire, Event::Lost { engine: kill.engine });
        self.after(kill.away.max(2.0 * self.setup.wire), Event::Restart { engine: kill.engine });
    }

    /// Handles the loss of an engine: its requests continue elsewhere, with their emitted tokens.
    fn lost(&mut self, engine: usize) {
        self.placement.leave(engine);
        for request in std::mem::take(&mut self.seats[engine].bound) {
            let Some(mut ask) = self.asks[request].take() else { continue };
            let outcome = &mut self.outcomes[request];
            outcome.resumes += 1;
            let prompt = &self.trace.requests[request];
            ask.attempt += 1;
            ask.resumed = true;
            ask.input = prompt.input + outcome.tokens;
            ask.output = prompt.output - outcome.tokens;
            self.enqueue(ask);
        }
        self.dispatch();
    }
}

fn engine(setup: &Setup, at: usize, store: Option<Store>) -> Engine {
    let share = setup.slow.iter().find(|(slow, _)| *slow == at).map_or(1.0, |(_, share)| *share);
    let Speed { base, prefill, attention, sequence, context, host, disk, remote } = setup.speed;
    let speed = Speed {
        base: base / share,
        prefill: prefill / share,
        attention: attention / share,
        sequence: sequence / share,
        context: context / share,
        host: host / share,
        disk,
        remote,
    };
    let mut engine = Engine::new(speed, setup.sizes, store);
    engine.role = setup.apart.role(at);
    engine
}

/// Factor around 1 with a normal deviation (sum of twelve uniforms), cut off so that steps always take time.
fn factor(random: &mut Random, deviation: f64) -> f64 {
    if deviation <= 0.0 {
        return 1.0;
    }
    let sum: f64 = (0..12).map(|_| (random.bits() >> 11) as f64 / (1_u64 << 53) as f64).sum();
    (1.0 + deviation * (sum - 6.0)).max(0.1)
}

fn add(sum: &mut Sums, more: &Sums) {
    sum.busy += more.busy;
    sum.prefilled += more.prefilled;
    sum.looked_up += more.looked_up;
    sum.hits += more.hits;
    sum.host_hits += more.host_hits;
    sum.tier_hits += more.tier_hits;
    sum.prefetched += more.prefetched;
    sum.unused += more.unused;
    sum.emitted += more.emitted;
    sum.steps += more.steps;
}
