//! Issue desk for keys: the operations behind `penstock keys` and the admin API, with all of their validation.
//!
//! The secret text of a key leaves this module once, as [`Issued::secret`]; the store keeps a digest. A child key may
//! do no more than its parent: that is checked here, and enforced again at every use. Teams and users are in `owners`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use penstock_govern::Scope;
use penstock_store::{
    KeyChange, KeyDigest, KeyFilter, KeyId, KeyRecord, Listing, OwnerKind, Page, Rotation, Store, StoreError,
};

use super::directory::{DEPTH_MAX, scope_of};
use super::identity::AuthSettings;
use super::marker;
use super::pepper::{Pepper, PepperPlace};
use super::secret;
use super::standing::{Judge, Standing};
use penstock_base::Secret;

/// Most bytes of a name or of a list entry.
const TEXT_BYTES_MAX: usize = 256;
/// Most entries of one list in a request to the desk.
const ENTRIES_MAX: usize = 256;
/// Longest grace period in which an old secret stays valid beside its successor.
pub const GRACE_MAX: Duration = Duration::from_secs(90 * 24 * 3600);

/// Issue desk: validates requests against a config and writes keys, teams and users to the store.
#[derive(Clone)]
pub struct Desk {
    pub(super) store: Arc<dyn Store>,
    pepper: PepperPlace,
    /// State folder of the gateway that is marked when a key is issued; `None`: the gateways mark their own.
    state_dir: Option<PathBuf>,
    /// Ids of the config's teams.
    teams: Vec<String>,
    /// Ids of the config's limits.
    limits: Vec<Arc<str>>,
}

/// Settings of a key to be issued, as `penstock keys` or the admin API asks for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewKey {
    /// Display name; empty: the key's id.
    pub name: String,
    /// Team of the key; without one, the parent's.
    pub team: Option<String>,
    /// Person or service that the key is for; without one, the parent's, as it is when the key is used.
    pub user: Option<String>,
    /// Parent key whose scope bounds this key's; `None`: no parent.
    pub parent: Option<KeyId>,
    /// Scope of the key; lists left empty are filled from the parent.
    pub scope: Scope,
    /// Ids of the config's limits that apply to the key.
    pub limits: Vec<String>,
    /// Labels of the issuer's own choice, for usage reports.
    pub tags: Vec<String>,
}

/// Newly issued key with its secret text, which cannot be read again later.
#[derive(Clone, Debug)]
pub struct Issued {
    /// Secret text of the key, shown once; the store keeps its digest.
    pub secret: Secret,
    /// Record as the store has it: digest, hint and settings.
    pub record: KeyRecord,
}

/// Reason why the desk could not issue, change or read a key, team or user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeskError {
    /// A field of the request has a value that cannot be stored or applied.
    #[error("{field}: {message}")]
    Invalid {
        /// Name of the request's field that is invalid.
        field: &'static str,
        /// Reason why the value is invalid, as text for the operator.
        message: String,
    },
    /// No key, team or user has that id.
    #[error("there is no {0}")]
    NotFound(String),
    /// A key, team or user with that id exists already.
    #[error("there is a {0} already")]
    Taken(String),
    /// The key has been revoked, so that it cannot be changed any more.
    #[error("the key {0} is revoked")]
    Revoked(String),
    /// The pepper is missing or unusable, so no digest can be made.
    #[error("the pepper cannot be used: {0}")]
    Pepper(String),
    /// The store failed or refused the operation.
    #[error(transparent)]
    Store(#[from] StoreError),
}

pub(super) fn invalid(field: &'static str, message: impl Into<String>) -> DeskError {
    DeskError::Invalid { field, message: message.into() }
}

impl Desk {
    /// Creates a gateway's desk over a store, by the rules of a config.
    pub fn new(store: Arc<dyn Store>, settings: &AuthSettings<'_>) -> Self {
        let teams = settings.auth.teams.iter().map(|team| team.id.clone()).collect();
        let limits = settings.limits.iter().map(|limit| limit.id.clone()).collect();
        Self { store, pepper: settings.pepper(), state_dir: settings.state_dir.clone().ok(), teams, limits }
    }

    /// Creates the desk of a command beside the gateway. On a store that several gateways share the command may run on any machine: the
    /// state folder there is not marked, and the gateways mark their own when they follow the store.
    pub fn beside(store: Arc<dyn Store>, settings: &AuthSettings<'_>) -> Self {
        let desk = Self::new(store, settings);
        let state_dir = desk.state_dir.filter(|_| !settings.is_shared);
        Self { state_dir, ..desk }
    }

    /// Issues a key at `now` (Unix seconds) and stores its record.
    ///
    /// # Errors
    /// An invalid field, a parent that is missing, revoked or narrower than the wish, a pepper or a store that fails.
    pub async fn create(&self, wish: NewKey, now: u64) -> Result<Issued, DeskError> {
        let NewKey { name, mut team, user, parent, mut scope, limits, tags } = wish;
        text("name", &name)?;
        if let Some(id) = &parent {
            let parent = self.good(id).await?;
            inherit(&mut scope, &scope_of(&parent));
            if team.is_none() {
                team.clone_from(&parent.team);
            }
            self.within(&scope, team.as_deref(), id).await?;
        }
        let pepper = Pepper::of(&self.pepper, true).map_err(DeskError::Pepper)?;
        let (secret, id) = (secret::make(&pepper), KeyId::random());
        let record = KeyRecord {
            name: if name.is_empty() { id.to_string() } else { name },
            id,
            digest: KeyDigest(pepper.digest(secret.expose().as_bytes()).0),
            previous: None,
            hint: secret::hint(&secret),
            team,
            user,
            parent,
            expires: scope.expires,
            scope,
            limits,
            tags,
            created: now,
            rotated: None,
            revoked: None,
            version: 0,
        };
        self.check(&record, now).await?;
        let made = self.store.create_key(record).await?;
        let record = made.ok_or(StoreError::Misuse("an id or digest was made twice"))?;
        self.mark();
        Ok(Issued { secret, record })
    }

    /// Changes the settings of a key; the result is checked as a new key is, against its parents too.
    ///
    /// # Errors
    /// The key does not exist, or the changed key would be invalid.
    pub async fn change(&self, id: &KeyId, mut change: KeyChange, now: u64) -> Result<KeyRecord, DeskError> {
        let mut key = self.show(id).await?;
        // The expiry is in the record and in the scope: keep the two equal, whichever of them the change sets.
        if let Some(scope) = &mut change.scope {
            match change.expires {
                Some(expires) => scope.expires = expires,
                None => change.expires = Some(scope.expires),
            }
        } else if let Some(expires) = change.expires {
            change.scope = Some(Scope { expires, ..key.scope.clone() });
        }
        change.clone().apply(&mut key);
        self.check(&key, now).await?;
        if let Some(parent) = &key.parent {
            self.within(&scope_of(&key), key.team.as_deref(), parent).await?;
        }
        self.store.update_key(id, change).await?.ok_or_else(|| DeskError::NotFound(id.to_string()))
    }

    /// Gives a key a new secret; the old secret stays valid for `grace`, at most `GRACE_MAX`.
    ///
    /// # Errors
    /// The key does not exist or is revoked, or the grace period is too long.
    pub async fn rotate(&self, id: &KeyId, grace: Duration, now: u64) -> Result<Issued, DeskError> {
        self.good(id).await?;
        if grace > GRACE_MAX {
            return Err(invalid("grace", format!("at most {} days", GRACE_MAX.as_secs() / 86_400)));
        }
        let pepper = Pepper::of(&self.pepper, true).map_err(DeskError::Pepper)?;
        let secret = secret::make(&pepper);
        let rotation = Rotation {
            digest: KeyDigest(pepper.digest(secret.expose().as_bytes()).0),
            hint: secret::hint(&secret),
            previous_until: now + grace.as_secs(),
            now,
        };
        let record = self.store.rotate_key(id, rotation).await?.ok_or_else(|| DeskError::Revoked(id.to_string()))?;
        self.mark();
        Ok(Issued { secret, record })
    }

    /// Marks the state folder: a key was issued. After the store has the key, so that a failed attempt closes nothing; before the caller
    /// has it, so that no key is in use whose loss a restart would not notice. A folder that cannot be marked keeps no key back.
    fn mark(&self) {
        if let Some(state_dir) = &self.state_dir {
            marker::make(state_dir);
        }
    }

    /// Revokes a key at `now` (Unix seconds). Its child keys are refused from then on as well.
    ///
    /// # Errors
    /// The key does not exist.
    pub async fn revoke(&self, id: &KeyId, now: u64) -> Result<KeyRecord, DeskError> {
        self.store.revoke_key(id, now).await?.ok_or_else(|| DeskError::NotFound(id.to_string()))
    }

    /// Reads one key.
    ///
    /// # Errors
    /// The key does not exist, or the store fails.
    pub async fn show(&self, id: &KeyId) -> Result<KeyRecord, DeskError> {
        self.store.key(id).await?.ok_or_else(|| DeskError::NotFound(id.to_string()))
    }

    /// Lists keys in the order in which they were issued, one page at a time.
    ///
    /// # Errors
    /// The store fails.
    pub async fn list(&self, filter: &KeyFilter, page: &Page) -> Result<Listing<KeyRecord>, DeskError> {
        Ok(self.store.keys(filter, page).await?)
    }

    /// Standings of `keys`, in the same order: good, or the reason why requests with the key are refused.
    ///
    /// # Errors
    /// The store fails.
    pub async fn standings(&self, keys: &[KeyRecord], now: u64) -> Result<Vec<Standing>, DeskError> {
        let mut judge = Judge::new(self.store.as_ref(), &self.teams, now);
        let mut out = Vec::with_capacity(keys.len());
        for key in keys {
            out.push(judge.standing(key).await?);
        }
        Ok(out)
    }

    /// Reads the record of key `id` from the store; a revoked key is refused with [`DeskError::Revoked`].
    async fn good(&self, id: &KeyId) -> Result<KeyRecord, DeskError> {
        let key = self.show(id).await?;
        if key.revoked.is_some() { Err(DeskError::Revoked(id.to_string())) } else { Ok(key) }
    }

    /// Checks every field of a key record, against the config and the store.
    async fn check(&self, key: &KeyRecord, now: u64) -> Result<(), DeskError> {
        text("name", &key.name)?;
        for (field, owner) in [("team", &key.team), ("user", &key.user)] {
            owner.iter().try_for_each(|name| text(field, name))?;
        }
        check_scope(&key.scope)?;
        texts("limits", &key.limits)?;
        self.check_limits(&key.limits)?;
        texts("tags", &key.tags)?;
        if key.scope.expires.is_some_and(|end| end <= now) {
            return Err(invalid("expires", "lies in the past"));
        }
        let Some(team) = &key.team else { return Ok(()) };
        self.check_team(team).await
    }

    /// Checks that the config has every one of `limits`: a key under an unknown limit would be refused at every
    /// request.
    ///
    /// # Errors
    /// Names the first limit that the config does not have.
    pub fn check_limits(&self, limits: &[String]) -> Result<(), DeskError> {
        let unknown = limits.iter().find(|id| self.limits.iter().all(|have| **have != ***id));
        unknown.map_or(Ok(()), |id| Err(invalid("limits", format!("the config has no limit {id:?}"))))
    }

    /// Checks that the team exists in the config or in the store.
    pub(super) async fn check_team(&self, team: &str) -> Result<(), DeskError> {
        if !self.in_file(team) && self.store.owner(OwnerKind::Team, team).await?.is_none() {
            return Err(invalid("team", format!("there is no team {team:?}")));
        }
        Ok(())
    }

    /// Returns true if the config has a team `team`.
    pub(super) fn in_file(&self, team: &str) -> bool {
        self.teams.iter().any(|have| have == team)
    }

    /// Checks that a scope and team stay within `parent`, and within each key above that one, up to [`DEPTH_MAX`] keys.
    async fn within(&self, scope: &Scope, team: Option<&str>, parent: &KeyId) -> Result<(), DeskError> {
        let mut next = Some(parent.clone());
        for _ in 0..DEPTH_MAX {
            let Some(id) = next else { return Ok(()) };
            let parent = self.good(&id).await?;
            if !scope.is_within(&scope_of(&parent)) {
                return Err(invalid("scope", format!("allows what its parent {id} does not")));
            }
            if parent.team.is_some() && parent.team.as_deref() != team {
                return Err(invalid("team", format!("must be that of its parent {id}")));
            }
            next = parent.parent;
        }
        Err(invalid("parent", format!("at most {DEPTH_MAX} keys may be made from each other")))
    }
}

/// Fills the empty lists and the expiry of a child's scope from its parent's.
fn inherit(scope: &mut Scope, parent: &Scope) {
    fn fill<T: Clone>(own: &mut Vec<T>, parent: &[T]) {
        if own.is_empty() {
            own.extend_from_slice(parent);
        }
    }
    fill(&mut scope.models, &parent.models);
    fill(&mut scope.routes, &parent.routes);
    fill(&mut scope.dialects, &parent.dialects);
    fill(&mut scope.addresses, &parent.addresses);
    scope.expires = scope.expires.or(parent.expires);
}

/// Checks the fields of a scope: lengths, routes that there are, known dialects.
///
/// # Errors
/// Names the field and the reason.
pub fn check_scope(scope: &Scope) -> Result<(), DeskError> {
    texts("models", &scope.models)?;
    texts("routes", &scope.routes)?;
    if let Some(route) = scope.routes.iter().find(|route| !route.starts_with('/') && *route != "*") {
        return Err(invalid("routes", format!("{route:?} is no route: they begin with a slash")));
    }
    if let Some(fault) = scope.routes.iter().find_map(|route| super::route::pattern_fault(route)) {
        return Err(invalid("routes", fault));
    }
    if let Some(name) = scope.dialects.iter().find(|name| !super::DIALECTS.contains(&name.as_str())) {
        return Err(invalid("dialects", format!("{name:?} is none of {}", super::DIALECTS.join(", "))));
    }
    if scope.addresses.len() > ENTRIES_MAX {
        return Err(invalid("addresses", format!("at most {ENTRIES_MAX}")));
    }
    Ok(())
}

pub(super) fn text(field: &'static str, text: &str) -> Result<(), DeskError> {
    if text.len() > TEXT_BYTES_MAX || text.contains(char::is_control) {
        return Err(invalid(field, format!("at most {TEXT_BYTES_MAX} bytes, without control characters")));
    }
    Ok(())
}

pub(super) fn texts(field: &'static str, all: &[String]) -> Result<(), DeskError> {
    if all.len() > ENTRIES_MAX {
        return Err(invalid(field, format!("at most {ENTRIES_MAX}")));
    }
    if all.iter().any(String::is_empty) {
        return Err(invalid(field, "an entry is empty"));
    }
    all.iter().try_for_each(|entry| text(field, entry))
}
