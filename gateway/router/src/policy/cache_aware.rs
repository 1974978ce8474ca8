//! The cheapest in seconds, busy or not: a request waits for a busy worker with its prefix, or a faster one, when that is cheaper than
//! to start where there is room. Not for a shorter queue alone: who is free now is behind no queue of ours.

use crate::explain::Candidate;
use crate::random::Random;

/// Own prefill that a wait has to save, in seconds and as a share; and the share for a worker that has no more of the prompt and is
/// only thought to be faster: equals are not, whatever noise makes of them.
const GAIN: (f64, f64) = (0.05, 0.1);
const FASTER: f64 = 0.4;

pub(super) fn choose(candidates: &[Candidate], random: &mut Random) -> usize {
    let best = super::least_of(candidates, random, |_| true, Candidate::cost);
    if candidates[best].free || !candidates.iter().any(|candidate| candidate.free) {
        return best;
    }
    let free = super::least_of(candidates, random, |candidate| candidate.free, Candidate::cost);
    let (own, cold) = (candidates[best].parts.own, candidates[free].parts.own);
    let have = |at: usize| candidates[at].found.device + candidates[at].found.promised;
    let share = if have(best) > have(free) || candidates[best].found.loaded > 0 { GAIN.1 } else { FASTER };
    if own + GAIN.0.max(share * cold) < cold { best } else { free }
}
