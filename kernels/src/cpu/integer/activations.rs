//! Activations as integers of 8 bits: the left operand of integer products.
//!
//! A line of 32 values becomes integers of −127 to 127 and one scale: the largest magnitude over 127, or for weights with one scale per
//! row ([`super::Form::Rows`]) that of the whole row. Rounding is to the nearest, ties to even, and depends on the row alone. Values are
//! rounded from f32: where a device has integer weights, norms, attention and SiLU write f32 rows instead of bf16.

use super::super::operand::{Groups, Shared};

/// A left operand of integer products, in row groups: `[k_blocks][rows of the group]` lines, scales and sums. Where a row has one scale,
/// its lines lie in pairs, so that 64 values follow each other ([`super::paired`]).
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Integral {
    pub(in crate::cpu) values: Shared<i8>,
    pub(in crate::cpu) scales: Shared<f32>,
    pub(in crate::cpu) sums: Shared<u32>,
    pub(in crate::cpu) groups: Groups,
    /// Number of columns divided by 32, rounded up.
    pub(in crate::cpu) k_blocks: usize,
    /// True if a row has one scale, false if each line of it has.
    pub(in crate::cpu) by_row: bool,
}

impl Integral {
    /// Operand of the rows of `groups` in this one's memory, in which `start` rows lie before it.
    pub(in crate::cpu) fn part(&self, start: usize, groups: Groups) -> Self {
        let (first, lines) = (start * self.k_blocks, groups.rows() * self.k_blocks);
        let (first_scale, scales) = if self.by_row { (start, groups.rows()) } else { (first, lines) };
        Self {
            values: self.values.part(first * 32, lines * 32),
            scales: self.scales.part(first_scale, scales),
            sums: self.sums.part(first, lines),
            groups,
            ..*self
        }
    }

    /// Row `row`, to be written.
    pub(in crate::cpu) fn row(&self, row: usize) -> IntegralRow {
        let group = self.groups.of(row);
        IntegralRow {
            operand: *self,
            row,
            start: group.start * self.k_blocks,
            within: row - group.start,
            height: group.len(),
        }
    }

    /// Index of the first line of the group that begins at row `start`.
    pub(in crate::cpu) fn group(&self, start: usize) -> usize {
        start * self.k_blocks
    }
}

/// One row of an [`Integral`].
#[derive(Clone, Copy)]
pub(in crate::cpu) struct IntegralRow {
    operand: Integral,
    row: usize,
    /// Index of the first line of the row's group, the row's number in the group, and the number of rows there.
    start: usize,
    within: usize,
    height: usize,
}

impl IntegralRow {
    /// Index of the row's line `k`.
    #[inline(always)]
    fn line(&self, k: usize) -> usize {
        let operand = &self.operand;
        if operand.by_row {
            self.start + super::paired(operand.k_blocks, self.height, k, self.within)
        } else {
            self.start + k * self.height + self.within
        }
    }
}

/// Magnitude below which a line counts as zero: the inverse of its scale would overflow.
const SMALLEST: f32 = 1e-30;

/// Largest magnitude as bits; a NaN is larger than infinity, and infinity than every number.
#[inline(always)]
fn peak(x: &[f32]) -> u32 {
    let mut lanes = [0u32; 32];
    for line in x.as_chunks::<32>().0 {
        for (lane, value) in lanes.iter_mut().zip(line) {
            *lane = (*lane).max(value.to_bits() & 0x7fff_ffff);
        }
    }
    lanes.into_iter().fold(0, u32::max)
}

/// Scale of integers whose largest magnitude has the bits `peak`, and the factor by which values become integers. Where a value is not
/// finite, the scale is NaN, which every output of the row then is.
#[inline(always)]
fn scale(peak: u32) -> (f32, f32) {
    let magnitude = f32::from_bits(peak);
    if peak >= 0x7f80_0000 {
        (f32::NAN, 0.0)
    } else if magnitude < SMALLEST {
        (0.0, 0.0)
    } else {
        (magnitude / 127.0, 127.0 / magnitude)
    }
}

/// Rounds a line to integers; returns the sums of its halves, two of 16 bits in one word.
#[inline(always)]
fn round(x: &[f32; 32], factor: f32, out: &mut [i8; 32]) -> u32 {
    // Adding 1.5·2^23 rounds to an integer, ties to even, which then sits in the low bits of the mantissa.
    const MAGIC: f32 = 12_582_912.0;
    // Nothing but zeros, or a value that is not finite, which the scale tells.
    if factor == 0.0 {
        out.fill(0);
        return 0;
    }
    let mut whole = [0i32; 32];
    for (whole, x) in whole.iter_mut().zip(x) {
        *whole = ((x * factor + MAGIC).to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    }
    for (out, whole) in out.iter_mut().zip(whole) {
        *out = whole as i8;
    }
    let half = |from: usize| whole[from..from + 16].iter().sum::<i32>();
    half(0) as u32 & 0xffff | (half(16) as u32) << 16
}

/// Rounds one row. `x`: `[32 · k_blocks]`, zero beyond the columns.
///
/// # Safety
/// As [`Shared::slice`]: the row of the operand is nobody else's.
#[inline(always)]
pub(in crate::cpu) unsafe fn quantize(x: &[f32], out: IntegralRow) {
    let operand = out.operand;
    let whole = scale(if operand.by_row { peak(x) } else { 0 });
    if operand.by_row {
        // SAFETY: passed on to the caller.
        unsafe { operand.scales.set(out.row, whole.0) };
    }
    for (k, x) in x.as_chunks::<32>().0.iter().enumerate() {
        let line = out.line(k);
        let (of_line, factor) = if operand.by_row { whole } else { scale(peak(x)) };
        // SAFETY: passed on to the caller.
        let values = unsafe { operand.values.slice(line * 32, 32) };
        let sums = round(x, factor, values.as_mut_array().expect("32 values"));
        // SAFETY: passed on to the caller.
        unsafe { operand.sums.set(line, sums) };
        if !operand.by_row {
            // SAFETY: passed on to the caller.
            unsafe { operand.scales.set(line, of_line) };
        }
    }
}

/// Rounds a row to integers; returns their scale, which is NaN where a value is not finite. `x`, `out`: multiples of 32.
#[inline(always)]
pub(in crate::cpu) fn round_row(x: &[f32], out: &mut [i8]) -> f32 {
    let (scale, factor) = scale(peak(x));
    for (x, out) in x.as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        round(x, factor, out);
    }
    scale
}

/// Memory of integral operands, grown to the largest need and never given back.
#[derive(Default)]
pub(in crate::cpu) struct Memory {
    values: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<u32>,
}

impl Memory {
    /// Operand of `groups` rows in this memory; the contents are left over from the last use.
    pub(in crate::cpu) fn operand(&mut self, groups: Groups, k_blocks: usize, by_row: bool) -> Integral {
        let lines = groups.rows() * k_blocks;
        if self.sums.len() < lines {
            self.values.resize(lines * 32, 0);
            self.scales.resize(lines, 0.0);
            self.sums.resize(lines, 0);
        }
        let values = Shared::new(&mut self.values);
        Integral {
            values,
            scales: Shared::new(&mut self.scales),
            sums: Shared::new(&mut self.sums),
            groups,
            k_blocks,
            by_row,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(x: &[f32], by_row: bool) -> (Vec<i8>, Vec<f32>, Vec<u32>) {
        let mut memory = Memory::default();
        let operand = memory.operand(Groups::new(1, 4), x.len() / 32, by_row);
        // SAFETY: one thread.
        unsafe { quantize(x, operand.row(0)) };
        (memory.values, memory.scales, memory.sums)
    }

    #[test]
    fn lines_have_scales_of_their_own_and_rows_one() {
        let mut x = vec![0.0f32; 64];
        (x[0], x[1], x[2], x[20], x[40]) = (-12.7, 6.35, 0.05, 3.0, 254.0);
        let (values, scales, sums) = quantized(&x, false);
        assert_eq!((values[0], values[20], values[40]), (-127, 30, 127));
        // 6.35 is half a step above 63, or nearly so; 0.05 half a step above 0.
        assert!((63..=64).contains(&values[1]) && (0..=1).contains(&values[2]));
        assert_eq!((scales[0], scales[1]), (12.7 / 127.0, 2.0));
        let first = i32::from(values[0]) + i32::from(values[1]) + i32::from(values[2]);
        assert_eq!((sums[0] as i16, sums[0] >> 16, sums[1] as u16, sums[1] >> 16), (first as i16, 30, 127, 0));
        let mut row = [0; 64];
        assert_eq!((round_row(&x, &mut row), row.as_slice()), (2.0, quantized(&x, true).0.as_slice()), "as by row");
        let (values, scales, _) = quantized(&x, true);
        assert_eq!((scales[0], values[0], values[20], values[40]), (2.0, -6, 2, 127));
    }

    #[test]
    fn what_is_not_finite_stays_so_and_what_is_tiny_is_zero() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for by_row in [false, true] {
                let mut x = vec![1.0; 32];
                x[7] = bad;
                assert!(quantized(&x, by_row).1[0].is_nan(), "{bad}");
            }
        }
        let (values, scales, sums) = quantized(&[1e-38; 32], false);
        assert_eq!((values[3], scales[0], sums[0]), (0, 0.0, 0));
    }
}
