//! The config in use: immutable, complete, checked.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use penstock_govern::Limit;

use super::ModelConfig;
use super::admin::AdminConfig;
use super::plugins::PluginConfig;
use super::providers::ProviderConfig;
use super::telemetry::TelemetryConfig;
use super::web::CorsConfig;
use crate::auth::{AuthConfig, Key, Team};
use crate::http::HttpLimits;
use crate::pool::Follow;
use crate::pool::hook::Hook;
use crate::prices::Prices;
use penstock_base::Secret;

/// Everything that a running gateway reads.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// TCP listener.
    pub listen: SocketAddr,
    /// Unix listener.
    pub unix: Option<PathBuf>,
    /// Names in `Host` besides addresses and `localhost`, where no credential is needed.
    pub hosts: Vec<String>,
    /// The model of moderations that name none.
    pub moderation_model: Option<String>,
    /// Which pages of other origins may use it.
    pub cors: CorsConfig,
    /// TLS of the TCP listener.
    pub tls: Option<TlsFiles>,
    /// Sockets, leases and logs of local workers; `None`: the user's default.
    pub state_dir: Option<PathBuf>,
    /// Take up changes of the config file.
    pub watch: bool,
    /// Write to the config file what the admin API applies.
    pub config_writes: bool,
    /// Threads for connections.
    pub threads: usize,
    /// Bounds of the transport.
    pub http: Arc<HttpLimits>,
    /// Longest time for one answer.
    pub request_timeout: Option<Duration>,
    /// How long answers in progress may take after SIGTERM.
    pub grace: Duration,
    /// How long they may take in a process that has handed over.
    pub upgrade_grace: Duration,
    /// How long the head of a stream waits for its first token.
    pub commit: Duration,
    /// Silence after which a comment is sent.
    pub heartbeat: Duration,
    /// Filter of the log.
    pub log_level: String,
    /// Target of the access log.
    pub access_log: String,
    /// The admin API.
    pub admin: AdminConfig,
    /// Who is let in without a key, and how guessing is slowed down.
    pub auth: AuthConfig,
    /// Traces.
    pub telemetry: TelemetryConfig,
    /// API keys.
    pub keys: Vec<Key>,
    /// Teams of keys.
    pub teams: Vec<Team>,
    /// How much may be used.
    pub limits: Vec<Arc<Limit>>,
    /// Models with targets of their own.
    pub models: Vec<ModelConfig>,
    /// What models cost.
    pub prices: Arc<Prices>,
    /// Say the target and the number of attempts on every relayed answer.
    pub explain: bool,
    /// Say the cost on every answer.
    pub cost_header: bool,
    /// What is kept.
    pub store: StoreConfig,
    /// Counters that several gateways share.
    pub counters: CountersConfig,
    /// How batches are run.
    pub batches: BatchesConfig,
    /// Plugins, in the order of the file.
    pub plugins: Vec<PluginConfig>,
    /// Pools; at least one where there is no provider.
    pub pools: Vec<PoolConfig>,
    /// Providers.
    pub providers: Vec<ProviderConfig>,
}

/// What is kept, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// PostgreSQL; `None`: SQLite.
    pub postgres: Option<PostgresConfig>,
    /// SQLite's database; `None`: in the state directory.
    pub path: Option<PathBuf>,
    /// Its size; 0: no limit.
    pub bytes_max: u64,
    /// One file.
    pub file_bytes_max: u64,
    /// All files of one key.
    pub key_bytes_max: u64,
    /// Stored responses of one key.
    pub key_response_bytes_max: u64,
    /// Stored responses of all keys.
    pub response_bytes_max: u64,
    /// How long responses are kept.
    pub response_days: u64,
    /// How long settled entries of the ledger are kept; 0: for ever.
    pub ledger_days: u64,
    /// How long the audit log is kept; 0: for ever.
    pub audit_days: u64,
}

/// A PostgreSQL that several gateways share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostgresConfig {
    /// Where it is, with its password.
    pub url: Secret,
    /// Certificates to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// Connections of the pool.
    pub connections: usize,
}

/// Where several gateways count together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CountersConfig {
    /// They do not: this one counts by itself.
    Own,
    /// In the store, which is PostgreSQL.
    Store,
    /// In Redis or Valkey.
    Redis {
        /// Where it is, with its password.
        url: Secret,
        /// Before every key.
        prefix: String,
        /// Certificates that the server's is checked against, instead of the system's.
        ca_file: Option<PathBuf>,
    },
}

/// How batches are run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchesConfig {
    /// Lines answered at once.
    pub concurrency: usize,
    /// Lines of one batch.
    pub lines_max: u32,
    /// Batches of one key that have not ended.
    pub open_max: u64,
    /// Attempts for one line.
    pub attempts_max: u32,
}

/// Certificate and key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Chain, PEM.
    pub cert: PathBuf,
    /// Private key, PEM.
    pub key: PathBuf,
    /// Authorities of clients' certificates, PEM.
    pub client_ca: Option<PathBuf>,
    /// Whether there is no connection without one.
    pub client_required: bool,
}

/// A model and its workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Model name in requests.
    pub id: String,
    /// Checkpoint folder; `None`: the embedded demo model.
    pub model: Option<PathBuf>,
    /// Worker processes to start.
    pub workers: usize,
    /// Workers started elsewhere, instead.
    pub connect: Vec<String>,
    /// Secret shared with workers on TCP.
    pub key_file: Option<PathBuf>,
    /// What is shown to workers on TCP, and who is trusted there.
    pub tls: Option<penstock_link::TlsFiles>,
    /// Threads per worker; 0: shared out.
    pub threads: usize,
    /// Device.
    pub device: DeviceChoice,
    /// CPU instruction path.
    pub path: String,
    /// Longest sequence; 0: the model's.
    pub context_tokens: u32,
    /// Memory for KV blocks; 0: a share.
    pub kv_bytes_max: u64,
    /// Places for KV blocks beside the device.
    pub tiers: TierConfig,
    /// Sequences at once; 0: the worker's default.
    pub sequences_max: u32,
    /// Requests open at once.
    pub queue_max: usize,
    /// How long requests wait for a worker.
    pub waits: WaitConfig,
    /// Which worker gets a request.
    pub policy: penstock_router::Policy,
    /// Objectives, if it has any.
    pub slo: Option<SloConfig>,
    /// Requests move from a slow worker to a faster one while they run.
    pub balance: bool,
    /// Tiers load for requests that wait.
    pub kv_prefetch: bool,
    /// Requests may ask who was chosen and why.
    pub explain: bool,
    /// Workers that prefill for the others at the start.
    pub prefill_workers: usize,
    /// Whether roles follow the load.
    pub roles: Follow,
    /// Whether the number of workers does.
    pub replicas: ReplicasConfig,
    /// Where decisions are written down.
    pub record: Option<PathBuf>,
}

/// How many workers a pool has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicasConfig {
    /// Whether that follows the load.
    pub follow: Follow,
    /// Workers at least.
    pub min: usize,
    /// Workers at most.
    pub max: usize,
    /// How long fewer must be enough.
    pub idle: Duration,
    /// Who is asked for workers that are not started here.
    pub hook: Option<Arc<Hook>>,
}

/// How long requests of a pool wait for a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitConfig {
    /// For any to be ready.
    pub ready: Duration,
    /// The same of a request that was interrupted.
    pub resume: Duration,
    /// For a free one.
    pub queue: Duration,
    /// At least so many times the load of a worker that comes.
    pub loads: u32,
}

/// Objectives of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SloConfig {
    /// Time to the first token, without the prompt's share.
    pub ttft: Duration,
    /// What each thousand prompt tokens may add.
    pub ttft_per_1k: Duration,
    /// Mean time between tokens.
    pub tpot: Duration,
    /// Hundredths of the first objective above which a request is refused; 0: never.
    pub refuse_above_percent: u32,
}

/// Where a worker keeps KV blocks that its device has no room for. Zeros and `None`: not there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierConfig {
    /// Memory of the host.
    pub host_bytes: u64,
    /// Folder of files.
    pub disk_path: Option<PathBuf>,
    /// Size of them, per worker.
    pub disk_bytes: u64,
    /// Redis or Valkey, without password.
    pub remote: Option<String>,
    /// Its password.
    pub remote_password_file: Option<PathBuf>,
}

/// Which device a worker uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best there is.
    Auto,
    /// The CPU's kernels.
    Cpu,
    /// The f32 reference.
    Reference,
}

impl DeviceChoice {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            DeviceChoice::Auto => "auto",
            DeviceChoice::Cpu => "cpu",
            DeviceChoice::Reference => "reference",
        }
    }
}
