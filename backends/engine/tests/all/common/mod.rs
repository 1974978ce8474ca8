//! Helpers that run a model over token sequences cut in any way, and compare logits with goldens.

pub(crate) mod gguf;
pub(crate) mod weights;

use std::path::{Path, PathBuf};

use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_engine::{Forward, Geometry};
use penstock_kernels::cpu::{CpuDevice, CpuOptions, Path as CpuPath};
use penstock_kernels::reference::ReferenceDevice;
use penstock_kernels::{AdapterSlot, Device, Held, KvFormat, Limits, PAGE_TOKENS, Span, StepBatch};

/// Path of a file in the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

pub(crate) fn reference(limits: Limits) -> Box<dyn Device> {
    Box::new(ReferenceDevice::new(limits))
}

/// Loads a model on the device that `make` gives, with `pages` of KV and `rows` rows in a step.
pub(crate) fn load(
    checkpoint: &Checkpoint,
    make: &dyn Fn(Limits) -> Box<dyn Device>,
    pages: usize,
    rows: usize,
) -> Model {
    load_with(checkpoint, make, pages, rows, None)
}

/// Loads a model as [`load`] does, served with `context_tokens`.
pub(crate) fn load_with(
    checkpoint: &Checkpoint,
    make: &dyn Fn(Limits) -> Box<dyn Device>,
    pages: usize,
    rows: usize,
    context_tokens: Option<usize>,
) -> Model {
    load_as(checkpoint, make, (pages, KvFormat::Own), rows, context_tokens)
}

/// Loads a model as [`load_with`] does, with keys and values of a format.
pub(crate) fn load_as(
    checkpoint: &Checkpoint,
    make: &dyn Fn(Limits) -> Box<dyn Device>,
    (pages, kv_format): (usize, KvFormat),
    rows: usize,
    context_tokens: Option<usize>,
) -> Model {
    let limits = ModelLimits {
        context_tokens,
        kv: KvBudget::Pages(pages),
        rows_max: rows,
        sampled_max: rows,
        held: Held::Stored,
        kv_format,
    };
    let device = make(Limits { rows_max: rows, sampled_max: rows });
    Model::load(checkpoint, device, limits, &mut |_| {}).expect("the checkpoint loads")
}

/// One sequence being computed: its tokens, its pages, and its progress.
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    pub(crate) pages: Vec<u32>,
    pub(crate) computed: usize,
    pub(crate) adapter: Option<AdapterSlot>,
}

impl Sequence {
    /// Makes a sequence of `tokens` with nothing computed, on consecutive pages from `first_page`.
    pub(crate) fn new(tokens: &[u32], first_page: u32) -> Self {
        let count = tokens.len().div_ceil(PAGE_TOKENS) as u32;
        Self { tokens: tokens.to_vec(), pages: (first_page..first_page + count).collect(), computed: 0, adapter: None }
    }
}

/// Runs one step: `take` tokens of each sequence. Returns the logits of every row, `[rows][vocab]`, in order.
pub(crate) fn step(model: &mut Model, work: &mut [(&mut Sequence, usize)]) -> Vec<Vec<f32>> {
    let mut tokens = Vec::new();
    let mut spans = Vec::new();
    for (sequence, take) in work.iter() {
        let start = tokens.len();
        tokens.extend_from_slice(&sequence.tokens[sequence.computed..sequence.computed + take]);
        let context = sequence.computed + take;
        spans.push(Span {
            rows: start..tokens.len(),
            context,
            block_table: &sequence.pages,
            adapter: sequence.adapter,
        });
    }
    let sampled: Vec<usize> = (0..tokens.len()).collect();
    let batch = StepBatch { tokens: &tokens, spans: &spans, sampled: &sampled, ..Default::default() };
    let Geometry { vocab_size, .. } = model.geometry();
    let logits = model.forward(&batch, None).expect("a valid batch");
    let logits = logits.chunks_exact(vocab_size).map(<[f32]>::to_vec).collect();
    for (sequence, take) in work.iter_mut() {
        sequence.computed += *take;
    }
    logits
}

/// Logits at every position of `tokens`, computed in chunks of `chunk`.
pub(crate) fn logits_of(model: &mut Model, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    logits_with(model, None, tokens, chunk)
}

/// Logits as of [`logits_of`], with an adapter.
pub(crate) fn logits_with(
    model: &mut Model,
    adapter: Option<AdapterSlot>,
    tokens: &[u32],
    chunk: usize,
) -> Vec<Vec<f32>> {
    let mut sequence = Sequence { adapter, ..Sequence::new(tokens, 0) };
    let mut all = Vec::new();
    while sequence.computed < tokens.len() {
        let take = chunk.min(tokens.len() - sequence.computed);
        all.extend(step(model, &mut [(&mut sequence, take)]));
    }
    all
}

/// Log-probabilities of one row of logits, in f64.
pub(crate) fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&l| f64::from(l - highest).exp()).sum();
    logits.iter().map(|&l| f64::from(l - highest) - total.ln()).collect()
}

/// The token with the highest logit, the first of equals.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// Maker of a CPU device on `path` with `threads`.
pub(crate) fn cpu(path: CpuPath, threads: usize) -> MakeDevice {
    let options = CpuOptions { threads, cores: None, path };
    Box::new(move |limits| Box::new(CpuDevice::new(options.clone(), limits).expect("the path is available")))
}

/// Every path of the CPU device that this machine has, on one thread, by name.
pub(crate) fn cpu_paths() -> Vec<(String, MakeDevice)> {
    CpuDevice::paths_available().into_iter().map(|path| (path.name().to_owned(), cpu(path, 1))).collect()
}

/// Every path of every device that this machine has, by name.
pub(crate) fn devices() -> Vec<(String, MakeDevice)> {
    let mut all = cpu_paths();
    all.push(("reference".to_owned(), Box::new(reference)));
    all
}

/// Makes a device within limits.
pub(crate) type MakeDevice = Box<dyn Fn(Limits) -> Box<dyn Device>>;
