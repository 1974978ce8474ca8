//! Role of a worker in frames: the kind of work that it prefers.

use prost::Message;

/// Kind of work that a worker prefers. The role is a weight in the router's choice: any worker can do all work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Role {
    /// Prefill and decode alike: the default of a worker that names no role.
    Mixed = 0,
    /// Mainly prefill, whose KV blocks other workers fetch.
    Prefill = 1,
    /// Mainly decode, with KV from prefill workers, and prefills too short to be worth a transfer.
    Decode = 2,
}

/// Change of the worker's role. Affects requests bound from then on; running requests continue.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct SetRole {
    /// New [`Role`] of the worker, as its number.
    #[prost(enumeration = "Role", tag = "1")]
    pub role: i32,
}
