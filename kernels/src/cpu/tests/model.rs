//! A small transformer with random weights, run on any device, and schedules for it.

use crate::device::*;
use crate::source::Source;

/// Shape of a model, odd on purpose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) intermediate: usize,
    pub(crate) vocab: usize,
    pub(crate) layers: usize,
    pub(crate) window: Option<usize>,
    pub(crate) bias: bool,
    pub(crate) norms: bool,
    pub(crate) tied: bool,
    /// Format of the matrices, and that of the value, down and embedding ones.
    pub(crate) stored: [DType; 2],
    pub(crate) held: Held,
    /// Number of experts and how many of them a row chooses; `None` has one MLP.
    pub(crate) experts: Option<(usize, usize)>,
    pub(crate) own: Own,
}

/// Operations of a shape beyond a plain decoder's ([`Feature`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own {
    pub(crate) embedding_scale: f32,
    pub(crate) activation: Activation,
    /// Norms behind attention and MLP.
    pub(crate) post_norms: bool,
    /// Factor on what is added to the residual.
    pub(crate) residual_scale: f32,
    /// Divisor of the logits.
    pub(crate) logits_divisor: f32,
    /// Soft caps of scores and of logits.
    pub(crate) soft_caps: [Option<f32>; 2],
    /// Norms of heads over all of them.
    pub(crate) joint: bool,
    /// Number of values of a head that are rotated; `None` rotates all.
    pub(crate) rotated: Option<usize>,
    /// Attention sinks.
    pub(crate) sinks: bool,
    /// Biases of experts and of their router.
    pub(crate) expert_biases: bool,
    /// Attention over latents; the shape then has one KV head of `rank + rotated` values.
    pub(crate) latent: Option<Latent>,
    /// Groups of experts, chosen by sigmoids with a correction.
    pub(crate) groups: Option<ExpertGroups>,
    /// Form of keys and values.
    pub(crate) kv: KvFormat,
    /// Adapters by slot; sequences have none, the first, the second … in turn.
    pub(crate) adapters: &'static [Ranks],
}

/// Ranks of an adapter's additions to queries, keys, values, output, gate, up and down; 0 adds nothing.
pub(crate) type Ranks = [usize; 7];

/// Widths of attention over latents.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latent {
    pub(crate) rank: usize,
    /// Values of a head's query that are not rotated.
    pub(crate) plain: usize,
    pub(crate) rotated: usize,
    pub(crate) value: usize,
}

impl Own {
    fn logits(&self) -> LogitsSpec {
        LogitsSpec { divisor: self.logits_divisor, soft_cap: self.soft_caps[1] }
    }
}

/// The plain decoder that every device computes.
pub(crate) const PLAIN: Own = Own {
    embedding_scale: 1.0,
    activation: Activation::Silu,
    post_norms: false,
    residual_scale: 1.0,
    logits_divisor: 1.0,
    soft_caps: [None; 2],
    joint: false,
    rotated: None,
    sinks: false,
    expert_biases: false,
    latent: None,
    groups: None,
    kv: KvFormat::Own,
    adapters: &[],
};

pub(crate) const SHAPE: Shape = Shape {
    hidden: 72,
    heads: 6,
    kv_heads: 2,
    head_dim: 32,
    intermediate: 90,
    vocab: 101,
    layers: 2,
    window: None,
    bias: true,
    norms: true,
    tied: true,
    stored: [DType::Bf16; 2],
    held: Held::Stored,
    experts: None,
    own: PLAIN,
};

/// Shape whose rows are whole blocks of every format.
pub(crate) const BLOCKS: Shape = Shape {
    hidden: 256,
    heads: 8,
    kv_heads: 2,
    head_dim: 32,
    intermediate: 256,
    vocab: 70,
    layers: 2,
    window: None,
    bias: true,
    norms: true,
    tied: true,
    stored: [DType::Q4K, DType::Q6K],
    held: Held::Stored,
    experts: None,
    own: PLAIN,
};

pub(crate) const LIMITS: Limits = Limits { rows_max: 900, sampled_max: 900 };
pub(crate) const PAGES: usize = 64;

/// Deterministic noise in -1..1.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit
    }

    /// Random bf16 values, so that every device gets the same weights.
    fn bytes(&mut self, count: usize, scale: f32, centre: f32) -> Vec<u8> {
        let mut value = || (self.next() as f32 / (1u32 << 30) as f32 - 1.0) * scale + centre;
        (0..count).flat_map(|_| super::super::lanes::to_bf16(value()).to_le_bytes()).collect()
    }

    /// Random weights of a format, of about `scale`.
    pub(crate) fn weights(&mut self, dtype: DType, count: usize, scale: f32) -> Vec<u8> {
        if dtype == DType::Bf16 {
            return self.bytes(count, scale, 0.0);
        }
        // Index of the scale in a block, the weight that it makes from a middling value, index and ratio of the minimum.
        let (at, middling, minimum) = match dtype {
            DType::Q8_0 => (0, 74.0, None),
            DType::Q4_0 => (0, 4.6, None),
            DType::Q4_1 => (0, 4.6, Some((2, -7.5))),
            DType::Q5_0 => (0, 9.2, None),
            DType::Q5_1 => (0, 9.2, Some((2, -15.5))),
            DType::Q2K => (80, 9.0, Some((82, 1.5))),
            DType::Q3K => (108, 42.0, None),
            DType::Q4K => (0, 250.0, Some((2, 7.5))),
            DType::Q5K => (0, 500.0, Some((2, 15.0))),
            DType::Q6K => (208, 1360.0, None),
            DType::Iq4Nl => (0, 69.0, None),
            DType::Iq4Xs => (0, 1100.0, None),
            DType::Mxfp4 => (0, 5.0, None),
            DType::F16 | DType::F32 | DType::Bf16 => unreachable!("numbers have no blocks"),
        };
        let (values, size) = dtype.block();
        let mut bytes: Vec<u8> = (0..count / values * size).map(|_| self.next() as u8).collect();
        for block in bytes.chunks_exact_mut(size) {
            let factor = scale / middling * (0.5 + self.next() as f32 / (1u32 << 31) as f32);
            if dtype == DType::Mxfp4 {
                block[at] = (127.0 + factor.log2()) as u8;
                continue;
            }
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(factor).to_le_bytes());
            if let Some((at, ratio)) = minimum {
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(factor * ratio).to_le_bytes());
            }
        }
        bytes
    }
}

struct Layer {
    norms: [Weight; 2],
    /// Norms behind attention and MLP.
    post_norms: Option<[Weight; 2]>,
    queries: Queries,
    attention: AttentionSpec,
    out: Weight,
    mlp: Mlp,
}

enum Queries {
    Plain(Weight),
    Latent { queries: Weight, keys: Weight, norm: Weight, of_keys: Weight, of_values: Weight },
}

enum Mlp {
    Dense { gate_up: Weight, down: Weight },
    Sparse { router: Weight, experts: Weight, routing: RoutingSpec },
}

/// Handles of the model on one device.
pub(crate) struct Model {
    embedding: Weight,
    head: Weight,
    last_norm: Weight,
    layers: Vec<Layer>,
    own: Own,
    projected: Buffer,
    wide: Buffer,
    latent: Buffer,
    mixed: Buffer,
    pub(crate) residual: Buffer,
    pub(crate) normed: Buffer,
    pub(crate) queries: Buffer,
    pub(crate) attended: Buffer,
    pub(crate) gated: Buffer,
    pub(crate) routes: Buffer,
    pub(crate) selected: Buffer,
    pub(crate) last: Buffer,
}

fn vector(device: &mut dyn Device, noise: &mut Noise, n: usize) -> Weight {
    let bytes = noise.bytes(n, 0.3, 0.75);
    let shape = [n];
    let spec = WeightSpec::Vector { tensor: tensor("norm", DType::Bf16, &shape, &bytes), offset: 0.25 };
    device.load(&spec, Held::Stored).unwrap()
}

/// Sinks from far below the scores to above them, so that some take most of their softmax and some almost nothing.
fn sinks(device: &mut dyn Device, noise: &mut Noise, heads: usize) -> Weight {
    let bytes = noise.bytes(heads, 8.0, -1.0);
    let shape = [heads];
    device
        .load(&WeightSpec::Vector { tensor: tensor("sinks", DType::Bf16, &shape, &bytes), offset: 0.0 }, Held::Stored)
        .unwrap()
}

fn tensor<'a>(name: &'a str, dtype: DType, shape: &'a [usize], bytes: &'a [u8]) -> HostTensor<'a> {
    HostTensor { name, dtype, shape, bytes, order: RowOrder::Plain, reader: None }
}

fn linear(
    device: &mut dyn Device,
    noise: &mut Noise,
    s: &Shape,
    outs: &[(usize, DType)],
    k: usize,
    bias: bool,
) -> Weight {
    let scale = 1.5 / (k as f32).sqrt();
    let shapes: Vec<[usize; 2]> = outs.iter().map(|&(n, _)| [n, k]).collect();
    let parts: Vec<_> = outs.iter().map(|&(n, dtype)| noise.weights(dtype, n * k, scale)).collect();
    let biases: Vec<_> = outs.iter().map(|&(n, _)| noise.bytes(n, 0.5, 0.0)).collect();
    let part = |((shape, bytes), &(_, dtype))| tensor("linear", dtype, shape, bytes);
    let parts =
        shapes.iter().map(|shape| &shape[..]).zip(parts.iter().map(Vec::as_slice)).zip(outs).map(part).collect();
    let bias_of = |(shape, bytes): (&'_ [usize; 2], &Vec<u8>)| (shape[0], bytes.clone());
    let stored: Vec<_> = shapes.iter().zip(&biases).map(bias_of).collect();
    let shapes: Vec<[usize; 1]> = stored.iter().map(|(n, _)| [*n]).collect();
    let biases =
        shapes.iter().zip(&stored).map(|(shape, (_, bytes))| tensor("bias", DType::Bf16, shape, bytes)).collect();
    device.load(&WeightSpec::Linear { parts, biases: if bias { biases } else { vec![] } }, s.held).unwrap()
}

fn layer(device: &mut dyn Device, noise: &mut Noise, s: &Shape, rope: Option<Rope>) -> Layer {
    let norms = [vector(device, noise, s.hidden), vector(device, noise, s.hidden)];
    let dims = [s.heads, s.kv_heads, s.kv_heads].map(|heads| heads * s.head_dim);
    let [plain, other] = s.stored;
    let parts = [(dims[0], plain), (dims[1], plain), (dims[2], other)];
    let queries = match s.own.latent {
        None => Queries::Plain(linear(device, noise, s, &parts, s.hidden, s.bias)),
        Some(latent) => latents(device, noise, s, latent),
    };
    let attended = s.own.latent.map_or(dims[0], |latent| s.heads * latent.value);
    let post_norms = s.own.post_norms.then(|| [0, 1].map(|_| vector(device, noise, s.hidden)));
    let mut norm = |count| vector(device, noise, count);
    let norms_of_heads = match (s.norms, s.own.joint) {
        (false, _) => HeadNorms::None,
        (true, false) => HeadNorms::Each { query: norm(s.head_dim), key: norm(s.head_dim) },
        (true, true) => HeadNorms::Together { query: norm(dims[0]), key: norm(dims[1]) },
    };
    let attention = AttentionSpec {
        heads: s.heads,
        kv_heads: s.kv_heads,
        head_dim: s.head_dim,
        latent: s.own.latent.map(|latent| latent.rank),
        scale: 1.0 / (s.head_dim as f32).sqrt(),
        causal: true,
        window: s.window,
        soft_cap: s.own.soft_caps[0],
        offsets: None,
        sinks: s.own.sinks.then(|| sinks(device, noise, s.heads)),
        rope,
        norms: norms_of_heads,
        norm_eps: 1e-6,
    };
    let out = linear(device, noise, s, &[(s.hidden, plain)], attended, false);
    let mlp = match s.experts {
        None => dense(device, noise, s),
        Some((count, chosen)) => sparse(device, noise, s, count, chosen),
    };
    Layer { norms, post_norms, queries, attention, out, mlp }
}

fn latents(device: &mut dyn Device, noise: &mut Noise, s: &Shape, latent: Latent) -> Queries {
    let Latent { rank, plain, rotated, value } = latent;
    let queries = linear(device, noise, s, &[(s.heads * (plain + rotated), s.stored[0])], s.hidden, false);
    let keys = linear(device, noise, s, &[(rank + rotated, s.stored[0])], s.hidden, s.bias);
    let norm = vector(device, noise, rank);
    let shape = [s.heads * (plain + value), rank];
    let bytes = noise.bytes(shape[0] * rank, 1.5 / (rank as f32).sqrt(), 0.0);
    let tensor = tensor("kv_b", DType::Bf16, &shape, &bytes);
    let mut part = |rows, transposed| {
        let spec = WeightSpec::Heads { tensor: tensor.clone(), heads: s.heads, rows, transposed };
        device.load(&spec, s.held).unwrap()
    };
    let (of_keys, of_values) = (part(0..plain, true), part(plain..plain + value, false));
    Queries::Latent { queries, keys, norm, of_keys, of_values }
}

fn sparse(device: &mut dyn Device, noise: &mut Noise, s: &Shape, count: usize, chosen: usize) -> Mlp {
    let scale = |k: usize| 1.5 / (k as f32).sqrt();
    let router = noise.bytes(count * s.hidden, 3.0 * scale(s.hidden), 0.0);
    let shape = [count, s.hidden];
    let parts = vec![tensor("router", DType::Bf16, &shape, &router)];
    let router_bias = s.own.expert_biases.then(|| noise.bytes(count, 0.5, 0.0));
    let biases = router_bias.iter().map(|bytes| tensor("router bias", DType::Bf16, &shape[..1], bytes)).collect();
    let router = device.load(&WeightSpec::Linear { parts, biases }, Held::Stored).unwrap();
    let [plain, other] = s.stored;
    let (wide, tall) = ([s.intermediate, s.hidden], [s.hidden, s.intermediate]);
    let mut bytes = || {
        let [gate, up] = [0, 1].map(|_| noise.weights(plain, s.intermediate * s.hidden, scale(s.hidden)));
        [gate, up, noise.weights(other, s.intermediate * s.hidden, scale(s.intermediate))]
    };
    let all: Vec<[Vec<u8>; 3]> = (0..count).map(|_| bytes()).collect();
    let mut biases = || [wide[0], wide[0], tall[0]].map(|rows| noise.bytes(rows, 0.5, 0.0));
    let biases: Vec<Option<[Vec<u8>; 3]>> = (0..count).map(|_| s.own.expert_biases.then(&mut biases)).collect();
    let experts = all.iter().zip(&biases).map(|([gate, up, down], biases)| ExpertSpec {
        gate: tensor("gate", plain, &wide, gate),
        up: tensor("up", plain, &wide, up),
        down: tensor("down", other, &tall, down),
        biases: biases.as_ref().map(|[of_gate, of_up, of_down]| {
            [
                tensor("gate bias", DType::Bf16, &wide[..1], of_gate),
                tensor("up bias", DType::Bf16, &wide[..1], of_up),
                tensor("down bias", DType::Bf16, &tall[..1], of_down),
            ]
        }),
    });
    let experts = device.load_experts(&experts.collect::<Vec<_>>(), s.held).unwrap();
    let mut routing = RoutingSpec::softmax(chosen, s.tied);
    if s.own.groups.is_some() {
        let correction = Some(vector(device, noise, count));
        routing = RoutingSpec { scores: Scoring::Sigmoid, correction, groups: s.own.groups, scale: 2.5, ..routing };
    }
    Mlp::Sparse { router, experts, routing }
}

fn dense(device: &mut dyn Device, noise: &mut Noise, s: &Shape) -> Mlp {
    let [plain, other] = s.stored;
    let scale = 1.5 / (s.hidden as f32).sqrt();
    let [gate, up] = [0, 1].map(|_| noise.weights(plain, s.intermediate * s.hidden, scale));
    let shape = [s.intermediate, s.hidden];
    let [of_gate, of_up] = [0, 1].map(|_| noise.bytes(s.intermediate, 0.5, 0.0));
    let biases = s.bias.then(|| [&of_gate, &of_up].map(|bytes| tensor("mlp bias", DType::Bf16, &shape[..1], bytes)));
    let [gate, up] = [&gate, &up].map(|bytes| tensor("mlp", plain, &shape, bytes));
    let gate_up = device.load(&WeightSpec::GateUp { gate, up, biases }, s.held).unwrap();
    let down = linear(device, noise, s, &[(s.hidden, other)], s.intermediate, s.bias);
    Mlp::Dense { gate_up, down }
}

/// Attaches additions of about the size of what they are added to.
fn adapt(device: &mut dyn Device, noise: &mut Noise, s: &Shape, layer: &Layer, slot: AdapterSlot, ranks: &Ranks) {
    let (Queries::Plain(qkv), Mlp::Dense { gate_up, down }) = (&layer.queries, &layer.mlp) else {
        unreachable!("adapters are for plain layers")
    };
    let [q, k] = [s.heads, s.kv_heads].map(|heads| heads * s.head_dim);
    let (hidden, inner) = (s.hidden, s.intermediate);
    // Weight, first output, outputs and inputs of each target.
    let targets = [
        (*qkv, 0, q, hidden),
        (*qkv, q, k, hidden),
        (*qkv, q + k, k, hidden),
        (layer.out, 0, hidden, q),
        (*gate_up, 0, inner, hidden),
        (*gate_up, inner, inner, hidden),
        (*down, 0, hidden, inner),
    ];
    for weight in [*qkv, layer.out, *gate_up, *down] {
        let targets = targets.iter().zip(ranks).filter(|((of, ..), rank)| *of == weight && **rank > 0);
        let matrices: Vec<_> = targets
            .map(|((_, first, outputs, inputs), &rank)| {
                let a = noise.bytes(rank * inputs, 1.5 / (*inputs as f32).sqrt(), 0.0);
                let b = noise.bytes(outputs * rank, 1.5 / (rank as f32).sqrt(), 0.0);
                (*first, ([rank, *inputs], a), ([*outputs, rank], b))
            })
            .collect();
        let parts: Vec<_> = matrices
            .iter()
            .map(|(first, a, b)| LowRank {
                first: *first,
                a: tensor("lora_A", DType::Bf16, &a.0, &a.1),
                b: tensor("lora_B", DType::Bf16, &b.0, &b.1),
                scale: 0.5 + f32::from(slot.0),
            })
            .collect();
        if !parts.is_empty() {
            device.adapt(weight, slot, &parts).unwrap();
        }
    }
}

impl Model {
    pub(crate) fn load(device: &mut dyn Device, s: &Shape, seed: u64) -> Self {
        let noise = &mut Noise(seed);
        let table = noise.weights(s.stored[1], s.vocab * s.hidden, 1.0);
        let shape = [s.vocab, s.hidden];
        let table = tensor("embedding", s.stored[1], &shape, &table);
        assert!(Source::new(&table, 2).is_ok());
        let embedding = device.load(&WeightSpec::Embedding(table), s.held).unwrap();
        let head =
            if s.tied { embedding } else { linear(device, noise, s, &[(s.vocab, s.stored[0])], s.hidden, false) };
        let half = s.own.rotated.unwrap_or(s.head_dim) / 2;
        let frequencies = (0..half).map(|i| 100f32.powf(-(i as f32) / half as f32)).collect();
        let rope = RopeSpec { inverse_frequencies: frequencies, factor: 1.1, positions: PAGES * PAGE_TOKENS };
        let rope = (half > 0).then(|| device.rope(&rope).unwrap());
        let layers = (0..s.layers).map(|_| layer(device, noise, s, rope)).collect();
        let last_norm = vector(device, noise, s.hidden);
        let (kv_heads, head_dim, format) = (s.kv_heads, s.head_dim, s.own.kv);
        let latent = s.own.latent.map(|latent| latent.rank);
        device.kv(KvSpec { layers: s.layers, kv_heads, head_dim, latent, format, pages: PAGES }).unwrap();
        let mut buffer = |rows, columns| device.buffer(BufferSpec { rows, columns }).unwrap();
        let model = Self {
            embedding,
            head,
            last_norm,
            layers,
            own: s.own,
            projected: buffer(Rows::Batch, s.hidden),
            wide: buffer(Rows::Batch, s.own.latent.map_or(1, |l| s.heads * (l.plain + l.rotated))),
            latent: buffer(Rows::Batch, s.own.latent.map_or(1, |l| l.rank + l.rotated)),
            mixed: buffer(Rows::Batch, s.own.latent.map_or(1, |l| s.heads * l.rank)),
            residual: buffer(Rows::Batch, s.hidden),
            normed: buffer(Rows::Batch, s.hidden),
            queries: buffer(Rows::Batch, s.heads * s.head_dim),
            attended: buffer(Rows::Batch, s.heads * s.own.latent.map_or(s.head_dim, |l| l.value)),
            gated: buffer(Rows::Batch, s.intermediate),
            routes: buffer(Rows::Batch, s.experts.map_or(1, |(count, _)| count)),
            selected: buffer(Rows::Sampled, s.hidden),
            last: buffer(Rows::Sampled, s.hidden),
        };
        for (slot, ranks) in s.own.adapters.iter().enumerate() {
            model.layers.iter().for_each(|layer| adapt(device, noise, s, layer, AdapterSlot(slot as u16), ranks));
        }
        model
    }

    /// One step. `seen` is called after every operation with its name and output.
    pub(crate) fn step<D: Device>(
        &self,
        d: &mut D,
        batch: &StepBatch<'_>,
        seen: &mut dyn FnMut(&mut D, &'static str, Buffer),
    ) -> Vec<f32> {
        self.try_step(d, batch, seen).unwrap()
    }

    /// Sampled rows of the step before, as [`Device::sample`] reads them back.
    pub(crate) fn sample<'d, D: Device>(&self, d: &'d mut D, picks: &[Pick]) -> Result<SampledRows<'d>, KernelError> {
        d.sample(self.last, self.head, self.own.logits(), picks)
    }

    /// As [`Model::step`], of a device that may fail.
    pub(crate) fn try_step<D: Device>(
        &self,
        d: &mut D,
        batch: &StepBatch<'_>,
        seen: &mut dyn FnMut(&mut D, &'static str, Buffer),
    ) -> Result<Vec<f32>, KernelError> {
        d.begin(batch)?;
        d.embed(self.residual, self.embedding, self.own.embedding_scale);
        seen(d, "embed", self.residual);
        for (index, layer) in self.layers.iter().enumerate() {
            d.rmsnorm(self.normed, self.residual, layer.norms[0], 1e-6);
            seen(d, "rmsnorm", self.normed);
            match layer.queries {
                Queries::Plain(qkv) => {
                    d.qkv(self.queries, self.normed, qkv, &layer.attention, index);
                    d.attention(self.attended, self.queries, &layer.attention, index);
                }
                Queries::Latent { queries, keys, norm, of_keys, of_values } => {
                    d.linear(self.latent, self.normed, keys);
                    d.latent_keys(self.latent, norm, &layer.attention, index);
                    d.linear(self.wide, self.normed, queries);
                    d.latent_queries(self.queries, self.wide, of_keys, &layer.attention);
                    d.attention(self.mixed, self.queries, &layer.attention, index);
                    seen(d, "latents", self.mixed);
                    d.per_head(self.attended, self.mixed, of_values);
                }
            }
            seen(d, "attention", self.attended);
            let [behind_attention, behind_mlp] = layer.post_norms.map_or([None; 2], |norms| norms.map(Some));
            self.add(d, self.attended, layer.out, behind_attention, seen);
            d.rmsnorm(self.normed, self.residual, layer.norms[1], 1e-6);
            match &layer.mlp {
                Mlp::Dense { gate_up, down } => {
                    d.gate_up(self.gated, self.normed, *gate_up, self.own.activation);
                    seen(d, "gate_up", self.gated);
                    self.add(d, self.gated, *down, behind_mlp, seen);
                }
                Mlp::Sparse { router, experts, routing } => {
                    d.route(self.routes, self.normed, *router, routing);
                    seen(d, "route", self.routes);
                    d.experts(self.residual, self.normed, self.routes, *experts, self.own.activation);
                    seen(d, "experts", self.residual);
                }
            }
        }
        d.select(self.selected, self.residual);
        d.rmsnorm(self.last, self.selected, self.last_norm, 1e-6);
        seen(d, "last norm", self.last);
        d.logits(self.last, self.head, self.own.logits()).map(<[f32]>::to_vec)
    }

    /// Adds a projection to the residual, through a norm if there is one.
    fn add<D: Device>(
        &self,
        d: &mut D,
        x: Buffer,
        weight: Weight,
        norm: Option<Weight>,
        seen: &mut dyn FnMut(&mut D, &'static str, Buffer),
    ) {
        match norm {
            None => d.linear_add(self.residual, x, weight, self.own.residual_scale),
            Some(norm) => {
                d.linear(self.projected, x, weight);
                seen(d, "linear", self.projected);
                d.norm_add(self.residual, self.projected, norm, 1e-6);
            }
        }
        seen(d, "added", self.residual);
    }
}

/// A sequence of the test model: its tokens and the pages of its KV.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    pub(crate) table: Vec<u32>,
    pub(crate) adapter: Option<AdapterSlot>,
}

/// Gives the sequences no adapter, the first, the second … in turn.
pub(crate) fn adapted(shape: &Shape, mut sequences: Vec<Sequence>) -> Vec<Sequence> {
    for (i, sequence) in sequences.iter_mut().enumerate() {
        let turn = i % (shape.own.adapters.len() + 1);
        sequence.adapter = turn.checked_sub(1).map(|slot| AdapterSlot(slot as u16));
    }
    sequences
}

/// Sequences of the given lengths on shuffled pages.
pub(crate) fn sequences(lengths: &[usize], vocab: usize, seed: u64) -> Vec<Sequence> {
    let mut noise = Noise(seed ^ 0x5eed);
    let mut free: Vec<u32> = (0..PAGES as u32).collect();
    lengths
        .iter()
        .map(|&length| {
            let tokens = (0..length).map(|_| noise.below(vocab) as u32).collect();
            let table = (0..length.div_ceil(PAGE_TOKENS)).map(|_| free.swap_remove(noise.below(free.len()))).collect();
            Sequence { tokens, table, adapter: None }
        })
        .collect()
}

/// Rows of one step: (sequence, tokens done before, tokens of this step).
pub(crate) type Rowsets = Vec<(usize, usize, usize)>;

/// Runs steps, all rows sampled; gives the logits of every (sequence, position) as bits.
pub(crate) fn run_steps<D: Device>(
    device: &mut D,
    model: &Model,
    sequences: &[Sequence],
    steps: &[Rowsets],
) -> Vec<Vec<Vec<f32>>> {
    let mut out: Vec<Vec<Vec<f32>>> = sequences.iter().map(|s| vec![vec![]; s.tokens.len()]).collect();
    for step in steps {
        let (mut tokens, mut spans) = (vec![], vec![]);
        for &(index, done, count) in step {
            let rows = tokens.len()..tokens.len() + count;
            tokens.extend_from_slice(&sequences[index].tokens[done..done + count]);
            spans.push(Span {
                rows,
                context: done + count,
                block_table: &sequences[index].table,
                adapter: sequences[index].adapter,
            });
        }
        let sampled: Vec<usize> = (0..tokens.len()).collect();
        let batch = StepBatch { tokens: &tokens, spans: &spans, sampled: &sampled, ..Default::default() };
        let logits = model.step(device, &batch, &mut |_, _, _| ());
        let mut rows = logits.chunks_exact(logits.len() / tokens.len());
        for &(index, done, count) in step {
            for out in &mut out[index][done..done + count] {
                *out = rows.next().unwrap().to_vec();
            }
        }
    }
    out
}
