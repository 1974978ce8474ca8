//! Identities of token users, as their last token gave them. A user's deferred work (batches, background responses)
//! runs under that identity, also in a process that has never seen the user.

use async_trait::async_trait;

use crate::{StoreError, Tenant};

/// Longest identity in bytes; a longer one is refused.
pub const IDENTITY_BYTES_MAX: usize = 64 * 1024;

/// Store of the identities of token users, for work that runs after their request.
#[async_trait]
pub trait People: Send + Sync + 'static {
    /// Stores the identity of a tenant, replacing an earlier one. `at`: time of the token, in Unix seconds.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] for an identity that is too long.
    async fn keep_identity(&self, tenant: &Tenant, identity: &str, at: u64) -> Result<(), StoreError>;

    /// Reads the last identity of a tenant, and its time.
    async fn identity(&self, tenant: &Tenant) -> Result<Option<(String, u64)>, StoreError>;

    /// Deletes identities stored before `before` whose tenant has neither an open batch nor an open response; returns
    /// their number.
    async fn sweep_identities(&self, before: u64) -> Result<u64, StoreError>;
}

pub(crate) fn check_identity(identity: &str) -> Result<(), StoreError> {
    match identity.len() > IDENTITY_BYTES_MAX || identity.contains('\0') {
        true => Err(StoreError::Misuse("an identity that cannot be kept")),
        false => Ok(()),
    }
}
