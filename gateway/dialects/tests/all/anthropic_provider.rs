//! Anthropic as a provider: request bodies, decoded answers, classified errors.

use crate::common;

use common::check_golden;
use penstock_dialects::anthropic::{Codec, ThinkingStyle, decode_messages};
use penstock_dialects::openai::decode_chat;
use penstock_types::event::StopCause;
use penstock_types::{
    AnswerDecoder, Bounds, ChatEvent, ChatRequest, CompleteRequest, EmbedRequest, FaultClass, FinishReason, Prompt,
    ProviderCodec, ProviderFault, Request, ResponseFormat, SamplingParams, TokenNames, Usage,
};
use serde_json::{Value, json};

fn openai(body: &str) -> ChatRequest {
    decode_chat(body.as_bytes(), &Bounds::default()).unwrap_or_else(|error| panic!("{error}: {body}"))
}

/// A request of an OpenAI client with more fields.
fn with(fields: &str) -> ChatRequest {
    openai(&format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{fields}}}"#))
}

/// A model that takes a budget and every parameter.
const MODEL: &str = "claude-haiku-4-5";

fn encoded(codec: Codec, chat: ChatRequest) -> Value {
    encoded_for(codec, chat, MODEL)
}

fn encoded_for(codec: Codec, chat: ChatRequest, model: &str) -> Value {
    let call = codec.encode(&Request::Chat(Box::new(chat)), model).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(call.path, "/messages");
    serde_json::from_slice(&call.body).expect("a body is JSON")
}

fn body(chat: ChatRequest) -> Value {
    encoded(Codec::default(), chat)
}

#[track_caller]
fn check(name: &str, chat: ChatRequest) {
    let text = serde_json::to_string_pretty(&body(chat)).expect("JSON");
    check_golden(&format!("anthropic/{name}.asked.json"), &(text + "\n"));
}

#[test]
fn an_openai_conversation() {
    check(
        "openai_conversation",
        openai(
            r#"{"model":"m","stream":true,"max_completion_tokens":99,"temperature":1.5,"top_p":0.9,"top_k":40,"stop":["END"," \n"],"user":"u",
            "seed":7,"presence_penalty":1,"frequency_penalty":1,"min_p":0.1,
            "tools":[{"type":"function","function":{"name":"weather","description":"d","strict":true,"parameters":{"type":"object","properties":{}}}},
                {"type":"function","function":{"name":"now"}}],
            "tool_choice":{"type":"function","function":{"name":"now"}},"parallel_tool_calls":false,
            "messages":[{"role":"system","content":"Be brief."},{"role":"user","content":[{"type":"text","text":"Look:"},
                {"type":"image_url","image_url":{"url":"data:image/png;base64,aGk="}},{"type":"image_url","image_url":{"url":"https://e.x/a.png"}}]},
                {"role":"user","content":"Well?"},
                {"role":"assistant","content":null,"reasoning":"unsigned","tool_calls":[
                    {"id":"functions.weather:0","type":"function","function":{"name":"weather","arguments":"{\"city\": \"x\"}"}},
                    {"id":"call_2","type":"function","function":{"name":"now","arguments":""}}]},
                {"role":"tool","tool_call_id":"functions.weather:0","content":"rain"},
                {"role":"tool","tool_call_id":"call_2","content":""},
                {"role":"developer","content":"Be kind."},{"role":"user","content":" "},{"role":"assistant","content":"It  "}]}"#,
        ),
    );
}

#[test]
fn a_messages_request_comes_out_as_it_went_in() {
    let body_in = r#"{"model":"m","max_tokens":4096,"system":[{"type":"text","text":"Be brief."}],
        "thinking":{"type":"enabled","budget_tokens":2048},"metadata":{"user_id":"u"},"stop_sequences":["END"],
        "output_config":{"format":{"type":"json_schema","schema":{"type":"object","properties":{},"additionalProperties":false}}},"stream":true,
        "tools":[{"name":"f","description":"d","input_schema":{"type":"object","properties":{},"additionalProperties":false},"strict":true}],
        "tool_choice":{"type":"auto","disable_parallel_tool_use":true},
        "messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image","source":{"type":"base64","media_type":"image/png","data":"aGk="}}]},
            {"role":"assistant","content":[{"type":"redacted_thinking","data":"d"},{"type":"thinking","thinking":"t","signature":"s"},
                {"type":"text","text":"b"},{"type":"tool_use","id":"toolu_1","name":"f","input":{"x":[1,2.50]}}]},
            {"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_1","content":"r","is_error":true},{"type":"text","text":"c"}]}]}"#;
    let chat = decode_messages(body_in.as_bytes(), &Bounds::default()).expect("a request");
    let mut expected: Value = serde_json::from_str(body_in).expect("JSON");
    expected["model"] = MODEL.into();
    assert_eq!(body(chat), expected);
}

/// The API answers 400 to bounds in a schema that it holds an answer or a call to, and to an open object.
#[test]
fn a_schema_is_said_in_what_the_api_takes() {
    let schema = r#"{"type":"object","properties":{"n":{"type":"integer","minimum":1,"description":"Count"}}}"#;
    let function = |name: &str, schema: &str| {
        format!(r#"{{"type":"function","function":{{"name":"{name}","strict":true,"parameters":{schema}}}}}"#)
    };
    let open = r#"{"type":"object","properties":{"m":{"type":"object"}}}"#;
    let asked = body(with(&format!(
        r#""response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}},"tools":[{},{}]"#,
        function("bounded", schema),
        function("open", open)
    )));
    let held = serde_json::json!({
        "type": "object",
        "properties": {"n": {"type": "integer", "description": "Count\n\n{minimum: 1}"}},
        "additionalProperties": false,
    });
    assert_eq!(asked["output_config"]["format"]["schema"], held);
    assert_eq!((&asked["tools"][0]["input_schema"], &asked["tools"][0]["strict"]), (&held, &true.into()));
    let open: Value = serde_json::from_str(open).expect("JSON");
    assert_eq!((&asked["tools"][1]["input_schema"], &asked["tools"][1]["strict"]), (&open, &Value::Null));
}

#[test]
fn max_tokens_are_always_said() {
    assert_eq!(body(with(r#""seed":1"#))["max_tokens"], 4096);
    assert_eq!(body(with(r#""max_tokens":5"#))["max_tokens"], 5);
    let codec = Codec { max_tokens: 64_000, ..Codec::default() };
    assert_eq!(encoded(codec, with(r#""seed":1"#))["max_tokens"], 64_000);
}

#[test]
fn efforts_become_budgets() {
    for (effort, budget) in [("minimal", 1024), ("low", 2048), ("medium", 8192), ("high", 16_384), ("xhigh", 32_768)] {
        let asked = body(with(&format!(r#""reasoning_effort":"{effort}","temperature":0.2,"top_k":5"#)));
        assert_eq!(asked["thinking"], json!({"type": "enabled", "budget_tokens": budget}), "{effort}");
        assert_eq!((&asked["max_tokens"], &asked["temperature"]), (&json!(budget + 4096), &Value::Null));
        assert_eq!(asked["top_k"], Value::Null);
    }
    assert_eq!(body(with(r#""reasoning_effort":"none""#))["thinking"], json!({"type": "disabled"}));
    // The budget is a part of the limit, which stays the same.
    let tight = body(with(r#""reasoning_effort":"high","max_tokens":2000"#));
    assert_eq!((&tight["thinking"]["budget_tokens"], &tight["max_tokens"]), (&json!(1999), &json!(2000)));
    assert_eq!(body(with(r#""reasoning_effort":"high","max_tokens":1024"#))["thinking"], Value::Null);
    let adaptive = Codec { thinking: ThinkingStyle::Adaptive, ..Codec::default() };
    let asked = encoded(adaptive, with(r#""reasoning_effort":"xhigh""#));
    assert_eq!(
        (&asked["thinking"], &asked["output_config"]),
        (&json!({"type": "adaptive"}), &json!({"effort": "max"}))
    );
}

#[test]
fn newer_models_are_asked_as_they_want_it() {
    for (model, kind, sampled) in [
        ("claude-3-7-sonnet-20250219", "enabled", true),
        ("claude-opus-4-20250514", "enabled", true),
        ("claude-sonnet-4-6", "adaptive", true),
        ("claude-opus-4-7", "adaptive", false),
        ("claude-sonnet-5", "adaptive", false),
        ("glm-5", "enabled", true),
    ] {
        let asked = encoded_for(Codec::default(), with(r#""reasoning_effort":"low""#), model);
        assert_eq!(asked["thinking"]["type"], kind, "{model}");
        let asked = encoded_for(Codec::default(), with(r#""temperature":0.5,"top_k":3"#), model);
        assert_eq!((asked["temperature"] == 0.5, asked["top_k"] == 3), (sampled, sampled), "{model}");
    }
}

#[test]
fn thinking_gives_way_where_the_api_refuses_it() {
    let tool = r#""tools":[{"type":"function","function":{"name":"f"}}]"#;
    let forced = body(with(&format!(r#"{tool},"tool_choice":"required","reasoning_effort":"low""#)));
    assert_eq!((&forced["thinking"], &forced["tool_choice"]), (&Value::Null, &json!({"type": "any"})));
    let turn = |last: &str| {
        let call = r#"{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}"#;
        openai(&format!(
            r#"{{"model":"m",{tool},"reasoning_effort":"low","messages":[{{"role":"user","content":"a"}},
            {{"role":"assistant","tool_calls":[{call}]}},{{"role":"tool","tool_call_id":"1","content":"r"}}{last}]}}"#
        ))
    };
    assert_eq!(body(turn(""))["thinking"], Value::Null);
    let next = body(turn(r#",{"role":"assistant","content":"b"},{"role":"user","content":"c"}"#));
    assert_eq!(next["thinking"]["type"], "enabled");
}

#[test]
fn json_schemas_have_a_place() {
    let format = r#""response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"},"strict":true}}"#;
    assert_eq!(
        body(with(format))["output_config"],
        json!({"format": {"type": "json_schema", "schema": {"type": "object"}}})
    );
}

#[test]
fn one_of_temperature_and_top_p() {
    let asked = |fields: &str| {
        let asked = body(with(fields));
        (asked["temperature"].as_f64(), asked["top_p"].as_f64())
    };
    assert_eq!(asked(r#""temperature":0.7,"top_p":0.9"#), (Some(0.7), None));
    assert_eq!(asked(r#""top_p":0.9"#), (None, Some(0.9)));
    assert_eq!(asked(r#""temperature":2"#), (Some(1.0), None));
}

#[test]
fn what_has_no_place_is_refused() {
    let refused = |request: Request| Codec::default().encode(&request, "m").expect_err("refused").param;
    for (fields, param) in [
        (r#""n":2"#, "n"),
        (r#""logprobs":true"#, "logprobs"),
        (r#""prompt_logprobs":1"#, "prompt_logprobs"),
        (r#""return_token_ids":true"#, "return_token_ids"),
        (r#""truncate_prompt_tokens":5"#, "truncate_prompt_tokens"),
        (r#""echo":true"#, "echo"),
        (r#""logit_bias":{"7":1}"#, "logit_bias"),
        (r#""allowed_token_ids":[1]"#, "allowed_token_ids"),
        (r#""stop_token_ids":[1]"#, "stop_token_ids"),
        (r#""min_tokens":1"#, "min_tokens"),
        (r#""ignore_eos":true"#, "ignore_eos"),
        (r#""stop":"x","include_stop_str_in_output":true"#, "include_stop_str_in_output"),
        (r#""response_format":{"type":"json_object"}"#, "response_format.type"),
    ] {
        assert_eq!(refused(Request::Chat(Box::new(with(fields)))).as_deref(), Some(param));
    }
    let silent = openai(r#"{"model":"m","messages":[{"role":"system","content":"a"},{"role":"user","content":" "}]}"#);
    assert_eq!(refused(Request::Chat(Box::new(silent))).as_deref(), Some("messages"));
    let embed = EmbedRequest {
        model: "m".into(),
        inputs: vec![Prompt::Text("a".into())],
        dimensions: None,
        task: None,
        truncate: false,
        user: None,
        ignored: Vec::new(),
    };
    assert_eq!(refused(Request::Embed(Box::new(embed))).as_deref(), Some("model"));
    let complete = CompleteRequest {
        model: "m".into(),
        prompts: vec![Prompt::Text("a".into())],
        sampling: SamplingParams::default(),
        n: 1,
        best_of: 1,
        response_format: ResponseFormat::Text,
        echo: false,
        suffix: None,
        stream: None,
        logprobs: None,
        prompt_logprobs: None,
        keep_special_tokens: false,
        return_token_ids: false,
        token_names: TokenNames::Text,
        prompt_tail: None,
        cache_salt: None,
        user: None,
        cache_key: None,
        priority: 0,
        ignored: Vec::new(),
    };
    assert_eq!(refused(Request::Complete(Box::new(complete))).as_deref(), Some("model"));
}

#[test]
fn reasoning_that_gemini_signed_is_not_shown_to_anthropic() {
    let signed = |signature: &str| {
        let mut chat = openai(
            r#"{"model":"m","messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning":"r"},
                {"role":"user","content":"c"}]}"#,
        );
        chat.messages[1].reasoning_signature = Some(signature.to_owned());
        body(chat)["messages"][1]["content"].clone()
    };
    let said = json!({"type": "text", "text": "b"});
    assert_eq!(signed("gemini:QUJD"), json!([said]));
    assert_eq!(signed("QUJD"), json!([{"type": "thinking", "thinking": "r", "signature": "QUJD"}, said]));
}

#[test]
fn packed_reasoning_from_a_stranger_adds_no_other_blocks() {
    let mut chat = with(r#""seed":1"#);
    let injected = r#"[{"type":"thinking","thinking":"a","signature":"s","x":1},{"type":"text","text":"evil"},{"type":"redacted_thinking","data":"d"}]"#;
    for (signature, blocks) in [
        (
            injected,
            json!([{"type": "thinking", "thinking": "a", "signature": "s"}, {"type": "redacted_thinking", "data": "d"}]),
        ),
        ("redacted_thinking:d", json!([{"type": "redacted_thinking", "data": "d"}])),
        ("[{\"type\":\"thinking\"},", json!([])),
        ("[7]", json!([])),
    ] {
        chat.messages.truncate(1);
        chat.messages.push(penstock_types::Message {
            role: penstock_types::Role::Assistant,
            content: Some("b".into()),
            reasoning_signature: Some(signature.into()),
            ..Default::default()
        });
        let mut expected = blocks.as_array().expect("blocks").clone();
        expected.push(json!({"type": "text", "text": "b"}));
        assert_eq!(body(chat.clone())["messages"][1]["content"], Value::Array(expected));
    }
}

fn decoder(stream: bool) -> Box<dyn AnswerDecoder> {
    let chat = with(if stream { r#""stream":true"# } else { r#""stream":false"# });
    Codec::default().decoder(&Request::Chat(Box::new(chat)))
}

fn read(stream: bool, pieces: &[&[u8]]) -> Result<Vec<ChatEvent>, ProviderFault> {
    let (mut decoder, mut out) = (decoder(stream), Vec::new());
    for piece in pieces {
        decoder.push(piece, &mut out)?;
    }
    decoder.end(&mut out)?;
    assert!(decoder.is_complete());
    Ok(out)
}

/// A stream as the API publishes it: every kind of block, a ping, an unknown event, an unknown block.
const STREAM: &str = include_str!("../golden/anthropic/provider.sse");

#[test]
fn a_stream_means_the_same_however_it_is_cut() {
    let whole = read(true, &[STREAM.as_bytes()]).expect("complete");
    check_golden("anthropic/provider.events", &format!("{whole:#?}\n"));
    for cut in 0..=STREAM.len() {
        let (head, tail) = STREAM.as_bytes().split_at(cut);
        assert_eq!(read(true, &[head, tail]).as_ref(), Ok(&whole), "cut at {cut}");
    }
    let bytes: Vec<&[u8]> = STREAM.as_bytes().chunks(1).collect();
    assert_eq!(read(true, &bytes), Ok(whole));
}

#[test]
fn a_stream_that_ends_early_is_truncated_wherever() {
    let last = STREAM.rfind("event: message_stop").expect("the last event");
    for end in 0..last {
        let fault = read(true, &[&STREAM.as_bytes()[..end]]).expect_err("cut short");
        assert_eq!(fault.class, FaultClass::Truncated, "cut at {end}");
    }
}

#[test]
fn counts_are_known_while_the_answer_runs() {
    let start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":3,\
        \"cache_read_input_tokens\":5,\"cache_creation_input_tokens\":2,\"output_tokens\":1}}}\n\n";
    let (mut decoder, mut out) = (decoder(true), Vec::new());
    decoder.push(b"event: ping\ndata: {\"type\":\"ping\"}\n\n", &mut out).expect("good");
    assert_eq!(decoder.usage(), None);
    decoder.push(start.as_bytes(), &mut out).expect("good");
    let expected =
        Usage { prompt_tokens: 10, cached_tokens: 5, cache_write_tokens: 2, completion_tokens: 1, ..Usage::default() };
    assert_eq!((decoder.usage(), out.len()), (Some(expected), 0));
}

/// The content of a whole answer, as events of one piece each.
#[test]
fn a_whole_answer() {
    let body = json!({"id": "msg_1", "type": "message", "role": "assistant", "model": "c", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "d"},
        {"type": "text", "text": "a", "citations": null}, {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}},
        {"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1]}}, {"type": "tool_use", "id": "u", "name": "g", "input": {}}],
        "stop_reason": "tool_use", "stop_sequence": null,
        "usage": {"input_tokens": 5, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 2, "output_tokens": 9,
            "output_tokens_details": {"thinking_tokens": 4}}});
    let body = body.to_string();
    let start = |call, id: &str, name: &str| ChatEvent::ToolCallStart {
        choice: 0,
        call,
        id: id.into(),
        name: name.into(),
        signature: None,
    };
    let arguments = |call, json: &str| ChatEvent::ToolCallArguments { choice: 0, call, json: json.into() };
    let expected = vec![
        ChatEvent::Reasoning { choice: 0, text: "hm".into() },
        ChatEvent::ReasoningSignature { choice: 0, signature: "s".into() },
        ChatEvent::ReasoningSignature { choice: 0, signature: "redacted_thinking:d".into() },
        ChatEvent::Text { choice: 0, text: "a".into(), logprobs: Vec::new(), tokens: Vec::new() },
        start(0, "t", "f"),
        arguments(0, r#"{"a":[1]}"#),
        start(1, "u", "g"),
        arguments(1, "{}"),
        ChatEvent::Finish { choice: 0, reason: FinishReason::ToolCalls, stop: None },
        ChatEvent::Usage(Usage {
            prompt_tokens: 10,
            cached_tokens: 3,
            cache_write_tokens: 2,
            completion_tokens: 9,
            reasoning_tokens: 4,
        }),
    ];
    for cut in 0..body.len() {
        let (head, tail) = body.as_bytes().split_at(cut);
        assert_eq!(read(false, &[head, tail]).as_ref(), Ok(&expected));
        let fault = read(false, &[head]).expect_err("cut short");
        assert!(matches!(fault.class, FaultClass::Truncated | FaultClass::Garbled), "{fault:?}");
    }
}

#[test]
fn stop_reasons() {
    let ended = |reason: &str, sequence: &str| {
        let body = format!(
            r#"{{"type":"message","content":[],"stop_reason":"{reason}","stop_sequence":{sequence},"usage":{{"input_tokens":1,"output_tokens":1}}}}"#
        );
        match read(false, &[body.as_bytes()]).expect("complete").remove(0) {
            ChatEvent::Finish { reason, stop, .. } => (reason, stop),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(ended("end_turn", "null"), (FinishReason::Stop, None));
    assert_eq!(ended("stop_sequence", "\"E\""), (FinishReason::Stop, Some(StopCause::Text("E".into()))));
    assert_eq!(ended("max_tokens", "null"), (FinishReason::Length, None));
    assert_eq!(ended("model_context_window_exceeded", "null"), (FinishReason::Length, None));
    assert_eq!(ended("tool_use", "null"), (FinishReason::ToolCalls, None));
    assert_eq!(ended("refusal", "null"), (FinishReason::ContentFilter, None));
    assert_eq!(ended("pause_turn", "null"), (FinishReason::Stop, None));
    assert_eq!(ended("something_new", "null"), (FinishReason::Stop, None));
}

#[test]
fn errors_are_classified() {
    let class = |status: u16, kind: &str, message: &str| {
        let body = json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": "r"}).to_string();
        let fault = Codec::default().fault(status, body.as_bytes());
        assert_eq!((fault.message.as_str(), fault.code.as_deref()), (message, Some(kind)));
        fault.class
    };
    assert_eq!(class(400, "invalid_request_error", "max_tokens: required"), FaultClass::Invalid);
    let long = "prompt is too long: 201202 tokens > 200000 maximum";
    assert_eq!(class(400, "invalid_request_error", long), FaultClass::ContextLength);
    let both = "input length and `max_tokens` exceed context limit: 198000 + 8000 > 200000";
    assert_eq!(class(400, "invalid_request_error", both), FaultClass::ContextLength);
    let credit = "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade or purchase credits.";
    assert_eq!(class(400, "invalid_request_error", credit), FaultClass::Quota);
    let limit = "You have reached your specified API usage limits. You will regain access on 2026-04-01 at 00:00 UTC.";
    assert_eq!(class(400, "invalid_request_error", limit), FaultClass::Quota);
    let workspace = "You have reached your specified workspace API usage limits. You will regain access on 2026-04-01.";
    assert_eq!(class(400, "invalid_request_error", workspace), FaultClass::Quota);
    assert_eq!(class(400, "invalid_request_error", "This organization has been disabled."), FaultClass::Forbidden);
    // A request that is quoted does not pause a key.
    let quoted = "messages.0.role: unexpected value 'Your credit balance is too low'";
    assert_eq!(class(400, "invalid_request_error", quoted), FaultClass::Invalid);
    assert_eq!(class(401, "authentication_error", "x"), FaultClass::Unauthorized);
    assert_eq!(class(402, "billing_error", "x"), FaultClass::Quota);
    assert_eq!(class(403, "permission_error", "x"), FaultClass::Forbidden);
    assert_eq!(class(404, "not_found_error", "x"), FaultClass::NotFound);
    assert_eq!(class(413, "request_too_large", "x"), FaultClass::TooLarge);
    assert_eq!(class(429, "rate_limit_error", "x"), FaultClass::RateLimited);
    assert_eq!(class(500, "api_error", "x"), FaultClass::Server);
    assert_eq!(class(504, "timeout_error", "x"), FaultClass::Timeout);
    assert_eq!(class(529, "overloaded_error", "x"), FaultClass::Overloaded);
    let page = Codec::default().fault(502, b"<html>");
    assert_eq!((page.class, page.code), (FaultClass::Server, None));
}

#[test]
fn an_error_in_a_stream_ends_it() {
    let head = &STREAM[..STREAM.find("event: content_block_stop").expect("a block")];
    let error = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n";
    let fault = read(true, &[head.as_bytes(), error.as_bytes()]).expect_err("an error");
    assert_eq!((fault.class, fault.message.as_str()), (FaultClass::Overloaded, "Overloaded"));
}

#[test]
fn garbage_is_told_from_an_answer() {
    for body in [
        "event: x\ndata: {\n\n",
        "data: []\n\n",
        "data: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"tool_use\"}}\n\n",
    ] {
        assert_eq!(read(true, &[body.as_bytes()]).expect_err(body).class, FaultClass::Garbled, "{body}");
    }
    for body in ["[]", "{}", "<html>", "{\"type\":\"message\",\"content\":7}"] {
        let class = read(false, &[body.as_bytes()]).expect_err(body).class;
        assert!(matches!(class, FaultClass::Garbled | FaultClass::Truncated), "{body}");
    }
    assert_eq!(read(false, &[]).expect_err("nothing").class, FaultClass::Truncated);
}
