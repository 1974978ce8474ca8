//! Pages through memory that both ends map: the engine writes a page there, and only its slot number goes through the
//! socket.
//!
//! ```text
//! engine ── Sink ──→ Slot ── Stream: Page{slot, checksum} ──→ Memory::copy ──→ engine
//!             ↑                                                     │
//!             └──────── Lent::back ←──────── Taken{slots} ──────────┘
//! ```
//! The holder makes the memory and alone can write it; the asker copies a page out before it checks it
//! ([`penstock_shm`]). Slots are the credit: the engine finds no room while the asker has not returned any.

use super::link::Fault;
use bytes::Bytes;
use penstock_proto::transfer::{Page, Taken};
use penstock_shm::{Layout, Ring, Slot, View};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use tracing::debug;

/// Most slots of one transfer; as many pages as may wait for a socket.
const SLOTS_MAX: u32 = super::serve::PAGES_OUT_MAX as u32;

/// Most bytes of one transfer's slots together, 16 MiB.
const BYTES_MAX: usize = 16 << 20;

/// Time after which an asker that holds pages and returns none loses its place. As long as a page may take through a
/// socket.
pub(super) const TAKEN_DEADLINE: Duration = super::link::WRITE_DEADLINE;

/// Makes memory for pages of `page_bytes`, with its descriptor. `None` if it cannot be had, so that bytes go through
/// the socket.
pub(super) fn make(page_bytes: usize) -> Option<(Ring, OwnedFd, u32)> {
    let layout = Layout::within(SLOTS_MAX, page_bytes, BYTES_MAX)?;
    match Ring::create(layout) {
        Ok((ring, memory)) => Some((ring, memory, layout.slots())),
        Err(error) => {
            debug!(%error, "shared memory could not be created: KV pages go through the socket");
            None
        }
    }
}

/// Buffer with the bytes of an outgoing page: own memory, or a slot of the shared ring.
pub(super) enum Filled {
    Bytes(Vec<u8>),
    Slot(Slot),
}

impl Filled {
    /// Buffer for a page: a slot, if one is free, else memory of its own.
    pub(super) fn room(ring: Option<&Ring>, page_bytes: usize) -> Self {
        ring.and_then(Ring::take).map_or_else(|| Self::Bytes(vec![0; page_bytes]), Self::Slot)
    }

    /// Bytes of the page, for a socket.
    pub(super) fn into_bytes(self) -> Bytes {
        match self {
            Self::Bytes(bytes) => bytes.into(),
            Self::Slot(slot) => Bytes::copy_from_slice(&slot),
        }
    }
}

impl Deref for Filled {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Slot(slot) => slot,
        }
    }
}

impl DerefMut for Filled {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Slot(slot) => slot,
        }
    }
}

/// Slots that the asker has been told of and has not returned.
pub(super) struct Lent {
    slots: Vec<Slot>,
    /// Time of the last return, or of the first slot lent.
    since: Instant,
}

impl Lent {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), since: Instant::now() }
    }

    pub(super) fn lend(&mut self, slot: Slot) {
        if self.slots.is_empty() {
            self.since = Instant::now();
        }
        self.slots.push(slot);
    }

    /// Frees slots that the asker has returned; a slot that was never lent is an error.
    pub(super) fn back(&mut self, taken: &Taken) -> Result<(), Fault> {
        for number in &taken.slots {
            let at = self.slots.iter().position(|slot| slot.number() == *number).ok_or(Fault::Unexpected)?;
            self.slots.swap_remove(at);
            self.since = Instant::now();
        }
        Ok(())
    }

    /// Returns true if the asker has returned nothing for too long.
    pub(super) fn is_overdue(&self) -> bool {
        !self.slots.is_empty() && self.since.elapsed() >= TAKEN_DEADLINE
    }
}

/// Mapped memory on the asker's side.
pub(super) struct Memory {
    view: View,
    /// Slots whose pages were copied, and that were not returned so far.
    copied: Vec<u32>,
    /// Number of slots returned at once: the holder has the others meanwhile.
    batch: usize,
}

impl Memory {
    /// Maps received memory. `None` if it cannot be mapped, and is not used.
    pub(super) fn open(memory: &OwnedFd, slots: u32, page_bytes: usize) -> Option<Self> {
        let layout = Layout::new(slots, page_bytes).filter(|_| slots <= SLOTS_MAX)?;
        match View::open(memory.as_fd(), layout) {
            Ok(view) => Some(Self { view, copied: Vec::new(), batch: (slots as usize / 4).max(1) }),
            Err(error) => {
                debug!(%error, "shared memory of the peer could not be mapped: KV pages go through the socket");
                None
            }
        }
    }

    /// Completes a page with its bytes, copied out of its slot if it names one.
    pub(super) fn copy(&mut self, page: Page) -> Result<Page, Fault> {
        let Some(slot) = page.slot else { return Ok(page) };
        let bytes = self.view.read(slot).ok_or(Fault::BadPage)?;
        self.copied.push(slot);
        Ok(Page { bytes: bytes.into(), ..page })
    }

    /// Slots to return now, if a batch is complete.
    pub(super) fn taken(&mut self) -> Option<Taken> {
        (self.copied.len() >= self.batch).then(|| Taken { slots: std::mem::take(&mut self.copied) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(page_bytes: usize) -> (Ring, Memory) {
        let (ring, memory, slots) = make(page_bytes).expect("memory");
        (ring, Memory::open(&memory, slots, page_bytes).expect("sealed"))
    }

    #[test]
    fn a_page_comes_out_as_it_went_in_and_its_slot_comes_back() {
        let (ring, mut memory) = both(1000);
        let (mut lent, mut moved) = (Lent::new(), 0);
        for round in 0..200 {
            let Filled::Slot(mut slot) = Filled::room(Some(&ring), 1000) else { panic!("{round}: no slot is free") };
            slot.fill(round as u8);
            let page = Page::in_slot(round, 1, slot.number(), &slot);
            lent.lend(slot);
            let page = memory.copy(page).expect("its slot");
            assert!(page.is_whole() && page.bytes[..] == [round as u8; 1000]);
            if let Some(taken) = memory.taken() {
                moved += taken.slots.len();
                lent.back(&taken).expect("they were lent");
            }
        }
        assert_eq!(moved, 200);
        assert!(!lent.is_overdue());
    }

    #[test]
    fn a_slot_that_was_not_lent_is_not_taken_back() {
        let (ring, _memory) = both(64);
        let mut lent = Lent::new();
        let slot = ring.take().expect("free");
        let number = slot.number();
        lent.lend(slot);
        assert!(lent.back(&Taken { slots: vec![number, number] }).is_err(), "twice");
        assert!(lent.back(&Taken { slots: vec![u32::MAX] }).is_err());
        assert!(lent.back(&Taken::default()).is_ok());
    }

    #[test]
    fn a_slot_that_changes_after_it_was_named_is_noticed() {
        let (ring, mut memory) = both(256);
        let mut slot = ring.take().expect("free");
        slot.fill(1);
        let page = Page::in_slot(0, 0, slot.number(), &slot);
        slot[255] = 2;
        assert!(memory.copy(page.clone()).is_ok_and(|page| !page.is_whole()));
        assert!(memory.copy(Page { slot: Some(99), ..page }).is_err(), "no such slot");
    }

    #[test]
    fn memory_is_within_its_limit_and_no_more_is_believed() {
        let slots = |page_bytes| make(page_bytes).map(|(.., slots)| slots);
        assert_eq!([slots(128 << 10), slots(8 << 20), slots(0)], [Some(32), Some(2), None]);
        let (_, memory, slots) = make(64).expect("memory");
        assert!(Memory::open(&memory, slots + 1, 64).is_none(), "more slots than a transfer has");
        assert!(Memory::open(&memory, slots, 4096).is_none(), "larger than it is");
        assert!(Memory::open(&memory, 0, 64).is_none());
    }
}
