//! Fault matrix: every pair of (fault, point, kind) on every commit; all of them with `PENSTOCK_FAULTS=full` (`make
//! test-faults`).

use penstock_fleet_tests::matrix::{Cell, Fault, KINDS, Kind, all, descriptors, pairwise, run, undisturbed};
use penstock_fleet_tests::wait_for;
use penstock_pool::FleetRuntime;
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
