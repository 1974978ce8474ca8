//! Mixtures of experts: against the reference, and the same bits in every shape of a step.

use super::agreement::{batch_of, distance, limit};
use super::*;
use crate::device::{ExpertGroups, KvFormat, RoutingSpec, Scoring, WeightSpec};

/// Shapes of mixtures: odd widths, one expert, all experts chosen, weights that are not divided by their sum, biases and GPT-OSS's activation.
fn mixtures() -> Vec<Shape> {
    let odd = Shape { experts: Some((7, 2)), layers: 1, bias: false, ..SHAPE };
    vec![
        odd,
        Shape { intermediate: 33, hidden: 40, tied: false, ..odd },
        Shape { intermediate: 5, experts: Some((70, 8)), ..odd },
        Shape { experts: Some((3, 3)), tied: false, ..odd },
        Shape { experts: Some((1, 1)), ..odd },
        Shape { own: oss(), ..odd },
        Shape { own: Own { sinks: true, ..oss() }, intermediate: 33, hidden: 40, experts: Some((9, 4)), ..odd },
        Shape { own: grouped(4, 2, 2), experts: Some((20, 5)), ..odd },
        Shape { own: grouped(3, 1, 1), experts: Some((9, 3)), tied: false, ..odd },
    ]
}

/// Experts of GPT-OSS, with a limit that many values pass.
fn oss() -> Own {
    Own { expert_biases: true, activation: Activation::ClampedSwiglu { limit: 1.5, alpha: 1.702 }, ..PLAIN }
}

/// A choice by groups and sigmoids.
fn grouped(count: usize, chosen: usize, best: usize) -> Own {
    Own { groups: Some(ExpertGroups { count, chosen, best }), ..PLAIN }
}

/// Mixtures in every block format, with two formats in a layer, and rounded at load.
fn formats() -> Vec<Shape> {
    let base = Shape { experts: Some((4, 2)), layers: 1, intermediate: 256, bias: false, ..BLOCKS };
    let blocks = DType::ALL.into_iter().filter(|dtype| dtype.is_blocks());
    let mixed = [[DType::Q4K, DType::Q6K], [DType::Q8_0, DType::Bf16], [DType::Bf16, DType::Q4_0]];
    let alike = blocks.map(|dtype| [dtype; 2]);
    let int8 = Shape { held: Held::Int8, stored: [DType::Bf16; 2], ..base };
    let odd = Shape { held: Held::Int8, intermediate: 41, hidden: 72, stored: [DType::Bf16; 2], ..base };
    let int4 =
        [Shape { held: Held::Int4, ..odd }, Shape { held: Held::Int4, stored: [DType::Q8_0, DType::Q4K], ..base }];
    let biased = [Shape { own: oss(), stored: [DType::Mxfp4; 2], ..base }, Shape { own: oss(), ..int8 }];
    alike.chain(mixed).map(|stored| Shape { stored, ..base }).chain([int8, odd]).chain(int4).chain(biased).collect()
}

/// Weights of a step's routes and the residual after the experts, `[rows]` each.
struct Seen {
    routes: Vec<Vec<f32>>,
    residual: Vec<Vec<f32>>,
}

fn run<D: Device>(device: &mut D, shape: &Shape, peek: fn(&mut D, Buffer) -> Vec<f32>) -> Seen {
    let model = Model::load(device, shape, 5);
    let sequences = sequences(&[50, 3], shape.vocab, 5);
    let (mut tokens, mut spans) = (vec![], vec![]);
    let sampled = batch_of(&sequences, &[0..50, 0..3], &mut tokens, &mut spans);
    let batch = StepBatch { tokens: &tokens, spans: &spans, sampled: &sampled, ..Default::default() };
    let mut seen = Seen { routes: vec![], residual: vec![] };
    let rows = |values: Vec<f32>, columns: usize| values.chunks_exact(columns).map(<[f32]>::to_vec).collect();
    model.step(device, &batch, &mut |device, name, buffer| match name {
        "route" => seen.routes = rows(device.routes(buffer), shape.experts.unwrap().0),
        "experts" => seen.residual = rows(peek(device, buffer), shape.hidden),
        _ => (),
    });
    seen
}

#[test]
fn experts_agree_with_the_reference() {
    for shape in mixtures().into_iter().chain(formats()) {
        let want = run(&mut ReferenceDevice::new(LIMITS), &shape, |device, buffer| device.peek(buffer));
        let (count, chosen) = shape.experts.unwrap();
        assert!(want.routes.iter().all(|row| row.iter().filter(|weight| **weight > 0.0).count() == chosen));
        for (path, mut device) in slow_devices(2) {
            let got = run(&mut device, &shape, CpuDevice::peek);
            let mut agreeing = 0;
            for (row, (ours, theirs)) in got.routes.iter().zip(&want.routes).enumerate() {
                // Rounding changes the choice where two experts are nearly equal; such a row has other outputs.
                if ours.iter().zip(theirs).any(|(a, b)| (*a == 0.0) != (*b == 0.0)) {
                    continue;
                }
                agreeing += 1;
                let far = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(far < limit(&shape) / 4.0, "{path}, {shape:?}: weights {far}");
                let far = distance(&got.residual[row], &want.residual[row]);
                assert!(far < limit(&shape), "{path}, {shape:?}: residual {far}");
            }
            assert!(agreeing >= 40 || (count == chosen && agreeing == 53), "{path}, {shape:?}: {agreeing} of 53");
        }
    }
}

#[test]
fn a_token_has_the_same_bits_in_every_chunk_size_and_format() {
    for shape in mixtures() {
        same_bits(&Shape { layers: 2, ..shape }, &[40, 23, 7], &[1, 5, 33], 9);
    }
    for shape in formats() {
        same_bits(&shape, &[25, 7], &[1, 6], 9);
    }
}

#[test]
fn paths_of_a_family_and_numbers_of_threads_do_not_matter() {
    for shape in mixtures().into_iter().chain(formats()) {
        let (lengths, mut families) = ([20, 9], std::collections::HashMap::new());
        let sequences = sequences(&lengths, shape.vocab, 4);
        for threads in [1, 3] {
            for (path, mut device) in slow_devices(threads) {
                let model = Model::load(&mut device, &shape, 4);
                let got = bits(&run_steps(&mut device, &model, &sequences, &chunked(&lengths, 17)));
                let want = families.entry(device.info().numerics).or_insert_with(|| got.clone());
                assert!(got == *want, "{path}, {threads} threads, {shape:?}");
            }
        }
    }
}

/// Weights of each token for the logits in `table`, whose columns are chosen by a router that is the identity.
fn routed(device: &mut dyn Device, table: &[[f32; 4]], routing: &RoutingSpec) -> Vec<f32> {
    let bytes: Vec<u8> = table.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
    let shape = [table.len(), 4];
    let tensor =
        |shape, bytes| HostTensor { name: "t", dtype: DType::F32, shape, bytes, order: RowOrder::Plain, reader: None };
    let table_handle = device.load(&WeightSpec::Embedding(tensor(&shape, &bytes)), Held::Stored).unwrap();
    let identity: Vec<u8> = (0..16u32).flat_map(|i| f32::from(u8::from(i % 5 == 0)).to_le_bytes()).collect();
    let parts = vec![tensor(&[4, 4], &identity)];
    let router = device.load(&WeightSpec::Linear { parts, biases: vec![] }, Held::Stored).unwrap();
    let [x, out] = [0; 2].map(|_| device.buffer(BufferSpec { rows: Rows::Batch, columns: 4 }).unwrap());
    device.kv(KvSpec { layers: 1, kv_heads: 1, head_dim: 32, latent: None, format: KvFormat::Own, pages: 1 }).unwrap();
    let tokens: Vec<u32> = (0..table.len() as u32).collect();
    let spans = [Span { rows: 0..table.len(), context: table.len(), block_table: &[0], adapter: None }];
    device.begin(&StepBatch { tokens: &tokens, spans: &spans, sampled: &[], ..Default::default() }).unwrap();
    device.embed(x, table_handle, 1.0);
    device.route(out, x, router, routing);
    device.routes(out)
}

#[test]
fn the_highest_logits_are_chosen_and_the_lowest_of_equals() {
    let table = [[1.0, 3.0, 2.0, 3.0], [0.0, -0.0, 0.0, -1.0], [5.0, 5.0, 5.0, 5.0], [-300.0, 0.0, -200.0, -400.0]];
    let chosen = [[1, 3], [0, 1], [0, 1], [1, 2]];
    for normalized in [false, true] {
        let routing = RoutingSpec::softmax(2, normalized);
        let mut all: Vec<(&str, Vec<f32>)> =
            devices(1).into_iter().map(|(path, mut device)| (path, routed(&mut device, &table, &routing))).collect();
        all.push(("reference", routed(&mut ReferenceDevice::new(LIMITS), &table, &routing)));
        for (path, weights) in all {
            for (row, weights) in weights.chunks_exact(4).enumerate() {
                let shares: Vec<f64> = table[row].iter().map(|&logit| f64::from(logit).exp()).collect();
                let among: f64 =
                    if normalized { chosen[row].iter().map(|&e| shares[e]).sum() } else { shares.iter().sum() };
                for expert in 0..4 {
                    let want = if chosen[row].contains(&expert) { shares[expert] / among } else { 0.0 };
                    let far = (f64::from(weights[expert]) - want).abs();
                    assert!(far < 1e-6, "{path}, row {row}, expert {expert}: {} {want}", weights[expert]);
                }
            }
        }
    }
}

#[test]
fn groups_are_chosen_before_experts_and_corrections_change_the_choice_alone() {
    // Experts 0 and 1 are a group, 2 and 3 the other.
    let table = [[3.0, -3.0, 2.0, 1.0], [1.0, 0.0, 0.5, 0.5], [-1.0, -1.0, -1.0, -1.0]];
    let sigmoid = |logit: f32| 1.0 / (1.0 + (-f64::from(logit)).exp());
    let softmax = |row: usize, expert: usize| {
        let shares = table[row].map(|logit| f64::from(logit).exp());
        shares[expert] / shares.iter().sum::<f64>()
    };
    let groups = |best| Some(ExpertGroups { count: 2, chosen: 1, best });
    let plain = RoutingSpec::softmax(2, false);
    let by_sigmoid = RoutingSpec { scores: Scoring::Sigmoid, ..plain };
    let cases: [(&str, RoutingSpec, bool, [[usize; 2]; 3]); 5] = [
        ("best expert of a group", RoutingSpec { groups: groups(1), scale: 3.0, ..plain }, false, [[0, 1]; 3]),
        ("two best of a group", RoutingSpec { groups: groups(2), ..by_sigmoid }, false, [[2, 3], [2, 3], [0, 1]]),
        ("no groups", by_sigmoid, false, [[0, 2], [0, 2], [0, 1]]),
        ("corrected", by_sigmoid, true, [[0, 3], [0, 3], [0, 3]]),
        ("corrected, divided", RoutingSpec { normalized: true, scale: 2.5, ..by_sigmoid }, true, [[0, 3]; 3]),
    ];
    for (name, routing, corrected, chosen) in cases {
        let weigh = |device: &mut dyn Device| {
            let bytes: Vec<u8> = [0.0f32, 0.0, 0.0, 0.75].iter().flat_map(|value| value.to_le_bytes()).collect();
            let tensor = HostTensor {
                name: "c",
                dtype: DType::F32,
                shape: &[4],
                bytes: &bytes,
                order: RowOrder::Plain,
                reader: None,
            };
            let loaded = device.load(&WeightSpec::Vector { tensor, offset: 0.0 }, Held::Stored).unwrap();
            routed(device, &table, &RoutingSpec { correction: corrected.then_some(loaded), ..routing })
        };
        let mut all: Vec<(&str, Vec<f32>)> =
            devices(1).into_iter().map(|(path, mut device)| (path, weigh(&mut device))).collect();
        all.push(("reference", weigh(&mut ReferenceDevice::new(LIMITS))));
        for (path, weights) in all {
            for (row, weights) in weights.chunks_exact(4).enumerate() {
                let score = |expert: usize| match routing.scores {
                    Scoring::Softmax => softmax(row, expert),
                    Scoring::Sigmoid => sigmoid(table[row][expert]),
                };
                let total = if routing.normalized { chosen[row].iter().map(|&e| score(e)).sum() } else { 1.0 };
                for (expert, weight) in weights.iter().enumerate() {
                    let is_chosen = chosen[row].contains(&expert);
                    let want = if is_chosen { score(expert) / total * f64::from(routing.scale) } else { 0.0 };
                    assert!((f64::from(*weight) - want).abs() < 1e-6, "{name}, {path}, row {row}: {weights:?}");
                }
            }
        }
    }
}

#[test]
fn logits_that_are_not_finite_make_the_weights_nan() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let routing = RoutingSpec::softmax(2, true);
        let table = [[1.0, bad, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0]];
        let mut all: Vec<Vec<f32>> =
            devices(1).into_iter().map(|(_, mut device)| routed(&mut device, &table, &routing)).collect();
        all.push(routed(&mut ReferenceDevice::new(LIMITS), &table, &routing));
        for weights in all {
            assert_eq!(weights[..4].iter().filter(|weight| weight.is_nan()).count(), 2, "{bad}: {weights:?}");
            assert!(weights[4..].iter().all(|weight| weight.is_finite()), "{bad}: {weights:?}");
        }
    }
}
