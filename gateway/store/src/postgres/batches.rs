//! [`Batches`] in PostgreSQL. Changes of a batch lock its row first.

use async_trait::async_trait;
use bytes::Bytes;
use tokio_postgres::Row;

use super::Postgres;
use super::files::{self, lock_tenant};
use super::held::{Held, Values, cell, int, maybe, number, odd};
use crate::json::to_json;
use crate::sql::{BATCHES_PIECE, LINES_PIECE, direction, is_spent, left_lines, listing};
use crate::{
    BatchId, BatchRecord, BatchStatus, BatchTimes, Batches, Cancelled, Counts, Deleted, EndedBatch, FileId, Line,
    LineResult, Listed, Listing, NewBatch, NewLine, OpenBatch, Page, StoreError, Tenant,
};

pub(super) const COLUMNS: &str = "id, status, endpoint, input, output, errors, completion_window, metadata, faults, output_expires_after, \
                       created, expires, in_progress, finalizing, cancelling, ended, total, completed, failed, tenant";

pub(super) fn record(row: &Row) -> Result<BatchRecord, StoreError> {
    let file = |at: usize| -> Result<Option<FileId>, StoreError> {
        cell::<Option<&str>>(row, at)?.map(|id| FileId::parse(id).ok_or_else(odd)).transpose()
    };
    Ok(BatchRecord {
        id: BatchId::parse(cell(row, 0)?).ok_or_else(odd)?,
        status: BatchStatus::parse(cell(row, 1)?).ok_or_else(odd)?,
        endpoint: cell(row, 2)?,
        input: file(3)?.ok_or_else(odd)?,
        output: file(4)?,
        errors: file(5)?,
        window: cell(row, 6)?,
        metadata: cell(row, 7)?,
        faults: cell(row, 8)?,
        output_expires_after: maybe(row, 9)?,
        times: BatchTimes {
            created: number(row, 10)?,
            expires: number(row, 11)?,
            in_progress: maybe(row, 12)?,
            finalizing: maybe(row, 13)?,
            cancelling: maybe(row, 14)?,
            ended: maybe(row, 15)?,
        },
        counts: Counts { total: number(row, 16)?, completed: number(row, 17)?, failed: number(row, 18)? },
    })
}

async fn find(held: &mut Held, tenant: &Tenant, id: &BatchId, lock: &str) -> Result<Option<BatchRecord>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM penstock.batches WHERE id = $1 AND tenant = $2 {lock}");
    held.one(&sql, &[&id.as_str(), &tenant.as_str()]).await?.as_ref().map(record).transpose()
}

/// Number of the row that holds the batch, by which its lines refer to it.
async fn place(held: &mut Held, id: &BatchId) -> Result<i64, StoreError> {
    let row = held.one("SELECT seq FROM penstock.batches WHERE id = $1", &[&id.as_str()]).await?;
    cell(&row.ok_or(StoreError::Misuse("a batch that is not there"))?, 0)
}

/// Creates a batch; the caller holds the tenant's lock.
async fn create(held: &mut Held, tenant: &Tenant, new: &NewBatch) -> Result<Option<BatchRecord>, StoreError> {
    // Shared lock, so that the file is not deleted before the batch that uses it is visible.
    let input = "SELECT true FROM penstock.files WHERE id = $1 AND tenant = $2 AND sealed FOR SHARE";
    if !held.is(input, &[&new.input.as_str(), &tenant.as_str()]).await? {
        return Ok(None);
    }
    let sql = "SELECT count(*) FROM penstock.batches WHERE tenant = $1 AND is_open";
    let open = held.one(sql, &[&tenant.as_str()]).await?.map_or(Ok(0), |row| number(&row, 0))?;
    if open + 1 > new.tenant_open_max {
        return Err(StoreError::Quota { used: open + 1, max: new.tenant_open_max });
    }
    make_place(held, tenant, new.tenant_batches_max).await?;
    let kept = output_bytes(held, tenant).await?;
    if kept >= new.tenant_output_bytes_max {
        return Err(StoreError::Quota { used: kept.saturating_add(1), max: new.tenant_output_bytes_max });
    }
    let sql = format!(
        "INSERT INTO penstock.batches (id, tenant, status, endpoint, input, completion_window, metadata, output_expires_after, \
         created, expires) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) RETURNING {COLUMNS}"
    );
    let (id, after) = (BatchId::random(), new.output_expires_after.map(int));
    let values: Values<'_> = &[
        &id.as_str(),
        &tenant.as_str(),
        &BatchStatus::Validating.name(),
        &new.endpoint,
        &new.input.as_str(),
        &new.window,
        &new.metadata,
        &after,
        &int(new.created),
        &int(new.expires),
    ];
    held.one(&sql, values).await?.as_ref().map(record).transpose()
}

/// Makes a place for another batch of the tenant among at most `max`.
async fn make_place(held: &mut Held, tenant: &Tenant, max: u64) -> Result<(), StoreError> {
    let sql = "SELECT count(*) FROM penstock.batches WHERE tenant = $1";
    let count = held.one(sql, &[&tenant.as_str()]).await?.map_or(Ok(0), |row| number(&row, 0))?;
    let excess = (count + 1).saturating_sub(max);
    if excess == 0 {
        return Ok(());
    }
    let sql = format!(
        "DELETE FROM penstock.batches WHERE seq IN (
           SELECT seq FROM penstock.batches WHERE tenant = $1 AND {} ORDER BY seq LIMIT $2)",
        is_spent("penstock.", "NOT is_open")
    );
    match held.execute(&sql, &[&tenant.as_str(), &int(excess)]).await? >= excess {
        true => Ok(()),
        false => Err(StoreError::Quota { used: count + 1, max }),
    }
}

/// Bytes of files of results, and of results that will be files: each of them has a line end there.
async fn output_bytes(held: &mut Held, tenant: &Tenant) -> Result<u64, StoreError> {
    let sql = "SELECT (
        (SELECT coalesce(sum(files.bytes), 0) FROM penstock.batches
         JOIN penstock.files ON files.id IN (batches.output, batches.errors) AND files.tenant = $1
         WHERE batches.tenant = $1)
        + (SELECT coalesce(sum(result_bytes + completed + failed), 0) FROM penstock.batches
           WHERE tenant = $1 AND is_open))::bigint";
    let row = held.one(sql, &[&tenant.as_str()]).await?.ok_or_else(odd)?;
    number(&row, 0)
}

async fn cancel(held: &mut Held, tenant: &Tenant, id: &BatchId, now: u64) -> Result<Cancelled, StoreError> {
    let Some(batch) = find(held, tenant, id, "FOR UPDATE").await? else { return Ok(Cancelled::Absent) };
    match batch.status {
        BatchStatus::Cancelling | BatchStatus::Cancelled => return Ok(Cancelled::Yes(batch)),
        BatchStatus::Validating | BatchStatus::InProgress => {}
        _ => return Ok(Cancelled::TooLate(batch)),
    }
    let sql = "UPDATE penstock.batches SET status = $2, cancelling = $3 WHERE id = $1";
    held.execute(sql, &[&id.as_str(), &BatchStatus::Cancelling.name(), &int(now)]).await?;
    Ok(find(held, tenant, id, "").await?.map_or(Cancelled::Absent, Cancelled::Yes))
}

/// Deletes a batch that has ended, within the open transaction; returns the row numbers of its files, to be purged.
async fn remove(held: &mut Held, tenant: &Tenant, id: &BatchId) -> Result<(Deleted, Vec<i64>), StoreError> {
    let Some(batch) = find(held, tenant, id, "FOR UPDATE").await? else { return Ok((Deleted::Absent, Vec::new())) };
    if !batch.status.is_end() {
        return Ok((Deleted::InUse, Vec::new()));
    }
    let mut doomed = Vec::new();
    for file in [Some(&batch.input), batch.output.as_ref(), batch.errors.as_ref()].into_iter().flatten() {
        doomed.extend(files::doom(held, tenant, file).await?.1);
    }
    held.execute("DELETE FROM penstock.batches WHERE id = $1", &[&id.as_str()]).await?;
    Ok((Deleted::Yes, doomed))
}

/// Ends a batch within the open transaction; returns its row number. `None`: it had ended before.
async fn end(held: &mut Held, id: &BatchId, end: &EndedBatch) -> Result<Option<i64>, StoreError> {
    let sql = "SELECT seq, status, tenant FROM penstock.batches WHERE id = $1 FOR UPDATE";
    let row = held.one(sql, &[&id.as_str()]).await?.ok_or(StoreError::Misuse("a batch that is not there"))?;
    let seq: i64 = cell(&row, 0)?;
    if BatchStatus::parse(cell(&row, 1)?).ok_or_else(odd)?.is_end() {
        return Ok(None);
    }
    let tenant = Tenant::new(cell(&row, 2)?);
    for file in [&end.output, &end.errors].into_iter().flatten() {
        files::seal(held, &tenant, file).await?;
    }
    let sql = "UPDATE penstock.batches SET is_open = false, total = greatest(total, completed + failed), status = $2, \
               output = $3, errors = $4, faults = $5, ended = $6 WHERE seq = $1";
    let (output, errors) = (end.output.as_ref().map(FileId::as_str), end.errors.as_ref().map(FileId::as_str));
    held.execute(sql, &[&seq, &end.status.name(), &output, &errors, &end.faults, &int(end.now)]).await?;
    Ok(Some(seq))
}

/// Deletes the lines of a batch that has ended, in pieces, each within the deadline of a statement; returns their number.
async fn purge(held: &mut Held, seq: i64) -> Result<u64, StoreError> {
    let sql = format!(
        "DELETE FROM penstock.batch_lines WHERE batch = $1
         AND line IN (SELECT line FROM penstock.batch_lines WHERE batch = $1 LIMIT {LINES_PIECE})"
    );
    let mut count = 0;
    loop {
        match held.execute(&sql, &[&seq]).await? {
            0 => return Ok(count),
            deleted => count += deleted,
        }
    }
}

/// Lines as one JSON value: a list of objects with line, custom_id, at and bytes.
fn lines_json(lines: &[NewLine]) -> Result<String, StoreError> {
    // The client's id may contain NUL, which PostgreSQL's text does not allow: store it as JSON.
    let one = |line: &NewLine| {
        let name = to_json(&line.custom_id)?;
        Ok(serde_json::json!({ "line": line.line, "custom_id": name, "at": line.at, "bytes": line.bytes }))
    };
    to_json(&lines.iter().map(one).collect::<Result<Vec<_>, StoreError>>()?)
}

#[async_trait]
impl Batches for Postgres {
    async fn create_batch(&self, tenant: &Tenant, new: NewBatch) -> Result<Option<BatchRecord>, StoreError> {
        let mut held = self.held().await?;
        held.begin().await?;
        lock_tenant(&mut held, tenant).await?;
        match create(&mut held, tenant, &new).await {
            Ok(batch) => held.commit().await.map(|()| batch),
            Err(error) => held.undo(Err(error)).await,
        }
    }

    async fn batch(&self, tenant: &Tenant, id: &BatchId) -> Result<Option<BatchRecord>, StoreError> {
        find(&mut self.held().await?, tenant, id, "").await
    }

    async fn batches(
        &self,
        tenant: &Tenant,
        listed: Listed<'_>,
        page: &Page,
    ) -> Result<Listing<BatchRecord>, StoreError> {
        let (order, beyond) = direction(page.order);
        let (endpoint, is_of) = listed.parts();
        let sql = format!(
            "SELECT {COLUMNS} FROM penstock.batches WHERE tenant = $1 AND (endpoint = $4) = $5
             AND ($2::text IS NULL OR seq {beyond} (SELECT seq FROM penstock.batches WHERE id = $2 AND tenant = $1))
             ORDER BY seq {order} LIMIT $3"
        );
        let limit = i64::from(page.limit) + 1;
        let values: Values<'_> = &[&tenant.as_str(), &page.after, &limit, &endpoint, &is_of];
        let rows = self.held().await?.query(&sql, values).await?;
        Ok(listing(rows.iter().map(record).collect::<Result<_, _>>()?, page.limit))
    }

    async fn delete_batch(&self, tenant: &Tenant, id: &BatchId) -> Result<Deleted, StoreError> {
        let mut held = self.held().await?;
        held.begin().await?;
        let (deleted, doomed) = match remove(&mut held, tenant, id).await {
            Ok(removed) => held.commit().await.map(|()| removed)?,
            Err(error) => return held.undo(Err(error)).await,
        };
        for seq in doomed {
            // The sweeper deletes what is left after a failure.
            let _ = files::purge(&mut held, seq).await;
        }
        Ok(deleted)
    }

    async fn cancel_batch(&self, tenant: &Tenant, id: &BatchId, now: u64) -> Result<Cancelled, StoreError> {
        let mut held = self.held().await?;
        held.begin().await?;
        match cancel(&mut held, tenant, id, now).await {
            Ok(cancelled) => held.commit().await.map(|()| cancelled),
            Err(error) => held.undo(Err(error)).await,
        }
    }

    async fn open_batches(&self, limit: u32) -> Result<Vec<OpenBatch>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM
               (SELECT *, row_number() OVER (PARTITION BY tenant ORDER BY seq) AS nth FROM penstock.batches WHERE is_open) AS open
             ORDER BY nth, seq LIMIT $1"
        );
        let rows = self.held().await?.query(&sql, &[&i64::from(limit)]).await?;
        let open = |row| Ok(OpenBatch { tenant: Tenant::new(cell(row, 19)?), batch: record(row)? });
        rows.iter().map(open).collect()
    }

    async fn admit_lines(&self, id: &BatchId, lines: Vec<NewLine>) -> Result<(), StoreError> {
        let mut held = self.held().await?;
        let seq = place(&mut held, id).await?;
        let sql = "INSERT INTO penstock.batch_lines (batch, line, custom_id, at, bytes)
                   SELECT $1, new.line, new.custom_id, new.at, new.bytes
                   FROM jsonb_to_recordset($2::text::jsonb) AS new(line bigint, custom_id text, at bigint, bytes bigint)
                   WHERE EXISTS (SELECT 1 FROM penstock.batches WHERE seq = $1 AND status = $3)
                   ON CONFLICT DO NOTHING";
        held.execute(sql, &[&seq, &lines_json(&lines)?, &BatchStatus::Validating.name()]).await?;
        Ok(())
    }

    async fn start_batch(&self, id: &BatchId, now: u64) -> Result<(), StoreError> {
        let mut held = self.held().await?;
        let seq = place(&mut held, id).await?;
        let sql = "UPDATE penstock.batches SET status = $2, in_progress = $3,
                   total = (SELECT count(*) FROM penstock.batch_lines WHERE batch = $1) WHERE seq = $1 AND status = $4";
        let (from, to) = (BatchStatus::Validating.name(), BatchStatus::InProgress.name());
        held.execute(sql, &[&seq, &to, &int(now), &from]).await?;
        Ok(())
    }

    async fn waiting_lines(&self, id: &BatchId, from: u32, limit: u32) -> Result<Vec<Line>, StoreError> {
        let mut held = self.held().await?;
        let seq = place(&mut held, id).await?;
        let sql = "SELECT line, custom_id, at, bytes FROM penstock.batch_lines
                   WHERE batch = $1 AND line >= $2 AND ok IS NULL ORDER BY line LIMIT $3";
        let rows = held.query(sql, &[&seq, &i64::from(from), &i64::from(limit)]).await?;
        let line = |row: &Row| {
            Ok(NewLine {
                line: number(row, 0)? as u32,
                custom_id: super::held::json(row, 1)?,
                at: number(row, 2)?,
                bytes: number(row, 3)? as u32,
            })
        };
        rows.iter().map(line).collect()
    }

    async fn finish_line(&self, id: &BatchId, line: u32, result: LineResult) -> Result<bool, StoreError> {
        let mut held = self.held().await?;
        let seq = place(&mut held, id).await?;
        // One statement: the line leaves the list, and its result is stored and counted, or nothing happens.
        let sql = "WITH done AS (UPDATE penstock.batch_lines SET ok = $3, result = $4
                                 WHERE batch = $1 AND line = $2 AND ok IS NULL RETURNING ok, octet_length(result) AS bytes)
                   UPDATE penstock.batches SET completed = completed + done.ok::int, failed = failed + (NOT done.ok)::int,
                       result_bytes = result_bytes + done.bytes
                   FROM done WHERE seq = $1";
        Ok(held.execute(sql, &[&seq, &i64::from(line), &result.ok, &result.text.as_ref()]).await? > 0)
    }

    async fn finalize_batch(&self, id: &BatchId, now: u64) -> Result<(), StoreError> {
        let mut held = self.held().await?;
        let seq = place(&mut held, id).await?;
        let sql = "UPDATE penstock.batches SET status = $2, finalizing = $3 WHERE seq = $1 AND status = $4";
        let (from, to) = (BatchStatus::InProgress.name(), BatchStatus::Finalizing.name());
        held.execute(sql, &[&seq, &to, &int(now), &from]).await?;
        Ok(())
    }

    async fn result_bytes(&self, id: &BatchId, ok: bool) -> Result<(u64, u64), StoreError> {
        let mut held = self.held().await?;
        let seq = place(&mut held, id).await?;
        let sql = "SELECT coalesce(sum(length(result)), 0)::bigint, count(*) FROM penstock.batch_lines WHERE batch = $1 AND ok = $2";
        let row = held.one(sql, &[&seq, &ok]).await?.ok_or_else(odd)?;
        Ok((number(&row, 0)?, number(&row, 1)?))
    }

    async fn output_bytes(&self, tenant: &Tenant) -> Result<u64, StoreError> {
        let mut held = self.held().await?;
        output_bytes(&mut held, tenant).await
    }

    async fn results(
        &self,
        id: &BatchId,
        ok: bool,
        from: u32,
        bytes_max: usize,
    ) -> Result<Vec<(u32, Bytes)>, StoreError> {
        let mut held = self.held().await?;
        let seq = place(&mut held, id).await?;
        // As many rows as fit, and the first row whatever its size.
        let sql = "SELECT line, result FROM (
                     SELECT line, result, sum(length(result)) OVER (ORDER BY line) AS so_far, row_number() OVER (ORDER BY line) AS nth
                     FROM (SELECT line, result FROM penstock.batch_lines WHERE batch = $1 AND line >= $2 AND ok = $3
                           ORDER BY line LIMIT 1000) first
                   ) summed WHERE nth = 1 OR so_far <= $4 ORDER BY line";
        let rows = held.query(sql, &[&seq, &i64::from(from), &ok, &int(bytes_max as u64)]).await?;
        let line = |row: &Row| Ok((number(row, 0)? as u32, Bytes::from(cell::<Vec<u8>>(row, 1)?)));
        rows.iter().map(line).collect()
    }

    async fn end_batch(&self, id: &BatchId, how: EndedBatch) -> Result<bool, StoreError> {
        let mut held = self.held().await?;
        held.begin().await?;
        let ended = match end(&mut held, id, &how).await {
            Ok(ended) => held.commit().await.map(|()| ended)?,
            Err(error) => return held.undo(Err(error)).await,
        };
        if let Some(seq) = ended {
            // The batch has ended whatever becomes of this: the sweeper deletes what is left.
            let _ = purge(&mut held, seq).await;
        }
        Ok(ended.is_some())
    }

    async fn sweep_batches(&self, before: u64) -> Result<u64, StoreError> {
        let mut held = self.held().await?;
        let sql = format!(
            "DELETE FROM penstock.batches WHERE seq IN (
               SELECT seq FROM penstock.batches WHERE {} AND ended < $1 LIMIT {BATCHES_PIECE} FOR UPDATE SKIP LOCKED)",
            is_spent("penstock.", "NOT is_open")
        );
        let batches = held.execute(&sql, &[&int(before)]).await?;
        let left = held.one(&left_lines("penstock."), &[]).await?;
        let lines = match left {
            Some(row) => purge(&mut held, cell(&row, 0)?).await?,
            None => 0,
        };
        Ok(batches + lines)
    }
}
