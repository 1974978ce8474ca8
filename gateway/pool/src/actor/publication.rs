//! The snapshot of the pool, put together from its parts.

use super::super::patience::Patience;
use super::super::status::{Counts, PoolStatus};
use super::Actor;
use std::sync::Arc;
use std::time::Instant;

impl Actor {
    pub(super) fn publish(&self, now: Instant) {
        self.status.store(Arc::new(PoolStatus {
            workers: self.members.iter().map(|(_, member)| member.status(&self.adapters, now)).collect(),
            model: self.model.info().cloned(),
            open: self.requests.len(),
            waiting: self.placement.router.waiting(),
            ttft_predicted: self.placement.router.predicted_ttft(0),
            blocks_indexed: self.placement.router.index_sizes().0,
            counts: self.counts(),
            ready_wait: Patience::of(&self.config, &self.members, now).ready,
            role_advice: self.roles.advice.clone(),
            on_demand: self.demand.has_rule(),
            adapters: self.adapters.wanted(),
            replicas: self.replicas.status(&self.members),
        }));
    }

    /// Counters of the whole pool: those of the requests, and those of decisions, moves and roles.
    fn counts(&self) -> Counts {
        let of_requests = self.requests.counts();
        Counts {
            submitted: of_requests.submitted,
            finished: of_requests.finished,
            cancelled: of_requests.cancelled,
            failed: of_requests.failed,
            resumed: of_requests.resumed,
            resumed_inexact: of_requests.resumed_inexact,
            tokens: of_requests.tokens,
            tokens_dropped: of_requests.tokens_dropped,
            cached_tokens_told: of_requests.cached_tokens_told,
            first_tokens: of_requests.first_tokens,
            ttft_us: of_requests.ttft_us,
            ttft_predicted_us: of_requests.ttft_predicted_us,
            ttft_error_us: of_requests.ttft_error_us,
            role_flips: self.roles.flips,
            moves: self.moves.counts.moved,
            moves_failed: self.moves.counts.failed,
            moved_blocks: self.moves.counts.blocks,
            ..self.placement.counts()
        }
    }
}
