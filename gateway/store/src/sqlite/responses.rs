//! [`Responses`] in SQLite.

use async_trait::async_trait;
use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::{Sqlite, pages};
use crate::{
    OpenResponse, RESPONSE_ROW_BYTES, ResponseChange, ResponseId, ResponseRecord, ResponseRoom, ResponseState,
    ResponseStatus, Responses, StoreError, Tenant, Turn,
};

const COLUMNS: &str = "id, status, previous, created, expires, body, input, output, request, length(events)";
/// Most responses deleted in one transaction.
const SWEEP_MAX: u32 = 256;
/// Bytes that are evicted from one tenant before the largest tenant is determined anew.
const EVICT_BYTES: u64 = 1 << 20;

fn number(status: ResponseStatus) -> u8 {
    match status {
        ResponseStatus::Queued => 0,
        ResponseStatus::InProgress => 1,
        ResponseStatus::Ended => 2,
    }
}

fn status(number: u8) -> ResponseStatus {
    match number {
        0 => ResponseStatus::Queued,
        1 => ResponseStatus::InProgress,
        _ => ResponseStatus::Ended,
    }
}

fn record(row: &Row<'_>) -> rusqlite::Result<ResponseRecord> {
    let id = |text: &str| ResponseId::parse(text).ok_or(rusqlite::Error::InvalidQuery);
    let bytes = |at: usize| row.get::<_, Vec<u8>>(at).map(Bytes::from);
    Ok(ResponseRecord {
        id: id(&row.get::<_, String>(0)?)?,
        status: status(row.get(1)?),
        previous: row.get::<_, Option<String>>(2)?.map(|text| id(&text)).transpose()?,
        created: row.get(3)?,
        expires: row.get(4)?,
        body: bytes(5)?,
        input: bytes(6)?,
        output: bytes(7)?,
        request: bytes(8)?,
        event_bytes: row.get(9)?,
    })
}

fn save(connection: &Connection, tenant: &Tenant, new: &ResponseRecord, room: ResponseRoom) -> Result<(), StoreError> {
    let bytes = new.bytes();
    make_room(connection, tenant.as_str(), 1, bytes, 0, room)?;
    pages::room_for(connection, bytes)?;
    connection
        .prepare(
            "INSERT INTO responses (id, tenant, status, previous, created, expires, body, input, output, request, bytes) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        )?
        .execute(params![
            new.id.as_str(),
            tenant.as_str(),
            number(new.status),
            new.previous.as_ref().map(ResponseId::as_str),
            new.created,
            new.expires,
            new.body.as_ref(),
            new.input.as_ref(),
            new.output.as_ref(),
            new.request.as_ref(),
            bytes
        ])?;
    Ok(())
}

fn update(
    connection: &Connection,
    id: &ResponseId,
    change: &ResponseChange,
    room: Option<ResponseRoom>,
) -> Result<bool, StoreError> {
    let ResponseChange { status, body, output, events } = change;
    let status = number(*status);
    let sql = "SELECT tenant, bytes, length(input) + CASE WHEN ?2 = 2 THEN 0 ELSE length(request) END \
               FROM responses WHERE id = ?1 AND status < 2";
    let row = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
    let found: Option<(String, u64, u64)> =
        connection.prepare(sql)?.query_row(params![id.as_str(), status], row).optional()?;
    let Some((tenant, before, stays)) = found else { return Ok(false) };
    let bytes = RESPONSE_ROW_BYTES + stays + (body.len() + output.len() + events.len()) as u64;
    if let Some(room) = room.filter(|_| bytes > before) {
        make_room(connection, &tenant, 0, bytes - before, 0, room)?;
        pages::room_for(connection, bytes - before)?;
    }
    let sql = "UPDATE responses SET status = ?2, body = ?3, output = ?4, bytes = ?5, events = ?6, \
               request = CASE WHEN ?2 = 2 THEN x'' ELSE request END WHERE id = ?1 AND status < 2";
    let values = params![id.as_str(), status, body.as_ref(), output.as_ref(), bytes, events.as_ref()];
    Ok(connection.prepare(sql)?.execute(values)? > 0)
}

/// Makes room for so many more responses and bytes beside `stays` bytes of an ended one that grows. Deletes nothing if
/// that would not suffice.
pub(super) fn make_room(
    connection: &Connection,
    tenant: &str,
    rows: u64,
    bytes: u64,
    stays: u64,
    room: ResponseRoom,
) -> Result<(), StoreError> {
    let pair = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?));
    let (open, open_bytes): (u64, u64) = connection
        .prepare("SELECT count(*), coalesce(sum(bytes), 0) FROM responses WHERE tenant = ?1 AND status < 2")?
        .query_row([tenant], pair)?;
    let all_open: u64 = connection
        .prepare("SELECT coalesce(sum(bytes), 0) FROM responses WHERE status < 2")?
        .query_row([], |row| row.get(0))?;
    for (used, max) in [
        (open + rows, room.tenant_max),
        (open_bytes.saturating_add(bytes).saturating_add(stays), room.tenant_bytes_max),
        (all_open.saturating_add(bytes).saturating_add(stays), room.bytes_max),
    ] {
        if used > max {
            return Err(StoreError::Quota { used, max });
        }
    }
    let (have, have_bytes): (u64, u64) = connection
        .prepare("SELECT responses, bytes FROM response_sums WHERE tenant = ?1")?
        .query_row([tenant], pair)
        .optional()?
        .unwrap_or_default();
    let over = (have + rows).saturating_sub(room.tenant_max);
    evict(connection, tenant, over, (have_bytes + bytes).saturating_sub(room.tenant_bytes_max))?;
    loop {
        let over = (total(connection)? + bytes).saturating_sub(room.bytes_max);
        if over == 0 {
            return Ok(());
        }
        let largest: Option<String> = connection
            .prepare(
                "SELECT tenant FROM response_sums AS sums WHERE EXISTS \
                 (SELECT 1 FROM responses WHERE tenant = sums.tenant AND status = 2) ORDER BY bytes DESC LIMIT 1",
            )?
            .query_row([], |row| row.get(0))
            .optional()?;
        let Some(largest) = largest else { return Err(StoreError::Quota { used: over, max: room.bytes_max }) };
        // Evict in small steps: another tenant may be the largest after each.
        evict(connection, &largest, 0, over.min(EVICT_BYTES))?;
    }
}

/// Deletes ended responses of a tenant, oldest first, until so many responses and bytes are freed, or none is left.
fn evict(connection: &Connection, tenant: &str, mut rows: u64, mut bytes: u64) -> Result<(), StoreError> {
    let sql = "SELECT seq, bytes FROM responses WHERE tenant = ?1 AND status = 2 ORDER BY seq LIMIT ?2";
    while rows > 0 || bytes > 0 {
        let mut statement = connection.prepare(sql)?;
        let oldest = statement.query_map(params![tenant, SWEEP_MAX], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let oldest: Vec<(i64, u64)> = oldest.collect::<Result<_, _>>()?;
        if oldest.is_empty() {
            return Ok(());
        }
        for (seq, freed) in oldest {
            if rows == 0 && bytes == 0 {
                break;
            }
            connection.prepare("DELETE FROM responses WHERE seq = ?1")?.execute([seq])?;
            (rows, bytes) = (rows.saturating_sub(1), bytes.saturating_sub(freed));
        }
    }
    Ok(())
}

fn total(connection: &Connection) -> Result<u64, StoreError> {
    let sql = "SELECT coalesce(sum(bytes), 0) FROM response_sums";
    Ok(connection.prepare(sql)?.query_row([], |row| row.get(0))?)
}

/// Tenants with unfinished responses. Each is found by one index step, so a tenant with many responses costs no more.
const OPEN_TENANTS: &str = "
    WITH RECURSIVE open (tenant) AS (
        SELECT min(tenant) FROM responses WHERE status < 2
        UNION ALL
        SELECT (SELECT min(tenant) FROM responses WHERE status < 2 AND tenant > open.tenant)
        FROM open WHERE open.tenant IS NOT NULL
    ) SELECT tenant FROM open WHERE tenant IS NOT NULL";

fn open(connection: &Connection, each: u32, limit: u32) -> Result<Vec<OpenResponse>, StoreError> {
    let mut tenants = connection.prepare(OPEN_TENANTS)?;
    let tenants: Vec<String> = tenants.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    let mut oldest =
        connection.prepare("SELECT seq, id FROM responses WHERE tenant = ?1 AND status < 2 ORDER BY seq LIMIT ?2")?;
    let mut found: Vec<(usize, i64, OpenResponse)> = Vec::new();
    for tenant in tenants {
        let rows = oldest.query_map(params![tenant, each], |row| Ok((row.get(0)?, row.get::<_, String>(1)?)))?;
        for (nth, row) in rows.enumerate() {
            let (seq, id) = row?;
            let id = ResponseId::parse(&id).ok_or(rusqlite::Error::InvalidQuery)?;
            found.push((nth, seq, OpenResponse { tenant: Tenant::new(&tenant), id }));
        }
    }
    found.sort_unstable_by_key(|(nth, seq, _)| (*nth, *seq));
    Ok(found.into_iter().take(limit as usize).map(|(.., open)| open).collect())
}

fn conversation(
    connection: &Connection,
    tenant: &Tenant,
    id: &ResponseId,
    turns_max: u32,
    bytes_max: u64,
) -> Result<Option<Vec<Turn>>, StoreError> {
    let mut statement = connection
        .prepare("SELECT previous, input, output FROM responses WHERE id = ?1 AND tenant = ?2 AND status = 2")?;
    let (mut turns, mut bytes, mut next) = (Vec::new(), 0, Some(id.as_str().to_owned()));
    while let Some(id) = next.take() {
        let row = |row: &Row<'_>| {
            let (input, output): (Vec<u8>, Vec<u8>) = (row.get(1)?, row.get(2)?);
            Ok((row.get(0)?, Turn { input: input.into(), output: output.into() }))
        };
        let found: Option<(Option<String>, Turn)> =
            statement.query_row([id.as_str(), tenant.as_str()], row).optional()?;
        let Some((previous, turn)) = found else { break };
        bytes += (turn.input.len() + turn.output.len()) as u64;
        let turns_used = turns.len() as u64 + 1;
        for (what, used, max) in [("turns", turns_used, u64::from(turns_max)), ("bytes", bytes, bytes_max)] {
            if used > max {
                return Err(StoreError::TooLong { what, max });
            }
        }
        turns.push(turn);
        next = previous;
    }
    turns.reverse();
    Ok((!turns.is_empty()).then_some(turns))
}

#[async_trait]
impl Responses for Sqlite {
    async fn save_response(
        &self,
        tenant: &Tenant,
        response: ResponseRecord,
        room: ResponseRoom,
    ) -> Result<(), StoreError> {
        let tenant = tenant.clone();
        self.writer.run(move |connection| save(connection, &tenant, &response, room)).await
    }

    async fn response(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<ResponseRecord>, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        let sql = format!("SELECT {COLUMNS} FROM responses WHERE id = ?1 AND tenant = ?2 AND kind = 0");
        let find = move |connection: &Connection| {
            let mut statement = connection.prepare(&sql)?;
            Ok(statement.query_row([id.as_str(), tenant.as_str()], record).optional()?)
        };
        self.reader.run(find).await
    }

    async fn response_state(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<ResponseState>, StoreError> {
        let values = [id.as_str().to_owned(), tenant.as_str().to_owned()];
        let sql = "SELECT status, length(events) FROM responses WHERE id = ?1 AND tenant = ?2 AND kind = 0";
        let find = move |connection: &Connection| {
            let state = |row: &Row<'_>| Ok(ResponseState { status: status(row.get(0)?), event_bytes: row.get(1)? });
            Ok(connection.prepare(sql)?.query_row(values, state).optional()?)
        };
        self.reader.run(find).await
    }

    async fn delete_response(&self, tenant: &Tenant, id: &ResponseId) -> Result<bool, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        let sql = "DELETE FROM responses WHERE id = ?1 AND tenant = ?2";
        self.writer.run(move |connection| Ok(connection.execute(sql, [id.as_str(), tenant.as_str()])? > 0)).await
    }

    async fn update_response(
        &self,
        id: &ResponseId,
        change: ResponseChange,
        room: Option<ResponseRoom>,
    ) -> Result<bool, StoreError> {
        let id = id.clone();
        self.writer.run(move |connection| update(connection, &id, &change, room)).await
    }

    async fn response_events(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<Bytes>, StoreError> {
        let values = [id.as_str().to_owned(), tenant.as_str().to_owned()];
        let sql = "SELECT events FROM responses WHERE id = ?1 AND tenant = ?2 AND kind = 0";
        let find = move |connection: &Connection| {
            let found: Option<Vec<u8>> = connection.prepare(sql)?.query_row(values, |row| row.get(0)).optional()?;
            Ok(found.map(Bytes::from))
        };
        self.reader.run(find).await
    }

    async fn conversation(
        &self,
        tenant: &Tenant,
        id: &ResponseId,
        turns_max: u32,
        bytes_max: u64,
    ) -> Result<Option<Vec<Turn>>, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        self.reader.run(move |connection| conversation(connection, &tenant, &id, turns_max, bytes_max)).await
    }

    async fn open_responses(&self, each: u32, limit: u32) -> Result<Vec<OpenResponse>, StoreError> {
        self.reader.run(move |connection| open(connection, each, limit)).await
    }

    async fn response_bytes(&self) -> Result<u64, StoreError> {
        self.reader.run(total).await
    }

    async fn sweep_responses(&self, now: u64) -> Result<u64, StoreError> {
        let sql = "DELETE FROM responses WHERE seq IN (SELECT seq FROM responses WHERE expires <= ?1 LIMIT ?2)";
        self.writer.run(move |connection| Ok(connection.execute(sql, params![now, SWEEP_MAX])? as u64)).await
    }
}
