//! Prompt lookup on the demo model: tokens, log-probabilities and ends are the same bits with drafts and without, whatever
//! the request asks for and wherever it is cut, and drafts that stand save steps.

use crate::common::{cpu, repository};
use crate::guided::{GRAMMARS, ends, guide, schema, token as mark};
use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_engine::random::philox4x32;
use penstock_engine::{Engine, EngineConfig, Forward};
use penstock_kernels::cpu::Path;
use penstock_kernels::{Held, KvFormat, Limits};
use penstock_proto::frames::{
    BadWord, ChoiceStart, Finish, Generate, Guide, GuideKind, KvEvent, LogitBias, ReasoningBudget, Sampling,
    TokenLogprobs, Window,
};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Requests that are compared.
const REQUESTS: u64 = 200;

#[derive(Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt_ids: Vec<u32>,
}

fn prompts() -> Vec<Vec<u32>> {
    let text = std::fs::read_to_string(repository("models/penstock-demo/goldens.json")).expect("goldens");
    let goldens: Goldens = serde_json::from_str(&text).expect("goldens parse");
    goldens.cases.into_iter().map(|case| case.prompt_ids).collect()
}

/// The demo model with this many pages of KV.
pub(crate) fn model(pages: usize) -> Model {
    let checkpoint = Checkpoint::open(&repository("models/penstock-demo")).expect("the demo model opens");
    let (rows_max, sampled_max) = (512, 64);
    let kv = KvBudget::Pages(pages);
    let limits =
        ModelLimits { context_tokens: None, kv, rows_max, sampled_max, held: Held::Stored, kv_format: KvFormat::Own };
    let device = cpu(Path::Auto, 1)(Limits { rows_max, sampled_max });
    Model::load(&checkpoint, device, limits, &mut |_| {}).expect("the demo model loads")
}

fn engine(pages: usize, config: &EngineConfig) -> Engine {
    engine_of(Box::new(model(pages)), config)
}

/// Engine of a computation of the demo model, with its grammars.
pub(crate) fn engine_of(model: Box<dyn Forward>, config: &EngineConfig) -> Engine {
    let mut engine = Engine::new(model, config);
    engine.set_grammars(Arc::clone(&GRAMMARS));
    engine
}

fn with(prompt_lookup: usize) -> EngineConfig {
    EngineConfig { prompt_lookup, ..EngineConfig::default() }
}

/// Random choices of one request.
struct Dice {
    seed: u64,
    count: u32,
}

impl Dice {
    fn below(&mut self, bound: u32) -> u32 {
        self.count += 1;
        philox4x32([self.count, 0, 0, 0], [self.seed as u32, 77])[0] % bound
    }

    fn one_in(&mut self, bound: u32) -> bool {
        self.below(bound) == 0
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u32) as usize].clone()
    }
}

/// A request whose prompt, sampling, grammar and window depend on its number alone.
fn request(number: u64, prompts: &[Vec<u32>]) -> Generate {
    let dice = &mut Dice { seed: number, count: 0 };
    let token = |dice: &mut Dice| 260 + dice.below(3700);
    let prompt = match dice.below(4) {
        0 => dice.pick(prompts),
        1 => {
            // A text that repeats itself, as a file that is to be changed in one place.
            let words: Vec<u32> = (0..2 + dice.below(30)).map(|_| token(dice)).collect();
            words.iter().copied().cycle().take(40 + dice.below(80) as usize).collect()
        }
        2 => (0..1 + dice.below(70)).map(|_| token(dice)).collect(),
        _ => [dice.pick(prompts), dice.pick(prompts), dice.pick(prompts)].concat(),
    };
    let ends = ends();
    let grammar = match dice.below(8) {
        0 => schema(),
        1 => guide(GuideKind::Regex, r"((the number is [0-9]{2}, ){3,6}end)"),
        2 => schema().map(|guide| Guide { begins_after: vec![mark(",")], ..guide }),
        _ => None,
    };
    let reasoning = dice.one_in(8).then(|| ReasoningBudget {
        tokens: 4 + dice.below(12),
        is_open: true,
        ending: "</think>".into(),
        closing: vec![token(dice), token(dice), token(dice)],
        ..ReasoningBudget::default()
    });
    let sampling = Sampling {
        temperature: dice.pick(&[0.0, 0.0, 0.2, 0.7, 1.2]),
        top_k: dice.pick(&[0, 0, 1, 20]),
        top_p: dice.pick(&[1.0, 1.0, 0.9, 0.3]),
        min_p: dice.pick(&[0.0, 0.0, 0.05]),
        presence_penalty: dice.pick(&[0.0, 0.0, 0.0, 0.4]),
        frequency_penalty: dice.pick(&[0.0, 0.0, 0.0, 0.2]),
        repetition_penalty: dice.pick(&[1.0, 1.0, 1.0, 1.15]),
        logit_bias: (0..dice.pick(&[0, 0, 3])).map(|_| LogitBias { token: token(dice), bias: 4.0 }).collect(),
        seed: number * 7919,
        max_tokens: 1 + dice.below(50),
        min_tokens: if grammar.is_none() { dice.pick(&[0, 0, 12]) } else { 0 },
        stop_tokens: if dice.one_in(3) { ends } else { vec![ends[0], token(dice), token(dice)] },
        logprobs: dice.pick(&[-1, -1, 0, 3]),
        prompt_logprobs: if dice.one_in(10) { 2 } else { -1 },
        bad_words: (0..dice.pick(&[0, 0, 2])).map(|_| BadWord { tokens: vec![token(dice), token(dice)] }).collect(),
        reasoning,
        ..Sampling::default()
    };
    Generate {
        request: number,
        prompt,
        choices: (0..dice.pick(&[1, 1, 1, 3])).map(|index| ChoiceStart { index, emitted: Vec::new() }).collect(),
        sampling: Some(sampling),
        grammar,
        window: dice.pick(&[0, 0, 0, 5]),
        priority: dice.below(3) as i32 - 1,
        ..Generate::default()
    }
}

/// Requests of every kind, some hundred choices.
pub(crate) fn requests() -> Vec<Generate> {
    let prompts = prompts();
    (0..REQUESTS).map(|number| request(number, &prompts)).collect()
}

type Bits = Option<(u32, Vec<u32>, Vec<u32>, u32)>;

fn bits(logprobs: Option<&TokenLogprobs>) -> Bits {
    let bits = |list: &[f32]| list.iter().map(|value| value.to_bits()).collect();
    logprobs.map(|l| (l.logprob.to_bits(), l.top_tokens.clone(), bits(&l.top_logprobs), l.rank))
}

/// Output of one choice, and the bits of its log-probabilities.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Told {
    tokens: Vec<(u32, Bits)>,
    prompt: Vec<Bits>,
    finish: Option<Finish>,
}

pub(crate) type Answers = BTreeMap<(u64, u32), Told>;

/// Runs a step; readers with a window take their tokens at once.
fn step(engine: &mut Engine, told: &mut Answers) -> Vec<KvEvent> {
    let step = engine.step(&|| Duration::ZERO);
    for output in step.outputs {
        let choice = told.entry((output.request, output.choice)).or_default();
        assert!(choice.finish.is_none(), "nothing follows an end");
        assert_eq!(output.at as usize, choice.tokens.len(), "tokens come in order");
        let tokens = output.tokens.len() as u32;
        choice.tokens.extend(output.tokens.iter().map(|token| (token.id, bits(token.logprobs.as_ref()))));
        choice.prompt.extend(output.prompt_logprobs.iter().map(|known| bits(Some(known))));
        choice.finish = output.finish;
        engine.window(&Window { request: output.request, choice: output.choice, tokens });
    }
    step.kv
}

/// Runs all requests, a few steps apart.
pub(crate) fn run(engine: &mut Engine, requests: Vec<Generate>) -> Answers {
    let mut told = Answers::new();
    for (at, request) in requests.into_iter().enumerate() {
        engine.submit(request);
        (0..at % 3).for_each(|_| drop(step(engine, &mut told)));
    }
    while engine.has_work() {
        step(engine, &mut told);
    }
    assert!(engine.is_empty());
    told
}

#[track_caller]
pub(crate) fn assert_same(got: &Answers, want: &Answers, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (key, want) in want {
        assert_eq!(&got[key], want, "{what}: request {}, choice {}", key.0, key.1);
    }
}

#[test]
fn two_hundred_requests_are_the_same_bits_with_drafts_and_without() {
    let all = EngineConfig { waiting_max: 1000, ..with(0) };
    let mut plain = engine(600, &all);
    let want = run(&mut plain, requests());
    let failed = |told: &&Told| told.finish.as_ref().is_some_and(|finish| finish.error_kind != 0);
    assert!(want.values().filter(failed).count() < 5 && want.len() > 250, "{} answers", want.len());
    assert_eq!(plain.state().drafted_tokens, 0);
    let tight = EngineConfig { sequences_max: 8, batch_tokens: 40, chunk_tokens: 24, ..all };
    for (what, pages, config) in [
        ("one draft, no prefix cache", 600, EngineConfig { prompt_lookup: 1, prefix_cache: false, ..all.clone() }),
        ("eight drafts", 600, EngineConfig { prompt_lookup: 8, ..all }),
        ("few pages", 24, EngineConfig { prompt_lookup: 64, ..tight }),
    ] {
        let mut drafting = engine(pages, &config);
        assert_same(&run(&mut drafting, requests()), &want, what);
        let state = drafting.state();
        println!(
            "{what}: {} drafted, {} accepted, {} tokens",
            state.drafted_tokens, state.accepted_tokens, state.output_tokens
        );
        assert!(state.accepted_tokens > 100, "{what}: {state:?}");
        assert!(state.drafted_tokens > state.accepted_tokens + 100, "{what}: some drafts are rejected");
        assert!(pages > 100 || state.preemptions > 0, "{what}: it preempts");
    }
}

/// Each of some requests is cut a few times, and goes on in turn at an engine that drafts and at one that does not.
#[test]
fn an_output_goes_on_at_an_engine_that_drafts_or_not() {
    let mut engines = [engine(300, &with(0)), engine(300, &with(8))];
    for request in requests().into_iter().filter(|request| request.choices.len() == 1).take(60) {
        let key = (request.request, 0);
        let want = run(&mut engines[0], vec![request.clone()]).remove(&key).expect("one answer");
        for first in [0, 1] {
            let mut told = Answers::from([(key, Told::default())]);
            for attempt in 0.. {
                let emitted = told[&key].tokens.iter().map(|(id, _)| *id).collect();
                let choices = vec![ChoiceStart { index: 0, emitted }];
                let engine = &mut engines[(first + attempt) % 2];
                engine.submit(Generate { attempt: attempt as u32, choices, ..request.clone() });
                // Until there is a token, and a few steps more.
                let before = told[&key].tokens.len();
                while told[&key].tokens.len() == before && told[&key].finish.is_none() {
                    step(engine, &mut told);
                }
                (0..3).for_each(|_| drop(step(engine, &mut told)));
                if told[&key].finish.is_some() {
                    break;
                }
                engine.cancel(&penstock_proto::frames::Cancel { request: request.request, ..Default::default() });
                while engine.has_work() {
                    engine.step(&|| Duration::ZERO);
                }
            }
            let told = &told[&key];
            assert_eq!((&told.tokens, &told.finish), (&want.tokens, &want.finish), "{key:?}, first {first}");
        }
    }
}

/// A text that the model repeats: a greedy answer of the demo model to a repeated line.
fn repetitive() -> Generate {
    let line: Vec<u32> = (0..23).map(|n| 400 + n * 61 % 3000).collect();
    Generate {
        request: 1,
        prompt: line.iter().copied().cycle().take(150).collect(),
        choices: vec![ChoiceStart::default()],
        sampling: Some(Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 200,
            logprobs: 2,
            prompt_logprobs: -1,
            ..Sampling::default()
        }),
        ..Generate::default()
    }
}

#[test]
fn accepted_drafts_save_their_steps() {
    let mut engine = engine(100, &with(8));
    let told = run(&mut engine, vec![repetitive()]);
    let (state, steps) = (engine.state(), engine.report().number);
    let tokens = told[&(1, 0)].tokens.len() as u64;
    assert_eq!((tokens, state.output_tokens), (200, 200));
    assert!(state.accepted_tokens > 100, "{state:?}");
    // One step computes the prompt and draws the first token.
    assert_eq!(steps, tokens - state.accepted_tokens, "each accepted draft saves a step, and nothing else does");
}

#[test]
fn cached_blocks_are_those_of_an_engine_that_does_not_draft() {
    let follow_up = |told: &Answers| {
        let output = told[&(1, 0)].tokens.iter().map(|(id, _)| *id);
        let prompt = repetitive().prompt.into_iter().chain(output).collect();
        Generate { request: 2, prompt, ..repetitive() }
    };
    let mut want = None;
    for lookup in [0, 3, 8, 64] {
        let mut engine = engine(100, &with(lookup));
        let told = run(&mut engine, vec![repetitive()]);
        let mut blocks: Vec<_> = engine.snapshot().into_iter().flat_map(|event| event.stored).collect();
        blocks.sort();
        assert_eq!(blocks.len(), (150 + 199) / 32, "every full block of computed tokens, no other");
        // The bytes of every block, layer by layer.
        let chain = engine.chain(&follow_up(&told));
        let mut bytes = Vec::new();
        chain.iter().for_each(|hash| _ = engine.export(*hash, &mut bytes));
        assert!(!bytes.is_empty());
        let again = run(&mut engine, vec![follow_up(&told)]);
        assert!(engine.state().cached_tokens >= 320, "{:?}", engine.state());
        let found = (blocks, bytes, again);
        assert!(*want.get_or_insert_with(|| found.clone()) == found, "with {lookup} drafts");
    }
}

#[test]
fn a_window_holds_in_the_middle_of_drafts() {
    let whole = run(&mut engine(100, &with(0)), vec![repetitive()]);
    for window in 1..12 {
        let mut engine = engine(100, &with(8));
        engine.submit(Generate { window, ..repetitive() });
        let (mut tokens, mut allowed) = (Vec::new(), window as usize);
        while !engine.is_empty() {
            while engine.has_work() {
                let outputs = engine.step(&|| Duration::ZERO).outputs;
                tokens.extend(outputs.iter().flat_map(|output| output.tokens.iter().map(|token| token.id)));
                assert!(tokens.len() <= allowed, "window {window}");
            }
            engine.window(&Window { request: 1, choice: 0, tokens: window });
            allowed += window as usize;
        }
        assert!(tokens.iter().eq(whole[&(1, 0)].tokens.iter().map(|(id, _)| id)), "window {window}");
    }
}
