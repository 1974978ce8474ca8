//! Mixtral 8x7B and 8x22B.
//!
//! Paper: Jiang et al. 2024, "Mixtral of Experts" (arXiv:2401.04088). Follows transformers `models/mixtral/modeling_mixtral.py`. A Mistral
//! whose every MLP is a mixture of experts of `intermediate_size`; the weights of the chosen ones are divided by their sum.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ExpertCounts, ExpertNames, ExpertsConfig, ModelConfig, PLAIN, Traits};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "MixtralForCausalLM", read, names: &[] };

/// Base of the rotary frequencies where the config has none.
const THETA: f64 = 1e6;

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read_any(f, &Traits { theta: THETA, ..PLAIN })?;
    // Unlike Mistral, an absent window means none.
    config.windows = vec![f.integer("sliding_window", 1, usize::MAX)?; config.num_hidden_layers];
    let counts = ExpertCounts::read(f, config.num_hidden_layers)?;
    let names = ExpertNames { block: "block_sparse_moe", router: "gate", parts: ["w1", "w3", "w2"], stacked: false };
    config.experts = Some(ExpertsConfig::in_all_layers(&config, &counts, names));
    Ok(config)
}
