//! Comparison of eviction orders for a tier: a trace replayed, one request after another, through a device over a
//! tier.
//!
//! No times and no router: only the hit rate is compared. Least recently used, with a share of the slots protected for
//! blocks that served a load, is the real [`TierPool`]. The others were considered instead: each hit raises a block's
//! rank, by the time to compute it or by one, and each eviction ages the remaining blocks (greedy dual size frequency,
//! Cherkasova 1998).

use super::engine::{Sizes, Speed};
use super::trace::Trace;
use penstock_kv::tier::Link;
use penstock_kv::{BlockPool, Evicted, Placed, TierPool};
use penstock_proto::frames::Tier;
use penstock_proto::{BLOCK_TOKENS, BlockHash};
use std::collections::{BTreeSet, HashMap};
use std::fmt;

/// Eviction order of the tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// No tier at all, as the baseline of the comparison.
    None,
    /// Least recently used; blocks that served a load may keep this share against others.
    Recent(f64),
    /// The block with the fewest hits first, with aging.
    Hits,
    /// The lowest product of hits and seconds to compute, with aging.
    Value,
}

impl Order {
    /// All orders that are compared.
    pub const ALL: [Order; 7] = [
        Order::None,
        Order::Recent(0.0),
        Order::Recent(0.25),
        Order::Recent(0.5),
        Order::Recent(0.75),
        Order::Hits,
        Order::Value,
    ];
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("no tier"),
            Self::Recent(0.0) => f.write_str("least recently used"),
            Self::Recent(share) => write!(f, "the same, {share} protected"),
            Self::Hits => f.write_str("fewest hits, with aging"),
            Self::Value => f.write_str("fewest hits × seconds, with aging"),
        }
    }
}

/// Hit rates of the tier in one replay, as shares of blocks and of compute time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Found {
    /// Share of the wanted blocks that were found.
    pub blocks: f64,
    /// Share of the seconds to compute the wanted blocks that was saved.
    pub seconds: f64,
}

/// Replays `trace` through a device of `sizes` over a tier of `tier_tokens`.
pub fn replay(trace: &Trace, sizes: &Sizes, speed: &Speed, tier_tokens: usize, order: Order) -> Found {
    let pages = sizes.kv_tokens / BLOCK_TOKENS;
    let mut stack = Stack {
        device: BlockPool::with_active_share(pages, sizes.active_share),
        tier: Below::new(order, tier_tokens / BLOCK_TOKENS),
        places: vec![0; pages],
        cost: |block| speed.prefill_seconds(BLOCK_TOKENS, block * BLOCK_TOKENS),
    };
    let (mut wanted, mut found) = ((0.0, 0.0), (0.0, 0.0));
    for at in 0..trace.requests.len() {
        let hashes = trace.hashes(at);
        let here = stack.request(&hashes);
        for block in 0..hashes.len() {
            let seconds = (stack.cost)(block);
            wanted = (wanted.0 + 1.0, wanted.1 + seconds);
            if block < here {
                found = (found.0 + 1.0, found.1 + seconds);
            }
        }
    }
    let share = |part: f64, all: f64| if all > 0.0 { part / all } else { 0.0 };
    Found { blocks: share(found.0, wanted.0), seconds: share(found.1, wanted.1) }
}

/// A device whose evicted blocks go to a tier below it.
struct Stack<C> {
    device: BlockPool,
    tier: Below,
    /// Position in its chain of the block in each page.
    places: Vec<usize>,
    /// Seconds to compute a block, as a function of its position in the prompt.
    cost: C,
}

impl<C: Fn(usize) -> f64> Stack<C> {
    /// Runs one request; returns the number of its leading blocks that were found.
    fn request(&mut self, hashes: &[BlockHash]) -> usize {
        let mut held = Vec::with_capacity(hashes.len());
        let mut found = None;
        for (block, hash) in hashes.iter().enumerate() {
            if let Some(page) = self.device.find(*hash) {
                self.device.share(&[page]);
                held.push(page);
                continue;
            }
            if found.is_none() && !self.tier.read(*hash) {
                found = Some(block);
            }
            self.device.keep_evicted();
            let page = self.device.allocate();
            for Evicted { parent, hash, page } in self.device.take_evicted() {
                let seconds = (self.cost)(self.places[page.index()]);
                self.tier.put(Link { parent, hash }, seconds);
            }
            // A prompt larger than the device.
            let Some(page) = page else { break };
            let page = self.device.seal(page, block.checked_sub(1).map(|parent| hashes[parent]), *hash);
            self.places[page.index()] = block;
            held.push(page);
        }
        held.iter().rev().for_each(|page| self.device.release(*page));
        found.unwrap_or(hashes.len())
    }
}

/// The tier below the device, in one of the orders.
enum Below {
    Nothing,
    Plan(TierPool),
    Heap(Heap),
}

impl Below {
    fn new(order: Order, slots: usize) -> Self {
        match order {
            Order::None => Self::Nothing,
            Order::Recent(share) => Self::Plan(TierPool::with_active_share(Tier::Disk, slots, share)),
            Order::Hits | Order::Value => Self::Heap(Heap::new(slots, order == Order::Value)),
        }
    }

    /// Returns true if the tier has a block; marks it as read.
    fn read(&mut self, hash: BlockHash) -> bool {
        match self {
            Self::Nothing => false,
            Self::Plan(pool) => pool.load(hash).map(|slot| pool.loaded(slot)).is_some(),
            Self::Heap(heap) => heap.hit(hash),
        }
    }

    /// Stores a block that leaves the device and takes `seconds` to compute.
    fn put(&mut self, link: Link, seconds: f64) {
        match self {
            Self::Nothing => {}
            Self::Plan(pool) => {
                if let Placed::Slot { slot, .. } = pool.store(link) {
                    pool.stored(slot);
                }
            }
            Self::Heap(heap) => heap.put(link.hash, seconds),
        }
    }
}

#[derive(Clone, Copy)]
struct Entry {
    worth: f64,
    hits: f64,
    /// Key in the order: rank, as ordered bits, and a serial number.
    place: (u64, u64),
}

/// Blocks by rank; the lowest is evicted.
struct Heap {
    room: usize,
    by_value: bool,
    /// Rank of the last evicted block, which new blocks start from (aging).
    age: f64,
    serial: u64,
    entries: HashMap<BlockHash, Entry>,
    order: BTreeSet<((u64, u64), u128)>,
}

impl Heap {
    fn new(room: usize, by_value: bool) -> Self {
        Self { room, by_value, age: 0.0, serial: 0, entries: HashMap::new(), order: BTreeSet::new() }
    }

    fn hit(&mut self, hash: BlockHash) -> bool {
        let Some(Entry { worth, hits, place }) = self.entries.get(&hash).copied() else { return false };
        self.order.remove(&(place, hash.0));
        self.enter(hash, worth, hits + 1.0);
        true
    }

    fn put(&mut self, hash: BlockHash, seconds: f64) {
        if self.room == 0 || self.entries.contains_key(&hash) {
            return;
        }
        if self.entries.len() == self.room
            && let Some(((rank, _), last)) = self.order.pop_first()
        {
            self.entries.remove(&BlockHash(last));
            self.age = f64::from_bits(rank);
        }
        self.enter(hash, if self.by_value { seconds } else { 1.0 }, 1.0);
    }

    fn enter(&mut self, hash: BlockHash, worth: f64, hits: f64) {
        self.serial += 1;
        // Never negative, so the order of the bits is that of the numbers.
        let place = ((self.age + worth * hits).to_bits(), self.serial);
        self.order.insert((place, hash.0));
        self.entries.insert(hash, Entry { worth, hits, place });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_goes_and_age_lets_newcomers_stay() {
        let mut heap = Heap::new(2, false);
        heap.put(BlockHash(1), 9.0);
        assert!(heap.hit(BlockHash(1)) && heap.hit(BlockHash(1)));
        for n in 2..5 {
            heap.put(BlockHash(n), 9.0);
            assert!(heap.entries.contains_key(&BlockHash(1)), "{n} is younger and has no hits");
        }
        (5..9).for_each(|n| heap.put(BlockHash(n), 9.0));
        assert!(!heap.hit(BlockHash(1)), "three hits are forgotten some day");
        assert!(heap.hit(BlockHash(8)));
        assert_eq!((heap.entries.len(), heap.order.len()), (2, 2));
    }

    #[test]
    fn by_value_what_is_cheap_to_compute_goes() {
        let mut heap = Heap::new(2, true);
        heap.put(BlockHash(1), 3.0);
        heap.put(BlockHash(2), 1.0);
        heap.put(BlockHash(3), 2.0);
        assert!(heap.hit(BlockHash(1)) && !heap.hit(BlockHash(2)) && heap.hit(BlockHash(3)));
    }
}
