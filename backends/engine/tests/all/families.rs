//! Configs of decoders: what each family reads into them, what configs leave out, and what is refused by field.

use crate::common;

use common::reference;
use common::weights::{Golden, Tensor, adapter_files, tensor, write_safetensors};
use penstock_engine::Forward;
use penstock_engine::adapter::Adapter;
use penstock_engine::checkpoint::{Checkpoint, EmbeddingScale, ModelConfig, NormPlaces, QkNorm, RopeScaling, Rotation};
use penstock_kernels::{Activation, Feature, Span, StepBatch};
use serde_json::{Value, json};

/// Opens the checkpoint of `case` with some fields changed; a null leaves the field out.
fn open(case: &str, fields: &Value) -> Result<Checkpoint, String> {
    let mut golden = Golden::named(case);
    let config = golden.config.as_object_mut().expect("an object");
    for (name, value) in fields.as_object().expect("an object") {
        match value {
            Value::Null => drop(config.remove(name)),
            value => drop(config.insert(name.clone(), value.clone())),
        }
    }
    Checkpoint::from_buffers(golden.files()).map_err(|error| error.to_string())
}

fn changed(case: &str, fields: &Value) -> Result<ModelConfig, String> {
    open(case, fields).map(|checkpoint| checkpoint.config().clone())
}

fn config(case: &str) -> ModelConfig {
    changed(case, &json!({})).expect("it opens")
}

#[track_caller]
fn refused(case: &str, fields: &Value, reason: &str) {
    let error = changed(case, fields).expect_err(reason);
    assert!(error.contains(reason), "{case}, {fields}: {error}; expected {reason}");
}

#[test]
fn olmo_3_scales_the_rotations_of_layers_without_a_window_alone() {
    let yarn = config("olmo3-yarn");
    assert_eq!(yarn.windows, [Some(24), Some(24), Some(24), None]);
    assert_eq!(yarn.rotations, [Rotation::Local, Rotation::Local, Rotation::Local, Rotation::Model]);
    let local = yarn.local_rope.expect("rotations of layers with a window");
    assert_eq!((local.rope_theta, local.scaling), (50_000.0, RopeScaling::Default));
    assert!(matches!(yarn.rope.scaling, RopeScaling::Yarn { factor: 4.0, .. }));
    let listed = config("olmo3-listed");
    assert_eq!(listed.windows, [None, Some(24), Some(24)]);
    assert_eq!((listed.local_rope, listed.rotations), (None, vec![Rotation::Model; 3]), "one table serves all");
    assert_eq!((listed.norms, listed.qk_norm), (NormPlaces::After, QkNorm::Together));
    let short = changed("olmo3-yarn", &json!({"sliding_window": null, "rms_norm_eps": null})).expect("it opens");
    assert_eq!((short.windows[0], short.rms_norm_eps), (Some(4096), 1e-5));
    refused("olmo3-listed", &json!({"sliding_window": 0}), "sliding_window: is 0, needs");
    refused("olmo3-listed", &json!({"layer_types": ["full_attention"]}), "layer_types: has 1 entries for 3 layers");
    let nested = json!({"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "default"}});
    refused("olmo3-listed", &json!({"rope_parameters": nested}), "differ between layers");
}

#[test]
fn a_null_window_is_none() {
    let mut golden = Golden::named("olmo3-yarn");
    golden.config["sliding_window"] = Value::Null;
    let error = Checkpoint::from_buffers(golden.files()).expect_err("no window").to_string();
    assert!(error.contains("sliding_window: is missing, and some layers have a window"), "{error}");
    let mut golden = Golden::named("ministral-listed");
    golden.config["sliding_window"] = Value::Null;
    golden.config.as_object_mut().expect("an object").remove("layer_types");
    assert_eq!(golden.checkpoint().config().windows, [None; 3]);
}

#[test]
fn gemma_has_the_approximate_gelu_whatever_its_first_configs_said() {
    let plain = config("gemma-plain");
    assert_eq!((plain.norms, plain.norm_offset, plain.hidden_act), (NormPlaces::Before, 1.0, Activation::GeluTanh));
    assert_eq!(plain.embedding_scale, Some(EmbeddingScale::Rounded(96f64.sqrt())));
    assert_eq!(changed("gemma-plain", &json!({"hidden_act": "gelu"})), Ok(plain.clone()));
    assert_eq!(changed("gemma-plain", &json!({"hidden_act": null})), Ok(plain.clone()));
    let both = json!({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"});
    assert_eq!(changed("gemma-plain", &both), Ok(plain));
    refused("gemma-plain", &json!({"hidden_act": "silu"}), "hidden_act: \"silu\" is not supported");
    refused("gemma-plain", &json!({"hidden_activation": "gelu"}), "only \"gelu_pytorch_tanh\" is");
    refused("gemma-plain", &json!({"final_logit_softcapping": 30.0}), "soft-capping is not supported");
    refused("gemma-plain", &json!({"use_bidirectional_attention": true}), "use_bidirectional_attention: is true");
}

#[test]
fn layers_of_ministral_and_exaone_4() {
    assert_eq!(config("ministral-listed").windows, [Some(24), None, Some(24)]);
    let bare = json!({"sliding_window": null, "layer_types": null});
    assert_eq!(changed("ministral-listed", &bare).expect("it opens").windows, [Some(4096); 3]);

    let plain = config("exaone4-plain");
    assert_eq!((plain.norms, plain.qk_norm), (NormPlaces::After, QkNorm::Each));
    assert_eq!((plain.windows, plain.rotations), (vec![None; 3], vec![Rotation::Model; 3]));
    let windows = config("exaone4-windows");
    assert_eq!(windows.windows, [Some(24), Some(24), None, Some(24)]);
    assert_eq!(windows.rotations, [Rotation::Model, Rotation::Model, Rotation::None, Rotation::Model]);
    let fourth = changed("exaone4-windows", &json!({"sliding_window_pattern": null})).expect("it opens");
    assert_eq!(fourth.windows, [Some(24), Some(24), Some(24), None]);
    // Letters are read by no one: a list beside them counts.
    let letters = json!({"sliding_window_pattern": "LLLG"});
    refused("exaone4-windows", &letters, "sliding_window_pattern: is \"LLLG\", needs an integer");
    let full = "full_attention";
    let listed = json!({"sliding_window_pattern": "LLLG", "layer_types": [full, full, "sliding_attention", full]});
    assert_eq!(changed("exaone4-windows", &listed).expect("it opens").windows, [None, None, Some(24), None]);
    refused("exaone4-windows", &json!({"sliding_window_pattern": 0}), "needs an integer from 1");
    let none = json!({"layer_types": ["full_attention", "sliding_attention", "full_attention"]});
    refused("exaone4-plain", &none, "sliding_window: is missing");
}

#[test]
fn biases_of_seed_oss_have_a_field_each() {
    let biases = |c: &ModelConfig| [c.qkv_bias, c.output_bias, c.mlp_bias];
    let plain = config("seedoss-plain");
    assert_eq!((biases(&plain), plain.head_dim), ([true, false, false], 128));
    assert_eq!(biases(&config("seedoss-bias")), [false, true, true]);
    refused("seedoss-plain", &json!({"attention_out_bias": true}), "self_attn.o_proj.bias: is missing");
    refused("seedoss-plain", &json!({"mlp_bias": true}), "mlp.gate_proj.bias: is missing");
    refused("seedoss-bias", &json!({"attention_bias": null}), "self_attn.q_proj.bias: is missing");
    refused("seedoss-plain", &json!({"attention_out_bias": 1}), "needs true or false");
}

#[test]
fn ernies_rotations_lie_side_by_side() {
    let bias = config("ernie-bias");
    assert!(bias.paired && bias.qkv_bias && bias.output_bias && bias.mlp_bias);
    assert_eq!((bias.head_dim, bias.rope.rope_theta, bias.rms_norm_eps), (128, 500_000.0, 1e-5));
    let plain = config("ernie-plain");
    assert!(plain.paired && !plain.qkv_bias && !plain.tie_word_embeddings);
    refused("ernie-plain", &json!({"use_bias": true}), "self_attn.q_proj.bias: is missing");
    refused("ernie-bias", &json!({"tie_word_embeddings": null}), "though config.json says tie_word_embeddings: true");
    // Adapters have the order of the checkpoint's rows, too.
    let adapter = |module: &str, outputs: usize| {
        let of = |side: &str, shape: [usize; 2]| {
            tensor(1, "f32", &format!("base_model.model.model.layers.0.self_attn.{module}.lora_{side}.weight"), &shape)
        };
        let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 2});
        let files = adapter_files(&config, &[of("A", [2, 96]), of("B", [outputs, 2])]);
        Adapter::from_buffers(files, &plain).map_err(|error| error.to_string())
    };
    for (module, outputs) in [("q_proj", 120), ("k_proj", 40)] {
        let error = adapter(module, outputs).expect_err("other rows");
        assert!(error.contains(module) && error.contains("adapters of queries and keys are not supported"), "{error}");
    }
    assert!(adapter("v_proj", 40).is_ok());
}

#[test]
fn granite_has_four_factors() {
    let plain = config("granite-plain");
    assert_eq!((plain.embedding_scale, plain.query_scale), (Some(EmbeddingScale::Exact(5.3)), 0.2));
    assert_eq!((plain.residual_multiplier, plain.logits_scaling), (Some(0.55), Some(1.5)));
    let biases = |c: &ModelConfig| [c.qkv_bias, c.output_bias, c.mlp_bias];
    assert_eq!((biases(&plain), biases(&config("granite-bias"))), ([false; 3], [true; 3]));
    // Absent factors are 1, that of queries and keys too, and 1 needs nothing of a device.
    let names = ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"];
    for absent in [Value::Null, json!(1), json!(1.0)] {
        let fields: Value = names.iter().map(|name| ((*name).to_owned(), absent.clone())).collect();
        let bare = changed("granite-plain", &fields).expect("it opens");
        assert_eq!((bare.embedding_scale, bare.query_scale), (None, 1.0));
        assert_eq!((bare.residual_multiplier, bare.logits_scaling), (None, None));
        assert_eq!(bare.features().next(), None, "a plain decoder");
    }
    for name in names {
        for bad in [json!(0), json!(-1.0), json!(1e9), json!("12"), json!(true)] {
            refused("granite-plain", &json!({ (name): bad }), &format!("{name}: is"));
        }
    }
    refused("granite-plain", &json!({"num_local_experts": 8}), "has no mixture of experts here");
}

#[test]
fn granite_4_is_served_where_all_layers_are_dense_and_have_attention() {
    let rope = config("granite4-rope");
    assert_eq!((rope.intermediate_size, rope.rotations.clone()), (141, vec![Rotation::Model; 3]));
    assert_eq!((rope.residual_multiplier, rope.logits_scaling, rope.query_scale), (Some(0.55), Some(1.5), 0.2));
    assert_eq!(config("granite4-nope").rotations, [Rotation::None; 3]);
    let absent = changed("granite4-rope", &json!({"position_embedding_type": null})).expect("it opens");
    assert_eq!(absent.rotations, [Rotation::None; 3], "as in transformers");
    assert_eq!(changed("granite4-rope", &json!({"intermediate_size": null})), Ok(rope));
    let mixed = json!({"layer_types": ["attention", "mamba", "attention"]});
    refused("granite4-rope", &mixed, "layer_types: has \"mamba\"; only attention is supported");
    refused("granite4-rope", &json!({"layer_types": ["attention"]}), "layer_types: has 1 entries for 3 layers");
    refused("granite4-rope", &json!({"layer_types": null}), "layer_types: is missing");
    refused("granite4-rope", &json!({"num_local_experts": null}), "num_local_experts: is missing");
    refused("granite4-rope", &json!({"num_local_experts": 8}), "has no mixture of experts here");
    refused("granite4-rope", &json!({"shared_intermediate_size": null}), "shared_intermediate_size: is missing");
    refused("granite4-rope", &json!({"position_embedding_type": "alibi"}), "only \"rope\" and \"nope\" are");
    let wide = json!({"shared_intermediate_size": 140});
    refused("granite4-rope", &wide, "shared_mlp.input_linear.weight: shape [282, 96], config.json needs [280, 96]");
}

#[test]
fn glm_4_rotates_pairs_in_a_part_of_each_head() {
    let plain = config("glm-plain");
    assert!(plain.paired && plain.qkv_bias && !plain.output_bias && !plain.mlp_bias);
    assert_eq!((plain.head_dim, plain.rotary_dim, plain.norms), (24, 12, NormPlaces::Before));
    // The half is what configs leave out, as are the ends of the published models.
    assert_eq!(changed("glm-plain", &json!({"partial_rotary_factor": null})), Ok(plain));
    let ends = changed("glm-plain", &json!({"eos_token_id": null})).expect("it opens").eos_token_id;
    assert_eq!(ends, [151_329, 151_336, 151_338]);
    let quarter = config("glm-quarter");
    assert_eq!((quarter.head_dim, quarter.rotary_dim, quarter.qkv_bias), (40, 10, false));
    assert_eq!((quarter.rms_norm_eps, quarter.rope.rope_theta), (1.5625e-7, 20_000.0));
    let behind = config("glm4-plain");
    assert_eq!((behind.norms, config("glm4-unbiased").qkv_bias), (NormPlaces::BothGlm, false));
    refused("glm-plain", &json!({"partial_rotary_factor": 0.3}), "partial_rotary_factor: is 0.3: 7 of 24 values");
    refused("glm-plain", &json!({"attention_bias": false, "num_experts": 2}), "has no mixture of experts here");
    refused("glm-plain", &json!({"intermediate_size": 140}), "mlp.gate_up_proj.weight: shape [282, 96]");
    refused("glm-plain", &json!({"head_dim": null}), "self_attn.q_proj.weight: shape [144, 96]");
    refused("glm-plain", &json!({"architectures": ["Glm4ForCausalLM"]}), "post_self_attn_layernorm.weight: is missing");
}

#[test]
fn adapters_have_the_names_of_the_checkpoints_matrices() {
    let of = |case: &str, module: &str, [outputs, inputs]: [usize; 2]| {
        let named = |side: &str, shape: [usize; 2]| {
            tensor(1, "f32", &format!("base_model.model.model.layers.1.{module}.lora_{side}.weight"), &shape)
        };
        let settings = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 2});
        let files = adapter_files(&settings, &[named("A", [2, inputs]), named("B", [outputs, 2])]);
        Adapter::from_buffers(files, &config(case)).map(drop).map_err(|error| error.to_string())
    };
    for (case, module, shape) in [
        ("granite4-rope", "shared_mlp.input_linear", [282, 96]),
        ("granite4-rope", "shared_mlp.output_linear", [96, 141]),
        ("granite4-rope", "self_attn.q_proj", [96, 96]),
        ("glm-plain", "mlp.gate_up_proj", [282, 96]),
        ("glm-plain", "mlp.down_proj", [96, 141]),
        ("glm-plain", "self_attn.v_proj", [48, 96]),
        ("phi3-plain", "self_attn.qkv_proj", [240, 144]),
    ] {
        assert_eq!(of(case, module, shape), Ok(()), "{case}, {module}");
    }
    for (case, module, shape, reason) in [
        ("granite4-rope", "mlp.gate_proj", [141, 96], "does not have"),
        ("granite4-rope", "mlp.down_proj", [96, 141], "does not have"),
        ("glm-plain", "mlp.up_proj", [141, 96], "does not have"),
        ("glm-plain", "self_attn.q_proj", [144, 96], "adapters of queries and keys are not supported"),
    ] {
        let error = of(case, module, shape).expect_err(module);
        assert!(error.contains(module) && error.contains(reason), "{case}: {error}");
    }
}

#[test]
fn logits_are_divided_behind_the_head_and_states_are_not() {
    let golden = Golden::named("granite-plain");
    let tokens = &golden.tokens[..7];
    let spans = [Span { rows: 0..7, context: 7, block_table: &[0], adapter: None }];
    let batch = StepBatch { tokens, spans: &spans, sampled: &[6], ..Default::default() };
    let run = |scaling: f64| {
        let checkpoint = open("granite-plain", &json!({"logits_scaling": scaling})).expect("it opens");
        let mut state = Vec::new();
        let mut model = common::load(&checkpoint, &reference, 8, 8);
        let logits = model.states(&batch, None, &mut state, true).expect("a state").to_vec();
        (state, logits)
    };
    let ((state, whole), (same, divided)) = (run(1.0), run(3.0));
    assert_eq!(state, same);
    assert_eq!(whole.iter().map(|logit| logit / 3.0).collect::<Vec<_>>(), divided);
}

#[test]
fn experts_of_olmoe() {
    let plain = config("olmoe-plain");
    assert_eq!((plain.norms, plain.qk_norm), (NormPlaces::Before, QkNorm::Together));
    let experts = plain.experts.expect("experts");
    assert_eq!((experts.num_experts, experts.num_experts_per_tok, experts.moe_intermediate_size), (8, 2, 47));
    assert!(!experts.norm_topk_prob && config("olmoe-normed").experts.expect("experts").norm_topk_prob);
    refused("olmoe-plain", &json!({"clip_qkv": 8.0}), "clip_qkv: is set");
    refused("olmoe-plain", &json!({"sliding_window": 24}), "sliding_window: is set");
    refused("olmoe-plain", &json!({"num_experts": 9}), "mlp.gate.weight: shape [8, 96], config.json needs [9, 96]");
    refused("olmoe-plain", &json!({"head_dim": 20}), "self_attn.q_proj.weight: shape [96, 96]");
}

#[test]
fn the_shared_expert_of_qwen_2_has_a_gate() {
    let plain = config("qwen2moe-plain");
    assert!(plain.qkv_bias && !plain.output_bias && plain.windows == [None; 3]);
    let experts = plain.experts.expect("experts");
    assert_eq!((experts.num_experts, experts.moe_intermediate_size, experts.shared_size), (8, 47, 70));
    assert!(experts.shared_gated && !experts.norm_topk_prob && experts.layers == [true; 3]);
    let mixed = config("qwen2moe-mixed");
    let experts = mixed.experts.expect("experts");
    assert!(!mixed.qkv_bias && experts.norm_topk_prob);
    assert_eq!(
        (experts.layers, mixed.windows),
        (vec![false, true, false, false], vec![Some(24), None, Some(24), None])
    );
    let fewer = changed("qwen2moe-mixed", &json!({"max_window_layers": 1})).expect("it opens");
    assert_eq!(fewer.windows, [Some(24), None, None, None]);
    let listed = ["sliding_attention", "full_attention", "full_attention"];
    refused("qwen2moe-plain", &json!({"layer_types": listed}), "has sliding_attention, but use_sliding_window");
    let slides = json!({"layer_types": listed, "use_sliding_window": true, "sliding_window": 9});
    assert_eq!(changed("qwen2moe-plain", &slides).expect("it opens").windows, [Some(9), None, None]);
    refused("qwen2moe-plain", &json!({"shared_expert_intermediate_size": null}), "_intermediate_size: is missing");
    let narrow = json!({"shared_expert_intermediate_size": 69});
    refused("qwen2moe-plain", &narrow, "mlp.shared_expert.gate_proj.weight: shape [70, 96]");
    refused("qwen2moe-plain", &json!({"qkv_bias": 1}), "qkv_bias: is 1, needs true or false");

    let mut golden = Golden::named("qwen2moe-plain");
    let gate = |(name, _): &&mut (String, Vec<usize>)| name.contains("layers.2.mlp.shared_expert_gate");
    golden.tensors.iter_mut().find(gate).expect("a gate").1 = vec![2, 96];
    let error = Checkpoint::from_buffers(golden.files()).expect_err("two rows").to_string();
    assert!(
        error.contains("layers.2.mlp.shared_expert_gate.weight: shape [2, 96], config.json needs [1, 96]"),
        "{error}"
    );
}

#[test]
fn tokens_of_any_decoder_may_see_later_ones() {
    let both = json!({"is_causal": false});
    for case in
        ["llama-plain", "mistral-window", "qwen2-tied", "qwen3-mixed-windows", "gemma2-plain", "exaone4-windows"]
    {
        let (plain, seeing) = (config(case), changed(case, &both).expect("it opens"));
        assert!(plain.causal && !seeing.causal && seeing.is_whole() && seeing.headless, "{case}");
        let wider: Vec<_> = plain.windows.iter().map(|window| window.map(|tokens| tokens + 1)).collect();
        assert_eq!(seeing.windows, wider, "{case}: as many tokens on each side, and the token itself");
        assert!(seeing.features().any(|feature| feature == Feature::Encoders), "{case}: GPUs refuse it by name");
        assert_eq!(changed(case, &json!({"is_causal": true})), Ok(plain), "{case}");
        refused(case, &json!({"use_bidirectional_attention": true}), "is true, which this architecture does not have");
        let said_twice = json!({"is_causal": false, "use_bidirectional_attention": true});
        assert_eq!(changed(case, &said_twice), Ok(seeing), "{case}");
    }
    refused("llama-plain", &json!({"is_causal": 0}), "is_causal: is 0, needs true or false");
    refused("deepseek2-plain", &both, "is_causal: is false");
    refused("gptoss-plain", &both, "is_causal: is false");
}

#[test]
fn decoders_that_were_saved_alone_make_vectors() {
    let cases =
        [("llama-plain", "Llama"), ("mistral-window", "Mistral"), ("qwen2-tied", "Qwen2"), ("qwen3-tied", "Qwen3")];
    for (case, name) in cases {
        let mut golden = Golden::named(case);
        golden.config["architectures"] = json!([format!("{name}Model")]);
        let mut tensors: Vec<Tensor> = golden.stored();
        tensors.retain(|tensor| tensor.name != "lm_head.weight");
        tensors.iter_mut().for_each(|tensor| tensor.name = tensor.name.replacen("model.", "", 1));
        let files = vec![
            ("config.json".into(), serde_json::to_vec(&golden.config).expect("json").into()),
            ("model.safetensors".into(), write_safetensors(&tensors).into()),
        ];
        let checkpoint = Checkpoint::from_buffers(files).unwrap_or_else(|error| panic!("{case}: {error}"));
        let want = ModelConfig { headless: true, tie_word_embeddings: false, ..config(case) };
        assert_eq!(checkpoint.config(), &want, "{case}");
        assert!(checkpoint.ignored().is_empty(), "{case}");
        let tokens = &golden.tokens[..7];
        let spans = [Span { rows: 0..7, context: 7, block_table: &[0], adapter: None }];
        let batch = StepBatch { tokens, spans: &spans, sampled: &[6], ..Default::default() };
        let state = |checkpoint: &Checkpoint| {
            let mut out = Vec::new();
            common::load(checkpoint, &reference, 8, 8).states(&batch, None, &mut out, false).expect("a state");
            out
        };
        assert_eq!(state(&checkpoint), state(&Golden::named(case).checkpoint()), "{case}");
        let error = common::load(&checkpoint, &reference, 8, 8).forward(&batch, None).expect_err("no head").to_string();
        assert!(error.contains("has no lm_head.weight"), "{case}: {error}");
    }
}

#[test]
fn a_factor_on_yarns_scale_is_one_on_what_is_inferred() {
    let of = |more: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        let more = more.as_object().expect("an object").clone();
        scaling.as_object_mut().expect("an object").extend(more);
        match changed("qwen3-tied", &json!({"rope_scaling": scaling})).expect("it opens").rope.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            other => panic!("{other:?}"),
        }
    };
    let inferred = 0.1 * 4f64.ln() + 1.0;
    assert_eq!(of(json!({})), inferred);
    assert_eq!(of(json!({"attn_factor": 0.5})), 0.5 * inferred);
    // The value of DeepSeek-R1-0528-Qwen3-8B takes the scale back.
    assert!((of(json!({"attn_factor": 0.878_248_856_286_941_9})) - 1.0).abs() < 1e-12);
    assert_eq!(of(json!({"attn_factor": 0.5, "attention_factor": 1.25})), 1.25, "a scale that is given is whole");
    let text = json!({"rope_type": "yarn", "factor": 4.0, "attn_factor": "1"});
    refused("qwen3-tied", &json!({"rope_scaling": text}), "rope_scaling.attn_factor: is \"1\", needs a number");
}
