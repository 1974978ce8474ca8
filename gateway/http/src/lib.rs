//! HTTP transport of the gateway: strict in what it reads, bounded in what it waits for.
//!
//! Pingora provides the listeners, TLS and HTTP/2. Requests of HTTP/1 are read here ([`head`], [`chunked`]), because
//! Pingora's reader accepts several spellings that two servers can understand differently, and has no deadline over a
//! whole head or body. Responses of HTTP/1 are written here (`response`, `wire`), because a session per request cost
//! more than the request. [`exchange`] is one request with its response, the same for both versions; [`connection`] is
//! the life cycle of one connection.

#![forbid(unsafe_code)]

mod body;
pub mod budget;
pub mod cancel;
pub mod certificate;
pub mod chunked;
pub mod client;
pub mod connection;
pub mod exchange;
mod h2;
pub mod head;
pub mod late;
pub mod multipart;
pub mod places;
mod raw;
mod renewed;
mod request_id;
mod response;
mod wire;

pub use budget::{BodyBudget, BodyLease, BudgetExhausted, Growth};
pub use exchange::{Body, Exchange, Gone, Tunnel};
pub use head::{Framing, Head};
pub use renewed::Renewed;
pub use response::Field;

use std::time::Duration;

/// Limits of the transport, from `[server]` of the config.
#[derive(Clone, Debug)]
pub struct HttpLimits {
    /// Largest request head in bytes; a larger one is refused.
    pub head_bytes_max: usize,
    /// Largest request body in bytes; a larger one is refused.
    pub body_bytes_max: usize,
    /// Most bytes of all request bodies together.
    pub body_memory_bytes_max: usize,
    /// Most bytes of all answers in memory together.
    pub answer_memory_bytes_max: usize,
    /// Largest event of a provider's text stream, in bytes.
    pub event_bytes_max: usize,
    /// Largest event of a provider's stream that can carry images, in bytes.
    pub image_event_bytes_max: usize,
    /// Most client connections open at once; beyond it, the longest idle one gives way.
    pub connections_max: usize,
    /// Most open connections of one address; 0: no limit.
    pub address_connections_max: usize,
    /// New connections of one address per second, with a burst of ten seconds' worth; 0: no limit.
    pub address_connections_per_second: u32,
    /// Time limit from the first to the last byte of a head, and from connecting to the first byte.
    pub head_timeout: Duration,
    /// Rate window of a body: each must bring `body_rate_bytes_min` times its length, or the rest of the body.
    pub body_timeout: Duration,
    /// Slowest accepted body sender, in bytes per second.
    pub body_rate_bytes_min: u64,
    /// Longest silence between requests of a connection, or of an HTTP/2 connection without streams.
    pub idle_timeout: Duration,
    /// Longest time that a write may make no progress; then the connection is closed.
    pub write_stall: Duration,
    /// HTTP/2: most concurrent streams per connection.
    pub h2_streams_max: u32,
    /// HTTP/2: largest decoded header list in bytes.
    pub h2_header_list_bytes_max: u32,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            head_bytes_max: 32 * 1024,
            body_bytes_max: 32 * 1024 * 1024,
            body_memory_bytes_max: 512 * 1024 * 1024,
            answer_memory_bytes_max: 512 * 1024 * 1024,
            event_bytes_max: 4 * 1024 * 1024,
            image_event_bytes_max: 32 * 1024 * 1024,
            connections_max: 16 * 1024,
            address_connections_max: 2048,
            address_connections_per_second: 200,
            head_timeout: Duration::from_secs(15),
            body_timeout: Duration::from_secs(30),
            body_rate_bytes_min: 1024,
            idle_timeout: Duration::from_secs(75),
            write_stall: Duration::from_secs(20),
            h2_streams_max: 128,
            h2_header_list_bytes_max: 32 * 1024,
        }
    }
}
