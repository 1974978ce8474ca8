//! Invariants of a race over any behaviour of the upstreams: one answers, the rest are dropped, nothing is left open, and it ends.

use std::time::Duration;

use penstock_proto::ErrorKind;
use penstock_types::FaultClass;
use proptest::prelude::*;

use crate::{ModelConfig, Policy, Reason};

use super::double::*;

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => Just(GOOD),
        3 => (1_usize..4, 0_u64..60).prop_map(|(words, ms)| Act::Say(words, ms)),
        1 => (1_usize..3).prop_map(Act::Break),
        1 => (0_usize..3).prop_map(Act::Stall),
        1 => Just(Act::FailLate),
        1 => Just(Act::Empty),
        1 => Just(Act::Hang),
        3 => (0_u64..80).prop_map(|ms| Act::Refuse(FaultClass::Server, ms, None)),
        1 => Just(Act::Refuse(FaultClass::RateLimited, 0, Some(Duration::from_secs(2)))),
        1 => Just(Act::Refuse(FaultClass::ContextLength, 5, None)),
        1 => Just(Act::Refuse(FaultClass::Invalid, 5, None)),
        1 => Just(Act::Own(ErrorKind::Overloaded)),
    ]
}

#[derive(Clone, Copy, Debug)]
struct Rules {
    retries: u32,
    hedge: u64,
    first_token: u64,
    idle: u64,
    policy: Policy,
}

fn rules() -> impl Strategy<Value = Rules> {
    let policy =
        prop::sample::select(vec![Policy::Weighted, Policy::Order, Policy::LeastBusy, Policy::Latency, Policy::Cost]);
    (0_u32..4, 0_u64..2, 0_u64..2, 0_u64..2, policy).prop_map(|(retries, hedge, first_token, idle, policy)| Rules {
        retries,
        hedge: hedge * 20,
        first_token: first_token * 50,
        idle: idle * 70,
        policy,
    })
}

fn check(world: &World, rules: Rules) -> Result<(), TestCaseError> {
    let outcome = world.answer();
    let words: std::collections::BTreeSet<_> = outcome.text.split(' ').filter(|word| !word.is_empty()).collect();
    prop_assert!(words.len() <= 1, "two spoke: {outcome:?}");
    let count = |name| outcome.course.attempts.iter().filter(|attempt| attempt.outcome == name).count();
    let (answered, broke) = (count("answered"), count("broke"));
    match &outcome.failure {
        None => prop_assert!((answered, broke) == (1, 0) && !words.is_empty(), "{outcome:?}"),
        Some(_) => prop_assert!(answered == 0 && broke == words.len(), "{outcome:?}"),
    }
    if let Some(target) = outcome.course.target.as_deref() {
        prop_assert!(words.iter().all(|word| *word == target), "{outcome:?}");
    }
    let most = 1 + rules.retries as usize + 2 + usize::from(rules.hedge > 0);
    prop_assert!(outcome.course.attempts.len() <= most, "more than {most}: {outcome:?}");
    prop_assert!(outcome.took.as_millis() <= 400, "{outcome:?}");
    for double in &world.doubles {
        prop_assert_eq!(double.open(), 0);
    }
    Ok(())
}

proptest! {
    #[test]
    fn one_speaks_the_rest_are_dropped_and_it_ends(
        rules in rules(),
        acts in prop::collection::vec(prop::collection::vec(act(), 0..12), 4),
    ) {
        let Rules { retries, hedge, first_token, idle, policy } = rules;
        let time = |ms| Some(Duration::from_millis(ms)).filter(|time| !time.is_zero());
        let world = World::new(ModelConfig {
            to: vec![(pool("a"), 1), (pool("b"), 2)],
            fallback_on: vec![Reason::Error, Reason::Timeout, Reason::RateLimit, Reason::ContextLength],
            policy,
            retries,
            hedge_after: time(hedge),
            first_token_timeout: time(first_token),
            idle_timeout: time(idle),
            timeout: time(400),
            ..over("", "cd")
        });
        for (double, acts) in world.doubles.iter().zip(&acts) {
            double.act(acts);
        }
        for _ in 0..12 {
            check(&world, rules)?;
            world.clock.advance(Duration::from_millis(300));
        }
        for name in ["a", "b", "c", "d"] {
            prop_assert_eq!(world.target(name).in_flight(), 0);
        }
    }
}
