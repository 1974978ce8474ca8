//! Exchange: one request and its response, with the same interface for HTTP/1 and HTTP/2.
//!
//! The request side reads the whole body (`body.rs`: deadline, minimum rate, size, memory budget) before anything is dispatched.
//! The response side is our own writer for HTTP/1 (`response.rs`), which shares the connection with the reader, and
//! Pingora's session for HTTP/2.

use std::net::IpAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderName, Method, StatusCode, header};
use penstock_types::Dialect;
use pingora_core::protocols::Stream;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::l4::socket::SocketAddr;
use pingora_http::ResponseHeader;
use tokio::time::{Instant, timeout};

use super::body::{BodyLimits, Intake, proceed};
use super::response::{self, Field, Frame, Parts, Response, decimal};
use super::wire::Wire;
use super::{BodyBudget, Framing, Head, HttpLimits, h2};
use crate::cancel::{Cancelled, Ender};
use crate::certificate::Certificate;
use penstock_base::asker::Asker;
use penstock_base::error::Failure;

pub use super::body::{Body, BodyFault};
pub use super::request_id::{new_request_id, request_id};

/// Write stall limit of a cancelled request: its last message to the client must be out by then.
const CANCELLED_STALL: Duration = Duration::from_millis(50);
/// Largest announced body that is read and discarded before a request of HTTP/2 is refused.
const READ_OVER_BYTES_MAX: u64 = 64 * 1024;
/// Time limit for reading and discarding such a body.
const READ_OVER: Duration = Duration::from_secs(1);
/// Bytes of one write, for which the stall limit applies.
const WRITE_BYTES: usize = 64 * 1024;

/// Outcome, not an error: the client left, or the connection failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

/// Progress of the response: how much of it has gone out to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// Nothing: an error can still choose its status.
    Nothing,
    /// The head has gone out, and perhaps part of the body.
    Begun,
    /// The response has gone out completely.
    Ended,
    /// Cut short on purpose: the client sees broken framing.
    Aborted,
}

/// Transport that carries the exchange.
enum Side {
    /// HTTP/1.x connection, read and written by this crate.
    Http1(Wire),
    /// HTTP/2 stream within a session of Pingora's.
    Http2(Box<ServerSession>),
    /// No transport any more: closed, or handed out.
    Closed,
}

/// Client connection that was switched to another protocol (101), such as WebSocket.
#[derive(Debug)]
pub struct Tunnel {
    /// Connection to the client. Flush after writing.
    pub stream: Stream,
    /// Bytes that the client has already sent: they come before anything read from `stream`.
    pub early: Bytes,
}

/// One request of a client and its response; the response is written through it.
pub struct Exchange {
    /// Validated head; its header fields are dropped once the body has been read.
    pub head: Head,
    /// Time at which the request's head was complete; durations count from it.
    pub started: Instant,
    /// Protocol of the connection for the log: `h1` or `h2`.
    pub protocol: &'static str,
    /// Request id for the response and the log.
    pub request_id: String,
    /// Dialect in which error bodies of this exchange are rendered.
    pub dialect: Dialect,
    side: Side,
    body_read: bool,
    also: Vec<Field>,
    keep_alive: bool,
    sent: Sent,
    status: u16,
    peer: Option<IpAddr>,
    client: Option<IpAddr>,
    asker: Asker,
    write_stall: Duration,
    body_limits: BodyLimits,
    cancel: Cancelled,
    ended_by: Option<Ender>,
}

impl Exchange {
    pub(super) fn http1(head: Head, stream: Stream, buf: BytesMut, limits: &HttpLimits, keep_alive: bool) -> Self {
        let peer = stream.get_socket_digest().and_then(|digest| ip(digest.peer_addr()));
        let wire = Wire { stream, buf, stall: limits.write_stall, response: None };
        Self { peer, ..Self::new(head, Side::Http1(wire), "h1", limits, keep_alive) }
    }

    pub(super) fn http2(head: Head, session: ServerSession, limits: &HttpLimits) -> Self {
        let peer = ip(session.client_addr());
        Self { peer, ..Self::new(head, Side::Http2(Box::new(session)), "h2", limits, true) }
    }

    fn new(head: Head, side: Side, protocol: &'static str, limits: &HttpLimits, keep_alive: bool) -> Self {
        let peer = None;
        Self {
            request_id: request_id(head.headers.get("x-request-id").and_then(|id| id.to_str().ok())),
            body_read: head.framing == Framing::None,
            keep_alive: keep_alive && head.keep_alive,
            also: Vec::new(),
            head,
            started: Instant::now(),
            protocol,
            dialect: Dialect::OpenAi,
            side,
            sent: Sent::Nothing,
            status: 0,
            peer,
            cancel: Cancelled::default(),
            ended_by: None,
            client: None,
            asker: Asker::default(),
            write_stall: limits.write_stall,
            body_limits: BodyLimits::from(limits),
        }
    }

    /// Progress of the response: nothing sent, begun, ended or aborted.
    pub fn sent(&self) -> Sent {
        self.sent
    }

    /// HTTP status that was sent to the client; 0 before.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Address of the connection's peer; `None`: a Unix socket.
    pub fn peer(&self) -> Option<IpAddr> {
        self.peer
    }

    /// Address of the client: the peer, or the address that a trusted proxy forwarded.
    pub fn client(&self) -> Option<IpAddr> {
        self.client.or(self.peer)
    }

    /// Names of the client's certificate, if it was verified.
    pub fn certificate(&self) -> Option<Certificate> {
        let digest = match &self.side {
            Side::Http1(wire) => wire.stream.get_ssl_digest()?,
            Side::Http2(session) => session.digest()?.ssl_digest.clone()?,
            Side::Closed => return None,
        };
        digest.extension.get::<Certificate>().cloned()
    }

    /// Sets the address of the client, as trusted proxies give it, and the tenant of its key (empty: none).
    pub fn set_client(&mut self, address: Option<IpAddr>, tenant: &str) {
        self.client = address;
        self.asker = Asker::new(tenant, self.client());
    }

    /// Identity of the client for whatever is shared out; nobody until [`Self::set_client`].
    pub fn asker(&self) -> Asker {
        self.asker
    }

    /// Adds fields to the response, whatever its status will be.
    pub fn says_also(&mut self, fields: Vec<Field>) {
        self.also = fields;
    }

    /// Reads the whole body within the limits of size, time and memory.
    pub async fn read_body(&mut self, budget: &BodyBudget) -> Result<Body, BodyFault> {
        let mut intake = Intake::new(self.body_limits, budget.lease_of(self.asker), self.started);
        if let Framing::Length(length) = self.head.framing
            && length > self.body_limits.bytes_max as u64
        {
            return Err(intake.too_large());
        }
        match &mut self.side {
            Side::Http1(Wire { stream, buf, .. }) => {
                if self.head.expect_continue && buf.is_empty() {
                    timeout(self.write_stall, proceed(stream)).await.ok().flatten().ok_or(BodyFault::Gone)?;
                }
                match self.head.framing {
                    Framing::None => {}
                    Framing::Length(length) => intake.read_length(stream, buf, length as usize).await?,
                    Framing::Chunked => intake.read_chunked(stream, buf).await?,
                }
                if buf.is_empty() {
                    // An empty rest would keep the head's whole buffer alive, and a stream may live for an hour.
                    *buf = BytesMut::new();
                }
            }
            Side::Http2(session) => intake.read_frames(session).await?,
            Side::Closed => return Err(BodyFault::Gone),
        }
        self.body_read = true;
        // Header fields are not used after the body, and a stream may live for an hour.
        self.head.headers = http::HeaderMap::new();
        Ok(intake.whole())
    }

    /// Sends a complete response in one write.
    pub async fn respond(&mut self, status: u16, headers: &[Field], body: Bytes) -> Result<(), Gone> {
        self.begin(status, headers, Some(body.len() as u64)).await?;
        self.write(body, true).await
    }

    /// Sends a failure: as a response while nothing is out, as broken framing afterwards. If body bytes are unread, the
    /// connection is closed.
    pub async fn refuse(&mut self, failure: &Failure) -> Result<(), Gone> {
        if self.sent != Sent::Nothing {
            return self.abort().await;
        }
        self.read_over().await;
        let body = failure.body(self.dialect, &self.request_id);
        self.respond(failure.status(), &response::failure_fields(failure), body).await
    }

    /// Reads and discards the rest of a small HTTP/2 body. The reset after an early answer means that nothing went
    /// wrong (RFC 9113, 8.1), but curl before 8 sometimes takes it for a failed transfer.
    async fn read_over(&mut self) {
        let Side::Http2(session) = &mut self.side else { return };
        let is_small = matches!(self.head.framing, Framing::Length(length) if length <= READ_OVER_BYTES_MAX);
        if self.body_read || !is_small {
            return;
        }
        let rest = async {
            let (mut frames, mut received) = (h2::FrameCount::default(), 0);
            while let Ok(Some(data)) = session.read_request_body().await {
                received += data.len();
                if frames.count(received).is_err() {
                    return;
                }
            }
        };
        // On a timeout the reset is sent after all.
        let _ = timeout(READ_OVER, rest).await;
    }

    /// Begins a streamed response of status 200 and unknown length.
    pub async fn begin_stream(&mut self, headers: &[Field]) -> Result<(), Gone> {
        self.begin(200, headers, None).await
    }

    /// Begins a response of `length` bytes, if known. HTTP/1: the head is sent together with the first [`Self::write`],
    /// which may be empty. Fields that frame the message are written by this module and dropped from `headers`.
    pub async fn begin(&mut self, status: u16, headers: &[Field], length: Option<u64>) -> Result<(), Gone> {
        if self.sent != Sent::Nothing {
            return Err(Gone);
        }
        let both;
        let headers = if self.also.is_empty() {
            headers
        } else {
            both = [headers, &self.also].concat();
            &both
        };
        let mut digits = [0; 20];
        let millis = decimal(self.started.elapsed().as_millis() as u64, &mut digits);
        let id = self.request_id.as_bytes();
        // Each API's SDKs read these under different names.
        let own: [(&str, &[u8]); 2] = match self.dialect {
            Dialect::Anthropic => [("x-request-id", id), ("request-id", id)],
            Dialect::OpenAi | Dialect::Gemini | Dialect::Ollama => {
                [("x-request-id", id), ("openai-processing-ms", millis)]
            }
        };
        match &mut self.side {
            Side::Http1(wire) => {
                // Unread body bytes would be taken for the next request.
                self.keep_alive &= self.body_read && !self.head.upgrade;
                let (method, http10, keep_alive) = (&self.head.method, self.head.http10, self.keep_alive);
                let response = Response::new(status, &Frame { method, http10, keep_alive, length }, &own, headers);
                self.keep_alive &= response.is_delimited();
                wire.response = Some(response);
            }
            Side::Http2(session) => {
                let response = h2_head(status, &own, headers, length).map_err(|_| Gone)?;
                if !matches!(timeout(self.write_stall, session.write_response_header(response)).await, Ok(Ok(()))) {
                    return self.fail();
                }
            }
            Side::Closed => return Err(Gone),
        }
        (self.sent, self.status) = (Sent::Begun, status);
        Ok(())
    }

    /// Sends a piece of the body; `last` ends it. A client that does not take `WRITE_BYTES` within the stall limit is
    /// cut off.
    pub async fn write(&mut self, mut data: Bytes, last: bool) -> Result<(), Gone> {
        while data.len() > WRITE_BYTES {
            let piece = data.split_to(WRITE_BYTES);
            self.write_piece(piece, false).await?;
        }
        self.write_piece(data, last).await
    }

    async fn write_piece(&mut self, data: Bytes, last: bool) -> Result<(), Gone> {
        let stall = self.write_stall;
        let has_body = self.head.method != Method::HEAD;
        let write = async {
            match &mut self.side {
                Side::Http1(wire) => wire.send(data, last).await,
                Side::Http2(session) => {
                    // The framing of HTTP/1 leaves out the body of an answer to HEAD by itself. An empty piece that is not
                    // the last is not written.
                    let data = if has_body { data } else { Bytes::new() };
                    let write = timeout(stall, session.write_response_body(data, last)).await;
                    if matches!(write, Ok(Ok(()))) { Ok(()) } else { Err(Gone) }
                }
                Side::Closed => Err(Gone),
            }
        };
        let written = tokio::select! {
            biased;
            written = write => written,
            // Cancelled in the middle of a piece: no error can be sent any more.
            by = &mut self.cancel => Err(self.end_early(by)),
        };
        match written {
            Ok(()) if last => self.sent = Sent::Ended,
            Ok(()) => {}
            Err(Gone) => return self.fail(),
        }
        Ok(())
    }

    fn fail(&mut self) -> Result<(), Gone> {
        self.side = Side::Closed;
        self.sent = Sent::Aborted;
        Err(Gone)
    }

    /// Ends a begun response so that no client takes it for complete: no last chunk, or a stream reset.
    pub async fn abort(&mut self) -> Result<(), Gone> {
        self.sent = Sent::Aborted;
        match std::mem::replace(&mut self.side, Side::Closed) {
            Side::Http1(wire) => wire.cut().await,
            Side::Http2(mut session) => {
                let _ = timeout(self.write_stall, session.shutdown()).await;
            }
            Side::Closed => {}
        }
        Ok(())
    }

    /// Waits until the client leaves or the request is cancelled ([`Self::ended_by`] tells which). Cancel-safe.
    pub async fn gone(&mut self) -> Gone {
        let left = async {
            match &mut self.side {
                Side::Http1(wire) => wire.gone().await,
                Side::Http2(session) => loop {
                    if session.read_body_or_idle(true).await.is_err() {
                        return Gone;
                    }
                },
                Side::Closed => Gone,
            }
        };
        tokio::select! {
            biased;
            gone = left => gone,
            by = &mut self.cancel => self.end_early(by),
        }
    }

    /// Attaches a cancellation handle: its owner may end the request as if the client had left, except that the client
    /// is told.
    pub fn cancelled_by(&mut self, cancel: Cancelled) {
        self.cancel = cancel;
    }

    /// Waits until the request is cancelled; for an exchange whose connection was handed out ([`Self::upgrade`]).
    /// Cancel-safe.
    pub async fn cancelled(&mut self) {
        self.ended_by = Some((&mut self.cancel).await);
    }

    /// Cause of the cancellation, if the request was cancelled.
    pub fn ended_by(&self) -> Option<Ender> {
        self.ended_by
    }

    /// Shortens the stall limit: a client that does not read must not keep a cancelled request alive.
    fn end_early(&mut self, by: Ender) -> Gone {
        self.ended_by = Some(by);
        self.write_stall = self.write_stall.min(CANCELLED_STALL);
        if let Side::Http1(wire) = &mut self.side {
            wire.stall = self.write_stall;
        }
        Gone
    }

    /// Answers `101 Switching Protocols` with the upstream's `headers` (`sec-websocket-accept` and so on) and hands the
    /// connection out. Only for a request with [`Head::upgrade`], before anything was sent. The exchange has ended
    /// afterwards; run the tunnel inside the handler, so that a shutdown waits for it.
    ///
    /// # Errors
    /// The client left, or the request is no WebSocket handshake.
    pub async fn upgrade(&mut self, headers: &[Field]) -> Result<Tunnel, Gone> {
        if self.sent != Sent::Nothing || !self.head.upgrade {
            return Err(Gone);
        }
        let Side::Http1(mut wire) = std::mem::replace(&mut self.side, Side::Closed) else { return Err(Gone) };
        let front = response::switching(&[("x-request-id", self.request_id.as_bytes())], headers);
        (self.sent, self.status) = (Sent::Aborted, 101);
        wire.put(Parts { front, payload: Bytes::new(), tail: b"" }).await?;
        self.sent = Sent::Ended;
        Ok(Tunnel { stream: wire.stream, early: wire.buf.freeze() })
    }

    /// Ends the exchange; the connection is returned if it can carry another request.
    pub(super) async fn finish(self) -> Option<(Stream, BytesMut)> {
        match self.side {
            Side::Http1(wire) if self.sent == Sent::Ended && self.keep_alive => Some((wire.stream, wire.buf)),
            Side::Http1(wire) if self.sent == Sent::Ended => {
                wire.close(!self.body_read).await;
                None
            }
            Side::Http2(session) if self.sent == Sent::Ended => {
                let _ = timeout(self.write_stall, session.finish()).await;
                None
            }
            Side::Http1(_) | Side::Http2(_) | Side::Closed => None,
        }
    }
}

/// Response head in the form that Pingora's HTTP/2 writer takes.
fn h2_head(
    status: u16,
    own: &[(&str, &[u8])],
    fields: &[Field],
    length: Option<u64>,
) -> pingora_core::Result<Box<ResponseHeader>> {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut head = ResponseHeader::build_no_case(status, Some(fields.len() + 6))?;
    for (name, value) in fields.iter().filter(|(name, _)| !response::is_ours(name)) {
        head.append_header(name.clone(), value.clone())?;
    }
    for (name, value) in own {
        head.insert_header(HeaderName::from_bytes(name.as_bytes()).unwrap_or(header::VIA), *value)?;
    }
    if let Some(length) = length.filter(|_| status != StatusCode::NO_CONTENT) {
        head.insert_header(header::CONTENT_LENGTH, length)?;
    }
    Ok(Box::new(head))
}

pub(super) fn ip(address: Option<&SocketAddr>) -> Option<IpAddr> {
    address?.as_inet().map(std::net::SocketAddr::ip)
}
