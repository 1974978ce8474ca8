//! SmolLM3.
//!
//! Follows transformers `models/smollm3/modeling_smollm3.py`. A Llama in which every fourth layer has no rotation (Yang et al. 2025, arXiv:2501.18795); windows,
//! where there are any, are for those layers.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::fields::shown;
use crate::model_config::{ModelConfig, PLAIN, Rotation, Traits, layer_types};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "SmolLM3ForCausalLM", read, names: &[] };

/// Base of the rotary frequencies where the config has none.
const THETA: f64 = 2e6;

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read_dense(f, Traits { theta: THETA, ..PLAIN })?;
    // The default of transformers' SmolLM3Config, unlike the other families.
    config.tie_word_embeddings = f.flag("tie_word_embeddings", true)?;
    config.mlp_bias = f.flag("mlp_bias", false)?;
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    let rotated = rotated_layers(f, config.num_hidden_layers)?;
    let window = f.integer("sliding_window", 1, usize::MAX)?;
    let window = if f.flag("use_sliding_window", false)? { window } else { None };
    let slides = layer_types(f, config.num_hidden_layers)?;
    let slides = slides.unwrap_or_else(|| rotated.iter().map(|rotated| !rotated).collect());
    config.windows = slides.into_iter().map(|slides| window.filter(|_| slides)).collect();
    let rotation = |rotated| if rotated { Rotation::Model } else { Rotation::None };
    config.rotations = rotated.into_iter().map(rotation).collect();
    Ok(config)
}

/// Layers with a rotation: by `no_rope_layers`, in which 1 means that there is one, or all but every `no_rope_layer_interval`-th.
fn rotated_layers(f: &Fields<'_>, layers: usize) -> Result<Vec<bool>, CheckpointError> {
    const LIST: &str = "no_rope_layers";
    if f.value(LIST).is_none() {
        let interval = f.integer("no_rope_layer_interval", 1, usize::MAX)?.unwrap_or(4);
        return Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
    }
    let list = f.list(LIST)?;
    if list.len() < layers {
        return Err(f.refuse(LIST, format!("has {} entries for {layers} layers", list.len())));
    }
    let one = |value: &serde_json::Value| match value.as_u64().or_else(|| value.as_bool().map(u64::from)) {
        Some(rotated @ (0 | 1)) => Ok(rotated == 1),
        _ => Err(f.refuse(LIST, format!("has {}, needs 0 or 1", shown(value)))),
    };
    list[..layers].iter().map(one).collect()
}
