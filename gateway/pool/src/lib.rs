//! A pool: the workers of one model, as the request path sees them. [`Pool::submit`] takes a [`Job`] and returns a
//! [`Ticket`], which yields the request's [`PoolEvent`]s.
//!
//! The handle works from any runtime. Sessions, supervision and the state of every request live on one fleet runtime
//! ([`FleetRuntime`], a thread of its own), which outlives Pingora's services.
//!
//! - `job.rs`, `ticket.rs`, `status.rs`: the interface to the request path
//! - `actor.rs`: one task that owns all parts, routes events between them and performs the effects; no locks on a token's way
//! - `truth.rs`, `request.rs`, `requests.rs`: the tokens that a request has emitted, from which it can go on at any worker; its way
//!   between workers; all of them with their counters (pure)
//! - `member.rs`, `members.rs`: one worker as the actor sees it, and the table of all
//! - `placement.rs`: the router with its clock, the frames of a binding, the log of decisions
//! - `moves.rs`: live migration; `moves/targets.rs`: which request moves where
//! - `silence.rs`, `steering.rs`, `holds.rs`, `seats.rs`: workers that do not answer, that an operator holds, that start and leave
//! - `roles.rs`, `replicas.rs`, `demand.rs`, `shares.rs`: what the workers are to be, how many, when, and with how much of the machine
//! - `patience.rs`, `failure.rs`: how long requests wait, and what their clients are told
//! - `served_model.rs`, `adapters.rs`: the one model of the pool's workers, and what its own workers hold beside it
//! - `session.rs`: one connection to one worker
//! - `supervisor.rs`, `lease.rs`, `epitaph.rs`, `processes.rs`: local worker processes: start, adoption, restart, cause of an end
//! - `copies.rs`: memory of packed weights that local workers share; `weights_cache.rs`: files of them for the next start
//! - `scaler.rs`: the operator's hook that starts and stops remote worker processes
#![forbid(unsafe_code)]

mod actor;
mod adapters;
mod config;
mod copies;
mod decision;
mod demand;
mod epitaph;
mod failure;
mod holds;
mod job;
mod lease;
mod member;
mod members;
mod moves;
mod patience;
mod placement;
mod processes;
mod recorder;
mod replicas;
mod request;
mod requests;
mod roles;
pub mod scaler;
mod seats;
mod served_model;
mod session;
mod shares;
mod silence;
mod status;
mod steering;
mod steps;
mod sums;
mod supervisor;
mod ticket;
mod troubles;
mod truth;
pub mod weights_cache;

pub use adapters::AdapterSource;
pub use config::{Follow, GpuLeavers, LocalWorkers, OnDemand, PoolConfig, PoolConfigError, ReplicaConfig, RoleConfig};
pub use copies::{Copies, SharedWeights};
pub use decision::{Decision, Offer};
pub use holds::Holds;
pub use job::{CHOICES_MAX, Gap, Guided, Job, PROMPT_TOKENS_MAX, PoolError, PoolEvent, needs};
pub use lease::{check_state_dir, check_state_dir_of_service};
pub use moves::{Cause as MoveCause, MoveError};
pub use penstock_router::Needs;
pub use status::{
    AdapterPlace, AdapterState, Counts, LoadedAdapter, ModelInfo, PoolStatus, ReplicaStatus, WorkerPhase, WorkerStatus,
};
pub use steps::DecodeSteps;
pub use sums::{GuideSums, Sums, TierSums, TransferSums};
pub use ticket::Ticket;
pub use troubles::Trouble;

use arc_swap::ArcSwap;
use penstock_proto::frames::Role;
use penstock_proto::{AdapterId, RequestId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use ticket::{Mailbox, Post, Slot};
use tokio::sync::{mpsc, oneshot};

/// Runtime, on a thread of its own, on which all sessions and actors live.
pub struct FleetRuntime {
    handle: tokio::runtime::Handle,
    _stop: oneshot::Sender<()>,
}

impl FleetRuntime {
    /// Starts the thread `penstock-fleet`. The thread ends when this value is dropped.
    ///
    /// # Errors
    /// The operating system gives no thread or no epoll.
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

    /// Handle for tasks that are to run on the fleet's thread.
    pub fn handle(&self) -> &tokio::runtime::Handle {
        &self.handle
    }
}

/// Fate of the local workers when the gateway ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// The workers finish their requests and exit.
    Exit,
    /// The workers stay and wait for the next gateway, until their `orphan_ttl` is over.
    Adopt,
}

/// An operator's order to one worker, given through [`Pool::steer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steer {
    /// The worker gets nothing new; its requests move to workers that can take over their blocks, or finish where they are.
    Hold,
    /// The hold on the worker ends: new requests may be bound to it again.
    Release,
    /// The worker finishes its requests, exits, and is started again; after `patience` it is killed, and requests still
    /// open go on elsewhere or at its next life.
    Restart {
        /// Time for the worker's requests to finish or move before the process is killed.
        patience: Duration,
    },
    /// The worker takes on this role from now on: prefill, decode or mixed.
    Role(Role),
}

/// Reason that an order to a worker is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SteerError {
    /// The pool has no worker of that name.
    #[error("there is no worker of that name")]
    NotFound,
    /// The worker's process does not belong to this gateway.
    #[error("the worker was not started by this gateway: restart the worker where it was started")]
    Elsewhere,
    /// An earlier order to restart the worker is still being carried out.
    #[error("the worker is being restarted")]
    Restarting,
    /// The worker is stopped or stopping, because the load needs fewer.
    #[error("the worker is stopped or stopping: the load needs fewer workers")]
    Stopped,
    /// The pool has ended, or does not answer.
    #[error("the pool does not answer")]
    Closed,
}

/// An operator's order to the planner of replicas; fields that are `None` keep their value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaOrder {
    /// New lower bound of the number of workers.
    pub min: Option<usize>,
    /// New upper bound of the number of workers.
    pub max: Option<usize>,
    /// Whether the planner is to stop changing the number of workers.
    pub paused: Option<bool>,
}

/// Reason that an order to the planner of replicas changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplicaError {
    /// The number of the pool's workers is fixed: no planner runs that could be ordered.
    #[error("the number of the pool's workers is fixed: replicas in its config lets it follow the load")]
    Fixed,
    /// The bounds contradict each other, or `max` exceeds the workers configured (the field).
    #[error(
        "the number of workers must be from 1 to {0}: the config has no addresses or shares of the machine for more"
    )]
    Bounds(usize),
    /// The pool has ended, or does not answer.
    #[error("the pool does not answer")]
    Closed,
}

/// Orders from the pool's handle to its actor; the answer goes back through `done`.
pub(crate) enum Control {
    /// Gives an order to the worker of that name.
    Steer { worker: String, steer: Steer, done: oneshot::Sender<Result<(), SteerError>> },
    /// Bounds or pauses the planner of replicas.
    Replicas { order: ReplicaOrder, done: oneshot::Sender<Result<(), ReplicaError>> },
    /// Asks for the router's last `count` decisions, newest first.
    Decisions { count: usize, done: oneshot::Sender<Vec<Decision>> },
    /// Asks for the decision that would be made about a prompt now.
    Explain { view: Box<penstock_router::View>, done: oneshot::Sender<Decision> },
    /// Moves a request to the worker of that name while it runs.
    Move { request: RequestId, worker: String, done: oneshot::Sender<Result<(), MoveError>> },
    /// Restarts workers whose share of the machine is not the one they would get now, one after another.
    Arrange,
    /// Takes nothing new, lets open requests finish until the deadline, then leaves.
    Shutdown { leave: Leave, deadline: Duration, done: oneshot::Sender<()> },
}

/// Time for the actor's answer to an order; without one the pool counts as closed.
const STEER_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for the first load of a model on demand: some hundred gigabytes from a disk.
const LOAD_MAX: Duration = Duration::from_secs(600);

/// Retry-After of a request whose model could not be loaded.
const LOAD_AGAIN: Duration = Duration::from_secs(5);

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
    /// Set once somebody else, another process or pool, decides on the number of workers.
    settled: Arc<AtomicBool>,
    adapters: Arc<adapters::Lists>,
    config: Arc<PoolConfig>,
}

/// Handle of a running pool for the request path; cheap to clone, usable from any runtime.
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
        let adapters = Arc::new(adapters::Lists::new(config.adapters.clone()));
        let shown = (Arc::clone(&status), Arc::clone(&settled), Arc::clone(&adapters));
        let actor = actor::Actor::new(Arc::clone(&config), Arc::clone(&mailbox), shown, orders)?;
        let handle = runtime.handle.clone();
        let task = runtime.handle.spawn(async move { actor.run(handle).await });
        // Without its actor a pool would take requests and never answer. Local workers outlive the process: the next one adopts them.
        runtime.handle.spawn(watch(task, || std::process::exit(EXIT_SOFTWARE)));
        let (ids, draining) = (AtomicU64::new(0), AtomicBool::new(false));
        Ok(Self { shared: Arc::new(Shared { mailbox, status, control, ids, draining, settled, adapters, config }) })
    }

    /// Hands a request to the pool, without waiting. Its events, errors included, come out of the ticket.
    ///
    /// # Errors
    /// [`PoolError`] when the request is not taken: nothing has been done for it. Checked here: the job's bounds,
    /// draining, `requests_max`, and whether any worker can be ready in time.
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
        let id = RequestId(shared.ids.fetch_add(1, Ordering::Relaxed) + 1);
        let slot = Arc::new(Slot::new(id, shared.config.window_tokens));
        let ticket = Ticket::new(Arc::clone(&slot), Arc::clone(&shared.mailbox));
        shared.mailbox.post(Post::Submit(Box::new(job), slot));
        Ok(ticket)
    }

    /// Number of local workers that a pool of the config `other` would have to start beside this pool's.
    pub fn lacks(&self, other: &PoolConfig) -> usize {
        let files = |config: &PoolConfig| {
            let name = |at| format!("{}-{at}", config.id);
            let local = config.local.iter();
            local.flat_map(|local| (0..local.count).map(move |at| local.file(&name(at), "sock"))).collect::<Vec<_>>()
        };
        let own = files(&self.shared.config);
        files(other).iter().filter(|file| !own.contains(file)).count()
    }

    /// Ends the time after a handover in which another process may hold the local workers. Workers that were adopted
    /// with another share of the machine than they would get now are restarted, one after another, while others serve
    /// or while no request is open.
    pub async fn arrange(&self) {
        // Err: the pool has ended.
        let _ = self.shared.control.send(Control::Arrange).await;
    }

    /// Returns true if both handles belong to one running pool.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Snapshot of the pool, at most 200 ms old.
    pub fn status(&self) -> Arc<PoolStatus> {
        self.shared.status.load_full()
    }

    /// Name, hashes and context length of the pool's model; `None` until a worker was ready.
    pub fn model(&self) -> Option<ModelInfo> {
        self.shared.status.load().model.clone()
    }

    /// Model of a pool whose workers run on demand: before the first load it is not known, so this starts them and waits, at most
    /// ten minutes. A pool whose workers run all the time is not waited for. Dropping the future ends the interest in the model.
    ///
    /// # Errors
    /// [`PoolError`] when too many wait already, the pool ends, or its workers end while they load.
    pub async fn wake(&self) -> Result<ModelInfo, PoolError> {
        let shared = &*self.shared;
        let unavailable = |why| PoolError::Unavailable { retry_after: LOAD_AGAIN, why };
        if let Some(model) = self.model() {
            return Ok(model);
        }
        if shared.config.on_demand.is_none() {
            return Err(unavailable(None));
        }
        let waking = Waking::new(&shared.mailbox);
        if waking.before >= shared.config.requests_max {
            let (open, limit) = (waking.before, shared.config.requests_max);
            return Err(PoolError::Overloaded { open, limit, retry_after: LOAD_AGAIN });
        }
        let began = std::time::Instant::now();
        loop {
            let status = self.status();
            if let Some(model) = &status.model {
                return Ok(model.clone());
            }
            if shared.draining.load(Ordering::Relaxed) {
                return Err(PoolError::Draining);
            }
            let (why, waited) = (status.last_end(), began.elapsed());
            // A worker that has ended is started again: it gets the time that requests give to any worker.
            if waited >= LOAD_MAX || why.is_some() && waited >= shared.config.unavailable_after {
                return Err(unavailable(why));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Workers that an operator holds.
    pub fn holds(&self) -> &Holds {
        &self.shared.config.holds
    }

    /// Returns true if the pool's workers are started by the first request.
    pub fn is_on_demand(&self) -> bool {
        self.shared.config.on_demand.is_some()
    }

    /// Returns true if a ready worker has every one of these abilities; while no worker is ready, if one had them before.
    pub fn meets(&self, needs: &Needs) -> bool {
        self.shared.status.load().any_able(needs)
    }

    /// Content of the adapter `name` that a new request runs with: the one that most ready workers announce; while no worker is
    /// ready, that most had before. `None`: no worker has an adapter of that name.
    pub fn adapter(&self, name: &str) -> Option<AdapterId> {
        self.shared.status.load().adapter(name)
    }

    /// Sets the adapters of the pool's config. Its own workers load and unload them while they run; an adapter that cannot be loaded is shown in
    /// the status. Workers that this gateway has not started are told nothing.
    pub fn adapt(&self, adapters: Vec<AdapterSource>) {
        self.shared.adapters.want(adapters);
        self.shared.mailbox.notify.notify_one();
    }

    /// Adapters of the pool's config.
    pub fn adapters(&self) -> Arc<Vec<AdapterSource>> {
        self.shared.adapters.wanted()
    }

    /// State of an adapter of the config at the pool's workers. Until the actor has applied a changed list, no worker counts as having the adapter.
    pub fn adapter_place(&self, name: &str) -> AdapterPlace {
        let status = self.shared.status.load();
        let is_told = self.shared.config.local.is_some();
        let place = status.adapter_place(name, is_told);
        match Arc::ptr_eq(&status.adapters, &self.adapters()) {
            true => place,
            false => AdapterPlace { ready: 0, failures: Vec::new(), is_told: true, ..place },
        }
    }

    /// Returns true if a change of adapters needs no restart of workers: all ready workers of this gateway take adapter orders.
    pub fn takes_adapters(&self) -> bool {
        let status = self.shared.status.load();
        let mut ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready);
        self.shared.config.local.is_none() || ready.all(|worker| worker.adapter_orders)
    }

    /// Returns true if requests are taken, or would be if an operator did not hold all workers.
    pub fn is_up(&self) -> bool {
        let status = self.status();
        let mut expected = status.workers.iter().filter(|worker| worker.phase != WorkerPhase::Stopped).peekable();
        let is_held = |worker: &WorkerStatus| worker.phase == WorkerPhase::Draining && self.holds().has(&worker.name);
        status.takes_requests() || expected.peek().is_some() && expected.all(is_held)
    }

    /// Waits until the pool is up: until a worker is ready, or need not be before a request comes, or an operator holds them all. False when `deadline`
    /// passes before.
    pub async fn ready(&self, deadline: Duration) -> bool {
        let began = std::time::Instant::now();
        while !self.is_up() {
            if began.elapsed() >= deadline {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        true
    }

    /// Gives an order to the worker of that name.
    ///
    /// # Errors
    /// [`SteerError`]; the order has no effect.
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

    /// Returns true if the number of workers, and what adapters they hold, is left to another process or pool.
    pub fn is_settled(&self) -> bool {
        self.shared.settled.load(Ordering::Relaxed)
    }

    /// Leaves the number of workers, and what adapters they hold, for good to another process or pool, which takes the workers over.
    pub fn settle(&self) {
        self.shared.adapters.settle();
        self.shared.settled.store(true, Ordering::Relaxed);
    }

    /// The last `count` decisions of the router, newest first.
    ///
    /// # Errors
    /// [`SteerError::Closed`] when the pool does not answer.
    pub async fn decisions(&self, count: usize) -> Result<Vec<Decision>, SteerError> {
        self.ask(|done| Control::Decisions { count, done }).await
    }

    /// Explains the router's choice for a prompt of these tokens, under a salt of its block hashes and with this adapter if any;
    /// nothing is bound.
    ///
    /// # Errors
    /// [`SteerError::Closed`] when the pool does not answer.
    pub async fn explain(
        &self,
        tokens: Arc<[u32]>,
        salt: Arc<[u8]>,
        adapter: Option<AdapterId>,
    ) -> Result<Decision, SteerError> {
        let needs = Needs { adapter, ..Needs::default() };
        let view = Box::new(penstock_router::View { tokens, salt, sequences: 1, needs, ..Default::default() });
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

    /// Moves a running request ([`Ticket::id`]) to the worker of that name. Returns once it has moved.
    ///
    /// # Errors
    /// [`MoveError`]; the request goes on where it is.
    pub async fn migrate(&self, request: RequestId, worker: &str) -> Result<(), MoveError> {
        let (done, answer) = oneshot::channel();
        let asked = Control::Move { request, worker: worker.to_owned(), done };
        self.shared.control.send(asked).await.map_err(|_| MoveError::Closed)?;
        // The actor ends every migration in time, so no timeout is needed here.
        answer.await.unwrap_or(Err(MoveError::Closed))
    }

    /// Shuts down: takes nothing new, lets open requests finish for at most `deadline`, then leaves the workers as told.
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

/// Interest of a call in a model that is not loaded; ends when dropped.
struct Waking<'a> {
    mailbox: &'a Mailbox,
    /// Number of calls that waited before this one.
    before: usize,
}

impl<'a> Waking<'a> {
    fn new(mailbox: &'a Mailbox) -> Self {
        let before = mailbox.waking.fetch_add(1, Ordering::Relaxed);
        mailbox.notify.notify_one();
        Self { mailbox, before }
    }
}

impl Drop for Waking<'_> {
    fn drop(&mut self) {
        self.mailbox.waking.fetch_sub(1, Ordering::Relaxed);
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
