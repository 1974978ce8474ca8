//! NomicBERT (nomic-embed-text), as an embedding model.
//!
//! Paper: Nussbaum et al. 2024, "Nomic Embed: Training a Reproducible Long Context Text Embedder" (arXiv:2402.01613). Follows transformers
//! `models/nomic_bert/modeling_nomic_bert.py`, and its `conversion_mapping.py` for the names of the checkpoints' tensors. BERT with rotations in the place of
//! positions, and a gated MLP; no biases but those of the norms. Configs have the fields of the makers' own code, of transformers, or both; the latter count.

use super::{Architecture, encoder};
use crate::model_config::error::{CheckpointError, Shown};
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, POSITIONS_MAX, THETA_MAX, renamed};

pub(super) const MODEL: Architecture = Architecture { name: "NomicBertModel", read, names: &[] };

/// Base of the rotary frequencies where the config has none.
const THETA: f64 = 1000.0;
/// Positions that a model was trained for, where a config in the makers' spelling does not say it.
const TRAINED: usize = 2048;

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    refuse_unsupported(f)?;
    let own = renamed(
        f,
        &[
            ("hidden_size", "n_embd"),
            ("intermediate_size", "n_inner"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("layer_norm_eps", "layer_norm_epsilon"),
        ],
    );
    ModelConfig::read_rotated_encoder(&f.or(&own), &encoder::NOMIC, theta(f)?, positions(f)?)
}

/// Longest context: beyond the positions that a model was trained for, the makers' code scales the rotations with each text's length.
fn positions(f: &Fields<'_>) -> Result<usize, CheckpointError> {
    let of = |name| f.integer(name, 1, POSITIONS_MAX);
    if let Some(positions) = of("max_position_embeddings")? {
        return Ok(positions);
    }
    let trained = of("max_trained_positions")?.unwrap_or(TRAINED);
    Ok(f.required("n_positions", 1, POSITIONS_MAX)?.min(trained))
}

fn theta(f: &Fields<'_>) -> Result<f64, CheckpointError> {
    let inner = f.object("rope_parameters")?;
    if let Some(inner) = &inner
        && let Some(other) = inner.text("rope_type")?.filter(|kind| *kind != "default")
    {
        let reason = format!("\"{}\" is not supported, only \"default\" is", Shown(other));
        return Err(inner.refuse("rope_type", reason));
    }
    let theta = inner.map_or(Ok(None), |inner| inner.number("rope_theta", 2.0, THETA_MAX))?;
    let theta = theta.map_or_else(|| f.number("rotary_emb_base", 2.0, THETA_MAX), |theta| Ok(Some(theta)))?;
    Ok(theta.unwrap_or(THETA))
}

/// Refuses fields that change the computation.
fn refuse_unsupported(f: &Fields<'_>) -> Result<(), CheckpointError> {
    // The makers' code has other defaults than transformers, which reads none of these fields.
    let is_makers = f.value("n_embd").is_some();
    for (name, default) in [
        ("qkv_proj_bias", is_makers),
        ("mlp_fc1_bias", is_makers),
        ("mlp_fc2_bias", is_makers),
        ("prenorm", false),
        ("parallel_block", false),
        ("use_rms_norm", false),
        ("causal", false),
        ("rotary_emb_interleaved", false),
    ] {
        if f.flag(name, default)? {
            return Err(f.refuse(name, "is true, which is not supported"));
        }
    }
    let rotated = f.number("rotary_emb_fraction", 0.0, 1.0)?.unwrap_or(if is_makers { 0.0 } else { 1.0 });
    if rotated != 1.0 {
        return Err(f.refuse("rotary_emb_fraction", format!("is {rotated}; only 1, the whole head, is supported")));
    }
    for name in ["rotary_emb_scale_base", "rope_scaling"] {
        if f.value(name).is_some() {
            return Err(f.refuse(name, "is set; scaled rotations are not supported in this architecture"));
        }
    }
    const EXPERTS: &str = "moe_every_n_layers";
    if f.integer(EXPERTS, 0, usize::MAX)?.unwrap_or(0) > 0 {
        return Err(f.refuse(EXPERTS, "this architecture has no mixture of experts here"));
    }
    // Without the field, the makers' code has no gate.
    let makers = if is_makers { "gelu" } else { "swiglu" };
    let activations: [(&str, &str, &[&str]); 2] =
        [("activation_function", makers, &["swiglu"]), ("hidden_act", "silu", &["silu", "swish"])];
    for (name, default, known) in activations {
        let given = f.text(name)?.unwrap_or(default);
        if !known.contains(&given) {
            let reason = format!("\"{}\" is not supported, only \"{}\" is", Shown(given), known[0]);
            return Err(f.refuse(name, reason));
        }
    }
    Ok(())
}
