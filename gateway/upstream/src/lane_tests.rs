use proptest::prelude::*;

use super::*;

const RULES: Rules = Rules::DEFAULT;
const MS: Duration = Duration::from_millis(1);

fn asker(name: u8) -> Asker {
    Asker::new(&name.to_string(), None)
}

fn fail(lane: &mut Lane, name: u8, times: u32, now: Instant) {
    for _ in 0..times {
        let trial = !matches!(lane.look(asker(name), now), Admission::Yes | Admission::Last);
        let pass = lane.enter(asker(name), trial, now);
        lane.fail(pass, Why::Errors, now);
    }
}

fn succeed(lane: &mut Lane, name: u8, now: Instant) {
    let pass = lane.enter(asker(name), false, now);
    lane.succeed(pass, now);
}

fn is_shut(lane: &Lane, name: u8, now: Instant) -> bool {
    matches!(lane.look(asker(name), now), Admission::Trial(_) | Admission::No(_))
}

#[test]
fn failures_of_one_key_shut_it_out_and_nobody_else() {
    let (mut lane, now) = (Lane::new(RULES), Instant::now());
    fail(&mut lane, 1, 4, now);
    assert!(!is_shut(&lane, 1, now));
    let pass = lane.enter(asker(1), false, now);
    let change = Change { everybody: false, level: 3, why: Why::Errors };
    assert_eq!(lane.fail(pass, Why::Errors, now), Some(change), "said once");
    let pass = lane.enter(asker(1), true, now);
    assert_eq!(lane.fail(pass, Why::Errors, now), None);
    assert!(is_shut(&lane, 1, now) && !is_shut(&lane, 2, now));
    assert_eq!(lane.level(now), 3, "nobody knows better yet");
    succeed(&mut lane, 2, now);
    assert_eq!((lane.level(now), is_shut(&lane, 1, now)), (0, true));
}

#[test]
fn a_pause_that_ends_by_time_is_a_change_at_the_next_answer_and_the_next_pause_is_one_in_any_case() {
    let (mut lane, now) = (Lane::new(RULES), Instant::now());
    let at = |seconds| now + Duration::from_secs(seconds);
    let change = |everybody, level| Some(Change { everybody, level, why: Why::Limited });
    let answer = |lane: &mut Lane, name, now| {
        let pass = lane.enter(asker(name), false, now);
        lane.succeed(pass, now)
    };
    let cool = |lane: &mut Lane, name, now| lane.cool(asker(name), now + Duration::from_secs(5), Why::Limited, now);
    assert_eq!(cool(&mut lane, 1, now), change(false, 3));
    assert_eq!(cool(&mut lane, 1, at(10)), change(false, 3), "another one");
    assert_eq!(answer(&mut lane, 2, at(20)), None, "it was told nothing");
    assert_eq!(answer(&mut lane, 1, at(20)), change(false, 0));
    assert_eq!(answer(&mut lane, 1, at(20)), None, "said once");
    // A pause that a second key meets is a pause for everybody.
    assert_eq!((cool(&mut lane, 1, at(30)), cool(&mut lane, 2, at(30))), (change(false, 3), change(true, 3)));
    assert_eq!((answer(&mut lane, 3, at(40)), answer(&mut lane, 3, at(40))), (change(true, 0), None));
    assert_eq!((answer(&mut lane, 1, at(40)), answer(&mut lane, 2, at(40))), (change(false, 0), None));
}

#[test]
fn failures_of_three_keys_with_no_answer_between_shut_everybody_out() {
    let (mut lane, now) = (Lane::new(RULES), Instant::now());
    fail(&mut lane, 1, 100, now);
    fail(&mut lane, 2, 2, now);
    assert!(!is_shut(&lane, 9, now));
    let mut disputed = Lane::new(RULES);
    fail(&mut disputed, 1, 2, now);
    fail(&mut disputed, 2, 2, now);
    succeed(&mut disputed, 4, now);
    fail(&mut disputed, 3, 1, now);
    assert!(!is_shut(&disputed, 9, now));
    fail(&mut lane, 3, 1, now);
    assert!(is_shut(&lane, 9, now));
}

#[test]
fn a_trial_at_a_time_and_a_few_in_all_and_one_that_is_answered_opens_it_to_all() {
    let (mut lane, now) = (Lane::new(RULES), Instant::now());
    (1..=3).for_each(|name| fail(&mut lane, name, 2, now));
    let mut out: Vec<Pass> = (10..18).map(|name| lane.enter(asker(name), true, now)).collect();
    assert!(matches!(lane.look(asker(18), now), Admission::No(_)), "no ninth");
    lane.abandon(out.remove(0), now);
    assert!(matches!(lane.look(asker(18), now), Admission::Trial(_)));
    assert!(matches!(lane.look(asker(11), now), Admission::No(_)), "one of a key");
    lane.fail(out.remove(0), Why::Silence, now);
    assert!(is_shut(&lane, 18, now));
    lane.succeed(out.remove(0), now);
    assert_eq!(lane.look(asker(18), now), Admission::Yes);
    for pass in out {
        lane.fail(pass, Why::Errors, now);
    }
    assert_eq!(lane.trials, 0);
}

#[test]
fn a_rate_counts_without_the_worst_key() {
    let (mut lane, now) = (Lane::new(RULES), Instant::now());
    for _ in 0..200 {
        fail(&mut lane, 1, 1, now);
        succeed(&mut lane, 2, now);
        succeed(&mut lane, 3, now);
    }
    assert_eq!(lane.look(asker(9), now), Admission::Yes, "half of all failed, and all of them were one key's");
    let mut lane = Lane::new(RULES);
    for _ in 0..20 {
        for name in 2..6 {
            succeed(&mut lane, name, now);
            fail(&mut lane, name, 2, now);
        }
    }
    assert_eq!(lane.look(asker(9), now), Admission::Last);
}

#[test]
fn who_was_told_to_wait_waits_and_with_a_second_one_everybody_does() {
    let (mut lane, now) = (Lane::new(RULES), Instant::now());
    let until = now + Duration::from_secs(60);
    lane.cool(asker(1), until, Why::Limited, now);
    lane.cool(asker(1), until, Why::Limited, now);
    assert_eq!((lane.look(asker(1), now), lane.look(asker(2), now)), (Admission::No(until), Admission::Yes));
    lane.cool(asker(2), until, Why::Limited, now);
    assert_eq!(lane.look(asker(3), now), Admission::No(until));
    let later = now + Duration::from_secs(6);
    assert_eq!(lane.look(asker(3), later), Admission::Trial(until));
    assert_eq!(lane.look(asker(1), later), Admission::Trial(until));
    assert_eq!(lane.look(asker(2), later), Admission::No(until), "the one that was told it again comes later");
    let pass = lane.enter(asker(3), true, later);
    lane.succeed(pass, later);
    assert_eq!(lane.look(asker(4), later), Admission::Yes);
}

#[derive(Clone, Debug)]
enum Step {
    Wait(u64),
    Enter(u8),
    Settle(usize, u8),
    Broke(u8),
    Cool(u8, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0_u64..5000).prop_map(Step::Wait),
        1 => (5000_u64..200_000).prop_map(Step::Wait),
        8 => (0_u8..6).prop_map(Step::Enter),
        8 => (any::<usize>(), 0_u8..6).prop_map(|(at, outcome)| Step::Settle(at, outcome)),
        1 => (0_u8..6).prop_map(Step::Broke),
        1 => (0_u8..6, 1_u64..600_000).prop_map(|(name, ms)| Step::Cool(name, ms)),
    ]
}

proptest! {
    /// Invariants over any sequence of events: trials are bounded and counted right, and no key is shut out by one other key alone.
    #[test]
    fn trials_are_bounded_and_one_key_shuts_out_nobody_else(
        steps in prop::collection::vec(step(), 0..300),
        alone in any::<bool>(),
    ) {
        let mut now = Instant::now();
        let mut lane = Lane::new(RULES);
        let mut out: Vec<Pass> = Vec::new();
        for step in steps {
            let who = |name: u8| asker(if alone { 0 } else { name });
            match step {
                Step::Wait(ms) => now += ms as u32 * MS,
                Step::Enter(name) => match lane.look(who(name), now) {
                    Admission::Yes | Admission::Last => out.push(lane.enter(who(name), false, now)),
                    Admission::Trial(_) => out.push(lane.enter(who(name), true, now)),
                    Admission::No(until) => prop_assert!(until > now),
                },
                Step::Settle(at, outcome) if !out.is_empty() => {
                    let pass = out.swap_remove(at % out.len());
                    let _ = match outcome {
                        0 => {
                            lane.abandon(pass, now);
                            None
                        }
                        1 | 2 => lane.succeed(pass, now),
                        _ => lane.fail(pass, Why::Errors, now),
                    };
                }
                Step::Settle(..) => {}
                Step::Broke(name) => {
                    lane.broke(who(name), Why::Errors, now);
                }
                Step::Cool(name, ms) => {
                    lane.cool(who(name), now + ms as u32 * MS, Why::Limited, now);
                }
            }
            let trials = out.iter().filter(|pass| pass.is_trial()).count();
            prop_assert!(trials <= TRIALS_MAX as usize && trials == lane.trials as usize);
            for name in 0..6 {
                let own = out.iter().filter(|pass| pass.is_trial() && pass.asker == asker(name)).count();
                prop_assert!(own <= 1, "{own} trials of one key");
            }
            prop_assert!(!alone || lane.look(asker(7), now) == Admission::Yes, "{:?}", lane);
        }
        out.into_iter().for_each(|pass| lane.abandon(pass, now));
        let later = now + Duration::from_secs(700);
        for name in 0..6 {
            prop_assert!(!matches!(lane.look(asker(name), later), Admission::No(_) | Admission::Trial(_)));
        }
    }
}
