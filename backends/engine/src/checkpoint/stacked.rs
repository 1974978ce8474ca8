//! Experts that a folder has stacked, as GPT-OSS's are: one tensor of all gates and ups of a layer, their rows in turn, and one of all downs.
//!
//! Two forms are known. Numbers are `[experts, inputs, outputs]`, so an expert's matrix lies on its side. MXFP4 is a tensor `_blocks`
//! `[experts, outputs, inputs / 32, 16]` with two codes per byte, the even value in the low half, and a tensor `_scales`
//! `[experts, outputs, inputs / 32]` of powers of two. Biases are `[experts, outputs]` in both.
//!
//! An expert's matrix or bias is made of its part when it is asked for, in the form in which other checkpoints store it (MXFP4: as GGUF has it), so that
//! a load holds the experts of one layer twice and not those of the model.

use std::ops::Range;

use penstock_kernels::DType;

use crate::model_config::ModelConfig;

/// Values of an MXFP4 block, and bytes of its codes.
const BLOCK: (usize, usize) = (32, 16);

/// Matrix or bias of one expert, named by the stacked tensors that hold it.
pub(super) struct ExpertPart {
    pub(super) expert: usize,
    /// Name of the stacked tensor of numbers; MXFP4 has [`ExpertPart::blocks`] and [`ExpertPart::scales`] in its place.
    pub(super) tensor: String,
    pub(super) is_bias: bool,
    /// Number of the part's first row among the stacked ones, and distance from one to the next.
    pub(super) turn: Turn,
}

/// Rows of a part among those of its stacked tensor: `first`, `first + step`, …
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) first: usize,
    pub(super) step: usize,
}

impl ExpertPart {
    /// Part with one of the names that [`crate::families::tensors`] lists; `None` for tensors that are not stacked.
    pub(super) fn of(name: &str, config: &ModelConfig) -> Option<Self> {
        let names = config.experts.as_ref().map(|experts| experts.names).filter(|names| names.stacked)?;
        let (block, rest) = name.split_once(".experts.")?;
        let [expert, part, kind] = rest.split('.').collect::<Vec<_>>().try_into().ok()?;
        let (stem, turn) = match names.parts.iter().position(|name| *name == part)? {
            2 => ("down_proj", Turn { first: 0, step: 1 }),
            first => ("gate_up_proj", Turn { first, step: 2 }),
        };
        let is_bias = kind == "bias";
        let suffix = if is_bias { "_bias" } else { "" };
        Some(Self { expert: expert.parse().ok()?, tensor: format!("{block}.experts.{stem}{suffix}"), is_bias, turn })
    }

    pub(super) fn blocks(&self) -> String {
        format!("{}_blocks", self.tensor)
    }

    pub(super) fn scales(&self) -> String {
        format!("{}_scales", self.tensor)
    }

    /// Shape of the stacked tensor of numbers, for a part of `shape` of one of `experts`.
    pub(super) fn numbers_shape(&self, shape: &[usize], experts: usize) -> Vec<usize> {
        let outputs = shape[0] * self.turn.step;
        if self.is_bias { vec![experts, outputs] } else { vec![experts, shape[1], outputs] }
    }

    /// Shapes of the blocks and of the scales; `None` if a row of the part is not whole blocks.
    pub(super) fn mxfp4_shapes(&self, shape: &[usize], experts: usize) -> Option<[Vec<usize>; 2]> {
        let scales = vec![experts, shape[0] * self.turn.step, shape[1] / BLOCK.0];
        let blocks = scales.iter().copied().chain([BLOCK.1]).collect();
        shape[1].is_multiple_of(BLOCK.0).then_some([blocks, scales])
    }
}

/// Form of an expert's stored values, from which a plain tensor is made.
#[derive(Debug)]
pub(super) enum Form {
    /// Numbers `[inputs, outputs]`, of which a row of the part is a column; a bias is one row of them.
    Numbers,
    /// MXFP4 codes, with the bytes of the scales in the same file or another.
    Mxfp4 {
        /// File of the scales.
        file: usize,
        scales: Range<usize>,
    },
}

/// Place of a part in the stacked tensor of its expert.
#[derive(Debug)]
pub(super) struct Stacked {
    pub(super) turn: Turn,
    pub(super) form: Form,
}

/// Rows of a part that are made of numbers at once: a line of cache at 2 bytes each, gate and up in turn.
const ROWS: usize = 16;

/// Makes a matrix `[rows, columns]` of the numbers of one expert, `[columns, rows · step]` of `size` bytes.
pub(super) fn from_numbers(stored: &[u8], shape: [usize; 2], size: usize, turn: Turn) -> Vec<u8> {
    match size {
        2 => turned(stored.as_chunks::<2>().0, shape, turn).into_flattened(),
        4 => turned(stored.as_chunks::<4>().0, shape, turn).into_flattened(),
        _ => unreachable!("numbers have 16 or 32 bits"),
    }
}

fn turned<const SIZE: usize>(stored: &[[u8; SIZE]], [rows, columns]: [usize; 2], turn: Turn) -> Vec<[u8; SIZE]> {
    let mut out = vec![[0; SIZE]; rows * columns];
    for first in (0..rows).step_by(ROWS) {
        let out = &mut out[first * columns..rows.min(first + ROWS) * columns];
        for (column, stored) in stored.chunks_exact(rows * turn.step).enumerate() {
            let stored = stored[turn.first + first * turn.step..].iter().step_by(turn.step);
            for (row, number) in out.chunks_exact_mut(columns).zip(stored) {
                row[column] = *number;
            }
        }
    }
    out
}

/// Makes rows of GGUF's blocks of the codes and scales of one expert: `[rows · step, columns / 32]` blocks.
pub(super) fn from_mxfp4(codes: &[u8], scales: &[u8], [rows, columns]: [usize; 2], turn: Turn) -> Vec<u8> {
    const SIZE: usize = DType::Mxfp4.block().1;
    let blocks = columns / BLOCK.0;
    let mut out = vec![[0; SIZE]; rows * blocks];
    let codes = codes.as_chunks::<{ BLOCK.1 }>().0.chunks_exact(blocks);
    let stored = codes.zip(scales.chunks_exact(blocks)).skip(turn.first).step_by(turn.step);
    for (out, (codes, scales)) in out.chunks_exact_mut(blocks).zip(stored) {
        for (out, (codes, scale)) in out.iter_mut().zip(codes.iter().zip(scales)) {
            out[0] = *scale;
            // Neighbours share a byte here; in GGUF's blocks, values that are half a block apart do.
            for i in 0..BLOCK.1 / 2 {
                let (low, high) = (codes[i], codes[i + BLOCK.1 / 2]);
                out[1 + 2 * i] = low & 15 | high << 4;
                out[2 + 2 * i] = low >> 4 | high & 0xf0;
            }
        }
    }
    out.into_flattened()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_and_ups_are_taken_out_of_their_turns_and_turned() {
        // Two inputs, three gates and three ups.
        let stored: Vec<u8> =
            [10u16, 20, 11, 21, 12, 22, 30, 40, 31, 41, 32, 42].iter().flat_map(|v| v.to_le_bytes()).collect();
        let of = |first, step, rows| {
            let bytes = from_numbers(&stored, [rows, 2], 2, Turn { first, step });
            bytes.as_chunks::<2>().0.iter().map(|v| u16::from_le_bytes(*v)).collect::<Vec<_>>()
        };
        assert_eq!(of(0, 2, 3), [10, 30, 11, 31, 12, 32]);
        assert_eq!(of(1, 2, 3), [20, 40, 21, 41, 22, 42]);
        assert_eq!(of(0, 1, 6), [10, 30, 20, 40, 11, 31, 21, 41, 12, 32, 22, 42]);
        let bias = from_numbers(&stored[..12], [3, 1], 2, Turn { first: 1, step: 2 });
        assert_eq!(bias, [20, 0, 21, 0, 22, 0]);
        // More rows than are made at once.
        let wide: Vec<u8> = (0..80u16).flat_map(u16::to_le_bytes).collect();
        let odd: Vec<u8> = (0..40u16).flat_map(|i| (2 * i + 1).to_le_bytes()).collect();
        assert_eq!(from_numbers(&wide, [40, 1], 2, Turn { first: 1, step: 2 }), odd);
        let singles: Vec<u8> = [1.5f32, -2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let want: Vec<u8> = [1.5f32, 3.0, -2.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(from_numbers(&singles, [2, 2], 4, Turn { first: 0, step: 1 }), want);
    }

    #[test]
    fn codes_are_put_where_gguf_has_them() {
        // Two rows of one block; the second one's codes are 0, 1, …, 15, 15, 14, …, 0.
        let values: Vec<u8> = (0..16).chain((0..16).rev()).collect();
        let second = values.as_chunks::<2>().0.iter().map(|[even, odd]| even | odd << 4);
        let codes: Vec<u8> = [0x77; 16].into_iter().chain(second).collect();
        let got = from_mxfp4(&codes, &[3, 200], [1, 32], Turn { first: 1, step: 2 });
        let want = (0..16).map(|i| values[i] | values[i + 16] << 4);
        assert_eq!(got, [200].into_iter().chain(want).collect::<Vec<u8>>());
    }
}
