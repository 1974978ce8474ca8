//! [`Configs`] in PostgreSQL.

use async_trait::async_trait;
use tokio_postgres::Row;

use super::Postgres;
use super::held::{cell, int, number, odd};
use crate::configs::check_config;
use crate::sql::listing;
use crate::{ConfigRecord, Configs, Listing, NewConfig, StoreError};

const COLUMNS: &str = "number, sha256, octet_length(text)::bigint, at, actor, note, outcome";

fn record(row: &Row) -> Result<ConfigRecord, StoreError> {
    Ok(ConfigRecord {
        number: number(row, 0)?,
        sha256: cell(row, 1)?,
        bytes: number(row, 2)?,
        at: number(row, 3)?,
        actor: cell(row, 4)?,
        note: cell(row, 5)?,
        outcome: cell(row, 6)?,
    })
}

#[async_trait]
impl Configs for Postgres {
    async fn save_config(&self, config: NewConfig, keep: u32) -> Result<ConfigRecord, StoreError> {
        check_config(&config)?;
        let mut held = self.held().await?;
        held.begin().await?;
        let sql = format!(
            "INSERT INTO penstock.configs (text, sha256, at, actor, note, outcome) VALUES ($1, $2, $3, $4, $5, $6) RETURNING {COLUMNS}"
        );
        let NewConfig { text, sha256, at, actor, note, outcome } = config;
        let note = note.replace('\0', "\u{fffd}");
        let row = held.one(&sql, &[&text, &sha256, &int(at), &actor, &note, &outcome]).await?;
        let saved = record(&row.ok_or_else(odd)?)?;
        let old = "DELETE FROM penstock.configs WHERE number NOT IN (
                     SELECT number FROM penstock.configs ORDER BY number DESC LIMIT $1)";
        held.execute(old, &[&i64::from(keep.max(1))]).await?;
        held.commit().await?;
        Ok(saved)
    }

    async fn config(&self, number: u64) -> Result<Option<(ConfigRecord, String)>, StoreError> {
        let sql = format!("SELECT {COLUMNS}, text FROM penstock.configs WHERE number = $1");
        let row = self.held().await?.one(&sql, &[&int(number)]).await?;
        row.map(|row| Ok((record(&row)?, cell(&row, 7)?))).transpose()
    }

    async fn configs(&self, before: Option<u64>, limit: u32) -> Result<Listing<ConfigRecord>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM penstock.configs WHERE ($1::bigint IS NULL OR number < $1) ORDER BY number DESC LIMIT $2"
        );
        let rows = self.held().await?.query(&sql, &[&before.map(int), &(i64::from(limit) + 1)]).await?;
        Ok(listing(rows.iter().map(record).collect::<Result<_, _>>()?, limit))
    }
}
