//! Simulation of a seeded fleet: workers with slots, speeds and caches that die and return, requests with shared
//! prefixes. Invariants: every request ends once, none is bound without a credit, and knowledge of the caches pays.

use penstock_proto::frames::{EngineState, KvEvent};
use penstock_proto::{BLOCK_TOKENS, BlockHash, BlockHasher, RequestId};
use penstock_router::{Choice, Fleet, Limits, Member, View, Weights, WorkerId};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

const SLOTS: u32 = 4;
const BLOCKS: usize = 120;
const TICK_MS: u64 = 20;

/// Seeded stream of random numbers (SplitMix64), equal in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

struct Running {
    request: u64,
    /// Milliseconds of prefill left, then ticks of decode left.
    prefill_ms: u64,
    decode: u64,
    hashes: Vec<BlockHash>,
    told: bool,
}

struct Worker {
    tokens_per_ms: u64,
    cache: Vec<BlockHash>,
    running: Vec<Running>,
    accepted: u64,
    events: Vec<KvEvent>,
    hits: u64,
    looked_up: u64,
}

impl Worker {
    fn new(tokens_per_ms: u64) -> Self {
        Self {
            tokens_per_ms,
            cache: Vec::new(),
            running: Vec::new(),
            accepted: 0,
            events: Vec::new(),
            hits: 0,
            looked_up: 0,
        }
    }

    fn take(&mut self, request: u64, tokens: &[u32]) {
        let hashes = BlockHasher::for_request(b"", "n").chain(tokens);
        let known: HashSet<&BlockHash> = self.cache.iter().collect();
        let hits = hashes.iter().take_while(|hash| known.contains(hash)).count();
        self.hits += hits as u64;
        self.looked_up += hashes.len() as u64;
        let left = tokens.len().saturating_sub(hits * BLOCK_TOKENS) as u64;
        self.accepted += 1;
        let prefill_ms = 1 + left / self.tokens_per_ms;
        self.running.push(Running { request, prefill_ms, decode: 10 + request % 20, hashes, told: false });
        assert!(self.running.len() <= SLOTS as usize, "bound without a credit");
    }

    /// One tick: prefill in order of arrival, all others decode. Returns (first tokens, ends).
    fn tick(&mut self) -> (Vec<u64>, Vec<u64>) {
        let (mut firsts, mut ends, mut budget) = (Vec::new(), Vec::new(), TICK_MS);
        let mut stored = Vec::new();
        for running in &mut self.running {
            if running.prefill_ms > 0 {
                let done = running.prefill_ms.min(budget);
                running.prefill_ms -= done;
                budget -= done;
                continue;
            }
            if !std::mem::replace(&mut running.told, true) {
                firsts.push(running.request);
                stored.extend(running.hashes.iter().filter(|hash| !self.cache.contains(hash)).copied());
            }
            running.decode -= 1;
            if running.decode == 0 {
                ends.push(running.request);
            }
        }
        self.running.retain(|running| running.decode > 0);
        stored.dedup();
        self.cache.extend(stored.iter().copied());
        let surplus = self.cache.len().saturating_sub(BLOCKS);
        let removed: Vec<BlockHash> = self.cache.drain(..surplus).collect();
        let bytes = |hashes: Vec<BlockHash>| hashes.into_iter().map(|hash| hash.to_bytes().to_vec()).collect();
        self.events.push(KvEvent { stored: bytes(stored), ..Default::default() });
        self.events.push(KvEvent { removed: bytes(removed), ..Default::default() });
        (firsts, ends)
    }

    fn state(&self) -> EngineState {
        let queue_ms: u64 = self.running.iter().map(|running| running.prefill_ms).sum();
        EngineState {
            running: self.running.len() as u32,
            credits: SLOTS - self.running.len() as u32,
            queue_seconds: queue_ms as f64 / 1000.0,
            step_seconds: TICK_MS as f64 / 1000.0,
            prefill_tokens_per_second: self.tokens_per_ms as f64 * 1000.0,
            blocks_total: BLOCKS as u32,
            blocks_free: BLOCKS as u32,
            ..Default::default()
        }
    }
}

#[derive(Debug, PartialEq)]
struct Outcome {
    bindings: Vec<(u64, u8)>,
    hit_rate_percent: u64,
    resumed: u64,
}

struct World {
    random: Random,
    fleet: Fleet,
    workers: BTreeMap<u8, Worker>,
    tokens: HashMap<u64, Arc<[u32]>>,
    open: HashSet<u64>,
    bindings: Vec<(u64, u8)>,
    resumed: u64,
    retired: (u64, u64),
}

impl World {
    fn view(&self, request: u64, resumed: bool) -> View {
        let tokens = Arc::clone(&self.tokens[&request]);
        let numerics_id = resumed.then(|| Arc::from("n"));
        View { tokens, sequences: 1, numerics_id, resumed, ..View::default() }
    }

    fn join(&mut self, id: u8) {
        let worker = Worker::new(2 + u64::from(id % 3));
        let member = Member {
            numerics_id: "n".into(),
            blocks_total: BLOCKS as u32,
            sequences_max: SLOTS,
            state: worker.state(),
            ..Member::default()
        };
        self.fleet.join(WorkerId(id), member, &[]);
        self.workers.insert(id, worker);
    }

    fn die(&mut self, id: u8, now: Duration) {
        let Some(worker) = self.workers.remove(&id) else { return };
        self.retired.0 += worker.hits;
        self.retired.1 += worker.looked_up;
        self.fleet.leave(WorkerId(id));
        for running in worker.running {
            self.resumed += 1;
            self.fleet.remove(RequestId(running.request));
            let view = self.view(running.request, true);
            self.fleet.enqueue(RequestId(running.request), view, now).expect("a resumed request is never refused");
        }
    }

    fn tick(&mut self, now: Duration) {
        while let Choice::Bind { request, worker, .. } = self.fleet.next(now) {
            self.bindings.push((request.0, worker.0));
            let tokens = Arc::clone(&self.tokens[&request.0]);
            self.workers.get_mut(&worker.0).expect("bound to the living").take(request.0, &tokens);
        }
        for (id, worker) in &mut self.workers {
            let (firsts, ends) = worker.tick();
            let events = std::mem::take(&mut worker.events);
            self.fleet.update(WorkerId(*id), Some(&worker.state()), &events, worker.accepted);
            firsts.into_iter().for_each(|request| self.fleet.settle(RequestId(request)));
            for request in ends {
                assert!(self.open.remove(&request), "request {request} ended twice");
                self.fleet.remove(RequestId(request));
            }
        }
    }
}

/// Runs 300 requests over 8 conversations on 4 workers; with `deaths` workers die and return.
fn run(seed: u64, deaths: bool, weights: Weights) -> Outcome {
    let fleet = Fleet::new(weights, Limits::default());
    let mut world = World {
        random: Random(seed),
        fleet,
        workers: BTreeMap::new(),
        tokens: HashMap::new(),
        open: HashSet::new(),
        bindings: Vec::new(),
        resumed: 0,
        retired: (0, 0),
    };
    (0..4).for_each(|id| world.join(id));
    for tick in 0..20_000_u64 {
        let now = Duration::from_millis(tick * TICK_MS);
        if tick % 5 == 0 && tick / 5 < 300 {
            let request = tick / 5;
            let conversation = world.random.below(8) as u32;
            let length = 200 + world.random.below(1200) as u32;
            world.tokens.insert(request, (0..length).map(|at| conversation * 10_000 + at).collect());
            world.open.insert(request);
            let view = world.view(request, false);
            world.fleet.enqueue(RequestId(request), view, now).expect("room");
        }
        if deaths && world.random.below(150) == 0 {
            let id = world.random.below(4) as u8;
            world.die(id, now);
        }
        if world.workers.len() < 4 && world.random.below(30) == 0 {
            let id = (0..4).find(|id| !world.workers.contains_key(id)).expect("one is missing");
            world.join(id);
        }
        world.tick(now);
        if world.open.is_empty() && tick > 1500 {
            break;
        }
    }
    assert!(world.open.is_empty(), "seed {seed}: {} requests never ended", world.open.len());
    assert_eq!(world.fleet.waiting(), 0);
    let (hits, looked_up) = world.workers.values().fold(world.retired, |sum, w| (sum.0 + w.hits, sum.1 + w.looked_up));
    (0..4).for_each(|id| world.fleet.leave(WorkerId(id)));
    assert_eq!(world.fleet.index_sizes(), (0, 0), "nothing is left of workers that left");
    Outcome { bindings: world.bindings, hit_rate_percent: hits * 100 / looked_up.max(1), resumed: world.resumed }
}

#[test]
fn a_seed_replays() {
    assert_eq!(run(11, true, Weights::default()), run(11, true, Weights::default()));
}

#[test]
fn knowing_the_caches_pays() {
    // Without a price on prefill nothing draws a request to its prefix.
    let blind = Weights { own: -1.0, decoding: 0.0, ..Weights::default() };
    let sum = |weights: Weights| (1..=4).map(|seed| run(seed, false, weights).hit_rate_percent).sum::<u64>() / 4;
    let (knowing, blind) = (sum(Weights::default()), sum(blind));
    assert!(knowing >= blind + 10, "hit rate {knowing} % against {blind} %");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_request_ends_once_whoever_dies(seed in any::<u64>()) {
        let outcome = run(seed, true, Weights::default());
        prop_assert!(outcome.bindings.len() as u64 == 300 + outcome.resumed, "each life is bound once");
    }
}
