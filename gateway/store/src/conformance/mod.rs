//! What every store has to do, as assertions: called with a fresh store of each kind.
//!
//! Each function takes names of its own, so they can share a store.

mod counters;
mod kept;
mod keys;
mod ledger;
mod records;

pub use counters::{cache, counters};

use crate::Store;

/// All that a [`Store`] has to do.
pub async fn everything(store: &dyn Store) {
    kept::all(store).await;
    keys::all(store).await;
    ledger::all(store).await;
    records::all(store).await;
}
