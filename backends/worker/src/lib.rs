//! Process `penstock worker`: one engine, served to gateways over sessions.
//!
//! ```text
//! gateway ── session task ──┐ commands (bounded)             ┌─ step()
//! gateway ── session task ──┼──────────────────→ engine thread ┤
//!            ←──────────────┘ one frame per step and session  └─ parks when idle
//! ```
//! Session tasks live on one tokio thread and answer for the process even while a step takes long; the engine has a
//! thread of its own. All state of a worker is a cache: when a session ends, its requests are cancelled and the
//! gateway continues them on any worker. A worker without a gateway exits after [`WorkerConfig::orphan_ttl`]. A panic
//! of the engine ends the process, with a message and a non-zero code: the gateway notices and starts another. So does a
//! step that does not end.
//!
//! KV goes from worker to worker on connections of their own (`transfer/`).
//!
//! Deliberately absent: text, retries, and any decision between workers.
#![forbid(unsafe_code)]

mod adapters;
mod args;
pub mod bench;
mod config;
mod credits;
mod engine_thread;
mod gpu;
mod grammars;
mod hang;
mod inbox;
pub mod inspect;
mod listen;
mod model;
mod options;
mod place;
mod plan;
mod session;
mod shelf;
mod signals;
mod strangers;
mod tiers;
mod transfer;
mod troubles;
mod turns;
mod weights;

pub use adapters::{AdapterSource, OrderedSource};
pub use args::{WorkerArgs, main};
pub use config::{Build, ReadyInfo, TierOptions, WorkerConfig, WorkerError};
pub use model::{DEMO_MODEL, build};
pub use options::{DeviceChoice, ModelOptions};
pub use plan::Plan;
pub use shelf::Shelf;

use engine_thread::{EngineThread, Wiring};
use hang::Hang;
use inbox::Command;
use penstock_proto::Epoch;
use penstock_proto::frames::{Drain, Loading};
use session::{Host, Phase};
use signals::Signals;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;
use tracing::{error, info, warn};
use transfer::Peers;

/// Commands that may wait for the engine; a session that finds the queue full stops reading its socket.
const COMMANDS_MAX: usize = 1024;

/// Longest time for sessions and transfers to write their last frames before the process ends.
const FLUSH_DEADLINE: Duration = Duration::from_secs(2);

/// Runs a worker until it is told to exit, is left without a gateway, or fails. `build` loads the model, on the
/// engine's thread, and reports its progress.
///
/// # Errors
/// [`WorkerError`]: the address cannot be used, the model cannot be loaded, or the engine failed.
pub fn run(config: WorkerConfig, build: Build) -> Result<(), WorkerError> {
    let result = live(config, build);
    if let Err(error) = &result {
        error!(error = %chain(error), "worker ends with an error");
    }
    result
}

fn live(config: WorkerConfig, build: Build) -> Result<(), WorkerError> {
    config.check()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| WorkerError::Os { what: "starting the session thread".into(), source })?;
    let signals = {
        let _inside = runtime.enter();
        Signals::catch()?
    };
    config.place()?;
    let far = far_runtime(&config)?;
    let transfers = far.as_ref().unwrap_or(&runtime).handle().clone();
    let result = runtime.block_on(serve(config, build, transfers, signals));
    far.into_iter().chain([runtime]).for_each(Runtime::shutdown_background);
    result
}

/// Runtime with threads for transfers of several connections, so that the encryption of one does not wait for
/// another's.
fn far_runtime(config: &WorkerConfig) -> Result<Option<Runtime>, WorkerError> {
    if config.transfer_streams < 2 {
        return Ok(None);
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(config.transfer_streams).thread_name("penstock-kv").enable_all().build();
    runtime.map(Some).map_err(|source| WorkerError::Os { what: "starting the threads of transfers".into(), source })
}

/// An error with all its causes, joined in one line for the log.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

async fn serve(config: WorkerConfig, build: Build, transfers: Handle, mut signals: Signals) -> Result<(), WorkerError> {
    let listener = listen::bind(&config).await?;
    info!(address = %listener.address(), pid = std::process::id(), "worker listens");
    let (commands, inbox) = mpsc::channel(COMMANDS_MAX);
    let (phase, phases) = watch::channel(Phase::Loading(Loading { stage: "starting".into(), ..Default::default() }));
    let (drains, mut drain_orders) = mpsc::channel(4);
    let kv = listen::bind_transfer(&config).await?;
    let address = kv.as_ref().map(listen::Listener::address).unwrap_or_default();
    if address.is_empty() {
        warn!(
            "KV transfers are off: the path of the worker's socket leaves no room for the path of the transfer socket"
        );
    }
    let peers = Arc::new(Peers::new(&config, &commands, address));
    let wiring = Wiring {
        tiers: config.tiers.clone(),
        commands: commands.downgrade(),
        peers: Arc::clone(&peers),
        runtime: transfers.clone(),
    };
    let (thread, mut ended) = EngineThread::start(build, phase, inbox, wiring)?;
    let epoch = Epoch(config::epoch()?);
    let age = thread.step_age();
    let host = Arc::new(Host::new(&config, commands.clone(), phases, drains, age.clone(), epoch));
    let accepting = tokio::spawn(listen::accept(listener, Arc::clone(&host)));
    let serving = kv.map(|listener| transfers.spawn(transfer::accept(listener, Arc::clone(&peers))));
    let mut ticks = tokio::time::interval(hang::LOOK);
    // Ticks that a stopped process missed are no looks.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut hang = Hang::default();
    let mut patience = Patience { config: &config, left_alone_since: Some(Instant::now()), exit_by: None };
    let result = loop {
        let Drain { exit, patience_seconds } = tokio::select! {
            _ = &mut ended => break thread.join(),
            () = signals.end() => EXIT,
            Some(order) = drain_orders.recv() => order,
            _ = ticks.tick() => {
                // In a step that lasts, ticks would only fill the queue.
                if age.seconds() < TICKED_SECONDS && (config.tiers.is_any() || host.sessions() > 1) {
                    // Full: the engine is busy enough, and a tick would add nothing.
                    let _ = commands.try_send(Command::Tick);
                }
                if hang.look(age.step()) {
                    break Err(WorkerError::Hangs { seconds: age.seconds() as u64 });
                }
                match patience.tick(host.sessions()) {
                    Next::Serve => continue,
                    Next::Drain => EXIT,
                    Next::Exit => break Ok(()),
                }
            }
        };
        info!(exit, patience_seconds, "worker drains: no new requests are taken");
        host.tell_drain();
        if exit {
            patience.end(patience_seconds, Instant::now());
        }
        // While the model loads, no thread reads commands, and there is nothing to drain.
        if exit && host.is_loading() {
            break Ok(());
        }
        // A queue that is full, since a step does not end, holds up neither the deadlines nor the look at the step. Err: the thread has ended,
        // which the next round sees.
        if let Err(TrySendError::Full(order)) = commands.try_send(Command::Drain { exit }) {
            let commands = commands.clone();
            tokio::spawn(async move { commands.send(order).await });
        }
    };
    accepting.abort();
    serving.into_iter().for_each(|serving| serving.abort());
    drop(commands);
    tokio::join!(host.flush(FLUSH_DEADLINE), peers.flush(FLUSH_DEADLINE));
    result
}

/// Age of a step from which the engine thread gets no ticks.
const TICKED_SECONDS: f64 = 1.0;

/// Order to exit with the worker's own deadline, as by a signal.
const EXIT: Drain = Drain { exit: true, patience_seconds: 0 };

/// Longest time that an order gives to the open requests.
const PATIENCE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Deadlines of a worker: without a gateway, and while it drains.
struct Patience<'c> {
    config: &'c WorkerConfig,
    left_alone_since: Option<Instant>,
    exit_by: Option<Instant>,
}

/// Next action of the worker's main loop, by [`Patience::tick`].
enum Next {
    Serve,
    /// Refuse new requests, store cached blocks, exit.
    Drain,
    Exit,
}

impl Patience<'_> {
    /// Has the worker exit within `told` seconds, which replace an earlier deadline; 0: within its own deadline, unless
    /// there is one already.
    fn end(&mut self, told: u32, now: Instant) {
        match told {
            0 => _ = self.exit_by.get_or_insert(now + self.config.drain_deadline),
            told => self.exit_by = Some(now + Duration::from_secs(u64::from(told)).min(PATIENCE_MAX)),
        }
    }

    /// Advances the deadlines, with `sessions` gateways connected.
    fn tick(&mut self, sessions: usize) -> Next {
        let now = Instant::now();
        self.left_alone_since = if sessions > 0 { None } else { self.left_alone_since.or(Some(now)) };
        let left_alone = self.left_alone_since.is_some_and(|since| now - since >= self.config.orphan_ttl);
        if self.exit_by.is_some_and(|deadline| now >= deadline) {
            warn!("drain deadline passed: worker exits, its gateways resume the open requests elsewhere");
            return Next::Exit;
        }
        match (left_alone, self.exit_by) {
            (false, _) => Next::Serve,
            (true, Some(_)) if self.config.tiers.is_any() => Next::Serve,
            (true, Some(_)) => Next::Exit,
            (true, None) => {
                info!("worker exits: no gateway has been connected for the orphan time");
                if self.config.tiers.is_any() { Next::Drain } else { Next::Exit }
            }
        }
    }
}

/// Resolves when the other end is dropped.
type Ended = oneshot::Receiver<()>;

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_proto::Address;

    #[test]
    fn an_order_may_give_the_open_requests_more_or_less_time_than_the_worker_would() {
        let config = WorkerConfig::new(Address::Unix("/nonexistent/worker.sock".into()));
        let now = Instant::now();
        let mut patience = Patience { config: &config, left_alone_since: None, exit_by: None };
        let mut ends = |told| {
            patience.end(told, now);
            patience.exit_by.map(|by| by - now)
        };
        assert_eq!(ends(0), Some(config.drain_deadline));
        assert_eq!(ends(120), Some(Duration::from_secs(120)));
        assert_eq!(ends(0), Some(Duration::from_secs(120)), "a signal behind it shortens nothing");
        assert_eq!(ends(5), Some(Duration::from_secs(5)));
        assert_eq!(ends(u32::MAX), Some(PATIENCE_MAX));
    }
}
