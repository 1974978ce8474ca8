//! Prefix caches of engines that are not ours: what vLLM and SGLang publish over ZeroMQ, as events of the index.
//!
//! ```text
//! bytes of a socket ─ zmtp ─▶ messages (topic, sequence, payload) ─ msgpack, events ─▶ ForeignEvent
//!   ─ rehash: from their token ids to our block hash, from their block size to ours ─▶ KvIndex
//! ```
//! Their hashes are never trusted to mean anything: a block is what its token ids say, behind its parent. What cannot be known (a block
//! whose parent was never told) is left out, so the view errs on the side of fewer hits.
//!
//! Everything here is bytes in and values out: no socket, no clock. Every size has a limit.

pub mod events;
mod msgpack;
pub mod order;
pub mod rehash;
pub mod zmtp;

pub use events::{Events, ForeignEvent};
pub use order::{Order, Turn};
pub use rehash::{Holdings, Rehasher};

/// What is wrong with bytes of a foreign engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForeignError {
    /// The bytes end too early.
    #[error("the message ends in the middle of a value")]
    Short,
    /// Another type was expected.
    #[error("a value has another type than it should have (first byte {0:#04x})")]
    Type(u8),
    /// Values are nested too deeply.
    #[error("values are nested too deeply")]
    Deep,
    /// A number does not fit.
    #[error("a number is out of range")]
    Range,
    /// There is no batch of events in it.
    #[error("the message is not a batch of KV events")]
    Shape,
    /// The peer does not speak ZMTP 3 without security.
    #[error("the peer does not speak ZMTP 3 with the NULL mechanism")]
    Greeting,
    /// The peer sent a frame that is not allowed there.
    #[error("the peer broke the protocol")]
    Protocol,
    /// A message is longer than allowed.
    #[error("a message is longer than {0} bytes")]
    Long(usize),
}
