//! BERT, as an embedding model (also with the head that predicts masked tokens, which is ignored) and as a cross-encoder with one label.
//!
//! Paper: Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (arXiv:1810.04805). Follows
//! transformers `models/bert/modeling_bert.py`. Positions and token types are tables that are added to the embeddings; layers have norms behind
//! their blocks, and attention sees the whole text.

use super::{Architecture, encoder};
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{HeadConfig, ModelConfig};

/// Prefix of the names in models that are built around the encoder.
const NAMES: &[(&str, &str)] = &[("", "bert.")];

pub(super) const MODEL: Architecture = Architecture { name: "BertModel", read, names: NAMES };

pub(super) const MASKED: Architecture = Architecture { name: "BertForMaskedLM", read, names: NAMES };

pub(super) const RERANKER: Architecture =
    Architecture { name: "BertForSequenceClassification", read: read_reranker, names: NAMES };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    ModelConfig::read_encoder(f, &encoder::BERT, 0, None)
}

fn read_reranker(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let head = HeadConfig::tanh("pooler.dense", "classifier");
    ModelConfig::read_encoder(f, &encoder::BERT, 0, Some(head))
}
