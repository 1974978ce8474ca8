//! Request bodies: read whole, within limits of size, time, rate and memory.
//!
//! Bytes that are only announced cost no memory. The buffer is charged to the memory budget before it grows, and a sender
//! must keep up a least rate in every window of time.

use std::pin::pin;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use penstock_base::error::Failure;
use penstock_proto::ErrorKind;
use pingora_core::protocols::Stream;
use pingora_core::protocols::http::ServerSession;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use super::budget::SMALL_BYTES_MAX;
use super::chunked::Decoder;
use super::late::Looked;
use super::{BodyLease, Growth, HttpLimits, h2};

/// Most bytes of one read of a request body.
const READ_BYTES: usize = 16 * 1024;

/// Complete request body with its lease of the memory budget.
#[derive(Debug)]
pub struct Body {
    /// Whole body as the client sent it, framing removed.
    pub bytes: Bytes,
    /// Memory lease; keep it for as long as data made from the bytes is queued.
    pub lease: BodyLease,
}

/// Reason why a request body was not read to its end.
#[derive(Debug)]
pub enum BodyFault {
    /// The client closed the connection; nobody is left to answer.
    Gone,
    /// The client gets this failure as its answer, and the connection closes.
    Refuse(Failure),
}

/// Limits of one request body.
#[derive(Clone, Copy)]
pub(super) struct BodyLimits {
    /// Length of a rate window.
    timeout: Duration,
    /// Slowest accepted sender, in bytes per second.
    rate_bytes_min: u64,
    pub(super) bytes_max: usize,
    /// Most sockets that may have to be looked at before a deadline counts as missed.
    sockets: usize,
}

impl From<&HttpLimits> for BodyLimits {
    fn from(limits: &HttpLimits) -> Self {
        Self {
            timeout: limits.body_timeout,
            rate_bytes_min: limits.body_rate_bytes_min.max(1),
            bytes_max: limits.body_bytes_max,
            sockets: limits.connections_max,
        }
    }
}

/// State of reading a body: bytes, memory lease, and the current rate window.
pub(super) struct Intake {
    bytes: Vec<u8>,
    lease: BodyLease,
    /// Start of the current window in which the body's rate is measured.
    window: Instant,
    /// Bytes of the body received before the current rate window began.
    before: usize,
    received: usize,
    looked: Looked,
    limits: BodyLimits,
}

impl Intake {
    /// Begins a body of which no byte is there; its first rate window began at `started`, with the request.
    pub(super) fn new(limits: BodyLimits, lease: BodyLease, started: Instant) -> Self {
        let (bytes, looked) = (Vec::new(), Looked::default());
        Self { bytes, lease, window: started, before: 0, received: 0, looked, limits }
    }

    /// Deadline of the current window. Bytes of earlier windows do not count: a fast start buys no silence later.
    fn deadline(&self) -> Instant {
        self.window + self.limits.timeout
    }

    /// Counts received bytes; a window that has reached its share ends, and the next one begins.
    fn receive(&mut self, bytes: usize) {
        self.received += bytes;
        let share = u128::from(self.limits.rate_bytes_min) * self.limits.timeout.as_millis() / 1000;
        if (self.received - self.before) as u128 >= share {
            (self.window, self.before) = (Instant::now(), self.received);
        }
    }

    /// Refusal of a body that is longer than allowed.
    pub(super) fn too_large(&self) -> BodyFault {
        let message = format!("The request body is larger than {} bytes.", self.limits.bytes_max);
        BodyFault::Refuse(Failure::new(ErrorKind::TooLarge, message))
    }

    /// Checks the size limit and charges the budget for `more` payload bytes.
    fn admit(&mut self, more: usize) -> Result<(), BodyFault> {
        let bytes = self.bytes.len() + more;
        if bytes > self.limits.bytes_max {
            return Err(self.too_large());
        }
        self.lease.cover(bytes).map_err(|why| BodyFault::Refuse(why.failure()))
    }

    /// Makes room for `more` payload bytes of a body of unknown length, and charges the budget for the whole buffer: its
    /// size doubles, or grows by an eighth where the memory for that is not there.
    fn make_room(&mut self, more: usize) -> Result<(), BodyFault> {
        let len = self.bytes.len();
        if len + more <= self.bytes.capacity() {
            return Ok(());
        }
        let Growth { double, eighth } = Growth::of(len, more, self.limits.bytes_max);
        let room = if self.admit(double - len).is_ok() { double - len } else { eighth - len };
        self.admit(room)?;
        self.bytes.reserve_exact(room);
        Ok(())
    }

    /// The whole body. Memory beyond its bytes is given back, unless it is little.
    pub(super) fn whole(mut self) -> Body {
        if self.bytes.capacity() > SMALL_BYTES_MAX && self.bytes.capacity() / 8 > self.bytes.len() / 7 {
            self.bytes.shrink_to_fit();
            self.lease.shrink(self.bytes.capacity());
        }
        Body { bytes: self.bytes.into(), lease: self.lease }
    }

    /// Reads a body of announced length from a connection of HTTP/1; `buf` holds what came with the head.
    pub(super) async fn read_length(
        &mut self,
        stream: &mut Stream,
        buf: &mut BytesMut,
        length: usize,
    ) -> Result<(), BodyFault> {
        let first = buf.split_to(buf.len().min(length));
        self.admit(first.len())?;
        self.receive(first.len());
        self.bytes.extend_from_slice(&first);
        while self.bytes.len() < length {
            let left = length - self.bytes.len();
            // Double the buffer up to the announced length: announced bytes cost no memory until they arrive.
            let room = left.min(self.bytes.len().max(READ_BYTES));
            self.admit(room)?;
            self.bytes.reserve_exact(room);
            let (deadline, sockets) = (self.deadline(), self.limits.sockets);
            let read = (&mut *stream).take(left as u64);
            let read = self.looked.in_time(deadline, sockets, pin!(read).read_buf(&mut self.bytes)).await;
            self.receive(arrived(read)?);
        }
        Ok(())
    }

    /// Reads a chunked body from a connection of HTTP/1; `buf` holds what came with the head, and then what follows the body.
    pub(super) async fn read_chunked(&mut self, stream: &mut Stream, buf: &mut BytesMut) -> Result<(), BodyFault> {
        let (mut decoder, bytes_max) = (Decoder::default(), self.limits.bytes_max);
        loop {
            // Not every byte needs to be payload: the limit is that of the payload alone.
            self.make_room(buf.len().min(bytes_max.saturating_sub(self.bytes.len())))?;
            let used = decoder.feed_up_to(bytes_max, buf, &mut self.bytes).map_err(|fault| {
                BodyFault::Refuse(Failure::new(
                    ErrorKind::Malformed,
                    format!("The chunked body is not valid: {fault}."),
                ))
            })?;
            let _ = buf.split_to(used);
            if decoder.is_done() {
                return Ok(());
            }
            if !buf.is_empty() {
                return Err(self.too_large());
            }
            tokio::task::consume_budget().await;
            buf.reserve(READ_BYTES);
            let (deadline, sockets) = (self.deadline(), self.limits.sockets);
            let read = self.looked.in_time(deadline, sockets, stream.read_buf(buf)).await;
            self.receive(arrived(read)?);
        }
    }

    /// Reads a body of HTTP/2.
    pub(super) async fn read_frames(&mut self, session: &mut ServerSession) -> Result<(), BodyFault> {
        let mut frames = h2::FrameCount::default();
        loop {
            let (deadline, sockets) = (self.deadline(), self.limits.sockets);
            match self.looked.in_time(deadline, sockets, session.read_request_body()).await {
                None => return Err(too_slow()),
                Some(Err(_)) => return Err(BodyFault::Gone),
                Some(Ok(None)) => return Ok(()),
                Some(Ok(Some(data))) => {
                    self.make_room(data.len())?;
                    self.receive(data.len());
                    self.bytes.extend_from_slice(&data);
                    frames
                        .count(self.received)
                        .map_err(|message| BodyFault::Refuse(Failure::new(ErrorKind::Malformed, message)))?;
                }
            }
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the result of an await, at its only use")]
fn arrived(read: Option<std::io::Result<usize>>) -> Result<usize, BodyFault> {
    match read {
        None => Err(too_slow()),
        Some(Ok(0) | Err(_)) => Err(BodyFault::Gone),
        Some(Ok(bytes)) => Ok(bytes),
    }
}

fn too_slow() -> BodyFault {
    BodyFault::Refuse(Failure::new(ErrorKind::ClientTimeout, "The request body was sent too slowly."))
}

/// Tells a client that waits for it to send the body.
pub(super) async fn proceed(stream: &mut Stream) -> Option<()> {
    stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.ok()?;
    stream.flush().await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BodyBudget;

    fn intake(budget: &BodyBudget, bytes_max: usize) -> Intake {
        let limits = BodyLimits { timeout: Duration::from_secs(1), rate_bytes_min: 1, bytes_max, sockets: 1 };
        Intake::new(limits, budget.lease(), Instant::now())
    }

    /// Reads a body of unknown length in pieces; returns its bytes, or the status of the refusal.
    fn grown(budget: &BodyBudget, intake: &mut Intake, pieces: usize, piece: usize) -> Result<usize, u16> {
        for _ in 0..pieces {
            match intake.make_room(piece) {
                Ok(()) => intake.bytes.extend(std::iter::repeat_n(b' ', piece)),
                Err(BodyFault::Refuse(failure)) => return Err(failure.status()),
                Err(BodyFault::Gone) => panic!("nobody left"),
            }
            let (covered, taken) = (intake.lease.bytes(), intake.bytes.capacity());
            assert!(covered >= taken, "{taken} bytes taken, {covered} charged");
            assert!(budget.bytes_held() <= 1 << 20);
        }
        Ok(intake.bytes.len())
    }

    #[test]
    fn the_buffer_of_a_body_of_unknown_length_is_charged_whole() {
        let budget = BodyBudget::new(1 << 20, 1 << 20);
        for (max, pieces, piece, answer) in [
            (1 << 20, 1 << 6, 1 << 14, Ok(1 << 20)),
            (1 << 20, 1 << 10, 1 << 10, Ok(1 << 20)),
            (1 << 20, (1 << 10) + 1, 1 << 10, Err(413)),
            (1 << 30, (1 << 10) + 1, 1 << 10, Err(503)),
            (100, 100, 1, Ok(100)),
            (100, 101, 1, Err(413)),
        ] {
            let mut read = intake(&budget, max);
            assert_eq!(grown(&budget, &mut read, pieces, piece), answer, "{pieces} of {piece}");
        }
        let mut read = intake(&budget, 1 << 20);
        assert_eq!(grown(&budget, &mut read, 33, 1 << 14), Ok(33 << 14));
        assert!(budget.bytes_held() > 60 << 14, "room for as much again");
        let body = read.whole();
        assert_eq!((body.bytes.len(), body.lease.bytes(), budget.bytes_held()), (33 << 14, 33 << 14, 33 << 14));
        drop(body);
        assert_eq!(budget.bytes_held(), 0);
    }
}
