//! Routing policies: interchangeable rules that choose a worker. All see the same candidates and return one of them; if
//! the chosen one has no credit, the request waits for it, for a bounded time.

mod cache_aware;
mod least_load;
mod power_of_two;
mod round_robin;
mod session;

use crate::explain::Candidate;
use crate::random::Random;
use std::fmt;
use std::str::FromStr;

/// Policy by which a pool's router chooses the worker of a request; each has a file with its reasons.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Least cost in seconds: queue, uncached prefill, harm to others.
    #[default]
    CacheAware,
    /// The worker with the fewest sequences, running and promised.
    LeastLoad,
    /// Of two workers drawn at random, the one with fewer sequences.
    PowerOfTwo,
    /// The workers one after another, whatever their load.
    RoundRobin,
    /// One worker per session, by rendezvous hashing.
    Session,
}

/// All policies, with their names in configs.
pub const POLICIES: [(&str, Policy); 5] = [
    ("cache_aware", Policy::CacheAware),
    ("least_load", Policy::LeastLoad),
    ("power_of_two", Policy::PowerOfTwo),
    ("round_robin", Policy::RoundRobin),
    ("session", Policy::Session),
];

/// Input of a policy besides the candidates: figures of the request and the fleet.
pub(crate) struct Asked {
    /// Hash that keeps a conversation together.
    pub(crate) session: u64,
    /// True if the client named what is kept together.
    pub(crate) keyed: bool,
    /// Number of requests bound so far, by which round robin counts.
    pub(crate) turn: u64,
}

impl Policy {
    /// Name of the policy as the config writes it.
    pub fn name(self) -> &'static str {
        POLICIES.iter().find(|(_, policy)| *policy == self).map_or("", |(name, _)| name)
    }

    /// Index of the choice among `candidates`, of which there is at least one.
    pub(crate) fn choose(self, asked: &Asked, candidates: &[Candidate], random: &mut Random) -> usize {
        match self {
            Self::CacheAware => cache_aware::choose(asked, candidates, random),
            Self::LeastLoad => least_load::choose(candidates, random),
            Self::PowerOfTwo => power_of_two::choose(candidates, random),
            Self::RoundRobin => round_robin::choose(asked, candidates),
            Self::Session => session::choose(asked, candidates),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// Error of parsing a policy: no policy has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a policy: cache_aware, least_load, power_of_two, round_robin or session")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = POLICIES.iter().find(|(known, _)| *known == name);
        found.map(|(_, policy)| *policy).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// Candidate of the least `key` among those that can start the request now, or among all when none can; ties are drawn at random.
fn least(candidates: &[Candidate], random: &mut Random, key: impl Fn(&Candidate) -> f64) -> usize {
    let any_free = candidates.iter().any(|candidate| candidate.free);
    least_of(candidates, random, |candidate| candidate.free || !any_free, key)
}

/// Candidate of the least `key` among those for which `may` is true; ties are drawn at random.
fn least_of(
    candidates: &[Candidate],
    random: &mut Random,
    may: impl Fn(&Candidate) -> bool,
    key: impl Fn(&Candidate) -> f64,
) -> usize {
    let (mut best, mut least, mut equals) = (0, f64::INFINITY, 0);
    for (at, candidate) in candidates.iter().enumerate().filter(|(_, candidate)| may(candidate)) {
        let value = key(candidate);
        if value < least {
            (best, least, equals) = (at, value, 1);
        } else if value == least {
            equals += 1;
            if random.below(equals) == 0 {
                best = at;
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WorkerId;
    use crate::cost::Parts;

    fn candidate(worker: u8, cost: f64, sequences: u32, free: bool) -> Candidate {
        let parts = Parts { queue: cost, ..Parts::default() };
        Candidate { worker: WorkerId(worker), parts, sequences, free, ..Candidate::default() }
    }

    fn choose(policy: Policy, candidates: &[Candidate], session: u64, turn: u64) -> u8 {
        let at = policy.choose(&Asked { session, turn, keyed: false }, candidates, &mut Random::new(turn));
        candidates[at].worker.0
    }

    #[test]
    fn names_come_back() {
        for (name, policy) in POLICIES {
            assert_eq!((name.parse(), policy.to_string()), (Ok(policy), name.to_owned()));
        }
        assert!("fastest".parse::<Policy>().is_err());
    }

    #[test]
    fn each_rule_has_its_measure() {
        let all = [candidate(0, 3.0, 1, true), candidate(1, 1.0, 9, true), candidate(2, 2.0, 5, true)];
        assert_eq!(choose(Policy::CacheAware, &all, 0, 0), 1);
        assert_eq!(choose(Policy::LeastLoad, &all, 0, 0), 0);
        let turns: Vec<u8> = (0..6).map(|turn| choose(Policy::RoundRobin, &all, 0, turn)).collect();
        assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
        let drawn: Vec<u8> = (0..200).map(|turn| choose(Policy::PowerOfTwo, &all, 0, turn)).collect();
        assert!(drawn.contains(&0) && drawn.contains(&2) && !drawn.contains(&1), "the fullest never wins a pair");
    }

    #[test]
    fn a_session_stays_and_only_its_own_move() {
        let all: Vec<Candidate> = (0..8).map(|worker| candidate(worker, 0.0, 0, true)).collect();
        let homes: Vec<u8> = (0..100).map(|session| choose(Policy::Session, &all, session, session)).collect();
        let without: Vec<Candidate> = all.iter().filter(|candidate| candidate.worker.0 != 3).cloned().collect();
        for (session, home) in (0..100).zip(&homes) {
            assert_eq!(choose(Policy::Session, &all, session, 77), *home);
            let moved = choose(Policy::Session, &without, session, 5);
            assert!(moved == *home || *home == 3);
        }
        assert!((0..8).all(|worker| homes.contains(&worker)));
    }

    #[test]
    fn a_key_has_a_home_where_nothing_else_decides() {
        let keyed = |candidates: &[Candidate], session, turn| {
            let asked = Asked { session, turn, keyed: true };
            Policy::CacheAware.choose(&asked, candidates, &mut Random::new(turn))
        };
        let all: Vec<Candidate> = (0..4).map(|worker| candidate(worker, 1.0, 1, true)).collect();
        let homes: Vec<usize> = (0..50).map(|session| keyed(&all, session, session)).collect();
        assert!((0..4).all(|worker| homes.contains(&worker)), "keys are spread");
        for (session, home) in (0..50).zip(homes) {
            assert_eq!(keyed(&all, session, 77), home, "a key stays");
            let with = |change: &dyn Fn(&mut Candidate)| {
                let mut all = all.clone();
                change(&mut all[home]);
                keyed(&all, session, 3)
            };
            assert_eq!(with(&|home| home.parts.queue = 1.05), home, "a little more is worth it");
            assert_ne!(with(&|home| home.parts.queue = 1.5), home, "a queue is not");
            assert_ne!(with(&|home| home.free = false), home);
            // A prefix elsewhere decides.
            let (mut all, other) = (all.clone(), (home + 1) % 4);
            (all[other].found.device, all[other].parts.queue) = (64, 0.99);
            assert_eq!(keyed(&all, session, 5), other);
        }
    }

    #[test]
    fn equals_are_drawn_evenly() {
        let all: Vec<Candidate> = (0..4).map(|worker| candidate(worker, 1.0, 1, true)).collect();
        for policy in [Policy::CacheAware, Policy::LeastLoad] {
            let mut counts = [0; 4];
            (0..400).for_each(|turn| counts[usize::from(choose(policy, &all, 0, turn))] += 1);
            assert!(counts.iter().all(|count| (60..140).contains(count)), "{policy}: {counts:?}");
        }
    }

    #[test]
    fn only_the_cost_waits_for_a_busy_worker() {
        let mut all = [candidate(0, 1.0, 1, false), candidate(1, 2.0, 9, true)];
        assert_eq!(choose(Policy::CacheAware, &all, 0, 0), 1, "not for a shorter queue alone");
        all[1].parts.own = 0.5;
        assert_eq!(choose(Policy::CacheAware, &all, 0, 0), 0);
        for policy in [Policy::LeastLoad, Policy::PowerOfTwo, Policy::RoundRobin] {
            assert_eq!(choose(policy, &all, 0, 0), 1, "{policy}");
        }
    }
}
