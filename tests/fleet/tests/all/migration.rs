//! Requests that move while they run: for a drain, for balance, or a thousand times for a test.

use penstock_fleet_tests::puppet::{Habits, Puppet, expected};
use penstock_fleet_tests::{Answer, Dir, PATIENCE, Worker, job, read, read_into, wait_for};
use penstock_pool::{FleetRuntime, Job, MoveError, Needs, Pool, PoolConfig, PoolEvent, Steer, Ticket};
use penstock_proto::frames::{BadWord, Pooling, ReasoningBudget};
use penstock_proto::{Capability, RequestId};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PROMPT: usize = 200;

fn runtime() -> FleetRuntime {
    FleetRuntime::start().expect("the fleet runtime starts")
}

fn habits(step_ms: u64) -> Habits {
    Habits {
        step: Duration::from_millis(step_ms),
        each: Duration::ZERO,
        sequences: 64,
        pulls_fail: 0,
        pull_steps: 4,
        earlier: 0,
    }
}

async fn pool(runtime: &FleetRuntime, puppets: &[Puppet], change: impl FnOnce(&mut PoolConfig)) -> Pool {
    let mut config = PoolConfig::new("migration");
    let address = |puppet: &Puppet| format!("unix://{}", puppet.socket().display()).parse().expect("an address");
    config.connect = puppets.iter().map(address).collect();
    change(&mut config);
    let pool = Pool::start(runtime, config).expect("the pool starts");
    let ready =
        || (pool.status().workers.iter().filter(|worker| worker.epoch.0 > 0).count() == puppets.len()).then_some(());
    assert!(wait_for(ready).await.is_some(), "{:?}", pool.status());
    pool
}

/// A request whose tokens no other request shares.
fn request(seed: u64, choices: u32, tokens: u32) -> Job {
    let prompt: Vec<u32> =
        (0..PROMPT as u64).map(|i| (penstock_sim::random::mix(seed << 32 ^ i) % 250) as u32).collect();
    let mut job = job(prompt, choices, tokens);
    job.sampling.seed = seed;
    job
}

#[track_caller]
fn check(job: &Job, answer: &Answer) {
    assert_eq!(answer.failed, None);
    for (choice, tokens) in answer.tokens.iter().enumerate() {
        let count = job.sampling.max_tokens as usize;
        assert_eq!(*tokens, expected(&job.prompt, job.sampling.seed, choice as u32, count), "choice {choice}");
    }
    assert_eq!((answer.tokens.len(), answer.finished), (job.choices as usize, job.choices as usize));
}

/// Reads `tokens` tokens; also returns the worker that runs the request, and the other of two workers.
async fn begin(pool: &Pool, ticket: &mut Ticket, tokens: usize) -> (Answer, String, String) {
    let Some(PoolEvent::Bound { worker, .. }) = ticket.next().await else { panic!("not bound") };
    let mut answer = Answer::default();
    read_into(ticket, &mut answer, tokens).await;
    let names = pool.status().workers.iter().map(|worker| worker.name.clone()).collect::<Vec<_>>();
    let other = names.into_iter().find(|name| **name != *worker).expect("there are two");
    (answer, worker.to_string(), other)
}

/// A token outside the vocabulary is the fault of the worker that emits it: kept, it would be part of the
/// continuation, which every worker would refuse.
#[tokio::test]
async fn tokens_of_no_vocabulary_are_the_fault_of_the_worker_that_says_them() {
    let (dir, runtime) = (Dir::new(), runtime());
    let puppets = Puppet::start(&dir, 2, habits(3));
    let pool = pool(&runtime, &puppets, |_| {}).await;
    let job = request(1, 2, 200);
    let mut ticket = pool.submit(job.clone()).expect("taken");
    let (mut answer, at, _) = begin(&pool, &mut ticket, 50).await;
    let is_at = |puppet: &&Puppet| at.ends_with(&puppet.socket().display().to_string());
    puppets.iter().find(is_at).expect("one of them").ledger().babbles = true;
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    check(&job, &answer);
    assert!(answer.resumed.iter().all(|exact| *exact) && !answer.resumed.is_empty(), "{:?}", answer.resumed);
}

/// A worker without room for a request that has begun is asked again only after another report, and however often it refuses,
/// that is no loss.
#[tokio::test]
async fn a_request_that_has_begun_waits_for_a_worker_without_room() {
    let (dir, runtime) = (Dir::new(), runtime());
    let mut puppets = Puppet::start(&dir, 2, habits(3));
    let pool = pool(&runtime, &puppets, |_| {}).await;
    let job = request(1, 2, 200);
    let mut ticket = pool.submit(job.clone()).expect("taken");
    let (mut answer, at, _) = begin(&pool, &mut ticket, 50).await;
    puppets.sort_by_key(|puppet| at.ends_with(&puppet.socket().display().to_string()));
    puppets[0].ledger().is_full = true;
    drop(puppets.pop());
    let enough = || (puppets[0].ledger().refused >= 40).then_some(());
    assert!(wait_for(enough).await.is_some(), "{:?}", puppets[0].ledger());
    {
        let mut ledger = puppets[0].ledger();
        assert!(2 * ledger.refused <= ledger.full_steps + 2, "{ledger:?}");
        ledger.is_full = false;
    }
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    check(&job, &answer);
}

#[tokio::test]
async fn a_request_moves_and_computes_no_more_than_a_block_or_two() {
    let (dir, runtime) = (Dir::new(), runtime());
    let puppets = Puppet::start(&dir, 2, habits(3));
    let pool = pool(&runtime, &puppets, |_| {}).await;
    for choices in [1, 3] {
        let job = request(u64::from(choices), choices, 200);
        let mut ticket = pool.submit(job.clone()).expect("taken");
        let (mut answer, _, to) = begin(&pool, &mut ticket, 50).await;
        let (id, mover) = (ticket.id(), pool.clone());
        let moving = tokio::spawn(async move { mover.migrate(id, &to).await });
        read_into(&mut ticket, &mut answer, usize::MAX).await;
        assert_eq!(moving.await.expect("no panic"), Ok(()));
        check(&job, &answer);
        assert_eq!((answer.moved, &answer.resumed, answer.gaps.len()), (1, &vec![], 1));
    }
    let resumed = puppets.iter().map(|puppet| puppet.ledger().rows_resumed).max();
    assert!(resumed.is_some_and(|rows| (1..=96).contains(&rows)), "rows computed again: {resumed:?}");
    let counts = pool.status().counts;
    assert_eq!((counts.moves, counts.moves_failed, counts.resumed), ([2, 0, 0], [0; 3], 0));
    assert!(counts.moved_blocks >= 7, "{}", counts.moved_blocks);
}

/// A worker of an earlier version would pass over the field without a word.
#[tokio::test]
async fn a_request_is_bound_and_moved_to_no_worker_that_lacks_a_capability_of_it() {
    let (dir, runtime) = (Dir::new(), runtime());
    let puppets = Puppet::start(&dir, 2, Habits { earlier: 1, ..habits(3) });
    let pool = pool(&runtime, &puppets, |_| {}).await;
    let able = format!("unix://{}", puppets[1].socket().display());
    for (number, capability) in (0..).zip(Capability::ALL.into_iter().cycle().take(12)) {
        let mut job = request(number, 1, 150);
        let sampling = &mut job.sampling;
        match capability {
            Capability::Unknown => {}
            Capability::BadWords => sampling.bad_words = vec![BadWord { tokens: vec![1] }],
            Capability::LogprobTokens => (sampling.logprobs, sampling.logprob_tokens) = (0, vec![1]),
            Capability::ReasoningBudgets => sampling.reasoning = Some(ReasoningBudget::default()),
            Capability::Vectors => job.pooling = Pooling::Last,
            Capability::Encoders => job.pooling = Pooling::Mean,
            Capability::Chains => (job.pooling, job.dense_layers) = (Pooling::Mean, 2),
        }
        assert!(pool.meets(&Needs { capabilities: capability.into(), ..Needs::default() }));
        let mut ticket = pool.submit(job.clone()).expect("taken");
        let (mut answer, at, other) = begin(&pool, &mut ticket, 20).await;
        assert_eq!(at, able, "{capability:?}");
        assert_eq!(pool.migrate(ticket.id(), &other).await, Err(MoveError::Unlike), "{capability:?}");
        read_into(&mut ticket, &mut answer, usize::MAX).await;
        check(&job, &answer);
    }
    // What every worker knows goes to any.
    let mut ticket = pool.submit(request(99, 1, 150)).expect("taken");
    let (_, _, other) = begin(&pool, &mut ticket, 20).await;
    assert_eq!(pool.migrate(ticket.id(), &other).await, Ok(()));
}

#[tokio::test]
async fn a_migration_that_fails_leaves_the_request_where_it_is() {
    let (dir, runtime) = (Dir::new(), runtime());
    let puppets = Puppet::start(&dir, 2, Habits { pulls_fail: 100, ..habits(3) });
    let pool = pool(&runtime, &puppets, |_| {}).await;
    let job = request(1, 1, 150);
    let mut ticket = pool.submit(job.clone()).expect("taken");
    let (mut answer, at, to) = begin(&pool, &mut ticket, 20).await;
    assert!(matches!(pool.migrate(ticket.id(), &to).await, Err(MoveError::Failed(_))));
    assert_eq!(pool.migrate(ticket.id(), &at).await, Err(MoveError::NoWorker), "it is where it was");
    assert_eq!(pool.migrate(ticket.id(), "nobody").await, Err(MoveError::NoWorker));
    assert_eq!(pool.migrate(RequestId(ticket.id().0 + 1), &to).await, Err(MoveError::NotDecoding));
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    check(&job, &answer);
    assert_eq!((answer.moved, pool.status().counts.moves_failed), (0, [1, 0, 0]));
}

#[tokio::test]
async fn what_a_held_worker_has_moves_away() {
    let (dir, runtime) = (Dir::new(), runtime());
    let puppets = Puppet::start(&dir, 2, habits(10));
    let pool = pool(&runtime, &puppets, |_| {}).await;
    let job = request(9, 2, 400);
    let mut ticket = pool.submit(job.clone()).expect("taken");
    let (mut answer, at, to) = begin(&pool, &mut ticket, 10).await;
    pool.steer(&at, Steer::Hold).await.expect("held");
    let reader = tokio::spawn(async move {
        read_into(&mut ticket, &mut answer, usize::MAX).await;
        answer
    });
    let moved = || {
        let status = pool.status();
        let bound = |name: &str| status.workers.iter().find(|worker| worker.name == name).map(|worker| worker.bound);
        (bound(&at) == Some(0) && bound(&to) == Some(1)).then_some(())
    };
    assert!(wait_for(moved).await.is_some(), "{:?}", pool.status());
    let answer = reader.await.expect("no panic");
    check(&job, &answer);
    assert_eq!((answer.moved, &answer.resumed), (1, &vec![]));
}

/// The next request moves when one has moved, not at the periodic check five times a second.
#[tokio::test]
async fn a_full_worker_is_emptied_as_fast_as_its_requests_can_move() {
    const REQUESTS: u64 = 64;
    let (dir, runtime) = (Dir::new(), runtime());
    let puppets = Puppet::start(&dir, 2, habits(6));
    let pool = pool(&runtime, &puppets, |config| config.balance = false).await;
    let names: Vec<String> = pool.status().workers.iter().map(|worker| worker.name.clone()).collect();
    pool.steer(&names[1], Steer::Hold).await.expect("held");
    let jobs: Vec<Job> = (0..REQUESTS).map(|seed| request(seed, 1, 800)).collect();
    let readers: Vec<_> = jobs
        .into_iter()
        .map(|job| {
            let mut ticket = pool.submit(job.clone()).expect("taken");
            tokio::spawn(async move {
                let answer = read(&mut ticket).await;
                check(&job, &answer);
                (answer.moved, answer.resumed.len())
            })
        })
        .collect();
    let begun = || (u64::from(pool.status().workers[0].state.running) == REQUESTS).then_some(());
    assert!(wait_for(begun).await.is_some(), "{:?}", pool.status());
    pool.steer(&names[1], Steer::Release).await.expect("released");
    pool.steer(&names[0], Steer::Hold).await.expect("held");
    // The shown status is renewed at the periodic check.
    let (began, mut shown) = (Instant::now(), vec![pool.status()]);
    let left = || {
        let status = pool.status();
        if !Arc::ptr_eq(&shown[shown.len() - 1], &status) {
            shown.push(Arc::clone(&status));
        }
        (status.workers[0].bound == 0).then_some(())
    };
    assert!(wait_for(left).await.is_some(), "{:?}", pool.status());
    eprintln!("{REQUESTS} requests have left in {:.1?}, {} looks", began.elapsed(), shown.len() - 1);
    // Four requests move at once.
    assert!((shown.len() as u64) < REQUESTS / 4, "{} looks", shown.len());
    for reader in readers {
        assert_eq!(reader.await.expect("every token is right"), (1, 0));
    }
    assert_eq!(pool.status().counts.moves, [0, REQUESTS, 0]);
}

/// Longest time that requests of a drained worker keep trying to move.
const SOON: Duration = Duration::from_secs(4);

/// Waits until the requests are where `at` says; returns the time it took.
async fn settled(pool: &Pool, at: impl Fn(&Pool) -> bool) -> Duration {
    let began = Instant::now();
    assert!(wait_for(|| at(pool).then_some(())).await.is_some(), "{:?}", pool.status());
    began.elapsed()
}

#[tokio::test]
async fn who_was_to_take_a_request_is_left_too_and_a_third_one_takes_it() {
    let (dir, runtime) = (Dir::new(), runtime());
    let puppets = Puppet::start(&dir, 3, habits(6));
    let pool = pool(&runtime, &puppets, |config| config.balance = false).await;
    let name = |at: usize| pool.status().workers[at].name.clone();
    let job = request(3, 1, 800);
    let mut ticket = pool.submit(job.clone()).expect("taken");
    let (mut answer, first, _) = begin(&pool, &mut ticket, 10).await;
    puppets.iter().for_each(|puppet| puppet.ledger().holds_pulls = true);
    pool.steer(&first, Steer::Hold).await.expect("held");
    let asked = || puppets.iter().position(|puppet| puppet.ledger().asked > 0);
    let second = wait_for(asked).await.expect("one of the others is asked to pull");
    pool.steer(&name(second), Steer::Hold).await.expect("held");
    puppets
        .iter()
        .enumerate()
        .filter(|(at, _)| *at != second)
        .for_each(|(_, other)| other.ledger().holds_pulls = false);
    let has_it = |pool: &Pool, at: usize| pool.status().workers[at].bound == 1;
    let third = (0..3).find(|at| *at != second && name(*at) != first).expect("there are three");
    let reader = tokio::spawn(async move {
        read_into(&mut ticket, &mut answer, usize::MAX).await;
        answer
    });
    let took = settled(&pool, |pool| has_it(pool, third)).await;
    assert!(took < SOON, "{took:?}");
    // The second puppet's answer to the pull comes late, and is ignored.
    puppets[second].ledger().holds_pulls = false;
    settled(&pool, |_| puppets[second].ledger().pulls > 0).await;
    let answer = reader.await.expect("no panic");
    check(&job, &answer);
    let counts = pool.status().counts;
    assert_eq!((answer.moved, answer.resumed, counts.moves, counts.moves_failed), (1, vec![], [0, 1, 0], [0, 1, 0]));
}

#[tokio::test]
async fn a_request_whose_blocks_still_come_to_the_worker_that_is_left_moves_soon_after() {
    let (dir, runtime) = (Dir::new(), runtime());
    let puppets = Puppet::start(&dir, 2, habits(6));
    let pool = pool(&runtime, &puppets, |config| config.balance = false).await;
    let job = request(4, 2, 800);
    let mut ticket = pool.submit(job.clone()).expect("taken");
    let (mut answer, first, to) = begin(&pool, &mut ticket, 10).await;
    puppets.iter().for_each(|puppet| puppet.ledger().gives_nothing = true);
    pool.steer(&first, Steer::Hold).await.expect("held");
    let reader = tokio::spawn(async move {
        read_into(&mut ticket, &mut answer, usize::MAX).await;
        answer
    });
    settled(&pool, |pool| pool.status().counts.moves_failed[1] > 0).await;
    puppets.iter().for_each(|puppet| puppet.ledger().gives_nothing = false);
    let has_it = |pool: &Pool| pool.status().workers.iter().any(|worker| worker.name == to && worker.bound == 1);
    let took = settled(&pool, has_it).await;
    assert!(took < SOON, "{took:?}");
    let answer = reader.await.expect("no panic");
    check(&job, &answer);
    assert_eq!((answer.moved, answer.resumed), (1, vec![]));
}

#[tokio::test]
async fn a_crowd_spreads_when_there_is_room_elsewhere_and_then_stays() {
    let (dir, runtime) = (Dir::new(), runtime());
    let puppets = Puppet::start(&dir, 2, Habits { each: Duration::from_millis(2), ..habits(2) });
    let pool = pool(&runtime, &puppets, |_| {}).await;
    let names: Vec<String> = pool.status().workers.iter().map(|worker| worker.name.clone()).collect();
    // Both workers are known before: the speed of a worker without any work is unknown.
    for count in [8, 1] {
        let mut tickets: Vec<Ticket> =
            (0..count).map(|seed| pool.submit(request(100 + seed, 1, 60)).expect("taken")).collect();
        for ticket in &mut tickets {
            assert_eq!(read(ticket).await.finished, 1);
        }
    }
    pool.steer(&names[1], Steer::Hold).await.expect("held");
    let jobs: Vec<Job> = (0..8).map(|seed| request(seed, 1, 700)).collect();
    let readers: Vec<_> = jobs
        .into_iter()
        .map(|job| {
            let mut ticket = pool.submit(job.clone()).expect("taken");
            tokio::spawn(async move {
                let answer = read(&mut ticket).await;
                check(&job, &answer);
                answer.moved
            })
        })
        .collect();
    let begun = || (pool.status().workers[0].state.running == 8).then_some(());
    assert!(wait_for(begun).await.is_some());
    pool.steer(&names[1], Steer::Release).await.expect("released");
    let spread = || (pool.status().workers[1].bound >= 3).then_some(());
    assert!(wait_for(spread).await.is_some(), "{:?}", pool.status());
    let mut moves = 0;
    for reader in readers {
        moves += reader.await.expect("every token is right");
    }
    assert!((3..=8).contains(&moves), "they do not go to and fro: {moves}");
}

#[tokio::test]
async fn a_thousand_migrations_under_load_change_no_token() {
    const READERS: u64 = 24;
    const MOVES: u64 = 1000;
    let (dir, runtime) = (Dir::new(), runtime());
    let habits = Habits { pulls_fail: 40, ..habits(1) };
    let puppets = Puppet::start(&dir, 3, habits);
    let pool = pool(&runtime, &puppets, |config| config.balance = false).await;
    let names: Vec<String> = pool.status().workers.iter().map(|worker| worker.name.clone()).collect();
    let moves = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let readers: Vec<_> = (0..READERS)
        .map(|reader| {
            let (pool, names, moves) = (pool.clone(), names.clone(), Arc::clone(&moves));
            tokio::spawn(async move {
                let (mut streams, mut gaps) = (0, Vec::new());
                for round in 0_u64.. {
                    if moves.load(std::sync::atomic::Ordering::Relaxed) >= MOVES {
                        break;
                    }
                    let seed = reader * 10_000 + round;
                    let job = request(seed, 1 + (seed % 5 == 0) as u32, 150 + (seed % 90) as u32);
                    let mut ticket = pool.submit(job.clone()).expect("taken");
                    let id = ticket.id();
                    let reading = async {
                        let mut answer = Answer::default();
                        read_into(&mut ticket, &mut answer, usize::MAX).await;
                        answer
                    };
                    let moving = async {
                        for step in 0.. {
                            let to = &names[(seed + step) as usize % names.len()];
                            match pool.migrate(id, to).await {
                                Ok(()) => _ = moves.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
                                Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
                            }
                        }
                    };
                    let answer =
                        tokio::select! { answer = reading => answer, () = moving => unreachable!("it has no end") };
                    check(&job, &answer);
                    streams += 1;
                    gaps.extend(answer.gaps);
                }
                (streams, gaps)
            })
        })
        .collect();
    let began = Instant::now();
    let (mut streams, mut gaps) = (0, Vec::new());
    for reader in readers {
        let (whole, seen) =
            tokio::time::timeout(4 * PATIENCE, reader).await.expect("in time").expect("every token is right");
        streams += whole;
        gaps.extend(seen);
    }
    gaps.sort_unstable();
    let counts = pool.status().counts;
    let [moves, moves_failed] = [counts.moves, counts.moves_failed].map(|all| all.iter().sum::<u64>());
    eprintln!(
        "{} migrations and {} failed ones in {:.1?}, {streams} streams, 0 wrong; gap median {:?}, p99 {:?} with steps of {:?}",
        moves,
        moves_failed,
        began.elapsed(),
        gaps[gaps.len() / 2],
        gaps[gaps.len() * 99 / 100],
        habits.step,
    );
    assert!(moves >= MOVES && moves_failed > 0, "{counts:?}");
    let is_clean = || {
        let status = pool.status();
        let is_idle = status.workers.iter().all(|worker| worker.bound == 0 && worker.state.running == 0);
        (status.open == 0 && is_idle).then_some(())
    };
    assert!(wait_for(is_clean).await.is_some(), "left behind: {:?}", pool.status());
}

#[tokio::test]
async fn a_real_model_moves_to_and_fro_with_its_keys_and_values() {
    const MOVES: usize = 10;
    let (dir, runtime) = (Dir::new(), runtime());
    let workers = ["a", "b"].map(|name| Worker::start(env!("CARGO_BIN_EXE_fleet-worker"), &dir, name, &["--demo"]));
    let pool = penstock_fleet_tests::pool(&runtime, &[&workers[0], &workers[1]], |config| config.balance = false);
    let ready = || (pool.status().workers.iter().filter(|worker| worker.epoch.0 > 0).count() == 2).then_some(());
    assert!(wait_for(ready).await.is_some(), "{:?}", pool.status());
    let mut took = Vec::new();
    for choices in [1, 2] {
        let mut asked = job((0..620).map(|i| 1 + i * 37 % 4000).collect::<Vec<u32>>(), choices, 900);
        asked.sampling.logprobs = 1;
        let whole = read(&mut pool.submit(asked.clone()).expect("taken")).await;
        assert_eq!(whole.tokens.len(), choices as usize);
        let mut ticket = pool.submit(asked).expect("taken");
        let id = ticket.id();
        let (mut answer, at, to) = begin(&pool, &mut ticket, 10).await;
        for moves in 0..MOVES {
            let to = if moves % 2 == 0 { &to } else { &at };
            assert_eq!(pool.migrate(id, to).await, Ok(()), "move {moves}");
            // Until the worker speaks again, and a little more.
            while answer.gaps.len() <= moves {
                let more = answer.tokens[0].len() + 1;
                read_into(&mut ticket, &mut answer, more).await;
            }
            let more = answer.tokens[0].len() + 20;
            read_into(&mut ticket, &mut answer, more).await;
        }
        read_into(&mut ticket, &mut answer, usize::MAX).await;
        assert_eq!((&answer.tokens, &answer.logprobs), (&whole.tokens, &whole.logprobs));
        assert_eq!((answer.moved, &answer.resumed, &answer.failed), (MOVES, &vec![], &None));
        took.extend(answer.gaps);
    }
    took.sort_unstable();
    let steps: Vec<f64> = pool.status().workers.iter().map(|worker| worker.state.step_seconds * 1e3).collect();
    let counts = pool.status().counts;
    eprintln!(
        "{} migrations of the demo model, {} blocks moved: gap median {:.1?}, worst {:.1?}; last steps {steps:.1?} ms",
        took.len(),
        counts.moved_blocks,
        took[took.len() / 2],
        took[took.len() - 1],
    );
    // The prompt moves once; then both workers have it, and only the newer tokens move.
    assert!(counts.moved_blocks >= 19 && took.len() == 2 * MOVES, "{counts:?}");
    let is_clean = || {
        let is_idle = |state: &penstock_proto::frames::EngineState| {
            state.running + state.waiting == 0 && state.blocks_free == state.blocks_total
        };
        pool.status().workers.iter().all(|worker| is_idle(&worker.state)).then_some(())
    };
    assert!(wait_for(is_clean).await.is_some(), "left behind: {:?}", pool.status());
}

#[tokio::test]
async fn an_undisturbed_answer_of_a_puppet_is_what_is_expected() {
    let (dir, runtime) = (Dir::new(), runtime());
    let puppets = Puppet::start(&dir, 1, habits(1));
    let pool = pool(&runtime, &puppets, |_| {}).await;
    let job = request(5, 2, 100);
    let answer = read(&mut pool.submit(job.clone()).expect("taken")).await;
    check(&job, &answer);
}
