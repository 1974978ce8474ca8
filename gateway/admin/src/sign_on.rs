//! People who sign in with an identity provider: what they may do now, and where the provider is.

use std::time::{Duration, Instant};

use penstock_auth::jwt::{Endpoints, Provider};
use penstock_config::{AdminConfig, OIDC, OidcConfig};
use penstock_console::{Holder, Person};
use tokio::sync::Mutex;

use crate::error::ApiError;
use crate::keys::Caller;
use crate::state::State;

/// Time for which a discovery document is used.
const FRESH: Duration = Duration::from_secs(60);
/// Time after a failed discovery in which none is tried.
const FAILED: Duration = Duration::from_secs(5);

/// Id and role, as they are now, of a session's holder; `None`: the key, the provider or the role is gone.
pub(crate) fn worth(admin: &State, config: &AdminConfig, holder: &Holder) -> Option<Caller> {
    match holder {
        Holder::Key(digest) => admin.keys.holder(&config.keys, digest),
        Holder::Person(person) => caller(config.oidc.as_ref()?, person),
    }
}

/// Caller that a person is under the config; `None`: it has another provider, or no role for the person's groups.
pub(crate) fn caller(config: &OidcConfig, person: &Person) -> Option<Caller> {
    if person.provider != config.provider.registration() {
        return None;
    }
    let role = config.role(&person.groups)?;
    Some(Caller { key: format!("{OIDC}{}", person.subject), role, person: Some(person.name.clone()) })
}

struct Known {
    provider: Provider,
    at: Instant,
    found: Option<Endpoints>,
}

/// Addresses of the provider, fetched at most once a minute for all who sign in.
#[derive(Default)]
pub(crate) struct Directions(Mutex<Option<Known>>);

impl Directions {
    /// Addresses of that provider.
    pub(crate) async fn of(&self, provider: &Provider) -> Result<Endpoints, ApiError> {
        // Held over the fetch, so that many who come at once ask once.
        let mut known = self.0.lock().await;
        if let Some(known) = known.as_ref().filter(|known| known.provider == *provider) {
            let life = if known.found.is_some() { FRESH } else { FAILED };
            if known.at.elapsed() < life {
                return known.found.clone().ok_or_else(away);
            }
        }
        let found = provider.discover().await;
        if let Err(fault) = &found {
            tracing::warn!(issuer = provider.issuer, %fault, "sign-in at the console with the identity provider is not possible");
        }
        let found = found.ok();
        *known = Some(Known { provider: provider.clone(), at: Instant::now(), found: found.clone() });
        found.ok_or_else(away)
    }
}

/// Error of a provider that is out of reach, or answers what nobody can use.
pub(crate) fn away() -> ApiError {
    ApiError::unavailable(
        "The identity provider cannot be reached or used now; the gateway's log has the reason. An admin key still signs in.",
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use penstock_config::Role;

    use super::*;

    fn config() -> OidcConfig {
        let provider = Provider {
            issuer: "https://idp.example".into(),
            client_id: "console".into(),
            client_secret: None,
            client_auth: None,
            scopes: vec!["openid".into()],
            parameters: Vec::new(),
            groups_claim: "groups".into(),
            required: Vec::new(),
            algorithms: Vec::new(),
            ca_file: None,
        };
        OidcConfig {
            provider,
            name: "idp".into(),
            roles: vec![("staff".into(), Role::Viewer), ("admins".into(), Role::Owner)],
            default_role: None,
            redirect_url: None,
            session: Duration::from_secs(60),
            refresh: None,
            stale: Duration::from_secs(1800),
            sign_out: false,
            limits: Vec::new(),
        }
    }

    #[test]
    fn a_person_is_worth_what_the_config_says_now() {
        let mut config = config();
        let person = Person {
            provider: config.provider.registration(),
            subject: "u1".into(),
            name: "ada".into(),
            groups: vec!["admins".into()],
            session: None,
            issued: 0,
            began: Instant::now(),
        };
        let expected = Caller { key: "oidc:u1".into(), role: Role::Owner, person: Some("ada".into()) };
        assert_eq!(caller(&config, &person), Some(expected));
        config.roles[1].1 = Role::Operator;
        assert_eq!(caller(&config, &person).map(|caller| caller.role), Some(Role::Operator));
        config.roles.truncate(1);
        assert_eq!(caller(&config, &person), None, "no group with a role");
        for (issuer, client_id) in [("https://other.example", "console"), ("https://idp.example", "other")] {
            let mut config = self::config();
            (config.provider.issuer, config.provider.client_id) = (issuer.into(), client_id.into());
            assert_eq!(caller(&config, &person), None, "signed in elsewhere");
        }
    }
}
