//! Circuit breakers and load balancing, seen from requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use async_trait::async_trait;

use penstock_base::testing::logged;
use penstock_proto::ErrorKind;
use penstock_types::{FaultClass, Surface};

use crate::{Asker, Checks, ModelConfig, Policy, Sticky};
use penstock_upstream::Probe;

use super::double::*;

/// One target and one fallback, without retries.
fn pair() -> ModelConfig {
    ModelConfig { retries: 0, ..over("a", "b") }
}

#[test]
fn a_target_that_keeps_failing_is_left_alone_probed_and_taken_back() {
    let world = World::new(pair());
    world.double("a").always(DOWN);
    for _ in 0..20 {
        assert_eq!(world.answer().text, "b b");
    }
    assert_eq!(world.double("a").opened(), 5, "five failures in a row");
    assert_eq!(world.target("a").level(world.clock.now()), 3);
    assert!(world.metric("penstock_fallbacks_total", &["reason=\"ejected\""]) > 14.5);
    world.clock.advance(Duration::from_secs(1));
    assert_eq!(world.answer().story(), "a:error b:answered");
    assert_eq!(world.answer().text, "b b", "the probe failed");
    world.double("a").always(GOOD);
    world.clock.advance(Duration::from_secs(1));
    assert_eq!(world.answer().text, "b b", "the second pause is longer");
    world.clock.advance(Duration::from_secs(1));
    assert_eq!((world.answer().text, world.answer().text), ("a a".into(), "a a".into()));
}

#[test]
fn a_breaker_says_once_that_it_opened_and_once_that_it_closed() {
    let log = logged(|| {
        let world = World::new(pair());
        world.double("a").always(DOWN);
        for _ in 0..20 {
            world.answer();
        }
        world.double("a").always(GOOD);
        world.clock.advance(Duration::from_secs(11));
        for _ in 0..20 {
            world.answer();
        }
    });
    let count = |words: &str| log.lines().filter(|line| line.contains(words)).count();
    assert_eq!(count("its circuit breaker opened"), 1, "{log}");
    assert_eq!(count("a target is healthy again"), 1, "{log}");
    let opened = log.lines().find(|line| line.contains("breaker opened")).expect("counted");
    for part in ["WARN", "target_id=\"a\"", "about=", "why="] {
        assert!(opened.contains(part), "{part} is not in: {opened}");
    }
}

/// The breaker of one key closes a second after it opened, within the ten seconds in which such changes are logged once.
#[test]
fn a_breaker_that_closes_soon_says_so_when_the_interval_of_the_log_has_ended() {
    let told = |log: &str, words: &str| log.lines().filter(|line| line.contains(words)).count();
    let check = |seconds: u64, closed: usize| {
        let log = logged(|| {
            let world = World::new(pair());
            world.double("a").always(DOWN);
            for _ in 0..5 {
                world.answer();
            }
            world.double("a").always(GOOD);
            world.clock.advance(Duration::from_secs(1));
            assert_eq!(world.answer().text, "a a", "the breaker has closed");
            world.clock.advance(Duration::from_secs(seconds));
            // Nothing changes any more.
            assert_eq!(world.answer().text, "a a");
        });
        assert_eq!(told(&log, "unhealthy for one key: its circuit breaker opened"), 1, "{log}");
        assert_eq!(told(&log, "a target is healthy again for one key"), closed, "{log}");
    };
    check(8, 0);
    check(9, 1);
}

/// Chat completions and messages are both the operation `chat`, with a breaker each.
#[test]
fn breakers_of_surfaces_with_the_same_operation_have_lines_of_their_own() {
    let log = logged(|| {
        let world = World::new(pair());
        world.double("a").always(DOWN);
        for surface in [Surface::Chat, Surface::Messages] {
            (0..5).for_each(|_| assert!(world.ask_as("x", surface).end().failure.is_none(), "by the other"));
        }
        world.double("a").always(GOOD);
        world.clock.advance(Duration::from_secs(1));
        assert_eq!(world.ask_as("x", Surface::Chat).end().text, "a a", "the first has closed");
        world.clock.advance(Duration::from_secs(9));
        assert_eq!(world.ask_as("x", Surface::Chat).end().text, "a a");
    });
    let told = |words: &str| log.lines().filter(|line| line.contains(words)).count();
    let lines =
        (told("unhealthy for one key: its circuit breaker opened"), told("a target is healthy again for one key"));
    assert_eq!(lines, (2, 1), "{log}");
    assert_eq!(told("about=\"chat\""), 3, "{log}");
}

/// A timer logs the second breaker of a target that nobody asks any more.
#[test]
fn a_second_breaker_that_opens_soon_is_logged_although_nothing_happens_any_more() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let log = logged(|| {
        runtime.block_on(async {
            let world = World::new(pair());
            world.double("a").always(DOWN);
            for key in ["x", "y", "z"] {
                (0..2).for_each(|_| assert!(world.ask_as(key, Surface::Chat).end().failure.is_none(), "by the other"));
            }
            let target = world.target("a");
            (0..2).for_each(|_| target.checked(false, world.clock.now()));
            drop(world);
            tokio::time::sleep(Duration::from_millis(1100)).await;
            // Tasks that are due have their turn.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            drop(target);
        });
    });
    let told = |about: &str| log.lines().filter(|line| line.contains(about)).count();
    assert_eq!((told("about=\"chat\""), told("about=\"health_check\"")), (1, 1), "{log}");
}

#[test]
fn when_all_fail_one_request_at_a_time_goes_through_and_the_others_are_told_why_at_once() {
    let world = World::new(pair());
    world.doubles.iter().for_each(|double| double.always(fail(FaultClass::Timeout)));
    for _ in 0..5 {
        assert!(world.answer().failure.is_some());
    }
    world.doubles.iter().for_each(|double| double.always(Act::Hang));
    let mut trials = [world.ask(&[], STREAM), world.ask(&[], STREAM)];
    trials.iter_mut().for_each(|trial| assert!(trial.poll().is_pending(), "one at each"));
    let outcome = world.answer();
    let failure = outcome.failure.as_ref().expect("nobody is left");
    assert_eq!((failure.kind, failure.retry_after_seconds()), (ErrorKind::Unavailable, Some(1)));
    assert!(failure.message.contains("does not answer in time"), "{}", failure.message);
    assert_eq!((outcome.story().as_str(), failure.source()), ("", "gateway"));
    drop(trials);
    world.double("a").always(GOOD);
    assert_eq!((world.answer().text, world.answer().text), ("a a".into(), "a a".into()), "an answer ends it");
    assert_eq!(world.target("a").level(world.clock.now()), 0);
}

#[test]
fn what_a_model_cannot_do_says_nothing_of_what_it_can() {
    let world = World::new(over("a", ""));
    world.double("a").always(fail(FaultClass::NotFound));
    for _ in 0..20 {
        assert!(world.ask_as("team", Surface::Embeddings).end().failure.is_some());
    }
    world.double("a").always(Act::Stall(1));
    let mut held: Vec<_> = (0..8).map(|_| world.ask_as("team", Surface::Chat)).collect();
    held.iter_mut().for_each(|asking| assert!(asking.poll().is_ready(), "all at once"));
}

#[test]
fn what_one_key_meets_is_not_held_against_the_others() {
    let world = World::new(over("a", ""));
    world.double("a").always(Act::Stall(1));
    for class in [FaultClass::NotFound, FaultClass::Timeout, FaultClass::Server, FaultClass::Unauthorized] {
        let after = Some(Duration::from_secs(60));
        world.double("a").act_for("team", Act::Refuse(class, 0, after));
        (0..20).for_each(|_| drop(world.ask_as("team", Surface::Chat).end()));
        let mut held: Vec<_> = (0..8).map(|_| world.ask_as("other", Surface::Chat)).collect();
        held.iter_mut().for_each(|asking| assert!(asking.poll().is_ready(), "{class:?}"));
    }
}

#[test]
fn statistics_alone_never_eject_the_last_one() {
    let world = World::new(ModelConfig { policy: Policy::Order, retries: 0, ..over("ab", "") });
    // Twenty answers since the first failure.
    for _ in 0..11 {
        world.double("a").act(&[DOWN, GOOD]);
    }
    (0..22).for_each(|_| drop(world.answer()));
    assert_eq!(world.target("a").level(world.clock.now()), 2);
    assert_eq!(world.answer().text, "b b", "others are preferred");
    world.double("b").always(DOWN);
    (0..5).for_each(|_| drop(world.answer()));
    assert_eq!(world.answer().text, "a a", "but it is better than nobody");
}

#[test]
fn a_target_that_names_a_time_is_not_asked_before() {
    let world = World::new(pair());
    world.double("a").act(&[Act::Refuse(FaultClass::RateLimited, 0, Some(Duration::from_secs(7)))]);
    assert_eq!(world.answer().story(), "a:rate_limit b:answered");
    for _ in 0..3 {
        assert_eq!(world.answer().story(), "b:answered");
    }
    world.clock.advance(Duration::from_secs(7));
    assert_eq!(world.answer().story(), "a:answered");
}

#[test]
fn breaking_streams_count_too() {
    let world = World::new(ModelConfig { policy: Policy::Order, ..over("ab", "") });
    world.double("a").always(Act::Break(2));
    (0..10).for_each(|_| assert!(world.answer().failure.is_some()));
    assert_eq!(world.answer().text, "b b");
}

#[test]
fn one_that_is_not_ready_is_asked_last() {
    let world = World::new(ModelConfig { policy: Policy::Order, ..over("ab", "") });
    *world.double("a").unready.lock().expect("unready") = Some("loading".into());
    assert_eq!(world.answer().text, "b b");
    *world.double("b").unready.lock().expect("unready") = Some("loading".into());
    assert_eq!(world.answer().text, "a a");
}

#[test]
fn weights_share_and_a_canary_gets_its_part() {
    let world = World::new(ModelConfig { to: vec![(pool("a"), 19), (pool("b"), 1)], ..over("", "") });
    (0..100).for_each(|_| drop(world.answer()));
    assert_eq!((world.double("a").opened(), world.double("b").opened()), (95, 5));
}

#[test]
fn the_least_busy_is_asked() {
    let to = vec![(pool("a"), 1), (pool("b"), 3)];
    let world = World::new(ModelConfig { to, policy: Policy::LeastBusy, ..over("", "") });
    world.doubles.iter().for_each(|double| double.always(Act::Stall(1)));
    let mut held: Vec<_> = (0..8).map(|_| world.ask(&[], STREAM)).collect();
    held.iter_mut().for_each(|asking| assert!(asking.poll().is_ready()));
    assert_eq!((world.target("a").in_flight(), world.target("b").in_flight()), (2, 6));
}

#[test]
fn the_quickest_is_asked() {
    let world = World::new(ModelConfig { policy: Policy::Latency, ..over("ab", "") });
    world.double("a").always(Act::Say(1, 400));
    world.double("b").always(Act::Say(1, 50));
    (0..20).for_each(|_| drop(world.answer()));
    assert_eq!(world.double("a").opened(), 1, "once, to find out");
    world.double("b").always(Act::Say(1, 3000));
    (0..4).for_each(|_| drop(world.answer()));
    assert!(world.double("a").opened() >= 3, "a peak counts at once");
}

#[test]
fn a_header_keeps_its_target_until_that_fails() {
    let sticky = Sticky::Header(http::HeaderName::from_static("x-session"));
    let world = World::new(ModelConfig { sticky, ..over("abc", "") });
    let ask = |session: &str| world.ask(&[("x-session", session)], STREAM).end().text;
    let mut seen = std::collections::BTreeSet::new();
    for session in 0..30 {
        let session = session.to_string();
        let first = ask(&session);
        assert_eq!(ask(&session), first);
        seen.insert(first);
    }
    assert_eq!(seen.len(), 3, "all are used");
    let home = ask("s");
    let name = home[..1].to_owned();
    world.double(&name).always(DOWN);
    let away = ask("s");
    assert_ne!(away, home);
    assert_eq!(ask("s"), away, "and the second choice is as steady");
}

#[test]
fn users_and_keys_stick_too() {
    for (sticky, body) in
        [(Sticky::Key, STREAM), (Sticky::User, r#"{"model":"m","stream":true,"user":"u1","messages":[]}"#)]
    {
        let world = World::new(ModelConfig { sticky: sticky.clone(), ..over("ab", "") });
        (0..10).for_each(|_| drop(world.ask(&[], body).end()));
        let counts = [world.double("a").opened(), world.double("b").opened()];
        assert!(counts.contains(&10), "{sticky:?}: {counts:?}");
    }
}

struct Pulse(AtomicBool);

#[async_trait]
impl Probe for Pulse {
    fn interval(&self) -> Duration {
        Duration::from_millis(5)
    }

    async fn is_good(&self) -> bool {
        self.0.load(SeqCst)
    }
}

#[tokio::test]
async fn active_checks_open_and_close_a_breaker_without_requests() {
    let world = World::new(pair());
    let (pulse, target) = (Arc::new(Pulse(AtomicBool::new(false))), world.target("a"));
    let checks = Checks(vec![(pulse.clone(), vec![target.clone()])]);
    let reaches = async |level: u8| {
        let deadline = Instant::now() + Duration::from_secs(20);
        while target.level(Instant::now()) != level {
            assert!(Instant::now() < deadline, "level {level}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let mut asker = Asker::default();
    asker.follow(&checks);
    reaches(3).await;
    // Under a new config with the same provider the probe goes on, for the targets of that config.
    asker.follow(&Checks(vec![(pulse.clone(), vec![target.clone(), world.target("b")])]));
    pulse.0.store(true, SeqCst);
    reaches(0).await;
    assert_eq!(world.double("a").opened(), 0);
    asker.follow(&Checks::default());
    drop(checks);
    let deadline = Instant::now() + Duration::from_secs(20);
    while Arc::strong_count(&pulse) > 1 {
        assert!(Instant::now() < deadline, "nobody asks a provider that is gone");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn a_good_check_does_not_excuse_failing_requests() {
    let world = World::new(pair());
    world.double("a").always(DOWN);
    for _ in 0..5 {
        assert_eq!(world.answer().text, "b b");
        world.target("a").checked(true, world.clock.now());
    }
    assert_eq!(world.target("a").level(world.clock.now()), 3);
    world.target("b").checked(false, world.clock.now());
    assert_eq!(world.target("b").level(world.clock.now()), 0, "one bad check can be an accident");
    world.target("b").checked(false, world.clock.now());
    assert_eq!(world.target("b").level(world.clock.now()), 3);
}
