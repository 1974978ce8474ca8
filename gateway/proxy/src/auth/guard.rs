//! The door: from a request's credential to a principal that may do what it asks.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use http::HeaderMap;
use penstock_dialects::{Dialect, Surface};
use penstock_proto::ErrorKind;
use penstock_store::{Store, StoreError, Tenant};

use super::certificate::Certificate;
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
use super::pepper::Pepper;
use super::principal::{Principal, Use};
use super::throttle::Throttle;
use super::{PREFIX, secret};
use crate::call::Ask;
use crate::clock;
use crate::error::Failure;
use crate::http::Exchange;
use crate::route::{AuthClass, Route};
use crate::telemetry::{Gauge, Metric, Metrics};

/// Whoever uses a route that anybody may use, or a gateway that needs no credentials.
static NOBODY: LazyLock<Arc<Principal>> = LazyLock::new(Arc::default);

/// Users of tokens that are remembered for what they left to be done.
const USERS_MAX: usize = 10_000;
/// What tenants of tokens begin with.
const TOKENS: &str = "jwt:";
/// The store is asked again who somebody is after this long.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// What authentication keeps for as long as the process lives.
#[derive(Debug)]
pub struct Guard {
    throttle: Throttle,
    metrics: Arc<Metrics>,
    pub(super) directory: ArcSwap<Directory>,
    pub(super) follow: Follow,
    pub(super) pepper: ArcSwapOption<Pepper>,
    /// Whether it was said that there is no pepper.
    pub(super) pepperless: AtomicBool,
    /// Keys of issuers; they outlive configs.
    rings: Mutex<Vec<Arc<Ring>>>,
    /// Users of tokens, by tenant.
    users: Mutex<HashMap<String, Seen>>,
}

/// A token's user, for what it leaves to be done.
#[derive(Clone, Debug)]
struct Seen {
    user: Arc<User>,
    /// When a token said so, in Unix seconds.
    at: u64,
    /// When somebody looked whether the store knows something newer.
    asked: Instant,
}

/// A secret that is known: what it stands for, and whether it has been used before.
struct Known {
    principal: Arc<Principal>,
    good: Arc<AtomicBool>,
}

/// What is known of a secret.
enum Look {
    Known(Known),
    Denied(Denied),
    /// It was issued here by its form; it may be too new.
    Ours,
    Unknown,
}

impl Guard {
    /// Counts in `metrics`.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            throttle: Throttle::default(),
            metrics,
            directory: ArcSwap::default(),
            follow: Follow::default(),
            pepper: ArcSwapOption::empty(),
            pepperless: AtomicBool::new(false),
            rings: Mutex::default(),
            users: Mutex::default(),
        }
    }

    /// Lets a request in as whom its credential says, or not at all. The client's address, as trusted proxies say it, is noted in the
    /// exchange.
    ///
    /// # Errors
    /// 401 without a good credential, 403 outside of its scope, 429 where somebody guesses, 503 where it cannot be told.
    pub(crate) async fn admit(
        &self,
        identity: &Identity,
        route: &Route,
        exchange: &mut Exchange,
    ) -> Result<Arc<Principal>, Failure> {
        let (head, class) = (&exchange.head, route.auth_class());
        let address = credential::client(exchange.peer(), &head.headers, &identity.config.trusted_proxies);
        if class == AuthClass::Open {
            exchange.set_client(address);
            return Ok(NOBODY.clone());
        }
        let now = clock::unix_seconds();
        let certificate = || if identity.has_certificates() { exchange.certificate() } else { None };
        let given = credential::given(&head.target, &head.headers);
        let principal = self.known(identity, given, certificate, address, now).await?;
        let dialect = exchange.dialect;
        let asked = Use { route: route.label(), class, dialect, address, is_live: true, now };
        exchange.set_client(address);
        principal.check(&asked).inspect_err(|_| self.count("scope"))?;
        Ok(principal)
    }

    /// Whom the credential of a request names, whatever it asks for; without a connection there is no certificate. What a request may
    /// do is not checked: nothing is served with this.
    ///
    /// # Errors
    /// As a request without a good credential.
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

    /// Who a tenant is whose request is answered later, without a connection (a batch's line, a response in the background). What it
    /// may do may have changed since.
    ///
    /// # Errors
    /// What the batch or the response says.
    pub(crate) async fn recall(
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
        principal.check(&Use { route, class, dialect: Dialect::OpenAi, address: None, is_live: false, now })?;
        Ok(principal)
    }

    /// Whether somebody who was let in may still be where they are: what is revoked, blocked, expired or gone from the config may not.
    ///
    /// # Errors
    /// As a request that comes now; what cannot be told changes nothing.
    pub(crate) fn still(&self, identity: &Identity, principal: &Principal, route: &'static str) -> Result<(), Failure> {
        let now = clock::unix_seconds();
        let known = match self.tenant(identity, principal.tenant()) {
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
            let gone = "The token issuer of the caller is no longer configured.";
            let issuer = identity.issuers.iter().find(|issuer| issuer.config.id == seen.user.issuer);
            let issuer = issuer.ok_or_else(|| Failure::new(ErrorKind::Unauthorized, gone))?;
            let person = person(&self.directory.load(), identity, issuer, &seen.user);
            let refused =
                |flaw| Failure::new(ErrorKind::Unauthorized, format!("The caller may not make this request: {flaw}."));
            return person.map(Arc::new).map_err(refused);
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

    /// Whose key that is. What has been good before is let in however much an address guesses; anything else waits with the guesses.
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

    /// Looks a key up: one digest and one look into a map.
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
                // Nobody could tell: perhaps the first key was issued a moment ago.
                is_ours = true;
            }
        }
        Ok(match identity.by_secret(given) {
            Some(known) => Look::Known(Known { principal: known.principal.clone(), good: known.good.clone() }),
            None if is_ours => Look::Ours,
            None => Look::Unknown,
        })
    }

    /// Whether the directory is current enough to be believed.
    fn current(&self, identity: &Identity) -> Result<(), Failure> {
        let is_stale = self.follow.age().is_none_or(|age| identity.config.stale.is_some_and(|stale| age > stale));
        if !is_stale {
            return Ok(());
        }
        self.count("stale");
        let failure = Failure::new(ErrorKind::Unavailable, "API keys cannot be checked at the moment.");
        Err(failure.retry_after(Duration::from_secs(5)))
    }

    /// Who comes without a credential in the request: whom its certificate names, or nobody, where that is enough.
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

    /// Whose token that is.
    async fn token(
        &self,
        identity: &Identity,
        given: &[u8],
        address: Option<IpAddr>,
        now: u64,
    ) -> Result<Arc<Principal>, Failure> {
        let digest = Digest::of(given);
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

    /// Verifies a token that is not remembered; `Err(None)`: the issuer's keys are not to be had.
    async fn verified(&self, identity: &Identity, given: &[u8], now: u64) -> Result<Found, Option<Flaw>> {
        let name = Unverified::parse(given)?.issuer().map(str::to_owned).ok_or(Flaw::Issuer)?;
        let (at, issuer) = identity.issuer(&name).ok_or(Flaw::Issuer)?;
        let ring = self.ring(issuer);
        let mut held = ring.first().await.ok_or(None::<Flaw>)?;
        let mut verified = Unverified::parse(given)?.verify(&held.keys);
        if verified.as_ref().is_err_and(|flaw| *flaw == Flaw::Key)
            && let Some(renewed) = ring.renewed().await
        {
            held = renewed;
            verified = Unverified::parse(given)?.verify(&held.keys);
        }
        let claims = verified?;
        let until = claims.check(&issuer.config.audiences, now)?;
        let directory = self.directory.load();
        let user = Arc::new(issuer.user(&claims)?);
        let principal = Arc::new(person(&directory, identity, issuer, &user)?);
        self.remember(user, now);
        let since = now.saturating_sub(LEEWAY_SECONDS);
        Ok(Found { principal, since, until, issuer: at, keys: held.number, owners: directory.owners_version })
    }

    /// Remembers who a token's user is, for what it leaves to be done; a token that said so before the one that is known changes nothing.
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

    /// Keeps who a token's user is beside what it leaves to be done, which another process may have to do. Others are known by their keys.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn keep_identity(&self, store: &dyn Store, principal: &Principal) -> Result<(), StoreError> {
        let Some(user) = &principal.person else { return Ok(()) };
        let now = clock::unix_seconds();
        self.remember(user.clone(), now);
        let identity = serde_json::to_string(&**user).map_err(|error| StoreError::Broken(error.to_string()))?;
        store.keep_identity(&Tenant::new(principal.tenant()), &identity, now).await
    }

    /// Asks the store who a token's user is, where that is not known here or may be old: another gateway may have met it since.
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
            // Nothing newer: what is known here is as good as before.
            Ok(None) => {
                let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
                users.get_mut(tenant).into_iter().for_each(|seen| seen.asked = Instant::now());
            }
            Err(error) => tracing::warn!(%error, "the identity of a user could not be read from the store"),
        }
    }

    /// The keys of an issuer; another config's, if that has the same.
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

    /// Lets go of the keys of issuers that the config in force has not.
    pub(super) fn drop_rings(&self, identity: &Identity) {
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        rings.retain(|ring| identity.issuers.iter().any(|issuer| ring.is_of(&issuer.config)));
    }

    /// Whether something unknown from that address is looked at now.
    fn unhurried(&self, identity: &Identity, address: Option<IpAddr>) -> Result<(), Failure> {
        let Some(wait) = self.throttle.wait(address, identity.config.failures_per_minute, Instant::now()) else {
            return Ok(());
        };
        self.count("throttled");
        let message = "Too many wrong API keys came from this address. Wait, and check the key.";
        Err(Failure::new(ErrorKind::RateLimited, message).retry_after(wait))
    }

    /// Whether whoever comes is served. Once a key has been issued, that takes a word in the config.
    pub fn is_open(&self, identity: &Identity) -> bool {
        let said = identity.config.anonymous == Anonymous::Allow;
        identity.is_open && (said || (self.follow.age().is_some() && self.directory.load().is_virgin()))
    }

    fn refused(&self, reason: &'static str, message: &str) -> Failure {
        self.count(reason);
        Failure::new(ErrorKind::Unauthorized, message)
    }

    fn count(&self, reason: &'static str) {
        self.metrics.count(Metric::AuthFailures, &[("reason", reason)]);
    }

    /// For `/metrics`.
    pub(crate) fn gauges(&self, identity: &Identity, out: &mut Vec<(Gauge, String, f64)>) {
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

/// What a token's user may do: what the issuer's config, the token, its team and the directory's word about it allow together.
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
