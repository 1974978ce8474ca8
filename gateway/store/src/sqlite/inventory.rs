//! [`Inventory`] in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, params};

use super::{Sqlite, batches, files};
use crate::sql::{direction, listing};
use crate::{Inventory, InventoryFilter, Listing, OwnedBatch, OwnedFile, Page, StoreError, Tenant};

/// Condition if it is wanted, else nothing: SQLite finds an index only for conditions that always hold.
fn only(is_wanted: bool, condition: &str) -> &str {
    if is_wanted { condition } else { "" }
}

#[async_trait]
impl Inventory for Sqlite {
    async fn all_batches(&self, filter: &InventoryFilter, page: &Page) -> Result<Listing<OwnedBatch>, StoreError> {
        let (filter, page) = (filter.clone(), page.clone());
        let (order, beyond) = direction(page.order);
        let columns = batches::COLUMNS;
        let sql = format!(
            "SELECT {columns}, (SELECT bytes FROM files WHERE files.id = batches.input),
               CASE WHEN is_open THEN result_bytes
                    ELSE (SELECT coalesce(sum(bytes), 0) FROM files WHERE files.id IN (batches.output, batches.errors)) END
             FROM batches WHERE TRUE {of_tenant} {of_id} {open} {after}
             ORDER BY seq {order} LIMIT ?4",
            of_tenant = only(filter.tenant.is_some(), "AND tenant = ?1"),
            of_id = only(filter.id.is_some(), "AND id = ?2"),
            open = only(filter.is_open, "AND is_open = 1"),
            after = only(page.after.is_some(), &format!("AND seq {beyond} (SELECT seq FROM batches WHERE id = ?3)")),
        );
        let list = move |connection: &Connection| {
            let mut statement = connection.prepare(&sql)?;
            let tenant = filter.tenant.as_ref().map(Tenant::as_str);
            let rows = statement.query_map(params![tenant, filter.id, page.after, page.limit + 1], |row| {
                let tenant: String = row.get(19)?;
                Ok(OwnedBatch {
                    tenant: Tenant::new(&tenant),
                    batch: batches::record(row)?,
                    input_bytes: row.get(20)?,
                    output_bytes: row.get(21)?,
                })
            })?;
            Ok(listing(rows.collect::<Result<_, _>>()?, page.limit))
        };
        self.reader.run(list).await
    }

    async fn all_files(&self, filter: &InventoryFilter, page: &Page) -> Result<Listing<OwnedFile>, StoreError> {
        let (filter, page) = (filter.clone(), page.clone());
        let (order, beyond) = direction(page.order);
        let columns = files::COLUMNS;
        let sql = format!(
            "SELECT {columns}, tenant, id IN (SELECT input FROM batches WHERE is_open = 1)
             FROM files WHERE sealed = 1 AND purpose NOT LIKE '.%' {of_tenant} {of_id} {after}
             ORDER BY seq {order} LIMIT ?4",
            of_tenant = only(filter.tenant.is_some(), "AND tenant = ?1"),
            of_id = only(filter.id.is_some(), "AND id = ?2"),
            after = only(page.after.is_some(), &format!("AND seq {beyond} (SELECT seq FROM files WHERE id = ?3)")),
        );
        let list = move |connection: &Connection| {
            let mut statement = connection.prepare(&sql)?;
            let tenant = filter.tenant.as_ref().map(Tenant::as_str);
            let rows = statement.query_map(params![tenant, filter.id, page.after, page.limit + 1], |row| {
                let tenant: String = row.get(6)?;
                Ok(OwnedFile { tenant: Tenant::new(&tenant), file: files::record(row)?, is_in_use: row.get(7)? })
            })?;
            Ok(listing(rows.collect::<Result<_, _>>()?, page.limit))
        };
        self.reader.run(list).await
    }
}
