//! OLMoE.
//!
//! Paper: Muennighoff et al. 2024, "OLMoE: Open Mixture-of-Experts Language Models" (arXiv:2409.02060). Follows transformers
//! `models/olmoe/modeling_olmoe.py`. A Llama with a mixture of experts of `intermediate_size` in every layer, and norms over all query and all key heads
//! together.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ExpertCounts, ExpertNames, ExpertsConfig, ModelConfig, PLAIN, QkNorm, Traits};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "OlmoeForCausalLM", read, names: &[] };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    if f.value("clip_qkv").is_some() {
        return Err(f.refuse("clip_qkv", "is set; clipping of queries, keys and values is not supported"));
    }
    if f.value("sliding_window").is_some() {
        return Err(f.refuse("sliding_window", "is set; windows are not supported in this architecture"));
    }
    let mut config = ModelConfig::read_any(f, &Traits { eps: 1e-5, ..PLAIN })?;
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    config.qk_norm = QkNorm::Together;
    let counts = ExpertCounts::read(f, config.num_hidden_layers)?;
    let parts = ["gate_proj", "up_proj", "down_proj"];
    let names = ExpertNames { block: "mlp", router: "gate", parts, stacked: false };
    let experts = ExpertsConfig::in_all_layers(&config, &counts, names);
    config.experts = Some(ExpertsConfig { norm_topk_prob: f.flag("norm_topk_prob", false)?, ..experts });
    Ok(config)
}
