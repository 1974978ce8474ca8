//! Where keys are issued: what `penstock keys` and the admin API do, with everything that is checked before it is done.
//!
//! The text of a key leaves here once, as [`Issued::secret`]. A key that is made from another may do no more than that one: it is
//! checked here, and held to it again at every use. Teams and users are in `owners`.

use std::sync::Arc;
use std::time::Duration;

use penstock_govern::Scope;
use penstock_store::{
    KeyChange, KeyDigest, KeyFilter, KeyId, KeyRecord, Listing, OwnerKind, Page, Rotation, Store, StoreError,
};

use super::directory::{DEPTH_MAX, scope_of};
use super::pepper::Pepper;
use super::secret;
use super::standing::{Judge, Standing};
use crate::config::Snapshot;
use penstock_base::Secret;

/// Longest name, and longest entry of a list.
const TEXT_BYTES_MAX: usize = 256;
/// Entries of a list.
const ENTRIES_MAX: usize = 256;
/// Longest time that an old secret stays good beside the new one.
pub const GRACE_MAX: Duration = Duration::from_secs(90 * 24 * 3600);

/// Issues keys.
#[derive(Clone)]
pub struct Desk {
    pub(super) store: Arc<dyn Store>,
    config: Arc<Snapshot>,
}

/// A key that is wished for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewKey {
    /// What people call it; empty: its id.
    pub name: String,
    /// Its team.
    pub team: Option<String>,
    /// Its user.
    pub user: Option<String>,
    /// The key that it is made from.
    pub parent: Option<KeyId>,
    /// What it may do; what is left empty is the parent's.
    pub scope: Scope,
    /// Its limits.
    pub limits: Vec<String>,
    /// For the books.
    pub tags: Vec<String>,
}

/// A key and, this once, its text.
#[derive(Clone, Debug)]
pub struct Issued {
    /// The text.
    pub secret: Secret,
    /// What is kept.
    pub record: KeyRecord,
}

/// Why it is not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeskError {
    /// A field is not what it may be.
    #[error("{field}: {message}")]
    Invalid {
        /// Which.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// There is none of that id.
    #[error("there is no {0}")]
    NotFound(String),
    /// There is one of that id.
    #[error("there is a {0} already")]
    Taken(String),
    /// The key was taken back.
    #[error("the key {0} is revoked")]
    Revoked(String),
    /// There is no pepper.
    #[error("the pepper cannot be used: {0}")]
    Pepper(String),
    /// The store did not do it.
    #[error(transparent)]
    Store(#[from] StoreError),
}

pub(super) fn invalid(field: &'static str, message: impl Into<String>) -> DeskError {
    DeskError::Invalid { field, message: message.into() }
}

impl Desk {
    /// A desk over a store, by a config's rules.
    pub fn new(store: Arc<dyn Store>, config: Arc<Snapshot>) -> Self {
        Self { store, config }
    }

    /// Issues a key.
    ///
    /// # Errors
    /// What is wrong with the wish, or with pepper or store.
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
        let pepper = Pepper::of(&self.config, true).map_err(DeskError::Pepper)?;
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
        Ok(Issued { secret, record })
    }

    /// Changes a key.
    ///
    /// # Errors
    /// There is no such key, or it would be what it may not.
    pub async fn change(&self, id: &KeyId, mut change: KeyChange, now: u64) -> Result<KeyRecord, DeskError> {
        let mut key = self.show(id).await?;
        // One end, wherever it was said.
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

    /// Gives a key a new secret; the old one is good for `grace` beside it.
    ///
    /// # Errors
    /// There is no such key, or it is revoked.
    pub async fn rotate(&self, id: &KeyId, grace: Duration, now: u64) -> Result<Issued, DeskError> {
        self.good(id).await?;
        if grace > GRACE_MAX {
            return Err(invalid("grace", format!("at most {} days", GRACE_MAX.as_secs() / 86_400)));
        }
        let pepper = Pepper::of(&self.config, true).map_err(DeskError::Pepper)?;
        let secret = secret::make(&pepper);
        let rotation = Rotation {
            digest: KeyDigest(pepper.digest(secret.expose().as_bytes()).0),
            hint: secret::hint(&secret),
            previous_until: now + grace.as_secs(),
            now,
        };
        let record = self.store.rotate_key(id, rotation).await?;
        Ok(Issued { secret, record: record.ok_or_else(|| DeskError::Revoked(id.to_string()))? })
    }

    /// Takes a key back, and with it the keys that were made from it.
    ///
    /// # Errors
    /// There is no such key.
    pub async fn revoke(&self, id: &KeyId, now: u64) -> Result<KeyRecord, DeskError> {
        self.store.revoke_key(id, now).await?.ok_or_else(|| DeskError::NotFound(id.to_string()))
    }

    /// One key.
    ///
    /// # Errors
    /// There is no such key.
    pub async fn show(&self, id: &KeyId) -> Result<KeyRecord, DeskError> {
        self.store.key(id).await?.ok_or_else(|| DeskError::NotFound(id.to_string()))
    }

    /// Keys, in the order in which they were issued.
    ///
    /// # Errors
    /// The store's.
    pub async fn list(&self, filter: &KeyFilter, page: &Page) -> Result<Listing<KeyRecord>, DeskError> {
        Ok(self.store.keys(filter, page).await?)
    }

    /// Whether these keys are good, in their order: what requests with them are told.
    ///
    /// # Errors
    /// The store's.
    pub async fn standings(&self, keys: &[KeyRecord], now: u64) -> Result<Vec<Standing>, DeskError> {
        let mut judge = Judge::new(self.store.as_ref(), &self.config, now);
        let mut out = Vec::with_capacity(keys.len());
        for key in keys {
            out.push(judge.standing(key).await?);
        }
        Ok(out)
    }

    /// A key that is not revoked.
    async fn good(&self, id: &KeyId) -> Result<KeyRecord, DeskError> {
        let key = self.show(id).await?;
        if key.revoked.is_some() { Err(DeskError::Revoked(id.to_string())) } else { Ok(key) }
    }

    /// Whether everything about a key is what it may be.
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

    /// Whether the config has those limits: one that nobody knows would let nobody in.
    ///
    /// # Errors
    /// The first that it does not have.
    pub fn check_limits(&self, limits: &[String]) -> Result<(), DeskError> {
        let unknown = limits.iter().find(|id| self.config.limits.iter().all(|have| *have.id != ***id));
        unknown.map_or(Ok(()), |id| Err(invalid("limits", format!("the config has no limit {id:?}"))))
    }

    /// Whether there is that team, in the config or in the store.
    pub(super) async fn check_team(&self, team: &str) -> Result<(), DeskError> {
        if !self.in_file(team) && self.store.owner(OwnerKind::Team, team).await?.is_none() {
            return Err(invalid("team", format!("there is no team {team:?}")));
        }
        Ok(())
    }

    /// Whether it is a team of the config.
    pub(super) fn in_file(&self, team: &str) -> bool {
        self.config.teams.iter().any(|have| have.id == team)
    }

    /// Whether a key would be within its parent, and that within its own, all the way up.
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

/// Fills what a child leaves open with what its parent may do.
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

/// Whether a scope says what it can mean.
///
/// # Errors
/// What is wrong with it.
pub fn check_scope(scope: &Scope) -> Result<(), DeskError> {
    texts("models", &scope.models)?;
    texts("routes", &scope.routes)?;
    if let Some(route) = scope.routes.iter().find(|route| !route.starts_with('/') && *route != "*") {
        return Err(invalid("routes", format!("{route:?} is no route: they begin with a slash")));
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
