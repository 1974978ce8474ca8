//! Prefix caches of foreign engines: the KV events that vLLM and SGLang publish over ZeroMQ, translated for the index.
//!
//! ```text
//! bytes of a socket ─ zmtp ─▶ messages (topic, sequence, payload) ─ msgpack, events ─▶ ForeignEvent
//!   ─ rehash: from their token ids to our block hash, from their block size to ours ─▶ KvIndex
//! ```
//! Foreign hashes are opaque names: a block is identified by its token ids and its parent. Unknowable blocks (whose
//! parent was never reported) are left out, so the view errs on the side of fewer hits.
//!
//! Everything here maps bytes to values: no socket, no clock. Every size has a limit.

pub mod events;
mod msgpack;
pub mod order;
pub mod rehash;
pub mod zmtp;

pub use events::{Events, ForeignEvent};
pub use order::{Order, Turn};
pub use rehash::{Holdings, Rehasher};

/// Error in the bytes of a foreign engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForeignError {
    /// The bytes end in the middle of a value.
    #[error("the message ends in the middle of a value")]
    Short,
    /// A value has another type than its field; the field of this error is its first byte.
    #[error("a value has another type than it should have (first byte {0:#04x})")]
    Type(u8),
    /// Values are nested more deeply than the parser follows them.
    #[error("values are nested too deeply")]
    Deep,
    /// A number does not fit into the type of its field.
    #[error("a number is out of range")]
    Range,
    /// The payload is no batch of events.
    #[error("the message is not a batch of KV events")]
    Shape,
    /// The peer does not speak ZMTP 3 without security.
    #[error("the peer does not speak ZMTP 3 with the NULL mechanism")]
    Greeting,
    /// The peer sent a frame that is not allowed at this point.
    #[error("the peer broke the protocol")]
    Protocol,
    /// A message exceeds this bound, in bytes.
    #[error("a message is longer than {0} bytes")]
    Long(usize),
}
