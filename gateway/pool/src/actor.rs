//! The single task that owns a pool: members, router, requests. All input arrives as messages, so events have one
//! order, and a token takes no lock on its way but that of its own ticket.
//!
//! A request is in one of two places: waiting in the router's queue, or bound to one member. When a member's session is
//! lost, its requests return to the queue ahead of all others, with the tokens they have emitted.
//!
//! Decisions are those of the parts, each a state machine in a file of its own beside this one: `members.rs`, `requests.rs`,
//! `placement.rs`, `moves.rs`, `roles.rs`, `replicas.rs`, `demand.rs`, `shares.rs`, `silence.rs`, `served_model.rs`, `adapters.rs`. The actor routes
//! events between them and performs the effects: frames, orders to supervisors, calls of the hook, the log. Its files are named by
//! what the effects follow from.

mod adapters;
mod moves;
mod planners;
mod publication;
mod requests;
mod shutdown;
mod steer;
mod watch;

use super::Control;
use super::adapters::{Adapters, Lists};
use super::config::{PoolConfig, PoolConfigError};
use super::demand::Demand;
use super::failure::Failure;
use super::member::{Member, Seat};
use super::members::Members;
use super::moves::Moves;
use super::placement::Placement;
use super::processes::Processes;
use super::recorder::{BYTES_MAX as RECORD_BYTES_MAX, Recorder};
use super::replicas::Replicas;
use super::requests::Requests;
use super::roles::Roles;
use super::served_model::ServedModel;
use super::session::{Event, Keeper};
use super::shares::Shares;
use super::silence::Silence;
use super::status::PoolStatus;
use super::steering::Steering;
use super::supervisor::Supervisor;
use super::ticket::Mailbox;
use arc_swap::ArcSwap;
use penstock_proto::{ErrorKind, GatewayId};
use penstock_router::load::Watch;
use shutdown::Ending;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::info;

/// Capacity of the actor's event channel, over all sessions. A session that finds it full waits, and so does its worker (backpressure).
const EVENTS_MAX: usize = 1024;

/// Interval of the actor's tick: deadlines and silences are checked, planners run, and the status snapshot is renewed.
const TICK: Duration = Duration::from_millis(200);

/// Queues that the actor reads, and the end of the events' queue that sessions, supervisors and hooks write to.
struct Inputs {
    mailbox: Arc<Mailbox>,
    control: mpsc::Receiver<Control>,
    events: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
}

/// State of the pool's actor, which alone owns router, members and requests; see the module header.
pub(super) struct Actor {
    config: Arc<PoolConfig>,
    inputs: Inputs,
    /// Random id of this gateway process, told to workers.
    gateway: GatewayId,
    status: Arc<ArcSwap<PoolStatus>>,
    members: Members,
    processes: Processes,
    placement: Placement,
    requests: Requests,
    model: ServedModel,
    adapters: Adapters,
    lists: Arc<Lists>,
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
        (status, settled, lists): (Arc<ArcSwap<PoolStatus>>, Arc<AtomicBool>, Arc<Lists>),
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
        let adapters = Adapters::new(Arc::clone(&lists));
        let replicas = Replicas::new(&config, settled, now);
        let mut members = Members::new(members, now);
        replicas.seat(&mut members, &config);
        for member in members.iter_mut().filter(|member| config.holds.has(&member.name)) {
            info!(pool = %config.id, worker = %member.name, "worker stays drained, as an operator has told the pool or the process before");
            member.steering = Steering::Held;
        }
        let watch = Watch::new(members.len());
        let window = config.window_tokens;
        let model = ServedModel::new(config.tokenizer_hash.clone());
        let shares = Shares::new(config.calm_after);
        let demand = Demand::new(config.on_demand, now);
        let actor = Self {
            config,
            inputs: Inputs { mailbox, control, events, sender },
            gateway: GatewayId(u64::from_le_bytes(id)),
            status,
            members,
            processes: Processes::default(),
            placement,
            requests: Requests::new(window),
            model,
            adapters,
            lists,
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
        let mailbox = Arc::clone(&self.inputs.mailbox);
        let mut batch = Vec::new();
        loop {
            // Biased, in this order: frames of a worker are handled before the tick judges its silence.
            tokio::select! {
                biased;
                _ = self.inputs.events.recv_many(&mut batch, 64) => batch.drain(..).for_each(|event| self.event(event)),
                () = mailbox.notify.notified() => self.posts(),
                order = self.inputs.control.recv() => match order {
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
            self.adapters_change();
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
                silence_max: self.config.give_up_after,
                events: self.inputs.sender.clone(),
            };
            tasks.push(handle.spawn(keeper.run()));
            if let (Some(local), Some(_)) = (&self.config.local, &member.process) {
                let (orders, inbox) = mpsc::channel(4);
                let mut supervisor = Supervisor::new(
                    worker,
                    usize::from(worker.0),
                    &member.name,
                    (local.clone(), Arc::clone(&self.lists)),
                    self.inputs.sender.clone(),
                    inbox,
                );
                supervisor.starts = member.seat == Seat::On;
                self.processes.insert(worker, orders);
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
            Event::Adapters { worker, session, report } => self.adapted(worker, session, report, now),
            Event::Notice { worker, session, notice } => self.noticed(worker, session, notice),
            Event::Gpu { worker, session, gpu } => {
                let member = &mut self.members[worker];
                if member.link.as_ref().is_some_and(|link| link.session == session) {
                    member.gpu = Some(gpu);
                }
            }
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
        self.adapters_tick(now);
        self.planners_tick(now);
        self.seats_tick(now);
        self.shares_tick(now);
        self.move_tick(now);
        self.note_nobody(now);
        self.deadlines(now);
        self.publish(now);
    }
}
