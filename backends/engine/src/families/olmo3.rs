//! OLMo 3.
//!
//! Paper: Olmo Team 2025, "Olmo 3" (arXiv:2512.13961). Follows transformers `models/olmo3/modeling_olmo3.py`: OLMo 2 in which three of four layers have a
//! window. A scaling of the rotations is for the layers without one, as the paper, vLLM, llama.cpp and transformers 4 have it; transformers 5.5 scales those of all
//! layers.

use super::{Architecture, olmo2};
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, RopeParameters, RopeScaling, Rotation};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Olmo3ForCausalLM", read, names: &[] };

/// Window of configs that have none of their own.
const WINDOW: usize = 4096;
/// Length of a group of layers of which only the last has no window, where the config does not say.
const PATTERN: usize = 4;

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = olmo2::read(f)?;
    config.read_layer_windows(f, WINDOW, |layer| !(layer + 1).is_multiple_of(PATTERN))?;
    if config.rope.scaling != RopeScaling::Default {
        let rotation = |window: &Option<usize>| if window.is_some() { Rotation::Local } else { Rotation::Model };
        config.rotations = config.windows.iter().map(rotation).collect();
        config.local_rope = Some(RopeParameters { scaling: RopeScaling::Default, ..config.rope });
    }
    Ok(config)
}
