//! Tokens that were found good, by the SHA-256 of all of their bytes, until they expire.
//!
//! A hit costs one hash of the token and one short lock; a miss costs a signature. An entry is good for the key set and the directory
//! that it was made with: when the issuer drops a key, or a team is blocked, nothing remembered outlives it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::auth::key::Digest;
use crate::auth::principal::Principal;

/// Parts with locks of their own.
const SHARDS: usize = 16;
/// Tokens in one.
const TOKENS_MAX: usize = 1024;

/// What a token was found to be.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) principal: Arc<Principal>,
    /// Unix seconds at which it was found good, less what clocks may differ by: before them it may not have been good yet.
    pub(crate) since: u64,
    /// Unix seconds from which on it is worth nothing.
    pub(crate) until: u64,
    /// Which issuer of the config.
    pub(crate) issuer: usize,
    /// Of the key set that verified it.
    pub(crate) keys: u64,
    /// Of the teams and users that it was held against.
    pub(crate) owners: u64,
}

/// Tokens found good.
#[derive(Debug)]
pub(crate) struct TokenCache(Box<[Mutex<HashMap<Digest, Found>>]>);

impl Default for TokenCache {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| Mutex::default()).collect())
    }
}

impl TokenCache {
    /// What is remembered of a token that is good at `now`.
    pub(crate) fn get(&self, token: &Digest, now: u64) -> Option<Found> {
        let shard = self.shard(token).lock().unwrap_or_else(PoisonError::into_inner);
        shard.get(token).filter(|found| (found.since..found.until).contains(&now)).cloned()
    }

    /// Remembers a token.
    pub(crate) fn put(&self, token: Digest, found: Found, now: u64) {
        let mut shard = self.shard(&token).lock().unwrap_or_else(PoisonError::into_inner);
        if shard.len() >= TOKENS_MAX {
            shard.retain(|_, found| now < found.until);
        }
        if shard.len() >= TOKENS_MAX {
            // Whoever is asked for again comes back. Which ones go is chance, by the map's own random order.
            let mut kept = 0;
            shard.retain(|_, _| {
                kept += 1;
                kept <= TOKENS_MAX / 2
            });
        }
        shard.insert(token, found);
    }

    /// Tokens remembered.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }

    fn shard(&self, token: &Digest) -> &Mutex<HashMap<Digest, Found>> {
        &self.0[usize::from(token.0[0]) % SHARDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(until: u64) -> Found {
        Found { principal: Arc::default(), since: 10, until, issuer: 0, keys: 0, owners: 0 }
    }

    #[test]
    fn entries_end_with_the_token_and_memory_is_bounded() {
        let cache = TokenCache::default();
        cache.put(Digest::of(b"a"), found(100), 10);
        assert!(cache.get(&Digest::of(b"a"), 9).is_none(), "the clock went back");
        assert!(cache.get(&Digest::of(b"a"), 99).is_some());
        assert!(cache.get(&Digest::of(b"a"), 100).is_none());
        assert!(cache.get(&Digest::of(b"b"), 10).is_none());
        for number in 0..40_000_u32 {
            cache.put(Digest::of(&number.to_be_bytes()), found(100), 0);
        }
        assert!(cache.len() <= SHARDS * TOKENS_MAX);
        assert!(cache.get(&Digest::of(&39_999_u32.to_be_bytes()), 10).is_some());
    }
}
