//! Ollama's API: requests, answers, and both read back by the codec of its other side.

use bytes::BytesMut;
use penstock_dialects::ollama::{Codec, chat, embed, generate, model, model_asked, models_list, running};
use penstock_dialects::openai::ModelCard;
use penstock_types::peek::peek;
use penstock_types::request::{ImageSource, Part, ReasoningEffort, Request, ResponseFormat, Role};
use penstock_types::{
    AnswerMeta, Bounds, ChatEvent, ChatRequest, Decoded, ErrorShape, FinishReason, Prompt, ProviderCodec, Surface,
    TokenLogprob, TokenPlace, Usage,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn bounds() -> Bounds {
    Bounds::default()
}

#[track_caller]
fn chat_of(body: &Value) -> ChatRequest {
    match chat(body.to_string().as_bytes(), &bounds()).expect("good").request {
        Request::Chat(chat) => *chat,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn fault_of(body: &Value) -> (Option<String>, String) {
    match chat(body.to_string().as_bytes(), &bounds()) {
        Err(error) => (error.param, error.message),
        Ok(_) => panic!("{body} was taken"),
    }
}

fn asking(more: Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let Value::Object(more) = more else { panic!("an object") };
    body.as_object_mut().expect("an object").extend(more);
    body
}

#[test]
fn a_conversation_is_read() {
    let read = chat_of(&json!({
        "model": "m:8b",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is it?", "images": ["iVBORw0KGgoAAA=="]},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
                {"function": {"index": 0, "name": "look", "arguments": {"at": [1, 2]}}},
                {"id": "x", "function": {"name": "look", "arguments": {}}},
            ]},
            {"role": "tool", "tool_name": "look", "content": "a cat"},
            {"role": "tool", "tool_call_id": "x", "content": "a dog"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "options": {"temperature": 0.5, "num_predict": 9, "top_k": 0, "seed": 7, "stop": ["\n"], "repeat_penalty": 1.1, "num_ctx": 4096, "num_thread": 2},
        "keep_alive": "5m", "think": "high", "format": {"type": "object"}, "other": 1,
    }));
    assert_eq!((read.model.as_str(), read.stream.is_some(), read.messages.len()), ("m:8b", true, 5));
    let Part::Image { source: ImageSource::Data { media_type, .. }, .. } = &read.messages[1].parts[1] else {
        panic!("an image")
    };
    assert_eq!(media_type, "image/png");
    let calls = &read.messages[2].tool_calls;
    assert_eq!(
        (calls[0].id.as_str(), calls[0].arguments.as_str(), calls[1].id.as_str()),
        ("call_2_0", "{\"at\":[1,2]}", "x")
    );
    assert_eq!(read.messages[3].tool_call_id.as_deref(), Some("call_2_0"));
    assert_eq!((read.messages[4].role, read.messages[4].name.as_deref()), (Role::Tool, Some("look")));
    assert_eq!((read.sampling.max_tokens, read.sampling.seed, read.sampling.top_k), (Some(9), Some(7), Some(0)));
    assert_eq!(read.reasoning_effort, Some(ReasoningEffort::High));
    assert!(matches!(read.response_format, ResponseFormat::JsonSchema { strict: true, .. }));
    assert_eq!(read.ignored, ["options.num_ctx", "other"]);
}

#[test]
fn faults_name_their_field() {
    for (body, param) in [
        (json!({"messages": [{"role": "user", "content": "a"}]}), "model"),
        (json!({"model": "m"}), "messages"),
        (json!({"model": "m", "messages": []}), "messages"),
        (asking(json!({"options": {"temperature": 9}})), "options.temperature"),
        (asking(json!({"options": {"typical_p": 0.5}})), "options.typical_p"),
        (asking(json!({"options": {"num_predict": "9"}})), "options.num_predict"),
        (asking(json!({"format": "xml"})), "format"),
        (asking(json!({"think": "much"})), "think"),
        (asking(json!({"stream": 1})), "stream"),
        (asking(json!({"top_logprobs": 2})), "top_logprobs"),
        (json!({"model": "m", "messages": [{"content": "a"}]}), "messages[0].role"),
        (json!({"model": "m", "messages": [{"role": "user", "images": ["http://x"]}]}), "messages[0].images[0]"),
        (json!({"model": "m", "messages": [{"role": "tool", "content": "a"}]}), "messages[0].tool_name"),
    ] {
        assert_eq!(fault_of(&body).0.as_deref(), Some(param), "{body}");
    }
    for off in [json!({"mirostat": 0}), json!({"typical_p": 1.0}), json!({"tfs_z": 1}), json!({"num_predict": -1})] {
        assert_eq!(chat_of(&asking(json!({"options": off}))).sampling.max_tokens, None);
    }
}

#[test]
fn a_prompt_is_one_turn_or_raw() {
    let read = |body: Value| generate(body.to_string().as_bytes(), &bounds()).map(|decoded| decoded.request);
    let body = json!({"model": "m", "prompt": "hi", "system": "Be brief.", "stream": false, "think": false});
    let Ok(Request::Chat(chat)) = read(body) else { panic!("a conversation") };
    assert_eq!((chat.messages.len(), chat.messages[1].content.as_deref()), (2, Some("hi")));
    assert_eq!((chat.stream, chat.reasoning_effort), (None, Some(ReasoningEffort::None)));
    let body = json!({"model": "m", "prompt": "hi", "raw": true, "format": "json"});
    let Ok(Request::Complete(complete)) = read(body) else { panic!("a continuation") };
    assert_eq!(
        (complete.prompts, complete.response_format),
        (vec![Prompt::Text("hi".into())], ResponseFormat::JsonObject)
    );
    for (more, param) in [
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": "a", "context": [1]}), "context"),
        (json!({"prompt": "a", "raw": true, "system": "b"}), "system"),
        (json!({"prompt": "a", "raw": true, "think": true}), "think"),
    ] {
        let mut body = json!({"model": "m"});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        assert_eq!(read(body).expect_err("refused").param.as_deref(), Some(param));
    }
}

fn meta() -> AnswerMeta {
    AnswerMeta::new("r1".into(), 1)
}

fn text(text: &str) -> ChatEvent {
    ChatEvent::Text { choice: 0, text: text.into(), logprobs: Vec::new(), tokens: Vec::new() }
}

fn finish(reason: FinishReason) -> ChatEvent {
    ChatEvent::Finish { choice: 0, reason, stop: None }
}

fn usage() -> ChatEvent {
    ChatEvent::Usage(Usage { prompt_tokens: 3, completion_tokens: 4, ..Usage::default() })
}

fn called(call: u32, name: &str, arguments: &[&str]) -> Vec<ChatEvent> {
    let start =
        ChatEvent::ToolCallStart { choice: 0, call, id: format!("id{call}"), name: name.into(), signature: None };
    let pieces = arguments.iter().map(|json| ChatEvent::ToolCallArguments { choice: 0, call, json: (*json).into() });
    std::iter::once(start).chain(pieces).collect()
}

fn asked(more: Value) -> Decoded {
    chat(asking(more).to_string().as_bytes(), &bounds()).expect("good")
}

fn streamed(decoded: &Decoded, events: &[ChatEvent]) -> String {
    let (mut encoder, mut out) = (decoded.form.stream(&meta()), BytesMut::new());
    events.iter().for_each(|event| encoder.event(event, &mut out));
    encoder.done(&mut out);
    encoder.done(&mut out);
    String::from_utf8(out.into()).expect("text")
}

fn whole(decoded: &Decoded, events: &[ChatEvent]) -> Option<Value> {
    let mut collector = decoded.form.whole(&meta());
    events.iter().for_each(|event| collector.event(event));
    collector.finish().map(|body| serde_json::from_slice(&body).expect("JSON"))
}

fn lines(stream: &str) -> Vec<Value> {
    stream.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Durations are the clock's: present and not 0 where a client divides by them.
fn timeless(mut answer: Value) -> Value {
    for (name, least) in
        [("total_duration", 1), ("prompt_eval_duration", 1), ("eval_duration", 1), ("load_duration", 0)]
    {
        let found = answer.as_object_mut().expect("an object").remove(name).expect(name);
        assert!(found.as_u64().expect("a number") >= least, "{name}");
    }
    answer
}

#[test]
fn an_answer_is_lines_or_one_object() {
    let thought = ChatEvent::Reasoning { choice: 0, text: "hm".into() };
    let mut events = vec![thought, text("a\"b"), text("c")];
    events.extend(called(0, "look", &["{\"at\"", ":1}"]));
    events.extend(called(1, "stay", &[]));
    events.extend([finish(FinishReason::ToolCalls), usage()]);
    let mut said = lines(&streamed(&asked(json!({})), &events));
    let last = said.pop().map(timeless).expect("a last line");
    assert_eq!(
        last,
        json!({"model": "m", "created_at": "1970-01-01T00:00:01Z", "message": {"role": "assistant", "content": ""},
            "done": true, "done_reason": "stop", "prompt_eval_count": 3, "eval_count": 4})
    );
    assert!(said.iter().all(|line| line["done"] == false && line["model"] == "m"));
    let messages: Vec<&Value> = said.iter().map(|line| &line["message"]).collect();
    let calls = json!([
        {"id": "id0", "function": {"index": 0, "name": "look", "arguments": {"at": 1}}},
        {"id": "id1", "function": {"index": 1, "name": "stay", "arguments": {}}},
    ]);
    assert_eq!(
        messages,
        [
            &json!({"role": "assistant", "content": "", "thinking": "hm"}),
            &json!({"role": "assistant", "content": "a\"b"}),
            &json!({"role": "assistant", "content": "c"}),
            &json!({"role": "assistant", "content": "", "tool_calls": calls}),
        ]
    );
    let one = timeless(whole(&asked(json!({"stream": false})), &events).expect("whole"));
    assert_eq!(one["message"], json!({"role": "assistant", "content": "a\"bc", "thinking": "hm", "tool_calls": calls}));
    assert_eq!((&one["done"], &one["eval_count"]), (&json!(true), &json!(4)));
    assert_eq!(whole(&asked(json!({})), &[text("a")]), None);
}

#[test]
fn text_of_a_prompt_is_a_response() {
    let body = br#"{"model":"m","prompt":"hi"}"#;
    let decoded = generate(body, &bounds()).expect("good");
    let events = [text("yes"), finish(FinishReason::Length), usage()];
    let said = lines(&streamed(&decoded, &events));
    assert_eq!((&said[0]["response"], &said[1]["done_reason"]), (&json!("yes"), &json!("length")));
    assert!(said[0].get("message").is_none());
    assert_eq!(whole(&decoded, &events).expect("whole")["response"], "yes");
}

#[test]
fn arguments_of_calls_stay_on_their_line() {
    let mut events = called(0, "look", &["{\n  \"at\": [1,\r\n", "{\"done\": true}\n]\n}"]);
    events.push(finish(FinishReason::ToolCalls));
    let stream = streamed(&asked(json!({})), &events);
    assert_eq!(stream.lines().count(), 2, "{stream}");
    let call = &lines(&stream)[0]["message"]["tool_calls"][0]["function"]["arguments"];
    assert_eq!(call, &json!({"at": [1, {"done": true}]}));
    // What is held is told, so that it can be bounded.
    let (mut encoder, mut out) = (asked(json!({})).form.stream(&meta()), BytesMut::new());
    called(0, "look", &[&"x".repeat(9000)]).iter().for_each(|event| encoder.event(event, &mut out));
    assert!(encoder.held() > 9000 && out.is_empty());
}

#[test]
fn calls_without_results_are_bounded() {
    let call = json!({"function": {"name": "a"}});
    let turn = json!({"role": "assistant", "tool_calls": vec![call; 100]});
    let body = |turns: usize| json!({"model": "m", "messages": vec![turn.clone(); turns]});
    assert_eq!(chat_of(&body(10)).messages.len(), 10);
    assert_eq!(fault_of(&body(11)).0.as_deref(), Some("messages[10].tool_calls"));
}

#[test]
fn a_malformed_call_is_text_and_a_failure_a_line() {
    let mut events = called(0, "look", &["{\"at\":"]);
    events.push(finish(FinishReason::Length));
    let said = lines(&streamed(&asked(json!({})), &events));
    assert_eq!(said[0]["message"], json!({"role": "assistant", "content": "{\"at\":"}));
    let (mut encoder, mut out) = (asked(json!({})).form.stream(&meta()), BytesMut::new());
    let shape = ErrorShape { status: 500, kind: "server_error", code: None };
    encoder.fail(shape, "It \"broke\".", &mut out);
    assert_eq!(&out[..], b"{\"error\":\"It \\\"broke\\\".\"}\n");
}

#[test]
fn log_probabilities_stand_beside_their_text() {
    let token = TokenLogprob {
        token: 5,
        bytes: b"a".to_vec(),
        logprob: Some(-0.5),
        top: vec![(5, b"a".to_vec(), -0.5)],
        place: TokenPlace::Text,
    };
    let piece = ChatEvent::Text { choice: 0, text: "a".into(), logprobs: vec![token], tokens: vec![5] };
    let said =
        lines(&streamed(&asked(json!({"logprobs": true, "top_logprobs": 1})), &[piece, finish(FinishReason::Stop)]));
    assert_eq!(said[0]["logprobs"][0]["token"], "a");
    assert_eq!(said[0]["logprobs"][0]["top_logprobs"][0]["logprob"], -0.5);
}

#[test]
fn vectors_are_embeddings() {
    let vector = |index| ChatEvent::Vector { index, values: vec![0.5, f32::NAN] };
    let decoded = embed(true, br#"{"model":"m","input":["a","b"],"dimensions":2}"#, &bounds()).expect("good");
    let answer = whole(&decoded, &[vector(1), vector(0), usage()]).expect("whole");
    assert_eq!((&answer["embeddings"], &answer["prompt_eval_count"]), (&json!([[0.5, 0.0], [0.5, 0.0]]), &json!(3)));
    let mut events = Vec::new();
    let mut decoder = Codec.decoder(&decoded.request);
    decoder.push(answer.to_string().as_bytes(), &mut events).expect("bytes");
    decoder.end(&mut events).expect("whole");
    assert_eq!(events.len(), 3);
    let cuts = |body: &str| match embed(true, body.as_bytes(), &bounds()).expect("good").request {
        Request::Embed(embed) => embed.truncate,
        other => panic!("{other:?}"),
    };
    assert!(cuts(r#"{"model":"m","input":"a"}"#) && cuts(r#"{"model":"m","input":"a","truncate":true}"#));
    assert!(!cuts(r#"{"model":"m","input":"a","truncate":false}"#));
    let old = embed(false, br#"{"model":"m","prompt":"a"}"#, &bounds()).expect("good");
    assert_eq!(whole(&old, &[vector(0)]).expect("whole"), json!({"embedding": [0.5, 0.0]}));
    assert_eq!(whole(&old, &[usage()]), None);
    for (batch, body) in [(true, "{\"model\":\"m\",\"input\":[]}"), (false, "{\"model\":\"m\",\"input\":\"a\"}")] {
        assert!(embed(batch, body.as_bytes(), &bounds()).is_err(), "{body}");
    }
}

#[test]
fn models_are_listed_and_shown() {
    let card = |id: &str| ModelCard {
        id: id.into(),
        created: 1,
        owned_by: "x".into(),
        context_tokens: Some(8),
        task: None,
        parent: None,
    };
    let list: Value = serde_json::from_slice(&models_list(&[card("a\""), card("b")])).expect("JSON");
    assert_eq!((&list["models"][0]["name"], &list["models"][1]["model"]), (&json!("a\""), &json!("b")));
    let shown: Value = serde_json::from_slice(&model(&card("a"))).expect("JSON");
    assert_eq!(shown["model_info"]["penstock.context_length"], 8);
    let loaded: Value = serde_json::from_slice(&running(&[card("a")])).expect("JSON");
    assert_eq!(loaded["models"][0]["context_length"], 8);
    assert_eq!(model_asked(b"{\"model\":\"a\"}", &bounds()).as_deref().ok(), Some("a"));
    assert_eq!(model_asked(b"{\"name\":\"a\"}", &bounds()).as_deref().ok(), Some("a"));
    assert!(model_asked(b"{}", &bounds()).is_err() && model_asked(b"[]", &bounds()).is_err());
}

#[test]
fn what_was_read_is_written_again() {
    let body = asking(json!({
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "c",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}, {"role": "tool", "tool_name": "f", "content": "d"}],
        "tools": [{"type": "function", "function": {"name": "f"}}], "think": true, "stream": false, "logprobs": true, "top_logprobs": 2,
        "format": {"type": "object"}, "options": {"temperature": 0.5, "num_predict": 3, "stop": ["x"], "seed": 4},
    }));
    let first = chat_of(&body);
    let call = Codec.encode(&Request::Chat(Box::new(first.clone())), "m").expect("written");
    assert_eq!(call.path, "/api/chat");
    let Ok(Request::Chat(again)) = chat(&call.body, &bounds()).map(|decoded| decoded.request) else { panic!("read") };
    assert_eq!((again.messages, again.sampling), (first.messages, first.sampling));
    assert_eq!((again.response_format, again.reasoning_effort), (first.response_format, first.reasoning_effort));
    assert_eq!((again.logprobs, again.stream, again.tools.len()), (first.logprobs, first.stream, 1));
}

proptest! {
    /// A stream cut anywhere is read back as it was written.
    #[test]
    fn lines_are_read_wherever_they_are_cut(texts in prop::collection::vec("\\PC{1,12}", 1..6), cut in 0usize..400) {
        let mut events: Vec<ChatEvent> = texts.iter().map(|piece| text(piece)).collect();
        events.extend(called(0, "f", &["{\"x\":\"\u{e9}\"}"]));
        events.extend([finish(FinishReason::ToolCalls), usage()]);
        let decoded = asked(json!({}));
        let stream = streamed(&decoded, &events);
        let (mut decoder, mut out) = (Codec.decoder(&decoded.request), Vec::new());
        let (one, other) = stream.as_bytes().split_at(cut.min(stream.len()));
        decoder.push(one, &mut out).expect("read");
        decoder.push(other, &mut out).expect("read");
        decoder.end(&mut out).expect("complete");
        prop_assert_eq!(out, events);
    }

    /// Whatever stands for the bound, the amount that limits count is the one that the request has.
    #[test]
    fn the_counted_bound_is_the_one_that_is_asked(
        value in prop_oneof![
            any::<i64>().prop_map(|number| number.to_string()),
            any::<u32>().prop_map(|number| format!("{number}.0")),
            (0u32..12).prop_map(|power| format!("1e{power}")),
            Just("null".to_owned()), Just("\"7\"".to_owned()), Just("1.5".to_owned()), Just("[]".to_owned()),
        ],
        surface in prop_oneof![Just(Surface::OllamaChat), Just(Surface::OllamaGenerate)],
    ) {
        let body = format!(
            "{{\"model\":\"m\",\"prompt\":\"a\",\"messages\":[{{\"role\":\"user\"}}],\"options\":{{\"num_predict\":{value}}}}}"
        );
        let seen = peek(body.as_bytes(), Some(surface), &bounds()).expect("an object");
        let decoded = match surface {
            Surface::OllamaChat => chat(body.as_bytes(), &bounds()),
            _ => generate(body.as_bytes(), &bounds()),
        };
        if let (Ok(()), Ok(decoded)) = (seen.check_amounts(), decoded) {
            let Request::Chat(chat) = decoded.request else { panic!("a conversation") };
            prop_assert_eq!(seen.max_tokens, chat.sampling.max_tokens, "{}", body);
            prop_assert!(seen.stream && chat.stream.is_some());
        }
    }
}
