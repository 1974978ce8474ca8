//! Tiers of a modelled engine whose blocks take time to load: a disk of its own, and a store that all engines share.
//!
//! Contents, eviction and the choice between loading and computing are the real plans (`penstock_kv`); the order of
//! loads is that of a worker: a request that is here waits for its blocks while others are computed, and goes before
//! one that is only announced, whose blocks are prefetched. Modelled: one read of a few blocks after another, at the
//! link's bytes per second. Writes cost nothing.

use super::{Engine, Sizes, Speed};
use crate::fleet::ask::Ask;
use penstock_kv::load::{LoadTime, worth_loading};
use penstock_kv::tier::Link;
use penstock_kv::{BlockPool, Placed, SlotId, Spared, TierPool};
use penstock_proto::frames::{KvEvent, Tier, TierState};
use penstock_proto::{BLOCK_TOKENS, BlockHash, WorkId};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

/// Number of blocks in one read.
const READ_BLOCKS: usize = 4;
/// Overhead of a read in seconds: from a disk, from a store.
const READ_SECONDS: [f64; 2] = [1e-4, 1e-3];
/// Limits of a request's wait for blocks, in seconds; the wait is at most twice the time to compute them. This
/// constant and those below are a worker's too.
const WAIT_SECONDS: (f64, f64) = (0.25, 10.0);
/// Least number of missing blocks for which the store is queried, and most blocks of one query.
const FIND: (usize, usize) = (2, 256);
/// Most requests announced to an engine at once for prefetch; further ones are ignored.
const AHEAD_MAX: usize = 64;
/// Divisor of the device's blocks: prefetches take at most that share.
const AHEAD_SHARE: usize = 4;
/// Limits of an announcement's life in seconds, which is four times the predicted wait.
const AHEAD_SECONDS: (f64, f64) = (5.0, 60.0);
/// Seconds after which a prefetched block that no request has found counts as unused.
const FRESH_SECONDS: f64 = 60.0;

/// Store shared by all engines.
pub type Store = Rc<RefCell<TierPool>>;

/// Makes the store, if it has any capacity.
pub fn store(sizes: &Sizes) -> Option<Store> {
    let blocks = sizes.remote_tokens / BLOCK_TOKENS;
    (blocks > 0).then(|| Rc::new(RefCell::new(TierPool::new(Tier::Remote, blocks))))
}

struct Level {
    pool: TierPool,
    token_seconds: f64,
    read_seconds: f64,
    time: LoadTime,
}

/// A request that waits for blocks, or an announced one.
struct Held {
    ask: Ask,
    ahead: bool,
    /// Number of the request's leading blocks that are on the device.
    here: usize,
    /// End of the blocks to load; the rest is computed.
    end: usize,
    /// True if the blocks on the device were marked as used soon.
    touched: bool,
    until: f64,
}

/// Blocks being read, all from one level.
struct Read {
    level: usize,
    blocks: Vec<(BlockHash, SlotId)>,
}

/// Tiers of one engine that take time to load from: disk and the shared store.
pub(super) struct Tiers {
    levels: Vec<Level>,
    store: Option<Store>,
    /// Requests that are here, then announced ones; oldest first.
    held: VecDeque<Held>,
    reading: Option<Read>,
    /// Prefetched blocks that no request has found, with their arrival times.
    fresh: HashMap<BlockHash, f64>,
    /// Blocks of the requests that wait here, or for their start after a load; by their numbers.
    spared: Spared,
}

impl Tiers {
    pub(super) fn new(speed: &Speed, sizes: &Sizes, store: Option<Store>) -> Option<Self> {
        let sizes = [(Tier::Disk, sizes.disk_tokens, speed.disk), (Tier::Remote, sizes.remote_tokens, speed.remote)];
        let level = |((tier, tokens, token_seconds), read_seconds): ((Tier, usize, f64), f64)| Level {
            pool: TierPool::new(tier, tokens / BLOCK_TOKENS),
            token_seconds,
            read_seconds,
            time: LoadTime::default(),
        };
        let levels: Vec<_> = sizes.into_iter().zip(READ_SECONDS).map(level).collect();
        let levels: Vec<_> = levels.into_iter().filter(|level| level.pool.total() > 0).collect();
        let (held, fresh, spared) = Default::default();
        (!levels.is_empty()).then_some(Self { levels, store, held, reading: None, fresh, spared })
    }

    /// Takes a block that leaves the level above `at`.
    pub(super) fn put(&mut self, at: usize, link: Link) {
        let Some(level) = self.levels.get_mut(at) else { return };
        if let Some(store) = self.store.as_ref().filter(|_| level.pool.tier() == Tier::Remote) {
            keep(&mut store.borrow_mut(), link);
        }
        if let Some(evicted) = keep(&mut level.pool, link) {
            self.put(at + 1, evicted);
        }
    }

    /// Queries the store for the blocks of a chain that no level is known to have, from `here` on.
    fn find(&mut self, chain: &[BlockHash], here: usize) {
        let Self { levels, store: Some(store), .. } = self else { return };
        let is_known = |hash: &&BlockHash| levels.iter().any(|level| level.pool.holds(**hash));
        let from = here + chain[here..].iter().take_while(is_known).count();
        if chain.len() - from < FIND.0 {
            return;
        }
        let store = store.borrow();
        let there = chain[from..].iter().take(FIND.1).take_while(|hash| store.holds(**hash)).count();
        let Some(level) = levels.iter_mut().find(|level| level.pool.tier() == Tier::Remote) else { return };
        for block in from..from + there {
            let parent = block.checked_sub(1).map(|parent| chain[parent]);
            keep(&mut level.pool, Link { parent, hash: chain[block] });
        }
    }

    /// Number of leading blocks of `chain` that are better loaded than computed, for a request that waits `hidden`
    /// seconds anyway.
    fn plan(&mut self, chain: &[BlockHash], recompute: f64, hidden: f64) -> usize {
        let at = |hash: &BlockHash| self.levels.iter().position(|level| level.pool.holds(*hash));
        let loads: Vec<f64> = chain.iter().map_while(|hash| Some(self.levels[at(hash)?].time.seconds())).collect();
        let blocks = worth_loading(&loads, recompute, hidden);
        if let Some(level) = chain.get(blocks).filter(|_| blocks < loads.len()).and_then(at) {
            self.levels[level].time.refused();
        }
        blocks
    }

    /// Begins to read the next blocks of a waiting request; returns the seconds that it takes.
    fn begin(&mut self, at: usize, device: &BlockPool) -> Option<f64> {
        let Self { levels, store, held, .. } = self;
        let held = &mut held[at];
        let (mut from, mut blocks) = (0, Vec::new());
        for block in held.here..held.end.min(held.here + READ_BLOCKS) {
            let hash = held.ask.hashes[block];
            if device.find(hash).is_some() {
                break;
            }
            let found = levels.iter_mut().enumerate().find_map(|(at, level)| Some((at, level.pool.load(hash)?)));
            let Some((level, slot)) = found else {
                held.end = block;
                break;
            };
            if !blocks.is_empty() && level != from {
                levels[level].pool.unread(slot);
                break;
            }
            if levels[level].pool.tier() == Tier::Remote && !store.as_ref().is_some_and(|store| touch(store, hash)) {
                // Another engine's blocks took its place.
                levels[level].pool.lost(slot);
                held.end = block;
                break;
            }
            from = level;
            blocks.push((hash, slot));
        }
        if blocks.is_empty() {
            return None;
        }
        let Level { token_seconds, read_seconds, .. } = levels[from];
        let seconds = read_seconds + token_seconds * (blocks.len() * BLOCK_TOKENS) as f64;
        self.reading = Some(Read { level: from, blocks });
        Some(seconds)
    }

    /// Records that a request found these blocks on the device; returns the number of prefetched ones.
    fn found(&mut self, blocks: &[BlockHash]) -> usize {
        if self.fresh.is_empty() { 0 } else { blocks.iter().filter(|hash| self.fresh.remove(hash).is_some()).count() }
    }

    /// Returns true if the device has room for a block behind `parent`, for a request that is here or an announced one: as at a
    /// worker, a load ends where it would evict a block that a waiting request has, or that was prefetched for another one.
    fn has_room(&self, parent: Option<BlockHash>, is_ahead: bool, device: &BlockPool) -> bool {
        let is_kept =
            |block| Some(block) == parent || self.spared.contains(block) || is_ahead && self.fresh.contains_key(&block);
        !device.next_evicted().is_some_and(is_kept)
    }

    fn hold(&mut self, held: Held) {
        let first_ahead = self.held.iter().position(|held| held.ahead);
        let at = first_ahead.filter(|_| !held.ahead).unwrap_or(self.held.len());
        self.held.insert(at, held);
    }

    /// Requests that wait here, with the number of tokens of each that are read.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (&Ask, usize)> {
        self.held.iter().filter(|held| !held.ahead).map(|held| (&held.ask, held.end * BLOCK_TOKENS))
    }

    pub(super) fn states(&self) -> impl Iterator<Item = TierState> {
        self.levels.iter().map(|level| TierState {
            tier: level.pool.tier() as i32,
            blocks_total: level.pool.total() as u64,
            blocks_used: level.pool.used() as u64,
            load_seconds_per_block: level.time.seconds(),
            ..Default::default()
        })
    }

    pub(super) fn take_events(&mut self) -> Vec<KvEvent> {
        self.levels.iter_mut().flat_map(|level| level.pool.take_events()).collect()
    }
}

/// Stores a block; returns the block evicted for it.
fn keep(pool: &mut TierPool, link: Link) -> Option<Link> {
    let Placed::Slot { slot, evicted } = pool.store(link) else { return None };
    pool.stored(slot);
    evicted
}

/// Returns true if the store has a block; marks the block as read.
fn touch(store: &Store, hash: BlockHash) -> bool {
    let mut store = store.borrow_mut();
    let slot = store.load(hash);
    slot.into_iter().for_each(|slot| store.loaded(slot));
    slot.is_some()
}

/// Blocks of a prompt that can be read: its last token is always computed.
fn readable(ask: &Ask) -> &[BlockHash] {
    &ask.hashes[..((ask.input - 1) / BLOCK_TOKENS).min(ask.hashes.len())]
}

impl Engine {
    /// Takes a request, or gives it back if there is nothing to wait for.
    pub(super) fn admit(&mut self, mut ask: Ask, now: f64) -> Option<Ask> {
        if self.tiers.is_none() || ask.given.is_some() || ask.source.is_some() {
            return Some(ask);
        }
        self.end_ahead(ask.request);
        let here = self.blocks_here(&ask);
        let (recompute, hidden) = (self.block_seconds(), self.state().queue_seconds);
        let Some(tiers) = &mut self.tiers else { return Some(ask) };
        let chain = readable(&ask);
        let ahead = tiers.found(&chain[..here]);
        tiers.find(chain, here);
        let end = here + tiers.plan(&chain[here..], recompute, hidden);
        let compute = 2.0 * recompute * (chain.len() - here) as f64;
        let wait = if recompute > 0.0 { compute.clamp(WAIT_SECONDS.0, WAIT_SECONDS.1) } else { WAIT_SECONDS.1 };
        self.sums.prefetched += ahead as u64;
        ask.brought += ahead * BLOCK_TOKENS;
        if end == here {
            return Some(ask);
        }
        tiers.hold(Held { ask, ahead: false, here, end, touched: false, until: now + wait });
        None
    }

    /// Announces a request with its predicted wait in seconds: its blocks may be prefetched.
    pub fn announce(&mut self, ask: Ask, wait: f64, now: f64) {
        let here = self.blocks_here(&ask);
        let (recompute, share) = (self.block_seconds(), self.pool.total() / AHEAD_SHARE);
        let Some(tiers) = &mut self.tiers else { return };
        let before = tiers.fresh.len();
        tiers.fresh.retain(|_, came| now - *came < FRESH_SECONDS);
        self.sums.unused += (before - tiers.fresh.len()) as u64;
        let others = tiers.held.iter().filter(|held| held.ahead);
        let (count, blocks) = others.fold((0, 0), |(count, blocks), held| (count + 1, blocks + held.end - held.here));
        let room = share.saturating_sub(tiers.fresh.len() + blocks);
        if count >= AHEAD_MAX {
            return;
        }
        let chain = readable(&ask);
        tiers.find(chain, here);
        let end = here + tiers.plan(&chain[here..], recompute, wait).min(room);
        if end > here {
            let until = now + (4.0 * wait).clamp(AHEAD_SECONDS.0, AHEAD_SECONDS.1);
            tiers.hold(Held { ask, ahead: true, here, end, touched: false, until });
        }
    }

    /// Ends the announcement of a request that has come, or will not come.
    pub fn end_ahead(&mut self, request: usize) {
        if let Some(tiers) = &mut self.tiers {
            tiers.held.retain(|held| !held.ahead || held.ask.request != request);
        }
    }

    /// Begins the next read, if none is in progress; returns the seconds that it takes.
    pub fn read(&mut self, now: f64) -> Option<f64> {
        self.release(now);
        let device = &self.pool;
        let tiers = self.tiers.as_mut().filter(|tiers| tiers.reading.is_none())?;
        let seconds = (0..tiers.held.len()).find_map(|at| tiers.begin(at, device));
        self.release(now);
        seconds
    }

    /// Ends the read, which took `seconds`. True if all announced blocks of a request are here, which no step may
    /// report.
    pub fn arrived(&mut self, seconds: f64, now: f64) -> bool {
        self.spare_fewer();
        let Some(tiers) = &mut self.tiers else { return false };
        let Some(Read { level, blocks }) = tiers.reading.take() else { return false };
        let from = &mut tiers.levels[level];
        blocks.iter().for_each(|(_, slot)| from.pool.loaded(*slot));
        from.time.measured(blocks.len(), seconds);
        let wants = |held: &Held| {
            let missing = held.ask.hashes[held.here..held.end].iter();
            missing.clone().position(|hash| *hash == blocks[0].0).map(|at| held.here + at)
        };
        let Some((at, first)) = tiers.held.iter().enumerate().find_map(|(at, held)| Some((at, wants(held)?))) else {
            return false;
        };
        let Held { ask, ahead, touched, .. } = &mut tiers.held[at];
        let (hashes, is_ahead, request) = (Arc::clone(&ask.hashes), *ahead, WorkId(ask.request as u64));
        if !std::mem::replace(touched, true) {
            // Later blocks are useless without the ones before them.
            self.pool.touch(hashes[..first].iter().copied());
            if !is_ahead {
                tiers.spared.add(request, &hashes[..first]);
            }
        }
        let came = blocks.iter().zip(first..).take_while(|((hash, _), block)| hashes.get(*block) == Some(hash));
        let came: Vec<usize> = came.map(|(_, block)| block).collect();
        for block in came {
            if !self.import(&hashes, block, is_ahead.then_some(now)) {
                self.tiers.iter_mut().for_each(|tiers| tiers.held[at].end = block);
                break;
            }
            let held = self.tiers.as_mut().map(|tiers| &mut tiers.held[at]).filter(|held| !held.ahead);
            held.into_iter().for_each(|held| held.ask.brought += BLOCK_TOKENS);
            let tiers = self.tiers.as_mut().filter(|_| !is_ahead);
            tiers.into_iter().for_each(|tiers| tiers.spared.add(request, &[hashes[block]]));
        }
        self.collect_events();
        is_ahead && self.tiers.as_ref().is_some_and(|tiers| first + blocks.len() >= tiers.held[at].end)
    }

    /// Ends the sparing of blocks for requests that have started or ended.
    fn spare_fewer(&mut self) {
        let Some(tiers) = self.tiers.as_mut().filter(|tiers| !tiers.spared.is_empty()) else { return };
        let held = tiers.held.iter().filter(|held| !held.ahead).map(|held| &held.ask);
        let asks = held.chain(self.waiting.iter().map(|waiting| &waiting.ask));
        let waiting: HashSet<WorkId> = asks.map(|ask| WorkId(ask.request as u64)).collect();
        tiers.spared.retain(|id| waiting.contains(&id));
    }

    /// Imports a block into the device; false if there is no room.
    fn import(&mut self, hashes: &[BlockHash], block: usize, ahead: Option<f64>) -> bool {
        let hash = hashes[block];
        if self.pool.find(hash).is_some() {
            return true;
        }
        let parent = block.checked_sub(1).map(|parent| hashes[parent]);
        let is_behind = parent.is_none_or(|parent| self.pool.find(parent).is_some() || self.is_known(parent));
        let has_room = self.tiers.as_ref().is_none_or(|tiers| tiers.has_room(parent, ahead.is_some(), &self.pool));
        if !is_behind || !has_room {
            return false;
        }
        let Some(page) = self.allocate() else { return false };
        self.pool.adopt(page, parent, hash);
        if let (Some(now), Some(tiers)) = (ahead, &mut self.tiers) {
            tiers.fresh.insert(hash, now);
        }
        true
    }

    /// Queues the requests that wait for no more blocks.
    fn release(&mut self, now: f64) {
        let Some(tiers) = &mut self.tiers else { return };
        for held in &mut tiers.held {
            let missing = &held.ask.hashes[held.here..held.end.max(held.here)];
            held.here += missing.iter().take_while(|hash| self.pool.find(**hash).is_some()).count();
        }
        let is_done = |held: &Held| held.here >= held.end || now >= held.until;
        let (done, held): (VecDeque<_>, VecDeque<_>) = tiers.held.drain(..).partition(is_done);
        tiers.held = held;
        done.into_iter().filter(|held| !held.ahead).for_each(|held| self.queue(held.ask));
    }

    fn blocks_here(&self, ask: &Ask) -> usize {
        let (device, host) = self.cached_blocks(readable(ask));
        device + host
    }

    /// Seconds to compute a block; 0 if unknown.
    fn block_seconds(&self) -> f64 {
        let rate = self.meter.prefill_tokens_per_second();
        if rate > 0.0 { BLOCK_TOKENS as f64 / rate } else { 0.0 }
    }
}
