//! Loading of an engine from a checkpoint folder, or from the demo model embedded in the binary.

use crate::adapters::{self, AdapterSource, OrderedSource};
use crate::config::{Build, ReadyInfo, WorkerError};
use crate::grammars;
use crate::plan::Plan;
use crate::shelf::{self, Opened, Room, Shelf};
use crate::weights::{self, Shared};
use penstock_engine::adapter::Adapter;
use penstock_engine::checkpoint::{Checkpoint, ModelConfig, read_file};
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_engine::{Engine, EngineConfig, Forward};
use penstock_gguf::Gguf;
use penstock_kernels::cpu::{self, CpuDevice, CpuOptions};
use penstock_kernels::cuda::{self, CudaDevice, Gpu};
use penstock_kernels::host::WeightCopy;
use penstock_kernels::reference::ReferenceDevice;
use penstock_kernels::{Device, DeviceInfo, Feature, Held, KernelError, KvFormat, Limits};
use penstock_machine::{Bound, Machine, Memory};
use penstock_proto::frames::{Loading, OrderedAdapter};
use std::borrow::Cow;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tracing::{info, warn};

/// Name of the model embedded in the binary.
pub const DEMO_MODEL: &str = "penstock-demo";

macro_rules! demo_file {
    ($name:literal) => {
        include_bytes!(concat!("../../../models/penstock-demo/", $name))
    };
}

/// Device that computes the model, as `--device` names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// An NVIDIA GPU that can serve the model and whose kernels have been measured, or else the CPU.
    #[default]
    Auto,
    /// An NVIDIA GPU, and nothing else.
    Cuda,
    /// The CPU, with the kernels of its instruction path.
    Cpu,
    /// The f32 reference: slow, obvious, for comparison.
    Reference,
}

impl std::str::FromStr for DeviceChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(DeviceChoice::Auto),
            "cpu" => Ok(DeviceChoice::Cpu),
            "cuda" => Ok(DeviceChoice::Cuda),
            "reference" => Ok(DeviceChoice::Reference),
            _ => Err(format!("{name:?} is not a device: auto, cpu, cuda, reference")),
        }
    }
}

/// Model to load, and the share of the machine that it may use. Zeros mean "choose".
#[derive(Clone, Debug, Default)]
pub struct ModelOptions {
    /// Checkpoint folder or GGUF file; `None` means the demo model.
    pub model: Option<PathBuf>,
    /// Adapters to load beside the model.
    pub adapters: Vec<AdapterSource>,
    /// True if a gateway may order adapters while the worker runs.
    pub adapter_orders: bool,
    /// Adapters that are held as if they had been ordered.
    pub ordered_adapters: Vec<OrderedSource>,
    /// Form in which the matrices that products read are held.
    pub held: Held,
    /// Device that computes the model.
    pub device: DeviceChoice,
    /// Instruction path of the CPU device, which selects its kernels.
    pub path: cpu::Path,
    /// Threads; 0: one per core of `cores`, or of the machine, no more than the quota of the cgroup allows.
    pub threads: usize,
    /// Cores to pin to, if there are enough for the threads.
    pub cores: Vec<usize>,
    /// Longest sequence; 0: the model's, as far as memory goes.
    pub context_tokens: usize,
    /// Form of keys and values.
    pub kv_format: KvFormat,
    /// Memory for KV; 0: a quarter of what is available, or a share of half of it among several workers.
    pub kv_bytes_max: u64,
    /// Share of a GPU's memory that the worker may take in all, above 0 and up to 1; `None`: what is free, KV as the device's rule has it.
    pub gpu_memory_share: Option<f64>,
    /// Sequences that run at once; 0: the engine's default.
    pub sequences_max: usize,
    /// Tokens of one step; 0: the engine's default.
    pub batch_tokens: usize,
    /// Most draft tokens of a sequence in one step; see [`EngineConfig::prompt_lookup`].
    pub prompt_lookup: usize,
    /// Workers that share this machine's memory; 0 and 1: this one alone.
    pub machine_share: u64,
    /// True if fewer workers than `machine_share` may run: their number follows the load.
    pub machine_share_varies: bool,
    /// True if a worker that `auto` has given a GPU without room for it ends, and is started again, instead of taking the CPU.
    pub keeps_to_gpu: bool,
    /// Memory for packed weights that workers share; `None`: this worker packs its own.
    pub weights: Option<Arc<OwnedFd>>,
}

impl ModelOptions {
    /// Returns true if there are adapters from the start, by whatever way.
    fn has_adapters(&self) -> bool {
        !self.adapters.is_empty() || !self.ordered_adapters.is_empty()
    }

    /// Returns true if the worker computes on the CPU where others hold the GPU that it has been given.
    fn gives_way(&self) -> bool {
        self.device == DeviceChoice::Auto && !self.keeps_to_gpu
    }
}

/// Loader of the process's engine.
pub fn build(options: ModelOptions) -> Build {
    Box::new(move |progress| load(&options, progress))
}

/// Loads the model, and starts its engine.
pub(crate) fn load(
    options: &ModelOptions,
    progress: &mut dyn FnMut(Loading),
) -> Result<(Engine, ReadyInfo), WorkerError> {
    progress(Loading { stage: "checking the checkpoint".into(), ..Default::default() });
    let (checkpoint, tokenizer) = open(options.model.as_deref())?;
    let tokenizer = tokenizer.read()?;
    let adapters = adapters::open(&options.adapters, &checkpoint)?;
    let ordered: Vec<(OrderedAdapter, Opened)> = options
        .ordered_adapters
        .iter()
        .map(|OrderedSource(wanted)| (wanted.clone(), shelf::open(wanted, checkpoint.config())))
        .collect();
    let ordered_bytes = ordered.iter().flat_map(|(_, opened)| opened).map(Adapter::bytes).fold(0, u64::saturating_add);
    // Read beside the weights; the index for masks is made when the worker is ready.
    let (ends, rows) = (checkpoint.eos_token_ids(), checkpoint.config().vocab_size);
    // A model of whole texts says nothing that a grammar could mask.
    let has_masks = !checkpoint.config().is_whole();
    let vocabulary = std::thread::spawn(move || {
        let json = tokenizer.into_json();
        let hash = json.as_deref().map(hash).unwrap_or_default();
        (hash, json.filter(|_| has_masks).and_then(|json| grammars::load(&json, &ends, rows)))
    });
    let mut config = engine_config(options, checkpoint.config());
    let sizes = sizes(&config);
    let adapter_bytes = adapters::bytes(&adapters).saturating_add(ordered_bytes);
    let place = match place(options, &checkpoint)? {
        Place::Gpu(gpu) if options.gives_way() => {
            let memory = cuda::memory_bytes(&gpu);
            if_free(gpu, memory, |memory| Plan::new(options, &checkpoint, &config, memory, (adapter_bytes, false)))
        }
        place => place,
    };
    let mut shared = match &place {
        Place::Cpu => weights::shared(options, &checkpoint, progress),
        Place::Gpu(_) | Place::Reference => None,
    };
    let memory = match &place {
        Place::Gpu(gpu) => device_memory(cuda::memory_bytes(gpu)?),
        Place::Cpu | Place::Reference => Machine::default().memory(),
    };
    let is_packed = shared.as_ref().is_some_and(|shared| shared.copy.is_read());
    let plan = Plan::new(options, &checkpoint, &config, memory, (adapter_bytes, is_packed));
    plan.tell(memory);
    plan.refuse_device(memory)?;
    let limits = ModelLimits {
        context_tokens: (options.context_tokens > 0).then_some(options.context_tokens),
        kv: KvBudget::Pages(plan.pages),
        rows_max: sizes.rows_max,
        sampled_max: sizes.sampled_max,
        held: options.held,
        kv_format: options.kv_format,
    };
    config.masks_beside = matches!(place, Place::Gpu(_)) || leaves_core_idle(options);
    let mut tell = |step: penstock_engine::models::Progress<'_>| {
        let (bytes_done, bytes_total) = (step.bytes_done, step.bytes_total);
        progress(Loading { stage: "loading weights".into(), bytes_done, bytes_total });
    };
    let began = Instant::now();
    let (model, used) = loop {
        let device = device(options, &place, sizes, shared.as_ref().map(|shared| &shared.copy))?;
        let loaded = Model::load(&checkpoint, device, limits, &mut tell);
        let why = match (loaded, &shared) {
            (Ok(model), None) => break (model, None),
            (Ok(model), Some(Shared { copy, key })) => match copy.finish(key) {
                Ok(used) => break (model, used),
                Err(why) => why,
            },
            (Err(error), shared) => match shared.as_ref().and_then(|shared| shared.copy.differs()) {
                Some(why) => why,
                None => return Err(WorkerError::Model(error.to_string())),
            },
        };
        weights::refused(&why);
        shared = None;
    };
    let geometry = model.geometry();
    let name = options.model.as_deref().map_or(DEMO_MODEL.into(), model_name);
    let DeviceInfo { name: device, weights: held, .. } = model.device().info();
    let rounded_bytes = checkpoint.rounded_bytes(held);
    if rounded_bytes > 0 {
        let (stored, held) = (checkpoint.weight_format(), held.name());
        warn!(
            model = name,
            stored, held, rounded_bytes, "weights are rounded: the device cannot hold their values exactly"
        );
    }
    info!(
        model = name,
        numerics = geometry.numerics,
        pages = geometry.pages,
        context_tokens = geometry.context_tokens,
        weights = weights::how(used),
        seconds = began.elapsed().as_secs_f64(),
        "checkpoint loaded"
    );
    let takes_orders = options.adapter_orders && model.device().has(Feature::Adapters);
    let mut info = ReadyInfo {
        adapters: Vec::new(),
        shelf: None,
        model: name,
        tokenizer_hash: Vec::new(),
        model_hash: checkpoint.model_hash().to_vec(),
        numerics_id: geometry.numerics,
        vocab_size: geometry.vocab_size as u32,
        device,
        gpu: match place {
            Place::Gpu(gpu) => Some(gpu),
            Place::Cpu | Place::Reference => None,
        },
        weights: used,
    };
    let mut engine = Engine::new(Box::new(model), &config);
    info.adapters = adapters::load(&adapters, &mut engine)?;
    if takes_orders {
        let left = plan.left_bytes() / options.machine_share.max(1);
        let room = Room::new(left.saturating_add(ordered_bytes), sizes.rows_max);
        info.shelf = Some(Shelf::start(Arc::new(checkpoint.config().clone()), room, ordered, &mut engine));
    }
    let (hash, found) = vocabulary.join().map_err(|_| WorkerError::Panicked("reading the vocabulary".into()))?;
    info.tokenizer_hash = hash;
    found.into_iter().for_each(|grammars| engine.set_grammars(grammars));
    if engine.probe()? { Ok((engine, info)) } else { Err(WorkerError::Broken) }
}

/// Settings of the engine that `options` ask for with a model.
pub(crate) fn engine_config(options: &ModelOptions, model: &ModelConfig) -> EngineConfig {
    let mut config = EngineConfig::default();
    if options.sequences_max > 0 {
        config.sequences_max = options.sequences_max;
    }
    if options.batch_tokens > 0 {
        config.batch_tokens = options.batch_tokens;
        config.chunk_tokens = options.batch_tokens;
    }
    // A step needs a row for each sequence, and logits for each that decodes.
    config.batch_tokens = config.batch_tokens.max(config.sequences_max);
    if model.is_whole() {
        // A text is computed whole, so a step has room for the longest.
        let asked = (options.context_tokens > 0).then_some(options.context_tokens);
        config.batch_tokens = config.batch_tokens.max(Model::context_tokens(model, asked));
    }
    config.prompt_lookup = options.prompt_lookup;
    config
}

/// Draft tokens of one step, over all sequences: a device has few rows to spare, and each needs memory for its logits.
const DRAFTS_MAX: usize = 32;

/// Sizes of the largest step.
pub(crate) fn sizes(config: &EngineConfig) -> Limits {
    let drafts = if config.prompt_lookup > 0 { DRAFTS_MAX } else { 0 };
    Limits { rows_max: config.batch_tokens, sampled_max: (config.sequences_max + drafts).max(32) }
}

/// Largest tokenizer.json, as in the gateway. The largest in public models is 33 MB (Gemma 3).
const TOKENIZER_BYTES_MAX: usize = 128 << 20;

/// Content of a tokenizer.json: the demo model's lies in the binary.
type TokenizerJson = Cow<'static, [u8]>;

/// Tokenizer of a checkpoint.
pub(crate) enum Tokenizer {
    /// Content of a tokenizer.json.
    Json(TokenizerJson),
    /// Checkpoint folder whose tokenizer.json is yet to be read.
    Folder(PathBuf),
    /// No tokenizer.json: token ids alone can be served.
    None,
    /// Header of the GGUF file, of which a tokenizer.json is yet to be made: some tenths of a second for 150 thousand tokens.
    Gguf(Box<Gguf>),
}

impl Tokenizer {
    /// Reads the tokenizer.json of a folder.
    ///
    /// # Errors
    /// [`WorkerError::Model`]: the file is there, and is too large, no file of the folder, or cannot be read.
    fn read(self) -> Result<Self, WorkerError> {
        let Self::Folder(folder) = self else { return Ok(self) };
        let read = read_file(&folder, "tokenizer.json", TOKENIZER_BYTES_MAX);
        let bytes = read.map_err(|error| WorkerError::Model(error.to_string()))?;
        Ok(bytes.map_or(Self::None, |bytes| Self::Json(Cow::Owned(bytes))))
    }

    /// Content of the tokenizer.json, which has been read. The gateway, which needs the vocabulary for texts, refuses one that cannot be read: token ids can be served without it.
    fn into_json(self) -> Option<TokenizerJson> {
        match self {
            Self::Json(json) => Some(json),
            Self::Folder(_) | Self::None => None,
            Self::Gguf(gguf) => vocabulary_of(&gguf),
        }
    }
}

/// Opens the checkpoint at `path` (a folder or a GGUF file; `None`: the demo model), and finds its tokenizer, which is not read: a gateway that only checks a
/// model needs none of it. A checkpoint without one can be served too, by token ids alone.
pub(crate) fn open(path: Option<&Path>) -> Result<(Checkpoint, Tokenizer), WorkerError> {
    let refused = |error: penstock_engine::checkpoint::CheckpointError| WorkerError::Model(error.to_string());
    let Some(path) = path else {
        let files: [(&str, &'static [u8]); 3] = [
            ("config.json", demo_file!("config.json")),
            ("generation_config.json", demo_file!("generation_config.json")),
            ("model.safetensors", demo_file!("model.safetensors")),
        ];
        let checkpoint = Checkpoint::from_memory(&files).map_err(refused)?;
        return Ok((checkpoint, Tokenizer::Json(Cow::Borrowed(demo_file!("tokenizer.json")))));
    };
    if let Some(file) = penstock_gguf::locate(path).map_err(|error| WorkerError::Model(error.to_string()))? {
        let gguf = Gguf::open(&file).map_err(|error| WorkerError::Model(error.to_string()))?;
        let checkpoint = Checkpoint::open_gguf(&gguf).map_err(refused)?;
        return Ok((checkpoint, Tokenizer::Gguf(Box::new(gguf))));
    }
    let checkpoint = Checkpoint::open(path).map_err(refused)?;
    Ok((checkpoint, Tokenizer::Folder(path.to_owned())))
}

/// Vocabulary of a GGUF file as a tokenizer.json; `None`, with a warning: the vocabulary cannot be read.
fn vocabulary_of(gguf: &Gguf) -> Option<TokenizerJson> {
    match penstock_gguf::text_files(gguf) {
        Ok(files) => Some(Cow::Owned(files.tokenizer_json)),
        Err(error) => {
            let reason = error.to_string();
            let lost = "this worker follows no grammars and enforces no reasoning budgets";
            warn!(reason, "the vocabulary of the GGUF file cannot be read: {lost}");
            None
        }
    }
}

fn hash(bytes: &[u8]) -> Vec<u8> {
    blake3::hash(bytes).as_bytes().to_vec()
}

/// Name of the folder or file, as in `/models/qwen3-0.6b`.
pub(crate) fn model_name(path: &Path) -> String {
    penstock_gguf::model_name(path).unwrap_or_else(|| path.display().to_string())
}

/// Device that computes a model, once it is decided.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Cpu,
    Gpu(Gpu),
    Reference,
}

/// Decides on the device.
///
/// # Errors
/// [`KernelError::Unavailable`] if `cuda` is asked for and cannot be had for this model on this machine.
pub(crate) fn place(options: &ModelOptions, checkpoint: &Checkpoint) -> Result<Place, WorkerError> {
    let unavailable = |what: &str, why: String| Err(KernelError::Unavailable { what: what.into(), why }.into());
    if options.kv_format != KvFormat::Own && checkpoint.config().features().any(|feature| feature == Feature::Latents) {
        let why = "the model's attention is over latents (MLA), which are kept in bf16; use kv_format = \"bf16\"";
        return unavailable(Feature::IntegerKv.name(), why.into());
    }
    match options.device {
        DeviceChoice::Reference => Ok(Place::Reference),
        DeviceChoice::Cpu => Ok(Place::Cpu),
        DeviceChoice::Cuda if options.has_adapters() => {
            unavailable("the device cuda", "adapters have no GPU kernels; use the device cpu".into())
        }
        DeviceChoice::Cuda if checkpoint.config().experts.is_some() => {
            unavailable("the device cuda", "mixtures of experts have no GPU kernels; use the device cpu".into())
        }
        DeviceChoice::Cuda if options.kv_format != KvFormat::Own => unavailable(
            "the device cuda",
            "KV of 8 bits has no GPU kernels; use the device cpu, or kv_format = \"bf16\"".into(),
        ),
        DeviceChoice::Cuda => match cuda::probe() {
            Ok(gpu) => Ok(Place::Gpu(told(gpu))),
            Err(why) => unavailable("the device cuda", why.to_string()),
        },
        DeviceChoice::Auto => Ok(auto(options, checkpoint, cuda::probe)),
    }
}

/// Takes a GPU that has room for the model and kernels that have been measured for it, or else the CPU, and logs why.
fn auto(
    options: &ModelOptions,
    checkpoint: &Checkpoint,
    probe: impl FnOnce() -> Result<Gpu, cuda::ProbeError>,
) -> Place {
    let (format, config) = (checkpoint.weight_format(), checkpoint.config());
    let (head_dim, has_experts) = (config.head_dim, config.experts.is_some());
    if options.has_adapters() {
        info!("the CPU computes: there are no GPU kernels for adapters");
        return Place::Cpu;
    }
    if options.kv_format != KvFormat::Own {
        info!("the CPU computes: there are no GPU kernels for KV of 8 bits");
        return Place::Cpu;
    }
    if let Some(lacking) = config.features().find(|feature| !cuda::has(*feature)) {
        info!(model_has = lacking.name(), "the CPU computes: there are no GPU kernels for a part of the model");
        return Place::Cpu;
    }
    let is_quantized = checkpoint.has_integers() || config.quantization.is_some();
    if options.held != Held::Stored || is_quantized || head_dim > cuda::HEAD_DIM_MAX || has_experts {
        info!(
            format,
            head_dim,
            has_experts,
            "the CPU computes: there are GPU kernels for bf16, f16 and f32, heads of 256 values at most and no experts"
        );
        return Place::Cpu;
    }
    let gpu = match probe() {
        Ok(gpu) => gpu,
        Err(why) => {
            let reason = why.to_string();
            info!(reason, "the CPU computes: no GPU can be used");
            return Place::Cpu;
        }
    };
    let (name, kernels) = (gpu.name.as_str(), gpu.kernels.unwrap_or_default());
    if !gpu.is_measured {
        info!(
            gpu = name,
            kernels,
            "the CPU computes: these kernels have been tested on a model of the GPU alone; --device cuda takes the GPU"
        );
        return Place::Cpu;
    }
    let least_bytes = Plan::least_bytes(options, checkpoint);
    let share = options.gpu_memory_share.unwrap_or(1.0);
    let memory_bytes = if share < 1.0 { (gpu.memory_bytes as f64 * share) as u64 } else { gpu.memory_bytes };
    if memory_bytes < least_bytes {
        info!(gpu = name, memory_bytes, least_bytes, "the CPU computes: the GPU's memory is too small for the model");
        return Place::Cpu;
    }
    Place::Gpu(told(gpu))
}

/// GPU that a worker has been given by `auto`, if it can be used now and has room for the plan; the CPU otherwise, with the reason in the log. `memory`: free
/// and in all, in bytes.
fn if_free(gpu: Gpu, memory: Result<(u64, u64), KernelError>, plan: impl FnOnce(Memory) -> Plan) -> Place {
    let name = gpu.name.as_str();
    let memory = match memory {
        Ok(memory) => device_memory(memory),
        Err(why) => {
            let reason = crate::chain(&why);
            warn!(gpu = name, reason, "the CPU computes: the GPU cannot be used now");
            return Place::Cpu;
        }
    };
    let plan = plan(memory);
    if !plan.fits() {
        let (free_bytes, needed_bytes) = (plan.most_bytes(), plan.total_bytes());
        warn!(
            gpu = name,
            free_bytes, needed_bytes, "the CPU computes: too little of the GPU's memory is free for the model"
        );
        return Place::Cpu;
    }
    Place::Gpu(gpu)
}

/// Memory of a GPU that has so many bytes free, and so many in all.
fn device_memory((available, total): (u64, u64)) -> Memory {
    Memory { available, bound: Bound::Device(total) }
}

/// Logs the GPU that is used, and what is not known of its kernels yet.
fn told(gpu: Gpu) -> Gpu {
    let (name, kernels) = (gpu.name.as_str(), gpu.kernels.unwrap_or_default());
    info!(gpu = name, memory_bytes = gpu.memory_bytes, kernels, "a GPU computes");
    if !gpu.is_measured {
        warn!(
            kernels,
            "these kernels have been tested on a model of the GPU alone, not on one: answers may be wrong or inexact on resume; --device cpu \
             avoids them"
        );
    }
    gpu
}

/// Makes the device. `weights`: memory in which the CPU puts its packed matrices; `None`: its own.
pub(crate) fn device(
    options: &ModelOptions,
    place: &Place,
    limits: Limits,
    weights: Option<&WeightCopy>,
) -> Result<Box<dyn Device>, WorkerError> {
    match place {
        Place::Reference => Ok(Box::new(ReferenceDevice::new(limits))),
        Place::Gpu(gpu) => Ok(Box::new(CudaDevice::new(gpu, limits)?)),
        Place::Cpu => {
            let (threads, cores) = threads(options, Machine::default().cores_max());
            let cpu = CpuOptions { threads, cores, path: options.path };
            let device = CpuDevice::new(cpu, limits)?;
            Ok(Box::new(match weights {
                Some(copy) => device.with_weights(copy.clone()),
                None => device,
            }))
        }
    }
}

/// Number of threads (0 means "choose"), and the cores that they are pinned to, if any.
///
/// `quota`: cores' worth of time that the cgroup allows. The worker's share of it decides where the machine has more
/// cores; threads are then not pinned, because other workers under the quota would be pinned to the same first cores.
fn threads(options: &ModelOptions, quota: Option<usize>) -> (usize, Option<Vec<usize>>) {
    let share = quota.map(|quota| (quota / options.machine_share.max(1) as usize).max(1));
    match share {
        Some(share) if options.threads == 0 && share < options.cores.len() => (share, None),
        _ => {
            let threads = if options.threads == 0 { options.cores.len() } else { options.threads };
            let is_enough = threads > 0 && options.cores.len() >= threads;
            (threads, is_enough.then(|| options.cores[..threads].to_vec()))
        }
    }
}

/// Returns true if the device leaves a core idle on which masks can be computed meanwhile: with fewer threads than
/// cores, none of them pinned.
fn leaves_core_idle(options: &ModelOptions) -> bool {
    let (threads, pins) = threads(options, Machine::default().cores_max());
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    pins.is_none() && threads > 0 && threads < cores
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_kernels::PAGE_TOKENS;
    use penstock_proto::frames::{ChoiceStart, Generate, Sampling};
    use std::sync::Mutex;
    use std::time::Duration;

    fn demo(change: impl FnOnce(&mut ModelOptions)) -> (Engine, ReadyInfo, Vec<Loading>) {
        let mut options = ModelOptions { threads: 1, ..Default::default() };
        change(&mut options);
        let mut told = Vec::new();
        let (engine, info) = load(&options, &mut |loading| told.push(loading)).expect("the demo model loads");
        (engine, info, told)
    }

    /// Log of a test, as its lines.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no panic").extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_tokenizer_is_read_by_who_needs_it_and_from_the_folder_alone() {
        let folder = std::env::temp_dir().join(format!("penstock-tokenizer-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("a folder");
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(demo.join(name), folder.join(name)).expect("copied");
        }
        let tokenizer = || open(Some(&folder)).expect("the checkpoint is whole").1;
        assert!(matches!(tokenizer().read(), Ok(Tokenizer::None)));
        // Without an end, a text of gigabytes would be in memory before anything is known of it.
        std::os::unix::fs::symlink("/dev/zero", folder.join("tokenizer.json")).expect("a link");
        let why = tokenizer().read().err().expect("refused").to_string();
        assert!(why.contains("tokenizer.json: is a link to /dev/zero"), "{why}");
        std::fs::remove_file(folder.join("tokenizer.json")).expect("removed");
        std::fs::File::create(folder.join("tokenizer.json")).expect("a file").set_len(1 << 40).expect("a hole");
        let why = tokenizer().read().err().expect("refused").to_string();
        assert!(why.contains("has at most 134217728"), "{why}");
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn a_vocabulary_that_cannot_be_read_is_named_in_the_log() {
        let bytes = penstock_gguf::Writer::default()
            .key("tokenizer.ggml.model", &penstock_gguf::Value::Text("rwkv".into()))
            .key("tokenizer.ggml.tokens", &penstock_gguf::Value::Texts(vec!["a".into()]))
            .finish();
        let gguf = Gguf::read("m.gguf", &mut &bytes[..], bytes.len() as u64).expect("a header");
        let lines = Lines::default();
        let to = lines.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || to.clone()).finish();
        let read = tracing::subscriber::with_default(log, || vocabulary_of(&gguf));
        let log = String::from_utf8(lines.0.lock().expect("no panic").clone()).expect("text");
        assert!(read.is_none());
        for part in ["WARN", "m.gguf: tokenizer.ggml.model: ", "rwkv", "follows no grammars"] {
            assert!(log.contains(part), "{part} is not in: {log}");
        }
    }

    #[test]
    fn auto_takes_a_gpu_that_is_measured_and_has_room() {
        let (options, checkpoint) = (ModelOptions::default(), open(None).expect("opens").0);
        let least = Plan::least_bytes(&options, &checkpoint);
        assert!(least > checkpoint.weights_bytes(), "activations and a page come on top");
        let gpu = |memory_bytes, is_measured| Gpu {
            index: 0,
            name: "a GPU".into(),
            capability: (9, 0),
            memory_bytes,
            driver: (13, 0),
            kernels: Some("sm_90a"),
            is_measured,
        };
        let takes = |options: &ModelOptions, found| matches!(auto(options, &checkpoint, || found), Place::Gpu(_));
        assert!(takes(&options, Ok(gpu(least, true))));
        assert!(!takes(&options, Ok(gpu(least - 1, true))), "too small");
        assert!(!takes(&options, Ok(gpu(least, false))), "never run");
        let half = ModelOptions { gpu_memory_share: Some(0.5), ..Default::default() };
        assert!(takes(&half, Ok(gpu(2 * least, true))) && !takes(&half, Ok(gpu(2 * least - 2, true))));
        assert!(!takes(&options, Err(cuda::ProbeError::NoDevice)));
        let int8 = ModelOptions { held: Held::Int8, ..Default::default() };
        assert!(!takes(&int8, Ok(gpu(1 << 40, true))), "no kernels");
        let int8 = ModelOptions { kv_format: KvFormat::Int8, ..Default::default() };
        assert!(!takes(&int8, Ok(gpu(1 << 40, true))), "no kernels");
    }

    #[test]
    fn a_gpu_of_auto_that_others_hold_gives_way_to_the_cpu() {
        let (options, checkpoint) = (ModelOptions::default(), open(None).expect("opens").0);
        let least = Plan::least_bytes(&options, &checkpoint);
        let config = engine_config(&options, checkpoint.config());
        let gpu = Gpu {
            index: 0,
            name: "a GPU".into(),
            capability: (9, 0),
            memory_bytes: 64 << 30,
            driver: (13, 0),
            kernels: Some("sm_90a"),
            is_measured: true,
        };
        let takes = |options: &ModelOptions, memory| {
            let plan = |memory| Plan::new(options, &checkpoint, &config, memory, (0, false));
            matches!(if_free(gpu.clone(), memory, plan), Place::Gpu(_))
        };
        assert!(takes(&options, Ok((64 << 30, 64 << 30))) && takes(&options, Ok((least, 64 << 30))));
        assert!(!takes(&options, Ok((least - 1, 64 << 30))), "another process holds the rest");
        let (device, error) = ("a GPU".into(), "CUDA_ERROR_DEVICE_UNAVAILABLE".into());
        let exclusive = KernelError::Fault { device, call: "cuDevicePrimaryCtxRetain", error };
        assert!(!takes(&options, Err(exclusive)), "another process holds all of it");
        // The GPU is about to be free, or another device is no choice: the plan then refuses what has no room.
        let is_kept = |device, keeps_to_gpu| !ModelOptions { device, keeps_to_gpu, ..Default::default() }.gives_way();
        assert_eq!([false, true].map(|keeps| is_kept(DeviceChoice::Auto, keeps)), [false, true]);
        assert!(is_kept(DeviceChoice::Cuda, false));
        let much = ModelOptions { kv_bytes_max: 1 << 30, ..Default::default() };
        assert!(takes(&much, Ok((2 << 30, 64 << 30))) && !takes(&much, Ok((1 << 30, 64 << 30))), "KV of a fixed size");
    }

    #[test]
    fn the_demo_model_loads_and_speaks() {
        let (mut engine, info, told) = demo(|_| {});
        assert_eq!((info.model.as_str(), info.vocab_size, info.tokenizer_hash.len()), ("penstock-demo", 4096, 32));
        let last = told.last().expect("progress was told");
        assert_eq!((last.stage.as_str(), last.bytes_done), ("loading weights", last.bytes_total));
        assert!(last.bytes_total > 9_000_000);
        let sampling = Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 5,
            logprobs: -1,
            prompt_logprobs: -1,
            ..Default::default()
        };
        engine.submit(Generate {
            request: 1,
            prompt: vec![4088, 5, 6],
            choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
            sampling: Some(sampling),
            ..Default::default()
        });
        let mut tokens = 0;
        while engine.has_work() {
            let step = engine.step(&|| Duration::ZERO);
            tokens += step.outputs.iter().map(|output| output.tokens.len()).sum::<usize>();
        }
        assert_eq!(tokens, 5);
    }

    #[test]
    fn memory_for_kv_follows_the_options() {
        let (engine, ..) = demo(|options| options.kv_bytes_max = 1 << 20);
        let config = open(None).expect("opens").0;
        let page = Model::page_bytes(config.config(), KvFormat::Own);
        assert_eq!(u64::from(engine.state().blocks_total), (1 << 20) / page);
        let (engine, ..) = demo(|options| options.sequences_max = 2);
        let context = Model::context_tokens(config.config(), None);
        assert_eq!(engine.state().blocks_total as usize, 2 * 2 * context / PAGE_TOKENS, "no more than is of use");
    }

    #[test]
    fn threads_follow_the_quota_of_the_cgroup() {
        let of = |threads, cores: usize, share, quota| {
            let cores = (0..cores).collect();
            threads_and_pins(&ModelOptions { threads, cores, machine_share: share, ..Default::default() }, quota)
        };
        assert_eq!(of(0, 32, 2, Some(4)), (2, false), "half of the quota, on any of its cores");
        assert_eq!(of(0, 32, 8, Some(4)), (1, false));
        assert_eq!(of(0, 2, 2, Some(64)), (2, true));
        assert_eq!(of(0, 2, 2, None), (2, true));
        assert_eq!(of(3, 32, 2, Some(4)), (3, true), "what was asked for is done");
        assert_eq!(of(0, 0, 1, Some(4)), (0, false), "the device asks the system, which knows the quota");
    }

    fn threads_and_pins(options: &ModelOptions, quota: Option<usize>) -> (usize, bool) {
        let (threads, cores) = threads(options, quota);
        (threads, cores.is_some_and(|cores| cores.len() == threads))
    }

    #[test]
    fn a_folder_that_is_no_model_is_refused_with_its_file() {
        let options = ModelOptions { model: Some("/nonexistent/model".into()), ..Default::default() };
        let error = load(&options, &mut |_| {}).err().expect("refused");
        assert!(error.to_string().contains("/nonexistent/model"), "{error}");
    }
}
