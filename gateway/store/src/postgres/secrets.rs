//! [`Secrets`] in PostgreSQL.

use async_trait::async_trait;

use super::Postgres;
use super::held::cell;
use crate::secrets::check_secret;
use crate::{Secrets, StoreError};

#[async_trait]
impl Secrets for Postgres {
    async fn secret(&self, name: &str, fresh: &[u8]) -> Result<Vec<u8>, StoreError> {
        check_secret(name, fresh)?;
        let add = "INSERT INTO penstock.secrets (name, value) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING";
        let mut held = self.held().await?;
        held.change(add, &[&name, &fresh]).await?;
        let row = held.one("SELECT value FROM penstock.secrets WHERE name = $1", &[&name]).await?;
        row.map_or(Err(StoreError::Misuse("a secret that was not kept")), |row| cell(&row, 0))
    }
}
