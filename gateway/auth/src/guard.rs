//! Authentication guard: turns a request's credential into a principal that may do what the request asks.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use http::HeaderMap;
use penstock_proto::ErrorKind;
use penstock_store::{Store, StoreError, Tenant};
use penstock_types::{Dialect, Surface};

use super::credential::{self, Given};
use super::directory::{Denied, Directory};
use super::follow::Follow;
use super::identity::{Anonymous, Identity};
use super::jwt::cache::Found;
use super::jwt::is_token;
use super::jwt::issuer::{Issuer, User};
use super::jwt::ring::Ring;
use super::jwt::token::{Flaw, LEEWAY_SECONDS, Unverified};
use super::key::Digest;
use super::marker::Marker;
use super::pepper::Pepper;
use super::principal::{Principal, Use};
use super::{PREFIX, secret};
use crate::route::{AuthClass, Route};
use crate::throttle::Throttle;
use penstock_base::clock;
use penstock_base::error::Failure;
use penstock_http::Exchange;
use penstock_http::certificate::Certificate;
use penstock_telemetry::{Gauge, Metric, Metrics};
use penstock_types::ask::Ask;

/// Principal of open routes, and of a gateway that needs no credentials.
static NOBODY: LazyLock<Arc<Principal>> = LazyLock::new(Arc::default);

/// Most token users that are remembered for their deferred work (batches, background responses).
const USERS_MAX: usize = 10_000;
/// Prefix of the tenant ids of token users: `jwt:ISSUER:SUBJECT`.
const TOKENS: &str = "jwt:";
/// Time after which the store is asked again for a token user's identity.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// State of authentication that outlives a reload: throttle, issued keys, pepper, key rings of issuers.
#[derive(Debug)]
pub struct Guard {
    throttle: Throttle,
    pub(super) metrics: Arc<Metrics>,
    pub(super) directory: ArcSwap<Directory>,
    pub(super) follow: Follow,
    /// Marker in the state folder that this gateway has known an issued key.
    pub(super) marker: Marker,
    pub(super) pepper: ArcSwapOption<Pepper>,
    /// True if the error about the missing pepper was logged already; it is logged once per process.
    pub(super) pepperless: AtomicBool,
    /// Key rings of issuers; a new config with the same issuer keeps its ring.
    rings: Mutex<Vec<Arc<Ring>>>,
    /// Identities of token users by tenant id, at most [`USERS_MAX`], for batches and background responses.
    users: Mutex<HashMap<String, Seen>>,
}

/// Identity of a token's user, kept for the user's deferred work.
#[derive(Clone, Debug)]
struct Seen {
    user: Arc<User>,
    /// Unix seconds at which the token that gave this identity was seen.
    at: u64,
    /// Time at which the identity was last checked: read from the store, or received with a token. After [`LOOK_AGAIN`]
    /// the store is read again.
    asked: Instant,
}

/// Principal of a known secret, and the flag that the secret has been used before.
struct Known {
    principal: Arc<Principal>,
    good: Arc<AtomicBool>,
}

/// Result of looking up a client's secret among configured and issued keys.
enum Look {
    Known(Known),
    Denied(Denied),
    /// The secret has the form of a key issued here, but is not in the directory; it may be too new.
    Ours,
    Unknown,
}

impl Guard {
    /// Creates a guard that counts failures in `metrics`.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            throttle: Throttle::default(),
            metrics,
            directory: ArcSwap::default(),
            follow: Follow::default(),
            marker: Marker::default(),
            pepper: ArcSwapOption::empty(),
            pepperless: AtomicBool::new(false),
            rings: Mutex::default(),
            users: Mutex::default(),
        }
    }

    /// Authenticates a request and checks that its principal may use the route. Notes the client in the exchange: its
    /// address, as trusted proxies give it, and its key's tenant.
    ///
    /// # Errors
    /// 401 without a valid credential, 403 outside of its scope, 429 for an address with too many failures, 503 when
    /// the directory is too old or the issuer's keys cannot be fetched.
    pub async fn admit(
        &self,
        identity: &Identity,
        route: &Route,
        exchange: &mut Exchange,
    ) -> Result<Arc<Principal>, Failure> {
        let (head, class) = (&exchange.head, route.auth_class());
        let address = credential::client(exchange.peer(), &head.headers, &identity.config.trusted_proxies);
        if class == AuthClass::Open {
            exchange.set_client(address, "");
            return Ok(NOBODY.clone());
        }
        let now = clock::unix_seconds();
        let certificate = || if identity.has_certificates() { exchange.certificate() } else { None };
        let given = credential::given(&head.target, &head.headers);
        let principal = self.known(identity, given, certificate, address, now).await?;
        let dialect = exchange.dialect;
        let asked = Use { route: route.label(), class, dialect, address, is_live: true, now };
        exchange.set_client(address, principal.tenant());
        principal.check(&asked).inspect_err(|_| self.count("scope"))?;
        Ok(principal)
    }

    /// Authenticates a credential without checking any scope; client certificates are not considered, since there is no
    /// connection. Nothing may be served on this result alone.
    ///
    /// # Errors
    /// As `Guard::admit` for a missing or invalid credential.
    pub async fn identify(
        &self,
        identity: &Identity,
        target: &str,
        headers: &HeaderMap,
    ) -> Result<Arc<Principal>, Failure> {
        self.known(identity, credential::given(target, headers), || None, None, clock::unix_seconds()).await
    }

    async fn known(
        &self,
        identity: &Identity,
        given: Given,
        certificate: impl FnOnce() -> Option<Certificate>,
        address: Option<IpAddr>,
        now: u64,
    ) -> Result<Arc<Principal>, Failure> {
        match given {
            Given::One(given) if is_token(&given) && !identity.issuers.is_empty() => {
                self.token(identity, &given, address, now).await
            }
            Given::One(given) => self.key(identity, &given, address, now).await,
            Given::None => self.uncredentialed(identity, certificate().as_ref()),
            Given::Unusable if self.is_open(identity) => Ok(NOBODY.clone()),
            Given::Unusable => {
                Err(self.refused("unusable", "Send exactly one API key, as \"Authorization: Bearer KEY\"."))
            }
        }
    }

    /// Authenticates the tenant of deferred work (a line of a batch, a background response) anew when the work runs,
    /// since keys and scopes may have changed after it was accepted.
    ///
    /// # Errors
    /// Refusal to store as the result of the batch line or response.
    pub async fn recall(
        &self,
        identity: &Identity,
        store: &dyn Store,
        tenant: &str,
        surface: Surface,
    ) -> Result<Arc<Principal>, Failure> {
        self.look_up(store, tenant).await;
        let principal = self.tenant(identity, tenant)?;
        let route = Route::Ask(Ask::new(surface));
        let (route, class, now) = (route.label(), route.auth_class(), clock::unix_seconds());
        let dialect = surface.dialect();
        principal.check(&Use { route, class, dialect, address: None, is_live: false, now })?;
        Ok(principal)
    }

    /// Checks that the principal of an open connection may still use `route`. The failure says that its token has
    /// expired, or that its key was revoked, blocked, expired or dropped from the config.
    ///
    /// # Errors
    /// The same failure as for a new request; an unavailable check (503) counts as permission.
    pub fn still(&self, identity: &Identity, principal: &Principal, route: &'static str) -> Result<(), Failure> {
        self.still_at(identity, principal, route, clock::unix_seconds())
    }

    fn still_at(
        &self,
        identity: &Identity,
        principal: &Principal,
        route: &'static str,
        now: u64,
    ) -> Result<(), Failure> {
        if principal.until.is_some_and(|until| now >= until) {
            return Err(Failure::new(ErrorKind::Unauthorized, "The token has expired."));
        }
        let known = match &principal.person {
            // A user who is no longer remembered is known by the token that opened the connection.
            Some(user) => {
                self.user(identity, &self.seen(principal.tenant()).map_or_else(|| user.clone(), |seen| seen.user))
            }
            None => self.tenant(identity, principal.tenant()),
        };
        let known = match known {
            Err(failure) if failure.kind == ErrorKind::Unavailable => return Ok(()),
            known => known?,
        };
        let dialect = Dialect::OpenAi;
        known.check(&Use { route, class: AuthClass::Key, dialect, address: None, is_live: false, now })
    }

    fn tenant(&self, identity: &Identity, tenant: &str) -> Result<Arc<Principal>, Failure> {
        if tenant.is_empty() && self.is_open(identity) {
            return Ok(NOBODY.clone());
        }
        if tenant.starts_with(TOKENS) {
            let unseen = "The caller of this request cannot be verified at the moment; the request is tried again.";
            let seen = self.seen(tenant).ok_or_else(|| Failure::new(ErrorKind::Unavailable, unseen))?;
            return self.user(identity, &seen.user);
        }
        if let Some(known) = identity.by_id(tenant) {
            return Ok(known.principal.clone());
        }
        let directory = self.directory.load();
        let gone = "The API key of this request is no longer known.";
        let entry = directory.by_id(tenant).ok_or_else(|| Failure::new(ErrorKind::Unauthorized, gone))?;
        self.current(identity)?;
        directory.principal(entry, identity).map_err(|why| Failure::new(ErrorKind::Unauthorized, why.message()))
    }

    /// Principal of a token's user under the config and directory in force, whether or not the token is still valid.
    fn user(&self, identity: &Identity, user: &Arc<User>) -> Result<Arc<Principal>, Failure> {
        let gone = "The token issuer of the caller is no longer configured.";
        let issuer = identity.issuers.iter().find(|issuer| issuer.config.id == user.issuer);
        let issuer = issuer.ok_or_else(|| Failure::new(ErrorKind::Unauthorized, gone))?;
        let refused =
            |flaw| Failure::new(ErrorKind::Unauthorized, format!("The caller may not make this request: {flaw}."));
        person(&self.directory.load(), identity, issuer, user).map(Arc::new).map_err(refused)
    }

    /// Authenticates an API key. A key that has been used before is accepted whatever the throttle of its address says;
    /// any other key is subject to the throttle.
    async fn key(
        &self,
        identity: &Identity,
        given: &[u8],
        address: Option<IpAddr>,
        now: u64,
    ) -> Result<Arc<Principal>, Failure> {
        let mut look = self.look(identity, given, now)?;
        if let Look::Known(known) = &look
            && known.good.load(Ordering::Relaxed)
        {
            return Ok(known.principal.clone());
        }
        if matches!(look, Look::Unknown) && self.is_open(identity) {
            return Ok(NOBODY.clone());
        }
        self.unhurried(identity, address)?;
        if matches!(look, Look::Ours) {
            Box::pin(self.follow.renewed()).await;
            look = self.look(identity, given, now)?;
        }
        match look {
            Look::Known(known) => {
                known.good.store(true, Ordering::Relaxed);
                Ok(known.principal)
            }
            Look::Denied(why) => Err(self.refused("denied", why.message())),
            Look::Ours | Look::Unknown if self.is_open(identity) => Ok(NOBODY.clone()),
            Look::Ours | Look::Unknown => {
                self.throttle.failed(address, identity.config.failures_per_minute, Instant::now());
                Err(self.refused("unknown", "Incorrect API key provided."))
            }
        }
    }

    /// Looks a key up in memory: one digest and one hash map access.
    fn look(&self, identity: &Identity, given: &[u8], now: u64) -> Result<Look, Failure> {
        let mut is_ours = false;
        if given.starts_with(PREFIX.as_bytes()) {
            let directory = self.directory.load();
            let pepper = self.pepper.load();
            if let Some(pepper) = pepper.as_ref() {
                let digest = pepper.digest(given);
                if let Some(entry) = directory.find(&digest) {
                    self.current(identity)?;
                    let principal = entry.takes(&digest, now).and_then(|()| directory.principal(entry, identity));
                    return Ok(match principal {
                        Ok(principal) => Look::Known(Known { principal, good: entry.good.clone() }),
                        Err(why) => Look::Denied(why),
                    });
                }
                is_ours = secret::is_ours(pepper, given);
            } else {
                // Without a pepper no digest can be compared; the first key may have been issued a moment ago.
                is_ours = true;
            }
        }
        Ok(match identity.by_secret(given) {
            Some(known) => Look::Known(Known { principal: known.principal.clone(), good: known.good.clone() }),
            None if is_ours => Look::Ours,
            None => Look::Unknown,
        })
    }

    /// Checks that the directory is recent enough to be trusted (`stale` in the config).
    fn current(&self, identity: &Identity) -> Result<(), Failure> {
        let is_stale = self.follow.age().is_none_or(|age| identity.config.stale.is_some_and(|stale| age > stale));
        if !is_stale {
            return Ok(());
        }
        self.count("stale");
        let failure = Failure::new(ErrorKind::Unavailable, "API keys cannot be checked at the moment.");
        Err(failure.retry_after(Duration::from_secs(5)))
    }

    /// Authenticates a request without a credential: by its client certificate, or as nobody if the gateway is open.
    fn uncredentialed(
        &self,
        identity: &Identity,
        certificate: Option<&Certificate>,
    ) -> Result<Arc<Principal>, Failure> {
        if let Some(known) = certificate.and_then(|certificate| identity.by_certificate(&certificate.0)) {
            return Ok(known.principal.clone());
        }
        if self.is_open(identity) {
            return Ok(NOBODY.clone());
        }
        Err(match certificate {
            Some(_) => self.refused("certificate", "No key of this gateway lists a name of your client certificate."),
            None => self.refused("missing", "An API key is needed: send it as \"Authorization: Bearer KEY\"."),
        })
    }

    /// Authenticates a token, from the cache of verified tokens if possible.
    async fn token(
        &self,
        identity: &Identity,
        given: &[u8],
        address: Option<IpAddr>,
        now: u64,
    ) -> Result<Arc<Principal>, Failure> {
        let digest = Digest::of(given);
        // A hit counts only under the directory version and the key set that the token was verified with.
        if let Some(found) = identity.tokens.get(&digest, now)
            && found.owners == self.directory.load().owners_version
            && identity.issuers[found.issuer].ring.get().and_then(|ring| ring.number()) == Some(found.keys)
        {
            return Ok(found.principal);
        }
        self.unhurried(identity, address)?;
        match Box::pin(self.verified(identity, given, now)).await {
            Ok(found) => {
                let principal = found.principal.clone();
                identity.tokens.put(digest, found, now);
                Ok(principal)
            }
            Err(Some(flaw)) => {
                if flaw.is_guess() {
                    self.throttle.failed(address, identity.config.failures_per_minute, Instant::now());
                }
                Err(self.refused(flaw.label(), &format!("The token is not accepted: {flaw}.")))
            }
            Err(None) => {
                self.count("token_unavailable");
                let message = "Tokens of this issuer cannot be checked at the moment.";
                Err(Failure::new(ErrorKind::Unavailable, message).retry_after(Duration::from_secs(5)))
            }
        }
    }

    /// Verifies a token that is not cached; `Err(None)`: the issuer's keys are not available. A token with an unknown key is
    /// refused only after a fetch that began behind it.
    async fn verified(&self, identity: &Identity, given: &[u8], now: u64) -> Result<Found, Option<Flaw>> {
        let name = Unverified::parse(given)?.issuer().map(str::to_owned).ok_or(Flaw::Issuer)?;
        let (at, issuer) = identity.issuer(&name).ok_or(Flaw::Issuer)?;
        let ring = self.ring(issuer);
        let mut fetches = ring.fetches();
        let mut held = ring.first().await.ok_or(None::<Flaw>)?;
        let mut verified = Unverified::parse(given)?.verify(&held.keys);
        while verified.as_ref().is_err_and(|flaw| *flaw == Flaw::Key) {
            let fetched = fetches.next().await.ok_or(None::<Flaw>)?;
            held = fetched.held;
            verified = Unverified::parse(given)?.verify(&held.keys);
            if fetched.is_behind {
                break;
            }
        }
        let claims = verified?;
        let until = claims.check(&issuer.config.audiences, now)?;
        let directory = self.directory.load();
        let user = Arc::new(issuer.user(&claims)?);
        let person = person(&directory, identity, issuer, &user)?;
        let principal = Arc::new(Principal { until: Some(until), ..person });
        self.remember(user, now);
        let since = now.saturating_sub(LEEWAY_SECONDS);
        Ok(Found { principal, since, until, issuer: at, keys: held.number, owners: directory.owners_version })
    }

    /// Remembers the identity of a token's user for deferred work; a newer token's identity is not overwritten by an
    /// older one's.
    fn remember(&self, user: Arc<User>, at: u64) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        if users.len() >= USERS_MAX && !users.contains_key(&user.tenant) {
            let mut kept = 0;
            users.retain(|_, _| {
                kept += 1;
                kept <= USERS_MAX / 2
            });
        }
        let asked = Instant::now();
        if let Some(seen) = users.get_mut(&user.tenant).filter(|seen| seen.at > at) {
            seen.asked = asked;
            return;
        }
        users.insert(user.tenant.clone(), Seen { user, at, asked });
    }

    fn seen(&self, tenant: &str) -> Option<Seen> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner).get(tenant).cloned()
    }

    /// Stores the identity of a token's user next to the user's deferred work, which another process may run.
    /// Principals of keys need no copy: their key is in the store.
    ///
    /// # Errors
    /// The store fails.
    pub async fn keep_identity(&self, store: &dyn Store, principal: &Principal) -> Result<(), StoreError> {
        let Some(user) = &principal.person else { return Ok(()) };
        let now = clock::unix_seconds();
        self.remember(user.clone(), now);
        let identity = serde_json::to_string(&**user).map_err(|error| StoreError::Broken(error.to_string()))?;
        store.keep_identity(&Tenant::new(principal.tenant()), &identity, now).await
    }

    /// Reads a token user's identity from the store if it is unknown here or older than [`LOOK_AGAIN`]: another gateway
    /// may have seen a newer token.
    async fn look_up(&self, store: &dyn Store, tenant: &str) {
        let is_fresh = |seen: Seen| seen.asked.elapsed() < LOOK_AGAIN;
        if !tenant.starts_with(TOKENS) || self.seen(tenant).is_some_and(is_fresh) {
            return;
        }
        match store.identity(&Tenant::new(tenant)).await {
            Ok(Some((identity, at))) => match serde_json::from_str::<User>(&identity) {
                Ok(user) if user.tenant == tenant => self.remember(Arc::new(user), at),
                _ => tracing::warn!(tenant, "the stored identity of a user cannot be decoded"),
            },
            // The store has nothing newer: what is known here stays valid.
            Ok(None) => {
                let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
                users.get_mut(tenant).into_iter().for_each(|seen| seen.asked = Instant::now());
            }
            Err(error) => tracing::warn!(%error, "the identity of a user could not be read from the store"),
        }
    }

    /// Key ring of an issuer; shared with other configs that have the same issuer.
    pub(super) fn ring(&self, issuer: &Issuer) -> Arc<Ring> {
        let make = || {
            let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
            let known = rings.iter().find(|ring| ring.is_of(&issuer.config)).cloned();
            known.unwrap_or_else(|| {
                let ring = Arc::new(Ring::new(&issuer.config));
                rings.push(ring.clone());
                ring
            })
        };
        issuer.ring.get_or_init(make).clone()
    }

    /// Drops the key rings of issuers that the current config does not have.
    pub(super) fn drop_rings(&self, identity: &Identity) {
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        rings.retain(|ring| identity.issuers.iter().any(|issuer| ring.is_of(&issuer.config)));
    }

    /// Checks the throttle for an address that shows an unproven credential.
    fn unhurried(&self, identity: &Identity, address: Option<IpAddr>) -> Result<(), Failure> {
        let Some(wait) = self.throttle.wait(address, identity.config.failures_per_minute, Instant::now()) else {
            return Ok(());
        };
        self.count("throttled");
        let message = "Too many wrong API keys came from this address. Wait, and check the key.";
        Err(Failure::new(ErrorKind::RateLimited, message).retry_after(wait))
    }

    /// Returns true if requests without a credential are served. Once a key has been issued, only `anonymous = "allow"` in the
    /// config allows that, also after a restart with a store that has lost the key.
    pub fn is_open(&self, identity: &Identity) -> bool {
        let said = identity.config.anonymous == Anonymous::Allow;
        let is_virgin = || self.follow.age().is_some() && self.directory.load().is_virgin() && !self.marker.counts();
        identity.is_open && (said || is_virgin())
    }

    fn refused(&self, reason: &'static str, message: &str) -> Failure {
        self.count(reason);
        Failure::new(ErrorKind::Unauthorized, message)
    }

    fn count(&self, reason: &'static str) {
        self.metrics.count(Metric::AuthFailures, &[("reason", reason)]);
    }

    /// Adds the gauges of authentication for `/metrics`.
    pub fn gauges(&self, identity: &Identity, out: &mut Vec<(Gauge, String, f64)>) {
        let mut add = |gauge, label: &str, value: f64| out.push((gauge, label.to_owned(), value));
        add(Gauge::IssuedKeys, "", self.directory.load().keys() as f64);
        add(Gauge::DirectoryAge, "", self.follow.age().map_or(f64::INFINITY, |age| age.as_secs_f64()));
        add(Gauge::TokensCached, "", identity.tokens.len() as f64);
        for issuer in &identity.issuers {
            let age = issuer.ring.get().and_then(|ring| ring.age());
            add(Gauge::KeySetAge, &issuer.config.id, age.map_or(f64::INFINITY, |age| age.as_secs_f64()));
        }
    }
}

/// Principal of a token's user: the intersection of what the issuer's config, the token, the team and the directory
/// allow.
fn person(directory: &Directory, identity: &Identity, issuer: &Issuer, user: &Arc<User>) -> Result<Principal, Flaw> {
    let team = user.teams.iter().find(|team| directory.has_team(team, identity)).cloned();
    if user.needs_team && team.is_none() {
        return Err(Flaw::Claim("for the team names none that is known here".into()));
    }
    let principal = Principal {
        user: Some(user.name.clone()),
        team,
        limits: issuer.limits(user),
        tenant: user.tenant.clone(),
        scopes: issuer.scopes(user),
        person: Some(user.clone()),
        ..Principal::default()
    };
    directory
        .owned(principal, identity)
        .map_err(|why| Flaw::Claim(format!("says who may not come in: {}", why.message())))
}

#[cfg(test)]
mod tests {
    use penstock_store::{Changes, OwnerKind, OwnerRecord};

    use super::super::directory::tests::owner;
    use super::super::jwt::token::tests::{NOW, claims, config, set, signed_by_rsa};
    use super::*;

    /// Keys of the test issuer without the one that signs the test's tokens, as before it was rotated.
    fn before_rotation() -> Vec<u8> {
        let mut set: serde_json::Value = serde_json::from_slice(&set()).expect("JSON");
        set["keys"].as_array_mut().expect("keys").retain(|key| key["kid"] != "r");
        set.to_string().into_bytes()
    }

    /// Two tokens of a key that is not fetched yet come at once. `fetched`: what the next fetch brings; `None`: nothing.
    async fn check_rotated(fetched: Option<Vec<u8>>, expected: Result<(), (u16, bool)>) {
        let guard = Guard::new(Arc::default());
        let mut identity = Identity::default();
        identity.config.failures_per_minute = 1;
        identity.issuers.push(Issuer::new(&config()));
        let ring = guard.ring(&identity.issuers[0]);
        ring.take(&before_rotation()).expect("a set");
        let fetches = async {
            ring.wake.notified().await;
            ring.note_begin();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let is_ok = fetched.is_some_and(|set| ring.take(&set).is_ok());
            ring.note_end(is_ok);
        };
        let token = signed_by_rsa(&claims());
        let address = Some(IpAddr::from([192, 0, 2, 1]));
        let come = || guard.token(&identity, token.as_bytes(), address, NOW);
        let ((), one, two) = tokio::join!(fetches, come(), come());
        let is_guess = guard.throttle.wait(address, 1, Instant::now()).is_some();
        for told in [one, two] {
            assert_eq!(told.map(drop).map_err(|failure| (failure.status(), is_guess)), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_of_a_new_key_wait_for_its_fetch() {
        check_rotated(Some(set()), Ok(())).await;
        check_rotated(None, Err((503, false))).await;
        // The issuer does not have the key: only now it may be made up.
        check_rotated(Some(before_rotation()), Err((401, true))).await;
    }

    /// A connection lasts as long as the token that opened it, whether or not its user is remembered here.
    #[test]
    fn a_token_holds_what_it_has_opened() {
        let (guard, config) = (Guard::new(Arc::default()), config());
        let user = User {
            issuer: config.id.clone(),
            name: "ada".into(),
            tenant: format!("jwt:{}:ada", config.id),
            teams: vec!["t".into()],
            ..User::default()
        };
        let mut identity = Identity::default();
        identity.issuers.push(Issuer::new(&config));
        let change = |owner: OwnerRecord, version: u64| {
            let changes = Changes { keys: Vec::new(), owners: vec![owner], version, mark: None, more: false };
            let known = guard.directory.load_full();
            guard.directory.store(Arc::new(known.with(changes, &known)));
        };
        change(owner(OwnerKind::Team, "t"), 1);
        let user = Arc::new(user);
        let person = person(&guard.directory.load(), &identity, &identity.issuers[0], &user).expect("may come in");
        let opened = Principal { until: Some(100), ..person };
        let check = |now: u64, expected: Option<u16>| {
            for is_remembered in [false, true] {
                guard.users.lock().expect("a test").clear();
                if is_remembered {
                    guard.remember(user.clone(), 1);
                }
                let still = guard.still_at(&identity, &opened, "/v1/realtime", now);
                assert_eq!(still.err().map(|failure| failure.status()), expected, "{now} {is_remembered}");
            }
        };
        check(99, None);
        check(100, Some(401));
        change(OwnerRecord { blocked: true, ..owner(OwnerKind::Team, "t") }, 2);
        check(99, Some(401));
    }
}
