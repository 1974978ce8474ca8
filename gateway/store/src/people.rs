//! Who people are whom no key stands for, as the last token of theirs said it: what they left to be done is done in their name, also by
//! a process that has never seen them.

use async_trait::async_trait;

use crate::{StoreError, Tenant};

/// Longest identity.
pub const IDENTITY_BYTES_MAX: usize = 64 * 1024;

/// Keeps identities.
#[async_trait]
pub trait People: Send + Sync + 'static {
    /// Keeps who a tenant is, in the place of what was kept before. `at`: when that was said, in Unix seconds.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] for one that is too long.
    async fn keep_identity(&self, tenant: &Tenant, identity: &str, at: u64) -> Result<(), StoreError>;

    /// What was kept last, and when it was said.
    async fn identity(&self, tenant: &Tenant) -> Result<Option<(String, u64)>, StoreError>;

    /// Forgets who was kept before `before` and has neither a batch nor a response open. How many.
    async fn sweep_identities(&self, before: u64) -> Result<u64, StoreError>;
}

pub(crate) fn check_identity(identity: &str) -> Result<(), StoreError> {
    match identity.len() > IDENTITY_BYTES_MAX || identity.contains('\0') {
        true => Err(StoreError::Misuse("an identity that cannot be kept")),
        false => Ok(()),
    }
}
