//! Principals: the authenticated identity of a request, and the check of its scopes.

use std::net::IpAddr;
use std::sync::Arc;

use penstock_govern::Scope;
use penstock_proto::ErrorKind;
use penstock_types::Dialect;

use super::jwt::issuer::User;
use crate::route::AuthClass;
use penstock_base::error::Failure;

/// Begin of the key ids under which admin keys ask models. No API key has a colon in its id.
const CONSOLE: &str = "console:";

/// Authenticated identity of a request. Only modules beside this one can build a principal with a tenant or scopes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Principal {
    /// Id of the key; `None` for a token's user, and where no credential is needed.
    pub key: Option<String>,
    /// Parent keys of the key, nearest first, at most eight; spending counts for them too.
    pub parents: Vec<Parent>,
    /// Id of the team whose scope and limits apply; `None`: no team.
    pub team: Option<String>,
    /// Person or service behind the key or token, for reports and the log.
    pub user: Option<String>,
    /// Ids of the limits that apply: those of the key and its parents, and of their users and teams.
    pub limits: Vec<String>,
    /// Weight in fair sharing of our workers; 0 counts as 1.
    pub weight: u32,
    /// Tenant id, which separates stored objects and the prefix cache.
    pub(super) tenant: String,
    /// Identity that a token's claims gave; `None` for keys and anonymous requests.
    pub(super) person: Option<Arc<User>>,
    /// End of validity of the token that the request came with, in Unix seconds (exclusive), the clock leeway included;
    /// `None`: no token, or deferred work of its user.
    pub(super) until: Option<u64>,
    /// Scopes of the key and its parents, and of their users and teams; all of them must allow a use.
    pub(super) scopes: Vec<Arc<Scope>>,
}

/// Parent of the key that a request came with; its limits count the request too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parent {
    /// Id of the parent key, as in the log and the ledger.
    pub id: String,
    /// User of the parent: its own, or that of the key above it; a child without a user has it, too.
    pub user: Option<String>,
    /// Team of the parent: its own, its user's, or that of the key above it.
    pub team: Option<String>,
    /// Ids of the limits of the parent, its own user and its team; spending of child keys counts in them.
    pub limits: Vec<String>,
}

/// Facts about one use of a credential that scopes are checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    /// Bounded name of the request's route, as the scopes' `routes` list it.
    pub(crate) route: &'static str,
    /// Credential that the route needs; operators' routes need a key that lists them.
    pub(crate) class: AuthClass,
    /// Dialect of the request, as the scopes' `dialects` list it.
    pub(crate) dialect: Dialect,
    /// Address of the client; `None`: a Unix socket.
    pub(crate) address: Option<IpAddr>,
    /// True if a client is connected; deferred work has no address to check.
    pub(crate) is_live: bool,
    /// Time of the use in Unix seconds.
    pub(crate) now: u64,
}

impl Principal {
    /// Principal of a person who is signed in at the console with the admin key `id`: key and tenant `console:ID`, which no API key, user or
    /// token can have. Every model is allowed; `limits` and those for everyone apply. The caller has checked the role.
    #[must_use]
    pub fn console(id: &str, limits: Vec<String>) -> Self {
        let name = format!("{CONSOLE}{id}");
        Self { key: Some(name.clone()), tenant: name, limits, ..Self::default() }
    }

    /// Returns true if every scope of the principal allows the model; true for a principal without scopes.
    pub fn may_use(&self, model: &str) -> bool {
        self.scopes.iter().all(|scope| scope.has_model(model))
    }

    /// Refuses a field that names further models to the upstream if the principal is restricted to some models: only
    /// the upstream knows which of them answers, so the gateway cannot enforce the scope.
    ///
    /// # Errors
    /// 403 for the client, with the field's name.
    pub fn check_other_models(&self, field: Option<&'static str>) -> Result<(), Failure> {
        match field.filter(|_| self.scopes.iter().any(|scope| scope.is_held_to_models())) {
            None => Ok(()),
            Some(field) => {
                let message = format!("{field}: this API key is held to some models, so it cannot name others here.");
                Err(Failure::new(ErrorKind::Forbidden, message).param(field))
            }
        }
    }

    /// Tenant id, which separates stored objects and the prefix cache; empty for nobody.
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// Checks expiry, address, route and dialect of all scopes against a use. This is the only place that does; models
    /// are checked once the model is known ([`Principal::may_use`]).
    ///
    /// # Errors
    /// 401 or 403 for the client.
    pub(crate) fn check(&self, asked: &Use) -> Result<(), Failure> {
        let all = |rule: &dyn Fn(&Scope) -> bool| self.scopes.iter().all(|scope| rule(scope));
        if self.is_expired(asked.now) {
            return Err(Failure::new(ErrorKind::Unauthorized, "This API key has expired."));
        }
        let forbidden = |message: String| Err(Failure::new(ErrorKind::Forbidden, message));
        if asked.is_live && !all(&|scope| scope.has_address(asked.address)) {
            return forbidden("This API key may not be used from this address.".into());
        }
        if !all(&|scope| scope.has_route(asked.route)) {
            return forbidden(format!("This API key may not use {}.", asked.route));
        }
        if asked.class == AuthClass::Operator && !self.names(asked.route) {
            return forbidden(format!("{} needs a key whose routes list this URL.", asked.route));
        }
        if !all(&|scope| scope.has_dialect(dialect_name(asked.dialect))) {
            let name = dialect_name(asked.dialect);
            return forbidden(format!("This API key may not use the API of {name}."));
        }
        Ok(())
    }

    /// Returns true if any scope has expired at `now` (Unix seconds).
    pub(crate) fn is_expired(&self, now: u64) -> bool {
        self.scopes.iter().any(|scope| scope.is_expired(now))
    }

    /// Returns true if a scope lists the route explicitly, rather than by having no list. The anonymous principal of an open
    /// gateway may see the operators' routes: it is the operator's own machine.
    fn names(&self, route: &str) -> bool {
        self.scopes.is_empty() || self.scopes.iter().any(|scope| !scope.routes.is_empty() && scope.has_route(route))
    }
}

/// Names of the dialects that the field `dialects` of keys, teams and issuers may list.
pub const DIALECTS: [&str; 4] = ["openai", "anthropic", "gemini", "ollama"];

/// Name of a dialect as the field `dialects` of a scope lists it.
fn dialect_name(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::OpenAi => "openai",
        Dialect::Anthropic => "anthropic",
        Dialect::Gemini => "gemini",
        Dialect::Ollama => "ollama",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Use = Use {
        route: "/v1/models",
        class: AuthClass::Key,
        dialect: Dialect::OpenAi,
        address: None,
        is_live: true,
        now: 1000,
    };

    fn with(scopes: &[Scope]) -> Principal {
        Principal { scopes: scopes.iter().cloned().map(Arc::new).collect(), ..Principal::default() }
    }

    #[track_caller]
    fn check(principal: &Principal, asked: Use, expected: Option<u16>) {
        let refused = principal.check(&asked).err().map(|failure| failure.status());
        assert_eq!(refused, expected, "{principal:?} {asked:?}");
    }

    #[test]
    fn only_who_is_held_to_no_models_names_further_ones() {
        let free = Scope::default();
        let held = Scope { models: vec!["small".into()], ..Scope::default() };
        let any = Scope { models: vec!["*".into()], ..Scope::default() };
        for (scopes, field, expected) in [
            (vec![], Some("models"), None),
            (vec![free.clone(), any], Some("models"), None),
            (vec![free.clone(), held.clone()], None, None),
            (vec![free, held], Some("fallbacks"), Some(403)),
        ] {
            let refused = with(&scopes).check_other_models(field).err().map(|failure| failure.status());
            assert_eq!(refused, expected, "{scopes:?} {field:?}");
        }
    }

    #[test]
    fn an_admin_key_is_no_api_key() {
        let principal = Principal::console("ops", vec!["x".into()]);
        assert_eq!((principal.key.as_deref(), principal.tenant()), (Some("console:ops"), "console:ops"));
        assert!(principal.may_use("any") && principal.limits == ["x"] && principal.user.is_none());
    }

    #[test]
    fn every_scope_must_allow_a_use() {
        let free = Scope::default();
        let routes = Scope { routes: vec!["/v1/models*".into()], ..Scope::default() };
        let dialects = Scope { dialects: vec!["anthropic".into()], ..Scope::default() };
        let addresses = Scope { addresses: vec!["10.0.0.0/8".parse().expect("a network")], ..Scope::default() };
        let expired = Scope { expires: Some(1000), ..Scope::default() };
        check(&with(std::slice::from_ref(&free)), ASKED, None);
        check(&with(&[free.clone(), routes.clone()]), ASKED, None);
        check(&with(&[routes, free.clone()]), Use { route: "/v1/files", ..ASKED }, Some(403));
        check(&with(&[free.clone(), dialects.clone()]), ASKED, Some(403));
        check(&with(std::slice::from_ref(&dialects)), Use { dialect: Dialect::Anthropic, ..ASKED }, None);
        check(&with(&[free.clone(), addresses.clone()]), ASKED, Some(403));
        check(&with(&[addresses]), Use { address: Some([10, 1, 1, 1].into()), ..ASKED }, None);
        check(&with(&[free, expired.clone()]), ASKED, Some(401));
        check(&with(&[expired]), Use { now: 999, ..ASKED }, None);
    }

    #[test]
    fn what_operators_see_is_named() {
        let asked = Use { route: "/metrics", class: AuthClass::Operator, ..ASKED };
        check(&with(&[Scope::default()]), asked, Some(403));
        check(&with(&[Scope { routes: vec!["/metrics".into()], ..Scope::default() }]), asked, None);
        check(&with(&[Scope { routes: vec!["/*".into()], ..Scope::default() }]), asked, None);
        check(&Principal::default(), asked, None);
    }
}
