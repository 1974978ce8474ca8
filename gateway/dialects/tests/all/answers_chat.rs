//! Chat answers: golden streams and whole answers from the same events, and properties for any events.

use crate::common;

use bytes::BytesMut;
use common::check_golden;
use penstock_dialects::openai::{CallShape, ChatCollector, ChatEncoder, ChatMeta, ReasoningNames};
use penstock_types::error_shape;
use penstock_types::event::StopCause;
use penstock_types::{ChatEvent, FinishReason, TokenLogprob, TokenNames, TokenPlace, Usage};
use serde_json::Value;

fn meta() -> ChatMeta {
    ChatMeta {
        id: "chatcmpl-1".into(),
        model: "demo \"x\"".into(),
        created: 1_750_000_000,
        system_fingerprint: Some("fp_cpu".into()),
        n: 1,
        include_usage: false,
        continuous_usage: false,
        logprobs: false,
        prompt_logprobs: false,
        return_token_ids: false,
        token_names: TokenNames::Text,
        reasoning: ReasoningNames::Both,
        calls: CallShape::Tools,
    }
}

fn text(choice: u32, text: &str) -> ChatEvent {
    ChatEvent::Text { choice, text: text.into(), logprobs: Vec::new(), tokens: Vec::new() }
}

fn reasoning(choice: u32, text: &str) -> ChatEvent {
    ChatEvent::Reasoning { choice, text: text.into() }
}

fn call(call: u32, id: &str, name: &str) -> ChatEvent {
    ChatEvent::ToolCallStart { choice: 0, call, id: id.into(), name: name.into(), signature: None }
}

fn arguments(call: u32, json: &str) -> ChatEvent {
    ChatEvent::ToolCallArguments { choice: 0, call, json: json.into() }
}

fn finish(choice: u32, reason: FinishReason) -> ChatEvent {
    ChatEvent::Finish { choice, reason, stop: None }
}

fn usage() -> ChatEvent {
    ChatEvent::Usage(Usage {
        prompt_tokens: 9,
        cached_tokens: 4,
        completion_tokens: 12,
        reasoning_tokens: 5,
        ..Usage::default()
    })
}

fn token(token: u32, bytes: &[u8], logprob: f32, top: &[(u32, &[u8], f32)]) -> TokenLogprob {
    let top = top.iter().map(|(id, bytes, logprob)| (*id, bytes.to_vec(), *logprob)).collect();
    TokenLogprob { token, bytes: bytes.to_vec(), logprob: Some(logprob), top, place: TokenPlace::Text }
}

fn stream(meta: &ChatMeta, events: &[ChatEvent]) -> String {
    let mut encoder = ChatEncoder::new(meta);
    let mut out = BytesMut::new();
    for event in events {
        encoder.event(event, &mut out);
    }
    encoder.done(&mut out);
    String::from_utf8(out.to_vec()).expect("chunks are UTF-8")
}

fn whole(meta: &ChatMeta, events: &[ChatEvent]) -> Option<Value> {
    let mut collector = ChatCollector::new(meta.clone());
    for event in events {
        collector.event(event);
    }
    collector.finish().map(|body| serde_json::from_slice(&body).expect("an answer is JSON"))
}

/// Checks both forms of one answer against `<name>.sse` and `<name>.json`.
#[track_caller]
fn check(name: &str, meta: &ChatMeta, events: &[ChatEvent]) {
    check_golden(&format!("{name}.sse"), &stream(meta, events));
    let answer = whole(meta, events).expect("a complete answer");
    check_golden(&format!("{name}.json"), &(serde_json::to_string_pretty(&answer).expect("JSON") + "\n"));
}

#[test]
fn text_with_usage() {
    let meta = ChatMeta { include_usage: true, ..meta() };
    let events = [text(0, "Hi"), text(0, " \"there\"\n\u{1}\u{2028}é😀\\"), finish(0, FinishReason::Stop), usage()];
    check("chat_text", &meta, &events);
}

#[test]
fn usage_in_each_chunk() {
    let meta = ChatMeta { include_usage: true, continuous_usage: true, ..meta() };
    let mut encoder = ChatEncoder::new(&meta);
    let mut out = BytesMut::new();
    for (count, event) in [text(0, "a"), text(0, "b"), finish(0, FinishReason::Length)].iter().enumerate() {
        encoder.set_usage(Usage { prompt_tokens: 3, completion_tokens: count as u64 + 1, ..Usage::default() });
        encoder.event(event, &mut out);
    }
    encoder.event(&usage(), &mut out);
    encoder.done(&mut out);
    check_golden("chat_continuous_usage.sse", std::str::from_utf8(&out).expect("UTF-8"));
}

#[test]
fn reasoning_then_text_stopped_by_a_string() {
    let stop = Some(StopCause::Text("END".into()));
    let end = ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop };
    check("chat_reasoning", &meta(), &[reasoning(0, "Let me"), reasoning(0, " see."), text(0, "42"), end]);
    let one_name = ChatMeta { reasoning: ReasoningNames::ReasoningContent, ..meta() };
    assert_eq!(stream(&one_name, &[reasoning(0, "x")]).matches("\"reasoning\"").count(), 0);
}

#[test]
fn two_calls() {
    let events = [
        call(0, "call_a", "weather"),
        arguments(0, "{\"city\":"),
        arguments(0, " \"Gießen\"}"),
        call(1, "call_b", "time"),
        arguments(1, "{}"),
        finish(0, FinishReason::ToolCalls),
        usage(),
    ];
    check("chat_calls", &ChatMeta { include_usage: true, ..meta() }, &events);
}

#[test]
fn text_before_a_call() {
    check("chat_text_call", &meta(), &[text(0, "Wait."), call(0, "call_a", "f"), finish(0, FinishReason::ToolCalls)]);
}

#[test]
fn choices_interleave() {
    let meta = ChatMeta { n: 2, ..meta() };
    let end = ChatEvent::Finish { choice: 1, reason: FinishReason::Stop, stop: Some(StopCause::Token(7)) };
    check("chat_choices", &meta, &[text(1, "b"), text(0, "a"), text(1, "B"), end, finish(0, FinishReason::Length)]);
}

#[test]
fn logprobs_with_split_characters_and_impossible_tokens() {
    let euro = "€".as_bytes();
    let logprobs = vec![
        token(5, &euro[..1], -0.25, &[(5, &euro[..1], -0.25), (6, b"\"", f32::NEG_INFINITY)]),
        token(9, &euro[1..], -1e-9, &[]),
    ];
    let events = [
        ChatEvent::Text { choice: 0, text: "€".into(), logprobs, tokens: vec![5, 9] },
        ChatEvent::Text {
            choice: 0,
            text: String::new(),
            logprobs: vec![token(2, b"</s>", -0.5, &[])],
            tokens: vec![2],
        },
        finish(0, FinishReason::Stop),
    ];
    check("chat_logprobs", &ChatMeta { logprobs: true, return_token_ids: true, ..meta() }, &events);
    // Fields that were not asked for are absent.
    let plain = stream(&meta(), &events);
    assert!(!plain.contains("-0.25") && !plain.contains("token_ids"), "{plain}");
}

#[test]
fn prompt_logprobs_as_vllm_says_them() {
    let first =
        TokenLogprob { token: 1, bytes: b"a".to_vec(), logprob: None, top: Vec::new(), place: TokenPlace::Text };
    let second = token(7, b"b", -3.0, &[(8, b"c", -0.5)]);
    let third = token(8, b"c", -0.5, &[(8, b"c", -0.5), (7, b"b", -3.0)]);
    let prompt = ChatEvent::Prompt {
        choice: 0,
        text: "abc".into(),
        logprobs: vec![first, second, third],
        tokens: vec![1, 7, 8],
    };
    let meta = ChatMeta { prompt_logprobs: true, return_token_ids: true, ..meta() };
    check("chat_prompt_logprobs", &meta, &[prompt, text(0, "d"), finish(0, FinishReason::Length)]);
}

#[test]
fn an_answer_without_a_token() {
    check("chat_empty", &meta(), &[finish(0, FinishReason::Stop)]);
}

#[test]
fn a_broken_answer_looks_broken() {
    let events = [text(0, "Hi")];
    assert_eq!(whole(&meta(), &events), None);
    let sent = stream(&meta(), &events);
    assert!(!sent.contains("[DONE]"), "{sent}");
    let last: Value = serde_json::from_str(sent.trim_end().rsplit("data: ").next().expect("a chunk")).expect("JSON");
    assert_eq!(last["error"]["code"], "upstream_error");
}

#[test]
fn nothing_follows_the_end() {
    let mut encoder = ChatEncoder::new(&ChatMeta { include_usage: true, ..meta() });
    let mut out = BytesMut::new();
    encoder.event(&text(0, "Hi"), &mut out);
    encoder.fail(error_shape::TIMEOUT, "No \"answer\".", &mut out);
    let length = out.len();
    encoder.fail(error_shape::INTERNAL, "again", &mut out);
    for event in [text(0, "late"), finish(0, FinishReason::Stop), usage()] {
        encoder.event(&event, &mut out);
    }
    encoder.done(&mut out);
    assert_eq!(out.len(), length, "{}", String::from_utf8_lossy(&out));
    assert!(out.ends_with(
        b"data: {\"error\":{\"message\":\"No \\\"answer\\\".\",\"type\":\"server_error\",\"param\":null,\"code\":\"timeout\"}}\n\n"
    ));
}

#[test]
fn the_bytes_of_log_probabilities_are_those_of_the_answer() {
    let meta = ChatMeta { logprobs: true, ..meta() };
    let at = |place, bytes: &[u8]| TokenLogprob { place, ..token(1, bytes, -0.5, &[]) };
    let entries =
        vec![at(TokenPlace::Text, b"a\xe2"), at(TokenPlace::Apart, b"STOP"), at(TokenPlace::Control, b"<|end|>")];
    let said = ChatEvent::Text { choice: 0, text: "a".into(), logprobs: entries, tokens: Vec::new() };
    let sent = stream(&meta, &[said]);
    for entry in [
        "{\"token\":\"a\u{fffd}\",\"logprob\":-0.5,\"bytes\":[97,226]",
        r#"{"token":"STOP","logprob":-0.5,"bytes":[83,84,79,80]"#,
        r#"{"token":"<|end|>","logprob":-0.5,"bytes":[]"#,
    ] {
        assert!(sent.contains(entry), "{entry}: {sent}");
    }
}

#[test]
fn tokens_are_named_by_id_where_that_was_asked_for() {
    let meta = ChatMeta { logprobs: true, token_names: TokenNames::Ids, ..meta() };
    let entries = vec![token(7, b"a", -0.5, &[(7, b"a", -0.5), (8, b"b", -1.5)])];
    let said = ChatEvent::Text { choice: 0, text: "a".into(), logprobs: entries, tokens: Vec::new() };
    let sent = stream(&meta, &[said]);
    for entry in [
        r#"{"token":"token_id:7","logprob":-0.5,"bytes":[97],"top_logprobs":"#,
        r#"{"token":"token_id:8","logprob":-1.5,"bytes":[98]}"#,
    ] {
        assert!(sent.contains(entry), "{entry}: {sent}");
    }
}
