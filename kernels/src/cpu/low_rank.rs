//! Low-rank additions to products, for the rows of sequences that have an adapter: `y += B·(scale · A·x)`.
//!
//! Two parts. Before a product, `low = scale · A·x` of each adapted row, an item being a few rows times a few rows of A. Then, while a finished
//! tile of the product is in cache, `B·low` is added to the lines of adapted rows, whatever form the weight is held in; the epilogue sees the sum.
//! Lines of other rows are not touched, so their bits are those of a step without adapters.
//!
//! Matrices are bf16 as weights are, x is what its buffer holds (bf16, or f32 where products round to integers), and sums are f32 over lanes in
//! one fixed order. So a row's addition depends on the row and its adapter alone, and has the same bits on every path.
//!
//! Cost of rank r: `r · (in + out)` multiply-adds per row, and `2 · r · (in + out)` bytes per adapter and step, beside `in · out` and
//! `2 · in · out` of the weight: 2.1 % at rank 16 of 1024 × 3072. These multiply-adds are elementwise: by AVX2 tiles are no better, where they are
//! (AVX-512 with bf16, AMX) prefill pays more than that share.

use std::ops::Range;

use super::lanes::to_bf16;
use super::operand::{Groups, Operand, Shared};
use super::pack::Packed;
use super::pool::Items;
use super::scratch::Scratch;
use super::vector::{RANKS, VectorOps};
use super::{Content, CpuDevice, Loaded};
use crate::device::{ADAPTERS_MAX, AdapterSlot, Buffer, KernelError, LowRank, Rows, Weight};
use crate::host::{Arena, Region};
use crate::source::{CheckedLowRank, checked_low_ranks};
use crate::step::Step;

/// Most rows of an item: enough to keep a share of A in L2 while they pass.
const ROWS: usize = 8;
/// Blocks of A's rows of an item, so that a row is widened once for sixteen of them.
const BLOCKS: usize = 4;

/// Additions of one adapter to one weight, packed.
pub(super) struct Additions {
    /// Rows of all matrices A, padded to [`RANKS`]: bf16 `[ranks / RANKS][k / 16][RANKS][16]`.
    a: Region<u16>,
    /// Factor of each row of A, 0 for those that pad.
    scales: Vec<f32>,
    /// Columns of the product in sixteens, two per panel.
    halves: Vec<Half>,
    /// Columns of all matrices B that reach each half: bf16 `[ranks of the half][16]`, half after half.
    b: Region<u16>,
}

/// Sixteen columns of a product: the rows of A that reach them, and the first of their lines of B.
#[derive(Clone, Debug)]
struct Half {
    ranks: Range<usize>,
    first: usize,
}

impl Additions {
    /// Packs `parts`. `output_of`: the output of the weight that a column of its panels is, if any.
    fn pack(
        arena: &mut Arena,
        parts: &[CheckedLowRank],
        weight: &Packed,
        output_of: &dyn Fn(usize) -> Option<usize>,
    ) -> Result<Self, KernelError> {
        let ranks: usize = parts.iter().map(|part| part.rank).sum();
        let (padded, columns, k) = (ranks.next_multiple_of(RANKS), weight.columns, weight.k_blocks * 32);
        let mut a = arena.alloc::<u16>(padded * k, "an adapter")?;
        let rows = parts.iter().flat_map(|part| part.a.chunks_exact(columns));
        for (rank, row) in rows.enumerate() {
            let block = &mut a[rank / RANKS * RANKS * k..][..RANKS * k];
            for (i, &value) in row.iter().enumerate() {
                block[(i / 16 * RANKS + rank % RANKS) * 16 + i % 16] = to_bf16(value);
            }
        }
        let mut scales: Vec<f32> = parts.iter().flat_map(|part| vec![part.scale; part.rank]).collect();
        scales.resize(padded, 0.0);
        // Parts with their first row of A.
        let mut first = 0;
        let parts: Vec<(usize, &CheckedLowRank)> = parts
            .iter()
            .map(|part| {
                first += part.rank;
                (first - part.rank, part)
            })
            .collect();
        let mut halves = Vec::with_capacity(weight.panels * 2);
        let mut lines = 0;
        for half in 0..weight.panels * 2 {
            let outputs: Vec<usize> = (half * 16..half * 16 + 16).filter_map(output_of).collect();
            let reaching = parts.iter().filter(|(_, part)| outputs.iter().any(|output| part.outputs.contains(output)));
            let ranks = reaching.fold(0..0, |all: Range<usize>, (first, part)| {
                let start = if all.is_empty() { *first } else { all.start };
                start..first + part.rank
            });
            let count = ranks.len();
            halves.push(Half { ranks, first: lines });
            lines += count;
        }
        let mut b = arena.alloc::<u16>(lines * 16, "an adapter")?;
        for (half, Half { ranks, first }) in halves.iter().enumerate() {
            let values = &mut b[first * 16..][..ranks.len() * 16];
            for column in 0..16 {
                let Some(output) = output_of(half * 16 + column) else { continue };
                for (first, part) in parts.iter().filter(|(_, part)| part.outputs.contains(&output)) {
                    let row = &part.b[(output - part.outputs.start) * part.rank..][..part.rank];
                    for (rank, &value) in (first - ranks.start..).zip(row) {
                        values[rank * 16 + column] = to_bf16(value);
                    }
                }
            }
        }
        Ok(Self { a, scales, halves, b })
    }

    /// Adds to 32 columns of one row. `low`: `[ranks]`.
    fn add(&self, vector: &VectorOps, panel: usize, line: &mut [f32; 32], low: &[f32]) {
        for (half, values) in self.halves[panel * 2..][..2].iter().zip(line.as_chunks_mut::<16>().0) {
            let b = &self.b[half.first * 16..][..half.ranks.len() * 16];
            if !b.is_empty() {
                // SAFETY: the table is this machine's.
                unsafe { (vector.add_low_rank)(values, b, &low[half.ranks.clone()]) };
            }
        }
    }
}

/// Additions of all adapters to one weight, by slot.
pub(super) type Adapters = Vec<Option<Additions>>;

fn of_slot(adapters: &Adapters, slot: Option<AdapterSlot>) -> Option<&Additions> {
    adapters.get(usize::from(slot?.0))?.as_ref()
}

/// Additions to the product of one step, whose first part is done.
pub(super) struct Added<'a> {
    vector: &'static VectorOps,
    step: &'a Step,
    adapters: &'a Adapters,
    /// Products with A, `[rows]` of `stride` values; rows without an adapter hold values of earlier products, which are not read.
    low: &'a [f32],
    stride: usize,
}

impl<'a> Added<'a> {
    /// Additions to a product with `weight`, from what [`CpuDevice::project`] wrote to `low` if it did.
    pub(super) fn new(
        stride: Option<usize>,
        low: &'a mut Scratch,
        vector: &'static VectorOps,
        step: &'a Step,
        weight: &'a Packed,
    ) -> Option<Self> {
        let stride = stride?;
        Some(Self { vector, step, adapters: &weight.adapters, low: low.singles(step.rows() * stride), stride })
    }

    /// Adds to a finished tile, `[panels][rows][32]` from panel `first` on.
    pub(super) fn add(&self, first: usize, rows: &Range<usize>, tile: &mut [f32]) {
        for (i, row) in rows.clone().enumerate() {
            let Some(additions) = of_slot(self.adapters, self.step.adapter_of(row)) else { continue };
            let low = &self.low[row * self.stride..][..additions.scales.len()];
            let lines = tile.as_chunks_mut::<32>().0.iter_mut().skip(i).step_by(rows.len());
            lines.enumerate().for_each(|(panel, line)| additions.add(self.vector, first + panel, line, low));
        }
    }
}

/// Rows of one adapter, as they lie in the buffer.
#[derive(Clone, Copy)]
enum Input {
    Operand(Operand),
    Singles(Shared<f32>, usize),
}

impl CpuDevice {
    pub(super) fn run_adapt(
        &mut self,
        weight: Weight,
        slot: AdapterSlot,
        parts: &[LowRank<'_>],
    ) -> Result<(), KernelError> {
        let place = usize::from(slot.0).min(ADAPTERS_MAX - 1);
        self.adapter_arenas.resize_with(self.adapter_arenas.len().max(place + 1), Arena::default);
        let arena = &mut self.adapter_arenas[place];
        let additions = match &self.weights[weight.0 as usize] {
            Loaded::Matrix(packed) => {
                let parts = checked_low_ranks(parts, slot, packed.rows, packed.columns)?;
                let output_of = |column: usize| (column < packed.rows).then_some(column);
                Additions::pack(arena, &parts, packed, &output_of)?
            }
            Loaded::GateUp(packed) => {
                let parts = checked_low_ranks(parts, slot, 2 * packed.rows, packed.columns)?;
                let output_of = |column: usize| {
                    let (row, is_up) = (column / 32 * 16 + column % 16, column % 32 / 16);
                    (row < packed.rows).then_some(is_up * packed.rows + row)
                };
                Additions::pack(arena, &parts, packed, &output_of)?
            }
            _ => panic!("weight {} is not linear", weight.0),
        };
        let (Loaded::Matrix(packed) | Loaded::GateUp(packed)) = &mut self.weights[weight.0 as usize] else {
            unreachable!("checked above")
        };
        let slot = usize::from(slot.0);
        packed.adapters.resize_with(packed.adapters.len().max(slot + 1), || None);
        packed.adapters[slot] = Some(additions);
        self.bounds.adapters = self.bounds.adapters.max(slot + 1);
        Ok(())
    }

    /// Drops the additions of a slot. A weight without other additions has plain products again, with no look-up.
    pub(super) fn run_unadapt(&mut self, slot: AdapterSlot) {
        let slot = usize::from(slot.0);
        self.bounds.adapters = 0;
        for weight in &mut self.weights {
            let (Loaded::Matrix(packed) | Loaded::GateUp(packed)) = weight else { continue };
            packed.adapters.get_mut(slot).into_iter().for_each(|place| *place = None);
            let count = packed.adapters.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
            packed.adapters.truncate(count);
            self.bounds.adapters = self.bounds.adapters.max(count);
        }
        self.adapter_arenas.get_mut(slot).into_iter().for_each(|arena| *arena = Arena::default());
    }

    /// Computes `scale · A·x` of the step's adapted rows of `x` for a product with `weight`, into [`CpuDevice::low`]. Returns the values from
    /// one row to the next; `None` if no row has an adapter that adds to the weight.
    pub(super) fn project(&mut self, x: Buffer, weight: Weight) -> Option<usize> {
        let (Loaded::Matrix(packed) | Loaded::GateUp(packed)) = &self.weights[weight.0 as usize] else { return None };
        if packed.adapters.is_empty() || self.buffers[x.0 as usize].domain != Rows::Batch {
            return None;
        }
        let of_span = |span: usize| of_slot(&packed.adapters, self.step.spans[span].adapter);
        let spans = (0..self.step.spans.len()).filter_map(|span| Some((span, of_span(span)?)));
        let stride = spans.clone().map(|(_, additions)| additions.scales.len()).max()?;
        // Items: some rows of a span, times some blocks of A. Those of narrower adapters than the widest are empty.
        let pieces: Vec<(Range<usize>, &Additions)> = spans
            .clone()
            .flat_map(|(span, additions)| {
                let rows = self.step.spans[span].rows.clone();
                let pieces = rows.clone().step_by(ROWS);
                pieces.map(move |first| (first..rows.end.min(first + ROWS), additions))
            })
            .collect();
        let k = packed.k_blocks * 32;
        let bytes: usize = pieces.iter().map(|(rows, additions)| rows.len() * additions.scales.len() * k * 2).sum();
        let stored = &mut self.buffers[x.0 as usize];
        assert_eq!(stored.columns, packed.columns, "columns of buffer {}", x.0);
        let input = match stored.content {
            Content::Single => Input::Singles(Shared::new(&mut stored.memory), k),
            Content::Operand => {
                let groups = Groups::new(self.step.rows(), self.kernel.rows_max);
                let values = Shared::halved(&mut stored.memory);
                Input::Operand(Operand { values, groups, k_blocks: packed.k_blocks })
            }
            Content::Queries => panic!("buffer {} holds queries, which only attention reads", x.0),
        };
        let shares = stride.div_ceil(RANKS * BLOCKS);
        let low = Shared::new(self.low.singles(self.step.rows() * stride));
        let (items, scratch, vector) = (Items::new(pieces.len() * shares), Shared::new(&mut self.scratch), self.vector);
        self.pool.run_if_worth(bytes, &|thread| {
            // SAFETY: borrowed for this run; each thread has its own.
            let scratch = &mut unsafe { scratch.slice(thread, 1) }[0];
            while let Some(item) = items.take() {
                let ((rows, additions), share) = (&pieces[item / shares], item % shares);
                let blocks = additions.scales.as_chunks::<RANKS>().0.iter().enumerate();
                let blocks = blocks.skip(share * BLOCKS).take(BLOCKS);
                for row in rows.clone() {
                    let x: &[f32] = match input {
                        // SAFETY: borrowed for this operation, and only read.
                        Input::Singles(values, stride) => unsafe { values.slice(row * stride, stride) },
                        Input::Operand(operand) => {
                            let wide = scratch.singles(k);
                            // SAFETY: the table is this machine's; the row is only read.
                            unsafe { (vector.widen)(operand.row(row), wide) };
                            wide
                        }
                    };
                    for (block, scales) in blocks.clone() {
                        let a = &additions.a[block * RANKS * k..][..RANKS * k];
                        // SAFETY: borrowed for this operation; a block of a row is one item's.
                        let out = unsafe { low.slice(row * stride + block * RANKS, RANKS) };
                        // SAFETY: the table is this machine's.
                        unsafe { (vector.project)(x, a, scales, out.as_mut_array().expect("a block")) };
                    }
                }
            }
        });
        Some(stride)
    }
}
