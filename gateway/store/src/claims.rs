//! Claims of gateways on stored work: which of them runs a batch or a background response now.
//!
//! The lead says who begins work; a claim says whose work it is that has begun. A leader can lose its session with the
//! server while it lives on and goes on with what it runs, so the next leader leaves claimed work alone. A claim has no
//! time in it, since clocks of gateways differ: its holder counts it up, and whoever sees the same count for long takes
//! the holder for dead.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use crate::StoreError;

/// Longest id of work, and longest name of a holder, in bytes.
const NAME_BYTES_MAX: usize = 256;

/// Claim of one gateway on one piece of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkClaim {
    /// Id of the batch or the response.
    pub work: String,
    /// Name of the process that runs it.
    pub holder: String,
    /// Number of renewals of the claim: a sign of life for as long as it rises.
    pub beats: u64,
}

/// Store of the claims on work that gateways run.
#[async_trait]
pub trait WorkClaims: Send + Sync + 'static {
    /// Claims work for `holder`; a claim that it has already stays. `false`: another holder has claimed it.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] for a name that is empty or too long.
    async fn claim_work(&self, work: &str, holder: &str) -> Result<bool, StoreError>;

    /// Renews all claims of `holder`, and returns their work.
    async fn renew_work(&self, holder: &str) -> Result<Vec<String>, StoreError>;

    /// Lists the claims of all holders but `holder`, at most `limit`.
    async fn claims_of_others(&self, holder: &str, limit: u32) -> Result<Vec<WorkClaim>, StoreError>;

    /// Gives claims of `holder` up; those of other holders stay.
    async fn release_work(&self, work: &[String], holder: &str) -> Result<(), StoreError>;

    /// Deletes the claim of a holder that is dead. `false`: the claim was renewed meanwhile, or is gone.
    async fn forget_work(&self, claim: &WorkClaim) -> Result<bool, StoreError>;
}

pub(crate) fn check_claim(work: &str, holder: &str) -> Result<(), StoreError> {
    let fits = |name: &str| (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains('\0');
    if fits(work) && fits(holder) { Ok(()) } else { Err(StoreError::Misuse("a claim that cannot be kept")) }
}

/// Claims in the memory of one process, for a store whose lead is exact: the lead passes on when its holder has ended,
/// and no claim outlives its holder.
#[derive(Debug, Default)]
pub(crate) struct MemoryClaims(Mutex<BTreeMap<String, WorkClaim>>);

impl MemoryClaims {
    fn claims(&self) -> MutexGuard<'_, BTreeMap<String, WorkClaim>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn claim(&self, work: &str, holder: &str) -> bool {
        let mut claims = self.claims();
        let new = || WorkClaim { work: work.to_owned(), holder: holder.to_owned(), beats: 0 };
        claims.entry(work.to_owned()).or_insert_with(new).holder == holder
    }

    pub(crate) fn renew(&self, holder: &str) -> Vec<String> {
        let mut claims = self.claims();
        let own = claims.values_mut().filter(|claim| claim.holder == holder);
        own.map(|claim| {
            claim.beats += 1;
            claim.work.clone()
        })
        .collect()
    }

    pub(crate) fn of_others(&self, holder: &str, limit: u32) -> Vec<WorkClaim> {
        self.claims().values().filter(|claim| claim.holder != holder).take(limit as usize).cloned().collect()
    }

    pub(crate) fn release(&self, work: &[String], holder: &str) {
        self.claims().retain(|id, claim| claim.holder != holder || !work.contains(id));
    }

    pub(crate) fn forget(&self, claim: &WorkClaim) -> bool {
        let mut claims = self.claims();
        claims.get(&claim.work) == Some(claim) && claims.remove(&claim.work).is_some()
    }
}
