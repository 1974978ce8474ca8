//! Shared memory that one process of a machine writes and another reads: slots of equal size behind one descriptor.
//!
//! ```text
//! writer                                       reader
//! Ring::create ─── sealed descriptor ────────→ View::open
//! ring.take() → Slot, filled as a &mut [u8]
//!      ─────────── "slot 3 is full" ─────────→ view.read(3) → bytes of its own
//! drop(slot)  ←─── "slot 3 is read" ──────────
//! ```
//! One idea: seals make the two ends safe from each other, and neither has to trust the other further.
//!
//! - *Nobody but the writer can write* (`F_SEAL_FUTURE_WRITE`, set when the writer has its mapping and nobody else has
//!   the descriptor). So a [`Slot`] is plain memory that one owner has, and a `&mut [u8]` of it is what it says.
//! - *Nobody can make it shorter* (`F_SEAL_SHRINK`, which the reader insists on). So a read never meets a page that is gone (`SIGBUS`).
//! - *The reader is not promised that bytes stay*. The writer may change a slot while it is read, out of error or
//!   malice. So a [`View`] gives no slices: it copies with atomic loads, and whoever wants to check the bytes checks
//!   the copy.
//!
//! A socket beside the memory carries the numbers of full and read slots, and the reader checks the contents.

mod map;
mod ring;
mod view;

pub use ring::{Ring, Slot};
pub use view::View;

/// Largest ring of page slots in bytes, 64 MiB; a larger layout is refused.
pub const BYTES_MAX: usize = 64 << 20;

/// Alignment of slots: a cache line.
const ALIGN: usize = 64;

/// Number and size of the slots; both ends must use the same values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    slots: u32,
    slot_bytes: usize,
    stride: usize,
}

impl Layout {
    /// Makes a layout; `None` if it is empty, or larger than [`BYTES_MAX`].
    pub fn new(slots: u32, slot_bytes: usize) -> Option<Self> {
        let stride = slot_bytes.checked_next_multiple_of(ALIGN)?;
        let bytes = stride.checked_mul(slots as usize)?;
        (1..=BYTES_MAX).contains(&bytes).then_some(Self { slots, slot_bytes, stride })
    }

    /// Layout of at most `slots_max` slots in at most `bytes_max` bytes; `None` if not even one fits.
    pub fn within(slots_max: u32, slot_bytes: usize, bytes_max: usize) -> Option<Self> {
        let stride = slot_bytes.checked_next_multiple_of(ALIGN)?;
        let fit = bytes_max.min(BYTES_MAX).checked_div(stride)?;
        Self::new(slots_max.min(u32::try_from(fit).unwrap_or(u32::MAX)), slot_bytes)
    }

    /// Number of slots, each for one page.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    fn bytes(&self) -> usize {
        self.stride * self.slots as usize
    }

    /// Offset of a slot; `None` if the number is too large.
    fn offset(&self, slot: u32) -> Option<usize> {
        (slot < self.slots).then(|| self.stride * slot as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_neither_empty_nor_too_large() {
        let slots = |layout: Option<Layout>| layout.map(|layout| (layout.slots(), layout.bytes()));
        assert_eq!(slots(Layout::new(3, 65)), Some((3, 384)));
        assert_eq!(slots(Layout::new(0, 65)), None);
        assert_eq!(slots(Layout::new(1, 0)), None);
        assert_eq!(slots(Layout::new(1, BYTES_MAX)), Some((1, BYTES_MAX)));
        assert_eq!(slots(Layout::new(1, BYTES_MAX + 1)), None);
        assert_eq!(slots(Layout::new(u32::MAX, usize::MAX)), None);
        assert_eq!(slots(Layout::within(32, 1 << 20, 16 << 20)), Some((16, 16 << 20)));
        assert_eq!(slots(Layout::within(32, 100, 16 << 20)), Some((32, 32 * 128)));
        assert_eq!(slots(Layout::within(32, 17 << 20, 16 << 20)), None);
        assert_eq!(slots(Layout::within(32, 0, 16 << 20)), None);
    }
}
