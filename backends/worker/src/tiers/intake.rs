//! Requests that wait until blocks of their prompt have been loaded from a tier.
//!
//! A request whose prefix ends on the device and goes on in a tier is held back while its blocks are loaded, if that
//! is expected to be quicker than computing them; then it is submitted and finds them like any cached block. Blocks
//! are loaded one after another through a window that all requests share, oldest request first. After any failure (a
//! block is gone, is wrong, does not come in time, finds no page) the request is submitted with the blocks it has, and
//! the engine computes the rest. A load ends where it would evict a block that a waiting request has, be it its own
//! (see [`penstock_kv::spared`]), so that what was loaded is a prefix that the request finds. A store that hangs costs a request no more than computing does: a tier that has been
//! silent for too long is not waited for, and requests that arrive during its silence do not wait at all.
//!
//! A request that still waits in the gateway can be prefetched (*ahead*): its blocks are loaded while it waits, after
//! those of requests that are here, through half the window, and up to a share of the device. After that they are
//! ordinary cached blocks.

#[cfg(test)]
mod tests;

use super::levels::{Levels, Load, News, SILENCE_MAX};
use super::lock;
use penstock_engine::{Engine, Imported};
use penstock_kv::Spared;
use penstock_kv::load::worth_loading;
use penstock_proto::frames::{Generate, PrefetchState, Window};
use penstock_proto::{BLOCK_TOKENS, BlockHash, BlockHasher, RequestId, SessionId, WorkId};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Bytes in flight at once; at least two blocks.
const WINDOW_BYTES: usize = 32 << 20;

/// Longest wait of a request for blocks; also bounded by a multiple of the time to compute them.
const WAIT_MAX: Duration = Duration::from_secs(10);
const WAIT_MIN: Duration = SILENCE_MAX;

/// Longest silence of a tier where the time to compute is unknown, and for prefetches.
const SILENCE_UNKNOWN: Duration = Duration::from_secs(1);

/// Most blocks in one query to the remote tier.
const FIND_MAX: usize = 256;

/// Least blocks for a query to the remote tier: fewer are not worth a round trip.
const FIND_MIN: usize = 2;

/// Most queries waiting at the remote tier when a request, or a prefetch, adds another: a slow tier is asked less.
const FINDS_MAX: usize = 256;
const FINDS_AHEAD_MAX: usize = 16;

/// Most prefetches at once; further hints are ignored.
const AHEAD_MAX: usize = 64;

/// Divisor of the device's blocks: prefetches take at most that share.
const AHEAD_SHARE: usize = 4;

/// Limits of a prefetch's life, which is a multiple of the predicted wait.
const AHEAD_MIN: Duration = Duration::from_secs(5);
const AHEAD_MOST: Duration = Duration::from_secs(60);

/// Time after which a prefetched block that no request has found counts as unused.
const FRESH_MAX: Duration = Duration::from_secs(60);

/// A request whose wait is over.
pub(crate) struct Released {
    pub(crate) generate: Generate,
    /// Windows that came for its choices meanwhile, one for each choice at most: `generate` has one number for all of them.
    pub(crate) windows: Vec<Window>,
}

/// Reason for which blocks are loaded.
enum Errand {
    /// A request that waits for the blocks.
    Request(Box<Released>),
    /// A request that will come from a session under this number.
    Ahead { session: SessionId, request: RequestId },
}

struct Held {
    id: WorkId,
    errand: Errand,
    chain: Vec<BlockHash>,
    /// Number of leading blocks of `chain` that are on the device.
    here: usize,
    /// End of the blocks to load; the rest is computed.
    end: usize,
    /// True if a query to the remote tier is unanswered.
    finding: bool,
    /// True if the blocks on the device were marked as used soon.
    touched: bool,
    /// Longest silence of a tier before the request stops waiting for it.
    patience: Duration,
    deadline: Instant,
}

impl Held {
    fn generate(&self) -> Option<&Generate> {
        match &self.errand {
            Errand::Request(request) => Some(&request.generate),
            Errand::Ahead { .. } => None,
        }
    }

    fn release(self) -> Option<Released> {
        match self.errand {
            Errand::Request(request) => Some(*request),
            Errand::Ahead { .. } => None,
        }
    }
}

/// A hint: a request that will come, and the hashes of its blocks.
pub(crate) struct Ahead {
    pub(crate) id: WorkId,
    pub(crate) session: SessionId,
    pub(crate) request: RequestId,
    pub(crate) chain: Vec<BlockHash>,
    /// Predicted remaining wait of the request.
    pub(crate) wait: Duration,
}

/// Requests and prefetches whose blocks are being loaded from lower tiers, and the blocks on their way.
pub(crate) struct Intake {
    /// Requests that are here, then prefetches; oldest first.
    held: VecDeque<Held>,
    /// Blocks that a tier has been asked for and has not brought so far.
    coming: HashSet<BlockHash>,
    /// Blocks that came before those in front of them in the chain.
    arrived: HashMap<BlockHash, Vec<u8>>,
    /// Prefetched blocks that no request has found, with their arrival times.
    fresh: HashMap<BlockHash, Instant>,
    /// Blocks of the requests that wait here, or for their start after a load.
    spared: Spared,
    prefetches: PrefetchState,
    /// True if a prefetched block has not been reported.
    is_news: bool,
    window: usize,
    numerics: String,
}

impl Intake {
    pub(crate) fn new(block_bytes: usize, numerics: &str) -> Self {
        Self {
            held: VecDeque::new(),
            coming: HashSet::new(),
            arrived: HashMap::new(),
            fresh: HashMap::new(),
            spared: Spared::default(),
            prefetches: PrefetchState::default(),
            is_news: false,
            window: (WINDOW_BYTES / block_bytes.max(1)).clamp(2, 64),
            numerics: numerics.to_owned(),
        }
    }

    /// Number of requests that wait for blocks from a tier, prefetches not counted.
    pub(crate) fn waiting(&self) -> usize {
        self.held.iter().filter(|held| held.generate().is_some()).count()
    }

    /// Returns true if nothing waits and no prefetched block is unclaimed, so that no timer is needed.
    pub(crate) fn is_idle(&self) -> bool {
        self.held.is_empty() && self.fresh.is_empty()
    }

    /// Counters of prefetched blocks, used and unused, since the epoch began.
    pub(crate) fn prefetches(&self) -> PrefetchState {
        self.prefetches
    }

    /// Prompt tokens of waiting requests that will still be computed.
    pub(crate) fn pending_tokens(&self) -> u64 {
        let left = |held: &Held| Some(held.generate()?.prompt.len().saturating_sub(held.end * BLOCK_TOKENS) as u64);
        self.held.iter().filter_map(left).sum()
    }

    /// Takes a request, or gives it back if there is nothing to wait for.
    pub(crate) fn admit(
        &mut self,
        generate: Generate,
        engine: &mut Engine,
        levels: &mut Levels,
        now: Instant,
    ) -> Option<Released> {
        let chain = self.chain(&generate, engine);
        let here = chain.iter().take_while(|hash| engine.holds(**hash)).count();
        self.found(&chain[..here]);
        let compute = engine.block_seconds() * (chain.len() - here) as f64;
        let times =
            |times: f64| Duration::try_from_secs_f64(compute * times).unwrap_or(WAIT_MAX).clamp(WAIT_MIN, WAIT_MAX);
        let is_known = engine.block_seconds() > 0.0;
        let (patience, wait) = if is_known { (times(1.0), times(2.0)) } else { (SILENCE_UNKNOWN, WAIT_MAX) };
        let id = WorkId(generate.request);
        let errand = Errand::Request(Box::new(Released { generate, windows: Vec::new() }));
        let deadline = now + wait;
        let held = Held { id, errand, chain, here, end: here, finding: false, touched: false, patience, deadline };
        self.hold(held, engine.state().queue_seconds, engine, levels, now).and_then(Held::release)
    }

    /// Begins to load the blocks of `chain` for a request that will come, if that is worth it. `id`: an unused number.
    pub(crate) fn ahead(&mut self, ahead: Ahead, engine: &Engine, levels: &mut Levels, now: Instant) {
        let Ahead { id, session, request, mut chain, wait } = ahead;
        let count = self.held.len() - self.waiting();
        let here = chain.iter().take_while(|hash| engine.holds(**hash)).count();
        let room = self.room(engine, id);
        if count >= AHEAD_MAX || room == 0 {
            return;
        }
        chain.truncate(here + room);
        let (errand, deadline) =
            (Errand::Ahead { session, request }, now + (wait.min(AHEAD_MOST) * 4).clamp(AHEAD_MIN, AHEAD_MOST));
        let patience = SILENCE_UNKNOWN;
        let held = Held { id, errand, chain, here, end: here, finding: false, touched: false, patience, deadline };
        drop(self.hold(held, wait.as_secs_f64(), engine, levels, now));
    }

    /// Blocks of the device that may be loaded for the prefetch `id`.
    fn room(&self, engine: &Engine, id: WorkId) -> usize {
        let others = self.held.iter().filter(|held| held.generate().is_none() && held.id != id);
        let blocks: usize = others.map(|held| held.end - held.here).sum();
        let share = engine.state().blocks_total as usize / AHEAD_SHARE;
        share.saturating_sub(self.fresh.len() + blocks)
    }

    /// Holds a request or prefetch that has blocks to wait for; gives others back. `hidden`: seconds that it waits
    /// anyway.
    fn hold(
        &mut self,
        mut held: Held,
        hidden: f64,
        engine: &Engine,
        levels: &mut Levels,
        now: Instant,
    ) -> Option<Held> {
        let Held { id, here, .. } = held;
        held.end = here + plan(&held.chain[here..], engine, levels, self.coming.len(), hidden);
        held.end = self.audible(&held, engine, levels, now);
        let from = reach(&held.chain, here, levels);
        let missing = &held.chain[from..];
        let finds = if held.generate().is_some() { FINDS_MAX } else { FINDS_AHEAD_MAX };
        held.finding = missing.len() >= FIND_MIN
            && levels.has_remote()
            && levels.find(id, &missing[..missing.len().min(FIND_MAX)], finds, now);
        if held.end == here && !held.finding {
            return Some(held);
        }
        // Requests that are here go before prefetches.
        let first_ahead = self.held.iter().position(|held| held.generate().is_none());
        let at = first_ahead.filter(|_| held.generate().is_some()).unwrap_or(self.held.len());
        self.held.insert(at, held);
        None
    }

    /// Returns true if prefetched blocks arrived since the last call: no step may report them.
    pub(crate) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.is_news)
    }

    /// Records that a request found these blocks on the device.
    fn found(&mut self, blocks: &[BlockHash]) {
        if !self.fresh.is_empty() {
            self.prefetches.used += blocks.iter().filter(|hash| self.fresh.remove(hash).is_some()).count() as u64;
        }
    }

    /// Ends the prefetch of a request that has come, or will not come.
    pub(crate) fn end_ahead(&mut self, whose: SessionId, number: RequestId) {
        self.held.retain(
            |held| !matches!(held.errand, Errand::Ahead { session, request } if (session, request) == (whose, number)),
        );
    }

    /// Ends the prefetches of a session.
    pub(crate) fn end_session(&mut self, whose: SessionId) {
        self.held.retain(|held| !matches!(held.errand, Errand::Ahead { session, .. } if session == whose));
    }

    /// Hashes of the blocks that a request can read: not the block of the last token, which draws the next, and none
    /// where each row of the prompt is wanted.
    fn chain(&self, generate: &Generate, engine: &Engine) -> Vec<BlockHash> {
        let wants_prompt = generate.sampling.as_ref().is_none_or(|sampling| sampling.prompt_logprobs >= 0);
        let emitted: &[u32] = match generate.choices.as_slice() {
            [only] => &only.emitted,
            _ => &[],
        };
        let tokens = generate.prompt.len() + emitted.len();
        if wants_prompt || tokens <= BLOCK_TOKENS || tokens > engine.context_tokens() {
            return Vec::new();
        }
        let text = [&generate.prompt, emitted].concat();
        BlockHasher::for_request(&generate.salt, &self.numerics).chain(&text[..tokens - 1])
    }

    /// Passes the outcome of a job on to the requests that wait for it.
    pub(crate) fn news(&mut self, news: News, engine: &Engine, levels: &mut Levels) {
        match news {
            News::None => {}
            News::Block(hash, bytes) => {
                self.coming.remove(&hash);
                let wanted = self.held.iter().any(|held| held.chain[held.here..held.end].contains(&hash));
                match bytes {
                    Some(bytes) if wanted => drop(self.arrived.insert(hash, bytes)),
                    Some(_) => {}
                    None => self.give_up(hash),
                }
            }
            News::Found(id) => {
                let (queued, room) = (self.coming.len(), self.room(engine, id));
                if let Some(held) = self.held.iter_mut().find(|held| held.id == id) {
                    held.finding = false;
                    let (hidden, chain) = match held.generate() {
                        Some(_) => (engine.state().queue_seconds, &held.chain[held.here..]),
                        // Other requests may have found their blocks meanwhile.
                        None => (f64::INFINITY, &held.chain[held.here..held.chain.len().min(held.here + room)]),
                    };
                    held.end = held.end.max(held.here + plan(chain, engine, levels, queued, hidden));
                }
            }
        }
    }

    /// Records that a block does not come: requests that wait for it stop in front of it.
    fn give_up(&mut self, hash: BlockHash) {
        for held in &mut self.held {
            if let Some(at) = held.chain[held.here..held.end].iter().position(|block| *block == hash) {
                held.end = held.here + at;
            }
        }
    }

    /// Imports arrived blocks, asks for more, and returns the requests whose wait is over.
    ///
    /// Importing a block evicts another, which goes to the levels: they are locked for moments only.
    pub(crate) fn advance(&mut self, engine: &mut Engine, levels: &Mutex<Levels>, now: Instant) -> Vec<Released> {
        let mut ready = Vec::new();
        self.spare_fewer(engine);
        for at in 0..self.held.len() {
            self.import(at, engine, levels, now);
            self.despair(at, engine, &mut lock(levels), now);
            self.ask(at, engine, &mut lock(levels), now);
            // Blocks that came at once, without a job.
            self.import(at, engine, levels, now);
        }
        let is_ready = |held: &Held| held.here >= held.end && !held.finding;
        let (done, held): (VecDeque<_>, VecDeque<_>) = self.held.drain(..).partition(is_ready);
        self.held = held;
        ready.extend(done.into_iter().filter_map(Held::release));
        let before = self.fresh.len();
        self.fresh.retain(|_, came| now.saturating_duration_since(*came) < FRESH_MAX);
        self.prefetches.unused += (before - self.fresh.len()) as u64;
        let wanted: HashSet<BlockHash> =
            self.held.iter().flat_map(|held| held.chain[held.here..held.end].iter().copied()).collect();
        self.arrived.retain(|hash, _| wanted.contains(hash));
        ready
    }

    /// Number of leading blocks of a chain that are here or in a tier which answers.
    fn audible(&self, held: &Held, engine: &Engine, levels: &Levels, now: Instant) -> usize {
        if !levels.is_silent(now) {
            return held.end;
        }
        let is_silent = |hash: &BlockHash| {
            levels.silence(*hash, now) >= held.patience && !self.arrived.contains_key(hash) && !engine.holds(*hash)
        };
        held.chain[held.here..held.end].iter().position(is_silent).map_or(held.end, |at| held.here + at)
    }

    /// Stops a request's wait for a silent tier, or after its deadline: the rest is computed.
    fn despair(&mut self, at: usize, engine: &Engine, levels: &mut Levels, now: Instant) {
        let held = &self.held[at];
        let is_over = now >= held.deadline;
        let end = if is_over { held.here } else { self.audible(held, engine, levels, now) };
        let finding = held.finding && !is_over && levels.remote_silence(now) < held.patience;
        let missed = (end < held.end).then(|| held.chain[end]);
        if held.generate().is_some() && (missed.is_some() || held.finding && !finding) {
            levels.late(missed);
        }
        let held = &mut self.held[at];
        (held.end, held.finding) = (end, finding);
    }

    /// Ends the sparing of blocks for requests that have started or ended.
    fn spare_fewer(&mut self, engine: &Engine) {
        if !self.spared.is_empty() {
            let here: HashSet<WorkId> = self.held.iter().map(|held| held.id).collect();
            self.spared.retain(|id| here.contains(&id) || engine.awaits(id));
        }
    }

    /// Imports arrived blocks into the device, in order.
    fn import(&mut self, at: usize, engine: &mut Engine, levels: &Mutex<Levels>, now: Instant) {
        let held = &mut self.held[at];
        let is_ahead = held.generate().is_none();
        while held.here < held.end {
            let hash = held.chain[held.here];
            if !engine.holds(hash) {
                let Some(bytes) = self.arrived.remove(&hash) else { return };
                if !std::mem::replace(&mut held.touched, true) {
                    // Later blocks are useless without the ones before them.
                    engine.touch(&held.chain[..held.here]);
                    if !is_ahead {
                        self.spared.add(held.id, &held.chain[..held.here]);
                    }
                }
                let began = Instant::now();
                let parent = held.here.checked_sub(1).map(|parent| held.chain[parent]);
                let is_kept = |block| self.spared.contains(block) || is_ahead && self.fresh.contains_key(&block);
                // A sequence may have evicted the end of the chain; what follows it is useless.
                if parent.is_some_and(|parent| !engine.holds(parent)) || engine.next_evicted().is_some_and(is_kept) {
                    held.end = held.here;
                    return;
                }
                match engine.import(parent, hash, &bytes) {
                    Imported::Stored | Imported::Known => {
                        lock(levels).imported(hash, began.elapsed().as_secs_f64());
                        if is_ahead {
                            self.fresh.insert(hash, now);
                            self.is_news = true;
                        }
                    }
                    Imported::NoRoom | Imported::Refused => {
                        held.end = held.here;
                        return;
                    }
                }
            }
            if held.touched && !is_ahead {
                self.spared.add(held.id, &[hash]);
            }
            held.here += 1;
        }
    }

    /// Requests blocks, as far as the window allows.
    fn ask(&mut self, at: usize, engine: &Engine, levels: &mut Levels, now: Instant) {
        // Stuck loads do not count against the window.
        let stuck = levels.stuck(now);
        let held = &mut self.held[at];
        // Prefetches leave room for requests.
        let window = if held.generate().is_some() { self.window } else { self.window / 2 };
        for block in held.here..held.end {
            let hash = held.chain[block];
            if self.coming.contains(&hash) || self.arrived.contains_key(&hash) || engine.holds(hash) {
                continue;
            }
            if (self.coming.len() + self.arrived.len()).saturating_sub(stuck) >= window
                || levels.silence(hash, now) >= SILENCE_MAX
            {
                return;
            }
            match levels.load(hash, now) {
                Load::Here(bytes) => drop(self.arrived.insert(hash, bytes)),
                Load::Coming => drop(self.coming.insert(hash)),
                Load::Nowhere => {
                    held.end = block;
                    return;
                }
            }
        }
    }

    /// Gives a waiting request back before its blocks have come, as when it is cancelled.
    pub(crate) fn take(&mut self, id: WorkId) -> Option<Released> {
        let at = self.held.iter().position(|held| held.id == id)?;
        self.held.remove(at)?.release()
    }

    /// Gives all waiting requests back, as they came, and forgets the prefetches.
    pub(crate) fn take_all(&mut self) -> Vec<Released> {
        self.held.drain(..).filter_map(Held::release).collect()
    }

    /// Keeps a window for a choice of a waiting request; false if the request does not wait here.
    pub(crate) fn window(&mut self, window: &Window) -> bool {
        let Some(held) = self.held.iter_mut().find(|held| held.id.0 == window.request) else { return false };
        let Errand::Request(request) = &mut held.errand else { return false };
        let Released { generate, windows } = &mut **request;
        match windows.iter_mut().find(|kept| kept.choice == window.choice) {
            Some(kept) => kept.tokens = kept.tokens.saturating_add(window.tokens),
            None if generate.choices.iter().any(|choice| choice.index == window.choice) => windows.push(*window),
            // The request has no such choice.
            None => {}
        }
        true
    }
}

/// Number of leading blocks of `chain` that are here or in a tier.
fn reach(chain: &[BlockHash], here: usize, levels: &Levels) -> usize {
    here + chain[here..].iter().take_while(|hash| levels.seconds(**hash).is_some()).count()
}

/// Number of leading blocks of `chain` that are better loaded than computed, for a request that waits `hidden` seconds
/// anyway.
fn plan(chain: &[BlockHash], engine: &Engine, levels: &mut Levels, queued: usize, hidden: f64) -> usize {
    let loads: Vec<f64> = chain.iter().map_while(|hash| levels.seconds(*hash)).collect();
    let Some(first) = loads.first() else { return 0 };
    // Blocks in flight come first.
    let hidden = (hidden - first * queued as f64).max(0.0);
    let blocks = worth_loading(&loads, engine.block_seconds(), hidden);
    if blocks < loads.len() {
        levels.refused(chain[blocks]);
    }
    blocks
}
