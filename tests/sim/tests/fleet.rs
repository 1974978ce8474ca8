//! The fleet simulator: seeds replay, nothing is lost, knowing caches pays, a flood does not drown others.

use penstock_sim::fleet::audit::{audit, record};
use penstock_sim::fleet::run::{Kill, run_with_outcomes};
use penstock_sim::fleet::trace::{Shape, synthetic};
use penstock_sim::fleet::{Report, Setup, Sizes, Slo, Trace, run};

/// Conversations behind one shared head, about as many as four small engines bear.
fn slice() -> Trace {
    let shape = Shape { requests: 200, per_second: 3.0, sessions: 24, shared: 4096, turn: 3000, ..Shape::default() };
    Trace::new(synthetic(&shape)).expect("has requests")
}

fn small() -> Setup {
    let sizes = Sizes { kv_tokens: 300_000, ..Sizes::default() };
    Setup { engines: 4, sizes, ..Setup::default() }
}

fn with(policy: &str) -> Setup {
    Setup { policy: policy.parse().expect("a policy"), ..small() }
}

#[test]
fn a_seed_replays() {
    let trace = slice();
    let kills = vec![Kill { engine: 2, at: 20.0, away: 10.0 }];
    let setup = Setup { kills, rate: 1.5, ..small() };
    let first = run(&trace, &setup);
    assert_eq!(first, run(&trace, &setup));
    assert_ne!(first, run(&trace, &Setup { seed: 2, ..setup }), "noise has a seed");
}

#[test]
fn nothing_is_lost_when_engines_die() {
    let trace = slice();
    for policy in ["cache_aware", "round_robin", "oracle"] {
        let kills = (0..12).map(|at| Kill { engine: at % 4, at: 4.0 + 5.0 * at as f64, away: 3.0 }).collect();
        let (report, outcomes) = run_with_outcomes(&trace, &Setup { kills, rate: 1.5, ..with(policy) });
        assert!(report.resumes > 10, "{policy}: {} streams lost an engine", report.resumes);
        assert_eq!((report.finished, report.rejected), (200, 0), "{policy}");
        for (outcome, request) in outcomes.iter().zip(&trace.requests) {
            assert_eq!(outcome.tokens, request.output, "{policy}: every token once");
        }
    }
}

#[test]
fn a_fleet_that_dies_whole_comes_back() {
    let trace = slice();
    let kills = (0..4).map(|engine| Kill { engine, at: 10.0, away: 5.0 + engine as f64 }).collect();
    let report = run(&trace, &Setup { kills, ..small() });
    assert_eq!(report.finished, 200);
    assert!(report.gap_max >= 5.0, "nobody could answer meanwhile");
}

#[test]
fn knowing_the_caches_pays() {
    let trace = slice();
    let at = |policy| run(&trace, &Setup { rate: 2.0, ..with(policy) });
    let (aware, blind): (Report, Report) = (at("cache_aware"), at("round_robin"));
    assert!(aware.hit > blind.hit + 0.1, "hit {:.3} against {:.3}", aware.hit, blind.hit);
    assert!(aware.goodput > blind.goodput, "goodput {:.2} against {:.2}", aware.goodput, blind.goodput);
}

/// What the router believes to be cached is cached: events arrive, promises are kept.
#[test]
fn the_view_is_true() {
    let report = run(&slice(), &small());
    assert!((report.believed - report.hit).abs() < 0.02, "believed {:.3}, hit {:.3}", report.believed, report.hit);
    let tiers = Sizes { kv_tokens: 100_000, host_tokens: 400_000, ..Sizes::default() };
    let report = run(&slice(), &Setup { sizes: tiers, ..small() });
    assert!(report.host_hit > 0.05, "the host tier serves {:.3}", report.host_hit);
}

#[test]
fn a_slow_engine_gets_less() {
    let trace = slice();
    let setup = Setup { slow: vec![(0, 0.25)], rate: 2.0, ..small() };
    let (_, outcomes) = run_with_outcomes(&trace, &setup);
    let on = |engine: usize| outcomes.iter().filter(|outcome| outcome.engine == engine).count();
    let others = (on(1) + on(2) + on(3)) / 3;
    assert!(2 * on(0) < others, "{} requests on the slow one, {others} on each other", on(0));
}

#[test]
fn a_flood_does_not_drown_others() {
    let mut requests = slice().requests;
    let flood =
        Shape { requests: 800, per_second: 12.0, sessions: 200, tenant: 1, seed: 5, turn: 6000, ..Shape::default() };
    requests.extend(synthetic(&flood));
    requests.sort_by(|a, b| a.arrival.total_cmp(&b.arrival));
    let report = run(&Trace::new(requests).expect("has requests"), &small());
    let (calm, flooding) = (report.tenants[&0], report.tenants[&1]);
    // What a worker was granted before goes first: a step or two of the flood's long prompts.
    assert!(calm.ttft_p50 < flooding.ttft_p50 / 5.0, "{calm:?} {flooding:?}");
    assert!(calm.ttft_p99 < flooding.ttft_p50 / 2.0, "{calm:?} {flooding:?}");
}

#[test]
fn a_record_is_a_trace_and_its_audit_finds_better() {
    let trace = slice();
    let setup = Setup { rate: 2.0, ..with("round_robin") };
    let (report, outcomes) = run_with_outcomes(&trace, &setup);
    let mut lines = Vec::new();
    record(&trace, &outcomes, &Slo::default(), &mut lines).expect("memory takes it");
    let again = Trace::read(&lines[..], 0, usize::MAX).expect("a record is a trace");
    assert_eq!(again.requests.len(), 200);
    let audit = audit(&again, &small());
    assert_eq!(audit.rows[0].0, "as decided");
    assert!((audit.rows[0].1.hit - report.hit).abs() < 0.05, "the same decisions find about the same blocks");
    assert!(audit.regret() >= 0.0 && audit.best > 0, "round robin is not the best: {audit:?}");
}
