//! Fault matrix: every pair of (fault, point, kind) on every commit; all of them with `PENSTOCK_FAULTS=full` (`make
//! test-faults`).

use penstock_fleet_tests::matrix::{
    Cell, Fault, KINDS, Kind, MIDDLE, all, descriptors, pairwise, read_as, request, run, undisturbed,
};
use penstock_fleet_tests::{Dir, Worker, pool, wait_for};
use penstock_pool::{FleetRuntime, Pool, WorkerPhase};
use rustix::process::Signal;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

/// Cells at once: a hang takes waiting, not computing.
const AT_ONCE: usize = 10;

/// Longest gap of a stream after its worker hung or was cut off. Twice the promise, since ten cells share the machine.
const HANG_MAX: Duration = Duration::from_secs(10);

#[tokio::test]
async fn whatever_happens_the_answer_is_that_of_an_undisturbed_run() {
    let is_full = std::env::var("PENSTOCK_FAULTS").is_ok_and(|what| what == "full");
    let runtime = Arc::new(FleetRuntime::start().expect("the fleet runtime starts"));
    let mut expected = HashMap::new();
    for kind in KINDS {
        expected.insert(format!("{kind:?}"), undisturbed(BINARY, &runtime, kind).await);
    }
    let before = descriptors(std::process::id());
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let cells: Vec<_> = if is_full { all() } else { pairwise() }
        .into_iter()
        .map(|cell| {
            let (runtime, places) = (Arc::clone(&runtime), Arc::clone(&places));
            let running = tokio::spawn(async move {
                let _place = places.acquire_owned().await;
                run(BINARY, &runtime, cell).await
            });
            (cell, running)
        })
        .collect();
    let (mut wrong, mut gaps) = (Vec::new(), Vec::new());
    for (cell, running) in cells {
        let Ok(outcome) = running.await else {
            wrong.push(format!("{cell:?}: see above"));
            continue;
        };
        let (answer, expected) = (&outcome.answer, &expected[&format!("{:?}", cell.kind)]);
        let is_same = answer.tokens == expected.tokens && answer.failed.is_none();
        // Log-probabilities of a stopped choice end with it.
        let is_told = cell.kind == Kind::Stopped || answer.logprobs == expected.logprobs;
        if !is_same || !is_told || answer.resumed != [true] || answer.finished == 0 {
            wrong.push(format!("{cell:?}: {answer:?}\nand not {expected:?}"));
        }
        gaps.extend(outcome.gap.map(|gap| (cell, gap)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    report(&gaps);
    let late: Vec<_> = gaps.iter().filter(|(_, gap)| *gap > HANG_MAX).collect();
    assert!(late.is_empty(), "too late: {late:?}");
    let left = || descriptors(std::process::id());
    assert!(wait_for(|| (left() <= before).then_some(())).await.is_some(), "descriptors: {before}, now {}", left());
}

/// Prints gaps by fault, for a person: `--no-capture` shows them.
fn report(gaps: &[(Cell, Duration)]) {
    for fault in [Fault::Kill, Fault::Stop, Fault::Cut, Fault::Break] {
        let mut of: Vec<_> =
            gaps.iter().filter(|(cell, _)| cell.fault == fault).map(|(_, gap)| gap.as_millis()).collect();
        of.sort_unstable();
        if let (Some(median), Some(worst)) = (of.get(of.len() / 2), of.last()) {
            eprintln!("{fault:?}: {} streams went on, median gap {median} ms, worst {worst} ms", of.len());
        }
    }
}

/// Two gateways share two workers, one of which dies in the middle: the grammars and budgets of both go on.
#[tokio::test]
async fn answers_with_grammars_outlive_a_worker_that_two_gateways_share() {
    let (dir, runtime) = (Dir::new(), FleetRuntime::start().expect("the fleet runtime starts"));
    let kinds = [Kind::Guided, Kind::Budget, Kind::Sampled];
    let mut expected = Vec::new();
    for kind in kinds {
        expected.push(undisturbed(BINARY, &runtime, kind).await);
    }
    let gate = format!("{MIDDLE}:{}", dir.path().display());
    let first = Worker::start(BINARY, &dir, "a", &["--step-ms", "3", "--gate", &gate]);
    let second = format!("unix://{}", dir.file("b.sock").display());
    let gateways =
        [(); 2].map(|()| pool(&runtime, &[&first], |config| config.connect.push(second.parse().expect("an address"))));
    let worker = |gateway: &Pool, name: &str| {
        gateway
            .status()
            .workers
            .iter()
            .find(|worker| worker.name.ends_with(name))
            .map(|worker| (worker.phase == WorkerPhase::Ready, worker.bound))
    };
    let all = async |what: &dyn Fn(&Pool) -> bool| {
        for gateway in &gateways {
            assert!(wait_for(|| what(gateway).then_some(())).await.is_some(), "{:?}", gateway.status());
        }
    };
    let ready = |name| move |gateway: &Pool| worker(gateway, name).is_some_and(|(ready, _)| ready);
    all(&ready("a.sock")).await;
    let mut tickets: Vec<_> = gateways
        .iter()
        .flat_map(|gateway| {
            kinds.iter().cycle().take(6).map(|kind| (*kind, gateway.submit(request(*kind)).expect("taken")))
        })
        .collect();
    all(&|gateway| worker(gateway, "a.sock").is_some_and(|(_, bound)| bound > 0)).await;
    // The first of its answers is in the middle, and waits there while the other worker starts.
    let reached = dir.file(&format!("reached-{}", first.pid()));
    assert!(wait_for(|| reached.exists().then_some(())).await.is_some(), "the gate is reached");
    let _second = Worker::start(BINARY, &dir, "b", &["--step-ms", "3"]);
    all(&ready("b.sock")).await;
    first.signal(Signal::KILL);
    let mut moved = 0;
    for (kind, ticket) in &mut tickets {
        let answer = read_as(*kind, ticket, &mut None).await;
        let want = &expected[kinds.iter().position(|known| known == kind).expect("one of them")];
        assert_eq!((&answer.tokens, &answer.failed, answer.finished), (&want.tokens, &None, want.finished), "{kind:?}");
        moved += answer.resumed.len();
    }
    assert!(moved >= 2, "answers of both were cut: {moved}");
}
