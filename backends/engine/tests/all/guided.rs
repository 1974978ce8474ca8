//! Output that follows a grammar, on the demo model: the same tokens whole, cut anywhere, preempted, in company, with any
//! number of threads, and whether forced tokens are jumped over or computed one by one.

use crate::common::{cpu, repository};
use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_engine::{Drawing, Engine, EngineConfig, PageSink, Prefill};
use penstock_grammar::{CacheSizes, Grammars, TokenText, Vocabulary};
use penstock_kernels::cpu::Path;
use penstock_kernels::{Held, KvFormat, Limits};
use penstock_proto::frames::{
    BadWord, Cancel, ChoiceStart, Finish, FinishReason, Generate, Guide, GuideKind, LogitBias, Sampling, Window,
};
use penstock_proto::transfer::First;
use penstock_proto::{ErrorKind, WorkId};
use penstock_vocabulary::TokenBytes;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

pub(crate) static TABLE: LazyLock<TokenBytes> = LazyLock::new(|| {
    let json = std::fs::read(repository("models/penstock-demo/tokenizer.json")).expect("the tokenizer");
    TokenBytes::from_json(&json).expect("a good file")
});

pub(crate) static GRAMMARS: LazyLock<Arc<Grammars>> = LazyLock::new(|| {
    let tokens = (0..TABLE.count()).map(|id| TokenText { bytes: TABLE.token(id), is_special: TABLE.is_special(id) });
    let vocabulary = Vocabulary::new(tokens, &ends(), TABLE.count() as usize).expect("the demo vocabulary");
    Arc::new(Grammars::new(vocabulary, CacheSizes::default()))
});

fn checkpoint() -> Checkpoint {
    Checkpoint::open(&repository("models/penstock-demo")).expect("the demo model opens")
}

/// End tokens of the demo model.
pub(crate) fn ends() -> Vec<u32> {
    checkpoint().eos_token_ids()
}

pub(crate) fn engine_with(threads: usize, pages: usize, config: &EngineConfig) -> Engine {
    let limits = ModelLimits {
        context_tokens: None,
        kv: KvBudget::Pages(pages),
        rows_max: 512,
        sampled_max: 64,
        held: Held::Stored,
        kv_format: KvFormat::Own,
    };
    let device = cpu(Path::Portable, threads)(Limits { rows_max: 512, sampled_max: 64 });
    let model = Model::load(&checkpoint(), device, limits, &mut |_| {}).expect("the demo model loads");
    let mut engine = Engine::new(Box::new(model), config);
    engine.set_grammars(Arc::clone(&GRAMMARS));
    engine
}

pub(crate) fn engine() -> Engine {
    engine_with(1, 96, &EngineConfig::default())
}

pub(crate) const SCHEMA: &str = r#"{
    "type": "object",
    "properties": {
        "city_name": {"type": "string", "maxLength": 12},
        "temperature_celsius": {"type": "integer", "minimum": -40, "maximum": 50},
        "weather_conditions": {"enum": ["sunny", "cloudy", "raining heavily"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3}
    },
    "required": ["city_name", "temperature_celsius", "weather_conditions", "tags"],
    "additionalProperties": false
}"#;

pub(crate) fn guide(kind: GuideKind, text: &str) -> Option<Guide> {
    Some(Guide { kind: kind as i32, text: text.to_owned(), begins_after: Vec::new() })
}

pub(crate) fn sampling(max_tokens: u32, temperature: f32) -> Sampling {
    Sampling {
        temperature,
        top_p: 0.95,
        repetition_penalty: 1.0,
        seed: 11,
        max_tokens,
        stop_tokens: ends(),
        logprobs: -1,
        prompt_logprobs: -1,
        ..Sampling::default()
    }
}

pub(crate) fn request(number: u64, grammar: Option<Guide>) -> Generate {
    let prompt = (0..40 + number as u32 * 7).map(|n| 300 + (n * 37 + number as u32) % 3000).collect();
    let choices = vec![ChoiceStart { index: 0, emitted: Vec::new() }];
    Generate { request: number, prompt, choices, sampling: Some(sampling(120, 0.9)), grammar, ..Generate::default() }
}

pub(crate) fn schema() -> Option<Guide> {
    guide(GuideKind::JsonSchema, SCHEMA)
}

/// Requests of every kind, some after free text.
fn requests() -> Vec<Generate> {
    let mut all = vec![
        request(1, schema()),
        request(2, guide(GuideKind::JsonObject, "")),
        request(3, guide(GuideKind::Regex, r"(the answer is (yes|no), because [a-z ]{5,30}\.)")),
        request(4, guide(GuideKind::Choice, r#"["a rather long positive answer", "a rather long negative answer"]"#)),
        request(
            5,
            guide(
                GuideKind::Lark,
                "start: \"SELECT \" W (\", \" W){2,4} \" FROM table_of_measurements\"\nW: /[a-z]{2,9}/",
            ),
        ),
    ];
    all[1].sampling = Some(Sampling { frequency_penalty: 0.4, repetition_penalty: 1.1, ..sampling(60, 1.0) });
    all[2].sampling = Some(sampling(60, 0.0));
    all
}

/// Output of each choice of each request.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Told {
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: Option<Finish>,
}

pub(crate) type Answers = BTreeMap<(u64, u32), Told>;

pub(crate) fn take(engine: &mut Engine, told: &mut Answers) {
    for output in engine.step(&|| Duration::ZERO).outputs {
        let choice = told.entry((output.request, output.choice)).or_default();
        // Tokens of earlier attempts count, and are not repeated.
        assert!(output.at as usize >= choice.tokens.len(), "tokens come in order");
        choice.tokens.extend(output.tokens.iter().map(|token| token.id));
        assert!(choice.finish.is_none(), "nothing follows an end");
        choice.finish = output.finish;
    }
}

pub(crate) fn run(engine: &mut Engine, requests: Vec<Generate>) -> Answers {
    let mut told = Answers::new();
    requests.into_iter().for_each(|request| engine.submit(request));
    while engine.has_work() {
        take(engine, &mut told);
    }
    assert!(engine.is_empty());
    told
}

pub(crate) fn alone(request: &Generate) -> Told {
    let mut told = run(&mut engine(), vec![request.clone()]);
    told.remove(&(request.request, 0)).expect("one answer")
}

pub(crate) fn text(told: &Told) -> String {
    let tokens = told.tokens.iter().filter(|token| !TABLE.is_special(**token));
    String::from_utf8_lossy(&tokens.flat_map(|token| TABLE.token(*token).to_vec()).collect::<Vec<_>>()).into_owned()
}

fn reason(told: &Told) -> FinishReason {
    told.finish.as_ref().map(Finish::reason).expect("it ended")
}

/// The request as it goes on after `count` tokens of its output.
pub(crate) fn after(request: &Generate, told: &Told, count: usize) -> Generate {
    let emitted = told.tokens[..count].to_vec();
    Generate { attempt: 1, choices: vec![ChoiceStart { index: 0, emitted }], ..request.clone() }
}

#[test]
fn outputs_follow_their_grammars() {
    let told = run(&mut engine(), requests());
    let value: serde_json::Value = serde_json::from_str(&text(&told[&(1, 0)])).expect("JSON");
    assert!(value["city_name"].is_string() && value["temperature_celsius"].is_i64(), "{value}");
    assert!(
        ["sunny", "cloudy", "raining heavily"].iter().any(|known| value["weather_conditions"] == *known),
        "{value}"
    );
    assert_eq!(reason(&told[&(1, 0)]), FinishReason::Stop);
    assert!(text(&told[&(3, 0)]).starts_with("the answer is "));
    assert!(
        ["positive", "negative"].map(|word| format!("a rather long {word} answer")).contains(&text(&told[&(4, 0)]))
    );
    assert!(text(&told[&(5, 0)]).ends_with(" FROM table_of_measurements"));
    for ((request, _), told) in told.iter().filter(|(key, _)| key.0 != 2) {
        assert_eq!(reason(told), FinishReason::Stop, "{request}: {}", text(told));
        assert_eq!(told.finish.as_ref().expect("ended").stop_token, None, "the grammar ends it, not a token");
    }
}

/// Checks that each request, cut after any of its tokens, goes on with the tokens that followed.
pub(crate) fn check_cuts(requests: Vec<Generate>) {
    for request in requests {
        let whole = alone(&request);
        let mut engine = engine();
        for cut in 0..=whole.tokens.len() {
            let rest = run(&mut engine, vec![after(&request, &whole, cut)]).remove(&(request.request, 0));
            let rest = rest.expect("one answer");
            assert_eq!(
                (&rest.tokens[..], &rest.finish),
                (&whole.tokens[cut..], &whole.finish),
                "{}: cut at {cut}",
                request.request
            );
        }
    }
}

#[test]
fn a_request_goes_on_after_any_token() {
    check_cuts(requests());
}

#[test]
fn company_threads_and_preemption_change_nothing() {
    let whole: Vec<Told> = requests().iter().map(alone).collect();
    let free = request(9, None);
    let tight = EngineConfig { sequences_max: 3, batch_tokens: 24, chunk_tokens: 16, ..EngineConfig::default() };
    let beside = EngineConfig { masks_beside: true, ..EngineConfig::default() };
    let cases = [
        (1, 96, EngineConfig::default()),
        (2, 96, beside),
        // Room for two of the sequences: those that come later are more urgent and take it.
        (1, 7, tight),
        (1, 96, EngineConfig { prefix_cache: false, batch_tokens: 40, ..EngineConfig::default() }),
    ];
    for (at, (threads, pages, config)) in cases.into_iter().enumerate() {
        let mut engine = engine_with(threads, pages, &config);
        let mut all = requests();
        all.push(free.clone());
        let mut told = Answers::new();
        for (urgency, request) in all.into_iter().enumerate() {
            engine.submit(Generate { priority: -(urgency as i32), ..request });
            (0..3).for_each(|_| take(&mut engine, &mut told));
        }
        while engine.has_work() {
            take(&mut engine, &mut told);
        }
        for (request, whole) in requests().iter().zip(&whole) {
            assert_eq!(&told[&(request.request, 0)], whole, "case {at}, request {}", request.request);
        }
        let state = engine.state();
        assert!(pages > 20 || state.preemptions > 0, "the small pool preempts");
        let guides = state.guides.expect("it has grammars");
        assert!(guides.jumped_tokens > 20 && guides.masks > 20 && guides.sequences == 0, "{guides:?}");
    }
}

#[test]
fn a_jump_takes_no_pass_of_its_own_and_changes_no_token() {
    let request = request(1, schema());
    let mut engine = engine();
    let whole = run(&mut engine, vec![request.clone()]).remove(&(1, 0)).expect("one answer");
    let steps = engine.report().number;
    let jumped = engine.state().guides.expect("grammars").jumped_tokens as usize;
    assert!(jumped > 15, "{jumped} of {}", whole.tokens.len());
    assert!(steps as usize <= whole.tokens.len() - jumped + 2, "{steps} steps for {} tokens", whole.tokens.len());
    // With log-probabilities every token has a row of its own.
    let mut told = request;
    told.sampling.as_mut().expect("set").logprobs = 0;
    let mut other = engine_with(1, 96, &EngineConfig::default());
    other.submit(told);
    let (mut tokens, mut logprobs) = (Vec::new(), 0);
    while other.has_work() {
        for output in other.step(&|| Duration::ZERO).outputs {
            logprobs += output.tokens.iter().filter(|token| token.logprobs.is_some()).count();
            tokens.extend(output.tokens.iter().map(|token| token.id));
        }
    }
    assert_eq!((&tokens, logprobs), (&whole.tokens, whole.tokens.len()));
    assert_eq!(other.state().guides.expect("grammars").jumped_tokens, 0);
}

#[test]
fn windows_hold_in_the_middle_of_a_jump() {
    let whole = alone(&request(1, schema()));
    for window in 1..6 {
        let mut engine = engine();
        engine.submit(Generate { window, ..request(1, schema()) });
        let mut told = Answers::new();
        let mut allowed = window as usize;
        loop {
            while engine.has_work() {
                take(&mut engine, &mut told);
                assert!(told[&(1, 0)].tokens.len() <= allowed);
            }
            if told[&(1, 0)].finish.is_some() {
                break;
            }
            assert_eq!(told[&(1, 0)].tokens.len(), allowed, "it uses its window up");
            engine.window(&Window { request: 1, choice: 0, tokens: 3 });
            allowed += 3;
        }
        assert_eq!(told[&(1, 0)], whole, "window {window}");
    }
}

#[test]
fn ends_keep_their_meaning_inside_of_forced_text() {
    let whole = alone(&request(1, schema()));
    for max_tokens in 1..whole.tokens.len() as u32 {
        let mut short = request(1, schema());
        short.sampling.as_mut().expect("set").max_tokens = max_tokens;
        let told = alone(&short);
        assert_eq!(
            (told.tokens.as_slice(), reason(&told)),
            (&whole.tokens[..max_tokens as usize], FinishReason::Length)
        );
    }
    // A stop token of the client that the grammar forces ends the choice there.
    let at = 6;
    let mut stopped = request(1, schema());
    stopped.sampling.as_mut().expect("set").stop_tokens.push(whole.tokens[at]);
    let told = alone(&stopped);
    let first = whole.tokens.iter().position(|token| *token == whole.tokens[at]).expect("it occurs");
    assert_eq!(told.tokens, whole.tokens[..=first]);
    assert_eq!(told.finish.expect("ended").stop_token, Some(whole.tokens[at]));
}

#[test]
fn thinking_is_free_until_its_mark() {
    // A model that says neither an end nor the mark by itself.
    let mark = ["</think>", "\n"].map(token);
    let silent: Vec<(u32, f32)> = ends().into_iter().chain([mark[0]]).map(|token| (token, -10_000.0)).collect();
    let mut asked = thinking(6, schema(), &silent);
    asked.grammar.as_mut().expect("set").begins_after = mark.to_vec();
    let free = alone(&Generate { grammar: None, ..asked.clone() });
    assert_eq!(alone(&asked), free, "until the mark");
    check_cuts(vec![asked.clone()]);
    let begun = [&free.tokens[..4], &mark].concat();
    let behind = |output: &[u32]| {
        let choices = vec![ChoiceStart { index: 0, emitted: output.to_vec() }];
        run(&mut engine(), vec![Generate { choices, ..asked.clone() }]).remove(&(6, 0)).expect("one answer").tokens
    };
    let answer = behind(&begun);
    assert!(is_json(&answer), "{answer:?}");
    let whole = [begun, answer].concat();
    for cut in 6..=whole.len() {
        assert_eq!(behind(&whole[..cut]), whole[cut..], "cut at {cut}");
    }
}

/// Token of the demo model with this text.
pub(crate) fn token(text: &str) -> u32 {
    (0..TABLE.count()).find(|id| TABLE.token(*id) == text.as_bytes()).expect("one of its tokens")
}

/// A request whose grammar begins behind `</think>`.
fn thinking(number: u64, grammar: Option<Guide>, biases: &[(u32, f32)]) -> Generate {
    let mut thinking = request(number, grammar.map(|guide| Guide { begins_after: vec![token("</think>")], ..guide }));
    let biases = biases.iter().map(|(token, bias)| LogitBias { token: *token, bias: *bias });
    thinking.sampling.as_mut().expect("set").logit_bias = biases.collect();
    thinking
}

fn is_json(tokens: &[u32]) -> bool {
    let told = Told { tokens: tokens.iter().copied().filter(|id| !ends().contains(id)).collect(), finish: None };
    serde_json::from_str::<serde_json::Value>(&text(&told)).is_ok()
}

#[test]
fn no_thinking_ends_the_output() {
    let eager: Vec<(u32, f32)> = ends().into_iter().map(|token| (token, 100.0)).collect();
    let told = alone(&thinking(6, schema(), &eager));
    let mark = token("</think>");
    let thought = told.tokens.iter().position(|id| *id == mark).unwrap_or(told.tokens.len());
    assert!(!told.tokens[..thought].iter().any(|id| ends().contains(id)), "{}", text(&told));
    assert!(thought < told.tokens.len() || reason(&told) == FinishReason::Length, "{}", text(&told));
    // The mark is the next that it says, and the answer behind it is whole.
    let eager = [&eager[..], &[(mark, 90.0)]].concat();
    let asked = thinking(6, schema(), &eager);
    let told = alone(&asked);
    assert_eq!((told.tokens[0], reason(&told)), (mark, FinishReason::Stop));
    assert!(is_json(&told.tokens[1..]), "{}", text(&told));
    check_cuts(vec![asked]);
    // An end token that is the mark itself ends the output as the client asks.
    let mut stopped = thinking(6, schema(), &[(mark, 100.0)]);
    stopped.sampling.as_mut().expect("set").stop_tokens.push(mark);
    assert_eq!(alone(&stopped).finish.expect("ended").stop_token, Some(mark));
}

#[test]
fn a_mark_in_other_tokens_begins_the_form() {
    let pieces = ["</", "think", ">"].map(token);
    let mut spelled = thinking(6, guide(GuideKind::Regex, ">{3}"), &[]);
    let sampling = Sampling { top_p: 1.0, allowed_tokens: pieces.to_vec(), ..sampling(300, 100.0) };
    spelled.sampling = Some(sampling);
    let told = alone(&spelled);
    assert_eq!(reason(&told), FinishReason::Stop, "{}", text(&told));
    assert!(told.tokens.len() >= 6 && text(&told).ends_with("</think>>>>"), "{}", text(&told));
    assert_eq!(text(&told).matches("</think>").count(), 1, "the first one counts");
    check_cuts(vec![spelled]);
}

#[test]
fn no_token_goes_on_behind_the_mark_that_it_completes() {
    let passing = [">,", ">}\n", "></"].map(|text| (token(text), 100.0));
    let breaks = token(">\n\n");
    let mut asked = thinking(6, schema(), &[&passing[..], &[(breaks, 90.0)]].concat());
    asked.choices[0].emitted = ["</", "think"].map(token).to_vec();
    let told = run(&mut engine(), vec![asked]).remove(&(6, 0)).expect("one answer");
    assert_eq!(told.tokens[0], breaks, "{}", text(&told));
    assert!(is_json(&told.tokens[1..]), "{}", text(&told));
}

#[test]
fn choices_follow_it_each_with_its_own_numbers() {
    let three: Vec<ChoiceStart> = (0..3).map(|index| ChoiceStart { index, emitted: Vec::new() }).collect();
    let told = run(&mut engine(), vec![Generate { choices: three, ..request(1, schema()) }]);
    let texts: Vec<String> = told.values().map(text).collect();
    assert!(texts.iter().all(|text| serde_json::from_str::<serde_json::Value>(text).is_ok()), "{texts:?}");
    assert!(texts[0] != texts[1] || texts[1] != texts[2], "{texts:?}");
    assert_eq!(told[&(1, 0)], alone(&request(1, schema())));
}

#[test]
fn the_requests_own_exclusions_hold_too() {
    let free = alone(&request(4, requests()[3].grammar.clone()));
    // A forced token is forbidden: the grammar is spelled in another way.
    let long = *free.tokens.iter().find(|token| TABLE.token(**token).len() > 2).expect("a long token");
    let mut banned = request(4, requests()[3].grammar.clone());
    banned.sampling.as_mut().expect("set").bad_words = vec![BadWord { tokens: vec![long] }];
    let told = alone(&banned);
    assert!(!told.tokens.contains(&long));
    assert!(text(&told).starts_with("a rather long "), "{}", text(&told));
    // A bias decides between the two.
    let positive = alone(&request(4, guide(GuideKind::Choice, r#"["positive"]"#))).tokens[0];
    let negative = alone(&request(4, guide(GuideKind::Choice, r#"["negative"]"#))).tokens[0];
    for (token, word) in [(positive, "positive"), (negative, "negative")] {
        let mut biased = request(4, guide(GuideKind::Choice, r#"["positive", "negative"]"#));
        biased.sampling.as_mut().expect("set").logit_bias = vec![LogitBias { token, bias: 1000.0 }];
        assert_eq!(text(&alone(&biased)), word);
    }
    // Nothing is left, and the text may not end: the choice fails and says so.
    let mut stuck = request(4, guide(GuideKind::Regex, "[ab]+c"));
    stuck.sampling.as_mut().expect("set").allowed_tokens = vec![5];
    let finish = alone(&stuck).finish.expect("ended");
    assert_eq!((finish.reason(), finish.error_kind), (FinishReason::Failed, ErrorKind::InvalidRequest as i32));
}

#[test]
fn satisfied_grammars_end_whatever_the_stop_tokens() {
    for (stop_tokens, min_tokens) in [(Vec::new(), 0), (ends(), 100), (ends(), 0)] {
        let mut fixed = request(7, guide(GuideKind::Regex, "x{3,6}"));
        let sampling = fixed.sampling.as_mut().expect("set");
        (sampling.stop_tokens, sampling.min_tokens) = (stop_tokens.clone(), min_tokens);
        let told = alone(&fixed);
        assert_eq!(reason(&told), FinishReason::Stop);
        let count = text(&told).len();
        assert!((3..=6).contains(&count) && (min_tokens == 0 && !stop_tokens.is_empty() || count == 6), "{count}");
        if let Some(token) = told.finish.expect("ended").stop_token {
            assert!(ends().contains(&token));
        }
    }
    // A grammar of nothing but the empty text.
    let told = alone(&request(8, guide(GuideKind::Choice, r#"[""]"#)));
    assert_eq!((told.tokens.len(), reason(&told)), (0, FinishReason::Stop));
}

#[test]
fn what_cannot_be_followed_is_refused() {
    let refused = |generate: Generate| {
        let finish = alone(&generate).finish.expect("ended");
        assert_eq!(finish.reason(), FinishReason::Failed);
        (ErrorKind::from_wire(finish.error_kind), finish.message)
    };
    let (kind, message) = refused(request(1, guide(GuideKind::Regex, "(")));
    assert!(kind == ErrorKind::InvalidRequest && message.contains("grammar"), "{message}");
    let remote = r#"{"$ref": "https://example.com/a.json"}"#;
    assert_eq!(refused(request(1, guide(GuideKind::JsonSchema, remote))).0, ErrorKind::Unsupported);
    assert_eq!(refused(request(1, guide(GuideKind::Unknown, ""))).0, ErrorKind::Unsupported);
    let far = Guide { begins_after: vec![u32::MAX], ..schema().expect("set") };
    assert_eq!(refused(request(1, Some(far))).0, ErrorKind::InvalidRequest);
    let long = Guide { begins_after: vec![1; 1000], ..schema().expect("set") };
    assert_eq!(refused(request(1, Some(long))).0, ErrorKind::InvalidRequest);
    let unfit = Told { tokens: vec![300, 301], finish: None };
    let (kind, message) = refused(after(&request(1, schema()), &unfit, 2));
    assert!(kind == ErrorKind::Internal && message.contains("300"), "{message}");
    // Without a tokenizer there are no grammars.
    let limits = ModelLimits {
        context_tokens: None,
        kv: KvBudget::Pages(20),
        rows_max: 512,
        sampled_max: 64,
        held: Held::Stored,
        kv_format: KvFormat::Own,
    };
    let device = cpu(Path::Portable, 1)(Limits { rows_max: 512, sampled_max: 64 });
    let model = Model::load(&checkpoint(), device, limits, &mut |_| {}).expect("loads");
    let mut engine = Engine::new(Box::new(model), &EngineConfig::default());
    assert!(engine.state().guides.is_none());
    let told = run(&mut engine, vec![request(1, schema())]).remove(&(1, 0)).expect("answered");
    assert_eq!(told.finish.expect("ended").error_kind, ErrorKind::Unsupported as i32);
}

#[test]
fn a_limit_ends_one_choice_alone() {
    let costly = guide(GuideKind::Regex, r"(?i:[a-zα-ω]{3,300}){5,500}");
    let mut hostile = request(7, costly);
    hostile.sampling = Some(sampling(100, 1.5));
    let whole = alone(&request(1, schema()));
    let told = run(&mut engine(), vec![hostile, request(1, schema())]);
    let finish = told[&(7, 0)].finish.clone().expect("ended");
    assert_eq!(finish.reason(), FinishReason::Failed, "{}", text(&told[&(7, 0)]));
    assert!(finish.message.contains("too complex"), "{}", finish.message);
    assert_eq!(told[&(1, 0)], whole);
}

#[test]
fn a_cancelled_choice_leaves_nothing() {
    let mut engine = engine();
    engine.submit(request(1, schema()));
    let mut told = Answers::new();
    (0..4).for_each(|_| take(&mut engine, &mut told));
    assert_eq!(engine.state().guides.expect("grammars").sequences, 1);
    engine.cancel(&Cancel { request: 1, choices: Vec::new() });
    take(&mut engine, &mut told);
    assert_eq!(reason(&told[&(1, 0)]), FinishReason::Cancelled);
    assert!(engine.is_empty() && engine.state().guides.expect("grammars").sequences == 0);
}

/// First tokens that another engine drew; its pages are thrown away.
#[derive(Clone, Default)]
struct Drawn(Arc<Mutex<Option<First>>>);

impl PageSink for Drawn {
    fn has_room(&mut self) -> bool {
        true
    }
    fn page(&mut self, _: usize, _: usize, fill: &mut dyn FnMut(&mut [u8])) {
        fill(&mut vec![0; PAGE_BYTES.with(|bytes| bytes.get())]);
    }
    fn computed(&mut self, _: usize) {}
    fn first(&mut self, first: First) {
        *self.0.lock().expect("unpoisoned") = Some(first);
    }
    fn end(&mut self, _: bool) {}
}

thread_local! {
    static PAGE_BYTES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

pub(crate) fn drawn_elsewhere(generate: &Generate, emitted: &[u32], grammar: Option<Guide>) -> Option<First> {
    let mut holder = engine();
    PAGE_BYTES.with(|bytes| bytes.set(holder.page_bytes()));
    let sampling = generate.sampling.clone().expect("set");
    let draw = Drawing { sampling, choices: vec![0], emitted: emitted.len(), grammar };
    let prompt = [&generate.prompt[..], emitted].concat();
    let prefill = Prefill { id: WorkId(5), prompt, blocks: 1, draw: Some(draw), ..Prefill::default() };
    let drawn = Drawn::default();
    holder.prefill(prefill, Box::new(drawn.clone())).expect("taken");
    while holder.has_work() || holder.can_give() {
        holder.step(&|| Duration::ZERO);
        while holder.give() {}
    }
    drawn.0.lock().expect("unpoisoned").take()
}

#[test]
fn a_first_token_drawn_elsewhere_is_the_one_drawn_here() {
    for generate in requests() {
        let whole = alone(&generate);
        for cut in [0, 1, 2, 7].into_iter().filter(|cut| cut + 1 < whole.tokens.len()) {
            let first = drawn_elsewhere(&generate, &whole.tokens[..cut], generate.grammar.clone()).expect("drawn");
            let mut rest = after(&generate, &whole, cut);
            let mut here = engine();
            let outputs = here.say_first(&mut rest, first, 0).expect("it fits");
            assert_eq!(outputs[0].tokens[0].id, whole.tokens[cut], "request {}, cut {cut}", generate.request);
            let told = run(&mut here, vec![rest]).remove(&(generate.request, 0)).expect("answered");
            assert_eq!(told.tokens, whole.tokens[cut + 1..]);
        }
    }
    // The whole answer is one token.
    let mut one = request(1, guide(GuideKind::Choice, r#"["a"]"#));
    let first = drawn_elsewhere(&one, &[], one.grammar.clone()).expect("drawn");
    let outputs = engine().say_first(&mut one, first, 0).expect("it fits");
    assert_eq!(outputs[0].finish.as_ref().map(Finish::reason), Some(FinishReason::Stop));
    assert!(one.choices.is_empty());
}

#[test]
fn first_tokens_that_were_not_masked_are_not_taken() {
    let mut generate = request(1, schema());
    let unmasked = drawn_elsewhere(&generate, &[], None).expect("drawn");
    assert_eq!(unmasked.grammar, "");
    assert_eq!(engine().say_first(&mut generate, unmasked.clone(), 0), None);
    let id = GRAMMARS.vocabulary().id().to_owned();
    let claimed = First { grammar: id, ..unmasked };
    assert_eq!(engine().say_first(&mut generate, claimed, 0), None, "the token does not fit");
    assert_eq!(generate, request(1, schema()), "nothing is changed");
}
