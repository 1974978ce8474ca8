//! Ministral 8B, under the name that transformers gives it.
//!
//! Follows transformers `models/ministral/modeling_ministral.py`. A Mistral some of whose layers have a window.

use super::Architecture;
use crate::model_config::ModelConfig;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "MinistralForCausalLM", read, names: &[] };

/// Window of configs without the field.
const WINDOW: usize = 4096;

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read(f)?;
    // A null means that no layer has one.
    let slides = !f.has("sliding_window") || f.value("sliding_window").is_some();
    config.read_layer_windows(f, WINDOW, |_| slides)?;
    Ok(config)
}
