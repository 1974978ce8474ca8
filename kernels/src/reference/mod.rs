//! The oracle: every operation in plain f32 loops, slow and obvious.
//!
//! Weights, activations and KV are f32, row-major. A row's result depends on that row alone and each sum runs in one fixed order,
//! so the batch invariance that other devices must work for holds here by construction. Reading order: `mod.rs` (loading,
//! handles), `ops.rs` (the operations).

mod ops;

use std::collections::HashMap;

use crate::blocks::{LINE, Layout, RowBlocks};
use crate::device::{
    Activation, AdapterSlot, AttentionSpec, Buffer, BufferSpec, DType, Device, DeviceInfo, ExpertSpec, Feature, Held,
    KernelError, KvSpec, Limits, LogitsSpec, LowRank, PAGE_TOKENS, Rope, RopeSpec, RoutingSpec, Rows, StepBatch,
    TableIndex, Weight, WeightSpec,
};
use crate::source::{Checked, CheckedExpert, CheckedLowRank, HeadMatrix, Source, checked_experts, checked_low_ranks};
use crate::step::{Bounds, Step};

/// Matrix of f32 in row-major order, `[rows, columns]`.
struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f32>,
}

impl Matrix {
    /// Stacks `parts`. Weights held as integers are the numbers that the integers stand for.
    fn stack(parts: &[Source<'_>], held: Held) -> Self {
        let (rows, columns) = (parts.iter().map(|part| part.rows).sum(), parts[0].columns);
        let values = parts.iter().flat_map(|part| {
            let mut values = part.to_f32();
            match held.layout() {
                _ if held.keeps(part.bits()) || (held == Held::Int8 && part.integers(0).is_some()) => {}
                Some(layout) => values.chunks_exact_mut(columns).for_each(|row| round_blocks(layout, row)),
                None => values.chunks_exact_mut(columns).for_each(round_row),
            }
            values
        });
        Self { rows, columns, values: values.collect() }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.columns..][..self.columns]
    }
}

/// Rounds a row of weights to 8 bits of one scale.
fn round_row(row: &mut [f32]) {
    let peak = row.iter().fold(0.0f32, |peak, w| peak.max(w.abs()));
    let (scale, factor) = (peak / 127.0, if peak < 1e-30 { 0.0 } else { 127.0 / peak });
    row.iter_mut().for_each(|w| *w = (*w * factor).round_ties_even() * scale);
}

/// Rounds a row of weights to integers in blocks.
fn round_blocks(layout: Layout, row: &mut [f32]) {
    let (mut blocks, mut rounded) = (RowBlocks::default(), vec![0.0; row.len().next_multiple_of(LINE)]);
    blocks.round(layout, row);
    blocks.to_f32(layout, &mut rounded);
    row.copy_from_slice(&rounded[..row.len()]);
}

enum Loaded {
    Vector(Vec<f32>),
    Linear { matrix: Matrix, bias: Option<Vec<f32>> },
    GateUp { gate: Matrix, up: Matrix, biases: Option<[Vec<f32>; 2]> },
    Experts(Vec<Expert>),
    Embedding(Matrix),
    Table(Matrix, TableIndex),
    Heads(Vec<Matrix>),
}

struct Expert {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    /// Biases of gate, up and down.
    biases: Option<[Vec<f32>; 3]>,
}

struct Activations {
    domain: Rows,
    columns: usize,
    values: Vec<f32>,
}

struct Rotations {
    /// Cosines, `[positions, head_dim / 2]`.
    cosines: Vec<f32>,
    sines: Vec<f32>,
    half: usize,
}

/// KV cache, `[layer][page][K|V][kv_head][token][dim]`: the canonical order itself. Latents have no V; they are the first values of keys.
struct Kv {
    spec: KvSpec,
    values: Vec<f32>,
}

impl Kv {
    fn page_size(&self) -> usize {
        self.parts() * self.spec.kv_heads * PAGE_TOKENS * self.spec.head_dim
    }

    /// Parts of a page: K and V, or K alone.
    fn parts(&self) -> usize {
        if self.spec.latent.is_some() { 1 } else { 2 }
    }

    /// Index at which the `head_dim` values of one token begin; `part` 0 is K, 1 is V, which latents have in their keys.
    fn at(&self, layer: usize, page: usize, part: usize, head: usize, slot: usize) -> usize {
        let part = part.min(self.parts() - 1);
        let row = ((layer * self.spec.pages + page) * self.parts() + part) * self.spec.kv_heads + head;
        (row * PAGE_TOKENS + slot) * self.spec.head_dim
    }
}

/// Reference device in f32: slow and obvious, for comparison with the fast devices.
pub struct ReferenceDevice {
    bounds: Bounds,
    weights: Vec<Loaded>,
    /// Low-rank additions by weight and adapter.
    adapters: HashMap<(u32, AdapterSlot), Vec<CheckedLowRank>>,
    buffers: Vec<Activations>,
    ropes: Vec<Rotations>,
    kv: Option<Kv>,
    step: Step,
    logits: Vec<f32>,
}

impl ReferenceDevice {
    /// Creates a device without weights, for steps within `limits`.
    pub fn new(limits: Limits) -> Self {
        let bounds = Bounds::new(limits);
        Self {
            bounds,
            weights: Vec::new(),
            adapters: HashMap::new(),
            buffers: Vec::new(),
            ropes: Vec::new(),
            kv: None,
            step: Step::default(),
            logits: Vec::new(),
        }
    }
}

impl Device for ReferenceDevice {
    fn info(&self) -> DeviceInfo {
        let (name, numerics) = ("reference f32, 1 thread".into(), "reference-f32-v1".into());
        DeviceInfo { name, numerics, weights: DType::F32 }
    }

    fn has(&self, _: Feature) -> bool {
        true
    }

    fn load(&mut self, spec: &WeightSpec<'_>, held: Held) -> Result<Weight, KernelError> {
        let loaded = match Checked::new(spec)? {
            Checked::Vector(values) => Loaded::Vector(values),
            Checked::Linear { parts, bias } => Loaded::Linear { matrix: Matrix::stack(&parts, held), bias },
            Checked::GateUp { gate, up, biases } => {
                Loaded::GateUp { gate: Matrix::stack(&[gate], held), up: Matrix::stack(&[up], held), biases }
            }
            Checked::Embedding(source) => {
                self.bounds.vocab = self.bounds.vocab.min(source.rows);
                Loaded::Embedding(Matrix::stack(&[source], held))
            }
            Checked::Table(source, index) => {
                self.bounds.has_table(source.rows, index);
                Loaded::Table(Matrix::stack(&[source], Held::Stored), index)
            }
            Checked::Heads(heads) => {
                let matrix = |HeadMatrix { rows, columns, values }| Matrix { rows, columns, values };
                Loaded::Heads(heads.into_iter().map(matrix).collect())
            }
        };
        self.weights.push(loaded);
        Ok(Weight(self.weights.len() as u32 - 1))
    }

    fn load_experts(&mut self, experts: &[ExpertSpec<'_>], held: Held) -> Result<Weight, KernelError> {
        let expert = |CheckedExpert { gate, up, down, biases }| {
            let [gate, up, down] = [gate, up, down].map(|source| Matrix::stack(&[source], held));
            Expert { gate, up, down, biases }
        };
        self.weights.push(Loaded::Experts(checked_experts(experts)?.into_iter().map(expert).collect()));
        Ok(Weight(self.weights.len() as u32 - 1))
    }

    fn adapt(&mut self, weight: Weight, slot: AdapterSlot, parts: &[LowRank<'_>]) -> Result<(), KernelError> {
        let (outputs, inputs) = match &self.weights[weight.0 as usize] {
            Loaded::Linear { matrix, .. } => (matrix.rows, matrix.columns),
            Loaded::GateUp { gate, .. } => (2 * gate.rows, gate.columns),
            _ => panic!("weight {} is not linear", weight.0),
        };
        self.adapters.insert((weight.0, slot), checked_low_ranks(parts, slot, outputs, inputs)?);
        self.bounds.adapters = self.bounds.adapters.max(usize::from(slot.0) + 1);
        Ok(())
    }

    fn unadapt(&mut self, slot: AdapterSlot) {
        self.adapters.retain(|(_, other), _| *other != slot);
        self.bounds.adapters = self.adapters.keys().map(|(_, slot)| usize::from(slot.0) + 1).max().unwrap_or(0);
    }

    fn buffer(&mut self, spec: BufferSpec) -> Result<Buffer, KernelError> {
        let rows = match spec.rows {
            Rows::Batch => self.bounds.rows_max,
            Rows::Sampled => self.bounds.sampled_max,
        };
        let values = vec![0.0; rows * spec.columns];
        self.buffers.push(Activations { domain: spec.rows, columns: spec.columns, values });
        Ok(Buffer(self.buffers.len() as u32 - 1))
    }

    fn rope(&mut self, spec: &RopeSpec) -> Result<Rope, KernelError> {
        // The angle is rounded to f32 as transformers does it; its sine is then exact to f32.
        let angles = (0..spec.positions)
            .flat_map(|position| spec.inverse_frequencies.iter().map(move |f| f64::from(position as f32 * f)));
        let (cosines, sines) = angles.map(|a| (a.cos() as f32 * spec.factor, a.sin() as f32 * spec.factor)).unzip();
        self.ropes.push(Rotations { cosines, sines, half: spec.inverse_frequencies.len() });
        self.bounds.positions = self.bounds.positions.min(spec.positions);
        Ok(Rope(self.ropes.len() as u32 - 1))
    }

    fn kv(&mut self, spec: KvSpec) -> Result<(), KernelError> {
        let mut kv = Kv { spec, values: Vec::new() };
        let count = [spec.layers, spec.pages].iter().try_fold(kv.page_size(), |n, &d| n.checked_mul(d));
        let bytes = count.and_then(|n| n.checked_mul(4)).unwrap_or(usize::MAX);
        let memory = |_| KernelError::Memory { what: "the KV cache", bytes };
        kv.values.try_reserve_exact(count.unwrap_or(usize::MAX)).map_err(memory)?;
        kv.values.resize(count.unwrap_or(0), 0.0);
        self.bounds.pages = spec.pages;
        self.kv = Some(kv);
        Ok(())
    }

    fn begin(&mut self, batch: &StepBatch<'_>) -> Result<(), KernelError> {
        self.step.take(batch, &self.bounds)
    }

    fn embed(&mut self, out: Buffer, table: Weight, scale: f32) {
        ops::embed(self, out, table, scale);
    }

    fn add_table(&mut self, residual: Buffer, table: Weight) {
        ops::add_table(self, residual, table);
    }

    fn layer_norm(&mut self, out: Buffer, x: Buffer, weight: Weight, bias: Option<Weight>, eps: f32) {
        ops::layer_norm(self, out, x, weight, bias, eps);
    }

    fn activated(&mut self, out: Buffer, x: Buffer, weight: Weight, activation: Activation) {
        ops::linear_activated(self, out, x, weight, activation);
    }

    fn pool(&mut self, out: Buffer, x: Buffer) {
        ops::pool(self, out, x);
    }

    fn rmsnorm(&mut self, out: Buffer, x: Buffer, weight: Weight, eps: f32) {
        ops::rmsnorm(self, out, x, weight, eps);
    }

    fn qkv(&mut self, out: Buffer, x: Buffer, weight: Weight, attention: &AttentionSpec, layer: usize) {
        ops::qkv(self, out, x, weight, attention, layer);
    }

    fn latent_keys(&mut self, x: Buffer, norm: Weight, attention: &AttentionSpec, layer: usize) {
        ops::latent_keys(self, x, norm, attention, layer);
    }

    fn latent_queries(&mut self, out: Buffer, x: Buffer, keys: Weight, attention: &AttentionSpec) {
        ops::latent_queries(self, out, x, keys, attention);
    }

    fn per_head(&mut self, out: Buffer, x: Buffer, weight: Weight) {
        ops::per_head(self, out, x, weight);
    }

    fn attention(&mut self, out: Buffer, queries: Buffer, attention: &AttentionSpec, layer: usize) {
        ops::attention(self, out, queries, attention, layer);
    }

    fn linear_add(&mut self, residual: Buffer, x: Buffer, weight: Weight, scale: f32) {
        ops::linear_add(self, residual, x, weight, scale);
    }

    fn linear(&mut self, out: Buffer, x: Buffer, weight: Weight) {
        ops::linear(self, out, x, weight);
    }

    fn norm_add(&mut self, residual: Buffer, x: Buffer, weight: Weight, eps: f32) {
        ops::norm_add(self, residual, x, weight, eps);
    }

    fn gate_up(&mut self, out: Buffer, x: Buffer, weight: Weight, activation: Activation) {
        ops::gate_up(self, out, x, weight, activation);
    }

    fn route(&mut self, out: Buffer, x: Buffer, router: Weight, routing: &RoutingSpec) {
        ops::route(self, out, x, router, routing);
    }

    fn experts(&mut self, residual: Buffer, x: Buffer, routes: Buffer, experts: Weight, activation: Activation) {
        ops::experts(self, residual, x, routes, experts, activation);
    }

    fn select(&mut self, out: Buffer, x: Buffer) {
        ops::select(self, out, x);
    }

    fn read_sampled(&mut self, x: Buffer) -> Result<Vec<f32>, KernelError> {
        assert_eq!(self.buffers[x.0 as usize].domain, Rows::Sampled, "a buffer of sampled rows is read");
        Ok(self.read(x, self.buffers[x.0 as usize].columns))
    }

    fn logits(&mut self, x: Buffer, weight: Weight, spec: LogitsSpec) -> Result<&[f32], KernelError> {
        ops::logits(self, x, weight, spec);
        Ok(&self.logits)
    }

    fn routes(&self, routes: Buffer) -> Vec<f32> {
        self.read(routes, self.buffers[routes.0 as usize].columns)
    }

    fn page(&self, layer: usize, page: u32) -> Vec<f32> {
        let kv = self.kv.as_ref().expect("kv() is called before page()");
        kv.values[kv.at(layer, page as usize, 0, 0, 0)..][..kv.page_size()].to_vec()
    }

    fn page_bytes(&self) -> usize {
        self.kv.as_ref().expect("kv() is called before page_bytes()").page_size() * size_of::<f32>()
    }

    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]) {
        let kv = self.kv.as_ref().expect("kv() is called before read_page()");
        let values = &kv.values[kv.at(layer, page as usize, 0, 0, 0)..][..kv.page_size()];
        let (out, _) = out.as_chunks_mut::<4>();
        out.iter_mut().zip(values).for_each(|(to, value)| *to = value.to_le_bytes());
    }

    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        let kv = self.kv.as_mut().expect("kv() is called before write_page()");
        let (start, size) = (kv.at(layer, page as usize, 0, 0, 0), kv.page_size());
        assert_eq!(bytes.len(), size * size_of::<f32>(), "bytes of a page");
        let (bytes, _) = bytes.as_chunks::<4>();
        kv.values[start..start + size]
            .iter_mut()
            .zip(bytes)
            .for_each(|(value, from)| *value = f32::from_le_bytes(*from));
    }
}
