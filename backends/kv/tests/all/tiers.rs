//! Tier against a naive model: found blocks have the right bytes in any order of stores, loads and outcomes.

use penstock_kv::tier::Link;
use penstock_kv::{Placed, SlotId, TierPool};
use penstock_proto::BlockHash;
use penstock_proto::frames::Tier;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
enum Op {
    /// A block leaves the tier above.
    Store(u8),
    /// The oldest write ends, well or not.
    Written(bool),
    /// A block that is in the tier begins to be loaded.
    Load(u8),
    /// A read ends: whole, failed, or wrong.
    Read(u8, u8),
    /// The coldest block is taken out.
    Shrink,
    /// The disk is full: the capacity shrinks.
    Cap(u8),
    /// The tier is switched off for good.
    Close,
    /// The process is killed and starts again on the same medium.
    Restart,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        8 => (0..12_u8).prop_map(Op::Store),
        8 => prop::bool::weighted(0.9).prop_map(Op::Written),
        6 => (0..12_u8).prop_map(Op::Load),
        6 => (any::<u8>(), 0..5_u8).prop_map(|(n, how)| Op::Read(n, how)),
        1 => Just(Op::Shrink),
        1 => (1..8_u8).prop_map(Op::Cap),
        1 => Just(Op::Close),
        1 => Just(Op::Restart),
    ];
    prop::collection::vec(op, 1..150)
}

/// A tier, the medium under it, and the reads and writes in progress.
struct World {
    pool: TierPool,
    slots: usize,
    /// Block whose bytes each slot holds; absent while they are being written.
    medium: BTreeMap<SlotId, u8>,
    writes: Vec<(SlotId, u8)>,
    reads: Vec<(SlotId, u8)>,
    told: BTreeSet<Vec<u8>>,
}

fn link(n: u8) -> Link {
    Link { parent: n.checked_sub(1).map(|n| BlockHash(u128::from(n))), hash: BlockHash(u128::from(n)) }
}

impl World {
    fn new(slots: usize) -> Self {
        let pool = TierPool::new(Tier::Disk, slots);
        Self { pool, slots, medium: BTreeMap::new(), writes: Vec::new(), reads: Vec::new(), told: BTreeSet::new() }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Store(n) => {
                let knew = self.pool.knows(link(n).hash);
                match self.pool.store(link(n)) {
                    Placed::Known => assert!(knew),
                    Placed::Full => assert!(!knew),
                    Placed::Slot { slot, evicted } => {
                        assert!(!knew && slot.index() < self.slots, "a block is in one place");
                        assert!(self.reads.iter().all(|(read, _)| *read != slot), "{slot:?} is being read");
                        assert!(self.writes.iter().all(|(write, _)| *write != slot), "{slot:?} is being written");
                        if let Some(evicted) = evicted {
                            let bytes = self.medium.get(&slot).map(|n| link(*n).hash);
                            assert_eq!(bytes, Some(evicted.hash), "the bytes of the evicted are still there");
                        }
                        self.medium.remove(&slot);
                        self.writes.push((slot, n));
                    }
                }
            }
            Op::Written(well) if !self.writes.is_empty() => {
                let (slot, n) = self.writes.remove(0);
                if well {
                    self.medium.insert(slot, n);
                    self.pool.stored(slot);
                } else {
                    self.pool.lost(slot);
                }
            }
            Op::Load(n) => {
                let held = self.pool.holds(link(n).hash);
                let slot = self.pool.load(link(n).hash);
                assert_eq!(slot.is_some(), held);
                self.reads.extend(slot.map(|slot| (slot, n)));
            }
            Op::Read(at, how) if !self.reads.is_empty() => {
                let (slot, n) = self.reads.swap_remove(usize::from(at) % self.reads.len());
                assert_eq!(self.medium.get(&slot), Some(&n), "what is read is what was asked for");
                match how {
                    0 => self.pool.lost(slot),
                    1 => self.pool.unread(slot),
                    _ => self.pool.loaded(slot),
                }
            }
            Op::Shrink => drop(self.pool.shrink()),
            Op::Cap(slots) => {
                // A full medium keeps the bytes that were written.
                let places = self.medium.keys().chain(self.writes.iter().chain(&self.reads).map(|(slot, _)| slot));
                let used = places.map(|slot| slot.index() + 1).max().unwrap_or(0);
                self.pool.cap(used.max(usize::from(slots)));
            }
            Op::Close => self.pool.close(),
            Op::Restart => {
                self.pool = TierPool::new(Tier::Disk, self.slots);
                self.writes.clear();
                self.reads.clear();
                self.told.clear();
                // Result of a header scan: one block may have been written twice.
                self.pool.adopt(self.medium.iter().map(|(slot, n)| (*slot, link(*n))));
            }
            Op::Written(_) | Op::Read(..) => {}
        }
        for event in self.pool.take_events() {
            if event.cleared {
                self.told.clear();
            }
            event.removed.iter().for_each(|hash| assert!(self.told.remove(hash), "removed what was not there"));
            event.stored.iter().for_each(|hash| assert!(self.told.insert(hash.clone()), "stored twice"));
        }
    }

    fn check(&self) {
        let held: BTreeSet<Vec<u8>> =
            (0..12).filter(|n| self.pool.holds(link(*n).hash)).map(|n| link(n).hash.to_bytes().to_vec()).collect();
        assert_eq!(self.told, held, "the router's view is the tier's");
        let snapshot: BTreeSet<Vec<u8>> = self.pool.snapshot().into_iter().flat_map(|event| event.stored).collect();
        assert_eq!(snapshot, held);
        assert!(self.pool.used() <= self.slots);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_tier_is_the_naive_model(slots in 1..8_usize, ops in ops()) {
        let mut world = World::new(slots);
        for op in &ops {
            world.apply(op);
            world.check();
        }
        // No leak: once all operations are reported, every slot of the medium can be filled anew.
        while !world.writes.is_empty() {
            world.apply(&Op::Written(true));
        }
        while !world.reads.is_empty() {
            world.apply(&Op::Read(0, 4));
        }
        let total = world.pool.total();
        for n in 0..total as u8 {
            let fresh = Link { parent: None, hash: BlockHash(u128::from(n) + 100) };
            let Placed::Slot { slot, .. } = world.pool.store(fresh) else { panic!("a slot leaked") };
            prop_assert!(slot.index() < slots);
        }
        let more = world.pool.store(Link { parent: None, hash: BlockHash(99) });
        prop_assert_eq!(more, Placed::Full);
    }
}
