//! Encoders: against sentence-transformers and Hugging Face transformers, and the same bits however texts are batched.
//!
//! f32: within 2e-5 of transformers' in every component. bf16, every CPU path: no further from its f32 than
//! transformers' own bf16 run is.

use crate::common;

use std::time::Duration;

use common::weights::{Files, tensor, write_safetensors};
use common::{MakeDevice, cpu, devices, load, reference, repository};
use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::Model;
use penstock_engine::{Engine, EngineConfig, Forward};
use penstock_kernels::cpu::Path as CpuPath;
use penstock_kernels::{Held, KvFormat, PAGE_TOKENS, Span, StepBatch};
use penstock_proto::ErrorKind;
use penstock_proto::frames::{ChoiceStart, Generate, Output, Pooling, Sampling};
use serde::Deserialize;

/// A case of `tests/goldens/encoders`.
#[derive(Clone, Deserialize)]
pub(crate) struct Case {
    case: String,
    pub(crate) config: serde_json::Value,
    pub(crate) seed: u64,
    pub(crate) dtype: String,
    pub(crate) tensors: Vec<(String, Vec<usize>)>,
    tokens: Vec<u32>,
    /// Numbers of tokens of the sequence that are a text.
    lengths: Vec<usize>,
    /// States of the texts of an embedding model.
    #[serde(default)]
    states: Vec<States>,
    /// Beginnings of second texts, of a reranker.
    #[serde(default)]
    seconds: Vec<u32>,
    #[serde(default)]
    logits: Vec<f32>,
    bf16: Yardstick,
}

#[derive(Clone, Deserialize)]
struct States {
    first: Vec<f32>,
    mean: Vec<f32>,
}

/// Distance of transformers' bf16 run from its f32 run: of scaled vectors, or of logits.
#[derive(Clone, Deserialize)]
pub(crate) struct Yardstick {
    pub(crate) mean: f64,
    pub(crate) max: f64,
}

impl Yardstick {
    /// Checks that vectors or logits in bf16 are no further from `want` than the other library's bf16 run is, and no angle more than `cosine_min`.
    #[track_caller]
    pub(crate) fn holds(&self, name: &str, got: &[Vec<f32>], want: &[Vec<f32>], cosine_min: f64) {
        let (errors, cosine) = distance(got, want);
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let max = errors.iter().copied().fold(0.0, f64::max);
        println!("{name}: mean {:.2} max {:.2} of its own", mean / self.mean, max / self.max);
        assert!(mean <= self.mean, "{name}: mean {mean:.5}, its own {:.5}", self.mean);
        assert!(max <= self.max, "{name}: maximum {max:.5}, its own {:.5}", self.max);
        assert!(cosine > cosine_min, "{name}: cosine {cosine}");
    }
}

fn cases() -> Vec<Case> {
    let mut paths: Vec<_> = std::fs::read_dir(repository("tests/goldens/encoders"))
        .expect("goldens")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    let read = |path| serde_json::from_slice(&std::fs::read(path).expect("a golden")).expect("a golden");
    let cases: Vec<Case> = paths.iter().map(read).collect();
    assert_eq!(cases.len(), 24);
    cases
}

/// Case with the given name.
pub(crate) fn named(name: &str) -> Case {
    let path = repository("tests/goldens/encoders").join(format!("{name}.json"));
    serde_json::from_slice(&std::fs::read(path).expect("a golden")).expect("a golden")
}

impl Case {
    /// The checkpoint as files: config, weights, and what else opening it needs.
    pub(crate) fn files(&self) -> Files {
        let tensors: Vec<_> =
            self.tensors.iter().map(|(name, shape)| tensor(self.seed, &self.dtype, name, shape)).collect();
        let mut files: Files = vec![
            ("config.json".into(), serde_json::to_vec(&self.config).expect("json").into()),
            ("model.safetensors".into(), write_safetensors(&tensors).into()),
        ];
        if self.case.ends_with("-masked") {
            files.push(("modules.json".into(), b"[]".into()));
        }
        files
    }

    fn checkpoint(&self) -> Checkpoint {
        Checkpoint::from_buffers(self.files()).unwrap_or_else(|error| panic!("{}: {error}", self.case))
    }

    /// Requests for the first tokens and the means of all texts, or for the logits of all pairs; as many as results.
    pub(crate) fn requests(&self) -> Vec<Generate> {
        let each = |at: usize, rule: Pooling| {
            let (prompt, second_text) = (&self.tokens[..self.lengths[at]], self.seconds.get(at).copied().unwrap_or(0));
            Generate { second_text, ..pooled(0, prompt, rule) }
        };
        let rules: &[Pooling] = if self.is_reranker() { &[Pooling::Head] } else { &[Pooling::First, Pooling::Mean] };
        let all = (0..self.lengths.len()).flat_map(|at| rules.iter().map(move |rule| each(at, *rule)));
        all.zip(1..).map(|(request, number)| Generate { request: number, ..request }).collect()
    }

    /// Results of [`Self::requests`], as transformers computes them in f32.
    fn wanted(&self) -> Vec<Vec<f32>> {
        let states = self.states.iter().flat_map(|states| [states.first.clone(), states.mean.clone()]);
        states.chain(self.logits.iter().map(|logit| vec![*logit])).collect()
    }

    fn is_reranker(&self) -> bool {
        self.states.is_empty()
    }

    fn engine(&self, make: &MakeDevice, config: &EngineConfig) -> Engine {
        Engine::new(Box::new(load(&self.checkpoint(), &**make, 64, 1024)), config)
    }
}

pub(crate) fn pooled(request: u64, prompt: &[u32], rule: Pooling) -> Generate {
    Generate {
        request,
        prompt: prompt.to_vec(),
        choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
        sampling: Some(Sampling { top_p: 1.0, repetition_penalty: 1.0, logprobs: -1, ..Sampling::default() }),
        pooling: rule as i32,
        ..Generate::default()
    }
}

/// Config of an engine whose steps have room for the longest text.
pub(crate) fn wide() -> EngineConfig {
    EngineConfig { batch_tokens: 1024, ..EngineConfig::default() }
}

/// Runs an engine until nothing is left; returns the outputs that end a choice, in order of their requests.
pub(crate) fn ends(engine: &mut Engine) -> Vec<Output> {
    let mut ends = Vec::new();
    while engine.has_work() {
        ends.extend(engine.step(&|| Duration::ZERO).outputs.into_iter().filter(|output| output.finish.is_some()));
    }
    ends.sort_by_key(|output| output.request);
    ends
}

pub(crate) fn vectors(engine: &mut Engine, requests: Vec<Generate>) -> Vec<Vec<f32>> {
    requests.into_iter().for_each(|request| engine.submit(request));
    ends(engine).into_iter().map(|output| output.vector).collect()
}

/// Errors of all values, of vectors once they are scaled, and the least cosine.
pub(crate) fn distance(got: &[Vec<f32>], want: &[Vec<f32>]) -> (Vec<f64>, f64) {
    assert_eq!(got.len(), want.len());
    let (mut errors, mut cosine) = (Vec::new(), 1.0f64);
    for (got, want) in got.iter().zip(want) {
        assert_eq!(got.len(), want.len());
        let length = |v: &[f32]| {
            if v.len() == 1 { 1.0 } else { v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt() }
        };
        let (of_got, of_want) = (length(got), length(want));
        let pairs = || got.iter().zip(want).map(|(a, b)| (f64::from(*a) / of_got, f64::from(*b) / of_want));
        errors.extend(pairs().map(|(a, b)| (a - b).abs()));
        if got.len() > 1 {
            cosine = cosine.min(pairs().map(|(a, b)| a * b).sum());
        }
    }
    (errors, cosine)
}

#[test]
fn f32_agrees_with_transformers() {
    for case in cases() {
        let make: MakeDevice = Box::new(reference);
        let got = vectors(&mut case.engine(&make, &wide()), case.requests());
        let (errors, cosine) = distance(&got, &case.wanted());
        let max = errors.iter().copied().fold(0.0, f64::max);
        println!("{}: f32 max {max:.1e}, 1 - cosine {:.1e}", case.case, 1.0 - cosine);
        assert!(max < 2e-5 && cosine > 0.999_999, "{}: {max:e}, cosine {cosine}", case.case);
    }
}

#[test]
fn bf16_is_as_close_as_transformers_own() {
    for case in cases() {
        for (path, make) in common::cpu_paths() {
            let got = vectors(&mut case.engine(&make, &wide()), case.requests());
            case.bf16.holds(&format!("{}, {path}", case.case), &got, &case.wanted(), 0.9999);
        }
    }
}

pub(crate) fn bits(vectors: &[Vec<f32>]) -> Vec<Vec<u32>> {
    vectors.iter().map(|vector| vector.iter().map(|value| value.to_bits()).collect()).collect()
}

#[test]
fn alone_and_in_every_batch_are_the_same_bits() {
    for case in cases() {
        for (path, make) in devices() {
            let name = format!("{}, {path}", case.case);
            let mut engine = case.engine(&make, &wide());
            let alone: Vec<_> =
                case.requests().into_iter().flat_map(|request| vectors(&mut engine, vec![request])).collect();
            let alone = bits(&alone);
            assert!(alone.iter().all(|vector| !vector.is_empty()), "{name}");
            for config in [
                wide(),
                // A chunk is smaller than a text, and a step has room for few.
                EngineConfig { batch_tokens: 700, chunk_tokens: 7, sequences_max: 3, ..wide() },
            ] {
                let mut engine = case.engine(&make, &config);
                assert_eq!(bits(&vectors(&mut engine, case.requests())), alone, "{name}: in batches");
                let mut reversed = case.requests();
                reversed.reverse();
                assert_eq!(bits(&vectors(&mut engine, reversed)), alone, "{name}: in another order");
                assert!(engine.is_empty(), "{name}");
                let state = engine.state();
                assert_eq!(
                    (state.blocks_cached, state.blocks_free),
                    (0, state.blocks_total),
                    "{name}: nothing is kept"
                );
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for case in ["bert-long", "xlmr-cls", "bert-rank", "modern-masked", "modern-rank-mean", "mpnet-long"].map(named) {
        let of = |threads| {
            let engine = &mut case.engine(&cpu(CpuPath::Auto, threads), &wide());
            bits(&vectors(engine, case.requests()))
        };
        let one = of(1);
        assert!(of(2) == one && of(5) == one, "{}", case.case);
    }
}

#[test]
fn weights_of_8_and_4_bits_come_near() {
    for case in ["bert-cls", "roberta-mean", "modern-cls", "modern-mean"].map(named) {
        let vectors_of = |held| {
            let limits = penstock_engine::models::ModelLimits {
                context_tokens: None,
                kv: penstock_engine::models::KvBudget::Pages(64),
                rows_max: 256,
                sampled_max: 32,
                held,
                kv_format: KvFormat::Own,
            };
            let device = cpu(CpuPath::Auto, 1)(penstock_kernels::Limits { rows_max: 256, sampled_max: 32 });
            let model = Model::load(&case.checkpoint(), device, limits, &mut |_| {}).expect("it loads");
            vectors(&mut Engine::new(Box::new(model), &wide()), case.requests())
        };
        for (held, least, less_than) in [(Held::Int8, 0.999, Held::Stored), (Held::Int4, 0.97, Held::Int8)] {
            let cosine = distance(&vectors_of(held), &case.wanted()).1;
            assert!(cosine > least, "{}, {held:?}: {cosine}", case.case);
            assert!(case.checkpoint().held_bytes(held) < case.checkpoint().held_bytes(less_than), "{held:?}");
        }
    }
}

pub(crate) fn kind(output: &Output) -> ErrorKind {
    ErrorKind::from_wire(output.finish.as_ref().expect("an end").error_kind)
}

#[test]
fn a_text_may_fill_the_context_and_what_fits_nothing_is_refused() {
    let (embedder, reranker, xlm) = (named("bert-cls"), named("bert-rank"), named("xlmr-rank"));
    let make: MakeDevice = Box::new(reference);
    let mut engine = embedder.engine(&make, &wide());
    let context = engine.context_tokens();
    assert_eq!((context, engine.encodes(), engine.makes_vectors()), (160, true, true));
    assert_eq!(xlm.engine(&make, &wide()).context_tokens(), 160, "of 162 rows, two are no position's");
    let long: Vec<u32> = embedder.tokens.iter().copied().cycle().take(context + 1).collect();
    for (request, want) in [
        (pooled(1, &[], Pooling::First), ErrorKind::InvalidRequest),
        (pooled(2, &[100_000], Pooling::First), ErrorKind::InvalidRequest),
        (pooled(3, &long, Pooling::Mean), ErrorKind::ContextLength),
        (pooled(4, &long[..3], Pooling::Head), ErrorKind::Unsupported),
        (pooled(5, &long[..3], Pooling::None), ErrorKind::Unsupported),
        (Generate { second_text: 3, ..pooled(6, &long[..3], Pooling::First) }, ErrorKind::InvalidRequest),
        (Generate { pooling: 77, ..pooled(7, &long[..3], Pooling::First) }, ErrorKind::Unsupported),
    ] {
        let number = request.request;
        engine.submit(request);
        let outputs = ends(&mut engine);
        assert!(!outputs.is_empty() && outputs.iter().all(|output| kind(output) == want), "{number}: {outputs:?}");
    }
    let whole = vectors(&mut engine, vec![pooled(8, &long[..context], Pooling::Last)]);
    assert_eq!(whole[0].len(), 96);
    let mut engine = reranker.engine(&make, &wide());
    assert!(engine.encodes() && !engine.makes_vectors());
    engine.submit(pooled(1, &long[..3], Pooling::Mean));
    assert_eq!(kind(&ends(&mut engine)[0]), ErrorKind::Unsupported);
    let mut engine = xlm.engine(&make, &wide());
    engine.submit(Generate { second_text: 2, ..pooled(1, &long[..3], Pooling::Head) });
    assert_eq!(kind(&ends(&mut engine)[0]), ErrorKind::InvalidRequest, "one type of tokens");
    assert!(engine.probe().expect("it runs"));
}

#[test]
fn a_step_with_room_for_less_than_the_model_takes_lowers_the_context() {
    let case = named("bert-long");
    let make: MakeDevice = Box::new(reference);
    let mut engine = case.engine(&make, &EngineConfig { batch_tokens: 64, sequences_max: 8, ..wide() });
    assert_eq!(engine.context_tokens(), 64);
    let texts = (1..20).map(|n| pooled(n, &case.tokens[..(n as usize * 13) % 64 + 1], Pooling::Mean)).collect();
    assert!(vectors(&mut engine, texts).iter().all(|vector| vector.len() == 64));
}

#[test]
fn both_spellings_of_modernberts_layers_are_the_same_model() {
    let spelled = named("modern-cls");
    let mut old = spelled.clone();
    let config = old.config.as_object_mut().expect("an object");
    config.remove("layer_types");
    config.remove("rope_parameters");
    config.insert("global_attn_every_n_layers".into(), 3.into());
    config.insert("local_rope_theta".into(), 1000.0.into());
    assert_eq!(old.checkpoint().config(), spelled.checkpoint().config());
    // A theta that is null is that of the layers without a window; an absent one is the default.
    let theta = |value: Option<serde_json::Value>| {
        let mut case = named("modern-mean");
        let config = case.config.as_object_mut().expect("an object");
        config.remove("local_rope_theta");
        config.extend(value.map(|value| ("local_rope_theta".to_owned(), value)));
        case.checkpoint().config().local_rope.as_ref().expect("windows").rope_theta
    };
    assert_eq!((theta(Some(serde_json::Value::Null)), theta(None)), (80_000.0, 10_000.0));
    let windows = |case: &str| named(case).checkpoint().config().windows.clone();
    assert_eq!(
        windows("modern-cls"),
        [None, Some(13), Some(13), None, Some(13)],
        "12 on each side, and the token itself"
    );
    assert_eq!(windows("modern-mean"), [None, Some(4), None]);
}

#[test]
fn a_head_for_masked_tokens_needs_files_that_say_what_vectors_are() {
    for case in ["bert-masked", "xlmr-masked", "modern-masked"].map(named) {
        let mut files = case.files();
        files.retain(|(name, _)| name != "modules.json");
        let error = Checkpoint::from_buffers(files).expect_err("no modules").to_string();
        let name = case.config["architectures"][0].as_str().expect("a name");
        assert!(error.contains(&format!("architectures: {name}")) && error.contains("modules.json"), "{error}");
        assert!(case.checkpoint().ignored().iter().any(|name| name.ends_with("bias")), "the head is ignored");
    }
}

#[test]
fn an_encoder_gives_no_logits() {
    let mut model = load(&named("bert-cls").checkpoint(), &reference, 8, 64);
    let spans = [Span { rows: 0..2, context: 2, block_table: &[0], adapter: None }];
    let batch = StepBatch { tokens: &[5, 6], spans: &spans, sampled: &[1], ..Default::default() };
    let error = model.forward(&batch, None).expect_err("no head").to_string();
    assert!(error.contains("the model is an encoder, which makes vectors or scores"), "{error}");
    assert!(model.states(&batch, None, &mut Vec::new(), true).is_err());
    assert_eq!(
        Model::page_bytes(named("bert-cls").checkpoint().config(), KvFormat::Int8),
        2 * 2 * 96 * PAGE_TOKENS as u64
    );
}

#[test]
fn nomics_config_is_read_in_both_spellings() {
    let of = |case: &Case| case.checkpoint().config().clone();
    let both = named("nomic-mean");
    let want = of(&both);
    assert_eq!((want.max_position_embeddings, want.rope.rope_theta), (160, 1000.0));
    let without = |names: &[&str]| {
        let mut case = both.clone();
        names.iter().for_each(|name| drop(case.config.as_object_mut().expect("an object").remove(*name)));
        case
    };
    let ours = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps"];
    let makers = without(&[&ours[..], &["max_position_embeddings", "rope_parameters", "hidden_act"]].concat());
    assert_eq!(of(&makers), want, "the makers' spelling alone");
    let theirs = ["n_embd", "n_inner", "n_layer", "n_head", "layer_norm_epsilon", "n_positions", "rotary_emb_base"];
    let more = ["activation_function", "rotary_emb_fraction", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"];
    assert_eq!(of(&without(&[&theirs[..], &more].concat())), want, "transformers' spelling alone");
    // What the makers' code takes for absent fields is not what transformers takes.
    for name in ["qkv_proj_bias", "rotary_emb_fraction", "activation_function"] {
        let error = Checkpoint::from_buffers(without(&[name]).files()).expect_err(name).to_string();
        assert!(error.contains(name), "{error}");
    }
    let mut longer = makers;
    longer.config["max_trained_positions"] = serde_json::Value::Null;
    assert_eq!(of(&longer).max_position_embeddings, 2048, "what v1.5 was trained for, of 8192");
}

#[test]
fn configs_that_change_the_computation_are_refused_by_field() {
    let refused = |name: &str, field: &str, value: serde_json::Value, what: &str| {
        let mut case = named(name);
        case.config[field] = value;
        let error = Checkpoint::from_buffers(case.files()).expect_err(field).to_string();
        assert!(error.contains(field) && error.contains(what), "{error}");
    };
    refused("bert-cls", "hidden_act", "relu".into(), "\"relu\" is not supported");
    refused("bert-cls", "position_embedding_type", "relative_key".into(), "only \"absolute\"");
    refused("bert-cls", "is_decoder", true.into(), "served only as encoders");
    refused("bert-cls", "quantization_config", serde_json::json!({}), "quantized");
    refused("bert-cls", "num_attention_heads", 5.into(), "twice the number of heads");
    refused("bert-rank", "id2label", serde_json::json!({"0": "a", "1": "b"}), "2 labels");
    refused("xlmr-cls", "max_position_embeddings", 2.into(), "max_position_embeddings");
    refused("modern-cls", "hidden_activation", "silu".into(), "\"silu\" is not supported");
    refused("distilbert-mean", "activation", "relu".into(), "\"relu\" is not supported");
    let nomic = |field, value, what| refused("nomic-mean", field, value, what);
    nomic("qkv_proj_bias", true.into(), "is true, which is not supported");
    nomic("prenorm", true.into(), "is true, which is not supported");
    nomic("rotary_emb_interleaved", true.into(), "is true, which is not supported");
    nomic("rotary_emb_fraction", serde_json::json!(0.5), "only 1, the whole head");
    nomic("rotary_emb_scale_base", 512.into(), "scaled rotations");
    nomic(
        "rope_parameters",
        serde_json::json!({"rope_type": "yarn", "factor": 2.0}),
        "rope_type: \"yarn\" is not supported",
    );
    nomic("moe_every_n_layers", 2.into(), "no mixture of experts");
    nomic("activation_function", "gelu".into(), "only \"swiglu\" is");
    nomic("hidden_act", "gelu".into(), "only \"silu\" is");
    // ModernBERT's code reads no such field; mmBERT's config has it.
    let mut case = named("modern-cls");
    case.config["position_embedding_type"] = "sans_pos".into();
    assert_eq!(case.checkpoint().config(), named("modern-cls").checkpoint().config());
    refused("modern-cls", "local_attention", 1.into(), "needs an integer from 2");
    refused("modern-cls", "layer_types", serde_json::json!(["full_attention"]), "1 entries for 5 layers");
    refused("modern-cls", "rope_scaling", serde_json::json!({"rope_type": "yarn"}), "scaled rotations");
    let yarn = serde_json::json!({"sliding_attention": {"rope_type": "yarn", "factor": 2.0}});
    refused("modern-cls", "rope_parameters", yarn, "sliding_attention.rope_type");
    let of_all = serde_json::json!({"rope_type": "default", "rope_theta": 5000.0});
    refused("modern-cls", "rope_parameters", of_all, "rope_type: is not inside of full_attention");
    refused("modern-mean", "global_attn_every_n_layers", 0.into(), "needs an integer from 1");
    refused("modern-mean", "local_rope_theta", 1.into(), "local_rope_theta");
    refused("modern-rank", "classifier_pooling", "max".into(), "only \"cls\" and \"mean\"");
    refused("modern-rank", "classifier_activation", "relu".into(), "\"relu\" is not supported");
    refused("modern-rank", "id2label", serde_json::json!({"0": "a", "1": "b"}), "2 labels");
    refused("mpnet-mean", "relative_attention_num_buckets", 64.into(), "only 32 are supported");
    let mut case = named("mpnet-mean");
    case.tensors.retain(|(name, _)| !name.contains("relative_attention_bias"));
    let error = Checkpoint::from_buffers(case.files()).expect_err("no bias").to_string();
    assert!(error.contains("encoder.relative_attention_bias.weight") && error.contains("[32, 6]"), "{error}");
    let mut case = named("modern-cls");
    case.config["intermediate_size"] = 140.into();
    let error = Checkpoint::from_buffers(case.files()).expect_err("another shape").to_string();
    assert!(error.contains("tensor layers.0.mlp.Wi.weight") && error.contains("[280, 96]"), "{error}");
    let mut case = named("modern-cls");
    case.tensors.retain(|(name, _)| name != "final_norm.weight");
    let error = Checkpoint::from_buffers(case.files()).expect_err("no last norm").to_string();
    assert!(error.contains("final_norm.weight"), "{error}");
    let mut case = named("xlmr-cls");
    case.config["max_position_embeddings"] = 163.into();
    let error = Checkpoint::from_buffers(case.files()).expect_err("a row is missing").to_string();
    assert!(error.contains("position_embeddings.weight") && error.contains("[163, 96]"), "{error}");
    let mut case = named("bert-rank");
    case.tensors.retain(|(name, _)| !name.contains("classifier"));
    let error = Checkpoint::from_buffers(case.files()).expect_err("no head").to_string();
    assert!(error.contains("classifier.weight"), "{error}");
}
