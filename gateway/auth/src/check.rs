//! Fuzz checks of the credential parsers: invariants that hold for any bytes. The proxy's module
//! `untrusted` calls them.

use std::net::{IpAddr, Ipv4Addr};

use http::{HeaderMap, HeaderValue};
use jsonwebtoken::Algorithm;

use super::credential::{CREDENTIAL_BYTES_MAX, Given, client, given};
use super::jwt::jwks::{KEYS_MAX, KeySet, SET_BYTES_MAX};
use super::jwt::token::Unverified;

/// Example key of RFC 8037 (appendix A): no fuzz input is signed with it by chance.
const KEYS: &[u8] = br#"{"keys":[{"kty":"OKP","crv":"Ed25519","use":"sig","alg":"EdDSA","kid":"d","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}"#;
const ALGORITHMS: [Algorithm; 3] = [Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA];

/// Checks that `given` finds at most one credential, within the length limit, and rejects a second one.
pub fn check_credential(target: &str, headers: &HeaderMap) {
    let found = given(target, headers);
    if let Given::One(key) = &found {
        assert!(!key.is_empty() && key.len() <= CREDENTIAL_BYTES_MAX, "a key of {} bytes", key.len());
    }
    if found != Given::None {
        let mut twice = headers.clone();
        twice.append("x-api-key", HeaderValue::from_static("another"));
        assert_eq!(given(target, &twice), Given::Unusable, "two readers could take different ones");
    }
}

/// Checks that only a trusted proxy's `X-Forwarded-For` decides the client's address.
pub fn check_address(headers: &HeaderMap) {
    let stranger = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    let trusted = ["10.0.0.0/8".parse().expect("a network")];
    assert_eq!(client(Some(stranger), headers, &trusted), Some(stranger));
    assert_eq!(client(None, headers, &trusted), None);
    assert!(client(Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1))), headers, &trusted).is_some());
}

/// Checks that no input verifies as a token of `KEYS`.
pub fn check_token(bytes: &[u8]) {
    let keys = KeySet::parse(KEYS, &ALGORITHMS).expect("a set");
    if let Ok(unverified) = Unverified::parse(bytes) {
        let _ = unverified.issuer();
        assert!(unverified.verify(&keys).is_err(), "a token that nobody signed");
    }
}

/// Checks that a parsed key set stays within its bounds of keys and bytes.
pub fn check_key_set(bytes: &[u8]) {
    if let Ok(set) = KeySet::parse(bytes, &ALGORITHMS) {
        assert!(set.len() >= 1 && set.len() <= KEYS_MAX && bytes.len() <= SET_BYTES_MAX);
    }
}
