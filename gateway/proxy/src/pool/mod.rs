//! A pool: the workers of one model, as the request path sees them: [`Pool::submit`] a [`Job`], take [`PoolEvent`]s from its
//! [`Ticket`]. From any runtime; sessions, supervision and the truth about every request live on one fleet runtime
//! ([`FleetRuntime`], a thread of its own), which outlives Pingora's services.
//!
//! - `job.rs`, `ticket.rs`, `status.rs`: the face
//! - `truth.rs`: what a request has emitted; from it a request goes on at any worker (pure)
//! - `actor.rs`: one task that owns the router, the members and all requests; no locks on the way of a token
//! - `session.rs`: one connection to one worker
//! - `supervisor.rs`, `lease.rs`, `epitaph.rs`: local worker processes: started, adopted, restarted; why one ended
//! - `hook.rs`: others' worker processes: whoever starts and stops them is asked to

mod actor;
mod config;
mod decision;
mod epitaph;
pub mod hook;
mod job;
mod lease;
mod member;
mod recorder;
mod session;
mod status;
mod steps;
mod sums;
mod supervisor;
mod ticket;
mod troubles;
mod truth;

pub use actor::migrate::{Cause as MoveCause, MoveError};
pub use config::{Follow, LocalWorkers, PoolConfig, PoolConfigError, ReplicaConfig, RoleConfig};
pub use decision::{Decision, Offer};
pub use job::{CHOICES_MAX, Gap, Job, PROMPT_TOKENS_MAX, PoolError, PoolEvent};
pub use status::{Counts, ModelInfo, PoolStatus, ReplicaStatus, WorkerPhase, WorkerStatus};
pub use steps::DecodeSteps;
pub use sums::{Sums, TierSums, TransferSums};
pub use ticket::Ticket;
pub use troubles::Trouble;

use arc_swap::ArcSwap;
use penstock_proto::frames::Role;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use ticket::{Mailbox, Post, Slot};
use tokio::sync::{mpsc, oneshot};

/// The thread on which all sessions live.
pub struct FleetRuntime {
    handle: tokio::runtime::Handle,
    _stop: oneshot::Sender<()>,
}

impl FleetRuntime {
    /// Starts the thread. It ends when this value and with it the process ends.
    ///
    /// # Errors
    /// When the operating system gives no thread or no epoll.
    pub fn start() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        std::thread::Builder::new().name("penstock-fleet".into()).spawn(move || {
            // Err when the sender is dropped, which is the only way it ends.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        })?;
        Ok(Self { handle, _stop: stop })
    }

    /// Where tasks of it are spawned.
    pub(crate) fn handle(&self) -> &tokio::runtime::Handle {
        &self.handle
    }
}

/// What becomes of the local workers when the gateway ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// They finish what they have and exit.
    Exit,
    /// They stay and wait for the next gateway (until their `orphan_ttl`).
    Adopt,
}

/// What an operator asks of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steer {
    /// It gets nothing new; what it has moves to others where workers can hand their blocks over, and is finished there otherwise.
    Hold,
    /// It is used again.
    Release,
    /// It finishes what it has, exits, and is started again; after `patience` it is killed, and what it has goes on elsewhere or at its
    /// next life.
    Restart {
        /// Time to finish.
        patience: Duration,
    },
    /// What kind of work it does from now on.
    Role(Role),
}

/// Why a worker is not steered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SteerError {
    /// The pool has no worker of that name.
    #[error("there is no worker of that name")]
    NotFound,
    /// Its process is not this gateway's.
    #[error("the worker was not started by this gateway: restart the worker where it was started")]
    Elsewhere,
    /// It starts anew already.
    #[error("the worker is being restarted")]
    Restarting,
    /// The load needs fewer.
    #[error("the worker is stopped or stopping: the load needs fewer workers")]
    Stopped,
    /// The pool has ended, or does not answer.
    #[error("the pool does not answer")]
    Closed,
}

/// What an operator asks of the planner of replicas; what is `None` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaOrder {
    /// Workers at least.
    pub min: Option<usize>,
    /// Workers at most.
    pub max: Option<usize>,
    /// Do nothing from now on, or something again.
    pub paused: Option<bool>,
}

/// Why an operator's word to the planner of replicas changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplicaError {
    /// There is no planner.
    #[error("the number of the pool's workers is fixed: replicas in its config lets it follow the load")]
    Fixed,
    /// The bounds contradict each other.
    #[error(
        "the number of workers must be from 1 to {0}: the config has no addresses or shares of the machine for more"
    )]
    Bounds(usize),
    /// The pool has ended, or does not answer.
    #[error("the pool does not answer")]
    Closed,
}

/// Orders from the handle to the actor.
pub(crate) enum Control {
    /// Steers the worker of that name.
    Steer { worker: String, steer: Steer, done: oneshot::Sender<Result<(), SteerError>> },
    /// Bounds or pauses the planner of replicas.
    Replicas { order: ReplicaOrder, done: oneshot::Sender<Result<(), ReplicaError>> },
    /// The last decisions, newest first.
    Decisions { count: usize, done: oneshot::Sender<Vec<Decision>> },
    /// What would be decided about a prompt now.
    Explain { view: Box<penstock_router::View>, done: oneshot::Sender<Decision> },
    /// Moves a request to the worker of that name while it runs.
    Move { request: u64, worker: String, done: oneshot::Sender<Result<(), MoveError>> },
    /// Workers with another share of the machine than theirs start anew.
    Arrange,
    /// Take nothing new, let open requests finish, then leave.
    Shutdown { leave: Leave, deadline: Duration, done: oneshot::Sender<()> },
}

/// The actor answers within this time, or never.
const STEER_TIMEOUT: Duration = Duration::from_secs(5);

/// Exit code after a fault of the program itself (`EX_SOFTWARE`).
const EXIT_SOFTWARE: i32 = 70;

/// Waits for a task and calls `fault` if it panicked.
async fn watch(task: tokio::task::JoinHandle<()>, fault: impl FnOnce()) {
    if let Err(error) = task.await
        && error.is_panic()
    {
        tracing::error!(%error, "the task of a pool panicked: the gateway exits and must be started again");
        fault();
    }
}

struct Shared {
    mailbox: Arc<Mailbox>,
    status: Arc<ArcSwap<PoolStatus>>,
    control: mpsc::Sender<Control>,
    ids: AtomicU64,
    draining: AtomicBool,
    /// The number of workers is somebody else's matter from now on.
    settled: Arc<AtomicBool>,
    config: Arc<PoolConfig>,
}

/// Handle of a running pool; cheap to clone.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

impl Pool {
    /// Starts the pool's sessions and, if it has local workers, their supervision.
    ///
    /// # Errors
    /// [`PoolConfigError`] when the configuration contradicts itself or the state directory cannot be used.
    pub fn start(runtime: &FleetRuntime, config: PoolConfig) -> Result<Self, PoolConfigError> {
        config.check()?;
        let config = Arc::new(config);
        let mailbox = Arc::new(Mailbox::new());
        let status = Arc::new(ArcSwap::from_pointee(PoolStatus::default()));
        let (control, orders) = mpsc::channel(8);
        let settled = Arc::new(AtomicBool::new(false));
        let shown = (Arc::clone(&status), Arc::clone(&settled));
        let actor = actor::Actor::new(Arc::clone(&config), Arc::clone(&mailbox), shown, orders)?;
        let handle = runtime.handle.clone();
        let task = runtime.handle.spawn(async move { actor.run(handle).await });
        // Without its actor a pool takes requests and never answers. Local workers outlive the process: the next one adopts them.
        runtime.handle.spawn(watch(task, || std::process::exit(EXIT_SOFTWARE)));
        let (ids, draining) = (AtomicU64::new(0), AtomicBool::new(false));
        Ok(Self { shared: Arc::new(Shared { mailbox, status, control, ids, draining, settled, config }) })
    }

    /// Hands a request to the pool. Never waits; what happens to it comes out of the ticket.
    ///
    /// # Errors
    /// [`PoolError`] when it is not taken: nothing has been done for it.
    pub fn submit(&self, job: Job) -> Result<Ticket, PoolError> {
        let shared = &*self.shared;
        job.check()?;
        if shared.draining.load(Ordering::Relaxed) {
            return Err(PoolError::Draining);
        }
        let open = shared.mailbox.open.load(Ordering::Relaxed);
        if open >= shared.config.requests_max {
            let retry_after = Duration::from_secs(1);
            return Err(PoolError::Overloaded { open, limit: shared.config.requests_max, retry_after });
        }
        let status = shared.status.load();
        if let Some(retry_after) = status.hopeless_for(status.ready_wait) {
            return Err(PoolError::Unavailable { retry_after, why: status.last_end() });
        }
        let id = shared.ids.fetch_add(1, Ordering::Relaxed) + 1;
        let slot = Arc::new(Slot::new(id, shared.config.window_tokens));
        let ticket = Ticket::new(Arc::clone(&slot), Arc::clone(&shared.mailbox));
        shared.mailbox.post(Post::Submit(Box::new(job), slot));
        Ok(ticket)
    }

    /// Local workers that a pool of that config would have to start beside those of this one.
    pub(crate) fn lacks(&self, other: &PoolConfig) -> usize {
        let files = |config: &PoolConfig| {
            let name = |at| format!("{}-{at}", config.id);
            let local = config.local.iter();
            local.flat_map(|local| (0..local.count).map(move |at| local.file(&name(at), "sock"))).collect::<Vec<_>>()
        };
        let own = files(&self.shared.config);
        files(other).iter().filter(|file| !own.contains(file)).count()
    }

    /// From now on nobody else holds the local workers: those that were taken over with another share of the machine than they would be started
    /// with here start anew, one after another, while others serve, or while nobody asks.
    pub async fn arrange(&self) {
        // Err: the pool has ended.
        let _ = self.shared.control.send(Control::Arrange).await;
    }

    /// Whether both are handles of one pool.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// The pool as it was at most a fifth of a second ago.
    pub fn status(&self) -> Arc<PoolStatus> {
        self.shared.status.load_full()
    }

    /// The model, once a worker was ready.
    pub fn model(&self) -> Option<ModelInfo> {
        self.shared.status.load().model.clone()
    }

    /// Waits until a worker is ready; false when `deadline` passes before.
    pub async fn ready(&self, deadline: Duration) -> bool {
        let began = std::time::Instant::now();
        while !self.status().is_ready() {
            if began.elapsed() >= deadline {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        true
    }

    /// Steers a worker by its name.
    ///
    /// # Errors
    /// [`SteerError`]; nothing has been done.
    pub async fn steer(&self, worker: &str, steer: Steer) -> Result<(), SteerError> {
        let (done, answer) = oneshot::channel();
        let asked = Control::Steer { worker: worker.to_owned(), steer, done };
        let asking = async {
            self.shared.control.send(asked).await.map_err(|_| SteerError::Closed)?;
            answer.await.map_err(|_| SteerError::Closed)?
        };
        tokio::time::timeout(STEER_TIMEOUT, asking).await.unwrap_or(Err(SteerError::Closed))
    }

    /// Bounds or pauses the planner of replicas, until the config changes or the process ends.
    ///
    /// # Errors
    /// [`ReplicaError`]; nothing has changed.
    pub async fn replicas(&self, order: ReplicaOrder) -> Result<(), ReplicaError> {
        self.ask(|done| Control::Replicas { order, done }).await.unwrap_or(Err(ReplicaError::Closed))
    }

    /// Leaves the number of workers to somebody else, as when another process or pool takes them over.
    pub fn settle(&self) {
        self.shared.settled.store(true, Ordering::Relaxed);
    }

    /// The last decisions of the router, newest first.
    ///
    /// # Errors
    /// [`SteerError::Closed`] when the pool does not answer.
    pub async fn decisions(&self, count: usize) -> Result<Vec<Decision>, SteerError> {
        self.ask(|done| Control::Decisions { count, done }).await
    }

    /// What would be decided now about a prompt of these tokens, under a salt of its block hashes; nothing happens.
    ///
    /// # Errors
    /// [`SteerError::Closed`] when the pool does not answer.
    pub async fn explain(&self, tokens: Arc<[u32]>, salt: Arc<[u8]>) -> Result<Decision, SteerError> {
        let view = Box::new(penstock_router::View { tokens, salt, sequences: 1, ..Default::default() });
        self.ask(|done| Control::Explain { view, done }).await
    }

    async fn ask<T>(&self, order: impl FnOnce(oneshot::Sender<T>) -> Control) -> Result<T, SteerError> {
        let (done, answer) = oneshot::channel();
        let asking = async {
            self.shared.control.send(order(done)).await.map_err(|_| SteerError::Closed)?;
            answer.await.map_err(|_| SteerError::Closed)
        };
        tokio::time::timeout(STEER_TIMEOUT, asking).await.unwrap_or(Err(SteerError::Closed))
    }

    /// Moves a request ([`Ticket::id`]) to the worker of that name while it runs. Returns when it has moved.
    ///
    /// # Errors
    /// [`MoveError`]; the request goes on where it is.
    pub async fn migrate(&self, request: u64, worker: &str) -> Result<(), MoveError> {
        let (done, answer) = oneshot::channel();
        let asked = Control::Move { request, worker: worker.to_owned(), done };
        self.shared.control.send(asked).await.map_err(|_| MoveError::Closed)?;
        // The actor ends every migration in time.
        answer.await.unwrap_or(Err(MoveError::Closed))
    }

    /// Takes nothing new, lets open requests finish for at most `deadline`, then leaves the workers as told. Returns when done.
    pub async fn shutdown(&self, leave: Leave, deadline: Duration) {
        self.shared.draining.store(true, Ordering::Relaxed);
        self.settle();
        let (done, ended) = oneshot::channel();
        if self.shared.control.send(Control::Shutdown { leave, deadline, done }).await.is_ok() {
            // Err when the actor ended first, which is what was wanted.
            let _ = ended.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::watch;
    use std::cell::Cell;

    #[tokio::test]
    async fn a_panic_of_the_actor_is_not_silent() {
        let called = Cell::new(false);
        watch(tokio::spawn(async { panic!("as a test") }), || called.set(true)).await;
        assert!(called.take());
        watch(tokio::spawn(async {}), || called.set(true)).await;
        assert!(!called.take(), "an end is no fault");
    }
}
