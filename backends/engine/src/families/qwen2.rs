//! Qwen2 and Qwen2.5 (dense, text).
//!
//! Paper: Yang et al. 2024, "Qwen2 Technical Report" (arXiv:2407.10671). Follows transformers `models/qwen2/modeling_qwen2.py`.
//! A Llama with a bias on the query, key and value projections, not on the output, and optional windows in the upper layers.

use super::Architecture;
use crate::model_config::ModelConfig;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Qwen2ForCausalLM", read, names: &[] };

/// Decoder saved without a head, as embedding models are.
pub(super) const MODEL: Architecture =
    Architecture { name: "Qwen2Model", read: |f| Ok(read(f)?.without_head()), names: &[] };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read(f)?;
    config.qkv_bias = true;
    config.read_qwen_windows(f)?;
    Ok(config)
}
