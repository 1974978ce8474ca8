//! [`Responses`] in SQLite.

use async_trait::async_trait;
use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::Sqlite;
use crate::{OpenResponse, ResponseId, ResponseRecord, ResponseStatus, Responses, StoreError, Tenant, Turn};

const COLUMNS: &str = "id, status, previous, created, expires, body, input, output, request, tenant";
/// Responses deleted in one transaction.
const SWEEP_MAX: u32 = 256;

fn number(status: ResponseStatus) -> u8 {
    match status {
        ResponseStatus::Queued => 0,
        ResponseStatus::InProgress => 1,
        ResponseStatus::Ended => 2,
    }
}

fn record(row: &Row<'_>) -> rusqlite::Result<ResponseRecord> {
    let id = |text: &str| ResponseId::parse(text).ok_or(rusqlite::Error::InvalidQuery);
    let bytes = |at: usize| row.get::<_, Vec<u8>>(at).map(Bytes::from);
    Ok(ResponseRecord {
        id: id(&row.get::<_, String>(0)?)?,
        status: match row.get(1)? {
            0u8 => ResponseStatus::Queued,
            1 => ResponseStatus::InProgress,
            _ => ResponseStatus::Ended,
        },
        previous: row.get::<_, Option<String>>(2)?.map(|text| id(&text)).transpose()?,
        created: row.get(3)?,
        expires: row.get(4)?,
        body: bytes(5)?,
        input: bytes(6)?,
        output: bytes(7)?,
        request: bytes(8)?,
    })
}

fn save(connection: &Connection, tenant: &Tenant, new: &ResponseRecord, max: u64) -> Result<(), StoreError> {
    let have: u64 = connection
        .prepare("SELECT count(*) FROM responses WHERE tenant = ?1")?
        .query_row([tenant.as_str()], |row| row.get(0))?;
    if have + 1 > max {
        return Err(StoreError::Quota { used: have + 1, max });
    }
    connection
        .prepare(
            "INSERT INTO responses (id, tenant, status, previous, created, expires, body, input, output, request) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
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
            new.request.as_ref()
        ])?;
    Ok(())
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
        for (used, max) in [(turns.len() as u64 + 1, u64::from(turns_max)), (bytes, bytes_max)] {
            if used > max {
                return Err(StoreError::Quota { used, max });
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
        tenant_max: u64,
    ) -> Result<(), StoreError> {
        let tenant = tenant.clone();
        self.writer.run(move |connection| save(connection, &tenant, &response, tenant_max)).await
    }

    async fn response(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<ResponseRecord>, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        let sql = format!("SELECT {COLUMNS} FROM responses WHERE id = ?1 AND tenant = ?2");
        let find = move |connection: &Connection| {
            let mut statement = connection.prepare(&sql)?;
            Ok(statement.query_row([id.as_str(), tenant.as_str()], record).optional()?)
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
        status: ResponseStatus,
        body: Bytes,
        output: Bytes,
    ) -> Result<bool, StoreError> {
        let id = id.clone();
        let sql = "UPDATE responses SET status = ?2, body = ?3, output = ?4, \
                   request = CASE WHEN ?2 = 2 THEN x'' ELSE request END WHERE id = ?1 AND status < 2";
        let update = move |connection: &Connection| {
            let values = params![id.as_str(), number(status), body.as_ref(), output.as_ref()];
            Ok(connection.prepare(sql)?.execute(values)? > 0)
        };
        self.writer.run(update).await
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

    async fn open_responses(&self, limit: u32) -> Result<Vec<OpenResponse>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM responses WHERE status < 2 ORDER BY seq LIMIT ?1");
        let list = move |connection: &Connection| {
            let mut statement = connection.prepare(&sql)?;
            let rows = statement.query_map([limit], |row| {
                let tenant: String = row.get(9)?;
                Ok(OpenResponse { tenant: Tenant::new(&tenant), response: record(row)? })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        };
        self.reader.run(list).await
    }

    async fn sweep_responses(&self, now: u64) -> Result<u64, StoreError> {
        let sql = "DELETE FROM responses WHERE seq IN (SELECT seq FROM responses WHERE expires <= ?1 LIMIT ?2)";
        self.writer.run(move |connection| Ok(connection.execute(sql, params![now, SWEEP_MAX])? as u64)).await
    }
}
