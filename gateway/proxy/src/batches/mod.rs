//! Runner of batches: one thread beside the live traffic, with lower priority.
//!
//! The store is the truth; memory holds only the lines that run at the moment. A line runs at least once (a crash in
//! the middle runs it again), and its result is stored exactly once, in the transaction that takes the line off the
//! list. So a killed gateway goes on where the store says. Of several gateways on one store, one leads and begins
//! batches, each under a claim (`claims`); a gateway that has lost the lead goes on with those that it has begun.
//!
//! ```text
//! store ──open batches──▶ turn ──one task per batch──▶ validate ─▶ lines ─▶ finish ──▶ store
//!                                                                   │ slots (concurrency)
//!                                                                   └▶ answer_whole
//! ```

mod finish;
pub(crate) mod input;
mod lines;
mod outputs;
mod slots;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use penstock_store::{BatchId, BatchStatus, EndedBatch, OpenBatch, StoreError, Tenant};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep};

use crate::batch_text::batch_error;
use crate::gateway::{Beside, Gateway};
use crate::keeper::Keeper;
use crate::plugins::ticks;
use crate::stored::background;
use outputs::Outputs;
use penstock_base::clock::unix_seconds;
use penstock_base::panics::supervised;
use slots::Slots;

/// Batches that run at once; the others wait in the store.
const ACTIVE_MAX: usize = 16;
/// Most batches that run at once when more tenants have some: a tenant without a running batch need not wait for
/// another's to end.
const ACTIVE_TENANTS_MAX: usize = 256;
/// Most unfinished batches that one turn looks at.
const LOOK_MAX: u32 = 2048;
/// Polling interval of the store, for batches that another gateway took and no notification announced.
const POLL: Duration = Duration::from_secs(2);
/// Pause before a batch whose store failed is taken up again.
const STORE_PAUSE: Duration = Duration::from_secs(5);
/// Interval at which expired and abandoned objects are swept from the store.
const SWEEP: Duration = Duration::from_secs(60);
/// Age after which the identity of an owner without open work is deleted, in seconds: longer than a batch may run.
const IDENTITY_SECONDS: u64 = 7 * 86_400;
/// Age after its end at which a batch without files of results is deleted, in seconds.
const ENDED_SECONDS: u64 = 30 * 86_400;
/// Age after which an unsealed file is deleted, in seconds: its writer is gone.
const UNSEALED_SECONDS: u64 = 3600;

/// Starts the thread that runs batches and responses in the background, if the gateway has a store.
///
/// # Errors
/// The system has no thread for it.
pub fn start(gateway: Arc<Gateway>) -> std::io::Result<()> {
    if gateway.keeper().is_none() {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("batches".into()).spawn(move || runtime.block_on(work(gateway)))?;
    Ok(())
}

/// Runs until another process serves, or this one ends, and the running work has ended; then gives up claims and the
/// lead, so that the other process can take them.
async fn work(gateway: Arc<Gateway>) {
    gateway.rest(Beside::Batches, false);
    let pause = || sleep(POLL);
    // Each begins anew from the store.
    let batches = supervised("batches", || run(gateway.clone()), pause);
    let responses = supervised("background responses", || background::run(gateway.clone()), pause);
    let batches = async { tokio::join!(batches, responses) };
    let mut ticks = pin!(supervised("periodic calls of plugins", || ticks::run(gateway.clone()), pause));
    tokio::select! {
        _ = batches => {}
        () = &mut ticks => {}
        () = supervised("claims", || keep_claims(&gateway), pause) => {}
    }
    if let Some(keeper) = gateway.keeper() {
        if let Err(error) = keeper.claims.release_ended().await {
            tracing::debug!(%error, "claims on ended work could not be given up: they lapse");
        }
        if let Err(error) = keeper.store.resign().await {
            tracing::warn!(%error, "leadership for batches could not be given up: the next process takes over when this one has ended");
        }
    }
    gateway.rest(Beside::Batches, true);
    // The runtime stays until the process ends: locks of conversations may still be given up. A process that another one
    // has not replaced goes on calling its plugins.
    if !gateway.is_leaving() {
        ticks.await;
    }
    std::future::pending::<()>().await;
}

/// Renews the claims on what runs here, without end.
async fn keep_claims(gateway: &Gateway) {
    match gateway.keeper() {
        Some(keeper) => {
            let wake = || {
                keeper.wake.notify_one();
                keeper.wake_responses.notify_one();
            };
            keeper.claims.keep(wake).await;
        }
        None => std::future::pending().await,
    }
}

/// State that the running batches share: the gateway, the slots for lines and what their results keep.
pub(crate) struct Bench {
    gateway: Arc<Gateway>,
    slots: Slots,
    outputs: Outputs,
}

impl Bench {
    fn new(gateway: Arc<Gateway>) -> Arc<Self> {
        let slots = Slots::new(gateway.serving().config.batches.concurrency);
        Arc::new(Self { gateway, slots, outputs: Outputs::default() })
    }

    /// Sets the number of slots to the config's `batches.concurrency`.
    fn resize(&self) {
        self.slots.resize(self.gateway.serving().config.batches.concurrency);
    }

    fn keeper(&self) -> &Keeper {
        self.gateway.keeper().expect("a gateway without a store has no bench")
    }
}

/// Batch whose task runs here, with the switch that cancels it.
struct Active {
    tenant: Tenant,
    cancel: watch::Sender<bool>,
    task: AbortHandle,
}

/// Runs batches, one task each, until another process serves, or this one ends, and the running ones have ended.
pub(crate) async fn run(gateway: Arc<Gateway>) {
    let bench = Bench::new(gateway);
    let keeper = bench.keeper();
    let (mut tasks, mut active) = (JoinSet::new(), HashMap::new());
    let mut swaps = bench.gateway.swaps();
    let mut sweep_at = Instant::now();
    loop {
        match turn(&bench, &mut tasks, &mut active).await {
            Ok(true) if Instant::now() >= sweep_at => {
                sweep_at = Instant::now() + SWEEP;
                if let Err(error) = sweep(&bench.gateway, keeper).await {
                    tracing::warn!(%error, "expired ledger entries, audit events, files, batches and responses could not be deleted");
                }
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "batches could not be read from the store"),
        }
        keeper.running.batches.store(active.len() as u64, Ordering::Relaxed);
        if !bench.gateway.begins_work() && active.is_empty() {
            return;
        }
        tokio::select! {
            () = keeper.wake.notified() => {}
            Ok(()) = swaps.changed() => bench.resize(),
            () = sleep(POLL) => {}
            Some(ended) = tasks.join_next(), if !tasks.is_empty() => {
                if let Err(error) = ended && error.is_panic() {
                    tracing::error!(%error, "the task of a batch panicked");
                }
            }
        }
    }
}

/// Looks at the store once: starts batches that wait, cancels those that are to be cancelled. `false`: another gateway
/// leads; this one only goes on with the batches that it has begun. While this process leaves or ends, it keeps the lead
/// until its last line has ended, and begins nothing.
async fn turn(
    bench: &Arc<Bench>,
    tasks: &mut JoinSet<()>,
    active: &mut HashMap<BatchId, Active>,
) -> Result<bool, StoreError> {
    let keeper = bench.keeper();
    active.retain(|_, running| !running.task.is_finished());
    let begins = bench.gateway.begins_work();
    let leads = (begins || !active.is_empty()) && keeper.store.lead().await?;
    if !begins || !leads {
        for (id, running) in &*active {
            let batch = keeper.store.batch(&running.tenant, id).await?;
            if batch.is_none_or(|batch| batch.status == BatchStatus::Cancelling) {
                running.cancel.send_replace(true);
            }
        }
        return Ok(leads);
    }
    for open in keeper.store.open_batches(LOOK_MAX).await? {
        match active.get(&open.batch.id) {
            Some(running) if open.batch.status == BatchStatus::Cancelling => {
                running.cancel.send_replace(true);
            }
            Some(_) => {}
            None if keeper.claims.is_elsewhere(open.batch.id.as_str()) => {}
            None if may_start(active, &open.tenant) => {
                let (cancel, cancelled) = watch::channel(false);
                let (id, tenant) = (open.batch.id.clone(), open.tenant.clone());
                let task = tasks.spawn(attend(bench.clone(), open, cancelled));
                active.insert(id, Active { tenant, cancel, task });
            }
            None => {}
        }
    }
    Ok(true)
}

/// Returns true if another batch of the tenant may run beside these.
fn may_start(active: &HashMap<BatchId, Active>, tenant: &Tenant) -> bool {
    let is_first = || !active.values().any(|running| running.tenant == *tenant);
    active.len() < ACTIVE_MAX || (active.len() < ACTIVE_TENANTS_MAX && is_first())
}

async fn sweep(gateway: &Gateway, keeper: &Keeper) -> Result<(), StoreError> {
    let (now, config) = (unix_seconds(), gateway.serving().config.clone());
    let before = |days: u64| (days > 0).then(|| now.saturating_sub(days * 86_400));
    if let Some(before) = before(config.store.ledger_days) {
        // However few days it keeps: a budget whose entries are gone would be open again after a restart.
        let before = before.min(gateway.serving().in_force().needed_from(now).unwrap_or(u64::MAX));
        while keeper.store.sweep_entries(before).await? > 0 {}
    }
    if let Some(before) = before(config.store.audit_days) {
        while keeper.store.sweep_audit(before).await? > 0 {}
    }
    while keeper.store.sweep_files(now, now.saturating_sub(UNSEALED_SECONDS)).await? > 0 {}
    while keeper.store.sweep_batches(now.saturating_sub(ENDED_SECONDS)).await? > 0 {}
    while keeper.store.sweep_responses(now).await? > 0 {}
    keeper.store.sweep_identities(now.saturating_sub(IDENTITY_SECONDS)).await?;
    Ok(())
}

/// Takes a batch to its end. When the store fails, the task ends after a pause, and a later turn begins the batch again
/// from the store.
async fn attend(bench: Arc<Bench>, open: OpenBatch, cancelled: watch::Receiver<bool>) {
    let id = open.batch.id.clone();
    if let Err(error) = claimed(&bench, open, cancelled).await {
        tracing::warn!(batch = %id, %error, "a batch pauses: the store failed");
        sleep(STORE_PAUSE).await;
    }
    // There may be a batch that waits for this one's place.
    bench.keeper().wake.notify_one();
}

/// Takes a batch to its end under a claim, for as long as this process has the claim.
async fn claimed(bench: &Arc<Bench>, open: OpenBatch, cancelled: watch::Receiver<bool>) -> Result<(), StoreError> {
    let id = open.batch.id.clone();
    // Another gateway has begun it since the last look at the claims.
    let Some(mut claim) = bench.keeper().claims.take(id.as_str()).await? else { return Ok(()) };
    let done = tokio::select! {
        biased;
        () = claim.lost() => {
            tracing::warn!(batch = %id, "a batch stops: another gateway of the store has taken it over");
            Ok(())
        }
        done = drive(bench, open, cancelled) => done,
    };
    claim.release().await;
    done
}

async fn drive(bench: &Arc<Bench>, open: OpenBatch, mut cancelled: watch::Receiver<bool>) -> Result<(), StoreError> {
    let store = &bench.keeper().store;
    let OpenBatch { tenant, mut batch } = open;
    loop {
        match batch.status {
            BatchStatus::Validating => validate(bench, &tenant, &batch).await?,
            BatchStatus::InProgress => lines::run(bench, &tenant, &batch, &mut cancelled).await?,
            BatchStatus::Finalizing | BatchStatus::Cancelling => finish::run(bench, &tenant, &batch).await?,
            BatchStatus::Failed | BatchStatus::Completed | BatchStatus::Expired | BatchStatus::Cancelled => {
                tracing::info!(batch = %batch.id, status = batch.status.name(), lines = batch.counts.total, "a batch has ended");
                return Ok(());
            }
        }
        let Some(now) = store.batch(&tenant, &batch.id).await? else { return Ok(()) };
        if !bench.gateway.begins_work() {
            return Ok(());
        }
        if *cancelled.borrow() && now.status == BatchStatus::InProgress {
            // A server that has lost the cancellation has taken over. The switch stays as it is: a later turn begins anew.
            tracing::warn!(batch = %now.id, "a batch goes on: the store has lost its cancellation");
            sleep(STORE_PAUSE).await;
            return Ok(());
        }
        batch = now;
    }
}

async fn validate(
    bench: &Bench,
    tenant: &penstock_store::Tenant,
    batch: &penstock_store::BatchRecord,
) -> Result<(), StoreError> {
    let store = &bench.keeper().store;
    let config = bench.gateway.serving().config.clone();
    let limits = input::Limits { lines: config.batches.lines_max, line_bytes: config.http.body_bytes_max };
    let faults = input::admit(store.as_ref(), tenant, batch, limits).await?;
    if faults.is_empty() {
        return store.start_batch(&batch.id, unix_seconds()).await;
    }
    let faults = batch_error(faults);
    let end = EndedBatch { status: BatchStatus::Failed, output: None, errors: None, faults, now: unix_seconds() };
    store.end_batch(&batch.id, end).await.map(drop)
}
