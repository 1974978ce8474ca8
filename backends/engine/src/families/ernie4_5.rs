//! ERNIE 4.5 (dense, text).
//!
//! Paper: Baidu 2025, "ERNIE 4.5 Technical Report". Follows transformers `models/ernie4_5/modeling_ernie4_5.py`. A Llama with one field for all biases, whose
//! checkpoints have the two values of each rotation side by side.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, PLAIN, Traits};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Ernie4_5ForCausalLM", read, names: &[] };

/// Base of the rotary frequencies where the config has none.
const THETA: f64 = 500_000.0;
/// Width of a head where the config has none.
const HEAD_DIM: usize = 128;

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read_dense(f, Traits { theta: THETA, eps: 1e-5, ..PLAIN })?;
    if !f.has("head_dim") {
        config.set_head_dim(HEAD_DIM);
    }
    config.tie_word_embeddings = f.flag("tie_word_embeddings", true)?;
    let bias = f.flag("use_bias", false)?;
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (bias, bias, bias);
    config.paired = true;
    Ok(config)
}
