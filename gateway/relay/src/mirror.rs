//! Copies of requests for a target under trial: nobody waits for them or sees their answers, and their number is bounded.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::core::Core;
use super::target::Target;
use super::verdict::{Reason, judge};
use penstock_base::error::Failure;
use penstock_telemetry::{Metric, Metrics};
use penstock_upstream::call::Call;
use penstock_upstream::{Origin, Sent};

/// Most copies in flight per model; each holds its request until it is answered.
const COPIES_MAX: usize = 64;
/// Time limit of one copy, its whole answer included.
const TIME_MAX: Duration = Duration::from_secs(300);

/// Mirror of one model: sends copies of a share of the requests to a target and discards the answers.
pub(crate) struct Mirror {
    target: Arc<Target>,
    percent: u32,
    /// Sum of `percent` over all requests: each full hundred owes a copy.
    owed: AtomicU32,
    places: Arc<Semaphore>,
    /// Tasks of the copies in flight; aborted when the model goes.
    copies: Mutex<JoinSet<()>>,
}

impl Mirror {
    pub(crate) fn new(target: Arc<Target>, percent: u32) -> Self {
        let (owed, places) = (AtomicU32::new(0), Arc::new(Semaphore::new(COPIES_MAX)));
        Self { target, percent, owed, places, copies: Mutex::new(JoinSet::new()) }
    }

    /// Sends a copy if one is owed and there is a place; a copy without a place is dropped and counted.
    pub(crate) fn copy(&self, core: &Arc<Core>, call: &Arc<Call>, origin: &Origin) {
        let before = self.owed.fetch_add(self.percent, Ordering::Relaxed);
        // Every time the sum passes a hundred a copy is due; wrapping loses at most one.
        if before / 100 == before.wrapping_add(self.percent) / 100 {
            return;
        }
        let (metrics, model, target) = (core.metrics.clone(), core.rules.name.clone(), self.target.clone());
        let Ok(place) = self.places.clone().try_acquire_owned() else {
            return count(&metrics, &model, &target, "dropped");
        };
        let (call, mut origin) = (call.clone(), origin.clone());
        let deadline = Instant::now() + TIME_MAX;
        (origin.deadline, origin.sent) = (Some(deadline.into_std()), Sent::default());
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        while copies.try_join_next().is_some() {}
        copies.spawn(async move {
            let outcome = match timeout_at(deadline, run(&target, call, origin)).await {
                Ok(Ok(())) => "answered",
                Ok(Err(failure)) => judge(&failure).reason.map_or("refused", Reason::name),
                Err(_) => Reason::Timeout.name(),
            };
            count(&metrics, &model, &target, outcome);
            drop(place);
        });
    }
}

fn count(metrics: &Metrics, model: &str, target: &Target, outcome: &str) {
    metrics.count(Metric::Mirrored, &[("model", model), ("target", &target.id), ("outcome", outcome)]);
}

/// Sends one copy to the mirror target, reads the whole answer and drops it.
async fn run(target: &Target, call: Arc<Call>, origin: Origin) -> Result<(), Failure> {
    let mut events = target.upstream.open(call, origin).await?;
    let mut said = Vec::new();
    while poll_fn(|context| events.poll_events(context, &mut said)).await? {
        said.clear();
        tokio::task::consume_budget().await;
    }
    Ok(())
}
