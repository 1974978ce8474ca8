//! Durable state of the gateway: files, batches, stored responses, completions and conversations; issued keys, the ledger, the audit log, configs.
//!
//! There is one trait per purpose ([`Files`], [`Batches`], [`Responses`], [`Objects`], [`Keys`], [`Ledger`], [`Audit`], [`Configs`],
//! [`People`], [`Secrets`], [`WorkClaims`]), async because a store may be across a network; [`Sqlite`] needs no server. Counts shared by several
//! gateways go through [`Counters`]. Two rules hold for every store. **A tenant sees only its own objects**: every
//! operation on behalf of a client names its [`Tenant`], and objects of another are treated as missing; lists across tenants are the
//! operator's ([`Inventory`]). **A result
//! counts once**: a batch line's result is stored in the same transaction that takes the line off the list, and the
//! ledger knows each request by its id, so a crash neither loses nor duplicates a result.
//!
//! Deliberately absent: HTTP, JSON of any API (documents are bytes here), clocks (`now` is an argument, in Unix
//! seconds), policy.
#![forbid(unsafe_code)]

mod audit;
mod batches;
mod cache;
mod claims;
mod configs;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod counters;
mod error;
mod files;
#[cfg(any(feature = "postgres", feature = "redis"))]
mod home;
mod ids;
mod inventory;
mod json;
mod keys;
mod ledger;
mod objects;
mod page;
mod people;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod responses;
mod secrets;
mod sql;
mod sqlite;

pub use audit::{AUDIT_DETAIL_BYTES_MAX, Audit, AuditEvent, AuditFilter};
pub use batches::{
    BatchRecord, BatchStatus, BatchTimes, Batches, Cancelled, Counts, EndedBatch, Line, LineResult, Listed, NewBatch,
    NewLine, OpenBatch,
};
pub use cache::{CACHE_KEY_BYTES_MAX, CACHE_VALUE_BYTES_MAX, Cache};
pub use claims::{WorkClaim, WorkClaims};
pub use configs::{CONFIG_BYTES_MAX, ConfigRecord, Configs, NewConfig};
pub use counters::{
    AMOUNT_MAX, ASKS_MAX, Ask, Begun, Counters, Grant, Kept, MemoryCounters, Settlement, Window, is_counter_name,
};
pub use error::StoreError;
pub use files::{CHUNK_BYTES_MAX, Deleted, FileRecord, Files, NewFile};
pub use ids::{AuditId, BatchId, FileId, KeyId, ResponseId, Tenant, random as random_id};
pub use inventory::{Inventory, InventoryFilter, OwnedBatch, OwnedFile};
pub use keys::{
    Changes, KeyChange, KeyDigest, KeyFilter, KeyRecord, Keys, OwnerChange, OwnerKind, OwnerRecord, PreviousDigest,
    Rotation,
};
pub use ledger::{
    ENTRY_TAGS_MAX, Entry, EntryFilter, Group, Held, LEDGER_BATCH_MAX, Ledger, OpenEntry, Subject, Tokens,
    USAGE_GROUPS_MAX, USAGE_ROWS_MAX, UsageQuery, UsageRow,
};
pub use objects::{Append, Change, ITEM_ROW_BYTES, Item, ObjectFilter, ObjectId, ObjectKind, ObjectRecord, Objects};
pub use page::{Listing, Order, Page};
pub use people::{IDENTITY_BYTES_MAX, People};
#[cfg(feature = "postgres")]
pub use postgres::{Postgres, PostgresOptions};
#[cfg(feature = "redis")]
pub use redis::{Redis, RedisOptions};
pub use responses::{
    OpenResponse, RESPONSE_ROW_BYTES, ResponseChange, ResponseRecord, ResponseRoom, ResponseState, ResponseStatus,
    Responses, Turn,
};
pub use secrets::{SECRET_BYTES_MAX, Secrets};
pub use sqlite::{Sqlite, SqliteOptions};

use async_trait::async_trait;

/// Counters of a store's own work since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Number of transactions that were made durable.
    pub commits: u64,
    /// Number of write operations in committed transactions. With Postgres: number of write statements executed, even
    /// if their transaction was not committed.
    pub writes: u64,
    /// Seconds that the durable transactions took in all.
    pub commit_seconds: f64,
    /// Number of operations that failed.
    pub errors: u64,
    /// True if the last operation failed: the server is away, or the disk is full.
    pub down: bool,
}

/// Store of all durable state: files, batches, responses, keys, ledger, audit log, configs and identities.
#[async_trait]
pub trait Store:
    Files + Batches + Inventory + Responses + Objects + Keys + Ledger + Audit + Configs + People + Secrets + WorkClaims
{
    /// Tries to become the leader: the one process that begins stored work (batches, background responses, sweeps). A
    /// leader stays it until it ends or a server ends its connection, so ask again before each piece of work, and claim
    /// the work ([`WorkClaims`]): a leader that lost its connection may still run what it began.
    async fn lead(&self) -> Result<bool, StoreError>;

    /// Gives the lead up, so that another process can take it before this one has ended.
    async fn resign(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Returns true if another process may be writing to the store: what is not there may be on its way.
    fn is_shared(&self) -> bool;

    /// Counters of the store's own work since it was opened, for the metrics.
    fn stats(&self) -> Stats;
}
