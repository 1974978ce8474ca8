//! Policy of the fewest sequences, waiting and running, among workers that can start one more.

use crate::explain::Candidate;
use crate::random::Random;

pub(super) fn choose(candidates: &[Candidate], random: &mut Random) -> usize {
    super::least(candidates, random, |candidate| f64::from(candidate.sequences))
}
