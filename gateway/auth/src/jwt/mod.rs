//! Tokens of identity providers (JWT, OpenID Connect).
//!
//! `token` parses and verifies one token, `jwks` parses the signing keys, `ring` holds the keys of an issuer and
//! `fetch` refreshes them, `issuer` maps claims to a user's rights, and `cache` spares a token seen before the
//! signature check. `sign_on` is the client of an identity provider at which people sign in,
//! `grant` reads their groups again later, and `logout` reads what the provider says when they sign out there.
//!
//! The key decides the algorithm: nothing in a token chooses how it is verified. Of the header, `kid` selects the key
//! and `alg` must agree with it; `jku`, `jwk`, `x5u` and `x5c` are ignored, and a token with `crit` is refused.

pub(super) mod cache;
mod fetch;
mod grant;
pub(super) mod issuer;
pub(super) mod jwks;
mod logout;
pub(super) mod ring;
mod sign_on;
pub(super) mod token;

pub use fetch::file;
pub(super) use fetch::keep;
pub use grant::{Grant, RenewalFault};
pub use issuer::{IssuerConfig, KeySource};
pub use logout::{LOGOUT_BYTES_MAX, RecentKeys, SignedOut};
pub use sign_on::{Binding, CODE_BYTES_MAX, ClientAuth, Endpoints, Person, Provider, RESERVED, SignOnFault, SignedOn};

/// Algorithm of that name, if it can be allowed. `none` is not among them, nor is HMAC, whose key would have to be
/// shared.
pub fn algorithm(name: &str) -> Option<jsonwebtoken::Algorithm> {
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
        // RFC 9864 names the algorithm by its curve.
        "EdDSA" | "Ed25519" => EdDSA,
        _ => return None,
    })
}

/// Returns true if a credential has the form of a token: three parts, the first of them a JSON object.
pub(super) fn is_token(secret: &[u8]) -> bool {
    secret.starts_with(b"eyJ") && memchr::memchr_iter(b'.', secret).count() == 2
}
