//! Listener of the API: a thread and a runtime of its own, so that the admin API answers while the data port is busy,
//! and the other way round.
//!
//! The bounds are like the data port's: connections, size and time of a head, life of a connection. A stop lets answers
//! in progress end.

use std::fs::Permissions;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener as StdTcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use penstock_base::panics::message;
use penstock_config::{ADMIN_LISTEN, AdminListen};
use penstock_http::late;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::gate::{CHANGES_MAX, Peer};
use crate::renewals::TURN_EACH;

/// Most connections at once; a further one is answered 503 and closed.
const CONNECTIONS_MAX: usize = 256;
/// Longest time until a head is complete, also for the first head of a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest head, in bytes.
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// Age after which a connection is closed, at the end of its answer.
const CONNECTION_LIFE: Duration = Duration::from_secs(120);
/// Interval of looks at a connection that is due to end, and has an endless answer on it.
const STREAM_LOOK: Duration = Duration::from_secs(1);
/// Longest time for answers in progress when the process ends.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Interval of attempts to bind an address that another process is about to give up.
const TAKEOVER_PAUSE: Duration = Duration::from_millis(100);
/// Answer to a connection beyond the bound.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 75\r\n\r\n{\"error\":{\"code\":\"unavailable\",\"message\":\"Too many connections are open.\"}}";

/// Bound socket.
pub(crate) enum Socket {
    Tcp(StdTcpListener),
    Unix(StdUnixListener, PathBuf),
}

impl Socket {
    /// URL in the form that `penstock admin --url` takes.
    pub(crate) fn url(&self) -> String {
        match self {
            Socket::Tcp(listener) => {
                listener.local_addr().map_or_else(|_| String::new(), |address| format!("http://{address}"))
            }
            Socket::Unix(_, path) => format!("unix://{}", path.display()),
        }
    }
}

/// Binds the TCP address. Without an address in the config, a free port is taken where the usual one is in use.
/// `patience`: longest wait for a taken address whose process is about to end.
pub(crate) fn bind(listen: AdminListen, patience: Duration) -> io::Result<Option<Socket>> {
    let (address, other) = match listen {
        AdminListen::Off => return Ok(None),
        AdminListen::Usual => (ADMIN_LISTEN, Some(SocketAddr::new(ADMIN_LISTEN.ip(), 0))),
        AdminListen::At(address) => (address, None),
    };
    let until = std::time::Instant::now() + patience;
    loop {
        match (StdTcpListener::bind(address), other) {
            (Ok(listener), _) => return Ok(Some(Socket::Tcp(listener))),
            (Err(error), _) if error.kind() == io::ErrorKind::AddrInUse && std::time::Instant::now() < until => {
                std::thread::sleep(TAKEOVER_PAUSE);
            }
            (Err(_), Some(other)) => return StdTcpListener::bind(other).map(|listener| Some(Socket::Tcp(listener))),
            (Err(error), None) => return Err(error),
        }
    }
}

/// Binds the Unix socket; a socket without a listener is replaced. Only this user can open it.
pub(crate) fn bind_unix(path: &Path) -> io::Result<Socket> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "somebody listens there"));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = StdUnixListener::bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(Socket::Unix(listener, path.to_owned()))
}

/// Interval of [`Chore`].
const CHORE_EACH: Duration = TURN_EACH;

/// Short work that is done every few seconds on the thread that serves.
pub(crate) type Chore = Box<dyn Fn() + Send>;

/// Connection of a request, for answers that go on for as long as somebody looks.
#[derive(Clone)]
pub(crate) struct Link {
    streams: Arc<AtomicUsize>,
    stopped: watch::Receiver<bool>,
}

impl Link {
    /// Marks that an endless answer is on the connection, which then outlives its bound.
    pub(crate) fn hold(self) -> Held {
        self.streams.fetch_add(1, Ordering::AcqRel);
        Held(self)
    }
}

/// Mark of an endless answer, taken back on drop.
pub(crate) struct Held(Link);

impl Held {
    /// Waits until the process ends.
    pub(crate) async fn stopped(&mut self) {
        // Err: the server is gone.
        let _ = self.0.stopped.wait_for(|stop| *stop).await;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Handle of the thread that serves.
pub(crate) struct Running {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    sockets: Vec<PathBuf>,
}

impl Running {
    /// Serves `router` at all sockets. `changes`: places of changes, of which those in progress are waited for at the end.
    pub(crate) fn start(
        router: &Router,
        sockets: Vec<Socket>,
        chore: Chore,
        changes: Arc<Semaphore>,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = watch::channel(false);
        let paths = sockets
            .iter()
            .filter_map(|socket| if let Socket::Unix(_, path) = socket { Some(path.clone()) } else { None });
        let paths = paths.collect();
        let router = router.clone();
        let thread = std::thread::Builder::new().name("penstock-admin".into()).spawn(move || {
            runtime.spawn(async move {
                loop {
                    tokio::time::sleep(CHORE_EACH).await;
                    // Without it no session at the console would be looked at again.
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(&chore)) {
                        tracing::error!(panic = message(panic.as_ref()), "background work of the admin API panicked");
                    }
                }
            });
            runtime.block_on(async {
                serve(router, sockets, stopped).await;
                // Changes whose client has left. Err: one takes too long.
                let _ = tokio::time::timeout(STOP_GRACE, changes.acquire_many(CHANGES_MAX)).await;
            });
            runtime.shutdown_timeout(Duration::from_millis(100));
        })?;
        Ok(Self { stop, thread: Some(thread), sockets: paths })
    }

    /// Stops accepting, waits for answers in progress, then returns.
    pub(crate) fn stop(&mut self) {
        for path in self.sockets.drain(..) {
            // Gone already is as good.
            let _ = std::fs::remove_file(path);
        }
        // Err: the thread has ended.
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn serve(router: Router, sockets: Vec<Socket>, stopped: watch::Receiver<bool>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut listeners = JoinSet::new();
    for socket in sockets {
        listeners.spawn(accept(socket, router.clone(), places.clone(), stopped.clone()));
    }
    while listeners.join_next().await.is_some() {}
}

/// Accepts until stopped, then waits for the connections.
async fn accept(socket: Socket, router: Router, places: Arc<Semaphore>, mut stopped: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    let listener = match Listener::new(socket) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "the admin API could not start on its socket"),
    };
    let stop = stopped.clone();
    loop {
        let accepted = tokio::select! {
            biased;
            _ = stopped.wait_for(|stop| *stop) => break,
            _ = connections.join_next(), if !connections.is_empty() => continue,
            accepted = listener.accept() => accepted,
        };
        let (io, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection to the admin API could not be accepted");
                // No descriptors left, as a rule: some may be back soon.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(place) = places.clone().try_acquire_owned() else {
            connections.spawn(refuse(io));
            continue;
        };
        let (router, stop) = (router.clone(), stop.clone());
        connections.spawn(async move {
            connection(io, peer, router, stop).await;
            drop(place);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(STOP_GRACE, async { while connections.join_next().await.is_some() {} }).await;
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn new(socket: Socket) -> io::Result<Self> {
        match socket {
            Socket::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                TcpListener::from_std(listener).map(Self::Tcp)
            }
            Socket::Unix(listener, _) => {
                listener.set_nonblocking(true)?;
                UnixListener::from_std(listener).map(Self::Unix)
            }
        }
    }

    async fn accept(&self) -> io::Result<(Box<dyn Io>, Option<IpAddr>)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok((Box::new(stream), Some(peer.ip().to_canonical())))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                Ok((Box::new(stream), None))
            }
        }
    }
}

async fn refuse(mut io: Box<dyn Io>) {
    let _ = tokio::time::timeout(Duration::from_secs(1), async {
        io.write_all(FULL).await?;
        io.shutdown().await
    })
    .await;
}

async fn connection(io: Box<dyn Io>, peer: Option<IpAddr>, router: Router, mut stopped: watch::Receiver<bool>) {
    let streams: Arc<AtomicUsize> = Arc::default();
    let link = Link { streams: streams.clone(), stopped: stopped.clone() };
    let router = router.layer(axum::Extension(Peer(peer))).layer(axum::Extension(link));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(io), TowerToHyperService::new(router));
    let mut connection = std::pin::pin!(connection);
    let end = async {
        tokio::select! {
            _ = stopped.wait_for(|stop| *stop) => {}
            () = tokio::time::sleep(CONNECTION_LIFE) => {}
        }
    };
    tokio::select! {
        // Err: the client broke the connection or the rules; there is nobody to tell.
        _ = connection.as_mut() => return,
        () = end => {}
    }
    // An idle connection closes at once: a request that has come by now is answered first.
    if late::last_look(CONNECTIONS_MAX, connection.as_mut()).await.is_some() {
        return;
    }
    connection.as_mut().graceful_shutdown();
    let streamed = async {
        while streams.load(Ordering::Acquire) > 0 && !*stopped.borrow() {
            tokio::time::sleep(STREAM_LOOK).await;
        }
    };
    tokio::select! {
        _ = connection.as_mut() => return,
        () = streamed => {}
    }
    let _ = tokio::time::timeout(STOP_GRACE + HEAD_TIMEOUT, connection).await;
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[test]
    fn the_refusal_of_a_connection_is_http() {
        let text = std::str::from_utf8(FULL).expect("text");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        assert!(
            head.contains(&format!("content-length: {}\r\n", body.len()))
                || head.ends_with(&format!("content-length: {}", body.len()))
        );
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }

    #[tokio::test]
    async fn a_request_that_has_come_when_its_connection_ends_is_answered() {
        let router = Router::new().route("/", axum::routing::get(async || "here"));
        // Which of two things that are ready is seen first is drawn for each connection.
        for _ in 0..32 {
            let (mut client, io) = tokio::io::duplex(4096);
            let (stop, stopped) = watch::channel(false);
            let served = tokio::spawn(connection(Box::new(io), None, router.clone(), stopped));
            let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
            client.write_all(request).await.expect("room");
            let mut text = vec![0; 4096];
            assert!(client.read(&mut text).await.expect("an answer") > 0);
            client.write_all(request).await.expect("room");
            stop.send(true).expect("heard");
            let length = client.read(&mut text).await.expect("an answer");
            let text = String::from_utf8_lossy(&text[..length]);
            assert!(text.starts_with("HTTP/1.1 200"), "{text:?}");
            served.await.expect("no panic");
        }
    }

    #[test]
    fn the_usual_address_gives_way_and_a_wish_does_not() {
        let taken = StdTcpListener::bind("127.0.0.1:0").expect("a port");
        let address = taken.local_addr().expect("bound");
        assert!(bind(AdminListen::At(address), Duration::ZERO).is_err());
        assert!(matches!(bind(AdminListen::Usual, Duration::ZERO), Ok(Some(Socket::Tcp(_)))));
        assert!(matches!(bind(AdminListen::Usual, Duration::ZERO), Ok(Some(Socket::Tcp(_)))));
        assert!(matches!(bind(AdminListen::Off, Duration::ZERO), Ok(None)));
        let free = std::thread::spawn(move || {
            std::thread::sleep(TAKEOVER_PAUSE);
            drop(taken);
        });
        assert!(bind(AdminListen::At(address), Duration::from_secs(10)).is_ok(), "it was given up in time");
        free.join().expect("no panic");
    }
}
