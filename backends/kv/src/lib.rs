//! KV blocks: state machine, pool, prefix index, eviction, tier plans. Returns plans and is told outcomes; never copies bytes.
//!
//! A *block* is [`penstock_proto::BLOCK_TOKENS`] tokens of KV; a *page* is the place on the device that holds one. The pool
//! knows pages only as numbers. The one idea: a block that nobody uses is not freed but stays readable under its hash until
//! the page is needed, so sharing, resuming and preemption by recompute are all lookups.
//!
//! - [`block`]: the life of one block, one enum and one `match`
//! - [`pool`]: pages, prefix index, references, counters
//! - [`eviction`]: which idle block goes first
//! - [`events`]: what the router's index is told
//! - [`tier`]: which blocks a tier below the device holds, and where
//! - [`load`]: whether a block is better loaded or computed again
//!
//! Deliberately absent: bytes, devices, clocks, threads.
#![forbid(unsafe_code)]

pub mod block;
pub mod events;
pub mod eviction;
pub mod load;
pub mod pool;
pub mod tier;

pub use block::{Block, Effect};
pub use pool::{BlockPool, Counters, Evicted, Lookup};
pub use tier::{Placed, SlotId, TierPool};

/// Number of a page on the device, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

impl PageId {
    /// As an index into a table with one entry per page.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
