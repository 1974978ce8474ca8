//! Seam to the gateway: what the service asks of it for one request.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, Method};
use penstock_base::error::Failure;
use penstock_http::{Body, BodyLease, HttpLimits};
use penstock_telemetry::{Attempt, Record};
use penstock_types::Surface;
use penstock_upstream::Facts;

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
    /// Address of the client, as far as the proxy tells it.
    pub client: Option<IpAddr>,
}

/// Endpoint chosen for a request.
pub struct Chosen {
    /// Handle on the choice: a request in flight until it is dropped.
    pub pick: Box<dyn Picked>,
    /// Operation that the request asks for; `None`: not known, its answer is not read.
    pub surface: Option<Surface>,
    /// True if the client wants a streamed answer; `None`: not known.
    pub stream: Option<bool>,
    /// Body for the endpoint in its parts, where it is another than the client's.
    pub body: Option<Vec<Bytes>>,
    /// Lease on the memory of the body, which is kept until the body has been written.
    pub hold: Option<Box<dyn Send + Sync>>,
}

/// Refusal of a request for which no endpoint was chosen, with what is known of the request.
#[derive(Debug)]
pub struct Refusal {
    /// Failure that the client is told of.
    pub failure: Failure,
    /// Name of the model's entry; `None`: none was found.
    pub model: Option<Box<str>>,
    /// True if the client wants a streamed answer; `None`: not known.
    pub stream: Option<bool>,
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        Self { failure, model: None, stream: None }
    }
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

    /// Id of the target that is asked; after [`Picked::served`], of the one that has answered.
    fn target(&self) -> Arc<str>;

    /// Cost in dollars of an answer with these token counts; `None`: its price is not known.
    fn cost(&self, facts: Facts) -> Option<f64>;

    /// Takes out the targets that were asked, in the order of their outcome. A target without an outcome so far was
    /// abandoned. No other method is called afterwards.
    fn attempts(&mut self, now: Instant) -> Vec<Attempt>;
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

    fn target(&self) -> Arc<str> {
        penstock_relay::Pick::target(self)
    }

    fn cost(&self, facts: Facts) -> Option<f64> {
        penstock_relay::Pick::cost(self, facts)
    }

    fn attempts(&mut self, now: Instant) -> Vec<Attempt> {
        penstock_relay::Pick::attempts(self, now)
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

    /// Empty lease on the memory for bodies, of the share of a client's address; `None`: of nobody's share.
    fn lease(&self, client: Option<IpAddr>) -> BodyLease;

    /// Empty lease on the memory for answers.
    fn answer_lease(&self) -> BodyLease;

    /// Returns true if endpoints are known, so that requests can be served.
    fn is_ready(&self) -> bool;

    /// Chooses an endpoint for the request.
    ///
    /// # Errors
    /// The refusal that the client is told of.
    async fn choose(&self, asked: Asked) -> Result<Chosen, Refusal>;

    /// Counts a request to the service that has been replied to.
    fn count(&self, outcome: Outcome<'_>);

    /// Takes in the record of a request that has ended, once for each. Called from a `Drop`: neither waits nor panics.
    fn ended(&self, record: &Record<'_>);

    /// Counts a panic in the handling of a request.
    fn panicked(&self);
}
