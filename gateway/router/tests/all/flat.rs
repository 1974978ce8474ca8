//! The simplest possible index, one map entry per block: the reference for tests and benchmarks of [`penstock_router::KvIndex`].
//!
//! *Resident* blocks are those that workers reported. *In flight* are those that a worker was asked to compute and has
//! not reported yet; they send two requests with one long prefix that arrive together to one worker. Hashes are
//! chained, so a block counts only behind its parent: a look-up walks from the first block and keeps the workers that
//! held all of them.

use penstock_proto::BlockHash;
use penstock_proto::frames::KvEvent;
use penstock_router::{WORKERS_MAX, WorkerId};
use std::collections::HashMap;

/// Set of workers, one bit each.
type Bits = u128;

fn bit(worker: WorkerId) -> Bits {
    1 << worker.0
}

/// Index of all workers' prefix caches; see the module header.
#[derive(Default)]
pub(crate) struct FlatIndex {
    resident: HashMap<BlockHash, Bits>,
    in_flight: HashMap<BlockHash, Vec<(WorkerId, u32)>>,
    blocks: Vec<usize>,
    blocks_max: Vec<usize>,
}

impl FlatIndex {
    /// Adds a worker with an empty view. It may announce `blocks_max` blocks; further ones are ignored, since a faulty
    /// worker must not fill the gateway's memory.
    ///
    /// # Panics
    /// If the worker's id is not below [`WORKERS_MAX`].
    pub(crate) fn join(&mut self, worker: WorkerId, blocks_max: usize) {
        assert!(usize::from(worker.0) < WORKERS_MAX, "worker id {} of at most {WORKERS_MAX}", worker.0);
        self.clear(worker);
        let index = usize::from(worker.0);
        if self.blocks.len() <= index {
            self.blocks.resize(index + 1, 0);
            self.blocks_max.resize(index + 1, 0);
        }
        self.blocks_max[index] = blocks_max;
    }

    /// Removes a worker with its promised blocks. Cost: one pass over the index.
    pub(crate) fn leave(&mut self, worker: WorkerId) {
        self.clear(worker);
        self.in_flight.retain(|_, holders| {
            holders.retain(|(holder, _)| *holder != worker);
            !holders.is_empty()
        });
    }

    /// Takes in one change of a worker's cache. Hashes of the wrong length are skipped.
    pub(crate) fn apply(&mut self, worker: WorkerId, event: &KvEvent) {
        if event.cleared {
            self.clear(worker);
        }
        for hash in event.removed.iter().filter_map(|bytes| BlockHash::from_bytes(bytes)) {
            self.remove(worker, hash);
        }
        for hash in event.stored.iter().filter_map(|bytes| BlockHash::from_bytes(bytes)) {
            self.insert(worker, hash);
        }
    }

    /// Notes blocks that `worker` was asked to compute.
    pub(crate) fn promise(&mut self, worker: WorkerId, hashes: &[BlockHash]) {
        for hash in hashes {
            let holders = self.in_flight.entry(*hash).or_default();
            match holders.iter_mut().find(|(holder, _)| *holder == worker) {
                Some((_, count)) => *count += 1,
                None => holders.push((worker, 1)),
            }
        }
    }

    /// Takes a promise back: the blocks are resident now, or the request ended. A promise of a worker that left is gone already.
    pub(crate) fn release(&mut self, worker: WorkerId, hashes: &[BlockHash]) {
        for hash in hashes {
            let Some(holders) = self.in_flight.get_mut(hash) else { continue };
            if let Some(at) = holders.iter().position(|(holder, _)| *holder == worker) {
                holders[at].1 -= 1;
                if holders[at].1 == 0 {
                    holders.swap_remove(at);
                }
            }
            if holders.is_empty() {
                self.in_flight.remove(hash);
            }
        }
    }

    /// Leading blocks of `hashes` that each worker holds or has promised: `hits[worker]`, for the workers of `among`.
    /// Cost: two look-ups per block until no worker is left.
    pub(crate) fn hits(&self, hashes: &[BlockHash], among: impl IntoIterator<Item = WorkerId>) -> [u32; WORKERS_MAX] {
        let mut hits = [0; WORKERS_MAX];
        let mut left: Bits = among.into_iter().fold(0, |set, worker| set | bit(worker));
        for (depth, hash) in (1..).zip(hashes) {
            left &= self.holders(*hash);
            if left == 0 {
                break;
            }
            let mut set = left;
            while set != 0 {
                hits[set.trailing_zeros() as usize] = depth;
                set &= set - 1;
            }
        }
        hits
    }

    /// Number of blocks resident at some worker, and of blocks promised.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.resident.len(), self.in_flight.len())
    }

    fn holders(&self, hash: BlockHash) -> Bits {
        let resident = self.resident.get(&hash).copied().unwrap_or(0);
        let promised =
            self.in_flight.get(&hash).map_or(0, |holders| holders.iter().fold(0, |set, (w, _)| set | bit(*w)));
        resident | promised
    }

    fn insert(&mut self, worker: WorkerId, hash: BlockHash) {
        let index = usize::from(worker.0);
        if self.blocks.get(index).is_none_or(|blocks| *blocks >= self.blocks_max[index]) {
            return;
        }
        let set = self.resident.entry(hash).or_insert(0);
        if *set & bit(worker) == 0 {
            *set |= bit(worker);
            self.blocks[index] += 1;
        }
    }

    fn remove(&mut self, worker: WorkerId, hash: BlockHash) {
        let Some(set) = self.resident.get_mut(&hash) else { return };
        if *set & bit(worker) != 0 {
            *set &= !bit(worker);
            self.blocks[usize::from(worker.0)] -= 1;
        }
        if *set == 0 {
            self.resident.remove(&hash);
        }
    }

    fn clear(&mut self, worker: WorkerId) {
        let index = usize::from(worker.0);
        if self.blocks.get(index).is_some_and(|blocks| *blocks > 0) {
            self.resident.retain(|_, set| {
                *set &= !bit(worker);
                *set != 0
            });
            self.blocks[index] = 0;
        }
    }
}
