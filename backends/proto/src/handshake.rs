//! Proof of the pool key on connections that the operating system does not already guard (TCP).
//!
//! ```text
//! gateway → worker   Hello     nonce_g
//! worker → gateway   Challenge nonce_w, HMAC(key, "worker"  ‖ nonce_g ‖ nonce_w)
//! gateway → worker   Proof              HMAC(key, "gateway" ‖ nonce_g ‖ nonce_w)
//! ```
//!
//! A KV transfer begins in the same way, with a Greeting in place of the Hello, and labels of its own.
//!
//! Both ends prove the key, neither reveals it, and the labels keep one proof from being replayed as the other. Nonces
//! come in as arguments: this file draws no random numbers. The handshake authenticates the connection's beginning,
//! not each frame: an untrusted network needs TLS or a tunnel below.

use hmac::{Hmac, Mac};
use prost::Message;
use sha2::Sha256;

/// Length of a nonce in bytes, exactly.
pub const NONCE_BYTES: usize = 32;

/// Shortest key that is accepted, in bytes.
pub const KEY_BYTES_MIN: usize = 16;

/// Longest key file that is accepted, in bytes.
pub const KEY_BYTES_MAX: usize = 4096;

/// Challenge of the listening end: asks for a proof of the key, and contains its own proof.
#[derive(Clone, PartialEq, Message)]
pub struct Challenge {
    /// Random bytes that the peer's proof must cover.
    #[prost(bytes = "vec", tag = "1")]
    pub nonce: Vec<u8>,
    /// [`PoolKey::proof`] of the listening end.
    #[prost(bytes = "vec", tag = "2")]
    pub proof: Vec<u8>,
}

/// Answer to [`Challenge`]: the connecting end's proof that it has the pool key.
#[derive(Clone, PartialEq, Message)]
pub struct Proof {
    /// [`PoolKey::proof`] of the connecting end.
    #[prost(bytes = "vec", tag = "1")]
    pub proof: Vec<u8>,
}

/// Role of the end that makes a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Gateway: the connecting end of a session.
    Gateway,
    /// Worker: the listening end of a session.
    Worker,
    /// End of a transfer that asks for KV.
    Asker,
    /// End of a transfer that holds the KV.
    Holder,
}

impl Side {
    fn label(self) -> &'static [u8] {
        match self {
            Side::Gateway => b"penstock 1 gateway",
            Side::Worker => b"penstock 1 worker",
            Side::Asker => b"penstock 1 kv asker",
            Side::Holder => b"penstock 1 kv holder",
        }
    }
}

/// Error of a key that is too short or too long.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("pool key has {bytes} bytes, needs {KEY_BYTES_MIN} to {KEY_BYTES_MAX}")]
pub struct KeyLength {
    /// Length of the key found, in bytes.
    pub bytes: usize,
}

/// Secret shared by all members of a pool. `Debug` does not show it.
#[derive(Clone)]
pub struct PoolKey {
    bytes: Vec<u8>,
}

impl std::fmt::Debug for PoolKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PoolKey(…)")
    }
}

impl PoolKey {
    /// Makes a key from the bytes of its file; white space at both ends is ignored.
    ///
    /// # Errors
    /// [`KeyLength`] outside the limits.
    pub fn new(file: &[u8]) -> Result<Self, KeyLength> {
        let bytes = file.trim_ascii();
        if !(KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&bytes.len()) {
            return Err(KeyLength { bytes: bytes.len() });
        }
        Ok(Self { bytes: bytes.to_vec() })
    }

    /// Proof of `side` over both nonces, 32 bytes.
    pub fn proof(&self, side: Side, nonce_gateway: &[u8], nonce_worker: &[u8]) -> Vec<u8> {
        self.mac(side, nonce_gateway, nonce_worker).finalize().into_bytes().to_vec()
    }

    /// Returns true if `proof` is that of `side`, compared in constant time. Nonces of the wrong length never verify, so an
    /// empty or short one cannot weaken the proof.
    pub fn verify(&self, side: Side, nonce_gateway: &[u8], nonce_worker: &[u8], proof: &[u8]) -> bool {
        nonce_gateway.len() == NONCE_BYTES
            && nonce_worker.len() == NONCE_BYTES
            && self.mac(side, nonce_gateway, nonce_worker).verify_slice(proof).is_ok()
    }

    fn mac(&self, side: Side, nonce_gateway: &[u8], nonce_worker: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.bytes).expect("HMAC takes keys of any length");
        mac.update(side.label());
        mac.update(nonce_gateway);
        mac.update(nonce_worker);
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: [u8; NONCE_BYTES] = [1; NONCE_BYTES];
    const W: [u8; NONCE_BYTES] = [2; NONCE_BYTES];

    fn key(text: &str) -> PoolKey {
        PoolKey::new(text.as_bytes()).expect("long enough")
    }

    #[test]
    fn both_sides_agree_when_the_key_is_the_same() {
        let file = key("0123456789abcdef\n");
        let typed = key("0123456789abcdef");
        for side in [Side::Gateway, Side::Worker, Side::Asker, Side::Holder] {
            assert!(typed.verify(side, &G, &W, &file.proof(side, &G, &W)));
        }
    }

    #[test]
    fn no_proof_serves_for_another_key_side_or_nonce() {
        let ours = key("0123456789abcdef");
        let proof = ours.proof(Side::Gateway, &G, &W);
        assert!(!key("0123456789abcdeg").verify(Side::Gateway, &G, &W, &proof));
        assert!(!ours.verify(Side::Worker, &G, &W, &proof), "reflected");
        assert!(!ours.verify(Side::Asker, &G, &W, &proof), "of a session, at a transfer");
        assert!(!ours.verify(Side::Gateway, &W, &G, &proof), "swapped");
        assert!(!ours.verify(Side::Gateway, &G, &G, &proof), "replayed");
        assert!(!ours.verify(Side::Gateway, &G, &W, &proof[..31]), "truncated");
        assert!(!ours.verify(Side::Gateway, &G, &W, &[]), "empty");
    }

    #[test]
    fn short_nonces_never_verify() {
        let ours = key("0123456789abcdef");
        assert!(!ours.verify(Side::Gateway, &[], &W, &ours.proof(Side::Gateway, &[], &W)));
        assert!(!ours.verify(Side::Gateway, &G, &[2; 31], &ours.proof(Side::Gateway, &G, &[2; 31])));
    }

    #[test]
    fn weak_and_absurd_keys_are_refused() {
        assert_eq!(PoolKey::new(b" short \n").err(), Some(KeyLength { bytes: 5 }));
        assert!(PoolKey::new(&[b'x'; KEY_BYTES_MAX + 1]).is_err());
        assert_eq!(format!("{:?}", key("0123456789abcdef")), "PoolKey(…)");
    }
}
