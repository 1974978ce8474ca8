//! State that all plugins of the process share: their way to models, to the config's endpoints, and their background
//! work.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use penstock_plugins::{BoxFuture, Endpoint, HostError};
use penstock_store::Cache;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::chain::Chain;
use penstock_auth::Principal;
use penstock_base::error::Failure;
use penstock_http::BodyLease;
use penstock_http::client::{Client, Target};
use penstock_relay::models::Entry;
use penstock_telemetry::AccessLog;
use penstock_types::ChatEvent;
use penstock_upstream::call::Call;

/// Most pieces of plugins' background work at once, over all plugins.
const WORK_MAX: usize = 256;
/// Time limit of one piece of plugins' background work.
const WORK_TIMEOUT: Duration = Duration::from_secs(60);
/// Most endpoints with open connections. A config has few; beyond this many, old ones are dropped.
const CLIENTS_MAX: usize = 256;

/// Gateway as plugins reach it: its models, and the plugins in force.
#[async_trait]
pub(crate) trait Models: Send + Sync {
    /// Place of a request's body in the memory for bodies.
    fn lease(&self) -> BodyLease;

    /// Events of the answer to `call`, which is no stream, by `deadline`.
    ///
    /// # Errors
    /// The failure that a client would have been told.
    async fn events(
        &self,
        principal: &Arc<Principal>,
        call: Call,
        deadline: Instant,
    ) -> Result<Vec<ChatEvent>, Failure>;

    /// Model of that name, as the principal may use it.
    ///
    /// # Errors
    /// There is none.
    fn entry(&self, model: &str, principal: &Principal) -> Result<Entry, Failure>;

    /// Plugins of the config in force.
    fn plugins(&self) -> Arc<Chain>;
}

/// Shared state that outlives configs: a reload closes no connection.
pub struct Hub {
    models: OnceLock<Weak<dyn Models>>,
    clients: Mutex<HashMap<Endpoint, Arc<Client>>>,
    work: Arc<Semaphore>,
    cache: OnceLock<Arc<dyn Cache>>,
    /// Files that lines are appended to; `None`: a file that cannot be opened, which the log has reported.
    files: Mutex<HashMap<String, Option<Arc<AccessLog>>>>,
}

impl Default for Hub {
    fn default() -> Self {
        let work = Arc::new(Semaphore::new(WORK_MAX));
        Self {
            models: OnceLock::new(),
            clients: Mutex::default(),
            work,
            cache: OnceLock::new(),
            files: Mutex::default(),
        }
    }
}

impl Hub {
    /// Sets the gateway whose models plugins may ask.
    pub(crate) fn serve(&self, models: Weak<dyn Models>) {
        // Said once; a second time it would be the same one.
        let _ = self.models.set(models);
    }

    /// Sets the cache that gateways with the same store share.
    pub fn share(&self, cache: Arc<dyn Cache>) {
        // Said once, when the process starts.
        let _ = self.cache.set(cache);
    }

    pub(super) fn cache(&self) -> Result<&Arc<dyn Cache>, HostError> {
        let none = || HostError::Unavailable("there is no shared cache: configure [counters] with Redis".into());
        self.cache.get().ok_or_else(none)
    }

    pub(super) fn models(&self) -> Result<Arc<dyn Models>, HostError> {
        let models = self.models.get().and_then(Weak::upgrade);
        models.ok_or_else(|| HostError::Unavailable("no models can be asked here".into()))
    }

    pub(super) fn client(&self, endpoint: &Endpoint) -> Result<Arc<Client>, HostError> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(endpoint) {
            return Ok(client.clone());
        }
        let made = Target::parse(endpoint.url()).and_then(|target| Client::new(target, None));
        let client = Arc::new(made.map_err(HostError::Failed)?);
        if clients.len() >= CLIENTS_MAX {
            clients.clear();
        }
        clients.insert(endpoint.clone(), client.clone());
        Ok(client)
    }

    /// Queues a line for the writer of a file.
    pub(super) fn append(&self, path: &str, line: &[u8]) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match files.get(path) {
            Some(file) => file.clone(),
            None => {
                // Lines can hold prompts and answers: only this user may read them.
                let opened = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
                let opened = opened.and_then(|file| AccessLog::to(Box::new(file)));
                let file = opened
                    .inspect_err(
                        |error| tracing::error!(path, %error, "the output file of a plugin could not be opened"),
                    )
                    .ok();
                files.entry(path.to_owned()).or_insert(file.map(Arc::new)).clone()
            }
        };
        drop(files);
        file.iter().for_each(|file| file.line(line));
    }

    /// Writes the buffered lines of all files out to the system.
    pub(crate) fn flush(&self) {
        let files: Vec<_> = {
            let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
            files.values().flatten().cloned().collect()
        };
        files.iter().for_each(|file| file.flush());
    }

    /// Number of lines that were lost because a file could not take them.
    pub(crate) fn lines_lost(&self) -> u64 {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.values().flatten().map(|file| file.lost()).sum()
    }

    pub(super) fn spawn(&self, work: BoxFuture<()>) -> bool {
        let Ok(place) = self.work.clone().try_acquire_owned() else { return false };
        tokio::spawn(async move {
            let _place = place;
            // Work that takes longer is given up: nobody waits for it.
            let _ = timeout(WORK_TIMEOUT, work).await;
        });
        true
    }
}
