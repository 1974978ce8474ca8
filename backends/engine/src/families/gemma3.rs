//! Gemma 3 (text), by itself and as the text part of the models with images.
//!
//! Paper: Gemma Team 2025, "Gemma 3 Technical Report" (arXiv:2503.19786). Follows transformers `models/gemma3/modeling_gemma3.py`. Gemma 2 with a norm
//! over each query and key head in the place of the soft caps; five of six layers have a window, and rotations of their own. EmbeddingGemma (Vera et
//! al. 2025, arXiv:2509.20354) is the same decoder with attention to both sides.

use std::sync::LazyLock;

use penstock_kernels::Activation;
use serde_json::{Map, Value, json};

use super::Architecture;
use super::gemma2::read_gemma;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{BIDIRECTIONAL, ModelConfig, PLAIN, QkNorm, Quantization, Rotation, Traits};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Gemma3ForCausalLM", read, names: &[] };

/// The decoder alone, as embedding models (EmbeddingGemma) are saved.
pub(super) const MODEL: Architecture = Architecture { name: "Gemma3TextModel", read, names: &[] };

/// Text part of a model that also reads images, which are not served.
pub(super) const TEXT_PART: Architecture = Architecture {
    name: "Gemma3ForConditionalGeneration",
    read: read_text_part,
    names: &[
        ("model.", "language_model.model."),
        ("model.", "model.language_model."),
        ("lm_head.", "language_model.lm_head."),
    ],
};

/// Values that configs leave out, as in transformers' Gemma3TextConfig.
static DEFAULTS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let all = json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "tie_word_embeddings": true, "query_pre_attn_scalar": 256,
    });
    serde_json::from_value(all).expect("an object")
});

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let f = &f.or(&DEFAULTS);
    if f.value("attn_logit_softcapping").is_some() {
        return Err(f.refuse("attn_logit_softcapping", "soft caps of scores are not supported in this architecture"));
    }
    let pattern = f.integer("sliding_window_pattern", 1, usize::MAX)?.unwrap_or(6);
    let (theta, local_theta, activation) = (1e6, Some(10_000.0), Activation::GeluTanh);
    let mut config = read_gemma(f, Traits { theta, local_theta, activation, soft_caps: true, ..PLAIN }, pattern)?;
    config.qk_norm = QkNorm::Each;
    let rotation = |window: &Option<usize>| if window.is_some() { Rotation::Local } else { Rotation::Model };
    config.rotations = config.windows.iter().map(rotation).collect();
    if f.flag(BIDIRECTIONAL, false)? {
        config.causal = false;
        // The window holds half of its tokens on each side; transformers rounds an odd one down, and so does a checkpoint that it saved again.
        config.windows.iter_mut().flatten().for_each(|window| *window = *window / 2 + 1);
    }
    Ok(config)
}

fn read_text_part(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let Some(text) = f.object("text_config")? else { return Err(f.missing("text_config")) };
    let mut config = read(&text)?;
    config.read_sides(&text)?;
    // The config of the whole model says how its weights are stored.
    config.quantization = config.quantization.or(Quantization::read(f)?);
    config.eos_token_id.extend(f.token_ids("eos_token_id")?);
    Ok(config)
}
