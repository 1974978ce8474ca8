//! Blocks of one tier below the device: their slots and their eviction order.
//!
//! ```text
//! Free ──store──▶ Storing ──stored──▶ Held(loads) ──evict (no loads)──▶ Free
//!                    └──lost──▶ Free      └──lost──▶ Free, once nobody loads it
//! ```
//!
//! A block is demoted when it leaves the tier above, never when it is written there, so blocks that fit on the device
//! cost no I/O. A block that was loaded back stays here too: when it leaves the device again, [`TierPool::store`]
//! answers [`Placed::Known`] and nothing is written. Only a block whose bytes are complete (`Held`) is found by a
//! load, and a slot is given to another block only while nobody reads or writes it. Eviction is that of the device
//! ([`EvictionQueue`]): blocks that served a load are protected against those that never did.
//!
//! The caller moves the bytes and reports the outcome. Every operation is O(1); a slot costs about 90 bytes of memory
//! here.

use crate::PageId;
use crate::events::EventLog;
use crate::eviction::EvictionQueue;
use penstock_proto::BlockHash;
use penstock_proto::frames::{KvEvent, Tier};
use std::collections::HashMap;

/// Share of the slots that blocks which served a load may keep against others. The tier sees only blocks that have
/// been on the device for a while. Replayed traces: docs/benchmarks.md.
const ACTIVE_SHARE: f64 = 0.25;

/// Number of a slot in a tier, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

impl SlotId {
    /// Index into a table with one entry per slot.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A block and the block before it in its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Hash of the block before it in its chain; `None` if unknown or the first.
    pub parent: Option<BlockHash>,
    /// Hash that names the block itself.
    pub hash: BlockHash,
}

/// Placement of a block in the tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// The block is here already, or being stored: nothing is written.
    Known,
    /// Every slot is being read or written.
    Full,
    /// Slot to write. Its former block, if any, is no longer found, but its bytes remain until overwritten.
    Slot {
        /// Slot that the block is to be written to.
        slot: SlotId,
        /// Block that was evicted to free the slot; `None` if the slot was empty.
        evicted: Option<Link>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Storing,
    Held {
        loads: u32,
    },
    /// Block that is corrupt or belongs to a closed tier while jobs still use its slot; freed after the last of them.
    Doomed {
        loads: u32,
    },
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    link: Link,
    /// True if the block has served a load.
    reused: bool,
    /// Serial number of the store.
    serial: u64,
}

/// KV blocks of one tier below the device: which slot holds which block, without the bytes.
#[derive(Debug)]
pub struct TierPool {
    tier: Tier,
    slots: Vec<Slot>,
    index: HashMap<BlockHash, SlotId>,
    /// Free slots, lowest last: a file grows only as far as it is used.
    free: Vec<SlotId>,
    idle: EvictionQueue,
    events: EventLog,
    total: usize,
    serial: u64,
}

impl TierPool {
    /// Creates an empty tier of `slots` slots.
    ///
    /// # Panics
    /// If `slots` does not fit 32 bits.
    pub fn new(tier: Tier, slots: usize) -> Self {
        Self::with_active_share(tier, slots, ACTIVE_SHARE)
    }

    /// Creates a tier in which blocks that served a load may keep `share` of the slots; 0 is plain least recently
    /// used.
    ///
    /// # Panics
    /// If `slots` does not fit 32 bits.
    pub fn with_active_share(tier: Tier, slots: usize, share: f64) -> Self {
        let last = u32::try_from(slots).expect("slot numbers have 32 bits");
        let link = Link { parent: None, hash: BlockHash(0) };
        Self {
            tier,
            slots: vec![Slot { state: State::Free, link, reused: false, serial: 0 }; slots],
            index: HashMap::new(),
            free: (0..last).rev().map(SlotId).collect(),
            idle: EvictionQueue::new(slots, (slots as f64 * share) as usize),
            events: EventLog::of(tier),
            total: slots,
            serial: 0,
        }
    }

    /// Tier that the pool keeps the slots of.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Capacity of the tier in blocks; smaller after the medium turned out to be full.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Slots that hold a block, or are being written.
    pub fn used(&self) -> usize {
        self.index.len()
    }

    /// Returns true if the tier holds the block or is storing it.
    pub fn knows(&self, hash: BlockHash) -> bool {
        self.index.contains_key(&hash)
    }

    /// Returns true if the block can be loaded now.
    pub fn holds(&self, hash: BlockHash) -> bool {
        self.index.get(&hash).is_some_and(|slot| matches!(self.slots[slot.index()].state, State::Held { .. }))
    }

    /// Takes over blocks found in slots at the start, the least valuable first. Returns their number: a slot that is
    /// not free and a block that is known are left out.
    pub fn adopt(&mut self, found: impl IntoIterator<Item = (SlotId, Link)>) -> usize {
        let before = self.used();
        for (slot, link) in found {
            let is_free = slot.index() < self.total && self.slots[slot.index()].state == State::Free;
            if is_free && !self.knows(link.hash) {
                self.claim(slot, link);
                self.stored(slot);
            }
        }
        let slots = &self.slots;
        self.free.retain(|slot| slots[slot.index()].state == State::Free);
        self.used() - before
    }

    /// Finds a place for a block that leaves the tier above. The caller writes it, then calls [`Self::stored`] or
    /// [`Self::lost`].
    pub fn store(&mut self, link: Link) -> Placed {
        if let Some(&slot) = self.index.get(&link.hash) {
            self.touch(slot);
            return Placed::Known;
        }
        if let Some(slot) = self.free.pop() {
            self.claim(slot, link);
            return Placed::Slot { slot, evicted: None };
        }
        let Some(page) = self.idle.pop() else { return Placed::Full };
        let slot = SlotId(page.0);
        let evicted = self.slots[slot.index()].link;
        self.index.remove(&evicted.hash);
        self.events.removed(evicted.hash);
        self.claim(slot, link);
        Placed::Slot { slot, evicted: Some(evicted) }
    }

    fn claim(&mut self, slot: SlotId, link: Link) {
        self.serial += 1;
        self.slots[slot.index()] = Slot { state: State::Storing, link, reused: false, serial: self.serial };
        self.index.insert(link.hash, slot);
    }

    /// Marks the slot as written: its block can be loaded from now on.
    ///
    /// # Panics
    /// If nothing is being stored there.
    pub fn stored(&mut self, slot: SlotId) {
        let Slot { state, link, .. } = &mut self.slots[slot.index()];
        if let State::Doomed { .. } = state {
            // The tier was closed in the meantime.
            return self.release(slot);
        }
        assert_eq!(*state, State::Storing, "stored in {slot:?}");
        *state = State::Held { loads: 0 };
        self.events.stored(link.parent, link.hash);
        self.idle.push(PageId(slot.0), false);
    }

    /// Starts a load: the block's slot stays as it is until [`Self::loaded`] or [`Self::lost`].
    pub fn load(&mut self, hash: BlockHash) -> Option<SlotId> {
        let slot = *self.index.get(&hash)?;
        let State::Held { loads } = &mut self.slots[slot.index()].state else { return None };
        *loads += 1;
        if *loads == 1 {
            self.idle.remove(PageId(slot.0));
        }
        Some(slot)
    }

    /// Ends a load that read the right bytes.
    ///
    /// # Panics
    /// If it was not being read.
    pub fn loaded(&mut self, slot: SlotId) {
        self.slots[slot.index()].reused = true;
        self.release(slot);
    }

    /// Ends a load that failed, though the block may still be there.
    ///
    /// # Panics
    /// If it was not being read.
    pub fn unread(&mut self, slot: SlotId) {
        self.release(slot);
    }

    fn release(&mut self, slot: SlotId) {
        let Slot { state, reused, .. } = &mut self.slots[slot.index()];
        match state {
            State::Held { loads: loads @ 1 } => {
                *loads = 0;
                self.idle.push(PageId(slot.0), *reused);
            }
            State::Doomed { loads: 1 } => self.free(slot),
            State::Held { loads: loads @ 2.. } | State::Doomed { loads: loads @ 2.. } => *loads -= 1,
            state => panic!("{slot:?} is {state:?}, not being read"),
        }
    }

    /// Forgets the block of a slot whose bytes are wrong or could not be written. Ends the caller's store or load.
    ///
    /// # Panics
    /// If it was neither being written nor read.
    pub fn lost(&mut self, slot: SlotId) {
        let Slot { state, link, .. } = self.slots[slot.index()];
        match state {
            State::Storing => {
                self.index.remove(&link.hash);
                self.free(slot);
            }
            State::Held { loads: loads @ 1.. } => {
                self.index.remove(&link.hash);
                self.events.removed(link.hash);
                self.slots[slot.index()].state = State::Doomed { loads };
                self.release(slot);
            }
            State::Doomed { .. } => self.release(slot),
            state => panic!("lost {slot:?}, which is {state:?}"),
        }
    }

    fn free(&mut self, slot: SlotId) {
        self.slots[slot.index()].state = State::Free;
        if slot.index() < self.total {
            self.free.push(slot);
        }
    }

    /// Takes out the block that would be evicted next; its bytes stay in the slot until it is used again.
    pub fn shrink(&mut self) -> Option<(SlotId, Link)> {
        let slot = SlotId(self.idle.pop()?.0);
        let link = self.slots[slot.index()].link;
        self.index.remove(&link.hash);
        self.events.removed(link.hash);
        self.free(slot);
        Some((slot, link))
    }

    /// Lowers the capacity to `slots` (a full disk): higher free slots are not used any more.
    pub fn cap(&mut self, slots: usize) {
        self.total = self.total.min(slots);
        self.free.retain(|slot| slot.index() < slots);
    }

    /// Closes the tier: nothing is found or stored any more. Reads and writes in progress must still be reported.
    pub fn close(&mut self) {
        self.cap(0);
        while let Some(page) = self.idle.pop() {
            self.slots[page.index()].state = State::Free;
        }
        for slot in self.index.drain().map(|(_, slot)| slot) {
            let state = &mut self.slots[slot.index()].state;
            match *state {
                State::Held { loads } => *state = State::Doomed { loads },
                // The outcome of the store is irrelevant now.
                State::Storing => *state = State::Doomed { loads: 1 },
                State::Free | State::Doomed { .. } => {}
            }
        }
        self.events.cleared();
    }

    /// Returns true if [`Self::close`] was called, or there never was room.
    pub fn is_closed(&self) -> bool {
        self.total == 0
    }

    /// Makes the block the last to be evicted, if it is idle.
    fn touch(&mut self, slot: SlotId) {
        if let State::Held { loads: 0 } = self.slots[slot.index()].state {
            self.idle.remove(PageId(slot.0));
            self.idle.push(PageId(slot.0), self.slots[slot.index()].reused);
        }
    }

    /// Takes the changes since the last call, for the router.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.events.take()
    }

    /// All loadable blocks as events, for a router that starts anew: whole chains, though a chain leaves the tier above
    /// from its end.
    pub fn snapshot(&self) -> Vec<KvEvent> {
        let mut held: Vec<&Slot> = self.slots.iter().filter(|slot| matches!(slot.state, State::Held { .. })).collect();
        held.sort_unstable_by_key(|slot| slot.serial);
        let blocks: Vec<_> = held.iter().map(|slot| (slot.link.parent, slot.link.hash)).collect();
        EventLog::whole(self.tier, &blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(n: u128) -> Link {
        Link { parent: n.checked_sub(1).filter(|n| *n > 0).map(BlockHash), hash: BlockHash(n) }
    }

    fn put(pool: &mut TierPool, n: u128) -> Placed {
        let Link { parent, .. } = link(n);
        put_as(pool, parent.map(|parent| parent.0), n)
    }

    fn put_as(pool: &mut TierPool, parent: Option<u128>, n: u128) -> Placed {
        let placed = pool.store(Link { parent: parent.map(BlockHash), hash: BlockHash(n) });
        if let Placed::Slot { slot, .. } = placed {
            pool.stored(slot);
        }
        placed
    }

    #[test]
    fn what_came_back_is_not_written_again_and_outlives_what_did_not() {
        let mut pool = TierPool::new(Tier::Disk, 2);
        assert_eq!(put(&mut pool, 1), Placed::Slot { slot: SlotId(0), evicted: None });
        put(&mut pool, 2);
        let slot = pool.load(BlockHash(1)).expect("it is held");
        pool.loaded(slot);
        assert_eq!(pool.store(link(1)), Placed::Known);
        assert_eq!(put(&mut pool, 3), Placed::Slot { slot: SlotId(1), evicted: Some(link(2)) });
        let told = pool.take_events();
        assert!(told.iter().all(|event| event.tier == Tier::Disk as i32));
        assert_eq!(pool.snapshot()[1].stored, [BlockHash(1).to_bytes().to_vec()]);
    }

    #[test]
    fn chains_that_came_end_first_are_told_whole() {
        let mut pool = TierPool::new(Tier::Host, 1000);
        for chain in 0..10_u128 {
            // The tail of a chain leaves the tier above before its head.
            for n in (1..=100).rev() {
                put_as(&mut pool, (n > 1).then_some(chain * 1000 + n - 1), chain * 1000 + n);
            }
        }
        let told = pool.snapshot();
        assert_eq!((told.len(), told[0].cleared), (11, true), "one event for each chain");
        for (chain, event) in told[1..].iter().enumerate() {
            let expected: Vec<_> = (1..=100).map(|n| BlockHash(chain as u128 * 1000 + n).to_bytes().to_vec()).collect();
            assert_eq!((&event.stored, event.parent.len()), (&expected, 0));
        }
    }

    #[test]
    fn a_block_is_not_found_before_it_is_written_nor_evicted_while_it_is_read() {
        let mut pool = TierPool::new(Tier::Disk, 1);
        let Placed::Slot { slot, .. } = pool.store(link(1)) else { panic!("there is room") };
        assert_eq!((pool.load(BlockHash(1)), pool.store(link(1))), (None, Placed::Known));
        assert_eq!(pool.store(link(2)), Placed::Full);
        pool.stored(slot);
        assert_eq!(pool.load(BlockHash(1)), Some(slot));
        assert_eq!(pool.store(link(2)), Placed::Full);
        pool.lost(slot);
        assert_eq!((pool.used(), pool.load(BlockHash(1))), (0, None));
        assert_eq!(pool.store(link(2)), Placed::Slot { slot, evicted: None });
    }

    #[test]
    fn a_closed_tier_takes_late_outcomes_and_nothing_else() {
        let mut pool = TierPool::new(Tier::Disk, 3);
        put(&mut pool, 1);
        let Placed::Slot { slot: writing, .. } = pool.store(link(2)) else { panic!("there is room") };
        let reading = pool.load(BlockHash(1)).expect("held");
        pool.close();
        assert!(pool.is_closed() && pool.take_events().last().is_some_and(|event| event.cleared));
        assert_eq!((pool.store(link(3)), pool.used(), pool.holds(BlockHash(1))), (Placed::Full, 0, false));
        pool.lost(writing);
        pool.lost(reading);
    }

    #[test]
    fn a_smaller_medium_keeps_what_it_has() {
        let mut pool = TierPool::new(Tier::Disk, 4);
        put(&mut pool, 1);
        pool.cap(2);
        put(&mut pool, 2);
        assert_eq!(put(&mut pool, 3), Placed::Slot { slot: SlotId(0), evicted: Some(link(1)) });
        assert_eq!(pool.total(), 2);
    }

    #[test]
    fn adopted_slots_are_not_given_out() {
        let mut pool = TierPool::new(Tier::Disk, 3);
        let found = [(1, 5), (1, 6), (2, 5), (9, 7)].map(|(slot, n)| (SlotId(slot), link(n)));
        assert_eq!(pool.adopt(found), 1);
        assert_eq!(put(&mut pool, 1), Placed::Slot { slot: SlotId(0), evicted: None });
        assert_eq!(put(&mut pool, 2), Placed::Slot { slot: SlotId(2), evicted: None });
        assert_eq!(put(&mut pool, 3), Placed::Slot { slot: SlotId(1), evicted: Some(link(5)) });
    }
}
