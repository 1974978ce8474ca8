//! The config file: what was typed (`raw`), what was checked (`check`), what is used ([`Snapshot`]).
//!
//! A file is checked whole: every fault is reported at once, with path and line; unknown keys are faults. What comes out is
//! immutable and is swapped whole; a request keeps the snapshot it began with. [`keys`] is the one place where a key, its default
//! and its sentence are written; `configs/penstock.toml` and `docs/reference/config.md` are made from it.

mod admin;
mod check;
mod identity;
mod jwt;
pub mod keys;
mod limits;
mod models;
mod plugins;
mod providers;
mod raw;
mod replicas;
mod snapshot;
mod store;
mod telemetry;
mod web;

pub use admin::{ADMIN_LISTEN, AdminConfig, AdminKey, AdminListen, Role};
pub use check::{DEMO_MODEL, Overrides, load};
pub(crate) use models::TARGETS_MAX;
pub use models::{MirrorConfig, ModelConfig, Sticky, TargetConfig};
pub use plugins::{OnFail, PluginConfig};
pub(crate) use providers::keys_in;
pub use providers::{KvEventsConfig, PacingConfig, ProviderConfig};
pub use snapshot::{
    BatchesConfig, CountersConfig, DeviceChoice, PoolConfig, PostgresConfig, ReplicasConfig, Snapshot, StoreConfig,
    TlsFiles, WaitConfig,
};
pub use telemetry::{OtlpConfig, TelemetryConfig};
pub use web::CorsConfig;

use std::fmt;

/// One thing wrong with a config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// File and line, or the name of a command line option.
    pub place: String,
    /// Path of the key, as `pools[0].workers`.
    pub key: String,
    /// What is wrong and what would be right.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.key.as_str() {
            "" => write!(out, "{}: {}", self.place, self.message),
            key => write!(out, "{}: {key}: {}", self.place, self.message),
        }
    }
}

/// All of them; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Faults {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.0.iter().enumerate() {
            let line = if at == 0 { "" } else { "\n" };
            write!(out, "{line}{fault}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}
