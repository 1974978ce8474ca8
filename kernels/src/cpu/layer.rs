//! The operations of [`CpuDevice`], in the order of a transformer layer: each finds its handles, then runs one fused algorithm.

use super::attention::Attention;
use super::kv::{self, KvWriter, Place};
use super::low_rank::Added;
use super::matmul::{Finished, Matmul};
use super::operand::{Out, Shared};
use super::pack::Packed;
use super::pool::{Items, Pool};
use super::{Content, CpuDevice, Loaded, Rotations, VectorOps};
use crate::device::{Activation, AttentionSpec, Buffer, HeadNorms, KvFormat, LogitsSpec, Rows, Weight};
use crate::step::Step;

/// Rows × columns below which elementwise work stays on the calling thread: about the price of a fork, 2 µs.
const ALONE: usize = 16 << 10;
/// Largest head dimension; the models served have at most 256.
pub(super) const DIM_MAX: usize = 512;

/// Runs `each(row)` for all rows, on the pool if the work is worth a fork.
pub(super) fn for_rows(pool: &mut Pool, rows: usize, columns: usize, each: &(dyn Fn(usize) + Sync)) {
    if rows * columns <= ALONE {
        return (0..rows).for_each(each);
    }
    // Eight rows at a time: neighbouring rows share cache lines of an operand's group.
    let items = Items::new(rows.div_ceil(8));
    pool.run(&|_| {
        while let Some(item) = items.take() {
            (item * 8..rows.min(item * 8 + 8)).for_each(each);
        }
    });
}

impl CpuDevice {
    pub(super) fn run_embed(&mut self, out: Buffer, table: Weight, scale: f32) {
        let stored = &mut self.buffers[out.0 as usize];
        stored.content = Content::Single;
        assert_eq!((stored.columns, stored.domain), (self.matrix(table).columns, Rows::Batch), "buffer {}", out.0);
        let (values, stride) = self.singles(out);
        let Loaded::Embedding(packed) = &self.weights[table.0 as usize] else {
            panic!("weight {} is not an embedding", table.0)
        };
        let (tokens, vector) = (&self.step.tokens, self.vector);
        for_rows(&mut self.pool, tokens.len(), stride, &|row| {
            // SAFETY: borrowed for this operation; each row once.
            let values = unsafe { values.slice(row * stride, stride) };
            packed.gather(tokens[row] as usize, values);
            if scale != 1.0 {
                // SAFETY: the table is this machine's.
                unsafe { (vector.scale)(values, scale) };
            }
        });
    }

    pub(super) fn run_rmsnorm(&mut self, out: Buffer, x: Buffer, weight: Weight, eps: f32) {
        let columns = self.vector_of(weight).1;
        assert_eq!(self.buffers[x.0 as usize].columns, columns, "columns of buffer {}", x.0);
        assert_eq!(self.rows_of(out), self.rows_of(x), "rows of buffers {} and {}", out.0, x.0);
        let rows = self.rows_of(x);
        self.widen(x, out == x);
        let (values, stride) = if out == x {
            (Shared::new(self.converted.singles(rows * columns.next_multiple_of(32))), columns.next_multiple_of(32))
        } else {
            self.singles(x)
        };
        // In place a row stays f32, for what is pooled of it.
        let to = if out == x { self.singles_out(out, columns) } else { self.out(out, columns) };
        let vector = self.vector;
        let Loaded::Vector(weight, _) = &self.weights[weight.0 as usize] else { unreachable!("vector_of() checked") };
        for_rows(&mut self.pool, rows, stride, &|row| {
            // SAFETY: borrowed for this operation, and only read.
            let x = unsafe { values.slice(row * stride, stride) };
            // SAFETY: the table is this machine's; each row once.
            unsafe { (vector.rmsnorm)(x, weight, columns, eps, to.row(row)) };
        });
    }

    /// Values of this step's rows of a buffer as f32, `[rows, columns]`; the buffer stays as it is.
    pub(super) fn run_read(&mut self, buffer: Buffer) -> Vec<f32> {
        let rows = self.rows_of(buffer);
        let (columns, content) = (self.buffers[buffer.0 as usize].columns, self.buffers[buffer.0 as usize].content);
        match content {
            Content::Single => {
                let stored = &self.buffers[buffer.0 as usize];
                let rows = stored.memory[..rows * stored.stride()].chunks_exact(stored.stride());
                rows.flat_map(|row| &row[..columns]).copied().collect()
            }
            Content::Operand => {
                let operand = self.operand_in(buffer, columns);
                let places = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
                // SAFETY: one thread, one line at a time.
                let value = |row, column| unsafe { operand.row(row).line(column / 32) }[column % 32];
                places.map(|(row, column)| super::lanes::from_bf16(value(row, column))).collect()
            }
            Content::Queries => panic!("buffer {} holds queries, which only attention reads", buffer.0),
        }
    }

    /// Makes the rows of `buffer` f32, in place or as a copy in `converted`. Norms of operands are rare (no model here has one).
    fn widen(&mut self, buffer: Buffer, aside: bool) {
        let rows = self.rows_of(buffer);
        let stride = self.buffers[buffer.0 as usize].stride();
        if self.buffers[buffer.0 as usize].content != Content::Single {
            let columns = self.buffers[buffer.0 as usize].columns;
            let operand = self.operand_in(buffer, columns);
            let mut all = vec![0.0; rows * stride];
            for (i, value) in all.iter_mut().enumerate() {
                // SAFETY: one thread, one line at a time.
                *value = super::lanes::from_bf16(unsafe { operand.row(i / stride).line(i % stride / 32) }[i % 32]);
            }
            let stored = &mut self.buffers[buffer.0 as usize];
            stored.memory[..all.len()].copy_from_slice(&all);
            stored.content = Content::Single;
        }
        if aside {
            let stored = &self.buffers[buffer.0 as usize];
            self.converted.singles(rows * stride).copy_from_slice(&stored.memory[..rows * stride]);
        }
    }

    pub(super) fn run_qkv(&mut self, out: Buffer, x: Buffer, weight: Weight, spec: &AttentionSpec, layer: usize) {
        let (dim, heads) = (spec.head_dim, spec.heads + 2 * spec.kv_heads);
        assert_eq!(self.matrix(weight).rows, heads * dim, "rows of weight {}", weight.0);
        assert!(
            dim <= DIM_MAX && dim.is_multiple_of(2) && spec.heads.is_multiple_of(spec.kv_heads),
            "shape of attention"
        );
        let (left, low) = (self.left(x, weight), self.project(x, weight));
        self.queries_out(out, spec.heads, dim);
        let queries = Shared::halved(&mut self.buffers[out.0 as usize].memory);
        let kv = self.kv.as_mut().expect("kv() is called before qkv()");
        assert_eq!((kv.spec.kv_heads, kv.spec.head_dim), (spec.kv_heads, dim), "shape of the KV cache");
        assert!(layer < kv.spec.layers, "layer {layer} of the KV cache");
        let (format, writer) = (kv.spec.format, kv.writer());
        let Loaded::Matrix(packed) = &self.weights[weight.0 as usize] else {
            panic!("weight {} is not linear", weight.0)
        };
        let rope = spec.rope.map(|rope| &self.ropes[rope.0 as usize]);
        assert!(rope.is_none_or(|rope| rope.half * 2 <= dim), "rotations of a wider head than {dim}");
        let norms = match spec.norms {
            HeadNorms::Each { query, key } => [query, key].map(|norm| Some(vector_of(&self.weights, norm, dim))),
            HeadNorms::None | HeadNorms::Together { .. } => [None; 2],
        };
        let heads = Heads { spec, layer, step: &self.step, rope, norms, vector: self.vector, queries, format, writer };
        // Panels of 32 columns and heads of `dim` meet every lcm(32, dim) columns.
        let together = dim / gcd(dim, 32);
        let added = Added::new(low, &mut self.low, self.vector, &self.step, packed);
        let matmul = Matmul { kernel: &self.kernel, left, weight: packed, together, added };
        let joint = match spec.norms {
            HeadNorms::Together { query, key } => Some(Joint::new(&self.weights, [query, key], spec)),
            HeadNorms::None | HeadNorms::Each { .. } => None,
        };
        let rows = self.step.rows();
        let stored = joint.as_ref().map(|joint| Shared::new(self.projected.singles(rows * joint.stride())));
        matmul.run(&mut self.pool, &mut self.scratch, &|piece| {
            let (first, panels) = (piece.panel * 32, piece.tile.len() / (piece.rows.len() * 32));
            let end = ((piece.panel + panels) * 32 / dim).min(spec.heads + 2 * spec.kv_heads);
            let mut values = [0.0f32; DIM_MAX];
            let values = &mut values[..dim.next_multiple_of(32)];
            for (i, row) in piece.rows.clone().enumerate() {
                for head in first / dim..end {
                    piece.gather(head * dim - first, i, &mut values[..dim]);
                    values[dim..].fill(0.0);
                    if let Some(bias) = &packed.bias {
                        values[..dim].iter_mut().zip(&bias[head * dim..]).for_each(|(value, bias)| *value += bias);
                    }
                    match joint.as_ref().zip(stored) {
                        None => heads.place(row, head, values),
                        // SAFETY: borrowed for this operation; a head of a row is one thread's.
                        Some((joint, stored)) => unsafe { joint.put(stored, row, head, &values[..dim]) },
                    }
                }
            }
        });
        let Some((joint, stored)) = joint.zip(stored) else { return };
        let vector = self.vector;
        for_rows(&mut self.pool, rows, joint.stride(), &|row| {
            // SAFETY: borrowed for this operation, whose product is done; each row once.
            let all = unsafe { stored.slice(row * joint.stride(), joint.stride()) };
            for (start, count, weight) in joint.runs() {
                let values = &mut all[start..start + count.next_multiple_of(32)];
                values[count..].fill(0.0);
                // SAFETY: the table is this machine's.
                unsafe { (vector.head_norm)(values, weight, count, spec.norm_eps) };
            }
            let mut values = [0.0f32; DIM_MAX];
            let values = &mut values[..dim.next_multiple_of(32)];
            for head in 0..spec.heads + 2 * spec.kv_heads {
                values[..dim].copy_from_slice(&all[joint.at(head)..][..dim]);
                values[dim..].fill(0.0);
                heads.place(row, head, values);
            }
        });
    }

    /// Makes `out` a buffer of queries.
    pub(super) fn queries_out(&mut self, out: Buffer, heads: usize, dim: usize) {
        let stored = &mut self.buffers[out.0 as usize];
        assert_eq!((stored.columns, stored.domain), (heads * dim, Rows::Batch), "buffer {}", out.0);
        stored.content = Content::Queries;
        // Heads are padded to 32 values, which may be more than the buffer's own rows; it grows once.
        let needed = (stored.rows_max * heads * dim.next_multiple_of(32)).div_ceil(2);
        if stored.memory.len() < needed {
            stored.memory = self.arena.alloc(needed, "queries").expect("memory for queries, once per buffer");
        }
    }

    pub(super) fn run_attention(&mut self, out: Buffer, queries: Buffer, spec: &AttentionSpec, layer: usize) {
        assert_eq!(self.buffers[queries.0 as usize].content, Content::Queries, "content of buffer {}", queries.0);
        assert_ne!(out, queries, "attention in place");
        let to = self.out(out, spec.heads * spec.value_dim());
        let sinks = spec.sinks.map(|sinks| vector_of(&self.weights, sinks, spec.heads));
        let offsets = spec.offsets.map(|bias| vector_of(&self.weights, bias.values, spec.heads * bias.width()));
        let attention = Attention {
            kernel: &self.kernel,
            vector: self.vector,
            kv: self.kv.as_ref().expect("kv() is called before attention()"),
            step: &self.step,
            spec,
            sinks,
            offsets,
            layer,
            queries: Shared::halved(&mut self.buffers[queries.0 as usize].memory),
            out: to,
        };
        attention.run(&mut self.pool, &mut self.scratch, &mut self.attention);
    }

    pub(super) fn run_linear_add(&mut self, residual: Buffer, x: Buffer, weight: Weight, scale: f32) {
        let rows = self.matrix(weight).rows;
        assert_eq!(self.buffers[residual.0 as usize].columns, rows, "columns of buffer {}", residual.0);
        assert_eq!(self.rows_of(residual), self.rows_of(x), "rows of buffers {} and {}", residual.0, x.0);
        assert_ne!(residual, x, "linear_add in place");
        let (left, low) = (self.left(x, weight), self.project(x, weight));
        let (values, stride) = self.singles(residual);
        let (vector, weight) = (self.vector, &self.weights[weight.0 as usize]);
        let (Loaded::Matrix(packed) | Loaded::Embedding(packed)) = weight else { unreachable!("matrix() checked") };
        let added = Added::new(low, &mut self.low, vector, &self.step, packed);
        let matmul = Matmul { kernel: &self.kernel, left, weight: packed, together: 1, added };
        matmul.run(&mut self.pool, &mut self.scratch, &|piece| {
            for (panel, row, line) in piece.lines() {
                let bias = packed.bias_of(panel);
                // SAFETY: borrowed for this operation; a panel of a row is one thread's.
                let to = unsafe { values.slice(row * stride + panel * 32, 32) };
                let to = to.as_mut_array().expect("32 values");
                // Without a scale the bias is added last.
                if scale == 1.0 {
                    // SAFETY: the table is this machine's.
                    unsafe { (vector.add)(to, line, bias) };
                } else {
                    // SAFETY: the table is this machine's.
                    unsafe { (vector.add_weighted)(to, line, bias, scale) };
                }
            }
        });
    }

    pub(super) fn run_linear(&mut self, out: Buffer, x: Buffer, weight: Weight) {
        let rows = self.matrix(weight).rows;
        assert_eq!(self.buffers[out.0 as usize].columns, rows, "columns of buffer {}", out.0);
        assert_eq!(self.rows_of(out), self.rows_of(x), "rows of buffers {} and {}", out.0, x.0);
        assert_ne!(out, x, "linear in place");
        let (left, low) = (self.left(x, weight), self.project(x, weight));
        self.buffers[out.0 as usize].content = Content::Single;
        let (values, stride) = self.singles(out);
        let (vector, weight) = (self.vector, &self.weights[weight.0 as usize]);
        let (Loaded::Matrix(packed) | Loaded::Embedding(packed)) = weight else { unreachable!("matrix() checked") };
        let added = Added::new(low, &mut self.low, vector, &self.step, packed);
        let matmul = Matmul { kernel: &self.kernel, left, weight: packed, together: 1, added };
        matmul.run(&mut self.pool, &mut self.scratch, &|piece| {
            for (panel, row, line) in piece.lines() {
                // SAFETY: borrowed for this operation; a panel of a row is one thread's.
                let to = unsafe { values.slice(row * stride + panel * 32, 32) };
                put(vector, to.as_mut_array().expect("32 values"), line, packed.bias_of(panel));
            }
        });
    }

    pub(super) fn run_norm_add(&mut self, residual: Buffer, x: Buffer, weight: Weight, eps: f32) {
        let columns = self.vector_of(weight).1;
        for buffer in [residual, x] {
            assert_eq!(self.buffers[buffer.0 as usize].columns, columns, "columns of buffer {}", buffer.0);
        }
        assert_eq!(self.rows_of(residual), self.rows_of(x), "rows of buffers {} and {}", residual.0, x.0);
        assert_ne!(residual, x, "norm_add in place");
        let (rows, (from, stride), (to, _)) = (self.rows_of(x), self.singles(x), self.singles(residual));
        let (vector, weight) = (self.vector, vector_of(&self.weights, weight, columns));
        for_rows(&mut self.pool, rows, stride, &|row| {
            // SAFETY: two buffers, borrowed for this operation; each row once.
            let (x, values) = unsafe { (from.slice(row * stride, stride), to.slice(row * stride, stride)) };
            // SAFETY: the table is this machine's.
            unsafe { (vector.norm_add)(values, x, weight, columns, eps) };
        });
    }

    pub(super) fn run_gate_up(&mut self, out: Buffer, x: Buffer, weight: Weight, activation: Activation) {
        let Loaded::GateUp(packed) = &self.weights[weight.0 as usize] else {
            panic!("weight {} is not a gate and an up matrix", weight.0)
        };
        let rows = packed.rows;
        assert_eq!(self.rows_of(out), self.rows_of(x), "rows of buffers {} and {}", out.0, x.0);
        assert_ne!(out, x, "gate_up in place");
        let (left, low) = (self.left(x, weight), self.project(x, weight));
        let out = self.out(out, rows);
        let Loaded::GateUp(packed) = &self.weights[weight.0 as usize] else { unreachable!("checked above") };
        let vector = self.vector;
        let added = Added::new(low, &mut self.low, vector, &self.step, packed);
        let matmul = Matmul { kernel: &self.kernel, left, weight: packed, together: 1, added };
        // SAFETY: the table is this machine's; each piece is one thread's.
        matmul.run(&mut self.pool, &mut self.scratch, &|piece| unsafe {
            activate(vector, activation, packed, &out, piece)
        });
    }

    pub(super) fn run_select(&mut self, out: Buffer, x: Buffer) {
        let (from, to) = (&self.buffers[x.0 as usize], &self.buffers[out.0 as usize]);
        assert_eq!((from.domain, to.domain), (Rows::Batch, Rows::Sampled), "rows of buffers {} and {}", x.0, out.0);
        assert_eq!(from.columns, to.columns, "columns of buffers {} and {}", x.0, out.0);
        let (columns, content, stride) = (from.columns, from.content, from.stride());
        match content {
            Content::Single => {
                self.buffers[out.0 as usize].content = Content::Single;
                let ((from, _), (to, _)) = (self.singles(x), self.singles(out));
                for (i, &row) in self.step.sampled.iter().enumerate() {
                    // SAFETY: two buffers, one thread.
                    let (from, to) = unsafe { (from.slice(row * stride, stride), to.slice(i * stride, stride)) };
                    to.copy_from_slice(from);
                }
            }
            Content::Operand => {
                let (from, to) = (self.operand_in(x, columns), self.operand_out(out, columns));
                for (i, &row) in self.step.sampled.iter().enumerate() {
                    for k in 0..from.k_blocks {
                        // SAFETY: two buffers, one thread.
                        let (from, to) = unsafe { (from.row(row).line(k), to.row(i).line(k)) };
                        to.copy_from_slice(from);
                    }
                }
            }
            Content::Queries => panic!("buffer {} holds queries, which only attention reads", x.0),
        }
    }

    pub(super) fn run_logits(&mut self, x: Buffer, weight: Weight, spec: LogitsSpec) {
        assert_eq!(self.buffers[x.0 as usize].domain, Rows::Sampled, "logits are of sampled rows");
        let vocab = self.matrix(weight).rows;
        let left = self.left(x, weight);
        self.logits.resize(self.rows_of(x) * vocab, 0.0);
        let (out, vector) = (Shared::new(&mut self.logits), self.vector);
        let (Loaded::Matrix(packed) | Loaded::Embedding(packed)) = &self.weights[weight.0 as usize] else {
            unreachable!("matrix() checked")
        };
        let matmul = Matmul { kernel: &self.kernel, left, weight: packed, together: 1, added: None };
        matmul.run(&mut self.pool, &mut self.scratch, &|piece| {
            for (panel, row, line) in piece.lines() {
                let count = 32.min(vocab - panel * 32);
                let mut logits = *line;
                if let Some(bias) = packed.bias_of(panel) {
                    logits.iter_mut().zip(bias).for_each(|(logit, bias)| *logit += bias);
                }
                if spec.divisor != 1.0 {
                    logits.iter_mut().for_each(|logit| *logit /= spec.divisor);
                }
                if let Some(cap) = spec.soft_cap {
                    // SAFETY: the table is this machine's.
                    unsafe { (vector.soft_cap)(&mut logits, cap) };
                }
                // SAFETY: borrowed for this operation; a panel of a row is one thread's.
                let to = unsafe { out.slice(row * vocab + panel * 32, count) };
                to.copy_from_slice(&logits[..count]);
            }
        });
    }
}

/// Writes a tile, with its bias: 32 columns of one row.
pub(super) fn put(vector: &VectorOps, to: &mut [f32; 32], tile: &[f32; 32], bias: Option<&[f32; 32]>) {
    let Some(bias) = bias else { return *to = *tile };
    *to = *bias;
    // SAFETY: the table is this machine's.
    unsafe { (vector.add)(to, tile, None) };
}

/// Writes a piece of a gated MLP, sixteen columns per panel.
///
/// # Safety
/// The table is this machine's, and no other thread writes the piece's columns of its rows.
pub(super) unsafe fn activate(
    vector: &VectorOps,
    activation: Activation,
    packed: &Packed,
    out: &Out,
    piece: &Finished<'_>,
) {
    for (panel, row, line) in piece.lines() {
        let to = out.row(row);
        // SAFETY: the table is this machine's; sixteen columns of a row are one thread's.
        unsafe { (vector.gate_up)(line, packed.bias_of(panel), activation, panel * 16, &to) };
        if panel + 1 == packed.panels && packed.panels % 2 == 1 {
            for column in panel * 16 + 16..panel * 16 + 32 {
                // SAFETY: the last line's other half belongs to no panel.
                unsafe { to.put(column, 0.0) };
            }
        }
    }
}

/// Weight vector of a norm over `count` values, padded to 32; another length is a bug of the model file.
pub(super) fn vector_of(weights: &[Loaded], weight: Weight, count: usize) -> &[f32] {
    match &weights[weight.0 as usize] {
        Loaded::Vector(values, columns) if *columns == count => values,
        _ => panic!("weight {} is not a vector of {count}", weight.0),
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Norms over all query heads and all key heads of a row, for which the whole row must be projected first. A row is kept as `[queries | keys |
/// values]`, each padded to 32.
struct Joint<'a> {
    spec: &'a AttentionSpec,
    /// Norm weights of queries and of keys, padded to 32.
    weights: [&'a [f32]; 2],
}

impl<'a> Joint<'a> {
    fn new(weights: &'a [Loaded], [query, key]: [Weight; 2], spec: &'a AttentionSpec) -> Self {
        let (queries, keys) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        Self { spec, weights: [vector_of(weights, query, queries), vector_of(weights, key, keys)] }
    }

    /// Values from one row to the next.
    fn stride(&self) -> usize {
        self.weights[0].len() + 2 * self.weights[1].len()
    }

    /// Index of the first value of a head in its row; heads of keys and values follow those of queries.
    fn at(&self, head: usize) -> usize {
        let spec = self.spec;
        match head.checked_sub(spec.heads) {
            None => head * spec.head_dim,
            Some(head) => {
                let part = self.weights[0].len() + head / spec.kv_heads * self.weights[1].len();
                part + head % spec.kv_heads * spec.head_dim
            }
        }
    }

    /// Start, number and weights of the values that are normed together.
    fn runs(&self) -> [(usize, usize, &'a [f32]); 2] {
        let (spec, [query, key]) = (self.spec, self.weights);
        [(0, spec.heads * spec.head_dim, query), (query.len(), spec.kv_heads * spec.head_dim, key)]
    }

    /// Keeps one head of one row.
    ///
    /// # Safety
    /// As [`Shared::slice`].
    unsafe fn put(&self, stored: Shared<f32>, row: usize, head: usize, values: &[f32]) {
        // SAFETY: passed on to the caller.
        let to = unsafe { stored.slice(row * self.stride() + self.at(head), values.len()) };
        to.copy_from_slice(values);
    }
}

/// Destination of the projected heads of one layer.
struct Heads<'a> {
    spec: &'a AttentionSpec,
    layer: usize,
    step: &'a Step,
    rope: Option<&'a Rotations>,
    /// Norm weights of each query head and of each key head.
    norms: [Option<&'a [f32]>; 2],
    vector: &'static VectorOps,
    queries: Shared<u16>,
    format: KvFormat,
    writer: KvWriter,
}

impl Heads<'_> {
    /// Applies norm and rotation to one head of one row, and stores it. `values`: zero beyond `head_dim`, padded to 32.
    fn place(&self, row: usize, head: usize, values: &mut [f32]) {
        let (spec, dim) = (self.spec, self.spec.head_dim);
        let position = self.step.positions[row];
        let kind = if head < spec.heads { 0 } else { 1 + (head - spec.heads) / spec.kv_heads };
        if kind < 2 {
            if let Some(weight) = self.norms[kind] {
                // SAFETY: the table is this machine's.
                unsafe { (self.vector.head_norm)(values, weight, dim, spec.norm_eps) };
            }
            if let Some(rope) = self.rope {
                let turn = position * rope.half..(position + 1) * rope.half;
                let rotated = &mut values[..2 * rope.half];
                // SAFETY: the table is this machine's.
                unsafe { (self.vector.rotate)(rotated, (&rope.cosines[turn.clone()], &rope.sines[turn])) };
            }
        }
        if kind == 0 {
            let size = values.len();
            // SAFETY: borrowed for this operation; a head of a row is one thread's.
            let to = unsafe { self.queries.slice((row * spec.heads + head) * size, size) };
            // SAFETY: the table is this machine's.
            return unsafe { (self.vector.narrow_slice)(values, to) };
        }
        let (mut narrow, mut codes);
        let stored = match self.format {
            KvFormat::Own => {
                narrow = [0u16; DIM_MAX];
                let narrow = &mut narrow[..values.len()];
                // SAFETY: the table is this machine's.
                unsafe { (self.vector.narrow_slice)(values, narrow) };
                kv::Row::Halves(narrow)
            }
            KvFormat::Int8 => {
                codes = [0i8; DIM_MAX];
                let (codes, mut scale) = (&mut codes[..values.len()], 0.0);
                // SAFETY: the table is this machine's.
                unsafe { (self.vector.round_row)(values, codes, &mut scale) };
                kv::Row::Codes(codes, scale)
            }
        };
        let span = &self.step.spans[self.step.span_of[row]];
        let (page, slot) = self.step.slot(span, position);
        let place = Place { layer: self.layer, page, slot };
        let kv_head = (head - spec.heads) % spec.kv_heads;
        if kind == 1 {
            // SAFETY: `Step` checked that no two rows share a place; a head of a row is one thread's; attention comes later.
            unsafe { self.writer.key(place, kv_head, stored) };
        } else {
            // The newest row clears the rest of its page if the span begins that page; where it does not, an earlier step has.
            let clears = row + 1 == span.rows.end && span.rows.len() > slot;
            // SAFETY: as above, and the newest row of a span has no later tokens in the step.
            unsafe { self.writer.value(place, kv_head, stored, clears) };
        }
    }
}
