//! Damaged, hostile and unsupported checkpoints are refused with file, tensor or field, and reason; nothing panics.

use crate::common;

use std::fs;
use std::path::{Path, PathBuf};

use common::weights::{Files, Golden, Tensor, with_header, write_safetensors};
use penstock_engine::checkpoint::{Checkpoint, Place};
use serde_json::{Value, json};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn single() -> Files {
    Golden::named("llama-plain").files()
}

fn sharded() -> Files {
    Golden::named("qwen3-mixed-windows").files()
}

fn file<'a>(files: &'a mut Files, name: &str) -> &'a mut Vec<u8> {
    files.iter_mut().find(|(n, _)| n == name).expect("a file").1.to_mut()
}

/// Sets field `path` (dotted) of a JSON file; `None` removes it.
fn set(files: &mut Files, name: &str, path: &str, value: Option<Value>) {
    let bytes = file(files, name);
    let mut root: Value = serde_json::from_slice(bytes).expect("json");
    let (parents, last) = path.rsplit_once('/').unwrap_or(("", path));
    let mut object = &mut root;
    for key in parents.split('/').filter(|key| !key.is_empty()) {
        object = &mut object[key];
    }
    let map = object.as_object_mut().expect("an object");
    match value {
        Some(value) => map.insert(last.to_owned(), value),
        None => map.remove(last),
    };
    *bytes = serde_json::to_vec(&root).expect("json");
}

/// Rewrites the header of the weights; the data stays.
fn edit_header(files: &mut Files, edit: impl FnOnce(&mut Value)) {
    let bytes = file(files, WEIGHTS);
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("json");
    edit(&mut header);
    let data = bytes.split_off(8 + length);
    *bytes = with_header(&serde_json::to_vec(&header).expect("json"));
    bytes.extend(data);
}

#[track_caller]
fn refused(what: &str, files: Files, place: &Place, name: &str, reason: &str) {
    let error = match Checkpoint::from_buffers(files) {
        Ok(_) => panic!("{what}: was opened"),
        Err(error) => error,
    };
    assert_eq!((error.file.as_str(), &error.at), (name, place), "{what}: {error}");
    assert!(error.to_string().contains(reason), "{what}: \"{error}\" does not say \"{reason}\"");
}

fn tensor(name: &str) -> Place {
    Place::Tensor(name.into())
}

fn field(name: &str) -> Place {
    Place::Field(name.into())
}

#[test]
fn the_undamaged_ones_open() {
    Checkpoint::from_buffers(single()).expect("single file");
    Checkpoint::from_buffers(sharded()).expect("shards");
}

#[test]
fn weight_files() {
    const Q: &str = "model.layers.1.self_attn.q_proj.weight";
    const NORM: &str = "model.norm.weight";
    const HEAD: &str = "lm_head.weight";
    type Damage = fn(&mut Files);
    let table: &[(&str, Damage, Place, &str)] = &[
        ("empty", |f| file(f, WEIGHTS).clear(), Place::File, "0 bytes are too few"),
        ("seven bytes", |f| file(f, WEIGHTS).truncate(7), Place::File, "7 bytes are too few"),
        ("cut in the header", |f| file(f, WEIGHTS).truncate(100), Place::File, "cut short"),
        (
            "cut in the data",
            |f| {
                let length = file(f, WEIGHTS).len();
                file(f, WEIGHTS).truncate(length - 1);
            },
            tensor(HEAD),
            "end after the file's",
        ),
        (
            "longer than its tensors",
            |f| file(f, WEIGHTS).extend([0; 3]),
            Place::File,
            "last 3 bytes belong to no tensor",
        ),
        (
            "header length beyond the file",
            |f| file(f, WEIGHTS)[..8].copy_from_slice(&90_000_000u64.to_le_bytes()),
            Place::File,
            "header length 90000000, but only",
        ),
        (
            "header length of 2^64 - 1",
            |f| file(f, WEIGHTS)[..8].copy_from_slice(&u64::MAX.to_le_bytes()),
            Place::File,
            "is above 100000000",
        ),
        (
            "header length too short",
            |f| file(f, WEIGHTS)[..8].copy_from_slice(&9u64.to_le_bytes()),
            Place::File,
            "header:",
        ),
        ("header of length 0", |f| *file(f, WEIGHTS) = vec![0; 8], Place::File, "header:"),
        ("header that is a list", |f| *file(f, WEIGHTS) = with_header(b"[]"), Place::File, "an object of tensors"),
        (
            "header without tensors",
            |f| *file(f, WEIGHTS) = with_header(b"{}"),
            tensor("model.embed_tokens.weight"),
            "missing",
        ),
        (
            "header of deep lists",
            |f| {
                let deep = [b"{\"a\":".to_vec(), vec![b'['; 100_000]].concat();
                *file(f, WEIGHTS) = with_header(&deep);
            },
            Place::File,
            "header: tensor a:",
        ),
        (
            "metadata of deep lists",
            |f| *file(f, WEIGHTS) = with_header(&[b"{\"__metadata__\":".to_vec(), vec![b'['; 100_000]].concat()),
            Place::File,
            "header: EOF",
        ),
        (
            "a shape of a million dimensions",
            |f| {
                let shape = "1,".repeat(1_000_000);
                let header = format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{shape}1],\"data_offsets\":[0,4]}}}}");
                *file(f, WEIGHTS) = with_header(header.as_bytes());
            },
            Place::File,
            "at most 8 dimensions",
        ),
        ("header that is not UTF-8", |f| *file(f, WEIGHTS) = with_header(b"{\"\xff\":1}"), Place::File, "header:"),
        ("NUL bytes", |f| file(f, WEIGHTS)[8..].fill(0), Place::File, "header:"),
        (
            "the same tensor twice",
            |f| {
                let entry = "{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}";
                *file(f, WEIGHTS) = with_header(format!("{{\"a\":{entry},\"a\":{entry}}}").as_bytes());
            },
            Place::File,
            "tensor a is there twice",
        ),
        (
            "missing tensor",
            |f| edit_header(f, |h| rename(h, Q, "model.layers.1.self_attn.query.weight")),
            tensor(Q),
            "is missing (shape [96, 96])",
        ),
        ("missing head", |f| edit_header(f, |h| rename(h, HEAD, "head")), tensor(HEAD), "tie_word_embeddings: true"),
        (
            "wrong shape",
            |f| edit_header(f, |h| h[Q]["shape"] = json!([48, 192])),
            tensor(Q),
            "shape [48, 192], config.json needs [96, 96]",
        ),
        ("wrong rank", |f| edit_header(f, |h| h[NORM]["shape"] = json!([1, 96])), tensor(NORM), "shape [1, 96]"),
        (
            "shape and bytes differ",
            |f| edit_header(f, |h| h[Q]["shape"] = json!([96, 95])),
            tensor(Q),
            "needs 18240 bytes, has 18432",
        ),
        ("overflowing shape", |f| edit_header(f, |h| h[Q]["shape"] = json!([u64::MAX, 2])), tensor(Q), "overflows"),
        ("overflowing bytes", |f| edit_header(f, |h| h[Q]["shape"] = json!([1u64 << 62, 2])), tensor(Q), "overflows"),
        ("negative dimension", |f| edit_header(f, |h| h[Q]["shape"] = json!([-96, 96])), Place::File, Q),
        ("fractional dimension", |f| edit_header(f, |h| h[Q]["shape"] = json!([9.5, 96])), Place::File, Q),
        ("other width", |f| edit_header(f, |h| h[Q]["dtype"] = json!("F32")), tensor(Q), "needs 36864 bytes"),
        (
            "integers",
            |f| edit_header(f, |h| h[Q]["dtype"] = json!("I16")),
            tensor(Q),
            "type I16 is not supported (supported: BF16, F16, F32)",
        ),
        (
            "unknown type",
            |f| edit_header(f, |h| h[Q]["dtype"] = json!("Q4\u{1b}[2J")),
            tensor(Q),
            "type Q4\\u{1b}[2J is not supported",
        ),
        (
            "no offsets",
            |f| edit_header(f, |h| drop(h[Q].as_object_mut().unwrap().remove("data_offsets"))),
            Place::File,
            Q,
        ),
        ("three offsets", |f| edit_header(f, |h| h[Q]["data_offsets"] = json!([0, 1, 2])), Place::File, Q),
        (
            "huge offsets",
            |f| edit_header(f, |h| h[Q]["data_offsets"] = json!([u64::MAX - 1, u64::MAX])),
            tensor(Q),
            "end after",
        ),
        ("offsets backwards", |f| edit_header(f, |h| h[Q]["data_offsets"] = json!([9, 3])), tensor(Q), "run backwards"),
        (
            "overlap",
            |f| {
                edit_header(f, |h| {
                    let begin = h[Q]["data_offsets"][0].as_u64().unwrap();
                    h[Q]["data_offsets"] = json!([begin - 2, begin - 2 + 96 * 96 * 2]);
                });
            },
            tensor(Q),
            "overlap",
        ),
        (
            "gap",
            |f| edit_header(f, |h| drop(h.as_object_mut().unwrap().remove("model.layers.1.mlp.up_proj.weight"))),
            tensor("model.layers.1.mlp.down_proj.weight"),
            "belong to no tensor",
        ),
    ];
    for (what, damage, place, reason) in table {
        let mut files = single();
        damage(&mut files);
        refused(what, files, place, WEIGHTS, reason);
    }
}

fn rename(header: &mut Value, from: &str, to: &str) {
    let map = header.as_object_mut().expect("an object");
    let entry = map.remove(from).expect("a tensor");
    map.insert(to.to_owned(), entry);
}

#[test]
fn configs() {
    let huge = json!(u64::MAX);
    let table: &[(&str, Option<Value>, &str, &str)] = &[
        ("architectures", None, "architectures", "names no architecture"),
        ("architectures", Some(json!([])), "architectures", "names no architecture"),
        ("architectures", Some(json!("LlamaForCausalLM")), "architectures", "needs a list"),
        (
            "architectures",
            Some(json!(["JambaForCausalLM"])),
            "architectures",
            "JambaForCausalLM is not supported; supported: BertModel",
        ),
        ("hidden_size", None, "hidden_size", "is missing"),
        ("hidden_size", Some(json!(0)), "hidden_size", "is 0, needs an integer from 1"),
        ("hidden_size", Some(json!(-96)), "hidden_size", "is -96, needs"),
        ("hidden_size", Some(json!(96.5)), "hidden_size", "is 96.5, needs"),
        ("hidden_size", Some(json!("96")), "hidden_size", "is \"96\", needs"),
        ("hidden_size", Some(huge.clone()), "hidden_size", "needs an integer"),
        ("hidden_size", Some(json!(95)), "head_dim", "is missing"),
        ("intermediate_size", Some(huge.clone()), "intermediate_size", "needs an integer"),
        ("vocab_size", Some(huge.clone()), "vocab_size", "needs an integer"),
        ("num_hidden_layers", Some(json!(1_000_000_000)), "num_hidden_layers", "needs an integer from 1 to 1024"),
        ("num_attention_heads", Some(json!(0)), "num_attention_heads", "is 0"),
        ("num_key_value_heads", Some(json!(4)), "num_key_value_heads", "needs a divisor of num_attention_heads 6"),
        ("head_dim", Some(json!(15)), "head_dim", "needs an even number"),
        ("head_dim", Some(huge.clone()), "head_dim", "needs an integer from 2 to 1024"),
        ("max_position_embeddings", Some(huge), "max_position_embeddings", "needs an integer"),
        ("rms_norm_eps", Some(json!(-1e-6)), "rms_norm_eps", "needs a number from 0 to 1"),
        ("hidden_act", Some(json!("gelu")), "hidden_act", "only \"silu\" is"),
        ("mlp_bias", Some(json!("yes")), "mlp_bias", "needs true or false"),
        ("attention_bias", Some(json!("yes")), "attention_bias", "needs true or false"),
        ("tie_word_embeddings", Some(json!(1)), "tie_word_embeddings", "needs true or false"),
        ("eos_token_id", Some(json!(-1)), "eos_token_id", "needs a token id"),
        ("eos_token_id", Some(json!([1, [2]])), "eos_token_id", "needs a token id"),
        (
            "quantization_config",
            Some(json!({"quant_method": "hqq"})),
            "quantization_config.quant_method",
            "serve the original",
        ),
        ("num_local_experts", Some(json!(8)), "num_local_experts", "no mixture of experts"),
        ("final_logit_softcapping", Some(json!(30.0)), "final_logit_softcapping", "not supported"),
        ("partial_rotary_factor", Some(json!(0.5)), "partial_rotary_factor", "is 0.5"),
        ("rope_theta", Some(json!(0)), "rope_theta", "needs a number from 2"),
        ("rope_scaling", Some(json!("yarn")), "rope_scaling", "needs an object"),
        ("rope_scaling", Some(json!({"type": "linear"})), "rope_scaling.factor", "is missing"),
        (
            "rope_scaling",
            Some(json!({"type": "linear", "factor": 0.5})),
            "rope_scaling.factor",
            "needs a number from 1",
        ),
        (
            "rope_scaling",
            Some(json!({"rope_type": "longrope", "factor": 4})),
            "rope_scaling.short_factor",
            "is missing",
        ),
        (
            "rope_scaling",
            Some(json!({"rope_type": "longrope", "short_factor": [1.0, 1e9], "long_factor": []})),
            "rope_scaling.short_factor",
            "has 1000000000.0, needs numbers from",
        ),
        (
            "rope_scaling",
            Some(json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]})),
            "rope_scaling.short_factor",
            "has 1 factors, needs",
        ),
        (
            "rope_scaling",
            Some(json!({"rope_type": "spiral", "factor": 4})),
            "rope_scaling.rope_type",
            "\"spiral\" is not supported (supported: default",
        ),
        (
            "rope_scaling",
            Some(json!({"rope_type": "llama3", "factor": 8})),
            "rope_scaling.low_freq_factor",
            "is missing",
        ),
        (
            "rope_scaling",
            Some(json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4})),
            "rope_scaling.high_freq_factor",
            "needs more than low_freq_factor 4",
        ),
        (
            "rope_parameters",
            Some(json!({"full_attention": {"rope_theta": 1e6}})),
            "rope_parameters.full_attention",
            "differ between layers",
        ),
        (
            "rope_parameters",
            Some(json!({"partial_rotary_factor": 0.25})),
            "rope_parameters.partial_rotary_factor",
            "is 0.25",
        ),
    ];
    for (name, value, place, reason) in table {
        let mut files = single();
        set(&mut files, CONFIG, name, value.clone());
        refused(&format!("{name} = {value:?}"), files, &field(place), CONFIG, reason);
    }
}

#[test]
fn more_experts_than_a_file_holds_are_refused_before_their_tensors_are_listed() {
    for (architecture, name) in [
        ("Qwen3MoeForCausalLM", "num_experts"),
        ("MixtralForCausalLM", "num_local_experts"),
        ("GptOssForCausalLM", "num_local_experts"),
    ] {
        let mut files = single();
        for (name, value) in [
            ("architectures", json!([architecture])),
            (name, json!(4096)),
            ("num_experts_per_tok", json!(2)),
            ("moe_intermediate_size", json!(32)),
            ("num_hidden_layers", json!(1024)),
        ] {
            set(&mut files, CONFIG, name, Some(value));
        }
        refused(architecture, files, &field(name), CONFIG, "12582912 matrices in 1024 layers, 262144 are the most");
    }
}

#[test]
fn config_text() {
    let table: &[(&[u8], &str)] = &[
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{\"rms_norm_eps\": NaN}", "not valid JSON"),
        (b"{\"rms_norm_eps\": Infinity}", "not valid JSON"),
        (b"{\"rms_norm_eps\": 1e999}", "out of range"),
        (b"{\"a\": \"\xff\"}", "not valid JSON"),
        (&[b'['; 100_000], "recursion limit"),
        (&[b' '; (1 << 20) + 1], "such a file has at most 1048576"),
    ];
    for (text, reason) in table {
        let mut files = single();
        *file(&mut files, CONFIG) = text.to_vec();
        refused(reason, files, &Place::File, CONFIG, reason);
    }
}

#[test]
fn windows_and_heads_that_contradict() {
    let check = |case: &str, changes: &[(&str, Value)], place: &Place, name: &str, reason: &str| {
        let mut files = Golden::named(case).files();
        changes.iter().for_each(|(name, value)| set(&mut files, CONFIG, name, Some(value.clone())));
        refused(&format!("{case} {changes:?}"), files, place, name, reason);
    };
    let layers = field("layer_types");
    let types = |kind: &str| json!([kind, kind, kind]);
    check("qwen3-tied", &[("layer_types", json!(["full_attention"]))], &layers, CONFIG, "1 entries for 3 layers");
    check(
        "qwen3-tied",
        &[("layer_types", types("chunked_attention"))],
        &layers,
        CONFIG,
        "\"chunked_attention\" is not supported",
    );
    check("qwen3-tied", &[("layer_types", types("sliding_attention"))], &layers, CONFIG, "use_sliding_window");
    check(
        "mistral-window",
        &[("layer_types", types("full_attention"))],
        &layers,
        CONFIG,
        "differs from sliding_window",
    );
    check("mistral-window", &[("sliding_window", json!(0))], &field("sliding_window"), CONFIG, "is 0");
    let deepseek = |changes: &[(&str, Value)], name: &str, reason: &str| {
        check("deepseek3-plain", changes, &field(name), CONFIG, reason);
    };
    deepseek(&[("kv_lora_rank", json!(null))], "kv_lora_rank", "is missing");
    deepseek(&[("kv_lora_rank", json!(45))], "kv_lora_rank", "is 45, needs an even number");
    deepseek(&[("kv_lora_rank", json!(1020))], "kv_lora_rank", "is 1020, with qk_rope_head_dim more than 1024");
    deepseek(&[("qk_rope_head_dim", json!(0))], "qk_rope_head_dim", "is 0, needs an integer from 2");
    deepseek(&[("q_lora_rank", json!("40"))], "q_lora_rank", "is \"40\", needs an integer");
    deepseek(&[("scoring_func", json!("softmax"))], "scoring_func", "\"softmax\" is not supported, only sigmoid is");
    deepseek(&[("topk_method", json!("greedy"))], "topk_method", "only noaux_tc is");
    deepseek(&[("n_group", json!(5))], "n_group", "is 5, needs groups of equal size, 2 or more, of 12 experts");
    deepseek(&[("n_group", json!(12))], "n_group", "is 12, needs groups of equal size, 2 or more");
    deepseek(&[("topk_group", json!(5))], "topk_group", "is 5, needs an integer from 1 to 4");
    deepseek(&[("num_experts_per_tok", json!(7))], "topk_group", "is 2: 6 experts, from which 7 are chosen");
    deepseek(&[("num_experts", json!(13))], "num_experts", "is 13, and n_routed_experts is 12");
    let other = json!({"quant_method": "fp8", "fmt": "e5m2"});
    deepseek(&[("quantization_config", other)], "quantization_config.fmt", "serve the original");
    let divided = [("norm_topk_prob", json!(true))];
    check("deepseek2-plain", &divided, &field("norm_topk_prob"), CONFIG, "implementations of DeepSeek-V2 disagree");
    let (tied, head) = ([("tie_word_embeddings", json!(true))], tensor("lm_head.weight"));
    check("llama-plain", &tied, &head, WEIGHTS, "differs from model.embed_tokens.weight");
    let untied = [("tie_word_embeddings", json!(false))];
    check("qwen3-tied", &untied, &head, WEIGHTS, "must say tie_word_embeddings: true");
    // A checkpoint of another family lacks its tensors.
    let qwen = [("architectures", json!(["Qwen3ForCausalLM"])), ("head_dim", json!(16))];
    check("llama-plain", &qwen, &tensor("model.layers.0.self_attn.q_norm.weight"), WEIGHTS, "is missing (shape [16])");
}

#[test]
fn a_tied_head_may_be_stored_again() {
    let mut golden = Golden::named("qwen3-tied");
    let mut files = golden.files();
    let embedding = golden.tensors.remove(0);
    assert_eq!(embedding.0, "model.embed_tokens.weight");
    let bytes = file(&mut files, WEIGHTS).clone();
    let entries = penstock_engine::checkpoint::safetensors::read_header(WEIGHTS, &bytes).expect("a header");
    let mut tensors: Vec<Tensor> = entries
        .iter()
        .map(|e| Tensor {
            name: e.name.clone(),
            dtype: "BF16",
            shape: e.shape.clone(),
            bytes: bytes[e.range.clone()].to_vec(),
        })
        .collect();
    let copy = tensors.iter().find(|t| t.name == embedding.0).expect("the embedding").bytes.clone();
    tensors.push(Tensor { name: "lm_head.weight".into(), dtype: "BF16", shape: embedding.1, bytes: copy });
    tensors.push(Tensor { name: "rotary_emb.inv_freq".into(), dtype: "F64", shape: vec![2, 1, 1], bytes: vec![0; 16] });
    *file(&mut files, WEIGHTS) = write_safetensors(&tensors);
    let checkpoint = Checkpoint::from_buffers(files).expect("an identical head is fine");
    assert_eq!(checkpoint.ignored(), ["lm_head.weight", "rotary_emb.inv_freq"]);
}

#[test]
fn indexes() {
    const Q: &str = "model.layers.1.self_attn.q_proj.weight";
    let path = format!("weight_map/{Q}");
    for outside in
        ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "config.json", "a\\b.safetensors", ""]
    {
        let mut files = sharded();
        set(&mut files, INDEX, &path, Some(json!(outside)));
        refused(outside, files, &tensor(Q), INDEX, "is not a .safetensors file of this folder");
    }
    let check = |change: Option<Value>, path: &str, place: &Place, name: &str, reason: &str| {
        let mut files = sharded();
        set(&mut files, INDEX, path, change);
        refused(reason, files, place, name, reason);
    };
    check(None, &path, &tensor(Q), INDEX, "is missing");
    let other = "model-00004-of-00004.safetensors";
    check(Some(json!(other)), &path, &tensor(Q), other, "is missing");
    let gone = "model-00009-of-00004.safetensors";
    check(Some(json!(gone)), &path, &Place::File, gone, "is missing, though");
    check(Some(json!({})), "weight_map", &field("weight_map"), INDEX, "is empty");
    check(Some(json!([1])), "weight_map", &Place::File, INDEX, "not a valid index");
    check(Some(json!({"a": 1})), "weight_map", &Place::File, INDEX, "not a valid index");
    check(None, "weight_map", &Place::File, INDEX, "not a valid index");
}

#[test]
fn generation_configs() {
    const NAME: &str = "generation_config.json";
    for (text, place) in [
        (r#"{"temperature": -1}"#, "temperature"),
        (r#"{"temperature": "hot"}"#, "temperature"),
        (r#"{"top_p": 1.5}"#, "top_p"),
        (r#"{"top_k": -2}"#, "top_k"),
        (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
        (r#"{"do_sample": "no"}"#, "do_sample"),
        (r#"{"eos_token_id": "</s>"}"#, "eos_token_id"),
    ] {
        let mut files = single();
        files.push((NAME.into(), text.as_bytes().to_vec().into()));
        refused(text, files, &field(place), NAME, place);
    }
    let mut files = single();
    let good =
        r#"{"temperature": 0.6, "top_p": 0.95, "top_k": -1, "repetition_penalty": null, "eos_token_id": [7, 3, 7]}"#;
    files.push((NAME.into(), good.as_bytes().into()));
    let checkpoint = Checkpoint::from_buffers(files).expect("opens");
    let generation = checkpoint.generation();
    assert_eq!((generation.temperature, generation.top_p, generation.top_k), (Some(0.6), Some(0.95), Some(0)));
    assert_eq!((generation.repetition_penalty, generation.do_sample), (None, None));
    assert_eq!(checkpoint.eos_token_ids(), [3, 7]);
}

/// A folder that is removed at the end of the test.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, files: &Files) -> Self {
        let folder = std::env::temp_dir().join(format!("penstock-checkpoint-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        files.iter().for_each(|(name, bytes)| fs::write(folder.join(name), bytes).expect("a file"));
        Self(folder)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[track_caller]
fn refused_folder(folder: &Path, reason: &str) {
    let error = Checkpoint::open(folder).expect_err("it is refused").to_string();
    assert!(error.contains(reason), "\"{error}\" does not say \"{reason}\"");
}

#[test]
fn folders() {
    let good = Temporary::new("good", &sharded());
    let opened = Checkpoint::open(&good.0).expect("opens from disk");
    assert_eq!(opened.model_hash(), Checkpoint::from_buffers(sharded()).expect("opens").model_hash());
    refused_folder(&good.0.join("none"), "cannot be opened");
    refused_folder(&good.0.join(CONFIG), "is not a folder (give the folder that holds config.json");

    let empty = Temporary::new("empty", &vec![]);
    refused_folder(&empty.0, "config.json: is missing");
    let mut torch = single();
    torch.retain(|(name, _)| name == CONFIG);
    torch.push(("pytorch_model.bin".into(), vec![0].into()));
    refused_folder(&Temporary::new("torch", &torch).0, "only safetensors are read: convert");
    let mut hollow = single();
    file(&mut hollow, WEIGHTS).clear();
    refused_folder(&Temporary::new("hollow", &hollow).0, "model.safetensors: is empty");
}

#[cfg(unix)]
#[test]
fn links_and_special_files() {
    use std::os::unix::fs::symlink;
    let outside = Temporary::new("outside", &single());
    let inside = Temporary::new("inside", &single());
    fs::remove_file(inside.0.join(WEIGHTS)).expect("removed");
    symlink(outside.0.join(WEIGHTS), inside.0.join(WEIGHTS)).expect("a link");
    refused_folder(&inside.0, "outside of the folder (copy the file into the folder)");
    fs::remove_file(inside.0.join(WEIGHTS)).expect("removed");
    fs::create_dir(inside.0.join(WEIGHTS)).expect("a folder");
    refused_folder(&inside.0, "is not a regular file");
    fs::remove_dir(inside.0.join(WEIGHTS)).expect("removed");
    symlink("/dev/zero", inside.0.join(WEIGHTS)).expect("a link");
    refused_folder(&inside.0, "outside of the folder");
    fs::remove_file(inside.0.join(CONFIG)).expect("removed");
    symlink("missing.json", inside.0.join(CONFIG)).expect("a link");
    refused_folder(&inside.0, "config.json: cannot be opened");

    // The layout of a hub cache: snapshots of links into a folder of blobs.
    let cache = Temporary::new("cache", &vec![]);
    let (snapshot, blobs) = (cache.0.join("snapshots/1"), cache.0.join("blobs"));
    fs::create_dir_all(&snapshot).expect("a folder");
    fs::create_dir_all(&blobs).expect("a folder");
    for (number, (name, bytes)) in single().iter().enumerate() {
        fs::write(blobs.join(number.to_string()), bytes).expect("a file");
        symlink(format!("../../blobs/{number}"), snapshot.join(name)).expect("a link");
    }
    Checkpoint::open(&snapshot).expect("a hub cache opens");
}
