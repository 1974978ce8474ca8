//! Panics in work that goes on beside requests: a panic becomes a value, and work without end begins anew after one.
//!
//! A thread or a task that nobody waits for ends silently where it panics, and what it did is not done any more until
//! the process is started again. Such work runs [`supervised`].

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;

/// Runs a future; a panic in it becomes an error with the panic's message.
///
/// # Errors
/// The message of the panic.
pub async fn caught<F: Future>(future: F) -> Result<F::Output, String> {
    // On the heap: the futures of requests are large.
    let mut future = Box::pin(future);
    std::future::poll_fn(move |context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(poll) => poll.map(Ok),
        Err(payload) => Poll::Ready(Err(message(payload.as_ref()))),
    })
    .await
}

/// Message of a panic, for a log.
pub fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "panic without a message".into())
}

/// Runs what `work` makes to its end. A panic is logged with the name of the task, and after a `pause` the work begins
/// anew: what it leaves behind must be good for that.
pub async fn supervised<W: Future, P: Future<Output = ()>>(
    task: &str,
    mut work: impl FnMut() -> W,
    mut pause: impl FnMut() -> P,
) -> W::Output {
    loop {
        match caught(work()).await {
            Ok(done) => return done,
            Err(panic) => tracing::error!(task, panic, "a background task panicked: it is started again"),
        }
        pause().await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::{pending, ready};
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn now<T>(work: impl Future<Output = T>) -> Poll<T> {
        pin!(work).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_panic_is_a_value() {
        assert_eq!(now(caught(ready(7))), Poll::Ready(Ok(7)));
        assert_eq!(now(caught(pending::<()>())), Poll::Pending);
        assert_eq!(now(caught(async { panic!("plain") })), Poll::Ready(Err::<(), _>("plain".to_owned())));
        assert_eq!(now(caught(async { panic!("number {}", 7) })), Poll::Ready(Err::<(), _>("number 7".to_owned())));
        let odd = caught(async { std::panic::panic_any(7) });
        assert_eq!(now(odd), Poll::Ready(Err::<(), _>("panic without a message".to_owned())));
    }

    #[test]
    fn work_begins_anew_after_each_panic() {
        let (runs, pauses) = (Cell::new(0), Cell::new(0));
        let work = || async {
            runs.set(runs.get() + 1);
            assert!(runs.get() > 3, "run {}", runs.get());
            runs.get()
        };
        let pause = || {
            pauses.set(pauses.get() + 1);
            ready(())
        };
        assert_eq!(now(supervised("work", work, pause)), Poll::Ready(4));
        assert_eq!((runs.get(), pauses.get()), (4, 3));
    }
}
