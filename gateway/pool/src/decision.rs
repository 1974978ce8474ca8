//! The router's decisions with worker names in place of indexes: for the admin API and the header `x-penstock-route`.

use super::members::Members;
use penstock_proto::RequestId;
use penstock_router::{Candidate, Explanation, WorkerId};
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

/// One decision of the router, made or asked for as an explanation.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Number of the request in the pool; 0 for an explanation.
    pub request: RequestId,
    /// Time since the decision was made.
    pub age: Duration,
    /// Time that the request had waited in the router's queue.
    pub waited: Duration,
    /// Number of tokens in the request's prompt.
    pub tokens: u32,
    /// Name of the policy that the router chose by, as in the config.
    pub policy: &'static str,
    /// Reason of the choice, in a word: `only`, `cached`, `cheaper` or `policy`.
    pub why: &'static str,
    /// Name of the chosen worker; `None`: no worker suits.
    pub worker: Option<Arc<str>>,
    /// Costs of the request at all workers that suit.
    pub offers: Vec<Offer>,
}

/// Cost of the request at one worker that suits it, with the router's figures.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Name of the worker that the cost is for.
    pub worker: Arc<str>,
    /// Name of the worker that KV blocks would be fetched from; `None`: none are fetched.
    pub pull_from: Option<Arc<str>>,
    /// The router's figures for this worker: cost, its parts, cached tokens, and predicted latencies.
    pub candidate: Candidate,
}

impl Decision {
    pub(super) fn new(explanation: &Explanation, members: &Members, now: Duration) -> Self {
        let name = |worker: WorkerId| members.get(worker).map(|member| Arc::clone(&member.name));
        let offer = |candidate: &Candidate| Offer {
            worker: name(candidate.worker).unwrap_or_default(),
            pull_from: candidate.pull_from.and_then(name),
            candidate: candidate.clone(),
        };
        Self {
            request: explanation.request,
            age: now.saturating_sub(explanation.at),
            waited: explanation.waited,
            tokens: explanation.tokens,
            policy: explanation.policy.name(),
            why: explanation.why.name(),
            worker: explanation.choice().and_then(|choice| name(choice.worker)),
            offers: explanation.candidates.iter().map(offer).collect(),
        }
    }

    /// One line of text, with the eight cheapest offers at most: `worker=chat-0 why=cached policy=cache_aware
    /// waited=0.012; chat-0 cost=0.31 queue=… cached=…, chat-1 …`.
    pub fn line(&self) -> String {
        let mut offers: Vec<&Offer> = self.offers.iter().collect();
        offers.sort_by(|a, b| a.candidate.cost().total_cmp(&b.candidate.cost()));
        let worker = self.worker.as_deref().unwrap_or("none");
        let mut line = format!(
            "worker={worker} why={} policy={} waited={:.3} tokens={}",
            self.why,
            self.policy,
            self.waited.as_secs_f64(),
            self.tokens
        );
        for (at, offer) in offers.into_iter().take(8).enumerate() {
            let Candidate { parts, found, free, crowded, .. } = &offer.candidate;
            let _ = write!(
                line,
                "{} {} cost={:.4} queue={:.4} own={:.4} later={:.4} harm={:.4} decode={:.4} pressure={:.4} cached={} promised={} loaded={} free={free} crowded={crowded}",
                if at == 0 { ";" } else { "," },
                offer.worker,
                offer.candidate.cost(),
                parts.queue,
                parts.own,
                parts.later,
                parts.harm,
                parts.decode,
                parts.pressure,
                found.device,
                found.promised,
                found.loaded,
            );
        }
        line
    }
}
