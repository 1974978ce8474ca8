//! Pool of idle connections of one target: bounded, last in first out, each kept for a short time.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, ReadBuf};

use super::stream::Stream;

/// Most idle connections per target; beyond, the oldest is closed.
const IDLE_MAX: usize = 256;
/// Longest time that a connection is kept. Closes by the server before that are noticed at the next use.
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);

/// Pool of idle connections of one target, most recently used first.
#[derive(Debug, Default)]
pub(super) struct Idle {
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Idle connections, oldest first, with the time of their return.
    streams: VecDeque<(Instant, Stream)>,
    /// True if a task runs that closes connections idle for too long.
    swept: bool,
}

impl Idle {
    /// Takes the most recently used connection that the peer still holds open.
    pub(super) fn take(&self) -> Option<Stream> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((since, mut stream)) = waiting.streams.pop_back() {
            if since.elapsed() < IDLE_TIMEOUT && is_silent(&mut stream) {
                return Some(stream);
            }
        }
        None
    }

    /// Returns a connection to the pool; spawns the sweep task if none runs.
    pub(super) fn put(self: &Arc<Self>, stream: Stream) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.streams.len() >= IDLE_MAX {
            waiting.streams.pop_front();
        }
        waiting.streams.push_back((Instant::now(), stream));
        if !std::mem::replace(&mut waiting.swept, true) {
            tokio::spawn(sweep(Arc::downgrade(self)));
        }
    }

    /// Closes connections that are too old; false: the pool is empty, and the sweep task ends.
    fn swept(&self) -> bool {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while waiting.streams.front().is_some_and(|(since, _)| since.elapsed() >= IDLE_TIMEOUT) {
            waiting.streams.pop_front();
        }
        waiting.swept = !waiting.streams.is_empty();
        waiting.swept
    }
}

async fn sweep(idle: Weak<Idle>) {
    loop {
        tokio::time::sleep(IDLE_TIMEOUT / 2).await;
        if !idle.upgrade().is_some_and(|idle| idle.swept()) {
            return;
        }
    }
}

/// Returns true if nothing was received: neither an end of the connection nor unsolicited bytes.
fn is_silent(stream: &mut Stream) -> bool {
    let mut byte = [0; 1];
    let mut context = Context::from_waker(Waker::noop());
    matches!(Pin::new(stream).poll_read(&mut context, &mut ReadBuf::new(&mut byte)), Poll::Pending)
}
