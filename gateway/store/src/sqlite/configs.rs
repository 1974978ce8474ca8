//! [`Configs`] in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::Sqlite;
use crate::configs::check_config;
use crate::sql::listing;
use crate::{ConfigRecord, Configs, Listing, NewConfig, StoreError};

const COLUMNS: &str = "number, sha256, length(CAST(text AS BLOB)), at, actor, note, outcome";

fn record(row: &Row<'_>) -> rusqlite::Result<ConfigRecord> {
    Ok(ConfigRecord {
        number: row.get(0)?,
        sha256: row.get(1)?,
        bytes: row.get(2)?,
        at: row.get(3)?,
        actor: row.get(4)?,
        note: row.get(5)?,
        outcome: row.get(6)?,
    })
}

fn save(connection: &Connection, new: &NewConfig, keep: u32) -> Result<ConfigRecord, StoreError> {
    let sql = format!(
        "INSERT INTO configs (text, sha256, at, actor, note, outcome) VALUES (?1, ?2, ?3, ?4, ?5, ?6) RETURNING {COLUMNS}"
    );
    let values = params![new.text, new.sha256, new.at, new.actor, new.note, new.outcome];
    let saved = connection.prepare(&sql)?.query_row(values, record)?;
    let old = "DELETE FROM configs WHERE number NOT IN (SELECT number FROM configs ORDER BY number DESC LIMIT ?1)";
    connection.execute(old, [keep.max(1)])?;
    Ok(saved)
}

#[async_trait]
impl Configs for Sqlite {
    async fn save_config(&self, config: NewConfig, keep: u32) -> Result<ConfigRecord, StoreError> {
        check_config(&config)?;
        self.writer.run(move |connection| save(connection, &config, keep)).await
    }

    async fn config(&self, number: u64) -> Result<Option<(ConfigRecord, String)>, StoreError> {
        let find = move |connection: &Connection| {
            let sql = format!("SELECT {COLUMNS}, text FROM configs WHERE number = ?1");
            let both = |row: &Row<'_>| Ok((record(row)?, row.get(7)?));
            Ok(connection.prepare(&sql)?.query_row([number], both).optional()?)
        };
        self.reader.run(find).await
    }

    async fn configs(&self, before: Option<u64>, limit: u32) -> Result<Listing<ConfigRecord>, StoreError> {
        let list = move |connection: &Connection| {
            let sql = format!(
                "SELECT {COLUMNS} FROM configs WHERE (?1 IS NULL OR number < ?1) ORDER BY number DESC LIMIT ?2"
            );
            let mut statement = connection.prepare(&sql)?;
            let rows = statement.query_map(params![before, u64::from(limit) + 1], record)?;
            Ok(listing(rows.collect::<Result<_, _>>()?, limit))
        };
        self.reader.run(list).await
    }
}
