//! `penstock serve`: the gateway.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use penstock_admin::webhooks::{Watched, Webhooks};
use penstock_config::{AdapterConfig, AdminConfig, Members, Overrides, PoolConfig, Snapshot};
use penstock_pool::Leave;
use penstock_pool::weights_cache::CopyLayout;
use penstock_proxy::fleet::{Fleet, WorkerCommand};
use penstock_proxy::reload::{self, Begin, Live, Source};
use penstock_proxy::server::Listeners;
use penstock_proxy::start_checks::{self, CheckedBy};
use penstock_proxy::upgrade::{self, Prepared, StateLock};
use penstock_proxy::{Gateway, descriptors, server, stored};
use penstock_telemetry::AccessLog;
use penstock_worker::{AdapterSource, inspect};

use crate::{check, demo, log, progress};

const EXAMPLES: &str = "\
Examples:
  penstock serve
  penstock serve --model ~/models/Qwen3-0.6B --listen 0.0.0.0:8080
  penstock serve --model ~/models/Qwen3-0.6B-Q4_K_M.gguf
  penstock serve --model Qwen/Qwen3-0.6B            after penstock pull Qwen/Qwen3-0.6B
  penstock serve --model ~/models/Qwen3-0.6B --quantize int8
  penstock serve --model ~/models/Qwen3-0.6B --adapter sql=~/models/sql-lora
  penstock serve --model ~/models/Qwen3-0.6B --workers 2 --threads 4
  penstock serve --config /etc/penstock.toml

Signals: SIGTERM or Ctrl-C stops accepting, finishes answers in progress (server.grace_ms), exits. SIGHUP reads the config again.
Every key of the config file, with its default, is in configs/penstock.toml.";

/// Options of the one pool and the server; they win over the file. Shared by serve and check.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ConfigArgs {
    /// Config file (TOML); every key has a default
    #[arg(long, short, value_name = "FILE", env = "PENSTOCK_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Checkpoint folder in Hugging Face's layout, a GGUF file, or the name of a pulled model [default: the embedded demo model]
    #[arg(long, short, value_name = "PATH|NAME")]
    pub(crate) model: Option<PathBuf>,
    /// Adapter (LoRA) of the model, served under its own name: a PEFT folder. May be given several times
    #[arg(long, value_name = "NAME=PATH")]
    pub(crate) adapter: Vec<AdapterSource>,
    /// Round matrices while they are loaded: int8, int4, or none [default: none]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) quantize: Option<String>,
    /// Form of keys and values in the KV cache: bf16 or int8 [default: bf16]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) kv_format: Option<String>,
    /// Model name in requests [default: the name of the folder or file]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Address to listen on, or a port; port 0 takes any free one [default: 127.0.0.1:8080]
    #[arg(long, short, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<String>,
    /// Worker processes, on disjoint cores [default: 1]
    #[arg(long, value_name = "COUNT")]
    pub(crate) workers: Option<usize>,
    /// Threads per worker [default: the cores shared out]
    #[arg(long, value_name = "COUNT")]
    pub(crate) threads: Option<usize>,
    /// Device: auto, cpu, cuda or reference
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,
    /// CPU instruction set: auto, amx, avx512bf16, avx512, avx2, portable
    #[arg(long, value_name = "PATH")]
    pub(crate) path: Option<String>,
    /// Longest sequence served, in tokens [default: the model's, as far as memory goes]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) context: Option<u32>,
    /// Folder for sockets, leases and logs of workers [default: ~/.local/state/penstock]
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Folder of pulled models [default: models in the state folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) models_dir: Option<PathBuf>,
    /// Log level (error, warn, info, debug, trace) or tracing directives
    #[arg(long, value_name = "LEVEL", env = "PENSTOCK_LOG")]
    pub(crate) log: Option<String>,
    /// Access log, one JSON line per request: - for standard output, off, or a path
    #[arg(long, value_name = "TARGET")]
    pub(crate) access_log: Option<String>,
    /// Address and port of the admin API, or off [default: 127.0.0.1:8081, or a free port]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) admin: Option<String>,
}

/// `penstock serve`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Take over from the gateway that runs with the same state directory; penstock upgrade starts one with this
    #[arg(long)]
    pub(crate) upgrade: bool,
}

impl ConfigArgs {
    /// Reads and checks the config; the error holds all its faults.
    pub(crate) fn load(&self) -> anyhow::Result<Snapshot> {
        let source = self.source();
        let text = source.read().map_err(anyhow::Error::msg)?;
        load(&source, &text)
    }

    /// Reads and checks the config for a command beside the gateway, whose environment lacks what a service manager gives the gateway:
    /// only the tables of `needed` must have their variables set.
    pub(crate) fn load_beside(&self, needed: &[&str]) -> anyhow::Result<Snapshot> {
        self.source().load_beside(needed).map_err(anyhow::Error::msg)
    }

    /// Source of the config: the file, with the command line over it.
    pub(crate) fn source(&self) -> Source {
        let overrides = Overrides {
            listen: self.listen.clone(),
            model: self.model.clone(),
            adapters: self.adapter.iter().map(adapter_config).collect(),
            name: self.name.clone(),
            workers: self.workers,
            threads: self.threads,
            device: self.device.clone(),
            quantize: self.quantize.clone(),
            kv_format: self.kv_format.clone(),
            path: self.path.clone(),
            context_tokens: self.context,
            state_dir: self.state_dir.clone(),
            models_dir: self.models_dir.clone(),
            log_level: self.log.clone(),
            access_log: self.access_log.clone(),
            admin: self.admin.clone(),
        };
        Source::new(self.config.clone(), overrides)
    }
}

fn adapter_config(source: &AdapterSource) -> AdapterConfig {
    AdapterConfig { name: source.name.clone(), path: source.path.clone() }
}

fn load(source: &Source, text: &str) -> anyhow::Result<Snapshot> {
    source.load(text).map_err(|faults| anyhow::anyhow!("the config cannot be used:\n{faults}"))
}

/// Runs the gateway until a signal ends it.
pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let source = args.config.source();
    let mut text = source.read().map_err(anyhow::Error::msg)?;
    let mut config = load(&source, &text)?;
    let mut began = config.clone();
    let log = Arc::new(log::start(&config.log_level)?);
    descriptors::raise();
    penstock_base::freed::keep(penstock_allocator::give_back).context("the thread that returns memory")?;
    let follower = reload::follow().context("signals")?;
    let mut taken = match args.upgrade {
        true => Some(upgrade::take_over(&state_dir(&config)?)?),
        false => None,
    };
    let mut file = None;
    if let Some(in_force) = taken.as_ref().and_then(|taken| taken.config().map(str::to_owned)) {
        // An older gateway does not say what it last read.
        let read = std::mem::replace(&mut text, in_force);
        file = Some(taken.as_ref().and_then(|taken| taken.file()).map_or(read, str::to_owned));
        config = load(&source, &text)?;
        began = config.clone();
        // The log began with the level of the file.
        if let Err(reason) = penstock_admin::LogFilter::set(log.as_ref(), &config.log_level) {
            tracing::warn!(reason, "log level could not be changed");
        }
    }
    let state_dir = state_dir(&config)?;
    let faults = start_checks::faults(&config, &state_dir, CheckedBy::Gateway);
    if !faults.is_empty() {
        anyhow::bail!("it cannot be served:\n{}", faults.join("\n"));
    }
    let lock = StateLock::take(&state_dir, taken.as_mut())?;
    for pool in &config.pools {
        // A worker would say the same, again and again: better once, here.
        check::refuse_early(pool)?;
    }
    descriptors::say(&config);
    let program = std::env::current_exe().context("the path of this program")?;
    let listeners = Arc::new(Listeners::bind(&mut config, program.clone(), taken.as_mut())?);
    let access_log =
        AccessLog::open(&config.access_log).with_context(|| format!("access log {}", config.access_log))?;
    // Workers of the old process are taken over, whichever build they are: what they hold stays warm.
    let identity =
        taken.as_ref().map_or_else(|| WorkerCommand::identity_of(&program), |taken| taken.workers().to_owned());
    let workers = identity.clone();
    let command = worker_command(program, identity);
    let fleet = Arc::new(Fleet::start(&config, command)?);
    taken.iter().for_each(|taken| taken.hold(&fleet));
    let store = stored::open(&config).context("the store")?;
    // Names are looked up when the gateway serves.
    let providers = penstock_provider::all(&Members::default().providers(&config.providers))?;
    let gateway = Gateway::new(config.clone(), access_log, fleet.upstreams(), providers);
    let gateway = gateway.with_weights_cache(fleet.weights_cache());
    let gateway = gateway.with_store(store.clone()).with_ledger().context("the ledger")?.shared();
    if let Some(shared) = stored::shared(&config).context("the shared counters")? {
        let serving = Arc::downgrade(&gateway);
        let in_force = move || serving.upgrade().map_or_else(Default::default, |gateway| gateway.serving().in_force());
        gateway.governor.share(shared.counters, store.clone(), in_force).context("the shared counters")?;
        if let Some(cache) = shared.cache {
            gateway.hub.share(cache);
        }
        gateway.pace_together(gateway.serving().providers());
    }
    penstock_provider::discover::start(gateway.serving().providers());
    penstock_provider::follow(gateway.serving().providers());
    let level = log.clone();
    let level = Box::new(move |filter: &str| penstock_admin::LogFilter::set(level.as_ref(), filter));
    let live = Live::new(gateway.clone(), fleet.clone(), source, Begin { text, config: began, file }, level);
    let parts =
        penstock_admin::Parts { gateway: gateway.clone(), fleet: fleet.clone(), live: live.clone(), store, log };
    let admin = Admin {
        parts,
        config: config.admin.clone(),
        state_dir: state_dir.clone(),
        running: Arc::default(),
        webhooks: Arc::default(),
    };
    if taken.is_none() {
        admin.start(Duration::ZERO)?;
    }
    // Caught before the terminal is told that the gateway serves: from then on a signal lets answers end. A process
    // that is to take over may be killed until it has.
    let stops = taken.is_none().then(server::Stops::catch).transpose().context("signals")?;
    let shown = progress::show(fleet.clone(), &config, admin.console().as_deref())?;
    let prepared = match taken {
        Some(taken) => {
            let unready = |pools: Vec<String>| anyhow::anyhow!("not ready in time: {}", pools.join(", "));
            fleet.ready(upgrade::READY_MAX).map_err(unready)?;
            Some(taken.prepared(&gateway, &fleet)?)
        }
        None => None,
    };
    let picker = Picker::prepare(&gateway, &config, &listeners)?;
    let leave = server::Leave::default();
    let ending = picker.clone();
    let hooks = server::Hooks {
        leave: leave.clone(),
        stops: stops.map_or_else(server::Stops::catch, Ok).context("signals")?,
        ending: Box::new(move || ending.end()),
        started: started(prepared, admin.clone(), {
            let (gateway, listeners, admin, fleet) = (gateway.clone(), listeners.clone(), admin.clone(), fleet.clone());
            let picker = picker.clone();
            let accepting = shown.accepting.clone();
            move || {
                accepting.store(true, Ordering::Relaxed);
                follower.begin(live.clone());
                picker.start();
                lock.sign();
                let leave = move || {
                    fleet.settle();
                    admin.stop();
                    picker.leave();
                    leave.now();
                };
                let ready = upgrade::listen(&state_dir, (gateway, live), (listeners, lock), workers, leave);
                if let Err(error) = ready {
                    tracing::warn!(%error, "penstock upgrade is unavailable: the upgrade socket could not be opened");
                }
            }
        }),
        stop: Box::new(move || {
            picker.stop();
            fleet.stop(Leave::Exit, Duration::from_secs(5));
            // Last: until here it says what still runs, and can end it.
            admin.stop();
        }),
    };
    server::run(gateway, &config, listeners, hooks)?;
    drop(shown);
    Ok(())
}

/// Callback for the moment when the listeners are at work. After an upgrade it first tells the old process; `begin` and
/// the admin API start once that process has let go of its sockets.
fn started(
    prepared: Option<Prepared>,
    admin: Admin,
    begin: impl FnOnce() + Send + Sync + 'static,
) -> Box<dyn FnOnce() + Send + Sync> {
    // In a mutex for the sake of `Sync` alone.
    let prepared = Mutex::new(prepared);
    Box::new(move || {
        upgrade::notify_manager(&format!("READY=1\nMAINPID={}", std::process::id()));
        match prepared.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => begin(),
            Some(prepared) => prepared.accepting(move || {
                begin();
                if let Err(error) = admin.start(ADMIN_PATIENCE) {
                    tracing::error!(%error, "the admin API could not be taken over from the old process");
                }
            }),
        }
    })
}

/// Endpoint picker, where the config has one.
#[derive(Clone)]
struct Picker {
    stage: Arc<Mutex<Stage>>,
    /// Gateway that picks; its config in force says how long open requests go on.
    gateway: Arc<Gateway>,
}

/// Stage of the endpoint picker. The lock is held while the service starts, so that an end that comes meanwhile ends it.
enum Stage {
    /// Not serving yet.
    Prepared(penstock_picker::Settings),
    Serving(Arc<penstock_picker::Running>),
    /// The config has none, or the process ends.
    Absent,
}

impl Picker {
    fn prepare(gateway: &Arc<Gateway>, config: &Snapshot, listeners: &Listeners) -> anyhow::Result<Self> {
        let listener = listeners.picker().context("the endpoint picker's socket")?;
        let stage = match listener.zip(config.endpoint_picker.as_ref()) {
            Some((listener, asked)) => {
                let tls = server::picker_tls(gateway, asked.tls.as_ref())?;
                Stage::Prepared(penstock_picker::Settings { listener, tls, threads: config.threads })
            }
            None => Stage::Absent,
        };
        Ok(Self { stage: Arc::new(Mutex::new(stage)), gateway: gateway.clone() })
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves, once.
    fn start(&self) {
        let mut stage = self.stage();
        let settings = match std::mem::replace(&mut *stage, Stage::Absent) {
            Stage::Prepared(settings) => settings,
            other => return *stage = other,
        };
        let listen = settings.listener.local_addr().map_or_else(|_| String::new(), |address| address.to_string());
        let tls = settings.tls.is_some();
        match penstock_picker::start(self.gateway.clone(), settings) {
            Ok(running) => {
                tracing::info!(listen, tls, "endpoint picker serves");
                *stage = Stage::Serving(Arc::new(running));
            }
            Err(error) => tracing::error!(%error, "the endpoint picker could not start"),
        }
    }

    /// Handle of the service; no lock is held on it, since the wait for its end can be long.
    fn running(&self) -> Option<Arc<penstock_picker::Running>> {
        match &*self.stage() {
            Stage::Serving(running) => Some(running.clone()),
            Stage::Prepared(_) | Stage::Absent => None,
        }
    }

    /// Leaves new requests to the next process; open ones go on.
    fn leave(&self) {
        let grace = self.gateway.serving().config.upgrade_grace;
        self.running().iter().for_each(|running| running.leave(grace));
    }

    /// Takes no more requests, since a signal ends the process; open ones end beside the gateway's own, within the same grace time.
    fn end(&self) {
        let running = {
            let mut stage = self.stage();
            match &*stage {
                Stage::Serving(running) => running.clone(),
                // What has not begun to serve does not begin any more.
                Stage::Prepared(_) | Stage::Absent => return *stage = Stage::Absent,
            }
        };
        running.leave(self.gateway.serving().config.grace);
    }

    /// Waits for the open requests until the grace time is over that [`Self::leave`] or [`Self::end`] has set.
    fn stop(&self) {
        let serving = self.gateway.serving();
        let grace = if self.gateway.is_leaving() { serving.config.upgrade_grace } else { serving.config.grace };
        self.running().iter().for_each(|running| running.stop(grace));
    }
}

/// Longest wait for the old process to free the admin API's address.
const ADMIN_PATIENCE: Duration = Duration::from_secs(30);

/// Admin API and webhooks, which only one of two processes can serve.
#[derive(Clone)]
struct Admin {
    parts: penstock_admin::Parts,
    config: AdminConfig,
    state_dir: PathBuf,
    running: Arc<Mutex<Option<penstock_admin::Running>>>,
    webhooks: Arc<Mutex<Option<Webhooks>>>,
}

impl Admin {
    fn start(&self, patience: Duration) -> anyhow::Result<()> {
        let penstock_admin::Parts { gateway, fleet, store, .. } = self.parts.clone();
        let webhooks = Webhooks::start(Watched { gateway, fleet, store }).context("webhooks")?;
        *self.webhooks.lock().unwrap_or_else(PoisonError::into_inner) = Some(webhooks);
        let running = penstock_admin::start(self.parts.clone(), &self.config, &self.state_dir, patience)?;
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = running;
        Ok(())
    }

    /// Where the web console is, and what to sign in with; `None`: this process does not serve it.
    fn console(&self) -> Option<String> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let url = running.as_ref().filter(|_| self.config.console)?.console()?;
        let key = match self.config.keys.is_empty() {
            true => format!("the key in {}", penstock_admin::key_path(&self.state_dir).display()),
            false => "a key of [[admin_keys]]".to_owned(),
        };
        Some(format!("{url} (sign in with {key})"))
    }

    fn stop(&self) {
        drop(self.webhooks.lock().unwrap_or_else(PoisonError::into_inner).take());
        drop(self.running.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

pub(crate) fn state_dir(config: &Snapshot) -> anyhow::Result<PathBuf> {
    penstock_config::state_dir(config).map_err(|reason| anyhow::anyhow!("the state directory: {reason}"))
}

/// Command by which local workers are started.
pub(crate) fn worker_command(program: PathBuf, identity: String) -> WorkerCommand {
    let layout = CopyLayout { key: inspect::weights_key_of, fill: inspect::restore_weights };
    let weights_key = |pool: &PoolConfig, program: &Path| {
        let key = check::options(pool).and_then(|options| inspect::weights_key(&options, program));
        key.map_err(|error| format!("{:#}", anyhow::Error::from(error)))
    };
    let is_on_gpu = |pool: &PoolConfig| {
        let is_on_gpu = check::options(pool).and_then(|options| inspect::is_on_gpu(&options));
        is_on_gpu.map_err(|error| format!("{:#}", anyhow::Error::from(error)))
    };
    WorkerCommand {
        program,
        identity,
        args: worker_args,
        inspect: check::weights,
        is_on_gpu,
        weights_key,
        layout,
        demo: demo::FILES,
    }
}

/// Arguments of a pool's workers; the supervisor adds address, cores, session, share of the machine, and adapters, which may change while the
/// workers run.
fn worker_args(pool: &PoolConfig) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec!["worker".into()];
    if let Some(model) = &pool.model {
        let absolute = std::path::absolute(model).unwrap_or_else(|_| model.clone());
        args.extend(["--model".into(), absolute.into()]);
    }
    args.extend(["--quantize".into(), pool.quantize.clone().into()]);
    // The default is left out: arguments are part of what a lease is for, so that the workers of a version without the option are taken over.
    if pool.kv_format != "bf16" {
        args.extend(["--kv-format".into(), pool.kv_format.clone().into()]);
    }
    let device = pool.device.name();
    args.extend(["--device".into(), device.into(), "--path".into(), pool.path.clone().into()]);
    let numbers = [
        ("--threads", pool.threads as u64),
        ("--context", u64::from(pool.context_tokens)),
        ("--kv-bytes", pool.kv_bytes_max),
        ("--kv-host-bytes", pool.tiers.host_bytes),
        ("--kv-disk-bytes", pool.tiers.disk_bytes),
        ("--sequences", u64::from(pool.sequences_max)),
        ("--prompt-lookup", u64::from(pool.prompt_lookup)),
    ];
    for (name, value) in numbers {
        if value > 0 {
            args.extend([name.into(), value.to_string().into()]);
        }
    }
    if let Some(share) = pool.gpu_memory_share() {
        args.extend(["--gpu-memory-share".into(), share.to_string().into()]);
    }
    let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
    if let Some(path) = &pool.tiers.disk_path {
        // Pools of different models may name one folder.
        let folder = pool.id.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_', "-");
        args.extend(["--kv-disk-path".into(), absolute(path).join(folder).into()]);
    }
    if let Some(url) = &pool.tiers.remote {
        args.extend(["--kv-remote".into(), url.into()]);
    }
    if let Some(file) = &pool.tiers.remote_password_file {
        args.extend(["--kv-remote-password-file".into(), absolute(file).into()]);
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(pool: &str) -> Vec<String> {
        let text = format!("[[pools]]\nid = \"a\"\n{pool}");
        let config = penstock_config::load(Some(("penstock.toml", &text)), &Overrides::default(), &|_| None);
        let config = config.unwrap_or_else(|faults| panic!("{faults}"));
        worker_args(&config.pools[0]).into_iter().map(|word| word.into_string().expect("text")).collect()
    }

    /// An upgrade takes over running workers whose arguments are those that the new gateway would start them with.
    #[test]
    fn a_pool_of_defaults_has_the_arguments_of_versions_before() {
        let before = ["worker", "--quantize", "none", "--device", "auto", "--path", "auto"];
        assert_eq!(args(""), before);
        assert_eq!(args("kv_format = \"int8\"")[3..5], ["--kv-format", "int8"]);
    }
}
