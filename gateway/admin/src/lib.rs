//! Admin API: state and control of a gateway, on a listener of its own, with keys of its own.
//!
//! Read `routes` for the operations, `gate` for the checks before each of them. The role that a route needs stands in
//! the OpenAPI document that the routes make, and is enforced from there (`roles`).
//!
//! Deliberately absent: anything that runs a command or a template; secrets in answers; a path of model requests (`routes::playground` uses the proxy's).
#![forbid(unsafe_code)]

mod audit;
mod compare;
mod console;
mod document;
mod dry_runs;
mod error;
mod extract;
mod gate;
mod keys;
mod looks;
mod origin;
mod pulse;
mod renewals;
mod roles;
mod routes;
mod server;
mod sign_on;
mod state;
#[cfg(test)]
mod tests;
mod throttle;
mod version;
pub mod webhooks;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use penstock_auth::jwt::RecentKeys;
use penstock_base::clock;
use penstock_config::AdminConfig;
use penstock_proxy::Gateway;
use penstock_proxy::fleet::Fleet;
use penstock_proxy::reload::Live;
use penstock_store::Store;
use tokio::sync::Semaphore;

pub use keys::{KEY_FILE, LOCAL_KEY, key_path};
pub use state::LogFilter;

/// File in the state folder with the API's addresses: a URL per line.
pub const ADDRESS_FILE: &str = "admin.url";

/// Objects that the API shows and steers.
#[derive(Clone)]
pub struct Parts {
    /// Gateway.
    pub gateway: Arc<Gateway>,
    /// Workers of the gateway.
    pub fleet: Arc<Fleet>,
    /// Config in force, and changes of it.
    pub live: Arc<Live>,
    /// Store of the gateway.
    pub store: Arc<dyn Store>,
    /// Filter of the log.
    pub log: Arc<dyn LogFilter>,
}

/// Reason why the API could not start.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// An address cannot be listened on.
    #[error("admin API: cannot listen on {place}: {reason}")]
    Listen {
        /// Address or path.
        place: String,
        /// Error of the system.
        reason: io::Error,
    },
    /// The key of this machine cannot be read or made.
    #[error("admin API: the key of this machine: {0}")]
    Key(io::Error),
    /// The routes contradict themselves, which is a bug.
    #[error("admin API: {0}")]
    Routes(String),
    /// The system has no thread for the API.
    #[error("admin API: {0}")]
    Start(io::Error),
}

/// Running admin API, which ends on drop.
pub struct Running {
    server: server::Running,
    address_file: PathBuf,
    urls: Vec<String>,
}

impl Running {
    /// URLs at which the API is served.
    pub fn urls(&self) -> &[String] {
        &self.urls
    }

    /// URL of the web console; `None`: the API listens on a Unix socket alone.
    pub fn console(&self) -> Option<String> {
        let url = self.urls.iter().find(|url| url.starts_with("http"))?;
        Some(format!("{url}{}", penstock_console::HOME))
    }

    /// Stops accepting, waits for answers in progress, then returns.
    pub fn stop(&mut self) {
        // A process that took over has written its own.
        if std::fs::read_to_string(&self.address_file).is_ok_and(|text| text == listed(&self.urls)) {
            let _ = std::fs::remove_file(&self.address_file);
        }
        self.server.stop();
    }
}

/// Starts the API; `None`: the config turns it off. `patience`: longest wait for an address that a process about to end
/// still has.
///
/// # Errors
/// [`AdminError`]; nothing is left running.
pub fn start(
    parts: Parts,
    config: &AdminConfig,
    state_dir: &Path,
    patience: Duration,
) -> Result<Option<Running>, AdminError> {
    let mut sockets = Vec::new();
    let failed = |place: String| move |reason| AdminError::Listen { place, reason };
    sockets.extend(server::bind(config.listen, patience).map_err(failed(format!("{:?}", config.listen)))?);
    if let Some(path) = &config.unix {
        sockets.push(server::bind_unix(path).map_err(failed(path.display().to_string()))?);
    }
    if sockets.is_empty() {
        return Ok(None);
    }
    let urls: Vec<_> = sockets.iter().map(server::Socket::url).collect();
    let changes = Arc::new(Semaphore::new(gate::CHANGES_MAX as usize));
    let (router, chore) = router(parts, config, state_dir, changes.clone())?;
    let server = server::Running::start(&router, sockets, chore, changes).map_err(AdminError::Start)?;
    let address_file = state_dir.join(ADDRESS_FILE);
    if let Err(error) = std::fs::write(&address_file, listed(&urls)) {
        let path = address_file.display().to_string();
        tracing::warn!(%error, path, "the address file of the admin API could not be written: penstock admin needs --url");
    }
    tracing::info!(urls = urls.join(" "), "admin API listens");
    Ok(Some(Running { server, address_file, urls }))
}

fn listed(urls: &[String]) -> String {
    urls.iter().map(|url| format!("{url}\n")).collect()
}

/// Routes behind their gate, and work to be done every few seconds.
fn router(
    parts: Parts,
    config: &AdminConfig,
    state_dir: &Path,
    changes: Arc<Semaphore>,
) -> Result<(Router, server::Chore), AdminError> {
    let keys = keys::AdminKeys::open(&config.keys, state_dir).map_err(AdminError::Key)?;
    let (router, document) = routes::all().split_for_parts();
    let document = document::complete(&document).map_err(AdminError::Routes)?;
    let routes = roles::Routes::read(&document).map_err(AdminError::Routes)?;
    let Parts { gateway, fleet, live, store, log } = parts;
    let mut seal = [0; 32];
    getrandom::fill(&mut seal).map_err(|error| AdminError::Key(io::Error::other(error)))?;
    let admin = Arc::new(state::State {
        gateway,
        fleet,
        live,
        store,
        log,
        keys,
        throttle: throttle::Throttle::default(),
        sessions: Arc::default(),
        logins: penstock_console::Logins::default(),
        directions: sign_on::Directions::default(),
        renewals: renewals::Renewals::default(),
        pulse: pulse::Pulse::default(),
        dry_runs: dry_runs::DryRuns::default(),
        changes,
        provider_keys: RecentKeys::default(),
        sign_offs: Semaphore::new(routes::sign_off::CHECKS_MAX),
        routes,
        document: document.to_string().into(),
        turn: tokio::sync::Mutex::default(),
        seal,
        began: Instant::now(),
        began_ms: clock::since_epoch().as_millis() as u64,
    });
    let api = router
        .fallback(routes::no_such_path)
        .method_not_allowed_fallback(routes::no_such_method)
        .layer(axum::middleware::from_fn_with_state(admin.clone(), gate::gate));
    let sweep = admin.clone();
    let sweep = move || {
        let sessions = sweep.sessions.count(Instant::now());
        sweep.gateway.metrics.console_sessions(sessions);
        looks::tick(&sweep);
    };
    Ok((console::routes().merge(api).with_state(admin), Box::new(sweep)))
}
