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
    rustix::net::sockopt::set_tcp_user_timeout(&stream, VANISHED_MS)?;
    Ok(stream)
}

fn split(stream: TcpStream) -> (Reader, Writer) {
    let (reader, writer) = stream.into_split();
    (Box::new(reader), Box::new(writer))
}
