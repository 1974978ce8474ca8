//! [`Batches`] in SQLite.

use async_trait::async_trait;
use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::{Sqlite, files, pages};
use crate::sql::{BATCHES_PIECE, LINES_PIECE, direction, is_spent, left_lines, listing};
use crate::{
    BatchId, BatchRecord, BatchStatus, BatchTimes, Batches, Cancelled, Counts, Deleted, EndedBatch, FileId, Line,
    LineResult, Listed, Listing, NewBatch, NewLine, OpenBatch, Page, StoreError, Tenant,
};

pub(super) const COLUMNS: &str = "id, status, endpoint, input, output, errors, completion_window, metadata, faults, output_expires_after, \
                       created, expires, in_progress, finalizing, cancelling, ended, total, completed, failed, tenant";

pub(super) fn record(row: &Row<'_>) -> rusqlite::Result<BatchRecord> {
    let bad = || rusqlite::Error::InvalidQuery;
    let file = |at: usize| -> rusqlite::Result<Option<FileId>> {
        row.get::<_, Option<String>>(at)?.map(|id| FileId::parse(&id).ok_or_else(bad)).transpose()
    };
    let (id, status): (String, String) = (row.get(0)?, row.get(1)?);
    Ok(BatchRecord {
        id: BatchId::parse(&id).ok_or_else(bad)?,
        status: BatchStatus::parse(&status).ok_or_else(bad)?,
        endpoint: row.get(2)?,
        input: file(3)?.ok_or_else(bad)?,
        output: file(4)?,
        errors: file(5)?,
        window: row.get(6)?,
        metadata: row.get(7)?,
        faults: row.get(8)?,
        output_expires_after: row.get(9)?,
        times: BatchTimes {
            created: row.get(10)?,
            expires: row.get(11)?,
            in_progress: row.get(12)?,
            finalizing: row.get(13)?,
            cancelling: row.get(14)?,
            ended: row.get(15)?,
        },
        counts: Counts { total: row.get(16)?, completed: row.get(17)?, failed: row.get(18)? },
    })
}

fn find(connection: &Connection, tenant: &Tenant, id: &BatchId) -> rusqlite::Result<Option<BatchRecord>> {
    let sql = format!("SELECT {COLUMNS} FROM batches WHERE id = ?1 AND tenant = ?2");
    connection.prepare(&sql)?.query_row([id.as_str(), tenant.as_str()], record).optional()
}

/// Bytes of a batch's row beside its metadata, with the faults that it may get.
const RECORD_BYTES: u64 = 64 << 10;

/// Row number and status of a batch.
fn place(connection: &Connection, id: &BatchId) -> Result<(i64, BatchStatus), StoreError> {
    let found: Option<(i64, String)> = connection
        .prepare("SELECT seq, status FROM batches WHERE id = ?1")?
        .query_row([id.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let (seq, status) = found.ok_or(StoreError::Misuse("a batch that is not there"))?;
    Ok((seq, BatchStatus::parse(&status).ok_or(StoreError::Misuse("a batch of unknown status"))?))
}

fn create(connection: &Connection, tenant: &Tenant, new: &NewBatch) -> Result<Option<BatchRecord>, StoreError> {
    let input: bool = connection
        .prepare("SELECT EXISTS (SELECT 1 FROM files WHERE id = ?1 AND tenant = ?2 AND sealed = 1)")?
        .query_row([new.input.as_str(), tenant.as_str()], |row| row.get(0))?;
    if !input {
        return Ok(None);
    }
    let open: u64 = connection
        .prepare("SELECT count(*) FROM batches WHERE tenant = ?1 AND is_open = 1")?
        .query_row([tenant.as_str()], |row| row.get(0))?;
    if open + 1 > new.tenant_open_max {
        return Err(StoreError::Quota { used: open + 1, max: new.tenant_open_max });
    }
    make_place(connection, tenant, new.tenant_batches_max)?;
    let kept = output_bytes(connection, tenant)?;
    if kept >= new.tenant_output_bytes_max {
        return Err(StoreError::Quota { used: kept.saturating_add(1), max: new.tenant_output_bytes_max });
    }
    pages::room_for(connection, new.metadata.len() as u64 + RECORD_BYTES)?;
    let id = BatchId::random();
    connection
        .prepare(
            "INSERT INTO batches (id, tenant, status, endpoint, input, completion_window, metadata, output_expires_after, \
             created, expires) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
        )?
        .execute(params![
            id.as_str(),
            tenant.as_str(),
            BatchStatus::Validating.name(),
            new.endpoint,
            new.input.as_str(),
            new.window,
            new.metadata,
            new.output_expires_after,
            new.created,
            new.expires
        ])?;
    Ok(find(connection, tenant, &id)?)
}

/// Makes a place for another batch of the tenant among at most `max`.
fn make_place(connection: &Connection, tenant: &Tenant, max: u64) -> Result<(), StoreError> {
    let sql = "SELECT count(*) FROM batches WHERE tenant = ?1";
    let count: u64 = connection.prepare(sql)?.query_row([tenant.as_str()], |row| row.get(0))?;
    let excess = (count + 1).saturating_sub(max);
    if excess == 0 {
        return Ok(());
    }
    let sql = format!(
        "DELETE FROM batches WHERE seq IN (
           SELECT seq FROM batches WHERE tenant = ?1 AND {} ORDER BY seq LIMIT ?2)",
        is_spent("", "is_open = 0")
    );
    match connection.execute(&sql, params![tenant.as_str(), excess])? as u64 >= excess {
        true => Ok(()),
        false => Err(StoreError::Quota { used: count + 1, max }),
    }
}

/// Bytes of files of results, and of results that will be files: each of them has a line end there.
fn output_bytes(connection: &Connection, tenant: &Tenant) -> rusqlite::Result<u64> {
    let sql = "SELECT
        (SELECT coalesce(sum(files.bytes), 0) FROM batches JOIN files ON files.id IN (batches.output, batches.errors)
         AND files.tenant = ?1 WHERE batches.tenant = ?1)
        + (SELECT coalesce(sum(result_bytes + completed + failed), 0) FROM batches WHERE tenant = ?1 AND is_open = 1)";
    connection.prepare(sql)?.query_row([tenant.as_str()], |row| row.get(0))
}

fn cancel(connection: &Connection, tenant: &Tenant, id: &BatchId, now: u64) -> Result<Cancelled, StoreError> {
    let Some(batch) = find(connection, tenant, id)? else { return Ok(Cancelled::Absent) };
    match batch.status {
        BatchStatus::Cancelling | BatchStatus::Cancelled => return Ok(Cancelled::Yes(batch)),
        BatchStatus::Validating | BatchStatus::InProgress => {}
        _ => return Ok(Cancelled::TooLate(batch)),
    }
    connection.execute(
        "UPDATE batches SET status = ?2, cancelling = ?3 WHERE id = ?1",
        params![id.as_str(), BatchStatus::Cancelling.name(), now],
    )?;
    Ok(find(connection, tenant, id)?.map_or(Cancelled::Absent, Cancelled::Yes))
}

fn admit(connection: &Connection, id: &BatchId, lines: &[NewLine]) -> Result<(), StoreError> {
    let (seq, status) = place(connection, id)?;
    if status != BatchStatus::Validating {
        return Ok(());
    }
    pages::room_for(connection, lines.iter().map(|line| line.custom_id.len() as u64 + 64).sum())?;
    let mut statement = connection
        .prepare("INSERT OR IGNORE INTO batch_lines (batch, line, custom_id, at, bytes) VALUES (?1, ?2, ?3, ?4, ?5)")?;
    for line in lines {
        statement.execute(params![seq, line.line, line.custom_id, line.at, line.bytes])?;
    }
    Ok(())
}

fn start(connection: &Connection, id: &BatchId, now: u64) -> Result<(), StoreError> {
    let (seq, status) = place(connection, id)?;
    if status == BatchStatus::Validating {
        connection.execute(
            "UPDATE batches SET status = ?2, in_progress = ?3, \
             total = (SELECT count(*) FROM batch_lines WHERE batch = ?1) WHERE seq = ?1",
            params![seq, BatchStatus::InProgress.name(), now],
        )?;
    }
    Ok(())
}

fn waiting(connection: &Connection, id: &BatchId, from: u32, limit: u32) -> Result<Vec<Line>, StoreError> {
    let (seq, _) = place(connection, id)?;
    let mut statement = connection.prepare(
        "SELECT line, custom_id, at, bytes FROM batch_lines WHERE batch = ?1 AND line >= ?2 AND ok IS NULL ORDER BY line LIMIT ?3",
    )?;
    let rows = statement.query_map(params![seq, from, limit], |row| {
        Ok(NewLine { line: row.get(0)?, custom_id: row.get(1)?, at: row.get(2)?, bytes: row.get(3)? })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// In one transaction: the line leaves the list, and its result is stored and counted.
fn finish(connection: &Connection, id: &BatchId, line: u32, result: &LineResult) -> Result<bool, StoreError> {
    let (seq, _) = place(connection, id)?;
    pages::room_for(connection, result.text.len() as u64)?;
    let changed = connection
        .prepare("UPDATE batch_lines SET ok = ?3, result = ?4 WHERE batch = ?1 AND line = ?2 AND ok IS NULL")?
        .execute(params![seq, line, result.ok, result.text.as_ref()])?;
    if changed == 0 {
        return Ok(false);
    }
    connection
        .prepare("UPDATE batches SET completed = completed + ?2, failed = failed + ?3, result_bytes = result_bytes + ?4 WHERE seq = ?1")?
        .execute(params![seq, u32::from(result.ok), u32::from(!result.ok), result.text.len()])?;
    Ok(true)
}

fn results(
    connection: &Connection,
    id: &BatchId,
    ok: bool,
    from: u32,
    bytes_max: usize,
) -> Result<Vec<(u32, Bytes)>, StoreError> {
    let (seq, _) = place(connection, id)?;
    let mut statement = connection
        .prepare("SELECT line, result FROM batch_lines WHERE batch = ?1 AND line >= ?2 AND ok = ?3 ORDER BY line")?;
    let mut rows = statement.query(params![seq, from, ok])?;
    let (mut out, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.next()? {
        let text: Vec<u8> = row.get(1)?;
        bytes += text.len();
        if !out.is_empty() && bytes > bytes_max {
            break;
        }
        out.push((row.get(0)?, Bytes::from(text)));
    }
    Ok(out)
}

/// Ends a batch within the open transaction; returns its row number. `None`: it had ended before.
fn end(connection: &Connection, id: &BatchId, end: &EndedBatch) -> Result<Option<i64>, StoreError> {
    let (seq, status) = place(connection, id)?;
    if status.is_end() {
        return Ok(None);
    }
    let tenant: String = connection.query_row("SELECT tenant FROM batches WHERE seq = ?1", [seq], |row| row.get(0))?;
    for file in [&end.output, &end.errors].into_iter().flatten() {
        files::seal(connection, &Tenant::new(&tenant), file)?;
    }
    connection.execute(
        "UPDATE batches SET is_open = 0, total = max(total, completed + failed), status = ?2, output = ?3, errors = ?4, faults = ?5, ended = ?6 WHERE seq = ?1",
        params![
            seq,
            end.status.name(),
            end.output.as_ref().map(FileId::as_str),
            end.errors.as_ref().map(FileId::as_str),
            end.faults,
            end.now
        ],
    )?;
    Ok(Some(seq))
}

/// Deletes some lines of a batch that has ended; returns their number.
fn purge(connection: &Connection, seq: i64) -> Result<u64, StoreError> {
    let sql =
        "DELETE FROM batch_lines WHERE batch = ?1 AND line IN (SELECT line FROM batch_lines WHERE batch = ?1 LIMIT ?2)";
    Ok(connection.prepare(sql)?.execute(params![seq, LINES_PIECE])? as u64)
}

/// Deletes some batches that nobody needs, and some lines that ended batches have left; returns the number of both.
fn sweep(connection: &Connection, before: u64) -> Result<u64, StoreError> {
    let sql = format!(
        "DELETE FROM batches WHERE seq IN (SELECT seq FROM batches WHERE {} AND ended < ?1 LIMIT {BATCHES_PIECE})",
        is_spent("", "is_open = 0")
    );
    let batches = connection.execute(&sql, [before])? as u64;
    let left: Option<i64> = connection.prepare(&left_lines(""))?.query_row([], |row| row.get(0)).optional()?;
    Ok(batches + left.map_or(Ok(0), |seq| purge(connection, seq))?)
}

/// Deletes a batch that has ended, within the open transaction; returns the row numbers of its files, to be purged.
fn remove(connection: &Connection, tenant: &Tenant, id: &BatchId) -> Result<(Deleted, Vec<i64>), StoreError> {
    let Some(batch) = find(connection, tenant, id)? else { return Ok((Deleted::Absent, Vec::new())) };
    if !batch.status.is_end() {
        return Ok((Deleted::InUse, Vec::new()));
    }
    let mut doomed = Vec::new();
    for file in [Some(&batch.input), batch.output.as_ref(), batch.errors.as_ref()].into_iter().flatten() {
        doomed.extend(files::doom(connection, tenant, file)?.1);
    }
    connection.execute("DELETE FROM batches WHERE id = ?1", [id.as_str()])?;
    Ok((Deleted::Yes, doomed))
}

#[async_trait]
impl Batches for Sqlite {
    async fn create_batch(&self, tenant: &Tenant, new: NewBatch) -> Result<Option<BatchRecord>, StoreError> {
        let tenant = tenant.clone();
        self.writer.run(move |connection| create(connection, &tenant, &new)).await
    }

    async fn batch(&self, tenant: &Tenant, id: &BatchId) -> Result<Option<BatchRecord>, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        self.reader.run(move |connection| Ok(find(connection, &tenant, &id)?)).await
    }

    async fn batches(
        &self,
        tenant: &Tenant,
        listed: Listed<'_>,
        page: &Page,
    ) -> Result<Listing<BatchRecord>, StoreError> {
        let (tenant, page) = (tenant.clone(), page.clone());
        let (order, beyond) = direction(page.order);
        let (endpoint, is_of) = listed.parts();
        let endpoint = endpoint.to_owned();
        let sql = format!(
            "SELECT {COLUMNS} FROM batches WHERE tenant = ?1 AND (endpoint = ?4) = ?5
             AND (?2 IS NULL OR seq {beyond} (SELECT seq FROM batches WHERE id = ?2 AND tenant = ?1))
             ORDER BY seq {order} LIMIT ?3"
        );
        let list = move |connection: &Connection| {
            let mut statement = connection.prepare(&sql)?;
            let rows =
                statement.query_map(params![tenant.as_str(), page.after, page.limit + 1, endpoint, is_of], record)?;
            Ok(listing(rows.collect::<Result<_, _>>()?, page.limit))
        };
        self.reader.run(list).await
    }

    async fn delete_batch(&self, tenant: &Tenant, id: &BatchId) -> Result<Deleted, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        let (deleted, doomed) = self.writer.run(move |connection| remove(connection, &tenant, &id)).await?;
        for seq in doomed {
            // The sweeper deletes what is left after a failure.
            let _ = self.purge_file(seq).await;
        }
        Ok(deleted)
    }

    async fn cancel_batch(&self, tenant: &Tenant, id: &BatchId, now: u64) -> Result<Cancelled, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        self.writer.run(move |connection| cancel(connection, &tenant, &id, now)).await
    }

    async fn open_batches(&self, limit: u32) -> Result<Vec<OpenBatch>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM
               (SELECT *, row_number() OVER (PARTITION BY tenant ORDER BY seq) AS nth FROM batches WHERE is_open = 1)
             ORDER BY nth, seq LIMIT ?1"
        );
        let list = move |connection: &Connection| {
            let mut statement = connection.prepare(&sql)?;
            let rows = statement.query_map([limit], |row| {
                let tenant: String = row.get(19)?;
                Ok(OpenBatch { tenant: Tenant::new(&tenant), batch: record(row)? })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        };
        self.reader.run(list).await
    }

    async fn admit_lines(&self, id: &BatchId, lines: Vec<NewLine>) -> Result<(), StoreError> {
        let id = id.clone();
        self.writer.run(move |connection| admit(connection, &id, &lines)).await
    }

    async fn start_batch(&self, id: &BatchId, now: u64) -> Result<(), StoreError> {
        let id = id.clone();
        self.writer.run(move |connection| start(connection, &id, now)).await
    }

    async fn waiting_lines(&self, id: &BatchId, from: u32, limit: u32) -> Result<Vec<Line>, StoreError> {
        let id = id.clone();
        self.reader.run(move |connection| waiting(connection, &id, from, limit)).await
    }

    async fn finish_line(&self, id: &BatchId, line: u32, result: LineResult) -> Result<bool, StoreError> {
        let id = id.clone();
        self.writer.run(move |connection| finish(connection, &id, line, &result)).await
    }

    async fn finalize_batch(&self, id: &BatchId, now: u64) -> Result<(), StoreError> {
        let id = id.clone();
        let change = move |connection: &Connection| {
            let (seq, status) = place(connection, &id)?;
            if status == BatchStatus::InProgress {
                let sql = "UPDATE batches SET status = ?2, finalizing = ?3 WHERE seq = ?1";
                connection.execute(sql, params![seq, BatchStatus::Finalizing.name(), now])?;
            }
            Ok(())
        };
        self.writer.run(change).await
    }

    async fn result_bytes(&self, id: &BatchId, ok: bool) -> Result<(u64, u64), StoreError> {
        let id = id.clone();
        let sum = move |connection: &Connection| {
            let (seq, _) = place(connection, &id)?;
            let sql = "SELECT coalesce(sum(length(result)), 0), count(*) FROM batch_lines WHERE batch = ?1 AND ok = ?2";
            Ok(connection.query_row(sql, params![seq, ok], |row| Ok((row.get(0)?, row.get(1)?)))?)
        };
        self.reader.run(sum).await
    }

    async fn output_bytes(&self, tenant: &Tenant) -> Result<u64, StoreError> {
        let tenant = tenant.clone();
        self.reader.run(move |connection| Ok(output_bytes(connection, &tenant)?)).await
    }

    async fn results(
        &self,
        id: &BatchId,
        ok: bool,
        from: u32,
        bytes_max: usize,
    ) -> Result<Vec<(u32, Bytes)>, StoreError> {
        let id = id.clone();
        self.reader.run(move |connection| results(connection, &id, ok, from, bytes_max)).await
    }

    async fn end_batch(&self, id: &BatchId, how: EndedBatch) -> Result<bool, StoreError> {
        let id = id.clone();
        let Some(seq) = self.writer.run(move |connection| end(connection, &id, &how)).await? else { return Ok(false) };
        // The batch has ended whatever becomes of this: the sweeper deletes what is left.
        while matches!(self.writer.run(move |connection| purge(connection, seq)).await, Ok(1..)) {}
        Ok(true)
    }

    async fn sweep_batches(&self, before: u64) -> Result<u64, StoreError> {
        self.writer.run(move |connection| sweep(connection, before)).await
    }
}
