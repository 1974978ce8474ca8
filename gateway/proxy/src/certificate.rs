//! TLS files of a listener: certificate, key, and the authorities of its clients. They are read again when they change, so that a
//! renewed certificate needs no restart, and an authority that is no longer trusted vouches for nobody.
//!
//! A file that cannot be used changes nothing: what is in use stays, with a warning in the log. Connections keep what they began with. A
//! session that was begun under other authorities is not resumed, since whoever resumes one does not show a certificate again.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use penstock_config::TlsFiles;
use penstock_http::Renewed;
use penstock_http::certificate::verifier;

/// Largest file of certificates or of a key, in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// TLS files of a listener and what was made of them, made anew when the files change.
pub(crate) struct Certificate {
    files: TlsFiles,
    pair: Arc<Pair>,
    /// Function that puts TLS with other authorities of the clients in use.
    renew: Box<Renew>,
    read: Mutex<Stamps>,
}

type Renew = dyn Fn(Option<Arc<dyn ClientCertVerifier>>) -> Result<(), String> + Send + Sync;

/// Certificate and key in use.
#[derive(Debug)]
struct Pair(ArcSwap<CertifiedKey>);

/// Modification time and size of a file, by which a change is seen; `None`: there is no file.
type Stamp = Option<(SystemTime, u64)>;

/// Stamps of the files that were read last.
struct Stamps {
    pair: [Stamp; 2],
    authorities: Stamp,
}

/// Checks that the files can be used.
///
/// # Errors
/// The fault of the files, for people.
pub(super) fn check(files: &TlsFiles) -> Result<(), String> {
    pair(files)?;
    clients(files).map(drop)
}

impl Certificate {
    /// Reads the files. `make`: TLS of the listener, with the certificate and the verifier of its clients' certificates, if they are
    /// asked for one.
    ///
    /// # Errors
    /// The fault of the files, for people.
    pub(super) fn open<T: Send + Sync + 'static>(
        files: &TlsFiles,
        make: impl Fn(Arc<dyn ResolvesServerCert>, Option<Arc<dyn ClientCertVerifier>>) -> Result<T, String>
        + Send
        + Sync
        + 'static,
    ) -> Result<(Arc<Self>, Arc<Renewed<T>>), String> {
        let read = Mutex::new(Stamps::now(files));
        let pair = Arc::new(Pair(ArcSwap::from_pointee(pair(files)?)));
        let tls = Renewed::new(make(pair.clone(), clients(files)?)?);
        let renew = {
            let (pair, tls) = (pair.clone(), tls.clone());
            Box::new(move |clients| make(pair.clone(), clients).map(|next| tls.renew(next)))
        };
        Ok((Arc::new(Self { files: files.clone(), pair, renew, read }), tls))
    }

    /// Reads the files again that have changed. Files that are written one after the other are tried again at the next call.
    pub(crate) fn refresh(&self) {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Stamps::now(&self.files);
        if read.pair != now.pair {
            match pair(&self.files) {
                Ok(new) => {
                    tracing::info!(file = %self.files.cert.display(), "renewed certificate in use");
                    self.pair.0.store(Arc::new(new));
                    read.pair = now.pair;
                }
                Err(reason) => tracing::warn!(reason, "new certificate cannot be used: the one in use stays"),
            }
        }
        if read.authorities != now.authorities {
            match clients(&self.files).and_then(|clients| (self.renew)(clients)) {
                Ok(()) => {
                    let file = self.files.client_ca.as_ref().map(|file| file.display().to_string());
                    tracing::info!(file, "changed authorities of client certificates in use");
                    read.authorities = now.authorities;
                }
                Err(reason) => {
                    tracing::warn!(
                        reason,
                        "changed authorities of client certificates cannot be used: those in use stay"
                    );
                }
            }
        }
    }
}

impl ResolvesServerCert for Pair {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

/// Verifier of client certificates; `None`: clients are asked for none.
fn clients(files: &TlsFiles) -> Result<Option<Arc<dyn ClientCertVerifier>>, String> {
    files.client_ca.as_deref().map(|authorities| verifier(authorities, files.client_required)).transpose()
}

impl Stamps {
    fn now(files: &TlsFiles) -> Self {
        Self { pair: [stamp(&files.cert), stamp(&files.key)], authorities: files.client_ca.as_deref().and_then(stamp) }
    }
}

fn stamp(path: &Path) -> Stamp {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.modified().ok()?, meta.len()))
}

fn pair(files: &TlsFiles) -> Result<CertifiedKey, String> {
    let said = |path: &Path, what: &str| format!("{} {what}", path.display());
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes(&files.cert)?).collect();
    let chain = chain.map_err(|error| said(&files.cert, &error.to_string()))?;
    if chain.is_empty() {
        return Err(said(&files.cert, "has no PEM block CERTIFICATE"));
    }
    let key = PrivateKeyDer::from_pem_slice(&bytes(&files.key)?);
    let key = key.map_err(|_| said(&files.key, "has no PEM block PRIVATE KEY"))?;
    let key = any_supported_type(&key).map_err(|error| said(&files.key, &error.to_string()))?;
    let pair = CertifiedKey::new(chain, key);
    match pair.keys_match() {
        // Unknown: a key that does not say its public half.
        Ok(()) | Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => Ok(pair),
        Err(_) => Err(said(&files.key, &format!("is not the key of {}", files.cert.display()))),
    }
}

fn bytes(path: &Path) -> Result<Vec<u8>, String> {
    use std::io::Read;
    let said = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut out = Vec::new();
    std::fs::File::open(path).map_err(said)?.take(BYTES_MAX).read_to_end(&mut out).map_err(said)?;
    Ok(out)
}
