//! In-memory directory of issued keys, teams and users, kept current from the store by `follow`.
//!
//! A lookup at request time takes no lock and waits for no I/O. The effective principal of a key (its own scope and
//! those of its parents, team and user) is built at the key's first use and again after each change of the directory,
//! so that revoking a parent refuses its children too.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use penstock_govern::Scope;
use penstock_store::{Changes, KeyId, KeyRecord, OwnerKind, OwnerRecord};

use super::identity::Identity;
use super::key::Digest;
use super::principal::{Parent, Principal};

/// Longest chain of parent keys; a key with a longer chain is refused.
pub const DEPTH_MAX: usize = 8;

/// Immutable snapshot of the issued keys, teams and users at one version of the store; a change makes a new snapshot.
#[derive(Clone, Debug, Default)]
pub(super) struct Directory {
    /// Entries by current digest, and by the digest before the last rotation.
    by_digest: HashMap<Digest, Arc<Entry>>,
    by_id: HashMap<KeyId, Arc<Entry>>,
    owners: HashMap<(OwnerKind, String), Arc<OwnerRecord>>,
    /// Version number that the store gave to the last change in this snapshot.
    pub(super) version: u64,
    /// Random mark that the store gave to that version; `None`: unknown.
    pub(super) mark: Option<String>,
    /// Number of the last change of a team or user, given to no other change in this process; cached tokens are valid for one value of it.
    pub(super) owners_version: u64,
    /// True if an earlier snapshot had keys that the store has lost with its later changes.
    has_lost: bool,
}

/// Next number of a change of teams or users. The store's own numbers come again where it has lost changes.
fn owners_version() -> u64 {
    static VERSIONS: AtomicU64 = AtomicU64::new(1);
    VERSIONS.fetch_add(1, Ordering::Relaxed)
}

/// Issued key as the store recorded it, with the principal built at its first use.
#[derive(Debug)]
pub(super) struct Entry {
    record: KeyRecord,
    made: ArcSwapOption<Made>,
    /// Whether the key has been used before; such a key is exempt from the throttle of wrong guesses.
    pub(super) good: Arc<AtomicBool>,
}

/// Cached principal of a key, valid for one config and one version of the directory.
#[derive(Debug)]
struct Made {
    config: u64,
    version: u64,
    principal: Result<Arc<Principal>, Denied>,
}

/// Reason why the secret of an issued key is refused, although the directory has the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// The key itself was revoked (its record has a time of revocation).
    Revoked,
    /// The secret was replaced by a rotation, and its grace period is over.
    Rotated,
    /// A parent key is revoked or missing, its user or team is blocked, or the chain of parents is too long.
    Parent,
    /// The team of the key is blocked or no longer exists.
    Team,
    /// The user whom the key names is blocked by an operator.
    User,
}

impl Denied {
    /// Message for the client, who holds the key and may therefore learn the reason.
    pub(super) fn message(self) -> &'static str {
        match self {
            Denied::Revoked => "This API key has been revoked.",
            Denied::Rotated => "This API key has been replaced by a new one.",
            Denied::Parent => "The parent key of this API key is no longer valid.",
            Denied::Team => "The team of this API key is blocked or no longer exists.",
            Denied::User => "The user of this API key is blocked.",
        }
    }
}

impl Directory {
    /// Returns true if neither this snapshot nor an earlier one had a key. A gateway whose store has lost its keys refuses
    /// everybody rather than nobody; what earlier processes knew is in the `marker`.
    pub(super) fn is_virgin(&self) -> bool {
        self.is_empty() && !self.has_lost
    }

    /// Returns true if the store has no key, not even a revoked one.
    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Empty snapshot from which the directory is read anew, from a store that has lost changes.
    pub(super) fn anew(&self) -> Self {
        Self { has_lost: !self.is_virgin(), owners_version: owners_version(), ..Self::default() }
    }

    /// Number of issued keys that are not revoked, for the gauge of issued keys.
    pub(super) fn keys(&self) -> usize {
        self.by_id.values().filter(|entry| entry.record.revoked.is_none()).count()
    }

    /// Next snapshot: a copy of this one with `changes` of the store applied. `known`: the snapshot in force, whose keys stay proven.
    pub(super) fn with(&self, changes: Changes, known: &Self) -> Self {
        let mut next = self.clone();
        for record in changes.keys {
            // A rotation changes the digests: remove those of the old record first.
            if let Some(old) = next.by_id.remove(&record.id) {
                digests(&old.record).for_each(|digest| drop(next.by_digest.remove(&digest)));
            }
            let good = known.by_id.get(&record.id).map(|old| old.good.clone()).unwrap_or_default();
            let entry = Arc::new(Entry { record, made: ArcSwapOption::empty(), good });
            digests(&entry.record).for_each(|digest| drop(next.by_digest.insert(digest, entry.clone())));
            next.by_id.insert(entry.record.id.clone(), entry);
        }
        if !changes.owners.is_empty() {
            next.owners_version = owners_version();
        }
        for owner in changes.owners {
            let name = (owner.kind, owner.id.clone());
            match owner.removed {
                Some(_) => drop(next.owners.remove(&name)),
                None => drop(next.owners.insert(name, Arc::new(owner))),
            }
        }
        (next.version, next.mark) = (changes.version, changes.mark);
        next
    }

    /// Entry of the key whose current or previous digest is `digest`; the caller checks the grace period with
    /// [`Entry::takes`].
    pub(super) fn find(&self, digest: &Digest) -> Option<&Arc<Entry>> {
        self.by_digest.get(digest)
    }

    /// Entry of the issued key with id `id`; `None` also for text that is no key id.
    pub(super) fn by_id(&self, id: &str) -> Option<&Arc<Entry>> {
        self.by_id.get(&KeyId::parse(id)?)
    }

    /// Effective principal of a key: from the entry's cache, or built and cached.
    pub(super) fn principal(&self, entry: &Entry, identity: &Identity) -> Result<Arc<Principal>, Denied> {
        let made = entry.made.load();
        if let Some(made) = made.as_ref().filter(|made| made.config == identity.number && made.version == self.version)
        {
            return made.principal.clone();
        }
        let principal = self.put_together(&entry.record, identity).map(Arc::new);
        let made = Made { config: identity.number, version: self.version, principal: principal.clone() };
        entry.made.store(Some(Arc::new(made)));
        principal
    }

    fn put_together(&self, record: &KeyRecord, identity: &Identity) -> Result<Principal, Denied> {
        if record.revoked.is_some() {
            return Err(Denied::Revoked);
        }
        let family = self.family(record, identity)?;
        let principal = Principal {
            key: Some(record.id.to_string()),
            user: record.user.clone(),
            team: record.team.clone(),
            limits: record.limits.clone(),
            tenant: record.id.to_string(),
            scopes: vec![Arc::new(scope_of(record))],
            ..Principal::default()
        };
        let mut principal = self.owned(principal, identity)?;
        if let Some(parent) = family.first() {
            inherit(&mut principal, parent);
        }
        for Principal { key, user, team, limits, scopes, .. } in family {
            principal.scopes.extend(scopes);
            add(&mut principal.limits, &limits);
            principal.parents.push(Parent { id: key.unwrap_or_default(), user, team, limits });
        }
        Ok(principal)
    }

    /// Parent keys, nearest first, each with the scopes and limits of its own user and team.
    fn family(&self, record: &KeyRecord, identity: &Identity) -> Result<Vec<Principal>, Denied> {
        let mut records = Vec::new();
        let mut next = record.parent.as_ref();
        while let Some(id) = next {
            let parent = self.by_id.get(id).map(|entry| &entry.record).filter(|parent| parent.revoked.is_none());
            let parent = parent.filter(|_| records.len() < DEPTH_MAX).ok_or(Denied::Parent)?;
            records.push(parent);
            next = parent.parent.as_ref();
        }
        let mut family: Vec<Principal> = Vec::with_capacity(records.len());
        for record in records.into_iter().rev() {
            let parent = Principal {
                key: Some(record.id.to_string()),
                user: record.user.clone(),
                team: record.team.clone(),
                limits: record.limits.clone(),
                scopes: vec![Arc::new(scope_of(record))],
                ..Principal::default()
            };
            let mut parent = self.owned(parent, identity).map_err(|_| Denied::Parent)?;
            if let Some(above) = family.last() {
                inherit(&mut parent, above);
            }
            family.push(parent);
        }
        family.reverse();
        Ok(family)
    }

    /// Adds the scopes and limits of the principal's user and team; refuses if one of them is blocked or missing.
    pub(super) fn owned(&self, mut principal: Principal, identity: &Identity) -> Result<Principal, Denied> {
        if let Some(user) = principal.user.as_ref().and_then(|user| self.owner(OwnerKind::User, user)) {
            if user.blocked {
                return Err(Denied::User);
            }
            principal.scopes.push(Arc::new(user.scope.clone()));
            add(&mut principal.limits, &user.limits);
            add(&mut principal.limits, &user.budgets);
            principal.team = principal.team.or_else(|| user.team.clone());
        }
        let Some(id) = &principal.team else { return Ok(principal) };
        if let Some(team) = identity.team(id) {
            principal.scopes.push(team.scope.clone());
            principal.weight = team.weight;
            add(&mut principal.limits, &team.limits);
        } else {
            let team = self.owner(OwnerKind::Team, id).filter(|team| !team.blocked).ok_or(Denied::Team)?;
            principal.scopes.push(Arc::new(team.scope.clone()));
            add(&mut principal.limits, &team.limits);
            add(&mut principal.limits, &team.budgets);
        }
        Ok(principal)
    }

    /// Returns true if the config or the directory has a team `id`.
    pub(super) fn has_team(&self, id: &str, identity: &Identity) -> bool {
        identity.team(id).is_some() || self.owner(OwnerKind::Team, id).is_some()
    }

    fn owner(&self, kind: OwnerKind, id: &str) -> Option<&OwnerRecord> {
        self.owners.get(&(kind, id.to_owned())).map(Arc::as_ref)
    }
}

impl Entry {
    /// Checks that `digest` is the current one of this key, or the previous one within its grace period at `now` (Unix
    /// seconds).
    pub(super) fn takes(&self, digest: &Digest, now: u64) -> Result<(), Denied> {
        let is_current = Digest(self.record.digest.0) == *digest;
        let is_in_time = self.record.previous.as_ref().is_some_and(|previous| now < previous.until);
        if is_current || is_in_time { Ok(()) } else { Err(Denied::Rotated) }
    }
}

fn digests(record: &KeyRecord) -> impl Iterator<Item = Digest> {
    let previous = record.previous.as_ref().map(|previous| Digest(previous.digest.0));
    std::iter::once(Digest(record.digest.0)).chain(previous)
}

/// Scope of a key record alone; the expiry is the earlier of the record's and the scope's.
pub(super) fn scope_of(record: &KeyRecord) -> Scope {
    let expires = [record.expires, record.scope.expires].into_iter().flatten().min();
    Scope { expires, ..record.scope.clone() }
}

/// Takes the user, and the team with its weight, of the key above where a key leaves them open.
fn inherit(principal: &mut Principal, above: &Principal) {
    if principal.user.is_none() {
        principal.user.clone_from(&above.user);
    }
    if principal.team.is_none() {
        principal.team.clone_from(&above.team);
        principal.weight = above.weight;
    }
}

fn add(limits: &mut Vec<String>, more: &[String]) {
    more.iter().for_each(|id| {
        if !limits.contains(id) {
            limits.push(id.clone());
        }
    });
}

#[cfg(test)]
pub(super) mod tests {
    use penstock_store::{KeyDigest, PreviousDigest};

    use super::*;

    pub(crate) fn record(id: &str) -> KeyRecord {
        KeyRecord {
            id: KeyId::parse(id).expect("an id"),
            name: id.into(),
            digest: KeyDigest(Digest::of(id.as_bytes()).0),
            previous: None,
            hint: "abcd".into(),
            team: None,
            user: None,
            parent: None,
            scope: Scope::default(),
            limits: vec![format!("{id}-limit")],
            tags: Vec::new(),
            created: 0,
            rotated: None,
            expires: None,
            revoked: None,
            version: 0,
        }
    }

    pub(crate) fn owner(kind: OwnerKind, id: &str) -> OwnerRecord {
        OwnerRecord {
            kind,
            id: id.into(),
            name: id.into(),
            team: None,
            scope: Scope::default(),
            limits: vec![format!("{id}-limit")],
            budgets: Vec::new(),
            tags: Vec::new(),
            blocked: false,
            created: 0,
            removed: None,
            version: 0,
        }
    }

    fn with(directory: &Directory, keys: Vec<KeyRecord>, owners: Vec<OwnerRecord>) -> Directory {
        // Versions are never reused: the cached principal of an entry is valid for one version.
        static VERSIONS: AtomicU64 = AtomicU64::new(1);
        let version = VERSIONS.fetch_add(1, Ordering::Relaxed);
        directory.with(Changes { keys, owners, version, mark: None, more: false }, directory)
    }

    fn who(directory: &Directory, id: &str) -> Result<Arc<Principal>, Denied> {
        let identity = Identity::default();
        directory.principal(directory.find(&Digest::of(id.as_bytes())).expect("a key"), &identity)
    }

    #[test]
    fn a_child_has_its_parents_scopes_and_limits_and_falls_with_them() {
        let top = KeyRecord {
            scope: Scope { models: vec!["chat-*".into()], ..Scope::default() },
            expires: Some(100),
            ..record("key_top")
        };
        let middle = KeyRecord { parent: Some(top.id.clone()), ..record("key_middle") };
        let leaf = KeyRecord { parent: Some(middle.id.clone()), ..record("key_leaf") };
        let all = with(&Directory::default(), vec![top.clone(), middle, leaf], Vec::new());
        let found = who(&all, "key_leaf").expect("good");
        assert_eq!(found.parents.iter().map(|parent| &*parent.id).collect::<Vec<_>>(), ["key_middle", "key_top"]);
        assert_eq!(found.limits, ["key_leaf-limit", "key_middle-limit", "key_top-limit"]);
        assert!(found.may_use("chat-1") && !found.may_use("other") && found.is_expired(100));
        assert_eq!(found.tenant(), "key_leaf");
        let revoked = with(&all, vec![KeyRecord { revoked: Some(5), ..top }], Vec::new());
        assert_eq!(who(&revoked, "key_top"), Err(Denied::Revoked));
        assert_eq!(who(&revoked, "key_leaf"), Err(Denied::Parent));
    }

    #[test]
    fn parents_in_a_circle_end() {
        let one = KeyRecord { parent: KeyId::parse("key_two"), ..record("key_one") };
        let two = KeyRecord { parent: KeyId::parse("key_one"), ..record("key_two") };
        let orphan = KeyRecord { parent: KeyId::parse("key_none"), ..record("key_orphan") };
        let all = with(&Directory::default(), vec![one, two, orphan], Vec::new());
        assert_eq!(who(&all, "key_one"), Err(Denied::Parent));
        assert_eq!(who(&all, "key_orphan"), Err(Denied::Parent));
    }

    #[test]
    fn teams_and_users_narrow_and_block() {
        let key = KeyRecord { team: Some("t".into()), user: Some("u".into()), ..record("key_a") };
        let narrow = Scope { models: vec!["x".into()], ..Scope::default() };
        let team = OwnerRecord { scope: narrow, ..owner(OwnerKind::Team, "t") };
        let all = with(&Directory::default(), vec![key], vec![team.clone(), owner(OwnerKind::User, "u")]);
        let found = who(&all, "key_a").expect("good");
        assert_eq!(found.limits, ["key_a-limit", "u-limit", "t-limit"]);
        assert!(found.may_use("x") && !found.may_use("y"));
        let blocked = with(&all, Vec::new(), vec![OwnerRecord { blocked: true, ..team.clone() }]);
        assert_eq!(who(&blocked, "key_a"), Err(Denied::Team));
        let removed = with(&all, Vec::new(), vec![OwnerRecord { removed: Some(9), ..team }]);
        assert_eq!(who(&removed, "key_a"), Err(Denied::Team), "without its team it would be less limited");
        let user = OwnerRecord { blocked: true, ..owner(OwnerKind::User, "u") };
        assert_eq!(who(&with(&all, Vec::new(), vec![user]), "key_a"), Err(Denied::User));
    }

    #[test]
    fn a_child_has_the_user_and_the_team_of_its_parent() {
        let alice = OwnerRecord {
            team: Some("t".into()),
            scope: Scope { models: vec!["x".into()], ..Scope::default() },
            budgets: vec!["alice-budget".into()],
            ..owner(OwnerKind::User, "alice")
        };
        let team = owner(OwnerKind::Team, "t");
        let parent = KeyRecord { user: Some("alice".into()), ..record("key_parent") };
        let child = KeyRecord { parent: Some(parent.id.clone()), ..record("key_child") };
        let lent = KeyRecord {
            user: Some("bob".into()),
            ..KeyRecord { parent: Some(child.id.clone()), ..record("key_lent") }
        };
        let owners = vec![alice.clone(), team.clone()];
        let all = with(&Directory::default(), vec![parent, child, lent], owners);
        let found = who(&all, "key_child").expect("good");
        assert!(found.may_use("x") && !found.may_use("y"), "alice may not use y");
        assert_eq!((found.user.as_deref(), found.team.as_deref()), (Some("alice"), Some("t")));
        let limits = ["key_child-limit", "key_parent-limit", "alice-limit", "alice-budget", "t-limit"];
        assert_eq!(found.limits, limits);
        assert_eq!(found.parents[0].limits, limits[1..]);
        let found = who(&all, "key_lent").expect("good");
        assert_eq!((found.user.as_deref(), found.team.as_deref()), (Some("bob"), Some("t")));
        let above: Vec<_> = found.parents.iter().map(|parent| (&*parent.id, parent.user.as_deref())).collect();
        assert_eq!(above, [("key_child", Some("alice")), ("key_parent", Some("alice"))]);
        for blocked in [OwnerRecord { blocked: true, ..alice }, OwnerRecord { blocked: true, ..team }] {
            let without = with(&all, Vec::new(), vec![blocked]);
            assert_eq!(who(&without, "key_child"), Err(Denied::Parent));
            assert_eq!(who(&without, "key_lent"), Err(Denied::Parent));
        }
    }

    #[test]
    fn the_digest_before_a_rotation_is_good_for_its_time() {
        let old = record("key_a");
        let before = with(&Directory::default(), vec![old.clone()], Vec::new());
        let previous = Some(PreviousDigest { digest: old.digest, until: 100 });
        let new = KeyRecord { digest: KeyDigest(Digest::of(b"new").0), previous, ..old };
        let after = with(&before, vec![new.clone()], Vec::new());
        let entry = after.find(&Digest::of(b"key_a")).expect("the old one");
        assert_eq!(entry.takes(&Digest::of(b"key_a"), 99), Ok(()));
        assert_eq!(entry.takes(&Digest::of(b"key_a"), 100), Err(Denied::Rotated));
        assert_eq!(entry.takes(&Digest::of(b"new"), 100), Ok(()));
        let newer = KeyRecord { digest: KeyDigest(Digest::of(b"newer").0), previous: None, ..new };
        let last = with(&after, vec![newer], Vec::new());
        assert!(last.find(&Digest::of(b"key_a")).is_none() && last.find(&Digest::of(b"new")).is_none());
    }
}
