//! Architectures by name: how each reads its config, and which tensors it needs.
//!
//! An architecture is one file, one line of `ARCHITECTURES` and a golden. The families here differ in values only, so they share one
//! decoder (`models/decoder.rs`) and one list of tensors.

mod gemma2;
mod gemma3;
mod gpt_oss;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod smollm3;

use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{ModelConfig, Needed, NormPlaces, Part, QkNorm};

/// A supported architecture, by the name in `architectures[0]` of a config.
#[derive(Debug)]
pub(crate) struct Architecture {
    pub(crate) name: &'static str,
    /// Function that reads and checks the family's fields of `config.json`.
    pub(crate) read: fn(&Fields<'_>) -> Result<ModelConfig, CheckpointError>,
    /// Prefixes of tensor names, as (plain, stored), where the model is a part of a larger one: `language_model.model.` for `model.`.
    pub(crate) names: &'static [(&'static str, &'static str)],
}

impl Architecture {
    /// Names under which a checkpoint may have the tensor `name`, the plain one first.
    pub(crate) fn stored_names(&self, name: &str) -> impl Iterator<Item = String> {
        let others =
            self.names.iter().filter_map(move |(ours, theirs)| Some(format!("{theirs}{}", name.strip_prefix(ours)?)));
        std::iter::once(name.to_owned()).chain(others.collect::<Vec<_>>()).chain(bare(name))
    }
}

const ARCHITECTURES: &[Architecture] = &[
    gemma2::ARCHITECTURE,
    gemma3::ARCHITECTURE,
    gemma3::TEXT_PART,
    gpt_oss::ARCHITECTURE,
    llama::ARCHITECTURE,
    mistral::ARCHITECTURE,
    mixtral::ARCHITECTURE,
    olmo2::ARCHITECTURE,
    phi3::ARCHITECTURE,
    qwen2::ARCHITECTURE,
    qwen3::ARCHITECTURE,
    qwen3_moe::ARCHITECTURE,
    smollm3::ARCHITECTURE,
];

pub(crate) fn architecture(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|architecture| architecture.name == name)
}

/// Names of all supported architectures, as `architectures[0]` of a config gives them.
pub fn names() -> Vec<&'static str> {
    ARCHITECTURES.iter().map(|architecture| architecture.name).collect()
}

/// Name of a tensor in a checkpoint that was saved from the decoder alone, without the model around it that has the head: embedding models are.
fn bare(name: &str) -> Option<String> {
    name.strip_prefix("model.").map(str::to_owned)
}

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const NORM: &str = "model.norm.weight";
/// Sinks of a layer's heads.
pub(crate) const SINKS: &str = "self_attn.sinks";

/// Norms of a layer by their places: before and behind attention, before and behind the MLP. In families without norms behind, the one before the MLP
/// has the name that others have for the one behind attention.
pub(crate) struct NormNames {
    pub(crate) input: Option<&'static str>,
    pub(crate) behind_attention: Option<&'static str>,
    pub(crate) before_mlp: Option<&'static str>,
    pub(crate) behind_mlp: Option<&'static str>,
}

/// Names of a layer's norms.
pub(crate) fn norm_names(places: NormPlaces) -> NormNames {
    let (before, after) = (places.before(), places.after());
    let mlp = if after { "pre_feedforward_layernorm.weight" } else { "post_attention_layernorm.weight" };
    NormNames {
        input: before.then_some("input_layernorm.weight"),
        behind_attention: after.then_some("post_attention_layernorm.weight"),
        before_mlp: before.then_some(mlp),
        behind_mlp: after.then_some("post_feedforward_layernorm.weight"),
    }
}

/// Every tensor of the model, with its shape.
pub(crate) fn tensors(c: &ModelConfig) -> Vec<Needed> {
    let hidden = c.hidden_size;
    let mut list = vec![whole(EMBEDDING.into(), &[c.vocab_size, hidden])];
    for layer in 0..c.num_hidden_layers {
        let NormNames { input, behind_attention, before_mlp, behind_mlp } = norm_names(c.norms);
        let norms = [input, behind_attention, before_mlp, behind_mlp].into_iter().flatten();
        list.extend(norms.map(|norm| whole(layer_tensor(layer, norm), &[hidden])));
        attention_tensors(c, layer, &mut list);
        mlp_tensors(c, layer, &mut list);
    }
    list.push(whole(NORM.into(), &[hidden]));
    if !c.tie_word_embeddings && !c.headless {
        list.push(whole(HEAD.into(), &[c.vocab_size, hidden]));
    }
    list
}

fn whole(name: String, shape: &[usize]) -> Needed {
    Needed { name, shape: shape.to_vec(), part: None }
}

/// Matrices of a layer, by name and rows, that checkpoints of a fused family stack in this order as one.
fn stacked(c: &ModelConfig, layer: usize, fused: &str, parts: &[(&str, usize)], list: &mut Vec<Needed>) {
    let (mut first, all) = (0, parts.iter().map(|(_, rows)| rows).sum());
    for (name, rows) in parts {
        let part = c.fused.then(|| Part { tensor: layer_tensor(layer, fused), first, rows: all });
        let (name, shape) = (layer_tensor(layer, name), vec![*rows, c.hidden_size]);
        list.push(Needed { name, shape, part });
        first += rows;
    }
}

fn attention_tensors(c: &ModelConfig, layer: usize, list: &mut Vec<Needed>) {
    let (queries, keys) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let parts = [("q", queries), ("k", keys), ("v", keys)];
    let names = parts.map(|(part, rows)| (format!("self_attn.{part}_proj.weight"), rows));
    let names = names.each_ref().map(|(name, rows)| (name.as_str(), *rows));
    stacked(c, layer, "self_attn.qkv_proj.weight", &names, list);
    let mut need = |part: &str, shape: &[usize]| list.push(whole(layer_tensor(layer, part), shape));
    if c.qkv_bias {
        parts.iter().for_each(|(part, rows)| need(&format!("self_attn.{part}_proj.bias"), &[*rows]));
    }
    let normed = match c.qk_norm {
        QkNorm::None => None,
        QkNorm::Each => Some([c.head_dim; 2]),
        QkNorm::Together => Some([queries, keys]),
    };
    if let Some([of_queries, of_keys]) = normed {
        need("self_attn.q_norm.weight", &[of_queries]);
        need("self_attn.k_norm.weight", &[of_keys]);
    }
    if c.sinks {
        need(SINKS, &[c.num_attention_heads]);
    }
    need("self_attn.o_proj.weight", &[c.hidden_size, queries]);
    if c.output_bias {
        need("self_attn.o_proj.bias", &[c.hidden_size]);
    }
}

fn mlp_tensors(c: &ModelConfig, layer: usize, list: &mut Vec<Needed>) {
    let (hidden, mlp) = (c.hidden_size, c.intermediate_size);
    if let Some(experts) = c.experts.as_ref().filter(|experts| experts.layers[layer]) {
        let mut need = |part: &str, shape: &[usize]| list.push(whole(layer_tensor(layer, part), shape));
        let width = experts.moe_intermediate_size;
        let mut need = |weight: &str, shape: [usize; 2]| {
            need(weight, &shape);
            if experts.bias {
                need(&bias_of(weight), &shape[..1]);
            }
        };
        need(&experts.names.router(), [experts.num_experts, hidden]);
        for expert in 0..experts.num_experts {
            let [gate, up, down] = experts.names.expert(expert);
            need(&gate, [width, hidden]);
            need(&up, [width, hidden]);
            need(&down, [hidden, width]);
        }
        return;
    }
    let parts = [("mlp.gate_proj.weight", mlp), ("mlp.up_proj.weight", mlp)];
    stacked(c, layer, "mlp.gate_up_proj.weight", &parts, list);
    let mut need = |part: &str, shape: &[usize]| list.push(whole(layer_tensor(layer, part), shape));
    need("mlp.down_proj.weight", &[hidden, mlp]);
    if c.mlp_bias {
        for (part, rows) in [("gate", mlp), ("up", mlp), ("down", hidden)] {
            need(&format!("mlp.{part}_proj.bias"), &[rows]);
        }
    }
}

/// Name of the bias of a matrix.
pub(crate) fn bias_of(weight: &str) -> String {
    weight.replace(".weight", ".bias")
}

/// Name of a layer's tensor.
pub(crate) fn layer_tensor(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}")
}
