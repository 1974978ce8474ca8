//! Cost of a decision: reserve and settle a few claims in a book of many subjects. `cargo run --release -p
//! penstock-govern --example reserve`.

use std::hint::black_box;
use std::sync::Arc;

use penstock_govern::{Book, Claim, Measure, Now, Span, Unit};

const ROUNDS: u64 = 500_000;
const SUBJECTS: usize = 10_000;

/// CPU time of this thread in nanoseconds, independent of other load on the machine.
fn cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
}

fn main() {
    let limits: [Arc<str>; 2] = ["standard".into(), "budget".into()];
    let measure = |unit, span| Measure { unit, span, max: u64::MAX >> 8 };
    let all = [
        (0, measure(Unit::Requests, Span::Minute)),
        (0, measure(Unit::Tokens, Span::Minute)),
        (0, measure(Unit::InFlight, Span::Now)),
        (1, measure(Unit::NanoUsd, Span::Month)),
    ];
    let subjects: Vec<String> = (0..SUBJECTS).map(|number| format!("key-{number}")).collect();
    for count in [1, 2, 4] {
        let mut book = Book::new();
        let began = cpu_ns();
        for round in 0..ROUNDS {
            let now = Now { mono_ms: 1_000_000 + round / 20, wall_ms: 1_800_000_000_000 + round / 20 };
            let subject = &subjects[(round as usize).wrapping_mul(7919) % SUBJECTS];
            let claims: Vec<_> = all[..count]
                .iter()
                .map(|(at, measure)| Claim { limit: &limits[*at], subject, measure: *measure, amount: 100, tag: 0 })
                .collect();
            let hold = book.reserve(&claims, now).expect("room");
            book.settle(black_box(hold), now, |_, _| Some(60));
        }
        println!("{count} claims: {} ns of CPU", (cpu_ns() - began) / ROUNDS);
    }
}
