//! AVX-512 BF16 path (`vdpbf16ps`): one chain per output over ascending pairs of k.
//!
//! Twelve rows by two registers of columns are 24 accumulators; a step of one k-pair is 24 products for 14 loads (two of B, twelve
//! broadcasts of A), which keeps both FMA pipes of Zen 5 busy with two loads a cycle. B comes from the second-level cache at 11
//! bytes a cycle. With one row, the two chains are still shorter than the time that memory needs for their data.

use std::arch::x86_64::*;

use super::{Ahead, Product, block, by_rows};
use crate::cpu::pack::BLOCK;

pub(in crate::cpu) const ROWS_MAX: usize = 12;

/// Prefetch distance of B in a stream, in bytes: one row is best at 4 KiB (16 KiB cost it 10 %), eight to twelve rows,
/// which take longer per byte, at 8 KiB (4 KiB cost them 10 to 15 %, none at all half). A far prefetch into L2 beside
/// it gained nothing.
const AHEAD_FEW: usize = 4096;
const AHEAD: usize = 8192;

/// Tile product of the AVX-512 BF16 path; see [`super::TileFn`].
///
/// # Safety
/// As [`super::TileFn`]; the machine has AVX-512 F and BF16.
pub(in crate::cpu) unsafe fn product(p: &Product<'_>) {
    by_rows!(p, rows, 1 2 3 4 5 6 7 8 9 10 11 12)
}

/// # Safety
/// As [`product`], with `R` rows.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows<const R: usize>(p: &Product<'_>) {
    let mut c = [[_mm512_setzero_ps(); 2]; R];
    if p.accumulate {
        for (r, c) in c.iter_mut().enumerate() {
            for (v, c) in c.iter_mut().enumerate() {
                // SAFETY: C has R rows of 32 values.
                *c = unsafe { _mm512_load_ps(p.c.add(r * 32 + v * 16)) };
            }
        }
    }
    for k in 0..p.k_blocks {
        // SAFETY: A has `k_blocks` blocks of R lines.
        let a = unsafe { p.a.add(k * R * 32) };
        let b = block(p.b, k);
        match p.ahead {
            // SAFETY: block k of B has 1024 values.
            Ahead::Nothing => unsafe { accumulate::<R>(&mut c, a, b, |_| ()) },
            // SAFETY: as above.
            Ahead::Stream => unsafe { accumulate::<R>(&mut c, a, b, |pair| stream::<R>(b, pair)) },
            Ahead::Next { from, lines } => {
                let from = from.wrapping_add(k * BLOCK);
                // SAFETY: as above.
                unsafe { accumulate::<R>(&mut c, a, b, |pair| next(from, lines, pair)) };
            }
        }
    }
    for (r, c) in c.iter().enumerate() {
        for (v, c) in c.iter().enumerate() {
            // SAFETY: C has R rows of 32 values.
            unsafe { _mm512_store_ps(p.c.add(r * 32 + v * 16), *c) };
        }
    }
}

/// Adds 32 values of k.
///
/// # Safety
/// `a`: R lines of 32 values; `b`: 1024 values, aligned to 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn accumulate<const R: usize>(c: &mut [[__m512; 2]; R], a: *const u16, b: *const u16, fetch: impl Fn(usize)) {
    for pair in 0..16 {
        fetch(pair);
        // SAFETY: pair 0..16 of both tiles lie inside of the block.
        let (b0, b1) = unsafe { (load(b.add(pair * 32)), load(b.add(512 + pair * 32))) };
        for (r, c) in c.iter_mut().enumerate() {
            // SAFETY: line r has 16 pairs.
            let x = unsafe { a.add(r * 32 + pair * 2).cast::<i32>().read_unaligned() };
            let x = bf16(_mm512_set1_epi32(x));
            c[0] = _mm512_dpbf16_ps(c[0], x, b0);
            c[1] = _mm512_dpbf16_ps(c[1], x, b1);
        }
    }
}

/// Prefetches two lines of the stream that B is part of. A prefetch never faults; beyond the matrix it fetches nothing
/// of use.
#[inline(always)]
fn stream<const R: usize>(b: *const u16, pair: usize) {
    let ahead = if R <= 2 { AHEAD_FEW } else { AHEAD };
    for tile in 0..2 {
        let at = b.cast::<i8>().wrapping_add(ahead + tile * 1024 + pair * 64);
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at) };
    }
}

/// Prefetches one line of the panel after this one, if its share is not done.
#[inline(always)]
fn next(from: *const u16, lines: usize, pair: usize) {
    if pair < lines {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast::<i8>().wrapping_add(pair * 64)) };
    }
}

/// # Safety
/// `from` is valid for 32 values and aligned to 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn load(from: *const u16) -> __m512bh {
    // SAFETY: the caller's promise.
    bf16(unsafe { _mm512_load_si512(from.cast()) })
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits, and every pattern is a valid value of both.
    unsafe { std::mem::transmute(bits) }
}
