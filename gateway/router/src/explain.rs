//! Explanations of decisions: every worker that could have taken a request, with the parts of its cost.

use crate::WorkerId;
use crate::cost::Parts;
use crate::policy::Policy;
use penstock_proto::RequestId;
use std::time::Duration;

/// Leading tokens of a prompt by the place where a worker has them; each counts only tokens beyond the ones before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Tokens whose blocks are on the worker's device.
    pub device: u32,
    /// Tokens that the worker is computing for another request.
    pub promised: u32,
    /// Tokens whose blocks are in the worker's host memory.
    pub host: u32,
    /// Tokens whose blocks are on the worker's disk.
    pub disk: u32,
    /// Tokens in a remote store that the worker shares with others.
    pub remote: u32,
    /// Tokens not on the device that the worker is to load or pull rather than compute.
    pub loaded: u32,
}

impl Found {
    /// Tokens that the worker has in any place, promised ones included.
    pub fn all(&self) -> u32 {
        self.device + self.promised + self.host + self.disk + self.remote
    }
}

/// A worker as a candidate for one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Candidate {
    /// Id of the worker that is a candidate.
    pub worker: WorkerId,
    /// True if the worker may get the request and would start it at its next step.
    pub free: bool,
    /// True if the request would slow the tokens of the sequences there beyond the promised TPOT.
    pub crowded: bool,
    /// Number of sequences at the worker, promised ones included.
    pub sequences: u32,
    /// Part of the prompt that is cached at the worker, by place.
    pub found: Found,
    /// Worker that KV blocks would be pulled from; `None`: nothing would be pulled.
    pub pull_from: Option<WorkerId>,
    /// Worker that would prefill for the candidate; `None`: the candidate prefills itself.
    pub prefill: Option<WorkerId>,
    /// Parts of the cost of the request at this worker, in seconds.
    pub parts: Parts,
    /// Seconds charged because the request has waited for this worker longer than predicted.
    pub overdue: f64,
    /// Predicted seconds from now to the first token.
    pub ttft: f64,
    /// Predicted seconds between two output tokens of the request (TPOT).
    pub tpot: f64,
}

impl Candidate {
    /// Cost in seconds that the policy compares: the sum of the parts and the charge for an overdue wait.
    pub fn cost(&self) -> f64 {
        self.parts.sum() + self.overdue
    }
}

/// Reason that the router chose one candidate rather than the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Only one worker suits the request.
    Only,
    /// The worker has more of the prompt on its device than any other one.
    Cached,
    /// The worker costs less, although others have as much of the prompt or more.
    Cheaper,
    /// The policy compares no costs.
    Policy,
}

impl Why {
    /// Reason in one word, as decisions show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Cached => "cached",
            Self::Cheaper => "cheaper",
            Self::Policy => "policy",
        }
    }
}

/// One decision, or the decision that would be made now.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// Number of the request; 0 for an explanation without one.
    pub request: RequestId,
    /// Time of the decision, since the pool began.
    pub at: Duration,
    /// Time that the request had waited in the queue before the decision.
    pub waited: Duration,
    /// Number of tokens in the request's prompt.
    pub tokens: u32,
    /// Policy by which the candidate was chosen.
    pub policy: Policy,
    /// All workers that suit the request, with their costs.
    pub candidates: Vec<Candidate>,
    /// Index of the choice in `candidates`; `None`: no worker suits.
    pub chosen: Option<usize>,
    /// Reason that this candidate was chosen.
    pub why: Why,
}

impl Explanation {
    /// The chosen worker's candidate; `None` where no worker suits.
    pub fn choice(&self) -> Option<&Candidate> {
        self.candidates.get(self.chosen?)
    }
}

/// Reason that the candidate at index `chosen` was chosen by `policy`.
pub(crate) fn why(policy: Policy, candidates: &[Candidate], chosen: usize) -> Why {
    // Blocks below the device have a price like computed ones, so they do not count as cached here.
    let have = |candidate: &Candidate| candidate.found.device + candidate.found.promised;
    let most = candidates.iter().enumerate().filter(|(at, _)| *at != chosen).map(|(_, other)| have(other)).max();
    match most {
        None => Why::Only,
        Some(_) if policy != Policy::CacheAware => Why::Policy,
        Some(most) if have(&candidates[chosen]) > most => Why::Cached,
        Some(_) => Why::Cheaper,
    }
}
