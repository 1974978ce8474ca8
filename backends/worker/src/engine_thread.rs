//! The engine's thread: commands in, steps out. The thread owns the engine, so there is no lock.
//!
//! Each gateway numbers its requests on its own; inside the engine they get numbers of this process, and outputs are
//! translated back. After every step each session gets one frame: its own outputs, and the state and KV events that
//! all of them need.

mod adapters;
mod transfers;

use self::transfers::{Arrival, Incoming};
use crate::config::{Build, ReadyInfo, TierOptions, WorkerError};
use crate::credits::{WAITING_TTL, divided};
use crate::gpu::{self, Watch};
use crate::grammars::{Admitted, Compiler, Compiling, Done, Later};
use crate::inbox::{Command, StepAge};
use crate::session::Phase;
use crate::shelf::{Read, Shelf};
use crate::tiers::{Ahead, Released, Tell, Tiers};
use crate::transfer::{About, Peers};
use crate::troubles::Troubles;
use crate::turns::Turns;
use crate::{Ended, chain};
use penstock_engine::Engine;
use penstock_kernels::host::CopyUse;
use penstock_proto::frames::{
    Cancel, EngineState, Generate, GpuState, Notice, NoticeKind, Output, Prefetch, Ready, Step, UpBody, Window,
};
use penstock_proto::parts::{split_ready, split_step};
use penstock_proto::transfer::Fetch;
use penstock_proto::{
    BLOCK_TOKENS, Capabilities, Capability, Epoch, ErrorKind, GatewayId, PROTOCOL_VERSION, RequestId, SessionId, WorkId,
};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{info, warn};

/// Steps in which the device failed, after which the process ends: a new process may succeed.
const FAULTS_MAX: u64 = 3;

/// Longest time to store cached blocks before the process ends; blocks left then must be computed again.
const KEEP_MAX: Duration = Duration::from_secs(8);

/// Cap of a prefetch's predicted wait, in seconds: everything is loaded in that time.
const AHEAD_MAX: f64 = 3600.0;

/// Connections of the thread to the rest of the process, beside its inbox.
pub(crate) struct Wiring {
    pub(crate) tiers: TierOptions,
    /// Sender of the inbox; weak, so that it does not keep the inbox open.
    pub(crate) commands: mpsc::WeakSender<Command>,
    /// Transfers to and from the pool's other workers.
    pub(crate) peers: Arc<Peers>,
    /// Runtime on which the tasks of KV transfers run.
    pub(crate) runtime: tokio::runtime::Handle,
}

impl Wiring {
    /// Callback that tells the inbox of compiled grammars.
    fn compiled(&self) -> Done {
        let commands = self.commands.clone();
        Box::new(move |id| {
            commands.upgrade().is_some_and(|commands| commands.blocking_send(Command::Compiled { id }).is_ok())
        })
    }

    /// Callback that forwards a tier's outcomes to the inbox.
    fn tell(&self) -> Tell {
        let commands = self.commands.clone();
        Arc::new(move |outcome| {
            commands.upgrade().is_some_and(|commands| commands.blocking_send(Command::Tier(outcome)).is_ok())
        })
    }
}

/// Handle of a running engine thread, with the age of its step.
pub(crate) struct EngineThread {
    handle: JoinHandle<Result<(), WorkerError>>,
    age: StepAge,
}

impl EngineThread {
    /// Starts the thread, which first builds the engine. The second value resolves when the thread ends.
    pub(crate) fn start(
        build: Build,
        phase: watch::Sender<Phase>,
        inbox: mpsc::Receiver<Command>,
        wiring: Wiring,
    ) -> Result<(Self, Ended), WorkerError> {
        let age = StepAge::new();
        let (guard, ended) = oneshot::channel::<()>();
        let worker_age = age.clone();
        wiring.peers.watch(age.clone());
        let handle = std::thread::Builder::new()
            .name("penstock-engine".into())
            .spawn(move || {
                // Dropped when the thread ends, also by a panic.
                let _guard = guard;
                live(build, &phase, inbox, &worker_age, &wiring)
            })
            .map_err(|source| WorkerError::Os { what: "starting the engine's thread".into(), source })?;
        Ok((Self { handle, age }, ended))
    }

    /// Age of the thread's current step.
    pub(crate) fn step_age(&self) -> StepAge {
        self.age.clone()
    }

    /// Result of a thread that has ended.
    pub(crate) fn join(self) -> Result<(), WorkerError> {
        self.handle.join().unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Err(WorkerError::Panicked(text.to_string()))
        })
    }
}

fn live(
    build: Build,
    phase: &watch::Sender<Phase>,
    inbox: mpsc::Receiver<Command>,
    age: &StepAge,
    wiring: &Wiring,
) -> Result<(), WorkerError> {
    let began = Instant::now();
    // Without a receiver the process is ending; loading continues to its end, and then the inbox is closed too.
    let built = build(&mut |loading| drop(phase.send_replace(Phase::Loading(loading))));
    let built = built.and_then(|(mut engine, info)| {
        let tiers = Tiers::open(&wiring.tiers, &mut engine, &info, &wiring.tell())?;
        let compiler = engine.grammars().map(|grammars| Compiler::start(Arc::clone(grammars), wiring.compiled()));
        Ok((engine, info, tiers, compiler.transpose()?))
    });
    match built {
        Ok((engine, info, tiers, compiler)) => {
            let load = began.elapsed();
            info!(model = info.model, device = info.device, load_ms = load.as_millis() as u64, "model loaded");
            let (block_bytes, page_bytes) = (engine.block_bytes(), engine.page_bytes());
            let (numerics_id, grammars) = (info.numerics_id.clone(), engine.grammars().map(Arc::clone));
            wiring.peers.open(About { numerics_id, block_bytes, page_bytes, grammars });
            phase.send_replace(Phase::Ready);
            let clock = Instant::now();
            let mut info = info;
            let watch = info.gpu.take().and_then(|gpu| gpu::watch(gpu, wiring.commands.clone()));
            Desk {
                engine,
                _watch: watch,
                gpu: None,
                shelf: info.shelf.take(),
                read: wiring.read(),
                info,
                load,
                tiers,
                compiler,
                sessions: BTreeMap::new(),
                rounds: 0,
                engine_ids: HashMap::new(),
                entries: HashMap::new(),
                turns: Turns::default(),
                next: WorkId::default(),
                steps: 0,
                step_seconds: 0.0,
                exit: false,
                is_draining: false,
                is_untold: false,
                peers: Arc::clone(&wiring.peers),
                runtime: wiring.runtime.clone(),
                incoming: HashMap::new(),
                arrivals: VecDeque::new(),
                troubles: Troubles::default(),
            }
            .work(inbox, age, clock)
        }
        Err(error) => {
            phase.send_replace(Phase::Failed(chain(&error)));
            Err(error)
        }
    }
}

struct SessionView {
    gateway: GatewayId,
    frames: mpsc::Sender<UpBody>,
    accepted: u64,
    /// Number of requests that wait at the gateway, and the time of that report.
    waiting: Option<(u32, Instant)>,
}

/// Origin of work that runs in the engine under a number of this process.
struct Entry {
    session: SessionId,
    request: RequestId,
    open: usize,
}

struct Desk {
    engine: Engine,
    /// Thread that reads the figures of the GPU; it ends with this value.
    _watch: Option<Watch>,
    /// Last figures of the GPU.
    gpu: Option<GpuState>,
    /// Adapters that a gateway may order; `None`: those of the start stay.
    shelf: Option<Shelf>,
    read: Read,
    info: ReadyInfo,
    /// Time from the start of the process until it could serve.
    load: Duration,
    tiers: Option<Tiers>,
    /// Thread that compiles grammars; `None` if the model has no vocabulary for them.
    compiler: Option<Compiler>,
    sessions: BTreeMap<SessionId, SessionView>,
    /// Number of state reports so far.
    rounds: u64,
    /// Number in the engine by (session, number of the session).
    engine_ids: HashMap<(SessionId, RequestId), WorkId>,
    entries: HashMap<WorkId, Entry>,
    /// Common order of the requests of several gateways.
    turns: Turns,
    /// Last number given to a request or a transfer.
    next: WorkId,
    steps: u64,
    /// Seconds of the last step that computed something.
    step_seconds: f64,
    exit: bool,
    is_draining: bool,
    /// True if a change waits to be reported; an idle engine makes no step that would carry it.
    is_untold: bool,
    peers: Arc<Peers>,
    /// Runtime on which the tasks of KV transfers run.
    runtime: tokio::runtime::Handle,
    /// Work that waits for blocks from other workers, by its number.
    incoming: HashMap<WorkId, Incoming>,
    /// Pages that came and were not taken; their number is bounded by the room that transfers share.
    arrivals: VecDeque<Arrival>,
    troubles: Troubles,
}

impl Desk {
    /// Runs steps while there is work, and waits while there is none.
    fn work(mut self, mut inbox: mpsc::Receiver<Command>, age: &StepAge, origin: Instant) -> Result<(), WorkerError> {
        loop {
            while let Ok(command) = inbox.try_recv() {
                self.obey(command);
            }
            self.adapters_go_on();
            let moved = self.move_pages();
            if self.engine.has_work() {
                age.begin();
                let step = self.engine.step(&|| origin.elapsed());
                age.end();
                self.step_seconds = step.batch.map_or(self.step_seconds, |batch| batch.seconds);
                self.publish(step);
                self.is_untold = false;
                if self.engine.is_broken() {
                    return Err(WorkerError::Broken);
                }
                let faults = self.engine.faults();
                if faults >= FAULTS_MAX {
                    let last = self.engine.last_fault().to_owned();
                    return Err(WorkerError::Faults { faults, last });
                }
            } else if moved || !self.arrivals.is_empty() {
                // More pages may have come in the meantime.
            } else if std::mem::take(&mut self.is_untold) {
                self.report();
            } else if self.exit && self.engine.is_empty() && !self.waits() {
                self.keep(&mut inbox);
                return Ok(());
            } else if self.shelf.as_ref().is_some_and(Shelf::is_loading) {
                // The next layer follows at once: no step waits.
            } else {
                match inbox.blocking_recv() {
                    Some(command) => self.obey(command),
                    None => return Ok(()),
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Attach { session, gateway, epoch, frames } => self.attach((session, gateway), epoch, frames),
            Command::Detach { session } => self.detach(session),
            Command::Generate { session, generate } => self.generate(session, *generate),
            Command::Cancel { session, mut cancel } => {
                let request = RequestId(cancel.request);
                self.end_ahead(session, request);
                if let Some(id) = self.engine_ids.get(&(session, request)) {
                    cancel.request = id.0;
                    self.cancel(cancel);
                }
            }
            Command::Window { session, mut window } => {
                if let Some(id) = self.engine_ids.get(&(session, RequestId(window.request))) {
                    window.request = id.0;
                    self.window(window);
                }
            }
            Command::SetRole { role } => {
                info!(?role, "worker takes a role");
                self.engine.set_role(role);
                self.tell_state();
            }
            Command::Pull { session, pull } => self.pull(session, pull),
            Command::Prefetch { session, prefetch } => self.prefetch(session, prefetch),
            Command::Adapters { session, order } => self.order_adapters(session, order),
            Command::Opened { wanted, opened } => self.opened(wanted, opened),
            Command::Page(page) => self.arrivals.push_back(Arrival::Page(page)),
            Command::First { id, first } => self.first(id, first),
            Command::Received { id, report } => self.arrivals.push_back(Arrival::End(id, report)),
            Command::Send { hashes, sink, taken } => self.send_blocks(&hashes, sink, taken),
            Command::Prefill { prefill, gateway, sink, taken } => self.prefill(*prefill, gateway, sink, taken),
            Command::Stop { id } => {
                self.engine.stop(id);
                self.is_untold = true;
            }
            Command::Nudge => {}
            Command::Drain { exit } => {
                self.exit |= exit;
                self.is_draining = true;
                // Requests that wait for blocks were accepted before the drain.
                self.submit_all(|tiers, _| tiers.take_all());
                self.engine.drain();
                self.tell_state();
            }
            Command::Compiled { id } => self.compiled(id),
            Command::Gpu(state) => self.tell_gpu(*state),
            Command::Tier(outcome) => {
                self.submit_all(|tiers, engine| tiers.outcome(outcome, engine));
                self.tell_changes();
                if !self.engine.has_work() {
                    self.tell_tiers();
                }
            }
            Command::Tick => {
                self.submit_all(Tiers::advance);
                self.tell_changes();
            }
        }
    }

    /// Returns true if requests wait for blocks, or for their grammar.
    fn waits(&self) -> bool {
        let compiles = self.compiler.as_ref().is_some_and(|compiler| compiler.waiting_choices() > 0);
        compiles || !self.incoming.is_empty() || self.tiers.as_ref().is_some_and(Tiers::is_waiting)
    }

    /// Submits a request, after its grammar was compiled.
    fn compile(&mut self, generate: Generate) {
        let Some(compiler) = &mut self.compiler else { return self.submit(generate) };
        match compiler.admit(generate) {
            Admitted::Known(generate) => self.submit(*generate),
            Admitted::Waits => self.is_untold = true,
            Admitted::Refused(outputs) => {
                let step = self.engine.report();
                self.publish(Step { outputs, ..step });
            }
        }
    }

    /// Goes on with the requests whose grammar is known now. They were accepted before: a drain that began meanwhile
    /// concerns later ones.
    fn compiled(&mut self, job: WorkId) {
        let waited = self.compiler.as_mut().map_or_else(Vec::new, |compiler| compiler.compiled(job));
        for Compiling { generate, later } in waited {
            if self.is_draining {
                self.engine.go_on(generate);
            } else {
                self.submit(generate);
            }
            later.into_iter().for_each(|command| match command {
                Later::Window(window) => self.window(window),
                Later::Cancel(cancel) => self.cancel(cancel),
            });
            self.is_untold = true;
        }
    }

    /// Extends a window, wherever the request is.
    fn window(&mut self, window: Window) {
        let id = WorkId(window.request);
        if self.compiler.as_mut().is_some_and(|compiler| compiler.keep(id, Later::Window(window))) {
            return;
        }
        let waits = self.postpone(id, Command::Window { session: SessionId::default(), window }).is_none();
        if !waits && !self.tiers.as_mut().is_some_and(|tiers| tiers.window(&window)) {
            self.engine.window(&window);
        }
    }

    /// Starts to load blocks for a request that will come. An invalid hint is ignored: there is no answer to it.
    fn prefetch(&mut self, session: SessionId, prefetch: Prefetch) {
        let Prefetch { request, hashes, wait_seconds } = prefetch;
        let request = RequestId(request);
        let Some(chain) = (Fetch { hashes }).names().filter(|_| !self.is_draining && !self.exit) else { return };
        self.end_ahead(session, request);
        let id = self.next_id();
        // Err: not a number.
        let wait = Duration::try_from_secs_f64(wait_seconds.clamp(0.0, AHEAD_MAX)).unwrap_or_default();
        let ahead = Ahead { id, session, request, chain, wait };
        self.submit_all(|tiers, engine| tiers.ahead(ahead, engine));
    }

    fn end_ahead(&mut self, session: SessionId, request: RequestId) {
        self.tiers.iter_mut().for_each(|tiers| tiers.end_ahead(session, request));
    }

    /// Submits the requests that the tiers release.
    fn submit_all(&mut self, ready: impl FnOnce(&mut Tiers, &mut Engine) -> Vec<Released>) {
        let Some(tiers) = &mut self.tiers else { return };
        for Released { generate, windows } in ready(tiers, &mut self.engine) {
            self.engine.submit(generate);
            windows.iter().for_each(|window| self.engine.window(window));
        }
        self.is_untold |= tiers.take_news();
    }

    /// Cancels a request, whether in the engine or waiting for blocks.
    fn cancel(&mut self, cancel: Cancel) {
        let id = WorkId(cancel.request);
        if let Some(compiler) = &mut self.compiler {
            if !cancel.choices.is_empty() && compiler.keep(id, Later::Cancel(cancel.clone())) {
                return;
            }
            // The engine reports how the request ended; for that it needs no grammar.
            if let Some(Compiling { generate, .. }) = compiler.take(id) {
                self.engine.go_on(Generate { grammar: None, ..generate });
                return self.engine.cancel(&Cancel { request: id.0, choices: Vec::new() });
            }
        }
        let Some(Command::Cancel { cancel, .. }) =
            self.postpone(id, Command::Cancel { session: SessionId::default(), cancel })
        else {
            return;
        };
        // The engine reports how the request ended.
        self.submit_all(|tiers, _| tiers.take(WorkId(cancel.request)).into_iter().collect());
        self.engine.cancel(&cancel);
    }

    /// Submits a request, after its missing blocks were loaded from a tier.
    pub(crate) fn start(&mut self, generate: Generate) {
        if self.tiers.is_none() || self.exit {
            self.engine.submit(generate);
        } else {
            self.submit_all(|tiers, engine| tiers.admit(generate, engine));
        }
    }

    /// Stores cached blocks in tiers that outlive the process, before the thread ends.
    fn keep(&mut self, inbox: &mut mpsc::Receiver<Command>) {
        let Some(tiers) = &mut self.tiers else { return };
        let mut wait = || match inbox.blocking_recv() {
            Some(Command::Tier(outcome)) => ControlFlow::Continue(Some(outcome)),
            // Ticks come all the time and do not count.
            Some(_) => ControlFlow::Continue(None),
            None => ControlFlow::Break(()),
        };
        tiers.keep(&mut self.engine, KEEP_MAX, &mut wait);
    }

    /// State of the engine, completed by the tiers.
    fn state(&self) -> EngineState {
        self.completed(self.engine.state())
    }

    fn completed(&self, mut state: EngineState) -> EngineState {
        if let Some(tiers) = &self.tiers {
            tiers.complete(&mut state);
        }
        let coming = self.compiler.as_ref().map_or(0, Compiler::waiting_choices);
        state.waiting += coming;
        state.credits = state.credits.saturating_sub(coming);
        self.with_transfers(state)
    }

    /// Reports pending changes: an idle engine makes no step that would carry them.
    fn tell_state(&mut self) {
        self.report();
    }

    /// Reports all changes since the last step to all sessions.
    pub(crate) fn report(&mut self) {
        let mut report = self.engine.report();
        report.kv.extend(self.tiers.iter().flat_map(Tiers::take_events));
        report.state = Some(self.state());
        self.tell(&report);
    }

    /// Reports changes in tiers while the engine is idle.
    fn tell_tiers(&mut self) {
        let kv = self.tiers.as_ref().map(Tiers::take_events).unwrap_or_default();
        if !kv.is_empty() {
            self.tell(&Step { number: self.steps, state: Some(self.state()), kv, ..Default::default() });
        }
    }

    /// Reports tiers that were switched off or on.
    fn tell_changes(&mut self) {
        for change in self.tiers.as_ref().map(Tiers::take_changes).unwrap_or_default() {
            let (kind, name) = (NoticeKind::Tier, change.tier.name());
            let notice = match change.off {
                Some(why) => self.troubles.happened(kind, name, &why, Instant::now()),
                None => self.troubles.works(kind, name),
            };
            self.notify(notice);
        }
    }

    /// Sends a notice to all gateways, if there is one.
    pub(crate) fn notify(&mut self, notice: Option<Notice>) {
        notice.into_iter().for_each(|notice| self.announce(&UpBody::Notice(notice)));
    }

    /// Sends the figures of the GPU to all gateways, and keeps them for those to come.
    fn tell_gpu(&mut self, state: GpuState) {
        self.announce(&UpBody::Gpu(state.clone()));
        self.gpu = Some(state);
    }

    /// Sends a frame to all gateways.
    fn announce(&mut self, body: &UpBody) {
        let sessions: Vec<SessionId> = self.sessions.keys().copied().collect();
        sessions.into_iter().for_each(|session| self.answer(session, body.clone()));
    }

    /// Sends a frame to one session.
    pub(crate) fn answer(&mut self, session: SessionId, body: UpBody) {
        let full = self.sessions.get(&session).is_some_and(|view| view.frames.try_send(body).is_err());
        if full {
            warn!(session = session.0, "a gateway does not read its frames: the session is dropped");
            self.detach(session);
        }
    }

    fn attach(&mut self, (session, gateway): (SessionId, GatewayId), epoch: Epoch, frames: mpsc::Sender<UpBody>) {
        if self.sessions.is_empty() {
            // The snapshot has these changes, and there is no other reader.
            self.tiers.iter().for_each(|tiers| drop(tiers.take_events()));
        }
        let state = self.state();
        let adapters = self.adapters();
        let ReadyInfo { model, tokenizer_hash, model_hash, numerics_id, vocab_size, device, .. } = &self.info;
        let mut kv = self.engine.snapshot();
        kv.extend(self.tiers.iter().flat_map(Tiers::snapshot));
        // Budgets of reasoning are closed by the tokens of texts, as grammars are followed.
        let depends = [
            (Capability::ReasoningBudgets, self.engine.grammars().is_some()),
            (Capability::Vectors, self.engine.makes_vectors()),
            (Capability::Encoders, self.engine.encodes()),
            (Capability::Chains, self.engine.makes_vectors()),
        ];
        let lacks = depends.into_iter().filter(|(_, is_there)| !is_there).map(|(capability, _)| capability);
        let capabilities = Capabilities::all().without(lacks.collect());
        let ready = Ready {
            version: PROTOCOL_VERSION,
            epoch: epoch.0,
            model: model.clone(),
            tokenizer_hash: tokenizer_hash.clone(),
            numerics_id: numerics_id.clone(),
            vocab_size: *vocab_size,
            context_tokens: self.engine.context_tokens() as u32,
            block_tokens: BLOCK_TOKENS as u32,
            blocks_total: state.blocks_total,
            sequences_max: self.engine.sequences_max() as u32,
            device: device.clone(),
            pid: std::process::id(),
            kv,
            state: Some(state),
            model_hash: model_hash.clone(),
            block_bytes: self.engine.block_bytes() as u64,
            load_seconds: self.load.as_secs_f64(),
            grammar: self.engine.grammars().map(|known| known.vocabulary().id().to_owned()).unwrap_or_default(),
            reasoning_budgets: capabilities.has(Capability::ReasoningBudgets.into()),
            capabilities: capabilities.numbers(),
            adapters: adapters.loaded,
            adapter_orders: self.shelf.is_some(),
            adapters_pending: adapters.pending,
            shared_weights_bytes: self.info.weights.map_or(0, CopyUse::bytes),
            found_weights: matches!(self.info.weights, Some(CopyUse::Shared { .. })),
            transfer: if self.engine.block_bytes() > 0 { self.peers.address.clone() } else { String::new() },
        };
        let (ready, rest) = split_ready(ready, self.steps);
        if frames.try_send(UpBody::Ready(ready)).is_ok() {
            self.sessions.insert(session, SessionView { gateway, frames, accepted: 0, waiting: None });
            rest.into_iter().for_each(|step| self.answer(session, UpBody::Step(step)));
            self.troubles.current().into_iter().for_each(|notice| self.answer(session, UpBody::Notice(notice)));
            self.gpu.clone().into_iter().for_each(|state| self.answer(session, UpBody::Gpu(state)));
        }
    }

    fn detach(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        self.tiers.iter_mut().for_each(|tiers| tiers.end_session(session));
        let theirs: Vec<WorkId> =
            self.entries.iter().filter(|(_, entry)| entry.session == session).map(|(id, _)| *id).collect();
        for id in theirs {
            self.cancel(Cancel { request: id.0, choices: Vec::new() });
        }
        self.engine_ids.retain(|(owner, _), _| *owner != session);
    }

    /// A number for work that the engine has not had before.
    pub(super) fn next_id(&mut self) -> WorkId {
        self.next.0 += 1;
        self.next
    }

    fn generate(&mut self, session: SessionId, mut generate: Generate) {
        let Some(view) = self.sessions.get_mut(&session) else { return };
        view.accepted += 1;
        let gateway = view.gateway;
        view.waiting = Some((generate.waiting, Instant::now()));
        let request = RequestId(generate.request);
        self.end_ahead(session, request);
        let id = self.next_id();
        // Number of finishes that a refusal reports, however many choices are asked for.
        let open = generate.choices.len().clamp(1, self.engine.choices_max().max(1));
        self.entries.insert(id, Entry { session, request, open });
        // A newer attempt replaces an older one; outputs carry their attempt, which tells the two apart.
        if let Some(old) = self.engine_ids.insert((session, request), id) {
            self.cancel(Cancel { request: old.0, choices: Vec::new() });
        }
        generate.request = id.0;
        generate.turn = self.turns.place(gateway, id, generate.turn);
        if self.is_draining {
            // The engine refuses it at once: it waits neither for its grammar nor for blocks.
            self.engine.submit(generate);
        } else {
            self.compile(generate);
        }
    }

    /// Translates the numbers back and sends each session its frame.
    pub(crate) fn publish(&mut self, step: Step) {
        self.steps = step.number;
        let mut theirs: HashMap<SessionId, Vec<Output>> = HashMap::new();
        for mut output in step.outputs {
            let id = WorkId(output.request);
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            output.request = entry.request.0;
            let (session, request) = (entry.session, entry.request);
            if let Some(finish) = &output.finish {
                if ErrorKind::from_wire(finish.error_kind) == ErrorKind::ModelFailed {
                    warn!(
                        session = session.0,
                        request = request.0,
                        reason = finish.message,
                        "request ends with an error: no token can be sampled for it"
                    );
                }
                entry.open = entry.open.saturating_sub(1);
                if entry.open == 0 {
                    self.entries.remove(&id);
                    self.turns.end(id);
                    if self.engine_ids.get(&(session, request)) == Some(&id) {
                        self.engine_ids.remove(&(session, request));
                    }
                }
            }
            theirs.entry(session).or_default().push(output);
        }
        let mut rest = Step { outputs: Vec::new(), ..step };
        if let Some(tiers) = &self.tiers {
            rest.kv.extend(tiers.take_events());
        }
        rest.state = rest.state.map(|state| self.completed(state));
        self.send(&rest, &mut theirs);
    }

    fn tell(&mut self, step: &Step) {
        self.send(step, &mut HashMap::new());
    }

    fn send(&mut self, rest: &Step, theirs: &mut HashMap<SessionId, Vec<Output>>) {
        let mut slow = Vec::new();
        self.rounds += 1;
        let waiting = |view: &SessionView| {
            view.waiting.filter(|(_, said)| said.elapsed() < WAITING_TTL).map_or(0, |(requests, _)| requests)
        };
        let waiting: Vec<u32> = self.sessions.values().map(waiting).collect();
        let mut states = rest.state.iter().flat_map(|state| divided(state, &waiting, self.rounds));
        for (session, view) in &self.sessions {
            let outputs = theirs.remove(session).unwrap_or_default();
            let step = Step { outputs, accepted: view.accepted, state: states.next(), ..rest.clone() };
            if split_step(step).into_iter().any(|part| view.frames.try_send(UpBody::Step(part)).is_err()) {
                slow.push(*session);
            }
        }
        for session in slow {
            warn!(session = session.0, "a gateway does not read its frames: the session is dropped");
            self.detach(session);
        }
    }
}

#[cfg(test)]
mod tests;
