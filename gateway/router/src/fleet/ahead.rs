//! What a worker may load for requests that wait: those that are next get a look at where they would go, once, when they come near the
//! head of the queue.

use super::Fleet;
use crate::WorkerId;
use crate::worker::WorkerView;
use penstock_proto::frames::Tier;
use penstock_proto::{BLOCK_TOKENS, BlockHash};
use std::time::Duration;

/// How many requests from the head of the queue on: what is loaded for later ones is in the way of these.
const NEAR: usize = 16;

/// Names of blocks that are told at most: a prompt of 128k tokens.
const BLOCKS_MAX: usize = 4096;

/// Blocks that a remote tier may have without anybody knowing: it is asked about no fewer.
const UNKNOWN_MIN: usize = 2;

/// A request that waits, and where it will probably go.
#[derive(Clone, Debug, PartialEq)]
pub struct Ahead {
    /// The request.
    pub request: u64,
    /// The worker.
    pub worker: WorkerId,
    /// Names of the blocks of its prompt that can be read from a cache, from the first on.
    pub blocks: Vec<BlockHash>,
    /// How long it is predicted to wait still.
    pub wait: Duration,
}

impl Fleet {
    /// Requests that wait and whose blocks a worker can load meanwhile; each is named once. To be asked when [`Self::next`] holds.
    pub fn ahead(&mut self, now: Duration) -> Vec<Ahead> {
        if !std::mem::take(&mut self.has_moved) || !self.site.workers.values().any(WorkerView::has_tiers) {
            return Vec::new();
        }
        let mut random = self.random;
        let market = self.site.market(self.queue.seconds(), now);
        let mut named = Vec::new();
        for request in self.queue.order(now, NEAR) {
            let Some((_, waiting)) = self.queue.get_mut(request).filter(|(_, waiting)| !waiting.is_ahead) else {
                continue;
            };
            waiting.is_ahead = true;
            let home = waiting.view.numerics_id.clone();
            let suits = |view: &WorkerView| home.as_ref().is_none_or(|id| *id == view.member.numerics_id);
            let Some(placement) = market.choose(waiting, &suits, false, &mut random) else { continue };
            let choice = placement.choice();
            // What comes from another worker does not come from a tier.
            if choice.pull_from.is_some() || choice.prefill.is_some() {
                continue;
            }
            let readable = waiting.view.tokens.len().saturating_sub(1) / BLOCK_TOKENS;
            let found = choice.found;
            let unknown = readable.saturating_sub(found.all() as usize / BLOCK_TOKENS);
            let worker = &self.site.workers[&choice.worker];
            let asks = worker.has_tier(Tier::Remote) && unknown >= UNKNOWN_MIN;
            if found.host + found.disk + found.remote > 0 || asks {
                let mut blocks = waiting.hashes(&worker.member.numerics_id).to_vec();
                blocks.truncate(readable.min(BLOCKS_MAX));
                let wait = super::seconds(choice.parts.queue);
                named.push(Ahead { request, worker: choice.worker, blocks, wait });
            }
        }
        named
    }
}
