//! Checkpoints whose scales lie in tensors of their own: what is held, what they are called, and what is refused before a weight is read.

use std::collections::BTreeSet;

use crate::common;

use common::weights::{Golden, Tensor, write_safetensors};
use common::{cpu, cpu_paths, load, logits_of, reference};
use penstock_engine::Forward;
use penstock_engine::checkpoint::{Checkpoint, LayerNames, Place, Quantization, Scales};
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_kernels::cpu::{CpuDevice, Path as CpuPath};
use penstock_kernels::{DType, Held, KvFormat, Limits};
use serde_json::{Value, json};

const CASES: [(&str, &str); 13] = [
    ("deepseek3-fp8-blocks", "bf16+fp8"),
    ("llama-fp8-static", "bf16+fp8"),
    ("llama-gptq4-order", "f16+gptq4"),
    ("llama-packed4", "bf16+packed4"),
    ("llama-w8a8", "bf16+w8a8"),
    ("mistral-awq4", "f16+awq4"),
    ("mistral-fp8-rows", "bf16+fp8"),
    ("phi3-awq4-fused", "bf16+awq4"),
    ("qwen2-gptq8-whole", "bf16+gptq8"),
    ("qwen2-packed4-order", "bf16+packed4"),
    ("qwen3-fp8-blocks", "bf16+fp8"),
    ("qwen3-packed8-rows", "bf16+packed8"),
    ("qwen3moe-gptq4", "bf16+gptq4"),
];

/// Opens a case whose config and tensors are changed.
fn open(
    case: &str,
    config: impl FnOnce(&mut Value),
    tensors: impl FnOnce(&mut Vec<Tensor>),
) -> Result<Checkpoint, penstock_engine::checkpoint::CheckpointError> {
    let mut golden = Golden::named(case);
    let mut stored = golden.stored();
    config(&mut golden.config["quantization_config"]);
    tensors(&mut stored);
    let config = serde_json::to_vec(&golden.config).expect("json");
    let files = vec![
        ("config.json".to_owned(), config.into()),
        ("model.safetensors".to_owned(), write_safetensors(&stored).into()),
    ];
    Checkpoint::from_buffers(files)
}

#[test]
fn forms_are_named_and_counted_as_they_are_held() {
    for (case, format) in CASES {
        let golden = Golden::named(case);
        let checkpoint = golden.checkpoint();
        assert_eq!(checkpoint.weight_format(), format, "{case}");
        assert!(checkpoint.ignored().iter().all(|name| name.ends_with(".input_scale")), "{:?}", checkpoint.ignored());
        // What is checked, and not read again: shapes, and groups that are runs of columns.
        let is_read = |tensor: &&Tensor| {
            let of_runs = tensor.name.ends_with("g_idx") && !case.ends_with("order");
            !of_runs && !tensor.name.ends_with(".weight_shape") && !tensor.name.ends_with(".input_scale")
        };
        let read: usize = golden.stored().iter().filter(is_read).map(|tensor| tensor.bytes.len()).sum();
        // Parts of fused matrices have whole bytes of what is theirs.
        let lost = read as u64 - checkpoint.weights_bytes();
        assert!(lost == 0 || (lost < 32 && checkpoint.config().layer_names != LayerNames::PLAIN), "{case}: {lost}");
        let is_rounded = checkpoint.rounded_bytes(DType::Bf16) > 0;
        assert_eq!(is_rounded, case != "llama-w8a8", "{case}: integers stay as they are");
        let model = load(&checkpoint, &*cpu(CpuPath::Portable, 1), 4, 8);
        let numerics = model.geometry().numerics;
        assert!(numerics.ends_with(&format!("/{format}")), "{case}: {numerics}");
    }
}

#[test]
fn the_plan_counts_codes_or_a_byte_a_weight() {
    let held = |case: &str, held| Golden::named(case).checkpoint().held_bytes(held);
    // 96 inputs; outputs in panels of 32, of which each has `of_panel(columns)` bytes.
    let matrices = |of_panel: &dyn Fn(u64) -> u64| {
        let rows = |rows: u64, columns: u64| rows / 32 * of_panel(columns);
        3 * (rows(96, 96) + 2 * rows(32, 96) + rows(96, 96) + 2 * rows(160, 96) + rows(96, 160))
    };
    let all = |case| [Held::Stored, Held::Int8].map(|as_held| held(case, as_held));
    let table = CpuDevice::held_bytes(DType::Bf16, Held::Stored, 203, 96);
    let [stored, int8] = all("llama-packed4");
    let vectors = 4 * (7 * 96);
    // A scale of 4 bytes and a zero point of one for each row and group of 32 columns, and a line of flags.
    let codes = |columns: u64| (16 * columns + columns / 32 * 32 * 5).next_multiple_of(64) + 64;
    assert_eq!(stored, matrices(&codes) + 2 * table + vectors);
    // Eight bits take more than four.
    assert!(int8 - table / 2 > stored - table && int8 < stored * 2);
    // Codes of 4 bits stay where 4 bits are asked for; of the tables only the head is rounded, to 8 bits.
    let head = |held| CpuDevice::held_bytes(DType::Bf16, held, 203, 96);
    assert_eq!(stored - held("llama-packed4", Held::Int4), table - head(Held::Int8Blocks));
    // Integers are held as they are stored, whatever is asked for; only the head differs.
    let [stored, int8] = all("llama-w8a8");
    let biases = 4 * 3 * (96 + 2 * 32 + 96);
    assert_eq!(stored, matrices(&|columns| 32 * (columns + 4)) + 2 * table + vectors + biases);
    assert_eq!(stored - int8, table - head(Held::Int8));
    // But they are rounded where 4 bits are asked for: half a byte, and two bytes for each 32 weights.
    let rounded = matrices(&|columns| 32 * (columns / 2 + columns / 16));
    assert_eq!(held("llama-w8a8", Held::Int4), rounded + table + head(Held::Int8Blocks) + vectors + biases);
}

/// The checkpoint of a case with the values of its quantized matrices in the place of their codes, in f32.
fn in_plain_numbers(golden: &Golden) -> Checkpoint {
    let checkpoint = golden.checkpoint();
    let mut config = golden.config.clone();
    config.as_object_mut().expect("an object").remove("quantization_config");
    let mut tensors = golden.stored();
    tensors.retain(|tensor| !golden.stored.contains_key(&tensor.name));
    let modules: BTreeSet<&str> =
        golden.stored.keys().filter_map(|name| name.rsplit_once('.')).map(|(module, _)| module).collect();
    for module in modules {
        // Parts of fused matrices have names of their own.
        let parts = match module.rsplit_once('.') {
            Some((block, "qkv_proj")) => ["q_proj", "k_proj", "v_proj"].map(|part| format!("{block}.{part}")).to_vec(),
            Some((block, "gate_up_proj")) => ["gate_proj", "up_proj"].map(|part| format!("{block}.{part}")).to_vec(),
            _ => vec![module.to_owned()],
        };
        let (mut rows, mut columns, mut bytes) = (0, 0, Vec::new());
        for part in parts {
            let name = format!("{part}.weight");
            let tensor = checkpoint.tensor(&name);
            let host = tensor.host();
            let mut values = vec![0.0; host.shape[0] * host.shape[1]];
            host.reader.expect("a quantized matrix").read(0, &mut values);
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            (rows, columns) = (rows + host.shape[0], host.shape[1]);
        }
        tensors.push(Tensor { name: format!("{module}.weight"), dtype: "F32", shape: vec![rows, columns], bytes });
    }
    let config = serde_json::to_vec(&config).expect("json");
    let files = vec![
        ("config.json".to_owned(), config.into()),
        ("model.safetensors".to_owned(), write_safetensors(&tensors).into()),
    ];
    Checkpoint::from_buffers(files).expect("a checkpoint of plain numbers")
}

#[test]
fn models_held_as_codes_have_the_bits_of_those_held_in_bf16() {
    for (case, format) in CASES.into_iter().filter(|(case, _)| *case != "llama-w8a8") {
        let golden = Golden::named(case);
        let (codes, plain) = (golden.checkpoint(), in_plain_numbers(&golden));
        let [held, of_plain] = [&codes, &plain].map(|checkpoint| checkpoint.held_bytes(Held::Stored));
        assert!(held < of_plain * 9 / 10, "{case}: {held} bytes, {of_plain} in bf16");
        for (path, make) in cpu_paths() {
            let logits = |checkpoint: &Checkpoint, chunk: usize| {
                let mut model = load(checkpoint, &*make, 8, 120);
                let tokens = &golden.tokens[..golden.tokens.len().min(if chunk == 1 { 12 } else { 120 })];
                let logits = logits_of(&mut model, tokens, chunk);
                logits.into_iter().flatten().map(f32::to_bits).collect::<Vec<_>>()
            };
            for chunk in [120, 19, 1] {
                assert!(logits(&codes, chunk) == logits(&plain, chunk), "{case} ({format}), {path}, chunks of {chunk}");
            }
        }
    }
}

#[test]
fn int8_on_top_is_near() {
    for case in ["llama-gptq4-order", "mistral-awq4", "qwen3-fp8-blocks", "qwen2-packed4-order", "llama-w8a8"] {
        let golden = Golden::named(case);
        let checkpoint = golden.checkpoint();
        let logits = |held| {
            let limits = Limits { rows_max: 120, sampled_max: 120 };
            let model_limits = ModelLimits {
                context_tokens: None,
                kv: KvBudget::Pages(8),
                rows_max: 120,
                sampled_max: 120,
                held,
                kv_format: KvFormat::Own,
            };
            let device = cpu(CpuPath::Portable, 2)(limits);
            let mut model = Model::load(&checkpoint, device, model_limits, &mut |_| {}).expect("it loads");
            logits_of(&mut model, &golden.tokens, 120)
        };
        let (stored, int8) = (logits(Held::Stored), logits(Held::Int8));
        let mean = |rows: &[Vec<f32>]| {
            let all: Vec<f32> =
                rows.iter().zip(&stored).flat_map(|(a, b)| a.iter().zip(b).map(|(a, b)| (a - b).abs())).collect();
            all.iter().sum::<f32>() / all.len() as f32
        };
        let distance = mean(&int8);
        assert!(distance > 0.0 && distance < 0.4, "{case}: {distance}");
    }
}

#[test]
fn a_change_of_a_scale_or_a_zero_point_changes_the_hash() {
    for (case, kind) in [("mistral-awq4", ".qzeros"), ("mistral-awq4", ".scales"), ("llama-gptq4-order", ".g_idx")] {
        let hash = |changed: bool| {
            let change = |tensors: &mut Vec<Tensor>| {
                let tensor = tensors.iter_mut().find(|tensor| tensor.name.ends_with(kind)).expect("a tensor");
                // Two groups of columns change places; a zero point or a scale becomes another.
                if changed && kind == ".g_idx" {
                    tensor.bytes.as_chunks_mut::<4>().0.reverse();
                } else if changed {
                    tensor.bytes[0] ^= 1;
                }
            };
            open(case, |_| (), change).expect("it opens").model_hash()
        };
        assert_ne!(hash(false), hash(true), "{case} {kind}");
        assert_eq!(hash(false), Golden::named(case).checkpoint().model_hash());
    }
}

#[test]
fn a_matrix_whose_columns_are_not_ordered_has_runs_as_groups() {
    let hash = |group: fn(usize) -> i32| {
        let change = |tensors: &mut Vec<Tensor>| {
            for tensor in tensors.iter_mut().filter(|tensor| tensor.name.ends_with(".weight_g_idx")) {
                let values = tensor.bytes.as_chunks_mut::<4>().0.iter_mut();
                values.enumerate().for_each(|(column, value)| *value = group(column).to_le_bytes());
            }
        };
        open("qwen2-packed4-order", |_| (), change).expect("it opens").model_hash()
    };
    let runs = hash(|column| column as i32 / 32);
    assert_eq!(hash(|_| -1), runs, "-1 is what compressed-tensors writes");
    assert_ne!(Golden::named("qwen2-packed4-order").checkpoint().model_hash(), runs);
}

/// Logits of `llama-gptq4-order` with another version's name and with all zero points stored as `zeros`.
fn gptq_logits(version: &str, zeros: u8) -> Vec<Vec<f32>> {
    let checkpoint = open(
        "llama-gptq4-order",
        |q| q["checkpoint_format"] = json!(version),
        |tensors| {
            let all = tensors.iter_mut().filter(|tensor| tensor.name.ends_with(".qzeros"));
            all.for_each(|tensor| tensor.bytes.fill(zeros));
        },
    );
    let mut model = load(&checkpoint.expect("a checkpoint"), &reference, 4, 8);
    logits_of(&mut model, &[1, 2, 3, 4, 5], 8)
}

#[test]
fn middles_of_the_second_version_are_taken_for_what_they_are_under_the_name_of_the_first() {
    let expected = gptq_logits("gptq_v2", 0x88);
    assert_eq!(gptq_logits("gptq", 0x88), expected, "written by a tool that leaves the first version's name");
    assert_eq!(gptq_logits("gptq", 0x77), expected, "the first version's own middle");
    assert_ne!(gptq_logits("gptq_v2", 0x77), expected);
    assert_eq!(gptq_logits("gptq", 0xff), gptq_logits("gptq_v2", 0x00), "the addition stays in the range of codes");
}

#[test]
fn configs_say_the_form() {
    let form = |case: &str, change: fn(&mut Value)| {
        open(case, change, |_| ()).expect("it opens").config().quantization.expect("quantized")
    };
    let gptq = |bits, group, zero_offset| Quantization::Gptq { bits, group, zero_offset };
    assert_eq!(form("llama-gptq4-order", |_| ()), gptq(4, Some(32), 1));
    assert_eq!(form("qwen2-gptq8-whole", |_| ()), gptq(8, None, 0));
    let renamed = |q: &mut Value| {
        q["format"] = q["checkpoint_format"].take();
        q["pack_dtype"] = json!("int32");
    };
    assert_eq!(form("qwen2-gptq8-whole", renamed), gptq(8, None, 0));
    let blocks = |sizes, inverse_name| Quantization::Float8 { scales: Scales::Blocks(sizes), inverse_name };
    assert_eq!(form("deepseek3-fp8-blocks", |_| ()), blocks([128, 32], true));
    let integers = |rounds_activations| Quantization::Int8 { scales: Scales::Whole, rounds_activations };
    assert_eq!(form("llama-w8a8", |_| ()), integers(true));
    let weights_alone = |q: &mut Value| q["config_groups"]["group_0"]["input_activations"] = json!(null);
    assert_eq!(form("llama-w8a8", weights_alone), integers(false));
    // The format of a group goes before that of all.
    let inner = |q: &mut Value| {
        q["config_groups"]["group_0"]["format"] = q["format"].take();
    };
    assert_eq!(form("llama-w8a8", inner), integers(true));
}

#[test]
fn what_is_not_read_is_refused_by_its_field() {
    fn group<'a>(q: &'a mut Value, part: &str) -> &'a mut Value {
        &mut q["config_groups"]["group_0"][part]
    }
    type Change = fn(&mut Value);
    let table: [(&str, &str, &str, Change); 38] = [
        ("llama-gptq4-order", "quant_method", "\"bitsandbytes\" is not supported", |q| {
            q["quant_method"] = json!("bitsandbytes")
        }),
        ("llama-gptq4-order", "quant_method", "is missing", |q| q["quant_method"] = json!(null)),
        ("llama-gptq4-order", "bits", "is 3, supported: 4, 8", |q| q["bits"] = json!(3)),
        ("llama-gptq4-order", "bits", "is missing", |q| q["bits"] = json!(null)),
        ("llama-gptq4-order", "bits", "needs an integer", |q| q["bits"] = json!("4")),
        ("llama-gptq4-order", "group_size", "is 48, needs a multiple of 32", |q| q["group_size"] = json!(48)),
        ("llama-gptq4-order", "group_size", "is 0, needs an integer", |q| q["group_size"] = json!(0)),
        ("llama-gptq4-order", "group_size", "is -2, needs an integer", |q| q["group_size"] = json!(-2)),
        ("llama-gptq4-order", "group_size", "is missing", |q| q["group_size"] = json!(null)),
        ("llama-gptq4-order", "checkpoint_format", "\"marlin\" is not supported", |q| {
            q["checkpoint_format"] = json!("marlin")
        }),
        ("llama-gptq4-order", "format", "\"bitblas\" is not supported", |q| q["format"] = json!("bitblas")),
        ("llama-gptq4-order", "pack_dtype", "\"int16\" is not supported", |q| q["pack_dtype"] = json!("int16")),
        ("llama-gptq4-order", "is_marlin_format", "Marlin's order", |q| q["is_marlin_format"] = json!(true)),
        ("llama-gptq4-order", "dynamic.+:.*down", "differ between modules", |q| {
            q["dynamic"] = json!({"+:.*down": {"bits": 8}})
        }),
        ("llama-gptq4-order", "adapter", "is not supported", |q| q["adapter"] = json!({"rank": 8})),
        ("mistral-awq4", "version", "\"gemv\" is not supported, only gemm", |q| q["version"] = json!("gemv")),
        ("mistral-awq4", "bits", "is 8, supported: 4", |q| q["bits"] = json!(8)),
        ("mistral-awq4", "zero_point", "is false", |q| q["zero_point"] = json!(false)),
        ("qwen3-fp8-blocks", "fmt", "\"e5m2\" is not supported", |q| q["fmt"] = json!("e5m2")),
        ("qwen3-fp8-blocks", "activation_scheme", "\"block\" is not supported", |q| {
            q["activation_scheme"] = json!("block")
        }),
        ("qwen3-fp8-blocks", "weight_block_size", "is a list of 1, needs two sizes", |q| {
            q["weight_block_size"] = json!([128])
        }),
        ("qwen3-fp8-blocks", "weight_block_size", "needs two sizes", |q| q["weight_block_size"] = json!([128, 0])),
        ("qwen3-fp8-blocks", "weight_block_size", "is 128, needs two sizes", |q| q["weight_block_size"] = json!(128)),
        ("llama-packed4", "config_groups", "is missing", |q| q["config_groups"] = json!(null)),
        ("llama-packed4", "config_groups", "has 0 groups", |q| q["config_groups"] = json!({})),
        ("llama-packed4", "config_groups", "has 2 groups", |q| q["config_groups"]["group_1"] = json!({})),
        ("llama-packed4", "format", "\"nvfp4-pack-quantized\" is not supported", |q| {
            q["format"] = json!("nvfp4-pack-quantized")
        }),
        ("llama-packed4", "kv_cache_scheme", "is not supported", |q| q["kv_cache_scheme"] = json!({"num_bits": 8})),
        ("llama-packed4", "sparsity_config.format", "\"sparse-24-bitmask\" is not", |q| {
            q["sparsity_config"] = json!({"format": "sparse-24-bitmask"})
        }),
        ("llama-packed4", "transform_config.config_groups", "transforms", |q| {
            q["transform_config"] = json!({"config_groups": {"R1": {}}})
        }),
        ("llama-packed4", "config_groups.group_0.weights.num_bits", "is 2, supported", |q| {
            group(q, "weights")["num_bits"] = json!(2)
        }),
        ("llama-packed4", "config_groups.group_0.weights.type", "\"float\" is not", |q| {
            group(q, "weights")["type"] = json!("float")
        }),
        ("llama-packed4", "config_groups.group_0.weights.strategy", "\"block\" is not", |q| {
            group(q, "weights")["strategy"] = json!("block")
        }),
        ("llama-packed4", "config_groups.group_0.input_activations", "is not supported", |q| {
            *group(q, "input_activations") = json!({"num_bits": 8})
        }),
        ("llama-w8a8", "config_groups.group_0.input_activations.dynamic", "fixed scales", |q| {
            group(q, "input_activations")["dynamic"] = json!(false)
        }),
        ("llama-w8a8", "config_groups.group_0.input_activations.strategy", "\"tensor\" is not", |q| {
            group(q, "input_activations")["strategy"] = json!("tensor")
        }),
        ("llama-w8a8", "config_groups.group_0.weights.symmetric", "is false", |q| {
            group(q, "weights")["symmetric"] = json!(false)
        }),
        ("llama-w8a8", "config_groups.group_0.output_activations", "is not supported", |q| {
            *group(q, "output_activations") = json!({})
        }),
    ];
    for (case, name, reason, change) in table {
        let error = open(case, change, |_| ()).map(|_| ()).expect_err(reason);
        assert_eq!(error.at, Place::Field(format!("quantization_config.{name}")), "{error}");
        assert_eq!(error.file, "config.json");
        assert!(error.to_string().contains(reason), "{error}; expected {reason}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    fn named<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
        let name = format!("model.layers.1.{name}");
        tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor")
    }
    type Change = fn(&mut Vec<Tensor>);
    let table: [(&str, &str, &str, Change); 18] = [
        ("llama-gptq4-order", "self_attn.q_proj.qzeros", "is missing (shape [3, 12])", |t| {
            named(t, "self_attn.q_proj.qzeros").name.push('x');
        }),
        ("llama-gptq4-order", "self_attn.q_proj.scales", "is missing (shape [3, 96])", |t| {
            named(t, "self_attn.q_proj.scales").name.push('x');
        }),
        ("llama-gptq4-order", "self_attn.q_proj.weight", "is missing (shape [96, 96])", |t| {
            named(t, "self_attn.q_proj.qweight").name.push('x');
        }),
        ("llama-gptq4-order", "mlp.down_proj.qweight", "shape [96, 20], config.json needs [20, 96]", |t| {
            named(t, "mlp.down_proj.qweight").shape.reverse();
        }),
        ("llama-gptq4-order", "mlp.down_proj.qweight", "type f32, quantization_config needs I32", |t| {
            named(t, "mlp.down_proj.qweight").dtype = "F32";
        }),
        ("llama-gptq4-order", "mlp.down_proj.scales", "type I16 is not supported", |t| {
            named(t, "mlp.down_proj.scales").dtype = "I16";
        }),
        ("llama-gptq4-order", "mlp.down_proj.g_idx", "column 7 is said to be in group 5; there are 5", |t| {
            named(t, "mlp.down_proj.g_idx").bytes[28] = 5;
        }),
        ("llama-gptq4-order", "mlp.down_proj.g_idx", "column 159 is said to be in group -1", |t| {
            named(t, "mlp.down_proj.g_idx").bytes[636..].fill(255);
        }),
        ("llama-gptq4-order", "mlp.down_proj.g_idx", "shape [80, 2], config.json needs [160]", |t| {
            named(t, "mlp.down_proj.g_idx").shape = vec![80, 2];
        }),
        ("mistral-awq4", "mlp.up_proj.qzeros", "shape [20, 3], config.json needs [3, 20]", |t| {
            named(t, "mlp.up_proj.qzeros").shape.reverse();
        }),
        ("qwen3-fp8-blocks", "mlp.up_proj.weight_scale_inv", "shape [2, 5], config.json needs [5, 2]", |t| {
            named(t, "mlp.up_proj.weight_scale_inv").shape.reverse();
        }),
        ("qwen3-fp8-blocks", "mlp.up_proj.weight_scale", "is missing (shape [5, 2])", |t| {
            named(t, "mlp.up_proj.weight_scale_inv").name.push('x');
        }),
        ("qwen3-fp8-blocks", "mlp.up_proj.weight", "type F8_E5M2, quantization_config needs F8_E4M3", |t| {
            named(t, "mlp.up_proj.weight").dtype = "F8_E5M2";
        }),
        ("mistral-fp8-rows", "self_attn.k_proj.weight_scale", "shape [16, 2], needs [1], [32] or [32, 1]", |t| {
            named(t, "self_attn.k_proj.weight_scale").shape = vec![16, 2];
        }),
        ("qwen3-packed8-rows", "mlp.down_proj.weight_shape", "is [96, 140], config.json needs [96, 141]", |t| {
            named(t, "mlp.down_proj.weight_shape").bytes[8] = 140;
        }),
        ("qwen3-packed8-rows", "mlp.up_proj.weight_zero_point", "is missing (shape [36, 1])", |t| {
            named(t, "mlp.up_proj.weight_zero_point").name.push('x');
        }),
        ("qwen2-packed4-order", "mlp.down_proj.weight_g_idx", "is said to be in group 200", |t| {
            named(t, "mlp.down_proj.weight_g_idx").bytes[0] = 200;
        }),
        ("llama-w8a8", "mlp.down_proj.weight", "type U8, quantization_config needs I8", |t| {
            named(t, "mlp.down_proj.weight").dtype = "U8";
        }),
    ];
    for (case, name, reason, change) in table {
        let error = open(case, |_| (), change).map(|_| ()).expect_err(reason);
        assert_eq!(error.at, Place::Tensor(format!("model.layers.1.{name}")), "{error}");
        assert!(error.to_string().contains(reason), "{error}; expected {reason}");
    }
}

#[test]
fn sizes_that_are_not_whole_are_refused() {
    let refused = |case: &str, change: fn(&mut Value), reason: &str| {
        let error = open(case, change, |_| ()).map(|_| ()).expect_err(reason).to_string();
        assert!(error.contains(reason), "{error}; expected {reason}");
    };
    refused(
        "llama-gptq4-order",
        |q| q["group_size"] = json!(64),
        "q_proj.qweight: 96 columns are not whole groups of 64",
    );
    refused(
        "mistral-awq4",
        |q| q["group_size"] = json!(64),
        "qweight: 96 columns are not whole groups of 64 (group_size)",
    );
    // A config that does not say what is stored.
    let mut golden = Golden::named("llama-gptq4-order");
    golden.config.as_object_mut().expect("an object").remove("quantization_config");
    let error = Checkpoint::from_buffers(golden.files()).map(|_| ()).expect_err("a refusal").to_string();
    assert!(error.contains("q_proj.weight: is missing") && error.contains("must say quantization_config"), "{error}");
    let mut golden = Golden::named("qwen3-fp8-blocks");
    golden.config.as_object_mut().expect("an object").remove("quantization_config");
    let error = Checkpoint::from_buffers(golden.files()).map(|_| ()).expect_err("a refusal").to_string();
    assert!(error.contains("q_proj.weight: type F8_E4M3 is not supported"), "{error}");
    // A head of words beside the embedding that is said to be the head.
    let mut golden = Golden::named("llama-packed4");
    golden.config["tie_word_embeddings"] = json!(true);
    golden.tensors.retain(|(name, _)| name != "lm_head.weight");
    let mut stored = golden.stored();
    let head = Tensor { name: "lm_head.weight_packed".into(), ..stored[1].clone() };
    stored.push(head);
    let config = serde_json::to_vec(&golden.config).expect("json");
    let files = vec![
        ("config.json".to_owned(), config.into()),
        ("model.safetensors".to_owned(), write_safetensors(&stored).into()),
    ];
    let error = Checkpoint::from_buffers(files).map(|_| ()).expect_err("a refusal").to_string();
    assert!(error.contains("lm_head.weight_packed: is there, though config.json says tie_word_embeddings"), "{error}");
}

#[test]
fn codes_that_are_no_numbers_stay_in_their_rows() {
    // A NaN among the codes of one row: every logit that reads it is NaN, and nothing panics.
    let checkpoint = open(
        "llama-fp8-static",
        |_| (),
        |tensors| {
            let head = tensors.iter_mut().find(|tensor| tensor.name == "model.layers.0.mlp.up_proj.weight");
            head.expect("a tensor").bytes[5] = 0x7f;
        },
    );
    let mut model = load(&checkpoint.expect("it opens"), &reference, 4, 8);
    assert!(logits_of(&mut model, &[1, 2, 3], 3).iter().flatten().any(|logit| logit.is_nan()));
}
