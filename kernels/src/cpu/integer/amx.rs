//! AMX: the sums of `portable.rs` in tiles of sixteen rows and sixteen columns, which `tdpbssd` adds up over 64 values of k.
//!
//! ```text
//! tmm0 tmm1   sums, rows 0..16,  columns 0..16 and 16..32        tmm4  A, rows 0..16      tmm6  B, columns 0..16
//! tmm2 tmm3   sums, rows 16..32, the same                        tmm5  A, rows 16..32     tmm7  B, columns 16..32
//! ```
//!
//! - One scale per row ([`Form::Rows`]): the sums stay in tiles over all k, of which a tile holds 64 values, or over a part of it, and
//!   wait in C between two parts.
//! - Blocks: each line of 32 values has a scale, so its sums leave their tile for the same f32 additions as elsewhere, which take longer
//!   than the tile product. Those of some lines ([`TOGETHER`]) are made while the next lines' products run. Weights of 4 and 6 bits are expanded
//!   for [`LINES`] lines at a time, once for both tile rows; C waits in memory between.
//!
//! Groups of fewer than [`ROWS_MIN`] rows, whose time is that of reading the weights, are left to `vnni.rs`.

use std::arch::x86_64::*;

use super::super::tile::amx::configure;
use super::vnni::{self, ahead, factors, halves, scales, unpack};
use super::{COLUMNS, Form, IntegerFn, IntegerProduct, paired};
use crate::blocks::LINE;

/// Fewest rows of a group that are multiplied in tiles.
const ROWS_MIN: usize = 5;
/// Lines that are expanded at a time: 8 KiB.
const LINES: usize = 16;
/// Lines whose sums leave their tiles together: C is read and written once for all of them.
const TOGETHER: usize = 4;
/// Rows of a tile.
const TILE: usize = 16;

/// Kernel for weights in `form`.
pub(super) fn kernel(form: Form) -> IntegerFn {
    kernel_on::<Machine>(form)
}

fn kernel_on<T: Tiles>(form: Form) -> IntegerFn {
    let Form::Blocks(layout) = form else { return rows::<T> };
    if layout.codes {
        return blocks::<T, 4, 0, false, true>;
    }
    match (layout.bits, layout.subs, layout.minimum) {
        (8, ..) if layout.zero > 0 => vnni::kernel(form),
        (4, 0, false) => blocks::<T, 4, 0, false, false>,
        (4, 0, true) => blocks::<T, 4, 0, true, false>,
        (4, 1, true) => blocks::<T, 4, 1, true, false>,
        (4, 2, false) => blocks::<T, 4, 2, false, false>,
        (4, 2, true) => blocks::<T, 4, 2, true, false>,
        (6, 0, false) => blocks::<T, 6, 0, false, false>,
        (6, 0, true) => blocks::<T, 6, 0, true, false>,
        (6, 1, true) => blocks::<T, 6, 1, true, false>,
        (6, 2, false) => blocks::<T, 6, 2, false, false>,
        (8, 0, false) => blocks::<T, 8, 0, false, false>,
        (8, 1, false) => blocks::<T, 8, 1, false, false>,
        _ => vnni::kernel(form),
    }
}

/// Tile operations that the kernels are made of: the machine's, and in tests a model of them.
trait Tiles {
    /// Prepares products of groups of `rows` rows whose tiles of A hold `words` words of four bytes.
    ///
    /// # Safety
    /// `rows` is 1 to 32, `words` 1 to 16; the machine has AMX-INT8, where these are its own.
    unsafe fn configure(rows: usize, words: usize);

    /// Sums of one tile row (the second if `SECOND`) times sixteen columns.
    ///
    /// # Safety
    /// Prepared for `of`. `a` is valid for the rows of the tile at `LINE` bytes each, `b` for `of.words` rows of 64 bytes at `stride`
    /// bytes, `sums` for one row of sixteen for each row of the tile.
    unsafe fn line<const SECOND: bool>(of: Shape, a: *const i8, b: *const u8, stride: usize, sums: *mut i32);

    /// Sums of a group times 32 columns over `pairs · 64` values of k, from those in `sums` on if `resume`.
    ///
    /// # Safety
    /// Prepared for `rows` rows and 16 words. `a` is valid for `[pairs][rows][64]` bytes, `b` for `[pairs][16][32][4]`, `sums` for
    /// `[rows][32]`; there is at least one pair.
    unsafe fn whole(rows: usize, a: *const i8, b: *const u8, pairs: usize, sums: *mut i32, resume: bool);
}

/// Rows and words for which tiles are prepared.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    words: usize,
}

/// The machine's own tiles.
struct Machine;

impl Tiles for Machine {
    /// # Safety
    /// As [`Tiles::configure`].
    unsafe fn configure(rows: usize, words: usize) {
        // SAFETY: the caller's promise.
        unsafe { configure(rows, words) };
    }

    /// # Safety
    /// As [`Tiles::line`].
    #[inline(always)]
    unsafe fn line<const SECOND: bool>(_: Shape, a: *const i8, b: *const u8, stride: usize, sums: *mut i32) {
        macro_rules! line {
            ($sum:literal, $a:literal) => {
                // SAFETY: the caller's promise about A, B, the sums and the configuration.
                unsafe {
                    std::arch::asm!(
                        concat!("tilezero tmm", $sum),
                        concat!("tileloadd tmm", $a, ", [{a} + {line}*1]"),
                        "tileloadd tmm6, [{b} + {stride}*1]",
                        concat!("tdpbssd tmm", $sum, ", tmm", $a, ", tmm6"),
                        concat!("tilestored [{sums} + {row}*1], tmm", $sum),
                        a = in(reg) a,
                        b = in(reg) b,
                        sums = in(reg) sums,
                        line = in(reg) LINE,
                        stride = in(reg) stride,
                        row = in(reg) 64usize,
                        out("tmm0") _, out("tmm2") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                        options(nostack),
                    );
                }
            };
        }
        if SECOND { line!(2, 5) } else { line!(0, 4) }
    }

    /// # Safety
    /// As [`Tiles::whole`].
    unsafe fn whole(rows: usize, a: *const i8, b: *const u8, pairs: usize, sums: *mut i32, resume: bool) {
        macro_rules! whole {
            ($begin:tt $resume:tt $step:tt $end:tt) => {
                // SAFETY: the caller's promise about A, B, the sums and the configuration.
                unsafe {
                    std::arch::asm!(
                        "test {resume}, {resume}",
                        "jnz 2f",
                        whole!(@lines $begin),
                        "jmp 3f",
                        "2:",
                        whole!(@lines $resume),
                        "3:",
                        whole!(@lines $step),
                        "mov {i}, {ahead_bytes}",
                        "4:",
                        "sub {i}, 64",
                        "prefetcht1 [{b} + {i} + 4096]",
                        "jnz 4b",
                        "add {b}, 2048",
                        "add {a}, {a_step}",
                        "dec {pairs}",
                        "jnz 3b",
                        whole!(@lines $end),
                        resume = in(reg) usize::from(resume),
                        a = inout(reg) a => _,
                        a_step = in(reg) rows * 64,
                        b = inout(reg) b => _,
                        pairs = inout(reg) pairs => _,
                        sums = in(reg) sums,
                        // A group of one tile row is mostly the only one, and the weights come from memory: all of a pair is fetched ahead.
                        ahead_bytes = in(reg) if rows <= TILE { 2048usize } else { 64 },
                        i = out(reg) _,
                        line = in(reg) 64usize,
                        row = in(reg) 128usize,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            };
            (@lines ($($line:literal)*)) => { concat!($($line, "\n"),*) };
        }
        if rows <= TILE {
            whole! {
                ("tilezero tmm0" "tilezero tmm1")
                ("tileloadd tmm0, [{sums} + {row}*1]" "tileloadd tmm1, [{sums} + {row}*1 + 64]")
                (
                    "tileloadd tmm6, [{b} + {row}*1]"
                    "tileloadd tmm4, [{a} + {line}*1]"
                    "tdpbssd tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{b} + {row}*1 + 64]"
                    "tdpbssd tmm1, tmm4, tmm7"
                )
                ("tilestored [{sums} + {row}*1], tmm0" "tilestored [{sums} + {row}*1 + 64], tmm1")
            }
        } else {
            whole! {
                ("tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3")
                (
                    "tileloadd tmm0, [{sums} + {row}*1]"
                    "tileloadd tmm1, [{sums} + {row}*1 + 64]"
                    "tileloadd tmm2, [{sums} + {row}*1 + 2048]"
                    "tileloadd tmm3, [{sums} + {row}*1 + 2112]"
                )
                (
                    "tileloadd tmm6, [{b} + {row}*1]"
                    "tileloadd tmm4, [{a} + {line}*1]"
                    "tdpbssd tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{b} + {row}*1 + 64]"
                    "tdpbssd tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{a} + {line}*1 + 1024]"
                    "tdpbssd tmm2, tmm5, tmm6"
                    "tdpbssd tmm3, tmm5, tmm7"
                )
                (
                    "tilestored [{sums} + {row}*1], tmm0"
                    "tilestored [{sums} + {row}*1 + 64], tmm1"
                    "tilestored [{sums} + {row}*1 + 2048], tmm2"
                    "tilestored [{sums} + {row}*1 + 2112], tmm3"
                )
            }
        }
    }
}

/// Sums of some lines, or of the halves of them. The size keeps two of these from the same places of a page, which stores and loads would
/// take for each other.
type Sums = Aligned<[i32; TOGETHER * 2 * 16 * TILE + 512]>;

/// Memory aligned to the lines of the cache.
#[repr(C, align(64))]
struct Aligned<T>(T);

/// Product with 8 bits and one scale per row of the matrix.
///
/// # Safety
/// As [`super::IntegerFn`], with AVX-512 F and VNNI and what `T` needs.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn rows<T: Tiles>(p: &IntegerProduct) {
    let is_last = p.until == p.k_blocks;
    if p.rows < ROWS_MIN && p.from == 0 && is_last {
        // SAFETY: the caller's promise.
        return unsafe { vnni::kernel(p.form)(p) };
    }
    let (first, sums) = (p.from / 2, p.c.cast::<i32>());
    let (pairs, resume) = (p.until / 2 - first, p.from > 0);
    let (a, b) = (p.a.wrapping_add(p.from * p.rows * LINE), p.panel.wrapping_add(p.from * LINE * COLUMNS));
    // SAFETY: the panel begins with the lines of weights, 2048 bytes for a pair, and A is in pairs of lines; C has the size of the sums, and those
    // of the parts before, which have an even number of lines.
    unsafe {
        T::configure(p.rows, 16);
        if pairs > 0 {
            T::whole(p.rows, a, b, pairs, sums, resume);
        }
    }
    if !is_last {
        return;
    }
    if p.k_blocks % 2 == 1 {
        // The last line alone, beside zeros.
        let mut a = Aligned([[0i8; 2 * LINE]; 2 * TILE]);
        let mut b = Aligned([0u8; 2 * LINE * COLUMNS]);
        for (row, a) in a.0[..p.rows].iter_mut().enumerate() {
            let from = p.a.wrapping_add(paired(p.k_blocks, p.rows, p.k_blocks - 1, row) * LINE);
            // SAFETY: a line of A.
            unsafe { a.as_mut_ptr().copy_from_nonoverlapping(from, LINE) };
        }
        let from = p.panel.wrapping_add((p.k_blocks - 1) * LINE * COLUMNS);
        // SAFETY: the last line of the panel; then one pair in memory of this function's own.
        unsafe {
            b.0.as_mut_ptr().copy_from_nonoverlapping(from, LINE * COLUMNS);
            T::whole(p.rows, a.0.as_ptr().cast(), b.0.as_ptr(), 1, sums, resume || pairs > 0);
        }
    }
    let of_columns: *const f32 = p.panel.wrapping_add(p.k_blocks * LINE * COLUMNS).cast();
    for group in 0..2 {
        // SAFETY: 32 scales end the panel.
        let scale = unsafe { _mm512_loadu_ps(of_columns.wrapping_add(group * 16)) };
        for row in 0..p.rows {
            let at = p.c.wrapping_add(row * COLUMNS + group * 16);
            // SAFETY: a row has a scale, and sixteen sums in C.
            unsafe {
                let x_scale = _mm512_set1_ps(p.scales.add(row).read_unaligned());
                let sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(at.cast()));
                _mm512_storeu_ps(at, _mm512_mul_ps(sum, _mm512_mul_ps(scale, x_scale)));
            }
        }
    }
}

/// Product with blocks of `BITS` bits.
///
/// # Safety
/// As [`super::IntegerFn`], with AVX-512 F, BW and VNNI and what `T` needs.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn blocks<T: Tiles, const BITS: u8, const SUBS: usize, const MINIMUM: bool, const CODES: bool>(
    p: &IntegerProduct,
) {
    if p.rows < ROWS_MIN {
        // SAFETY: the caller's promise.
        return unsafe { vnni::kernel(p.form)(p) };
    }
    // Two sub-scales: each half of a line has a product of its own.
    let shape = Shape { rows: p.rows, words: if SUBS == 2 { 4 } else { 8 } };
    // SAFETY: 5 to 32 rows.
    unsafe { T::configure(shape.rows, shape.words) };
    let (scaled, head_bytes) = (p.form.layout().lines, p.form.head_bytes());
    let (sub_bytes, line_bytes) = (p.form.sub_bytes(), p.form.line_bytes());
    let mut wide = Aligned([[0u8; 512]; LINES]);
    for group in 0..2 {
        let (mut head, mut next, mut left) = (p.panel, p.panel, 0);
        for first in (0..p.k_blocks).step_by(LINES) {
            let count = LINES.min(p.k_blocks - first);
            let mut places = [Place { head, line: next, values: next }; LINES];
            for (place, wide) in places[..count].iter_mut().zip(&mut wide.0) {
                if left == 0 {
                    (head, next, left) = (next, next.wrapping_add(head_bytes), scaled);
                }
                // SAFETY: the values of a line of the panel.
                let values = unsafe { expand::<BITS, CODES>(p.form, next.wrapping_add(sub_bytes), group, wide) };
                *place = Place { head, line: next, values };
                (next, left) = (next.wrapping_add(line_bytes), left - 1);
            }
            let part = Part { p, shape, group, first, places: &places[..count] };
            // SAFETY: the rows, lines and columns exist; the tiles are prepared for them.
            unsafe {
                part.tile::<T, false, BITS, SUBS, MINIMUM, CODES>();
                if p.rows > TILE {
                    part.tile::<T, true, BITS, SUBS, MINIMUM, CODES>();
                }
            }
        }
    }
}

/// Signed weights of sixteen columns of a line: where they lie in the panel if those are bytes, else `out`, to which they are written as
/// `[8 quads][16 columns][4]`. Fetches what follows in the panel.
///
/// # Safety
/// `values` is valid for those of a line; AVX-512 F and BW.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn expand<const BITS: u8, const CODES: bool>(
    form: Form,
    values: *const u8,
    group: usize,
    out: &mut [u8; 512],
) -> *const u8 {
    if BITS == 8 {
        (0..8).for_each(|quad| ahead(values.wrapping_add(quad * 128 + group * 64)));
        return values.wrapping_add(group * 64);
    }
    let (low, high) = (values.wrapping_add(group * 256), values.wrapping_add(512 + group * 128));
    (0..4).for_each(|i| ahead(low.wrapping_add(i * 64)));
    if BITS == 6 {
        (0..2).for_each(|i| ahead(high.wrapping_add(i * 64)));
    }
    let zero = _mm512_set1_epi8(form.layout().zero as i8);
    for (half, out) in out.as_chunks_mut::<256>().0.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let quads = unsafe { unpack::<BITS, CODES>(low, high, half) };
        for (quad, out) in quads.into_iter().zip(out.as_chunks_mut::<64>().0) {
            // SAFETY: 64 bytes.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_sub_epi8(quad, zero)) };
        }
    }
    out.as_ptr()
}

/// Addresses of a line: its scales and minima, its sub-scales, and the signed weights of sixteen columns.
#[derive(Clone, Copy)]
struct Place {
    head: *const u8,
    line: *const u8,
    values: *const u8,
}

/// Some lines of a product, for sixteen columns.
struct Part<'a> {
    p: &'a IntegerProduct,
    shape: Shape,
    group: usize,
    /// Number of the first line.
    first: usize,
    places: &'a [Place],
}

impl Part<'_> {
    /// Adds the lines' products with one tile row (the second if `SECOND`) to C, or begins C with them.
    ///
    /// # Safety
    /// As [`super::IntegerFn`], and the tile row exists; `T` is prepared for the shape; AVX-512 F.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn tile<
        T: Tiles,
        const SECOND: bool,
        const BITS: u8,
        const SUBS: usize,
        const MINIMUM: bool,
        const CODES: bool,
    >(
        &self,
    ) {
        let whole = self.places.len() / TOGETHER;
        // Sums of lines of which one set is made while the other is read; what lies beyond a tile's rows is never read.
        let mut memory = [const { std::mem::MaybeUninit::<Sums>::uninit() }; 2];
        let [one, other] = memory.each_mut().map(|sums| sums.as_mut_ptr().cast::<i32>());
        let sums = |i: usize| if i.is_multiple_of(2) { one } else { other };
        // SAFETY: the caller's promise; the lines exist, and the sums that are added were made before.
        unsafe {
            if whole > 0 {
                self.multiply::<T, TOGETHER, SECOND, BITS, SUBS>(0, one);
            }
            for i in 0..whole {
                if i + 1 < whole {
                    self.multiply::<T, TOGETHER, SECOND, BITS, SUBS>((i + 1) * TOGETHER, sums(i + 1));
                }
                self.add::<TOGETHER, SECOND, SUBS, MINIMUM, CODES>(i * TOGETHER, sums(i));
            }
            for line in whole * TOGETHER..self.places.len() {
                self.multiply::<T, 1, SECOND, BITS, SUBS>(line, one);
                self.add::<1, SECOND, SUBS, MINIMUM, CODES>(line, one);
            }
        }
    }

    /// Sums of `N` lines from number `from` of the part on: `[lines][halves][16 rows][16]`.
    ///
    /// # Safety
    /// As [`Self::tile`]; the lines exist, and `sums` has room for a [`Sums`].
    #[inline(always)]
    unsafe fn multiply<T: Tiles, const N: usize, const SECOND: bool, const BITS: u8, const SUBS: usize>(
        &self,
        from: usize,
        sums: *mut i32,
    ) {
        let (p, stride, halves) = (self.p, if BITS == 8 { 128 } else { 64 }, SUBS.max(1));
        let row = if SECOND { TILE } else { 0 };
        for i in 0..N {
            let a = p.a.wrapping_add(((self.first + from + i) * p.rows + row) * LINE);
            let b = self.places[from + i].values;
            for half in 0..halves {
                let (a, b) = (a.wrapping_add(half * 16), b.wrapping_add(half * 4 * stride));
                let sums = sums.wrapping_add((i * halves + half) * 16 * TILE);
                // SAFETY: the line exists in A and in the panel; `sums` has sixteen rows.
                unsafe { T::line::<SECOND>(self.shape, a, b, stride, sums) };
            }
        }
    }

    /// Adds the sums of `N` lines to C, times their scales, row by row.
    ///
    /// # Safety
    /// As [`Self::tile`]; the lines exist.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add<const N: usize, const SECOND: bool, const SUBS: usize, const MINIMUM: bool, const CODES: bool>(
        &self,
        from: usize,
        sums: *const i32,
    ) {
        let (p, column, halves_count) = (self.p, self.group * 16, SUBS.max(1));
        let first_row = if SECOND { TILE } else { 0 };
        let places: &[Place; N] = self.places[from..].first_chunk().expect("lines that exist");
        let zero = _mm512_setzero_ps();
        let (mut scale, mut subs, mut minimum, mut sub_minima) = ([zero; N], [[zero; 2]; N], [zero; N], [[zero; 2]; N]);
        for (i, place) in places.iter().enumerate() {
            // SAFETY: the head has 32 scales, and as many minima behind them if the format has any; a line begins with its sub-scales, and
            // sub-minima behind them.
            unsafe {
                scale[i] = scales::<CODES>(place.head.wrapping_add(column * 2));
                if MINIMUM {
                    minimum[i] = scales::<false>(place.head.wrapping_add(64 + column * 2));
                }
                for half in 0..SUBS {
                    subs[i][half] = factors::<true>(place.line.wrapping_add(half * COLUMNS + column));
                    if MINIMUM {
                        sub_minima[i][half] =
                            factors::<false>(place.line.wrapping_add((SUBS + half) * COLUMNS + column));
                    }
                }
            }
        }
        let begins = self.first == 0 && from == 0;
        let rows = if SECOND { p.rows - TILE } else { p.rows.min(TILE) };
        let at = (self.first + from) * p.rows + first_row;
        let (mut to, mut of_rows) = (p.c.wrapping_add(first_row * COLUMNS + column), sums);
        let (mut x_scales, mut x_sums) = (p.scales.wrapping_add(at), p.sums.wrapping_add(at));
        for _ in 0..rows {
            // SAFETY: sixteen columns of a row of C.
            let mut c = if begins { _mm512_setzero_ps() } else { unsafe { _mm512_loadu_ps(to) } };
            for i in 0..N {
                let mut of = [zero; 2];
                for (half, of) in of[..halves_count].iter_mut().enumerate() {
                    let from = of_rows.wrapping_add((i * halves_count + half) * 16 * TILE);
                    // SAFETY: sixteen sums of a row.
                    *of = _mm512_cvtepi32_ps(unsafe { _mm512_load_si512(from.cast()) });
                }
                let sum = match SUBS {
                    0 => of[0],
                    1 => _mm512_mul_ps(of[0], subs[i][0]),
                    _ => _mm512_fmadd_ps(of[1], subs[i][1], _mm512_mul_ps(of[0], subs[i][0])),
                };
                // SAFETY: the row has a scale for each line.
                let x_scale = _mm512_set1_ps(unsafe { *x_scales.wrapping_add(i * p.rows) });
                c = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale[i], x_scale), c);
                if MINIMUM {
                    // SAFETY: and the sums of the line's halves.
                    let [one, other] = halves(unsafe { *x_sums.wrapping_add(i * p.rows) });
                    let whole = _mm512_set1_ps((one + other) as f32);
                    let of_x = match SUBS {
                        0 => whole,
                        1 => _mm512_mul_ps(sub_minima[i][0], whole),
                        _ => {
                            let first = _mm512_mul_ps(sub_minima[i][0], _mm512_set1_ps(one as f32));
                            _mm512_fmadd_ps(sub_minima[i][1], _mm512_set1_ps(other as f32), first)
                        }
                    };
                    c = _mm512_fmadd_ps(of_x, _mm512_mul_ps(minimum[i], x_scale), c);
                }
            }
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(to, c) };
            (to, of_rows) = (to.wrapping_add(COLUMNS), of_rows.wrapping_add(16));
            (x_scales, x_sums) = (x_scales.wrapping_add(1), x_sums.wrapping_add(1));
        }
    }
}

#[cfg(test)]
pub(super) mod model {
    //! The tile operations in plain loops, for machines without AMX.

    use super::*;

    struct Model;

    /// Kernel for weights in `form`, on the model.
    pub(in crate::cpu::integer) fn kernel(form: Form) -> IntegerFn {
        kernel_on::<Model>(form)
    }

    /// # Safety
    /// `a` and `b` are valid for the places that are read.
    unsafe fn dot(a: *const i8, b: *const u8, stride: usize, words: usize, column: usize) -> i32 {
        let product = |k: usize| {
            // SAFETY: the caller's promise.
            let (a, b) = unsafe { (a.add(k).read(), b.add(k / 4 * stride + column * 4 + k % 4).read() as i8) };
            i32::from(a) * i32::from(b)
        };
        (0..words * 4).map(product).sum()
    }

    impl Tiles for Model {
        /// # Safety
        /// As [`Tiles::configure`].
        unsafe fn configure(_: usize, _: usize) {}

        /// # Safety
        /// As [`Tiles::line`].
        unsafe fn line<const SECOND: bool>(of: Shape, a: *const i8, b: *const u8, stride: usize, sums: *mut i32) {
            let rows = if SECOND { of.rows - TILE } else { of.rows.min(TILE) };
            for at in 0..rows * 16 {
                // SAFETY: the caller's promise.
                unsafe { sums.add(at).write(dot(a.add(at / 16 * LINE), b, stride, of.words, at % 16)) };
            }
        }

        /// # Safety
        /// As [`Tiles::whole`].
        unsafe fn whole(rows: usize, a: *const i8, b: *const u8, pairs: usize, sums: *mut i32, resume: bool) {
            for at in 0..rows * COLUMNS {
                // SAFETY: the caller's promise.
                unsafe {
                    let mut sum = if resume { sums.add(at).read() } else { 0 };
                    for pair in 0..pairs {
                        let a = a.add((pair * rows + at / COLUMNS) * 64);
                        sum += dot(a, b.add(pair * 2048), 128, 16, at % COLUMNS);
                    }
                    sums.add(at).write(sum);
                }
            }
        }
    }
}
