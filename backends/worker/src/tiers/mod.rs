//! Tiers below the device: host memory, files, a server. Blocks that leave the device go down, blocks that a request
//! needs come up.
//!
//! - [`level`]: one tier, with its plan and counters; [`levels`]: those of this worker, fastest first
//! - [`intake`]: requests that wait for blocks
//! - [`disk`], `remote`: stores; [`io`]: the threads in front of them; [`block`]: what makes bytes a block
//!
//! A step never waits for a tier: its evicted blocks are copied out (at the speed of memory, and only while the queue
//! has room) and everything else happens on other threads.

mod block;
mod disk;
mod intake;
mod io;
mod level;
mod levels;
#[cfg(any(feature = "redis", feature = "s3"))]
mod remote;

use crate::config::{ReadyInfo, TierOptions, WorkerError};
use block::Identity;
use intake::Intake;
pub(crate) use intake::{Ahead, Released};
use io::{Disk, Io};
pub(crate) use io::{Outcome, Tell};
pub(crate) use level::Change;
use level::{Level, Medium};
use levels::Levels;
use penstock_engine::{Engine, Offload};
use penstock_kv::TierPool;
use penstock_kv::tier::Link;
use penstock_proto::frames::{EngineState, Generate, KvEvent, Tier, Window};
use penstock_proto::{BlockHash, RequestId, SessionId, WorkId};
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{info, warn};

#[cfg(any(feature = "redis", feature = "s3"))]
/// Most blocks of a server whose hashes this worker remembers.
const REMOTE_NAMES: usize = 100_000;

/// KV tiers of a running worker, and the requests that wait for blocks from them.
pub(crate) struct Tiers {
    levels: Arc<Mutex<Levels>>,
    intake: Intake,
}

/// Engine's end of the tiers: evicted blocks go to the first tier.
struct Down(Arc<Mutex<Levels>>);

fn lock(levels: &Mutex<Levels>) -> MutexGuard<'_, Levels> {
    levels.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Offload for Down {
    fn wants(&mut self, parent: Option<BlockHash>, hash: BlockHash) -> bool {
        lock(&self.0).wants(Link { parent, hash })
    }

    fn room(&mut self) -> usize {
        lock(&self.0).room()
    }

    fn missed(&mut self, blocks: usize) {
        lock(&self.0).missed(blocks);
    }

    fn take(&mut self, parent: Option<BlockHash>, hash: BlockHash, bytes: Vec<u8>) {
        lock(&self.0).put(0, Link { parent, hash }, bytes);
    }
}

impl Tiers {
    /// Opens the tiers for the engine's blocks. `None` if none is on, or the engine's blocks cannot be moved. A disk
    /// that cannot be used is switched off, with a warning, and tried again: it is a cache.
    ///
    /// # Errors
    /// A remote address that is invalid.
    pub(crate) fn open(
        options: &TierOptions,
        engine: &mut Engine,
        info: &ReadyInfo,
        tell: &Tell,
    ) -> Result<Option<Self>, WorkerError> {
        let block_bytes = engine.block_bytes();
        if block_bytes == 0 || !options.is_any() {
            return Ok(None);
        }
        let identity = Identity::new(&info.model_hash, &info.numerics_id, block_bytes);
        let mut levels = Vec::new();
        let places = usize::try_from(options.host_bytes).unwrap_or(usize::MAX) / block_bytes;
        if places > 0 {
            let plan = TierPool::new(Tier::Host, places);
            levels.push(Level::new(plan, Medium::Memory(vec![Vec::new(); places])));
        }
        levels.extend(disk(options, &identity, tell));
        levels.extend(remote(options, &identity, tell)?);
        let levels = Arc::new(Mutex::new(Levels::new(levels, block_bytes)));
        engine.set_offload(Box::new(Down(Arc::clone(&levels))));
        Ok(Some(Self { levels, intake: Intake::new(block_bytes, &info.numerics_id) }))
    }

    /// Takes a request that waits for blocks; gives back one that need not wait.
    pub(crate) fn admit(&mut self, generate: Generate, engine: &mut Engine) -> Vec<Released> {
        let given_back = self.intake.admit(generate, engine, &mut lock(&self.levels), Instant::now());
        let mut ready: Vec<_> = given_back.into_iter().collect();
        ready.extend(self.advance(engine));
        ready
    }

    /// Begins to load blocks for a request that will come.
    pub(crate) fn ahead(&mut self, ahead: Ahead, engine: &mut Engine) -> Vec<Released> {
        self.intake.ahead(ahead, engine, &mut lock(&self.levels), Instant::now());
        self.advance(engine)
    }

    /// Returns true if a prefetched block awaits its report; see [`Intake::take_news`].
    pub(crate) fn take_news(&mut self) -> bool {
        self.intake.take_news()
    }

    /// Ends the prefetch of one request; see [`Intake::end_ahead`].
    pub(crate) fn end_ahead(&mut self, session: SessionId, request: RequestId) {
        self.intake.end_ahead(session, request);
    }

    /// Ends all prefetches of a session; see [`Intake::end_session`].
    pub(crate) fn end_session(&mut self, session: SessionId) {
        self.intake.end_session(session);
    }

    /// Handles the outcome of a job. Returns requests whose wait is over.
    pub(crate) fn outcome(&mut self, outcome: Outcome, engine: &mut Engine) -> Vec<Released> {
        let news = lock(&self.levels).outcome(outcome, Instant::now());
        self.intake.news(news, engine, &mut lock(&self.levels));
        self.advance(engine)
    }

    /// Advances the waiting requests. Must be called regularly, for the deadlines.
    pub(crate) fn advance(&mut self, engine: &mut Engine) -> Vec<Released> {
        lock(&self.levels).revive(Instant::now());
        if self.intake.is_idle() {
            return Vec::new();
        }
        self.intake.advance(engine, &self.levels, Instant::now())
    }

    /// Gives one waiting request back; `None` if it does not wait here.
    pub(crate) fn take(&mut self, id: WorkId) -> Option<Released> {
        self.intake.take(id)
    }

    /// Gives all waiting requests back, and forgets the prefetches.
    pub(crate) fn take_all(&mut self) -> Vec<Released> {
        self.intake.take_all()
    }

    /// Keeps a window for a choice of a waiting request; false if the request does not wait here. See [`Intake::window`].
    pub(crate) fn window(&mut self, window: &Window) -> bool {
        self.intake.window(window)
    }

    /// Returns true if any request waits for blocks from a tier.
    pub(crate) fn is_waiting(&self) -> bool {
        self.intake.waiting() > 0
    }

    /// Adds facts that the engine does not know: tiers, and requests that wait here.
    pub(crate) fn complete(&self, state: &mut EngineState) {
        let waiting = self.intake.waiting() as u32;
        state.tiers = lock(&self.levels).states();
        state.prefetches = Some(self.intake.prefetches());
        state.waiting += waiting;
        state.credits = state.credits.saturating_sub(waiting);
        state.prefill_tokens_pending += self.intake.pending_tokens();
    }

    /// Tiers that were switched off or on since the last call.
    pub(crate) fn take_changes(&self) -> Vec<Change> {
        lock(&self.levels).take_changes()
    }

    /// Changes of the tiers since the last call.
    pub(crate) fn take_events(&self) -> Vec<KvEvent> {
        lock(&self.levels).take_events()
    }

    /// All blocks of the tiers as events.
    pub(crate) fn snapshot(&self) -> Vec<KvEvent> {
        lock(&self.levels).snapshot()
    }

    /// Stores the blocks of device and memory in tiers that outlive the process, coldest first, at an orderly end.
    /// `wait` waits for an outcome, or for a moment; it breaks when nothing more comes.
    pub(crate) fn keep(
        &mut self,
        engine: &mut Engine,
        patience: Duration,
        wait: &mut dyn FnMut() -> ControlFlow<(), Option<Outcome>>,
    ) {
        if !lock(&self.levels).outlives() {
            return;
        }
        let (began, mut blocks) = (Instant::now(), 0_u64);
        let mut poured = false;
        let mut emptied = false;
        while began.elapsed() < patience {
            if lock(&self.levels).is_busy() || emptied {
                if emptied && lock(&self.levels).close() {
                    break;
                }
                let ControlFlow::Continue(outcome) = wait() else { return };
                outcome.map(|outcome| lock(&self.levels).outcome(outcome, Instant::now()));
            } else if !poured {
                poured = !lock(&self.levels).pour();
            } else if engine.offload_one() {
                blocks += 1;
            } else {
                emptied = true;
            }
        }
        info!(
            blocks,
            seconds = began.elapsed().as_secs_f64(),
            "KV blocks of the device saved to the tiers before exit"
        );
    }
}

#[cfg(any(feature = "redis", feature = "s3"))]
fn remote(options: &TierOptions, identity: &Identity, tell: &Tell) -> Result<Option<Level>, WorkerError> {
    let Some(url) = &options.remote else { return Ok(None) };
    let stores = remote::open(url, options.remote_password.as_deref(), identity).map_err(WorkerError::Tier)?;
    let what = || "starting the threads of the remote tier".to_owned();
    let io = Io::start(Tier::Remote, stores, tell).map_err(|source| WorkerError::Os { what: what(), source })?;
    Ok(Some(Level::new(TierPool::new(Tier::Remote, REMOTE_NAMES), Medium::Store(io))))
}

#[cfg(not(any(feature = "redis", feature = "s3")))]
fn remote(options: &TierOptions, _: &Identity, _: &Tell) -> Result<Option<Level>, WorkerError> {
    match options.remote {
        Some(_) => Err(WorkerError::Tier("this build has no remote tier: build with the feature redis or s3".into())),
        None => Ok(None),
    }
}

fn disk(options: &TierOptions, identity: &Identity, tell: &Tell) -> Option<Level> {
    let path = options.disk_path.as_ref().filter(|_| options.disk_bytes > 0)?;
    let began = Instant::now();
    let (disk, found) = Disk::open(path, options.disk_bytes, identity);
    if let Err(error) = &found
        && error.kind() == ErrorKind::InvalidInput
    {
        // An error that time would not mend.
        warn!(path = %path.display(), %error, "KV tier on disk is off");
        return None;
    }
    let io = Io::start(Tier::Disk, vec![Box::new(disk)], tell);
    let medium = io
        .inspect_err(|error| warn!(path = %path.display(), %error, "KV tier on disk is off"))
        .ok()
        .map(Medium::Store)?;
    match found {
        Ok((slots, found)) => {
            let mut plan = TierPool::new(Tier::Disk, slots);
            let blocks = plan.adopt(found);
            info!(path = %path.display(), slots, blocks, ms = began.elapsed().as_millis() as u64, "KV tier on disk opened");
            Some(Level::new(plan, medium))
        }
        Err(error) => Some(Level::off(Tier::Disk, medium, format!("{}: {error}", path.display()))),
    }
}
