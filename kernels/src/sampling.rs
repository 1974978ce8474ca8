//! Arithmetic of drawing a token, the same bits on every machine: own exponential without fused operations, and a fixed order of every sum.
//!
//! The engine's sampler calls these functions, and they are the reference of a device that draws by itself ([`Pick::Draw`](crate::Pick)).

/// Values per partial sum; partial sums are added in order.
pub const CHUNK: usize = 1024;
/// Sums side by side in a chunk.
const LANES: usize = 16;

/// Exponential `e^x` for `x ≤ 0`, 0 below −87. Cephes' polynomial, no fused operations: the same bits everywhere,
/// error below 2 ulp.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
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

/// Sum `Σ e^((v − max)·scale)` over one chunk, in f64: sixteen sums side by side, added in order, then the values that do not fill them.
#[inline]
pub fn sum_exp_chunk(chunk: &[f32], max: f32, scale: f32) -> f64 {
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

/// Draws from the whole vocabulary with weights `e^((v − max)·scale)`, in order of tokens: chunk sums first, then inside one chunk.
///
/// `values`: logits, `[vocab]`, of which `max` is the largest; `scale`: 1 / temperature; `uniform`: random number in [0, 1); `chunks`: a buffer
/// that is reused.
pub fn draw_from_all(values: &[f32], max: f32, scale: f32, uniform: f64, chunks: &mut Vec<f64>) -> u32 {
    chunks.clear();
    chunks.extend(values.chunks(CHUNK).map(|chunk| sum_exp_chunk(chunk, max, scale)));
    let total: f64 = chunks.iter().sum();
    let mut left = uniform * total;
    let mut at = 0;
    for (n, sum) in chunks.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
        at = n;
        if left < *sum {
            break;
        }
        left -= sum;
    }
    let first = at * CHUNK;
    let chunk = &values[first..(first + CHUNK).min(values.len())];
    let mut last = 0;
    for (n, value) in chunk.iter().enumerate() {
        let weight = f64::from(exp((value - max) * scale));
        if weight > 0.0 {
            last = n;
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
    }
    (first + last) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
