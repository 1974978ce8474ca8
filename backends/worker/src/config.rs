//! How a worker is run, what it is given to run, and why it may fail.

use crate::tiers::TierOptions;
use penstock_engine::Engine;
use penstock_kernels::KernelError;
use penstock_link::Tls;
use penstock_proto::Address;
use penstock_proto::frames::Loading;
use penstock_proto::handshake::PoolKey;
use rustix::thread::CpuSet;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::Duration;

/// Everything but the model.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Where it listens.
    pub listen: Address,
    /// Port for transfers on TCP; 0: any.
    pub transfer_port: u16,
    /// Connections of one transfer over TCP, and threads that serve transfers if that is more than one.
    pub transfer_streams: usize,
    /// Transfers between workers of this machine go through memory that both map.
    pub shares_memory: bool,
    /// The pool's secret; needed on TCP.
    pub key: Option<PoolKey>,
    /// TLS with certificates at both ends, for everything on TCP.
    pub tls: Option<Tls>,
    /// Listen on TCP addresses other than loopback without TLS. Frames are authenticated at the beginning of the connection and not
    /// encrypted then: only for networks that are trusted or tunnelled.
    pub beyond_loopback: bool,
    /// Cores for all threads of the process; empty: any.
    pub cores: Vec<usize>,
    /// Exit when no gateway is connected for this long, also after the start.
    pub orphan_ttl: Duration,
    /// When told to exit, finish what runs for at most this long.
    pub drain_deadline: Duration,
    /// Connections at once, gateways and strangers.
    pub connections_max: usize,
    /// Places for blocks beside the device.
    pub tiers: TierOptions,
    /// Become leader of a session of its own, so that signals of the gateway's terminal do not reach it.
    pub own_session: bool,
}

impl WorkerConfig {
    /// The defaults, at an address.
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
            // EPERM: it leads its group already, so it is not in the gateway's.
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

/// One life of this worker: random.
pub(crate) fn epoch() -> Result<u64, WorkerError> {
    Ok(u64::from_le_bytes(random()?))
}

/// Random bytes from the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], WorkerError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| WorkerError::Random(error.to_string()))?;
    Ok(bytes)
}

/// Loads the model: called once, on the engine's thread; tells its progress.
pub type Build = Box<dyn FnOnce(&mut dyn FnMut(Loading)) -> Result<(Engine, ReadyInfo), WorkerError> + Send>;

/// What a loaded model says of itself, for [`penstock_proto::frames::Ready`].
#[derive(Clone, Debug, Default)]
pub struct ReadyInfo {
    /// Name of the checkpoint.
    pub model: String,
    /// BLAKE3 of tokenizer.json.
    pub tokenizer_hash: Vec<u8>,
    /// BLAKE3 over the weights' names and shapes and config.json.
    pub model_hash: Vec<u8>,
    /// What exactness is promised within.
    pub numerics_id: String,
    /// Rows of the embedding.
    pub vocab_size: u32,
    /// Device and path for a person.
    pub device: String,
}

/// Why a worker cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// TCP without a key.
    #[error("{address} needs a pool key file: every connection over TCP has to prove it")]
    KeyMissing {
        /// The address.
        address: String,
    },
    /// Not asked for by name.
    #[error(
        "{address} is not a loopback address: give TLS certificates, or say explicitly that this network is trusted"
    )]
    NotLoopback {
        /// The address.
        address: String,
    },
    /// Another process serves there.
    #[error("another worker serves at {address}")]
    InUse {
        /// The address.
        address: String,
    },
    /// A file is in the way.
    #[error("{path:?} exists and is not a socket")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// No such core.
    #[error("there is no core {core}")]
    Core {
        /// Its number.
        core: usize,
    },
    /// The operating system refused.
    #[error("{what}")]
    Os {
        /// What was tried.
        what: String,
        /// What it said.
        #[source]
        source: std::io::Error,
    },
    /// The operating system has no random numbers.
    #[error("random numbers: {0}")]
    Random(String),
    /// The model cannot be served; the message names file, tensor and reason.
    #[error("{0}")]
    Model(String),
    /// The device refused.
    #[error("device")]
    Device(#[from] KernelError),
    /// A KV tier cannot be what it is configured to be.
    #[error("KV tier: {0}")]
    Tier(String),
    /// The engine's thread panicked: a bug.
    #[error("the engine panicked: {0}")]
    Panicked(String),
    /// Logits were not finite, and those of another text neither.
    #[error("the model's logits are not finite, whatever the text: its weights or this machine's memory are damaged")]
    Broken,
    /// The device failed in step after step.
    #[error("the device failed in {faults} steps")]
    Faults {
        /// How many.
        faults: u64,
    },
}
