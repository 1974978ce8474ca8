//! Translation of a foreign engine's blocks to ours: other hashes, other block sizes.
//!
//! ```text
//! theirs, 16 tokens   e0      e1      e2      e3      e4
//! ours, 32 tokens     ──── X ────     ──── Y ────     (tail of 16 waits for the next block)
//! ```
//! Our block is held where all foreign blocks that it covers are held. So there is a node per foreign block with the
//! tokens between our last boundary and the block's end, and with our blocks that it is a part of. A node stays while
//! its block is held anywhere or a node behind it exists. Where foreign blocks are longer than ours, two of them can
//! begin alike: then our block is held as long as either is.

use super::events::{ForeignEvent, ForeignHash};
use crate::{KvIndex, WorkerId};
use penstock_proto::frames::{KvEvent, Tier};
use penstock_proto::{BLOCK_TOKENS, BlockHash, BlockHasher};
use std::collections::HashMap;

/// Most foreign blocks followed per engine; some 300 bytes each.
const NODES_MAX: usize = 1 << 20;
/// Most tokens of all followed blocks, since memory per block grows with them: as many as 64 engines of a million tokens hold.
const TOKENS_MAX: usize = 1 << 26;

/// Most of our blocks that run through one foreign block, as when prompts fork inside it. Each event of that block visits all of them.
const COVERS_MAX: usize = 1 << 15;

/// Receiver of our blocks, one at a time: an index, or one that others read concurrently.
pub trait Holdings {
    /// Returns true if a block is noted as held by the worker in the tier.
    fn holds(&self, worker: WorkerId, tier: Tier, hash: BlockHash) -> bool;
    /// Notes that a block is held now. `before`: the block before it.
    fn stored(&mut self, worker: WorkerId, tier: Tier, before: Option<BlockHash>, hash: BlockHash);
    /// Notes that the worker no longer holds a block in the tier.
    fn removed(&mut self, worker: WorkerId, tier: Tier, hash: BlockHash);
    /// Notes that the worker no longer holds any block, in no tier.
    fn cleared(&mut self, worker: WorkerId);
}

impl Holdings for KvIndex {
    fn holds(&self, worker: WorkerId, tier: Tier, hash: BlockHash) -> bool {
        self.holds(worker, tier, hash)
    }

    fn stored(&mut self, worker: WorkerId, tier: Tier, before: Option<BlockHash>, hash: BlockHash) {
        self.stored(worker, tier, before, [hash]);
    }

    fn removed(&mut self, worker: WorkerId, tier: Tier, hash: BlockHash) {
        self.removed(worker, tier, [hash]);
    }

    fn cleared(&mut self, worker: WorkerId) {
        for tier in [Tier::Device, Tier::Host, Tier::Disk, Tier::Remote] {
            self.apply(worker, &KvEvent { cleared: true, tier: tier as i32, ..Default::default() });
        }
    }
}

/// Counters of a foreign engine's blocks since its translator was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Followed {
    /// Foreign blocks that the engine reported as stored.
    pub stored: u64,
    /// Foreign blocks that the engine reported as removed.
    pub removed: u64,
    /// Foreign blocks that could not be placed: the parent was never reported, or a bound is reached.
    pub orphans: u64,
}

/// Translator of one engine's block events into our block hashes; see the module header.
pub struct Rehasher {
    hasher: BlockHasher,
    nodes: HashMap<ForeignHash, Node>,
    /// Number of tokens kept in all nodes, and its upper bound.
    tokens: usize,
    tokens_max: usize,
    covers_max: usize,
    /// Extra holders of our blocks that several foreign blocks stand for, by tier.
    shared: HashMap<(BlockHash, Tier), u32>,
    followed: Followed,
}

struct Node {
    parent: Option<ForeignHash>,
    /// Number of nodes whose parent is this node.
    children: u32,
    tokens: u32,
    /// Bitmask of [`Tier`]s that hold the block.
    tiers: u8,
    /// Our last block that ends in this foreign block or before it.
    last: Option<BlockHash>,
    /// Tokens between the end of our block `last` and the end of this foreign block.
    tail: Box<[u32]>,
    /// Our blocks that this foreign block is a part of.
    covers: Vec<Cover>,
}

/// One of our blocks, as the path of the foreign blocks that it covers.
#[derive(Clone, Copy)]
struct Cover {
    hash: BlockHash,
    before: Option<BlockHash>,
    /// Foreign block that completes it, and the number of foreign blocks it covers, counted back from there.
    end: ForeignHash,
    parts: u32,
}

impl Rehasher {
    /// A translator to our block hashes, as `hasher` computes them.
    pub fn new(hasher: BlockHasher) -> Self {
        Self {
            hasher,
            nodes: HashMap::new(),
            tokens: 0,
            tokens_max: TOKENS_MAX,
            covers_max: COVERS_MAX,
            shared: HashMap::new(),
            followed: Followed::default(),
        }
    }

    /// Counters of foreign blocks since this translator was made.
    pub fn followed(&self) -> Followed {
        self.followed
    }

    /// Number of foreign blocks whose tokens are known.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns true if no foreign block is known.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Applies an event of `worker` to the index.
    pub fn apply(&mut self, event: &ForeignEvent, index: &mut impl Holdings, worker: WorkerId) {
        match event {
            ForeignEvent::Stored { hashes, parent, tokens, block_tokens, tier } => {
                self.followed.stored += hashes.len() as u64;
                let mut parent = *parent;
                let mut pieces = tokens.chunks_exact(*block_tokens);
                for (at, hash) in hashes.iter().enumerate() {
                    if !self.place(*hash, parent, pieces.next()) {
                        self.followed.orphans += (hashes.len() - at) as u64;
                        return;
                    }
                    self.hold(*hash, *tier, index, worker);
                    parent = Some(*hash);
                }
            }
            ForeignEvent::Removed { hashes, tier } => {
                self.followed.removed += hashes.len() as u64;
                hashes.iter().for_each(|hash| self.lose(*hash, *tier, index, worker));
            }
            ForeignEvent::Cleared => self.clear(index, worker),
        }
    }

    /// Forgets everything, because the engine did or its events may be incomplete.
    pub fn clear(&mut self, index: &mut impl Holdings, worker: WorkerId) {
        index.cleared(worker);
        (self.nodes, self.shared, self.tokens) = (HashMap::new(), HashMap::new(), 0);
    }

    /// Creates a node for a block without one. False if its tokens or its parent are unknown, or a bound is reached.
    fn place(&mut self, hash: ForeignHash, parent: Option<ForeignHash>, tokens: Option<&[u32]>) -> bool {
        if self.nodes.contains_key(&hash) {
            return true;
        }
        let has_room = |more: usize| self.nodes.len() < NODES_MAX && self.tokens + more <= self.tokens_max;
        let Some(tokens) = tokens.filter(|tokens| has_room(tokens.len())) else { return false };
        let (mut last, mut waiting) = match parent.map(|parent| self.nodes.get(&parent)) {
            None => (None, Vec::new()),
            Some(None) => return false,
            Some(Some(node)) => (node.last, node.tail.to_vec()),
        };
        let mut path = self.path(parent, waiting.len());
        if path.iter().any(|part| self.nodes.get(part).is_none_or(|node| node.covers.len() >= self.covers_max)) {
            return false;
        }
        if let Some(node) = parent.and_then(|parent| self.nodes.get_mut(&parent)) {
            node.children += 1;
        }
        waiting.extend_from_slice(tokens);
        let mut covers = Vec::new();
        let blocks = waiting.chunks_exact(BLOCK_TOKENS);
        let tail: Box<[u32]> = blocks.remainder().into();
        for block in blocks {
            let ours = self.hasher.block(last, block);
            // Our first block began in the nodes before this one, the others begin inside it.
            let parts = path.len() as u32 + 1;
            let cover = Cover { hash: ours, before: last, end: hash, parts };
            for part in std::mem::take(&mut path) {
                if let Some(node) = self.nodes.get_mut(&part) {
                    node.covers.push(cover);
                }
            }
            covers.push(cover);
            last = Some(ours);
        }
        self.tokens += tokens.len();
        let tokens = tokens.len() as u32;
        self.nodes.insert(hash, Node { parent, children: 0, tokens, tiers: 0, last, tail, covers });
        true
    }

    /// Foreign blocks that hold the last `tokens` tokens up to the end of `at`, backwards.
    fn path(&self, mut at: Option<ForeignHash>, mut tokens: usize) -> Vec<ForeignHash> {
        let mut path = Vec::new();
        while tokens > 0
            && let Some(hash) = at
            && let Some(node) = self.nodes.get(&hash)
        {
            tokens = tokens.saturating_sub(node.tokens as usize);
            path.push(hash);
            at = node.parent;
        }
        path
    }

    fn hold(&mut self, hash: ForeignHash, tier: Tier, index: &mut impl Holdings, worker: WorkerId) {
        let Some(node) = self.nodes.get_mut(&hash) else { return };
        if node.tiers & bit(tier) != 0 {
            return;
        }
        node.tiers |= bit(tier);
        for cover in self.held(hash, tier) {
            if index.holds(worker, tier, cover.hash) {
                *self.shared.entry((cover.hash, tier)).or_default() += 1;
            } else {
                index.stored(worker, tier, cover.before, cover.hash);
            }
        }
    }

    /// Our held blocks that this foreign block is a part of.
    fn held(&self, hash: ForeignHash, tier: Tier) -> Vec<Cover> {
        let covers = self.nodes.get(&hash).map_or(&[][..], |node| &node.covers);
        covers.iter().filter(|cover| self.is_held(cover, tier)).copied().collect()
    }

    fn is_held(&self, cover: &Cover, tier: Tier) -> bool {
        let mut at = Some(cover.end);
        (0..cover.parts).all(|_| {
            let node = at.and_then(|hash| self.nodes.get(&hash));
            at = node.and_then(|node| node.parent);
            node.is_some_and(|node| node.tiers & bit(tier) != 0)
        })
    }

    fn lose(&mut self, hash: ForeignHash, tier: Tier, index: &mut impl Holdings, worker: WorkerId) {
        if self.nodes.get(&hash).is_none_or(|node| node.tiers & bit(tier) == 0) {
            return;
        }
        for cover in self.held(hash, tier) {
            match self.shared.get_mut(&(cover.hash, tier)) {
                None => index.removed(worker, tier, cover.hash),
                Some(1) => drop(self.shared.remove(&(cover.hash, tier))),
                Some(more) => *more -= 1,
            }
        }
        if let Some(node) = self.nodes.get_mut(&hash) {
            node.tiers &= !bit(tier);
        }
        self.drop_unused(hash);
    }

    /// Drops a node that is not needed any more, and the nodes before it that existed only for it.
    fn drop_unused(&mut self, hash: ForeignHash) {
        let mut at = Some(hash);
        while let Some(hash) = at
            && self.nodes.get(&hash).is_some_and(|node| node.tiers == 0 && node.children == 0)
            && let Some(node) = self.nodes.remove(&hash)
        {
            self.tokens -= node.tokens as usize;
            for cover in node.covers.iter().filter(|cover| cover.end == hash) {
                let mut part = node.parent;
                for _ in 1..cover.parts {
                    let Some(before) = part.and_then(|hash| self.nodes.get_mut(&hash)) else { break };
                    before.covers.retain(|other| other.end != hash);
                    part = before.parent;
                }
            }
            at = node.parent;
            if let Some(before) = at.and_then(|hash| self.nodes.get_mut(&hash)) {
                before.children -= 1;
            }
        }
    }
}

fn bit(tier: Tier) -> u8 {
    1 << tier as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const W: WorkerId = WorkerId(0);

    /// Parent and tokens of the foreign block with this number: a tree in which block n follows block n / 2.
    fn block(number: u32, size: usize) -> (Option<ForeignHash>, Vec<u32>) {
        let parent = (number > 1).then(|| ForeignHash((number / 2).into()));
        // Blocks of one parent begin alike.
        let owner = |token: u32| if (token as usize) < size / 2 { number / 2 } else { number };
        (parent, (0..size as u32).map(|token| owner(token) * 1000 + token).collect())
    }

    fn path(number: u32) -> Vec<u32> {
        let mut path: Vec<u32> = std::iter::successors(Some(number), |n| (*n > 1).then(|| n / 2)).collect();
        path.reverse();
        path
    }

    fn hasher() -> BlockHasher {
        BlockHasher::new(b"test")
    }

    fn prompt(number: u32, size: usize) -> Vec<BlockHash> {
        let tokens: Vec<u32> = path(number).into_iter().flat_map(|number| block(number, size).1).collect();
        hasher().chain(&tokens)
    }

    fn stored(number: u32, size: usize, tier: Tier, told: bool) -> ForeignEvent {
        let (parent, tokens) = block(number, size);
        let tokens = if told { tokens } else { Vec::new() };
        ForeignEvent::Stored { hashes: vec![ForeignHash(number.into())], parent, tokens, block_tokens: size, tier }
    }

    struct Engine {
        rehasher: Rehasher,
        index: KvIndex,
    }

    impl Engine {
        fn new() -> Self {
            let mut index = KvIndex::default();
            index.join(W, 1 << 20);
            Self { rehasher: Rehasher::new(hasher()), index }
        }

        fn say(&mut self, event: &ForeignEvent) {
            self.rehasher.apply(event, &mut self.index, W);
        }

        fn hit(&self, number: u32, size: usize) -> u32 {
            self.index.hits(&prompt(number, size), [W])[0]
        }
    }

    #[test]
    fn two_of_theirs_are_one_of_ours() {
        let mut engine = Engine::new();
        engine.say(&stored(1, 16, Tier::Device, true));
        assert_eq!((engine.hit(15, 16), engine.index.sizes().0), (0, 0), "half a block is none");
        [3, 7, 15].iter().for_each(|number| engine.say(&stored(*number, 16, Tier::Device, true)));
        assert_eq!(engine.hit(15, 16), 2);
        engine.say(&ForeignEvent::Removed { hashes: vec![ForeignHash(7)], tier: Tier::Device });
        assert_eq!(engine.hit(15, 16), 1);
        engine.say(&stored(7, 16, Tier::Device, true));
        assert_eq!(engine.hit(15, 16), 2, "the last of theirs never went");
        engine.say(&ForeignEvent::Cleared);
        assert_eq!((engine.hit(15, 16), engine.rehasher.len(), engine.index.sizes()), (0, 0, (0, 0)));
    }

    #[test]
    fn a_block_without_a_known_parent_is_left_out() {
        let mut engine = Engine::new();
        engine.say(&stored(3, 32, Tier::Device, true));
        engine.say(&stored(1, 32, Tier::Host, false));
        assert_eq!((engine.index.sizes().0, engine.rehasher.followed().orphans), (0, 2));
    }

    #[test]
    fn large_blocks_are_followed_as_far_as_there_is_room() {
        let mut engine = Engine::new();
        engine.rehasher.tokens_max = 1000;
        (1..=4).for_each(|number| engine.say(&stored(number, 320, Tier::Device, true)));
        assert_eq!((engine.rehasher.len(), engine.rehasher.followed().orphans), (3, 1));
        engine.say(&ForeignEvent::Removed { hashes: vec![ForeignHash(3)], tier: Tier::Device });
        engine.say(&stored(4, 320, Tier::Device, true));
        assert_eq!((engine.hit(4, 320), engine.rehasher.followed().orphans), (30, 1), "one that went made room");
        engine.say(&ForeignEvent::Cleared);
        (1..=3).for_each(|number| engine.say(&stored(number, 320, Tier::Device, true)));
        assert_eq!(engine.rehasher.len(), 3);
    }

    /// A publisher whose prompts all fork inside one block could make every event of that block visit all of them.
    #[test]
    fn prompts_that_fork_inside_one_block_are_followed_up_to_a_number() {
        let mut engine = Engine::new();
        engine.rehasher.covers_max = 10;
        let half = |hash: u32, parent: Option<u32>| ForeignEvent::Stored {
            hashes: vec![ForeignHash(hash.into())],
            parent: parent.map(|parent| ForeignHash(parent.into())),
            tokens: vec![hash; 16],
            block_tokens: 16,
            tier: Tier::Device,
        };
        engine.say(&half(1, None));
        (2..22).for_each(|hash| engine.say(&half(hash, Some(1))));
        assert_eq!((engine.index.sizes().0, engine.rehasher.followed().orphans), (10, 10));
        // A block that ends where one of ours does has no such prompts behind it.
        engine.say(&ForeignEvent::Removed { hashes: vec![ForeignHash(1)], tier: Tier::Device });
        assert_eq!(engine.index.sizes().0, 0);
        engine.say(&ForeignEvent::Removed { hashes: (2..12).map(ForeignHash).collect(), tier: Tier::Device });
        assert!(engine.rehasher.is_empty());
    }

    proptest! {
        /// Checked against the definition: our block is held where all foreign blocks it covers are held.
        #[test]
        fn ours_is_held_where_all_of_theirs_is(
            size in prop::sample::select(vec![1_usize, 8, 16, 24, 32, 48, 64, 100]),
            ops in prop::collection::vec((1..32_u32, 0..3_usize, any::<bool>()), 0..120),
        ) {
            let tiers = [Tier::Device, Tier::Host, Tier::Disk];
            let (mut engine, mut held) = (Engine::new(), BTreeSet::new());
            for (number, tier, store) in ops {
                if store {
                    // An engine reports a block behind its parents, wherever those are now.
                    for part in path(number) {
                        engine.say(&stored(part, size, tiers[tier], true));
                        held.insert((part, tier));
                    }
                } else {
                    engine.say(&ForeignEvent::Removed { hashes: vec![ForeignHash(number.into())], tier: tiers[tier] });
                    held.remove(&(number, tier));
                }
            }
            for (tier, named) in tiers.into_iter().enumerate() {
                let mut ours = BTreeSet::new();
                for number in 1..32 {
                    let path = path(number);
                    for (block, hash) in prompt(number, size).into_iter().enumerate() {
                        let theirs = block * BLOCK_TOKENS / size..=((block + 1) * BLOCK_TOKENS - 1) / size;
                        if path[theirs].iter().all(|part| held.contains(&(*part, tier))) {
                            ours.insert(hash);
                        }
                    }
                }
                for number in 1..32 {
                    let whole = prompt(number, size);
                    let depth = whole.iter().take_while(|hash| ours.contains(hash)).count();
                    let hits = engine.index.hits_by_tier(&whole, [W]);
                    let told = if tier == 0 { hits.on_device(W) as usize } else { hits.within(W, named) as usize };
                    prop_assert!(if tier == 0 { told == depth } else { told >= depth }, "{} {} {}", number, tier, size);
                }
            }
            held.iter().for_each(|(number, tier)| {
                engine.say(&ForeignEvent::Removed { hashes: vec![ForeignHash((*number).into())], tier: tiers[*tier] });
            });
            prop_assert_eq!((engine.rehasher.len(), engine.index.sizes()), (0, (0, 0)));
        }
    }
}
