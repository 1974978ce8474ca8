//! One request and its response, the same for HTTP/1 and HTTP/2.
//!
//! The request side reads the whole body (deadline, minimum rate, size, budget) before anything is dispatched; the response
//! side is Pingora's session. For HTTP/1 the two meet in [`Exchange::ready`]: the session is made once the request is read, from a
//! head without a body, so it holds no body buffers and sees nothing that was not checked here.

use std::net::IpAddr;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderName, HeaderValue, StatusCode, header};
use penstock_dialects::Dialect;
use penstock_proto::ErrorKind;
use pingora_core::protocols::Stream;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::l4::socket::SocketAddr;
use pingora_http::ResponseHeader;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};

use super::chunked::Decoder;
use super::{BodyBudget, BodyLease, Framing, Head, HttpLimits, h2, raw};
use crate::error::Failure;

/// One read of a body.
const READ_BYTES: usize = 16 * 1024;
/// One write whose progress is watched.
const WRITE_BYTES: usize = 64 * 1024;
/// Stray bytes that a client may send while its answer is being made, before it counts as gone.
const STRAY_BYTES_MAX: usize = 64 * 1024;

/// The client left, or the connection failed: an outcome, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

/// A whole request body and the memory budget that it holds.
#[derive(Debug)]
pub struct Body {
    /// The bytes.
    pub bytes: Bytes,
    /// Held for as long as what was made of the bytes waits for something.
    pub lease: BodyLease,
}

/// Why a body was not read.
#[derive(Debug)]
pub enum BodyFault {
    /// The client left.
    Gone,
    /// Answer this and close.
    Refuse(Failure),
}

/// How much of the response is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// Nothing: an error can still choose its status.
    Nothing,
    /// Head and perhaps some of the body.
    Begun,
    /// Everything.
    Ended,
    /// Cut short on purpose: the client sees broken framing.
    Aborted,
}

enum Wire {
    /// HTTP/1, request being read.
    Reading { stream: Stream, buf: BytesMut },
    /// The response side.
    Session(Box<ServerSession>),
    /// Nothing left.
    Closed,
}

/// One request and its response.
pub struct Exchange {
    /// The checked head.
    pub head: Head,
    /// When the head was complete.
    pub started: Instant,
    /// `h1`, `h2`.
    pub protocol: &'static str,
    /// Id that goes into the response and the log.
    pub request_id: String,
    /// The dialect that errors are said in.
    pub dialect: Dialect,
    wire: Wire,
    /// Bytes after this request on the same HTTP/1 connection.
    next: BytesMut,
    body_read: bool,
    keep_alive: bool,
    sent: Sent,
    status: u16,
    stray_bytes: usize,
    peer: Option<IpAddr>,
    limits: HttpTimes,
}

/// The few limits that one exchange needs, kept small.
#[derive(Clone, Copy)]
struct HttpTimes {
    write_stall: Duration,
    body_timeout: Duration,
    rate: u64,
    body_bytes_max: usize,
}

impl Exchange {
    pub(super) fn http1(head: Head, stream: Stream, buf: BytesMut, limits: &HttpLimits, keep_alive: bool) -> Self {
        let peer = stream.get_socket_digest().and_then(|digest| ip(digest.peer_addr()));
        Self { peer, ..Self::new(head, Wire::Reading { stream, buf }, "h1", limits, keep_alive) }
    }

    pub(super) fn http2(head: Head, session: ServerSession, limits: &HttpLimits) -> Self {
        let peer = ip(session.client_addr());
        Self { peer, ..Self::new(head, Wire::Session(Box::new(session)), "h2", limits, true) }
    }

    fn new(head: Head, wire: Wire, protocol: &'static str, limits: &HttpLimits, keep_alive: bool) -> Self {
        let peer = None;
        Self {
            request_id: request_id(&head.headers),
            body_read: head.framing == Framing::None,
            keep_alive: keep_alive && head.keep_alive,
            head,
            started: Instant::now(),
            protocol,
            dialect: Dialect::OpenAi,
            wire,
            next: BytesMut::new(),
            sent: Sent::Nothing,
            status: 0,
            stray_bytes: 0,
            peer,
            limits: HttpTimes {
                write_stall: limits.write_stall,
                body_timeout: limits.body_timeout,
                rate: limits.body_rate_bytes_min.max(1),
                body_bytes_max: limits.body_bytes_max,
            },
        }
    }

    /// How much of the response is out.
    pub fn sent(&self) -> Sent {
        self.sent
    }

    /// Status sent, 0 before.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Address of the peer, without its port.
    pub fn client(&self) -> Option<String> {
        self.peer.map(|peer| peer.to_string())
    }

    /// Reads the whole body.
    pub async fn read_body(&mut self, budget: &BodyBudget) -> Result<Body, BodyFault> {
        let mut intake = Intake::new(self, budget);
        if let Framing::Length(length) = self.head.framing
            && length > self.limits.body_bytes_max as u64
        {
            return Err(intake.too_large());
        }
        match &mut self.wire {
            Wire::Reading { stream, buf } => {
                if self.head.expect_continue && buf.is_empty() {
                    timeout(self.limits.write_stall, proceed(stream)).await.ok().flatten().ok_or(BodyFault::Gone)?;
                }
                match self.head.framing {
                    Framing::None => {}
                    Framing::Length(length) => intake.read_length(stream, buf, length as usize).await?,
                    Framing::Chunked => intake.read_chunked(stream, buf).await?,
                }
            }
            Wire::Session(session) => intake.read_frames(session).await?,
            Wire::Closed => return Err(BodyFault::Gone),
        }
        self.body_read = true;
        // Nothing reads them after the body; a stream may live for an hour.
        self.head.headers = http::HeaderMap::new();
        Ok(Body { bytes: intake.bytes.into(), lease: intake.lease })
    }

    /// Makes the response side ready. Before this an HTTP/1 exchange cannot notice that its client left.
    pub async fn ready(&mut self) -> Result<(), Gone> {
        if !matches!(self.wire, Wire::Reading { .. }) {
            return Ok(());
        }
        let Wire::Reading { stream, buf } = std::mem::replace(&mut self.wire, Wire::Closed) else { return Err(Gone) };
        // An empty rest would keep the whole buffer of the head alive.
        self.next = if buf.is_empty() { BytesMut::new() } else { buf };
        let mut session = ServerSession::new_http1(stream);
        session.set_pipelined_prefix(self.bare_head());
        match session.read_request().await {
            Ok(true) => {
                session.set_keepalive(self.keep_alive.then_some(60));
                self.wire = Wire::Session(Box::new(session));
                Ok(())
            }
            _ => Err(Gone),
        }
    }

    /// What the response writer has to know of the request: method (HEAD has no body), version, whether the connection stays.
    fn bare_head(&self) -> BytesMut {
        let version = if self.head.http10 { "1.0" } else { "1.1" };
        let connection = if self.keep_alive { "keep-alive" } else { "close" };
        let mut head = BytesMut::with_capacity(80);
        head.put_slice(
            format!("{} / HTTP/{version}\r\nhost: a\r\nconnection: {connection}\r\n\r\n", self.head.method).as_bytes(),
        );
        head
    }

    /// Sends a whole answer.
    pub async fn respond(
        &mut self,
        status: u16,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> Result<(), Gone> {
        self.ready().await?;
        let mut response = self.response(status, headers)?;
        response.insert_header(header::CONTENT_LENGTH, body.len()).map_err(|_| Gone)?;
        self.write_head(response).await?;
        self.write(body, true).await
    }

    /// Sends a failure: as an answer while nothing is out, as broken framing afterwards. With unread body bytes the connection is closed.
    pub async fn refuse(&mut self, failure: &Failure) -> Result<(), Gone> {
        if self.sent != Sent::Nothing {
            return self.abort().await;
        }
        if !self.body_read
            && let Wire::Reading { .. } = self.wire
        {
            let Wire::Reading { stream, .. } = std::mem::replace(&mut self.wire, Wire::Closed) else {
                return Err(Gone);
            };
            (self.sent, self.status) = (Sent::Ended, failure.status());
            Box::pin(raw::refuse(stream, failure, self.dialect, &self.request_id, self.limits.write_stall)).await;
            return Ok(());
        }
        let mut headers = vec![(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let retry = if failure.should_retry() { "true" } else { "false" };
        headers.push((HeaderName::from_static("x-should-retry"), HeaderValue::from_static(retry)));
        if let Some(seconds) = failure.retry_after_seconds() {
            headers.push((header::RETRY_AFTER, seconds.into()));
        }
        if let Some(methods) = failure.allow {
            headers.push((header::ALLOW, HeaderValue::from_static(methods.header())));
        }
        headers.push((HeaderName::from_static("x-penstock-error-source"), HeaderValue::from_static(failure.source())));
        let body = failure.body(self.dialect, &self.request_id);
        self.respond(failure.status(), &headers, body).await
    }

    /// Sends status and head of a stream.
    pub async fn begin_stream(&mut self, headers: &[(HeaderName, HeaderValue)]) -> Result<(), Gone> {
        self.ready().await?;
        let mut response = self.response(200, headers)?;
        if self.protocol == "h1" && !self.head.http10 {
            response.insert_header(header::TRANSFER_ENCODING, "chunked").map_err(|_| Gone)?;
        }
        self.write_head(response).await
    }

    fn response(&self, status: u16, headers: &[(HeaderName, HeaderValue)]) -> Result<Box<ResponseHeader>, Gone> {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = ResponseHeader::build_no_case(status, Some(headers.len() + 6)).map_err(|_| Gone)?;
        for (name, value) in headers {
            response.append_header(name.clone(), value.clone()).map_err(|_| Gone)?;
        }
        response.insert_header(HeaderName::from_static("x-request-id"), &self.request_id).map_err(|_| Gone)?;
        let millis = self.started.elapsed().as_millis() as u64;
        response.insert_header(HeaderName::from_static("openai-processing-ms"), millis).map_err(|_| Gone)?;
        Ok(Box::new(response))
    }

    async fn write_head(&mut self, response: Box<ResponseHeader>) -> Result<(), Gone> {
        let Wire::Session(session) = &mut self.wire else { return Err(Gone) };
        self.status = response.status.as_u16();
        self.sent = Sent::Begun;
        match timeout(self.limits.write_stall, session.write_response_header(response)).await {
            Ok(Ok(())) => Ok(()),
            _ => self.fail(),
        }
    }

    /// Sends a piece of the body; `last` ends it. A client that takes no `WRITE_BYTES` within the stall limit is cut off.
    pub async fn write(&mut self, mut data: Bytes, last: bool) -> Result<(), Gone> {
        while data.len() > WRITE_BYTES {
            let piece = data.split_to(WRITE_BYTES);
            self.write_piece(piece, false).await?;
        }
        self.write_piece(data, last).await
    }

    async fn write_piece(&mut self, data: Bytes, last: bool) -> Result<(), Gone> {
        let Wire::Session(session) = &mut self.wire else { return Err(Gone) };
        match timeout(self.limits.write_stall, session.write_response_body(data, last)).await {
            Ok(Ok(())) if last => {
                self.sent = Sent::Ended;
                Ok(())
            }
            Ok(Ok(())) => Ok(()),
            _ => self.fail(),
        }
    }

    fn fail(&mut self) -> Result<(), Gone> {
        self.wire = Wire::Closed;
        self.sent = Sent::Aborted;
        Err(Gone)
    }

    /// Ends a begun response so that it cannot be taken for a complete one: no last chunk, or a stream reset.
    pub async fn abort(&mut self) -> Result<(), Gone> {
        if let Wire::Session(mut session) = std::mem::replace(&mut self.wire, Wire::Closed) {
            self.sent = Sent::Aborted;
            let _ = timeout(self.limits.write_stall, session.shutdown()).await;
        }
        Ok(())
    }

    /// Waits until the client leaves. Cancel-safe. Call [`Self::ready`] before.
    pub async fn gone(&mut self) -> Gone {
        let Wire::Session(session) = &mut self.wire else { return Gone };
        loop {
            match session.read_body_or_idle(true).await {
                // A byte of a next request: RFC 9112 lets us close after this answer; watching for the end goes on.
                Err(error) if error.etype() == &pingora_core::ErrorType::ConnectError => {
                    self.keep_alive = false;
                    session.set_keepalive(None);
                    self.stray_bytes += 1;
                    if self.stray_bytes > STRAY_BYTES_MAX {
                        return Gone;
                    }
                }
                Err(_) => return Gone,
                Ok(_) => {}
            }
        }
    }

    /// Ends the exchange; the connection comes back if it can carry another request.
    pub(super) async fn finish(self) -> Option<(Stream, BytesMut)> {
        let Wire::Session(session) = self.wire else { return None };
        if self.sent != Sent::Ended {
            return None;
        }
        let reusable = timeout(self.limits.write_stall, session.finish()).await.ok()?.ok()??;
        Some((reusable.into_parts().0, self.next))
    }
}

fn ip(address: Option<&SocketAddr>) -> Option<IpAddr> {
    address?.as_inet().map(std::net::SocketAddr::ip)
}

async fn proceed(stream: &mut Stream) -> Option<()> {
    stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.ok()?;
    stream.flush().await.ok()
}

/// A body being read.
struct Intake {
    bytes: Vec<u8>,
    lease: BodyLease,
    /// When the running window began.
    window: Instant,
    /// Bytes received before it.
    before: usize,
    received: usize,
    limits: HttpTimes,
}

impl Intake {
    fn new(exchange: &Exchange, budget: &BodyBudget) -> Self {
        Self {
            bytes: Vec::new(),
            lease: budget.lease(),
            window: exchange.started,
            before: 0,
            received: 0,
            limits: exchange.limits,
        }
    }

    /// When the sender has been too slow in the running window. What it brought before counts for nothing: speed buys no silence.
    fn deadline(&self) -> Instant {
        self.window + self.limits.body_timeout
    }

    /// Counts bytes; a window that has brought its share ends, and the next begins.
    fn receive(&mut self, bytes: usize) {
        self.received += bytes;
        let share = u128::from(self.limits.rate) * self.limits.body_timeout.as_millis() / 1000;
        if (self.received - self.before) as u128 >= share {
            (self.window, self.before) = (Instant::now(), self.received);
        }
    }

    fn too_large(&self) -> BodyFault {
        let message = format!("The request body is larger than {} bytes.", self.limits.body_bytes_max);
        BodyFault::Refuse(Failure::new(ErrorKind::TooLarge, message))
    }

    /// Makes room in limit and budget for `more` payload bytes.
    fn admit(&mut self, more: usize) -> Result<(), BodyFault> {
        let bytes = self.bytes.len() + more;
        if bytes > self.limits.body_bytes_max {
            return Err(self.too_large());
        }
        self.lease.cover(bytes).map_err(|_| {
            let failure =
                Failure::new(ErrorKind::Overloaded, "Too many large requests are in flight. Try again shortly.");
            BodyFault::Refuse(failure.retry_after(Duration::from_secs(1)))
        })
    }

    async fn read_length(&mut self, stream: &mut Stream, buf: &mut BytesMut, length: usize) -> Result<(), BodyFault> {
        let first = buf.split_to(buf.len().min(length));
        self.admit(first.len())?;
        self.receive(first.len());
        self.bytes.extend_from_slice(&first);
        while self.bytes.len() < length {
            let left = length - self.bytes.len();
            // Doubling up to the announced length: announced bytes cost nothing until they come.
            let room = left.min(self.bytes.len().max(READ_BYTES));
            self.admit(room)?;
            self.bytes.reserve_exact(room);
            let read = timeout_at(self.deadline(), (&mut *stream).take(left as u64).read_buf(&mut self.bytes)).await;
            self.receive(arrived(read)?);
        }
        Ok(())
    }

    async fn read_chunked(&mut self, stream: &mut Stream, buf: &mut BytesMut) -> Result<(), BodyFault> {
        let mut decoder = Decoder::default();
        loop {
            self.admit(buf.len())?;
            let used = decoder.feed(buf, &mut self.bytes).map_err(|fault| {
                BodyFault::Refuse(Failure::new(
                    ErrorKind::Malformed,
                    format!("The chunked body is not valid: {fault}."),
                ))
            })?;
            let _ = buf.split_to(used);
            if decoder.is_done() {
                return Ok(());
            }
            tokio::task::consume_budget().await;
            buf.reserve(READ_BYTES);
            let read = timeout_at(self.deadline(), stream.read_buf(buf)).await;
            self.receive(arrived(read)?);
        }
    }

    async fn read_frames(&mut self, session: &mut ServerSession) -> Result<(), BodyFault> {
        let mut frames = h2::FrameCount::default();
        loop {
            match timeout_at(self.deadline(), session.read_request_body()).await {
                Err(_) => return Err(too_slow()),
                Ok(Err(_)) => return Err(BodyFault::Gone),
                Ok(Ok(None)) => return Ok(()),
                Ok(Ok(Some(data))) => {
                    self.admit(data.len())?;
                    self.receive(data.len());
                    self.bytes.extend_from_slice(&data);
                    frames
                        .count(self.received)
                        .map_err(|message| BodyFault::Refuse(Failure::new(ErrorKind::Malformed, message)))?;
                }
            }
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the result of an await, at its only use")]
fn arrived(read: Result<std::io::Result<usize>, tokio::time::error::Elapsed>) -> Result<usize, BodyFault> {
    match read {
        Err(_) => Err(too_slow()),
        Ok(Ok(0) | Err(_)) => Err(BodyFault::Gone),
        Ok(Ok(bytes)) => Ok(bytes),
    }
}

fn too_slow() -> BodyFault {
    BodyFault::Refuse(Failure::new(ErrorKind::ClientTimeout, "The request body was sent too slowly."))
}

/// The client's id when it is sane, else a new one.
fn request_id(headers: &http::HeaderMap) -> String {
    let sane = |id: &str| {
        (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    match headers.get("x-request-id").and_then(|id| id.to_str().ok()).filter(|id| sane(id)) {
        Some(id) => id.to_owned(),
        None => new_request_id(),
    }
}

/// `req_` and 128 random bits.
pub fn new_request_id() -> String {
    let mut random = [0u8; 16];
    // Only the uniqueness of an id in a log depends on this; without system randomness the id is all zeros.
    let _ = getrandom::fill(&mut random);
    format!("req_{:032x}", u128::from_be_bytes(random))
}
