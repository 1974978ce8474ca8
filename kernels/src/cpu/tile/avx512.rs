//! AVX-512 path: the order of `tdpbf16ps` with plain f32 FMAs: per 32 values of k two chains from zero, even and odd
//! k, then `c += even + odd`.
//!
//! A bf16 pair in 32 bits becomes two f32 by a shift and a mask. Six rows by two registers are 24 chains; C stays in its scratch,
//! touched once per 32 k.

use std::arch::x86_64::*;

use super::{Ahead, Product, block, by_rows};

pub(in crate::cpu) const ROWS_MAX: usize = 6;

/// Prefetch distance in bytes, as in `avx512bf16.rs`.
const AHEAD: usize = 4096;

/// Tile product of the AVX-512 path; see [`super::TileFn`].
///
/// # Safety
/// As [`super::TileFn`]; the machine has AVX-512 F.
pub(in crate::cpu) unsafe fn product(p: &Product<'_>) {
    by_rows!(p, rows, 1 2 3 4 5 6)
}

/// # Safety
/// As [`product`], with `R` rows.
#[target_feature(enable = "avx512f")]
unsafe fn rows<const R: usize>(p: &Product<'_>) {
    if !p.accumulate {
        // SAFETY: C has R rows of 32 values.
        unsafe { std::slice::from_raw_parts_mut(p.c, R * 32) }.fill(0.0);
    }
    for k in 0..p.k_blocks {
        // SAFETY: A has `k_blocks` blocks of R lines.
        let a = unsafe { p.a.add(k * R * 32) };
        // SAFETY: block k of B has 1024 values.
        let sums = unsafe { chains::<R>(a, block(p.b, k), !matches!(p.ahead, Ahead::Nothing)) };
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                // SAFETY: C has R rows of 32 values.
                unsafe {
                    let c = p.c.add(r * 32 + v * 16);
                    _mm512_store_ps(c, _mm512_add_ps(_mm512_load_ps(c), *sum));
                }
            }
        }
    }
}

/// Sum `even + odd` of 32 values of k.
///
/// # Safety
/// `a`: R lines of 32 values; `b`: 1024 values, aligned to 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn chains<const R: usize>(a: *const u16, b: *const u16, stream: bool) -> [[__m512; 2]; R] {
    let mut even = [[_mm512_setzero_ps(); 2]; R];
    let mut odd = even;
    for pair in 0..16 {
        if stream {
            // A prefetch never faults.
            _mm_prefetch::<_MM_HINT_T0>(b.cast::<i8>().wrapping_add(AHEAD + pair * 64));
            _mm_prefetch::<_MM_HINT_T0>(b.cast::<i8>().wrapping_add(AHEAD + 1024 + pair * 64));
        }
        // SAFETY: pair 0..16 of both tiles lie inside of the block.
        let tiles =
            unsafe { [_mm512_load_si512(b.add(pair * 32).cast()), _mm512_load_si512(b.add(512 + pair * 32).cast())] };
        let (b_even, b_odd) = ([low(tiles[0]), low(tiles[1])], [high(tiles[0]), high(tiles[1])]);
        for r in 0..R {
            // SAFETY: line r has 16 pairs.
            let x = unsafe { a.add(r * 32 + pair * 2).cast::<u32>().read_unaligned() };
            let x_even = _mm512_set1_ps(f32::from_bits(x << 16));
            let x_odd = _mm512_set1_ps(f32::from_bits(x & 0xffff_0000));
            for v in 0..2 {
                even[r][v] = _mm512_fmadd_ps(x_even, b_even[v], even[r][v]);
                odd[r][v] = _mm512_fmadd_ps(x_odd, b_odd[v], odd[r][v]);
            }
        }
    }
    for r in 0..R {
        for v in 0..2 {
            even[r][v] = _mm512_add_ps(even[r][v], odd[r][v]);
        }
    }
    even
}

/// First value of each pair as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn low(pairs: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))
}

/// Second value of each pair as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn high(pairs: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
}
