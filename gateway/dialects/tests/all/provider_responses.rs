//! Providers asked through the Responses API: request bodies, and answers decoded alike however they are cut.

use crate::common;

use common::{check_golden, read_cut, shown};
use penstock_dialects::openai::{ResponsesCodec, decode_chat};
use penstock_types::Bounds;
use penstock_types::{ChatEvent, FaultClass, ProviderCodec, ProviderFault, Request, ToolChoice};
use serde_json::{Value, json};

fn chat(fields: &str) -> Request {
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}]{fields}}}"#);
    Request::Chat(Box::new(decode_chat(body.as_bytes(), &Bounds::default()).expect("a good request")))
}

fn sent(request: &Request) -> Value {
    sent_by(ResponsesCodec::default(), request)
}

fn sent_by(codec: ResponsesCodec, request: &Request) -> Value {
    let call = codec.encode(request, "their-model").expect("can be said");
    assert_eq!(call.path, "/responses");
    serde_json::from_slice(&call.body).expect("JSON")
}

#[test]
fn requests_become_items() {
    let body = r#"{"model":"m","stream":true,"max_tokens":20,"temperature":0.7,"top_p":0.9,"user":"u","seed":4,"priority":2,
        "logprobs":true,"top_logprobs":3,"reasoning_effort":"max","parallel_tool_calls":false,
        "response_format":{"type":"json_schema","json_schema":{"name":"x","strict":true,"schema":{"type":"object"}}},
        "tools":[{"type":"function","function":{"name":"weather","description":"d","strict":true,"parameters":{"type":"object"}}},
            {"type":"function","function":{"name":"time"}}],
        "tool_choice":{"type":"function","function":{"name":"weather"}},
        "messages":[{"role":"system","content":"Be brief."},
            {"role":"user","name":"ann","content":[{"type":"text","text":"What is it?"},
                {"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA","detail":"low"}},
                {"type":"image_url","image_url":{"url":"https://h/i"}}]},
            {"role":"assistant","content":"Let me see.","reasoning":"Ask the tool.","tool_calls":[
                {"id":"call_1","type":"function","function":{"name":"weather","arguments":"{}"},
                    "extra_content":{"google":{"thought_signature":"c2ln"}}}]},
            {"role":"tool","tool_call_id":"call_1","content":"rain"},
            {"role":"assistant","content":null,"tool_calls":[{"id":"call_2","type":"function","function":{"name":"time","arguments":"{}"}}]},
            {"role":"tool","tool_call_id":"call_2","content":[{"type":"text","text":"noon"}]}]}"#;
    let mut request = decode_chat(body.as_bytes(), &Bounds::default()).expect("good");
    request.messages[2].reasoning_signature = Some("openai:ZW5j".into());
    let request = Request::Chat(Box::new(request));
    // OpenAI refuses Gemini's signature of a call.
    for (codec, golden) in [
        (ResponsesCodec::default(), "chat_every_field_responses.provider.json"),
        (ResponsesCodec::strict(), "chat_every_field_responses_strict.provider.json"),
    ] {
        let body = serde_json::to_string_pretty(&sent_by(codec, &request)).expect("JSON") + "\n";
        check_golden(golden, &body);
    }
    let smallest = json!({"model": "their-model", "store": false,
        "input": [{"type": "message", "role": "user", "content": "hi"}]});
    assert_eq!(sent(&chat("")), smallest);
    let tool = r#","tools":[{"type":"function","function":{"name":"f"}}]"#;
    let Request::Chat(mut chosen) = chat(tool) else { panic!("a chat") };
    for (choice, said) in [
        (ToolChoice::Auto, Value::Null),
        (ToolChoice::None, json!("none")),
        (ToolChoice::Required, json!("required")),
        (ToolChoice::Named("f".into()), json!({"type": "function", "name": "f"})),
    ] {
        chosen.tool_choice = choice;
        assert_eq!(sent(&Request::Chat(chosen.clone()))["tool_choice"], said);
    }
    assert_eq!(sent(&chat(r#","response_format":{"type":"json_object"}"#))["text"]["format"]["type"], "json_object");
}

#[test]
fn what_the_api_has_no_field_for_is_refused() {
    for (fields, param) in [
        (r#","n":2"#, "n"),
        (r#","stop":"x""#, "stop"),
        (r#","presence_penalty":1"#, "presence_penalty"),
        (r#","logit_bias":{"1":2}"#, "logit_bias"),
        (r#","top_k":4"#, "top_k"),
        (r#","prompt_logprobs":1"#, "prompt_logprobs"),
        (r#","truncate_prompt_tokens":-1"#, "truncate_prompt_tokens"),
        (r#","return_tokens_as_token_ids":true"#, "return_tokens_as_token_ids"),
        (r#","echo":true"#, "echo"),
        (r#","chat_template_kwargs":{"a":1}"#, "chat_template_kwargs"),
    ] {
        let error = ResponsesCodec::default().encode(&chat(fields), "m").expect_err(fields);
        assert_eq!(error.param.as_deref(), Some(param));
    }
}

#[track_caller]
fn events(answer: &str) -> Result<Vec<ChatEvent>, ProviderFault> {
    read_cut(&ResponsesCodec::default(), &chat(""), answer.as_bytes())
}

/// A stream as OpenAI sends it, with event lines.
fn stream(events: &[Value]) -> String {
    let line = |event: &Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().expect("a type"));
    events.iter().map(line).collect()
}

#[expect(clippy::needless_pass_by_value, reason = "reads as data")]
fn ended(status: &str, more: Value) -> Value {
    let mut response = json!({"id": "resp_1", "object": "response", "status": status, "error": null, "output": [],
        "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 1},
            "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 14}});
    for (key, value) in more.as_object().expect("fields") {
        response[key] = value.clone();
    }
    let kind = if status == "completed" { "response.completed" } else { "response.incomplete" };
    json!({"type": kind, "response": response})
}

fn items() -> Value {
    json!([
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "One."}, {"type": "summary_text", "text": "Two."}],
            "encrypted_content": "ZW5j"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [
            {"type": "output_text", "text": "Grüß dich", "annotations": [], "logprobs": [
                {"token": "Grüß dich", "logprob": -0.5, "bytes": [71], "top_logprobs": []}]},
            {"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{\"a\":1}"},
        {"type": "function_call", "id": "fc_2", "call_id": "call_2", "name": "g", "arguments": ""}])
}

#[test]
fn streams_of_much_and_of_little() {
    let [thought, search, message, call, other] = [0, 1, 2, 3, 4].map(|index| items()[index].clone());
    let at = |kind: &str, index: u64, more: Value| {
        let mut event = json!({"type": kind, "output_index": index, "sequence_number": 0, "item_id": "x"});
        for (key, value) in more.as_object().expect("fields") {
            event[key] = value.clone();
        }
        event
    };
    let told = [
        json!({"type": "response.created", "response": {"status": "in_progress", "output": []}}),
        json!({"type": "response.in_progress", "response": {"status": "in_progress", "output": []}}),
        at("response.output_item.added", 0, json!({"item": {"type": "reasoning", "id": "rs_1", "summary": []}})),
        at(
            "response.reasoning_summary_part.added",
            0,
            json!({"summary_index": 0, "part": {"type": "summary_text", "text": ""}}),
        ),
        at("response.reasoning_summary_text.delta", 0, json!({"summary_index": 0, "delta": "One."})),
        at(
            "response.reasoning_summary_part.added",
            0,
            json!({"summary_index": 1, "part": {"type": "summary_text", "text": ""}}),
        ),
        at("response.reasoning_summary_text.delta", 0, json!({"summary_index": 1, "delta": "Two."})),
        at("response.output_item.done", 0, json!({"item": thought})),
        at("response.output_item.done", 1, json!({"item": search})),
        at("response.output_item.added", 2, json!({"item": {"type": "message", "content": []}})),
        at("response.content_part.added", 2, json!({"content_index": 0, "part": {"type": "output_text", "text": ""}})),
        at("response.output_text.delta", 2, json!({"delta": "Grüß ", "logprobs": [], "obfuscation": "abc"})),
        at(
            "response.output_text.delta",
            2,
            json!({"delta": "dich", "logprobs": [{"token": "dich", "logprob": -0.5, "top_logprobs": []}]}),
        ),
        at("response.output_text.done", 2, json!({"text": "Grüß dich"})),
        at("response.refusal.delta", 2, json!({"delta": "No."})),
        at("response.output_item.done", 2, json!({"item": message})),
        at(
            "response.output_item.added",
            3,
            json!({"item": {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": ""}}),
        ),
        at("response.function_call_arguments.delta", 3, json!({"delta": "{\"a\""})),
        at("response.function_call_arguments.delta", 3, json!({"delta": ":1}"})),
        at("response.function_call_arguments.done", 3, json!({"arguments": "{\"a\":1}"})),
        at("response.output_item.done", 3, json!({"item": call})),
        at(
            "response.output_item.added",
            4,
            json!({"item": {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": ""}}),
        ),
        at("response.output_item.done", 4, json!({"item": other})),
        json!({"type": "response.a_new_kind", "delta": {"deep": []}}),
        ended("completed", json!({"output": items()})),
    ];
    let whole = ended("completed", json!({"output": items()}))["response"].to_string();
    let mut out = String::new();
    for (name, answer) in [
        ("everything in pieces", stream(&told)),
        ("nothing but the last event", stream(&told[told.len() - 1..])),
        ("a whole answer", whole),
        (
            "the end of the tokens",
            stream(&[
                told[11].clone(),
                ended("incomplete", json!({"incomplete_details": {"reason": "max_output_tokens"}})),
            ]),
        ),
        (
            "a filter",
            stream(&[
                told[11].clone(),
                ended("incomplete", json!({"incomplete_details": {"reason": "content_filter"}})),
            ]),
        ),
    ] {
        let events = events(&answer).unwrap_or_else(|fault| panic!("{name}: {fault:?}"));
        out.push_str(&format!("## {name}\n{}\n", shown(&events)));
    }
    check_golden("provider_responses.events", &out);
}

#[test]
fn broken_answers_are_faults() {
    let delta = json!({"type": "response.output_text.delta", "output_index": 0, "delta": "a"});
    let failed = |error: Value| {
        stream(&[delta.clone(), json!({"type": "response.failed", "response": {"status": "failed", "error": error}})])
    };
    for (answer, class) in [
        (String::new(), FaultClass::Truncated),
        (stream(std::slice::from_ref(&delta)), FaultClass::Truncated),
        (stream(std::slice::from_ref(&delta)) + "data: [DONE]\n\n", FaultClass::Truncated),
        (failed(json!({"code": "server_error", "message": "m"})), FaultClass::Server),
        (failed(json!({"code": "rate_limit_exceeded", "message": "m"})), FaultClass::RateLimited),
        (failed(Value::Null), FaultClass::Server),
        (
            stream(&[json!({"type": "error", "code": "context_length_exceeded", "message": "m", "param": null})]),
            FaultClass::ContextLength,
        ),
        (r#"{"object":"response","status":"in_progress","output":[]}"#.into(), FaultClass::Truncated),
        (r#"{"object":"response","status":"cancelled","output":[]}"#.into(), FaultClass::Truncated),
        (
            r#"{"object":"response","status":"failed","error":{"code":"invalid_prompt","message":"m"}}"#.into(),
            FaultClass::ContentPolicy,
        ),
        (r#"{"object":"response","#.into(), FaultClass::Truncated),
        (
            stream(&[
                json!({"type": "response.output_item.added", "output_index": 0, "item": {"type": "function_call"}}),
            ]),
            FaultClass::Garbled,
        ),
    ] {
        assert_eq!(events(&answer).map_err(|fault| fault.class), Err(class), "{answer}");
    }
}

#[test]
fn a_failed_response_has_used_what_it_says() {
    let failed = json!({"type": "response.failed", "response": {"status": "failed", "output": [],
        "error": {"code": "server_error", "message": "x"}, "usage": {"input_tokens": 9, "output_tokens": 5}}});
    let mut decoder = ResponsesCodec::default().decoder(&chat(r#","stream":true"#));
    let fault = decoder.push(stream(&[failed]).as_bytes(), &mut Vec::new()).expect_err("a fault");
    let used = decoder.usage().map(|usage| (usage.prompt_tokens, usage.completion_tokens));
    assert_eq!((fault.class, used), (FaultClass::Server, Some((9, 5))));
}
