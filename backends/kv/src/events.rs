//! Log of changes for the router's index, in wire form and in order.
//!
//! One [`KvEvent`] holds one chain of stored blocks (each the child of the one before) or one run of removed ones, so the
//! order of the list is the order of the changes.

use penstock_proto::BlockHash;
use penstock_proto::frames::{KvEvent, Tier};
use std::collections::HashMap;

/// Changes of one tier since the last [`Self::take`].
#[derive(Debug)]
pub struct EventLog {
    tier: Tier,
    events: Vec<KvEvent>,
    /// Last stored hash, while the last event is a chain that can be extended.
    tip: Option<BlockHash>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self::of(Tier::Device)
    }
}

impl EventLog {
    /// Creates a log of changes in `tier`.
    pub fn of(tier: Tier) -> Self {
        Self { tier, events: Vec::new(), tip: None }
    }

    /// All blocks of a tier as events, each with the hash of the block before it: first the note that the tier is
    /// cleared, then whole chains, parents first, in whatever order the blocks come. A block costs a frame less than half
    /// the bytes within its chain, and a reader finds each chain in one piece.
    pub fn whole(tier: Tier, blocks: &[(Option<BlockHash>, BlockHash)]) -> Vec<KvEvent> {
        let places: HashMap<BlockHash, usize> = blocks.iter().enumerate().map(|(at, (_, hash))| (*hash, at)).collect();
        let parent = |at: usize| blocks[at].0.and_then(|parent| places.get(&parent).copied());
        let mut has_child = vec![false; blocks.len()];
        (0..blocks.len()).filter_map(parent).for_each(|at| has_child[at] = true);
        let ends = (0..blocks.len()).filter(|at| !has_child[*at]);
        let mut is_told = vec![false; blocks.len()];
        let mut log = Self::of(tier);
        log.cleared();
        let mut chain = Vec::new();
        // After the ends of chains all others: only parents in a circle are left, which a damaged file may name.
        for end in ends.chain(0..blocks.len()) {
            let mut next = Some(end);
            while let Some(at) = next.filter(|at| !is_told[*at]) {
                is_told[at] = true;
                chain.push(at);
                next = parent(at);
            }
            chain.drain(..).rev().for_each(|at| log.stored(blocks[at].0, blocks[at].1));
        }
        log.take()
    }

    fn event(&self) -> KvEvent {
        KvEvent { tier: self.tier as i32, ..Default::default() }
    }

    /// Records a block that can be read from now on. `parent` is the block before it, `None` for a first block.
    pub fn stored(&mut self, parent: Option<BlockHash>, hash: BlockHash) {
        match self.events.last_mut() {
            Some(event) if parent.is_some() && self.tip == parent => event.stored.push(hash.to_bytes().to_vec()),
            _ => self.events.push(KvEvent {
                stored: vec![hash.to_bytes().to_vec()],
                parent: parent.map(|parent| parent.to_bytes().to_vec()).unwrap_or_default(),
                ..self.event()
            }),
        }
        self.tip = Some(hash);
    }

    /// Records that a block is no longer in the cache.
    pub fn removed(&mut self, hash: BlockHash) {
        match self.events.last_mut() {
            Some(event) if self.tip.is_none() && !event.cleared => event.removed.push(hash.to_bytes().to_vec()),
            _ => self.events.push(KvEvent { removed: vec![hash.to_bytes().to_vec()], ..self.event() }),
        }
        self.tip = None;
    }

    /// Records that all blocks are gone; earlier changes not taken so far are dropped.
    pub fn cleared(&mut self) {
        self.events.clear();
        self.events.push(KvEvent { cleared: true, ..self.event() });
        self.tip = None;
    }

    /// Returns true if no change waits to be taken by [`Self::take`].
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Takes the changes gathered since the last call, in order.
    pub fn take(&mut self) -> Vec<KvEvent> {
        self.tip = None;
        std::mem::take(&mut self.events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_one_event_and_order_is_kept() {
        let [a, b, c] = [BlockHash(1), BlockHash(2), BlockHash(3)];
        let mut log = EventLog::default();
        log.stored(None, a);
        log.stored(Some(a), b);
        log.stored(None, c);
        log.removed(b);
        log.removed(a);
        log.stored(None, a);
        let shape: Vec<_> = log.take().iter().map(|e| (e.stored.len(), e.removed.len(), e.cleared)).collect();
        assert_eq!(shape, [(2, 0, false), (1, 0, false), (0, 2, false), (1, 0, false)]);
        assert!(log.is_empty());
        log.stored(Some(a), b);
        log.cleared();
        log.removed(c);
        let shape: Vec<_> = log.take().iter().map(|e| (e.stored.len(), e.removed.len(), e.cleared)).collect();
        assert_eq!(shape, [(0, 0, true), (0, 1, false)]);
    }

    #[test]
    fn a_whole_tier_is_told_in_chains_whatever_the_order_of_its_blocks() {
        let hash = |n: u8| BlockHash(n.into());
        // Two chains with one beginning, one whose parent is elsewhere, and a circle.
        let parents = [(1, 0), (2, 1), (3, 2), (4, 3), (12, 2), (13, 12), (21, 99), (22, 21), (31, 32), (32, 31)];
        let blocks = parents.map(|(block, parent)| ((parent > 0).then(|| hash(parent)), hash(block)));
        let orders = [blocks.to_vec(), blocks.into_iter().rev().collect()];
        for order in orders {
            let mut told = EventLog::whole(Tier::Host, &order);
            let cleared = told.remove(0);
            assert!(cleared.cleared && cleared.stored.is_empty());
            let mut chains: Vec<(Option<u8>, Vec<u8>)> = Vec::new();
            let mut known: Vec<u8> = Vec::new();
            for event in told {
                let number = |bytes: &Vec<u8>| BlockHash::from_bytes(bytes).map(|hash| hash.0 as u8);
                let parent = number(&event.parent);
                assert!(parent.iter().all(|parent| known.contains(parent) || [99, 31, 32].contains(parent)));
                let stored: Vec<u8> = event.stored.iter().filter_map(number).collect();
                known.extend(&stored);
                chains.push((parent, stored));
            }
            let lengths: Vec<usize> = chains.iter().map(|(_, chain)| chain.len()).collect();
            assert_eq!((lengths.len(), lengths.iter().sum::<usize>()), (4, blocks.len()), "{chains:?}");
        }
    }
}
