//! Configuration of a worker, the loader of its model, and its errors.

use crate::shelf::Shelf;
use penstock_engine::Engine;
use penstock_kernels::KernelError;
use penstock_kernels::cuda::Gpu;
use penstock_kernels::host::CopyUse;
use penstock_link::Tls;
use penstock_proto::Address;
use penstock_proto::frames::{LoadedAdapter, Loading};
use penstock_proto::handshake::PoolKey;
use rustix::thread::CpuSet;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::Duration;

/// Settings of a worker, except for the model.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Address on which gateways reach the worker: a Unix socket or a TCP port.
    pub listen: Address,
    /// Port for transfers on TCP; 0: any.
    pub transfer_port: u16,
    /// Connections of one transfer over TCP, and threads that serve transfers if that is more than one.
    pub transfer_streams: usize,
    /// True if transfers between workers of this machine go through memory that both map.
    pub shares_memory: bool,
    /// Secret of the pool, proved by both ends of a connection; needed on TCP.
    pub key: Option<PoolKey>,
    /// TLS with certificates at both ends, for all TCP connections.
    pub tls: Option<Tls>,
    /// True to listen on TCP addresses other than loopback without TLS. Such connections are authenticated at their
    /// beginning and not encrypted: only for networks that are trusted or tunnelled.
    pub beyond_loopback: bool,
    /// Cores for all threads of the process; empty: any.
    pub cores: Vec<usize>,
    /// Time without a connected gateway after which the worker exits, also after the start.
    pub orphan_ttl: Duration,
    /// Longest time for running requests to finish once the worker is told to exit.
    pub drain_deadline: Duration,
    /// Most connections at once, of gateways and strangers.
    pub connections_max: usize,
    /// KV tiers below the device: host memory, disk, remote store.
    pub tiers: TierOptions,
    /// True to become leader of a session of its own, so that signals of the gateway's terminal do not reach the
    /// worker.
    pub own_session: bool,
}

impl WorkerConfig {
    /// Default settings for an address.
    pub fn new(listen: Address) -> Self {
        Self {
            listen,
            transfer_port: 0,
            transfer_streams: 1,
            shares_memory: true,
            key: None,
            tls: None,
            beyond_loopback: false,
            cores: Vec::new(),
            orphan_ttl: Duration::from_secs(60),
            drain_deadline: Duration::from_secs(30),
            connections_max: 64,
            tiers: TierOptions::default(),
            own_session: false,
        }
    }

    pub(crate) fn check(&self) -> Result<(), WorkerError> {
        let Address::Tcp(host_port) = &self.listen else { return Ok(()) };
        if self.key.is_none() {
            return Err(WorkerError::KeyMissing { address: self.listen.to_string() });
        }
        let addresses = host_port
            .to_socket_addrs()
            .map_err(|source| WorkerError::Os { what: format!("looking up {host_port}"), source })?;
        for address in addresses {
            if !address.ip().is_loopback() && !self.beyond_loopback && self.tls.is_none() {
                return Err(WorkerError::NotLoopback { address: address.to_string() });
            }
        }
        Ok(())
    }

    /// Moves this process to its session and cores; threads started later inherit both.
    pub(crate) fn place(&self) -> Result<(), WorkerError> {
        if self.own_session {
            // EPERM: the process leads a group already, so it is not in the gateway's.
            let _ = rustix::process::setsid();
        }
        if self.cores.is_empty() {
            return Ok(());
        }
        let mut set = CpuSet::new();
        for core in &self.cores {
            if *core >= CpuSet::MAX_CPU {
                return Err(WorkerError::Core { core: *core });
            }
            set.set(*core);
        }
        rustix::thread::sched_setaffinity(None, &set).map_err(|error| WorkerError::Os {
            what: format!("moving to cores {:?}", self.cores),
            source: error.into(),
        })
    }
}

/// Tiers of a worker. Zeros and `None` switch a tier off. `Debug` does not show the remote tier, which may contain a
/// password.
#[derive(Clone, Default)]
pub struct TierOptions {
    /// Host memory for blocks of a device with memory of its own, in bytes.
    pub host_bytes: u64,
    /// Folder of the disk tier; `None` switches the tier off.
    pub disk_path: Option<PathBuf>,
    /// Size of the disk tier, in bytes.
    pub disk_bytes: u64,
    /// URL of the remote tier: `redis://…`, `rediss://…`, `redis+unix:///path`, `s3://…`.
    pub remote: Option<String>,
    /// Password of the server, if it is not in the URL; for a bucket `ACCESS_KEY_ID:SECRET_ACCESS_KEY`.
    pub remote_password: Option<String>,
}

impl std::fmt::Debug for TierOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TierOptions")
            .field("host_bytes", &self.host_bytes)
            .field("disk_path", &self.disk_path)
            .field("disk_bytes", &self.disk_bytes)
            .field("remote", &self.remote.is_some())
            .finish_non_exhaustive()
    }
}

impl TierOptions {
    /// Returns true if any tier is configured: memory, disk with a size, or remote.
    pub fn is_any(&self) -> bool {
        self.host_bytes > 0 || self.disk_path.is_some() && self.disk_bytes > 0 || self.remote.is_some()
    }
}

/// Random number of this life of the worker.
pub(crate) fn epoch() -> Result<u64, WorkerError> {
    Ok(u64::from_le_bytes(random()?))
}

/// Random bytes from the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], WorkerError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| WorkerError::Random(error.to_string()))?;
    Ok(bytes)
}

/// Loader of the model: called once, on the engine's thread; reports its progress.
pub type Build = Box<dyn FnOnce(&mut dyn FnMut(Loading)) -> Result<(Engine, ReadyInfo), WorkerError> + Send>;

/// Description of a loaded model, for [`penstock_proto::frames::Ready`].
#[derive(Default)]
pub struct ReadyInfo {
    /// Name of the checkpoint: its folder's name, or "penstock-demo".
    pub model: String,
    /// BLAKE3 of tokenizer.json; the gateway compares it with its own.
    pub tokenizer_hash: Vec<u8>,
    /// BLAKE3 over the weights' names and shapes and config.json.
    pub model_hash: Vec<u8>,
    /// Numerics id, within which exactness is promised.
    pub numerics_id: String,
    /// Rows of the model's embedding: the number of token ids.
    pub vocab_size: u32,
    /// Device and instruction path, for a person to read.
    pub device: String,
    /// GPU that computes, whose figures are told to gateways; `None`: another device.
    pub gpu: Option<Gpu>,
    /// Shared memory of the packed weights, and who packed them; `None`: the memory is this worker's own.
    pub weights: Option<CopyUse>,
    /// Adapters that are loaded beside the model.
    pub adapters: Vec<LoadedAdapter>,
    /// Adapters that a gateway may change while the worker runs; `None`: it may not.
    pub shelf: Option<Shelf>,
}

/// Reason why a worker cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The address is TCP, and no pool key is configured.
    #[error("{address} needs a pool key file: every connection over TCP has to prove it")]
    KeyMissing {
        /// Configured address, as text.
        address: String,
    },
    /// An address beyond loopback, without TLS and without the explicit permission.
    #[error(
        "{address} is not a loopback address: give TLS certificates, or say explicitly that this network is trusted"
    )]
    NotLoopback {
        /// Configured address, as text.
        address: String,
    },
    /// The address is in use by another process.
    #[error("another worker serves at {address}")]
    InUse {
        /// Configured address, as text.
        address: String,
    },
    /// A file that is not a socket is in the way.
    #[error("{path:?} exists and is not a socket")]
    NotASocket {
        /// Path of the file that is in the way.
        path: PathBuf,
    },
    /// The core named for a thread does not exist on this machine.
    #[error("there is no core {core}")]
    Core {
        /// Number of the core, as configured.
        core: usize,
    },
    /// The operating system refused an operation; the text names it.
    #[error("{what}")]
    Os {
        /// Operation that was tried, in words.
        what: String,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The operating system has no random numbers.
    #[error("random numbers: {0}")]
    Random(String),
    /// The model cannot be served; the message names file, tensor and reason.
    #[error("{0}")]
    Model(String),
    /// The device failed or refused the model.
    #[error("device")]
    Device(#[from] KernelError),
    /// A KV tier cannot be opened as configured.
    #[error("KV tier: {0}")]
    Tier(String),
    /// The engine's thread panicked: a bug.
    #[error("the engine panicked: {0}")]
    Panicked(String),
    /// Logits were not finite, and those of the probe text neither.
    #[error("the model's logits are not finite, whatever the text: its weights or this machine's memory are damaged")]
    Broken,
    /// The device failed in so many steps that the worker gives up.
    #[error("the device failed in {faults} steps, at last: {last}")]
    Faults {
        /// Number of failed steps of the engine.
        faults: u64,
        /// Reason of the last failure.
        last: String,
    },
    /// A step that does not end, so that the worker gives up.
    #[error("a step of the engine does not end: it began {seconds} s ago")]
    Hangs {
        /// Age of the step.
        seconds: u64,
    },
}
