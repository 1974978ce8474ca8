//! Qwen3 (dense, text).
//!
//! Paper: Yang et al. 2025, "Qwen3 Technical Report" (arXiv:2505.09388). Follows transformers `models/qwen3/modeling_qwen3.py`.
//! Qwen2 with the bias replaced by an RMS norm over each query and key head before the rotation.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, QkNorm};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Qwen3ForCausalLM", read, names: &[] };

/// Decoder saved without a head, as embedding models are.
pub(super) const MODEL: Architecture =
    Architecture { name: "Qwen3Model", read: |f| Ok(read(f)?.without_head()), names: &[] };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read(f)?;
    if f.value("head_dim").is_none() {
        config.set_head_dim(128); // the default of transformers' Qwen3Config, unlike the other families
    }
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    config.qk_norm = QkNorm::Each;
    config.read_qwen_windows(f)?;
    Ok(config)
}
