//! Approximate view of the prefix caches of backends that publish no events: the prompts sent to them lately.
//!
//! Each backend has two generations of blocks. A prompt sent goes into the young one; when that is full or old, it
//! becomes the old one, and the blocks of the previous old one are forgotten. So a block is forgotten between half and
//! all of the capacity, or of the time, after its last use: an approximate LRU without a cost per use, on top of the
//! index.

use crate::{KvIndex, WorkerId};
use penstock_proto::BlockHash;
use penstock_proto::frames::{KvEvent, Tier};
use std::time::Duration;

/// Bounds of the approximate view: number of blocks and age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trust {
    /// Most blocks believed to be in the cache of one backend.
    pub blocks_max: usize,
    /// Time without use after which a block counts as evicted.
    pub time_max: Duration,
}

impl Default for Trust {
    /// 65,536 blocks are 2 million tokens at 32 per block; ten minutes is the life that providers state for their caches.
    fn default() -> Self {
        Self { blocks_max: 1 << 16, time_max: Duration::from_secs(600) }
    }
}

/// Approximate view of backends that report no cache events; see the module header.
#[derive(Default)]
pub struct Approximate {
    index: KvIndex,
    trust: Trust,
    generations: Vec<Generation>,
}

/// Tier of the index that stands for the young generation (0 or 1), and the generation's start.
#[derive(Clone, Copy, Default)]
struct Generation {
    young: usize,
    since: Duration,
}

const TIERS: [Tier; 2] = [Tier::Device, Tier::Host];

impl Approximate {
    /// A view of `backends` backends, numbered from 0.
    pub fn new(backends: u8, trust: Trust) -> Self {
        let mut index = KvIndex::default();
        for backend in (0..backends).map(WorkerId) {
            index.join(backend, trust.blocks_max.div_ceil(2));
            index.limit(backend, Tier::Host, trust.blocks_max.div_ceil(2));
        }
        Self { index, trust, generations: vec![Generation::default(); backends.into()] }
    }

    /// Notes that a prompt was sent to a backend: a chain of blocks from its first on.
    pub fn sent(&mut self, backend: WorkerId, hashes: &[BlockHash], now: Duration) {
        self.age(backend, now);
        let Some(generation) = self.generations.get(usize::from(backend.0)) else { return };
        let (young, full) = (generation.young, self.trust.blocks_max.div_ceil(2));
        if self.index.held(backend)[young] + hashes.len() > full {
            self.turn(backend, now);
        }
        let young = TIERS[self.generations[usize::from(backend.0)].young];
        self.index.stored(backend, young, None, hashes.iter().copied());
    }

    /// Forgets a backend that reported an empty cache or went away.
    pub fn forget(&mut self, backend: WorkerId) {
        self.index.leave(backend);
    }

    /// Number of leading blocks that each backend probably holds.
    pub fn hits(&mut self, hashes: &[BlockHash], backends: u8, now: Duration) -> Vec<u32> {
        (0..backends).for_each(|backend| self.age(WorkerId(backend), now));
        let hits = self.index.hits(hashes, (0..backends).map(WorkerId));
        hits[..usize::from(backends)].to_vec()
    }

    /// Number of leading blocks that each of `among` probably holds, in its order.
    pub fn hits_of(&mut self, hashes: &[BlockHash], among: &[WorkerId], now: Duration) -> Vec<u32> {
        among.iter().for_each(|backend| self.age(*backend, now));
        let hits = self.index.hits(hashes, among.iter().copied());
        among.iter().map(|backend| hits[usize::from(backend.0)]).collect()
    }

    /// Gives a backend's place to another one, of which nothing is known.
    pub fn renew(&mut self, backend: WorkerId, now: Duration) {
        self.turn(backend, now);
        self.turn(backend, now);
    }

    /// Number of blocks believed to be in the cache of some backend.
    pub fn len(&self) -> usize {
        self.index.sizes().0
    }

    /// Returns true if no block is believed to be at any backend.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ages a backend's blocks: after half of [`Trust::time_max`] the young generation becomes the old one.
    fn age(&mut self, backend: WorkerId, now: Duration) {
        let Some(generation) = self.generations.get(usize::from(backend.0)) else { return };
        let age = now.saturating_sub(generation.since);
        if age >= self.trust.time_max / 2 {
            self.turn(backend, now);
        }
        if age >= self.trust.time_max {
            self.turn(backend, now);
        }
    }

    /// Makes the young generation the old one, and forgets the previous old one.
    fn turn(&mut self, backend: WorkerId, now: Duration) {
        let Some(generation) = self.generations.get_mut(usize::from(backend.0)) else { return };
        *generation = Generation { young: 1 - generation.young, since: now };
        let tier = TIERS[generation.young] as i32;
        self.index.apply(backend, &KvEvent { cleared: true, tier, ..Default::default() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: WorkerId = WorkerId(0);

    fn chain(range: std::ops::Range<u128>) -> Vec<BlockHash> {
        range.map(BlockHash).collect()
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn what_was_sent_is_believed_for_a_while() {
        let mut view = Approximate::new(2, Trust { blocks_max: 100, time_max: seconds(60) });
        view.sent(A, &chain(0..10), seconds(0));
        assert_eq!(view.hits(&chain(0..20), 2, seconds(29)), [10, 0]);
        view.sent(A, &chain(0..5), seconds(40));
        assert_eq!(view.hits(&chain(0..20), 2, seconds(45)), [10, 0]);
        assert_eq!(view.hits(&chain(0..20), 2, seconds(75)), [5, 0], "only what was used since");
        assert_eq!(view.hits(&chain(0..20), 2, seconds(500)), [0, 0]);
        assert!(view.is_empty());
    }

    #[test]
    fn a_place_that_is_given_on_begins_empty() {
        let mut view = Approximate::new(3, Trust { blocks_max: 100, time_max: seconds(60) });
        let c = WorkerId(2);
        view.sent(A, &chain(0..10), seconds(0));
        view.sent(c, &chain(0..5), seconds(0));
        assert_eq!(view.hits_of(&chain(0..20), &[c, A], seconds(1)), [5, 10]);
        view.renew(A, seconds(2));
        assert_eq!(view.hits_of(&chain(0..20), &[c, A], seconds(2)), [5, 0]);
        view.sent(A, &chain(0..7), seconds(3));
        assert_eq!(view.hits_of(&chain(0..20), &[A], seconds(3)), [7]);
    }

    #[test]
    fn the_least_recently_used_go_first_and_there_is_a_limit() {
        let mut view = Approximate::new(1, Trust { blocks_max: 100, time_max: seconds(600) });
        for request in 0..100_u128 {
            view.sent(A, &chain(0..10), seconds(1));
            view.sent(A, &chain(1000 * request + 1000..1000 * request + 1010), seconds(1));
            assert!(view.len() <= 100);
        }
        assert_eq!(view.hits(&chain(0..10), 1, seconds(1)), [10]);
        assert_eq!(view.hits(&chain(100_000..100_010), 1, seconds(1)), [10]);
        assert_eq!(view.hits(&chain(1000..1010), 1, seconds(1)), [0]);
        view.sent(A, &chain(0..1000), seconds(1));
        assert!(view.len() <= 100, "a prompt longer than all of it counts as far as there is room");
        view.forget(A);
        assert!(view.is_empty());
    }
}
