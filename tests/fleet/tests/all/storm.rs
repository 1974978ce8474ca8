//! Workers killed and stopped one after another under load. No stream may be wrong, and none may end because of it.
//!
//! Eight faults on every commit, a hundred with `PENSTOCK_FAULTS=full` (`make test-faults`).

use penstock_fleet_tests::{Answer, Dir, PATIENCE, Worker, job, pool, read, wait_for};
use penstock_pool::{FleetRuntime, Job, Pool, WorkerPhase};
use rustix::process::Signal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

/// Readers, each with one request after another.
const READERS: usize = 24;

/// Tokens of an answer.
const OUTPUT: u32 = 120;

/// Interval, in faults, at which a worker is stopped instead of killed.
const STOP_EVERY: usize = 8;

fn faults() -> usize {
    if std::env::var("PENSTOCK_FAULTS").is_ok_and(|what| what == "full") { 100 } else { 8 }
}

/// Request of the kind that a reader asks for.
fn request(kind: usize) -> Job {
    let mut job = job(vec![3 + kind as u32; 40], 1 + (kind % 3 == 2) as u32, OUTPUT);
    if kind == 0 {
        job.sampling.temperature = 0.0;
    }
    job.sampling.seed = kind as u64;
    job
}

/// Counts of the readers.
#[derive(Default)]
struct Tally {
    whole: usize,
    resumed: usize,
    wrong: Vec<String>,
}

async fn reader(pool: Pool, kind: usize, expected: Answer, over: Arc<AtomicBool>) -> Tally {
    let mut tally = Tally::default();
    while !over.load(Ordering::Relaxed) {
        let answer = read(&mut pool.submit(request(kind)).expect("taken")).await;
        tally.resumed += answer.resumed.len();
        let is_exact = answer.resumed.iter().all(|exact| *exact);
        if answer.tokens == expected.tokens && answer.finished == expected.finished && is_exact {
            tally.whole += 1;
        } else {
            tally.wrong.push(format!("kind {kind}: {answer:?}"));
        }
    }
    tally
}

/// Lets the streams go on for a number of tokens: no request meets two faults without a token between.
async fn advance(pool: &Pool) {
    let target = pool.status().counts.tokens + 4 * READERS as u64;
    assert!(wait_for(|| (pool.status().counts.tokens >= target).then_some(())).await.is_some(), "{:?}", pool.status());
}

async fn ready(pool: &Pool, count: usize) {
    let is_ready = || {
        let status = pool.status();
        let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready).count();
        (ready >= count).then_some(())
    };
    assert!(wait_for(is_ready).await.is_some(), "{:?}", pool.status());
}

#[tokio::test]
async fn no_stream_is_wrong_in_a_storm_of_faults() {
    let (dir, runtime) = (Dir::new(), FleetRuntime::start().expect("the fleet runtime starts"));
    let start = |name: &str| Worker::start(BINARY, &dir, name, &["--step-ms", "2"]);
    let names = ["a", "b", "c"];
    let mut workers: Vec<Worker> = names.iter().map(|name| start(name)).collect();
    let pool = pool(&runtime, &workers.iter().collect::<Vec<_>>(), |_| {});
    ready(&pool, 3).await;
    let mut expected = Vec::new();
    for kind in 0..6 {
        expected.push(read(&mut pool.submit(request(kind)).expect("taken")).await);
    }
    let over = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..READERS)
        .map(|at| tokio::spawn(reader(pool.clone(), at % 6, expected[at % 6].clone(), Arc::clone(&over))))
        .collect();
    for fault in 0..faults() {
        advance(&pool).await;
        let at = fault % names.len();
        if fault % STOP_EVERY == STOP_EVERY - 1 {
            workers[at].signal(Signal::STOP);
            let left = || (pool.status().workers[at].phase != WorkerPhase::Ready).then_some(());
            assert!(wait_for(left).await.is_some(), "{:?}", pool.status());
            workers[at].signal(Signal::CONT);
        } else {
            workers[at].signal(Signal::KILL);
            let _ = workers[at].code().await;
            workers[at] = start(names[at]);
        }
        ready(&pool, 3).await;
    }
    over.store(true, Ordering::Relaxed);
    let mut tally = Tally::default();
    for reader in readers {
        let one = tokio::time::timeout(PATIENCE, reader).await.expect("in time").expect("no panic");
        tally.whole += one.whole;
        tally.resumed += one.resumed;
        tally.wrong.extend(one.wrong);
    }
    eprintln!(
        "{} faults: {} streams whole, {} continuations, {} wrong",
        faults(),
        tally.whole,
        tally.resumed,
        tally.wrong.len()
    );
    assert!(tally.wrong.is_empty(), "{}", tally.wrong.join("\n"));
    assert!(tally.resumed >= faults(), "the faults met streams: {}", tally.resumed);
    let is_clean = || {
        let status = pool.status();
        let is_idle = |state: &penstock_proto::frames::EngineState| {
            state.running + state.waiting == 0 && state.blocks_free == state.blocks_total
        };
        (status.open == 0 && status.workers.iter().all(|worker| worker.bound == 0 && is_idle(&worker.state)))
            .then_some(())
    };
    assert!(wait_for(is_clean).await.is_some(), "left behind: {:?}", pool.status());
}
