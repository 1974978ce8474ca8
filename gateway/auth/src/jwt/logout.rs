//! Logout tokens: an identity provider tells that a person has signed out there (OpenID Connect Back-Channel Logout 1.0).
//!
//! Deliberately absent: sessions that end by it (the admin API's).

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::Mutex;

use super::jwks::KeySet;
use super::sign_on::{Endpoints, Provider, SignOnFault, issued};
use super::token::{Claims, Flaw, Unverified};

/// Longest logout token in bytes.
pub const LOGOUT_BYTES_MAX: usize = 16 * 1024;
/// Time for which fetched keys are used, and after which a failed fetch is tried again.
const FRESH: Duration = Duration::from_secs(5);
/// Age of keys at which a token of an unknown key has them fetched anew.
const RENEWED: Duration = Duration::from_secs(1);
/// Member of `events` that makes a token a logout token.
const EVENT: &str = "http://schemas.openid.net/event/backchannel-logout";

/// Sign-out of a person, or of one of its sessions at the provider. At least one of `subject` and `session` is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedOut {
    /// Claim `sub`: the person.
    pub subject: Option<String>,
    /// Claim `sid`: the session at the provider; `None`: all of the person's.
    pub session: Option<String>,
    /// Unix second of the sign-out by the provider's clock (`iat`).
    pub at: u64,
}

/// Keys of a provider as last fetched, so that calls that anybody can make ask the provider at most once a second.
#[derive(Debug, Default)]
pub struct RecentKeys(Mutex<Option<Fetched>>);

#[derive(Debug)]
struct Fetched {
    provider: Provider,
    at: Instant,
    keys: Result<Arc<KeySet>, SignOnFault>,
}

impl RecentKeys {
    /// Keys of the provider that are at most [`FRESH`] old.
    pub(super) async fn fresh(&self, provider: &Provider, endpoints: &Endpoints) -> Result<Arc<KeySet>, SignOnFault> {
        self.of(provider, endpoints, FRESH).await
    }

    /// Keys of the provider for a token whose key is not among the fresh ones.
    pub(super) async fn renewed(&self, provider: &Provider, endpoints: &Endpoints) -> Result<Arc<KeySet>, SignOnFault> {
        self.of(provider, endpoints, RENEWED).await
    }

    /// Keys of the provider that are younger than `age_max`, fetched if there are none.
    ///
    /// # Errors
    /// [`SignOnFault::Away`], also of the last fetch if it was within [`FRESH`].
    async fn of(
        &self,
        provider: &Provider,
        endpoints: &Endpoints,
        age_max: Duration,
    ) -> Result<Arc<KeySet>, SignOnFault> {
        // Held over the fetch, so that many who come at once ask once.
        let mut last = self.0.lock().await;
        if let Some(last) = last.as_ref().filter(|last| last.provider == *provider) {
            let life = if last.keys.is_ok() { age_max } else { FRESH };
            if last.at.elapsed() < life {
                return last.keys.clone();
            }
        }
        let keys = provider.keys(endpoints).await.map(Arc::new);
        if let Err(fault) = &keys {
            tracing::warn!(issuer = provider.issuer, %fault, "tokens of the identity provider cannot be read");
        }
        *last = Some(Fetched { provider: provider.clone(), at: Instant::now(), keys: keys.clone() });
        keys
    }
}

impl Provider {
    /// Verifies a logout token. `now`: Unix seconds.
    ///
    /// # Errors
    /// [`SignOnFault::Away`] or [`SignOnFault::Token`]. Keys are fetched for tokens that name this issuer alone.
    pub async fn signed_out(
        &self,
        endpoints: &Endpoints,
        recent: &RecentKeys,
        token: &str,
        now: u64,
    ) -> Result<SignedOut, SignOnFault> {
        let refused = |flaw: Flaw| SignOnFault::Token(flaw.to_string());
        if token.len() > LOGOUT_BYTES_MAX {
            return Err(refused(Flaw::Malformed));
        }
        let unverified = self.of_this_issuer(token).map_err(refused)?;
        let keys = recent.fresh(self, endpoints).await?;
        let ended = match self.ended(unverified, &keys, now) {
            // A key that is newer than the keys, or none of the provider's.
            Err(Flaw::Key) => {
                let keys = recent.renewed(self, endpoints).await?;
                self.of_this_issuer(token).and_then(|unverified| self.ended(unverified, &keys, now))
            }
            ended => ended,
        };
        ended.map_err(refused)
    }

    fn of_this_issuer<'a>(&self, token: &'a str) -> Result<Unverified<'a>, Flaw> {
        let unverified = Unverified::parse(token.as_bytes())?;
        if unverified.issuer() == Some(self.issuer.as_str()) { Ok(unverified) } else { Err(Flaw::Issuer) }
    }

    /// Sign-out of a logout token (section 2.6). Its `exp` may be missing, as it did before the final text; its `iat` may not.
    fn ended(&self, unverified: Unverified<'_>, keys: &KeySet, now: u64) -> Result<SignedOut, Flaw> {
        let claims = unverified.verify_logout(keys)?;
        claims.check_audience(std::slice::from_ref(&self.client_id))?;
        claims.check_times(now)?;
        let at = issued(&claims, now)?;
        let wrong = |text: &str| Flaw::Claim(text.to_owned());
        if !claims.find("events").and_then(|events| events.get(EVENT)).is_some_and(Value::is_object) {
            return Err(wrong("events is not a logout's"));
        }
        // What a logout token never has: an ID token would otherwise pass for one.
        if claims.find("nonce").is_some() {
            return Err(wrong("nonce must not be there"));
        }
        let [subject, session] = [text(&claims, "sub")?, text(&claims, "sid")?];
        if subject.is_none() && session.is_none() {
            return Err(wrong("sub is missing, and sid too"));
        }
        Ok(SignedOut { subject, session, at })
    }
}

/// Text claim that may be missing. One that no sign-in could have named is refused: to take it for missing could end more sessions.
fn text(claims: &Claims, name: &str) -> Result<Option<String>, Flaw> {
    match (claims.find(name), claims.name(name)) {
        (None, _) => Ok(None),
        (Some(_), Some(text)) => Ok(Some(text.to_owned())),
        (Some(_), None) => Err(Flaw::Claim(format!("{name} is of the wrong kind"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::token::tests::{NOW, claims, config, set, signed_by_rsa};
    use super::*;

    fn provider() -> Provider {
        Provider {
            issuer: "https://idp.example".into(),
            client_id: "console".into(),
            client_secret: None,
            client_auth: None,
            scopes: vec!["openid".into()],
            parameters: Vec::new(),
            required: Vec::new(),
            groups_claim: "groups".into(),
            algorithms: config().algorithms,
            ca_file: None,
        }
    }

    /// Result for the claims of a good token with those changes; null takes a claim out.
    #[expect(clippy::needless_pass_by_value, reason = "reads as data")]
    fn ended(changes: Value) -> Result<SignedOut, String> {
        let mut all = claims();
        (all["aud"], all["sid"], all["events"]) = (json!("console"), json!("s1"), json!({ EVENT: {} }));
        for (name, value) in changes.as_object().expect("an object") {
            match value {
                Value::Null => drop(all.as_object_mut().expect("an object").remove(name)),
                value => all[name] = value.clone(),
            }
        }
        let keys = KeySet::parse(&set(), &config().algorithms).expect("a set");
        let token = signed_by_rsa(&all);
        let found = provider().of_this_issuer(&token).and_then(|token| provider().ended(token, &keys, NOW));
        found.map_err(|flaw| flaw.to_string())
    }

    #[test]
    fn a_logout_names_a_person_or_a_session() {
        let both =
            SignedOut { subject: Some("u1".into()), session: Some("s1".into()), at: ended(json!({})).unwrap().at };
        assert_eq!(ended(json!({})), Ok(both.clone()));
        assert_eq!(ended(json!({ "sid": null })), Ok(SignedOut { session: None, ..both.clone() }));
        assert_eq!(ended(json!({ "sub": null })), Ok(SignedOut { subject: None, ..both.clone() }));
        assert_eq!(ended(json!({ "exp": null })), Ok(both.clone()));
        assert_eq!(ended(json!({ "aud": ["other", "console"] })), Ok(both));
    }

    #[test]
    fn what_is_no_logout_of_this_client_is_refused() {
        for (changes, part) in [
            (json!({ "iss": "https://evil.example" }), "issuer"),
            (json!({ "aud": "penstock" }), "another audience"),
            (json!({ "exp": NOW - 60 }), "expired"),
            (json!({ "iat": null }), "iat is missing"),
            (json!({ "iat": NOW - 661 }), "iat is too long ago"),
            (json!({ "iat": NOW + 61 }), "not valid yet"),
            (json!({ "events": null }), "events"),
            (json!({ "events": EVENT }), "events"),
            (json!({ "events": [EVENT] }), "events"),
            (json!({ "events": { "http://schemas.openid.net/event/other": {} } }), "events"),
            (json!({ "events": { EVENT: "now" } }), "events"),
            (json!({ "nonce": "n0" }), "nonce"),
            (json!({ "sub": null, "sid": null }), "sub is missing"),
            (json!({ "sid": 7 }), "sid is of the wrong kind"),
            (json!({ "sid": ["s1"] }), "sid is of the wrong kind"),
            (json!({ "sid": "" }), "sid is of the wrong kind"),
            (json!({ "sub": "a\u{0}" }), "sub is of the wrong kind"),
        ] {
            let flaw = ended(changes.clone()).expect_err(part);
            assert!(flaw.contains(part), "{flaw}: {changes}");
        }
    }
}
