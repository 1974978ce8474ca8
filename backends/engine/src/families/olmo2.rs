//! OLMo 2.
//!
//! Paper: OLMo Team 2025, "2 OLMo 2 Furious" (arXiv:2501.00656). Follows transformers `models/olmo2/modeling_olmo2.py`. Norms stand behind attention and MLP
//! alone; queries and keys are normed over all their heads together.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, NormPlaces, PLAIN, QkNorm, Traits};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Olmo2ForCausalLM", read, names: &[] };

/// Reads OLMo 2, and what OLMo 3 shares with it.
pub(super) fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read_dense(f, Traits { eps: 1e-5, ..PLAIN })?;
    config.norms = NormPlaces::After;
    config.qk_norm = QkNorm::Together;
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    Ok(config)
}
