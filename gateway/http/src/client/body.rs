//! Body of an upstream's answer, read as it arrives.
//!
//! A silent stream holds its socket, a timer and a few words: bytes are read into a buffer of the thread, and their
//! payload is appended to the caller's buffer. Dropping a body before its end closes the connection, which tells an
//! upstream to stop.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::error::{ClientError, Fault};
use super::head::BodyEnd;
use super::pool::Idle;
use super::stream::Stream;
use crate::chunked::Decoder;
use crate::late;

/// Most bytes that one call of a read appends to the caller's buffer.
pub const TAKE_BYTES_MAX: usize = 64 * 1024;

thread_local! {
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; TAKE_BYTES_MAX].into_boxed_slice());
}

#[derive(Debug)]
enum Frame {
    Length(u64),
    Chunked(Decoder),
    Close,
    Done,
}

/// Body of an answer that is being read from the upstream's connection.
#[derive(Debug)]
pub struct Body {
    stream: Option<Stream>,
    frame: Frame,
    /// Bytes of the body that arrived together with the head.
    early: Vec<u8>,
    /// Pool for the connection after a complete body; `None`: it is closed.
    idle: Option<Arc<Idle>>,
    silence: Duration,
    deadline: Option<Instant>,
    /// Time by which the reader's first content must arrive; an additional bound to `deadline`.
    limit: Option<Instant>,
    heard: Instant,
    /// Number of looks at the stream since it has been silent for too long.
    looks: usize,
    timer: Option<Pin<Box<Sleep>>>,
    /// Error to report at the next call, after the bytes before it.
    failed: Option<ClientError>,
}

impl Body {
    /// Empty body of an answer that has none; holds no connection.
    pub(super) fn empty() -> Self {
        Self {
            stream: None,
            frame: Frame::Done,
            early: Vec::new(),
            idle: None,
            silence: Duration::ZERO,
            deadline: None,
            limit: None,
            heard: Instant::now(),
            looks: 0,
            timer: None,
            failed: None,
        }
    }

    /// Creates a body; `idle`: pool for the connection afterwards, if it can be reused.
    pub(super) fn new(
        stream: Stream,
        end: BodyEnd,
        early: Vec<u8>,
        idle: Option<Arc<Idle>>,
        silence: Duration,
        deadline: Option<Instant>,
    ) -> Self {
        let frame = match end {
            BodyEnd::Length(length) => Frame::Length(length),
            BodyEnd::Chunked => Frame::Chunked(Decoder::default()),
            BodyEnd::Close => Frame::Close,
        };
        let mut body = Self {
            stream: Some(stream),
            frame,
            early,
            idle,
            silence,
            deadline,
            limit: None,
            heard: Instant::now(),
            looks: 0,
            timer: None,
            failed: None,
        };
        if matches!(body.frame, Frame::Length(0)) {
            body.end();
        }
        body
    }

    /// Changes the longest silence and restarts its clock.
    pub fn set_silence(&mut self, silence: Duration) {
        self.silence = silence;
        (self.heard, self.looks) = (Instant::now(), 0);
        self.timer = None;
    }

    /// Sets or clears a time by which the answer must have brought the content that its reader waits for.
    pub fn limit(&mut self, limit: Option<Instant>) {
        self.limit = limit;
        self.timer = None;
    }

    fn due(&self) -> Option<Instant> {
        [self.deadline, self.limit].into_iter().flatten().min()
    }

    /// Appends available bytes to `out`, at most about 64 KiB. `Ok(true)`: more can follow; `Ok(false)`: the body is
    /// complete.
    ///
    /// # Errors
    /// The body was cut off, silent for too long, late, or invalid; reported after the bytes before it.
    pub fn poll_chunk(&mut self, context: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<Result<bool, ClientError>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Err(error));
        }
        let before = out.len();
        match ready!(self.poll_some(context, out)) {
            Err(error) if out.len() > before => {
                self.failed = Some(error);
                Poll::Ready(Ok(true))
            }
            done => Poll::Ready(done),
        }
    }

    fn poll_some(&mut self, context: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<Result<bool, ClientError>> {
        let before = out.len();
        if !self.early.is_empty() {
            let early = std::mem::take(&mut self.early);
            self.feed(&early, out)?;
        }
        loop {
            if matches!(self.frame, Frame::Done) {
                return Poll::Ready(Ok(false));
            }
            if out.len() - before >= TAKE_BYTES_MAX {
                return Poll::Ready(Ok(true));
            }
            match self.poll_read(context, out) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending if out.len() > before => {
                    (self.heard, self.looks) = (Instant::now(), 0);
                    if self.due().is_some_and(|due| self.heard >= due) {
                        return Poll::Ready(Err(late()));
                    }
                    return Poll::Ready(Ok(true));
                }
                Poll::Pending => return self.poll_timer(context),
            }
        }
    }

    fn poll_read(&mut self, context: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<Result<(), ClientError>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut buf = ReadBuf::new(scratch);
            let Some(stream) = &mut self.stream else { return Poll::Ready(Ok(())) };
            let read = ready!(Pin::new(stream).poll_read(context, &mut buf));
            let bytes = buf.filled();
            Poll::Ready(match read {
                Ok(()) if bytes.is_empty() => self.closed(None),
                Ok(()) => self.feed(bytes, out),
                Err(error) => self.closed(Some(&error)),
            })
        })
    }

    /// Handles the end of the connection: complete for a close-delimited body, an error for any other.
    fn closed(&mut self, error: Option<&io::Error>) -> Result<(), ClientError> {
        self.stream = None;
        if matches!(self.frame, Frame::Close) && error.is_none() {
            self.frame = Frame::Done;
            return Ok(());
        }
        let why = error.map_or_else(String::new, |error| format!(" ({})", error.kind()));
        Err(ClientError::new(Fault::Cut, format!("the connection ended in the middle of the answer{why}")))
    }

    fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), ClientError> {
        let used = match &mut self.frame {
            Frame::Length(left) => {
                let take = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                out.extend_from_slice(&bytes[..take]);
                *left -= take as u64;
                if *left > 0 {
                    return Ok(());
                }
                take
            }
            Frame::Chunked(decoder) => {
                let used = decoder.feed(bytes, out);
                let used =
                    used.map_err(|fault| ClientError::garbled(format!("the chunked body is not valid: {fault}")))?;
                if !decoder.is_done() {
                    return Ok(());
                }
                used
            }
            Frame::Close => {
                out.extend_from_slice(bytes);
                return Ok(());
            }
            Frame::Done => 0,
        };
        if used < bytes.len() {
            // Unsolicited bytes follow: the connection cannot be trusted with another request.
            self.idle = None;
        }
        self.end();
        Ok(())
    }

    fn end(&mut self) {
        self.frame = Frame::Done;
        self.timer = None;
        if let (Some(stream), Some(idle)) = (self.stream.take(), self.idle.take())
            && self.early.is_empty()
        {
            idle.put(stream);
        }
    }

    /// Waits for the silence limit or the deadline. The timer is only moved when it fires, so a busy stream never
    /// touches it.
    fn poll_timer(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, ClientError>> {
        loop {
            let (quiet, last) = (self.heard + self.silence, self.due());
            let due = last.map_or(quiet, |last| last.min(quiet));
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
            ready!(timer.as_mut().poll(context));
            let now = Instant::now();
            if last.is_some_and(|last| now >= last) {
                return Poll::Ready(Err(late()));
            }
            if now >= quiet && self.looks < late::turns(late::SOCKETS_MAX) {
                // The stream is read once more after each turn of the driver.
                self.looks += 1;
                timer.as_mut().reset(now + late::TURN);
                continue;
            }
            if now >= quiet {
                let message = format!("the answer was silent for {} ms", self.silence.as_millis());
                return Poll::Ready(Err(ClientError::new(Fault::IdleTimeout, message)));
            }
            timer.as_mut().reset(due);
        }
    }
}

fn late() -> ClientError {
    ClientError::new(Fault::Deadline, "the answer took longer than it may")
}
