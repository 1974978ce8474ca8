//! [`Responses`] in PostgreSQL.

use async_trait::async_trait;
use bytes::Bytes;
use tokio_postgres::Row;

use super::Postgres;
use super::files::lock_tenant;
use super::held::{cell, int, number, odd};
use crate::{OpenResponse, ResponseId, ResponseRecord, ResponseStatus, Responses, StoreError, Tenant, Turn};

const COLUMNS: &str = "id, status, previous, created, expires, body, input, output, request, tenant";
/// Responses deleted in one transaction.
const SWEEP_MAX: i64 = 256;

fn code(status: ResponseStatus) -> i64 {
    match status {
        ResponseStatus::Queued => 0,
        ResponseStatus::InProgress => 1,
        ResponseStatus::Ended => 2,
    }
}

fn bytes(row: &Row, at: usize) -> Result<Bytes, StoreError> {
    Ok(cell::<Vec<u8>>(row, at)?.into())
}

fn record(row: &Row) -> Result<ResponseRecord, StoreError> {
    let id = |text: &str| ResponseId::parse(text).ok_or_else(odd);
    Ok(ResponseRecord {
        id: id(cell(row, 0)?)?,
        status: match number(row, 1)? {
            0 => ResponseStatus::Queued,
            1 => ResponseStatus::InProgress,
            _ => ResponseStatus::Ended,
        },
        previous: cell::<Option<&str>>(row, 2)?.map(id).transpose()?,
        created: number(row, 3)?,
        expires: number(row, 4)?,
        body: bytes(row, 5)?,
        input: bytes(row, 6)?,
        output: bytes(row, 7)?,
        request: bytes(row, 8)?,
    })
}

#[async_trait]
impl Responses for Postgres {
    async fn save_response(&self, tenant: &Tenant, new: ResponseRecord, tenant_max: u64) -> Result<(), StoreError> {
        let mut held = self.held().await?;
        held.begin().await?;
        lock_tenant(&mut held, tenant).await?;
        let sql = "SELECT count(*) FROM penstock.responses WHERE tenant = $1";
        let have = held.one(sql, &[&tenant.as_str()]).await?.map_or(Ok(0), |row| number(&row, 0))?;
        if have + 1 > tenant_max {
            return held.undo(Err(StoreError::Quota { used: have + 1, max: tenant_max })).await;
        }
        let sql =
            format!("INSERT INTO penstock.responses ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)");
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
        ];
        held.execute(&sql, values).await?;
        held.commit().await
    }

    async fn response(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<ResponseRecord>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM penstock.responses WHERE id = $1 AND tenant = $2");
        let row = self.held().await?.one(&sql, &[&id.as_str(), &tenant.as_str()]).await?;
        row.as_ref().map(record).transpose()
    }

    async fn delete_response(&self, tenant: &Tenant, id: &ResponseId) -> Result<bool, StoreError> {
        let sql = "DELETE FROM penstock.responses WHERE id = $1 AND tenant = $2";
        Ok(self.held().await?.execute(sql, &[&id.as_str(), &tenant.as_str()]).await? > 0)
    }

    async fn update_response(
        &self,
        id: &ResponseId,
        status: ResponseStatus,
        body: Bytes,
        output: Bytes,
    ) -> Result<bool, StoreError> {
        let sql = "UPDATE penstock.responses SET status = $2, body = $3, output = $4, \
                   request = CASE WHEN $2::bigint = 2 THEN ''::bytea ELSE request END WHERE id = $1 AND status < 2";
        let values: super::held::Values<'_> = &[&id.as_str(), &code(status), &body.as_ref(), &output.as_ref()];
        Ok(self.held().await?.execute(sql, values).await? > 0)
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
            for (used, max) in [(turns.len() as u64 + 1, u64::from(turns_max)), (size, bytes_max)] {
                if used > max {
                    return Err(StoreError::Quota { used, max });
                }
            }
            turns.push(turn);
            next = cell(&row, 0)?;
        }
        turns.reverse();
        Ok((!turns.is_empty()).then_some(turns))
    }

    async fn open_responses(&self, limit: u32) -> Result<Vec<OpenResponse>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM penstock.responses WHERE status < 2 ORDER BY seq LIMIT $1");
        let rows = self.held().await?.query(&sql, &[&i64::from(limit)]).await?;
        let open = |row| Ok(OpenResponse { tenant: Tenant::new(cell(row, 9)?), response: record(row)? });
        rows.iter().map(open).collect()
    }

    async fn sweep_responses(&self, now: u64) -> Result<u64, StoreError> {
        let sql = "DELETE FROM penstock.responses WHERE seq IN (
                     SELECT seq FROM penstock.responses WHERE expires <= $1 LIMIT $2 FOR UPDATE SKIP LOCKED)";
        self.held().await?.execute(sql, &[&int(now), &SWEEP_MAX]).await
    }
}
