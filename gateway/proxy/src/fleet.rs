//! From the config's pools to running ones: text side, workers, upstream.

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use penstock_proto::handshake::PoolKey;
use penstock_text::{TextFiles, TextModel};
use sha2::{Digest, Sha256};

use crate::config::{PoolConfig, Snapshot};
use crate::generate::PoolUpstream;
use crate::pool::{self, FleetRuntime, Leave, LocalWorkers, Pool};
use crate::upstream::Upstream;

/// Files of a checkpoint that the program carries: (name, content).
pub type Embedded = &'static [(&'static str, &'static [u8])];

/// How this program starts its own workers.
pub struct WorkerCommand {
    /// The binary.
    pub program: PathBuf,
    /// The arguments for a pool, without address and cores.
    pub args: fn(&PoolConfig) -> Vec<OsString>,
    /// The embedded model.
    pub demo: Embedded,
}

/// Why a pool cannot be started.
#[derive(Debug, thiserror::Error)]
#[error("pool {pool:?}: {reason}")]
pub struct FleetError {
    /// Id of the pool.
    pub pool: String,
    /// What is wrong.
    pub reason: String,
}

/// All pools of a gateway. Dropping it leaves the workers to be adopted.
pub struct Fleet {
    pools: Vec<(String, Pool)>,
    upstreams: Vec<Arc<dyn Upstream>>,
    _runtime: FleetRuntime,
}

impl Fleet {
    /// Loads the text side of every pool and starts the workers. Returns before they are ready.
    ///
    /// # Errors
    /// [`FleetError`] of the first pool that cannot work; nothing of it was started.
    pub fn start(config: &Snapshot, command: &WorkerCommand) -> Result<Self, FleetError> {
        let failed = |pool: &PoolConfig, reason: String| FleetError { pool: pool.id.clone(), reason };
        let pool = config.pools.first().map_or_else(String::new, |pool| pool.id.clone());
        let runtime = FleetRuntime::start().map_err(|error| FleetError { pool, reason: error.to_string() })?;
        let (mut pools, mut upstreams): (Vec<_>, Vec<Arc<dyn Upstream>>) = (Vec::new(), Vec::new());
        let cores = cores();
        let mut texts = Vec::new();
        for asked in &config.pools {
            texts.push(Arc::new(text(asked, command.demo).map_err(|reason| failed(asked, reason))?));
        }
        for (asked, text) in config.pools.iter().zip(texts) {
            let state_dir = state_dir(config).map_err(|reason| failed(asked, reason))?;
            let settings =
                settings(asked, command, &text, state_dir, &cores).map_err(|reason| failed(asked, reason))?;
            let pool = Pool::start(&runtime, settings).map_err(|error| failed(asked, error.to_string()))?;
            upstreams.push(Arc::new(PoolUpstream::new(asked.id.clone(), text, pool.clone())));
            pools.push((asked.id.clone(), pool));
        }
        Ok(Self { pools, upstreams, _runtime: runtime })
    }

    /// What answers.
    pub fn upstreams(&self) -> Vec<Arc<dyn Upstream>> {
        self.upstreams.clone()
    }

    /// The pools by id, for the progress display.
    pub fn pools(&self) -> &[(String, Pool)] {
        &self.pools
    }

    /// Ends the pools; the local workers exit or stay for the next gateway.
    pub fn stop(&self, leave: Leave, deadline: Duration) {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async {
            for (_, pool) in &self.pools {
                pool.shutdown(leave, deadline).await;
            }
        });
    }
}

/// The text side of a pool's model.
pub fn text(asked: &PoolConfig, demo: Embedded) -> Result<TextModel, String> {
    let loaded = match &asked.model {
        Some(folder) => TextModel::from_dir(folder),
        None => {
            let file = |name: &str| demo.iter().find(|(have, _)| *have == name).map(|(_, bytes)| Cow::Borrowed(*bytes));
            TextModel::load(&TextFiles {
                tokenizer_json: file("tokenizer.json").unwrap_or_default(),
                tokenizer_config_json: file("tokenizer_config.json"),
                chat_template_jinja: file("chat_template.jinja"),
                generation_config_json: file("generation_config.json"),
                special_tokens_map_json: file("special_tokens_map.json"),
                config_json: file("config.json"),
            })
        }
    };
    loaded.map_err(|error| error.to_string())
}

fn settings(
    asked: &PoolConfig,
    command: &WorkerCommand,
    text: &TextModel,
    state_dir: PathBuf,
    cores: &[usize],
) -> Result<pool::PoolConfig, String> {
    let mut settings = pool::PoolConfig::new(asked.id.clone());
    settings.tokenizer_hash = Some(text.tokenizer_hash().to_vec());
    settings.requests_max = asked.queue_max;
    if let Some(path) = &asked.key_file {
        let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        settings.key = Some(PoolKey::new(&bytes).map_err(|error| format!("{}: {error}", path.display()))?);
    }
    for address in &asked.connect {
        settings.connect.push(address.parse().map_err(|error| format!("{error}"))?);
    }
    if asked.connect.is_empty() {
        settings.local = Some(LocalWorkers {
            count: asked.workers,
            program: command.program.clone(),
            args: (command.args)(asked),
            // One worker floats: pinning it would only keep it off the cores that the gateway leaves idle.
            cores: if asked.workers > 1 { cores.to_vec() } else { Vec::new() },
            state_dir,
            identity: identity(asked, &command.program),
            exit_deadline: Duration::from_secs(5),
        });
    }
    Ok(settings)
}

/// Changes whenever a running worker would not be what a new one is: another program, another model.
fn identity(asked: &PoolConfig, program: &Path) -> String {
    let mut hasher = Sha256::new();
    let mut add = |path: &Path| {
        let Ok(meta) = std::fs::metadata(path) else { return };
        let modified = meta.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        hasher.update(format!("{} {} {modified:?}\n", path.display(), meta.len()));
    };
    add(program);
    for entry in asked.model.iter().flat_map(std::fs::read_dir).flatten().flatten() {
        add(&entry.path());
    }
    let digest = hasher.finalize();
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Cores that this process may use.
fn cores() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()
}

/// Where sockets, leases and logs are kept.
///
/// # Errors
/// Nobody says where, or the working directory cannot be told.
pub fn state_dir(config: &Snapshot) -> Result<PathBuf, String> {
    if let Some(path) = &config.state_dir {
        return std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()));
    }
    let from_env = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = from_env("XDG_STATE_HOME").or_else(|| from_env("HOME").map(|home| home.join(".local/state")));
    let base = base.ok_or("no place for state: set --state-dir, or HOME")?;
    Ok(base.join("penstock"))
}
