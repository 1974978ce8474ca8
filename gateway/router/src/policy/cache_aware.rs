//! The cheapest in seconds, busy or not: a request waits for a busy worker with its prefix when that is cheaper than to start cold.

use crate::explain::Candidate;
use crate::random::Random;

pub(super) fn choose(candidates: &[Candidate], random: &mut Random) -> usize {
    super::least_of(candidates, random, |_| true, Candidate::cost)
}
