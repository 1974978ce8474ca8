//! [`Files`] in SQLite.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::{Sqlite, pages};
use crate::sql::{CHUNKS_PIECE, GONE, direction, listing};
use crate::{CHUNK_BYTES_MAX, Deleted, FileId, FileRecord, Files, Listing, NewFile, Page, StoreError, Tenant};

pub(super) const COLUMNS: &str = "id, purpose, name, bytes, created, expires";
/// Most files deleted in one transaction, so that a sweep delays no other write for long.
const SWEEP_MAX: u32 = 16;

pub(super) fn record(row: &Row<'_>) -> rusqlite::Result<FileRecord> {
    let id: String = row.get(0)?;
    Ok(FileRecord {
        id: FileId::parse(&id).ok_or(rusqlite::Error::InvalidQuery)?,
        purpose: row.get(1)?,
        name: row.get(2)?,
        bytes: row.get(3)?,
        created: row.get(4)?,
        expires: row.get(5)?,
    })
}

/// Row number and size of a file.
fn place(connection: &Connection, tenant: &Tenant, id: &FileId, sealed: bool) -> rusqlite::Result<Option<(i64, u64)>> {
    let mut statement =
        connection.prepare("SELECT seq, bytes FROM files WHERE id = ?1 AND tenant = ?2 AND sealed = ?3")?;
    statement.query_row(params![id.as_str(), tenant.as_str(), sealed], |row| Ok((row.get(0)?, row.get(1)?))).optional()
}

fn size(connection: &Connection, seq: i64) -> rusqlite::Result<u64> {
    let mut statement =
        connection.prepare("SELECT at + length(data) FROM file_chunks WHERE file = ?1 ORDER BY at DESC LIMIT 1")?;
    Ok(statement.query_row([seq], |row| row.get(0)).optional()?.unwrap_or(0))
}

/// Makes an unsealed file visible, within the open transaction.
pub(super) fn seal(connection: &Connection, tenant: &Tenant, id: &FileId) -> Result<FileRecord, StoreError> {
    let (seq, bytes) =
        place(connection, tenant, id, false)?.ok_or(StoreError::Misuse("a file that is not being written"))?;
    if size(connection, seq)? != bytes {
        return Err(StoreError::Misuse("a file that lacks bytes"));
    }
    connection.execute("UPDATE files SET sealed = 1 WHERE seq = ?1", [seq])?;
    let sql = format!("SELECT {COLUMNS} FROM files WHERE seq = ?1");
    Ok(connection.prepare(&sql)?.query_row([seq], record)?)
}

fn is_in_use(connection: &Connection, id: &str) -> rusqlite::Result<bool> {
    connection
        .prepare("SELECT EXISTS (SELECT 1 FROM batches WHERE is_open = 1 AND input = ?1)")?
        .query_row([id], |row| row.get(0))
}

/// Takes a file from its tenant, within the open transaction; [`Sqlite::purge_file`] deletes it afterwards by the row number.
pub(super) fn doom(
    connection: &Connection,
    tenant: &Tenant,
    id: &FileId,
) -> Result<(Deleted, Option<i64>), StoreError> {
    let found = match place(connection, tenant, id, true)? {
        Some(found) => Some(found),
        None => place(connection, tenant, id, false)?,
    };
    let Some((seq, _)) = found else { return Ok((Deleted::Absent, None)) };
    if is_in_use(connection, id.as_str())? {
        return Ok((Deleted::InUse, None));
    }
    let sql = "UPDATE files SET tenant = ?2, sealed = 0, expires = 0 WHERE seq = ?1";
    connection.execute(sql, params![seq, GONE])?;
    Ok((Deleted::Yes, Some(seq)))
}

/// Deletes a piece of a doomed file, and the file with the last one; returns true if there is more.
fn purge(connection: &Connection, seq: i64) -> Result<bool, StoreError> {
    let piece =
        "DELETE FROM file_chunks WHERE file = ?1 AND at IN (SELECT at FROM file_chunks WHERE file = ?1 LIMIT ?2)";
    if connection.prepare(piece)?.execute(params![seq, CHUNKS_PIECE])? >= CHUNKS_PIECE as usize {
        return Ok(true);
    }
    connection.execute("DELETE FROM files WHERE seq = ?1 AND tenant = ?2", params![seq, GONE])?;
    Ok(false)
}

impl Sqlite {
    /// Deletes a doomed file in pieces, so that other writes get their turns.
    pub(super) async fn purge_file(&self, seq: i64) -> Result<(), StoreError> {
        while self.writer.run(move |connection| purge(connection, seq)).await? {}
        Ok(())
    }
}

fn begin(connection: &Connection, tenant: &Tenant, new: &NewFile) -> Result<FileId, StoreError> {
    let (count, bytes): (u64, u64) = connection
        .prepare("SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE tenant = ?1")?
        .query_row([tenant.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))?;
    for (used, max) in [(count + 1, new.tenant_files_max), (bytes.saturating_add(new.bytes), new.tenant_bytes_max)] {
        if used > max {
            return Err(StoreError::Quota { used, max });
        }
    }
    pages::room_for(connection, 0)?;
    let id = FileId::random();
    connection
        .prepare(
            "INSERT INTO files (id, tenant, purpose, name, bytes, created, expires) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?
        .execute(params![id.as_str(), tenant.as_str(), new.purpose, new.name, new.bytes, new.created, new.expires])?;
    Ok(id)
}

fn append(connection: &Connection, tenant: &Tenant, id: &FileId, at: u64, bytes: &[u8]) -> Result<(), StoreError> {
    let (seq, max) =
        place(connection, tenant, id, false)?.ok_or(StoreError::Misuse("a file that is not being written"))?;
    if bytes.is_empty() || bytes.len() > CHUNK_BYTES_MAX || at + bytes.len() as u64 > max {
        return Err(StoreError::Misuse("a piece that does not fit its file"));
    }
    if size(connection, seq)? != at {
        return Err(StoreError::Misuse("a piece at the wrong place of its file"));
    }
    pages::room_for(connection, bytes.len() as u64)?;
    connection
        .prepare("INSERT INTO file_chunks (file, at, data) VALUES (?1, ?2, ?3)")?
        .execute(params![seq, at, bytes])?;
    Ok(())
}

fn list(
    connection: &Connection,
    tenant: &Tenant,
    purpose: Option<&str>,
    page: &Page,
) -> Result<Listing<FileRecord>, StoreError> {
    let (order, beyond) = direction(page.order);
    let sql = format!(
        "SELECT {COLUMNS} FROM files WHERE tenant = ?1 AND sealed = 1 AND purpose NOT LIKE '.%'
         AND (?2 IS NULL OR purpose = ?2)
         AND (?3 IS NULL OR seq {beyond} (SELECT seq FROM files WHERE id = ?3 AND tenant = ?1))
         ORDER BY seq {order} LIMIT ?4"
    );
    let mut statement = connection.prepare(&sql)?;
    let rows = statement.query_map(params![tenant.as_str(), purpose, page.after, page.limit + 1], record)?;
    Ok(listing(rows.collect::<Result<_, _>>()?, page.limit))
}

fn read(
    connection: &Connection,
    tenant: &Tenant,
    id: &FileId,
    range: &Range<u64>,
) -> Result<Option<Bytes>, StoreError> {
    let Some((seq, bytes)) = place(connection, tenant, id, true)? else { return Ok(None) };
    let end = range.end.min(bytes);
    if range.start >= end {
        return Ok(Some(Bytes::new()));
    }
    let mut statement = connection.prepare(
        "SELECT at, data FROM file_chunks WHERE file = ?1 AND at < ?3
         AND at >= (SELECT max(at) FROM file_chunks WHERE file = ?1 AND at <= ?2) ORDER BY at",
    )?;
    let mut rows = statement.query(params![seq, range.start, end])?;
    let mut out = Vec::with_capacity((end - range.start) as usize);
    while let Some(row) = rows.next()? {
        let at: u64 = row.get(0)?;
        let data = row.get_ref(1)?.as_blob().map_err(rusqlite::Error::from)?;
        let from = range.start.saturating_sub(at) as usize;
        let to = ((end - at) as usize).min(data.len());
        out.extend_from_slice(data.get(from..to).unwrap_or_default());
    }
    if out.len() as u64 != end - range.start {
        // The file was deleted between the two queries, or is damaged.
        if place(connection, tenant, id, true)?.is_none() {
            return Ok(None);
        }
        return Err(StoreError::Broken(format!("file {id} lacks bytes")));
    }
    Ok(Some(out.into()))
}

/// Dooms files that have expired or were abandoned; returns their row numbers.
fn sweep(connection: &Connection, now: u64, unsealed_before: u64) -> Result<Vec<i64>, StoreError> {
    let mut statement = connection.prepare(
        "UPDATE files SET tenant = ?4, sealed = 0, expires = 0 WHERE seq IN (
           SELECT seq FROM files WHERE (expires <= ?1 OR (sealed = 0 AND created < ?2))
           AND NOT EXISTS (SELECT 1 FROM batches WHERE is_open = 1 AND input = files.id) LIMIT ?3) RETURNING seq",
    )?;
    let rows = statement.query_map(params![now, unsealed_before, SWEEP_MAX, GONE], |row| row.get(0))?;
    Ok(rows.collect::<Result<Vec<i64>, _>>()?)
}

#[async_trait]
impl Files for Sqlite {
    async fn begin_file(&self, tenant: &Tenant, new: NewFile) -> Result<FileId, StoreError> {
        let tenant = tenant.clone();
        self.writer.run(move |connection| begin(connection, &tenant, &new)).await
    }

    async fn append(&self, tenant: &Tenant, id: &FileId, at: u64, bytes: Bytes) -> Result<(), StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        self.writer.run(move |connection| append(connection, &tenant, &id, at, &bytes)).await
    }

    async fn seal(&self, tenant: &Tenant, id: &FileId) -> Result<FileRecord, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        self.writer.run(move |connection| seal(connection, &tenant, &id)).await
    }

    async fn file(&self, tenant: &Tenant, id: &FileId) -> Result<Option<FileRecord>, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        let sql = format!("SELECT {COLUMNS} FROM files WHERE id = ?1 AND tenant = ?2 AND sealed = 1");
        let find = move |connection: &Connection| {
            let mut statement = connection.prepare(&sql)?;
            Ok(statement.query_row([id.as_str(), tenant.as_str()], record).optional()?)
        };
        self.reader.run(find).await
    }

    async fn files(
        &self,
        tenant: &Tenant,
        purpose: Option<&str>,
        page: &Page,
    ) -> Result<Listing<FileRecord>, StoreError> {
        let (tenant, purpose, page) = (tenant.clone(), purpose.map(str::to_owned), page.clone());
        self.reader.run(move |connection| list(connection, &tenant, purpose.as_deref(), &page)).await
    }

    async fn read(&self, tenant: &Tenant, id: &FileId, range: Range<u64>) -> Result<Option<Bytes>, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        self.reader.run(move |connection| read(connection, &tenant, &id, &range)).await
    }

    async fn delete_file(&self, tenant: &Tenant, id: &FileId) -> Result<Deleted, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        let (deleted, seq) = self.writer.run(move |connection| doom(connection, &tenant, &id)).await?;
        if let Some(seq) = seq {
            // The sweeper deletes what is left after a failure.
            let _ = self.purge_file(seq).await;
        }
        Ok(deleted)
    }

    async fn sweep_files(&self, now: u64, unsealed_before: u64) -> Result<u64, StoreError> {
        let doomed = self.writer.run(move |connection| sweep(connection, now, unsealed_before)).await?;
        for seq in &doomed {
            self.purge_file(*seq).await?;
        }
        Ok(doomed.len() as u64)
    }
}
