//! Life cycle of one client connection: TLS handshake, choice of the protocol, then request after request.
//!
//! [`App`] implements Pingora's `ServerApp`, one step below `HttpServerApp`, because the head has to be read (with a
//! deadline, and checked byte by byte) before Pingora's session sees it.

use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use penstock_proto::ErrorKind;
use penstock_types::Dialect;
use pingora_core::apps::ServerApp;
use pingora_core::listeners::tls::Acceptor;
use pingora_core::protocols::l4::stream::Stream as L4Stream;
use pingora_core::protocols::{ALPN, Stream};
use pingora_core::server::ShutdownWatch;
use tokio::io::AsyncReadExt;
use tokio::time::{Instant, sleep_until};

use super::exchange::{ip, new_request_id};
use super::head::{self, H2_PREFACE, HeadFault, Scan, Scanner};
use super::late::Looked;
use super::places::{Bounds, Place, Places, Refused};
use super::{Exchange, HttpLimits, Renewed, h2, late, raw};
use penstock_base::error::Failure;

/// Bytes of the first read of a head: official SDKs send 600 to 1,200 bytes.
const HEAD_READ_BYTES: usize = 2 * 1024;

/// Grace period of an idle connection in a process that has handed over to its successor.
const LINGER: Duration = Duration::from_secs(5);

/// Service behind the connections: gives the limits and answers the requests.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Limits of the transport in force now; a reload may replace them between two requests.
    fn limits(&self) -> Arc<HttpLimits>;
    /// Answers one request. The response must have ended on return, or the connection is closed.
    async fn serve(&self, exchange: &mut Exchange);
    /// Answers and records a request that broke a rule of HTTP.
    async fn refuse(&self, exchange: &mut Exchange, fault: HeadFault);
    /// Records a connection that was closed for an invalid first head.
    fn refused_head(&self, fault: HeadFault);
    /// Returns true if another process has taken over: idle connections then get a moment to be used or closed by their
    /// clients.
    fn is_leaving(&self) -> bool {
        false
    }
    /// Counts a connection that opens (+1) or closes (-1).
    fn connections(&self, change: i64);
    /// Admission bounds for a connection of `peer`; `None`: from a Unix socket.
    fn bounds(&self, _peer: Option<IpAddr>) -> Bounds {
        Bounds { connections_max: self.limits().connections_max, address_max: 0, address_rate: 0 }
    }
    /// Records a connection that is closed without an answer to a request.
    fn refused_connection(&self, _why: Refused) {}
}

/// Application behind every listener of the server: serves connections with its handler.
pub struct App<H> {
    handler: Arc<H>,
    places: Arc<Places>,
    tls: Option<Arc<Renewed<Acceptor>>>,
}

impl<H: Handler> App<H> {
    /// Creates an application that serves with `handler`.
    pub fn new(handler: Arc<H>) -> Self {
        Self { handler, places: Arc::default(), tls: None }
    }

    /// Adds TLS to the TCP listeners. The handshake runs in the connection's own task, not in the listener's: the
    /// connection has a place by then, and a silent one gives way like any other.
    #[must_use]
    pub fn with_tls(self, tls: Option<Arc<Renewed<Acceptor>>>) -> Self {
        Self { tls, ..self }
    }
}

#[async_trait]
impl<H: Handler> ServerApp for App<H> {
    /// Moves the connection to its own task. Pingora's task holds the state of a TLS handshake (9 kB, with or without
    /// TLS) for as long as it lives; this one ends it at once.
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        let peer = stream.get_socket_digest().and_then(|digest| ip(digest.peer_addr()));
        let tls = self.tls.as_ref().filter(|_| peer.is_some()).map(|tls| tls.now());
        let shutdown = shutdown.clone();
        match self.places.take(peer, self.handler.bounds(peer)) {
            Ok(place) => {
                let mut connection = Connection::new(self.handler.clone(), place);
                tokio::spawn(async move { connection.serve(stream, tls, shutdown).await });
            }
            Err(why) => {
                self.handler.refused_connection(why);
                // A handshake only to send a refusal would cost more than an answer.
                let says_so = why == Refused::Full && tls.is_none();
                if let Some(refusal) = self.places.refusal().filter(|_| says_so) {
                    let write_stall = self.handler.limits().write_stall;
                    tokio::spawn(async move {
                        let _refusal = refusal;
                        let failure = Failure::new(ErrorKind::Overloaded, "Too many connections.");
                        let failure = failure.retry_after(Duration::from_secs(1));
                        raw::refuse(stream, &failure, Dialect::OpenAi, &new_request_id(), write_stall).await;
                    });
                }
            }
        }
        None
    }
}

/// Open client connection; keeps the gauge of connections right by counting down on drop.
struct Connection<H: Handler> {
    handler: Arc<H>,
    place: Place,
}

impl<H: Handler> Connection<H> {
    fn new(handler: Arc<H>, place: Place) -> Self {
        handler.connections(1);
        Self { handler, place }
    }

    async fn serve(&mut self, stream: Stream, tls: Option<Arc<Acceptor>>, shutdown: ShutdownWatch) {
        let (handler, place) = (&self.handler, &mut self.place);
        let stream = match tls {
            Some(acceptor) => Box::pin(secured(handler, &acceptor, stream, place)).await,
            None => Some(stream),
        };
        let Some(stream) = stream else { return };
        if matches!(stream.selected_alpn_proto(), Some(ALPN::H2)) {
            Box::pin(h2::serve(handler.clone(), stream, place, shutdown)).await;
        } else {
            serve_http1(handler, stream, place, shutdown).await;
        }
    }
}

/// Runs the TLS handshake, with the time limit of a head.
async fn secured<H: Handler>(
    handler: &Arc<H>,
    acceptor: &Acceptor,
    stream: Stream,
    place: &mut Place,
) -> Option<Stream> {
    let stream: Box<L4Stream> = stream.into_any().downcast().ok()?;
    let deadline = Instant::now() + handler.limits().head_timeout;
    place.waits(false);
    let handshake = acceptor.tls_handshake(*stream);
    let why = match unless(handshake, place, &mut Looked::default(), deadline, std::future::pending()).await {
        Ok(Ok(stream)) => {
            place.serves();
            return Some(Box::new(stream));
        }
        Ok(Err(error)) => {
            tracing::debug!(%error, "TLS handshake failed");
            Refused::Handshake
        }
        Err(Unless::Told) => Refused::GaveWay,
        Err(Unless::Late | Unless::Draining) => Refused::Handshake,
    };
    handler.refused_connection(why);
    None
}

/// Reason to stop waiting for a client.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unless {
    /// Place needed by another connection: this one must give way.
    Told,
    /// The deadline for the client's bytes has passed.
    Late,
    /// The server shuts down and takes no further requests.
    Draining,
}

/// Waits for `work` on bytes from a client, unless an [`Unless`] comes first. Even then `work` has a last look at the
/// socket: on a loaded machine a deadline can pass, or the place be taken, while received bytes wait for their turn.
pub(super) async fn unless<T>(
    work: impl Future<Output = T>,
    place: &mut Place,
    looked: &mut Looked,
    deadline: Instant,
    draining: impl Future<Output = ()>,
) -> Result<T, Unless> {
    let mut work = pin!(work);
    if looked.is_over(deadline) {
        let why = if place.is_told() { Unless::Told } else { Unless::Late };
        return late::at_once(work).await.ok_or(why);
    }
    let why = tokio::select! {
        biased;
        done = &mut work => return Ok(done),
        () = place.told() => Unless::Told,
        () = sleep_until(deadline) => Unless::Late,
        () = draining => Unless::Draining,
    };
    looked.begin(deadline);
    late::last_look(place.open(), work).await.ok_or(why)
}

impl<H: Handler> Drop for Connection<H> {
    fn drop(&mut self) {
        self.handler.connections(-1);
    }
}

/// Meaning of the first bytes that a connection brings.
enum Opening {
    Request(Box<head::Head>),
    Http2,
    Closed,
    Fault(HeadFault),
}

async fn serve_http1<H: Handler>(handler: &Arc<H>, mut stream: Stream, place: &mut Place, mut shutdown: ShutdownWatch) {
    let mut buf = BytesMut::new();
    let mut first = true;
    loop {
        let limits = handler.limits();
        let opening = read_head(handler, &mut stream, place, &mut buf, &limits, first, &mut shutdown).await;
        let is_told = place.serves();
        match opening {
            Opening::Closed => return,
            Opening::Fault(fault) => {
                handler.refused_head(fault);
                let failure = fault_failure(fault);
                return Box::pin(raw::refuse(stream, &failure, Dialect::OpenAi, &new_request_id(), limits.write_stall))
                    .await;
            }
            Opening::Http2 => {
                if let Some(stream) = rewind(stream, &buf) {
                    Box::pin(h2::serve(handler.clone(), stream, place, shutdown)).await;
                }
                return;
            }
            Opening::Request(head) => {
                let keep_alive = !*shutdown.borrow() && !is_told;
                let exchange = Exchange::http1(*head, stream, buf, &limits, keep_alive);
                // Boxed, so that the memory of a request is released between requests.
                match Box::pin(serve_request(handler, exchange)).await {
                    Some(reusable) => (stream, buf) = reusable,
                    None => return,
                }
            }
        }
        first = false;
    }
}

/// Serves one request; the connection is returned if it can carry another.
async fn serve_request<H: Handler>(handler: &Arc<H>, mut exchange: Exchange) -> Option<(Stream, BytesMut)> {
    handler.serve(&mut exchange).await;
    Box::pin(exchange.finish()).await
}

/// Failure for the client of a head that breaks a rule of HTTP.
pub fn fault_failure(fault: HeadFault) -> Failure {
    let kind = match fault.status {
        408 => ErrorKind::ClientTimeout,
        413 | 414 | 431 => ErrorKind::TooLarge,
        _ => ErrorKind::Malformed,
    };
    Failure::new(kind, format!("Bad HTTP request: {}.", fault.message)).with_status(fault.status)
}

/// Pushes bytes back in front of a plain stream. TLS connections choose HTTP/2 by ALPN and never need this.
fn rewind(stream: Stream, bytes: &[u8]) -> Option<Stream> {
    let mut stream: Box<L4Stream> = stream.into_any().downcast().ok()?;
    stream.rewind(bytes);
    Some(stream)
}

/// Reads until the head is complete. `first`: a new connection, whose silence is bounded by the head timeout instead of
/// the idle timeout.
async fn read_head<H: Handler>(
    handler: &Arc<H>,
    stream: &mut Stream,
    place: &mut Place,
    buf: &mut BytesMut,
    limits: &HttpLimits,
    first: bool,
    shutdown: &mut ShutdownWatch,
) -> Opening {
    const SLOW: HeadFault = HeadFault { status: 408, message: "the request head did not arrive in time" };
    let mut scanner = Scanner::default();
    let mut looked = Looked::default();
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
        place.waits(!silent);
        let ends = async {
            if silent && !first {
                draining(handler, shutdown).await;
            } else {
                std::future::pending().await
            }
        };
        match unless(stream.read_buf(buf), place, &mut looked, deadline, ends).await {
            Err(Unless::Told) => {
                handler.refused_connection(Refused::GaveWay);
                return Opening::Closed;
            }
            Err(Unless::Late) if !silent => return Opening::Fault(SLOW),
            Err(Unless::Late | Unless::Draining) | Ok(Ok(0) | Err(_)) => return Opening::Closed,
            Ok(Ok(_)) if silent && !first => deadline = Instant::now() + limits.head_timeout,
            Ok(Ok(_)) => {}
        }
    }
}

/// Completes when the server shuts down. If another process serves, it waits `LINGER` more: a client that uses its
/// connection at this very moment would find it closed.
async fn draining<H: Handler>(handler: &Arc<H>, shutdown: &mut ShutdownWatch) {
    if shutdown.wait_for(|down| *down).await.is_err() {
        std::future::pending().await
    }
    if handler.is_leaving() {
        tokio::time::sleep(LINGER).await;
    }
}
