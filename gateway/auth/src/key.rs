//! Keys and teams of the config, and digests that are compared in constant time.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use penstock_govern::Scope;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq;

/// Configured API key. The secret is a long random string, so a fast hash is enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Id of the key in logs; also the tenant that separates its stored objects and prefix caches.
    pub id: String,
    /// Proof that a client must show: the secret, or a certificate.
    pub proof: Proof,
    /// Models, routes, dialects, addresses and expiry that the key is held to.
    pub scope: Arc<Scope>,
    /// Id of the team whose scope and limits also apply; `None`: no team.
    pub team: Option<String>,
    /// Person or service that uses the key, for usage reports and the log.
    pub user: Option<String>,
    /// Ids of the `[[limits]]` that requests with the key count against, besides the team's.
    pub limits: Vec<String>,
    /// Weight of the key in fair sharing of our workers; 0: the team's weight.
    pub weight: u32,
}

/// Proof that a client must show to use a configured key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// SHA-256 of the secret that the client sends.
    Digest(Digest),
    /// Name in the client's certificate; a trailing `*` matches any ending.
    Certificate(String),
}

/// Team of the config: keys and users that share a scope and limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Team {
    /// Id by which keys and token claims name the team.
    pub id: String,
    /// Upper bound of the models, routes, dialects and addresses of the team's keys and users.
    pub scope: Arc<Scope>,
    /// Ids of the `[[limits]]` that all keys and users of the team share.
    pub limits: Vec<String>,
    /// Weight of each of the team's keys and users in fair sharing of our workers.
    pub weight: u32,
}

/// SHA-256-sized digest of a secret. Comparison takes constant time, also inside a map.
#[derive(Clone, Copy)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// SHA-256 of a secret, as the config lists it and lookups need it.
    pub fn of(secret: &[u8]) -> Self {
        Self(Sha256::digest(secret).into())
    }
}

impl PartialEq for Digest {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Digest {}

impl Hash for Digest {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0);
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("[digest]")
    }
}
