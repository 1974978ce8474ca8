//! Tests of the router's interface: which request is bound, which waits, which is refused.

use penstock_proto::frames::{Batch, EngineState, KvEvent, Role, Tier, TierState};
use penstock_proto::{AdapterId, BLOCK_TOKENS, BlockHasher, RequestId};
use penstock_router::{Choice, Fleet, Limits, Member, Needs, Refusal, Slo, View, Weights, WorkerId};
use std::sync::Arc;
use std::time::Duration;

const A: WorkerId = WorkerId(0);
const B: WorkerId = WorkerId(1);

fn state(credits: u32) -> EngineState {
    EngineState {
        credits,
        blocks_total: 1000,
        blocks_free: 1000,
        prefill_tokens_per_second: 1000.0,
        step_seconds: 0.01,
        ..Default::default()
    }
}

fn member(numerics: &str, credits: u32) -> Member {
    Member {
        numerics_id: numerics.into(),
        blocks_total: 1000,
        sequences_max: 64,
        state: state(credits),
        ..Member::default()
    }
}

fn view(tokens: u32) -> View {
    View { tokens: (0..tokens).collect(), salt: Arc::from(&b"s"[..]), sequences: 1, ..View::default() }
}

fn resumed(numerics: &str) -> View {
    View { numerics_id: Some(numerics.into()), resumed: true, ..view(10) }
}

fn stored(tokens: u32, numerics: &str) -> KvEvent {
    let hashes = BlockHasher::for_request(b"s", numerics).chain(&(0..tokens).collect::<Vec<_>>());
    KvEvent { stored: hashes.into_iter().map(|hash| hash.to_bytes().to_vec()).collect(), ..Default::default() }
}

fn fleet(limits: Limits) -> Fleet {
    Fleet::new(Weights::default(), limits)
}

fn two() -> Fleet {
    let mut fleet = fleet(Limits::default());
    fleet.join(A, member("n", 2), &[]);
    fleet.join(B, member("n", 2), &[]);
    fleet
}

/// Binds all requests that can be bound at `now`: (request, worker, exact).
fn bindings(fleet: &mut Fleet, now: u64) -> Vec<(u64, WorkerId, bool)> {
    std::iter::from_fn(|| match fleet.next(Duration::from_secs(now)) {
        Choice::Bind { request, worker, exact, .. } => Some((request.0, worker, exact)),
        Choice::Refuse { .. } | Choice::Hold => None,
    })
    .collect()
}

fn workers(fleet: &mut Fleet) -> Vec<WorkerId> {
    bindings(fleet, 0).into_iter().map(|(_, worker, _)| worker).collect()
}

#[test]
fn an_idle_fleet_fills_evenly_and_no_further_than_its_credits() {
    let mut fleet = two();
    for request in 0..6 {
        // Prompts of different lengths, so that no prefix is shared.
        let tokens: Arc<[u32]> = vec![request as u32; 40].into();
        fleet.enqueue(RequestId(request), View { tokens, ..view(0) }, Duration::ZERO).expect("room");
    }
    let mut got = workers(&mut fleet);
    got.sort();
    assert_eq!(got, [A, A, B, B]);
    assert_eq!(fleet.waiting(), 2);
    // The worker has taken its two requests, one of them ended: one credit.
    fleet.update(A, Some(&state(1)), &[], 2);
    assert_eq!(workers(&mut fleet), [A]);
    assert_eq!(workers(&mut fleet), [], "what was sent counts until the worker counts it");
}

#[test]
fn a_cached_prefix_draws_its_request() {
    let mut fleet = two();
    fleet.update(B, None, &[stored(640, "n")], 0);
    for request in 0..2 {
        fleet.enqueue(RequestId(request), view(700), Duration::ZERO).expect("room");
        let Choice::Bind { worker, cached_tokens, ttft, .. } = fleet.next(Duration::ZERO) else { panic!("held") };
        assert_eq!((worker, cached_tokens), (B, 640 + 32 * u32::from(request > 0)), "resident, then promised too");
        assert!(ttft < Duration::from_millis(200), "60 tokens and a step: {ttft:?}");
    }
}

/// State of a full worker that has a disk.
fn full(seconds: f64) -> EngineState {
    let disk = TierState { load_seconds_per_block: 0.001, tier: Tier::Disk as i32, ..TierState::default() };
    EngineState { credits: 0, running: 1, queue_seconds: seconds, tiers: vec![disk], ..state(0) }
}

fn on_disk(tokens: u32) -> KvEvent {
    KvEvent { tier: Tier::Disk as i32, ..stored(tokens, "n") }
}

#[test]
fn who_will_get_a_request_that_waits_may_load_for_it() {
    let mut fleet = two();
    fleet.update(A, Some(&full(1.0)), &[], 0);
    fleet.update(B, Some(&full(1.0)), &[on_disk(640)], 0);
    fleet.enqueue(RequestId(1), view(704), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), []);
    let [ahead] = &fleet.ahead(Duration::ZERO)[..] else { panic!("one waits") };
    assert_eq!((ahead.request.0, ahead.worker, ahead.blocks.len()), (1, B, 21), "the last token is always computed");
    assert!(ahead.wait >= Duration::from_secs(1));
    assert_eq!(fleet.ahead(Duration::ZERO), [], "it is said once");
    // No worker has blocks of it below the device, and no request waits.
    let other: Arc<[u32]> = vec![9; 704].into();
    fleet.enqueue(RequestId(2), View { tokens: other, ..view(0) }, Duration::ZERO).expect("room");
    assert_eq!(fleet.ahead(Duration::ZERO), []);
    fleet.update(B, Some(&EngineState { tiers: full(0.0).tiers, ..state(5) }), &[], 0);
    fleet.enqueue(RequestId(3), view(704), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0).len(), 3);
    assert_eq!(fleet.ahead(Duration::ZERO), []);
}

#[test]
fn a_store_that_others_write_to_is_asked_ahead_too() {
    let mut fleet = two();
    let remote = TierState { tier: Tier::Remote as i32, blocks_total: 100, ..TierState::default() };
    fleet.update(A, Some(&EngineState { tiers: vec![remote], ..full(1.0) }), &[], 0);
    fleet.leave(B);
    for (request, tokens) in [(1, 704), (2, 40)] {
        fleet.enqueue(RequestId(request), view(tokens), Duration::ZERO).expect("room");
    }
    let named: Vec<u64> = fleet.ahead(Duration::ZERO).iter().map(|ahead| ahead.request.0).collect();
    assert_eq!(named, [1], "one block is not worth a question");
}

#[test]
fn a_long_queue_outweighs_a_short_prefix() {
    let mut fleet = two();
    fleet.update(B, Some(&EngineState { queue_seconds: 9.0, ..state(2) }), &[stored(64, "n")], 0);
    fleet.enqueue(RequestId(1), view(700), Duration::ZERO).expect("room");
    assert_eq!(workers(&mut fleet), [A]);
}

#[test]
fn two_requests_with_one_prefix_go_to_one_worker() {
    let mut fleet = two();
    fleet.enqueue(RequestId(1), view(3200), Duration::ZERO).expect("room");
    fleet.enqueue(RequestId(2), view(3200), Duration::ZERO).expect("room");
    let got = workers(&mut fleet);
    assert_eq!(got[0], got[1], "the second finds the blocks of the first promised there");
    fleet.settle(RequestId(1));
    fleet.remove(RequestId(2));
    assert_eq!(fleet.index_sizes(), (0, 0));
}

#[test]
fn salts_and_numerics_do_not_share() {
    let mut fleet = two();
    fleet.update(B, Some(&EngineState { queue_seconds: 0.01, ..state(2) }), &[stored(640, "other")], 0);
    fleet.enqueue(RequestId(1), view(700), Duration::ZERO).expect("room");
    fleet.enqueue(RequestId(2), View { salt: Arc::from(&b"t"[..]), ..view(700) }, Duration::ZERO).expect("room");
    for _ in 0..2 {
        let Choice::Bind { cached_tokens, .. } = fleet.next(Duration::ZERO) else { panic!("held") };
        assert_eq!(cached_tokens, 0);
    }
}

#[test]
fn a_resumed_request_waits_for_its_numerics_and_then_takes_what_there_is() {
    let mut fleet = fleet(Limits { exact_wait: Duration::from_secs(2), ..Limits::default() });
    fleet.join(A, member("one", 0), &[]);
    fleet.join(B, member("two", 5), &[]);
    fleet.enqueue(RequestId(1), resumed("one"), Duration::ZERO).expect("never refused");
    fleet.enqueue(RequestId(2), view(10), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 1), [(2, B, true)], "others need not wait for it");
    assert_eq!(bindings(&mut fleet, 3), [(1, B, false)]);
    fleet.enqueue(RequestId(3), resumed("one"), Duration::from_secs(3)).expect("never refused");
    fleet.update(A, Some(&state(1)), &[], 0);
    assert_eq!(bindings(&mut fleet, 3), [(3, A, true)]);
    fleet.leave(A);
    fleet.enqueue(RequestId(4), resumed("one"), Duration::from_secs(3)).expect("never refused");
    assert_eq!(bindings(&mut fleet, 3), [(4, B, false)], "nobody of its own is left: no use in waiting");
}

fn with_role(role: Role, member: Member) -> Member {
    Member { state: EngineState { role: role as i32, ..member.state }, ..member }
}

/// Two workers, of which the first has an adapter and no credits, with `held` requests that wait for the adapter.
fn two_with_an_adapter(held: u64) -> Fleet {
    let mut fleet = fleet(Limits::default());
    fleet.join(A, member("n", 0), &[]);
    fleet.join(B, member("n", 2), &[]);
    fleet.adapt(A, [AdapterId(7)].into());
    for request in 0..held {
        let needs = Needs { adapter: Some(AdapterId(7)), ..Needs::default() };
        fleet.enqueue(RequestId(request), View { needs, ..view(10) }, Duration::ZERO).expect("room");
    }
    fleet
}

#[test]
fn hundreds_that_wait_for_one_worker_hide_nobody_from_the_others() {
    // Of a later lane, of another tenant, and of the same line.
    let later = View { priority: 1000, ..view(10) };
    let other = View { tenant: "other".into(), ..view(10) };
    for behind in [later, other, view(10)] {
        let mut fleet = two_with_an_adapter(300);
        fleet.enqueue(RequestId(900), behind, Duration::ZERO).expect("room");
        assert_eq!(bindings(&mut fleet, 0), [(900, B, true)]);
        // The worker of the many serves them in their order.
        fleet.update(A, Some(&state(2)), &[], 0);
        assert_eq!(bindings(&mut fleet, 0), [(0, A, true), (1, A, true)]);
    }
}

#[test]
fn who_stands_behind_thousands_is_found_after_a_few_looks_and_goes_in_its_order() {
    let mut fleet = two_with_an_adapter(3000);
    // A worker that takes none of them: what has room elsewhere is looked for all the same.
    fleet.join(WorkerId(2), with_role(Role::Prefill, member("n", 5)), &[]);
    for request in 3000..3010 {
        fleet.enqueue(RequestId(request), view(10), Duration::ZERO).expect("room");
    }
    let at = |tick: u64| Duration::from_millis(50 * tick);
    let next = |fleet: &mut Fleet, tick| match fleet.next(at(tick)) {
        Choice::Bind { request, worker, .. } => Some((request.0, worker)),
        Choice::Refuse { .. } | Choice::Hold => None,
    };
    let looks = (0..20).find(|tick| next(&mut fleet, *tick) == Some((3000, B)));
    let looks = looks.expect("each look goes further than the one before");
    assert_eq!(next(&mut fleet, looks), Some((3001, B)));
    // The others wait for the busy worker too, and for its next credits in their order.
    fleet.update(B, Some(&state(0)), &[], 2);
    (0..20).for_each(|tick| assert_eq!(next(&mut fleet, looks + tick), None));
    fleet.update(B, Some(&state(1)), &[], 2);
    assert_eq!(next(&mut fleet, looks + 21), Some((3002, B)));
}

#[test]
fn a_prefill_worker_decodes_what_no_other_worker_can() {
    let mut fleet = fleet(Limits { exact_wait: Duration::from_secs(2), ..Limits::default() });
    fleet.join(A, with_role(Role::Prefill, member("one", 5)), &[]);
    fleet.join(B, with_role(Role::Decode, member("two", 5)), &[]);
    fleet.enqueue(RequestId(1), resumed("one"), Duration::ZERO).expect("never refused");
    assert_eq!(bindings(&mut fleet, 0), [(1, A, true)], "the other one has other numerics");
    fleet.adapt(A, [AdapterId(7)].into());
    let needs = Needs { adapter: Some(AdapterId(7)), ..Needs::default() };
    fleet.enqueue(RequestId(2), View { needs, ..view(10) }, Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), [(2, A, true)], "the other one has no adapter");
    fleet.enqueue(RequestId(3), view(10), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), [(3, B, true)]);
}

#[test]
fn a_prefill_worker_with_room_is_no_reason_to_wait_for_its_numerics() {
    let mut fleet = fleet(Limits { exact_wait: Duration::from_secs(2), ..Limits::default() });
    fleet.join(A, with_role(Role::Prefill, member("one", 5)), &[]);
    fleet.join(B, with_role(Role::Decode, member("one", 0)), &[]);
    fleet.join(WorkerId(2), with_role(Role::Decode, member("two", 5)), &[]);
    fleet.enqueue(RequestId(1), resumed("one"), Duration::ZERO).expect("never refused");
    assert_eq!(bindings(&mut fleet, 1), []);
    assert_eq!(bindings(&mut fleet, 3), [(1, WorkerId(2), false)]);
}

#[test]
fn a_request_that_would_soon_be_given_up_waits_no_longer_for_its_blocks() {
    const TOKENS: u32 = 10_000;
    let mut fleet = fleet(Limits { wait_max: Some(Duration::from_secs(120)), ..Limits::default() });
    let busy = EngineState { running: 1, queue_seconds: 0.01, ..state(0) };
    fleet.join(A, Member { state: busy, ..member("n", 0) }, &[stored(TOKENS - 16, "n")]);
    fleet.join(B, member("n", 2), &[]);
    fleet.enqueue(RequestId(1), view(TOKENS), Duration::ZERO).expect("room");
    for now in [0, 30, 60, 89] {
        assert_eq!(bindings(&mut fleet, now), [], "the other one would compute ten seconds of prompt");
    }
    assert_eq!(bindings(&mut fleet, 91), [(1, B, true)]);
}

#[test]
fn a_request_of_many_choices_is_not_passed_for_ever() {
    let mut fleet = fleet(Limits::default());
    fleet.join(A, Member { state: EngineState { running: 3, ..state(1) }, ..member("n", 1) }, &[]);
    fleet.enqueue(RequestId(1), View { sequences: 16, ..view(10) }, Duration::ZERO).expect("room");
    fleet.enqueue(RequestId(2), view(10), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), [], "the small one behind it waits too");
    fleet.update(A, Some(&EngineState { running: 0, ..state(4) }), &[], 0);
    assert_eq!(bindings(&mut fleet, 0), [(1, A, true)], "all that the worker has");
}

#[test]
fn a_request_of_many_choices_delays_others_for_half_a_second_at_most() {
    let one_runs = EngineState { running: 1, ..state(32) };
    let mut fleet = fleet(Limits::default());
    fleet.join(A, Member { state: one_runs.clone(), ..member("n", 0) }, &[]);
    fleet.enqueue(RequestId(1), View { sequences: 128, ..view(10) }, Duration::ZERO).expect("room");
    fleet.enqueue(RequestId(2), view(10), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), [], "33 would be all, and may come");
    assert_eq!(bindings(&mut fleet, 1), [(1, A, true)], "the worker queues what does not start");
    fleet.update(A, Some(&one_runs), &[], 1);
    assert_eq!(bindings(&mut fleet, 1), [(2, A, true)]);
}

#[test]
fn a_request_that_finds_no_room_at_a_worker_lets_others_pass() {
    let mut fleet = fleet(Limits::default());
    fleet.join(A, Member { state: EngineState { running: 1, waiting: 200, ..state(1) }, ..member("n", 0) }, &[]);
    fleet.enqueue(RequestId(1), View { sequences: 128, ..view(10) }, Duration::ZERO).expect("room");
    fleet.enqueue(RequestId(2), view(10), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 1), [(2, A, true)], "the worker would refuse the large one");
}

/// A flood has filled a worker: one request of another tenant is sent although there are no credits, and none of the flood.
#[test]
fn who_was_served_less_passes_what_a_full_worker_has_before_it() {
    let mut fleet = fleet(Limits::default());
    fleet.join(A, member("n", 2), &[]);
    let of =
        |tenant: &str, first: u32| View { tokens: (first..first + 100).collect(), tenant: tenant.into(), ..view(0) };
    (1..30).for_each(|n| fleet.enqueue(RequestId(n), of("flood", n as u32 * 500), Duration::ZERO).expect("room"));
    for sent in (2..20).step_by(2) {
        assert_eq!(bindings(&mut fleet, 0), [(sent - 1, A, true), (sent, A, true)]);
        [sent - 1, sent].into_iter().for_each(|request| fleet.remove(RequestId(request)));
        fleet.update(A, Some(&state(2)), &[], sent);
    }
    assert_eq!(bindings(&mut fleet, 0), [(19, A, true), (20, A, true)]);
    let busy = EngineState { running: 2, prefill_tokens_pending: 200, context_tokens: 200, ..state(0) };
    fleet.update(A, Some(&busy), &[], 20);
    fleet.enqueue(RequestId(40), of("quiet", 100_000), Duration::from_secs(1)).expect("room");
    assert_eq!(bindings(&mut fleet, 1), [(40, A, true)], "and none of those that came before it");
    fleet.enqueue(RequestId(41), of("quiet", 200_000), Duration::from_secs(1)).expect("room");
    assert_eq!(bindings(&mut fleet, 1), [], "its own prompt is before it now");
    fleet.enqueue(RequestId(42), View { priority: 1, ..of("third", 300_000) }, Duration::from_secs(1)).expect("room");
    assert_eq!(bindings(&mut fleet, 1), [], "what is less urgent passes nobody");
}

#[test]
fn nobody_passes_where_there_is_no_room_for_its_blocks() {
    let mut fleet = fleet(Limits::default());
    fleet.join(A, member("n", 1), &[]);
    fleet.enqueue(RequestId(1), view(100), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), [(1, A, true)]);
    let busy = |blocks_free| EngineState {
        running: 1,
        prefill_tokens_pending: 100,
        context_tokens: 100,
        blocks_free,
        ..state(0)
    };
    fleet.enqueue(RequestId(2), resumed("n"), Duration::ZERO).expect("room");
    fleet.update(A, Some(&busy(3)), &[], 1);
    assert_eq!(bindings(&mut fleet, 0), []);
    fleet.update(A, Some(&busy(100)), &[], 1);
    assert_eq!(bindings(&mut fleet, 0), [(2, A, true)], "what began elsewhere passes all");
}

/// Fleet of one worker that runs one request of this priority and has ten pages and eight credits left.
fn short_of_pages(priority: i32, limits: Limits) -> Fleet {
    let mut fleet = fleet(limits);
    fleet.join(A, member("n", 1), &[]);
    fleet.enqueue(RequestId(1), View { priority, ..of_length(1, 100) }, Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), [(1, A, true)]);
    fleet.update(A, Some(&EngineState { running: 1, blocks_free: 10, ..state(8) }), &[], 1);
    fleet
}

/// Request whose prompt shares no block with others.
fn of_length(token: u32, tokens: usize) -> View {
    View { tokens: vec![token; tokens].into(), ..view(0) }
}

#[test]
fn a_prompt_without_pages_waits_in_the_gateway_and_nobody_takes_what_it_waits_for() {
    let mut fleet = short_of_pages(0, Limits::default());
    fleet.enqueue(RequestId(2), of_length(2, 640), Duration::ZERO).expect("room");
    fleet.enqueue(RequestId(3), of_length(3, 64), Duration::from_secs(1)).expect("room");
    assert_eq!(bindings(&mut fleet, 1), [], "20 blocks do not fit into 10, and 2 of them are not for who came later");
    fleet.update(A, Some(&EngineState { running: 1, blocks_free: 22, ..state(8) }), &[], 1);
    assert_eq!(bindings(&mut fleet, 1), [(2, A, true), (3, A, true)]);
}

#[test]
fn a_prompt_that_waits_for_pages_goes_where_pages_are() {
    let mut fleet = short_of_pages(0, Limits::default());
    fleet.enqueue(RequestId(2), of_length(2, 640), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 1), []);
    fleet.join(B, member("n", 8), &[]);
    assert_eq!(bindings(&mut fleet, 2), [(2, B, true)]);
}

#[test]
fn pages_are_waited_for_only_where_they_come() {
    let big = |fleet: &mut Fleet, view: View| {
        fleet.enqueue(RequestId(2), View { tokens: of_length(2, 640).tokens, ..view }, Duration::ZERO).expect("room");
        bindings(fleet, 0)
    };
    let bound = [(2, A, true)];
    let mut idle = short_of_pages(0, Limits::default());
    idle.update(A, Some(&EngineState { blocks_free: 10, ..state(8) }), &[], 1);
    assert_eq!(big(&mut idle, view(0)), bound, "nothing runs: nothing will end");
    assert_eq!(big(&mut short_of_pages(0, Limits::default()), resumed("n")), bound, "it has begun elsewhere");
    assert_eq!(big(&mut short_of_pages(1, Limits::default()), view(0)), bound, "the less urgent one is preempted");
    assert_eq!(big(&mut short_of_pages(0, Limits::default()), View { priority: 1, ..view(0) }), []);
    let mut shared = short_of_pages(0, Limits::default());
    shared.update(A, Some(&EngineState { running: 2, blocks_free: 10, ..state(8) }), &[], 1);
    assert_eq!(big(&mut shared, view(0)), bound, "another gateway's sequence may be less urgent");
    let mut stalled = short_of_pages(0, Limits::default());
    stalled.update(A, Some(&EngineState { running: 1, stalled: 1, blocks_free: 10, ..state(8) }), &[], 1);
    assert_eq!(big(&mut stalled, view(0)), bound, "what nobody reads is preempted by anybody");
    let mut late = short_of_pages(0, Limits { wait_max: Some(Duration::from_secs(40)), ..Limits::default() });
    assert_eq!(big(&mut late, view(0)), []);
    assert_eq!(bindings(&mut late, 29), []);
    assert_eq!(bindings(&mut late, 31), bound, "the last quarter of its wait: better at a worker than refused");
}

#[test]
fn choices_that_wait_for_pages_stop_nobody_who_goes_elsewhere() {
    let mut fleet = short_of_pages(0, Limits::default());
    let short = EngineState { running: 1, blocks_free: 110, ..state(8) };
    fleet.update(A, Some(&short), &[stored(4000, "n")], 1);
    fleet.join(B, member("n", 1), &[]);
    fleet.enqueue(RequestId(2), View { sequences: 4, ..view(8000) }, Duration::ZERO).expect("room");
    fleet.enqueue(RequestId(3), of_length(3, 64), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), [(3, B, true)], "A has half of the other's prompt, and is waited for");
}

#[test]
fn what_has_ended_is_not_taken_for_less_urgent() {
    let mut fleet = short_of_pages(1, Limits::default());
    fleet.remove(RequestId(1));
    fleet.enqueue(RequestId(2), of_length(2, 64), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), [(2, A, true)]);
    fleet.update(A, Some(&EngineState { running: 1, blocks_free: 10, ..state(8) }), &[], 2);
    fleet.enqueue(RequestId(3), of_length(3, 640), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), []);
}

#[test]
fn stalled_sequences_hold_no_slot() {
    let mut fleet = fleet(Limits::default());
    let state = EngineState { running: 3, stalled: 3, ..state(8) };
    fleet.join(A, Member { sequences_max: 8, state, ..member("n", 0) }, &[]);
    fleet.enqueue(RequestId(1), View { sequences: 16, ..view(10) }, Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), [(1, A, true)]);
}

#[test]
fn what_was_bound_and_not_sent_gives_its_credits_back() {
    let mut fleet = fleet(Limits::default());
    fleet.join(A, member("n", 1), &[]);
    for request in 1..4 {
        fleet.enqueue(RequestId(request), view(10), Duration::ZERO).expect("room");
    }
    assert_eq!(bindings(&mut fleet, 0), [(1, A, true)]);
    fleet.unsent(RequestId(1));
    fleet.remove(RequestId(1));
    assert_eq!(bindings(&mut fleet, 0), [(2, A, true)]);
    fleet.update(A, Some(&state(1)), &[], 1);
    assert_eq!(bindings(&mut fleet, 0), [(3, A, true)], "the worker counts the second as its first");
}

#[test]
fn the_queue_is_bounded_and_late_answers_are_refused_at_once() {
    let mut small = fleet(Limits { queue_max: 2, ..Limits::default() });
    for request in 0..2 {
        small.enqueue(RequestId(request), view(10), Duration::ZERO).expect("room");
    }
    assert!(small.enqueue(RequestId(2), view(10), Duration::ZERO).is_err());
    small.enqueue(RequestId(3), resumed("n"), Duration::ZERO).expect("never refused");

    let mut prompt = fleet(Limits { ttft_max: Some(Duration::from_secs(2)), ..Limits::default() });
    prompt.join(A, member("n", 0), &[]);
    prompt.enqueue(RequestId(1), view(1500), Duration::ZERO).expect("1.5 s");
    let reject = prompt.enqueue(RequestId(2), view(1500), Duration::ZERO).expect_err("3 s");
    assert!(reject.retry_after >= Duration::from_secs(1) && reject.retry_after < Duration::from_secs(2), "{reject:?}");
}

/// Observes steps of 10 ms, plus 1 ms per decoding sequence.
fn steady(fleet: &mut Fleet, worker: WorkerId) {
    for at in 0..200 {
        let decodes = 1 + at % 40;
        let seconds = 0.01 + 0.001 * f64::from(decodes);
        fleet.observe(worker, &Batch { decodes, seconds, ..Batch::default() });
    }
}

fn promised(tpot_us: u64) -> Limits {
    let slo = Slo { tpot: Duration::from_micros(tpot_us), ..Slo::default() };
    Limits { slo: Some(slo), ..Limits::default() }
}

#[test]
fn a_request_joins_nobody_whose_tokens_it_would_delay_beyond_the_promise() {
    let mut fleet = fleet(promised(29_500));
    let running = |running| EngineState { running, ..state(8) };
    fleet.join(A, Member { state: running(18), ..member("n", 0) }, &[]);
    fleet.join(B, Member { state: running(25), ..member("n", 0) }, &[]);
    steady(&mut fleet, A);
    steady(&mut fleet, B);
    for request in 1..4 {
        fleet.enqueue(RequestId(request), view(10 + request as u32), Duration::ZERO).expect("room");
    }
    assert_eq!(bindings(&mut fleet, 0), [(1, A, true)], "28 ms become 29; then both are full");
    assert!(fleet.explain(view(50), Duration::ZERO).candidates.iter().all(|candidate| candidate.crowded));
    fleet.enqueue(RequestId(4), resumed("n"), Duration::ZERO).expect("never refused");
    assert_eq!(bindings(&mut fleet, 0).len(), 1, "who was let in before is not held");
    fleet.update(B, Some(&running(3)), &[], 0);
    assert_eq!(bindings(&mut fleet, 0), [(2, B, true), (3, B, true)], "places are free again");
}

#[test]
fn a_promise_that_nobody_can_keep_keeps_nobody_out() {
    let mut fleet = fleet(promised(5_000));
    fleet.join(A, Member { state: EngineState { running: 3, ..state(8) }, ..member("n", 0) }, &[]);
    steady(&mut fleet, A);
    fleet.enqueue(RequestId(1), view(10), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), [(1, A, true)]);
}

#[test]
fn who_would_be_served_after_its_deadline_is_told_at_once() {
    let mut fleet = fleet(Limits::default());
    fleet.join(A, member("n", 0), &[]);
    let at = |tokens, deadline| View { deadline: Some(Duration::from_millis(deadline)), ..view(tokens) };
    let now = Duration::from_millis(1000);
    fleet.enqueue(RequestId(1), at(1500, 2600), now).expect("1.5 s, and 1.6 s are left");
    let reject = fleet.enqueue(RequestId(2), at(1500, 2600), now).expect_err("3 s");
    assert_eq!(reject.refusal, Refusal::Impatient);
    assert!(reject.retry_after >= Duration::from_secs(1) && reject.retry_after < Duration::from_secs(2), "{reject:?}");
    fleet.enqueue(RequestId(3), View { resumed: true, ..at(1500, 1001) }, now).expect("its client has read half of it");
    let refused = |fleet: &mut Fleet, now| match fleet.next(Duration::from_millis(now)) {
        Choice::Refuse { request, reject } => Some((request, reject.refusal)),
        _ => None,
    };
    assert_eq!(refused(&mut fleet, 1000), None);
    assert_eq!(refused(&mut fleet, 2600), Some((RequestId(3), Refusal::Deadline)));
    assert_eq!(refused(&mut fleet, 2600), Some((RequestId(1), Refusal::Deadline)));
    assert_eq!((fleet.waiting(), fleet.waiting_seconds()), (0, 0.0), "nothing of them is left");
}

#[test]
fn nobody_is_turned_away_by_a_guess() {
    let mut fleet = fleet(Limits::default());
    let unknown = EngineState { prefill_tokens_per_second: 0.0, step_seconds: 0.0, ..state(0) };
    fleet.join(A, Member { state: unknown, ..member("n", 0) }, &[]);
    let view = View { deadline: Some(Duration::from_millis(1)), ..view(5000) };
    fleet.enqueue(RequestId(1), view, Duration::ZERO).expect("nothing is known of the worker");
}

#[test]
fn what_is_suspended_or_gone_gets_nothing() {
    let mut fleet = two();
    fleet.suspend(A, true);
    fleet.leave(B);
    fleet.enqueue(RequestId(1), view(BLOCK_TOKENS as u32), Duration::ZERO).expect("room");
    assert_eq!(bindings(&mut fleet, 0), []);
    fleet.suspend(A, false);
    assert_eq!(bindings(&mut fleet, 0), [(1, A, true)]);
    let ttft = fleet.predicted_ttft(0);
    assert!((42..45).contains(&ttft.as_millis()), "32 promised tokens and a step: {ttft:?}");
}
