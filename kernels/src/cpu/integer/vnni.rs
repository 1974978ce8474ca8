//! AVX-512 with VNNI: the sums of `portable.rs` in vectors of sixteen columns.
//!
//! `vpdpbusd` multiplies 16 columns × 4 k of unsigned weights with signed activations and adds the four products to a sum of 32 bits:
//! 64 multiplications an instruction, eight of them for a line of 16 columns and a row. What is subtracted from each weight (the zero of a
//! format; 128 where signed weights are made unsigned by flipping their sign bits) begins the sum, times Σ x, with its sign changed.
//!
//! Products with sub-scales are taken in f32, where they are exact: at most 65,024 · 128 · 2 (Q6_K), less than 2²⁴.
//!
//! C stays in registers over all k. Eight rows meet sixteen columns at a time, four rows or fewer all 32, so that a panel that comes from
//! memory is read once and in order.

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

/// Runs `$block::<R, G, …>(p, row, group)` for all rows: `R` rows and `G` groups of sixteen columns at a time.
macro_rules! all_rows {
    ($p:expr, $block:ident $(, $more:expr)*) => {{
        let mut row = 0;
        while row < $p.rows {
            // SAFETY: the rows and groups exist, and the instructions, by the caller's promise.
            row += unsafe {
                match $p.rows - row {
                    8.. => {
                        $block::<8, 1 $(, $more)*>($p, row, 0);
                        $block::<8, 1 $(, $more)*>($p, row, 1);
                        8
                    }
                    4..8 => {
                        $block::<4, 2 $(, $more)*>($p, row, 0);
                        4
                    }
                    2 | 3 => {
                        $block::<2, 2 $(, $more)*>($p, row, 0);
                        2
                    }
                    _ => {
                        $block::<1, 2 $(, $more)*>($p, row, 0);
                        1
                    }
                }
            };
        }
    }};
}

// Each block below is one intrinsic on addresses that `IntegerFn` makes valid. They share their reason: the functions are compiled with
// the features of the instructions and chosen where the machine has them.
macro_rules! load {
    ($at:expr) => {
        // SAFETY: the address lies inside of the panel, by the bounds of the loops.
        unsafe { _mm512_loadu_si512($at.cast()) }
    };
}
macro_rules! read {
    ($at:expr) => {
        // SAFETY: as in `load`, for one value of the activations, their scales or their sums.
        unsafe { $at.read_unaligned() }
    };
}

/// Scales of sixteen columns, from f16; those of codes from bf16.
///
/// # Safety
/// `at` is valid for 32 bytes; AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn scales<const CODES: bool>(at: *const u8) -> __m512 {
    // SAFETY: 32 bytes of the head of some lines.
    let bits = unsafe { _mm256_loadu_si256(at.cast()) };
    if CODES {
        return _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)));
    }
    _mm512_cvtph_ps(bits)
}

/// Bytes of sixteen columns as f32.
///
/// # Safety
/// `at` is valid for 16 bytes; AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn factors<const SIGNED: bool>(at: *const u8) -> __m512 {
    // SAFETY: 16 sub-scales or sub-minima.
    let bytes = unsafe { _mm_loadu_si128(at.cast()) };
    _mm512_cvtepi32_ps(if SIGNED { _mm512_cvtepi8_epi32(bytes) } else { _mm512_cvtepu8_epi32(bytes) })
}

/// Fetches the bytes that follow, into the first-level cache.
#[inline(always)]
pub(super) fn ahead(at: *const u8) {
    // SAFETY: a prefetch has no effect but on caches, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast()) };
}

/// Sums of the two halves of a line of activations.
#[inline(always)]
pub(super) fn halves(word: u32) -> [i32; 2] {
    [i32::from(word as i16), (word as i32) >> 16]
}

/// Four quads of sixteen columns, unsigned: those of half `half` of a line.
///
/// # Safety
/// `low` is valid for 256 bytes, `high` for 128 if `BITS` is 6; AVX-512 F and BW.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn unpack<const BITS: u8, const CODES: bool>(
    low: *const u8,
    high: *const u8,
    half: usize,
) -> [__m512i; 4] {
    let nibble = _mm512_set1_epi8(15);
    let mut out = [_mm512_setzero_si512(); 4];
    for (i, out) in out.iter_mut().enumerate() {
        let both = load!(low.wrapping_add(i * 64));
        *out = _mm512_and_si512(if half == 0 { both } else { _mm512_srli_epi16::<4>(both) }, nibble);
    }
    if CODES {
        // SAFETY: sixteen bytes.
        let levels = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(LEVELS.as_ptr().cast()) });
        for out in &mut out {
            *out = _mm512_shuffle_epi8(levels, *out);
        }
        return out;
    }
    if BITS == 6 {
        let (mask, high) = (_mm512_set1_epi8(0x30), load!(high.wrapping_add(half * 64)));
        let four = [_mm512_slli_epi16::<4>(high), _mm512_slli_epi16::<2>(high), high, _mm512_srli_epi16::<2>(high)];
        for (out, high) in out.iter_mut().zip(four) {
            *out = _mm512_or_si512(*out, _mm512_and_si512(high, mask));
        }
    }
    out
}

/// Product with weights of 4 or 6 bits.
///
/// # Safety
/// As [`super::IntegerFn`], with AVX-512 F, BW and VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn packed<const BITS: u8, const SUBS: usize, const MINIMUM: bool, const ZERO: bool, const CODES: bool>(
    p: &IntegerProduct,
) {
    all_rows!(p, packed_rows, BITS, SUBS, MINIMUM, ZERO, CODES);
}

/// `R` rows of [`packed`] from row `first` on, and `G` groups of sixteen columns from `group` on.
///
/// # Safety
/// As [`super::IntegerFn`]; the rows and groups exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn packed_rows<
    const R: usize,
    const G: usize,
    const BITS: u8,
    const SUBS: usize,
    const MINIMUM: bool,
    const ZERO: bool,
    const CODES: bool,
>(
    p: &IntegerProduct,
    first: usize,
    group: usize,
) {
    let (form, layout) = (p.form, p.form.layout());
    let (head_bytes, sub_bytes, line_bytes) = (form.head_bytes(), form.sub_bytes(), form.line_bytes());
    let zero = if ZERO { i32::from(layout.zero) } else { 0 };
    let mut c = [[_mm512_setzero_ps(); G]; R];
    let mut line = p.panel;
    for from in (0..p.k_blocks).step_by(layout.lines) {
        let head = line;
        line = line.wrapping_add(head_bytes);
        for k in from..from + layout.lines {
            let at = k * p.rows + first;
            for g in 0..G {
                let (column, place) = ((group + g) * 16, group + g);
                let (low, high) =
                    (line.wrapping_add(sub_bytes + place * 256), line.wrapping_add(sub_bytes + 512 + place * 128));
                (0..4).for_each(|i| ahead(low.wrapping_add(i * 64)));
                if BITS == 6 {
                    (0..2).for_each(|i| ahead(high.wrapping_add(i * 64)));
                }
                // Exact sums over the line, of sub-scales times products.
                let mut sums = [_mm512_setzero_ps(); R];
                let mut acc = [_mm512_setzero_si512(); R];
                for half in 0..2 {
                    if ZERO && (half == 0 || SUBS == 2) {
                        for (row, acc) in acc.iter_mut().enumerate() {
                            let [one, other] = halves(read!(p.sums.wrapping_add(at + row)));
                            let of_x = if SUBS == 2 { [one, other][half] } else { one + other };
                            *acc = _mm512_set1_epi32(-zero * of_x);
                        }
                    } else if SUBS == 2 {
                        acc = [_mm512_setzero_si512(); R];
                    }
                    // SAFETY: the values of the line.
                    let weights = unsafe { unpack::<BITS, CODES>(low, high, half) };
                    for (quad, &weights) in weights.iter().enumerate() {
                        for (row, acc) in acc.iter_mut().enumerate() {
                            let x: *const i32 = p.a.wrapping_add((at + row) * LINE).cast();
                            let x = _mm512_set1_epi32(read!(x.wrapping_add(half * 4 + quad)));
                            *acc = _mm512_dpbusd_epi32(*acc, weights, x);
                        }
                    }
                    if SUBS == 2 {
                        // SAFETY: the line begins with its sub-scales.
                        let sub = unsafe { factors::<true>(line.wrapping_add(half * COLUMNS + column)) };
                        for (sum, acc) in sums.iter_mut().zip(acc) {
                            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc), sub, *sum);
                        }
                    }
                }
                if SUBS == 1 {
                    // SAFETY: as above.
                    let sub = unsafe { factors::<true>(line.wrapping_add(column)) };
                    for (sum, acc) in sums.iter_mut().zip(acc) {
                        *sum = _mm512_mul_ps(_mm512_cvtepi32_ps(acc), sub);
                    }
                } else if SUBS == 0 {
                    for (sum, acc) in sums.iter_mut().zip(acc) {
                        *sum = _mm512_cvtepi32_ps(acc);
                    }
                }
                // SAFETY: the head has 32 scales.
                let scale = unsafe { scales::<CODES>(head.wrapping_add(column * 2)) };
                for (row, (c, &sum)) in c.iter_mut().zip(&sums).enumerate() {
                    let x_scale = _mm512_set1_ps(read!(p.scales.wrapping_add(at + row)));
                    c[g] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, x_scale), c[g]);
                }
                if MINIMUM {
                    // SAFETY: the minima follow the scales.
                    let minimum = unsafe { scales::<false>(head.wrapping_add(64 + column * 2)) };
                    let mut sub = [minimum; 2];
                    for (number, sub) in sub[..SUBS].iter_mut().enumerate() {
                        // SAFETY: the sub-minima follow the sub-scales.
                        *sub = unsafe { factors::<false>(line.wrapping_add((SUBS + number) * COLUMNS + column)) };
                    }
                    for (row, c) in c.iter_mut().enumerate() {
                        let x_scale = _mm512_set1_ps(read!(p.scales.wrapping_add(at + row)));
                        let [one, other] = halves(read!(p.sums.wrapping_add(at + row)));
                        let whole = _mm512_set1_ps((one + other) as f32);
                        let of_x = match SUBS {
                            0 => whole,
                            1 => _mm512_mul_ps(sub[0], whole),
                            _ => {
                                let first = _mm512_mul_ps(sub[0], _mm512_set1_ps(one as f32));
                                _mm512_fmadd_ps(sub[1], _mm512_set1_ps(other as f32), first)
                            }
                        };
                        c[g] = _mm512_fmadd_ps(of_x, _mm512_mul_ps(minimum, x_scale), c[g]);
                    }
                }
            }
            line = line.wrapping_add(line_bytes);
        }
    }
    // SAFETY: the rows and groups exist.
    unsafe { store(p, first, group, &c) };
}

/// Writes `R` rows of C from row `first` on, and `G` groups of sixteen columns from `group` on.
///
/// # Safety
/// The rows and groups exist, and are nobody else's; AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store<const R: usize, const G: usize>(p: &IntegerProduct, first: usize, group: usize, c: &[[__m512; G]; R]) {
    for (row, c) in c.iter().enumerate() {
        for (g, &value) in c.iter().enumerate() {
            let to = p.c.wrapping_add((first + row) * COLUMNS + (group + g) * 16);
            // SAFETY: sixteen columns of a row of C.
            unsafe { _mm512_storeu_ps(to, value) };
        }
    }
}

/// Adds the products of a line of signed weights to the sums, which then lack 128 · Σ x.
///
/// # Safety
/// `values` is valid for the `G` groups of 1024 bytes of a line, `a` for `R` lines at `stride` bytes; AVX-512 F and VNNI.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn signed<const R: usize, const G: usize>(
    values: *const u8,
    a: *const i8,
    stride: usize,
    sums: &mut [[__m512i; G]; R],
) {
    let flip = _mm512_set1_epi8(i8::MIN);
    for quad in 0..8 {
        let mut weights = [flip; G];
        for (g, weights) in weights.iter_mut().enumerate() {
            let from = values.wrapping_add(quad * 128 + g * 64);
            ahead(from);
            *weights = _mm512_xor_si512(load!(from), flip);
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            let x: *const i32 = a.wrapping_add(row * stride + quad * 4).cast();
            let x = _mm512_set1_epi32(read!(x));
            for (sum, weights) in sums.iter_mut().zip(weights) {
                *sum = _mm512_dpbusd_epi32(*sum, weights, x);
            }
        }
    }
}

/// Product with 8 bits and a scale per line.
///
/// # Safety
/// As [`super::IntegerFn`], with AVX-512 F and VNNI.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn bytes<const SUBS: usize>(p: &IntegerProduct) {
    all_rows!(p, bytes_rows, SUBS);
}

/// `R` rows of [`bytes`] from row `first` on, and `G` groups of sixteen columns from `group` on.
///
/// # Safety
/// As [`super::IntegerFn`]; the rows and groups exist.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn bytes_rows<const R: usize, const G: usize, const SUBS: usize>(
    p: &IntegerProduct,
    first: usize,
    group: usize,
) {
    let (lines, head_bytes, line_bytes) = (p.form.layout().lines, p.form.head_bytes(), p.form.line_bytes());
    let mut c = [[_mm512_setzero_ps(); G]; R];
    let (mut head, mut line) = (p.panel, p.panel);
    for k in 0..p.k_blocks {
        if k % lines == 0 {
            head = line;
            line = line.wrapping_add(head_bytes);
        }
        let at = k * p.rows + first;
        let mut sums = [[_mm512_setzero_si512(); G]; R];
        for (row, sums) in sums.iter_mut().enumerate() {
            let [one, other] = halves(read!(p.sums.wrapping_add(at + row)));
            *sums = [_mm512_set1_epi32(-128 * (one + other)); G];
        }
        // SAFETY: the values follow the sub-scales, and the rows exist.
        unsafe {
            signed(line.wrapping_add(SUBS * COLUMNS + group * 64), p.a.wrapping_add(at * LINE), LINE, &mut sums);
        };
        for g in 0..G {
            // SAFETY: the head has 32 scales.
            let scale = unsafe { scales::<false>(head.wrapping_add((group + g) * 32)) };
            let mut sub = scale;
            if SUBS > 0 {
                // SAFETY: the line begins with its sub-scales.
                sub = unsafe { factors::<true>(line.wrapping_add((group + g) * 16)) };
            }
            for (row, (c, sums)) in c.iter_mut().zip(&sums).enumerate() {
                let x_scale = _mm512_set1_ps(read!(p.scales.wrapping_add(at + row)));
                let mut sum = _mm512_cvtepi32_ps(sums[g]);
                if SUBS > 0 {
                    sum = _mm512_mul_ps(sum, sub);
                }
                c[g] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, x_scale), c[g]);
            }
        }
        line = line.wrapping_add(line_bytes);
    }
    // SAFETY: the rows and groups exist.
    unsafe { store(p, first, group, &c) };
}

/// Product with 8 bits and one scale per row of the matrix.
///
/// # Safety
/// As [`super::IntegerFn`], with AVX-512 F and VNNI.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn rows(p: &IntegerProduct) {
    all_rows!(p, whole_rows);
}

/// `R` rows of [`rows`] from row `first` on, and `G` groups of sixteen columns from `group` on.
///
/// # Safety
/// As [`super::IntegerFn`]; the rows and groups exist.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn whole_rows<const R: usize, const G: usize>(p: &IntegerProduct, first: usize, group: usize) {
    // 128 · Σ x may exceed 32 bits, and so may what `signed` adds: the difference does not, and sums wrap.
    let mut sums = [[_mm512_setzero_si512(); G]; R];
    let mut of_x = [0i32; R];
    for k in 0..p.k_blocks {
        let line = |row| paired(p.k_blocks, p.rows, k, row);
        let (at, stride) = (line(first), line(1) - line(0));
        for (row, of_x) in of_x.iter_mut().enumerate() {
            let [one, other] = halves(read!(p.sums.wrapping_add(at + row * stride)));
            *of_x = of_x.wrapping_add(one + other);
        }
        let values = p.panel.wrapping_add(k * LINE * COLUMNS + group * 64);
        // SAFETY: the panel begins with `k_blocks` lines of 1024 values, and the rows exist.
        unsafe { signed(values, p.a.wrapping_add(at * LINE), stride * LINE, &mut sums) };
    }
    let scales: *const f32 = p.panel.wrapping_add(p.k_blocks * LINE * COLUMNS).cast();
    let mut c = [[_mm512_setzero_ps(); G]; R];
    for (row, (c, sums)) in c.iter_mut().zip(&sums).enumerate() {
        let x_scale = _mm512_set1_ps(read!(p.scales.wrapping_add(first + row)));
        let less = _mm512_set1_epi32(of_x[row].wrapping_mul(128));
        for (g, (c, &sum)) in c.iter_mut().zip(sums).enumerate() {
            // SAFETY: 32 scales end the panel.
            let scale = unsafe { _mm512_loadu_ps(scales.wrapping_add((group + g) * 16)) };
            *c = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, less)), _mm512_mul_ps(scale, x_scale));
        }
    }
    // SAFETY: the rows and groups exist.
    unsafe { store(p, first, group, &c) };
}
