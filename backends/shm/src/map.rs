//! Memory mapping of a descriptor, regardless of its contents.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

/// Mapped bytes of a descriptor in this process, unmapped when dropped.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the value is an address range that stays valid until it is dropped, whichever thread does what with it; access to
// what is there is the business of `Ring` and `View`.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives an address and a length only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` (at least one) of a descriptor, shared with all who map it.
    pub(crate) fn new(of: BorrowedFd<'_>, bytes: usize, writable: bool) -> io::Result<Self> {
        let access = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: no address is asked for, so nothing that is mapped already is replaced.
        let base = unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, of, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { base, bytes })
    }

    /// Address of the byte at `offset`.
    ///
    /// # Panics
    /// If `len` bytes from there are not all within the mapping.
    pub(crate) fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.bytes), "{offset} + {len} of {}", self.bytes);
        // SAFETY: the result is within, or one behind, the same mapping (asserted above).
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is that of `mmap` in `new`, and nobody has an address in it any more: those that hand out
        // references borrow or own this value. Err: it is no mapping, which it is.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
