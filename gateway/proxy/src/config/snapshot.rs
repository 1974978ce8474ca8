//! Config in use: immutable, complete and checked.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use penstock_govern::Limit;

use super::ModelConfig;
use super::admin::AdminConfig;
use super::plugins::PluginConfig;
use super::web::CorsConfig;
use crate::auth::{AuthConfig, Key, Team};
use penstock_base::Secret;
use penstock_govern::prices::Prices;
use penstock_http::HttpLimits;
use penstock_pool::Follow;
use penstock_pool::scaler::Hook;
use penstock_provider::ProviderConfig;
use penstock_telemetry::TelemetryConfig;

/// Complete config of a running gateway.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// TCP listener.
    pub listen: SocketAddr,
    /// Unix listener.
    pub unix: Option<PathBuf>,
    /// Names accepted in `Host` without a credential, besides addresses and `localhost`.
    pub hosts: Vec<String>,
    /// Default model of `/v1/moderations`.
    pub moderation_model: Option<String>,
    /// Web origins whose pages may use the gateway.
    pub cors: CorsConfig,
    /// TLS of the TCP listener.
    pub tls: Option<TlsFiles>,
    /// Folder for sockets, leases and logs of local workers; `None`: the user's default.
    pub state_dir: Option<PathBuf>,
    /// Reload the config file when it changes.
    pub watch: bool,
    /// Write changes made through the admin API to the config file.
    pub config_writes: bool,
    /// Number of connection threads.
    pub threads: usize,
    /// Limits of the HTTP transport.
    pub http: Arc<HttpLimits>,
    /// Time limit for one answer.
    pub request_timeout: Option<Duration>,
    /// Longest time for answers in progress after SIGTERM.
    pub grace: Duration,
    /// Longest time for answers in progress in a process that has handed over to its successor.
    pub upgrade_grace: Duration,
    /// Longest time that the head of a stream waits for its first token.
    pub commit: Duration,
    /// Silence on a stream after which a comment is sent as a heartbeat.
    pub heartbeat: Duration,
    /// Log level or filter directives.
    pub log_level: String,
    /// Destination of the access log.
    pub access_log: String,
    /// Settings of the admin API.
    pub admin: AdminConfig,
    /// Rules of authentication, and the throttle of failed attempts.
    pub auth: AuthConfig,
    /// Settings of traces.
    pub telemetry: TelemetryConfig,
    /// API keys.
    pub keys: Vec<Key>,
    /// Teams of keys.
    pub teams: Vec<Team>,
    /// Rate limits and budgets.
    pub limits: Vec<Arc<Limit>>,
    /// Models with targets of their own.
    pub models: Vec<ModelConfig>,
    /// Price table of models.
    pub prices: Arc<Prices>,
    /// Send the target and the number of attempts with every relayed answer.
    pub explain: bool,
    /// Send the cost with every answer.
    pub cost_header: bool,
    /// Store of keys, ledger, files, batches and responses.
    pub store: StoreConfig,
    /// Counters of the limits that several gateways share.
    pub counters: CountersConfig,
    /// Limits of batches.
    pub batches: BatchesConfig,
    /// Plugins, in the order of the file.
    pub plugins: Vec<PluginConfig>,
    /// Pools; at least one where there is no provider.
    pub pools: Vec<PoolConfig>,
    /// Providers.
    pub providers: Vec<ProviderConfig>,
}

/// Location and bounds of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// PostgreSQL; `None`: SQLite.
    pub postgres: Option<PostgresConfig>,
    /// Path of the SQLite database; `None`: in the state folder.
    pub path: Option<PathBuf>,
    /// Largest size of the SQLite database in bytes; 0: no limit.
    pub bytes_max: u64,
    /// Largest file in bytes.
    pub file_bytes_max: u64,
    /// Most bytes of all files of one key.
    pub key_bytes_max: u64,
    /// Most bytes of stored responses of one key.
    pub key_response_bytes_max: u64,
    /// Most bytes of stored responses of all keys.
    pub response_bytes_max: u64,
    /// Retention of stored responses, in days.
    pub response_days: u64,
    /// Retention of settled ledger entries, in days; 0: for ever.
    pub ledger_days: u64,
    /// Retention of the audit log, in days; 0: for ever.
    pub audit_days: u64,
}

/// PostgreSQL database that several gateways share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostgresConfig {
    /// URL with the password.
    pub url: Secret,
    /// Certificates to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// Most connections of the pool.
    pub connections: usize,
}

/// Location of the counters of limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CountersConfig {
    /// In this process: the gateway counts alone.
    Own,
    /// In the store's PostgreSQL.
    Store,
    /// In Redis or Valkey.
    Redis {
        /// URL with the password.
        url: Secret,
        /// Prefix of every key.
        prefix: String,
        /// Certificates to check the server's against, instead of the system's.
        ca_file: Option<PathBuf>,
    },
}

/// Limits of batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchesConfig {
    /// Lines that are processed at once.
    pub concurrency: usize,
    /// Most lines of one batch.
    pub lines_max: u32,
    /// Most unfinished batches of one key.
    pub open_max: u64,
    /// Most attempts for one line.
    pub attempts_max: u32,
}

/// TLS files of the listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain, PEM.
    pub cert: PathBuf,
    /// Private key, PEM.
    pub key: PathBuf,
    /// Authorities of client certificates, PEM.
    pub client_ca: Option<PathBuf>,
    /// Whether a handshake without a client certificate fails.
    pub client_required: bool,
}

/// Pool: a model and its workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Pool id, and model name in requests.
    pub id: String,
    /// Checkpoint folder; `None`: the embedded demo model.
    pub model: Option<PathBuf>,
    /// Worker processes to start.
    pub workers: usize,
    /// Addresses of workers started elsewhere; then `workers` is not used.
    pub connect: Vec<String>,
    /// Secret shared with workers on TCP.
    pub key_file: Option<PathBuf>,
    /// Certificate shown to workers on TCP, and the authorities trusted there.
    pub tls: Option<penstock_link::TlsFiles>,
    /// Threads per worker; 0: the cores are divided among the workers.
    pub threads: usize,
    /// Device.
    pub device: DeviceChoice,
    /// CPU instruction path.
    pub path: String,
    /// Longest sequence in tokens; 0: the model's.
    pub context_tokens: u32,
    /// Memory for KV blocks per worker in bytes; 0: a share of the free memory.
    pub kv_bytes_max: u64,
    /// KV tiers below the device.
    pub tiers: TierConfig,
    /// Most running sequences per worker; 0: the worker's default.
    pub sequences_max: u32,
    /// Most open requests; more are answered 503.
    pub queue_max: usize,
    /// Longest waits of requests for a worker.
    pub waits: WaitConfig,
    /// Routing policy.
    pub policy: penstock_router::Policy,
    /// Latency objectives.
    pub slo: Option<SloConfig>,
    /// Migrate running requests from a slow worker to a faster one.
    pub balance: bool,
    /// Load blocks of waiting requests from lower tiers.
    pub kv_prefetch: bool,
    /// Let requests ask for the routing decision and its reasons.
    pub explain: bool,
    /// Workers in the prefill role at the start.
    pub prefill_workers: usize,
    /// Whether the workers' roles follow the load.
    pub roles: Follow,
    /// Scaling of the number of workers.
    pub replicas: ReplicasConfig,
    /// File of routing decisions, one JSON line each.
    pub record: Option<PathBuf>,
}

/// Scaling of a pool's number of workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicasConfig {
    /// Whether the number follows the load, or only logs what it would do.
    pub follow: Follow,
    /// Fewest workers.
    pub min: usize,
    /// Most workers.
    pub max: usize,
    /// Time for which fewer workers must suffice before one is stopped.
    pub idle: Duration,
    /// Hook that starts and stops external workers.
    pub hook: Option<Arc<Hook>>,
}

/// Longest waits of a pool's requests for a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitConfig {
    /// Wait until any worker is ready.
    pub ready: Duration,
    /// Wait of an interrupted request until it can be resumed.
    pub resume: Duration,
    /// Wait in the queue for a free worker.
    pub queue: Duration,
    /// Least wait while a worker starts, in multiples of its load time.
    pub loads: u32,
}

/// Latency objectives of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SloConfig {
    /// Time to first token (TTFT), without the prompt's share.
    pub ttft: Duration,
    /// Additional TTFT per thousand prompt tokens.
    pub ttft_per_1k: Duration,
    /// Mean time per output token (TPOT).
    pub tpot: Duration,
    /// Percentage of the TTFT objective above which a request is refused; 0: never.
    pub refuse_above_percent: u32,
}

/// KV tiers of a worker below its device. Zero and `None`: no such tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierConfig {
    /// Host memory in bytes.
    pub host_bytes: u64,
    /// Folder of the disk tier.
    pub disk_path: Option<PathBuf>,
    /// Size of the disk tier per worker, in bytes.
    pub disk_bytes: u64,
    /// URL of the remote tier (Redis, Valkey or S3), without password.
    pub remote: Option<String>,
    /// File with the remote tier's password.
    pub remote_password_file: Option<PathBuf>,
}

/// Device of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// Fastest device that is available.
    Auto,
    /// CPU kernels.
    Cpu,
    /// Reference implementation in f32.
    Reference,
}

impl DeviceChoice {
    /// Name in the config.
    pub fn name(self) -> &'static str {
        match self {
            DeviceChoice::Auto => "auto",
            DeviceChoice::Cpu => "cpu",
            DeviceChoice::Reference => "reference",
        }
    }
}
