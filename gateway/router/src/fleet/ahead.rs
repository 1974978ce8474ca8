//! Prefetch for waiting requests: each request near the head of the queue is priced once, and its probable worker may load its blocks.

use super::Fleet;
use crate::WorkerId;
use crate::worker::WorkerView;
use penstock_proto::frames::Tier;
use penstock_proto::{BLOCK_TOKENS, BlockHash, RequestId};
use std::time::Duration;

/// Distance from the head of the queue within which requests are prefetched: loads for later ones would delay these.
const NEAR: usize = 16;

/// Most block hashes reported per request: a prompt of 128k tokens.
const BLOCKS_MAX: usize = 4096;

/// Least number of unknown blocks for which a remote tier is asked: it may have blocks that nobody has reported.
const UNKNOWN_MIN: usize = 2;

/// Waiting request whose blocks its probable worker can prefetch from a lower tier.
#[derive(Clone, Debug, PartialEq)]
pub struct Ahead {
    /// Number of the waiting request.
    pub request: RequestId,
    /// Worker that will probably get the request, and may load its blocks meanwhile.
    pub worker: WorkerId,
    /// Hashes of the prompt's blocks that can be read from a cache, from the first on.
    pub blocks: Vec<BlockHash>,
    /// Predicted time from now until the request is bound.
    pub wait: Duration,
}

impl Fleet {
    /// Waiting requests whose blocks a worker can load meanwhile; each is reported once. To be called when [`Self::next`] holds.
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
            let (home, needs) = (waiting.view.numerics_id.clone(), waiting.view.needs.clone());
            let suits =
                |view: &WorkerView| view.meets(&needs) && home.as_ref().is_none_or(|id| *id == view.member.numerics_id);
            let Some(placement) = market.choose(waiting, &suits, false, &mut random) else { continue };
            let choice = placement.choice();
            // Blocks pulled from another worker do not come from a tier.
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
