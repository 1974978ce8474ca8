//! Rotary embeddings as configs describe them: base and scaling, in the older spelling and the newer one.

use super::error::{CheckpointError, Shown};
use super::fields::Fields;
use super::{POSITIONS_MAX, THETA_MAX, Traits};

/// Largest factor by which a context is stretched.
const FACTOR_MAX: f64 = 4096.0;

/// Rotary embedding of a config: `rope_parameters`, or `rope_scaling` and `rope_theta` of older files.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeParameters {
    /// Base of the rotary frequencies, `theta`.
    pub rope_theta: f64,
    /// Scaling of the frequencies for contexts longer than the original one.
    pub scaling: RopeScaling,
}

/// Kinds of rotary scaling, `rope_type` in the config, with their parameters.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies unchanged: the context is the one the model was trained for.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor of every frequency, at least 1.
        factor: f64,
    },
    /// Each frequency divided by a factor of its own, as GGUF files have it (for Llama 3, the same as [`RopeScaling::Llama3`]).
    Factors {
        /// Divisors of the frequencies, `[head_dim / 2]`.
        factors: Vec<f32>,
    },
    /// LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency divided by a factor of its own, from one list for contexts up to the
    /// original one and from another for longer ones; fixed at load for the served context.
    LongRope {
        /// Divisors for served contexts up to the original one, `[rotary_dim / 2]`.
        short_factor: Vec<f32>,
        /// Divisors for longer served contexts, `[rotary_dim / 2]`.
        long_factor: Vec<f32>,
        /// Factor on sine and cosine of the rotations.
        attention_factor: f64,
        /// Positions the model was trained for, before scaling.
        original_max_position_embeddings: usize,
    },
    /// Dynamic NTK: the base grows with the served context, fixed at load.
    Dynamic {
        /// Factor by which the context may grow, at least 1.
        factor: f64,
    },
    /// Llama 3: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Limit of the low frequencies: wavelengths above `original / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Limit of the high frequencies: wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Positions the model was trained for, before scaling.
        original_max_position_embeddings: usize,
    },
    /// YaRN (Peng et al. 2023): low frequencies divided, high ones kept, a ramp between by rotations; queries and keys
    /// scaled.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Rotations over the original context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations over the original context below which a frequency is divided.
        beta_slow: f64,
        /// Factor on sine and cosine of the rotations.
        attention_factor: f64,
        /// True if the range between is rounded outwards to whole dimensions.
        truncate: bool,
        /// Positions the model was trained for, before scaling.
        original_max_position_embeddings: usize,
    },
}

/// The rope object; the older spelling takes precedence, as in transformers.
pub(super) fn rope_object<'a>(f: &Fields<'a>) -> Result<Option<Fields<'a>>, CheckpointError> {
    let nonempty = |name| f.value(name).is_some_and(|v| v.as_object().is_none_or(|map| !map.is_empty()));
    if nonempty("rope_scaling") { f.object("rope_scaling") } else { f.object("rope_parameters") }
}

impl RopeParameters {
    /// Reads `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it: the model's rotation, and that of the layers with a
    /// window where the family has one.
    pub(super) fn read(
        f: &Fields<'_>,
        positions: usize,
        rotary_dim: usize,
        traits: &Traits,
    ) -> Result<[Option<Self>; 2], CheckpointError> {
        let inner = rope_object(f)?;
        let one = |inner: Option<&Fields<'_>>, outer: &str, default: f64| {
            let theta = inner.map_or(Ok(None), |i| i.number("rope_theta", 2.0, THETA_MAX))?;
            let theta = theta.map_or_else(|| f.number(outer, 2.0, THETA_MAX), |t| Ok(Some(t)))?;
            let scaling = inner.map_or(Ok(RopeScaling::Default), |i| RopeScaling::read(f, i, positions, rotary_dim))?;
            Ok::<_, CheckpointError>(Some(Self { rope_theta: theta.unwrap_or(default), scaling }))
        };
        let Some(local_theta) = traits.local_theta else {
            return Ok([one(inner.as_ref(), "rope_theta", traits.theta)?, None]);
        };
        let nested = |name: &str| inner.as_ref().map_or(Ok(None), |inner| inner.object(name));
        let (full, sliding) = (nested("full_attention")?, nested("sliding_attention")?);
        // The older spelling scales the layers without a window alone.
        let full = if full.is_some() || sliding.is_some() { full } else { inner.clone() };
        Ok([
            one(full.as_ref(), "rope_theta", traits.theta)?,
            one(sliding.as_ref(), "rope_local_base_freq", local_theta)?,
        ])
    }
}

/// YaRN's scale of queries and of keys where the config has one for all their values (DeepSeek's `mscale_all_dim`); 1 otherwise.
pub(super) fn yarn_all_dim(f: &Fields<'_>) -> Result<f64, CheckpointError> {
    let Some(inner) = rope_object(f)? else { return Ok(1.0) };
    let kind = inner.text("rope_type")?.map_or_else(|| inner.text("type"), |kind| Ok(Some(kind)))?;
    let all = inner.number("mscale_all_dim", 0.0, 1e3)?.unwrap_or(0.0);
    if kind.is_none_or(|kind| kind == "default") || all == 0.0 {
        return Ok(1.0);
    }
    let factor = inner.number("factor", 1.0, FACTOR_MAX)?.ok_or_else(|| inner.missing("factor"))?;
    Ok(yarn_scale(factor, all))
}

/// "YaRN", equation 22, with DeepSeek's factor `m`: 0.1 m ln(s) + 1.
fn yarn_scale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// Factor of LongRoPE on sine and cosine for a context stretched by `factor` (Ding et al. 2024).
pub(crate) fn longrope_attention_factor(factor: f64, original: usize) -> f64 {
    if factor <= 1.0 || original < 2 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() }
}

impl RopeScaling {
    fn read(outer: &Fields<'_>, f: &Fields<'_>, positions: usize, rotary_dim: usize) -> Result<Self, CheckpointError> {
        for layered in ["full_attention", "sliding_attention"] {
            if f.has(layered) {
                return Err(
                    f.refuse(layered, "rotations that differ between layers are not supported in this architecture")
                );
            }
        }
        let kind = f.text("rope_type")?.map_or_else(|| f.text("type"), |kind| Ok(Some(kind)))?;
        let factor = || f.number("factor", 1.0, FACTOR_MAX)?.ok_or_else(|| f.missing("factor"));
        let required = |name| f.number(name, 1e-6, 1e6)?.ok_or_else(|| f.missing(name));
        let original = || {
            const NAME: &str = "original_max_position_embeddings";
            let outside = outer.integer(NAME, 1, POSITIONS_MAX)?;
            let found = outside.map_or_else(|| f.integer(NAME, 1, POSITIONS_MAX), |n| Ok(Some(n)))?;
            Ok::<_, CheckpointError>(found.unwrap_or(positions))
        };
        match kind.unwrap_or("default") {
            "default" => Ok(Self::Default),
            "linear" => Ok(Self::Linear { factor: factor()? }),
            "dynamic" => Ok(Self::Dynamic { factor: factor()? }),
            "llama3" => {
                let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
                if high <= low {
                    return Err(
                        f.refuse("high_freq_factor", format!("is {high}, needs more than low_freq_factor {low}"))
                    );
                }
                let original_max_position_embeddings = original()?;
                let factor = factor()?;
                Ok(Self::Llama3 {
                    factor,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_max_position_embeddings,
                })
            }
            "yarn" => Self::read_yarn(f, factor()?, original()?),
            "longrope" | "su" => Self::read_longrope(f, positions, original()?, rotary_dim),
            other => {
                let help = "supported: default, linear, dynamic, llama3, yarn, longrope";
                Err(f.refuse("rope_type", format!("\"{}\" is not supported", Shown(other))).help(help))
            }
        }
    }

    fn read_longrope(
        f: &Fields<'_>,
        positions: usize,
        original: usize,
        rotary_dim: usize,
    ) -> Result<Self, CheckpointError> {
        let list = |name| {
            let list = f.numbers(name, 1e-6, 1e6)?.ok_or_else(|| f.missing(name))?;
            if list.len() != rotary_dim / 2 {
                return Err(f.refuse(name, format!("has {} factors, needs {}", list.len(), rotary_dim / 2)));
            }
            Ok::<_, CheckpointError>(list)
        };
        let factor = f.number("factor", 0.0, FACTOR_MAX)?.unwrap_or(positions as f64 / original as f64);
        let inferred = longrope_attention_factor(factor, original);
        Ok(Self::LongRope {
            short_factor: list("short_factor")?,
            long_factor: list("long_factor")?,
            attention_factor: f.number("attention_factor", 0.0, 1e3)?.unwrap_or(inferred),
            original_max_position_embeddings: original,
        })
    }

    fn read_yarn(f: &Fields<'_>, factor: f64, original: usize) -> Result<Self, CheckpointError> {
        let (beta_fast, beta_slow) = (f.number("beta_fast", 0.0, 1e6)?, f.number("beta_slow", 0.0, 1e6)?);
        // Absent and 0 both mean the paper's values, as in transformers.
        let or = |value: Option<f64>, default| value.filter(|&v| v > 0.0).unwrap_or(default);
        let (mscale, all) = (f.number("mscale", 0.0, 1e3)?, f.number("mscale_all_dim", 0.0, 1e3)?);
        // DeepSeek's two scales where both are given.
        let scale = |m: f64| yarn_scale(factor, m);
        let inferred = match (mscale.filter(|&m| m > 0.0), all.filter(|&m| m > 0.0)) {
            (Some(mscale), Some(all)) => scale(mscale) / scale(all),
            _ => scale(1.0),
        };
        // A factor on what is inferred, as those who publish it mean it (DeepSeek-R1-0528-Qwen3-8B) and vLLM has it; transformers passes over it.
        let inferred = inferred * f.number("attn_factor", 0.0, 1e3)?.unwrap_or(1.0);
        Ok(Self::Yarn {
            factor,
            beta_fast: or(beta_fast, 32.0),
            beta_slow: or(beta_slow, 1.0),
            attention_factor: f.number("attention_factor", 0.0, 1e3)?.unwrap_or(inferred),
            truncate: f.flag("truncate", true)?,
            original_max_position_embeddings: original,
        })
    }
}
