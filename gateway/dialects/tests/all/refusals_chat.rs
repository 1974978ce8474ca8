//! Bad chat completion bodies: parameter, code and words of each refusal.

use penstock_dialects::openai::decode_chat;
use penstock_types::{Bounds, error_body::openai::refusal};

const INVALID: Option<&str> = None;
const PARAMETER: Option<&str> = Some("unsupported_parameter");
const VALUE: Option<&str> = Some("unsupported_value");
const BOUND: Option<&str> = Some("above_maximum");

#[track_caller]
fn check(body: &[u8], param: Option<&str>, code: Option<&str>, words: &str) {
    let shown = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
    let error = decode_chat(body, &Bounds::default()).expect_err(&shown);
    let (status, body) = refusal(&error);
    let answer: serde_json::Value = serde_json::from_slice(&body).expect("an error body is JSON");
    let inner = answer["error"].as_object().expect("an error object");
    assert_eq!(status, 400, "{shown}");
    assert_eq!(inner.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"], "{shown}");
    assert_eq!(inner["type"], "invalid_request_error", "{shown}");
    let message = inner["message"].as_str().expect("a message");
    assert_eq!(inner["param"].as_str(), param, "{shown}: {message}");
    assert_eq!(inner["code"].as_str(), code, "{shown}: {message}");
    assert!(message.contains(words), "{shown}: {message}");
    assert!(message.len() < 600, "says too much of the client's input back: {} bytes", message.len());
}

/// A good request with more fields.
fn with(fields: &str) -> Vec<u8> {
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{fields}}}"#).into_bytes()
}

/// A request with these messages.
fn saying(messages: &str) -> Vec<u8> {
    format!(r#"{{"model":"m","messages":{messages}}}"#).into_bytes()
}

#[test]
fn bodies_that_are_no_request() {
    for (body, param, words) in [
        (&b""[..], None, "unexpected end at byte 0"),
        (b"   ", None, "unexpected end at byte 3"),
        (b"null", None, "must be a JSON object, got null"),
        (b"[]", None, "must be a JSON object, got an array"),
        (b"\"model\"", None, "must be a JSON object, got a string"),
        (b"{\"model\":\"m\"", None, "unexpected end"),
        (b"{\"model\":\"m\"}}", None, "something follows the JSON value"),
        (b"{'model':'m'}", None, "expected a field name in double quotes"),
        (b"{\"model\":\"\xff\"}", None, "invalid UTF-8 at byte 10"),
        (b"{\"model\":\"m\\ud800\"}", None, "a lone surrogate in a string at byte 11"),
        (b"{\"temperature\":NaN}", None, "NaN and Infinity are not JSON"),
        (b"{\"temperature\":-Infinity}", None, "NaN and Infinity are not JSON"),
        (b"{\"x\":\"\x01\"}", None, "a control character"),
        (b"{\"model\":\"a\",\"model\":\"b\"}", Some("model"), "given twice"),
        (b"{\"x\":1,\"\\u0078\":1}", Some("x"), "given twice"),
        (b"{}", Some("model"), "required, but missing"),
        (
            b"{\"model\":null,\"messages\":[{\"role\":\"user\",\"content\":\"\"}]}",
            Some("model"),
            "required, but missing",
        ),
        (b"{\"model\":\"m\"}", Some("messages"), "required, but missing"),
        (b"{\"model\":\"m\",\"messages\":null}", Some("messages"), "required, but missing"),
        (b"{\"model\":7}", Some("model"), "expected a string, got a number"),
        (b"{\"model\":\"\"}", Some("model"), "must not be empty"),
        (b"{\"model\":\"a\\nb\"}", Some("model"), "control characters"),
    ] {
        check(body, param, INVALID, words);
    }
    let deep = format!("{{\"x\":{}", "[".repeat(100_000));
    check(deep.as_bytes(), None, INVALID, "nested deeper than 64 levels");
    check(
        format!("{{\"model\":\"{}\"}}", "é".repeat(257)).as_bytes(),
        Some("model"),
        BOUND,
        "more than 256 characters",
    );
    let many: String = (0..300).map(|index| format!("\"f{index}\":0,")).collect();
    check(format!("{{{many}\"model\":\"m\"}}").as_bytes(), None, BOUND, "more than 256 fields");
}

#[test]
fn messages_that_are_no_conversation() {
    for (messages, param, code, words) in [
        ("[]", "messages", INVALID, "at least one message"),
        ("{}", "messages", INVALID, "expected an array, got an object"),
        ("\"hi\"", "messages", INVALID, "expected an array, got a string"),
        ("[1]", "messages[0]", INVALID, "expected an object, got a number"),
        ("[null]", "messages[0]", INVALID, "expected an object, got null"),
        (r#"[{"content":"x"}]"#, "messages[0].role", INVALID, "required, but missing"),
        (r#"[{"role":"wizard","content":"x"}]"#, "messages[0].role", INVALID, "got \"wizard\""),
        (r#"[{"role":"user"}]"#, "messages[0].content", INVALID, "missing or null"),
        (r#"[{"role":"user","content":null}]"#, "messages[0].content", INVALID, "missing or null"),
        (r#"[{"role":"assistant","content":null}]"#, "messages[0].content", INVALID, "missing or null"),
        (
            r#"[{"role":"user","content":5}]"#,
            "messages[0].content",
            INVALID,
            "expected a string or an array of parts, got a number",
        ),
        (r#"[{"role":"user","content":"a","content":"b"}]"#, "messages[0].content", INVALID, "given twice"),
        (
            r#"[{"role":"user","content":"a"},{"role":"user","content":["x"]}]"#,
            "messages[1].content[0]",
            INVALID,
            "expected an object",
        ),
        (
            r#"[{"role":"user","content":[{"text":"x"}]}]"#,
            "messages[0].content[0].type",
            INVALID,
            "required, but missing",
        ),
        (
            r#"[{"role":"user","content":[{"type":"text"}]}]"#,
            "messages[0].content[0].text",
            INVALID,
            "required, but missing",
        ),
        (
            r#"[{"role":"user","content":[{"type":"text","text":1}]}]"#,
            "messages[0].content[0].text",
            INVALID,
            "expected a string",
        ),
        (r#"[{"role":"user","content":[{"type":"hologram"}]}]"#, "messages[0].content[0].type", INVALID, "hologram"),
        (
            r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}]}]"#,
            "messages[0].content[1].image_url",
            INVALID,
            "missing",
        ),
        (
            r#"[{"role":"user","content":[{"type":"image_url","image_url":7}]}]"#,
            "messages[0].content[0].image_url",
            INVALID,
            "expected a string or an object, got a number",
        ),
        (
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{"detail":"low"}}]}]"#,
            "messages[0].content[0].image_url.url",
            INVALID,
            "missing",
        ),
        (
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]}]"#,
            "messages[0].content[0].image_url.url",
            INVALID,
            "http, https or data",
        ),
        (
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:text/html;base64,AA=="}}]}]"#,
            "messages[0].content[0].image_url.url",
            INVALID,
            "must hold an image",
        ),
        (
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png,AA"}}]}]"#,
            "messages[0].content[0].image_url.url",
            INVALID,
            "base64",
        ),
        (
            r#"[{"role":"system","content":[{"type":"image_url","image_url":{"url":"http://127.0.0.1/"}}]}]"#,
            "messages[0].content",
            INVALID,
            "images are only allowed",
        ),
        (
            r#"[{"role":"user","content":[{"type":"input_image","file_id":"file-1"}]}]"#,
            "messages[0].content[0].file_id",
            PARAMETER,
            "files are not read",
        ),
        (
            r#"[{"role":"user","content":[{"type":"input_audio","input_audio":{}}]}]"#,
            "messages[0].content[0].type",
            VALUE,
            "input_audio",
        ),
        (r#"[{"role":"user","content":[{"type":"file","file":{}}]}]"#, "messages[0].content[0].type", VALUE, "file"),
        (r#"[{"role":"user","content":"x","name":""}]"#, "messages[0].name", INVALID, "must not be empty"),
        (r#"[{"role":"tool","content":"x"}]"#, "messages[0].tool_call_id", INVALID, "required in messages of a tool"),
        (
            r#"[{"role":"user","content":"x","tool_calls":[{"id":"a","function":{"name":"f","arguments":""}}]}]"#,
            "messages[0].tool_calls",
            INVALID,
            "of the assistant",
        ),
        (
            r#"[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":""}}]}]"#,
            "messages[0].tool_calls[0].id",
            INVALID,
            "missing",
        ),
        (
            r#"[{"role":"assistant","tool_calls":[{"id":"a"}]}]"#,
            "messages[0].tool_calls[0].function",
            INVALID,
            "missing",
        ),
        (
            r#"[{"role":"assistant","tool_calls":[{"id":"a","function":{"arguments":""}}]}]"#,
            "messages[0].tool_calls[0].function.name",
            INVALID,
            "missing",
        ),
        (
            r#"[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":{}}}]}]"#,
            "messages[0].tool_calls[0].function.arguments",
            INVALID,
            "expected a string, got an object",
        ),
        (
            r#"[{"role":"assistant","tool_calls":[{"id":"a","type":"custom","custom":{}}]}]"#,
            "messages[0].tool_calls[0].type",
            VALUE,
            "only \"function\"",
        ),
        (r#"[{"role":"assistant","content":"","audio":{"id":"x"}}]"#, "messages[0].audio", PARAMETER, "only text"),
        (
            r#"[{"role":"assistant","content":"","reasoning_content":[]}]"#,
            "messages[0].reasoning_content",
            INVALID,
            "expected a string",
        ),
    ] {
        check(&saying(messages), Some(param), code, words);
    }
}

#[test]
fn sampling_out_of_range_or_of_the_wrong_type() {
    for (fields, param, words) in [
        (r#""temperature":2.1"#, "temperature", "at least 0 and at most 2, got 2.1"),
        (r#""temperature":-0.1"#, "temperature", "at least 0"),
        (r#""temperature":1e999"#, "temperature", "at most 2"),
        (r#""temperature":"1""#, "temperature", "expected a number, got a string"),
        (r#""temperature":[]"#, "temperature", "expected a number, got an array"),
        (r#""top_p":0"#, "top_p", "above 0 and at most 1"),
        (r#""top_p":1e-60"#, "top_p", "above 0"),
        (r#""top_p":1.5"#, "top_p", "at most 1"),
        (r#""top_k":-2"#, "top_k", "must be -1 to"),
        (r#""top_k":1.5"#, "top_k", "expected an integer, got 1.5"),
        (r#""min_p":-1"#, "min_p", "at least 0"),
        (r#""presence_penalty":-2.5"#, "presence_penalty", "at least -2"),
        (r#""frequency_penalty":3"#, "frequency_penalty", "at most 2"),
        (r#""repetition_penalty":0"#, "repetition_penalty", "above 0"),
        (r#""repetition_penalty":11"#, "repetition_penalty", "at most 10"),
        (r#""seed":1.5"#, "seed", "expected an integer"),
        (r#""seed":18446744073709551616"#, "seed", "must be -9223372036854775808 to 18446744073709551615"),
        (r#""seed":"1""#, "seed", "expected a number"),
        (r#""n":0"#, "n", "must be 1 to 128, got 0"),
        (r#""n":129"#, "n", "must be 1 to 128"),
        (r#""n":99999999999999999999999999999999999999999999"#, "n", "expected an integer"),
        (r#""max_tokens":0"#, "max_tokens", "must be 1 to"),
        (r#""max_tokens":-5"#, "max_tokens", "must be 1 to"),
        (r#""max_tokens":4294967296"#, "max_tokens", "to 4294967295"),
        (r#""max_completion_tokens":true"#, "max_completion_tokens", "expected a number, got a boolean"),
        (r#""min_tokens":5,"max_tokens":4"#, "min_tokens", "at most max_tokens (4)"),
        (r#""logprobs":5"#, "logprobs", "expected a boolean"),
        (r#""logprobs":true,"top_logprobs":21"#, "top_logprobs", "must be 0 to 20"),
        (r#""logprob_token_ids":[1]"#, "logprob_token_ids", "only allowed with \"logprobs\": true"),
        (r#""logprobs":true,"logprob_token_ids":["a"]"#, "logprob_token_ids[0]", "expected a number"),
        (r#""top_logprobs":2"#, "top_logprobs", "only allowed with \"logprobs\": true"),
        (r#""bad_words":["a"," "]"#, "bad_words[1]", "must not be blank"),
        (r#""truncate_prompt_tokens":0"#, "truncate_prompt_tokens", "must be -1"),
        (r#""truncate_prompt_tokens":-2"#, "truncate_prompt_tokens", "must be -1 to"),
        (r#""return_tokens_as_token_ids":1"#, "return_tokens_as_token_ids", "expected a boolean"),
        (r#""prompt_logprobs":-1"#, "prompt_logprobs", "must be 0 to 20"),
        (r#""prompt_logprobs":1,"stream":true"#, "prompt_logprobs", "not available with \"stream\": true"),
        (r#""logit_bias":{"5":101}"#, "logit_bias.5", "at most 100"),
        (r#""logit_bias":{"a":1}"#, "logit_bias.a", "must be a token id"),
        (r#""logit_bias":{"-1":1}"#, "logit_bias.-1", "must be a token id"),
        (r#""logit_bias":{"":1}"#, "logit_bias.", "must be a token id"),
        (r#""logit_bias":{"4294967296":1}"#, "logit_bias.4294967296", "must be a token id"),
        (r#""logit_bias":{"7":1,"07":2}"#, "logit_bias", "token 7 is given twice"),
        (r#""logit_bias":[]"#, "logit_bias", "expected an object, got an array"),
        (r#""stop":"""#, "stop", "must not be an empty string"),
        (r#""stop":["a",""]"#, "stop[1]", "must not be an empty string"),
        (r#""stop":[1]"#, "stop[0]", "expected a string"),
        (r#""stop":{}"#, "stop", "expected a string or an array of strings, got an object"),
        (r#""stop_token_ids":[-1]"#, "stop_token_ids[0]", "must be 0 to"),
        (r#""allowed_token_ids":[]"#, "allowed_token_ids", "must not be empty"),
        (r#""ignore_eos":1"#, "ignore_eos", "expected a boolean"),
        (r#""priority":3000000000"#, "priority", "must be -2147483648 to"),
        (r#""cache_salt":"""#, "cache_salt", "must not be empty"),
    ] {
        check(&with(fields), Some(param), INVALID, words);
    }
}

#[test]
fn switches_that_contradict() {
    for (fields, param, words) in [
        (r#""stream":"yes""#, "stream", "expected a boolean, got a string"),
        (r#""stream_options":{"include_usage":true}"#, "stream_options", "only allowed with \"stream\": true"),
        (r#""stream":false,"stream_options":{}"#, "stream_options", "only allowed with"),
        (r#""stream":true,"stream_options":{"include_usage":1}"#, "stream_options.include_usage", "expected a boolean"),
        (r#""stream":true,"stream_options":[]"#, "stream_options", "expected an object"),
        (r#""continue_final_message":true"#, "continue_final_message", "the last message must be the assistant's"),
        (
            r#""continue_final_message":true,"add_generation_prompt":true"#,
            "continue_final_message",
            "not allowed with add_generation_prompt",
        ),
        (r#""reasoning_effort":"huge""#, "reasoning_effort", "must be one of none, minimal"),
        (r#""service_tier":"gold""#, "service_tier", "must be one of auto"),
        (r#""verbosity":"chatty""#, "verbosity", "must be one of low"),
        (r#""metadata":{"a":1}"#, "metadata.a", "expected a string"),
        (r#""prediction":"x""#, "prediction", "expected an object"),
        (r#""prediction":{"type":"content"}"#, "prediction.content", "missing"),
        (r#""prediction":{"content":"x"}"#, "prediction.type", "missing"),
        (r#""prediction":{"type":"tokens","content":"x"}"#, "prediction.type", "must be one of content"),
        (r#""prediction":{"type":"content","content":[{"type":"audio"}]}"#, "prediction.content[0].type", ""),
        (r#""verbosity":"huge""#, "verbosity", "must be one of low, medium, high"),
        (r#""metadata":[]"#, "metadata", "expected an object"),
        (r#""user":5"#, "user", "expected a string"),
        (r#""store":"yes""#, "store", "expected a boolean"),
        (r#""modalities":["smell"]"#, "modalities[0]", "must be one of text, audio"),
        (r#""chat_template_kwargs":[]"#, "chat_template_kwargs", "expected an object"),
        (r#""chat_template_kwargs":{"messages":[]}"#, "chat_template_kwargs.messages", "the gateway sets this one"),
        (r#""chat_template_kwargs":{"a":1,"a":2}"#, "chat_template_kwargs.a", "given twice"),
        (r#""response_format":"json""#, "response_format", "expected an object"),
        (r#""response_format":{}"#, "response_format.type", "missing"),
        (r#""response_format":{"type":"xml"}"#, "response_format.type", "unknown format \"xml\""),
        (r#""response_format":{"type":"json_schema"}"#, "response_format.json_schema", "missing"),
        (
            r#""response_format":{"type":"json_schema","json_schema":{"schema":{}}}"#,
            "response_format.json_schema.name",
            "missing",
        ),
        (
            r#""response_format":{"type":"json_schema","json_schema":{"name":"x"}}"#,
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            r#""response_format":{"type":"json_schema","json_schema":{"name":"x","schema":true}}"#,
            "response_format.json_schema.schema",
            "expected an object",
        ),
    ] {
        check(&with(fields), Some(param), INVALID, words);
    }
}

#[test]
fn tools_that_are_none() {
    let tool = r#""tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]"#;
    for (fields, param, code, words) in [
        (r#""tools":{}"#.to_owned(), "tools", INVALID, "expected an array"),
        (r#""tools":[5]"#.to_owned(), "tools[0]", INVALID, "expected an object"),
        (r#""tools":[{"function":{"name":"f"}}]"#.to_owned(), "tools[0].type", INVALID, "missing"),
        (r#""tools":[{"type":"function"}]"#.to_owned(), "tools[0].function", INVALID, "missing"),
        (r#""tools":[{"type":"function","function":{}}]"#.to_owned(), "tools[0].function.name", INVALID, "missing"),
        (
            r#""tools":[{"type":"function","function":{"name":""}}]"#.to_owned(),
            "tools[0].function.name",
            INVALID,
            "empty",
        ),
        (
            r#""tools":[{"type":"function","function":{"name":"f","parameters":"x"}}]"#.to_owned(),
            "tools[0].function.parameters",
            INVALID,
            "expected an object",
        ),
        (
            r#""tools":[{"type":"function","function":{"name":"f","description":1}}]"#.to_owned(),
            "tools[0].function.description",
            INVALID,
            "expected a string",
        ),
        (
            r#""tools":[{"type":"custom","custom":{"name":"f"}}]"#.to_owned(),
            "tools[0].type",
            VALUE,
            "only \"function\"",
        ),
        (r#""tools":[{"type":"web_search"}]"#.to_owned(), "tools[0].type", VALUE, "got \"web_search\""),
        (
            r#""tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"f"}}]"#
                .to_owned(),
            "tools[1]",
            INVALID,
            "given twice",
        ),
        (r#""tool_choice":"auto""#.to_owned(), "tool_choice", INVALID, "only allowed with tools"),
        (r#""tool_choice":"required""#.to_owned(), "tool_choice", INVALID, "only allowed with tools"),
        (r#""tool_choice":"auto","tools":[]"#.to_owned(), "tool_choice", INVALID, "only allowed with tools"),
        (format!(r#"{tool},"tool_choice":"maybe""#), "tool_choice", INVALID, "must be none, auto, required"),
        (format!(r#"{tool},"tool_choice":5"#), "tool_choice", INVALID, "expected a string or an object"),
        (
            format!(r#"{tool},"tool_choice":{{"type":"function","function":{{"name":"g"}}}}"#),
            "tool_choice.function.name",
            INVALID,
            "no tool is named \"g\"",
        ),
        (format!(r#"{tool},"tool_choice":{{"type":"function"}}"#), "tool_choice.function", INVALID, "missing"),
        (
            format!(r#"{tool},"tool_choice":{{"type":"allowed_tools","allowed_tools":{{}}}}"#),
            "tool_choice.allowed_tools.tools",
            INVALID,
            "missing",
        ),
        (
            format!(r#"{tool},"tool_choice":{{"type":"allowed_tools","allowed_tools":{{"mode":"any","tools":[]}}}}"#),
            "tool_choice.allowed_tools.mode",
            INVALID,
            "must be one of auto, required",
        ),
        (
            format!(r#"{tool},"tool_choice":{{"type":"allowed_tools","allowed_tools":{{"mode":"auto","tools":[]}}}}"#),
            "tool_choice.allowed_tools.tools",
            INVALID,
            "must not be empty",
        ),
        (
            format!(
                r#"{tool},"tool_choice":{{"type":"allowed_tools","allowed_tools":{{"mode":"auto","tools":[{{"type":"mcp"}}]}}}}"#
            ),
            "tool_choice.allowed_tools.tools[0].type",
            VALUE,
            "only \"function\"",
        ),
        (
            format!(
                r#"{tool},"tool_choice":{{"type":"allowed_tools","allowed_tools":{{"mode":"auto","tools":[{{"type":"function","function":{{"name":"g"}}}}]}}}}"#
            ),
            "tool_choice",
            INVALID,
            "no tool is named \"g\"",
        ),
        (format!(r#"{tool},"tool_choice":{{"type":"psychic"}}"#), "tool_choice.type", INVALID, "unknown type"),
        (
            format!(r#"{tool},"tool_choice":{{"type":"custom","custom":{{"name":"f"}}}}"#),
            "tool_choice",
            VALUE,
            "custom",
        ),
        (format!(r#"{tool},"parallel_tool_calls":"no""#), "parallel_tool_calls", INVALID, "expected a boolean"),
    ] {
        check(&with(&fields), Some(param), code, words);
    }
}

#[test]
fn what_is_not_built_says_so() {
    for (field, value) in [
        ("guided_by_voices", "\"a\""),
        ("stop_regex", "\"a\""),
        ("use_beam_search", "true"),
        ("length_penalty", "0.5"),
        ("logits_processors", "[\"os.system\"]"),
        ("custom_logit_processor", "\"a\""),
        ("truncation_side", "\"right\""),
        ("typical_p", "0.5"),
        ("top_n_sigma", "1.5"),
        ("n_predict", "5"),
        ("n_probs", "5"),
        ("kv_transfer_params", "{\"host\":\"10.0.0.1\"}"),
        ("lora_path", "\"/etc\""),
        ("chat_template", "\"{{ x }}\""),
        ("audio", "{}"),
        ("web_search_options", "{}"),
        ("moderation", "{}"),
        ("documents", "[{\"text\":\"a\"}]"),
        ("include_reasoning", "false"),
        ("add_special_tokens", "true"),
    ] {
        check(&with(&format!("\"{field}\":{value}")), Some(field), PARAMETER, &format!("{field}: "));
    }
    check(&with(r#""modalities":["text","audio"]"#), Some("modalities[1]"), VALUE, "only text is built");
}

#[test]
fn everything_is_bounded() {
    let list = |item: &str, count: usize| format!("[{}]", vec![item; count].join(","));
    let turn = r#"{"role":"user","content":"x"}"#;
    check(&saying(&list(turn, 10_001)), Some("messages"), BOUND, "more than 10000 messages");
    let parts = list(r#"{"type":"text","text":"x"}"#, 1_001);
    check(
        &saying(&format!(r#"[{{"role":"user","content":{parts}}}]"#)),
        Some("messages[0].content"),
        BOUND,
        "more than 1000 content parts",
    );
    let calls = list(r#"{"id":"a","function":{"name":"f","arguments":""}}"#, 129);
    check(
        &saying(&format!(r#"[{{"role":"assistant","tool_calls":{calls}}}]"#)),
        Some("messages[0].tool_calls"),
        BOUND,
        "more than 128 tool calls",
    );
    let many: String = (0..40).map(|index| format!("\"f{index}\":0,")).collect();
    check(
        &saying(&format!(r#"[{{{many}"role":"user","content":"x"}}]"#)),
        Some("messages[0]"),
        BOUND,
        "more than 32 fields",
    );

    let tools: Vec<String> =
        (0..1_025).map(|index| format!(r#"{{"type":"function","function":{{"name":"f{index}"}}}}"#)).collect();
    check(&with(&format!("\"tools\":[{}]", tools.join(","))), Some("tools"), BOUND, "more than 1024 tools");
    let tool = |name: &str, parameters: &str| {
        with(&format!(r#""tools":[{{"type":"function","function":{{"name":"{name}","parameters":{parameters}}}}}]"#))
    };
    check(&tool(&"x".repeat(257), "{}"), Some("tools[0].function.name"), BOUND, "more than 256 characters");
    check(
        &tool("f", &format!("{{\"a\":\"{}\"}}", "x".repeat(300 << 10))),
        Some("tools[0]"),
        BOUND,
        "more than 262144 bytes",
    );
    let deep = "{\"a\":".repeat(35) + "{}" + &"}".repeat(35);
    check(&tool("f", &deep), Some("tools[0]"), BOUND, "more than 32 levels of nesting");
    let format = |schema: &str| {
        let schema = format!(r#"{{"name":"x","schema":{schema}}}"#);
        with(&format!(r#""response_format":{{"type":"json_schema","json_schema":{schema}}}"#))
    };
    let schema = Some("response_format.json_schema.schema");
    check(&format(&deep), schema, BOUND, "more than 32 levels of nesting");
    check(&format(&format!("{{\"a\":\"{}\"}}", "x".repeat(300 << 10))), schema, BOUND, "more than 262144 bytes");

    check(&with(&format!("\"stop\":{}", list("\"x\"", 17))), Some("stop"), BOUND, "more than 16 strings");
    check(&with(&format!("\"stop\":\"{}\"", "é".repeat(1_025))), Some("stop"), BOUND, "more than 1024 characters");
    check(
        &with(&format!("\"stop_token_ids\":{}", list("1", 129))),
        Some("stop_token_ids"),
        BOUND,
        "more than 128 token ids",
    );
    check(
        &with(&format!("\"allowed_token_ids\":{}", list("1", 16_385))),
        Some("allowed_token_ids"),
        BOUND,
        "more than 16384 token ids",
    );
    let biases: Vec<String> = (0..1_025).map(|token| format!("\"{token}\":1")).collect();
    check(
        &with(&format!("\"logit_bias\":{{{}}}", biases.join(","))),
        Some("logit_bias"),
        BOUND,
        "more than 1024 entries",
    );
    let pairs: Vec<String> = (0..17).map(|pair| format!("\"{pair}\":\"x\"")).collect();
    check(&with(&format!("\"metadata\":{{{}}}", pairs.join(","))), Some("metadata"), BOUND, "more than 16 fields");
    check(
        &with(&format!("\"metadata\":{{\"a\":\"{}\"}}", "x".repeat(513))),
        Some("metadata.a"),
        BOUND,
        "more than 512 characters",
    );
    check(&with(&format!("\"user\":\"{}\"", "x".repeat(513))), Some("user"), BOUND, "more than 512 characters");

    let kwargs = |json: &str| with(&format!("\"chat_template_kwargs\":{json}"));
    check(
        &kwargs(&format!("{{\"a\":\"{}\"}}", "x".repeat(17 << 10))),
        Some("chat_template_kwargs"),
        BOUND,
        "more than 16384 bytes",
    );
    check(
        &kwargs(&("{\"a\":".repeat(9) + "{}" + &"}".repeat(9))),
        Some("chat_template_kwargs"),
        BOUND,
        "more than 8 levels",
    );
    let names: Vec<String> = (0..65).map(|name| format!("\"a{name}\":0")).collect();
    check(&kwargs(&format!("{{{}}}", names.join(","))), Some("chat_template_kwargs"), BOUND, "more than 64 fields");
}
