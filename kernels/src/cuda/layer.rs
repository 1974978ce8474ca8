//! The operations, in the order of a transformer layer: each checks shapes, then launches.

use std::ops::Range;

use super::driver::{Kernel, Pointer};
use super::params::{
    AttentionParams, BestPartsParams, BestTokensParams, DRAWS, Draw, DrawParams, EmbedParams, GatedParams, GemmParams,
    HeadsParams, RmsnormParams, SelectParams,
};
use super::tiles::End;
use super::{ARRIVED, Content, CudaDevice, DEPTH, Loaded, Matrix, TiledAttention, Work, fault};
use crate::device::{AttentionSpec, Buffer, Found, HeadNorms, PAGE_TOKENS, Pick, Rows, Weight};
use crate::sampling::CHUNK;

/// Threads of a block, by kernel, as the sources have them.
pub(super) const ROW_THREADS: u32 = 256;
pub(super) const HEAD_THREADS: u32 = 128;
pub(super) const PREFILL_THREADS: u32 = 256;
pub(super) const GROUPED_THREADS: u32 = 384;
/// Of sampling: threads by kernel, logits of a part of a row, chunks that a block sums, most chunks of a row that is drawn from, and the token of
/// a row that has none.
pub(super) const PART_THREADS: u32 = 256;
pub(super) const MERGE_THREADS: u32 = 32;
pub(super) const SUM_THREADS: u32 = 64;
pub(super) const DRAW_THREADS: u32 = 256;
const PART: usize = 4096;
const SUMMED: usize = 4;
const CHUNKS_MAX: usize = 2048;
const NO_TOKEN: u32 = u32::MAX;
/// Attention by matrix instructions: query heads of a decode block, rows of a prefill block, tokens of a split, and of a decode block.
const DECODE_HEADS: usize = 16;
const PREFILL_ROWS: usize = 128;
const SPLIT: usize = 128;
const DECODE_TOKENS: usize = 4 * SPLIT;

/// Shared memory of a prefill block: queries, and three pages of keys and of values.
pub(super) fn prefill_shared_bytes(head_dim: usize) -> usize {
    (PREFILL_ROWS + 3 * 2 * PAGE_TOKENS) * head_dim * size_of::<u16>()
}

/// Shared memory of a prefill block of groups of warps: queries of two tiles, a ring of five times the keys or the values of a
/// split, and barriers.
pub(super) fn grouped_shared_bytes(head_dim: usize) -> usize {
    (2 * PREFILL_ROWS + 5 * SPLIT) * head_dim * size_of::<u16>() + 1024
}

/// Converts a size that was checked when it was allocated: what it counts fits into memory.
fn narrow(size: usize) -> u32 {
    u32::try_from(size).expect("sizes of allocated rows and columns are below 2^32")
}

impl CudaDevice {
    /// Enqueues a kernel, unless something failed before it in this step or it has nothing to do.
    ///
    /// # Safety
    /// As [`super::driver::Stream::launch`].
    unsafe fn launch<P: Copy>(&mut self, kernel: Kernel, (x, y, z): (usize, usize, usize), params: P) {
        if self.fault.is_some() || x * y * z == 0 {
            return;
        }
        // SAFETY: the caller's promise.
        let launched = unsafe { self.stream.launch(kernel, (narrow(x), narrow(y), narrow(z)), params, self.overlaps) };
        self.fault = launched.err().map(|error| fault(&self.gpu, error));
    }

    /// `buffer` as it is read: address and stride.
    fn input(&self, buffer: Buffer, columns: usize, content: Content) -> (Pointer, usize) {
        let stored = &self.buffers[buffer.0 as usize];
        let is = (stored.columns, stored.content);
        assert_eq!(is, (columns, content), "columns and content of buffer {}", buffer.0);
        (stored.memory.at(0), stored.stride())
    }

    /// `buffer` as it is written. The first writer decides its content for good: the padding of bf16 rows is zero because nobody ever
    /// writes it.
    fn output(&mut self, buffer: Buffer, columns: usize, content: Content) -> (Pointer, usize) {
        let stored = &mut self.buffers[buffer.0 as usize];
        if stored.content == Content::Unknown {
            stored.content = content;
        }
        self.input(buffer, columns, content)
    }

    /// Checks that buffers hold a row for each row of the step.
    fn assert_batch<const N: usize>(&self, buffers: [Buffer; N]) {
        for buffer in buffers {
            assert_eq!(self.buffers[buffer.0 as usize].domain, Rows::Batch, "rows of buffer {}", buffer.0);
        }
    }

    fn weight(&self, weight: Weight) -> &Matrix {
        let Loaded::Matrix(matrix) = &self.weights[weight.0 as usize] else {
            panic!("weight {} is not a matrix", weight.0)
        };
        matrix
    }

    /// Values of a vector of `columns`.
    fn vector(&self, weight: Weight, columns: usize) -> Pointer {
        let Loaded::Vector(values, stored) = &self.weights[weight.0 as usize] else {
            panic!("weight {} is not a vector", weight.0)
        };
        assert_eq!(*stored, columns, "values of weight {}", weight.0);
        values.at(0)
    }

    /// Parameters, kernel and grid of the product of `x` with `matrix`.
    fn product(
        &self,
        x: Buffer,
        matrix: &Matrix,
        out: Pointer,
        out_stride: usize,
        end: End,
    ) -> (GemmParams, Kernel, (usize, usize, usize)) {
        let (rows, (x, stride)) = (self.rows_of(x), self.input(x, matrix.columns, Content::Half));
        debug_assert!(stride == matrix.stride() && stride % DEPTH == 0);
        let bias = matrix.bias.as_ref().map_or(0, |bias| bias.at(0));
        let (rows_of_x, columns) = (narrow(rows), narrow(matrix.rows));
        let (depth, out_stride, chunk) = (narrow(stride), narrow(out_stride), narrow(matrix.sum.chunk(stride)));
        let params = GemmParams {
            x,
            weight: matrix.values.at(0),
            bias,
            out,
            rows: rows_of_x,
            columns,
            depth,
            out_stride,
            chunk,
        };
        let (kernel, grid) = self.kernels.products.of(end, matrix.sum, rows, matrix.rows);
        (params, kernel, grid)
    }

    /// Makes the scratch memory hold `values` f32; `None` after a failure, which is kept.
    fn scratch(&mut self, values: usize) -> Option<Pointer> {
        if self.fault.is_none() {
            match self.larger(&self.scratch, values * size_of::<f32>(), "results of a product") {
                Ok(Some(larger)) => self.scratch = larger,
                Ok(None) => {}
                Err(error) => self.fault = Some(error),
            }
        }
        self.fault.is_none().then(|| self.scratch.at(0))
    }

    pub(super) fn run_embed(&mut self, out: Buffer, table: Weight) {
        let matrix = self.weight(table);
        self.assert_batch([out]);
        let (columns, table, table_stride) = (matrix.columns, matrix.values.at(0), narrow(matrix.stride()));
        let (out, stride) = self.output(out, columns, Content::Single);
        let (tokens, columns, out_stride) = (self.uploaded.at(0), narrow(columns), narrow(stride));
        let params = EmbedParams { out, table, tokens, columns, table_stride, out_stride };
        // SAFETY: one block per row of the step; tokens were checked against the table's rows, buffers hold rows_max rows.
        unsafe { self.launch(self.kernels.embed, (self.step.rows(), 1, 1), params) };
    }

    pub(super) fn run_rmsnorm(&mut self, out: Buffer, x: Buffer, weight: Weight, eps: f32) {
        let columns = self.buffers[x.0 as usize].columns;
        let (rows, weight) = (self.rows_of(x), self.vector(weight, columns));
        assert_eq!(self.rows_of(out), rows, "rows of buffers {} and {}", out.0, x.0);
        let (x, x_stride) = self.input(x, columns, Content::Single);
        let (out, out_stride) = self.output(out, columns, Content::Half);
        let (columns, out_stride, x_stride) = (narrow(columns), narrow(out_stride), narrow(x_stride));
        let params = RmsnormParams { out, x, weight, columns, out_stride, x_stride, eps };
        // SAFETY: one block per row; both buffers hold these rows and columns, the weight the columns.
        unsafe { self.launch(self.kernels.rmsnorm, (rows, 1, 1), params) };
    }

    pub(super) fn run_qkv(&mut self, out: Buffer, x: Buffer, weight: Weight, spec: &AttentionSpec, layer: usize) {
        let (dim, total, rows) = (spec.head_dim, spec.heads + 2 * spec.kv_heads, self.step.rows());
        assert_eq!(self.weight(weight).rows, total * dim, "rows of weight {}", weight.0);
        self.assert_batch([out, x]);
        // Before anything fails: the operations that follow check the content of what they read.
        let (queries, query_stride) = self.output(out, spec.heads * dim, Content::Half);
        let Some(projected) = self.scratch(self.bounds.rows_max * total * dim) else { return };
        let (params, kernel, grid) = self.product(x, self.weight(weight), projected, total * dim, End::Store);
        // SAFETY: the scratch memory holds rows_max rows of the projection; operands as `product` checked.
        unsafe { self.launch(kernel, grid, params) };
        let rope = spec.rope.expect("`has` denies layers without rotation");
        let (rope, kv) = (&self.ropes[rope.0 as usize], self.cache());
        assert_eq!((rope.half * 2, kv.spec.head_dim, kv.spec.kv_heads), (dim, dim, spec.kv_heads), "shape of heads");
        let [query_norm, key_norm] = match spec.norms {
            HeadNorms::None => [0; 2],
            HeadNorms::Each { query, key } => [query, key].map(|weight| self.vector(weight, dim)),
            HeadNorms::Together { .. } => unreachable!("`has` denies norms over all heads together"),
        };
        let params = HeadsParams {
            projected,
            queries,
            cache: kv.layers[layer].at(0),
            cosines: rope.tables.at(0),
            sines: rope.tables.at(rope.positions * rope.half * size_of::<f32>()),
            query_norm,
            key_norm,
            places: self.places(),
            heads: narrow(spec.heads),
            kv_heads: narrow(spec.kv_heads),
            dim: narrow(dim),
            query_stride: narrow(query_stride),
            eps: spec.norm_eps,
        };
        let grid = (rows, total.div_ceil(HEAD_THREADS as usize / 32), 1);
        // SAFETY: positions and pages were checked by `begin` against the rotations and the cache; the shapes agree (asserted above).
        unsafe { self.launch(self.kernels.heads, grid, params) };
    }

    pub(super) fn run_attention(&mut self, out: Buffer, queries: Buffer, spec: &AttentionSpec, layer: usize) {
        assert_eq!(spec.soft_cap, None, "`has` denies soft caps");
        let (columns, rows) = (spec.heads * spec.head_dim, self.step.rows());
        self.assert_batch([out, queries]);
        let (queries, stride) = self.input(queries, columns, Content::Half);
        let (out, _) = self.output(out, columns, Content::Half);
        let kv = self.cache();
        let is = (kv.spec.head_dim, kv.spec.kv_heads, spec.heads % spec.kv_heads);
        assert_eq!(is, (spec.head_dim, spec.kv_heads, 0), "shape of heads");
        let mut params = AttentionParams {
            queries,
            out,
            cache: kv.layers[layer].at(0),
            places: self.places(),
            items: 0,
            partials: 0,
            arrived: self.arrived.at(0),
            heads: narrow(spec.heads),
            kv_heads: narrow(spec.kv_heads),
            dim: narrow(spec.head_dim),
            stride: narrow(stride),
            scale: spec.scale,
            // A window of more positions than there can be sees all.
            window: spec.window.and_then(|window| u32::try_from(window).ok()).unwrap_or(0),
            depth: 1,
            sequences: 0,
        };
        let group = spec.heads / spec.kv_heads;
        let tiled = self.kernels.tiled.iter().find(|tiled| tiled.head_dim == spec.head_dim && group <= PREFILL_ROWS);
        let Some(&TiledAttention { decode, prefill, grouped, .. }) = tiled else {
            // SAFETY: pages were checked by `begin` and hold the context; both buffers hold these rows, of equal columns and so strides.
            unsafe { self.launch(self.kernels.attention, (rows, spec.heads, 1), params) };
            return;
        };
        let (Work { alone, several, .. }, [rows_alone, spans]) = (self.work, self.items());
        let blocks = spec.kv_heads * group.div_ceil(DECODE_HEADS);
        let Some((depth, partials)) = self.share(alone, blocks, spec) else { return };
        (params.items, params.partials, params.depth) = (rows_alone, partials, narrow(depth));
        // SAFETY: as above; the list has `alone.0` rows, and there is room for the results that `depth` blocks of a row share.
        unsafe { self.launch(decode, (alone.0, blocks, depth), params) };
        let depth = several.1.div_ceil(PREFILL_ROWS / group);
        (params.items, params.depth, params.sequences) = (spans, narrow(depth), narrow(several.0));
        let tiles = (several.0, spec.kv_heads, depth);
        let (kernel, grid) = match grouped {
            None => (prefill, tiles),
            // A block stays on its multiprocessor and goes through its share of the tiles.
            Some(grouped) => (grouped, ((tiles.0 * tiles.1 * tiles.2).min(self.multiprocessors), 1, 1)),
        };
        // SAFETY: as above; the list has `several.0` sequences of at most `several.1` rows.
        unsafe { self.launch(kernel, grid, params) };
    }

    /// Number of blocks that share the attention of each row that is alone in its sequence, and room for their results: several where there
    /// are too few rows to keep the GPU busy. `None` after a failure, which is kept.
    fn share(
        &mut self,
        (rows, context): (usize, usize),
        blocks: usize,
        spec: &AttentionSpec,
    ) -> Option<(usize, Pointer)> {
        if self.fault.is_some() {
            return None;
        }
        let is_shared = rows * blocks < self.multiprocessors.min(ARRIVED);
        let depth = if is_shared { context.div_ceil(DECODE_TOKENS) } else { 1 };
        if depth > 1 {
            let splits = self.work.pages / (SPLIT / PAGE_TOKENS) + rows;
            let bytes = splits * spec.heads * (spec.head_dim + 4) * size_of::<f32>();
            match self.larger(&self.partials, bytes, "results of attention") {
                Ok(Some(larger)) => self.partials = larger,
                Ok(None) => {}
                Err(error) => {
                    self.fault = Some(error);
                    return None;
                }
            }
        }
        Some((depth.max(1), self.partials.at(0)))
    }

    pub(super) fn run_linear_add(&mut self, residual: Buffer, x: Buffer, weight: Weight) {
        assert_eq!(self.rows_of(residual), self.rows_of(x), "rows of buffers {} and {}", residual.0, x.0);
        let (out, stride) = self.input(residual, self.weight(weight).rows, Content::Single);
        let (params, kernel, grid) = self.product(x, self.weight(weight), out, stride, End::Add);
        // SAFETY: the residual has the weight's rows as columns and as many rows as `x`; operands as `product` checked.
        unsafe { self.launch(kernel, grid, params) };
    }

    pub(super) fn run_gate_up(&mut self, out: Buffer, x: Buffer, weight: Weight) {
        let Loaded::GateUp(_, columns) = &self.weights[weight.0 as usize] else {
            panic!("weight {} is not a gate and an up matrix", weight.0)
        };
        let columns = *columns;
        assert_eq!(self.rows_of(out), self.rows_of(x), "rows of buffers {} and {}", out.0, x.0);
        let (out, stride) = self.output(out, columns, Content::Half);
        let Loaded::GateUp(matrix, _) = &self.weights[weight.0 as usize] else { unreachable!("matched above") };
        let (gemm, kernel, grid) = self.product(x, matrix, out, stride, End::Silu);
        let params = GatedParams { gemm, out_columns: narrow(columns) };
        // SAFETY: outputs beyond `out_columns` are not written; operands as `product` checked.
        unsafe { self.launch(kernel, grid, params) };
    }

    pub(super) fn run_select(&mut self, out: Buffer, x: Buffer) {
        let columns = self.buffers[x.0 as usize].columns;
        assert_eq!(self.buffers[out.0 as usize].domain, Rows::Sampled, "selected rows are sampled rows");
        let (x, stride) = self.input(x, columns, Content::Single);
        let (out, _) = self.output(out, columns, Content::Single);
        let sampled = self.uploaded.at(3 * self.step.rows() * size_of::<u32>());
        let params = SelectParams { out, x, sampled, columns: narrow(columns), stride: narrow(stride) };
        // SAFETY: one block per sampled row, each checked to be a row of the step; buffers of equal columns have equal strides.
        unsafe { self.launch(self.kernels.select, (self.step.sampled.len(), 1, 1), params) };
    }

    /// Rows of a buffer of sampled rows as f32, whatever it holds; empty after a fault.
    pub(super) fn run_read_sampled(&mut self, x: Buffer) -> Vec<f32> {
        let (rows, stored) = (self.step.sampled.len(), &self.buffers[x.0 as usize]);
        assert_eq!(stored.domain, Rows::Sampled, "a buffer of sampled rows is read");
        if self.fault.is_some() {
            return Vec::new();
        }
        let (stride, columns) = (stored.stride(), stored.columns);
        let width = match stored.content {
            Content::Half => size_of::<u16>(),
            Content::Single | Content::Unknown => size_of::<f32>(),
        };
        let mut bytes = vec![0u8; rows * stride * width];
        if let Err(error) = self.stream.read(&stored.memory, 0, &mut bytes) {
            self.fault = Some(fault(&self.gpu, error));
            return Vec::new();
        }
        let value = |bytes: &[u8]| match *bytes {
            [a, b] => half::bf16::from_le_bytes([a, b]).to_f32(),
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
            _ => unreachable!("values have two or four bytes"),
        };
        let rows = bytes.chunks_exact(stride * width);
        rows.flat_map(|row| row[..columns * width].chunks_exact(width).map(value)).collect()
    }

    /// Computes the logits of the sampled rows, copies them to the host, and waits for the step, also where no row is sampled.
    pub(super) fn run_logits(&mut self, x: Buffer, weight: Weight) {
        let (rows, vocab) = (self.step.sampled.len(), self.weight(weight).rows);
        self.enqueue_logits(x, weight);
        self.read_logits(std::slice::from_ref(&(0..rows)), vocab);
    }

    /// Computes the logits of the sampled rows, copies to the host what `picks` asks for, and waits for the step; returns the vocabulary's size.
    pub(super) fn run_sample(&mut self, x: Buffer, weight: Weight, picks: &[Pick]) -> usize {
        let (rows, vocab) = (self.step.sampled.len(), self.weight(weight).rows);
        assert_eq!(picks.len(), rows, "a way to the token for each sampled row");
        self.enqueue_logits(x, weight);
        let is_read = |pick: &Pick| match pick {
            Pick::Host => true,
            Pick::Best => false,
            Pick::Draw { .. } => vocab > CHUNKS_MAX * CHUNK,
        };
        let tokens = if picks.iter().all(is_read) { vec![[0; 2]; rows] } else { self.pick(picks, vocab) };
        let mut read = 0;
        let of = |(pick, [_, token]): (&Pick, [u32; 2])| {
            if is_read(pick) {
                read += 1;
                return Found::Logits(read - 1);
            }
            Found::Token((token != NO_TOKEN).then_some(token))
        };
        self.found.clear();
        self.found.extend(picks.iter().zip(tokens).map(of));
        let mut first = 0;
        let runs = picks.chunk_by(|a, b| is_read(a) == is_read(b)).filter_map(|run| {
            first += run.len();
            is_read(&run[0]).then_some(first - run.len()..first)
        });
        self.read_logits(&runs.collect::<Vec<_>>(), vocab);
        vocab
    }

    /// Enqueues the product whose results are logits; they are in the scratch memory, `[sampled, vocab]`.
    fn enqueue_logits(&mut self, x: Buffer, weight: Weight) {
        assert_eq!(self.buffers[x.0 as usize].domain, Rows::Sampled, "logits are of sampled rows");
        let vocab = self.weight(weight).rows;
        let Some(out) = self.scratch(self.bounds.sampled_max.min(self.bounds.rows_max) * vocab) else { return };
        let (params, kernel, grid) = self.product(x, self.weight(weight), out, vocab, End::Store);
        // SAFETY: the scratch memory holds as many rows of logits as a step samples; operands as `product` checked.
        unsafe { self.launch(kernel, grid, params) };
    }

    /// Copies some of the rows of logits to the host, one after the other, and waits for the step.
    fn read_logits(&mut self, runs: &[Range<usize>], vocab: usize) {
        if self.fault.is_some() {
            return;
        }
        self.logits.resize(runs.iter().map(Range::len).sum::<usize>() * vocab, 0.0);
        let mut rest = self.logits.as_mut_slice();
        let mut read = |run: &Range<usize>| {
            let out = rest.split_off_mut(..run.len() * vocab).expect("the sum of the runs");
            self.stream.read(&self.scratch, run.start * vocab * size_of::<f32>(), out)
        };
        // Without a row, nothing has waited yet.
        let read = runs.iter().try_for_each(&mut read).and_then(|()| self.stream.wait());
        self.fault = read.err().map(|error| fault(&self.gpu, error));
    }

    /// Finds the token of each row of logits, the best one where none is to be drawn, and waits for the step: the bits of the largest logit, and
    /// the token or [`NO_TOKEN`], by row. Zeros after a failure, which is kept.
    fn pick(&mut self, picks: &[Pick], vocab: usize) -> Vec<[u32; 2]> {
        let (rows, mut tokens) = (picks.len(), vec![[0u32; 2]; picks.len()]);
        let (parts, chunks) = (vocab.div_ceil(PART), vocab.div_ceil(CHUNK));
        // A token of each row, one of each of its parts, and a sum of each of its chunks: 8 bytes each.
        let at = |count: usize| rows * count * size_of::<u64>();
        if self.fault.is_none() {
            match self.larger(&self.picked, at(1 + parts + chunks), "the tokens of a step") {
                Ok(Some(larger)) => self.picked = larger,
                Ok(None) => {}
                Err(error) => self.fault = Some(error),
            }
        }
        if self.fault.is_some() {
            return tokens;
        }
        let [best, of_parts, sums] = [0, 1, 1 + parts].map(|count| self.picked.at(at(count)));
        let (logits, columns) = (self.scratch.at(0), narrow(vocab));
        let params = BestPartsParams { out: of_parts, logits, columns, parts: narrow(parts) };
        // SAFETY: the scratch memory holds a row of `vocab` logits per sampled row, `picked` a result for each part of each.
        unsafe { self.launch(self.kernels.best_parts, (parts, rows, 1), params) };
        let params = BestTokensParams { out: best, parts: of_parts, count: narrow(parts) };
        // SAFETY: one block per row, whose `count` parts the launch before wrote.
        unsafe { self.launch(self.kernels.best_tokens, (rows, 1, 1), params) };
        let draws: Vec<Draw> = picks.iter().zip(0..).filter_map(|(pick, row)| drawn(*pick, row)).collect();
        for some in draws.chunks(DRAWS).filter(|_| chunks <= CHUNKS_MAX) {
            let mut params =
                DrawParams { best, sums, logits, columns, chunks: narrow(chunks), draws: [Draw::default(); DRAWS] };
            params.draws[..some.len()].copy_from_slice(some);
            let grid = (chunks.div_ceil(SUMMED), some.len(), 1);
            // SAFETY: `picked` holds a sum for each chunk of each row; the rows are sampled ones.
            unsafe { self.launch(self.kernels.draw_sums, grid, params) };
            // SAFETY: one block per row, whose sums the launch before wrote.
            unsafe { self.launch(self.kernels.draw_tokens, (some.len(), 1, 1), params) };
        }
        if self.fault.is_none() {
            let read = self.stream.read(&self.picked, 0, tokens.as_flattened_mut());
            self.fault = read.err().map(|error| fault(&self.gpu, error));
        }
        tokens
    }
}

/// Random number for a row whose token is drawn.
fn drawn(pick: Pick, row: u32) -> Option<Draw> {
    match pick {
        Pick::Host | Pick::Best => None,
        Pick::Draw { scale, uniform } => Some(Draw { uniform, scale, row }),
    }
}
