//! Active health checks: targets are probed at an interval, so that requests need not find an outage first.
//!
//! [`Asker`] follows the config: a probe that stays keeps its schedule, a removed one is stopped.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::target::Target;
use penstock_base::panics::supervised;
pub use penstock_upstream::Probe;

/// A probe and the targets that its result applies to.
pub(super) type Check = (Arc<dyn Probe>, Vec<Arc<Target>>);

/// Active health checks of the targets of a config, one probe per provider.
#[derive(Default)]
pub struct Checks(pub(super) Vec<Check>);

/// Runs the probes in tasks of the current runtime; dropping the asker ends them.
#[derive(Default)]
pub struct Asker(Vec<Asked>);

struct Asked {
    probe: Arc<dyn Probe>,
    targets: Arc<Mutex<Vec<Arc<Target>>>>,
    task: AbortHandle,
}

impl Asker {
    /// Replaces the set of running probes by these.
    pub fn follow(&mut self, checks: &Checks) {
        let mut before = std::mem::take(&mut self.0);
        for (probe, targets) in &checks.0 {
            match before.iter().position(|asked| Arc::ptr_eq(&asked.probe, probe)) {
                Some(at) => {
                    let asked = before.swap_remove(at);
                    asked.targets.lock().unwrap_or_else(PoisonError::into_inner).clone_from(targets);
                    self.0.push(asked);
                }
                None => self.0.push(Asked::begin(probe, targets)),
            }
        }
        before.iter().for_each(|gone| gone.task.abort());
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.0.iter().for_each(|asked| asked.task.abort());
    }
}

impl Asked {
    fn begin(probe: &Arc<dyn Probe>, targets: &[Arc<Target>]) -> Self {
        let targets = Arc::new(Mutex::new(targets.to_vec()));
        let (asking, about) = (probe.clone(), targets.clone());
        let pause = asking.interval();
        let ask = move || forever(asking.clone(), about.clone());
        // Targets that are down would stay down without their check.
        let task = tokio::spawn(supervised("health check", ask, move || sleep(pause)));
        Self { probe: probe.clone(), targets, task: task.abort_handle() }
    }
}

async fn forever(probe: Arc<dyn Probe>, targets: Arc<Mutex<Vec<Arc<Target>>>>) {
    let mut due = interval(probe.interval());
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        due.tick().await;
        let is_good = probe.is_good().await;
        let targets = targets.lock().unwrap_or_else(PoisonError::into_inner);
        targets.iter().for_each(|target| target.checked(is_good, Instant::now()));
    }
}
