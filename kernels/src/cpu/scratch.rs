//! Memory aligned to cache lines that grows to what was once needed and is never given back: the working space of a thread.

/// One cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; 16]);

/// A growing, aligned vector of plain values. What it holds is left from the last use.
#[derive(Default)]
pub(super) struct Scratch {
    lines: Vec<Line>,
}

impl Scratch {
    /// `count` f32.
    pub(super) fn singles(&mut self, count: usize) -> &mut [f32] {
        let lines = count.div_ceil(16);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0.0; 16]));
        }
        // SAFETY: a `Line` is sixteen f32 without padding, and as many lines exist (resized above).
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), count) }
    }

    /// `count` 16-bit values.
    pub(super) fn halves(&mut self, count: usize) -> &mut [u16] {
        let start = self.singles(count.div_ceil(2)).as_mut_ptr();
        // SAFETY: `singles` has at least `count` times two bytes, and every pattern is a valid u16.
        unsafe { std::slice::from_raw_parts_mut(start.cast(), count) }
    }
}
