use proptest::prelude::*;

use super::*;

const RULES: Rules = Rules::DEFAULT;
const MS: Duration = Duration::from_millis(1);

fn fail_times(breaker: &mut Breaker, times: u32, now: Instant) {
    for _ in 0..times {
        let ticket = breaker.enter(now);
        breaker.fail(ticket, now);
    }
}

#[test]
fn failures_in_a_row_open_it_and_a_probe_closes_it() {
    let start = Instant::now();
    let mut breaker = Breaker::new(RULES);
    fail_times(&mut breaker, 4, start);
    assert_eq!(breaker.look(start), Admission::Yes);
    fail_times(&mut breaker, 1, start);
    assert_eq!(breaker.look(start), Admission::No(start + RULES.open_min));
    let later = start + RULES.open_min;
    assert_eq!(breaker.look(later), Admission::Yes);
    let probe = breaker.enter(later);
    assert!(matches!(breaker.look(later), Admission::No(_)), "one probe at a time");
    breaker.succeed(probe, later);
    assert_eq!(breaker.look(later), Admission::Yes);
}

#[test]
fn the_open_time_doubles_up_to_its_bound_and_starts_anew_after_a_calm_window() {
    let mut now = Instant::now();
    let mut breaker = Breaker::new(RULES);
    fail_times(&mut breaker, 5, now);
    let mut times = Vec::new();
    for _ in 0..9 {
        let Admission::No(until) = breaker.look(now) else { panic!("open") };
        times.push((until - now).as_secs());
        now = until;
        fail_times(&mut breaker, 1, now);
    }
    assert_eq!(times, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    let Admission::No(until) = breaker.look(now) else { panic!("open") };
    let probe = breaker.enter(until);
    breaker.succeed(probe, until);
    let calm = until + RULES.window;
    fail_times(&mut breaker, 5, calm);
    assert_eq!(breaker.look(calm), Admission::No(calm + RULES.open_min));
}

#[test]
fn a_high_rate_makes_it_the_last_choice_and_failures_in_a_row_end_even_that() {
    let now = Instant::now();
    let mut breaker = Breaker::new(RULES);
    for _ in 0..10 {
        let (good, bad) = (breaker.enter(now), breaker.enter(now));
        breaker.succeed(good, now);
        breaker.fail(bad, now);
    }
    assert_eq!(breaker.look(now), Admission::Last);
    fail_times(&mut breaker, 5, now);
    assert!(matches!(breaker.look(now), Admission::No(_)));
}

#[test]
fn old_outcomes_say_nothing_about_a_new_state() {
    let now = Instant::now();
    let mut breaker = Breaker::new(RULES);
    let (slow_good, slow_bad) = (breaker.enter(now), breaker.enter(now));
    fail_times(&mut breaker, 5, now);
    breaker.succeed(slow_good, now);
    assert!(matches!(breaker.look(now), Admission::No(_)), "an old success does not close it");
    let later = now + RULES.open_min;
    let probe = breaker.enter(later);
    breaker.fail(slow_bad, later);
    breaker.succeed(probe, later);
    assert_eq!(breaker.look(later), Admission::Yes, "an old failure does not open it");
}

#[test]
fn an_abandoned_probe_is_sent_again() {
    let now = Instant::now();
    let mut breaker = Breaker::new(RULES);
    fail_times(&mut breaker, 5, now);
    let later = now + RULES.open_min;
    let probe = breaker.enter(later);
    breaker.abandon(probe, later);
    assert_eq!(breaker.look(later), Admission::Yes);
}

#[test]
fn a_target_that_names_a_time_is_left_alone_until_then() {
    let now = Instant::now();
    let mut breaker = Breaker::new(RULES);
    breaker.cool(now + 5 * MS);
    breaker.cool(now + 3 * MS);
    assert_eq!(breaker.look(now), Admission::No(now + 5 * MS));
    assert_eq!(breaker.look(now + 5 * MS), Admission::Yes);
}

#[derive(Clone, Debug)]
enum Step {
    Wait(u64),
    Enter,
    /// Index into the tickets in flight, and the outcome.
    Settle(usize, u8),
    Broke,
    Trip,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0_u64..5000).prop_map(Step::Wait),
        1 => (5000_u64..200_000).prop_map(Step::Wait),
        6 => Just(Step::Enter),
        6 => (any::<usize>(), 0_u8..5).prop_map(|(at, outcome)| Step::Settle(at, outcome)),
        1 => Just(Step::Broke),
        1 => Just(Step::Trip),
    ]
}

proptest! {
    /// Invariants over any sequence of events: one probe at a time, no entry while open hard, no open time beyond the
    /// bound; and once every ticket is back and the longest open time is over, requests are let in again.
    #[test]
    fn it_never_lets_too_many_in_and_never_stays_shut(steps in prop::collection::vec(step(), 0..200)) {
        let mut now = Instant::now();
        let mut breaker = Breaker::new(RULES);
        let mut out: Vec<Ticket> = Vec::new();
        for step in steps {
            match step {
                Step::Wait(ms) => now += ms as u32 * MS,
                Step::Enter => {
                    if !matches!(breaker.look(now), Admission::No(_)) {
                        out.push(breaker.enter(now));
                    }
                }
                Step::Settle(at, outcome) if !out.is_empty() => {
                    let ticket = out.swap_remove(at % out.len());
                    match outcome {
                        0 => breaker.abandon(ticket, now),
                        1 | 2 => breaker.succeed(ticket, now),
                        _ => breaker.fail(ticket, now),
                    }
                }
                Step::Settle(..) => {}
                Step::Broke => breaker.broke(now),
                Step::Trip => breaker.trip(now),
            }
            let probes = out.iter().filter(|ticket| ticket.probe && ticket.generation == breaker.generation).count();
            prop_assert!(probes <= 1, "{probes} probes");
            prop_assert_eq!(probes == 1, matches!(breaker.state, State::Probing { .. }));
            if let Admission::No(until) = breaker.look(now) {
                prop_assert!(until > now && until <= now + RULES.open_max);
            }
            if matches!(breaker.state, State::Closed { .. }) {
                prop_assert!(breaker.row < RULES.in_a_row);
                prop_assert_eq!(breaker.look(now), Admission::Yes);
            }
        }
        for ticket in out {
            breaker.abandon(ticket, now);
        }
        prop_assert_eq!(breaker.look(now + RULES.open_max), Admission::Yes);
    }
}
