//! exp, SiLU, both GELUs, tanh and a clamped SwiGLU over [`Lanes`]: one polynomial for every path, so that its error is part of the numerics and not of the machine.

use super::lanes::Lanes;

/// Limit below which exp gives 0 (its true value is under 1.7e-38, the last normal number being 1.2e-38).
pub(super) const EXP_LOWEST: f32 = -87.0;
/// Limit above which exp stays at e^88 = 1.65e38.
const EXP_HIGHEST: f32 = 88.0;

/// Exponential e^x with a relative error below 2e-7 on [-87, 88]; 0 below, e^88 above, NaN for NaN.
///
/// x = n·ln 2 + r with |r| <= ln 2 / 2; e^r by the polynomial of Cephes' `expf` (S. L. Moshier).
#[inline(always)]
pub(super) fn exp<V: Lanes>(x: V) -> V {
    // Adding 1.5·2^23 rounds to an integer, which then sits in the low mantissa bits.
    const MAGIC: f32 = 12_582_912.0;
    let bounded = V::splat(EXP_HIGHEST).min(V::splat(EXP_LOWEST).max(x));
    let shifted = bounded.fma(V::splat(std::f32::consts::LOG2_E), V::splat(MAGIC));
    let n = shifted.sub(V::splat(MAGIC));
    let r = n.fma(V::splat(-0.693_359_4), bounded);
    let r = n.fma(V::splat(2.121_944_4e-4), r);
    let mut p = V::splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p.fma(r, V::splat(c));
    }
    let value = p.fma(r.mul(r), r).add(V::splat(1.0)).mul(shifted.power_of_two());
    value.zero_below(x, EXP_LOWEST)
}

/// SiLU activation of each lane: x · sigmoid(x).
#[inline(always)]
pub(super) fn silu<V: Lanes>(x: V) -> V {
    let denominator = V::splat(1.0).add(exp(V::splat(0.0).sub(x)));
    x.div(denominator)
}

/// GELU activation of each lane in its approximation by tanh. `(1 + tanh u) / 2` is the sigmoid of `2u`, which loses nothing where tanh
/// nears -1.
#[inline(always)]
pub(super) fn gelu_tanh<V: Lanes>(x: V) -> V {
    // -2 · √(2/π), and that times 0.044715.
    const LINEAR: f32 = -1.595_769;
    const CUBIC: f32 = -0.071_354_814;
    let exponent = x.mul(x).fma(V::splat(CUBIC), V::splat(LINEAR)).mul(x);
    x.div(V::splat(1.0).add(exp(exponent)))
}

/// GELU activation of each lane by the error function, as `max(x, 0) - |x| · Φ(-|x|)`, which cancels nowhere; NaN for NaN.
///
/// `Φ(-|x|) = erfc(|x| / √2) / 2` by the approximation of Press et al. ("Numerical Recipes", `erfcc`), whose relative error is below 1.2e-7
/// everywhere.
#[inline(always)]
pub(super) fn gelu_erf<V: Lanes>(x: V) -> V {
    // Coefficients of t^9 to t^1.
    const SERIES: [f32; 9] = [
        0.170_872_77,
        -0.822_152_23,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
    ];
    // Beyond 30 the value is 0 in any case; a bound keeps infinity out of the product.
    let size = V::splat(30.0).min(x.max(V::splat(0.0).sub(x)));
    let z = size.mul(V::splat(std::f32::consts::FRAC_1_SQRT_2));
    let t = V::splat(1.0).div(z.fma(V::splat(0.5), V::splat(1.0)));
    let mut p = V::splat(SERIES[0]);
    for c in &SERIES[1..] {
        p = p.fma(t, V::splat(*c));
    }
    let p = p.fma(t, V::splat(-1.265_512_2));
    let tail = exp(V::splat(0.0).sub(z).fma(z, p)).mul(t).mul(V::splat(0.5));
    V::splat(0.0).max(x).sub(size.mul(tail))
}

/// GPT-OSS's function of gate and up ([`Activation::ClampedSwiglu`](crate::device::Activation::ClampedSwiglu)); NaN if either is.
#[inline(always)]
pub(super) fn clamped_swiglu<V: Lanes>(gate: V, up: V, limit: f32, alpha: f32) -> V {
    // The bound comes first: a NaN on the right stays.
    let gate = V::splat(limit).min(gate);
    let up = V::splat(-limit).max(V::splat(limit).min(up));
    let denominator = V::splat(1.0).add(exp(gate.mul(V::splat(-alpha))));
    gate.div(denominator).mul(up.add(V::splat(1.0)))
}

/// Hyperbolic tangent with an absolute error below 2e-7; NaN for NaN.
#[inline(always)]
pub(super) fn tanh<V: Lanes>(x: V) -> V {
    let one = V::splat(1.0);
    one.sub(V::splat(2.0).div(exp(x.add(x)).add(one)))
}

/// Soft cap `cap · tanh(x / cap)` of each lane.
#[inline(always)]
pub(super) fn soft_capped<V: Lanes>(x: V, cap: f32) -> V {
    tanh(x.div(V::splat(cap))).mul(V::splat(cap))
}

#[cfg(test)]
mod tests {
    use super::super::lanes::Array;
    use super::*;

    fn one(f: fn(Array) -> Array, x: f32) -> f32 {
        let mut out = [0.0; 16];
        f(Array::splat(x)).store(&mut out);
        out[7]
    }

    #[test]
    fn exp_is_within_its_stated_error() {
        let mut worst = 0.0f64;
        for i in 0..=1_750_000 {
            let x = (-87.0 + f64::from(i) * 1e-4) as f32;
            let (got, want) = (f64::from(one(exp, x)), f64::from(x).exp());
            worst = worst.max((got / want - 1.0).abs());
        }
        assert!(worst < 2e-7, "{worst}");
        assert_eq!((one(exp, 0.0), one(exp, -87.1), one(exp, f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert!(one(exp, 1000.0).is_finite() && one(exp, f32::NAN).is_nan());
    }

    #[test]
    fn silu_is_right_at_both_ends() {
        for x in [-1e30f32, -200.0, -90.0, -20.0, -1.0, -0.0, 0.0, 0.3, 5.0, 88.0, 300.0] {
            let want = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            let got = f64::from(one(silu, x));
            // Below -88 the true value is smaller than 1e-36; e^88 in place of e^-x leaves at most |x| · 6e-39.
            let slack = if x < -88.0 { f64::from(x.abs()) * 7e-39 } else { 1e-37 };
            assert!((got - want).abs() <= want.abs() * 4e-7 + slack, "silu({x}) = {got}, not {want}");
        }
        assert!(one(silu, f32::NAN).is_nan());
    }

    #[test]
    fn gelu_is_right_at_both_ends_and_between() {
        for i in -4000..=4000 {
            let x = i as f32 / 200.0;
            let (wide, got) = (f64::from(x), f64::from(one(gelu_tanh, x)));
            // tanh u = 1 - 2 / (e^2u + 1) cancels at its lower end; the sigmoid does not.
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide.powi(3));
            let want = wide / (1.0 + (-2.0 * inner).exp());
            // The exponent is up to 87 with an error of 2^-22 of it; beyond that the value is below 1e-36.
            assert!((got - want).abs() <= want.abs() * 2e-5 + 2e-36, "gelu({x}) = {got}, not {want}");
        }
        assert_eq!((one(gelu_tanh, 0.0), one(gelu_tanh, 200.0)), (0.0, 200.0));
        assert!(one(gelu_tanh, -200.0).abs() < 1e-35 && one(gelu_tanh, f32::NAN).is_nan());
    }

    #[test]
    fn the_gelu_of_the_error_function_is_right_at_both_ends_and_between() {
        // x · Φ(x), by the C library's erfc in f64.
        for (x, want) in [
            (-30.0f32, -1.472_014_9e-196),
            (-8.0, -4.976_768_6e-15),
            (-5.0, -1.433_257_9e-6),
            (-3.0, -4.049_694_0e-3),
            (-1.0, -1.586_552_539_3e-1),
            (-0.751_791_5, -1.699_712_1e-1),
            (-0.1, -4.601_721_6e-2),
            (1e-6, 5.000_004e-7),
            (0.1, 5.398_278_4e-2),
            (1.0, 8.413_447_460_7e-1),
            (3.0, 2.995_950_306_0),
            (6.0, 5.999_999_994_1),
        ] {
            let got = f64::from(one(gelu_erf, x));
            assert!((got - want).abs() <= 2e-6 * f64::abs(want) + 1e-37, "gelu({x}) = {got}, not {want}");
        }
        assert_eq!(
            (one(gelu_erf, 0.0), one(gelu_erf, 200.0), one(gelu_erf, f32::INFINITY)),
            (0.0, 200.0, f32::INFINITY)
        );
        assert!(one(gelu_erf, -1e30) == 0.0 && one(gelu_erf, f32::NAN).is_nan());
    }

    #[test]
    fn the_clamped_swiglu_is_right_within_its_limits_and_beyond() {
        let of = |gate: f32, up: f32| {
            let mut out = [0.0; 16];
            clamped_swiglu(Array::splat(gate), Array::splat(up), 7.0, 1.702).store(&mut out);
            out[3]
        };
        for i in -1200..=1200 {
            for up in [-1e30f32, -7.5, -7.0, -1.0, 0.0, 0.3, 7.0, 8.0, f32::INFINITY] {
                let gate = i as f32 / 100.0;
                let (g, u) = (f64::from(gate).min(7.0), f64::from(up).clamp(-7.0, 7.0));
                let want = g / (1.0 + (-1.702 * g).exp()) * (u + 1.0);
                let got = f64::from(of(gate, up));
                assert!((got - want).abs() <= 2e-6 * want.abs() + 1e-12, "{gate}, {up}: {got}, not {want}");
            }
        }
        assert!(of(-1000.0, 1.0).abs() < 1e-30);
        assert!(of(f32::NAN, 1.0).is_nan() && of(1.0, f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_within_its_stated_error() {
        let mut worst = 0.0f64;
        for i in -400_000..=400_000 {
            let x = i as f32 / 20_000.0;
            worst = worst.max((f64::from(one(tanh, x)) - f64::from(x).tanh()).abs());
        }
        assert!(worst < 2e-7, "{worst}");
        assert_eq!((one(tanh, 0.0), one(tanh, 1e30), one(tanh, -1e30)), (0.0, 1.0, -1.0));
        assert_eq!((one(tanh, f32::INFINITY), one(tanh, f32::NEG_INFINITY)), (1.0, -1.0));
        assert!(one(tanh, f32::NAN).is_nan());
    }
}
