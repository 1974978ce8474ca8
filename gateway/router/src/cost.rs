//! Cost of placing a request on a worker, in seconds.
//!
//! ```text
//! cost_w = queue_w + own_w·(1 + β·pace_w·(1 + a·max(load − from, 0))) + γ·own_w·decoding_w + δ·step_w + pressure(kv_w)
//! own_w  = prefill(tokens not cached on w) + load(blocks of w's lower tiers) or pull(blocks of another worker), where that is cheaper
//! ```
//! - `queue_w`: prefill seconds ahead of the request on the worker.
//! - β·own: delay to the requests that come later; a: more so when all queues are long (`load` above `from`); pace: the
//!   worker's speed relative to the fleet's mean, since a faster worker gets more of the later requests.
//! - γ·own·decoding: delay of the decoding sequences there by the request's prefill.
//! - δ·step: the request's own decode time there.
//! - pressure: evictions by the request's blocks.
//!
//! The weights are those that did best in simulation over development traces.

use penstock_proto::frames::EngineState;

/// Weights by which the cost of a request at a worker is computed; see the module header.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// β: cost, per second of own work, to the queue behind it.
    pub own: f64,
    /// a: additional factor per second of queue above [`Weights::congestion_from`].
    pub congestion: f64,
    /// Mean queue of the fleet in seconds from which on it counts as congested.
    pub congestion_from: f64,
    /// γ: harm of a second of prefill to each decoding sequence there.
    pub decoding: f64,
    /// δ: decode steps that the request will probably take.
    pub step: f64,
    /// Seconds charged per unit of fill above [`Weights::pressure_from`].
    pub pressure: f64,
    /// Fill of the KV cache (blocks that are neither free nor evictable) from which on pressure counts.
    pub pressure_from: f64,
    /// Uncached tokens from which on a worker may have them computed by a prefill worker; see [`crate::pair`].
    pub apart_tokens: usize,
    /// Uncached tokens from which on a worker of the role decode may do so: one chunk.
    pub apart_tokens_decode: usize,
}

impl Default for Weights {
    fn default() -> Self {
        Self {
            own: 2.0,
            congestion: 0.3,
            congestion_from: 1.0,
            decoding: 0.05,
            step: 20.0,
            pressure: 40.0,
            pressure_from: 0.9,
            apart_tokens: 2048,
            apart_tokens_decode: 512,
        }
    }
}

/// Inputs of the cost at one worker; all but counts and ratios in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// Prefill ahead on the worker: waiting, running, and promised to requests that go before.
    pub queue: f64,
    /// Prefill of the request itself at the worker, loads from tiers included.
    pub own: f64,
    /// Speed of the worker's prefill relative to the mean of the fleet.
    pub pace: f64,
    /// Mean queue of the fleet, with requests that wait in the gateway.
    pub load: f64,
    /// Number of sequences in prefill or decode at the worker.
    pub decoding: f64,
    /// Duration of a decode step at the worker once the request has joined.
    pub step: f64,
    /// Share of KV blocks in use once the request has joined; above 1, requests wait for memory.
    pub fill: f64,
}

/// Parts of a request's cost at one worker, in seconds; their sum is the cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Parts {
    /// Seconds until the prefill already queued at the worker is done.
    pub queue: f64,
    /// Seconds of the request's own prefill at the worker, loads from tiers included.
    pub own: f64,
    /// Delay that the request's prefill causes to later requests, in seconds.
    pub later: f64,
    /// Delay that the request's prefill causes to the sequences that decode at the worker, in seconds.
    pub harm: f64,
    /// Seconds of the decode steps that the request will probably take.
    pub decode: f64,
    /// Seconds charged for the KV blocks of others that the request would evict.
    pub pressure: f64,
}

impl Parts {
    /// Sum of the parts: the cost.
    pub fn sum(&self) -> f64 {
        self.queue + self.own + self.later + self.harm + self.decode + self.pressure
    }
}

impl Weights {
    /// Computes the parts of the cost from the terms, in seconds; monotone in every term.
    pub fn price(&self, terms: &Terms) -> Parts {
        let congestion = 1.0 + self.congestion * (terms.load - self.congestion_from).max(0.0);
        Parts {
            queue: terms.queue,
            own: terms.own,
            later: terms.own * terms.pace * self.own * congestion,
            harm: self.decoding * terms.own * terms.decoding,
            decode: self.step * terms.step,
            pressure: self.pressure * (terms.fill - self.pressure_from).max(0.0),
        }
    }

    /// Cost of the request in seconds: the sum of its parts, as the policy compares it.
    pub fn cost(&self, terms: &Terms) -> f64 {
        self.price(terms).sum()
    }
}

/// Share of the KV blocks in use or spoken for once `more` are taken; above 1, requests wait for memory.
pub fn fill(state: &EngineState, more: u32) -> f64 {
    match state.blocks_total {
        0 => 0.0,
        total => {
            let used = f64::from(total.saturating_sub(state.blocks_free)) + f64::from(state.blocks_wanted);
            (used + f64::from(more)) / f64::from(total)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fill_counts_what_cannot_be_evicted() {
        let state = EngineState { blocks_total: 100, blocks_free: 25, blocks_cached: 20, ..Default::default() };
        assert_eq!(fill(&state, 0), 0.75);
        assert_eq!(fill(&state, 50), 1.25);
        assert_eq!(fill(&EngineState::default(), 7), 0.0);
    }

    proptest! {
        #[test]
        fn more_of_anything_never_costs_less(
            base in prop::array::uniform7(0.0..3.0_f64), more in 0.0..3.0_f64, which in 0..7_usize
        ) {
            let terms = |[queue, own, pace, load, decoding, step, fill]: [f64; 7]| {
                Terms { queue, own, pace, load, decoding, step, fill }
            };
            let weights = Weights::default();
            let mut raised = base;
            raised[which] += more;
            prop_assert!(weights.cost(&terms(raised)) >= weights.cost(&terms(base)) - 1e-9);
        }
    }
}
