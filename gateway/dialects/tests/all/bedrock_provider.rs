//! Bedrock as a provider: request bodies and decoded answers.

use crate::common;

use common::{check_golden, read_cut, shown};
use penstock_dialects::bedrock::{Codec, FrameFault, FrameReader};
use penstock_dialects::openai;
use penstock_types::request::{EmbedRequest, ImageSource, Part};
use penstock_types::{
    Bounds, ChatEvent, ChatRequest, FaultClass, FinishReason, Message, ProviderCodec, Request, Role, ToolCall, Usage,
};
use proptest::prelude::*;
use serde_json::{Value, json};

const CLAUDE: &str = "anthropic.claude-sonnet-4-5-20250929-v1:0";

fn chat(fields: &str) -> Request {
    let body = format!(r#"{{"model":"x","messages":[{{"role":"user","content":"hi"}}]{fields}}}"#);
    openai::chat(body.as_bytes(), &Bounds::default()).unwrap_or_else(|error| panic!("{error}: {body}")).request
}

fn said(messages: Vec<Message>) -> Request {
    Request::Chat(Box::new(ChatRequest::new("x".into(), messages)))
}

fn asked(request: &Request, model: &str) -> (String, Value) {
    let call = Codec.encode(request, model).unwrap_or_else(|error| panic!("{error}"));
    (call.path, serde_json::from_slice(&call.body).expect("JSON"))
}

#[track_caller]
fn check_asked(name: &str, request: &Request, model: &str) {
    let (path, body) = asked(request, model);
    check_golden(&format!("{name}.provider.json"), &format!("{path}\n{body:#}\n"));
}

const CONVERSATION: &str = r#"{"model":"x","stream":true,"messages":[
  {"role":"system","content":"Be brief."},
  {"role":"user","content":[{"type":"text","text":"See "},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]},
  {"role":"assistant","content":"","reasoning":"Hm.","tool_calls":[
    {"id":"call:1","type":"function","function":{"name":"weather","arguments":"{\"city\": \"x\"}"}},
    {"id":"c2","type":"function","function":{"name":"time","arguments":"{\"x\":"}}]},
  {"role":"tool","tool_call_id":"call:1","content":"rain"},
  {"role":"tool","tool_call_id":"c2","content":" "},
  {"role":"developer","content":"Be kind."},
  {"role":"user","content":"Well?"},
  {"role":"assistant","content":"Yes."},
  {"role":"user","content":"\n"}],
 "tools":[{"type":"function","function":{"name":"weather","description":"say","strict":true,"parameters":{"type":"object",
    "properties":{"city":{"type":"string"}}}}},{"type":"function","function":{"name":"time","description":""}}],
 "tool_choice":"required","max_tokens":7,"temperature":1.5,"top_p":0.9,"top_k":40,"stop":["END"],"seed":7,
 "response_format":{"type":"json_schema","json_schema":{"name":"s","description":"d","schema":{"type":"object"}}},"user":"u"}"#;

#[test]
fn a_conversation_is_asked_in_bedrocks_words() {
    let request = openai::chat(CONVERSATION.as_bytes(), &Bounds::default()).expect("good").request;
    check_asked("bedrock_conversation", &request, CLAUDE);
    check_asked("bedrock_smallest", &chat(""), "arn:aws:bedrock:us-east-1:1:inference-profile/us.amazon.nova-pro-v1:0");
}

#[test]
fn what_a_model_knows_besides_is_asked_in_its_own_words() {
    let more = |fields: &str, model: &str| {
        let (_, body) = asked(&chat(fields), model);
        (body["additionalModelRequestFields"].clone(), body["inferenceConfig"].clone())
    };
    let high = r#","reasoning_effort":"high","temperature":0.5,"top_k":5"#;
    let thinking = json!({"thinking": {"type": "enabled", "budget_tokens": 16384}});
    assert_eq!(more(high, CLAUDE), (thinking, json!({"maxTokens": 20480})));
    let low = json!({"thinking": {"type": "enabled", "budget_tokens": 1999}});
    assert_eq!(more(r#","reasoning_effort":"high","max_tokens":2000"#, CLAUDE), (low, json!({"maxTokens": 2000})));
    // No room for the smallest budget.
    assert_eq!(more(r#","reasoning_effort":"high","max_tokens":500"#, CLAUDE).0, Value::Null);
    assert_eq!(more(r#","reasoning_effort":"none","top_k":5"#, CLAUDE).0, json!({"top_k": 5}));
    assert_eq!(more(r#","top_k":5"#, "amazon.nova-lite-v1:0").0, json!({"inferenceConfig": {"topK": 5}}));
    let gpt = more(r#","reasoning_effort":"max""#, "openai.gpt-oss-120b-1:0").0;
    assert_eq!(gpt, json!({"reasoning_effort": "high"}));
    assert_eq!(more(r#","reasoning_effort":"low""#, "meta.llama3-70b").0, Value::Null);
}

#[test]
fn reasoning_goes_back_to_claude_with_its_signature() {
    let message = |signature: &str| Message {
        role: Role::Assistant,
        content: Some("a".into()),
        reasoning: Some("Hm.".into()),
        reasoning_signature: Some(signature.into()),
        ..Message::default()
    };
    let user = || Message { content: Some("hi".into()), ..Message::default() };
    let blocks = |signature: &str, model: &str| {
        let (_, body) = asked(&said(vec![user(), message(signature), user()]), model);
        body["messages"][1]["content"].clone()
    };
    let text = json!({"text": "a"});
    let thought = json!({"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "QUJD"}}});
    let redacted = json!({"reasoningContent": {"redactedContent": "REVG"}});
    assert_eq!(blocks("QUJD", CLAUDE), json!([thought, text]));
    assert_eq!(blocks("redacted_thinking:REVG", CLAUDE), json!([redacted, text]));
    let packed =
        r#"[{"type":"thinking","thinking":"Hm.","signature":"QUJD"},{"type":"redacted_thinking","data":"REVG"}]"#;
    assert_eq!(blocks(packed, CLAUDE), json!([thought, redacted, text]));
    // Signatures of another provider, and a signature sent to a model that would not take it.
    assert_eq!(blocks("gemini:QUJD", CLAUDE), json!([text]));
    assert_eq!(blocks("QUJD", "amazon.nova-pro-v1:0"), json!([text]));
}

#[test]
fn turns_alternate_and_begin_with_the_users() {
    let message = |role, text: &str| Message { role, content: Some(text.into()), ..Message::default() };
    let (_, body) =
        asked(&said(vec![message(Role::Assistant, "a"), message(Role::User, "b"), message(Role::User, "c")]), "m");
    let turn = |role: &str, texts: &[&str]| json!({"role": role, "content": texts.iter().map(|text| json!({"text": text})).collect::<Vec<_>>()});
    assert_eq!(
        body["messages"],
        json!([turn("user", &["(no content)"]), turn("assistant", &["a"]), turn("user", &["b", "c"])])
    );
}

#[test]
fn functions_that_a_conversation_calls_are_declared() {
    let call = ToolCall { id: "i".repeat(80), name: "f".into(), arguments: String::new(), signature: None };
    let assistant = Message { role: Role::Assistant, tool_calls: vec![call], ..Message::default() };
    let result = Message {
        role: Role::Tool,
        content: Some("x".into()),
        tool_call_id: Some("i".repeat(80)),
        tool_failed: true,
        ..Message::default()
    };
    let (_, body) =
        asked(&said(vec![Message { content: Some("hi".into()), ..Message::default() }, assistant, result]), "m");
    assert_eq!(body["toolConfig"]["tools"][0]["toolSpec"]["name"], "f");
    let (used, answered) =
        (&body["messages"][1]["content"][0]["toolUse"], &body["messages"][2]["content"][0]["toolResult"]);
    assert_eq!(used["toolUseId"], answered["toolUseId"]);
    assert_eq!(used["toolUseId"].as_str().map(str::len), Some(64));
    assert_eq!((&used["input"], &answered["status"]), (&json!({}), &json!("error")));
}

#[test]
fn what_bedrock_cannot_do_is_refused() {
    let tool = r#","tools":[{"type":"function","function":{"name":"f"}}]"#;
    for (fields, param) in [
        (r#","n":2"#.to_owned(), "n"),
        (r#","logprobs":true"#.to_owned(), "logprobs"),
        (r#","logit_bias":{"1":1}"#.to_owned(), "logit_bias"),
        (r#","min_tokens":1"#.to_owned(), "min_tokens"),
        (r#","top_k":3"#.to_owned(), "top_k"),
        (r#","response_format":{"type":"json_object"}"#.to_owned(), "response_format.type"),
        (format!(r#"{tool},"parallel_tool_calls":false"#), "parallel_tool_calls"),
    ] {
        assert_eq!(Codec.encode(&chat(&fields), "m").expect_err(&fields).param.as_deref(), Some(param));
    }
    let image = |source| {
        let parts = vec![Part::Image { source, detail: None }];
        Codec.encode(&said(vec![Message { parts, content: Some(String::new()), ..Message::default() }]), "m")
    };
    let data = |media_type: &str| ImageSource::Data { media_type: media_type.into(), base64: "AAAA".into() };
    assert!(image(data("image/webp")).is_ok());
    for source in [data("image/tiff"), ImageSource::Url("https://x/y.png".into())] {
        assert_eq!(image(source).expect_err("refused").param.as_deref(), Some("messages[0].content"));
    }
    let embed = EmbedRequest {
        model: "x".into(),
        inputs: vec![],
        dimensions: None,
        task: None,
        truncate: false,
        user: None,
        ignored: vec![],
    };
    assert!(Codec.encode(&Request::Embed(Box::new(embed)), "m").is_err());
}

/// A frame as AWS sends it: headers that are strings, a payload.
fn frame(headers: &[(&str, &str)], payload: &str) -> Vec<u8> {
    let mut coded = Vec::new();
    for (name, value) in headers {
        coded.push(name.len() as u8);
        coded.extend(name.as_bytes());
        coded.push(7);
        coded.extend((value.len() as u16).to_be_bytes());
        coded.extend(value.as_bytes());
    }
    let mut out = ((16 + coded.len() + payload.len()) as u32).to_be_bytes().to_vec();
    out.extend((coded.len() as u32).to_be_bytes());
    out.extend(crc32fast::hash(&out).to_be_bytes());
    out.extend(coded);
    out.extend(payload.as_bytes());
    out.extend(crc32fast::hash(&out).to_be_bytes());
    out
}

#[expect(clippy::needless_pass_by_value, reason = "reads as data")]
fn event(kind: &str, payload: Value) -> Vec<u8> {
    let headers = [(":event-type", kind), (":content-type", "application/json"), (":message-type", "event")];
    frame(&headers, &payload.to_string())
}

#[expect(clippy::needless_pass_by_value, reason = "reads as data")]
fn delta(block: u32, delta: Value) -> Vec<u8> {
    event("contentBlockDelta", json!({"contentBlockIndex": block, "delta": delta, "p": "abc"}))
}

fn start(block: u32, id: &str, name: &str) -> Vec<u8> {
    event(
        "contentBlockStart",
        json!({"contentBlockIndex": block, "start": {"toolUse": {"toolUseId": id, "name": name}}}),
    )
}

fn stop(block: u32) -> Vec<u8> {
    event("contentBlockStop", json!({"contentBlockIndex": block}))
}

fn end(reason: &str) -> Vec<u8> {
    event("messageStop", json!({"stopReason": reason}))
}

fn metadata() -> Vec<u8> {
    let usage = json!({"inputTokens": 7, "outputTokens": 5, "totalTokens": 17, "cacheReadInputTokens": 3, "cacheWriteInputTokens": 2});
    event("metadata", json!({"usage": usage, "metrics": {"latencyMs": 5}}))
}

#[test]
fn a_stream_becomes_events() {
    let stream = [
        event("messageStart", json!({"role": "assistant"})),
        delta(0, json!({"reasoningContent": {"text": "Hm."}})),
        delta(0, json!({"reasoningContent": {"signature": "QU"}})),
        delta(0, json!({"reasoningContent": {"signature": "JD"}})),
        stop(0),
        delta(1, json!({"reasoningContent": {"redactedContent": "REVG"}})),
        stop(1),
        delta(2, json!({"text": "Hi "})),
        delta(2, json!({"text": "\u{e4}"})),
        stop(2),
        start(3, "t1", "weather"),
        delta(3, json!({"toolUse": {"input": "{\"ci"}})),
        delta(3, json!({"toolUse": {"input": "ty\":1}"}})),
        stop(3),
        start(4, "t2", "time"),
        delta(4, json!({"toolUse": {"input": ""}})),
        stop(4),
        event("somethingNew", json!({"a": 1})),
        end("tool_use"),
        metadata(),
    ]
    .concat();
    let events = read_cut(&Codec, &chat(r#","stream":true"#), &stream).expect("good");
    check_golden("bedrock_provider.events", &shown(&events));
}

#[test]
fn a_whole_answer_becomes_events() {
    let content = json!([{"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "QUJD"}}},
        {"reasoningContent": {"redactedContent": "REVG"}}, {"text": "Hi"},
        {"toolUse": {"toolUseId": "t1", "name": "weather", "input": {"city": 1}}}, {"citationsContent": {"x": 1}}]);
    let whole = json!({"output": {"message": {"role": "assistant", "content": content}}, "stopReason": "tool_use",
        "usage": {"inputTokens": 7, "outputTokens": 5, "totalTokens": 12}, "metrics": {"latencyMs": 1}});
    let events = read_cut(&Codec, &chat(""), whole.to_string().as_bytes()).expect("good");
    check_golden("bedrock_provider_whole.events", &shown(&events));
}

#[test]
fn ends_are_known() {
    use FinishReason::*;
    for (word, reason) in [
        ("end_turn", Stop),
        ("stop_sequence", Stop),
        ("max_tokens", Length),
        ("model_context_window_exceeded", Length),
        ("content_filtered", ContentFilter),
        ("guardrail_intervened", ContentFilter),
        ("brand_new", Stop),
    ] {
        let events = read_cut(&Codec, &chat(""), &[end(word), metadata()].concat()).expect(word);
        assert_eq!(events[0], ChatEvent::Finish { choice: 0, reason, stop: None }, "{word}");
        let usage = Usage {
            prompt_tokens: 12,
            cached_tokens: 3,
            cache_write_tokens: 2,
            completion_tokens: 5,
            reasoning_tokens: 0,
        };
        assert_eq!(events[1], ChatEvent::Usage(usage));
    }
    // Without the counts the answer is still complete.
    assert_eq!(read_cut(&Codec, &chat(""), &end("end_turn")).map(|events| events.len()), Ok(1));
}

#[test]
fn what_is_no_answer_is_a_fault() {
    let class = |answer: &[u8]| read_cut(&Codec, &chat(""), answer).expect_err("a fault").class;
    let text = delta(0, json!({"text": "a"}));
    assert_eq!(class(b""), FaultClass::Truncated);
    assert_eq!(class(&text), FaultClass::Truncated);
    assert_eq!(class(&[text.clone(), end("end_turn")[..20].to_vec()].concat()), FaultClass::Truncated);
    assert_eq!(class(br#"{"output":{"message""#), FaultClass::Truncated);
    assert_eq!(class(br#"{"output":{}}"#), FaultClass::Garbled);
    assert_eq!(class(&end("malformed_tool_use")), FaultClass::Server);
    let mut damaged = text.clone();
    damaged[30] ^= 1;
    assert_eq!(class(&damaged), FaultClass::Garbled);
    let exception = |name: &str, message: &str| {
        let headers =
            [(":exception-type", name), (":content-type", "application/json"), (":message-type", "exception")];
        let answer = [text.clone(), frame(&headers, &json!({"message": message}).to_string())].concat();
        let fault = read_cut(&Codec, &chat(""), &answer).expect_err("a fault");
        assert_eq!((fault.code.as_deref(), fault.message.as_str()), (Some(name), message));
        fault.class
    };
    assert_eq!(exception("throttlingException", "slow"), FaultClass::RateLimited);
    assert_eq!(exception("modelStreamErrorException", "oh"), FaultClass::Server);
    assert_eq!(exception("internalServerException", "oh"), FaultClass::Server);
    assert_eq!(exception("serviceUnavailableException", "oh"), FaultClass::Overloaded);
    assert_eq!(exception("modelTimeoutException", "late"), FaultClass::Timeout);
    assert_eq!(exception("validationException", "bad"), FaultClass::Invalid);
    assert_eq!(exception("validationException", "Input is too long for requested model."), FaultClass::ContextLength);
    let headers = [(":message-type", "error"), (":error-code", "InternalError"), (":error-message", "oh")];
    assert_eq!(class(&frame(&headers, "")), FaultClass::Server);
}

#[test]
fn errors_have_a_class() {
    for (status, message, class) in [
        (
            400,
            "The model returned the following errors: prompt is too long: 9 tokens > 8 maximum",
            FaultClass::ContextLength,
        ),
        (400, "The provided model identifier is invalid.", FaultClass::NotFound),
        (400, "A conversation must alternate.", FaultClass::Invalid),
        (403, "The security token included in the request is invalid.", FaultClass::Unauthorized),
        (403, "You don't have access to the model with the specified model ID.", FaultClass::Forbidden),
        (404, "Could not resolve", FaultClass::NotFound),
        (408, "late", FaultClass::Timeout),
        (424, "The model failed.", FaultClass::Server),
        (429, "Too many tokens, please wait before trying again.", FaultClass::RateLimited),
        (500, "oh", FaultClass::Server),
        (503, "busy", FaultClass::Overloaded),
    ] {
        let fault = Codec.fault(status, json!({"message": message}).to_string().as_bytes());
        assert_eq!((fault.class, fault.message.as_str()), (class, message));
    }
    let typed = Codec.fault(400, br#"{"__type":"com.amazon.coral#ServiceQuotaExceededException","Message":"no"}"#);
    assert_eq!((typed.class, typed.message.as_str()), (FaultClass::Quota, "no"));
    assert_eq!(Codec.fault(502, b"<html>").class, FaultClass::Server);
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), status in 100..600_u16) {
        let mut decoder = Codec.decoder(&chat(""));
        let mut out = Vec::new();
        if decoder.push(&bytes, &mut out).is_ok() {
            _ = decoder.end(&mut out);
        }
        _ = Codec.fault(status, &bytes);
    }

    /// Frames with valid checksums, and with arbitrary headers and payload.
    #[test]
    fn no_frame_panics(headers in prop::collection::vec(any::<u8>(), 0..60), payload in "\\PC{0,60}", kind in 0..6_usize) {
        let kind = ["contentBlockDelta", "contentBlockStart", "contentBlockStop", "messageStop", "metadata", "x"][kind];
        let known = [(":event-type", kind), (":message-type", "event")];
        let mut out = Vec::new();
        _ = Codec.decoder(&chat("")).push(&frame(&known, &payload), &mut out);
        let mut bytes = ((16 + headers.len()) as u32).to_be_bytes().to_vec();
        bytes.extend((headers.len() as u32).to_be_bytes());
        bytes.extend(crc32fast::hash(&bytes).to_be_bytes());
        bytes.extend(&headers);
        bytes.extend(crc32fast::hash(&bytes).to_be_bytes());
        let mut seen = 0;
        let read = FrameReader::default().push(&bytes, |frame| {
            _ = frame.header(":event-type");
            seen += 1;
            Ok::<(), FrameFault>(())
        });
        prop_assert_eq!(read.is_ok(), seen == 1);
    }
}
