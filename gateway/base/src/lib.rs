//! Ground of the gateway's crates: failures and their HTTP shape, the wall clock, secrets, per-thread shards.
//!
//! Deliberately absent: sockets, configuration, anything that waits.
#![forbid(unsafe_code)]

pub mod clock;
pub mod error;
pub mod hash;
pub mod net;
pub mod per_thread;
mod secret;

pub use error::Failure;
pub use secret::Secret;
