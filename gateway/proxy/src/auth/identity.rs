//! Who a config knows: its keys and teams, and whether anybody else may come in. Made with a config, swapped with it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ipnet::IpNet;

use super::jwt::IssuerConfig;
use super::jwt::cache::TokenCache;
use super::jwt::issuer::Issuer;
use super::key::{Digest, Key, Proof, Team};
use super::pepper::PepperSource;
use super::principal::Principal;
use crate::config::Snapshot;

/// Whether requests without a credential are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Anonymous {
    /// As long as there is no credential that anybody could have, and only on loopback.
    #[default]
    Auto,
    /// Yes.
    Allow,
    /// No.
    Deny,
}

/// The config's side of authentication.
#[derive(Clone, Debug, Default)]
pub struct AuthConfig {
    /// Requests without a credential.
    pub anonymous: Anonymous,
    /// Failures of one address per minute; 0: not limited.
    pub failures_per_minute: u32,
    /// Proxies whose `X-Forwarded-For` counts.
    pub trusted_proxies: Vec<IpNet>,
    /// What issued keys are digested with.
    pub pepper: PepperSource,
    /// For how long issued keys are good while the store does not answer.
    pub stale: Option<Duration>,
    /// Who issues tokens.
    pub issuers: Vec<IssuerConfig>,
}

impl AuthConfig {
    /// Whether the config has no credential that anybody could show.
    pub fn knows_nobody(&self, keys: &[Key]) -> bool {
        keys.is_empty() && self.issuers.is_empty()
    }
}

static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// A principal that a secret stands for.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) principal: Arc<Principal>,
    /// Whether it has been used: then nobody's guesses keep it out.
    pub(super) good: Arc<AtomicBool>,
}

/// Who is known by the config.
#[derive(Debug, Default)]
pub struct Identity {
    /// Tells configs apart.
    pub(super) number: u64,
    keys: HashMap<Digest, Arc<Known>>,
    by_id: HashMap<String, Arc<Known>>,
    /// Names of certificates; a trailing `*` matches any ending.
    certificates: Vec<(String, Arc<Known>)>,
    teams: HashMap<String, Team>,
    /// Who issues tokens.
    pub(super) issuers: Vec<Issuer>,
    /// Tokens found good.
    pub(super) tokens: TokenCache,
    pub(super) config: AuthConfig,
    /// Whether the config itself lets in whoever comes, as long as no key was ever issued.
    pub(super) is_open: bool,
}

impl Identity {
    /// Of that config.
    pub fn new(config: &Snapshot) -> Self {
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
            issuers: config.auth.issuers.iter().map(Issuer::new).collect(),
            tokens: TokenCache::default(),
            config: config.auth.clone(),
            is_open: is_open(config),
        }
    }

    /// Whose key that is.
    pub(super) fn by_secret(&self, secret: &[u8]) -> Option<&Arc<Known>> {
        self.keys.get(&Digest::of(secret))
    }

    /// Whose certificate that is: the first of `[[keys]]` that has one of its names.
    pub(super) fn by_certificate(&self, names: &[String]) -> Option<&Arc<Known>> {
        let is_of = |pattern: &String| {
            names.iter().any(|name| match pattern.strip_suffix('*') {
                Some(start) => name.starts_with(start),
                None => name == pattern,
            })
        };
        self.certificates.iter().find(|(pattern, _)| is_of(pattern)).map(|(_, known)| known)
    }

    /// Whether any key is proven by a certificate.
    pub(super) fn has_certificates(&self) -> bool {
        !self.certificates.is_empty()
    }

    /// The issuer that calls itself so.
    pub(super) fn issuer(&self, name: &str) -> Option<(usize, &Issuer)> {
        self.issuers.iter().enumerate().find(|(_, issuer)| issuer.config.issuer == name)
    }

    /// A team of the config.
    pub(super) fn team(&self, id: &str) -> Option<&Team> {
        self.teams.get(id)
    }

    /// The key of that id.
    pub(super) fn by_id(&self, id: &str) -> Option<&Arc<Known>> {
        self.by_id.get(id)
    }
}

/// Whether a config lets in whoever comes, as long as no key was ever issued.
pub fn is_open(config: &Snapshot) -> bool {
    match config.auth.anonymous {
        Anonymous::Allow => true,
        Anonymous::Deny => false,
        Anonymous::Auto => config.auth.knows_nobody(&config.keys) && config.listen.ip().is_loopback(),
    }
}

/// A key's principal: its own scope and its team's, its own limits and its team's.
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
        scopes: scopes.cloned().collect(),
    }
}
