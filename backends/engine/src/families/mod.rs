//! Architectures by name: how each reads its config, and which tensors it needs.
//!
//! An architecture is one file, one line of `ARCHITECTURES` and a golden. The families here differ in values only, so decoders share one
//! network (`models/decoder.rs`) and one list of tensors, and encoders another (`models/encoder.rs`, `encoder.rs`).

mod bert;
mod deepseek;
mod distilbert;
pub(crate) mod encoder;
mod ernie4_5;
mod exaone4;
mod gemma;
mod gemma2;
mod gemma3;
mod glm;
mod gpt_oss;
mod granite;
mod granite4;
mod llama;
mod ministral;
mod mistral;
mod mixtral;
mod modernbert;
mod mpnet;
mod nomic_bert;
mod olmo2;
mod olmo3;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod roberta;
mod seed_oss;
mod smollm3;

use crate::model_config::error::CheckpointError;
use crate::model_config::fields::Fields;
use crate::model_config::{LatentConfig, LayerNames, ModelConfig, Needed, NormPlaces, Part, QkNorm};

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
    /// Returns true if the model around an encoder predicts masked tokens: a head that makes neither vectors nor scores.
    pub(crate) fn is_masked_lm(&self) -> bool {
        self.name.ends_with("ForMaskedLM")
    }

    /// Names under which a checkpoint may have the tensor `name`, the plain one first.
    pub(crate) fn stored_names(&self, name: &str) -> impl Iterator<Item = String> {
        let others =
            self.names.iter().filter_map(move |(ours, theirs)| Some(format!("{theirs}{}", name.strip_prefix(ours)?)));
        std::iter::once(name.to_owned()).chain(others.collect::<Vec<_>>()).chain(bare(name))
    }
}

const ARCHITECTURES: &[Architecture] = &[
    bert::MODEL,
    bert::RERANKER,
    bert::MASKED,
    deepseek::V2,
    deepseek::V3,
    distilbert::MODEL,
    distilbert::MASKED,
    ernie4_5::ARCHITECTURE,
    exaone4::ARCHITECTURE,
    gemma::ARCHITECTURE,
    gemma2::ARCHITECTURE,
    gemma3::ARCHITECTURE,
    gemma3::MODEL,
    gemma3::TEXT_PART,
    glm::GLM,
    glm::GLM4,
    gpt_oss::ARCHITECTURE,
    granite::ARCHITECTURE,
    granite4::ARCHITECTURE,
    llama::ARCHITECTURE,
    llama::MODEL,
    ministral::ARCHITECTURE,
    mistral::ARCHITECTURE,
    mistral::MODEL,
    mixtral::ARCHITECTURE,
    modernbert::MODEL,
    modernbert::RERANKER,
    modernbert::MASKED,
    mpnet::MODEL,
    mpnet::RERANKER,
    mpnet::MASKED,
    nomic_bert::MODEL,
    olmo2::ARCHITECTURE,
    olmo3::ARCHITECTURE,
    olmoe::ARCHITECTURE,
    phi3::ARCHITECTURE,
    qwen2::ARCHITECTURE,
    qwen2::MODEL,
    qwen2_moe::ARCHITECTURE,
    qwen3::ARCHITECTURE,
    qwen3::MODEL,
    qwen3_moe::ARCHITECTURE,
    roberta::MODEL,
    roberta::RERANKER,
    roberta::MASKED,
    roberta::XLM_MODEL,
    roberta::XLM_RERANKER,
    roberta::XLM_MASKED,
    roberta::CAMEMBERT_MODEL,
    roberta::CAMEMBERT_MASKED,
    seed_oss::ARCHITECTURE,
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
/// Correction of the scores of a layer's experts: a vector that is added for the choice alone.
pub(crate) const CORRECTION: &str = "mlp.gate.e_score_correction_bias";
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
    let (input, attention) = (Some("input_layernorm.weight"), Some("post_attention_layernorm.weight"));
    let (before_mlp, behind_mlp) =
        (Some("pre_feedforward_layernorm.weight"), Some("post_feedforward_layernorm.weight"));
    match places {
        NormPlaces::Before => NormNames { input, behind_attention: None, before_mlp: attention, behind_mlp: None },
        NormPlaces::After => NormNames { input: None, behind_attention: attention, before_mlp: None, behind_mlp },
        NormPlaces::Both => NormNames { input, behind_attention: attention, before_mlp, behind_mlp },
        NormPlaces::BothGlm => NormNames {
            input,
            behind_attention: Some("post_self_attn_layernorm.weight"),
            before_mlp: attention,
            behind_mlp: Some("post_mlp_layernorm.weight"),
        },
    }
}

/// Every tensor of the model, with its shape.
pub(crate) fn tensors(c: &ModelConfig) -> Vec<Needed> {
    if let Some(e) = &c.encoder {
        return encoder::tensors(c, e);
    }
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

/// Matrices of a layer, by name and rows of so many columns, that a checkpoint has in this order as one, before `.weight`, where `one` is named.
fn stacked(layer: usize, one: Option<&str>, parts: &[(&str, usize)], columns: usize, list: &mut Vec<Needed>) {
    let (mut first, all) = (0, parts.iter().map(|(_, rows)| rows).sum());
    for (name, rows) in parts {
        let tensor = one.map(|one| layer_tensor(layer, &format!("{one}.weight")));
        let part = tensor.map(|tensor| Part { tensor, first, rows: all });
        let (name, shape) = (layer_tensor(layer, name), vec![*rows, columns]);
        list.push(Needed { name, shape, part });
        first += rows;
    }
}

/// Names of the tensors of attention over latents in a layer, before `.weight` and `.bias`.
pub(crate) mod latent {
    pub(crate) const QUERIES: &str = "self_attn.q_proj";
    /// First of two projections of queries, with a norm behind it.
    pub(crate) const QUERIES_A: &str = "self_attn.q_a_proj";
    pub(crate) const QUERIES_NORM: &str = "self_attn.q_a_layernorm";
    pub(crate) const QUERIES_B: &str = "self_attn.q_b_proj";
    /// Projection to the latent and the rotated values of a token.
    pub(crate) const KEYS: &str = "self_attn.kv_a_proj_with_mqa";
    pub(crate) const KEYS_NORM: &str = "self_attn.kv_a_layernorm";
    /// Matrices of each head that make its keys and values of a latent.
    pub(crate) const HEADS: &str = "self_attn.kv_b_proj";
}

/// Returns true if `name` is that of a matrix that is never rounded at load: a router's or the gate's of a shared expert, that of the heads of latents, one behind the pooling, or one outside of
/// an encoder's layers.
pub(crate) fn is_kept(c: &ModelConfig, name: &str) -> bool {
    if c.dense_layers().any(|dense| dense.matrix() == name) {
        return true;
    }
    if let Some(encoder) = &c.encoder {
        return !encoder.names.is_in_layer(name);
    }
    let is_router = c.experts.as_ref().is_some_and(|experts| {
        name.ends_with(&experts.names.router()) || (experts.shared_gated && name.ends_with(SHARED_GATE))
    });
    is_router || is_of_heads(c, name)
}

/// Returns true if `name` is that of the matrix of the heads of latents, of which devices hold parts as plain numbers.
pub(crate) fn is_of_heads(c: &ModelConfig, name: &str) -> bool {
    c.latent.is_some() && name.ends_with(&format!("{}.weight", latent::HEADS))
}

fn latent_tensors(c: &ModelConfig, l: &LatentConfig, layer: usize, list: &mut Vec<Needed>) {
    let (heads, hidden) = (c.num_attention_heads, c.hidden_size);
    let mut need = |part: &str, kind: &str, shape: &[usize]| {
        list.push(whole(layer_tensor(layer, &format!("{part}.{kind}")), shape));
    };
    let queries = heads * l.query_dim();
    match l.q_lora_rank {
        None => need(latent::QUERIES, "weight", &[queries, hidden]),
        Some(rank) => {
            need(latent::QUERIES_A, "weight", &[rank, hidden]);
            if c.qkv_bias {
                need(latent::QUERIES_A, "bias", &[rank]);
            }
            need(latent::QUERIES_NORM, "weight", &[rank]);
            need(latent::QUERIES_B, "weight", &[queries, rank]);
        }
    }
    need(latent::KEYS, "weight", &[l.key_dim(), hidden]);
    if c.qkv_bias {
        need(latent::KEYS, "bias", &[l.key_dim()]);
    }
    need(latent::KEYS_NORM, "weight", &[l.kv_lora_rank]);
    need(latent::HEADS, "weight", &[heads * (l.qk_nope_head_dim + l.v_head_dim), l.kv_lora_rank]);
    need("self_attn.o_proj", "weight", &[hidden, heads * l.v_head_dim]);
    if c.output_bias {
        need("self_attn.o_proj", "bias", &[hidden]);
    }
}

fn attention_tensors(c: &ModelConfig, layer: usize, list: &mut Vec<Needed>) {
    if let Some(latent) = &c.latent {
        return latent_tensors(c, latent, layer, list);
    }
    let (queries, keys) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let parts = [("q", queries), ("k", keys), ("v", keys)];
    let names = parts.map(|(part, rows)| (format!("self_attn.{part}_proj.weight"), rows));
    let names = names.each_ref().map(|(name, rows)| (name.as_str(), *rows));
    stacked(layer, c.layer_names.qkv, &names, c.hidden_size, list);
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
        let (shared, mut need) = (experts.shared_size, |part: &str, shape: &[usize]| {
            list.push(whole(layer_tensor(layer, part), shape));
        });
        if experts.routing.correction {
            need(CORRECTION, &[experts.num_experts]);
        }
        let names = if experts.shared_gated { SHARED_GATED } else { SHARED };
        if shared > 0 {
            need(&names.weight("gate"), &[shared, hidden]);
            need(&names.weight("up"), &[shared, hidden]);
            need(&names.weight("down"), &[hidden, shared]);
        }
        if experts.shared_gated {
            need(SHARED_GATE, &[1, hidden]);
        }
        return;
    }
    let parts = [("mlp.gate_proj.weight", mlp), ("mlp.up_proj.weight", mlp)];
    stacked(layer, c.layer_names.gate_up, &parts, hidden, list);
    let down = Some(c.layer_names.down).filter(|down| *down != LayerNames::PLAIN.down);
    stacked(layer, down, &[("mlp.down_proj.weight", hidden)], mlp, list);
    let mut need = |part: &str, shape: &[usize]| list.push(whole(layer_tensor(layer, part), shape));
    if c.mlp_bias {
        for (part, rows) in [("gate", mlp), ("up", mlp), ("down", hidden)] {
            need(&format!("mlp.{part}_proj.bias"), &[rows]);
        }
    }
}

/// Block of a gated MLP in a layer, by which its tensors are named.
#[derive(Clone, Copy)]
pub(crate) struct MlpNames(&'static str);

/// The MLP of a layer.
pub(crate) const MLP: MlpNames = MlpNames("mlp");
/// The MLP that every token goes through, beside the experts that it chooses.
pub(crate) const SHARED: MlpNames = MlpNames("mlp.shared_experts");
/// The MLP that every token goes through, where a gate is on its output.
pub(crate) const SHARED_GATED: MlpNames = MlpNames("mlp.shared_expert");
/// Matrix of that gate, of one row.
pub(crate) const SHARED_GATE: &str = "mlp.shared_expert_gate.weight";

impl MlpNames {
    /// Name of the matrix `gate`, `up` or `down`.
    pub(crate) fn weight(self, part: &str) -> String {
        format!("{}.{part}_proj.weight", self.0)
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
