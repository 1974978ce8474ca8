//! Life cycle of the config's pools, at the start and from one config to the next.
//!
//! A pool whose config is the same stays as it is, as long as its model's files are. An added pool is started. A removed pool ends when no request can
//! reach it any more and its open answers have ended. A changed pool is started beside the old one and takes its place
//! when it is ready; until then, and if that never comes, the old one answers. A pool of which only the adapters are others stays: its workers
//! load and unload them. A worker that suits both is shared by
//! both: no weights are loaded twice, also where the number of workers grows or shrinks. The workers' shares of the
//! machine are set again when the old pool has gone.

mod gpu;
mod settings;
mod slot;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use penstock_text::TextModel;
use penstock_types::{TokenizeInput, TokenizeRequest};

use penstock_base::error::Failure;
use penstock_config::{DeviceChoice, PoolConfig, Snapshot};
use penstock_generate::PoolUpstream;
use penstock_pool::weights_cache::{CopyLayout, EntryKey, WeightsCache};
use penstock_pool::{AdapterSource, Copies, FleetRuntime, Leave, Pool};
use penstock_upstream::Upstream;
pub use settings::text;
use slot::Slot;

/// Files of a checkpoint embedded in the program: (name, content).
pub type Embedded = &'static [(&'static str, &'static [u8])];

/// Longest drain of a pool; a stream that takes longer is cut.
const DRAIN_MAX: Duration = Duration::from_secs(24 * 3600);
/// Polling interval of waits for readiness or for the end of a drain.
const LOOK: Duration = Duration::from_millis(100);
/// Longest wait of a changed pool on demand for the workers that run already.
const ADOPT_MAX: Duration = Duration::from_secs(10);
/// Polling interval of that wait.
const ADOPT_LOOK: Duration = Duration::from_millis(20);
/// Interval of the log line that a changed pool is not ready yet.
const SAY: Duration = Duration::from_secs(60);

/// Command by which this program starts its own workers.
pub struct WorkerCommand {
    /// Path of the binary that is started as a worker.
    pub program: PathBuf,
    /// Digest that tells builds of the binary apart; workers of another build are not adopted.
    pub identity: String,
    /// Function that gives a pool's arguments, without address and cores.
    pub args: fn(&PoolConfig) -> Vec<OsString>,
    /// Function that checks that a local pool's model can be loaded here, and gives the bytes of its weights.
    pub inspect: fn(&PoolConfig) -> Result<u64, String>,
    /// Function that tells whether a local pool's workers compute on a GPU.
    pub is_on_gpu: fn(&PoolConfig) -> Result<bool, String>,
    /// Function that gives the key of the packed weights of a pool's workers, which are started from the program at that path; `None`: they share
    /// none.
    pub weights_key: fn(&PoolConfig, &Path) -> Result<Option<EntryKey>, String>,
    /// Layout of packed weights in memory.
    pub layout: CopyLayout,
    /// Files of the embedded demo model, by name.
    pub demo: Embedded,
}

/// Names of the workers that an operator holds, by the id of their pool.
pub(crate) type HeldWorkers = BTreeMap<String, Vec<String>>;

/// Folder of packed weights, in the state folder.
pub fn weights_folder(state_dir: &Path) -> PathBuf {
    state_dir.join("weights")
}

impl WorkerCommand {
    /// Digest of the binary at `program`, which changes with every build of it.
    pub fn identity_of(program: &std::path::Path) -> String {
        settings::program_identity(program)
    }
}

/// Error of a pool that cannot be started on this machine.
#[derive(Debug, thiserror::Error)]
#[error("pool {pool:?}: {reason}")]
pub struct FleetError {
    /// Id of the pool that cannot work.
    pub pool: String,
    /// Reason why the pool cannot work, as text for the operator.
    pub reason: String,
}

/// All pools of a gateway. Dropping the fleet leaves the workers running, for the next gateway to adopt.
pub struct Fleet {
    command: WorkerCommand,
    runtime: FleetRuntime,
    cores: Vec<usize>,
    /// Packed weights that workers share.
    copies: Copies,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    running: Vec<Running>,
    /// Pools that left the config and are being drained.
    leaving: Vec<Pool>,
    /// Pools that leave or are replaced by the plan that is being carried out.
    going: Vec<Pool>,
    /// Counter of replacements: a replacement that a later one overtook finds another number and gives up.
    turns: u64,
    /// True once another process serves: what pools there are, and those that are started later, leave their workers to it.
    settled: bool,
}

impl State {
    /// Leaves all workers to the process that serves, once there is one.
    fn settle(&self) {
        for running in self.running.iter().filter(|_| self.settled) {
            running.pool.settle();
            running.latest().settle();
        }
    }

    /// Pools that end as soon as they can: those that left the config, and those whose replacements are being made ready.
    fn to_end(&self) -> impl Iterator<Item = &Pool> {
        let replaced = self.running.iter().filter(|running| running.next.is_some()).map(|running| &running.pool);
        replaced.chain(&self.leaving).chain(&self.going)
    }
}

/// End of the identity of workers that replace others which cannot take adapters, so that those are not adopted.
const APART: &str = " adapters";

/// Pool of the config in force, with its replacement if one is being made ready.
struct Running {
    config: PoolConfig,
    /// Digest of the model's files when they were read for this pool.
    files: String,
    slot: Arc<Slot>,
    /// Places of the model's adapters, by name, in the order of the config.
    adapters: Vec<(String, Arc<Slot>)>,
    pool: Pool,
    /// True if the workers are others than those that the pool had before its first adapter; see [`APART`].
    is_apart: bool,
    /// Changed pool that takes over when it is ready; `None`: the config has not changed.
    next: Option<Next>,
}

impl Running {
    /// Pool of the config in force: the one that replaces this pool, ready or not, if there is one.
    fn latest(&self) -> &Pool {
        self.next.as_ref().map_or(&self.pool, |next| &next.pool)
    }

    /// Takes in another list of adapters. A name that is new is served once a worker has it.
    fn adapt(&mut self, config: PoolConfig, adapters: Vec<AdapterSource>) {
        self.latest().adapt(adapters);
        self.adapters = places(&config, &self.slot, &self.adapters);
        self.config = config;
    }

    /// Places of the model and its adapters.
    fn slots(&self) -> impl Iterator<Item = &Arc<Slot>> {
        std::iter::once(&self.slot).chain(self.adapters.iter().map(|(_, slot)| slot))
    }
}

#[derive(Clone)]
struct Next {
    turn: u64,
    pool: Pool,
    upstream: Arc<PoolUpstream>,
}

/// Pools of another config, checked and not started.
pub struct Plan(Vec<Step>);

impl Plan {
    /// Returns true if the pool of that id goes on.
    fn keeps(&self, id: &str) -> bool {
        self.0.iter().any(|step| match step {
            Step::Keep(kept, _) => kept == id,
            Step::Adapt(asked, _) => asked.id == id,
            Step::Start(_) => false,
        })
    }
}

enum Step {
    Keep(String, Vec<AdapterSource>),
    /// Only the adapters differ, and the pool's workers load and unload them while they run.
    Adapt(Box<PoolConfig>, Vec<AdapterSource>),
    Start(Box<Start>),
}

/// Pool that is to be started.
struct Start {
    config: PoolConfig,
    /// Digest of the model's files, taken before they were read.
    files: String,
    settings: penstock_pool::PoolConfig,
    text: Arc<TextModel>,
}

/// Difference of a pool, its config and the files of its model, from the one that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Difference {
    Nothing,
    /// Only the adapters differ, and the workers that run take them.
    Adapters,
    /// Only the adapters differ, and the workers that run take none: other ones are needed.
    Workers,
    /// More differs, such as the model's files, or there is no pool of that id.
    More,
}

impl Difference {
    fn of(state: &State, asked: &PoolConfig, files: &str) -> Self {
        let running = state.running.iter().find(|running| running.config.id == asked.id);
        // Files that were replaced at their old path are another model, or other texts of it.
        let Some(running) = running.filter(|running| running.files == files) else { return Self::More };
        if running.config == *asked {
            return Self::Nothing;
        }
        let otherwise_same = PoolConfig { adapters: asked.adapters.clone(), ..running.config.clone() } == *asked;
        match otherwise_same {
            true if running.latest().takes_adapters() => Self::Adapters,
            true => Self::Workers,
            false => Self::More,
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Places of a config's adapters: those that are there already, and new ones over the pool that answers now. Its workers may
/// lack a new adapter; a request for it is refused until one has it, or until the changed pool answers.
fn places(config: &PoolConfig, slot: &Slot, known: &[(String, Arc<Slot>)]) -> Vec<(String, Arc<Slot>)> {
    let place = |name: &String| {
        let there = known.iter().find(|(have, _)| have == name).map(|(_, place)| Arc::clone(place));
        there.unwrap_or_else(|| Slot::new(Arc::new(slot.now().adapted(name.clone()))))
    };
    config.adapters.iter().map(|adapter| (adapter.name.clone(), place(&adapter.name))).collect()
}

fn failed(pool: &PoolConfig, reason: impl Into<String>) -> FleetError {
    FleetError { pool: pool.id.clone(), reason: reason.into() }
}

impl Fleet {
    /// Loads the text side (tokenizer, template) of every pool and starts the workers. Returns before they are ready.
    ///
    /// # Errors
    /// [`FleetError`] of the first pool that cannot work; no pool is left running.
    pub fn start(config: &Snapshot, command: WorkerCommand) -> Result<Self, FleetError> {
        let pool = config.pools.first().map_or_else(String::new, |pool| pool.id.clone());
        let runtime = FleetRuntime::start().map_err(|error| FleetError { pool, reason: error.to_string() })?;
        let copies = Copies::new(weights_cache(config, &command));
        let fleet = Self { command, runtime, cores: settings::cores(), copies, state: Arc::default() };
        let plan = fleet.plan(config)?;
        fleet.carry_out(plan)?;
        for (_, pool) in fleet.pools() {
            // A gateway before this one may have left workers that have another share.
            fleet.runtime.handle().spawn(async move { pool.arrange().await });
        }
        Ok(fleet)
    }

    /// Files of packed weights; `None`: none are kept.
    pub fn weights_cache(&self) -> Option<WeightsCache> {
        self.copies.cache().cloned()
    }

    /// Upstreams of the pools in the order of the config, each with those of its adapters behind it.
    pub fn upstreams(&self) -> Vec<Arc<dyn Upstream>> {
        let state = lock(&self.state);
        let slots = state.running.iter().flat_map(Running::slots);
        slots.map(|slot| Arc::clone(slot) as Arc<dyn Upstream>).collect()
    }

    /// Token ids of a text under a pool's tokenizer, with the special tokens that it adds to a prompt. `None`: there is
    /// no pool of that id.
    ///
    /// # Errors
    /// The failure of the pool's `tokenize`.
    pub async fn tokens(&self, pool: &str, text: String) -> Result<Option<Vec<u32>>, Failure> {
        #[derive(serde::Deserialize)]
        struct Tokens {
            tokens: Vec<u32>,
        }
        let found = self.upstreams().into_iter().find(|upstream| upstream.card().id == pool);
        let Some(upstream) = found else { return Ok(None) };
        let input = TokenizeInput::Text { prompt: text, add_special_tokens: true };
        let body = upstream.tokenize(TokenizeRequest { model: None, input, return_token_strs: false }).await?;
        let tokens: Tokens = serde_json::from_slice(&body).map_err(|error| Failure::internal(error.to_string()))?;
        Ok(Some(tokens.tokens))
    }

    /// Pools by id, with those that wait to take over and those that are drained.
    pub fn pools(&self) -> Vec<(String, Pool)> {
        let state = lock(&self.state);
        let running = state.running.iter().flat_map(|running| {
            let next = running.next.as_ref().map(|next| next.pool.clone());
            [Some(running.pool.clone()), next].into_iter().flatten().map(|pool| (running.config.id.clone(), pool))
        });
        running.collect()
    }

    /// Waits until every pool takes requests, or would if an operator did not hold its workers.
    ///
    /// # Errors
    /// The ids of the pools that are not ready after `deadline`.
    pub fn ready(&self, deadline: Duration) -> Result<(), Vec<String>> {
        let until = Instant::now() + deadline;
        loop {
            let pools = self.pools();
            let unready: Vec<_> = pools.into_iter().filter(|(_, pool)| !pool.is_up()).map(|(id, _)| id).collect();
            if unready.is_empty() {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(unready);
            }
            std::thread::park_timeout(LOOK);
        }
    }

    /// Ids of pools that are being replaced and whose new workers are not ready.
    pub fn replacing(&self) -> Vec<String> {
        let state = lock(&self.state);
        state.running.iter().filter(|running| running.next.is_some()).map(|running| running.config.id.clone()).collect()
    }

    /// Checks the pools of a config and plans the steps towards it; starts nothing.
    ///
    /// # Errors
    /// [`FleetError`] of the first pool that cannot work here.
    pub fn plan(&self, config: &Snapshot) -> Result<Plan, FleetError> {
        let mut steps = Vec::new();
        for asked in &config.pools {
            let files = settings::model_files(asked.model.as_deref());
            let difference = Difference::of(&lock(&self.state), asked, &files);
            if difference == Difference::Nothing {
                steps.push(Step::Keep(asked.id.clone(), settings::adapters(asked)));
                continue;
            }
            match self.step(config, asked, files, difference) {
                Ok(step) => steps.push(step),
                // Only the files differ, and what is there now cannot be served: no reason to refuse the rest of the config.
                Err(error) if self.runs(asked) => {
                    tracing::warn!(
                        pool = asked.id,
                        error = error.to_string(),
                        "the model's files have changed and cannot be served: the pool goes on as it is, and the next reload looks again"
                    );
                    steps.push(Step::Keep(asked.id.clone(), settings::adapters(asked)));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Plan(steps))
    }

    /// Returns true if a pool of exactly this config runs.
    fn runs(&self, asked: &PoolConfig) -> bool {
        lock(&self.state).running.iter().any(|running| running.config == *asked)
    }

    /// Step towards one pool of a config, which differs from what runs.
    fn step(
        &self,
        config: &Snapshot,
        asked: &PoolConfig,
        files: String,
        difference: Difference,
    ) -> Result<Step, FleetError> {
        let weights = match asked.connect.is_empty() {
            true => (self.command.inspect)(asked).map_err(|reason| failed(asked, reason))?,
            false => 0,
        };
        if difference == Difference::Adapters {
            return Ok(Step::Adapt(Box::new(asked.clone()), settings::adapters(asked)));
        }
        let text = Arc::new(settings::text(asked, self.command.demo).map_err(|reason| failed(asked, reason))?);
        let state_dir = penstock_config::state_dir(config).map_err(|reason| failed(asked, reason))?;
        let mut settings = settings::settings(asked, &self.command, &text, state_dir, (&self.cores, &self.copies))
            .map_err(|reason| failed(asked, reason))?;
        let mut running_apart = false;
        if let Some(running) = lock(&self.state).running.iter().find(|running| running.config.id == asked.id) {
            running_apart = running.is_apart;
            // What an operator has drained stays so in the changed pool.
            settings.holds = running.pool.holds().clone();
        }
        if (difference == Difference::Workers || running_apart)
            && let Some(local) = &mut settings.local
        {
            local.identity.push_str(APART);
        }
        if let Some(local) = &mut settings.local {
            local.gpu_leavers = gpu::leavers(&self.state);
        }
        self.fits(asked, &settings, weights)?;
        Ok(Step::Start(Box::new(Start { config: asked.clone(), files, settings, text })))
    }

    /// Checks that the memory left is enough for a changed pool's new workers beside the old ones.
    fn fits(&self, asked: &PoolConfig, settings: &penstock_pool::PoolConfig, weights: u64) -> Result<(), FleetError> {
        let found = {
            let state = lock(&self.state);
            let running = state.running.iter().find(|running| running.config.id == asked.id);
            running.map(|running| (running.config.clone(), running.pool.clone()))
        };
        let Some((old, pool)) = found else { return Ok(()) };
        let lacks = pool.lacks(settings).min(asked.workers) as u64;
        // What the old workers may compute on is asked of their config: a file that has gone since leaves it open. What they do compute on they say.
        let is_on_gpu = |config, unknown| (self.command.is_on_gpu)(config).unwrap_or(unknown);
        if lacks > 0 && is_on_gpu(asked, false) {
            let held = if is_on_gpu(&old, true) { gpu::workers_on(&old, &pool) } else { Some(0) };
            // New workers that may compute on the CPU, as the old ones do, need room there.
            let held = held.or((asked.device != DeviceChoice::Auto).then_some(0));
            if let Some(held) = held {
                return gpu::fit((&old, held), (asked, lacks)).map_err(|reason| failed(asked, reason));
            }
        }
        // Workers that share weights need one copy, and none where it is there already.
        let copies = match settings.local.as_ref().and_then(|local| local.weights.as_ref()) {
            Some(shared) if self.copies.has(&(shared.key)()) => 0,
            Some(_) => lacks.min(1),
            None => lacks,
        };
        let needed = weights.saturating_mul(copies);
        match settings::bytes_free() {
            Some(free) if needed > free => {
                let (needed, free) = (needed as f64 / 1e9, free as f64 / 1e9);
                Err(failed(
                    asked,
                    format!(
                        "its new workers need {needed:.1} GB for their weights while the old ones still serve, and {free:.1} GB are free: {GIVE_WAY}"
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Starts added and changed pools and drains removed ones. The upstreams are those of the plan's config from now
    /// on.
    ///
    /// # Errors
    /// [`FleetError`] of the first pool that cannot be started; then everything is as before.
    pub fn carry_out(&self, plan: Plan) -> Result<(), FleetError> {
        {
            // The first worker of a new pool may look before the old pool is said to leave.
            let mut state = lock(&self.state);
            let gone = state.running.iter().filter(|running| !plan.keeps(&running.config.id));
            state.going = gone.flat_map(|gone| [&gone.pool, gone.latest()]).cloned().collect();
        }
        let done = self.take(plan);
        lock(&self.state).going.clear();
        done
    }

    /// Takes the steps of a plan.
    fn take(&self, plan: Plan) -> Result<(), FleetError> {
        let mut started = Vec::new();
        for step in plan.0 {
            match step {
                Step::Keep(id, adapters) => started.push(Err((id, None, adapters))),
                Step::Adapt(asked, adapters) => started.push(Err((asked.id.clone(), Some(asked), adapters))),
                Step::Start(new) => {
                    let Start { config: asked, files, settings, text } = *new;
                    let is_apart = settings.local.as_ref().is_some_and(|local| local.identity.ends_with(APART));
                    match Pool::start(&self.runtime, settings) {
                        Ok(pool) => {
                            let upstream =
                                Arc::new(PoolUpstream::new(asked.id.clone(), text, pool.clone(), asked.answers));
                            started.push(Ok((asked, files, pool, upstream, is_apart)));
                        }
                        Err(error) => {
                            started.into_iter().flatten().for_each(|(_, _, pool, ..)| self.leave(pool, None));
                            let why = error.source().map_or_else(String::new, |why| format!(": {why}"));
                            return Err(failed(&asked, format!("{error}{why}")));
                        }
                    }
                }
            }
        }
        let mut state = lock(&self.state);
        let mut before = std::mem::take(&mut state.running);
        let mut leaving = Vec::new();
        for step in started {
            let id = match &step {
                Err((id, ..)) => id,
                Ok((asked, ..)) => &asked.id,
            };
            let known = before.iter().position(|running| running.config.id == *id).map(|at| before.swap_remove(at));
            match (step, known) {
                (Err((_, asked, adapters)), known) => state.running.extend(known.map(|mut known| {
                    let config = asked.map_or_else(|| known.config.clone(), |asked| *asked);
                    // Told again where nothing differs: files may be others, and what failed is tried again.
                    known.adapt(config, adapters);
                    known
                })),
                (Ok((config, files, pool, upstream, is_apart)), None) => {
                    let slot = Slot::new(upstream);
                    let adapters = places(&config, &slot, &[]);
                    state.running.push(Running { config, files, slot, adapters, pool, is_apart, next: None });
                }
                (Ok((config, files, pool, upstream, is_apart)), Some(mut known)) => {
                    state.turns += 1;
                    let next = Next { turn: state.turns, pool, upstream };
                    // Two that change the number of the same workers, or their adapters, would undo each other's changes.
                    known.latest().settle();
                    known.pool.settle();
                    leaving.extend(known.next.replace(next.clone()).map(|next| (next.pool, Some(next.upstream))));
                    known.is_apart = is_apart;
                    known.adapters = places(&config, &known.slot, &known.adapters);
                    (known.config, known.files) = (config, files);
                    self.runtime.handle().spawn(replace(Arc::downgrade(&self.state), next));
                    state.running.push(known);
                }
            }
        }
        state.settle();
        drop(state);
        for gone in before {
            tracing::info!(pool = %gone.config.id, "pool removed: its workers stop when the open answers have ended");
            gone.pool.settle();
            let slots = gone.slots().cloned().collect();
            leaving.extend(gone.next.map(|next| (next.pool, Some(next.upstream))));
            self.leave_slots(slots, gone.pool);
        }
        leaving.into_iter().for_each(|(pool, upstream)| self.leave(pool, upstream));
        Ok(())
    }

    /// Stops scaling, in the pools of later configs too: the number of workers is left to the process that takes them over.
    pub fn settle(&self) {
        let mut state = lock(&self.state);
        state.settled = true;
        state.settle();
    }

    /// Names of the workers that an operator holds.
    pub(crate) fn held(&self) -> HeldWorkers {
        let state = lock(&self.state);
        let held = state.running.iter().map(|running| (running.config.id.clone(), running.pool.holds().names()));
        held.filter(|(_, names)| !names.is_empty()).collect()
    }

    /// Holds these workers and no others, as an operator has told the process before this one.
    pub(crate) fn hold(&self, held: &HeldWorkers) {
        for running in &lock(&self.state).running {
            running.pool.holds().replace(held.get(&running.config.id).cloned().unwrap_or_default());
        }
    }

    fn leave(&self, pool: Pool, upstream: Option<Arc<PoolUpstream>>) {
        lock(&self.state).leaving.push(pool.clone());
        self.runtime.handle().spawn(leave(Arc::downgrade(&self.state), pool, upstream.into_iter().collect()));
    }

    fn leave_slots(&self, slots: Vec<Arc<Slot>>, pool: Pool) {
        lock(&self.state).leaving.push(pool.clone());
        self.runtime.handle().spawn(leave(Arc::downgrade(&self.state), pool, slots));
    }

    /// Ends the pools by `deadline`; `leave` decides whether the local workers exit or stay for the next gateway.
    pub fn stop(&self, leave: Leave, deadline: Duration) {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        let leaving = lock(&self.state).leaving.clone();
        let pools = self.pools().into_iter().map(|(_, pool)| pool).chain(leaving);
        runtime.block_on(async {
            for pool in pools {
                pool.shutdown(leave, deadline).await;
            }
        });
    }
}

/// Advice where old and new workers of a changed pool have no room beside each other.
const GIVE_WAY: &str = "take the pool out first, or restart";

/// Cache of packed weights that a config asks for; without one the gateway serves all the same.
fn weights_cache(config: &Snapshot, command: &WorkerCommand) -> Option<WeightsCache> {
    let bytes_max = Some(config.weights_cache_bytes_max).filter(|bytes| *bytes > 0)?;
    let folder = penstock_config::state_dir(config).map(|state_dir| weights_folder(&state_dir));
    let started = folder
        .and_then(|folder| WeightsCache::start(folder, bytes_max, command.layout).map_err(|error| error.to_string()));
    started.inspect_err(|error| tracing::warn!(error, "packed weights are not kept")).ok()
}

/// Waits until the changed pool is ready, puts it in the old one's place, then drains the old one.
async fn replace(state: Weak<Mutex<State>>, next: Next) {
    let began = Instant::now();
    while !next.pool.ready(SAY).await {
        let Some(state) = state.upgrade() else { return };
        let state = lock(&state);
        let mine = |running: &&Running| running.next.as_ref().is_some_and(|other| other.turn == next.turn);
        let Some(running) = state.running.iter().find(mine) else { return };
        let waited_s = began.elapsed().as_secs();
        tracing::warn!(pool = %running.config.id, waited_s, "changed pool is not ready: the old pool still answers");
    }
    adopted(&state, &next).await;
    let Some(shared) = state.upgrade() else { return };
    let (pool, upstream, new) = {
        let mut state = lock(&shared);
        let mine = |running: &&mut Running| running.next.as_ref().is_some_and(|other| other.turn == next.turn);
        let Some(running) = state.running.iter_mut().find(mine) else { return };
        let Some(next) = running.next.take() else { return };
        tracing::info!(pool = %running.config.id, "changed pool answers from now on");
        for (name, slot) in &running.adapters {
            // The old upstream of an adapter holds that of its model, which is waited for below.
            slot.replace(Arc::new(next.upstream.adapted(name.clone())));
        }
        let upstream = running.slot.replace(next.upstream);
        let pool = std::mem::replace(&mut running.pool, next.pool.clone());
        state.leaving.push(pool.clone());
        (pool, upstream, next.pool)
    };
    drop(shared);
    drop(next);
    leave(state, pool, vec![upstream]).await;
    new.arrange().await;
}

/// Waits until a changed pool on demand, which is ready with no worker at all, holds the workers that serve in the old pool, at most
/// [`ADOPT_MAX`]: a worker that no other pool holds ends with its pool.
async fn adopted(state: &Weak<Mutex<State>>, next: &Next) {
    let began = Instant::now();
    let serves_old = || {
        let state = state.upgrade()?;
        let state = lock(&state);
        let mine = |running: &&Running| running.next.as_ref().is_some_and(|other| other.turn == next.turn);
        Some(state.running.iter().find(mine)?.pool.status().is_ready())
    };
    while next.pool.is_on_demand()
        && !next.pool.status().is_ready()
        && serves_old() == Some(true)
        && began.elapsed() < ADOPT_MAX
    {
        tokio::time::sleep(ADOPT_LOOK).await;
    }
}

/// Ends a pool when no request can reach it any more and its open answers have ended, or after [`DRAIN_MAX`].
async fn leave<U>(state: Weak<Mutex<State>>, pool: Pool, upstreams: Vec<Arc<U>>) {
    let until = Instant::now() + DRAIN_MAX;
    while upstreams.iter().any(|upstream| Arc::strong_count(upstream) > 1) && Instant::now() < until {
        tokio::time::sleep(LOOK).await;
    }
    drop(upstreams);
    pool.shutdown(Leave::Exit, until.saturating_duration_since(Instant::now())).await;
    if let Some(state) = state.upgrade() {
        lock(&state).leaving.retain(|other| !other.is_same(&pool));
    }
}

/// Checks that a pool could be started, as far as its files and addresses go. Starts nothing and connects to nobody.
///
/// # Errors
/// The reason why the pool cannot be started, for people.
pub fn check(asked: &PoolConfig, text: &TextModel, command: &WorkerCommand, state_dir: &Path) -> Result<(), String> {
    let there = (&settings::cores()[..], &Copies::default());
    settings::settings(asked, command, text, state_dir.to_owned(), there).map(drop)
}
