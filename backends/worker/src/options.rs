//! Model that a worker is asked to load, with what of the machine, and the sizes of the engine that follow.

use crate::adapters::{AdapterSource, OrderedSource};
use penstock_engine::EngineConfig;
use penstock_engine::checkpoint::ModelConfig;
use penstock_engine::models::Model;
use penstock_kernels::cpu;
use penstock_kernels::{Held, KvFormat, Limits};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

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
    pub(crate) fn has_adapters(&self) -> bool {
        !self.adapters.is_empty() || !self.ordered_adapters.is_empty()
    }

    /// Returns true if the worker computes on the CPU where others hold the GPU that it has been given.
    pub(crate) fn gives_way(&self) -> bool {
        self.device == DeviceChoice::Auto && !self.keeps_to_gpu
    }
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
