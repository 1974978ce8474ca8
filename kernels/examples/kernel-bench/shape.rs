//! Qwen3-0.6B: 28 layers, hidden 1024, 16 query and 8 KV heads of 128, MLP 3072, vocabulary 151936, tied head.

use std::fmt;

use penstock_kernels::{
    Activation, AttentionSpec, Buffer, BufferSpec, DType, Device, HeadNorms, Held, HostTensor, KvFormat, KvSpec,
    LogitsSpec, PAGE_TOKENS, RopeSpec, RowOrder, Rows, StepBatch, Weight, WeightSpec,
};

use super::clock::Clock;

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

/// Seconds that a step spent in each [`Part`], by its index, on one clock.
pub(crate) struct Shares {
    seconds: [f64; 8],
    clock: Clock,
}

impl Shares {
    pub(crate) fn new(clock: Clock) -> Self {
        Self { seconds: [0.0; 8], clock }
    }

    fn of(&self, part: Part) -> f64 {
        self.seconds[part as usize]
    }

    /// Seconds of the layers' matrix products, with their epilogues.
    pub(crate) fn products(&self) -> f64 {
        [Part::Qkv, Part::Out, Part::GateUp, Part::Down].iter().map(|part| self.of(*part)).sum()
    }

    pub(crate) fn total(&self) -> f64 {
        self.seconds.iter().sum()
    }

    fn time<T>(&mut self, part: Part, work: impl FnOnce() -> T) -> T {
        let start = (self.clock)();
        let out = work();
        self.seconds[part as usize] += (self.clock)() - start;
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

/// Format of a model's matrices.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    pub(crate) name: &'static str,
    plain: DType,
    /// Of the embedding, and in half of the layers of values and the MLP's way down, as llama.cpp mixes them.
    other: DType,
    held: Held,
}

impl Format {
    /// Every format that can be asked for.
    pub(crate) fn all() -> Vec<Format> {
        let stored = |dtype: DType| Format { name: dtype.name(), plain: dtype, other: dtype, held: Held::Stored };
        let numbers = [DType::F16, DType::F32];
        let mut all: Vec<Format> = DType::ALL.into_iter().filter(|d| !numbers.contains(d)).map(stored).collect();
        all.push(Format { name: "int8", held: Held::Int8, ..stored(DType::Bf16) });
        all.push(Format { name: "q4_k_m", other: DType::Q6K, ..stored(DType::Q4K) });
        all
    }

    pub(crate) fn named(name: &str) -> Format {
        Self::all().into_iter().find(|format| format.name == name).unwrap_or_else(|| panic!("no format {name}"))
    }

    /// Form in which the device holds the matrices, and their stored types: most of them, and the MLP's way down.
    pub(crate) fn stored(&self) -> (Held, [DType; 2]) {
        (self.held, [self.plain, self.other])
    }

    fn of_layer(&self, layer: usize) -> DType {
        let eighth = LAYERS / 8;
        let more = layer < eighth || layer >= 7 * eighth || (layer - eighth) % 3 == 2;
        if more { self.other } else { self.plain }
    }
}

impl Qwen {
    /// Loads slices of one block of noise as weights.
    pub(crate) fn load(device: &mut dyn Device, format: Format) -> Self {
        let of = |dtype| noise(dtype, VOCAB * HIDDEN);
        let other = if format.other == format.plain { None } else { Some(of(format.other)) };
        let noise = Noise { plain: of(format.plain), other, bf16: of(DType::Bf16) };
        let mut device = Loader { device, noise: &noise, offset: 0, format };
        let embedding = device.embedding();
        let last_norm = device.vector(HIDDEN);
        let norms = HeadNorms::Each { query: device.vector(HEAD_DIM), key: device.vector(HEAD_DIM) };
        let layers = (0..LAYERS).map(|layer| device.layer(layer)).collect();
        let device = device.device;
        let half = HEAD_DIM / 2;
        let inverse_frequencies = (0..half).map(|i| 1e6f32.powf(-(i as f32) / half as f32)).collect();
        let rope = device.rope(&RopeSpec { inverse_frequencies, factor: 1.0, positions: 4096 }).expect("rope");
        let spec = KvSpec {
            layers: LAYERS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            latent: None,
            format: KvFormat::Own,
            pages: PAGES,
        };
        device.kv(spec).expect("KV cache");
        let attention = AttentionSpec {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            latent: None,
            scale: 1.0 / (HEAD_DIM as f32).sqrt(),
            causal: true,
            window: None,
            soft_cap: None,
            offsets: None,
            sinks: None,
            rope: Some(rope),
            norms,
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
        shares.time(Part::Other, || d.embed(residual, self.embedding, 1.0));
        for (index, layer) in self.layers.iter().enumerate() {
            shares.time(Part::Norms, || d.rmsnorm(normed, residual, layer.norms[0], 1e-6));
            shares.time(Part::Qkv, || d.qkv(queries, normed, layer.qkv, &self.attention, index));
            shares.time(Part::Attention, || d.attention(attended, queries, &self.attention, index));
            shares.time(Part::Out, || d.linear_add(residual, attended, layer.out, 1.0));
            shares.time(Part::Norms, || d.rmsnorm(normed, residual, layer.norms[1], 1e-6));
            shares.time(Part::GateUp, || d.gate_up(gated, normed, layer.gate_up, Activation::Silu));
            shares.time(Part::Down, || d.linear_add(residual, gated, layer.down, 1.0));
        }
        shares.time(Part::Other, || d.select(selected, residual));
        shares.time(Part::Norms, || d.rmsnorm(last, selected, self.last_norm, 1e-6));
        let logits = shares.time(Part::Head, || d.logits(last, self.embedding, LogitsSpec::PLAIN).expect("logits")[0]);
        assert!(logits.is_finite());
    }
}

/// Noise in each format that a model needs.
struct Noise {
    plain: Vec<u8>,
    other: Option<Vec<u8>>,
    bf16: Vec<u8>,
}

/// Noise of about ±0.02.
pub(crate) fn noise(dtype: DType, count: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state
    };
    if dtype == DType::Bf16 {
        let value = |state: u64| ((state >> 63) as u16) << 15 | (0x3c00 + (state >> 54 & 0xff) as u16);
        return (0..count).flat_map(|_| value(next()).to_le_bytes()).collect();
    }
    let (values, size) = dtype.block();
    let mut bytes: Vec<u8> = (0..count / values * size / 8 + 1).flat_map(|_| next().to_le_bytes()).collect();
    bytes.truncate(count / values * size);
    for block in bytes.chunks_exact_mut(size) {
        // Small scales and minima in f16, where the format has them; MXFP4 has a power of two.
        let places: &[usize] = match dtype {
            DType::Q2K => &[80, 82],
            DType::Q3K => &[108],
            DType::Q6K => &[208],
            DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
            DType::Mxfp4 => &[],
            _ => &[0],
        };
        places.iter().for_each(|&at| block[at..at + 2].copy_from_slice(&0x0800u16.to_le_bytes()));
        if dtype == DType::Mxfp4 {
            block[0] = 119;
        }
    }
    bytes
}

struct Loader<'a> {
    device: &'a mut dyn Device,
    noise: &'a Noise,
    offset: usize,
    format: Format,
}

impl<'a> Loader<'a> {
    /// The next values of a format, as a tensor.
    fn tensor(&mut self, dtype: DType, shape: &'a [usize]) -> HostTensor<'a> {
        let noise = match dtype {
            DType::Bf16 => &self.noise.bf16,
            dtype if dtype == self.format.plain => &self.noise.plain,
            _ => self.noise.other.as_ref().expect("noise of the other format"),
        };
        let count: usize = shape.iter().product();
        if self.offset + count > VOCAB * HIDDEN {
            self.offset = 0;
        }
        let (values, size) = dtype.block();
        let bytes = &noise[self.offset / values * size..][..count / values * size];
        self.offset = (self.offset + count).next_multiple_of(256);
        HostTensor { name: "noise", dtype, shape, bytes, order: RowOrder::Plain, reader: None }
    }

    fn load(&mut self, spec: &WeightSpec<'_>) -> Weight {
        self.device.load(spec, self.format.held).expect("weight")
    }

    fn vector(&mut self, n: usize) -> Weight {
        let shape: &[usize] = match n {
            HIDDEN => &[HIDDEN],
            _ => &[HEAD_DIM],
        };
        let tensor = self.tensor(DType::Bf16, shape);
        self.load(&WeightSpec::Vector { tensor, offset: 0.0 })
    }

    fn embedding(&mut self) -> Weight {
        let tensor = self.tensor(self.format.other, &[VOCAB, HIDDEN]);
        self.load(&WeightSpec::Embedding(tensor))
    }

    fn linear(&mut self, parts: &[(DType, &'a [usize])]) -> Weight {
        let parts = parts.iter().map(|&(dtype, shape)| self.tensor(dtype, shape)).collect();
        self.load(&WeightSpec::Linear { parts, biases: vec![] })
    }

    fn layer(&mut self, layer: usize) -> Layer {
        const WIDE: usize = HEADS * HEAD_DIM;
        const NARROW: usize = KV_HEADS * HEAD_DIM;
        let (plain, other) = (self.format.plain, self.format.of_layer(layer));
        let [gate, up] = [0, 1].map(|_| self.tensor(plain, &[MLP, HIDDEN]));
        Layer {
            norms: [self.vector(HIDDEN), self.vector(HIDDEN)],
            qkv: self.linear(&[(plain, &[WIDE, HIDDEN]), (plain, &[NARROW, HIDDEN]), (other, &[NARROW, HIDDEN])]),
            out: self.linear(&[(plain, &[HIDDEN, WIDE])]),
            gate_up: self.load(&WeightSpec::GateUp { gate, up, biases: None }),
            down: self.linear(&[(other, &[HIDDEN, MLP])]),
        }
    }
}
