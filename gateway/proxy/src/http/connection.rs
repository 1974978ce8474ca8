//! The life of one connection: which protocol, then request after request.
//!
//! This implements Pingora's `ServerApp`, one step below `HttpServerApp`, because the head has to be read (with a deadline, byte by
//! byte checked) before Pingora's session sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use penstock_dialects::Dialect;
use penstock_proto::ErrorKind;
use pingora_core::apps::ServerApp;
use pingora_core::protocols::l4::stream::Stream as L4Stream;
use pingora_core::protocols::{ALPN, Stream};
use pingora_core::server::ShutdownWatch;
use tokio::io::AsyncReadExt;
use tokio::time::{Instant, timeout_at};

use super::exchange::new_request_id;
use super::head::{self, H2_PREFACE, HeadFault, Scan, Scanner};
use super::{Exchange, HttpLimits, h2, raw};
use crate::error::Failure;

/// First read of a head: official SDKs send 600 to 1,200 bytes.
const HEAD_READ_BYTES: usize = 2 * 1024;

/// An idle connection of a process that has handed over stays this long.
const LINGER: Duration = Duration::from_secs(5);

/// What answers requests.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// The bounds in force.
    fn limits(&self) -> Arc<HttpLimits>;
    /// Answers one request. The response must have ended, or the connection is closed.
    async fn serve(&self, exchange: &mut Exchange);
    /// Answers and records a request that broke a rule of HTTP.
    async fn refuse(&self, exchange: &mut Exchange, fault: HeadFault);
    /// Records a connection that never had a valid head.
    fn refused_head(&self, fault: HeadFault);
    /// Whether another process serves: idle connections are then given a moment to be used or closed by their clients.
    fn is_leaving(&self) -> bool {
        false
    }
    /// A connection came (+1) or went (-1).
    fn connections(&self, change: i64);
}

/// The application behind every listener.
pub struct App<H> {
    handler: Arc<H>,
    open: Arc<AtomicUsize>,
}

impl<H: Handler> App<H> {
    /// Serves with `handler`.
    pub fn new(handler: Arc<H>) -> Self {
        Self { handler, open: Arc::default() }
    }
}

/// A place among the connections that are served at once; how many there are is the config's to say at any moment.
struct Slot(Arc<AtomicUsize>);

impl Slot {
    fn take(open: &Arc<AtomicUsize>, connections_max: usize) -> Option<Self> {
        let slot = Self(open.clone());
        (open.fetch_add(1, Ordering::Relaxed) < connections_max).then_some(slot)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[async_trait]
impl<H: Handler> ServerApp for App<H> {
    /// Moves the connection to a task of its own. Pingora's task holds the state of a TLS handshake for as long as it lives (9 kB,
    /// with or without TLS); it ends here.
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        let slot = Slot::take(&self.open, self.handler.limits().connections_max);
        let connection = Connection::new(self.handler.clone(), slot.is_some());
        let shutdown = shutdown.clone();
        tokio::spawn(async move {
            let _slot = slot;
            connection.serve(stream, shutdown).await;
        });
        None
    }
}

/// One connection, counted while it lives.
struct Connection<H: Handler> {
    handler: Arc<H>,
    admitted: bool,
}

impl<H: Handler> Connection<H> {
    fn new(handler: Arc<H>, admitted: bool) -> Self {
        handler.connections(1);
        Self { handler, admitted }
    }

    async fn serve(&self, stream: Stream, shutdown: ShutdownWatch) {
        if !self.admitted {
            let failure =
                Failure::new(ErrorKind::Overloaded, "Too many connections.").retry_after(Duration::from_secs(1));
            let write_stall = self.handler.limits().write_stall;
            Box::pin(raw::refuse(stream, &failure, Dialect::OpenAi, &new_request_id(), write_stall)).await;
        } else if matches!(stream.selected_alpn_proto(), Some(ALPN::H2)) {
            Box::pin(h2::serve(self.handler.clone(), stream, shutdown)).await;
        } else {
            serve_http1(&self.handler, stream, shutdown).await;
        }
    }
}

impl<H: Handler> Drop for Connection<H> {
    fn drop(&mut self) {
        self.handler.connections(-1);
    }
}

/// What the first bytes turned out to be.
enum Opening {
    Request(Box<head::Head>),
    Http2,
    Closed,
    Fault(HeadFault),
}

async fn serve_http1<H: Handler>(handler: &Arc<H>, mut stream: Stream, mut shutdown: ShutdownWatch) {
    let mut buf = BytesMut::new();
    let mut first = true;
    loop {
        let limits = handler.limits();
        match read_head(handler, &mut stream, &mut buf, &limits, first, &mut shutdown).await {
            Opening::Closed => return,
            Opening::Fault(fault) => {
                handler.refused_head(fault);
                let failure = fault_failure(fault);
                return Box::pin(raw::refuse(stream, &failure, Dialect::OpenAi, &new_request_id(), limits.write_stall))
                    .await;
            }
            Opening::Http2 => {
                if let Some(stream) = rewind(stream, &buf) {
                    Box::pin(h2::serve(handler.clone(), stream, shutdown)).await;
                }
                return;
            }
            Opening::Request(head) => {
                let keep_alive = !*shutdown.borrow();
                let exchange = Exchange::http1(*head, stream, buf, &limits, keep_alive);
                // Boxed: what a request needs is given back between requests.
                match Box::pin(serve_request(handler, exchange)).await {
                    Some(reusable) => (stream, buf) = reusable,
                    None => return,
                }
            }
        }
        first = false;
    }
}

/// One request; the connection comes back if it can carry another.
async fn serve_request<H: Handler>(handler: &Arc<H>, mut exchange: Exchange) -> Option<(Stream, BytesMut)> {
    handler.serve(&mut exchange).await;
    Box::pin(exchange.finish()).await
}

/// A rule of HTTP that a head breaks, as a failure.
pub(crate) fn fault_failure(fault: HeadFault) -> Failure {
    let kind = match fault.status {
        408 => ErrorKind::ClientTimeout,
        413 | 414 | 431 => ErrorKind::TooLarge,
        _ => ErrorKind::Malformed,
    };
    Failure::new(kind, format!("Bad HTTP request: {}.", fault.message)).with_status(fault.status)
}

/// Puts bytes back in front of a plain stream (TLS connections choose HTTP/2 by ALPN and never come here).
fn rewind(stream: Stream, bytes: &[u8]) -> Option<Stream> {
    let mut stream: Box<L4Stream> = stream.into_any().downcast().ok()?;
    stream.rewind(bytes);
    Some(stream)
}

/// Reads until the head is complete. `first`: a new connection, whose silence is bounded by the head's own deadline.
async fn read_head<H: Handler>(
    handler: &Arc<H>,
    stream: &mut Stream,
    buf: &mut BytesMut,
    limits: &HttpLimits,
    first: bool,
    shutdown: &mut ShutdownWatch,
) -> Opening {
    const SLOW: HeadFault = HeadFault { status: 408, message: "the request head did not arrive in time" };
    let mut scanner = Scanner::default();
    let idle = !first && buf.is_empty();
    let mut deadline = Instant::now() + if idle { limits.idle_timeout } else { limits.head_timeout };
    loop {
        // One empty line before the request line is allowed (RFC 9112, 2.2).
        if buf.starts_with(b"\r\n") {
            let _ = buf.split_to(2);
            scanner = Scanner::default();
        }
        if first && !buf.is_empty() && H2_PREFACE.starts_with(&buf[..buf.len().min(H2_PREFACE.len())]) {
            if buf.len() >= H2_PREFACE.len() {
                let plain = stream.get_ssl_digest().is_none();
                return if plain { Opening::Http2 } else { Opening::Closed };
            }
        } else {
            match scanner.scan(buf, limits.head_bytes_max) {
                Ok(Scan::Complete(length)) => {
                    let head = buf.split_to(length);
                    return head::parse(&head).map_or_else(Opening::Fault, |head| Opening::Request(Box::new(head)));
                }
                Ok(Scan::Partial) => {}
                Err(fault) => return Opening::Fault(fault),
            }
        }
        let silent = buf.is_empty();
        buf.reserve(HEAD_READ_BYTES);
        let read = tokio::select! {
            read = timeout_at(deadline, stream.read_buf(buf)) => read,
            () = draining(handler, shutdown), if silent && !first => return Opening::Closed,
        };
        match read {
            Err(_) if silent => return Opening::Closed,
            Err(_) => return Opening::Fault(SLOW),
            Ok(Ok(0) | Err(_)) => return Opening::Closed,
            Ok(Ok(_)) if silent && !first => deadline = Instant::now() + limits.head_timeout,
            Ok(Ok(_)) => {}
        }
    }
}

/// Ends when the server is shutting down. When another process serves there is no hurry: a client that uses its connection at this very
/// moment would find it closed.
async fn draining<H: Handler>(handler: &Arc<H>, shutdown: &mut ShutdownWatch) {
    if shutdown.wait_for(|down| *down).await.is_err() {
        std::future::pending().await
    }
    if handler.is_leaving() {
        tokio::time::sleep(LINGER).await;
    }
}
