//! Keys of the config, and digests that are compared in constant time.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use penstock_govern::Scope;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq;

/// One configured key. Its secret is a long random string, so no slow hash is needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Shows in logs; also its tenant.
    pub id: String,
    /// What whoever uses it has to show.
    pub proof: Proof,
    /// What it may do.
    pub scope: Arc<Scope>,
    /// Its team.
    pub team: Option<String>,
    /// The person or service behind it.
    pub user: Option<String>,
    /// Ids of its limits.
    pub limits: Vec<String>,
    /// Its share of our workers against others'; 0: its team's.
    pub weight: u32,
}

/// What a key is proven by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// SHA-256 of the key.
    Digest(Digest),
    /// A name in the client's certificate; a trailing `*` matches any ending.
    Certificate(String),
}

/// People and services that share scope and limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Team {
    /// Name.
    pub id: String,
    /// What its keys may do at most.
    pub scope: Arc<Scope>,
    /// Ids of the limits that they share.
    pub limits: Vec<String>,
    /// The share of our workers that each of its keys and users has against others'.
    pub weight: u32,
}

/// A digest of a secret. Equality takes the same time wherever two differ, also inside a map.
#[derive(Clone, Copy)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// SHA-256.
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
