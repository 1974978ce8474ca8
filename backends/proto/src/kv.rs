//! KV blocks in frames: changes of a worker's prefix cache, and the gateway's wishes to move blocks.

use prost::Message;

/// A change of the prefix cache in one tier, from which the router keeps its radix index of the worker.
#[derive(Clone, PartialEq, Message)]
pub struct KvEvent {
    /// Blocks that can be read from now on, 16 bytes each, a chain in order.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub stored: Vec<Vec<u8>>,
    /// Blocks that are no longer in this tier, 16 bytes each.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub removed: Vec<Vec<u8>>,
    /// True if all blocks of this tier are gone (applied before `stored`).
    #[prost(bool, tag = "3")]
    pub cleared: bool,
    /// Tier of the blocks, a [`Tier`]. A block may be in several tiers at once; each reports for itself.
    #[prost(enumeration = "Tier", tag = "4")]
    pub tier: i32,
    /// Hash of the block before the first of `stored`, 16 bytes; empty when there is none or it is unknown. Only helps
    /// the router to keep one chain together.
    #[prost(bytes = "vec", tag = "5")]
    pub parent: Vec<u8>,
}

/// Tiers that hold blocks, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Tier {
    /// Memory of the device that computes; the default.
    Device = 0,
    /// Memory of the host, for a device with its own.
    Host = 1,
    /// Files on a local disk.
    Disk = 2,
    /// A store that other workers may read too.
    Remote = 3,
}

impl Tier {
    /// Name of the tier: `device`, `host`, `disk`, `remote`.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Disk => "disk",
            Tier::Remote => "remote",
        }
    }
}

/// Fetch of blocks from another worker into the prefix cache; blocks that are here already are skipped.
#[derive(Clone, PartialEq, Message)]
pub struct Pull {
    /// Id chosen by the gateway; repeated in [`Pulled`].
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// [`crate::frames::Ready::transfer`] of the worker that holds the blocks.
    #[prost(string, tag = "2")]
    pub from: String,
    /// A chain of block hashes from the first block on, 16 bytes each.
    #[prost(bytes = "vec", repeated, tag = "3")]
    pub hashes: Vec<Vec<u8>>,
    /// Deadline of the fetch, in seconds from now.
    #[prost(double, tag = "4")]
    pub deadline_seconds: f64,
}

/// Result of a [`Pull`]: blocks readable now, bytes moved, and time taken.
#[derive(Clone, PartialEq, Message)]
pub struct Pulled {
    /// [`Pull::id`] of the fetch that this answers.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Number of leading blocks of the chain that can be read here now.
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
    /// Bytes of KV that were moved for this pull.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// Duration of the pull in seconds, as the worker measured it.
    #[prost(double, tag = "4")]
    pub seconds: f64,
    /// Reason of an early stop; empty if the pull was complete.
    #[prost(string, tag = "5")]
    pub why: String,
}

/// Hint that a request waiting in the gateway will probably come to this worker, which may load the prompt's blocks
/// from lower tiers in advance. There is no answer; a [`crate::frames::Generate`] or [`crate::frames::Cancel`] with the
/// same number ends the hint, and so does time.
#[derive(Clone, PartialEq, Message)]
pub struct Prefetch {
    /// Number of the waiting request, the same as in its later [`crate::frames::Generate::request`].
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Hashes of the prompt's blocks from the first on, 16 bytes each.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub hashes: Vec<Vec<u8>>,
    /// Predicted remaining wait of the request, in seconds.
    #[prost(double, tag = "3")]
    pub wait_seconds: f64,
}
