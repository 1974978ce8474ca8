//! DeepSeek-V2, V3 and R1.
//!
//! Papers: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv:2405.04434) and "DeepSeek-V3 Technical Report" (arXiv:2412.19437). Follows transformers
//! `models/deepseek_v2/modeling_deepseek_v2.py` and `models/deepseek_v3/modeling_deepseek_v3.py`. Attention over latents in every layer; behind the first
//! layers a mixture of experts, chosen among groups, with an MLP that every token goes through beside them. V2 chooses by a softmax, V3 by sigmoids with a
//! correction. Layers for multi-token prediction are ignored.

use penstock_kernels::{ExpertGroups, Scoring};

use super::Architecture;
use crate::model_config::error::{CheckpointError, Shown};
use crate::model_config::fields::{Fields, shown};
use crate::model_config::{
    ExpertCounts, ExpertNames, ExpertsConfig, LatentConfig, ModelConfig, PLAIN, RoutingConfig, Traits,
};

pub(super) const V2: Architecture = Architecture { name: "DeepseekV2ForCausalLM", read: read_v2, names: &[] };
pub(super) const V3: Architecture = Architecture { name: "DeepseekV3ForCausalLM", read: read_v3, names: &[] };

/// Widest expert, in values.
const WIDTH_MAX: usize = 1 << 20;
/// Most experts that every token goes through.
const SHARED_MAX: usize = 64;

fn read_v2(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    is_one_of(f, "scoring_func", &["softmax"])?;
    is_one_of(f, "topk_method", &["greedy", "group_limited_greedy"])?;
    // The makers' own code divides the weights and drops the factor, transformers does neither; no released model has it.
    if f.flag("norm_topk_prob", false)? {
        return Err(f.refuse("norm_topk_prob", "is true, which implementations of DeepSeek-V2 disagree on"));
    }
    let mut config = read(f, true)?;
    let groups = if f.text("topk_method")? == Some("group_limited_greedy") { groups(f, &config, 1)? } else { None };
    config.mlp_bias = f.flag("mlp_bias", false)?;
    set_routing(&mut config, RoutingConfig { scores: Scoring::Softmax, correction: false, groups, scale: scale(f)? });
    Ok(config)
}

fn read_v3(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    is_one_of(f, "scoring_func", &["sigmoid"])?;
    is_one_of(f, "topk_method", &["noaux_tc"])?;
    let mut config = read(f, f.flag("rope_interleave", true)?)?;
    let groups = groups(f, &config, 2)?;
    set_routing(&mut config, RoutingConfig { scores: Scoring::Sigmoid, correction: true, groups, scale: scale(f)? });
    if let Some(experts) = &mut config.experts {
        experts.norm_topk_prob = f.flag("norm_topk_prob", true)?;
    }
    Ok(config)
}

/// Reads the fields that V2 and V3 share. `interleaved`: [`LatentConfig::interleaved`].
fn read(f: &Fields<'_>, interleaved: bool) -> Result<ModelConfig, CheckpointError> {
    let latent = LatentConfig::read(f, interleaved)?;
    let mut config = ModelConfig::read_any(f, &Traits { latent: Some(latent), ..PLAIN })?;
    config.qkv_bias = f.flag("attention_bias", false)?;
    config.output_bias = config.qkv_bias;
    let layers = config.num_hidden_layers;
    let counts = ExpertCounts::read(f, layers)?;
    let first = f.integer("first_k_dense_replace", 0, usize::MAX)?.unwrap_or(0);
    let step = f.integer("moe_layer_freq", 1, usize::MAX)?.unwrap_or(1);
    let width = f.required("moe_intermediate_size", 1, WIDTH_MAX)?;
    config.experts = Some(ExpertsConfig {
        num_experts: counts.all,
        num_experts_per_tok: counts.chosen,
        moe_intermediate_size: width,
        norm_topk_prob: false,
        shared_size: width * f.integer("n_shared_experts", 0, SHARED_MAX)?.unwrap_or(0),
        shared_gated: false,
        routing: RoutingConfig::SOFTMAX,
        bias: false,
        layers: (0..layers).map(|layer| layer >= first && layer.is_multiple_of(step)).collect(),
        names: ExpertNames {
            block: "mlp",
            router: "gate",
            parts: ["gate_proj", "up_proj", "down_proj"],
            stacked: false,
        },
    });
    Ok(config)
}

fn set_routing(config: &mut ModelConfig, routing: RoutingConfig) {
    if let Some(experts) = &mut config.experts {
        experts.routing = routing;
    }
}

/// Factor on the weights of the chosen experts.
fn scale(f: &Fields<'_>) -> Result<f32, CheckpointError> {
    Ok(f.number("routed_scaling_factor", 1e-3, 1e3)?.unwrap_or(1.0) as f32)
}

/// Groups of experts, whose score is that of their `best` best experts together; `None` where there is but one.
fn groups(f: &Fields<'_>, config: &ModelConfig, best: usize) -> Result<Option<ExpertGroups>, CheckpointError> {
    let Some(experts) = &config.experts else { return Ok(None) };
    let count = f.integer("n_group", 1, ExpertGroups::MAX)?.unwrap_or(1);
    let chosen = f.integer("topk_group", 1, count)?.unwrap_or(count);
    if chosen == count {
        return Ok(None);
    }
    let size = experts.num_experts / count;
    if !experts.num_experts.is_multiple_of(count) || size < best {
        let reason =
            format!("is {count}, needs groups of equal size, {best} or more, of {} experts", experts.num_experts);
        return Err(f.refuse("n_group", reason));
    }
    if chosen * size < experts.num_experts_per_tok {
        let reason =
            format!("is {chosen}: {} experts, from which {} are chosen", chosen * size, experts.num_experts_per_tok);
        return Err(f.refuse("topk_group", reason));
    }
    Ok(Some(ExpertGroups { count, chosen, best }))
}

/// Refuses a method that the architecture does not have here.
fn is_one_of(f: &Fields<'_>, name: &str, known: &[&str]) -> Result<(), CheckpointError> {
    match f.text(name)? {
        Some(other) if !known.contains(&other) => {
            let reason = format!("\"{}\" is not supported, only {} is", Shown(other), known.join(" or "));
            Err(f.refuse(name, reason))
        }
        _ => Ok(()),
    }
}

impl LatentConfig {
    fn read(f: &Fields<'_>, interleaved: bool) -> Result<Self, CheckpointError> {
        let kv_lora_rank = f.required("kv_lora_rank", 2, Self::KEY_MAX)?;
        let qk_rope_head_dim = f.required("qk_rope_head_dim", 2, Self::KEY_MAX)?;
        for (name, width) in [("kv_lora_rank", kv_lora_rank), ("qk_rope_head_dim", qk_rope_head_dim)] {
            if !width.is_multiple_of(2) {
                return Err(f.refuse(name, format!("is {width}, needs an even number")));
            }
        }
        if kv_lora_rank + qk_rope_head_dim > Self::KEY_MAX {
            let reason = format!("is {kv_lora_rank}, with qk_rope_head_dim more than {}", Self::KEY_MAX);
            return Err(f.refuse("kv_lora_rank", reason));
        }
        let q_lora_rank = match f.value("q_lora_rank") {
            None => None,
            Some(value) => {
                let rank = f.integer("q_lora_rank", 1, WIDTH_MAX)?;
                Some(rank.ok_or_else(|| f.refuse("q_lora_rank", format!("is {}", shown(value))))?)
            }
        };
        Ok(Self {
            q_lora_rank,
            kv_lora_rank,
            qk_nope_head_dim: f.required("qk_nope_head_dim", 1, Self::KEY_MAX)?,
            qk_rope_head_dim,
            v_head_dim: f.required("v_head_dim", 1, Self::KEY_MAX)?,
            interleaved,
        })
    }
}
