//! TLS certificate of the server: read from its files, and read again when they change, so that a renewed one needs no
//! restart.
//!
//! A pair that cannot be used changes nothing: the one in use stays, with a warning in the log. Connections keep the
//! certificate that they began with.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use penstock_config::TlsFiles;

/// Largest file of certificates or of a key, in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// Certificate and key of the TLS listener, replaced when their files change.
#[derive(Debug)]
pub(crate) struct Certificate {
    files: TlsFiles,
    now: ArcSwap<CertifiedKey>,
    read: Mutex<Stamp>,
}

/// Modification time and size of both files, by which a change is seen.
type Stamp = [Option<(SystemTime, u64)>; 2];

impl Certificate {
    /// Reads the pair.
    ///
    /// # Errors
    /// The fault of the pair, for people.
    pub(super) fn open(files: &TlsFiles) -> Result<Arc<Self>, String> {
        let stamp = stamp(files);
        let now = ArcSwap::from_pointee(pair(files)?);
        Ok(Arc::new(Self { files: files.clone(), now, read: Mutex::new(stamp) }))
    }

    /// Reads the pair again if the files have changed. Files that are written one after the other are tried again at
    /// the next call.
    pub(crate) fn refresh(&self) {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = stamp(&self.files);
        if *read == stamp {
            return;
        }
        match pair(&self.files) {
            Ok(new) => {
                tracing::info!(file = %self.files.cert.display(), "renewed certificate in use");
                self.now.store(Arc::new(new));
                *read = stamp;
            }
            Err(reason) => tracing::warn!(reason, "new certificate cannot be used: the one in use stays"),
        }
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.now.load_full())
    }
}

fn stamp(files: &TlsFiles) -> Stamp {
    [&files.cert, &files.key].map(|path| {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.modified().ok()?, meta.len()))
    })
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
