//! Issuers of tokens, and the rights that an issuer's config and a token's claims give to a user.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use jsonwebtoken::Algorithm;
use penstock_govern::Scope;
use serde::{Deserialize, Serialize};

use super::ring::Ring;
use super::token::{Claims, Flaw};
use penstock_http::client::Target;

/// Source of an issuer's signing keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeySource {
    /// Path of a JWKS file, read again when it changes.
    File(PathBuf),
    /// HTTPS URL of the JWKS (HTTP only on loopback).
    Url(String),
    /// URL of the OpenID Connect discovery document, which names the JWKS URL.
    Discovery(String),
}

/// Settings of one token issuer: a `[[jwt]]` entry of the config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuerConfig {
    /// Name in logs and metrics; part of the users' tenants.
    pub id: String,
    /// Exact value that the claim `iss` of a token must have.
    pub issuer: String,
    /// Accepted values of `aud`; one match is enough.
    pub audiences: Vec<String>,
    /// Source of the signing keys: a file, a URL, or OpenID Connect discovery.
    pub source: KeySource,
    /// Certificates to trust instead of the system's when keys are fetched.
    pub ca_file: Option<PathBuf>,
    /// Signature algorithms that a token of this issuer may have.
    pub algorithms: Vec<Algorithm>,
    /// Longest time that fetched keys are used while they cannot be fetched anew.
    pub stale: std::time::Duration,
    /// Path of the claim that names the user; dots lead into nested objects.
    pub user_claim: String,
    /// Path of the claim that names the team or lists groups; `None`: only the default team.
    pub team_claim: Option<String>,
    /// Mapping from values of the team claim to teams; empty: the values are the teams.
    pub teams: Vec<(String, String)>,
    /// Default team: of users whose team claim is missing or lists only unknown groups.
    pub team: Option<String>,
    /// True if a user without a team is refused.
    pub team_required: bool,
    /// Path of the claim that lists the user's models; `None`: the issuer's scope alone decides.
    pub models_claim: Option<String>,
    /// Path of the claim that lists ids of limits; `None`: only the issuer's own limits.
    pub limits_claim: Option<String>,
    /// Claims that a token must have, each with the value that it must be or contain.
    pub required: Vec<(String, String)>,
    /// Upper bound of the models, routes, dialects and addresses of the issuer's users.
    pub scope: Arc<Scope>,
    /// Ids of the limits that apply to the issuer's users.
    pub limits: Vec<String>,
}

impl IssuerConfig {
    /// Splits a JWKS or discovery URL into the connection target and the path. Errors if the URL is not HTTPS or
    /// loopback.
    pub fn place(url: &str) -> Result<(Target, String), String> {
        let start = url.find("://").map_or(0, |at| at + 3);
        let at = url[start..].find('/').map_or(url.len(), |at| start + at);
        let (origin, path) = url.split_at(at);
        if !penstock_http::client::target::is_path(path) || path.contains('#') {
            return Err(format!("{url:?} has characters that a URL cannot have"));
        }
        let target = Target::parse(origin)?;
        if !target.is_private() {
            return Err(format!("{url:?} must be https://: whoever can change the keys in transit can sign any token"));
        }
        Ok((target, if path.is_empty() { "/".into() } else { path.to_owned() }))
    }
}

/// Token issuer of the config in force, with the ring of its signing keys.
#[derive(Debug)]
pub(crate) struct Issuer {
    pub(crate) config: IssuerConfig,
    /// Key ring of the issuer, set at first use; it outlives the config.
    pub(crate) ring: OnceLock<Arc<Ring>>,
}

/// Identity of a token's user, as the claims give it under the issuer's config. Stored with the user's deferred work;
/// the config's own rules are not part of it and are applied again when the work runs, so they may change in between.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct User {
    /// Id of the `[[jwt]]` entry whose issuer signed the token.
    pub(crate) issuer: String,
    pub(crate) name: String,
    pub(crate) tenant: String,
    /// Candidate teams in order; the first that exists is the user's.
    pub(crate) teams: Vec<String>,
    /// True if one of the candidate teams must exist.
    pub(crate) needs_team: bool,
    /// Models that the models claim of the token lists; `None`: the config names no such claim.
    pub(crate) models: Option<Vec<String>>,
    /// Ids of limits that the limits claim of the token lists.
    pub(crate) limits: Vec<String>,
}

impl Issuer {
    pub(crate) fn new(config: &IssuerConfig) -> Self {
        Self { config: config.clone(), ring: OnceLock::new() }
    }

    /// Identity of the user that verified claims give: name, tenant, candidate teams, models and limits.
    pub(crate) fn user(&self, claims: &Claims) -> Result<User, Flaw> {
        let config = &self.config;
        for (path, text) in &config.required {
            if !claims.has(path, text) {
                return Err(Flaw::Claim(format!("{path} is not {text:?}")));
            }
        }
        let missing = |path: &str| Flaw::Claim(format!("{path} is missing or of the wrong kind"));
        let name = claims.name(&config.user_claim).ok_or_else(|| missing(&config.user_claim))?;
        // Display names can pass to another person; a subject does not, so the tenant is built from `sub`.
        let subject = claims.name("sub").unwrap_or(name);
        let models = config.models_claim.as_ref().map(|path| {
            let models = claims.words(path).filter(|models| !models.is_empty());
            models.map(|models| owned(&models)).ok_or_else(|| missing(path))
        });
        let limits = config.limits_claim.as_ref().map(|path| {
            let limits = claims.words(path);
            limits.map(|limits| owned(&limits)).ok_or_else(|| missing(path))
        });
        let (issuer, tenant) = (config.id.clone(), format!("jwt:{}:{subject}", config.id));
        let (teams, needs_team) = self.teams(claims);
        let (models, limits) = (models.transpose()?, limits.transpose()?.unwrap_or_default());
        Ok(User { issuer, name: name.to_owned(), tenant, teams, needs_team, models, limits })
    }

    /// Scopes of a user: the config's and the token's; both must allow a use.
    pub(crate) fn scopes(&self, user: &User) -> Vec<Arc<Scope>> {
        let own = user.models.as_ref().map(|models| Scope { models: models.clone(), ..Scope::default() });
        [self.config.scope.clone()].into_iter().chain(own.map(Arc::new)).collect()
    }

    /// Limits that apply to a user: the config's and the token's.
    pub(crate) fn limits(&self, user: &User) -> Vec<String> {
        self.config.limits.iter().chain(&user.limits).cloned().collect()
    }

    /// Candidate teams of a token, and whether one of them must exist. A token that names a single team must name a
    /// known one; of a list of groups, most are expected to be unknown here.
    fn teams(&self, claims: &Claims) -> (Vec<String>, bool) {
        let config = &self.config;
        let claim = config.team_claim.as_ref().and_then(|path| claims.find(path));
        let named = config.team_claim.as_ref().and_then(|path| claims.list(path)).unwrap_or_default();
        let meant = |word: &&str| match config.teams.as_slice() {
            [] => Some((*word).to_owned()),
            teams => teams.iter().find(|(claim, _)| claim == word).map(|(_, team)| team.clone()),
        };
        let is_one = claim.is_some_and(serde_json::Value::is_string);
        let mut teams: Vec<_> = named.iter().filter_map(meant).collect();
        if !is_one {
            teams.extend(config.team.clone());
        }
        (teams, config.team_required || is_one || config.team.is_some())
    }
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}
