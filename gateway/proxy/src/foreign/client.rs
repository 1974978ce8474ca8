//! A connection to a ZeroMQ socket of a foreign server.

use std::io::{Error, ErrorKind, Result};
use std::time::Duration;

use penstock_router::foreign::zmtp::{Role, Zmtp};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Largest message. A server sends one for each of its steps, and a token takes five bytes at most: this is a step of more than a million
/// tokens, where servers compute some ten thousand. It is held twice while it comes, and never unpacked as a whole.
const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// Read at once.
const READ_BYTES: usize = 64 * 1024;

/// Until the peer is connected and has said that it is ready.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest silence within a replay.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest replay, and most batches of one: a server keeps ten thousand unless told otherwise. Meanwhile nothing new is heard.
const REPLAY_WHOLE: Duration = Duration::from_secs(120);
const REPLAY_BATCHES_MAX: usize = 1 << 18;

/// Number that ends a replay.
const REPLAY_END: [u8; 8] = [0xff; 8];

/// `tcp://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(String);

impl Endpoint {
    /// Reads it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let address = text.strip_prefix("tcp://").ok_or("must be tcp://HOST:PORT")?;
        let (host, port) = address.rsplit_once(':').ok_or("must be tcp://HOST:PORT")?;
        if host.is_empty() || host.contains('*') || port.parse::<u16>().map_or(true, |port| port == 0) {
            return Err("must be tcp://HOST:PORT of the server that publishes".into());
        }
        Ok(Self(address.to_owned()))
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "tcp://{}", self.0)
    }
}

/// A connection that is ready.
pub(super) struct Connection {
    stream: TcpStream,
    zmtp: Zmtp,
    buffer: Box<[u8]>,
}

impl Connection {
    /// Connects, within ten seconds.
    pub(super) async fn open(endpoint: &Endpoint, role: Role) -> Result<Self> {
        let opening = async {
            let stream = TcpStream::connect(&endpoint.0).await?;
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

    /// The next message. Cancel-safe: what has arrived stays.
    pub(super) async fn message(&mut self) -> Result<Vec<Vec<u8>>> {
        loop {
            if let Some(message) = self.zmtp.message() {
                return Ok(message);
            }
            self.read().await?;
        }
    }

    /// The next message, if all of it has arrived.
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

/// The batches from number `from` on that the server still has, in order, each given to `found`.
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
