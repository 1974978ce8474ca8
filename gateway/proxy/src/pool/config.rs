//! What a pool is made of.

use super::hook::Hook;
use penstock_link::Tls;
use penstock_proto::Address;
use penstock_proto::address::AddressError;
use penstock_proto::handshake::PoolKey;
use penstock_router::replicas::ReplicaLimits;
use penstock_router::roles::RoleLimits;
use penstock_router::{Limits, Policy, WORKERS_MAX, Weights};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Worker processes on this machine.
///
/// Worker `i` is started as `program args… --listen unix://STATE_DIR/ID-i-SPEC.sock --machine-share COUNT --own-session
/// [--cores LIST]`, with its output appended to the `.log` beside the socket. A running worker whose program, arguments and
/// identity are equal is adopted instead; its share of the machine stays what it was until it starts anew.
#[derive(Clone, Debug)]
pub struct LocalWorkers {
    /// How many there can be; each gets this share of the machine.
    pub count: usize,
    /// The binary, usually this one.
    pub program: PathBuf,
    /// Arguments before those that the supervisor adds: `["worker", "--model", DIR]`.
    pub args: Vec<OsString>,
    /// Cores to share out among several, disjoint as far as they go; empty: no `--cores`.
    pub cores: Vec<usize>,
    /// Sockets, leases and logs; made with mode 0700.
    pub state_dir: PathBuf,
    /// What else must be equal for a worker to be adopted (the model files' identity).
    pub identity: String,
    /// How long a worker may take to finish what it has when it is told to exit.
    pub exit_deadline: Duration,
}

/// Whether something follows the load: the roles of workers, their number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Follow {
    /// It stays as it was set.
    #[default]
    Off,
    /// What would be done is told, and not done.
    DryRun,
    /// It does.
    On,
}

/// How many workers there are.
#[derive(Clone, Debug)]
pub struct ReplicaConfig {
    /// Whether that changes with the load.
    pub follow: Follow,
    /// Local workers that are started at once, where it does; otherwise all are.
    pub at_start: usize,
    /// By which rules.
    pub limits: ReplicaLimits,
    /// Who starts and stops workers that are not local.
    pub hook: Option<Arc<Hook>>,
}

impl Default for ReplicaConfig {
    fn default() -> Self {
        Self { follow: Follow::Off, at_start: 1, limits: ReplicaLimits::default(), hook: None }
    }
}

/// What kind of work the workers of a pool do.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoleConfig {
    /// Workers that prefill for the others at the start: the first ones. 0: each does what it was started for.
    pub prefill_workers: usize,
    /// Whether that changes with the load.
    pub follow: Follow,
    /// By which rules.
    pub limits: RoleLimits,
}

/// See the fields; [`PoolConfig::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Name, for logs, metrics and files; not empty.
    pub id: String,
    /// Workers that this gateway starts.
    pub local: Option<LocalWorkers>,
    /// Workers that somebody else starts.
    pub connect: Vec<Address>,
    /// Secret shared with workers on TCP.
    pub key: Option<PoolKey>,
    /// TLS to workers on TCP.
    pub tls: Option<Tls>,
    /// BLAKE3 of the gateway's tokenizer; a worker with another one is refused. `None`: that of the first worker counts.
    pub tokenizer_hash: Option<Vec<u8>>,
    /// Tokens that a choice may be ahead of its reader.
    pub window_tokens: u32,
    /// Requests open at once, waiting or running.
    pub requests_max: usize,
    /// A request waits for a free worker no longer than this.
    pub wait_max: Duration,
    /// A new request waits for any worker to be ready no longer than this.
    pub unavailable_after: Duration,
    /// An interrupted request waits for any worker to be ready no longer than this.
    pub resume_deadline: Duration,
    /// These three are at least so many times what a worker that comes took to load last; 0: they are what they are.
    pub wait_loads: f64,
    /// A worker silent for longer is suspected: its requests move if another worker is ready.
    pub suspect_after: Duration,
    /// A worker silent for longer is given up even when no other is ready.
    pub give_up_after: Duration,
    /// A local process without a word for longer is killed and started again.
    pub kill_after: Duration,
    /// The only worker that serves starts anew with its share of the machine when nobody has asked for anything for so long.
    pub calm_after: Duration,
    /// A step may take this long, or ten times the longest seen, whichever is more.
    pub step_max: Duration,
    /// Whether requests move from a worker that has become slow to one that would be faster.
    pub balance: bool,
    /// Whether workers load from their tiers for requests that wait.
    pub prefetch: bool,
    /// Weights of the router's cost.
    pub weights: Weights,
    /// The router's limits.
    pub limits: Limits,
    /// Which worker gets a request.
    pub policy: Policy,
    /// Requests may ask who was chosen and why.
    pub explain: bool,
    /// Who prefills for whom.
    pub roles: RoleConfig,
    /// How many workers there are.
    pub replicas: ReplicaConfig,
    /// Where decisions are written down.
    pub record: Option<PathBuf>,
}

/// A configuration that cannot work.
#[derive(Debug, thiserror::Error)]
pub enum PoolConfigError {
    /// No name.
    #[error("a pool has no id")]
    IdMissing,
    /// Nobody to serve.
    #[error("pool {0:?} has no workers: neither local ones nor addresses to connect to")]
    Empty(String),
    /// More than the router's bitset holds.
    #[error("pool {id:?} has {count} workers, limit {WORKERS_MAX}")]
    TooMany {
        /// The pool.
        id: String,
        /// Its workers.
        count: usize,
    },
    /// A worker on TCP without a key.
    #[error("pool {id:?} connects to {address}, which needs a pool key file")]
    KeyMissing {
        /// The pool.
        id: String,
        /// The address.
        address: String,
    },
    /// A zero where something positive is needed.
    #[error("pool {id:?}: {what} must be at least 1")]
    Zero {
        /// The pool.
        id: String,
        /// The field.
        what: &'static str,
    },
    /// The socket path does not fit.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The state directory cannot be made or used.
    #[error("state directory {path:?}")]
    StateDir {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The file of decisions cannot be written.
    #[error("decisions cannot be written to {path:?}")]
    Record {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The operating system has no random numbers.
    #[error("random numbers: {0}")]
    Random(String),
}

impl PoolConfig {
    /// A pool without workers and with the default limits.
    pub fn new(id: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            local: None,
            connect: Vec::new(),
            key: None,
            tls: None,
            tokenizer_hash: None,
            window_tokens: 64,
            requests_max: 16_384,
            wait_max: Duration::from_secs(120),
            unavailable_after: Duration::from_secs(5),
            resume_deadline: Duration::from_secs(30),
            wait_loads: 3.0,
            suspect_after: Duration::from_secs(2),
            give_up_after: Duration::from_secs(10),
            kill_after: Duration::from_secs(30),
            calm_after: Duration::from_secs(60),
            step_max: Duration::from_secs(10),
            balance: true,
            prefetch: true,
            weights: Weights::default(),
            limits: Limits::default(),
            policy: Policy::default(),
            explain: false,
            roles: RoleConfig::default(),
            replicas: ReplicaConfig::default(),
            record: None,
        }
    }

    /// Workers in all.
    pub fn workers(&self) -> usize {
        self.connect.len() + self.local.as_ref().map_or(0, |local| local.count)
    }

    pub(super) fn check(&self) -> Result<(), PoolConfigError> {
        let id = || self.id.clone();
        if self.id.is_empty() {
            return Err(PoolConfigError::IdMissing);
        }
        match self.workers() {
            0 => return Err(PoolConfigError::Empty(id())),
            count if count > WORKERS_MAX => return Err(PoolConfigError::TooMany { id: id(), count }),
            _ => {}
        }
        let tcp = self.connect.iter().find(|address| matches!(address, Address::Tcp(_)));
        if let (Some(address), None) = (tcp, &self.key) {
            return Err(PoolConfigError::KeyMissing { id: id(), address: address.to_string() });
        }
        for (value, what) in [(self.window_tokens as usize, "window_tokens"), (self.requests_max, "requests_max")] {
            if value == 0 {
                return Err(PoolConfigError::Zero { id: id(), what });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_found_before_anything_starts() {
        let pool = |change: fn(&mut PoolConfig)| {
            let mut config = PoolConfig::new("a");
            config.connect.push("unix:///tmp/a.sock".parse().expect("address"));
            change(&mut config);
            config.check()
        };
        assert!(pool(|_| {}).is_ok());
        assert!(matches!(pool(|c| c.id.clear()), Err(PoolConfigError::IdMissing)));
        assert!(matches!(pool(|c| c.connect.clear()), Err(PoolConfigError::Empty(_))));
        assert!(matches!(pool(|c| c.window_tokens = 0), Err(PoolConfigError::Zero { .. })));
        assert!(matches!(pool(|c| c.connect = vec![c.connect[0].clone(); 200]), Err(PoolConfigError::TooMany { .. })));
        let tcp = |c: &mut PoolConfig| c.connect.push("tcp://127.0.0.1:1".parse().expect("address"));
        assert!(matches!(pool(tcp), Err(PoolConfigError::KeyMissing { .. })));
    }
}
