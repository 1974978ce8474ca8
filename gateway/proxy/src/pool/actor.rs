//! The one task that owns a pool: members, router, requests. Everything comes to it as a message, so the way of a token takes
//! no lock but that of its own ticket, and there is one order of events.
//!
//! A request is in one of two places: it waits in the router's queue, or it is bound to one member. When a member's session is
//! lost, its requests go back to the queue, ahead of all others, with what they have emitted.

pub(super) mod migrate;
mod roles;
pub(super) mod steer;

use super::config::{PoolConfig, PoolConfigError};
use super::decision::Decision;
use super::job::{Gap, PoolEvent};
use super::member::{Doubt, Member, Session};
use super::recorder::{BYTES_MAX as RECORD_BYTES_MAX, Recorder};
use super::session::{Event, Keeper, Link, Loss};
use super::status::{Counts, ModelInfo, PoolStatus};
use super::supervisor::{Order, Supervisor, Update};
use super::ticket::{Mailbox, Post, Slot};
use super::truth::{Accepted, Truth};
use super::{Control, Leave};
use arc_swap::ArcSwap;
use penstock_proto::codec::FRAME_BYTES_MAX;
use penstock_proto::frames::{Cancel, DownBody, Drain, Output, Ready, Step};
use penstock_proto::{BLOCK_TOKENS, ErrorKind};
use penstock_router::{Choice, Fleet, Member as RouterMember, Record, Refusal, Reject, View, WorkerId};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use steer::Steering;
use tokio::sync::{mpsc, oneshot};
use tracing::{info, warn};

/// Events of all sessions that may wait for the actor; a session that finds it full waits, and so does its worker.
const EVENTS_MAX: usize = 1024;

/// How often deadlines and silences are looked at, and the snapshot is renewed.
const TICK: Duration = Duration::from_millis(200);

/// A worker that is told to exit shows within this time that it drains: twice its heartbeat, and some.
const DRAIN_NOTICE: Duration = Duration::from_millis(1500);

/// Where a request is.
enum Place {
    /// In the router's queue, since then.
    Waiting(Instant),
    /// At a member.
    Bound(WorkerId),
}

struct Live {
    truth: Truth,
    slot: Arc<Slot>,
    place: Place,
    /// It was bound before and lost its worker.
    interrupted: bool,
    /// When it was bound, and the time to its first token as predicted then; until that comes.
    bound_at: Option<(Instant, Duration)>,
    /// What will be written down of it.
    record: Option<Box<Record>>,
    /// When its last tokens came.
    spoke: Option<Instant>,
    /// When it was moved, or was not after all.
    moved: Option<Instant>,
    /// It changed its worker and has said nothing since: why, and when it spoke last.
    gap: Option<(Gap, Instant)>,
}

struct Ending {
    leave: Leave,
    deadline: Instant,
    done: oneshot::Sender<()>,
}

/// See the module header.
pub(super) struct Actor {
    config: Arc<PoolConfig>,
    mailbox: Arc<Mailbox>,
    status: Arc<ArcSwap<PoolStatus>>,
    control: mpsc::Receiver<Control>,
    events: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
    gateway: u64,
    began: Instant,
    members: Vec<Member>,
    supervisors: HashMap<WorkerId, mpsc::Sender<Order>>,
    router: Fleet,
    requests: HashMap<u64, Live>,
    model: Option<ModelInfo>,
    /// Since when no member takes requests; `None` while one does.
    nobody_since: Option<Instant>,
    counts: Counts,
    recorder: Option<Recorder>,
    ending: Option<Ending>,
    roles: roles::Roles,
    last_tick: Instant,
    moves: migrate::Moves,
}

impl Actor {
    pub(super) fn new(
        config: Arc<PoolConfig>,
        mailbox: Arc<Mailbox>,
        status: Arc<ArcSwap<PoolStatus>>,
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
        let router =
            Fleet::new(config.weights, config.limits).with_policy(config.policy).seeded(u64::from_le_bytes(id));
        let planned = &config.roles;
        let roles = roles::Roles::new(planned.follow, planned.limits, members.len(), planned.prefill_workers, now);
        let actor = Self {
            config,
            mailbox,
            status,
            control,
            events,
            sender,
            gateway: u64::from_le_bytes(id),
            began: now,
            members,
            supervisors: HashMap::new(),
            router,
            requests: HashMap::new(),
            model: None,
            nobody_since: Some(now),
            counts: Counts::default(),
            recorder,
            ending: None,
            roles,
            last_tick: now,
            moves: migrate::Moves::default(),
        };
        actor.publish(now);
        Ok(actor)
    }

    /// Runs until the handle is gone or a shutdown is complete.
    pub(super) async fn run(mut self, handle: tokio::runtime::Handle) {
        let tasks = self.start_members(&handle);
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mailbox = Arc::clone(&self.mailbox);
        let mut batch = Vec::new();
        loop {
            // In this order: what workers said counts before their silence does.
            tokio::select! {
                biased;
                _ = self.events.recv_many(&mut batch, 64) => batch.drain(..).for_each(|event| self.event(event)),
                () = mailbox.notify.notified() => self.posts(),
                order = self.control.recv() => match order {
                    // Err: whoever asked has gone.
                    Some(Control::Steer { worker, steer, done }) => _ = done.send(self.steer(&worker, steer)),
                    Some(Control::Decisions { count, done }) => _ = done.send(self.decisions(count)),
                    Some(Control::Explain { view, done }) => {
                        let now = self.began.elapsed();
                        _ = done.send(Decision::new(&self.router.explain(*view, now), &self.members, now));
                    }
                    Some(Control::Move { request, worker, done }) => self.order_move(request, &worker, done),
                    Some(Control::Shutdown { leave, deadline, done }) => {
                        let deadline = Instant::now() + deadline;
                        self.ending = Some(Ending { leave, deadline, done });
                    }
                    None => break,
                },
                _ = ticks.tick() => self.tick(),
            }
            self.dispatch();
            if self.ending.as_ref().is_some_and(|end| self.requests.is_empty() || Instant::now() >= end.deadline) {
                self.end().await;
                break;
            }
        }
        self.fail_all(ErrorKind::Draining, "the gateway is shutting down");
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }

    fn start_members(&mut self, handle: &tokio::runtime::Handle) -> Vec<tokio::task::JoinHandle<()>> {
        let mut tasks = Vec::new();
        for (at, member) in (0_u8..).zip(&self.members) {
            let worker = WorkerId(at);
            let keeper = Keeper {
                worker,
                address: member.address.clone(),
                key: self.config.key.clone(),
                gateway: self.gateway,
                events: self.sender.clone(),
            };
            tasks.push(handle.spawn(keeper.run()));
            if let (Some(local), Some(_)) = (&self.config.local, &member.process) {
                let (orders, inbox) = mpsc::channel(4);
                let supervisor =
                    Supervisor::new(worker, usize::from(at), &member.name, local.clone(), self.sender.clone(), inbox);
                self.supervisors.insert(worker, orders);
                tasks.push(handle.spawn(supervisor.run()));
            }
        }
        tasks
    }

    fn member(&mut self, worker: WorkerId) -> &mut Member {
        &mut self.members[usize::from(worker.0)]
    }

    // ---- what workers say ----

    fn event(&mut self, event: Event) {
        let now = Instant::now();
        match event {
            Event::Loading { worker, loading } => {
                let member = self.member(worker);
                member.heard = now;
                member.session = Session::Loading(loading);
            }
            Event::Ready { worker, ready, link } => self.ready(worker, ready, link, now),
            Event::Step { worker, session, step } => {
                let is_current = self.member(worker).link.as_ref().is_some_and(|link| link.session == session);
                if is_current {
                    self.step(worker, step, now);
                }
            }
            Event::Pulled { worker, session, pulled } => self.pulled(worker, session, &pulled),
            Event::Lost { worker, session, loss, why } => self.lost(worker, session, loss, &why),
            Event::Process { worker, update } => self.process(worker, update, now),
        }
    }

    fn ready(&mut self, worker: WorkerId, ready: Box<Ready>, link: Link, now: Instant) {
        if let Err(why) = self.suits(&ready) {
            let member = self.member(worker);
            if member.unsuited != Some(why) {
                warn!(worker = %member.name, why, "worker does not suit the pool");
            }
            member.unsuited = Some(why);
            link.close.notify_one();
            return;
        }
        let context_tokens = ready.context_tokens;
        let model = self.model.get_or_insert_with(|| ModelInfo {
            model: ready.model.clone(),
            tokenizer_hash: ready.tokenizer_hash.clone(),
            model_hash: ready.model_hash.clone(),
            vocab_size: ready.vocab_size,
            context_tokens,
        });
        model.context_tokens = model.context_tokens.min(context_tokens);
        let state = ready.state.clone().unwrap_or_default();
        let told = RouterMember {
            numerics_id: ready.numerics_id.as_str().into(),
            blocks_total: ready.blocks_total,
            sequences_max: ready.sequences_max,
            state,
            device: ready.device.as_str().into(),
            block_bytes: if ready.transfer.is_empty() { 0 } else { ready.block_bytes },
        };
        self.router.join(worker, told, &ready.kv);
        info!(worker = %self.members[usize::from(worker.0)].name, pid = ready.pid, device = %ready.device, "worker ready");
        self.member(worker).begin(ready, link, now);
        self.steer_ready(worker);
        self.tell_role(worker);
        self.note_nobody(now);
        self.publish(now);
    }

    /// Whether a worker can serve this pool.
    fn suits(&self, ready: &Ready) -> Result<(), &'static str> {
        if ready.block_tokens as usize != BLOCK_TOKENS {
            return Err("its block size is another");
        }
        if self.config.tokenizer_hash.as_ref().is_some_and(|hash| *hash != ready.tokenizer_hash) {
            return Err("its tokenizer is not the gateway's");
        }
        if self
            .model
            .as_ref()
            .is_some_and(|model| model.tokenizer_hash != ready.tokenizer_hash || model.model_hash != ready.model_hash)
        {
            return Err("it serves another model than the rest of the pool");
        }
        Ok(())
    }

    fn step(&mut self, worker: WorkerId, step: Step, now: Instant) {
        let member = self.member(worker);
        member.heard = now;
        member.say(step.state.as_ref());
        self.router.update(worker, step.state.as_ref(), &step.kv, step.accepted);
        if let Some(batch) = &step.batch {
            self.router.observe(worker, batch);
            self.roles.observe(worker, batch);
        }
        let ahead = self.router.prefill_ahead(worker);
        let member = &mut self.members[usize::from(worker.0)];
        member.steps += u64::from(step.batch.is_some());
        if member.session == Session::Suspected && member.doubt_now(&self.config, ahead, now) == Doubt::None {
            member.session = Session::Ready;
            let is_free = member.steering == Steering::Free;
            self.router.suspend(worker, !is_free);
        }
        for output in step.outputs {
            if let Err(why) = self.output(worker, output) {
                self.give_up(worker, why);
                return;
            }
        }
    }

    /// One output: to its ticket, if it is news. An error is the worker's breach of the contract.
    fn output(&mut self, worker: WorkerId, output: Output) -> Result<(), &'static str> {
        let (request, choice) = (output.request, output.choice);
        let numerics_id = Arc::clone(&self.member(worker).numerics_id);
        let Some(live) = self.requests.get_mut(&request) else { return Ok(()) };
        if !matches!(live.place, Place::Bound(at) if at == worker) {
            self.counts.tokens_dropped += output.tokens.len() as u64;
            return Ok(());
        }
        let ended = output.finish.is_some();
        match live.truth.accept(output, &numerics_id).map_err(|violation| violation.0)? {
            Accepted::Nothing { dropped } => self.counts.tokens_dropped += dropped as u64,
            Accepted::Deliver(output) => {
                self.counts.tokens += output.tokens.len() as u64;
                self.counts.cached_tokens_told += u64::from(output.cached_tokens.unwrap_or(0));
                let tokens = output.tokens.len() as u64;
                if let Some((bound_at, predicted)) = live.bound_at.take() {
                    self.counts.first_token(bound_at.elapsed(), predicted);
                    live.record.iter_mut().for_each(|record| record.ttft_ms = bound_at.elapsed().as_secs_f64() * 1e3);
                }
                live.record.iter_mut().for_each(|record| record.output_length += tokens as u32);
                if tokens > 0 {
                    let now = Instant::now();
                    if let Some((why, since)) = live.gap.take() {
                        live.slot.leave(PoolEvent::Gap { why, time: now.saturating_duration_since(since) });
                    }
                    live.spoke = Some(now);
                }
                live.slot.push(PoolEvent::Output(output));
                self.router.settle(request);
                self.router.emitted(request, tokens);
            }
            Accepted::Elsewhere => {
                tracing::debug!(request, choice, "worker passes the request on");
                self.send(worker, DownBody::Cancel(Cancel { request, choices: Vec::new() }));
                self.member(worker).bound.remove(&request);
                self.interrupt(request, None);
                return Ok(());
            }
        }
        if ended && self.requests.get(&request).is_some_and(|live| live.truth.open() == 0) {
            self.counts.finished += 1;
            self.forget(request);
        }
        Ok(())
    }

    fn lost(&mut self, worker: WorkerId, session: u64, loss: Loss, why: &str) {
        let now = Instant::now();
        let member = self.member(worker);
        if member.link.as_ref().is_some_and(|link| link.session != session) {
            return;
        }
        let was_ready = member.link.take().is_some();
        let orderly = member.state.draining;
        let died = (was_ready && loss == Loss::Ended && !orderly)
            .then(|| member.ready.as_ref().map_or(0, |ready| ready.epoch));
        member.session = Session::Absent { why: why.into() };
        member.state.credits = 0;
        let bound: Vec<u64> = member.bound.drain().collect();
        if was_ready {
            member.deaths += u64::from(died.is_some());
            warn!(worker = %member.name, interrupted = bound.len(), why, ?loss, "worker lost");
        }
        self.router.leave(worker);
        bound.into_iter().for_each(|request| self.interrupt(request, died));
        self.note_nobody(now);
        if was_ready {
            self.publish(now);
        }
    }

    fn process(&mut self, worker: WorkerId, update: Update, now: Instant) {
        let Some(process) = &mut self.member(worker).process else { return };
        match update {
            Update::Running { adopted } => {
                process.is_running = true;
                process.adopted = adopted;
                process.starts += u64::from(!adopted);
                process.down = None;
                self.member(worker).heard = now;
            }
            Update::Down { retry_in, why } => {
                process.is_running = false;
                process.down = Some((now + retry_in, why));
            }
        }
        self.publish(now);
    }

    // ---- what handlers say ----

    fn posts(&mut self) {
        for post in self.mailbox.take() {
            match post {
                Post::Submit(job, slot) => self.submit(*job, slot),
                Post::Notes(slot) => self.notes(&slot),
            }
        }
    }

    fn submit(&mut self, job: super::Job, slot: Arc<Slot>) {
        let id = slot.id;
        self.counts.submitted += 1;
        let truth = Truth::new(job, self.config.window_tokens);
        let place = Place::Waiting(Instant::now());
        let live = Live {
            truth,
            slot,
            place,
            interrupted: false,
            bound_at: None,
            record: None,
            spoke: None,
            moved: None,
            gap: None,
        };
        self.requests.insert(id, live);
        self.wait(id);
    }

    fn notes(&mut self, slot: &Slot) {
        let request = slot.id;
        let notes = slot.take_notes();
        let Some(live) = self.requests.get_mut(&request) else { return };
        let at = if let Place::Bound(worker) = live.place { Some(worker) } else { None };
        if notes.dropped {
            self.counts.cancelled += 1;
            self.cancel(request, at);
            return;
        }
        let closed: Vec<u32> = notes.cancelled.into_iter().filter(|choice| live.truth.close(*choice)).collect();
        let windows: Vec<_> =
            notes.taken.into_iter().filter_map(|(choice, tokens)| live.truth.grant(request, choice, tokens)).collect();
        if live.truth.open() == 0 {
            self.counts.finished += 1;
            self.cancel(request, at);
            return;
        }
        let Some(worker) = at else { return };
        windows.into_iter().for_each(|window| self.send(worker, DownBody::Window(window)));
        if !closed.is_empty() {
            self.send(worker, DownBody::Cancel(Cancel { request, choices: closed }));
        }
    }

    /// Ends a request from this side, wherever it is.
    fn cancel(&mut self, request: u64, at: Option<WorkerId>) {
        if let Some(worker) = at {
            self.send(worker, DownBody::Cancel(Cancel { request, choices: Vec::new() }));
        }
        self.forget(request);
    }

    // ---- requests between queue and worker ----

    /// Puts a request into the router's queue.
    fn wait(&mut self, request: u64) {
        let Some(live) = self.requests.get(&request) else { return };
        let view = self.view(live);
        let now = self.began.elapsed();
        if let Err(reject) = self.router.enqueue(request, view, now) {
            self.refuse(request, reject);
        }
    }

    /// A request as the router sees it.
    fn view(&self, live: &Live) -> View {
        let truth = &live.truth;
        View {
            tokens: truth.tokens(),
            salt: Arc::clone(&truth.job.salt),
            priority: truth.job.priority,
            sequences: truth.open(),
            numerics_id: truth.numerics_id.clone(),
            resumed: live.interrupted,
            tenant: Arc::clone(&truth.job.tenant),
            weight: truth.job.weight,
            session: None,
            deadline: truth.job.deadline.map(|deadline| deadline.saturating_duration_since(self.began)),
        }
    }

    /// Tells a client that its request is not served.
    fn refuse(&mut self, request: u64, reject: Reject) {
        let (kind, message, retry_after) = match reject.refusal {
            Refusal::Full => (ErrorKind::Overloaded, "too many requests are waiting", Some(reject.retry_after)),
            Refusal::Late => {
                (ErrorKind::Overloaded, "an answer would come too late: too much is waiting", Some(reject.retry_after))
            }
            Refusal::Deadline => (ErrorKind::DeadlineExceeded, "the request took too long", None),
        };
        self.fail(request, kind, message, retry_after);
    }

    /// Binds what can be bound.
    fn dispatch(&mut self) {
        loop {
            let began = Instant::now();
            let next = self.router.next(self.began.elapsed());
            self.counts.decisions += 1;
            self.counts.decision_ns += began.elapsed().as_nanos() as u64;
            let (request, worker, cached_tokens, exact, gives_way, from, ttft) = match next {
                Choice::Bind { request, worker, cached_tokens, exact, gives_way, pull_from, prefill, ttft } => {
                    (request, worker, cached_tokens, exact, gives_way, (pull_from, prefill), ttft)
                }
                Choice::Refuse { request, reject } => {
                    self.refuse(request, reject);
                    continue;
                }
                Choice::Hold => return,
            };
            let Some(live) = self.requests.get_mut(&request) else { continue };
            let (mut generate, windows) = live.truth.generate(request);
            let at = |worker: Option<WorkerId>| {
                worker.map_or_else(String::new, |worker| self.members[usize::from(worker.0)].transfer_address())
            };
            generate.priority = generate.priority.saturating_mul(2).saturating_add(i32::from(gives_way));
            (generate.pull_from, generate.prefill_at) = (at(from.0), at(from.1));
            self.counts.prefilled_apart += u64::from(!generate.prefill_at.is_empty());
            let frame = DownBody::Generate(generate);
            if frame.encoded_len() > FRAME_BYTES_MAX {
                self.router.unsent(request);
                self.fail(request, ErrorKind::TooLarge, "prompt and output are too long to be sent to a worker", None);
                continue;
            }
            let waited = match live.place {
                Place::Waiting(since) => since.elapsed(),
                Place::Bound(_) => Duration::ZERO,
            };
            live.place = Place::Bound(worker);
            let now = self.began.elapsed();
            let asked = self.config.explain && live.truth.job.explain;
            let made = self.router.decisions().next_back().filter(|made| asked && made.request == request);
            let route = made.map(|made| Decision::new(made, &self.members, now).line().into());
            live.bound_at = Some((Instant::now(), ttft));
            if self.recorder.is_some() && !live.interrupted {
                live.record = self.router.record(request).map(Box::new);
            }
            live.slot.leave(PoolEvent::Bound {
                worker: self.members[usize::from(worker.0)].name.clone(),
                waited,
                route,
            });
            if live.interrupted {
                let exact = exact || !live.truth.has_begun();
                live.slot.push(PoolEvent::Resumed { exact });
                self.counts.resumed += 1;
                self.counts.resumed_inexact += u64::from(!exact);
            }
            self.counts.cached_tokens_predicted += u64::from(cached_tokens);
            self.member(worker).bound.insert(request);
            self.send(worker, frame);
            windows.into_iter().for_each(|window| self.send(worker, DownBody::Window(window)));
        }
    }

    /// The last decisions, newest first.
    fn decisions(&self, count: usize) -> Vec<Decision> {
        let now = self.began.elapsed();
        self.router.decisions().rev().take(count).map(|made| Decision::new(made, &self.members, now)).collect()
    }

    /// A request lost its worker: it waits again, or fails when that is the second worker that died of it.
    fn interrupt(&mut self, request: u64, died: Option<u64>) {
        let Some(live) = self.requests.get_mut(&request) else { return };
        live.place = Place::Waiting(Instant::now());
        live.interrupted = true;
        live.gap = live.gap.or_else(|| live.spoke.map(|since| (Gap::Lost, since)));
        self.end_move(request);
        let Some(live) = self.requests.get_mut(&request) else { return };
        if live.truth.lose(died) {
            self.router.remove(request);
            self.wait(request);
        } else if live.truth.is_suspect() {
            self.fail(request, ErrorKind::WorkerFailed, "two workers died while they ran this request", None);
        } else {
            self.fail(request, ErrorKind::WorkerFailed, "the request was interrupted too often", None);
        }
    }

    fn fail(&mut self, request: u64, kind: ErrorKind, message: &str, retry_after: Option<Duration>) {
        if let Some(live) = self.requests.get(&request) {
            self.counts.failed += 1;
            live.slot.push(PoolEvent::Failed { kind, message: message.into(), retry_after });
            self.forget(request);
        }
    }

    fn fail_all(&mut self, kind: ErrorKind, message: &str) {
        let all: Vec<u64> = self.requests.keys().copied().collect();
        all.into_iter().for_each(|request| self.fail(request, kind, message, None));
    }

    fn forget(&mut self, request: u64) {
        self.router.remove(request);
        self.end_move(request);
        let Some(live) = self.requests.remove(&request) else { return };
        if let (Some(recorder), Some(record)) = (&mut self.recorder, live.record) {
            recorder.write(*record, &live.truth.job.tenant);
        }
        if let Place::Bound(worker) = live.place {
            self.member(worker).bound.remove(&request);
        }
        live.slot.end();
    }

    fn send(&mut self, worker: WorkerId, body: DownBody) {
        let member = self.member(worker);
        if let Some(link) = &member.link
            && !link.send(body)
        {
            // A worker that reads nothing while thousands of frames wait is not alive; its requests move when it is lost.
            link.close.notify_one();
        }
    }

    fn give_up(&mut self, worker: WorkerId, why: &str) {
        let member = self.member(worker);
        warn!(worker = %member.name, why, "worker given up");
        if let Some(link) = &member.link {
            link.close.notify_one();
            let session = link.session;
            self.lost(worker, session, Loss::GivenUp, why);
        }
    }

    // ---- time ----

    fn tick(&mut self) {
        let now = Instant::now();
        // What this process did not have of the time was not silence: the machine is busy, or slept, and workers wait for it too.
        let late = now.saturating_duration_since(self.last_tick).saturating_sub(TICK);
        self.last_tick = now;
        self.members.iter_mut().for_each(|member| member.heard = (member.heard + late).min(now));
        self.doubts(now);
        self.steer_tick(now);
        self.roles_tick(now);
        self.move_tick(now);
        self.note_nobody(now);
        self.deadlines(now);
        self.publish(now);
    }

    fn doubts(&mut self, now: Instant) {
        let config = Arc::clone(&self.config);
        for worker in (0..self.members.len()).map(|at| WorkerId(at as u8)) {
            let others = (0..).zip(&self.members).any(|(at, member)| at != worker.0 && member.takes_requests());
            let ahead = self.router.prefill_ahead(worker);
            let member = self.member(worker);
            let silence = now.saturating_duration_since(member.heard);
            let doubt = member.doubt_now(&config, ahead, now);
            if doubt == Doubt::GiveUp || doubt == Doubt::Suspect && others && member.link.is_some() {
                self.give_up(worker, "no sign of life for too long, or a step that does not end");
            } else if doubt == Doubt::Suspect && member.session == Session::Ready {
                warn!(worker = %member.name, silence_ms = silence.as_millis() as u64, "worker suspected");
                member.session = Session::Suspected;
                self.router.suspend(worker, true);
            }
            let is_running = self.member(worker).process.as_ref().is_some_and(|process| process.is_running);
            if is_running && silence > config.kill_after {
                self.member(worker).heard = now;
                self.order(worker, Order::Kill);
            }
        }
    }

    fn order(&mut self, worker: WorkerId, order: Order) {
        // Full means that it has orders to end already.
        let _ = self.supervisors.get(&worker).map(|orders| orders.try_send(order));
    }

    fn note_nobody(&mut self, now: Instant) {
        let serves =
            |member: &Member| member.link.is_some() && !member.state.draining && member.steering == Steering::Free;
        if self.members.iter().any(serves) {
            self.nobody_since = None;
        } else if self.nobody_since.is_none() {
            self.nobody_since = Some(now);
        }
    }

    fn deadlines(&mut self, now: Instant) {
        let config = Arc::clone(&self.config);
        let alone = self.nobody_since.is_some();
        let late = |live: &Live| -> Option<(ErrorKind, &'static str, Option<Duration>)> {
            if live.truth.job.deadline.is_some_and(|deadline| now >= deadline) {
                return Some((ErrorKind::DeadlineExceeded, "the request took too long", None));
            }
            let Place::Waiting(since) = live.place else { return None };
            let waited = now.saturating_duration_since(since);
            if alone && live.interrupted && waited > config.resume_deadline {
                let message = "the worker was lost and no other could continue the request in time";
                return Some((ErrorKind::WorkerFailed, message, None));
            }
            if alone && !live.interrupted && waited > config.unavailable_after {
                return Some((ErrorKind::Unavailable, "no worker is ready", Some(Duration::from_secs(5))));
            }
            (waited > config.wait_max).then_some((
                ErrorKind::Overloaded,
                "no worker was free in time",
                Some(Duration::from_secs(10)),
            ))
        };
        let late: Vec<_> = self.requests.iter().filter_map(|(id, live)| late(live).map(|why| (*id, why))).collect();
        for (request, (kind, message, retry_after)) in late {
            if let Some(Place::Bound(worker)) = self.requests.get(&request).map(|live| &live.place) {
                self.send(*worker, DownBody::Cancel(Cancel { request, choices: Vec::new() }));
            }
            self.fail(request, kind, message, retry_after);
        }
    }

    fn publish(&self, now: Instant) {
        self.status.store(Arc::new(PoolStatus {
            workers: self.members.iter().map(|member| member.status(now)).collect(),
            model: self.model.clone(),
            open: self.requests.len(),
            waiting: self.router.waiting(),
            ttft_predicted: self.router.predicted_ttft(0),
            blocks_indexed: self.router.index_sizes().0,
            counts: self.counts,
            role_advice: self.roles.advice.clone(),
        }));
    }

    /// The last act: workers exit or stay, as told.
    async fn end(&mut self) {
        let Some(ending) = self.ending.take() else { return };
        self.fail_all(ErrorKind::Draining, "the gateway is shutting down");
        if ending.leave == Leave::Exit {
            self.end_workers().await;
        }
        // Err when the caller stopped waiting.
        let _ = ending.done.send(());
    }

    /// Asks the local workers to exit and waits for them. One that another gateway holds too does not: it stays, for that one.
    async fn end_workers(&mut self) {
        let mut orders: Vec<(WorkerId, mpsc::Sender<Order>)> = self.supervisors.drain().collect();
        for (worker, _) in &orders {
            self.send(*worker, DownBody::Drain(Drain { exit: true }));
        }
        let until = tokio::time::Instant::now() + DRAIN_NOTICE;
        let refuses = |member: &Member| member.link.is_some() && !member.state.draining;
        while orders.iter().any(|(worker, _)| refuses(&self.members[usize::from(worker.0)])) {
            match tokio::time::timeout_at(until, self.events.recv()).await {
                Ok(Some(event)) => self.event(event),
                _ => break,
            }
        }
        let mut ends = Vec::new();
        for (worker, orders) in orders.drain(..) {
            let member = self.member(worker);
            if refuses(member) {
                info!(worker = %member.name, "worker stays: another gateway holds it");
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
