//! A gateway in this process in front of an upstream that follows the prompt's commands, and raw sockets to attack it
//! with.
//!
//! Deliberately absent: HTTP clients that tidy up requests (except for HTTP/2, where a client is needed to misbehave
//! with).
#![forbid(unsafe_code)]

pub mod provider;
pub mod raw;
pub mod upstream;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use penstock_config::{Overrides, Snapshot};
use penstock_proxy::{Gateway, server, stored};
use penstock_telemetry::AccessLog;
use pingora_core::server::ListenFds;
use pingora_core::services::Service as _;
use tokio::net::TcpSocket;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use upstream::Puppet;

/// Longest wait of a test for an expected event.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A temporary folder for one gateway; removed when dropped.
pub struct Folder(PathBuf);

impl Folder {
    /// Makes a folder.
    #[expect(clippy::new_without_default, reason = "a folder is made, which a default does not suggest")]
    pub fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("penstock-hostile-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    /// Config text whose store and pepper lie in this folder.
    pub fn config(&self, more: &str) -> String {
        format!("[server]\nstate_dir = {:?}\n{more}", self.0)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A leftover in the folder for temporary files harms nothing.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A running gateway; it stops when dropped.
pub struct Server {
    /// Address of the listener.
    pub address: SocketAddr,
    /// State of the gateway, for metrics.
    pub gateway: Arc<Gateway>,
    /// Upstream that answers.
    pub puppet: Arc<Puppet>,
    shutdown: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Server {
    /// Starts a gateway with a config text (the access log is off, the port is free).
    pub async fn start(config_text: &str) -> Self {
        Self::run(config_text, false).await
    }

    /// Starts a gateway as [`Self::start`] does, with the store that the config names, and everything that needs it.
    /// The environment variable `NAME` has the value `secret-NAME`.
    pub async fn kept(config_text: &str) -> Self {
        Self::run(config_text, true).await
    }

    async fn run(config_text: &str, kept: bool) -> Self {
        let overrides =
            Overrides { listen: Some("127.0.0.1:0".into()), access_log: Some("off".into()), ..Overrides::default() };
        let config =
            penstock_config::load(Some(("test.toml", config_text)), &overrides, &|name| Some(format!("secret-{name}")));
        let mut config = config.expect("a valid config");
        // Host name in the requests of `raw`.
        config.hosts.push("a".into());
        let sockets = listening(&mut config);
        let puppet = Arc::new(Puppet::default());
        let log = AccessLog::open(&config.access_log).expect("an access log");
        let gateway = Gateway::new(config.clone(), log, vec![puppet.clone()], Vec::new());
        let gateway = if kept { gateway.with_store(stored::open(&config).expect("a store")) } else { gateway };
        let gateway = Arc::new(gateway);
        if kept {
            let followed = gateway.clone();
            let started = tokio::task::spawn_blocking(move || {
                penstock_auth::start(&followed, &followed.serving().config.auth_settings())
            })
            .await;
            started.expect("no panic").expect("a thread");
        }
        let mut service = server::service(gateway.clone(), &config).expect("a service");
        let (shutdown, watching) = watch::channel(false);
        let task = tokio::spawn(async move { service.start_service(Some(sockets), watching, 1).await });
        Self { address: config.listen, gateway, puppet, shutdown, task }
    }

    /// Waits until the upstream has no open request.
    pub async fn upstream_idle(&self) {
        eventually("the upstream is idle", || self.puppet.open() == 0).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.shutdown.send(true);
        self.task.abort();
    }
}

/// Binds the listeners of a config and replaces port 0 by the bound port. The sockets listen from here on, so that no
/// other test is given their port, and who connects early waits.
fn listening(config: &mut Snapshot) -> ListenFds {
    let listeners = server::Listeners::bind(config, PathBuf::new(), None).expect("a free port");
    listeners.table().expect("descriptors")
}

/// An address at which nobody listens, and which nobody else is given as long as it is held: connections are refused.
pub struct Vacant {
    /// The address.
    pub address: SocketAddr,
    _bound: TcpSocket,
}

impl Vacant {
    /// Takes an address and does not listen at it.
    #[expect(clippy::new_without_default, reason = "a port is taken, which a default does not suggest")]
    pub fn new() -> Self {
        let bound = TcpSocket::new_v4().expect("a socket");
        bound.bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
        Self { address: bound.local_addr().expect("an address"), _bound: bound }
    }
}

/// Checks that the duration measured by `attempt` is below `promise` at least once in five attempts: a busy or pausing
/// machine does not add its delay every time.
///
/// # Panics
/// After five attempts.
pub async fn promised(promise: Duration, mut attempt: impl AsyncFnMut() -> Duration) {
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= promise) {
        assert!(took.len() < 5, "promised within {promise:?}, took {took:?}");
        took.push(attempt().await);
    }
}

/// Waits for a condition.
///
/// # Panics
/// After [`PATIENCE`].
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
