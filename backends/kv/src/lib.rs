//! KV blocks: state machine, pool, prefix index, eviction, tier plans. Plans the moves of blocks and is told their
//! outcome; never copies bytes.
//!
//! A *block* is [`penstock_proto::BLOCK_TOKENS`] tokens of KV; a *page* is the place on the device that holds one. The
//! pool knows pages only as numbers. The one idea: an unused block is not freed but stays readable under its hash
//! until its page is needed, so sharing, resuming and preemption by recompute are all lookups.
//!
//! - [`block`]: state machine of one block, one enum and one `match`
//! - [`pool`]: pages, prefix index, references, counters
//! - [`eviction`]: eviction order of idle blocks
//! - [`events`]: changes for the router's index
//! - [`tier`]: blocks and slots of a tier below the device
//! - [`load`]: choice between loading a block and computing it again
//! - [`spared`]: blocks that waiting requests have, which no load evicts
//!
//! Deliberately absent: bytes, devices, clocks, threads.
#![forbid(unsafe_code)]

pub mod block;
pub mod events;
pub mod eviction;
pub mod load;
pub mod pool;
pub mod spared;
pub mod tier;

pub use block::{Block, Effect};
pub use pool::{BlockPool, Counters, Evicted, Lookup};
pub use spared::Spared;
pub use tier::{Placed, SlotId, TierPool};

/// Number of a page on the device, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

impl PageId {
    /// Index into a table with one entry per page.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
