//! The process: listeners, signals, draining.
//!
//! Pingora's server runs the listeners, on sockets that are ours (`listeners.rs`). SIGTERM (and one Ctrl-C) stops accepting, lets answers
//! in progress end, and exits as soon as there are none, or when the grace time is over; a process that has handed over does the same
//! with more patience (`drain.rs`).

mod drain;
mod listeners;
#[cfg(test)]
mod tls_tests;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use pingora_core::listeners::ListenerConfig;
use pingora_core::listeners::tls::{Acceptor, TlsSettings};
use pingora_core::protocols::l4::stream::L4BufferSettings;
use pingora_core::server::configuration::ServerConf;
use pingora_core::server::{ListenFds, RunArgs, Server, ShutdownWatch};
use pingora_core::services::listening::Service;

use crate::batches;
use crate::certificate::{self, Certificate};
use crate::gateway::Gateway;
use drain::Signals;
pub use drain::{Leave, Stops};
pub use listeners::Listeners;
use penstock_config::{Snapshot, TlsFiles};
use penstock_http::Renewed;
use penstock_http::certificate::ReadNames;
use penstock_http::connection::App;

/// Reason why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An address or Unix socket of the config cannot be listened on.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// Address, or path of the Unix socket, that could not be bound.
        address: String,
        /// Reason that the system gave, and advice for the operator.
        reason: String,
    },
    /// The thread that runs batches cannot be started.
    #[error("batches: {0}")]
    Thread(String),
    /// The TLS certificate or key of the listener cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
}

/// Grace period given to Pingora, longer than any wait of ours.
const GRACE_SECONDS_MAX: u64 = 30 * 24 * 3600;

/// Buffers of plain listeners: no read buffer of Pingora's, since heads and bodies are read into our own; one segment's
/// worth for writes.
const BUFFERS: L4BufferSettings = L4BufferSettings { read: Some(0), write: Some(1460) };

/// The service with all listeners of the config.
pub fn service(gateway: Arc<Gateway>, config: &Snapshot) -> Result<Service<App<Gateway>>, ServerError> {
    let tls = config.tls.as_ref().map(|files| tls(&gateway, files)).transpose()?;
    let app = App::new(gateway).with_tls(tls);
    let mut service = Service::new("http".into(), app);
    service.threads = Some(config.threads);
    service.add_listener(ListenerConfig::tcp(config.listen.to_string()).l4_buffer(BUFFERS));
    if let Some(path) = &config.unix {
        service.add_listener(ListenerConfig::uds(path.display().to_string()).l4_buffer(BUFFERS));
    }
    Ok(service)
}

/// Checks that the server could serve TLS with these files.
///
/// # Errors
/// The fault of the files, for people.
pub fn check_tls(files: &TlsFiles) -> Result<(), String> {
    certificate::check(files)
}

/// TLS of the listeners. A fault of the files is found here, before Pingora, which panics on it. The gateway keeps the certificate, to read
/// the files again when they change.
fn tls(gateway: &Gateway, files: &TlsFiles) -> Result<Arc<Renewed<Acceptor>>, ServerError> {
    let (certificate, tls) = Certificate::open(files, |certificate, clients| {
        let said = |error: Box<pingora_core::Error>| error.to_string();
        let mut settings = TlsSettings::with_callbacks(Box::new(ReadNames)).map_err(said)?;
        settings.set_cert_resolver(certificate);
        clients.into_iter().for_each(|clients| settings.set_client_cert_verifier(clients));
        settings.enable_h2();
        Ok(settings.build())
    })
    .map_err(ServerError::Tls)?;
    // Err: a second server of one gateway, in tests, reads its own once.
    let _ = gateway.certificate.set(certificate);
    Ok(tls)
}

/// TLS of the endpoint picker, with HTTP/2 alone; `None`: it speaks plain HTTP/2. The gateway keeps the certificate, to
/// read the files again when they change.
///
/// # Errors
/// [`ServerError::Tls`].
pub fn picker_tls(
    gateway: &Gateway,
    files: Option<&TlsFiles>,
) -> Result<Option<Arc<Renewed<rustls::ServerConfig>>>, ServerError> {
    let Some(files) = files else { return Ok(None) };
    let (certificate, tls) = Certificate::open(files, |certificate, clients| {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| error.to_string())?;
        let builder = match clients {
            Some(clients) => builder.with_client_cert_verifier(clients),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(certificate);
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    })
    .map_err(ServerError::Tls)?;
    // Err: a second server of one gateway, in tests, reads its own once.
    let _ = gateway.picker_certificate.set(certificate);
    Ok(Some(tls))
}

/// Pingora's service on our own sockets, with a signal of its start.
struct Serving {
    inner: Service<App<Gateway>>,
    sockets: ListenFds,
    started: Option<Box<dyn FnOnce() + Send + Sync>>,
}

/// Delay after which a service whose listeners failed would have ended.
const STARTED: Duration = Duration::from_millis(50);

#[async_trait]
impl pingora_core::services::Service for Serving {
    async fn start_service(&mut self, _: Option<ListenFds>, shutdown: ShutdownWatch, listeners_per_fd: usize) {
        let started = self.started.take();
        let serving = self.inner.start_service(Some(self.sockets.clone()), shutdown, listeners_per_fd);
        tokio::pin!(serving);
        tokio::select! {
            () = &mut serving => return,
            () = tokio::time::sleep(STARTED) => {}
        }
        if let Some(started) = started {
            started();
        }
        serving.await;
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn threads(&self) -> Option<usize> {
        self.inner.threads()
    }
}

/// Callbacks and signals between the server and the command that runs it.
pub struct Hooks {
    /// Callback for the moment when the server accepts connections.
    pub started: Box<dyn FnOnce() + Send + Sync>,
    /// Signal of the caller that another process serves: the server ends when its answers have.
    pub leave: Leave,
    /// Signals of the system that end the server.
    pub stops: Stops,
    /// Callback for the moment when a signal ends the server: whatever serves beside the listeners takes no more requests
    /// either, and its open ones end within the same grace time. A later signal calls it again.
    pub ending: Box<dyn Fn() + Send + Sync>,
    /// Callback for the moment when all answers have ended.
    pub stop: Box<dyn Fn() + Send + Sync>,
}

/// Runs until a signal ends the server, or until another process serves and the open answers have ended.
pub fn run(
    gateway: Arc<Gateway>,
    config: &Snapshot,
    listeners: Arc<Listeners>,
    hooks: Hooks,
) -> Result<(), ServerError> {
    let inner = service(gateway.clone(), config)?;
    let sockets = listeners.table().map_err(|error| ServerError::Thread(error.to_string()))?;
    let service = Serving { inner, sockets, started: Some(hooks.started) };
    penstock_auth::start(&gateway, &config.auth_settings()).map_err(|error| ServerError::Thread(error.to_string()))?;
    batches::start(gateway.clone()).map_err(|error| ServerError::Thread(error.to_string()))?;
    let conf = ServerConf {
        threads: config.threads,
        // Pingora sleeps for all of it, then cuts what runs; we leave before.
        grace_period_seconds: Some(GRACE_SECONDS_MAX),
        graceful_shutdown_timeout_seconds: Some(1),
        ..ServerConf::default()
    };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    server.add_service(service);
    let (log, stop) = (gateway.clone(), hooks.stop);
    let stop: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
        stop();
        log.flush_logs();
    });
    let drained = stop.clone();
    let (leave, stops, ending) = (hooks.leave, Mutex::new(Some(hooks.stops)), hooks.ending.into());
    let signals = Signals { gateway, listeners, socket: config.unix.clone(), leave, stops, ending, drained };
    server.run(RunArgs { shutdown_signal: Box::new(signals) });
    stop();
    Ok(())
}
