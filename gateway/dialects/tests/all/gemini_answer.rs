//! Gemini answers: streamed, as one array, and whole.

use crate::common;

use bytes::BytesMut;
use common::check_golden;
use penstock_dialects::gemini::{count_body, embed, generate, model, models_list};
use penstock_dialects::openai::ModelCard;
use penstock_types::codec::Framing;
use penstock_types::error_shape;
use penstock_types::{AnswerMeta, Bounds, ChatEvent, Decoded, FinishReason, TokenLogprob, TokenPlace, Usage};
use serde_json::Value;

fn meta() -> AnswerMeta {
    AnswerMeta::new("r1".into(), 1)
}

fn asked(framing: Framing, config: &str) -> Decoded {
    let body = format!(r#"{{"contents":[{{"parts":[{{"text":"hi"}}]}}],"generationConfig":{{{config}}}}}"#);
    generate("m", framing, body.as_bytes(), &Bounds::default()).expect("good")
}

fn streamed(framing: Framing, config: &str, events: &[ChatEvent]) -> String {
    let mut encoder = asked(framing, config).form.stream(&meta());
    let mut out = BytesMut::new();
    events.iter().for_each(|event| encoder.event(event, &mut out));
    encoder.done(&mut out);
    encoder.done(&mut out);
    String::from_utf8(out.into()).expect("text")
}

fn whole(config: &str, events: &[ChatEvent]) -> Option<String> {
    let mut collector = asked(Framing::Whole, config).form.whole(&meta());
    events.iter().for_each(|event| collector.event(event));
    assert!(collector.bytes() < 4096);
    collector.finish().map(|body| String::from_utf8(body.into()).expect("text"))
}

/// The chunks of a stream, each as JSON.
fn chunks(stream: &str) -> Vec<Value> {
    let events = stream.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").expect("an event"));
    events.map(|data| serde_json::from_str(data).expect("JSON")).collect()
}

#[track_caller]
fn check(name: &str, config: &str, events: &[ChatEvent]) {
    let sse = streamed(Framing::Events, config, events);
    check_golden(&format!("{name}.sse"), &sse);
    let array: Vec<Value> = serde_json::from_str(&streamed(Framing::Array, config, events)).expect("one JSON array");
    assert_eq!(array, chunks(&sse), "both framings say the same");
    let whole = whole(config, events).expect("a whole answer");
    serde_json::from_str::<Value>(&whole).expect("JSON");
    check_golden(&format!("{name}.json"), &whole);
}

fn text(choice: u32, text: &str) -> ChatEvent {
    ChatEvent::Text { choice, text: text.into(), logprobs: Vec::new(), tokens: Vec::new() }
}

fn thought(text: &str) -> ChatEvent {
    ChatEvent::Reasoning { choice: 0, text: text.into() }
}

fn signed(signature: &str) -> ChatEvent {
    ChatEvent::ReasoningSignature { choice: 0, signature: signature.into() }
}

fn call(call: u32, name: &str, signature: Option<&str>) -> ChatEvent {
    let signature = signature.map(str::to_owned);
    ChatEvent::ToolCallStart { choice: 0, call, id: format!("id{call}"), name: name.into(), signature }
}

fn arguments(call: u32, json: &str) -> ChatEvent {
    ChatEvent::ToolCallArguments { choice: 0, call, json: json.into() }
}

fn finish(choice: u32, reason: FinishReason) -> ChatEvent {
    ChatEvent::Finish { choice, reason, stop: None }
}

fn usage() -> ChatEvent {
    ChatEvent::Usage(Usage {
        prompt_tokens: 7,
        cached_tokens: 2,
        completion_tokens: 5,
        reasoning_tokens: 1,
        cache_write_tokens: 0,
    })
}

#[test]
fn an_answer_in_text() {
    check(
        "gemini_text",
        "",
        &[text(0, "Hel"), text(0, ""), text(0, "lo \"\u{e4}\"\n"), finish(0, FinishReason::Stop), usage()],
    );
}

#[test]
fn thoughts_are_shown_when_asked_for() {
    let events = [
        thought("Let "),
        thought("me."),
        signed("gemini:AAAA"),
        text(0, "Hi"),
        signed("eCB5"),
        finish(0, FinishReason::Length),
        usage(),
    ];
    check("gemini_thoughts", r#""thinkingConfig":{"includeThoughts":true}"#, &events);
    check("gemini_thoughts_hidden", "", &events);
}

#[test]
fn a_signature_without_its_thought_is_no_empty_text() {
    let events = [
        thought("Hm."),
        signed("EqQB"),
        call(0, "f", None),
        arguments(0, "{}"),
        thought("Hm."),
        signed("EqQC"),
        finish(0, FinishReason::ToolCalls),
        usage(),
    ];
    let parts = |answer: &Value| answer["candidates"][0]["content"]["parts"].as_array().cloned().unwrap_or_default();
    let answer: Value = serde_json::from_str(&whole("", &events).expect("whole")).expect("JSON");
    let mut streamed = chunks(&streamed(Framing::Events, "", &events));
    // The last chunk has the end and the counts, and an empty text as Google's has.
    streamed.pop();
    for said in [parts(&answer), streamed.iter().flat_map(parts).collect()] {
        assert_eq!(said.iter().filter(|part| part["thoughtSignature"].is_string()).count(), 2, "{said:?}");
        assert!(said.iter().all(|part| part["text"] != "" || part["thought"] == true), "{said:?}");
    }
}

#[test]
fn calls_are_whole() {
    let events = [
        text(0, "Ask."),
        call(0, "weather", Some("AAAA")),
        arguments(0, r#"{"city":"#),
        arguments(0, r#""Gießen"}"#),
        call(1, "time", None),
        arguments(1, " "),
        finish(0, FinishReason::ToolCalls),
        usage(),
    ];
    check("gemini_calls", "", &events);
}

#[test]
fn interleaved_arguments_reach_their_calls() {
    let pieces = [arguments(1, r#"{"y":2"#), arguments(0, "1}"), arguments(1, "}"), arguments(7, "{}")];
    let end = [finish(0, FinishReason::ToolCalls)];
    let begin = |starts: &[ChatEvent]| [starts, &pieces[..], &end[..]].concat();
    for events in [
        begin(&[call(0, "a", None), arguments(0, r#"{"x":"#), call(1, "b", None)]),
        // Both begin before their arguments do.
        begin(&[call(0, "a", None), call(1, "b", None), arguments(0, r#"{"x":"#)]),
        begin(&[call(0, "a", None), arguments(0, ""), call(1, "b", None), text(0, "-"), arguments(0, r#"{"x":"#)]),
    ] {
        let answer: Value = serde_json::from_str(&whole("", &events).expect("whole")).expect("JSON");
        let found = |parts: &Value| {
            let parts = parts.as_array().cloned().unwrap_or_default();
            parts.into_iter().filter(|part| part["functionCall"].is_object()).collect::<Vec<_>>()
        };
        let parts = found(&answer["candidates"][0]["content"]["parts"]);
        assert_eq!(parts[0]["functionCall"]["args"]["x"], 1);
        assert_eq!(parts[1]["functionCall"]["args"]["y"], 2);
        let told: Vec<Value> = chunks(&streamed(Framing::Events, "", &events));
        let calls = told.iter().flat_map(|chunk| found(&chunk["candidates"][0]["content"]["parts"]));
        let calls: Vec<Value> = calls.map(|part| part["functionCall"].clone()).collect();
        assert_eq!(calls.iter().map(|call| &call["name"]).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((&calls[0]["args"]["x"], &calls[1]["args"]["y"]), (&Value::from(1), &Value::from(2)));
    }
}

#[test]
fn a_call_that_is_no_call_is_said_to_be_malformed() {
    let events = [call(0, "a", None), arguments(0, r#"{"x":"#), finish(0, FinishReason::ToolCalls), usage()];
    check("gemini_malformed", "", &events);
}

#[test]
fn choices_end_one_by_one() {
    let events = [
        text(1, "b"),
        text(0, "a"),
        finish(1, FinishReason::ContentFilter),
        text(1, "late"),
        text(5, "unknown"),
        finish(0, FinishReason::Stop),
        usage(),
    ];
    check("gemini_choices", r#""candidateCount":2"#, &events);
}

#[test]
fn logprobs_are_shown_when_asked_for() {
    let token = |token, bytes: &[u8], logprob| TokenLogprob {
        token,
        bytes: bytes.to_vec(),
        logprob: Some(logprob),
        top: vec![(token, bytes.to_vec(), logprob), (9, vec![0xff], f32::NEG_INFINITY)],
        place: TokenPlace::Text,
    };
    let said = |text: &str, logprobs| ChatEvent::Text { choice: 0, text: text.into(), logprobs, tokens: vec![1] };
    let events = [
        said("ab", vec![token(1, b"a", -0.5), token(2, b"b", -1.5)]),
        said("c", vec![token(3, b"c", -1.0)]),
        finish(0, FinishReason::Stop),
    ];
    check("gemini_logprobs", r#""responseLogprobs":true,"logprobs":2"#, &events);
    assert!(!streamed(Framing::Events, "", &events).contains("logprobsResult"));
}

#[test]
fn refusals_are_text() {
    let events = [ChatEvent::Refusal { choice: 0, text: "No.".into() }, finish(0, FinishReason::Stop)];
    let answer: Value = serde_json::from_str(&whole("", &events).expect("whole")).expect("JSON");
    assert_eq!(answer["candidates"][0]["content"]["parts"][0]["text"], "No.");
}

#[test]
fn a_broken_stream_ends_in_an_error() {
    let mut encoder = asked(Framing::Events, "").form.stream(&meta());
    let mut out = BytesMut::new();
    encoder.event(&text(0, "a"), &mut out);
    encoder.fail(error_shape::OVERLOADED, "full", &mut out);
    encoder.event(&text(0, "b"), &mut out);
    encoder.done(&mut out);
    check_golden("gemini_failed.sse", std::str::from_utf8(&out).expect("text"));
    // An incomplete answer does not end with a normal finish.
    let told = chunks(&streamed(Framing::Events, "", &[text(0, "a")]));
    assert_eq!((told[1]["error"]["code"].as_u64(), &told[1]["error"]["status"]), (Some(502), &Value::from("INTERNAL")));
    assert_eq!(whole("", &[text(0, "a")]), None);
    // An array stays well-formed.
    for events in [&[][..], &[text(0, "a")]] {
        let array: Vec<Value> = serde_json::from_str(&streamed(Framing::Array, "", events)).expect("JSON");
        assert!(array[events.len()]["error"].is_object());
    }
}

#[test]
fn the_counts_come_with_the_last_chunk() {
    let told = chunks(&streamed(Framing::Events, "", &[text(0, "a"), finish(0, FinishReason::Stop), usage()]));
    let last = told.last().expect("chunks");
    assert_eq!(last["candidates"][0]["finishReason"], "STOP");
    assert_eq!(last["usageMetadata"]["totalTokenCount"], 12);
    assert!(told[0]["usageMetadata"].is_null());
}

#[test]
fn vectors() {
    let vector = |index, values: &[f32]| ChatEvent::Vector { index, values: values.to_vec() };
    let answered = |batch, body: &str, events: &[ChatEvent]| {
        let decoded = embed("m", batch, body.as_bytes(), &Bounds::default()).expect("good");
        let mut collector = decoded.form.whole(&meta());
        events.iter().for_each(|event| collector.event(event));
        collector.finish().map(|body| String::from_utf8(body.into()).expect("text"))
    };
    let one = r#"{"content":{"parts":{"text":"a"}}}"#;
    let two = format!(r#"{{"requests":[{one},{one}]}}"#);
    let values = [0.5, -1e-9, f32::NAN];
    assert_eq!(
        answered(false, one, &[vector(0, &values)]).as_deref(),
        Some(r#"{"embedding":{"values":[0.5,-1e-9,0.0]}}"#)
    );
    assert_eq!(
        answered(true, &two, &[vector(1, &[2.0]), vector(0, &[1.0]), vector(7, &[1.0]), usage()]).as_deref(),
        Some(
            r#"{"embeddings":[{"values":[1.0]},{"values":[2.0]}],"usageMetadata":{"promptTokenCount":7,"totalTokenCount":7}}"#
        )
    );
    assert_eq!(answered(true, &two, &[vector(1, &[2.0])]), None);
}

#[test]
fn models_and_counts() {
    let card = |id: &str, context_tokens| ModelCard {
        id: id.into(),
        created: 1,
        owned_by: "p".into(),
        context_tokens,
        task: None,
        parent: None,
    };
    let (card, unknown) = (card("org/m", Some(4096)), card("n", None));
    check_golden("gemini_models.json", &String::from_utf8(models_list(&[card.clone(), unknown])).expect("text"));
    let one: Value = serde_json::from_slice(&model(&card)).expect("JSON");
    assert_eq!(one["name"], "models/org/m");
    assert_eq!(count_body(31), b"{\"totalTokens\":31}");
}

#[test]
fn errors_have_googles_shape() {
    let body = penstock_types::error_body::gemini::error_body(error_shape::INVALID_API_KEY, "no");
    let value: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(
        (value["error"]["code"].as_u64(), value["error"]["status"].as_str()),
        (Some(401), Some("UNAUTHENTICATED"))
    );
    assert_eq!(value["error"]["details"][0]["reason"], "API_KEY_INVALID");
    for shape in error_shape::SHAPES {
        let value: Value =
            serde_json::from_slice(&penstock_types::error_body::gemini::error_body(shape, "a \"b\"")).expect("JSON");
        assert_eq!(value["error"]["code"], shape.status);
    }
}

#[test]
fn held_calls_are_counted_until_they_are_sent() {
    let mut encoder = asked(Framing::Events, "\"candidateCount\":2").form.stream(&meta());
    let mut out = BytesMut::new();
    let long = "x".repeat(1 << 20);
    for choice in [0, 1] {
        let (id, name) = (String::from("c"), String::from("f"));
        encoder.event(&ChatEvent::ToolCallStart { choice, call: 0, id, name, signature: None }, &mut out);
        encoder.event(&ChatEvent::ToolCallArguments { choice, call: 0, json: format!("{{\"a\":\"{long}") }, &mut out);
        let held = encoder.held();
        assert!(held >= (choice as usize + 1) << 20 && held < ((choice as usize + 1) << 20) + 100, "{held}");
    }
    for choice in [0, 1] {
        encoder.event(&ChatEvent::ToolCallArguments { choice, call: 0, json: "\"}".into() }, &mut out);
        encoder.event(&text(choice, "so"), &mut out);
    }
    assert!(encoder.held() < 100, "{}", encoder.held());
}
