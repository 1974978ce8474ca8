//! EXAONE 4.0.
//!
//! Paper: LG AI Research 2025, "EXAONE 4.0: Unified Large Language Models Integrating Non-reasoning and Reasoning Modes" (arXiv:2507.11407). Follows
//! transformers `models/exaone4/modeling_exaone4.py`. Norms stand behind attention and MLP alone, and over each query and key head. In models with a window
//! the layers without one have no rotation.

use super::Architecture;
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, NormPlaces, PLAIN, QkNorm, Rotation, Traits};

pub(super) const ARCHITECTURE: Architecture = Architecture { name: "Exaone4ForCausalLM", read, names: &[] };

/// Window of configs without the field.
const WINDOW: usize = 4096;
/// Length of a group of layers of which only the last has no window, where the config does not say.
const EVERY: usize = 4;
/// Config field with the length of such a group.
const PATTERN: &str = "sliding_window_pattern";

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let mut config = ModelConfig::read_dense(f, Traits { eps: 1e-5, ..PLAIN })?;
    config.norms = NormPlaces::After;
    config.qk_norm = QkNorm::Each;
    let has_windows = !f.has("sliding_window") || f.value("sliding_window").is_some();
    let every = match (has_windows && f.value("layer_types").is_none(), f.has(PATTERN)) {
        (false, _) => 1,
        (true, false) => EVERY,
        // A pattern of letters ("LLLG") comes with `layer_types`, which is read in its place.
        (true, true) => f.required(PATTERN, 1, usize::MAX)?,
    };
    config.read_layer_windows(f, WINDOW, |layer| !(layer + 1).is_multiple_of(every))?;
    let rotation =
        |window: &Option<usize>| if window.is_some() || !has_windows { Rotation::Model } else { Rotation::None };
    config.rotations = config.windows.iter().map(rotation).collect();
    Ok(config)
}
