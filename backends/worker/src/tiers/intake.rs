//! Requests that wait until blocks of their prompt have come from a tier.
//!
//! A request whose prefix ends on the device and goes on in a tier is held back while its blocks are brought, if that is expected to
//! be quicker than to compute them; then it is submitted and finds them like any cached block. Blocks come one after another through a
//! window that all requests share, oldest request first. Whatever goes wrong (a block is gone, is wrong, does not come in time, finds no
//! page), the request is submitted with what it has, and the engine computes the rest.

use super::levels::{Levels, Load, News};
use super::lock;
use penstock_engine::{Engine, Imported};
use penstock_kv::load::worth_loading;
use penstock_proto::frames::{Generate, Window};
use penstock_proto::{BLOCK_TOKENS, BlockHash, BlockHasher};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Bytes on their way at once; two blocks at least.
const WINDOW_BYTES: usize = 32 << 20;

/// A request waits for blocks no longer than this, and no longer than a multiple of what computing them would take.
const WAIT_MAX: Duration = Duration::from_secs(10);
const WAIT_MIN: Duration = Duration::from_millis(250);

/// Blocks that the remote tier is asked for at once.
const FIND_MAX: usize = 256;

/// Blocks below which the remote tier is not asked: a round trip for nothing.
const FIND_MIN: usize = 2;

struct Held {
    id: u64,
    generate: Generate,
    chain: Vec<BlockHash>,
    /// Blocks that are on the device.
    here: usize,
    /// Blocks that are loaded; the rest is computed.
    end: usize,
    /// The remote tier has been asked and has not answered.
    finding: bool,
    deadline: Instant,
}

/// All requests that wait.
pub(crate) struct Intake {
    held: VecDeque<Held>,
    /// Blocks on their way.
    coming: HashSet<BlockHash>,
    /// Blocks that came before those in front of them.
    arrived: HashMap<BlockHash, Vec<u8>>,
    window: usize,
    numerics: String,
}

impl Intake {
    pub(crate) fn new(block_bytes: usize, numerics: &str) -> Self {
        Self {
            held: VecDeque::new(),
            coming: HashSet::new(),
            arrived: HashMap::new(),
            window: (WINDOW_BYTES / block_bytes.max(1)).clamp(2, 64),
            numerics: numerics.to_owned(),
        }
    }

    /// Requests that wait here.
    pub(crate) fn waiting(&self) -> usize {
        self.held.len()
    }

    /// Tokens of their prompts that will still be computed.
    pub(crate) fn pending_tokens(&self) -> u64 {
        self.held.iter().map(|held| held.generate.prompt.len().saturating_sub(held.end * BLOCK_TOKENS) as u64).sum()
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
        let end = here + plan(&chain[here..], engine, levels, self.coming.len());
        let missing = chain.len() - reach(&chain, here, levels);
        let finding = missing >= FIND_MIN && levels.has_remote() && {
            let from = chain.len() - missing;
            levels.find(generate.request, &chain[from..chain.len().min(from + FIND_MAX)])
        };
        if end == here && !finding {
            return Some(generate);
        }
        let compute = Duration::try_from_secs_f64(engine.block_seconds() * 2.0 * (chain.len() - here) as f64);
        let wait = compute.unwrap_or(WAIT_MAX).clamp(WAIT_MIN, WAIT_MAX);
        let wait = if engine.block_seconds() > 0.0 { wait } else { WAIT_MAX };
        let id = generate.request;
        self.held.push_back(Held { id, generate, chain, here, end, finding, deadline: now + wait });
        None
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
                let queued = self.coming.len();
                if let Some(held) = self.held.iter_mut().find(|held| held.id == request) {
                    held.finding = false;
                    held.end = held.end.max(held.here + plan(&held.chain[held.here..], engine, levels, queued));
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
            self.import(at, engine, levels);
            self.ask(at, engine, &mut lock(levels));
            // What came at once.
            self.import(at, engine, levels);
        }
        let is_ready = |held: &Held| now >= held.deadline || held.here >= held.end && !held.finding;
        let (done, held): (VecDeque<_>, VecDeque<_>) = self.held.drain(..).partition(is_ready);
        self.held = held;
        ready.extend(done.into_iter().map(|held| held.generate));
        let wanted: HashSet<BlockHash> =
            self.held.iter().flat_map(|held| held.chain[held.here..held.end].iter().copied()).collect();
        self.arrived.retain(|hash, _| wanted.contains(hash));
        ready
    }

    /// Takes into the device what has come, in order.
    fn import(&mut self, at: usize, engine: &mut Engine, levels: &Mutex<Levels>) {
        let held = &mut self.held[at];
        while held.here < held.end {
            let hash = held.chain[held.here];
            if !engine.holds(hash) {
                let Some(bytes) = self.arrived.remove(&hash) else { return };
                let began = Instant::now();
                let parent = held.here.checked_sub(1).map(|parent| held.chain[parent]);
                match engine.import(parent, hash, &bytes) {
                    Imported::Stored | Imported::Known => lock(levels).imported(hash, began.elapsed().as_secs_f64()),
                    Imported::NoRoom | Imported::Refused => held.end = held.here,
                }
            }
            held.here += 1;
        }
    }

    /// Asks for blocks, as far as the window allows.
    fn ask(&mut self, at: usize, engine: &Engine, levels: &mut Levels) {
        let held = &mut self.held[at];
        for block in held.here..held.end {
            let hash = held.chain[block];
            if self.coming.contains(&hash) || self.arrived.contains_key(&hash) || engine.holds(hash) {
                continue;
            }
            if self.coming.len() + self.arrived.len() >= self.window {
                return;
            }
            match levels.load(hash) {
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
        self.held.remove(at).map(|held| held.generate)
    }

    /// Gives all requests back.
    pub(crate) fn take_all(&mut self) -> Vec<Generate> {
        self.held.drain(..).map(|held| held.generate).collect()
    }

    /// More tokens are welcome of a request that waits. False: it does not wait here.
    pub(crate) fn window(&mut self, window: &Window) -> bool {
        let Some(held) = self.held.iter_mut().find(|held| held.id == window.request) else { return false };
        // One number for all choices: the most generous one.
        if held.generate.window > 0 {
            held.generate.window = held.generate.window.saturating_add(window.tokens);
        }
        true
    }
}

/// Blocks from the first of `chain` that a tier has.
fn reach(chain: &[BlockHash], here: usize, levels: &Levels) -> usize {
    here + chain[here..].iter().take_while(|hash| levels.seconds(**hash).is_some()).count()
}

/// How many of the first blocks of `chain` are better loaded than computed.
fn plan(chain: &[BlockHash], engine: &Engine, levels: &mut Levels, queued: usize) -> usize {
    let loads: Vec<f64> = chain.iter().map_while(|hash| levels.seconds(*hash)).collect();
    let Some(first) = loads.first() else { return 0 };
    // Those on their way come first; what waits for the engine anyway hides the time.
    let queue = first * queued as f64;
    let hidden = engine.state().queue_seconds - queue;
    let blocks = worth_loading(&loads, engine.block_seconds(), hidden.max(0.0));
    if blocks < loads.len() {
        levels.refused(chain[blocks]);
    }
    blocks
}
