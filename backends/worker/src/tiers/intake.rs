//! Requests that wait until blocks of their prompt have come from a tier.
//!
//! A request whose prefix ends on the device and goes on in a tier is held back while its blocks are brought, if that is expected to
//! be quicker than to compute them; then it is submitted and finds them like any cached block. Blocks come one after another through a
//! window that all requests share, oldest request first. Whatever goes wrong (a block is gone, is wrong, does not come in time, finds no
//! page), the request is submitted with what it has, and the engine computes the rest. A store that hangs costs a request no more than
//! computing does: one that has said nothing for so long is not waited for, and who comes while it is silent does not wait at all.
//!
//! A request that still waits in the gateway can be here *ahead* of itself: its blocks are brought while it waits, after those of requests
//! that are here, through half the window, and no more of them than a share of the device. They are cached blocks then like others.

use super::levels::{Levels, Load, News, SILENCE_MAX};
use super::lock;
use penstock_engine::{Engine, Imported};
use penstock_kv::load::worth_loading;
use penstock_proto::frames::{Generate, PrefetchState, Window};
use penstock_proto::{BLOCK_TOKENS, BlockHash, BlockHasher};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Bytes on their way at once; two blocks at least.
const WINDOW_BYTES: usize = 32 << 20;

/// A request waits for blocks no longer than this, and no longer than a multiple of what computing them would take.
const WAIT_MAX: Duration = Duration::from_secs(10);
const WAIT_MIN: Duration = SILENCE_MAX;

/// A tier may be silent for so long where nobody knows how long computing takes, and to who is ahead of itself.
const SILENCE_UNKNOWN: Duration = Duration::from_secs(1);

/// Blocks that the remote tier is asked for at once.
const FIND_MAX: usize = 256;

/// Blocks below which the remote tier is not asked: a round trip for nothing.
const FIND_MIN: usize = 2;

/// Questions to the remote tier that may wait when a request asks another, and when it is ahead of itself: a slow tier is asked less.
const FINDS_MAX: usize = 256;
const FINDS_AHEAD_MAX: usize = 16;

/// Requests that may be here ahead of themselves; what is asked beyond is not done.
const AHEAD_MAX: usize = 64;

/// Their blocks take no more of the device than one in so many.
const AHEAD_SHARE: usize = 4;

/// They are given up after a multiple of what they were predicted to wait, within these limits.
const AHEAD_MIN: Duration = Duration::from_secs(5);
const AHEAD_MOST: Duration = Duration::from_secs(60);

/// A block that came ahead and that no request has found after so long came for nothing.
const FRESH_MAX: Duration = Duration::from_secs(60);

/// What blocks are brought for.
enum Errand {
    /// A request, which waits for them.
    Request(Box<Generate>),
    /// One that will come from a session under this number.
    Ahead { session: u64, request: u64 },
}

struct Held {
    id: u64,
    errand: Errand,
    chain: Vec<BlockHash>,
    /// Blocks that are on the device.
    here: usize,
    /// Blocks that are loaded; the rest is computed.
    end: usize,
    /// The remote tier has been asked and has not answered.
    finding: bool,
    /// What was on the device is the last to be evicted.
    touched: bool,
    /// A tier that says nothing for so long is not waited for.
    patience: Duration,
    deadline: Instant,
}

impl Held {
    fn generate(&self) -> Option<&Generate> {
        match &self.errand {
            Errand::Request(generate) => Some(generate),
            Errand::Ahead { .. } => None,
        }
    }

    fn into_generate(self) -> Option<Generate> {
        match self.errand {
            Errand::Request(generate) => Some(*generate),
            Errand::Ahead { .. } => None,
        }
    }
}

/// A request that will come, and what its blocks are called.
pub(crate) struct Ahead {
    pub(crate) id: u64,
    pub(crate) session: u64,
    pub(crate) request: u64,
    pub(crate) chain: Vec<BlockHash>,
    /// How long it is predicted to wait still.
    pub(crate) wait: Duration,
}

/// All requests that wait.
pub(crate) struct Intake {
    /// Those that are here, then those that are ahead of themselves; oldest first.
    held: VecDeque<Held>,
    /// Blocks on their way.
    coming: HashSet<BlockHash>,
    /// Blocks that came before those in front of them.
    arrived: HashMap<BlockHash, Vec<u8>>,
    /// Blocks that came ahead and that no request has found yet, and when they came.
    fresh: HashMap<BlockHash, Instant>,
    prefetches: PrefetchState,
    /// Something came ahead that nobody was told of.
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
            prefetches: PrefetchState::default(),
            is_news: false,
            window: (WINDOW_BYTES / block_bytes.max(1)).clamp(2, 64),
            numerics: numerics.to_owned(),
        }
    }

    /// Requests that wait here.
    pub(crate) fn waiting(&self) -> usize {
        self.held.iter().filter(|held| held.generate().is_some()).count()
    }

    /// Whether there is nothing to do, whatever time it is.
    pub(crate) fn is_idle(&self) -> bool {
        self.held.is_empty() && self.fresh.is_empty()
    }

    /// What came ahead.
    pub(crate) fn prefetches(&self) -> PrefetchState {
        self.prefetches
    }

    /// Tokens of their prompts that will still be computed.
    pub(crate) fn pending_tokens(&self) -> u64 {
        let left = |held: &Held| Some(held.generate()?.prompt.len().saturating_sub(held.end * BLOCK_TOKENS) as u64);
        self.held.iter().filter_map(left).sum()
    }

    /// Takes a request, or gives it back: there is nothing to wait for.
    pub(crate) fn admit(
        &mut self,
        generate: Generate,
        engine: &mut Engine,
        levels: &mut Levels,
        now: Instant,
    ) -> Option<Generate> {
        let chain = self.chain(&generate, engine);
        let here = chain.iter().take_while(|hash| engine.holds(**hash)).count();
        self.found(&chain[..here]);
        let compute = engine.block_seconds() * (chain.len() - here) as f64;
        let times =
            |times: f64| Duration::try_from_secs_f64(compute * times).unwrap_or(WAIT_MAX).clamp(WAIT_MIN, WAIT_MAX);
        let is_known = engine.block_seconds() > 0.0;
        let (patience, wait) = if is_known { (times(1.0), times(2.0)) } else { (SILENCE_UNKNOWN, WAIT_MAX) };
        let (id, errand) = (generate.request, Errand::Request(Box::new(generate)));
        let deadline = now + wait;
        let held = Held { id, errand, chain, here, end: here, finding: false, touched: false, patience, deadline };
        self.hold(held, engine.state().queue_seconds, engine, levels, now).and_then(Held::into_generate)
    }

    /// Begins to bring the blocks of `chain` for a request that will come later, if that is worth it. `id`: a number that nothing else has.
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

    /// Blocks of the device that may be loaded ahead for one of those that are held.
    fn room(&self, engine: &Engine, id: u64) -> usize {
        let others = self.held.iter().filter(|held| held.generate().is_none() && held.id != id);
        let blocks: usize = others.map(|held| held.end - held.here).sum();
        let share = engine.state().blocks_total as usize / AHEAD_SHARE;
        share.saturating_sub(self.fresh.len() + blocks)
    }

    /// Keeps what has something to wait for; gives back what has not. `hidden`: seconds that it waits anyway.
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
        // A request that is here goes before those that are not.
        let first_ahead = self.held.iter().position(|held| held.generate().is_none());
        let at = first_ahead.filter(|_| held.generate().is_some()).unwrap_or(self.held.len());
        self.held.insert(at, held);
        None
    }

    /// Whether something came ahead since this was last asked: no step may tell of it.
    pub(crate) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.is_news)
    }

    /// A request finds these blocks on the device.
    fn found(&mut self, blocks: &[BlockHash]) {
        if !self.fresh.is_empty() {
            self.prefetches.used += blocks.iter().filter(|hash| self.fresh.remove(hash).is_some()).count() as u64;
        }
    }

    /// A request has come, or will not: nothing more is brought ahead of it.
    pub(crate) fn end_ahead(&mut self, whose: u64, number: u64) {
        self.held.retain(
            |held| !matches!(held.errand, Errand::Ahead { session, request } if (session, request) == (whose, number)),
        );
    }

    /// A session is over.
    pub(crate) fn end_session(&mut self, whose: u64) {
        self.held.retain(|held| !matches!(held.errand, Errand::Ahead { session, .. } if session == whose));
    }

    /// Names of the blocks that a request can read: never the last token, which draws the next, and none where each row of the prompt
    /// is wanted.
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

    /// What a thread did reaches those who wait for it.
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
            News::Found(request) => {
                let (queued, room) = (self.coming.len(), self.room(engine, request));
                if let Some(held) = self.held.iter_mut().find(|held| held.id == request) {
                    held.finding = false;
                    let (hidden, chain) = match held.generate() {
                        Some(_) => (engine.state().queue_seconds, &held.chain[held.here..]),
                        // Meanwhile others may have found theirs.
                        None => (f64::INFINITY, &held.chain[held.here..held.chain.len().min(held.here + room)]),
                    };
                    held.end = held.end.max(held.here + plan(chain, engine, levels, queued, hidden));
                }
            }
        }
    }

    /// A block does not come: those who wait for it go no further.
    fn give_up(&mut self, hash: BlockHash) {
        for held in &mut self.held {
            if let Some(at) = held.chain[held.here..held.end].iter().position(|block| *block == hash) {
                held.end = held.here + at;
            }
        }
    }

    /// Brings blocks in, asks for more, and returns the requests that wait for nothing any more.
    ///
    /// Taking a block in evicts another, which goes to the levels: they are locked for moments only.
    pub(crate) fn advance(&mut self, engine: &mut Engine, levels: &Mutex<Levels>, now: Instant) -> Vec<Generate> {
        let mut ready = Vec::new();
        for at in 0..self.held.len() {
            self.import(at, engine, levels, now);
            self.despair(at, engine, &mut lock(levels), now);
            self.ask(at, engine, &mut lock(levels), now);
            // What came at once.
            self.import(at, engine, levels, now);
        }
        let is_ready = |held: &Held| held.here >= held.end && !held.finding;
        let (done, held): (VecDeque<_>, VecDeque<_>) = self.held.drain(..).partition(is_ready);
        self.held = held;
        ready.extend(done.into_iter().filter_map(Held::into_generate));
        let before = self.fresh.len();
        self.fresh.retain(|_, came| now.saturating_duration_since(*came) < FRESH_MAX);
        self.prefetches.unused += (before - self.fresh.len()) as u64;
        let wanted: HashSet<BlockHash> =
            self.held.iter().flat_map(|held| held.chain[held.here..held.end].iter().copied()).collect();
        self.arrived.retain(|hash, _| wanted.contains(hash));
        ready
    }

    /// Blocks of a chain up to the first that is neither here nor to be had from a tier which answers.
    fn audible(&self, held: &Held, engine: &Engine, levels: &Levels, now: Instant) -> usize {
        if !levels.is_silent(now) {
            return held.end;
        }
        let is_silent = |hash: &BlockHash| {
            levels.silence(*hash, now) >= held.patience && !self.arrived.contains_key(hash) && !engine.holds(*hash)
        };
        held.chain[held.here..held.end].iter().position(is_silent).map_or(held.end, |at| held.here + at)
    }

    /// What a silent tier, or time, does not bring is computed.
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

    /// Takes into the device what has come, in order.
    fn import(&mut self, at: usize, engine: &mut Engine, levels: &Mutex<Levels>, now: Instant) {
        let held = &mut self.held[at];
        let is_ahead = held.generate().is_none();
        while held.here < held.end {
            let hash = held.chain[held.here];
            if !engine.holds(hash) {
                let Some(bytes) = self.arrived.remove(&hash) else { return };
                if !std::mem::replace(&mut held.touched, true) {
                    // What is brought is of no use without what is before it.
                    engine.touch(&held.chain[..held.here]);
                }
                let began = Instant::now();
                let parent = held.here.checked_sub(1).map(|parent| held.chain[parent]);
                match engine.import(parent, hash, &bytes) {
                    Imported::Stored | Imported::Known => {
                        lock(levels).imported(hash, began.elapsed().as_secs_f64());
                        if is_ahead {
                            self.fresh.insert(hash, now);
                            self.is_news = true;
                        }
                    }
                    Imported::NoRoom | Imported::Refused => held.end = held.here,
                }
            }
            held.here += 1;
        }
    }

    /// Asks for blocks, as far as the window allows.
    fn ask(&mut self, at: usize, engine: &Engine, levels: &mut Levels, now: Instant) {
        // What does not come keeps nobody's place.
        let stuck = levels.stuck(now);
        let held = &mut self.held[at];
        // What is not needed yet leaves room for what is.
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

    /// Gives a request back before its time.
    pub(crate) fn take(&mut self, id: u64) -> Option<Generate> {
        let at = self.held.iter().position(|held| held.id == id)?;
        self.held.remove(at)?.into_generate()
    }

    /// Gives all requests back.
    pub(crate) fn take_all(&mut self) -> Vec<Generate> {
        self.held.drain(..).filter_map(Held::into_generate).collect()
    }

    /// More tokens are welcome of a request that waits. False: it does not wait here.
    pub(crate) fn window(&mut self, window: &Window) -> bool {
        let Some(held) = self.held.iter_mut().find(|held| held.id == window.request) else { return false };
        let Errand::Request(generate) = &mut held.errand else { return false };
        // One number for all choices: the most generous one.
        if generate.window > 0 {
            generate.window = generate.window.saturating_add(window.tokens);
        }
        true
    }
}

/// Blocks from the first of `chain` that a tier has.
fn reach(chain: &[BlockHash], here: usize, levels: &Levels) -> usize {
    here + chain[here..].iter().take_while(|hash| levels.seconds(**hash).is_some()).count()
}

/// How many of the first blocks of `chain` are better loaded than computed by who waits for `hidden` seconds anyway.
fn plan(chain: &[BlockHash], engine: &Engine, levels: &mut Levels, queued: usize, hidden: f64) -> usize {
    let loads: Vec<f64> = chain.iter().map_while(|hash| levels.seconds(*hash)).collect();
    let Some(first) = loads.first() else { return 0 };
    // Those on their way come first.
    let hidden = (hidden - first * queued as f64).max(0.0);
    let blocks = worth_loading(&loads, engine.block_seconds(), hidden);
    if blocks < loads.len() {
        levels.refused(chain[blocks]);
    }
    blocks
}
