//! Reserve in a database of bounded size: clients' objects leave some space for the gateway's own records.
//!
//! Keys, limits, the ledger and configs are small and must be writable whatever clients have stored: a full store
//! refuses files, results and responses, and nothing else.

use rusqlite::Connection;

use crate::StoreError;

/// SQLite's `max_page_count` of an unbounded database.
const UNBOUNDED_PAGES: u64 = 0xFFFF_FFFE;
/// Reserve of a bounded database: one in so many pages.
const RESERVED_PART: u64 = 16;

/// Checks that `bytes` of a client's object fit beside the reserve.
///
/// # Errors
/// [`StoreError::Full`] if they do not.
pub(super) fn room_for(connection: &Connection, bytes: u64) -> Result<(), StoreError> {
    let pragma = |name: &str| connection.query_row(&format!("PRAGMA {name}"), [], |row| row.get::<_, u64>(0));
    let max = pragma("max_page_count")?;
    if max >= UNBOUNDED_PAGES {
        return Ok(());
    }
    let used = pragma("page_count")?.saturating_sub(pragma("freelist_count")?);
    // A document fills its own pages, a few words of each used by SQLite, and touches some index pages.
    let wanted = bytes / (pragma("page_size")?.max(512) - 64) + 4;
    match used + wanted + max / RESERVED_PART <= max {
        true => Ok(()),
        false => Err(StoreError::Full),
    }
}
