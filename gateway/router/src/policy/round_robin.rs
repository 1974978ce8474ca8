//! Round-robin policy among workers that can start one more sequence.

use super::Asked;
use crate::explain::Candidate;

pub(super) fn choose(asked: &Asked, candidates: &[Candidate]) -> usize {
    let free: Vec<usize> = (0..candidates.len()).filter(|at| candidates[*at].free).collect();
    match free.len() as u64 {
        0 => 0,
        count => free[(asked.turn % count) as usize],
    }
}
