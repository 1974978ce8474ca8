//! [`Audit`] in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, Row, params};

use super::Sqlite;
use crate::audit::check_event;
use crate::sql::{direction, listing};
use crate::{Audit, AuditEvent, AuditFilter, AuditId, Listing, Page, StoreError};

const COLUMNS: &str = "id, at, actor, address, action, target, outcome, detail";
/// Most events deleted in one transaction.
const SWEEP_MAX: u32 = 1000;

fn event(row: &Row<'_>) -> rusqlite::Result<AuditEvent> {
    Ok(AuditEvent {
        id: AuditId::parse(&row.get::<_, String>(0)?).ok_or(rusqlite::Error::InvalidQuery)?,
        at: row.get(1)?,
        actor: row.get(2)?,
        address: row.get(3)?,
        action: row.get(4)?,
        target: row.get(5)?,
        outcome: row.get(6)?,
        detail: row.get(7)?,
    })
}

fn list(connection: &Connection, filter: &AuditFilter, page: &Page) -> Result<Listing<AuditEvent>, StoreError> {
    let (order, beyond) = direction(page.order);
    let (action, prefix) = filter.action_rule();
    let sql = format!(
        "SELECT {COLUMNS} FROM audit WHERE (?1 IS NULL OR at >= ?1) AND (?2 IS NULL OR at < ?2) AND (?3 IS NULL OR actor = ?3)
         AND (?4 IS NULL OR action = ?4) AND (?5 IS NULL OR substr(action, 1, length(?5)) = ?5) AND (?6 IS NULL OR target = ?6)
         AND (?7 IS NULL OR outcome = ?7) AND (?8 IS NULL OR seq {beyond} (SELECT seq FROM audit WHERE id = ?8))
         ORDER BY seq {order} LIMIT ?9"
    );
    let mut statement = connection.prepare(&sql)?;
    let values = params![
        filter.from,
        filter.until,
        filter.actor,
        action,
        prefix,
        filter.target,
        filter.outcome,
        page.after,
        u64::from(page.limit) + 1
    ];
    let rows = statement.query_map(values, event)?;
    Ok(listing(rows.collect::<Result<_, _>>()?, page.limit))
}

#[async_trait]
impl Audit for Sqlite {
    async fn note(&self, event: AuditEvent) -> Result<(), StoreError> {
        check_event(&event)?;
        let sql = format!(
            "INSERT INTO audit ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT (id) DO NOTHING"
        );
        let add = move |connection: &Connection| {
            let AuditEvent { id, at, actor, address, action, target, outcome, detail } = event;
            let values = params![id.as_str(), at, actor, address, action, target, outcome, detail];
            connection.prepare(&sql)?.execute(values)?;
            Ok(())
        };
        self.writer.run(add).await
    }

    async fn audit(&self, filter: &AuditFilter, page: &Page) -> Result<Listing<AuditEvent>, StoreError> {
        let (filter, page) = (filter.clone(), page.clone());
        self.reader.run(move |connection| list(connection, &filter, &page)).await
    }

    async fn sweep_audit(&self, before: u64) -> Result<u64, StoreError> {
        let sql = "DELETE FROM audit WHERE seq IN (SELECT seq FROM audit WHERE at < ?1 LIMIT ?2)";
        self.writer.run(move |connection| Ok(connection.execute(sql, params![before, SWEEP_MAX])? as u64)).await
    }
}
