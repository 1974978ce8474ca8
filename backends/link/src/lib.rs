//! Connections between the members of a pool: gateway to worker, worker to worker.
//!
//! A Unix socket is guarded by the file system. On TCP both ends prove the pool key (`penstock_proto::handshake`), and
//! where the network is not trusted everything goes through TLS with certificates at both ends ([`Tls`]): then nobody
//! else reads prompts or KV, or changes them on the way. The two are independent: TLS says which machines may talk,
//! the key which pool they belong to.

#![forbid(unsafe_code)]

mod beside;
mod tls;

use penstock_proto::Address;
use rustix::net::sockopt;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

pub use beside::{Came, dial_unix, send_beside};
pub use tls::{Tls, TlsError, TlsFiles, public_authorities, public_client};

/// Reading half of a connection.
pub type Reader = Box<dyn AsyncRead + Send + Unpin>;
/// Writing half of a connection.
pub type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// Longest time to connect, TLS included.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// Time after which a vanished peer (cable, power) fails the connection, in milliseconds.
const VANISHED_MS: u32 = 10_000;

/// Silence of a peer after which the kernel probes it, and the pause between probes. A side that only reads sends nothing
/// whose loss could show.
const PROBE_AFTER: Duration = Duration::from_secs(5);
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// Connects to a member of the pool. `tls` applies to TCP; a socket file needs none.
///
/// # Errors
/// The listener is absent, the peer has no certificate of our authorities for this host, or it took longer than
/// [`CONNECT_DEADLINE`].
pub async fn dial(address: &Address, tls: Option<&Tls>) -> io::Result<(Reader, Writer)> {
    within_deadline(async {
        match address {
            Address::Unix(path) => {
                let (reader, writer) = UnixStream::connect(path).await?.into_split();
                Ok((Box::new(reader) as Reader, Box::new(writer) as Writer))
            }
            Address::Tcp(host_port) => {
                let stream = ready(TcpStream::connect(host_port).await?)?;
                match tls {
                    Some(tls) => tls.connect(host_port, stream).await,
                    None => Ok(split(stream)),
                }
            }
        }
    })
    .await
}

/// Opens an accepted TCP connection, with TLS if given.
///
/// # Errors
/// With `tls`: the peer has no certificate of our authorities, or it took longer than [`CONNECT_DEADLINE`].
pub async fn accepted(stream: TcpStream, tls: Option<&Tls>) -> io::Result<(Reader, Writer)> {
    let stream = ready(stream)?;
    match tls {
        Some(tls) => within_deadline(tls.accept(stream)).await,
        None => Ok(split(stream)),
    }
}

async fn within_deadline<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(CONNECT_DEADLINE, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

fn ready(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    watch(&stream)?;
    Ok(stream)
}

/// Makes a connection fail about ten seconds after its peer has vanished without a word (cable, power), whether this side
/// writes or only reads.
///
/// # Errors
/// The operating system refuses an option of the socket.
pub fn watch(stream: &TcpStream) -> io::Result<()> {
    keep_alive(stream, PROBE_AFTER, PROBE_EVERY)?;
    sockopt::set_tcp_user_timeout(stream, VANISHED_MS)?;
    Ok(())
}

/// Has the system probe a connection that was silent for `after`, and again every `every` (whole seconds), so that middleboxes do
/// not forget it and a peer that is gone is noticed.
///
/// # Errors
/// The operating system refuses an option of the socket.
pub fn keep_alive(stream: &TcpStream, after: Duration, every: Duration) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, after)?;
    sockopt::set_tcp_keepintvl(stream, every)?;
    Ok(())
}

fn split(stream: TcpStream) -> (Reader, Writer) {
    let (reader, writer) = stream.into_split();
    (Box::new(reader), Box::new(writer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn both_ends_are_probed_while_they_only_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let dialled = TcpStream::connect(listener.local_addr().expect("it is bound")).await.expect("it listens");
        let (accepted, _) = listener.accept().await.expect("somebody dialled");
        for stream in [dialled, accepted] {
            let stream = ready(stream).expect("a new connection");
            assert!(sockopt::socket_keepalive(&stream).expect("Linux says so"));
            let first = sockopt::tcp_keepidle(&stream).expect("Linux says so");
            let next = sockopt::tcp_keepintvl(&stream).expect("Linux says so");
            let most = sockopt::tcp_user_timeout(&stream).expect("Linux says so");
            assert_eq!((first, next, most), (PROBE_AFTER, PROBE_EVERY, VANISHED_MS));
        }
    }

    #[tokio::test]
    async fn a_connection_is_kept_alive_at_the_times_asked_for() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let stream = TcpStream::connect(listener.local_addr().expect("it is bound")).await.expect("it listens");
        let (after, every) = (Duration::from_secs(61), Duration::from_secs(16));
        keep_alive(&stream, after, every).expect("a new connection");
        assert!(sockopt::socket_keepalive(&stream).expect("Linux says so"));
        let set = (sockopt::tcp_keepidle(&stream), sockopt::tcp_keepintvl(&stream));
        assert_eq!(set, (Ok(after), Ok(every)));
    }
}
