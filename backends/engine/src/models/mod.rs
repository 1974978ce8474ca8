//! Architectures by name, and models on a device.
//!
//! An architecture is one file, one line of `ARCHITECTURES` and a golden. The families here differ in values only, so
//! they share one decoder: a straight line of [`Device`](penstock_kernels::Device) calls.

mod decoder;
mod llama;
mod load;
mod mistral;
mod qwen2;
mod qwen3;
mod rope;

pub use load::{KvBudget, LoadError, Model, ModelLimits, Progress};

use crate::checkpoint::fields::Fields;
use crate::checkpoint::{CheckpointError, ModelConfig};
pub(crate) use decoder::{EMBEDDING, HEAD, tensors};

/// A supported architecture, by the name in `architectures[0]` of a config.
#[derive(Debug)]
pub(crate) struct Architecture {
    pub(crate) name: &'static str,
    /// Function that reads and checks the family's fields of `config.json`.
    pub(crate) read: fn(&Fields<'_>) -> Result<ModelConfig, CheckpointError>,
}

const ARCHITECTURES: &[Architecture] =
    &[llama::ARCHITECTURE, mistral::ARCHITECTURE, qwen2::ARCHITECTURE, qwen3::ARCHITECTURE];

pub(crate) fn architecture(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|architecture| architecture.name == name)
}

/// Names of all supported architectures, as `architectures[0]` of a config gives them.
pub fn names() -> Vec<&'static str> {
    ARCHITECTURES.iter().map(|architecture| architecture.name).collect()
}
