//! Encoders in GGUF files: the same bits as from safetensors, blocks near their weights in f32, and files that are refused.

use std::borrow::Cow;

use crate::common;

use crate::encoders::{Case, bits, distance, named, pooled, vectors, wide};
use common::gguf::{Noise, kind, refused};
use common::weights::{Tensor, tensor};
use common::{MakeDevice, cpu_paths, devices, load, reference};
use penstock_engine::Engine;
use penstock_engine::checkpoint::Checkpoint;
use penstock_gguf::{Value, Writer};
use penstock_kernels::DType;
use penstock_proto::frames::{Generate, Pooling};
use serde_json::Value as Json;

/// GGUF's name of a tensor.
fn name(theirs: &str) -> String {
    let pairs = [
        ("embeddings.word_embeddings", "token_embd"),
        ("embeddings.position_embeddings", "position_embd"),
        ("embeddings.token_type_embeddings", "token_types"),
        ("embeddings.LayerNorm", "token_embd_norm"),
        ("emb_ln", "token_embd_norm"),
        ("encoder.layer.", "blk."),
        ("encoder.layers.", "blk."),
        ("transformer.layer.", "blk."),
        ("attention.self.query", "attn_q"),
        ("attention.self.key", "attn_k"),
        ("attention.self.value", "attn_v"),
        ("attention.q_lin", "attn_q"),
        ("attention.k_lin", "attn_k"),
        ("attention.v_lin", "attn_v"),
        ("attn.Wqkv", "attn_qkv"),
        ("attention.output.LayerNorm", "attn_output_norm"),
        ("sa_layer_norm", "attn_output_norm"),
        ("norm1", "attn_output_norm"),
        ("attention.output.dense", "attn_output"),
        ("attention.out_lin", "attn_output"),
        ("attn.out_proj", "attn_output"),
        ("output.LayerNorm", "layer_output_norm"),
        ("output_layer_norm", "layer_output_norm"),
        ("norm2", "layer_output_norm"),
        ("intermediate.dense", "ffn_up"),
        ("ffn.lin1", "ffn_up"),
        ("mlp.fc11", "ffn_up"),
        ("mlp.fc12", "ffn_gate"),
        ("output.dense", "ffn_down"),
        ("ffn.lin2", "ffn_down"),
        ("mlp.fc2", "ffn_down"),
    ];
    pairs.iter().fold(theirs.to_owned(), |name, (from, to)| name.replace(from, to))
}

fn architecture(config: &Json) -> &'static str {
    if config["architectures"][0] == "NomicBertModel" { "nomic-bert" } else { "bert" }
}

/// Rows of the table of positions that are no position's.
fn offset(config: &Json) -> usize {
    let name = config["architectures"][0].as_str().expect("a name");
    let of_padding = config["pad_token_id"].as_u64().unwrap_or(1) as usize;
    if name.contains("Roberta") { of_padding + 1 } else { 0 }
}

/// Keys of a config, but for those of `but`.
fn keys(config: &Json, but: &[&str]) -> Writer {
    let architecture = architecture(config);
    let whole = |names: [&str; 2]| names.iter().find_map(|name| config[*name].as_i64()).expect("a size");
    let mut writer = Writer::default();
    writer.key("general.architecture", &Value::Text(architecture.into()));
    let positions = whole(["max_position_embeddings", ""]) - offset(config) as i64;
    let eps = config["layer_norm_eps"].as_f64().unwrap_or(1e-12);
    let mut all = vec![
        ("block_count", Value::Integer(whole(["num_hidden_layers", "n_layers"]).into())),
        ("context_length", Value::Integer(positions.into())),
        ("embedding_length", Value::Integer(whole(["hidden_size", "dim"]).into())),
        ("feed_forward_length", Value::Integer(whole(["intermediate_size", "hidden_dim"]).into())),
        ("attention.head_count", Value::Integer(whole(["num_attention_heads", "n_heads"]).into())),
        ("attention.layer_norm_epsilon", Value::Float(eps)),
        ("attention.causal", Value::Bool(false)),
    ];
    if let Some(theta) = config["rope_parameters"]["rope_theta"].as_f64() {
        all.push(("rope.freq_base", Value::Float(theta)));
    }
    for (key, value) in all.into_iter().filter(|(key, _)| !but.contains(key)) {
        writer.key(&format!("{architecture}.{key}"), &value);
    }
    writer
}

fn put(writer: &mut Writer, name: &str, shape: &[usize], kind: u32, bytes: &[u8]) {
    let shape: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
    writer.tensor(name, &shape, kind, bytes);
}

/// The case's model as a GGUF file with the same types: its keys but those of `but`, and further ones.
fn gguf_of(case: &Case, but: &[&str], more: &[(&str, Value)]) -> Vec<u8> {
    let mut writer = keys(&case.config, but);
    for (key, value) in more {
        writer.key(&format!("{}.{key}", architecture(&case.config)), value);
    }
    let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == case.dtype).expect("a type");
    let needed = case.tensors.iter().filter(|(name, _)| !name.contains("pooler"));
    for (theirs, shape) in needed {
        let Tensor { mut shape, mut bytes, .. } = tensor(case.seed, &case.dtype, theirs, shape);
        if theirs.contains("position_embeddings") {
            let first = offset(&case.config);
            bytes.drain(..first * shape[1] * dtype.block().1);
            shape[0] -= first;
        }
        // As files look behind ggml's own writer.
        if theirs.contains("token_type_embeddings") && shape[0] == 1 {
            shape.remove(0);
        }
        put(&mut writer, &name(theirs), &shape, kind(dtype), &bytes);
    }
    writer.finish()
}

fn open(bytes: Vec<u8>) -> Checkpoint {
    Checkpoint::from_gguf_bytes(Cow::Owned(bytes)).unwrap_or_else(|error| panic!("{error}"))
}

fn engine(checkpoint: &Checkpoint, make: &MakeDevice) -> Engine {
    Engine::new(Box::new(load(checkpoint, &**make, 64, 1024)), &wide())
}

#[test]
fn an_encoders_file_gives_the_same_bits_as_safetensors() {
    for (name, theirs) in [
        ("bert-cls", "BertModel"),
        ("bert-long", "BertModel"),
        ("distilbert-mean", "DistilBertModel"),
        ("roberta-mean", "BertModel"),
        ("xlmr-cls", "BertModel"),
        ("nomic-mean", "NomicBertModel"),
        ("nomic-long", "NomicBertModel"),
    ] {
        let case = named(name);
        let folder = Checkpoint::from_buffers(case.files()).expect("a checkpoint");
        let file = open(gguf_of(&case, &[], &[]));
        assert_eq!((file.architecture(), file.weight_format()), (theirs, folder.weight_format()), "{name}");
        assert!(file.ignored().is_empty() && file.config().is_whole(), "{name}");
        assert_eq!(file.config().max_position_embeddings, folder.config().max_position_embeddings, "{name}");
        for (path, make) in devices() {
            let run = |checkpoint| bits(&vectors(&mut engine(checkpoint, &make), case.requests()));
            let (ours, want) = (run(&file), run(&folder));
            assert!(ours == want && ours.iter().all(|vector| !vector.is_empty()), "{name}, {path}");
        }
    }
}

const VOCAB: usize = 320;

/// A model of two layers, 256 wide, whose matrices are random blocks.
fn random(architecture: &str, dtype: DType) -> Writer {
    let is_nomic = architecture == "nomic-bert";
    let config = serde_json::json!({
        "architectures": [if is_nomic { "NomicBertModel" } else { "BertModel" }], "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
    });
    let (mut writer, mut noise) = (keys(&config, &[]), Noise(7));
    let vector = |writer: &mut Writer, name: &str, n: usize, first: f32| {
        let bytes: Vec<u8> = (0..n).flat_map(|i| (first + (i % 7) as f32 / 50.0).to_le_bytes()).collect();
        put(writer, name, &[n], 0, &bytes);
    };
    let norm = |writer: &mut Writer, name: &str| {
        vector(writer, &format!("{name}.weight"), 256, 1.0);
        vector(writer, &format!("{name}.bias"), 256, -0.06);
    };
    let mut matrix = |writer: &mut Writer, name: &str, shape: [usize; 2], scale: f32| {
        let bytes = noise.blocks(dtype, shape.iter().product(), scale);
        put(writer, &format!("{name}.weight"), &shape, kind(dtype), &bytes);
    };
    matrix(&mut writer, "token_embd", [VOCAB, 256], 0.5);
    let tables: &[(&str, usize)] =
        if is_nomic { &[("token_types", 2)] } else { &[("token_types", 2), ("position_embd", 128)] };
    for (table, rows) in tables {
        let bytes: Vec<u8> = (0..rows * 256).flat_map(|i| ((i % 13) as f32 / 40.0 - 0.15).to_le_bytes()).collect();
        put(&mut writer, &format!("{table}.weight"), &[*rows, 256], 0, &bytes);
    }
    norm(&mut writer, "token_embd_norm");
    let (mut parts, biased) =
        (vec![("attn_output", 256, 256), ("ffn_up", 512, 256), ("ffn_down", 256, 512)], !is_nomic);
    match is_nomic {
        true => parts.extend([("attn_qkv", 768, 256), ("ffn_gate", 512, 256)]),
        false => parts.extend([("attn_q", 256, 256), ("attn_k", 256, 256), ("attn_v", 256, 256)]),
    }
    for layer in 0..2 {
        norm(&mut writer, &format!("blk.{layer}.attn_output_norm"));
        norm(&mut writer, &format!("blk.{layer}.layer_output_norm"));
        for (part, rows, columns) in &parts {
            let name = format!("blk.{layer}.{part}");
            matrix(&mut writer, &name, [*rows, *columns], 1.0 / (*columns as f32).sqrt());
            if biased {
                vector(&mut writer, &format!("{name}.bias"), *rows, -0.05);
            }
        }
    }
    writer
}

#[test]
fn every_format_of_an_encoder_is_near_its_weights_in_f32() {
    let tokens: Vec<u32> = (0..100u32).map(|i| i * 37 % VOCAB as u32).collect();
    let requests = || -> Vec<Generate> {
        let rules = [Pooling::First, Pooling::Mean];
        (1..9u64).map(|n| pooled(n, &tokens[..n as usize * 12], rules[n as usize % 2])).collect()
    };
    for architecture in ["bert", "nomic-bert"] {
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_blocks()) {
            let checkpoint = open(random(architecture, dtype).finish());
            let make: MakeDevice = Box::new(reference);
            let want = vectors(&mut engine(&checkpoint, &make), requests());
            for (path, make) in cpu_paths() {
                let got = vectors(&mut engine(&checkpoint, &make), requests());
                let cosine = distance(&got, &want).1;
                println!("{architecture}, {dtype:?}, {path}: 1 - cosine {:.1e}", 1.0 - cosine);
                // Activations of 8 bits; random weights with minima (Q2_K) are the furthest off, behind NomicBERT's gates.
                assert!(cosine > 0.99 && cosine < 1.0, "{architecture}, {dtype:?}, {path}: {cosine}");
            }
        }
    }
}

#[test]
fn an_encoders_file_says_how_its_vectors_are_made() {
    let case = named("bert-cls");
    for kind in [0, 1, 2, 3] {
        let file = open(gguf_of(&case, &[], &[("pooling_type", Value::Integer(kind))]));
        assert!(file.config().chain.is_empty() && file.config().is_whole(), "{kind}");
    }
    let reranker = gguf_of(&case, &[], &[("pooling_type", Value::Integer(4))]);
    refused(reranker, "bert.pooling_type: is 4: a reranker");
}

#[test]
fn keys_and_tensors_that_would_change_an_encoder_are_refused() {
    let (bert, nomic) = (named("bert-cls"), named("nomic-mean"));
    let with = |case: &Case, key: &str, value: Value| gguf_of(case, &[key], &[(key, value)]);
    for (case, key, value, what) in [
        (&bert, "attention.causal", Value::Bool(true), "bert.attention.causal: is true"),
        (&bert, "attention.max_alibi_bias", Value::Float(8.0), "bert.attention.max_alibi_bias: is not supported"),
        (&bert, "attention.head_count_kv", Value::Integer(2), "bert.attention.head_count_kv: is 2, only 6"),
        (&bert, "attention.key_length", Value::Integer(32), "bert.attention.key_length: is 32, only 16"),
        (&bert, "attention.head_count", Value::Integer(5), "num_attention_heads"),
        (&bert, "attention.sliding_window", Value::Integer(64), "bert.attention.sliding_window"),
        (&bert, "context_length", Value::Integer(161), "position_embd.weight"),
        (&nomic, "expert_count", Value::Integer(8), "nomic-bert.expert_count"),
        (&nomic, "moe_every_n_layers", Value::Integer(2), "nomic-bert.moe_every_n_layers"),
        (&nomic, "rope.scaling.type", Value::Text("yarn".into()), "nomic-bert.rope.scaling.type: \"yarn\""),
        (&nomic, "rope.dimension_count", Value::Integer(8), "nomic-bert.rope.dimension_count: is 8, only 16"),
    ] {
        refused(with(case, key, value), what);
    }
    for key in ["embedding_length", "context_length", "attention.layer_norm_epsilon"] {
        refused(gguf_of(&bert, &[key], &[]), &format!("bert.{key}: is missing"));
    }
    // Gates, norms of queries, a head, factors of rotations: other models, or other numbers.
    for tensor in ["blk.0.ffn_gate.weight", "blk.1.attn_q_norm.weight", "cls.weight", "rope_freqs.weight"] {
        let mut writer = random("bert", DType::Q8_0);
        put(&mut writer, tensor, &[8], 0, &[0; 32]);
        refused(writer.finish(), &format!("{tensor}: is none of BertModel"));
    }
    let mut typeless = keys(&nomic.config, &[]);
    put(&mut typeless, "token_embd.weight", &[4, 96], 0, &[0; 4 * 96 * 4]);
    refused(typeless.finish(), "token_types.weight: is missing");
    let mut other = Writer::default();
    refused(other.key("general.architecture", &Value::Text("jina-bert-v2".into())).finish(), "\"jina-bert-v2\"");
}

#[test]
fn damaged_files_of_encoders_never_panic() {
    for architecture in ["bert", "nomic-bert"] {
        let good = random(architecture, DType::Q8_0).finish();
        let last = good.windows(12).rposition(|window| window == b"ffn_up.weigh").expect("a tensor");
        let mut noise = Noise(9);
        for _ in 0..1500 {
            let mut bytes = good.clone();
            for _ in 0..1 + noise.next() % 3 {
                let at = noise.next() as usize % last;
                bytes[at] = if noise.next().is_multiple_of(2) {
                    noise.next() as u8
                } else {
                    bytes[at] ^ 1 << (noise.next() % 8)
                };
            }
            let _ = Checkpoint::from_gguf_bytes(Cow::Owned(bytes));
        }
    }
}
