//! The innermost product, once per instruction path: a group of rows times one panel of 32 columns.
//!
//! ```text
//! C[rows][32] (+)= A[k_blocks][rows][32] · B[k_blocks] (each block as in pack.rs)
//! ```
//!
//! C is dense f32 scratch; the caller's epilogue uses it. The value of one output depends on its row of A and its
//! column of B alone, in one fixed order of k per family of paths (ADR 0004), whatever the height of the group.

pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512bf16;
pub(super) mod portable;

use super::detect::{Path, has_avx2_fma};
use super::integer::Integers;
use super::narrow::Expander;
use super::pack::BLOCK;

/// Location of the blocks of B, one per 32 of k.
#[derive(Clone, Copy)]
pub(super) enum Blocks<'a> {
    /// Contiguous blocks, as in a packed weight.
    Contiguous(*const u16),
    /// Scattered blocks, as in the pages of a KV cache.
    List(&'a [*const u16]),
}

/// One product. Pointers are raw since A and B are shared by threads and C is scratch; [`TileFn`] states the
/// requirements on them.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) a: *const u16,
    pub(super) rows: usize,
    pub(super) b: Blocks<'a>,
    pub(super) k_blocks: usize,
    pub(super) c: *mut f32,
    /// True to start from the contents of C rather than from zero.
    pub(super) accumulate: bool,
    /// Memory to prefetch while the product is computed.
    pub(super) ahead: Ahead,
}

/// Memory to be fetched while a product is computed; a hint that kernels may ignore, and any address is allowed.
#[derive(Clone, Copy)]
pub(super) enum Ahead {
    /// No prefetch: B is in a cache.
    Nothing,
    /// Prefetch of B itself, a few KiB ahead: it is a stretch of a longer stream.
    Stream,
    /// Prefetch of `lines` of 64 bytes (16 at most) from `from + 2048·k` on, for each block k, into the second-level
    /// cache: a share of the panel that comes after this one, left for the other row groups to complete.
    Next { from: *const u16, lines: usize },
}

/// A kernel.
///
/// # Safety
/// The machine has the kernel's instructions. `1 <= rows <= Kernel::rows_max`; `a` is valid for `k_blocks · rows · 32`
/// values, each block of B for 1024, aligned to 64 bytes (a list has `k_blocks` entries); `c` is valid for `rows · 32`
/// values, aligned to 64 bytes, and nobody else's.
pub(super) type TileFn = unsafe fn(&Product<'_>);

/// Product of a path, with the blocking that suits it.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) run: TileFn,
    pub(super) rows_max: usize,
    /// Blocks of k for which a panel of B stays in the first-level cache; 0 takes all of k at once.
    pub(super) k_blocks_at_once: usize,
    /// Family in the numerics string: equal families, equal bits.
    pub(super) family: &'static str,
    /// Kernels of integer products, whose bits no family changes.
    pub(super) integers: Integers,
    /// Way of expanding codes of 4 and 8 bits to B, whose bits no family changes.
    pub(super) expander: Expander,
}

/// Family with the order of `tdpbf16ps`, shared by all paths but `avx512bf16`.
const CANONICAL: &str = "tdpbf16ps";

/// The portable kernel, which every machine has.
fn portable_kernel() -> Kernel {
    let run: TileFn = if has_avx2_fma() { portable::product_fma } else { portable::product };
    let (integers, expander) = (Integers::best(false), Expander::best());
    Kernel { run, rows_max: portable::ROWS_MAX, k_blocks_at_once: 0, family: CANONICAL, integers, expander }
}

/// The kernel of a path that was resolved and found on this machine.
#[cfg(target_arch = "x86_64")]
pub(super) fn kernel(path: Path) -> Kernel {
    match path {
        Path::Auto | Path::Portable => portable_kernel(),
        Path::Avx2 => Kernel { run: avx2::product, rows_max: avx2::ROWS_MAX, ..portable_kernel() },
        Path::Avx512 => Kernel { run: avx512::product, rows_max: avx512::ROWS_MAX, ..portable_kernel() },
        Path::Avx512Bf16 => Kernel {
            run: avx512bf16::product,
            rows_max: avx512bf16::ROWS_MAX,
            family: "vdpbf16ps",
            ..portable_kernel()
        },
        Path::Amx => Kernel {
            run: amx::product,
            rows_max: amx::ROWS_MAX,
            k_blocks_at_once: amx::K_BLOCKS_AT_ONCE,
            integers: Integers::best(true),
            ..portable_kernel()
        },
    }
}

/// The kernel of a path that was resolved and found on this machine.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn kernel(_: Path) -> Kernel {
    portable_kernel()
}

/// Picks the monomorphic kernel for a number of rows.
macro_rules! by_rows {
    ($product:expr, $function:ident, $($r:literal)*) => {
        match $product.rows {
            $(
                // SAFETY: passed on from the caller, which promises what `TileFn` asks.
                $r => unsafe { $function::<$r>($product) },
            )*
            rows => unreachable!("{rows} rows in a group"),
        }
    };
}
use by_rows;

/// Prefetches `values` into the second-level cache.
#[inline]
pub(super) fn fetch<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in values.chunks(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch has no effect but on caches, and SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// Address of block `index` of B, `BLOCK` values of 16 bits.
#[inline(always)]
fn block(b: Blocks<'_>, index: usize) -> *const u16 {
    match b {
        Blocks::Contiguous(start) => start.wrapping_add(index * BLOCK),
        Blocks::List(list) => list[index],
    }
}

#[cfg(test)]
pub(super) mod tests;
