//! Embedding models whose chain is more than an encoder and its mean: decoders of whole texts, EmbeddingGemma's decoder among them, and dense layers
//! behind the pooling. Against sentence-transformers, and the same bits however texts are batched.
//!
//! f32: within 2e-5 of sentence-transformers in every component. bf16, every CPU path: no further from its f32 than its own bf16 run is.

use std::collections::BTreeMap;

use super::encoders::{Yardstick, bits, distance, ends, kind, pooled, vectors, wide};
use crate::common;
use common::weights::{Files, Tensor, tensor, write_safetensors};
use common::{MakeDevice, cpu, devices, load, reference, repository};
use penstock_engine::adapter::Adapter;
use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::{Engine, EngineConfig, Forward};
use penstock_kernels::cpu::Path as CpuPath;
use penstock_kernels::{Feature, Held};
use penstock_proto::ErrorKind;
use penstock_proto::frames::{Generate, Pooling};
use serde::Deserialize;
use serde_json::{Value, json};

/// A case of `tests/goldens/chains`.
#[derive(Clone, Deserialize)]
struct Case {
    case: String,
    config: Value,
    seed: u64,
    dtype: String,
    tensors: Vec<(String, Vec<usize>)>,
    /// Tensors of each dense layer, by its folder.
    layers: BTreeMap<String, Vec<(String, Vec<usize>)>>,
    pooling: String,
    pooled_from: u32,
    ids: Vec<Vec<u32>>,
    /// Vectors before a last scaling.
    vectors: Vec<Vec<f32>>,
    bf16: Yardstick,
    /// Files beside the weights.
    files: BTreeMap<String, Value>,
}

fn cases() -> Vec<Case> {
    let folder = std::fs::read_dir(repository("tests/goldens/chains")).expect("goldens");
    let mut paths: Vec<_> = folder.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let read = |path| serde_json::from_slice(&std::fs::read(path).expect("a golden")).expect("a golden");
    let cases: Vec<Case> = paths.iter().map(read).collect();
    assert_eq!(cases.len(), 10);
    cases
}

fn named(name: &str) -> Case {
    cases().into_iter().find(|case| case.case == name).expect("a case")
}

impl Case {
    /// The checkpoint as files; `between` stands between the folder of a module and its file.
    fn files(&self, between: &str) -> Files {
        let of = |prefix: &str, tensors: &[(String, Vec<usize>)]| {
            let tensors = tensors.iter().map(|(name, shape)| Tensor {
                name: name.clone(),
                ..tensor(self.seed, &self.dtype, &format!("{prefix}{name}"), shape)
            });
            write_safetensors(&tensors.collect::<Vec<_>>())
        };
        let mut files: Files = vec![
            ("config.json".into(), serde_json::to_vec(&self.config).expect("json").into()),
            ("model.safetensors".into(), of("", &self.tensors).into()),
        ];
        let beside = self.files.iter().filter(|(name, _)| *name == "modules.json" || name.contains('/'));
        let beside = beside
            .map(|(name, content)| (name.replace('/', between), serde_json::to_vec(content).expect("json").into()));
        files.extend(beside);
        let layers = self.layers.iter();
        files.extend(layers.map(|(folder, tensors)| {
            (format!("{folder}{between}model.safetensors"), of(&format!("{folder}."), tensors).into())
        }));
        files
    }

    fn checkpoint(&self) -> Checkpoint {
        Checkpoint::from_buffers(self.files("/")).unwrap_or_else(|error| panic!("{}: {error}", self.case))
    }

    fn rule(&self) -> Pooling {
        match self.pooling.as_str() {
            "lasttoken" => Pooling::Last,
            "cls" => Pooling::First,
            "mean" => Pooling::Mean,
            "mean_sqrt_len_tokens" => Pooling::RootMean,
            "weightedmean" => Pooling::WeightedMean,
            "max" => Pooling::Max,
            other => panic!("{other}"),
        }
    }

    /// Request for the vector of these tokens.
    fn request(&self, number: u64, tokens: &[u32]) -> Generate {
        let dense_layers = self.layers.len() as u32;
        Generate { dense_layers, pooled_from: self.pooled_from, ..pooled(number, tokens, self.rule()) }
    }

    fn requests(&self) -> Vec<Generate> {
        self.ids.iter().zip(1..).map(|(tokens, number)| self.request(number, tokens)).collect()
    }

    fn engine(&self, make: &MakeDevice, config: &EngineConfig) -> Engine {
        Engine::new(Box::new(load(&self.checkpoint(), &**make, 64, 1024)), config)
    }
}

#[test]
fn f32_agrees_with_sentence_transformers() {
    for case in cases() {
        let make: MakeDevice = Box::new(reference);
        let got = vectors(&mut case.engine(&make, &wide()), case.requests());
        let (errors, cosine) = distance(&got, &case.vectors);
        let max = errors.iter().copied().fold(0.0, f64::max);
        println!("{}: f32 max {max:.1e}, 1 - cosine {:.1e}", case.case, 1.0 - cosine);
        assert!(max < 2e-5 && cosine > 0.999_999, "{}: {max:e}, cosine {cosine}", case.case);
        // Lengths are those of sentence-transformers, too, where nothing is scaled at the end.
        let length = |vector: &[f32]| vector.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        for (got, want) in got.iter().zip(&case.vectors) {
            let off = (length(got) / length(want) - 1.0).abs();
            let is_scaled = (length(want) - 1.0).abs() < 1e-3;
            assert!(off < 1e-4 || is_scaled, "{}: length off by {off}", case.case);
        }
    }
}

#[test]
fn bf16_is_as_close_as_its_own() {
    for case in cases() {
        for (path, make) in common::cpu_paths() {
            let got = vectors(&mut case.engine(&make, &wide()), case.requests());
            // The rounding of a single row is evened out by no mean.
            let cosine_min = if matches!(case.rule(), Pooling::First | Pooling::Last) { 0.999 } else { 0.9999 };
            case.bf16.holds(&format!("{}, {path}", case.case), &got, &case.vectors, cosine_min);
        }
    }
}

#[test]
fn alone_and_in_every_batch_are_the_same_bits() {
    for case in cases() {
        for (path, make) in devices() {
            let name = format!("{}, {path}", case.case);
            let mut engine = case.engine(&make, &wide());
            let requests = case.requests();
            let alone: Vec<_> = requests.into_iter().flat_map(|request| vectors(&mut engine, vec![request])).collect();
            let alone = bits(&alone);
            assert!(alone.iter().all(|vector| !vector.is_empty()), "{name}");
            for config in [wide(), EngineConfig { batch_tokens: 300, chunk_tokens: 7, sequences_max: 3, ..wide() }] {
                let mut engine = case.engine(&make, &config);
                assert_eq!(bits(&vectors(&mut engine, case.requests())), alone, "{name}: in batches");
                let mut reversed = case.requests();
                reversed.reverse();
                assert_eq!(bits(&vectors(&mut engine, reversed)), alone, "{name}: in another order");
                assert!(engine.is_empty(), "{name}");
                let state = engine.state();
                if engine.encodes() {
                    let counts = (state.blocks_cached, state.blocks_free);
                    assert_eq!(counts, (0, state.blocks_total), "{name}: nothing is kept");
                }
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for case in ["gemma-mean", "qwen3-last"].map(named) {
        let of = |threads| {
            let engine = &mut case.engine(&cpu(CpuPath::Auto, threads), &wide());
            bits(&vectors(engine, case.requests()))
        };
        assert!(of(3) == of(1), "{}", case.case);
    }
}

#[test]
fn a_window_of_both_sides_has_half_of_its_tokens_on_each() {
    let config = |name: &str| named(name).checkpoint().config().clone();
    let gemma = config("gemma-mean");
    assert!(!gemma.causal && gemma.is_whole() && gemma.headless && gemma.vector_width() == 64);
    assert_eq!(gemma.windows, [Some(13), None, Some(13), None], "12 on each side, and the token itself");
    let odd = config("gemma-odd");
    assert_eq!(odd.windows, [Some(4), Some(4), Some(4), Some(4), Some(4), None, Some(4)]);
    let (llama, qwen3) = (config("llama-mean"), config("qwen3-last"));
    assert!(llama.causal && llama.is_whole(), "causal, and pooled by all tokens");
    assert!(qwen3.causal && !qwen3.is_whole() && qwen3.vector_width() == 48, "the last token needs no whole text");
    for config in [gemma, odd, llama, qwen3] {
        assert!(config.features().any(|feature| feature == Feature::Encoders), "GPUs refuse it by name");
    }
    // The layer is a part of the model's hash and bytes.
    let (whole, mut without) = (named("qwen3-last"), named("qwen3-last"));
    without.layers.clear();
    without.files.remove("modules.json");
    without
        .tensors
        .push(("lm_head.weight".into(), vec![without.config["vocab_size"].as_u64().expect("a size") as usize, 96]));
    let (whole, without) = (whole.checkpoint(), without.checkpoint());
    assert_ne!(whole.model_hash(), without.model_hash());
    let with = |activation: &str| {
        let mut case = named("qwen3-last");
        let dense = case.files.get_mut("2_Dense/config.json").expect("a dense layer");
        dense["activation_function"] = format!("torch.nn.modules.{activation}").into();
        case.checkpoint().model_hash()
    };
    assert_ne!(with("activation.Tanh"), with("linear.Identity"), "the same tensors, other vectors");
    assert!(whole.tensor("2_Dense.linear.weight").stored_bytes() == 4 * 48 * 96);
    assert!(whole.held_bytes(Held::Int8) < whole.held_bytes(Held::Stored));
}

#[test]
fn a_pulled_checkpoint_has_the_same_vectors() {
    let case = named("gemma-mean");
    let make: MakeDevice = Box::new(reference);
    let pulled = Checkpoint::from_buffers(case.files(".")).expect("it opens");
    assert_eq!(pulled.model_hash(), case.checkpoint().model_hash());
    let mut engine = Engine::new(Box::new(load(&pulled, &*make, 64, 1024)), &wide());
    let want = vectors(&mut case.engine(&make, &wide()), case.requests());
    assert_eq!(bits(&vectors(&mut engine, case.requests())), bits(&want));
}

#[test]
fn requests_that_the_chain_does_not_fit_are_refused() {
    let make: MakeDevice = Box::new(reference);
    let gemma = named("gemma-mean");
    let mut engine = gemma.engine(&make, &wide());
    assert!(engine.encodes() && engine.makes_vectors() && engine.probe().expect("it runs"));
    let (context, tokens) = (engine.context_tokens(), &gemma.ids[0][..]);
    assert_eq!(context, 256);
    let long: Vec<u32> = tokens.iter().copied().cycle().take(context + 1).collect();
    let of = |number| gemma.request(number, tokens);
    for (request, want) in [
        (Generate { pooling: Pooling::None as i32, dense_layers: 0, ..of(1) }, ErrorKind::Unsupported),
        (Generate { pooling: Pooling::Head as i32, ..of(2) }, ErrorKind::Unsupported),
        (Generate { dense_layers: 1, ..of(3) }, ErrorKind::Unsupported),
        (Generate { pooled_from: tokens.len() as u32, ..of(4) }, ErrorKind::InvalidRequest),
        (Generate { second_text: 2, ..of(5) }, ErrorKind::InvalidRequest),
        (gemma.request(6, &long), ErrorKind::ContextLength),
    ] {
        let number = request.request;
        engine.submit(request);
        let outputs = ends(&mut engine);
        assert!(!outputs.is_empty() && outputs.iter().all(|output| kind(output) == want), "{number}: {outputs:?}");
    }
    assert_eq!(vectors(&mut engine, vec![gemma.request(7, &long[..context])])[0].len(), 64);
    // A decoder whose prompts are computed in parts has the state of the last token alone.
    let qwen3 = named("qwen3-last");
    let mut engine = qwen3.engine(&make, &wide());
    engine.submit(Generate { pooling: Pooling::Mean as i32, ..qwen3.request(1, &qwen3.ids[0]) });
    assert_eq!(kind(&ends(&mut engine)[0]), ErrorKind::Unsupported);
    let mut model = load(&gemma.checkpoint(), &reference, 8, 64);
    let error = model.forward(&penstock_kernels::StepBatch::default(), None).expect_err("no head").to_string();
    assert!(error.contains("makes vectors or scores"), "{error}");
    let adapter = Adapter::from_buffers(Vec::new(), gemma.checkpoint().config()).expect_err("refused").to_string();
    assert!(adapter.contains("vectors of whole texts"), "{adapter}");
}

#[test]
fn layers_that_cannot_be_computed_are_refused_by_file_and_field() {
    let refused = |change: &dyn Fn(&mut Files), parts: &[&str]| {
        let mut files = named("gemma-mean").files("/");
        change(&mut files);
        let error = Checkpoint::from_buffers(files).expect_err(parts[0]).to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}: {error}");
    };
    let set = |field: &'static str, value: Value| {
        move |files: &mut Files| {
            let (_, bytes) = files.iter_mut().find(|(name, _)| name == "3_Dense/config.json").expect("there");
            let mut config: Value = serde_json::from_slice(bytes).expect("json");
            config[field] = value.clone();
            *bytes = serde_json::to_vec(&config).expect("json").into();
        }
    };
    let at = "3_Dense/config.json";
    refused(&set("in_features", 96.into()), &[at, "in_features", "gives 141 values"]);
    refused(&set("out_features", 0.into()), &[at, "out_features"]);
    refused(&set("out_features", 65.into()), &["3_Dense/model.safetensors", "linear.weight", "[64, 141]", "[65, 141]"]);
    refused(&set("bias", true.into()), &["3_Dense/model.safetensors", "linear.bias", "is missing"]);
    refused(&set("activation_function", json!("torch.nn.modules.activation.ReLU")), &[at, "ReLU", "Identity and Tanh"]);
    refused(&set("use_residual", true.into()), &[at, "use_residual"]);
    refused(&set("module_input_name", json!("token_embeddings")), &[at, "module_input_name"]);
    let without = |name: &'static str| move |files: &mut Files| files.retain(|(file, _)| file != name);
    refused(&without("2_Dense/model.safetensors"), &["2_Dense", "is missing", "pytorch_model.bin"]);
    refused(&without("2_Dense/config.json"), &["2_Dense", "is missing", "modules.json"]);
    let list = |text: &'static str| {
        move |files: &mut Files| {
            let (_, bytes) = files.iter_mut().find(|(name, _)| name == "modules.json").expect("there");
            *bytes = text.as_bytes().into();
        }
    };
    refused(&list("{}"), &["modules.json", "list of modules"]);
    let outside = r#"[{"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Dense", "path": "../2_Dense"}]"#;
    refused(&list(outside), &["modules.json", "../2_Dense"]);
    for first in [r#"{"type": "a.Dense", "path": "2_Dense"}"#, r#"{"type": "a.Normalize", "path": "2_Normalize"}"#] {
        let early = format!(r#"[{first}, {{"type": "a.Pooling", "path": "1_Pooling"}}]"#);
        refused(&list(Box::leak(early.into_boxed_str())), &["modules.json", "stands before Pooling"]);
    }
    let long = format!("[{}]", vec!["{}"; 33].join(","));
    refused(&list(Box::leak(long.into_boxed_str())), &["33 modules"]);
    let cut = |files: &mut Files| {
        let (_, bytes) = files.iter_mut().find(|(name, _)| name == "2_Dense/model.safetensors").expect("there");
        let half = bytes.len() / 2;
        bytes.to_mut().truncate(half);
    };
    refused(&cut, &["2_Dense/model.safetensors"]);
}
