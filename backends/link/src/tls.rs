//! TLS 1.3 with certificates at both ends.

use crate::{Reader, Writer};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Certificate of a member and the authorities that it trusts: three PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain of the member. A listening member is identified by its host name or address (subject
    /// alternative name).
    pub certificate: PathBuf,
    /// Private key of the certificate.
    pub key: PathBuf,
    /// Authorities of the other members' certificates. No other authority is trusted, not even the system's.
    pub ca: PathBuf,
}

/// Error of a file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {why}")]
pub struct TlsError {
    /// Path of the certificate, key or authority file.
    pub path: String,
    /// Reason why the file cannot be used: unreadable, or not the expected PEM.
    pub why: String,
}

/// TLS configuration of one member, for both directions of connecting.
#[derive(Clone)]
pub struct Tls {
    connector: TlsConnector,
    acceptor: TlsAcceptor,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(…)")
    }
}

impl Tls {
    /// Reads the files, once: changed files take effect when the member is started anew.
    ///
    /// # Errors
    /// The file that is missing or invalid.
    pub fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chain = certificates(&files.certificate)?;
        let key = || PrivateKeyDer::from_pem_file(&files.key).map_err(|error| wrong(&files.key, &error));
        let mut roots = RootCertStore::empty();
        for authority in certificates(&files.ca)? {
            roots.add(authority).map_err(|error| wrong(&files.ca, &error))?;
        }
        let roots = Arc::new(roots);
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| wrong(&files.certificate, &error))?
            .with_root_certificates(roots.clone())
            .with_client_auth_cert(chain.clone(), key()?)
            .map_err(|error| wrong(&files.key, &error))?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| wrong(&files.ca, &error))?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| wrong(&files.certificate, &error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key()?)
            .map_err(|error| wrong(&files.key, &error))?;
        Ok(Self { connector: TlsConnector::from(Arc::new(client)), acceptor: TlsAcceptor::from(Arc::new(server)) })
    }

    pub(crate) async fn connect(&self, host_port: &str, stream: TcpStream) -> io::Result<(Reader, Writer)> {
        let host = host_port.rsplit_once(':').map_or(host_port, |(host, _)| host);
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned()).map_err(io::Error::other)?;
        let stream = self.connector.connect(name, stream).await?;
        let (reader, writer) = tokio::io::split(stream);
        Ok((Box::new(reader), Box::new(writer)))
    }

    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<(Reader, Writer)> {
        let (reader, writer) = tokio::io::split(self.acceptor.accept(stream).await?);
        Ok((Box::new(reader), Box::new(writer)))
    }
}

/// Authorities of public servers: the system's, or, where it has none, Mozilla's at the time of the build.
pub fn public_authorities() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().unwrap_or_default());
    if roots.is_empty() {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    roots
}

/// TLS configuration for connections to a public server.
///
/// # Errors
/// An error of the library; impossible with the built-in provider.
pub fn public_client() -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(public_authorities()).with_no_client_auth())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(|error| wrong(path, &error))?.collect();
    let all = all.map_err(|error| wrong(path, &error))?;
    if all.is_empty() {
        return Err(wrong(path, &"no certificate in it"));
    }
    Ok(all)
}

fn wrong(path: &Path, why: &dyn fmt::Display) -> TlsError {
    TlsError { path: path.display().to_string(), why: why.to_string() }
}
