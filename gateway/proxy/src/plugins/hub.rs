//! State that all plugins of the process share: their way to models, to the config's endpoints, and their background
//! work.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::net::IpAddr;
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
use penstock_base::panics::caught;
use penstock_governed::Reservation;
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
/// Interval between two attempts to open a file that could not be opened.
const REOPEN: Duration = Duration::from_secs(5);
/// Interval between two lines of the log about one file, or about the background work of one plugin.
const SAID_EACH: Duration = Duration::from_secs(60);
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

    /// Model of that name, as the principal may use it, and the reservation of one operation at URL `path` that no dialect here
    /// reads; the caller closes the reservation by the operation's end. `from`: address of the client in whose name it is.
    ///
    /// # Errors
    /// There is no such model, or a limit leaves no room.
    async fn admit_operation(
        &self,
        path: &str,
        model: &str,
        principal: &Principal,
        from: Option<IpAddr>,
    ) -> Result<(Entry, Option<Reservation>), Failure>;

    /// Plugins of the config in force.
    fn plugins(&self) -> Arc<Chain>;
}

/// Shared state that outlives configs: a reload closes no connection.
pub struct Hub {
    models: OnceLock<Weak<dyn Models>>,
    clients: Mutex<HashMap<Endpoint, Arc<Client>>>,
    work: Arc<Semaphore>,
    cache: OnceLock<Arc<dyn Cache>>,
    /// Files that lines are appended to, by path.
    files: Mutex<HashMap<String, File>>,
    /// Limiters of log lines about background work, by id of the plugin.
    said: Mutex<HashMap<Arc<str>, Seldom>>,
}

/// File that plugins append lines to.
#[derive(Default)]
struct File {
    /// Writer of the file; `None`: the file could not be opened so far.
    log: Option<Arc<AccessLog>>,
    /// Time of the last attempt to open the file.
    tried: Option<Instant>,
    /// Lines that came while the file could not be opened.
    lost: u64,
    said: Seldom,
}

impl File {
    /// Writer of the file, which is opened where it is not; between two attempts there is none.
    fn writer(&mut self, path: &str, now: Instant) -> Option<Arc<AccessLog>> {
        let is_due = self.tried.is_none_or(|tried| now.saturating_duration_since(tried) >= REOPEN);
        if self.log.is_none() && is_due {
            self.tried = Some(now);
            // Lines can hold prompts and answers: only this user may read them.
            let opened = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
            match opened.and_then(|file| AccessLog::to(Box::new(file))) {
                Ok(log) => {
                    if self.lost > 0 {
                        tracing::info!(path, lines_lost = self.lost, "the output file of a plugin is open now");
                    }
                    self.log = Some(Arc::new(log));
                }
                Err(error) if self.said.due(now).is_some() => {
                    let lines_lost = self.lost + 1;
                    tracing::error!(path, %error, lines_lost, "a plugin's output file cannot be opened: its lines are lost until an attempt succeeds");
                }
                Err(_) => {}
            }
        }
        self.log.clone()
    }
}

/// Limiter of one kind of log line: the first at once, then at most one in [`SAID_EACH`].
#[derive(Default)]
struct Seldom {
    next: Option<Instant>,
    left_out: u64,
}

impl Seldom {
    /// Number of lines left out since the last one; `None`: this line is left out, too.
    fn due(&mut self, now: Instant) -> Option<u64> {
        if self.next.is_some_and(|next| now < next) {
            self.left_out += 1;
            return None;
        }
        self.next = Some(now + SAID_EACH);
        Some(std::mem::take(&mut self.left_out))
    }
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
            said: Mutex::default(),
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

    /// Queues a line for the writer of a file. A file that cannot be opened loses lines, and is tried again with a later one.
    pub(super) fn append(&self, path: &str, line: &[u8]) {
        self.append_at(path, line, Instant::now());
    }

    fn append_at(&self, path: &str, line: &[u8], now: Instant) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let file = files.entry(path.to_owned()).or_default();
        let writer = file.writer(path, now);
        if writer.is_none() {
            file.lost += 1;
        }
        drop(files);
        writer.iter().for_each(|writer| writer.line(line));
    }

    /// Writes the buffered lines of all files out to the system.
    pub(crate) fn flush(&self) {
        let writers: Vec<_> = {
            let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
            files.values().filter_map(|file| file.log.clone()).collect()
        };
        writers.iter().for_each(|writer| writer.flush());
    }

    /// Number of lines that were lost because a file could not be opened, or could not take them.
    pub(crate) fn lines_lost(&self) -> u64 {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.values().map(|file| file.lost + file.log.as_ref().map_or(0, |log| log.lost())).sum()
    }

    /// Begins background work; false where there is no room. `failed` is told the reason, in one word and in detail, of work that
    /// panics, and of work that is given up.
    pub(super) fn spawn(&self, work: BoxFuture<()>, failed: impl FnOnce(&'static str, &str) + Send + 'static) -> bool {
        let Ok(place) = self.work.clone().try_acquire_owned() else { return false };
        tokio::spawn(async move {
            let _place = place;
            // Work that takes longer is given up: nobody waits for it.
            match timeout(WORK_TIMEOUT, caught(work)).await {
                Ok(Ok(())) => {}
                Ok(Err(panic)) => failed("panic", &panic),
                Err(_) => failed("timeout", &format!("no end within {} s", WORK_TIMEOUT.as_secs())),
            }
        });
        true
    }

    /// Number of lines left out of the log since the last one about the background work of this plugin; `None`: the next one is
    /// left out, too.
    pub(super) fn may_say(&self, plugin: &Arc<str>) -> Option<u64> {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.entry(plugin.clone()).or_default().due(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_opened_loses_lines_that_count_and_is_tried_again() {
        let folder = std::env::temp_dir().join(format!("penstock-hub-{}", std::process::id()));
        let file = folder.join("captured.jsonl");
        let path = file.to_str().expect("utf-8");
        let (hub, began) = (Hub::default(), Instant::now());
        let at = |ms| began + Duration::from_millis(ms);
        hub.append_at(path, b"1\n", at(0));
        std::fs::create_dir_all(&folder).expect("a folder");
        hub.append_at(path, b"2\n", at(4999));
        assert_eq!((hub.lines_lost(), file.exists()), (2, false), "not tried with each line");
        hub.append_at(path, b"3\n", at(5000));
        hub.append_at(path, b"4\n", at(5000));
        hub.flush();
        let text = std::fs::read_to_string(&file).expect("the file is there");
        std::fs::remove_dir_all(&folder).expect("removed");
        assert_eq!((text.as_str(), hub.lines_lost()), ("3\n4\n", 2));
    }

    #[test]
    fn one_line_a_minute_says_how_many_were_left_out() {
        let (mut seldom, began) = (Seldom::default(), Instant::now());
        let said = [0, 0, 59, 60, 61, 130, 131].map(|second| seldom.due(began + Duration::from_secs(second)));
        assert_eq!(said, [Some(0), None, None, Some(2), None, Some(1), None]);
    }
}
