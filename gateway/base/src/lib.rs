//! Ground of the gateway's crates: failures and their HTTP shape, the wall clock, secrets, per-thread shards, percent-encoding,
//! notice of freed memory, panics of background work, who asks.
//!
//! Deliberately absent: sockets, configuration, anything that makes a request wait.
#![forbid(unsafe_code)]

pub mod asker;
pub mod clock;
pub mod error;
pub mod freed;
pub mod hash;
pub mod net;
pub mod panics;
pub mod per_thread;
mod percent;
mod secret;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::Failure;
pub use percent::percent_encoded;
pub use secret::Secret;
