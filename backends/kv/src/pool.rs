//! Block pool: pages, the index from block hash to page, references, eviction.
//!
//! Everything is O(1) per block. A sequence holds pages by `share` (read) or `allocate` (write) and lets go of each by
//! `release`; it releases its last block first (see [`crate::eviction`]). A block that is loaded from elsewhere becomes idle
//! at once (`adopt`).

use crate::PageId;
use crate::block::{Block, Effect};
use crate::events::EventLog;
use crate::eviction::EvictionQueue;
use penstock_proto::BlockHash;
use penstock_proto::frames::{KvEvent, Tier};
use std::collections::HashMap;

/// Share of the pages that idle, reused blocks may hold against others; measured in `tests/all/hit_rate.rs`.
const ACTIVE_SHARE: f64 = 0.25;

/// Longest readable run of a prefix's blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Pages of the blocks, in order.
    pub pages: Vec<PageId>,
    /// Number of idle pages among them: sharing takes as many from [`BlockPool::available`].
    pub idle: usize,
}

/// Counters of a [`BlockPool`], summed since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Pages given to sequences to write.
    pub allocated: u64,
    /// Blocks that were sealed: written to their end and named by their hash.
    pub sealed: u64,
    /// Blocks that already existed under the same hash when sealed.
    pub duplicates: u64,
    /// Blocks of prompts that were found in the prefix cache and shared.
    pub hits: u64,
    /// Idle blocks evicted to make room for others.
    pub evicted: u64,
}

/// A block evicted from the device. Its bytes stay in the page until the page's new owner writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// Hash of the block before it in its chain; `None` for the first.
    pub parent: Option<BlockHash>,
    /// Hash that names the evicted block.
    pub hash: BlockHash,
    /// Page that still holds the block's bytes.
    pub page: PageId,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    block: Block,
    /// Hash of the block before it, while sealed; for chains in events.
    parent: Option<BlockHash>,
    /// True if the block has served a hit since it was sealed.
    reused: bool,
    /// Serial number of the seal: parents come before children.
    serial: u64,
}

/// KV blocks of one device: pages, prefix index, eviction queue, and the changes to report.
#[derive(Debug)]
pub struct BlockPool {
    slots: Vec<Slot>,
    index: HashMap<BlockHash, PageId>,
    free: Vec<PageId>,
    idle: EvictionQueue,
    events: EventLog,
    counters: Counters,
    /// Blocks evicted since they were last taken; `None` if evictions are not kept.
    evicted: Option<Vec<Evicted>>,
}

impl BlockPool {
    /// Creates a pool of `pages` free pages.
    ///
    /// # Panics
    /// If `pages` does not fit 32 bits.
    pub fn new(pages: usize) -> Self {
        Self::with_active_share(pages, ACTIVE_SHARE)
    }

    /// Creates a pool in which idle blocks that served a hit may keep `share` of the pages; 0 is plain least recently
    /// used.
    ///
    /// # Panics
    /// If `pages` does not fit 32 bits.
    pub fn with_active_share(pages: usize, share: f64) -> Self {
        let last = u32::try_from(pages).expect("page numbers have 32 bits");
        let slot = Slot { block: Block::Free, parent: None, reused: false, serial: 0 };
        Self {
            slots: vec![slot; pages],
            index: HashMap::with_capacity(pages),
            free: (0..last).rev().map(PageId).collect(),
            idle: EvictionQueue::new(pages, (pages as f64 * share) as usize),
            events: EventLog::default(),
            counters: Counters::default(),
            evicted: None,
        }
    }

    /// Starts to keep evicted blocks for [`Self::take_evicted`].
    pub fn keep_evicted(&mut self) {
        self.evicted.get_or_insert_default();
    }

    /// Takes the blocks evicted since [`Self::keep_evicted`], in order. Must be called before any page allocated since
    /// is written.
    pub fn take_evicted(&mut self) -> Vec<Evicted> {
        self.evicted.take().unwrap_or_default()
    }

    /// Number of pages in the pool, fixed when it was made.
    pub fn total(&self) -> usize {
        self.slots.len()
    }

    /// Pages that [`Self::allocate`] can give now: free ones and those of idle blocks.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks held only by the prefix cache, by no sequence: all of them can be evicted.
    pub fn cached(&self) -> usize {
        self.idle.len()
    }

    /// Counters summed since the pool was made.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// State of one page.
    ///
    /// # Panics
    /// If the page does not exist.
    pub fn block(&self, page: PageId) -> Block {
        self.slots[page.index()].block
    }

    /// Finds the longest prefix of `hashes` that can be read, without taking it. `hashes`: a chain in order.
    pub fn lookup(&self, hashes: impl IntoIterator<Item = BlockHash>) -> Lookup {
        let mut found = Lookup::default();
        for page in hashes.into_iter().map_while(|hash| self.index.get(&hash).copied()) {
            found.idle += usize::from(matches!(self.slots[page.index()].block, Block::Cached { .. }));
            found.pages.push(page);
        }
        found
    }

    /// Page of one block, if it can be read now; not taken.
    pub fn find(&self, hash: BlockHash) -> Option<PageId> {
        self.index.get(&hash).copied()
    }

    /// Marks the idle blocks of a chain as used soon: they become the last to be evicted, the first block last of all.
    pub fn touch(&mut self, chain: impl DoubleEndedIterator<Item = BlockHash>) {
        for page in chain.rev().filter_map(|hash| self.find(hash)).collect::<Vec<_>>() {
            let Slot { block, reused, .. } = self.slots[page.index()];
            if let Block::Cached { .. } = block {
                self.idle.remove(page);
                self.idle.push(page, reused);
            }
        }
    }

    /// Adds one reading sequence to these pages (from [`Self::lookup`], with no other call in between).
    ///
    /// # Panics
    /// If one of them is not sealed.
    pub fn share(&mut self, pages: &[PageId]) {
        for &page in pages {
            let slot = &mut self.slots[page.index()];
            slot.reused = true;
            if slot.block.share() == Effect::Busy {
                self.idle.remove(page);
            }
        }
        self.counters.hits += pages.len() as u64;
    }

    /// Takes a page to write; evicts an idle block if none is free. `None` when every page is in use.
    pub fn allocate(&mut self) -> Option<PageId> {
        let page = self.free.pop().or_else(|| self.evict())?;
        self.slots[page.index()].block.take();
        self.counters.allocated += 1;
        Some(page)
    }

    /// Seals a block that its writer has completed, and returns the page to read it from: usually `page`. If another
    /// sequence sealed the same block first, the result is that sequence's page, and `page` becomes free (equal hash
    /// and numerics: equal bits).
    ///
    /// `parent`: hash of the block before it. The caller holds the returned page in place of `page`.
    ///
    /// # Panics
    /// If `page` is not being written.
    pub fn seal(&mut self, page: PageId, parent: Option<BlockHash>, hash: BlockHash) -> PageId {
        if let Some(&twin) = self.index.get(&hash) {
            self.counters.duplicates += 1;
            self.release(page);
            if self.slots[twin.index()].block.share() == Effect::Busy {
                self.idle.remove(twin);
            }
            return twin;
        }
        self.counters.sealed += 1;
        let slot = &mut self.slots[page.index()];
        let effect = slot.block.seal(hash);
        debug_assert_eq!(effect, Effect::Store(hash));
        (slot.parent, slot.reused, slot.serial) = (parent, false, self.counters.sealed);
        self.index.insert(hash, page);
        self.events.stored(parent, hash);
        page
    }

    /// Removes one sequence from a page that it holds.
    ///
    /// # Panics
    /// If nobody holds it.
    pub fn release(&mut self, page: PageId) {
        let slot = &mut self.slots[page.index()];
        match slot.block.release() {
            Effect::Free => self.free.push(page),
            Effect::Idle => self.idle.push(page, slot.reused),
            _ => {}
        }
    }

    /// Seals a block that was loaded and leaves it idle: it is evicted just before its parent, whose other descendants were
    /// evicted or are older.
    ///
    /// `parent`: hash of the block before it.
    ///
    /// # Panics
    /// If `page` is not being written.
    pub fn adopt(&mut self, page: PageId, parent: Option<BlockHash>, hash: BlockHash) {
        let page = self.seal(page, parent, hash);
        let behind = parent.and_then(|parent| self.find(parent));
        let slot = &mut self.slots[page.index()];
        match (slot.block.release(), behind) {
            (Effect::Free, _) => self.free.push(page),
            (Effect::Idle, Some(parent)) if !slot.reused => self.idle.push_before(page, parent),
            (Effect::Idle, _) => self.idle.push(page, slot.reused),
            _ => {}
        }
    }

    /// Block that [`Self::allocate`] would evict now; `None` while a page is free, or if no block is idle.
    pub fn next_evicted(&self) -> Option<BlockHash> {
        let page = self.idle.next().filter(|_| self.free.is_empty())?;
        match self.slots[page.index()].block {
            Block::Cached { hash } => Some(hash),
            _ => None,
        }
    }

    /// Forgets every idle block (weights changed, operator asked). Blocks in use stay and are reported again.
    pub fn clear(&mut self) {
        let evicted = self.evicted.take();
        while let Some(page) = self.evict() {
            self.free.push(page);
        }
        self.evicted = evicted;
        self.events.cleared();
        for (parent, hash) in self.sealed() {
            self.events.stored(parent, hash);
        }
    }

    /// Evicts the next idle block; false if there is none.
    pub fn shrink(&mut self) -> bool {
        let page = self.evict();
        self.free.extend(page);
        page.is_some()
    }

    /// Takes the changes since the last call, for the router.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.events.take()
    }

    /// All readable blocks as events, for a router that starts anew: whole chains, whatever was computed between.
    pub fn snapshot(&self) -> Vec<KvEvent> {
        EventLog::whole(Tier::Device, &self.sealed())
    }

    /// All readable blocks, each with the hash of the block before it, in order of sealing.
    pub fn sealed(&self) -> Vec<(Option<BlockHash>, BlockHash)> {
        let mut pages: Vec<PageId> = self.index.values().copied().collect();
        pages.sort_unstable_by_key(|page| self.slots[page.index()].serial);
        let name = |page: PageId| match self.slots[page.index()] {
            Slot { block: Block::Shared { hash, .. } | Block::Cached { hash }, parent, .. } => (parent, hash),
            slot => panic!("{slot:?} is in the index"),
        };
        pages.into_iter().map(name).collect()
    }

    fn evict(&mut self) -> Option<PageId> {
        let page = self.idle.pop()?;
        if let Effect::Retract(hash) = self.slots[page.index()].block.evict() {
            self.index.remove(&hash);
            self.events.removed(hash);
            let parent = self.slots[page.index()].parent;
            if let Some(evicted) = &mut self.evicted {
                evicted.push(Evicted { parent, hash, page });
            }
        }
        self.counters.evicted += 1;
        Some(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: BlockHash = BlockHash(1);
    const B: BlockHash = BlockHash(2);

    #[test]
    fn a_released_prefix_is_found_again() {
        let mut pool = BlockPool::new(3);
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        assert_eq!(pool.lookup([A, B]).pages, []);
        assert_eq!((pool.seal(a, None, A), pool.seal(b, Some(A), B)), (a, b));
        pool.release(b);
        pool.release(a);
        let found = pool.lookup([A, B]);
        assert_eq!((found.pages.as_slice(), found.idle), ([a, b].as_slice(), 2));
        pool.share(&found.pages);
        assert_eq!((pool.available(), pool.lookup([A, B]).idle), (1, 0));
    }

    #[test]
    fn the_tail_is_evicted_before_the_head() {
        let mut pool = BlockPool::new(2);
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        pool.seal(a, None, A);
        pool.seal(b, Some(A), B);
        pool.release(b);
        pool.release(a);
        assert_eq!(pool.allocate(), Some(b));
        assert_eq!(pool.lookup([A, B]).pages, [a]);
    }

    #[test]
    fn two_writers_of_one_block_end_up_with_one_page() {
        let mut pool = BlockPool::new(2);
        let (one, two) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        assert_eq!(pool.allocate(), None);
        pool.seal(one, None, A);
        assert_eq!(pool.seal(two, None, A), one);
        assert_eq!((pool.block(one), pool.block(two)), (Block::Shared { hash: A, refs: 2 }, Block::Free));
        pool.release(one);
        pool.release(one);
        assert_eq!((pool.cached(), pool.available(), pool.counters().duplicates), (1, 2, 1));
    }

    #[test]
    fn clear_forgets_what_is_idle_and_retells_what_is_not() {
        let mut pool = BlockPool::new(2);
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        pool.seal(a, None, A);
        pool.seal(b, Some(A), B);
        pool.release(b);
        pool.clear();
        let events = pool.take_events();
        assert!(events[0].cleared);
        assert_eq!(events[1].stored, [A.to_bytes().to_vec()]);
        assert_eq!((pool.cached(), pool.available(), pool.snapshot()), (0, 1, events));
    }
}
