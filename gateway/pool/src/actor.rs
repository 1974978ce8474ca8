//! The single task that owns a pool: members, router, requests. All input arrives as messages, so events have one
//! order, and a token takes no lock on its way but that of its own ticket.
//!
//! A request is in one of two places: waiting in the router's queue, or bound to one member. When a member's session is
//! lost, its requests return to the queue ahead of all others, with the tokens they have emitted.

mod moves;
mod planners;
mod requests;
mod steer;
mod watch;

use super::config::{PoolConfig, PoolConfigError};
use super::demand::Demand;
use super::failure::Failure;
use super::member::{Member, Seat};
use super::members::Members;
use super::moves::Moves;
use super::patience::Patience;
use super::placement::Placement;
use super::recorder::{BYTES_MAX as RECORD_BYTES_MAX, Recorder};
use super::replicas::Replicas;
use super::requests::Requests;
use super::roles::Roles;
use super::served_model::ServedModel;
use super::session::{Event, Keeper};
use super::shares::Shares;
use super::silence::Silence;
use super::status::{Counts, PoolStatus};
use super::steering::DRAIN_NOTICE;
use super::supervisor::{Order, Supervisor};
use super::ticket::Mailbox;
use super::{Control, Leave};
use arc_swap::ArcSwap;
use penstock_proto::ErrorKind;
use penstock_proto::frames::{DownBody, Drain};
use penstock_router::WorkerId;
use penstock_router::load::Watch;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tracing::info;

/// Capacity of the actor's event channel, over all sessions. A session that finds it full waits, and so does its worker (backpressure).
const EVENTS_MAX: usize = 1024;

/// Interval of the actor's tick: deadlines and silences are checked, planners run, and the status snapshot is renewed.
const TICK: Duration = Duration::from_millis(200);

struct Ending {
    leave: Leave,
    deadline: Instant,
    done: oneshot::Sender<()>,
}

/// State of the pool's actor, which alone owns router, members and requests; see the module header.
pub(super) struct Actor {
    config: Arc<PoolConfig>,
    mailbox: Arc<Mailbox>,
    status: Arc<ArcSwap<PoolStatus>>,
    control: mpsc::Receiver<Control>,
    events: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
    gateway: u64,
    members: Members,
    supervisors: HashMap<WorkerId, mpsc::Sender<Order>>,
    placement: Placement,
    requests: Requests,
    model: ServedModel,
    ending: Option<Ending>,
    /// Load of each worker over a time window, as the planners of roles and replicas read it.
    watch: Watch,
    roles: Roles,
    replicas: Replicas,
    shares: Shares,
    demand: Demand,
    silence: Silence,
    moves: Moves,
}

impl Actor {
    pub(super) fn new(
        config: Arc<PoolConfig>,
        mailbox: Arc<Mailbox>,
        (status, settled): (Arc<ArcSwap<PoolStatus>>, Arc<AtomicBool>),
        control: mpsc::Receiver<Control>,
    ) -> Result<Self, PoolConfigError> {
        let now = Instant::now();
        let mut members = Vec::new();
        if let Some(local) = &config.local {
            local.prepare_state_dir()?;
            for at in 0..local.count {
                let name = format!("{}-{at}", config.id);
                members.push(Member::new(name.clone(), local.socket(&name)?, true, now));
            }
        }
        let connect = config.connect.iter();
        members.extend(connect.map(|address| Member::new(address.to_string(), address.clone(), false, now)));
        let mut id = [0; 8];
        getrandom::fill(&mut id).map_err(|error| PoolConfigError::Random(error.to_string()))?;
        let recorder = config.record.as_ref().map(|path| {
            let failed = |source| PoolConfigError::Record { path: path.clone(), source };
            Recorder::start(path, RECORD_BYTES_MAX).map_err(failed)
        });
        let recorder = recorder.transpose()?;
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let placement = Placement::new(&config, u64::from_le_bytes(id), recorder, now);
        let planned = &config.roles;
        let roles = Roles::new(planned.follow, planned.limits, members.len(), planned.prefill_workers);
        let replicas = Replicas::new(&config, settled, now);
        let mut members = Members::new(members, now);
        replicas.seat(&mut members, &config);
        let watch = Watch::new(members.len());
        let window = config.window_tokens;
        let model = ServedModel::new(config.tokenizer_hash.clone());
        let shares = Shares::new(config.calm_after);
        let demand = Demand::new(config.on_demand, now);
        let actor = Self {
            config,
            mailbox,
            status,
            control,
            events,
            sender,
            gateway: u64::from_le_bytes(id),
            members,
            supervisors: HashMap::new(),
            placement,
            requests: Requests::new(window),
            model,
            ending: None,
            watch,
            roles,
            replicas,
            shares,
            demand,
            silence: Silence::new(TICK, now),
            moves: Moves::default(),
        };
        actor.publish(now);
        Ok(actor)
    }

    /// Runs the actor until every handle is gone or a shutdown is complete, then ends the pool as told.
    pub(super) async fn run(mut self, handle: tokio::runtime::Handle) {
        let tasks = self.start_members(&handle);
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mailbox = Arc::clone(&self.mailbox);
        let mut batch = Vec::new();
        loop {
            // Biased, in this order: frames of a worker are handled before the tick judges its silence.
            tokio::select! {
                biased;
                _ = self.events.recv_many(&mut batch, 64) => batch.drain(..).for_each(|event| self.event(event)),
                () = mailbox.notify.notified() => self.posts(),
                order = self.control.recv() => match order {
                    // Err: whoever asked has gone.
                    Some(Control::Steer { worker, steer, done }) => _ = done.send(self.steer(&worker, steer)),
                    Some(Control::Replicas { order, done }) => _ = done.send(self.order_replicas(order)),
                    Some(Control::Decisions { count, done }) => {
                        _ = done.send(self.placement.decisions(count, &self.members, Instant::now()));
                    }
                    Some(Control::Explain { view, done }) => {
                        _ = done.send(self.placement.explain(*view, &self.members, Instant::now()));
                    }
                    Some(Control::Move { request, worker, done }) => self.order_move(request, &worker, done),
                    Some(Control::Arrange) => self.shares.arrange(Instant::now()),
                    Some(Control::Shutdown { leave, deadline, done }) => {
                        let deadline = Instant::now() + deadline;
                        self.ending = Some(Ending { leave, deadline, done });
                    }
                    None => break,
                },
                _ = ticks.tick() => self.tick(),
            }
            self.moves_go_on();
            self.demand(Instant::now());
            self.dispatch();
            if self.ending.as_ref().is_some_and(|end| self.requests.is_empty() || Instant::now() >= end.deadline) {
                self.end().await;
                break;
            }
        }
        self.fail_all(&Failure::new(ErrorKind::Draining, "the gateway is shutting down"));
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }

    fn start_members(&mut self, handle: &tokio::runtime::Handle) -> Vec<tokio::task::JoinHandle<()>> {
        let mut tasks = Vec::new();
        for (worker, member) in self.members.iter() {
            let keeper = Keeper {
                worker,
                address: member.address.clone(),
                key: self.config.key.clone(),
                tls: self.config.tls.clone(),
                gateway: self.gateway,
                events: self.sender.clone(),
            };
            tasks.push(handle.spawn(keeper.run()));
            if let (Some(local), Some(_)) = (&self.config.local, &member.process) {
                let (orders, inbox) = mpsc::channel(4);
                let mut supervisor = Supervisor::new(
                    worker,
                    usize::from(worker.0),
                    &member.name,
                    local.clone(),
                    self.sender.clone(),
                    inbox,
                );
                supervisor.starts = member.seat == Seat::On;
                self.supervisors.insert(worker, orders);
                tasks.push(handle.spawn(supervisor.run()));
            }
        }
        tasks
    }

    fn event(&mut self, event: Event) {
        let now = Instant::now();
        match event {
            Event::Loading { worker, loading } => {
                self.members[worker].loads(loading, now);
            }
            Event::Ready { worker, ready, link } => self.ready(worker, ready, link, now),
            Event::Step { worker, session, step } => {
                let is_current = self.members[worker].link.as_ref().is_some_and(|link| link.session == session);
                if is_current {
                    self.step(worker, step, now);
                }
            }
            Event::Pulled { worker, session, pulled } => self.pulled(worker, session, &pulled),
            Event::Notice { worker, session, notice } => self.noticed(worker, session, notice),
            Event::Lost { worker, session, loss, why } => self.lost(worker, session, loss, &why),
            Event::Process { worker, update } => self.process(worker, update, now),
            Event::Asked { worker, action, outcome } => self.asked(worker, action, outcome, now),
            Event::Counted(outcome) => self.counted(outcome, now),
        }
    }

    fn tick(&mut self) {
        let now = Instant::now();
        self.silence.tick(&mut self.members, now);
        self.doubts(now);
        self.steer_tick(now);
        self.planners_tick(now);
        self.seats_tick(now);
        self.shares_tick(now);
        self.move_tick(now);
        self.note_nobody(now);
        self.deadlines(now);
        self.publish(now);
    }

    fn order(&mut self, worker: WorkerId, order: Order) {
        // A full channel already holds an order that ends the process.
        let _ = self.supervisors.get(&worker).map(|orders| orders.try_send(order));
    }

    fn publish(&self, now: Instant) {
        self.status.store(Arc::new(PoolStatus {
            workers: self.members.iter().map(|(_, member)| member.status(now)).collect(),
            model: self.model.info().cloned(),
            open: self.requests.len(),
            waiting: self.placement.router.waiting(),
            ttft_predicted: self.placement.router.predicted_ttft(0),
            blocks_indexed: self.placement.router.index_sizes().0,
            counts: self.counts(),
            ready_wait: Patience::of(&self.config, &self.members, now).ready,
            role_advice: self.roles.advice.clone(),
            on_demand: self.demand.has_rule(),
            replicas: self.replicas.status(&self.members),
        }));
    }

    /// Counters of the whole pool: those of the requests, and those of decisions, moves and roles.
    fn counts(&self) -> Counts {
        let of_requests = self.requests.counts();
        Counts {
            submitted: of_requests.submitted,
            finished: of_requests.finished,
            cancelled: of_requests.cancelled,
            failed: of_requests.failed,
            resumed: of_requests.resumed,
            resumed_inexact: of_requests.resumed_inexact,
            tokens: of_requests.tokens,
            tokens_dropped: of_requests.tokens_dropped,
            cached_tokens_told: of_requests.cached_tokens_told,
            first_tokens: of_requests.first_tokens,
            ttft_us: of_requests.ttft_us,
            ttft_predicted_us: of_requests.ttft_predicted_us,
            ttft_error_us: of_requests.ttft_error_us,
            role_flips: self.roles.flips,
            moves: self.moves.counts.moved,
            moves_failed: self.moves.counts.failed,
            moved_blocks: self.moves.counts.blocks,
            ..self.placement.counts()
        }
    }

    /// Ends the pool: fails the open requests, then lets local workers exit or stay ([`Leave`]).
    async fn end(&mut self) {
        let Some(ending) = self.ending.take() else { return };
        self.fail_all(&Failure::new(ErrorKind::Draining, "the gateway is shutting down"));
        if ending.leave == Leave::Exit {
            self.end_workers().await;
        }
        // Err when the caller stopped waiting.
        let _ = ending.done.send(());
    }

    /// Asks the local workers to exit and waits for them. A worker that another gateway also holds does not drain and
    /// stays for that gateway.
    async fn end_workers(&mut self) {
        let mut orders: Vec<(WorkerId, mpsc::Sender<Order>)> = self.supervisors.drain().collect();
        for (worker, _) in &orders {
            self.members.send(*worker, DownBody::Drain(Drain { exit: true }));
        }
        let until = tokio::time::Instant::now() + DRAIN_NOTICE;
        let refuses = |member: &Member| member.link.is_some() && !member.state.draining;
        while orders.iter().any(|(worker, _)| refuses(&self.members[*worker])) {
            match tokio::time::timeout_at(until, self.events.recv()).await {
                Ok(Some(event)) => self.event(event),
                _ => break,
            }
        }
        let mut ends = Vec::new();
        for (worker, orders) in orders.drain(..) {
            let member = &mut self.members[worker];
            if refuses(member) {
                info!(worker = %member.name, "worker keeps running: another gateway is connected");
                continue;
            }
            let told = member.state.draining;
            let (ended, wait) = oneshot::channel();
            if orders.send(Order::End { told, ended }).await.is_ok() {
                ends.push(wait);
            }
        }
        for end in ends {
            // Err: the supervisor is gone, and so is its worker.
            let _ = end.await;
        }
    }
}
