//! Config in use: immutable, complete and checked.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use penstock_govern::Limit;

use super::admin::AdminConfig;
use super::endpoint_picker::EndpointPickerConfig;
use super::hub::HubConfig;
use super::plugins::PluginConfig;
use super::web::CorsConfig;
use penstock_auth::{AuthConfig, AuthSettings};
use penstock_base::Secret;
use penstock_generate::AnswerRules;
use penstock_govern::prices::Prices;
use penstock_http::HttpLimits;
use penstock_pool::scaler::Hook;
use penstock_pool::{Follow, OnDemand};
use penstock_provider::ProviderConfig;
use penstock_relay::{ModelConfig, RelayConfig};
use penstock_telemetry::TelemetryConfig;
use penstock_text::{ReasoningMarkers, ToolFormat};

use crate::webhooks::WebhookConfig;

/// Complete config of a running gateway, every default filled in and every key checked.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Address and port of the TCP listener for requests.
    pub listen: SocketAddr,
    /// Path of the Unix socket that also takes requests; `None`: none.
    pub unix: Option<PathBuf>,
    /// Names accepted in `Host` without a credential, besides addresses and `localhost`.
    pub hosts: Vec<String>,
    /// Model of `/v1/moderations` for requests that name none; `None`: such requests are answered 404.
    pub moderation_model: Option<String>,
    /// Web origins whose pages may use the gateway.
    pub cors: CorsConfig,
    /// Certificate and key of the TCP listener; `None`: plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Folder for sockets, leases and logs of local workers; `None`: the user's default.
    pub state_dir: Option<PathBuf>,
    /// Largest size of the cache of packed weights in the state folder, in bytes; 0: there is none.
    pub weights_cache_bytes_max: u64,
    /// True if the config file is reloaded when it is written or replaced.
    pub watch: bool,
    /// Write changes made through the admin API to the config file.
    pub config_writes: bool,
    /// Number of threads that serve connections.
    pub threads: usize,
    /// Limits of the HTTP transport: sizes, timeouts and connection counts.
    pub http: Arc<HttpLimits>,
    /// Time limit for one answer; `None`: no limit.
    pub request_timeout: Option<Duration>,
    /// Longest time for answers in progress after SIGTERM; then they are cut.
    pub grace: Duration,
    /// Longest time for answers in progress in a process that has handed over to its successor.
    pub upgrade_grace: Duration,
    /// Longest time that the head of a stream waits for its first token.
    pub commit: Duration,
    /// Silence on a stream after which a heartbeat is sent.
    pub heartbeat: Duration,
    /// Log level or filter directives (tracing syntax) for standard error.
    pub log_level: String,
    /// Destination of the access log: `-` for standard output, `off`, or a path.
    pub access_log: String,
    /// Listeners, origins and keys of the admin API.
    pub admin: AdminConfig,
    /// Service that Envoy asks for endpoints; `None`: none.
    pub endpoint_picker: Option<EndpointPickerConfig>,
    /// Rules of authentication, with the configured keys, teams and token issuers.
    pub auth: AuthConfig,
    /// Export of traces: collector, sampling and service name.
    pub telemetry: TelemetryConfig,
    /// Rate limits and budgets (`[[limits]]`), in the order of the file.
    pub limits: Vec<Arc<Limit>>,
    /// Models with targets of their own (`[[models]]`), in the order of the file.
    pub models: Vec<ModelConfig>,
    /// Price table of models, embedded or from `prices.file`.
    pub prices: Arc<Prices>,
    /// Send the target and the number of attempts with every relayed answer.
    pub explain: bool,
    /// True if every answer names its cost; otherwise only where a request asks for it.
    pub cost_header: bool,
    /// Hub that models are pulled from, and the folder that holds them.
    pub hub: HubConfig,
    /// Store of keys, ledger, files, batches and responses.
    pub store: StoreConfig,
    /// Counters of the limits that several gateways share.
    pub counters: CountersConfig,
    /// Bounds of batches: concurrency, lines, open batches and attempts.
    pub batches: BatchesConfig,
    /// Plugins of the config (`[[plugins]]`), in the order of the file.
    pub plugins: Vec<PluginConfig>,
    /// Pools of the config (`[[pools]]`); at least one where the config has no provider.
    pub pools: Vec<PoolConfig>,
    /// Webhooks of the config (`[[webhooks]]`), in the order of the file.
    pub webhooks: Vec<WebhookConfig>,
    /// Providers of the config (`[[providers]]`), in the order of the file.
    pub providers: Vec<ProviderConfig>,
}

impl Snapshot {
    /// Parts of the config that authentication is made of.
    pub fn auth_settings(&self) -> AuthSettings<'_> {
        AuthSettings {
            auth: &self.auth,
            listen: self.listen,
            state_dir: state_dir(self),
            is_shared: self.store.postgres.is_some(),
            limits: &self.limits,
        }
    }

    /// Part of the config that the relay is made of; `models` and `providers`: those of the config, or their members.
    pub fn relay<'a>(&'a self, models: &'a [ModelConfig], providers: &'a [ProviderConfig]) -> RelayConfig<'a> {
        RelayConfig { models, prices: &self.prices, providers, explain: self.explain }
    }
}

/// Location of the store (SQLite or PostgreSQL), and the bounds of what it keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// PostgreSQL in place of the SQLite file; `None`: SQLite.
    pub postgres: Option<PostgresConfig>,
    /// Path of the SQLite database; `None`: in the state folder.
    pub path: Option<PathBuf>,
    /// Largest size of the SQLite database in bytes; 0: no limit.
    pub bytes_max: u64,
    /// Largest uploaded file in bytes.
    pub file_bytes_max: u64,
    /// Most bytes of all uploaded files of one key together.
    pub key_bytes_max: u64,
    /// Most bytes of stored responses of one key; beyond it, the oldest are deleted.
    pub key_response_bytes_max: u64,
    /// Most bytes of stored responses of all keys.
    pub response_bytes_max: u64,
    /// Retention of stored responses in days; older ones are deleted.
    pub response_days: u64,
    /// Most bytes of the events kept of one response that is streamed in the background.
    pub response_event_bytes_max: usize,
    /// Retention of settled ledger entries, in days; 0: for ever.
    pub ledger_days: u64,
    /// Retention of the audit log, in days; 0: for ever.
    pub audit_days: u64,
}

/// PostgreSQL database that several gateways share as their store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostgresConfig {
    /// URL of the database with the password in it.
    pub url: Secret,
    /// PEM file of certificates to trust instead of the system's; `None`: the system's.
    pub ca_file: Option<PathBuf>,
    /// Most connections of the pool, besides two that only listen.
    pub connections: usize,
}

/// Location of the counters of limits: this process, the store, or Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CountersConfig {
    /// In this process's memory: the gateway counts alone.
    Own,
    /// In the PostgreSQL database of the store.
    Store,
    /// In a Redis or Valkey server that several gateways share.
    Redis {
        /// URL of the server with the password in it.
        url: Secret,
        /// Prefix of every key, so that several installations can share a server.
        prefix: String,
        /// Certificates to check the server's against, instead of the system's.
        ca_file: Option<PathBuf>,
    },
}

/// Bounds of batches, from the section `[batches]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchesConfig {
    /// Batch lines in flight at once over all batches.
    pub concurrency: usize,
    /// Most lines (requests) of one batch.
    pub lines_max: u32,
    /// Most unfinished batches of one key at once.
    pub open_max: u64,
    /// Most bytes of results that the batches of one key keep.
    pub key_output_bytes_max: u64,
    /// Most attempts for one line that fails with a temporary error.
    pub attempts_max: u32,
}

/// TLS files of the TCP listener, and the rule for client certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM file of the certificate chain.
    pub cert: PathBuf,
    /// PEM file of the certificate's private key.
    pub key: PathBuf,
    /// PEM file of the authorities of client certificates; `None`: no client certificates.
    pub client_ca: Option<PathBuf>,
    /// True if a handshake without a client certificate fails.
    pub client_required: bool,
}

/// Choice of a parser for what a model writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Parser<T> {
    /// The one that the checkpoint shows.
    #[default]
    Auto,
    /// None: what the model writes stays text.
    Off,
    /// This one.
    Named(T),
}

/// Choice of the result that a pool's model makes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TaskChoice {
    /// Vectors where the checkpoint says how to make them, else text.
    #[default]
    Auto,
    /// Text.
    Generate,
    /// Vectors of texts.
    Embed,
    /// Scores of documents.
    Rerank,
}

/// One `[[pools]]` entry: a model with the workers that serve it, and their settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Id of the pool, and name by which requests ask for its model.
    pub id: String,
    /// Checkpoint folder in Hugging Face's layout; `None`: the embedded demo model.
    pub model: Option<PathBuf>,
    /// Adapters of the model, each served as a model of its own, in the order of their names.
    pub adapters: Vec<AdapterConfig>,
    /// Result that the model makes: text, vectors or scores.
    pub task: TaskChoice,
    /// Format of the model's tool calls.
    pub tool_format: Parser<ToolFormat>,
    /// Marks of the model's reasoning.
    pub reasoning: Parser<ReasoningMarkers>,
    /// Rules about the model's answers.
    pub answers: AnswerRules,
    /// Number of local worker processes to start.
    pub workers: usize,
    /// Addresses of workers started elsewhere; then `workers` is not used.
    pub connect: Vec<String>,
    /// File with the secret that the gateway and workers on TCP share; `None`: no such secret.
    pub key_file: Option<PathBuf>,
    /// Certificate shown to workers on TCP, and the authorities whose certificates the workers must have.
    pub tls: Option<penstock_link::TlsFiles>,
    /// Threads per worker; 0: the cores are divided among the workers.
    pub threads: usize,
    /// Device that the workers compute on.
    pub device: DeviceChoice,
    /// Format to which matrices are rounded while they are loaded: `none`, `int8` or `int4`.
    pub quantize: String,
    /// Form of keys and values in the KV cache: `bf16` or `int8`.
    pub kv_format: String,
    /// CPU instruction set of the workers: `auto`, or one that `penstock check` lists.
    pub path: String,
    /// Longest sequence in tokens; 0: the model's context length, as far as memory goes.
    pub context_tokens: u32,
    /// Memory for KV blocks per worker in bytes; 0: a share of the free memory.
    pub kv_bytes_max: u64,
    /// Share of a GPU's memory that a worker may take in all, in millionths; `None`: what is free.
    pub gpu_memory_millionths: Option<u32>,
    /// KV tiers below the device: host memory, disk, remote.
    pub tiers: TierConfig,
    /// Most running sequences per worker; 0: the worker's default.
    pub sequences_max: u32,
    /// Most draft tokens per sequence and step by prompt lookup; 0: none.
    pub prompt_lookup: u32,
    /// Most requests of the pool open at once; more are answered 503.
    pub queue_max: usize,
    /// Longest waits of the pool's requests for a worker, by their reason.
    pub waits: WaitConfig,
    /// Policy by which the router chooses a worker for a request.
    pub policy: penstock_router::Policy,
    /// Latency objectives (TTFT, TPOT) of the pool; `None`: none.
    pub slo: Option<SloConfig>,
    /// Migrate running requests from a slow worker to a faster one.
    pub balance: bool,
    /// True if KV blocks of waiting requests are prefetched from lower tiers.
    pub kv_prefetch: bool,
    /// True if local workers share one packed copy of the weights.
    pub shared_weights: bool,
    /// Let requests ask for the routing decision and its reasons.
    pub explain: bool,
    /// Number of workers that start with the prefill role.
    pub prefill_workers: usize,
    /// Whether the workers' roles follow the load: fixed, dry run or follow.
    pub roles: Follow,
    /// Rules by which the number of workers follows the load.
    pub replicas: ReplicasConfig,
    /// Rule by which the workers are started by the first request; `None`: they run all the time.
    pub on_demand: Option<OnDemand>,
    /// File that the router's decisions are written to, one JSON line each; `None`: none.
    pub record: Option<PathBuf>,
}

impl PoolConfig {
    /// Share of a GPU's memory that a worker may take in all, above 0 and up to 1; `None`: what is free.
    pub fn gpu_memory_share(&self) -> Option<f64> {
        self.gpu_memory_millionths.map(|millionths| f64::from(millionths) / 1e6)
    }

    /// Names under which the pool serves: its id, and those of its adapters.
    pub fn served(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.id.as_str()).chain(self.adapters.iter().map(|adapter| adapter.name.as_str()))
    }
}

/// A low-rank adapter (LoRA) of a pool's model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterConfig {
    /// Name by which requests ask for the model with the adapter.
    pub name: String,
    /// PEFT folder of the adapter, which the pool's local workers load. Workers that are started elsewhere have their own.
    pub path: PathBuf,
}

/// Rules by which a pool's number of workers follows the load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicasConfig {
    /// Whether the number follows the load, or only logs what it would do.
    pub follow: Follow,
    /// Fewest workers that the scaling leaves.
    pub min: usize,
    /// Most workers that the scaling starts.
    pub max: usize,
    /// Time for which fewer workers must suffice before one is stopped.
    pub idle: Duration,
    /// Hook that starts and stops external workers; `None`: local processes only.
    pub hook: Option<Arc<Hook>>,
}

/// Longest waits of a pool's requests for a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitConfig {
    /// Longest wait for any worker of the pool to be ready.
    pub ready: Duration,
    /// Wait of an interrupted request until it can be resumed.
    pub resume: Duration,
    /// Longest wait in the queue for a free worker.
    pub queue: Duration,
    /// Least wait while a worker starts, in multiples of its load time.
    pub loads: u32,
}

/// Latency objectives of a pool: TTFT as a line over the prompt's length, and TPOT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SloConfig {
    /// Time to first token (TTFT), without the prompt's share.
    pub ttft: Duration,
    /// Additional TTFT that each thousand prompt tokens allow.
    pub ttft_per_1k: Duration,
    /// Longest mean time per output token (TPOT).
    pub tpot: Duration,
    /// Percentage of the TTFT objective above which a request is refused; 0: never.
    pub refuse_above_percent: u32,
}

/// KV tiers of a worker below its device. Zero and `None`: no such tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierConfig {
    /// Host memory per worker for KV blocks, in bytes; 0: no host tier.
    pub host_bytes: u64,
    /// Folder of the disk tier; `None`: no disk tier.
    pub disk_path: Option<PathBuf>,
    /// Size of the disk tier per worker, in bytes.
    pub disk_bytes: u64,
    /// URL of the remote tier (Redis, Valkey or S3), without password.
    pub remote: Option<String>,
    /// File with the remote tier's password; `None`: the config gives none.
    pub remote_password_file: Option<PathBuf>,
}

/// Device that a pool's workers compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// Fastest device that is available on the worker's machine.
    Auto,
    /// CPU with optimized kernels for its instruction set.
    Cpu,
    /// NVIDIA GPU, and nothing else.
    Cuda,
    /// Reference implementation in f32: slow, for comparison.
    Reference,
}

impl DeviceChoice {
    /// Name of the device as the config writes it.
    pub fn name(self) -> &'static str {
        match self {
            DeviceChoice::Auto => "auto",
            DeviceChoice::Cpu => "cpu",
            DeviceChoice::Cuda => "cuda",
            DeviceChoice::Reference => "reference",
        }
    }
}

/// State folder of a config: sockets, leases and logs.
///
/// # Errors
/// The config names no folder and there is no default, or the working directory is unknown.
pub fn state_dir(config: &Snapshot) -> Result<PathBuf, String> {
    if let Some(path) = &config.state_dir {
        return std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()));
    }
    default_state_dir()
}

/// Default state folder: `penstock` in `$XDG_STATE_HOME` or `~/.local/state`.
///
/// # Errors
/// Neither variable names an absolute path.
pub fn default_state_dir() -> Result<PathBuf, String> {
    let from_env = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = from_env("XDG_STATE_HOME").or_else(|| from_env("HOME").map(|home| home.join(".local/state")));
    let base = base.ok_or("no place for state: set --state-dir, or HOME")?;
    Ok(base.join("penstock"))
}
