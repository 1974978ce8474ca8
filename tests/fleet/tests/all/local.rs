//! Local workers: started, adopted, restarted, ended; and their state after an abandoned gateway.

use penstock_fleet_tests::{Answer, Dir, PATIENCE, Worker, job, kill, local, patient, read, read_into, wait_for};
use penstock_pool::{
    FleetRuntime, Follow, Holds, Leave, LocalWorkers, Pool, PoolConfig, ReplicaOrder, Steer, SteerError, WorkerPhase,
};
use rustix::process::{Pid, Signal, test_kill_process};
use std::time::{Duration, Instant};

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

fn start(runtime: &FleetRuntime, local: LocalWorkers, change: impl FnOnce(&mut PoolConfig)) -> Pool {
    let mut config = PoolConfig::new("test");
    config.local = Some(local);
    patient(&mut config);
    change(&mut config);
    Pool::start(runtime, config).expect("the pool starts")
}

fn runtime() -> FleetRuntime {
    FleetRuntime::start().expect("the fleet runtime starts")
}

fn pids(pool: &Pool) -> Vec<u32> {
    pool.status().workers.iter().map(|worker| worker.pid).collect()
}

fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    test_kill_process(Pid::from_raw(pid as i32).expect("a pid")).is_ok() && !stat.contains(") Z")
}

async fn all_ready(pool: &Pool) {
    let ready = || pool.status().workers.iter().all(|worker| worker.phase == WorkerPhase::Ready).then_some(());
    assert!(wait_for(ready).await.is_some(), "{:?}", pool.status());
}

#[tokio::test]
async fn workers_are_started_on_their_own_and_told_to_end() {
    let (dir, runtime) = (Dir::new(), runtime());
    let pool = start(&runtime, local(BINARY, &dir, 2, &["--load-ms", "1500"]), |_| {});
    let loading = || {
        let status = pool.status();
        status.workers.iter().find_map(|worker| match &worker.phase {
            WorkerPhase::Loading { stage, bytes_total: 10, .. } => Some(stage.clone()),
            _ => None,
        })
    };
    assert_eq!(wait_for(loading).await.as_deref(), Some("packing weights"), "progress is shown");
    all_ready(&pool).await;
    let pids = pids(&pool);
    assert_ne!(pids[0], pids[1]);
    for pid in &pids {
        let pid = Pid::from_raw(*pid as i32).expect("a pid");
        assert_eq!(rustix::process::getsid(Some(pid)).ok(), Some(pid), "a session of its own");
    }
    let mut ticket = pool.submit(job([1], 1, 300)).expect("taken");
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, 5).await;
    let reader = tokio::spawn(async move {
        read_into(&mut ticket, &mut answer, usize::MAX).await;
        answer
    });
    pool.shutdown(Leave::Exit, PATIENCE).await;
    assert_eq!(reader.await.expect("no panic").tokens[0].len(), 300, "what was open is finished first");
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
    assert!(pool.submit(job([1], 1, 1)).is_err());
}

#[tokio::test]
async fn a_killed_worker_is_started_again_and_its_stream_goes_on() {
    let (dir, runtime) = (Dir::new(), runtime());
    let pool = start(&runtime, local(BINARY, &dir, 1, &["--step-ms", "5"]), |_| {});
    all_ready(&pool).await;
    let undisturbed = read(&mut pool.submit(job([3], 1, 100)).expect("taken")).await;
    let mut ticket = pool.submit(job([3], 1, 100)).expect("taken");
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, 20).await;
    let first = pids(&pool)[0];
    kill(first, Signal::KILL);
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    assert_eq!((answer.tokens, answer.resumed), (undisturbed.tokens, vec![true]));
    let worker = || {
        let worker = pool.status().workers[0].clone();
        (worker.pid != first).then_some(worker)
    };
    let worker = wait_for(worker).await.expect("a new process");
    assert_eq!((worker.starts, worker.deaths, worker.adopted), (2, 1, false));
    assert!(!is_alive(first), "and the old one leaves no zombie");
    pool.shutdown(Leave::Exit, PATIENCE).await;
}

#[tokio::test]
async fn requests_wait_through_a_reload_that_they_can_survive() {
    let (dir, runtime) = (Dir::new(), runtime());
    let slow = ["--load-ms", "1500", "--step-ms", "5"];
    let moment = Duration::from_millis(100);
    let patient = |loads: f64| {
        move |config: &mut PoolConfig| {
            (config.unavailable_after, config.resume_deadline, config.wait_loads) = (moment, moment, loads);
        }
    };
    let pool = start(&runtime, local(BINARY, &dir, 1, &slow), patient(20.0));
    all_ready(&pool).await;
    assert!(pool.status().workers[0].load >= Some(Duration::from_millis(1500)), "{:?}", pool.status());
    let mut ticket = pool.submit(job([3], 1, 60)).expect("taken");
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, 20).await;
    kill(pids(&pool)[0], Signal::KILL);
    let gone = || (!pool.status().is_ready()).then_some(());
    assert!(wait_for(gone).await.is_some());
    let mut waiting: Vec<_> = (0..3).map(|_| pool.submit(job([3], 1, 10)).expect("it waits")).collect();
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    assert_eq!((answer.tokens[0].len(), &answer.failed), (60, &None), "the interrupted one");
    for ticket in &mut waiting {
        let answer = read(ticket).await;
        assert_eq!((answer.finished, answer.failed), (1, None), "one that waited");
    }
    assert_eq!(pool.status().workers[0].ended, None, "it serves again");
    pool.shutdown(Leave::Exit, PATIENCE).await;
    // Told the reason under the config's deadlines alone.
    let dir = Dir::new();
    let pool = start(&runtime, local(BINARY, &dir, 1, &slow), patient(0.0));
    all_ready(&pool).await;
    kill(pids(&pool)[0], Signal::KILL);
    let ended = || pool.status().workers[0].ended.clone();
    assert_eq!(wait_for(ended).await.as_deref(), Some("killed by SIGKILL, perhaps out of memory"));
    let why = match pool.submit(job([3], 1, 10)) {
        Ok(mut ticket) => read(&mut ticket).await.failed.expect("nobody serves").1,
        Err(error) => error.to_string(),
    };
    assert!(why.contains("perhaps out of memory"), "{why}");
    pool.shutdown(Leave::Exit, PATIENCE).await;
}

#[tokio::test]
async fn the_next_gateway_adopts_the_workers_of_the_last() {
    let (dir, first_runtime) = (Dir::new(), runtime());
    let workers = local(BINARY, &dir, 2, &["--orphan-ms", "20000"]);
    let pool = start(&first_runtime, workers.clone(), |_| {});
    all_ready(&pool).await;
    let before = pids(&pool);
    let whole = read(&mut pool.submit(job([8], 1, 30)).expect("taken")).await;
    pool.shutdown(Leave::Adopt, PATIENCE).await;
    drop((pool, first_runtime));
    let second_runtime = runtime();
    let pool = start(&second_runtime, workers.clone(), |_| {});
    all_ready(&pool).await;
    assert_eq!(pids(&pool), before, "the same processes");
    assert!(pool.status().workers.iter().all(|worker| worker.adopted && worker.starts == 0));
    assert_eq!(read(&mut pool.submit(job([8], 1, 30)).expect("taken")).await, whole);
    // An adopted worker that dies is noticed and replaced as well.
    kill(before[0], Signal::KILL);
    let replaced = || (pool.status().workers[0].starts == 1).then_some(());
    assert!(wait_for(replaced).await.is_some());
    all_ready(&pool).await;
    // Another spec starts another worker, beside the old one.
    let third_runtime = runtime();
    let other = start(&third_runtime, LocalWorkers { identity: "newer model".into(), ..workers }, |_| {});
    all_ready(&other).await;
    assert!(pids(&other).iter().all(|pid| !pids(&pool).contains(pid)));
    other.shutdown(Leave::Exit, PATIENCE).await;
    pool.shutdown(Leave::Exit, PATIENCE).await;
}

/// Share of the machine in a worker's command line.
fn share(pid: u32) -> String {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = words.split(|byte| *byte == 0).skip_while(|word| *word != b"--machine-share");
    words.nth(1).map(|share| String::from_utf8_lossy(share).into_owned()).unwrap_or_default()
}

#[tokio::test]
async fn another_number_of_workers_keeps_those_that_run_and_then_shares_the_machine_anew() {
    let (dir, runtime) = (Dir::new(), runtime());
    let workers = local(BINARY, &dir, 2, &["--orphan-ms", "20000", "--step-ms", "2"]);
    let two = start(&runtime, workers.clone(), |_| {});
    all_ready(&two).await;
    let before = pids(&two);
    let whole = read(&mut two.submit(job([8; 70], 2, 60)).expect("taken")).await;
    let three = start(&runtime, LocalWorkers { count: 3, ..workers.clone() }, |_| {});
    all_ready(&three).await;
    assert_eq!(pids(&three)[..2], before, "those that run are taken over");
    two.shutdown(Leave::Exit, PATIENCE).await;
    assert!(before.iter().all(|pid| is_alive(*pid) && share(*pid) == "2"), "and stay as they are");
    // No other gateway holds them: one after another starts anew, under load, and nothing is lost.
    three.arrange().await;
    let (mut answers, mut fewest) = (0, 3);
    let is_done = |pool: &Pool| pids(pool).iter().all(|pid| share(*pid) == "3");
    let until = Instant::now() + PATIENCE;
    while !is_done(&three) {
        assert!(Instant::now() < until, "{:?}", three.status());
        let answer = read(&mut three.submit(job([8; 70], 2, 60)).expect("taken")).await;
        assert_eq!((&answer.tokens, &answer.failed), (&whole.tokens, &None));
        answers += 1;
        let serve = three.status().workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready).count();
        fewest = fewest.min(serve);
    }
    assert!(answers > 0 && fewest >= 2, "one at a time: {answers} answers, {fewest} workers");
    all_ready(&three).await;
    let status = three.status();
    assert_eq!(status.workers.iter().map(|worker| (worker.starts, worker.deaths)).collect::<Vec<_>>(), [(1, 0); 3]);
    // Fewer workers: the first one stays.
    let first = pids(&three)[0];
    let one =
        start(&runtime, LocalWorkers { count: 1, ..workers }, |config| config.calm_after = Duration::from_secs(2));
    all_ready(&one).await;
    three.shutdown(Leave::Exit, PATIENCE).await;
    one.arrange().await;
    assert_eq!(read(&mut one.submit(job([8; 70], 2, 60)).expect("taken")).await.tokens, whole.tokens);
    assert_eq!((pids(&one), is_alive(first)), (vec![first], true), "nobody else would serve: it stays");
    // No more requests.
    let anew = || pids(&one).iter().all(|pid| *pid != first && share(*pid) == "1").then_some(());
    assert!(wait_for(anew).await.is_some(), "{:?}", one.status());
    assert_eq!(read(&mut one.submit(job([8; 70], 2, 60)).expect("taken")).await.tokens, whole.tokens);
    assert_eq!((one.status().workers[0].starts, one.status().workers[0].deaths), (1, 0));
    one.shutdown(Leave::Exit, PATIENCE).await;
}

#[tokio::test]
async fn workers_that_the_load_has_started_stay_when_the_gateway_or_its_bounds_are_others() {
    let (dir, first_runtime) = (Dir::new(), runtime());
    let workers = local(BINARY, &dir, 3, &["--orphan-ms", "20000"]);
    let follows = |max: usize| {
        move |config: &mut PoolConfig| {
            config.replicas.follow = Follow::On;
            (config.replicas.limits.min, config.replicas.limits.max) = (1, max);
        }
    };
    let ready = |pool: &Pool, count: usize| {
        let status = pool.status();
        let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready).count();
        (ready == count).then(|| pids(pool)[..count].to_vec())
    };
    let pool = start(&first_runtime, workers.clone(), follows(3));
    assert!(wait_for(|| ready(&pool, 1)).await.is_some(), "one at the start: {:?}", pool.status());
    pool.replicas(ReplicaOrder { min: Some(2), ..ReplicaOrder::default() }).await.expect("bounded");
    let before = wait_for(|| ready(&pool, 2)).await.unwrap_or_else(|| panic!("a second one: {:?}", pool.status()));
    // Another gateway, which would start a worker.
    pool.shutdown(Leave::Adopt, PATIENCE).await;
    drop((pool, first_runtime));
    let second_runtime = runtime();
    let pool = start(&second_runtime, workers.clone(), follows(3));
    assert_eq!(wait_for(|| ready(&pool, 2)).await.as_ref(), Some(&before), "{:?}", pool.status());
    // Another bound, as after a reload of the config.
    let more = start(&second_runtime, LocalWorkers { count: 4, ..workers }, follows(4));
    assert_eq!(wait_for(|| ready(&more, 2)).await.as_ref(), Some(&before), "{:?}", more.status());
    pool.settle();
    pool.shutdown(Leave::Exit, PATIENCE).await;
    let status = more.status();
    assert!(before.iter().all(|pid| is_alive(*pid)), "{status:?}");
    assert_eq!(status.workers.iter().map(|worker| worker.starts).sum::<u64>(), 0, "none was started");
    assert_eq!(status.replicas.as_ref().map(|replicas| (replicas.running, replicas.max)), Some((2, 4)));
    more.shutdown(Leave::Exit, PATIENCE).await;
    assert!(before.iter().all(|pid| !is_alive(*pid)));
}

#[tokio::test]
async fn what_a_gateway_that_died_left_in_the_cache_is_there_for_the_next() {
    let (dir, first_runtime) = (Dir::new(), runtime());
    let workers = local(BINARY, &dir, 1, &["--orphan-ms", "20000", "--step-ms", "2"]);
    let pool = start(&first_runtime, workers.clone(), |_| {});
    all_ready(&pool).await;
    let before = pids(&pool);
    let prompt: Vec<u32> = (0..320).map(|i| 1 + i % 250).collect();
    let whole = read(&mut pool.submit(job(prompt.clone(), 1, 40)).expect("taken")).await;
    // Another request is in the middle of its answer when the gateway dies: no drain, no farewell.
    let mut open = pool.submit(job([3; 50], 1, 3000)).expect("taken");
    read_into(&mut open, &mut Answer::default(), 5).await;
    drop((pool, first_runtime));
    let second_runtime = runtime();
    let pool = start(&second_runtime, workers, |_| {});
    all_ready(&pool).await;
    assert_eq!(pids(&pool), before, "the same process");
    let idle = || (pool.status().workers[0].state.running == 0).then_some(());
    assert!(wait_for(idle).await.is_some(), "what the dead one had asked for is cancelled");
    assert!(pool.status().blocks_indexed >= 10, "the new one knows what is there");
    // The first request of this gateway has the same number as the first one of the other gateway.
    assert_eq!(read(&mut pool.submit(job(prompt, 1, 40)).expect("taken")).await.tokens, whole.tokens);
    let counts = pool.status().counts;
    let told = || (pool.status().counts.cached_tokens_told >= 288).then_some(());
    assert!(wait_for(told).await.is_some(), "{counts:?}");
    pool.shutdown(Leave::Exit, PATIENCE).await;
}

#[tokio::test]
async fn a_worker_that_two_gateways_hold_ends_with_the_second() {
    let (dir, runtime) = (Dir::new(), runtime());
    let workers = local(BINARY, &dir, 1, &["--step-ms", "5"]);
    let old = start(&runtime, workers.clone(), |_| {});
    all_ready(&old).await;
    let new = start(&runtime, workers, |_| {});
    all_ready(&new).await;
    assert_eq!(pids(&new), pids(&old));
    let mut ticket = new.submit(job([2], 1, 400)).expect("taken");
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, 5).await;
    old.shutdown(Leave::Exit, PATIENCE).await;
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    assert_eq!((answer.tokens[0].len(), answer.resumed), (400, vec![]), "the upgrade disturbs no stream");
    let pid = pids(&new)[0];
    assert!(is_alive(pid));
    new.shutdown(Leave::Exit, PATIENCE).await;
    assert!(!is_alive(pid));
}

#[tokio::test]
async fn a_worker_that_cannot_load_says_why_and_is_tried_less_and_less() {
    let (dir, runtime) = (Dir::new(), runtime());
    let pool = start(&runtime, local(BINARY, &dir, 1, &["--fail-load"]), |_| {});
    let down = || match &pool.status().workers[0] {
        worker if worker.starts >= 3 => match &worker.phase {
            WorkerPhase::Down { why, retry_in } if *retry_in > Duration::from_millis(300) => Some(why.clone()),
            _ => None,
        },
        _ => None,
    };
    let why = wait_for(down).await.expect("it goes down");
    assert!(why.contains("model.safetensors: tensor"), "{why}");
    assert!(!pool.status().is_ready());
    pool.shutdown(Leave::Exit, PATIENCE).await;
}

#[tokio::test]
async fn a_program_that_does_not_exist_is_named() {
    let (dir, runtime) = (Dir::new(), runtime());
    let pool = start(&runtime, local("/nonexistent/penstock", &dir, 1, &[]), |_| {});
    let why = || match &pool.status().workers[0].phase {
        WorkerPhase::Down { why, .. } if why.contains("/nonexistent/penstock") => Some(()),
        _ => None,
    };
    assert!(wait_for(why).await.is_some(), "{:?}", pool.status().workers[0]);
}

#[tokio::test]
async fn a_local_worker_that_hangs_is_killed_and_replaced() {
    let (dir, runtime) = (Dir::new(), runtime());
    let pool = start(&runtime, local(BINARY, &dir, 1, &[]), |config| {
        config.suspect_after = Duration::from_millis(1200);
        config.give_up_after = Duration::from_secs(2);
        config.kill_after = Duration::from_secs(3);
    });
    all_ready(&pool).await;
    let first = pids(&pool)[0];
    kill(first, Signal::STOP);
    let replaced = || (pool.status().workers[0].starts == 2 && pool.status().is_ready()).then_some(());
    assert!(wait_for(replaced).await.is_some(), "{:?}", pool.status().workers[0]);
    assert!(!is_alive(first));
    pool.shutdown(Leave::Exit, PATIENCE).await;
}

#[tokio::test]
async fn a_local_worker_that_answers_while_its_step_does_not_end_is_killed_and_its_stream_goes_on() {
    let (dir, runtime) = (Dir::new(), runtime());
    // Fewer steps are left at the hang than the next process makes before it hangs itself.
    let args = ["--step-ms", "2", "--hang-at", "60"];
    let pool = start(&runtime, local(BINARY, &dir, 1, &args), |config| {
        config.step_max = Duration::from_secs(1);
        config.give_up_after = Duration::from_secs(2);
        config.hang_after = Duration::from_secs(5);
        config.resume_deadline = PATIENCE;
    });
    all_ready(&pool).await;
    let first = pids(&pool)[0];
    let mut ticket = pool.submit(job([9; 40], 1, 90)).expect("taken");
    let answer = read(&mut ticket).await;
    assert_eq!((answer.tokens[0].len(), &answer.failed), (90, &None), "{:?}", pool.status().workers[0]);
    let worker = pool.status().workers[0].clone();
    assert!(worker.starts > 1 && worker.pid != first && !is_alive(first), "{worker:?}");
    pool.shutdown(Leave::Exit, PATIENCE).await;
}

#[tokio::test]
async fn a_worker_without_a_gateway_exits() {
    let dir = Dir::new();
    let began = Instant::now();
    let mut worker = Worker::start(BINARY, &dir, "a", &["--orphan-ms", "500"]);
    assert_eq!(worker.code().await, Some(0));
    assert!(began.elapsed() >= Duration::from_millis(500));
    assert!(!worker.socket.exists(), "its socket goes with it");
}

#[tokio::test]
async fn a_worker_whose_gateway_leaves_exits_after_its_time() {
    let (dir, runtime) = (Dir::new(), runtime());
    let mut worker = Worker::start(BINARY, &dir, "a", &["--orphan-ms", "800"]);
    let pool = penstock_fleet_tests::pool(&runtime, &[&worker], patient);
    assert!(pool.ready(PATIENCE).await);
    let _stream = pool.submit(job([1], 1, 4000)).expect("taken");
    drop(pool);
    assert_eq!(worker.code().await, Some(0));
}

#[tokio::test]
async fn a_worker_asked_to_end_finishes_what_it_has() {
    let (dir, runtime) = (Dir::new(), runtime());
    let mut worker = Worker::start(BINARY, &dir, "a", &["--step-ms", "5"]);
    let pool = penstock_fleet_tests::pool(&runtime, &[&worker], patient);
    assert!(pool.ready(PATIENCE).await);
    let mut ticket = pool.submit(job([1], 1, 100)).expect("taken");
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, 10).await;
    worker.signal(Signal::TERM);
    let draining = || (pool.status().workers[0].phase == WorkerPhase::Draining).then_some(());
    assert!(wait_for(draining).await.is_some());
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    assert_eq!((answer.tokens[0].len(), &answer.resumed, &answer.failed), (100, &vec![], &None));
    assert_eq!(worker.code().await, Some(0));
    assert_eq!(pool.status().workers[0].deaths, 0);
}

#[tokio::test]
async fn a_held_worker_gets_nothing_new_and_finishes_what_it_has() {
    let (dir, runtime) = (Dir::new(), runtime());
    let pool = start(&runtime, local(BINARY, &dir, 2, &["--step-ms", "5"]), |_| {});
    all_ready(&pool).await;
    let mut ticket = pool.submit(job([4], 1, 200)).expect("taken");
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, 5).await;
    let busy = || pool.status().workers.iter().find(|worker| worker.bound == 1).map(|worker| worker.name.clone());
    let name = wait_for(busy).await.expect("it is bound");
    pool.steer(&name, Steer::Hold).await.expect("held");
    let of =
        |name: &str| pool.status().workers.iter().find(|worker| *worker.name == *name).cloned().expect("it is there");
    assert_eq!(of(&name).phase, WorkerPhase::Draining);
    for _ in 0..4 {
        let mut other = pool.submit(job([5], 1, 20)).expect("taken");
        let mut seen = Answer::default();
        read_into(&mut other, &mut seen, 5).await;
        assert!(of(&name).bound <= 1, "nothing new");
        read_into(&mut other, &mut seen, usize::MAX).await;
    }
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    assert_eq!((answer.tokens[0].len(), answer.resumed), (200, vec![]), "what it had is finished there");
    pool.steer(&name, Steer::Release).await.expect("released");
    all_ready(&pool).await;
    assert_eq!(pool.steer("nobody", Steer::Hold).await, Err(SteerError::NotFound));
    pool.shutdown(Leave::Exit, PATIENCE).await;
}

async fn becomes(pool: &Pool, phases: [WorkerPhase; 2]) {
    let there = || pool.status().workers.iter().map(|worker| &worker.phase).eq(&phases).then_some(());
    assert!(wait_for(there).await.is_some(), "{phases:?}: {:?}", pool.status());
}

#[tokio::test]
async fn a_hold_goes_over_to_the_pool_that_takes_the_workers_over() {
    let (dir, runtime) = (Dir::new(), runtime());
    let old = start(&runtime, local(BINARY, &dir, 2, &[]), |_| {});
    all_ready(&old).await;
    let names: Vec<_> = old.status().workers.iter().map(|worker| worker.name.clone()).collect();
    old.steer(&names[0], Steer::Hold).await.expect("held");
    let next = |holds: &Holds| {
        let holds = holds.clone();
        start(&runtime, local(BINARY, &dir, 2, &[]), |config| (config.requests_max, config.holds) = (7, holds))
    };
    let new = next(old.holds());
    becomes(&new, [WorkerPhase::Draining, WorkerPhase::Ready]).await;
    assert_eq!(pids(&new), pids(&old), "the same workers");
    // An order to one of both is for both.
    old.steer(&names[1], Steer::Hold).await.expect("held");
    becomes(&new, [WorkerPhase::Draining, WorkerPhase::Draining]).await;
    assert!(new.is_up() && !new.status().takes_requests(), "nothing is missing but the operator's word");
    new.steer(&names[0], Steer::Release).await.expect("released");
    becomes(&old, [WorkerPhase::Ready, WorkerPhase::Draining]).await;
    // As another process is told.
    let told = Holds::default();
    told.replace(new.holds().names());
    let third = next(&told);
    becomes(&third, [WorkerPhase::Ready, WorkerPhase::Draining]).await;
    told.replace([]);
    all_ready(&third).await;
    for pool in [old, new, third] {
        pool.shutdown(Leave::Exit, PATIENCE).await;
    }
}

#[tokio::test]
async fn a_restarted_worker_finishes_first_and_comes_back_as_another() {
    let (dir, runtime) = (Dir::new(), runtime());
    let pool = start(&runtime, local(BINARY, &dir, 1, &["--step-ms", "5"]), |_| {});
    all_ready(&pool).await;
    let (name, first) = (pool.status().workers[0].name.clone(), pids(&pool)[0]);
    let mut ticket = pool.submit(job([4], 1, 100)).expect("taken");
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, 5).await;
    pool.steer(&name, Steer::Restart { patience: PATIENCE }).await.expect("told");
    assert_eq!(pool.steer(&name, Steer::Hold).await, Err(SteerError::Restarting));
    let waiting = pool.submit(job([6], 1, 10)).expect("taken");
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    assert_eq!((answer.tokens[0].len(), answer.resumed), (100, vec![]));
    let mut waiting = waiting;
    assert_eq!(read(&mut waiting).await.tokens[0].len(), 10, "the next life answers what came meanwhile");
    assert!(pids(&pool)[0] != first && !is_alive(first));
    let worker = pool.status().workers[0].clone();
    assert_eq!((worker.deaths, worker.phase), (0, WorkerPhase::Ready), "an orderly end is no death");
    // Without patience the worker is killed, and its requests continue at its next life.
    let mut ticket = pool.submit(job([4], 1, 100)).expect("taken");
    let mut again = Answer::default();
    read_into(&mut ticket, &mut again, 5).await;
    pool.steer(&name, Steer::Restart { patience: Duration::ZERO }).await.expect("told");
    read_into(&mut ticket, &mut again, usize::MAX).await;
    assert_eq!(again.tokens, answer.tokens, "the same tokens");
    pool.shutdown(Leave::Exit, PATIENCE).await;
}
