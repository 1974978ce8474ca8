//! Parsing and verification of one token (RFC 7519, RFC 8725).
//!
//! A parsed token is an [`Unverified`]; only [`Unverified::verify`] turns it into [`Claims`].

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::algorithm;
use super::jwks::KeySet;

/// Tolerated difference in seconds between the issuer's clock and ours, for `exp`, `nbf` and `iat`.
pub(crate) const LEEWAY_SECONDS: u64 = 60;
/// Longest claim in bytes that names a user; a longer one is refused.
const NAME_BYTES_MAX: usize = 256;

/// Reason why a JSON Web Token is refused; its `Display` text completes a sentence about the token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Not a token: not three parts, not JSON, or a name twice in an object.
    Malformed,
    /// Header with `crit`: it requires extensions that are not implemented.
    Critical,
    /// `typ` that is not an access token's.
    Type,
    /// `iss` that the config does not have.
    Issuer,
    /// No key of the issuer has that `kid`.
    Key,
    /// `alg` of the header that is not the one of the issuer's key.
    Algorithm,
    /// Signature that the key does not verify.
    Signature,
    /// `aud` without one of the accepted audiences.
    Audience,
    /// `exp` that lies in the past, the leeway of [`LEEWAY_SECONDS`] included.
    Expired,
    /// `nbf` or `iat` that lies further in the future than the leeway.
    Early,
    /// Claim that is missing, of the wrong type, or not what the config requires; the text begins with its name.
    Claim(String),
}

impl Flaw {
    /// Value of the label `reason` in the metric of authentication failures.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Flaw::Malformed => "token_malformed",
            Flaw::Critical => "token_critical",
            Flaw::Type => "token_type",
            Flaw::Issuer => "token_issuer",
            Flaw::Key => "token_key",
            Flaw::Algorithm => "token_algorithm",
            Flaw::Signature => "token_signature",
            Flaw::Audience => "token_audience",
            Flaw::Expired => "token_expired",
            Flaw::Early => "token_early",
            Flaw::Claim(_) => "token_claim",
        }
    }

    /// Returns true if the token may be made up, so that it counts as a failed attempt of its address.
    pub(crate) fn is_guess(&self) -> bool {
        matches!(self, Flaw::Malformed | Flaw::Critical | Flaw::Issuer | Flaw::Key | Flaw::Algorithm | Flaw::Signature)
    }
}

impl fmt::Display for Flaw {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Flaw::Malformed => "it is not a JSON Web Token",
            Flaw::Critical => "it has critical header fields, which are not understood here",
            Flaw::Type => "it is no access token",
            Flaw::Issuer => "its issuer is not known here",
            Flaw::Key => "its key is not one of its issuer's",
            Flaw::Algorithm => "its algorithm is not its key's",
            Flaw::Signature => "its signature is wrong",
            Flaw::Audience => "it is for another audience",
            Flaw::Expired => "it has expired: sign in again",
            Flaw::Early => "it is not valid yet",
            Flaw::Claim(what) => return write!(out, "its claim {what}"),
        })
    }
}

/// Token split into header, claims and signature, of which nothing is verified yet.
pub(crate) struct Unverified<'a> {
    header: Map<String, Value>,
    claims: Map<String, Value>,
    message: &'a [u8],
    signature: &'a str,
}

/// Claims of a token whose signature is verified; audience and times are checked by [`Claims::check`].
#[derive(Debug)]
pub(crate) struct Claims(Map<String, Value>);

impl<'a> Unverified<'a> {
    /// Splits a token at its dots and decodes header and claims; verifies nothing.
    pub(crate) fn parse(token: &'a [u8]) -> Result<Self, Flaw> {
        let text = std::str::from_utf8(token).map_err(|_| Flaw::Malformed)?;
        let (message, signature) = text.rsplit_once('.').ok_or(Flaw::Malformed)?;
        let (header, claims) = message.split_once('.').ok_or(Flaw::Malformed)?;
        Ok(Self { header: object(header)?, claims: object(claims)?, message: message.as_bytes(), signature })
    }

    /// Claimed issuer (`iss`), not yet verified.
    pub(crate) fn issuer(&self) -> Option<&str> {
        self.claims.get("iss")?.as_str()
    }

    /// Verifies `crit`, `kid`, `alg`, `typ` and the signature against the issuer's `keys`, for a token that is sent to an API, or names
    /// who has signed in.
    pub(crate) fn verify(self, keys: &KeySet) -> Result<Claims, Flaw> {
        self.verify_type(keys, is_access_token)
    }

    /// Verifies as [`Self::verify`] does, for a token that says who has signed out.
    pub(super) fn verify_logout(self, keys: &KeySet) -> Result<Claims, Flaw> {
        self.verify_type(keys, is_logout_token)
    }

    fn verify_type(self, keys: &KeySet, is_type: fn(&str) -> bool) -> Result<Claims, Flaw> {
        if self.header.contains_key("crit") {
            return Err(Flaw::Critical);
        }
        let text = |name: &str| match self.header.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.as_str())),
            Some(_) => Err(Flaw::Malformed),
        };
        let key = keys.find(text("kid")?).ok_or(Flaw::Key)?;
        if text("alg")?.and_then(algorithm) != Some(key.algorithm) {
            return Err(Flaw::Algorithm);
        }
        if !text("typ")?.is_none_or(is_type) {
            return Err(Flaw::Type);
        }
        match jsonwebtoken::crypto::verify(self.signature, self.message, &key.key, key.algorithm) {
            Ok(true) => Ok(Claims(self.claims)),
            Ok(false) | Err(_) => Err(Flaw::Signature),
        }
    }
}

/// Returns true if a `typ` is that of a token sent to an API: a plain JWT, or RFC 9068's access token. Logout tokens and proofs
/// must not pass for one.
fn is_access_token(name: &str) -> bool {
    let name = name.strip_prefix("application/").unwrap_or(name);
    name.eq_ignore_ascii_case("jwt") || name.eq_ignore_ascii_case("at+jwt")
}

/// Returns true if a `typ` is that of a logout token; older providers write a plain JWT's.
fn is_logout_token(name: &str) -> bool {
    let name = name.strip_prefix("application/").unwrap_or(name);
    name.eq_ignore_ascii_case("jwt") || name.eq_ignore_ascii_case("logout+jwt")
}

impl Claims {
    /// Claims that no signature vouches for: those that the provider tells over its own TLS connection.
    pub(super) fn of(claims: Map<String, Value>) -> Self {
        Self(claims)
    }

    /// Checks audience and times at `now` (Unix seconds); returns the Unix second at which the token ends, leeway
    /// included.
    pub(crate) fn check(&self, audiences: &[String], now: u64) -> Result<u64, Flaw> {
        self.check_audience(audiences)?;
        let until = self.until()?.ok_or_else(|| Flaw::Claim("exp is missing".into()))?;
        self.check_times(now)?;
        Ok(until)
    }

    /// Checks that the token is for one of `audiences`.
    pub(super) fn check_audience(&self, audiences: &[String]) -> Result<(), Flaw> {
        let is_ours = |audience: &str| audiences.iter().any(|ours| ours == audience);
        let fits = match self.0.get("aud") {
            Some(Value::String(audience)) => is_ours(audience),
            Some(Value::Array(all)) => {
                all.iter().all(Value::is_string) && all.iter().filter_map(Value::as_str).any(is_ours)
            }
            _ => false,
        };
        if fits { Ok(()) } else { Err(Flaw::Audience) }
    }

    /// Unix second at which the token ends, leeway included; `None`: it does not say.
    fn until(&self) -> Result<Option<u64>, Flaw> {
        Ok(self.moment("exp")?.map(|expires| (expires + LEEWAY_SECONDS as f64).ceil() as u64))
    }

    /// Checks the times that the token has at `now` (Unix seconds).
    pub(super) fn check_times(&self, now: u64) -> Result<(), Flaw> {
        if self.until()?.is_some_and(|until| now >= until) {
            return Err(Flaw::Expired);
        }
        let latest = (now + LEEWAY_SECONDS) as f64;
        for name in ["nbf", "iat"] {
            if self.moment(name)?.is_some_and(|moment| moment > latest) {
                return Err(Flaw::Early);
            }
        }
        Ok(())
    }

    /// Time claim in Unix seconds; it must be a number.
    pub(super) fn moment(&self, name: &str) -> Result<Option<f64>, Flaw> {
        match self.0.get(name) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|seconds| (0.0..1e15).contains(seconds)) {
                Some(seconds) => Ok(Some(seconds)),
                None => Err(Flaw::Claim(format!("{name} is no time"))),
            },
        }
    }

    /// Claim at `path`: a name as it is, or names separated by dots that lead into nested objects.
    pub(super) fn find(&self, path: &str) -> Option<&Value> {
        if let Some(value) = self.0.get(path) {
            return Some(value);
        }
        let mut names = path.split('.');
        let first = self.0.get(names.next()?)?;
        names.try_fold(first, |value, name| value.as_object()?.get(name))
    }

    /// Text claim that names a user: not empty, bounded, without control characters.
    pub(super) fn name(&self, path: &str) -> Option<&str> {
        let fits = |text: &&str| (1..=NAME_BYTES_MAX).contains(&text.len()) && !text.contains(char::is_control);
        self.find(path)?.as_str().filter(fits)
    }

    /// Texts of a claim: a list, or one text separated by spaces, as `scope` is.
    pub(super) fn words(&self, path: &str) -> Option<Vec<&str>> {
        match self.find(path)? {
            Value::String(text) => Some(text.split(' ').filter(|word| !word.is_empty()).collect()),
            Value::Array(all) => all.iter().map(Value::as_str).collect(),
            _ => None,
        }
    }

    /// Texts of a claim: a list, or one text taken whole.
    pub(super) fn list(&self, path: &str) -> Option<Vec<&str>> {
        match self.find(path)? {
            Value::String(text) => Some(vec![text]),
            Value::Array(all) => all.iter().map(Value::as_str).collect(),
            _ => None,
        }
    }

    /// Returns true if the claim at `path` is `text`, or is a list or space-separated text that contains it.
    pub(super) fn has(&self, path: &str, text: &str) -> bool {
        match self.find(path) {
            Some(Value::Bool(flag)) => text == if *flag { "true" } else { "false" },
            Some(Value::String(whole)) if whole == text => true,
            _ => self.words(path).is_some_and(|words| words.contains(&text)),
        }
    }
}

fn object(part: &str) -> Result<Map<String, Value>, Flaw> {
    let bytes = URL_SAFE_NO_PAD.decode(part).map_err(|_| Flaw::Malformed)?;
    serde_json::from_slice::<Unique>(&bytes).map(|unique| unique.0).map_err(|_| Flaw::Malformed)
}

/// JSON object whose names are unique: of two `iss`, two readers could take different ones.
struct Unique(Map<String, Value>);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Unique;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Unique, A::Error> {
                let mut map = Map::new();
                while let Some((name, value)) = access.next_entry::<String, Value>()? {
                    if map.insert(name, value).is_some() {
                        return Err(A::Error::custom("a name twice"));
                    }
                }
                Ok(Unique(map))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use jsonwebtoken::jwk::Jwk;
    use jsonwebtoken::{Algorithm, EncodingKey};
    use serde_json::json;

    use super::*;
    use crate::jwt::issuer::{Issuer, IssuerConfig, KeySource};

    pub(crate) const NOW: u64 = 1_800_000_000;

    const RSA: &[u8] = include_bytes!("test_keys/rsa.pem");
    const OTHER_RSA: &[u8] = include_bytes!("test_keys/other_rsa.pem");
    const P256: &[u8] = include_bytes!("test_keys/p256.pem");
    const ED25519: &[u8] = include_bytes!("test_keys/ed25519.pem");

    fn key(algorithm: Algorithm) -> EncodingKey {
        let key = match algorithm {
            Algorithm::ES256 => EncodingKey::from_ec_pem(P256),
            Algorithm::EdDSA => EncodingKey::from_ed_pem(ED25519),
            _ => EncodingKey::from_rsa_pem(RSA),
        };
        key.expect("a key")
    }

    fn jwk(kid: &str, key: &EncodingKey, algorithm: Algorithm) -> Value {
        let mut jwk = serde_json::to_value(Jwk::from_encoding_key(key, algorithm).expect("a JWK")).expect("JSON");
        jwk["kid"] = kid.into();
        jwk
    }

    /// Key set of the test issuer, with the keys r, e and d.
    pub(crate) fn set() -> Vec<u8> {
        let keys = [("r", Algorithm::RS256), ("e", Algorithm::ES256), ("d", Algorithm::EdDSA)];
        let keys: Vec<_> = keys.into_iter().map(|(kid, algorithm)| jwk(kid, &key(algorithm), algorithm)).collect();
        serde_json::to_vec(&json!({ "keys": keys })).expect("JSON")
    }

    pub(crate) fn config() -> IssuerConfig {
        IssuerConfig {
            id: "corp".into(),
            issuer: "https://idp.example".into(),
            audiences: vec!["penstock".into(), "api".into()],
            source: KeySource::Url("https://idp.example/keys".into()),
            ca_file: None,
            algorithms: vec![Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA],
            stale: std::time::Duration::from_secs(24 * 3600),
            user_claim: "sub".into(),
            team_claim: None,
            teams: Vec::new(),
            team: None,
            team_required: false,
            models_claim: None,
            limits_claim: None,
            required: Vec::new(),
            scope: Arc::default(),
            limits: Vec::new(),
        }
    }

    fn encode(text: &str) -> String {
        URL_SAFE_NO_PAD.encode(text)
    }

    fn signed(header: &str, claims: &str, key: &EncodingKey, algorithm: Algorithm) -> String {
        let message = format!("{}.{}", encode(header), encode(claims));
        let signature = jsonwebtoken::crypto::sign(message.as_bytes(), key, algorithm).expect("signed");
        format!("{message}.{signature}")
    }

    pub(crate) fn claims() -> Value {
        json!({ "iss": "https://idp.example", "aud": "penstock", "sub": "u1", "exp": NOW + 600, "iat": NOW, "nbf": NOW })
    }

    /// Token with those claims, signed with the key r of the test issuer.
    pub(crate) fn signed_by_rsa(claims: &Value) -> String {
        signed(HEADER, &claims.to_string(), &key(Algorithm::RS256), Algorithm::RS256)
    }

    const HEADER: &str = r#"{"alg":"RS256","typ":"JWT","kid":"r"}"#;

    fn read(token: &str) -> Result<Claims, Flaw> {
        let keys = KeySet::parse(&set(), &config().algorithms).expect("a set");
        let unverified = Unverified::parse(token.as_bytes())?;
        if unverified.issuer() != Some("https://idp.example") {
            return Err(Flaw::Issuer);
        }
        let claims = unverified.verify(&keys)?;
        claims.check(&config().audiences, NOW)?;
        Ok(claims)
    }

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "reads as data")]
    fn header(header: &str, expected: Result<(), Flaw>) {
        let token = signed(header, &claims().to_string(), &key(Algorithm::RS256), Algorithm::RS256);
        assert_eq!(read(&token).map(drop), expected, "{header}");
    }

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "reads as data")]
    fn claim(name: &str, value: Value, expected: Result<(), Flaw>) {
        let mut claims = claims();
        match value {
            Value::Null => drop(claims.as_object_mut().expect("an object").remove(name)),
            value => claims[name] = value,
        }
        let token = signed(HEADER, &claims.to_string(), &key(Algorithm::RS256), Algorithm::RS256);
        assert_eq!(read(&token).map(drop), expected, "{claims}");
    }

    #[test]
    fn every_algorithm_of_the_set_verifies() {
        for (kid, name, algorithm) in
            [("r", "RS256", Algorithm::RS256), ("e", "ES256", Algorithm::ES256), ("d", "EdDSA", Algorithm::EdDSA)]
        {
            let header = format!(r#"{{"alg":"{name}","kid":"{kid}"}}"#);
            let token = signed(&header, &claims().to_string(), &key(algorithm), algorithm);
            assert_eq!(read(&token).expect(name).name("sub"), Some("u1"));
        }
    }

    #[test]
    fn a_token_cannot_choose_how_it_is_verified() {
        header(HEADER, Ok(()));
        header(r#"{"alg":"none","kid":"r"}"#, Err(Flaw::Algorithm));
        header(r#"{"alg":"HS256","kid":"r"}"#, Err(Flaw::Algorithm));
        header(r#"{"alg":"RS512","kid":"r"}"#, Err(Flaw::Algorithm));
        header(r#"{"alg":"PS256","kid":"r"}"#, Err(Flaw::Algorithm));
        header(r#"{"kid":"r"}"#, Err(Flaw::Algorithm));
        header(r#"{"alg":["RS256"],"kid":"r"}"#, Err(Flaw::Malformed));
        header(r#"{"alg":"RS256","kid":"e"}"#, Err(Flaw::Algorithm));
        header(r#"{"alg":"ES256","kid":"e"}"#, Err(Flaw::Signature));
        header(r#"{"alg":"RS256"}"#, Err(Flaw::Key));
        header(r#"{"alg":"RS256","kid":7}"#, Err(Flaw::Malformed));
        for kid in ["", "R", "../../dev/null", "r' OR '1'='1", "r\\u0000", "http://evil.example/k"] {
            header(&format!(r#"{{"alg":"RS256","kid":"{kid}"}}"#), Err(Flaw::Key));
        }
        header(r#"{"alg":"RS256","kid":"r","crit":["b64"],"b64":false}"#, Err(Flaw::Critical));
        header(r#"{"alg":"RS256","kid":"r","crit":[]}"#, Err(Flaw::Critical));
        header(r#"{"alg":"RS256","alg":"none","kid":"r"}"#, Err(Flaw::Malformed));
        header(r#"{"alg":"RS256","kid":"r","typ":"logout+jwt"}"#, Err(Flaw::Type));
        header(r#"{"alg":"RS256","kid":"r","typ":"at+jwt"}"#, Ok(()));
        header(r#"{"alg":"RS256","kid":"r","typ":"application/at+JWT"}"#, Ok(()));
        header("[]", Err(Flaw::Malformed));
        header("", Err(Flaw::Malformed));
    }

    #[test]
    fn key_material_in_a_token_is_not_looked_at() {
        let other = EncodingKey::from_rsa_pem(OTHER_RSA).expect("a key");
        let jwk = jwk("x", &other, Algorithm::RS256);
        for extra in [
            format!(r#""jwk":{jwk}"#),
            r#""jku":"http://127.0.0.1:1/keys""#.to_owned(),
            r#""x5u":"http://127.0.0.1:1/cert","x5c":["AAAA"]"#.to_owned(),
        ] {
            for (kid, flaw) in [("r", Flaw::Signature), ("x", Flaw::Key)] {
                let header = format!(r#"{{"alg":"RS256","kid":"{kid}",{extra}}}"#);
                let token = signed(&header, &claims().to_string(), &other, Algorithm::RS256);
                assert_eq!(read(&token).map(drop), Err(flaw), "{header}");
            }
            header(&format!(r#"{{"alg":"RS256","kid":"r",{extra}}}"#), Ok(()));
        }
    }

    /// Algorithm confusion: the public key as the secret of an HMAC, in each form that a library might have accepted.
    #[test]
    fn a_public_key_is_no_secret() {
        let public = jwk("r", &key(Algorithm::RS256), Algorithm::RS256);
        let modulus = URL_SAFE_NO_PAD.decode(public["n"].as_str().expect("n")).expect("base64");
        for secret in [set(), public.to_string().into_bytes(), modulus, RSA.to_vec()] {
            let key = EncodingKey::from_secret(&secret);
            for kid in ["r", "e", "d"] {
                let header = format!(r#"{{"alg":"HS256","kid":"{kid}"}}"#);
                let token = signed(&header, &claims().to_string(), &key, Algorithm::HS256);
                assert_eq!(read(&token).map(drop), Err(Flaw::Algorithm));
            }
        }
    }

    #[test]
    fn claims_are_of_their_types_and_in_their_time() {
        claim("iss", Value::Null, Err(Flaw::Issuer));
        claim("iss", json!(["https://idp.example"]), Err(Flaw::Issuer));
        claim("iss", json!("https://idp.example/"), Err(Flaw::Issuer));
        claim("aud", Value::Null, Err(Flaw::Audience));
        claim("aud", json!("other"), Err(Flaw::Audience));
        claim("aud", json!("penstock2"), Err(Flaw::Audience));
        claim("aud", json!(["other", "api"]), Ok(()));
        claim("aud", json!([["penstock"]]), Err(Flaw::Audience));
        claim("aud", json!({ "penstock": true }), Err(Flaw::Audience));
        claim("aud", json!([]), Err(Flaw::Audience));
        claim("exp", Value::Null, Err(Flaw::Claim("exp is missing".into())));
        for value in [json!("1900000000"), json!(true), json!([]), json!(-1), json!(1e300)] {
            claim("exp", value, Err(Flaw::Claim("exp is no time".into())));
        }
        claim("exp", json!(NOW - 59), Ok(()));
        claim("exp", json!(NOW - 60), Err(Flaw::Expired));
        claim("exp", json!(NOW as f64 + 0.5), Ok(()));
        claim("nbf", json!(NOW + 60), Ok(()));
        claim("nbf", json!(NOW + 61), Err(Flaw::Early));
        claim("nbf", json!("0"), Err(Flaw::Claim("nbf is no time".into())));
        claim("iat", json!(NOW + 3600), Err(Flaw::Early));
        claim("iat", Value::Null, Ok(()));
    }

    #[test]
    fn a_claim_said_twice_is_no_claim() {
        let claims = r#"{"iss":"https://idp.example","aud":"other","aud":"penstock","sub":"u1","exp":1900000000}"#;
        let token = signed(HEADER, claims, &key(Algorithm::RS256), Algorithm::RS256);
        assert_eq!(read(&token).map(drop), Err(Flaw::Malformed));
    }

    #[test]
    fn every_altered_byte_is_noticed() {
        let token = signed(HEADER, &claims().to_string(), &key(Algorithm::ES256), Algorithm::ES256);
        assert!(read(&token).is_err(), "signed with another key than it names");
        let good =
            signed(r#"{"alg":"ES256","kid":"e"}"#, &claims().to_string(), &key(Algorithm::ES256), Algorithm::ES256);
        assert!(read(&good).is_ok());
        for at in 0..good.len() {
            let mut bytes = good.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            let altered = String::from_utf8(bytes).expect("ASCII");
            // The last character of a part may have unused bits; strict base64 refuses those that are not zero.
            assert!(read(&altered).is_err(), "byte {at}");
            assert!(read(&good[..at]).is_err(), "cut at {at}");
        }
        for extra in ["A", "=", ".", " "] {
            assert!(read(&format!("{good}{extra}")).is_err(), "{extra:?}");
        }
    }

    fn user(change: impl FnOnce(&mut IssuerConfig), more: &Value) -> Result<crate::jwt::issuer::User, Flaw> {
        let (mut config, mut claims) = (config(), claims());
        change(&mut config);
        for (name, value) in more.as_object().expect("an object") {
            claims[name] = value.clone();
        }
        let token = signed(HEADER, &claims.to_string(), &key(Algorithm::RS256), Algorithm::RS256);
        Issuer::new(&config).user(&read(&token)?)
    }

    #[test]
    fn claims_say_who_somebody_is() {
        let found = user(|_| (), &json!({})).expect("a user");
        assert_eq!((found.name.as_str(), found.tenant.as_str()), ("u1", "jwt:corp:u1"));
        let mail = |config: &mut IssuerConfig| config.user_claim = "email".into();
        let found = user(mail, &json!({ "email": "a@b.example" })).expect("a user");
        assert_eq!((found.name.as_str(), found.tenant.as_str()), ("a@b.example", "jwt:corp:u1"));
        assert!(matches!(user(mail, &json!({})), Err(Flaw::Claim(_))));
        assert!(matches!(user(|_| (), &json!({ "sub": "a\nb" })), Err(Flaw::Claim(_))));
        let groups = |config: &mut IssuerConfig| {
            config.team_claim = Some("realm.groups".into());
            config.teams = vec![("g1".into(), "search".into())];
        };
        let found = user(groups, &json!({ "realm": { "groups": ["g0", "g1"] } })).expect("a user");
        assert_eq!(found.teams, ["search"]);
        let models = |config: &mut IssuerConfig| config.models_claim = Some("https://x.example/models".into());
        let found = user(models, &json!({ "https://x.example/models": "chat-* big" })).expect("a user");
        assert_eq!(found.models, Some(vec!["chat-*".to_owned(), "big".to_owned()]));
        let mut config = config();
        models(&mut config);
        let scopes = Issuer::new(&config).scopes(&found);
        assert!(scopes.iter().all(|scope| scope.has_model("chat-1")));
        assert!(!scopes.iter().all(|scope| scope.has_model("small")));
        for none in [json!({}), json!({ "https://x.example/models": [] }), json!({ "https://x.example/models": 7 })] {
            assert!(matches!(user(models, &none), Err(Flaw::Claim(_))), "an absent list is not all models");
        }
        let required = |config: &mut IssuerConfig| config.required = vec![("scope".into(), "ai".into())];
        assert!(user(required, &json!({ "scope": "mail ai" })).is_ok());
        assert!(matches!(user(required, &json!({ "scope": "mail airy" })), Err(Flaw::Claim(_))));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200), text in "eyJ[A-Za-z0-9_.-]{0,80}") {
            let keys = KeySet::parse(&set(), &config().algorithms).expect("a set");
            for token in [bytes.as_slice(), text.as_bytes()] {
                if let Ok(unverified) = Unverified::parse(token) {
                    proptest::prop_assert!(unverified.verify(&keys).is_err());
                }
            }
        }
    }
}
