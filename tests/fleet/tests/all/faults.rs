//! Workers that die, stop, send garbage or leave, in the middle of streams.

use penstock_fleet_tests::{Answer, Dir, PATIENCE, Worker, job, pool, read, read_into, wait_for};
use penstock_pool::{FleetRuntime, Pool, Ticket, WorkerPhase};
use penstock_proto::ErrorKind;
use penstock_proto::frames::LogitBias;
use rustix::process::Signal;
use std::time::{Duration, Instant};

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

fn runtime() -> FleetRuntime {
    FleetRuntime::start().expect("the fleet runtime starts")
}

/// Waits until `count` workers are ready.
async fn all_ready(pool: &Pool, count: usize) {
    let ready = |pool: &Pool| pool.status().workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready).count();
    assert!(wait_for(|| (ready(pool) >= count).then_some(())).await.is_some(), "{:?}", pool.status());
}

/// The worker among `workers` that runs something.
async fn busy<'a>(pool: &Pool, workers: &[&'a Worker]) -> &'a Worker {
    let busy = || {
        let status = pool.status();
        let index = status.workers.iter().position(|worker| worker.bound > 0)?;
        workers.iter().find(|worker| worker.pid() == status.workers[index].pid).copied()
    };
    wait_for(busy).await.expect("one of them runs the request")
}

async fn begin(ticket: &mut Ticket, tokens: usize) -> Answer {
    let mut answer = Answer::default();
    read_into(ticket, &mut answer, tokens).await;
    answer
}

/// Reads until the first token of another worker; tokens in flight from the first one still come before.
async fn moved(ticket: &mut Ticket, mut answer: Answer) -> Answer {
    while answer.resumed.is_empty() {
        let more = answer.tokens[0].len() + 1;
        read_into(ticket, &mut answer, more).await;
    }
    answer
}

async fn finish(ticket: &mut Ticket, mut answer: Answer) -> Answer {
    read_into(ticket, &mut answer, usize::MAX).await;
    answer
}

#[tokio::test]
async fn a_stream_survives_the_death_of_its_worker_bit_by_bit() {
    let (dir, runtime) = (Dir::new(), runtime());
    let [a, b] = ["a", "b"].map(|name| Worker::start(BINARY, &dir, name, &["--step-ms", "5"]));
    let pool = pool(&runtime, &[&a, &b], |_| {});
    all_ready(&pool, 2).await;
    let prompt: Vec<u32> = (1..100).collect();
    let undisturbed = read(&mut pool.submit(job(prompt.clone(), 3, 120)).expect("taken")).await;
    let mut ticket = pool.submit(job(prompt, 3, 120)).expect("taken");
    let answer = begin(&mut ticket, 40).await;
    busy(&pool, &[&a, &b]).await.signal(Signal::KILL);
    let killed = Instant::now();
    let answer = moved(&mut ticket, answer).await;
    assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
    let answer = finish(&mut ticket, answer).await;
    assert_eq!(answer.tokens, undisturbed.tokens, "the same tokens, each once");
    assert_eq!((answer.finished, &answer.resumed, &answer.failed), (3, &vec![true], &None));
}

#[tokio::test]
async fn other_numerics_continue_the_stream_and_say_so() {
    let (dir, runtime) = (Dir::new(), runtime());
    let a = Worker::start(BINARY, &dir, "a", &["--step-ms", "5", "--numerics", "one"]);
    let b = Worker::start(BINARY, &dir, "b", &["--step-ms", "5", "--numerics", "two"]);
    let pool = pool(&runtime, &[&a, &b], |_| {});
    all_ready(&pool, 2).await;
    let mut ticket = pool.submit(job([1, 2], 1, 100)).expect("taken");
    let answer = begin(&mut ticket, 20).await;
    busy(&pool, &[&a, &b]).await.signal(Signal::KILL);
    let answer = finish(&mut ticket, answer).await;
    assert_eq!((answer.tokens[0].len(), answer.resumed), (100, vec![false]));
}

#[tokio::test]
async fn with_no_worker_left_a_stream_fails_in_time_and_says_why() {
    let (dir, runtime) = (Dir::new(), runtime());
    let a = Worker::start(BINARY, &dir, "a", &["--step-ms", "5"]);
    let pool = pool(&runtime, &[&a], |config| config.resume_deadline = Duration::from_millis(500));
    all_ready(&pool, 1).await;
    let mut ticket = pool.submit(job([1, 2], 2, 1000)).expect("taken");
    let answer = begin(&mut ticket, 10).await;
    a.signal(Signal::KILL);
    let answer = finish(&mut ticket, answer).await;
    assert_eq!(answer.failed.map(|(kind, _)| kind), Some(ErrorKind::WorkerFailed));
    assert!(answer.finished == 0 && answer.tokens[0].len() >= 10);
}

#[tokio::test]
async fn a_restarted_worker_continues_what_it_had() {
    let (dir, runtime) = (Dir::new(), runtime());
    let a = Worker::start(BINARY, &dir, "a", &["--step-ms", "5"]);
    let pool = pool(&runtime, &[&a], |_| {});
    all_ready(&pool, 1).await;
    let undisturbed = read(&mut pool.submit(job([1, 2], 1, 100)).expect("taken")).await;
    let mut ticket = pool.submit(job([1, 2], 1, 100)).expect("taken");
    let answer = begin(&mut ticket, 10).await;
    drop(a);
    let again = Worker::start(BINARY, &dir, "a", &["--step-ms", "5"]);
    let answer = finish(&mut ticket, answer).await;
    assert_eq!((answer.tokens, answer.resumed), (undisturbed.tokens, vec![true]));
    drop(again);
}

#[tokio::test]
async fn a_stopped_worker_is_left_in_time_and_fenced_when_it_wakes() {
    let (dir, runtime) = (Dir::new(), runtime());
    let [a, b] = ["a", "b"].map(|name| Worker::start(BINARY, &dir, name, &["--step-ms", "10"]));
    let pool = pool(&runtime, &[&a, &b], |_| {});
    all_ready(&pool, 2).await;
    let undisturbed = read(&mut pool.submit(job([7, 8], 1, 200)).expect("taken")).await;
    let mut ticket = pool.submit(job([7, 8], 1, 200)).expect("taken");
    let answer = begin(&mut ticket, 20).await;
    let stopped = busy(&pool, &[&a, &b]).await;
    stopped.signal(Signal::STOP);
    let began = Instant::now();
    let answer = moved(&mut ticket, answer).await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    stopped.signal(Signal::CONT);
    let answer = finish(&mut ticket, answer).await;
    assert_eq!((answer.tokens, answer.resumed), (undisturbed.tokens, vec![true]));
    all_ready(&pool, 2).await;
    let deaths: u64 = pool.status().workers.iter().map(|worker| worker.deaths).sum();
    assert_eq!(deaths, 0, "it was given up, it did not die");
}

#[tokio::test]
async fn a_step_that_never_ends_is_noticed_though_the_heart_beats() {
    let (dir, runtime) = (Dir::new(), runtime());
    let a = Worker::start(BINARY, &dir, "a", &["--step-ms", "2", "--hang-at", "60"]);
    let b = Worker::start(BINARY, &dir, "b", &["--step-ms", "2"]);
    let pool = pool(&runtime, &[&a, &b], |config| config.step_max = Duration::from_secs(1));
    all_ready(&pool, 2).await;
    // One request on each worker.
    let mut tickets = [9, 10].map(|token| pool.submit(job([token; 40], 1, 200)).expect("taken"));
    let mut resumed = 0;
    for ticket in &mut tickets {
        let answer = read(ticket).await;
        assert_eq!((answer.tokens[0].len(), &answer.failed), (200, &None));
        assert!(answer.resumed.iter().all(|exact| *exact));
        resumed += answer.resumed.len();
    }
    assert_eq!(resumed, 1, "what ran on the hung one");
}

#[tokio::test]
async fn a_request_of_which_workers_die_takes_two_with_it_and_no_more() {
    let (dir, runtime) = (Dir::new(), runtime());
    let workers =
        ["a", "b", "c"].map(|name| Worker::start(BINARY, &dir, name, &["--step-ms", "5", "--death-token", "66"]));
    let pool = pool(&runtime, &[&workers[0], &workers[1], &workers[2]], |_| {});
    all_ready(&pool, 3).await;
    let mut harmless = job([1, 2], 1, 300);
    harmless.sampling.logit_bias.push(LogitBias { token: 66, bias: -100.0 });
    let mut innocent = pool.submit(harmless).expect("taken");
    let begun = begin(&mut innocent, 5).await;
    let answer = read(&mut pool.submit(job([66], 1, 10)).expect("taken")).await;
    let (kind, message) = answer.failed.expect("it fails");
    assert_eq!(kind, ErrorKind::WorkerFailed);
    assert!(message.contains("two workers"), "{message}");
    let answer = finish(&mut innocent, begun).await;
    assert!(answer.finished == 1 || answer.failed.is_some(), "{answer:?}");
    let left =
        wait_for(|| (pool.status().workers.iter().map(|worker| worker.deaths).sum::<u64>() == 2).then_some(())).await;
    assert!(left.is_some());
    assert!(pool.status().is_ready(), "one is left");
}

#[tokio::test]
async fn a_storm_of_kills_corrupts_nothing() {
    let (dir, runtime) = (Dir::new(), runtime());
    let mut workers: Vec<Worker> =
        ["a", "b", "c"].iter().map(|name| Worker::start(BINARY, &dir, name, &["--step-ms", "3"])).collect();
    let pool = pool(&runtime, &workers.iter().collect::<Vec<_>>(), |_| {});
    all_ready(&pool, 3).await;
    let undisturbed = read(&mut pool.submit(job([4, 4, 4], 1, 150)).expect("taken")).await;
    let tickets: Vec<Ticket> = (0..40).map(|_| pool.submit(job([4, 4, 4], 1, 150)).expect("taken")).collect();
    let readers: Vec<_> =
        tickets.into_iter().map(|mut ticket| tokio::spawn(async move { read(&mut ticket).await })).collect();
    for (round, name) in ["a", "b", "c"].iter().enumerate() {
        let tokens = 500 * (round as u64 + 1);
        let far = wait_for(|| (pool.status().counts.tokens > tokens).then_some(())).await;
        assert!(far.is_some());
        // The worker is killed and replaced.
        workers[round] = {
            workers[round].signal(Signal::KILL);
            let _ = workers[round].code().await;
            Worker::start(BINARY, &dir, name, &["--step-ms", "3"])
        };
    }
    let mut whole = 0;
    for reader in readers {
        let answer = reader.await.expect("the reader did not panic");
        match &answer.failed {
            None => {
                assert_eq!(answer.tokens, undisturbed.tokens);
                whole += 1;
            }
            // A request that was present at two deaths is suspected of causing them; its tokens until then are right
            // all the same.
            Some((kind, _)) => {
                assert_eq!(*kind, ErrorKind::WorkerFailed);
                let said = answer.tokens.first().map_or(&[][..], Vec::as_slice);
                assert!(undisturbed.tokens[0].starts_with(said));
            }
        }
    }
    assert!(whole >= 20, "{whole} of 40 whole");
}

#[tokio::test]
async fn a_worker_of_another_model_is_refused_until_the_last_of_the_old_one_has_gone() {
    let (dir, runtime) = (Dir::new(), runtime());
    let a = Worker::start(BINARY, &dir, "a", &["--step-ms", "5"]);
    let b = Worker::start(BINARY, &dir, "b", &["--load-ms", "300", "--model", "other"]);
    let pool = pool(&runtime, &[&a, &b], |_| {});
    assert!(pool.ready(PATIENCE).await);
    let refused = |pool: &Pool| matches!(&pool.status().workers[1].phase, WorkerPhase::Down { why, .. } if why.contains("another model"));
    assert!(wait_for(|| refused(&pool).then_some(())).await.is_some(), "{:?}", pool.status().workers[1]);
    let hash = |pool: &Pool| pool.status().model.as_ref().map(|model| model.model_hash.clone());
    let before = hash(&pool);
    let mut ticket = pool.submit(job([1, 2], 1, 400)).expect("taken");
    begin(&mut ticket, 20).await;
    a.signal(Signal::KILL);
    // The stream of the old model waits for a worker of it; without the stream the pool is the other model's.
    drop(ticket);
    let ready = |pool: &Pool| pool.status().workers[1].phase == WorkerPhase::Ready;
    assert!(wait_for(|| ready(&pool).then_some(())).await.is_some(), "{:?}", pool.status().workers[1]);
    assert_ne!(hash(&pool), before);
    assert_eq!(read(&mut pool.submit(job([1, 2], 1, 10)).expect("taken")).await.failed, None);
}
