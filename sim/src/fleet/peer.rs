//! Placement rules that bind at once, for comparison: published rules of other routers, and two with impossible
//! knowledge.
//!
//! The rules see the true state of engines, without lag or noise, where the originals get events or polls; the
//! product's router sees frames, one step old, and fitted times.

use super::ask::Ask;
use super::engine::Engine;
use super::placement::Bound;
use crate::random::Random;
use penstock_proto::{BLOCK_TOKENS, BlockHash};
use std::collections::{HashMap, HashSet, VecDeque};

/// A placement rule to compare the router with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Longest known prefix if it covers half of the prompt, unless that engine is far above the mean; as smg 1.13 does.
    LongestMatch,
    /// Blocks to prefill minus blocks cached, plus blocks in decode; the default of Dynamo 1.6.
    BlockCost,
    /// Least queue plus own prefill; as in Mooncake's conductor without transfers.
    LeastTtft,
    /// The router's cost with true values in place of reported ones.
    Oracle,
    /// Ideal case as an upper bound for routers: all engines share one prefix cache of unlimited size without transfer
    /// cost, and each request goes to the engine with the least pending work.
    Bound,
    /// The engine that served the request in the record.
    Recorded,
    /// This gateway's rule for foreign servers, with [`Foreign`]: caches are known from their events.
    ForeignEvents,
    /// This gateway's rule for foreign servers without events: blocks sent to a server are believed to be there.
    ForeignGuess,
}

/// Weights of the cost of a foreign server, in prompt tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Foreign {
    /// Cost of an own prompt token for later requests.
    pub own: f64,
    /// Cost of an own prompt token for each answer in progress there.
    pub harm: f64,
    /// Cost of one answer in progress at the server.
    pub answer: f64,
}

impl Default for Foreign {
    fn default() -> Self {
        Self { own: 1.0, harm: 0.2, answer: 64.0 }
    }
}

/// Most sent blocks that a rule without events remembers, over all engines.
const REMEMBERED_MAX: usize = (1 << 26) / 4 / BLOCK_TOKENS;

struct Sent {
    engine: usize,
    uncached: f64,
    hashes: std::sync::Arc<[BlockHash]>,
    prefills: bool,
}

/// A rule with its state: queued requests, and what it has sent where.
pub struct Peer {
    rule: Rule,
    foreign: Foreign,
    random: Random,
    alive: Vec<bool>,
    asks: VecDeque<Ask>,
    sent: HashMap<usize, Sent>,
    requests: Vec<usize>,
    prefill_tokens: Vec<f64>,
    /// Prompt blocks of open requests, and of uncomputed ones, per engine.
    active: Vec<HashMap<BlockHash, u32>>,
    promised: Vec<HashMap<BlockHash, u32>>,
    memory: Memory,
    /// Blocks in the shared cache of [`Rule::Bound`]; empty under other rules.
    shared: HashSet<BlockHash>,
}

impl Peer {
    /// Creates the rule for engines `0..engines`, none of them alive so far.
    pub fn new(rule: Rule, foreign: Foreign, engines: usize, seed: u64) -> Self {
        Self {
            rule,
            foreign,
            random: Random::new(seed),
            alive: vec![false; engines],
            asks: VecDeque::new(),
            sent: HashMap::new(),
            requests: vec![0; engines],
            prefill_tokens: vec![0.0; engines],
            active: vec![HashMap::new(); engines],
            promised: vec![HashMap::new(); engines],
            memory: Memory::default(),
            shared: HashSet::new(),
        }
    }

    /// Adds an engine that may receive requests from now on.
    pub fn join(&mut self, engine: usize) {
        self.alive[engine] = true;
    }

    /// Removes a lost engine, with its requests and what was known of its cache.
    pub fn leave(&mut self, engine: usize) {
        self.alive[engine] = false;
        let lost: Vec<usize> =
            self.sent.iter().filter(|(_, sent)| sent.engine == engine).map(|(request, _)| *request).collect();
        lost.into_iter().for_each(|request| self.end(request));
        self.memory.forget(engine);
    }

    /// Queues a request; an earlier attempt of it counts as ended.
    pub fn enqueue(&mut self, ask: Ask) {
        self.end(ask.request);
        self.asks.push_back(ask);
    }

    /// Records the first token of a request.
    pub fn first(&mut self, request: usize) {
        let Some(sent) = self.sent.get_mut(&request) else { return };
        if std::mem::replace(&mut sent.prefills, false) {
            self.prefill_tokens[sent.engine] -= sent.uncached;
            less(&mut self.promised[sent.engine], &sent.hashes);
        }
    }

    /// Records the end of a request, in whatever way it ended.
    pub fn end(&mut self, request: usize) {
        self.first(request);
        if let Some(sent) = self.sent.remove(&request) {
            self.requests[sent.engine] -= 1;
            less(&mut self.active[sent.engine], &sent.hashes);
        }
    }

    /// Places the oldest queued request; `None` without a request or a living engine.
    pub fn next(&mut self, engines: &[Engine]) -> Option<Bound> {
        if !self.alive.contains(&true) {
            return None;
        }
        let ask = self.asks.pop_front()?;
        let engine = self.choose(&ask, engines);
        let hit = self.hit(&ask, engine, engines);
        self.memory.insert(&ask.hashes, engine);
        self.requests[engine] += 1;
        let uncached = (ask.input - hit) as f64;
        self.prefill_tokens[engine] += uncached;
        for hash in ask.hashes.iter() {
            *self.active[engine].entry(*hash).or_default() += 1;
            *self.promised[engine].entry(*hash).or_default() += 1;
        }
        let sent = Sent { engine, uncached, hashes: ask.hashes.clone(), prefills: true };
        self.sent.insert(ask.request, sent);
        Some(Bound { request: ask.request, engine, cached: hit, source: None, turn: 0 })
    }

    /// Prompt tokens that the shared cache of [`Rule::Bound`] has.
    pub fn given(&mut self, ask: &Ask) -> Option<usize> {
        (self.rule == Rule::Bound).then(|| {
            let known = ask.hashes.iter().take_while(|hash| self.shared.contains(hash)).count();
            self.shared.extend(ask.hashes.iter().copied());
            (known * BLOCK_TOKENS).min(ask.input - 1)
        })
    }

    fn hit(&self, ask: &Ask, engine: usize, engines: &[Engine]) -> usize {
        let (device, host) = engines[engine].cached_blocks(&ask.hashes);
        ((device + host) * BLOCK_TOKENS).min(ask.input - 1)
    }

    fn choose(&mut self, ask: &Ask, engines: &[Engine]) -> usize {
        match self.rule {
            Rule::LongestMatch => self.longest_match(ask),
            Rule::BlockCost => self.least(|peer, engine| peer.block_cost(ask, engine, engines)),
            Rule::LeastTtft => self.least(|peer, engine| {
                let hit = peer.hit(ask, engine, engines);
                engines[engine].pending_seconds() + engines[engine].speed().prefill_seconds(ask.input - hit, hit)
            }),
            Rule::Oracle => self.least(|peer, engine| peer.oracle(ask, &engines[engine], engine)),
            Rule::Recorded => {
                let there = ask.recorded.filter(|engine| self.alive.get(*engine) == Some(&true));
                there.unwrap_or_else(|| self.least(|peer, engine| peer.requests[engine] as f64))
            }
            Rule::ForeignEvents => self.least(|peer, engine| {
                let (device, host) = engines[engine].cached_blocks(&ask.hashes);
                peer.foreign(ask, engine, device as f64 + host as f64 / 2.0)
            }),
            Rule::ForeignGuess => {
                self.least(|peer, engine| peer.foreign(ask, engine, peer.memory.depth(&ask.hashes, engine) as f64))
            }
            Rule::Bound => {
                self.least(|_, engine| engines[engine].pending_seconds() + 3.0 * engines[engine].decode_seconds())
            }
        }
    }

    /// Living engine of least cost; a random one of equals.
    fn least(&mut self, cost: impl Fn(&Self, usize) -> f64) -> usize {
        let mut best = (f64::INFINITY, Vec::new());
        for engine in (0..self.alive.len()).filter(|engine| self.alive[*engine]) {
            let cost = cost(self, engine);
            if cost < best.0 - 1e-12 {
                best = (cost, vec![engine]);
            } else if cost <= best.0 + 1e-12 {
                best.1.push(engine);
            }
        }
        self.random.pick(&best.1)
    }

    fn longest_match(&mut self, ask: &Ask) -> usize {
        let (depth, holders) = self.memory.deepest(&ask.hashes);
        let fleet = self.alive.iter().filter(|alive| **alive).count() as f64;
        let mean = self.requests.iter().sum::<usize>() as f64 / fleet;
        let least = |peer: &Self, engine: usize| peer.requests[engine] as f64;
        if (depth * BLOCK_TOKENS) as f64 <= 0.5 * ask.input as f64 || holders.is_empty() {
            return self.least(least);
        }
        let among = |peer: &Self, engine: usize| {
            if holders.contains(&engine) { peer.requests[engine] as f64 } else { 1e18 }
        };
        let best = self.least(among);
        let load = self.requests[best] as f64;
        if load > 1.1 * mean && load > mean + 32.0 { self.least(least) } else { best }
    }

    fn block_cost(&self, ask: &Ask, engine: usize, engines: &[Engine]) -> f64 {
        let (overlap, _) = engines[engine].cached_blocks(&ask.hashes);
        let prefill = (self.prefill_tokens[engine] + ask.input as f64) / BLOCK_TOKENS as f64;
        let active = &self.active[engine];
        let new = ask.hashes.iter().filter(|hash| !active.contains_key(hash)).count();
        (prefill - overlap as f64).max(0.0) + (active.len() + new) as f64
    }

    /// Cost of a foreign server, as `relay::balance` computes it.
    fn foreign(&self, ask: &Ask, engine: usize, blocks: f64) -> f64 {
        let own = (ask.input as f64 - blocks * BLOCK_TOKENS as f64).max(1.0);
        let Foreign { own: later, harm, answer } = self.foreign;
        let busy = self.requests[engine] as f64;
        self.prefill_tokens[engine] + own * (1.0 + later) + harm * own * busy + answer * busy
    }

    fn oracle(&self, ask: &Ask, truth: &Engine, engine: usize) -> f64 {
        let (device, host) = truth.cached_blocks(&ask.hashes);
        let known = device + host;
        let promised = &self.promised[engine];
        let hit = known + ask.hashes[known..].iter().take_while(|hash| promised.contains_key(hash)).count();
        let cached = (hit * BLOCK_TOKENS).min(ask.input - 1);
        let speed = truth.speed();
        let own = speed.prefill_seconds(ask.input - cached, cached) + speed.host * (host * BLOCK_TOKENS) as f64;
        let (decoding, _) = truth.loads();
        let more = (ask.input + 256).div_ceil(BLOCK_TOKENS) - hit;
        let pressure = 40.0 * (truth.fill(more) - 0.9).max(0.0);
        truth.pending_seconds() + 3.0 * own + 0.05 * own * decoding as f64 + pressure + 20.0 * truth.decode_seconds()
    }
}

fn less(counts: &mut HashMap<BlockHash, u32>, hashes: &[BlockHash]) {
    for hash in hashes {
        if let Some(count) = counts.get_mut(hash) {
            *count -= 1;
            if *count == 0 {
                counts.remove(hash);
            }
        }
    }
}

/// Blocks sent to each engine, oldest forgotten first: the index of a rule without events.
#[derive(Default)]
struct Memory {
    holders: HashMap<BlockHash, Vec<(usize, u64)>>,
    order: VecDeque<(BlockHash, usize, u64)>,
    size: usize,
    clock: u64,
}

impl Memory {
    fn insert(&mut self, hashes: &[BlockHash], engine: usize) {
        self.clock += 1;
        for hash in hashes {
            let holders = self.holders.entry(*hash).or_default();
            match holders.iter_mut().find(|(holder, _)| *holder == engine) {
                Some(holder) => holder.1 = self.clock,
                None => {
                    holders.push((engine, self.clock));
                    self.size += 1;
                }
            }
            self.order.push_back((*hash, engine, self.clock));
        }
        while self.size > REMEMBERED_MAX {
            let Some((hash, engine, clock)) = self.order.pop_front() else { break };
            self.drop_holder(hash, |(holder, at)| *holder == engine && *at <= clock);
        }
    }

    fn drop_holder(&mut self, hash: BlockHash, which: impl Fn(&(usize, u64)) -> bool) {
        if let Some(holders) = self.holders.get_mut(&hash) {
            let before = holders.len();
            holders.retain(|holder| !which(holder));
            self.size -= before - holders.len();
            if holders.is_empty() {
                self.holders.remove(&hash);
            }
        }
    }

    fn forget(&mut self, engine: usize) {
        let hashes: Vec<BlockHash> = self.holders.keys().copied().collect();
        hashes.into_iter().for_each(|hash| self.drop_holder(hash, |(holder, _)| *holder == engine));
    }

    /// Number of leading blocks that an engine was sent.
    fn depth(&self, hashes: &[BlockHash], engine: usize) -> usize {
        let was_sent = |hash: &&BlockHash| {
            self.holders.get(hash).is_some_and(|holders| holders.iter().any(|(holder, _)| *holder == engine))
        };
        hashes.iter().take_while(was_sent).count()
    }

    /// Depth of the deepest known block, and the engines that were sent it.
    fn deepest(&self, hashes: &[BlockHash]) -> (usize, Vec<usize>) {
        let known = hashes.iter().map_while(|hash| self.holders.get(hash));
        known
            .enumerate()
            .last()
            .map_or((0, Vec::new()), |(at, holders)| (at + 1, holders.iter().map(|(engine, _)| *engine).collect()))
    }
}
