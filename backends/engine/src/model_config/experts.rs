//! Mixtures of experts: their number, their choice, and the names of their tensors.

use penstock_kernels::{ExpertGroups, Scoring};

use super::ModelConfig;
use super::error::CheckpointError;
use super::fields::Fields;

/// Most experts of a layer, well above the largest published models (512).
const EXPERTS_MAX: usize = 4096;
/// Most matrices of experts in a model: as many tensors as a safetensors file may have.
const EXPERT_TENSORS_MAX: usize = 1 << 18;
/// Most experts of a token, which the devices have room for.
const CHOSEN_MAX: usize = 64;

/// Choice of a token's experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingConfig {
    /// Function on the router's logits.
    pub scores: Scoring,
    /// True if the checkpoint has values that are added to the scores for the choice alone.
    pub correction: bool,
    /// Groups of which some are chosen first.
    pub groups: Option<ExpertGroups>,
    /// Factor on the weights.
    pub scale: f32,
}

impl RoutingConfig {
    /// The best by a softmax.
    pub const SOFTMAX: RoutingConfig =
        RoutingConfig { scores: Scoring::Softmax, correction: false, groups: None, scale: 1.0 };
}

/// Mixture of experts in the place of some layers' MLPs.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Experts of a layer, `num_local_experts` in some configs.
    pub num_experts: usize,
    /// Experts that a token chooses.
    pub num_experts_per_tok: usize,
    /// Width of an expert between its gate/up and down projections, in values.
    pub moe_intermediate_size: usize,
    /// True if the weights of the chosen experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Width of the MLP that every token goes through beside its experts; 0 has none.
    pub shared_size: usize,
    /// True if the output of that MLP is times the sigmoid of a product with its input (Qwen2-MoE).
    pub shared_gated: bool,
    /// Choice of the experts.
    pub routing: RoutingConfig,
    /// Layers that have experts, `[num_hidden_layers]`; the others have an MLP of `intermediate_size`.
    pub layers: Vec<bool>,
    /// True if the router and every matrix of an expert have a bias.
    pub bias: bool,
    /// Names of the tensors.
    pub names: ExpertNames,
}

impl ExpertsConfig {
    /// Mixture of experts of `config.intermediate_size` in every layer: chosen by a softmax, weighted to a sum of 1, without biases or shared experts.
    pub(crate) fn in_all_layers(config: &ModelConfig, counts: &ExpertCounts, names: ExpertNames) -> Self {
        Self {
            num_experts: counts.all,
            num_experts_per_tok: counts.chosen,
            moe_intermediate_size: config.intermediate_size,
            norm_topk_prob: true,
            shared_size: 0,
            shared_gated: false,
            routing: RoutingConfig::SOFTMAX,
            layers: vec![true; config.num_hidden_layers],
            bias: false,
            names,
        }
    }
}

/// Names of a mixture's tensors in a layer, before `.weight` and `.bias`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// Block that holds router and experts: `mlp`, or `block_sparse_moe`.
    pub block: &'static str,
    /// Router in its block: `gate`, or `router`.
    pub router: &'static str,
    /// Gate, up and down of an expert.
    pub parts: [&'static str; 3],
    /// True if a folder has all experts of a layer in two tensors, with the rows of gate and up in turn (GPT-OSS). The names here are then those of
    /// the parts that are made of them.
    pub stacked: bool,
}

impl ExpertNames {
    /// Name of the router's matrix in a layer.
    pub fn router(&self) -> String {
        format!("{}.{}.weight", self.block, self.router)
    }

    /// Names of the gate, up and down matrices of an expert in a layer.
    pub fn expert(&self, expert: usize) -> [String; 3] {
        self.parts.map(|part| format!("{}.experts.{expert}.{part}.weight", self.block))
    }
}

/// Numbers of experts, and of those that a token chooses: the fields that transformers reads under both names.
pub(crate) struct ExpertCounts {
    pub(crate) all: usize,
    pub(crate) chosen: usize,
}

impl ExpertCounts {
    /// Reads `num_experts`, `num_local_experts` or `n_routed_experts`, and `num_experts_per_tok`. transformers 5 writes the second name also for
    /// families whose configs had another. Refuses more experts in `layers` layers than any file could hold, before their tensors are listed.
    pub(crate) fn read(f: &Fields<'_>, layers: usize) -> Result<Self, CheckpointError> {
        const NAMES: [&str; 3] = ["num_experts", "num_local_experts", "n_routed_experts"];
        let mut found: Option<(&str, usize)> = None;
        for name in NAMES {
            match (f.integer(name, 1, EXPERTS_MAX)?, found) {
                (Some(count), Some((other, all))) if count != all => {
                    return Err(f.refuse(other, format!("is {all}, and {name} is {count}")));
                }
                (Some(count), None) => found = Some((name, count)),
                _ => {}
            }
        }
        let Some((name, all)) = found else { return Err(f.missing(NAMES[0])) };
        let tensors = all.saturating_mul(layers).saturating_mul(3);
        if tensors > EXPERT_TENSORS_MAX {
            let reason = format!("is {all}: {tensors} matrices in {layers} layers, {EXPERT_TENSORS_MAX} are the most");
            return Err(f.refuse(name, reason));
        }
        let chosen = f.required("num_experts_per_tok", 1, all.min(CHOSEN_MAX))?;
        Ok(Self { all, chosen })
    }
}
