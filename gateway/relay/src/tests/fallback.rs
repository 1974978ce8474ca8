//! Retries, fallbacks, and the client's error when nothing helped.

use std::time::Duration;

use penstock_proto::ErrorKind;
use penstock_types::FaultClass;

use crate::{ModelConfig, Policy, Reason};
use penstock_provider::PacingConfig;

use super::double::*;

/// Targets `a` and `b`, with `c` and `d` as fallbacks.
fn chain() -> ModelConfig {
    ModelConfig { policy: Policy::Order, ..over("ab", "cd") }
}

/// One target and one fallback, without retries.
fn pair() -> ModelConfig {
    ModelConfig { retries: 0, ..over("a", "b") }
}

/// [`pair`], with this time to the first token in milliseconds.
fn prompt_pair(ms: u64) -> ModelConfig {
    ModelConfig { first_token_timeout: Some(Duration::from_millis(ms)), ..pair() }
}

/// [`pair`], with a bound on silence within an answer.
fn steady_pair() -> ModelConfig {
    ModelConfig { idle_timeout: Some(Duration::from_millis(400)), ..pair() }
}

#[track_caller]
fn check(rules: ModelConfig, acts: &[(&str, &[Act])], story: &str) -> Outcome {
    let world = World::new(rules);
    for (name, acts) in acts {
        world.double(name).act(acts);
    }
    let outcome = world.answer();
    assert_eq!(outcome.story(), story, "{outcome:?}");
    for double in &world.doubles {
        assert_eq!(double.open(), 0, "nothing is left open");
    }
    outcome
}

#[test]
fn a_good_answer_is_the_targets_own() {
    let outcome = check(chain(), &[], "a:answered");
    assert_eq!((outcome.text.as_str(), outcome.headers.len()), ("a a", 0), "nothing to explain");
    assert_eq!(outcome.course.target.as_deref(), Some("a"));
}

#[test]
fn an_equal_is_asked_first_then_the_fallback_in_order() {
    let outcome =
        check(chain(), &[("a", &[DOWN]), ("b", &[DOWN]), ("c", &[DOWN])], "a:error b:error c:error d:answered");
    assert_eq!(outcome.text, "d d");
    assert_eq!((outcome.header("x-penstock-target"), outcome.header("x-penstock-attempts")), (Some("d"), Some("4")));
}

#[test]
fn explain_says_it_on_every_answer() {
    let world = World::explaining(chain());
    let outcome = world.answer();
    assert_eq!((outcome.header("x-penstock-target"), outcome.header("x-penstock-attempts")), (Some("a"), Some("1")));
}

#[test]
fn a_failure_with_the_first_events_of_a_good_status_moves_on() {
    let outcome = check(pair(), &[("a", &[Act::FailLate])], "a:error b:answered");
    assert_eq!(outcome.text, "b b");
    assert_eq!(outcome.said_usages, 1, "what the first had said was thrown away");
}

#[test]
fn an_answer_that_ends_before_it_begins_moves_on() {
    check(pair(), &[("a", &[Act::Empty])], "a:error b:answered");
}

#[test]
fn after_the_first_token_only_the_failure_passes() {
    let outcome = check(chain(), &[("a", &[Act::Break(3)])], "a:broke");
    assert_eq!(outcome.text, "a a a");
    assert!(outcome.failure.is_some_and(|failure| failure.upstream.is_some()));
}

#[test]
fn the_clients_own_faults_are_nobody_elses_business() {
    for class in [FaultClass::Invalid, FaultClass::TooLarge] {
        let outcome = check(chain(), &[("a", &[Act::Refuse(class, 0, Some(Duration::from_secs(3)))])], "a:refused");
        assert!(outcome.failure.is_some());
    }
    check(chain(), &[("a", &[Act::Own(ErrorKind::InvalidRequest)])], "a:refused");
}

#[test]
fn an_answer_that_was_made_and_found_no_room_is_asked_for_once() {
    for act in [Act::Unheld, fail(FaultClass::AnswerTooLarge)] {
        let world = World::new(ModelConfig { retries: 3, ..over("ab", "c") });
        world.doubles.iter().for_each(|double| double.always(act));
        for _ in 0..20 {
            let outcome = world.answer();
            assert_eq!(outcome.course.attempts.len(), 1, "{}", outcome.story());
            let attempt = &outcome.course.attempts[0];
            assert_eq!((attempt.outcome, crate::bill::may_bill(attempt)), ("unheld", true));
            let failure = outcome.failure.expect("no answer");
            assert!(!failure.should_retry(), "a repetition is billed again");
        }
        assert_eq!(world.double("c").opened(), 0, "the fallback");
        for name in ["a", "b"] {
            assert_eq!(world.double(name).opened(), 10, "{name} works, and is asked as before");
        }
    }
    let rules = || ModelConfig { policy: Policy::Order, ..over("a", "b") };
    let outcome = check(rules(), &[("a", &[DOWN, DOWN]), ("b", &[Act::Unheld])], "a:error a:error b:unheld");
    assert!(
        outcome.failure.is_some_and(|failure| !failure.should_retry()),
        "of the failures, the one that may be billed"
    );
}

#[test]
fn what_does_not_fit_goes_where_it_is_configured_to_fit() {
    let long = fail(FaultClass::ContextLength);
    check(pair(), &[("a", &[long])], "a:context_length");
    let fallback_on = vec![Reason::ContextLength, Reason::ContentPolicy, Reason::Unsupported];
    let fits = || ModelConfig { fallback_on: fallback_on.clone(), ..pair() };
    check(fits(), &[("a", &[long])], "a:context_length b:answered");
    check(fits(), &[("a", &[Act::Own(ErrorKind::ContextLength)])], "a:context_length b:answered");
    check(fits(), &[("a", &[fail(FaultClass::ContentPolicy)])], "a:content_policy b:answered");
    check(fits(), &[("a", &[Act::Own(ErrorKind::Unsupported)])], "a:unsupported b:answered");
    check(fits(), &[("a", &[DOWN])], "a:error");
    // An equal target has the same context, so it is not asked.
    let chain = ModelConfig { fallback_on: vec![Reason::ContextLength], ..chain() };
    check(chain, &[("a", &[long])], "a:context_length c:answered");
}

#[test]
fn a_target_that_refuses_the_gateway_is_passed_over() {
    for class in [FaultClass::Unauthorized, FaultClass::Quota, FaultClass::NotFound, FaultClass::Garbled] {
        check(pair(), &[("a", &[fail(class)])], "a:error b:answered");
    }
    check(pair(), &[("a", &[fail(FaultClass::RateLimited)])], "a:rate_limit b:answered");
    check(pair(), &[("a", &[Act::Own(ErrorKind::Overloaded)])], "a:rate_limit b:answered");
}

#[test]
fn a_single_target_is_asked_again_after_a_pause_if_that_can_help() {
    let alone = || over("a", "");
    let outcome = check(alone(), &[("a", &[DOWN])], "a:error a:answered");
    assert_eq!(outcome.took, Duration::from_millis(100));
    check(alone(), &[("a", &[DOWN, DOWN])], "a:error a:error");
    for useless in [FaultClass::Unauthorized, FaultClass::RateLimited, FaultClass::Overloaded] {
        assert_eq!(check(alone(), &[("a", &[fail(useless)])], &format!("a:{}", name(useless))).text, "");
    }
}

fn name(class: FaultClass) -> &'static str {
    if class == FaultClass::RateLimited { "rate_limit" } else { "error" }
}

#[test]
fn silence_is_a_failure_when_a_first_token_has_a_deadline() {
    let outcome = check(prompt_pair(250), &[("a", &[Act::Hang])], "a:timeout b:answered");
    assert_eq!(outcome.took, Duration::from_millis(250));
    check(prompt_pair(250), &[("a", &[Act::Stall(0)])], "a:timeout b:answered");
    check(prompt_pair(250), &[("a", &[Act::Say(3, 240)])], "a:answered");
}

/// The gateway's own wait for the pace is no silence of the provider: this one takes most of the time for itself.
#[test]
fn a_wait_for_the_pace_takes_no_time_of_a_slow_provider() {
    let pace =
        PacingConfig { requests_per_minute: 60, tokens_per_minute: 0, gateways: 1, wait: Duration::from_secs(5) };
    for (act, story, took_ms) in [(Act::Say(1, 2500), "a:answered", 3500), (Act::Hang, "a:timeout", 4000)] {
        let first_token_timeout = Some(Duration::from_secs(3));
        let world = World::paced(1, Some(pace), ModelConfig { first_token_timeout, ..over("a", "") });
        world.double("a").always(act);
        // The burst of six goes out at once, the next request a second later.
        let mut burst: Vec<_> = (0..6).map(|_| world.ask(&[], STREAM)).collect();
        assert!(burst.iter_mut().all(|asking| asking.poll().is_pending()));
        let outcome = world.answer();
        assert_eq!(outcome.story(), story, "{outcome:?}");
        let late = outcome.took.saturating_sub(Duration::from_millis(took_ms));
        assert!(outcome.took >= Duration::from_millis(took_ms) && late < Duration::from_millis(100), "{outcome:?}");
        assert_eq!(world.target("a").level(world.clock.now()), 0, "the provider is healthy");
    }
}

/// A retry that finds no turn at its target's pace is as if it had not been made: the failure before it decides whether the
/// fallback is asked, and is what the client is told.
#[test]
fn a_retry_without_a_turn_leaves_the_failure_before_it() {
    for (fallback, story, status) in [("", "a:error a:rate_limit", 502), ("d", "a:error a:rate_limit d:answered", 200)]
    {
        let rules = ModelConfig { fallback_on: vec![Reason::Error], ..over("a", fallback) };
        let world = World::paced(0, four_at_once(0), rules);
        world.double("a").act(&[GOOD, GOOD, DOWN]);
        assert_eq!([world.answer().text, world.answer().text], ["a a", "a a"], "half of the burst is used");
        let outcome = world.answer();
        assert_eq!(outcome.story(), story);
        assert_eq!(outcome.failure.map_or(200, |failure| failure.status()), status, "{story}");
    }
}

/// A retry stays one at the next equal target: it takes nothing there that first attempts need.
#[test]
fn a_retry_without_a_turn_is_one_at_the_next_target_too() {
    let rules = ModelConfig { policy: Policy::Order, fallback_on: Vec::new(), ..over("bac", "") };
    let world = World::paced(0, four_at_once(0), rules);
    world.double("b").act(&[DOWN, DOWN, DOWN]);
    let stories = [(); 3].map(|()| world.answer().story());
    assert_eq!(stories[..2], ["b:error a:answered", "b:error a:answered"].map(String::from));
    assert_eq!(stories[2], "b:error a:rate_limit c:answered");
    assert_eq!((world.double("a").extras(), world.double("c").extras()), (2, 1));
}

#[test]
fn a_whole_answer_has_no_first_token_to_wait_for() {
    let world = World::new(prompt_pair(250));
    world.double("a").act(&[Act::Say(1, 900)]);
    assert_eq!(world.ask(&[], WHOLE).end().story(), "a:answered");
}

#[test]
fn a_stream_that_stops_is_broken_when_silence_has_a_deadline() {
    let outcome = check(steady_pair(), &[("a", &[Act::Stall(2)])], "a:broke");
    assert_eq!((outcome.text.as_str(), outcome.took), ("a a", Duration::from_millis(400)));
    assert_eq!(outcome.failure.map(|failure| failure.kind), Some(ErrorKind::DeadlineExceeded));
    check(steady_pair(), &[("a", &[Act::Say(5, 399)])], "a:answered");
}

#[test]
fn one_deadline_bounds_all_attempts_and_the_answer() {
    let rules = || ModelConfig { timeout: Some(Duration::from_millis(500)), ..prompt_pair(300) };
    let outcome = check(rules(), &[("a", &[Act::Hang]), ("b", &[Act::Hang])], "a:timeout b:abandoned");
    assert_eq!(outcome.took, Duration::from_millis(500));
    assert_eq!(outcome.failure.map(|failure| failure.kind), Some(ErrorKind::DeadlineExceeded));
    let outcome = check(rules(), &[("a", &[Act::Say(100, 10)])], "a:broke");
    assert_eq!((outcome.text.split(' ').count(), outcome.took), (50, Duration::from_millis(500)));
}

#[test]
fn a_client_that_leaves_ends_every_attempt() {
    let world = World::new(ModelConfig { hedge_after: Some(Duration::from_millis(10)), ..chain() });
    world.double("a").act(&[Act::Hang]);
    world.double("b").act(&[Act::Stall(0)]);
    let mut asking = world.ask(&[], STREAM);
    assert!(asking.poll().is_pending());
    world.clock.advance(Duration::from_millis(10));
    assert!(asking.poll().is_pending());
    assert_eq!((world.double("a").open(), world.double("b").open()), (1, 1));
    let story: Vec<_> = asking.events_course().attempts.iter().map(|attempt| attempt.outcome).collect();
    assert_eq!(story, ["abandoned", "abandoned"]);
    drop(asking);
    assert_eq!((world.double("a").open(), world.double("b").open()), (0, 0));
    assert_eq!((world.target("a").in_flight(), world.target("b").in_flight()), (0, 0));
    assert!(world.metric("penstock_attempts_total", &["abandoned"]) > 1.5);
}

#[test]
fn the_most_telling_failure_is_told_with_the_soonest_time() {
    let limited = |seconds| Act::Refuse(FaultClass::RateLimited, 0, Some(Duration::from_secs(seconds)));
    let outcome = check(
        chain(),
        &[("a", &[limited(30)]), ("b", &[limited(20)]), ("c", &[DOWN]), ("d", &[fail(FaultClass::Invalid)])],
        "a:rate_limit b:rate_limit c:error d:refused",
    );
    let failure = outcome.failure.expect("all failed");
    assert_eq!((&*failure.message, failure.retry_after_seconds()), ("RateLimited", Some(20)));
    assert_eq!((failure.kind, failure.source()), (ErrorKind::RateLimited, "upstream"));
}

#[test]
fn an_outage_does_not_multiply_the_load() {
    let world = World::new(over("ab", ""));
    // Overload is no illness: otherwise the breakers would end the test before the budget does.
    let busy = Act::Own(ErrorKind::Overloaded);
    world.doubles.iter().for_each(|double| double.always(busy));
    for _ in 0..1000 {
        assert!(world.answer().failure.is_some());
    }
    let asked = world.double("a").opened() + world.double("b").opened();
    assert!((1200..=1211).contains(&asked), "{asked}");
    assert!(world.metric("penstock_retries_denied_total", &["model=\"m\""]) > 780.0);
}

#[tokio::test]
async fn a_measured_call_is_started_over_its_measurement_once() {
    let world = World::new(over("a", "b"));
    assert_eq!(world.serve_measured().await, world.serve().await);
    assert_eq!((world.double("a").opened(), world.double("a").started()), (2, 1));
    world.double("a").always(Act::Own(ErrorKind::Unavailable));
    world.serve_measured().await;
    assert_eq!(world.double("a").started(), 2, "a retry at the same target opens anew");
    assert_eq!((world.double("b").opened(), world.double("b").started()), (1, 0), "only the first target's is kept");
}
