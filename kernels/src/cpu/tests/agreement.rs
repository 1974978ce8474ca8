//! Comparison of any device with the reference, operation by operation, and schedules whose bits must agree.

use std::ops::Range;

use proptest::prelude::*;

use super::model::{LIMITS, Model, Rowsets, Sequence, Shape, adapted, sequences};
use crate::device::*;
use crate::reference::ReferenceDevice;

/// A device whose buffers a test can read.
pub(crate) trait Peek {
    /// The rows of a buffer in this step, as f32.
    fn peek(&mut self, buffer: Buffer) -> Vec<f32>;
}

/// Largest difference over the root mean square of `want`.
pub(super) fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let rms = (want.iter().map(|v| v * v).sum::<f32>() / want.len().max(1) as f32).sqrt();
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max) / rms.max(1e-6)
}

/// Largest distance from the reference. An operand has 8 bits, so one rounding is up to 2^-9 of a value. Values of three times the RMS
/// and a few roundings per layer that do not cancel make up to 1 % of the RMS per operation; two layers feed on each other's
/// errors. Integers have the same step for all values of a line (or row), 1/254 of its largest, which is three times as far off.
/// A norm behind a block divides by what the block gives, which may be small, and so makes its errors larger.
pub(super) fn limit(shape: &Shape) -> f32 {
    let of_weights = shape.held != Held::Stored || shape.stored.iter().any(|dtype| dtype.is_blocks());
    let has_integers = of_weights || shape.own.kv != KvFormat::Own;
    let limit = if has_integers { 0.4 } else { 0.12 };
    if shape.own.post_norms { 2.0 * limit } else { limit }
}

pub(super) fn batch_of<'a>(
    sequences: &'a [Sequence],
    parts: &[Range<usize>],
    tokens: &mut Vec<u32>,
    spans: &mut Vec<Span<'a>>,
) -> Vec<usize> {
    for (sequence, part) in sequences.iter().zip(parts) {
        let rows = tokens.len()..tokens.len() + part.len();
        tokens.extend_from_slice(&sequence.tokens[part.clone()]);
        spans.push(Span { rows, context: part.end, block_table: &sequence.table, adapter: sequence.adapter });
    }
    (0..tokens.len()).step_by(2).collect()
}

/// Runs the same steps on the reference and on every device, comparing after each operation.
pub(crate) fn agree<D: Device + Peek>(
    devices: Vec<(&'static str, D)>,
    shape: &Shape,
    lengths: &[usize],
    cut: usize,
    seed: u64,
) -> Result<(), TestCaseError> {
    let sequences = adapted(shape, sequences(lengths, shape.vocab, seed));
    let mut reference = ReferenceDevice::new(LIMITS);
    let model = Model::load(&mut reference, shape, seed);
    let cuts: Vec<usize> = lengths.iter().map(|&n| cut.min(n - 1)).collect();
    let steps: [Vec<Range<usize>>; 2] =
        [cuts.iter().map(|&c| 0..c).collect(), lengths.iter().zip(&cuts).map(|(&n, &c)| c..n).collect()];
    let mut wanted = vec![];
    for parts in steps.iter().filter(|parts| parts.iter().all(|part| !part.is_empty())) {
        let (mut tokens, mut spans) = (vec![], vec![]);
        let sampled = batch_of(&sequences, parts, &mut tokens, &mut spans);
        let batch = StepBatch { tokens: &tokens, spans: &spans, sampled: &sampled, ..Default::default() };
        let logits = model.step(&mut reference, &batch, &mut |d, name, buffer| wanted.push((name, d.peek(buffer))));
        wanted.push(("logits", logits));
    }
    for (path, mut device) in devices {
        let model = Model::load(&mut device, shape, seed);
        let mut wanted = wanted.iter();
        let mut check = |name: &str, got: &[f32]| {
            let (_, want) = wanted.next().unwrap();
            let (far, limit) = (distance(got, want), if name == "embed" { 0.0 } else { limit(shape) });
            prop_assert!(far <= limit, "{path} {name}: {far}");
            Ok(())
        };
        for parts in steps.iter().filter(|parts| parts.iter().all(|part| !part.is_empty())) {
            let (mut tokens, mut spans) = (vec![], vec![]);
            let sampled = batch_of(&sequences, parts, &mut tokens, &mut spans);
            let batch = StepBatch { tokens: &tokens, spans: &spans, sampled: &sampled, ..Default::default() };
            let mut outcome = Ok(());
            let logits = model.step(&mut device, &batch, &mut |d, name, buffer| {
                if outcome.is_ok() {
                    outcome = check(name, &d.peek(buffer));
                }
            });
            outcome?;
            check("logits", &logits)?;
        }
        for sequence in &sequences {
            for layer in 0..shape.layers {
                let page = sequence.table[0];
                let far = distance(&device.page(layer, page), &reference.page(layer, page));
                prop_assert!(far <= limit(shape), "{path} page: {far}");
            }
        }
    }
    Ok(())
}

pub(crate) fn bits(logits: &[Vec<Vec<f32>>]) -> Vec<Vec<Vec<u32>>> {
    logits.iter().map(|s| s.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()).collect()
}

/// Chunks of `size` for each sequence, all sequences side by side.
pub(crate) fn chunked(lengths: &[usize], size: usize) -> Vec<Rowsets> {
    let steps = lengths.iter().max().unwrap().div_ceil(size);
    (0..steps)
        .map(|step| {
            let left = |n: usize| n.saturating_sub(step * size).min(size);
            lengths.iter().enumerate().filter(|(_, n)| left(**n) > 0).map(|(i, &n)| (i, step * size, left(n))).collect()
        })
        .collect()
}
