//! Tokens of identity providers (JWT, OpenID Connect).
//!
//! [`token`] takes one apart and says whether it is genuine, [`jwks`] reads the keys that decide that, [`ring`] holds them and
//! [`fetch`] gets them, [`issuer`] says what a genuine token's user may do, [`cache`] spares a known token the signature.
//!
//! The key decides the algorithm: nothing that a token says about itself chooses how it is verified. `kid` is looked up and nothing
//! else; `jku`, `jwk`, `x5u`, `x5c` are not looked at; `crit` is refused.

pub(super) mod cache;
mod fetch;
pub(super) mod issuer;
pub(super) mod jwks;
pub(super) mod ring;
pub(super) mod token;

pub(crate) use fetch::file;
pub(super) use fetch::keep;
pub use issuer::{IssuerConfig, KeySource};

/// Names of the algorithms that can be allowed. Not among them: `none`, and HMAC, whose key would have to be shared.
pub(crate) fn algorithm(name: &str) -> Option<jsonwebtoken::Algorithm> {
    use jsonwebtoken::Algorithm::*;
    Some(match name {
        "RS256" => RS256,
        "RS384" => RS384,
        "RS512" => RS512,
        "PS256" => PS256,
        "PS384" => PS384,
        "PS512" => PS512,
        "ES256" => ES256,
        "ES384" => ES384,
        // RFC 9864 calls it by its curve.
        "EdDSA" | "Ed25519" => EdDSA,
        _ => return None,
    })
}

/// Whether that credential can only be meant as a token: three parts, the first an object.
pub(super) fn is_token(secret: &[u8]) -> bool {
    secret.starts_with(b"eyJ") && memchr::memchr_iter(b'.', secret).count() == 2
}
