//! Somebody else's service as an upstream.
//!
//! A request in the provider's own dialect is passed on as it came (`passed`): the bytes are spliced where the model's name differs or
//! the counts of a stream are asked for, and the answer's bytes are the provider's. Its answer is watched in passing for what the gateway
//! must know. `docs/guide/providers.md` has the rules and the outcome of every fault.

mod ask;
pub mod discover;
mod fields;
mod forwarded;
pub(crate) mod keys;
mod pace;
mod passed;
pub mod protocol;
mod sigv4;
mod translated;
mod upstream;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use arc_swap::ArcSwap;
use penstock_dialects::{FaultClass, ProviderCodec};
use tokio::sync::Semaphore;

pub use forwarded::Forwarded;
pub use protocol::Protocol;

use crate::client::Client;
use crate::config::{ProviderConfig, Snapshot};
use crate::foreign::Feed;
use crate::upstream::{Card, Upstream};
use keys::Keys;
use pace::Pacer;

/// A provider in use.
pub struct Provider {
    id: Arc<str>,
    config: ProviderConfig,
    client: Client,
    keys: Keys,
    /// The pace of each key, or of all requests where there is none.
    pacers: Vec<Arc<Pacer>>,
    places: Arc<Semaphore>,
    counts: Arc<Counts>,
    /// How requests that are not its own API's are said to it.
    codec: Option<Box<dyn ProviderCodec>>,
    /// Models that it says it has.
    found: ArcSwap<Vec<String>>,
    /// What its prefix cache holds.
    feed: Option<Arc<Feed>>,
}

/// Why a provider cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("provider {id:?}: {reason}")]
pub struct ProviderError {
    /// Id of the provider.
    pub id: String,
    /// What is wrong.
    pub reason: String,
}

impl Provider {
    /// Makes it ready; connects to nothing.
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
            places: Arc::new(Semaphore::new(config.in_flight_max)),
            counts: Arc::default(),
            codec: protocol::codec_of(config),
            found: ArcSwap::default(),
            feed: config.kv_events.as_ref().map(|events| Feed::new(&config.id, events)),
            config: config.clone(),
        })
    }

    /// What is known of the provider of that id before its config changed: its counts go on, and the models that were found, where they
    /// still are.
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

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// One of its models under a name of ours.
    pub fn upstream(self: &Arc<Self>, served: &str, model: &str) -> Arc<dyn Upstream> {
        Arc::new(upstream::ProviderUpstream::new(self.clone(), served.to_owned(), model.to_owned()))
    }

    /// The models that are served under their own names.
    pub fn upstreams(self: &Arc<Self>) -> Vec<Arc<dyn Upstream>> {
        self.config.models.iter().map(|model| self.upstream(model, model)).collect()
    }

    /// The models that it said it has; each is served as `ID/MODEL`.
    pub fn found_cards(self: &Arc<Self>) -> Vec<Card> {
        let card = |model: &String| Card { id: format!("{}/{model}", self.id()), created: 0, context_tokens: 0 };
        self.found.load().iter().map(card).collect()
    }

    /// A model that it said it has, by the name `ID/MODEL`.
    pub fn discovered(self: &Arc<Self>, served: &str) -> Option<Arc<dyn Upstream>> {
        let model = served.strip_prefix(self.id())?.strip_prefix('/')?;
        let found = self.found.load().iter().any(|have| have == model);
        found.then(|| self.upstream(served, model))
    }

    /// What its prefix cache holds, where it says so.
    pub fn feed(&self) -> Option<&Arc<Feed>> {
        self.feed.as_ref()
    }

    /// For people.
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

    /// What became of its requests.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// One for each key, where a pace is configured.
fn pacers(config: &ProviderConfig) -> Vec<Arc<Pacer>> {
    let count = if config.pacing.is_set() { config.keys.len().max(1) } else { 0 };
    (0..count).map(|_| Pacer::new(&config.pacing, Instant::now())).collect()
}

/// A provider at one moment.
#[derive(Clone, Debug)]
pub struct ProviderState {
    /// Where it is, without anything secret.
    pub url: String,
    /// API that it speaks.
    pub protocol: Protocol,
    /// Its keys, and how many of them rest, for some use at least, after a 401, 402, 403 or 429.
    pub keys: usize,
    /// Keys that rest.
    pub keys_resting: usize,
    /// Requests there now.
    pub in_flight: usize,
    /// Most requests at once.
    pub in_flight_max: usize,
    /// Models that the config names.
    pub models: Vec<String>,
    /// Models that it said it has.
    pub found: Vec<String>,
}

/// Begins to follow the prefix caches of those that publish what they hold.
pub fn follow(providers: &[Arc<Provider>]) {
    let feeds: Vec<Arc<Feed>> = providers.iter().filter_map(|provider| provider.feed.clone()).collect();
    crate::foreign::start(&feeds);
}

/// Every provider of a config.
///
/// # Errors
/// [`ProviderError`] of the first that cannot be used.
pub fn all(config: &Snapshot) -> Result<Vec<Arc<Provider>>, ProviderError> {
    config.providers.iter().map(Provider::new).collect()
}

/// Whether a provider could be used, as far as this machine knows: nobody is asked.
///
/// # Errors
/// [`ProviderError`]
pub fn check(asked: &ProviderConfig) -> Result<(), ProviderError> {
    Provider::new(asked).map(drop)
}

/// The same after another config: a provider whose config is the same is the same, with its connections, its keys' rest and its models.
///
/// # Errors
/// [`ProviderError`] of the first that cannot be used.
pub fn after(config: &Snapshot, before: &[Arc<Provider>]) -> Result<Vec<Arc<Provider>>, ProviderError> {
    let again = |asked: &ProviderConfig| match before.iter().find(|provider| provider.id() == asked.id) {
        Some(known) if known.config == *asked => Ok(known.clone()),
        Some(known) => Provider::build(asked).map(|new| Arc::new(new.after(known))),
        None => Provider::new(asked),
    };
    config.providers.iter().map(again).collect()
}

/// What became of a request to a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// A complete answer.
    Complete,
    /// The client left, or another attempt was faster.
    Cancelled,
    /// It failed.
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

    /// As metrics and traces say it.
    pub(crate) fn name(self) -> &'static str {
        OUTCOMES[self.at()]
    }
}

/// Names of the outcomes, for metrics; the order is that of the counters.
const OUTCOMES: [&str; 16] = [
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
];

/// Counters of one provider.
#[derive(Debug, Default)]
pub struct Counts {
    outcomes: [AtomicU64; OUTCOMES.len()],
    paces: [AtomicU64; PACES.len()],
}

/// What became of a request that could not be sent at once at the provider's pace.
const PACES: [&str; 2] = ["waited", "refused"];

impl Counts {
    /// Counts a request that had to wait for its turn, or was refused instead.
    pub(crate) fn paced(&self, is_sent: bool) {
        self.paces[usize::from(!is_sent)].fetch_add(1, Ordering::Relaxed);
    }

    /// Name and count of each of these that was ever met.
    pub fn paces(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let counted = PACES.iter().zip(&self.paces).map(|(name, count)| (*name, count.load(Ordering::Relaxed)));
        counted.filter(|(_, count)| *count > 0)
    }

    /// Counts one.
    pub(crate) fn add(&self, outcome: Outcome) {
        self.outcomes[outcome.at()].fetch_add(1, Ordering::Relaxed);
    }

    /// Name and count of each outcome that was ever met.
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
        ];
        for (at, class) in classes.into_iter().enumerate() {
            let counts = Counts::default();
            counts.add(Outcome::Failed(class));
            assert_eq!(counts.each().collect::<Vec<_>>(), [(OUTCOMES[at + 2], 1)]);
        }
    }
}
