//! [`People`] in PostgreSQL.

use async_trait::async_trait;

use super::Postgres;
use super::held::{cell, int, number};
use crate::people::check_identity;
use crate::{People, StoreError, Tenant};

#[async_trait]
impl People for Postgres {
    async fn keep_identity(&self, tenant: &Tenant, identity: &str, at: u64) -> Result<(), StoreError> {
        check_identity(identity)?;
        let sql = "INSERT INTO penstock.people (tenant, identity, at) VALUES ($1, $2, $3)
                   ON CONFLICT (tenant) DO UPDATE SET identity = $2, at = $3";
        self.held().await?.change(sql, &[&tenant.as_str(), &identity, &int(at)]).await.map(drop)
    }

    async fn identity(&self, tenant: &Tenant) -> Result<Option<(String, u64)>, StoreError> {
        let sql = "SELECT identity, at FROM penstock.people WHERE tenant = $1";
        let row = self.held().await?.one(sql, &[&tenant.as_str()]).await?;
        row.map(|row| Ok((cell(&row, 0)?, number(&row, 1)?))).transpose()
    }

    async fn sweep_identities(&self, before: u64) -> Result<u64, StoreError> {
        let sql = "DELETE FROM penstock.people p WHERE p.at < $1
                   AND NOT EXISTS (SELECT 1 FROM penstock.batches b WHERE b.tenant = p.tenant AND b.is_open)
                   AND NOT EXISTS (SELECT 1 FROM penstock.responses r WHERE r.tenant = p.tenant AND r.status < 2)
                   RETURNING 1";
        Ok(self.held().await?.change(sql, &[&int(before)]).await?.len() as u64)
    }
}
