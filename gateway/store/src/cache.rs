//! Cache shared by several gateways: bytes with a time to live.

use async_trait::async_trait;
use bytes::Bytes;

use crate::StoreError;

/// Longest key of a [`Cache`] in bytes.
pub const CACHE_KEY_BYTES_MAX: usize = 512;
/// Largest value of a [`Cache`] in bytes.
pub const CACHE_VALUE_BYTES_MAX: usize = 8 << 20;

/// Cache that gateways share. An entry may disappear before its time.
#[async_trait]
pub trait Cache: Send + Sync + 'static {
    /// Value under a key; `None`: no entry, or it has expired.
    async fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError>;

    /// Stores `value` for `seconds`, replacing an earlier value.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] beyond [`CACHE_KEY_BYTES_MAX`] and [`CACHE_VALUE_BYTES_MAX`].
    async fn put(&self, key: &str, value: Bytes, seconds: u64) -> Result<(), StoreError>;
}
