//! AMX: the sums of `portable.rs` in tiles of sixteen rows and sixteen columns, which `tdpbssd` adds up over 64 values of k.
//!
//! ```text
//! tmm0 tmm1   sums, rows 0..16,  columns 0..16 and 16..32        tmm4  A, rows 0..16      tmm6  B, columns 0..16
//! tmm2 tmm3   sums, rows 16..32, the same                        tmm5  A, rows 16..32     tmm7  B, columns 16..32
//! ```
//!
//! - One scale per row ([`Form::Rows`]): the sums stay in tiles over all k, of which a tile holds 64 values, or over a part of it, and
//!   wait in C between two parts.
//! - Blocks: each line of 32 values has a scale, so its sums leave their tiles for the same f32 additions as elsewhere. On the machine that
//!   was measured, additions and tile operations do not overlap (beside tiles one vector unit of two works), so some lines are multiplied first and
//!   added then: as many as have 16 KiB of sums. Weights of 4 and 6 bits are expanded for [`LINES`] lines at a time; C waits in memory between.
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
const LINES: usize = 8;
/// Most products of a tile with a line, or with half of one, whose sums wait for their additions.
const JOBS_MAX: usize = 4;
/// Rows of a tile.
const TILE: usize = 16;
/// Sums of a tile: sixteen rows and columns.
const TILE_SUMS: usize = TILE * 16;

/// Kernel for weights in `form`.
pub(super) fn kernel(form: Form) -> IntegerFn {
    kernel_on::<Machine>(form)
}

fn kernel_on<T: Tiles>(form: Form) -> IntegerFn {
    let Form::Blocks(layout) = form else { return rows::<T> };
    // Lines that are added together: `JOBS_MAX` products of lines, or of the halves of them.
    if layout.codes {
        return blocks::<T, 4, 0, 4, false, true>;
    }
    match (layout.bits, layout.subs, layout.minimum) {
        (8, ..) if layout.zero > 0 => vnni::kernel(form),
        (4, 0, false) => blocks::<T, 4, 0, 4, false, false>,
        (4, 0, true) => blocks::<T, 4, 0, 4, true, false>,
        (4, 1, true) => blocks::<T, 4, 1, 4, true, false>,
        (4, 2, false) => blocks::<T, 4, 2, 2, false, false>,
        (4, 2, true) => blocks::<T, 4, 2, 2, true, false>,
        (6, 0, false) => blocks::<T, 6, 0, 4, false, false>,
        (6, 0, true) => blocks::<T, 6, 0, 4, true, false>,
        (6, 1, true) => blocks::<T, 6, 1, 4, true, false>,
        (6, 2, false) => blocks::<T, 6, 2, 2, false, false>,
        (8, 0, false) => blocks::<T, 8, 0, 4, false, false>,
        (8, 1, false) => blocks::<T, 8, 1, 4, false, false>,
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

    /// Sums of all rows times 32 columns for some lines, or halves of lines: `[jobs][2 tile rows][2 groups of columns][16][16]`. What lies
    /// beyond the rows is not written.
    ///
    /// # Safety
    /// Prepared for `of`. There is at least one job, whose `a` is valid for the rows at `LINE` bytes each and whose `b` for `of.words` quads of 128
    /// bytes; `sums` has room for those of each job.
    unsafe fn lines(of: Shape, jobs: &[Job], sums: *mut i32);

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

/// A line, or half of one, of A and of the panel.
#[derive(Clone, Copy)]
#[repr(C)]
struct Job {
    /// Activations, `[rows]` at `LINE` bytes.
    a: *const i8,
    /// Weights, `[quads][32 columns][4]`.
    b: *const u8,
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
    /// As [`Tiles::lines`].
    unsafe fn lines(of: Shape, jobs: &[Job], sums: *mut i32) {
        // A store whose tile is not ready holds up what follows, so that each waits for later products: three where there are two tile rows.
        macro_rules! lines {
            ($first:expr, $step:expr, $end:expr) => {
                // SAFETY: the caller's promise about the jobs, the sums and the configuration.
                unsafe {
                    std::arch::asm!(
                        $first,
                        "dec {count}",
                        "jz 3f",
                        "2:",
                        $step,
                        "dec {count}",
                        "jnz 2b",
                        "3:",
                        $end,
                        job = inout(reg) jobs.as_ptr() => _,
                        count = inout(reg) jobs.len() => _,
                        sums = inout(reg) sums => _,
                        a = out(reg) _,
                        b = out(reg) _,
                        line = in(reg) LINE,
                        quad = in(reg) 128usize,
                        row = in(reg) 64usize,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            };
        }
        // Each product is followed by the store of an earlier one; those of the job before lie below its last one.
        macro_rules! tall {
            ($one:literal, $two:literal, $three:literal) => {
                concat!(
                    "mov {a}, [{job}]\nmov {b}, [{job} + 8]\nadd {job}, 16\n",
                    "tileloadd tmm4, [{a} + {line}*1]\ntileloadd tmm6, [{b} + {quad}*1]\n",
                    "tilezero tmm0\ntdpbssd tmm0, tmm4, tmm6\n",
                    $one,
                    "tileloadd tmm5, [{a} + {line}*1 + 512]\ntilezero tmm2\ntdpbssd tmm2, tmm5, tmm6\n",
                    $two,
                    "tileloadd tmm7, [{b} + {quad}*1 + 64]\ntilezero tmm1\ntdpbssd tmm1, tmm4, tmm7\n",
                    $three,
                    "tilezero tmm3\ntdpbssd tmm3, tmm5, tmm7\n",
                    "tilestored [{sums} + {row}*1], tmm0\n",
                )
            };
        }
        macro_rules! short {
            ($one:literal) => {
                concat!(
                    "mov {a}, [{job}]\nmov {b}, [{job} + 8]\nadd {job}, 16\n",
                    "tileloadd tmm4, [{a} + {line}*1]\ntileloadd tmm6, [{b} + {quad}*1]\n",
                    "tilezero tmm0\ntdpbssd tmm0, tmm4, tmm6\n",
                    $one,
                    "tileloadd tmm7, [{b} + {quad}*1 + 64]\ntilezero tmm1\ntdpbssd tmm1, tmm4, tmm7\n",
                    "tilestored [{sums} + {row}*1], tmm0\n",
                )
            };
        }
        if of.rows > TILE {
            lines!(
                tall!("", "", ""),
                tall!(
                    "tilestored [{sums} + {row}*1 + 2048], tmm2\n",
                    "tilestored [{sums} + {row}*1 + 1024], tmm1\n",
                    "tilestored [{sums} + {row}*1 + 3072], tmm3\nadd {sums}, 4096\n"
                ),
                concat!(
                    "tilestored [{sums} + {row}*1 + 2048], tmm2\n",
                    "tilestored [{sums} + {row}*1 + 1024], tmm1\n",
                    "tilestored [{sums} + {row}*1 + 3072], tmm3",
                )
            );
        } else {
            lines!(
                short!(""),
                short!("tilestored [{sums} + {row}*1 + 1024], tmm1\nadd {sums}, 4096\n"),
                "tilestored [{sums} + {row}*1 + 1024], tmm1"
            );
        }
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

/// Sums of [`JOBS_MAX`] jobs, in the order of [`Tiles::lines`].
type Sums = Aligned<[i32; JOBS_MAX * 4 * TILE_SUMS]>;

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

/// Product with blocks of `BITS` bits, `TOGETHER` lines of which are multiplied and then added.
///
/// # Safety
/// As [`super::IntegerFn`], with AVX-512 F, BW and VNNI and what `T` needs.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn blocks<
    T: Tiles,
    const BITS: u8,
    const SUBS: usize,
    const TOGETHER: usize,
    const MINIMUM: bool,
    const CODES: bool,
>(
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
    let mut wide = Aligned([[0u8; LINE * COLUMNS]; LINES]);
    let (mut head, mut next, mut left) = (p.panel, p.panel, 0);
    for first in (0..p.k_blocks).step_by(LINES) {
        let count = LINES.min(p.k_blocks - first);
        let mut places = [Place { head, line: next, values: next }; LINES];
        for (place, wide) in places[..count].iter_mut().zip(&mut wide.0) {
            if left == 0 {
                (head, next, left) = (next, next.wrapping_add(head_bytes), scaled);
            }
            // SAFETY: the values of a line of the panel.
            let values = unsafe { expand::<BITS, CODES>(p.form, next.wrapping_add(sub_bytes), wide) };
            *place = Place { head, line: next, values };
            (next, left) = (next.wrapping_add(line_bytes), left - 1);
        }
        let part = Part { p, shape, first, places: &places[..count] };
        let whole = count - count % TOGETHER;
        // SAFETY: the lines exist; the tiles are prepared for them.
        unsafe {
            for from in (0..whole).step_by(TOGETHER) {
                part.lines::<T, TOGETHER, SUBS, MINIMUM, CODES>(from);
            }
            for from in whole..count {
                part.lines::<T, 1, SUBS, MINIMUM, CODES>(from);
            }
        }
    }
}

/// Signed weights of a line, `[8 quads][32 columns][4]`: where they lie in the panel if those are bytes, else `out`, to which they are written.
/// Fetches what follows in the panel.
///
/// # Safety
/// `values` is valid for those of a line; AVX-512 F and BW.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn expand<const BITS: u8, const CODES: bool>(
    form: Form,
    values: *const u8,
    out: &mut [u8; LINE * COLUMNS],
) -> *const u8 {
    (0..LINE * COLUMNS * BITS as usize / 512).for_each(|i| ahead(values.wrapping_add(i * 64)));
    if BITS == 8 {
        return values;
    }
    let zero = _mm512_set1_epi8(form.layout().zero as i8);
    for group in 0..2 {
        let (low, high) = (values.wrapping_add(group * 256), values.wrapping_add(512 + group * 128));
        for half in 0..2 {
            // SAFETY: the caller's promise.
            let quads = unsafe { unpack::<BITS, CODES>(low, high, half) };
            for (i, quad) in quads.into_iter().enumerate() {
                let to = out[(half * 4 + i) * 128 + group * 64..].first_chunk_mut::<64>().expect("a quad");
                // SAFETY: 64 bytes.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_sub_epi8(quad, zero)) };
            }
        }
    }
    out.as_ptr()
}

/// Addresses of a line: its scales and minima, its sub-scales, and its signed weights.
#[derive(Clone, Copy)]
struct Place {
    head: *const u8,
    line: *const u8,
    values: *const u8,
}

/// Some lines of a product.
struct Part<'a> {
    p: &'a IntegerProduct,
    shape: Shape,
    /// Number of the first line.
    first: usize,
    places: &'a [Place],
}

impl Part<'_> {
    /// Adds the products of `N` lines from number `from` of the part on to C, or begins C with them.
    ///
    /// # Safety
    /// As [`super::IntegerFn`]; the lines exist; `T` is prepared for the shape; AVX-512 F.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn lines<T: Tiles, const N: usize, const SUBS: usize, const MINIMUM: bool, const CODES: bool>(
        &self,
        from: usize,
    ) {
        let (p, halves) = (self.p, SUBS.max(1));
        let mut jobs = [Job { a: p.a, b: p.panel }; JOBS_MAX];
        for (i, place) in self.places[from..from + N].iter().enumerate() {
            let a = p.a.wrapping_add((self.first + from + i) * p.rows * LINE);
            for half in 0..halves {
                jobs[i * halves + half] =
                    Job { a: a.wrapping_add(half * LINE / 2), b: place.values.wrapping_add(half * LINE * COLUMNS / 2) };
            }
        }
        // What lies beyond a tile's rows is never read.
        let mut sums = std::mem::MaybeUninit::<Sums>::uninit();
        let sums = sums.as_mut_ptr().cast::<i32>();
        // SAFETY: the lines exist in A and in the panel, and the sums that are added were made before.
        unsafe {
            T::lines(self.shape, &jobs[..N * halves], sums);
            for row in (0..p.rows).step_by(TILE) {
                let of_rows = sums.wrapping_add(row / TILE * 2 * TILE_SUMS);
                if SUBS == 0 {
                    self.add::<N, 2, SUBS, MINIMUM, CODES>(from, row, 0, of_rows);
                } else {
                    self.add::<N, 1, SUBS, MINIMUM, CODES>(from, row, 0, of_rows);
                    self.add::<N, 1, SUBS, MINIMUM, CODES>(from, row, 1, of_rows.wrapping_add(TILE_SUMS));
                }
            }
        }
    }

    /// Adds the sums of `N` lines to C, times their scales, for sixteen rows from `first_row` on and `GROUPS` groups of sixteen columns from
    /// number `group` on.
    ///
    /// # Safety
    /// As [`Self::lines`]; the rows and groups exist.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add<const N: usize, const GROUPS: usize, const SUBS: usize, const MINIMUM: bool, const CODES: bool>(
        &self,
        from: usize,
        first_row: usize,
        group: usize,
        sums: *const i32,
    ) {
        let (p, column, halves_count) = (self.p, group * 16, SUBS.max(1));
        let places: &[Place; N] = self.places[from..].first_chunk().expect("lines that exist");
        let zero = _mm512_setzero_ps();
        let (mut scale, mut subs) = ([[zero; GROUPS]; N], [[[zero; 2]; GROUPS]; N]);
        let (mut minimum, mut sub_minima) = (scale, subs);
        for (i, place) in places.iter().enumerate() {
            for g in 0..GROUPS {
                let column = column + g * 16;
                // SAFETY: the head has 32 scales, and as many minima behind them if the format has any; a line begins with its sub-scales, and
                // sub-minima behind them.
                unsafe {
                    scale[i][g] = scales::<CODES>(place.head.wrapping_add(column * 2));
                    if MINIMUM {
                        minimum[i][g] = scales::<false>(place.head.wrapping_add(64 + column * 2));
                    }
                    for half in 0..SUBS {
                        subs[i][g][half] = factors::<true>(place.line.wrapping_add(half * COLUMNS + column));
                        if MINIMUM {
                            sub_minima[i][g][half] =
                                factors::<false>(place.line.wrapping_add((SUBS + half) * COLUMNS + column));
                        }
                    }
                }
            }
        }
        let begins = self.first == 0 && from == 0;
        let at = (self.first + from) * p.rows + first_row;
        let (mut to, mut of_rows) = (p.c.wrapping_add(first_row * COLUMNS + column), sums);
        let (mut x_scales, mut x_sums) = (p.scales.wrapping_add(at), p.sums.wrapping_add(at));
        for _ in first_row..p.rows.min(first_row + TILE) {
            let mut c = [zero; GROUPS];
            if !begins {
                for (g, c) in c.iter_mut().enumerate() {
                    // SAFETY: sixteen columns of a row of C.
                    *c = unsafe { _mm512_loadu_ps(to.wrapping_add(g * 16)) };
                }
            }
            for i in 0..N {
                // SAFETY: the row has a scale for each line.
                let x_scale = _mm512_set1_ps(unsafe { *x_scales.wrapping_add(i * p.rows) });
                let mut x_halves = [0, 0];
                if MINIMUM {
                    // SAFETY: and the sums of the line's halves.
                    x_halves = halves(unsafe { *x_sums.wrapping_add(i * p.rows) });
                }
                for (g, c) in c.iter_mut().enumerate() {
                    let mut of = [zero; 2];
                    for (half, of) in of[..halves_count].iter_mut().enumerate() {
                        let from = of_rows.wrapping_add(((i * halves_count + half) * 4 + g) * TILE_SUMS);
                        // SAFETY: sixteen sums of a row.
                        *of = _mm512_cvtepi32_ps(unsafe { _mm512_load_si512(from.cast()) });
                    }
                    let sum = match SUBS {
                        0 => of[0],
                        1 => _mm512_mul_ps(of[0], subs[i][g][0]),
                        _ => _mm512_fmadd_ps(of[1], subs[i][g][1], _mm512_mul_ps(of[0], subs[i][g][0])),
                    };
                    *c = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale[i][g], x_scale), *c);
                    if MINIMUM {
                        let [one, other] = x_halves;
                        let whole = _mm512_set1_ps((one + other) as f32);
                        let of_x = match SUBS {
                            0 => whole,
                            1 => _mm512_mul_ps(sub_minima[i][g][0], whole),
                            _ => {
                                let first = _mm512_mul_ps(sub_minima[i][g][0], _mm512_set1_ps(one as f32));
                                _mm512_fmadd_ps(sub_minima[i][g][1], _mm512_set1_ps(other as f32), first)
                            }
                        };
                        *c = _mm512_fmadd_ps(of_x, _mm512_mul_ps(minimum[i][g], x_scale), *c);
                    }
                }
            }
            for (g, c) in c.into_iter().enumerate() {
                // SAFETY: as above.
                unsafe { _mm512_storeu_ps(to.wrapping_add(g * 16), c) };
            }
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
        /// As [`Tiles::lines`].
        unsafe fn lines(of: Shape, jobs: &[Job], sums: *mut i32) {
            for (i, job) in jobs.iter().enumerate() {
                for at in 0..of.rows * COLUMNS {
                    let (row, column) = (at / COLUMNS, at % COLUMNS);
                    let tile = (i * 2 + row / TILE) * 2 + column / 16;
                    let to = tile * TILE_SUMS + row % TILE * 16 + column % 16;
                    // SAFETY: the caller's promise.
                    unsafe { sums.add(to).write(dot(job.a.add(row * LINE), job.b, 128, of.words, column)) };
                }
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
