//! Seam to the gateway: what the service asks of it for one request.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, Method};
use penstock_base::error::Failure;
use penstock_http::{Body, BodyLease, HttpLimits};
use penstock_types::Surface;

/// Request for which an endpoint is chosen.
#[derive(Debug)]
pub struct Asked {
    /// Method of the request.
    pub method: Method,
    /// Path and query of the request.
    pub target: String,
    /// Header fields, without pseudo-headers.
    pub headers: HeaderMap,
    /// Whole body; `None`: the request has none, or the proxy does not send it.
    pub body: Option<Body>,
    /// Endpoints that may be chosen; `None`: all.
    pub among: Option<Vec<SocketAddr>>,
    /// Id of the request, for logs.
    pub request_id: String,
}

/// Endpoint chosen for a request.
pub struct Chosen {
    /// Handle on the choice: a request in flight until it is dropped.
    pub pick: Box<dyn Picked>,
    /// Operation that the request asks for; `None`: not known, its answer is not read.
    pub surface: Option<Surface>,
    /// Body for the endpoint in its parts, where it is another than the client's.
    pub body: Option<Vec<Bytes>>,
    /// Lease on the memory of the body, which is kept until the body has been written.
    pub hold: Option<Box<dyn Send + Sync>>,
}

/// Chosen endpoint of one request, told of what becomes of it.
pub trait Picked: Send {
    /// Name of the model's entry, for the metrics.
    fn entry(&self) -> &str;

    /// Reason of the choice, from a bounded set.
    fn reason(&self) -> &'static str;

    /// Endpoints in the order in which the proxy shall ask them: at least one.
    fn endpoints(&self) -> Vec<SocketAddr>;

    /// Notes the endpoint that has answered.
    fn served(&mut self, address: SocketAddr, now: Instant);

    /// Takes in the first part of a good answer.
    fn answered(&mut self, now: Instant);

    /// Takes in an answer with another status than 2xx.
    fn refused(&mut self, status: u16, retry_after: Option<Duration>, now: Instant);

    /// Takes in the end of a complete answer, with the cached tokens that it reports.
    fn ended(&mut self, cached_tokens: Option<u64>);
}

impl Picked for penstock_relay::Pick {
    fn entry(&self) -> &str {
        penstock_relay::Pick::entry(self)
    }

    fn reason(&self) -> &'static str {
        penstock_relay::Pick::reason(self)
    }

    fn endpoints(&self) -> Vec<SocketAddr> {
        penstock_relay::Pick::endpoints(self)
    }

    fn served(&mut self, address: SocketAddr, now: Instant) {
        penstock_relay::Pick::served(self, address, now);
    }

    fn answered(&mut self, now: Instant) {
        penstock_relay::Pick::answered(self, now);
    }

    fn refused(&mut self, status: u16, retry_after: Option<Duration>, now: Instant) {
        penstock_relay::Pick::refused(self, status, retry_after, now);
    }

    fn ended(&mut self, cached_tokens: Option<u64>) {
        penstock_relay::Pick::ended(self, cached_tokens);
    }
}

/// Result of a request to the service, for the metrics.
#[derive(Clone, Copy, Debug)]
pub struct Outcome<'a> {
    /// Name of the model's entry; empty where none was found.
    pub model: &'a str,
    /// `picked`, or `refused`.
    pub outcome: &'static str,
    /// Reason of the choice, or of the refusal, from a bounded set.
    pub reason: &'static str,
    /// Time from the last byte of the request to the reply.
    pub took: Duration,
}

/// Chooser of endpoints: the gateway, or a double in tests.
#[async_trait]
pub trait Chooser: Send + Sync + 'static {
    /// Limits on bodies and waits, as for the gateway's own clients.
    fn limits(&self) -> Arc<HttpLimits>;

    /// Empty lease on the memory for bodies.
    fn lease(&self) -> BodyLease;

    /// Empty lease on the memory for answers.
    fn answer_lease(&self) -> BodyLease;

    /// Returns true if endpoints are known, so that requests can be served.
    fn is_ready(&self) -> bool;

    /// Chooses an endpoint for the request.
    async fn choose(&self, asked: Asked) -> Result<Chosen, Failure>;

    /// Counts a request to the service.
    fn count(&self, outcome: Outcome<'_>);
}
