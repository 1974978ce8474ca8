//! Conformance suite: the contract of every store as assertions, called with a fresh store of each kind.
//!
//! Each function uses its own names, so that they can share a store.

mod counters;
mod kept;
mod keys;
mod ledger;
mod objects;
mod records;

pub use counters::{cache, counters};

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Store;

/// Settlement number for any holder, greater than all before.
pub fn nth() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// Checks the whole contract of a [`Store`].
pub async fn everything(store: &dyn Store) {
    kept::all(store).await;
    objects::all(store).await;
    keys::all(store).await;
    ledger::all(store).await;
    records::all(store).await;
}
