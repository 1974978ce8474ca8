//! DistilBERT, as an embedding model (also with the head that predicts masked tokens, which is ignored).
//!
//! Paper: Sanh et al. 2019, "DistilBERT, a distilled version of BERT: smaller, faster, cheaper and lighter" (arXiv:1910.01108). Follows transformers
//! `models/distilbert/modeling_distilbert.py`. BERT without token types, whose config and tensors have other names.

use super::{Architecture, encoder};
use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, activation, renamed};

/// Prefix of the names in models that are built around the encoder.
const NAMES: &[(&str, &str)] = &[("", "distilbert.")];

pub(super) const MODEL: Architecture = Architecture { name: "DistilBertModel", read, names: NAMES };
pub(super) const MASKED: Architecture = Architecture { name: "DistilBertForMaskedLM", read, names: NAMES };

fn read(f: &Fields<'_>) -> Result<ModelConfig, CheckpointError> {
    let own = renamed(
        f,
        &[
            ("hidden_size", "dim"),
            ("intermediate_size", "hidden_dim"),
            ("num_hidden_layers", "n_layers"),
            ("num_attention_heads", "n_heads"),
        ],
    );
    let config = ModelConfig::read_encoder(&f.or(&own), &encoder::DISTILBERT, 0, None)?;
    Ok(ModelConfig { hidden_act: activation(f, "activation")?, ..config })
}
