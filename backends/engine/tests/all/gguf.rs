//! Models in GGUF files: the same bits as from safetensors, every block format on every path, and files that are refused.

use std::borrow::Cow;

use crate::common;

use common::gguf::{Noise, VOCAB, gguf_of, gguf_with, keys, name, open, random, random_with, refused};
use common::weights::Golden;
use common::{cpu_paths, load, log_softmax, logits_of, logits_with, reference};
use penstock_engine::Forward;
use penstock_engine::checkpoint::{Checkpoint, RopeScaling, Rotation};
use penstock_gguf::{Value, Writer};
use penstock_kernels::{AdapterSlot, DType};
use serde_json::Value as Json;

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
fn files_that_rotate_otherwise_are_other_models() {
    let hash = |file: Vec<u8>| open(file).model_hash();
    let stretched = |factor: f64| {
        let mut golden = Golden::named("llama-llama3-bias");
        golden.config["rope_scaling"]["factor"] = factor.into();
        hash(gguf_of(&golden))
    };
    assert_eq!(stretched(8.0), stretched(8.0));
    assert_ne!(stretched(8.0), stretched(4.0), "rope_freqs.weight alone differs");
    let long = |list: &str| {
        let mut golden = Golden::named("phi3-long");
        golden.config["rope_scaling"][list][0] = 1.75.into();
        hash(gguf_of(&golden))
    };
    assert_ne!(long("short_factor"), long("long_factor"));
    let with = |name: &str, key: &str, value: Value| hash(gguf_with(&Golden::named(name), &[(key, value)]));
    let factor = |number| with("phi3-long", "phi3.rope.scaling.attn_factor", Value::Float(number));
    assert_ne!(factor(1.25), factor(1.5));
    let finetuned = |flag| with("granite-plain", "granite.rope.scaling.finetuned", Value::Bool(flag));
    assert_ne!(finetuned(false), finetuned(true));
    assert_eq!(finetuned(true), hash(gguf_of(&Golden::named("granite-plain"))), "the same rotations");
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
fn layers_are_bounded_before_a_list_of_them_is_made() {
    for (case, name) in [("olmo3-listed", "olmo2"), ("llama-plain", "llama")] {
        let mut golden = Golden::named(case);
        golden.config.as_object_mut().expect("an object").remove("layer_types");
        let pattern = ("olmo2.attention.sliding_window_pattern", Value::Integer(2));
        for count in [1025, 1_000_000] {
            golden.config["num_hidden_layers"] = count.into();
            let file = gguf_with(&golden, std::slice::from_ref(&pattern));
            refused(file, &format!("{name}.block_count: is {count}, needs an integer from 1 to 1024"));
        }
    }
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
