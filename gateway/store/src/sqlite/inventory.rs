//! [`Inventory`] in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, params};

use super::{Sqlite, batches, files};
use crate::sql::{direction, listing};
use crate::{Inventory, InventoryFilter, Listing, OwnedBatch, OwnedFile, Page, StoreError, Tenant};

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
             FROM batches WHERE (?1 IS NULL OR tenant = ?1) AND (?2 IS NULL OR id = ?2) AND is_open >= ?3
             AND (?4 IS NULL OR seq {beyond} (SELECT seq FROM batches WHERE id = ?4))
             ORDER BY seq {order} LIMIT ?5"
        );
        let list = move |connection: &Connection| {
            let mut statement = connection.prepare(&sql)?;
            let tenant = filter.tenant.as_ref().map(Tenant::as_str);
            let rows =
                statement.query_map(params![tenant, filter.id, filter.is_open, page.after, page.limit + 1], |row| {
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
            "SELECT {columns}, tenant, EXISTS (SELECT 1 FROM batches WHERE is_open = 1 AND input = files.id)
             FROM files WHERE sealed = 1 AND purpose NOT LIKE '.%' AND (?1 IS NULL OR tenant = ?1) AND (?2 IS NULL OR id = ?2)
             AND (?3 IS NULL OR seq {beyond} (SELECT seq FROM files WHERE id = ?3))
             ORDER BY seq {order} LIMIT ?4"
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
