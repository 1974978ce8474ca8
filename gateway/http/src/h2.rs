//! HTTP/2: accept loop, limits against abuse, and the conversion of a stream's head into our [`Head`].

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::header;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::v2::server::{H2Accept, H2Options, HttpSession, handshake};
use pingora_core::protocols::{Digest, Stream};
use pingora_core::server::ShutdownWatch;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::connection::{Handler, Unless, unless};
use super::head::{HeadFault, checked_host};
use super::late::Looked;
use super::places::{Place, Refused};
use super::{Exchange, Framing, Head, HttpLimits, late};

/// Most streams refused at acceptance before the connection is cut.
const REJECTED_MAX: usize = 32;
/// Most streams that the peer resets before they are accepted, per connection (rapid reset, CVE-2023-44487).
const PENDING_RESETS_MAX: usize = 20;
/// Most streams that this side resets for the peer's faults, per connection (CVE-2025-8671).
const LOCAL_RESETS_MAX: usize = 64;
/// Most response bytes buffered per stream before a write waits.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Flow-control window per stream: bytes of a body that the peer may send before they are read.
const STREAM_WINDOW_BYTES: u32 = 64 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;

/// Count of a body's DATA frames, against bodies in tiny frames.
#[derive(Debug, Default)]
pub(super) struct FrameCount(usize);

impl FrameCount {
    /// Counts one frame of a body with `received` bytes so far.
    pub(super) fn count(&mut self, received: usize) -> Result<(), &'static str> {
        self.0 += 1;
        if self.0 > 4096 + received / 16 { Err("The body comes in too many tiny frames.") } else { Ok(()) }
    }
}

fn options(limits: &HttpLimits) -> H2Options {
    let mut options = H2Options::new();
    options
        .max_concurrent_streams(limits.h2_streams_max)
        .max_header_list_size(limits.h2_header_list_bytes_max)
        .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
        .max_local_error_reset_streams(Some(LOCAL_RESETS_MAX))
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(16 * 1024);
    options
}

/// Serves one HTTP/2 connection until it closes, idles too long or misbehaves.
pub(super) async fn serve<H: Handler>(handler: Arc<H>, stream: Stream, place: &mut Place, mut shutdown: ShutdownWatch) {
    let limits = handler.limits();
    let digest = Arc::new(Digest {
        ssl_digest: stream.get_ssl_digest(),
        timing_digest: stream.get_timing_digest(),
        proxy_digest: stream.get_proxy_digest(),
        socket_digest: stream.get_socket_digest(),
    });
    let deadline = Instant::now() + limits.head_timeout;
    place.waits(false);
    let begun = unless(
        handshake(stream, Some(options(&limits))),
        place,
        &mut Looked::default(),
        deadline,
        std::future::pending(),
    )
    .await;
    let mut connection = match begun {
        Ok(Ok(connection)) => connection,
        Err(Unless::Told) => return handler.refused_connection(Refused::GaveWay),
        _ => return,
    };
    let (active, mut rejected, mut draining) = (Arc::new(Active::default()), 0, *shutdown.borrow());
    if draining {
        connection.graceful_shutdown();
    }
    loop {
        let step = {
            let mut accepted = pin!(HttpSession::from_h2_conn(&mut connection, digest.clone()));
            tokio::select! {
                biased;
                changed = shutdown.changed(), if !draining => Err(changed.is_err() || *shutdown.borrow()),
                accepted = &mut accepted => Ok(accepted),
                why = active.idle_for(limits.idle_timeout, place) => match late::last_look(place.open(), accepted.as_mut()).await {
                    Some(accepted) => Ok(accepted),
                    None if why == Unless::Told => return handler.refused_connection(Refused::GaveWay),
                    None => return,
                },
            }
        };
        let accepted = match step {
            Ok(accepted) => accepted,
            Err(begins) => {
                draining = begins;
                if draining {
                    connection.graceful_shutdown();
                }
                continue;
            }
        };
        if place.serves() && !draining {
            draining = true;
            connection.graceful_shutdown();
        }
        match accepted {
            Err(_) | Ok(None) => return,
            Ok(Some(H2Accept::Rejected)) => {
                rejected += 1;
                if rejected > REJECTED_MAX {
                    return;
                }
            }
            Ok(Some(H2Accept::Session(session))) => {
                let (guard, handler, limits) = (active.start(), handler.clone(), limits.clone());
                tokio::spawn(async move {
                    let _guard = guard;
                    Box::pin(serve_stream(handler, session, &limits)).await;
                });
            }
        }
    }
}

async fn serve_stream<H: Handler>(handler: Arc<H>, session: HttpSession, limits: &HttpLimits) {
    let checked = head(&session);
    let framing = if session.is_body_done() { Framing::None } else { Framing::Chunked };
    let session = ServerSession::new_http2(session);
    match checked {
        Ok(head) => {
            let head = Head { framing: if head.framing == Framing::None { framing } else { head.framing }, ..head };
            let mut exchange = Exchange::http2(head, session, limits);
            handler.serve(&mut exchange).await;
            exchange.finish().await;
        }
        Err(fault) => {
            let head = Head {
                method: http::Method::GET,
                target: "/".into(),
                http10: false,
                framing: Framing::None,
                keep_alive: true,
                expect_continue: false,
                upgrade: false,
                headers: http::HeaderMap::new(),
            };
            let mut exchange = Exchange::http2(head, session, limits);
            handler.refuse(&mut exchange, fault).await;
            exchange.finish().await;
        }
    }
}

/// Validates a stream's head, as far as the `h2` crate has not checked pseudo-headers and connection headers already.
fn head(session: &HttpSession) -> Result<Head, HeadFault> {
    let request = session.req_header();
    if matches!(request.method, http::Method::CONNECT | http::Method::TRACE) {
        return Err(HeadFault { status: 501, message: "CONNECT and TRACE are not served" });
    }
    let headers = with_host(request)?;
    let mut lengths = request.headers.get_all(header::CONTENT_LENGTH).iter();
    let framing = match (lengths.next(), lengths.next()) {
        (None, _) => Framing::None,
        (Some(length), None) => match length.to_str().ok().and_then(|digits| digits.parse().ok()) {
            Some(0) => Framing::None,
            Some(length) => Framing::Length(length),
            None => return Err(HeadFault { status: 400, message: "content-length must be a decimal number" }),
        },
        _ => return Err(HeadFault { status: 400, message: "more than one content-length" }),
    };
    let target = request.uri.path_and_query().map_or("/", |target| target.as_str());
    Ok(Head {
        method: request.method.clone(),
        target: target.to_owned(),
        http10: false,
        framing,
        keep_alive: true,
        expect_continue: false,
        upgrade: false,
        headers,
    })
}

/// Header fields of a request with `:authority` as `Host`, so that readers of `Host` need not know the version (RFC
/// 9113, 8.3.1).
fn with_host(request: &http::request::Parts) -> Result<http::HeaderMap, HeadFault> {
    let mut headers = request.headers.clone();
    let mut hosts = request.headers.get_all(header::HOST).iter();
    let host = hosts.next().map(|host| checked_host(host.as_bytes())).transpose()?;
    if hosts.next().is_some() {
        return Err(HeadFault { status: 400, message: "more than one Host header" });
    }
    let Some(authority) = request.uri.authority() else { return Ok(headers) };
    let authority = checked_host(authority.as_str().as_bytes())?;
    if host.is_some_and(|host| !host.eq_ignore_ascii_case(authority)) {
        return Err(HeadFault { status: 400, message: ":authority and Host disagree" });
    }
    if let Ok(value) = http::HeaderValue::from_str(authority) {
        headers.insert(header::HOST, value);
    }
    Ok(headers)
}

/// Number of streams in progress on one HTTP/2 connection.
#[derive(Default)]
struct Active {
    count: AtomicUsize,
    changed: Notify,
}

struct ActiveGuard(Arc<Active>);

impl Active {
    fn start(self: &Arc<Self>) -> ActiveGuard {
        self.count.fetch_add(1, Ordering::AcqRel);
        ActiveGuard(self.clone())
    }

    /// Completes once no stream was active for `idle`, or when another connection needs the place of one without
    /// streams.
    async fn idle_for(&self, idle: Duration, place: &mut Place) -> Unless {
        loop {
            let changed = self.changed.notified();
            if self.count.load(Ordering::Acquire) == 0 {
                place.waits(false);
                return tokio::select! {
                    () = tokio::time::sleep(idle) => Unless::Late,
                    () = place.told() => Unless::Told,
                };
            }
            changed.await;
        }
    }
}

impl Drop for ActiveGuard {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
        self.0.changed.notify_one();
    }
}
