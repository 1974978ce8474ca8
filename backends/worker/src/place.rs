//! Device that computes a model: which one it is, and how it is made.

use crate::config::WorkerError;
use crate::options::{DeviceChoice, ModelOptions};
use crate::plan::Plan;
use penstock_engine::checkpoint::Checkpoint;
use penstock_kernels::cpu::{CpuDevice, CpuOptions};
use penstock_kernels::cuda::{self, CudaDevice, Gpu};
use penstock_kernels::host::WeightCopy;
use penstock_kernels::reference::ReferenceDevice;
use penstock_kernels::{Device, Feature, Held, KernelError, KvFormat, Limits};
use penstock_machine::{Bound, Machine, Memory};
use tracing::{info, warn};

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
pub(crate) fn if_free(gpu: Gpu, memory: Result<(u64, u64), KernelError>, plan: impl FnOnce(Memory) -> Plan) -> Place {
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
pub(crate) fn device_memory((available, total): (u64, u64)) -> Memory {
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
pub(crate) fn leaves_core_idle(options: &ModelOptions) -> bool {
    let (threads, pins) = threads(options, Machine::default().cores_max());
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    pins.is_none() && threads > 0 && threads < cores
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::open;
    use crate::options::engine_config;

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
}
