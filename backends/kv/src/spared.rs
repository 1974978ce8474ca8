//! Blocks that waiting requests have on the device, which no load evicts.
//!
//! Blocks that are loaded for a request are idle until it starts. Without a limit, two loads on a device that is nearly full
//! evict each other's blocks, and both were in vain. So a load ends where it would evict a block that a waiting request has: the
//! request computes the rest, and what is loaded stays a prefix that can be used. Sequences that run or start evict any idle block.

use penstock_proto::{BlockHash, WorkId};
use std::collections::HashMap;

/// Blocks of requests that wait: for further blocks, or to start after a load.
#[derive(Debug, Default)]
pub struct Spared {
    chains: HashMap<WorkId, Vec<BlockHash>>,
    /// Number of requests that have each block.
    counts: HashMap<BlockHash, usize>,
}

impl Spared {
    /// Spares blocks for a request, in addition to those that it has.
    pub fn add(&mut self, id: WorkId, blocks: &[BlockHash]) {
        self.chains.entry(id).or_default().extend_from_slice(blocks);
        blocks.iter().for_each(|hash| *self.counts.entry(*hash).or_default() += 1);
    }

    /// Spares blocks no longer for the requests that `waits` denies.
    pub fn retain(&mut self, waits: impl Fn(WorkId) -> bool) {
        let Self { chains, counts } = self;
        chains.retain(|id, blocks| {
            let stays = waits(*id);
            for hash in blocks.iter().filter(|_| !stays) {
                if let Some(count) = counts.get_mut(hash) {
                    *count -= 1;
                    if *count == 0 {
                        counts.remove(hash);
                    }
                }
            }
            stays
        });
    }

    /// Returns true if a waiting request has the block.
    pub fn contains(&self, hash: BlockHash) -> bool {
        self.counts.contains_key(&hash)
    }

    /// Returns true if no blocks are spared.
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_spared_until_the_last_request_that_has_it_waits_no_more() {
        let [a, b, c] = [1, 2, 3].map(BlockHash);
        let mut spared = Spared::default();
        spared.add(WorkId(1), &[a, b]);
        spared.add(WorkId(2), &[a]);
        spared.add(WorkId(2), &[c]);
        spared.retain(|id| id == WorkId(2));
        assert_eq!([a, b, c].map(|hash| spared.contains(hash)), [true, false, true]);
        spared.retain(|_| false);
        assert!(spared.is_empty() && spared.counts.is_empty());
    }
}
