//! `penstock check`: config, models and machine, without serving.

use anyhow::{Context, bail};
use clap::Args;
use penstock_proxy::auth;
use penstock_proxy::config::{DeviceChoice, PoolConfig, Snapshot, TargetConfig};
use penstock_proxy::server::descriptors::{self, Share};
use penstock_proxy::{fleet, preflight};
use penstock_worker::inspect::{self, Summary};
use penstock_worker::{ModelOptions, WorkerError};

use crate::serve::{ConfigArgs, state_dir, worker_command};
use crate::{demo, log};

const EXAMPLES: &str = "\
Examples:
  penstock check
  penstock check --config /etc/penstock.toml
  penstock check --model ~/models/Qwen3-0.6B

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
    let mut faults = preflight::faults(&config, &state_dir);
    faults.extend(log::check(&config.log_level).err().map(|error| format!("log.level: {error:#}")));
    let command = worker_command(std::env::current_exe().context("the path of this program")?, String::new());
    for pool in &config.pools {
        println!("pool {}", pool.id);
        let said = |reason: String| format!("pool {}: {reason}", pool.id);
        match fleet::text(pool, demo::FILES) {
            Ok(text) => {
                let template = if text.has_chat_template() { "yes" } else { "no: only /v1/completions" };
                println!("  vocabulary      {} tokens", text.vocab_size());
                println!("  chat template   {template}");
                faults.extend(fleet::check(pool, &text, &command, &state_dir).err().map(said));
            }
            Err(reason) => faults.push(said(reason)),
        }
        if !pool.connect.is_empty() {
            println!("  workers         at {}", pool.connect.join(", "));
            continue;
        }
        match look(pool) {
            Ok(summary) => show_model(&summary, pool.workers),
            Err(error) => faults.push(format!("pool {}: {:#}", pool.id, anyhow::Error::from(error))),
        }
    }
    show_models(&config);
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    println!("nothing is wrong");
    Ok(())
}

/// Summary of the model that a pool's workers would load.
fn look(pool: &PoolConfig) -> Result<Summary, WorkerError> {
    inspect::inspect(&ModelOptions {
        model: pool.model.clone(),
        device: match pool.device {
            DeviceChoice::Auto => penstock_worker::DeviceChoice::Auto,
            DeviceChoice::Cpu => penstock_worker::DeviceChoice::Cpu,
            DeviceChoice::Reference => penstock_worker::DeviceChoice::Reference,
        },
        path: inspect::cpu_path(&pool.path)?,
        threads: pool.threads,
        context_tokens: pool.context_tokens as usize,
        ..ModelOptions::default()
    })
}

/// Bytes of weights that a worker of the pool loads; an error says why it could not.
pub(crate) fn weights(pool: &PoolConfig) -> Result<u64, String> {
    refuse_early(pool).map_err(|error| format!("{error:#}"))?;
    look(pool).map(|summary| summary.weights_bytes).map_err(|error| format!("{:#}", anyhow::Error::from(error)))
}

/// Refuses a pool whose local workers could not load their model: each of them would only fail with the same message.
pub(crate) fn refuse_early(pool: &PoolConfig) -> anyhow::Result<()> {
    if !pool.connect.is_empty() {
        return Ok(());
    }
    if let Some(folder) = pool.model.as_ref().filter(|folder| !folder.is_dir()) {
        let help = "give a checkpoint folder with config.json, *.safetensors and tokenizer.json";
        bail!("model {}: there is no such folder; {help}", folder.display());
    }
    look(pool).with_context(|| format!("pool {:?}", pool.id))?;
    Ok(())
}

fn show_server(config: &Snapshot) {
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("server");
    println!("  address         {scheme}://{}", config.listen);
    let (keys, issuers) = (config.keys.len(), config.auth.issuers.len());
    let open = if auth::is_open(config) { "; without one while no key is issued" } else { "" };
    println!("  credentials     keys of the config: {keys}; issuers of tokens: {issuers}; issued keys{open}");
    show_connections(config);
    println!("machine");
    println!("  cores           {cores}");
    println!("  CPU paths       {}", inspect::cpu_paths().join(", "));
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

fn show_model(summary: &Summary, workers: usize) {
    println!("  architecture    {}", summary.architecture);
    println!("  weights         {:.2} GB, {}", summary.weights_bytes as f64 / 1e9, stored(summary));
    println!(
        "  context         {} tokens, {:.1} kB of KV per token",
        summary.context_tokens,
        summary.kv_bytes_per_token as f64 / 1e3
    );
    println!("  workers         {workers}, {}", summary.device);
}

/// Type of the weights as stored, and the type that they are rounded to.
fn stored(summary: &Summary) -> String {
    match summary.rounded_to {
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
