//! Mistral 7B and its dense successors under the same architecture name.
//!
//! Paper: Jiang et al. 2023, "Mistral 7B" (arXiv:2310.06825). Follows transformers `models/mistral/modeling_mistral.py`. A
//! Llama without biases whose positions see a window of the last tokens, the same in every layer.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, layer_types};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "MistralForCausalLM", read, names: &[] };

/// Decoder saved without a head, as embedding models are.
pub(super) const MODEL: Architecture =
    Architecture { name: "MistralModel", read: |f| Ok(read(f)?.without_head()), names: &[] };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read(f)?;
    let window = match f.integer("sliding_window", 1, usize::MAX)? {
        // The config class of transformers fills an absent field with 4096; a null means none.
        None if !f.has("sliding_window") => Some(4096),
        window => window,
    };
    if let Some(sliding) = layer_types(f, config.num_hidden_layers)?
        && sliding.iter().any(|&slides| slides != window.is_some())
    {
        let reason = "differs from sliding_window, which holds for every layer of this architecture";
        return Err(f.refuse("layer_types", reason));
    }
    config.windows = vec![window; config.num_hidden_layers];
    Ok(config)
}
