//! Messages bodies of Anthropic clients: the decoded request of good ones, the error of bad ones.

use crate::common;

use common::check_golden;
use penstock_dialects::anthropic::{decode_count_tokens, decode_messages, estimate, models_list};
use penstock_dialects::openai::ModelCard;
use penstock_types::request::ReasoningBlock;
use penstock_types::{ApiErrorKind, Bounds, ChatRequest, ReasoningEffort, ResponseFormat, Role, ToolChoice};

fn decoded(body: &str) -> ChatRequest {
    decode_messages(body.as_bytes(), &Bounds::default()).unwrap_or_else(|error| panic!("{error}: {body}"))
}

/// A good request with more fields.
fn with(fields: &str) -> ChatRequest {
    decoded(&format!(r#"{{"model":"m","max_tokens":5000,"messages":[{{"role":"user","content":"hi"}}],{fields}}}"#))
}

/// A good request with these messages.
fn turns(messages: &str) -> ChatRequest {
    decoded(&format!(r#"{{"model":"m","max_tokens":9,"messages":[{messages}]}}"#))
}

#[track_caller]
fn check(name: &str, body: &str) {
    check_golden(&format!("anthropic/{name}.request"), &format!("{:#?}\n", decoded(body)));
}

#[test]
fn the_smallest_request() {
    check("smallest", r#"{"model":"demo","max_tokens":16,"messages":[{"role":"user","content":"Hello!"}]}"#);
}

#[test]
fn every_field_that_is_honoured() {
    check(
        "every_field",
        r#" { "model": "demo", "max_tokens": 4096, "stream": true, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
        "stop_sequences": ["END", "é\ud83d\ude00"], "metadata": {"user_id": "u-1", "other": 1}, "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 2048, "display": "summarized"},
        "output_config": {"effort": "xhigh", "format": {"type": "json_schema", "schema": {"type": "object"}}, "task_budget": {"total": 1}},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}, "cache_control": {"type": "ephemeral"},
        "tools": [ {"name": "weather", "description": "say \"where\"", "strict": true, "cache_control": {"type": "ephemeral"},
            "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
            {"type": "custom", "name": "now", "input_schema": {"type": "object"}} ],
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00000;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}, {"type": "text", "text": "Be kind."}],
        "context_management": {"edits": []}, "mcp_servers": [ ], "container": null, "shiny": {"a": [1]},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is this?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
                {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}, {"type": "text", "text": "And that?"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Ask the tool.", "signature": "c2ln"},
                {"type": "text", "text": "Let me "}, {"type": "text", "text": "look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": { "city" : "a b" }},
                {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": true, "content": [{"type": "text", "text": "no"},
                    {"type": "text", "text": "clock"}, {"type": "image", "source": {"type": "url", "url": "https://example.com/c.png"}}]},
                {"type": "text", "text": "Go on."}]} ] } "#,
    );
}

#[test]
fn results_come_before_what_else_the_user_said() {
    let request = turns(
        r#"{"role":"user","content":[{"type":"text","text":"a"},{"type":"tool_result","tool_use_id":"t"},{"type":"text","text":"b"}]}"#,
    );
    let said: Vec<_> = request.messages.iter().map(|message| (message.role, message.content.as_deref())).collect();
    assert_eq!(said, [(Role::Tool, Some("")), (Role::User, Some("a\nb"))]);
}

#[test]
fn reasoning_is_kept_as_its_provider_wants_it_back() {
    let reasoned = |blocks: &str| {
        let request = turns(&format!(r#"{{"role":"assistant","content":[{blocks}]}},{{"role":"user","content":"x"}}"#));
        let message = request.messages[0].clone();
        (message.reasoning, message.reasoning_signature, message.content)
    };
    let owned = |text: &str| Some(text.to_owned());
    let signed = r#"{"type":"thinking","thinking":"a","signature":"s"}"#;
    let unsigned = r#"{"type":"thinking","thinking":"b","signature":""}"#;
    let redacted = r#"{"type":"redacted_thinking","data":"d"}"#;
    assert_eq!(reasoned(signed), (owned("a"), owned("s"), None));
    assert_eq!(reasoned(unsigned), (owned("b"), None, None));
    assert_eq!(reasoned(&format!("{signed},{unsigned}")), (owned("a\n\nb"), owned(&format!("[{signed}]")), None));
    assert_eq!(reasoned(&format!("{redacted},{signed}")), (owned("a"), owned(&format!("[{redacted},{signed}]")), None));
    assert_eq!(reasoned(redacted), (None, owned(&format!("[{redacted}]")), owned("")));
    // The gateway's own signature goes to no provider, and stays with its block to be checked.
    let own = r#"{"type":"thinking","thinking":"c","signature":"penstock1.ab"}"#;
    assert_eq!(reasoned(own), (owned("c"), None, None));
    assert_eq!(reasoned(&format!("{own},{signed}")), (owned("c\n\na"), owned(&format!("[{signed}]")), None));
    let request = turns(&format!(
        r#"{{"role":"user","content":"x"}},{{"role":"assistant","content":[{{"type":"text","text":"t"}},{own},{redacted}]}},{{"role":"user","content":"x"}}"#
    ));
    let block = |block, text, signature| ReasoningBlock { message: 1, block, text, signature };
    let blocks = [block(1, owned("c"), owned("penstock1.ab")), block(2, None, owned("d"))];
    assert_eq!(request.messages[1].reasoning_blocks, blocks);
    // Another provider's signature of a call comes back in front of it.
    let request = turns(
        r#"{"role":"assistant","content":[{"type":"thinking","thinking":"","signature":"call_signature:g"},
        {"type":"tool_use","id":"1","name":"f","input":{}},{"type":"tool_use","id":"2","name":"f","input":{}}]},
        {"role":"user","content":"x"}"#,
    );
    let calls = &request.messages[0].tool_calls;
    assert_eq!((calls[0].signature.as_deref(), calls[1].signature.as_deref()), (Some("g"), None));
    assert_eq!(request.messages[0].reasoning_signature, None);
}

#[test]
fn thinking_says_effort_and_tokens() {
    let asked = |fields: &str| {
        let request = with(fields);
        (request.reasoning_effort, request.reasoning_tokens_max)
    };
    assert_eq!(asked(r#""shiny":1"#), (None, None));
    assert_eq!(asked(r#""thinking":{"type":"disabled"}"#), (Some(ReasoningEffort::None), Some(0)));
    assert_eq!(asked(r#""thinking":{"type":"adaptive"}"#), (None, None));
    assert_eq!(
        asked(r#""thinking":{"type":"adaptive"},"output_config":{"effort":"low"}"#),
        (Some(ReasoningEffort::Low), None)
    );
    for (tokens, effort) in
        [(1024, ReasoningEffort::Low), (2049, ReasoningEffort::Medium), (4999, ReasoningEffort::Medium)]
    {
        let fields = format!(r#""thinking":{{"type":"enabled","budget_tokens":{tokens}}}"#);
        assert_eq!(asked(&fields), (Some(effort), Some(tokens)));
    }
}

#[test]
fn choices_of_tools() {
    let tool = r#""tools":[{"name":"f","input_schema":{"type":"object"}}]"#;
    let chosen = |fields: &str| {
        let request = with(fields);
        (request.tool_choice, request.parallel_tool_calls)
    };
    assert_eq!(chosen(tool), (ToolChoice::Auto, true));
    assert_eq!(chosen(r#""tool_choice":{"type":"auto"}"#), (ToolChoice::None, true));
    assert_eq!(chosen(&format!(r#"{tool},"tool_choice":{{"type":"any"}}"#)), (ToolChoice::Required, true));
    assert_eq!(chosen(&format!(r#"{tool},"tool_choice":{{"type":"none"}}"#)), (ToolChoice::None, true));
    assert_eq!(
        chosen(&format!(r#"{tool},"tool_choice":{{"type":"tool","name":"f","disable_parallel_tool_use":true}}"#)),
        (ToolChoice::Named("f".into()), false)
    );
}

#[test]
fn a_last_assistant_turn_is_continued() {
    let request = turns(r#"{"role":"user","content":"x"},{"role":"assistant","content":"Once"}"#);
    assert!(request.continue_final_message && !request.add_generation_prompt);
}

#[test]
fn counting_needs_no_max_tokens() {
    let body = br#"{"model":"m","messages":[{"role":"user","content":"12345678"}],"output_format":{"type":"json_schema","schema":{}}}"#;
    let request = decode_count_tokens(body, &Bounds::default()).expect("a request");
    assert!(matches!(request.response_format, ResponseFormat::JsonSchema { .. }));
    assert_eq!(estimate(&request), 2 + 4);
}

#[test]
fn models_in_one_page() {
    let card = |id: &str, context_tokens| ModelCard {
        id: id.into(),
        created: 1_750_000_000,
        owned_by: "penstock".into(),
        context_tokens,
        task: None,
        parent: None,
    };
    assert_eq!(
        String::from_utf8_lossy(&models_list(&[card("a", Some(8192)), card("b", None)])),
        concat!(
            r#"{"data":[{"type":"model","id":"a","display_name":"a","created_at":"2025-06-15T15:06:40Z","max_input_tokens":8192},"#,
            r#"{"type":"model","id":"b","display_name":"b","created_at":"2025-06-15T15:06:40Z"}],"#,
            r#""has_more":false,"first_id":"a","last_id":"b"}"#
        )
    );
}

#[track_caller]
fn refused(body: &str, kind: ApiErrorKind, param: &str) {
    let error = decode_messages(body.as_bytes(), &Bounds::default()).expect_err(body);
    assert_eq!((error.kind, error.param.as_deref()), (kind, Some(param)), "{error}: {body}");
    assert!(error.message.starts_with(param), "{error}");
}

#[test]
fn faults_name_the_parameter() {
    use ApiErrorKind::{Invalid, Unsupported, UnsupportedValue};
    let field = |fields: &str| {
        format!(r#"{{"model":"m","max_tokens":5000,"messages":[{{"role":"user","content":"hi"}}],{fields}}}"#)
    };
    let turn = |turn: &str| format!(r#"{{"model":"m","max_tokens":5,"messages":[{turn}]}}"#);
    let block = |block: &str| turn(&format!(r#"{{"role":"user","content":[{block}]}}"#));
    refused(r#"{"max_tokens":5,"messages":[{"role":"user","content":"hi"}]}"#, Invalid, "model");
    refused(r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#, Invalid, "max_tokens");
    refused(r#"{"model":"m","max_tokens":5}"#, Invalid, "messages");
    for (fields, kind, param) in [
        (r#""max_tokens":0"#, Invalid, "max_tokens"),
        (r#""temperature":3"#, Invalid, "temperature"),
        (r#""stop_sequences":[""]"#, Invalid, "stop_sequences[0]"),
        (r#""system":[{"type":"image","source":{"type":"url","url":"https://a"}}]"#, Invalid, "system[0]"),
        (r#""thinking":{"type":"enabled"}"#, Invalid, "thinking.budget_tokens"),
        (r#""thinking":{"type":"enabled","budget_tokens":5}"#, Invalid, "thinking.budget_tokens"),
        (r#""thinking":{"type":"enabled","budget_tokens":5000}"#, Invalid, "thinking.budget_tokens"),
        (r#""thinking":{"type":"wild"}"#, Invalid, "thinking.type"),
        (r#""service_tier":"fast"}"#, Invalid, "service_tier"),
        (r#""output_config":{"effort":"wild"}"#, Invalid, "output_config.effort"),
        (r#""output_config":{"format":{"type":"xml"}}"#, Invalid, "output_config.format.type"),
        (r#""mcp_servers":[{"name":"a"}]"#, Unsupported, "mcp_servers"),
        (r#""container":"c"}"#, Unsupported, "container"),
        (r#""tools":[{"type":"web_search_20250305","name":"web_search"}]"#, UnsupportedValue, "tools[0].type"),
        (r#""tools":[{"name":"f"}]"#, Invalid, "tools[0].input_schema"),
        (r#""tools":[{"name":"f","input_schema":{}},{"name":"f","input_schema":{}}]"#, Invalid, "tools[1]"),
        (r#""tool_choice":{"type":"any"}"#, Invalid, "tool_choice"),
        (r#""tool_choice":{"type":"required"}"#, Invalid, "tool_choice.type"),
        (
            r#""tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"tool","name":"g"}"#,
            Invalid,
            "tool_choice.name",
        ),
    ] {
        let body = field(fields).replacen(
            "\"max_tokens\":5000,",
            if fields.contains("max_tokens") { "" } else { "\"max_tokens\":5000," },
            1,
        );
        refused(&body, kind, param);
    }
    for (block_text, kind, param) in [
        (r#"{"type":"document","source":{"type":"text","data":"x"}}"#, UnsupportedValue, "messages[0].content[0].type"),
        (r#"{"source":"a","content":[],"type":"search_result"}"#, UnsupportedValue, "messages[0].content[0].type"),
        (r#"{"type":"wild"}"#, Invalid, "messages[0].content[0].type"),
        (r#"{"text":"x"}"#, Invalid, "messages[0].content[0].type"),
        (r#"{"type":"text"}"#, Invalid, "messages[0].content[0].text"),
        (r#"{"type":"tool_use","id":"1","name":"f","input":{}}"#, Invalid, "messages[0].content[0]"),
        (r#"{"type":"tool_result","content":"x"}"#, Invalid, "messages[0].content[0].tool_use_id"),
        (
            r#"{"type":"tool_result","tool_use_id":"1","content":[{"type":"tool_result","tool_use_id":"1"}]}"#,
            Invalid,
            "messages[0].content[0].content[0].type",
        ),
        (
            r#"{"type":"image","source":{"type":"file","file_id":"f"}}"#,
            UnsupportedValue,
            "messages[0].content[0].source.type",
        ),
        (
            r#"{"type":"image","source":{"type":"url","url":"file:///etc/passwd"}}"#,
            Invalid,
            "messages[0].content[0].source.url",
        ),
        (
            r#"{"type":"image","source":{"type":"base64","media_type":"text/html","data":""}}"#,
            Invalid,
            "messages[0].content[0].source.media_type",
        ),
    ] {
        refused(&block(block_text), kind, param);
    }
    refused(&turn(""), Invalid, "messages");
    refused(&turn(r#"{"role":"tool","content":"x"}"#), Invalid, "messages[0].role");
    refused(&turn(r#"{"role":"user"}"#), Invalid, "messages[0].content");
    refused(&turn(r#"{"role":"user","content":[]}"#), Invalid, "messages[0].content");
    let calling = r#"{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":{}}]}"#;
    refused(&turn(calling), Invalid, "messages");
    let input = calling.replace("{}", "7");
    refused(&turn(&input), Invalid, "messages[0].content[0].input");
}
