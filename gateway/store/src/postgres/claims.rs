//! [`WorkClaims`] in PostgreSQL.

use async_trait::async_trait;
use tokio_postgres::Row;

use super::Postgres;
use super::held::{cell, int, number};
use crate::claims::check_claim;
use crate::{StoreError, WorkClaim, WorkClaims};

#[async_trait]
impl WorkClaims for Postgres {
    async fn claim_work(&self, work: &str, holder: &str) -> Result<bool, StoreError> {
        check_claim(work, holder)?;
        let sql = "INSERT INTO penstock.claims AS old (work, holder) VALUES ($1, $2)
                   ON CONFLICT (work) DO UPDATE SET holder = excluded.holder WHERE old.holder = excluded.holder";
        Ok(self.held().await?.execute(sql, &[&work, &holder]).await? > 0)
    }

    async fn renew_work(&self, holder: &str) -> Result<Vec<String>, StoreError> {
        let sql = "UPDATE penstock.claims SET beats = beats + 1 WHERE holder = $1 RETURNING work";
        let rows = self.held().await?.change(sql, &[&holder]).await?;
        rows.iter().map(|row| cell(row, 0)).collect()
    }

    async fn claims_of_others(&self, holder: &str, limit: u32) -> Result<Vec<WorkClaim>, StoreError> {
        let sql = "SELECT work, holder, beats FROM penstock.claims WHERE holder <> $1 ORDER BY work LIMIT $2";
        let rows = self.held().await?.query(sql, &[&holder, &i64::from(limit)]).await?;
        let claim = |row: &Row| Ok(WorkClaim { work: cell(row, 0)?, holder: cell(row, 1)?, beats: number(row, 2)? });
        rows.iter().map(claim).collect()
    }

    async fn release_work(&self, work: &[String], holder: &str) -> Result<(), StoreError> {
        let sql = "DELETE FROM penstock.claims WHERE holder = $1 AND work = ANY($2)";
        self.held().await?.execute(sql, &[&holder, &work]).await.map(drop)
    }

    async fn forget_work(&self, claim: &WorkClaim) -> Result<bool, StoreError> {
        let sql = "DELETE FROM penstock.claims WHERE work = $1 AND holder = $2 AND beats = $3";
        Ok(self.held().await?.execute(sql, &[&claim.work, &claim.holder, &int(claim.beats)]).await? > 0)
    }
}
