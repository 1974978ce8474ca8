//! Gemma 2.
//!
//! Paper: Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size" (arXiv:2408.00118). Follows transformers
//! `models/gemma2/modeling_gemma2.py`. Norms before and behind both blocks, whose weights are stored less 1; embeddings times the root of their
//! width; GELU in the MLP; soft caps of scores and logits; every second layer has a window.

use std::sync::LazyLock;

use penstock_kernels::Activation;
use serde_json::{Map, Value, json};

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{EmbeddingScale, ModelConfig, NormPlaces, PLAIN, Traits};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Gemma2ForCausalLM", read, names: &[] };

/// Window of configs that have none of their own, of Gemma 2 as of Gemma 3.
const WINDOW: usize = 4096;

/// Values that configs leave out, as in transformers' Gemma2Config.
static DEFAULTS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let all = json!({
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "tie_word_embeddings": true, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    });
    serde_json::from_value(all).expect("an object")
});

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let f = &f.or(&DEFAULTS);
    read_gemma(f, Traits { activation: Activation::GeluTanh, soft_caps: true, ..PLAIN }, 2)
}

/// Reads what Gemma 2 and 3 share. Of `pattern` layers the last one sees all, where the config does not list them.
pub(super) fn read_gemma(f: &Fields<'_>, traits: Traits, pattern: usize) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read_dense(f, traits)?;
    config.norms = NormPlaces::Both;
    config.norm_offset = 1.0;
    config.embedding_scale = Some(EmbeddingScale::Rounded((config.hidden_size as f64).sqrt()));
    let scalar = f.number("query_pre_attn_scalar", 1e-3, 1e6)?;
    config.query_scale = scalar.ok_or_else(|| f.missing("query_pre_attn_scalar"))?.powf(-0.5);
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    config.read_layer_windows(f, WINDOW, |layer| !(layer + 1).is_multiple_of(pattern))?;
    Ok(config)
}
