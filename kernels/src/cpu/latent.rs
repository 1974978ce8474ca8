//! Attention over latents (MLA, DeepSeek-AI 2024, arXiv:2405.04434) in its absorbed form: the matrices that would make keys and values of a latent are
//! multiplied with queries and outputs instead, so that attention reads latents alone, in prefill as in decode.
//!
//! The latent of a token, and the rotated values that all heads share, are one key of one KV head ([`super::attention`] does the rest). Each
//! head's matrix is a small product of its own. Its rows are copied into left operands, head by head; an item is (head, some panels).

use super::attention::Attention;
use super::experts::section;
use super::kv::{Place, Row};
use super::lanes::to_bf16;
use super::layer::{for_rows, vector_of};
use super::matmul::{Left, Part, unit};
use super::operand::{Groups, Operand, Shared};
use super::pack::Packed;
use super::pool::{Items, Pool};
use super::{Content, CpuDevice, Loaded};
use crate::device::{AttentionSpec, Buffer, DType, Held, HostTensor, KernelError, RowOrder, Rows, Weight};
use crate::host::Arena;
use crate::source::{HeadMatrix, Source};

/// Most values of a key, and of a head's input; the models served have 576.
pub(super) const LATENT_MAX: usize = 1024;

/// Packs the matrices of all heads, each by itself.
pub(super) fn pack(arena: &mut Arena, pool: &mut Pool, heads: Vec<HeadMatrix>) -> Result<Vec<Packed>, KernelError> {
    let one = |HeadMatrix { rows, columns, values }: HeadMatrix| {
        if columns > LATENT_MAX {
            let (name, got) = ("a matrix per head".into(), vec![rows, columns]);
            return Err(KernelError::Shape { name, got, want: format!("at most {LATENT_MAX} columns") });
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let shape = [rows, columns];
        let tensor = HostTensor {
            name: "a matrix per head",
            dtype: DType::F32,
            shape: &shape,
            bytes: &bytes,
            order: RowOrder::Plain,
            reader: None,
        };
        Packed::stack(arena, pool, &[Source::new(&tensor, 2)?], None, Held::Stored)
    };
    heads.into_iter().map(one).collect()
}

/// Values of a row of f32, padded with zeros to whole lines.
fn padded(values: &[f32]) -> [f32; LATENT_MAX] {
    let mut all = [0.0; LATENT_MAX];
    all[..values.len()].copy_from_slice(values);
    all
}

/// Left operands of all heads, one behind the other.
#[derive(Clone, Copy)]
struct Lefts {
    values: Shared<u16>,
    k_blocks: usize,
    groups: Groups,
}

impl Lefts {
    fn of(&self, head: usize) -> Operand {
        Operand::part(self.values, self.k_blocks, head * self.groups.rows(), self.groups)
    }
}

/// Epilogue of a product per head: head, row, first column, and up to 32 values.
type Emit<'e> = &'e (dyn Fn(usize, usize, usize, &[f32]) + Sync);

impl CpuDevice {
    fn heads(&self, weight: Weight) -> &[Packed] {
        match &self.weights[weight.0 as usize] {
            Loaded::Heads(heads) => heads,
            _ => panic!("weight {} is not a matrix per head", weight.0),
        }
    }

    /// Space for the left operands of `heads` heads.
    fn lefts(&mut self, heads: usize, columns: usize, rows: usize) -> Lefts {
        let k_blocks = columns.div_ceil(32);
        let values = Shared::new(self.converted.halves(heads * rows * k_blocks * 32));
        Lefts { values, k_blocks, groups: Groups::new(rows, self.kernel.rows_max) }
    }

    pub(super) fn run_latent_keys(&mut self, x: Buffer, norm: Weight, spec: &AttentionSpec, layer: usize) {
        let (latent, dim) = (spec.latent.expect("a latent"), spec.head_dim);
        let stored = &self.buffers[x.0 as usize];
        assert_eq!((stored.columns, stored.domain), (dim, Rows::Batch), "buffer {}", x.0);
        let (values, stride) = self.singles(x);
        let kv = self.kv.as_mut().expect("kv() is called before latent_keys()");
        assert_eq!((kv.spec.latent, kv.spec.head_dim), (Some(latent), dim), "shape of the KV cache");
        assert!(layer < kv.spec.layers, "layer {layer} of the KV cache");
        let writer = kv.writer();
        let (weight, vector, step) = (vector_of(&self.weights, norm, latent), self.vector, &self.step);
        let rope = spec.rope.map(|rope| &self.ropes[rope.0 as usize]);
        assert!(rope.is_none_or(|rope| rope.half * 2 <= dim - latent), "rotations of more than {}", dim - latent);
        for_rows(&mut self.pool, step.rows(), stride, &|row| {
            // SAFETY: borrowed for this operation, and only read.
            let from = unsafe { values.slice(row * stride, dim) };
            let (mut value, position) = (padded(&from[..latent]), step.positions[row]);
            let value = &mut value[..latent.next_multiple_of(32)];
            // SAFETY: the table is this machine's.
            unsafe { (vector.head_norm)(value, weight, latent, spec.norm_eps) };
            let mut key = padded(&value[..latent]);
            key[latent..dim].copy_from_slice(&from[latent..]);
            if let Some(rope) = rope {
                let turn = position * rope.half..(position + 1) * rope.half;
                let turned = &mut key[latent..latent + 2 * rope.half];
                // SAFETY: the table is this machine's.
                unsafe { (vector.rotate)(turned, (&rope.cosines[turn.clone()], &rope.sines[turn])) };
            }
            let span = &step.spans[step.span_of[row]];
            let (page, slot) = step.slot(span, position);
            let place = Place { layer, page, slot };
            // The newest row clears the rest of its page if the span begins that page; where it does not, an earlier step has.
            let clears = row + 1 == span.rows.end && span.rows.len() > slot;
            let mut narrow = [0u16; LATENT_MAX];
            let key = &key[..dim.next_multiple_of(32)];
            // SAFETY: the table is this machine's.
            unsafe { (vector.narrow_slice)(key, &mut narrow[..key.len()]) };
            // SAFETY: `Step` checked that no two rows share a place; each row once; attention comes later.
            unsafe { writer.key(place, 0, Row::Halves(&narrow[..key.len()])) };
            narrow[latent..value.len().max(latent)].fill(0);
            // SAFETY: as above, and the newest row of a span has no later tokens in the step.
            unsafe { writer.value(place, 0, Row::Halves(&narrow[..value.len()]), clears) };
        });
    }

    pub(super) fn run_latent_queries(&mut self, out: Buffer, x: Buffer, keys: Weight, spec: &AttentionSpec) {
        let (latent, dim) = (spec.latent.expect("a latent"), spec.head_dim);
        let (heads, plain, rows) = (spec.heads, self.heads(keys)[0].columns, self.step.rows());
        assert_eq!((self.heads(keys).len(), self.heads(keys)[0].rows), (heads, latent), "shape of weight {}", keys.0);
        assert_ne!(out, x, "latent_queries in place");
        let width = plain + dim - latent;
        assert_eq!(self.buffers[x.0 as usize].columns, heads * width, "columns of buffer {}", x.0);
        let query = dim.next_multiple_of(32);
        self.queries_out(out, heads, dim);
        let (queries, (values, stride)) = (Shared::halved(&mut self.buffers[out.0 as usize].memory), self.singles(x));
        let lefts = self.lefts(heads, plain, rows);
        let (vector, step) = (self.vector, &self.step);
        let rope = spec.rope.map(|rope| &self.ropes[rope.0 as usize]);
        for_rows(&mut self.pool, rows, stride, &|row| {
            // SAFETY: borrowed for this operation, and only read.
            let from = unsafe { values.slice(row * stride, stride) };
            for (head, from) in from[..heads * width].chunks_exact(width).enumerate() {
                let of_head = padded(&from[..plain]);
                // SAFETY: the table is this machine's; each row and head once.
                unsafe { (vector.narrow)(&of_head[..lefts.k_blocks * 32], lefts.of(head).row(row)) };
                let mut turned = padded(&from[plain..]);
                if let Some(rope) = rope {
                    let turn = step.positions[row] * rope.half..(step.positions[row] + 1) * rope.half;
                    let turned = &mut turned[..2 * rope.half];
                    // SAFETY: the table is this machine's.
                    unsafe { (vector.rotate)(turned, (&rope.cosines[turn.clone()], &rope.sines[turn])) };
                }
                // SAFETY: borrowed for this operation; each row and head once.
                let to = unsafe { queries.slice((row * heads + head) * query + latent, query - latent) };
                to.iter_mut().zip(turned).for_each(|(to, value)| *to = to_bf16(value));
            }
        });
        self.run_heads(keys, lefts, &|head, row, column, line| {
            let start = (row * heads + head) * query + column;
            // SAFETY: borrowed for this operation; each row, head and panel once.
            let to = unsafe { queries.slice(start, line.len()) };
            to.iter_mut().zip(line).for_each(|(to, value)| *to = to_bf16(*value));
        });
    }

    pub(super) fn run_per_head(&mut self, out: Buffer, x: Buffer, weight: Weight) {
        let (heads, columns, outputs) =
            (self.heads(weight).len(), self.heads(weight)[0].columns, self.heads(weight)[0].rows);
        assert_eq!(self.buffers[x.0 as usize].columns, heads * columns, "columns of buffer {}", x.0);
        assert_eq!(self.rows_of(out), self.rows_of(x), "rows of buffers {} and {}", out.0, x.0);
        assert_ne!(out, x, "per_head in place");
        let rows = self.rows_of(x);
        let lefts = self.lefts(heads, columns, rows);
        let (vector, stored) = (self.vector, &self.buffers[x.0 as usize]);
        match stored.content {
            Content::Single => {
                let (values, stride) = self.singles(x);
                for_rows(&mut self.pool, rows, stride, &|row| {
                    // SAFETY: borrowed for this operation, and only read.
                    let from = unsafe { values.slice(row * stride, stride) };
                    for (head, from) in from[..heads * columns].chunks_exact(columns).enumerate() {
                        let from = padded(from);
                        // SAFETY: the table is this machine's; each row and head once.
                        unsafe { (vector.narrow)(&from[..lefts.k_blocks * 32], lefts.of(head).row(row)) };
                    }
                });
            }
            Content::Operand => {
                let (groups, k_blocks) = (self.groups(x), (heads * columns).div_ceil(32));
                let values = Shared::halved(&mut self.buffers[x.0 as usize].memory);
                let from = Operand { values, groups, k_blocks };
                for_rows(&mut self.pool, rows, k_blocks * 32, &|row| {
                    let from = from.row(row);
                    for head in 0..heads {
                        let to = lefts.of(head).row(row);
                        for (k, line) in (0..lefts.k_blocks).map(|k| (k, columns.min(k * 32 + 32) - k * 32)) {
                            // SAFETY: borrowed for this operation; each row and head once.
                            let to = unsafe { to.line(k) };
                            to[line..].fill(0);
                            let mut column = head * columns + k * 32;
                            let mut rest = &mut to[..line];
                            while !rest.is_empty() {
                                let count = (32 - column % 32).min(rest.len());
                                // SAFETY: other memory than `to`, and only read.
                                let line = unsafe { from.line(column / 32) };
                                let (first, behind) = rest.split_at_mut(count);
                                first.copy_from_slice(&line[column % 32..][..count]);
                                (column, rest) = (column + count, behind);
                            }
                        }
                    }
                });
            }
            Content::Queries => panic!("buffer {} holds queries, which only attention reads", x.0),
        }
        let all = heads * outputs;
        let to = self.out(out, all);
        self.run_heads(weight, lefts, &|head, row, column, line| {
            let mut whole = [0.0; 32];
            whole[..line.len()].copy_from_slice(line);
            // Dividing by 1 leaves the values as they are.
            // SAFETY: the table is this machine's; each row, head and panel once.
            unsafe { (vector.finish_row)(&whole, 32, 1.0, line.len(), head * outputs + column, to.row(row)) };
        });
        Attention::pad(to, rows, all);
    }

    /// Multiplies the left operand of each head with its matrix.
    fn run_heads(&mut self, weight: Weight, lefts: Lefts, emit: Emit<'_>) {
        let Loaded::Heads(heads) = &self.weights[weight.0 as usize] else { unreachable!("heads() checked") };
        if lefts.groups.count() == 0 {
            return;
        }
        let (first, kernel, outputs) = (section(&heads[0]), &self.kernel, heads[0].rows);
        let unit = unit(first, first.panels * heads.len(), 1, self.pool.threads()).min(first.panels);
        let units = first.panels.div_ceil(unit);
        let (items, scratch) = (Items::new(units * heads.len()), Shared::new(&mut self.scratch));
        let bytes = heads.len() * first.panels * first.panel_bytes() * lefts.groups.count();
        self.pool.run_if_worth(bytes, &|thread| {
            // SAFETY: borrowed for this run; each thread has its own.
            let scratch = &mut unsafe { scratch.slice(thread, 1) }[0];
            while let Some(item) = items.take() {
                let (head, panels) = (item / units, item % units * unit..((item % units + 1) * unit).min(first.panels));
                let left = Left { half: Some(lefts.of(head)), integral: None };
                Part::new(kernel, left, section(&heads[head])).panels(panels, None, scratch, &|piece| {
                    for (panel, row, line) in piece.lines() {
                        emit(head, row, panel * 32, &line[..32.min(outputs - panel * 32)]);
                    }
                });
            }
        });
    }
}
