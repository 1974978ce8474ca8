//! `penstock check`: config, models and machine, without serving.

use std::path::Path;

use anyhow::{Context, bail};
use clap::Args;
use penstock_auth::Anonymous;
use penstock_config::{AdapterConfig, DeviceChoice, PoolConfig, Snapshot};
use penstock_pool::Follow;
use penstock_pool::weights_cache::WeightsCache;
use penstock_proxy::descriptors::{self, Share};
use penstock_proxy::fleet;
use penstock_proxy::start_checks::{self, CheckedBy};
use penstock_relay::TargetConfig;
use penstock_worker::inspect::{self, Summary};
use penstock_worker::{AdapterSource, ModelOptions, Plan, WorkerError};

use crate::serve::{ConfigArgs, state_dir, worker_command};
use crate::{demo, log};

const EXAMPLES: &str = "\
Examples:
  penstock check
  penstock check --config /etc/penstock.toml
  penstock check --model ~/models/Qwen3-0.6B
  penstock check --model ~/models/Qwen3-0.6B-Q4_K_M.gguf

Exit status 0: it would be served as shown. 1: everything that is wrong is listed. Ports that another process has, and servers elsewhere
(databases, providers, workers of other machines), are not asked.";

/// `penstock check`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
}

/// Prints the models and pools that would be served, or all faults.
pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<()> {
    let config = args.config.load()?;
    show_server(&config);
    let state_dir = state_dir(&config)?;
    show_weights_cache(&config, &state_dir);
    let mut faults = start_checks::faults(&config, &state_dir, CheckedBy::Person);
    faults.extend(log::check(&config.log_level).err().map(|error| format!("log.level: {error:#}")));
    let command = worker_command(std::env::current_exe().context("the path of this program")?, String::new());
    let mut on_gpu = Vec::new();
    for pool in &config.pools {
        println!("pool {}", pool.id);
        let said = |reason: String| format!("pool {}: {reason}", pool.id);
        match fleet::text(pool, demo::FILES) {
            Ok(text) => {
                let template = if text.has_chat_template() { "yes" } else { "no: only /v1/completions" };
                println!("  vocabulary      {} tokens", text.vocab_size());
                match text.task().name() {
                    "generate" => println!("  chat template   {template}"),
                    task => println!("  task            {task}"),
                }
                faults.extend(fleet::check(pool, &text, &command, &state_dir).err().map(said));
            }
            Err(reason) => faults.push(said(reason)),
        }
        if !pool.connect.is_empty() {
            println!("  workers         at {}", pool.connect.join(", "));
            pool.adapters.iter().for_each(|adapter| println!("  adapter         {}", adapter.name));
            continue;
        }
        match look(pool) {
            Ok(summary) => {
                show_model(&summary, pool);
                faults.extend(too_large(&summary, pool).map(said));
                on_gpu.extend(OnGpu::of(pool, &summary));
            }
            Err(error) => faults.push(format!("pool {}: {:#}", pool.id, anyhow::Error::from(error))),
        }
    }
    faults.extend(crowded(&on_gpu));
    show_models(&config);
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    println!("nothing is wrong");
    Ok(())
}

/// Summary of the model that a pool's workers would load.
fn look(pool: &PoolConfig) -> Result<Summary, WorkerError> {
    inspect::inspect(&options(pool)?)
}

/// Options of the model that a pool's workers load.
pub(crate) fn options(pool: &PoolConfig) -> Result<ModelOptions, WorkerError> {
    Ok(ModelOptions {
        model: pool.model.clone(),
        adapters: adapters(pool),
        held: inspect::held(&pool.quantize).unwrap_or_default(),
        kv_format: inspect::kv_format(&pool.kv_format).unwrap_or_default(),
        kv_bytes_max: pool.kv_bytes_max,
        gpu_memory_share: pool.gpu_memory_share(),
        sequences_max: pool.sequences_max as usize,
        prompt_lookup: pool.prompt_lookup as usize,
        machine_share: workers_max(pool) as u64,
        machine_share_varies: pool.replicas.follow == Follow::On,
        device: match pool.device {
            DeviceChoice::Auto => penstock_worker::DeviceChoice::Auto,
            DeviceChoice::Cpu => penstock_worker::DeviceChoice::Cpu,
            DeviceChoice::Cuda => penstock_worker::DeviceChoice::Cuda,
            DeviceChoice::Reference => penstock_worker::DeviceChoice::Reference,
        },
        path: inspect::cpu_path(&pool.path)?,
        threads: pool.threads,
        context_tokens: pool.context_tokens as usize,
        ..ModelOptions::default()
    })
}

/// Most workers that the pool may have on this machine: each has its share as if all of them ran.
fn workers_max(pool: &PoolConfig) -> usize {
    if pool.replicas.follow == Follow::On { pool.replicas.max } else { pool.workers }
}

fn adapters(pool: &PoolConfig) -> Vec<AdapterSource> {
    let source = |adapter: &AdapterConfig| AdapterSource { name: adapter.name.clone(), path: adapter.path.clone() };
    pool.adapters.iter().map(source).collect()
}

/// Bytes that the weights of a worker of the pool take in memory; an error says why it could not load them.
pub(crate) fn weights(pool: &PoolConfig) -> Result<u64, String> {
    refuse_early(pool).map_err(|error| format!("{error:#}"))?;
    look(pool).map(|summary| summary.plan.weights_bytes).map_err(|error| format!("{:#}", anyhow::Error::from(error)))
}

/// Refuses a pool whose local workers could not load their model: each of them would only fail with the same message.
pub(crate) fn refuse_early(pool: &PoolConfig) -> anyhow::Result<()> {
    if !pool.connect.is_empty() {
        return Ok(());
    }
    if let Some(path) = pool.model.as_ref().filter(|path| !path.exists()) {
        bail!("model {}: there is no such file or folder; {}", path.display(), missing_help(path));
    }
    look(pool).with_context(|| format!("pool {:?}", pool.id))?;
    Ok(())
}

/// Advice for a model path that does not exist: hub names, Ollama names and GGUF files are told apart.
fn missing_help(path: &Path) -> String {
    let text = path.display().to_string();
    let text = text.strip_prefix("hf.co/").or_else(|| text.strip_prefix("https://huggingface.co/")).unwrap_or(&text);
    let is_word = |part: &str| {
        !part.is_empty()
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
            && !part.starts_with('.')
    };
    let (name, tag) = text.split_once(':').map_or((text, None), |(name, tag)| (name, Some(tag)));
    match (name.split('/').collect::<Vec<_>>().as_slice(), tag) {
        ([owner, model], _) if is_word(owner) && is_word(model) => {
            format!("{text} is not among the pulled models (penstock models) either: `penstock pull {text}` fetches it from the hub")
        }
        ([model], Some(tag)) if is_word(model) && is_word(tag) => format!(
            "{text} looks like a name of Ollama's: `penstock pull ORG/REPO:QUANT` fetches a GGUF file of the model from a hub \
             (as ORG/{model}-GGUF:Q4_K_M)"
        ),
        _ => "give a checkpoint folder with config.json, *.safetensors and tokenizer.json, a .gguf file, or the name of a pulled model (penstock models)".to_owned(),
    }
}

fn show_server(config: &Snapshot) {
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("server");
    println!("  address         {scheme}://{}", config.listen);
    let (keys, issuers) = (config.auth.keys.len(), config.auth.issuers.len());
    let settings = config.auth_settings();
    let open = match (settings.is_open(), settings.is_open_so_far()) {
        (false, _) => "",
        (true, false) => "; nobody is served without one: a key was issued",
        (true, true) if config.auth.anonymous == Anonymous::Allow => "; without one, too",
        (true, true) => "; without one while no key is issued",
    };
    println!("  credentials     keys of the config: {keys}; issuers of tokens: {issuers}; issued keys{open}");
    show_connections(config);
    println!("machine");
    println!("  cores           {cores}");
    println!("  CPU paths       {}", inspect::cpu_paths().join(", "));
    match inspect::gpus() {
        Ok(gpus) => {
            for gpu in gpus {
                println!("  GPU             {}", gpu.about);
                match gpu.now {
                    Ok(now) => println!("                  now: {now}"),
                    Err(why) => println!("                  now: not known: {why}"),
                }
            }
        }
        Err(why) => println!("  GPU             none: {why}"),
    }
}

/// Prints how many clients can be connected, and the limit that keeps that number below the config's.
fn show_connections(config: &Snapshot) {
    let Share { limit, reserved, connections } = descriptors::share(config, descriptors::limit_max());
    let Some(limit) = limit else { return println!("  connections     {connections}") };
    let wanted = config.http.connections_max;
    let fewer = if connections < wanted { format!(", not {wanted} (server.connections_max)") } else { String::new() };
    println!(
        "  connections     {connections}{fewer}; of {limit} file descriptors {reserved} are for upstreams, store, workers"
    );
}

/// Prints what the cache of packed weights holds, also where it is off and files are left.
fn show_weights_cache(config: &Snapshot, state_dir: &Path) {
    let folder = fleet::weights_folder(state_dir);
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let most = match config.weights_cache_bytes_max {
        0 => "off (server.weights_cache_bytes_max)".to_owned(),
        bytes => format!("{:.2} GB at most", gigabytes(bytes)),
    };
    match WeightsCache::usage(folder.clone()) {
        Ok((0, _)) => println!("  weights cache   {most}"),
        Ok((count, bytes)) => {
            println!("  weights cache   {most}; {count} files, {:.2} GB in {}", gigabytes(bytes), folder.display());
        }
        Err(error) => println!("  weights cache   {most}; {} cannot be used: {error}", folder.display()),
    }
}

fn show_model(summary: &Summary, pool: &PoolConfig) {
    println!("  architecture    {}", summary.architecture);
    println!("  weights         {:.2} GB, {}", summary.weights_bytes as f64 / 1e9, stored(summary, &pool.quantize));
    println!(
        "  context         {} tokens, {:.1} kB of KV per token",
        summary.context_tokens,
        summary.kv_bytes_per_token as f64 / 1e3
    );
    for adapter in &summary.adapters {
        let megabytes = adapter.bytes as f64 / 1e6;
        println!("  adapter         {}: rank {}, {megabytes:.2} MB", adapter.name, adapter.rank);
    }
    println!("  workers         {}, {}", pool.workers, summary.device);
    let Summary { plan, bound, .. } = summary;
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    println!(
        "  memory          {:.2} GB each: weights {:.2}, activations {:.2}, KV {:.2}; {}",
        gigabytes(plan.total_bytes()),
        gigabytes(plan.weights_bytes),
        gigabytes(plan.activation_bytes),
        gigabytes(plan.kv_bytes),
        match bound {
            Some(bound) => format!("{:.2} GB are available ({bound})", gigabytes(plan.available_bytes)),
            None => "how much is available is not known".to_owned(),
        }
    );
    let workers = workers_max(pool);
    if workers > 1 && shares(summary, pool) {
        let others = plan.total_bytes().saturating_sub(plan.weights_bytes).saturating_mul(workers as u64 - 1);
        let all = gigabytes(plan.total_bytes().saturating_add(others));
        println!("  shared          one copy of the weights for all workers: {all:.2} GB in all");
    }
    if let (Some(bytes), Some(share)) = (plan.share_bytes, pool.gpu_memory_share()) {
        println!("  share           {:.2} GB each at most: gpu_memory_share is {share}", gigabytes(bytes));
    }
    println!("  fits            {}", fits(plan, pool.kv_bytes_max));
}

/// Length and number of the sequences that the KV cache holds.
fn fits(plan: &Plan, kv_bytes_max: u64) -> String {
    let Plan { context_tokens, context_wanted, sequences, .. } = *plan;
    let fewer = match (context_tokens < context_wanted, kv_bytes_max) {
        (false, _) => String::new(),
        (true, 0) => format!(", not {context_wanted}: memory is short"),
        (true, bytes) => format!(", not {context_wanted}: kv_bytes_max is {bytes}"),
    };
    let whole = plan.kv_tokens();
    format!("sequences of {context_tokens} tokens{fewer}; {sequences} of that length at once; {whole} tokens in all")
}

/// Fault of a pool whose workers need more memory than there is, with what can be changed.
fn too_large(summary: &Summary, pool: &PoolConfig) -> Option<String> {
    let workers = workers_max(pool).max(1) as u64;
    shortage(summary, (workers, shares(summary, pool)), pool.kv_bytes_max > 0, &pool.quantize)
}

/// Returns true if the pool's workers share one copy of the weights.
fn shares(summary: &Summary, pool: &PoolConfig) -> bool {
    pool.shared_weights && summary.shares_weights
}

/// Description of the memory that `workers` lack. `shares`: they have one copy of the weights; `fixes_kv`: the config says how much each has for KV;
/// `quantize`: the format that the pool rounds matrices to.
fn shortage(summary: &Summary, (workers, shares): (u64, bool), fixes_kv: bool, quantize: &str) -> Option<String> {
    let plan = &summary.plan;
    let bound = summary.bound.as_deref()?;
    let least = plan.weights_bytes.saturating_add(plan.activation_bytes);
    let lacks = |kv: u64| {
        let each = least.saturating_add(kv);
        let again = if shares { each - plan.weights_bytes } else { each };
        again.saturating_mul(workers - 1).saturating_add(each) > plan.available_bytes
    };
    // Where not even the rest has room, the plan's KV says nothing. On a GPU it does not count: it is what a worker's share leaves
    // beside the rest, or a part of what it finds free, and never more than there is.
    let counts_kv = fixes_kv || !(summary.is_gpu || lacks(0));
    let kv = if counts_kv { plan.kv_bytes } else { 0 };
    let each = least.saturating_add(kv);
    let too_much = plan.share_bytes.is_some_and(|share| each > share);
    if !lacks(kv) && !too_much {
        return None;
    }
    let gigabytes = |bytes: u64| format!("{:.2}", bytes as f64 / 1e9);
    let mut changes = Vec::new();
    if workers > 1 {
        changes.push("fewer workers".to_owned());
    }
    if fixes_kv {
        changes.push("a smaller kv_bytes_max".to_owned());
    } else if counts_kv {
        changes.push(format!("a kv_bytes_max below the {} GB that each would take for KV", gigabytes(kv)));
    }
    if let Some(share) = plan.share_bytes.filter(|_| too_much) {
        changes.push(format!("a larger gpu_memory_share, which is {} GB now", gigabytes(share)));
    }
    if summary.is_gpu {
        changes.push("device = \"cpu\" (--device cpu)".to_owned());
    } else {
        let smaller =
            summary.if_rounded.into_iter().filter(|(name, bytes)| *name != quantize && *bytes < plan.weights_bytes);
        changes.extend(smaller.map(|(name, bytes)| {
            let (less, now) = (gigabytes(bytes), gigabytes(plan.weights_bytes));
            format!("quantize = \"{name}\" (--quantize {name}): weights of {less} GB, not {now}")
        }));
    }
    let smaller = if summary.is_gpu { "" } else { ", or a file of it with fewer bits per weight (such as Q4_K_M)" };
    changes.push(format!("a smaller model{smaller}"));
    Some(format!(
        "{} {} GB{} (weights {}, activations {}{}; {} GB are available ({bound}). What helps: {}",
        if workers == 1 { "1 worker needs".to_owned() } else { format!("{workers} workers need") },
        gigabytes(each),
        match (workers, shares) {
            (1, _) => "",
            (_, true) => " each, with one copy of the weights among them",
            (_, false) => " each",
        },
        gigabytes(plan.weights_bytes),
        gigabytes(plan.activation_bytes),
        if counts_kv { format!(", KV {})", gigabytes(kv)) } else { ") and more for KV".to_owned() },
        gigabytes(plan.available_bytes),
        changes.join("; ")
    ))
}

/// Memory that a pool's workers plan to take on the GPU, which is the same one for all pools: the first that has kernels.
struct OnGpu<'a> {
    pool: &'a PoolConfig,
    workers: u64,
    /// Bytes of each worker: weights, activations, KV.
    each_bytes: u64,
    available_bytes: u64,
}

impl<'a> OnGpu<'a> {
    /// Memory of the pool; `None`: no GPU computes, or there is none for the pool alone, which has a fault of its own.
    fn of(pool: &'a PoolConfig, summary: &Summary) -> Option<Self> {
        let plan = &summary.plan;
        let (workers, each_bytes) = (workers_max(pool).max(1) as u64, plan.total_bytes());
        let is_alone_good = summary.is_gpu && too_large(summary, pool).is_none();
        is_alone_good.then_some(Self { pool, workers, each_bytes, available_bytes: plan.available_bytes })
    }

    fn bytes(&self) -> u64 {
        self.each_bytes.saturating_mul(self.workers)
    }
}

/// Fault of pools that have no room on the GPU beside each other, with what can be changed. Of pools on demand the largest counts: each may run while
/// the others do not.
fn crowded(pools: &[OnGpu<'_>]) -> Option<String> {
    let of = |is_on_demand: bool| pools.iter().filter(move |one| one.pool.on_demand.is_some() == is_on_demand);
    let all = of(false).map(OnGpu::bytes).fold(0, u64::saturating_add);
    let all = all.saturating_add(of(true).map(OnGpu::bytes).max().unwrap_or(0));
    let available = pools.iter().map(|one| one.available_bytes).min()?;
    if pools.len() < 2 || all <= available {
        return None;
    }
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let each = pools.iter().map(|one| match one.workers {
        1 => format!("{} {:.2} GB", one.pool.id, gigabytes(one.each_bytes)),
        workers => format!("{} {workers} times {:.2} GB", one.pool.id, gigabytes(one.each_bytes)),
    });
    Some(format!(
        "pools on one GPU would take {:.2} GB together ({}); {:.2} GB are available. What helps: gpu_memory_share of each pool, the share of the GPU's \
         memory that one worker may take in all, as 0.45 for two (docs/guide/gpu.md); a smaller kv_bytes_max; device = \"cpu\"",
        gigabytes(all),
        each.collect::<Vec<_>>().join(", "),
        gigabytes(available)
    ))
}

/// Type of the weights as stored, and the type that they are rounded to.
fn stored(summary: &Summary, quantize: &str) -> String {
    match summary.rounded_to.or((quantize != "none").then_some(quantize)) {
        Some(held) => format!("{}, rounded to {held} when it is loaded", summary.weight_format),
        None => summary.weight_format.clone(),
    }
}

/// Prints names with targets of their own, and whether their cost is known.
fn show_models(config: &Snapshot) {
    for model in &config.models {
        println!("model {}", model.name);
        if !model.aliases.is_empty() {
            println!("  also            {}", model.aliases.join(", "));
        }
        let to: Vec<_> = model.to.iter().map(|(target, weight)| format!("{} ({weight})", target.id())).collect();
        println!("  to              {}", to.join(", "));
        if !model.fallback.is_empty() {
            let fallback: Vec<_> = model.fallback.iter().map(TargetConfig::id).collect();
            let reasons: Vec<_> = model.fallback_on.iter().map(|reason| reason.name()).collect();
            println!("  fallback        {} on {}", fallback.join(", "), reasons.join(", "));
        }
        let targets = model.to.iter().map(|(target, _)| target).chain(&model.fallback);
        let unknown: Vec<_> = targets
            .filter(|_| model.price.is_none())
            .filter(|target| match target {
                TargetConfig::Pool(_) => false,
                TargetConfig::Provider(_, name) => config.prices.find(name).is_none(),
            })
            .map(TargetConfig::id)
            .collect();
        if !unknown.is_empty() {
            println!("  cost unknown    {}", unknown.join(", "));
        }
    }
}

#[cfg(test)]
mod tests {
    use penstock_config::Overrides;

    use super::*;

    const GIGABYTE: u64 = 1_000_000_000;

    fn summary(weights: u64, int8: u64) -> Summary {
        let plan = Plan {
            weights_bytes: weights * GIGABYTE,
            there_bytes: 0,
            activation_bytes: GIGABYTE / 10,
            kv_bytes: GIGABYTE / 5,
            pages: 100,
            context_tokens: 3200,
            context_wanted: 3200,
            sequences: 1,
            available_bytes: 8 * GIGABYTE,
            share_bytes: None,
        };
        Summary {
            architecture: "Qwen3ForCausalLM",
            weights_bytes: plan.weights_bytes,
            weight_format: "bf16".into(),
            rounded_to: None,
            if_rounded: [("int8", int8 * GIGABYTE), ("int4", int8 * GIGABYTE * 6 / 10)],
            adapters: Vec::new(),
            shares_weights: true,
            is_gpu: false,
            plan,
            bound: Some("free memory of the machine".into()),
            context_tokens: 3200,
            kv_bytes_per_token: 1,
            device: String::new(),
        }
    }

    #[test]
    fn a_shortage_says_what_is_needed_and_what_helps() {
        let mut fixed = summary(16, 8);
        fixed.plan.kv_bytes = 2 * GIGABYTE;
        let said = shortage(&fixed, (2, false), true, "none").expect("too large");
        let want = "2 workers need 18.10 GB each (weights 16.00, activations 0.10, KV 2.00); 8.00 GB are available (free memory of the \
                    machine). What helps: fewer workers; a smaller kv_bytes_max; quantize = \"int8\" (--quantize int8): weights of 8.00 GB, \
                    not 16.00; quantize = \"int4\" (--quantize int4): weights of 4.80 GB, not 16.00; a smaller model, or a file of it with fewer bits \
                    per weight (such as Q4_K_M)";
        assert_eq!(said, want);
        let alone = shortage(&summary(16, 8), (1, true), false, "none").expect("too large");
        assert!(
            alone.starts_with("1 worker needs 16.10 GB (weights 16.00, activations 0.10) and more for KV; 8.00 GB"),
            "{alone}"
        );
    }

    #[test]
    fn weights_that_workers_share_count_once() {
        let of = |weights, shares| shortage(&summary(weights, weights), (3, shares), false, "none");
        assert_eq!(of(7, true), None);
        assert!(of(7, false).is_some());
        let said = of(8, true).expect("too large");
        assert!(
            said.starts_with("3 workers need 8.10 GB each, with one copy of the weights among them (weights 8.00"),
            "{said}"
        );
    }

    #[test]
    fn the_kv_that_every_worker_plans_counts() {
        let of = |kv, workers, shares| {
            let mut summary = summary(2, 2);
            summary.plan.kv_bytes = kv * GIGABYTE;
            shortage(&summary, (workers, shares), false, "none")
        };
        assert_eq!((of(5, 1, true), of(2, 2, true), of(1, 2, false)), (None, None, None));
        let said = of(3, 2, true).expect("2 weights, 6 KV, and activations");
        assert!(said.contains("(weights 2.00, activations 0.10, KV 3.00)"), "{said}");
        assert!(said.contains("fewer workers; a kv_bytes_max below the 3.00 GB that each would take for KV"), "{said}");
        assert!(of(2, 2, false).is_some(), "weights of their own");
        let mut gpu = Summary { is_gpu: true, ..summary(2, 2) };
        gpu.plan.kv_bytes = 5 * GIGABYTE;
        assert_eq!(shortage(&gpu, (2, false), false, "none"), None, "the second one plans with what is left");
    }

    #[test]
    fn pools_on_one_gpu_have_room_beside_each_other() {
        let of = |gpu_bytes: [(&str, u64); 2]| {
            let table = |(keys, _): (&str, u64), id| format!("[[pools]]\nid = \"{id}\"\n{keys}\n");
            let text = [table(gpu_bytes[0], "chat"), table(gpu_bytes[1], "vectors")].concat();
            let config = penstock_config::load(Some(("config", &text)), &Overrides::default(), &|_| None).expect(&text);
            let summaries = gpu_bytes.map(|(_, kv)| {
                let mut summary = Summary { is_gpu: kv > 0, ..summary(1, 1) };
                summary.plan.kv_bytes = kv * GIGABYTE;
                summary
            });
            let pools: Vec<_> =
                config.pools.iter().zip(&summaries).filter_map(|(pool, of)| OnGpu::of(pool, of)).collect();
            crowded(&pools)
        };
        assert_eq!(of([("", 2), ("", 2)]), None, "1 weights, 2 KV and activations, twice; of 8");
        assert_eq!(of([("", 6), ("", 0)]), None, "the other one is on the CPU");
        assert_eq!(
            of([("", 6), ("workers = 2", 3)]).expect("more than there is"),
            "pools on one GPU would take 15.30 GB together (chat 7.10 GB, vectors 2 times 4.10 GB); 8.00 GB are available. What helps: \
             gpu_memory_share of each pool, the share of the GPU's memory that one worker may take in all, as 0.45 for two (docs/guide/gpu.md); \
             a smaller kv_bytes_max; device = \"cpu\""
        );
        assert_eq!(of([("on_demand = true", 6), ("on_demand = true", 6)]), None, "one after the other");
        assert!(of([("", 3), ("on_demand = true", 6)]).is_some(), "the second one would never start");
    }

    #[test]
    fn weights_count_as_they_are_held() {
        let of = |quantize: &str| {
            let toml = format!("[[pools]]\nid = \"own\"\nquantize = \"{quantize}\"\ndevice = \"cpu\"\n");
            let config = penstock_config::load(Some(("config", &toml)), &Overrides::default(), &|_| None);
            weights(&config.expect("valid").pools[0]).expect("the demo model")
        };
        let (stored, int8) = (of("none"), of("int8"));
        assert!(int8 * 10 < stored * 6, "{stored} {int8}");
    }

    #[test]
    fn fewer_bits_are_advised_only_where_they_take_less() {
        // A file of 4 bits per weight, some of whose tensors are f16.
        let mixed = Summary { weight_format: "q4_0+f16".into(), ..summary(9, 15) };
        assert!(!shortage(&mixed, (1, true), false, "none").expect("too large").contains("quantize"));
        let said = shortage(&summary(16, 8), (1, true), false, "int8").expect("too large");
        assert!(!said.contains("int8") && said.contains("--quantize int4"), "asked for already: {said}");
        let said = shortage(&summary(16, 16), (1, true), false, "int4").expect("too large");
        assert!(!said.contains("quantize"), "{said}");
        assert_eq!(shortage(&summary(7, 4), (1, true), false, "none"), None);
        assert_eq!(
            shortage(&Summary { bound: None, ..summary(16, 8) }, (1, true), false, "none"),
            None,
            "nobody knows"
        );
        let mut shared = Summary { is_gpu: true, ..summary(4, 4) };
        shared.plan.share_bytes = Some(3 * GIGABYTE);
        let said = shortage(&shared, (1, true), false, "none").expect("more than its share");
        assert!(said.contains("a larger gpu_memory_share, which is 3.00 GB now; device"), "{said}");
        shared.plan.share_bytes = Some(5 * GIGABYTE);
        assert_eq!(shortage(&shared, (1, true), false, "none"), None);
        let gpu = shortage(&Summary { is_gpu: true, ..summary(16, 8) }, (1, true), false, "none").expect("too large");
        assert!(gpu.ends_with("What helps: device = \"cpu\" (--device cpu); a smaller model"), "{gpu}");
    }

    #[test]
    fn a_shorter_context_names_its_cause() {
        let whole = summary(1, 1).plan;
        assert_eq!(fits(&whole, 0), "sequences of 3200 tokens; 1 of that length at once; 3200 tokens in all");
        let short = Plan { context_wanted: 8192, ..whole };
        assert_eq!(
            fits(&short, 0),
            "sequences of 3200 tokens, not 8192: memory is short; 1 of that length at once; 3200 tokens in all"
        );
        let asked = fits(&short, 4096);
        assert_eq!(
            asked,
            "sequences of 3200 tokens, not 8192: kv_bytes_max is 4096; 1 of that length at once; 3200 tokens in all"
        );
    }
}
