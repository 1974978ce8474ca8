//! [`Inventory`] in PostgreSQL.

use async_trait::async_trait;

use super::held::{Values, cell, maybe, number};
use super::{Postgres, batches, files};
use crate::sql::{direction, listing};
use crate::{Inventory, InventoryFilter, Listing, OwnedBatch, OwnedFile, Page, StoreError, Tenant};

#[async_trait]
impl Inventory for Postgres {
    async fn all_batches(&self, filter: &InventoryFilter, page: &Page) -> Result<Listing<OwnedBatch>, StoreError> {
        let (order, beyond) = direction(page.order);
        let columns = batches::COLUMNS;
        let sql = format!(
            "SELECT {columns}, (SELECT bytes FROM penstock.files WHERE files.id = batches.input),
               CASE WHEN is_open THEN result_bytes
                    ELSE (SELECT coalesce(sum(bytes), 0)::bigint FROM penstock.files
                          WHERE files.id IN (batches.output, batches.errors)) END
             FROM penstock.batches WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR id = $2)
             AND (is_open OR NOT $3)
             AND ($4::text IS NULL OR seq {beyond} (SELECT seq FROM penstock.batches WHERE id = $4))
             ORDER BY seq {order} LIMIT $5"
        );
        let (tenant, limit) = (filter.tenant.as_ref().map(Tenant::as_str), i64::from(page.limit) + 1);
        let values: Values<'_> = &[&tenant, &filter.id, &filter.is_open, &page.after, &limit];
        let rows = self.held().await?.query(&sql, values).await?;
        let owned = rows.iter().map(|row| {
            Ok(OwnedBatch {
                tenant: Tenant::new(cell(row, 19)?),
                batch: batches::record(row)?,
                input_bytes: maybe(row, 20)?,
                output_bytes: number(row, 21)?,
            })
        });
        Ok(listing(owned.collect::<Result<_, StoreError>>()?, page.limit))
    }

    async fn all_files(&self, filter: &InventoryFilter, page: &Page) -> Result<Listing<OwnedFile>, StoreError> {
        let (order, beyond) = direction(page.order);
        let columns = files::COLUMNS;
        let sql = format!(
            "SELECT {columns}, tenant, EXISTS (SELECT 1 FROM penstock.batches WHERE is_open AND input = files.id)
             FROM penstock.files WHERE sealed AND purpose NOT LIKE '.%'
             AND ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR id = $2)
             AND ($3::text IS NULL OR seq {beyond} (SELECT seq FROM penstock.files WHERE id = $3))
             ORDER BY seq {order} LIMIT $4"
        );
        let (tenant, limit) = (filter.tenant.as_ref().map(Tenant::as_str), i64::from(page.limit) + 1);
        let rows = self.held().await?.query(&sql, &[&tenant, &filter.id, &page.after, &limit]).await?;
        let owned = rows.iter().map(|row| {
            let (file, is_in_use) = (files::record(row)?, cell(row, 7)?);
            Ok(OwnedFile { tenant: Tenant::new(cell(row, 6)?), file, is_in_use })
        });
        Ok(listing(owned.collect::<Result<_, StoreError>>()?, page.limit))
    }
}
