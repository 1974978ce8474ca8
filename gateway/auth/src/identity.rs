//! Identities of one config: its keys, teams, certificates and issuers, and its rule for anonymous requests. Built with
//! a config snapshot and swapped with it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ipnet::IpNet;
use penstock_govern::Limit;

use super::jwt::IssuerConfig;
use super::jwt::cache::TokenCache;
use super::jwt::issuer::Issuer;
use super::key::{Digest, Key, Proof, Team};
use super::marker;
use super::pepper::{PepperPlace, PepperSource};
use super::principal::Principal;

/// Rule for requests without a credential.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Anonymous {
    /// Served on a loopback listener only, as long as there is no key and no issuer.
    #[default]
    Auto,
    /// Served on every listener, also beyond loopback (`auth.anonymous = "allow"`).
    Allow,
    /// Never served: a request without a credential is refused.
    Deny,
}

/// Section `[auth]` of the config, with the keys, teams and token issuers of `[[keys]]`, `[[teams]]` and `[[jwt]]`.
#[derive(Clone, Debug, Default)]
pub struct AuthConfig {
    /// Rule for requests without a credential.
    pub anonymous: Anonymous,
    /// Failed attempts that one address may make per minute before it is throttled (429); 0: not limited.
    pub failures_per_minute: u32,
    /// Networks of proxies whose `X-Forwarded-For` gives the client's address.
    pub trusted_proxies: Vec<IpNet>,
    /// Source of the pepper, the secret under which issued keys are digested.
    pub pepper: PepperSource,
    /// Longest time that issued keys are accepted while the store does not answer; `None`: without bound.
    pub stale: Option<Duration>,
    /// Issuers of JSON Web Tokens, one per `[[jwt]]` entry, in the order of the config.
    pub issuers: Vec<IssuerConfig>,
    /// Configured API keys (`[[keys]]`); issued keys are in the store.
    pub keys: Vec<Key>,
    /// Configured teams (`[[teams]]`) that keys and token users belong to.
    pub teams: Vec<Team>,
}

impl AuthConfig {
    /// Returns true if the config has no `[[keys]]` and no issuers.
    pub fn knows_nobody(&self) -> bool {
        self.keys.is_empty() && self.issuers.is_empty()
    }
}

/// Parts of a config that authentication is made of.
#[derive(Clone, Debug)]
pub struct AuthSettings<'a> {
    /// Section `[auth]`, with the configured keys, teams and issuers.
    pub auth: &'a AuthConfig,
    /// Address and port of the TCP listener for requests.
    pub listen: SocketAddr,
    /// State folder, or the reason why there is none.
    pub state_dir: Result<PathBuf, String>,
    /// True if several gateways may share the store.
    pub is_shared: bool,
    /// Limits of the config, which keys, teams and users may name.
    pub limits: &'a [Arc<Limit>],
}

impl AuthSettings<'_> {
    /// Returns true if the config lets in requests without a credential, as long as no key was ever issued.
    pub fn is_open(&self) -> bool {
        match self.auth.anonymous {
            Anonymous::Allow => true,
            Anonymous::Deny => false,
            Anonymous::Auto => self.auth.knows_nobody() && self.listen.ip().is_loopback(),
        }
    }

    /// Returns true if requests without a credential are let in as far as the config and the state folder say; the store may have a key
    /// all the same.
    pub fn is_open_so_far(&self) -> bool {
        let is_marked = || self.state_dir.as_deref().is_ok_and(marker::counts);
        self.is_open() && (self.auth.anonymous == Anonymous::Allow || !is_marked())
    }

    /// Place of the pepper.
    pub fn pepper(&self) -> PepperPlace {
        PepperPlace { source: self.auth.pepper.clone(), state_dir: self.state_dir.clone() }
    }
}

static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// Principal of a configured key, and whether the key has been used.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) principal: Arc<Principal>,
    /// Whether the key has been used before; such a key is exempt from the throttle of wrong guesses.
    pub(super) good: Arc<AtomicBool>,
}

/// Lookup tables for the keys, certificates, teams and issuers of one config.
#[derive(Debug, Default)]
pub struct Identity {
    /// Number of this config in the process; caches compare it.
    pub(super) number: u64,
    keys: HashMap<Digest, Arc<Known>>,
    by_id: HashMap<String, Arc<Known>>,
    /// Patterns of certificate names in the order of the config; a trailing `*` matches any ending.
    certificates: Vec<(String, Arc<Known>)>,
    teams: HashMap<String, Team>,
    /// Token issuers of the config, in its order; [`TokenCache`] entries refer to them by index.
    pub(super) issuers: Vec<Issuer>,
    /// Cache of tokens verified under this config; a reload begins with an empty one.
    pub(super) tokens: TokenCache,
    pub(super) config: AuthConfig,
    pepper: PepperPlace,
    /// True if the config lets in requests without a credential, as long as no key was ever issued.
    pub(super) is_open: bool,
}

impl Identity {
    /// Builds the lookup tables from the keys, teams and issuers of a config.
    pub fn new(settings: &AuthSettings<'_>) -> Self {
        let config = settings.auth;
        let teams: HashMap<_, _> = config.teams.iter().map(|team| (team.id.clone(), team.clone())).collect();
        let (mut keys, mut by_id, mut certificates) = (HashMap::new(), HashMap::new(), Vec::new());
        for key in &config.keys {
            let principal = Arc::new(principal(key, &teams));
            let known = Arc::new(Known { principal, good: Arc::default() });
            match &key.proof {
                Proof::Digest(digest) => drop(keys.insert(*digest, known.clone())),
                Proof::Certificate(name) => certificates.push((name.clone(), known.clone())),
            }
            by_id.insert(key.id.clone(), known);
        }
        Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            keys,
            by_id,
            certificates,
            teams,
            issuers: config.issuers.iter().map(Issuer::new).collect(),
            tokens: TokenCache::default(),
            config: config.clone(),
            pepper: settings.pepper(),
            is_open: settings.is_open(),
        }
    }

    /// Place of the pepper under which keys are digested.
    pub fn pepper(&self) -> &PepperPlace {
        &self.pepper
    }

    /// Configured key whose SHA-256 is that of `secret`; `None` for issued keys, which the directory has.
    pub(super) fn by_secret(&self, secret: &[u8]) -> Option<&Arc<Known>> {
        self.keys.get(&Digest::of(secret))
    }

    /// First of `[[keys]]` whose certificate pattern matches one of `names`.
    pub(super) fn by_certificate(&self, names: &[String]) -> Option<&Arc<Known>> {
        let is_of = |pattern: &String| {
            names.iter().any(|name| match pattern.strip_suffix('*') {
                Some(start) => name.starts_with(start),
                None => name == pattern,
            })
        };
        self.certificates.iter().find(|(pattern, _)| is_of(pattern)).map(|(_, known)| known)
    }

    /// Returns true if any of `[[keys]]` is proven by a client certificate instead of a secret.
    pub(super) fn has_certificates(&self) -> bool {
        !self.certificates.is_empty()
    }

    /// Token issuer whose `iss` value is `name`, with its index in the config.
    pub(super) fn issuer(&self, name: &str) -> Option<(usize, &Issuer)> {
        self.issuers.iter().enumerate().find(|(_, issuer)| issuer.config.issuer == name)
    }

    /// Team of `[[teams]]` with id `id`; teams of the store are in the directory.
    pub(super) fn team(&self, id: &str) -> Option<&Team> {
        self.teams.get(id)
    }

    /// Configured key with id `id`; issued keys are in the directory.
    pub(super) fn by_id(&self, id: &str) -> Option<&Arc<Known>> {
        self.by_id.get(id)
    }
}

/// Principal of a configured key: the key's scope and its team's, the key's limits and its team's.
fn principal(key: &Key, teams: &HashMap<String, Team>) -> Principal {
    let team = key.team.as_ref().and_then(|team| teams.get(team));
    let scopes = std::iter::once(&key.scope).chain(team.map(|team| &team.scope));
    let limits = key.limits.iter().chain(team.into_iter().flat_map(|team| &team.limits));
    Principal {
        key: Some(key.id.clone()),
        parents: Vec::new(),
        team: key.team.clone(),
        user: key.user.clone(),
        limits: limits.cloned().collect(),
        weight: if key.weight > 0 { key.weight } else { team.map_or(0, |team| team.weight) },
        tenant: key.id.clone(),
        person: None,
        until: None,
        scopes: scopes.cloned().collect(),
    }
}
