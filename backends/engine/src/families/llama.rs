//! Llama 2, 3, 3.1, 3.2, 3.3 (text).
//!
//! Paper: Touvron et al. 2023, "Llama 2" (arXiv:2307.09288); Grattafiori et al. 2024, "The Llama 3 Herd of Models"
//! (arXiv:2407.21783). Follows transformers `models/llama/modeling_llama.py`. The plain decoder: optional bias on
//! the four projections of attention and the three of the MLP, no windows.

use super::Architecture;
use crate::model_config::ModelConfig;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "LlamaForCausalLM", read, names: &[] };

/// Decoder saved without a head, as embedding models are.
pub(super) const MODEL: Architecture =
    Architecture { name: "LlamaModel", read: |f| Ok(read(f)?.without_head()), names: &[] };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read(f)?;
    config.mlp_bias = f.flag("mlp_bias", false)?;
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    Ok(config)
}
