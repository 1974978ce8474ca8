//! Writer's end of the memory. A slot is free exactly while no [`Slot`] of it exists.

use crate::Layout;
use crate::map::Mapping;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Slots that this process writes and another reads. Clones share one ring.
#[derive(Clone)]
pub struct Ring {
    shared: Arc<Shared>,
}

struct Shared {
    map: Mapping,
    layout: Layout,
    /// Free slots; the one returned last is taken first, while it is still in a cache.
    free: Mutex<Vec<u32>>,
}

impl Shared {
    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ring {
    /// Creates a ring, and the descriptor for its reader. Physical memory is taken only for slots that are used.
    ///
    /// # Errors
    /// The system has no sealed memory (Linux before 5.1), no descriptors or no addresses left.
    pub fn create(layout: Layout) -> io::Result<(Self, OwnedFd)> {
        let memory = memfd_create("penstock-kv", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memory, layout.bytes() as u64)?;
        let map = Mapping::new(memory.as_fd(), layout.bytes(), true)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&memory, seals)?;
        let free = Mutex::new((0..layout.slots).rev().collect());
        Ok((Self { shared: Arc::new(Shared { map, layout, free }) }, memory))
    }

    /// Returns true if [`Self::take`] would return a slot.
    pub fn has_free(&self) -> bool {
        !self.shared.free().is_empty()
    }

    /// Takes a free slot; `None` if there is none.
    pub fn take(&self) -> Option<Slot> {
        let number = self.shared.free().pop()?;
        Some(Slot { shared: Arc::clone(&self.shared), number })
    }
}

/// One slot, to be written. Dropping it frees the slot, so that must wait until the reader has read it.
pub struct Slot {
    shared: Arc<Shared>,
    number: u32,
}

impl Slot {
    /// Number of the slot, for the reader.
    pub fn number(&self) -> u32 {
        self.number
    }

    fn offset(&self) -> usize {
        self.shared.layout.offset(self.number).expect("free slots are slots of the layout")
    }
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let bytes = self.shared.layout.slot_bytes;
        let begin = self.shared.map.at(self.offset(), bytes);
        // SAFETY: `bytes` bytes from there are in the mapping (`at` asserts it), which lives as long as `self`, are
        // initialized (the kernel zeroes them), and are written by nobody while the slice lives: the number was popped
        // from the free slots, so this is the only `Slot` of it; slots do not overlap; and the seals let no other
        // mapping or descriptor write.
        unsafe { slice::from_raw_parts(begin.as_ptr(), bytes) }
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        let bytes = self.shared.layout.slot_bytes;
        let begin = self.shared.map.at(self.offset(), bytes);
        // SAFETY: as in `deref`, and `self` is borrowed mutably. A reader in another process may read these bytes
        // meanwhile, with atomic loads of its own mapping, and gets whatever is there.
        unsafe { slice::from_raw_parts_mut(begin.as_ptr(), bytes) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.free().push(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::View;
    use proptest::prelude::*;
    use rustix::mm::{MapFlags, ProtFlags};

    fn ring(slots: u32, bytes: usize) -> (Ring, OwnedFd, Layout) {
        let layout = Layout::new(slots, bytes).expect("small");
        let (ring, memory) = Ring::create(layout).expect("memory");
        (ring, memory, layout)
    }

    #[test]
    fn nobody_else_can_write_shorten_or_unseal_it() {
        let (ring, memory, layout) = ring(2, 100);
        let flags = MapFlags::SHARED;
        // SAFETY: no address is asked for.
        let mapped = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 128, ProtFlags::WRITE, flags, &memory, 0) };
        assert!(mapped.is_err(), "a second mapping that can write");
        assert!(rustix::io::write(&memory, b"x").is_err());
        assert!(ftruncate(&memory, 1).is_err());
        assert!(ftruncate(&memory, 1 << 20).is_err());
        assert!(fcntl_add_seals(&memory, SealFlags::WRITE).is_err(), "the seals are sealed");
        // The writer's own descriptor still can.
        let mut slot = ring.take().expect("free");
        slot.fill(7);
        let view = View::open(memory.as_fd(), layout).expect("sealed");
        assert_eq!(view.read(slot.number()), Some(vec![7; 100]));
    }

    #[test]
    fn a_slot_outlives_its_ring() {
        let (ring, memory, layout) = ring(1, 8);
        let view = View::open(memory.as_fd(), layout).expect("sealed");
        let mut slot = ring.take().expect("free");
        drop((ring, memory));
        slot.copy_from_slice(b"pagepage");
        assert_eq!(view.read(0).as_deref(), Some(&b"pagepage"[..]));
        drop(slot);
        assert_eq!(view.read(0).as_deref(), Some(&b"pagepage"[..]), "the reader's mapping is its own");
    }

    #[derive(Clone, Debug)]
    enum Op {
        Take(u8),
        Drop(usize),
        Write(usize, u8),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            any::<u8>().prop_map(Op::Take),
            any::<usize>().prop_map(Op::Drop),
            (any::<usize>(), any::<u8>()).prop_map(|(at, byte)| Op::Write(at, byte)),
        ]
    }

    proptest! {
        /// Property of any sequence of takes, writes and returns: no slot has two owners, none is lost, and the reader
        /// sees in each the bytes that its owner wrote.
        #[test]
        fn slots_have_one_owner(slots in 1u32..6, bytes in 1usize..200, ops in prop::collection::vec(op(), 0..60)) {
            let (ring, memory, layout) = ring(slots, bytes);
            let view = View::open(memory.as_fd(), layout).expect("sealed");
            let mut owned: Vec<(Slot, u8)> = Vec::new();
            for op in ops {
                match op {
                    Op::Take(byte) => {
                        prop_assert_eq!(ring.has_free(), owned.len() < slots as usize);
                        if let Some(mut slot) = ring.take() {
                            prop_assert!(owned.iter().all(|(other, _)| other.number() != slot.number()));
                            slot.fill(byte);
                            owned.push((slot, byte));
                        } else {
                            prop_assert_eq!(owned.len(), slots as usize);
                        }
                    }
                    Op::Drop(at) if !owned.is_empty() => drop(owned.swap_remove(at % owned.len())),
                    Op::Write(at, byte) if !owned.is_empty() => {
                        let at = at % owned.len();
                        owned[at].0.fill(byte);
                        owned[at].1 = byte;
                    }
                    Op::Drop(_) | Op::Write(..) => {}
                }
                for (slot, byte) in &owned {
                    prop_assert!(slot.iter().all(|at| at == byte));
                    prop_assert_eq!(view.read(slot.number()), Some(vec![*byte; bytes]));
                }
            }
            prop_assert_eq!(view.read(slots), None);
        }
    }
}
