//! Sign-in of people with an identity provider: the authorization code flow of OpenID Connect with PKCE (RFC 7636), as its client.
//!
//! ```text
//! discover: issuer/.well-known/openid-configuration ─▶ Endpoints ─▶ authorization URL, which the browser opens
//! redeem:   code + verifier ─▶ token endpoint ─▶ ID token ─▶ signature (jwks, token), audience, times, azp, nonce ─▶ Person, Grant
//! ```
//!
//! Groups that the ID token does not list are read from the userinfo endpoint. What the provider gave beside the ID token is a
//! [`Grant`], with which `grant` reads the groups again later.
//!
//! Discovery and keys are fetched as those of access tokens are: HTTPS or loopback, bounded in time and size, no redirects. Only
//! addresses that the issuer's own document names are asked.
//!
//! Deliberately absent: state and its cookie, sessions and roles (the admin API's).

use std::fmt;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use http::{HeaderValue, Method, header};
use jsonwebtoken::Algorithm;
use penstock_base::{Secret, percent_encoded};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq;

use super::fetch::{get, send};
use super::grant::{Grant, Tokens};
use super::issuer::IssuerConfig;
use super::jwks::KeySet;
use super::token::{Claims, Flaw, LEEWAY_SECONDS, Unverified};

/// Longest group name in bytes that is kept.
const GROUP_BYTES_MAX: usize = 256;
/// Most groups of a token that are looked at.
const GROUPS_MAX: usize = 1000;
/// Longest authorization code in bytes.
pub const CODE_BYTES_MAX: usize = 4096;
/// Longest age in seconds of an ID token or a logout token.
const AGE_SECONDS_MAX: u64 = 600;

/// Parameters of the authorization URL that the gateway sets itself, or that would replace some of them.
pub const RESERVED: [&str; 12] = [
    "response_type",
    "response_mode",
    "client_id",
    "client_secret",
    "redirect_uri",
    "scope",
    "state",
    "nonce",
    "code_challenge",
    "code_challenge_method",
    "request",
    "request_uri",
];

/// Way in which a client sends its secret to the token endpoint (RFC 6749, section 2.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAuth {
    /// `client_secret_basic`: in the header `Authorization`.
    Basic,
    /// `client_secret_post`: in the form.
    Post,
}

impl ClientAuth {
    /// Method of that name in a discovery document.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "client_secret_basic" => Some(Self::Basic),
            "client_secret_post" => Some(Self::Post),
            _ => None,
        }
    }
}

/// Identity provider that people sign in with, and this gateway's registration there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// Exact value of the claim `iss`, and of the issuer in the discovery document.
    pub issuer: String,
    /// Id under which the gateway is registered; the audience of ID tokens.
    pub client_id: String,
    /// Secret of the registration; `None`: a public client, which PKCE alone protects.
    pub client_secret: Option<Secret>,
    /// How the secret is sent; `None`: as the discovery document prefers.
    pub client_auth: Option<ClientAuth>,
    /// Scopes that are asked for; `openid` is among them.
    pub scopes: Vec<String>,
    /// Further parameters of the authorization URL, none of them among [`RESERVED`].
    pub parameters: Vec<(String, String)>,
    /// Claim with the person's groups; dots lead into nested objects.
    pub groups_claim: String,
    /// Claims that an ID token must have, each with the value that it must be or contain.
    pub required: Vec<(String, String)>,
    /// Signature algorithms that an ID token may have.
    pub algorithms: Vec<Algorithm>,
    /// Certificates to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
}

/// Addresses of a provider, as its discovery document names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoints {
    authorization: String,
    pub(super) token: String,
    pub(super) jwks: String,
    pub(super) userinfo: Option<String>,
    pub(super) revocation: Option<String>,
    pub(super) end_session: Option<String>,
    uses_basic: bool,
    names_issuer: bool,
}

#[derive(Deserialize)]
struct Document {
    issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    jwks_uri: String,
    userinfo_endpoint: Option<String>,
    revocation_endpoint: Option<String>,
    end_session_endpoint: Option<String>,
    token_endpoint_auth_methods_supported: Option<Vec<String>>,
    #[serde(default)]
    authorization_response_iss_parameter_supported: bool,
}

/// Values that bind an authorization to one browser and one sign-in.
#[derive(Clone, Copy, Debug)]
pub struct Binding<'a> {
    /// Value that the answer must repeat.
    pub state: &'a str,
    /// Value that the ID token must repeat.
    pub nonce: &'a str,
    /// Secret of the sign-in (RFC 7636), of which the provider first gets the SHA-256 alone.
    pub verifier: &'a str,
    /// URL that the provider sends the browser back to.
    pub redirect_url: &'a str,
}

/// Person that a verified ID token names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Person {
    /// Claim `sub`, which the provider never gives to another person.
    pub subject: String,
    /// Name to show: `email`, `preferred_username` or the subject.
    pub name: String,
    /// Groups of the person.
    pub groups: Vec<String>,
    /// Id of the person's session at the provider (`sid`), where it names one.
    pub session: Option<String>,
    /// Unix second at which the provider named the person (`iat`).
    pub issued: u64,
}

/// Reason why a sign-in has failed; its text is for the person and the log, and holds no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SignOnFault {
    /// Discovery, keys or the token endpoint are out of reach, or answer what nobody can use.
    Away(String),
    /// Provider's refusal of the code, with its error code.
    Refused(String),
    /// ID token that is not accepted.
    Token(String),
}

impl fmt::Display for SignOnFault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Away(why) => write!(out, "the identity provider cannot be used: {why}"),
            Self::Refused(code) => write!(out, "the identity provider refused the sign-in ({code})"),
            Self::Token(why) => write!(out, "the ID token of the identity provider is not accepted: {why}"),
        }
    }
}

impl std::error::Error for SignOnFault {}

/// Outcome of a sign-in at the provider.
#[derive(Debug)]
pub struct SignedOn {
    /// The person, without groups where none could be read.
    pub person: Person,
    /// Tokens for reading the groups again and for signing out.
    pub grant: Grant,
    /// Reason why the userinfo endpoint could not be read, where it alone would have told the groups.
    pub unread: Option<SignOnFault>,
}

impl Provider {
    /// URL of the discovery document.
    #[must_use]
    pub fn discovery(&self) -> String {
        format!("{}/.well-known/openid-configuration", self.issuer.trim_end_matches('/'))
    }

    /// Fetches the discovery document.
    ///
    /// # Errors
    /// [`SignOnFault::Away`]: it cannot be fetched, is another issuer's, or names an address that is neither HTTPS nor loopback.
    pub async fn discover(&self) -> Result<Endpoints, SignOnFault> {
        let fetched = get(&self.discovery(), self.ca_file.as_deref()).await;
        let bytes = fetched.map_err(|why| SignOnFault::Away(format!("discovery: {why}")))?;
        self.endpoints(&bytes).map_err(SignOnFault::Away)
    }

    fn endpoints(&self, document: &[u8]) -> Result<Endpoints, String> {
        let document: Document =
            serde_json::from_slice(document).map_err(|_| "the discovery document is not readable".to_owned())?;
        if document.issuer != self.issuer {
            return Err("the discovery document is another issuer's".into());
        }
        for url in [&document.authorization_endpoint, &document.token_endpoint, &document.jwks_uri] {
            protected(url).map_err(|why| format!("the discovery document: {why}"))?;
        }
        // What the sign-in does not need is left out where its address is not protected.
        let optional = |url: Option<String>| url.filter(|url| protected(url).is_ok());
        let methods = document.token_endpoint_auth_methods_supported;
        let has = |name: &str| methods.as_ref().is_some_and(|all| all.iter().any(|method| method == name));
        // RFC 8414: without a list, client_secret_basic is what the endpoint takes.
        let prefers_basic = methods.is_none() || has("client_secret_basic");
        let uses_basic = self.client_auth.map_or(prefers_basic, |auth| auth == ClientAuth::Basic);
        if self.client_secret.is_some() && self.client_auth.is_none() && !uses_basic && !has("client_secret_post") {
            return Err("its token endpoint takes no client secret".into());
        }
        Ok(Endpoints {
            authorization: document.authorization_endpoint,
            token: document.token_endpoint,
            jwks: document.jwks_uri,
            userinfo: optional(document.userinfo_endpoint),
            revocation: optional(document.revocation_endpoint),
            end_session: optional(document.end_session_endpoint),
            uses_basic,
            names_issuer: document.authorization_response_iss_parameter_supported,
        })
    }

    /// URL that the person's browser opens to sign in.
    #[must_use]
    pub fn authorization_url(&self, endpoints: &Endpoints, binding: Binding<'_>) -> String {
        let challenge = URL_SAFE_NO_PAD.encode(Sha256::digest(binding.verifier));
        let scopes = self.scopes.join(" ");
        let mut pairs = vec![
            ("response_type", "code"),
            ("client_id", &self.client_id),
            ("redirect_uri", binding.redirect_url),
            ("scope", &scopes),
            ("state", binding.state),
            ("nonce", binding.nonce),
            ("code_challenge", &challenge),
            ("code_challenge_method", "S256"),
        ];
        pairs.extend(self.parameters.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        with_query(&endpoints.authorization, &pairs)
    }

    /// Issuer and client id: the gateway's registration at the provider, which sessions and tokens are bound to.
    #[must_use]
    pub fn registration(&self) -> [String; 2] {
        [self.issuer.clone(), self.client_id.clone()]
    }

    /// Returns true if an answer's `iss` (RFC 9207) is this provider's; an answer without one fits where the provider sends none.
    #[must_use]
    pub fn is_answer_of(&self, endpoints: &Endpoints, issuer: Option<&str>) -> bool {
        issuer.map_or(!endpoints.names_issuer, |issuer| issuer == self.issuer)
    }

    /// Redeems the code of an answer, verifies the ID token, and reads the groups from the userinfo endpoint where the ID token does not
    /// have them. `now`: Unix seconds.
    ///
    /// # Errors
    /// [`SignOnFault`].
    pub async fn redeem(
        &self,
        endpoints: &Endpoints,
        code: &str,
        binding: Binding<'_>,
        now: u64,
    ) -> Result<SignedOn, SignOnFault> {
        let tokens = self.tokens(endpoints, &code_form(code, binding)).await?;
        let none = || SignOnFault::Token("there is none; is openid among the scopes?".into());
        let token = tokens.id_token.clone().ok_or_else(none)?;
        let keys = self.keys(endpoints).await?;
        let claims = self.claims(token.as_bytes(), &keys, binding.nonce, now);
        let flawed = |flaw: Flaw| SignOnFault::Token(flaw.to_string());
        let (claims, issued) = claims.map_err(flawed)?;
        let mut person = self.named(&claims, issued).map_err(flawed)?;
        let grant = Grant::new(self, tokens, now);
        if claims.find(&self.groups_claim).is_some() {
            return Ok(SignedOn { person, grant: grant.of_id_token(), unread: None });
        }
        match self.userinfo(endpoints, &grant, &person.subject).await {
            Ok(Some(told)) => {
                person.groups = self.groups(&told);
                if person.name == person.subject {
                    person.name = shown(&told).unwrap_or(&person.subject).to_owned();
                }
                Ok(SignedOn { person, grant, unread: None })
            }
            Ok(None) => Ok(SignedOn { person, grant: grant.without_access(), unread: None }),
            Err(fault @ SignOnFault::Token(_)) => Err(fault),
            Err(fault) => Ok(SignedOn { person, grant: grant.without_access(), unread: Some(fault) }),
        }
    }

    /// Tokens that the token endpoint gives for a form.
    pub(super) async fn tokens(&self, endpoints: &Endpoints, pairs: &[(&str, &str)]) -> Result<Tokens, SignOnFault> {
        let (fields, body) = self.authenticated(endpoints, pairs);
        let ca = self.ca_file.as_deref();
        let (status, answer) = send(Method::POST, &endpoints.token, ca, fields, body.into_bytes())
            .await
            .map_err(|why| SignOnFault::Away(format!("token endpoint: {why}")))?;
        Tokens::read(status, &answer)
    }

    /// Fetches the keys of the provider.
    pub(super) async fn keys(&self, endpoints: &Endpoints) -> Result<KeySet, SignOnFault> {
        let away = |why: String| SignOnFault::Away(format!("keys: {why}"));
        let keys = get(&endpoints.jwks, self.ca_file.as_deref()).await.map_err(away)?;
        KeySet::parse(&keys, &self.algorithms).map_err(away)
    }

    /// Header fields and body of a form that this client sends to the provider.
    pub(super) fn authenticated(
        &self,
        endpoints: &Endpoints,
        pairs: &[(&str, &str)],
    ) -> (Vec<(header::HeaderName, HeaderValue)>, String) {
        let mut pairs = pairs.to_vec();
        let mut fields = vec![
            (header::ACCEPT, HeaderValue::from_static("application/json")),
            (header::CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded")),
        ];
        match &self.client_secret {
            Some(secret) if endpoints.uses_basic => {
                // RFC 6749, section 2.3.1: both are form-encoded before they are joined.
                let both = format!("{}:{}", encoded(&self.client_id), encoded(secret.expose()));
                let value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(both)));
                fields.extend(value.ok().map(|value| (header::AUTHORIZATION, value)));
            }
            Some(secret) => pairs.extend([("client_id", self.client_id.as_str()), ("client_secret", secret.expose())]),
            None => pairs.push(("client_id", &self.client_id)),
        }
        (fields, form(&pairs))
    }

    /// Claims of a sign-in's ID token, and the Unix second of its issue (OpenID Connect Core, section 3.1.3.7).
    fn claims(&self, token: &[u8], keys: &KeySet, nonce: &str, now: u64) -> Result<(Claims, u64), Flaw> {
        let (claims, issued) = self.own(token, keys, now)?;
        let given = claims.name("nonce").unwrap_or_default();
        if !bool::from(given.as_bytes().ct_eq(nonce.as_bytes())) {
            return Err(Flaw::Claim("nonce is not this sign-in's".into()));
        }
        Ok((claims, issued))
    }

    /// Claims of an ID token of this provider for this client, without a look at its nonce, and the Unix second of its issue.
    pub(super) fn own(&self, token: &[u8], keys: &KeySet, now: u64) -> Result<(Claims, u64), Flaw> {
        let unverified = Unverified::parse(token)?;
        if unverified.issuer() != Some(self.issuer.as_str()) {
            return Err(Flaw::Issuer);
        }
        let claims = unverified.verify(keys)?;
        claims.check(std::slice::from_ref(&self.client_id), now)?;
        let issued = issued(&claims, now)?;
        let party = claims.find("azp");
        let has_others = claims.list("aud").is_none_or(|audiences| audiences.len() > 1);
        if party.map_or(has_others, |party| party.as_str() != Some(&self.client_id)) {
            return Err(Flaw::Claim("azp is not this client".into()));
        }
        match self.required.iter().find(|(name, value)| !claims.has(name, value)) {
            Some((name, _)) => Err(Flaw::Claim(format!("{name} is not what admin.oidc.required says"))),
            None => Ok((claims, issued)),
        }
    }

    fn named(&self, claims: &Claims, issued: u64) -> Result<Person, Flaw> {
        let subject = claims.name("sub").ok_or_else(|| Flaw::Claim("sub is missing or of the wrong kind".into()))?;
        let name = shown(claims).unwrap_or(subject).to_owned();
        let session = claims.name("sid").map(str::to_owned);
        Ok(Person { subject: subject.to_owned(), name, groups: self.groups(claims), session, issued })
    }

    /// Groups among the claims, bounded in number and length; none where the claim is missing or of another kind.
    pub(super) fn groups(&self, claims: &Claims) -> Vec<String> {
        let groups = claims.list(&self.groups_claim).unwrap_or_default().into_iter();
        groups.take(GROUPS_MAX).filter(|group| group.len() <= GROUP_BYTES_MAX).map(str::to_owned).collect()
    }
}

/// Name of a person to show, where the claims have one.
fn shown(claims: &Claims) -> Option<&str> {
    ["email", "preferred_username"].into_iter().find_map(|path| claims.name(path))
}

/// Checks that an address of a discovery document is https, or http on loopback.
fn protected(url: &str) -> Result<(), String> {
    IssuerConfig::place(url)?;
    if url.starts_with("http") { Ok(()) } else { Err("it names an address that no browser can open".into()) }
}

/// Form that redeems an authorization code.
fn code_form<'a>(code: &'a str, binding: Binding<'a>) -> [(&'static str, &'a str); 4] {
    [
        ("grant_type", "authorization_code"),
        ("code", code),
        ("redirect_uri", binding.redirect_url),
        ("code_verifier", binding.verifier),
    ]
}

/// URL with further parameters.
pub(super) fn with_query(url: &str, pairs: &[(&str, &str)]) -> String {
    let mark = if url.contains('?') { '&' } else { '?' };
    format!("{url}{mark}{}", form(pairs))
}

/// Unix second at which a token was issued, at most ten minutes ago.
pub(super) fn issued(claims: &Claims, now: u64) -> Result<u64, Flaw> {
    let wrong = |text: &str| Flaw::Claim(text.to_owned());
    let issued = claims.moment("iat")?.ok_or_else(|| wrong("iat is missing"))?;
    if issued + ((AGE_SECONDS_MAX + LEEWAY_SECONDS) as f64) < now as f64 {
        return Err(wrong("iat is too long ago"));
    }
    Ok(issued as u64)
}

fn form(pairs: &[(&str, &str)]) -> String {
    let pairs: Vec<_> = pairs.iter().map(|(name, value)| format!("{name}={}", encoded(value))).collect();
    pairs.join("&")
}

/// Text with everything but unreserved characters percent-encoded.
fn encoded(text: &str) -> String {
    percent_encoded(text, b"")
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::super::token::tests::{NOW, claims, config, set, signed_by_rsa};
    use super::*;

    pub(in super::super) fn provider() -> Provider {
        Provider {
            issuer: "https://idp.example".into(),
            client_id: "console".into(),
            client_secret: Some(Secret::new("s:cret&")),
            client_auth: None,
            scopes: vec!["openid".into(), "groups".into()],
            parameters: Vec::new(),
            groups_claim: "realm.groups".into(),
            required: Vec::new(),
            algorithms: config().algorithms,
            ca_file: None,
        }
    }

    const BINDING: Binding<'static> = Binding {
        state: "st",
        nonce: "n0",
        // The example of RFC 7636, appendix B.
        verifier: "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk",
        redirect_url: "http://127.0.0.1:8081/console/",
    };

    fn document() -> Value {
        json!({
            "issuer": "https://idp.example", "authorization_endpoint": "https://idp.example/auth?tenant=a",
            "token_endpoint": "https://idp.example/token", "jwks_uri": "https://keys.example/keys",
        })
    }

    #[track_caller]
    pub(in super::super) fn found(name: &str, value: Value) -> Result<Endpoints, String> {
        let mut document = document();
        document[name] = value;
        provider().endpoints(document.to_string().as_bytes())
    }

    #[test]
    fn only_protected_addresses_of_the_own_issuer_are_taken() {
        let endpoints = found("x", json!(1)).expect("usable");
        assert!(endpoints.uses_basic && !endpoints.names_issuer);
        for (name, value) in [
            ("issuer", json!("https://idp.example/")),
            ("issuer", json!("https://evil.example")),
            ("token_endpoint", json!("http://idp.example/token")),
            ("token_endpoint", json!("unix:///run/x.sock:/token")),
            ("jwks_uri", json!("http://10.0.0.1/keys")),
            ("authorization_endpoint", json!("javascript:alert(1)")),
            ("authorization_endpoint", json!("http://idp.example/auth")),
            ("authorization_endpoint", json!("https://idp.example/a#b")),
            ("token_endpoint", Value::Null),
            ("token_endpoint_auth_methods_supported", json!(["private_key_jwt"])),
        ] {
            assert!(found(name, value.clone()).is_err(), "{name} {value}");
        }
        assert!(found("token_endpoint", json!("http://127.0.0.1:1/token")).is_ok(), "loopback may be plain");
        assert!(provider().endpoints(b"<html>").is_err());
    }

    #[test]
    fn the_provider_gets_the_challenge_first_and_the_verifier_later() {
        let endpoints = found("x", json!(1)).expect("usable");
        let url = provider().authorization_url(&endpoints, BINDING);
        assert_eq!(
            url,
            "https://idp.example/auth?tenant=a&response_type=code&client_id=console\
             &redirect_uri=http%3A%2F%2F127.0.0.1%3A8081%2Fconsole%2F&scope=openid%20groups&state=st&nonce=n0\
             &code_challenge=E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM&code_challenge_method=S256"
        );
        let (fields, body) = provider().authenticated(&endpoints, &code_form("c&d=e", BINDING));
        assert!(body.contains("code=c%26d%3De&") && body.contains(BINDING.verifier) && !body.contains("client_secret"));
        let basic = fields.iter().find(|(name, _)| *name == header::AUTHORIZATION).expect("a secret");
        assert_eq!(basic.1, format!("Basic {}", STANDARD.encode("console:s%3Acret%26")));
        let post = found("token_endpoint_auth_methods_supported", json!(["client_secret_post"])).expect("usable");
        let (fields, body) = provider().authenticated(&post, &code_form("c", BINDING));
        assert!(body.ends_with("client_id=console&client_secret=s%3Acret%26") && fields.len() == 2);
        let told = Provider { client_auth: Some(ClientAuth::Post), ..provider() };
        let both = document().to_string();
        let told_endpoints = told.endpoints(both.as_bytes()).expect("usable");
        assert!(told.authenticated(&told_endpoints, &[]).1.contains("client_secret="), "the config decides");
        let more = Provider { parameters: vec![("prompt".into(), "consent".into())], ..provider() };
        assert!(more.authorization_url(&endpoints, BINDING).ends_with("&prompt=consent"));
        let public = Provider { client_secret: None, ..provider() };
        assert!(public.authenticated(&endpoints, &code_form("c", BINDING)).1.ends_with("&client_id=console"));
    }

    #[test]
    fn an_answer_of_another_issuer_is_not_taken() {
        let silent = found("x", json!(1)).expect("usable");
        let speaking = found("authorization_response_iss_parameter_supported", json!(true)).expect("usable");
        let fits = |endpoints: &Endpoints, issuer| provider().is_answer_of(endpoints, issuer);
        assert!(fits(&silent, None) && !fits(&speaking, None), "left out where it is promised");
        for endpoints in [&silent, &speaking] {
            assert!(fits(endpoints, Some("https://idp.example")));
            assert!(!fits(endpoints, Some("https://evil.example")) && !fits(endpoints, Some("")));
        }
    }

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "reads as data")]
    fn check(more: Value, expected: Result<&str, &str>) {
        let mut all = claims();
        (all["aud"], all["nonce"], all["tenant"]) = (json!("console"), json!("n0"), json!("t1"));
        for (name, value) in more.as_object().expect("an object") {
            match value {
                Value::Null => drop(all.as_object_mut().expect("an object").remove(name)),
                value => all[name] = value.clone(),
            }
        }
        let keys = KeySet::parse(&set(), &config().algorithms).expect("a set");
        let provider = Provider { required: vec![("tenant".into(), "t1".into())], ..provider() };
        let found = provider.claims(signed_by_rsa(&all).as_bytes(), &keys, "n0", NOW);
        let found = found.and_then(|(claims, issued)| provider.named(&claims, issued));
        match expected {
            Ok(name) => assert_eq!(found.map(|person| person.name).as_deref(), Ok(name), "{more}"),
            Err(part) => {
                let flaw = found.expect_err(part).to_string();
                assert!(flaw.contains(part), "{flaw}: {more}");
            }
        }
    }

    #[test]
    fn an_id_token_is_this_sign_ins_and_this_clients() {
        check(json!({}), Ok("u1"));
        check(json!({ "preferred_username": "ada", "email": "ada@idp.example" }), Ok("ada@idp.example"));
        check(json!({ "preferred_username": "ada", "email": 7 }), Ok("ada"));
        check(json!({ "email": "a\nb" }), Ok("u1"));
        check(json!({ "email": "x".repeat(300) }), Ok("u1"));
        check(json!({ "aud": ["console"] }), Ok("u1"));
        check(json!({ "aud": ["console", "other"], "azp": "console" }), Ok("u1"));
        check(json!({ "iss": "https://evil.example" }), Err("its issuer"));
        check(json!({ "aud": "penstock" }), Err("another audience"));
        check(json!({ "aud": ["console", "other"] }), Err("azp"));
        check(json!({ "azp": "other" }), Err("azp"));
        check(json!({ "azp": ["console"] }), Err("azp"));
        check(json!({ "nonce": "n1" }), Err("nonce"));
        check(json!({ "nonce": Value::Null }), Err("nonce"));
        check(json!({ "nonce": ["n0"] }), Err("nonce"));
        check(json!({ "exp": NOW - 60 }), Err("expired"));
        check(json!({ "exp": Value::Null }), Err("exp is missing"));
        check(json!({ "iat": Value::Null }), Err("iat is missing"));
        check(json!({ "iat": NOW - 661 }), Err("iat is too long ago"));
        check(json!({ "iat": NOW + 61 }), Err("not valid yet"));
        check(json!({ "sub": Value::Null }), Err("sub"));
        check(json!({ "sub": "a\u{0}" }), Err("sub"));
        check(json!({ "tenant": "t2" }), Err("tenant is not what"));
        check(json!({ "tenant": Value::Null }), Err("tenant is not what"));
        check(json!({ "tenant": ["t0", "t1"] }), Ok("u1"));
    }

    #[test]
    fn a_token_of_another_key_is_refused() {
        let mut all = claims();
        (all["aud"], all["nonce"]) = (json!("console"), json!("n0"));
        let token = signed_by_rsa(&all);
        let (message, _) = token.rsplit_once('.').expect("parts");
        let keys = KeySet::parse(&set(), &config().algorithms).expect("a set");
        let forged = format!("{message}.{}", URL_SAFE_NO_PAD.encode([7; 256]));
        assert_eq!(provider().claims(forged.as_bytes(), &keys, "n0", NOW).err(), Some(Flaw::Signature));
    }

    #[test]
    fn groups_are_bounded() {
        let groups: Vec<_> = (0..2000).map(|number| format!("g{number}")).chain(["x".repeat(300)]).collect();
        let all = json!({ "sub": "u", "realm": { "groups": groups } });
        let claims = Claims::of(all.as_object().expect("an object").clone());
        assert_eq!(provider().named(&claims, NOW).expect("a person").groups.len(), GROUPS_MAX);
        let one = json!({ "sub": "u", "realm": { "groups": "admins" } });
        let claims = Claims::of(one.as_object().expect("an object").clone());
        assert_eq!(provider().named(&claims, NOW).expect("a person").groups, ["admins"]);
        let wrong = json!({ "sub": "u", "realm": { "groups": ["a", 7] } });
        let claims = Claims::of(wrong.as_object().expect("an object").clone());
        assert!(
            provider().named(&claims, NOW).expect("a person").groups.is_empty(),
            "a list of other things is no list"
        );
    }
}
