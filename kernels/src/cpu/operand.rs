//! The left operand of a matrix product: bf16 activations in the order in which kernels read them.
//!
//! Rows are cut into groups of nearly equal height, as high as the kernel's registers allow. A group is stored as
//! `[k / 32][rows of the group][32]`, zero beyond the last column: a line of 64 bytes is what one AMX tile row holds, and what an
//! AVX-512 kernel walks with small constant offsets. Producers (norms, attention, SiLU) write it directly, so nothing is packed.

use std::ops::Range;

use super::lanes::{Lanes, to_bf16};

/// Memory that several threads of the pool write, each its own part.
#[derive(Clone, Copy)]
pub(super) struct Shared<T> {
    start: *mut T,
    count: usize,
}

// SAFETY: a `Shared` is a borrow made by `Shared::new` and used inside of one pool task; `slice` puts disjointness on its callers.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Creates the handle. The caller keeps `values` borrowed while copies of it are used; in practice for one
    /// `Pool::run`.
    pub(super) fn new(values: &mut [T]) -> Self {
        Self { start: values.as_mut_ptr(), count: values.len() }
    }

    /// Slice of `count` values from `start` on.
    ///
    /// # Safety
    /// The memory stays borrowed by whoever made this for as long as the result is used, and no other thread has a
    /// reference into the range.
    ///
    /// # Panics
    /// If the range is not inside.
    #[inline(always)]
    pub(super) unsafe fn slice<'a>(&self, start: usize, count: usize) -> &'a mut [T] {
        assert!(start <= self.count && count <= self.count - start, "{start}+{count} of {}", self.count);
        // SAFETY: inside of the borrowed memory (asserted); alive and unshared by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), count) }
    }

    /// Handle of `count` values from `start` on.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(super) fn part(&self, start: usize, count: usize) -> Self {
        assert!(start <= self.count && count <= self.count - start, "{start}+{count} of {}", self.count);
        Self { start: self.at(start), count }
    }

    /// Writes value `index`.
    ///
    /// # Safety
    /// As [`Shared::slice`], for the one place.
    #[inline(always)]
    pub(super) unsafe fn set(&self, index: usize, value: T) {
        // SAFETY: passed on to the caller.
        let place = unsafe { self.slice(index, 1) };
        place[0] = value;
    }

    /// Address of value `start`, which may be one past the end.
    #[inline(always)]
    pub(super) fn at(&self, start: usize) -> *mut T {
        assert!(start <= self.count, "{start} of {}", self.count);
        // SAFETY: inside of, or one past, the memory that `new` borrowed.
        unsafe { self.start.add(start) }
    }
}

impl Shared<u16> {
    /// Handle of the same memory as values of half the size.
    pub(super) fn halved(values: &mut [f32]) -> Shared<u16> {
        Shared { start: values.as_mut_ptr().cast(), count: values.len() * 2 }
    }
}

/// Division of `rows` into groups of at most `height_max`, heights differing by at most one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Groups {
    rows: usize,
    count: usize,
    low: usize,
    /// Number of groups, the first ones, that have `low + 1` rows.
    extra: usize,
}

impl Groups {
    pub(super) fn new(rows: usize, height_max: usize) -> Self {
        let count = rows.div_ceil(height_max).max(1);
        Self { rows, count, low: rows / count, extra: rows % count }
    }

    pub(super) fn count(&self) -> usize {
        if self.rows == 0 { 0 } else { self.count }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Range of rows in the row group with index `group`.
    pub(super) fn range(&self, group: usize) -> Range<usize> {
        let start = group * self.low + group.min(self.extra);
        start..start + self.low + usize::from(group < self.extra)
    }

    /// Range of rows of the group that contains `row`.
    pub(super) fn of(&self, row: usize) -> Range<usize> {
        let tall = self.extra * (self.low + 1);
        let group = if row < tall { row / (self.low + 1) } else { self.extra + (row - tall) / self.low };
        self.range(group)
    }
}

/// A left operand of a product: bf16 in row groups, in the order in which kernels read it.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) values: Shared<u16>,
    pub(super) groups: Groups,
    /// Number of columns divided by 32, rounded up.
    pub(super) k_blocks: usize,
}

impl Operand {
    /// Operand of rows of `k_blocks` lines in the memory of `values`, in which `start` rows lie before it.
    pub(super) fn part(values: Shared<u16>, k_blocks: usize, start: usize, groups: Groups) -> Self {
        let size = k_blocks * 32;
        Self { values: values.part(start * size, groups.rows() * size), groups, k_blocks }
    }

    /// Lines of 32 values of `row`, which lie a stride apart within its group.
    pub(super) fn row(&self, row: usize) -> RowLines {
        let group = self.groups.of(row);
        let start = (group.start * self.k_blocks + row - group.start) * 32;
        RowLines { values: self.values, start, stride: group.len() * 32 }
    }

    /// First value of a group that begins at row `start`.
    pub(super) fn group(&self, start: usize) -> *const u16 {
        self.values.at(start * self.k_blocks * 32)
    }
}

/// Row of a buffer that an operation writes: as an operand, or as f32 where products need more than bf16 of it.
#[derive(Clone, Copy)]
pub(super) enum RowOut {
    /// Row of an [`Operand`].
    Lines(RowLines),
    /// Row of f32, whose first value has the index `start`.
    Singles {
        /// All rows of the buffer.
        values: Shared<f32>,
        /// Index of the row's first value.
        start: usize,
    },
}

impl RowOut {
    /// Writes sixteen values from `column` on, a multiple of 16.
    ///
    /// # Safety
    /// As [`Shared::slice`].
    #[inline(always)]
    pub(super) unsafe fn put16<V: Lanes>(&self, column: usize, value: V) {
        match self {
            // SAFETY: passed on to the caller.
            RowOut::Lines(lines) => value.to_bf16(unsafe { lines.half(column) }),
            RowOut::Singles { values, start } => {
                // SAFETY: passed on to the caller.
                let to = unsafe { values.slice(start + column, 16) };
                value.store(to.as_mut_array().expect("16 values"));
            }
        }
    }

    /// Writes one value.
    ///
    /// # Safety
    /// As [`Shared::slice`], for the one place.
    #[inline(always)]
    pub(super) unsafe fn put(&self, column: usize, value: f32) {
        match self {
            // SAFETY: passed on to the caller.
            RowOut::Lines(lines) => unsafe { lines.put(column, to_bf16(value)) },
            // SAFETY: passed on to the caller.
            RowOut::Singles { values, start } => unsafe { values.set(start + column, value) },
        }
    }
}

/// Rows of a buffer that an operation writes, in either form.
#[derive(Clone, Copy)]
pub(super) enum Out {
    /// An operand of the next product.
    Operand(Operand),
    /// Rows of f32, padded to 32 columns.
    Singles {
        /// All rows of the buffer.
        values: Shared<f32>,
        /// Values from one row to the next.
        stride: usize,
    },
}

impl Out {
    /// Row `row`, to be written.
    pub(super) fn row(&self, row: usize) -> RowOut {
        match self {
            Out::Operand(operand) => RowOut::Lines(operand.row(row)),
            Out::Singles { values, stride } => RowOut::Singles { values: *values, start: row * stride },
        }
    }
}

/// One row of an [`Operand`].
#[derive(Clone, Copy)]
pub(super) struct RowLines {
    values: Shared<u16>,
    start: usize,
    stride: usize,
}

impl RowLines {
    /// Line of the columns `32·k ..` of the row.
    ///
    /// # Safety
    /// As [`Shared::slice`].
    #[inline(always)]
    pub(super) unsafe fn line<'a>(&self, k: usize) -> &'a mut [u16] {
        // SAFETY: passed on to the caller.
        unsafe { self.values.slice(self.start + k * self.stride, 32) }
    }

    /// Half line of sixteen values from `column` on, a multiple of 16.
    ///
    /// # Safety
    /// As [`Shared::slice`].
    #[inline(always)]
    pub(super) unsafe fn half<'a>(&self, column: usize) -> &'a mut [u16; 16] {
        let start = self.start + column / 32 * self.stride + column % 32;
        // SAFETY: passed on to the caller.
        let half = unsafe { self.values.slice(start, 16) };
        half.try_into().expect("16 values")
    }
}

impl RowLines {
    /// Writes one value.
    ///
    /// # Safety
    /// As [`Shared::slice`], for the one place.
    #[inline(always)]
    pub(super) unsafe fn put(&self, column: usize, value: u16) {
        let at = self.values.at(self.start + column / 32 * self.stride + column % 32);
        // SAFETY: `at` checked the bounds up to one past the end, where no column of a row is; the place is the caller's alone.
        unsafe { at.write(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_all_rows_evenly() {
        for height in [1, 4, 6, 12, 32] {
            for rows in 0..100 {
                let groups = Groups::new(rows, height);
                let all: Vec<_> = (0..groups.count()).map(|g| groups.range(g)).collect();
                let covered: Vec<usize> = all.iter().cloned().flatten().collect();
                assert_eq!(covered, (0..rows).collect::<Vec<_>>());
                assert!(all.iter().all(|g| !g.is_empty() && g.len() <= height && g.len() + 1 >= all[0].len()));
                assert!(all.iter().all(|g| g.clone().all(|row| groups.of(row) == *g)));
            }
        }
    }

    #[test]
    fn lines_of_an_operand_do_not_overlap() {
        let mut memory = vec![0u16; 7 * 3 * 32];
        let operand = Operand { values: Shared::new(&mut memory), groups: Groups::new(7, 4), k_blocks: 3 };
        for row in 0..7 {
            for k in 0..3 {
                // SAFETY: one thread, one line at a time.
                unsafe { operand.row(row).line(k) }.iter_mut().for_each(|v| *v += (row * 3 + k) as u16 + 1);
            }
        }
        let mut seen: Vec<u16> = memory.as_chunks::<32>().0.iter().map(|line| line[0]).collect();
        assert!(memory.as_chunks::<32>().0.iter().all(|line| line.iter().all(|v| *v == line[0])));
        seen.sort_unstable();
        assert_eq!(seen, (1..=21).collect::<Vec<u16>>());
    }
}
