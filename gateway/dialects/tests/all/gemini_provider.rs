//! Gemini as a provider: request bodies and decoded answers.

use crate::common;

use bytes::BytesMut;
use common::{check_golden, read_cut, shown};
use penstock_dialects::gemini::{Codec, ThinkingStyle, embed, generate};
use penstock_dialects::openai;
use penstock_types::codec::Framing;
use penstock_types::request::{EmbedRequest, Prompt};
use penstock_types::{
    AnswerMeta, Bounds, ChatEvent, ChatRequest, FaultClass, FinishReason, Message, ProviderCodec, ReasoningEffort,
    Request, Role, Usage,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn bounds() -> Bounds {
    Bounds::default()
}

/// A chat request of an OpenAI client.
fn chat(fields: &str) -> Request {
    let body = format!(r#"{{"model":"x","messages":[{{"role":"user","content":"hi"}}]{fields}}}"#);
    openai::chat(body.as_bytes(), &bounds()).unwrap_or_else(|error| panic!("{error}: {body}")).request
}

fn plain(n: u32, stream: bool) -> Request {
    let stream = if stream { r#","stream":true"# } else { "" };
    chat(&format!(r#","n":{n}{stream}"#))
}

fn asked(request: &Request, model: &str) -> (String, Value) {
    let call = Codec::default().encode(request, model).unwrap_or_else(|error| panic!("{error}"));
    (call.path, serde_json::from_slice(&call.body).expect("JSON"))
}

#[track_caller]
fn check_asked(name: &str, request: &Request, model: &str) {
    let (path, body) = asked(request, model);
    check_golden(&format!("{name}.provider.json"), &format!("{path}\n{body:#}\n"));
}

const CONVERSATION: &str = r#"{"model":"x","stream":true,"messages":[
  {"role":"system","content":"Be brief."},
  {"role":"user","content":[{"type":"text","text":"See "},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}},
    {"type":"image_url","image_url":{"url":"https://x/y.JPG?z"}}]},
  {"role":"assistant","content":"Asking.","reasoning":"Hm.","tool_calls":[
    {"id":"c1","type":"function","function":{"name":"weather","arguments":"{\"city\": \"x\"}"},"extra_content":{"google":{"thought_signature":"QUJD"}}},
    {"id":"c2","type":"function","function":{"name":"time","arguments":""}}]},
  {"role":"tool","tool_call_id":"c2","content":"{\"h\":7}"},
  {"role":"tool","tool_call_id":"c1","content":"rain"},
  {"role":"developer","content":"Be kind."},
  {"role":"user","content":"Well?"},
  {"role":"assistant","content":null,"tool_calls":[{"id":"c3","type":"function","function":{"name":"time","arguments":"{}"}}]},
  {"role":"tool","tool_call_id":"c3","content":""}],
 "tools":[{"type":"function","function":{"name":"weather","description":"say","strict":true,"parameters":{"type":"object",
    "properties":{"city":{"type":"string"}},"additionalProperties":false}}},{"type":"function","function":{"name":"time"}}],
 "tool_choice":{"type":"function","function":{"name":"time"}},"n":2,"max_tokens":7,"temperature":0.5,"top_p":0.9,"top_k":40,
 "presence_penalty":1,"frequency_penalty":-1,"stop":["END"],"seed":7,"logprobs":true,"top_logprobs":3,"reasoning_effort":"high",
 "response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{"type":"object"}}},"user":"u","cache_salt":"s"}"#;

#[test]
fn a_conversation_is_asked_in_geminis_words() {
    let request = openai::chat(CONVERSATION.as_bytes(), &bounds()).expect("good").request;
    check_asked("gemini_conversation", &request, "gemini-3-pro");
    check_asked("gemini_conversation_budget", &request, "models/gemini-2.5-pro");
    check_asked("gemini_smallest", &plain(1, false), "gemini-3-pro");
}

#[test]
fn what_gemini_itself_was_asked_comes_out_again() {
    let body = json!({
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}, {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]},
            {"role": "model", "parts": [{"text": "a", "thoughtSignature": "QUJD"},
                {"functionCall": {"id": "c", "name": "f", "args": {"x": [1, {"y": null}]}}, "thoughtSignature": "REVG"}]},
            {"role": "user", "parts": [{"functionResponse": {"id": "c", "name": "f", "response": {"z": 1}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "description": "d", "parametersJsonSchema": {"type": "object"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
        "generationConfig": {"temperature": 1.5, "topK": 3, "seed": -5, "candidateCount": 2, "maxOutputTokens": 9,
            "responseMimeType": "application/json", "responseJsonSchema": {"type": "array"}, "responseLogprobs": true,
            "thinkingConfig": {"thinkingLevel": "LOW", "includeThoughts": true}},
    });
    let text = body.to_string();
    let request = generate("m", Framing::Events, text.as_bytes(), &bounds()).expect("good").request;
    assert_eq!(asked(&request, "m"), ("/models/m:streamGenerateContent?alt=sse".to_owned(), body));
}

#[test]
fn the_path_names_the_model() {
    for (model, path) in [
        ("gemini-3-pro", "/models/gemini-3-pro:generateContent"),
        ("models/a", "/models/a:generateContent"),
        ("tunedModels/a", "/tunedModels/a:generateContent"),
        ("claude@1", "/models/claude@1:generateContent"),
        ("a b?c:d", "/models/a%20b%3Fc%3Ad:generateContent"),
    ] {
        assert_eq!(asked(&plain(1, false), model).0, path);
    }
}

#[test]
fn reasoning_is_a_budget_or_a_level() {
    let thinking = |effort, tokens, style| {
        let mut request =
            ChatRequest::new("x".into(), vec![Message { content: Some("hi".into()), ..Message::default() }]);
        (request.reasoning_effort, request.reasoning_tokens_max) = (effort, tokens);
        let codec = Codec { thinking: style, ..Codec::default() };
        let call = codec.encode(&Request::Chat(Box::new(request)), "m").expect("good");
        let body: Value = serde_json::from_slice(&call.body).expect("JSON");
        body["generationConfig"]["thinkingConfig"].clone()
    };
    use ThinkingStyle::{Budget, Level};
    assert_eq!(thinking(None, None, Level), Value::Null);
    for (effort, budget, level) in [
        (ReasoningEffort::Minimal, 512, "MINIMAL"),
        (ReasoningEffort::Low, 1024, "LOW"),
        (ReasoningEffort::Medium, 8192, "MEDIUM"),
        (ReasoningEffort::High, 24576, "HIGH"),
        (ReasoningEffort::Max, 24576, "HIGH"),
    ] {
        assert_eq!(thinking(Some(effort), None, Budget), json!({"thinkingBudget": budget, "includeThoughts": true}));
        assert_eq!(thinking(Some(effort), None, Level), json!({"thinkingLevel": level, "includeThoughts": true}));
    }
    for (effort, tokens) in
        [(Some(ReasoningEffort::None), None), (None, Some(0)), (Some(ReasoningEffort::High), Some(0))]
    {
        assert_eq!(thinking(effort, tokens, Budget), json!({"thinkingBudget": 0}));
        assert_eq!(thinking(effort, tokens, Level), json!({"thinkingLevel": "MINIMAL"}));
    }
    assert_eq!(thinking(None, Some(777), Budget)["thinkingBudget"], 777);
    assert_eq!(thinking(None, Some(777), Level)["thinkingLevel"], "LOW");
}

#[test]
fn what_gemini_cannot_do_is_refused() {
    let tool = r#","tools":[{"type":"function","function":{"name":"f"}}]"#;
    for (fields, param) in [
        (r#","logit_bias":{"1":1}"#.to_owned(), "logit_bias"),
        (r#","stop":["1","2","3","4","5","6"]"#.to_owned(), "stop"),
        (r#","min_tokens":1"#.to_owned(), "min_tokens"),
        (r#","stop_token_ids":[1]"#.to_owned(), "stop_token_ids"),
        (r#","allowed_token_ids":[1]"#.to_owned(), "allowed_token_ids"),
        (r#","ignore_eos":true"#.to_owned(), "ignore_eos"),
        (r#","return_token_ids":true"#.to_owned(), "return_token_ids"),
        (r#","truncate_prompt_tokens":5"#.to_owned(), "truncate_prompt_tokens"),
        (r#","echo":true"#.to_owned(), "echo"),
        (r#","prompt_logprobs":1"#.to_owned(), "prompt_logprobs"),
        (format!(r#"{tool},"parallel_tool_calls":false"#), "parallel_tool_calls"),
    ] {
        let error = Codec::default().encode(&chat(&fields), "m").expect_err(&fields);
        assert_eq!(error.param.as_deref(), Some(param));
    }
    // Without tools there is nothing to refuse.
    assert!(Codec::default().encode(&chat(r#","parallel_tool_calls":false"#), "m").is_ok());
    let said = |messages: Vec<Message>| {
        let request = Request::Chat(Box::new(ChatRequest::new("x".into(), messages)));
        Codec::default().encode(&request, "m").map(|_| ()).map_err(|error| error.param.unwrap_or_default())
    };
    let message = |role| Message { role, content: Some("x".into()), ..Message::default() };
    assert_eq!(said(vec![message(Role::System)]), Err("messages".into()));
    let orphan = Message { tool_call_id: Some("c".into()), ..message(Role::Tool) };
    assert_eq!(said(vec![message(Role::User), orphan]), Err("messages[1].tool_call_id".into()));
}

fn embedding(inputs: Vec<Prompt>) -> Request {
    let (dimensions, task) = (Some(8), Some("X".to_owned()));
    Request::Embed(Box::new(EmbedRequest {
        model: "x".into(),
        inputs,
        dimensions,
        task,
        truncate: false,
        user: None,
        ignored: Vec::new(),
    }))
}

#[test]
fn vectors_both_ways() {
    let request = embedding(vec![Prompt::Text("a".into()), Prompt::Text("b".into())]);
    check_asked("gemini_embed", &request, "text-embedding");
    let good = br#"{"embeddings":[{"values":[0.5,-1]},{"values":[1e-3]}],"usageMetadata":{"promptTokenCount":2}}"#;
    let events = read_cut(&Codec::default(), &request, good).expect("good");
    assert_eq!(
        events,
        [
            ChatEvent::Vector { index: 0, values: vec![0.5, -1.0] },
            ChatEvent::Vector { index: 1, values: vec![1e-3] },
            ChatEvent::Usage(Usage { prompt_tokens: 2, ..Usage::default() }),
        ]
    );
    for bad in
        [&br#"{"embeddings":[{"values":[1]}]}"#[..], br#"{"embeddings":[{"values":["a"]},{"values":[1]}]}"#, b"{}"]
    {
        assert_eq!(read_cut(&Codec::default(), &request, bad).expect_err("bad").class, FaultClass::Garbled);
    }
    assert!(Codec::default().encode(&embedding(vec![Prompt::Tokens(vec![1])]), "m").is_err());
}

/// A stream as Google frames it.
fn sse(chunks: &[Value]) -> Vec<u8> {
    chunks.iter().flat_map(|chunk| format!("data: {chunk}\r\n\r\n").into_bytes()).collect()
}

#[expect(clippy::needless_pass_by_value, reason = "reads as data")]
fn candidate(parts: Value, more: Value) -> Value {
    let mut candidate = json!({"content": {"parts": parts, "role": "model"}, "index": 0});
    more.as_object().expect("fields").iter().for_each(|(name, value)| candidate[name] = value.clone());
    json!({"candidates": [candidate], "modelVersion": "m", "responseId": "r",
        "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 3, "totalTokenCount": 15, "thoughtsTokenCount": 5,
            "cachedContentTokenCount": 2, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 7}]}})
}

#[test]
fn an_answer_becomes_events() {
    let chunks = [
        candidate(json!([{"text": "Let me.", "thought": true}]), json!({})),
        candidate(json!([{"text": "Hi \u{e4}"}, {"text": "", "thoughtSignature": "QUJD"}]), json!({})),
        candidate(
            json!([{"functionCall": {"name": "weather", "args": {"city": "x"}}, "thoughtSignature": "REVG"},
                {"functionCall": {"id": "c2", "name": "time"}}, {"executableCode": {"code": "1"}}]),
            json!({}),
        ),
        candidate(json!([{"text": ""}]), json!({"finishReason": "STOP", "safetyRatings": []})),
    ];
    let (codec, request) = (Codec::default(), plain(1, true));
    let events = read_cut(&codec, &request, &sse(&chunks)).expect("good");
    check_golden("gemini_provider.events", &shown(&events));
    // Without `alt=sse` the same comes as one array.
    let array = Value::from(chunks.to_vec()).to_string();
    assert_eq!(read_cut(&codec, &request, array.as_bytes()), Ok(events));
}

#[test]
fn counts_are_known_while_the_answer_runs() {
    let (mut decoder, mut out) = (Codec::default().decoder(&plain(1, true)), Vec::new());
    assert_eq!(decoder.usage(), None);
    decoder.push(&sse(&[candidate(json!([{"text": "Hi"}]), json!({}))]), &mut out).expect("good");
    let usage = decoder.usage().expect("counts");
    assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens), (7, 2, 8));
}

#[test]
fn a_whole_answer_becomes_events() {
    let logprobs = json!({"topCandidates": [{"candidates": [{"token": "a", "tokenId": 5, "logProbability": -0.5},
        {"token": "b", "tokenId": 6, "logProbability": -1}]}], "chosenCandidates": [{"token": "a", "tokenId": 5, "logProbability": -0.5}]});
    let mut whole =
        candidate(json!([{"text": "a"}]), json!({"finishReason": "MAX_TOKENS", "logprobsResult": logprobs}));
    let second = json!({"index": 1, "content": {"role": "model"}, "finishReason": "SAFETY"});
    whole["candidates"].as_array_mut().expect("list").push(second);
    let events = read_cut(&Codec::default(), &plain(2, false), whole.to_string().as_bytes()).expect("good");
    check_golden("gemini_provider_whole.events", &shown(&events));
}

#[test]
fn what_is_no_answer_is_a_fault() {
    let (codec, request) = (Codec::default(), plain(1, true));
    let class = |answer: &[u8]| read_cut(&codec, &request, answer).expect_err("a fault").class;
    assert_eq!(class(b""), FaultClass::Truncated);
    assert_eq!(class(&sse(&[candidate(json!([{"text": "a"}]), json!({}))])), FaultClass::Truncated);
    let good = sse(&[candidate(json!([]), json!({"finishReason": "STOP"}))]);
    assert!(read_cut(&codec, &request, &good).is_ok());
    assert_eq!(class(&good[..good.len() - 3]), FaultClass::Truncated);
    assert_eq!(class(br#"{"promptFeedback":{"blockReason":"PROHIBITED_CONTENT"}}"#), FaultClass::ContentPolicy);
    assert_eq!(class(&sse(&[json!({"promptFeedback": {"blockReason": "SAFETY"}})])), FaultClass::ContentPolicy);
    let error = json!({"error": {"code": 503, "message": "The model is overloaded.", "status": "UNAVAILABLE"}});
    assert_eq!(class(&sse(&[candidate(json!([{"text": "a"}]), json!({})), error.clone()])), FaultClass::Overloaded);
    assert_eq!(class(Value::from(vec![error]).to_string().as_bytes()), FaultClass::Overloaded);
    assert_eq!(class(b"data: nonsense\n\n"), FaultClass::Garbled);
    let malformed =
        candidate(json!([]), json!({"finishReason": "MALFORMED_FUNCTION_CALL", "finishMessage": "print(x)"}));
    let fault = read_cut(&codec, &request, &sse(&[malformed])).expect_err("a fault");
    assert_eq!((fault.class, fault.code.as_deref()), (FaultClass::Server, Some("MALFORMED_FUNCTION_CALL")));
    for word in ["RECITATION", "PROHIBITED_CONTENT", "SPII", "BLOCKLIST", "LANGUAGE", "MODEL_ARMOR"] {
        let events =
            read_cut(&codec, &request, &sse(&[candidate(json!([]), json!({"finishReason": word}))])).expect(word);
        let finish = ChatEvent::Finish { choice: 0, reason: FinishReason::ContentFilter, stop: None };
        assert_eq!(events[0], finish);
    }
}

#[test]
fn errors_have_a_class() {
    let said = |status: u16, word: &str, message: &str, details: Value| {
        let body = json!({"error": {"code": status, "message": message, "status": word, "details": details}});
        Codec::default().fault(status, body.to_string().as_bytes())
    };
    let long = "The input token count (1200293) exceeds the maximum number of tokens allowed (1048576).";
    let reason = json!([{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}]);
    for (status, word, message, details, class) in [
        (400, "INVALID_ARGUMENT", long, json!([]), FaultClass::ContextLength),
        (400, "INVALID_ARGUMENT", "API key not valid. Please pass a valid API key.", reason, FaultClass::Unauthorized),
        (400, "INVALID_ARGUMENT", "Please use a valid role: user, model.", json!([]), FaultClass::Invalid),
        (
            400,
            "INVALID_ARGUMENT",
            "Request payload size exceeds the limit: 20971520 bytes.",
            json!([]),
            FaultClass::TooLarge,
        ),
        (400, "FAILED_PRECONDITION", "User location is not supported.", json!([]), FaultClass::Forbidden),
        (401, "UNAUTHENTICATED", "no", json!([]), FaultClass::Unauthorized),
        (403, "PERMISSION_DENIED", "no", json!([]), FaultClass::Forbidden),
        (404, "NOT_FOUND", "models/x is not found", json!([]), FaultClass::NotFound),
        (429, "RESOURCE_EXHAUSTED", "You exceeded your current quota.", json!([]), FaultClass::RateLimited),
        (500, "INTERNAL", "oh", json!([]), FaultClass::Server),
        (503, "UNAVAILABLE", "The model is overloaded.", json!([]), FaultClass::Overloaded),
        (504, "DEADLINE_EXCEEDED", "late", json!([]), FaultClass::Timeout),
    ] {
        let fault = said(status, word, message, details);
        assert_eq!((fault.class, fault.message.as_str(), fault.code.as_deref()), (class, message, Some(word)));
    }
    // Streams are refused with an array.
    let body = br#"[{"error":{"code":429,"message":"slow","status":"RESOURCE_EXHAUSTED"}}]"#;
    assert_eq!(Codec::default().fault(429, body).class, FaultClass::RateLimited);
    assert_eq!(Codec::default().fault(502, b"<html>").class, FaultClass::Server);
}

/// Content of an answer, independent of how its events are cut: per choice thoughts, text, calls, signatures and the
/// end.
#[derive(Debug, Default, PartialEq)]
struct Told {
    thoughts: String,
    text: String,
    signatures: Vec<String>,
    calls: Vec<(String, String, Option<String>, Value)>,
    finish: Option<FinishReason>,
}

fn told(events: &[ChatEvent], n: usize) -> (Vec<Told>, Option<Usage>) {
    let mut all: Vec<Told> = (0..n).map(|_| Told::default()).collect();
    let mut arguments: Vec<Vec<String>> = vec![Vec::new(); n];
    let mut counted = None;
    for event in events {
        match event {
            ChatEvent::Text { choice, text, .. } => all[*choice as usize].text.push_str(text),
            ChatEvent::Reasoning { choice, text } => all[*choice as usize].thoughts.push_str(text),
            ChatEvent::ReasoningSignature { choice, signature } => {
                all[*choice as usize].signatures.push(signature.clone())
            }
            ChatEvent::ToolCallStart { choice, id, name, signature, .. } => {
                all[*choice as usize].calls.push((id.clone(), name.clone(), signature.clone(), Value::Null));
                arguments[*choice as usize].push(String::new());
            }
            ChatEvent::ToolCallArguments { choice, call, json } => {
                arguments[*choice as usize][*call as usize].push_str(json)
            }
            ChatEvent::Finish { choice, reason, .. } => all[*choice as usize].finish = Some(*reason),
            ChatEvent::Usage(usage) => counted = Some(*usage),
            _ => {}
        }
    }
    for (told, arguments) in all.iter_mut().zip(arguments) {
        for (call, text) in told.calls.iter_mut().zip(arguments) {
            call.3 = serde_json::from_str(if text.is_empty() { "{}" } else { &text }).expect("arguments");
        }
    }
    (all, counted)
}

/// An answer of two choices.
fn answer() -> impl Strategy<Value = Vec<ChatEvent>> {
    let event = prop_oneof![
        4 => (0..2_u32, any::<String>())
            .prop_map(|(choice, text)| ChatEvent::Text { choice, text, logprobs: Vec::new(), tokens: Vec::new() }),
        2 => (0..2_u32, any::<String>()).prop_map(|(choice, text)| ChatEvent::Reasoning { choice, text }),
        1 => (0..2_u32, "[A-Z]{4}")
            .prop_map(|(choice, text)| ChatEvent::ReasoningSignature { choice, signature: format!("gemini:{text}") }),
        2 => (0..2_u32, "[a-z]{1,4}", "[a-z_]{1,4}", prop::option::of(Just("QUJD".to_owned())))
            .prop_map(|(choice, id, name, signature)| ChatEvent::ToolCallStart { choice, call: 0, id, name, signature }),
    ];
    let texts = prop::collection::vec(any::<String>(), 8);
    (prop::collection::vec(event, 0..24), texts, 1..1000_u64).prop_map(|(events, texts, tokens)| {
        let (mut out, mut calls) = (Vec::new(), [0; 2]);
        for event in events {
            let ChatEvent::ToolCallStart { choice, id, name, signature, .. } = event else {
                out.push(event);
                continue;
            };
            let call = calls[choice as usize];
            calls[choice as usize] += 1;
            out.push(ChatEvent::ToolCallStart { choice, call, id, name, signature });
            let text = json!({"x": texts[call as usize % texts.len()]}).to_string();
            let (one, two) = text.split_at(2);
            let piece = |json: &str| ChatEvent::ToolCallArguments { choice, call, json: json.to_owned() };
            out.extend([piece(one), piece(two)]);
        }
        for (choice, calls) in (0..).zip(calls) {
            let reason = if calls > 0 { FinishReason::ToolCalls } else { FinishReason::Stop };
            out.push(ChatEvent::Finish { choice, reason, stop: None });
        }
        let usage =
            Usage { prompt_tokens: 3, completion_tokens: tokens, reasoning_tokens: tokens / 2, ..Usage::default() };
        out.push(ChatEvent::Usage(usage));
        out
    })
}

proptest! {
    #[test]
    fn an_answer_survives_our_stream_and_our_decoder(events in answer(), array: bool, cut in any::<prop::sample::Index>()) {
        let framing = if array { Framing::Array } else { Framing::Events };
        let body = br#"{"contents":[{"parts":[{"text":"hi"}]}],"generationConfig":{"candidateCount":2,"thinkingConfig":{"includeThoughts":true}}}"#;
        let decoded = generate("m", framing, body, &bounds()).expect("good");
        let meta = AnswerMeta::new("r".into(), 1);
        let (mut encoder, mut stream) = (decoded.form.stream(&meta), BytesMut::new());
        let mut collector = decoded.form.whole(&meta);
        for event in &events {
            encoder.event(event, &mut stream);
            collector.event(event);
        }
        encoder.done(&mut stream);
        let whole = collector.finish().expect("whole");
        for bytes in [&stream[..], &whole] {
            let mut decoder = Codec::default().decoder(&decoded.request);
            let mut read = Vec::new();
            let (one, two) = bytes.split_at(cut.index(bytes.len()));
            decoder.push(one, &mut read).expect("good");
            decoder.push(two, &mut read).expect("good");
            decoder.end(&mut read).expect("good");
            prop_assert_eq!(told(&read, 2), told(&events, 2));
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), status in 100..600_u16) {
        let request = plain(1, true);
        let mut decoder = Codec::default().decoder(&request);
        let mut out = Vec::new();
        if decoder.push(&bytes, &mut out).is_ok() {
            _ = decoder.end(&mut out);
        }
        _ = Codec::default().fault(status, &bytes);
        _ = generate("m", Framing::Whole, &bytes, &bounds());
        _ = embed("m", true, &bytes, &bounds());
    }

    #[test]
    fn no_change_of_a_chunk_panics(at in any::<prop::sample::Index>(), byte: u8) {
        let parts = json!([{"text": "a", "thought": true}, {"functionCall": {"name": "f", "args": {"x": 1}}, "thoughtSignature": "QQ=="}]);
        let mut bytes = sse(&[candidate(parts, json!({"finishReason": "STOP"}))]);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let mut decoder = Codec::default().decoder(&plain(1, true));
        let mut out = Vec::new();
        if decoder.push(&bytes, &mut out).is_ok() {
            _ = decoder.end(&mut out);
        }
    }
}
