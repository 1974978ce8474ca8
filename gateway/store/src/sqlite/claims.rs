//! [`WorkClaims`] of a SQLite database: in memory, since the lock file says exactly who leads, and a process that has
//! ended leaves neither the lock nor a claim.

use async_trait::async_trait;

use super::Sqlite;
use crate::claims::check_claim;
use crate::{StoreError, WorkClaim, WorkClaims};

#[async_trait]
impl WorkClaims for Sqlite {
    async fn claim_work(&self, work: &str, holder: &str) -> Result<bool, StoreError> {
        check_claim(work, holder)?;
        Ok(self.claims.claim(work, holder))
    }

    async fn renew_work(&self, holder: &str) -> Result<Vec<String>, StoreError> {
        Ok(self.claims.renew(holder))
    }

    async fn claims_of_others(&self, holder: &str, limit: u32) -> Result<Vec<WorkClaim>, StoreError> {
        Ok(self.claims.of_others(holder, limit))
    }

    async fn release_work(&self, work: &[String], holder: &str) -> Result<(), StoreError> {
        self.claims.release(work, holder);
        Ok(())
    }

    async fn forget_work(&self, claim: &WorkClaim) -> Result<bool, StoreError> {
        Ok(self.claims.forget(claim))
    }
}
