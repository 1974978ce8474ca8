//! The process: listeners, signals, draining.
//!
//! Pingora's server runs the listeners. SIGTERM (and one Ctrl-C) stops accepting, lets answers in progress end, and exits as soon as
//! there are none, or when the grace time is over.

use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use pingora_core::listeners::ListenerConfig;
use pingora_core::listeners::tls::TlsSettings;
use pingora_core::protocols::l4::stream::L4BufferSettings;
use pingora_core::server::configuration::ServerConf;
use pingora_core::server::{RunArgs, Server, ShutdownSignal, ShutdownSignalWatch};
use pingora_core::services::listening::Service;
use tokio::signal::unix::{SignalKind, signal};

use crate::auth::{self, certificate};
use crate::batches;
use crate::config::{Snapshot, TlsFiles};
use crate::gateway::Gateway;
use crate::http::connection::App;

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// The address or path.
        address: String,
        /// What the system says, and what helps.
        reason: String,
    },
    /// The thread that runs batches cannot be started.
    #[error("batches: {0}")]
    Thread(String),
    /// Certificate or key cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
}

/// Longer than anything that is waited for.
const GRACE_SECONDS_MAX: u64 = 30 * 24 * 3600;

/// Plain listeners need no buffer of Pingora's: heads and bodies are read into our own. Responses keep one segment's worth.
const BUFFERS: L4BufferSettings = L4BufferSettings { read: Some(0), write: Some(1460) };

/// The service with all listeners of the config.
pub fn service(gateway: Arc<Gateway>, config: &Snapshot) -> Result<Service<App<Gateway>>, ServerError> {
    let mut service = Service::new("http".into(), App::new(gateway));
    service.threads = Some(config.threads);
    let mut listener = ListenerConfig::tcp(config.listen.to_string()).l4_buffer(BUFFERS);
    if let Some(files) = &config.tls {
        listener = listener.tls(tls(files)?);
    }
    service.add_listener(listener);
    if let Some(path) = &config.unix {
        service.add_listener(ListenerConfig::uds(path.display().to_string()).l4_buffer(BUFFERS));
    }
    Ok(service)
}

/// Checks certificate and key before Pingora, which panics on bad ones, sees them.
fn tls(files: &TlsFiles) -> Result<TlsSettings, ServerError> {
    check_pem(&files.cert, "CERTIFICATE")?;
    check_pem(&files.key, "PRIVATE KEY")?;
    let said = |error: Box<pingora_core::Error>| ServerError::Tls(error.to_string());
    let (cert, key) = (files.cert.display().to_string(), files.key.display().to_string());
    let mut settings = TlsSettings::with_callbacks(Box::new(certificate::ReadNames)).map_err(said)?;
    settings.set_certificate_chain_file(&cert).map_err(said)?;
    settings.set_private_key_file(&key).map_err(said)?;
    if let Some(authorities) = &files.client_ca {
        let verifier = certificate::verifier(authorities, files.client_required).map_err(ServerError::Tls)?;
        settings.set_client_cert_verifier(verifier);
    }
    settings.enable_h2();
    Ok(settings)
}

fn check_pem(path: &Path, label: &str) -> Result<(), ServerError> {
    let text =
        std::fs::read_to_string(path).map_err(|error| ServerError::Tls(format!("{}: {error}", path.display())))?;
    if text.contains(&format!("{label}-----")) {
        return Ok(());
    }
    Err(ServerError::Tls(format!("{} has no PEM block {label}", path.display())))
}

/// Finds out early, and in words, whether the address is free. Port 0 is replaced by a free port.
pub fn reserve(config: &mut Snapshot) -> Result<(), ServerError> {
    let listener = TcpListener::bind(config.listen).map_err(|error| ServerError::Listen {
        address: config.listen.to_string(),
        reason: match error.kind() {
            io::ErrorKind::AddrInUse => {
                "the port is in use; choose another with --listen 127.0.0.1:PORT (0: any free one)".into()
            }
            io::ErrorKind::PermissionDenied => "not permitted; ports below 1024 need privileges".into(),
            _ => error.to_string(),
        },
    })?;
    config.listen = listener.local_addr().unwrap_or(config.listen);
    Ok(())
}

/// Runs until a signal says otherwise. `stop` is called once when all answers have ended.
pub fn run(
    gateway: Arc<Gateway>,
    config: &Snapshot,
    stop: impl Fn() + Send + Sync + 'static,
) -> Result<(), ServerError> {
    let service = service(gateway.clone(), config)?;
    auth::start(&gateway).map_err(|error| ServerError::Thread(error.to_string()))?;
    batches::start(gateway.clone()).map_err(|error| ServerError::Thread(error.to_string()))?;
    let conf = ServerConf {
        threads: config.threads,
        // Pingora sleeps for all of it, then cuts what runs; `drain` leaves before.
        grace_period_seconds: Some(GRACE_SECONDS_MAX),
        graceful_shutdown_timeout_seconds: Some(1),
        ..ServerConf::default()
    };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    server.add_service(service);
    let log = gateway.clone();
    let stop = Arc::new(move || {
        stop();
        log.access_log.flush();
    });
    let drained = stop.clone();
    let socket = config.unix.clone();
    let signals = Signals { gateway, socket, drained: Arc::new(move || drained()) };
    server.run(RunArgs { shutdown_signal: Box::new(signals) });
    stop();
    Ok(())
}

/// SIGTERM and the first SIGINT drain; a second SIGINT ends at once.
struct Signals {
    gateway: Arc<Gateway>,
    socket: Option<PathBuf>,
    drained: Arc<dyn Fn() + Send + Sync>,
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
        }
        if let Some(path) = &self.socket {
            // Whoever tries it from now on is told at once that nobody is there. It may be gone already.
            let _ = std::fs::remove_file(path);
        }
        let (gateway, drained) = (self.gateway.clone(), self.drained.clone());
        let grace = gateway.serving().config.grace;
        let log = gateway.clone();
        // Pingora sleeps through the whole grace time on this thread; this one leaves as soon as nothing is in flight.
        std::thread::spawn(move || drain(&gateway, grace, drained.as_ref()));
        tokio::spawn(async move {
            interrupt.recv().await;
            log.access_log.flush();
            std::process::exit(130);
        });
        ShutdownSignal::GracefulTerminate
    }
}

fn drain(gateway: &Gateway, grace: Duration, drained: &(dyn Fn() + Send + Sync)) {
    let began = std::time::Instant::now();
    tracing::info!(in_flight = gateway.metrics.in_flight_now(), "draining");
    // Connections accepted a moment ago get their first request answered.
    let settle = Duration::from_millis(200).min(grace);
    while began.elapsed() < grace
        && (began.elapsed() < settle || gateway.metrics.in_flight_now() > 0 || !gateway.is_saved())
    {
        std::thread::park_timeout(Duration::from_millis(20));
    }
    drained();
    std::process::exit(0);
}
