//! Router over modelled engines (12 ms + 71 µs per prefill token + 1.35 ns per (token × context) + 40 µs per decoding
//! sequence + 16 ns per context token, 10 % noise): shares by speed, fairness under a flood, waiting for a warm worker.

use penstock_proto::frames::{Batch, EngineState, KvEvent};
use penstock_proto::{BLOCK_TOKENS, BlockHash, BlockHasher, RequestId};
use penstock_router::{Choice, Fleet, Limits, Member, Policy, Random, View, Weights, WorkerId};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

const ENGINE: [f64; 5] = [0.012, 71e-6, 1.35e-9, 40e-6, 16e-9];
const BATCH_TOKENS: u32 = 8192;
/// Rows of prefill beside decodes: a step takes a tenth of a second.
const BESIDE: u32 = 1400;
const SLOTS: usize = 256;
const BLOCKS: usize = 30_000;

#[derive(Clone)]
struct Request {
    tenant: &'static str,
    at: f64,
    tokens: Arc<[u32]>,
    output: u32,
}

struct Sequence {
    id: u64,
    turn: i64,
    context: u32,
    wanted: u32,
    chunk: u32,
    output: u32,
    hashes: Vec<BlockHash>,
}

/// Engine model: chunked prefill in order of arrival beside decodes, a prefix cache, credits as our worker grants them.
struct Engine {
    slow: f64,
    /// True if the engine has not reported its speed, so that it is unknown.
    cold: bool,
    sequences: Vec<Sequence>,
    cache: HashSet<BlockHash>,
    stored: Vec<BlockHash>,
    accepted: u64,
    batch: Batch,
    until: Option<f64>,
    busy: f64,
    prefilled: u64,
}

impl Engine {
    fn new(slow: f64) -> Self {
        Self {
            slow,
            cold: false,
            sequences: Vec::new(),
            cache: HashSet::new(),
            stored: Vec::new(),
            accepted: 0,
            batch: Batch::default(),
            until: None,
            busy: 0.0,
            prefilled: 0,
        }
    }

    fn take(&mut self, id: u64, request: &Request, turn: i64) {
        let hashes = BlockHasher::for_request(b"", "n").chain(&request.tokens);
        let hits = hashes.iter().take_while(|hash| self.cache.contains(hash)).count() as u32;
        let tokens = request.tokens.len() as u32;
        let context = (hits * BLOCK_TOKENS as u32).min(tokens - 1);
        self.accepted += 1;
        self.sequences.push(Sequence {
            id,
            turn,
            context,
            wanted: tokens - context,
            chunk: 0,
            output: request.output,
            hashes,
        });
        self.sequences.sort_by_key(|sequence| sequence.turn);
        assert!(self.sequences.len() <= SLOTS, "bound without a credit");
    }

    fn begin(&mut self, now: f64, random: &mut Random) {
        let decodes = self.sequences.iter().filter(|s| s.wanted == 0).count() as u32;
        let mut rows = if decodes > 0 { BESIDE } else { BATCH_TOKENS };
        self.batch = Batch { decodes, ..Batch::default() };
        for s in &mut self.sequences {
            s.chunk = s.wanted.min(rows);
            rows -= s.chunk;
            self.batch.prefill_tokens += s.chunk;
            self.batch.prefill_context += f64::from(s.chunk) * (f64::from(s.context) + f64::from(s.chunk) / 2.0);
            self.batch.decode_context += if s.wanted == 0 { u64::from(s.context) } else { 0 };
        }
        let Batch { prefill_tokens, prefill_context, decodes, decode_context, .. } = self.batch;
        let [base, token, pair, sequence, context] = ENGINE;
        let work = base + token * f64::from(prefill_tokens) + pair * prefill_context;
        let seconds = work + sequence * f64::from(decodes) + context * decode_context as f64;
        self.batch.seconds = self.slow * seconds * (1.0 + 0.1 * random.normal()).max(0.5);
        self.busy += self.batch.seconds;
        self.prefilled += u64::from(prefill_tokens);
        self.until = Some(now + self.batch.seconds);
    }

    /// Ends the step; returns (first tokens, all tokens, ends).
    fn end(&mut self) -> (Vec<u64>, Vec<u64>, Vec<u64>) {
        let (mut firsts, mut tokens, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for s in &mut self.sequences {
            let decodes = s.wanted == 0;
            s.wanted -= s.chunk;
            s.context += s.chunk;
            for hash in s.hashes.iter().take(s.context as usize / BLOCK_TOKENS) {
                if self.cache.insert(*hash) {
                    self.stored.push(*hash);
                }
            }
            if s.wanted == 0 && (decodes || s.chunk > 0) {
                if !decodes {
                    firsts.push(s.id);
                }
                s.context += 1;
                s.output -= 1;
                tokens.push(s.id);
                if s.output == 0 {
                    ends.push(s.id);
                }
            }
        }
        self.sequences.retain(|s| s.output > 0);
        self.until = None;
        (firsts, tokens, ends)
    }

    fn state(&self) -> EngineState {
        let pending: u64 = self.sequences.iter().map(|s| u64::from(s.wanted)).sum();
        let attended = |s: &Sequence| f64::from(s.wanted) * (f64::from(s.context) + f64::from(s.wanted) / 2.0);
        let decodes = self.sequences.iter().any(|s| s.wanted == 0);
        let budget = u64::from(if decodes { BESIDE } else { BATCH_TOKENS });
        let rows_free = (2 * budget).saturating_sub(pending).min(budget) as usize;
        EngineState {
            running: self.sequences.len() as u32,
            credits: (SLOTS - self.sequences.len()).min(rows_free) as u32,
            prefill_rows_free: rows_free as u32,
            // As measured in the engine's life before.
            prefill_tokens_per_second: if self.cold { 0.0 } else { 10_000.0 / self.slow },
            prefill_tokens_pending: pending,
            prefill_context_pending: self.sequences.iter().map(attended).sum(),
            context_tokens: self.sequences.iter().map(|s| u64::from(s.context + s.wanted)).sum(),
            blocks_total: BLOCKS as u32,
            blocks_free: BLOCKS as u32,
            ..Default::default()
        }
    }
}

struct World {
    fleet: Fleet,
    engines: Vec<Engine>,
    random: Random,
    /// TTFT of each finished first token in seconds, by request.
    firsts: HashMap<u64, f64>,
    worker: HashMap<u64, usize>,
}

impl World {
    fn new(speeds: &[f64], limits: Limits, policy: Policy, seed: u64) -> Self {
        let engines = speeds.iter().map(|slow| Engine::new(*slow)).collect();
        Self::of(engines, limits, policy, seed)
    }

    /// A world of equal engines that have never run and have not reported their speed.
    fn cold(count: usize, limits: Limits, seed: u64) -> Self {
        let engines = (0..count).map(|_| Engine { cold: true, ..Engine::new(1.0) }).collect();
        Self::of(engines, limits, Policy::CacheAware, seed)
    }

    fn of(engines: Vec<Engine>, limits: Limits, policy: Policy, seed: u64) -> Self {
        let mut fleet = Fleet::new(Weights::default(), limits).with_policy(policy).seeded(seed);
        for (id, engine) in (0..).zip(&engines) {
            let device = format!("{}", engine.slow).into();
            let (blocks_total, sequences_max) = (BLOCKS as u32, SLOTS as u32);
            let numerics_id = "n".into();
            let member =
                Member { numerics_id, blocks_total, sequences_max, state: engine.state(), device, ..Member::default() };
            fleet.join(WorkerId(id), member, &[]);
        }
        Self { fleet, engines, random: Random::new(seed), firsts: HashMap::new(), worker: HashMap::new() }
    }

    /// Plays all requests to their ends.
    fn run(&mut self, requests: &[Request]) {
        let mut arrivals = (0..).zip(requests).peekable();
        loop {
            let step = (0..self.engines.len())
                .filter_map(|at| self.engines[at].until.map(|until| (until, at)))
                .min_by(|a, b| a.0.total_cmp(&b.0));
            let now = match (arrivals.peek(), step) {
                (None, None) => break,
                (Some((id, request)), step) if step.is_none_or(|(until, _)| request.at <= until) => {
                    let now = request.at;
                    let (tokens, tenant) = (Arc::clone(&request.tokens), request.tenant.into());
                    let weight = if request.tenant == "heavy" { 3 } else { 1 };
                    let view = View { tokens, tenant, weight, sequences: 1, ..View::default() };
                    self.fleet.enqueue(RequestId(*id), view, Duration::from_secs_f64(now)).expect("room");
                    arrivals.next();
                    now
                }
                (_, Some((until, at))) => {
                    self.step(at, until, requests);
                    until
                }
                (Some(_), None) => unreachable!("an arrival without a step comes first"),
            };
            self.bind(now, requests);
            for engine in &mut self.engines {
                if engine.until.is_none() && !engine.sequences.is_empty() {
                    engine.begin(now, &mut self.random);
                }
            }
        }
        assert_eq!(self.firsts.len(), requests.len(), "everybody was served");
    }

    fn step(&mut self, at: usize, now: f64, requests: &[Request]) {
        let engine = &mut self.engines[at];
        let (firsts, tokens, ends) = engine.end();
        let stored = engine.stored.drain(..).map(|hash| hash.to_bytes().to_vec()).collect();
        let (id, event) = (WorkerId(at as u8), KvEvent { stored, ..Default::default() });
        self.fleet.update(id, Some(&engine.state()), &[event], engine.accepted);
        self.fleet.observe(id, &engine.batch);
        for request in firsts {
            self.firsts.insert(request, now - requests[request as usize].at);
            self.fleet.settle(RequestId(request));
        }
        tokens.into_iter().for_each(|request| self.fleet.emitted(RequestId(request), 1));
        ends.into_iter().for_each(|request| self.fleet.remove(RequestId(request)));
    }

    fn bind(&mut self, now: f64, requests: &[Request]) {
        loop {
            match self.fleet.next(Duration::from_secs_f64(now)) {
                Choice::Bind { request, worker, turn, .. } => {
                    let at = usize::from(worker.0);
                    self.engines[at].take(request.0, &requests[request.0 as usize], turn);
                    self.worker.insert(request.0, at);
                }
                Choice::Refuse { request, .. } => panic!("request {request} was refused"),
                Choice::Hold => break,
            }
        }
    }

    fn ttft_p99(&self, requests: &[Request], tenant: &str) -> f64 {
        let own = (0..).zip(requests).filter(|(_, request)| request.tenant == tenant);
        let mut times: Vec<f64> = own.map(|(id, _)| self.firsts[&id]).collect();
        times.sort_by(f64::total_cmp);
        times[times.len() * 99 / 100]
    }
}

/// Requests of one tenant, `rate` a second for `seconds`, at random moments; no two share a prefix.
fn traffic(random: &mut Random, tenant: &'static str, rate: f64, seconds: f64, tokens: (u64, u64)) -> Vec<Request> {
    let (mut at, mut all) = (0.0, Vec::new());
    loop {
        at -= (1.0 - random.share()).ln() / rate;
        if at > seconds {
            return all;
        }
        let (length, first) = (tokens.0 + random.below(tokens.1), random.below(1 << 31) as u32);
        let tokens = (0..length as u32).map(|token| first ^ token).collect();
        all.push(Request { tenant, at, tokens, output: 20 + random.below(200) as u32 });
    }
}

fn merged(mut all: Vec<Vec<Request>>) -> Vec<Request> {
    let mut all: Vec<Request> = all.drain(..).flatten().collect();
    all.sort_by(|a, b| a.at.total_cmp(&b.at));
    all
}

#[test]
fn workers_of_different_speed_share_in_proportion() {
    for seed in 1..=3 {
        let mut world = World::new(&[1.0, 3.0], Limits::default(), Policy::CacheAware, seed);
        // About nine tenths of the capacity of both.
        let requests = traffic(&mut Random::new(seed), "a", 5.0, 60.0, (1000, 4000));
        world.run(&requests);
        let [fast, slow] = [0, 1].map(|at| world.engines[at].prefilled as f64);
        let share = fast / slow;
        let busy = [0, 1].map(|at| world.engines[at].busy);
        println!("seed {seed}: share {share:.2}, busy {busy:?}");
        assert!(share > 2.5, "seed {seed}: three times as fast, {share:.2} times the work");
        let even = busy[0] / busy[1];
        assert!((0.85..1.15).contains(&even), "seed {seed}: busy {even:.2}");
    }
}

#[test]
fn a_flood_does_not_double_the_others_first_token() {
    for seed in 1..=2 {
        let speeds = [1.0; 4];
        let quiet = traffic(&mut Random::new(seed), "quiet", 6.0, 24.0, (1000, 3000));
        let mut alone = World::new(&speeds, Limits::default(), Policy::CacheAware, seed);
        alone.run(&quiet);
        // Three times the capacity of the fleet.
        let flood = traffic(&mut Random::new(seed + 100), "flood", 60.0, 16.0, (1000, 3000));
        let both = merged(vec![quiet.clone(), flood]);
        let mut flooded =
            World::new(&speeds, Limits { queue_max: 10_000, ..Limits::default() }, Policy::CacheAware, seed);
        flooded.run(&both);
        let (own, beside) = (alone.ttft_p99(&quiet, "quiet"), flooded.ttft_p99(&both, "quiet"));
        let flood = flooded.ttft_p99(&both, "flood");
        println!("seed {seed}: TTFT p99 alone {own:.3} s, beside a flood {beside:.3} s; the flood's own {flood:.1} s");
        assert!(beside <= 2.0 * own, "seed {seed}: {beside:.3} s beside a flood, {own:.3} s alone");
        assert!(flood > 10.0 * beside, "seed {seed}: it was no flood");
    }
}

/// The workers' speed is unknown when a flood of eight times their capacity begins, and every step has noise. Other
/// tenants pay only for the first steps, which are full of the flood before the speed can be known.
#[test]
fn a_flood_in_a_cold_pool_delays_others_by_its_first_steps_only() {
    let limits = Limits { queue_max: 10_000, ..Limits::default() };
    let quiet = traffic(&mut Random::new(1), "quiet", 6.0, 24.0, (1000, 3000));
    let mut alone = World::cold(4, limits, 1);
    alone.run(&quiet);
    let flood = traffic(&mut Random::new(101), "flood", 160.0, 4.0, (1000, 3000));
    let both = merged(vec![quiet.clone(), flood]);
    let mut flooded = World::cold(4, limits, 1);
    flooded.run(&both);
    let (own, beside) = (alone.ttft_p99(&quiet, "quiet"), flooded.ttft_p99(&both, "quiet"));
    println!("TTFT p99 alone {own:.3} s, beside a flood {beside:.3} s");
    assert!(beside <= 2.0 * own, "{beside:.3} s beside a flood, {own:.3} s alone");
}

#[test]
fn tenants_that_ask_for_more_than_there_is_share_by_weight() {
    let limits = Limits { queue_max: 10_000, ..Limits::default() };
    let [heavy, light] = [("heavy", 1), ("light", 2)]
        .map(|(tenant, seed)| traffic(&mut Random::new(seed), tenant, 30.0, 20.0, (1000, 3000)));
    let both = merged(vec![heavy, light]);
    let mut world = World::cold(4, limits, 1);
    world.run(&both);
    let served = |tenant: &str| -> f64 {
        let own = (0..).zip(&both).filter(|(_, request)| request.tenant == tenant);
        own.filter(|(id, request)| request.at + world.firsts[id] < 20.0).map(|(_, r)| r.tokens.len() as f64).sum()
    };
    let ratio = served("heavy") / served("light");
    assert!((2.2..3.6).contains(&ratio), "{ratio:.2} times as much for three times the weight");
}

#[test]
fn a_request_waits_for_its_warm_worker_but_not_for_long() {
    let mut world = World::new(&[1.0, 1.0], Limits::default(), Policy::CacheAware, 1);
    let prompt: Arc<[u32]> = (0..60_000).collect();
    let ask = |at: f64, tokens: &Arc<[u32]>| Request { tenant: "a", at, tokens: Arc::clone(tokens), output: 50 };
    let other: Arc<[u32]> = (1_000_000..1_016_000).collect();
    let longer: Arc<[u32]> = (0..61_000).collect();
    // A session's first turn; then its worker computes another prompt for a second or so when the second turn arrives.
    let requests = [ask(0.0, &prompt), ask(20.0, &other), ask(20.0, &other), ask(20.1, &longer)];
    world.run(&requests);
    assert_eq!(world.worker[&3], world.worker[&0], "six seconds of prefill are worth a wait");
    assert!(world.firsts[&3] < 3.0, "{}", world.firsts[&3]);
}
