//! Who a config knows: its keys and teams, and whether anybody else may come in. Made with a config, swapped with it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ipnet::IpNet;

use super::key::{Digest, Key, Proof, Team};
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
}

/// A principal that a secret stands for.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) principal: Arc<Principal>,
    /// Whether it has been used: then nobody's guesses keep it out.
    pub(super) good: AtomicBool,
}

impl Known {
    pub(super) fn new(principal: Principal) -> Self {
        Self { principal: Arc::new(principal), good: AtomicBool::new(false) }
    }

    pub(super) fn is_good(&self) -> bool {
        self.good.load(Ordering::Relaxed)
    }
}

/// Who is known by the config.
#[derive(Debug)]
pub struct Identity {
    keys: HashMap<Digest, Arc<Known>>,
    by_id: HashMap<String, Arc<Known>>,
    pub(super) config: AuthConfig,
    /// Whether the config itself lets in whoever comes, as long as no key was ever issued.
    pub(super) is_open: bool,
}

impl Identity {
    /// Of that config.
    pub fn new(config: &Snapshot) -> Self {
        let teams: HashMap<_, _> = config.teams.iter().map(|team| (team.id.clone(), team.clone())).collect();
        let (mut keys, mut by_id) = (HashMap::new(), HashMap::new());
        for key in &config.keys {
            let known = Arc::new(Known::new(principal(key, &teams)));
            if let Proof::Digest(digest) = key.proof {
                keys.insert(digest, known.clone());
            }
            by_id.insert(key.id.clone(), known);
        }
        let is_open = match config.auth.anonymous {
            Anonymous::Allow => true,
            Anonymous::Deny => false,
            Anonymous::Auto => config.keys.is_empty() && config.listen.ip().is_loopback(),
        };
        Self { keys, by_id, config: config.auth.clone(), is_open }
    }

    /// Whose key that is.
    pub(super) fn by_secret(&self, secret: &[u8]) -> Option<&Arc<Known>> {
        self.keys.get(&Digest::of(secret))
    }

    /// The key of that id.
    pub(super) fn by_id(&self, id: &str) -> Option<&Arc<Known>> {
        self.by_id.get(id)
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
        tenant: key.id.clone(),
        scopes: scopes.cloned().collect(),
    }
}
