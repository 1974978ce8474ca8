//! Matrices of codes of 4 or 8 bits with a scale per row and group of columns (GPTQ, AWQ, fp8, compressed-tensors), held as codes. A product
//! expands a panel, or some blocks of its k, into a thread's scratch, in the layout of a panel of bf16, and goes on as with bf16.
//!
//! ```text
//! weight = bf16((code − zero) · scale)        integers of 4 or 8 bits
//! weight = bf16(e4m3(code) · scale)           fp8
//! ```
//!
//! A matrix that is expanded while it is packed has the same values, so outputs are the same bits, held in either way, on every path.
//! `portable` here states them; `avx2.rs` is fast.
//!
//! A panel of 32 columns:
//!
//! ```text
//! codes    per block of 32 k, 512 or 1024 bytes, see `place`
//! scales   f32 [groups][32]
//! zeros    u8 [groups][32], integers alone
//! flags    64 bytes, of which the first is 1 in a panel with a scale or a code that only the portable expansion reads
//! ```
//!
//! Behind the last panel of a section whose groups are listed (act-order) lie the groups of its k, u16 `[32 · k_blocks]`.
//!
//! Cost: one token reads a weight once, so the expansion has the time that memory saves. At 10 GB/s a core of 3.4 GHz gets a bf16 in 0.68 cycles, 4 bits
//! in 0.17. For runs of 4 bits and for fp8 each column has a table of 16 values for its group, which byte shuffles look up, and shuffles bring columns
//! beside each other: 32 shuffles for 128 weights, two per cycle. Other forms multiply and round in f32, which takes about
//! twice as long. The next codes are fetched meanwhile, since the product between two expansions reads no memory.

#[cfg(target_arch = "x86_64")]
mod avx2;

use std::ops::Range;

use super::lanes::{from_bf16, to_bf16};
use super::pack::BLOCK;
use crate::device::{CodeGroups, CodeKind, CodeRows, E4M3};
use crate::source::Source;

/// Columns of a panel.
const COLUMNS: usize = 32;
/// Bytes of the flags, a line, so that panels are aligned to lines.
const FLAGS: usize = 64;

/// Form of packed codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    kind: CodeKind,
    groups: Groups,
    /// Columns of the matrix, which may end within a block of 32.
    columns: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Groups {
    /// Runs of so many blocks of 32 columns.
    Runs(usize),
    /// So many groups, with a list of the columns' own.
    Listed(usize),
}

impl Form {
    /// Form in which a matrix of codes is held; `None` if it is expanded to bf16 while it is packed. The only place of this choice.
    pub(super) fn of(kind: CodeKind, groups: CodeGroups<'_>, columns: usize) -> Option<Self> {
        let groups = match groups {
            CodeGroups::Runs(size) if size >= columns => Groups::Runs(columns.div_ceil(32)),
            CodeGroups::Runs(size) if size.is_multiple_of(32) => Groups::Runs(size / 32),
            CodeGroups::Listed { count, .. } if kind != CodeKind::Float8 && count <= 1 << 16 => Groups::Listed(count),
            CodeGroups::Runs(_) | CodeGroups::Listed { .. } => return None,
        };
        Some(Self { kind, groups, columns })
    }

    /// Form of a source; `None` if it has no codes or they are not held.
    pub(super) fn of_source(source: &Source<'_>) -> Option<Self> {
        let codes = source.codes()?;
        Self::of(codes.kind, codes.groups, source.columns)
    }

    fn k_blocks(self) -> usize {
        self.columns.div_ceil(32)
    }

    fn count(self) -> usize {
        match self.groups {
            Groups::Runs(blocks) => self.k_blocks().div_ceil(blocks),
            Groups::Listed(count) => count,
        }
    }

    /// Bits of a code.
    pub(super) fn bits(self) -> u8 {
        self.kind.bits()
    }

    /// Bytes of the codes of a block.
    fn block_bytes(self) -> usize {
        if self.kind == CodeKind::Four { BLOCK / 2 } else { BLOCK }
    }

    /// Index of the first byte of scales, zero points and flags.
    fn parts(self) -> [usize; 3] {
        let scales = self.k_blocks() * self.block_bytes();
        let zeros = scales + self.count() * COLUMNS * 4;
        let held = if self.kind == CodeKind::Float8 { 0 } else { self.count() * COLUMNS };
        [scales, zeros, (zeros + held).next_multiple_of(FLAGS)]
    }

    /// Bytes of a panel. They do not overflow: a matrix of so many columns is in memory, and a group has some.
    pub(super) fn panel_bytes(self) -> usize {
        self.parts()[2] + FLAGS
    }

    /// Bytes behind the last panel.
    pub(super) fn list_bytes(self) -> usize {
        match self.groups {
            Groups::Runs(_) => 0,
            Groups::Listed(_) => self.k_blocks() * 32 * 2,
        }
    }

    /// Place of column `n` at `k` in a block: its byte and the lowest of its bits.
    ///
    /// Codes that are looked up lie as shuffles read them, sixteen k of a column side by side, and columns four apart in the two halves of a register.
    /// The others lie as the values of bf16 do, of 4 bits eight k in a word.
    fn place(self, n: usize, k: usize) -> (usize, usize) {
        let (octet, lane, turn) = (n / 8, n % 8 / 4, n % 4);
        match (self.kind, self.groups) {
            (CodeKind::Four, Groups::Runs(_)) => {
                (octet * 128 + k / 16 * 64 + turn % 2 * 32 + lane * 16 + k % 16, turn / 2 * 4)
            }
            (CodeKind::Float8, _) => (octet * 256 + k / 16 * 128 + turn * 32 + lane * 16 + k % 16, 0),
            (CodeKind::Four, Groups::Listed(_)) => {
                (((octet / 2 * 4 + k / 8) * 2 + octet % 2) * 32 + n % 8 * 4 + k % 8 / 2, k % 2 * 4)
            }
            (CodeKind::Eight, _) => (octet / 2 * 512 + k / 2 * 32 + n % 16 * 2 + k % 2, 0),
        }
    }

    /// Makes `panel`, which was zero, one whose columns are all zero.
    pub(super) fn clear(self, panel: &mut [u8]) {
        let [scales, zeros, _] = self.parts();
        panel[scales..zeros].as_chunks_mut::<4>().0.fill(1.0f32.to_le_bytes());
    }

    /// Writes a row of codes as column `n` of `panel`, which was cleared.
    pub(super) fn scatter(self, panel: &mut [u8], n: usize, row: &CodeRows<'_>) {
        let [scales, zeros, flags] = self.parts();
        for (block, codes) in row.codes.chunks(32).enumerate() {
            let block = &mut panel[block * self.block_bytes()..][..self.block_bytes()];
            for (k, &code) in codes.iter().enumerate() {
                let (at, low) = self.place(n, k);
                block[at] |= code << low;
            }
        }
        let mut is_odd = self.kind == CodeKind::Float8 && row.codes.iter().any(|code| code & 127 == 127);
        for (group, &scale) in row.scales.iter().enumerate() {
            let at = group * COLUMNS + n;
            panel[scales + at * 4..][..4].copy_from_slice(&scale.to_le_bytes());
            if self.kind != CodeKind::Float8 {
                panel[zeros + at] = row.zeros[group];
            }
            is_odd |= self.is_odd(scale);
        }
        panel[flags] |= u8::from(is_odd);
    }

    /// True of a scale with which some products may be no numbers, or so small that they become zero, or so large or small that numbers of E4M3 are not
    /// made of each other by adding to exponents. No model has such a scale; its panels are expanded by `portable`.
    fn is_odd(self, scale: f32) -> bool {
        let size = scale.abs();
        match self.kind {
            CodeKind::Four | CodeKind::Eight => size != 0.0 && !size.is_normal(),
            // 2⁻¹¹⁶ to 2¹¹⁸.
            CodeKind::Float8 => !(f32::from_bits(11 << 23)..=f32::from_bits(245 << 23)).contains(&size),
        }
    }

    /// Writes the list of groups behind the last panel.
    pub(super) fn write_list(self, groups: CodeGroups<'_>, list: &mut [u8]) {
        let CodeGroups::Listed { of, count } = groups else { return };
        for (group, to) in of.iter().zip(list.as_chunks_mut::<2>().0) {
            let group = u32::from_le_bytes(*group);
            assert!((group as usize) < count, "group {group} of {count}");
            *to = (group as u16).to_le_bytes();
        }
    }
}

/// Panel of codes.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    form: Form,
    bytes: &'a [u8],
    list: &'a [u8],
}

impl<'a> Panel<'a> {
    /// Panel `index` of those in `values`, which end with the list of groups.
    pub(super) fn new(form: Form, values: &'a [u8], index: usize) -> Self {
        let size = form.panel_bytes();
        let (bytes, list) = (&values[index * size..][..size], &values[values.len() - form.list_bytes()..]);
        Self { form, bytes, list }
    }

    /// True if only the portable expansion reads the panel.
    #[cfg_attr(not(any(test, target_arch = "x86_64")), expect(dead_code, reason = "for x86-64 and tests"))]
    pub(super) fn is_odd(&self) -> bool {
        self.bytes[self.form.parts()[2]] != 0
    }

    fn group(&self, k: usize) -> usize {
        match self.form.groups {
            Groups::Runs(blocks) => k / 32 / blocks,
            Groups::Listed(_) => usize::from(u16::from_le_bytes(self.list.as_chunks::<2>().0[k])),
        }
    }

    /// Value of column `n` at `k`, which is one of the matrix's columns.
    fn value(&self, n: usize, k: usize) -> u16 {
        let form = self.form;
        let (at, low) = form.place(n, k % 32);
        let code = self.bytes[k / 32 * form.block_bytes() + at] >> low;
        let [scales, zeros, _] = form.parts();
        let group = self.group(k) * COLUMNS + n;
        let scale = f32::from_le_bytes(*self.bytes[scales + group * 4..].first_chunk().expect("a scale"));
        let integer = |code: u8| (i32::from(code) - i32::from(self.bytes[zeros + group])) as f32;
        to_bf16(
            match form.kind {
                CodeKind::Four => integer(code & 15),
                CodeKind::Eight => integer(code),
                CodeKind::Float8 => E4M3[usize::from(code)],
            } * scale,
        )
    }

    /// Writes column `n` as f32, zero beyond the matrix's columns. `out`: `[32 · k_blocks]`.
    pub(super) fn gather(&self, n: usize, out: &mut [f32]) {
        let (columns, behind) = out.split_at_mut(self.form.columns);
        columns.iter_mut().enumerate().for_each(|(k, out)| *out = from_bf16(self.value(n, k)));
        behind.fill(0.0);
    }

    /// Writes blocks `k` as values of bf16. `out`: as many blocks of [`BLOCK`] values.
    fn portable(&self, k: Range<usize>, out: &mut [u16]) {
        for (block, out) in k.zip(out.as_chunks_mut::<BLOCK>().0) {
            for (at, out) in out.iter_mut().enumerate() {
                let (n, k) = (at / 512 * 16 + at % 32 / 2, at % 512 / 32 * 2 + at % 2);
                *out = if block * 32 + k < self.form.columns { self.value(n, block * 32 + k) } else { 0 };
            }
        }
    }

    /// Clears what lies beyond the matrix's columns in its last block.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for x86-64"))]
    fn clear_end(&self, k: &Range<usize>, out: &mut [u16]) {
        let rest = self.form.columns % 32;
        if rest > 0 && k.end == self.form.k_blocks() {
            let block = out.as_chunks_mut::<BLOCK>().0.last_mut().expect("the last block");
            for (at, out) in block.iter_mut().enumerate() {
                if at % 512 / 32 * 2 + at % 2 >= rest {
                    *out = 0;
                }
            }
        }
    }
}

/// Way of expanding codes, chosen once at start. Each gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expander {
    /// Rust alone.
    Portable,
    /// AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Expander {
    /// The fastest way that this machine has.
    pub(super) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            return Expander::Avx2;
        }
        Expander::Portable
    }

    /// Writes blocks `k` of a panel as values of bf16, in the layout of a packed panel. `out`: as many blocks of [`BLOCK`] values.
    ///
    /// # Panics
    /// If `out` has another length, or the panel fewer blocks.
    pub(super) fn expand(self, panel: &Panel<'_>, k: Range<usize>, out: &mut [u16]) {
        assert!(k.start <= k.end && k.end <= panel.form.k_blocks() && out.len() == k.len() * BLOCK, "shape of blocks");
        match self {
            Expander::Portable => panel.portable(k, out),
            #[cfg(target_arch = "x86_64")]
            Expander::Avx2 if !panel.is_odd() => {
                // SAFETY: `best` chose it where the machine has AVX2; lengths were checked above, those of the panel are its form's.
                unsafe { avx2::expand(panel, k.clone(), out) };
                panel.clear_end(&k, out);
            }
            #[cfg(target_arch = "x86_64")]
            Expander::Avx2 => panel.portable(k, out),
        }
    }
}

/// Bytes of a matrix of `rows` × `columns` codes as it is held; `None` if it is expanded to bf16.
pub(super) fn held_bytes(kind: CodeKind, groups: CodeGroups<'_>, rows: usize, columns: usize) -> Option<u64> {
    let form = Form::of(kind, groups, columns)?;
    Some(form.panel_bytes() as u64 * rows.div_ceil(COLUMNS) as u64 + form.list_bytes() as u64)
}
