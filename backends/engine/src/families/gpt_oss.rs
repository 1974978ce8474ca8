//! GPT-OSS (20b, 120b).
//!
//! Paper: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925). Follows transformers `models/gpt_oss/modeling_gpt_oss.py`. A mixture of
//! experts in every layer, with biases everywhere, a clamped SwiGLU, attention sinks (Xiao et al. 2023, arXiv:2309.17453, here learned), and a window in
//! every second layer.

use std::sync::LazyLock;

use penstock_kernels::Activation;
use serde_json::{Map, Value, json};

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ExpertCounts, ExpertNames, ExpertsConfig, ModelConfig, PLAIN, Traits};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "GptOssForCausalLM", read, names: &[] };

/// Base of the rotary frequencies where the config has none.
const THETA: f64 = 150_000.0;
/// Window of every second layer where the config has none.
const WINDOW: usize = 128;

/// Values that configs leave out, as in transformers' GptOssConfig.
static DEFAULTS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let all = json!({
        "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "num_experts_per_tok": 4,
        "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "attention_bias": true,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096,
        },
    });
    serde_json::from_value(all).expect("an object")
});

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let f = &f.or(&DEFAULTS);
    let number = |name: &str| f.number(name, 1e-3, 1e6)?.ok_or_else(|| f.missing(name));
    let activation =
        Activation::ClampedSwiglu { limit: number("swiglu_limit")? as f32, alpha: number("swiglu_alpha")? as f32 };
    let mut config = ModelConfig::read_any(f, &Traits { theta: THETA, activation, mxfp4: true, ..PLAIN })?;
    config.qkv_bias = f.flag("attention_bias", true)?;
    config.output_bias = config.qkv_bias;
    config.sinks = true;
    config.read_layer_windows(f, WINDOW, |layer| layer % 2 == 0)?;
    let counts = ExpertCounts::read(f, config.num_hidden_layers)?;
    let parts = ["gate_proj", "up_proj", "down_proj"];
    let names = ExpertNames { block: "mlp", router: "router", parts, stacked: true };
    config.experts = Some(ExpertsConfig { bias: true, ..ExpertsConfig::in_all_layers(&config, &counts, names) });
    Ok(config)
}
