//! Key directory: issued keys, and the teams and users that they belong to.
//!
//! Every change increments one version and stamps the changed record with it. A gateway that holds the whole directory
//! in memory therefore polls one cheap query ([`Keys::directory_changed`]) and then reads only the changes
//! ([`Keys::directory_since`]). Each version has a random mark beside it ([`Keys::directory_mark`]): a store that lost changes and
//! made others has the same versions with other marks. No record is deleted: keys are revoked and owners removed by a mark, which propagates
//! like any other change.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use penstock_govern::Scope;

use crate::{KeyId, Listing, Page, StoreError};

/// Digest of a key, computed by the issuer. Its `Debug` output hides the value.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyDigest(pub [u8; 32]);

impl fmt::Debug for KeyDigest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("KeyDigest")
    }
}

/// Digest before a rotation, valid for its grace period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreviousDigest {
    /// Digest of the secret before the rotation.
    pub digest: KeyDigest,
    /// Unix second from which on the old secret is invalid.
    pub until: u64,
}

/// Key issued by this installation, as the directory keeps it. Times are Unix seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// Id, chosen by the issuer ([`KeyId::random`]).
    pub id: KeyId,
    /// Name of the key for people; not unique.
    pub name: String,
    /// Digest of the present secret, by which requests are recognized.
    pub digest: KeyDigest,
    /// Digest before the last rotation, valid for a grace period; `None` before the first rotation.
    pub previous: Option<PreviousDigest>,
    /// Last characters of the secret, by which its owner recognizes it.
    pub hint: String,
    /// Id of the key's team; `None`: no team.
    pub team: Option<String>,
    /// Id of the key's user; `None`: no user.
    pub user: Option<String>,
    /// Id of the key that this one was derived from; `None`: a key without a parent.
    pub parent: Option<KeyId>,
    /// Models, routes and addresses that the key may use.
    pub scope: Scope,
    /// Ids of the limits that apply to the key.
    pub limits: Vec<String>,
    /// Labels for usage reports: `name:value` or any word.
    pub tags: Vec<String>,
    /// Time at which the key was issued.
    pub created: u64,
    /// Time of the last rotation; `None`: never rotated.
    pub rotated: Option<u64>,
    /// Time from which on the key is invalid; `None`: never.
    pub expires: Option<u64>,
    /// Time of revocation; `None`: not revoked.
    pub revoked: Option<u64>,
    /// Version of the directory at the last change of this key; set by the store.
    pub version: u64,
}

/// Change of a key; `None` keeps a field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyChange {
    /// New name of the key.
    pub name: Option<String>,
    /// New team; `Some(None)` removes the key from its team.
    pub team: Option<Option<String>>,
    /// New user; `Some(None)` removes the key from its user.
    pub user: Option<Option<String>>,
    /// New scope, in place of the whole old one.
    pub scope: Option<Scope>,
    /// New ids of limits, in place of all old ones.
    pub limits: Option<Vec<String>>,
    /// New labels for usage reports, in place of all old ones.
    pub tags: Option<Vec<String>>,
    /// New time of expiry; `Some(None)` removes it.
    pub expires: Option<Option<u64>>,
}

impl KeyChange {
    /// Applies the change to the record of a key, field by field.
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

/// New secret of a key, and the grace period of the old one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Digest of the new secret, which the store keeps in place of the secret.
    pub digest: KeyDigest,
    /// Last characters of the new secret, by which its owner recognizes it.
    pub hint: String,
    /// End of the old secret's grace period; a secret that was old already is invalid at once.
    pub previous_until: u64,
    /// Time of the rotation in Unix seconds.
    pub now: u64,
}

impl Rotation {
    /// Applies the rotation to the record of a key: the present digest becomes the previous one.
    pub(crate) fn apply(self, key: &mut KeyRecord) {
        key.previous = Some(PreviousDigest { digest: key.digest, until: self.previous_until });
        (key.digest, key.hint, key.rotated) = (self.digest, self.hint, Some(self.now));
    }
}

/// Filter of the list of keys. `None`: no restriction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyFilter {
    /// Id of the team that the keys belong to.
    pub team: Option<String>,
    /// Id of the user that the keys belong to.
    pub user: Option<String>,
    /// Id of the key that the keys were derived from.
    pub parent: Option<KeyId>,
    /// Revoked keys (`true`), or the others (`false`).
    pub revoked: Option<bool>,
}

/// Kind of an owner of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OwnerKind {
    /// Group that shares limits and a budget.
    Team,
    /// Person or service that holds keys.
    User,
}

impl OwnerKind {
    /// Name of the kind in stores and APIs: `team` or `user`.
    pub fn name(self) -> &'static str {
        match self {
            OwnerKind::Team => "team",
            OwnerKind::User => "user",
        }
    }

    /// Kind with that name; `None` for an unknown one.
    pub fn parse(name: &str) -> Option<Self> {
        [OwnerKind::Team, OwnerKind::User].into_iter().find(|kind| kind.name() == name)
    }
}

/// Team or user. Times are Unix seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerRecord {
    /// Whether the owner is a team or a user.
    pub kind: OwnerKind,
    /// Id, chosen by the operator or by the identity provider; unique within its kind.
    pub id: String,
    /// Name of the owner for people; not unique.
    pub name: String,
    /// Id of the team that a user belongs to; `None` for a team.
    pub team: Option<String>,
    /// Upper bound of what the owner's keys may do.
    pub scope: Scope,
    /// Ids of the limits that apply to the owner.
    pub limits: Vec<String>,
    /// Ids of the budgets that apply to the owner.
    pub budgets: Vec<String>,
    /// Labels that usage reports group the owner's requests by.
    pub tags: Vec<String>,
    /// True if all requests of the owner are refused.
    pub blocked: bool,
    /// Time at which the owner was created.
    pub created: u64,
    /// Time of removal; only set in [`Changes`], since other calls show no removed owners.
    pub removed: Option<u64>,
    /// Version of the directory at the last change of this owner; set by the store.
    pub version: u64,
}

/// Change of a team or user; `None` keeps a field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerChange {
    /// New name of the owner.
    pub name: Option<String>,
    /// New team of a user; `Some(None)` removes the user from the team.
    pub team: Option<Option<String>>,
    /// Upper bound of what the owner's keys may do.
    pub scope: Option<Scope>,
    /// New ids of limits, in place of all old ones.
    pub limits: Option<Vec<String>>,
    /// New ids of budgets, in place of all old ones.
    pub budgets: Option<Vec<String>>,
    /// New labels for usage reports, in place of all old ones.
    pub tags: Option<Vec<String>>,
    /// Whether all requests of the owner are refused.
    pub blocked: Option<bool>,
}

impl OwnerChange {
    /// Applies the change to the record of a team or user, field by field.
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

/// Changes of the key directory after a version, for caches in gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// Keys that have changed, in their current state, revoked ones too.
    pub keys: Vec<KeyRecord>,
    /// Changed teams and users in their current state, removed ones too.
    pub owners: Vec<OwnerRecord>,
    /// Version of the directory after these changes, from which the next call continues.
    pub version: u64,
    /// Mark of that version, as [`Keys::directory_mark`] gives it.
    pub mark: Option<String>,
    /// True if more changes follow, so that the caller should call again at once.
    pub more: bool,
}

impl Changes {
    /// Cuts two lists to a version up to which both are complete. Each is in the order of versions, and one longer than
    /// `limit` if it continues.
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
        Self { keys, owners, version, mark: None, more }
    }
}

/// Store of the directory of keys, teams and users.
#[async_trait]
pub trait Keys: Send + Sync + 'static {
    /// Stores a new key; its `version` is ignored. `None`: the id or digest exists already.
    async fn create_key(&self, key: KeyRecord) -> Result<Option<KeyRecord>, StoreError>;

    /// Reads the record of one key, revoked or not; `None`: no such key.
    async fn key(&self, id: &KeyId) -> Result<Option<KeyRecord>, StoreError>;

    /// Reads the key whose current or previous digest matches; the caller judges whether that digest is still valid.
    async fn key_by_digest(&self, digest: &KeyDigest) -> Result<Option<KeyRecord>, StoreError>;

    /// Lists keys in the order in which they were issued.
    async fn keys(&self, filter: &KeyFilter, page: &Page) -> Result<Listing<KeyRecord>, StoreError>;

    /// Changes a key, revoked or not. `None`: no such key.
    async fn update_key(&self, id: &KeyId, change: KeyChange) -> Result<Option<KeyRecord>, StoreError>;

    /// Gives a key a new secret. `None`: no such key, a revoked key, or a digest that exists already.
    async fn rotate_key(&self, id: &KeyId, rotation: Rotation) -> Result<Option<KeyRecord>, StoreError>;

    /// Revokes a key; a repeated call keeps the first time. Keys made from it are unchanged: a verifier checks the
    /// parents too. `None`: no such key.
    async fn revoke_key(&self, id: &KeyId, now: u64) -> Result<Option<KeyRecord>, StoreError>;

    /// Stores a new team or user; its `version` and `removed` are ignored. `None`: the id exists already.
    async fn create_owner(&self, owner: OwnerRecord) -> Result<Option<OwnerRecord>, StoreError>;

    /// Reads the record of one team or user; `None`: no such owner.
    async fn owner(&self, kind: OwnerKind, id: &str) -> Result<Option<OwnerRecord>, StoreError>;

    /// Lists teams or users in the order of their ids; `team`: users of that team.
    async fn owners(
        &self,
        kind: OwnerKind,
        team: Option<&str>,
        page: &Page,
    ) -> Result<Listing<OwnerRecord>, StoreError>;

    /// Changes a team or user. `None`: no such owner.
    async fn update_owner(
        &self,
        kind: OwnerKind,
        id: &str,
        change: OwnerChange,
    ) -> Result<Option<OwnerRecord>, StoreError>;

    /// Removes a team or user; its keys are unchanged. `false`: no such owner.
    async fn remove_owner(&self, kind: OwnerKind, id: &str, now: u64) -> Result<bool, StoreError>;

    /// Version of the directory: 0 while empty, higher with each change.
    async fn directory_version(&self) -> Result<u64, StoreError>;

    /// Mark of a version: random, given to it by the change that made it, whichever gateway made the change. `None`: the
    /// directory has no such version, or the version is older than the marks that are kept (10,000 changes).
    async fn directory_mark(&self, version: u64) -> Result<Option<String>, StoreError>;

    /// Changes since a version, oldest first, at most `limit` keys and as many owners.
    async fn directory_since(&self, version: u64, limit: u32) -> Result<Changes, StoreError>;

    /// Waits until the directory's version differs from `seen`, at most for `wait`, and returns it. A change by another
    /// process is seen within 300 ms. Cancel-safe.
    async fn directory_changed(&self, seen: u64, wait: Duration) -> Result<u64, StoreError>;
}
