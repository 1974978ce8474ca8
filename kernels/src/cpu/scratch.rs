//! Working space of a thread: memory aligned to cache lines that grows to the largest need and is never given back.

/// One cache line of 64 bytes, so that the memory is aligned to it.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; 16]);

/// A growing, aligned vector of plain values. The contents are left over from the last use.
#[derive(Default)]
pub(super) struct Scratch {
    lines: Vec<Line>,
}

impl Scratch {
    /// The first `count` values as f32, grown if necessary; the contents are left over from the last use.
    pub(super) fn singles(&mut self, count: usize) -> &mut [f32] {
        let lines = count.div_ceil(16);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0.0; 16]));
        }
        // SAFETY: a `Line` is sixteen f32 without padding, and as many lines exist (resized above).
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), count) }
    }

    /// The first `count` values of 16 bits, grown if necessary; the contents are left over from the last use.
    pub(super) fn halves(&mut self, count: usize) -> &mut [u16] {
        let start = self.singles(count.div_ceil(2)).as_mut_ptr();
        // SAFETY: `singles` has at least `count` times two bytes, and every pattern is a valid u16.
        unsafe { std::slice::from_raw_parts_mut(start.cast(), count) }
    }

    /// The first `halves` values of 16 bits, and behind them `singles` values of f32, both from a line on, as above.
    pub(super) fn halves_and_singles(&mut self, halves: usize, singles: usize) -> (&mut [u16], &mut [f32]) {
        let first = halves.div_ceil(32) * 16;
        let (wide, rest) = self.singles(first + singles).split_at_mut(first);
        // SAFETY: `wide` has at least `halves` times two bytes, borrowed uniquely, and every pattern is a valid u16.
        (unsafe { std::slice::from_raw_parts_mut(wide.as_mut_ptr().cast(), halves) }, rest)
    }
}
