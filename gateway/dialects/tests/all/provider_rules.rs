//! Rules by which real providers refuse a request, applied to what the encoders write for requests of other dialects.

use penstock_dialects::openai::{self, ChatCodec, ResponsesCodec};
use penstock_dialects::{anthropic, bedrock, gemini, ollama};
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
    let fields = json!({"model": "m", "user": long, "prompt_cache_key": long, "messages": [{"role": "user", "content": "hi"}]});
    let chat = read(openai::chat, &fields);
    let completion = read(openai::completion, &json!({"model": "m", "user": long, "prompt": "a"}));
    let vectors = read(openai::embeddings, &json!({"model": "m", "user": long, "input": "a"}));
    let strict = ChatCodec::strict();
    let chars = |value: &Value| value.as_str().map(|text| text.chars().count());
    for codec in [&strict as &dyn ProviderCodec, &ResponsesCodec] {
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
