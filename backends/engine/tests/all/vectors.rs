//! Vectors of prompts: against Hugging Face transformers, and the same bits however a prompt was computed.
//!
//! A vector is the state of the last token behind the last norm. f32: within 1e-3 of transformers' in every component, cosine above
//! 0.9999. bf16, every CPU path: no further from its f32 than 1.5 times its own bf16 run is.

use crate::common;

use std::time::Duration;

use common::weights::{Golden, Tensor, write_safetensors};
use common::{MakeDevice, devices, load, reference, repository};
use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::Model;
use penstock_engine::{Engine, EngineConfig, Forward};
use penstock_kernels::{PAGE_TOKENS, Span, StepBatch};
use penstock_proto::ErrorKind;
use penstock_proto::frames::{Cancel, ChoiceStart, FinishReason, Generate, Output, Pooling, Sampling};
use serde::Deserialize;

/// Vectors of one case of `tests/goldens/models`, as transformers computes them.
#[derive(Deserialize)]
struct Vectors {
    case: String,
    /// Numbers of tokens of the case's sequence whose vector is given.
    lengths: Vec<usize>,
    /// State of the last token, `[lengths][hidden_size]`.
    states: Vec<Vec<f32>>,
    bf16: Yardstick,
}

/// Distance of the scaled vectors of transformers' bf16 run from those of its f32 run.
#[derive(Deserialize)]
struct Yardstick {
    mean: f64,
    max: f64,
}

fn goldens() -> Vec<Vectors> {
    let text = std::fs::read(repository("tests/goldens/vectors.json")).expect("the vectors");
    let goldens: Vec<Vectors> = serde_json::from_slice(&text).expect("the vectors");
    assert_eq!(goldens.len(), 5);
    goldens
}

fn scaled(vector: &[f32]) -> Vec<f64> {
    let length = vector.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    vector.iter().map(|v| f64::from(*v) / length).collect()
}

/// State of the last of `tokens`, computed at once, with the logits of that row if they are wanted.
fn state(model: &mut Model, tokens: &[u32], logits: bool) -> (Vec<f32>, Vec<f32>) {
    let table: Vec<u32> = (0..tokens.len().div_ceil(PAGE_TOKENS) as u32).collect();
    let spans = [Span { rows: 0..tokens.len(), context: tokens.len(), block_table: &table, adapter: None }];
    let batch = StepBatch { tokens, spans: &spans, sampled: &[tokens.len() - 1], ..Default::default() };
    let mut out = Vec::new();
    let logits = model.states(&batch, None, &mut out, logits).expect("a valid batch").to_vec();
    (out, logits)
}

/// Errors of all components of all scaled vectors, and the least cosine.
fn distance(golden: &Vectors, make: &MakeDevice) -> (Vec<f64>, f64) {
    let case = Golden::named(&golden.case);
    let mut model = load(&case.checkpoint(), &**make, 32, case.tokens.len());
    let (mut errors, mut cosine) = (Vec::new(), f64::INFINITY);
    for (length, want) in golden.lengths.iter().zip(&golden.states) {
        let (got, logits) = state(&mut model, &case.tokens[..*length], false);
        assert!(logits.is_empty(), "the head is not computed");
        let (got, want) = (scaled(&got), scaled(want));
        cosine = cosine.min(got.iter().zip(&want).map(|(a, b)| a * b).sum());
        errors.extend(got.iter().zip(&want).map(|(a, b)| (a - b).abs()));
    }
    (errors, cosine)
}

#[test]
fn f32_agrees_with_transformers() {
    for golden in goldens() {
        let make: MakeDevice = Box::new(reference);
        let (errors, cosine) = distance(&golden, &make);
        let max = errors.iter().copied().fold(0.0, f64::max);
        println!("{}: f32 max {max:.1e}, 1 - cosine {:.1e}", golden.case, 1.0 - cosine);
        assert!(max < 1e-4 && cosine > 0.999_999, "{}: {max:e}, cosine {cosine}", golden.case);
    }
}

#[test]
fn bf16_is_as_close_as_transformers_own() {
    for golden in goldens() {
        for (path, make) in common::cpu_paths() {
            let (errors, cosine) = distance(&golden, &make);
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            let max = errors.iter().copied().fold(0.0, f64::max);
            let (case, want) = (&golden.case, &golden.bf16);
            println!("{case}, {path}: mean {:.2} max {:.2} of transformers' own", mean / want.mean, max / want.max);
            assert!(mean <= 1.5 * want.mean, "{case}, {path}: mean {mean:.5}, transformers {:.5}", want.mean);
            assert!(max <= 1.5 * want.max, "{case}, {path}: maximum {max:.5}, transformers {:.5}", want.max);
            assert!(cosine > 0.999, "{case}, {path}: cosine {cosine}");
        }
    }
}

#[test]
fn the_logits_of_the_row_are_those_of_a_step_without_vectors() {
    let golden = Golden::named("qwen3-tied");
    for (path, make) in devices() {
        let mut model = load(&golden.checkpoint(), &*make, 32, 64);
        let tokens = &golden.tokens[..40];
        let (both, logits) = state(&mut model, tokens, true);
        let want = common::logits_of(&mut model, tokens, 40).pop().expect("a row");
        assert_eq!(logits, want, "{path}");
        assert_eq!(state(&mut model, tokens, false).0, both, "{path}");
    }
}

/// A small model as embedding models are saved: names without `model.`, no head and none tied, and a list of modules.
fn headless() -> Vec<(String, std::borrow::Cow<'static, [u8]>)> {
    let golden = Golden::named("qwen3-tied");
    let mut config = golden.config.clone();
    config["tie_word_embeddings"] = false.into();
    let bare = |tensor: Tensor| {
        let name = tensor.name.strip_prefix("model.").expect("a part of the decoder").to_owned();
        Tensor { name, ..tensor }
    };
    let tensors: Vec<Tensor> = golden.stored().into_iter().map(bare).collect();
    vec![
        ("config.json".into(), serde_json::to_vec(&config).expect("json").into()),
        ("model.safetensors".into(), write_safetensors(&tensors).into()),
        ("modules.json".into(), b"[]".to_vec().into()),
    ]
}

#[test]
fn a_checkpoint_without_a_head_makes_the_same_vectors_and_no_text() {
    let whole = Golden::named("qwen3-tied");
    let bare = Checkpoint::from_buffers(headless()).expect("it opens");
    assert!(bare.config().headless && bare.ignored().is_empty());
    for (path, make) in devices() {
        let mut model = load(&bare, &*make, 32, 64);
        let got = state(&mut model, &whole.tokens[..40], false).0;
        let want = state(&mut load(&whole.checkpoint(), &*make, 32, 64), &whole.tokens[..40], false).0;
        assert_eq!(got, want, "{path}");
        let mut engine = Engine::new(Box::new(model), &EngineConfig::default());
        assert!(engine.probe().expect("it runs"), "{path}: it is not broken");
        let text = Generate { pooling: Pooling::None as i32, ..pooled(1, &whole.tokens[..9]) };
        engine.submit(text);
        let output = ends(&mut engine).pop().expect("a refusal");
        assert_eq!(kind(&output), ErrorKind::Unsupported, "{output:?}");
    }
    let mut files = headless();
    files.retain(|(name, _)| name != "modules.json");
    let error = Checkpoint::from_buffers(files).expect_err("the head is missing").to_string();
    assert!(error.contains("lm_head.weight"), "{error}");
}

fn kind(output: &Output) -> ErrorKind {
    ErrorKind::from_wire(output.finish.as_ref().expect("an end").error_kind)
}

fn pooled(request: u64, prompt: &[u32]) -> Generate {
    let sampling =
        Sampling { top_p: 1.0, repetition_penalty: 1.0, logprobs: -1, prompt_logprobs: -1, ..Sampling::default() };
    Generate {
        request,
        prompt: prompt.to_vec(),
        choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
        sampling: Some(sampling),
        pooling: Pooling::Last as i32,
        ..Generate::default()
    }
}

fn text(request: u64, prompt: &[u32], tokens: u32) -> Generate {
    let mut generate = Generate { pooling: Pooling::None as i32, ..pooled(request, prompt) };
    generate.sampling.as_mut().expect("set").max_tokens = tokens;
    generate
}

/// Runs an engine until nothing is left; returns the outputs that end a choice.
fn ends(engine: &mut Engine) -> Vec<Output> {
    let mut ends = Vec::new();
    while engine.has_work() {
        ends.extend(engine.step(&|| Duration::ZERO).outputs.into_iter().filter(|output| output.finish.is_some()));
    }
    ends
}

fn bits(vector: &[f32]) -> Vec<u32> {
    vector.iter().map(|value| value.to_bits()).collect()
}

/// Bits of the vectors of requests, in the order of their numbers.
fn vectors_of(engine: &mut Engine, requests: Vec<Generate>) -> Vec<Vec<u32>> {
    requests.into_iter().for_each(|request| engine.submit(request));
    let mut ends = ends(engine);
    ends.sort_by_key(|output| output.request);
    let pooled = ends.iter().filter(|output| !output.vector.is_empty());
    pooled.map(|output| bits(&output.vector)).collect()
}

#[test]
fn whole_in_chunks_in_a_batch_and_behind_a_prefix_hit_are_the_same_bits() {
    let golden = Golden::named("qwen3-mixed-windows");
    let tokens = &golden.tokens;
    for (path, make) in devices() {
        let engine = |config: EngineConfig| Engine::new(Box::new(load(&golden.checkpoint(), &*make, 96, 256)), &config);
        let lengths = [1, 31, 32, 33, 64, 97, 150];
        let requests = || -> Vec<Generate> {
            lengths.iter().zip(0..).map(|(length, number)| pooled(number, &tokens[tokens.len() - length..])).collect()
        };
        let alone: Vec<Vec<u32>> = requests()
            .into_iter()
            .flat_map(|request| vectors_of(&mut engine(EngineConfig::default()), vec![request]))
            .collect();
        assert_eq!(alone.len(), lengths.len(), "{path}: a vector of each");
        for chunk_tokens in [1, 7, 64] {
            let mut engine = engine(EngineConfig { chunk_tokens, ..EngineConfig::default() });
            assert_eq!(vectors_of(&mut engine, requests()), alone, "{path}: a batch in chunks of {chunk_tokens}");
        }
        // Text beside the vectors: steps that want logits of some rows and states of others.
        let mut mixed = engine(EngineConfig { batch_tokens: 60, ..EngineConfig::default() });
        let mut beside = requests();
        beside.insert(3, text(100, &tokens[..50], 12));
        beside.push(text(101, &tokens[20..90], 12));
        assert_eq!(vectors_of(&mut mixed, beside), alone, "{path}: beside text");
        // The blocks of the longest are here now; each later prompt begins as it does.
        let mut cached = engine(EngineConfig::default());
        let again = |from: u64| vec![pooled(from, tokens), pooled(from + 1, &tokens[..97])];
        let first = vectors_of(&mut cached, again(0));
        again(2).into_iter().for_each(|request| cached.submit(request));
        let second = ends(&mut cached);
        assert!(second.iter().all(|output| output.cached_tokens >= Some(64)), "{path}: {second:?}");
        assert_eq!(second.iter().map(|output| bits(&output.vector)).collect::<Vec<_>>(), first, "{path}: prefix hits");
        assert!(cached.is_empty(), "{path}");
    }
}

#[test]
fn the_tokens_of_text_beside_vectors_are_those_of_text_alone() {
    let golden = Golden::named("qwen3-tied");
    for (path, make) in devices() {
        let engine = || Engine::new(Box::new(load(&golden.checkpoint(), &*make, 64, 128)), &EngineConfig::default());
        let said = |mut engine: Engine, requests: Vec<Generate>| {
            requests.into_iter().for_each(|request| engine.submit(request));
            let mut tokens = Vec::new();
            while engine.has_work() {
                let outputs = engine.step(&|| Duration::ZERO).outputs;
                let of = outputs.into_iter().filter(|output| output.request == 1).flat_map(|output| output.tokens);
                tokens.extend(of.map(|token| token.id));
            }
            tokens
        };
        let one = || text(1, &golden.tokens[..40], 20);
        let alone = said(engine(), vec![one()]);
        let beside = (2..12).map(|number| pooled(number, &golden.tokens[..10 * number as usize]));
        assert_eq!(said(engine(), std::iter::once(one()).chain(beside).collect()), alone, "{path}");
        assert_eq!(alone.len(), 20);
    }
}

#[test]
fn what_cannot_be_pooled_is_refused_and_a_cancel_frees_the_work() {
    let golden = Golden::named("qwen3-tied");
    let model = load(&golden.checkpoint(), &reference, 8, 64);
    let mut engine = Engine::new(Box::new(model), &EngineConfig { prefix_cache: false, ..EngineConfig::default() });
    let context = engine.context_tokens();
    let long: Vec<u32> = golden.tokens.iter().copied().cycle().take(context + 1).collect();
    let two = vec![ChoiceStart { index: 0, emitted: vec![] }, ChoiceStart { index: 1, emitted: vec![] }];
    for (request, want) in [
        (pooled(1, &[]), ErrorKind::InvalidRequest),
        (pooled(2, &[100_000]), ErrorKind::InvalidRequest),
        (pooled(3, &long), ErrorKind::ContextLength),
        (Generate { choices: two, ..pooled(4, &[1, 2]) }, ErrorKind::InvalidRequest),
        (Generate { pooling: 77, ..pooled(5, &[1, 2]) }, ErrorKind::Unsupported),
    ] {
        let number = request.request;
        engine.submit(request);
        let outputs = ends(&mut engine);
        assert!(!outputs.is_empty() && outputs.iter().all(|output| kind(output) == want), "{number}: {outputs:?}");
    }
    // A prompt may fill the context: nothing follows it.
    engine.submit(pooled(6, &long[..context]));
    assert_eq!(ends(&mut engine)[0].vector.len(), engine_width(&golden));
    // Its prompt takes several steps, of which it sees the first.
    engine.submit(pooled(7, &long[..context]));
    engine.step(&|| Duration::ZERO);
    engine.cancel(&Cancel { request: 7, choices: Vec::new() });
    let output = ends(&mut engine).pop().expect("its end");
    assert_eq!(output.finish.map(|end| end.reason), Some(FinishReason::Cancelled as i32));
    assert!(output.vector.is_empty() && engine.is_empty());
    assert_eq!(engine.state().blocks_free, engine.state().blocks_total);
}

fn engine_width(golden: &Golden) -> usize {
    golden.config["hidden_size"].as_u64().expect("a number") as usize
}
