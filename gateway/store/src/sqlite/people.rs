//! [`People`] in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, params};

use super::Sqlite;
use crate::people::check_identity;
use crate::{People, StoreError, Tenant};

#[async_trait]
impl People for Sqlite {
    async fn keep_identity(&self, tenant: &Tenant, identity: &str, at: u64) -> Result<(), StoreError> {
        check_identity(identity)?;
        let (tenant, identity) = (tenant.clone(), identity.to_owned());
        let keep = move |connection: &Connection| {
            let sql = "INSERT INTO people (tenant, identity, at) VALUES (?1, ?2, ?3)
                       ON CONFLICT (tenant) DO UPDATE SET identity = ?2, at = ?3";
            connection.execute(sql, params![tenant.as_str(), identity, at])?;
            Ok(())
        };
        self.writer.run(keep).await
    }

    async fn identity(&self, tenant: &Tenant) -> Result<Option<(String, u64)>, StoreError> {
        let tenant = tenant.clone();
        let find = move |connection: &Connection| {
            let mut found = connection.prepare("SELECT identity, at FROM people WHERE tenant = ?1")?;
            Ok(found.query_row([tenant.as_str()], |row| Ok((row.get(0)?, row.get(1)?))).optional()?)
        };
        self.reader.run(find).await
    }

    async fn sweep_identities(&self, before: u64) -> Result<u64, StoreError> {
        let sweep = move |connection: &Connection| {
            let sql = "DELETE FROM people WHERE at < ?1
                       AND tenant NOT IN (SELECT tenant FROM batches WHERE is_open = 1)
                       AND tenant NOT IN (SELECT tenant FROM responses WHERE status < 2)";
            Ok(connection.execute(sql, [before])? as u64)
        };
        self.writer.run(sweep).await
    }
}
