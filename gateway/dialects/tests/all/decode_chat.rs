//! Good chat bodies and the requests they decode into.

use crate::common;

use common::check_golden;
use penstock_dialects::openai::decode_chat;
use penstock_types::Bounds;
use penstock_types::ChatRequest;

fn decoded(body: &str) -> ChatRequest {
    decode_chat(body.as_bytes(), &Bounds::default()).unwrap_or_else(|error| panic!("{error}: {body}"))
}

/// A good request with more fields.
fn with(fields: &str) -> ChatRequest {
    decoded(&format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{fields}}}"#))
}

/// The decoded form of one message.
fn said(message: &str) -> penstock_types::Message {
    decoded(&format!(r#"{{"model":"m","messages":[{message}]}}"#)).messages.remove(0)
}

#[track_caller]
fn check(name: &str, body: &str) {
    check_golden(&format!("{name}.request"), &format!("{:#?}\n", decoded(body)));
}

#[test]
fn the_smallest_request() {
    check("chat_smallest", r#"{"model":"demo","messages":[{"role":"user","content":"Hello!"}]}"#);
}

#[test]
fn every_field_that_is_honoured() {
    check(
        "chat_every_field",
        r#" { "model" : "demo", "stream" : true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true, "include_obfuscation": false, "shiny": 1},
        "max_tokens": 5, "max_completion_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1.1, "logit_bias": {"50": -100, "7": 2.5},
        "seed": 18446744073709551615, "n": 3, "stop": ["END", "é\ud83d\ude00"], "stop_token_ids": [2, 3],
        "include_stop_str_in_output": true, "skip_special_tokens": false, "allowed_token_ids": [1, 2], "min_tokens": 2,
        "ignore_eos": true, "logprobs": true, "top_logprobs": 20, "return_token_ids": true, "cache_salt": "s", "priority": -3,
        "reasoning_effort": "xhigh", "chat_template_kwargs": { "enable_thinking" : false, "deep": [ 1, "a b" ] },
        "add_generation_prompt": false, "parallel_tool_calls": true, "tool_choice": "auto",
        "tools": [ {"type": "function", "function": {"name": "weather", "description": "say \"where\"", "strict": true,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}} ],
        "user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_key": "k",
        "verbosity": "low", "store": true, "prediction": {"type": "content", "content": "x"}, "response_format": {"type": "text"},
        "modalities": ["text"], "unknown": {"a": [1]}, "use_beam_search": false, "length_penalty": 1.0, "bad_words": [ ],
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "input_text", "text": "brief."}]},
            {"role": "user", "content": "Weather in Gie\u00dfen?", "name": "ann"},
            {"role": "assistant", "content": null, "reasoning_content": "Ask the tool.", "refusal": null, "annotations": [],
                "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"x\"}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]} ] } "#,
    );
}

#[test]
fn null_is_absent() {
    let fields = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "max_tokens",
        "logprobs",
        "max_completion_tokens",
        "top_logprobs",
        "logit_bias",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "user",
        "response_format",
        "functions",
        "function_call",
        "guided_json",
        "structured_outputs",
        "audio",
        "modalities",
        "web_search_options",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "metadata",
        "service_tier",
    ];
    let nulls: Vec<String> = fields.iter().map(|field| format!("\"{field}\":null")).collect();
    let plain = with(r#""store":false"#);
    assert_eq!(format!("{:?}", with(&nulls.join(","))), format!("{plain:?}"));
}

#[test]
fn max_completion_tokens_wins_in_any_order() {
    assert_eq!(with(r#""max_tokens":5,"max_completion_tokens":7"#).sampling.max_tokens, Some(7));
    assert_eq!(with(r#""max_completion_tokens":7,"max_tokens":5"#).sampling.max_tokens, Some(7));
    assert_eq!(with(r#""max_tokens":5"#).sampling.max_tokens, Some(5));
}

#[test]
fn numbers_at_their_ends() {
    let sampling = |fields: &str| with(fields).sampling;
    assert_eq!(sampling(r#""temperature":-0.0"#).temperature.map(f32::to_bits), Some(0));
    assert_eq!(sampling(r#""temperature":2"#).temperature, Some(2.0));
    assert_eq!(sampling(r#""top_p":1"#).top_p, Some(1.0));
    assert_eq!(sampling(r#""top_k":-1"#).top_k, Some(0));
    assert_eq!(sampling(r#""top_k":0"#).top_k, Some(0));
    assert_eq!(sampling(r#""seed":-1"#).seed, Some(u64::MAX));
    assert_eq!(sampling(r#""seed":9007199254740993"#).seed, Some(9_007_199_254_740_993));
    assert_eq!(sampling(r#""max_tokens":16.0"#).max_tokens, Some(16));
    assert_eq!(sampling(r#""max_tokens":1e2"#).max_tokens, Some(100));
    assert_eq!(with(r#""n":128"#).n, 128);
    assert_eq!(with(r#""logprobs":true"#).logprobs, Some(0));
    assert_eq!(with(r#""logprobs":false,"top_logprobs":0"#).logprobs, None);
}

#[test]
fn messages_that_clients_send_back() {
    let message = said(r#"{"role":"assistant","content":null,"reasoning":"r","reasoning_content":"c"}"#);
    assert_eq!((message.content, message.reasoning.as_deref()), (None, Some("r")));
    let message = said(r#"{"role":"assistant","reasoning_content":"c","reasoning":"r","content":""}"#);
    assert_eq!((message.content.as_deref(), message.reasoning.as_deref()), (Some(""), Some("r")));
    let message =
        said(r#"{"role":"assistant","content":[{"type":"refusal","refusal":"no"}],"audio":null,"function_call":null}"#);
    assert_eq!(message.content.as_deref(), Some("no"));
    let message = said(r#"{"role":"user","content":[]}"#);
    assert_eq!(message.content.as_deref(), Some(""));
    let call = r#"{"id":"a","index":0,"function":{"name":"f","arguments":""}}"#;
    assert_eq!(said(&format!(r#"{{"role":"assistant","tool_calls":[{call}]}}"#)).tool_calls.len(), 1);
}

#[test]
fn a_refusal_that_is_sent_back_is_the_content() {
    let refused = said(r#"{"role":"assistant","content":null,"refusal":"No."}"#);
    assert_eq!(refused.content.as_deref(), Some("No."));
    let refused = said(r#"{"refusal":"No.","role":"assistant","annotations":[]}"#);
    assert_eq!(refused.content.as_deref(), Some("No."));
    // A content that is there counts alone.
    let both = said(r#"{"role":"assistant","content":"Yes.","refusal":"No."}"#);
    assert_eq!(both.content.as_deref(), Some("Yes."));
    let body = r#"{"model":"m","messages":[{"role":"user","content":null,"refusal":"No."}]}"#;
    let error = decode_chat(body.as_bytes(), &Bounds::default()).expect_err("the user declines nothing");
    assert_eq!(error.param.as_deref(), Some("messages[0].content"));
}

#[test]
fn a_last_assistant_message_can_be_continued() {
    let request =
        decoded(r#"{"model":"m","messages":[{"role":"assistant","content":"Once"}],"continue_final_message":true}"#);
    assert!(request.continue_final_message && !request.add_generation_prompt);
}

#[test]
fn tool_choice_none_hides_and_needs_no_tools() {
    use penstock_types::ToolChoice;
    assert_eq!(with(r#""tool_choice":"none""#).tool_choice, ToolChoice::None);
    let tool = r#""tools":[{"type":"function","function":{"name":"f"}}]"#;
    assert_eq!(with(tool).tool_choice, ToolChoice::Auto);
    assert_eq!(
        with(&format!(r#"{tool},"tool_choice":"none","parallel_tool_calls":false"#)).tool_choice,
        ToolChoice::None
    );
}

#[test]
fn forced_and_single_calls_are_kept_for_whoever_can_hold_them() {
    use penstock_types::ToolChoice;
    let tool = r#""tools":[{"type":"function","function":{"name":"f"}}]"#;
    assert_eq!(with(&format!(r#"{tool},"tool_choice":"required""#)).tool_choice, ToolChoice::Required);
    let named = with(&format!(r#"{tool},"tool_choice":{{"type":"function","function":{{"name":"f"}}}}"#));
    assert_eq!(named.tool_choice, ToolChoice::Named("f".into()));
    let entry = r#"{"type":"function","function":{"name":"f"}}"#;
    for (mode, required) in [("auto", false), ("required", true)] {
        let allowed = format!(r#"{{"mode":"{mode}","tools":[{entry},{entry}]}}"#);
        let chosen = with(&format!(r#"{tool},"tool_choice":{{"type":"allowed_tools","allowed_tools":{allowed}}}"#));
        assert_eq!(chosen.tool_choice, ToolChoice::Allowed { names: vec!["f".into()], required });
    }
    assert!(!with(&format!(r#"{tool},"parallel_tool_calls":false"#)).parallel_tool_calls);
    assert!(with(tool).parallel_tool_calls);
}

#[test]
fn response_formats() {
    use penstock_types::ResponseFormat;
    let format = |json: &str| with(&format!(r#""response_format":{json}"#)).response_format;
    assert_eq!(format(r#"{"type":"text"}"#), ResponseFormat::Text);
    assert_eq!(format(r#"{"type":"json_object","json_schema":null}"#), ResponseFormat::JsonObject);
    let schema = r#"{"type":"json_schema","json_schema":{"name":"x","strict":true,"description":"d","schema":{ "type" : "object" }}}"#;
    let expected = ResponseFormat::JsonSchema {
        name: "x".into(),
        description: Some("d".into()),
        schema: r#"{"type":"object"}"#.into(),
        strict: true,
    };
    assert_eq!(format(schema), expected);
}

#[test]
fn images_stand_in_their_place() {
    use penstock_types::{ImageSource, Part};
    let image = |url: &str| format!(r#"{{"type":"image_url","image_url":{{"url":"{url}","detail":"low"}}}}"#);
    let (here, there) = (image("data:image/png;base64,iVBORw0KGgo="), image("https://example.test/a.png"));
    let text = |text: &str| format!(r#"{{"type":"text","text":"{text}"}}"#);
    let content = [text("a"), text("b"), here, text("c"), there].join(",");
    let message = said(&format!(r#"{{"role":"user","content":[{content}]}}"#));
    assert_eq!(message.content.as_deref(), Some("abc"));
    let detail = Some("low".to_owned());
    let data = ImageSource::Data { media_type: "image/png".into(), base64: "iVBORw0KGgo=".into() };
    let url = ImageSource::Url("https://example.test/a.png".into());
    assert_eq!(
        message.parts,
        [
            Part::Text("ab".into()),
            Part::Image { source: data, detail: detail.clone() },
            Part::Text("c".into()),
            Part::Image { source: url, detail },
        ]
    );
    assert!(said(r#"{"role":"user","content":[{"type":"text","text":"a"}]}"#).parts.is_empty());
    let flat = r#"{"type":"input_image","image_url":"https://h/i","detail":"high","file_id":null}"#;
    let image = Part::Image { source: ImageSource::Url("https://h/i".into()), detail: Some("high".into()) };
    assert_eq!(said(&format!(r#"{{"role":"user","content":[{flat}]}}"#)).parts, [image]);
    let of_tool =
        r#"{"role":"tool","tool_call_id":"a","content":[{"type":"image_url","image_url":{"url":"http://h/i"}}]}"#;
    assert_eq!(said(of_tool).parts.len(), 1);
}

#[test]
fn a_call_keeps_the_signature_of_its_thought() {
    let call = r#"{"id":"a","type":"function","function":{"name":"f","arguments":"{}"},"extra_content":{"google":{"thought_signature":"c2ln"}}}"#;
    let message = said(&format!(r#"{{"role":"assistant","content":null,"tool_calls":[{call}]}}"#));
    assert_eq!(message.tool_calls[0].signature.as_deref(), Some("c2ln"));
}

#[test]
fn unknown_fields_are_named_and_bounded() {
    let many: Vec<String> = (0..100).map(|index| format!("\"zz{index}{}\":0", "é".repeat(100))).collect();
    let ignored = with(&many.join(",")).ignored;
    assert_eq!(ignored.len(), 32);
    assert!(ignored.iter().all(|name| name.chars().count() == 65 && name.starts_with("zz")), "{ignored:?}");
}

#[test]
fn a_body_at_its_bounds_is_good() {
    let list = |item: &str, count: usize| format!("[{}]", vec![item; count].join(","));
    let turns = list(r#"{"role":"user","content":"x"}"#, 10_000);
    let request = decoded(&format!(r#"{{"messages":{turns},"model":"m","stop":{}}}"#, list("\"x\"", 16)));
    assert_eq!((request.messages.len(), request.sampling.stop.len()), (10_000, 16));
}
