//! Block hash: chained, keyed, 128 bits; the only one in the program.
//!
//! `hash(block i) = BLAKE3-keyed(key, hash(block i-1) ‖ tokens of block i)`, truncated to 128 bits. The key is derived from
//! the salt of the request (tenant, model, adapter, numerics), so two tenants never share a hash and the hash that routes
//! is the hash that stores. Chained: equal hashes mean equal prefixes, not only equal blocks.

use crate::BLOCK_TOKENS;

/// Name of one sealed block together with everything before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u128);

impl BlockHash {
    /// Bytes on the wire: 16, little-endian.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    /// Hash from the 16 bytes on the wire; `None` for another length.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(u128::from_le_bytes(bytes.try_into().ok()?)))
    }
}

impl std::fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Hasher of blocks under one salt.
#[derive(Clone)]
pub struct BlockHasher {
    key: [u8; 32],
}

impl BlockHasher {
    /// Creates the hasher for one salt. `salt` is any bytes; equal salts give equal hashes.
    pub fn new(salt: &[u8]) -> Self {
        Self { key: blake3::derive_key("penstock 2026-11-21 block hash v1", salt) }
    }

    /// Creates the hasher of one request on one worker: the request's salt and the worker's numerics id, with lengths,
    /// so that no two pairs share a key. Router and engine both use it, so the hash that routes is the hash that
    /// stores.
    pub fn for_request(salt: &[u8], numerics_id: &str) -> Self {
        let mut joined = Vec::with_capacity(16 + salt.len() + numerics_id.len());
        joined.extend_from_slice(&(salt.len() as u64).to_le_bytes());
        joined.extend_from_slice(salt);
        joined.extend_from_slice(numerics_id.as_bytes());
        Self::new(&joined)
    }

    /// Hash of the block that follows `parent` (`None` for the first) and holds `tokens`.
    ///
    /// # Panics
    /// If `tokens` is not exactly [`BLOCK_TOKENS`] long: only full blocks have a name.
    pub fn block(&self, parent: Option<BlockHash>, tokens: &[u32]) -> BlockHash {
        assert_eq!(tokens.len(), BLOCK_TOKENS, "only full blocks are hashed");
        let mut bytes = [0_u8; 16 + BLOCK_TOKENS * 4];
        bytes[..16].copy_from_slice(&parent.map_or([0; 16], BlockHash::to_bytes));
        for (chunk, token) in bytes[16..].chunks_exact_mut(4).zip(tokens) {
            chunk.copy_from_slice(&token.to_le_bytes());
        }
        let digest = blake3::keyed_hash(&self.key, &bytes);
        let mut head = [0_u8; 16];
        head.copy_from_slice(&digest.as_bytes()[..16]);
        BlockHash(u128::from_le_bytes(head))
    }

    /// Hashes of all full blocks of `tokens`, in order. Cost: one BLAKE3 of 144 bytes per block.
    pub fn chain(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let mut parent = None;
        tokens
            .chunks_exact(BLOCK_TOKENS)
            .map(|block| {
                let hash = self.block(parent, block);
                parent = Some(hash);
                hash
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_names_the_whole_prefix() {
        let hasher = BlockHasher::new(b"tenant-a");
        let one: Vec<u32> = (0..64).collect();
        let mut two = one.clone();
        two[0] = 99;
        let (one, two) = (hasher.chain(&one), hasher.chain(&two));
        assert_eq!(one.len(), 2);
        assert_ne!(one[0], two[0]);
        assert_ne!(one[1], two[1], "the second block is equal, its prefix is not");
    }

    #[test]
    fn salts_do_not_share() {
        let tokens: Vec<u32> = (0..32).collect();
        assert_ne!(BlockHasher::new(b"a").chain(&tokens), BlockHasher::new(b"b").chain(&tokens));
    }

    #[test]
    fn partial_blocks_have_no_name() {
        assert!(BlockHasher::new(b"").chain(&[1; 31]).is_empty());
        assert_eq!(BlockHasher::new(b"").chain(&[1; 63]).len(), 1);
    }
}
