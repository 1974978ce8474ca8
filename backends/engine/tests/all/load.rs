//! Loading: limits, contexts, progress, numerics, and refused batches.

use crate::common;

use common::weights::{Golden, Tensor, write_safetensors};
use common::{cpu, load, load_as, load_with, logits_of, reference};
use penstock_engine::Forward;
use penstock_engine::checkpoint::{Checkpoint, EmbeddingScale, ModelConfig, RopeScaling};
use penstock_engine::models::{KvBudget, LoadError, Model, ModelLimits};
use penstock_kernels::cpu::Path as CpuPath;
use penstock_kernels::{Activation, Held, KernelError, KvFormat, Limits, PAGE_TOKENS, Span, StepBatch};
use serde_json::json;

fn config(case: &str) -> ModelConfig {
    Golden::named(case).checkpoint().config().clone()
}

fn try_load(checkpoint: &Checkpoint, kv: KvBudget, context_tokens: Option<usize>) -> Result<Model, LoadError> {
    let limits =
        ModelLimits { context_tokens, kv, rows_max: 8, sampled_max: 8, held: Held::Stored, kv_format: KvFormat::Own };
    Model::load(checkpoint, reference(Limits { rows_max: 8, sampled_max: 8 }), limits, &mut |_| {})
}

#[test]
fn progress_counts_every_byte_once() {
    progress_of("llama-llama3-bias");
    // One tensor is two weights there.
    progress_of("deepseek3-plain");
}

fn progress_of(case: &str) {
    let checkpoint = Golden::named(case).checkpoint();
    let (mut done, mut tensors) = (0, Vec::new());
    let limits = ModelLimits {
        context_tokens: None,
        kv: KvBudget::Pages(2),
        rows_max: 8,
        sampled_max: 8,
        held: Held::Stored,
        kv_format: KvFormat::Own,
    };
    let device = reference(Limits { rows_max: 8, sampled_max: 8 });
    Model::load(&checkpoint, device, limits, &mut |progress| {
        assert!(progress.bytes_done > done && progress.bytes_total == checkpoint.weights_bytes());
        done = progress.bytes_done;
        tensors.push(progress.tensor.to_owned());
    })
    .expect("loads");
    assert_eq!(done, checkpoint.weights_bytes());
    assert_eq!(
        (tensors[0].as_str(), tensors.last().map(String::as_str)),
        ("model.embed_tokens.weight", Some("lm_head.weight"))
    );
}

#[test]
fn contexts_follow_the_scaling() {
    let table = [
        // (case, asked, served): the stated length, stretched where the scaling allows it
        ("llama-plain", None, 1024),
        ("llama-plain", Some(100), 100),
        ("llama-plain", Some(1_000_000), 1024),
        ("llama-llama3-bias", Some(1_000_000), 1024),
        ("llama-linear-tied", None, 1024),
        ("llama-linear-tied", Some(1_000_000), 2560),
        ("llama-dynamic", None, 64),
        ("llama-dynamic", Some(1_000_000), 128),
        ("mistral-yarn", None, 256),
        ("qwen3-yarn-mscale", None, 160),
        ("qwen2-upper-windows", None, 1024),
    ];
    for (case, asked, served) in table {
        assert_eq!(Model::context_tokens(&config(case), asked), served, "{case} {asked:?}");
    }
}

#[test]
fn the_cache_bounds_pages_and_context() {
    let checkpoint = Golden::named("llama-plain").checkpoint();
    // 3 layers, keys and values, 2 heads, 32 tokens, 16 values of 2 bytes.
    let page = Model::page_bytes(checkpoint.config(), KvFormat::Own);
    assert_eq!(page, 3 * 2 * 2 * 32 * 16 * 2);
    let model = try_load(&checkpoint, KvBudget::Bytes(5 * page + page / 2), None).expect("loads");
    assert_eq!((model.geometry().pages, model.geometry().context_tokens), (5, 5 * PAGE_TOKENS));
    for kv in [KvBudget::Pages(0), KvBudget::Bytes(page - 1), KvBudget::Pages(usize::MAX)] {
        let error = try_load(&checkpoint, kv, None).err().expect("refused").to_string();
        assert!(error.contains("one page of 32 tokens takes 12288 bytes"), "{error}");
    }
    let error = try_load(&checkpoint, KvBudget::Pages(1), Some(0)).err().expect("refused").to_string();
    assert!(error.contains("0 tokens"), "{error}");
    // A KV budget larger than the address space.
    let wide = Golden::named("qwen3-yarn-mscale").checkpoint();
    let error = try_load(&wide, KvBudget::Pages(u32::MAX as usize), None).err().expect("refused").to_string();
    assert!(error.contains("KV cache") && error.contains("not available"), "{error}");
}

#[test]
fn a_context_from_a_stranger_allocates_no_table() {
    let mut golden = Golden::tiny(1);
    golden.config["max_position_embeddings"] = json!(1 << 27);
    let model = load(&golden.checkpoint(), &reference, 2, 8);
    assert_eq!(model.geometry().context_tokens, 64);
}

#[test]
fn numerics_name_what_changes_bits() {
    let numerics =
        |case, context| load_with(&Golden::named(case).checkpoint(), &reference, 8, 8, context).geometry().numerics;
    assert_eq!(numerics("llama-plain", Some(64)), numerics("llama-plain", Some(128)));
    assert_ne!(numerics("llama-dynamic", Some(64)), numerics("llama-dynamic", Some(128)));
    assert!(numerics("llama-linear-tied", None).ends_with("/f16"));
    assert!(numerics("phi3-long", Some(65)).ends_with("/bf16/rope-long"));
    assert!(numerics("phi3-long", Some(64)).ends_with("/bf16/rope-short"));
    assert_eq!(numerics("gemma3-plain", None), numerics("llama-plain", None));
    let of = |kv_format| {
        let checkpoint = Golden::named("phi3-long").checkpoint();
        load_as(&checkpoint, &reference, (8, kv_format), 8, Some(65)).geometry().numerics
    };
    assert_eq!(of(KvFormat::Int8), of(KvFormat::Own).replace("/rope-long", "/kv-int8/rope-long"));
}

#[test]
fn keys_and_values_of_8_bits_stay_near_those_of_the_checkpoint() {
    for case in ["llama-plain", "qwen3-tied", "mistral-long-window", "gemma3-plain", "gptoss-long", "phi3-long"] {
        let golden = Golden::named(case);
        let checkpoint = golden.checkpoint();
        let logits = |kv_format| {
            let mut model = load_as(&checkpoint, &reference, (40, kv_format), 704, golden.context);
            (logits_of(&mut model, &golden.tokens, golden.tokens.len()).concat(), model.geometry().page_bytes)
        };
        let ((want, _), (got, _)) = (logits(KvFormat::Own), logits(KvFormat::Int8));
        let count = want.len() as f32;
        let rms = (want.iter().map(|v| v * v).sum::<f32>() / count).sqrt();
        let far = (want.iter().zip(&got).map(|(a, b)| (a - b).abs()).sum::<f32>() / count) / rms;
        println!("{case}: {far}");
        assert!(far > 1e-5 && far < 0.02, "{case}: mean distance {far} of the logits' RMS");
    }
}

#[test]
fn hashes_tell_models_apart() {
    let golden = Golden::named("qwen3-mixed-windows");
    let hash = golden.checkpoint().model_hash();
    let shards = |shards| Golden { shards, ..Golden::named("qwen3-mixed-windows") }.checkpoint().model_hash();
    assert_eq!((shards(1), shards(4), shards(2)), (hash, hash, hash));
    assert_ne!(Golden { seed: golden.seed + 1, ..golden }.checkpoint().model_hash(), hash);
}

#[test]
fn bad_batches_are_errors() {
    let mut model = load(&Golden::named("llama-plain").checkpoint(), &reference, 4, 8);
    let run = |model: &mut Model, tokens: &[u32], context, block_table: &[u32], sampled: &[usize]| {
        let spans = [Span { rows: 0..tokens.len(), context, block_table, adapter: None }];
        let batch = StepBatch { tokens, spans: &spans, sampled, ..Default::default() };
        model.forward(&batch, None).map(<[f32]>::len)
    };
    assert_eq!(run(&mut model, &[1, 2, 3], 3, &[0], &[2]).expect("runs"), 203);
    assert_eq!(run(&mut model, &[1, 2, 3], 3, &[0], &[]).expect("a chunk without samples"), 0);
    for (tokens, context, table, sampled) in [
        (&[203][..], 1, &[0][..], &[0][..]), // a token outside of the vocabulary
        (&[1], 1, &[4], &[0]),               // a page that does not exist
        (&[1], 33, &[0], &[0]),              // too few pages
        (&[1], 129, &[0, 1, 2, 3, 3], &[0]), // beyond the context
        (&[1], 1, &[0], &[1]),               // a sample of no row
        (&[1; 9], 9, &[0], &[0]),            // too many rows
        (&[1, 1], 1, &[0], &[0]),            // more rows than context
    ] {
        let refused = run(&mut model, tokens, context, table, sampled);
        assert!(matches!(refused, Err(KernelError::Batch { .. })), "{tokens:?} {context} {table:?}: {refused:?}");
    }
}

#[test]
fn the_memory_plan_counts_every_expert() {
    let checkpoint = Golden::named("mixtral-plain").checkpoint();
    let c = checkpoint.config();
    // Panels of 32 rows, 32 columns to a line: 141 and 96 become 160 and 96, gate and up alike.
    let expert = |bytes: u64, scales: u64| 2 * (160 * 96 * bytes + scales * 160) + (96 * 160 * bytes + scales * 96);
    let experts = |bytes, scales| (c.num_hidden_layers * 5) as u64 * expert(bytes, scales);
    let [stored, int8] = [Held::Stored, Held::Int8].map(|held| checkpoint.held_bytes(held));
    assert!(stored > experts(2, 0) && stored < 2 * experts(2, 0), "{stored}");
    // int8 halves all matrices but the embedding, whose table is its own, and the routers; each row has a scale of 4 bytes.
    let attention = (c.num_hidden_layers * (96 * 96 * 2 + 2 * 32 * 96)) as u64;
    let head = 224 * 96;
    let scales = 4 * (c.num_hidden_layers as u64 * (96 + 96 + 2 * 32) + 224);
    assert_eq!(stored - int8, experts(2, 0) - experts(1, 4) + attention + head - scales);
    // int4 has a scale of 2 bytes for each 32 weights, and so have the 8 bits of the head.
    let int4 = checkpoint.held_bytes(Held::Int4);
    let four = |values: u64| values / 2 + values / 16;
    let all = experts(2, 0) / 2 + attention;
    assert_eq!(stored - int4, 2 * all - four(all) + 2 * head - (head + head / 16));
    let mut few = c.clone();
    few.experts.as_mut().expect("experts").num_experts_per_tok = 1;
    assert!(Model::activation_bytes(&few, 64, 8) < Model::activation_bytes(c, 64, 8));
}

#[test]
fn the_memory_plan_counts_a_shared_expert_and_leaves_its_gate_unrounded() {
    let checkpoint = Golden::named("qwen2moe-plain").checkpoint();
    let c = checkpoint.config();
    // 47 rows become 64, and 70 become 96.
    let mlp = |width: u64, bytes: u64, scales: u64| 2 * width * (96 * bytes + scales) + 96 * (width * bytes + scales);
    let layer = |bytes, scales| 8 * mlp(64, bytes, scales) + mlp(96, bytes, scales);
    let attention = |bytes, scales| (2 * 96 + 2 * 32) * (96 * bytes + scales);
    let rounded = |bytes, scales| 3 * (layer(bytes, scales) + attention(bytes, scales)) + 224 * (96 * bytes + scales);
    let [stored, int8] = [Held::Stored, Held::Int8].map(|held| checkpoint.held_bytes(held));
    assert_eq!(stored - int8, rounded(2, 0) - rounded(1, 4), "all but the embedding, routers and gates");
    // Rows of the shared expert are copied, as those of experts are.
    let mut wide = c.clone();
    let experts = wide.experts.as_mut().expect("experts");
    experts.shared_size = 4096;
    let plan = |config: &ModelConfig| Model::activation_bytes(config, 64, 8);
    let gated = plan(&wide);
    wide.experts.as_mut().expect("experts").shared_gated = false;
    assert!(gated > plan(&wide) && plan(&wide) > plan(c));
}

#[test]
fn latents_are_held_twice_and_leave_the_device_once() {
    let checkpoint = Golden::named("deepseek3-plain").checkpoint();
    let c = checkpoint.config();
    assert_eq!((c.num_key_value_heads, c.head_dim, c.rotary_dim), (1, 56, 12));
    // 44 values of the latent and 12 rotated ones are the key, the latent is the value.
    assert_eq!(Model::page_bytes(c, KvFormat::Own), (3 * PAGE_TOKENS * (56 + 44) * 2) as u64);
    let model = load(&checkpoint, &*cpu(CpuPath::Portable, 1), 4, 8);
    assert_eq!(model.geometry().page_bytes, PAGE_TOKENS * 56 * 2);
    // The matrices of heads and the routers are not rounded to int8.
    let [stored, int8] = [Held::Stored, Held::Int8].map(|held| checkpoint.held_bytes(held));
    assert!(int8 > stored / 2 && int8 < stored, "{int8} of {stored}");
    let heads = 3 * 2 * 44 * (6 * 42);
    assert!(stored > checkpoint.weights_bytes() && checkpoint.weights_bytes() > heads, "{stored}");
}

#[test]
fn yarns_scale_of_all_values_is_in_the_scale_of_queries() {
    let scale = |case| config(case).query_scale * 32f64.sqrt();
    assert!((scale("deepseek3-plain") - 1.0).abs() < 1e-12);
    let stretched = |m: f64| (0.1 * m * 4f64.ln() + 1.0).powi(2);
    assert!((scale("deepseek2-groups") - stretched(0.5)).abs() < 1e-12);
    assert!((scale("deepseek3-halves") - stretched(1.0)).abs() < 1e-12);
}

#[test]
fn stacked_experts_are_counted_once() {
    for case in ["gptoss-plain", "gptoss-mxfp4"] {
        let golden = Golden::named(case);
        let checkpoint = golden.checkpoint();
        let stored: usize = golden.stored().iter().map(|tensor| tensor.bytes.len()).sum();
        assert_eq!(checkpoint.weights_bytes(), stored as u64, "{case}");
        assert!(checkpoint.ignored().is_empty(), "{case}: {:?}", checkpoint.ignored());
    }
    assert_eq!(Golden::named("gptoss-mxfp4").checkpoint().weight_format(), "bf16+mxfp4");
}

#[test]
fn a_change_of_one_expert_changes_the_hash() {
    for case in ["gptoss-plain", "gptoss-mxfp4"] {
        let golden = Golden::named(case);
        let hash = |change: bool| {
            let mut tensors = golden.stored();
            let is_last = |tensor: &&mut Tensor| tensor.name.contains("layers.2.mlp.experts.down_proj");
            let tensor = tensors.iter_mut().find(is_last).expect("experts");
            if change {
                *tensor.bytes.last_mut().expect("a byte") ^= 1;
            }
            let config = serde_json::to_vec(&golden.config).expect("json");
            let files = vec![
                ("config.json".to_owned(), config.into()),
                ("model.safetensors".to_owned(), write_safetensors(&tensors).into()),
            ];
            Checkpoint::from_buffers(files).expect("it opens").model_hash()
        };
        assert_ne!(hash(false), hash(true), "{case}");
        assert_eq!(hash(false), golden.checkpoint().model_hash(), "{case}: the cut into files does not matter");
    }
}

#[test]
fn configs_of_gpt_oss() {
    let case = "gptoss-plain";
    let plain = config(case);
    assert_eq!(plain.windows, [Some(24), None, Some(24)]);
    assert!(plain.sinks && plain.qkv_bias && plain.output_bias);
    assert_eq!(plain.hidden_act, Activation::ClampedSwiglu { limit: 1.25, alpha: 1.702 });
    let listed = config("gptoss-listed");
    assert_eq!(listed.windows, [None, Some(24), Some(24)]);
    let refused = changed(case, &json!({"sliding_window": null})).expect_err("layers with a window have one");
    assert!(refused.contains("sliding_window: is missing"), "{refused}");
    assert_eq!(listed.hidden_act, Activation::ClampedSwiglu { limit: 7.0, alpha: 1.25 });
    // A config that leaves out what transformers' class knows.
    let left_out = ["swiglu_limit", "rope_scaling", "rope_theta", "rms_norm_eps", "sliding_window", "attention_bias"];
    let mut golden = Golden::named(case);
    left_out.iter().for_each(|name| drop(golden.config.as_object_mut().expect("an object").remove(*name)));
    let short = golden.checkpoint().config().clone();
    assert_eq!(short.windows, [Some(128), None, Some(128)]);
    assert_eq!(short.hidden_act, Activation::ClampedSwiglu { limit: 7.0, alpha: 1.702 });
    assert_eq!((short.rope.rope_theta, short.rms_norm_eps, short.qkv_bias), (150_000.0, 1e-5, true));
    let RopeScaling::Yarn { factor, truncate, original_max_position_embeddings, .. } = short.rope.scaling else {
        panic!("{:?}", short.rope.scaling)
    };
    assert_eq!((factor, truncate, original_max_position_embeddings), (32.0, false, 4096));
    let refused = [
        (json!({"num_local_experts": null}), "num_experts: is missing"),
        (json!({"num_local_experts": 6}), "mlp.router.weight: shape [7, 96], config.json needs [6, 96]"),
        (json!({"intermediate_size": 69}), "experts.gate_up_proj: shape [7, 96, 140], config.json needs [7, 96, 138]"),
        (json!({"swiglu_limit": 0}), "swiglu_limit: is 0, needs a number"),
        (json!({"attention_bias": 1}), "needs true or false"),
        (json!({"quantization_config": {"quant_method": "gptq"}}), "quantized weights are not supported"),
    ];
    for (fields, reason) in refused {
        let error = changed(case, &fields).expect_err("a refusal");
        assert!(error.contains(reason), "{fields}: {error}; expected {reason}");
    }
    // Fields of the published checkpoints that change nothing.
    let others = json!({
        "experts_per_token": 4, "initial_context_length": 4096, "output_router_logits": false, "router_aux_loss_coef": 0.9, "use_cache": true,
        "pad_token_id": 199_999, "initializer_range": 0.02, "attention_dropout": 0.0,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
            "quant_method": "mxfp4",
        },
    });
    assert_eq!(changed("gptoss-mxfp4", &others), Ok(config("gptoss-mxfp4")));
    let packed = json!({"quantization_config": {"quant_method": "mxfp4"}});
    let error = changed("qwen3moe-plain", &packed).expect_err("a refusal");
    assert!(error.contains("quantization_config.quant_method: \"mxfp4\" is not supported"), "{error}");
}

#[test]
fn stacked_experts_that_do_not_fit_are_refused() {
    type Change<'a> = &'a dyn Fn(&mut [Tensor]);
    let open = |case: &str, change: Change<'_>| {
        let golden = Golden::named(case);
        let mut tensors = golden.stored();
        change(&mut tensors);
        let config = serde_json::to_vec(&golden.config).expect("json");
        let weights = write_safetensors(&tensors);
        let files = vec![("config.json".to_owned(), config.into()), ("model.safetensors".to_owned(), weights.into())];
        Checkpoint::from_buffers(files).map_err(|error| error.to_string())
    };
    fn named<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
        let name = format!("model.layers.1.mlp.experts.{name}");
        tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor")
    }
    let table: [(&str, &str, Change<'_>); 8] = [
        ("gptoss-plain", "gate_up_proj: is missing (shape [7, 96, 140])", &|t| named(t, "gate_up_proj").name.push('x')),
        ("gptoss-plain", "down_proj_bias: is missing (shape [7, 96])", &|t| named(t, "down_proj_bias").name.push('x')),
        ("gptoss-plain", "gate_up_proj_bias: shape [140, 7], config.json needs [7, 140]", &|t| {
            named(t, "gate_up_proj_bias").shape.reverse();
        }),
        ("gptoss-mxfp4", "down_proj: is missing", &|t| named(t, "down_proj_scales").name.push('x')),
        ("gptoss-mxfp4", "gate_up_proj_blocks: shape [4, 128, 48], config.json needs [4, 128, 3, 16]", &|t| {
            named(t, "gate_up_proj_blocks").shape = vec![4, 128, 48];
        }),
        ("gptoss-mxfp4", "down_proj_scales: shape [4, 192, 1], config.json needs [4, 96, 2]", &|t| {
            named(t, "down_proj_scales").shape = vec![4, 192, 1];
        }),
        ("gptoss-mxfp4", "down_proj_scales: type I8, MXFP4 is stored as U8", &|t| {
            named(t, "down_proj_scales").dtype = "I8";
        }),
        ("gptoss-mxfp4", "gate_up_proj_blocks: type f16, MXFP4 is stored as U8", &|t| {
            let blocks = named(t, "gate_up_proj_blocks");
            (blocks.dtype, blocks.shape[3]) = ("F16", 8);
        }),
    ];
    for (case, reason, change) in table {
        let error = open(case, change).map(|_| ()).expect_err(reason);
        assert!(error.contains(reason), "{error}; expected {reason}");
    }
    assert!(open("gptoss-mxfp4", &|_| ()).is_ok());
    // A width of which MXFP4 has no whole blocks.
    let mut odd = Golden::named("gptoss-mxfp4");
    odd.config["intermediate_size"] = json!(48);
    odd.tensors.iter_mut().filter(|(name, _)| name.contains("gate_up_proj")).for_each(|(_, shape)| shape[1] = 96);
    let error = Checkpoint::from_buffers(odd.files()).map(|_| ()).expect_err("a refusal").to_string();
    assert!(error.contains("down_proj_blocks: rows of 48 are not whole blocks of 32"), "{error}");
}

/// Reads the config of `case` with some fields changed.
fn changed(case: &str, fields: &serde_json::Value) -> Result<ModelConfig, String> {
    let mut golden = Golden::named(case);
    for (name, value) in fields.as_object().expect("an object") {
        golden.config[name] = value.clone();
    }
    let checkpoint = Checkpoint::from_buffers(golden.files()).map_err(|error| error.to_string())?;
    Ok(checkpoint.config().clone())
}

#[test]
fn configs_of_experts() {
    let case = "qwen3moe-plain";
    let plain = config(case);
    // transformers 5 writes this name for Qwen3 too.
    let renamed = changed(case, &json!({"num_experts": null, "num_local_experts": 8})).expect("it opens");
    assert_eq!(renamed, plain);
    let experts = plain.experts.expect("experts");
    assert_eq!((experts.num_experts, experts.num_experts_per_tok, experts.moe_intermediate_size), (8, 2, 47));
    assert_eq!(config("qwen3moe-some-dense").experts.expect("experts").layers, [false, true, false, false]);
    assert_eq!(config("qwen3moe-some-dense").windows, [Some(29); 4]);
    assert_eq!(config("mixtral-plain").rope.rope_theta, 1e6, "the default of this family");
    let refused = [
        (json!({"num_experts": null}), "num_experts: is missing"),
        (json!({"num_local_experts": 9}), "num_experts: is 8, and num_local_experts is 9"),
        (json!({"num_experts": 5000}), "needs an integer from 1 to 4096"),
        (json!({"num_experts_per_tok": null}), "num_experts_per_tok: is missing"),
        (json!({"num_experts_per_tok": 0}), "needs an integer from 1 to 8"),
        (json!({"num_experts_per_tok": 9}), "needs an integer from 1 to 8"),
        (json!({"moe_intermediate_size": null}), "moe_intermediate_size: is missing"),
        (json!({"decoder_sparse_step": 0}), "needs an integer from 1"),
        (json!({"mlp_only_layers": [3]}), "mlp_only_layers: names layer 3; there are 3"),
        (json!({"mlp_only_layers": ["1"]}), "mlp_only_layers: names layer"),
        (json!({"norm_topk_prob": 1}), "needs true or false"),
        (json!({"num_experts": 7}), "mlp.gate.weight: shape [8, 96], config.json needs [7, 96]"),
        (json!({"num_experts": 9}), "mlp.gate.weight: shape [8, 96], config.json needs [9, 96]"),
        (json!({"decoder_sparse_step": 2}), "mlp.gate_proj.weight: is missing"),
    ];
    for (fields, reason) in refused {
        let error = changed(case, &fields).expect_err("a refusal");
        assert!(error.contains(reason), "{fields}: {error}; expected {reason}");
    }
}

#[test]
fn configs_of_gemma() {
    let (two, three) = (config("gemma2-plain"), config("gemma3-plain"));
    assert_eq!(two.windows, [Some(24), None, Some(24)]);
    assert_eq!(three.windows, [Some(24), Some(24), None, Some(24)]);
    let local = three.local_rope.expect("rotations of layers with a window");
    assert_eq!((three.rope.scaling, local.scaling), (RopeScaling::Linear { factor: 8.0 }, RopeScaling::Default));
    assert_eq!((three.rope.rope_theta, local.rope_theta), (100_000.0, 1000.0));
    assert_eq!(
        (two.norm_offset, two.query_scale, two.embedding_scale),
        (1.0, 20f64.powf(-0.5), Some(EmbeddingScale::Rounded(96f64.sqrt())))
    );
    // What configs leave out has the values of transformers' classes.
    let absent = json!({"rope_theta": null, "rope_scaling": null, "sliding_window_pattern": null});
    let defaults = changed("gemma3-plain", &absent).expect("it opens");
    assert_eq!((defaults.rope.rope_theta, defaults.windows), (1e6, vec![Some(24); 4]));
    // Attention to both sides makes vectors, not text.
    let both = changed("gemma3-plain", &json!({"use_bidirectional_attention": true})).expect("it opens");
    assert_eq!((both.causal, both.headless), (false, true));
    assert_eq!(both.windows, [Some(13), Some(13), None, Some(13)], "half of the window to each side");
    let refused = [
        ("gemma3-plain", json!({"attn_logit_softcapping": 50.0}), "soft caps of scores"),
        ("gemma2-plain", json!({"hidden_activation": "gelu"}), "only \"gelu_pytorch_tanh\" is"),
        ("gemma2-plain", json!({"sliding_window": null}), "sliding_window: is missing"),
        ("gemma2-plain", json!({"final_logit_softcapping": 0}), "needs a number from"),
        ("smollm3-plain", json!({"no_rope_layers": [1, 0]}), "has 2 entries for 5 layers"),
        ("smollm3-plain", json!({"no_rope_layers": [1, 0, 2, 1, 1]}), "has 2, needs 0 or 1"),
        ("phi3-plain", json!({"partial_rotary_factor": 0.22}), "5 of 24 values"),
        (
            "phi3-plain",
            json!({"num_key_value_heads": 3}),
            "qkv_proj.weight: shape [240, 144], config.json needs [288, 144]",
        ),
        (
            "phi3-plain",
            json!({"intermediate_size": 140}),
            "gate_up_proj.weight: shape [282, 144], config.json needs [280, 144]",
        ),
    ];
    for (case, fields, reason) in refused {
        let error = changed(case, &fields).expect_err("a refusal");
        assert!(error.contains(reason), "{fields}: {error}; expected {reason}");
    }
}

#[test]
fn the_text_part_of_a_model_with_images_is_the_text_model() {
    let golden = Golden::named("gemma3-plain");
    let plain = golden.checkpoint();
    let want = logits_of(&mut load(&plain, &reference, 8, 150), &golden.tokens, 150);
    for (from, to) in [("model.", "language_model.model."), ("model.", "model.language_model.")] {
        let mut config = json!({"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]});
        config["text_config"] = golden.config.clone();
        let mut tensors = golden.stored();
        for tensor in &mut tensors {
            tensor.name = tensor.name.replacen(from, to, 1);
        }
        let files = vec![
            ("config.json".to_owned(), serde_json::to_vec(&config).expect("json").into()),
            ("model.safetensors".to_owned(), write_safetensors(&tensors).into()),
        ];
        let part = Checkpoint::from_buffers(files).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(part.eos_token_ids(), [1, 106]);
        let got = logits_of(&mut load(&part, &reference, 8, 150), &golden.tokens, 150);
        assert!(got == want, "{to}");
    }
    let config = serde_json::to_vec(&json!({"architectures": ["Gemma3ForConditionalGeneration"]})).expect("json");
    let error = Checkpoint::from_buffers(vec![("config.json".to_owned(), config.into())]).expect_err("a refusal");
    assert!(error.to_string().contains("text_config: is missing"), "{error}");
}
