//! Prefill and decode apart, with the demo model: every pair of (fault, worker, point, kind, way of the pages, who
//! computes the rest) on every commit; all of them with `PENSTOCK_FAULTS=full` (`make test-faults`). And clients that
//! leave.

use penstock_fleet_tests::apart::{
    Cell, END_OF_REASONING, Fault, KINDS, Kind, Outcome, POINTS, Rest, Victim, Way, all, longer, orderly, pairwise,
    request, run, undisturbed,
};
use penstock_fleet_tests::matrix::descriptors;
use penstock_fleet_tests::{Answer, wait_for};
use penstock_pool::{FleetRuntime, Job};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore};

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

/// Cells at once, over all tests: each has up to three workers.
static PLACES: Semaphore = Semaphore::const_new(4);

/// Lock that runs one test after another: each counts the open resources of this process.
static TURN: Mutex<()> = Mutex::const_new(());

/// Longest gap of a stream after a worker hung or was cut off. Twice the promise, since the cells share the machine.
const HANG_MAX: Duration = Duration::from_secs(10);

fn is_full() -> bool {
    std::env::var("PENSTOCK_FAULTS").is_ok_and(|what| what == "full")
}

/// Runs cells, a few at a time.
async fn run_all(cells: Vec<Cell>, runtime: &Arc<FleetRuntime>) -> Vec<(Cell, Option<Outcome>)> {
    let start = |cell| {
        let runtime = Arc::clone(runtime);
        let running = tokio::spawn(async move {
            let _place = PLACES.acquire().await;
            run(BINARY, &runtime, cell).await
        });
        (cell, running)
    };
    let running: Vec<_> = cells.into_iter().map(start).collect();
    let mut outcomes = Vec::new();
    for (cell, running) in running {
        outcomes.push((cell, running.await.ok()));
    }
    outcomes
}

async fn expected(runtime: &FleetRuntime, job: impl Fn(Kind) -> Job) -> Vec<Answer> {
    let mut expected = Vec::new();
    for kind in KINDS {
        expected.push(undisturbed(BINARY, runtime, job(kind)).await);
    }
    let first = |kind: Kind| expected[kind as usize].tokens[0][0];
    assert_eq!(first(Kind::Budget), END_OF_REASONING, "the first token is forced");
    assert_eq!(expected[Kind::Budget as usize].tokens[0][1], first(Kind::Guided), "and the grammar begins behind it");
    expected
}

fn choice(cells: Vec<Cell>) -> Vec<Cell> {
    if is_full() { cells } else { pairwise(&cells) }
}

/// Returns true if the answer has the expected content, regardless of its history.
fn is_same(answer: &Answer, expected: &Answer) -> bool {
    answer.tokens == expected.tokens
        && answer.logprobs == expected.logprobs
        && answer.finished == expected.finished
        && answer.failed.is_none()
}

#[tokio::test]
async fn whatever_happens_to_either_worker_the_answer_is_that_of_one() {
    let _turn = TURN.lock().await;
    let runtime = Arc::new(FleetRuntime::start().expect("the fleet runtime starts"));
    let expected = expected(&runtime, request).await;
    let before = descriptors(std::process::id());
    let (mut wrong, mut gaps) = (Vec::new(), Vec::new());
    for (cell, outcome) in run_all(choice(all()), &runtime).await {
        let Some(Outcome { answer, gap }) = outcome else {
            wrong.push(format!("{cell:?}: see above"));
            continue;
        };
        let expected = &expected[cell.kind as usize];
        // A lost prefill worker does not concern the gateway: the decode worker computes the missing part.
        let resumed: &[bool] = if cell.victim == Victim::Decode { &[true] } else { &[] };
        if !is_same(&answer, expected) || answer.resumed != resumed {
            wrong.push(format!("{cell:?}: {answer:?}\nand not {expected:?}"));
        }
        gaps.push((cell, gap));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    report(&gaps);
    let late: Vec<_> = gaps.iter().filter(|(_, gap)| *gap > HANG_MAX).collect();
    assert!(late.is_empty(), "too late: {late:?}");
    let left = || descriptors(std::process::id());
    assert!(wait_for(|| (left() <= before).then_some(())).await.is_some(), "descriptors: {before}, now {}", left());
}

/// Prints gaps by fault, worker and part of the request's life, for a person: `--nocapture` shows them.
fn report(gaps: &[(Cell, Duration)]) {
    for fault in [Fault::Kill, Fault::Stop, Fault::Cut] {
        for victim in [Victim::Prefill, Victim::Decode] {
            for (is_early, rest, when) in [
                (true, Rest::Itself, "before"),
                (true, Rest::Another, "before, with another prefill worker"),
                (false, Rest::Itself, "while it decodes"),
            ] {
                let is_in = |cell: &Cell| {
                    (cell.fault, cell.victim, cell.rest) == (fault, victim, rest) && cell.point.is_early() == is_early
                };
                let mut of: Vec<_> =
                    gaps.iter().filter(|(cell, _)| is_in(cell)).map(|(_, gap)| gap.as_millis()).collect();
                of.sort_unstable();
                if let (Some(median), Some(worst)) = (of.get(of.len() / 2), of.last()) {
                    eprintln!(
                        "{fault:?} {victim:?} {when}: {} streams, median gap {median} ms, worst {worst} ms",
                        of.len()
                    );
                }
            }
        }
    }
}

#[tokio::test]
async fn who_is_told_to_leave_finishes_what_others_wait_for_and_hands_over_the_rest() {
    let _turn = TURN.lock().await;
    let runtime = Arc::new(FleetRuntime::start().expect("the fleet runtime starts"));
    let expected = expected(&runtime, |kind| longer(request(kind))).await;
    let mut wrong = Vec::new();
    for (cell, outcome) in run_all(choice(orderly()), &runtime).await {
        let Some(Outcome { answer, .. }) = outcome else {
            wrong.push(format!("{cell:?}: see above"));
            continue;
        };
        let moved = usize::from(cell.victim == Victim::Decode);
        if !is_same(&answer, &expected[cell.kind as usize]) || (answer.moved, answer.resumed.len()) != (moved, 0) {
            wrong.push(format!("{cell:?}: {answer:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn who_leaves_is_forgotten_by_both_at_once() {
    let _turn = TURN.lock().await;
    let runtime = Arc::new(FleetRuntime::start().expect("the fleet runtime starts"));
    let kinds: &[Kind] = if is_full() { &KINDS } else { &[Kind::Two] };
    let (fault, victim, rest) = (Fault::Leave, Victim::Decode, Rest::Itself);
    let cells = POINTS.into_iter().flat_map(move |point| {
        let ways: &[Way] = if point.is_early() { &[Way::Socket, Way::Memory] } else { &[Way::Socket] };
        let cell = move |way, kind| Cell { fault, victim, point, kind, way, rest };
        ways.iter().flat_map(move |way| kinds.iter().map(move |kind| cell(*way, *kind)))
    });
    let cells = cells.collect();
    let mut times = Vec::new();
    for (cell, outcome) in run_all(cells, &runtime).await {
        let outcome = outcome.unwrap_or_else(|| panic!("{cell:?}: see above"));
        assert_eq!((outcome.answer.finished, outcome.answer.failed), (0, None), "{cell:?}");
        times.push(outcome.gap);
    }
    times.sort_unstable();
    let (median, worst) = (times[times.len() / 2], times.last().expect("there are cells"));
    eprintln!("{} clients left: all was free after a median of {median:?}, {worst:?} at worst", times.len());
}
