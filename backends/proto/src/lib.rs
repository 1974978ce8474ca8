//! The contract between the gateway and its workers.
//!
//! One session per gateway–worker pair carries length-delimited frames ([`codec`]) of prost-derived messages
//! ([`frames`]). Down come the gateway's commands. Up goes one [`frames::Step`] per engine step, so tokens, engine
//! state and KV events have one order. Everything here is plain data: no sockets, no clock, no threads.
//!
//! Deliberately absent: text (workers see tokens only), anything that executes, anything optional about authentication.
#![forbid(unsafe_code)]

pub mod adapter;
pub mod address;
pub mod bucket;
pub mod capability;
pub mod codec;
mod engine_state;
pub mod error;
pub mod frames;
mod gpu;
mod guide;
pub mod handshake;
pub mod hash;
pub mod ids;
mod kv;
mod notice;
pub mod parts;
mod request;
mod role;
mod step;
pub mod transfer;

pub use adapter::AdapterId;
pub use address::Address;
pub use bucket::{Bucket, BucketError};
pub use capability::{Capabilities, Capability};
pub use error::{ErrorKind, Fault, Retry};
pub use hash::{BlockHash, BlockHasher};
pub use ids::{Epoch, GatewayId, PullId, RequestId, SessionId, WorkId};

/// Tokens in one KV block; the unit of hashing, sharing, eviction and transfer.
pub const BLOCK_TOKENS: usize = 32;

/// Most adapters of one worker.
pub const ADAPTERS_MAX: usize = 64;

/// Version of the session protocol; a hello with another number is refused, and the message names both numbers.
pub const PROTOCOL_VERSION: u32 = 1;
