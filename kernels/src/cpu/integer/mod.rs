//! Products of integers: weights in blocks of 4 to 8 bits, activations in 8, sums exact.
//!
//! One arithmetic per format for every number of rows (`docs/adr/0019-weight-formats.md`). For each line of 32 values of k, in ascending
//! order, with all sums in parentheses exact integers:
//!
//! ```text
//! c = fma((Σ sub_scale · Σ (value − zero) · x), scale · x_scale, c)
//! c = fma((Σ sub_minimum · Σ x), minimum · x_scale, c)                 formats with minima
//! ```
//!
//! Weights of one scale per row ([`Form::Rows`]) have one sum over all k: `c = (Σ value · x) · (scale · x_scale)`. Integers add up alike
//! in every order, so each kernel gives the same bits; `portable.rs` states them, `avx2.rs`, `vnni.rs` and `amx.rs` are fast.
//!
//! A panel of 32 columns is a stream in the order of k:
//!
//! ```text
//! blocks   per scale:  scales f16 [32] (of codes bf16) · minima f16 [32] if any · lines
//!          a line:     sub-scales i8 [subs][32] · sub-minima u8 [subs][32] if any · values
//!          4 bits      [2][4][16 columns][4 k]: quads 0 to 3 of k in the low nibbles, 4 to 7 in the high ones; values, or MXFP4's codes of them
//!          6 bits      the low 4 so, then [2][2][16 columns][4 k] with the high 2 bits of four quads in a byte
//!          8 bits      [8 quads][32 columns][4 k]
//! rows     lines of 8 bits, then scales f32 [32]
//! ```

pub(super) mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
mod portable;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod vnni;

use crate::blocks::{LINE, Layout, RowBlocks, from_f16, weight};

/// Columns of a panel.
const COLUMNS: usize = 32;
/// Lines of a part of a product in tiles: 16 KiB of a panel, which stay in a first-level cache of 48 KiB beside the stream of A.
const LINES_AT_ONCE: usize = 16;
/// Most columns of a matrix with one scale per row: so many products of 128 · 127 (weights are −128 at least) fit a sum of 32 bits.
pub(super) const ROW_COLUMNS_MAX: usize = 131_072;

/// Form of packed integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// A block format.
    Blocks(Layout),
    /// 8 bits with one scale per row of the matrix.
    Rows,
}

impl Form {
    fn layout(self) -> Layout {
        match self {
            Form::Blocks(layout) => layout,
            Form::Rows => Layout { bits: 8, zero: 0, lines: 1, subs: 0, minimum: false, codes: false },
        }
    }

    /// Bits of a value.
    pub(super) fn bits(self) -> u8 {
        self.layout().bits
    }

    /// Bytes of the scales and minima before some lines.
    fn head_bytes(self) -> usize {
        match self {
            Form::Blocks(layout) => COLUMNS * 2 * (1 + usize::from(layout.minimum)),
            Form::Rows => 0,
        }
    }

    /// Bytes of the sub-scales and sub-minima of a line.
    fn sub_bytes(self) -> usize {
        let layout = self.layout();
        layout.subs * COLUMNS * (1 + usize::from(layout.minimum))
    }

    fn line_bytes(self) -> usize {
        self.sub_bytes() + LINE * COLUMNS * usize::from(self.layout().bits) / 8
    }

    /// Bytes of a panel of `k_blocks` lines; `None` if they are too many.
    pub(super) fn panel_bytes(self, k_blocks: usize) -> Option<usize> {
        match self {
            Form::Blocks(layout) => {
                (k_blocks / layout.lines).checked_mul(self.head_bytes() + layout.lines * self.line_bytes())
            }
            Form::Rows => k_blocks.checked_mul(self.line_bytes())?.checked_add(COLUMNS * 4),
        }
    }

    /// Index of the first byte of line `k` in its panel, and of the scales that it is under.
    fn line_at(self, k: usize) -> (usize, usize) {
        let lines = self.layout().lines;
        let head = k / lines * (self.head_bytes() + lines * self.line_bytes());
        (head + self.head_bytes() + k % lines * self.line_bytes(), head)
    }

    /// Writes `row` as column `n` of `panel`, which was zero.
    pub(super) fn scatter(self, panel: &mut [u8], n: usize, row: &RowBlocks) {
        let Form::Blocks(layout) = self else { unreachable!("rows have scales of their own") };
        for (k, values) in row.values.chunks_exact(LINE).enumerate() {
            let (at, head) = self.line_at(k);
            if k % layout.lines == 0 {
                panel[head + n * 2..][..2].copy_from_slice(&row.scales[k / layout.lines].to_le_bytes());
                if layout.minimum {
                    panel[head + 64 + n * 2..][..2].copy_from_slice(&row.minima[k / layout.lines].to_le_bytes());
                }
            }
            for sub in 0..layout.subs {
                panel[at + sub * COLUMNS + n] = row.sub_scales[k][sub] as u8;
                if layout.minimum {
                    panel[at + (layout.subs + sub) * COLUMNS + n] = row.sub_minima[k][sub];
                }
            }
            self.scatter_line(&mut panel[at + self.sub_bytes()..], n, values);
        }
    }

    /// Writes `values` of 8 bits and their scale as column `n` of `panel`, which was zero.
    pub(super) fn scatter_row(self, panel: &mut [u8], n: usize, values: &[i8], scale: f32) {
        for (k, values) in values.chunks(LINE).enumerate() {
            let at = self.line_at(k).0;
            for (k, &value) in values.iter().enumerate() {
                panel[at + k / 4 * 128 + n * 4 + k % 4] = value as u8;
            }
        }
        let end = panel.len();
        panel[end - COLUMNS * 4 + n * 4..][..4].copy_from_slice(&scale.to_le_bytes());
    }

    fn scatter_line(self, line: &mut [u8], n: usize, values: &[u8]) {
        for (k, &value) in values.iter().enumerate() {
            let (quad, group, at) = (k / 4, n / 16, n % 16 * 4 + k % 4);
            match self.layout().bits {
                8 => line[quad * 128 + n * 4 + k % 4] = value,
                bits => {
                    line[group * 256 + quad % 4 * 64 + at] |= (value & 15) << (quad / 4 * 4);
                    if bits == 6 {
                        line[512 + group * 128 + quad / 4 * 64 + at] |= (value >> 4) << (quad % 4 * 2);
                    }
                }
            }
        }
    }

    /// Value of column `n` at `k` in the values of a line, before the zero is subtracted.
    #[inline(always)]
    fn value(self, line: &[u8], n: usize, k: usize) -> i32 {
        let (quad, group, at) = (k / 4, n / 16, n % 16 * 4 + k % 4);
        let held = match self.layout().bits {
            8 => line[quad * 128 + n * 4 + k % 4],
            bits => {
                let low = line[group * 256 + quad % 4 * 64 + at] >> (quad / 4 * 4) & 15;
                let high =
                    if bits == 6 { line[512 + group * 128 + quad / 4 * 64 + at] >> (quad % 4 * 2) & 3 } else { 0 };
                low | high << 4
            }
        };
        self.layout().value(held)
    }

    /// Writes column `n` of `panel` as f32 weights. `out`: `[32 · k_blocks]`.
    pub(super) fn gather(self, panel: &[u8], n: usize, out: &mut [f32]) {
        let layout = self.layout();
        let bits = |at: usize| u16::from_le_bytes([panel[at], panel[at + 1]]);
        let whole = panel.len() - COLUMNS * 4 + n * 4;
        for (k, out) in out.chunks_exact_mut(LINE).enumerate() {
            let (at, head) = self.line_at(k);
            let (scale, minimum) = match self {
                Form::Blocks(_) if layout.minimum => {
                    (layout.scale(bits(head + n * 2)), from_f16(bits(head + 64 + n * 2)))
                }
                Form::Blocks(_) => (layout.scale(bits(head + n * 2)), 0.0),
                Form::Rows => (f32::from_le_bytes(*panel[whole..].first_chunk().expect("a scale")), 0.0),
            };
            let values = &panel[at + self.sub_bytes()..];
            for (i, out) in out.iter_mut().enumerate() {
                let sub = (i / 16).min(layout.subs.saturating_sub(1));
                let sub_scale = if layout.subs == 0 { 1 } else { panel[at + sub * COLUMNS + n] as i8 };
                let sub_minimum = match (layout.subs, layout.minimum) {
                    (0, _) | (_, false) => 1,
                    (subs, true) => panel[at + (subs + sub) * COLUMNS + n],
                };
                let value = self.value(values, n, i) - i32::from(layout.zero);
                *out = weight(scale * f32::from(sub_scale), value, minimum, sub_minimum);
            }
        }
    }
}

/// One product: a group of rows of activations times one panel. [`IntegerFn`] states the requirements on the pointers.
#[derive(Clone, Copy)]
pub(super) struct IntegerProduct {
    /// Activations, `[k_blocks][rows][32]`; for [`Form::Rows`] in the order of [`paired`].
    pub(super) a: *const i8,
    /// Scales of the activations, `[k_blocks][rows]`; `[rows]` for [`Form::Rows`].
    pub(super) scales: *const f32,
    /// Sums of the halves of each line of activations, two of 16 bits in one word, in the order of the lines.
    pub(super) sums: *const u32,
    pub(super) rows: usize,
    pub(super) panel: *const u8,
    pub(super) form: Form,
    pub(super) k_blocks: usize,
    /// Lines that are multiplied: all, or a part ([`Integers::lines_at_once`]).
    pub(super) from: usize,
    pub(super) until: usize,
    /// Result, `[rows][32]`; between two parts the sums so far, as i32.
    pub(super) c: *mut f32,
}

/// Index of line `k` of row `row` in a group of `rows` rows with one scale each: `[k_blocks / 2][rows][2]`, then the last of an odd number
/// of lines, `[rows]`. So 64 values of a row are one line of a cache, which a tile row of AMX holds.
#[inline(always)]
fn paired(k_blocks: usize, rows: usize, k: usize, row: usize) -> usize {
    let is_alone = k + 1 == k_blocks && k.is_multiple_of(2);
    if is_alone { k * rows + row } else { (k / 2 * rows + row) * 2 + k % 2 }
}

/// A kernel.
///
/// # Safety
/// The machine has the kernel's instructions. `1 <= rows <= Integers::rows_max`; `a`, `scales`, `sums` and `c` are valid for as many values as
/// [`IntegerProduct`] says, `c` is nobody else's, and `panel` is valid for `form.panel_bytes(k_blocks)` bytes, aligned to 64.
/// `from < until <= k_blocks`. If [`Integers::lines_at_once`] is not 0, `from` is a multiple of it, and all lines before `from` were multiplied into `c`.
pub(super) type IntegerFn = unsafe fn(&IntegerProduct);

/// Set of kernels, chosen once at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Integers {
    /// Rust alone.
    Portable,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW and VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// AMX-INT8 for groups of several rows, and VNNI for the rest.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Integers {
    /// The fastest set that this machine has; with tiles only if `with_tiles`.
    pub(super) fn best(with_tiles: bool) -> Self {
        Self::all(with_tiles).pop().expect("a portable set")
    }

    fn has_tiles(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self == Integers::Amx;
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }

    /// Most rows of a group: a line of weights is unpacked once for all of them.
    pub(super) fn rows_max(self) -> usize {
        if self.has_tiles() { 32 } else { 16 }
    }

    /// Lines of one part of a product of which a first-level cache holds the weights while many groups meet them; 0 where all lines are taken at once.
    pub(super) fn lines_at_once(self, form: Form) -> usize {
        if self.has_tiles() && form == Form::Rows { LINES_AT_ONCE } else { 0 }
    }

    /// Sets that this machine has, the fastest last. The process asks the system for tiles only if `with_tiles`.
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "tiles are of x86-64"))]
    fn all(with_tiles: bool) -> Vec<Self> {
        let mut all = vec![Integers::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx2 = super::detect::has_avx2_fma() && is_x86_feature_detected!("f16c");
            let has_vnni = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vnni");
            all.extend(has_avx2.then_some(Integers::Avx2));
            all.extend(has_vnni.then_some(Integers::Vnni));
            let has_tiles = with_tiles && has_vnni && super::detect::has_amx_int8();
            all.extend(has_tiles.then_some(Integers::Amx));
        }
        all
    }

    /// Kernel for weights in `form`.
    pub(super) fn kernel(self, form: Form) -> IntegerFn {
        match self {
            Integers::Portable => portable::product,
            #[cfg(target_arch = "x86_64")]
            Integers::Avx2 => avx2::kernel(form),
            #[cfg(target_arch = "x86_64")]
            Integers::Vnni => vnni::kernel(form),
            #[cfg(target_arch = "x86_64")]
            Integers::Amx => amx::kernel(form),
        }
    }
}
