//! An HTTP/1.1 client for upstreams: one per target, with its own idle connections.
//!
//! Why not a general one: redirects are not followed, nothing is decompressed, every wait has a deadline, an answer that two readers
//! could frame differently is refused, an early answer is read while the request is still being sent, and an idle stream costs its
//! socket. [`head`] and [`body`] say what is accepted; `docs/adr/0009` why it is our own.
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
#[cfg(feature = "postgres")]
pub(crate) use connect::database_tls;
pub use error::{ClientError, Fault};
pub use stream::Stream;
pub use target::{Place, Target};

use connect::Connector;
use pool::Idle;

/// A client of one target.
pub struct Client {
    connector: Connector,
    idle: Arc<Idle>,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Method.
    pub method: Method,
    /// Path and query behind the target's base.
    pub path: String,
    /// Fields besides Host, Content-Length and Accept-Encoding.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The body in pieces, so that a spliced one is not copied.
    pub body: Vec<Bytes>,
    /// Told when all of it is out, or something answers.
    pub sent: Sent,
}

/// Whether a request has gone out to whoever computes it: from then on its prompt may be billed.
#[derive(Clone, Debug, Default)]
pub struct Sent(Arc<AtomicBool>);

impl Sent {
    /// It has.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it has.
    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// How long each part may take.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// To a connection that can be written to.
    pub connect: Duration,
    /// From there to the head of the answer.
    pub head: Duration,
    /// Between two pieces of its body.
    pub silence: Duration,
    /// When all of it must be there.
    pub whole: Option<Instant>,
}

/// An answer; its body is still coming.
#[derive(Debug)]
pub struct Response {
    /// 200 to 599 without redirects, or 101.
    pub status: u16,
    /// Its fields.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Body,
    /// After a 101: the connection, and what came behind the head.
    pub upgraded: Option<(Stream, Vec<u8>)>,
}

impl Client {
    /// `ca`: file of certificates to trust instead of the system's.
    ///
    /// # Errors
    /// What is wrong with the certificates or the target's name.
    pub fn new(target: Target, ca: Option<&Path>) -> Result<Self, String> {
        Ok(Self { connector: Connector::new(target, ca)?, idle: Arc::default() })
    }

    /// Where it connects.
    pub fn target(&self) -> &Target {
        self.connector.target()
    }

    /// Sends a request and waits for the head of its answer. A used connection that turns out to be dead before it answered a byte is
    /// replaced by a fresh one, once. Dropping the future ends the connection.
    ///
    /// # Errors
    /// Nothing answered, not in time, or something that is no answer.
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

/// The shorter of a limit and what is left until a deadline.
fn within(limit: Duration, whole: Option<Instant>) -> Duration {
    whole.map_or(limit, |whole| limit.min(whole.saturating_duration_since(Instant::now())))
}
