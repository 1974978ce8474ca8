//! ModernBERT, as an embedding model (also with the head that predicts masked tokens, which is ignored) and as a cross-encoder with one label.
//!
//! Paper: Warner et al. 2024, "Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder for Fast, Memory Efficient, and Long Context
//! Finetuning and Inference" (arXiv:2412.13663). Follows transformers `models/modernbert/modeling_modernbert.py`. Norms before the blocks and behind the
//! last one, none before the first attention; rotations in the place of positions; a gated MLP; and two of three layers attend to a window on both
//! sides, with a rotation of their own.

use penstock_kernels::Activation;

use super::{Architecture, encoder};
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{HeadConfig, ModelConfig};

/// Prefix of the names in models that are built around the encoder.
const NAMES: &[(&str, &str)] = &[("", "model.")];

pub(super) const MODEL: Architecture = Architecture { name: "ModernBertModel", read, names: NAMES };
pub(super) const MASKED: Architecture = Architecture { name: "ModernBertForMaskedLM", read, names: NAMES };

pub(super) const RERANKER: Architecture =
    Architecture { name: "ModernBertForSequenceClassification", read: read_reranker, names: NAMES };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    ModelConfig::read_modern_encoder(f, &encoder::MODERN, None)
}

fn read_reranker(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let head = HeadConfig {
        dense: "head.dense",
        dense_bias: f.flag("classifier_bias", false)?,
        activation: Activation::GeluErf,
        norm: Some("head.norm"),
        out: "classifier",
        of_mean: false,
    };
    ModelConfig::read_modern_encoder(f, &encoder::MODERN, Some(head))
}
