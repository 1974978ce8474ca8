//! A model of several targets, as one upstream: who is asked, who is asked next, and when nobody is.
//!
//! [`Relay`] is an [`Upstream`] made of others. Its events are a race until the first token of an attempt: until then nothing
//! binds, and any failure that is not the request's own leads to the next candidate. From then on they are that attempt's events, and
//! a failure is the client's to see. The deciders are pure and take the time as an argument: `balance` (which of several),
//! `breaker` (which not), `budget` (how many retries), `verdict` (what a failure means).

mod balance;
pub(crate) mod breaker;
mod budget;
pub mod checks;
mod core;
pub(crate) mod cost;
mod events;
pub(crate) mod lane;
mod mirror;
pub mod models;
mod prefix;
mod race;
mod target;
#[cfg(test)]
mod tests;
mod verdict;

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use penstock_dialects::openai::{DetokenizeRequest, TokenizeRequest};
use penstock_proto::ErrorKind;

pub use balance::Policy;
pub(crate) use balance::hash;
pub use checks::{Asker, Checks, Probe};
pub use models::{Models, Sources, Targets};
pub use verdict::Reason;
pub(crate) use verdict::judge;

use crate::call::Call;
use crate::error::Failure;
use crate::foreign::Feed;
use crate::forward::Forward;
use crate::provider::Forwarded;
use crate::telemetry::Gauge;
use crate::upstream::{Card, Events, Measured, Origin, Upstream};
use core::Core;

/// One `[[models]]` entry at work.
pub struct Relay(Arc<Core>);

#[async_trait]
impl Upstream for Relay {
    fn card(&self) -> Card {
        let first = self.0.targets[0].upstream.card();
        let context_tokens = match self.0.rules.context_tokens {
            // What is promised must fit wherever a request goes first.
            0 => self
                .0
                .tier()
                .map(|at| self.0.targets[at].context_tokens())
                .filter(|tokens| *tokens > 0)
                .min()
                .unwrap_or(0),
            given => given,
        };
        Card { id: self.0.rules.name.clone(), context_tokens, ..first }
    }

    fn unready(&self) -> Option<String> {
        let mut why = None;
        for target in &self.0.targets {
            why = Some(target.upstream.unready()?);
        }
        why
    }

    async fn open(&self, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        if let Some(mirror) = &self.0.mirror {
            mirror.copy(&self.0, &call, &origin);
        }
        let prefix = match self.0.rules.policy {
            Policy::CacheAware => Some(prefix::Prefix::of(&self.0, &call, Instant::now()).await),
            _ => None,
        };
        Ok(Box::new(events::Relayed::new(self.0.clone(), call, origin, prefix, Instant::now())))
    }

    async fn count(&self, call: Arc<Call>) -> Result<Option<u64>, Failure> {
        let mut failure = None;
        for target in &self.0.targets {
            match target.upstream.count(call.clone()).await {
                Ok(Some(tokens)) => return Ok(Some(tokens)),
                Ok(None) => {}
                Err(other) => failure = Some(other),
            }
        }
        failure.map_or(Ok(None), Err)
    }

    async fn measure(&self, call: &Call) -> Result<Option<Measured>, Failure> {
        // A reservation is large enough whichever pool answers: they may differ in tokenizer and context. What one refuses, another may take.
        let (mut most, mut refused): (Option<Measured>, _) = (None, None);
        // The first one last: it is likely to answer, and what it has made of the prompt is kept.
        for target in self.0.targets.iter().rev() {
            match target.upstream.measure(call).await {
                Ok(measured) => most = most.map_or(measured, |most| Some(measured.map_or(most, |one| most.max(one)))),
                Err(failure) => refused = Some(failure),
            }
        }
        refused.filter(|_| most.is_none()).map_or(Ok(most), Err)
    }

    async fn forward(&self, forward: Arc<Forward>) -> Result<Forwarded, Failure> {
        let mut failure = None;
        for target in &self.0.targets {
            match target.upstream.forward(forward.clone()).await {
                Err(other) if other.kind == ErrorKind::Unsupported => failure = Some(other),
                done => return done,
            }
        }
        Err(failure.unwrap_or_else(|| Failure::internal("a model without targets")))
    }

    async fn tokenize(&self, request: TokenizeRequest) -> Result<Vec<u8>, Failure> {
        let mut failure = None;
        for target in &self.0.targets {
            match target.upstream.tokenize(request.clone()).await {
                Err(other) if other.kind == ErrorKind::Unsupported => failure = Some(other),
                done => return done,
            }
        }
        Err(failure.unwrap_or_else(|| Failure::internal("a model without targets")))
    }

    async fn detokenize(&self, request: DetokenizeRequest) -> Result<Vec<u8>, Failure> {
        let mut failure = None;
        for target in &self.0.targets {
            match target.upstream.detokenize(request.clone()).await {
                Err(other) if other.kind == ErrorKind::Unsupported => failure = Some(other),
                done => return done,
            }
        }
        Err(failure.unwrap_or_else(|| Failure::internal("a model without targets")))
    }

    /// Each target is asked for its own.
    fn feed(&self) -> Option<Arc<Feed>> {
        None
    }

    fn gauges(&self, _: &mut dyn FnMut(Gauge, f64)) {}
}
