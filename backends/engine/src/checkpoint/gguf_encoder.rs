//! Encoders in GGUF files: `bert` (BERT, DistilBERT, RoBERTa, XLM-RoBERTa) and `nomic-bert`.
//!
//! The rows of RoBERTa's positions that are no position's are not in the file. What the files cannot say is as in the original models: GELU by the error
//! function in `bert`. A tensor that the architecture does not have is refused, since it would change the computation.

use penstock_gguf::Gguf;
use serde_json::{Map, Value, json};

use super::gguf::{Config, ORIGINAL, shortest};
use crate::families;
use crate::model_config::error::{CheckpointError, Shown};
use crate::model_config::fields::Fields;
use crate::model_config::{EncoderNames, LAYERS_MAX};

/// GGUF's table of token types, which DistilBERT does not have.
const TYPES: &str = "token_types.weight";
/// GGUF's names of the projections to queries, keys and values.
const QKV: [&str; 3] = ["attn_q", "attn_k", "attn_v"];

/// Reads the config of the encoder with the architecture `name`, one of [`super::gguf::ENCODERS`].
pub(super) fn read_config(gguf: &Gguf, name: &str) -> Result<Config, CheckpointError> {
    let theirs = match name {
        "nomic-bert" => "NomicBertModel",
        _ if gguf.tensors.contains_key(TYPES) => "BertModel",
        _ => "DistilBertModel",
    };
    let architecture = families::architecture(theirs).expect("a registered architecture");
    refuse_unsupported(gguf, name)?;
    let map = config_of(gguf, name)?;
    let config = (architecture.read)(&Fields::new(&gguf.shown, &map))?;
    let raw = serde_json::to_vec(&map).expect("a JSON value of texts and numbers");
    Ok((architecture, config, raw))
}

/// The metadata under the names of `config.json`.
fn config_of(gguf: &Gguf, name: &str) -> Result<Map<String, Value>, CheckpointError> {
    let key = |part: &str| format!("{name}.{part}");
    let mut map = Map::new();
    const MOST: u64 = u32::MAX as u64;
    for (part, field, most) in [
        ("embedding_length", "hidden_size", MOST),
        ("feed_forward_length", "intermediate_size", MOST),
        ("block_count", "num_hidden_layers", LAYERS_MAX as u64),
        ("attention.head_count", "num_attention_heads", MOST),
        ("context_length", "max_position_embeddings", MOST),
    ] {
        let found = gguf.integer(&key(part), 1, most)?;
        let number = found.ok_or_else(|| gguf.refuse(&key(part), "is missing"))?;
        map.insert(field.into(), number.into());
    }
    for (tensor, field, is_needed) in
        [("token_embd.weight", "vocab_size", true), (TYPES, "type_vocab_size", name == "nomic-bert")]
    {
        match gguf.tensors.get(tensor).map(|tensor| tensor.shape.as_slice()) {
            Some(&[rows, _]) => drop(map.insert(field.into(), rows.into())),
            // ggml's writer leaves out outer dimensions of 1, as of a table of one type of tokens.
            Some(&[_]) if tensor == TYPES => drop(map.insert(field.into(), 1.into())),
            None if !is_needed => {}
            _ => return Err(CheckpointError::tensor(&gguf.shown, tensor, "is missing, or is no matrix")),
        }
    }
    const EPS: &str = "attention.layer_norm_epsilon";
    let eps = gguf.number(&key(EPS))?.ok_or_else(|| gguf.refuse(&key(EPS), "is missing"))?;
    map.insert("layer_norm_eps".into(), shortest(eps));
    if name == "nomic-bert" {
        // As in llama.cpp, where a file does not have the key; converters write it.
        let theta = gguf.number(&key("rope.freq_base"))?.unwrap_or(10_000.0);
        map.insert("rope_parameters".into(), json!({ "rope_type": "default", "rope_theta": shortest(theta) }));
    }
    Ok(map)
}

/// Refuses keys that change the computation.
fn refuse_unsupported(gguf: &Gguf, name: &str) -> Result<(), CheckpointError> {
    let refused = |part: &str, reason: &str| {
        let error = gguf.refuse(&format!("{name}.{part}"), reason).help(ORIGINAL);
        Err(CheckpointError::from(error))
    };
    let key = |part: &str| format!("{name}.{part}");
    if gguf.flag(&key("attention.causal"))? == Some(true) {
        return refused("attention.causal", "is true: the tokens of an encoder see later ones");
    }
    for (part, reason) in [
        ("expert_count", "this architecture has no mixture of experts here"),
        ("moe_every_n_layers", "this architecture has no mixture of experts here"),
        ("attention.sliding_window", "this architecture has no windows here"),
    ] {
        if gguf.integer(&key(part), 0, u64::MAX)?.unwrap_or(0) > 0 {
            return refused(part, reason);
        }
    }
    for part in ["attention.max_alibi_bias", "attention.scale", "attention.clamp_kqv"] {
        if gguf.number(&key(part))?.unwrap_or(0.0) != 0.0 {
            return refused(part, "is not supported in this architecture");
        }
    }
    if let Some(other) = gguf.text(&key("rope.scaling.type"))?.filter(|kind| *kind != "none") {
        return refused("rope.scaling.type", &format!("\"{}\" is not supported in this architecture", Shown(other)));
    }
    let of = |part: &str| gguf.integer(&key(part), 1, u64::from(u32::MAX));
    let heads = of("attention.head_count")?.unwrap_or(1);
    let head_dim = of("embedding_length")?.unwrap_or(0) / heads;
    for (part, only) in [
        ("attention.head_count_kv", heads),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
    ] {
        if let Some(other) = of(part)?.filter(|other| *other != only) {
            return refused(part, &format!("is {other}, only {only} is supported in this file"));
        }
    }
    Ok(())
}

/// Name in the file of an encoder's tensor with one of Hugging Face's names.
pub(super) fn stored_name(name: &str, names: &EncoderNames) -> Option<String> {
    let tables =
        [(Some(names.words), "token_embd.weight"), (names.positions, "position_embd.weight"), (names.types, TYPES)];
    if let Some((_, stored)) = tables.iter().find(|(ours, _)| *ours == Some(name)) {
        return Some((*stored).to_owned());
    }
    let (stem, kind) = name.rsplit_once('.')?;
    if stem == names.norm {
        return Some(format!("token_embd_norm.{kind}"));
    }
    let (layer, part) = stem.strip_prefix(names.layers)?.strip_prefix('.')?.split_once('.')?;
    let qkv: &[&str] = if names.qkv.len() == 1 { &["attn_qkv"] } else { &QKV };
    let listed = [
        (names.attention_norm, "attn_output_norm"),
        (names.output, "attn_output"),
        (names.mlp_norm, "layer_output_norm"),
        (names.up, "ffn_up"),
        (names.down, "ffn_down"),
    ];
    let gate = names.gate.map(|gate| (gate, "ffn_gate"));
    let mut pairs = names.qkv.iter().copied().zip(qkv.iter().copied()).chain(listed).chain(gate);
    let (_, stored) = pairs.find(|(ours, _)| *ours == part)?;
    Some(format!("blk.{layer}.{stored}.{kind}"))
}
