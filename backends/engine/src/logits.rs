//! Passes over one row of logits: maximum, sum of exponentials, the best k. Fixed order of every sum, own exponential: the
//! same bits in every batch and on every machine.
//!
//! Cost for 151,936 logits: each pass reads 600 KB; comparisons run at memory speed (~40 µs), exponentials at a few
//! operations per lane (~150 µs with 4 lanes). The best k are kept in a buffer of 2k with a rising bar, so nothing is sorted
//! that is not returned.

/// Candidate for the next token: its logit, possibly edited, and its id.
pub(crate) type Candidate = (f32, u32);

/// Values per partial sum; partial sums are added in order.
pub(crate) const CHUNK: usize = 1024;
const LANES: usize = 16;

/// Largest value; `None` if one is NaN or +∞, or none is above −∞ (the row is useless).
pub(crate) fn max(values: &[f32]) -> Option<f32> {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut bad = [false; LANES];
    let (rows, rest) = values.as_chunks::<LANES>();
    for row in rows {
        for lane in 0..LANES {
            lanes[lane] = if row[lane] > lanes[lane] { row[lane] } else { lanes[lane] };
            bad[lane] |= useless(row[lane]);
        }
    }
    let bad = bad.iter().any(|bad| *bad) || rest.iter().any(|value| useless(*value));
    let max = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    (!bad && max > f32::NEG_INFINITY).then_some(max)
}

fn useless(value: f32) -> bool {
    value.is_nan() | (value == f32::INFINITY)
}

/// First token with the given value.
pub(crate) fn position(values: &[f32], value: f32) -> u32 {
    values.iter().position(|v| *v == value).expect("the maximum is one of the values") as u32
}

/// Exponential `e^x` for `x ≤ 0`, 0 below −87. Cephes' polynomial, no fused operations: the same bits everywhere,
/// error below 2 ulp.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 · 2²³: adding it rounds to an integer in the low bits
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = clamped - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4_f32;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let mantissa = p * r * r + r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(MAGIC.to_bits()).wrapping_add(127) << 23;
    let value = mantissa * f32::from_bits(exponent);
    if x > -87.0 { value } else { 0.0 }
}

/// Sum `Σ e^((v − max)·scale)` over one chunk, in f64.
pub(crate) fn sum_exp_chunk(chunk: &[f32], max: f32, scale: f32) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let (rows, rest) = chunk.as_chunks::<LANES>();
    for row in rows {
        let weights: [f32; LANES] = std::array::from_fn(|lane| exp((row[lane] - max) * scale));
        for lane in 0..LANES {
            lanes[lane] += f64::from(weights[lane]);
        }
    }
    let tail: f64 = rest.iter().map(|value| f64::from(exp((value - max) * scale))).sum();
    lanes.iter().sum::<f64>() + tail
}

/// Sum `Σ e^((v − max)·scale)`, chunk by chunk in order.
pub(crate) fn sum_exp(values: &[f32], max: f32, scale: f32) -> f64 {
    values.chunks(CHUNK).map(|chunk| sum_exp_chunk(chunk, max, scale)).sum()
}

/// Order of candidates: descending value, then ascending token.
pub(crate) fn better(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Puts the best `k` values above −∞ into `out`, best first, equal values by ascending token.
pub(crate) fn top(values: &[f32], k: usize, out: &mut Vec<Candidate>) {
    out.clear();
    if k == 0 {
        return;
    }
    let full = k.saturating_mul(2).max(64);
    let mut bar = f32::NEG_INFINITY;
    for (n, block) in values.chunks(64).enumerate() {
        if !block.iter().fold(false, |any, value| any | (*value > bar)) {
            continue;
        }
        for (i, value) in block.iter().enumerate() {
            if *value > bar {
                // Adding 0 turns −0 into +0, so that the two compare equal by bits too.
                out.push((*value + 0.0, (n * 64 + i) as u32));
            }
        }
        if out.len() >= full {
            out.select_nth_unstable_by(k - 1, better);
            out.truncate(k);
            bar = out[k - 1].0;
        }
    }
    if out.len() > k {
        out.select_nth_unstable_by(k - 1, better);
        out.truncate(k);
    }
    out.sort_unstable_by(better);
}

/// Puts all values of at least `bar` into `out`, by ascending token.
pub(crate) fn at_least(values: &[f32], bar: f32, out: &mut Vec<Candidate>) {
    out.clear();
    for (n, block) in values.chunks(64).enumerate() {
        if block.iter().fold(false, |any, value| any | (*value >= bar)) {
            let tokens = (n * 64) as u32..;
            out.extend(block.iter().copied().zip(tokens).filter(|(value, _)| *value >= bar));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_exponential_is_close() {
        for i in 0..200_000 {
            let x = -(i as f32) * 5e-4;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            let bound = if x > -87.0 { want * 2.4e-7 } else { 2e-38 };
            assert!((got - want).abs() <= bound, "exp({x}) = {got}, {want}");
        }
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY)), (1.0, 0.0));
    }

    #[test]
    fn useless_rows_are_seen() {
        let mut row = vec![0.5_f32; 50];
        assert_eq!(max(&row), Some(0.5));
        for at in [0, 17, 49] {
            for bad in [f32::NAN, f32::INFINITY] {
                let mut row = row.clone();
                row[at] = bad;
                assert_eq!(max(&row), None);
            }
        }
        row.fill(f32::NEG_INFINITY);
        assert_eq!(max(&row), None);
    }

    proptest! {
        #[test]
        fn top_is_a_sort(values in prop::collection::vec(-4..4_i8, 1..400), k in 1..80_usize) {
            let values: Vec<f32> = values.iter().map(|v| if *v == -4 { f32::NEG_INFINITY } else { f32::from(*v) }).collect();
            let mut want: Vec<Candidate> = values.iter().copied().zip(0..).filter(|(v, _)| *v > f32::NEG_INFINITY).collect();
            want.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1)));
            want.truncate(k);
            let mut got = Vec::new();
            top(&values, k, &mut got);
            prop_assert_eq!(got, want);
        }

        #[test]
        fn sums_are_near_the_plain_sum(values in prop::collection::vec(-20.0..20.0_f32, 1..3000)) {
            let max = max(&values).unwrap();
            let plain: f64 = values.iter().map(|v| f64::from((v - max) * 0.7).exp()).sum();
            prop_assert!((sum_exp(&values, max, 0.7) / plain - 1.0).abs() < 1e-6);
        }
    }
}
