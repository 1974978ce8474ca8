//! Operations of encoders: against the reference, and the same bits alone and in a batch.

use super::model::Noise;
use super::*;
use crate::device::{KvFormat, OffsetBias, TableIndex};
use crate::pooling::{Pool, PoolRule};

/// Widths of a layer, odd on purpose.
#[derive(Clone, Copy, Debug)]
struct Widths {
    heads: usize,
    head_dim: usize,
    inner: usize,
    activation: Activation,
    /// Positions that a row sees on each side, itself included.
    window: Option<usize>,
    /// Norms without bias before the blocks, rotations, and a gated MLP, as ModernBERT has them.
    modern: bool,
    /// Most positions with a bias of their own, as MPNet has them.
    reach: Option<usize>,
}

const BERT: Widths = Widths {
    heads: 3,
    head_dim: 22,
    inner: 99,
    activation: Activation::GeluErf,
    window: None,
    modern: false,
    reach: None,
};
const WIDTHS: [Widths; 11] = [
    BERT,
    Widths { heads: 2, head_dim: 32, inner: 64, activation: Activation::GeluTanh, ..BERT },
    Widths { heads: 1, head_dim: 6, inner: 1, activation: Activation::Tanh, ..BERT },
    Widths { heads: 5, head_dim: 64, inner: 33, activation: Activation::Silu, ..BERT },
    Widths { modern: true, ..BERT },
    Widths { modern: true, window: Some(1), heads: 2, head_dim: 32, inner: 65, ..BERT },
    Widths { modern: true, window: Some(65), heads: 1, head_dim: 64, inner: 31, ..BERT },
    Widths { modern: true, window: Some(5), activation: Activation::GeluTanh, ..BERT },
    Widths { reach: Some(0), ..BERT },
    Widths { reach: Some(40), heads: 5, head_dim: 32, ..BERT },
    Widths { reach: Some(128), window: Some(90), heads: 1, head_dim: 64, ..BERT },
];

const VOCAB: usize = 50;
/// Rows of the table of positions before that of position 0.
const FIRST: usize = 2;
/// Tokens of the texts: one, parts of pages, and more than a split of attention.
const LENGTHS: [usize; 5] = [1, 33, 300, 7, 64];

/// Ways to pool; of a text with fewer tokens than are left out, the last one stays.
const POOLS: [Pool; 4] = [
    Pool::Row,
    Pool::MEAN,
    Pool::Span { rule: PoolRule::WeightedMean, skipped: 9 },
    Pool::Span { rule: PoolRule::Max, skipped: 2 },
];

/// Weights and buffers of one layer.
struct Layer {
    attention: AttentionSpec,
    activation: Activation,
    embedding: Weight,
    tables: [Weight; 2],
    norm: [Weight; 2],
    qkv: Weight,
    output: Weight,
    up: Weight,
    down: Weight,
    gate_up: Weight,
    modern: bool,
    residual: Buffer,
    normed: Buffer,
    queries: Buffer,
    attended: Buffer,
    activated: Buffer,
    pooled: Buffer,
}

impl Layer {
    fn load(device: &mut dyn Device, widths: Widths) -> Self {
        let Widths { heads, head_dim, inner, activation, window, modern, reach } = widths;
        let hidden = heads * head_dim;
        let inverse_frequencies = (0..head_dim / 2).map(|i| 1000f32.powf(-2.0 * i as f32 / head_dim as f32)).collect();
        let rope = RopeSpec { inverse_frequencies, factor: 1.0, positions: 318 };
        let rope = modern.then(|| device.rope(&rope).unwrap());
        device
            .kv(KvSpec { layers: 1, kv_heads: heads, head_dim, latent: None, format: KvFormat::Own, pages: PAGES })
            .unwrap();
        let mut noise = Noise(7);
        let mut load = |shape: &[usize], make: &dyn Fn(HostTensor<'_>, HostTensor<'_>, &mut dyn Device) -> Weight| {
            let mut bytes = |count| noise.weights(DType::Bf16, count, 1.2 / (hidden as f32).sqrt());
            let (weight, bias) = (bytes(shape.iter().product()), bytes(shape[0]));
            let tensor = |shape, bytes| HostTensor {
                name: "w",
                dtype: DType::Bf16,
                shape,
                bytes,
                order: RowOrder::Plain,
                reader: None,
            };
            let (weight, bias) = (tensor(shape, &weight[..]), tensor(&shape[..1], &bias[..]));
            make(weight, bias, device)
        };
        let linear = |weight: HostTensor<'_>, bias: HostTensor<'_>, device: &mut dyn Device| {
            device.load(&WeightSpec::Linear { parts: vec![weight], biases: vec![bias] }, Held::Stored).unwrap()
        };
        let table = |index| {
            move |tensor: HostTensor<'_>, _: HostTensor<'_>, device: &mut dyn Device| {
                device.load(&WeightSpec::Table { tensor, index }, Held::Stored).unwrap()
            }
        };
        let vector = |offset| {
            move |tensor: HostTensor<'_>, _: HostTensor<'_>, device: &mut dyn Device| {
                device.load(&WeightSpec::Vector { tensor, offset }, Held::Stored).unwrap()
            }
        };
        let embedding = load(&[VOCAB, hidden], &|tensor, _, device| {
            device.load(&WeightSpec::Embedding(tensor), Held::Stored).unwrap()
        });
        let tables = [
            load(&[320, hidden], &table(TableIndex::Position { first: FIRST })),
            load(&[2, hidden], &table(TableIndex::Type)),
        ];
        let norm = [load(&[hidden], &vector(1.0)), load(&[hidden], &vector(0.0))];
        let (qkv, output) = (load(&[3 * hidden, hidden], &linear), load(&[hidden, hidden], &linear));
        let (up, down) = (load(&[inner, hidden], &linear), load(&[hidden, inner], &linear));
        let gated = |tensor: HostTensor<'_>, _: HostTensor<'_>, device: &mut dyn Device| {
            let shape = [inner, hidden];
            let half = |half: usize| HostTensor {
                shape: &shape,
                bytes: &tensor.bytes[half * inner * hidden * 2..][..inner * hidden * 2],
                ..tensor.clone()
            };
            device.load(&WeightSpec::GateUp { gate: half(0), up: half(1), biases: None }, Held::Stored).unwrap()
        };
        let gate_up = load(&[2 * inner, hidden], &gated);
        let offsets = reach.map(|reach| {
            let count = heads * (2 * reach + 1);
            let values: Vec<u8> = (0..count).flat_map(|i| ((i * 37 % 101) as f32 / 25.0 - 2.0).to_le_bytes()).collect();
            let shape = [count];
            let tensor = HostTensor {
                name: "o",
                dtype: DType::F32,
                shape: &shape,
                bytes: &values,
                order: RowOrder::Plain,
                reader: None,
            };
            let values = device.load(&WeightSpec::Vector { tensor, offset: 0.0 }, Held::Stored).unwrap();
            OffsetBias { values, reach }
        });
        let mut buffer = |rows, columns| device.buffer(BufferSpec { rows, columns }).unwrap();
        let attention = AttentionSpec {
            heads,
            kv_heads: heads,
            head_dim,
            latent: None,
            scale: (head_dim as f32).powf(-0.5),
            causal: false,
            window,
            soft_cap: None,
            offsets,
            sinks: None,
            rope,
            norms: Default::default(),
            norm_eps: 0.0,
        };
        Self {
            attention,
            activation,
            embedding,
            tables,
            norm,
            qkv,
            output,
            up,
            down,
            gate_up,
            modern,
            residual: buffer(Rows::Batch, hidden),
            normed: buffer(Rows::Batch, hidden),
            queries: buffer(Rows::Batch, hidden),
            attended: buffer(Rows::Batch, hidden),
            activated: buffer(Rows::Batch, inner),
            pooled: buffer(Rows::Sampled, hidden),
        }
    }

    /// Pooled rows of one step over the texts, one for each text.
    fn run(&self, device: &mut dyn Device, texts: &[usize], pool: Pool) -> Vec<f32> {
        let (mut tokens, mut types, mut spans, mut sampled) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let tables: Vec<Vec<u32>> = texts
            .iter()
            .scan(0, |next, length| {
                let first = *next;
                *next += length.div_ceil(PAGE_TOKENS) as u32;
                Some((first..*next).rev().collect())
            })
            .collect();
        for (&length, block_table) in texts.iter().zip(&tables) {
            let begin = tokens.len();
            tokens.extend((0..length).map(|i| ((i * i + 3 * length) % VOCAB) as u32));
            types.extend((0..length).map(|i| u32::from(i > length / 2)));
            sampled.push(if pool == Pool::Row { begin } else { tokens.len() - 1 });
            spans.push(Span { rows: begin..tokens.len(), context: length, block_table, adapter: None });
        }
        let of = |length: &usize| match pool {
            Pool::Row => Pool::Row,
            Pool::Span { rule, skipped } => Pool::Span { rule, skipped: skipped.min(length - 1) },
        };
        let pools: Vec<Pool> = texts.iter().map(of).collect();
        let batch = StepBatch { tokens: &tokens, spans: &spans, sampled: &sampled, types: &types, pools: &pools };
        device.begin(&batch).unwrap();
        device.embed(self.residual, self.embedding, 1.0);
        self.tables.iter().for_each(|table| device.add_table(self.residual, *table));
        let [weight, bias] = self.norm;
        let bias = (!self.modern).then_some(bias);
        let norm = |device: &mut dyn Device, out| device.layer_norm(out, self.residual, weight, bias, 1e-12);
        norm(device, self.residual);
        let input = if self.modern { self.normed } else { self.residual };
        if self.modern {
            norm(device, input);
        }
        device.qkv(self.queries, input, self.qkv, &self.attention, 0);
        device.attention(self.attended, self.queries, &self.attention, 0);
        device.linear_add(self.residual, self.attended, self.output, 1.0);
        norm(device, input);
        if self.modern {
            device.gate_up(self.activated, input, self.gate_up, self.activation);
        } else {
            device.activated(self.activated, input, self.up, self.activation);
        }
        device.linear_add(self.residual, self.activated, self.down, 1.0);
        norm(device, self.residual);
        device.pool(self.pooled, self.residual);
        device.read_sampled(self.pooled).unwrap()
    }
}

#[test]
fn a_layer_of_an_encoder_agrees_with_the_reference() {
    for widths in WIDTHS {
        let mut reference = ReferenceDevice::new(LIMITS);
        let layer = Layer::load(&mut reference, widths);
        let want = POOLS.map(|pool| layer.run(&mut reference, &LENGTHS, pool));
        for (path, mut device) in devices(2) {
            let layer = Layer::load(&mut device, widths);
            for (pool, want) in POOLS.into_iter().zip(&want) {
                let got = layer.run(&mut device, &LENGTHS, pool);
                assert_eq!(got.len(), want.len());
                let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                // Values of about 1, operands of 8 bits of fraction.
                assert!(worst < 0.03, "{path}, {widths:?}, {pool:?}: {worst}");
            }
        }
    }
}

#[test]
fn texts_have_the_same_bits_alone_and_in_a_batch() {
    for widths in WIDTHS {
        for (path, mut device) in devices(3) {
            let layer = Layer::load(&mut device, widths);
            for pool in POOLS {
                let alone: Vec<f32> =
                    LENGTHS.iter().flat_map(|length| layer.run(&mut device, &[*length], pool)).collect();
                let together = layer.run(&mut device, &LENGTHS, pool);
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&together), bits(&alone), "{path}, {widths:?}, {pool:?}");
            }
        }
    }
}

#[test]
fn a_table_of_positions_bounds_the_context() {
    let mut cpu = CpuDevice::new(CpuOptions { threads: 1, ..Default::default() }, LIMITS).unwrap();
    let mut reference = ReferenceDevice::new(LIMITS);
    let devices: [&mut dyn Device; 2] = [&mut cpu, &mut reference];
    for device in devices {
        Layer::load(device, WIDTHS[0]);
        let pages: Vec<u32> = (0..10).collect();
        let begin = |device: &mut dyn Device, context: usize, kind| {
            let spans = [Span { rows: 0..1, context, block_table: &pages, adapter: None }];
            device.begin(&StepBatch { tokens: &[1], spans: &spans, sampled: &[0], types: &[kind], pools: &[] })
        };
        assert!(begin(device, 318, 1).is_ok(), "320 rows, of which two are no position's");
        assert!(matches!(begin(device, 319, 1), Err(KernelError::Batch { what: "context of a span", .. })));
        assert!(matches!(begin(device, 1, 2), Err(KernelError::Batch { what: "type of a token", .. })));
        let bytes = [0; 8];
        let tensor = HostTensor {
            name: "p",
            dtype: DType::F32,
            shape: &[2, 1],
            bytes: &bytes,
            order: RowOrder::Plain,
            reader: None,
        };
        let spec = WeightSpec::Table { tensor, index: TableIndex::Position { first: 2 } };
        assert!(matches!(device.load(&spec, Held::Stored), Err(KernelError::Shape { .. })));
    }
}
