//! Seed-OSS.
//!
//! Follows transformers `models/seed_oss/modeling_seed_oss.py`. A Llama whose biases of queries, keys and values, of attention's output and of the MLP each
//! have a field.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::Architecture;
use crate::model_config::ModelConfig;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "SeedOssForCausalLM", read, names: &[] };

/// Values that configs leave out, as in transformers' SeedOssConfig.
static DEFAULTS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let all = json!({ "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": true });
    serde_json::from_value(all).expect("an object")
});

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let f = &f.or(&DEFAULTS);
    let mut config = ModelConfig::read(f)?;
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = f.flag("attention_out_bias", false)?;
    config.mlp_bias = f.flag("mlp_bias", false)?;
    Ok(config)
}
