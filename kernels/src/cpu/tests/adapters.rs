//! Low-rank additions: against the reference, in every batch, and beside rows without any.

use super::model::{Ranks, Sequence};
use super::*;
use crate::device::{AdapterSlot, LowRank};

/// Adapters of odd ranks, on all projections and on some.
const ADAPTERS: &[Ranks] = &[[8; 7], [1, 0, 3, 0, 0, 16, 0], [0, 0, 0, 64, 3, 0, 1], [0, 5, 0, 0, 7, 0, 0]];

/// Shapes with adapters: odd widths, heads and parts that share panels, norms over all heads, norms behind blocks, several formats.
fn shapes() -> Vec<Shape> {
    let own = Own { adapters: ADAPTERS, ..PLAIN };
    let behind = Own { post_norms: true, ..own };
    vec![
        Shape { own, ..SHAPE },
        Shape { own, head_dim: 20, heads: 3, kv_heads: 3, hidden: 41, intermediate: 37, bias: false, ..SHAPE },
        Shape { own, head_dim: 12, heads: 2, kv_heads: 1, hidden: 17, intermediate: 1, norms: false, ..SHAPE },
        Shape { own: behind, head_dim: 80, heads: 2, kv_heads: 2, ..SHAPE },
        Shape { own: Own { joint: true, ..behind }, ..SHAPE },
        Shape { own, ..BLOCKS },
        Shape { own, stored: [DType::Q8_0, DType::Bf16], ..BLOCKS },
        Shape { own, held: Held::Int8, ..SHAPE },
        Shape { own, held: Held::Int4, ..SHAPE },
    ]
}

#[test]
fn adapters_agree_with_the_reference() {
    for (seed, shape) in shapes().into_iter().enumerate() {
        let shape = Shape { layers: 1, ..shape };
        compare(&shape, &[40, 13, 33, 7, 20], 9, seed as u64).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
    }
}

#[test]
fn adapted_tokens_have_the_same_bits_alone_and_in_every_chunk_and_batch() {
    for shape in shapes() {
        same_bits(&Shape { layers: 1, ..shape }, &[40, 13, 33, 7, 20, 9], &[1, 5, 16, 33], 9);
    }
}

#[test]
fn adapters_give_the_same_bits_on_every_path_of_a_family() {
    for shape in shapes() {
        same_on_every_path(&Shape { layers: 1, ..shape });
    }
}

#[test]
fn rows_without_an_adapter_have_the_bits_of_a_step_without_adapters() {
    let lengths = [40, 13, 33, 7, 20, 9];
    for shape in shapes() {
        let shape = Shape { layers: 1, ..shape };
        let plain = Shape { own: Own { adapters: &[], ..shape.own }, ..shape };
        let all = adapted(&shape, sequences(&lengths, shape.vocab, 3));
        let bare: Vec<Sequence> = all.iter().map(|s| Sequence { adapter: None, ..s.clone() }).collect();
        for (path, mut device) in devices(2) {
            let model = Model::load(&mut device, &plain, 3);
            let want = bits(&run_steps(&mut device, &model, &bare, &chunked(&lengths, 16)));
            let (_, mut device) = devices(2).into_iter().find(|(name, _)| *name == path).unwrap();
            let model = Model::load(&mut device, &shape, 3);
            let got = bits(&run_steps(&mut device, &model, &all, &chunked(&lengths, 16)));
            for (i, sequence) in all.iter().enumerate() {
                assert_eq!(got[i] == want[i], sequence.adapter.is_none(), "{path}, sequence {i}, {shape:?}");
            }
        }
    }
}

#[test]
fn additions_that_do_not_fit_and_slots_that_are_empty_are_refused() {
    let mut cpu = CpuDevice::new(CpuOptions { threads: 1, ..Default::default() }, LIMITS).unwrap();
    let mut reference = ReferenceDevice::new(LIMITS);
    let devices: [&mut dyn Device; 2] = [&mut cpu, &mut reference];
    let bytes = [0u8; 64];
    for device in devices {
        assert!(device.has(Feature::Adapters));
        Model::load(device, &SHAPE, 7);
        let matrix = |shape: &'static [usize]| {
            let bytes = &bytes[..4 * shape[0] * shape[1]];
            HostTensor { name: "w", dtype: DType::F32, shape, bytes, order: RowOrder::Plain, reader: None }
        };
        let spec = WeightSpec::Linear { parts: vec![matrix(&[5, 3])], biases: vec![] };
        let weight = device.load(&spec, Held::Stored).unwrap();
        let begin = |device: &mut dyn Device, slot| {
            let spans = [Span { rows: 0..1, context: 1, block_table: &[0], adapter: Some(AdapterSlot(slot)) }];
            device.begin(&StepBatch { tokens: &[0], spans: &spans, sampled: &[0], ..Default::default() })
        };
        assert!(matches!(begin(device, 0), Err(KernelError::Batch { what: "adapter of a span", .. })));
        let part = |first, a, b| LowRank { first, a: matrix(a), b: matrix(b), scale: 1.0 };
        let mut adapt = |slot, part| device.adapt(weight, AdapterSlot(slot), &[part]);
        assert!(matches!(adapt(0, part(2, &[2, 3], &[4, 2])), Err(KernelError::Shape { .. })));
        assert!(matches!(adapt(64, part(1, &[2, 3], &[4, 2])), Err(KernelError::Shape { .. })));
        adapt(1, part(1, &[2, 3], &[4, 2])).unwrap();
        assert!(begin(device, 1).is_ok() && begin(device, 2).is_err());
        device.unadapt(AdapterSlot(0));
        assert!(begin(device, 1).is_ok(), "another slot");
        device.unadapt(AdapterSlot(1));
        assert!(begin(device, 1).is_err(), "it is gone");
    }
}

#[test]
fn after_an_adapter_is_taken_away_all_bits_are_those_without_it() {
    let lengths = [40, 13, 33, 7, 20, 9];
    let own = Own { adapters: ADAPTERS, ..PLAIN };
    let shape = Shape { layers: 1, own, ..SHAPE };
    let all = adapted(&shape, sequences(&lengths, shape.vocab, 3));
    let bare: Vec<Sequence> = all.iter().map(|s| Sequence { adapter: None, ..s.clone() }).collect();
    let plain = Shape { own: PLAIN, ..shape };
    for (path, mut device) in devices(2) {
        let model = Model::load(&mut device, &plain, 3);
        let without = bits(&run_steps(&mut device, &model, &bare, &chunked(&lengths, 16)));
        let (_, mut device) = devices(2).into_iter().find(|(name, _)| *name == path).unwrap();
        let model = Model::load(&mut device, &shape, 3);
        let with = bits(&run_steps(&mut device, &model, &all, &chunked(&lengths, 16)));
        // One in the middle goes: the others stay as they are.
        device.unadapt(AdapterSlot(1));
        let left: Vec<Sequence> = all.iter().filter(|s| s.adapter != Some(AdapterSlot(1))).cloned().collect();
        let kept: Vec<_> = all.iter().zip(&with).filter(|(s, _)| s.adapter != Some(AdapterSlot(1))).collect();
        let lengths: Vec<usize> = left.iter().map(|s| s.tokens.len()).collect();
        let got = bits(&run_steps(&mut device, &model, &left, &chunked(&lengths, 16)));
        assert!(got.iter().zip(kept).all(|(got, (_, want))| got == want), "{path}");
        (0..4).for_each(|slot| device.unadapt(AdapterSlot(slot)));
        device.unadapt(AdapterSlot(63));
        let lengths: Vec<usize> = bare.iter().map(|s| s.tokens.len()).collect();
        assert_eq!(bits(&run_steps(&mut device, &model, &bare, &chunked(&lengths, 16))), without, "{path}");
        let spans = [Span { rows: 0..1, context: 1, block_table: &[0], adapter: Some(AdapterSlot(0)) }];
        let step = device.begin(&StepBatch { tokens: &[0], spans: &spans, sampled: &[0], types: &[], pools: &[] });
        assert!(matches!(step, Err(KernelError::Batch { what: "adapter of a span", .. })), "{path}");
    }
}
