//! The experts of a mixture with one billion weights: 12 layers of hidden 1024, 64 experts of 384, of which a token chooses 8.
//!
//! Norm, router and experts of each layer, without attention and head, which are those of a dense model. Rows choose experts by random weights, so
//! nearly evenly: 512 rows choose all of a layer's experts, with 64 rows each.

use std::collections::HashSet;

use penstock_kernels::{
    Activation, Buffer, BufferSpec, DType, Device, ExpertSpec, Held, HostTensor, KvFormat, KvSpec, RopeSpec,
    RoutingSpec, RowOrder, Rows, StepBatch, Weight, WeightSpec,
};

use super::clock::Clock;
use super::shape::{Format, noise};

const LAYERS: usize = 12;
const HIDDEN: usize = 1024;
const EXPERTS: usize = 64;
const CHOSEN: usize = 8;
const WIDTH: usize = 384;
const VOCAB: usize = 8192;
/// Weights of one expert.
const EXPERT: usize = 3 * HIDDEN * WIDTH;

/// Handles of the layers on the device under measurement.
pub(crate) struct Mixture {
    table: Weight,
    layers: Vec<[Weight; 3]>,
    residual: Buffer,
    normed: Buffer,
    routes: Buffer,
    /// Bytes of one expert's weights as the device holds them.
    expert_bytes: f64,
}

/// Seconds and work of a step.
pub(crate) struct Taken {
    pub(crate) route: f64,
    pub(crate) experts: f64,
    /// Operations of the experts' products.
    pub(crate) flops: f64,
    /// Bytes of the experts that some row chose.
    pub(crate) bytes: f64,
}

impl Mixture {
    /// Loads slices of blocks of noise as weights.
    pub(crate) fn load(device: &mut dyn Device, format: Format) -> Self {
        let (held, dtypes) = format.stored();
        let [gates, downs] = dtypes.map(|dtype| (dtype, noise(dtype, (EXPERTS + 7) * WIDTH * HIDDEN)));
        let plain = noise(DType::Bf16, VOCAB * HIDDEN);
        let tensor = |dtype, shape, bytes| HostTensor {
            name: "noise",
            dtype,
            shape,
            bytes,
            order: RowOrder::Plain,
            reader: None,
        };
        let table = WeightSpec::Embedding(tensor(DType::Bf16, &[VOCAB, HIDDEN], &plain));
        let table = device.load(&table, Held::Stored).expect("a table");
        let part = |dtype: DType, at: usize| {
            let size = dtype.row_bytes(WIDTH * HIDDEN).expect("whole blocks");
            at * size..(at + 1) * size
        };
        let layers = (0..LAYERS)
            .map(|layer| {
                let norm = tensor(DType::Bf16, &[HIDDEN], &plain[layer * 2048..][..2 * HIDDEN]);
                let norm =
                    device.load(&WeightSpec::Vector { tensor: norm, offset: 0.0 }, Held::Stored).expect("a norm");
                let router = &plain[(layer + 1) * 4096..][..2 * EXPERTS * HIDDEN];
                let parts = vec![tensor(DType::Bf16, &[EXPERTS, HIDDEN], router)];
                let router = WeightSpec::Linear { parts, biases: vec![] };
                let router = device.load(&router, Held::Stored).expect("a router");
                let experts: Vec<ExpertSpec<'_>> = (0..EXPERTS)
                    .map(|expert| ExpertSpec {
                        gate: tensor(gates.0, &[WIDTH, HIDDEN], &gates.1[part(gates.0, expert)]),
                        up: tensor(gates.0, &[WIDTH, HIDDEN], &gates.1[part(gates.0, expert + 3)]),
                        down: tensor(downs.0, &[HIDDEN, WIDTH], &downs.1[part(downs.0, expert + 5)]),
                        biases: None,
                    })
                    .collect();
                [norm, router, device.load_experts(&experts, held).expect("experts")]
            })
            .collect();
        let mut buffer = |columns| device.buffer(BufferSpec { rows: Rows::Batch, columns }).expect("a buffer");
        let [residual, normed, routes] = [HIDDEN, HIDDEN, EXPERTS].map(&mut buffer);
        device.rope(&RopeSpec { inverse_frequencies: vec![1.0], factor: 1.0, positions: 4096 }).expect("rotations");
        device
            .kv(KvSpec { layers: 1, kv_heads: 1, head_dim: 2, latent: None, format: KvFormat::Own, pages: 512 })
            .expect("a KV cache");
        let bytes = |dtype| penstock_kernels::cpu::CpuDevice::held_bytes(dtype, held, WIDTH, HIDDEN) as f64;
        let expert_bytes = 2.0 * bytes(dtypes[0]) + bytes(dtypes[1]);
        Self { table, layers, residual, normed, routes, expert_bytes }
    }

    /// Runs the layers once.
    pub(crate) fn step(&self, d: &mut dyn Device, batch: &StepBatch<'_>, clock: Clock) -> Taken {
        let routing = RoutingSpec::softmax(CHOSEN, true);
        let rows = batch.tokens.len();
        let flops = (2 * LAYERS * rows * CHOSEN * EXPERT) as f64;
        let mut taken = Taken { route: 0.0, experts: 0.0, flops, bytes: 0.0 };
        d.begin(batch).expect("a good batch");
        d.embed(self.residual, self.table, 1.0);
        for [norm, router, experts] in &self.layers {
            d.rmsnorm(self.normed, self.residual, *norm, 1e-6);
            let start = clock();
            d.route(self.routes, self.normed, *router, &routing);
            taken.route += clock() - start;
            let chosen = d.routes(self.routes);
            let chosen = chosen.iter().enumerate().filter(|(_, weight)| **weight != 0.0).map(|(i, _)| i % EXPERTS);
            taken.bytes += chosen.collect::<HashSet<_>>().len() as f64 * self.expert_bytes;
            let start = clock();
            d.experts(self.residual, self.normed, self.routes, *experts, Activation::Silu);
            taken.experts += clock() - start;
        }
        taken
    }
}
