//! The gRPC service: connections, streams, and the end of both.
//!
//! A stream lives as long as the request of a client that it is about, so a connection has many of them. Whoever connects
//! is a proxy of the operator's; bounds are as for the gateway's clients all the same.

use std::future::poll_fn;
use std::io;
use std::net::TcpListener as StdTcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use h2::server::{Builder, SendResponse};
use h2::{Ping, PingPong, Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;

use crate::MESSAGE_BYTES_MAX;
use penstock_http::{Growth, Renewed};
use penstock_proto::ErrorKind;

use crate::chooser::Chooser;
use crate::conversation::{Conversation, Replies};
use crate::framing::{FrameFault, Reader, framed};
use crate::messages::{HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ServingStatus};
use crate::seldom::Seldom;

/// Most connections at once: each proxy has a few per thread.
pub const CONNECTIONS_MAX: usize = 256;
/// Most streams of a connection: requests in flight of one thread of a proxy.
const STREAMS_MAX: u32 = 1024;
/// Largest decoded header list of a stream, in bytes.
const HEADER_LIST_BYTES_MAX: u32 = 16 * 1024;
/// Bytes that a stream may send before they are read.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
/// Bytes that a connection may send before they are read.
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
/// Most bytes of replies that a stream holds before a write waits.
const SEND_BUFFER_BYTES: usize = 256 * 1024;
/// Most streams that the proxy resets before they are accepted: it resets those of clients that leave.
const PENDING_RESETS_MAX: usize = 1024;
/// Longest time of TLS and HTTP/2 handshakes.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Interval of pings, and the longest wait for a reply to one: a proxy that has vanished leaves no stream behind.
const PING: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(20));
/// Longest wait for the first message of a stream: the proxy opens a stream to send one.
const FIRST_MAX: Duration = Duration::from_secs(10);
/// Longest silence of a stream whose request has been picked for.
const SILENCE_MAX: Duration = Duration::from_secs(3600);
/// Largest message of a health check, in bytes.
const CHECK_BYTES_MAX: usize = 4096;
/// Interval at which a watched status is looked at.
const WATCH_EACH: Duration = Duration::from_secs(1);

/// Longest wait for the first endpoints (host names are looked up) before connections are accepted, and how often it looks.
const READY_MAX: Duration = Duration::from_secs(5);
const READY_LOOK: Duration = Duration::from_millis(20);
/// Longest wait for the threads at the end: streams that are cut leave their lines in the access log meanwhile.
const END_MAX: Duration = Duration::from_secs(10);

const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";
/// Services that a health check may name: the process until it is to end, `liveness` for as long as it lives, and two names for whether it can choose.
const SERVICES: [&str; 4] = ["", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"];

/// Status codes of gRPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ok = 0,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    ResourceExhausted = 8,
    Unimplemented = 12,
}

/// Socket, TLS and threads of the service.
pub struct Settings {
    /// Bound socket.
    pub listener: StdTcpListener,
    /// TLS of the listener; `None`: HTTP/2 with prior knowledge.
    pub tls: Option<Arc<Renewed<rustls::ServerConfig>>>,
    /// Threads that serve.
    pub threads: usize,
}

/// Handle of the threads that serve.
pub struct Running {
    /// Instant at which open streams are cut, once the service is to end.
    stop: watch::Sender<Option<Instant>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Starts the service.
///
/// # Errors
/// The system has no thread for it, or the socket cannot be used.
pub fn start<C: Chooser>(chooser: Arc<C>, settings: Settings) -> io::Result<Running> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(settings.threads)
        .max_blocking_threads(16)
        .thread_name("endpoint-picker")
        .enable_all()
        .build()?;
    settings.listener.set_nonblocking(true)?;
    let listener = {
        let _guard = runtime.enter();
        TcpListener::from_std(settings.listener)?
    };
    let (stop, stopped) = watch::channel(None);
    let thread = std::thread::Builder::new().name("endpoint-picker".into()).spawn(move || {
        runtime.block_on(accept(chooser, listener, settings.tls, stopped));
        runtime.shutdown_timeout(END_MAX);
    })?;
    Ok(Running { stop, thread: Mutex::new(Some(thread)) })
}

impl Running {
    /// Accepts no more connections and streams; those that are open go on for `grace`. A later call can only shorten the time
    /// that is left.
    pub fn leave(&self, grace: Duration) {
        let asked = Instant::now() + grace;
        self.stop.send_if_modified(|until| {
            let is_sooner = until.is_none_or(|until| asked < until);
            if is_sooner {
                *until = Some(asked);
            }
            is_sooner
        });
    }

    /// Ends the service: waits for open streams until `grace` is over, or a sooner time that [`Running::leave`] has set.
    pub fn stop(&self, grace: Duration) {
        self.leave(grace);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Err: it panicked, and said so.
            let _ = thread.join();
        }
    }
}

type Stopped = watch::Receiver<Option<Instant>>;

async fn accept<C: Chooser>(
    chooser: Arc<C>,
    listener: TcpListener,
    tls: Option<Arc<Renewed<rustls::ServerConfig>>>,
    mut stopped: Stopped,
) {
    // A proxy that waits in the queue of the socket is better off than one that is refused.
    let ready = async {
        while !chooser.is_ready() {
            sleep(READY_LOOK).await;
        }
    };
    tokio::select! {
        _ = timeout(READY_MAX, ready) => {}
        _ = stopped.wait_for(Option::is_some) => return,
    }
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    let mut stop = stopped.clone();
    loop {
        let accepted = tokio::select! {
            biased;
            _ = stopped.wait_for(Option::is_some) => break,
            ended = connections.join_next(), if !connections.is_empty() => {
                ended.into_iter().for_each(|ended| note_panic(&*chooser, ended));
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection to the endpoint picker could not be accepted");
                // No descriptors left, as a rule: some may be back soon.
                sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(place) = places.clone().try_acquire_owned() else {
            static SELDOM: Seldom = Seldom::new();
            if let Some(left_out) = SELDOM.due() {
                tracing::warn!(
                    connections = CONNECTIONS_MAX,
                    left_out,
                    "a connection to the endpoint picker was closed: too many are open"
                );
            }
            continue;
        };
        // Err: the connection is gone already.
        let _ = stream.set_nodelay(true);
        let tls = tls.as_ref().map(|tls| TlsAcceptor::from(tls.now()));
        let (chooser, stop) = (chooser.clone(), stop.clone());
        connections.spawn(async move {
            let _place = place;
            match tls {
                None => connection(chooser, stream, stop).await,
                Some(tls) => match timeout(HANDSHAKE_MAX, tls.accept(stream)).await {
                    Ok(Ok(stream)) => connection(chooser, stream, stop).await,
                    Ok(Err(error)) => tracing::debug!(%error, "TLS of the endpoint picker: a handshake failed"),
                    Err(_) => {}
                },
            }
        });
    }
    drop(listener);
    loop {
        let until = stop.borrow_and_update().unwrap_or_else(Instant::now);
        tokio::select! {
            () = async { while connections.join_next().await.is_some() {} } => return,
            // The grace time is over; what is left is cut.
            () = sleep_until(until) => return,
            // The grace time is shorter now.
            Ok(()) = stop.changed() => {}
        }
    }
}

async fn connection<C: Chooser, T: AsyncRead + AsyncWrite + Unpin>(chooser: Arc<C>, io: T, mut stopped: Stopped) {
    let mut builder = Builder::new();
    builder
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEADER_LIST_BYTES_MAX)
        .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    let Ok(Ok(mut connection)) = timeout(HANDSHAKE_MAX, builder.handshake(io)).await else { return };
    let Some(pings) = connection.ping_pong() else { return };
    let mut gone = std::pin::pin!(gone(pings));
    let (mut streams, mut leaving, of_streams) = (JoinSet::new(), false, stopped.clone());
    loop {
        tokio::select! {
            _ = stopped.wait_for(Option::is_some), if !leaving => {
                leaving = true;
                connection.graceful_shutdown();
            }
            () = &mut gone => return,
            ended = streams.join_next(), if !streams.is_empty() => {
                ended.into_iter().for_each(|ended| note_panic(&*chooser, ended));
            }
            accepted = connection.accept() => match accepted {
                Some(Ok((request, respond))) => {
                    drop(streams.spawn(stream(chooser.clone(), request, respond, of_streams.clone())));
                }
                // The connection is done; its streams have ended with it.
                Some(Err(error)) => {
                    static SELDOM: Seldom = Seldom::new();
                    let is_of_peer = error.is_io() || error.is_remote();
                    if let Some(left_out) = (!is_of_peer).then(|| SELDOM.due()).flatten() {
                        let open = streams.len();
                        tracing::warn!(%error, open, left_out, "the endpoint picker ended a connection: the proxy broke HTTP/2");
                    }
                    return;
                }
                None => return,
            },
        }
    }
}

/// Counts a task that has panicked: one request, as a rule, which the proxy answers with an error.
fn note_panic<C: Chooser>(chooser: &C, ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!("a request to the endpoint picker panicked");
        chooser.panicked();
    }
}

/// Waits until the proxy does not answer pings any more.
async fn gone(mut pings: PingPong) {
    loop {
        sleep(PING.0).await;
        if !matches!(timeout(PING.1, pings.ping(Ping::opaque())).await, Ok(Ok(_))) {
            return;
        }
    }
}

async fn stream<C: Chooser>(
    chooser: Arc<C>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    stopped: Stopped,
) {
    let kind = request.headers().get(header::CONTENT_TYPE);
    let is_grpc = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    if request.method() != Method::POST || !is_grpc {
        let mut answer = Response::new(());
        *answer.status_mut() = http::StatusCode::UNSUPPORTED_MEDIA_TYPE;
        // Err: the proxy has left.
        let _ = respond.send_response(answer, true);
        return;
    }
    let path = request.uri().path().to_owned();
    let mut body = request.into_body();
    let mut answer = Response::new(());
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    if ![PROCESS, CHECK, WATCH].contains(&path.as_str()) {
        status_fields(answer.headers_mut(), Status::Unimplemented);
        let _ = respond.send_response(answer, true);
        return;
    }
    let Ok(mut send) = respond.send_response(answer, false) else { return };
    let status = match path.as_str() {
        PROCESS => process(chooser, &mut body, &mut send).await,
        _ => health(chooser, &mut body, &mut send, stopped, path == WATCH).await,
    };
    // None: the proxy has left.
    if let Some(status) = status {
        let mut trailers = HeaderMap::new();
        status_fields(&mut trailers, status);
        let _ = send.send_trailers(trailers);
    }
}

fn status_fields(headers: &mut HeaderMap, status: Status) {
    headers.insert("grpc-status", HeaderValue::from(status as u16));
    if status != Status::Ok {
        headers.insert("grpc-message", HeaderValue::from_static(status.message()));
    }
}

impl Status {
    fn message(self) -> &'static str {
        match self {
            Status::Ok => "",
            Status::InvalidArgument => "a message cannot be read",
            Status::DeadlineExceeded => "the stream was silent for too long",
            Status::NotFound => "there is no such service",
            Status::ResourceExhausted => "a message is too large",
            Status::Unimplemented => "there is no such method, or the message is compressed",
        }
    }
}

impl From<FrameFault> for Status {
    fn from(fault: FrameFault) -> Self {
        match fault {
            FrameFault::Compressed => Status::Unimplemented,
            FrameFault::TooLong => Status::ResourceExhausted,
            FrameFault::Cut => Status::InvalidArgument,
        }
    }
}

impl Status {
    /// Kind of the failure of a request whose stream ends with this status, for the log.
    fn kind(self) -> ErrorKind {
        match self {
            Status::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            Status::ResourceExhausted => ErrorKind::TooLarge,
            _ => ErrorKind::Malformed,
        }
    }
}

/// Window in which a body has to bring its rate.
struct Pace {
    until: Instant,
    bytes: u64,
}

/// Serves one request of a client; returns the status of the stream, or `None` where the proxy has ended it.
async fn process<C: Chooser>(chooser: Arc<C>, body: &mut RecvStream, send: &mut SendStream<Bytes>) -> Option<Status> {
    let mut talk = Conversation::new(chooser.clone());
    let status = converse(&*chooser, &mut talk, body, send).await;
    match status {
        None => talk.left(),
        Some(Status::Ok) => {}
        Some(fault) => {
            static SELDOM: Seldom = Seldom::new();
            if let Some(left_out) = SELDOM.due() {
                let reason = fault.message();
                tracing::warn!(reason, left_out, "the endpoint picker ended a stream: the proxy broke the protocol");
            }
            talk.broken(fault.kind(), fault.message());
        }
    }
    status
}

async fn converse<C: Chooser>(
    chooser: &C,
    talk: &mut Conversation<C>,
    body: &mut RecvStream,
    send: &mut SendStream<Bytes>,
) -> Option<Status> {
    let limits = chooser.limits();
    let message_max = limits.body_bytes_max.saturating_add(MESSAGE_BYTES_MAX);
    let mut frames = Reader::default();
    let first_by = Instant::now() + FIRST_MAX;
    let mut has_begun = false;
    let window = || Pace { until: Instant::now() + limits.body_timeout, bytes: 0 };
    let mut pace = window();
    loop {
        let replies = match frames.next(message_max) {
            Ok(Some(bytes)) => {
                if bytes.len() > MESSAGE_BYTES_MAX
                    && ProcessingRequest::bytes_besides_bodies(&bytes) > MESSAGE_BYTES_MAX
                {
                    return Some(Status::ResourceExhausted);
                }
                let Ok(message) = ProcessingRequest::decode(bytes) else { return Some(Status::InvalidArgument) };
                has_begun = true;
                let awaited = talk.awaits_body();
                let replies = tokio::select! {
                    biased;
                    _ = poll_fn(|context| send.poll_reset(context)) => return None,
                    replies = talk.take(message) => replies,
                };
                if !awaited && talk.awaits_body() {
                    pace = window();
                }
                replies
            }
            Ok(None) => {
                if frames.capacity() > MESSAGE_BYTES_MAX
                    && let Err(refusal) = talk.cover(frames.capacity())
                {
                    refusal
                } else {
                    let until = match has_begun {
                        false => first_by,
                        true if talk.awaits_body() => pace.until,
                        true => Instant::now() + SILENCE_MAX,
                    };
                    match tokio::time::timeout_at(until, body.data()).await {
                        Ok(Some(Ok(bytes))) => match make_room(&mut frames, talk, bytes.len()) {
                            Ok(()) => {
                                frames.add(&bytes);
                                pace.bytes += bytes.len() as u64;
                                // Err: the stream is closed; the next read says so.
                                let _ = body.flow_control().release_capacity(bytes.len());
                                continue;
                            }
                            Err(refusal) => refusal,
                        },
                        Ok(Some(Err(_))) => return None,
                        Ok(None) => {
                            talk.left();
                            return Some(frames.end().map_or_else(Status::from, |()| Status::Ok));
                        }
                        Err(_) if !talk.awaits_body() => return Some(Status::DeadlineExceeded),
                        Err(_) if pace.bytes >= limits.body_rate_bytes_min * limits.body_timeout.as_secs().max(1) => {
                            pace = window();
                            continue;
                        }
                        Err(_) => talk.too_slow(),
                    }
                }
            }
            Err(FrameFault::TooLong) if talk.awaits_body() => talk.too_long(),
            Err(fault) => return Some(fault.into()),
        };
        let Replies { messages, is_over, hold: _hold } = replies;
        for message in messages {
            write(send, framed(&message), limits.write_stall).await?;
        }
        if is_over {
            return Some(Status::Ok);
        }
    }
}

/// Makes room for `more` bytes of a message, and charges the memory for the whole buffer: its size doubles, or grows by an
/// eighth where the memory for that is not there.
fn make_room<C: Chooser>(frames: &mut Reader, talk: &mut Conversation<C>, more: usize) -> Result<(), Replies> {
    let Some(Growth { double, eighth }) = frames.growth(more) else { return Ok(()) };
    let capacity = if double <= MESSAGE_BYTES_MAX || talk.may_cover(double) {
        double
    } else {
        talk.cover(eighth)?;
        eighth
    };
    frames.grow(capacity);
    Ok(())
}

/// Answers a health check: once, or at every change until the service is to end.
async fn health<C: Chooser>(
    chooser: Arc<C>,
    body: &mut RecvStream,
    send: &mut SendStream<Bytes>,
    mut stopped: Stopped,
    watches: bool,
) -> Option<Status> {
    let mut frames = Reader::default();
    let asked = loop {
        match frames.next(CHECK_BYTES_MAX) {
            Ok(Some(bytes)) => match HealthCheckRequest::decode(bytes) {
                Ok(asked) => break asked,
                Err(_) => return Some(Status::InvalidArgument),
            },
            Ok(None) => match timeout(HANDSHAKE_MAX, body.data()).await {
                Ok(Some(Ok(bytes))) => {
                    frames.add(&bytes);
                    let _ = body.flow_control().release_capacity(bytes.len());
                }
                Ok(Some(Err(_))) => return None,
                Ok(None) => return Some(Status::InvalidArgument),
                Err(_) => return Some(Status::DeadlineExceeded),
            },
            Err(fault) => return Some(fault.into()),
        }
    };
    let place = SERVICES.iter().position(|service| *service == asked.service);
    let status = |ends: bool| match place {
        None => ServingStatus::ServiceUnknown,
        Some(0) if !ends => ServingStatus::Serving,
        Some(1) => ServingStatus::Serving,
        Some(2..) if !ends && chooser.is_ready() => ServingStatus::Serving,
        Some(_) => ServingStatus::NotServing,
    };
    if place.is_none() && !watches {
        return Some(Status::NotFound);
    }
    let mut said = None;
    loop {
        let ends = stopped.borrow().is_some();
        let now = status(ends);
        if said != Some(now) {
            let answer = HealthCheckResponse { status: now as i32 };
            write(send, framed(&answer), HANDSHAKE_MAX).await?;
            said = Some(now);
        }
        if !watches || ends {
            // Whoever watches on would keep the connection until the grace time is over.
            return Some(Status::Ok);
        }
        tokio::select! {
            _ = poll_fn(|context| send.poll_reset(context)) => return None,
            Ok(_) = stopped.wait_for(Option::is_some) => {}
            () = sleep(WATCH_EACH) => {}
        }
    }
}

/// Writes bytes as far as the proxy takes them; `None`: it has left, or takes nothing for `stall`.
async fn write(send: &mut SendStream<Bytes>, mut bytes: Bytes, stall: Duration) -> Option<()> {
    while !bytes.is_empty() {
        send.reserve_capacity(bytes.len());
        let room = match timeout(stall, poll_fn(|context| send.poll_capacity(context))).await {
            Ok(Some(Ok(room))) => room.min(bytes.len()),
            Ok(Some(Err(_)) | None) => return None,
            Err(_) => {
                send.send_reset(Reason::CANCEL);
                return None;
            }
        };
        send.send_data(bytes.split_to(room), false).ok()?;
    }
    Some(())
}
