//! Client certificates (mTLS): the names in a verified certificate.
//!
//! rustls verifies the chain, the validity period and the possession of the private key during the handshake; this
//! module only reads the names that a key of the config is matched with.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use pingora_core::listeners::TlsAccept;
use pingora_core::protocols::tls::TlsRef;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

/// Most names that are read from one certificate.
const NAMES_MAX: usize = 64;

/// Names of a verified client certificate; cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate(pub Arc<[String]>);

impl Certificate {
    /// Reads the DNS names, URIs and e-mail addresses of the subject alternative names; without any of these, the first
    /// common name. `None` if the certificate cannot be parsed.
    fn read(der: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let alternative = certificate.subject_alternative_name().ok()?.map(|extension| &extension.value.general_names);
        let named = alternative.into_iter().flatten().filter_map(|name| match name {
            GeneralName::DNSName(name) | GeneralName::URI(name) | GeneralName::RFC822Name(name) => Some(*name),
            _ => None,
        });
        let mut names: Vec<String> = named.take(NAMES_MAX).map(str::to_owned).collect();
        if names.is_empty() {
            let common = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
            names.extend(common.take(1).map(str::to_owned));
        }
        Some(Self(names.into()))
    }
}

/// TLS callback that reads the client's names once the handshake is complete and stores them with the connection.
pub struct ReadNames;

#[async_trait]
impl TlsAccept for ReadNames {
    async fn handshake_complete_callback(&self, tls: &TlsRef) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(Arc::new(Certificate::read(tls.peer_certificate_der()?)?))
    }
}

/// Builds the verifier of client certificates from the PEM file of authorities. `required`: a handshake without a
/// certificate fails.
///
/// # Errors
/// The file cannot be read, is not PEM, or has no usable certificate; the text begins with its path.
pub fn verifier(authorities: &Path, required: bool) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", authorities.display());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(authorities).map_err(|error| wrong(&error))? {
        roots.add(certificate.map_err(|error| wrong(&error))?).map_err(|error| wrong(&error))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    let builder = if required { builder } else { builder.allow_unauthenticated() };
    builder.build().map_err(|error| wrong(&error))
}
