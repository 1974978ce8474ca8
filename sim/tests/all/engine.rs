//! A thousand seeds of [`penstock_sim::world`].

use penstock_sim::world::{self, Tally};
use std::panic::catch_unwind;

/// Seeds that once failed; they run first, for ever.
const REGRESSIONS: &[u64] = &[];
const SEEDS: u64 = 1000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

#[test]
fn every_seed_keeps_every_promise() {
    if let Some(seed) = number("PENSTOCK_SIM_SEED") {
        println!("{:?}", world::run(seed));
        return;
    }
    let seeds = number("PENSTOCK_SIM_SEEDS").unwrap_or(SEEDS);
    let mut tally = Tally::default();
    for seed in REGRESSIONS.iter().copied().chain(0..seeds) {
        match catch_unwind(|| world::run(seed)) {
            Ok(run) => tally += run,
            Err(_) => panic!("seed {seed} fails; replay it with PENSTOCK_SIM_SEED={seed}"),
        }
    }
    println!("{seeds} seeds: {tally:?}");
    // A simulation that stops reaching the hard cases proves nothing.
    for (what, count) in [
        ("preemptions", tally.preemptions),
        ("cached tokens", tally.cached),
        ("resumes", tally.resumes),
        ("overloads", tally.overloaded),
        ("failures", tally.failed),
        ("cancels", tally.cancels),
        ("accepted drafts", tally.accepted),
        ("rejected drafts", tally.drafted - tally.accepted),
    ] {
        assert!(count >= seeds / 2, "{what}: only {count} in {seeds} seeds");
    }
}
