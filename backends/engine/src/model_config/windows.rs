//! Windows of layers: the last tokens that a position of such a layer sees.

use super::error::CheckpointError;
use super::fields::{Fields, shown};
use super::{ModelConfig, POSITIONS_MAX};

/// Field of a window's tokens.
const WINDOW: &str = "sliding_window";

impl ModelConfig {
    /// Gives the layers that `layer_types` lists, or where there is no list those for which `slides` is true, a window of `sliding_window` tokens; of
    /// `default` ones where the config does not have the field.
    pub(crate) fn read_layer_windows(
        &mut self,
        f: &Fields<'_>,
        default: usize,
        slides: impl Fn(usize) -> bool,
    ) -> Result<(), CheckpointError> {
        let layers = self.num_hidden_layers;
        let window = if f.has(WINDOW) { f.integer(WINDOW, 1, usize::MAX)? } else { Some(default) };
        let slides = layer_types(f, layers)?.unwrap_or_else(|| (0..layers).map(slides).collect());
        if window.is_none() && slides.contains(&true) {
            return Err(f.refuse(WINDOW, "is missing, and some layers have a window"));
        }
        self.windows = slides.into_iter().map(|slides| window.filter(|_| slides)).collect();
        Ok(())
    }

    /// Reads Qwen's windows: off unless `use_sliding_window`; then by `layer_types`, or for layers from
    /// `max_window_layers` on.
    pub(crate) fn read_qwen_windows(&mut self, f: &Fields<'_>) -> Result<(), CheckpointError> {
        let window = f.integer(WINDOW, 1, POSITIONS_MAX)?;
        let window = if f.flag("use_sliding_window", false)? { window } else { None };
        let first = f.integer("max_window_layers", 0, usize::MAX)?.unwrap_or(28);
        self.windows = match layer_types(f, self.num_hidden_layers)? {
            None => (0..self.num_hidden_layers).map(|layer| window.filter(|_| layer >= first)).collect(),
            Some(sliding) if window.is_none() && sliding.contains(&true) => {
                let reason = "has sliding_attention, but use_sliding_window or sliding_window is not set";
                return Err(f.refuse("layer_types", reason));
            }
            Some(sliding) => sliding.into_iter().map(|slides| window.filter(|_| slides)).collect(),
        };
        Ok(())
    }
}

/// Reads `layer_types`; true marks a layer with a sliding window.
pub(crate) fn layer_types(f: &Fields<'_>, layers: usize) -> Result<Option<Vec<bool>>, CheckpointError> {
    let list = f.list("layer_types")?;
    if f.value("layer_types").is_none() {
        return Ok(None);
    }
    if list.len() != layers {
        return Err(f.refuse("layer_types", format!("has {} entries for {layers} layers", list.len())));
    }
    let slides = |value: &serde_json::Value| match value.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(f.refuse("layer_types", format!("{} is not supported", shown(value)))),
    };
    list.iter().map(slides).collect::<Result<Vec<_>, _>>().map(Some)
}
