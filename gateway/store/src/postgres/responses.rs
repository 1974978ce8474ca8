//! [`Responses`] in PostgreSQL.

use async_trait::async_trait;
use bytes::Bytes;
use tokio_postgres::Row;

use super::Postgres;
use super::files::lock_tenant;
use super::held::{Held, cell, int, number, odd};
use crate::{
    OpenResponse, RESPONSE_ROW_BYTES, ResponseChange, ResponseId, ResponseRecord, ResponseRoom, ResponseState,
    ResponseStatus, Responses, StoreError, Tenant, Turn,
};

const COLUMNS: &str = "id, status, previous, created, expires, body, input, output, request";
const READ: &str = "id, status, previous, created, expires, body, input, output, request, octet_length(events)::bigint";
/// Most responses deleted in one transaction.
const SWEEP_MAX: i64 = 256;
/// Bytes that are evicted from one tenant before the largest tenant is determined anew.
const EVICT_BYTES: u64 = 1 << 20;

fn code(status: ResponseStatus) -> i64 {
    match status {
        ResponseStatus::Queued => 0,
        ResponseStatus::InProgress => 1,
        ResponseStatus::Ended => 2,
    }
}

pub(super) fn bytes(row: &Row, at: usize) -> Result<Bytes, StoreError> {
    Ok(cell::<Vec<u8>>(row, at)?.into())
}

fn status(row: &Row, at: usize) -> Result<ResponseStatus, StoreError> {
    Ok(match number(row, at)? {
        0 => ResponseStatus::Queued,
        1 => ResponseStatus::InProgress,
        _ => ResponseStatus::Ended,
    })
}

fn record(row: &Row) -> Result<ResponseRecord, StoreError> {
    let id = |text: &str| ResponseId::parse(text).ok_or_else(odd);
    Ok(ResponseRecord {
        id: id(cell(row, 0)?)?,
        status: status(row, 1)?,
        previous: cell::<Option<&str>>(row, 2)?.map(id).transpose()?,
        created: number(row, 3)?,
        expires: number(row, 4)?,
        body: bytes(row, 5)?,
        input: bytes(row, 6)?,
        output: bytes(row, 7)?,
        request: bytes(row, 8)?,
        event_bytes: number(row, 9)?,
    })
}

/// Oldest open responses of each tenant. Each tenant is found by one index step, so a tenant with many responses costs
/// no more.
const OPEN: &str = "
    WITH RECURSIVE open (tenant) AS (
        SELECT min(tenant) FROM penstock.responses WHERE status < 2
        UNION ALL
        SELECT (SELECT min(r.tenant) FROM penstock.responses r WHERE r.status < 2 AND r.tenant > open.tenant)
        FROM open WHERE open.tenant IS NOT NULL
    )
    SELECT oldest.tenant, oldest.id FROM open, LATERAL (
        SELECT r.tenant, r.id, r.seq, row_number() OVER (ORDER BY r.seq) AS nth
        FROM penstock.responses r WHERE r.status < 2 AND r.tenant = open.tenant ORDER BY r.seq LIMIT $1
    ) oldest WHERE open.tenant IS NOT NULL ORDER BY oldest.nth, oldest.seq LIMIT $2";

/// Deletes ended responses of a tenant, oldest first, until so many responses and bytes are freed; at most 4,096 in one
/// statement, so callers repeat it.
const EVICT: &str = "
    DELETE FROM penstock.responses WHERE seq IN (
        SELECT seq FROM (
            SELECT seq, row_number() OVER (ORDER BY seq) AS nth, sum(bytes) OVER (ORDER BY seq) - bytes AS before
            FROM (SELECT seq, bytes FROM penstock.responses WHERE tenant = $1 AND status = 2 ORDER BY seq LIMIT 4096) oldest
        ) counted WHERE nth <= $2::bigint OR before < $3::bigint)";

async fn total(held: &mut Held) -> Result<u64, StoreError> {
    let row = held.one("SELECT coalesce(sum(bytes), 0)::bigint FROM penstock.response_sums", &[]).await?;
    row.map_or(Ok(0), |row| number(&row, 0))
}

/// Makes room for so many more responses and bytes of a locked tenant, beside `stays` bytes of an ended one that grows.
/// Deletes nothing if that would not suffice.
pub(super) async fn make_room(
    held: &mut Held,
    tenant: &str,
    rows: u64,
    bytes: u64,
    stays: u64,
    room: ResponseRoom,
) -> Result<(), StoreError> {
    let sql =
        "SELECT count(*), coalesce(sum(bytes), 0)::bigint FROM penstock.responses WHERE tenant = $1 AND status < 2";
    let open = held.one(sql, &[&tenant]).await?.ok_or_else(odd)?;
    let open_bytes = number(&open, 1)?.saturating_add(bytes).saturating_add(stays);
    for (used, max) in [(number(&open, 0)? + rows, room.tenant_max), (open_bytes, room.tenant_bytes_max)] {
        if used > max {
            return Err(StoreError::Quota { used, max });
        }
    }
    loop {
        let sql = "SELECT responses, bytes FROM penstock.response_sums WHERE tenant = $1";
        let Some(row) = held.one(sql, &[&tenant]).await? else { return Ok(()) };
        let over = (number(&row, 0)? + rows).saturating_sub(room.tenant_max);
        let over_bytes = (number(&row, 1)? + bytes).saturating_sub(room.tenant_bytes_max);
        if over == 0 && over_bytes == 0 {
            return Ok(());
        }
        if held.execute(EVICT, &[&tenant, &int(over), &int(over_bytes)]).await? == 0 {
            return Ok(());
        }
    }
}

/// Makes room for `bytes` more of any tenant, by evicting from the tenant with the most bytes. Runs before the
/// transaction that needs the room, so that no transaction locks the sums of two tenants; gateways that write at the
/// same moment can exceed the bound by what they write.
pub(super) async fn make_room_of_all(held: &mut Held, bytes: u64, room: ResponseRoom) -> Result<(), StoreError> {
    let sql = "SELECT coalesce(sum(bytes), 0)::bigint FROM penstock.responses WHERE status < 2";
    let open = held.one(sql, &[]).await?.map_or(Ok(0), |row| number(&row, 0))?;
    if open.saturating_add(bytes) > room.bytes_max {
        return Err(StoreError::Quota { used: open.saturating_add(bytes), max: room.bytes_max });
    }
    loop {
        let over = (total(held).await? + bytes).saturating_sub(room.bytes_max);
        if over == 0 {
            return Ok(());
        }
        let sql = "SELECT s.tenant FROM penstock.response_sums s WHERE EXISTS \
                   (SELECT 1 FROM penstock.responses r WHERE r.tenant = s.tenant AND r.status = 2) \
                   ORDER BY s.bytes DESC LIMIT 1";
        let Some(row) = held.one(sql, &[]).await? else { return Ok(()) };
        let largest: String = cell(&row, 0)?;
        if held.execute(EVICT, &[&largest, &0_i64, &int(over.min(EVICT_BYTES))]).await? == 0 {
            return Ok(());
        }
    }
}

#[async_trait]
impl Responses for Postgres {
    async fn save_response(&self, tenant: &Tenant, new: ResponseRecord, room: ResponseRoom) -> Result<(), StoreError> {
        let mut held = self.held().await?;
        let bytes = new.bytes();
        make_room_of_all(&mut held, bytes, room).await?;
        held.begin().await?;
        lock_tenant(&mut held, tenant).await?;
        if let Err(error) = make_room(&mut held, tenant.as_str(), 1, bytes, 0, room).await {
            return held.undo(Err(error)).await;
        }
        let sql = format!(
            "INSERT INTO penstock.responses ({COLUMNS}, tenant, bytes) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
        );
        let values: super::held::Values<'_> = &[
            &new.id.as_str(),
            &code(new.status),
            &new.previous.as_ref().map(ResponseId::as_str),
            &int(new.created),
            &int(new.expires),
            &new.body.as_ref(),
            &new.input.as_ref(),
            &new.output.as_ref(),
            &new.request.as_ref(),
            &tenant.as_str(),
            &int(bytes),
        ];
        held.execute(&sql, values).await?;
        held.commit().await
    }

    async fn response(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<ResponseRecord>, StoreError> {
        let sql = format!("SELECT {READ} FROM penstock.responses WHERE id = $1 AND tenant = $2 AND kind = 0");
        let row = self.held().await?.one(&sql, &[&id.as_str(), &tenant.as_str()]).await?;
        row.as_ref().map(record).transpose()
    }

    async fn response_state(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<ResponseState>, StoreError> {
        let sql = "SELECT status, octet_length(events)::bigint FROM penstock.responses WHERE id = $1 AND tenant = $2 AND kind = 0";
        let row = self.held().await?.one(sql, &[&id.as_str(), &tenant.as_str()]).await?;
        row.map(|row| Ok(ResponseState { status: status(&row, 0)?, event_bytes: number(&row, 1)? })).transpose()
    }

    async fn delete_response(&self, tenant: &Tenant, id: &ResponseId) -> Result<bool, StoreError> {
        let sql = "DELETE FROM penstock.responses WHERE id = $1 AND tenant = $2";
        Ok(self.held().await?.execute(sql, &[&id.as_str(), &tenant.as_str()]).await? > 0)
    }

    async fn update_response(
        &self,
        id: &ResponseId,
        change: ResponseChange,
        room: Option<ResponseRoom>,
    ) -> Result<bool, StoreError> {
        let ResponseChange { status, body, output, events } = change;
        let mut held = self.held().await?;
        let sql = "SELECT tenant, bytes, \
                   octet_length(input)::bigint + CASE WHEN $2::bigint = 2 THEN 0 ELSE octet_length(request) END::bigint \
                   FROM penstock.responses WHERE id = $1 AND status < 2";
        let Some(row) = held.one(sql, &[&id.as_str(), &code(status)]).await? else { return Ok(false) };
        let (tenant, before): (String, u64) = (cell(&row, 0)?, number(&row, 1)?);
        let bytes = RESPONSE_ROW_BYTES + number(&row, 2)? + (body.len() + output.len() + events.len()) as u64;
        let room = room.filter(|_| bytes > before);
        if let Some(room) = room {
            make_room_of_all(&mut held, bytes - before, room).await?;
        }
        held.begin().await?;
        lock_tenant(&mut held, &Tenant::new(&tenant)).await?;
        if let Some(room) = room
            && let Err(error) = make_room(&mut held, &tenant, 0, bytes - before, 0, room).await
        {
            return held.undo(Err(error)).await;
        }
        let sql = "UPDATE penstock.responses SET status = $2, body = $3, output = $4, bytes = $5, events = $6, \
                   request = CASE WHEN $2::bigint = 2 THEN ''::bytea ELSE request END WHERE id = $1 AND status < 2";
        let values: super::held::Values<'_> =
            &[&id.as_str(), &code(status), &body.as_ref(), &output.as_ref(), &int(bytes), &events.as_ref()];
        let changed = held.execute(sql, values).await? > 0;
        held.commit().await?;
        Ok(changed)
    }

    async fn response_events(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<Bytes>, StoreError> {
        let sql = "SELECT events FROM penstock.responses WHERE id = $1 AND tenant = $2 AND kind = 0";
        let row = self.held().await?.one(sql, &[&id.as_str(), &tenant.as_str()]).await?;
        row.map(|row| bytes(&row, 0)).transpose()
    }

    async fn conversation(
        &self,
        tenant: &Tenant,
        id: &ResponseId,
        turns_max: u32,
        bytes_max: u64,
    ) -> Result<Option<Vec<Turn>>, StoreError> {
        let mut held = self.held().await?;
        let sql = "SELECT previous, input, output FROM penstock.responses WHERE id = $1 AND tenant = $2 AND status = 2";
        let (mut turns, mut size, mut next) = (Vec::new(), 0, Some(id.as_str().to_owned()));
        while let Some(id) = next.take() {
            let Some(row) = held.one(sql, &[&id, &tenant.as_str()]).await? else { break };
            let turn = Turn { input: bytes(&row, 1)?, output: bytes(&row, 2)? };
            size += (turn.input.len() + turn.output.len()) as u64;
            let turns_used = turns.len() as u64 + 1;
            for (what, used, max) in [("turns", turns_used, u64::from(turns_max)), ("bytes", size, bytes_max)] {
                if used > max {
                    return Err(StoreError::TooLong { what, max });
                }
            }
            turns.push(turn);
            next = cell(&row, 0)?;
        }
        turns.reverse();
        Ok((!turns.is_empty()).then_some(turns))
    }

    async fn open_responses(&self, each: u32, limit: u32) -> Result<Vec<OpenResponse>, StoreError> {
        let rows = self.held().await?.query(OPEN, &[&i64::from(each), &i64::from(limit)]).await?;
        let open = |row: &Row| {
            let id = ResponseId::parse(cell(row, 1)?).ok_or_else(odd)?;
            Ok(OpenResponse { tenant: Tenant::new(cell(row, 0)?), id })
        };
        rows.iter().map(open).collect()
    }

    async fn response_bytes(&self) -> Result<u64, StoreError> {
        total(&mut self.held().await?).await
    }

    async fn sweep_responses(&self, now: u64) -> Result<u64, StoreError> {
        let sql = "DELETE FROM penstock.responses WHERE seq IN (
                     SELECT seq FROM penstock.responses WHERE expires <= $1 LIMIT $2 FOR UPDATE SKIP LOCKED)";
        self.held().await?.execute(sql, &[&int(now), &SWEEP_MAX]).await
    }
}
