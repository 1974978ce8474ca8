//! The directory: issued keys, and the teams and users that they belong to.
//!
//! Every change raises one version and stamps what it changed with it, so a gateway that holds the whole directory in memory asks one
//! cheap question ([`Keys::directory_changed`]) and then reads only what is new ([`Keys::directory_since`]). Nothing is ever taken away
//! unseen: keys are revoked and owners removed by a mark, which travels like any other change.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use penstock_govern::Scope;

use crate::{KeyId, Listing, Page, StoreError};

/// Digest of a key, made by who issues keys. Shown nowhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyDigest(pub [u8; 32]);

impl fmt::Debug for KeyDigest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("KeyDigest")
    }
}

/// The digest before a rotation, still good for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreviousDigest {
    /// What it was.
    pub digest: KeyDigest,
    /// Unix seconds from which on it is worth nothing.
    pub until: u64,
}

/// An issued key. Times are Unix seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// Its id; made by who issues it ([`KeyId::random`]).
    pub id: KeyId,
    /// What people call it.
    pub name: String,
    /// What is compared.
    pub digest: KeyDigest,
    /// The digest before the last rotation.
    pub previous: Option<PreviousDigest>,
    /// Its last characters, by which its owner knows it.
    pub hint: String,
    /// The team that it belongs to.
    pub team: Option<String>,
    /// The user that it belongs to.
    pub user: Option<String>,
    /// The key that it was made from.
    pub parent: Option<KeyId>,
    /// What it may do.
    pub scope: Scope,
    /// Ids of the limits that it is under.
    pub limits: Vec<String>,
    /// For the books: `name:value` or any word.
    pub tags: Vec<String>,
    /// It was issued.
    pub created: u64,
    /// It was rotated last.
    pub rotated: Option<u64>,
    /// From then on it is worth nothing.
    pub expires: Option<u64>,
    /// It was taken back.
    pub revoked: Option<u64>,
    /// Of the directory, when this key was changed last. Given by the store.
    pub version: u64,
}

/// What is to be changed of a key; `None` stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyChange {
    /// What people call it.
    pub name: Option<String>,
    /// The team; `Some(None)`: none any more.
    pub team: Option<Option<String>>,
    /// The user.
    pub user: Option<Option<String>>,
    /// What it may do.
    pub scope: Option<Scope>,
    /// Its limits.
    pub limits: Option<Vec<String>>,
    /// Its tags.
    pub tags: Option<Vec<String>>,
    /// When it ends.
    pub expires: Option<Option<u64>>,
}

impl KeyChange {
    /// Changes `key`.
    pub fn apply(self, key: &mut KeyRecord) {
        set(&mut key.name, self.name);
        set(&mut key.team, self.team);
        set(&mut key.user, self.user);
        set(&mut key.scope, self.scope);
        set(&mut key.limits, self.limits);
        set(&mut key.tags, self.tags);
        set(&mut key.expires, self.expires);
    }
}

fn set<T>(place: &mut T, change: Option<T>) {
    if let Some(value) = change {
        *place = value;
    }
}

/// A new secret for a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Of the new secret.
    pub digest: KeyDigest,
    /// Its last characters.
    pub hint: String,
    /// The old secret is good until then; what was old already is not any more.
    pub previous_until: u64,
    /// Now.
    pub now: u64,
}

impl Rotation {
    /// Changes `key`.
    pub(crate) fn apply(self, key: &mut KeyRecord) {
        key.previous = Some(PreviousDigest { digest: key.digest, until: self.previous_until });
        (key.digest, key.hint, key.rotated) = (self.digest, self.hint, Some(self.now));
    }
}

/// Which keys are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyFilter {
    /// Of that team.
    pub team: Option<String>,
    /// Of that user.
    pub user: Option<String>,
    /// Made from that key.
    pub parent: Option<KeyId>,
    /// Revoked ones, or those that are not.
    pub revoked: Option<bool>,
}

/// What an owner of keys is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OwnerKind {
    /// People who share limits and a budget.
    Team,
    /// A person or a service.
    User,
}

impl OwnerKind {
    /// As stores and APIs say it.
    pub fn name(self) -> &'static str {
        match self {
            OwnerKind::Team => "team",
            OwnerKind::User => "user",
        }
    }

    /// The kind of that name.
    pub fn parse(name: &str) -> Option<Self> {
        [OwnerKind::Team, OwnerKind::User].into_iter().find(|kind| kind.name() == name)
    }
}

/// A team or a user. Times are Unix seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerRecord {
    /// Which of the two.
    pub kind: OwnerKind,
    /// Its id, chosen by the operator or by the identity provider; unique among its kind.
    pub id: String,
    /// What people call it.
    pub name: String,
    /// The team of a user.
    pub team: Option<String>,
    /// What its keys may do, at most.
    pub scope: Scope,
    /// Ids of the limits that it is under.
    pub limits: Vec<String>,
    /// Ids of the budgets that it is under.
    pub budgets: Vec<String>,
    /// For the books.
    pub tags: Vec<String>,
    /// Nothing of it is served.
    pub blocked: bool,
    /// It was made.
    pub created: u64,
    /// It was removed; seen only in [`Changes`].
    pub removed: Option<u64>,
    /// Of the directory, when it was changed last. Given by the store.
    pub version: u64,
}

/// What is to be changed of a team or user; `None` stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerChange {
    /// What people call it.
    pub name: Option<String>,
    /// The team of a user; `Some(None)`: none any more.
    pub team: Option<Option<String>>,
    /// What its keys may do.
    pub scope: Option<Scope>,
    /// Its limits.
    pub limits: Option<Vec<String>>,
    /// Its budgets.
    pub budgets: Option<Vec<String>>,
    /// Its tags.
    pub tags: Option<Vec<String>>,
    /// Whether nothing of it is served.
    pub blocked: Option<bool>,
}

impl OwnerChange {
    /// Changes `owner`.
    pub fn apply(self, owner: &mut OwnerRecord) {
        set(&mut owner.name, self.name);
        set(&mut owner.team, self.team);
        set(&mut owner.scope, self.scope);
        set(&mut owner.limits, self.limits);
        set(&mut owner.budgets, self.budgets);
        set(&mut owner.tags, self.tags);
        set(&mut owner.blocked, self.blocked);
    }
}

/// What changed in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// Keys as they are now.
    pub keys: Vec<KeyRecord>,
    /// Teams and users as they are now, removed ones too.
    pub owners: Vec<OwnerRecord>,
    /// With these, what is known is of that version: the next question's `since`.
    pub version: u64,
    /// There is more: ask again at once.
    pub more: bool,
}

impl Changes {
    /// Cuts two lists, each in the order of versions and one longer than `limit` if it goes on, to where both are complete.
    pub(crate) fn up_to(limit: u32, now: u64, mut keys: Vec<KeyRecord>, mut owners: Vec<OwnerRecord>) -> Self {
        let (limit, mut version, mut more) = (limit as usize, now, false);
        for versions in
            [keys.iter().map(|key| key.version).collect::<Vec<_>>(), owners.iter().map(|owner| owner.version).collect()]
        {
            if versions.len() > limit {
                more = true;
                version = version.min(versions.get(limit.wrapping_sub(1)).copied().unwrap_or(0));
            }
        }
        keys.retain(|key| key.version <= version);
        owners.retain(|owner| owner.version <= version);
        Self { keys, owners, version, more }
    }
}

/// Keeps the directory.
#[async_trait]
pub trait Keys: Send + Sync + 'static {
    /// Keeps a new key; `version` of what is given does not matter. `None`: its id or digest is taken.
    async fn create_key(&self, key: KeyRecord) -> Result<Option<KeyRecord>, StoreError>;

    /// One key.
    async fn key(&self, id: &KeyId) -> Result<Option<KeyRecord>, StoreError>;

    /// The key with that digest, or with that digest before its last rotation; whether it is still good is the caller's to judge.
    async fn key_by_digest(&self, digest: &KeyDigest) -> Result<Option<KeyRecord>, StoreError>;

    /// Keys, in the order in which they were issued.
    async fn keys(&self, filter: &KeyFilter, page: &Page) -> Result<Listing<KeyRecord>, StoreError>;

    /// Changes a key, revoked or not. `None`: there is none.
    async fn update_key(&self, id: &KeyId, change: KeyChange) -> Result<Option<KeyRecord>, StoreError>;

    /// Gives a key a new secret. `None`: there is none, or it is revoked, or the digest is taken.
    async fn rotate_key(&self, id: &KeyId, rotation: Rotation) -> Result<Option<KeyRecord>, StoreError>;

    /// Takes a key back; once it is, its time stays. Keys made from it stay as they are: who judges a key judges its parents.
    /// `None`: there is none.
    async fn revoke_key(&self, id: &KeyId, now: u64) -> Result<Option<KeyRecord>, StoreError>;

    /// Keeps a new team or user; `version` and `removed` of what is given do not matter. `None`: there is one with that id.
    async fn create_owner(&self, owner: OwnerRecord) -> Result<Option<OwnerRecord>, StoreError>;

    /// One team or user.
    async fn owner(&self, kind: OwnerKind, id: &str) -> Result<Option<OwnerRecord>, StoreError>;

    /// Teams or users, in the order of their ids; `team`: users of that team.
    async fn owners(
        &self,
        kind: OwnerKind,
        team: Option<&str>,
        page: &Page,
    ) -> Result<Listing<OwnerRecord>, StoreError>;

    /// Changes a team or user. `None`: there is none.
    async fn update_owner(
        &self,
        kind: OwnerKind,
        id: &str,
        change: OwnerChange,
    ) -> Result<Option<OwnerRecord>, StoreError>;

    /// Removes a team or user; its keys stay as they are. `false`: there is none.
    async fn remove_owner(&self, kind: OwnerKind, id: &str, now: u64) -> Result<bool, StoreError>;

    /// The directory's version: 0 while it is empty, higher with each change.
    async fn directory_version(&self) -> Result<u64, StoreError>;

    /// What changed since that version, oldest change first, at most `limit` keys and as many owners.
    async fn directory_since(&self, version: u64, limit: u32) -> Result<Changes, StoreError>;

    /// Waits until the directory's version is another than `seen`, at most for `wait`, and says what it is. A change made by another
    /// process is seen within 300 ms. Cancel-safe.
    async fn directory_changed(&self, seen: u64, wait: Duration) -> Result<u64, StoreError>;
}
