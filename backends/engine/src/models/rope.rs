//! Rotary frequencies and their scalings, fixed at load for the served context.
//!
//! Papers: Su et al. 2021, "RoFormer" (arXiv:2104.09864); Chen et al. 2023, position interpolation (arXiv:2306.15595); Peng et al. 2023,
//! "YaRN" (arXiv:2309.00071). Follows transformers `modeling_rope_utils.py`, in f64 and rounded once at the end, so that every
//! machine has the same table.

use std::f64::consts::TAU;

use penstock_kernels::{Device, KernelError, Rope, RopeSpec};

use crate::model_config::{ModelConfig, RopeParameters, RopeScaling, Rotation};

/// Tables of rotations for positions `0..positions` of a model served with `context` tokens: the model's, and that of its layers with
/// [`Rotation::Local`].
pub(super) fn tables(config: &ModelConfig, context: usize, positions: usize) -> (RopeSpec, Option<RopeSpec>) {
    let table = |rope| table(config, rope, context, positions);
    (table(&config.rope), config.local_rope.as_ref().map(table))
}

fn table(config: &ModelConfig, rope: &RopeParameters, context: usize, positions: usize) -> RopeSpec {
    let base = base(config, rope, context);
    let dim = config.rotary_dim as f64;
    let plain = (0..config.rotary_dim / 2).map(|i| base.powf(-2.0 * i as f64 / dim));
    let inverse_frequencies = plain.enumerate().map(|(i, f)| scale(config, rope, context, i, f) as f32).collect();
    let factor = match rope.scaling {
        RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
            attention_factor as f32
        }
        _ => 1.0,
    };
    RopeSpec { inverse_frequencies, factor, positions }
}

/// Tables of rotations on a device: the model's, and that of layers with [`Rotation::Local`].
pub(super) struct Ropes {
    model: Rope,
    local: Option<Rope>,
}

impl Ropes {
    pub(super) fn load(
        device: &mut dyn Device,
        (model, local): (&RopeSpec, Option<&RopeSpec>),
    ) -> Result<Self, KernelError> {
        Ok(Self { model: device.rope(model)?, local: local.map(|local| device.rope(local)).transpose()? })
    }

    pub(super) fn of(&self, rotation: Rotation) -> Option<Rope> {
        match rotation {
            Rotation::Model => Some(self.model),
            Rotation::Local => self.local,
            Rotation::None => None,
        }
    }
}

/// Suffix of the numerics id for rotations that depend on the served context; `None` if the config alone decides them.
pub(super) fn served(config: &ModelConfig, context: usize) -> Option<String> {
    match config.rope.scaling {
        RopeScaling::Dynamic { .. } => Some(format!("rope-dynamic-{context}")),
        RopeScaling::LongRope { original_max_position_embeddings: original, .. } => {
            Some(if context > original { "rope-long" } else { "rope-short" }.to_owned())
        }
        _ => None,
    }
}

/// Longest context that the scaling was made for.
pub(super) fn context_max(config: &ModelConfig) -> usize {
    let stretched = |tokens: usize, factor: f64| ((tokens as f64 * factor) as usize).max(tokens);
    let positions = config.max_position_embeddings;
    match config.rope.scaling {
        RopeScaling::Default
        | RopeScaling::Factors { .. }
        | RopeScaling::LongRope { .. }
        | RopeScaling::Llama3 { .. } => positions,
        RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => stretched(positions, factor),
        RopeScaling::Yarn { factor, original_max_position_embeddings, .. } => {
            positions.max(stretched(original_max_position_embeddings, factor))
        }
    }
}

/// Context served by default: the config's value. Only YaRN's stretch is included, since its frequencies are stretched
/// in any case; dynamic scaling would cost quality below the stated length.
pub(super) fn context_default(config: &ModelConfig) -> usize {
    match config.rope.scaling {
        RopeScaling::Yarn { .. } => context_max(config),
        _ => config.max_position_embeddings,
    }
}

/// Base of the frequencies: `rope_theta`, grown for the served context if the scaling is dynamic (NTK-aware,
/// `_compute_dynamic_ntk_parameters`).
fn base(config: &ModelConfig, rope: &RopeParameters, context: usize) -> f64 {
    let theta = rope.rope_theta;
    let RopeScaling::Dynamic { factor } = rope.scaling else { return theta };
    // A head of two values has one frequency, 1 for every base.
    if config.rotary_dim <= 2 {
        return theta;
    }
    let (dim, positions) = (config.rotary_dim as f64, config.max_position_embeddings as f64);
    let context = (context as f64).max(positions);
    theta * ((factor * context / positions) - (factor - 1.0)).powf(dim / (dim - 2.0))
}

/// Scaled frequency of dimension pair `i`, whose unscaled frequency is `f`.
fn scale(config: &ModelConfig, rope: &RopeParameters, context: usize, i: usize, f: f64) -> f64 {
    match rope.scaling {
        RopeScaling::Default | RopeScaling::Dynamic { .. } => f,
        RopeScaling::Factors { ref factors } => f / f64::from(factors[i]),
        RopeScaling::LongRope {
            ref short_factor, ref long_factor, original_max_position_embeddings: original, ..
        } => f / f64::from(if context > original { long_factor } else { short_factor }[i]),
        RopeScaling::Linear { factor } => f / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings,
        } => {
            // Rotations over the original context: few are divided, many kept.
            let rotations = original_max_position_embeddings as f64 * f / TAU;
            let kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 - kept) * f / factor + kept * f
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_max_position_embeddings, .. } => {
            let dim = config.rotary_dim as f64;
            let original = original_max_position_embeddings as f64;
            // Dimension pair that makes `rotations` turns over the original context.
            let pair = |rotations: f64| dim * (original / (rotations * TAU)).ln() / (2.0 * rope.rope_theta.ln());
            let (mut first, mut last) = (pair(beta_fast), pair(beta_slow));
            if truncate {
                (first, last) = (first.floor(), last.ceil());
            }
            let (first, last) = (first.max(0.0), last.min(dim - 1.0));
            let width = if first == last { 0.001 } else { last - first };
            let divided = ((i as f64 - first) / width).clamp(0.0, 1.0);
            f / factor * divided + f * (1.0 - divided)
        }
    }
}
