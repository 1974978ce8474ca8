//! Periodic work of plugins that belongs to no request: each plugin in force is called as often as it asked for.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use penstock_base::panics::caught;
use penstock_plugins::Plugin;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::chain::{Chain, Link};
use super::host::{Reports, RequestHost};
use super::hub::Models;
use penstock_config::PluginConfig;

/// Shortest period of calls, and interval at which due plugins are looked for.
const LOOK: Duration = Duration::from_millis(100);
/// Interval at which a new config's plugins are looked for while no plugin wants calls.
const LOOK_IDLE: Duration = Duration::from_secs(1);
/// Time limit of one periodic call of a plugin.
const TICK_TIMEOUT: Duration = Duration::from_secs(10);

/// Plugin that wants periodic calls, with the time of the next.
struct Due {
    plugin: Weak<dyn Plugin>,
    at: Instant,
    /// Task of the last call; the next one waits for its end.
    running: Option<JoinHandle<()>>,
}

/// Calls the plugins at their periods until the future is dropped.
pub(crate) async fn run(models: Arc<dyn Models>) {
    let mut due: HashMap<Arc<str>, Due> = HashMap::new();
    loop {
        let plugins = models.plugins();
        let now = Instant::now();
        due.retain(|_, due| due.plugin.strong_count() > 0);
        for Link { entry, .. } in &plugins.links {
            let Some(period) = entry.plugin.tick_period() else { continue };
            let plugin = Arc::downgrade(&entry.plugin);
            let at = now + period.max(LOOK);
            let next = due.entry(entry.id.clone()).or_insert_with(|| Due { plugin: plugin.clone(), at, running: None });
            if !next.plugin.ptr_eq(&plugin) {
                *next = Due { plugin, at, running: None };
            }
            if next.at <= now && next.running.as_ref().is_none_or(JoinHandle::is_finished) {
                (next.at, next.running) = (at, Some(call(&plugins, entry)));
            }
        }
        drop(plugins);
        sleep(if due.is_empty() { LOOK_IDLE } else { LOOK }).await;
    }
}

fn call(plugins: &Chain, entry: &PluginConfig) -> JoinHandle<()> {
    let plugin = entry.plugin.clone();
    let reports = Reports::new(&plugins.hub, &entry.id, &plugins.metrics);
    let host = RequestHost::new(plugins.hub.clone(), Arc::default()).reporting(reports.clone());
    tokio::spawn(async move {
        match timeout(TICK_TIMEOUT, caught(plugin.tick(Arc::new(host)))).await {
            Ok(Ok(())) => {}
            Ok(Err(panic)) => reports.failed("panic", &panic),
            Err(_) => reports.failed("timeout", &format!("no end within {} s", TICK_TIMEOUT.as_secs())),
        }
    })
}
