//! Cache of verified tokens, by the SHA-256 of the whole token, until they expire.
//!
//! A hit costs one hash of the token and one short lock; a miss costs a signature check. An entry is valid only for the
//! key set and directory version that it was verified with: when the issuer drops a key or a team is blocked, its
//! entries end with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::key::Digest;
use crate::principal::Principal;

/// Shards of the cache, each with its own lock.
const SHARDS: usize = 16;
/// Most tokens in one of the 16 shards; beyond it, expired tokens go first, then about half at random.
const TOKENS_MAX: usize = 1024;

/// Cache entry of a verified token: its principal, the times between which it counts, and what it was checked against.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) principal: Arc<Principal>,
    /// Start of validity in Unix seconds: the time of verification less the clock leeway. A clock that jumps back
    /// before it misses.
    pub(crate) since: u64,
    /// End of the token's validity in Unix seconds (exclusive), the clock leeway included.
    pub(crate) until: u64,
    /// Index of the token's issuer among the issuers of the config.
    pub(crate) issuer: usize,
    /// Number of the issuer's key set that verified the token; another number makes the entry invalid.
    pub(crate) keys: u64,
    /// Directory version of the teams and users that the token was checked against.
    pub(crate) owners: u64,
}

/// Verified tokens by the SHA-256 of the whole token, in 16 shards with a lock each.
#[derive(Debug)]
pub(crate) struct TokenCache(Box<[Mutex<HashMap<Digest, Found>>]>);

impl Default for TokenCache {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| Mutex::default()).collect())
    }
}

impl TokenCache {
    /// Entry of a token that is valid at `now` (Unix seconds).
    pub(crate) fn get(&self, token: &Digest, now: u64) -> Option<Found> {
        let shard = self.shard(token).lock().unwrap_or_else(PoisonError::into_inner);
        shard.get(token).filter(|found| (found.since..found.until).contains(&now)).cloned()
    }

    /// Adds a token. A full shard first drops expired tokens, and if it is still full, about half of its entries at
    /// random.
    pub(crate) fn put(&self, token: Digest, found: Found, now: u64) {
        let mut shard = self.shard(&token).lock().unwrap_or_else(PoisonError::into_inner);
        if shard.len() >= TOKENS_MAX {
            shard.retain(|_, found| now < found.until);
        }
        if shard.len() >= TOKENS_MAX {
            // Tokens in use come back with the next request. The eviction is random because the map's order is.
            let mut kept = 0;
            shard.retain(|_, _| {
                kept += 1;
                kept <= TOKENS_MAX / 2
            });
        }
        shard.insert(token, found);
    }

    /// Number of cached tokens over all shards, expired ones included, for the gauge.
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
