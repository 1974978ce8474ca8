//! Rounding of weights to blocks of integers while they are packed ([`Held::Int4`], [`Held::Int8Blocks`]).
//!
//! A line of 32 weights becomes integers and one scale in f16, in the form of Q4_0 (−8 to 7) or Q8_0 (−127 to 127). Of 8 bits the scale is the largest
//! magnitude over 127. Of 4 bits it is the best of four: the largest weight is −8.5, −8, −7.5 or −7 at first (before integers are rounded and clamped), and the scale is then
//! that of least squares for the integers so found. On normally distributed weights the squared error is 0.90 of that of llama.cpp's Q4_0, which takes −8 alone and
//! keeps the scale. Sums run in eight lanes of a fixed order, so a weight has the same bits on every machine.

use crate::blocks::{LINE, Layout, RowBlocks, from_f16};
use crate::format::{DType, Held};

/// Values that the largest weight of a 4-bit line is mapped to, one try each, before integers are rounded and clamped.
const PEAKS: [f32; 4] = [-8.5, -8.0, -7.5, -7.0];
/// Lowest and highest integer of 4 bits.
const RANGE: (f32, f32) = (-8.0, 7.0);
/// Magnitude below which a line counts as zero: the inverse of its scale would overflow.
const SMALLEST: f32 = 1e-30;

impl Held {
    /// Integers that matrices are rounded to in blocks; `None` for other forms.
    pub(crate) const fn layout(self) -> Option<Layout> {
        match self {
            Held::Stored | Held::Int8 => None,
            Held::Int4 => Layout::of(DType::Q4_0),
            Held::Int8Blocks => Layout::of(DType::Q8_0),
        }
    }
}

impl RowBlocks {
    /// Rounds a row of weights to the integers of [`Held::layout`]; the last line is filled up with zeros. A line with a weight that is not finite has the
    /// scale NaN.
    pub(crate) fn round(&mut self, layout: Layout, row: &[f32]) {
        let lines = row.len().div_ceil(LINE);
        self.values.resize(lines * LINE, 0);
        self.scales.clear();
        self.minima.clear();
        self.minima.resize(lines, 0);
        self.sub_scales.clear();
        self.sub_scales.resize(lines, [1; 2]);
        self.sub_minima.clear();
        self.sub_minima.resize(lines, [1; 2]);
        for (values, row) in self.values.as_chunks_mut::<LINE>().0.iter_mut().zip(row.chunks(LINE)) {
            let mut line = [0.0; LINE];
            line[..row.len()].copy_from_slice(row);
            self.scales.push(round_line(layout, &line, values));
        }
    }
}

/// Rounds a line; returns the scale in f16. Values of 4 bits are held with the zero of `layout` added, those of 8 bits as two's complement.
fn round_line(layout: Layout, line: &[f32; LINE], out: &mut [u8; LINE]) -> u16 {
    let peak = line.iter().fold(0.0f32, |peak, &w| if w.abs() > peak.abs() { w } else { peak });
    out.fill(layout.zero);
    if !line.iter().all(|w| w.is_finite()) {
        return half::f16::NAN.to_bits();
    }
    if peak.abs() < SMALLEST {
        return 0;
    }
    let (scale, range) = match layout.bits {
        4 => (peak * best_step(line, peak), RANGE),
        _ => (peak.abs() / 127.0, (-127.0, 127.0)),
    };
    let bits = half::f16::from_f32(scale).to_bits();
    let factor = 1.0 / from_f16(bits);
    // If the f16 scale is zero, the integers stay zero; if it is infinite, they stay zero too and the products are NaN.
    if factor.is_finite() && factor != 0.0 {
        for (out, w) in out.iter_mut().zip(line) {
            *out = (nearest(w * factor, range) as i32 + i32::from(layout.zero)) as u8;
        }
    }
    bits
}

/// Best scale of a line of 4 bits, over its largest weight.
fn best_step(line: &[f32; LINE], peak: f32) -> f32 {
    let inverse = 1.0 / peak;
    let (mut best, mut step) = (0.0, 0.0);
    for at_peak in PEAKS {
        let (mut of_weights, mut of_squares) = ([0.0f32; 8], [0.0f32; 8]);
        for weights in line.as_chunks::<8>().0 {
            for (lane, w) in weights.iter().enumerate() {
                // Relative to the largest, so that no square overflows.
                let relative = w * inverse;
                let integer = nearest(relative * at_peak, RANGE);
                of_weights[lane] += relative * integer;
                of_squares[lane] += integer * integer;
            }
        }
        // The largest weight is never rounded to zero, so neither is the sum of squares.
        let (product, squares) = (of_weights.iter().sum::<f32>(), of_squares.iter().sum::<f32>());
        // With the scale of least squares, the squared error is that of zeros less this.
        let gain = product * product / squares;
        if gain > best {
            (best, step) = (gain, product / squares);
        }
    }
    step
}

/// Nearest integer within a range, ties to even, for magnitudes below 2²².
#[inline(always)]
fn nearest(value: f32, (least, most): (f32, f32)) -> f32 {
    // Adding 1.5·2^23 leaves no place for a fraction.
    const MAGIC: f32 = 12_582_912.0;
    ((value + MAGIC) - MAGIC).clamp(least, most)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn weights_of(held: Held, row: &[f32]) -> (RowBlocks, Vec<f32>) {
        let (layout, mut blocks) = (held.layout().unwrap(), RowBlocks::default());
        blocks.round(layout, row);
        let mut out = vec![0.0; row.len().next_multiple_of(LINE)];
        blocks.to_f32(layout, &mut out);
        (blocks, out)
    }

    /// Value of [`PEAKS`] that loses least with the scale of least squares.
    fn best_peak(line: &[f32]) -> f32 {
        let peak = line.iter().fold(0.0f32, |peak, &w| if w.abs() > peak.abs() { w } else { peak });
        let gain = |at_peak: f32| {
            let integer = |w: &f32| f64::from((w * at_peak / peak).round().clamp(-8.0, 7.0));
            let product: f64 = line.iter().map(|w| f64::from(*w) * integer(w)).sum();
            product * product / line.iter().map(|w| integer(w).powi(2)).sum::<f64>()
        };
        PEAKS.into_iter().max_by(|a, b| gain(*a).total_cmp(&gain(*b))).unwrap()
    }

    fn squared_error(got: &[f32], want: &[f32]) -> f64 {
        got.iter().zip(want).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    }

    /// Squared error of a line with the scale `scale`.
    fn error_of(line: &[f32], scale: f32) -> f64 {
        let rounded: Vec<f32> = line.iter().map(|w| (w / scale).round().clamp(-8.0, 7.0) * scale).collect();
        squared_error(&rounded, line)
    }

    /// Scale of llama.cpp's Q4_0: the largest weight is −8.
    fn plain(line: &[f32]) -> f32 {
        let peak = line.iter().fold(0.0f32, |peak, &w| if w.abs() > peak.abs() { w } else { peak });
        from_f16(half::f16::from_f32(peak / -8.0).to_bits())
    }

    proptest! {
        #[test]
        fn four_bits_lose_no_more_than_one_scale_of_the_largest(
            line in proptest::collection::vec(-1.0f32..1.0, 32),
            exponent in -12i32..12,
        ) {
            let line: Vec<f32> = line.iter().map(|w| w * 2f32.powi(exponent)).collect();
            let (blocks, got) = weights_of(Held::Int4, &line);
            prop_assert!(blocks.values.iter().all(|value| *value < 16));
            // The rounding of the scale to f16 may cost what the choice gains where both are nearly equal.
            prop_assert!(squared_error(&got, &line) <= error_of(&line, plain(&line)) * 1.01);
        }

        #[test]
        fn eight_bits_are_within_half_a_step(line in proptest::collection::vec(-3.0f32..3.0, 1..70)) {
            let (blocks, got) = weights_of(Held::Int8Blocks, &line);
            for (k, (got, line)) in got.chunks(LINE).zip(line.chunks(LINE)).enumerate() {
                let step = from_f16(blocks.scales[k]);
                // The largest is at ±127 steps of a scale that is rounded to 11 bits.
                let limit = 0.5 * step + 127.0 * step / 2048.0;
                for (got, want) in got.iter().zip(line) {
                    prop_assert!((got - want).abs() <= limit, "{got} for {want}, step {step}");
                }
            }
        }
    }

    #[test]
    fn normal_weights_lose_a_tenth_less_than_with_the_largest_alone() {
        // Sums of twelve uniform numbers.
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        let row: Vec<f32> = (0..1 << 16).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect();
        let of_largest: f64 = row.chunks(LINE).map(|line| error_of(line, plain(line))).sum();
        let ratio = squared_error(&weights_of(Held::Int4, &row).1, &row) / of_largest;
        assert!((0.885..0.905).contains(&ratio), "{ratio}");
        let bests: std::collections::HashSet<u32> = row.chunks(LINE).map(|line| best_peak(line).to_bits()).collect();
        assert_eq!(bests.len(), PEAKS.len(), "each of the values is the best of some line");
    }

    #[test]
    fn integers_times_a_scale_come_back() {
        let row: Vec<f32> = (0..64).map(|i| f32::from((i * 5 % 16 - 8) as i8) * 0.25).collect();
        assert_eq!(weights_of(Held::Int4, &row).1, row);
        let row: Vec<f32> = (0..32).map(|i| f32::from((i * 8 - 127) as i8) * 0.5).collect();
        assert_eq!(weights_of(Held::Int8Blocks, &row).1, row);
    }

    #[test]
    fn a_line_that_ends_early_is_filled_up_and_odd_weights_are_told() {
        for held in [Held::Int4, Held::Int8Blocks] {
            let zero = held.layout().unwrap().zero;
            let (blocks, got) = weights_of(held, &[2.0; 33]);
            assert_eq!((blocks.scales.len(), blocks.values.len()), (2, 64));
            assert!(got[..33].iter().all(|w| (w - 2.0).abs() < 0.01) && got[33..] == [0.0; 31], "{held:?}");
            let (blocks, got) = weights_of(held, &[0.0; 32]);
            assert_eq!((got, &blocks.values), (vec![0.0; 32], &vec![zero; 32]));
            for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut row = vec![1.0; 64];
                row[40] = odd;
                let (_, got) = weights_of(held, &row);
                assert!(
                    got[..32].iter().all(|w| w.is_finite()) && got[32..].iter().all(|w| w.is_nan()),
                    "{held:?} {odd}"
                );
            }
            // Beyond the range of f16: nothing, and no number.
            assert_eq!(weights_of(held, &[1e-12; 32]).1, [0.0; 32]);
            assert!(weights_of(held, &[1e12; 32]).1.iter().all(|w| !w.is_finite()));
        }
    }
}
