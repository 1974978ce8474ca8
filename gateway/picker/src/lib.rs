//! Endpoint picker of the Gateway API inference extension: Envoy (or another proxy that speaks its ext_proc) forwards the
//! requests, and asks here which server each of them goes to.
//!
//! The service speaks gRPC over HTTP/2: `envoy.service.ext_proc.v3.ExternalProcessor/Process`, one stream per request,
//! and `grpc.health.v1.Health`. [`conversation`] has the steps of a request, [`chooser`] what it asks of the gateway,
//! whose own requests are routed by the same code ([`penstock_relay::pick`]). Each request that ends, in whatever way, leaves
//! one record for the access log.
//!
//! Deliberately absent: a choice of its own; sockets to servers; keys and limits of clients, which are the proxy's; a
//! request's body in a log.
#![forbid(unsafe_code)]

mod answer;
pub mod chooser;
pub mod conversation;
pub mod framing;
pub mod messages;
mod seldom;
mod server;
#[cfg(test)]
mod tests;
mod trail;

pub use chooser::{Asked, Chooser, Chosen, Outcome, Picked, Refusal};
pub use server::{CONNECTIONS_MAX, Running, Settings, start};

/// Most bytes of a message besides a body: heads and metadata.
pub const MESSAGE_BYTES_MAX: usize = 256 * 1024;
