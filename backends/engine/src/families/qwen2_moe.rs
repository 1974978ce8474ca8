//! Qwen2 with experts (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B).
//!
//! Paper: Yang et al. 2024, "Qwen2 Technical Report" (arXiv:2407.10671). Follows transformers `models/qwen2_moe/modeling_qwen2_moe.py`. Qwen2 with a mixture of
//! experts in every layer, or in every `decoder_sparse_step`-th one that `mlp_only_layers` does not name, and beside it an MLP whose output is times the sigmoid
//! of a gate.

use super::{Architecture, qwen3_moe};
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ExpertCounts, ExpertNames, ExpertsConfig, ModelConfig, PLAIN, RoutingConfig, layer_types};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Qwen2MoeForCausalLM", read, names: &[] };

/// Widest expert, in values.
const WIDTH_MAX: usize = 1 << 20;
/// Window of configs without the field.
const WINDOW: usize = 4096;

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read_any(f, &PLAIN)?;
    config.qkv_bias = f.flag("qkv_bias", true)?;
    let layers = config.num_hidden_layers;
    let first = f.integer("max_window_layers", 0, usize::MAX)?.unwrap_or(28);
    if f.flag("use_sliding_window", false)? {
        config.read_layer_windows(f, WINDOW, |layer| layer.is_multiple_of(2) && layer < first)?;
    } else if layer_types(f, layers)?.is_some_and(|slides| slides.contains(&true)) {
        return Err(f.refuse("layer_types", "has sliding_attention, but use_sliding_window is not set"));
    }
    let counts = ExpertCounts::read(f, layers)?;
    let parts = ["gate_proj", "up_proj", "down_proj"];
    config.experts = Some(ExpertsConfig {
        num_experts: counts.all,
        num_experts_per_tok: counts.chosen,
        moe_intermediate_size: f.required("moe_intermediate_size", 1, WIDTH_MAX)?,
        shared_size: f.required("shared_expert_intermediate_size", 1, WIDTH_MAX)?,
        shared_gated: true,
        routing: RoutingConfig::SOFTMAX,
        norm_topk_prob: f.flag("norm_topk_prob", false)?,
        bias: false,
        layers: qwen3_moe::sparse_layers(f, layers)?,
        names: ExpertNames { block: "mlp", router: "gate", parts, stacked: false },
    });
    Ok(config)
}
