//! MPNet, as an embedding model (also with the head that predicts masked tokens, which is ignored) and as a cross-encoder with one label.
//!
//! Paper: Song et al. 2020, "MPNet: Masked and Permuted Pre-training for Language Understanding" (arXiv:2004.09297). Follows transformers
//! `models/mpnet/modeling_mpnet.py`. BERT without token types, with positions that are counted as RoBERTa's are, and with a bias of attention by
//! relative positions. A padding token that a client writes in the middle of a text has a position as any other; transformers gives it none.

use super::{Architecture, encoder};
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{HeadConfig, ModelConfig};

/// Prefix of the names in models that are built around the encoder.
const NAMES: &[(&str, &str)] = &[("", "mpnet.")];

/// Row of position 0: the one behind that of the padding token, which is 1 whatever the config says.
const FIRST_POSITION: usize = 2;

pub(super) const MODEL: Architecture = Architecture { name: "MPNetModel", read, names: NAMES };
pub(super) const MASKED: Architecture = Architecture { name: "MPNetForMaskedLM", read, names: NAMES };

pub(super) const RERANKER: Architecture =
    Architecture { name: "MPNetForSequenceClassification", read: read_reranker, names: NAMES };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    ModelConfig::read_encoder(f, &encoder::MPNET, FIRST_POSITION, None)
}

fn read_reranker(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let head = HeadConfig::tanh("classifier.dense", "classifier.out_proj");
    ModelConfig::read_encoder(f, &encoder::MPNET, FIRST_POSITION, Some(head))
}
