//! Connecting to a target: name resolution, TCP, TLS.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::error::{ClientError, Fault};
use super::stream::Stream;
use super::target::{Place, Target};

/// Time for which resolved addresses are used before a new lookup. The system's resolver does not report their
/// lifetime.
const ADDRESSES_FRESH: Duration = Duration::from_secs(30);
/// Time for which resolved addresses are used if lookups fail.
const ADDRESSES_STALE: Duration = Duration::from_secs(3600);
/// Silence of a connection after which it is probed: an answer that is not streamed may be silent for ten minutes, and a NAT
/// forgets a connection after 350 s (AWS), 600 s (Google) or sooner.
const PROBE_AFTER: Duration = Duration::from_secs(60);
/// Time between probes of a silent connection.
const PROBE_EVERY: Duration = Duration::from_secs(15);
/// Most addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;

/// Connector to one target, with a cache of its addresses.
pub(super) struct Connector {
    target: Target,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    addresses: Mutex<Option<(Instant, Vec<SocketAddr>)>>,
}

impl Connector {
    /// Creates a connector; `ca`: file of certificates to trust instead of the system's.
    ///
    /// # Errors
    /// The file has no usable certificates, or the host is no name that a certificate can have.
    pub(super) fn new(target: Target, ca: Option<&Path>) -> Result<Self, String> {
        let tls = match &target.place {
            Place::Tcp { host, tls: true, .. } => {
                let name = ServerName::try_from(host.clone()).map_err(|_| format!("{host:?} is no name for TLS"))?;
                Some((TlsConnector::from(Arc::new(tls_config(ca)?)), name))
            }
            _ => None,
        };
        Ok(Self { target, tls, addresses: Mutex::default() })
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    /// Connects within `limit`, which covers lookup, TCP and TLS handshake.
    pub(super) async fn connect(&self, limit: Duration) -> Result<Stream, ClientError> {
        match timeout(limit, self.connected(limit)).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(ClientError::new(Fault::Connect, format!("connecting failed: {error}"))),
            Err(_) => {
                let message = format!("no connection within {} ms", limit.as_millis());
                Err(ClientError::new(Fault::ConnectTimeout, message))
            }
        }
    }

    async fn connected(&self, limit: Duration) -> io::Result<Stream> {
        let (host, port) = match &self.target.place {
            Place::Unix(path) => return Ok(Stream::Unix(UnixStream::connect(path).await?)),
            Place::Tcp { host, port, .. } => (host, *port),
        };
        let tcp = self.tcp(host, port, limit).await?;
        tcp.set_nodelay(true)?;
        penstock_link::keep_alive(&tcp, PROBE_AFTER, PROBE_EVERY)?;
        let Some((connector, name)) = &self.tls else { return Ok(Stream::Tcp(tcp)) };
        let tls = Box::pin(connector.connect(name.clone(), tcp)).await?;
        Ok(Stream::Tls(Box::new(tls)))
    }

    /// Tries the addresses in turn; each but the last may use half of the remaining time.
    async fn tcp(&self, host: &str, port: u16, limit: Duration) -> io::Result<TcpStream> {
        let began = Instant::now();
        let addresses = self.addresses(host, port).await?;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for (at, address) in addresses.iter().enumerate() {
            let left = limit.saturating_sub(began.elapsed());
            let share = if at + 1 == addresses.len() { left } else { left / 2 };
            match timeout(share, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => last = error,
                Err(_) => last = io::ErrorKind::TimedOut.into(),
            }
        }
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).take();
        Err(last)
    }

    async fn addresses(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = host.parse() {
            return Ok(vec![SocketAddr::new(address, port)]);
        }
        let known = self.addresses.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((since, addresses)) = &known
            && since.elapsed() < ADDRESSES_FRESH
        {
            return Ok(addresses.clone());
        }
        match tokio::net::lookup_host((host, port)).await {
            Ok(found) => {
                let found: Vec<_> = found.take(ADDRESSES_MAX).collect();
                *self.addresses.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), found.clone()));
                Ok(found)
            }
            Err(error) => match known {
                Some((since, addresses)) if since.elapsed() < ADDRESSES_STALE => Ok(addresses),
                _ => Err(error),
            },
        }
    }
}

/// TLS settings for PostgreSQL: the same roots, with that protocol in ALPN.
pub fn database_tls(ca: Option<&Path>) -> Result<ClientConfig, String> {
    let mut config = tls_config(ca)?;
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    Ok(config)
}

fn tls_config(ca: Option<&Path>) -> Result<ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let mut config = builder.with_root_certificates(roots(ca)?).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Trusted roots: the certificates of `ca`; without it the system's, or, if it has none, Mozilla's as of the build.
fn roots(ca: Option<&Path>) -> Result<RootCertStore, String> {
    if let Some(path) = ca {
        let mut roots = RootCertStore::empty();
        let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        for certificate in CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))? {
            let certificate = certificate.map_err(|error| wrong(&error))?;
            roots.add(certificate).map_err(|error| wrong(&error))?;
        }
        if roots.is_empty() {
            return Err(wrong(&"no certificate in it"));
        }
        return Ok(roots);
    }
    Ok(penstock_link::public_authorities())
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    #[tokio::test]
    async fn silent_connections_are_kept_alive() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let target = Target::parse(&format!("http://{address}/v1")).expect("a target");
        let connector = Connector::new(target, None).expect("no TLS");
        let Ok(Stream::Tcp(stream)) = connector.connect(Duration::from_secs(10)).await else { panic!("no connection") };
        let socket = TcpSocket::from_std_stream(stream.into_std().expect("a socket"));
        assert!(socket.keepalive().expect("the system says so"));
    }
}
