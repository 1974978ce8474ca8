//! Properties of the Anthropic dialect for any answer and any bytes.

use bytes::BytesMut;
use penstock_dialects::anthropic::{Codec, MessageCollector, MessageEncoder, decode_count_tokens, decode_messages};
use penstock_types::error_body::anthropic::error_body;
use penstock_types::error_shape::error_shape;
use penstock_types::{
    AnswerDecoder, Bounds, ChatEvent, ChatRequest, FinishReason, Message, ProviderCodec, Request, Role, StreamEncoder,
    StreamOptions, Usage, WholeCollector,
};
use proptest::prelude::*;
use serde_json::Value;

/// Content of an answer, independent of how it was cut into events.
#[derive(Debug, PartialEq)]
enum Block {
    Text(String),
    Thought(String, Option<String>),
    Call { id: String, name: String, json: Value, signature: Option<String> },
}

fn blocks(events: &[ChatEvent]) -> Vec<Block> {
    let mut out: Vec<Block> = Vec::new();
    let mut calls: Vec<(u32, usize, String)> = Vec::new();
    for event in events {
        match event {
            ChatEvent::Text { text, .. } if text.is_empty() => {}
            ChatEvent::Text { text, .. } => match out.last_mut() {
                Some(Block::Text(all)) => all.push_str(text),
                _ => out.push(Block::Text(text.clone())),
            },
            ChatEvent::Reasoning { text, .. } if text.is_empty() => {}
            ChatEvent::Reasoning { text, .. } => match out.last_mut() {
                Some(Block::Thought(all, None)) => all.push_str(text),
                _ => out.push(Block::Thought(text.clone(), None)),
            },
            ChatEvent::ReasoningSignature { signature, .. } => match out.last_mut() {
                Some(Block::Thought(_, place @ None)) if !signature.starts_with("redacted_thinking:") => {
                    *place = Some(signature.clone());
                }
                _ => out.push(Block::Thought(String::new(), Some(signature.clone()))),
            },
            ChatEvent::ToolCallStart { call, id, name, signature, .. } => {
                calls.push((*call, out.len(), String::new()));
                let (id, name, signature) = (id.clone(), name.clone(), signature.clone());
                out.push(Block::Call { id, name, json: Value::Null, signature });
            }
            ChatEvent::ToolCallArguments { call, json, .. } => {
                let call = calls.iter_mut().rev().find(|(index, _, _)| index == call).expect("a call");
                call.2.push_str(json);
            }
            _ => {}
        }
    }
    for (_, at, arguments) in calls {
        let arguments = if arguments.is_empty() { "{}" } else { &arguments };
        if let Block::Call { json, .. } = &mut out[at] {
            *json = serde_json::from_str(arguments).expect("arguments are JSON");
        }
    }
    out
}

/// A few events that belong together.
#[derive(Clone, Debug)]
enum Segment {
    Text(Vec<String>),
    Thought(Vec<String>, Option<String>),
    Redacted(String),
    /// Calls whose arguments come in pieces, in the order that the numbers give.
    Calls(Vec<(String, Option<String>)>, Vec<usize>),
}

fn segment() -> impl Strategy<Value = Segment> {
    let texts = || prop::collection::vec(any::<String>(), 1..4);
    let argument = prop_oneof![
        Just(String::new()),
        Just("{}".to_owned()),
        any::<String>().prop_map(|text| serde_json::json!({ "a": [text, {"b": "}\"{"}] }).to_string()),
    ];
    let call = (argument, prop::option::of("[a-z+/=]{1,5}"));
    prop_oneof![
        texts().prop_map(Segment::Text),
        (texts(), prop::option::of("[A-Za-z0-9+/]{1,8}"))
            .prop_map(|(texts, signature)| Segment::Thought(texts, signature)),
        "[A-Za-z0-9+/]{0,8}".prop_map(Segment::Redacted),
        (prop::collection::vec(call, 1..4), prop::collection::vec(0..4_usize, 0..12))
            .prop_map(|(calls, order)| Segment::Calls(calls, order)),
    ]
}

fn events(segments: &[Segment]) -> Vec<ChatEvent> {
    let (mut out, mut call) = (Vec::new(), 0);
    for segment in segments {
        match segment {
            Segment::Text(texts) => out.extend(texts.iter().map(|text| ChatEvent::Text {
                choice: 0,
                text: text.clone(),
                logprobs: Vec::new(),
                tokens: Vec::new(),
            })),
            Segment::Thought(texts, signature) => {
                out.extend(texts.iter().map(|text| ChatEvent::Reasoning { choice: 0, text: text.clone() }));
                let signature =
                    signature.clone().map(|signature| ChatEvent::ReasoningSignature { choice: 0, signature });
                out.extend(signature);
            }
            Segment::Redacted(data) => {
                let signature = format!("redacted_thinking:{data}");
                out.push(ChatEvent::ReasoningSignature { choice: 0, signature });
            }
            Segment::Calls(calls, order) => {
                // A call with another provider's signature gets a block of its own in front, which cannot be held, so
                // such calls are not interleaved here; no provider that has them interleaves them.
                let signed = calls.iter().any(|(_, signature)| signature.is_some());
                let mut rest: Vec<Vec<char>> = calls.iter().map(|(json, _)| json.chars().rev().collect()).collect();
                let take = |rest: &mut Vec<Vec<char>>, at: usize, count: usize, out: &mut Vec<ChatEvent>| {
                    let left = rest[at].len();
                    let json: String = rest[at].drain(left.saturating_sub(count)..).rev().collect();
                    out.push(ChatEvent::ToolCallArguments { choice: 0, call: call + at as u32, json });
                };
                for (at, (_, signature)) in calls.iter().enumerate() {
                    out.push(ChatEvent::ToolCallStart {
                        choice: 0,
                        call: call + at as u32,
                        id: format!("id_{}", call + at as u32),
                        name: format!("f\"{at}"),
                        signature: signature.clone(),
                    });
                    if signed {
                        take(&mut rest, at, usize::MAX, &mut out);
                    }
                }
                for at in order {
                    take(&mut rest, at % calls.len(), 3, &mut out);
                }
                for at in 0..calls.len() {
                    take(&mut rest, at, usize::MAX, &mut out);
                }
                call += calls.len() as u32;
            }
        }
    }
    out
}

fn request(stream: bool) -> Request {
    let message = Message { role: Role::User, content: Some("x".into()), ..Message::default() };
    let mut chat = ChatRequest::new("m".into(), vec![message]);
    chat.stream = stream.then(StreamOptions::default);
    Request::Chat(Box::new(chat))
}

fn decoded(decoder: &mut dyn AnswerDecoder, bytes: &[u8]) -> Vec<ChatEvent> {
    let mut out = Vec::new();
    decoder.push(bytes, &mut out).expect("well-formed");
    decoder.end(&mut out).expect("complete");
    out
}

/// Checks that every frame is an event with its name, and that blocks begin, change and end one after the other,
/// counted from 0.
fn check_frames(stream: &str) {
    let (mut next, mut open) = (0, None);
    for frame in stream.split_terminator("\n\n") {
        let (name, data) = frame.split_once('\n').expect("two lines");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        match name.strip_prefix("event: ").expect("a name") {
            "content_block_start" => {
                assert_eq!((open, data["index"].as_u64()), (None, Some(next)));
                open = Some(next);
                next += 1;
            }
            "content_block_delta" => assert_eq!(open, data["index"].as_u64()),
            "content_block_stop" => assert_eq!(open.take(), data["index"].as_u64()),
            "message_delta" | "message_stop" => assert_eq!(open, None),
            _ => {}
        }
    }
}

const SEED: &str = r#"{"model":"m","max_tokens":9000,"stream":true,"system":[{"type":"text","text":"x"}],"stop_sequences":["a"],
"thinking":{"type":"enabled","budget_tokens":1024},"tools":[{"name":"f","input_schema":{"a":[1,{}]}}],"tool_choice":{"type":"auto"},
"output_config":{"effort":"low","format":{"type":"json_schema","schema":{}}},"metadata":{"user_id":"v"},"temperature":1e-1,
"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":""}}]},
{"role":"assistant","content":[{"type":"thinking","thinking":"t","signature":"s"},{"type":"redacted_thinking","data":"d"},
{"type":"tool_use","id":"1","name":"f","input":{}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[
{"type":"text","text":"\u00e9\ud83d\ude00"}]}]}]}"#;

const ANSWER: &str = include_str!("../golden/anthropic/provider.sse");

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn an_answer_read_back_says_the_same(segments in prop::collection::vec(segment(), 0..6), counts in any::<[u16; 5]>()) {
        let [plain, cached, written, output, thinking] = counts.map(u64::from);
        let usage = Usage {
            prompt_tokens: plain + cached + written,
            cached_tokens: cached,
            cache_write_tokens: written,
            completion_tokens: output,
            reasoning_tokens: thinking,
        };
        let mut said = events(&segments);
        said.push(ChatEvent::Finish { choice: 0, reason: FinishReason::Length, stop: None });
        said.push(ChatEvent::Usage(usage));
        let (mut encoder, mut out) = (MessageEncoder::new("1", "m"), BytesMut::new());
        let mut collector = Box::new(MessageCollector::new("1", "m"));
        for event in &said {
            encoder.event(event, &mut out);
            collector.event(event);
        }
        encoder.done(&mut out);
        check_frames(std::str::from_utf8(&out).expect("UTF-8"));
        let streamed = decoded(Codec::default().decoder(&request(true)).as_mut(), &out);
        prop_assert_eq!(blocks(&streamed), blocks(&said));
        let body = collector.finish().expect("complete");
        let whole = decoded(Codec::default().decoder(&request(false)).as_mut(), &body);
        prop_assert_eq!(blocks(&whole), blocks(&said));
        for read in [streamed, whole] {
            prop_assert_eq!(&read[read.len() - 2..], &said[said.len() - 2..]);
        }
    }

    #[test]
    fn damaged_requests_are_decoded_or_refused(at in 0..SEED.len(), with in any::<[u8; 3]>(), drop in 0..40_usize) {
        let mut body = SEED.as_bytes().to_vec();
        let end = (at + drop).min(body.len());
        body.splice(at..end, with);
        let bounds = Bounds::default();
        for outcome in [decode_messages(&body, &bounds), decode_count_tokens(&body, &bounds)] {
            match outcome {
                Ok(chat) => {
                    serde_json::from_slice::<Value>(&body).expect("accepted, so it is JSON");
                    if let Ok(call) = Codec::default().encode(&Request::Chat(Box::new(chat)), "m") {
                        serde_json::from_slice::<Value>(&call.body).expect("what is asked is JSON");
                    }
                }
                Err(error) => {
                    let body = error_body(error_shape(error.kind), &error.message, "r");
                    serde_json::from_slice::<Value>(&body).expect("an error is JSON");
                }
            }
        }
    }

    #[test]
    fn damaged_answers_end_in_a_fault_or_an_answer(at in 0..ANSWER.len(), with in any::<[u8; 3]>(), drop in 0..40_usize) {
        let mut body = ANSWER.as_bytes().to_vec();
        let end = (at + drop).min(body.len());
        body.splice(at..end, with);
        for stream in [true, false] {
            let mut decoder = Codec::default().decoder(&request(stream));
            let mut out = Vec::new();
            let read = decoder.push(&body, &mut out).and_then(|()| decoder.end(&mut out));
            prop_assert_eq!(read.is_ok(), decoder.is_complete());
            prop_assert_eq!(read.is_ok(), matches!(out.last(), Some(ChatEvent::Usage(_))));
        }
        _ = Codec::default().fault(400, &body);
    }

    #[test]
    fn any_bytes_are_survived(body in prop::collection::vec(any::<u8>(), 0..200)) {
        _ = decode_messages(&body, &Bounds::default());
        let mut decoder = Codec::default().decoder(&request(true));
        let mut out = Vec::new();
        _ = decoder.push(&body, &mut out).and_then(|()| decoder.end(&mut out));
        _ = Codec::default().fault(500, &body);
    }
}
