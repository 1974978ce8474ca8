//! Cost of a decision: `cargo bench -p penstock-router --bench decision [-- blocks_in_millions]`.
//!
//! 64 workers, an index of ten million blocks, prompts of 8k tokens (256 blocks, half of them shared by some). Timed: a
//! whole request (enqueue: hash the prompt and price it for its place in the queue; next: price it everywhere and bind;
//! settle; remove), the part without hashing, and a busy fleet (a thousand requests wait and one worker at a time has
//! room; then as many tenants, and ten times as many). One thread.

use penstock_proto::frames::{EngineState, KvEvent};
use penstock_proto::{BLOCK_TOKENS, BlockHasher, RequestId};
use penstock_router::{Choice, Fleet, Limits, Member, Random, View, Weights, WorkerId};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WORKERS: u8 = 64;
const PROMPT_TOKENS: usize = 8192;
const HEADS: u64 = 100;
const REQUESTS: u64 = 2000;

fn prompt(random: &mut Random) -> Arc<[u32]> {
    let (head, own) = (random.below(HEADS) as u32, random.below(1 << 31) as u32);
    let half = PROMPT_TOKENS as u32 / 2;
    (0..half).map(|at| head * 100_000 + at).chain((0..half).map(|at| own ^ at)).collect()
}

fn state(credits: u32) -> EngineState {
    EngineState {
        credits,
        prefill_rows_free: credits * 1_000_000,
        blocks_total: 1 << 20,
        blocks_free: 1 << 20,
        prefill_tokens_per_second: 14_000.0,
        step_seconds: 0.02,
        ..Default::default()
    }
}

fn view(tokens: Arc<[u32]>, tenant: u64) -> View {
    View { tokens, sequences: 1, tenant: format!("t{tenant}").into(), ..View::default() }
}

/// Fills the caches: each worker gets prompts until the index has this many blocks.
fn filled(blocks: usize) -> Fleet {
    let mut fleet = Fleet::new(Weights::default(), Limits { queue_max: 1 << 20, ..Limits::default() });
    let mut random = Random::new(1);
    for worker in 0..WORKERS {
        let member = Member {
            numerics_id: "n".into(),
            blocks_total: 1 << 20,
            sequences_max: 256,
            state: state(256),
            ..Member::default()
        };
        fleet.join(WorkerId(worker), member, &[]);
    }
    let hasher = BlockHasher::for_request(b"", "n");
    for at in 0..blocks / (PROMPT_TOKENS / BLOCK_TOKENS / 2) {
        let stored = hasher.chain(&prompt(&mut random)).iter().map(|hash| hash.to_bytes().to_vec()).collect();
        let worker = WorkerId((at % usize::from(WORKERS)) as u8);
        fleet.update(worker, None, &[KvEvent { stored, ..Default::default() }], 0);
    }
    fleet
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: usize| times[(times.len() * share / 1000).min(times.len() - 1)].as_nanos() as f64 / 1e3;
    println!("{what:<44} median {:>8.1} us   p99 {:>8.1} us", at(500), at(990));
}

fn main() {
    let millions = std::env::args().filter_map(|text| text.parse::<f64>().ok()).next().unwrap_or(10.0);
    let mut fleet = filled((millions * 1e6) as usize);
    println!(
        "{} workers, {:.1} million blocks, prompts of {PROMPT_TOKENS} tokens",
        WORKERS,
        fleet.index_sizes().0 as f64 / 1e6
    );
    let mut random = Random::new(2);
    let (mut hash, mut enqueue, mut next) = (Vec::new(), Vec::new(), Vec::new());
    for request in 0..REQUESTS {
        let (tokens, now) = (prompt(&mut random), Duration::from_millis(request * 10));
        let began = Instant::now();
        std::hint::black_box(BlockHasher::for_request(b"", "n").chain(&tokens));
        hash.push(began.elapsed());
        let began = Instant::now();
        fleet.enqueue(RequestId(request), view(tokens, request % 10), now).expect("room");
        enqueue.push(began.elapsed());
        let began = Instant::now();
        let Choice::Bind { worker, .. } = fleet.next(now) else { panic!("all have room") };
        next.push(began.elapsed());
        fleet.remove(RequestId(request));
        fleet.update(worker, Some(&state(256)), &[], u64::MAX);
    }
    let whole = enqueue.iter().zip(&next).map(|(one, other)| *one + *other).collect();
    report("hash the prompt", hash);
    report("enqueue (the hash and the first price)", enqueue);
    report("next (price 64 workers, bind, explain)", next);
    report("both", whole);

    let waiting: Vec<_> = (0..1000).map(|request| view(prompt(&mut random), request % 10)).collect();
    report("a step frame while 1000 wait (32 looked at)", busy(&mut fleet, waiting));
    for tenants in [1_000, 10_000] {
        let short = |tenant| view((0..256).map(|at| tenant as u32 ^ at << 16).collect(), tenant);
        let times = busy(&mut filled(0), (0..tenants).map(short).collect());
        report(&format!("the same while {tenants} tenants wait, one request each"), times);
    }
}

/// Times of the decisions of a fleet in which one worker at a time has room for one more, while these requests wait.
fn busy(fleet: &mut Fleet, waiting: Vec<View>) -> Vec<Duration> {
    (0..WORKERS).for_each(|worker| fleet.update(WorkerId(worker), Some(&state(0)), &[], u64::MAX));
    for (request, view) in (0..).zip(waiting) {
        fleet.enqueue(RequestId(request), view, Duration::from_secs(100)).expect("room");
    }
    let mut times = Vec::new();
    for turn in 0..500_u64 {
        let worker = WorkerId((turn % u64::from(WORKERS)) as u8);
        let now = Duration::from_secs(100) + Duration::from_millis(turn);
        fleet.update(worker, Some(&state(1)), &[], u64::MAX);
        let began = Instant::now();
        while let Choice::Bind { .. } = fleet.next(now) {}
        times.push(began.elapsed());
        fleet.update(worker, Some(&state(0)), &[], u64::MAX);
    }
    times
}
