//! Operations of encoders: against the reference, and the same bits alone and in a batch.

use super::model::Noise;
use super::*;
use crate::device::TableIndex;

/// Widths of a layer, odd on purpose.
#[derive(Clone, Copy, Debug)]
struct Widths {
    heads: usize,
    head_dim: usize,
    inner: usize,
    activation: Activation,
}

const WIDTHS: [Widths; 4] = [
    Widths { heads: 3, head_dim: 22, inner: 99, activation: Activation::GeluErf },
    Widths { heads: 2, head_dim: 32, inner: 64, activation: Activation::GeluTanh },
    Widths { heads: 1, head_dim: 6, inner: 1, activation: Activation::Tanh },
    Widths { heads: 5, head_dim: 64, inner: 33, activation: Activation::Silu },
];

const VOCAB: usize = 50;
/// Rows of the table of positions before that of position 0.
const FIRST: usize = 2;
/// Tokens of the texts: one, parts of pages, and more than a split of attention.
const LENGTHS: [usize; 5] = [1, 33, 300, 7, 64];

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
    residual: Buffer,
    queries: Buffer,
    attended: Buffer,
    activated: Buffer,
    pooled: Buffer,
}

impl Layer {
    fn load(device: &mut dyn Device, widths: Widths) -> Self {
        let Widths { heads, head_dim, inner, activation } = widths;
        let hidden = heads * head_dim;
        device.kv(KvSpec { layers: 1, kv_heads: heads, head_dim, latent: None, pages: PAGES }).unwrap();
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
        let mut buffer = |rows, columns| device.buffer(BufferSpec { rows, columns }).unwrap();
        let attention = AttentionSpec {
            heads,
            kv_heads: heads,
            head_dim,
            latent: None,
            scale: (head_dim as f32).powf(-0.5),
            causal: false,
            window: None,
            soft_cap: None,
            sinks: None,
            rope: None,
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
            residual: buffer(Rows::Batch, hidden),
            queries: buffer(Rows::Batch, hidden),
            attended: buffer(Rows::Batch, hidden),
            activated: buffer(Rows::Batch, inner),
            pooled: buffer(Rows::Sampled, hidden),
        }
    }

    /// First tokens, or means, of the texts in one step.
    fn run(&self, device: &mut dyn Device, texts: &[usize], means: bool) -> Vec<f32> {
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
            sampled.push(if means { tokens.len() - 1 } else { begin });
            spans.push(Span { rows: begin..tokens.len(), context: length, block_table, adapter: None });
        }
        let means = vec![means; texts.len()];
        let batch = StepBatch { tokens: &tokens, spans: &spans, sampled: &sampled, types: &types, means: &means };
        device.begin(&batch).unwrap();
        device.embed(self.residual, self.embedding, 1.0);
        self.tables.iter().for_each(|table| device.add_table(self.residual, *table));
        let [weight, bias] = self.norm;
        device.layer_norm(self.residual, weight, bias, 1e-12);
        device.qkv(self.queries, self.residual, self.qkv, &self.attention, 0);
        device.attention(self.attended, self.queries, &self.attention, 0);
        device.linear_add(self.residual, self.attended, self.output);
        device.layer_norm(self.residual, weight, bias, 1e-12);
        device.activated(self.activated, self.residual, self.up, self.activation);
        device.linear_add(self.residual, self.activated, self.down);
        device.layer_norm(self.residual, weight, bias, 1e-12);
        device.pool(self.pooled, self.residual);
        device.read_sampled(self.pooled).unwrap()
    }
}

#[test]
fn a_layer_of_an_encoder_agrees_with_the_reference() {
    for widths in WIDTHS {
        let mut reference = ReferenceDevice::new(LIMITS);
        let layer = Layer::load(&mut reference, widths);
        let want = [false, true].map(|means| layer.run(&mut reference, &LENGTHS, means));
        for (path, mut device) in devices(2) {
            let layer = Layer::load(&mut device, widths);
            for (means, want) in [false, true].into_iter().zip(&want) {
                let got = layer.run(&mut device, &LENGTHS, means);
                assert_eq!(got.len(), want.len());
                let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                // Values of about 1, operands of 8 bits of fraction.
                assert!(worst < 0.03, "{path}, {widths:?}, means {means}: {worst}");
            }
        }
    }
}

#[test]
fn texts_have_the_same_bits_alone_and_in_a_batch() {
    for widths in WIDTHS {
        for (path, mut device) in devices(3) {
            let layer = Layer::load(&mut device, widths);
            for means in [false, true] {
                let alone: Vec<f32> =
                    LENGTHS.iter().flat_map(|length| layer.run(&mut device, &[*length], means)).collect();
                let together = layer.run(&mut device, &LENGTHS, means);
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&together), bits(&alone), "{path}, {widths:?}, means {means}");
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
            device.begin(&StepBatch { tokens: &[1], spans: &spans, sampled: &[0], types: &[kind], means: &[] })
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
