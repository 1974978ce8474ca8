//! Configuration of a pool: workers, deadlines, limits, policies.

use super::adapters::AdapterSource;
use super::copies::SharedWeights;
use super::holds::Holds;
use super::scaler::Hook;
use penstock_link::Tls;
use penstock_proto::Address;
use penstock_proto::address::AddressError;
use penstock_proto::handshake::PoolKey;
use penstock_router::replicas::ReplicaLimits;
use penstock_router::roles::RoleLimits;
use penstock_router::{Limits, Policy, WORKERS_MAX, Weights};
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Worker processes on this machine.
///
/// Worker `i` is started as `program args… --listen unix://STATE_DIR/ID-i-SPEC.sock --machine-share COUNT [--cores LIST]
/// [--machine-share-varies] [--keep-to-gpu] --adapter-orders [--ordered-adapter KEY:NAME=PATH …] --own-session [--shared-weights]`, with its output
/// appended to the `.log` beside the socket. A running worker whose program, arguments and identity are equal is adopted instead; it keeps its share of
/// the machine until it is restarted.
#[derive(Clone, Debug)]
pub struct LocalWorkers {
    /// Most local workers at a time; each gets this fraction (1/count) of the machine.
    pub count: usize,
    /// True if fewer than `count` may run: their number follows the load.
    pub varies: bool,
    /// Path of the worker's program, usually the one that runs now.
    pub program: PathBuf,
    /// Arguments of the worker before those that the supervisor adds: `["worker", "--model", DIR]`.
    pub args: Vec<OsString>,
    /// CPU cores to divide among several workers, without overlap; empty: no `--cores` is passed.
    pub cores: Vec<usize>,
    /// Directory of sockets, leases, locks and logs; created with mode 0700.
    pub state_dir: PathBuf,
    /// Identity of the model files and the build: a running worker is adopted only if it is equal.
    pub identity: String,
    /// Time for a worker that is told to exit to finish its requests.
    pub exit_deadline: Duration,
    /// Memory of packed weights, which workers get as their standard input; `None`: each packs its own.
    pub weights: Option<SharedWeights>,
    /// Workers of other pools that are to end, and hold memory of the GPU until then.
    pub gpu_leavers: GpuLeavers,
}

/// Test of whether workers of other pools that are to end still hold memory of the GPU, made at each start of a worker. By default none do.
#[derive(Clone, Default)]
pub struct GpuLeavers(Option<Arc<dyn Fn() -> bool + Send + Sync>>);

impl GpuLeavers {
    /// Makes the answer that `ask` gives.
    pub fn new(ask: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(ask)))
    }

    /// Returns true if there are such workers now.
    pub fn are_there(&self) -> bool {
        self.0.as_ref().is_some_and(|ask| ask())
    }
}

impl fmt::Debug for GpuLeavers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("GpuLeavers").finish_non_exhaustive()
    }
}

/// Whether a property of the pool (roles, number of workers) follows the load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Follow {
    /// The property stays as the config or an operator set it.
    #[default]
    Off,
    /// Dry run: advice is logged and shown, nothing is changed.
    DryRun,
    /// The planner changes the property as the load asks for it.
    On,
}

/// Number of workers and the rules by which it follows the load.
#[derive(Clone, Debug)]
pub struct ReplicaConfig {
    /// Whether the planner of replicas may start and stop workers; by default their number is fixed.
    pub follow: Follow,
    /// Local workers started at once while the number follows the load; otherwise all are started.
    pub at_start: usize,
    /// Least and largest number of workers, promised latencies, and the times that the planner waits between changes.
    pub limits: ReplicaLimits,
    /// Call that starts and stops remote workers; `None`: there are only local ones, or their number is fixed.
    pub hook: Option<Arc<Hook>>,
}

impl Default for ReplicaConfig {
    fn default() -> Self {
        Self { follow: Follow::Off, at_start: 1, limits: ReplicaLimits::default(), hook: None }
    }
}

/// Rule of local workers that run only while they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnDemand {
    /// Time without a request after which the workers are stopped; `None`: once started, they stay.
    pub keep_alive: Option<Duration>,
}

/// Roles of the pool's workers and the rules by which they follow the load.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoleConfig {
    /// Number of workers, counted from the first, that prefill for the others at the start. 0: each keeps the role it was started with.
    pub prefill_workers: usize,
    /// Whether the planner of roles may change the workers' roles; by default they stay.
    pub follow: Follow,
    /// Fewest workers per role, promised latencies, and the times and gain that a change of role must show.
    pub limits: RoleLimits,
}

/// Configuration of a pool: workers, time limits, bounds, and planners; [`PoolConfig::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Name for logs, metrics and files; not empty.
    pub id: String,
    /// Worker processes that this gateway starts; `None`: there are only remote workers.
    pub local: Option<LocalWorkers>,
    /// Addresses of remote workers, which this gateway only connects to.
    pub connect: Vec<Address>,
    /// Adapters that are served beside the model; the pool's own workers hold them.
    pub adapters: Vec<AdapterSource>,
    /// Secret shared with workers on TCP; required by a TCP address.
    pub key: Option<PoolKey>,
    /// TLS settings for connections to workers on TCP; `None`: connections without TLS.
    pub tls: Option<Tls>,
    /// BLAKE3 of the gateway's tokenizer; a worker with another one is refused. `None`: the first worker's tokenizer is taken.
    pub tokenizer_hash: Option<Vec<u8>>,
    /// Flow control: tokens that a choice may be ahead of its reader.
    pub window_tokens: u32,
    /// Most open requests, waiting or running; more are refused as overloaded.
    pub requests_max: usize,
    /// Longest wait of a request for a free worker.
    pub wait_max: Duration,
    /// Longest wait of a new request for any worker to be ready.
    pub unavailable_after: Duration,
    /// Longest wait of an interrupted request for any worker to be ready.
    pub resume_deadline: Duration,
    /// Factor on the last load time of an expected worker: a lower bound of the three waits above. 0: no such bound.
    pub wait_loads: f64,
    /// Silence after which a worker is suspected; its requests move if another worker is ready.
    pub suspect_after: Duration,
    /// Silence after which a worker is given up even if no other is ready, or while it loads.
    pub give_up_after: Duration,
    /// Silence after which a local process is killed and started again.
    pub kill_after: Duration,
    /// Least age of a step that does not end for the same, where the process answers: longer than a step of any machine that somebody would wait for.
    pub hang_after: Duration,
    /// Time without requests after which the only serving worker may be restarted to get its share of the machine.
    pub calm_after: Duration,
    /// Longest step before a worker is suspected; ten times the longest step seen counts if that is more.
    pub step_max: Duration,
    /// True if the pool migrates decoding requests from a worker whose decode steps are slow to a worker with faster
    /// steps.
    pub balance: bool,
    /// True if workers load blocks from their tiers for requests that still wait (prefetch).
    pub prefetch: bool,
    /// Weights of the parts of a request's cost at a worker, as the router compares them.
    pub weights: Weights,
    /// Bounds of the router: length of its queue, predicted TTFT, objectives, fairness.
    pub limits: Limits,
    /// Policy by which the router chooses the worker of a request.
    pub policy: Policy,
    /// True if a request may ask for the router's choice and its reasons.
    pub explain: bool,
    /// Roles at the start (prefill, decode or mixed) and the rules by which they follow the load.
    pub roles: RoleConfig,
    /// Number of workers at the start, and the rules by which it follows the load.
    pub replicas: ReplicaConfig,
    /// Rule by which the local workers are started by the first request; `None`: they run all the time.
    pub on_demand: Option<OnDemand>,
    /// File of the recorded decisions, one JSON line per request; `None`: none are recorded.
    pub record: Option<PathBuf>,
    /// Workers that an operator holds, shared with a pool of the same workers.
    pub holds: Holds,
}

/// Contradiction in a pool's configuration, or an obstacle on this machine; [`Pool::start`](crate::Pool::start) returns
/// it.
#[derive(Debug, thiserror::Error)]
pub enum PoolConfigError {
    /// The pool's id is empty.
    #[error("a pool has no id")]
    IdMissing,
    /// The pool has neither local workers nor addresses.
    #[error("pool {0:?} has no workers: neither local ones nor addresses to connect to")]
    Empty(String),
    /// More workers than the router's bitset holds.
    #[error("pool {id:?} has {count} workers, limit {WORKERS_MAX}")]
    TooMany {
        /// Id of the pool in question.
        id: String,
        /// Number of workers in the configuration, local and remote.
        count: usize,
    },
    /// An address on TCP without a pool key.
    #[error("pool {id:?} connects to {address}, which needs a pool key file")]
    KeyMissing {
        /// Id of the pool in question.
        id: String,
        /// TCP address of the worker that needs a pool key.
        address: String,
    },
    /// A zero where a positive number is needed.
    #[error("pool {id:?}: {what} must be at least 1")]
    Zero {
        /// Id of the pool in question.
        id: String,
        /// Name of the field with the fault.
        what: &'static str,
    },
    /// The socket's path is too long for a Unix address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The state directory cannot be created, or is not safe to use.
    #[error("state directory {path:?}")]
    StateDir {
        /// Path of the directory that cannot be used.
        path: PathBuf,
        /// Error that the operating system gave for the path.
        #[source]
        source: std::io::Error,
    },
    /// The file of recorded decisions cannot be written.
    #[error("decisions cannot be written to {path:?}")]
    Record {
        /// Path of the file that cannot be opened.
        path: PathBuf,
        /// Error that the operating system gave for the path.
        #[source]
        source: std::io::Error,
    },
    /// The operating system gives no random numbers.
    #[error("random numbers: {0}")]
    Random(String),
}

impl PoolConfig {
    /// Configuration with the default limits under this id; it names no workers yet.
    pub fn new(id: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            local: None,
            connect: Vec::new(),
            adapters: Vec::new(),
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
            hang_after: Duration::from_secs(600),
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
            on_demand: None,
            record: None,
            holds: Holds::default(),
        }
    }

    /// Number of configured workers: the most local ones and all remote addresses.
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
