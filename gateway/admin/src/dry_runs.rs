//! Threads of dry runs: plugins work beside the thread that serves, a bounded number of runs at once.
//!
//! A plugin may compute for long without giving way (a pattern over a long text, WebAssembly), and the API has one thread. A run is given up when
//! its deadline passes or its client leaves, at the next moment at which its plugin gives way, between two plugins at the latest; until then the
//! run keeps its place, so that no more than [`RUNS_MAX`] threads are ever taken. A request that finds no place waits; beyond the bounds of that
//! it is refused (429).

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

use crate::error::{ApiError, Code};

/// Most dry runs at once.
pub(crate) const RUNS_MAX: usize = 2;
/// Most requests that wait for a place.
pub(crate) const WAITING_MAX: usize = 8;
/// Longest wait for a place, and longest time of a run: together less than the deadline of an answer.
const WAIT_MAX: Duration = Duration::from_secs(20);
const RUN_MAX: Duration = Duration::from_secs(30);

/// Places of dry runs.
pub(crate) struct DryRuns {
    places: Arc<Semaphore>,
    queue: Semaphore,
    run_max: Duration,
}

impl Default for DryRuns {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(RUNS_MAX)), queue: Semaphore::new(WAITING_MAX), run_max: RUN_MAX }
    }
}

impl DryRuns {
    /// Runs `work` on a thread of its own. The run ends early when the returned future is dropped.
    ///
    /// # Errors
    /// 429: too many runs wait. 503: the run did not end in time.
    pub(crate) async fn run<T: Send + 'static, F: Future<Output = T>>(
        &self,
        work: impl FnOnce() -> F + Send + 'static,
    ) -> Result<T, ApiError> {
        let place = self.place().await?;
        let (present, left) = oneshot::channel::<Infallible>();
        let runtime = Handle::current();
        let run = tokio::task::spawn_blocking(move || {
            let _place = place;
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    _ = left => None,
                    done = work() => Some(done),
                }
            })
        });
        let done = timeout(self.run_max, run).await;
        drop(present);
        match done {
            Ok(Ok(Some(done))) => Ok(done),
            Ok(Err(error)) => Err(ApiError::internal(&error)),
            Ok(Ok(None)) | Err(_) => {
                let message = format!("The dry run did not end within {} s.", self.run_max.as_secs());
                Err(ApiError::unavailable(message))
            }
        }
    }

    /// Place of a run, at once or after a wait.
    async fn place(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        if let Ok(place) = self.places.clone().try_acquire_owned() {
            return Ok(place);
        }
        let full = || {
            let message = format!("{RUNS_MAX} dry runs are in progress, and others wait: try again later.");
            let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, Code::TooManyRequests, message);
            ApiError { retry_after: Some(1), ..error }
        };
        let _waiting = self.queue.try_acquire().map_err(|_| full())?;
        let place = timeout(WAIT_MAX, self.places.clone().acquire_owned()).await.map_err(|_| full())?;
        place.map_err(|error| ApiError::internal(&error))
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    /// Waits until no run is left.
    async fn idle(runs: &DryRuns) {
        let all = timeout(Duration::from_secs(20), runs.places.acquire_many(RUNS_MAX as u32)).await;
        drop(all.expect("every place is given back").expect("open"));
    }

    // The runtime of a test has one thread, as that of the API.
    #[tokio::test]
    async fn work_that_does_not_give_way_leaves_the_thread_to_others() {
        let runs = DryRuns::default();
        let (send, receive) = std::sync::mpsc::channel();
        let work = move || async move { receive.recv_timeout(Duration::from_secs(20)).is_ok() };
        let other = async {
            tokio::task::yield_now().await;
            send.send(()).expect("somebody waits");
        };
        let (done, ()) = tokio::join!(runs.run(work), other);
        assert_eq!(done.ok(), Some(true));
        idle(&runs).await;
    }

    #[tokio::test]
    async fn a_run_beyond_its_deadline_is_given_up() {
        let runs = DryRuns { run_max: Duration::from_millis(1), ..DryRuns::default() };
        let error = runs.run(pending::<()>).await.expect_err("it has no end");
        assert_eq!((error.status, error.retry_after), (StatusCode::SERVICE_UNAVAILABLE, Some(1)));
        idle(&runs).await;
    }

    #[tokio::test]
    async fn who_leaves_gives_up_the_run_and_the_place_in_the_queue() {
        let runs = Arc::new(DryRuns::default());
        let begin = || {
            let runs = runs.clone();
            tokio::spawn(async move { runs.run(pending::<()>).await })
        };
        let tasks: Vec<_> = (0..RUNS_MAX + WAITING_MAX).map(|_| begin()).collect();
        while runs.queue.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let error = runs.run(pending::<()>).await.expect_err("it is full");
        assert_eq!((error.status, error.retry_after), (StatusCode::TOO_MANY_REQUESTS, Some(1)));
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
        idle(&runs).await;
        assert_eq!(runs.queue.available_permits(), WAITING_MAX);
    }
}
