//! Values of a quantized matrix, made row by row from its tensors where a device packs them.
//!
//! A value is `(code − zero) · scale` of integers, which is exact in f32 with scales of 16 bits, or the product of an E4M3 number and its
//! scale, rounded once to f32; devices round values to bf16 as those of f32 tensors. Layouts follow public code:
//!
//! ```text
//! GPTQ   qweight [columns / n, rows]     n codes of a row in a word, lowest bits first    AutoGPTQ qlinear_cuda_old.py
//! AWQ    qweight [columns, rows / 8]     rows 0 2 4 6 1 3 5 7 in a word                   AutoAWQ awq/utils/packing_utils.py
//! packed weight_packed [rows, columns/n] n codes of a row in a word, lowest bits first    compressed-tensors pack_quantized/helpers.py
//! fp8    weight [rows, columns]          one byte                                         DeepSeek-V3 inference/kernel.py
//! ```

use penstock_kernels::{CodeForm, CodeGroups, CodeKind, CodeRows, DType, E4M3, RowReader};

use crate::model_config::GROUP_STEP;

/// Bits of a word.
const WORD: usize = 32;
/// Place in a word of each of eight rows, in codes from the lowest bits, as AWQ stores them.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Bytes of a quantized matrix, whose lengths fit `rows` and `columns` (checked when the checkpoint was opened).
#[derive(Debug)]
pub(super) struct Rows<'a> {
    /// Rows of the stored matrix.
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// First row of the stored matrix that belongs to the tensor.
    pub(super) first: usize,
    pub(super) codes: Codes<'a>,
    pub(super) scales: Numbers<'a>,
}

/// Codes of a matrix by their layout.
#[derive(Debug)]
pub(super) enum Codes<'a> {
    /// E4M3 numbers `[rows, columns]`, with a scale for each block of rows and columns.
    Float8 { bytes: &'a [u8], block: [usize; 2] },
    /// Integers of 8 bits in two's complement, `[rows, columns]`. `as_rows`: they are multiplied as such.
    Int8 { bytes: &'a [u8], block: [usize; 2], as_rows: bool },
    /// Words of unsigned integers.
    Words { words: &'a [[u8; 4]], bits: usize, layout: Layout, zeros: Zeros<'a>, groups: Groups<'a> },
}

/// Order of the codes in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// `[columns / n, rows]`; scales are `[groups, rows]`.
    Down,
    /// `[columns, rows / 8]`, eight rows in AWQ's order; scales are `[groups, rows]`.
    Across,
    /// `[rows, columns / n]`; scales are `[rows, groups]`.
    Along,
}

/// Zero points of the groups.
#[derive(Debug)]
pub(super) enum Zeros<'a> {
    /// Half of the range.
    Middle,
    /// Words in the order of the layout's scales, with rows packed, and a number that is added.
    Words { words: &'a [[u8; 4]], offset: i32 },
}

/// Groups of columns with a scale each.
#[derive(Debug)]
pub(super) enum Groups<'a> {
    /// Groups of so many columns.
    Equal(usize),
    /// Group of each column, i32.
    Listed { of: &'a [[u8; 4]], count: usize },
}

impl Groups<'_> {
    fn count(&self, columns: usize) -> usize {
        match self {
            Groups::Equal(size) => columns.div_ceil(*size),
            Groups::Listed { count, .. } => *count,
        }
    }

    fn of(&self, column: usize) -> usize {
        match self {
            Groups::Equal(size) => column / size,
            Groups::Listed { of, .. } => u32::from_le_bytes(of[column]) as usize,
        }
    }
}

/// Scales as stored.
#[derive(Debug)]
pub(super) struct Numbers<'a> {
    pub(super) dtype: DType,
    pub(super) bytes: &'a [u8],
}

impl Numbers<'_> {
    fn at(&self, index: usize) -> f32 {
        let half = || u16::from_le_bytes(self.bytes.as_chunks::<2>().0[index]);
        match self.dtype {
            DType::Bf16 => f32::from_bits(u32::from(half()) << 16),
            DType::F16 => half::f16::from_bits(half()).to_f32(),
            _ => f32::from_le_bytes(self.bytes.as_chunks::<4>().0[index]),
        }
    }
}

impl RowReader for Rows<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        let first = self.first + first;
        match &self.codes {
            Codes::Float8 { bytes, block } => {
                self.read_bytes(first, bytes, *block, out, |code| E4M3[usize::from(code)])
            }
            Codes::Int8 { bytes, block, .. } => {
                self.read_bytes(first, bytes, *block, out, |code| f32::from(code.cast_signed()));
            }
            Codes::Words { words, bits, layout, zeros, groups } => {
                let words = Words { words, bits: *bits, layout: *layout, rows: self.rows, columns: self.columns };
                self.read_words(first, &words, zeros, groups, out);
            }
        }
    }

    fn integers(&self, row: usize) -> Option<(&[u8], f32)> {
        let Codes::Int8 { bytes, block, as_rows: true } = &self.codes else { return None };
        let row = self.first + row;
        Some((&bytes[row * self.columns..][..self.columns], self.scales.at(row / block[0])))
    }

    fn codes(&self) -> Option<CodeForm<'_>> {
        let runs = |block: &[usize; 2]| CodeGroups::Runs(block[1]);
        Some(match &self.codes {
            Codes::Float8 { block, .. } => CodeForm { kind: CodeKind::Float8, groups: runs(block) },
            Codes::Int8 { as_rows: true, .. } => return None,
            Codes::Int8 { block, .. } => CodeForm { kind: CodeKind::Eight, groups: runs(block) },
            Codes::Words { bits, groups, .. } => CodeForm {
                kind: if *bits == 4 { CodeKind::Four } else { CodeKind::Eight },
                groups: match groups {
                    Groups::Equal(size) => CodeGroups::Runs(*size),
                    Groups::Listed { of, count } => CodeGroups::Listed { of, count: *count },
                },
            },
        })
    }

    fn read_codes(&self, first: usize, out: &mut CodeRows<'_>) {
        let first = self.first + first;
        match &self.codes {
            Codes::Float8 { bytes, block } => self.copy_bytes(first, bytes, *block, out),
            Codes::Int8 { bytes, block, .. } => {
                self.copy_bytes(first, bytes, *block, out);
                // From two's complement to integers around 128.
                out.codes.iter_mut().for_each(|code| *code ^= 128);
                out.zeros.fill(128);
            }
            Codes::Words { words, bits, layout, zeros, groups } => {
                let words = Words { words, bits: *bits, layout: *layout, rows: self.rows, columns: self.columns };
                self.copy_words(first, &words, zeros, groups.count(self.columns), out);
            }
        }
    }
}

impl Rows<'_> {
    /// Reads rows of bytes with scales for blocks.
    fn read_bytes(&self, first: usize, bytes: &[u8], block: [usize; 2], out: &mut [f32], value: impl Fn(u8) -> f32) {
        let across = self.columns.div_ceil(block[1]);
        let rows = bytes[first * self.columns..].chunks_exact(self.columns);
        for (row, (out, bytes)) in (first..).zip(out.chunks_exact_mut(self.columns).zip(rows)) {
            let scales = row / block[0] * across..;
            for (scale, (out, bytes)) in scales.zip(out.chunks_mut(block[1]).zip(bytes.chunks(block[1]))) {
                let scale = self.scales.at(scale);
                for (out, &code) in out.iter_mut().zip(bytes) {
                    *out = value(code) * scale;
                }
            }
        }
    }

    /// Copies rows of bytes, with the scales of their blocks.
    fn copy_bytes(&self, first: usize, bytes: &[u8], block: [usize; 2], out: &mut CodeRows<'_>) {
        let across = self.columns.div_ceil(block[1]);
        out.codes.copy_from_slice(&bytes[first * self.columns..][..out.codes.len()]);
        for (row, scales) in (first..).zip(out.scales.chunks_exact_mut(across)) {
            let of_row = row / block[0] * across..;
            scales.iter_mut().zip(of_row).for_each(|(scale, at)| *scale = self.scales.at(at));
        }
    }

    /// Copies the codes of rows of words, with the scales and zero points of their groups.
    fn copy_words(&self, first: usize, words: &Words<'_>, zeros: &Zeros<'_>, count: usize, out: &mut CodeRows<'_>) {
        let columns = self.columns;
        for group in 0..count {
            for row in 0..out.codes.len() / columns {
                let at = words.scale_at(first + row, group, count);
                out.scales[row * count + group] = self.scales.at(at);
                // One of 8 bits at most, as the codes are.
                out.zeros[row * count + group] = words.zero(zeros, first + row, group, count) as u8;
            }
        }
        for begin in (0..columns).step_by(GROUP_STEP) {
            let width = GROUP_STEP.min(columns - begin);
            for (row, codes) in out.codes.chunks_exact_mut(columns).enumerate() {
                words.codes(first + row, begin, &mut codes[begin..][..width]);
            }
        }
    }

    fn read_words(&self, first: usize, words: &Words<'_>, zeros: &Zeros<'_>, groups: &Groups<'_>, out: &mut [f32]) {
        let (columns, rows) = (self.columns, out.len() / self.columns);
        let count = groups.count(columns);
        // Zero point and scale of each row and group: words and scales of neighbouring rows lie beside each other, or all groups of a row do.
        let mut parts = vec![(0, 0.0); rows * count];
        for group in 0..count {
            for (row, parts) in parts.chunks_exact_mut(count).enumerate() {
                let at = words.scale_at(first + row, group, count);
                parts[group] = (words.zero(zeros, first + row, group, count), self.scales.at(at));
            }
        }
        // Blocks of columns one below the other, so that the words of all rows are in the cache.
        let mut codes = [0; GROUP_STEP];
        for begin in (0..columns).step_by(GROUP_STEP) {
            let width = GROUP_STEP.min(columns - begin);
            for (row, (out, parts)) in out.chunks_exact_mut(columns).zip(parts.chunks_exact(count)).enumerate() {
                words.codes(first + row, begin, &mut codes[..width]);
                let out = out[begin..][..width].iter_mut().zip(&codes);
                match groups {
                    Groups::Equal(size) => {
                        let (zero, scale) = parts[begin / size];
                        out.for_each(|(out, &code)| *out = (i32::from(code) - zero) as f32 * scale);
                    }
                    Groups::Listed { .. } => out.zip(begin..).for_each(|((out, &code), column)| {
                        let (zero, scale) = parts[groups.of(column)];
                        *out = (i32::from(code) - zero) as f32 * scale;
                    }),
                }
            }
        }
    }
}

/// Codes in words, and their place by row and column.
struct Words<'a> {
    words: &'a [[u8; 4]],
    bits: usize,
    layout: Layout,
    rows: usize,
    columns: usize,
}

impl Words<'_> {
    fn word(words: &[[u8; 4]], at: usize, place: usize, bits: usize) -> u8 {
        let mask = (1u32 << bits) - 1;
        (u32::from_le_bytes(words[at]) >> (place * bits) & mask) as u8
    }

    /// Codes of columns of a row, from `begin`, which is the first of a word.
    fn codes(&self, row: usize, begin: usize, out: &mut [u8]) {
        let (bits, per_word) = (self.bits, WORD / self.bits);
        match self.layout {
            Layout::Down | Layout::Along => {
                let (start, step) = match self.layout {
                    Layout::Down => (begin / per_word * self.rows + row, self.rows),
                    _ => (row * self.columns.div_ceil(per_word) + begin / per_word, 1),
                };
                for (i, out) in out.chunks_mut(per_word).enumerate() {
                    let word = u32::from_le_bytes(self.words[start + i * step]);
                    for (place, out) in out.iter_mut().enumerate() {
                        *out = (word >> (place * bits) & ((1 << bits) - 1)) as u8;
                    }
                }
            }
            Layout::Across => {
                let (step, at, place) = (self.rows / per_word, row / per_word, AWQ_PLACES[row % per_word]);
                for (out, column) in out.iter_mut().zip(begin..) {
                    *out = Self::word(self.words, column * step + at, place, bits);
                }
            }
        }
    }

    /// Index of the scale of a row's group among `groups`.
    fn scale_at(&self, row: usize, group: usize, groups: usize) -> usize {
        if self.layout == Layout::Along { row * groups + group } else { group * self.rows + row }
    }

    /// Zero point of a row's group.
    fn zero(&self, zeros: &Zeros<'_>, row: usize, group: usize, groups: usize) -> i32 {
        let Zeros::Words { words, offset } = zeros else { return 1 << (self.bits - 1) };
        let per_word = WORD / self.bits;
        let (at, place) = match self.layout {
            Layout::Down => (group * (self.rows / per_word) + row / per_word, row % per_word),
            Layout::Across => (group * (self.rows / per_word) + row / per_word, AWQ_PLACES[row % per_word]),
            Layout::Along => (row / per_word * groups + group, row % per_word),
        };
        // One that the addition of GPTQ's first version leads out of the range of codes begins anew at 0.
        (i32::from(Self::word(words, at, place, self.bits)) + offset) & ((1 << self.bits) - 1)
    }
}
