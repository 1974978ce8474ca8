//! Tokens that a provider gives with a sign-in, and what they are good for afterwards: reading the person's groups again, and signing out.
//!
//! ```text
//! refresh token ─▶ token endpoint ─▶ new tokens, as a rule a new refresh token, too ─┬▶ ID token with the groups
//!                                                                                   └▶ access token ─▶ userinfo ─▶ groups
//! ```
//!
//! Without a refresh token, the access token of the sign-in is used for as long as the provider has said that it lives. Tokens are never
//! written anywhere: they are texts whose `Debug` output is hidden, bounded in length, in the memory of one process.
//!
//! Deliberately absent: when groups are read again, and what becomes of a session (the admin API's).

use http::{HeaderValue, Method, header};
use penstock_base::Secret;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::fetch::send;
use super::logout::RecentKeys;
use super::sign_on::{Endpoints, Provider, SignOnFault, with_query};
use super::token::{Claims, Flaw};

/// Longest token in bytes that is kept.
const TOKEN_BYTES_MAX: usize = 16 * 1024;
/// Longest ID token in bytes that a sign-out names: it stands in a URL, and servers take lines of 8 KiB.
const HINT_BYTES_MAX: usize = 6 * 1024;
/// Life in seconds of an access token whose answer does not tell one.
const ACCESS_SECONDS: u64 = 300;
/// Time in seconds before its end at which an access token is no longer used.
const ACCESS_SPARE_SECONDS: u64 = 10;

/// Tokens of one answer of the token endpoint.
pub(super) struct Tokens {
    pub(super) id_token: Option<String>,
    access: Option<String>,
    refresh: Option<String>,
    seconds: u64,
}

impl Tokens {
    /// Reads an answer of the token endpoint.
    pub(super) fn read(status: u16, answer: &[u8]) -> Result<Self, SignOnFault> {
        #[derive(Deserialize)]
        struct Answer {
            id_token: Option<String>,
            access_token: Option<String>,
            refresh_token: Option<String>,
            // Some providers write the number as a text.
            expires_in: Option<Value>,
            error: Option<String>,
        }
        let unreadable = || SignOnFault::Away(format!("token endpoint: status {status} without a readable answer"));
        let read: Answer = serde_json::from_slice(answer).map_err(|_| unreadable())?;
        match (status, read.error) {
            (200, None) if read.id_token.is_some() || read.access_token.is_some() => {
                let seconds = read.expires_in.as_ref();
                let seconds = seconds.and_then(|value| value.as_u64().or_else(|| value.as_str()?.parse().ok()));
                Ok(Self {
                    id_token: read.id_token,
                    access: read.access_token,
                    refresh: read.refresh_token,
                    seconds: seconds.unwrap_or(ACCESS_SECONDS),
                })
            }
            (_, Some(code)) if is_code(&code) => Err(SignOnFault::Refused(code)),
            _ => Err(unreadable()),
        }
    }
}

/// Returns true if a text has the form of an OAuth error code.
fn is_code(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
}

/// Tokens of a sign-in that are kept while its session lasts.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Issuer and client id of the registration that the tokens were given to: no other provider gets to see them.
    registration: Box<[String; 2]>,
    /// True if the ID token of the sign-in had the groups: then nothing is concluded from an answer of the userinfo endpoint without them.
    is_in_id_token: bool,
    refresh: Option<Secret>,
    access: Option<Secret>,
    /// Unix second at which the access token is no longer used.
    access_until: u64,
    /// ID token of the sign-in, by which the provider knows which session is to end.
    hint: Option<Secret>,
}

/// Outcome of a renewal that has not read the groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenewalFault {
    /// Failure that says nothing about the person; a later attempt may succeed.
    Away(String),
    /// Answer after which the sign-in is over: the provider no longer knows the grant, or names somebody else.
    Over(String),
}

impl std::fmt::Display for RenewalFault {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Away(why) => write!(out, "the groups cannot be read now: {why}"),
            Self::Over(why) => write!(out, "the sign-in is over: {why}"),
        }
    }
}

impl std::error::Error for RenewalFault {}

impl Grant {
    /// Grant of a token answer to `provider` at `now` (Unix seconds).
    pub(super) fn new(provider: &Provider, tokens: Tokens, now: u64) -> Self {
        let mut grant = Self {
            registration: Box::new(provider.registration()),
            is_in_id_token: false,
            refresh: None,
            access: None,
            access_until: 0,
            hint: kept(tokens.id_token.clone()),
        };
        grant.take(tokens, now);
        grant
    }

    /// Takes the tokens of a later answer; a refresh token that is not replaced stays good.
    fn take(&mut self, tokens: Tokens, now: u64) {
        self.refresh = kept(tokens.refresh).or(self.refresh.take());
        self.access = kept(tokens.access);
        self.access_until = now.saturating_add(tokens.seconds).saturating_sub(ACCESS_SPARE_SECONDS);
    }

    /// Grant of a sign-in whose ID token had the groups: its access token is good for nothing.
    pub(super) fn of_id_token(self) -> Self {
        Self { is_in_id_token: true, access: None, ..self }
    }

    /// Grant of a provider without a userinfo endpoint, or with one that could not be read, where the access token is good for nothing.
    pub(super) fn without_access(self) -> Self {
        Self { access: None, ..self }
    }

    fn is_of(&self, provider: &Provider) -> bool {
        *self.registration == provider.registration()
    }

    /// Returns true if the groups can be read again at `now` (Unix seconds).
    #[must_use]
    pub fn is_renewable(&self, now: u64) -> bool {
        self.refresh.is_some() || (self.access.is_some() && now < self.access_until)
    }

    /// Returns true if there is a token that outlives the sign-in at the provider.
    #[must_use]
    pub fn is_revocable(&self) -> bool {
        self.refresh.is_some()
    }
}

fn kept(token: Option<String>) -> Option<Secret> {
    token.filter(|token| token.len() <= TOKEN_BYTES_MAX).map(Secret::new)
}

impl Provider {
    /// Reads the groups of `subject` again. `now`: Unix seconds. The tokens that the provider gives meanwhile are in `grant` whatever the
    /// outcome: a refresh token that was replaced must not be sent again.
    ///
    /// Groups are those of the ID token of the answer; where it has none, or there is none, those of the userinfo endpoint. A claim that
    /// is missing in both stands for no groups. `None`: there was no ID token, the one of the sign-in had the groups, and the userinfo
    /// endpoint names none; so nothing was said of them.
    ///
    /// # Errors
    /// [`RenewalFault`].
    pub async fn renew(
        &self,
        endpoints: &Endpoints,
        recent: &RecentKeys,
        grant: &mut Grant,
        subject: &str,
        now: u64,
    ) -> Result<Option<Vec<String>>, RenewalFault> {
        if !grant.is_of(self) {
            return Err(RenewalFault::Over("the provider is another now".into()));
        }
        let mut is_told = false;
        if let Some(refresh) = &grant.refresh {
            let pairs = [("grant_type", "refresh_token"), ("refresh_token", refresh.expose())];
            let tokens = self.tokens(endpoints, &pairs).await.map_err(|fault| refused(&fault))?;
            let id_token = tokens.id_token.clone();
            grant.take(tokens, now);
            if let Some(token) = id_token {
                let claims = self.renewed(endpoints, recent, &token, now).await?;
                if claims.name("sub") != Some(subject) {
                    return Err(RenewalFault::Over("the ID token names another person".into()));
                }
                if claims.find(&self.groups_claim).is_some() {
                    return Ok(Some(self.groups(&claims)));
                }
                is_told = true;
            }
        }
        match self.userinfo(endpoints, grant, subject).await {
            Ok(Some(claims)) => {
                let is_silent = grant.is_in_id_token && !is_told && claims.find(&self.groups_claim).is_none();
                Ok((!is_silent).then(|| self.groups(&claims)))
            }
            Ok(None) if is_told => Ok(Some(Vec::new())),
            Ok(None) => Err(RenewalFault::Away("there is no ID token in the answer, and no userinfo endpoint".into())),
            Err(SignOnFault::Refused(_)) if grant.refresh.is_none() => {
                Err(RenewalFault::Over("the access token is no longer good".into()))
            }
            Err(SignOnFault::Token(why)) => Err(RenewalFault::Over(why)),
            Err(fault) => Err(RenewalFault::Away(fault.to_string())),
        }
    }

    /// Claims of an ID token that came with a refresh (OpenID Connect Core, section 12.2).
    async fn renewed(
        &self,
        endpoints: &Endpoints,
        recent: &RecentKeys,
        token: &str,
        now: u64,
    ) -> Result<Claims, RenewalFault> {
        let keys = recent.fresh(self, endpoints).await.map_err(|fault| away(&fault))?;
        let claims = match self.own(token.as_bytes(), &keys, now) {
            // A key that is newer than the keys.
            Err(Flaw::Key) => {
                let keys = recent.renewed(self, endpoints).await.map_err(|fault| away(&fault))?;
                self.own(token.as_bytes(), &keys, now)
            }
            claims => claims,
        };
        match claims {
            Ok((claims, _)) => Ok(claims),
            Err(flaw) => Err(RenewalFault::Away(format!("the ID token is not accepted: {flaw}"))),
        }
    }

    /// Claims of the userinfo endpoint about `subject` (OpenID Connect Core, section 5.3); `None`: there is no such endpoint, or no access
    /// token.
    ///
    /// # Errors
    /// [`SignOnFault::Refused`]: the access token is not accepted; [`SignOnFault::Token`]: the answer is about somebody else; else
    /// [`SignOnFault::Away`].
    pub(super) async fn userinfo(
        &self,
        endpoints: &Endpoints,
        grant: &Grant,
        subject: &str,
    ) -> Result<Option<Claims>, SignOnFault> {
        let (Some(url), Some(access)) = (&endpoints.userinfo, &grant.access) else { return Ok(None) };
        let away = |why: String| SignOnFault::Away(format!("userinfo endpoint: {why}"));
        let bearer = HeaderValue::from_str(&format!("Bearer {}", access.expose()));
        let bearer = bearer.map_err(|_| away("the access token cannot be sent".into()))?;
        let fields =
            vec![(header::ACCEPT, HeaderValue::from_static("application/json")), (header::AUTHORIZATION, bearer)];
        let answer = send(Method::GET, url, self.ca_file.as_deref(), fields, Vec::new()).await.map_err(away)?;
        match answer {
            (200, bytes) => about(&bytes, subject).map(Some),
            (401, _) => Err(SignOnFault::Refused("invalid_token".into())),
            (status, _) => Err(away(format!("status {status}"))),
        }
    }

    /// Tells the provider that the refresh token is no longer needed (RFC 7009), where the discovery document names an address for that.
    /// A token of another provider stays here.
    ///
    /// # Errors
    /// [`RenewalFault::Away`]: the provider has not taken it.
    pub async fn revoke(&self, endpoints: &Endpoints, grant: &Grant) -> Result<(), RenewalFault> {
        let (Some(url), Some(token)) = (&endpoints.revocation, &grant.refresh) else { return Ok(()) };
        if !grant.is_of(self) {
            return Ok(());
        }
        let pairs = [("token", token.expose()), ("token_type_hint", "refresh_token")];
        let (fields, body) = self.authenticated(endpoints, &pairs);
        let sent = send(Method::POST, url, self.ca_file.as_deref(), fields, body.into_bytes()).await;
        match sent {
            Ok((200..=299, _)) => Ok(()),
            Ok((status, _)) => Err(RenewalFault::Away(format!("revocation endpoint: status {status}"))),
            Err(why) => Err(RenewalFault::Away(format!("revocation endpoint: {why}"))),
        }
    }

    /// URL that a browser opens to end the session at the provider, too (OpenID Connect RP-Initiated Logout 1.0), and that leads back to
    /// `home`; `None`: the provider has none.
    #[must_use]
    pub fn sign_out_url(&self, endpoints: &Endpoints, grant: Option<&Grant>, home: &str) -> Option<String> {
        let url = endpoints.end_session.as_ref()?;
        let mut pairs = vec![("client_id", self.client_id.as_str()), ("post_logout_redirect_uri", home)];
        let hint = grant.filter(|grant| grant.is_of(self)).and_then(|grant| grant.hint.as_ref()).map(Secret::expose);
        pairs.extend(hint.filter(|hint| hint.len() <= HINT_BYTES_MAX).map(|hint| ("id_token_hint", hint)));
        Some(with_query(url, &pairs))
    }
}

/// Claims of a userinfo answer, if it is about `subject`: OpenID Connect requires that comparison.
fn about(bytes: &[u8], subject: &str) -> Result<Claims, SignOnFault> {
    let read: Map<String, Value> = serde_json::from_slice(bytes)
        .map_err(|_| SignOnFault::Away("userinfo endpoint: the answer is not a JSON object".into()))?;
    let claims = Claims::of(read);
    match claims.name("sub") == Some(subject) {
        true => Ok(claims),
        false => Err(SignOnFault::Token("sub of the userinfo endpoint is not the ID token's".into())),
    }
}

/// Fault of a refresh: the errors that say that the person has to sign in again end the sign-in, others may be the registration's.
fn refused(fault: &SignOnFault) -> RenewalFault {
    match fault {
        SignOnFault::Refused(code)
            if ["invalid_grant", "login_required", "interaction_required", "consent_required", "access_denied"]
                .contains(&code.as_str()) =>
        {
            RenewalFault::Over(format!("the refresh token is refused ({code})"))
        }
        fault => away(fault),
    }
}

fn away(fault: &SignOnFault) -> RenewalFault {
    RenewalFault::Away(fault.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::sign_on::tests::{found, provider};
    use super::*;

    fn tokens(answer: &Value) -> Tokens {
        Tokens::read(200, answer.to_string().as_bytes()).expect("readable")
    }

    #[test]
    fn answers_of_the_token_endpoint_are_read_or_refused() {
        let read = |status, answer: &[u8]| Tokens::read(status, answer).map(|tokens| tokens.id_token);
        assert_eq!(read(200, br#"{"id_token":"t","access_token":"a"}"#), Ok(Some("t".into())));
        assert_eq!(read(200, br#"{"access_token":"a"}"#), Ok(None));
        assert_eq!(read(400, br#"{"error":"invalid_grant"}"#), Err(SignOnFault::Refused("invalid_grant".into())));
        for (status, answer) in [
            (400, &br#"{"error":"<b>"}"#[..]),
            (400, br#"{"id_token":"t"}"#),
            (200, br#"{"refresh_token":"r"}"#),
            (200, b"<html>"),
            (500, b""),
        ] {
            assert!(matches!(read(status, answer), Err(SignOnFault::Away(_))), "{status}");
        }
        for (written, seconds) in [(json!(60), 60), (json!("60"), 60), (Value::Null, ACCESS_SECONDS)] {
            assert_eq!(tokens(&json!({ "access_token": "a", "expires_in": written })).seconds, seconds);
        }
    }

    #[test]
    fn a_grant_keeps_what_is_good() {
        let first = json!({ "id_token": "i", "access_token": "a", "refresh_token": "r1", "expires_in": 60 });
        let mut grant = Grant::new(&provider(), tokens(&first), 1000);
        let refresh = |grant: &Grant| grant.refresh.as_ref().map(|token| token.expose().to_owned());
        grant.take(tokens(&json!({ "access_token": "b", "refresh_token": "r2", "expires_in": 60 })), 2000);
        assert_eq!(refresh(&grant).as_deref(), Some("r2"), "the new one replaces the old");
        grant.take(tokens(&json!({ "access_token": "c", "expires_in": 60 })), 3000);
        assert_eq!(refresh(&grant).as_deref(), Some("r2"), "not replaced, so still good");
        assert!(grant.is_renewable(9000) && grant.is_revocable());
        assert_eq!(grant.hint.as_ref().map(Secret::expose), Some("i"), "the sign-in's own");
        assert!(!format!("{grant:?}").contains("r2"));
        let bare =
            Grant::new(&provider(), tokens(&json!({ "id_token": "i", "access_token": "a", "expires_in": 60 })), 1000);
        assert!(bare.is_renewable(1049) && !bare.is_renewable(1050) && !bare.is_revocable());
        assert!(
            !bare.clone().of_id_token().is_renewable(1000) && !bare.without_access().is_renewable(1000),
            "a look that cannot succeed is never due"
        );
        let long = "x".repeat(TOKEN_BYTES_MAX + 1);
        let long = json!({ "id_token": "i", "refresh_token": long, "access_token": long });
        assert!(!Grant::new(&provider(), tokens(&long), 1000).is_renewable(1000), "bounded");
    }

    #[test]
    fn what_userinfo_says_is_about_the_same_person() {
        let told = about(br#"{"sub":"u1","groups":["a"]}"#, "u1").expect("the person's");
        assert_eq!(told.list("groups"), Some(vec!["a"]));
        for other in [&br#"{"sub":"u2"}"#[..], br#"{"sub":7}"#, br#"{"groups":["a"]}"#] {
            assert!(matches!(about(other, "u1"), Err(SignOnFault::Token(_))));
        }
        for unreadable in [&b"[]"[..], b"eyJ.a.b", b""] {
            assert!(matches!(about(unreadable, "u1"), Err(SignOnFault::Away(_))));
        }
    }

    #[test]
    fn only_errors_about_the_grant_end_a_sign_in() {
        for code in ["invalid_grant", "interaction_required", "login_required"] {
            assert!(matches!(refused(&SignOnFault::Refused(code.into())), RenewalFault::Over(_)), "{code}");
        }
        for code in ["invalid_client", "temporarily_unavailable", "server_error", "unauthorized_client"] {
            assert!(matches!(refused(&SignOnFault::Refused(code.into())), RenewalFault::Away(_)), "{code}");
        }
        assert!(matches!(refused(&SignOnFault::Away("x".into())), RenewalFault::Away(_)));
    }

    #[test]
    fn the_way_out_leads_through_the_provider_and_back() {
        let home = "https://gw.example/console/";
        let endpoints = found("end_session_endpoint", json!("https://idp.example/out?a=b")).expect("usable");
        let grant = Grant::new(&provider(), tokens(&json!({ "id_token": "e.y.J" })), 0);
        let start = "https://idp.example/out?a=b&client_id=console&post_logout_redirect_uri=https%3A%2F%2Fgw.example%2Fconsole%2F";
        let url = provider().sign_out_url(&endpoints, Some(&grant), home);
        assert_eq!(url, Some(format!("{start}&id_token_hint=e.y.J")));
        assert_eq!(provider().sign_out_url(&endpoints, None, home), Some(start.into()));
        let long = Grant::new(&provider(), tokens(&json!({ "id_token": "x".repeat(HINT_BYTES_MAX + 1) })), 0);
        assert_eq!(provider().sign_out_url(&endpoints, Some(&long), home), Some(start.into()));
        let elsewhere = Provider { client_id: "another".into(), ..provider() };
        let url = elsewhere.sign_out_url(&endpoints, Some(&grant), home).expect("a URL");
        assert!(!url.contains("e.y.J"), "a token is for the provider that gave it alone");
        for unprotected in ["http://idp.example/out", "javascript:alert(1)"] {
            let endpoints = found("end_session_endpoint", json!(unprotected)).expect("the rest is usable");
            assert_eq!(provider().sign_out_url(&endpoints, Some(&grant), home), None);
        }
    }
}
