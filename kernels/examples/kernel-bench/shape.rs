//! Qwen3-0.6B: 28 layers, hidden 1024, 16 query and 8 KV heads of 128, MLP 3072, vocabulary 151936, tied head.

use std::fmt;
use std::time::Instant;

use penstock_kernels::{
    AttentionSpec, Buffer, BufferSpec, DType, Device, HostTensor, KvSpec, PAGE_TOKENS, RopeSpec, Rows, StepBatch,
    Weight, WeightSpec,
};

const LAYERS: usize = 28;
const HIDDEN: usize = 1024;
const HEADS: usize = 16;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const MLP: usize = 3072;
const VOCAB: usize = 151_936;
pub(crate) const PAGES: usize = 512 + 64;

/// Parts of a step, by which time is reported.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    Qkv,
    Out,
    GateUp,
    Down,
    Attention,
    Norms,
    Head,
    Other,
}

const PARTS: [(Part, &str); 8] = [
    (Part::Qkv, "qkv"),
    (Part::Out, "out"),
    (Part::GateUp, "gate+up"),
    (Part::Down, "down"),
    (Part::Attention, "attention"),
    (Part::Norms, "norms"),
    (Part::Head, "head"),
    (Part::Other, "embed"),
];

/// Seconds that a step spent in each [`Part`], by its index.
#[derive(Default)]
pub(crate) struct Shares([f64; 8]);

impl Shares {
    fn of(&self, part: Part) -> f64 {
        self.0[part as usize]
    }

    /// Seconds of the layers' matrix products, with their epilogues.
    pub(crate) fn products(&self) -> f64 {
        [Part::Qkv, Part::Out, Part::GateUp, Part::Down].iter().map(|part| self.of(*part)).sum()
    }

    pub(crate) fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    fn time<T>(&mut self, part: Part, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let out = work();
        self.0[part as usize] += start.elapsed().as_secs_f64();
        out
    }
}

impl fmt::Display for Shares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} ms:", self.total() * 1e3)?;
        PARTS.iter().try_for_each(|(part, name)| write!(f, " {name} {:.1} %", 100.0 * self.of(*part) / self.total()))
    }
}

struct Layer {
    norms: [Weight; 2],
    qkv: Weight,
    out: Weight,
    gate_up: Weight,
    down: Weight,
}

/// Handles of a Qwen model's weights and buffers on the device under measurement.
pub(crate) struct Qwen {
    embedding: Weight,
    last_norm: Weight,
    attention: AttentionSpec,
    layers: Vec<Layer>,
    /// Buffers: residual, normed, queries, attended, gated; selected, last.
    buffers: [Buffer; 7],
}

impl Qwen {
    /// Loads slices of one block of noise as weights.
    pub(crate) fn load(device: &mut dyn Device) -> Self {
        let noise = noise(VOCAB * HIDDEN);
        let mut device = Loader { device, noise: &noise, offset: 0 };
        let embedding = device.embedding();
        let last_norm = device.vector(HIDDEN);
        let (query_norm, key_norm) = (Some(device.vector(HEAD_DIM)), Some(device.vector(HEAD_DIM)));
        let layers = (0..LAYERS).map(|_| device.layer()).collect();
        let device = device.device;
        let half = HEAD_DIM / 2;
        let inverse_frequencies = (0..half).map(|i| 1e6f32.powf(-(i as f32) / half as f32)).collect();
        let rope = device.rope(&RopeSpec { inverse_frequencies, factor: 1.0, positions: 4096 }).expect("rope");
        let spec = KvSpec { layers: LAYERS, kv_heads: KV_HEADS, head_dim: HEAD_DIM, pages: PAGES };
        device.kv(spec).expect("KV cache");
        let attention = AttentionSpec {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 1.0 / (HEAD_DIM as f32).sqrt(),
            window: None,
            rope,
            query_norm,
            key_norm,
            norm_eps: 1e-6,
        };
        let wide = HEADS * HEAD_DIM;
        let batch = [HIDDEN, HIDDEN, wide, wide, MLP].map(|columns| (Rows::Batch, columns));
        let all = [batch[0], batch[1], batch[2], batch[3], batch[4], (Rows::Sampled, HIDDEN), (Rows::Sampled, HIDDEN)];
        let buffers = all.map(|(rows, columns)| device.buffer(BufferSpec { rows, columns }).expect("buffer"));
        const { assert!(PAGES * PAGE_TOKENS >= 32 * 512) };
        Self { embedding, last_norm, attention, layers, buffers }
    }

    /// Operations of one row in the layers' products.
    pub(crate) fn layer_flops(&self) -> usize {
        2 * LAYERS * HIDDEN * ((HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM + 3 * MLP)
    }

    /// Operations of one row in the head.
    pub(crate) fn head_flops(&self) -> usize {
        2 * HIDDEN * VOCAB
    }

    /// Bytes of bf16 in all weights but norms.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.layer_flops() + self.head_flops()
    }

    /// Bytes that one decode step reads: weights, and the KV of each sequence.
    pub(crate) fn step_bytes(&self, sequences: usize, context: usize) -> usize {
        self.weight_bytes() + sequences * context * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
    }

    /// Runs one step of the model, and adds the seconds of each part to `shares`.
    pub(crate) fn step(&self, d: &mut dyn Device, batch: &StepBatch<'_>, shares: &mut Shares) {
        let [residual, normed, queries, attended, gated, selected, last] = self.buffers;
        d.begin(batch).expect("a good batch");
        shares.time(Part::Other, || d.embed(residual, self.embedding));
        for (index, layer) in self.layers.iter().enumerate() {
            shares.time(Part::Norms, || d.rmsnorm(normed, residual, layer.norms[0], 1e-6));
            shares.time(Part::Qkv, || d.qkv(queries, normed, layer.qkv, &self.attention, index));
            shares.time(Part::Attention, || d.attention(attended, queries, &self.attention, index));
            shares.time(Part::Out, || d.linear_add(residual, attended, layer.out));
            shares.time(Part::Norms, || d.rmsnorm(normed, residual, layer.norms[1], 1e-6));
            shares.time(Part::GateUp, || d.gate_up_silu(gated, normed, layer.gate_up));
            shares.time(Part::Down, || d.linear_add(residual, gated, layer.down));
        }
        shares.time(Part::Other, || d.select(selected, residual));
        shares.time(Part::Norms, || d.rmsnorm(last, selected, self.last_norm, 1e-6));
        let logits = shares.time(Part::Head, || d.logits(last, self.embedding).expect("logits")[0]);
        assert!(logits.is_finite());
    }
}

/// bf16 noise of about ±0.02.
fn noise(count: usize) -> Vec<u8> {
    let mut state = 1u64;
    (0..count)
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let sign = (state >> 63) as u16;
            (sign << 15 | (0x3c00 + (state >> 54 & 0xff) as u16)).to_le_bytes()
        })
        .collect()
}

struct Loader<'a> {
    device: &'a mut dyn Device,
    noise: &'a [u8],
    offset: usize,
}

impl<'a> Loader<'a> {
    fn bytes(&mut self, count: usize) -> &'a [u8] {
        if self.offset + count * 2 > self.noise.len() {
            self.offset = 0;
        }
        self.offset += count * 2;
        &self.noise[self.offset - count * 2..self.offset]
    }

    fn vector(&mut self, n: usize) -> Weight {
        let tensor = HostTensor { name: "noise", dtype: DType::Bf16, shape: &[n], bytes: self.bytes(n) };
        self.device.load(&WeightSpec::Vector(tensor)).expect("weight")
    }

    fn embedding(&mut self) -> Weight {
        let bytes = self.bytes(VOCAB * HIDDEN);
        let tensor = HostTensor { name: "noise", dtype: DType::Bf16, shape: &[VOCAB, HIDDEN], bytes };
        self.device.load(&WeightSpec::Embedding(tensor)).expect("weight")
    }

    fn linear(&mut self, n: usize, k: usize) -> Weight {
        let tensor = HostTensor { name: "noise", dtype: DType::Bf16, shape: &[n, k], bytes: self.bytes(n * k) };
        self.device.load(&WeightSpec::Linear { parts: vec![tensor], biases: vec![] }).expect("weight")
    }

    fn layer(&mut self) -> Layer {
        let (gate, up, shape) = (self.bytes(MLP * HIDDEN), self.bytes(MLP * HIDDEN), [MLP, HIDDEN]);
        let tensor = |bytes| HostTensor { name: "noise", dtype: DType::Bf16, shape: &shape, bytes };
        Layer {
            norms: [self.vector(HIDDEN), self.vector(HIDDEN)],
            qkv: self.linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            out: self.linear(HIDDEN, HEADS * HEAD_DIM),
            gate_up: self
                .device
                .load(&WeightSpec::GateUp { gate: tensor(gate), up: tensor(up), biases: None })
                .expect("weight"),
            down: self.linear(HIDDEN, MLP),
        }
    }
}
