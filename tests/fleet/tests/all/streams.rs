//! A pool over healthy workers: streams, cancellation, backpressure.

use penstock_fleet_tests::{Answer, Dir, PATIENCE, Worker, job, patient, pool, read, read_into, wait_for};
use penstock_pool::{FleetRuntime, Pool, PoolError, PoolEvent};
use penstock_proto::ErrorKind;
use std::time::Duration;

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

fn runtime() -> FleetRuntime {
    FleetRuntime::start().expect("the fleet runtime starts")
}

fn running(pool: &Pool) -> u32 {
    pool.status().workers.iter().map(|worker| worker.state.running + worker.state.waiting).sum()
}

/// Waits until `requests` requests were taken, nothing is open anywhere, and all blocks are free or evictable.
async fn idle(pool: &Pool, requests: u64) {
    let is_idle = || {
        let status = pool.status();
        if status.counts.submitted != requests {
            return None;
        }
        let free = status.workers.iter().all(|worker| worker.state.blocks_free == worker.state.blocks_total);
        (status.open == 0 && status.waiting == 0 && running(pool) == 0 && free).then_some(())
    };
    assert!(wait_for(is_idle).await.is_some(), "not idle: {:?}", pool.status());
}

#[tokio::test]
async fn a_request_is_answered_in_full() {
    let (dir, runtime) = (Dir::new(), runtime());
    let worker = Worker::start(BINARY, &dir, "a", &[]);
    let pool = pool(&runtime, &[&worker], patient);
    assert!(pool.ready(PATIENCE).await);
    let answer = read(&mut pool.submit(job([5, 6, 7], 3, 50)).expect("taken")).await;
    assert_eq!(answer.tokens.iter().map(Vec::len).collect::<Vec<_>>(), [50, 50, 50]);
    assert_eq!((answer.finished, &answer.resumed, &answer.failed), (3, &vec![], &None));
    assert_ne!(answer.tokens[0], answer.tokens[1], "choices draw with their own randoms");
    let again = read(&mut pool.submit(job([5, 6, 7], 3, 50)).expect("taken")).await;
    assert_eq!(again, answer, "the same seed gives the same tokens");
    idle(&pool, 2).await;
    let model = pool.model().expect("known by now");
    assert_eq!((model.model.as_str(), model.context_tokens, model.vocab_size), ("fake", 4096, 256));
}

#[tokio::test]
async fn a_prefix_that_was_computed_is_told_and_predicted() {
    let (dir, runtime) = (Dir::new(), runtime());
    let worker = Worker::start(BINARY, &dir, "a", &[]);
    let pool = pool(&runtime, &[&worker], patient);
    assert!(pool.ready(PATIENCE).await);
    let prompt: Vec<u32> = (0..320).map(|i| 1 + i % 250).collect();
    read(&mut pool.submit(job(prompt.clone(), 1, 4)).expect("taken")).await;
    idle(&pool, 1).await;
    let mut ticket = pool.submit(job(prompt, 1, 4)).expect("taken");
    let Some(PoolEvent::Bound { worker: name, .. }) = ticket.next().await else { panic!("not bound") };
    assert_eq!(*name, *pool.status().workers[0].name, "who answers is said first");
    let Some(PoolEvent::Output(first)) = ticket.next().await else { panic!("no output") };
    assert_eq!(first.cached_tokens, Some(288), "all blocks but the one with the last token");
    let mut answer = Answer::default();
    answer.add(PoolEvent::Output(first));
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    let predicted = || (pool.status().counts.cached_tokens_predicted >= 288).then_some(());
    assert!(wait_for(predicted).await.is_some(), "{:?}", pool.status().counts);
}

#[tokio::test]
async fn sixty_four_streams_at_once_are_all_exact() {
    let (dir, runtime) = (Dir::new(), runtime());
    let workers =
        [Worker::start(BINARY, &dir, "a", &["--step-ms", "1"]), Worker::start(BINARY, &dir, "b", &["--step-ms", "1"])];
    let pool = pool(&runtime, &[&workers[0], &workers[1]], patient);
    assert!(pool.ready(PATIENCE).await);
    let prompt = |i: u32| vec![1 + i, 2, 3];
    let mut alone = Vec::new();
    for i in 0..4 {
        alone.push(read(&mut pool.submit(job(prompt(i), 1, 40)).expect("taken")).await.tokens);
    }
    let mut tickets: Vec<_> = (0..64).map(|i| pool.submit(job(prompt(i), 1, 40)).expect("taken")).collect();
    for (i, ticket) in tickets.iter_mut().enumerate() {
        let answer = read(ticket).await;
        assert_eq!((answer.finished, answer.tokens[0].len()), (1, 40));
        if let Some(alone) = alone.get(i) {
            assert_eq!(answer.tokens, *alone, "batch and worker do not matter");
        }
    }
    drop(tickets);
    idle(&pool, 68).await;
}

#[tokio::test]
async fn a_slow_reader_stalls_its_own_sequence_and_nothing_else() {
    let (dir, runtime) = (Dir::new(), runtime());
    let worker = Worker::start(BINARY, &dir, "a", &[]);
    let pool = pool(&runtime, &[&worker], |config| config.window_tokens = 16);
    assert!(pool.ready(PATIENCE).await);
    let mut slow = pool.submit(job([9, 9], 2, 1000)).expect("taken");
    // The request stops by itself after a window of each choice.
    assert!(wait_for(|| (slow.tokens_waiting() == 32).then_some(())).await.is_some());
    let steps = pool.status().workers[0].state.output_tokens;
    let other = read(&mut pool.submit(job([4], 1, 300)).expect("taken")).await;
    assert_eq!(other.tokens[0].len(), 300, "others go on");
    assert_eq!(slow.tokens_waiting(), 32, "and it got nothing more");
    assert!(wait_for(|| (pool.status().workers[0].state.output_tokens >= steps + 300).then_some(())).await.is_some());
    let mut answer = Answer::default();
    read_into(&mut slow, &mut answer, usize::MAX).await;
    assert_eq!(answer.tokens.iter().map(Vec::len).collect::<Vec<_>>(), [1000, 1000], "it goes on when it is read");
    idle(&pool, 2).await;
}

#[tokio::test]
async fn five_hundred_cancels_leave_nothing_behind() {
    let (dir, runtime) = (Dir::new(), runtime());
    let worker = Worker::start(BINARY, &dir, "a", &["--step-ms", "2"]);
    let pool = pool(&runtime, &[&worker], patient);
    assert!(pool.ready(PATIENCE).await);
    for round in 0..5_u32 {
        let mut tickets = Vec::new();
        for i in 0..100_u32 {
            let prompt: Vec<u32> = (0..(i * 7) % 600 + 1).map(|t| 1 + (t + i + round) % 250).collect();
            tickets.push(pool.submit(job(prompt, 1 + i % 3, 400)).expect("taken"));
        }
        // Some requests wait, some are in prefill, some decode.
        let mut answer = Answer::default();
        read_into(&mut tickets[0], &mut answer, 3).await;
        drop(tickets);
    }
    idle(&pool, 500).await;
    let counts = pool.status().counts;
    assert_eq!((counts.submitted, counts.cancelled), (500, 500), "{counts:?}");
}

#[tokio::test]
async fn one_choice_can_be_cancelled() {
    let (dir, runtime) = (Dir::new(), runtime());
    let worker = Worker::start(BINARY, &dir, "a", &["--step-ms", "2"]);
    let pool = pool(&runtime, &[&worker], patient);
    assert!(pool.ready(PATIENCE).await);
    let mut ticket = pool.submit(job([3, 3], 2, 200)).expect("taken");
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, 5).await;
    ticket.cancel_choice(0);
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    assert!(answer.tokens[0].len() < 200, "choice 0 ended early");
    assert_eq!((answer.tokens[1].len(), answer.finished), (200, 1));
    idle(&pool, 1).await;
}

#[tokio::test]
async fn what_cannot_be_served_is_refused_with_its_kind() {
    let (dir, runtime) = (Dir::new(), runtime());
    let worker = Worker::start(BINARY, &dir, "a", &[]);
    let pool = pool(&runtime, &[&worker], |config| {
        config.requests_max = 2;
        config.unavailable_after = Duration::from_millis(300);
    });
    assert!(pool.ready(PATIENCE).await);
    assert_eq!(pool.submit(job([], 1, 1)).err().map(|e| e.kind()), Some(ErrorKind::InvalidRequest));
    assert_eq!(pool.submit(job([1], 0, 1)).err().map(|e| e.kind()), Some(ErrorKind::InvalidRequest));
    let held: Vec<_> = (0..2).map(|_| pool.submit(job([1], 1, 4000)).expect("taken")).collect();
    assert!(matches!(pool.submit(job([1], 1, 1)), Err(PoolError::Overloaded { open: 2, limit: 2, .. })));
    drop(held);
    let mut late = job([1], 1, 4000);
    late.deadline = Some(std::time::Instant::now() + Duration::from_millis(300));
    let mut ticket = pool.submit(late).expect("taken");
    // The reader does not read, so the request cannot end before.
    let failed = wait_for(|| (pool.status().counts.failed == 1).then_some(())).await;
    assert!(failed.is_some());
    assert_eq!(read(&mut ticket).await.failed.map(|(kind, _)| kind), Some(ErrorKind::DeadlineExceeded));
    drop((ticket, worker));
    let gone = wait_for(|| (!pool.status().is_ready()).then_some(())).await;
    assert!(gone.is_some());
    let kind = match pool.submit(job([1], 1, 1)) {
        Ok(mut ticket) => read(&mut ticket).await.failed.map(|(kind, _)| kind),
        Err(error) => Some(error.kind()),
    };
    assert_eq!(kind, Some(ErrorKind::Unavailable));
}
