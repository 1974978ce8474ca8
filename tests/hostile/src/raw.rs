//! Raw HTTP/1: bytes out, bytes in.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::PATIENCE;
use crate::upstream::MODEL;

/// Received answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Status of the first answer; 0 if there is none.
    pub status: u16,
    /// Everything received.
    pub text: String,
    /// True if the peer closed its side.
    pub closed: bool,
}

impl Reply {
    /// Value of a header of the first answer.
    pub fn header(&self, name: &str) -> Option<&str> {
        let head = self.text.split("\r\n\r\n").next().unwrap_or_default();
        head.lines()
            .find_map(|line| line.split_once(':').filter(|(have, _)| have.eq_ignore_ascii_case(name)))
            .map(|(_, value)| value.trim())
    }

    /// Number of answers.
    pub fn answers(&self) -> usize {
        self.text
            .split("HTTP/1.1 ")
            .skip(1)
            .filter(|rest| rest.as_bytes().first().is_some_and(u8::is_ascii_digit))
            .count()
    }

    /// Returns true if a chunked body has its last chunk.
    pub fn is_whole(&self) -> bool {
        self.text.ends_with("0\r\n\r\n")
    }
}

/// A raw connection.
pub struct Client {
    /// The socket.
    pub stream: TcpStream,
}

impl Client {
    /// Connects.
    pub async fn connect(address: SocketAddr) -> Self {
        Self { stream: TcpStream::connect(address).await.expect("connect") }
    }

    /// Sends bytes; a peer that has closed already is no failure of the test.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = timeout(PATIENCE, self.stream.write_all(bytes.as_ref())).await;
    }

    /// Reads until the peer closes.
    ///
    /// # Panics
    /// If the peer does not close within [`PATIENCE`].
    pub async fn until_closed(&mut self) -> Reply {
        let reply = self.until(PATIENCE, |_| false).await;
        assert!(reply.closed, "the connection stays open after: {}", reply.text);
        reply
    }

    /// Reads until the peer closes, `enough` is true, or `patience` ends.
    pub async fn until(&mut self, patience: Duration, enough: impl Fn(&str) -> bool) -> Reply {
        let (mut bytes, mut closed) = (Vec::new(), false);
        let read = async {
            let mut scratch = vec![0; 64 * 1024];
            while !enough(&String::from_utf8_lossy(&bytes)) {
                match self.stream.read(&mut scratch).await {
                    Ok(0) | Err(_) => {
                        closed = true;
                        break;
                    }
                    Ok(count) => bytes.extend_from_slice(&scratch[..count]),
                }
            }
        };
        let _ = timeout(patience, read).await;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let status = text.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)).and_then(|code| code.parse().ok());
        Reply { status: status.unwrap_or(0), text, closed }
    }

    /// Reads one whole answer with a Content-Length.
    pub async fn answer(&mut self) -> Reply {
        let whole = |text: &str| {
            let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
            let length = head
                .lines()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
            length.is_some_and(|length: usize| body.len() >= length)
        };
        self.until(PATIENCE, whole).await
    }
}

/// Sends bytes on a fresh connection and reads until the peer closes.
pub async fn send(address: SocketAddr, bytes: impl AsRef<[u8]>) -> Reply {
    let mut client = Client::connect(address).await;
    client.send(bytes).await;
    client.until_closed().await
}

/// A chat request whose prompt is `script`.
pub fn chat(script: &str, stream: bool) -> String {
    let body =
        format!(r#"{{"model":"{MODEL}","stream":{stream},"messages":[{{"role":"user","content":"{script}"}}]}}"#);
    post("/v1/chat/completions", &body)
}

/// Text of a POST request with a JSON body.
pub fn post(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Text of a GET request.
pub fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n")
}
