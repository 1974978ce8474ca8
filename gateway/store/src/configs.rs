//! The configs that were applied, newest kept: what a roll-back goes back to.

use async_trait::async_trait;

use crate::{Listing, StoreError};

/// Longest config that is kept.
pub const CONFIG_BYTES_MAX: usize = 4 << 20;

/// A config that is to be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewConfig {
    /// As it was written. Secrets are named in it, never held.
    pub text: String,
    /// SHA-256 of the text, in hex.
    pub sha256: String,
    /// Unix seconds.
    pub at: u64,
    /// Who: id of an admin key, `file`, `signal`, `start`.
    pub actor: String,
    /// Why, in their words; or empty.
    pub note: String,
    /// What came of it: `applied`, `refused`, `rolled_back`.
    pub outcome: String,
}

/// A config that was kept, without its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigRecord {
    /// Rises with each one that is kept.
    pub number: u64,
    /// SHA-256 of the text, in hex.
    pub sha256: String,
    /// Of the text.
    pub bytes: u64,
    /// Unix seconds.
    pub at: u64,
    /// Who.
    pub actor: String,
    /// Why.
    pub note: String,
    /// What came of it.
    pub outcome: String,
}

/// Keeps configs.
#[async_trait]
pub trait Configs: Send + Sync + 'static {
    /// Keeps a config and drops the oldest beyond `keep`.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] when its text is longer than [`CONFIG_BYTES_MAX`].
    async fn save_config(&self, config: NewConfig, keep: u32) -> Result<ConfigRecord, StoreError>;

    /// A config and its text.
    async fn config(&self, number: u64) -> Result<Option<(ConfigRecord, String)>, StoreError>;

    /// Configs, newest first; `before`: those with a lower number.
    async fn configs(&self, before: Option<u64>, limit: u32) -> Result<Listing<ConfigRecord>, StoreError>;
}

/// Refuses what no store keeps.
pub(crate) fn check_config(config: &NewConfig) -> Result<(), StoreError> {
    if config.text.len() > CONFIG_BYTES_MAX { Err(StoreError::Misuse("a config that is too long")) } else { Ok(()) }
}
