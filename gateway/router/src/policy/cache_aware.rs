//! Policy of the least cost in seconds, busy workers included: a request waits for a busy worker with its prefix, or a
//! faster one, when that is cheaper than a start at a free one. A shorter queue alone is no reason to wait: at a free
//! worker the gateway's queue is over.
//!
//! Requests that name a key (`prompt_cache_key`, a session) share a worker where the prompt itself does not decide: a
//! prefix too short to be seen or evicted everywhere is found again, and grows, at one worker instead of all.

use super::Asked;
use crate::explain::Candidate;
use crate::random::Random;

/// Prefill that a wait has to save: in seconds, and as a share of the free worker's. [`FASTER`] is the share for a busy
/// worker with no more of the prompt, which only seems faster: noise must not make equal workers differ.
const GAIN: (f64, f64) = (0.05, 0.1);
const FASTER: f64 = 0.4;

/// Cost above the least, in seconds and as a share of it, that the requests of one key may have at their worker.
const NEAR: (f64, f64) = (0.1, 0.2);

pub(super) fn choose(asked: &Asked, candidates: &[Candidate], random: &mut Random) -> usize {
    let cheapest = cheapest(candidates, random);
    if asked.keyed { home(asked, candidates, cheapest) } else { cheapest }
}

/// Worker that the requests of a key have in common, where prefixes do not decide: it has as much of the prompt as the
/// cheapest, starts it as soon, and costs hardly more. Else the cheapest.
fn home(asked: &Asked, candidates: &[Candidate], cheapest: usize) -> usize {
    let at = super::session::choose(asked, candidates);
    let (home, best) = (&candidates[at], &candidates[cheapest]);
    let near = best.cost() + NEAR.0.max(NEAR.1 * best.cost());
    if home.free == best.free && home.found == best.found && home.cost() <= near { at } else { cheapest }
}

fn cheapest(candidates: &[Candidate], random: &mut Random) -> usize {
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
