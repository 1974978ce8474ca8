//! Completions: good and bad bodies, golden answers, best_of.

use crate::common;

use bytes::BytesMut;
use common::check_golden;
use penstock_dialects::openai::{CompletionCollector, CompletionEncoder, CompletionMeta, best_of, decode_completion};
use penstock_types::{Bounds, error_body::openai::refusal};
use penstock_types::{ChatEvent, CompleteRequest, FinishReason, Prompt, TokenLogprob, TokenNames, TokenPlace, Usage};
use serde_json::Value;

fn decoded(body: &str) -> CompleteRequest {
    decode_completion(body.as_bytes(), &Bounds::default()).unwrap_or_else(|error| panic!("{error}: {body}"))
}

#[track_caller]
fn check_refusal(body: &str, param: &str, code: Option<&str>, words: &str) {
    let error = decode_completion(body.as_bytes(), &Bounds::default()).expect_err(&body[..body.len().min(300)]);
    let (status, answer) = refusal(&error);
    let answer: Value = serde_json::from_slice(&answer).expect("JSON");
    assert_eq!(status, 400);
    assert_eq!(answer["error"]["param"].as_str(), Some(param), "{error}");
    assert_eq!(answer["error"]["code"].as_str(), code, "{error}");
    assert!(error.message.contains(words), "{error}");
}

#[test]
fn bodies_become_requests() {
    check_golden("completion_smallest.request", &format!("{:#?}\n", decoded(r#"{"model":"demo","prompt":"Once"}"#)));
    let every = r#"{"model":"demo","prompt":[[1,2],[3]],"max_tokens":0,"echo":true,"logprobs":5,"n":2,"best_of":3,"suffix":"!",
        "temperature":0,"prompt_logprobs":1,"user":"u","return_token_ids":true,"stop":"\n","unknown":1,"response_format":{"type":"text"},
        "add_special_tokens":true}"#;
    check_golden("completion_every_field.request", &format!("{:#?}\n", decoded(every)));
}

#[test]
fn prompts_in_all_four_forms() {
    let prompts = |prompt: &str| decoded(&format!(r#"{{"model":"m","prompt":{prompt}}}"#)).prompts;
    assert_eq!(prompts(r#""a""#), [Prompt::Text("a".into())]);
    assert_eq!(prompts(r#"["a","b"]"#), [Prompt::Text("a".into()), Prompt::Text("b".into())]);
    assert_eq!(prompts("[1,2]"), [Prompt::Tokens(vec![1, 2])]);
    assert_eq!(prompts("[[1],[2,3]]"), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]);
}

#[test]
fn bad_bodies_are_refused() {
    let with = |fields: &str| format!(r#"{{"model":"m","prompt":"x",{fields}}}"#);
    let prompt = |prompt: &str| format!(r#"{{"model":"m","prompt":{prompt}}}"#);
    for (body, param, code, words) in [
        (r#"{"model":"m"}"#.to_owned(), "prompt", None, "missing"),
        (r#"{"prompt":"x"}"#.to_owned(), "model", None, "missing"),
        (prompt("null"), "prompt", None, "missing"),
        (prompt("5"), "prompt", None, "expected a string or an array"),
        (prompt("\"\""), "prompt", None, "must not be empty"),
        (prompt("[]"), "prompt", None, "must not be empty"),
        (prompt("[[]]"), "prompt[0]", None, "must not be empty"),
        (prompt("[\"a\",\"\"]"), "prompt[1]", None, "must not be empty"),
        (prompt("[\"a\",1]"), "prompt[1]", None, "all strings, all token ids"),
        (prompt("[1,[2]]"), "prompt[1]", None, "all strings, all token ids"),
        (prompt("[true]"), "prompt[0]", None, "expected a string, a token id"),
        (prompt("[-1]"), "prompt[0]", None, "must be 0 to 4294967295"),
        (prompt("[1.5]"), "prompt[0]", None, "expected an integer"),
        (prompt("[[1,\"a\"]]"), "prompt[0][1]", None, "expected a number"),
        (
            prompt(&format!("[{}\"x\"]", "\"x\",".repeat(1_024))),
            "prompt",
            Some("above_maximum"),
            "more than 1024 prompts",
        ),
        (with(r#""n":5,"best_of":4"#), "best_of", None, "at least n (5)"),
        (with(r#""best_of":2,"stream":true"#), "best_of", None, "not available with"),
        (with(r#""best_of":129"#), "best_of", None, "must be 1 to 128"),
        (with(r#""max_tokens":0"#), "max_tokens", None, "only allowed with echo"),
        (with(r#""max_tokens":-1"#), "max_tokens", None, "must be 0 to"),
        (with(r#""min_tokens":17"#), "min_tokens", None, "at most max_tokens (16)"),
        (with(r#""logprobs":true"#), "logprobs", None, "expected a number, got a boolean"),
        (with(r#""logprobs":21"#), "logprobs", None, "must be 0 to 20"),
        (with(r#""suffix":5"#), "suffix", None, "expected a string"),
        (with(r#""echo":"yes""#), "echo", None, "expected a boolean"),
        (with(r#""stream_options":{}"#), "stream_options", None, "only allowed with"),
        (with(r#""add_special_tokens":false"#), "add_special_tokens", Some("unsupported_value"), "special tokens"),
        (with(r#""guided_by_voices":["a"]"#), "guided_by_voices", Some("unsupported_parameter"), "structured_outputs"),
        (with(r#""prompt_embeds":"AAAA""#), "prompt_embeds", Some("unsupported_parameter"), "text or token ids"),
        (with(r#""response_format":{"type":"xml"}"#), "response_format.type", None, "unknown format"),
    ] {
        check_refusal(&body, param, code, words);
    }
    let many = format!("[{}\"x\"]", "\"x\",".repeat(99));
    check_refusal(
        &format!(r#"{{"model":"m","prompt":{many},"n":11}}"#),
        "prompt",
        Some("above_maximum"),
        "more than 1024 choices",
    );
}

fn meta() -> CompletionMeta {
    CompletionMeta {
        id: "cmpl-1".into(),
        model: "demo".into(),
        created: 1_750_000_000,
        system_fingerprint: None,
        prompts: 1,
        n: 1,
        best_of: 1,
        echo: false,
        suffix: None,
        include_usage: false,
        continuous_usage: false,
        logprobs: false,
        prompt_logprobs: false,
        return_token_ids: false,
        token_names: TokenNames::Text,
    }
}

fn text(choice: u32, text: &str) -> ChatEvent {
    ChatEvent::Text { choice, text: text.into(), logprobs: Vec::new(), tokens: Vec::new() }
}

fn finish(choice: u32) -> ChatEvent {
    ChatEvent::Finish { choice, reason: FinishReason::Length, stop: None }
}

fn token(token: u32, bytes: &[u8], logprob: Option<f32>, top: &[(u32, &[u8], f32)]) -> TokenLogprob {
    let top = top.iter().map(|(id, bytes, logprob)| (*id, bytes.to_vec(), *logprob)).collect();
    TokenLogprob { token, bytes: bytes.to_vec(), logprob, top, place: TokenPlace::Text }
}

fn stream(meta: &CompletionMeta, events: &[ChatEvent]) -> String {
    let mut encoder = CompletionEncoder::new(meta);
    let mut out = BytesMut::new();
    for event in events {
        encoder.event(event, &mut out);
    }
    encoder.done(&mut out);
    String::from_utf8(out.to_vec()).expect("UTF-8")
}

fn whole(meta: &CompletionMeta, events: &[ChatEvent]) -> Option<Value> {
    let mut collector = CompletionCollector::new(meta.clone());
    for event in events {
        collector.event(event);
    }
    collector.finish().map(|body| serde_json::from_slice(&body).expect("JSON"))
}

#[track_caller]
fn check(name: &str, meta: &CompletionMeta, events: &[ChatEvent]) {
    check_golden(&format!("{name}.sse"), &stream(meta, events));
    let answer = whole(meta, events).expect("a complete answer");
    check_golden(&format!("{name}.json"), &(serde_json::to_string_pretty(&answer).expect("JSON") + "\n"));
}

#[test]
fn two_prompts_of_two_choices_with_a_suffix_and_usage() {
    let meta =
        CompletionMeta { prompts: 2, n: 2, best_of: 2, suffix: Some("\"!".into()), include_usage: true, ..meta() };
    let mut events = vec![text(3, "d"), text(0, "a"), text(2, "c"), text(1, "b"), text(0, "A")];
    events.extend((0..4).map(finish));
    events.push(ChatEvent::Usage(Usage { prompt_tokens: 2, completion_tokens: 5, ..Usage::default() }));
    check("completion_choices", &meta, &events);
}

#[test]
fn echo_with_logprobs_counts_characters_from_the_prompt() {
    let euro = "€".as_bytes();
    let prompt = ChatEvent::Prompt {
        choice: 0,
        text: "Ä€".into(),
        logprobs: vec![
            token(1, "Ä".as_bytes(), None, &[]),
            token(2, &euro[..2], Some(-1.5), &[(4, b"x", -0.5), (5, b"x", -0.75)]),
            token(3, &euro[2..], Some(-0.5), &[(3, &euro[2..], -0.5)]),
        ],
        tokens: vec![1, 2, 3],
    };
    let logprobs = vec![token(4, b"x", Some(-0.125), &[])];
    let generated = ChatEvent::Text { choice: 0, text: "x".into(), logprobs, tokens: vec![4] };
    let meta = CompletionMeta { echo: true, logprobs: true, return_token_ids: true, ..meta() };
    check("completion_echo", &meta, &[prompt, generated, finish(0)]);
}

#[test]
fn what_a_prompt_says_is_said_for_each_of_its_choices() {
    let meta = CompletionMeta { prompts: 2, n: 2, best_of: 2, echo: true, ..meta() };
    let prompt =
        |choice, text: &str| ChatEvent::Prompt { choice, text: text.into(), logprobs: Vec::new(), tokens: Vec::new() };
    let mut events = vec![prompt(0, "p"), prompt(2, "q"), text(1, "x")];
    events.extend((0..4).map(finish));
    let answer = whole(&meta, &events).expect("complete");
    let texts: Vec<&str> = (0..4).map(|index| answer["choices"][index]["text"].as_str().expect("text")).collect();
    assert_eq!(texts, ["p", "px", "q", "q"]);
    let sent = stream(&meta, &events);
    assert_eq!((sent.matches("\"text\":\"p\"").count(), sent.matches("\"text\":\"q\"").count()), (2, 2), "{sent}");
}

#[test]
fn the_best_candidates_are_kept_best_first() {
    let meta = CompletionMeta { prompts: 2, n: 2, best_of: 3, ..meta() };
    let scored = |choice: u32, logprobs: &[f32]| {
        let logprobs = logprobs.iter().map(|&logprob| token(0, b"x", Some(logprob), &[])).collect();
        ChatEvent::Text { choice, text: format!("c{choice}"), logprobs, tokens: Vec::new() }
    };
    let mut events = vec![scored(0, &[-2.0, -2.0]), scored(1, &[-1.0]), scored(2, &[-0.5, -3.0, -1.0])];
    events.extend([scored(3, &[-1.0]), scored(4, &[-1.0]), scored(5, &[-9.0])]);
    events.extend((0..6).map(finish));
    let answer = whole(&meta, &events).expect("complete");
    let choices: Vec<(u64, &str)> = answer["choices"]
        .as_array()
        .expect("choices")
        .iter()
        .map(|choice| (choice["index"].as_u64().expect("index"), choice["text"].as_str().expect("text")))
        .collect();
    assert_eq!(choices, [(0, "c1"), (1, "c2"), (2, "c3"), (3, "c4")]);

    let mut collector = CompletionCollector::new(CompletionMeta { prompts: 1, n: 1, ..meta });
    for event in events.iter().filter(|event| !matches!(event, ChatEvent::Finish { choice: 3.., .. })) {
        collector.event(event);
    }
    collector.score(2, -0.1);
    let answer: Value = serde_json::from_slice(&collector.finish().expect("complete")).expect("JSON");
    assert_eq!(answer["choices"][0]["text"], "c2");
}

#[test]
fn ranking_is_stable_and_total() {
    assert_eq!(best_of(&[-1.0, f32::NAN, -0.5, -0.5, f32::NEG_INFINITY], 5), [2, 3, 0, 1, 4]);
    assert_eq!(best_of(&[-1.0], 3), [0]);
}

#[test]
fn an_unfinished_candidate_is_no_answer() {
    let meta = CompletionMeta { n: 2, best_of: 2, ..meta() };
    assert_eq!(whole(&meta, &[text(0, "a"), finish(0), text(1, "b")]), None);
    let sent = stream(&meta, &[text(0, "a"), finish(0), text(1, "b")]);
    assert!(sent.contains("upstream_error") && !sent.contains("[DONE]"), "{sent}");
}

#[test]
fn tokens_without_text_move_no_offset() {
    let meta = CompletionMeta { logprobs: true, ..meta() };
    let at = |place, id, bytes: &[u8]| TokenLogprob { place, ..token(id, bytes, Some(-0.5), &[]) };
    let say = |text: &str, logprobs| ChatEvent::Text { choice: 0, text: text.into(), logprobs, tokens: Vec::new() };
    let events = [
        say(
            "ab",
            vec![at(TokenPlace::Text, 1, b"a"), at(TokenPlace::Control, 2, b"<|end|>"), at(TokenPlace::Text, 3, b"b")],
        ),
        say("", vec![at(TokenPlace::Apart, 4, b"STOP"), at(TokenPlace::Control, 2, b"<|end|>")]),
        finish(0),
    ];
    let answer = whole(&meta, &events).expect("an answer");
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], serde_json::json!(["a", "<|end|>", "b", "STOP", "<|end|>"]));
    assert_eq!(logprobs["text_offset"], serde_json::json!([0, 1, 1, 2, 2]));
    assert_eq!(answer["choices"][0]["text"], "ab");
    assert!(stream(&meta, &events).contains(r#""text_offset":[2,2]"#));
}

#[test]
fn tokens_are_named_by_id_where_that_was_asked_for() {
    let asked = decoded(r#"{"model":"m","prompt":"x","logprobs":2,"return_tokens_as_token_ids":true}"#);
    let meta = CompletionMeta::new(&asked, "cmpl-1".into(), 1, None);
    // Two tokens of the same bytes are two names.
    let said = token(7, b"a", Some(-0.5), &[(8, b"a", -0.25), (9, b"b", -0.75)]);
    let events = [ChatEvent::Text { choice: 0, text: "a".into(), logprobs: vec![said], tokens: Vec::new() }, finish(0)];
    let logprobs = &whole(&meta, &events).expect("an answer")["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], serde_json::json!(["token_id:7"]));
    assert_eq!(
        logprobs["top_logprobs"],
        serde_json::json!([{"token_id:8": -0.25, "token_id:9": -0.75, "token_id:7": -0.5}])
    );
    assert_eq!(logprobs["text_offset"], serde_json::json!([0]));
}
