//! JSON Web Key Sets (RFC 7517): the public keys that an identity provider signs with.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey};
use serde::Deserialize;

use super::algorithm;

/// Largest accepted key set in bytes: a hundred large RSA keys with certificates.
pub(crate) const SET_BYTES_MAX: usize = 256 * 1024;
/// Most keys that are kept of one JWKS; further ones are ignored.
pub(crate) const KEYS_MAX: usize = 100;
/// Longest key id (`kid`) of a JWKS entry, in bytes; a key with a longer one is left out.
const KID_BYTES_MAX: usize = 512;
/// Smallest and largest RSA modulus in bytes: 2,048 bits (NIST's minimum) to 4,096 bits (the library's maximum).
const MODULUS_BYTES: std::ops::RangeInclusive<usize> = 256..=512;

/// Public key of an issuer, with its `kid` and the one algorithm that it verifies.
pub(super) struct SignatureKey {
    kid: Option<String>,
    pub(super) algorithm: Algorithm,
    pub(super) key: DecodingKey,
}

/// Usable signing keys of one issuer: at least one, at most [`KEYS_MAX`].
pub(crate) struct KeySet(Vec<SignatureKey>);

impl std::fmt::Debug for KeySet {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "KeySet of {}", self.0.len())
    }
}

#[derive(Deserialize)]
struct RawSet<'a> {
    #[serde(borrow)]
    keys: Vec<&'a serde_json::value::RawValue>,
}

#[derive(Deserialize)]
struct RawKey {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    key_ops: Option<Vec<String>>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

impl KeySet {
    /// Parses a key set; keys that are not for signatures, or not of an allowed algorithm, are left out.
    ///
    /// # Errors
    /// The set is too large, is no key set, or has no usable key; the text repeats none of its content.
    pub(crate) fn parse(bytes: &[u8], allowed: &[Algorithm]) -> Result<Self, String> {
        if bytes.len() > SET_BYTES_MAX {
            return Err(format!("the key set is larger than {SET_BYTES_MAX} bytes"));
        }
        let set: RawSet<'_> =
            serde_json::from_slice(bytes).map_err(|_| "the answer is not a JSON Web Key Set".to_owned())?;
        let one = |raw: &&serde_json::value::RawValue| read(serde_json::from_str(raw.get()).ok()?, allowed);
        let keys: Vec<_> = set.keys.iter().filter_map(one).take(KEYS_MAX).collect();
        if keys.is_empty() {
            return Err("none of its keys is for signatures of an allowed algorithm".into());
        }
        Ok(Self(keys))
    }

    /// Key with the key id `kid`; without a `kid`, the key if the set has only one.
    pub(super) fn find(&self, kid: Option<&str>) -> Option<&SignatureKey> {
        match (kid, self.0.as_slice()) {
            (Some(kid), keys) => keys.iter().find(|key| key.kid.as_deref() == Some(kid)),
            (None, [only]) => Some(only),
            (None, _) => None,
        }
    }

    /// Number of usable keys in the set, for the log.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

fn read(raw: RawKey, allowed: &[Algorithm]) -> Option<SignatureKey> {
    if raw.purpose.as_deref().is_some_and(|purpose| purpose != "sig") {
        return None;
    }
    if raw.key_ops.as_ref().is_some_and(|ops| ops.iter().all(|op| op != "verify")) {
        return None;
    }
    if raw.kid.as_ref().is_some_and(|kid| kid.len() > KID_BYTES_MAX) {
        return None;
    }
    let named = match raw.alg.as_deref() {
        Some(name) => Some(algorithm(name)?),
        None => None,
    };
    let (algorithm, key) = match (raw.kty.as_str(), raw.crv.as_deref()) {
        ("RSA", _) => {
            let algorithm = named.unwrap_or(Algorithm::RS256);
            let (modulus, exponent) = (bytes_of(raw.n)?, bytes_of(raw.e)?);
            let modulus = strip(&modulus);
            if !is_rsa(algorithm) || !MODULUS_BYTES.contains(&modulus.len()) || strip(&exponent).len() > 8 {
                return None;
            }
            (algorithm, DecodingKey::from_rsa_raw_components(modulus, &exponent))
        }
        ("EC", Some("P-256")) => (Algorithm::ES256, DecodingKey::from_ec_components(&raw.x?, &raw.y?).ok()?),
        ("EC", Some("P-384")) => (Algorithm::ES384, DecodingKey::from_ec_components(&raw.x?, &raw.y?).ok()?),
        ("OKP", Some("Ed25519")) => (Algorithm::EdDSA, DecodingKey::from_ed_components(&raw.x?).ok()?),
        _ => return None,
    };
    let agrees = named.is_none_or(|named| named == algorithm) && allowed.contains(&algorithm);
    agrees.then_some(SignatureKey { kid: raw.kid, algorithm, key })
}

fn is_rsa(algorithm: Algorithm) -> bool {
    use Algorithm::*;
    matches!(algorithm, RS256 | RS384 | RS512 | PS256 | PS384 | PS512)
}

fn bytes_of(text: Option<String>) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text?).ok()
}

/// Big-endian number without its leading zero bytes.
fn strip(number: &[u8]) -> &[u8] {
    &number[number.iter().take_while(|byte| **byte == 0).count()..]
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Algorithm; 3] = [Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA];

    fn n(bytes: usize) -> String {
        URL_SAFE_NO_PAD.encode(vec![0xc5; bytes])
    }

    #[track_caller]
    fn check(key: &str, expected: Option<Algorithm>) {
        let set = KeySet::parse(format!(r#"{{"keys":[{{"kid":"k",{key}}}]}}"#).as_bytes(), &ALL).ok();
        let found = set.as_ref().and_then(|set| set.find(Some("k"))).map(|key| key.algorithm);
        assert_eq!(found, expected, "{key}");
    }

    #[test]
    fn the_key_says_its_algorithm() {
        let rsa = format!(r#""kty":"RSA","n":"{}","e":"AQAB""#, n(256));
        check(&rsa, Some(Algorithm::RS256));
        check(&format!(r#"{rsa},"alg":"RS256","use":"sig","key_ops":["verify"]"#), Some(Algorithm::RS256));
        check(&format!(r#"{rsa},"alg":"RS512""#), None);
        check(&format!(r#"{rsa},"alg":"HS256""#), None);
        check(&format!(r#"{rsa},"alg":"none""#), None);
        check(&format!(r#"{rsa},"alg":"ES256""#), None);
        check(&format!(r#"{rsa},"use":"enc""#), None);
        check(&format!(r#"{rsa},"key_ops":["sign"]"#), None);
        check(&format!(r#""kty":"RSA","n":"{}","e":"AQAB""#, n(128)), None);
        check(&format!(r#""kty":"RSA","n":"{}","e":"AQAB""#, n(1024)), None);
        check(r#""kty":"oct","k":"c2VjcmV0","alg":"HS256""#, None);
        let point = n(32);
        check(&format!(r#""kty":"EC","crv":"P-256","x":"{point}","y":"{point}""#), Some(Algorithm::ES256));
        check(&format!(r#""kty":"EC","crv":"P-256","x":"{point}","y":"{point}","alg":"ES384""#), None);
        check(&format!(r#""kty":"EC","crv":"secp256k1","x":"{point}","y":"{point}""#), None);
        check(&format!(r#""kty":"OKP","crv":"Ed25519","x":"{point}","alg":"Ed25519""#), Some(Algorithm::EdDSA));
        check(&format!(r#""kty":"OKP","crv":"X25519","x":"{point}""#), None);
    }

    #[test]
    fn sets_are_bounded_and_a_bad_key_does_not_spoil_the_others() {
        let good = format!(r#"{{"kty":"RSA","n":"{}","e":"AQAB"}}"#, n(256));
        let set = |keys: &str| KeySet::parse(format!(r#"{{"keys":[{keys}]}}"#).as_bytes(), &ALL);
        assert_eq!(set(&format!(r#"{{"kty":7}},null,{good}"#)).expect("one").len(), 1);
        assert!(set(&good).expect("one").find(None).is_some(), "the only one needs no name");
        assert!(set(&format!("{good},{good}")).expect("two").find(None).is_none());
        assert!(set("").is_err() && KeySet::parse(b"[]", &ALL).is_err() && KeySet::parse(b"<html>", &ALL).is_err());
        assert_eq!(set(&vec![good; 300].join(",")).expect("many").len(), KEYS_MAX);
        assert!(KeySet::parse(&vec![b' '; SET_BYTES_MAX + 1], &ALL).is_err());
    }
}
