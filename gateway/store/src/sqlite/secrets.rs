//! [`Secrets`] in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, params};

use super::Sqlite;
use crate::secrets::check_secret;
use crate::{Secrets, StoreError};

#[async_trait]
impl Secrets for Sqlite {
    async fn secret(&self, name: &str, fresh: &[u8]) -> Result<Vec<u8>, StoreError> {
        check_secret(name, fresh)?;
        let (name, fresh) = (name.to_owned(), fresh.to_vec());
        let find = move |connection: &Connection| {
            connection.execute(
                "INSERT INTO secrets (name, value) VALUES (?1, ?2) ON CONFLICT (name) DO NOTHING",
                params![name, fresh],
            )?;
            Ok(connection.query_row("SELECT value FROM secrets WHERE name = ?1", [&name], |row| row.get(0))?)
        };
        self.writer.run(find).await
    }
}
