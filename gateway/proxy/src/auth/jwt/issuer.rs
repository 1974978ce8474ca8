//! Who issues tokens, and what a token's user may do.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use jsonwebtoken::Algorithm;
use penstock_govern::Scope;
use serde::{Deserialize, Serialize};

use super::ring::Ring;
use super::token::{Claims, Flaw};
use crate::client::Target;

/// Where an issuer's keys are.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeySource {
    /// In a file.
    File(PathBuf),
    /// At a URL.
    Url(String),
    /// Where the issuer's discovery document says.
    Discovery(String),
}

/// One of `[[jwt]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuerConfig {
    /// Name in logs, metrics and tenants.
    pub id: String,
    /// What `iss` must be.
    pub issuer: String,
    /// What `aud` must be, or have.
    pub audiences: Vec<String>,
    /// Its keys.
    pub source: KeySource,
    /// Certificates to trust instead of the system's, when keys are fetched.
    pub ca_file: Option<PathBuf>,
    /// What its keys may be for.
    pub algorithms: Vec<Algorithm>,
    /// For how long keys are used that cannot be fetched anew.
    pub stale: std::time::Duration,
    /// Claim that names the user.
    pub user_claim: String,
    /// Claim that names the team, or lists groups.
    pub team_claim: Option<String>,
    /// Values of that claim, and the teams that they mean; empty: they are the teams.
    pub teams: Vec<(String, String)>,
    /// Team of everybody whom no claim puts in one.
    pub team: Option<String>,
    /// Whether somebody without a team is refused.
    pub team_required: bool,
    /// Claim that lists models.
    pub models_claim: Option<String>,
    /// Claim that lists limits.
    pub limits_claim: Option<String>,
    /// Claims, and what they must be or have.
    pub required: Vec<(String, String)>,
    /// What its users may do at most.
    pub scope: Arc<Scope>,
    /// Ids of limits that they are under.
    pub limits: Vec<String>,
}

impl IssuerConfig {
    /// Where to connect, and the path there; for keys that are at a URL.
    pub(crate) fn place(url: &str) -> Result<(Target, String), String> {
        let start = url.find("://").map_or(0, |at| at + 3);
        let at = url[start..].find('/').map_or(url.len(), |at| start + at);
        let (origin, path) = url.split_at(at);
        if !crate::client::target::is_path(path) || path.contains('#') {
            return Err(format!("{url:?} has characters that a URL cannot have"));
        }
        let target = Target::parse(origin)?;
        if !target.is_private() {
            return Err(format!("{url:?} must be https://: whoever can change the keys in transit can sign any token"));
        }
        Ok((target, if path.is_empty() { "/".into() } else { path.to_owned() }))
    }
}

/// An issuer of the config in force.
#[derive(Debug)]
pub(crate) struct Issuer {
    pub(crate) config: IssuerConfig,
    /// Its keys; they outlive the config.
    pub(crate) ring: OnceLock<Arc<Ring>>,
}

/// What a genuine token says about its user, by the issuer's config. Kept in the store for what the user leaves to be done: what the
/// config says besides is looked up again when that is done, so it may change meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct User {
    /// Id of its issuer in the config.
    pub(crate) issuer: String,
    pub(crate) name: String,
    pub(crate) tenant: String,
    /// Teams that it may be in, in order; the first that there is counts.
    pub(crate) teams: Vec<String>,
    /// Whether it has to be in one of them.
    pub(crate) needs_team: bool,
    /// Models that the token itself names.
    pub(crate) models: Option<Vec<String>>,
    /// Limits that the token itself names.
    pub(crate) limits: Vec<String>,
}

impl Issuer {
    pub(crate) fn new(config: &IssuerConfig) -> Self {
        Self { config: config.clone(), ring: OnceLock::new() }
    }

    /// The user of a token.
    pub(crate) fn user(&self, claims: &Claims) -> Result<User, Flaw> {
        let config = &self.config;
        for (path, text) in &config.required {
            if !claims.has(path, text) {
                return Err(Flaw::Claim(format!("{path} is not {text:?}")));
            }
        }
        let missing = |path: &str| Flaw::Claim(format!("{path} is missing or of the wrong kind"));
        let name = claims.name(&config.user_claim).ok_or_else(|| missing(&config.user_claim))?;
        // Names of people can pass to others; a subject does not.
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

    /// What the config and the token allow together.
    pub(crate) fn scopes(&self, user: &User) -> Vec<Arc<Scope>> {
        let own = user.models.as_ref().map(|models| Scope { models: models.clone(), ..Scope::default() });
        [self.config.scope.clone()].into_iter().chain(own.map(Arc::new)).collect()
    }

    /// The limits that a user is under: the config's and the token's.
    pub(crate) fn limits(&self, user: &User) -> Vec<String> {
        self.config.limits.iter().chain(&user.limits).cloned().collect()
    }

    /// Teams that the token names, and whether it has to be one of them: who says one team and is wrong is not let in without any.
    /// Among many groups, most mean nothing here.
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
