//! The CPU device against the reference, and against itself in every other shape.

mod adapters;
pub(crate) mod agreement;
mod encoders;
mod experts;
pub(crate) mod model;
mod narrow;

use proptest::prelude::*;

use agreement::{Peek, agree, bits, chunked};
use model::{BLOCKS, LIMITS, Latent, Model, Own, PAGES, PLAIN, Rowsets, SHAPE, Shape, adapted, run_steps, sequences};

use super::tile::tests::{WITHOUT_FMA, kernels};
use super::*;
use crate::cpu::integer::ROW_COLUMNS_MAX;
use crate::device::{DType, HostTensor, KvFormat, PAGE_TOKENS, RowOrder, Span};
use crate::reference::ReferenceDevice;

/// Devices of every kernel that this machine runs and of the model of AMX, each with its elementwise table.
fn devices(threads: usize) -> Vec<(&'static str, CpuDevice)> {
    let mut fast = slow_devices(threads);
    fast.retain(|(name, _)| *name != WITHOUT_FMA);
    fast
}

/// Devices as in [`devices`], with the portable path without FMA instructions, whose every multiply-add is a library
/// call.
fn slow_devices(threads: usize) -> Vec<(&'static str, CpuDevice)> {
    let has_avx512 = Path::Avx512.missing().is_none();
    kernels()
        .into_iter()
        .map(|(name, kernel)| {
            let below_avx512 = name == "avx2" || name.starts_with("portable");
            let avx2 = detect::has_avx2_fma() && name != WITHOUT_FMA;
            let vector = vector::ops(has_avx512 && !below_avx512, avx2);
            let options = CpuOptions { threads, ..CpuOptions::default() };
            (name, CpuDevice::with_kernel(Path::Portable, kernel, vector, options, LIMITS).unwrap())
        })
        .collect()
}

impl CpuDevice {
    /// The rows of a buffer as f32, for tests.
    fn peek(&mut self, buffer: Buffer) -> Vec<f32> {
        let rows = self.rows_of(buffer);
        let stored = &self.buffers[buffer.0 as usize];
        let (columns, stride, content) = (stored.columns, stored.stride(), stored.content);
        let mut out = Vec::with_capacity(rows * columns);
        for row in 0..rows {
            for column in 0..columns {
                out.push(match content {
                    Content::Single => self.buffers[buffer.0 as usize].memory[row * stride + column],
                    // SAFETY: one thread, between two operations.
                    _ => lanes::from_bf16(
                        unsafe { self.operand_in(buffer, columns).row(row).line(column / 32) }[column % 32],
                    ),
                });
            }
        }
        out
    }
}

impl Peek for CpuDevice {
    fn peek(&mut self, buffer: Buffer) -> Vec<f32> {
        CpuDevice::peek(self, buffer)
    }
}

/// Shapes with attention over latents: whole lines, odd widths, more heads than an item has rows, integers beside it, contexts of several splits.
fn latents() -> Vec<Shape> {
    let of = |heads, rank, plain, rotated, value| Shape {
        heads,
        kv_heads: 1,
        head_dim: rank + rotated,
        norms: false,
        own: Own { latent: Some(Latent { rank, plain, rotated, value }), rotated: Some(rotated), ..PLAIN },
        ..SHAPE
    };
    vec![
        of(4, 64, 32, 32, 32),
        of(3, 50, 18, 6, 21),
        Shape { bias: false, ..of(5, 96, 40, 8, 72) },
        of(100, 40, 12, 2, 9),
        Shape { window: Some(9), ..of(2, 34, 7, 4, 5) },
        Shape { held: Held::Int8, ..of(3, 50, 18, 6, 21) },
        Shape { held: Held::Int4, ..of(3, 50, 18, 6, 21) },
        Shape {
            heads: 8,
            ..Shape { hidden: 256, intermediate: 256, stored: [DType::Q4K, DType::Q6K], ..of(8, 64, 32, 16, 32) }
        },
    ]
}

#[test]
fn latents_agree_with_the_reference() {
    for (seed, shape) in latents().into_iter().enumerate() {
        compare(&shape, &[67, 20], 9, seed as u64).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
    }
    compare(&latents()[1], &[600, 290], 513, 11).unwrap();
}

#[test]
fn latents_give_the_same_bits_in_every_chunk() {
    for shape in latents() {
        same_bits(&Shape { layers: 1, ..shape }, &[40, 23, 7], &[1, 5, 16, 33], 9);
    }
    same_bits(&Shape { layers: 1, ..latents()[1] }, &[530, 70], &[64, 271], 9);
}

#[test]
fn latents_give_the_same_bits_on_every_path_of_a_family() {
    for shape in latents() {
        same_on_every_path(&Shape { layers: 1, ..shape });
    }
}

/// Shapes with what not every device computes: as Gemma 2, as OLMo 2, as Phi-3, as SmolLM3's layers without rotation, as GPT-OSS's attention and
/// activation, as Granite.
fn others() -> Vec<Shape> {
    let gelu = Activation::GeluTanh;
    let scaled = Own { embedding_scale: 8.5, activation: gelu, post_norms: true, ..PLAIN };
    let gemma = Own { soft_caps: [Some(2.0), Some(3.0)], ..scaled };
    let joint = Own { post_norms: true, joint: true, ..PLAIN };
    let sinks = Own { sinks: true, activation: Activation::ClampedSwiglu { limit: 1.5, alpha: 1.702 }, ..PLAIN };
    let granite = Own { embedding_scale: 5.3, residual_scale: 0.22, logits_divisor: 3.0, ..PLAIN };
    vec![
        Shape { own: granite, ..SHAPE },
        Shape { own: Own { soft_caps: [None, Some(3.0)], ..granite }, bias: false, ..BLOCKS },
        Shape { own: granite, held: Held::Int8, ..SHAPE },
        Shape { own: sinks, norms: false, ..SHAPE },
        Shape { own: sinks, norms: false, head_dim: 64, window: Some(9), ..SHAPE },
        Shape { own: Own { soft_caps: [Some(2.0), None], ..sinks }, ..BLOCKS },
        Shape { own: gemma, ..SHAPE },
        Shape { own: joint, ..SHAPE },
        Shape { own: joint, head_dim: 20, heads: 3, kv_heads: 3, bias: false, ..SHAPE },
        Shape { own: Own { rotated: Some(24), ..PLAIN }, norms: false, ..SHAPE },
        Shape { own: Own { rotated: Some(0), ..PLAIN }, head_dim: 80, window: Some(9), ..SHAPE },
        Shape { own: Own { joint: true, ..gemma }, ..BLOCKS },
        Shape { own: Own { joint: true, ..gemma }, held: Held::Int8, ..SHAPE },
    ]
}

#[test]
fn what_only_some_families_have_agrees_with_the_reference() {
    for (seed, shape) in others().into_iter().enumerate() {
        compare(&shape, &[67, 20], 9, seed as u64).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
    }
}

#[test]
fn what_only_some_families_have_gives_the_same_bits_in_every_chunk() {
    for shape in others() {
        same_bits(&Shape { layers: 1, ..shape }, &[40, 23, 7], &[1, 5, 16, 33], 9);
    }
}

#[test]
fn what_only_some_families_have_gives_the_same_bits_on_every_path_of_a_family() {
    for shape in others() {
        same_on_every_path(&Shape { layers: 1, ..shape });
    }
}

/// Shapes whose keys and values are integers: whole lines and odd widths, one query head per KV head and several, windows, caps, sinks, integers as weights.
fn rounded_kv() -> Vec<Shape> {
    let own = Own { kv: KvFormat::Int8, ..PLAIN };
    vec![
        Shape { own, ..SHAPE },
        Shape { own, head_dim: 80, heads: 4, window: Some(9), norms: false, ..SHAPE },
        Shape { own, head_dim: 20, heads: 3, kv_heads: 3, bias: false, ..SHAPE },
        Shape { own: Own { soft_caps: [Some(2.0), None], sinks: true, ..own }, head_dim: 64, norms: false, ..SHAPE },
        Shape { own: Own { joint: true, post_norms: true, ..own }, head_dim: 128, heads: 2, kv_heads: 1, ..SHAPE },
        Shape { own, held: Held::Int8, ..SHAPE },
        Shape { own, stored: [DType::Q8_0; 2], layers: 1, ..BLOCKS },
    ]
}

#[test]
fn integers_as_keys_and_values_agree_with_the_reference() {
    for (seed, shape) in rounded_kv().into_iter().enumerate() {
        compare(&shape, &[67, 20], 9, seed as u64).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
    }
    for window in [None, Some(300), Some(31)] {
        compare(&Shape { window, ..rounded_kv()[0] }, &[600, 290], 513, 11).unwrap();
    }
}

#[test]
fn integers_as_keys_and_values_give_the_same_bits_in_every_chunk() {
    for shape in rounded_kv() {
        same_bits(&Shape { layers: 1, ..shape }, &[40, 23, 7], &[1, 5, 16, 33], 9);
    }
    for window in [None, Some(270)] {
        same_bits(&Shape { window, layers: 1, ..rounded_kv()[0] }, &[530, 300], &[1, 100, 257], 3);
    }
}

#[test]
fn integers_as_keys_and_values_give_the_same_bits_on_every_path_of_a_family() {
    for shape in rounded_kv() {
        same_on_every_path(&Shape { layers: 1, ..shape });
    }
}

#[test]
fn latents_are_not_kept_as_integers() {
    let mut device = CpuDevice::new(CpuOptions { threads: 1, ..Default::default() }, LIMITS).unwrap();
    let spec = KvSpec { layers: 1, kv_heads: 1, head_dim: 96, latent: Some(64), format: KvFormat::Int8, pages: 1 };
    let refused = device.kv(spec).unwrap_err().to_string();
    assert!(refused.contains("KV of 8 bits") && refused.contains("latents"), "{refused}");
}

fn same_on_every_path(shape: &Shape) {
    let (lengths, mut families) = ([300, 9], std::collections::HashMap::new());
    let sequences = adapted(shape, sequences(&lengths, shape.vocab, 4));
    for threads in [1, 3] {
        for (path, mut device) in devices(threads) {
            let model = Model::load(&mut device, shape, 4);
            let got = bits(&run_steps(&mut device, &model, &sequences, &chunked(&lengths, 170)));
            let want = families.entry(device.info().numerics).or_insert_with(|| got.clone());
            assert!(got == *want, "{path}, {threads} threads, {shape:?}");
        }
    }
}

/// Runs the same steps on the reference and on every path, comparing after each operation.
fn compare(shape: &Shape, lengths: &[usize], cut: usize, seed: u64) -> Result<(), TestCaseError> {
    let all = if lengths.iter().all(|&n| n < 100) { slow_devices(2) } else { devices(2) };
    agree(all, shape, lengths, cut, seed)
}

fn shapes() -> impl Strategy<Value = Shape> {
    let dims = prop_oneof![Just(32), Just(64), Just(80), Just(96), Just(128), Just(12), Just(20)];
    let window = prop_oneof![Just(None), (1..80usize).prop_map(Some)];
    let heads = (1..=8usize, 1..=3usize);
    (1..150usize, 1..100usize, 33..140usize, dims, heads, window, any::<(bool, bool, bool)>()).prop_map(
        |(hidden, intermediate, vocab, head_dim, (fan, kv_heads), window, (bias, norms, tied))| Shape {
            hidden: hidden + 16,
            heads: fan * kv_heads,
            kv_heads,
            head_dim,
            intermediate,
            vocab,
            layers: 1,
            window,
            bias,
            norms,
            tied,
            ..SHAPE
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_operation_agrees_with_the_reference(
        shape in shapes(),
        lengths in proptest::collection::vec(1..70usize, 1..4),
        cut in 0..60usize,
        seed: u64,
    ) {
        compare(&shape, &lengths, cut, seed)?;
    }
}

#[test]
fn long_contexts_agree_with_the_reference() {
    for window in [None, Some(300), Some(31)] {
        compare(&Shape { window, ..SHAPE }, &[600, 290], 513, 11).unwrap();
    }
}

/// Shapes with every block format, with two formats in one weight, and with weights rounded at load.
fn formats() -> Vec<Shape> {
    let alike = |dtype| Shape { stored: [dtype; 2], layers: 1, ..BLOCKS };
    // A shape's place is the seed of its values, and some seeds come near the limit: formats that are new come last.
    let new = [DType::Iq4Xs];
    let blocks = DType::ALL.into_iter().filter(|dtype| dtype.is_blocks() && !new.contains(dtype));
    let mixed = [[DType::Q4K, DType::Q6K], [DType::Q8_0, DType::Bf16], [DType::Bf16, DType::Q4_0]];
    let mixed = mixed.map(|stored| Shape { stored, tied: false, ..BLOCKS });
    // Two formats in one panel: everything is expanded.
    let shared = Shape { stored: [DType::Q4_0, DType::Q8_0], head_dim: 80, heads: 2, kv_heads: 1, ..BLOCKS };
    let shared = Shape { heads: 6, kv_heads: 3, hidden: 96, intermediate: 64, ..shared };
    let rounded = [
        Shape { held: Held::Int8, ..SHAPE },
        Shape { held: Held::Int8, stored: [DType::Q8_0; 2], ..BLOCKS },
        Shape { held: Held::Int4, ..SHAPE },
        Shape { held: Held::Int8Blocks, ..SHAPE },
        // What has 4 bits stays; where it shares panels, all of it is rounded.
        Shape { held: Held::Int4, stored: [DType::Q4_0, DType::Q5_0], ..BLOCKS },
        Shape { held: Held::Int4, ..shared },
        Shape { held: Held::Int8Blocks, stored: [DType::Q6K, DType::Bf16], ..BLOCKS },
    ];
    blocks.map(alike).chain(mixed).chain([shared]).chain(rounded).chain(new.map(alike)).collect()
}

#[test]
fn every_format_agrees_with_the_reference() {
    for (seed, shape) in formats().into_iter().enumerate() {
        compare(&shape, &[37, 20], 9, seed as u64).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
    }
}

#[test]
fn a_token_has_the_same_bits_in_every_chunk_size_and_format() {
    for shape in formats() {
        same_bits(&Shape { layers: 1, ..shape }, &[40, 23, 7], &[1, 5, 16, 33], 9);
    }
}

#[test]
fn formats_have_the_same_bits_on_every_path_of_a_family_and_every_number_of_threads() {
    for shape in formats() {
        let (lengths, mut families) = ([40, 9], std::collections::HashMap::new());
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

/// Every schedule of the same tokens gives the same bits at every position.
fn same_bits(shape: &Shape, lengths: &[usize], sizes: &[usize], seed: u64) {
    let sequences = adapted(shape, sequences(lengths, shape.vocab, seed));
    for threads in [1, 3] {
        let mut all = devices(threads);
        for (path, device) in &mut all {
            let model = Model::load(device, shape, seed);
            let alone: Vec<Rowsets> = lengths.iter().enumerate().map(|(i, &n)| vec![(i, 0, n)]).collect();
            let want = bits(&run_steps(device, &model, &sequences, &alone));
            assert!(want.iter().flatten().flatten().all(|&v| f32::from_bits(v).is_finite()));
            for &size in sizes {
                let got = bits(&run_steps(device, &model, &sequences, &chunked(lengths, size)));
                assert!(got == want, "{path}, {threads} threads, chunks of {size}");
            }
        }
    }
}

#[test]
fn a_token_has_the_same_bits_in_every_chunk_size() {
    same_bits(&SHAPE, &[40], &(1..=40).collect::<Vec<_>>(), 1);
}

#[test]
fn a_token_has_the_same_bits_alone_and_in_a_batch_of_sixteen() {
    let lengths: Vec<usize> = (0..16).map(|i| 3 + i * 5 % 37).collect();
    same_bits(&Shape { head_dim: 80, heads: 4, ..SHAPE }, &lengths, &[1, 7, 64], 2);
}

#[test]
fn a_token_has_the_same_bits_across_splits_and_windows() {
    for window in [None, Some(270)] {
        let shape = Shape { window, layers: 1, hidden: 40, intermediate: 33, heads: 2, vocab: 33, ..SHAPE };
        same_bits(&shape, &[530, 300], &[1, 100, 257], 3);
    }
}

#[test]
fn thread_counts_and_paths_of_a_family_do_not_matter() {
    let lengths = [300, 64, 5];
    let sequences = sequences(&lengths, SHAPE.vocab, 4);
    let mut families = std::collections::HashMap::new();
    for threads in [1, 2, 5] {
        for (path, mut device) in devices(threads) {
            let model = Model::load(&mut device, &SHAPE, 4);
            let got = bits(&run_steps(&mut device, &model, &sequences, &chunked(&lengths, 200)));
            let numerics = device.info().numerics;
            let want = families.entry(numerics).or_insert_with(|| got.clone());
            assert!(got == *want, "{path}, {threads} threads");
        }
    }
    assert!(families.len() <= 2);
}

#[test]
fn a_prefix_found_in_the_cache_gives_the_same_bits() {
    let mut sequences = sequences(&[100, 100], SHAPE.vocab, 5);
    let shared = sequences[0].tokens[..64].to_vec();
    sequences[1].tokens[..64].copy_from_slice(&shared);
    for (path, mut device) in devices(2) {
        let model = Model::load(&mut device, &SHAPE, 5);
        let alone = run_steps(&mut device, &model, &sequences, &[vec![(1, 0, 100)]]);
        let mut hit = sequences.clone();
        let pages = hit[0].table[..2].to_vec();
        hit[1].table[..2].copy_from_slice(&pages);
        let steps = [vec![(0, 0, 100)], vec![(1, 64, 36)]];
        let cached = run_steps(&mut device, &model, &hit, &steps);
        assert_eq!(bits(&[alone[1][64..].to_vec()]), bits(&[cached[1][64..].to_vec()]), "{path}");
    }
}

#[test]
fn stale_pages_do_not_leak() {
    stale_pages(&SHAPE, &|row| kv::Row::Halves([&[0x7fc0; 32], &[0x7f80; 32]][row]));
    let own = Own { kv: KvFormat::Int8, ..PLAIN };
    stale_pages(&Shape { own, ..SHAPE }, &|_| kv::Row::Codes(&[-128; 32], f32::NAN));
}

/// Fills all pages with rows of key 0 and value 1 that must not show.
fn stale_pages(shape: &Shape, row: &dyn Fn(usize) -> kv::Row<'static>) {
    let sequences = sequences(&[45, 90], shape.vocab, 6);
    for (path, mut device) in devices(1) {
        let model = Model::load(&mut device, shape, 6);
        let want = bits(&run_steps(&mut device, &model, &sequences, &[vec![(0, 0, 45)]]));
        let kv = device.kv.as_mut().unwrap();
        let writer = kv.writer();
        for page in 0..PAGES {
            for slot in 0..PAGE_TOKENS {
                for head in 0..SHAPE.kv_heads {
                    let place = kv::Place { layer: 0, page, slot };
                    // SAFETY: one thread.
                    unsafe { writer.key(place, head, row(0)) };
                    // SAFETY: one thread.
                    unsafe { writer.value(place, head, row(1), false) };
                }
            }
        }
        let mut steps = vec![vec![(0, 0, 10)], vec![(0, 10, 17)]];
        steps.extend((27..45).map(|done| vec![(0, done, 1)]));
        assert!(bits(&run_steps(&mut device, &model, &sequences, &steps))[0] == want[0], "{path}");
    }
}

#[test]
fn a_step_that_goes_on_in_a_page_writes_its_own_token_alone() {
    let sequences = sequences(&[20], SHAPE.vocab, 6);
    for (path, mut device) in devices(1) {
        let model = Model::load(&mut device, &SHAPE, 6);
        run_steps(&mut device, &model, &sequences, &[vec![(0, 0, 10)]]);
        let page = sequences[0].table[0] as usize;
        let place = kv::Place { layer: 0, page, slot: 20 };
        // SAFETY: one thread.
        unsafe { device.kv.as_mut().unwrap().writer().value(place, 1, kv::Row::Halves(&[0x3f80; 32]), false) };
        run_steps(&mut device, &model, &sequences, &[vec![(0, 10, 1)]]);
        let value = |slot: usize| {
            let at = ((SHAPE.kv_heads + 1) * PAGE_TOKENS + slot) * SHAPE.head_dim;
            device.page(0, page as u32)[at..at + SHAPE.head_dim].to_vec()
        };
        assert!(value(20).iter().all(|value| *value == 1.0), "{path}: each token clears the rest of its page");
        assert!(value(10).iter().any(|value| *value != 0.0) && value(11).iter().all(|value| *value == 0.0), "{path}");
    }
}

#[test]
fn bad_batches_are_refused() {
    let mut cpu = CpuDevice::new(CpuOptions { threads: 1, ..Default::default() }, LIMITS).unwrap();
    let mut reference = ReferenceDevice::new(LIMITS);
    let devices: [&mut dyn Device; 2] = [&mut cpu, &mut reference];
    for device in devices {
        Model::load(device, &SHAPE, 7);
        let mut refused = |token: u32, context: usize, table: &[u32], sampled: &[usize]| {
            let spans = [Span { rows: 0..1, context, block_table: table, adapter: None }];
            let outcome = device.begin(&StepBatch { tokens: &[token], spans: &spans, sampled, ..Default::default() });
            matches!(outcome, Err(KernelError::Batch { .. }))
        };
        assert!(!refused(0, 1, &[0], &[0]));
        assert!(refused(SHAPE.vocab as u32, 1, &[0], &[0]));
        assert!(refused(0, 1, &[PAGES as u32], &[0]));
        assert!(refused(0, 33, &[0], &[0]));
        assert!(refused(0, 1, &[0], &[1]));
        assert!(refused(0, PAGES * PAGE_TOKENS + 1, &[0; PAGES + 1], &[0]));
    }
}

#[test]
fn bad_weights_and_options_are_refused() {
    let new = |threads, cores| CpuDevice::new(CpuOptions { threads, cores, path: Path::Auto }, LIMITS);
    assert!(matches!(new(3, Some(vec![0, 1])), Err(KernelError::Unavailable { .. })));
    let mut device = new(0, Some(vec![0])).unwrap();
    assert!(device.info().name.ends_with("1 threads") && device.path() != Path::Auto);
    let order = RowOrder::Plain;
    let short = HostTensor { name: "x", dtype: DType::F32, shape: &[3, 3], bytes: &[0; 35], order, reader: None };
    let torn = HostTensor { name: "x", dtype: DType::Q8_0, shape: &[1, 33], bytes: &[0; 68], order, reader: None };
    for bad in [short, torn] {
        assert!(matches!(device.load(&WeightSpec::Embedding(bad), Held::Stored), Err(KernelError::Shape { .. })));
    }
    let bytes = vec![0; (ROW_COLUMNS_MAX + 1) * 2];
    let wide = HostTensor {
        name: "x",
        dtype: DType::Bf16,
        shape: &[1, ROW_COLUMNS_MAX + 1],
        bytes: &bytes,
        order,
        reader: None,
    };
    assert!(matches!(device.load(&WeightSpec::Embedding(wide), Held::Int8), Err(KernelError::Shape { .. })));
    let absurd =
        KvSpec { layers: usize::MAX, kv_heads: 2, head_dim: 64, latent: None, format: KvFormat::Own, pages: 9 };
    assert!(matches!(device.kv(absurd), Err(KernelError::Memory { .. })));
    let absurd = BufferSpec { rows: Rows::Batch, columns: usize::MAX };
    assert!(matches!(device.buffer(absurd), Err(KernelError::Memory { .. })));
}

#[test]
fn an_empty_step_does_nothing() {
    for (_, mut device) in devices(2) {
        let model = Model::load(&mut device, &SHAPE, 8);
        assert!(model.step(&mut device, &StepBatch::default(), &mut |_, _, _| ()).is_empty());
    }
}
