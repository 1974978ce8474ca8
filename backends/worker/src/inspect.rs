//! Facts about a model and this machine without loading anything: for `penstock check`, and so that `penstock serve`
//! refuses an unloadable model before it starts a worker.

use crate::adapters::{self, Named};
use crate::config::WorkerError;
use crate::gpu::{self, Monitor};
use crate::model::open;
use crate::options::{ModelOptions, engine_config, sizes};
use crate::place::{Place, device, place};
use crate::plan::{Plan, bound_name};
use crate::weights;
use penstock_engine::models::Model;
use penstock_kernels::cpu::{self, CpuDevice};
use penstock_kernels::cuda;
use penstock_kernels::host::{CopyError, CopyKey, key_of, restore};
use penstock_kernels::{Held, KvFormat, PAGE_TOKENS};
use penstock_machine::{Bound, Machine, Memory};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Facts about a model that could be loaded.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Name of the architecture, `architectures[0]`.
    pub architecture: &'static str,
    /// Bytes of all weights in the checkpoint.
    pub weights_bytes: u64,
    /// Format in which the checkpoint stores the weights.
    pub weight_format: String,
    /// Type to which the device rounds some weights; `None` if all keep their type.
    pub rounded_to: Option<&'static str>,
    /// Bytes of the weights as the device would hold them with matrices rounded to 8 bits (`int8`), and to 4 (`int4`).
    pub if_rounded: [(&'static str, u64); 2],
    /// Adapters that would be loaded beside the model.
    pub adapters: Vec<AdapterSummary>,
    /// Memory plan of one worker.
    pub plan: Plan,
    /// True if workers of one machine can share the packed weights: those of the CPU can.
    pub shares_weights: bool,
    /// True if a GPU computes the model, in its own memory.
    pub is_gpu: bool,
    /// Name of the bound of the memory, for a person; `None` if the system does not report how much there is.
    pub bound: Option<String>,
    /// Longest sequence in tokens, regardless of memory.
    pub context_tokens: usize,
    /// Bytes of KV per token, over all layers.
    pub kv_bytes_per_token: u64,
    /// Device and instruction path, for a person to read.
    pub device: String,
}

/// Facts about an adapter that could be loaded.
#[derive(Clone, Debug)]
pub struct AdapterSummary {
    /// Name of the model that the adapter makes of the model.
    pub name: String,
    /// Rank of the adapter.
    pub rank: usize,
    /// Bytes that the adapter takes in memory.
    pub bytes: u64,
}

impl From<&Named> for AdapterSummary {
    fn from(named: &Named) -> Self {
        Self { name: named.name.clone(), rank: named.adapter.rank(), bytes: named.adapter.bytes() }
    }
}

/// Opens and checks checkpoint, adapters and device. Cost: reads the configs and the headers of the weights, starts the CPU's threads or the GPU's driver.
/// On a GPU nothing is allocated, so its memory counts as free.
///
/// # Errors
/// [`WorkerError`] with file, tensor and reason, or why the device cannot be used.
pub fn inspect(options: &ModelOptions) -> Result<Summary, WorkerError> {
    let (checkpoint, _) = open(options.model.as_deref())?;
    let adapters = adapters::open(&options.adapters, &checkpoint)?;
    let engine = engine_config(options, checkpoint.config());
    let place = place(options, &checkpoint)?;
    let (info, memory) = match &place {
        Place::Gpu(gpu) => {
            let memory = Memory { available: gpu.memory_bytes, bound: Bound::Device(gpu.memory_bytes) };
            (cuda::info(gpu), memory)
        }
        Place::Cpu | Place::Reference => {
            (device(options, &place, sizes(&engine), None)?.info(), Machine::default().memory())
        }
    };
    let config = checkpoint.config();
    let asked = (options.context_tokens > 0).then_some(options.context_tokens);
    Ok(Summary {
        architecture: checkpoint.architecture(),
        weights_bytes: checkpoint.weights_bytes(),
        weight_format: checkpoint.weight_format(),
        if_rounded: [("int8", Held::Int8), ("int4", Held::Int4)]
            .map(|(name, held)| (name, checkpoint.held_bytes(held))),
        plan: Plan::new(options, &checkpoint, &engine, memory, (adapters::bytes(&adapters), false)),
        adapters: adapters.iter().map(AdapterSummary::from).collect(),
        shares_weights: matches!(place, Place::Cpu),
        is_gpu: matches!(place, Place::Gpu(_)),
        bound: (memory.bound != Bound::Unknown).then(|| bound_name(memory.bound)),
        rounded_to: (options.held == Held::Stored && checkpoint.rounded_bytes(info.weights) > 0)
            .then_some(info.weights.name()),
        context_tokens: Model::context_tokens(config, asked),
        kv_bytes_per_token: Model::page_bytes(config, options.kv_format) / PAGE_TOKENS as u64,
        device: info.name,
    })
}

/// Returns true if a GPU would compute the model of these options. Cost: opens the checkpoint and, unless the CPU is asked for, starts the GPU's driver.
///
/// # Errors
/// [`WorkerError`]: the checkpoint cannot be opened, or the device not be used.
pub fn is_on_gpu(options: &ModelOptions) -> Result<bool, WorkerError> {
    let (checkpoint, _) = open(options.model.as_deref())?;
    Ok(matches!(place(options, &checkpoint)?, Place::Gpu(_)))
}

/// Key of the packed weights that a worker of these options would share: a digest of all that their bytes depend on; `None`: no weights are shared, or
/// the file `program` is not the program that runs, whose key may differ. Cost: as [`inspect`], without the CPU's threads.
///
/// # Errors
/// [`WorkerError`]: the checkpoint cannot be opened, or the device not be used.
pub fn weights_key(options: &ModelOptions, program: &Path) -> Result<Option<CopyKey>, WorkerError> {
    if !weights::is_this_program(program) {
        return Ok(None);
    }
    let (checkpoint, _) = open(options.model.as_deref())?;
    match place(options, &checkpoint)? {
        Place::Cpu => Ok(Some(weights::key(options, &checkpoint)?)),
        Place::Gpu(_) | Place::Reference => Ok(None),
    }
}

/// Key under which packed weights were sealed in `memory`; `None`: no worker has.
pub fn weights_key_of(memory: &OwnedFd) -> Option<CopyKey> {
    key_of(memory).ok()
}

/// Fills memory with packed weights that were kept under `key` elsewhere, and seals it; see [`penstock_kernels::host::restore`]. False: the bytes
/// are no packed weights under the key. Memory that was not sealed is empty again.
///
/// # Errors
/// A piece could not be read, or the system refused the memory.
pub fn restore_weights(
    memory: &OwnedFd,
    key: &CopyKey,
    sizes: (usize, usize),
    threads: usize,
    read: &(dyn Fn(usize, &mut [u8]) -> std::io::Result<()> + Sync),
) -> Result<bool, String> {
    match restore(memory, key, sizes, threads, read) {
        Ok(()) => Ok(true),
        Err(CopyError::Table | CopyError::OtherKey) => Ok(false),
        Err(error) => Err(crate::chain(&error)),
    }
}

/// Form in which matrices are held, by its name: `none` (as they are stored), `int8` or `int4`.
pub fn held(name: &str) -> Option<Held> {
    match name {
        "none" => Some(Held::Stored),
        "int8" => Some(Held::Int8),
        "int4" => Some(Held::Int4),
        _ => None,
    }
}

/// Form of keys and values, by its name: `bf16` or `int8`.
pub fn kv_format(name: &str) -> Option<KvFormat> {
    KvFormat::named(name)
}

/// Instruction path by its name; `auto` decides at start.
///
/// # Errors
/// [`WorkerError::Device`] for an unknown name. ([`inspect`] checks whether this machine has the path.)
pub fn cpu_path(name: &str) -> Result<cpu::Path, WorkerError> {
    Ok(name.parse()?)
}

/// A GPU of this machine, for a person to read.
#[derive(Clone, Debug)]
pub struct GpuLines {
    /// Index, name, memory, compute capability, driver and kernels.
    pub about: String,
    /// Power, memory in use, utilization, clocks and temperature; an error says why they are not known.
    pub now: Result<String, String>,
}

/// GPUs that this process sees; an error says why there is none. Cost: starts the driver and loads the management library, some seconds at most.
///
/// # Errors
/// The reason, for a person to read.
pub fn gpus() -> Result<Vec<GpuLines>, String> {
    let all = cuda::gpus().map_err(|why| why.to_string())?;
    let now = |gpu| {
        let monitor = Monitor::open(gpu).map_err(|why| crate::chain(&why))?;
        gpu::line(&monitor.read()).ok_or_else(|| "the GPU tells nothing".to_owned())
    };
    Ok(all.iter().map(|gpu| GpuLines { about: format!("{}: {gpu}", gpu.index), now: now(gpu) }).collect())
}

/// Names of the instruction paths that this machine has, fastest first.
pub fn cpu_paths() -> Vec<&'static str> {
    CpuDevice::paths_available().into_iter().map(cpu::Path::name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::DeviceChoice;

    #[test]
    fn the_demo_model_is_summed_up() {
        let summary = inspect(&ModelOptions { threads: 1, ..Default::default() }).expect("it can be loaded");
        assert_eq!((summary.architecture, summary.weight_format.as_str()), ("Qwen3ForCausalLM", "bf16"));
        assert_eq!((summary.context_tokens, summary.kv_bytes_per_token), (8192, 6 * 2 * 2 * 64 * 2));
        assert_eq!(summary.rounded_to, None);
        let [int8, int4] = summary.if_rounded.map(|(_, bytes)| bytes);
        assert!(int8 < summary.plan.weights_bytes * 6 / 10 && int4 < int8 * 8 / 10);
        assert!(summary.plan.fits() && summary.plan.context_tokens == 8192 && summary.bound.is_some());
        assert!(cpu_paths().contains(&"portable") && cpu_path("auto").is_ok() && cpu_path("mmx").is_err());
    }

    #[test]
    fn weights_that_a_device_would_round_are_named() {
        let folder = std::env::temp_dir().join(format!("penstock-inspect-{}", std::process::id()));
        let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::copy(demo.join("config.json"), folder.join("config.json")).expect("copied");
        let mut weights = std::fs::read(demo.join("model.safetensors")).expect("the weights");
        // Each tensor gets a type name of the same length, so the header keeps its length.
        let places: Vec<usize> = (0..64 << 10).filter(|&at| weights[at..].starts_with(b"\"BF16\"")).collect();
        places.iter().for_each(|&at| weights[at..at + 6].copy_from_slice(b"\"F16\" "));
        std::fs::write(folder.join("model.safetensors"), weights).expect("written");
        let look = |device| {
            let options = ModelOptions { model: Some(folder.clone()), device, threads: 1, ..Default::default() };
            inspect(&options).map(|summary| (summary.weight_format, summary.rounded_to))
        };
        let seen = [look(DeviceChoice::Cpu), look(DeviceChoice::Reference)];
        std::fs::remove_dir_all(&folder).expect("removed");
        let [cpu, reference] = seen.map(|seen| seen.expect("it can be loaded"));
        assert_eq!(cpu, ("f16".to_owned(), Some("bf16")));
        assert_eq!(reference, ("f16".to_owned(), None));
    }

    #[test]
    fn what_no_worker_could_load_is_refused() {
        let missing = ModelOptions { model: Some("/nonexistent/model".into()), ..Default::default() };
        assert!(inspect(&missing).is_err_and(|error| error.to_string().contains("/nonexistent/model")));
    }
}
