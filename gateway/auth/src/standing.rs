//! Standing of issued keys, as lists show it: the verdict of the key's record, its parent keys and its owners.
//!
//! Requests are judged by the in-memory directory; this module asks the store, and works without a running gateway.

use std::collections::HashMap;

use penstock_store::{KeyId, KeyRecord, OwnerKind, OwnerRecord, Store, StoreError};

use super::directory::{DEPTH_MAX, scope_of};

/// Verdict on requests with an issued key, as lists of keys show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Accepted: neither the key, a parent, nor a user or team of theirs stands against it.
    Good,
    /// Refused: the key has expired.
    Expired,
    /// Refused: the key was revoked.
    Revoked,
    /// Refused: a parent key was revoked or is missing.
    ParentRevoked,
    /// Refused: a parent key has expired.
    ParentExpired,
    /// Refused: the user or team of the key or of a parent is blocked, or a team is missing.
    Blocked,
}

impl Standing {
    /// Name of the verdict in lists of keys and the admin API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
            Self::ParentRevoked => "parent_revoked",
            Self::ParentExpired => "parent_expired",
            Self::Blocked => "blocked",
        }
    }
}

/// Verdict by the key's own record, without its parents and owners, at `now` (Unix seconds).
fn of_record(key: &KeyRecord, now: u64) -> Standing {
    match (key.revoked, scope_of(key).expires) {
        (Some(_), _) => Standing::Revoked,
        (None, Some(end)) if end <= now => Standing::Expired,
        (None, _) => Standing::Good,
    }
}

/// Evaluates keys; reads each parent and owner from the store once.
pub(super) struct Judge<'s> {
    store: &'s dyn Store,
    /// Ids of the config's teams.
    teams: &'s [String],
    now: u64,
    parents: HashMap<KeyId, Option<KeyRecord>>,
    owners: HashMap<(OwnerKind, String), Option<OwnerRecord>>,
}

impl<'s> Judge<'s> {
    pub(super) fn new(store: &'s dyn Store, teams: &'s [String], now: u64) -> Self {
        Self { store, teams, now, parents: HashMap::new(), owners: HashMap::new() }
    }

    pub(super) async fn standing(&mut self, key: &KeyRecord) -> Result<Standing, StoreError> {
        let own = of_record(key, self.now);
        if own != Standing::Good {
            return Ok(own);
        }
        let (mut next, mut parents) = (key.parent.clone(), Vec::new());
        for _ in 0..=DEPTH_MAX {
            let Some(id) = next else { return self.all_owned(key, &parents).await };
            let Some(parent) = self.parent(&id).await? else { return Ok(Standing::ParentRevoked) };
            match of_record(&parent, self.now) {
                Standing::Revoked => return Ok(Standing::ParentRevoked),
                Standing::Expired => return Ok(Standing::ParentExpired),
                _ => next = parent.parent.clone(),
            }
            parents.push(parent);
        }
        Ok(Standing::ParentRevoked)
    }

    async fn parent(&mut self, id: &KeyId) -> Result<Option<KeyRecord>, StoreError> {
        if let Some(known) = self.parents.get(id) {
            return Ok(known.clone());
        }
        let found = self.store.key(id).await?;
        self.parents.insert(id.clone(), found.clone());
        Ok(found)
    }

    /// Verdict by the users and teams of a key and of its parents.
    async fn all_owned(&mut self, key: &KeyRecord, parents: &[KeyRecord]) -> Result<Standing, StoreError> {
        for key in std::iter::once(key).chain(parents) {
            let owned = self.owned(key).await?;
            if owned != Standing::Good {
                return Ok(owned);
            }
        }
        Ok(Standing::Good)
    }

    async fn owned(&mut self, key: &KeyRecord) -> Result<Standing, StoreError> {
        let mut team = key.team.clone();
        if let Some(id) = &key.user
            && let Some(user) = self.owner(OwnerKind::User, id).await?
        {
            if user.blocked {
                return Ok(Standing::Blocked);
            }
            team = team.or(user.team);
        }
        let is_good = match team {
            None => true,
            Some(id) if self.teams.contains(&id) => true,
            Some(id) => self.owner(OwnerKind::Team, &id).await?.is_some_and(|team| !team.blocked),
        };
        Ok(if is_good { Standing::Good } else { Standing::Blocked })
    }

    async fn owner(&mut self, kind: OwnerKind, id: &str) -> Result<Option<OwnerRecord>, StoreError> {
        let place = (kind, id.to_owned());
        if let Some(known) = self.owners.get(&place) {
            return Ok(known.clone());
        }
        let found = self.store.owner(kind, id).await?;
        self.owners.insert(place, found.clone());
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use penstock_store::{Keys, OwnerChange, Sqlite, SqliteOptions};

    use super::super::directory::tests::{owner, record};
    use super::*;

    #[tokio::test]
    async fn a_key_falls_with_its_parents_and_its_owners() {
        let store = Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("a store");
        let teams = ["of-config".to_owned()];
        let child = |id: &str, parent: &str| KeyRecord { parent: KeyId::parse(parent), ..record(id) };
        let of_team = |id: &str, team: &str| KeyRecord { team: Some(team.into()), ..record(id) };
        let all = [
            record("key_root"),
            child("key_child", "key_root"),
            child("key_leaf", "key_child"),
            KeyRecord { expires: Some(50), ..record("key_short") },
            child("key_of_short", "key_short"),
            child("key_orphan", "key_nobody"),
            of_team("key_team", "t"),
            child("key_of_team", "key_team"),
            of_team("key_config", "of-config"),
            of_team("key_lost", "gone"),
        ];
        for key in &all {
            store.create_key(key.clone()).await.expect("kept").expect("new");
        }
        store.create_owner(owner(OwnerKind::Team, "t")).await.expect("kept").expect("new");
        let at = async |id: &str, now: u64| {
            let key = store.key(&KeyId::parse(id).expect("an id")).await.expect("asked").expect("there");
            Judge::new(&store, &teams, now).standing(&key).await.expect("judged")
        };
        for id in
            ["key_root", "key_child", "key_leaf", "key_short", "key_of_short", "key_team", "key_of_team", "key_config"]
        {
            assert_eq!(at(id, 10).await, Standing::Good, "{id}");
        }
        assert_eq!(at("key_orphan", 10).await, Standing::ParentRevoked);
        assert_eq!(at("key_lost", 10).await, Standing::Blocked);
        assert_eq!(
            (at("key_short", 50).await, at("key_of_short", 50).await),
            (Standing::Expired, Standing::ParentExpired)
        );
        store.revoke_key(&all[0].id, 20).await.expect("asked").expect("there");
        assert_eq!(at("key_root", 30).await, Standing::Revoked);
        assert_eq!(
            (at("key_child", 30).await, at("key_leaf", 30).await),
            (Standing::ParentRevoked, Standing::ParentRevoked)
        );
        let block = OwnerChange { blocked: Some(true), ..OwnerChange::default() };
        store.update_owner(OwnerKind::Team, "t", block).await.expect("asked").expect("there");
        for id in ["key_team", "key_of_team"] {
            assert_eq!(at(id, 30).await, Standing::Blocked, "{id}");
        }
    }
}
