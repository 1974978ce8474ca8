//! A request on its way through a simulated fleet: what is wanted of it, and what came of it.

use penstock_proto::BlockHash;
use std::sync::Arc;

/// Where a request's KV comes from, as far as its engine lacks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// This engine computes it.
    Prefill(usize),
    /// This engine has it.
    Pull(usize),
}

impl Source {
    /// The engine.
    pub fn engine(self) -> usize {
        let (Self::Prefill(engine) | Self::Pull(engine)) = self;
        engine
    }
}

/// For whom a prompt is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// The engine that decodes.
    pub engine: usize,
    /// Prompt tokens that it has.
    pub have: usize,
}

/// What a worker is asked for.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Index in the trace.
    pub request: usize,
    /// Counts its lives: +1 each time its engine was lost.
    pub attempt: u32,
    /// Tokens to hold before the next one can be emitted: the prompt, and what was emitted before.
    pub input: usize,
    /// Tokens to emit.
    pub output: usize,
    /// Names of the full blocks of the prompt.
    pub hashes: Arc<[BlockHash]>,
    /// Who talks.
    pub session: u64,
    /// Whose it is.
    pub tenant: u32,
    /// It has lost an engine before.
    pub resumed: bool,
    /// Prompt tokens that are cached whatever the engine holds, for a bound that no engine reaches.
    pub given: Option<usize>,
    /// Where it went when it was recorded.
    pub recorded: Option<usize>,
    /// Its place at the engine: lower first.
    pub turn: i64,
    /// Who gives its KV.
    pub source: Option<Source>,
    /// It is only computed, for another engine.
    pub lent: Option<Lent>,
    /// Prompt tokens that were brought from disk or the shared store for it.
    pub brought: usize,
}

/// What came of a request; times in seconds of the simulation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// It came.
    pub arrival: f64,
    /// Its first token came back.
    pub first: Option<f64>,
    /// Its last token until now came back.
    pub latest: f64,
    /// Tokens that came back.
    pub tokens: usize,
    /// All came back.
    pub done: bool,
    /// Refused for good.
    pub rejected: bool,
    /// Engines that it lost.
    pub resumes: u32,
    /// The longest gap between two tokens after an engine was lost.
    pub gap: f64,
    /// Where it was sent last.
    pub engine: usize,
    /// When.
    pub bound: f64,
    /// Prompt tokens that the router believed cached there.
    pub believed: usize,
    /// Prompt tokens that were cached there.
    pub cached: usize,
    /// Of these, tokens that came from disk or the shared store.
    pub brought: usize,
}
