//! A GGUF file as a checkpoint: its sizes become a config under Hugging Face's names, its tensors get those names too.
//!
//! Loading is the same as for a folder: the architecture checks the config, every needed tensor is looked up with its exact shape.
//! The differences are values: types of blocks, for `llama` the order of the query and key rows, which the format stores in pairs, and experts, which
//! it stores as one tensor of three dimensions per layer.

use std::borrow::Cow;
use std::collections::HashSet;

use penstock_gguf::{Gguf, GgufError, Tensor};
use penstock_kernels::{DType, RowOrder};
use serde_json::{Map, Value, json};

use super::files::{Bytes, Folder};
use super::{
    Checkpoint, Found, GenerationConfig, ModelConfig, Needed, NormPlaces, RopeScaling, Rotation, WeightFile,
    gguf_encoder, modules,
};
use crate::families::{self, Architecture, NormNames};
use crate::model_config::error::{CheckpointError, Place, Shown};
use crate::model_config::fields::Fields;
use crate::model_config::{LAYERS_MAX, longrope_attention_factor};

/// Names of Hugging Face's tensors and GGUF's, outside of layers.
const OUTER: [(&str, &str); 3] =
    [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];
/// Names of Hugging Face's tensors and GGUF's in a layer.
const LAYER: [(&str, &str); 12] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];
/// GGUF's names of the norms behind attention, before the MLP, and behind the MLP.
const NORMS: [&str; 3] = ["post_attention_norm", "ffn_norm", "post_ffw_norm"];
/// GGUF's router.
const ROUTER: &str = "ffn_gate_inp";
/// GGUF's sinks of a layer's heads.
const SINKS: &str = "attn_sinks.weight";
/// GGUF's architecture of GPT-OSS, whose norm before the MLP has the name that others' norm behind attention has.
const GPT_OSS: &str = "GptOssForCausalLM";
/// GGUF's tensors of all gate, up and down matrices of a layer's experts.
const EXPERTS: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
/// GGUF's architecture of Granite.
const GRANITE: &str = "granite";
/// GGUF's keys of Granite's factors, and their fields in `config.json`.
const GRANITE_FACTORS: [(&str, &str); 4] = [
    ("embedding_scale", "embedding_multiplier"),
    ("attention.scale", "attention_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
];
/// Remedy where a GGUF file lacks facts that `config.json` has.
pub(super) const ORIGINAL: &str = "serve the original checkpoint, a folder with config.json";
/// Factors by which the frequencies of rotations are divided, as Llama 3 needs them.
const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Factors for short and for long contexts, as LongRoPE has them.
const LONGROPE_FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// Architectures of GGUF that are served only without windows: their files do not say which layers have one (`config.json` does).
const WINDOWLESS: [&str; 5] = [GRANITE, "qwen2", "qwen3", "qwen3moe", "smollm3"];

/// Architectures of GGUF that are encoders.
pub(super) const ENCODERS: [&str; 2] = ["bert", "nomic-bert"];

impl From<GgufError> for CheckpointError {
    fn from(error: GgufError) -> Self {
        let at = error.key.map_or(Place::File, Place::Field);
        Self { file: error.file, at, reason: error.reason, help: error.help }
    }
}

/// GGUF's name of a layer's norm with one of Hugging Face's names.
fn norm(part: &str, architecture: &Architecture, places: NormPlaces) -> Option<&'static str> {
    let NormNames { behind_attention, before_mlp, behind_mlp, .. } = families::norm_names(places);
    if architecture.name == GPT_OSS {
        return before_mlp.and_then(|name| name.strip_suffix(".weight")).filter(|name| *name == part).map(|_| NORMS[0]);
    }
    let is = |name: &Option<&str>| name.and_then(|name| name.strip_suffix(".weight")) == Some(part);
    [behind_attention, before_mlp, behind_mlp].iter().position(is).map(|at| NORMS[at])
}

/// Name in the file of a tensor with one of Hugging Face's names.
fn stored_name(name: &str, architecture: &Architecture, config: &ModelConfig) -> Option<String> {
    let (stem, kind) = name.rsplit_once('.')?;
    if let Some(layered) = stem.strip_prefix("model.layers.") {
        let (layer, part) = layered.split_once('.')?;
        if name.ends_with(families::SINKS) {
            return Some(format!("blk.{layer}.{SINKS}"));
        }
        let listed = LAYER.iter().find(|(name, _)| *name == part).map(|(_, stored)| *stored);
        let stored = listed.or_else(|| norm(part, architecture, config.norms))?;
        return Some(format!("blk.{layer}.{stored}.{kind}"));
    }
    let (_, stored) = OUTER.iter().find(|(name, _)| *name == stem)?;
    Some(format!("{stored}.{kind}"))
}

/// Place of a needed tensor in a file: a tensor, or one expert's part of it.
struct Stored {
    name: String,
    expert: Option<usize>,
}

/// Place in the file of a tensor with one of Hugging Face's names.
fn stored(name: &str, architecture: &Architecture, config: &ModelConfig) -> Stored {
    let whole = || {
        let stored = match &config.encoder {
            Some(encoder) => gguf_encoder::stored_name(name, encoder.names),
            None => stored_name(name, architecture, config),
        };
        Stored { name: stored.unwrap_or_else(|| name.to_owned()), expert: None }
    };
    let Some(experts) = &config.experts else { return whole() };
    let layered = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let Some((layer, part)) = layered.and_then(|(layer, rest)| Some((layer, rest.strip_prefix(experts.names.block)?)))
    else {
        return whole();
    };
    match part.split('.').collect::<Vec<_>>()[..] {
        ["", router, kind] if router == experts.names.router => {
            Stored { name: format!("blk.{layer}.{ROUTER}.{kind}"), expert: None }
        }
        ["", "experts", expert, part, kind] => {
            let at = experts.names.parts.iter().position(|name| *name == part);
            let tensor = EXPERTS[at.expect("a part of an expert")];
            Stored { name: format!("blk.{layer}.{tensor}.{kind}"), expert: expert.parse().ok() }
        }
        _ => whole(),
    }
}

/// Type of a `ggml_type`; `Err` holds the name of one that this engine does not read.
fn dtype(kind: u32) -> Result<DType, String> {
    const OTHERS: [(u32, &str); 20] = [
        (9, "Q8_1"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (24, "I8"),
        (25, "I16"),
        (26, "I32"),
        (27, "I64"),
        (28, "F64"),
        (29, "IQ1_M"),
        (31, "Q4_0_4_4"),
        (32, "Q4_0_4_8"),
        (33, "Q4_0_8_8"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (40, "NVFP4"),
    ];
    Ok(match kind {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        6 => DType::Q5_0,
        7 => DType::Q5_1,
        8 => DType::Q8_0,
        10 => DType::Q2K,
        11 => DType::Q3K,
        12 => DType::Q4K,
        13 => DType::Q5K,
        14 => DType::Q6K,
        20 => DType::Iq4Nl,
        23 => DType::Iq4Xs,
        30 => DType::Bf16,
        39 => DType::Mxfp4,
        other => {
            let name = OTHERS.iter().find(|(number, _)| *number == other).map(|(_, name)| (*name).to_owned());
            return Err(name.unwrap_or_else(|| format!("number {other}")));
        }
    })
}

/// Names of all types that can be read, for messages.
const SUPPORTED: &str =
    "supported: F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q5_0, Q5_1, Q4_K, Q4_0, Q4_1, Q3_K, Q2_K, IQ4_NL, IQ4_XS, MXFP4";

impl Checkpoint {
    /// Checks a model in GGUF files; `files` are the bytes of its parts, in order.
    pub(super) fn from_gguf(gguf: &Gguf, files: Vec<Bytes>) -> Result<Self, CheckpointError> {
        let (architecture, mut config, mut raw) = read_config(gguf)?;
        let said = config.rope.clone();
        if config.encoder.is_none() {
            read_rope_factors(gguf, &files, &mut config)?;
        }
        // The factors are no tensors of the model, so the hash has them from here. It has nothing of a file without any: its identity stays.
        if config.rope != said {
            raw.extend_from_slice(format!("\n{:?}", config.rope).as_bytes());
        }
        let beside = penstock_gguf::sentence_files(gguf)?;
        let beside = beside.into_iter().map(|(name, bytes)| (name.to_owned(), Cow::Owned(bytes))).collect();
        modules::read(&Folder::Memory(beside), &mut config)?;
        config.lose_head_if_whole();
        let shown = |file: usize| {
            gguf.parts
                .get(file)
                .filter(|part| !part.path.as_os_str().is_empty())
                .map_or_else(|| gguf.shown.clone(), |part| part.path.display().to_string())
        };
        let weight_files: Vec<WeightFile> =
            files.into_iter().enumerate().map(|(i, bytes)| WeightFile { shown: shown(i), bytes }).collect();
        let (mut tensors, mut used) = (std::collections::BTreeMap::new(), HashSet::new());
        for needed in families::tensors(&config) {
            let theirs = needed.part.as_ref().map_or(&needed.name, |part| &part.tensor);
            let Stored { name, expert } = stored(theirs, architecture, &config);
            let Some((name, tensor)) = gguf.tensors.get_key_value(&name) else {
                return Err(missing(gguf, &name, &needed));
            };
            used.insert(name);
            let order = order_of(architecture, &config, &needed.name);
            let count = expert.and(config.experts.as_ref()).map(|experts| experts.num_experts);
            let found = place(&weight_files, name, tensor, &needed, expert.zip(count), order)?;
            tensors.insert(needed.name, found);
        }
        let unused =
            gguf.tensors.keys().filter(|name| !used.contains(name) && (config.encoder.is_some() || !is_factors(name)));
        let mut ignored: Vec<String> = unused.cloned().collect();
        ignored.sort_unstable();
        if let Some(name) = ignored.first().filter(|_| config.encoder.is_some()) {
            let reason = format!("is none of {}: the file is of another model", architecture.name);
            return Err(CheckpointError::tensor(&gguf.shown, name, reason).help(ORIGINAL));
        }
        ignored.truncate(100);
        let generation = GenerationConfig::default();
        let mut checkpoint =
            Self { architecture, config, generation, files: weight_files, tensors, ignored, hash: [0; 32] };
        checkpoint.hash = checkpoint.compute_hash(&raw);
        Ok(checkpoint)
    }
}

/// Returns true if `name` is that of factors of the rotations' frequencies.
fn is_factors(name: &str) -> bool {
    name == ROPE_FACTORS || LONGROPE_FACTORS.contains(&name)
}

fn missing(gguf: &Gguf, name: &str, needed: &Needed) -> CheckpointError {
    let error = |reason| CheckpointError::tensor(&gguf.shown, name, reason);
    if name.contains("_exps.") && gguf.tensors.contains_key(&name.replace("_exps.", ".0.")) {
        let help = "convert the model again with a newer llama.cpp";
        return error("is missing: the file has its experts one by one, an old form".into()).help(help);
    }
    error(format!("is missing (shape {:?})", needed.shape))
}

/// Order in which the rows of a tensor are stored.
fn order_of(architecture: &Architecture, config: &ModelConfig, name: &str) -> RowOrder {
    let rotated = name.contains("self_attn.q_proj") || name.contains("self_attn.k_proj");
    let pairs = matches!(
        architecture.name,
        "GraniteForCausalLM" | "LlamaForCausalLM" | "MistralForCausalLM" | "MixtralForCausalLM" | "SmolLM3ForCausalLM"
    );
    let head_dim = config.head_dim;
    if rotated && pairs { RowOrder::Pairs { head_dim, plain: 0, rotated: head_dim } } else { RowOrder::Plain }
}

/// Checks type, shape and place of a needed tensor. `expert`: its index in a tensor of so many experts.
fn place(
    files: &[WeightFile],
    name: &str,
    tensor: &Tensor,
    needed: &Needed,
    expert: Option<(usize, usize)>,
    order: RowOrder,
) -> Result<Found, CheckpointError> {
    let file = &files[tensor.file];
    let refused = |reason: String| CheckpointError::tensor(&file.shown, name, reason);
    let dtype = dtype(tensor.kind)
        .map_err(|other| refused(format!("type {} is not supported", Shown(&other))).help(SUPPORTED))?;
    let (expert, experts) = expert.map_or((0, None), |(expert, experts)| (expert, Some(experts)));
    let mut whole: Vec<usize> = experts.iter().chain(&needed.shape).copied().collect();
    if let Some(part) = &needed.part {
        whole[0] = part.rows;
    }
    // ggml's writer leaves out outer dimensions of 1.
    let theirs = tensor.shape.iter().skip_while(|d| **d == 1).map(|&d| usize::try_from(d).ok());
    if theirs.ne(whole.iter().skip_while(|d| **d == 1).map(|&d| Some(d))) {
        return Err(refused(format!("shape {:?}, the metadata needs {whole:?}", tensor.shape)));
    }
    let (columns, rows) = (needed.shape[needed.shape.len() - 1], &needed.shape[..needed.shape.len() - 1]);
    let row = dtype.row_bytes(columns);
    let row = row.ok_or_else(|| {
        refused(format!("rows of {columns} are not whole blocks of {} ({})", dtype.block().0, dtype.name()))
    })?;
    let bytes = rows.iter().try_fold(row, |n, &d| n.checked_mul(d));
    let first = match &needed.part {
        Some(part) => row.checked_mul(part.first),
        None => bytes.and_then(|bytes| bytes.checked_mul(expert)),
    };
    let start = usize::try_from(tensor.start).ok().zip(first).and_then(|(start, first)| start.checked_add(first));
    let end = start.zip(bytes).and_then(|(start, bytes)| start.checked_add(bytes));
    match (start, end) {
        (Some(start), Some(end)) if end <= file.bytes.as_slice().len() => Ok(Found {
            file: tensor.file,
            dtype,
            shape: needed.shape.clone(),
            range: start..end,
            order,
            stacked: None,
            quantized: None,
        }),
        _ => {
            let size = file.bytes.as_slice().len();
            let reason = format!("begins at {} and ends after the file's {size} bytes", tensor.start);
            Err(refused(reason).help("the file is cut short or damaged: fetch it again"))
        }
    }
}

/// Architecture, its config, and the bytes by which the model's hash knows both.
pub(super) type Config = (&'static Architecture, ModelConfig, Vec<u8>);

fn read_config(gguf: &Gguf) -> Result<Config, CheckpointError> {
    const KEY: &str = "general.architecture";
    let Some(name) = gguf.text(KEY)? else { return Err(gguf.refuse(KEY, "is missing").into()) };
    if ENCODERS.contains(&name) {
        return gguf_encoder::read_config(gguf, name);
    }
    let window = gguf.integer(&format!("{name}.attention.sliding_window"), 0, u64::MAX)?.filter(|&window| window > 0);
    let experts = gguf.integer(&format!("{name}.expert_count"), 0, u64::from(u32::MAX))?.filter(|&count| count > 0);
    let theirs = match name {
        "llama" if experts.is_some() => "MixtralForCausalLM",
        "llama" if window.is_some() => "MistralForCausalLM",
        "llama" => "LlamaForCausalLM",
        "gemma2" => "Gemma2ForCausalLM",
        "gemma3" => "Gemma3ForCausalLM",
        "gpt-oss" => GPT_OSS,
        GRANITE => "GraniteForCausalLM",
        // OLMo 3's files call themselves so, too.
        "olmo2" if window.is_some() => "Olmo3ForCausalLM",
        "olmo2" => "Olmo2ForCausalLM",
        "phi3" => "Phi3ForCausalLM",
        "smollm3" => "SmolLM3ForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        "qwen3moe" => "Qwen3MoeForCausalLM",
        other => {
            let reason = format!(
                "\"{}\" is not supported; supported: bert, gemma2, gemma3, gpt-oss, granite, llama (also Mistral, Mixtral), nomic-bert, olmo2, phi3, \
                 qwen2, qwen3, qwen3moe, smollm3",
                Shown(other)
            );
            return Err(gguf.refuse(KEY, reason).into());
        }
    };
    let architecture = families::architecture(theirs).expect("a registered architecture");
    check_attention(gguf, name, window)?;
    let map = config_of(gguf, name, window, experts)?;
    let mut config = (architecture.read)(&Fields::new(&gguf.shown, &map))?;
    let has = |tensor: &str| gguf.tensors.contains_key(&format!("blk.0.{tensor}.bias"));
    if theirs != "Qwen2ForCausalLM" {
        config.qkv_bias = has("attn_q");
    }
    let mut raw = serde_json::to_vec(&map).expect("a JSON value of texts and numbers");
    // Granite 4 has files whose layers have no rotations, which say so under the name of another fact.
    if name == GRANITE && gguf.flag(&format!("{name}.rope.scaling.finetuned"))? == Some(false) {
        config.rotations.fill(Rotation::None);
        raw.extend_from_slice(b"\nno rotations");
    }
    // The norms of these files are complete: the converter has added what transformers adds.
    config.norm_offset = 0.0;
    config.output_bias = has("attn_output");
    config.mlp_bias = has("ffn_gate");
    let has_biases = config.experts.as_ref().is_some_and(|experts| experts.bias);
    if let Some(part) = EXPERTS.iter().chain([&ROUTER]).find(|part| !has_biases && has(part)) {
        let reason = "biases of experts are not supported";
        return Err(CheckpointError::tensor(&gguf.shown, format!("blk.0.{part}.bias"), reason));
    }
    let ends = penstock_gguf::end_tokens(gguf)?;
    config.eos_token_id = ends.into_iter().filter_map(|id| u32::try_from(id).ok()).collect();
    Ok((architecture, config, raw))
}

/// Refuses windows, and attention to later tokens, that would be ignored otherwise.
fn check_attention(gguf: &Gguf, name: &str, window: Option<u64>) -> Result<(), CheckpointError> {
    let key = |part: &str| format!("{name}.{part}");
    const CAUSAL: &str = "attention.causal";
    if gguf.flag(&key(CAUSAL))? == Some(false) {
        let reason = "is false: tokens that see later ones are not supported in GGUF files";
        return Err(gguf.refuse(&key(CAUSAL), reason).help(ORIGINAL).into());
    }
    let Some(window) = window else { return Ok(()) };
    // In `llama` and `phi3` files this key gives only some of the layers the window, which is not read here.
    const PATTERN: &str = "attention.sliding_window_pattern";
    if matches!(name, "llama" | "phi3") && gguf.metadata.contains_key(&key(PATTERN)) {
        let reason = "windows in some of the layers are not supported in this architecture";
        return Err(gguf.refuse(&key(PATTERN), reason).help(ORIGINAL).into());
    }
    let context = gguf.integer(&key("context_length"), 1, u64::from(u32::MAX))?.unwrap_or(0) as f64;
    let stretch = gguf.number(&key("rope.scaling.factor"))?.unwrap_or(1.0).max(1.0);
    // A window as long as the longest context hides nothing.
    if WINDOWLESS.contains(&name) && (window as f64) < context * stretch {
        let reason = format!("is {window}, and windows are not supported in GGUF files of this architecture");
        return Err(gguf.refuse(&key("attention.sliding_window"), reason).help(ORIGINAL).into());
    }
    Ok(())
}

/// The metadata under the names of `config.json`.
fn config_of(
    gguf: &Gguf,
    name: &str,
    window: Option<u64>,
    experts: Option<u64>,
) -> Result<Map<String, Value>, CheckpointError> {
    let key = |part: &str| format!("{name}.{part}");
    let required = |part: &str| -> Result<u64, CheckpointError> {
        let found = gguf.integer(&key(part), 1, u64::from(u32::MAX))?;
        found.ok_or_else(|| gguf.refuse(&key(part), "is missing").into())
    };
    let unsupported = [
        ("attention.q_lora_rank", "latent attention is not supported"),
        ("attention.kv_lora_rank", "latent attention is not supported"),
        ("expert_shared_count", "experts that all tokens share are not supported"),
        ("expert_group_count", "experts in groups are not supported"),
        ("leading_dense_block_count", "layers without experts are not supported in GGUF files"),
    ];
    for (part, reason) in unsupported {
        if gguf.integer(&key(part), 0, u64::MAX)?.unwrap_or(0) > 0 {
            return Err(gguf.refuse(&key(part), reason).into());
        }
    }
    if experts.is_some() && !matches!(name, "gpt-oss" | "llama" | "qwen3moe") {
        return Err(gguf.refuse(&key("expert_count"), "this architecture has no mixture of experts here").into());
    }
    // 1 is the softmax over all experts, 2 the sigmoid, 3 the softmax over the chosen ones; files from before the key have the first. Where the
    // weights are divided by their sum, 1 and 3 are the same.
    if gguf.integer(&key("expert_gating_func"), 0, u64::MAX)?.is_some_and(|function| !matches!(function, 0 | 1 | 3)) {
        return Err(gguf.refuse(&key("expert_gating_func"), "only the softmax (1 and 3) is supported").into());
    }
    let scales = ["logit_scale", "residual_scale", "embedding_scale", "attention.scale", "expert_weights_scale"];
    for part in scales.into_iter().filter(|part| name != GRANITE || !GRANITE_FACTORS.iter().any(|(key, _)| key == part))
    {
        if gguf.number(&key(part))?.is_some_and(|scale| scale != 0.0 && scale != 1.0) {
            return Err(gguf.refuse(&key(part), "scales of activations are not supported").into());
        }
    }
    // Lists have an entry for each layer.
    let layers = gguf.integer(&key("block_count"), 1, LAYERS_MAX as u64)?;
    let layers = layers.ok_or_else(|| gguf.refuse(&key("block_count"), "is missing"))?;
    let (hidden, heads) = (required("embedding_length")?, required("attention.head_count")?);
    let embedding = gguf.tensors.get("token_embd.weight");
    let Some(&[vocab, _]) = embedding.map(|tensor| tensor.shape.as_slice()) else {
        return Err(CheckpointError::tensor(&gguf.shown, "token_embd.weight", "is missing, or is no matrix"));
    };
    let head_dim = match gguf.integer(&key("attention.key_length"), 1, u64::from(u32::MAX))? {
        Some(dim) => dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(gguf.refuse(&key("attention.key_length"), "is missing").into()),
    };
    let rotated = gguf.integer(&key("rope.dimension_count"), 1, head_dim)?.unwrap_or(head_dim);
    for part in ["attention.value_length", "rope.dimension_count"] {
        if let Some(other) = gguf.integer(&key(part), 0, u64::MAX)?
            && other != head_dim
            && !(name == "phi3" && part == "rope.dimension_count")
        {
            return Err(gguf
                .refuse(&key(part), format!("is {other}, only heads of one width {head_dim} are supported"))
                .into());
        }
    }
    let eps = gguf.number(&key("attention.layer_norm_rms_epsilon"))?;
    let Some(eps) = eps else { return Err(gguf.refuse(&key("attention.layer_norm_rms_epsilon"), "is missing").into()) };
    let kv_heads = gguf.integer(&key("attention.head_count_kv"), 1, u64::from(u32::MAX))?.unwrap_or(heads);
    // The experts' width, where it is not that of the MLPs; files of qwen3moe need no other.
    let of_experts = gguf.integer(&key("expert_feed_forward_length"), 1, u64::from(u32::MAX))?;
    let width = match of_experts {
        Some(width) => gguf.integer(&key("feed_forward_length"), 1, u64::from(u32::MAX))?.unwrap_or(width),
        None => required("feed_forward_length")?,
    };
    let expert_width = of_experts.unwrap_or(width);
    // All layers have experts; no MLP has another width.
    let width = if name == "gpt-oss" { expert_width } else { width };
    if name == "llama" && expert_width != width {
        let reason = format!("is {expert_width}, only experts of feed_forward_length {width} are supported");
        return Err(gguf.refuse(&key("expert_feed_forward_length"), reason).into());
    }
    let mut map = Map::new();
    let mut set = |name: &str, value: Value| map.insert(name.to_owned(), value);
    set("vocab_size", vocab.into());
    set("hidden_size", hidden.into());
    set("intermediate_size", width.into());
    if let Some(experts) = experts {
        set("num_experts", experts.into());
        set("num_experts_per_tok", required("expert_used_count")?.into());
        set("moe_intermediate_size", expert_width.into());
        // All of these architectures divide the weights of the chosen experts by their sum; the files do not say so.
        set("norm_topk_prob", true.into());
    }
    set("num_hidden_layers", layers.into());
    set("num_attention_heads", heads.into());
    set("num_key_value_heads", kv_heads.into());
    set("head_dim", head_dim.into());
    // Stored in f32: its shortest form in decimal is the number that was meant.
    set("rms_norm_eps", shortest(eps));
    set("max_position_embeddings", required("context_length")?.into());
    set("tie_word_embeddings", (!gguf.tensors.contains_key("output.weight")).into());
    let theta = gguf.number(&key("rope.freq_base"))?;
    set("rope_theta", shortest(theta.unwrap_or(if name == "gemma3" { 1e6 } else { 10_000.0 })));
    if window.is_some() || name != "gemma2" {
        set("sliding_window", window.map_or(Value::Null, Value::from));
    }
    if rotated != head_dim {
        set("partial_rotary_factor", json!(rotated as f64 / head_dim as f64));
    }
    if matches!(name, "gemma2" | "gemma3") {
        for (part, field) in [
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("rope.freq_base_swa", "rope_local_base_freq"),
        ] {
            if let Some(number) = gguf.number(&key(part))? {
                set(field, shortest(number));
            }
        }
        if let Some(pattern) = gguf.integer(&key("attention.sliding_window_pattern"), 1, 1024)? {
            set("sliding_window_pattern", pattern.into());
        }
        // The files do not have the scale of queries; it is that of a head, but for the largest models.
        let is_largest = matches!((name, layers), ("gemma2", 46) | ("gemma3", 62));
        set("query_pre_attn_scalar", if is_largest { hidden / heads } else { head_dim }.into());
    }
    if name == GRANITE {
        for (part, field) in GRANITE_FACTORS {
            match gguf.number(&key(part))?.filter(|factor| *factor != 0.0) {
                Some(factor) => drop(set(field, shortest(factor))),
                // Without a factor of their own the products have that of other families.
                None if part == "attention.scale" => drop(set(field, json!((head_dim as f64).powf(-0.5)))),
                None => {}
            }
        }
    }
    if let Some(types) = layer_types(gguf, name, window, layers)? {
        set("layer_types", types);
    }
    let mut scaling = scaling_of(gguf, &key)?;
    if name == "gpt-oss" {
        // Without an entry the config would have the family's own scaling; the files do not say that its range is not rounded.
        let scaling = scaling.get_or_insert_with(|| json!({ "rope_type": "default" }));
        scaling["truncate"] = false.into();
    }
    if let Some(scaling) = scaling {
        set("rope_scaling", scaling);
    }
    Ok(map)
}

/// Layers with a window of an `olmo2` file, as `layer_types` of a config: those of a list, or all but the last of each group of so many; `None` if the file
/// does not say it, and in other architectures.
fn layer_types(gguf: &Gguf, name: &str, window: Option<u64>, layers: u64) -> Result<Option<Value>, CheckpointError> {
    let key = |part: &str| format!("{name}.{part}");
    const PATTERN: &str = "attention.sliding_window_pattern";
    if name != "olmo2" || window.is_none() {
        return Ok(None);
    }
    // The rotations of both kinds of layers have one base in this family.
    const BASE: &str = "rope.freq_base_swa";
    let (base, local) = (gguf.number(&key("rope.freq_base"))?, gguf.number(&key(BASE))?);
    if let Some(local) = local.filter(|_| local != base) {
        return Err(gguf
            .refuse(&key(BASE), format!("is {local}, and rope.freq_base is another"))
            .help(ORIGINAL)
            .into());
    }
    let kind = |slides: bool| Value::from(if slides { "sliding_attention" } else { "full_attention" });
    let slides: Value = match gguf.metadata.get(&key(PATTERN)) {
        None => return Ok(None),
        Some(penstock_gguf::Value::Integers(list)) if list.len() as u64 == layers => {
            list.iter().map(|slides| kind(*slides != 0)).collect()
        }
        Some(penstock_gguf::Value::Integers(list)) => {
            let reason = format!("has {} entries for {layers} layers", list.len());
            return Err(gguf.refuse(&key(PATTERN), reason).help(ORIGINAL).into());
        }
        Some(_) => {
            let group = gguf.integer(&key(PATTERN), 1, 1024)?.unwrap_or(1);
            (1..=layers).map(|layer| kind(!layer.is_multiple_of(group))).collect()
        }
    };
    Ok(Some(slides))
}

/// An f32 as the decimal number that it stands for.
pub(super) fn shortest(number: f64) -> Value {
    let text = (number as f32).to_string();
    text.parse::<f64>().map_or(Value::Null, |number| json!(number))
}

fn scaling_of(gguf: &Gguf, key: &dyn Fn(&str) -> String) -> Result<Option<Value>, CheckpointError> {
    let factor = gguf.number(&key("rope.scaling.factor"))?;
    let kind = gguf.text(&key("rope.scaling.type"))?;
    match kind {
        None | Some("none") => Ok(None),
        // Its factors are tensors.
        Some("longrope") if LONGROPE_FACTORS.iter().all(|name| gguf.tensors.contains_key(*name)) => Ok(None),
        Some("linear") => Ok(Some(json!({ "rope_type": "linear", "factor": factor }))),
        Some("yarn") => {
            let original = gguf.integer(&key("rope.scaling.original_context_length"), 1, u64::from(u32::MAX))?;
            Ok(Some(json!({ "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original })))
        }
        Some(other) => {
            let reason = format!("\"{}\" is not supported; supported: none, linear, yarn", Shown(other));
            Err(gguf.refuse(&key("rope.scaling.type"), reason).into())
        }
    }
}

/// Reads the factors of the rotations' frequencies, which some `llama` and `phi3` files have as tensors.
fn read_rope_factors(gguf: &Gguf, files: &[Bytes], config: &mut ModelConfig) -> Result<(), CheckpointError> {
    let count = config.rotary_dim / 2;
    if let Some(factors) = factors(gguf, files, ROPE_FACTORS, count)? {
        config.rope.scaling = RopeScaling::Factors { factors };
    }
    let [short, long] = LONGROPE_FACTORS;
    let (short, long) = (factors(gguf, files, short, count)?, factors(gguf, files, long, count)?);
    let (Some(short_factor), Some(long_factor)) = (short, long) else { return Ok(()) };
    let name = gguf.text("general.architecture")?.unwrap_or_default();
    let key = format!("{name}.rope.scaling.original_context_length");
    let Some(original) = gguf.integer(&key, 1, u64::from(u32::MAX))? else {
        return Err(gguf.refuse(&key, "is missing, and the file has factors for long contexts").into());
    };
    let original_max_position_embeddings = original as usize;
    let stretched = config.max_position_embeddings as f64 / original as f64;
    let attention_factor = gguf.number(&format!("{name}.rope.scaling.attn_factor"))?;
    let attention_factor =
        attention_factor.unwrap_or_else(|| longrope_attention_factor(stretched, original_max_position_embeddings));
    config.rope.scaling =
        RopeScaling::LongRope { short_factor, long_factor, attention_factor, original_max_position_embeddings };
    Ok(())
}

/// Factors of the tensor `name`, `[count]`; `None` if the file has no such tensor.
fn factors(gguf: &Gguf, files: &[Bytes], name: &str, count: usize) -> Result<Option<Vec<f32>>, CheckpointError> {
    let Some(tensor) = gguf.tensors.get(name) else { return Ok(None) };
    let refused = |reason: String| CheckpointError::tensor(&gguf.shown, name, reason);
    if tensor.kind != 0 || tensor.shape != [count as u64] {
        return Err(refused(format!("type {} and shape {:?}, needs F32 and [{count}]", tensor.kind, tensor.shape)));
    }
    let start = usize::try_from(tensor.start).unwrap_or(usize::MAX);
    let bytes = files[tensor.file].as_slice();
    let Some(bytes) = start.checked_add(count * 4).and_then(|end| bytes.get(start..end)) else {
        return Err(refused("ends after the file".into()).help("the file is cut short or damaged: fetch it again"));
    };
    let factors: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    match factors.iter().find(|factor| !(1e-6..=1e6).contains(*factor)) {
        Some(bad) => Err(refused(format!("has the factor {bad}"))),
        None => Ok(Some(factors)),
    }
}
