//! Models in GGUF files: the same bits as from safetensors, every block format on every path, and files that are refused.

use std::borrow::Cow;

use crate::common;

use common::weights::{Golden, Tensor};
use common::{cpu_paths, load, log_softmax, logits_of, logits_with, reference};
use penstock_engine::Forward;
use penstock_engine::checkpoint::{Checkpoint, RopeScaling, Rotation};
use penstock_gguf::{Value, Writer};
use penstock_kernels::{AdapterSlot, DType};
use serde_json::Value as Json;

/// Number of a type in `ggml_type`.
pub(crate) fn kind(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Bf16 => 30,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q5_0 => 6,
        DType::Q5_1 => 7,
        DType::Q8_0 => 8,
        DType::Q2K => 10,
        DType::Q3K => 11,
        DType::Q4K => 12,
        DType::Q5K => 13,
        DType::Q6K => 14,
        DType::Iq4Nl => 20,
        DType::Iq4Xs => 23,
        DType::Mxfp4 => 39,
    }
}

/// Returns true if a family has norms behind attention and MLP.
fn has_post_norms(architecture: &str) -> bool {
    ["Gemma", "Olmo"].iter().any(|name| architecture.starts_with(name))
}

/// GGUF's name of a tensor.
fn name(theirs: &str, architecture: &str) -> String {
    let has_this_name = has_post_norms(architecture) || architecture.starts_with("GptOss");
    let behind = if has_this_name { "post_attention_norm" } else { "ffn_norm" };
    let pairs = [
        ("model.layers.", "blk."),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", behind),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("self_attn.sinks", "attn_sinks.weight"),
        ("mlp.gate.", "ffn_gate_inp."),
        ("mlp.router.", "ffn_gate_inp."),
        ("block_sparse_moe.gate.", "ffn_gate_inp."),
    ];
    pairs.iter().fold(theirs.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// Keys of a config.
fn keys(config: &Json, writer: &mut Writer) {
    let architecture = match config["architectures"][0].as_str().expect("a name") {
        "Qwen2ForCausalLM" => "qwen2",
        "Qwen3ForCausalLM" => "qwen3",
        "Qwen3MoeForCausalLM" => "qwen3moe",
        "Gemma2ForCausalLM" => "gemma2",
        "Gemma3ForCausalLM" => "gemma3",
        "GptOssForCausalLM" => "gpt-oss",
        "GraniteForCausalLM" => "granite",
        "Olmo2ForCausalLM" | "Olmo3ForCausalLM" => "olmo2",
        "Phi3ForCausalLM" => "phi3",
        "SmolLM3ForCausalLM" => "smollm3",
        _ => "llama",
    };
    let whole = |name: &str| config[name].as_i64().map(i128::from);
    writer.key("general.architecture", &Value::Text(architecture.into()));
    let heads = whole("num_attention_heads").expect("heads");
    let head_dim = whole("head_dim").unwrap_or_else(|| whole("hidden_size").expect("a width") / heads);
    for (key, value) in [
        ("block_count", whole("num_hidden_layers")),
        ("context_length", whole("max_position_embeddings")),
        ("embedding_length", whole("hidden_size")),
        ("feed_forward_length", whole("intermediate_size")),
        ("expert_count", whole("num_experts").or(whole("num_local_experts"))),
        ("expert_used_count", whole("num_experts_per_tok")),
        ("expert_feed_forward_length", whole("moe_intermediate_size")),
        ("attention.head_count", Some(heads)),
        ("attention.head_count_kv", whole("num_key_value_heads")),
        ("attention.key_length", Some(head_dim)),
        ("attention.value_length", Some(head_dim)),
        (
            "rope.dimension_count",
            Some((head_dim as f64 * config["partial_rotary_factor"].as_f64().unwrap_or(1.0)) as i128),
        ),
        ("attention.sliding_window", whole("sliding_window").filter(|_| !architecture.starts_with("qwen"))),
        ("attention.sliding_window_pattern", whole("sliding_window_pattern")),
        (
            "rope.scaling.original_context_length",
            whole("original_max_position_embeddings")
                .or(config["rope_scaling"]["original_max_position_embeddings"].as_i64().map(i128::from)),
        ),
    ] {
        if let Some(value) = value {
            writer.key(&format!("{architecture}.{key}"), &Value::Integer(value));
        }
    }
    // Of the other architectures the files say it in another way.
    if let Some(types) = config["layer_types"].as_array().filter(|_| architecture == "olmo2") {
        let slides = types.iter().map(|kind| i64::from(kind == "sliding_attention"));
        writer.key("olmo2.attention.sliding_window_pattern", &Value::Integers(slides.collect()));
    }
    let eps = config["rms_norm_eps"].as_f64().unwrap_or(1e-6);
    writer.key(&format!("{architecture}.attention.layer_norm_rms_epsilon"), &Value::Float(eps));
    let default = if config["architectures"][0] == "MixtralForCausalLM" { 1e6 } else { 10_000.0 };
    let theta = config["rope_theta"].as_f64().or_else(|| config["rope_parameters"]["rope_theta"].as_f64());
    writer.key(&format!("{architecture}.rope.freq_base"), &Value::Float(theta.unwrap_or(default)));
    for (key, field) in [
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("rope.freq_base_swa", "rope_local_base_freq"),
        ("embedding_scale", "embedding_multiplier"),
        ("attention.scale", "attention_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ] {
        if let Some(number) = config[field].as_f64() {
            writer.key(&format!("{architecture}.{key}"), &Value::Float(number));
        }
    }
    let is_scaled = |kind: &&str| ["type", "rope_type"].iter().any(|name| config["rope_scaling"][name] == *kind);
    if let Some(kind) = ["linear", "yarn"].into_iter().find(is_scaled) {
        writer.key(&format!("{architecture}.rope.scaling.type"), &Value::Text(kind.into()));
        let factor = config["rope_scaling"]["factor"].as_f64().expect("a factor");
        writer.key(&format!("{architecture}.rope.scaling.factor"), &Value::Float(factor));
    }
}

/// Rows of a tensor with the halves of each head side by side, as converters write them for `llama`.
fn in_pairs(tensor: &Tensor, head_dim: usize) -> Vec<u8> {
    let rows = tensor.shape[0];
    let size = tensor.bytes.len() / rows;
    let row = |stored: usize| stored / head_dim * head_dim + stored % 2 * (head_dim / 2) + stored % head_dim / 2;
    (0..rows).flat_map(|stored| tensor.bytes[row(stored) * size..][..size].to_vec()).collect()
}

/// The golden's model as a GGUF file, with the same types.
fn gguf_of(golden: &Golden) -> Vec<u8> {
    gguf_with(golden, &[])
}

/// The golden's model as a GGUF file with further keys.
fn gguf_with(golden: &Golden, more: &[(&str, Value)]) -> Vec<u8> {
    let mut writer = Writer::default();
    keys(&golden.config, &mut writer);
    for (key, value) in more {
        writer.key(key, value);
    }
    let whole = |name: &str| golden.config[name].as_u64().map(|n| n as usize);
    let dim = whole("head_dim");
    let dim = dim.unwrap_or_else(|| whole("hidden_size").unwrap() / whole("num_attention_heads").unwrap());
    let architecture = golden.config["architectures"][0].as_str().expect("a name");
    let paired =
        ["Granite", "Llama", "Mistral", "Mixtral", "SmolLM3"].iter().any(|name| architecture.starts_with(name));
    let (experts, plain): (Vec<_>, _) = golden.stored().into_iter().partition(|t| t.name.contains(".experts."));
    if architecture.starts_with("GptOss") {
        restack(&mut writer, &experts);
    } else {
        stack(&mut writer, experts);
    }
    for tensor in plain {
        let rotated = tensor.name.contains("q_proj") || tensor.name.contains("k_proj");
        let bytes = if paired && rotated { in_pairs(&tensor, dim) } else { tensor.bytes.clone() };
        let dtype = DType::ALL.into_iter().find(|d| d.name() == tensor.dtype.to_lowercase()).expect("a type");
        let shape: Vec<u64> = tensor.shape.iter().map(|&d| d as u64).collect();
        let name = name(&tensor.name, architecture);
        if architecture.starts_with("Gemma") && name.ends_with("norm.weight") {
            writer.tensor(&name, &shape, kind(DType::F32), &plus_one(dtype, &bytes));
            continue;
        }
        writer.tensor(&name, &shape, kind(dtype), &bytes);
    }
    for (list, name) in [("short_factor", "rope_factors_short.weight"), ("long_factor", "rope_factors_long.weight")] {
        if let Some(list) = golden.config["rope_scaling"][list].as_array() {
            let number = |value: &Json| (value.as_f64().expect("a number") as f32).to_le_bytes();
            let bytes: Vec<u8> = list.iter().flat_map(number).collect();
            writer.tensor(name, &[list.len() as u64], kind(DType::F32), &bytes);
        }
    }
    if golden.config["rope_scaling"]["rope_type"] == "llama3" {
        let factors = llama3_factors(&golden.config, dim);
        let bytes: Vec<u8> = factors.iter().flat_map(|f| f.to_le_bytes()).collect();
        writer.tensor("rope_freqs.weight", &[factors.len() as u64], kind(DType::F32), &bytes);
    }
    writer.finish()
}

/// Weights of Gemma's norms as converters write them: in f32, with the 1 that transformers adds.
fn plus_one(dtype: DType, bytes: &[u8]) -> Vec<u8> {
    let (halves, singles) = (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0);
    let values: Vec<f32> = match dtype {
        DType::Bf16 => halves.iter().map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32()).collect(),
        DType::F16 => halves.iter().map(|bytes| half::f16::from_le_bytes(*bytes).to_f32()).collect(),
        _ => singles.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
    };
    values.into_iter().flat_map(|value| (value + 1.0).to_le_bytes()).collect()
}

/// Writes the matrices of experts as converters do, one tensor per layer for all gates, ups and downs.
fn stack(writer: &mut Writer, experts: Vec<Tensor>) {
    let mut all: std::collections::BTreeMap<String, Vec<Tensor>> = std::collections::BTreeMap::new();
    for tensor in experts {
        let words: Vec<&str> = tensor.name.split('.').collect();
        let part = match words[6] {
            "gate_proj" | "w1" => "gate",
            "up_proj" | "w3" => "up",
            _ => "down",
        };
        let parts = all.entry(format!("blk.{}.ffn_{part}_exps.weight", words[2])).or_default();
        assert_eq!(words[5], parts.len().to_string(), "experts in order");
        parts.push(tensor);
    }
    for (name, parts) in all {
        let dtype = DType::ALL.into_iter().find(|d| d.name() == parts[0].dtype.to_lowercase()).expect("a type");
        let shape: Vec<u64> = std::iter::once(&parts.len()).chain(&parts[0].shape).map(|&d| d as u64).collect();
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.bytes.clone()).collect();
        writer.tensor(&name, &shape, kind(dtype), &bytes);
    }
}

/// Writes GPT-OSS's experts as converters do: gates and ups apart, matrices upright, and MXFP4 in blocks with their scale.
fn restack(writer: &mut Writer, experts: &[Tensor]) {
    let codes = |byte: &u8| [byte & 15, byte >> 4];
    for tensor in experts.iter().filter(|tensor| !tensor.name.ends_with("_scales")) {
        let words: Vec<&str> = tensor.name.split('.').collect();
        let kind_of_part = if tensor.name.ends_with("_bias") { "bias" } else { "weight" };
        let count = tensor.shape[0];
        let dtype = match tensor.dtype {
            "U8" => DType::Mxfp4,
            name => DType::ALL.into_iter().find(|d| d.name() == name.to_lowercase()).expect("a type"),
        };
        // Rows of outputs of each expert, `[experts][outputs]`, and the shape of one row.
        let (rows, columns): (Vec<Vec<Vec<u8>>>, Option<usize>) = match (dtype, kind_of_part) {
            (DType::Mxfp4, _) => {
                let (outputs, blocks) = (tensor.shape[1], tensor.shape[2]);
                let scales = tensor.name.replace("_blocks", "_scales");
                let scales = experts.iter().find(|tensor| tensor.name == scales).expect("scales");
                let block = |at: usize| {
                    let codes: Vec<u8> = tensor.bytes[at * 16..][..16].iter().flat_map(codes).collect();
                    let halves = (0..16).map(|i| codes[i] | codes[i + 16] << 4);
                    [scales.bytes[at]].into_iter().chain(halves).collect::<Vec<u8>>()
                };
                let row = |at: usize| (0..blocks).flat_map(|i| block(at * blocks + i)).collect();
                let of = |expert: usize| (0..outputs).map(|output| row(expert * outputs + output)).collect();
                ((0..count).map(of).collect(), Some(blocks * 32))
            }
            (_, "bias") => {
                let size = dtype.block().1;
                let of = |bytes: &[u8]| bytes.chunks_exact(size).map(<[u8]>::to_vec).collect();
                (tensor.bytes.chunks_exact(tensor.shape[1] * size).map(of).collect(), None)
            }
            _ => {
                let (size, inputs, outputs) = (dtype.block().1, tensor.shape[1], tensor.shape[2]);
                let value = |expert, input, output| {
                    &tensor.bytes[((expert * inputs + input) * outputs + output) * size..][..size]
                };
                let row =
                    |expert, output| (0..inputs).flat_map(|input| value(expert, input, output).to_vec()).collect();
                let of = |expert| (0..outputs).map(|output| row(expert, output)).collect();
                ((0..count).map(of).collect(), Some(inputs))
            }
        };
        let parts: &[(&str, usize, usize)] =
            if words[5].starts_with("down") { &[("down", 0, 1)] } else { &[("gate", 0, 2), ("up", 1, 2)] };
        for &(part, first, step) in parts {
            let bytes: Vec<u8> =
                rows.iter().flat_map(|rows| rows.iter().skip(first).step_by(step).flatten().copied()).collect();
            let shape = [Some(count), Some(rows[0].len() / step), columns];
            let shape: Vec<u64> = shape.into_iter().flatten().map(|d| d as u64).collect();
            writer.tensor(&format!("blk.{}.ffn_{part}_exps.{kind_of_part}", words[2]), &shape, kind(dtype), &bytes);
        }
    }
}

/// Factors of the frequencies as llama.cpp's converter computes them.
fn llama3_factors(config: &Json, dim: usize) -> Vec<f32> {
    let scaling = |name: &str| config["rope_scaling"][name].as_f64().expect("a parameter");
    let (factor, low, high) = (scaling("factor"), scaling("low_freq_factor"), scaling("high_freq_factor"));
    let original = scaling("original_max_position_embeddings");
    let theta = config["rope_theta"].as_f64().unwrap_or(10_000.0);
    let of = |i: usize| {
        let wavelength = std::f64::consts::TAU * theta.powf(2.0 * i as f64 / dim as f64);
        let smooth = (original / wavelength - low) / (high - low);
        match wavelength {
            w if w < original / high => 1.0,
            w if w > original / low => factor,
            _ => 1.0 / ((1.0 - smooth) / factor + smooth),
        }
    };
    (0..dim / 2).map(|i| of(i) as f32).collect()
}

fn open(bytes: Vec<u8>) -> Checkpoint {
    Checkpoint::from_gguf_bytes(Cow::Owned(bytes)).unwrap_or_else(|error| panic!("{error}"))
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
}

#[test]
fn a_gguf_file_gives_the_same_bits_as_safetensors() {
    let dense = ["llama-plain", "llama-linear-tied", "llama-mlp-bias", "mistral-window", "qwen2-tied", "qwen3-tied"];
    let sparse = ["qwen3moe-plain", "mixtral-plain", "mixtral-window", "gptoss-plain", "gptoss-mxfp4"];
    let others = ["gemma2-plain", "gemma3-plain", "phi3-plain", "phi3-partial-tied", "phi3-long", "olmo2-plain"];
    let more = ["smollm3-plain", "granite-plain", "granite-bias", "olmo3-listed", "olmo3-yarn"];
    for case in dense.into_iter().chain(sparse).chain(others).chain(more) {
        let mut golden = Golden::named(case);
        if case == "olmo3-yarn" {
            // The files do not have the factor that follows from the scaling; this case has another.
            golden.config["rope_scaling"]["attention_factor"] = Json::Null;
        }
        if case.starts_with("gemma") {
            // The files do not have the field: it is the width of a head in all models of these sizes.
            golden.config["query_pre_attn_scalar"] = golden.config["head_dim"].clone();
        }
        if case.starts_with("gptoss") {
            // Nor do they have this one.
            golden.config["swiglu_limit"] = 7.0.into();
        }
        let (theirs, ours) = (golden.checkpoint(), open(gguf_of(&golden)));
        assert_eq!(ours.architecture(), theirs.architecture());
        assert_eq!(ours.weight_format(), theirs.weight_format());
        // Gemma's norms are stored in f32.
        assert!(ours.weights_bytes() == theirs.weights_bytes() || case.starts_with("gemma"), "{case}");
        assert!(ours.ignored().is_empty(), "{case}: {:?}", ours.ignored());
        for (path, make) in common::devices() {
            let run = |checkpoint| {
                let mut model = load(checkpoint, &*make, 16, golden.tokens.len());
                logits_of(&mut model, &golden.tokens, golden.tokens.len())
            };
            assert!(bits(&run(&ours)) == bits(&run(&theirs)), "{case}, {path}");
        }
    }
}

#[test]
fn an_adapter_gives_the_same_bits_on_a_gguf_file_as_on_safetensors() {
    // llama's query and key rows lie in pairs in the file, those of an adapter do not.
    for case in ["llama-plain", "qwen3-tied"] {
        let golden = Golden::named(case);
        let tokens = &golden.tokens[..40];
        for (path, make) in cpu_paths() {
            let logits = |checkpoint: Checkpoint| {
                let mut model = load(&checkpoint, &*make, 8, 64);
                model.add_adapter(AdapterSlot(0), &golden.adapter(3, 5)).expect("it fits the model");
                bits(&logits_with(&mut model, Some(AdapterSlot(0)), tokens, 16))
            };
            assert!(logits(golden.checkpoint()) == logits(open(gguf_of(&golden))), "{case}, {path}");
        }
    }
}

#[test]
fn factors_of_frequencies_are_those_of_llama_3() {
    let golden = Golden::named("llama-llama3-bias");
    let (theirs, ours) = (golden.checkpoint(), open(gguf_of(&golden)));
    assert!(ours.ignored().is_empty());
    let run = |checkpoint| {
        let mut model = load(checkpoint, &reference, 16, golden.tokens.len());
        logits_of(&mut model, &golden.tokens, golden.tokens.len()).concat()
    };
    let far = run(&ours).iter().zip(&run(&theirs)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far < 1e-4, "{far}");
}

#[test]
fn factors_are_granites_alone() {
    let mut golden = Golden::named("granite-plain");
    let unrotated = gguf_with(&golden, &[("granite.rope.scaling.finetuned", Value::Bool(false))]);
    assert_eq!(open(unrotated).config().rotations, [Rotation::None; 3]);
    let rotated = gguf_with(&golden, &[("granite.rope.scaling.finetuned", Value::Bool(true))]);
    assert_eq!(open(rotated).config().rotations, [Rotation::Model; 3]);
    // A file without a factor, or with 0, has the one of other families.
    golden.config.as_object_mut().expect("an object").remove("attention_multiplier");
    golden.config["residual_multiplier"] = 0.0.into();
    let file = open(gguf_of(&golden));
    assert_eq!((file.config().query_scale, file.config().residual_multiplier), (0.25, None));
    for key in ["llama.logit_scale", "llama.residual_scale", "llama.embedding_scale", "llama.attention.scale"] {
        let file = |factor| gguf_with(&Golden::named("llama-plain"), &[(key, Value::Float(factor))]);
        refused(file(0.5), &format!("{key}: scales of activations are not supported"));
        open(file(1.0));
    }
}

#[test]
fn a_gpt_oss_file_without_scaling_has_none() {
    let mut golden = Golden::named("gptoss-plain");
    assert!(matches!(open(gguf_of(&golden)).config().rope.scaling, RopeScaling::Yarn { truncate: false, .. }));
    golden.config.as_object_mut().expect("an object").remove("rope_scaling");
    assert_eq!(open(gguf_of(&golden)).config().rope.scaling, RopeScaling::Default);
}

pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 31) as f32
    }

    /// Random blocks whose weights are about `scale`.
    pub(crate) fn blocks(&mut self, dtype: DType, count: usize, scale: f32) -> Vec<u8> {
        // Index of the scale, the weight that it makes from a middling value, index and ratio of the minimum.
        let (at, middling, minimum) = match dtype {
            DType::Q8_0 => (0, 74.0, None),
            DType::Q4_0 => (0, 4.6, None),
            DType::Q4_1 => (0, 4.6, Some((2, -7.5))),
            DType::Q5_0 => (0, 9.2, None),
            DType::Q5_1 => (0, 9.2, Some((2, -15.5))),
            DType::Q2K => (80, 9.0, Some((82, 1.5))),
            DType::Q3K => (108, 42.0, None),
            DType::Q4K => (0, 250.0, Some((2, 7.5))),
            DType::Q5K => (0, 500.0, Some((2, 15.0))),
            DType::Q6K => (208, 1360.0, None),
            DType::Iq4Nl => (0, 69.0, None),
            DType::Iq4Xs => (0, 1100.0, None),
            DType::Mxfp4 => (0, 5.0, None),
            DType::F16 | DType::F32 | DType::Bf16 => unreachable!("numbers have no blocks"),
        };
        let (values, size) = dtype.block();
        let mut bytes: Vec<u8> = (0..count / values * size).map(|_| self.next() as u8).collect();
        for block in bytes.chunks_exact_mut(size) {
            let factor = scale / middling * (0.5 + self.unit());
            if dtype == DType::Mxfp4 {
                block[at] = (127.0 + factor.log2()) as u8;
                continue;
            }
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(factor).to_le_bytes());
            if let Some((at, ratio)) = minimum {
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(factor * ratio).to_le_bytes());
            }
        }
        bytes
    }
}

const VOCAB: usize = 320;

/// A model of two layers, 256 wide, with random blocks: `plain`, and `other` for values, the way down and the embedding.
fn random(plain: DType, other: DType) -> Writer {
    random_with(plain, other, None)
}

/// A model as [`random`] makes it, with so many experts in each layer, of which a token chooses two.
fn random_with(plain: DType, other: DType, experts: Option<usize>) -> Writer {
    let mut config = serde_json::json!({
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    });
    if let Some(experts) = experts {
        config["architectures"] = serde_json::json!(["Qwen3MoeForCausalLM"]);
        config["num_experts"] = experts.into();
        config["num_experts_per_tok"] = 2.into();
        config["moe_intermediate_size"] = 256.into();
    }
    let (mut writer, mut noise) = (Writer::default(), Noise(11));
    keys(&config, &mut writer);
    let mut matrix = |writer: &mut Writer, name: &str, dtype, shape: &[usize], scale: f32| {
        let bytes = noise.blocks(dtype, shape.iter().product(), scale);
        let shape: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
        writer.tensor(name, &shape, kind(dtype), &bytes);
    };
    let norm = |writer: &mut Writer, name: &str, n: usize| {
        let bytes: Vec<u8> = (0..n).flat_map(|i| (1.0 + (i % 7) as f32 / 50.0).to_le_bytes()).collect();
        writer.tensor(name, &[n as u64], 0, &bytes);
    };
    matrix(&mut writer, "token_embd.weight", other, &[VOCAB, 256], 0.06);
    for layer in 0..2 {
        let blk = |part: &str| format!("blk.{layer}.{part}.weight");
        for (part, n) in [("attn_norm", 256), ("ffn_norm", 256), ("attn_q_norm", 64), ("attn_k_norm", 64)] {
            norm(&mut writer, &blk(part), n);
        }
        for (part, dtype, rows, columns) in [
            ("attn_q", plain, 256, 256),
            ("attn_k", plain, 128, 256),
            ("attn_v", other, 128, 256),
            ("attn_output", plain, 256, 256),
        ] {
            matrix(&mut writer, &blk(part), dtype, &[rows, columns], 1.0 / (columns as f32).sqrt());
        }
        let Some(experts) = experts else {
            for (part, dtype, rows, columns) in
                [("ffn_gate", plain, 512, 256), ("ffn_up", plain, 512, 256), ("ffn_down", other, 256, 512)]
            {
                matrix(&mut writer, &blk(part), dtype, &[rows, columns], 1.0 / (columns as f32).sqrt());
            }
            continue;
        };
        // Well apart, so that rounding changes few choices.
        matrix(&mut writer, &blk("ffn_gate_inp"), DType::Q8_0, &[experts, 256], 1.0);
        for (part, dtype) in [("ffn_gate_exps", plain), ("ffn_up_exps", plain), ("ffn_down_exps", other)] {
            matrix(&mut writer, &blk(part), dtype, &[experts, 256, 256], 1.0 / 16.0);
        }
    }
    norm(&mut writer, "output_norm.weight", 256);
    writer
}

fn tokens() -> Vec<u32> {
    let mut noise = Noise(5);
    (0..90).map(|_| (noise.next() % VOCAB as u64) as u32).collect()
}

fn combinations() -> Vec<(DType, DType)> {
    let alike = DType::ALL.into_iter().filter(|dtype| dtype.is_blocks()).map(|dtype| (dtype, dtype));
    alike.chain([(DType::Q4K, DType::Q6K), (DType::Q5_0, DType::Q8_0)]).collect()
}

#[test]
fn every_format_is_near_its_weights_in_f32() {
    let tokens = tokens();
    for (plain, other) in combinations() {
        let checkpoint = open(random(plain, other).finish());
        let want = logits_of(&mut load(&checkpoint, &reference, 4, 90), &tokens, 90);
        let mut first = None;
        for (path, make) in cpu_paths() {
            let mut model = load(&checkpoint, &*make, 4, 90);
            assert!(model.geometry().numerics.contains(plain.name()), "{}", model.geometry().numerics);
            let got = logits_of(&mut model, &tokens, 90);
            let (mut sum, mut count) = (0.0, 0usize);
            for (got, want) in got.iter().zip(&want) {
                let pairs = log_softmax(got).into_iter().zip(log_softmax(want));
                sum += pairs.map(|(a, b)| (a - b).abs()).sum::<f64>();
                count += got.len();
            }
            let mean = sum / count as f64;
            println!("{} {} {path}: mean {mean:.4}", plain.name(), other.name());
            // Logits have a deviation of about 1; activations of 8 bits are three times as far off as those of bf16.
            assert!(mean < 0.03 && mean > 0.0, "{plain:?} {path}: {mean}");
            first.get_or_insert(mean);
        }
        assert!(first.is_some());
    }
}

#[test]
fn every_format_has_the_same_bits_in_every_chunk() {
    let tokens = tokens();
    let both = combinations().into_iter().flat_map(|(plain, other)| [None, Some(5)].map(|e| (plain, other, e)));
    for (plain, other, experts) in both {
        let checkpoint = open(random_with(plain, other, experts).finish());
        for (path, make) in cpu_paths() {
            let mut model = load(&checkpoint, &*make, 4, 90);
            let whole = bits(&logits_of(&mut model, &tokens, 90));
            for chunk in [1, 7, 33] {
                assert!(bits(&logits_of(&mut model, &tokens, chunk)) == whole, "{plain:?} {path} in chunks of {chunk}");
            }
        }
    }
}

#[test]
fn integers_are_made_at_load_and_are_near() {
    use penstock_engine::models::{KvBudget, Model, ModelLimits};
    use penstock_kernels::{Held, KvFormat, Limits};
    let golden = Golden::named("qwen3-tied");
    let checkpoint = golden.checkpoint();
    let want = logits_of(&mut load(&checkpoint, &reference, 8, 130), &golden.tokens, 130);
    // Rounded weights and activations, of logits with a deviation of about 3; bf16 is 0.02 off.
    for ((held, name, most), (path, make)) in [(Held::Int8, "int8", 0.15), (Held::Int4, "int4", 0.8)]
        .into_iter()
        .flat_map(|form| common::devices().into_iter().map(move |device| (form, device)))
    {
        let limits = ModelLimits {
            context_tokens: None,
            kv: KvBudget::Pages(8),
            rows_max: 130,
            sampled_max: 130,
            held,
            kv_format: KvFormat::Own,
        };
        let device = make(Limits { rows_max: 130, sampled_max: 130 });
        let mut model = Model::load(&checkpoint, device, limits, &mut |_| {}).expect("it loads");
        assert!(model.geometry().numerics.ends_with(&format!("/bf16/{name}")), "{}", model.geometry().numerics);
        let got = logits_of(&mut model, &golden.tokens, 130);
        let pairs = got.iter().zip(&want).flat_map(|(a, b)| log_softmax(a).into_iter().zip(log_softmax(b)));
        let (sum, count) = pairs.fold((0.0, 0usize), |(sum, count), (a, b)| (sum + (a - b).abs(), count + 1));
        let mean = sum / count as f64;
        assert!(mean > 0.0 && mean < most, "{path}, {name}: {mean}");
        assert!(bits(&logits_of(&mut model, &golden.tokens, 1)) == bits(&got), "{path}, {name}: decode");
    }
}

#[track_caller]
pub(crate) fn refused(bytes: Vec<u8>, part: &str) {
    match Checkpoint::from_gguf_bytes(Cow::Owned(bytes)) {
        Ok(_) => panic!("it opens; expected {part}"),
        Err(error) => assert!(error.to_string().contains(part), "{error}; expected {part}"),
    }
}

#[test]
fn what_cannot_be_served_is_refused_with_a_reason() {
    let good = random(DType::Q8_0, DType::Q8_0).finish();
    open(good.clone());
    refused(good[..good.len() - 64].to_vec(), "ends after the file");
    refused(good[..1000].to_vec(), "ends within its header");
    refused(b"version https://git-lfs.github.com/spec/v1".to_vec(), "git lfs pull");
    refused(b"PK\x03\x04....................".to_vec(), "does not begin with \"GGUF\"");
    refused([b"GGUF", &[1, 0, 0, 0][..], &[0; 16]].concat(), "version 1");
    refused([b"GGUF", &[0, 0, 0, 3][..], &[0; 16]].concat(), "big-endian");
    refused([b"GGUF", &[3, 0, 0, 0][..], &[0xff; 16]].concat(), "at most");
    let changed = |key: &str, value: Value| {
        let mut writer = random(DType::Q8_0, DType::Q8_0);
        writer.key(key, &value);
        writer.finish()
    };
    refused(changed("general.architecture", Value::Text("x".into())), "is there twice");
    refused(changed("qwen3.expert_count", Value::Integer(8)), "expert");
    let experts = |key: &str, value: i128| {
        let mut writer = random_with(DType::Q8_0, DType::Q8_0, Some(4));
        writer.key(&format!("qwen3moe.{key}"), &Value::Integer(value));
        writer.finish()
    };
    open(experts("expert_gating_func", 1));
    open(experts("expert_gating_func", 3));
    refused(experts("expert_gating_func", 2), "only the softmax");
    refused(experts("expert_shared_count", 1), "experts that all tokens share");
    refused(experts("leading_dense_block_count", 1), "layers without experts");
    refused(experts("expert_used_count", 3), "is there twice");
    let mut one_by_one = Writer::default();
    keys(&Golden::named("mixtral-plain").config, &mut one_by_one);
    let golden = Golden::named("mixtral-plain");
    let plain = golden.stored().into_iter().filter(|tensor| !tensor.name.contains(".experts."));
    for tensor in plain {
        let shape: Vec<u64> = tensor.shape.iter().map(|&d| d as u64).collect();
        one_by_one.tensor(&name(&tensor.name, "Mixtral"), &shape, 30, &tensor.bytes);
    }
    refused(one_by_one.tensor("blk.0.ffn_gate.0.weight", &[1], 0, &[0; 4]).finish(), "an old form");
    refused(changed("qwen3.rope.scaling.type", Value::Text("longrope".into())), "longrope");
    refused(changed("general.alignment", Value::Integer(33)), "power of two");
    refused(changed("split.count", Value::Integer(3)), "one of 3 files");
    let mut other = Writer::default();
    refused(other.key("general.architecture", &Value::Text("gemma4".into())).finish(), "gemma4");
    let mut odd = Writer::default();
    keys(&Golden::named("qwen3-tied").config, &mut odd);
    refused(odd.tensor("token_embd.weight", &[203, 96], 19, &[0; 64]).finish(), "IQ1_S");
}

#[test]
fn a_window_that_would_be_lost_is_refused() {
    for (case, architecture) in [
        ("granite-plain", "granite"),
        ("qwen2-tied", "qwen2"),
        ("qwen3-tied", "qwen3"),
        ("qwen3moe-plain", "qwen3moe"),
        ("smollm3-plain", "smollm3"),
    ] {
        let golden = Golden::named(case);
        let context = golden.config["max_position_embeddings"].as_i64().expect("a context");
        let key = format!("{architecture}.attention.sliding_window");
        let with = |window: i64| gguf_with(&golden, &[(&key, Value::Integer(window.into()))]);
        refused(with(context - 1), &format!("{key}: is {}", context - 1));
        // Such a window hides no token, and 0 is none.
        for window in [0, context] {
            assert!(open(with(window)).config().windows.iter().all(Option::is_none), "{case} {window}");
        }
    }
    let stretched = |factor: f64| {
        let more = [
            ("qwen3.attention.sliding_window", Value::Integer(1 << 20)),
            ("qwen3.rope.scaling.type", Value::Text("linear".into())),
            ("qwen3.rope.scaling.factor", Value::Float(factor)),
        ];
        gguf_with(&Golden::named("qwen3-tied"), &more)
    };
    open(stretched(2.0));
    refused(stretched(4096.0), "qwen3.attention.sliding_window");
}

#[test]
fn layers_of_olmo_3_have_the_windows_that_the_file_says() {
    const PATTERN: &str = "olmo2.attention.sliding_window_pattern";
    let mut golden = Golden::named("olmo3-listed");
    let types = golden.config.as_object_mut().expect("an object").remove("layer_types").expect("types");
    assert_eq!(types[0], "full_attention");
    let windows = |pattern: Option<Value>| {
        let more: Vec<_> = pattern.into_iter().map(|pattern| (PATTERN, pattern)).collect();
        let checkpoint = open(gguf_with(&golden, &more));
        assert_eq!(checkpoint.architecture(), "Olmo3ForCausalLM");
        checkpoint.config().windows.clone()
    };
    let (none, some) = (None, Some(24));
    assert_eq!(windows(Some(Value::Integers(vec![0, 1, 1]))), [none, some, some]);
    assert_eq!(windows(Some(Value::Integer(2))), [some, none, some], "the last of each group of two sees all");
    assert_eq!(windows(Some(Value::Integer(1))), [none; 3]);
    assert_eq!(windows(None), [some; 3], "in groups of four");
    let with = |key: &str, value: Value| gguf_with(&golden, &[(key, value)]);
    refused(with(PATTERN, Value::Integers(vec![1, 0])), &format!("{PATTERN}: has 2 entries for 3 layers"));
    refused(with(PATTERN, Value::Integer(0)), PATTERN);
    refused(with(PATTERN, Value::Text("LLG".into())), PATTERN);
    open(with("olmo2.rope.freq_base_swa", Value::Float(10_000.0)));
    refused(with("olmo2.rope.freq_base_swa", Value::Float(5_000.0)), "olmo2.rope.freq_base_swa: is 5000");
    let plain = gguf_with(&Golden::named("olmo2-plain"), &[("olmo2.attention.sliding_window", Value::Integer(0))]);
    assert_eq!(open(plain).architecture(), "Olmo2ForCausalLM", "a window of 0 is none");
}

#[test]
fn attention_that_the_family_does_not_have_is_refused() {
    let pattern = |case: &str, key: &str| gguf_with(&Golden::named(case), &[(key, Value::Integers(vec![1, 0]))]);
    let key = "llama.attention.sliding_window_pattern";
    refused(pattern("mistral-window", key), key);
    let causal = |flag| gguf_with(&Golden::named("qwen2-tied"), &[("qwen2.attention.causal", Value::Bool(flag))]);
    open(causal(true));
    refused(causal(false), "qwen2.attention.causal: is false");
}

#[test]
fn an_embedding_model_pools_as_its_file_says() {
    let golden = Golden::named("qwen3-tied");
    let ends = ("tokenizer.ggml.add_eos_token", Value::Bool(true));
    let pooled = |kind: i128| gguf_with(&golden, &[("qwen3.pooling_type", Value::Integer(kind)), ends.clone()]);
    for (kind, whole) in [(0, false), (1, true), (2, true), (3, false)] {
        let checkpoint = open(pooled(kind));
        let config = checkpoint.config();
        assert_eq!((config.is_whole(), config.headless), (whole, whole), "{kind}");
    }
    refused(pooled(4), "qwen3.pooling_type: is 4: a reranker");
    refused(pooled(5), "qwen3.pooling_type: is 5");
    refused(pooled(-1), "qwen3.pooling_type: is -1");
    let silent = gguf_with(&golden, &[("qwen3.pooling_type", Value::Integer(3))]);
    refused(silent, "tokenizer.ggml.add_eos_token: is missing");
}

#[test]
fn damaged_files_never_panic() {
    let good = random(DType::Q4K, DType::Q6K).finish();
    let header =
        good.windows(20).position(|window| window == b"output_norm.weight\x01\x00").expect("the last tensor") + 40;
    let mut noise = Noise(3);
    for _ in 0..4000 {
        let mut bytes = good.clone();
        for _ in 0..1 + noise.next() % 3 {
            let at = noise.next() as usize % header;
            bytes[at] =
                if noise.next().is_multiple_of(2) { noise.next() as u8 } else { bytes[at] ^ 1 << (noise.next() % 8) };
        }
        let _ = Checkpoint::from_gguf_bytes(Cow::Owned(bytes));
    }
    for cut in (0..header).step_by(7) {
        assert!(Checkpoint::from_gguf_bytes(Cow::Owned(good[..cut].to_vec())).is_err());
    }
}
