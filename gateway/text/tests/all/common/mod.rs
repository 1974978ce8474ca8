//! Helpers shared by the tests of this folder.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use penstock_text::TextModel;
use penstock_types::{ChatRequest, Message, Role, ToolCall, ToolChoice};
use serde_json::Value;

pub(crate) fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo")
}

pub(crate) fn model() -> Arc<TextModel> {
    static MODEL: OnceLock<Arc<TextModel>> = OnceLock::new();
    MODEL.get_or_init(|| Arc::new(TextModel::from_dir(&dir()).unwrap())).clone()
}

pub(crate) fn message(role: Role, content: &str) -> Message {
    Message { role, content: Some(content.into()), ..Message::default() }
}

/// A message in the form of clients; calls' arguments as an object.
pub(crate) fn message_from_json(json: &Value) -> Message {
    let text = |key: &str| json[key].as_str().map(str::to_owned);
    let role = match json["role"].as_str().unwrap() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        _ => Role::Tool,
    };
    let call = |call: &Value| ToolCall {
        id: call["id"].as_str().unwrap_or_default().into(),
        name: call["function"]["name"].as_str().unwrap().into(),
        arguments: call["function"]["arguments"].to_string(),
        signature: None,
    };
    Message {
        role,
        content: text("content"),
        name: text("name"),
        reasoning: text("reasoning_content"),
        tool_calls: json["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
        tool_call_id: text("tool_call_id"),
        ..Message::default()
    }
}

pub(crate) fn request(messages: Vec<Message>) -> ChatRequest {
    ChatRequest { tool_choice: ToolChoice::Auto, ..ChatRequest::new("demo".into(), messages) }
}
