//! Bound of the bytes that the results of a tenant's batches keep in the store.
//!
//! The store is the truth; memory holds the sum that it said last and the results that came since. A result counts from
//! the moment it is made, before the line's slot is given on: the next line with that slot sees it. The sum is read again
//! where it has reached the bound, since results may have been deleted meanwhile.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use penstock_store::{LineResult, Store, StoreError, Tenant};
use tokio::time::Instant;

/// Shortest interval between two reads of a tenant's sum: while a tenant is over its bound, each of its lines asks.
const RECOUNT: Duration = Duration::from_secs(5);

/// Outputs of the tenants with batches that run.
#[derive(Default)]
pub(super) struct Outputs(Mutex<HashMap<Tenant, Weak<Output>>>);

impl Outputs {
    /// Output of a tenant, the same for all of its batches that run.
    pub(super) fn of(&self, tenant: &Tenant) -> Arc<Output> {
        let mut outputs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(output) = outputs.get(tenant).and_then(Weak::upgrade) {
            return output;
        }
        outputs.retain(|_, output| output.strong_count() > 0);
        let output = Arc::new(Output::new(tenant.clone()));
        outputs.insert(tenant.clone(), Arc::downgrade(&output));
        output
    }
}

/// Bytes of results that the batches of one tenant keep.
pub(super) struct Output {
    tenant: Tenant,
    sums: Mutex<Sums>,
    /// Lock for reads of the store's sum, so that a result is not stored and counted between a read and its use.
    reading: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Sums {
    /// Bytes that the store holds.
    stored: u64,
    /// Bytes of results that are made and not known to be stored.
    pending: u64,
    /// Time of the last read of the store's sum; `None`: it must be read before it is used.
    read: Option<Instant>,
}

impl Output {
    fn new(tenant: Tenant) -> Self {
        Self { tenant, sums: Mutex::default(), reading: tokio::sync::Mutex::default() }
    }

    fn sums(&self) -> MutexGuard<'_, Sums> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the results have `max` bytes or more.
    ///
    /// # Errors
    /// The store's, where the sum is read from it.
    pub(super) async fn is_full(&self, store: &dyn Store, max: u64) -> Result<bool, StoreError> {
        let _reading = self.reading.lock().await;
        if self.sums().is_due(max) {
            let stored = store.output_bytes(&self.tenant).await?;
            let mut sums = self.sums();
            (sums.stored, sums.read) = (stored, Some(Instant::now()));
        }
        Ok(self.sums().is_full(max))
    }

    /// Counts a result that is about to be stored.
    pub(super) fn hold(&self, result: &LineResult) -> Pending<'_> {
        // Its file has a line end behind it.
        let bytes = result.text.len() as u64 + 1;
        self.sums().pending += bytes;
        Pending { output: self, bytes, is_stored: false }
    }
}

impl Sums {
    fn is_full(&self, max: u64) -> bool {
        self.stored.saturating_add(self.pending) >= max
    }

    fn is_due(&self, max: u64) -> bool {
        self.read.is_none_or(|at| at.elapsed() >= RECOUNT && self.is_full(max))
    }
}

/// Result that counts and is not known to be stored. Dropped without [`stored`](Self::stored), it makes the next line read
/// the store's sum.
pub(super) struct Pending<'a> {
    output: &'a Output,
    bytes: u64,
    is_stored: bool,
}

impl Pending<'_> {
    /// Counts the result among those that the store holds.
    pub(super) async fn stored(mut self) {
        // A read that began before the result was stored ends first. One that saw it counts it twice, until the next.
        let _reading = self.output.reading.lock().await;
        self.output.sums().stored += self.bytes;
        self.is_stored = true;
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let mut sums = self.output.sums();
        sums.pending -= self.bytes;
        if !self.is_stored {
            sums.read = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use penstock_store::{Sqlite, SqliteOptions};

    use super::*;

    fn result() -> LineResult {
        LineResult { ok: true, text: Bytes::from_static(b"123456789") }
    }

    #[tokio::test]
    async fn what_is_made_counts_until_the_store_has_it_and_what_is_gone_does_not() {
        let store = Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("opens");
        let output = Output::new(Tenant::new("a"));
        let is_full = async || output.is_full(&store, 20).await.expect("read");
        // A paused clock would make the store late.
        let age_the_sum = || output.sums().read = Instant::now().checked_sub(RECOUNT);
        assert!(!is_full().await);
        let (first, second) = (output.hold(&result()), output.hold(&result()));
        assert!(is_full().await, "ten bytes each, with their line ends");
        age_the_sum();
        assert!(is_full().await, "a read does not forget what is about to be stored");
        drop(first);
        assert!(!is_full().await, "one that came to nothing");
        second.stored().await;
        let third = output.hold(&result());
        assert!(is_full().await, "what was stored since the last read, and what is about to be");
        third.stored().await;
        // The store has none of them: they were deleted.
        age_the_sum();
        assert!(!is_full().await);
    }
}
