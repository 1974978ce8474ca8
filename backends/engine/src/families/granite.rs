//! Granite 3 (dense, text).
//!
//! Follows transformers `models/granite/modeling_granite.py`. A Llama with four factors (Yang et al. 2022, arXiv:2203.03466): on the embeddings, on the products
//! of queries and keys, on what attention and MLP add to the residual, and one by which the logits are divided.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{EmbeddingScale, ModelConfig};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "GraniteForCausalLM", read, names: &[] };

/// Bounds of the factors; the published models have 0.0078125 to 16.
const FACTOR_MIN: f64 = 1e-6;
const FACTOR_MAX: f64 = 1e6;

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read(f)?;
    config.mlp_bias = f.flag("mlp_bias", false)?;
    read_factors(f, &mut config)?;
    Ok(config)
}

/// Reads the four factors and the biases of attention. An absent factor is 1, that of queries and keys too.
pub(super) fn read_factors(f: &Fields<'_>, config: &mut ModelConfig) -> Result<(), CheckpointError> {
    let factor = |name| f.number(name, FACTOR_MIN, FACTOR_MAX);
    let other = |name| Ok::<_, CheckpointError>(factor(name)?.filter(|factor| *factor != 1.0));
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    config.embedding_scale = other("embedding_multiplier")?.map(EmbeddingScale::Exact);
    config.query_scale = factor("attention_multiplier")?.unwrap_or(1.0);
    config.residual_multiplier = other("residual_multiplier")?.map(|factor| factor as f32);
    config.logits_scaling = other("logits_scaling")?.map(|factor| factor as f32);
    Ok(())
}
