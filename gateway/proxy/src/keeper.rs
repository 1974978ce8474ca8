//! What a gateway keeps: its store, answers that are being saved, and counts of background work.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use penstock_store::{Store, StoreError};
use penstock_telemetry::Gauge;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::claims::Claims;
use crate::event_log::Logs;
use crate::saving::Saving;

/// Longest time for which work waits for a store that fails: a restart, a failover, a repair.
const OUTAGE_MAX: Duration = Duration::from_secs(15 * 60);
/// Pause before a store that failed is asked again.
const STORE_AGAIN: Duration = Duration::from_secs(1);
/// Interval at which work that still waits for the store is logged again.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// Asks the store until it answers, for work that has been done and paid for: an answer is not lost, or made a second
/// time, since the store was away when it was ready. A store that is full or busy is waited for without end, another
/// failure is returned after 15 minutes. `ask` may have taken effect when its answer is lost, so it has to be one that
/// can be asked twice.
pub(crate) async fn patiently<T, A>(object: &str, mut ask: impl FnMut() -> A) -> Result<T, StoreError>
where
    A: Future<Output = Result<T, StoreError>>,
{
    let (end, mut tell_at) = (Instant::now() + OUTAGE_MAX, Instant::now());
    loop {
        let error = match ask().await {
            Err(error @ (StoreError::Full | StoreError::Busy)) => error,
            Err(error @ StoreError::Broken(_)) if Instant::now() < end => error,
            answer => return answer,
        };
        if Instant::now() >= tell_at {
            tell_at = Instant::now() + TELL_AGAIN;
            tracing::warn!(object, %error, "background work waits for the store");
        }
        sleep(STORE_AGAIN).await;
    }
}

/// Gauges of the batch work in this process, for `/metrics`.
#[derive(Debug, Default)]
pub(crate) struct Running {
    /// Number of batches whose task runs in this process.
    pub(crate) batches: AtomicU64,
    /// Number of batch lines in flight at a model.
    pub(crate) lines: AtomicU64,
}

/// Handle of the gateway on its store, with the state of saving and of background work.
pub struct Keeper {
    /// Store of files, batches, responses, keys and the ledger.
    pub(crate) store: Arc<dyn Store>,
    /// Notification of new batches, for the task that runs them.
    pub(crate) wake: Notify,
    /// Notification of new work for the runner of background responses.
    pub(crate) wake_responses: Notify,
    /// Claims on the batches and background responses that run in this process.
    pub(crate) claims: Arc<Claims>,
    /// Responses that were answered and are being saved.
    pub(crate) saving: Saving,
    /// Events of responses that are streamed in the background.
    pub(crate) logs: Logs,
    /// Number of responses that could not be saved.
    pub(crate) unsaved: AtomicU64,
    /// Bytes of all stored responses, as last counted, for the gauge.
    pub(crate) response_bytes: AtomicU64,
    /// Number of responses that are being answered in the background.
    pub(crate) responses_running: AtomicU64,
    /// Counts of the batches and lines that run, for the gauges.
    pub(crate) running: Running,
}

impl Keeper {
    /// Handle on `store`, with nothing running and nothing being saved.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self {
            claims: Claims::new(store.clone()),
            store,
            wake: Notify::new(),
            wake_responses: Notify::new(),
            saving: Saving::default(),
            logs: Logs::default(),
            unsaved: AtomicU64::new(0),
            response_bytes: AtomicU64::new(0),
            responses_running: AtomicU64::new(0),
            running: Running::default(),
        }
    }

    /// Counts and logs an answer that its client has and the store, or its conversation, lacks.
    pub(crate) fn unsaved(&self, id: &str, why: &str) {
        self.unsaved.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(object = id, why, "an answer was sent to its client and is not kept in the store as asked");
    }

    /// Adds the gauges of the store and its background work for `/metrics`.
    pub(crate) fn gauges(&self, out: &mut Vec<(Gauge, String, f64)>) {
        let stats = self.store.stats();
        out.push((Gauge::StoreUp, "store".to_owned(), f64::from(u8::from(!stats.down))));
        out.extend(
            [
                (Gauge::StoreCommits, stats.commits as f64),
                (Gauge::StoreWrites, stats.writes as f64),
                (Gauge::StoreCommitSeconds, stats.commit_seconds),
                (Gauge::StoreErrors, stats.errors as f64),
                (Gauge::ResponsesUnsaved, self.unsaved.load(Ordering::Relaxed) as f64),
                (Gauge::ResponseBytes, self.response_bytes.load(Ordering::Relaxed) as f64),
                (Gauge::ResponsesRunning, self.responses_running.load(Ordering::Relaxed) as f64),
                (Gauge::BatchesRunning, self.running.batches.load(Ordering::Relaxed) as f64),
                (Gauge::BatchLinesRunning, self.running.lines.load(Ordering::Relaxed) as f64),
            ]
            .map(|(gauge, value)| (gauge, String::new(), value)),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks that fail so often with an error, and are answered then. Returns the answer and the number of asks.
    async fn asked(failures: u32, error: StoreError) -> (Result<u32, StoreError>, u32) {
        let mut asks = 0;
        let answer = patiently("resp_a", || {
            asks += 1;
            let answer = if asks > failures { Ok(7) } else { Err(error.clone()) };
            async { answer }
        });
        (answer.await, asks)
    }

    #[test]
    fn work_that_waits_is_logged_once_a_minute() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime");
        let log = penstock_base::testing::logged(|| {
            assert_eq!(runtime.block_on(asked(299, StoreError::Full)), (Ok(7), 300), "five minutes");
        });
        assert_eq!(log.lines().filter(|line| line.contains("waits for the store")).count(), 5, "{log}");
    }

    #[tokio::test(start_paused = true)]
    async fn work_waits_for_a_store_that_is_away_and_not_for_ever() {
        let broken = StoreError::Broken("gone".into());
        assert_eq!(asked(60, broken.clone()).await, (Ok(7), 61), "a restart of a minute");
        assert_eq!(asked(5000, StoreError::Full).await, (Ok(7), 5001), "space comes when somebody makes some");
        let (answer, asks) = asked(u32::MAX, broken.clone()).await;
        assert_eq!(answer, Err(broken));
        assert!((OUTAGE_MAX.as_secs()..OUTAGE_MAX.as_secs() + 5).contains(&u64::from(asks)), "{asks} asks");
        let (answer, asks) = asked(9, StoreError::Misuse("a bug")).await;
        assert_eq!((answer, asks), (Err(StoreError::Misuse("a bug")), 1));
    }
}
