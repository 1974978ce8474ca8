//! Config file: parsing (`raw`), validation (`check`), and the result in use ([`Snapshot`]).
//!
//! A file is checked as a whole: every fault is reported at once, with path and line; unknown keys are faults. The
//! resulting snapshot is immutable and swapped atomically; a request keeps the snapshot it began with. [`keys`] is the
//! only place that defines a key, its default and its description; `configs/penstock.toml` and
//! `docs/reference/config.md` are generated from it.
#![forbid(unsafe_code)]

mod adapters;
mod admin;
mod check;
mod endpoint_picker;
pub mod entries;
mod hub;
mod identity;
mod jwt;
pub mod keys;
mod limits;
mod members;
mod models;
mod oidc;
mod overrides;
mod plugins;
mod pools;
mod providers;
mod raw;
mod registry;
mod replicas;
mod snapshot;
mod store;
mod telemetry;
mod web;
mod webhooks;

pub use admin::{ADMIN_LISTEN, AdminConfig, AdminKey, AdminListen, Role};
pub use check::{load, load_beside};
pub use endpoint_picker::EndpointPickerConfig;
pub use hub::{HubConfig, named_model};
pub use members::Members;
pub use oidc::{OIDC, OidcConfig};
pub use overrides::Overrides;
pub use plugins::{OnFail, PluginConfig};
pub use pools::DEMO_MODEL;
pub use snapshot::{
    AdapterConfig, BatchesConfig, CountersConfig, DeviceChoice, Parser, PoolConfig, PostgresConfig, ReplicasConfig,
    Snapshot, StoreConfig, TaskChoice, TlsFiles, WaitConfig, default_state_dir, state_dir,
};
pub use web::CorsConfig;
pub use webhooks::{WebhookConfig, WebhookEvent};

use std::fmt;

/// One fault of a config, with its place and a message for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// File and line, or the name of a command line option.
    pub place: String,
    /// Path of the key at fault, as `pools[0].workers`; empty: no single key.
    pub key: String,
    /// Description of the fault and of a valid value.
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

/// All faults of a config; never empty.
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
