//! Webhooks: state changes of the gateway, told to the places of `[[webhooks]]` as signed messages.
//!
//! A thread of its own looks at the state every few seconds (`look`), decides what is new (`edges`), and puts it into the bounded queue of each webhook,
//! whose task sends one message after another (`send`). Webhooks of the config in force count: a reload starts and ends tasks. The thread works while the
//! process serves, also where the admin API is off.
//!
//! Deliberately absent: prompts, keys' texts and other secrets in messages; redirects; any place that the config does not name.

mod edges;
mod look;
mod send;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use penstock_base::clock;
use penstock_base::panics::supervised;
use penstock_config::WebhookConfig;
use penstock_proxy::Gateway;
use penstock_proxy::fleet::Fleet;
use penstock_store::Store;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle as Task;

use edges::{Edges, Now, Rules};
use look::Keys;
use send::Message;

/// Interval of looks at the state.
const LOOK_EACH: Duration = Duration::from_secs(2);
/// Most messages that wait for one webhook; further ones are dropped and counted.
const WAITING_MAX: usize = 256;
/// Longest wait for messages that are being sent when the process ends.
const STOP_GRACE: Duration = Duration::from_millis(500);

/// Objects that webhooks tell of.
pub struct Watched {
    /// Gateway with its config, providers and counters.
    pub gateway: Arc<Gateway>,
    /// Workers of the gateway.
    pub fleet: Arc<Fleet>,
    /// Store with the issued keys.
    pub store: Arc<dyn Store>,
}

/// Running webhooks, which end on drop.
pub struct Webhooks {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Webhooks {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub fn start(watched: Watched) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, mut stopped) = watch::channel(false);
        let thread = std::thread::Builder::new().name("penstock-hooks".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    // Err: the owner is gone.
                    _ = stopped.wait_for(|stop| *stop) => {}
                    () = supervised("webhooks", || run(&watched), || tokio::time::sleep(LOOK_EACH)) => {}
                }
            });
            runtime.shutdown_timeout(STOP_GRACE);
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Webhooks {
    fn drop(&mut self) {
        // Err: the thread has ended.
        let _ = self.stop.send(true);
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

/// Webhook at work.
struct Hook {
    config: WebhookConfig,
    edges: Edges,
    queue: mpsc::Sender<Message>,
    task: Task<()>,
}

impl Drop for Hook {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Looks at the state until the future is dropped.
async fn run(watched: &Watched) {
    let (mut hooks, mut keys, began) = (BTreeMap::<String, Hook>::new(), Keys::default(), Instant::now());
    loop {
        let config = watched.gateway.serving().config.clone();
        hooks.retain(|name, hook| config.webhooks.iter().any(|one| one.name == *name && *one == hook.config));
        for one in config.webhooks.iter() {
            if !hooks.contains_key(&one.name) {
                hooks.insert(one.name.clone(), begin(watched, one.clone()));
            }
        }
        if !hooks.is_empty() {
            let now = Now { since: began.elapsed(), unix: clock::unix_seconds() };
            let seen = look::seen(watched, &mut keys, now).await;
            for hook in hooks.values_mut() {
                tell(watched, hook, &seen, now);
            }
        }
        tokio::time::sleep(LOOK_EACH).await;
    }
}

fn begin(watched: &Watched, config: WebhookConfig) -> Hook {
    let (queue, waiting) = mpsc::channel(WAITING_MAX);
    let task = tokio::spawn(send::run(config.clone(), waiting, watched.gateway.metrics.clone()));
    Hook { config, edges: Edges::default(), queue, task }
}

/// Queues what is new for a webhook.
fn tell(watched: &Watched, hook: &mut Hook, seen: &edges::Seen, now: Now) {
    let config = &hook.config;
    let mut budget_percents = vec![config.budget_percent, 100];
    budget_percents.dedup();
    let rules =
        Rules { events: config.events.clone(), budget_percents, expiring: config.expiring, repeat: config.repeat };
    for event in hook.edges.look(seen, &rules, now) {
        let kind = event.kind.name();
        if hook.queue.try_send(Message::new(&event, now.unix)).is_err() {
            send::count(&watched.gateway.metrics, &config.name, "dropped");
            tracing::warn!(webhook = config.name, event = kind, "webhook message dropped: too many wait");
        }
    }
}
