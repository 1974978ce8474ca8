//! Tests of the fleet simulator: seeds replay, no request is lost, knowledge of caches pays, a flood does not drown
//! other tenants.

use penstock_router::Record;
use penstock_sim::fleet::audit::{audit, record};
use penstock_sim::fleet::eviction::{Order, replay};
use penstock_sim::fleet::recorded::{take_from, ttft};
use penstock_sim::fleet::run::{Kill, run_with_outcomes};
use penstock_sim::fleet::trace::{Shape, synthetic};
use penstock_sim::fleet::{Report, Setup, Sizes, Slo, Trace, run};
use std::collections::HashSet;

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

/// Tokens that the router believes cached are cached: events arrive, promises are kept.
#[test]
fn the_view_is_true() {
    let report = run(&slice(), &small());
    assert!((report.believed - report.hit).abs() < 0.02, "believed {:.3}, hit {:.3}", report.believed, report.hit);
    let tiers = Sizes { kv_tokens: 100_000, host_tokens: 400_000, ..Sizes::default() };
    let report = run(&slice(), &Setup { sizes: tiers, ..small() });
    assert!(report.host_hit > 0.05, "the host tier serves {:.3}", report.host_hit);
}

/// The first requests of the slice.
fn short(requests: usize) -> Trace {
    Trace::new(slice().requests[..requests].to_vec()).expect("has requests")
}

/// Setup with devices too small for the conversations' prefixes.
fn tiered(disk_tokens: usize, remote_tokens: usize, prefetch: bool) -> Setup {
    let sizes = Sizes { kv_tokens: 60_000, disk_tokens, remote_tokens, ..Sizes::default() };
    // More requests than the engines bear, so that some wait in the gateway.
    let mut setup = Setup { sizes, rate: 2.0, ..small() };
    setup.parts.prefetch = prefetch;
    setup
}

#[test]
fn what_the_device_forgot_comes_from_disk_and_from_what_all_share() {
    let trace = short(120);
    // So few requests at a time that no prompt evicts another's blocks before it begins.
    let calm = |engines, policy, disk_tokens, remote_tokens| {
        let sizes = Sizes { kv_tokens: 100_000, disk_tokens, remote_tokens, ..Sizes::default() };
        run(&trace, &Setup { engines, sizes, rate: 0.1 * engines as f64, ..with(policy) })
    };
    let alone = |disk| calm(1, "cache_aware", disk, 0);
    let in_turn = |shared| calm(4, "round_robin", 0, shared);
    // Blocks are shared once a device has evicted them, not before.
    let cases = [("disk", alone(0), alone(1_000_000), 0.2), ("shared", in_turn(0), in_turn(1_000_000), 0.05)];
    for (name, none, some, gain) in cases {
        assert_eq!((some.finished, some.rejected), (120, 0), "{name}");
        assert_eq!((none.tier_hit, none.brought, none.prefetched), (0.0, 0, 0), "{name}");
        assert!(some.tier_hit > gain && some.hit > none.hit + gain, "{name}: {some:?} {none:?}");
        assert!(some.ttft_mean < none.ttft_mean, "{name}: {:.2} against {:.2} s", some.ttft_mean, none.ttft_mean);
    }
}

#[test]
fn blocks_come_ahead_of_requests_that_wait() {
    let trace = slice();
    // So many requests at a time that many wait.
    let busy = |prefetch| run(&trace, &Setup { rate: 6.0, ..tiered(400_000, 0, prefetch) });
    let [with, without] = [true, false].map(busy);
    assert!(with.prefetched > 100, "{with:?}");
    assert_eq!((without.prefetched, without.unused), (0, 0));
    assert!(without.tier_hit > 0.02, "they are read all the same, later: {without:?}");
    assert_eq!(busy(true), with, "a seed replays");
}

#[test]
fn a_tier_finds_what_the_device_forgot_in_whatever_order_it_evicts() {
    let (trace, setup) = (slice(), small());
    let sizes = Sizes { kv_tokens: 60_000, ..setup.sizes };
    let found = |tokens, order| replay(&trace, &sizes, &setup.speed, tokens, order);
    let none = found(0, Order::None);
    for order in Order::ALL {
        let [small, large] = [100_000, 10_000_000].map(|tokens| found(tokens, order));
        assert!((large.blocks - trace_share(&trace)).abs() < 1e-9 || order == Order::None, "{order}: {large:?}");
        assert!(none.blocks <= small.blocks && small.blocks <= large.blocks, "{order}: {none:?} {small:?} {large:?}");
    }
    assert!(none.blocks > 0.05 && found(100_000, Order::Recent(0.25)).blocks > none.blocks + 0.05);
}

/// Share of the blocks that a cache of unlimited size has.
fn trace_share(trace: &Trace) -> f64 {
    let mut seen = HashSet::new();
    let (mut wanted, mut found) = (0, 0);
    for at in 0..trace.requests.len() {
        let hashes = trace.hashes(at);
        wanted += hashes.len();
        found += hashes.iter().take_while(|hash| seen.contains(*hash)).count();
        seen.extend(hashes.iter().copied());
    }
    found as f64 / wanted as f64
}

#[test]
fn nothing_waits_for_a_tier_of_an_engine_that_died() {
    let trace = slice();
    let kills = (0..12).map(|at| Kill { engine: at % 4, at: 4.0 + 3.0 * at as f64, away: 2.0 }).collect();
    let (report, outcomes) = run_with_outcomes(&trace, &Setup { kills, ..tiered(200_000, 800_000, true) });
    assert!(report.resumes > 10 && report.tier_hit > 0.02 && report.prefetched > 100, "{report:?}");
    for (outcome, request) in outcomes.iter().zip(&trace.requests) {
        assert_eq!(outcome.tokens, request.output, "every token once");
    }
}

#[test]
fn a_slow_engine_gets_less() {
    let trace = slice();
    let setup = Setup { slow: vec![(0, 0.25)], rate: 2.0, ..small() };
    let (report, outcomes) = run_with_outcomes(&trace, &setup);
    let on = |engine: usize| outcomes.iter().filter(|outcome| outcome.engine == engine).count();
    let others = (on(1) + on(2) + on(3)) / 3;
    assert!(2 * on(0) < others, "{} requests on the slow one, {others} on each other", on(0));
    assert!(matches!(report.slow[..], [(0, _, prefill)] if prefill < 0.5), "{:?}", report.slow);
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
    // Work granted before goes first: a step or two of the flood's long prompts.
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

/// A gateway's record is enough to replay its traffic: as many engines, as fast and as large, each request at its
/// recorded engine.
#[test]
fn what_a_gateway_recorded_is_replayed_with_its_own_engines() {
    let trace = short(60);
    let line = |at: usize| {
        let request = &trace.requests[at];
        let record = Record {
            timestamp: (request.arrival * 1e3) as u64,
            input_length: request.input as u32,
            output_length: request.output as u32,
            hash_ids: request.ids.clone(),
            worker: (at % 3) as u8,
            waited_ms: 100.0,
            ttft_ms: 400.0,
            speed: if at % 3 == 1 { [0.04, 4e-4, 0.0, 0.0, 0.0] } else { [0.02, 2e-4, 1e-9, 4e-5, 1e-8] },
            chunk: 2048,
            kv_tokens: 300_000,
            sequences_max: 32,
            ..Record::default()
        };
        record.line() + "\n"
    };
    let text: String = (0..trace.requests.len()).map(line).collect();
    let again = Trace::read(text.as_bytes(), 0, usize::MAX).expect("a record is a trace");
    let mut setup = Setup::default();
    take_from(&again, &mut setup);
    let Setup { engines, sizes, speed, slow, .. } = &setup;
    assert_eq!((*engines, sizes.kv_tokens, sizes.batch_tokens, sizes.sequences_max), (3, 300_000, 2048, 32));
    assert!((speed.prefill - 2e-4).abs() < 1e-9 && (speed.base - 0.02).abs() < 1e-6, "{speed:?}");
    assert!(matches!(slow[..], [(1, share)] if (share - 0.5).abs() < 1e-3), "{slow:?}");
    assert!(ttft(&again).is_some_and(|[p50, p99]| (p50 - 0.5).abs() < 1e-9 && (p99 - 0.5).abs() < 1e-9));
    let audit = audit(&again, &setup);
    assert_eq!(audit.rows[0].0, "as decided");
    assert!(audit.best > 0 && audit.regret() > 0.0, "one of three on the slow engine is not the best: {audit:?}");
}

#[test]
fn a_record_that_says_nonsense_of_its_engines_is_a_trace_all_the_same() {
    let good = r#"{"timestamp":1,"input_length":600,"output_length":2,"hash_ids":[7],"worker":2,"speed":[0,0,0,0,0],"chunk":0,"kv_tokens":0,"sequences_max":0}"#;
    for worker in ["2", "255", "null"] {
        for speed in ["[1,1e-3,0,0,0]", "[1,-1,0,0,0]", "[1e300,1,1,1,1]", "[1]", "\"fast\"", "null"] {
            let line = good.replace("[0,0,0,0,0]", speed).replace(":2,\"speed", &format!(":{worker},\"speed"));
            let trace = Trace::read(line.as_bytes(), 0, 9).expect("a request");
            let mut setup = Setup::default();
            take_from(&trace, &mut setup);
            assert!((1..=64).contains(&setup.engines) && setup.sizes == Sizes::default(), "{line}");
            assert_eq!(run(&trace, &setup).finished, 1);
        }
    }
}
