//! The price of placing a request on a worker, in seconds.
//!
//! ```text
//! cost_w = queue_w + own_w·(1 + β(1 + a·load)) + γ·own_w·decoding_w + δ·step_w + pressure(kv_w)
//! own_w  = prefill(tokens not cached on w)
//! ```
//! `queue_w`: prefill seconds ahead of it on the worker. β·own: what this request costs those that come later. γ·own·decoding:
//! what its prefill costs the sequences that decode there. δ·step: how slow its own decode will be there. pressure: what its
//! blocks evict. The weights are those that did best in simulation over development traces.

use penstock_proto::frames::EngineState;

/// Weights of the cost; see the module header.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// β: how much a second of own work costs the queue behind it.
    pub own: f64,
    /// a: how much more it costs when all queues are long; useful past saturation (0.3).
    pub congestion: f64,
    /// γ: harm of a second of prefill to each decoding sequence.
    pub decoding: f64,
    /// δ: steps that the request will probably take.
    pub step: f64,
    /// Seconds charged per unit of fill above [`Weights::pressure_from`].
    pub pressure: f64,
    /// Fill of the KV cache (blocks that are neither free nor evictable) from which pressure counts.
    pub pressure_from: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self { own: 2.0, congestion: 0.0, decoding: 0.05, step: 20.0, pressure: 40.0, pressure_from: 0.9 }
    }
}

/// What is asked about one worker.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Prefill seconds ahead on the worker, promised ones included.
    pub queue: f64,
    /// Prefill seconds of the request itself there.
    pub own: f64,
    /// Mean of `queue` over the fleet.
    pub load: f64,
    /// Sequences in prefill or decode there.
    pub decoding: f64,
    /// Seconds of one step there.
    pub step: f64,
    /// Share of KV blocks in use, 0 to 1.
    pub fill: f64,
}

impl Weights {
    /// The cost in seconds; monotone in every term.
    pub fn cost(&self, terms: &Terms) -> f64 {
        terms.queue
            + terms.own * (1.0 + self.own * (1.0 + self.congestion * terms.load))
            + self.decoding * terms.own * terms.decoding
            + self.step * terms.step
            + self.pressure * (terms.fill - self.pressure_from).max(0.0)
    }
}

/// Share of the blocks that running sequences hold, 0 to 1.
pub fn fill(state: &EngineState) -> f64 {
    match state.blocks_total {
        0 => 0.0,
        total => 1.0 - f64::from(state.blocks_free.min(total)) / f64::from(total),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fill_counts_what_cannot_be_evicted() {
        let state = EngineState { blocks_total: 100, blocks_free: 25, blocks_cached: 20, ..Default::default() };
        assert_eq!(fill(&state), 0.75);
        assert_eq!(fill(&EngineState::default()), 0.0);
    }

    proptest! {
        #[test]
        fn more_of_anything_never_costs_less(
            base in prop::array::uniform6(0.0..1.0_f64), more in 0.0..1.0_f64, which in 0..6_usize
        ) {
            let terms = |t: [f64; 6]| Terms { queue: t[0], own: t[1], load: t[2], decoding: t[3], step: t[4], fill: t[5] };
            let weights = Weights { congestion: 0.3, ..Weights::default() };
            let mut raised = base;
            raised[which] += more;
            prop_assert!(weights.cost(&terms(raised)) >= weights.cost(&terms(base)) - 1e-9);
        }
    }
}
