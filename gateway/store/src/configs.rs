//! History of applied configs, newest first: the source of roll-backs.

use async_trait::async_trait;

use crate::{Listing, StoreError};

/// Longest text of a config in bytes; a longer one is refused.
pub const CONFIG_BYTES_MAX: usize = 4 << 20;

/// Config to be stored in the history, applied or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewConfig {
    /// Text as written. It names secrets and never contains them.
    pub text: String,
    /// SHA-256 of the config's text, in hex.
    pub sha256: String,
    /// Time of the change in Unix seconds.
    pub at: u64,
    /// Actor: id of an admin key, `file`, `signal`, `start`.
    pub actor: String,
    /// Note that the actor gave for the change, or empty.
    pub note: String,
    /// Outcome of the change: `applied`, `refused` or `rolled_back`.
    pub outcome: String,
}

/// Entry of the config history, without the config's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigRecord {
    /// Number of the entry in the history; rises with each one stored.
    pub number: u64,
    /// SHA-256 of the config's text, in hex.
    pub sha256: String,
    /// Length of the config's text in bytes.
    pub bytes: u64,
    /// Time of the change in Unix seconds.
    pub at: u64,
    /// Actor of the change: id of an admin key, `file`, `signal` or `start`.
    pub actor: String,
    /// Note that the actor gave for the change, or empty.
    pub note: String,
    /// Outcome of the change: `applied`, `refused` or `rolled_back`.
    pub outcome: String,
}

/// Store of the config history, the newest entries up to a number.
#[async_trait]
pub trait Configs: Send + Sync + 'static {
    /// Stores a config and deletes the oldest beyond `keep`.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] if its text is longer than [`CONFIG_BYTES_MAX`].
    async fn save_config(&self, config: NewConfig, keep: u32) -> Result<ConfigRecord, StoreError>;

    /// Reads a config and its text.
    async fn config(&self, number: u64) -> Result<Option<(ConfigRecord, String)>, StoreError>;

    /// Lists configs, newest first; `before`: only lower numbers.
    async fn configs(&self, before: Option<u64>, limit: u32) -> Result<Listing<ConfigRecord>, StoreError>;
}

/// Checks the length of a config's text before the config is written.
pub(crate) fn check_config(config: &NewConfig) -> Result<(), StoreError> {
    if config.text.len() > CONFIG_BYTES_MAX { Err(StoreError::Misuse("a config that is too long")) } else { Ok(()) }
}
