//! `[[pools]]`: workers of one model, read from the file, and the command line's options for a single pool.

use std::path::{Path, PathBuf};
use std::time::Duration;

use penstock_generate::AnswerRules;
use penstock_proto::{Address, Bucket};
use penstock_router::policy::UnknownPolicy;
use penstock_router::{Policy, Slo, WORKERS_MAX};
use penstock_text::{ReasoningMarkers, ToolFormat};

use super::Overrides;
use super::adapters::{self, adapters};
use super::hub::Shelf;
use super::limits::word;
use super::raw::{Document, Reader};
use super::replicas::{follow, on_demand, replicas};
use super::snapshot::{DeviceChoice, Parser, PoolConfig, SloConfig, TaskChoice, TierConfig, WaitConfig};
use super::store::has_password;

/// Name under which the embedded model is served.
pub const DEMO_MODEL: &str = "penstock-demo";

/// Reads one pool; a table without keys is the pool of the embedded model.
pub(super) fn pool(table: &Reader<'_, '_>, shelf: &Shelf) -> PoolConfig {
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
    let pool = PoolConfig {
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
            ready: Duration::from_millis(table.number("ready_wait_ms", 0..=86_400_000)),
            resume: Duration::from_millis(table.number("resume_wait_ms", 0..=86_400_000)),
            queue: Duration::from_millis(table.number("queue_wait_ms", 1..=86_400_000)),
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
    };
    if connected {
        of_workers(&pool).for_each(|(key, option)| table.fault(key, elsewhere(option)));
    }
    pool
}

/// Keys of a pool that are set to another value than their default and that nothing but its own workers reads, each with the option of
/// `penstock worker` that stands for it (empty: there is none).
fn of_workers(pool: &PoolConfig) -> impl Iterator<Item = (&'static str, &'static str)> {
    let keys = [
        ("threads", "--threads", pool.threads > 0),
        ("device", "--device", pool.device != DeviceChoice::Auto),
        (QUANTIZE.key, QUANTIZE.flag, pool.quantize != QUANTIZE.names[0]),
        (KV_FORMAT.key, KV_FORMAT.flag, pool.kv_format != KV_FORMAT.names[0]),
        ("path", "--path", pool.path != "auto"),
        ("context_tokens", "--context", pool.context_tokens > 0),
        ("kv_bytes_max", "--kv-bytes", pool.kv_bytes_max > 0),
        ("gpu_memory_share", "--gpu-memory-share", pool.gpu_memory_millionths.is_some()),
        ("sequences_max", "--sequences", pool.sequences_max > 0),
        ("prompt_lookup", "--prompt-lookup", pool.prompt_lookup > 0),
        ("shared_weights", "", !pool.shared_weights),
    ];
    keys.into_iter().filter(|(.., is_set)| *is_set).map(|(key, option, _)| (key, option))
}

/// Fault of a setting of workers in a pool whose workers are started elsewhere. `option`: what stands for it on their command line.
fn elsewhere(option: &str) -> String {
    let instead = match option {
        "" => "workers of connect share no weights through this gateway".to_owned(),
        option => format!("set it on each worker's own command line: penstock worker {option}"),
    };
    format!("is for workers that are started here, not those of connect; {instead}")
}

/// Applies the command line's pool options; they need a config with exactly one pool.
pub(super) fn apply(document: &Document<'_>, pools: &mut [PoolConfig], overrides: &Overrides, shelf: &Shelf) {
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
    if !pool.connect.is_empty() {
        let given = [
            ("--threads", threads.is_some()),
            ("--device", device.is_some()),
            (QUANTIZE.flag, quantize.is_some()),
            (KV_FORMAT.flag, kv_format.is_some()),
            ("--path", path.is_some()),
            ("--context", context_tokens.is_some()),
        ];
        let given = given.into_iter().filter(|(_, is_given)| *is_given);
        given.for_each(|(option, _)| document.fault_at(option, "", elsewhere(option)));
        if workers.is_some() {
            document.fault_at("--workers", "", "the pool's workers are started elsewhere (connect)");
        }
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
    /// Meaning of the formats.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Snapshot, load};

    fn read(text: &str) -> Result<Snapshot, Vec<String>> {
        load(Some(("p.toml", text)), &Overrides::default(), &|_| None)
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
    fn settings_of_workers_are_for_those_that_are_started_here() {
        let connect = "[[pools]]\nid = \"a\"\nconnect = [\"unix:/run/a.sock\"]\n";
        let settings = [
            ("threads = 2", "--threads"),
            ("device = \"cpu\"", "--device"),
            ("quantize = \"int8\"", "--quantize"),
            ("kv_format = \"int8\"", "--kv-format"),
            ("path = \"portable\"", "--path"),
            ("context_tokens = 4096", "--context"),
            ("kv_bytes_max = 1_000_000", "--kv-bytes"),
            ("gpu_memory_share = 0.45", "--gpu-memory-share"),
            ("sequences_max = 64", "--sequences"),
            ("prompt_lookup = 4", "--prompt-lookup"),
            ("shared_weights = false", "share no weights"),
        ];
        for (line, instead) in settings {
            assert!(read(&format!("[[pools]]\nid = \"a\"\n{line}\n")).is_ok(), "{line}");
            let faults = read(&format!("{connect}{line}\n")).expect_err(line);
            let key = line.split(' ').next().expect("a key");
            assert!(faults[0].starts_with(&format!("p.toml:4: pools[0].{key}: ")), "{faults:?}");
            assert!(faults.len() == 1 && faults[0].contains(instead), "{faults:?}");
        }
        // Defaults that are written out say nothing, and the gateway's own keys have their effect.
        let said = "quantize = \"none\"\nkv_format = \"bf16\"\ndevice = \"auto\"\npath = \"auto\"\nthreads = 0\nshared_weights = true\n";
        let own = "task = \"generate\"\nqueue_max = 9\nkv_prefetch = false\nbalance = false\nprefill_workers = 1\nroles = \"follow\"\n";
        let (said, own) = (format!("{connect}{said}"), format!("{connect}{own}"));
        [said, own].iter().for_each(|text| drop(read(text).expect(text)));
    }

    #[test]
    fn options_for_workers_are_refused_where_none_is_started_here() {
        type Change = fn(&mut Overrides);
        let given = |change: Change| {
            let mut overrides = Overrides::default();
            change(&mut overrides);
            let of =
                |text: &str| load(Some(("p.toml", text)), &overrides, &|_| None).map_err(|faults| faults.to_string());
            let here = of("[[pools]]\nid = \"a\"\n");
            (here.is_ok(), of("[[pools]]\nid = \"a\"\nconnect = [\"unix:/run/a.sock\"]\n").err().unwrap_or_default())
        };
        let options: [(&str, Change); 7] = [
            ("--workers", |overrides| overrides.workers = Some(2)),
            ("--threads", |overrides| overrides.threads = Some(2)),
            ("--device", |overrides| overrides.device = Some("cpu".into())),
            ("--quantize", |overrides| overrides.quantize = Some("int8".into())),
            ("--kv-format", |overrides| overrides.kv_format = Some("int8".into())),
            ("--path", |overrides| overrides.path = Some("portable".into())),
            ("--context", |overrides| overrides.context_tokens = Some(512)),
        ];
        for (option, change) in options {
            let (is_good_here, faults) = given(change);
            assert!(is_good_here && faults.contains(option) && faults.contains("connect"), "{option}: {faults}");
        }
        let (_, named) = given(|overrides| overrides.name = Some("b".into()));
        assert_eq!(named, "");
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
}
