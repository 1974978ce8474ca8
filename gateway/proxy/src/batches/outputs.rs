//! Bound of the bytes that the results of a tenant's batches keep in the store.
//!
//! The store is the truth; memory holds what it said last, with the results that came since. The sum is read
//! again where it has reached the bound, since results may have been deleted meanwhile.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use penstock_store::{Store, StoreError, Tenant};
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
    bytes: AtomicU64,
    /// Time of the last read of the sum; `None` before the first.
    counted: tokio::sync::Mutex<Option<Instant>>,
}

impl Output {
    fn new(tenant: Tenant) -> Self {
        Self { tenant, bytes: AtomicU64::new(0), counted: tokio::sync::Mutex::default() }
    }

    /// Returns true if the results kept have `max` bytes or more.
    ///
    /// # Errors
    /// The store's, where the sum is read from it.
    pub(super) async fn is_full(&self, store: &dyn Store, max: u64) -> Result<bool, StoreError> {
        let mut counted = self.counted.lock().await;
        let is_over = || self.bytes.load(Ordering::Relaxed) >= max;
        let is_due = counted.is_none_or(|at| at.elapsed() >= RECOUNT && is_over());
        if is_due {
            self.bytes.store(store.output_bytes(&self.tenant).await?, Ordering::Relaxed);
            *counted = Some(Instant::now());
        }
        Ok(is_over())
    }

    /// Adds a result that is about to be stored.
    pub(super) fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}
