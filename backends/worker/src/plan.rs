//! The memory plan of a worker: weights, activations, KV, and what is left of the memory that there is.

use crate::config::WorkerError;
use crate::options::{DeviceChoice, ModelOptions, engine_config, sizes};
use penstock_engine::EngineConfig;
use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::Model;
use penstock_kernels::{KvFormat, Limits, PAGE_TOKENS};
use penstock_machine::{Bound, Memory};
use tracing::{info, warn};

/// Default share of the available memory for KV, in percent.
const KV_PERCENT: u64 = 25;
/// Default share of a GPU's memory beside weights and activations for KV, in percent: nothing else needs it, and the rest is for results of products.
const DEVICE_KV_PERCENT: u64 = 90;
/// Share of the memory beside weights and activations that one sequence at full length may take, in percent; of several workers' own shares of it on a CPU.
const WHOLE_PERCENT: u64 = 80;

/// Memory that a worker will use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Weights in the form in which the device holds them, those of adapters included.
    pub weights_bytes: u64,
    /// Part of the weights that another worker has packed into shared memory already: it is not in the available memory any more.
    pub there_bytes: u64,
    /// Activations of the largest step, and what threads expand of weights that are held as codes.
    pub activation_bytes: u64,
    /// KV cache.
    pub kv_bytes: u64,
    /// Pages of the KV cache.
    pub pages: usize,
    /// Longest sequence that the KV cache holds, in tokens.
    pub context_tokens: usize,
    /// Context that was asked for, or the model's own.
    pub context_wanted: usize,
    /// Number of sequences of `context_tokens` that fit at once.
    pub sequences: usize,
    /// Memory that is available on the machine, within the limits of its cgroups: all workers share it.
    pub available_bytes: u64,
    /// Memory of the GPU that `gpu_memory_share` leaves to this worker, in bytes, or its part of what all workers of the pool may take; `None`: no share is
    /// set and the worker is alone, KV has a fixed size, or that part is not free or too small for a pool whose number of workers follows the load; or
    /// another device computes.
    pub share_bytes: Option<u64>,
}

impl Plan {
    /// Plans a worker's memory. KV of an encoder is that of one step; KV of a decoder gets as many pages as memory allows, at most as many as can be of use (twice the need of all sequences
    /// at full length, the rest being prefix cache), and at least one sequence of the requested context, as far as the worker's share of the memory goes. `adapter_bytes`: of all
    /// adapters; `is_packed`: the model's weights are in shared memory already.
    pub(crate) fn new(
        options: &ModelOptions,
        checkpoint: &Checkpoint,
        engine: &EngineConfig,
        memory: Memory,
        (adapter_bytes, is_packed): (u64, bool),
    ) -> Self {
        let config = checkpoint.config();
        let page = Model::page_bytes(config, kv_format(options)).max(1);
        let asked = (options.context_tokens > 0).then_some(options.context_tokens);
        let wanted = Model::context_tokens(config, asked);
        let (sizes, context) = (sizes(engine), wanted.div_ceil(PAGE_TOKENS));
        let weights_bytes = checkpoint.held_bytes(options.held).saturating_add(adapter_bytes);
        let there_bytes = if is_packed { weights_bytes - adapter_bytes } else { 0 };
        let activation_bytes = activation_bytes(options, checkpoint, sizes);
        let share = options.machine_share.max(1);
        let taken = (weights_bytes - there_bytes).saturating_add(activation_bytes);
        let share_bytes = match (memory.bound, options.gpu_memory_share) {
            (Bound::Device(total), Some(share)) => Some((total as f64 * share) as u64),
            // Workers that start together all see the same memory, so each takes its part of the whole. Where that is not free, others than these hold
            // memory, and each takes its part of what it sees: several that start at that moment may plan for more than there is, and those that come too
            // late are refused the memory, end, and plan with what is left when they are started again. Of workers whose number follows the load, few may
            // run: a part without room for one of them bounds nothing.
            (Bound::Device(total), None) if share > 1 && options.kv_bytes_max == 0 => {
                let part = total / 100 * DEVICE_KV_PERCENT / share;
                let least = taken.saturating_add(page);
                let bounds = part <= memory.available && (part >= least || !options.machine_share_varies);
                bounds.then_some(part)
            }
            _ => None,
        };
        let free = memory.available.saturating_sub(taken);
        // A worker with a share of its own has it whole; others on the GPU have theirs.
        let (left, share) = match share_bytes {
            Some(bytes) => (free.min(bytes.saturating_sub(taken)), 1),
            None => (free, share),
        };
        let pages = if options.kv_bytes_max > 0 {
            usize::try_from(options.kv_bytes_max / page).unwrap_or(usize::MAX)
        } else if config.is_whole() {
            // Nothing is kept from step to step: the texts of one, each with a page that is not full.
            sizes.rows_max.div_ceil(PAGE_TOKENS) + engine.sequences_max
        } else {
            let percent = match memory.bound {
                Bound::Device(_) => DEVICE_KV_PERCENT / share,
                _ => KV_PERCENT.min(50 / share),
            };
            let affordable = (free / 100 * percent).min(left);
            let affordable = usize::try_from(affordable / page).unwrap_or(usize::MAX);
            let useful = context.saturating_mul(engine.sequences_max).saturating_mul(2);
            // On a CPU all workers see the same memory, most of which none has touched yet; on a GPU each one has its share, or takes a part of what it finds free.
            let sharing = if matches!(memory.bound, Bound::Device(_)) { 1 } else { share };
            let whole = usize::try_from(left / 100 * WHOLE_PERCENT / sharing / page).unwrap_or(usize::MAX);
            affordable.min(useful).max(context.min(whole)).max(1)
        };
        Self {
            weights_bytes,
            there_bytes,
            activation_bytes,
            kv_bytes: page.saturating_mul(pages as u64),
            pages,
            context_tokens: wanted.min(pages.saturating_mul(PAGE_TOKENS)),
            context_wanted: wanted,
            sequences: (pages / context.min(pages).max(1)).min(engine.sequences_max),
            available_bytes: memory.available,
            share_bytes,
        }
    }

    /// Least memory in which a worker can hold the model: weights, activations and one page of KV.
    pub(crate) fn least_bytes(options: &ModelOptions, checkpoint: &Checkpoint) -> u64 {
        let sizes = sizes(&engine_config(options, checkpoint.config()));
        let activation_bytes = activation_bytes(options, checkpoint, sizes);
        let page_bytes = Model::page_bytes(checkpoint.config(), kv_format(options));
        checkpoint.held_bytes(options.held).saturating_add(activation_bytes).saturating_add(page_bytes)
    }

    /// Tokens that the KV cache holds, over all sequences.
    pub fn kv_tokens(&self) -> usize {
        self.pages.saturating_mul(PAGE_TOKENS)
    }

    /// Bytes of all parts.
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes.saturating_add(self.activation_bytes).saturating_add(self.kv_bytes)
    }

    /// Bytes of the parts that are not there yet.
    fn wanted_bytes(&self) -> u64 {
        self.total_bytes().saturating_sub(self.there_bytes)
    }

    /// Bytes of the available memory that no part takes.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.most_bytes().saturating_sub(self.wanted_bytes())
    }

    /// Memory that this worker may take, in bytes: what is available, and no more than its share.
    pub fn most_bytes(&self) -> u64 {
        self.share_bytes.map_or(self.available_bytes, |share| share.min(self.available_bytes))
    }

    /// True if there is memory for all of it, within the worker's share.
    pub fn fits(&self) -> bool {
        self.wanted_bytes() <= self.most_bytes()
    }

    /// Refuses a plan that a GPU has no room for: its allocations would fail one by one. (A machine may have more memory than it says.)
    pub(crate) fn refuse_device(&self, memory: Memory) -> Result<(), WorkerError> {
        let Bound::Device(total) = memory.bound else { return Ok(()) };
        if self.fits() {
            return Ok(());
        }
        let Self { weights_bytes, activation_bytes, kv_bytes, available_bytes, .. } = *self;
        let share = match self.share_bytes {
            Some(share) => format!(
                ", of which gpu_memory_share leaves {share} to this worker (without the key all workers of the pool share {DEVICE_KV_PERCENT} %)"
            ),
            None => String::new(),
        };
        let more = if self.share_bytes.is_some() { "a larger gpu_memory_share allows more, " } else { "" };
        Err(WorkerError::Model(format!(
            "the GPU has {available_bytes} of {total} bytes free{share}, and {} are needed: weights {weights_bytes}, activations \
             {activation_bytes}, KV {kv_bytes}; {more}a smaller context_tokens or kv_bytes_max needs less, --device cpu none of it (there is no \
             sharing of a model between GPU and CPU)",
            self.total_bytes()
        )))
    }

    /// Logs the plan, and warns where it needs more memory than there is.
    pub(crate) fn tell(&self, memory: Memory) {
        let limit = bound_name(memory.bound);
        let Self { weights_bytes, activation_bytes, kv_bytes, available_bytes, .. } = *self;
        info!(
            available_bytes,
            bound = limit,
            weights_bytes,
            there_bytes = self.there_bytes,
            activation_bytes,
            kv_bytes,
            share_bytes = self.share_bytes,
            "memory planned for this worker"
        );
        if !self.fits() {
            warn!(
                available_bytes,
                bound = limit,
                needed_bytes = self.wanted_bytes(),
                "the model needs more memory than is available, and the kernel may kill this process; `penstock check` says what helps: fewer \
                 workers, a smaller kv_bytes_max, quantize = \"int8\" or \"int4\", a file of the model with fewer bits per weight"
            );
        }
    }
}

/// Bytes of the activations of the largest step, and of the codes that threads expand in it.
fn activation_bytes(options: &ModelOptions, checkpoint: &Checkpoint, sizes: Limits) -> u64 {
    let threads = match (options.threads, options.cores.len()) {
        (0, 0) => std::thread::available_parallelism().map_or(1, usize::from),
        (0, cores) => cores,
        (threads, _) => threads,
    };
    let expanded = checkpoint.expanded_bytes(options.held).saturating_mul(threads as u64);
    Model::activation_bytes(checkpoint.config(), sizes.rows_max, sizes.sampled_max).saturating_add(expanded)
}

/// Form of keys and values as they are held: the reference rounds them and holds the numbers.
fn kv_format(options: &ModelOptions) -> KvFormat {
    if options.device == DeviceChoice::Reference { KvFormat::Own } else { options.kv_format }
}

/// Name of the bound of the memory, for a person.
pub(crate) fn bound_name(bound: Bound) -> String {
    match bound {
        Bound::Cgroup(limit) => format!("cgroup limit of {limit} bytes"),
        Bound::Device(bytes) => format!("GPU with {bytes} bytes"),
        Bound::Machine => "free memory of the machine".into(),
        Bound::Unknown => "unknown to the system".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::open;
    use penstock_kernels::Held;

    fn plan(available: u64, change: impl FnOnce(&mut ModelOptions)) -> Plan {
        let mut options = ModelOptions { context_tokens: 512, ..Default::default() };
        change(&mut options);
        let checkpoint = open(None).expect("opens").0;
        let memory = Memory { available, bound: Bound::Cgroup(available) };
        Plan::new(&options, &checkpoint, &engine_config(&options, checkpoint.config()), memory, (0, false))
    }

    #[test]
    fn keys_and_values_of_8_bits_take_what_they_are_held_in() {
        let tokens = |device, kv_format| {
            let plan = plan(1 << 40, |options| {
                (options.device, options.kv_format, options.kv_bytes_max) = (device, kv_format, 64 << 20);
            });
            plan.kv_tokens()
        };
        let [own, int8] = [KvFormat::Own, KvFormat::Int8].map(|format| tokens(DeviceChoice::Cpu, format));
        // Heads of 64 values.
        assert!((own * 185 / 100..=own * 190 / 100).contains(&int8), "{own} {int8}");
        assert_eq!(tokens(DeviceChoice::Reference, KvFormat::Int8), own, "the reference holds numbers");
    }

    #[test]
    fn the_limit_of_a_cgroup_bounds_the_memory_for_kv() {
        let beside = plan(1 << 40, |_| {});
        let beside = beside.weights_bytes + beside.activation_bytes;
        // 64 MiB beside the weights: a quarter for KV, an eighth each where four workers share it.
        let room = 64 << 20;
        let one = plan(beside + room, |_| {}).kv_bytes;
        assert!((room / 5..=room / 4).contains(&one), "{one}");
        let four = plan(beside + room, |options| options.machine_share = 4).kv_bytes;
        assert!((room / 10..=room / 8).contains(&four), "{four}");
        let memory = Memory { available: beside + room, bound: Bound::Cgroup(beside + room) };
        let (options, checkpoint) =
            (ModelOptions { context_tokens: 512, ..Default::default() }, open(None).expect("opens").0);
        let adapted =
            Plan::new(&options, &checkpoint, &engine_config(&options, checkpoint.config()), memory, (room / 2, false))
                .kv_bytes;
        assert!((room / 10..=room / 8).contains(&adapted), "adapters take their part: {adapted}");
        // Too little for anything: one page, which the load then refuses or the system does.
        assert_eq!(plan(0, |_| {}).pages, 1);
        assert!(!plan(0, |_| {}).fits() && plan(1 << 40, |_| {}).fits());
        let page = plan(0, |_| {}).kv_bytes;
        // A cache for half of the context holds one sequence of what is served.
        let small = plan(1 << 40, |options| options.kv_bytes_max = 8 * page);
        assert_eq!((small.context_tokens, small.context_wanted, small.sequences), (256, 512, 1));
    }

    #[test]
    fn workers_that_share_a_machine_have_room_together_for_long_sequences() {
        let of = |available, workers| {
            let change = |options: &mut ModelOptions| {
                (options.machine_share, options.context_tokens, options.sequences_max) = (workers, 8192, 1);
            };
            plan(available, change)
        };
        let (beside, page) = (of(1 << 40, 1), of(0, 1).kv_bytes);
        let whole = page * (8192 / PAGE_TOKENS) as u64;
        // One worker has a sequence of the whole context in it, two have not.
        let room = whole * 4 / 3;
        for workers in [1, 2, 3, 8] {
            let plan = of(beside.weights_bytes + beside.activation_bytes + room, workers);
            let share = (room / 100 * 80 / workers).min(whole);
            assert!((share - page..=share).contains(&plan.kv_bytes), "{workers}: {plan:?}");
            assert_eq!(plan.context_tokens, plan.kv_tokens().min(8192), "{workers}: no longer than what fits");
        }
        assert_eq!(of(beside.weights_bytes + beside.activation_bytes + room, 1).context_tokens, 8192);
    }

    #[test]
    fn a_gpu_gives_most_of_its_memory_to_kv() {
        let checkpoint = open(None).expect("opens").0;
        let of = |available, share| {
            let options = ModelOptions { context_tokens: 4096, machine_share: share, ..Default::default() };
            let memory = Memory { available, bound: Bound::Device(1 << 30) };
            Plan::new(&options, &checkpoint, &engine_config(&options, checkpoint.config()), memory, (0, false))
        };
        let plan = of(64 << 20, 1);
        let left = plan.available_bytes - plan.weights_bytes - plan.activation_bytes;
        assert!((left / 100 * 89..=left / 100 * 90).contains(&plan.kv_bytes) && plan.fits(), "{plan:?}");
        let half = of(64 << 20, 2).kv_bytes;
        assert!((left / 100 * 44..=left / 100 * 45).contains(&half), "{half}");
        let memory = Memory { available: 1 << 20, bound: Bound::Device(1 << 30) };
        let refused = of(1 << 20, 1).refuse_device(memory).expect_err("weights alone are larger").to_string();
        assert!(refused.contains("1048576 of 1073741824 bytes free"), "{refused}");
        assert!(plan.refuse_device(memory).is_ok());
    }

    #[test]
    fn workers_of_a_gpu_that_start_together_have_room_together() {
        let checkpoint = open(None).expect("opens").0;
        let plan = |total, available, machine_share| {
            // More KV is of use than there is memory.
            let options = ModelOptions { context_tokens: 512, machine_share, ..Default::default() };
            let engine = EngineConfig { sequences_max: 256, ..engine_config(&options, checkpoint.config()) };
            let memory = Memory { available, bound: Bound::Device(total) };
            (Plan::new(&options, &checkpoint, &engine, memory, (0, false)), memory)
        };
        let alone = plan(1 << 40, 1 << 40, 1).0;
        let least = alone.weights_bytes + alone.activation_bytes;
        for workers in [2, 3, 4] {
            // Weights are most of what there is: half of the rest is too much for each.
            let total = least * workers * 5 / 4;
            let first = plan(total, total, workers).0;
            assert!(first.fits() && first.total_bytes() * workers <= total / 100 * 91, "{workers}: {first:?}");
            assert!(first.total_bytes() * workers >= total / 100 * 85, "{workers}: nothing lies idle: {first:?}");
            // One that comes back beside the others has as much as before.
            let last = plan(total, total - first.total_bytes() * (workers - 1), workers).0;
            assert_eq!((last.kv_bytes, last.fits()), (first.kv_bytes, true), "{workers}");
        }
        let (small, memory) = plan(least * 2, least * 2, 2);
        let refused = small.refuse_device(memory).expect_err("two have no room").to_string();
        assert!(refused.contains("all workers of the pool share 90 %"), "{refused}");
        // Of KV of a fixed size each may have as much as there is room for: a part of 90 % is for KV that is chosen.
        let room = |options: &ModelOptions, total: u64| {
            let memory = Memory { available: total, bound: Bound::Device(total) };
            let engine = EngineConfig { sequences_max: 256, ..engine_config(options, checkpoint.config()) };
            Plan::new(options, &checkpoint, &engine, memory, (0, false))
        };
        let fixed = |kv_bytes_max| ModelOptions { machine_share: 2, kv_bytes_max, ..Default::default() };
        let (total, kv) = (least * 10, least * 38 / 10);
        let (half, all) = (room(&fixed(kv), total), room(&fixed(kv * 3), total));
        assert!(half.fits() && half.total_bytes() > total / 100 * 45 && half.total_bytes() * 2 <= total, "{half:?}");
        assert!(!all.fits(), "{all:?}");
        // Few of the workers that there may be have room where all had none, and each has KV.
        let varies = |machine_share_varies| ModelOptions {
            context_tokens: 512,
            machine_share: 8,
            machine_share_varies,
            ..Default::default()
        };
        let few = room(&varies(true), least * 3);
        assert!(few.fits() && few.kv_bytes > least / 10 && few.total_bytes() * 2 <= least * 3, "{few:?}");
        assert!(!room(&varies(false), least * 3).fits());
        assert_eq!(
            room(&varies(true), least * 40).kv_bytes,
            room(&varies(false), least * 40).kv_bytes,
            "a part bounds KV"
        );
        // Another process holds most of the memory.
        let (beside, memory) = plan(least * 100, least * 3, 2);
        assert!(beside.refuse_device(memory).is_ok() && beside.kv_bytes <= least, "{beside:?}");
    }

    #[test]
    fn a_share_of_a_gpu_is_for_weights_activations_and_kv() {
        let checkpoint = open(None).expect("opens").0;
        let total = 128_u64 << 20;
        let of = |available, gpu_memory_share, machine_share| {
            // More KV is of use than there is memory.
            let context_tokens = 1 << 13;
            let options = ModelOptions { context_tokens, machine_share, gpu_memory_share, ..Default::default() };
            let memory = Memory { available, bound: Bound::Device(total) };
            let engine = EngineConfig { sequences_max: 256, ..engine_config(&options, checkpoint.config()) };
            Plan::new(&options, &checkpoint, &engine, memory, (0, false))
        };
        let page = Model::page_bytes(checkpoint.config(), KvFormat::Own);
        let first = of(total, Some(0.45), 2);
        let share = total / 100 * 45;
        assert!(first.total_bytes() <= share + 100 && first.total_bytes() + page > share, "{first:?}");
        assert!(first.fits() && first.share_bytes.is_some_and(|bytes| bytes.abs_diff(share) < 100));
        // A second worker with as much finds the rest free, and takes as much as the first.
        let second = of(total - first.total_bytes(), Some(0.45), 2);
        assert_eq!((second.kv_bytes, second.fits()), (first.kv_bytes, true));
        assert!(first.total_bytes() + second.total_bytes() <= total);
        // All of it is what a worker takes without the key: room for results of products stays free.
        assert_eq!(of(total, Some(1.0), 1).kv_bytes, of(total, None, 1).kv_bytes);
        assert_eq!(of(total, None, 1).share_bytes, None);
        let small = of(total, Some(0.05), 1);
        let refused = small.refuse_device(Memory { available: total, bound: Bound::Device(total) });
        let refused = refused.expect_err("the weights are larger").to_string();
        assert!(refused.contains("gpu_memory_share leaves 6710886 to this worker"), "{refused}");
        // A CPU has no share.
        let options = ModelOptions { gpu_memory_share: Some(0.01), ..Default::default() };
        let memory = Memory { available: total, bound: Bound::Machine };
        let engine = engine_config(&options, checkpoint.config());
        assert_eq!(Plan::new(&options, &checkpoint, &engine, memory, (0, false)).share_bytes, None);
    }

    #[test]
    fn weights_that_are_there_are_not_wanted_again() {
        let (checkpoint, _) = open(None).expect("the demo model");
        let options = ModelOptions::default();
        let of = |available, is_packed| {
            let memory = Memory { available, bound: Bound::Machine };
            let engine = engine_config(&options, checkpoint.config());
            Plan::new(&options, &checkpoint, &engine, memory, (0, is_packed))
        };
        let weights = of(1 << 32, false).weights_bytes;
        let (alone, beside) = (of((1 << 30) + weights, false), of(1 << 30, true));
        assert_eq!((alone.kv_bytes, alone.total_bytes()), (beside.kv_bytes, beside.total_bytes()), "the same plan");
        assert_eq!((alone.there_bytes, beside.there_bytes), (0, weights));
        assert_eq!(alone.left_bytes(), beside.left_bytes());
        let small = of(weights / 2, true);
        assert!(small.wanted_bytes() < small.total_bytes());
    }

    #[test]
    fn weights_of_8_bits_take_half_of_the_memory() {
        let (stored, int8) = (plan(1 << 32, |_| {}), plan(1 << 32, |options| options.held = Held::Int8));
        let ratio = int8.weights_bytes as f64 / stored.weights_bytes as f64;
        assert!((0.5..0.52).contains(&ratio), "{ratio}");
        assert_eq!((stored.context_tokens, stored.context_wanted), (512, 512));
        assert_eq!(stored.sequences, EngineConfig::default().sequences_max);
    }
}
