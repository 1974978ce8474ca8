//! The CUDA device on a stand-in for its driver, which runs the kernels' own sources on the CPU.
//!
//! The stand-in is one per process, so the tests take turns. With `PENSTOCK_CUDA_TESTS=driver` the same tests run on the machine's own driver and GPU; those
//! that ask the stand-in for a fault fail there, and `tests/gpu/run.sh` leaves them out.

use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::*;
use crate::cpu::tests::agreement::{Peek, agree, bits, chunked};
use crate::cpu::tests::model::{LIMITS, Model, PAGES, Rowsets, SHAPE, Shape, run_steps, sequences};
use crate::device::{HostTensor, RowOrder, RowReader, SampledRow, Span};

impl Peek for CudaDevice {
    fn peek(&mut self, buffer: Buffer) -> Vec<f32> {
        let (rows, stored) = (self.rows_of(buffer), &self.buffers[buffer.0 as usize]);
        let (stride, columns) = (stored.stride(), stored.columns);
        let values: Vec<f32> = match stored.content {
            Content::Half => {
                let mut halves = vec![0u16; rows * stride];
                self.stream.read(&stored.memory, 0, &mut halves).unwrap();
                halves.into_iter().map(|value| bf16::from_bits(value).to_f32()).collect()
            }
            _ => {
                let mut singles = vec![0f32; rows * stride];
                self.stream.read(&stored.memory, 0, &mut singles).unwrap();
                singles
            }
        };
        values.chunks_exact(stride).flat_map(|row| row[..columns].to_vec()).collect()
    }
}

/// Name of the stand-in's GPU.
const NAME: &str = "stand-in on the CPU";

/// The stand-in with its default settings, until dropped.
struct StandIn {
    /// `None` on a GPU.
    set: Option<extern "C" fn(*const c_char)>,
    _turn: MutexGuard<'static, ()>,
}

impl StandIn {
    fn new() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        static LIBRARY: OnceLock<usize> = OnceLock::new();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        if std::env::var_os("PENSTOCK_CUDA_TESTS").is_some_and(|name| name == "driver") {
            return Self { set: None, _turn: turn };
        }
        let address = *LIBRARY.get_or_init(|| {
            let path = CString::new(build().as_os_str().as_bytes()).unwrap();
            // SAFETY: a library of this repository, loaded first: `cudarc` then finds it by its name, `libcuda.so`.
            let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
            assert!(!library.is_null(), "{path:?} cannot be loaded");
            // SAFETY: the library is loaded.
            unsafe { libc::dlsym(library, c"stand_in_set".as_ptr()) as usize }
        });
        // SAFETY: the address of a function with this signature, in a library that is never unloaded.
        let set = unsafe { std::mem::transmute::<usize, extern "C" fn(*const c_char)>(address) };
        let stand_in = Self { set: Some(set), _turn: turn };
        stand_in.set("");
        stand_in
    }

    fn set(&self, settings: &str) {
        let set = self.set.expect("faults can be asked of the stand-in alone");
        set(CString::new(settings).unwrap().as_ptr());
    }

    fn device(&self) -> CudaDevice {
        let gpu = probe().unwrap();
        assert!(self.set.is_none() || gpu.name == NAME, "the machine's own driver is used: {gpu}");
        CudaDevice::new(&gpu, LIMITS).unwrap()
    }

    /// A device with all kernels, and one without those that another kernel can stand in for, as where they are not used.
    fn devices(&self) -> [(&'static str, CudaDevice); 2] {
        let mut without = self.device();
        without.kernels.products.without_fed();
        [("all kernels", self.device()), ("without fed products", without)]
    }
}

/// Builds the stand-in in the target folder, beside the folder of this test program.
fn build() -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    let folder = program.parent().and_then(Path::parent).expect("a target folder").join("penstock-stand-in");
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let built = Command::new(crate_folder.join("cuda/host/build.sh"))
        .args([folder.as_os_str(), "driver".as_ref()])
        .output()
        .expect("sh and a C++ compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    String::from_utf8(built.stdout).expect("a path").trim().into()
}

#[test]
fn every_operation_agrees_with_the_reference() {
    let stand_in = StandIn::new();
    let odd =
        Shape { head_dim: 20, heads: 3, kv_heads: 3, hidden: 33, intermediate: 70, tied: false, norms: false, ..SHAPE };
    let wide = Shape { head_dim: 128, heads: 2, kv_heads: 1, bias: false, layers: 1, window: Some(9), ..SHAPE };
    let grouped = Shape { head_dim: 64, heads: 6, kv_heads: 2, hidden: 130, layers: 1, ..SHAPE };
    for (seed, shape) in [SHAPE, odd, wide, grouped].iter().enumerate() {
        agree(stand_in.devices().into(), shape, &[37, 1, 70], 20, seed as u64)
            .unwrap_or_else(|error| panic!("{shape:?}: {error}"));
    }
}

#[test]
fn long_contexts_agree_with_the_reference() {
    let stand_in = StandIn::new();
    for window in [None, Some(300), Some(31)] {
        let shape = Shape { window, layers: 1, heads: 2, kv_heads: 1, intermediate: 33, ..SHAPE };
        agree(vec![("stand-in", stand_in.device())], &shape, &[600, 290], 513, 11).unwrap();
    }
}

#[test]
fn a_token_has_the_same_bits_in_every_chunk_size_and_batch() {
    let stand_in = StandIn::new();
    let small = Shape { layers: 1, heads: 2, kv_heads: 1, intermediate: 40, ..SHAPE };
    for (shape, lengths, sizes) in
        [(small, vec![40, 23, 7], vec![1, 16]), (Shape { window: Some(270), ..small }, vec![300], vec![100, 257])]
    {
        let sequences = sequences(&lengths, shape.vocab, 3);
        let alone: Vec<Rowsets> = lengths.iter().enumerate().map(|(i, &n)| vec![(i, 0, n)]).collect();
        let mut want = None;
        for (name, mut device) in stand_in.devices() {
            let model = Model::load(&mut device, &shape, 3);
            let found = bits(&run_steps(&mut device, &model, &sequences, &alone));
            let want = want.get_or_insert_with(|| found.clone());
            assert!(want.iter().flatten().flatten().all(|&v| f32::from_bits(v).is_finite()));
            assert!(found == *want, "{name}");
            for &size in &sizes {
                let got = bits(&run_steps(&mut device, &model, &sequences, &chunked(&lengths, size)));
                assert!(got == *want, "chunks of {size}, {name}");
            }
        }
    }
}

#[test]
fn a_token_that_several_blocks_attend_for_has_the_bits_of_a_prompts_token() {
    let stand_in = StandIn::new();
    for (head_dim, window) in [(64, None), (128, Some(700))] {
        let shape = Shape { head_dim, window, layers: 1, heads: 2, kv_heads: 1, hidden: 64, intermediate: 40, ..SHAPE };
        let (sequences, mut device) = (sequences(&[1090], shape.vocab, 3), stand_in.device());
        let model = Model::load(&mut device, &shape, 3);
        let want = bits(&run_steps(&mut device, &model, &sequences, &chunked(&[1090], 600)));
        // The last token is alone in its step.
        let got = bits(&run_steps(&mut device, &model, &sequences, &chunked(&[1090], 363)));
        assert!(got == want && want[0].len() == 1090, "heads of {head_dim}");
    }
}

#[test]
fn a_prompt_has_the_same_bits_by_the_attention_of_warps_and_of_groups() {
    let stand_in = StandIn::new();
    for (head_dim, heads, window) in [(64, 6, None), (128, 2, Some(150))] {
        let shape = Shape { head_dim, heads, window, layers: 1, kv_heads: 1, hidden: 64, intermediate: 40, ..SHAPE };
        let sequences = sequences(&[400, 131], shape.vocab, 3);
        let [want, got] = [false, true].map(|is_grouped| {
            let mut device = stand_in.device();
            for tiled in &mut device.kernels.tiled {
                tiled.grouped = tiled.grouped.filter(|_| is_grouped);
            }
            let model = Model::load(&mut device, &shape, 3);
            bits(&run_steps(&mut device, &model, &sequences, &chunked(&[400, 131], 139)))
        });
        assert!(got == want && got[0].len() == 400, "heads of {head_dim}");
    }
}

#[test]
fn a_prefix_found_in_the_cache_gives_the_same_bits_and_stale_pages_do_not_leak() {
    let stand_in = StandIn::new();
    let mut sequences = sequences(&[80, 80], SHAPE.vocab, 5);
    let shared = sequences[0].tokens[..64].to_vec();
    sequences[1].tokens[..64].copy_from_slice(&shared);
    let mut device = stand_in.device();
    let model = Model::load(&mut device, &SHAPE, 5);
    let alone = run_steps(&mut device, &model, &sequences, &[vec![(1, 0, 80)]]);
    let stale = vec![0xff; device.page_bytes()];
    for layer in 0..SHAPE.layers {
        (0..PAGES as u32).for_each(|page| device.write_page(layer, page, &stale));
    }
    let pages = sequences[0].table[..2].to_vec();
    sequences[1].table[..2].copy_from_slice(&pages);
    let cached = run_steps(&mut device, &model, &sequences, &[vec![(0, 0, 80)], vec![(1, 64, 16)]]);
    assert_eq!(bits(&[alone[1][64..].to_vec()]), bits(&[cached[1][64..].to_vec()]));
}

#[test]
fn the_token_of_a_row_is_that_of_its_logits() {
    let stand_in = StandIn::new();
    // Three parts of a row, the last one ragged.
    let shape = Shape { vocab: 2 * 4096 + 77, layers: 1, intermediate: 33, ..SHAPE };
    let (mut device, tokens) = (stand_in.device(), [5, 8, 2, 9000 % shape.vocab as u32, 77, 1]);
    let model = Model::load(&mut device, &shape, 4);
    let spans = [Span { rows: 0..6, context: 6, block_table: &[0], adapter: None }];
    let batch = StepBatch { tokens: &tokens, spans: &spans, sampled: &[0, 2, 3, 4, 5], ..Default::default() };
    let logits = model.step(&mut device, &batch, &mut |_, _, _| ());
    let rows: Vec<&[f32]> = logits.chunks_exact(shape.vocab).collect();
    let best = |row: &[f32]| {
        let first = |best: usize, token: usize| if row[token] > row[best] { token } else { best };
        (0..row.len()).reduce(first).map(|token| token as u32)
    };
    let [host, top] = [Pick::Host, Pick::Best];
    for picks in [[top; 5], [host; 5], [top, host, host, top, host], [host, top, top, host, top]] {
        let sampled = model.sample(&mut device, &picks).unwrap();
        for (n, (pick, row)) in picks.iter().zip(&rows).enumerate() {
            let want = if *pick == host { SampledRow::Logits(row) } else { SampledRow::Token(best(row)) };
            assert!(sampled.row(n) == want, "{picks:?}, row {n}");
        }
    }
    // Draws beside other rows, with the random numbers at both ends too.
    for (temperature, others) in [(1.0, top), (0.3, host), (2.5, top)] {
        let scale = 1.0 / temperature;
        let draws = [0.0, 0.37, 0.5, 1.0 - f64::EPSILON / 2.0].map(|uniform| Pick::Draw { scale, uniform });
        let picks = [draws[0], draws[1], others, draws[2], draws[3]];
        let sampled = model.sample(&mut device, &picks).unwrap();
        for (n, (pick, row)) in picks.iter().zip(&rows).enumerate() {
            let Pick::Draw { scale, uniform } = *pick else { continue };
            let max = row[best(row).unwrap() as usize];
            let want = crate::sampling::draw_from_all(row, max, scale, uniform, &mut Vec::new());
            assert!(sampled.row(n) == SampledRow::Token(Some(want)), "{picks:?}, row {n}: {want}");
        }
    }
    let tokens: Vec<_> = rows.iter().map(|row| best(row)).collect();
    assert!(tokens.iter().any(|token| *token != tokens[0]), "rows have tokens of their own: {tokens:?}");
}

#[test]
fn more_rows_are_drawn_than_one_launch_takes() {
    let stand_in = StandIn::new();
    let (shape, rows) = (Shape { layers: 1, ..SHAPE }, 2 * params::DRAWS + 9);
    let mut device = stand_in.device();
    let model = Model::load(&mut device, &shape, 9);
    let sequence = &sequences(&[rows], shape.vocab, 9)[0];
    let sampled: Vec<usize> = (0..rows).collect();
    let spans = [Span { rows: 0..rows, context: rows, block_table: &sequence.table, adapter: None }];
    let batch = StepBatch { tokens: &sequence.tokens, spans: &spans, sampled: &sampled, ..Default::default() };
    let logits = model.step(&mut device, &batch, &mut |_, _, _| ());
    let uniform = |row: usize| row as f64 / rows as f64;
    // Every seventh row is read, so draws and rows are numbered differently.
    let pick = |row| if row % 7 == 3 { Pick::Host } else { Pick::Draw { scale: 0.5, uniform: uniform(row) } };
    let picks: Vec<Pick> = sampled.iter().map(|row| pick(*row)).collect();
    let got = model.sample(&mut device, &picks).unwrap();
    for (number, row) in logits.chunks_exact(shape.vocab).enumerate() {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let drawn = crate::sampling::draw_from_all(row, max, 0.5, uniform(number), &mut Vec::new());
        let is_read = picks[number] == Pick::Host;
        let want = if is_read { SampledRow::Logits(row) } else { SampledRow::Token(Some(drawn)) };
        assert!(got.row(number) == want, "row {number}: {drawn}");
    }
}

#[test]
fn a_gpu_that_is_lost_while_it_samples_is_reported() {
    let stand_in = StandIn::new();
    let spans = [Span { rows: 0..2, context: 2, block_table: &[0], adapter: None }];
    let batch = StepBatch { tokens: &[1, 2], spans: &spans, sampled: &[0, 1], ..Default::default() };
    let mut device = stand_in.device();
    let model = Model::load(&mut device, &SHAPE, 8);
    model.step(&mut device, &batch, &mut |_, _, _| ());
    let picks = [Pick::Draw { scale: 1.0, uniform: 0.5 }, Pick::Host];
    for launches in 0..5 {
        stand_in.set(&format!("lost-after={launches}"));
        let outcome = model.sample(&mut device, &picks).map(|_| ());
        assert!(matches!(outcome, Err(KernelError::Fault { .. })), "after {launches} launches: {outcome:?}");
    }
    stand_in.set("");
    assert!(model.sample(&mut device, &picks).is_ok());
}

#[test]
fn pages_travel_as_the_reference_has_them() {
    let stand_in = StandIn::new();
    let sequences = sequences(&[40], SHAPE.vocab, 6);
    let (mut from, mut to) = (stand_in.device(), stand_in.device());
    let model = Model::load(&mut from, &SHAPE, 6);
    Model::load(&mut to, &SHAPE, 6);
    run_steps(&mut from, &model, &sequences, &[vec![(0, 0, 40)]]);
    let mut bytes = vec![0; from.page_bytes()];
    from.read_page(1, sequences[0].table[0], &mut bytes);
    to.write_page(1, 3, &bytes);
    let (sent, arrived) = (from.page(1, sequences[0].table[0]), to.page(1, 3));
    assert!(sent == arrived && sent.iter().any(|value| *value != 0.0));
}

#[test]
fn an_empty_step_does_nothing_and_bad_batches_are_refused() {
    let stand_in = StandIn::new();
    let mut device = stand_in.device();
    let model = Model::load(&mut device, &SHAPE, 8);
    assert!(model.step(&mut device, &StepBatch::default(), &mut |_, _, _| ()).is_empty());
    for (token, table, sampled) in [(SHAPE.vocab as u32, 0, 0), (0, PAGES as u32, 0), (0, 0, 1)] {
        let spans = [Span { rows: 0..1, context: 1, block_table: &[table], adapter: None }];
        let outcome =
            device.begin(&StepBatch { tokens: &[token], spans: &spans, sampled: &[sampled], ..Default::default() });
        assert!(matches!(outcome, Err(KernelError::Batch { .. })));
    }
}

/// Rows of ones.
#[derive(Debug)]
struct Ones;

impl RowReader for Ones {
    fn read(&self, _: usize, out: &mut [f32]) {
        out.fill(1.0);
    }

    fn integers(&self, _: usize) -> Option<(&[u8], f32)> {
        None
    }
}

#[test]
fn weights_without_kernels_are_refused_by_name() {
    let stand_in = StandIn::new();
    let mut device = stand_in.device();
    let (bytes, order) = (vec![0u8; 34], RowOrder::Plain);
    let blocks =
        HostTensor { name: "lm_head", dtype: DType::Q8_0, shape: &[1, 32], bytes: &bytes, order, reader: None };
    let numbers = HostTensor { name: "embed", dtype: DType::Bf16, shape: &[1, 17], bytes: &bytes, order, reader: None };
    let forms = [
        (blocks, Held::Stored, "lm_head in q8_0"),
        (numbers.clone(), Held::Int8, "embed in int8"),
        (numbers, Held::Int4, "embed in int4"),
    ];
    for (tensor, held, says) in forms {
        let error = device.load(&WeightSpec::Embedding(tensor), held).unwrap_err();
        assert!(matches!(error, KernelError::Unavailable { .. }) && error.to_string().contains(says), "{error}");
    }
    for dtype in [DType::F16, DType::F32] {
        let columns = 16 / dtype.block().1;
        let tensor =
            HostTensor { name: "numbers", dtype, shape: &[1, columns], bytes: &bytes[..16], order, reader: None };
        assert!(device.load(&WeightSpec::Embedding(tensor), Held::Stored).is_ok() && holds(dtype, Held::Stored));
    }
    assert!(!holds(DType::Q4K, Held::Stored) && !holds(DType::Bf16, Held::Int8));
    let (reader, shape) = (Some(&Ones as &dyn RowReader), &[1, 8]);
    let tensor = HostTensor { name: "codes", dtype: DType::F32, shape, bytes: &[], order, reader };
    let error = device.load(&WeightSpec::Embedding(tensor), Held::Stored).unwrap_err().to_string();
    assert!(error.contains("codes in a quantized form"), "{error}");
}

#[test]
fn a_gpu_that_is_lost_is_reported_and_stays_lost() {
    let stand_in = StandIn::new();
    stand_in.set("lost-after=1");
    let mut device = stand_in.device();
    let (bytes, order) = ([0x80, 0x3f].repeat(64), RowOrder::Plain);
    let table = HostTensor { name: "ones", dtype: DType::Bf16, shape: &[8, 8], bytes: &bytes, order, reader: None };
    let table = device.load(&WeightSpec::Embedding(table), Held::Stored).unwrap();
    let ones = HostTensor { name: "ones", dtype: DType::Bf16, shape: &[8], bytes: &bytes[..16], order, reader: None };
    let weight = device.load(&WeightSpec::Vector { tensor: ones, offset: 0.0 }, Held::Stored).unwrap();
    device.kv(KvSpec { layers: 1, kv_heads: 1, head_dim: 2, latent: None, format: KvFormat::Own, pages: 1 }).unwrap();
    let buffers = [Rows::Batch, Rows::Sampled, Rows::Sampled].map(|rows| BufferSpec { rows, columns: 8 });
    let [residual, selected, last] = buffers.map(|spec| device.buffer(spec).unwrap());
    let spans = [Span { rows: 0..1, context: 1, block_table: &[0], adapter: None }];
    let batch = StepBatch { tokens: &[1], spans: &spans, sampled: &[0], ..Default::default() };
    let step = |device: &mut CudaDevice| -> Result<Vec<f32>, KernelError> {
        device.begin(&batch)?;
        device.embed(residual, table, 1.0);
        device.select(selected, residual);
        device.rmsnorm(last, selected, weight, 1e-6);
        device.logits(last, table, LogitsSpec::PLAIN).map(<[f32]>::to_vec)
    };
    let lost =
        |outcome| matches!(outcome, Err(KernelError::Fault { error, .. }) if error == "CUDA_ERROR_LAUNCH_FAILED");
    assert!(lost(step(&mut device)));
    assert!(lost(step(&mut device)), "it cannot be used again");
    // Another life of the driver: the same step works.
    stand_in.set("");
    let logits = step(&mut device).unwrap();
    assert!(logits.len() == 8 && logits.iter().all(|logit| (logit - 8.0).abs() < 0.01), "{logits:?}");
}

#[test]
fn a_step_reports_what_fails_in_any_of_its_operations() {
    let stand_in = StandIn::new();
    let (tokens, spans) = ([1, 2], [Span { rows: 0..2, context: 2, block_table: &[0], adapter: None }]);
    let [sampling, silent] =
        [&[1][..], &[]].map(|sampled| StepBatch { tokens: &tokens, spans: &spans, sampled, ..Default::default() });
    let step = |device: &mut CudaDevice, model: &Model, batch: &StepBatch<'_>| {
        model.try_step(device, batch, &mut |_, _, _| ()).map(|logits| logits.len())
    };
    let lost = |outcome: &Result<usize, KernelError>| matches!(outcome, Err(KernelError::Fault { error, .. }) if error == "CUDA_ERROR_LAUNCH_FAILED");
    for launches in [0, 1, 2, 5, 9] {
        let mut device = stand_in.device();
        let model = Model::load(&mut device, &SHAPE, 8);
        stand_in.set(&format!("lost-after={launches}"));
        let outcome = step(&mut device, &model, &sampling);
        assert!(lost(&outcome), "after {launches} launches: {outcome:?}");
        stand_in.set("");
        assert_eq!(step(&mut device, &model, &sampling).unwrap(), SHAPE.vocab);
        // The scratch memory has its size now: nothing but `logits` waits in a step without sampled rows.
        assert_eq!(step(&mut device, &model, &silent).unwrap(), 0);
        stand_in.set(&format!("lost-after={launches}"));
        let outcome = step(&mut device, &model, &silent);
        assert!(lost(&outcome), "nothing sampled, after {launches} launches: {outcome:?}");
        stand_in.set("");
    }
    let mut device = stand_in.device();
    let model = Model::load(&mut device, &SHAPE, 8);
    let (free, total) = memory_bytes(&probe().unwrap()).unwrap();
    // Enough for the indices of the step, too little for results of products.
    stand_in.set(&format!("memory={}", total - free + 4096));
    let outcome = step(&mut device, &model, &sampling);
    assert!(matches!(outcome, Err(KernelError::Memory { what: "results of a product", .. })), "{outcome:?}");
    stand_in.set("");
    assert_eq!(step(&mut device, &model, &sampling).unwrap(), SHAPE.vocab, "memory that is free again is used");
}

#[test]
fn too_little_memory_is_refused_with_its_size() {
    let stand_in = StandIn::new();
    stand_in.set("memory=1000000");
    let (mut device, gpu) = (stand_in.device(), probe().unwrap());
    assert_eq!(memory_bytes(&gpu).unwrap().1, 1_000_000);
    let spec = KvSpec { layers: 2, kv_heads: 2, head_dim: 64, latent: None, format: KvFormat::Own, pages: 100 };
    let refused = device.kv(spec);
    assert!(matches!(refused, Err(KernelError::Memory { what: "the KV cache", bytes: 1_638_400 })), "{refused:?}");
    let absurd = BufferSpec { rows: Rows::Batch, columns: usize::MAX };
    assert!(matches!(device.buffer(absurd), Err(KernelError::Memory { .. })));
    assert!(matches!(device.kv(KvSpec { pages: usize::MAX, ..spec }), Err(KernelError::Memory { .. })));
    assert!(matches!(device.kv(KvSpec { head_dim: 258, ..spec }), Err(KernelError::Shape { .. })));
}

#[test]
fn what_stands_between_a_machine_and_its_gpu_is_named() {
    let stand_in = StandIn::new();
    let found = |settings: &str| {
        stand_in.set(settings);
        probe()
    };
    let gpu = found("capability=89").unwrap();
    assert_eq!((gpu.index, gpu.kernels, gpu.driver), (0, Some("sm_80"), (13, 0)));
    assert!(gpu.to_string().contains("68.7 GB, compute capability 8.9, driver for CUDA 13.0, kernels sm_80"), "{gpu}");
    assert_eq!(found("driver=11080"), Err(ProbeError::TooOld { found: (11, 8) }));
    let name = NAME.to_owned();
    assert_eq!(found("capability=75"), Err(ProbeError::NoKernels { name, capability: (7, 5) }));
    assert_eq!(gpus().unwrap()[0].kernels, None, "it is listed all the same");
    assert_eq!(found("no-device"), Err(ProbeError::NoDevice));
}

#[test]
fn the_bandwidth_counts_bytes_read_and_written() {
    static ORIGIN: OnceLock<std::time::Instant> = OnceLock::new();
    let clock = || ORIGIN.get_or_init(std::time::Instant::now).elapsed().as_secs_f64();
    let stand_in = StandIn::new();
    let device = stand_in.device();
    let rate = bandwidth(&device.gpu, 3 << 20, clock).unwrap();
    assert!(rate > 1e6 && rate.is_finite(), "{rate}");
}

/// Bytes of a tensor of `values`.
fn stored(dtype: DType, values: &[f32]) -> Vec<u8> {
    let bytes = |value: &f32| match dtype {
        DType::Bf16 => bf16::from_f32(*value).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f32(*value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

/// Bits of a matrix on the GPU, padding too.
fn held(device: &CudaDevice, matrix: &Matrix) -> Vec<u16> {
    let mut bits = vec![0; matrix.rows * matrix.stride()];
    device.stream.read(&matrix.values, 0, &mut bits).unwrap();
    bits
}

#[test]
fn weights_of_every_type_and_order_are_held_as_padded_bf16() {
    let stand_in = StandIn::new();
    let mut device = stand_in.device();
    let paired = RowOrder::Pairs { head_dim: 4, plain: 0, rotated: 4 };
    for (dtype, columns, order) in [
        (DType::Bf16, 64_usize, RowOrder::Plain),
        (DType::Bf16, 33, paired),
        (DType::F16, 70, RowOrder::Plain),
        (DType::F32, 1, paired),
        (DType::F32, 128, RowOrder::Plain),
    ] {
        let stride = columns.next_multiple_of(DEPTH);
        let value = |part: usize, row: usize, column: usize| ((part * 991 + row * 97 + column) as f32).sin();
        let tensor = |part: usize, rows: usize| {
            let values = (0..rows).flat_map(|row| (0..columns).map(move |column| value(part, row, column)));
            stored(dtype, &values.collect::<Vec<_>>())
        };
        let padded = |row: Option<(usize, usize)>| {
            let bits = row.map(|(part, row)| -> Vec<u16> {
                let stored = |column| stored(dtype, &[value(part, order.stored(row), column)]);
                let exact = |bytes: Vec<u8>| match dtype {
                    DType::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
                    DType::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
                    _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
                };
                (0..columns).map(|column| bf16::from_f32(exact(stored(column))).to_bits()).collect()
            });
            let mut bits = bits.unwrap_or_default();
            bits.resize(stride, 0);
            bits
        };
        let (first, second) = (tensor(0, 12), tensor(1, 12));
        let shape = [12, columns];
        let host = |bytes| HostTensor { name: "w", dtype, shape: &shape, bytes, order, reader: None };
        let parts = [Source::new(&host(&first), 2).unwrap(), Source::new(&host(&second), 2).unwrap()];
        let matrix = device.stacked(&parts, None).unwrap();
        let want: Vec<u16> = (0..24).flat_map(|row| padded(Some((row / 12, row % 12)))).collect();
        assert!(held(&device, &matrix) == want, "{dtype:?}, {columns} columns");
        let biases = [vec![1.0; 12], vec![2.0; 12]];
        let gated = device.gated(&parts[0], &parts[1], Some(&biases)).unwrap();
        let places = (0..2).flat_map(|group| {
            (0..2).flat_map(move |part| (group * GATED_ROWS..(group + 1) * GATED_ROWS).map(move |row| (part, row)))
        });
        let want: Vec<u16> = places.flat_map(|(part, row)| padded((row < 12).then_some((part, row)))).collect();
        assert!(held(&device, &gated) == want, "gated {dtype:?}, {columns} columns");
        let mut bias = vec![0f32; 32];
        device.stream.read(gated.bias.as_ref().unwrap(), 0, &mut bias).unwrap();
        let group = |value: f32, rows: usize| [vec![value; rows], vec![0.0; GATED_ROWS - rows]].concat();
        assert_eq!(bias, [group(1.0, 8), group(2.0, 8), group(1.0, 4), group(2.0, 4)].concat());
    }
}

#[test]
fn weights_of_several_pieces_arrive_whole() {
    let stand_in = StandIn::new();
    let mut device = stand_in.device();
    // Three pieces and a part of a fourth, so that both halves are used twice; an odd number of rows.
    let (rows, columns) = (25_001, 2048);
    let words: Vec<u16> = (0..rows * columns)
        .map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes())
        .map(|b| u16::from_le_bytes([b[2], b[1]]))
        .collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let (name, dtype, shape, order) = ("w", DType::Bf16, [rows, columns], RowOrder::Plain);
    let source =
        Source::new(&HostTensor { name, dtype, shape: &shape, bytes: &bytes, order, reader: None }, 2).unwrap();
    let matrix = device.stacked(&[source], None).unwrap();
    assert!(held(&device, &matrix) == words);
}
