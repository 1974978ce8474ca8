//! Bytes that several gateways may reuse, for a time.

use async_trait::async_trait;
use bytes::Bytes;

use crate::StoreError;

/// Longest key of a [`Cache`].
pub const CACHE_KEY_BYTES_MAX: usize = 512;
/// Longest value of a [`Cache`].
pub const CACHE_VALUE_BYTES_MAX: usize = 8 << 20;

/// Keeps bytes for a time, or less: whatever is in it may be gone.
#[async_trait]
pub trait Cache: Send + Sync + 'static {
    /// What was put under that key.
    async fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError>;

    /// Keeps `value` for `seconds`, in place of what was there.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] beyond [`CACHE_KEY_BYTES_MAX`] and [`CACHE_VALUE_BYTES_MAX`].
    async fn put(&self, key: &str, value: Bytes, seconds: u64) -> Result<(), StoreError>;
}
