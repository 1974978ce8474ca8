//! Granite 4.0 (dense, text).
//!
//! Follows transformers `models/granitemoehybrid/modeling_granitemoehybrid.py`, in whose models layers may be Mamba's and have experts; here all have attention
//! and the MLP that all tokens go through. A Granite 3 with other names for the MLP's matrices, which may have no rotations.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::{Architecture, granite};
use crate::model_config::error::{CheckpointError, Shown};
use crate::model_config::fields::{Fields, shown};
use crate::model_config::{LayerNames, ModelConfig, Rotation};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "GraniteMoeHybridForCausalLM", read, names: &[] };

/// Values that configs leave out, as in transformers' GraniteMoeHybridConfig.
static DEFAULTS: LazyLock<Map<String, Value>> =
    LazyLock::new(|| serde_json::from_value(json!({ "intermediate_size": 11_008 })).expect("an object"));

/// Widest MLP, in values.
const WIDTH_MAX: usize = 1 << 20;
/// Field of the layers' kinds.
const KINDS: &str = "layer_types";
/// Field that says whether there are rotations.
const POSITIONS: &str = "position_embedding_type";

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let kinds = f.list(KINDS)?;
    if let Some(other) = kinds.iter().find(|kind| kind.as_str() != Some("attention")) {
        let help = "served are the dense models of this family: granite-4.0-micro, -1b and -350m";
        return Err(f.refuse(KINDS, format!("has {}; only attention is supported", shown(other))).help(help));
    }
    // Absent, all layers would be Mamba's, and there would be experts.
    for name in [KINDS, "num_local_experts"] {
        if f.value(name).is_none() {
            return Err(f.missing(name));
        }
    }
    let mut config = ModelConfig::read(&f.or(&DEFAULTS))?;
    // The field with the usual name is the width of experts.
    config.intermediate_size = f.required("shared_intermediate_size", 1, WIDTH_MAX)?;
    if kinds.len() != config.num_hidden_layers {
        let reason = format!("has {} entries for {} layers", kinds.len(), config.num_hidden_layers);
        return Err(f.refuse(KINDS, reason));
    }
    granite::read_factors(f, &mut config)?;
    config.layer_names =
        LayerNames { gate_up: Some("shared_mlp.input_linear"), down: "shared_mlp.output_linear", ..LayerNames::PLAIN };
    match f.text(POSITIONS)? {
        Some("rope") => {}
        None | Some("nope") => config.rotations.fill(Rotation::None),
        Some(other) => {
            let reason = format!("\"{}\" is not supported, only \"rope\" and \"nope\" are", Shown(other));
            return Err(f.refuse(POSITIONS, reason));
        }
    }
    Ok(config)
}
