//! Key ring: the signing keys of one issuer. Keys are fetched in the background and stay in use while they cannot be
//! fetched anew, so a token whose key is held waits for no fetch.
//!
//! A token with an unknown key demands one more fetch and waits for it; all tokens together demand at most one per
//! [`DEMAND_EVERY`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use jsonwebtoken::Algorithm;
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use super::issuer::{IssuerConfig, KeySource};
use super::jwks::KeySet;

/// Least time between two fetches that unknown keys demand.
const DEMAND_EVERY: Duration = Duration::from_secs(60);
/// Longest time that a request waits for a fetch of signing keys that its token demanded.
const DEMAND_WAIT: Duration = Duration::from_secs(5);

/// Settings that two configs must have in common to share a key ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(super) issuer: String,
    pub(super) source: KeySource,
    pub(super) ca_file: Option<std::path::PathBuf>,
    pub(super) algorithms: Vec<Algorithm>,
    stale: Duration,
}

impl Origin {
    /// Settings of an issuer's config that identify its key ring.
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

/// Fetched key set in use, with its number and the SHA-256 of its bytes.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) keys: KeySet,
    /// Number of the set, unique in the process; cached tokens compare it.
    pub(crate) number: u64,
    digest: [u8; 32],
}

/// Signing keys of one issuer, and the state of fetching them.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(super) origin: Origin,
    /// Id of the first issuer entry that used the ring; for logs and metrics.
    pub(super) id: String,
    held: ArcSwapOption<Held>,
    /// Last successful fetch, in milliseconds since `began`.
    fresh_ms: AtomicU64,
    began: Instant,
    /// Last time that a token with an unknown key demanded a fetch; `None`: never.
    demanded: Mutex<Option<Instant>>,
    /// Wakes the fetch task of this ring before its next regular fetch.
    pub(super) wake: Arc<Notify>,
    /// Number of fetches that have ended, successfully or not; tokens wait for it to rise.
    ended: watch::Sender<u64>,
    /// True if a fetch task exists that keeps this ring current.
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

    /// Returns true if the ring belongs to `config`: issuer, key source, CA file, algorithms and staleness are equal.
    pub(crate) fn is_of(&self, config: &IssuerConfig) -> bool {
        self.origin == Origin::of(config)
    }

    /// Claims the ring for a fetch task; `None`: it has one already.
    pub(crate) fn claim(self: &Arc<Self>) -> Option<Keeper> {
        (!self.kept.swap(true, Ordering::AcqRel)).then(|| Keeper(Arc::downgrade(self)))
    }

    /// Keys of the issuer, unless they are older than `stale`.
    pub(crate) fn held(&self) -> Option<Arc<Held>> {
        self.held_at(Instant::now())
    }

    fn held_at(&self, now: Instant) -> Option<Arc<Held>> {
        self.held.load_full().filter(|_| self.age_at(now) < self.origin.stale)
    }

    /// Number of the key set, unless it is older than `stale`.
    pub(crate) fn number(&self) -> Option<u64> {
        let held = self.held.load();
        held.as_ref().filter(|_| self.age_at(Instant::now()) < self.origin.stale).map(|held| held.number)
    }

    /// Time since the last successful fetch; `None` before the first.
    pub(crate) fn age(&self) -> Option<Duration> {
        self.held.load().as_ref().map(|_| self.age_at(Instant::now()))
    }

    fn age_at(&self, now: Instant) -> Duration {
        let fresh = Duration::from_millis(self.fresh_ms.load(Ordering::Acquire));
        now.saturating_duration_since(self.began).saturating_sub(fresh)
    }

    /// Keys of the issuer; before the first fetch has ended, waits for it, at most [`DEMAND_WAIT`].
    pub(crate) async fn first(&self) -> Option<Arc<Held>> {
        if self.held.load().is_none() {
            let mut ended = self.ended.subscribe();
            // A timeout leaves the ring without keys, as a failed fetch does.
            let _ = timeout(DEMAND_WAIT, ended.wait_for(|count| *count > 0)).await;
        }
        self.held()
    }

    /// Keys after a demanded fetch, for a token whose key is not held; `None`: too soon after the last demand.
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

    /// Takes the bytes of a fetch; returns whether the set differs from the one held.
    ///
    /// # Errors
    /// The bytes are no usable key set; the set held stays in use.
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

    /// Notes the end of a fetch and wakes those who wait for it.
    pub(super) fn note_end(&self) {
        self.ended.send_modify(|count| *count += 1);
    }
}

/// Right of one fetch task to keep a ring current. A task that ends, or is aborted, leaves it to another.
#[derive(Debug)]
pub(crate) struct Keeper(Weak<Ring>);

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(ring) = self.0.upgrade() {
            ring.kept.store(false, Ordering::Release);
        }
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
    fn one_task_at_a_time_keeps_a_ring() {
        let ring = Arc::new(Ring::new(&config()));
        for _ in 0..2 {
            let keeper = ring.claim();
            assert!(keeper.is_some() && ring.claim().is_none());
            drop(keeper);
        }
    }

    #[test]
    fn unknown_keys_cost_one_fetch_in_a_minute() {
        let (ring, now) = (Ring::new(&config()), Instant::now());
        assert!(ring.may_demand(now));
        assert!((0..59).all(|second| !ring.may_demand(now + Duration::from_secs(second))));
        assert!(ring.may_demand(now + Duration::from_secs(60)));
    }
}
