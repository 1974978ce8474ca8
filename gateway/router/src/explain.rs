//! Why a request went where it went: every worker that could have taken it, with its price by reasons.

use crate::WorkerId;
use crate::cost::Parts;
use crate::policy::Policy;
use std::time::Duration;

/// Leading tokens of a prompt by where a worker has them; each beyond the ones before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// On the device.
    pub device: u32,
    /// Being computed there for another request.
    pub promised: u32,
    /// In its host memory.
    pub host: u32,
    /// On its disk.
    pub disk: u32,
    /// In a store that it shares.
    pub remote: u32,
    /// Of what is not on the device: tokens that it is to load, or to pull, rather than to compute.
    pub loaded: u32,
}

impl Found {
    /// In all.
    pub fn all(&self) -> u32 {
        self.device + self.promised + self.host + self.disk + self.remote
    }
}

/// A worker as a place for one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Candidate {
    /// The worker.
    pub worker: WorkerId,
    /// Whether it would start the request at its next step, and may.
    pub free: bool,
    /// Whether that would make the tokens of those that run there come slower than promised.
    pub crowded: bool,
    /// Sequences that it has, promised ones included.
    pub sequences: u32,
    /// What it has of the prompt.
    pub found: Found,
    /// Whom it is to pull blocks from.
    pub pull_from: Option<WorkerId>,
    /// Who is to prefill for it.
    pub prefill: Option<WorkerId>,
    /// Its price, by reasons.
    pub parts: Parts,
    /// Seconds charged because the request has waited for it longer than predicted.
    pub overdue: f64,
    /// Predicted seconds to the first token from now.
    pub ttft: f64,
    /// Predicted seconds between tokens.
    pub tpot: f64,
}

impl Candidate {
    /// What is compared.
    pub fn cost(&self) -> f64 {
        self.parts.sum() + self.overdue
    }
}

/// Why the choice is what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The only worker that suits.
    Only,
    /// It has most of the prompt.
    Cached,
    /// Others have as much of the prompt or more; it costs less all the same.
    Cheaper,
    /// By the policy, whatever it costs.
    Policy,
}

impl Why {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Cached => "cached",
            Self::Cheaper => "cheaper",
            Self::Policy => "policy",
        }
    }
}

/// One decision, or what would be decided now.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The request; 0 when there is none.
    pub request: u64,
    /// When.
    pub at: Duration,
    /// How long it had waited.
    pub waited: Duration,
    /// Tokens of its prompt.
    pub tokens: u32,
    /// By which rule.
    pub policy: Policy,
    /// Every worker that suits.
    pub candidates: Vec<Candidate>,
    /// The choice, as an index into `candidates`; `None`: nobody suits.
    pub chosen: Option<usize>,
    /// Why.
    pub why: Why,
}

impl Explanation {
    /// The choice.
    pub fn choice(&self) -> Option<&Candidate> {
        self.candidates.get(self.chosen?)
    }
}

/// Why that one.
pub(crate) fn why(policy: Policy, candidates: &[Candidate], chosen: usize) -> Why {
    // What would have to be brought there first is a price like others.
    let have = |candidate: &Candidate| candidate.found.device + candidate.found.promised;
    let most = candidates.iter().enumerate().filter(|(at, _)| *at != chosen).map(|(_, other)| have(other)).max();
    match most {
        None => Why::Only,
        Some(_) if policy != Policy::CacheAware => Why::Policy,
        Some(most) if have(&candidates[chosen]) > most => Why::Cached,
        Some(_) => Why::Cheaper,
    }
}
