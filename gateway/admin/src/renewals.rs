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

use http::{Method, StatusCode};
use penstock_auth::jwt::{Grant, RenewalFault};
use penstock_base::clock;
use penstock_config::{OIDC, OidcConfig};
use penstock_console::{Holder, Person, Place};
use penstock_telemetry::Metric;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::audit::{Act, Did, note};
use crate::server::CHORE_EACH;
use crate::sign_on::{caller, registration};
use crate::state::Admin;

/// Most looks at groups at once; further ones wait for a later turn, those that are due longest first.
const LOOKS_MAX: usize = 8;
/// Most revocations at once; the tokens of further ones are dropped, and end at the provider by age.
const REVOCATIONS_MAX: usize = 8;
/// Longest pause after a look that has failed.
const AGAIN: Duration = Duration::from_secs(30);

/// What a sign-in leaves with its session.
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
        let period = period.saturating_sub(CHORE_EACH);
        self.due <= now || (!self.is_failing && now.saturating_duration_since(self.told) >= period)
    }

    /// Returns true if the provider has named no groups for longer than `stale`, although it could be asked or has failed to answer.
    fn is_stale(&self, stale: Duration, now: Instant, unix: u64) -> bool {
        let is_asked = self.is_failing || self.grant.as_ref().is_none_or(|grant| grant.is_renewable(unix));
        is_asked && now.saturating_duration_since(self.told) >= stale
    }
}

/// Sign-ins whose groups are read again.
pub(crate) struct Renewals {
    all: Mutex<HashMap<Place, Entry>>,
    looks: Arc<Semaphore>,
    revocations: Arc<Semaphore>,
}

impl Default for Renewals {
    fn default() -> Self {
        let places = |count| Arc::new(Semaphore::new(count));
        Self { all: Mutex::default(), looks: places(LOOKS_MAX), revocations: places(REVOCATIONS_MAX) }
    }
}

/// Look that is about to be taken at the groups of a session.
struct Look {
    place: Place,
    person: Arc<Person>,
    grant: Grant,
    _place: OwnedSemaphorePermit,
}

/// Work of one turn.
#[derive(Default)]
struct Turn {
    looks: Vec<Look>,
    /// Tokens of sessions that have ended.
    orphans: Vec<Grant>,
    /// Sessions that end because the provider has not answered for too long.
    stale: Vec<(Place, Arc<Person>, Option<Grant>)>,
}

impl Renewals {
    fn all(&self) -> MutexGuard<'_, HashMap<Place, Entry>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// What is to be done at `now`: `holder` finds the person of a session that stands.
    fn turn(
        &self,
        config: &OidcConfig,
        holder: impl Fn(Place) -> Option<Arc<Person>>,
        now: Instant,
        unix: u64,
    ) -> Turn {
        let mut turn = Turn::default();
        let all = &mut *self.all();
        let mut due = Vec::new();
        all.retain(|place, entry| {
            let person = holder(*place).filter(|person| person.provider == registration(&config.provider));
            let Some(person) = person else {
                turn.orphans.extend(entry.grant.take());
                return false;
            };
            let Some(period) = config.refresh else { return true };
            if entry.is_stale(config.stale, now, unix) {
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
            turn.looks.extend(grant.map(|grant| Look { place, person, grant, _place: permit }));
        }
        turn
    }

    /// Gives the tokens of a look back to the entry; `Err`: the session has ended meanwhile. `wait`: time until the next look.
    fn give_back(
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

/// Does what is due; called every [`CHORE_EACH`] on the thread that serves.
pub(crate) fn tick(admin: &Admin) {
    let serving = admin.gateway.serving();
    let config = &serving.config.admin;
    let Some(oidc) = config.oidc.as_ref().filter(|_| config.console) else {
        // There is no provider any more that could be told.
        return admin.renewals.all().clear();
    };
    let now = Instant::now();
    let holder = |place| match admin.sessions.holder(place, now)? {
        Holder::Person(person) => Some(person),
        Holder::Key(_) => None,
    };
    let turn = admin.renewals.turn(oidc, holder, now, clock::unix_seconds());
    turn.orphans.into_iter().for_each(|grant| revoke(admin, grant));
    for (place, person, grant) in turn.stale {
        admin.sessions.close(place);
        grant.into_iter().for_each(|grant| revoke(admin, grant));
        tokio::spawn(ended(
            admin.clone(),
            person,
            "the identity provider has not named the groups for too long".into(),
        ));
    }
    for look in turn.looks {
        tokio::spawn(looked(admin.clone(), oidc.clone(), look));
    }
}

/// Reads the groups of a session again, and gives the session what they are worth.
async fn looked(admin: Admin, oidc: OidcConfig, look: Look) {
    let Look { place, person, mut grant, _place } = look;
    let renewed = match admin.directions.of(&oidc.provider).await {
        Ok(endpoints) => {
            let (keys, now) = (&admin.provider_keys, clock::unix_seconds());
            oidc.provider.renew(&endpoints, keys, &mut grant, &person.subject, now).await
        }
        Err(_) => Err(RenewalFault::Away("discovery has failed".into())),
    };
    match renewed {
        Ok(groups) => named(&admin, place, &person, groups, grant).await,
        Err(RenewalFault::Over(why)) => {
            admin.sessions.close(place);
            admin.renewals.forget(place);
            ended(admin.clone(), person, why).await;
        }
        Err(RenewalFault::Away(why)) => {
            counted(&admin, "failed");
            let wait = again(oidc.refresh.unwrap_or(AGAIN), random_byte());
            match admin.renewals.give_back(place, grant, true, wait, Instant::now()) {
                Err(grant) => revoke(&admin, grant),
                Ok(true) => {}
                Ok(false) => {
                    let stale_s = oidc.stale.as_secs();
                    tracing::warn!(
                        subject = person.subject,
                        why,
                        stale_s,
                        "groups of a session could not be read again: those in memory stay in use"
                    );
                }
            }
        }
    }
}

/// Gives a session the groups that the provider has named.
async fn named(admin: &Admin, place: Place, before: &Arc<Person>, groups: Vec<String>, grant: Grant) {
    let now = Instant::now();
    let Some(person) = admin.sessions.regroup(place, groups, now) else {
        admin.renewals.forget(place);
        return revoke(admin, grant);
    };
    let serving = admin.gateway.serving();
    let Some(oidc) = &serving.config.admin.oidc else { return };
    let role = |person| caller(oidc, person).map(|caller| caller.role);
    let Some(now_role) = role(&person) else {
        admin.sessions.close(place);
        admin.renewals.forget(place);
        revoke(admin, grant);
        return ended(admin.clone(), person, "none of the groups has a role here any more".into()).await;
    };
    let wait = pause(oidc.refresh.unwrap_or(AGAIN), random_byte());
    match admin.renewals.give_back(place, grant, false, wait, now) {
        Err(grant) => return revoke(admin, grant),
        Ok(true) => tracing::info!(subject = person.subject, "groups of a session are read again"),
        Ok(false) => {}
    }
    let was = role(before);
    if was == Some(now_role) {
        return counted(admin, "kept");
    }
    counted(admin, "changed");
    let detail = json!({ "person": person.name, "before": was.map(|role| role.name()), "after": now_role.name() });
    told(admin, &person, StatusCode::OK, detail).await;
}

/// Counts and notes the end of a session at a look.
async fn ended(admin: Admin, person: Arc<Person>, why: String) {
    counted(&admin, "ended");
    tracing::info!(subject = person.subject, why, "a session at the console has ended");
    told(&admin, &person, StatusCode::FORBIDDEN, json!({ "person": person.name, "why": why })).await;
}

/// Writes the outcome of a look into the audit log as `sign_on.renew`.
async fn told(admin: &Admin, person: &Person, status: StatusCode, detail: serde_json::Value) {
    let subject = format!("{OIDC}{}", person.subject);
    let operation = Some("renew_sign_on".to_owned());
    let act = Act { operation, method: Method::POST, peer: None, target: subject.clone() };
    note(admin, &act, &subject, status, Did { target: None, detail }).await;
}

fn counted(admin: &Admin, outcome: &str) {
    admin.gateway.metrics.count(Metric::ConsoleRenewals, &[("outcome", outcome)]);
}

/// Tells the provider that tokens are no longer needed, if it takes that.
pub(crate) fn revoke(admin: &Admin, grant: Grant) {
    if !grant.is_revocable() {
        return;
    }
    let Ok(place) = admin.renewals.revocations.clone().try_acquire_owned() else { return };
    let admin = admin.clone();
    tokio::spawn(async move {
        let _place = place;
        let serving = admin.gateway.serving();
        let Some(oidc) = &serving.config.admin.oidc else { return };
        let Ok(endpoints) = admin.directions.of(&oidc.provider).await else { return };
        if let Err(fault) = oidc.provider.revoke(&endpoints, &grant).await {
            tracing::warn!(issuer = oidc.provider.issuer, %fault, "a refresh token could not be revoked");
        }
    });
}

/// Time until the next look: three quarters to all of the period, less the interval of turns, so that sessions that were opened
/// together do not ask together.
fn pause(period: Duration, random: u8) -> Duration {
    period.saturating_sub(CHORE_EACH) * (768 + u32::from(random)) / 1023
}

/// Time until a look that has failed is tried again.
fn again(period: Duration, random: u8) -> Duration {
    pause(period.min(AGAIN), random)
}

fn random_byte() -> u8 {
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
        assert_eq!(pause(period, 255) + CHORE_EACH, period);
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
        assert!(!entry(true).is_stale(stale, at(1799), 0) && entry(true).is_stale(stale, at(1800), 0));
        assert!(entry(false).is_stale(stale, at(1800), 0), "a look that never ends keeps no session");
    }
}
