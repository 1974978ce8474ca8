//! Providers: external services as upstreams.
//!
//! A request in the provider's own dialect is passed through (`passed`): its bytes are spliced only where the model's
//! name differs or a stream's token counts are requested, and the answer's bytes are the provider's. The answer is
//! observed in passing for finish reason and usage. Other requests are translated (`translated`).
//! `docs/guide/providers.md` has the rules and the outcome of every fault.
#![forbid(unsafe_code)]

mod ask;
mod config;
pub mod discover;
mod fields;
mod forwarded;
pub mod keys;
pub mod pace;
mod passed;
pub mod protocol;
mod shared_pace;
mod sigv4;
mod translated;
#[cfg(test)]
mod unheld_tests;
mod upstream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use arc_swap::ArcSwap;
use penstock_types::{FaultClass, ProviderCodec};
use tokio::sync::Semaphore;

pub use config::{PacingConfig, ProviderConfig, keys_in};
pub use protocol::Protocol;
pub use shared_pace::{SharedAnswer, SharedAsk, SharedHold, SharedPace};

use keys::Keys;
use pace::Pacer;
use penstock_http::client::{Client, Place};
use penstock_kv_feed::Feed;
use penstock_upstream::{Card, Upstream};

/// Provider in use: its connections, keys, pacers and counters, shared by all requests to it.
pub struct Provider {
    id: Arc<str>,
    config: ProviderConfig,
    client: Client,
    keys: Keys,
    /// Pacers, one per key, or a single one without keys; empty without a configured pace.
    pacers: Vec<Arc<Pacer>>,
    /// Counters by which gateways pace together.
    shared_pace: shared_pace::Handle,
    places: Arc<Semaphore>,
    counts: Arc<Counts>,
    /// Codec for requests in other dialects; `None`: they are refused.
    codec: Option<Box<dyn ProviderCodec>>,
    /// Models that the provider lists (discovery).
    found: ArcSwap<Vec<String>>,
    /// Index of the provider's prefix cache, fed by its KV events.
    feed: Option<Arc<Feed>>,
}

/// Error of a provider that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("provider {id:?}: {reason}")]
pub struct ProviderError {
    /// Id of the provider that cannot be used.
    pub id: String,
    /// Reason why the provider cannot be used, for the operator.
    pub reason: String,
}

impl Provider {
    /// Creates a provider; connects to nothing.
    ///
    /// # Errors
    /// The certificates cannot be read.
    pub fn new(config: &ProviderConfig) -> Result<Arc<Self>, ProviderError> {
        Self::build(config).map(Arc::new)
    }

    fn build(config: &ProviderConfig) -> Result<Self, ProviderError> {
        let client = Client::new(config.target.clone(), config.ca_file.as_deref())
            .map_err(|reason| ProviderError { id: config.id.clone(), reason })?;
        Ok(Self {
            id: config.id.as_str().into(),
            client,
            keys: Keys::new(&config.keys, config.key_file.as_deref()),
            pacers: pacers(config),
            shared_pace: shared_pace::Handle::new(),
            places: Arc::new(Semaphore::new(config.in_flight_max)),
            counts: Arc::default(),
            codec: protocol::codec_of(config),
            found: ArcSwap::default(),
            feed: config.kv_events.as_ref().map(|events| Feed::new(&config.id, events)),
            config: config.clone(),
        })
    }

    /// Takes over the state of the same provider under an earlier config: the counters, the index if its source is the
    /// same, and the discovered models if the target is the same.
    fn after(mut self, before: &Self) -> Self {
        self.counts = before.counts.clone();
        if self.config.kv_events == before.config.kv_events {
            self.feed = before.feed.clone();
        }
        if self.config.discover && self.config.target == before.config.target {
            self.found.store(before.found.load_full());
        }
        self
    }

    /// Id of the provider in the config.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Upstream for the provider's `model`, served as `served`.
    pub fn upstream(self: &Arc<Self>, served: &str, model: &str) -> Arc<dyn Upstream> {
        Arc::new(upstream::ProviderUpstream::new(self.clone(), served.to_owned(), model.to_owned()))
    }

    /// Upstreams of the models that are served under their own names.
    pub fn upstreams(self: &Arc<Self>) -> Vec<Arc<dyn Upstream>> {
        self.config.models.iter().map(|model| self.upstream(model, model)).collect()
    }

    /// Cards of the discovered models; each is served as `ID/MODEL`.
    pub fn found_cards(self: &Arc<Self>) -> Vec<Card> {
        let card = |model: &String| Card {
            id: format!("{}/{model}", self.id()),
            created: 0,
            context_tokens: 0,
            task: None,
            parent: None,
        };
        self.found.load().iter().map(card).collect()
    }

    /// Upstream of a discovered model, by the name `ID/MODEL`.
    pub fn discovered(self: &Arc<Self>, served: &str) -> Option<Arc<dyn Upstream>> {
        let model = served.strip_prefix(self.id())?.strip_prefix('/')?;
        let found = self.found.load().iter().any(|have| have == model);
        found.then(|| self.upstream(served, model))
    }

    /// Address of the provider's server and the places for requests in flight there, for a proxy that forwards requests itself; `None`: the base
    /// URL names a host, a Unix socket, or TLS.
    pub fn endpoint(&self) -> Option<(SocketAddr, Arc<Semaphore>)> {
        let Place::Tcp { host, port, tls: false } = &self.config.target.place else { return None };
        let address = SocketAddr::new(host.parse().ok()?, *port);
        Some((address, self.places.clone()))
    }

    /// Index of the provider's prefix cache, if it publishes KV events.
    pub fn feed(&self) -> Option<&Arc<Feed>> {
        self.feed.as_ref()
    }

    /// State for the admin API and `penstock` commands.
    pub fn state(&self) -> ProviderState {
        ProviderState {
            url: self.config.target.to_string(),
            protocol: self.config.protocol,
            keys: self.keys.len(),
            keys_resting: self.keys.resting(Instant::now()),
            in_flight: self.config.in_flight_max.saturating_sub(self.places.available_permits()),
            in_flight_max: self.config.in_flight_max,
            models: self.config.models.clone(),
            found: self.found.load().to_vec(),
        }
    }

    /// Counters of the outcomes of requests to this provider.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// Pacers for each key, where a pace is configured.
fn pacers(config: &ProviderConfig) -> Vec<Arc<Pacer>> {
    let count = if config.pacing.is_set() { config.keys.len().max(1) } else { 0 };
    (0..count).map(|_| Pacer::new(&config.pacing, Instant::now())).collect()
}

/// State of a provider at one moment.
#[derive(Clone, Debug)]
pub struct ProviderState {
    /// Base URL of the provider's API, without secrets.
    pub url: String,
    /// Protocol in which the provider's API is spoken.
    pub protocol: Protocol,
    /// Number of API keys that are configured.
    pub keys: usize,
    /// Number of keys that rest for at least one use, after a 401, 402, 403 or 429.
    pub keys_resting: usize,
    /// Number of requests to the provider that are in flight.
    pub in_flight: usize,
    /// Most requests that may be in flight at once.
    pub in_flight_max: usize,
    /// Names of the models that the config lists.
    pub models: Vec<String>,
    /// Names of the models that discovery found in the provider's list.
    pub found: Vec<String>,
}

/// Starts following the KV events of the providers that publish them.
pub fn follow(providers: &[Arc<Provider>]) {
    let feeds: Vec<Arc<Feed>> = providers.iter().filter_map(|provider| provider.feed.clone()).collect();
    penstock_kv_feed::start(&feeds);
}

/// Lets providers pace together with other gateways.
pub fn pace_together(providers: &[Arc<Provider>], counters: &Arc<dyn SharedPace>) {
    for provider in providers {
        // A provider that an earlier config had may have them already: they are the same.
        let _ = provider.shared_pace.set(counters.clone());
    }
}

/// Creates every provider of a config.
///
/// # Errors
/// [`ProviderError`] of the first provider that cannot be used.
pub fn all(config: &[ProviderConfig]) -> Result<Vec<Arc<Provider>>, ProviderError> {
    config.iter().map(Provider::new).collect()
}

/// Checks that a provider could be used, without contacting it.
///
/// # Errors
/// [`ProviderError`]
pub fn check(asked: &ProviderConfig) -> Result<(), ProviderError> {
    Provider::new(asked).map(drop)
}

/// Providers of a new config. A provider with an unchanged config is kept, with its connections, resting keys and
/// models; a changed one keeps what still applies.
///
/// # Errors
/// [`ProviderError`] of the first provider that cannot be used.
pub fn after(config: &[ProviderConfig], before: &[Arc<Provider>]) -> Result<Vec<Arc<Provider>>, ProviderError> {
    let again = |asked: &ProviderConfig| match before.iter().find(|provider| provider.id() == asked.id) {
        Some(known) if known.config == *asked => Ok(known.clone()),
        Some(known) => Provider::build(asked).map(|new| Arc::new(new.after(known))),
        None => Provider::new(asked),
    };
    config.iter().map(again).collect()
}

/// Outcome of a request to a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The provider's answer came to its end.
    Complete,
    /// Cancelled: the client left, or a hedge was faster.
    Cancelled,
    /// The request failed, with a fault of this class.
    Failed(FaultClass),
}

impl Outcome {
    fn at(self) -> usize {
        match self {
            Outcome::Complete => 0,
            Outcome::Cancelled => 1,
            Outcome::Failed(class) => 2 + class as usize,
        }
    }

    /// Name of the outcome in metrics and traces.
    pub(crate) fn name(self) -> &'static str {
        OUTCOMES[self.at()]
    }
}

/// Names of the outcomes, for metrics; the order is that of the counters.
const OUTCOMES: [&str; 17] = [
    "complete",
    "cancelled",
    "invalid",
    "context_length",
    "content_policy",
    "too_large",
    "unauthorized",
    "forbidden",
    "not_found",
    "rate_limited",
    "quota",
    "overloaded",
    "server",
    "timeout",
    "truncated",
    "garbled",
    "answer_too_large",
];

/// Counters of one provider: outcomes of requests, and of requests that pacing delayed.
#[derive(Debug, Default)]
pub struct Counts {
    outcomes: [AtomicU64; OUTCOMES.len()],
    paces: [AtomicU64; PACES.len()],
}

/// Outcomes of a request that pacing delayed.
const PACES: [&str; 2] = ["waited", "refused"];

impl Counts {
    /// Counts a request that pacing delayed or refused.
    pub(crate) fn paced(&self, is_sent: bool) {
        self.paces[usize::from(!is_sent)].fetch_add(1, Ordering::Relaxed);
    }

    /// Name and count of each pacing outcome that occurred.
    pub fn paces(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let counted = PACES.iter().zip(&self.paces).map(|(name, count)| (*name, count.load(Ordering::Relaxed)));
        counted.filter(|(_, count)| *count > 0)
    }

    /// Counts a request to the provider by its outcome.
    pub(crate) fn add(&self, outcome: Outcome) {
        self.outcomes[outcome.at()].fetch_add(1, Ordering::Relaxed);
    }

    /// Name and count of each outcome that occurred.
    pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let counted = OUTCOMES.iter().zip(&self.outcomes).map(|(name, count)| (*name, count.load(Ordering::Relaxed)));
        counted.filter(|(_, count)| *count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_has_its_own_counter() {
        use FaultClass::*;
        let classes = [
            Invalid,
            ContextLength,
            ContentPolicy,
            TooLarge,
            Unauthorized,
            Forbidden,
            NotFound,
            RateLimited,
            Quota,
            Overloaded,
            Server,
            Timeout,
            Truncated,
            Garbled,
            AnswerTooLarge,
        ];
        for (at, class) in classes.into_iter().enumerate() {
            let counts = Counts::default();
            counts.add(Outcome::Failed(class));
            assert_eq!(counts.each().collect::<Vec<_>>(), [(OUTCOMES[at + 2], 1)]);
        }
    }
}
