//! HTTP as this gateway speaks it: strict in what it reads, bounded in what it waits for.
//!
//! Pingora brings the listeners, TLS and HTTP/2. Requests of HTTP/1 are read here ([`head`], [`chunked`]), because Pingora's reader
//! accepts several spellings that two servers can understand differently and has no deadline over a whole head or body; responses
//! of HTTP/1 are written here (`response`, `wire`), because a session per request cost more than the request. [`exchange`] is one
//! request with its response, the same for both versions; [`connection`] is the life of one connection.

pub mod budget;
pub mod chunked;
pub mod connection;
pub mod exchange;
mod h2;
pub mod head;
pub mod places;
mod raw;
mod response;
mod wire;

pub use budget::{BodyBudget, BodyLease};
pub use exchange::{Body, Exchange, Gone, Tunnel};
pub use head::{Framing, Head};
pub use response::Field;

use std::time::Duration;

/// Bounds of the transport; from the config's `[server]`.
#[derive(Clone, Debug)]
pub struct HttpLimits {
    /// Largest request head.
    pub head_bytes_max: usize,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// All request bodies together.
    pub body_memory_bytes_max: usize,
    /// All that is held of answers together.
    pub answer_memory_bytes_max: usize,
    /// Largest event of a provider's stream of text.
    pub event_bytes_max: usize,
    /// Largest event of a provider's stream that can carry images.
    pub image_event_bytes_max: usize,
    /// Connections at once.
    pub connections_max: usize,
    /// Connections of one address at once; 0: no limit.
    pub address_connections_max: usize,
    /// New connections of one address in a second, over ten seconds; 0: no limit.
    pub address_connections_per_second: u32,
    /// First to last byte of a head, and from connecting to the first byte.
    pub head_timeout: Duration,
    /// Every window of this length must bring `body_rate_bytes_min` times it, or the rest of the body.
    pub body_timeout: Duration,
    /// Slowest body sender that is waited for, bytes per second.
    pub body_rate_bytes_min: u64,
    /// Silence between requests of one connection, and of an HTTP/2 connection without streams.
    pub idle_timeout: Duration,
    /// A write that makes no progress for this long ends the connection.
    pub write_stall: Duration,
    /// HTTP/2: streams at once per connection.
    pub h2_streams_max: u32,
    /// HTTP/2: decoded header list.
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
