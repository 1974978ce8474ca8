//! Hedges and mirrored copies.

use std::sync::Arc;
use std::time::Duration;

use penstock_types::FaultClass;
use penstock_upstream::{Origin, Upstream};

use crate::{MirrorConfig, ModelConfig, Policy};

use super::double::*;

fn hedged() -> ModelConfig {
    let hedge_after = Some(Duration::from_millis(50));
    ModelConfig { policy: Policy::Order, hedge_after, ..over("ab", "") }
}

/// One target, and a mirror that gets copies of this share of the requests.
fn mirrored(percent: u32) -> ModelConfig {
    ModelConfig { mirror: Some(MirrorConfig { target: pool("d"), percent }), ..over("a", "") }
}

#[test]
fn the_first_to_speak_answers_and_the_other_is_dropped() {
    let world = World::new(hedged());
    world.double("a").act(&[Act::Say(2, 500)]);
    let outcome = world.answer();
    assert_eq!((outcome.text.as_str(), outcome.story().as_str()), ("b b", "b:answered a:overtaken"));
    assert_eq!(outcome.took, Duration::from_millis(50));
    assert_eq!(world.double("a").open(), 0, "the loser is cancelled");
    assert_eq!(outcome.header("x-penstock-hedged"), Some("a"), "who may bill too is named");
    assert_eq!(outcome.course.hedged.iter().map(|id| &**id).collect::<Vec<_>>(), ["a"]);
    assert!(world.metric("penstock_hedges_total", &["outcome=\"won\""]) > 0.5);
}

#[test]
fn a_hedge_that_comes_too_late_loses() {
    let world = World::new(hedged());
    world.double("a").act(&[Act::Say(2, 80)]);
    world.double("b").act(&[Act::Say(2, 500)]);
    let outcome = world.answer();
    assert_eq!((outcome.text.as_str(), outcome.took.as_millis()), ("a a", 160));
    assert_eq!((outcome.header("x-penstock-hedged"), world.double("b").open()), (Some("b"), 0));
    assert!(world.metric("penstock_hedges_total", &["outcome=\"lost\""]) > 0.5);
}

#[test]
fn a_quick_answer_is_not_hedged() {
    let world = World::new(hedged());
    world.double("a").act(&[Act::Say(2, 49)]);
    let outcome = world.answer();
    assert_eq!((outcome.story().as_str(), world.double("b").opened()), ("a:answered", 0));
}

#[test]
fn one_of_two_may_fail() {
    let world = World::new(hedged());
    world.double("a").act(&[Act::Refuse(FaultClass::Server, 100, None)]);
    world.double("b").act(&[Act::Say(1, 100)]);
    let outcome = world.answer();
    assert_eq!((outcome.story().as_str(), outcome.took.as_millis()), ("a:error b:answered", 150));
    assert_eq!(outcome.header("x-penstock-hedged"), None, "who failed was not overtaken");
}

#[test]
fn a_hedge_that_is_refused_leaves_the_first_attempt_alone() {
    for class in [FaultClass::Invalid, FaultClass::TooLarge] {
        let world = World::new(hedged());
        world.double("a").act(&[Act::Say(2, 500)]);
        world.double("b").act(&[fail(class)]);
        let outcome = world.answer();
        assert_eq!((outcome.text.as_str(), outcome.story().as_str()), ("a a", "b:refused a:answered"), "{class:?}");
    }
    // The refusal of the first attempt is the request's own fault.
    let world = World::new(hedged());
    world.double("a").act(&[Act::Refuse(FaultClass::Invalid, 100, None)]);
    world.double("b").act(&[Act::Say(2, 500)]);
    let outcome = world.answer();
    assert_eq!((outcome.text.as_str(), outcome.story().as_str()), ("", "a:refused b:abandoned"));
    // Both are refused: the client reads what the first target says.
    let world = World::new(hedged());
    world.double("a").act(&[Act::Refuse(FaultClass::TooLarge, 100, None)]);
    world.double("b").act(&[fail(FaultClass::Invalid)]);
    let outcome = world.answer();
    assert_eq!(outcome.story(), "b:refused a:refused");
    assert_eq!(outcome.failure.map(|failure| failure.status()), Some(413));
}

#[test]
fn a_hedge_that_is_refused_leaves_the_first_attempt_its_retries_and_fallbacks() {
    let down = Act::Refuse(FaultClass::Server, 100, None);
    let refusals = [FaultClass::Invalid, FaultClass::TooLarge, FaultClass::ContextLength, FaultClass::ContentPolicy];
    for class in refusals {
        // First the hedge is lost, then the first attempt, and the other way round: its target again, or the fallback.
        for ms in [10, 100] {
            let refused = Act::Refuse(class, ms, None);
            for (retries, rest, text) in [(1, " a:answered", "a a"), (0, " c:answered", "c c")] {
                let world = World::new(ModelConfig { retries, fallback: vec![pool("c")], ..hedged() });
                world.double("a").act(&[down]);
                world.double("b").act(&[refused]);
                let outcome = world.answer();
                let hedge = match class {
                    FaultClass::ContextLength => "b:context_length",
                    FaultClass::ContentPolicy => "b:content_policy",
                    _ => "b:refused",
                };
                let story = if ms == 10 { format!("{hedge} a:error{rest}") } else { format!("a:error {hedge}{rest}") };
                assert_eq!((outcome.story(), outcome.text.as_str()), (story, text), "{class:?} after {ms} ms");
            }
        }
    }
    // An answer of the hedge that was made and found no room ends the request, whichever is lost first: another is billed again.
    for (ms, story) in [(10, "b:unheld a:error"), (100, "a:error b:unheld")] {
        let world = World::new(ModelConfig { fallback: vec![pool("c")], ..hedged() });
        world.double("a").act(&[down]);
        world.double("b").act(&[Act::Refuse(FaultClass::AnswerTooLarge, ms, None)]);
        let outcome = world.answer();
        assert_eq!(outcome.story(), story);
        assert!(outcome.failure.is_some_and(|failure| failure.is_unheld()));
    }
}

/// A hedge that waits for a spare turn at its target's pace, or is refused one, is as if it had not been made: when the first
/// attempt fails, the request asks that target as its next one.
#[test]
fn a_hedge_without_a_turn_leaves_its_target_to_the_fallback() {
    let hedge_after = Some(Duration::from_millis(50));
    for (wait, story) in [(0, "a:rate_limit b:error a:answered"), (5, "b:error a:abandoned a:answered")] {
        let rules = ModelConfig { retries: 0, hedge_after, ..over("b", "a") };
        let world = World::paced(0, four_at_once(wait), rules);
        world.double("b").act(&[DOWN, DOWN, Act::Refuse(FaultClass::Server, 100, None)]);
        assert_eq!([world.answer().text, world.answer().text], ["a a", "a a"], "half of the burst is used");
        let outcome = world.answer();
        assert_eq!((outcome.text.as_str(), outcome.story().as_str()), ("a a", story));
        assert_eq!((outcome.took.as_millis(), outcome.header("x-penstock-hedged")), (100, None), "{story}");
    }
}

/// The failure that a retry without a turn repeats is kept while a hedge runs, and asks the fallback when the hedge is refused.
#[test]
fn a_retry_without_a_turn_beside_a_hedge_leaves_the_failure_before_it() {
    let hedge_after = Some(Duration::from_millis(50));
    let rules = ModelConfig { policy: Policy::Order, hedge_after, ..over("ba", "cd") };
    let world = World::paced(0, four_at_once(5), rules);
    world.double("b").act(&[DOWN, DOWN, DOWN]);
    world.double("c").act(&[Act::Refuse(FaultClass::ContentPolicy, 3000, None)]);
    assert_eq!([world.answer().text, world.answer().text], ["a a", "a a"], "half of the burst is used");
    let mut asking = world.ask(&[], STREAM);
    while world.double("c").open() == 0 {
        assert!(asking.poll().is_pending(), "the retry waits for a turn");
        world.clock.advance(Duration::from_millis(10));
    }
    for _ in 0..2 {
        let first = Upstream::open(world.double("a"), Arc::new(call(&[], STREAM)), Origin::default());
        assert!(now(first).is_ok(), "first attempts take what is left of the burst");
    }
    assert_eq!(asking.end().story(), "b:error a:rate_limit c:content_policy d:answered");
}

#[test]
fn hedges_are_paid_from_the_budget() {
    let world = World::new(ModelConfig { retry_budget_percent: 0, ..hedged() });
    world.double("a").always(Act::Say(1, 60));
    world.double("b").always(Act::Say(1, 60));
    let asks: Vec<_> = (0..30).map(|_| world.ask(&[], STREAM)).collect();
    let mut asks: Vec<_> = asks;
    asks.iter_mut().for_each(|ask| assert!(ask.poll().is_pending()));
    world.clock.advance(Duration::from_millis(50));
    asks.iter_mut().for_each(|ask| assert!(ask.poll().is_pending()));
    assert_eq!(world.double("b").opened(), 10, "the floor of the budget");
}

#[tokio::test]
async fn copies_go_to_the_mirror_and_nobody_waits_for_them() {
    let world = World::new(mirrored(25));
    world.double("d").act(&[DOWN]);
    for _ in 0..40 {
        let text = world.serve().await;
        assert_eq!(text, "a a");
    }
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while world.metric("penstock_mirrored_total", &["target=\"d\""]) < 9.5 {
        assert!(std::time::Instant::now() < deadline, "ten copies");
        tokio::task::yield_now().await;
    }
    assert_eq!((world.double("a").opened(), world.double("d").opened()), (40, 10));
    assert!(world.metric("penstock_mirrored_total", &["outcome=\"error\""]) > 0.5);
}

#[tokio::test]
async fn copies_are_bounded() {
    let world = World::new(mirrored(100));
    world.double("d").always(Act::Hang);
    for _ in 0..80 {
        assert_eq!(world.serve().await, "a a");
        tokio::task::yield_now().await;
    }
    assert!(world.metric("penstock_mirrored_total", &["outcome=\"dropped\""]) > 15.5);
    assert!(world.double("d").opened() <= 64);
}

#[tokio::test]
async fn the_alarm_is_a_real_one() {
    let first_token_timeout = Some(Duration::from_millis(20));
    let world = World::new(ModelConfig { first_token_timeout, ..over("a", "b") });
    world.double("a").act(&[Act::Hang]);
    assert_eq!(world.serve().await, "b b");
}
