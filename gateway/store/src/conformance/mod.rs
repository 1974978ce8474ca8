//! What every store has to do, as assertions: called with a fresh store of each kind.
//!
//! Each function takes names of its own, so they can share a store.

mod counters;
mod kept;
mod keys;
mod ledger;
mod records;

pub use counters::{cache, counters};

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Store;

/// A number for a settlement, of whichever holder, greater than all before.
pub fn nth() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// All that a [`Store`] has to do.
pub async fn everything(store: &dyn Store) {
    kept::all(store).await;
    keys::all(store).await;
    ledger::all(store).await;
    records::all(store).await;
}
