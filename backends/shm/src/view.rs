//! Reader's end of the memory: trusts nothing about the writer, and hands out copies only.

use crate::Layout;
use crate::map::Mapping;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// Read-only view of a ring's slots, which another process writes.
pub struct View {
    map: Mapping,
    layout: Layout,
}

impl View {
    /// Maps memory received from the writer, under the layout that the writer states.
    ///
    /// # Errors
    /// The descriptor is not sealed memory, can be made shorter, or is smaller than the layout.
    pub fn open(memory: BorrowedFd<'_>, layout: Layout) -> io::Result<Self> {
        // Only memory can be sealed: a file fails here.
        if !fcntl_get_seals(memory)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "memory that can be made shorter"));
        }
        let bytes = u64::try_from(fstat(memory)?.st_size).unwrap_or(0);
        if bytes < layout.bytes() as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "memory that is too small"));
        }
        Ok(Self { map: Mapping::new(memory, layout.bytes(), false)?, layout })
    }

    /// Copies the current content of a slot; `None` if there is no such slot. Cost: one pass over its bytes.
    pub fn read(&self, slot: u32) -> Option<Vec<u8>> {
        let (offset, bytes) = (self.layout.offset(slot)?, self.layout.slot_bytes);
        let begin = self.map.at(offset, bytes);
        let words = bytes / WORD;
        let mut copy: Vec<u8> = Vec::with_capacity(bytes);
        let to = copy.as_mut_ptr();
        for at in 0..words {
            // SAFETY: the word is within the `bytes` bytes that `at` has checked, aligned (slots begin at cache lines
            // of a mapping that begins at a page), and stays mapped while `self` lives; the memory cannot be
            // shortened. Another process may write it meanwhile: the access is an atomic, relaxed load of 8 bytes,
            // which may be of read-only memory.
            let word = unsafe { begin.cast::<AtomicU64>().add(at).as_ref() }.load(Ordering::Relaxed);
            // SAFETY: `words * WORD` bytes are within the capacity of `copy`; the write need not be aligned.
            unsafe { to.cast::<u64>().add(at).write_unaligned(word) };
        }
        for at in words * WORD..bytes {
            // SAFETY: as above, for one byte.
            let byte = unsafe { begin.cast::<AtomicU8>().add(at).as_ref() }.load(Ordering::Relaxed);
            // SAFETY: as above, for one byte.
            unsafe { to.add(at).write(byte) };
        }
        // SAFETY: the capacity is `bytes`, and all of them were written above.
        unsafe { copy.set_len(bytes) };
        Some(copy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::fs::File;
    use std::os::fd::AsFd;

    #[track_caller]
    fn refused(memory: BorrowedFd<'_>, why: &str) {
        let layout = Layout::new(2, 64).expect("small");
        assert!(View::open(memory, layout).is_err_and(|error| error.to_string().contains(why)), "{why}");
    }

    #[test]
    fn only_memory_that_stays_is_mapped() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create("test", flags).expect("memory");
        ftruncate(&memory, 1000).expect("longer");
        refused(memory.as_fd(), "shorter");
        fcntl_add_seals(&memory, SealFlags::SHRINK).expect("sealed");
        assert!(View::open(memory.as_fd(), Layout::new(2, 64).expect("small")).is_ok());
        let small = memfd_create("test", flags).expect("memory");
        fcntl_add_seals(&small, SealFlags::SHRINK).expect("sealed");
        refused(small.as_fd(), "too small");
        let file = File::open(std::env::current_exe().expect("a path")).expect("a file");
        refused(file.as_fd(), "");
        let (socket, _) = std::os::unix::net::UnixStream::pair().expect("a socket");
        refused(socket.as_fd(), "");
    }

    #[test]
    fn a_writer_that_goes_on_writing_spoils_bytes_only() {
        let layout = Layout::new(1, 4099).expect("small");
        let (ring, memory) = crate::Ring::create(layout).expect("memory");
        let view = View::open(memory.as_fd(), layout).expect("sealed");
        let mut slot = ring.take().expect("free");
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| (0..20_000u32).for_each(|round| slot.fill(round as u8)));
            while !writer.is_finished() {
                assert_eq!(view.read(0).map(|bytes| bytes.len()), Some(4099));
            }
        });
    }
}
