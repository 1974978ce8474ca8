//! Number of engines following the load: no request is lost, objectives are kept, and unneeded engines do not run.

use penstock_router::replicas::ReplicaLimits;
use penstock_sim::fleet::run::{Kill, Replicas, run_with_outcomes};
use penstock_sim::fleet::trace::tide;
use penstock_sim::fleet::{Report, Setup, Trace, run};
use std::time::Duration;

fn trace() -> Trace {
    Trace::new(tide(250.0, 1)).expect("has requests")
}

fn follow(start: f64, seed: u64) -> Setup {
    let limits = ReplicaLimits { min: 1, idle: Duration::from_secs(15), ..ReplicaLimits::default() };
    Setup { engines: 8, replicas: Some(Replicas { limits, start }), seed, ..Setup::default() }
}

#[test]
fn engines_come_and_go_with_the_tide() {
    let trace = trace();
    let fixed = |engines: usize| run(&trace, &Setup { engines, ..Setup::default() });
    let (most, least) = (fixed(8), fixed(3));
    let report = run(&trace, &follow(8.0, 1));
    let Report { in_slo, engine_seconds, scalings, .. } = report;
    assert_eq!((report.finished, report.rejected), (report.requests, 0));
    assert!(in_slo >= 0.9 * most.in_slo && in_slo > least.in_slo, "{in_slo}, not {} or {}", most.in_slo, least.in_slo);
    assert!(engine_seconds < 0.8 * most.engine_seconds, "{engine_seconds} of {}", most.engine_seconds);
    assert!(scalings < 20, "up and down once, not to and fro: {scalings}");
}

#[test]
fn a_seed_replays_and_every_token_comes_once() {
    let trace = trace();
    // An engine dies while others come and go.
    let kills = vec![Kill { engine: 0, at: 80.0, away: 20.0 }, Kill { engine: 1, at: 150.0, away: 5.0 }];
    let setup = Setup { kills, ..follow(5.0, 1) };
    let (report, outcomes) = run_with_outcomes(&trace, &setup);
    assert_eq!(report, run(&trace, &setup));
    assert!(report.scalings > 4 && report.resumes > 0, "{report:?}");
    for (outcome, request) in outcomes.iter().zip(&trace.requests) {
        assert_eq!(outcome.tokens, request.output);
    }
}
