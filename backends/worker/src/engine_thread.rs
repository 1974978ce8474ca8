//! The engine's thread: commands in, steps out. The thread owns the engine, so there is no lock.
//!
//! Each gateway numbers its requests on its own; inside the engine they get numbers of this process, and outputs are
//! translated back. After every step each session gets one frame: its own outputs, and the state and KV events that
//! all of them need.

mod adapters;
mod sessions;
mod transfers;

use self::transfers::{Arrival, Incoming};
use crate::config::{Build, ReadyInfo, TierOptions, WorkerError};
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
use penstock_proto::frames::{Cancel, Generate, GpuState, Prefetch, Step, UpBody, Window};
use penstock_proto::transfer::Fetch;
use penstock_proto::{GatewayId, RequestId, SessionId, WorkId};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::info;

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
        let waiting_max = engine.waiting_max();
        let start = |grammars| Compiler::start(Arc::clone(grammars), waiting_max, wiring.compiled());
        let compiler = engine.grammars().map(start);
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
                is_denied: false,
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
    /// True if the last report granted a gateway nothing, for others had more requests that wait, though there were credits.
    is_denied: bool,
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
                self.is_untold = false;
                self.publish(step);
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
                // No step comes by which the turn passes on, or by which a report of waiting requests is found to be old.
                self.is_untold |= self.is_denied && !self.engine.has_work();
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
}

#[cfg(test)]
mod tests;
