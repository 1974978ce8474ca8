//! Key ring: the signing keys of one issuer. Keys are fetched in the background and stay in use while they cannot be
//! fetched anew, so a token whose key is held waits for no fetch.
//!
//! A token with an unknown key waits for a fetch that begins behind it ([`Fetches`]), so that it is refused only if the
//! issuer does not have its key. One fetch serves all tokens that wait, and all tokens together demand at most
//! [`DEMANDS`] at once and one per [`DEMAND_EVERY`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use jsonwebtoken::Algorithm;
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep_until, timeout, timeout_at};

use super::issuer::{IssuerConfig, KeySource};
use super::jwks::KeySet;

/// Fetches that unknown keys may demand without a pause between them.
const DEMANDS: u32 = 3;
/// Time after which unknown keys may demand one more fetch: six a minute, however many tokens come.
const DEMAND_EVERY: Duration = Duration::from_secs(10);
/// Longest time that a token waits for a fetch that begins behind it: until one may be demanded, and the fetch itself.
const DEMAND_WAIT: Duration = Duration::from_secs(20);
/// Longest time that a token waits for the first fetch of a ring.
const FIRST_WAIT: Duration = Duration::from_secs(5);

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
    /// Time at which the demands that were made are paid for, one per [`DEMAND_EVERY`]; `None`: none was made.
    demanded: Mutex<Option<tokio::time::Instant>>,
    /// Wakes the fetch task of this ring before its next regular fetch.
    pub(crate) wake: Arc<Notify>,
    /// Course of the fetches, which tokens follow.
    course: watch::Sender<Course>,
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
            course: watch::Sender::new(Course::default()),
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

    /// Keys of the issuer; before the first fetch has ended, waits for it, at most [`FIRST_WAIT`].
    pub(crate) async fn first(&self) -> Option<Arc<Held>> {
        if self.held.load().is_none() {
            let mut course = self.course.subscribe();
            // A timeout leaves the ring without keys, as a failed fetch does.
            let _ = timeout(FIRST_WAIT, course.wait_for(|course| course.ended > 0)).await;
        }
        self.held()
    }

    /// Fetches from now on, for a token that has just come.
    pub(crate) fn fetches(&self) -> Fetches<'_> {
        let mut course = self.course.subscribe();
        let Course { begun, ended, .. } = *course.borrow_and_update();
        Fetches { ring: self, course, before: begun, ended, until: tokio::time::Instant::now() + DEMAND_WAIT }
    }

    /// Demands a fetch, unless one runs or is demanded already.
    ///
    /// # Errors
    /// The time from which on one may be demanded.
    fn demand(&self, now: tokio::time::Instant) -> Result<(), tokio::time::Instant> {
        let mut demanded = self.demanded();
        if self.course.borrow().is_coming() {
            return Ok(());
        }
        let paid = demanded.map_or(now, |paid| paid.max(now));
        let ahead = DEMAND_EVERY * (DEMANDS - 1);
        if paid > now + ahead {
            return Err(paid - ahead);
        }
        *demanded = Some(paid + DEMAND_EVERY);
        self.course.send_modify(|course| course.is_demanded = true);
        drop(demanded);
        self.wake.notify_one();
        Ok(())
    }

    fn demanded(&self) -> MutexGuard<'_, Option<tokio::time::Instant>> {
        self.demanded.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Notes the begin of a fetch.
    pub(crate) fn note_begin(&self) {
        let begin = |course: &mut Course| {
            *course = Course { begun: course.begun + 1, is_demanded: false, is_running: true, ..*course };
        };
        self.course.send_modify(begin);
    }

    /// Notes the end of a fetch and wakes those who wait for it.
    pub(crate) fn note_end(&self, is_ok: bool) {
        let end = |course: &mut Course| *course = Course { ended: course.begun, is_running: false, is_ok, ..*course };
        self.course.send_modify(end);
    }
}

/// Course of a ring's fetches: one at a time, numbered from 1.
#[derive(Clone, Copy, Debug, Default)]
struct Course {
    /// Number of the last fetch that has begun.
    begun: u64,
    /// Number of the last fetch that has ended.
    ended: u64,
    /// True between the demand of a fetch and its begin.
    is_demanded: bool,
    is_running: bool,
    /// Whether the last fetch that has ended was successful.
    is_ok: bool,
}

impl Course {
    fn is_coming(&self) -> bool {
        self.is_demanded || self.is_running
    }
}

/// Fetches of a ring that end while a token waits.
pub(crate) struct Fetches<'a> {
    ring: &'a Ring,
    course: watch::Receiver<Course>,
    /// Number of the last fetch that had begun when the token came.
    before: u64,
    /// Number of the last fetch that the token knows to have ended.
    ended: u64,
    until: tokio::time::Instant,
}

/// Keys after a fetch.
pub(crate) struct Fetched {
    pub(crate) held: Arc<Held>,
    /// True if the fetch began behind the token: what it has not brought, the issuer does not have.
    pub(crate) is_behind: bool,
}

impl Fetches<'_> {
    /// Keys after the next fetch: the one that runs, or one that is demanded as soon as that is allowed. `None`: it failed, or
    /// takes longer than [`DEMAND_WAIT`] since the token came.
    pub(crate) async fn next(&mut self) -> Option<Fetched> {
        let until = self.until;
        let course = timeout_at(until, self.end()).await.ok().filter(|course| course.is_ok)?;
        Some(Fetched { held: self.ring.held()?, is_behind: course.ended > self.before })
    }

    async fn end(&mut self) -> Course {
        loop {
            let course = *self.course.borrow_and_update();
            if course.ended > self.ended {
                self.ended = course.ended;
                return course;
            }
            let now = tokio::time::Instant::now();
            let demanded = if course.is_coming() { Ok(()) } else { self.ring.demand(now) };
            let due = demanded.err().unwrap_or(self.until);
            tokio::select! {
                // The ring, which sends, outlives this borrow of it.
                _ = self.course.changed() => {}
                () = sleep_until(due) => {}
            }
        }
    }
}

/// Right of one fetch task to keep a ring current. A task that ends, or is aborted, leaves it to another.
#[derive(Debug)]
pub(crate) struct Keeper(Weak<Ring>);

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(ring) = self.0.upgrade() {
            // A fetch that was cut off has no end.
            ring.course.send_if_modified(|course| std::mem::take(&mut course.is_running));
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

    #[tokio::test(start_paused = true)]
    async fn unknown_keys_cost_few_fetches() {
        let (ring, began) = (Ring::new(&config()), tokio::time::Instant::now());
        let demanded = |seconds: u64| {
            let is_ok = ring.demand(began + Duration::from_secs(seconds)).is_ok();
            ring.note_begin();
            ring.note_end(true);
            is_ok
        };
        assert_eq!((0..4).map(|_| demanded(0)).collect::<Vec<_>>(), [true, true, true, false]);
        assert_eq!(ring.demand(began), Err(began + DEMAND_EVERY));
        assert_eq!((1..=60).filter(|second| demanded(*second)).collect::<Vec<_>>(), [10, 20, 30, 40, 50, 60]);
        // A quiet time saves up no more than the first ones.
        assert_eq!((0..9).filter(|_| demanded(10_000)).count(), DEMANDS as usize);
    }

    /// Fetch task whose fetches take a second; the `good` ones bring the test's keys. Ends after these.
    fn fetching(ring: &Arc<Ring>, good: &'static [bool]) -> tokio::task::JoinHandle<()> {
        let ring = ring.clone();
        tokio::spawn(async move {
            for is_ok in good {
                ring.wake.notified().await;
                ring.note_begin();
                tokio::time::sleep(Duration::from_secs(1)).await;
                if *is_ok {
                    ring.take(&set()).expect("a set");
                }
                ring.note_end(*is_ok);
            }
        })
    }

    async fn after_next(ring: &Arc<Ring>) -> Option<bool> {
        ring.fetches().next().await.map(|fetched| fetched.is_behind)
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_that_come_together_wait_for_one_fetch() {
        let ring = Arc::new(Ring::new(&config()));
        let task = fetching(&ring, &[true, true, true, true]);
        let began = tokio::time::Instant::now();
        let both = tokio::join!(after_next(&ring), after_next(&ring));
        assert_eq!(both, (Some(true), Some(true)));
        assert_eq!((ring.course.borrow().begun, began.elapsed().as_secs()), (1, 1), "one for both");
        // One that comes while a fetch runs takes its keys, and may need those of the next one.
        let mut first = ring.fetches();
        let late = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let mut fetches = ring.fetches();
            let mut behind = Vec::new();
            for _ in 0..2 {
                behind.push(fetches.next().await.expect("fetched").is_behind);
            }
            behind
        };
        let (first, late) = tokio::join!(first.next(), late);
        assert!(first.is_some_and(|fetched| fetched.is_behind));
        assert_eq!((late, ring.course.borrow().begun), (vec![false, true], 3));
        // The demands that need no pause are used up: the next token waits for its turn.
        let began = tokio::time::Instant::now();
        assert_eq!(after_next(&ring).await, Some(true));
        assert!((DEMAND_EVERY / 2..DEMAND_EVERY + Duration::from_secs(1)).contains(&began.elapsed()));
        task.await.expect("four fetches");
    }

    #[tokio::test(start_paused = true)]
    async fn a_fetch_that_fails_or_never_ends_brings_no_keys() {
        let ring = Arc::new(Ring::new(&config()));
        ring.take(&set()).expect("a set");
        let keeper = ring.claim().expect("free");
        let task = fetching(&ring, &[false]);
        assert_eq!(after_next(&ring).await, None, "it failed");
        task.await.expect("one fetch");
        let began = tokio::time::Instant::now();
        assert_eq!(after_next(&ring).await, None, "nobody fetches");
        assert_eq!(began.elapsed().as_secs(), DEMAND_WAIT.as_secs());
        // A task that is ended in the middle of a fetch leaves its demands to the next one.
        ring.note_begin();
        drop(keeper);
        let task = fetching(&ring, &[true]);
        assert_eq!(after_next(&ring).await, Some(true));
        task.await.expect("one fetch");
    }
}
