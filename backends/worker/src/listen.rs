//! Listening socket: private from its first moment, taken over from a dead worker, never from a live one.

use crate::config::{WorkerConfig, WorkerError};
use crate::session::Host;
use penstock_link::{Reader, Tls, Writer};
use penstock_proto::Address;
use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tracing::{debug, warn};

/// Bound socket on which the worker accepts connections: a Unix socket or TCP.
pub(crate) enum Listener {
    /// Unix socket, with the lock that marks it as served; the socket file is removed at the end.
    Unix { listener: UnixListener, path: PathBuf, _lock: fs::File },
    /// TCP socket, with its bound address.
    Tcp { listener: TcpListener, address: String },
}

impl Listener {
    /// Address of the socket, with the port that was assigned for port 0.
    pub(crate) fn address(&self) -> String {
        match self {
            Listener::Unix { path, .. } => format!("unix://{}", path.display()),
            Listener::Tcp { address, .. } => format!("tcp://{address}"),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix { path, .. } = self {
            // A missing file is as good. The lock is still held, so the file is this worker's.
            let _ = fs::remove_file(path);
        }
    }
}

/// Binds the address that `config` names: a Unix socket, made private to the user, or a TCP port.
pub(crate) async fn bind(config: &WorkerConfig) -> Result<Listener, WorkerError> {
    match &config.listen {
        Address::Unix(path) => unix(path),
        Address::Tcp(host_port) => {
            let fail = |source| WorkerError::Os { what: format!("listening on {host_port}"), source };
            let listener = TcpListener::bind(host_port).await.map_err(fail)?;
            let address = listener.local_addr().map_err(fail)?.to_string();
            Ok(Listener::Tcp { listener, address })
        }
    }
}

/// Binds the address for transfers: a socket beside that of sessions, or another port of the same host. `None` if its
/// path would be too long.
pub(crate) async fn bind_transfer(config: &WorkerConfig) -> Result<Option<Listener>, WorkerError> {
    match &config.listen {
        Address::Unix(path) => match Address::unix(beside(path, "kv")) {
            Ok(Address::Unix(path)) => unix(&path).map(Some),
            _ => Ok(None),
        },
        Address::Tcp(host_port) => {
            let host = host_port.rsplit_once(':').map_or(host_port.as_str(), |(host, _)| host);
            let fail = |source| WorkerError::Os { what: format!("listening on {host} for transfers"), source };
            let listener = TcpListener::bind(format!("{host}:{}", config.transfer_port)).await.map_err(fail)?;
            let address = listener.local_addr().map_err(fail)?.to_string();
            Ok(Some(Listener::Tcp { listener, address }))
        }
    }
}

/// Binds a Unix socket. A lock file beside the socket marks the path as served; the lock ends with its process in any
/// case. Under the lock the socket is bound to a new name, made private, and moved to its own: it is never visible
/// with other permissions, and a file left by a dead worker is replaced.
fn unix(path: &Path) -> Result<Listener, WorkerError> {
    let fail = |what: &'static str| {
        let what = format!("{what} {}", path.display());
        move |source| WorkerError::Os { what, source }
    };
    let lock_path = beside(path, "lock");
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&lock_path)
        .map_err(fail("locking"))?;
    match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(WorkerError::InUse { address: path.display().to_string() }),
        Err(error) => return Err(fail("locking")(error.into())),
    }
    match fs::symlink_metadata(path) {
        Ok(file) if !file.file_type().is_socket() => return Err(WorkerError::NotASocket { path: path.into() }),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fail("looking at")(error)),
        _ => {}
    }
    // The new name is no longer than the final one may be: same directory, shorter or equal.
    let new = path.with_extension("n");
    if fs::symlink_metadata(&new).is_ok_and(|file| file.file_type().is_socket()) {
        fs::remove_file(&new).map_err(fail("removing the remains of"))?;
    }
    let listener = UnixListener::bind(&new).map_err(fail("listening on"))?;
    fs::set_permissions(&new, Permissions::from_mode(0o600)).map_err(fail("making private"))?;
    fs::rename(&new, path).map_err(fail("naming"))?;
    Ok(Listener::Unix { listener, path: path.into(), _lock: lock })
}

fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    name.into()
}

/// Accepts connections for ever; each connection is a task.
pub(crate) async fn accept(listener: Listener, host: Arc<Host>) {
    loop {
        let accepted = match &listener {
            Listener::Unix { listener, .. } => listener.accept().await.map(|(stream, _)| {
                let ours = rustix::process::geteuid().as_raw();
                if stream.peer_cred().is_ok_and(|peer| peer.uid() == ours || peer.uid() == 0) {
                    let (reader, writer) = stream.into_split();
                    spawn(&host, Incoming::Unix(Box::new(reader), Box::new(writer)));
                } else {
                    debug!("connection refused: the peer runs as another user");
                }
            }),
            Listener::Tcp { listener, .. } => {
                listener.accept().await.map(|(stream, _)| spawn(&host, Incoming::Tcp(stream)))
            }
        };
        if let Err(error) = accepted {
            // Out of descriptors, mostly: a pause lets some of them go.
            warn!(%error, "a connection could not be accepted");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// An accepted connection, before its handshake.
pub(crate) enum Incoming {
    /// Unix connection, authorized by the file system.
    Unix(Reader, Writer),
    /// TCP connection, which has to prove the pool key.
    Tcp(TcpStream),
}

impl Incoming {
    /// Returns true if the connection has to prove the pool key.
    pub(crate) fn must_prove(&self) -> bool {
        matches!(self, Incoming::Tcp(_))
    }

    /// Opens the connection, with TLS if configured.
    pub(crate) async fn open(self, tls: Option<&Tls>) -> io::Result<(Reader, Writer)> {
        match self {
            Incoming::Unix(reader, writer) => Ok((reader, writer)),
            Incoming::Tcp(stream) => penstock_link::accepted(stream, tls).await,
        }
    }
}

fn spawn(host: &Arc<Host>, incoming: Incoming) {
    let stranger = incoming.must_prove().then(|| host.strangers.enter());
    let host = Arc::clone(host);
    tokio::spawn(async move { host.serve(incoming, stranger).await });
}
