//! Tensors of encoders by name and shape: those of transformers' BERT, which RoBERTa's share.

use super::whole;
use crate::model_config::{EncoderConfig, ModelConfig, Needed};

pub(crate) const WORDS: &str = "embeddings.word_embeddings.weight";
pub(crate) const POSITIONS: &str = "embeddings.position_embeddings.weight";
pub(crate) const TYPES: &str = "embeddings.token_type_embeddings.weight";
/// Norm of the embeddings' sum, before `.weight` and `.bias`, as the names below.
pub(crate) const NORM: &str = "embeddings.LayerNorm";
/// Projections to queries, keys and values.
pub(crate) const QKV: [&str; 3] = ["attention.self.query", "attention.self.key", "attention.self.value"];
pub(crate) const OUTPUT: &str = "attention.output.dense";
pub(crate) const ATTENTION_NORM: &str = "attention.output.LayerNorm";
pub(crate) const UP: &str = "intermediate.dense";
pub(crate) const DOWN: &str = "output.dense";
pub(crate) const MLP_NORM: &str = "output.LayerNorm";

/// Name of a part of a layer.
pub(crate) fn layer_part(layer: usize, part: &str) -> String {
    format!("encoder.layer.{layer}.{part}")
}

/// Every tensor of the encoder, with its shape.
pub(super) fn tensors(c: &ModelConfig, e: &EncoderConfig) -> Vec<Needed> {
    let (hidden, mlp) = (c.hidden_size, c.intermediate_size);
    let mut list = vec![
        whole(WORDS.into(), &[c.vocab_size, hidden]),
        whole(POSITIONS.into(), &[c.max_position_embeddings + e.first_position, hidden]),
        whole(TYPES.into(), &[e.type_vocab_size, hidden]),
    ];
    let mut need = |name: String, weight: &[usize]| {
        list.push(whole(format!("{name}.weight"), weight));
        list.push(whole(format!("{name}.bias"), &weight[..1]));
    };
    need(NORM.into(), &[hidden]);
    for layer in 0..c.num_hidden_layers {
        let mut need = |part: &str, weight: &[usize]| need(layer_part(layer, part), weight);
        QKV.iter().chain([&OUTPUT]).for_each(|part| need(part, &[hidden, hidden]));
        need(ATTENTION_NORM, &[hidden]);
        need(UP, &[mlp, hidden]);
        need(DOWN, &[hidden, mlp]);
        need(MLP_NORM, &[hidden]);
    }
    if let Some(head) = e.head {
        need(head.dense.into(), &[hidden, hidden]);
        need(head.out.into(), &[1, hidden]);
    }
    list
}

/// Returns true if `name` is that of a table that is added to embeddings.
pub(crate) fn is_table(name: &str) -> bool {
    [POSITIONS, TYPES].contains(&name)
}

/// Returns true if `name` is that of a matrix in a layer, which products of every row read.
pub(crate) fn is_in_layer(name: &str) -> bool {
    name.starts_with("encoder.layer.")
}
