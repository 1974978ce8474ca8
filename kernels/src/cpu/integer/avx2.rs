//! AVX2, FMA and F16C: the sums of `portable.rs` in vectors of eight columns.
//!
//! `vpmaddubsw` multiplies 8 columns × 4 k of unsigned weights with signed activations and adds pairs in 16 bits. Values of 4 bits
//! (15 · 127 · 2; 24 · 127 · 2 from codes) may be added four times over before `vpmaddwd` widens the sums and multiplies them with the sub-scales, those of 6
//! bits (63 · 127 · 2) twice. For signed weights of 8 bits the factors change signs: |w| · (x · sign w), at most 128 · 127 · 2 = 32,512,
//! one addition at a time. A line costs some 21 instructions for 8 columns and a row at 4 bits, 36 at 8, where f32 takes 32 for its
//! multiplications alone.

use std::arch::x86_64::*;

use super::{COLUMNS, Form, IntegerFn, IntegerProduct, paired};
use crate::blocks::{LEVELS, LINE};

/// Bytes ahead of the read position that are fetched while a panel is read.
const AHEAD: usize = 2048;

/// Kernel for weights in `form`.
pub(super) fn kernel(form: Form) -> IntegerFn {
    let Form::Blocks(layout) = form else { return rows };
    if layout.codes {
        return packed::<4, 0, false, true, true>;
    }
    match (layout.bits, layout.subs, layout.minimum, layout.zero > 0) {
        (4, 0, false, true) => packed::<4, 0, false, true, false>,
        (4, 0, true, false) => packed::<4, 0, true, false, false>,
        (4, 1, true, false) => packed::<4, 1, true, false, false>,
        (4, 2, false, true) => packed::<4, 2, false, true, false>,
        (4, 2, true, false) => packed::<4, 2, true, false, false>,
        (6, 0, false, true) => packed::<6, 0, false, true, false>,
        (6, 0, true, false) => packed::<6, 0, true, false, false>,
        (6, 1, true, false) => packed::<6, 1, true, false, false>,
        (6, 2, false, true) => packed::<6, 2, false, true, false>,
        (8, 0, false, false) => bytes::<0>,
        (8, 1, false, false) => bytes::<1>,
        _ => super::portable::product,
    }
}

// Each block below is one intrinsic on addresses that `IntegerFn` makes valid. They share their reason: the functions are compiled with
// the features of the instructions and chosen where the machine has them.
macro_rules! load {
    ($at:expr) => {
        // SAFETY: the address lies inside of the panel, the activations or C, by the bounds of the loops.
        unsafe { _mm256_loadu_si256($at.cast()) }
    };
}
macro_rules! read {
    ($at:expr) => {
        // SAFETY: as in `load`, for one value.
        unsafe { $at.read_unaligned() }
    };
}

/// Scales of eight columns, from f16; those of codes from bf16.
///
/// # Safety
/// `at` is valid for 16 bytes; AVX2, FMA and F16C.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scales<const CODES: bool>(at: *const u8) -> __m256 {
    // SAFETY: 16 bytes of the head of some lines.
    let bits = unsafe { _mm_loadu_si128(at.cast()) };
    if CODES {
        return _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)));
    }
    _mm256_cvtph_ps(bits)
}

/// Bytes of eight columns, each twice in 16 bits. `signed` extends the sign.
///
/// # Safety
/// `low` and `high` are valid for 8 bytes each; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn pairs(low: *const u8, high: *const u8, signed: bool) -> __m256i {
    // SAFETY: 8 bytes of sub-scales or sub-minima each.
    let (low, high) = unsafe { (_mm_loadl_epi64(low.cast()), _mm_loadl_epi64(high.cast())) };
    let both = _mm_unpacklo_epi8(low, high);
    if signed { _mm256_cvtepi8_epi16(both) } else { _mm256_cvtepu8_epi16(both) }
}

/// Fetches the bytes that follow, into the first-level cache.
#[inline(always)]
fn ahead(at: *const u8) {
    // SAFETY: a prefetch has no effect but on caches, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast()) };
}

/// Adds one line of eight columns to a row of C: `c = fma(sum, scale · x_scale, c)`.
///
/// # Safety
/// `c` is valid for eight values that are nobody else's; AVX2 and FMA.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add(c: *mut f32, sum: __m256i, scale: __m256, x_scale: __m256) {
    // SAFETY: eight values of C.
    let old = unsafe { _mm256_loadu_ps(c) };
    let new = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, x_scale), old);
    // SAFETY: as above.
    unsafe { _mm256_storeu_ps(c, new) };
}

/// Eight quads of eight columns, unsigned.
///
/// # Safety
/// `values` is valid for the values of a line of `BITS` bits; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn unpack<const BITS: u8, const CODES: bool>(values: *const u8, octet: usize) -> [__m256i; 8] {
    // SAFETY: sixteen bytes.
    let levels = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(LEVELS.as_ptr().cast()) });
    let nibble = _mm256_set1_epi8(15);
    let mut out = [_mm256_setzero_si256(); 8];
    for i in 0..4 {
        let both = load!(values.wrapping_add(octet / 2 * 256 + i * 64 + octet % 2 * 32));
        out[i] = _mm256_and_si256(both, nibble);
        out[i + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble);
    }
    if CODES {
        for out in &mut out {
            *out = _mm256_shuffle_epi8(levels, *out);
        }
        return out;
    }
    if BITS == 6 {
        let mask = _mm256_set1_epi8(0x30);
        for i in 0..2 {
            let high = load!(values.wrapping_add(512 + octet / 2 * 128 + i * 64 + octet % 2 * 32));
            let four = [_mm256_slli_epi16::<4>(high), _mm256_slli_epi16::<2>(high), high, _mm256_srli_epi16::<2>(high)];
            for (out, high) in out[i * 4..i * 4 + 4].iter_mut().zip(four) {
                *out = _mm256_or_si256(*out, _mm256_and_si256(high, mask));
            }
        }
    }
    out
}

/// Sum of the products of a half line (four quads) with a row, times the factors of the columns.
///
/// # Safety
/// `a` is valid for four words; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn half<const BITS: u8>(weights: &[__m256i], a: *const i32, factors: __m256i) -> __m256i {
    let mut parts = [_mm256_setzero_si256(); 4];
    for (i, part) in parts.iter_mut().enumerate() {
        *part = _mm256_maddubs_epi16(weights[i], _mm256_set1_epi32(read!(a.wrapping_add(i))));
    }
    let (low, high) = (_mm256_add_epi16(parts[0], parts[1]), _mm256_add_epi16(parts[2], parts[3]));
    if BITS == 4 {
        _mm256_madd_epi16(_mm256_add_epi16(low, high), factors)
    } else {
        _mm256_add_epi32(_mm256_madd_epi16(low, factors), _mm256_madd_epi16(high, factors))
    }
}

/// Product with weights of 4 or 6 bits.
///
/// # Safety
/// As [`super::IntegerFn`], with AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn packed<const BITS: u8, const SUBS: usize, const MINIMUM: bool, const ZERO: bool, const CODES: bool>(
    p: &IntegerProduct,
) {
    let (form, layout) = (p.form, p.form.layout());
    let (head_bytes, sub_bytes, line_bytes) = (form.head_bytes(), form.sub_bytes(), form.line_bytes());
    // SAFETY: C has `rows` rows of 32 values, nobody else's.
    unsafe { std::ptr::write_bytes(p.c, 0, p.rows * COLUMNS) };
    let (ones, zero) = (_mm256_set1_epi16(1), _mm256_set1_epi16(i16::from(layout.zero)));
    let mut head = p.panel;
    for first in (0..p.k_blocks).step_by(layout.lines) {
        let mut line = head.wrapping_add(head_bytes);
        for k in first..first + layout.lines {
            let values = line.wrapping_add(sub_bytes);
            let a = p.a.wrapping_add(k * p.rows * LINE);
            for octet in 0..4 {
                ahead(values.wrapping_add(octet * 128));
                ahead(values.wrapping_add(octet * 128 + 64));
                if BITS == 6 {
                    ahead(values.wrapping_add(512 + octet * 64));
                }
                // SAFETY: the head has 32 scales, and as many minima if the format has them.
                let scale = unsafe { scales::<CODES>(head.wrapping_add(octet * 16)) };
                let minimum = if MINIMUM {
                    // SAFETY: as above.
                    unsafe { scales::<false>(head.wrapping_add(64 + octet * 16)) }
                } else {
                    scale
                };
                // Factors of the halves of a line: [0] of the first, [1] of the second, [2] of both side by side.
                let sub = |number: usize| line.wrapping_add(number * COLUMNS + octet * 8);
                let factors = match SUBS {
                    0 => [ones; 3],
                    // SAFETY: the line begins with its sub-scales.
                    1 => [unsafe { pairs(sub(0), sub(0), true) }; 3],
                    // SAFETY: as above.
                    _ => unsafe {
                        [pairs(sub(0), sub(0), true), pairs(sub(1), sub(1), true), pairs(sub(0), sub(1), true)]
                    },
                };
                let of_zero = _mm256_mullo_epi16(factors[2], zero);
                let of_minimum = match (MINIMUM, SUBS) {
                    (false, _) | (_, 0) => ones,
                    // SAFETY: the sub-minima follow the sub-scales.
                    (true, 1) => unsafe { pairs(sub(1), sub(1), false) },
                    // SAFETY: as above.
                    (true, _) => unsafe { pairs(sub(2), sub(3), false) },
                };
                // SAFETY: the values of the line.
                let weights = unsafe { unpack::<BITS, CODES>(values, octet) };
                for row in 0..p.rows {
                    let a: *const i32 = a.wrapping_add(row * LINE).cast();
                    // SAFETY: a line of activations is 32 bytes.
                    let low = unsafe { half::<BITS>(&weights[..4], a, factors[0]) };
                    // SAFETY: as above.
                    let high = unsafe { half::<BITS>(&weights[4..], a.wrapping_add(4), factors[1]) };
                    let mut sum = _mm256_add_epi32(low, high);
                    let at = k * p.rows + row;
                    let x_scale = _mm256_set1_ps(read!(p.scales.wrapping_add(at)));
                    let c = p.c.wrapping_add(row * COLUMNS + octet * 8);
                    if ZERO || MINIMUM {
                        let of_a = _mm256_set1_epi32(read!(p.sums.wrapping_add(at)) as i32);
                        if ZERO {
                            sum = _mm256_sub_epi32(sum, _mm256_madd_epi16(of_a, of_zero));
                        }
                        // SAFETY: eight columns of a row of C.
                        unsafe { add(c, sum, scale, x_scale) };
                        if MINIMUM {
                            // SAFETY: as above.
                            unsafe { add(c, _mm256_madd_epi16(of_a, of_minimum), minimum, x_scale) };
                        }
                    } else {
                        // SAFETY: as above.
                        unsafe { add(c, sum, scale, x_scale) };
                    }
                }
            }
            line = line.wrapping_add(line_bytes);
        }
        head = line;
    }
}

/// Adds the products of a line of signed weights with `R` rows to the sums of 32 columns.
///
/// # Safety
/// `values` is valid for 1024 bytes, each of `a` for eight words; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn signed<const R: usize>(values: *const u8, a: [*const i32; R], sums: &mut [[__m256i; 4]; R]) {
    let ones = _mm256_set1_epi16(1);
    for quad in 0..8 {
        let mut x = [_mm256_setzero_si256(); R];
        for (x, a) in x.iter_mut().zip(a) {
            *x = _mm256_set1_epi32(read!(a.wrapping_add(quad)));
        }
        ahead(values.wrapping_add(quad * 128));
        ahead(values.wrapping_add(quad * 128 + 64));
        for octet in 0..4 {
            let weights = load!(values.wrapping_add(quad * 128 + octet * 32));
            let magnitude = _mm256_abs_epi8(weights);
            for (sums, x) in sums.iter_mut().zip(x) {
                let pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, weights));
                sums[octet] = _mm256_add_epi32(sums[octet], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
}

/// Product with blocks of 8 bits.
///
/// # Safety
/// As [`super::IntegerFn`], with AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bytes<const SUBS: usize>(p: &IntegerProduct) {
    // SAFETY: C has `rows` rows of 32 values, nobody else's.
    unsafe { std::ptr::write_bytes(p.c, 0, p.rows * COLUMNS) };
    let (lines, head_bytes, line_bytes) = (p.form.layout().lines, p.form.head_bytes(), p.form.line_bytes());
    let mut head = p.panel;
    for first in (0..p.k_blocks).step_by(lines) {
        let mut line = head.wrapping_add(head_bytes);
        for k in first..first + lines {
            let mut row = 0;
            while row + 2 <= p.rows {
                // SAFETY: the line and the rows exist.
                unsafe { bytes_line::<2, SUBS>(p, head, line, k, row) };
                row += 2;
            }
            if row < p.rows {
                // SAFETY: as above.
                unsafe { bytes_line::<1, SUBS>(p, head, line, k, row) };
            }
            line = line.wrapping_add(line_bytes);
        }
        head = line;
    }
}

/// One line of `R` rows of [`bytes`], from row `first` on. `head`: scales of the line and its neighbours.
///
/// # Safety
/// As [`super::IntegerFn`]; the scales, the line and the rows exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bytes_line<const R: usize, const SUBS: usize>(
    p: &IntegerProduct,
    head: *const u8,
    line: *const u8,
    k: usize,
    first: usize,
) {
    let mut sums = [[_mm256_setzero_si256(); 4]; R];
    let mut a = [p.a.cast(); R];
    for (row, a) in a.iter_mut().enumerate() {
        *a = p.a.wrapping_add((k * p.rows + first + row) * LINE).cast();
    }
    // SAFETY: the values follow the sub-scales; a line of activations is 32 bytes.
    unsafe { signed::<R>(line.wrapping_add(SUBS * COLUMNS), a, &mut sums) };
    for (row, sums) in sums.iter().enumerate() {
        let x_scale = _mm256_set1_ps(read!(p.scales.wrapping_add(k * p.rows + first + row)));
        for (octet, &sum) in sums.iter().enumerate() {
            // SAFETY: the head has 32 scales.
            let scale = unsafe { scales::<false>(head.wrapping_add(octet * 16)) };
            let sum = if SUBS == 0 {
                sum
            } else {
                // SAFETY: the line begins with its sub-scales, eight of them for these columns.
                let sub = unsafe { _mm_loadl_epi64(line.wrapping_add(octet * 8).cast()) };
                _mm256_mullo_epi32(sum, _mm256_cvtepi8_epi32(sub))
            };
            // SAFETY: eight columns of a row of C.
            unsafe { add(p.c.wrapping_add((first + row) * COLUMNS + octet * 8), sum, scale, x_scale) };
        }
    }
}

/// Product with 8 bits and one scale per row of the matrix.
///
/// # Safety
/// As [`super::IntegerFn`], with AVX2 and FMA.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows(p: &IntegerProduct) {
    let mut row = 0;
    while row + 2 <= p.rows {
        // SAFETY: the rows exist.
        unsafe { whole_rows::<2>(p, row) };
        row += 2;
    }
    if row < p.rows {
        // SAFETY: as above.
        unsafe { whole_rows::<1>(p, row) };
    }
}

/// `R` rows of [`rows`], from row `first` on.
///
/// # Safety
/// As [`super::IntegerFn`]; the rows exist.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn whole_rows<const R: usize>(p: &IntegerProduct, first: usize) {
    let mut sums = [[_mm256_setzero_si256(); 4]; R];
    for k in 0..p.k_blocks {
        let mut a = [p.a.cast(); R];
        for (row, a) in a.iter_mut().enumerate() {
            *a = p.a.wrapping_add(paired(p.k_blocks, p.rows, k, first + row) * LINE).cast();
        }
        // SAFETY: the panel begins with `k_blocks` lines of 1024 values; a line of activations is 32 bytes.
        unsafe { signed::<R>(p.panel.wrapping_add(k * LINE * COLUMNS), a, &mut sums) };
    }
    let scales: *const f32 = p.panel.wrapping_add(p.k_blocks * LINE * COLUMNS).cast();
    for (row, sums) in sums.iter().enumerate() {
        let x_scale = _mm256_set1_ps(read!(p.scales.wrapping_add(first + row)));
        for (octet, &sum) in sums.iter().enumerate() {
            // SAFETY: 32 scales end the panel.
            let scale = unsafe { _mm256_loadu_ps(scales.wrapping_add(octet * 8)) };
            let value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, x_scale));
            // SAFETY: eight columns of a row of C.
            unsafe { _mm256_storeu_ps(p.c.wrapping_add((first + row) * COLUMNS + octet * 8), value) };
        }
    }
}
