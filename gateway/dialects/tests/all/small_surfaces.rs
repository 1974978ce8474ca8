//! Models, tokenize, detokenize, errors.

use bytes::BytesMut;
use penstock_dialects::openai::{
    ModelCard, decode_chat, decode_completion, decode_detokenize, decode_tokenize, model, models_list,
};
use penstock_types::{
    Bounds, TokenizeInput,
    error_body::openai::{error_body, error_event},
    error_shape,
};
use penstock_types::{Request, Role, ToolChoice};
use penstock_types::{
    check_token_ids,
    tokenize::{detokenize_body, tokenize_body},
};

fn text(body: &[u8]) -> &str {
    std::str::from_utf8(body).expect("UTF-8")
}

#[test]
fn models() {
    let (id, owned_by) = ("a\"b".into(), "penstock".into());
    let small = ModelCard { id, created: 7, owned_by, context_tokens: Some(4096), task: Some("embed"), parent: None };
    let parent = Some("a\"b".into());
    let other = ModelCard { id: "c".into(), context_tokens: None, task: None, parent, ..small.clone() };
    let rights = r#""allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false"#;
    let permission = |id: &str| {
        format!(r#""permission":[{{"id":"modelperm-{id}","object":"model_permission","created":7,{rights}}}]"#)
    };
    let one = format!(
        r#"{{"id":"a\"b","object":"model","created":7,"owned_by":"penstock","root":"a\"b","parent":null,"max_model_len":4096,"task":"embed",{}}}"#,
        permission(r#"a\"b"#)
    );
    let two = format!(
        r#"{{"id":"c","object":"model","created":7,"owned_by":"penstock","root":"c","parent":"a\"b",{}}}"#,
        permission("c")
    );
    assert_eq!(text(&model(&small)), one);
    assert_eq!(text(&models_list(&[small, other])), format!(r#"{{"object":"list","data":[{one},{two}]}}"#));
    assert_eq!(text(&models_list(&[])), r#"{"object":"list","data":[]}"#);
}

#[test]
fn tokenize_takes_text_or_a_conversation() {
    let decode = |body: &str| decode_tokenize(body.as_bytes(), &Bounds::default());
    let request = decode(r#"{"prompt":"","add_special_tokens":false,"return_token_strs":true}"#).expect("good");
    assert!(request.return_token_strs && request.model.is_none());
    assert!(matches!(request.input, TokenizeInput::Text { prompt, add_special_tokens: false } if prompt.is_empty()));

    let chat = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f"}}],
        "chat_template_kwargs":{"a":1},"reasoning_effort":"none","later":1}"#;
    let TokenizeInput::Chat { chat, add_special_tokens: false } = decode(chat).expect("good").input else {
        panic!("a conversation")
    };
    assert_eq!((chat.model.as_str(), chat.messages[0].role, chat.tool_choice), ("m", Role::User, ToolChoice::Auto));
    assert_eq!((chat.template_kwargs.as_deref(), chat.add_generation_prompt), (Some(r#"{"a":1}"#), true));
    assert_eq!(chat.ignored, ["later"]);
    let special = decode(r#"{"messages":[{"role":"user","content":"x"}],"add_special_tokens":true}"#).expect("good");
    assert!(matches!(special.input, TokenizeInput::Chat { add_special_tokens: true, .. }));
}

#[test]
fn tokenize_refuses() {
    let turn = r#""messages":[{"role":"user","content":"x"}]"#;
    for (body, param) in [
        ("{}".to_owned(), "prompt"),
        (r#"{"prompt":["a"]}"#.to_owned(), "prompt"),
        (format!(r#"{{"prompt":"a",{turn}}}"#), "prompt"),
        (format!(r#"{{{turn},"add_special_tokens":1}}"#), "add_special_tokens"),
        (format!(r#"{{{turn},"continue_final_message":true}}"#), "continue_final_message"),
        (format!(r#"{{{turn},"chat_template":"x"}}"#), "chat_template"),
        (r#"{"messages":[]}"#.to_owned(), "messages"),
    ] {
        let error = decode_tokenize(body.as_bytes(), &Bounds::default()).expect_err(&body);
        assert_eq!(error.param.as_deref(), Some(param), "{body}: {error}");
    }
    for (body, param) in [("{}", "tokens"), (r#"{"tokens":"a"}"#, "tokens"), (r#"{"tokens":[1,-1]}"#, "tokens[1]")] {
        let error = decode_detokenize(body.as_bytes(), &Bounds::default()).expect_err(body);
        assert_eq!(error.param.as_deref(), Some(param), "{body}: {error}");
    }
}

#[test]
fn tokenize_answers() {
    assert_eq!(
        text(&tokenize_body(&[1, 20], 4096, None)),
        r#"{"count":2,"max_model_len":4096,"tokens":[1,20],"token_strs":null}"#
    );
    let strings = ["a".to_owned(), "\"".to_owned()];
    assert!(text(&tokenize_body(&[1, 2], 8, Some(&strings))).ends_with(r#""token_strs":["a","\""]}"#));
    assert_eq!(decode_detokenize(br#"{"tokens":[5]}"#, &Bounds::default()).expect("good").tokens, [5]);
    assert_eq!(text(&detokenize_body("a\n\u{7f}")), "{\"prompt\":\"a\\n\u{7f}\"}");
}

#[test]
fn errors_have_all_four_keys() {
    for shape in error_shape::SHAPES {
        let body = error_body(shape, None, "why");
        let value: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        let error = value["error"].as_object().expect("an object");
        assert_eq!(error.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
        assert!(error["type"].is_string() && (error["code"].is_string() || error["code"].is_null()), "{shape:?}");
        assert!((400..=599).contains(&shape.status), "{shape:?}");
        // SDKs retry server errors, 408, 409 and 429 by themselves: an error that the client must correct must have
        // none of these.
        let retried = shape.status >= 500 || matches!(shape.status, 408 | 409 | 429);
        let passing = shape.kind != "invalid_request_error" || shape == error_shape::REQUEST_TIMEOUT;
        assert_eq!(retried, passing && shape != error_shape::FORBIDDEN, "{shape:?}");
    }
    let mut out = BytesMut::new();
    error_event(error_shape::INTERNAL, Some("a"), "line\nbreak", &mut out);
    assert_eq!(
        text(&out),
        "data: {\"error\":{\"message\":\"line\\nbreak\",\"type\":\"server_error\",\"param\":\"a\",\"code\":\"internal_error\"}}\n\n"
    );
}

#[test]
fn token_ids_beyond_the_vocabulary_are_named() {
    let bounds = Bounds::default();
    let complete = |fields: &str| {
        let body = format!(r#"{{"model":"m",{fields}}}"#);
        Request::Complete(Box::new(decode_completion(body.as_bytes(), &bounds).expect("good")))
    };
    let chat = |fields: &str| {
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"x"}}],{fields}}}"#);
        Request::Chat(Box::new(decode_chat(body.as_bytes(), &bounds).expect("good")))
    };
    for (request, param) in [
        (complete(r#""prompt":[1,99]"#), None),
        (complete(r#""prompt":"x","stop_token_ids":[100]"#), None),
        (complete(r#""prompt":[1,100]"#), Some("prompt[1]")),
        (complete(r#""prompt":[[1],[2,100]]"#), Some("prompt[1][1]")),
        (complete(r#""prompt":"x","allowed_token_ids":[100]"#), Some("allowed_token_ids[0]")),
        (chat(r#""logit_bias":{"99":1}"#), None),
        (chat(r#""logit_bias":{"4294967295":1,"5":1}"#), Some("logit_bias.4294967295")),
    ] {
        let refused = check_token_ids(&request, 100).err();
        assert_eq!(refused.as_ref().and_then(|error| error.param.as_deref()), param, "{refused:?}");
    }
}
