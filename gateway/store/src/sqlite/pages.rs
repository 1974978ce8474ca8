//! Room in a database whose size is bounded: what clients keep leaves some of it to what the gateway itself must write.
//!
//! Keys, limits, the ledger and configs are small and must be written whatever clients have kept: a full store of files, batches or
//! responses refuses files, results and responses, and nothing else.

use rusqlite::Connection;

use crate::StoreError;

/// A page that SQLite bounds no database by.
const UNBOUNDED_PAGES: u64 = 0xFFFF_FFFE;
/// The part of a bounded database that clients cannot use up: one in so many pages.
const RESERVED_PART: u64 = 16;

/// Whether `bytes` of what a client keeps may be written.
///
/// # Errors
/// [`StoreError::Full`]: they would use up what is left to the gateway.
pub(super) fn room_for(connection: &Connection, bytes: u64) -> Result<(), StoreError> {
    let pragma = |name: &str| connection.query_row(&format!("PRAGMA {name}"), [], |row| row.get::<_, u64>(0));
    let max = pragma("max_page_count")?;
    if max >= UNBOUNDED_PAGES {
        return Ok(());
    }
    let used = pragma("page_count")?.saturating_sub(pragma("freelist_count")?);
    // Documents fill pages of their own, with a few words of each page for SQLite, and touch some pages of indexes.
    let wanted = bytes / (pragma("page_size")?.max(512) - 64) + 4;
    match used + wanted + max / RESERVED_PART <= max {
        true => Ok(()),
        false => Err(StoreError::Full),
    }
}
