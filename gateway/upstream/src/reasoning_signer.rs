//! Signatures of reasoning that our own models wrote: proof that a block of reasoning that a client sends back is the one
//! that it was given.

use std::sync::Arc;

use hmac::{Hmac, Mac};
use penstock_types::request::OWN_SIGNATURE;
use sha2::Sha256;

/// Bytes of the key.
pub const KEY_BYTES: usize = 32;

/// Key of a store's gateways, and the tenant whose answers are signed. `Debug` shows neither.
#[derive(Clone)]
pub struct Signer {
    key: Arc<[u8]>,
    tenant: String,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Signer(…)")
    }
}

/// Signature in the making: text is added piece by piece.
pub struct Signing(Hmac<Sha256>);

impl Signer {
    /// Signer of one tenant's answers.
    pub fn new(key: Arc<[u8]>, tenant: &str) -> Self {
        Self { key, tenant: tenant.to_owned() }
    }

    /// Begins the signature of a text that `model` writes.
    pub fn begin(&self, model: &str) -> Signing {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key).expect("HMAC takes keys of any length");
        mac.update(b"penstock reasoning 1");
        for part in [&self.tenant, model] {
            // The length in front keeps the end of one part from being read as the beginning of the next.
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part.as_bytes());
        }
        Signing(mac)
    }

    /// Returns true if `signature` is that of this text, compared in constant time.
    pub fn is_of(&self, model: &str, text: &str, signature: &str) -> bool {
        let Some(proof) = signature.strip_prefix(OWN_SIGNATURE).and_then(bytes) else { return false };
        let mut signing = self.begin(model);
        signing.add(text);
        signing.0.verify_slice(&proof).is_ok()
    }
}

impl Signing {
    /// Adds the next piece of the text.
    pub fn add(&mut self, text: &str) {
        self.0.update(text.as_bytes());
    }

    /// Signature of the text.
    pub fn end(self) -> String {
        let proof = self.0.finalize().into_bytes();
        let hex: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{OWN_SIGNATURE}{hex}")
    }
}

/// Bytes written in lower-case hexadecimal digits.
fn bytes(hex: &str) -> Option<Vec<u8>> {
    let is_hex = hex.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let pairs = (is_hex && hex.len().is_multiple_of(2)).then(|| (0..hex.len()).step_by(2))?;
    pairs.map(|at| u8::from_str_radix(&hex[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signer(key: u8, tenant: &str) -> Signer {
        Signer::new(Arc::from([key; KEY_BYTES]), tenant)
    }

    fn signed(signer: &Signer, model: &str, pieces: &[&str]) -> String {
        let mut signing = signer.begin(model);
        pieces.iter().for_each(|piece| signing.add(piece));
        signing.end()
    }

    #[test]
    fn a_signature_is_of_one_text_of_one_model_for_one_tenant() {
        let ours = signer(1, "team");
        let signature = signed(&ours, "m", &["some ", "", "thought"]);
        assert!(ours.is_of("m", "some thought", &signature));
        assert!(signer(1, "team").is_of("m", "some thought", &signature), "another gateway of the store");
        assert!(!ours.is_of("m", "some thoughts", &signature), "altered");
        assert!(!ours.is_of("n", "some thought", &signature), "of another model");
        assert!(!signer(1, "other").is_of("m", "some thought", &signature), "of another tenant");
        assert!(!signer(2, "team").is_of("m", "some thought", &signature), "of another store");
        assert!(!signer(1, "te").is_of("amm", "some thought", &signature), "parts moved");
    }

    #[test]
    fn what_is_no_signature_proves_nothing() {
        let ours = signer(1, "");
        let signature = signed(&ours, "m", &["x"]);
        let cut = &signature[..signature.len() - 2];
        for wrong in
            ["", "penstock1.", cut, &signature.to_uppercase(), "penstock1.é", "EqQBCkYIBxgC", &format!("{signature}00")]
        {
            assert!(!ours.is_of("m", "x", wrong), "{wrong}");
        }
        assert_eq!(format!("{ours:?}"), "Signer(…)");
    }
}
