//! A fleet reconstructed from a gateway's record of decisions: number, speed and size of its engines, and the true
//! times of its requests.
//!
//! Every line describes its worker at the time of binding (`penstock_router::Record`); the last line of each worker
//! counts. One formula is made of them, the median of each part, and engines that are faster or slower than it get a
//! relative speed.

use super::engine::Speed;
use super::report::quantile;
use super::run::Setup;
use super::trace::Trace;
use penstock_router::WORKERS_MAX;
use serde::Deserialize;

/// Properties of an engine as a record of decisions gives them: measured speeds and sizes.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Like {
    /// Seconds of a step, of a prompt token, of a prompt token per token before it, of a decoding sequence, of a token
    /// of its context.
    pub speed: [f64; 5],
    /// Rows of prefill in a full step.
    pub chunk: usize,
    /// Tokens that the engine's KV cache holds.
    pub kv_tokens: usize,
    /// Most sequences that the engine runs at once.
    pub sequences_max: usize,
}

/// Most tokens and sequences of an engine.
const SIZE_MAX: usize = 100_000_000;
/// Relative difference below which speeds count as equal.
const EQUAL: f64 = 0.1;
/// Rows of prefill of the step by which engines are compared.
const ROWS: f64 = 512.0;

impl Like {
    /// Returns true if the values are within the bounds of a simulation: finite speeds, sizes from 1.
    pub(super) fn is_sane(&self) -> bool {
        let [_, token, ..] = self.speed;
        let sizes = [self.chunk, self.kv_tokens, self.sequences_max];
        self.speed.iter().all(|seconds| (0.0..1e3).contains(seconds))
            && token > 0.0
            && sizes.iter().all(|size| (1..=SIZE_MAX).contains(size))
    }

    fn step(speed: &[f64; 5]) -> f64 {
        speed[0] + ROWS * speed[1]
    }
}

/// Sets the fleet of `setup` to that of a record, as far as the record tells.
pub fn take_from(trace: &Trace, setup: &mut Setup) {
    let engines = trace.requests.iter().filter_map(|request| request.engine);
    if let Some(most) = engines.chain(trace.engines.keys().copied()).filter(|engine| *engine < WORKERS_MAX).max() {
        setup.engines = most + 1;
    }
    let all: Vec<Like> = trace.engines.values().copied().collect();
    if all.is_empty() {
        return;
    }
    let speed: [f64; 5] = std::array::from_fn(|at| median(all.iter().map(|like| like.speed[at])));
    let [base, prefill, attention, sequence, context] = speed;
    setup.speed = Speed { base, prefill, attention, sequence, context, ..setup.speed };
    let size = |of: fn(&Like) -> usize| median(all.iter().map(|like| of(like) as f64)) as usize;
    setup.sizes.kv_tokens = size(|like| like.kv_tokens);
    setup.sizes.batch_tokens = size(|like| like.chunk);
    setup.sizes.sequences_max = size(|like| like.sequences_max);
    let shares = trace.engines.iter().map(|(engine, like)| (*engine, Like::step(&speed) / Like::step(&like.speed)));
    setup.slow = shares.filter(|(engine, share)| *engine < setup.engines && (share - 1.0).abs() > EQUAL).collect();
}

/// Recorded times to the first token: p50 and p99.
pub fn ttft(trace: &Trace) -> Option<[f64; 2]> {
    let times = || trace.requests.iter().filter_map(|request| request.ttft);
    times().next()?;
    Some([0.5, 0.99].map(|share| quantile(times(), share)))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    quantile(values, 0.5)
}
