//! Active health checks: targets are asked from time to time whether they live, so that requests need not find out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use pingora_core::server::ShutdownWatch;
use pingora_core::services::background::BackgroundService;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::target::Target;

/// Who can be asked whether it lives.
#[async_trait]
pub trait Probe: Send + Sync + 'static {
    /// How often.
    fn interval(&self) -> Duration;

    /// Whether it does; within the interval.
    async fn is_good(&self) -> bool;
}

/// Somebody who is asked, and which targets the answer is about.
pub(super) type Check = (Arc<dyn Probe>, Vec<Arc<Target>>);

/// Everybody who is asked.
#[derive(Default)]
pub struct Checks(pub(super) Vec<Check>);

impl Checks {
    /// Whether there is nobody to ask.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Asks for as long as it is polled.
    pub async fn run(&self) {
        let mut tasks = JoinSet::new();
        for (probe, targets) in &self.0 {
            let (probe, targets) = (probe.clone(), targets.clone());
            tasks.spawn(async move {
                let mut due = interval(probe.interval());
                due.set_missed_tick_behavior(MissedTickBehavior::Delay);
                loop {
                    due.tick().await;
                    let is_good = probe.is_good().await;
                    targets.iter().for_each(|target| target.checked(is_good, Instant::now()));
                }
            });
        }
        while tasks.join_next().await.is_some() {}
    }
}

#[async_trait]
impl BackgroundService for Checks {
    async fn start(&self, mut shutdown: ShutdownWatch) {
        tokio::select! {
            () = self.run() => {}
            _ = shutdown.changed() => {}
        }
    }
}
