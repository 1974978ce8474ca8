//! [`Keys`] in PostgreSQL. A change locks the directory's version before it reads anything: changes are serialized, and
//! a reader that has seen a version has seen all changes before it.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio_postgres::Row;

use super::Postgres;
use super::held::{Held, Values, cell, int, json, maybe, number, odd};
use super::listen::CHANNEL;
use crate::json::to_json;
use crate::sql::{direction, listing};
use crate::{
    Changes, KeyChange, KeyDigest, KeyFilter, KeyId, KeyRecord, Keys, Listing, OwnerChange, OwnerKind, OwnerRecord,
    Page, PreviousDigest, Rotation, StoreError,
};

const KEY_COLUMNS: &str = "id, name, digest, previous_digest, previous_until, hint, team_id, user_id, parent, scope, limits, tags, \
                           created, rotated, expires, revoked, version";
const OWNER_COLUMNS: &str = "kind, id, name, team_id, scope, limits, budgets, tags, blocked, created, removed, version";
/// Polling period for changes, in case notifications do not arrive.
const LOOK_EVERY: Duration = Duration::from_millis(250);

fn digest(bytes: &[u8]) -> Result<KeyDigest, StoreError> {
    bytes.try_into().map(KeyDigest).map_err(|_| odd())
}

fn key_record(row: &Row) -> Result<KeyRecord, StoreError> {
    let key_id = |text: &str| KeyId::parse(text).ok_or_else(odd);
    let previous = cell::<Option<&[u8]>>(row, 3)?.zip(maybe(row, 4)?);
    Ok(KeyRecord {
        id: key_id(cell(row, 0)?)?,
        name: cell(row, 1)?,
        digest: digest(cell(row, 2)?)?,
        previous: previous
            .map(|(bytes, until)| Ok::<_, StoreError>(PreviousDigest { digest: digest(bytes)?, until }))
            .transpose()?,
        hint: cell(row, 5)?,
        team: cell(row, 6)?,
        user: cell(row, 7)?,
        parent: cell::<Option<&str>>(row, 8)?.map(key_id).transpose()?,
        scope: json(row, 9)?,
        limits: json(row, 10)?,
        tags: json(row, 11)?,
        created: number(row, 12)?,
        rotated: maybe(row, 13)?,
        expires: maybe(row, 14)?,
        revoked: maybe(row, 15)?,
        version: number(row, 16)?,
    })
}

fn owner_record(row: &Row) -> Result<OwnerRecord, StoreError> {
    Ok(OwnerRecord {
        kind: OwnerKind::parse(cell(row, 0)?).ok_or_else(odd)?,
        id: cell(row, 1)?,
        name: cell(row, 2)?,
        team: cell(row, 3)?,
        scope: json(row, 4)?,
        limits: json(row, 5)?,
        budgets: json(row, 6)?,
        tags: json(row, 7)?,
        blocked: cell(row, 8)?,
        created: number(row, 9)?,
        removed: maybe(row, 10)?,
        version: number(row, 11)?,
    })
}

async fn find(held: &mut Held, condition: &str, values: Values<'_>) -> Result<Option<KeyRecord>, StoreError> {
    let sql = format!("SELECT {KEY_COLUMNS} FROM penstock.issued_keys WHERE {condition}");
    held.one(&sql, values).await?.as_ref().map(key_record).transpose()
}

async fn find_owner(held: &mut Held, kind: OwnerKind, id: &str) -> Result<Option<OwnerRecord>, StoreError> {
    let sql = format!("SELECT {OWNER_COLUMNS} FROM penstock.owners WHERE kind = $1 AND id = $2");
    held.one(&sql, &[&kind.name(), &id]).await?.as_ref().map(owner_record).transpose()
}

async fn mark(held: &mut Held, version: u64) -> Result<Option<String>, StoreError> {
    let sql = "SELECT mark FROM penstock.directory_marks WHERE version = $1";
    held.one(sql, &[&int(version)]).await?.map(|row| cell(&row, 0)).transpose()
}

/// Begins a change of the directory; returns the version that it will have.
async fn begin(held: &mut Held) -> Result<u64, StoreError> {
    held.begin().await?;
    let row = held.one("SELECT version FROM penstock.directory FOR UPDATE", &[]).await?.ok_or_else(odd)?;
    Ok(number(&row, 0)? + 1)
}

/// Commits a change and notifies other gateways; they receive the notification after the commit.
async fn commit(held: &mut Held, version: u64) -> Result<(), StoreError> {
    held.execute("UPDATE penstock.directory SET version = $1", &[&int(version)]).await?;
    held.query("SELECT pg_notify($1, $2)", &[&CHANNEL, &version.to_string()]).await?;
    held.commit().await
}

async fn is_taken(held: &mut Held, digest: &KeyDigest) -> Result<bool, StoreError> {
    Ok(find(held, "digest = $1 OR previous_digest = $1", &[&digest.0.as_slice()]).await?.is_some())
}

/// Inserts the record of a key, or replaces all of its fields.
async fn write(held: &mut Held, key: &KeyRecord) -> Result<(), StoreError> {
    let sql = format!(
        "INSERT INTO penstock.issued_keys ({KEY_COLUMNS})
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)
         ON CONFLICT (id) DO UPDATE SET name = $2, digest = $3, previous_digest = $4, previous_until = $5, hint = $6, team_id = $7,
         user_id = $8, scope = $10, limits = $11, tags = $12, rotated = $14, expires = $15, revoked = $16, version = $17"
    );
    let previous = key.previous.as_ref().map(|previous| previous.digest.0.as_slice());
    let values: Values<'_> = &[
        &key.id.as_str(),
        &key.name,
        &key.digest.0.as_slice(),
        &previous,
        &key.previous.map(|previous| int(previous.until)),
        &key.hint,
        &key.team,
        &key.user,
        &key.parent.as_ref().map(KeyId::as_str),
        &to_json(&key.scope)?,
        &to_json(&key.limits)?,
        &to_json(&key.tags)?,
        &int(key.created),
        &key.rotated.map(int),
        &key.expires.map(int),
        &key.revoked.map(int),
        &int(key.version),
    ];
    held.execute(&sql, values).await.map(drop)
}

async fn write_owner(held: &mut Held, owner: &OwnerRecord) -> Result<(), StoreError> {
    let sql = format!(
        "INSERT INTO penstock.owners ({OWNER_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
         ON CONFLICT (kind, id) DO UPDATE SET name = $3, team_id = $4, scope = $5, limits = $6, budgets = $7, tags = $8,
         blocked = $9, created = $10, removed = $11, version = $12"
    );
    let values: Values<'_> = &[
        &owner.kind.name(),
        &owner.id,
        &owner.name,
        &owner.team,
        &to_json(&owner.scope)?,
        &to_json(&owner.limits)?,
        &to_json(&owner.budgets)?,
        &to_json(&owner.tags)?,
        &owner.blocked,
        &int(owner.created),
        &owner.removed.map(int),
        &int(owner.version),
    ];
    held.execute(&sql, values).await.map(drop)
}

impl Postgres {
    /// Changes an existing key; nothing is written if `change` returns false.
    async fn change_key(
        &self,
        id: &KeyId,
        change: impl FnOnce(&mut KeyRecord) -> bool + Send,
    ) -> Result<Option<KeyRecord>, StoreError> {
        let mut held = self.held().await?;
        let version = begin(&mut held).await?;
        let Some(mut key) = find(&mut held, "id = $1", &[&id.as_str()]).await? else {
            return held.undo(Ok(None)).await;
        };
        if !change(&mut key) {
            return held.undo(Ok(Some(key))).await;
        }
        key.version = version;
        write(&mut held, &key).await?;
        commit(&mut held, version).await?;
        Ok(Some(key))
    }

    /// Changes an existing team or user.
    async fn change_owner(
        &self,
        kind: OwnerKind,
        id: &str,
        change: impl FnOnce(&mut OwnerRecord) + Send,
    ) -> Result<Option<OwnerRecord>, StoreError> {
        let mut held = self.held().await?;
        let version = begin(&mut held).await?;
        let found = find_owner(&mut held, kind, id).await?.filter(|owner| owner.removed.is_none());
        let Some(mut owner) = found else { return held.undo(Ok(None)).await };
        change(&mut owner);
        owner.version = version;
        write_owner(&mut held, &owner).await?;
        commit(&mut held, version).await?;
        Ok(Some(owner))
    }
}

#[async_trait]
impl Keys for Postgres {
    async fn create_key(&self, mut key: KeyRecord) -> Result<Option<KeyRecord>, StoreError> {
        let mut held = self.held().await?;
        let version = begin(&mut held).await?;
        let taken = find(&mut held, "id = $1", &[&key.id.as_str()]).await?.is_some();
        if taken || is_taken(&mut held, &key.digest).await? {
            return held.undo(Ok(None)).await;
        }
        key.version = version;
        write(&mut held, &key).await?;
        commit(&mut held, version).await?;
        Ok(Some(key))
    }

    async fn key(&self, id: &KeyId) -> Result<Option<KeyRecord>, StoreError> {
        find(&mut self.held().await?, "id = $1", &[&id.as_str()]).await
    }

    async fn key_by_digest(&self, digest: &KeyDigest) -> Result<Option<KeyRecord>, StoreError> {
        let condition = "digest = $1 OR previous_digest = $1";
        find(&mut self.held().await?, condition, &[&digest.0.as_slice()]).await
    }

    async fn keys(&self, filter: &KeyFilter, page: &Page) -> Result<Listing<KeyRecord>, StoreError> {
        let (order, beyond) = direction(page.order);
        let sql = format!(
            "SELECT {KEY_COLUMNS} FROM penstock.issued_keys WHERE ($1::text IS NULL OR team_id = $1)
             AND ($2::text IS NULL OR user_id = $2) AND ($3::text IS NULL OR parent = $3)
             AND ($4::boolean IS NULL OR (revoked IS NOT NULL) = $4)
             AND ($5::text IS NULL OR seq {beyond} (SELECT seq FROM penstock.issued_keys WHERE id = $5))
             ORDER BY seq {order} LIMIT $6"
        );
        let (parent, limit) = (filter.parent.as_ref().map(KeyId::as_str), i64::from(page.limit) + 1);
        let values: Values<'_> = &[&filter.team, &filter.user, &parent, &filter.revoked, &page.after, &limit];
        let rows = self.held().await?.query(&sql, values).await?;
        Ok(listing(rows.iter().map(key_record).collect::<Result<_, _>>()?, page.limit))
    }

    async fn update_key(&self, id: &KeyId, change: KeyChange) -> Result<Option<KeyRecord>, StoreError> {
        let update = move |key: &mut KeyRecord| {
            change.apply(key);
            true
        };
        self.change_key(id, update).await
    }

    async fn rotate_key(&self, id: &KeyId, rotation: Rotation) -> Result<Option<KeyRecord>, StoreError> {
        let mut held = self.held().await?;
        let version = begin(&mut held).await?;
        let found = find(&mut held, "id = $1", &[&id.as_str()]).await?.filter(|key| key.revoked.is_none());
        let Some(mut key) = found else { return held.undo(Ok(None)).await };
        if is_taken(&mut held, &rotation.digest).await? {
            return held.undo(Ok(None)).await;
        }
        rotation.apply(&mut key);
        key.version = version;
        write(&mut held, &key).await?;
        commit(&mut held, version).await?;
        Ok(Some(key))
    }

    async fn revoke_key(&self, id: &KeyId, now: u64) -> Result<Option<KeyRecord>, StoreError> {
        let revoke = move |key: &mut KeyRecord| {
            let first = key.revoked.is_none();
            key.revoked.get_or_insert(now);
            first
        };
        self.change_key(id, revoke).await
    }

    async fn create_owner(&self, owner: OwnerRecord) -> Result<Option<OwnerRecord>, StoreError> {
        let mut held = self.held().await?;
        let version = begin(&mut held).await?;
        let there = find_owner(&mut held, owner.kind, &owner.id).await?;
        if there.is_some_and(|owner| owner.removed.is_none()) {
            return held.undo(Ok(None)).await;
        }
        let owner = OwnerRecord { removed: None, version, ..owner };
        write_owner(&mut held, &owner).await?;
        commit(&mut held, version).await?;
        Ok(Some(owner))
    }

    async fn owner(&self, kind: OwnerKind, id: &str) -> Result<Option<OwnerRecord>, StoreError> {
        Ok(find_owner(&mut self.held().await?, kind, id).await?.filter(|owner| owner.removed.is_none()))
    }

    async fn owners(
        &self,
        kind: OwnerKind,
        team: Option<&str>,
        page: &Page,
    ) -> Result<Listing<OwnerRecord>, StoreError> {
        let (order, beyond) = direction(page.order);
        let sql = format!(
            "SELECT {OWNER_COLUMNS} FROM penstock.owners WHERE kind = $1 AND removed IS NULL AND ($2::text IS NULL OR team_id = $2)
             AND ($3::text IS NULL OR id {beyond} $3) ORDER BY id {order} LIMIT $4"
        );
        let limit = i64::from(page.limit) + 1;
        let rows = self.held().await?.query(&sql, &[&kind.name(), &team, &page.after, &limit]).await?;
        Ok(listing(rows.iter().map(owner_record).collect::<Result<_, _>>()?, page.limit))
    }

    async fn update_owner(
        &self,
        kind: OwnerKind,
        id: &str,
        change: OwnerChange,
    ) -> Result<Option<OwnerRecord>, StoreError> {
        self.change_owner(kind, id, |owner| change.apply(owner)).await
    }

    async fn remove_owner(&self, kind: OwnerKind, id: &str, now: u64) -> Result<bool, StoreError> {
        Ok(self.change_owner(kind, id, |owner| owner.removed = Some(now)).await?.is_some())
    }

    async fn directory_version(&self) -> Result<u64, StoreError> {
        let row = self.held().await?.one("SELECT version FROM penstock.directory", &[]).await?;
        number(&row.ok_or_else(odd)?, 0)
    }

    async fn directory_mark(&self, version: u64) -> Result<Option<String>, StoreError> {
        mark(&mut self.held().await?, version).await
    }

    async fn directory_since(&self, seen: u64, limit: u32) -> Result<Changes, StoreError> {
        let mut held = self.held().await?;
        let row = held.one("SELECT version FROM penstock.directory", &[]).await?;
        let now = number(&row.ok_or_else(odd)?, 0)?;
        // A record that changes again between these queries leaves the range, and is reported by the next call.
        let of = |columns: &str, table: &str| {
            format!(
                "SELECT {columns} FROM penstock.{table} WHERE version > $1 AND version <= $2 ORDER BY version LIMIT $3"
            )
        };
        let (seen, upper, rows) = (int(seen), int(now), i64::from(limit) + 1);
        let keys = held.query(&of(KEY_COLUMNS, "issued_keys"), &[&seen, &upper, &rows]).await?;
        let owners = held.query(&of(OWNER_COLUMNS, "owners"), &[&seen, &upper, &rows]).await?;
        let keys = keys.iter().map(key_record).collect::<Result<_, _>>()?;
        let owners = owners.iter().map(owner_record).collect::<Result<_, _>>()?;
        let mut changes = Changes::up_to(limit, now, keys, owners);
        changes.mark = mark(&mut held, changes.version).await?;
        Ok(changes)
    }

    async fn directory_changed(&self, seen: u64, wait: Duration) -> Result<u64, StoreError> {
        let end = Instant::now() + wait;
        loop {
            // Register before the query, so that no change falls between the query and the wait.
            let mut changed = std::pin::pin!(self.listener.changed.notified());
            changed.as_mut().enable();
            let version = self.directory_version().await?;
            let left = end.saturating_duration_since(Instant::now());
            if version != seen || left.is_zero() {
                return Ok(version);
            }
            let _ = tokio::time::timeout(left.min(LOOK_EVERY), changed).await;
        }
    }
}
