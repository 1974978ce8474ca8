//! Structured output: each client's field as the constraint that it asks for, and every refusal.

use penstock_dialects::openai::{ChatCodec, decode_chat, decode_completion, responses};
use penstock_types::{
    ApiError, ApiErrorKind, Bounds, ChatRequest, GrammarSyntax, Message, ProviderCodec, ReasoningEffort, Request,
    ResponseFormat,
};
use proptest::prelude::*;

fn body(fields: &str) -> String {
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{fields}}}"#)
}

fn chat(fields: &str) -> Result<ResponseFormat, ApiError> {
    decode_chat(body(fields).as_bytes(), &Bounds::default()).map(|chat| chat.response_format)
}

fn completion(fields: &str) -> Result<ResponseFormat, ApiError> {
    let body = format!(r#"{{"model":"m","prompt":"a",{fields}}}"#);
    decode_completion(body.as_bytes(), &Bounds::default()).map(|request| request.response_format)
}

fn response(fields: &str) -> Result<ResponseFormat, ApiError> {
    let body = format!(r#"{{"model":"m","input":"a",{fields}}}"#);
    responses(body.as_bytes(), &Bounds::default()).map(|decoded| match decoded.request {
        Request::Chat(chat) => chat.response_format,
        other => panic!("{other:?}"),
    })
}

#[track_caller]
fn check(fields: &str, expected: &ResponseFormat) {
    assert_eq!(chat(fields).as_ref(), Ok(expected), "{fields}");
    assert_eq!(completion(fields).as_ref(), Ok(expected), "{fields}");
    if !fields.contains("response_format") {
        assert_eq!(response(fields).as_ref(), Ok(expected), "{fields}");
    }
}

fn schema(schema: &str) -> ResponseFormat {
    ResponseFormat::JsonSchema { name: "response".into(), description: None, schema: schema.into(), strict: true }
}

fn regex(text: &str) -> ResponseFormat {
    ResponseFormat::Regex(text.into())
}

fn grammar(text: &str, syntax: Option<GrammarSyntax>) -> ResponseFormat {
    ResponseFormat::Grammar { text: text.into(), syntax }
}

fn tag(text: &str) -> ResponseFormat {
    ResponseFormat::StructuralTag(text.into())
}

#[test]
fn every_clients_field_becomes_its_constraint() {
    let object = schema(r#"{"type":"object"}"#);
    for fields in [
        r#""response_format":{"type":"json_object","schema":{"type":"object"}}"#,
        r#""structured_outputs":{"json":{ "type": "object" }}"#,
        r#""structured_outputs":{"json":"{\"type\":\"object\"}"}"#,
        r#""structured_outputs":{"json":{"type":"object"},"regex":null,"disable_any_whitespace":true,"whitespace_pattern":"[ ]?","disable_fallback":true,"disable_additional_properties":false}"#,
        r#""guided_json":{"type":"object"},"guided_decoding_backend":"xgrammar","guided_whitespace_pattern":"\\s*""#,
        r#""guided_json":"{\"type\": \"object\"}""#,
        r#""json_schema":"{\"type\":\"object\"}""#,
        r#""json_schema":{"type":"object"},"grammar":"""#,
    ] {
        check(fields, &object);
    }
    for fields in [
        r#""response_format":{"type":"json_object"}"#,
        r#""response_format":{"type":"json_object","schema":{}}"#,
        r#""structured_outputs":{"json_object":true}"#,
        r#""guided_json_object":true"#,
    ] {
        check(fields, &ResponseFormat::JsonObject);
    }
    for fields in [
        r#""response_format":{"type":"regex","pattern":"a\\d"}"#,
        r#""response_format":{"type":"grammar","syntax":"regex","definition":"a\\d"}"#,
        r#""structured_outputs":{"regex":"a\\d"}"#,
        r#""guided_regex":"a\\d""#,
        r#""regex":"a\\d""#,
    ] {
        check(fields, &regex("a\\d"));
    }
    let choice = ResponseFormat::Choice(vec!["yes".into(), "no".into()]);
    check(r#""structured_outputs":{"choice":["yes","no","yes"]}"#, &choice);
    check(r#""guided_choice":["yes","no"]"#, &choice);
    let root = "root ::= \"a\"";
    let written = r#"root ::= \"a\""#;
    for (fields, syntax) in [
        (format!(r#""structured_outputs":{{"grammar":"{written}"}}"#), None),
        (format!(r#""guided_grammar":"{written}""#), None),
        (format!(r#""response_format":{{"type":"grammar","grammar":"{written}"}}"#), None),
        (
            format!(r#""response_format":{{"type":"grammar","grammar":"{written}","syntax":"lark"}}"#),
            Some(GrammarSyntax::Lark),
        ),
        (format!(r#""grammar":"{written}""#), Some(GrammarSyntax::Gbnf)),
        (format!(r#""ebnf":"{written}""#), Some(GrammarSyntax::Gbnf)),
    ] {
        check(&fields, &grammar(root, syntax));
    }
}

#[test]
fn structural_tags_are_kept_as_compact_text_without_their_type() {
    let old = r#"{"structures":[{"begin":"<f>","schema":{"type":"object"},"end":"</f>"}],"triggers":["<f"]}"#;
    let new = r#"{"format":{"type":"json_schema","json_schema":{}}}"#;
    let quoted = |text: &str| text.replace('"', "\\\"");
    for (written, kept) in [(old, old), (new, new)] {
        let typed = written.replacen('{', r#"{ "type": "structural_tag" , "#, 1);
        check(&format!(r#""response_format":{typed}"#), &tag(kept));
        check(&format!(r#""structured_outputs":{{"structural_tag":"{}"}}"#, quoted(&typed)), &tag(kept));
        check(&format!(r#""structured_outputs":{{"structural_tag":{written}}}"#), &tag(kept));
        check(&format!(r#""structural_tag":"{}""#, quoted(written)), &tag(kept));
    }
    for (given, param, words) in [
        ("{}", "structural_tag", "either format, or structures and triggers"),
        (r#"{"structures":[]}"#, "structural_tag.structures", "must not be empty"),
        (r#"{"triggers":["a"]}"#, "structural_tag", "either format"),
        (r#"{"triggers":["a"],"format":{"type":"x"}}"#, "structural_tag", "either format"),
        (r#"{"triggers":[""],"structures":[]}"#, "structural_tag.triggers[0]", "empty string"),
        (r#"{"structures":[{"begin":"a","end":"b"}]}"#, "structural_tag.structures[0].schema", "missing"),
        (
            r#"{"structures":[{"begin":1,"end":"b","schema":{}}]}"#,
            "structural_tag.structures[0].begin",
            "expected a string",
        ),
        (r#"{"format":{}}"#, "structural_tag.format.type", "missing"),
        (r#"{"format":[]}"#, "structural_tag.format", "expected an object"),
        (r#"{"type":"regex","format":{"type":"x"}}"#, "structural_tag.type", "must be structural_tag"),
    ] {
        refused(&format!(r#""structural_tag":{given}"#), param, ApiErrorKind::Invalid, words);
    }
}

#[test]
fn nothing_asked_for_is_free_text() {
    for fields in [
        r#""response_format":{"type":"text"}"#,
        r#""response_format":null"#,
        r#""structured_outputs":null"#,
        r#""guided_json":null,"regex":null"#,
        r#""grammar":"""#,
        r#""guided_decoding_backend":"outlines""#,
        r#""guided_json_object":false"#,
    ] {
        check(fields, &ResponseFormat::Text);
    }
}

#[track_caller]
fn refused(fields: &str, param: &str, kind: ApiErrorKind, words: &str) {
    for result in [chat(fields), completion(fields)] {
        let error = result.expect_err(&fields[..fields.len().min(200)]);
        assert_eq!((error.kind, error.param.as_deref()), (kind, Some(param)), "{error}");
        assert!(error.message.contains(words) && error.message.len() < 400, "{error}");
    }
}

#[test]
fn one_constraint_may_stand_twice_but_two_may_not() {
    check(r#""guided_regex":"a","structured_outputs":{"regex":"a"}"#, &regex("a"));
    check(r#""guided_grammar":"x","grammar":"x""#, &grammar("x", None));
    let named = r#""response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{}}}"#;
    assert!(
        matches!(chat(&format!(r#"{named},"guided_json":{{}}"#)), Ok(ResponseFormat::JsonSchema { name, .. }) if name == "n")
    );
    for (fields, param, other) in [
        (r#""response_format":{"type":"json_object"},"guided_regex":"a""#, "guided_regex", "response_format"),
        (r#""regex":"a","response_format":{"type":"json_object"}"#, "response_format", "regex"),
        (
            r#""structured_outputs":{"regex":"a","choice":["b"]}"#,
            "structured_outputs.choice",
            "structured_outputs.regex",
        ),
        (r#""structured_outputs":{"regex":"a"},"ebnf":"x ::= y""#, "ebnf", "structured_outputs.regex"),
        (r#""guided_json":{"a":1},"json_schema":{"a":2}"#, "json_schema", "guided_json"),
        (r#""guided_choice":["a"],"structural_tag":{"format":{"type":"x"}}"#, "structural_tag", "guided_choice"),
    ] {
        refused(fields, param, ApiErrorKind::Invalid, &format!("contradicts {other}"));
    }
    let error = response(r#""text":{"format":{"type":"json_object"}},"structured_outputs":{"regex":"a"}"#);
    let error = error.expect_err("two constraints");
    assert_eq!(error.param.as_deref(), Some("structured_outputs.regex"), "{error}");
    assert!(error.message.contains("contradicts text.format"), "{error}");
    let error = response(r#""response_format":{"type":"json_object"}"#).expect_err("another API's field");
    assert!(error.message.contains("use text.format"), "{error}");
}

#[test]
fn constraints_that_are_none_say_so() {
    use ApiErrorKind::{Invalid, TooLarge, UnsupportedValue};
    for (fields, param, words) in [
        (r#""structured_outputs":{}"#, "structured_outputs", "one of json, json_object, regex"),
        (r#""structured_outputs":{"json_object":false}"#, "structured_outputs", "one of json"),
        (r#""structured_outputs":{"jsn":{}}"#, "structured_outputs", "one of json"),
        (r#""structured_outputs":[]"#, "structured_outputs", "expected an object"),
        (r#""structured_outputs":{"json":[]}"#, "structured_outputs.json", "an object or its JSON in a string"),
        (r#""structured_outputs":{"json":"{"}"#, "structured_outputs.json", "the string is not valid JSON"),
        (r#""structured_outputs":{"json":"{} x"}"#, "structured_outputs.json", "the string is not valid JSON"),
        (r#""guided_json":"[]""#, "guided_json", "expected an object, got an array"),
        (r#""guided_json":true"#, "guided_json", "got a boolean"),
        (r#""guided_regex":"""#, "guided_regex", "must not be empty"),
        (r#""regex":7"#, "regex", "expected a string"),
        (r#""guided_grammar":"""#, "guided_grammar", "must not be empty"),
        (r#""grammar":{}"#, "grammar", "expected a string"),
        (r#""guided_choice":[]"#, "guided_choice", "must not be empty"),
        (r#""guided_choice":"a""#, "guided_choice", "expected an array"),
        (r#""guided_choice":["a",""]"#, "guided_choice[1]", "must not be an empty string"),
        (r#""guided_choice":["a",1]"#, "guided_choice[1]", "expected a string"),
        (r#""response_format":{"type":"regex"}"#, "response_format.pattern", "missing"),
        (r#""response_format":{"type":"grammar"}"#, "response_format.grammar", "missing"),
        (r#""response_format":{"type":"grammar","syntax":"yacc"}"#, "response_format.syntax", "must be one of lark"),
        (r#""response_format":{"type":"json_object","schema":[]}"#, "response_format.schema", "expected an object"),
        (r#""response_format":{"type":"structural_tag"}"#, "response_format", "either format"),
    ] {
        refused(fields, param, Invalid, words);
    }
    for (fields, param, words) in [
        (r#""response_format":{"type":"python"}"#, "response_format.type", "\"python\" is not built"),
        (r#""guided_whitespace_pattern":"\\n""#, "guided_whitespace_pattern", "without whitespace"),
        (
            r#""structured_outputs":{"regex":"a","whitespace_pattern":"[ ]+"}"#,
            "structured_outputs.whitespace_pattern",
            "without whitespace",
        ),
        (
            r#""structured_outputs":{"disable_additional_properties":true}"#,
            "structured_outputs.disable_additional_properties",
            "into the schema",
        ),
    ] {
        refused(fields, param, UnsupportedValue, words);
    }
    let long = "x".repeat(131_073);
    for field in ["regex", "guided_regex", "ebnf", "grammar", "guided_grammar"] {
        refused(&format!("\"{field}\":\"{long}\""), field, TooLarge, "more than 131072 bytes");
    }
    let half = "x".repeat(70_000);
    refused(&format!(r#""guided_choice":["{half}","{half}y"]"#), "guided_choice", TooLarge, "more than 131072 bytes");
    let many: Vec<String> = (0..1_025).map(|index| format!("\"{index}\"")).collect();
    refused(&format!(r#""guided_choice":[{}]"#, many.join(",")), "guided_choice", TooLarge, "more than 1024 strings");
    let tag = format!(r#"{{"format":{{"type":"{long}"}}}}"#);
    refused(&format!(r#""structural_tag":{tag}"#), "structural_tag", TooLarge, "more than 131072 bytes");
    let deep = "{\"a\":".repeat(35) + "{}" + &"}".repeat(35);
    refused(&format!(r#""guided_json":{deep}"#), "guided_json", TooLarge, "more than 32 levels");
    let wide = format!(r#"{{"a":"{}"}}"#, "x".repeat(300 << 10));
    refused(&format!(r#""guided_json":{wide}"#), "guided_json", TooLarge, "more than 262144 bytes");
}

proptest! {
    #[test]
    fn texts_of_a_constraint_are_kept_letter_for_letter(text in "\\PC{1,20}", other in "[ -~\n]{1,20}") {
        prop_assume!(text != other);
        let (written, second) = (serde_json::to_string(&text).expect("JSON"), serde_json::to_string(&other).expect("JSON"));
        for (fields, expected) in [
            (format!(r#""structured_outputs":{{"regex":{written}}}"#), ResponseFormat::Regex(text.clone())),
            (format!(r#""guided_grammar":{written}"#), grammar(&text, None)),
            (format!(r#""guided_choice":[{written},{second}]"#), ResponseFormat::Choice(vec![text.clone(), other])),
        ] {
            prop_assert_eq!(chat(&fields), Ok(expected.clone()));
            let request = ChatRequest {
                response_format: expected.clone(),
                ..ChatRequest::new("m".into(), vec![Message { content: Some("x".into()), ..Message::default() }])
            };
            let call = ChatCodec::default().encode(&Request::Chat(Box::new(request)), "m").expect("can be said");
            let again = decode_chat(&call.body, &Bounds::default()).expect("our own decoder takes it");
            prop_assert_eq!(again.response_format, expected);
        }
        let error = chat(&format!(r#""regex":{written},"guided_regex":{second}"#)).expect_err("two constraints");
        prop_assert_eq!(error.param.as_deref(), Some("guided_regex"));
    }
}

#[test]
fn an_unknown_option_is_ignored_and_named() {
    let body = body(r#""structured_outputs":{"regex":"a","strength":9}"#);
    let chat = decode_chat(body.as_bytes(), &Bounds::default()).expect("a good request");
    assert_eq!(chat.ignored, ["structured_outputs.strength"]);
}

#[test]
fn a_budget_of_reasoning_tokens_is_carried() {
    let budget =
        |fields: &str| decode_chat(body(fields).as_bytes(), &Bounds::default()).map(|chat| chat.reasoning_tokens_max);
    let effort = |fields: &str| {
        decode_chat(body(fields).as_bytes(), &Bounds::default()).expect("a good request").reasoning_effort
    };
    assert_eq!(effort(r#""thinking_token_budget":500"#), None);
    assert_eq!(effort(r#""thinking_token_budget":0"#), Some(ReasoningEffort::None));
    assert_eq!(effort(r#""thinking_token_budget":0,"reasoning_effort":"low""#), Some(ReasoningEffort::Low));
    assert_eq!(budget(r#""thinking_token_budget":500"#), Ok(Some(500)));
    assert_eq!(budget(r#""thinking_token_budget":0"#), Ok(Some(0)));
    assert_eq!(budget(r#""thinking_token_budget":-1"#), Ok(None));
    assert_eq!(budget(r#""thinking_token_budget":null"#), Ok(None));
    let error = budget(r#""thinking_token_budget":-2"#).expect_err("below -1");
    assert_eq!(error.param.as_deref(), Some("thinking_token_budget"));
    let error = completion(r#""thinking_token_budget":5"#).expect_err("no reasoning apart");
    assert_eq!((error.kind, error.param.as_deref()), (ApiErrorKind::Unsupported, Some("thinking_token_budget")));
}
