//! Portable path: the order of `tdpbf16ps` in Rust alone; compiled a second time with AVX2 and FMA, where loops over
//! sixteen lanes become vectors.
//!
//! Without FMA instructions `mul_add` is a library call: right, and slow. Such a machine can serve only a small model.

use super::{Product, block};
use crate::cpu::lanes::{Array, Lanes, from_bf16};

/// Rows of a group. Chains of one row by sixteen columns take four vector registers of eight for even and odd k.
pub(in crate::cpu) const ROWS_MAX: usize = 4;

/// Tile product without FMA; see [`super::TileFn`].
///
/// # Safety
/// As [`super::TileFn`].
pub(in crate::cpu) unsafe fn product(p: &Product<'_>) {
    // SAFETY: the caller's promise.
    unsafe { all(p) }
}

/// Tile product with AVX2 and FMA; see [`super::TileFn`].
///
/// # Safety
/// As [`super::TileFn`]; on x86-64 the machine has AVX2 and FMA.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma"))]
pub(in crate::cpu) unsafe fn product_fma(p: &Product<'_>) {
    // SAFETY: the caller's promise.
    unsafe { all(p) }
}

/// # Safety
/// As [`super::TileFn`].
#[inline(always)]
unsafe fn all(p: &Product<'_>) {
    // SAFETY: C has `rows` rows of 32 values, and nobody else's.
    let c = unsafe { std::slice::from_raw_parts_mut(p.c, p.rows * 32) };
    if !p.accumulate {
        c.fill(0.0);
    }
    for k in 0..p.k_blocks {
        // SAFETY: A has `k_blocks` blocks of `rows` lines.
        let a = unsafe { std::slice::from_raw_parts(p.a.add(k * p.rows * 32), p.rows * 32) };
        // SAFETY: block k of B has 1024 values.
        let b = unsafe { std::slice::from_raw_parts(block(p.b, k), 1024) };
        for (line, c) in a.as_chunks::<32>().0.iter().zip(c.as_chunks_mut::<32>().0) {
            for (tile, c) in b.as_chunks::<512>().0.iter().zip(c.as_chunks_mut::<16>().0) {
                Array::load(c).add(chains(line, tile)).store(c);
            }
        }
    }
}

/// Sum `even + odd` of one row by sixteen columns.
#[inline(always)]
fn chains(line: &[u16; 32], tile: &[u16; 512]) -> Array {
    let (mut even, mut odd) = (Array::splat(0.0), Array::splat(0.0));
    for (x, pairs) in line.as_chunks::<2>().0.iter().zip(tile.as_chunks::<32>().0) {
        let (mut b_even, mut b_odd) = ([0.0; 16], [0.0; 16]);
        for n in 0..16 {
            b_even[n] = from_bf16(pairs[n * 2]);
            b_odd[n] = from_bf16(pairs[n * 2 + 1]);
        }
        even = Array::splat(from_bf16(x[0])).fma(Array::load(&b_even), even);
        odd = Array::splat(from_bf16(x[1])).fma(Array::load(&b_odd), odd);
    }
    even.add(odd)
}
