//! A request on its way through a simulated fleet: its needs, and its outcome.

use penstock_proto::BlockHash;
use std::sync::Arc;

/// Source of a request's KV, as far as its engine lacks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Index of an engine that computes the KV for this request.
    Prefill(usize),
    /// Index of an engine that has the KV in its cache.
    Pull(usize),
}

impl Source {
    /// Index of the engine that computes or has the KV.
    pub fn engine(self) -> usize {
        let (Self::Prefill(engine) | Self::Pull(engine)) = self;
        engine
    }
}

/// Receiver of a prompt that is computed for another engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// Index of the engine that decodes, and gets the KV.
    pub engine: usize,
    /// Prompt tokens that the decoding engine has.
    pub have: usize,
}

/// A request as sent to a worker.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Index of the request in the trace.
    pub request: usize,
    /// Number of this attempt: +1 each time its engine was lost.
    pub attempt: u32,
    /// Tokens to compute before the next one can be emitted: the prompt, and tokens emitted before.
    pub input: usize,
    /// Tokens that the request still has to emit.
    pub output: usize,
    /// Hashes of the full blocks of the prompt.
    pub hashes: Arc<[BlockHash]>,
    /// Session of the request, for session affinity in the router.
    pub session: u64,
    /// Tenant of the request, for the fair share.
    pub tenant: u32,
    /// True if the request has lost an engine before.
    pub resumed: bool,
    /// Prompt tokens that count as cached on any engine, for a bound that no router reaches.
    pub given: Option<usize>,
    /// Engine that served the request in the record; `None` if the trace is no record.
    pub recorded: Option<usize>,
    /// Fair-share turn at the engine: lower first.
    pub turn: i64,
    /// Engine that provides KV of the prompt; `None` if the request's own engine computes all.
    pub source: Option<Source>,
    /// Set if the prompt is only computed, for another engine.
    pub lent: Option<Lent>,
    /// Prompt tokens that were loaded from disk or the shared store for it.
    pub brought: usize,
}

/// Outcome of a request; times in seconds of the simulation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Time at which the request reached the gateway.
    pub arrival: f64,
    /// Time when the request's first token came back; `None` before.
    pub first: Option<f64>,
    /// Time when the request's latest token came back.
    pub latest: f64,
    /// Number of output tokens that came back so far, over all attempts.
    pub tokens: usize,
    /// True if all output tokens came back.
    pub done: bool,
    /// True if the request was refused for good.
    pub rejected: bool,
    /// Number of engines that the request has lost.
    pub resumes: u32,
    /// Longest gap between two tokens after an engine was lost.
    pub gap: f64,
    /// Index of the engine to which the request was last sent.
    pub engine: usize,
    /// Time when the request was last sent to an engine.
    pub bound: f64,
    /// Prompt tokens that the router believed cached at that engine.
    pub believed: usize,
    /// Prompt tokens that were cached at that engine.
    pub cached: usize,
    /// Part of `cached` that came from disk or the shared store.
    pub brought: usize,
}
