//! [`Audit`] in PostgreSQL.

use async_trait::async_trait;
use tokio_postgres::Row;

use super::Postgres;
use super::held::{Values, cell, int, number, odd};
use crate::audit::check_event;
use crate::sql::{direction, listing};
use crate::{Audit, AuditEvent, AuditFilter, AuditId, Listing, Page, StoreError};

const COLUMNS: &str = "id, at, actor, address, action, target, outcome, detail";
/// Most events deleted in one transaction.
const SWEEP_MAX: i64 = 1000;

fn event(row: &Row) -> Result<AuditEvent, StoreError> {
    Ok(AuditEvent {
        id: AuditId::parse(cell(row, 0)?).ok_or_else(odd)?,
        at: number(row, 1)?,
        actor: cell(row, 2)?,
        address: cell(row, 3)?,
        action: cell(row, 4)?,
        target: cell(row, 5)?,
        outcome: cell(row, 6)?,
        detail: cell(row, 7)?,
    })
}

#[async_trait]
impl Audit for Postgres {
    async fn note(&self, event: AuditEvent) -> Result<(), StoreError> {
        check_event(&event)?;
        let sql = format!(
            "INSERT INTO penstock.audit ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO NOTHING"
        );
        // PostgreSQL has no NUL in text, and every attempted action must be logged.
        let plain = |text: &str| text.replace('\0', "\u{fffd}");
        let values: Values<'_> = &[
            &event.id.as_str(),
            &int(event.at),
            &plain(&event.actor),
            &plain(&event.address),
            &plain(&event.action),
            &plain(&event.target),
            &plain(&event.outcome),
            &plain(&event.detail),
        ];
        self.held().await?.execute(&sql, values).await.map(drop)
    }

    async fn audit(&self, filter: &AuditFilter, page: &Page) -> Result<Listing<AuditEvent>, StoreError> {
        let (order, beyond) = direction(page.order);
        let (action, prefix) = filter.action_rule();
        let sql = format!(
            "SELECT {COLUMNS} FROM penstock.audit WHERE ($1::bigint IS NULL OR at >= $1) AND ($2::bigint IS NULL OR at < $2)
             AND ($3::text IS NULL OR actor = $3) AND ($4::text IS NULL OR action = $4)
             AND ($5::text IS NULL OR starts_with(action, $5)) AND ($6::text IS NULL OR target = $6)
             AND ($7::text IS NULL OR outcome = $7)
             AND ($8::text IS NULL OR seq {beyond} (SELECT seq FROM penstock.audit WHERE id = $8))
             ORDER BY seq {order} LIMIT $9"
        );
        let values: Values<'_> = &[
            &filter.from.map(int),
            &filter.until.map(int),
            &filter.actor,
            &action,
            &prefix,
            &filter.target,
            &filter.outcome,
            &page.after,
            &(i64::from(page.limit) + 1),
        ];
        let rows = self.held().await?.query(&sql, values).await?;
        Ok(listing(rows.iter().map(event).collect::<Result<_, _>>()?, page.limit))
    }

    async fn sweep_audit(&self, before: u64) -> Result<u64, StoreError> {
        let sql = "DELETE FROM penstock.audit WHERE seq IN (
                     SELECT seq FROM penstock.audit WHERE at < $1 LIMIT $2 FOR UPDATE SKIP LOCKED)";
        self.held().await?.execute(sql, &[&int(before), &SWEEP_MAX]).await
    }
}
