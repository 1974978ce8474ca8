//! Throughput of a model on this machine, beside the machine's limits: for `penstock bench`.

use crate::config::WorkerError;
use crate::model::{DEMO_MODEL, model_name, open};
use crate::options::ModelOptions;
use crate::place::{Place, device, place};
use crate::weights::{self, Shared};
use penstock_engine::checkpoint::{Checkpoint, Work};
use penstock_engine::measure::Measure;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_kernels::cpu::limits::{self, MachineLimits};
use penstock_kernels::cpu::{CpuDevice, Path};
use penstock_kernels::cuda::{self, Gpu};
use penstock_kernels::{Held, Limits, PAGE_TOKENS};
use penstock_machine::Machine;
use std::sync::OnceLock;
use std::time::Instant;

pub use crate::weights::shared_memory;

/// Tokens of one step where the options say nothing.
const BATCH_TOKENS: usize = 512;
/// Memory of a GPU that is copied for the limit: more than its caches hold, and no more than an eighth of it.
const COPY_BYTES: u64 = 1 << 30;
/// Operations per byte up to which memory bounds a step on every GPU that has kernels: they multiply bf16 at 150 operations per byte and more.
const MEMORY_BOUND: f64 = 100.0;
/// Memory that is read for the limit where there is enough, and where there is little.
const READ_BYTES: [usize; 2] = [1 << 30, 1 << 28];
/// Bytes of available memory from which on the larger one is read.
const PLENTY_BYTES: u64 = 4 << 30;

/// Measurements to make.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Model, device, threads, and tokens of one step. The sizes of KV follow from the measurements.
    pub model: ModelOptions,
    /// Lengths of prompts whose prefill is timed, in tokens.
    pub prompts: Vec<usize>,
    /// Numbers of sequences whose decode is timed.
    pub batches: Vec<usize>,
    /// Tokens in front of every decoding sequence.
    pub context: usize,
}

/// Result of a bench.
#[derive(Clone, Debug)]
pub struct BenchReport {
    /// Name of the model.
    pub model: String,
    /// Name of the architecture, `architectures[0]`.
    pub architecture: &'static str,
    /// Format of the weights in the checkpoint.
    pub weight_format: String,
    /// Bytes of the weights as the device holds them.
    pub weights_bytes: u64,
    /// Device and instruction path, for a person to read.
    pub device: String,
    /// Number of threads of a CPU; 0 on a GPU.
    pub threads: usize,
    /// Limits of the device; `None` on the reference device.
    pub limits: Option<BenchLimits>,
    /// Tokens of one step at most: a longer prompt is computed in several.
    pub batch_tokens: usize,
    /// Time from opening the checkpoint until the model can compute, in seconds.
    pub load_seconds: f64,
    /// Prefill of each prompt.
    pub prefill: Vec<Timed>,
    /// Decode of each batch.
    pub decode: Vec<Timed>,
}

/// Limits of the device that computes, as they were measured.
#[derive(Clone, Copy, Debug)]
pub enum BenchLimits {
    /// Arithmetic and memory of the CPU.
    Cpu(MachineLimits),
    /// Memory of a GPU, in 10⁹ bytes per second, read and written by copies. Its arithmetic is not measured.
    Gpu {
        /// Rate in 10⁹ bytes per second.
        gigabytes: f64,
    },
}

impl std::fmt::Display for BenchLimits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu(limits) => limits.fmt(f),
            Self::Gpu { gigabytes } => {
                write!(f, "{gigabytes:.0} GB/s (copies in the GPU's memory); arithmetic is not measured")
            }
        }
    }
}

impl BenchLimits {
    /// Rate of reading memory, in 10⁹ bytes per second.
    pub fn gigabytes(&self) -> f64 {
        match self {
            Self::Cpu(limits) => limits.gigabytes,
            Self::Gpu { gigabytes } => *gigabytes,
        }
    }

    /// Rate of multiply-adds in 10⁹ operations per second, and the instruction; `None` on a GPU.
    pub fn arithmetic(&self) -> Option<(f64, &'static str)> {
        match self {
            Self::Cpu(limits) => Some((limits.gflops, limits.instruction)),
            Self::Gpu { .. } => None,
        }
    }
}

/// Time of one decode step, or of the prefill of one prompt.
#[derive(Clone, Debug)]
pub struct Timed {
    /// Tokens of the prompt, or sequences of the batch.
    pub size: usize,
    /// Median time in seconds.
    pub seconds: f64,
    /// Time that the machine needs at least, and what bounds it; `None` where that is not known.
    pub bound: Option<(f64, BoundBy)>,
}

impl Timed {
    /// Tokens per second.
    pub fn rate(&self) -> f64 {
        self.size as f64 / self.seconds
    }

    /// Share of the limit that is reached; `None` where the limit is not known.
    pub fn share(&self) -> Option<f64> {
        self.bound.map(|(seconds, _)| seconds / self.seconds)
    }
}

/// Limit of the machine that bounds a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoundBy {
    /// Multiply-adds per second.
    Arithmetic,
    /// Bytes read per second.
    Memory,
}

/// Part of a bench that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchStage {
    /// The machine's limits are measured.
    Limits,
    /// Weights are loaded: bytes done, and all.
    Loading(u64, u64),
    /// Prefill of a prompt of so many tokens is timed.
    Prefill(usize),
    /// Decode of so many sequences is timed.
    Decode(usize),
}

/// Loads the model into this process and times it. `stage` hears what begins.
///
/// # Errors
/// [`WorkerError`] if the model cannot be loaded, there is not enough memory for the measurements, or a prompt is longer than its context.
pub fn bench(options: &BenchOptions, stage: &mut dyn FnMut(BenchStage)) -> Result<BenchReport, WorkerError> {
    let sequences_max = options.batches.iter().copied().max().unwrap_or(1).max(1);
    let batch_tokens = if options.model.batch_tokens > 0 { options.model.batch_tokens } else { BATCH_TOKENS };
    let rows_max = batch_tokens.max(sequences_max);
    let (checkpoint, _) = open(options.model.model.as_deref())?;
    if checkpoint.config().is_whole() {
        let what = "makes vectors or scores of whole texts and decodes nothing; texts per second are measured through /v1/embeddings";
        return Err(WorkerError::Model(format!("{} {what}", checkpoint.architecture())));
    }
    let place = place(&options.model, &checkpoint)?;
    let pages = Measure::pages(&options.prompts, &options.batches, options.context, rows_max);
    refuse(options, &checkpoint, pages, rows_max, sequences_max, &place)?;
    let (threads, limits) = match &place {
        Place::Cpu => {
            stage(BenchStage::Limits);
            let (threads, path) = (threads(&options.model), path(&options.model));
            (threads, Some(BenchLimits::Cpu(measure(threads, path)?)))
        }
        Place::Gpu(gpu) => {
            stage(BenchStage::Limits);
            (0, Some(BenchLimits::Gpu { gigabytes: bandwidth(gpu)? }))
        }
        Place::Reference => (0, None),
    };
    let started = Instant::now();
    let sizes = Limits { rows_max, sampled_max: sequences_max };
    let shared = match &place {
        Place::Cpu => weights::shared(&options.model, &checkpoint, &mut |_| {}),
        Place::Gpu(_) | Place::Reference => None,
    };
    let device = device(&options.model, &place, sizes, shared.as_ref().map(|shared| &shared.copy))?;
    let name = device.info().name;
    let model_limits = ModelLimits {
        context_tokens: None,
        kv: KvBudget::Pages(pages),
        rows_max,
        sampled_max: sequences_max,
        held: options.model.held,
        kv_format: options.model.kv_format,
    };
    let mut tell = |step: penstock_engine::models::Progress<'_>| {
        stage(BenchStage::Loading(step.bytes_done, step.bytes_total));
    };
    let model = Model::load(&checkpoint, device, model_limits, &mut tell)
        .map_err(|error| WorkerError::Model(error.to_string()))?;
    shared.map_or(Ok(None), |Shared { copy, key }| copy.finish(&key)).map_err(|e| WorkerError::Model(e.to_string()))?;
    let load_seconds = started.elapsed().as_secs_f64();
    let weights_bytes = checkpoint.held_bytes(options.model.held);
    // The instruction of the arithmetic limit multiplies bf16 or f32; integer weights have faster ones.
    let is_integer = options.model.held != Held::Stored || checkpoint.has_integers();
    let bound = |work: Work| bound(limits?, work, is_integer);
    let clock = move || started.elapsed();
    let mut measure = Measure::new(Box::new(model), rows_max, sequences_max, &clock);
    let config = checkpoint.config();
    let failed = WorkerError::Model;
    // The first steps touch memory for the first time.
    measure.prefill(options.prompts.first().map_or(32, |&tokens| tokens.min(32))).map_err(failed)?;
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for &tokens in &options.prompts {
        stage(BenchStage::Prefill(tokens));
        let seconds = measure.prefill(tokens).map_err(failed)?;
        // A long prompt is read in chunks, each of which reads the weights.
        let work = config.prefill_work(tokens, weights_bytes);
        let chunks = tokens.div_ceil(rows_max) as f64;
        prefill.push(Timed { size: tokens, seconds, bound: bound(Work { bytes: work.bytes * chunks, ..work }) });
    }
    for &sequences in &options.batches {
        stage(BenchStage::Decode(sequences));
        let seconds = measure.decode(sequences, options.context).map_err(failed)?;
        let work = config.decode_work(sequences, options.context, (weights_bytes, options.model.kv_format));
        decode.push(Timed { size: sequences, seconds, bound: bound(work) });
    }
    Ok(BenchReport {
        model: options.model.model.as_deref().map_or(DEMO_MODEL.into(), model_name),
        architecture: checkpoint.architecture(),
        weight_format: checkpoint.weight_format(),
        weights_bytes,
        device: name,
        threads,
        limits,
        batch_tokens: rows_max,
        load_seconds,
        prefill,
        decode,
    })
}

/// Refuses measurements that the model or the memory has no room for.
fn refuse(
    options: &BenchOptions,
    checkpoint: &Checkpoint,
    pages: usize,
    rows: usize,
    sequences: usize,
    place: &Place,
) -> Result<(), WorkerError> {
    let config = checkpoint.config();
    let longest = options.prompts.iter().copied().max().unwrap_or(0).max(options.context);
    let context = Model::context_tokens(config, None);
    if longest >= context {
        return Err(WorkerError::Model(format!(
            "{longest} tokens do not fit into the model's context of {context}; ask for shorter prompts (--prefill, --context)"
        )));
    }
    let available = match place {
        Place::Gpu(gpu) => gpu.memory_bytes,
        Place::Cpu | Place::Reference => Machine::default().memory().available,
    };
    let weights = checkpoint.held_bytes(options.model.held);
    let kv = Model::page_bytes(config, options.model.kv_format).saturating_mul(pages as u64);
    let needed = weights.saturating_add(kv).saturating_add(Model::activation_bytes(config, rows, sequences));
    if available > 0 && needed > available {
        return Err(WorkerError::Model(format!(
            "{needed} bytes are needed (weights {weights}, KV of {} tokens {kv}) and {available} are available; ask for fewer sequences \
             (--decode), shorter prompts (--prefill) or fewer bits (--quantize int8, int4)",
            pages * PAGE_TOKENS
        )));
    }
    Ok(())
}

/// Threads that the device will have.
fn threads(options: &ModelOptions) -> usize {
    if options.threads > 0 { options.threads } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

/// Instruction path that the device will take.
fn path(options: &ModelOptions) -> Path {
    match options.path {
        Path::Auto => CpuDevice::paths_available().into_iter().next().unwrap_or(Path::Portable),
        path => path,
    }
}

/// Measures the machine's limits.
fn measure(threads: usize, path: Path) -> Result<MachineLimits, WorkerError> {
    let available = Machine::default().memory().available;
    let bytes = READ_BYTES[usize::from(available < PLENTY_BYTES)];
    Ok(limits::measure(threads, &[], path, bytes, clock)?)
}

/// Measures the bandwidth of a GPU's memory, in 10⁹ bytes per second.
fn bandwidth(gpu: &Gpu) -> Result<f64, WorkerError> {
    let bytes = COPY_BYTES.min(gpu.memory_bytes / 8) as usize;
    Ok(cuda::bandwidth(gpu, bytes, clock)? / 1e9)
}

/// Seconds since the first call in this process.
fn clock() -> f64 {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().as_secs_f64()
}

/// Time that `work` takes at least. For integer products and on GPUs only the time of reading is known, so nothing is where arithmetic may be the
/// limit.
fn bound(limits: BenchLimits, work: Work, is_integer: bool) -> Option<(f64, BoundBy)> {
    let memory = work.bytes / limits.gigabytes() / 1e9;
    let Some((gflops, _)) = limits.arithmetic() else {
        return (work.operations <= MEMORY_BOUND * work.bytes).then_some((memory, BoundBy::Memory));
    };
    let arithmetic = work.operations / gflops / 1e9;
    match (memory >= arithmetic, is_integer) {
        (true, _) => Some((memory, BoundBy::Memory)),
        (false, false) => Some((arithmetic, BoundBy::Arithmetic)),
        (false, true) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> BenchOptions {
        let model = ModelOptions { threads: 1, ..ModelOptions::default() };
        BenchOptions { model, prompts: vec![40], batches: vec![1, 3], context: 10 }
    }

    #[test]
    fn the_demo_model_is_timed() {
        let mut stages = Vec::new();
        let report = bench(&options(), &mut |stage| stages.push(stage)).expect("a report");
        assert_eq!((report.model.as_str(), report.architecture, report.threads), (DEMO_MODEL, "Qwen3ForCausalLM", 1));
        let sizes = |all: &[Timed]| all.iter().map(|timed| timed.size).collect::<Vec<_>>();
        assert_eq!((sizes(&report.prefill), sizes(&report.decode)), (vec![40], vec![1, 3]));
        for timed in report.prefill.iter().chain(&report.decode) {
            assert!(
                timed.seconds > 0.0 && timed.rate() > 0.0 && timed.share().is_some_and(f64::is_finite),
                "{timed:?}"
            );
        }
        stages.retain(|stage| !matches!(stage, BenchStage::Loading(..)));
        let [limits, rest @ ..] = stages.as_slice() else { panic!("no stages") };
        assert_eq!(*limits, BenchStage::Limits);
        assert_eq!(rest, [BenchStage::Prefill(40), BenchStage::Decode(1), BenchStage::Decode(3)]);
    }

    #[test]
    fn what_has_no_room_is_refused_with_what_helps() {
        let long = BenchOptions { prompts: vec![8192], ..options() };
        let refused = |options: &BenchOptions| bench(options, &mut |_| {}).expect_err("refused").to_string();
        let said = refused(&long);
        assert!(said.contains("8192 tokens") && said.contains("--prefill"), "{said}");
        let wide = BenchOptions { batches: vec![100_000_000], ..options() };
        let said = refused(&wide);
        assert!(said.contains("are available") && said.contains("--decode"), "{said}");
    }

    #[test]
    fn the_larger_of_two_times_bounds_a_step() {
        let limits = MachineLimits { gflops: 100.0, instruction: "fma", gigabytes: 10.0 };
        let of_gpu = |operations| bound(BenchLimits::Gpu { gigabytes: 10.0 }, Work { operations, bytes: 1e10 }, false);
        assert_eq!(of_gpu(1e12), Some((1.0, BoundBy::Memory)));
        assert_eq!(of_gpu(1.1e12), None, "arithmetic may be the limit");
        let limits = BenchLimits::Cpu(limits);
        let bound = |operations, bytes, is_integer| bound(limits, Work { operations, bytes }, is_integer);
        assert_eq!(bound(1e11, 1e9, false), Some((1.0, BoundBy::Arithmetic)));
        assert_eq!(bound(1e11, 2e10, false), Some((2.0, BoundBy::Memory)));
        assert_eq!(bound(1e11, 1e9, true), None, "integers are multiplied faster than this limit");
        assert_eq!(bound(1e9, 2e10, true), Some((2.0, BoundBy::Memory)));
    }
}
