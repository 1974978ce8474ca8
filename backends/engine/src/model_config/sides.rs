//! Sides of a token that its attention sees.

use super::ModelConfig;
use super::error::CheckpointError;
use super::fields::Fields;

/// Field of Gemma's models whose tokens see later ones.
pub(crate) const BIDIRECTIONAL: &str = "use_bidirectional_attention";

/// Field by which the tokens of any decoder see later ones.
const CAUSAL: &str = "is_causal";

impl ModelConfig {
    /// Reads `is_causal`: with `false` (embedding models) tokens see later ones, and a layer's window reaches as far to each side, as in transformers
    /// (`sliding_window_bidirectional_overlay`). Called once the family has read the other fields.
    pub(crate) fn read_sides(&mut self, f: &Fields<'_>) -> Result<(), CheckpointError> {
        // Gemma's field has been read, with the windows that it means.
        if self.encoder.is_some() || !self.causal {
            return Ok(());
        }
        if f.flag(CAUSAL, true)? {
            if !f.flag(BIDIRECTIONAL, false)? {
                return Ok(());
            }
            let help = "is_causal: false lets the tokens of every decoder see later ones";
            return Err(f.refuse(BIDIRECTIONAL, "is true, which this architecture does not have").help(help));
        }
        if self.latent.is_some() || self.sinks {
            return Err(f.refuse(CAUSAL, "is false; in this architecture tokens see earlier ones alone"));
        }
        self.causal = false;
        // A token that is as far away as the window is wide is still seen.
        self.windows.iter_mut().flatten().for_each(|window| *window = window.saturating_add(1));
        Ok(())
    }
}
