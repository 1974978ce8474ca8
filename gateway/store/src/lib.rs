//! What the gateway keeps beyond one request: files, batches, stored responses; issued keys, the ledger, the audit log, configs.
//!
//! One set of traits by purpose ([`Files`], [`Batches`], [`Responses`], [`Keys`], [`Ledger`], [`Audit`], [`Configs`], [`People`]), async because a
//! store may be across a network; [`Sqlite`] is the one that needs nothing else. What several gateways count together goes through
//! [`Counters`]. Two rules hold for every store. **A tenant sees its own**: whatever is asked for on behalf of a client names its
//! [`Tenant`], and what belongs to another is not there. **A result counts once**: a batch line's result is kept in the same transaction
//! that takes the line off the list, and the ledger knows each request by its id, so a crash neither loses nor doubles one.
//!
//! Deliberately absent: HTTP, JSON of any API (documents are bytes here), clocks (`now` is an argument, in Unix seconds), policy.
#![forbid(unsafe_code)]

mod audit;
mod batches;
mod cache;
mod configs;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod counters;
mod error;
mod files;
#[cfg(any(feature = "postgres", feature = "redis"))]
mod home;
mod ids;
mod json;
mod keys;
mod ledger;
mod page;
mod people;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod responses;
mod sql;
mod sqlite;

pub use audit::{AUDIT_DETAIL_BYTES_MAX, Audit, AuditEvent, AuditFilter};
pub use batches::{
    BatchRecord, BatchStatus, BatchTimes, Batches, Cancelled, Counts, EndedBatch, Line, LineResult, NewBatch, NewLine,
    OpenBatch,
};
pub use cache::{CACHE_KEY_BYTES_MAX, CACHE_VALUE_BYTES_MAX, Cache};
pub use configs::{CONFIG_BYTES_MAX, ConfigRecord, Configs, NewConfig};
pub use counters::{Ask, Begun, Counters, Grant, Kept, MemoryCounters, Settlement, Window};
pub use error::StoreError;
pub use files::{CHUNK_BYTES_MAX, Deleted, FileRecord, Files, NewFile};
pub use ids::{AuditId, BatchId, FileId, KeyId, ResponseId, Tenant};
pub use keys::{
    Changes, KeyChange, KeyDigest, KeyFilter, KeyRecord, Keys, OwnerChange, OwnerKind, OwnerRecord, PreviousDigest,
    Rotation,
};
pub use ledger::{
    ENTRY_TAGS_MAX, Entry, EntryFilter, Group, Held, LEDGER_BATCH_MAX, Ledger, OpenEntry, Subject, Tokens,
    USAGE_GROUPS_MAX, USAGE_ROWS_MAX, UsageQuery, UsageRow,
};
pub use page::{Listing, Order, Page};
pub use people::{IDENTITY_BYTES_MAX, People};
#[cfg(feature = "postgres")]
pub use postgres::{Postgres, PostgresOptions};
#[cfg(feature = "redis")]
pub use redis::{Redis, RedisOptions};
pub use responses::{OpenResponse, RESPONSE_ROW_BYTES, ResponseRecord, ResponseRoom, ResponseStatus, Responses, Turn};
pub use sqlite::{Sqlite, SqliteOptions};

use async_trait::async_trait;

/// What a store counts about itself, since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Transactions that were made durable.
    pub commits: u64,
    /// Changes in them.
    pub writes: u64,
    /// Seconds that they took.
    pub commit_seconds: f64,
    /// Operations that failed.
    pub errors: u64,
    /// The last operation failed: the server is away, or the disk is full.
    pub down: bool,
}

/// A store of everything.
#[async_trait]
pub trait Store: Files + Batches + Responses + Keys + Ledger + Audit + Configs + People {
    /// Becomes the one process that runs what is in the store, or says that another is. Once it is, it stays it until it ends,
    /// or until a server ends its connection: to be asked again before each piece of work.
    async fn lead(&self) -> Result<bool, StoreError>;

    /// Leads no more, so that another process can before this one has ended.
    async fn resign(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Counts.
    fn stats(&self) -> Stats;
}
