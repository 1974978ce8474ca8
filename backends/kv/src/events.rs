//! Log of changes for the router's index, in wire form and in order.
//!
//! One [`KvEvent`] holds one chain of stored blocks (each the child of the one before) or one run of removed ones, so the
//! order of the list is the order of the changes.

use penstock_proto::BlockHash;
use penstock_proto::frames::{KvEvent, Tier};

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
}
