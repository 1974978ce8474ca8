//! Deadlines of peers that do not count the time in which this process could not look.
//!
//! A runtime learns that a socket has bytes from its I/O driver, which collects at most 1,024 sockets in a turn and
//! fires the timers in the same turn. On a loaded machine, or after a stop of the process, thousands of sockets may have
//! bytes while all of their deadlines have passed: the timers of every one fire, and only the first 1,024 are known
//! to be readable. Neither another look at once nor `yield_now` helps: the driver belongs to one thread at a time, which
//! may be the one that does not run. So a deadline is followed by waits of 1 ms, each of which ends in a turn of the
//! driver, until every socket must have been collected; bytes that come meanwhile are taken as if they were in time.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

/// Sockets that one turn of the driver collects (tokio's default of `max_io_events_per_tick`).
const EVENTS: usize = 1024;
/// Shortest wait that ends in a turn of the driver: the resolution of tokio's timers.
pub(crate) const TURN: Duration = Duration::from_millis(1);
/// Turns beside those for [`EVENTS`] sockets each. The first may have asked the kernel before the deadline; the last
/// lets the task of an HTTP/2 connection hand bytes to the task of their stream.
const MORE_TURNS: usize = 3;

/// Most sockets for which a deadline waits; about 20 ms.
pub const SOCKETS_MAX: usize = 16 * 1024;

/// Number of turns after which every one of `sockets` has been collected.
pub fn turns(sockets: usize) -> usize {
    MORE_TURNS + sockets.min(SOCKETS_MAX) / EVENTS
}

/// Result of `work` if it completes while the driver collects every one of `sockets` that had bytes when the look began.
pub async fn last_look<T>(sockets: usize, work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    let collected = async {
        for _ in 0..turns(sockets) {
            sleep(TURN).await;
        }
    };
    tokio::select! {
        biased;
        done = work => Some(done),
        () = collected => None,
    }
}

/// Result of `work` if it needs no wait.
pub async fn at_once<T>(work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    // Unconstrained: a task whose budget is used up would find nothing ready.
    let mut work = pin!(tokio::task::unconstrained(work));
    poll_fn(|context| {
        Poll::Ready(match work.as_mut().poll(context) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        })
    })
    .await
}

/// Result of `work` on bytes from a peer within a limit of time; `None`: they had not come by then.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    tokio::select! {
        biased;
        done = &mut work => return Some(done),
        () = sleep(limit) => {}
    }
    last_look(SOCKETS_MAX, work).await
}

/// Memory of a reader, which reads piece by piece, of the deadline for which it has had its last look. There is one for
/// each deadline: after it only those pieces count that need no wait, or a byte in each look would hold the connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Looked(Option<Instant>);

impl Looked {
    /// Notes that the last look for `deadline` begins.
    pub fn begin(&mut self, deadline: Instant) {
        self.0 = Some(deadline);
    }

    /// Returns true if the last look for `deadline` has been had.
    pub fn is_over(&self, deadline: Instant) -> bool {
        self.0 == Some(deadline)
    }

    /// Result of `work` on the next piece; `None`: it had not come by the deadline. `sockets`: the most that may have
    /// bytes at once.
    pub async fn in_time<T>(&mut self, deadline: Instant, sockets: usize, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        if self.is_over(deadline) {
            return at_once(work).await;
        }
        tokio::select! {
            biased;
            done = &mut work => return Some(done),
            () = sleep_until(deadline) => {}
        }
        self.begin(deadline);
        last_look(sockets, work).await
    }
}
