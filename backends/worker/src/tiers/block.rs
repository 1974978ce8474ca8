//! A block outside the device: a header that identifies it, and its bytes.
//!
//! ```text
//! 0 magic+version  8 hash  24 parent  40 flags  44 length  48 serial  56 checksum  72 header check  80 … 128 zero
//! ```
//! The checksum covers hash, parent and bytes and is keyed by everything that the KV depends on beside the tokens:
//! model, numerics, geometry. Tokens and the salt of the request (tenant, adapter) are in the hash, which is keyed
//! too. So a block that was torn, flipped, or written for another model, other numerics or another salt never passes
//! the check, and is not used. The header has a checksum of its own, so that an index can be rebuilt from headers
//! alone.
//!
//! Protects against accidents and mistakes, not against an attacker who knows the model and may write to the store:
//! see docs/threat-model.md.

use penstock_kv::tier::Link;
use penstock_proto::BlockHash;

/// Magic and version. Another layout gets another number, and then old blocks are not recognized.
const MAGIC: [u8; 8] = *b"PSKVBL01";

/// Length of the header before a stored block's KV, in bytes.
pub(crate) const HEADER_BYTES: usize = 128;

const HAS_PARENT: u32 = 1;

/// Identity that all blocks of one store share: model, numerics, geometry.
#[derive(Clone)]
pub(crate) struct Identity {
    key: [u8; 32],
    block_bytes: usize,
}

/// Reason why a block is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unusable {
    /// The slot's header is of another format or block size, or torn (wrong checksum).
    #[error("the slot holds no block")]
    NoBlock,
    /// The slot's header names another block than the one wanted.
    #[error("the slot holds another block")]
    Other,
    /// The bytes are damaged, or of another model or numerics.
    #[error("the checksum is wrong")]
    Checksum,
}

/// A header that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Hash of the block, and of the block before it.
    pub(crate) link: Link,
    /// Serial number of the store: later is larger.
    pub(crate) serial: u64,
    checksum: [u8; 16],
}

impl Identity {
    /// Creates the identity of blocks of `block_bytes` of a model in given numerics.
    pub(crate) fn new(model_hash: &[u8], numerics_id: &str, block_bytes: usize) -> Self {
        let mut joined = Vec::new();
        for part in [model_hash, numerics_id.as_bytes()] {
            joined.extend_from_slice(&(part.len() as u64).to_le_bytes());
            joined.extend_from_slice(part);
        }
        joined.extend_from_slice(&(block_bytes as u64).to_le_bytes());
        Self { key: blake3::derive_key("penstock 2026-11-21 KV block v1", &joined), block_bytes }
    }

    /// Bytes of one block's KV, without header.
    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Name of the identity, 32 hexadecimal digits: the same for the same model, numerics and geometry.
    pub(crate) fn name(&self) -> String {
        let digest = blake3::keyed_hash(&self.key, b"name");
        digest.to_hex()[..32].to_owned()
    }

    fn checksum(&self, link: Link, bytes: &[u8]) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&link.hash.to_bytes());
        hasher.update(&link.parent.map_or([0; 16], BlockHash::to_bytes));
        hasher.update(&[u8::from(link.parent.is_some())]);
        hasher.update(bytes);
        first(&hasher.finalize())
    }

    /// Makes the header of a block.
    pub(crate) fn seal(&self, link: Link, serial: u64, bytes: &[u8]) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..24].copy_from_slice(&link.hash.to_bytes());
        header[24..40].copy_from_slice(&link.parent.map_or([0; 16], BlockHash::to_bytes));
        header[40..44].copy_from_slice(&(if link.parent.is_some() { HAS_PARENT } else { 0 }).to_le_bytes());
        header[44..48].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        header[48..56].copy_from_slice(&serial.to_le_bytes());
        header[56..72].copy_from_slice(&self.checksum(link, bytes));
        let check: [u8; 8] = first(&blake3::keyed_hash(&self.key, &header[..72]));
        header[72..80].copy_from_slice(&check);
        header
    }

    /// Reads a header; `None` if it is not of this identity.
    pub(crate) fn parse(&self, header: &[u8]) -> Option<Header> {
        let header: &[u8; HEADER_BYTES] = header.try_into().ok()?;
        let check: [u8; 8] = first(&blake3::keyed_hash(&self.key, &header[..72]));
        let length = u32::from_le_bytes(part(header, 44));
        if part::<8>(header, 0) != MAGIC || part::<8>(header, 72) != check || length as usize != self.block_bytes {
            return None;
        }
        let hash = |at| BlockHash(u128::from_le_bytes(part(header, at)));
        let has_parent = u32::from_le_bytes(part(header, 40)) & HAS_PARENT != 0;
        Some(Header {
            link: Link { parent: has_parent.then(|| hash(24)), hash: hash(8) },
            serial: u64::from_le_bytes(part(header, 48)),
            checksum: part(header, 56),
        })
    }

    /// Whether `bytes` below `header` are the block `hash`.
    pub(crate) fn check(&self, header: &[u8], hash: BlockHash, bytes: &[u8]) -> Result<Link, Unusable> {
        let header = self.parse(header).ok_or(Unusable::NoBlock)?;
        if header.link.hash != hash {
            return Err(Unusable::Other);
        }
        if bytes.len() != self.block_bytes || self.checksum(header.link, bytes) != header.checksum {
            return Err(Unusable::Checksum);
        }
        Ok(header.link)
    }
}

fn first<const N: usize>(digest: &blake3::Hash) -> [u8; N] {
    std::array::from_fn(|i| digest.as_bytes()[i])
}

fn part<const N: usize>(header: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| header[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Link = Link { parent: Some(BlockHash(6)), hash: BlockHash(7) };

    #[test]
    fn only_what_was_sealed_is_opened() {
        let identity = Identity::new(b"model", "numerics", 64);
        let bytes = [3_u8; 64];
        let header = identity.seal(LINK, 9, &bytes);
        assert_eq!(identity.check(&header, BlockHash(7), &bytes), Ok(LINK));
        assert_eq!(identity.parse(&header).map(|header| header.serial), Some(9));
        assert_eq!(identity.check(&header, BlockHash(8), &bytes), Err(Unusable::Other));
        for bit in 0..64 * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(identity.check(&header, BlockHash(7), &flipped), Err(Unusable::Checksum), "bit {bit}");
        }
        for bit in 0..80 * 8 {
            let mut flipped = header;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(identity.check(&flipped, BlockHash(7), &bytes), Err(Unusable::NoBlock), "bit {bit}");
        }
        for cut in [0, 1, 63] {
            assert_eq!(identity.check(&header, BlockHash(7), &bytes[..cut]), Err(Unusable::Checksum));
        }
    }

    #[test]
    fn another_model_numerics_or_size_is_another_identity() {
        let identity = Identity::new(b"model", "numerics", 64);
        let header = identity.seal(LINK, 0, &[3; 64]);
        let others = [
            Identity::new(b"mode", "lnumerics", 64),
            Identity::new(b"model", "other", 64),
            Identity::new(b"model", "numerics", 32),
        ];
        for other in others {
            assert_eq!(other.check(&header, BlockHash(7), &[3; 64]), Err(Unusable::NoBlock));
            assert_ne!(other.name(), identity.name());
        }
    }
}
