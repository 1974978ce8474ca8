//! Gemma.
//!
//! Paper: Gemma Team 2024, "Gemma: Open Models Based on Gemini Research and Technology" (arXiv:2403.08295). Follows transformers
//! `models/gemma/modeling_gemma.py`. A Llama whose norms are stored less 1, with embeddings times the root of their width, and GELU in the MLP.

use std::sync::LazyLock;

use penstock_kernels::Activation;
use serde_json::{Map, Value, json};

use super::Architecture;
use crate::model_config::error::{CheckpointError, Shown};
use crate::model_config::fields::Fields;
use crate::model_config::{EmbeddingScale, ModelConfig, PLAIN, Traits};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "GemmaForCausalLM", read, names: &[] };

/// Values that configs leave out, as in transformers' GemmaConfig.
static DEFAULTS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let all = json!({
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
        "tie_word_embeddings": true,
    });
    serde_json::from_value(all).expect("an object")
});

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let f = &f.or(&DEFAULTS);
    // The first configs named the exact GELU, by mistake: the models were trained with the approximation, which `hidden_activation` of later ones says.
    const ACTIVATION: &str = "hidden_act";
    if let Some(other) = f.text(ACTIVATION)?.filter(|name| !["gelu", "gelu_pytorch_tanh"].contains(name)) {
        let reason = format!("\"{}\" is not supported, only \"gelu_pytorch_tanh\" is", Shown(other));
        return Err(f.refuse(ACTIVATION, reason));
    }
    let mut config = ModelConfig::read_dense(f, Traits { activation: Activation::GeluTanh, ..PLAIN })?;
    config.norm_offset = 1.0;
    config.embedding_scale = Some(EmbeddingScale::Rounded((config.hidden_size as f64).sqrt()));
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    Ok(config)
}
