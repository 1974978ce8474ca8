//! Expansion of codes with AVX2.
//!
//! Runs of 4 bits and fp8: a register holds sixteen k of two columns, one in each half, which `vpshufb` looks up in the columns' tables, once for the low
//! bytes of the values and once for the high ones. Four registers of eight columns are then transposed to pairs of k. Numbers of E4M3 with one scale repeat
//! with every second exponent: the table holds those of two exponents, and the rest of the exponent is added to the high byte; the eight that are
//! subnormal have a table of their own.
//!
//! Integers of 8 bits and listed groups: a register holds eight columns at one k, which are multiplied and rounded in f32.

#![expect(
    clippy::needless_range_loop,
    reason = "iterators and `map` over registers are calls through memory where crates are compiled in parts"
)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::{BLOCK, COLUMNS, Groups, Panel};
use crate::device::CodeKind;

/// Distance in blocks at which codes are fetched: those that are expanded after the next product, which reads no memory.
const AHEAD: usize = 8;

/// Fetches a block of `lines` of 64 bytes of codes into the first-level cache, ahead of the one at `codes`.
#[inline(always)]
fn ahead(codes: *const u8, lines: usize) {
    for line in 0..lines {
        // SAFETY: a prefetch has no effect but on caches, and SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add((AHEAD * lines + line) * 64).cast()) };
    }
}

/// Tables of 32 columns: `[octet of columns][4][parts]` registers of 32 bytes, whose halves are those of two columns.
#[repr(align(64))]
struct Tables<const PARTS: usize>([[[[u8; 32]; PARTS]; 4]; 4]);

impl<const PARTS: usize> Tables<PARTS> {
    const ZERO: Self = Self([[[[0; 32]; PARTS]; 4]; 4]);

    /// Sets part `part` and the one behind it for columns `turn` and `turn + 4` of an octet.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn set(&mut self, octet: usize, turn: usize, part: usize, both: [__m256i; 2]) {
        for i in 0..2 {
            // SAFETY: a table has 32 bytes.
            unsafe { _mm256_storeu_si256(self.0[octet][turn][part + i].as_mut_ptr().cast(), both[i]) };
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn get(&self, octet: usize, turn: usize, part: usize) -> __m256i {
        // SAFETY: a table has 32 bytes.
        unsafe { _mm256_loadu_si256(self.0[octet][turn][part].as_ptr().cast()) }
    }
}

/// Writes blocks `k` of `panel`.
///
/// # Safety
/// The machine has AVX2; the panel has the blocks, and `out` as many of [`BLOCK`] values.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn expand(panel: &Panel<'_>, k: Range<usize>, out: &mut [u16]) {
    debug_assert_eq!(out.len(), k.len() * BLOCK);
    let out = out.as_mut_ptr();
    // SAFETY: the caller's promise; each function is that of the panel's form.
    unsafe {
        match (panel.form.kind, panel.form.groups) {
            (CodeKind::Four, Groups::Runs(blocks)) => fours(panel, k, blocks, out),
            (CodeKind::Float8, Groups::Runs(blocks)) => floats(panel, k, blocks, out),
            (CodeKind::Four, Groups::Listed(_)) => numbers::<true, true>(panel, k, 1, out),
            (CodeKind::Eight, Groups::Runs(blocks)) => numbers::<false, false>(panel, k, blocks, out),
            (CodeKind::Eight, Groups::Listed(_)) => numbers::<false, true>(panel, k, 1, out),
            (CodeKind::Float8, Groups::Listed(_)) => unreachable!("Form::of refuses it"),
        }
    }
}

/// Rounds to bf16, in the high 16 bits; the low ones are left over. Not for NaN and subnormal values.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded(value: __m256) -> __m256i {
    let bits = _mm256_castps_si256(value);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd)
}

/// Low and high bytes of the products, in bf16, of sixteen numbers with a scale, for two columns. `numbers` and `scale` have those of one column in each
/// half: numbers 0 2 4 6, then 1 3 5 7, 8 10 12 14 and 9 11 13 15.
#[inline]
#[target_feature(enable = "avx2")]
fn table(numbers: [__m256; 4], scale: __m256) -> [__m256i; 2] {
    let (a, b) = (rounded(_mm256_mul_ps(numbers[0], scale)), rounded(_mm256_mul_ps(numbers[1], scale)));
    let (c, d) = (rounded(_mm256_mul_ps(numbers[2], scale)), rounded(_mm256_mul_ps(numbers[3], scale)));
    let first = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(a), b);
    let second = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(c), d);
    let byte = _mm256_set1_epi16(255);
    [
        _mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte)),
        _mm256_packus_epi16(_mm256_srli_epi16::<8>(first), _mm256_srli_epi16::<8>(second)),
    ]
}

/// Values of column `turn` of the four in each half, in all places of the half.
#[inline]
#[target_feature(enable = "avx2")]
fn of_turn(values: __m256, turn: usize) -> __m256 {
    match turn {
        0 => _mm256_permute_ps::<0b00_00_00_00>(values),
        1 => _mm256_permute_ps::<0b01_01_01_01>(values),
        2 => _mm256_permute_ps::<0b10_10_10_10>(values),
        _ => _mm256_permute_ps::<0b11_11_11_11>(values),
    }
}

/// Four numbers in both halves.
#[inline]
#[target_feature(enable = "avx2")]
fn twice(a: f32, b: f32, c: f32, d: f32) -> __m256 {
    _mm256_setr_ps(a, b, c, d, a, b, c, d)
}

/// Writes sixteen k of eight columns, given as low and high bytes of the columns `i` and `i + 4` in register `i`.
///
/// # Safety
/// `out` is the place of the first pair in a block of bf16, valid for eight lines.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn put(out: *mut u16, low: [__m256i; 4], high: [__m256i; 4]) {
    for half in 0..2 {
        let mut pairs = [_mm256_setzero_si256(); 4];
        for i in 0..4 {
            pairs[i] =
                if half == 0 { _mm256_unpacklo_epi8(low[i], high[i]) } else { _mm256_unpackhi_epi8(low[i], high[i]) };
        }
        let [a, b, c, d] = pairs;
        let (first, second) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
        let (third, fourth) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
        let lines = [
            _mm256_unpacklo_epi64(first, second),
            _mm256_unpackhi_epi64(first, second),
            _mm256_unpacklo_epi64(third, fourth),
            _mm256_unpackhi_epi64(third, fourth),
        ];
        for i in 0..4 {
            // SAFETY: eight pairs of k, a line of 32 values each.
            unsafe { _mm256_storeu_si256(out.add((half * 4 + i) * 32).cast(), lines[i]) };
        }
    }
}

/// Codes of 4 bits in runs.
///
/// # Safety
/// As [`expand`].
#[target_feature(enable = "avx2")]
unsafe fn fours(panel: &Panel<'_>, k: Range<usize>, blocks: usize, out: *mut u16) {
    let [scales, zeros, _] = panel.form.parts();
    let start = panel.bytes.as_ptr();
    let nibble = _mm256_set1_epi8(15);
    let even = twice(0.0, 2.0, 4.0, 6.0);
    let odd = _mm256_add_ps(even, _mm256_set1_ps(1.0));
    let eight = _mm256_set1_ps(8.0);
    let numbers = [even, odd, _mm256_add_ps(even, eight), _mm256_add_ps(odd, eight)];
    let (mut tables, mut group) = (Tables::<2>::ZERO, usize::MAX);
    for (i, block) in k.enumerate() {
        if block / blocks != group {
            group = block / blocks;
            for octet in 0..4 {
                let at = group * COLUMNS + octet * 8;
                // SAFETY: scales and zero points of the group.
                let (scale, zero) = unsafe { parts(start.add(scales + at * 4), start.add(zeros + at)) };
                let zero = _mm256_cvtepi32_ps(zero);
                for turn in 0..4 {
                    let zero = of_turn(zero, turn);
                    let mut less = numbers;
                    for i in 0..4 {
                        less[i] = _mm256_sub_ps(less[i], zero);
                    }
                    tables.set(octet, turn, 0, table(less, of_turn(scale, turn)));
                }
            }
        }
        let codes = start.wrapping_add(block * BLOCK / 2);
        ahead(codes, 8);
        for octet in 0..4 {
            for half in 0..2 {
                let at = codes.wrapping_add(octet * 128 + half * 64);
                // SAFETY: a block has 512 bytes of codes.
                let both = unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())] };
                let (mut low, mut high) = ([_mm256_setzero_si256(); 4], [_mm256_setzero_si256(); 4]);
                for turn in 0..4 {
                    let both = both[turn % 2];
                    let both = if turn < 2 { both } else { _mm256_srli_epi16::<4>(both) };
                    let codes = _mm256_and_si256(both, nibble);
                    low[turn] = _mm256_shuffle_epi8(tables.get(octet, turn, 0), codes);
                    high[turn] = _mm256_shuffle_epi8(tables.get(octet, turn, 1), codes);
                }
                // SAFETY: eight pairs of half a tile of the block.
                unsafe { put(out.add(i * BLOCK + octet / 2 * 512 + half * 256 + octet % 2 * 16), low, high) };
            }
        }
    }
}

/// Codes of E4M3 in runs.
///
/// # Safety
/// As [`expand`].
#[target_feature(enable = "avx2")]
unsafe fn floats(panel: &Panel<'_>, k: Range<usize>, blocks: usize, out: *mut u16) {
    let scales = panel.form.parts()[0];
    let start = panel.bytes.as_ptr();
    let (even, odd) = (twice(0.0, 2.0, 4.0, 6.0), twice(1.0, 3.0, 5.0, 7.0));
    let step = _mm256_set1_ps(1.0 / 512.0);
    let zero = _mm256_setzero_ps();
    let subnormal = [_mm256_mul_ps(even, step), _mm256_mul_ps(odd, step), zero, zero];
    // Exponent 0, as if it were one of normal numbers, and 1.
    let eight = _mm256_set1_ps(8.0);
    let (even, odd) = (_mm256_add_ps(even, eight), _mm256_add_ps(odd, eight));
    let (low, high) = (_mm256_set1_ps(1.0 / 1024.0), step);
    let normal =
        [_mm256_mul_ps(even, low), _mm256_mul_ps(odd, low), _mm256_mul_ps(even, high), _mm256_mul_ps(odd, high)];
    let (mut tables, mut group) = (Tables::<4>::ZERO, usize::MAX);
    for (i, block) in k.enumerate() {
        if block / blocks != group {
            group = block / blocks;
            let at = start.wrapping_add(scales + group * COLUMNS * 4);
            // SAFETY: scales of the group.
            let of_octet = |octet: usize| unsafe { _mm256_loadu_ps(at.wrapping_add(octet * 32).cast()) };
            let first = _mm256_castps256_ps128(of_octet(0));
            let first = _mm256_broadcastss_ps(first);
            let mut alike = _mm256_cmp_ps::<_CMP_EQ_OQ>(first, of_octet(0));
            for octet in 1..4 {
                alike = _mm256_and_ps(alike, _mm256_cmp_ps::<_CMP_EQ_OQ>(first, of_octet(octet)));
            }
            // Blocks of rows have one scale for all columns of a panel.
            let is_one = _mm256_movemask_ps(alike) == 255;
            let of_one = [table(normal, first), table(subnormal, first)];
            for octet in 0..4 {
                for turn in 0..4 {
                    let mut both = of_one;
                    if !is_one {
                        let scale = of_turn(of_octet(octet), turn);
                        both = [table(normal, scale), table(subnormal, scale)];
                    }
                    tables.set(octet, turn, 0, both[0]);
                    tables.set(octet, turn, 2, both[1]);
                }
            }
        }
        let codes = start.wrapping_add(block * BLOCK);
        ahead(codes, 16);
        for octet in 0..4 {
            for half in 0..2 {
                let (mut low, mut high) = ([_mm256_setzero_si256(); 4], [_mm256_setzero_si256(); 4]);
                let mut sizes = [_mm256_setzero_si256(); 4];
                let mut is_any = _mm256_setzero_si256();
                for turn in 0..4 {
                    let at = codes.wrapping_add(octet * 256 + half * 128 + turn * 32);
                    // SAFETY: a block has 1024 bytes of codes.
                    let code = unsafe { _mm256_loadu_si256(at.cast()) };
                    let size = _mm256_and_si256(code, _mm256_set1_epi8(0x7f));
                    is_any = _mm256_or_si256(is_any, _mm256_cmpgt_epi8(_mm256_set1_epi8(8), size));
                    // Exponent in twos, which is where a bf16's exponent begins in its high byte.
                    let steps = _mm256_and_si256(_mm256_srli_epi16::<4>(size), _mm256_set1_epi8(7));
                    let whole = _mm256_add_epi8(_mm256_shuffle_epi8(tables.get(octet, turn, 1), size), steps);
                    low[turn] = _mm256_shuffle_epi8(tables.get(octet, turn, 0), size);
                    high[turn] = _mm256_xor_si256(whole, _mm256_xor_si256(code, size));
                    sizes[turn] = size;
                }
                // About one weight of ten thousand is subnormal.
                if _mm256_testz_si256(is_any, is_any) == 0 {
                    for turn in 0..4 {
                        let at = codes.wrapping_add(octet * 256 + half * 128 + turn * 32);
                        // SAFETY: a block has 1024 bytes of codes.
                        let code = unsafe { _mm256_loadu_si256(at.cast()) };
                        let is_subnormal = _mm256_cmpgt_epi8(_mm256_set1_epi8(8), sizes[turn]);
                        let sign = _mm256_xor_si256(code, sizes[turn]);
                        let other = _mm256_shuffle_epi8(tables.get(octet, turn, 2), sizes[turn]);
                        low[turn] = _mm256_blendv_epi8(low[turn], other, is_subnormal);
                        let other = _mm256_shuffle_epi8(tables.get(octet, turn, 3), sizes[turn]);
                        high[turn] = _mm256_blendv_epi8(high[turn], _mm256_xor_si256(other, sign), is_subnormal);
                    }
                }
                // SAFETY: eight pairs of half a tile of the block.
                unsafe { put(out.add(i * BLOCK + octet / 2 * 512 + half * 256 + octet % 2 * 16), low, high) };
            }
        }
    }
}

/// Scales and zero points of eight columns.
///
/// # Safety
/// `scales` is valid for eight values and `zeros` for eight bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn parts(scales: *const u8, zeros: *const u8) -> (__m256, __m256i) {
    // SAFETY: the caller's promise.
    unsafe { (_mm256_loadu_ps(scales.cast()), _mm256_cvtepu8_epi32(_mm_loadl_epi64(zeros.cast()))) }
}

/// Codes of integers, of 8 bits or in listed groups.
///
/// # Safety
/// As [`expand`].
#[target_feature(enable = "avx2")]
unsafe fn numbers<const FOUR: bool, const LISTED: bool>(
    panel: &Panel<'_>,
    k: Range<usize>,
    blocks: usize,
    out: *mut u16,
) {
    let [scales, zeros, _] = panel.form.parts();
    let start = panel.bytes.as_ptr();
    let (of_scales, of_zeros) = (start.wrapping_add(scales), start.wrapping_add(zeros));
    let list = panel.list.as_chunks::<2>().0;
    for (i, block) in k.enumerate() {
        let codes = start.wrapping_add(block * panel.form.block_bytes());
        ahead(codes, if FOUR { 8 } else { 16 });
        // First scale of the group of each k.
        let mut firsts = [0; 32];
        if LISTED {
            for (first, group) in firsts.iter_mut().zip(&list[block * 32..][..32]) {
                *first = usize::from(u16::from_le_bytes(*group)) * COLUMNS;
            }
        }
        for octet in 0..4 {
            let of_group = |first: usize| {
                let at = first + octet * 8;
                // SAFETY: scales and zero points of a group, whose number is below the form's (`write_list` checked those of a list).
                unsafe { parts(of_scales.wrapping_add(at * 4), of_zeros.wrapping_add(at)) }
            };
            let of_run = of_group(if LISTED { 0 } else { block / blocks * COLUMNS });
            let of = |k: usize| if LISTED { of_group(firsts[k]) } else { of_run };
            let value = |code: __m256i, k: usize| {
                let (scale, zero) = of(k);
                rounded(_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(code, zero)), scale))
            };
            let out = out.wrapping_add(i * BLOCK + octet / 2 * 512 + octet % 2 * 16);
            let put = |pair: usize, even: __m256i, odd: __m256i| {
                let (even, odd) = (value(even, pair * 2), value(odd, pair * 2 + 1));
                let both = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(even), odd);
                // SAFETY: eight columns of a pair of the block.
                unsafe { _mm256_storeu_si256(out.wrapping_add(pair * 32).cast(), both) };
            };
            if FOUR {
                let nibble = _mm256_set1_epi32(15);
                for eight in 0..4 {
                    let at = codes.wrapping_add(((octet / 2 * 4 + eight) * 2 + octet % 2) * 32);
                    // SAFETY: a block has 512 bytes of codes.
                    let mut word = unsafe { _mm256_loadu_si256(at.cast()) };
                    for pair in 0..4 {
                        let odd = _mm256_and_si256(_mm256_srli_epi32::<4>(word), nibble);
                        put(eight * 4 + pair, _mm256_and_si256(word, nibble), odd);
                        word = _mm256_srli_epi32::<8>(word);
                    }
                }
            } else {
                for pair in 0..16 {
                    let at = codes.wrapping_add(octet / 2 * 512 + pair * 32 + octet % 2 * 16);
                    // SAFETY: a block has 1024 bytes of codes.
                    let pairs = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(at.cast()) });
                    put(pair, _mm256_and_si256(pairs, _mm256_set1_epi32(255)), _mm256_srli_epi32::<8>(pairs));
                }
            }
        }
    }
}
