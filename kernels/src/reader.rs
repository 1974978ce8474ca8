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
}
