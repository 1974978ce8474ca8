//! Session policy by rendezvous hashing: every worker draws a number from the session, the highest wins. A worker that
//! leaves moves only its own sessions.

use super::Asked;
use crate::explain::Candidate;
use crate::random::Random;

pub(super) fn choose(asked: &Asked, candidates: &[Candidate]) -> usize {
    let draw = |at: &usize| {
        let worker = u64::from(candidates[*at].worker.0);
        Random::new(asked.session ^ worker.wrapping_mul(0x9e6c_63d0_876a_9a47)).bits()
    };
    (0..candidates.len()).max_by_key(draw).unwrap_or(0)
}
