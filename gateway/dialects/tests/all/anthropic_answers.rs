//! Answers to Anthropic clients: golden streams and whole answers from the same events, and the form of a broken one.

use crate::common;

use bytes::BytesMut;
use common::check_golden;
use penstock_dialects::anthropic::{MessageCollector, MessageEncoder};
use penstock_types::error_shape;
use penstock_types::event::StopCause;
use penstock_types::{ChatEvent, FinishReason, StreamEncoder, Usage, WholeCollector};
use serde_json::Value;

fn text(text: &str) -> ChatEvent {
    ChatEvent::Text { choice: 0, text: text.into(), logprobs: Vec::new(), tokens: Vec::new() }
}

fn reasoning(text: &str) -> ChatEvent {
    ChatEvent::Reasoning { choice: 0, text: text.into() }
}

fn signature(signature: &str) -> ChatEvent {
    ChatEvent::ReasoningSignature { choice: 0, signature: signature.into() }
}

fn call(call: u32, name: &str) -> ChatEvent {
    ChatEvent::ToolCallStart { choice: 0, call, id: format!("call_{call}"), name: name.into(), signature: None }
}

fn arguments(call: u32, json: &str) -> ChatEvent {
    ChatEvent::ToolCallArguments { choice: 0, call, json: json.into() }
}

fn finish(reason: FinishReason) -> ChatEvent {
    ChatEvent::Finish { choice: 0, reason, stop: None }
}

fn usage() -> ChatEvent {
    ChatEvent::Usage(Usage {
        prompt_tokens: 19,
        cached_tokens: 4,
        cache_write_tokens: 6,
        completion_tokens: 12,
        reasoning_tokens: 5,
    })
}

fn stream(events: &[ChatEvent]) -> String {
    let mut encoder = MessageEncoder::new("1", "demo \"x\"");
    let mut out = BytesMut::new();
    encoder.set_usage(Usage { prompt_tokens: 19, cached_tokens: 4, ..Usage::default() });
    for event in events {
        encoder.event(event, &mut out);
    }
    encoder.done(&mut out);
    String::from_utf8(out.to_vec()).expect("events are UTF-8")
}

fn whole(events: &[ChatEvent]) -> Option<Value> {
    let mut collector = Box::new(MessageCollector::new("1", "demo \"x\""));
    for event in events {
        collector.event(event);
    }
    collector.finish().map(|body| serde_json::from_slice(&body).expect("an answer is JSON"))
}

/// Checks both forms of one answer against `<name>.sse` and `<name>.json`.
#[track_caller]
fn check(name: &str, events: &[ChatEvent]) {
    check_golden(&format!("anthropic/{name}.sse"), &stream(events));
    let answer = whole(events).expect("a complete answer");
    check_golden(&format!("anthropic/{name}.json"), &(serde_json::to_string_pretty(&answer).expect("JSON") + "\n"));
}

#[test]
fn plain_text() {
    check("text", &[text("Hi"), text(""), text(" \"there\"\n\u{1}é😀\\"), finish(FinishReason::Stop), usage()]);
}

#[test]
fn reasoning_then_text_then_calls() {
    let events = [
        reasoning("Let me"),
        reasoning(" think."),
        signature("c2ln"),
        signature("redacted_thinking:ZGF0YQ=="),
        text("I ask."),
        call(0, "weather"),
        arguments(0, r#"{"city""#),
        arguments(0, r#": "x"}"#),
        call(1, "now"),
        finish(FinishReason::ToolCalls),
        usage(),
    ];
    check("every_block", &events);
}

#[test]
fn calls_that_come_interleaved_are_put_in_order() {
    let events = [
        call(0, "a"),
        call(1, "b"),
        arguments(1, r#"{"b":"}"#),
        arguments(0, r#"{"a":[1"#),
        call(2, "c"),
        arguments(0, "]}"),
        arguments(1, r#"\""}"#),
        arguments(2, "{}"),
        text("done"),
        finish(FinishReason::Stop),
        usage(),
    ];
    check("interleaved_calls", &events);
}

#[test]
fn stop_reasons() {
    let reason = |events: &[ChatEvent]| {
        let answer = whole(events).expect("complete");
        let streamed = stream(events);
        let word = answer["stop_reason"].as_str().expect("a word").to_owned();
        assert!(streamed.contains(&format!("\"delta\":{{\"stop_reason\":\"{word}\"")), "{streamed}");
        (word, answer["stop_sequence"].clone())
    };
    let stopped = |stop| ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop };
    let is = |word: &str| (word.to_owned(), Value::Null);
    assert_eq!(reason(&[text("a"), stopped(None)]), is("end_turn"));
    assert_eq!(reason(&[stopped(Some(StopCause::Token(7)))]), is("end_turn"));
    assert_eq!(
        reason(&[text("a"), stopped(Some(StopCause::Text("END".into())))]),
        ("stop_sequence".to_owned(), "END".into())
    );
    assert_eq!(reason(&[text("a"), finish(FinishReason::Length)]), is("max_tokens"));
    assert_eq!(reason(&[text("a"), finish(FinishReason::ContentFilter)]), is("refusal"));
    assert_eq!(reason(&[call(0, "f"), finish(FinishReason::Stop)]), is("tool_use"));
    assert_eq!(reason(&[ChatEvent::Refusal { choice: 0, text: "No.".into() }, stopped(None)]), is("refusal"));
}

#[test]
fn arguments_that_are_no_object_are_shown_as_such() {
    let input = |json: &str| {
        let answer = whole(&[call(0, "f"), arguments(0, json), finish(FinishReason::ToolCalls)]).expect("complete");
        answer["content"][0]["input"].clone()
    };
    assert_eq!(input(" {\"a\":1} "), serde_json::json!({"a": 1}));
    assert_eq!(input(" "), serde_json::json!({}));
    for bad in ["[1]", "{\"a\":", "7", "{} {}"] {
        assert_eq!(input(bad), serde_json::json!({"invalid_json": bad}));
    }
}

#[test]
fn another_providers_signature_of_a_call_travels_in_front_of_it() {
    let start = ChatEvent::ToolCallStart {
        choice: 0,
        call: 0,
        id: "c".into(),
        name: "f".into(),
        signature: Some("gem".into()),
    };
    check("call_signature", &[start, arguments(0, "{}"), finish(FinishReason::ToolCalls), usage()]);
}

#[test]
fn a_broken_answer_looks_broken() {
    let events = [text("Hi")];
    assert_eq!(whole(&events), None);
    let sent = stream(&events);
    assert!(!sent.contains("message_stop") && !sent.contains("message_delta"), "{sent}");
    let (name, data) = sent.trim_end().rsplit("\n\n").next().and_then(|last| last.split_once('\n')).expect("an event");
    let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
    assert_eq!((name, &data["type"], &data["error"]["type"]), ("event: error", &"error".into(), &"api_error".into()));
}

#[test]
fn nothing_follows_the_end() {
    let mut encoder = MessageEncoder::new("1", "m");
    let mut out = BytesMut::new();
    encoder.event(&text("Hi"), &mut out);
    encoder.fail(error_shape::OVERLOADED, "full", &mut out);
    let length = out.len();
    for event in [text("late"), finish(FinishReason::Stop), usage()] {
        encoder.event(&event, &mut out);
    }
    encoder.done(&mut out);
    encoder.fail(error_shape::INTERNAL, "again", &mut out);
    assert_eq!(out.len(), length);
    assert!(out.ends_with(
        b"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"full\"}}\n\n"
    ));
}

#[test]
fn a_prompt_that_does_not_fit_is_said_in_the_words_that_agents_look_for() {
    let body = penstock_types::error_body::anthropic::error_body(
        error_shape::CONTEXT_LENGTH,
        "This model's maximum is 9 tokens.",
        "r",
    );
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body["error"]["message"], "prompt is too long: This model's maximum is 9 tokens.");
    assert_eq!((&body["error"]["type"], &body["request_id"]), (&"invalid_request_error".into(), &"r".into()));
}

#[test]
fn held_calls_are_bounded() {
    let mut encoder = MessageEncoder::new("1", "m");
    let mut out = BytesMut::new();
    encoder.event(&call(0, "open"), &mut out);
    encoder.event(&arguments(0, "{"), &mut out);
    encoder.event(&call(1, "held"), &mut out);
    let piece = arguments(1, &"x".repeat(1 << 20));
    for _ in 0..17 {
        encoder.event(&piece, &mut out);
    }
    let sent = String::from_utf8_lossy(&out);
    assert!(sent.contains("event: error") && !sent.contains("held"), "{}", &sent[sent.len() - 200..]);
}

#[test]
fn every_error_is_in_the_reference() {
    const REFERENCE: &str = include_str!("../../../../docs/reference/anthropic.md");
    for shape in error_shape::SHAPES {
        let kind = penstock_types::error_body::anthropic::error_type(shape.status);
        let row = REFERENCE.lines().find(|line| {
            let Some((statuses, rest)) = line.strip_prefix("| ").and_then(|line| line.split_once(" | ")) else {
                return false;
            };
            let status = shape.status.to_string();
            rest.starts_with(&format!("`{kind}`")) && (statuses.contains(&status) || statuses.contains("other 4xx"))
        });
        assert!(row.is_some(), "{} {kind}", shape.status);
    }
}

#[test]
fn held_calls_are_counted_until_they_are_sent() {
    let mut encoder = MessageEncoder::new("1", "m");
    let mut out = BytesMut::new();
    let long = format!("{{\"a\":\"{}\"}}", "x".repeat(1 << 20));
    // Many times as much over time as may be held at once.
    for turn in 0..20 {
        let (open, held) = (2 * turn, 2 * turn + 1);
        for event in [call(open, "f"), arguments(open, "{"), call(held, "g"), arguments(held, &long)] {
            encoder.event(&event, &mut out);
        }
        assert!((1 << 20..(1 << 20) + 200).contains(&encoder.held()), "{}", encoder.held());
        encoder.event(&arguments(open, "}"), &mut out);
        assert_eq!(encoder.held(), 0);
    }
    encoder.event(&finish(FinishReason::ToolCalls), &mut out);
    encoder.done(&mut out);
    assert!(out.ends_with(b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"), "no call was out of order");
}
