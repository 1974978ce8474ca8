//! [`Files`] in PostgreSQL.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use tokio_postgres::Row;

use super::Postgres;
use super::held::{Held, cell, int, maybe, number, odd};
use crate::sql::{CHUNKS_PIECE, GONE, direction, listing};
use crate::{CHUNK_BYTES_MAX, Deleted, FileId, FileRecord, Files, Listing, NewFile, Page, StoreError, Tenant};

pub(super) const COLUMNS: &str = "id, purpose, name, bytes, created, expires";
/// Most files deleted in one transaction.
const SWEEP_MAX: i64 = 16;

pub(super) fn record(row: &Row) -> Result<FileRecord, StoreError> {
    Ok(FileRecord {
        id: FileId::parse(cell(row, 0)?).ok_or_else(odd)?,
        purpose: cell(row, 1)?,
        name: cell(row, 2)?,
        bytes: number(row, 3)?,
        created: number(row, 4)?,
        expires: maybe(row, 5)?,
    })
}

/// Row number and size of a file; locks the row.
async fn place(held: &mut Held, tenant: &Tenant, id: &FileId, sealed: bool) -> Result<Option<(i64, u64)>, StoreError> {
    let sql = "SELECT seq, bytes FROM penstock.files WHERE id = $1 AND tenant = $2 AND sealed = $3 FOR UPDATE";
    let row = held.one(sql, &[&id.as_str(), &tenant.as_str(), &sealed]).await?;
    row.map(|row| Ok((cell(&row, 0)?, number(&row, 1)?))).transpose()
}

async fn size(held: &mut Held, seq: i64) -> Result<u64, StoreError> {
    let sql = "SELECT at + length(data) FROM penstock.file_chunks WHERE file = $1 ORDER BY at DESC LIMIT 1";
    held.one(sql, &[&seq]).await?.map_or(Ok(0), |row| number(&row, 0))
}

/// Makes an unsealed file visible, within the open transaction.
pub(super) async fn seal(held: &mut Held, tenant: &Tenant, id: &FileId) -> Result<FileRecord, StoreError> {
    let (seq, bytes) =
        place(held, tenant, id, false).await?.ok_or(StoreError::Misuse("a file that is not being written"))?;
    if size(held, seq).await? != bytes {
        return Err(StoreError::Misuse("a file that lacks bytes"));
    }
    let sql = format!("UPDATE penstock.files SET sealed = true WHERE seq = $1 RETURNING {COLUMNS}");
    record(&held.one(&sql, &[&seq]).await?.ok_or_else(odd)?)
}

/// Locks a tenant until the end of the transaction, so that its quotas are counted by one gateway at a time.
pub(super) async fn lock_tenant(held: &mut Held, tenant: &Tenant) -> Result<(), StoreError> {
    held.query("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", &[&tenant.as_str()]).await?;
    Ok(())
}

async fn append(held: &mut Held, tenant: &Tenant, id: &FileId, at: u64, bytes: &[u8]) -> Result<(), StoreError> {
    let (seq, max) =
        place(held, tenant, id, false).await?.ok_or(StoreError::Misuse("a file that is not being written"))?;
    if bytes.is_empty() || bytes.len() > CHUNK_BYTES_MAX || at + bytes.len() as u64 > max {
        return Err(StoreError::Misuse("a piece that does not fit its file"));
    }
    if size(held, seq).await? != at {
        return Err(StoreError::Misuse("a piece at the wrong place of its file"));
    }
    let sql = "INSERT INTO penstock.file_chunks (file, at, data) VALUES ($1, $2, $3)";
    held.execute(sql, &[&seq, &int(at), &bytes]).await?;
    Ok(())
}

/// Takes a file from its tenant, within the open transaction; [`purge`] deletes it afterwards by the row number.
pub(super) async fn doom(held: &mut Held, tenant: &Tenant, id: &FileId) -> Result<(Deleted, Option<i64>), StoreError> {
    let found = match place(held, tenant, id, true).await? {
        Some(found) => Some(found),
        None => place(held, tenant, id, false).await?,
    };
    let Some((seq, _)) = found else { return Ok((Deleted::Absent, None)) };
    let used = "SELECT EXISTS (SELECT 1 FROM penstock.batches WHERE is_open AND input = $1)";
    if held.is(used, &[&id.as_str()]).await? {
        return Ok((Deleted::InUse, None));
    }
    let sql = "UPDATE penstock.files SET tenant = $2, sealed = false, expires = 0 WHERE seq = $1";
    held.execute(sql, &[&seq, &GONE]).await?;
    Ok((Deleted::Yes, Some(seq)))
}

/// Deletes a doomed file in pieces, each within the deadline of a statement, however large the file is.
pub(super) async fn purge(held: &mut Held, seq: i64) -> Result<(), StoreError> {
    let piece = format!(
        "DELETE FROM penstock.file_chunks WHERE file = $1
         AND at IN (SELECT at FROM penstock.file_chunks WHERE file = $1 LIMIT {CHUNKS_PIECE})"
    );
    while held.execute(&piece, &[&seq]).await? > 0 {}
    held.execute("DELETE FROM penstock.files WHERE seq = $1 AND tenant = $2", &[&seq, &GONE]).await.map(drop)
}

/// Joins the chunks that cover a range to its bytes.
fn join(rows: &[Row], range: &Range<u64>) -> Result<Vec<u8>, StoreError> {
    let mut out = Vec::with_capacity((range.end - range.start) as usize);
    for row in rows {
        let (at, data) = (number(row, 0)?, cell::<&[u8]>(row, 1)?);
        let from = range.start.saturating_sub(at) as usize;
        let to = (range.end.saturating_sub(at) as usize).min(data.len());
        out.extend_from_slice(data.get(from..to).unwrap_or_default());
    }
    Ok(out)
}

#[async_trait]
impl Files for Postgres {
    async fn begin_file(&self, tenant: &Tenant, new: NewFile) -> Result<FileId, StoreError> {
        let mut held = self.held().await?;
        held.begin().await?;
        lock_tenant(&mut held, tenant).await?;
        let sql = "SELECT count(*), coalesce(sum(bytes), 0)::bigint FROM penstock.files WHERE tenant = $1";
        let row = held.one(sql, &[&tenant.as_str()]).await?.ok_or_else(odd)?;
        let (count, bytes) = (number(&row, 0)?, number(&row, 1)?);
        for (used, max) in [(count + 1, new.tenant_files_max), (bytes.saturating_add(new.bytes), new.tenant_bytes_max)]
        {
            if used > max {
                return held.undo(Err(StoreError::Quota { used, max })).await;
            }
        }
        let id = FileId::random();
        let sql = "INSERT INTO penstock.files (id, tenant, purpose, name, bytes, created, expires) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7)";
        // PostgreSQL has no NUL in text.
        let name = new.name.replace('\0', "\u{fffd}");
        let (bytes, created, expires) = (int(new.bytes), int(new.created), new.expires.map(int));
        held.execute(sql, &[&id.as_str(), &tenant.as_str(), &new.purpose, &name, &bytes, &created, &expires]).await?;
        held.commit().await?;
        Ok(id)
    }

    async fn append(&self, tenant: &Tenant, id: &FileId, at: u64, bytes: Bytes) -> Result<(), StoreError> {
        let mut held = self.held().await?;
        held.begin().await?;
        match append(&mut held, tenant, id, at, &bytes).await {
            Ok(()) => held.commit().await,
            Err(error) => held.undo(Err(error)).await,
        }
    }

    async fn seal(&self, tenant: &Tenant, id: &FileId) -> Result<FileRecord, StoreError> {
        let mut held = self.held().await?;
        held.begin().await?;
        match seal(&mut held, tenant, id).await {
            Ok(record) => held.commit().await.map(|()| record),
            Err(error) => held.undo(Err(error)).await,
        }
    }

    async fn file(&self, tenant: &Tenant, id: &FileId) -> Result<Option<FileRecord>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM penstock.files WHERE id = $1 AND tenant = $2 AND sealed");
        let row = self.held().await?.one(&sql, &[&id.as_str(), &tenant.as_str()]).await?;
        row.as_ref().map(record).transpose()
    }

    async fn files(
        &self,
        tenant: &Tenant,
        purpose: Option<&str>,
        page: &Page,
    ) -> Result<Listing<FileRecord>, StoreError> {
        let (order, beyond) = direction(page.order);
        let sql = format!(
            "SELECT {COLUMNS} FROM penstock.files WHERE tenant = $1 AND sealed AND purpose NOT LIKE '.%'
             AND ($2::text IS NULL OR purpose = $2)
             AND ($3::text IS NULL OR seq {beyond} (SELECT seq FROM penstock.files WHERE id = $3 AND tenant = $1))
             ORDER BY seq {order} LIMIT $4"
        );
        let limit = i64::from(page.limit) + 1;
        let rows = self.held().await?.query(&sql, &[&tenant.as_str(), &purpose, &page.after, &limit]).await?;
        Ok(listing(rows.iter().map(record).collect::<Result<_, _>>()?, page.limit))
    }

    async fn read(&self, tenant: &Tenant, id: &FileId, range: Range<u64>) -> Result<Option<Bytes>, StoreError> {
        let mut held = self.held().await?;
        let sql = "SELECT seq, bytes FROM penstock.files WHERE id = $1 AND tenant = $2 AND sealed";
        let Some(row) = held.one(sql, &[&id.as_str(), &tenant.as_str()]).await? else { return Ok(None) };
        let (seq, range) = (cell::<i64>(&row, 0)?, range.start..range.end.min(number(&row, 1)?));
        if range.start >= range.end {
            return Ok(Some(Bytes::new()));
        }
        let sql = "SELECT at, data FROM penstock.file_chunks WHERE file = $1 AND at < $3
                   AND at >= (SELECT max(at) FROM penstock.file_chunks WHERE file = $1 AND at <= $2) ORDER BY at";
        let rows = held.query(sql, &[&seq, &int(range.start), &int(range.end)]).await?;
        let out = join(&rows, &range)?;
        if out.len() as u64 == range.end - range.start {
            return Ok(Some(out.into()));
        }
        // The file was deleted between the two queries, or is damaged.
        match self.file(tenant, id).await? {
            None => Ok(None),
            Some(_) => Err(StoreError::Broken(format!("file {id} lacks bytes"))),
        }
    }

    async fn delete_file(&self, tenant: &Tenant, id: &FileId) -> Result<Deleted, StoreError> {
        let mut held = self.held().await?;
        held.begin().await?;
        let (deleted, seq) = match doom(&mut held, tenant, id).await {
            Ok(doomed) => held.commit().await.map(|()| doomed)?,
            Err(error) => return held.undo(Err(error)).await,
        };
        if let Some(seq) = seq {
            // The sweeper deletes what is left after a failure.
            let _ = purge(&mut held, seq).await;
        }
        Ok(deleted)
    }

    async fn sweep_files(&self, now: u64, unsealed_before: u64) -> Result<u64, StoreError> {
        let sql = "UPDATE penstock.files SET tenant = $4, sealed = false, expires = 0 WHERE seq IN (
                     SELECT seq FROM penstock.files WHERE (expires <= $1 OR (NOT sealed AND created < $2))
                     AND NOT EXISTS (SELECT 1 FROM penstock.batches WHERE is_open AND input = files.id)
                     LIMIT $3 FOR UPDATE SKIP LOCKED) RETURNING seq";
        let mut held = self.held().await?;
        let doomed = held.change(sql, &[&int(now), &int(unsealed_before), &SWEEP_MAX, &GONE]).await?;
        for row in &doomed {
            purge(&mut held, cell(row, 0)?).await?;
        }
        Ok(doomed.len() as u64)
    }
}
