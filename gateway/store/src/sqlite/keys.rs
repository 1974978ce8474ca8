//! [`Keys`] in SQLite. Records are read, changed and written whole, in the transaction of the single writer.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Params, Row, params};
use serde::de::DeserializeOwned;

use super::Sqlite;
use crate::json::to_json;
use crate::sql::{direction, listing};
use crate::{
    Changes, KeyChange, KeyDigest, KeyFilter, KeyId, KeyRecord, Keys, Listing, OwnerChange, OwnerKind, OwnerRecord,
    Page, PreviousDigest, Rotation, StoreError,
};

const KEY_COLUMNS: &str = "id, name, digest, previous_digest, previous_until, hint, team, user, parent, scope, limits, tags, \
                           created, rotated, expires, revoked, version";
const OWNER_COLUMNS: &str = "kind, id, name, team, scope, limits, budgets, tags, blocked, created, removed, version";
/// Interval at which the directory's version is polled for changes by another process.
const LOOK_EVERY: Duration = Duration::from_millis(200);

fn bad() -> rusqlite::Error {
    rusqlite::Error::InvalidQuery
}

/// Value of a row's column with JSON text, parsed into `T`.
pub(super) fn json<T: DeserializeOwned>(row: &Row<'_>, at: usize) -> rusqlite::Result<T> {
    serde_json::from_str(&row.get::<_, String>(at)?).map_err(|_| bad())
}

fn key_record(row: &Row<'_>) -> rusqlite::Result<KeyRecord> {
    let key_id = |text: String| KeyId::parse(&text).ok_or_else(bad);
    let previous = row.get::<_, Option<[u8; 32]>>(3)?.zip(row.get(4)?);
    Ok(KeyRecord {
        id: key_id(row.get(0)?)?,
        name: row.get(1)?,
        digest: KeyDigest(row.get(2)?),
        previous: previous.map(|(digest, until)| PreviousDigest { digest: KeyDigest(digest), until }),
        hint: row.get(5)?,
        team: row.get(6)?,
        user: row.get(7)?,
        parent: row.get::<_, Option<String>>(8)?.map(key_id).transpose()?,
        scope: json(row, 9)?,
        limits: json(row, 10)?,
        tags: json(row, 11)?,
        created: row.get(12)?,
        rotated: row.get(13)?,
        expires: row.get(14)?,
        revoked: row.get(15)?,
        version: row.get(16)?,
    })
}

fn owner_record(row: &Row<'_>) -> rusqlite::Result<OwnerRecord> {
    Ok(OwnerRecord {
        kind: OwnerKind::parse(&row.get::<_, String>(0)?).ok_or_else(bad)?,
        id: row.get(1)?,
        name: row.get(2)?,
        team: row.get(3)?,
        scope: json(row, 4)?,
        limits: json(row, 5)?,
        budgets: json(row, 6)?,
        tags: json(row, 7)?,
        blocked: row.get(8)?,
        created: row.get(9)?,
        removed: row.get(10)?,
        version: row.get(11)?,
    })
}

fn find(connection: &Connection, condition: &str, values: impl Params) -> rusqlite::Result<Option<KeyRecord>> {
    let sql = format!("SELECT {KEY_COLUMNS} FROM issued_keys WHERE {condition}");
    connection.prepare(&sql)?.query_row(values, key_record).optional()
}

fn find_owner(connection: &Connection, kind: OwnerKind, id: &str) -> rusqlite::Result<Option<OwnerRecord>> {
    let sql = format!("SELECT {OWNER_COLUMNS} FROM owners WHERE kind = ?1 AND id = ?2");
    connection.prepare(&sql)?.query_row([kind.name(), id], owner_record).optional()
}

fn version(connection: &Connection) -> rusqlite::Result<u64> {
    connection.query_row("SELECT version FROM directory", [], |row| row.get(0))
}

fn mark(connection: &Connection, version: u64) -> rusqlite::Result<Option<String>> {
    let sql = "SELECT mark FROM directory_marks WHERE version = ?1";
    connection.query_row(sql, [version], |row| row.get(0)).optional()
}

/// Increments the directory's version and returns the new one.
fn next_version(connection: &Connection) -> rusqlite::Result<u64> {
    connection.query_row("UPDATE directory SET version = version + 1 RETURNING version", [], |row| row.get(0))
}

/// Whether a digest belongs to a key, as the current one or the one before its last rotation.
fn is_taken(connection: &Connection, digest: &KeyDigest) -> rusqlite::Result<bool> {
    Ok(find(connection, "digest = ?1 OR previous_digest = ?1", [digest.0])?.is_some())
}

fn create(connection: &Connection, mut key: KeyRecord) -> Result<Option<KeyRecord>, StoreError> {
    if find(connection, "id = ?1", [key.id.as_str()])?.is_some() || is_taken(connection, &key.digest)? {
        return Ok(None);
    }
    key.version = next_version(connection)?;
    write(connection, &key)?;
    Ok(Some(key))
}

/// Inserts the record of a key, or replaces all of its fields.
fn write(connection: &Connection, key: &KeyRecord) -> Result<(), StoreError> {
    let sql = format!(
        "INSERT INTO issued_keys ({KEY_COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)
         ON CONFLICT (id) DO UPDATE SET name = ?2, digest = ?3, previous_digest = ?4, previous_until = ?5, hint = ?6, team = ?7,
         user = ?8, scope = ?10, limits = ?11, tags = ?12, rotated = ?14, expires = ?15, revoked = ?16, version = ?17"
    );
    connection.prepare(&sql)?.execute(params![
        key.id.as_str(),
        key.name,
        key.digest.0,
        key.previous.map(|previous| previous.digest.0),
        key.previous.map(|previous| previous.until),
        key.hint,
        key.team,
        key.user,
        key.parent.as_ref().map(KeyId::as_str),
        to_json(&key.scope)?,
        to_json(&key.limits)?,
        to_json(&key.tags)?,
        key.created,
        key.rotated,
        key.expires,
        key.revoked,
        key.version
    ])?;
    Ok(())
}

/// Changes an existing key; nothing is written if `change` returns false.
fn change_key(
    connection: &Connection,
    id: &KeyId,
    change: impl FnOnce(&mut KeyRecord) -> bool,
) -> Result<Option<KeyRecord>, StoreError> {
    let Some(mut key) = find(connection, "id = ?1", [id.as_str()])? else { return Ok(None) };
    if change(&mut key) {
        key.version = next_version(connection)?;
        write(connection, &key)?;
    }
    Ok(Some(key))
}

fn rotate(connection: &Connection, id: &KeyId, rotation: Rotation) -> Result<Option<KeyRecord>, StoreError> {
    let revoked = find(connection, "id = ?1", [id.as_str()])?.is_none_or(|key| key.revoked.is_some());
    if revoked || is_taken(connection, &rotation.digest)? {
        return Ok(None);
    }
    change_key(connection, id, |key| {
        rotation.apply(key);
        true
    })
}

fn list(connection: &Connection, filter: &KeyFilter, page: &Page) -> Result<Listing<KeyRecord>, StoreError> {
    let (order, beyond) = direction(page.order);
    let sql = format!(
        "SELECT {KEY_COLUMNS} FROM issued_keys WHERE (?1 IS NULL OR team = ?1) AND (?2 IS NULL OR user = ?2)
         AND (?3 IS NULL OR parent = ?3) AND (?4 IS NULL OR (revoked IS NOT NULL) = ?4)
         AND (?5 IS NULL OR seq {beyond} (SELECT seq FROM issued_keys WHERE id = ?5))
         ORDER BY seq {order} LIMIT ?6"
    );
    let parent = filter.parent.as_ref().map(KeyId::as_str);
    let mut statement = connection.prepare(&sql)?;
    let values = params![filter.team, filter.user, parent, filter.revoked, page.after, u64::from(page.limit) + 1];
    let rows = statement.query_map(values, key_record)?;
    Ok(listing(rows.collect::<Result<_, _>>()?, page.limit))
}

fn write_owner(connection: &Connection, mut owner: OwnerRecord) -> Result<OwnerRecord, StoreError> {
    owner.version = next_version(connection)?;
    let sql = format!(
        "INSERT OR REPLACE INTO owners ({OWNER_COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)"
    );
    connection.prepare(&sql)?.execute(params![
        owner.kind.name(),
        owner.id,
        owner.name,
        owner.team,
        to_json(&owner.scope)?,
        to_json(&owner.limits)?,
        to_json(&owner.budgets)?,
        to_json(&owner.tags)?,
        owner.blocked,
        owner.created,
        owner.removed,
        owner.version
    ])?;
    Ok(owner)
}

/// Changes an existing team or user.
fn change_owner(
    connection: &Connection,
    kind: OwnerKind,
    id: &str,
    change: impl FnOnce(&mut OwnerRecord),
) -> Result<Option<OwnerRecord>, StoreError> {
    let found = find_owner(connection, kind, id)?.filter(|owner| owner.removed.is_none());
    let Some(mut owner) = found else { return Ok(None) };
    change(&mut owner);
    write_owner(connection, owner).map(Some)
}

fn list_owners(
    connection: &Connection,
    kind: OwnerKind,
    team: Option<&str>,
    page: &Page,
) -> Result<Listing<OwnerRecord>, StoreError> {
    let (order, beyond) = direction(page.order);
    let sql = format!(
        "SELECT {OWNER_COLUMNS} FROM owners WHERE kind = ?1 AND removed IS NULL AND (?2 IS NULL OR team = ?2)
         AND (?3 IS NULL OR id {beyond} ?3) ORDER BY id {order} LIMIT ?4"
    );
    let mut statement = connection.prepare(&sql)?;
    let rows = statement.query_map(params![kind.name(), team, page.after, u64::from(page.limit) + 1], owner_record)?;
    Ok(listing(rows.collect::<Result<_, _>>()?, page.limit))
}

fn since(connection: &Connection, seen: u64, limit: u32) -> Result<Changes, StoreError> {
    let (now, rows) = (version(connection)?, u64::from(limit) + 1);
    let of = |columns: &str, table: &str| {
        format!("SELECT {columns} FROM {table} WHERE version > ?1 AND version <= ?2 ORDER BY version LIMIT ?3")
    };
    let mut keys = connection.prepare(&of(KEY_COLUMNS, "issued_keys"))?;
    let keys = keys.query_map([seen, now, rows], key_record)?.collect::<Result<_, _>>()?;
    let mut owners = connection.prepare(&of(OWNER_COLUMNS, "owners"))?;
    let owners = owners.query_map([seen, now, rows], owner_record)?.collect::<Result<_, _>>()?;
    let mut changes = Changes::up_to(limit, now, keys, owners);
    changes.mark = mark(connection, changes.version)?;
    Ok(changes)
}

impl Sqlite {
    /// Runs a change of the directory and wakes callers that wait for one.
    async fn change<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let done = self.writer.run(work).await;
        self.directory.notify_waiters();
        done
    }
}

#[async_trait]
impl Keys for Sqlite {
    async fn create_key(&self, key: KeyRecord) -> Result<Option<KeyRecord>, StoreError> {
        self.change(move |connection| create(connection, key)).await
    }

    async fn key(&self, id: &KeyId) -> Result<Option<KeyRecord>, StoreError> {
        let id = id.clone();
        self.key_reader.run(move |connection| Ok(find(connection, "id = ?1", [id.as_str()])?)).await
    }

    async fn key_by_digest(&self, digest: &KeyDigest) -> Result<Option<KeyRecord>, StoreError> {
        let digest = digest.0;
        let condition = "digest = ?1 OR previous_digest = ?1";
        self.key_reader.run(move |connection| Ok(find(connection, condition, [digest])?)).await
    }

    async fn keys(&self, filter: &KeyFilter, page: &Page) -> Result<Listing<KeyRecord>, StoreError> {
        let (filter, page) = (filter.clone(), page.clone());
        self.key_reader.run(move |connection| list(connection, &filter, &page)).await
    }

    async fn update_key(&self, id: &KeyId, change: KeyChange) -> Result<Option<KeyRecord>, StoreError> {
        let id = id.clone();
        let update = move |key: &mut KeyRecord| {
            change.apply(key);
            true
        };
        self.change(move |connection| change_key(connection, &id, update)).await
    }

    async fn rotate_key(&self, id: &KeyId, rotation: Rotation) -> Result<Option<KeyRecord>, StoreError> {
        let id = id.clone();
        self.change(move |connection| rotate(connection, &id, rotation)).await
    }

    async fn revoke_key(&self, id: &KeyId, now: u64) -> Result<Option<KeyRecord>, StoreError> {
        let id = id.clone();
        let revoke = move |key: &mut KeyRecord| {
            let first = key.revoked.is_none();
            key.revoked.get_or_insert(now);
            first
        };
        self.change(move |connection| change_key(connection, &id, revoke)).await
    }

    async fn create_owner(&self, owner: OwnerRecord) -> Result<Option<OwnerRecord>, StoreError> {
        let create = move |connection: &Connection| {
            if find_owner(connection, owner.kind, &owner.id)?.is_some_and(|owner| owner.removed.is_none()) {
                return Ok(None);
            }
            write_owner(connection, OwnerRecord { removed: None, ..owner }).map(Some)
        };
        self.change(create).await
    }

    async fn owner(&self, kind: OwnerKind, id: &str) -> Result<Option<OwnerRecord>, StoreError> {
        let id = id.to_owned();
        let find = move |connection: &Connection| {
            Ok(find_owner(connection, kind, &id)?.filter(|owner| owner.removed.is_none()))
        };
        self.key_reader.run(find).await
    }

    async fn owners(
        &self,
        kind: OwnerKind,
        team: Option<&str>,
        page: &Page,
    ) -> Result<Listing<OwnerRecord>, StoreError> {
        let (team, page) = (team.map(str::to_owned), page.clone());
        self.key_reader.run(move |connection| list_owners(connection, kind, team.as_deref(), &page)).await
    }

    async fn update_owner(
        &self,
        kind: OwnerKind,
        id: &str,
        change: OwnerChange,
    ) -> Result<Option<OwnerRecord>, StoreError> {
        let id = id.to_owned();
        self.change(move |connection| change_owner(connection, kind, &id, |owner| change.apply(owner))).await
    }

    async fn remove_owner(&self, kind: OwnerKind, id: &str, now: u64) -> Result<bool, StoreError> {
        let id = id.to_owned();
        let remove = move |owner: &mut OwnerRecord| owner.removed = Some(now);
        self.change(move |connection| Ok(change_owner(connection, kind, &id, remove)?.is_some())).await
    }

    async fn directory_version(&self) -> Result<u64, StoreError> {
        self.key_reader.run(|connection| Ok(version(connection)?)).await
    }

    async fn directory_mark(&self, version: u64) -> Result<Option<String>, StoreError> {
        self.key_reader.run(move |connection| Ok(mark(connection, version)?)).await
    }

    async fn directory_since(&self, seen: u64, limit: u32) -> Result<Changes, StoreError> {
        self.key_reader.run(move |connection| since(connection, seen, limit)).await
    }

    async fn directory_changed(&self, seen: u64, wait: Duration) -> Result<u64, StoreError> {
        let end = Instant::now() + wait;
        loop {
            // Register before the query, so that no change falls between the query and the wait.
            let mut changed = std::pin::pin!(self.directory.notified());
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
