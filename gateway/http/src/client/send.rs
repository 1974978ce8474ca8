//! Exchange of one request and one head. Both directions run at the same time, so that an upstream that answers before
//! it has read the whole request is heard.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::body::Body;
use super::error::{ClientError, Fault};
use super::head::{AnswerHead, HeadReader};
use super::stream::Stream;
use super::{Client, Deadlines, Outgoing, Response, Sent, within};
use crate::late;

/// Largest body in bytes that is sent in one write with the head.
const JOINED_BYTES_MAX: usize = 16 * 1024;
/// Time after the end of a request within which a used connection that closes without a byte was closed before the request
/// came: a round trip, and a peer that is slow to say so. After that the peer may have worked on the request.
const STALE_WITHIN: Duration = Duration::from_secs(1);
/// Bytes of one read while waiting for a head.
const READ_BYTES: usize = 16 * 1024;

thread_local! {
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BYTES].into_boxed_slice());
}

/// Sends a request on the connection; `used`: the connection has carried a request before.
pub(super) async fn exchange(
    client: &Client,
    stream: Stream,
    used: bool,
    request: &Outgoing,
    deadlines: &Deadlines,
) -> Result<Response, ClientError> {
    let mut sending = Sending {
        stream,
        used,
        pieces: pieces(client, request),
        sent: 0,
        is_out: request.sent.clone(),
        out_at: None,
        lost: false,
        received: Vec::new(),
        reader: HeadReader::new(client.redirects),
    };
    let limit = within(deadlines.head, deadlines.whole);
    let (head, at) = late::within(limit, poll_fn(|context| sending.poll(context)))
        .await
        .ok_or_else(|| ClientError::new(Fault::HeadTimeout, format!("no answer within {} ms", limit.as_millis())))??;
    sending.is_out.set();
    let complete = sending.sent == sending.pieces.len();
    let early = sending.received.split_off(at);
    let AnswerHead { status, headers, end, keep_alive } = head;
    if status == 101 {
        let body = Body::empty();
        return Ok(Response { status, headers, body, upgraded: Some((sending.stream, early)) });
    }
    let idle = (complete && keep_alive).then(|| client.idle.clone());
    let body = Body::new(sending.stream, end, early, idle, deadlines.silence, deadlines.whole);
    Ok(Response { status, headers, body, upgraded: None })
}

struct Sending {
    stream: Stream,
    used: bool,
    pieces: Vec<Bytes>,
    /// Number of pieces of the request that have been written whole.
    sent: usize,
    /// Signal set when all pieces have been written.
    is_out: Sent,
    /// Time when all pieces had been written.
    out_at: Option<Instant>,
    /// True if writing has failed; an answer may still arrive.
    lost: bool,
    received: Vec<u8>,
    reader: HeadReader,
}

impl Sending {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(AnswerHead, usize), ClientError>> {
        self.poll_write(context);
        loop {
            let read = SCRATCH.with_borrow_mut(|scratch| {
                let mut buf = ReadBuf::new(scratch);
                let read = Pin::new(&mut self.stream).poll_read(context, &mut buf);
                self.received.extend_from_slice(buf.filled());
                read.map_ok(|()| buf.filled().len())
            });
            match read {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(self.ended(""))),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(self.ended(&format!(" ({})", error.kind())))),
                Poll::Ready(Ok(_)) => match self.reader.read(&mut self.received) {
                    Ok(None) => {}
                    Ok(Some(head)) => return Poll::Ready(Ok(head)),
                    Err(error) => return Poll::Ready(Err(error)),
                },
            }
        }
    }

    fn poll_write(&mut self, context: &mut Context<'_>) {
        while !self.lost && self.sent < self.pieces.len() {
            let piece = &mut self.pieces[self.sent];
            match Pin::new(&mut self.stream).poll_write(context, piece) {
                Poll::Pending => return,
                Poll::Ready(Ok(0) | Err(_)) => self.lost = true,
                Poll::Ready(Ok(count)) => {
                    piece.advance(count);
                    self.sent += usize::from(piece.is_empty());
                    if self.sent == self.pieces.len() {
                        self.is_out.set();
                        self.out_at = Some(Instant::now());
                    }
                }
            }
        }
        // TLS holds records back until flushed; plain sockets have nothing to flush.
        if !self.lost
            && let Poll::Ready(Err(_)) = Pin::new(&mut self.stream).poll_flush(context)
        {
            self.lost = true;
        }
    }

    fn ended(&self, why: &str) -> ClientError {
        let is_early = self.out_at.is_none_or(|at| at.elapsed() < STALE_WITHIN);
        if self.used && self.received.is_empty() && is_early {
            return ClientError::new(Fault::Stale, "an idle connection was closed by the other side");
        }
        ClientError::new(Fault::Closed, format!("the connection ended before the answer{why}"))
    }
}

/// Head and body as they are written: one piece if the body is small.
fn pieces(client: &Client, request: &Outgoing) -> Vec<Bytes> {
    let target = client.target();
    let length: usize = request.body.iter().map(Bytes::len).sum();
    let joined = length <= JOINED_BYTES_MAX;
    let mut head = Vec::with_capacity(512 + if joined { length } else { 0 });
    for part in [request.method.as_str(), " ", &target.base, &request.path, " HTTP/1.1\r\nhost: ", &target.authority] {
        head.extend_from_slice(part.as_bytes());
    }
    head.extend_from_slice(b"\r\naccept-encoding: identity\r\n");
    for (name, value) in &request.headers {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    if length > 0 || request.method == http::Method::POST {
        head.extend_from_slice(format!("content-length: {length}\r\n").as_bytes());
    }
    head.extend_from_slice(b"\r\n");
    if joined {
        request.body.iter().for_each(|piece| head.extend_from_slice(piece));
        return vec![head.into()];
    }
    let mut out = vec![head.into()];
    out.extend(request.body.iter().filter(|piece| !piece.is_empty()).cloned());
    out
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;

    /// Fault of a request whose connection ends without a byte of an answer. `out_for`: time since it was written whole; `None`:
    /// it was not.
    async fn fault(used: bool, out_for: Option<Duration>) -> Fault {
        let (stream, peer) = UnixStream::pair().expect("sockets");
        drop(peer);
        let mut sending = Sending {
            stream: Stream::Unix(stream),
            used,
            pieces: if out_for.is_some() { Vec::new() } else { vec![Bytes::from_static(b"GET")] },
            sent: 0,
            is_out: Sent::default(),
            out_at: out_for.map(|time| Instant::now().checked_sub(time).expect("the clock has run for so long")),
            lost: false,
            received: Vec::new(),
            reader: HeadReader::new(false),
        };
        poll_fn(|context| sending.poll(context)).await.expect_err("no answer").fault
    }

    #[tokio::test]
    async fn only_a_connection_that_was_dead_already_is_replaced() {
        assert_eq!(fault(true, None).await, Fault::Stale);
        assert_eq!(fault(true, Some(Duration::ZERO)).await, Fault::Stale);
        // The provider may have worked on it meanwhile, and bills it.
        assert_eq!(fault(true, Some(STALE_WITHIN)).await, Fault::Closed);
        assert_eq!(fault(true, Some(Duration::from_secs(300))).await, Fault::Closed);
        assert_eq!(fault(false, None).await, Fault::Closed);
        assert_eq!(fault(false, Some(Duration::ZERO)).await, Fault::Closed);
    }
}
