//! Policy of two choices: of two random workers that can start one more sequence, the one with fewer sequences.

use crate::explain::Candidate;
use crate::random::Random;

pub(super) fn choose(candidates: &[Candidate], random: &mut Random) -> usize {
    let free: Vec<usize> = (0..candidates.len()).filter(|at| candidates[*at].free).collect();
    let draw = |random: &mut Random, skip: Option<usize>| {
        let others: Vec<usize> = free.iter().copied().filter(|at| Some(*at) != skip).collect();
        others.get(random.below(others.len() as u64) as usize).copied()
    };
    let Some(one) = draw(random, None) else { return 0 };
    let Some(other) = draw(random, Some(one)) else { return one };
    if candidates[other].sequences < candidates[one].sequences { other } else { one }
}
