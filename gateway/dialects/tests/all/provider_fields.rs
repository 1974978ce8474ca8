//! The list of fields agrees with what every encoder writes, and no field of a request is missing from it.

use penstock_dialects::openai::{ChatCodec, ResponsesCodec, decode_chat};
use penstock_dialects::provider_fields::{
    Api, CHAT, CHAT_APIS, COMPLETE, COMPLETE_APIS, EMBED, EMBED_APIS, Fate, RERANK, Row,
};
use penstock_dialects::{anthropic, bedrock, gemini};
use penstock_types::request::Verbosity;
use penstock_types::{
    ApiErrorKind, Bounds, ChatRequest, CompleteRequest, EmbedRequest, GrammarSyntax, Message, Prompt, PromptTail,
    ProviderCodec, ReasoningEffort, Request, RerankRequest, ResponseFormat, Role, SamplingParams, StreamOptions,
    TokenNames, Tool, ToolChoice,
};
use serde_json::{Value, json};

/// Names of the fields of a struct; a new field does not compile before it is named here.
macro_rules! fields {
    ($type:ident { $($field:ident),* $(,)? }) => {{
        fn _all(request: $type) {
            let $type { $($field: _),* } = request;
        }
        [$(stringify!($field)),*]
    }};
}

fn codec(api: Api) -> (Box<dyn ProviderCodec>, &'static str) {
    match api {
        Api::OpenAi => (Box::new(ChatCodec::strict()), "m"),
        Api::Compatible => (Box::new(ChatCodec::default()), "m"),
        Api::Responses => (Box::new(ResponsesCodec::default()), "m"),
        // A model that takes every field of the API, as the other fields stand.
        Api::Anthropic => (Box::new(anthropic::Codec::default()), "claude-3-7-sonnet"),
        Api::Gemini => (Box::new(gemini::Codec::default()), "gemini-2.5-pro"),
        Api::Bedrock => (Box::new(bedrock::Codec), "anthropic.claude-3-7-sonnet"),
    }
}

fn user(text: &str) -> Message {
    Message { role: Role::User, content: Some(text.into()), ..Message::default() }
}

fn chat(change: impl FnOnce(&mut ChatRequest)) -> ChatRequest {
    let mut chat = ChatRequest::new("named by the client".into(), vec![user("hi")]);
    change(&mut chat);
    chat
}

/// A request that asks for nothing by `field`, and one that does and differs in nothing else.
fn chats(field: &str) -> (ChatRequest, ChatRequest) {
    let tools = |chat: &mut ChatRequest| {
        chat.tools = ["f", "g", "h"].map(|name| Tool::function(name.into(), None, None, false)).to_vec();
        chat.tool_choice = ToolChoice::Auto;
    };
    let before = match field {
        "parallel_tool_calls" => chat(tools),
        field if field.starts_with("tool_choice") => chat(tools),
        "sampling.include_stop" => chat(|chat| chat.sampling.stop = vec!["x".into()]),
        "continue_final_message" => chat(|chat| {
            chat.messages.push(Message { role: Role::Assistant, ..user("so") });
            chat.add_generation_prompt = false;
        }),
        _ => chat(|_| {}),
    };
    let mut after = before.clone();
    let sampling = &mut after.sampling;
    let format = &mut after.response_format;
    let allowed = |required| ToolChoice::Allowed { names: vec!["g".into(), "h".into()], required };
    match field {
        "model" => after.model = "another".into(),
        "messages" => after.messages.push(user("more")),
        "tools" => tools(&mut after),
        "tool_choice: none" => after.tool_choice = ToolChoice::None,
        "tool_choice: required" => after.tool_choice = ToolChoice::Required,
        "tool_choice: a function" => after.tool_choice = ToolChoice::Named("g".into()),
        "tool_choice: allowed tools" => after.tool_choice = allowed(false),
        "tool_choice: allowed tools, required" => after.tool_choice = allowed(true),
        "parallel_tool_calls" => after.parallel_tool_calls = false,
        "response_format: json_object" => *format = ResponseFormat::JsonObject,
        "response_format: json_schema" => *format = schema(),
        "response_format: regex" => *format = ResponseFormat::Regex("a+".into()),
        "response_format: choice" => *format = ResponseFormat::Choice(vec!["a".into(), "b".into()]),
        "response_format: grammar" => *format = grammar(),
        "response_format: structural_tag" => *format = ResponseFormat::StructuralTag(r#"{"format":{}}"#.into()),
        "shows_one_call" => after.shows_one_call = true,
        "n" => after.n = 2,
        "stream" => after.stream = Some(StreamOptions::default()),
        "logprobs" => after.logprobs = Some(2),
        "prompt_logprobs" => after.prompt_logprobs = Some(1),
        "reasoning_effort" => after.reasoning_effort = Some(ReasoningEffort::High),
        "reasoning_tokens_max" => after.reasoning_tokens_max = Some(2_000),
        "verbosity" => after.verbosity = Some(Verbosity::Low),
        "user" => after.user = Some("u".into()),
        "cache_key" => after.cache_key = Some("k".into()),
        "template_kwargs" => after.template_kwargs = Some(r#"{"a":1}"#.into()),
        "add_generation_prompt" => after.add_generation_prompt = false,
        "continue_final_message" => after.continue_final_message = true,
        "echo" => after.echo = true,
        "prompt_tail" => after.prompt_tail = Some(PromptTail::Tokens(5)),
        "truncates" => after.truncates = true,
        "keep_special_tokens" => after.keep_special_tokens = true,
        "return_token_ids" => after.return_token_ids = true,
        "token_names" => after.token_names = TokenNames::Ids,
        "cache_salt" => after.cache_salt = Some("s".into()),
        "priority" => after.priority = 3,
        "ignored" => after.ignored = vec!["x".into()],
        "sampling.temperature" => sampling.temperature = Some(0.5),
        "sampling.top_p" => sampling.top_p = Some(0.5),
        "sampling.top_k" => sampling.top_k = Some(5),
        "sampling.min_p" => sampling.min_p = Some(0.5),
        "sampling.presence_penalty" => sampling.presence_penalty = 1.0,
        "sampling.frequency_penalty" => sampling.frequency_penalty = 1.0,
        "sampling.repetition_penalty" => sampling.repetition_penalty = Some(1.5),
        "sampling.logit_bias" => sampling.logit_bias = vec![(1, 2.0)],
        "sampling.seed" => sampling.seed = Some(7),
        "sampling.max_tokens" => sampling.max_tokens = Some(77),
        "sampling.min_tokens" => sampling.min_tokens = 7,
        "sampling.ignore_eos" => sampling.ignore_eos = true,
        "sampling.include_stop" => sampling.include_stop = true,
        "sampling.stop" => sampling.stop = vec!["x".into()],
        "sampling.stop_token_ids" => sampling.stop_token_ids = vec![5],
        "sampling.allowed_token_ids" => sampling.allowed_token_ids = vec![5],
        "sampling.bad_words" => sampling.bad_words = vec!["x".into()],
        "sampling.logprob_token_ids" => sampling.logprob_token_ids = vec![5],
        other => panic!("{other} has a row, but no sample"),
    }
    (before, after)
}

/// A schema that is sent with `strict`: closed, and with all its properties required.
fn schema() -> ResponseFormat {
    let schema = r#"{"type":"object","properties":{},"additionalProperties":false}"#.into();
    ResponseFormat::JsonSchema { name: "x".into(), description: None, schema, strict: true }
}

fn grammar() -> ResponseFormat {
    ResponseFormat::Grammar { text: "root ::= \"a\"".into(), syntax: Some(GrammarSyntax::Gbnf) }
}

fn completes(field: &str) -> (CompleteRequest, CompleteRequest) {
    let before = CompleteRequest {
        model: "named by the client".into(),
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
    let mut after = before.clone();
    let format = &mut after.response_format;
    match field {
        "model" => after.model = "another".into(),
        "prompts" => after.prompts.push(Prompt::Text("b".into())),
        "sampling" => after.sampling.temperature = Some(0.5),
        "n" => (after.n, after.best_of) = (2, 2),
        "best_of" => after.best_of = 2,
        "response_format: json_object" => *format = ResponseFormat::JsonObject,
        "response_format: json_schema" => *format = schema(),
        "response_format: regex" => *format = ResponseFormat::Regex("a+".into()),
        "response_format: choice" => *format = ResponseFormat::Choice(vec!["a".into()]),
        "response_format: grammar" => *format = grammar(),
        "response_format: structural_tag" => *format = ResponseFormat::StructuralTag(r#"{"format":{}}"#.into()),
        "echo" => after.echo = true,
        "suffix" => after.suffix = Some("!".into()),
        "stream" => after.stream = Some(StreamOptions::default()),
        "logprobs" => after.logprobs = Some(2),
        "prompt_logprobs" => after.prompt_logprobs = Some(1),
        "keep_special_tokens" => after.keep_special_tokens = true,
        "return_token_ids" => after.return_token_ids = true,
        "token_names" => after.token_names = TokenNames::Ids,
        "prompt_tail" => after.prompt_tail = Some(PromptTail::Fitting),
        "cache_salt" => after.cache_salt = Some("s".into()),
        "user" => after.user = Some("u".into()),
        "cache_key" => after.cache_key = Some("k".into()),
        "priority" => after.priority = 3,
        "ignored" => after.ignored = vec!["x".into()],
        other => panic!("{other} has a row, but no sample"),
    }
    (before, after)
}

fn embeds(field: &str) -> (EmbedRequest, EmbedRequest) {
    let before = EmbedRequest {
        model: "named by the client".into(),
        inputs: vec![Prompt::Text("a".into())],
        dimensions: None,
        task: None,
        truncate: false,
        user: None,
        ignored: Vec::new(),
    };
    let mut after = before.clone();
    match field {
        "model" => after.model = "another".into(),
        "inputs" => after.inputs.push(Prompt::Text("b".into())),
        "dimensions" => after.dimensions = Some(8),
        "task" => after.task = Some("RETRIEVAL_QUERY".into()),
        "truncate" => after.truncate = true,
        "user" => after.user = Some("u".into()),
        "ignored" => after.ignored = vec!["x".into()],
        other => panic!("{other} has a row, but no sample"),
    }
    (before, after)
}

fn reranks(field: &str) -> (RerankRequest, RerankRequest) {
    let before = RerankRequest {
        model: "named by the client".into(),
        query: String::new(),
        documents: vec!["d".into()],
        top_n: None,
        return_documents: false,
        ignored: Vec::new(),
    };
    let mut after = before.clone();
    match field {
        "model" => after.model = "another".into(),
        "query" => after.query = "q".into(),
        "documents" => after.documents.push("e".into()),
        "top_n" => after.top_n = Some(1),
        "return_documents" => after.return_documents = true,
        "ignored" => after.ignored = vec!["x".into()],
        other => panic!("{other} has a row, but no sample"),
    }
    (before, after)
}

/// Asks each API for the field of each row and compares its encoder's doing with the row.
fn check<T: Clone, const N: usize>(
    rows: &[Row<T, N>],
    columns: [Api; N],
    sample: impl Fn(&str) -> (T, T),
    wrap: impl Fn(T) -> Request,
) {
    for Row { field, param, is_asked, fates } in rows {
        let (before, after) = sample(field);
        assert!(*field == "model" || !is_asked(&before), "{field}");
        assert!(is_asked(&after), "{field}");
        for (api, fate) in columns.into_iter().zip(fates) {
            let (codec, model) = codec(api);
            let plain =
                || codec.encode(&wrap(before.clone()), model).unwrap_or_else(|error| panic!("{field}: {error}"));
            let asked = codec.encode(&wrap(after.clone()), model);
            match (fate, asked) {
                (Fate::Written, Ok(call)) => assert_ne!(call, plain(), "{field} at {api:?} is not written"),
                (Fate::LeftOut(why), Ok(call)) => {
                    assert_eq!(call, plain(), "{field} at {api:?} is written");
                    assert!(!why.is_empty(), "{field} at {api:?}");
                }
                (Fate::Refused(what), Err(error)) => {
                    assert_eq!(error.param.as_deref(), Some(*param), "{field} at {api:?}: {error}");
                    assert!(error.message.starts_with(&format!("{param}: ")), "{error}");
                    assert!(error.message.contains(what), "{error}");
                    let value = error.kind == ApiErrorKind::UnsupportedValue;
                    assert!(value || error.kind == ApiErrorKind::Unsupported, "{error}");
                    assert_eq!(value, field.contains(':'), "{error}");
                }
                (fate, asked) => panic!("{field} at {api:?}: {fate:?}, but {asked:?}"),
            }
        }
    }
}

/// Checks that each name is a field of some row, and that no row is given twice.
fn check_names<T, const N: usize>(rows: &[Row<T, N>], names: &[&str], prefix: &str) {
    for name in names {
        let name = format!("{prefix}{name}");
        let has = |row: &&Row<T, N>| row.field.split(':').next() == Some(&name);
        assert!(rows.iter().any(|row| has(&row)), "{name} has no row");
    }
    for row in rows {
        assert_eq!(rows.iter().filter(|other| other.field == row.field).count(), 1, "{}", row.field);
    }
}

#[test]
fn encoders_do_what_the_list_says() {
    check(CHAT, CHAT_APIS, chats, |chat| Request::Chat(Box::new(chat)));
    check(COMPLETE, COMPLETE_APIS, completes, |complete| Request::Complete(Box::new(complete)));
    check(EMBED, EMBED_APIS, embeds, |embed| Request::Embed(Box::new(embed)));
    check(RERANK, COMPLETE_APIS, reranks, |rerank| Request::Rerank(Box::new(rerank)));
}

/// Body that an API is sent for a conversation with three tools, or with none.
fn body(api: Api, has_tools: bool, change: impl FnOnce(&mut ChatRequest)) -> Value {
    let (codec, model) = codec(api);
    let mut chat = chat(|_| {});
    if has_tools {
        chat.tools = ["f", "g", "h"].map(|name| Tool::function(name.into(), None, None, false)).to_vec();
        chat.tool_choice = ToolChoice::Auto;
    }
    change(&mut chat);
    let call = codec.encode(&Request::Chat(Box::new(chat)), model).expect("can be said");
    serde_json::from_slice(&call.body).expect("JSON")
}

#[test]
fn allowed_tools_in_the_words_of_each_api() {
    let asked = |api, required| {
        let names = vec!["g".to_owned(), "h".to_owned()];
        body(api, true, |chat| chat.tool_choice = ToolChoice::Allowed { names, required })
    };
    let names = |tools: &Value, path: &str| -> Vec<String> {
        let all = tools.as_array().expect("a list").iter();
        all.map(|tool| tool.pointer(path).and_then(Value::as_str).expect("a name").to_owned()).collect()
    };
    let (some, all) = (["g", "h"], ["f", "g", "h"]);
    for (required, mode) in [(false, "auto"), (true, "required")] {
        let body = asked(Api::OpenAi, required);
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        let allowed = json!({"mode": mode, "tools": [tool("g"), tool("h")]});
        assert_eq!(body["tool_choice"], json!({"type": "allowed_tools", "allowed_tools": allowed}));
        assert_eq!(names(&body["tools"], "/function/name"), all);

        let body = asked(Api::Responses, required);
        let tool = |name: &str| json!({"type": "function", "name": name});
        let choice = json!({"type": "allowed_tools", "mode": mode, "tools": [tool("g"), tool("h")]});
        assert_eq!(body["tool_choice"], choice);
        assert_eq!(names(&body["tools"], "/name"), all);

        let body = asked(Api::Compatible, required);
        assert_eq!(body.get("tool_choice"), required.then(|| json!("required")).as_ref());
        assert_eq!(names(&body["tools"], "/function/name"), some);

        let body = asked(Api::Anthropic, required);
        assert_eq!(body.get("tool_choice"), required.then(|| json!({"type": "any"})).as_ref());
        assert_eq!(names(&body["tools"], "/name"), some);

        let body = asked(Api::Gemini, required);
        let mode = if required { "ANY" } else { "VALIDATED" };
        let calling = json!({"mode": mode, "allowedFunctionNames": some});
        assert_eq!(body["toolConfig"]["functionCallingConfig"], calling);
        assert_eq!(names(&body["tools"][0]["functionDeclarations"], "/name"), all);

        let body = asked(Api::Bedrock, required);
        assert_eq!(body["toolConfig"].get("toolChoice"), required.then(|| json!({"any": {}})).as_ref());
        assert_eq!(names(&body["toolConfig"]["tools"], "/toolSpec/name"), some);
    }
    // A demand of one call at a time stays with the choice.
    let single = body(Api::Anthropic, true, |chat| {
        chat.tool_choice = ToolChoice::Allowed { names: vec!["g".into()], required: false };
        chat.parallel_tool_calls = false;
    });
    assert_eq!(single["tool_choice"], json!({"type": "auto", "disable_parallel_tool_use": true}));
}

#[test]
fn constraints_in_the_words_of_each_api() {
    let asked = |api, format: ResponseFormat| body(api, false, |chat| chat.response_format = format);
    let guided = |format| asked(Api::Compatible, format)["structured_outputs"].take();
    assert_eq!(guided(ResponseFormat::Regex("a\\d".into())), json!({"regex": "a\\d"}));
    assert_eq!(guided(ResponseFormat::Choice(vec!["a".into(), "b".into()])), json!({"choice": ["a", "b"]}));
    assert_eq!(guided(grammar()), json!({"grammar": "root ::= \"a\""}));
    let tag = ResponseFormat::StructuralTag(r#"{"format":{"type":"x"}}"#.into());
    let format = asked(Api::Compatible, tag)["response_format"].take();
    assert_eq!(format, json!({"type": "structural_tag", "format": {"type": "x"}}));
    let choice = ResponseFormat::Choice(vec!["a".into(), "b".into()]);
    let config = asked(Api::Gemini, choice)["generationConfig"].take();
    let schema = json!({"type": "STRING", "enum": ["a", "b"]});
    assert_eq!(config, json!({"responseMimeType": "text/x.enum", "responseSchema": schema}));
}

#[test]
fn what_a_compatible_server_is_sent_reads_back_as_the_same_constraint() {
    let formats = [
        ResponseFormat::JsonObject,
        schema(),
        ResponseFormat::Regex("a\\d\"".into()),
        ResponseFormat::Choice(vec!["a".into(), "b\n".into()]),
        ResponseFormat::Grammar { text: "start: \"a\"".into(), syntax: None },
        ResponseFormat::StructuralTag(r#"{"format":{"type":"x"}}"#.into()),
    ];
    for format in formats {
        let request = chat(|chat| chat.response_format = format.clone());
        let call = ChatCodec::default().encode(&Request::Chat(Box::new(request)), "m").expect("can be said");
        let again = decode_chat(&call.body, &Bounds::default()).expect("our own decoder takes it");
        assert_eq!(again.response_format, format);
    }
}

#[test]
fn every_field_of_a_request_has_a_row() {
    let chat = fields!(ChatRequest {
        model,
        messages,
        tools,
        tool_choice,
        parallel_tool_calls,
        shows_one_call,
        response_format,
        sampling,
        n,
        stream,
        logprobs,
        prompt_logprobs,
        reasoning_effort,
        reasoning_tokens_max,
        verbosity,
        user,
        cache_key,
        template_kwargs,
        add_generation_prompt,
        continue_final_message,
        echo,
        prompt_tail,
        truncates,
        keep_special_tokens,
        return_token_ids,
        token_names,
        cache_salt,
        priority,
        ignored,
    });
    let apart: Vec<&str> = chat.into_iter().filter(|name| *name != "sampling").collect();
    check_names(CHAT, &apart, "");
    let sampling = fields!(SamplingParams {
        temperature,
        top_p,
        top_k,
        min_p,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        logit_bias,
        seed,
        max_tokens,
        min_tokens,
        ignore_eos,
        stop,
        stop_token_ids,
        include_stop,
        allowed_token_ids,
        bad_words,
        logprob_token_ids,
    });
    check_names(CHAT, &sampling, "sampling.");
    let complete = fields!(CompleteRequest {
        model,
        prompts,
        sampling,
        n,
        best_of,
        response_format,
        echo,
        suffix,
        stream,
        logprobs,
        prompt_logprobs,
        keep_special_tokens,
        return_token_ids,
        token_names,
        prompt_tail,
        cache_salt,
        user,
        cache_key,
        priority,
        ignored,
    });
    check_names(COMPLETE, &complete, "");
    check_names(EMBED, &fields!(EmbedRequest { model, inputs, dimensions, task, truncate, user, ignored }), "");
    let rerank = fields!(RerankRequest { model, query, documents, top_n, return_documents, ignored });
    check_names(RERANK, &rerank, "");
}

#[test]
fn every_value_of_a_format_and_a_choice_has_a_row() {
    // A new variant does not compile before it is named here.
    let format = |format: &ResponseFormat| match format {
        ResponseFormat::Text => None,
        ResponseFormat::JsonObject => Some("response_format: json_object"),
        ResponseFormat::JsonSchema { .. } => Some("response_format: json_schema"),
        ResponseFormat::Regex(_) => Some("response_format: regex"),
        ResponseFormat::Choice(_) => Some("response_format: choice"),
        ResponseFormat::Grammar { .. } => Some("response_format: grammar"),
        ResponseFormat::StructuralTag(_) => Some("response_format: structural_tag"),
    };
    let choice = |choice: &ToolChoice| match choice {
        ToolChoice::Auto => None,
        ToolChoice::None => Some("tool_choice: none"),
        ToolChoice::Required => Some("tool_choice: required"),
        ToolChoice::Named(_) => Some("tool_choice: a function"),
        ToolChoice::Allowed { required: false, .. } => Some("tool_choice: allowed tools"),
        ToolChoice::Allowed { required: true, .. } => Some("tool_choice: allowed tools, required"),
    };
    for row in CHAT {
        let (_, after) = chats(row.field);
        let named = if row.field.starts_with("response_format") {
            format(&after.response_format)
        } else if row.field.starts_with("tool_choice") {
            choice(&after.tool_choice)
        } else {
            continue;
        };
        assert_eq!(named, Some(row.field));
    }
}
