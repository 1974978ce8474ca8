//! Connection to a ZeroMQ socket of a foreign inference server (ZMTP).

use std::io::{Error, ErrorKind, Result};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use penstock_router::foreign::zmtp::{Role, Zmtp};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Largest message in bytes. A server sends one per step, and a token takes five bytes at most: enough for a step of
/// more than a million tokens, where servers compute some ten thousand. A message is held twice while it arrives, and
/// never unpacked as a whole.
const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// Most bytes that are read from the socket at once.
const READ_BYTES: usize = 64 * 1024;

/// Time limit for connecting and the ZMTP handshake.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest silence of the server within a replay; then the replay has failed.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit of a whole replay; no new events are taken meanwhile.
const REPLAY_WHOLE: Duration = Duration::from_secs(120);
/// Most batches of one replay; a server keeps ten thousand unless configured otherwise.
const REPLAY_BATCHES_MAX: usize = 1 << 18;

/// Sequence number in the message that ends a replay.
const REPLAY_END: [u8; 8] = [0xff; 8];

/// Endpoint of a ZeroMQ socket: `tcp://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(String);

impl Endpoint {
    /// Parses an endpoint.
    ///
    /// # Errors
    /// Describes the expected form.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let address = text.strip_prefix("tcp://").ok_or("must be tcp://HOST:PORT")?;
        let (host, port) = address.rsplit_once(':').ok_or("must be tcp://HOST:PORT")?;
        if host.is_empty() || host.contains('*') || port.parse::<u16>().map_or(true, |port| port == 0) {
            return Err("must be tcp://HOST:PORT of the server that publishes".into());
        }
        Ok(Self(address.to_owned()))
    }

    /// Host name or address of the endpoint.
    pub fn host(&self) -> &str {
        self.0.rsplit_once(':').map_or("", |(host, _)| host).trim_start_matches('[').trim_end_matches(']')
    }

    /// Endpoint with this port at another address.
    pub fn at(&self, address: IpAddr) -> Self {
        let port = self.0.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or_default();
        Self(SocketAddr::new(address, port).to_string())
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "tcp://{}", self.0)
    }
}

/// Connection to a ZeroMQ socket, after its handshake.
pub(super) struct Connection {
    stream: TcpStream,
    zmtp: Zmtp,
    buffer: Box<[u8]>,
}

impl Connection {
    /// Connects and completes the handshake, within ten seconds.
    pub(super) async fn open(endpoint: &Endpoint, role: Role) -> Result<Self> {
        let opening = async {
            let stream = TcpStream::connect(&endpoint.0).await?;
            // A subscriber sends nothing: without probes a server that vanished would be believed for ever.
            penstock_link::watch(&stream)?;
            let mut connection =
                Self { stream, zmtp: Zmtp::new(role, MESSAGE_BYTES_MAX), buffer: vec![0; READ_BYTES].into() };
            while !connection.zmtp.is_open() {
                connection.flush().await?;
                connection.read().await?;
            }
            connection.flush().await?;
            Ok(connection)
        };
        timeout(OPEN_TIMEOUT, opening).await.map_err(|_| Error::from(ErrorKind::TimedOut))?
    }

    /// Waits for the next message. Cancel-safe: received bytes are kept.
    pub(super) async fn message(&mut self) -> Result<Vec<Vec<u8>>> {
        loop {
            if let Some(message) = self.zmtp.message() {
                return Ok(message);
            }
            self.read().await?;
        }
    }

    /// Returns the next message if it has arrived completely.
    pub(super) fn ready_message(&mut self) -> Option<Vec<Vec<u8>>> {
        self.zmtp.message()
    }

    async fn flush(&mut self) -> Result<()> {
        let output = self.zmtp.take_output();
        self.stream.write_all(&output).await
    }

    async fn read(&mut self) -> Result<()> {
        let count = self.stream.read(&mut self.buffer).await?;
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.zmtp.feed(&self.buffer[..count]).map_err(|error| Error::new(ErrorKind::InvalidData, error))
    }
}

/// Requests the batches from number `from` on that the server still keeps, and passes each to `found`, in order.
pub(super) async fn replay(endpoint: &Endpoint, from: u64, mut found: impl FnMut(Vec<Vec<u8>>)) -> Result<()> {
    let replaying = async {
        let mut connection = Connection::open(endpoint, Role::Dealer).await?;
        connection.zmtp.send(&[b"", &from.to_be_bytes()]);
        connection.flush().await?;
        for _ in 0..REPLAY_BATCHES_MAX {
            let message = timeout(REPLAY_TIMEOUT, connection.message()).await;
            let message = message.map_err(|_| Error::from(ErrorKind::TimedOut))??;
            if message.len() >= 2 && message[message.len() - 2] == REPLAY_END {
                return Ok(());
            }
            found(message);
        }
        Err(Error::new(ErrorKind::InvalidData, "a replay without an end"))
    };
    timeout(REPLAY_WHOLE, replaying).await.map_err(|_| Error::from(ErrorKind::TimedOut))?
}
