//! The end of the process: by a signal, or because another process serves.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use pingora_core::server::{ShutdownSignal, ShutdownSignalWatch};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;

use super::Listeners;
use crate::gateway::{Beside, Gateway};
use crate::upgrade;

/// How often it is looked whether all is done.
const LOOK: Duration = Duration::from_millis(20);
/// What was settled last is told to the next process within this time.
const TELL_MAX: Duration = Duration::from_secs(10);

/// SIGTERM and the first SIGINT drain; a second SIGINT ends at once. So does [`Leave`].
pub(super) struct Signals {
    pub(super) gateway: Arc<Gateway>,
    pub(super) listeners: Arc<Listeners>,
    pub(super) socket: Option<PathBuf>,
    pub(super) leave: Leave,
    pub(super) drained: Arc<dyn Fn() + Send + Sync>,
}

/// Lets the process end when its answers have, because another one serves.
#[derive(Clone, Default)]
pub struct Leave(Arc<Notify>);

impl Leave {
    /// From now on nothing is accepted here.
    pub fn now(&self) {
        self.0.notify_one();
    }
}

#[async_trait]
impl ShutdownSignalWatch for Signals {
    async fn recv(&self) -> ShutdownSignal {
        let signals = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
        let (Ok(mut terminate), Ok(mut interrupt)) = signals else {
            tracing::error!("signals cannot be watched; stopping");
            return ShutdownSignal::FastShutdown;
        };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = self.leave.0.notified() => {}
        }
        let is_leaving = self.gateway.is_leaving();
        self.listeners.close();
        if !is_leaving {
            upgrade::notify_manager("STOPPING=1");
            if let Some(path) = &self.socket {
                // Whoever tries it from now on is told at once that nobody is there. It may be gone already.
                let _ = std::fs::remove_file(path);
            }
        }
        let hurry = Arc::new(AtomicBool::new(!is_leaving));
        let drain = Drain { gateway: self.gateway.clone(), hurry: hurry.clone(), drained: self.drained.clone() };
        // Pingora sleeps through the whole grace time on this thread; this one leaves as soon as nothing is in flight.
        std::thread::spawn(move || drain.run());
        tokio::spawn(impatience(terminate, interrupt, hurry, self.gateway.clone()));
        ShutdownSignal::GracefulTerminate
    }
}

/// Signals while it drains.
async fn impatience(mut terminate: Signal, mut interrupt: Signal, hurry: Arc<AtomicBool>, gateway: Arc<Gateway>) {
    loop {
        tokio::select! {
            _ = terminate.recv() => hurry.store(true, Ordering::Relaxed),
            _ = interrupt.recv() => {
                gateway.flush_logs();
                std::process::exit(130);
            }
        }
    }
}

struct Drain {
    gateway: Arc<Gateway>,
    /// Somebody has asked for the end: `server.grace_ms` counts.
    hurry: Arc<AtomicBool>,
    drained: Arc<dyn Fn() + Send + Sync>,
}

impl Drain {
    fn run(&self) {
        let (gateway, began) = (&self.gateway, Instant::now());
        tracing::info!(in_flight = gateway.metrics.in_flight_now(), leaving = gateway.is_leaving(), "draining");
        // Connections accepted a moment ago get their first request answered.
        let settle = Duration::from_millis(200).min(gateway.serving().config.grace);
        let mut hurried = None;
        loop {
            let (grace, since) = if self.hurry.load(Ordering::Relaxed) {
                (gateway.serving().config.grace, *hurried.get_or_insert_with(Instant::now))
            } else {
                (gateway.serving().config.upgrade_grace, began)
            };
            if since.elapsed() >= grace || began.elapsed() >= settle && self.is_done() {
                break;
            }
            std::thread::park_timeout(LOOK);
        }
        gateway.governor.keep();
        let until = Instant::now() + TELL_MAX;
        while !gateway.is_rested(Beside::Settling) && Instant::now() < until {
            std::thread::park_timeout(LOOK);
        }
        (self.drained)();
        std::process::exit(0);
    }

    /// One that leaves waits for its connections too: their clients may still ask for something, and are told to ask elsewhere next.
    fn is_done(&self) -> bool {
        let gateway = &self.gateway;
        let alone =
            !gateway.is_leaving() || gateway.metrics.connections_now() == 0 && gateway.is_rested(Beside::Batches);
        gateway.metrics.in_flight_now() == 0 && gateway.is_saved() && alone
    }
}
