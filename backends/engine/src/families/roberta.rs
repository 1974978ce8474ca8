//! RoBERTa and XLM-RoBERTa, as embedding models (also with the head that predicts masked tokens, which is ignored) and as cross-encoders with
//! one label; CamemBERT, as embedding models.
//!
//! Papers: Liu et al. 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach" (arXiv:1907.11692); Conneau et al. 2019, "Unsupervised
//! Cross-lingual Representation Learning at Scale" (arXiv:1911.02116). Follows transformers `models/xlm_roberta/modeling_xlm_roberta.py`, of which
//! `models/camembert/modeling_camembert.py` (Martin et al. 2019, arXiv:1911.03894) differs in its names. BERT with
//! positions that are counted from the row behind that of padding, and another head. A padding token that a client writes in the middle of a text
//! has a position as any other; transformers gives it none.

use super::{Architecture, encoder};
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{HeadConfig, ModelConfig};

/// Prefix of the names in models that are built around the encoder.
const NAMES: &[(&str, &str)] = &[("", "roberta.")];

pub(super) const MODEL: Architecture = Architecture { name: "RobertaModel", read, names: NAMES };
pub(super) const XLM_MODEL: Architecture = Architecture { name: "XLMRobertaModel", read, names: NAMES };
pub(super) const CAMEMBERT_MODEL: Architecture = Architecture { name: "CamembertModel", read, names: NAMES };

pub(super) const MASKED: Architecture = Architecture { name: "RobertaForMaskedLM", read, names: NAMES };
pub(super) const XLM_MASKED: Architecture = Architecture { name: "XLMRobertaForMaskedLM", read, names: NAMES };
pub(super) const CAMEMBERT_MASKED: Architecture = Architecture { name: "CamembertForMaskedLM", read, names: NAMES };

pub(super) const RERANKER: Architecture =
    Architecture { name: "RobertaForSequenceClassification", read: read_reranker, names: NAMES };
pub(super) const XLM_RERANKER: Architecture =
    Architecture { name: "XLMRobertaForSequenceClassification", read: read_reranker, names: NAMES };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    ModelConfig::read_encoder(f, &encoder::BERT, first_position(f)?, None)
}

fn read_reranker(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let head = HeadConfig::tanh("classifier.dense", "classifier.out_proj");
    ModelConfig::read_encoder(f, &encoder::BERT, first_position(f)?, Some(head))
}

/// Row of position 0: the one behind that of the padding token.
fn first_position(f: &Fields<'_>) -> Result<usize, CheckpointError> {
    // A padding token is one of the first of a vocabulary; a large one would need as many rows of positions.
    Ok(f.integer("pad_token_id", 0, 1 << 16)?.unwrap_or(1) + 1)
}
