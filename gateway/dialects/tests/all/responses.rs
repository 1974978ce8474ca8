//! The Responses API: decoded requests and encoded answers.

use crate::common;

use bytes::BytesMut;
use common::check_golden;
use penstock_dialects::openai::{ResponsesRequest, responses};
use penstock_types::{
    AnswerMeta, ChatEvent, ChatRequest, FinishReason, Request, Role, TokenLogprob, TokenPlace, ToolChoice, Usage,
};
use penstock_types::{Bounds, error_body::openai::refusal, error_shape};
use serde_json::{Value, json};

fn decoded(body: &str) -> ChatRequest {
    let decoded = responses(body.as_bytes(), &Bounds::default()).unwrap_or_else(|error| panic!("{error}: {body}"));
    match decoded.request {
        Request::Chat(chat) => *chat,
        other => panic!("{other:?}"),
    }
}

fn with(fields: &str) -> ChatRequest {
    decoded(&format!(r#"{{"model":"m","input":"hi",{fields}}}"#))
}

fn saying(items: &str) -> ChatRequest {
    decoded(&format!(r#"{{"model":"m","input":{items}}}"#))
}

fn meta() -> AnswerMeta {
    AnswerMeta::new("1".into(), 1_750_000_000)
}

fn text(text: &str) -> ChatEvent {
    ChatEvent::Text { choice: 0, text: text.into(), logprobs: Vec::new(), tokens: Vec::new() }
}

fn reasoning(text: &str) -> ChatEvent {
    ChatEvent::Reasoning { choice: 0, text: text.into() }
}

fn refused(text: &str) -> ChatEvent {
    ChatEvent::Refusal { choice: 0, text: text.into() }
}

fn call(call: u32, name: &str) -> ChatEvent {
    ChatEvent::ToolCallStart { choice: 0, call, id: format!("call_{name}"), name: name.into(), signature: None }
}

fn arguments(call: u32, json: &str) -> ChatEvent {
    ChatEvent::ToolCallArguments { choice: 0, call, json: json.into() }
}

fn finish(reason: FinishReason) -> ChatEvent {
    ChatEvent::Finish { choice: 0, reason, stop: None }
}

fn usage() -> ChatEvent {
    ChatEvent::Usage(Usage {
        prompt_tokens: 9,
        cached_tokens: 4,
        cache_write_tokens: 2,
        completion_tokens: 5,
        reasoning_tokens: 3,
    })
}

const MINIMAL: &str = r#"{"model":"m","input":"hi"}"#;

fn stream(body: &str, events: &[ChatEvent]) -> String {
    let form = responses(body.as_bytes(), &Bounds::default()).expect("good").form;
    let mut encoder = form.stream(&meta());
    let mut out = BytesMut::new();
    for event in events {
        encoder.event(event, &mut out);
    }
    encoder.done(&mut out);
    String::from_utf8(out.to_vec()).expect("UTF-8")
}

fn whole(body: &str, events: &[ChatEvent]) -> Option<Value> {
    let form = responses(body.as_bytes(), &Bounds::default()).expect("good").form;
    let mut collector = form.whole(&meta());
    events.iter().for_each(|event| collector.event(event));
    collector.finish().map(|body| serde_json::from_slice(&body).expect("JSON"))
}

/// The events of a stream: type and data agree, and the numbers have no gap.
#[track_caller]
fn parsed(sent: &str) -> Vec<Value> {
    let mut all: Vec<Value> = Vec::new();
    for block in sent.split_terminator("\n\n") {
        let (name, data) = block.split_once('\n').expect("two lines");
        let value: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(name.strip_prefix("event: "), value["type"].as_str());
        assert_eq!(value["sequence_number"], all.len());
        all.push(value);
    }
    all
}

#[track_caller]
fn check(name: &str, body: &str, events: &[ChatEvent]) {
    let sent = stream(body, events);
    check_golden(&format!("{name}.sse"), &sent);
    let answer = whole(body, events).expect("a complete answer");
    check_golden(&format!("{name}.json"), &(serde_json::to_string_pretty(&answer).expect("JSON") + "\n"));
    let events = parsed(&sent);
    let last = events.last().expect("events");
    assert_eq!(last["response"], answer, "the last event says what the whole answer says");
    let done: Vec<&Value> = events.iter().filter(|event| event["type"] == "response.output_item.done").collect();
    for event in &done {
        let index = event["output_index"].as_u64().expect("an index") as usize;
        assert_eq!(event["item"], answer["output"][index]);
    }
    assert_eq!(done.len(), answer["output"].as_array().map_or(0, Vec::len), "every item is done");
}

#[test]
fn every_field_of_a_request() {
    let body = r#"{"model":"demo","stream":true,"stream_options":{"include_obfuscation":false},
        "instructions":"Be brief.","max_output_tokens":7,"max_tool_calls":3,"temperature":0.5,"top_p":0.9,"top_logprobs":2,
        "include":["message.output_text.logprobs","reasoning.encrypted_content"],"truncation":"disabled","store":true,
        "metadata":{"a":"b c"},"user":"u","safety_identifier":"s","prompt_cache_key":"k","service_tier":"auto",
        "parallel_tool_calls":false,"tool_choice":{"type":"function","name":"weather"},
        "reasoning":{"effort":"xhigh","summary":"auto"},"seed":4,"stop":["END"],"top_k":5,"unknown":1,
        "text":{"verbosity":"low","format":{"type":"json_schema","name":"x","strict":true,"schema":{ "type" : "object" }}},
        "tools":[{"type":"function","name":"weather","description":"d","parameters":{"type":"object"},"strict":true},
            {"type":"function","name":"time","parameters":null}],
        "input":[
            {"role":"developer","content":"Rules."},
            {"type":"message","role":"user","content":[{"type":"input_text","text":"What is "},{"type":"input_text","text":"it?"},
                {"type":"input_image","image_url":"https://h/i","detail":"low","file_id":null}]},
            {"type":"reasoning","id":"rs_1","summary":[{"type":"summary_text","text":"short"}],"status":null,
                "content":[{"type":"reasoning_text","text":"Ask "},{"type":"reasoning_text","text":"the tool."}],"encrypted_content":"c2ln"},
            {"type":"function_call","id":"fc_1","status":"completed","call_id":"call_1","name":"weather","arguments":"{\"a\":1}",
                "extra_content":{"google":{"thought_signature":"c2ln"}}},
            {"type":"function_call","call_id":"call_2","name":"time","arguments":"{}"},
            {"type":"function_call_output","call_id":"call_1","output":"rain"},
            {"type":"function_call_output","call_id":"call_2","output":[{"type":"input_text","text":"noon"}],"status":"completed"},
            {"type":"message","id":"msg_1","role":"assistant","status":"completed","content":[
                {"type":"output_text","text":"Rain","annotations":[],"logprobs":[]},{"type":"refusal","refusal":"!"}]},
            {"role":"user","content":"Thanks."}]}"#;
    check_golden("responses_every_field.request", &format!("{:#?}\n", decoded(body)));
    let answer = whole(body, &[text("{}"), finish(FinishReason::Stop), usage()]).expect("complete");
    let answer = serde_json::to_string_pretty(&answer).expect("JSON") + "\n";
    check_golden("responses_every_field.json", &answer);
}

#[test]
fn items_become_turns() {
    let roles = |items: &str| saying(items).messages.iter().map(|message| message.role).collect::<Vec<_>>();
    use Role::*;
    assert_eq!(roles(r#""hi""#), [User]);
    assert_eq!(roles(r#"[{"role":"system","content":"a"},{"role":"user","content":"b"}]"#), [System, User]);
    let message = r#"{"role":"assistant","content":"a"}"#;
    let call = r#"{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}"#;
    let output = r#"{"type":"function_call_output","call_id":"1","output":"x"}"#;
    let thought = r#"{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"h"}]}"#;
    let turn = saying(&format!("[{thought},{message},{call},{call},{output}]")).messages;
    assert_eq!(turn.iter().map(|message| message.role).collect::<Vec<_>>(), [Assistant, Tool]);
    let first = &turn[0];
    assert_eq!(
        (first.reasoning.as_deref(), first.content.as_deref(), first.tool_calls.len()),
        (Some("h"), Some("a"), 2)
    );
    // A call, then a text: still one turn. A text after a text, or reasoning after reasoning, begins the next one.
    assert_eq!(roles(&format!("[{call},{message},{output}]")), [Assistant, Tool]);
    assert_eq!(roles(&format!("[{message},{message}]")), [Assistant, Assistant]);
    assert_eq!(roles(&format!("[{message},{thought},{call},{output}]")), [Assistant, Assistant, Tool]);
    assert_eq!(roles(&format!("[{call},{output},{call},{output}]")), [Assistant, Tool, Assistant, Tool]);
    let summary =
        r#"{"type":"reasoning","summary":[{"type":"summary_text","text":"a"},{"type":"summary_text","text":"b"}]}"#;
    let message = saying(&format!("[{summary},{message}]")).messages.remove(0);
    assert_eq!(message.reasoning.as_deref(), Some("a\n\nb"));
}

#[test]
fn settings_that_clients_send_by_default() {
    assert_eq!(with(r#""tool_choice":"auto","tools":[]"#).tool_choice, ToolChoice::None);
    assert_eq!(with(r#""tool_choice":"none""#).tool_choice, ToolChoice::None);
    let tool = r#""tools":[{"type":"function","name":"f","parameters":{},"strict":null}]"#;
    assert_eq!(with(tool).tool_choice, ToolChoice::Auto);
    assert_eq!(with(&format!(r#"{tool},"tool_choice":"required""#)).tool_choice, ToolChoice::Required);
    let allowed =
        r#""tool_choice":{"type":"allowed_tools","mode":"required","tools":[{"type":"function","name":"f"}]}"#;
    let expected = ToolChoice::Allowed { names: vec!["f".into()], required: true };
    assert_eq!(with(&format!("{tool},{allowed}")).tool_choice, expected);
    assert_eq!(with(r#""top_logprobs":3"#).logprobs, Some(3));
    assert_eq!(with(r#""include":["message.output_text.logprobs"]"#).logprobs, Some(0));
    assert_eq!(with(r#""text":{"format":{"type":"text"}},"reasoning":{},"metadata":null"#).logprobs, None);
}

#[test]
fn what_is_not_built_says_so() {
    let item = |item: &str| format!(r#"{{"model":"m","input":[{{"role":"user","content":"x"}},{item}]}}"#);
    let field = |field: &str| format!(r#"{{"model":"m","input":"x",{field}}}"#);
    let (invalid, parameter, value) = (None, Some("unsupported_parameter"), Some("unsupported_value"));
    for (body, param, code, words) in [
        ("{}".into(), "model", invalid, "missing"),
        (r#"{"model":"m"}"#.into(), "input", invalid, "missing"),
        (r#"{"model":"m","input":5}"#.into(), "input", invalid, "a string or an array"),
        (r#"{"model":"m","input":[]}"#.into(), "input", invalid, "at least one message"),
        (r#"{"model":"m","input":[1]}"#.into(), "input[0]", invalid, "expected an object"),
        (item("{}"), "input[1].type", invalid, "missing"),
        (item(r#"{"role":"wizard","content":"x"}"#), "input[1].role", invalid, "wizard"),
        (item(r#"{"role":"user"}"#), "input[1].content", invalid, "missing"),
        (
            item(r#"{"role":"user","content":[{"type":"input_file","file_id":null}]}"#),
            "input[1].content[0].type",
            value,
            "input_file",
        ),
        (item(r#"{"type":"message","content":"x"}"#), "input[1].role", invalid, "missing"),
        (item(r#"{"type":"web_search_call","id":"ws_1"}"#), "input[1].type", value, "web_search_call"),
        (item(r#"{"type":"item_reference","id":"msg_1"}"#), "input[1].id", value, "no item \"msg_1\""),
        (item(r#"{"id":"msg_1"}"#), "input[1].id", value, "no item"),
        (item(r#"{"type":"function_call","name":"f","arguments":"{}"}"#), "input[1].call_id", invalid, "missing"),
        (item(r#"{"type":"function_call_output","call_id":"a"}"#), "input[1].output", invalid, "missing"),
        (field(r#""previous_response_id":"resp_1""#), "previous_response_id", parameter, "not stored here"),
        (field(r#""background":true"#), "background", value, "not stored here"),
        (field(r#""conversation":"conv_1""#), "conversation", parameter, "not stored here"),
        (field(r#""prompt":{"id":"pmpt_1"}"#), "prompt", parameter, "not built"),
        (field(r#""truncation":"some""#), "truncation", invalid, "auto"),
        (field(r#""max_tokens":5"#), "max_tokens", parameter, "max_output_tokens"),
        (field(r#""n":2"#), "n", invalid, "must be 1 to 1"),
        (field(r#""tools":[{"type":"web_search"}]"#), "tools[0].type", value, "web_search"),
        (field(r#""tools":[{"type":"function"}]"#), "tools[0].name", invalid, "missing"),
        (field(r#""tool_choice":"required""#), "tool_choice", invalid, "only allowed with tools"),
        (
            field(r#""tools":[{"type":"function","name":"f"}],"tool_choice":{"type":"function","name":"g"}"#),
            "tool_choice.name",
            invalid,
            "no tool is named",
        ),
        (
            field(r#""tools":[{"type":"function","name":"f"}],"tool_choice":{"type":"mcp"}"#),
            "tool_choice",
            value,
            "mcp",
        ),
        (field(r#""text":{"format":{"type":"json_schema","schema":{}}}"#), "text.format.name", invalid, "missing"),
        (field(r#""reasoning":{"effort":"huge"}"#), "reasoning.effort", invalid, "must be one of"),
        (field(r#""metadata":{"a":1}"#), "metadata.a", invalid, "expected a string"),
        (field(r#""guided_by_voices":{}"#), "guided_by_voices", parameter, "structured_outputs"),
        (
            field(r#""tools":[{"type":"function","name":"f"}],"tool_choice":{"type":"allowed_tools","mode":"auto"}"#),
            "tool_choice.tools",
            invalid,
            "missing",
        ),
        (
            field(
                r#""tools":[{"type":"function","name":"f"}],"tool_choice":{"type":"allowed_tools","mode":"auto","tools":[{"type":"function","name":"g"}]}"#,
            ),
            "tool_choice",
            invalid,
            "no tool is named",
        ),
    ] {
        let error = responses(body.as_bytes(), &Bounds::default()).map(|_| ()).expect_err(&body);
        let answer: Value = serde_json::from_slice(&refusal(&error).1).expect("JSON");
        assert_eq!(answer["error"]["param"], param, "{body}: {error}");
        assert_eq!(answer["error"]["code"].as_str(), code, "{body}: {error}");
        assert!(error.message.contains(words), "{body}: {error}");
    }
}

#[test]
fn a_text() {
    check("response_text", MINIMAL, &[text("Grüß "), text("\"dich\""), finish(FinishReason::Stop), usage()]);
}

#[test]
fn reasoning_text_and_calls() {
    let events = [
        reasoning("Hm"),
        reasoning("m."),
        ChatEvent::ReasoningSignature { choice: 0, signature: "c2ln".into() },
        text("Let me see."),
        call(0, "f"),
        arguments(0, "{\"a\""),
        call(1, "g"),
        arguments(1, "{}"),
        arguments(0, ":1}"),
        finish(FinishReason::ToolCalls),
        usage(),
    ];
    check("response_calls", MINIMAL, &events);
}

#[test]
fn reasoning_as_the_summary_that_was_asked_for() {
    let body = r#"{"model":"m","input":"hi","reasoning":{"summary":"auto"}}"#;
    check("response_summary", body, &[reasoning("Hm"), text("a"), finish(FinishReason::Stop), usage()]);
}

#[test]
fn answers_that_end_early() {
    check("response_length", MINIMAL, &[text("a"), finish(FinishReason::Length), usage()]);
    check(
        "response_filtered",
        MINIMAL,
        &[text("a"), refused("I "), refused("won't."), finish(FinishReason::ContentFilter)],
    );
    check("response_empty", MINIMAL, &[finish(FinishReason::Stop), usage()]);
}

#[test]
fn truncation_is_said_back() {
    for (word, truncates) in [("auto", true), ("disabled", false)] {
        let field = format!(r#""truncation":"{word}""#);
        assert_eq!(with(&field).truncates, truncates);
        let body = format!(r#"{{"model":"m","input":"hi",{field}}}"#);
        let answer = whole(&body, &[text("a"), finish(FinishReason::Stop)]).expect("an answer");
        assert_eq!(answer["truncation"], word);
    }
    assert!(!with(r#""store":false"#).truncates);
}

#[test]
fn logprobs_where_they_were_asked_for() {
    let token = TokenLogprob {
        token: 1,
        bytes: b"a".to_vec(),
        logprob: Some(-0.5),
        top: vec![(1, b"a".to_vec(), -0.5), (2, b"b".to_vec(), -1.5)],
        place: TokenPlace::Text,
    };
    let elsewhere = TokenLogprob { place: TokenPlace::Apart, ..token.clone() };
    let thought = ChatEvent::Text { choice: 0, text: String::new(), logprobs: vec![elsewhere], tokens: Vec::new() };
    assert!(!stream(r#"{"model":"m","input":"hi","top_logprobs":2}"#, &[thought]).contains("output_text"));
    let said = ChatEvent::Text { choice: 0, text: "a".into(), logprobs: vec![token.clone()], tokens: Vec::new() };
    let silent = ChatEvent::Text { choice: 0, text: String::new(), logprobs: vec![token], tokens: Vec::new() };
    let body = r#"{"model":"m","input":"hi","top_logprobs":2}"#;
    check("response_logprobs", body, &[said.clone(), silent, finish(FinishReason::Stop), usage()]);
    assert!(!stream(MINIMAL, &[said, finish(FinishReason::Stop)]).contains("\"logprob\""));
}

#[test]
fn an_answer_without_its_end_is_none() {
    assert_eq!(whole(MINIMAL, &[text("a")]), None);
    let events = parsed(&stream(MINIMAL, &[text("a")]));
    let types: Vec<&str> = events.iter().rev().take(2).map(|event| event["type"].as_str().expect("a type")).collect();
    assert_eq!(types, ["response.failed", "error"]);
    let last = &events[events.len() - 1]["response"];
    assert_eq!((&last["status"], &last["error"]["code"]), (&"failed".into(), &"server_error".into()));
    assert_eq!(last["output"][0]["status"], "incomplete");
    let form = responses(MINIMAL.as_bytes(), &Bounds::default()).expect("good").form;
    let (mut encoder, mut out) = (form.stream(&meta()), BytesMut::new());
    encoder.fail(error_shape::RATE_LIMIT_REQUESTS, "slow \"down\"", &mut out);
    encoder.event(&text("late"), &mut out);
    encoder.done(&mut out);
    let sent = String::from_utf8(out.to_vec()).expect("UTF-8");
    assert_eq!(
        sent,
        "event: error\ndata: {\"type\":\"error\",\"sequence_number\":0,\"code\":\"rate_limit_exceeded\",\"message\":\"slow \\\"down\\\"\",\"param\":null}\n\n"
    );
}

#[test]
fn earlier_turns_stand_in_front() {
    let body = r#"{"model":"m","instructions":"New.","previous_response_id":"resp_0","input":[{"type":"item_reference","id":"msg_7"},{"role":"user","content":"c"}]}"#;
    let request = ResponsesRequest::decode(body.as_bytes(), &Bounds::default()).expect("good");
    assert!(request.store && !request.background && !request.stream);
    assert_eq!(request.previous_response_id.as_deref(), Some("resp_0"));
    let input = br#"[{"type":"message","role":"user","content":[{"type":"input_text","text":"a"}]}]"#;
    let output = br#"[{"id":"msg_7","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"b","annotations":[],"logprobs":[]}]}]"#;
    let (chat, form) = request.resolve(&[input, output], true).expect("a conversation");
    let said: Vec<&str> = chat.messages.iter().filter_map(|message| message.content.as_deref()).collect();
    assert_eq!(said, ["New.", "a", "b", "b", "c"]);
    let mut collector = form.collector(&meta());
    assert!(collector.finished().is_none());
    [text("d"), finish(FinishReason::Stop), usage()].iter().for_each(|event| collector.event(event));
    let finished = collector.finished().expect("ended");
    let body: Value = serde_json::from_slice(&finished.body).expect("JSON");
    assert_eq!((&body["store"], &body["previous_response_id"]), (&true.into(), &"resp_0".into()));
    assert_eq!(body["output"], serde_json::from_slice::<Value>(&finished.output).expect("JSON"));
    // Output items can be sent back as input.
    let again = format!(r#"{{"model":"m","input":{}}}"#, String::from_utf8_lossy(&finished.output));
    assert_eq!(decoded(&again).messages[0].content.as_deref(), Some("d"));
    let text = ResponsesRequest::decode(br#"{"model":"m","input":"a \"b\""}"#, &Bounds::default()).expect("good");
    let items: Value = serde_json::from_slice(&text.input_items()).expect("JSON");
    assert_eq!(items[0]["content"][0]["text"], "a \"b\"");
}

#[test]
fn a_reference_to_a_reference_is_none() {
    for earlier in [
        r#"[{"id":"a"}]"#,
        r#"[{"type":null,"id":"a"}]"#,
        r#"[{"type":"item_reference","id":"a"}]"#,
        r#"[{"type":"item_reference","id":"a","role":"user"}]"#,
    ] {
        let body = r#"{"model":"m","input":[{"role":"user","content":"x"},{"id":"a"}]}"#;
        let request = ResponsesRequest::decode(body.as_bytes(), &Bounds::default()).expect("good");
        let error = request.resolve(&[earlier.as_bytes()], true).map(|_| ()).expect_err(earlier);
        assert!(error.message.contains("no item \"a\""), "{error}");
    }
}

#[test]
fn constraints_that_the_api_has_no_word_for_are_echoed_in_their_own_field() {
    let tag = json!({"format": {"type": "regex", "pattern": "a+"}});
    for (outputs, format) in [
        (Some(json!({"regex": "a+"})), None),
        (Some(json!({"choice": ["a", "b"]})), None),
        (Some(json!({"grammar": "start: \"a\""})), None),
        (Some(json!({"structural_tag": tag})), None),
        (None, Some(json!({"type": "text"}))),
    ] {
        let fields = outputs.as_ref().map(|outputs| format!(r#","structured_outputs":{outputs}"#)).unwrap_or_default();
        let body = format!(r#"{{"model":"m","input":"hi"{fields}}}"#);
        let answer = whole(&body, &[text("a"), finish(FinishReason::Stop), usage()]).expect("an answer");
        assert_eq!(answer.get("structured_outputs"), outputs.as_ref());
        assert_eq!(answer["text"].get("format"), format.as_ref());
    }
}

#[test]
fn items_are_bounded_also_where_they_make_one_message() {
    let reasoning = r#"{"type":"reasoning","id":"rs_1","summary":[]}"#;
    let list = format!("[{}]", vec![reasoning; 50_000].join(","));
    let request = |input: &str| {
        let body = format!(r#"{{"model":"m","previous_response_id":"resp_0","input":{input}}}"#);
        ResponsesRequest::decode(body.as_bytes(), &Bounds::default())
    };
    let error = request(&list).and_then(|request| request.resolve(&[], true).map(|_| ())).expect_err("too many");
    assert!(error.message.contains("more than 40000 items"), "{}", error.message);
    let next = || request(r#"[{"role":"user","content":"a"}]"#).expect("read");
    let error = next().resolve(&[list.as_bytes()], true).map(|_| ()).expect_err("too many");
    assert!(error.message.contains("more than 40000 items"), "{}", error.message);
}

#[test]
fn references_repeat_each_earlier_item_once() {
    let earlier = format!(r#"[{{"id":"msg_7","role":"user","content":"{}"}}]"#, "a".repeat(1000));
    let references = |count| {
        let items = vec![r#"{"type":"item_reference","id":"msg_7"}"#; count].join(",");
        let body = format!(r#"{{"model":"m","previous_response_id":"resp_0","input":[{items}]}}"#);
        let request = ResponsesRequest::decode(body.as_bytes(), &Bounds::default()).expect("read");
        request.resolve(&[earlier.as_bytes()], true).map(|(chat, _)| chat.messages.len())
    };
    assert_eq!(references(1).ok(), Some(2));
    let error = references(2).expect_err("repeats more than there is");
    assert!(error.message.contains("references repeat"), "{}", error.message);
}
