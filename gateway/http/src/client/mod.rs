//! HTTP/1.1 client for upstreams: one per target, with its own pool of idle connections.
//!
//! It differs from a general client: redirects are not followed, nothing is decompressed, every wait has a deadline, an
//! answer with ambiguous framing is refused, an early answer is read while the request is still being sent, and an idle
//! stream costs only its socket. [`head`] and [`body`] define what is accepted; `docs/adr/0009` has the reasons for an
//! own client.
//!
//! Deliberately absent: HTTP/2, proxies, cookies, decompression.

pub mod body;
mod connect;
pub mod error;
pub mod head;
mod pool;
mod send;
pub mod stream;
pub mod target;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use tokio::time::Instant;

pub use body::Body;
pub use connect::database_tls;
pub use error::{ClientError, Fault};
pub use stream::Stream;
pub use target::{Place, Target};

use connect::Connector;
use pool::Idle;

/// HTTP/1.1 client of one target, with its pool of idle connections.
pub struct Client {
    connector: Connector,
    idle: Arc<Idle>,
    /// Hand redirects to the caller.
    redirects: bool,
}

/// Request to be sent to an upstream, complete with its body.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Method of the request line.
    pub method: Method,
    /// Path and query behind the target's base path.
    pub path: String,
    /// Header fields besides Host, Content-Length and Accept-Encoding.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Body in pieces, so that a spliced body is not copied.
    pub body: Vec<Bytes>,
    /// Signal set when the whole request is out, or an answer begins.
    pub sent: Sent,
}

/// Shared flag that a request has reached its upstream: from then on its prompt may be billed.
#[derive(Clone, Debug, Default)]
pub struct Sent(Arc<AtomicBool>);

impl Sent {
    /// Sets the flag: from now on the upstream may bill the prompt.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns true if the request has reached its upstream.
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Time limits of one request to an upstream, stage by stage.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// Time limit to a usable connection: name resolution, TCP and TLS together.
    pub connect: Duration,
    /// Time limit from the usable connection to the head of the answer.
    pub head: Duration,
    /// Longest silence between two pieces of the answer's body.
    pub silence: Duration,
    /// Instant by which the whole answer must be complete; `None`: no limit.
    pub whole: Option<Instant>,
}

/// Answer whose body is still arriving.
#[derive(Debug)]
pub struct Response {
    /// Status: 200 to 599, or 101; a redirect only for a client that hands them over.
    pub status: u16,
    /// Header fields of the answer; names in lower case.
    pub headers: HeaderMap,
    /// Body of the answer, to be polled for its bytes.
    pub body: Body,
    /// After a 101: the connection, and the bytes behind the head.
    pub upgraded: Option<(Stream, Vec<u8>)>,
}

impl Client {
    /// Creates a client; connects to nothing. `ca`: file of certificates to trust instead of the system's.
    ///
    /// # Errors
    /// The certificates cannot be used, or the target's host is no name for TLS.
    pub fn new(target: Target, ca: Option<&Path>) -> Result<Self, String> {
        Ok(Self { connector: Connector::new(target, ca)?, idle: Arc::default(), redirects: false })
    }

    /// Hands redirects (301, 302, 303, 307, 308) to the caller, who decides where they may lead; without this they are refused.
    pub fn with_redirects(self) -> Self {
        Self { redirects: true, ..self }
    }

    /// Target that this client connects to.
    pub fn target(&self) -> &Target {
        self.connector.target()
    }

    /// Sends a request and waits for the head of the answer. If a pooled connection turns out to be closed ([`Fault::Stale`]),
    /// the request is sent once more on a fresh one. Dropping the future closes the connection.
    ///
    /// # Errors
    /// No connection, no answer in time, or an invalid answer.
    pub async fn send(&self, request: &Outgoing, deadlines: &Deadlines) -> Result<Response, ClientError> {
        if !target::is_path(&request.path) {
            return Err(ClientError::garbled("the path has characters that a request line cannot carry"));
        }
        if let Some(stream) = self.idle.take() {
            match send::exchange(self, stream, true, request, deadlines).await {
                Err(error) if error.fault == Fault::Stale => {}
                answered => return answered,
            }
        }
        let stream = self.connector.connect(within(deadlines.connect, deadlines.whole)).await?;
        send::exchange(self, stream, false, request, deadlines).await
    }
}

/// The shorter of a limit and the time left until a deadline.
fn within(limit: Duration, whole: Option<Instant>) -> Duration {
    whole.map_or(limit, |whole| limit.min(whole.saturating_duration_since(Instant::now())))
}
