//! Groups of people who are signed in with the identity provider, read again while their sessions last.
//!
//! ```text
//! sign-in ─▶ entry: tokens, due ─▶ every few seconds: what is due, a few at once ─▶ provider ─▶ groups ─▶ session keeps, changes or ends
//! ```
//!
//! An entry lives as long as its session. Its tokens are in this memory alone: while a look is under way, its task has them, and gives
//! them back or, where the session has ended meanwhile, revokes them. Each look is a task of its own with deadlines, so a slow one holds
//! one of [`LOOKS_MAX`] places and nothing else. A look that fails is tried again; when the provider has named no groups for
//! `refresh_stale_seconds`, the session ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_auth::jwt::Grant;
use penstock_config::OidcConfig;
use penstock_console::{Person, Place};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Interval between two turns, which begin looks.
pub(crate) const TURN_EACH: Duration = Duration::from_secs(5);
/// Most looks at groups at once; further ones wait for a later turn, those that are due longest first.
const LOOKS_MAX: usize = 8;
/// Most revocations at once; the tokens of further ones are dropped, and end at the provider by age.
const REVOCATIONS_MAX: usize = 8;
/// Longest pause after a look that has failed.
pub(crate) const AGAIN: Duration = Duration::from_secs(30);

/// Tokens and console URL of a sign-in, kept with its session.
pub(crate) struct Kept {
    pub(crate) grant: Grant,
    /// URL of the console that the person signed in at.
    pub(crate) home: String,
}

struct Entry {
    /// Tokens; `None`: a look is under way, whose task has them.
    grant: Option<Grant>,
    home: String,
    due: Instant,
    /// Time at which the provider last named the groups.
    told: Instant,
    is_failing: bool,
}

impl Entry {
    /// Returns true if a look is due at `now`. A shorter period of a new config counts at once.
    fn is_due(&self, period: Duration, now: Instant) -> bool {
        let period = period.saturating_sub(TURN_EACH);
        self.due <= now || (!self.is_failing && now.saturating_duration_since(self.told) >= period)
    }

    /// Returns true if the provider has named no groups for longer than `stale`, and the last look has failed or does not end.
    fn is_stale(&self, stale: Duration, now: Instant) -> bool {
        let is_asked = self.is_failing || self.grant.is_none();
        is_asked && now.saturating_duration_since(self.told) >= stale
    }
}

/// Sign-ins whose groups are read again.
pub(crate) struct Renewals {
    all: Mutex<HashMap<Place, Entry>>,
    looks: Arc<Semaphore>,
    pub(crate) revocations: Arc<Semaphore>,
}

impl Default for Renewals {
    fn default() -> Self {
        let places = |count| Arc::new(Semaphore::new(count));
        Self { all: Mutex::default(), looks: places(LOOKS_MAX), revocations: places(REVOCATIONS_MAX) }
    }
}

/// Look that is about to be taken at the groups of a session.
pub(crate) struct Look {
    pub(crate) place: Place,
    pub(crate) person: Arc<Person>,
    pub(crate) grant: Grant,
    pub(crate) permit: OwnedSemaphorePermit,
}

/// Work of one turn.
#[derive(Default)]
pub(crate) struct Turn {
    pub(crate) looks: Vec<Look>,
    /// Tokens of sessions that have ended.
    pub(crate) orphans: Vec<Grant>,
    /// Sessions that end because the provider has not answered for too long.
    pub(crate) stale: Vec<(Place, Arc<Person>, Option<Grant>)>,
}

impl Renewals {
    fn all(&self) -> MutexGuard<'_, HashMap<Place, Entry>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets all tokens.
    pub(crate) fn clear(&self) {
        self.all().clear();
    }

    /// Keeps the tokens of a session that was opened. Entries without a session leave at the next turn, so there are few more than sessions.
    pub(crate) fn keep(&self, place: Place, kept: Kept, refresh: Option<Duration>, now: Instant) {
        let Kept { grant, home } = kept;
        let due = now + refresh.map_or(Duration::ZERO, |period| pause(period, random_byte()));
        self.all().insert(place, Entry { grant: Some(grant), home, due, told: now, is_failing: false });
    }

    /// Takes the tokens of a session that ends. Those of a look under way are revoked by its task.
    pub(crate) fn forget(&self, place: Place) -> Option<(Option<Grant>, String)> {
        self.all().remove(&place).map(|entry| (entry.grant, entry.home))
    }

    /// Work due at `now`; `holder` finds the person of an open session.
    pub(crate) fn turn(
        &self,
        config: &OidcConfig,
        registration: &[String; 2],
        holder: impl Fn(Place) -> Option<Arc<Person>>,
        now: Instant,
        unix: u64,
    ) -> Turn {
        let mut turn = Turn::default();
        let all = &mut *self.all();
        let mut due = Vec::new();
        all.retain(|place, entry| {
            let person = holder(*place).filter(|person| person.provider == *registration);
            let Some(person) = person else {
                turn.orphans.extend(entry.grant.take());
                return false;
            };
            let Some(period) = config.refresh else { return true };
            if entry.is_stale(config.stale, now) {
                turn.stale.push((*place, person, entry.grant.take()));
                return false;
            }
            let is_renewable = entry.grant.as_ref().is_some_and(|grant| grant.is_renewable(unix));
            if is_renewable && entry.is_due(period, now) {
                due.push((entry.due, *place, person));
            }
            true
        });
        due.sort_by_key(|(due, ..)| *due);
        for (_, place, person) in due {
            let Ok(permit) = self.looks.clone().try_acquire_owned() else { break };
            let grant = all.get_mut(&place).and_then(|entry| entry.grant.take());
            turn.looks.extend(grant.map(|grant| Look { place, person, grant, permit }));
        }
        turn
    }

    /// Gives the tokens of a look back to the entry; `Err`: the session has ended meanwhile. `wait`: time until the next look.
    pub(crate) fn give_back(
        &self,
        place: Place,
        grant: Grant,
        is_failing: bool,
        wait: Duration,
        now: Instant,
    ) -> Result<bool, Grant> {
        let all = &mut *self.all();
        let Some(entry) = all.get_mut(&place) else { return Err(grant) };
        let was_failing = std::mem::replace(&mut entry.is_failing, is_failing);
        entry.grant = Some(grant);
        entry.due = now + wait;
        if !is_failing {
            entry.told = now;
        }
        Ok(was_failing)
    }
}

/// Time until the next look: three quarters to all of the period, less the interval of turns, so that sessions that were opened
/// together do not ask together.
pub(crate) fn pause(period: Duration, random: u8) -> Duration {
    period.saturating_sub(TURN_EACH) * (768 + u32::from(random)) / 1023
}

/// Time until a look that has failed is tried again.
pub(crate) fn again(period: Duration, random: u8) -> Duration {
    pause(period.min(AGAIN), random)
}

pub(crate) fn random_byte() -> u8 {
    let mut byte = [0];
    // Err: no jitter, which is no harm.
    let _ = getrandom::fill(&mut byte);
    byte[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_spread_and_within_the_period() {
        let period = Duration::from_secs(300);
        assert!(pause(period, 0) >= Duration::from_secs(220) && pause(period, 0) < Duration::from_secs(222));
        assert_eq!(pause(period, 255) + TURN_EACH, period);
        assert_eq!(pause(Duration::from_secs(5), 255), Duration::ZERO, "at each turn");
        assert!(again(Duration::from_secs(7200), 255) < AGAIN);
    }

    #[test]
    fn entries_are_due_and_stale_by_what_the_config_says_now() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let (period, stale) = (Duration::from_secs(300), Duration::from_secs(1800));
        let entry = |is_failing| Entry { grant: None, home: String::new(), due: at(250), told: start, is_failing };
        assert!(!entry(false).is_due(period, at(249)) && entry(false).is_due(period, at(250)));
        assert!(entry(false).is_due(Duration::from_secs(60), at(55)), "a shorter period counts at once");
        assert!(!entry(true).is_due(Duration::from_secs(60), at(55)), "a failed look waits for its turn");
        assert!(!entry(true).is_stale(stale, at(1799)) && entry(true).is_stale(stale, at(1800)));
        assert!(entry(false).is_stale(stale, at(1800)), "a look that never ends keeps no session");
    }
}
