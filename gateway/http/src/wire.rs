//! Client side of an HTTP/1 connection during one request: writes under a deadline, and the watch for a client that
//! leaves.

use std::future::poll_fn;
use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::task::{Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use pingora_core::protocols::Stream;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf};
use tokio::time::timeout;

use super::exchange::Gone;
use super::response::{Parts, Response};

/// Most bytes of pipelined requests during an answer; a client that sends more counts as gone.
const AHEAD_BYTES_MAX: usize = 64 * 1024;
/// Bytes of one read during an answer, when the client usually sends nothing.
const AHEAD_READ_BYTES: usize = 1024;
/// Most bytes that are discarded before a connection with unread bytes is closed, so that the client gets the answer
/// instead of a reset.
const LINGER_BYTES_MAX: usize = 1024 * 1024;
/// Time limit for discarding a client's unread bytes before the close.
const LINGER: Duration = Duration::from_secs(2);

/// HTTP/1 connection during one request, with its buffer and response.
#[derive(Debug)]
pub(super) struct Wire {
    /// Transport stream to the client: TCP, TLS or a Unix socket.
    pub(super) stream: Stream,
    /// Received bytes that are not used yet: of the request's body, then of the next request.
    pub(super) buf: BytesMut,
    /// Longest time that a write may make no progress; then the client is gone.
    pub(super) stall: Duration,
    /// Response in progress; `None` until its head is rendered.
    pub(super) response: Option<Response>,
}

impl Wire {
    /// Sends a piece of the body, with the head in front if it has not gone out yet.
    pub(super) async fn send(&mut self, payload: Bytes, last: bool) -> Result<(), Gone> {
        let parts = self.response.as_mut().ok_or(Gone)?.piece(payload, last).map_err(|_| Gone)?;
        self.put(parts).await
    }

    /// Writes the parts and flushes; empty parts cause no write.
    pub(super) async fn put(&mut self, parts: Parts) -> Result<(), Gone> {
        let Parts { front, payload, tail } = parts;
        if front.is_empty() && payload.is_empty() && tail.is_empty() {
            return Ok(());
        }
        let stream = &mut self.stream;
        let write = async move {
            if payload.is_empty() {
                stream.write_all(&front).await?;
            } else {
                stream.write_all_buf(&mut front.chain(payload).chain(tail)).await?;
            }
            stream.flush().await
        };
        let mut write = pin!(write);
        // As a rule the socket takes the bytes at once, and no timer is needed.
        let written = match poll_fn(|context| Poll::Ready(write.as_mut().poll(context))).await {
            Poll::Ready(written) => written,
            Poll::Pending => timeout(self.stall, write).await.map_err(|_| Gone)?,
        };
        written.map_err(|_| Gone)
    }

    /// Completes when the client leaves; a half close counts as leaving. Bytes that the client sends ahead are kept,
    /// within a bound. Cancel-safe.
    pub(super) async fn gone(&mut self) -> Gone {
        poll_fn(|context| {
            let mut scratch = [const { MaybeUninit::uninit() }; AHEAD_READ_BYTES];
            loop {
                let mut read = ReadBuf::uninit(&mut scratch);
                let outcome = ready!(Pin::new(&mut self.stream).poll_read(context, &mut read));
                let bytes = read.filled();
                if outcome.is_err() || bytes.is_empty() || self.buf.len() + bytes.len() > AHEAD_BYTES_MAX {
                    return Poll::Ready(Gone);
                }
                self.buf.extend_from_slice(bytes);
            }
        })
        .await
    }

    /// Closes without the end of a begun response, so that no client takes it for complete.
    pub(super) async fn cut(mut self) {
        let front = self.response.as_mut().map(Response::take_head).unwrap_or_default();
        if self.put(Parts { front, payload: Bytes::new(), tail: b"" }).await.is_ok() {
            let _ = timeout(self.stall, AsyncWriteExt::shutdown(&mut self.stream)).await;
        }
    }

    /// Closes after a complete response. `unread`: bytes of the client are still to come, and are discarded.
    pub(super) async fn close(self, unread: bool) {
        let Self { mut stream, buf, stall, .. } = self;
        let unread = unread || !buf.is_empty();
        drop(buf);
        if matches!(timeout(stall, AsyncWriteExt::shutdown(&mut stream)).await, Ok(Ok(()))) && unread {
            let _ = timeout(LINGER, drain(&mut stream)).await;
        }
    }
}

async fn drain(stream: &mut Stream) {
    let (mut scratch, mut bytes) = (vec![0; 4096], 0);
    while bytes < LINGER_BYTES_MAX {
        match stream.read(&mut scratch).await {
            Ok(read @ 1..) => bytes += read,
            _ => return,
        }
    }
}
