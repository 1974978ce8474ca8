//! Cost of the index: `cargo bench -p penstock-router --bench index [-- blocks_in_millions]`.
//!
//! 64 workers; requests of 8k tokens (256 blocks): half of each is a head that 1 % of all requests share, half is its
//! own, held by one worker or two. Every step is what the fleet does: look up, promise, stored in chunks of 16 blocks,
//! release. For comparison, on the same chains in the same process: one hash map entry per block. One thread.

#[path = "../tests/all/flat.rs"]
mod flat;

use flat::FlatIndex;
use penstock_proto::frames::{KvEvent, Tier};
use penstock_proto::{BlockHash, BlockHasher};
use penstock_router::{KvIndex, WORKERS_MAX, WorkerId};
use std::hint::black_box;
use std::time::{Duration, Instant};

const WORKERS: u8 = 64;
const PROMPT_BLOCKS: u64 = 256;
const HEADS: u64 = 100;

/// Operations common to the two indexes that are compared: the router's radix index and a flat one.
trait Index {
    fn join(&mut self, worker: WorkerId);
    fn hits(&self, hashes: &[BlockHash]) -> [u32; WORKERS_MAX];
    fn promise(&mut self, worker: WorkerId, hashes: &[BlockHash]);
    fn release(&mut self, worker: WorkerId, hashes: &[BlockHash]);
    fn apply(&mut self, worker: WorkerId, event: &KvEvent);
    fn leave(&mut self, worker: WorkerId);
}

macro_rules! index {
    ($name:ty) => {
        impl Index for $name {
            fn join(&mut self, worker: WorkerId) {
                <$name>::join(self, worker, usize::MAX);
            }
            fn hits(&self, hashes: &[BlockHash]) -> [u32; WORKERS_MAX] {
                <$name>::hits(self, hashes, (0..WORKERS).map(WorkerId))
            }
            fn promise(&mut self, worker: WorkerId, hashes: &[BlockHash]) {
                <$name>::promise(self, worker, hashes);
            }
            fn release(&mut self, worker: WorkerId, hashes: &[BlockHash]) {
                <$name>::release(self, worker, hashes);
            }
            fn apply(&mut self, worker: WorkerId, event: &KvEvent) {
                <$name>::apply(self, worker, event);
            }
            fn leave(&mut self, worker: WorkerId) {
                <$name>::leave(self, worker);
            }
        }
    };
}
index!(KvIndex);
index!(FlatIndex);

/// Pseudo-random number, equal in every run.
fn mix(n: u64) -> u64 {
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

fn hash(n: u64) -> BlockHash {
    BlockHash((u128::from(mix(n)) << 64) | u128::from(mix(!n)))
}

/// Block hashes of one request of `blocks` blocks: half a shared head, half its own.
fn chain(request: u64, blocks: u64) -> Vec<BlockHash> {
    let head = (mix(request) % HEADS) << 40;
    let own = (request + HEADS) << 40;
    (0..blocks / 2).map(|block| hash(head + block)).chain((blocks / 2..blocks).map(|block| hash(own + block))).collect()
}

fn home(request: u64) -> WorkerId {
    WorkerId((mix(request ^ 0x5eed) % u64::from(WORKERS)) as u8)
}

fn event(hashes: &[BlockHash], parent: Option<&BlockHash>) -> KvEvent {
    KvEvent {
        stored: hashes.iter().map(|hash| hash.to_bytes().to_vec()).collect(),
        parent: parent.map(|hash| hash.to_bytes().to_vec()).unwrap_or_default(),
        ..Default::default()
    }
}

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0");
    line.trim().split(' ').next().and_then(|kb| kb.parse::<usize>().ok()).unwrap_or(0) * 1024
}

/// Median and p99 of the measured times, in microseconds.
fn spread(mut times: Vec<Duration>) -> (f64, f64) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    (at(0.5), at(0.99))
}

fn timed<T>(run: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    black_box(run());
    start.elapsed()
}

/// Serves one request as the fleet does; returns the time spent in the index, with the events built beforehand.
fn serve(index: &mut impl Index, worker: WorkerId, hashes: &[BlockHash]) -> Duration {
    let chunks: Vec<KvEvent> = (0..hashes.len())
        .step_by(16)
        .map(|at| event(&hashes[at..hashes.len().min(at + 16)], at.checked_sub(1).map(|at| &hashes[at])))
        .collect();
    timed(|| {
        index.promise(worker, hashes);
        chunks.iter().for_each(|chunk| index.apply(worker, chunk));
        index.release(worker, hashes);
    })
}

/// Rows of the table, filled by one index.
struct Figures<'a, I> {
    index: &'a mut I,
    requests: u64,
    rows: Vec<(&'static str, f64)>,
}

impl<I: Index> Figures<'_, I> {
    fn spread(&mut self, label: &'static str, times: Vec<Duration>) {
        let (median, p99) = spread(times);
        self.rows.extend([(label, median), ("  p99", p99)]);
    }

    fn fill(&mut self, blocks: u64) {
        let before = resident_bytes();
        (0..WORKERS).for_each(|worker| self.index.join(WorkerId(worker)));
        let (mut building, mut told) = (Duration::ZERO, 0);
        for request in 0..self.requests {
            let hashes = chain(request, PROMPT_BLOCKS);
            let holders = [home(request), home(request + 1)];
            for holder in &holders[..1 + usize::from(request % 4 == 0)] {
                building += serve(self.index, *holder, &hashes);
                told += hashes.len();
            }
        }
        self.rows.push(("update, ns per block told", building.as_secs_f64() * 1e9 / told as f64));
        self.rows.push(("memory, MB per million blocks", (resident_bytes() - before) as f64 / blocks as f64));
    }

    fn look_ups(&mut self, label: &'static str, question: impl Fn(u64) -> Vec<BlockHash>) {
        let times = (0..4000).map(|n| {
            let hashes = question(n);
            timed(|| self.index.hits(&hashes))
        });
        let times = times.collect();
        self.spread(label, times);
    }

    fn events(&mut self, label: &'static str, made: impl Fn(u64) -> (WorkerId, KvEvent)) {
        let times = (0..20_000).map(|n| {
            let (worker, event) = made(n);
            timed(|| self.index.apply(worker, &event))
        });
        let times = times.collect();
        self.spread(label, times);
    }

    fn measure(&mut self, blocks: u64) {
        let requests = self.requests;
        self.fill(blocks);
        self.look_ups("look-up 8k, all known, µs", |n| chain(mix(n) % requests, PROMPT_BLOCKS));
        self.look_ups("look-up 8k, head known, µs", |n| chain(requests + n, PROMPT_BLOCKS));
        let unknown = |n: u64, kind: u64| (0..PROMPT_BLOCKS).map(move |block| hash((n << 20) | block | (kind << 62)));
        self.look_ups("look-up 8k, nothing known, µs", |n| unknown(n, 1).collect());
        for long in 0..200 {
            serve(self.index, home(long), &chain((1 << 20) | long, 2500));
        }
        self.look_ups("look-up 80k, all known, µs", |n| chain((1 << 20) | (n % 200), 2500));
        // Blocks reported one at a time without their parents.
        for n in 0..100 {
            unknown(n, 2).for_each(|hash| self.index.apply(home(n), &event(&[hash], None)));
        }
        self.look_ups("look-up 8k in 256 runs, µs", |n| unknown(n % 100, 2).collect());
        let last = |request| chain(request, PROMPT_BLOCKS)[PROMPT_BLOCKS as usize - 1];
        (0..100).for_each(|n| {
            serve(self.index, home(n), &unknown(n, 2).collect::<Vec<_>>());
        });
        self.look_ups("the same, once asked for, µs", |n| unknown(n % 100, 2).collect());
        self.events("decode: one more block, µs", |n| {
            let request = mix(n) % requests;
            (home(request), event(&[hash(n | (3 << 62))], Some(&last(request))))
        });
        self.events("eviction: one block less, µs", |n| {
            let removed = vec![last(n % requests).to_bytes().to_vec()];
            (home(n % requests), KvEvent { removed, ..Default::default() })
        });
        self.rows.push(("a worker leaves, ms", timed(|| self.index.leave(WorkerId(7))).as_secs_f64() * 1e3));
    }
}

fn measure<I: Index>(index: &mut I, blocks: u64) -> Vec<(&'static str, f64)> {
    let mut figures = Figures { index, requests: blocks / (PROMPT_BLOCKS / 2), rows: Vec::new() };
    figures.measure(blocks);
    figures.rows
}

fn hashing() {
    let hasher = BlockHasher::for_request(b"tenant", "numerics");
    for tokens in [8192_u32, 80_000] {
        let prompt: Vec<u32> = (0..tokens).collect();
        let (median, _) = spread((0..200).map(|_| timed(|| hasher.chain(&prompt))).collect());
        println!("hash {tokens} tokens: {median:.1} µs, {:.0} ns per block", median * 1e3 / f64::from(tokens / 32));
    }
}

fn main() {
    let millions = std::env::args().filter_map(|arg| arg.parse::<f64>().ok()).next().unwrap_or(10.0);
    let blocks = (millions * 1e6) as u64;
    hashing();
    let mut runs = KvIndex::default();
    let ours = measure(&mut runs, blocks);
    let (run_count, places) = runs.shape();
    let held: usize = (0..WORKERS).map(|worker| runs.held(WorkerId(worker))[Tier::Device as usize]).sum();
    println!("{} blocks resident, {held} held in all, {run_count} runs, {places} places", runs.sizes().0);
    let mut entries = FlatIndex::default();
    let flat = measure(&mut entries, blocks);
    assert_eq!(runs.sizes(), entries.sizes(), "both know the same");
    println!("{:<32} {:>12} {:>20} {:>8}", "", "runs", "one entry per block", "ratio");
    for ((label, ours), (_, flat)) in ours.iter().zip(&flat) {
        println!("{label:<32} {ours:>12.2} {flat:>20.2} {:>7.2}x", ours / flat);
    }
}
