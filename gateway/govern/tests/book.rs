//! The book against a simple model: arrivals, aborts, retries and windows in any order, from many threads.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use penstock_govern::{Book, Claim, Hold, Measure, Now, Span, Unit};
use proptest::prelude::*;

const START: u64 = 1_767_225_600_000; // 2026-01-01

fn at(ms: u64) -> Now {
    Now { mono_ms: 10_000_000 + ms, wall_ms: START + ms }
}

/// Step of a random scenario: a request begins or ends, or time passes.
#[derive(Clone, Debug)]
enum Step {
    /// A request that reserves this much, and will use a part of it or more.
    Arrive { key: u8, reserve: u64, used: u64 },
    /// An open request ends with what it used, with nothing, or with an unknown use.
    End { which: usize, how: u8 },
    /// Lets this many milliseconds pass.
    Wait(u64),
}

fn steps(over: bool) -> impl Strategy<Value = Vec<Step>> {
    let used = if over { 0u64..200 } else { 0..100 };
    let step = prop_oneof![
        4 => (0u8..3, 1u64..100, used).prop_map(move |(key, reserve, used)| {
            Step::Arrive { key, reserve, used: if over { used } else { used.min(reserve) } }
        }),
        3 => (any::<usize>(), 0u8..3).prop_map(|(which, how)| Step::End { which, how }),
        2 => prop_oneof![0u64..2_000, 0u64..70_000, 0u64..40_000_000].prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 1..250)
}

/// The test's own record of a request in progress and its reserved amounts.
struct Open {
    hold: Hold,
    key: u8,
    reserve: u64,
    used: u64,
    began: u64,
}

/// Model of an ended request: when it was counted, and its amounts.
struct Over {
    key: u8,
    began: u64,
    counted: u64,
    excess: u64,
}

const MEASURES: [Measure; 4] = [
    Measure { unit: Unit::Tokens, span: Span::Minute, max: 300 },
    Measure { unit: Unit::NanoUsd, span: Span::Day, max: 900 },
    Measure { unit: Unit::Requests, span: Span::Second, max: 5 },
    Measure { unit: Unit::InFlight, span: Span::Now, max: 8 },
];

fn claims<'a>(limit: &'a Arc<str>, key: &'a str, reserve: u64) -> Vec<Claim<'a>> {
    let amount = |unit| if matches!(unit, Unit::Requests | Unit::InFlight) { 1 } else { reserve };
    MEASURES
        .iter()
        .map(|measure| Claim { limit, subject: key, measure: *measure, amount: amount(measure.unit), tag: 0 })
        .collect()
}

fn run(steps: &[Step]) -> Result<(), TestCaseError> {
    let limit: Arc<str> = "l".into();
    let names = ["a", "b", "c"];
    let mut book = Book::new();
    let (mut ms, mut open, mut over): (u64, Vec<Open>, Vec<Over>) = (0, Vec::new(), Vec::new());
    for step in steps {
        match step {
            Step::Wait(gone) => ms += gone,
            Step::Arrive { key, reserve, used } => {
                let name = names[*key as usize];
                let before: Vec<u64> = MEASURES.iter().map(|m| book.standing("l", name, *m, at(ms)).used).collect();
                match book.reserve(&claims(&limit, name, *reserve), at(ms)) {
                    Ok(hold) => open.push(Open { hold, key: *key, reserve: *reserve, used: *used, began: ms }),
                    Err(denied) => {
                        let after: Vec<u64> =
                            MEASURES.iter().map(|m| book.standing("l", name, *m, at(ms)).used).collect();
                        prop_assert_eq!(before, after, "who is refused has taken nothing");
                        if let Some(wait) = denied.wait_ms {
                            let measure = MEASURES[denied.claim];
                            let need = claims(&limit, name, *reserve)[denied.claim].amount;
                            // In a copy, because counters only go forward.
                            let mut copy = Book::new();
                            copy.import(book.export(at(ms)), at(ms));
                            let later = copy.standing("l", name, measure, at(ms + wait)).used;
                            // If no other request is open, the claim fits after the wait.
                            let open_of = open.iter().any(|one| names[one.key as usize] == name);
                            prop_assert!(later + need <= measure.max || open_of, "{:?} {} {}", measure, later, need);
                        }
                    }
                }
            }
            Step::End { which, how } => {
                if open.is_empty() {
                    continue;
                }
                let one = open.swap_remove(which % open.len());
                let spent = [Some(one.used), Some(0), None][*how as usize];
                let counted = spent.unwrap_or(one.reserve);
                book.settle(one.hold, at(ms), |_, unit| if unit == Unit::Requests { Some(1) } else { spent });
                over.push(Over {
                    key: one.key,
                    began: one.began,
                    counted,
                    excess: counted.saturating_sub(one.reserve),
                });
            }
        }
        check(&mut book, ms, &open, &over)?;
    }
    let held: Vec<_> = open.into_iter().map(|one| one.hold).collect();
    held.into_iter().for_each(|hold| book.settle(hold, at(ms), |_, _| Some(0)));
    prop_assert_eq!(book.open(), 0);
    book.sweep(at(ms + 86_400_000 * 40));
    prop_assert!(book.is_empty(), "what says nothing is forgotten");
    Ok(())
}

/// Invariant: in any minute and day, used plus held amounts are within the limit, except for use beyond reservations.
fn check(book: &mut Book, ms: u64, open: &[Open], over: &[Over]) -> Result<(), TestCaseError> {
    for (key, name) in ["a", "b", "c"].iter().enumerate() {
        let sum = |within: &dyn Fn(u64) -> bool| {
            let held: u64 =
                open.iter().filter(|one| one.key as usize == key && within(one.began)).map(|one| one.reserve).sum();
            let used: u64 =
                over.iter().filter(|one| one.key as usize == key && within(one.began)).map(|one| one.counted).sum();
            held + used
        };
        let excess: u64 = over.iter().filter(|one| one.key as usize == key).map(|one| one.excess).sum();
        let day = |began: u64| (START + began) / 86_400_000 == (START + ms) / 86_400_000;
        prop_assert!(sum(&|began| began + 60_000 > ms) <= 300 + excess);
        prop_assert!(sum(&day) <= 900 + excess);
        let counted = book.standing("l", name, MEASURES[0], at(ms)).used;
        prop_assert!(counted >= sum(&|began| began + 60_000 > ms), "nothing of the last minute is forgotten");
        let in_flight = open.iter().filter(|one| one.key as usize == key).count() as u64;
        prop_assert_eq!(book.standing("l", name, MEASURES[3], at(ms)).used, in_flight);
        prop_assert!(in_flight <= 8);
    }
    Ok(())
}

proptest! {
    /// Reservations that are upper bounds: no limit is ever exceeded.
    #[test]
    fn no_limit_is_exceeded_where_reservations_are_bounds(steps in steps(false)) {
        run(&steps)?;
    }

    /// Reservations that are estimates: limits are exceeded at most by the use beyond them.
    #[test]
    fn limits_are_exceeded_by_no_more_than_what_was_not_reserved(steps in steps(true)) {
        run(&steps)?;
    }

    /// A handover in the middle of everything: nothing is lost, nothing counts twice.
    #[test]
    fn a_book_can_be_handed_over(before in steps(true), late in proptest::collection::vec(0usize..3, 0..6), gap in 0u64..100_000) {
        let limit: Arc<str> = "l".into();
        let mut book = Book::new();
        let (mut ms, mut open) = (0, Vec::new());
        for step in &before {
            match step {
                Step::Wait(gone) => ms += gone,
                Step::Arrive { key, reserve, .. } => {
                    let name = ["a", "b", "c"][*key as usize];
                    open.extend(book.reserve(&claims(&limit, name, *reserve), at(ms)).ok());
                }
                Step::End { which, how } if !open.is_empty() => {
                    let hold = open.swap_remove(which % open.len());
                    book.settle(hold, at(ms), |_, _| [Some(1), Some(0), None][*how as usize]);
                }
                Step::End { .. } => {}
            }
        }
        let json = serde_json::to_string(&book.export(at(ms))).expect("a document");
        let mut other = Book::new();
        // The other process's monotonic clock has another origin.
        let there = |ms: u64| Now { mono_ms: 50_000_000 + ms, wall_ms: START + ms };
        other.import(serde_json::from_str(&json).expect("a book"), there(ms));
        let same = |book: &mut Book, other: &mut Book, ms: u64| {
            for (name, measure) in ["a", "b", "c"].iter().flat_map(|name| MEASURES.iter().map(move |measure| (name, measure))) {
                let (ours, theirs) = (book.standing("l", name, *measure, at(ms)), other.standing("l", name, *measure, there(ms)));
                // The slices of the two clocks need not begin together.
                if measure.span == Span::Now || measure.span == Span::Day {
                    prop_assert_eq!((ours.used, ours.reserved), (theirs.used, theirs.reserved));
                }
                prop_assert_eq!(ours.reserved, theirs.reserved);
            }
            Ok(())
        };
        same(&mut book, &mut other, ms)?;
        // Requests that the old process admits after the export are reported.
        for key in late {
            let name = ["a", "b", "c"][key];
            if let Ok(hold) = book.reserve(&claims(&limit, name, 1), at(ms)) {
                for _ in 0..2 {
                    other.adopt(hold.id(), &claims(&limit, name, 1), there(ms));
                }
                open.push(hold);
            }
        }
        same(&mut book, &mut other, ms)?;
        ms += gap;
        for (at_, hold) in open.into_iter().enumerate() {
            let id = hold.id();
            let spent = [Some(3), None][at_ % 2];
            book.settle(hold, at(ms), |_, _| spent);
            prop_assert!(other.settle_id(id, there(ms), |_, _| spent));
            prop_assert!(!other.settle_id(id, there(ms), |_, _| spent), "once");
        }
        same(&mut book, &mut other, ms)?;
        other.end_adopted(there(ms));
        prop_assert_eq!(other.open(), 0);
    }
}

/// Threads in any order: the sum of the admitted amounts is exactly the limit, and all of it comes back.
#[test]
fn a_thousand_at_once_take_no_more_than_there_is() {
    let book = Arc::new(Mutex::new(Book::new()));
    let measure = Measure { unit: Unit::NanoUsd, span: Span::Day, max: 1000 };
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let book = book.clone();
            std::thread::spawn(move || {
                let limit: Arc<str> = "l".into();
                let claim = Claim { limit: &limit, subject: "k", measure, amount: 7, tag: 0 };
                let mut holds = Vec::new();
                for _ in 0..125 {
                    holds.extend(book.lock().expect("no panic").reserve(&[claim], at(0)).ok());
                }
                holds
            })
        })
        .collect();
    let holds: Vec<Hold> = threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect();
    assert_eq!(holds.len(), 142, "1000 / 7");
    let mut book = book.lock().expect("no panic");
    holds.into_iter().for_each(|hold| book.settle(hold, at(1), |_, _| Some(2)));
    assert_eq!(book.standing("l", "k", measure, at(1)).used, 284);
}

/// Subjects beyond the bound share one counter, and none is admitted uncounted.
#[test]
fn a_flood_of_addresses_shares_a_counter() {
    let limit: Arc<str> = "l".into();
    let mut book = Book::new();
    let measure = Measure { unit: Unit::Requests, span: Span::Hour, max: 3 };
    let mut let_in: HashMap<bool, u32> = HashMap::new();
    for number in 0..100_010u32 {
        let subject = number.to_string();
        let claim = Claim { limit: &limit, subject: &subject, measure, amount: 1, tag: 0 };
        let held = book.reserve(&[claim], at(u64::from(number / 100)));
        *let_in.entry(number >= 100_000).or_default() += u32::from(held.is_ok());
        if let Ok(hold) = held {
            book.settle(hold, at(u64::from(number / 100)), |_, _| Some(1));
        }
    }
    assert_eq!((let_in[&false], let_in[&true]), (100_000, 3));
    book.sweep(at(4_000_000));
    assert!(book.is_empty());
}
