//! AVX2 path: the order of `tdpbf16ps` with plain f32 FMAs, eight lanes wide: per 32 values of k two chains from zero, even
//! and odd k, then `c += even + odd`.
//!
//! Three and four rows compute one chain of 16 columns after the other: sixteen registers hold four rows of one chain, and B.
//! Six rows would read B less often and were slower, since the sums of the first chain are then spilled. One and two rows
//! compute both chains in one pass, so that B, which comes from memory there, is converted once. A is expanded to f32 once per
//! block: an FMA then takes a value by one broadcast.

#![expect(
    clippy::needless_range_loop,
    reason = "iterators over rows kept the sums in memory where crates are compiled in parts"
)]

use std::arch::x86_64::*;

use super::{Ahead, BLOCK, Product, block, by_rows};

pub(in crate::cpu) const ROWS_MAX: usize = 4;

/// Prefetch distance in bytes, as in `avx512bf16.rs`.
const AHEAD: usize = 4096;

/// Rows of A in f32, first the even values of k, then the odd ones. A store that crosses lines would cost twice.
#[repr(align(64))]
struct Expanded<const R: usize>([[[f32; 16]; R]; 2]);

/// Tile product of the AVX2 path; see [`super::TileFn`].
///
/// # Safety
/// As [`super::TileFn`]; the machine has AVX2 and FMA.
pub(in crate::cpu) unsafe fn product(p: &Product<'_>) {
    by_rows!(p, rows, 1 2 3 4)
}

/// # Safety
/// As [`product`], with `R` rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn rows<const R: usize>(p: &Product<'_>) {
    if !p.accumulate {
        // SAFETY: C has R rows of 32 values.
        unsafe { std::slice::from_raw_parts_mut(p.c, R * 32) }.fill(0.0);
    }
    for k in 0..p.k_blocks {
        // SAFETY: A has `k_blocks` blocks of R lines.
        let a = unsafe { expanded::<R>(p.a.add(k * R * 32)) };
        // An opaque address: the compiler would otherwise keep A in registers, of which there are none left, and spill its broadcasts.
        let a = std::hint::black_box(&a);
        let b = block(p.b, k);
        match p.ahead {
            Ahead::Nothing => {}
            // One row reads B in one sequence, which the processor's own prefetch follows better: measured on Zen 3.
            Ahead::Stream if R == 1 => {}
            Ahead::Stream => prefetch::<_MM_HINT_T0>(b.cast::<i8>().wrapping_add(AHEAD), 32),
            Ahead::Next { from, lines } => prefetch::<_MM_HINT_T1>(from.wrapping_add(k * BLOCK).cast(), lines),
        }
        // SAFETY: block k of B has 1024 values, tile 1 after the 512 of tile 0; C has R rows of 32.
        unsafe {
            match R {
                1 | 2 => {
                    add::<R>(p.c, both_chains::<R>(a, b));
                    add::<R>(p.c.add(16), both_chains::<R>(a, b.add(512)));
                }
                _ => {
                    add::<R>(p.c, chain_by_chain::<R>(a, b));
                    add::<R>(p.c.add(16), chain_by_chain::<R>(a, b.add(512)));
                }
            }
        }
    }
}

/// Prefetches `lines` of 64 bytes; a prefetch never faults.
#[inline(always)]
fn prefetch<const HINT: i32>(from: *const i8, lines: usize) {
    for line in 0..lines {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<HINT>(from.wrapping_add(line * 64)) };
    }
}

/// R lines of 32 bf16 values as f32, even and odd apart.
///
/// # Safety
/// `a`: R lines of 32 values.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn expanded<const R: usize>(a: *const u16) -> Expanded<R> {
    let mut lines = Expanded([[[0.0; 16]; R]; 2]);
    for r in 0..R {
        for half in 0..2 {
            // SAFETY: eight pairs of line r; sixteen f32 hold two of eight.
            unsafe {
                let pairs = _mm256_loadu_si256(a.add(r * 32 + half * 16).cast());
                _mm256_store_ps(lines.0[0][r].as_mut_ptr().add(half * 8), low(pairs));
                _mm256_store_ps(lines.0[1][r].as_mut_ptr().add(half * 8), high(pairs));
            }
        }
    }
    lines
}

/// Sums `even + odd` of R rows by 16 columns, both chains in one pass.
///
/// # Safety
/// `b`: a tile of 512 values, aligned to 64 bytes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn both_chains<const R: usize>(a: &Expanded<R>, b: *const u16) -> [[__m256; 2]; R] {
    let mut even = [[_mm256_setzero_ps(); 2]; R];
    let mut odd = even;
    for pair in 0..16 {
        for v in 0..2 {
            // SAFETY: a line of the tile has 16 pairs, two registers.
            let pairs = unsafe { _mm256_load_si256(b.add(pair * 32 + v * 16).cast()) };
            let (b_even, b_odd) = (low(pairs), high(pairs));
            for r in 0..R {
                even[r][v] = _mm256_fmadd_ps(_mm256_set1_ps(a.0[0][r][pair]), b_even, even[r][v]);
                odd[r][v] = _mm256_fmadd_ps(_mm256_set1_ps(a.0[1][r][pair]), b_odd, odd[r][v]);
            }
        }
    }
    for r in 0..R {
        even[r] = [_mm256_add_ps(even[r][0], odd[r][0]), _mm256_add_ps(even[r][1], odd[r][1])];
    }
    even
}

/// Sums of one chain of R rows by 16 columns, of odd k or of even k.
///
/// # Safety
/// `b`: a tile of 512 values, aligned to 64 bytes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn chain<const R: usize, const ODD: bool>(a: &Expanded<R>, b: *const u16) -> [[__m256; 2]; R] {
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for pair in 0..16 {
        // SAFETY: a line of the tile has 16 pairs, two registers.
        let pairs =
            unsafe { [_mm256_load_si256(b.add(pair * 32).cast()), _mm256_load_si256(b.add(pair * 32 + 16).cast())] };
        let b = if ODD { [high(pairs[0]), high(pairs[1])] } else { [low(pairs[0]), low(pairs[1])] };
        for r in 0..R {
            let x = _mm256_set1_ps(a.0[usize::from(ODD)][r][pair]);
            sums[r] = [_mm256_fmadd_ps(x, b[0], sums[r][0]), _mm256_fmadd_ps(x, b[1], sums[r][1])];
        }
    }
    sums
}

/// Sums `even + odd` of R rows by 16 columns, one chain after the other.
///
/// # Safety
/// As [`chain`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn chain_by_chain<const R: usize>(a: &Expanded<R>, b: *const u16) -> [[__m256; 2]; R] {
    // SAFETY: the caller's promise.
    let (mut even, odd) = unsafe { (chain::<R, false>(a, b), chain::<R, true>(a, b)) };
    for r in 0..R {
        even[r] = [_mm256_add_ps(even[r][0], odd[r][0]), _mm256_add_ps(even[r][1], odd[r][1])];
    }
    even
}

/// Adds `sums` to 16 columns of R rows of C, from `c` on.
///
/// # Safety
/// `c`: rows of 32 values, aligned to 32 bytes.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add<const R: usize>(c: *mut f32, sums: [[__m256; 2]; R]) {
    for (r, sums) in sums.iter().enumerate() {
        for (v, sum) in sums.iter().enumerate() {
            // SAFETY: register v of row r.
            unsafe {
                let c = c.add(r * 32 + v * 8);
                _mm256_store_ps(c, _mm256_add_ps(_mm256_load_ps(c), *sum));
            }
        }
    }
}

/// First value of each pair as f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn low(pairs: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs))
}

/// Second value of each pair as f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn high(pairs: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32)))
}
