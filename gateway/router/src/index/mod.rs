//! Exact prefix index over all workers: chained block hashes in runs. Workers that have all of a run are bits of a set,
//! workers that have a part of it are spans.
//!
//! ```text
//! run 7   h0 h1 h2 … h255          all: {w1, w9}   parts: w4 0..64 (disk), w9 0..12 (host)   promised: w2 0..256 ×3
//! run 8   h256 h257                 all: {w1}
//! table   h0 → (7,0)  h1 → (7,1)  …  h257 → (8,1)
//! ```
//! A look-up finds the run of the first hash and compares hashes along it; only where the question leaves the run is
//! the table asked again. So its cost follows runs, not blocks, and a popular prefix stays one run however many
//! continuations fork off it.
//!
//! *Resident* blocks are those that workers reported, each in a [`Tier`]. *Promised* blocks are those that a worker was
//! asked to compute and has not reported yet; they send two requests with one long prefix that arrive together to one
//! worker.
//!
//! Bytes per block: 16 for its hash, 9 to 18 for its place, below 1 for its share of a run of 256. Operations per
//! looked-up block: one comparison of 16 bytes in order of memory.

mod chains;
mod hits;
mod run;
mod spans;
mod table;

pub use hits::Hits;

use crate::{WORKERS_MAX, WorkerId};
use chains::{At, Chains};
use hits::LEVELS;
use penstock_proto::BlockHash;
use penstock_proto::frames::{KvEvent, Tier};
use std::ops::Range;

/// Most blocks that one worker may announce per tier, whatever size it reports: a faulty worker must not fill the
/// gateway's memory. 64 million tokens.
const TIER_BLOCKS_MAX: usize = 1 << 21;

/// Number of [`Tier`]s of the KV cache, the device included.
pub(crate) const TIERS: usize = 4;

/// Set of workers, one bit each.
pub(crate) type Bits = u128;

pub(crate) fn bit(worker: WorkerId) -> Bits {
    1 << worker.0
}

/// Workers of a set, in ascending order of their ids.
pub(crate) fn bits(mut set: Bits) -> impl Iterator<Item = WorkerId> {
    std::iter::from_fn(move || {
        let first = (set != 0).then(|| set.trailing_zeros() as u8)?;
        set &= set - 1;
        Some(WorkerId(first))
    })
}

/// Index of all workers' prefix caches; see the module header.
#[derive(Default)]
pub struct KvIndex {
    chains: Chains,
    workers: Vec<Account>,
}

/// Blocks that a worker has announced and may announce, by tier.
#[derive(Clone, Copy, Default)]
struct Account {
    held: [usize; TIERS],
    held_max: [usize; TIERS],
}

impl KvIndex {
    /// Adds a worker with an empty view. It may announce `blocks_max` blocks on its device, and up to two million in
    /// each other tier until [`Self::limit`] sets another bound. Further blocks are ignored.
    ///
    /// # Panics
    /// If the worker's id is not below [`WORKERS_MAX`].
    pub fn join(&mut self, worker: WorkerId, blocks_max: usize) {
        assert!(usize::from(worker.0) < WORKERS_MAX, "worker id {} of at most {WORKERS_MAX}", worker.0);
        self.clear(worker, 0..TIERS);
        let index = usize::from(worker.0);
        if self.workers.len() <= index {
            self.workers.resize(index + 1, Account::default());
        }
        self.workers[index].held_max = [TIER_BLOCKS_MAX; TIERS];
        self.limit(worker, Tier::Device, blocks_max);
    }

    /// Sets the bound on a worker's blocks in one tier, two million at most; blocks announced already stay.
    pub fn limit(&mut self, worker: WorkerId, tier: Tier, blocks_max: usize) {
        if let Some(account) = self.workers.get_mut(usize::from(worker.0)) {
            account.held_max[tier as usize] = blocks_max.min(TIER_BLOCKS_MAX);
        }
    }

    /// Removes a worker with its promised blocks. Cost: one pass over the runs, and a removal per block that no other worker has.
    pub fn leave(&mut self, worker: WorkerId) {
        self.clear(worker, 0..TIERS);
        self.chains.clear_promises(worker);
    }

    /// Takes in one change of a worker's cache. Hashes of the wrong length and unknown tiers are skipped.
    pub fn apply(&mut self, worker: WorkerId, event: &KvEvent) {
        let Ok(tier) = Tier::try_from(event.tier) else { return };
        if event.cleared {
            self.clear(worker, tier as usize..tier as usize + 1);
        }
        self.removed(worker, tier, event.removed.iter().filter_map(|bytes| BlockHash::from_bytes(bytes)));
        let stored = event.stored.iter().filter_map(|bytes| BlockHash::from_bytes(bytes));
        self.stored(worker, tier, BlockHash::from_bytes(&event.parent), stored);
    }

    /// Notes that a worker holds these blocks: a chain in order. `parent`: the block before the first, if known.
    pub fn stored(
        &mut self,
        worker: WorkerId,
        tier: Tier,
        parent: Option<BlockHash>,
        hashes: impl IntoIterator<Item = BlockHash>,
    ) {
        let mut previous = parent.and_then(|parent| self.chains.find(parent));
        let mut stretch = Stretch::default();
        for hash in hashes {
            let mut at = self.chains.follow(previous, hash);
            if at.is_none() {
                if self.room(worker, tier) <= stretch.len() {
                    self.hold(worker, tier, &mut stretch);
                }
                if self.room(worker, tier) > stretch.len() {
                    at = Some(self.chains.create(previous, hash, worker));
                }
            }
            if let Some(at) = at.filter(|at| !stretch.push_back(*at)) {
                self.hold(worker, tier, &mut stretch);
                stretch.push_back(at);
            }
            previous = at;
        }
        self.hold(worker, tier, &mut stretch);
    }

    /// Notes that a worker no longer holds these blocks.
    pub fn removed(&mut self, worker: WorkerId, tier: Tier, hashes: impl IntoIterator<Item = BlockHash>) {
        let mut stretch = Stretch::default();
        for hash in hashes {
            let Some(at) = stretch.neighbour(&self.chains, hash).or_else(|| self.chains.find(hash)) else { continue };
            if !stretch.push(at) {
                self.lose(worker, tier, &mut stretch);
                // The place may have moved, because places of blocks without a holder were freed.
                if let Some(at) = self.chains.find(hash) {
                    stretch.push(at);
                }
            }
        }
        self.lose(worker, tier, &mut stretch);
    }

    /// Notes that a worker was asked to compute these blocks: a chain from its first block on.
    pub fn promise(&mut self, worker: WorkerId, hashes: &[BlockHash]) {
        let mut stretch = Stretch::default();
        let mut previous = None;
        for hash in hashes {
            let at = match self.chains.follow(previous, *hash) {
                Some(at) => previous.and_then(|previous| self.chains.join(previous, at)).unwrap_or(at),
                None => self.chains.create(previous, *hash, worker),
            };
            previous = Some(at);
            if !stretch.push_back(at) {
                self.chains.promise(stretch.run, worker, stretch.take());
                stretch.push_back(at);
            }
        }
        if !stretch.is_empty() {
            self.chains.promise(stretch.run, worker, stretch.take());
        }
    }

    /// Takes one promise back, given the hashes it was made with, because the blocks are resident now or the request
    /// ended. A promise of a worker that left is gone already.
    pub fn release(&mut self, worker: WorkerId, hashes: &[BlockHash]) {
        // Stretches first, then their places one by one: freeing one may move another, but never splits it.
        for (first, count) in self.stretches(hashes) {
            if let Some(at) = self.chains.find(hashes[first]) {
                self.chains.unpromise(at.run, worker, at.offset..at.offset + count);
            }
        }
    }

    /// Leading blocks of `hashes` that each worker holds in any tier or has promised: `hits[worker]`, for the workers of `among`.
    pub fn hits(&self, hashes: &[BlockHash], among: impl IntoIterator<Item = WorkerId>) -> [u32; WORKERS_MAX] {
        self.hits_by_tier(hashes, among).into_any()
    }

    /// Leading blocks of `hashes` per worker and tier, in one walk. Cost: a table look-up per run, a comparison per
    /// block, and some steps per worker that has only a part of a run.
    pub fn hits_by_tier(&self, hashes: &[BlockHash], among: impl IntoIterator<Item = WorkerId>) -> Hits {
        let among = among.into_iter().fold(0, |set, worker| set | bit(worker));
        let (mut hits, mut left, mut depth) = (Hits::none(), [among; LEVELS], 0);
        while left[LEVELS - 1] != 0
            && let Some(first) = hashes.get(depth)
            && let Some(at) = self.chains.find(*first)
        {
            let run = self.chains.run(at.run);
            let pairs = run.hashes[at.offset as usize..].iter().zip(&hashes[depth..]);
            let count = pairs.take_while(|(one, other)| one == other).count();
            run.narrow(at.offset, count as u32, depth as u32, &mut left, &mut hits);
            depth += count;
        }
        for (level, left) in left.into_iter().enumerate() {
            bits(left).for_each(|worker| hits.set(level, worker, depth as u32));
        }
        hits
    }

    /// Number of blocks resident at some worker, and of blocks promised.
    pub fn sizes(&self) -> (usize, usize) {
        self.chains.sizes()
    }

    /// Blocks that the worker has announced and still holds, by tier.
    pub fn held(&self, worker: WorkerId) -> [usize; TIERS] {
        self.workers.get(usize::from(worker.0)).map_or([0; TIERS], |account| account.held)
    }

    /// Returns true if the worker has announced this block in this tier.
    pub fn holds(&self, worker: WorkerId, tier: Tier, hash: BlockHash) -> bool {
        let at = self.chains.find(hash);
        at.is_some_and(|at| self.lacking(at.run, worker, tier, &(at.offset..at.offset + 1)) == 0)
    }

    /// Number of runs, and of blocks in them, including blocks without a holder that were not freed yet.
    pub fn shape(&self) -> (usize, usize) {
        self.chains.shape()
    }

    /// Splits `hashes` into stretches of blocks that are consecutive in one run of the index. Returns the position in
    /// `hashes` of each stretch's first hash and its number of blocks; hashes that are not in the index are skipped.
    fn stretches(&self, hashes: &[BlockHash]) -> Vec<(usize, u32)> {
        let mut found: Vec<(usize, u32)> = Vec::new();
        let mut previous: Option<At> = None;
        for (number, hash) in hashes.iter().enumerate() {
            let at = self.chains.follow(previous, *hash);
            match found.last_mut() {
                Some(last) if at.is_some() && at == previous.map(At::next) => last.1 += 1,
                _ if at.is_some() => found.push((number, 1)),
                _ => {}
            }
            previous = at;
        }
        found
    }

    fn room(&self, worker: WorkerId, tier: Tier) -> usize {
        let account = self.workers.get(usize::from(worker.0));
        account.map_or(0, |account| account.held_max[tier as usize].saturating_sub(account.held[tier as usize]))
    }

    fn hold(&mut self, worker: WorkerId, tier: Tier, stretch: &mut Stretch) {
        let (run, mut blocks, room) = (stretch.run, stretch.take(), self.room(worker, tier));
        // Blocks beyond the bound are ignored, the last ones first: without these the others are still of use.
        while blocks.len() > room && self.lacking(run, worker, tier, &blocks) > room {
            blocks.end -= 1;
        }
        if !blocks.is_empty() {
            let added = self.chains.hold(run, worker, tier as usize, blocks);
            if let Some(account) = self.workers.get_mut(usize::from(worker.0)) {
                account.held[tier as usize] += added;
            }
        }
    }

    fn lacking(&self, run: u32, worker: WorkerId, tier: Tier, blocks: &Range<u32>) -> usize {
        self.chains.run(run).lacks(worker, tier as usize, blocks.clone()) as usize
    }

    fn lose(&mut self, worker: WorkerId, tier: Tier, stretch: &mut Stretch) {
        let (run, blocks) = (stretch.run, stretch.take());
        if !blocks.is_empty() {
            let lost = self.chains.lose(run, worker, tier as usize, blocks);
            if let Some(account) = self.workers.get_mut(usize::from(worker.0)) {
                account.held[tier as usize] -= lost;
            }
        }
    }

    fn clear(&mut self, worker: WorkerId, tiers: Range<usize>) {
        let Some(account) = self.workers.get_mut(usize::from(worker.0)) else { return };
        let had: usize = account.held[tiers.clone()].iter().sum();
        account.held[tiers.clone()].fill(0);
        if had > 0 {
            self.chains.clear(worker, tiers);
        }
    }
}

/// Adjacent blocks of one run, collected to be changed together.
#[derive(Default)]
struct Stretch {
    run: u32,
    blocks: Range<u32>,
}

impl Stretch {
    /// Adds a block at the end, or as the first one; false if it is not adjacent.
    fn push_back(&mut self, at: At) -> bool {
        if self.is_empty() {
            *self = Self { run: at.run, blocks: at.offset..at.offset + 1 };
            return true;
        }
        let fits = self.run == at.run && self.blocks.end == at.offset;
        self.blocks.end += u32::from(fits);
        fits
    }

    /// Adds a block at either end, or one that is inside already; false if it is not adjacent.
    fn push(&mut self, at: At) -> bool {
        if !self.is_empty() && self.run == at.run {
            if self.blocks.contains(&at.offset) {
                return true;
            }
            if at.offset + 1 == self.blocks.start {
                self.blocks.start = at.offset;
                return true;
            }
        }
        self.push_back(at)
    }

    /// Position of `hash` if it is directly before or behind the stretch.
    fn neighbour(&self, chains: &Chains, hash: BlockHash) -> Option<At> {
        if self.is_empty() {
            return None;
        }
        let before = self.blocks.start.checked_sub(1);
        let ends = before.into_iter().chain([self.blocks.end]);
        ends.map(|offset| At { run: self.run, offset }).find(|at| chains.is_at(*at, hash))
    }

    fn take(&mut self) -> Range<u32> {
        std::mem::take(&mut self.blocks)
    }

    fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    fn len(&self) -> usize {
        self.blocks.len()
    }
}
