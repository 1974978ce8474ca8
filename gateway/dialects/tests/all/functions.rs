//! `functions` and `function_call`, the older form of tools: requests, conversations and answers.

use bytes::BytesMut;
use penstock_dialects::openai::{chat, decode_chat};
use penstock_dialects::{bedrock, gemini};
use penstock_types::{
    AnswerMeta, ApiError, Bounds, ChatEvent, ChatRequest, FinishReason, ProviderCodec, Request, Role, ToolChoice,
    error_shape,
};
use serde_json::{Value, json};

const FUNCTIONS: &str = r#""functions":[{"name":"f","description":"d","parameters":{"type":"object"}},{"name":"g"}]"#;

fn body(fields: &str) -> String {
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{fields}}}"#)
}

fn decoded(body: &str) -> Result<ChatRequest, ApiError> {
    decode_chat(body.as_bytes(), &Bounds::default())
}

#[test]
fn functions_become_tools_and_one_call() {
    let choice = |more: &str| decoded(&body(&format!("{FUNCTIONS}{more}"))).expect("a good request");
    let chat = choice("");
    assert_eq!((chat.tool_choice, chat.parallel_tool_calls), (ToolChoice::Auto, false));
    let tool: Value = serde_json::from_str(&chat.tools[0].json).expect("JSON");
    let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
    assert_eq!(tool, json!({"type": "function", "function": function}));
    assert_eq!(chat.tools[1].name, "g");
    assert_eq!(choice(r#","function_call":"auto""#).tool_choice, ToolChoice::Auto);
    assert_eq!(choice(r#","function_call":"none""#).tool_choice, ToolChoice::None);
    assert_eq!(choice(r#","function_call":{"name":"g"}"#).tool_choice, ToolChoice::Named("g".into()));
    assert_eq!(decoded(&body(r#""functions":[]"#)).expect("no functions").tool_choice, ToolChoice::None);
}

#[test]
fn a_conversation_in_the_older_form_gets_ids() {
    let messages = r#"{"model":"m","messages":[{"role":"user","content":"hi"},
        {"role":"assistant","content":null,"function_call":{"name":"f","arguments":"{\"a\":1}"}},
        {"role":"function","name":"f","content":"7"},
        {"role":"assistant","content":"well","function_call":{"name":"f","arguments":"{}"}},
        {"role":"function","name":"f","content":"8"}]}"#;
    let chat = decoded(messages).expect("a conversation");
    let ids: Vec<_> =
        chat.messages.iter().map(|message| message.tool_calls.first().map(|call| call.id.as_str())).collect();
    assert_eq!(ids, [None, Some("call_1"), None, Some("call_3"), None]);
    let answers: Vec<_> = chat.messages.iter().map(|message| message.tool_call_id.as_deref()).collect();
    assert_eq!(answers, [None, None, Some("call_1"), None, Some("call_3")]);
    assert_eq!((chat.messages[2].role, chat.messages[2].content.as_deref()), (Role::Tool, Some("7")));
    assert_eq!(chat.messages[1].tool_calls[0].arguments, r#"{"a":1}"#);
}

#[test]
fn what_contradicts_the_older_form_is_refused() {
    let tools = r#""tools":[{"type":"function","function":{"name":"t"}}]"#;
    let fields = |fields: &str| body(fields);
    let messages = |messages: &str| format!(r#"{{"model":"m","messages":[{messages}]}}"#);
    for (body, param, words) in [
        (fields(&format!("{FUNCTIONS},{tools}")), "functions", "not allowed with tools"),
        (fields(&format!(r#"{tools},"function_call":"auto""#)), "function_call", "not allowed with tools"),
        (fields(&format!(r#"{FUNCTIONS},"tool_choice":"auto""#)), "tool_choice", "not allowed with functions"),
        (fields(r#""function_call":"auto""#), "function_call", "only allowed with functions"),
        (fields(r#""function_call":{"name":"f"}"#), "function_call", "only allowed with functions"),
        (fields(r#""function_call":{}"#), "function_call.name", "missing"),
        (fields(r#""function_call":"any""#), "function_call", "must be one of none, auto"),
        (fields(r#""function_call":5"#), "function_call", "expected a string or an object"),
        (
            fields(&format!(r#"{FUNCTIONS},"function_call":{{"name":"h"}}"#)),
            "function_call.name",
            "no function is named \"h\"",
        ),
        (fields(r#""functions":{}"#), "functions", "expected an array"),
        (fields(r#""functions":[{}]"#), "functions[0].name", "missing"),
        (fields(r#""functions":[{"name":"f"},{"name":"f"}]"#), "functions[1]", "given twice"),
        (
            messages(r#"{"role":"function","name":"f","content":"7"}"#),
            "messages[0].name",
            "no function_call of \"f\" awaits a result",
        ),
        (messages(r#"{"role":"function","content":"7"}"#), "messages[0].name", "required in messages of a function"),
        (
            messages(r#"{"role":"user","content":"a","function_call":{"name":"f","arguments":""}}"#),
            "messages[0].function_call",
            "of the assistant",
        ),
        (
            messages(
                r#"{"role":"assistant","tool_calls":[{"id":"i","function":{"name":"f","arguments":""}}],"function_call":{"name":"f","arguments":""}}"#,
            ),
            "messages[0].function_call",
            "not allowed with tool_calls",
        ),
        (
            messages(r#"{"role":"assistant","function_call":{"name":"f"}}"#),
            "messages[0].function_call.arguments",
            "missing",
        ),
    ] {
        let error = decoded(&body).expect_err(&body);
        assert_eq!(error.param.as_deref(), Some(param), "{error}: {body}");
        assert!(error.message.contains(words), "{error}");
    }
}

fn events() -> Vec<ChatEvent> {
    let start = |call, name: &str| ChatEvent::ToolCallStart {
        choice: 0,
        call,
        id: format!("id{call}"),
        name: name.into(),
        signature: None,
    };
    let piece = |call, json: &str| ChatEvent::ToolCallArguments { choice: 0, call, json: json.into() };
    vec![
        start(0, "f"),
        piece(0, r#"{"a":"#),
        piece(0, "1}"),
        start(1, "g"),
        piece(1, "{}"),
        ChatEvent::Finish { choice: 0, reason: FinishReason::ToolCalls, stop: None },
    ]
}

fn meta() -> AnswerMeta {
    AnswerMeta::new("1".into(), 7)
}

#[test]
fn a_whole_answer_has_one_function_call() {
    let whole = |fields: &str| {
        let form = chat(body(fields).as_bytes(), &Bounds::default()).expect("a good request").form;
        let mut collector = form.whole(&meta());
        events().iter().for_each(|event| collector.event(event));
        serde_json::from_slice::<Value>(&collector.finish().expect("finished")).expect("JSON")["choices"][0].take()
    };
    let choice = whole(FUNCTIONS);
    assert_eq!(choice["message"]["function_call"], json!({"name": "f", "arguments": "{\"a\":1}"}));
    assert_eq!(choice["message"]["content"], Value::Null);
    assert_eq!(choice["message"].get("tool_calls"), None);
    assert_eq!(choice["finish_reason"], "function_call");
    let choice = whole(r#""tools":[{"type":"function","function":{"name":"f"}}]"#);
    assert_eq!(choice["message"].get("function_call"), None);
    assert_eq!(choice["message"]["tool_calls"].as_array().map(Vec::len), Some(2));
    assert_eq!(choice["finish_reason"], "tool_calls");
}

#[test]
fn a_stream_has_the_pieces_of_one_function_call() {
    let form = chat(body(FUNCTIONS).as_bytes(), &Bounds::default()).expect("a good request").form;
    let (mut encoder, mut out) = (form.stream(&meta()), BytesMut::new());
    events().iter().for_each(|event| encoder.event(event, &mut out));
    encoder.done(&mut out);
    let text = std::str::from_utf8(&out).expect("text");
    let chunks = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let choices: Vec<Value> =
        chunks.map(|data| serde_json::from_str::<Value>(data).expect("JSON")["choices"][0].take()).collect();
    let deltas: Vec<&Value> = choices.iter().map(|choice| &choice["delta"]).collect();
    assert_eq!(deltas[0], &json!({"role": "assistant", "content": null}));
    assert_eq!(deltas[1], &json!({"function_call": {"name": "f", "arguments": ""}}));
    assert_eq!(deltas[2], &json!({"function_call": {"arguments": "{\"a\":"}}));
    assert_eq!(deltas[3], &json!({"function_call": {"arguments": "1}"}}));
    assert_eq!((deltas.len(), choices[4]["finish_reason"].as_str()), (5, Some("function_call")));
    assert!(text.ends_with("data: [DONE]\n\n"));
    let mut late = BytesMut::new();
    encoder.fail(error_shape::UPSTREAM, "late", &mut late);
    assert!(late.is_empty());
}

#[test]
fn providers_without_a_switch_for_one_call_take_the_older_form() {
    let older = decoded(&body(FUNCTIONS)).expect("a good request");
    let newer = ChatRequest { shows_one_call: false, ..older.clone() };
    for codec in [&bedrock::Codec as &dyn ProviderCodec, &gemini::Codec::default()] {
        assert!(codec.encode(&Request::Chat(Box::new(older.clone())), "m").is_ok());
        let error = codec.encode(&Request::Chat(Box::new(newer.clone())), "m").expect_err("two calls would be a fault");
        assert_eq!(error.param.as_deref(), Some("parallel_tool_calls"));
    }
}
