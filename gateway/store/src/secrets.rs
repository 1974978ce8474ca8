//! Secrets that the gateways of one store share: random bytes under a name, made by the first that asks.

use async_trait::async_trait;

use crate::StoreError;

/// Longest name, and largest value, of a secret in bytes.
pub const SECRET_BYTES_MAX: usize = 256;

/// Store of secrets that gateways share.
#[async_trait]
pub trait Secrets: Send + Sync + 'static {
    /// Secret under a name. Without one, `fresh` is stored and returned; of several gateways that ask at once, all get
    /// the same.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] for a name or value that is empty or too long.
    async fn secret(&self, name: &str, fresh: &[u8]) -> Result<Vec<u8>, StoreError>;
}

pub(crate) fn check_secret(name: &str, fresh: &[u8]) -> Result<(), StoreError> {
    let fits = |bytes: usize| (1..=SECRET_BYTES_MAX).contains(&bytes);
    match fits(name.len()) && fits(fresh.len()) && !name.contains('\0') {
        true => Ok(()),
        false => Err(StoreError::Misuse("a secret that cannot be kept")),
    }
}
