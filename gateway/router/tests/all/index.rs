//! Tests of the index as the fleet uses it, and against the simplest possible implementation.

use crate::flat::FlatIndex;
use penstock_proto::BlockHash;
use penstock_proto::frames::{KvEvent, Tier};
use penstock_router::{KvIndex, WorkerId};
use proptest::prelude::*;
use std::collections::HashMap;

const A: WorkerId = WorkerId(0);
const B: WorkerId = WorkerId(127);
const TIERS: [Tier; 4] = [Tier::Device, Tier::Host, Tier::Disk, Tier::Remote];

fn hashes(range: std::ops::Range<u128>) -> Vec<BlockHash> {
    range.map(BlockHash).collect()
}

fn bytes(hashes: &[BlockHash]) -> Vec<Vec<u8>> {
    hashes.iter().map(|hash| hash.to_bytes().to_vec()).collect()
}

fn stored(range: std::ops::Range<u128>) -> KvEvent {
    KvEvent { stored: bytes(&hashes(range)), ..Default::default() }
}

fn index() -> KvIndex {
    let mut index = KvIndex::default();
    index.join(A, 1000);
    index.join(B, 1000);
    index
}

#[test]
fn a_hit_is_the_unbroken_beginning() {
    let mut index = index();
    index.apply(A, &stored(0..4));
    index.apply(B, &stored(0..2));
    index.apply(B, &stored(3..9));
    let hits = index.hits(&hashes(0..10), [A, B]);
    assert_eq!((hits[0], hits[127]), (4, 2));
    assert_eq!(index.hits(&hashes(0..10), [B])[0], 0, "only among those asked for");
}

#[test]
fn promised_blocks_count_until_released() {
    let mut index = index();
    index.promise(A, &hashes(0..3));
    index.promise(A, &hashes(0..5));
    assert_eq!(index.hits(&hashes(0..10), [A])[0], 5);
    index.release(A, &hashes(0..5));
    assert_eq!(index.hits(&hashes(0..10), [A])[0], 3);
    index.release(A, &hashes(0..3));
    assert_eq!((index.sizes(), index.shape()), ((0, 0), (0, 0)));
}

#[test]
fn a_worker_that_left_or_was_cleared_holds_nothing() {
    let mut index = index();
    index.apply(A, &stored(0..4));
    index.promise(A, &hashes(4..6));
    index.apply(B, &stored(0..1));
    index.leave(A);
    let hits = index.hits(&hashes(0..10), [A, B]);
    assert_eq!((hits[0], hits[127]), (0, 1));
    index.apply(B, &KvEvent { cleared: true, ..stored(7..8) });
    assert_eq!(index.hits(&hashes(7..8), [B])[127], 1, "cleared comes before stored");
    assert_eq!((index.sizes(), index.shape()), ((1, 0), (1, 1)));
}

#[test]
fn a_worker_cannot_announce_more_than_it_has() {
    let mut index = KvIndex::default();
    index.join(A, 10);
    index.apply(A, &stored(0..1000));
    assert_eq!((index.sizes().0, index.shape().1), (10, 10));
    index.apply(B, &stored(0..5));
    assert_eq!(index.sizes().0, 10, "one that never joined is not heard");
    index.limit(A, Tier::Disk, 3);
    index.apply(A, &KvEvent { tier: Tier::Disk as i32, ..stored(2000..3000) });
    assert_eq!((index.held(A), index.shape().1), ([10, 0, 3, 0], 13));
    index.apply(A, &KvEvent { tier: 77, ..stored(0..1) });
    index.apply(A, &KvEvent { removed: bytes(&hashes(0..5)), ..stored(20..40) });
    assert_eq!(index.held(A)[0], 10, "room again after a removal");
}

#[test]
fn a_popular_prefix_stays_one_run() {
    let mut index = KvIndex::default();
    (0..64).for_each(|worker| index.join(WorkerId(worker), 10_000));
    for worker in 0..64_u8 {
        let own = 1000 * (1 + u128::from(worker));
        let chain: Vec<BlockHash> = (0..256).chain(own..own + 8).map(BlockHash).collect();
        index.promise(WorkerId(worker), &chain);
        index.apply(WorkerId(worker), &KvEvent { stored: bytes(&chain), ..Default::default() });
        index.release(WorkerId(worker), &chain);
    }
    assert_eq!(index.shape(), (64, 256 + 64 * 8), "the first one's own blocks stand behind the prefix");
    assert!(index.hits(&hashes(0..256), (0..64).map(WorkerId))[..64].iter().all(|hit| *hit == 256));
    index.apply(A, &KvEvent { removed: bytes(&hashes(1000..1008)), ..Default::default() });
    assert_eq!((index.shape().0, index.sizes().0), (64, 256 + 63 * 8));
}

#[test]
fn blocks_that_come_one_by_one_join_their_parent() {
    let mut index = index();
    index.apply(A, &stored(0..10));
    for next in 10..100 {
        index.apply(A, &KvEvent { parent: BlockHash(next - 1).to_bytes().to_vec(), ..stored(next..next + 1) });
    }
    assert_eq!(index.shape(), (1, 100));
    for gone in (50..100).rev() {
        index.apply(A, &KvEvent { removed: bytes(&[BlockHash(gone)]), ..Default::default() });
    }
    assert_eq!((index.shape(), index.sizes()), ((1, 50), (50, 0)));
}

#[test]
fn blocks_told_without_their_parents_join_when_they_are_asked_for() {
    let mut index = index();
    (0..100).for_each(|hash| index.apply(A, &stored(hash..hash + 1)));
    assert_eq!(index.shape(), (100, 100));
    index.promise(A, &hashes(0..120));
    assert_eq!(index.hits_by_tier(&hashes(0..120), [A]).on_device(A), 100);
    index.release(A, &hashes(0..120));
    assert_eq!((index.shape(), index.sizes()), ((1, 100), (100, 0)));
}

#[test]
fn what_nobody_has_is_given_up_wherever_it_was() {
    let mut index = index();
    index.apply(A, &stored(0..1000));
    for gone in (0..1000).filter(|hash| hash % 100 != 7) {
        index.apply(A, &KvEvent { removed: bytes(&[BlockHash(gone)]), ..Default::default() });
    }
    let (runs, blocks) = index.shape();
    assert!(runs <= 10 && blocks <= 20, "{runs} runs, {blocks} blocks");
    for hash in 0..1000 {
        assert_eq!(index.hits(&hashes(hash..hash + 1), [A])[0], u32::from(hash % 100 == 7));
    }
}

#[test]
fn tiers_are_counted_by_how_far_away_they_are() {
    let mut index = index();
    let in_tier = |tier: Tier, range| KvEvent { tier: tier as i32, ..stored(range) };
    index.apply(A, &in_tier(Tier::Device, 0..4));
    index.promise(A, &hashes(0..6));
    index.apply(A, &in_tier(Tier::Host, 5..9));
    index.apply(A, &in_tier(Tier::Remote, 0..20));
    index.apply(B, &in_tier(Tier::Disk, 0..12));
    let hits = index.hits_by_tier(&hashes(0..30), [A, B]);
    let by_tier = |worker| TIERS.map(|tier| hits.within(worker, tier));
    assert_eq!((hits.on_device(A), by_tier(A)), (4, [6, 9, 9, 20]));
    assert_eq!((hits.on_device(B), by_tier(B), hits.any(B)), (0, [0, 0, 12, 12], 12));
    index.apply(A, &KvEvent { cleared: true, tier: Tier::Remote as i32, ..Default::default() });
    assert_eq!(index.hits(&hashes(0..30), [A])[0], 9, "other tiers stay");
}

/// Three chains that fork off each other, and a single hash: honest workers hold parts of these.
fn chain(which: usize) -> Vec<BlockHash> {
    match which {
        0 => hashes(0..24),
        1 => (0..8).chain(100..112).map(BlockHash).collect(),
        2 => (0..8).chain(100..104).chain(200..210).map(BlockHash).collect(),
        _ => hashes(300..301),
    }
}

#[derive(Clone, Debug)]
enum Op {
    Store { worker: u8, tier: usize, chain: usize, from: usize, to: usize, told: bool },
    Remove { worker: u8, tier: usize, chain: usize, from: usize, to: usize, backwards: bool },
    Scatter { worker: u8, tier: usize, hashes: Vec<u16>, store: bool },
    Clear { worker: u8, tier: usize },
    Promise { worker: u8, chain: usize, to: usize },
    Release { which: usize },
    Leave { worker: u8 },
}

fn op() -> impl Strategy<Value = Op> {
    let (worker, tier, chain) = (0..3_u8, 0..4_usize, 0..4_usize);
    let part = (worker.clone(), tier.clone(), chain.clone(), 0..24_usize, 0..24_usize, any::<bool>());
    prop_oneof![
        6 => part.clone().prop_map(|(worker, tier, chain, from, to, told)| Op::Store { worker, tier, chain, from, to, told }),
        4 => part.prop_map(|(worker, tier, chain, from, to, backwards)| Op::Remove { worker, tier, chain, from, to, backwards }),
        2 => (worker.clone(), tier.clone(), prop::collection::vec(0..220_u16, 0..12), any::<bool>())
            .prop_map(|(worker, tier, hashes, store)| Op::Scatter { worker, tier, hashes, store }),
        1 => (worker.clone(), tier).prop_map(|(worker, tier)| Op::Clear { worker, tier }),
        4 => (worker.clone(), chain, 0..24_usize).prop_map(|(worker, chain, to)| Op::Promise { worker, chain, to }),
        3 => (0..8_usize).prop_map(|which| Op::Release { which }),
        1 => worker.prop_map(|worker| Op::Leave { worker }),
    ]
}

const ROOM: usize = 30;

/// The index under test, and flat ones: one per tier, and one for promises.
struct Pair {
    index: KvIndex,
    flat: Vec<FlatIndex>,
    promises: Vec<(u8, Vec<BlockHash>)>,
}

impl Pair {
    fn new() -> Self {
        let mut pair = Self {
            index: KvIndex::default(),
            flat: (0..5).map(|_| FlatIndex::default()).collect(),
            promises: Vec::new(),
        };
        (0..3).for_each(|worker| pair.join(WorkerId(worker)));
        pair
    }

    fn join(&mut self, worker: WorkerId) {
        self.index.join(worker, ROOM);
        TIERS.iter().for_each(|tier| self.index.limit(worker, *tier, ROOM));
        self.flat.iter_mut().for_each(|flat| flat.join(worker, ROOM));
    }

    fn event(&mut self, worker: u8, tier: usize, event: &KvEvent) {
        self.index.apply(WorkerId(worker), &KvEvent { tier: tier as i32, ..event.clone() });
        self.flat[tier].apply(WorkerId(worker), event);
    }

    fn apply(&mut self, op: Op) {
        let part = |which, from: usize, to: usize| -> Vec<BlockHash> {
            chain(which).into_iter().take(from.max(to)).skip(from.min(to)).collect()
        };
        match op {
            Op::Store { worker, tier, chain: which, from, to, told } => {
                let before = from.min(to).checked_sub(1).and_then(|at| chain(which).get(at).copied());
                let parent = before.filter(|_| told).map(|hash| hash.to_bytes().to_vec()).unwrap_or_default();
                self.event(
                    worker,
                    tier,
                    &KvEvent { stored: bytes(&part(which, from, to)), parent, ..Default::default() },
                );
            }
            Op::Remove { worker, tier, chain, from, to, backwards } => {
                let mut gone = part(chain, from, to);
                if backwards {
                    gone.reverse();
                }
                self.event(worker, tier, &KvEvent { removed: bytes(&gone), ..Default::default() });
            }
            Op::Scatter { worker, tier, hashes, store } => {
                let hashes: Vec<BlockHash> = hashes.into_iter().map(|hash| BlockHash(hash.into())).collect();
                let (stored, removed) = if store { (bytes(&hashes), vec![]) } else { (vec![], bytes(&hashes)) };
                self.event(worker, tier, &KvEvent { stored, removed, ..Default::default() });
            }
            Op::Clear { worker, tier } => self.event(worker, tier, &KvEvent { cleared: true, ..Default::default() }),
            Op::Promise { worker, chain, to } => {
                let hashes = part(chain, 0, to);
                self.index.promise(WorkerId(worker), &hashes);
                self.flat[4].promise(WorkerId(worker), &hashes);
                self.promises.push((worker, hashes));
            }
            Op::Release { which } if which < self.promises.len() => {
                let (worker, hashes) = self.promises.swap_remove(which);
                self.index.release(WorkerId(worker), &hashes);
                self.flat[4].release(WorkerId(worker), &hashes);
            }
            Op::Release { .. } => {}
            Op::Leave { worker } => {
                self.index.leave(WorkerId(worker));
                self.flat.iter_mut().for_each(|flat| flat.leave(WorkerId(worker)));
                self.promises.retain(|(other, _)| *other != worker);
                self.join(WorkerId(worker));
            }
        }
    }

    /// Leading blocks held in the first `tiers` tiers, with promises if wanted.
    fn depth(&self, worker: u8, chain: &[BlockHash], tiers: usize, promised: bool) -> u32 {
        let layers = self.flat[..tiers].iter().chain(promised.then_some(&self.flat[4]));
        let layers: Vec<&FlatIndex> = layers.collect();
        let has = |hash: &BlockHash| {
            layers.iter().any(|flat| flat.hits(&[*hash], [WorkerId(worker)])[usize::from(worker)] == 1)
        };
        chain.iter().take_while(|hash| has(hash)).count() as u32
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let every = (0..220).map(|hash| vec![BlockHash(hash)]);
        for question in (0..4)
            .map(chain)
            .chain((0..4).map(|which| chain(which).split_off(3.min(chain(which).len() - 1))))
            .chain(every)
        {
            let hits = self.index.hits_by_tier(&question, (0..3).map(WorkerId));
            for worker in 0..3 {
                let id = WorkerId(worker);
                prop_assert_eq!(hits.on_device(id), self.depth(worker, &question, 1, false));
                for (tiers, tier) in (1..).zip(TIERS) {
                    prop_assert_eq!(
                        hits.within(id, tier),
                        self.depth(worker, &question, tiers, true),
                        "{:?} {:?}",
                        worker,
                        tier
                    );
                }
            }
        }
        let held = |worker: u8| {
            TIERS.map(|tier| {
                let all = (0..302).map(|hash| [BlockHash(hash)]);
                all.filter(|hash| self.depth_in(worker, hash, tier as usize)).count()
            })
        };
        for worker in 0..3 {
            prop_assert_eq!(self.index.held(WorkerId(worker)), held(worker));
        }
        let mut resident: HashMap<u128, bool> = HashMap::new();
        for hash in 0..302_u128 {
            let anywhere = (0..3).any(|worker| (0..4).any(|tier| self.depth_in(worker, &[BlockHash(hash)], tier)));
            resident.insert(hash, anywhere);
        }
        let distinct = resident.values().filter(|held| **held).count();
        prop_assert_eq!(self.index.sizes(), (distinct, self.flat[4].sizes().1));
        Ok(())
    }

    fn depth_in(&self, worker: u8, hash: &[BlockHash], tier: usize) -> bool {
        self.flat[tier].hits(hash, [WorkerId(worker)])[usize::from(worker)] == 1
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn runs_and_flat_maps_agree(ops in prop::collection::vec(op(), 0..60)) {
        let mut pair = Pair::new();
        for op in ops {
            pair.apply(op);
        }
        pair.check()?;
        // Workers that left leave nothing behind.
        for (worker, hashes) in std::mem::take(&mut pair.promises) {
            pair.index.release(WorkerId(worker), &hashes);
        }
        (0..3).for_each(|worker| pair.index.leave(WorkerId(worker)));
        prop_assert_eq!((pair.index.sizes(), pair.index.shape()), ((0, 0), (0, 0)));
    }
}
