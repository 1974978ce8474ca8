//! Sixteen f32 at once, twice: an AVX-512 register and a plain array, with the same bits from every function.
//!
//! Everything outside of the matrix products is written once, generic over [`Lanes`], and instantiated per path (`vector.rs`).
//! Each operation here is one IEEE operation per lane (no contraction, no reassociation), so both sorts agree bit for bit.

#![expect(clippy::needless_range_loop, reason = "loops over lane numbers are what compilers make vectors of")]

/// Vector of sixteen f32. Functions are `inline(always)`, so that they are compiled with the instruction set of the
/// kernel that uses them.
pub(super) trait Lanes: Copy {
    fn splat(value: f32) -> Self;
    fn load(from: &[f32; 16]) -> Self;
    fn store(self, to: &mut [f32; 16]);
    /// Values of bfloat16, exactly.
    fn from_bf16(from: &[u16; 16]) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// Fused multiply-add `self · b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    /// Maximum as `if self > other { self } else { other }`: a NaN in either gives `other`.
    fn max(self, other: Self) -> Self;
    /// Minimum, as [`Lanes::max`] with `<`.
    fn min(self, other: Self) -> Self;
    /// Selection: lanes whose bit in `mask` is set; `other` elsewhere.
    fn keep(self, mask: u16, other: f32) -> Self;
    /// Selection: zero where `x < limit`, self elsewhere.
    fn zero_below(self, x: Self, limit: f32) -> Self;
    /// Power `2^n` where self is `1.5·2^23 + n`, `-126 <= n <= 127`.
    fn power_of_two(self) -> Self;
    /// Nearest bfloat16, ties to even; values below the smallest normal become zero (as AMX and `vdpbf16ps` read them).
    fn to_bf16(self, to: &mut [u16; 16]);
}

/// Converts one scalar to bfloat16, as [`Lanes::to_bf16`] does.
#[inline(always)]
pub(super) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return (bits >> 16) as u16 | 0x40;
    }
    if magnitude < 0x0080_0000 {
        return (bits >> 16) as u16 & 0x8000;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Converts one bfloat16 to f32, exactly.
#[inline(always)]
pub(super) fn from_bf16(value: u16) -> f32 {
    f32::from_bits(u32::from(value) << 16)
}

/// Sum of all lanes in one fixed tree.
#[inline(always)]
pub(super) fn sum<V: Lanes>(lanes: V) -> f32 {
    let mut a = [0.0; 16];
    lanes.store(&mut a);
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            a[i] += a[i + width];
        }
    }
    a[0]
}

/// Largest lane; exact in any order.
#[inline(always)]
pub(super) fn highest<V: Lanes>(lanes: V) -> f32 {
    let mut a = [0.0; 16];
    lanes.store(&mut a);
    a.iter().fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m })
}

/// Portable vector of sixteen f32 lanes, a plain array.
#[derive(Clone, Copy)]
pub(super) struct Array([f32; 16]);

impl Array {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = [0.0; 16];
        for i in 0..16 {
            out[i] = f(self.0[i], other.0[i]);
        }
        Self(out)
    }
}

impl Lanes for Array {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; 16])
    }
    #[inline(always)]
    fn load(from: &[f32; 16]) -> Self {
        Self(*from)
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        *to = self.0;
    }
    #[inline(always)]
    fn from_bf16(from: &[u16; 16]) -> Self {
        Self(from.map(from_bf16))
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        let mut out = [0.0; 16];
        for i in 0..16 {
            out[i] = self.0[i].mul_add(b.0[i], c.0[i]);
        }
        Self(out)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn keep(self, mask: u16, other: f32) -> Self {
        let mut out = self.0;
        for (i, o) in out.iter_mut().enumerate() {
            *o = if mask >> i & 1 == 1 { *o } else { other };
        }
        Self(out)
    }
    #[inline(always)]
    fn zero_below(self, x: Self, limit: f32) -> Self {
        self.zip(x, |value, x| if x < limit { 0.0 } else { value })
    }
    #[inline(always)]
    fn power_of_two(self) -> Self {
        Self(self.0.map(|v| f32::from_bits((v.to_bits() << 23).wrapping_add(0x3f80_0000))))
    }
    #[inline(always)]
    fn to_bf16(self, to: &mut [u16; 16]) {
        *to = self.0.map(to_bf16);
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use zmm::Zmm;

#[cfg(target_arch = "x86_64")]
mod zmm {
    use std::arch::x86_64::*;

    use super::Lanes;

    /// AVX-512 vector, one register. Named only by kernels that `detect.rs` offers where AVX-512 F, BW, DQ and VL
    /// exist.
    #[derive(Clone, Copy)]
    pub(in crate::cpu) struct Zmm(__m512);

    // Each block below is one intrinsic. They share their reason: AVX-512 exists wherever `Zmm` is named.
    macro_rules! avx512 {
        ($e:expr) => {
            // SAFETY: `Zmm` is only used by kernels chosen after AVX-512 was detected; memory operands are references to
            // arrays of the register's size.
            unsafe { $e }
        };
    }

    impl Lanes for Zmm {
        #[inline(always)]
        fn splat(value: f32) -> Self {
            Self(avx512!(_mm512_set1_ps(value)))
        }
        #[inline(always)]
        fn load(from: &[f32; 16]) -> Self {
            Self(avx512!(_mm512_loadu_ps(from.as_ptr())))
        }
        #[inline(always)]
        fn store(self, to: &mut [f32; 16]) {
            avx512!(_mm512_storeu_ps(to.as_mut_ptr(), self.0));
        }
        #[inline(always)]
        fn from_bf16(from: &[u16; 16]) -> Self {
            let narrow = avx512!(_mm256_loadu_si256(from.as_ptr().cast()));
            let wide = avx512!(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)));
            Self(avx512!(_mm512_castsi512_ps(wide)))
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            Self(avx512!(_mm512_add_ps(self.0, other.0)))
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            Self(avx512!(_mm512_sub_ps(self.0, other.0)))
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            Self(avx512!(_mm512_mul_ps(self.0, other.0)))
        }
        #[inline(always)]
        fn div(self, other: Self) -> Self {
            Self(avx512!(_mm512_div_ps(self.0, other.0)))
        }
        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            Self(avx512!(_mm512_fmadd_ps(self.0, b.0, c.0)))
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            Self(avx512!(_mm512_max_ps(self.0, other.0)))
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            Self(avx512!(_mm512_min_ps(self.0, other.0)))
        }
        #[inline(always)]
        fn keep(self, mask: u16, other: f32) -> Self {
            Self(avx512!(_mm512_mask_blend_ps(mask, _mm512_set1_ps(other), self.0)))
        }
        #[inline(always)]
        fn zero_below(self, x: Self, limit: f32) -> Self {
            let keep = avx512!(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_ps(limit)));
            Self(avx512!(_mm512_maskz_mov_ps(keep, self.0)))
        }
        #[inline(always)]
        fn power_of_two(self) -> Self {
            let bits = avx512!(_mm512_slli_epi32::<23>(_mm512_castps_si512(self.0)));
            Self(avx512!(_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3f80_0000)))))
        }
        #[inline(always)]
        fn to_bf16(self, to: &mut [u16; 16]) {
            let bits = avx512!(_mm512_castps_si512(self.0));
            let odd = avx512!(_mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1)));
            let carry = avx512!(_mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let rounded = avx512!(_mm512_add_epi32(bits, carry));
            // Zero and subnormal values keep their sign alone; a NaN is quieted rather than rounded up to infinity.
            let small = avx512!(_mm512_fpclass_ps_mask::<0x26>(self.0));
            let nan = avx512!(_mm512_fpclass_ps_mask::<0x81>(self.0));
            let signed = avx512!(_mm512_mask_and_epi32(rounded, small, bits, _mm512_set1_epi32(i32::MIN)));
            let all = avx512!(_mm512_mask_or_epi32(signed, nan, bits, _mm512_set1_epi32(0x40_0000)));
            let narrow = avx512!(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(all)));
            avx512!(_mm256_storeu_si256(to.as_mut_ptr().cast(), narrow));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bf16_rounds_to_even_and_flushes() {
        let check = |value: f32, want: u16| {
            let mut out = [0; 16];
            Array::splat(value).to_bf16(&mut out);
            assert_eq!((to_bf16(value), out[3]), (want, want), "{value}");
        };
        check(1.0, 0x3f80);
        check(f32::from_bits(0x3f80_8000), 0x3f80);
        check(f32::from_bits(0x3f81_8000), 0x3f82);
        check(f32::MAX, 0x7f80);
        check(f32::NEG_INFINITY, 0xff80);
        check(f32::from_bits(0x7f80_0001), 0x7fc0);
        check(-1e-39, 0x8000);
        check(0.0, 0);
    }

    proptest! {
        #[test]
        fn rounding_agrees_with_half(value in proptest::num::f32::NORMAL) {
            prop_assert_eq!(to_bf16(value), half::bf16::from_f32(value).to_bits());
            prop_assert_eq!(from_bf16(to_bf16(value)), half::bf16::from_f32(value).to_f32());
        }

        #[cfg(target_arch = "x86_64")]
        #[test]
        fn both_sorts_agree(bits in proptest::array::uniform16(any::<u32>()), mask in any::<u16>()) {
            if super::super::detect::Path::Avx512.missing().is_some() {
                return Ok(());
            }
            let (values, mut a, mut b) = (bits.map(f32::from_bits), [0; 16], [0; 16]);
            Array::load(&values).to_bf16(&mut a);
            Zmm::load(&values).to_bf16(&mut b);
            prop_assert_eq!(a, b);
            let (mut x, mut y) = ([0.0; 16], [0.0; 16]);
            Array::load(&values).keep(mask, 1.0).zero_below(Array::load(&values), 0.5).store(&mut x);
            Zmm::load(&values).keep(mask, 1.0).zero_below(Zmm::load(&values), 0.5).store(&mut y);
            prop_assert_eq!(x.map(f32::to_bits), y.map(f32::to_bits));
            Array::from_bf16(&a).store(&mut x);
            Zmm::from_bf16(&a).store(&mut y);
            prop_assert_eq!((x.map(f32::to_bits), y.map(f32::to_bits)), (a.map(from_bf16).map(f32::to_bits), x.map(f32::to_bits)));
            Array::load(&a.map(from_bf16)).max(Array::splat(2.0)).power_of_two().store(&mut x);
            Zmm::load(&a.map(from_bf16)).max(Zmm::splat(2.0)).power_of_two().store(&mut y);
            prop_assert_eq!(x.map(f32::to_bits), y.map(f32::to_bits));
        }
    }
}
