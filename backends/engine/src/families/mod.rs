//! Architectures by name: how each reads its config, and which tensors it needs.
//!
//! An architecture is one file, one line of `ARCHITECTURES` and a golden. The families here differ in values only, so they share one
//! decoder (`models/decoder.rs`) and one list of tensors.

mod llama;
mod mistral;
mod mixtral;
mod qwen2;
mod qwen3;
mod qwen3_moe;

use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, Needed};

/// A supported architecture, by the name in `architectures[0]` of a config.
#[derive(Debug)]
pub(crate) struct Architecture {
    pub(crate) name: &'static str,
    /// Function that reads and checks the family's fields of `config.json`.
    pub(crate) read: fn(&Fields<'_>) -> Result<ModelConfig, CheckpointError>,
}

const ARCHITECTURES: &[Architecture] = &[
    llama::ARCHITECTURE,
    mistral::ARCHITECTURE,
    mixtral::ARCHITECTURE,
    qwen2::ARCHITECTURE,
    qwen3::ARCHITECTURE,
    qwen3_moe::ARCHITECTURE,
];

pub(crate) fn architecture(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|architecture| architecture.name == name)
}

/// Names of all supported architectures, as `architectures[0]` of a config gives them.
pub fn names() -> Vec<&'static str> {
    ARCHITECTURES.iter().map(|architecture| architecture.name).collect()
}

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const NORM: &str = "model.norm.weight";

/// Every tensor of the model, with its shape.
pub(crate) fn tensors(c: &ModelConfig) -> Vec<Needed> {
    let (hidden, mlp) = (c.hidden_size, c.intermediate_size);
    let (queries, keys) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let mut list = Vec::new();
    let mut need = |name: String, shape: &[usize]| list.push(Needed { name, shape: shape.to_vec() });
    need(EMBEDDING.into(), &[c.vocab_size, hidden]);
    for layer in 0..c.num_hidden_layers {
        let mut need = |part: &str, shape: &[usize]| need(layer_tensor(layer, part), shape);
        need("input_layernorm.weight", &[hidden]);
        for (part, rows, biased) in [("q", queries, c.qkv_bias), ("k", keys, c.qkv_bias), ("v", keys, c.qkv_bias)] {
            need(&format!("self_attn.{part}_proj.weight"), &[rows, hidden]);
            if biased {
                need(&format!("self_attn.{part}_proj.bias"), &[rows]);
            }
        }
        if c.qk_norm {
            need("self_attn.q_norm.weight", &[c.head_dim]);
            need("self_attn.k_norm.weight", &[c.head_dim]);
        }
        need("self_attn.o_proj.weight", &[hidden, queries]);
        if c.output_bias {
            need("self_attn.o_proj.bias", &[hidden]);
        }
        need("post_attention_layernorm.weight", &[hidden]);
        if let Some(experts) = c.experts.as_ref().filter(|experts| experts.layers[layer]) {
            let width = experts.moe_intermediate_size;
            need(&experts.names.router(), &[experts.num_experts, hidden]);
            for expert in 0..experts.num_experts {
                let [gate, up, down] = experts.names.expert(expert);
                need(&gate, &[width, hidden]);
                need(&up, &[width, hidden]);
                need(&down, &[hidden, width]);
            }
            continue;
        }
        for (part, rows, columns) in [("gate", mlp, hidden), ("up", mlp, hidden), ("down", hidden, mlp)] {
            need(&format!("mlp.{part}_proj.weight"), &[rows, columns]);
            if c.mlp_bias {
                need(&format!("mlp.{part}_proj.bias"), &[rows]);
            }
        }
    }
    need(NORM.into(), &[hidden]);
    if !c.tie_word_embeddings {
        need(HEAD.into(), &[c.vocab_size, hidden]);
    }
    list
}

/// Name of a layer's tensor.
pub(crate) fn layer_tensor(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}")
}
