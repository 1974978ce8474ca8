//! Relay of a model over several targets: first choice, retries, fallbacks, hedges, circuit breakers.
//!
//! [`Relay`] is an [`Upstream`] made of others. Until the first token of an attempt its events are a race: nothing
//! binds, and any failure that is not the request's own leads to the next candidate. From the first token on they are
//! that attempt's events, and a failure goes to the client. [`pick`] makes the first choice for a proxy that forwards
//! the request itself. The deciders are pure and take the time as an argument:
//! `balance` (the target among equals), `breaker` (targets left out), `budget` (number of retries), `verdict` (meaning
//! of a failure).
#![forbid(unsafe_code)]

mod balance;
pub mod bill;
mod budget;
pub mod checks;
mod config;
mod core;
pub mod cost;
mod events;
mod mirror;
pub mod models;
pub mod pick;
mod prefix;
mod race;
mod target;
#[cfg(test)]
mod tests;
mod verdict;

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use penstock_proto::ErrorKind;
use penstock_types::{DetokenizeRequest, TokenizeRequest};

pub use balance::Policy;
pub use bill::Billing;
pub use checks::{Asker, Checks, Probe};
pub use config::{MirrorConfig, ModelConfig, RelayConfig, Sticky, TARGETS_MAX, TargetConfig};
pub use models::{Models, Sources, Targets};
pub use pick::{Pick, Wanted};
pub use target::Endpoint;
pub use verdict::{Health, Reason, Verdict, judge};

use self::core::Core;
use penstock_base::error::Failure;
use penstock_kv_feed::Feed;
use penstock_telemetry::Gauge;
use penstock_upstream::Forward;
use penstock_upstream::Forwarded;
use penstock_upstream::call::Call;
use penstock_upstream::{Card, Events, Measured, Open, Origin, Prepared, Upstream};

/// Upstream of one `[[models]]` entry: retries, fallbacks and hedges over its targets.
pub struct Relay(Arc<Core>);

impl Relay {
    /// Starts the race of the targets; `first`: the start of the call at the first target, where that has measured it.
    async fn race(&self, call: Arc<Call>, origin: Origin, first: Option<Box<dyn Open>>) -> Box<dyn Events> {
        if let Some(mirror) = &self.0.mirror {
            mirror.copy(&self.0, &call, &origin);
        }
        let prefix = self.0.prefix(&call).await;
        Box::new(events::Relayed::new(self.0.clone(), call, origin, race::RaceStart { prefix, first }, Instant::now()))
    }
}

/// Call whose tokens the first target has counted, to be started there first.
struct RelayOpener {
    relay: Arc<Relay>,
    first: Box<dyn Open>,
}

#[async_trait]
impl Open for RelayOpener {
    async fn open(self: Box<Self>, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        Ok(self.relay.race(call, origin, Some(self.first)).await)
    }
}

#[async_trait]
impl Upstream for Relay {
    fn card(&self) -> Card {
        let first = self.0.targets[0].upstream.card();
        let context_tokens = match self.0.rules.context_tokens {
            // The promised context must fit every target that a request can go to first.
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

    fn is_loaded(&self) -> bool {
        self.0.targets.iter().any(|target| target.upstream.is_loaded())
    }

    async fn open(&self, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        Ok(self.race(call, origin, None).await)
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

    async fn measure(self: Arc<Self>, call: &Call) -> Result<Prepared, Failure> {
        // The largest measure, so that a reservation suffices whichever pool answers: tokenizers and contexts may
        // differ. A request that one pool refuses may fit another.
        let (mut most, mut first, mut refused): (Option<Measured>, _, _) = (None, None, None);
        // The first target last: it is likely to answer, and only its tokenized prompt is kept.
        for target in self.0.targets.iter().rev() {
            match target.upstream.clone().measure(call).await {
                Ok(Prepared { measured, opener }) => {
                    most = most.map_or(measured, |most| Some(measured.map_or(most, |one| most.max(one))));
                    first = opener;
                }
                Err(failure) => (first, refused) = (None, Some(failure)),
            }
        }
        if let Some(failure) = refused.filter(|_| most.is_none()) {
            return Err(failure);
        }
        let opener = first.map(|first| Box::new(RelayOpener { relay: self, first }) as Box<dyn Open>);
        Ok(Prepared { measured: most, opener })
    }

    async fn forward(&self, mut forward: Arc<Forward>) -> Result<Forwarded, Failure> {
        if let Some(limit) = self.0.rules.timeout.filter(|_| forward.body.is_some()) {
            let mut sooner = Arc::unwrap_or_clone(forward);
            sooner.deadline = sooner.deadline.into_iter().chain([Instant::now() + limit]).min();
            forward = Arc::new(sooner);
        }
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

    /// No feed: those of the targets are read one by one.
    fn feed(&self) -> Option<Arc<Feed>> {
        None
    }

    fn gauges(&self, _: &mut dyn FnMut(Gauge, f64)) {}
}
