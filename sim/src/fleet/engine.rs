//! A modelled engine: continuous batching over a real [`BlockPool`], with times from a formula.
//!
//! Requests start in order of arrival, when pages for prompt and answer are there (so nothing is preempted). A step serves
//! all decodes, then prefills in order, within one token budget. Blocks can be read by others once computed. The host tier
//! takes what the device evicts and gives it back at [`Speed::host`] seconds a token.
//!
//! A sequence whose KV comes from another engine holds its pages and waits ([`Engine::take_wants`]) until it has come
//! ([`Engine::arrive`]), then computes what is missing. A prompt that is computed for another engine ends with its prefill.

mod tiers;
mod truth;

pub use tiers::{Store, store};

use super::ask::{Ask, Lent, Source};
use super::meter::{Meter, StepWork};
use penstock_kv::tier::Link;
use penstock_kv::{BlockPool, Evicted, PageId};
use penstock_proto::frames::{Batch, EngineState, KvEvent, Role, Tier, TierState, TransferState};
use penstock_proto::{BLOCK_TOKENS, BlockHash};
use std::collections::VecDeque;

/// Bytes of a token's KV: 80 layers of 8 heads of 128, two bytes each, K and V.
pub const TOKEN_BYTES: f64 = 327_680.0;

/// Durations of a modelled engine's work, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Seconds of every step, regardless of its work.
    pub base: f64,
    /// Seconds of a step per prompt token in it, without attention.
    pub prefill: f64,
    /// Seconds of a step per prompt token and token before it (attention).
    pub attention: f64,
    /// Seconds of a step per decoding sequence in it.
    pub sequence: f64,
    /// Seconds per token of a decoding sequence's context.
    pub context: f64,
    /// Seconds per token read from the host tier.
    pub host: f64,
    /// Seconds per token read from disk.
    pub disk: f64,
    /// Seconds per token read from the shared store.
    pub remote: f64,
}

impl Default for Speed {
    /// Values of a dense model of 70 billion parameters on a node of eight GPUs.
    fn default() -> Self {
        Self {
            base: 0.012,
            prefill: 1.0 / 14_000.0,
            attention: 1.35e-9,
            sequence: 40e-6,
            context: 16e-9,
            host: 1.0 / 150_000.0,
            disk: TOKEN_BYTES / 6e9,
            remote: TOKEN_BYTES / 10e9,
        }
    }
}

impl Speed {
    /// Seconds to compute `tokens` behind `context` others.
    pub fn prefill_seconds(&self, tokens: usize, context: usize) -> f64 {
        let n = tokens as f64;
        n * self.prefill + self.attention * n * (context as f64 + n / 2.0)
    }

    /// Seconds that a step with this work takes, without noise.
    pub fn step_seconds(&self, work: &StepWork) -> f64 {
        self.base
            + self.prefill * work.prefill as f64
            + self.attention * work.attention
            + self.sequence * work.decodes as f64
            + self.context * work.context as f64
            + self.host * work.loaded as f64
    }
}

/// Capacities of an engine: KV tokens of each tier, and limits of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// KV tokens that fit the device.
    pub kv_tokens: usize,
    /// KV tokens in the host tier; 0 switches it off.
    pub host_tokens: usize,
    /// KV tokens on its disk; 0 switches that tier off.
    pub disk_tokens: usize,
    /// KV tokens in the store that all engines share; 0 switches it off.
    pub remote_tokens: usize,
    /// Most rows of a step, prefill and decode together.
    pub batch_tokens: usize,
    /// Most sequences that run at once.
    pub sequences_max: usize,
    /// Share of the pages that idle, reused blocks may hold against others.
    pub active_share: f64,
}

impl Sizes {
    /// Returns true if there is a tier whose blocks take time to load.
    pub fn has_slow_tiers(&self) -> bool {
        self.disk_tokens + self.remote_tokens > 0
    }
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            kv_tokens: 1_000_000,
            host_tokens: 0,
            disk_tokens: 0,
            remote_tokens: 0,
            batch_tokens: 8192,
            sequences_max: 256,
            active_share: 0.25,
        }
    }
}

struct Sequence {
    ask: Ask,
    table: Vec<PageId>,
    sealed: usize,
    /// Number of prompt tokens whose KV this engine has: computed here, found in a cache, or received from another
    /// engine.
    computed: usize,
    produced: usize,
    cached: usize,
    /// Number of tokens that its first step reads from the host tier.
    loads: usize,
    chunk: usize,
    /// True if KV of the sequence is being transferred from another engine.
    awaits: bool,
    /// Number of prompt tokens sent to the engine that it is computed for.
    moved: usize,
}

impl Sequence {
    fn decodes(&self) -> bool {
        self.computed >= self.ask.input
    }

    fn ended(&self) -> bool {
        self.decodes() && (self.ask.lent.is_some() || self.produced >= self.ask.output)
    }
}

/// A request whose KV must come from another engine.
#[derive(Clone, Debug)]
pub struct Want {
    /// The request, as sent to the engine that lacks the KV.
    pub ask: Ask,
    /// Engine that computes or has the missing KV.
    pub source: Source,
    /// Number of prompt tokens whose KV the asking engine has.
    pub have: usize,
}

/// KV that a step computed for another engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moved {
    /// Index of the engine that receives the KV.
    pub to: usize,
    /// Index of the request in the trace.
    pub request: usize,
    /// Attempt of the request that the KV is for.
    pub attempt: u32,
    /// Number of prompt tokens whose KV leaves now.
    pub tokens: usize,
    /// True if this was the last part of the request's KV.
    pub done: bool,
}

/// A request in the queue that has not started.
struct Waiting {
    ask: Ask,
    /// Prompt tokens of the request that were cached when it arrived.
    hint: usize,
    /// Pages that the request needed beyond cached ones when it arrived.
    pages: usize,
}

/// A token of a step, or the end of a request that cannot be served.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Emitted {
    /// Index of the request in the trace.
    pub request: usize,
    /// Attempt of the request that emits the token.
    pub attempt: u32,
    /// Number of cached prompt tokens, set with the first token of an attempt.
    pub cached: Option<usize>,
    /// Part of `cached` that came from disk or the shared store.
    pub brought: usize,
    /// True if this is the request's last token.
    pub last: bool,
    /// True if the request fits in no engine of this size.
    pub refused: bool,
}

/// Counters over an engine's life.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    /// Seconds of the simulation spent in steps.
    pub busy: f64,
    /// Prompt tokens computed, without those read from a cache.
    pub prefilled: u64,
    /// Prompt tokens of started sequences, cached or not.
    pub looked_up: u64,
    /// Part of `looked_up` that was read from a cache.
    pub hits: u64,
    /// Part of the hits that was read from the host tier.
    pub host_hits: u64,
    /// Part of the hits that was loaded from disk or the shared store.
    pub tier_hits: u64,
    /// Prefetched blocks that a request found.
    pub prefetched: u64,
    /// Prefetched blocks that no request found.
    pub unused: u64,
    /// Output tokens emitted, over all requests.
    pub emitted: u64,
    /// Number of steps.
    pub steps: u64,
}

/// Model of an engine: a real block pool and a queue, with modelled durations of steps.
pub struct Engine {
    speed: Speed,
    sizes: Sizes,
    pool: BlockPool,
    host: Option<BlockPool>,
    tiers: Option<tiers::Tiers>,
    waiting: VecDeque<Waiting>,
    /// True if the first waiting request found no room, and no sequence has ended since.
    blocked: bool,
    running: Vec<Sequence>,
    work: StepWork,
    refused: Vec<Emitted>,
    events: Vec<KvEvent>,
    meter: Meter,
    accepted: u64,
    wants: Vec<Want>,
    moved: Vec<Moved>,
    /// Role that the router gives the engine: mixed, prefill or decode.
    pub role: Role,
    /// Counters of KV received from other engines.
    pub transfers: TransferState,
    /// Counters over this engine's life.
    pub sums: Sums,
}

impl Engine {
    /// Creates an engine with an empty cache. `store`: the store shared with other engines.
    pub fn new(speed: Speed, sizes: Sizes, store: Option<Store>) -> Self {
        let pages = sizes.kv_tokens / BLOCK_TOKENS;
        let host = (sizes.host_tokens >= BLOCK_TOKENS).then(|| BlockPool::new(sizes.host_tokens / BLOCK_TOKENS));
        Self {
            speed,
            sizes,
            pool: BlockPool::with_active_share(pages, sizes.active_share),
            host,
            tiers: tiers::Tiers::new(&speed, &sizes, store),
            waiting: VecDeque::new(),
            blocked: false,
            running: Vec::new(),
            work: StepWork::default(),
            refused: Vec::new(),
            events: Vec::new(),
            meter: Meter::default(),
            accepted: 0,
            wants: Vec::new(),
            moved: Vec::new(),
            role: Role::Mixed,
            transfers: TransferState::default(),
            sums: Sums::default(),
        }
    }

    /// Takes a request that arrives at time `now` into the queue.
    pub fn take(&mut self, ask: Ask, now: f64) {
        self.accepted += 1;
        if let Some(ask) = self.admit(ask, now) {
            self.queue(ask);
        }
    }

    /// Takes a prompt to compute for another engine.
    pub fn lend(&mut self, ask: Ask, to: Lent) {
        self.queue(Ask { lent: Some(to), source: None, output: 0, ..ask });
    }

    fn queue(&mut self, ask: Ask) {
        let (device, host) = self.cached_blocks(&ask.hashes);
        let hint = ask.given.unwrap_or(((device + host) * BLOCK_TOKENS).min(ask.input - 1));
        let before = self.waiting.iter().take_while(|waiting| waiting.ask.turn <= ask.turn).count();
        let waiting = Waiting { pages: blocks(&ask) - device.min(blocks(&ask)), ask, hint };
        self.blocked &= before > 0;
        self.waiting.insert(before, waiting);
    }

    /// Handles the end of a transfer: KV of the request's first `tokens` tokens is here. The rest is computed.
    pub fn arrive(&mut self, request: usize, attempt: u32, tokens: usize) {
        let Self { running, pool, sums, .. } = self;
        let is_it = |sequence: &&mut Sequence| {
            sequence.awaits && sequence.ask.request == request && sequence.ask.attempt == attempt
        };
        let Some(sequence) = running.iter_mut().find(is_it) else { return };
        sequence.awaits = false;
        let whole = tokens / BLOCK_TOKENS * BLOCK_TOKENS;
        let computed = sequence.computed.max(whole.min(sequence.ask.input - 1));
        if let Some(Source::Pull(_)) = sequence.ask.source {
            sums.hits += (computed - sequence.computed) as u64;
        }
        sequence.computed = computed;
        seal(pool, sequence);
        self.collect_events();
    }

    /// Handles the loss of another engine: sequences that wait for its KV compute, and prompts computed for it are
    /// dropped.
    pub fn lost(&mut self, engine: usize) {
        let orphans = self.running.iter().filter(|sequence| sequence.awaits);
        let orphans = orphans.filter(|sequence| sequence.ask.source.is_some_and(|source| source.engine() == engine));
        let orphans: Vec<_> = orphans.map(|sequence| (sequence.ask.request, sequence.ask.attempt)).collect();
        orphans.into_iter().for_each(|(request, attempt)| self.arrive(request, attempt, 0));
        let is_for = |ask: &Ask| ask.lent.is_some_and(|lent| lent.engine == engine);
        self.waiting.retain(|waiting| !is_for(&waiting.ask));
        let Self { running, pool, .. } = self;
        running.retain(|sequence| {
            let stays = !is_for(&sequence.ask);
            if !stays {
                sequence.table.iter().rev().for_each(|page| pool.release(*page));
            }
            stays
        });
        self.blocked = false;
    }

    /// Takes the requests that started since the last call and whose KV must come from elsewhere.
    pub fn take_wants(&mut self) -> Vec<Want> {
        std::mem::take(&mut self.wants)
    }

    /// Takes the KV that the last step computed for others.
    pub fn take_moved(&mut self) -> Vec<Moved> {
        std::mem::take(&mut self.moved)
    }

    /// Number of requests taken since the engine began.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Plans the next step; returns its seconds without noise, or `None` when there is nothing to do.
    pub fn plan(&mut self) -> Option<f64> {
        self.start_waiting();
        if self.running.is_empty() {
            return None;
        }
        let mut work = StepWork::default();
        for sequence in &self.running {
            if sequence.decodes() {
                work.decodes += 1;
                work.context += sequence.ask.input + sequence.produced;
            }
        }
        let mut budget = self.sizes.batch_tokens.saturating_sub(work.decodes);
        self.running.iter_mut().for_each(|sequence| sequence.chunk = 0);
        let mut prefills: Vec<_> = self.running.iter_mut().filter(|one| !one.decodes() && !one.awaits).collect();
        prefills.sort_by_key(|sequence| sequence.ask.turn);
        for sequence in prefills {
            let rows = (sequence.ask.input - sequence.computed).min(budget);
            if rows == 0 {
                break;
            }
            sequence.chunk = rows;
            budget -= rows;
            work.prefill += rows;
            work.attention += attended(rows, sequence.computed);
            work.loaded += std::mem::take(&mut sequence.loads);
        }
        self.work = work;
        (work.prefill + work.decodes > 0).then(|| self.speed.step_seconds(&work))
    }

    /// Ends the planned step, which took `seconds`; returns its tokens.
    pub fn finish(&mut self, seconds: f64) -> Vec<Emitted> {
        let mut emitted = std::mem::take(&mut self.refused);
        self.meter.observe(&self.work, seconds);
        self.sums.busy += seconds;
        self.sums.steps += 1;
        self.sums.prefilled += self.work.prefill as u64;
        let Self { running, pool, blocked, moved, .. } = self;
        for sequence in running.iter_mut().filter(|sequence| !sequence.awaits) {
            let was_prefill = !sequence.decodes();
            sequence.computed += std::mem::take(&mut sequence.chunk);
            seal(pool, sequence);
            if let Some(Lent { engine: to, .. }) = sequence.ask.lent {
                let Ask { request, attempt, .. } = sequence.ask;
                let tokens = sequence.computed.saturating_sub(sequence.moved);
                sequence.moved = sequence.moved.max(sequence.computed);
                moved.push(Moved { to, request, attempt, tokens, done: sequence.decodes() });
                continue;
            }
            if !sequence.decodes() {
                continue;
            }
            sequence.produced += 1;
            emitted.push(Emitted {
                request: sequence.ask.request,
                attempt: sequence.ask.attempt,
                cached: was_prefill.then_some(sequence.cached),
                brought: sequence.ask.brought.min(sequence.cached),
                last: sequence.produced >= sequence.ask.output,
                refused: false,
            });
        }
        running.retain_mut(|sequence| {
            let ended = sequence.ended();
            if ended {
                sequence.table.iter().rev().for_each(|page| pool.release(*page));
                *blocked = false;
            }
            !ended
        });
        self.sums.emitted += emitted.len() as u64;
        self.collect_events();
        emitted
    }

    /// Takes the requests that fit in no engine of this size and that no step reports.
    pub fn take_refused(&mut self) -> Vec<Emitted> {
        std::mem::take(&mut self.refused)
    }

    /// Takes the cache changes since the last call.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        let mut events = std::mem::take(&mut self.events);
        events.extend(self.tiers.iter_mut().flat_map(tiers::Tiers::take_events));
        events
    }

    /// State of the engine, as a worker reports it.
    pub fn state(&self) -> EngineState {
        let (mut rows, mut prefills, mut decodes, mut pages_wanted, mut context) = (0, 0, 0, 0, 0);
        let mut pending_context = 0.0;
        for sequence in &self.running {
            context += sequence.ask.input + sequence.produced;
            if sequence.decodes() {
                decodes += 1;
            } else {
                prefills += 1;
                let left = if sequence.awaits { 0 } else { sequence.ask.input - sequence.computed };
                rows += left;
                pending_context += attended(left, sequence.computed);
            }
        }
        for Waiting { ask, hint, pages } in &self.waiting {
            let left = if ask.source.is_some() { 0 } else { ask.input - hint };
            rows += left;
            pending_context += attended(left, *hint);
            pages_wanted += pages;
        }
        let mut held = 0;
        for (ask, read) in self.tiers.iter().flat_map(tiers::Tiers::waiting) {
            let left = ask.input - read.min(ask.input);
            rows += left;
            pending_context += attended(left, read);
            pages_wanted += blocks(ask);
            held += 1;
        }
        let waiting = self.waiting.len() + held;
        let rate = self.meter.prefill_tokens_per_second();
        let slots = self.sizes.sequences_max.saturating_sub(decodes + prefills + waiting);
        let budget = self.sizes.batch_tokens.saturating_sub(decodes);
        let rows_free = (2 * budget).saturating_sub(rows).min(budget);
        let pages_free = self.pool.available().saturating_sub(pages_wanted);
        EngineState {
            waiting: waiting as u32,
            running: self.running.len() as u32,
            prefill_tokens_pending: rows as u64,
            queue_seconds: if rate > 0.0 { rows as f64 / rate } else { 0.0 },
            step_seconds: self.meter.step_seconds(),
            blocks_total: self.pool.total() as u32,
            blocks_free: self.pool.available() as u32,
            blocks_cached: self.pool.cached() as u32,
            credits: slots.min(rows_free).min(pages_free) as u32,
            prompt_tokens: self.sums.looked_up,
            cached_tokens: self.sums.hits,
            output_tokens: self.sums.emitted,
            prefill_tokens_per_second: rate,
            prefill_context_pending: pending_context,
            context_tokens: context as u64,
            blocks_wanted: pages_wanted as u32,
            prefill_rows_free: rows_free as u32,
            tiers: self.tier_states(),
            role: self.role as i32,
            transfers: (self.transfers.completed > 0).then_some(self.transfers),
            ..Default::default()
        }
    }

    fn tier_states(&self) -> Vec<TierState> {
        let host = self.host.iter().map(|host| TierState {
            tier: Tier::Host as i32,
            blocks_total: host.total() as u64,
            blocks_used: host.cached() as u64,
            load_seconds_per_block: self.speed.host * BLOCK_TOKENS as f64,
            ..Default::default()
        });
        host.chain(self.tiers.iter().flat_map(tiers::Tiers::states)).collect()
    }

    /// Batch of the last step, with its duration.
    pub fn batch(&self) -> Batch {
        let StepWork { prefill, attention, decodes, context, .. } = self.work;
        Batch {
            prefill_tokens: prefill as u32,
            prefill_context: attention,
            decodes: decodes as u32,
            decode_context: context as u64,
            seconds: self.meter.step_seconds(),
        }
    }

    /// Most sequences that the engine runs at once.
    pub fn sequences_max(&self) -> usize {
        self.sizes.sequences_max
    }

    /// Number of leading blocks on the device, and of those that the host tier adds.
    pub fn cached_blocks(&self, hashes: &[BlockHash]) -> (usize, usize) {
        let Some(host) = &self.host else {
            return (self.pool.lookup(hashes.iter().copied()).pages.len(), 0);
        };
        let (mut at, mut device) = (0, 0);
        while at < hashes.len() {
            let here = self.pool.lookup(hashes[at..].iter().copied()).pages.len();
            let there = host.lookup(hashes[at + here..].iter().copied()).pages.len();
            if here + there == 0 {
                break;
            }
            // Blocks of the host's run that are also on the device are read there.
            let both = hashes[at + here..at + here + there].iter();
            device += here + both.filter(|hash| !self.pool.lookup([**hash]).pages.is_empty()).count();
            at += here + there;
        }
        (device, at - device)
    }

    fn start_waiting(&mut self) {
        while self.running.len() < self.sizes.sequences_max && !self.blocked {
            let Some(Waiting { ask, .. }) = self.waiting.front() else { break };
            let total = blocks(ask);
            if total > self.pool.total() {
                let Waiting { ask, .. } = self.waiting.pop_front().expect("looked at");
                if let Some(Lent { engine: to, .. }) = ask.lent {
                    let (request, attempt) = (ask.request, ask.attempt);
                    self.moved.push(Moved { to, request, attempt, tokens: 0, done: true });
                    continue;
                }
                let (request, attempt) = (ask.request, ask.attempt);
                self.refused.push(Emitted { request, attempt, cached: None, brought: 0, last: true, refused: true });
                continue;
            }
            let found = self.pool.lookup(ask.hashes.iter().copied());
            if total - found.pages.len() > self.pool.available() - found.idle {
                self.blocked = true;
                break;
            }
            let Waiting { ask, .. } = self.waiting.pop_front().expect("looked at");
            self.start(ask, total);
        }
    }

    fn start(&mut self, ask: Ask, total: usize) {
        let mut table = self.pool.lookup(ask.hashes.iter().copied()).pages;
        self.pool.share(&table);
        let mut loads = 0;
        while let Some(hash) = ask.hashes.get(table.len()).copied().filter(|hash| self.is_known(*hash)) {
            let here = self.pool.lookup([hash]).pages;
            if let Some(page) = here.first() {
                self.pool.share(&here);
                table.push(*page);
                continue;
            }
            self.touch_host(hash);
            let Some(page) = self.allocate() else { break };
            let parent = table.len().checked_sub(1).map(|at| ask.hashes[at]);
            table.push(self.pool.seal(page, parent, hash));
            loads += BLOCK_TOKENS;
        }
        let hit = table.len();
        while table.len() < total {
            table.push(self.allocate().expect("room was made"));
        }
        let cached = ask.given.unwrap_or((hit * BLOCK_TOKENS).min(ask.input - 1));
        let moved = ask.lent.map_or(0, |lent| lent.have);
        if ask.lent.is_none() {
            self.sums.looked_up += ask.input as u64;
        }
        self.sums.hits += cached.saturating_sub(moved) as u64;
        self.sums.host_hits += loads as u64;
        self.sums.tier_hits += ask.brought.min(cached) as u64;
        let source = ask.source.filter(|_| cached + BLOCK_TOKENS < ask.input);
        self.wants.extend(source.map(|source| Want { ask: ask.clone(), source, have: cached }));
        let awaits = source.is_some();
        let (sealed, computed) = (hit, cached);
        self.running.push(Sequence {
            ask,
            table,
            sealed,
            computed,
            produced: 0,
            cached,
            loads,
            chunk: 0,
            awaits,
            moved,
        });
    }

    fn is_known(&self, hash: BlockHash) -> bool {
        self.host
            .as_ref()
            .is_some_and(|host| !host.lookup([hash]).pages.is_empty() || !self.pool.lookup([hash]).pages.is_empty())
    }

    fn allocate(&mut self) -> Option<PageId> {
        if let (None, Some(tiers)) = (&self.host, &mut self.tiers) {
            self.pool.keep_evicted();
            let page = self.pool.allocate();
            for Evicted { parent, hash, .. } in self.pool.take_evicted() {
                tiers.put(0, Link { parent, hash });
            }
            return page;
        }
        let page = self.pool.allocate();
        if self.host.is_some() {
            self.collect_events();
        }
        page
    }

    fn touch_host(&mut self, hash: BlockHash) {
        if let Some(host) = &mut self.host {
            let pages = host.lookup([hash]).pages;
            host.share(&pages);
            pages.iter().for_each(|page| host.release(*page));
        }
    }

    /// Takes the pool's changes, and moves evicted blocks to the host tier.
    fn collect_events(&mut self) {
        let events = self.pool.take_events();
        let mut told = Vec::new();
        if let Some(host) = &mut self.host {
            let removed = events.iter().flat_map(|event| &event.removed);
            for hash in removed.filter_map(|bytes| BlockHash::from_bytes(bytes)) {
                if host.lookup([hash]).pages.is_empty()
                    && let Some(page) = host.allocate()
                {
                    let page = host.seal(page, None, hash);
                    host.release(page);
                }
            }
            told = host.take_events();
            told.iter_mut().for_each(|event| event.tier = Tier::Host as i32);
            if let Some(tiers) = &mut self.tiers {
                let gone =
                    told.iter().flat_map(|event| &event.removed).filter_map(|bytes| BlockHash::from_bytes(bytes));
                gone.for_each(|hash| tiers.put(0, Link { parent: None, hash }));
            }
        }
        self.events.extend(events);
        self.events.extend(told);
    }
}

fn blocks(ask: &Ask) -> usize {
    (ask.input + ask.output).div_ceil(BLOCK_TOKENS)
}

/// Attended tokens summed over `rows` tokens behind `computed` others.
fn attended(rows: usize, computed: usize) -> f64 {
    rows as f64 * (computed as f64 + (rows as f64 + 1.0) / 2.0)
}

/// Seals the complete blocks of the prompt.
fn seal(pool: &mut BlockPool, sequence: &mut Sequence) {
    let hashes = &sequence.ask.hashes;
    while sequence.sealed < hashes.len() && (sequence.sealed + 1) * BLOCK_TOKENS <= sequence.computed {
        let at = sequence.sealed;
        let parent = at.checked_sub(1).map(|at| hashes[at]);
        sequence.table[at] = pool.seal(sequence.table[at], parent, hashes[at]);
        sequence.sealed += 1;
    }
}
