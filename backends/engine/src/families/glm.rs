//! GLM-4 (dense, text): glm-4-9b in transformers' own form, and the models of 2025 (GLM-4-0414), which have norms behind attention and MLP, too.
//!
//! Paper: Team GLM 2024, "ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4 All Tools" (arXiv:2406.12793). Follows transformers
//! `models/glm/modeling_glm.py` and `models/glm4/modeling_glm4.py`. A Llama with a bias on queries, keys and values, whose checkpoints have gate and up in one
//! matrix; the first half of each head is rotated, and the two values of each rotation lie side by side.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, NormPlaces, PLAIN, Traits};

pub(super) const GLM: Architecture =
    Architecture { name: "GlmForCausalLM", read: |f| read(f, NormPlaces::Before), names: &[] };
pub(super) const GLM4: Architecture =
    Architecture { name: "Glm4ForCausalLM", read: |f| read(f, NormPlaces::BothGlm), names: &[] };

/// Values that configs leave out, as in transformers' GlmConfig and Glm4Config.
static DEFAULTS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let all = json!({
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5, "attention_bias": true, "eos_token_id": [151_329, 151_336, 151_338],
    });
    serde_json::from_value(all).expect("an object")
});

fn read(f: &Fields<'_>, norms: NormPlaces) -> Result<ModelConfig, CheckpointError> {
    let f = &f.or(&DEFAULTS);
    let mut config = ModelConfig::read_dense(f, Traits { partial_rotation: true, ..PLAIN })?;
    config.norms = norms;
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.layer_names.gate_up = Some("mlp.gate_up_proj");
    config.paired = true;
    Ok(config)
}
