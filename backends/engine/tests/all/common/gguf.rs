//! Models in GGUF files: a golden's as converters write it, and one with random blocks of any format.

use std::borrow::Cow;

use penstock_engine::checkpoint::Checkpoint;
use penstock_gguf::{Value, Writer};
use penstock_kernels::DType;
use serde_json::Value as Json;

use super::weights::{Golden, Tensor};

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
pub(crate) fn name(theirs: &str, architecture: &str) -> String {
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
pub(crate) fn keys(config: &Json, writer: &mut Writer) {
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
pub(crate) fn gguf_of(golden: &Golden) -> Vec<u8> {
    gguf_with(golden, &[])
}

/// The golden's model as a GGUF file with further keys.
pub(crate) fn gguf_with(golden: &Golden, more: &[(&str, Value)]) -> Vec<u8> {
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

/// Checkpoint of a file that can be served.
pub(crate) fn open(bytes: Vec<u8>) -> Checkpoint {
    Checkpoint::from_gguf_bytes(Cow::Owned(bytes)).unwrap_or_else(|error| panic!("{error}"))
}

/// Checks that a file is refused, for a reason that contains `part`.
#[track_caller]
pub(crate) fn refused(bytes: Vec<u8>, part: &str) {
    match Checkpoint::from_gguf_bytes(Cow::Owned(bytes)) {
        Ok(_) => panic!("it opens; expected {part}"),
        Err(error) => assert!(error.to_string().contains(part), "{error}; expected {part}"),
    }
}

/// Random numbers of a seed, the same on every machine.
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

/// Number of tokens of a random model.
pub(crate) const VOCAB: usize = 320;

/// A model of two layers, 256 wide, with random blocks: `plain`, and `other` for values, the way down and the embedding.
pub(crate) fn random(plain: DType, other: DType) -> Writer {
    random_with(plain, other, None)
}

/// A model as [`random`] makes it, with so many experts in each layer, of which a token chooses two.
pub(crate) fn random_with(plain: DType, other: DType, experts: Option<usize>) -> Writer {
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
