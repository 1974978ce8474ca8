//! Conversion of the parsed file and the command line into a [`Snapshot`], or into the list of all faults.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::raw::{Document, Reader};
use penstock_proto::{Address, Bucket};
use penstock_router::policy::UnknownPolicy;
use penstock_router::{Policy, Slo, WORKERS_MAX};

use super::adapters::{self, adapters};
use super::hub::{Shelf, hub};
use super::limits::word;
use super::replicas::{on_demand, replicas};
use super::snapshot::{
    AdapterConfig, BatchesConfig, DeviceChoice, Parser, PoolConfig, SloConfig, Snapshot, TaskChoice, TierConfig,
    TlsFiles, WaitConfig,
};
use super::store::has_password;
use super::{Faults, identity, models};
use penstock_generate::AnswerRules;
use penstock_govern::prices::{EMBEDDED, Prices};
use penstock_http::HttpLimits;
use penstock_pool::Follow;
use penstock_text::{ReasoningMarkers, ToolFormat};

/// Name under which the embedded model is served.
pub const DEMO_MODEL: &str = "penstock-demo";

/// Command line options; each takes precedence over the file.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Address and port of the listener (`--listen`), for `server.listen`.
    pub listen: Option<String>,
    /// Checkpoint folder, GGUF file or name of a stored model of the pool (`--model`), for `pools.model`.
    pub model: Option<PathBuf>,
    /// Adapters of the pool's model (`--adapter`), for `pools.adapters`: each wins over the file's of the same name.
    pub adapters: Vec<AdapterConfig>,
    /// Model name in requests (`--name`).
    pub name: Option<String>,
    /// Number of worker processes of the pool (`--workers`).
    pub workers: Option<usize>,
    /// Threads per worker (`--threads`).
    pub threads: Option<usize>,
    /// Device of the workers (`--device`): auto, cpu, cuda or reference.
    pub device: Option<String>,
    /// Format to which matrices are rounded (`--quantize`), for `pools.quantize`.
    pub quantize: Option<String>,
    /// Form of keys and values (`--kv-format`), for `pools.kv_format`.
    pub kv_format: Option<String>,
    /// CPU instruction set of the workers (`--path`).
    pub path: Option<String>,
    /// Longest sequence in tokens (`--context`).
    pub context_tokens: Option<u32>,
    /// Folder for sockets, leases and logs (`--state-dir`), for `server.state_dir`.
    pub state_dir: Option<PathBuf>,
    /// Folder of pulled models (`--models-dir`), for `hub.folder`.
    pub models_dir: Option<PathBuf>,
    /// Log level or filter directives (`--log`), for `log.level`.
    pub log_level: Option<String>,
    /// Destination of the access log (`--access-log`), for `log.access`.
    pub access_log: Option<String>,
    /// Address of the admin API (`--admin`), for `admin.listen`.
    pub admin: Option<String>,
}

/// Checks a config text and returns the snapshot, or every fault found. `file` is a name for messages and the text;
/// `None`: all defaults. `env` resolves environment variables.
pub fn load(
    file: Option<(&str, &str)>,
    overrides: &Overrides,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Snapshot, Faults> {
    load_needed(file, overrides, env, None)
}

/// Checks a config text as [`load`] does, for a command beside the gateway, whose environment lacks what the gateway's has: only the
/// tables of `needed` must have their variables set. Secrets of other tables are left out or replaced, so nothing can be served with
/// this snapshot.
pub fn load_beside(
    file: Option<(&str, &str)>,
    overrides: &Overrides,
    env: &dyn Fn(&str) -> Option<String>,
    needed: &[&str],
) -> Result<Snapshot, Faults> {
    load_needed(file, overrides, env, Some(needed))
}

fn load_needed(
    file: Option<(&str, &str)>,
    overrides: &Overrides,
    env: &dyn Fn(&str) -> Option<String>,
    needed: Option<&[&str]>,
) -> Result<Snapshot, Faults> {
    let (name, text) = file.unwrap_or(("command line", ""));
    let document = Document::parse(name, text, needed);
    document.check_tables();
    let snapshot = read(&document, overrides, env);
    unique(&document, "keys", snapshot.auth.keys.iter().map(|key| key.id.as_str()));
    unique(&document, "admin_keys", snapshot.admin.keys.iter().map(|key| key.id.as_str()));
    unique(&document, "teams", snapshot.auth.teams.iter().map(|team| team.id.as_str()));
    unique(&document, "jwt", snapshot.auth.issuers.iter().map(|issuer| issuer.id.as_str()));
    identity::check(&document, &snapshot.auth, snapshot.tls.as_ref());
    unique(&document, "providers", snapshot.providers.iter().map(|provider| provider.id.as_str()));
    unique(&document, "pools", snapshot.pools.iter().map(|pool| pool.id.as_str()));
    adapters::unique(&document, &snapshot.pools);
    unique(&document, "plugins", snapshot.plugins.iter().map(|plugin| &*plugin.id));
    let known = models::Known {
        pools: snapshot.pools.iter().flat_map(PoolConfig::served).collect(),
        providers: snapshot
            .providers
            .iter()
            .map(|provider| (provider.id.as_str(), provider.models.iter().map(String::as_str).collect()))
            .collect(),
    };
    models::check(&document, &snapshot.models, &known, &snapshot.prices);
    if let Some(name) = &snapshot.moderation_model
        && !models::is_known(name, &snapshot.models, &known)
    {
        document.table("server").fault("moderation_model", format!("there is no model {name:?}"));
    }
    super::limits::check(&document, &snapshot);
    super::web::check(&document, &snapshot);
    document.finish().map(|()| snapshot)
}

/// Reads every table. Faults are collected in the document; the values in their place are placeholders that are never
/// used.
fn read(document: &Document<'_>, overrides: &Overrides, env: &dyn Fn(&str) -> Option<String>) -> Snapshot {
    let (server, stream, log) = (document.table("server"), document.table("stream"), document.table("log"));
    let listen = listen(document, &server, overrides);
    let (unix, tls) = (server.text("unix").map(PathBuf::from), tls(&document.table("server.tls")));
    let request_timeout = Some(server.number("request_timeout_ms", 0..=86_400_000)).filter(|ms| *ms > 0).map(millis);
    let keys = document.tables("keys").iter().filter_map(|table| identity::key(table, env)).collect();
    let teams = document.tables("teams").iter().filter_map(identity::team).collect();
    let typed = server.text("state_dir").map(PathBuf::from);
    let state_dir = overrides.state_dir.clone().or(typed);
    let hub = hub(document, overrides.models_dir.as_ref());
    let shelf = Shelf::new(&hub, state_dir.as_ref());
    let mut pools: Vec<_> = document.tables("pools").iter().map(|table| pool(table, &shelf)).collect();
    let tables = document.tables("providers");
    let providers = tables.iter().filter_map(|table| super::providers::provider(table, env)).collect();
    if pools.is_empty() && (tables.is_empty() || overrides.model.is_some()) {
        pools.push(pool(&document.table("pools"), &shelf));
    }
    apply(document, &mut pools, overrides, &shelf);
    let (store, counters) = super::store::read(document, env);
    Snapshot {
        listen,
        unix,
        hosts: super::web::hosts(&server),
        moderation_model: server.text("moderation_model"),
        cors: super::web::cors(document),
        tls,
        state_dir,
        weights_cache_bytes_max: server.number("weights_cache_bytes_max", 0..=1 << 50),
        watch: server.flag("watch"),
        config_writes: server.flag("config_writes"),
        threads: threads(&server),
        http: Arc::new(http(&server)),
        request_timeout,
        grace: millis(server.number("grace_ms", 0..=86_400_000)),
        upgrade_grace: millis(server.number("upgrade_grace_ms", 0..=7 * 86_400_000)),
        commit: millis(stream.number("commit_ms", 0..=60_000)),
        heartbeat: millis(stream.number("heartbeat_ms", 100..=3_600_000)),
        log_level: log
            .text("level")
            .filter(|_| overrides.log_level.is_none())
            .or(overrides.log_level.clone())
            .unwrap_or_default(),
        access_log: log
            .text("access")
            .filter(|_| overrides.access_log.is_none())
            .or(overrides.access_log.clone())
            .unwrap_or_default(),
        telemetry: super::telemetry::telemetry(&document.table("telemetry"), env),
        hub,
        store,
        counters,
        batches: batches(&document.table("batches")),
        admin: super::admin::read(document, overrides, env),
        endpoint_picker: super::endpoint_picker::read(document),
        auth: identity::auth(document, env, keys, teams),
        limits: super::limits::read(document),
        models: models::read(document),
        plugins: document.tables("plugins").iter().filter_map(|table| super::plugins::plugin(table, env)).collect(),
        prices: Arc::new(prices(&document.table("prices"))),
        explain: server.flag("explain"),
        cost_header: server.flag("cost_header"),
        pools,
        webhooks: super::webhooks::read(document, env),
        providers,
    }
}

fn batches(table: &Reader<'_, '_>) -> BatchesConfig {
    BatchesConfig {
        concurrency: table.number("concurrency", 1..=4096) as usize,
        lines_max: table.number("lines_max", 1..=10_000_000) as u32,
        open_max: table.number("open_max", 1..=1_000_000),
        key_output_bytes_max: table.number("key_output_bytes_max", 1024..=1 << 50),
        attempts_max: table.number("attempts_max", 1..=1000) as u32,
    }
}

const fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn listen(document: &Document<'_>, server: &Reader<'_, '_>, overrides: &Overrides) -> SocketAddr {
    let typed = server.text("listen").unwrap_or_default();
    let text = overrides.listen.clone().unwrap_or(typed);
    // A bare port means loopback.
    let full = if text.bytes().all(|byte| byte.is_ascii_digit()) { format!("127.0.0.1:{text}") } else { text };
    if let Some(address) = full.to_socket_addrs().ok().and_then(|mut all| all.next()) {
        return address;
    }
    let message = format!("{full:?} is not ADDRESS:PORT, as 127.0.0.1:8080 or [::]:8080");
    match overrides.listen {
        Some(_) => document.fault_at("--listen", "", message),
        None => server.fault("listen", message),
    }
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn tls(table: &Reader<'_, '_>) -> Option<TlsFiles> {
    let (client_ca, client_required) = (table.text("client_ca").map(PathBuf::from), client_required(table));
    match (table.text("certificate"), table.text("key")) {
        (Some(cert), Some(key)) => {
            return Some(TlsFiles { cert: cert.into(), key: key.into(), client_ca, client_required });
        }
        (None, None) if client_ca.is_some() => table.fault("client_ca", "needs certificate and key"),
        (None, None) => {}
        (Some(_), None) => table.fault("certificate", "needs key too"),
        (None, Some(_)) => table.fault("key", "needs certificate too"),
    }
    None
}

fn client_required(table: &Reader<'_, '_>) -> bool {
    let text = table.text("client_auth").unwrap_or_default();
    if !["optional", "required"].contains(&text.as_str()) {
        table.fault("client_auth", format!("{text:?} is neither optional nor required"));
    }
    text == "required"
}

fn threads(server: &Reader<'_, '_>) -> usize {
    match server.number("threads", 0..=256) as usize {
        0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4)),
        given => given,
    }
}

fn http(server: &Reader<'_, '_>) -> HttpLimits {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    let limits = HttpLimits {
        head_bytes_max: server.number("head_bytes_max", 1024..=1 << 20) as usize,
        body_bytes_max: server.number("body_bytes_max", 1024..=4 * GIB) as usize,
        body_memory_bytes_max: server.number("body_memory_bytes_max", 1024..=1024 * GIB) as usize,
        answer_memory_bytes_max: server.number("answer_memory_bytes_max", 64 * MIB..=1024 * GIB) as usize,
        event_bytes_max: server.number("event_bytes_max", 64 * 1024..=32 * MIB) as usize,
        image_event_bytes_max: server.number("image_event_bytes_max", 64 * 1024..=32 * MIB) as usize,
        connections_max: server.number("connections_max", 1..=10_000_000) as usize,
        address_connections_max: server.number("address_connections_max", 0..=10_000_000) as usize,
        address_connections_per_second: server.number("address_connections_per_second", 0..=1_000_000) as u32,
        head_timeout: millis(server.number("head_timeout_ms", 10..=3_600_000)),
        body_timeout: millis(server.number("body_timeout_ms", 10..=3_600_000)),
        body_rate_bytes_min: server.number("body_rate_bytes_min", 1..=GIB),
        idle_timeout: millis(server.number("idle_timeout_ms", 10..=86_400_000)),
        write_stall: millis(server.number("write_stall_ms", 10..=3_600_000)),
        h2_streams_max: server.number("h2_streams_max", 1..=10_000) as u32,
        h2_header_list_bytes_max: server.number("h2_header_list_bytes_max", 1024..=1 << 20) as u32,
    };
    if limits.body_memory_bytes_max < limits.body_bytes_max {
        server.fault("body_memory_bytes_max", "must be at least body_bytes_max, or such a body could never be read");
    }
    limits
}

fn prices(table: &Reader<'_, '_>) -> Prices {
    let embedded = || Prices::parse(EMBEDDED).expect("the embedded table is valid (tested)");
    let Some(file) = table.text("file") else { return embedded() };
    let parsed = std::fs::read_to_string(&file).map_err(|error| error.to_string());
    parsed.and_then(|text| Prices::parse(&text)).unwrap_or_else(|message| {
        table.fault("file", format!("{file}: {message}"));
        embedded()
    })
}

fn pool(table: &Reader<'_, '_>, shelf: &Shelf) -> PoolConfig {
    let model = shelf.model(table);
    let connect = table.texts("connect");
    if connect.iter().any(|address| address.parse::<Address>().is_err()) {
        table.fault("connect", "each address is unix:PATH or tcp:HOST:PORT, with or without // behind the colon");
    }
    if connect.len() > WORKERS_MAX {
        let message = format!(
            "has {} addresses; a pool has at most {WORKERS_MAX} workers: make several pools of it",
            connect.len()
        );
        table.fault("connect", message);
    }
    if !connect.is_empty() && table.has("workers") {
        table.fault("connect", "give either workers (started here) or connect (started elsewhere)");
    }
    let device = parse_device(&table.text("device").unwrap_or_default()).unwrap_or_else(|message| {
        table.fault("device", message);
        DeviceChoice::Auto
    });
    let workers = table.number("workers", 1..=WORKERS_MAX as u64) as usize;
    let replicas = replicas(table, workers, connect.len());
    let (replicas_follow, connected) = (replicas.follow, !connect.is_empty());
    PoolConfig {
        id: table.text("id").unwrap_or_else(|| default_id(model.as_deref())),
        model,
        adapters: adapters(table),
        task: word(
            table,
            "task",
            &[
                ("auto", TaskChoice::Auto),
                ("generate", TaskChoice::Generate),
                ("embed", TaskChoice::Embed),
                ("rerank", TaskChoice::Rerank),
            ],
        ),
        tool_format: parser(table, "tool_call_parser", ToolFormat::from_name),
        reasoning: parser(table, "reasoning_parser", ReasoningMarkers::from_name),
        answers: AnswerRules {
            holds_calls: table.flag("hold_tool_calls"),
            drops_foreign_reasoning: word(table, "foreign_reasoning", &[("refuse", false), ("drop", true)]),
            spaces_json: word(table, "json_separators", &[("compact", false), ("spaced", true)]),
        },
        workers,
        connect,
        key_file: table.text("key_file").map(PathBuf::from),
        tls: pool_tls(table),
        threads: table.number("threads", 0..=1024) as usize,
        device,
        quantize: format_of(table, &QUANTIZE),
        kv_format: format_of(table, &KV_FORMAT),
        path: table.text("path").unwrap_or_default(),
        context_tokens: table.number("context_tokens", 0..=1 << 24) as u32,
        kv_bytes_max: table.number("kv_bytes_max", 0..=1 << 48),
        gpu_memory_millionths: gpu_memory_millionths(table),
        tiers: tiers(table),
        sequences_max: table.number("sequences_max", 0..=65_536) as u32,
        prompt_lookup: table.number("prompt_lookup", 0..=64) as u32,
        queue_max: table.number("queue_max", 1..=1_000_000) as usize,
        waits: WaitConfig {
            ready: millis(table.number("ready_wait_ms", 0..=86_400_000)),
            resume: millis(table.number("resume_wait_ms", 0..=86_400_000)),
            queue: millis(table.number("queue_wait_ms", 1..=86_400_000)),
            loads: table.number("wait_loads", 0..=100) as u32,
        },
        policy: table.text("policy").unwrap_or_default().parse().unwrap_or_else(|error: UnknownPolicy| {
            table.fault("policy", error.to_string());
            Policy::default()
        }),
        slo: slo(table),
        balance: table.flag("balance"),
        kv_prefetch: table.flag("kv_prefetch"),
        shared_weights: table.flag("shared_weights"),
        explain: table.flag("explain"),
        prefill_workers: table.number("prefill_workers", 0..=127) as usize,
        roles: follow(table, "roles"),
        on_demand: on_demand(table, replicas_follow, connected),
        replicas,
        record: table.text("record").map(PathBuf::from),
    }
}

/// Reads the name of a parser of what a model writes.
fn parser<T>(table: &Reader<'_, '_>, name: &'static str, named: impl Fn(&str) -> Option<T>) -> Parser<T> {
    match table.text(name).unwrap_or_default().as_str() {
        "" | "auto" => Parser::Auto,
        "none" => Parser::Off,
        other => named(other).map(Parser::Named).unwrap_or_else(|| {
            table.fault(name, format!("{other:?} is not known: docs/reference/tool-calls.md lists the names"));
            Parser::Auto
        }),
    }
}

/// Reads the TLS files of a pool: all three, or none.
fn pool_tls(table: &Reader<'_, '_>) -> Option<penstock_link::TlsFiles> {
    let [certificate, key, ca] =
        ["tls_certificate", "tls_key", "tls_ca"].map(|name| table.text(name).map(PathBuf::from));
    match (certificate, key, ca) {
        (Some(certificate), Some(key), Some(ca)) => Some(penstock_link::TlsFiles { certificate, key, ca }),
        (None, None, None) => None,
        _ => {
            table.fault("tls_certificate", "tls_certificate, tls_key and tls_ca go together");
            None
        }
    }
}

pub(super) fn follow(table: &Reader<'_, '_>, name: &'static str) -> Follow {
    match table.text(name).unwrap_or_default().as_str() {
        "fixed" => Follow::Off,
        "dry_run" => Follow::DryRun,
        "follow" => Follow::On,
        other => {
            table.fault(name, format!("{other:?} is not one of fixed, dry_run, follow"));
            Follow::Off
        }
    }
}

fn tiers(table: &Reader<'_, '_>) -> TierConfig {
    let tiers = TierConfig {
        host_bytes: table.number("kv_host_bytes", 0..=1 << 48),
        disk_path: table.text("kv_disk_path").map(PathBuf::from),
        disk_bytes: table.number("kv_disk_bytes", 0..=1 << 48),
        remote: table.text("kv_remote"),
        remote_password_file: table.text("kv_remote_password_file").map(PathBuf::from),
    };
    if tiers.disk_path.is_some() != (tiers.disk_bytes > 0) {
        table.fault("kv_disk_path", "kv_disk_path and kv_disk_bytes go together: a folder, and how much of it");
    }
    if let Some(url) = &tiers.remote {
        remote_fault(url).into_iter().for_each(|fault| table.fault("kv_remote", fault));
    } else if tiers.remote_password_file.is_some() {
        table.fault("kv_remote_password_file", "is for kv_remote, and there is none");
    }
    if !table.texts("connect").is_empty() && tiers != TierConfig::default() {
        table.fault(
            "connect",
            "workers that are started elsewhere have their tiers on their own command line: --kv-disk-path and others",
        );
    }
    tiers
}

/// Fault of the remote tier's URL, if it has one: scheme, password, bucket name or a missing build feature.
fn remote_fault(url: &str) -> Option<String> {
    let schemes = ["redis://", "rediss://", "redis+unix://", "s3://"];
    if !schemes.iter().any(|scheme| url.starts_with(scheme)) {
        return Some(format!("must begin with {}", schemes.join(" or ")));
    }
    if has_password(url) {
        return Some("has a password in it: put it into kv_remote_password_file".into());
    }
    let is_bucket = url.starts_with("s3://");
    let bucket = if is_bucket { url.parse::<Bucket>().err() } else { None };
    let (has, name, feature) =
        if is_bucket { (cfg!(feature = "s3"), "S3", "s3") } else { (cfg!(feature = "redis"), "Redis", "redis") };
    let missing = || (!has).then(|| format!("this build has no {name}: build with the feature {feature}"));
    bucket.map(|error| error.to_string()).or_else(missing)
}

/// Share of a GPU's memory in millionths; `None` without the key. A worker of no share could hold nothing.
fn gpu_memory_millionths(table: &Reader<'_, '_>) -> Option<u32> {
    let millionths = (table.decimal("gpu_memory_share")? * 1e6).round() as u32;
    if (1..=1_000_000).contains(&millionths) {
        return Some(millionths);
    }
    table.fault("gpu_memory_share", "must be a number above 0 and up to 1, as 0.9");
    None
}

fn slo(table: &Reader<'_, '_>) -> Option<SloConfig> {
    let item = table.inline_one("slo", &["ttft_ms", "ttft_per_1k_ms", "tpot_ms", "refuse_above_percent"])?;
    let usual = Slo::default();
    let time =
        |name, usual: Duration| Duration::from_millis(item.number_or(name, 0..=3_600_000, usual.as_millis() as u64));
    Some(SloConfig {
        ttft: time("ttft_ms", usual.ttft),
        ttft_per_1k: time("ttft_per_1k_ms", usual.ttft_per_1k),
        tpot: time("tpot_ms", usual.tpot),
        refuse_above_percent: item.number_or("refuse_above_percent", 0..=100_000, 0) as u32,
    })
}

fn default_id(model: Option<&Path>) -> String {
    model.and_then(penstock_gguf::model_name).unwrap_or_else(|| DEMO_MODEL.to_owned())
}

/// Key of a pool that names a format.
struct FormatKey {
    key: &'static str,
    /// Option of the command line that stands for the key.
    flag: &'static str,
    /// What the formats are.
    what: &'static str,
    /// Names of the formats, the default first.
    names: &'static [&'static str],
}

/// Formats to which matrices can be rounded.
const QUANTIZE: FormatKey =
    FormatKey { key: "quantize", flag: "--quantize", what: "a format to round to", names: &["none", "int8", "int4"] };

/// Forms of keys and values in the KV cache.
const KV_FORMAT: FormatKey =
    FormatKey { key: "kv_format", flag: "--kv-format", what: "a form of keys and values", names: &["bf16", "int8"] };

impl FormatKey {
    /// Fault of a name that is none of the formats.
    fn fault(&self, name: &str) -> Option<String> {
        let is_known = self.names.contains(&name);
        (!is_known).then(|| format!("{name:?} is not {}: {}", self.what, self.names.join(", ")))
    }

    /// Puts what the command line says in the place of what the file says.
    fn apply(&self, document: &Document<'_>, asked: Option<&String>, to: &mut String) {
        let Some(name) = asked else { return };
        match self.fault(name) {
            Some(fault) => document.fault_at(self.flag, "", fault),
            None => to.clone_from(name),
        }
    }
}

/// Format that a pool's table names, or the default.
fn format_of(table: &Reader<'_, '_>, format: &FormatKey) -> String {
    let name = table.text(format.key).unwrap_or_else(|| format.names[0].to_owned());
    if let Some(fault) = format.fault(&name) {
        table.fault(format.key, fault);
    }
    name
}

fn parse_device(text: &str) -> Result<DeviceChoice, String> {
    match text {
        "auto" => Ok(DeviceChoice::Auto),
        "cpu" => Ok(DeviceChoice::Cpu),
        "cuda" => Ok(DeviceChoice::Cuda),
        "reference" => Ok(DeviceChoice::Reference),
        other => Err(format!("{other:?} is not a device: auto, cpu, cuda, reference")),
    }
}

/// Applies the command line's pool options; they need a config with exactly one pool.
fn apply(document: &Document<'_>, pools: &mut [PoolConfig], overrides: &Overrides, shelf: &Shelf) {
    let Overrides { model, name, workers, threads, device, quantize, kv_format, path, context_tokens, .. } = overrides;
    let texts = [name, device, quantize, kv_format, path].into_iter().any(Option::is_some) || model.is_some();
    let numbers = workers.is_some() || threads.is_some() || context_tokens.is_some();
    let any = texts || numbers || !overrides.adapters.is_empty();
    let [pool] = pools else {
        if any {
            let message = "the file has several pools, or none: change them there (--model, --adapter, --name, --workers, --threads, \
                           --device, --quantize, --kv-format, --path and --context are for a single pool)";
            document.fault_at("command line", "", message);
        }
        return;
    };
    if let Some(model) = model {
        let model = shelf.path(model.clone()).unwrap_or_else(|error| {
            document.fault_at("--model", "", error);
            model.clone()
        });
        pool.id = default_id(Some(&model));
        pool.model = Some(model);
    }
    if let Some(name) = name {
        pool.id.clone_from(name);
    }
    for adapter in &overrides.adapters {
        pool.adapters.retain(|other| other.name != adapter.name);
        pool.adapters.push(adapter.clone());
    }
    if let Some(fault) = adapters::faulty(&pool.adapters).filter(|_| !overrides.adapters.is_empty()) {
        document.fault_at("--adapter", "", fault);
    }
    match device.as_deref().map(parse_device) {
        Some(Ok(device)) => pool.device = device,
        Some(Err(message)) => document.fault_at("--device", "", message),
        None => {}
    }
    QUANTIZE.apply(document, quantize.as_ref(), &mut pool.quantize);
    KV_FORMAT.apply(document, kv_format.as_ref(), &mut pool.kv_format);
    match workers {
        Some(0) => document.fault_at("--workers", "", "at least 1"),
        Some(workers) => pool.workers = *workers,
        None => {}
    }
    pool.threads = threads.unwrap_or(pool.threads);
    if let Some(path) = path {
        pool.path.clone_from(path);
    }
    pool.context_tokens = context_tokens.unwrap_or(pool.context_tokens);
}

fn unique<'a>(document: &Document<'_>, table: &'static str, ids: impl Iterator<Item = &'a str>) {
    let mut seen = std::collections::BTreeSet::new();
    for id in ids {
        if !seen.insert(id) {
            document.fault_at(table, "id", format!("{id:?} is used twice"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys;

    fn read(text: &str) -> Result<Snapshot, Vec<String>> {
        let env = |name: &str| match name {
            "SET" => Some("secret".to_owned()),
            "OPS_HOOK_SECRET" => Some("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned()),
            _ => None,
        };
        load(Some(("p.toml", text)), &Overrides::default(), &env)
            .map_err(|faults| faults.0.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_share_of_a_gpu_is_above_0_and_up_to_1() {
        let share = |text: &str| {
            let read = read(&format!("[[pools]]\nid = \"a\"\n{text}"));
            read.map(|snapshot| snapshot.pools[0].gpu_memory_share())
        };
        for (text, want) in [("", None), ("gpu_memory_share = 0.45", Some(0.45)), ("gpu_memory_share = 1", Some(1.0))] {
            assert_eq!(share(text).expect(text), want);
        }
        for text in ["0", "0.0", "1.01", "-0.5", "\"half\"", "nan"] {
            let faults = share(&format!("gpu_memory_share = {text}")).expect_err(text);
            assert!(faults[0].contains("gpu_memory_share"), "{faults:?}");
        }
    }

    #[test]
    fn the_model_of_moderations_is_there() {
        let models = "[[providers]]\nid = \"p\"\nbase_url = \"http://127.0.0.1:1/v1\"\nmodels = [\"own\"]\n\
                      [[models]]\nname = \"a\"\naliases = [\"b\"]\nto = [{ provider = \"p\", model = \"x\" }]\n";
        let read = |name: &str| read(&format!("[server]\nmoderation_model = {name:?}\n{models}"));
        for name in ["a", "b", "own", "p/found"] {
            assert_eq!(read(name).expect(name).moderation_model.as_deref(), Some(name));
        }
        for name in ["c", "q/found"] {
            assert!(read(name).expect_err(name)[0].contains("server.moderation_model"), "{name}");
        }
    }

    #[test]
    fn the_example_is_the_default() {
        let (example, default) = (read(&keys::example()).expect("valid"), read("").expect("valid"));
        assert_eq!(format!("{example:?}"), format!("{default:?}"));
        assert_eq!(default.pools[0].id, DEMO_MODEL);
        assert_eq!(format!("{:?}", default.http), format!("{:?}", Arc::new(HttpLimits::default())));
    }

    #[test]
    fn every_key_of_the_table_is_read_and_every_example_is_accepted() {
        let mut text = String::new();
        for table in keys::TABLES {
            text += &if table.many { format!("[[{}]]\n", table.name) } else { format!("[{}]\n", table.name) };
            for key in keys::KEYS.iter().filter(|key| key.table == table.name) {
                let exclusive = [
                    ("keys", "key_env"),
                    ("keys", "key_file"),
                    ("admin.oidc", "client_secret_env"),
                    ("admin.oidc", "client_secret_file"),
                    ("admin_keys", "key_env"),
                    ("admin_keys", "key_file"),
                    ("keys", "certificate"),
                    ("auth", "pepper_file"),
                    ("auth", "pepper_env"),
                    ("jwt", "jwks_file"),
                    ("pools", "workers"),
                    ("pools", "replica_command"),
                    ("providers", "key_env"),
                    ("providers", "key_file"),
                    ("store", "path"),
                    ("store", "url_env"),
                    ("store", "password_file"),
                    ("counters", "url_env"),
                    ("counters", "password_file"),
                    ("counters", "ca_file"),
                    ("prices", "file"),
                    ("pools", "kv_disk_path"),
                    ("pools", "kv_remote"),
                    ("pools", "kv_remote_password_file"),
                    ("hub", "token_file"),
                    ("telemetry", "otlp_headers_env"),
                    ("webhooks", "url_env"),
                    ("webhooks", "secret_file"),
                    ("webhooks", "ca_file"),
                ]
                .contains(&(table.name, key.name));
                if !exclusive {
                    text += &format!("{} = {}\n", key.name, key.default.unwrap_or_else(|example| example));
                }
            }
        }
        read(&text).expect("valid");
    }

    #[test]
    fn all_faults_come_at_once_with_lines() {
        let faults = read(
            "[server]\nlisten = 8080\nbody_byte = 1\nconnections_max = 0\n[[pools]]\ndevice = \"tpu\"\nworkers = \"two\"\n\
             [[keys]]\nid = \"a\"\n[[keys]]\nid = \"b\"\nkey_env = \"UNSET\"\n[nonsense]\nx = 1\n",
        )
        .expect_err("faults");
        let expect = [
            "p.toml:2: server.listen: must be text",
            "p.toml:3: server.body_byte: unknown key; did you mean body_bytes_max?",
            "p.toml:4: server.connections_max: must be a whole number from 1",
            "p.toml:6: pools[0].device: \"tpu\" is not a device",
            "p.toml:7: pools[0].workers: must be a whole number",
            "p.toml:9: keys[0].digest: exactly one of",
            "p.toml:12: keys[1].key_env: the environment variable UNSET",
            "p.toml:13: nonsense: unknown key; known are: server",
        ];
        for start in expect {
            assert!(faults.iter().any(|fault| fault.starts_with(start)), "{start} in {faults:#?}");
        }
        assert_eq!(faults.len(), expect.len(), "{faults:#?}");
    }

    /// A service manager gives variables to the gateway, and not to the shell in which an operator types a command.
    #[test]
    fn a_command_beside_the_gateway_needs_the_variables_of_its_own_tables() {
        let text = "[auth]\npepper_env = \"A\"\n[store]\nurl_env = \"B\"\n[counters]\nurl = \"store\"\n\
                    [telemetry]\notlp_headers_env = \"C\"\n[admin]\nlisten = \"0.0.0.0:8081\"\n\
                    [admin.oidc]\nissuer = \"https://sso.example\"\nclient_id = \"c\"\nroles = { a = \"viewer\" }\nclient_secret_env = \"D\"\n\
                    [[admin_keys]]\nid = \"ops\"\nrole = \"owner\"\nkey_env = \"E\"\n[[keys]]\nid = \"k\"\nkey_env = \"F\"\n\
                    [[providers]]\nid = \"p\"\nbase_url = \"http://h\"\nmodels = [\"m\"]\nkeys_env = [\"G\"]\n\
                    [[webhooks]]\nname = \"w\"\nurl_env = \"H\"\nsecret_env = \"I\"\n\
                    [[plugins]]\nname = \"http_hook\"\nkeys = [\"k\"]\nsettings = { url = \"http://h\", secret_env = \"J\" }\n";
        let faults = |needed: &[&str]| {
            let read = load_beside(Some(("p.toml", text)), &Overrides::default(), &|_| None, needed);
            read.err().map_or(Vec::new(), |faults| faults.0.into_iter().map(|fault| fault.key).collect())
        };
        assert_eq!(faults(&[]), Vec::<String>::new());
        assert_eq!(faults(&["store", "auth"]), ["store.url_env", "counters.url", "auth.pepper_env"]);
        let all = read(text).expect_err("what serves needs them all");
        for name in ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J"] {
            assert!(all.iter().any(|fault| fault.contains(name)), "{name} in {all:#?}");
        }
    }

    #[test]
    fn syntax_errors_have_lines() {
        let faults = read("[server]\nlisten = \n").expect_err("faults");
        assert!(faults[0].starts_with("p.toml:2"), "{faults:?}");
    }

    #[test]
    fn workers_elsewhere_are_named_as_they_are_started() {
        let connect = |address: &str| read(&format!("[[pools]]\nconnect = [\"{address}\"]\n"));
        for address in ["unix:/run/a.sock", "unix:///run/a.sock", "tcp:10.0.0.7:7070", "tcp://10.0.0.7:7070"] {
            assert!(connect(address).is_ok(), "{address}");
        }
        for address in ["/run/a.sock", "tcp://10.0.0.7", "http://10.0.0.7:7070"] {
            assert!(connect(address).is_err_and(|faults| faults[0].contains("pools[0].connect")), "{address}");
        }
    }

    #[test]
    fn options_win_over_the_file() {
        let overrides = Overrides { listen: Some("9000".into()), workers: Some(3), ..Overrides::default() };
        let none = |_: &str| None;
        let snapshot =
            load(Some(("p.toml", "[[pools]]\nid = \"x\"\nworkers = 2\n")), &overrides, &none).expect("valid");
        assert_eq!((snapshot.listen.port(), snapshot.pools[0].workers, snapshot.pools[0].id.as_str()), (9000, 3, "x"));
        let several = "[[pools]]\nid = \"x\"\n[[pools]]\nid = \"y\"\n";
        assert!(load(Some(("p.toml", several)), &overrides, &none).is_err());
    }

    #[test]
    fn every_example_passes() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/examples");
        let env = |_: &str| Some("set".to_owned());
        let mut count = 0;
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let (name, text) = (path.display().to_string(), std::fs::read_to_string(&path).expect("text"));
            load(Some((&name, &text)), &Overrides::default(), &env).unwrap_or_else(|faults| panic!("{faults}"));
            count += 1;
        }
        assert!(count > 0);
    }

    #[test]
    fn prices_come_from_a_file_if_one_is_named() {
        let path = std::env::temp_dir().join(format!("penstock-prices-{}.toml", std::process::id()));
        let config = format!("[prices]\nfile = {path:?}\n");
        assert!(read(&config).expect_err("no file")[0].contains("prices.file"));
        std::fs::write(&path, "[[price]]\nmodels = [\"own-*\"]\ninput = 1.0\noutput = 2.0\n").expect("write");
        let prices = read(&config).expect("valid").prices;
        assert!(prices.find("own-7").is_some() && prices.find("gpt-4o").is_none(), "it replaces the table whole");
        std::fs::write(&path, "[[price]]\nmodels = []\nin = 1.0\n").expect("write");
        assert!(read(&config).expect_err("a fault")[0].contains("unknown field"));
        std::fs::remove_file(&path).expect("remove");
    }

    /// Rewrites the files when `PENSTOCK_BLESS` is set.
    #[test]
    fn files_made_from_the_table_are_current() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
        for (path, text) in
            [("configs/penstock.toml", keys::example()), ("docs/reference/config.md", keys::reference())]
        {
            let path = format!("{root}{path}");
            if std::env::var_os("PENSTOCK_BLESS").is_some() {
                std::fs::write(&path, &text).expect("write");
            }
            let have = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(have == text, "{path} is not what config/keys.rs says; run the tests with PENSTOCK_BLESS=1");
        }
    }
}
