//! Placement of requests: the real router over workers' reports, or a peer's rule over the true state.

use super::ablation::Parts;
use super::ask::{Ask, Source};
use super::engine::Engine;
use super::peer::{Peer, Rule};
use super::run::Setup;
use super::trace::{NUMERICS_ID, Trace};
use penstock_proto::RequestId;
use penstock_proto::frames::{Batch, EngineState, KvEvent};
use penstock_router::load::Traffic;
use penstock_router::{Ahead, Choice, Fleet, Member, View, WorkerId};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Policy of a run: a policy of the real router, or a rule to compare with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Policy {
    /// The router of the product, with one of its rules.
    Router(penstock_router::Policy),
    /// A comparison rule, which binds each request at once.
    Peer(Rule),
}

/// Rules of other routers and of impossible knowledge, by name.
const PEERS: [(&str, Rule); 8] = [
    ("foreign_events", Rule::ForeignEvents),
    ("foreign_guess", Rule::ForeignGuess),
    ("longest_match", Rule::LongestMatch),
    ("block_cost", Rule::BlockCost),
    ("least_ttft", Rule::LeastTtft),
    ("oracle", Rule::Oracle),
    ("bound", Rule::Bound),
    ("recorded", Rule::Recorded),
];

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Router(policy) => policy.fmt(f),
            Self::Peer(rule) => f.write_str(PEERS.iter().find(|(_, peer)| peer == rule).map_or("", |(name, _)| name)),
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((_, rule)) = PEERS.iter().find(|(name, _)| *name == text) {
            return Ok(Self::Peer(*rule));
        }
        text.parse()
            .map(Self::Router)
            .map_err(|unknown| format!("{unknown}, nor one of {}", PEERS.map(|(name, _)| name).join(", ")))
    }
}

/// A binding of a request to an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Index of the request in the trace.
    pub request: usize,
    /// Index of the engine that gets the request.
    pub engine: usize,
    /// Prompt tokens that the decider believes cached at the engine.
    pub cached: usize,
    /// Engine that provides the KV that the bound engine lacks; `None` if it computes all.
    pub source: Option<Source>,
    /// Fair-share turn at the engine: lower first.
    pub turn: i64,
}

/// Next action of the gateway, from [`Placement::next`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Next {
    /// Send the request to the engine of the binding.
    Bind(Bound),
    /// Refuse the request with this index in the trace.
    Refuse(usize),
    /// Wait: no request can be bound until a frame or time changes that.
    Hold,
}

/// Report of an engine after a step.
pub struct Frame {
    /// Load and capacity of the engine after the step.
    pub state: EngineState,
    /// Changes of the engine's prefix cache since its last report.
    pub kv: Vec<KvEvent>,
    /// Number of requests that the engine has taken since its start.
    pub accepted: u64,
    /// Work of the step; `None` without a step.
    pub batch: Option<Batch>,
}

/// Decider of placements in a run: the real router, or a rule to compare with.
pub enum Placement {
    /// The real router, with some of its parts; the number is the bytes of a block that engines can hand over.
    Router(Box<Fleet>, Parts, u64),
    /// A rule of [`Peer`], which binds each request at once.
    Peer(Box<Peer>),
}

impl Placement {
    /// Creates a decider without engines.
    pub fn new(setup: &Setup) -> Self {
        match setup.policy {
            Policy::Router(policy) => {
                let mut limits = setup.limits;
                limits.slo.iter_mut().filter(|_| !setup.parts.tpot).for_each(|slo| slo.tpot = Duration::ZERO);
                let fleet = Fleet::new(setup.weights, limits).with_policy(policy).seeded(setup.seed);
                Self::Router(Box::new(fleet), setup.parts, setup.apart.block_bytes())
            }
            Policy::Peer(rule) => Self::Peer(Box::new(Peer::new(rule, setup.foreign, setup.engines, setup.seed))),
        }
    }

    /// Adds an engine with an empty cache.
    pub fn join(&mut self, engine: usize, truth: &Engine) {
        match self {
            Self::Router(fleet, parts, block_bytes) => {
                let state = granted(truth.state(), *parts);
                let member = Member {
                    numerics_id: NUMERICS_ID.into(),
                    grammar: "".into(),
                    capabilities: penstock_proto::Capabilities::all(),
                    adapters: std::sync::Arc::default(),
                    blocks_total: state.blocks_total,
                    sequences_max: truth.sequences_max() as u32,
                    state,
                    device: NUMERICS_ID.into(),
                    block_bytes: *block_bytes,
                };
                fleet.join(id(engine), member, &[]);
            }
            Self::Peer(peer) => peer.join(engine),
        }
    }

    /// Removes a lost engine; its requests are placed anew by the run.
    pub fn leave(&mut self, engine: usize) {
        match self {
            Self::Router(fleet, ..) => fleet.leave(id(engine)),
            Self::Peer(peer) => peer.leave(engine),
        }
    }

    /// Suspends an engine from new requests, or resumes it.
    pub fn suspend(&mut self, engine: usize, suspended: bool) {
        if let Self::Router(fleet, ..) = self {
            fleet.suspend(id(engine), suspended);
        }
    }

    /// Passes an engine's report to the router; peer rules ignore it, since they see the true state.
    pub fn frame(&mut self, engine: usize, frame: &Frame) {
        if let Self::Router(fleet, parts, _) = self {
            let state = granted(frame.state.clone(), *parts);
            fleet.update(id(engine), Some(&state), &frame.kv, frame.accepted);
            frame.batch.iter().filter(|_| parts.fit).for_each(|batch| fleet.observe(id(engine), batch));
        }
    }

    /// Adds a request to be placed. False if it is refused for good.
    pub fn enqueue(&mut self, trace: &Trace, ask: &Ask, now: Duration) -> bool {
        match self {
            Self::Router(fleet, parts, _) => {
                let mut tokens = trace.tokens(ask.request);
                tokens.resize(ask.input, 0);
                let view = View {
                    tokens: tokens.into(),
                    sequences: 1,
                    numerics_id: ask.resumed.then(|| NUMERICS_ID.into()),
                    resumed: ask.resumed,
                    tenant: Arc::from(if parts.fairness { ask.tenant.to_string() } else { String::new() }),
                    session: Some(ask.session),
                    ..View::default()
                };
                fleet.remove(RequestId(ask.request as u64));
                fleet.enqueue(RequestId(ask.request as u64), view, now).is_ok()
            }
            Self::Peer(peer) => {
                peer.enqueue(ask.clone());
                true
            }
        }
    }

    /// Next action to take at time `now`: bind, refuse, or wait.
    pub fn next(&mut self, engines: &[Engine], now: Duration) -> Next {
        match self {
            Self::Router(fleet, parts, _) => match fleet.next(now) {
                Choice::Bind { request, worker, cached_tokens, turn, prefill, pull_from, .. } => {
                    if !parts.promises {
                        fleet.settle(request);
                    }
                    let engine = usize::from(worker.0);
                    let prefill = prefill.map(|at| Source::Prefill(usize::from(at.0)));
                    let source = prefill.or_else(|| pull_from.map(|at| Source::Pull(usize::from(at.0))));
                    let cached = cached_tokens as usize;
                    Next::Bind(Bound { request: request.0 as usize, engine, cached, source, turn })
                }
                Choice::Refuse { request, .. } => Next::Refuse(request.0 as usize),
                Choice::Hold => Next::Hold,
            },
            Self::Peer(peer) => peer.next(engines).map_or(Next::Hold, Next::Bind),
        }
    }

    /// Waiting requests whose blocks an engine can prefetch. Called when [`Self::next`] says to wait.
    pub fn ahead(&mut self, now: Duration) -> Vec<Ahead> {
        match self {
            Self::Router(fleet, ..) => fleet.ahead(now),
            Self::Peer(_) => Vec::new(),
        }
    }

    /// Records the first token of a request.
    pub fn first(&mut self, request: usize) {
        match self {
            Self::Router(fleet, ..) => fleet.settle(RequestId(request as u64)),
            Self::Peer(peer) => peer.first(request),
        }
    }

    /// Records that a token of the request came back.
    pub fn emitted(&mut self, request: usize) {
        if let Self::Router(fleet, ..) = self {
            fleet.emitted(RequestId(request as u64), 1);
        }
    }

    /// Traffic of the fleet as the router counts it; empty under peer rules.
    pub fn traffic(&self) -> Traffic {
        match self {
            Self::Router(fleet, ..) => fleet.traffic(),
            Self::Peer(_) => Traffic::default(),
        }
    }

    /// Seconds of an empty step of an engine, as far as known.
    pub fn base_seconds(&self, engine: usize) -> f64 {
        match self {
            Self::Router(fleet, ..) => fleet.fit(id(engine)).map_or(0.0, |fit| fit.step_seconds(0.0, 0.0)),
            Self::Peer(_) => 0.0,
        }
    }

    /// Records the end of a request, in whatever way it ended.
    pub fn end(&mut self, request: usize) {
        match self {
            Self::Router(fleet, ..) => fleet.remove(RequestId(request as u64)),
            Self::Peer(peer) => peer.end(request),
        }
    }
}

fn id(engine: usize) -> WorkerId {
    WorkerId(engine as u8)
}

/// State with the credits that the router sees: the granted ones, or unlimited ones.
fn granted(mut state: EngineState, parts: Parts) -> EngineState {
    if !parts.credits {
        state.credits = u32::MAX / 2;
    }
    if !parts.fit {
        state.prefill_context_pending = 0.0;
    }
    state
}
