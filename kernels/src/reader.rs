//! Matrices whose stored form the devices do not know: whoever does makes their values, row by row.

use std::fmt;

/// Rows of a matrix whose scales lie in tensors of their own (GPTQ, AWQ, fp8, compressed-tensors), made where a device packs them, so that
/// no second copy of the matrix exists.
pub trait RowReader: Sync + fmt::Debug {
    /// Writes rows `first..first + count`, as they are stored. `out`: `[count, columns]`.
    ///
    /// # Panics
    /// If the rows are not there.
    fn read(&self, first: usize, out: &mut [f32]);

    /// Integers of row `row` in two's complement, `[columns]`, and their scale, where the matrix is to be multiplied as such with activations
    /// of 8 bits; `None` in other forms. The answer is the same kind for every row.
    fn integers(&self, row: usize) -> Option<(&[u8], f32)>;

    /// Form of the rows as codes with a scale for each group of columns, for devices that hold codes; `None` in other forms. The values of
    /// the codes are then those that [`RowReader::read`] writes, bit by bit.
    fn codes(&self) -> Option<CodeForm<'_>> {
        None
    }

    /// Writes codes, scales and zero points of rows `first..`, as they are stored, in as many rows as `out` has.
    ///
    /// # Panics
    /// If the rows are not there, or [`RowReader::codes`] is `None`.
    fn read_codes(&self, first: usize, out: &mut CodeRows<'_>) {
        unreachable!("row {first} of {} columns was said to have no codes", out.columns)
    }
}

/// Form of a matrix of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeForm<'a> {
    /// Numbers that the codes stand for.
    pub kind: CodeKind,
    /// Columns that share a scale in each row.
    pub groups: CodeGroups<'a>,
}

/// Numbers that codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeKind {
    /// Integers from 0 to 15, less the zero point of their group.
    Four,
    /// Integers from 0 to 255, less the zero point of their group.
    Eight,
    /// E4M3 numbers ([`E4M3`]); zero points have no meaning.
    Float8,
}

impl CodeKind {
    /// Bits of a code.
    pub fn bits(self) -> u8 {
        match self {
            CodeKind::Four => 4,
            CodeKind::Eight | CodeKind::Float8 => 8,
        }
    }
}

/// Groups of columns that share a scale in each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeGroups<'a> {
    /// Groups of so many columns, the last of what is left.
    Runs(usize),
    /// Group of each column, as u32 in little endian.
    Listed {
        /// Groups, `[columns]`, each below `count`.
        of: &'a [[u8; 4]],
        /// Number of groups.
        count: usize,
    },
}

impl CodeGroups<'_> {
    /// Number of groups of a matrix of `columns` columns.
    pub fn count(&self, columns: usize) -> usize {
        match self {
            CodeGroups::Runs(size) => columns.div_ceil(*size),
            CodeGroups::Listed { count, .. } => *count,
        }
    }
}

/// Some rows of a matrix of codes. A value is `(code − zero) · scale`, or that of an E4M3 code times the scale, in f32.
#[derive(Debug)]
pub struct CodeRows<'a> {
    /// Columns of the matrix.
    pub columns: usize,
    /// Codes, `[rows, columns]`, one per byte.
    pub codes: &'a mut [u8],
    /// Scales, `[rows, groups]`.
    pub scales: &'a mut [f32],
    /// Zero points, `[rows, groups]`.
    pub zeros: &'a mut [u8],
}

/// Numbers of the codes of E4M3: sign, 4 bits of exponent around 7, 3 bits of fraction, no infinities (Micikevicius et al. 2022, arXiv:2209.05433).
pub static E4M3: [f32; 256] = {
    let mut numbers = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (sign, exponent, fraction) = ((code as u32 & 128) << 24, code as u32 >> 3 & 15, code as u32 & 7);
        numbers[code] = f32::from_bits(match (exponent, fraction) {
            (15, 7) => sign | 0x7fc0_0000,
            (0, _) => sign | (fraction as f32 / 512.0).to_bits(),
            _ => sign | (exponent + 120) << 23 | fraction << 20,
        });
        code += 1;
    }
    numbers
};
