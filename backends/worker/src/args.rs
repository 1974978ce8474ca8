//! Command line of `penstock worker`.

use crate::adapters::{AdapterSource, OrderedSource};
use crate::config::{Build, TierOptions, WorkerConfig};
use crate::model::build;
use crate::options::{DeviceChoice, ModelOptions};
use crate::run;
use crate::transfer::STREAMS_MAX;
use crate::weights;
use penstock_kernels::{Held, KvFormat, cpu};
use penstock_link::{Tls, TlsFiles};
use penstock_proto::Address;
use penstock_proto::frames::Role;
use penstock_proto::handshake::{KEY_BYTES_MAX, PoolKey};
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tracing_subscriber::EnvFilter;

/// Longest file with a password that is read.
const PASSWORD_BYTES_MAX: u64 = 4096;

/// Runs one engine and serves it to gateways.
///
/// `penstock serve` starts its workers by itself; start one by hand to serve a gateway elsewhere, or to keep it apart.
#[derive(Clone, Debug, clap::Args)]
pub struct WorkerArgs {
    /// Address to listen on: unix:PATH, or tcp:HOST:PORT (needs --key-file).
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Address,
    /// Port on the same host where other workers fetch KV, for --listen tcp. 0: any free one.
    #[arg(long, default_value_t = 0, value_name = "PORT")]
    pub transfer_port: u16,
    /// Connections of one KV transfer from another machine, and number of transfer threads. More than one pays where one connection
    /// does not fill the network.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=STREAMS_MAX as i64))]
    pub transfer_streams: u8,
    /// Send KV through the socket between workers of one machine too, not through memory that both map.
    #[arg(long)]
    pub no_shared_memory: bool,
    /// Checkpoint folder in Hugging Face's layout, or a GGUF file. Without it the demo model is served.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Adapter (LoRA) of the model, served under its own name: a PEFT folder, with adapter_config.json and
    /// adapter_model.safetensors. May be given several times.
    #[arg(long, value_name = "NAME=PATH", conflicts_with = "adapter_orders")]
    pub adapter: Vec<AdapterSource>,
    /// Round matrices while they are loaded: int8 (8 bits, one scale per row), int4 (4 bits, one scale per 32 weights), or none.
    #[arg(long, default_value = "none", value_parser = parse_quantize)]
    pub quantize: Held,
    /// Form of keys and values in the KV cache: bf16, or int8 (8 bits, with a scale per token and head: half of the memory; on the CPU).
    #[arg(long, default_value = "bf16", value_parser = parse_kv_format)]
    pub kv_format: KvFormat,
    /// Device: auto (an NVIDIA GPU whose kernels have been measured, or else the CPU), cpu, cuda, or reference (slow, obvious, for comparison).
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// CPU instruction set: auto, amx, avx512bf16, avx512, avx2, portable.
    #[arg(long, default_value = "auto", value_parser = parse_path)]
    pub path: cpu::Path,
    /// Threads. 0: one per core of --cores, or of the machine.
    #[arg(long, default_value_t = 0)]
    pub threads: usize,
    /// Cores to run on, as 0,1,2. Without it: any.
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub cores: Vec<usize>,
    /// Longest sequence in tokens. 0: the model's, as far as memory goes.
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub context: usize,
    /// Memory for KV blocks in bytes. 0: a share of what is available.
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub kv_bytes: u64,
    /// Share of the GPU's memory that this worker may take in all, for weights, activations and KV: above 0, up to 1. Without it: what is free.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub gpu_memory_share: Option<f64>,
    /// Folder for KV blocks that memory has no room for; a worker that starts again finds them. Needs --kv-disk-bytes.
    #[arg(long, value_name = "DIR", requires = "kv_disk_bytes")]
    pub kv_disk_path: Option<PathBuf>,
    /// Bytes that this worker uses of that disk.
    #[arg(long, default_value_t = 0, value_name = "BYTES", requires = "kv_disk_path")]
    pub kv_disk_bytes: u64,
    /// Memory of the host for KV blocks of a device that has its own, in bytes.
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub kv_host_bytes: u64,
    /// Redis, Valkey or a bucket of S3 for KV blocks, shared by workers: redis://HOST:PORT/DB, or
    /// s3://BUCKET/PREFIX?endpoint=URL&region=REGION (endpoint: of a server that is not Amazon's).
    #[arg(long, value_name = "URL")]
    pub kv_remote: Option<String>,
    /// File with the password of that server; for S3 with ACCESS_KEY_ID:SECRET_ACCESS_KEY, without which AWS's environment variables and
    /// the instance's role are used.
    #[arg(long, value_name = "FILE", requires = "kv_remote")]
    pub kv_remote_password_file: Option<PathBuf>,
    /// Sequences that run at once. 0: the engine's default.
    #[arg(long, default_value_t = 0)]
    pub sequences: usize,
    /// Tokens computed in one step. 0: the engine's default.
    #[arg(long, default_value_t = 0)]
    pub batch_tokens: usize,
    /// Most draft tokens of a sequence in one step, copied from where its last tokens occurred before. 0: none. Outputs
    /// are the same either way.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=64), value_name = "TOKENS")]
    pub prompt_lookup: u8,
    /// Role of the worker: mixed, prefill (long prompts, for other workers), decode (answers, and short prompts). The gateway may
    /// change the role.
    #[arg(long, default_value = "mixed", value_parser = parse_role)]
    pub role: Role,
    /// File with the secret of the pool, 16 bytes or more; the gateway needs the same.
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// Certificate chain (PEM) for TLS on TCP; gateways and other workers have to show one of --tls-ca too.
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    pub tls_certificate: Option<PathBuf>,
    /// Private key (PEM) of that certificate.
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// Authorities (PEM) of the certificates of the pool's members.
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_ca: Option<PathBuf>,
    /// Listen on addresses other than loopback without TLS. Connections are authenticated then, not encrypted.
    #[arg(long)]
    pub beyond_loopback: bool,
    /// Exit after this many seconds without a connected gateway.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    pub orphan_ttl: u64,
    /// After a signal or order to exit, serve open requests for at most this many seconds.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub drain_deadline: u64,
    /// Standard input is memory for packed weights that the gateway shares among its workers.
    #[arg(long, hide = true)]
    pub shared_weights: bool,
    /// Number of workers that share this machine's memory.
    #[arg(long, default_value_t = 1, hide = true)]
    pub machine_share: u64,
    /// Take --machine-share as the most workers that may run: their number follows the load.
    #[arg(long, hide = true)]
    pub machine_share_varies: bool,
    /// With --device auto, end instead of computing on the CPU if the GPU has too little room: workers that are to end still hold its memory.
    #[arg(long, hide = true)]
    pub keep_to_gpu: bool,
    /// Let the gateway on the Unix socket load and unload adapters, from any folder that this process may read.
    #[arg(long, hide = true)]
    pub adapter_orders: bool,
    /// Adapter to load at the start as if the gateway had ordered it: a failure is reported, and the model is served without the adapter.
    #[arg(long, hide = true, value_name = "KEY:NAME=PATH", requires = "adapter_orders")]
    pub ordered_adapter: Vec<OrderedSource>,
    /// Start a session of its own (setsid), away from the terminal.
    #[arg(long, hide = true)]
    pub own_session: bool,
}

fn parse_role(name: &str) -> Result<Role, String> {
    match name {
        "mixed" => Ok(Role::Mixed),
        "prefill" => Ok(Role::Prefill),
        "decode" => Ok(Role::Decode),
        _ => Err("a role is mixed, prefill or decode".to_owned()),
    }
}

/// Wraps `build` so that the engine gets a role.
fn with_role(build: Build, role: Role) -> Build {
    Box::new(move |progress| {
        let (mut engine, info) = build(progress)?;
        engine.set_role(role);
        Ok((engine, info))
    })
}

fn parse_quantize(name: &str) -> Result<Held, String> {
    crate::inspect::held(name).ok_or_else(|| format!("{name:?} is not a format to round to: none, int8, int4"))
}

fn parse_kv_format(name: &str) -> Result<KvFormat, String> {
    KvFormat::named(name).ok_or_else(|| format!("{name:?} is not a format of keys and values: bf16, int8"))
}

fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "a share is a number above 0 and up to 1, as 0.9".to_owned())
}

fn parse_path(name: &str) -> Result<cpu::Path, String> {
    name.parse().map_err(|error: penstock_kernels::KernelError| error.to_string())
}

impl WorkerArgs {
    fn config(&self) -> Result<WorkerConfig, String> {
        Ok(WorkerConfig {
            transfer_port: self.transfer_port,
            transfer_streams: usize::from(self.transfer_streams),
            shares_memory: !self.no_shared_memory,
            key: self.key_file.as_deref().map(read_key).transpose()?,
            tls: self.tls()?,
            beyond_loopback: self.beyond_loopback,
            cores: self.cores.clone(),
            orphan_ttl: Duration::from_secs(self.orphan_ttl),
            drain_deadline: Duration::from_secs(self.drain_deadline),
            own_session: self.own_session,
            tiers: TierOptions {
                host_bytes: self.kv_host_bytes,
                disk_path: self.kv_disk_path.clone(),
                disk_bytes: self.kv_disk_bytes,
                remote: self.kv_remote.clone(),
                remote_password: self.kv_remote_password_file.as_deref().map(read_password).transpose()?,
            },
            ..WorkerConfig::new(self.listen.clone())
        })
    }

    fn tls(&self) -> Result<Option<Tls>, String> {
        let (Some(certificate), Some(key), Some(ca)) = (&self.tls_certificate, &self.tls_key, &self.tls_ca) else {
            return Ok(None);
        };
        let files = TlsFiles { certificate: certificate.clone(), key: key.clone(), ca: ca.clone() };
        Tls::read(&files).map(Some).map_err(|error| error.to_string())
    }

    fn options(&self) -> ModelOptions {
        ModelOptions {
            model: self.model.clone(),
            adapters: self.adapter.clone(),
            // Peers on TCP name no files of this machine.
            adapter_orders: self.adapter_orders && matches!(self.listen, Address::Unix(_)),
            ordered_adapters: self.ordered_adapter.clone(),
            held: self.quantize,
            kv_format: self.kv_format,
            device: self.device,
            path: self.path,
            threads: self.threads,
            cores: self.cores.clone(),
            context_tokens: self.context,
            kv_bytes_max: self.kv_bytes,
            gpu_memory_share: self.gpu_memory_share,
            sequences_max: self.sequences,
            batch_tokens: self.batch_tokens,
            prompt_lookup: usize::from(self.prompt_lookup),
            machine_share: self.machine_share,
            machine_share_varies: self.machine_share_varies,
            keeps_to_gpu: self.keep_to_gpu,
            // Gateways elsewhere share no memory.
            weights: (self.shared_weights && matches!(self.listen, Address::Unix(_))).then(weights::offered).flatten(),
        }
    }
}

/// Reads a pool key, and no more bytes than a key can have.
fn read_key(path: &Path) -> Result<PoolKey, String> {
    let mut bytes = Vec::new();
    let fail = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let file = std::fs::File::open(path).map_err(|error| fail(&error))?;
    file.take(KEY_BYTES_MAX as u64 + 64).read_to_end(&mut bytes).map_err(|error| fail(&error))?;
    PoolKey::new(&bytes).map_err(|error| fail(&error))
}

/// The first line of a file.
fn read_password(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let fail = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let file = std::fs::File::open(path).map_err(|error| fail(&error))?;
    file.take(PASSWORD_BYTES_MAX).read_to_string(&mut text).map_err(|error| fail(&error))?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// Name of the process in `ps` and `pidof` (comm, at most 15 bytes), so that a signal meant for the gateway does not
/// reach a worker.
const PROCESS_NAME: &std::ffi::CStr = c"penstock-worker";

/// Runs the process: logs to stderr (JSON lines unless that is a terminal; `PENSTOCK_LOG` filters), serves, and
/// returns its exit code.
pub fn main(args: &WorkerArgs) -> ExitCode {
    // Err: the kernel has no names; nothing else depends on it.
    let _ = rustix::thread::set_name(PROCESS_NAME);
    let filter = EnvFilter::try_from_env("PENSTOCK_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Where the log cannot be written, reporting that would panic in the thread that logs.
    let log = log.log_internal_errors(false);
    // Err: the caller has a log already.
    let _ = if std::io::stderr().is_terminal() { log.try_init() } else { log.json().try_init() };
    match args.config().map(|config| run(config, with_role(build(args.options()), args.role))) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        // Logged already.
        Ok(Err(_)) => ExitCode::FAILURE,
        Err(message) => {
            tracing::error!(error = message, "worker ends: its arguments are not valid");
            ExitCode::from(2)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: WorkerArgs,
    }

    fn parse(line: &str) -> Result<WorkerArgs, clap::Error> {
        Program::try_parse_from(std::iter::once("worker").chain(line.split_whitespace())).map(|program| program.args)
    }

    #[test]
    fn the_flags_that_a_gateway_passes_are_understood() {
        let args = parse(
            "--listen unix:///tmp/a.sock --cores 2,3 --machine-share 4 --own-session --model /m --path portable \
                   --adapter a=/a --adapter b=/b",
        );
        let args = args.expect("valid");
        assert_eq!(args.options().adapters.iter().map(|source| &source.name).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((args.cores.as_slice(), args.machine_share, args.own_session), (&[2, 3][..], 4, true));
        assert_eq!(args.options().path, cpu::Path::Portable);
        let share = |text: &str| parse(text).expect("valid").options().gpu_memory_share;
        assert_eq!(share("--listen unix:/a --gpu-memory-share 0.45"), Some(0.45));
        assert_eq!(share("--listen unix:/a"), None);
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for line in [
            "",
            "--listen unix:/a --role both",
            "--listen /tmp/a",
            "--listen tcp:a",
            "--listen unix:/a --device tpu",
            "--listen unix:/a --path mmx",
            "--listen unix:/a --quantize int3",
            "--listen unix:/a --kv-format int4",
            "--listen unix:/a --adapter sql",
            "--listen unix:/a --gpu-memory-share 0",
            "--listen unix:/a --gpu-memory-share 1.01",
            "--listen unix:/a --gpu-memory-share nan",
            "--listen unix:/a --transfer-streams 0",
            "--listen unix:/a --transfer-streams 17",
            "--listen tcp:a:1 --tls-certificate /a",
            "--listen tcp:a:1 --tls-ca /a",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_key_file_that_is_missing_or_short_is_named() {
        let config =
            |file: &str| parse(&format!("--listen tcp:127.0.0.1:0 --key-file {file}")).expect("valid").config();
        assert!(config("/nonexistent").is_err_and(|message| message.contains("/nonexistent")));
        assert!(config("/dev/null").is_err_and(|message| message.contains("0 bytes")));
    }
}
