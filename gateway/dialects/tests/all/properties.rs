//! Properties of decoders and encoders for any bytes and any events.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use penstock_dialects::openai::{
    CallShape, ChatCollector, ChatEncoder, ChatMeta, CompletionCollector, CompletionEncoder, CompletionMeta,
    ReasoningNames, decode_chat, decode_completion, decode_detokenize, decode_tokenize,
};
use penstock_types::event::StopCause;
use penstock_types::{ApiError, ChatEvent, FinishReason, TokenLogprob, TokenNames, TokenPlace, Usage};
use penstock_types::{Bounds, error_body::openai::refusal};
use proptest::prelude::*;
use serde_json::Value;

const CHOICES: u32 = 3;

/// Checks that a refusal is a well-formed error body.
fn check_error(error: &ApiError) {
    let (status, body) = refusal(error);
    let value: Value = serde_json::from_slice(&body).expect("an error body is JSON");
    assert_eq!((status, value["error"].as_object().map(serde_json::Map::len)), (400, Some(4)));
}

fn decode_all(body: &[u8]) {
    let bounds = Bounds::default();
    if let Err(error) = decode_chat(body, &bounds) {
        check_error(&error);
    }
    if let Err(error) = decode_completion(body, &bounds) {
        check_error(&error);
    }
    if let Err(error) = decode_tokenize(body, &bounds) {
        check_error(&error);
    }
    if let Err(error) = decode_detokenize(body, &bounds) {
        check_error(&error);
    }
}

const SEED: &str = r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"n":2,"stop":["a","\u00e9\ud83d\ude00"],
"logit_bias":{"5":-1.5},"tools":[{"type":"function","function":{"name":"f","parameters":{"a":[1,{}]}}}],"tool_choice":"auto",
"messages":[{"role":"system","content":[{"type":"text","text":"x"}]},{"role":"assistant","content":null,"tool_calls":[{"id":"1",
"type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"1","content":"y"}],"prompt":[[1,2],[3]],
"chat_template_kwargs":{"a":true},"metadata":{"k":"v"},"seed":-1,"temperature":1e-1,"response_format":{"type":"text"}}"#;

/// The fields of structured output and of functions, none of them contradicting another.
const GUIDED: &str = r#"{"model":"m","structured_outputs":{"json":"{\"a\":[]}","whitespace_pattern":"[ ]?"},"guided_json":{"a":[]},
"response_format":{"type":"json_object","schema":{"a":[]}},"grammar":"","functions":[{"name":"f","parameters":{"b":{}}}],"prompt":"x",
"function_call":{"name":"f"},"thinking_token_budget":-1,"messages":[{"role":"assistant","function_call":{"name":"f","arguments":"\u00e9"}},
{"role":"function","name":"f","content":"y"}]}"#;

/// Constraints of the other kinds, which contradict each other.
const OTHERS: &str = r#"{"model":"m","guided_choice":["a","\ud83d\ude00"],"ebnf":"a ::= b","regex":"\\d","messages":[{"role":"user","content":"x"}],
"structural_tag":{"type":"structural_tag","structures":[{"begin":"<","schema":{},"end":">"}],"triggers":["<"]},"prompt":"x",
"tool_choice":{"type":"allowed_tools","allowed_tools":{"mode":"auto","tools":[{"type":"function","function":{"name":"f"}}]}}}"#;

fn logprob() -> impl Strategy<Value = TokenLogprob> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..4);
    let top = prop::collection::vec((any::<u32>(), bytes(), any::<f32>()), 0..3);
    (any::<u32>(), bytes(), prop::option::of(any::<f32>()), top).prop_map(|(token, bytes, logprob, top)| TokenLogprob {
        token,
        bytes,
        logprob,
        top,
        place: TokenPlace::Text,
    })
}

fn event() -> impl Strategy<Value = ChatEvent> {
    let logprobs = || prop::collection::vec(logprob(), 0..3);
    let tokens = || prop::collection::vec(any::<u32>(), 0..3);
    let choice = || 0..CHOICES + 1;
    prop_oneof![
        4 => (choice(), any::<String>(), logprobs(), tokens())
            .prop_map(|(choice, text, logprobs, tokens)| ChatEvent::Text { choice, text, logprobs, tokens }),
        2 => (choice(), any::<String>()).prop_map(|(choice, text)| ChatEvent::Reasoning { choice, text }),
        1 => (0..CHOICES, "[a-z\"]{1,4}", "[a-z\\\\]{1,4}")
            .prop_map(|(choice, id, name)| ChatEvent::ToolCallStart { choice, call: 0, id, name, signature: None }),
        2 => (0..CHOICES, 0..4_u32, any::<String>())
            .prop_map(|(choice, call, json)| ChatEvent::ToolCallArguments { choice, call, json }),
        1 => (choice(), any::<String>(), logprobs(), tokens())
            .prop_map(|(choice, text, logprobs, tokens)| ChatEvent::Prompt { choice, text, logprobs, tokens }),
    ]
}

/// Events of a whole answer: calls numbered, a prompt only in front, every choice finished.
fn answer() -> impl Strategy<Value = Vec<ChatEvent>> {
    let reason = prop_oneof![Just(FinishReason::Stop), Just(FinishReason::Length), Just(FinishReason::ToolCalls)];
    let stop = prop::option::of(prop_oneof![
        any::<String>().prop_map(StopCause::Text),
        any::<u32>().prop_map(StopCause::Token)
    ]);
    let ends = prop::collection::vec((reason, stop), CHOICES as usize);
    (prop::collection::vec(event(), 0..30), ends).prop_map(|(mut events, ends)| {
        let mut calls = [0; CHOICES as usize];
        events.retain_mut(|event| match event {
            ChatEvent::ToolCallStart { choice, call, .. } => {
                *call = calls[*choice as usize];
                calls[*choice as usize] += 1;
                true
            }
            ChatEvent::ToolCallArguments { choice, call, .. } => *call < calls[*choice as usize],
            ChatEvent::Prompt { .. } => false,
            _ => true,
        });
        for (choice, (reason, stop)) in (0..).zip(ends) {
            events.push(ChatEvent::Finish { choice, reason, stop });
        }
        events.push(ChatEvent::Usage(Usage { prompt_tokens: 3, completion_tokens: 4, ..Usage::default() }));
        events
    })
}

fn chat_meta(logprobs: bool, include_usage: bool) -> ChatMeta {
    ChatMeta {
        id: "id".into(),
        model: "m".into(),
        created: 1,
        system_fingerprint: None,
        n: CHOICES,
        include_usage,
        continuous_usage: false,
        logprobs,
        prompt_logprobs: false,
        token_names: TokenNames::Text,
        return_token_ids: true,
        reasoning: ReasoningNames::Both,
        calls: CallShape::Tools,
    }
}

fn completion_meta(logprobs: bool) -> CompletionMeta {
    CompletionMeta {
        id: "id".into(),
        model: "m".into(),
        created: 1,
        system_fingerprint: None,
        prompts: 1,
        n: CHOICES,
        best_of: CHOICES,
        echo: true,
        suffix: None,
        include_usage: true,
        continuous_usage: true,
        logprobs,
        prompt_logprobs: false,
        token_names: TokenNames::Text,
        return_token_ids: true,
    }
}

/// The chunks of a stream, each of which must be JSON; the last line must be the end.
fn chunks(sent: &[u8], done: bool) -> Vec<Value> {
    let text = std::str::from_utf8(sent).expect("UTF-8");
    let mut parts: Vec<&str> = text.split("\n\n").collect();
    assert_eq!(parts.pop(), Some(""), "a stream ends with a blank line");
    if done {
        assert_eq!(parts.pop(), Some("data: [DONE]"));
    }
    let json = |part: &&str| part.strip_prefix("data: ").expect("a data line").to_owned();
    parts.iter().map(|part| serde_json::from_str(&json(part)).expect("a chunk is JSON")).collect()
}

fn append(target: &mut Value, piece: &Value) {
    if let Some(piece) = piece.as_str() {
        let text = target.as_str().unwrap_or_default().to_owned() + piece;
        *target = Value::String(text);
    }
}

fn extend(target: &mut Value, piece: &Value) {
    if let Some(piece) = piece.as_array() {
        let mut list = target.as_array().cloned().unwrap_or_default();
        list.extend(piece.iter().cloned());
        *target = Value::Array(list);
    }
}

/// Assembles a stream's choices as a client does.
fn joined(chunks: &[Value]) -> Vec<Value> {
    let mut choices = vec![serde_json::json!({"content": "", "calls": []}); CHOICES as usize];
    let mut opened = 0;
    for chunk in chunks {
        for piece in chunk["choices"].as_array().expect("choices") {
            if piece["delta"]["role"].is_string() {
                assert_eq!(piece["index"], opened, "choices open in ascending order");
                opened += 1;
            }
            assert!(piece["index"].as_u64().is_some_and(|index| index < opened), "a choice speaks before it opens");
            let choice = &mut choices[piece["index"].as_u64().expect("an index") as usize];
            assert!(choice["finish"].is_null(), "something follows the finish");
            let delta = &piece["delta"];
            append(&mut choice["content"], &delta["content"]);
            append(&mut choice["reasoning"], &delta["reasoning"]);
            assert_eq!(delta["reasoning"], delta["reasoning_content"]);
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                let index = call["index"].as_u64().expect("an index") as usize;
                if call["id"].is_string() {
                    assert_eq!(choice["calls"].as_array().map(Vec::len), Some(index), "calls are contiguous");
                    extend(
                        &mut choice["calls"],
                        &serde_json::json!([{"id": call["id"], "name": call["function"]["name"]}]),
                    );
                }
                append(&mut choice["calls"][index]["arguments"], &call["function"]["arguments"]);
            }
            extend(&mut choice["logprobs"], &piece["logprobs"]["content"]);
            extend(&mut choice["tokens"], &piece["token_ids"]);
            choice["finish"] = piece["finish_reason"].clone();
            choice["stop"] = piece["stop_reason"].clone();
        }
    }
    choices
}

/// View of a whole answer's choices.
fn viewed(answer: &Value, logprobs: bool) -> Vec<Value> {
    let view = |choice: &Value| {
        let message = &choice["message"];
        let calls: Vec<Value> = message["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|call| {
                serde_json::json!({"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]})
            })
            .collect();
        let mut view = serde_json::json!({"content": message["content"].as_str().unwrap_or_default(), "calls": calls});
        if message["reasoning"].is_string() {
            view["reasoning"] = message["reasoning"].clone();
        }
        if logprobs && choice["logprobs"]["content"].as_array().is_some_and(|list| !list.is_empty()) {
            view["logprobs"] = choice["logprobs"]["content"].clone();
        }
        if choice["token_ids"].as_array().is_some_and(|list| !list.is_empty()) {
            view["tokens"] = choice["token_ids"].clone();
        }
        view["finish"] = choice["finish_reason"].clone();
        view["stop"] = choice["stop_reason"].clone();
        view
    };
    answer["choices"].as_array().expect("choices").iter().map(view).collect()
}

/// Removes null keys, so that null and absent compare equal.
fn without_nulls(mut views: Vec<Value>) -> Vec<Value> {
    for view in &mut views {
        view.as_object_mut().expect("an object").retain(|_, value| !value.is_null());
    }
    views
}

proptest! {
    #[test]
    fn no_bytes_panic(body in prop::collection::vec(any::<u8>(), 0..200)) {
        decode_all(&body);
    }

    #[test]
    fn no_damage_to_a_good_body_panics(at: prop::sample::Index, length in 0_usize..8, new in prop::collection::vec(any::<u8>(), 0..8)) {
        for seed in [SEED, GUIDED, OTHERS] {
            let at = at.index(seed.len());
            let mut body = seed.as_bytes().to_vec();
            body.splice(at..(at + length).min(seed.len()), new.iter().copied());
            decode_all(&body);
            decode_all(&seed.as_bytes()[..at]);
        }
    }

    #[test]
    fn no_value_in_any_field_panics(
        field in "(messages|tools|tool_choice|stop|n|seed|logit_bias|prompt|stream_options|response_format|structured_outputs|guided_(json|choice|regex|grammar|whitespace_pattern)|structural_tag|grammar|functions|function_call|metadata|tokens|[a-z_]{1,12})",
        value in r#"(null|true|-?[0-9]{1,25}(\.[0-9]{1,3})?(e[0-9]{1,4})?|"[a-z\\n]{0,5}"|\[[0-9,"a\[\]{}:]{0,8}\]|\{("[a-z]{1,4}":[0-9]{1,3})?\})"#,
    ) {
        decode_all(format!(r#"{{"model":"m","messages":[{{"role":"user","content":"x"}}],"{field}":{value}}}"#).as_bytes());
        decode_all(format!(r#"{{"model":"m","prompt":"x","{field}":{value}}}"#).as_bytes());
    }

    #[test]
    fn a_stream_of_function_calls_put_together_is_the_whole_answer(events in answer()) {
        let meta = ChatMeta { calls: CallShape::Function, ..chat_meta(false, false) };
        let (mut encoder, mut collector) = (ChatEncoder::new(&meta), ChatCollector::new(meta));
        let mut sent = BytesMut::new();
        for event in &events {
            encoder.event(event, &mut sent);
            collector.event(event);
        }
        encoder.done(&mut sent);
        let mut calls = vec![Value::Null; CHOICES as usize];
        for piece in chunks(&sent, true).iter().flat_map(|chunk| chunk["choices"].as_array().expect("choices")) {
            let (call, said) = (&mut calls[piece["index"].as_u64().expect("an index") as usize], &piece["delta"]["function_call"]);
            if said["name"].is_string() {
                prop_assert!(call.is_null(), "a second call");
                *call = said.clone();
            } else if said.is_object() {
                append(&mut call["arguments"], &said["arguments"]);
            }
        }
        let answer: Value = serde_json::from_slice(&collector.finish().expect("complete")).expect("JSON");
        for (call, choice) in calls.iter().zip(answer["choices"].as_array().expect("choices")) {
            prop_assert_eq!(call, &choice["message"]["function_call"]);
            prop_assert!(choice["message"]["tool_calls"].is_null() && choice["finish_reason"] != "tool_calls");
        }
    }

    #[test]
    fn a_chat_stream_put_together_is_the_whole_answer(events in answer(), logprobs: bool, include_usage: bool) {
        let meta = chat_meta(logprobs, include_usage);
        let (mut encoder, mut collector) = (ChatEncoder::new(&meta), ChatCollector::new(meta));
        let mut sent = BytesMut::new();
        for event in &events {
            encoder.event(event, &mut sent);
            collector.event(event);
        }
        encoder.done(&mut sent);
        let chunks = chunks(&sent, true);
        for chunk in &chunks {
            prop_assert_eq!(chunk["id"].as_str(), Some("id"));
            prop_assert_eq!(chunk.get("usage").is_some(), include_usage);
        }
        let answer: Value = serde_json::from_slice(&collector.finish().expect("complete")).expect("JSON");
        if include_usage {
            prop_assert_eq!(&chunks.last().expect("a chunk")["usage"], &answer["usage"]);
        }
        prop_assert_eq!(without_nulls(joined(&chunks)), without_nulls(viewed(&answer, logprobs)));
    }

    #[test]
    fn any_events_at_all_make_json(events in prop::collection::vec(event(), 0..20), logprobs: bool) {
        let mut chat = ChatEncoder::new(&chat_meta(logprobs, true));
        let mut completion = CompletionEncoder::new(&completion_meta(logprobs));
        let (mut said, mut completed) = (BytesMut::new(), BytesMut::new());
        for event in &events {
            chat.event(event, &mut said);
            completion.event(event, &mut completed);
        }
        chat.done(&mut said);
        completion.done(&mut completed);
        prop_assert!(chunks(&said, false).last().expect("an error")["error"].is_object());
        prop_assert!(chunks(&completed, false).last().expect("an error")["error"].is_object());
    }

    #[test]
    fn a_completion_stream_put_together_is_the_whole_answer(events in answer(), logprobs: bool, echo in logprob(), prompt: String) {
        let meta = completion_meta(logprobs);
        let (mut encoder, mut collector) = (CompletionEncoder::new(&meta), CompletionCollector::new(meta));
        let prompt = ChatEvent::Prompt { choice: 0, text: prompt, logprobs: vec![echo], tokens: vec![1] };
        let mut sent = BytesMut::new();
        for event in std::iter::once(&prompt).chain(&events) {
            encoder.event(event, &mut sent);
            collector.event(event);
        }
        encoder.done(&mut sent);
        let answer: Value = serde_json::from_slice(&collector.finish().expect("complete")).expect("JSON");
        let mut choices = vec![serde_json::json!({"text": ""}); CHOICES as usize];
        for chunk in chunks(&sent, true) {
            for piece in chunk["choices"].as_array().expect("choices") {
                let choice = &mut choices[piece["index"].as_u64().expect("an index") as usize];
                append(&mut choice["text"], &piece["text"]);
                for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                    extend(&mut choice[list], &piece["logprobs"][list]);
                }
                choice["stop"] = piece["stop_reason"].clone();
            }
        }
        for (choice, whole) in choices.iter().zip(answer["choices"].as_array().expect("choices")) {
            prop_assert_eq!(&choice["text"], &whole["text"]);
            prop_assert_eq!(&choice["stop"], &whole["stop_reason"]);
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                prop_assert_eq!(&choice[list], &whole["logprobs"][list], "{}", list);
            }
        }
    }
}

/// Maker of a body of about that many bytes.
type Shape = fn(usize) -> String;

/// Processor time of this thread, which unlike the clock does not grow while other threads run.
fn processor_time() -> Duration {
    std::thread::yield_now(); // the kernel brings the figure up to date when a thread gives way
    let spent = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = spent.and_then(|text| text.split(' ').next()?.parse().ok());
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    nanoseconds.map_or_else(|| START.elapsed(), Duration::from_nanos)
}

/// The cost grows linearly with the size of a body: four times the body may take at most eight times as long (a square
/// takes sixteen). The best of several runs on each side, and several tries, because caches are shared with others.
#[test]
fn cost_is_linear_in_the_body() {
    let unit = 16 << 10;
    let shapes: [(&str, Shape); 6] = [
        ("one long string", |size| {
            format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(size))
        }),
        ("escapes", |size| {
            format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{}"}}]}}"#, "\\n".repeat(size / 2))
        }),
        ("an ignored array", |size| format!(r#"{{"model":"m","zz":[{}1]}}"#, "1,".repeat(size / 2))),
        ("an ignored object of one name", |size| {
            format!(r#"{{"model":"m","zz":{{{}"a":1}}}}"#, "\"a\":1,".repeat(size / 6))
        }),
        ("space", |size| format!(r#"{{"model":"m",{}"zz":1}}"#, " ".repeat(size))),
        ("nested arrays", |size| format!(r#"{{"model":"m","zz":[{}1]}}"#, "[[[[[[[]]]]]]],".repeat(size / 15))),
    ];
    let time = |body: &str| {
        let run = |_| {
            let start = processor_time();
            decode_all(body.as_bytes());
            processor_time().saturating_sub(start).max(Duration::from_micros(1))
        };
        (0..5).map(run).min().expect("five runs")
    };
    for (name, shape) in shapes {
        let (small, large) = (shape(unit), shape(4 * unit));
        let grows_slowly = |_| time(&large).as_secs_f64() < 8.0 * time(&small).as_secs_f64();
        assert!((0..6).any(grows_slowly), "{name}: four times the body took eight times as long");
    }
}

/// Reading stops at the bound: the bytes behind it (here no JSON at all) are never looked at.
#[test]
fn too_many_elements_are_refused_before_the_rest_is_read() {
    let turn = r#"{"role":"user","content":"x"},"#;
    let mut body = format!(r#"{{"model":"m","messages":[{}"#, turn.repeat(1_000_000)).into_bytes();
    body.extend(b"!!!");
    let error = decode_chat(&body, &Bounds::default()).expect_err("too many");
    assert_eq!(error.message, "messages: more than 10000 messages");

    let body = format!(r#"{{"model":"m","prompt":["x",{}!"#, "\"x\",".repeat(1_000_000));
    let error = decode_completion(body.as_bytes(), &Bounds::default()).expect_err("too many");
    assert_eq!(error.message, "prompt: more than 1024 prompts");
}
