//! The cheapest in seconds, busy or not: a request waits for a busy worker with its prefix, or a faster one, when that is cheaper than
//! to start where there is room. Not for a shorter queue alone: who is free now is behind no queue of ours.

use crate::explain::Candidate;
use crate::random::Random;

/// Own prefill that a wait has to save, in seconds and as a share.
const GAIN: (f64, f64) = (0.05, 0.1);

pub(super) fn choose(candidates: &[Candidate], random: &mut Random) -> usize {
    let best = super::least_of(candidates, random, |_| true, Candidate::cost);
    if candidates[best].free || !candidates.iter().any(|candidate| candidate.free) {
        return best;
    }
    let free = super::least_of(candidates, random, |candidate| candidate.free, Candidate::cost);
    let (own, cold) = (candidates[best].parts.own, candidates[free].parts.own);
    if own + GAIN.0.max(GAIN.1 * cold) < cold { best } else { free }
}
