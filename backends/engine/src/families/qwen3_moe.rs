//! Qwen3 with experts (30B-A3B, 235B-A22B, Qwen3-Coder).
//!
//! Paper: Yang et al. 2025, "Qwen3 Technical Report" (arXiv:2505.09388). Follows transformers `models/qwen3_moe/modeling_qwen3_moe.py`.
//! Qwen3 with a mixture of experts in every layer, or in every `decoder_sparse_step`-th one that `mlp_only_layers` does not name.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::{Fields, shown};
use crate::model_config::{ExpertCounts, ExpertNames, ExpertsConfig, ModelConfig, PLAIN, QkNorm, RoutingConfig};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Qwen3MoeForCausalLM", read, names: &[] };

/// Widest expert, in values.
const WIDTH_MAX: usize = 1 << 20;

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read_any(f, &PLAIN)?;
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    config.qk_norm = QkNorm::Each;
    // The window is that of all layers, unlike Qwen3's; the default is that of transformers' Qwen3MoeConfig.
    let window = f.integer("sliding_window", 1, usize::MAX)?;
    let window = if f.has("sliding_window") { window } else { Some(4096) };
    let slides = f.flag("use_sliding_window", false)?;
    config.windows = vec![window.filter(|_| slides); config.num_hidden_layers];
    let parts = ["gate_proj", "up_proj", "down_proj"];
    let counts = ExpertCounts::read(f, config.num_hidden_layers)?;
    config.experts = Some(ExpertsConfig {
        num_experts: counts.all,
        num_experts_per_tok: counts.chosen,
        moe_intermediate_size: f.required("moe_intermediate_size", 1, WIDTH_MAX)?,
        shared_size: 0,
        shared_gated: false,
        routing: RoutingConfig::SOFTMAX,
        norm_topk_prob: f.flag("norm_topk_prob", false)?,
        bias: false,
        layers: sparse_layers(f, config.num_hidden_layers)?,
        names: ExpertNames { block: "mlp", router: "gate", parts, stacked: false },
    });
    Ok(config)
}

/// Layers that have experts.
pub(super) fn sparse_layers(f: &Fields<'_>, layers: usize) -> Result<Vec<bool>, CheckpointError> {
    let step = f.integer("decoder_sparse_step", 1, usize::MAX)?.unwrap_or(1);
    let mut sparse: Vec<bool> = (0..layers).map(|layer| (layer + 1).is_multiple_of(step)).collect();
    for value in f.list("mlp_only_layers")? {
        let layer = value.as_u64().and_then(|layer| usize::try_from(layer).ok()).and_then(|at| sparse.get_mut(at));
        let Some(layer) = layer else {
            let reason = format!("names layer {}; there are {layers}", shown(value));
            return Err(f.refuse("mlp_only_layers", reason));
        };
        *layer = false;
    }
    Ok(sparse)
}
