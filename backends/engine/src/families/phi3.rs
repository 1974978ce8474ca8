//! Phi-3, Phi-3.5 and Phi-4 (dense, text).
//!
//! Paper: Abdin et al. 2024, "Phi-3 Technical Report" (arXiv:2404.14219). Follows transformers `models/phi3/modeling_phi3.py`. A Llama whose checkpoints
//! have queries, keys and values in one matrix, and gate and up in one; a part of each head may be rotated, and rotations may be LongRoPE's.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{LayerNames, ModelConfig, PLAIN, Traits};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Phi3ForCausalLM", read, names: &[] };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read_dense(f, Traits { partial_rotation: true, ..PLAIN })?;
    config.layer_names =
        LayerNames { qkv: Some("self_attn.qkv_proj"), gate_up: Some("mlp.gate_up_proj"), ..LayerNames::PLAIN };
    config.windows = vec![f.integer("sliding_window", 1, usize::MAX)?; config.num_hidden_layers];
    Ok(config)
}
