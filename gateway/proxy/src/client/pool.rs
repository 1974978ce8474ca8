//! Connections that wait for their next request: few, last in first out, none for long.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, ReadBuf};

use super::stream::Stream;

/// Connections kept per target.
const IDLE_MAX: usize = 256;
/// How long one is kept. Servers that close earlier are noticed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);

/// Idle connections of one target.
#[derive(Debug, Default)]
pub(super) struct Idle {
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Oldest first.
    streams: VecDeque<(Instant, Stream)>,
    /// A task looks after the old ones.
    swept: bool,
}

impl Idle {
    /// The connection that was used last, if its other side still holds it.
    pub(super) fn take(&self) -> Option<Stream> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((since, mut stream)) = waiting.streams.pop_back() {
            if since.elapsed() < IDLE_TIMEOUT && is_silent(&mut stream) {
                return Some(stream);
            }
        }
        None
    }

    /// Keeps a connection for later.
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

    /// Closes what is old; false: nothing is left to look after.
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

/// Whether nothing was received: neither an end nor bytes that nobody asked for.
fn is_silent(stream: &mut Stream) -> bool {
    let mut byte = [0; 1];
    let mut context = Context::from_waker(Waker::noop());
    matches!(Pin::new(stream).poll_read(&mut context, &mut ReadBuf::new(&mut byte)), Poll::Pending)
}
