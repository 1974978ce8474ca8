//! Rules by which real providers refuse a request, applied to what the encoders write for requests of other dialects.

use penstock_dialects::openai::{self, ChatCodec, ResponsesCodec};
use penstock_dialects::{anthropic, bedrock, gemini, ollama};
use penstock_types::codec::Framing;
use penstock_types::{ApiError, Bounds, Decoded, ProviderCodec, Request};
use serde_json::{Value, json};

const CLAUDE: &str = "anthropic.claude-sonnet-4-5-20250929-v1:0";

/// The body that a provider gets.
#[track_caller]
fn body(codec: &dyn ProviderCodec, request: &Request) -> Value {
    let call = codec.encode(request, CLAUDE).expect("can be said");
    serde_json::from_slice(&call.body).expect("JSON")
}

/// A client's request, read by the decoder of its dialect.
#[track_caller]
fn read(decode: fn(&[u8], &Bounds) -> Result<Decoded, ApiError>, body: &Value) -> Request {
    decode(body.to_string().as_bytes(), &Bounds::default()).unwrap_or_else(|error| panic!("{error}: {body}")).request
}

#[test]
fn ids_are_no_longer_than_the_provider_takes() {
    // Claude Code sends an account and a session.
    let id = format!("user_{}_account__session_{}", "a".repeat(64), "b".repeat(64));
    let asked = json!({"model": "m", "max_tokens": 9, "metadata": {"user_id": id}, "messages": [{"role": "user", "content": "hi"}]});
    let asked = read(anthropic::messages, &asked);
    let long = "k".repeat(500);
    let fields =
        json!({"model": "m", "user": long, "prompt_cache_key": long, "messages": [{"role": "user", "content": "hi"}]});
    let chat = read(openai::chat, &fields);
    let completion = read(openai::completion, &json!({"model": "m", "user": long, "prompt": "a"}));
    let vectors = read(openai::embeddings, &json!({"model": "m", "user": long, "input": "a"}));
    let strict = ChatCodec::strict();
    let chars = |value: &Value| value.as_str().map(|text| text.chars().count());
    for codec in [&strict as &dyn ProviderCodec, &ResponsesCodec::default()] {
        for request in [&asked, &chat, &vectors] {
            assert_eq!(chars(&body(codec, request)["user"]), Some(64));
        }
        assert_eq!(chars(&body(codec, &chat)["prompt_cache_key"]), Some(64));
    }
    assert_eq!(chars(&body(&strict, &completion)["user"]), Some(64));
    for request in [&asked, &chat, &completion, &vectors] {
        assert_eq!(chars(&body(&ChatCodec::default(), request)["user"]), Some(64));
    }
    let claude = anthropic::Codec::default();
    assert_eq!(body(&claude, &asked)["metadata"]["user_id"], json!(id));
    assert_eq!(chars(&body(&claude, &chat)["metadata"]["user_id"]), Some(64));
}

/// A schema as pydantic writes it: open objects, and a property that may be missing.
fn open_schema() -> Value {
    let person = json!({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]});
    json!({"type": "object", "properties": {"people": {"type": "array", "items": person}}, "required": ["people"]})
}

/// Checks that every object of a schema forbids other properties.
#[track_caller]
fn is_closed(schema: &Value) {
    let items = &schema["properties"]["people"]["items"];
    for object in [schema, items] {
        assert_eq!(object["additionalProperties"], json!(false), "{schema}");
    }
}

#[test]
fn schemas_are_sent_as_the_provider_takes_them() {
    let hi = json!([{"role": "user", "content": "hi"}]);
    let schema = open_schema();
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let strict_format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}});
    let gemini = json!({"contents": [{"parts": [{"text": "hi"}]}],
        "generationConfig": {"responseMimeType": "application/json", "responseSchema": schema}});
    for asked in [
        read(openai::chat, &json!({"model": "m", "messages": hi, "response_format": format})),
        read(openai::chat, &json!({"model": "m", "messages": hi, "response_format": strict_format})),
        read(ollama::chat, &json!({"model": "m", "messages": hi, "format": schema})),
        read(|body, bounds| gemini::generate("m", Framing::Whole, body, bounds), &gemini),
    ] {
        // OpenAI may stand behind another host name, as a compatible server.
        for codec in [ChatCodec::strict(), ChatCodec::default()] {
            let chat = body(&codec, &asked);
            let inner = &chat["response_format"]["json_schema"];
            assert_ne!(inner["strict"], json!(true));
            assert_eq!(inner["schema"]["properties"], schema["properties"], "the client's own schema");
        }
        assert_eq!(body(&ResponsesCodec::default(), &asked)["text"]["format"]["strict"], json!(false));
        is_closed(&body(&anthropic::Codec::default(), &asked)["output_config"]["format"]["schema"]);
        let text =
            body(&bedrock::Codec, &asked)["outputConfig"]["textFormat"]["structure"]["jsonSchema"]["schema"].take();
        is_closed(&serde_json::from_str(text.as_str().expect("text")).expect("JSON"));
    }
    // A schema that OpenAI takes stays strict.
    let closed = json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false});
    let config = json!({"format": {"type": "json_schema", "schema": closed}});
    let asked =
        read(anthropic::messages, &json!({"model": "m", "max_tokens": 9, "messages": hi, "output_config": config}));
    assert_eq!(body(&ChatCodec::strict(), &asked)["response_format"]["json_schema"]["strict"], json!(true));
    assert_eq!(body(&ResponsesCodec::default(), &asked)["text"]["format"]["strict"], json!(true));
}

#[test]
fn strict_functions_are_sent_as_the_provider_takes_them() {
    let function = json!({"name": "f", "parameters": open_schema(), "strict": true});
    let asked = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": function}]});
    let asked = read(openai::chat, &asked);
    assert_ne!(body(&ChatCodec::strict(), &asked)["tools"][0]["function"]["strict"], json!(true));
    assert_eq!(body(&ChatCodec::default(), &asked)["tools"][0]["function"]["strict"], json!(true));
    assert_eq!(body(&ResponsesCodec::default(), &asked)["tools"][0]["strict"], json!(false));
    let tool = body(&anthropic::Codec::default(), &asked)["tools"][0].take();
    assert_eq!(tool["strict"], json!(true));
    is_closed(&tool["input_schema"]);
    let spec = body(&bedrock::Codec, &asked)["toolConfig"]["tools"][0]["toolSpec"].take();
    assert_eq!(spec["strict"], json!(true));
    is_closed(&spec["inputSchema"]["json"]);
}

/// Turns of a Messages client whose assistant has thought these blocks.
fn thought(blocks: &[(&str, &str)]) -> Request {
    let thought =
        |(text, signature): &(&str, &str)| json!({"type": "thinking", "thinking": text, "signature": signature});
    let mut content: Vec<Value> = blocks.iter().map(thought).collect();
    content.push(json!({"type": "text", "text": "said"}));
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": content}, {"role": "user", "content": "b"}]);
    read(anthropic::messages, &json!({"model": "m", "max_tokens": 9, "messages": messages}))
}

/// Signatures in what each provider gets.
fn signatures(request: &Request) -> [Vec<String>; 4] {
    let codecs: [&dyn ProviderCodec; 4] =
        [&anthropic::Codec::default(), &bedrock::Codec, &gemini::Codec::default(), &ResponsesCodec::default()];
    codecs.map(|codec| {
        let (mut found, mut open) = (Vec::new(), vec![body(codec, request)]);
        while let Some(value) = open.pop() {
            match value {
                Value::Array(items) => open.extend(items.into_iter().rev()),
                Value::Object(fields) => {
                    for (name, value) in fields {
                        match (name.as_str(), value) {
                            ("signature" | "thoughtSignature" | "encrypted_content", Value::String(text)) => {
                                found.push(text)
                            }
                            (_, value) => open.push(value),
                        }
                    }
                }
                _ => {}
            }
        }
        found
    })
}

#[test]
fn signatures_reach_the_provider_that_made_them_alone() {
    let none = Vec::<String>::new;
    let made = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    for (blocks, expected) in [
        (&[("t", "EqQB")][..], [made(&["EqQB"]), made(&["EqQB"]), none(), none()]),
        (&[("t", "gAAAAABo")], [none(), none(), none(), made(&["gAAAAABo"])]),
        (&[("t", "openai:xai")], [none(), none(), none(), made(&["xai"])]),
        // Two blocks in one turn, in order.
        (&[("t", "gAAAAABo"), ("u", "gAAAAABp")], [none(), none(), none(), made(&["gAAAAABo", "gAAAAABp"])]),
        // Thoughts of Gemini's are unsigned; the signature follows with the text.
        (&[("t", ""), ("", "gemini:QUJD")], [none(), none(), made(&["QUJD"]), none()]),
        (&[("t", "gemini:QUJD")], [none(), none(), made(&["QUJD"]), none()]),
        // A turn of several makers.
        (
            &[("t", "EqQB"), ("u", "gAAAAABo"), ("", "gemini:QUJD")],
            [made(&["EqQB"]), made(&["EqQB"]), made(&["QUJD"]), made(&["gAAAAABo"])],
        ),
    ] {
        assert_eq!(signatures(&thought(blocks)), expected, "{blocks:?}");
    }
    let items = |encrypted: &str| {
        let thought = json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "encrypted_content": encrypted});
        let said = json!({"type": "message", "role": "assistant", "content": "said"});
        read(openai::responses, &json!({"model": "m", "input": [{"role": "user", "content": "a"}, thought, said]}))
    };
    for (encrypted, expected) in [
        ("gAAAAABo", [none(), none(), none(), made(&["gAAAAABo"])]),
        ("xai", [none(), none(), none(), made(&["xai"])]),
        ("anthropic:EqQB", [made(&["EqQB"]), made(&["EqQB"]), none(), none()]),
        ("gemini:QUJD", [none(), none(), made(&["QUJD"]), none()]),
    ] {
        assert_eq!(signatures(&items(encrypted)), expected, "{encrypted}");
    }
}

#[test]
fn thoughts_of_one_turn_go_back_each_with_its_signature() {
    let made = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let claudes = [made(&["EqQBone", "EqQBtwo"]), made(&["EqQBone", "EqQBtwo"]), made(&["QUJD"]), made(&["gAAAAABo"])];
    let item = |text: &str, encrypted: &str| json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], "encrypted_content": encrypted});
    let said = json!({"type": "message", "role": "assistant", "content": "said"});
    let input = json!([{"role": "user", "content": "a"}, item("one", "anthropic:EqQBone"), item("g", "gemini:QUJD"),
        item("o", "gAAAAABo"), item("two", "anthropic:EqQBtwo"), said]);
    let responses = read(openai::responses, &json!({"model": "m", "input": input}));
    // As the gateway gives them to Google's SDKs, which keep each chunk of a stream as a content.
    let part = |text: &str, signature: &str| json!({"role": "model", "parts": [{"text": text, "thought": true, "thoughtSignature": signature}]});
    let contents = json!([{"role": "user", "parts": [{"text": "a"}]},
        part("one", "cGVuc3RvY2s6RXFRQm9uZQ=="), part("o", "cGVuc3RvY2s6Z0FBQUFBQm8="), part("two", "cGVuc3RvY2s6RXFRQnR3bw=="),
        {"role": "model", "parts": [{"text": "sa"}]}, {"role": "model", "parts": [{"text": "id", "thoughtSignature": "QUJD"}]}]);
    let google =
        read(|body, bounds| gemini::generate("m", Framing::Whole, body, bounds), &json!({"contents": contents}));
    for request in [responses, google] {
        assert_eq!(signatures(&request), claudes);
        let asked = body(&anthropic::Codec::default(), &request);
        let blocks = asked["messages"][1]["content"].as_array().expect("blocks");
        let thoughts: Vec<_> = blocks.iter().filter_map(|block| block["thinking"].as_str()).collect();
        assert_eq!(thoughts, ["one", "two"], "each text under its own signature");
    }
}

#[test]
fn images_of_results_follow_the_results() {
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}});
    let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "look", "input": {}});
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [call("one"), call("two")]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "one", "content": [{"type": "text", "text": "See:"}, image]},
            {"type": "tool_result", "tool_use_id": "two", "content": [image]},
            {"type": "text", "text": "Well?"}]}]);
    let asked = read(anthropic::messages, &json!({"model": "m", "max_tokens": 9, "messages": messages}));
    let sent = body(&ChatCodec::strict(), &asked)["messages"].take();
    let shown = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}});
    let text = |text: &str| json!({"type": "text", "text": text});
    let results = json!([
        {"role": "tool", "content": "See:", "tool_call_id": "one"},
        {"role": "tool", "content": "(an image, which follows)", "tool_call_id": "two"},
        {"role": "user", "content": [text("Image of the result of one:"), shown, text("Image of the result of two:"), shown]},
        {"role": "user", "content": "Well?"}]);
    assert_eq!(sent.as_array().expect("messages")[2..], results.as_array().expect("messages")[..]);
    // Nothing follows the last result.
    let mut messages = messages;
    messages[2]["content"].as_array_mut().expect("blocks").pop();
    let asked = read(anthropic::messages, &json!({"model": "m", "max_tokens": 9, "messages": messages}));
    let sent = body(&ChatCodec::strict(), &asked)["messages"].take();
    assert_eq!(sent.as_array().expect("messages")[2..], results.as_array().expect("messages")[..3]);
    // Other servers take images where they are.
    let sent = body(&ChatCodec::default(), &asked)["messages"].take();
    assert_eq!(sent[3], json!({"role": "tool", "content": [shown], "tool_call_id": "two"}));
}

#[test]
fn a_turn_of_thinking_alone_has_a_content() {
    let messages = json!([{"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "EqQB"}]}, {"role": "user", "content": "b"}]);
    let asked = read(anthropic::messages, &json!({"model": "m", "max_tokens": 9, "messages": messages}));
    assert_eq!(body(&ChatCodec::strict(), &asked)["messages"][1], json!({"role": "assistant", "content": ""}));
    let other = json!({"role": "assistant", "content": null, "reasoning_content": "t"});
    assert_eq!(body(&ChatCodec::default(), &asked)["messages"][1], other);
}

#[test]
fn functions_of_a_validated_call_are_strict_everywhere() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false});
    let asked = json!({"contents": [{"parts": [{"text": "hi"}]}],
        "tools": [{"functionDeclarations": [{"name": "f", "description": "d", "parametersJsonSchema": schema}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}});
    let asked = read(|body, bounds| gemini::generate("m", Framing::Whole, body, bounds), &asked);
    let function = json!({"name": "f", "description": "d", "parameters": schema, "strict": true});
    for codec in [ChatCodec::default(), ChatCodec::strict()] {
        assert_eq!(body(&codec, &asked)["tools"][0]["function"], function);
    }
    assert_eq!(body(&ResponsesCodec::default(), &asked)["tools"][0]["strict"], json!(true));
    assert_eq!(body(&anthropic::Codec::default(), &asked)["tools"][0]["strict"], json!(true));
}
