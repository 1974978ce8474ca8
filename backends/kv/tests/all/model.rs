//! Pool against a naive model: references, index and events stay correct in any order of legal calls.

use penstock_kv::{Block, BlockPool, PageId};
use penstock_proto::BlockHash;
use penstock_proto::frames::KvEvent;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Operation of a sequence; numbers are taken modulo the number of existing things.
#[derive(Clone, Debug)]
enum Op {
    /// A new sequence along chain `chain`, of at most `blocks` blocks: reads existing ones, allocates the rest.
    Start { chain: u8, blocks: u8 },
    /// A sequence completes its next block.
    Seal(u8),
    /// A sequence needs one block more.
    Grow(u8),
    /// A sequence ends and releases its pages.
    Stop(u8),
    /// The block after the readable ones of a chain is loaded, unless it would evict the one before it.
    Load(u8),
    /// The prefix cache is cleared of all idle blocks.
    Clear,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (0..3_u8, 1..6_u8).prop_map(|(chain, blocks)| Op::Start { chain, blocks }),
        6 => any::<u8>().prop_map(Op::Seal),
        3 => any::<u8>().prop_map(Op::Grow),
        3 => any::<u8>().prop_map(Op::Stop),
        6 => (0..3_u8).prop_map(Op::Load),
        1 => Just(Op::Clear),
    ];
    prop::collection::vec(op, 1..120)
}

/// Chains share their first two blocks.
fn hash(chain: u8, block: usize) -> BlockHash {
    let chain = if block < 2 { 0 } else { u128::from(chain) };
    BlockHash(chain * 1000 + block as u128 + 1)
}

struct Sequence {
    chain: u8,
    pages: Vec<PageId>,
    sealed: usize,
}

#[derive(Default)]
struct Router(BTreeSet<Vec<u8>>);

impl Router {
    fn apply(&mut self, events: &[KvEvent]) {
        for event in events {
            if event.cleared {
                self.0.clear();
            }
            for stored in &event.stored {
                assert!(self.0.insert(stored.clone()), "stored twice");
            }
            for removed in &event.removed {
                assert!(self.0.remove(removed), "removed what was not there");
            }
        }
    }
}

fn apply(pool: &mut BlockPool, sequences: &mut Vec<Sequence>, op: &Op) {
    let at = |n: u8| (!sequences.is_empty()).then(|| n as usize % sequences.len());
    match *op {
        Op::Start { chain, blocks } => {
            let found = pool.lookup((0..usize::from(blocks)).map(|block| hash(chain, block)));
            if pool.available() - found.idle < usize::from(blocks) - found.pages.len() {
                return;
            }
            pool.share(&found.pages);
            let sealed = found.pages.len();
            let mut pages = found.pages;
            while pages.len() < usize::from(blocks) {
                pages.push(pool.allocate().expect("available said so"));
            }
            sequences.push(Sequence { chain, pages, sealed });
        }
        Op::Seal(n) => {
            let Some(sequence) = at(n).map(|n| &mut sequences[n]) else { return };
            let block = sequence.sealed;
            if block < sequence.pages.len() {
                let parent = block.checked_sub(1).map(|block| hash(sequence.chain, block));
                sequence.pages[block] = pool.seal(sequence.pages[block], parent, hash(sequence.chain, block));
                sequence.sealed += 1;
            }
        }
        Op::Grow(n) => {
            let Some(sequence) = at(n).map(|n| &mut sequences[n]) else { return };
            let available = pool.available();
            match pool.allocate() {
                Some(page) => sequence.pages.push(page),
                None => assert_eq!(available, 0),
            }
        }
        Op::Stop(n) => {
            let Some(sequence) = at(n).map(|n| sequences.swap_remove(n)) else { return };
            sequence.pages.iter().rev().for_each(|&page| pool.release(page));
        }
        Op::Load(chain) => {
            let block = pool.lookup((0..40).map(|block| hash(chain, block))).pages.len();
            let parent = block.checked_sub(1).map(|block| hash(chain, block));
            if block == 40 || parent.is_some() && pool.next_evicted() == parent {
                return;
            }
            let (next, cached) = (pool.next_evicted(), pool.cached());
            let Some(page) = pool.allocate() else { return };
            assert_eq!(
                (pool.cached() + usize::from(next.is_some()), next.and_then(|hash| pool.find(hash))),
                (cached, None)
            );
            pool.adopt(page, parent, hash(chain, block));
        }
        Op::Clear => pool.clear(),
    }
}

/// Counts holders of each page the slow way and compares.
fn check(pool: &BlockPool, sequences: &[Sequence], router: &Router) {
    let mut readers: BTreeMap<PageId, (u32, BlockHash)> = BTreeMap::new();
    let mut writers: BTreeSet<PageId> = BTreeSet::new();
    for sequence in sequences {
        for (block, &page) in sequence.pages.iter().enumerate() {
            if block < sequence.sealed {
                let entry = readers.entry(page).or_insert((0, hash(sequence.chain, block)));
                assert_eq!(entry.1, hash(sequence.chain, block), "one page, two blocks");
                entry.0 += 1;
            } else {
                assert!(writers.insert(page), "two writers of {page:?}");
            }
        }
    }
    let (mut free, mut cached, mut named) = (0, 0, BTreeSet::new());
    for page in (0..pool.total() as u32).map(PageId) {
        match pool.block(page) {
            Block::Free => free += 1,
            Block::Writing => assert!(writers.remove(&page), "{page:?} has no writer"),
            Block::Shared { hash, refs } => {
                assert_eq!(readers.remove(&page), Some((refs, hash)));
                assert!(named.insert(hash.to_bytes().to_vec()));
            }
            Block::Cached { hash } => {
                cached += 1;
                assert!(named.insert(hash.to_bytes().to_vec()));
            }
        }
    }
    assert!(writers.is_empty() && readers.is_empty());
    assert_eq!((pool.cached(), pool.available()), (cached, free + cached));
    assert_eq!(router.0, named, "the router's view is the pool's");
    // Chains are whole: every readable block can be reached from its first block.
    for chain in 0..3 {
        let reach = pool.lookup((0..40).map(|block| hash(chain, block))).pages.len();
        for block in reach..40 {
            let name = hash(chain, block).to_bytes().to_vec();
            assert!(!named.contains(&name), "block {block} of chain {chain} outlived its parent");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_pool_is_the_naive_model(pages in 1..24_usize, ops in ops()) {
        let mut pool = BlockPool::new(pages);
        let (mut sequences, mut router) = (Vec::new(), Router::default());
        for op in &ops {
            apply(&mut pool, &mut sequences, op);
            router.apply(&pool.take_events());
            check(&pool, &sequences, &router);
        }
        let mut fresh = Router::default();
        fresh.apply(&pool.snapshot());
        prop_assert_eq!(fresh.0, router.0);
        for sequence in sequences {
            sequence.pages.iter().rev().for_each(|&page| pool.release(page));
        }
        prop_assert_eq!(pool.available(), pages);
    }
}
