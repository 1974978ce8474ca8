//! The keys of one issuer as they are held: fetched in the background, used while they cannot be fetched anew, never waited for by
//! whoever has a token that they verify.
//!
//! A token whose key is not held asks for them once more and waits for that, at most once in [`DEMAND_EVERY`] for all tokens together.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use jsonwebtoken::Algorithm;
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use super::issuer::{IssuerConfig, KeySource};
use super::jwks::KeySet;

/// Between two fetches for unknown keys.
const DEMAND_EVERY: Duration = Duration::from_secs(60);
/// Longest that a token waits for its key.
const DEMAND_WAIT: Duration = Duration::from_secs(5);

/// What two configs must have in common to share keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(super) issuer: String,
    pub(super) source: KeySource,
    pub(super) ca_file: Option<std::path::PathBuf>,
    pub(super) algorithms: Vec<Algorithm>,
    stale: Duration,
}

impl Origin {
    /// Of that issuer.
    pub(crate) fn of(config: &IssuerConfig) -> Self {
        Self {
            issuer: config.issuer.clone(),
            source: config.source.clone(),
            ca_file: config.ca_file.clone(),
            algorithms: config.algorithms.clone(),
            stale: config.stale,
        }
    }
}

/// A key set, and which one it is.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) keys: KeySet,
    /// Another number is another set.
    pub(crate) number: u64,
    digest: [u8; 32],
}

/// The keys of one issuer.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(super) origin: Origin,
    /// Of the first issuer that used it; for logs and metrics.
    pub(super) id: String,
    held: ArcSwapOption<Held>,
    /// When they were last the issuer's, in milliseconds since `began`.
    fresh_ms: AtomicU64,
    began: Instant,
    /// When a token asked for a fetch.
    demanded: Mutex<Option<Instant>>,
    /// Asks for a fetch.
    pub(super) wake: Arc<Notify>,
    /// Fetches that have ended, well or not.
    ended: watch::Sender<u64>,
    /// Whether somebody fetches.
    kept: AtomicBool,
}

static NUMBERS: AtomicU64 = AtomicU64::new(1);

impl Ring {
    pub(crate) fn new(config: &IssuerConfig) -> Self {
        Self {
            origin: Origin::of(config),
            id: config.id.clone(),
            held: ArcSwapOption::empty(),
            fresh_ms: AtomicU64::new(0),
            began: Instant::now(),
            demanded: Mutex::default(),
            wake: Arc::default(),
            ended: watch::Sender::new(0),
            kept: AtomicBool::new(false),
        }
    }

    /// Whether it is that issuer's.
    pub(crate) fn is_of(&self, config: &IssuerConfig) -> bool {
        self.origin == Origin::of(config)
    }

    /// Takes on fetching them; `false`: somebody does.
    pub(crate) fn claim(&self) -> bool {
        !self.kept.swap(true, Ordering::AcqRel)
    }

    /// The keys, unless they are too old.
    pub(crate) fn held(&self) -> Option<Arc<Held>> {
        self.held_at(Instant::now())
    }

    fn held_at(&self, now: Instant) -> Option<Arc<Held>> {
        self.held.load_full().filter(|_| self.age_at(now) < self.origin.stale)
    }

    /// Which key set is held, if it is not too old.
    pub(crate) fn number(&self) -> Option<u64> {
        let held = self.held.load();
        held.as_ref().filter(|_| self.age_at(Instant::now()) < self.origin.stale).map(|held| held.number)
    }

    /// How long ago they were the issuer's.
    pub(crate) fn age(&self) -> Option<Duration> {
        self.held.load().as_ref().map(|_| self.age_at(Instant::now()))
    }

    fn age_at(&self, now: Instant) -> Duration {
        let fresh = Duration::from_millis(self.fresh_ms.load(Ordering::Acquire));
        now.saturating_duration_since(self.began).saturating_sub(fresh)
    }

    /// The keys; at the very start, once they have been fetched for the first time.
    pub(crate) async fn first(&self) -> Option<Arc<Held>> {
        if self.held.load().is_none() {
            let mut ended = self.ended.subscribe();
            // An error is a fetch that takes longer.
            let _ = timeout(DEMAND_WAIT, ended.wait_for(|count| *count > 0)).await;
        }
        self.held()
    }

    /// The keys anew, for a token whose key is not among them; `None`: it is too early to ask again.
    pub(crate) async fn renewed(&self) -> Option<Arc<Held>> {
        if !self.may_demand(Instant::now()) {
            return None;
        }
        let mut ended = self.ended.subscribe();
        self.wake.notify_one();
        let _ = timeout(DEMAND_WAIT, ended.changed()).await;
        self.held()
    }

    fn may_demand(&self, now: Instant) -> bool {
        let mut demanded = self.demanded.lock().unwrap_or_else(PoisonError::into_inner);
        let due = demanded.is_none_or(|last| now.saturating_duration_since(last) >= DEMAND_EVERY);
        if due {
            *demanded = Some(now);
        }
        due
    }

    /// Takes what was fetched; says whether it is new.
    ///
    /// # Errors
    /// Why it is no key set. What was held stays.
    pub(crate) fn take(&self, bytes: &[u8]) -> Result<bool, String> {
        let keys = KeySet::parse(bytes, &self.origin.algorithms)?;
        let digest: [u8; 32] = Sha256::digest(bytes).into();
        let is_new = self.held.load().as_ref().is_none_or(|held| held.digest != digest);
        if is_new {
            let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
            self.held.store(Some(Arc::new(Held { keys, number, digest })));
        }
        self.fresh_ms.store(self.began.elapsed().as_millis() as u64, Ordering::Release);
        Ok(is_new)
    }

    /// A fetch has ended.
    pub(super) fn note_end(&self) {
        self.ended.send_modify(|count| *count += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::super::token::tests::{config, set};
    use super::*;

    #[test]
    fn keys_are_used_until_they_are_too_old() {
        let ring = Ring::new(&config());
        assert!(ring.held().is_none());
        assert_eq!(ring.take(&set()), Ok(true));
        let number = ring.held().expect("keys").number;
        assert_eq!(ring.take(&set()), Ok(false), "the same");
        assert!(ring.take(b"{}").is_err() && ring.take(b"").is_err());
        assert_eq!(ring.held().expect("what was held stays").number, number);
        let now = Instant::now();
        assert!(ring.held_at(now + Duration::from_secs(23 * 3600)).is_some());
        assert!(ring.held_at(now + Duration::from_secs(25 * 3600)).is_none());
    }

    #[test]
    fn unknown_keys_cost_one_fetch_in_a_minute() {
        let (ring, now) = (Ring::new(&config()), Instant::now());
        assert!(ring.may_demand(now));
        assert!((0..59).all(|second| !ring.may_demand(now + Duration::from_secs(second))));
        assert!(ring.may_demand(now + Duration::from_secs(60)));
    }
}
