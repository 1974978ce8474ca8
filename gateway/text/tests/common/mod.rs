//! What the tests of this folder share.
#![allow(dead_code, reason = "each test file uses a part")]

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use penstock_dialects::{ChatRequest, Message, Role, SamplingParams, ToolCall, ToolChoice};
use penstock_text::TextModel;
use serde_json::Value;

pub(crate) fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo")
}

pub(crate) fn model() -> Arc<TextModel> {
    static MODEL: OnceLock<Arc<TextModel>> = OnceLock::new();
    MODEL.get_or_init(|| Arc::new(TextModel::from_dir(&dir()).unwrap())).clone()
}

pub(crate) fn message(role: Role, content: &str) -> Message {
    Message {
        role,
        content: Some(content.into()),
        name: None,
        reasoning: None,
        tool_calls: Vec::new(),
        tool_call_id: None,
    }
}

/// A message as clients write it; calls' arguments as an object.
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
    };
    Message {
        role,
        content: text("content"),
        name: text("name"),
        reasoning: text("reasoning_content"),
        tool_calls: json["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
        tool_call_id: text("tool_call_id"),
    }
}

pub(crate) fn request(messages: Vec<Message>) -> ChatRequest {
    ChatRequest {
        model: "demo".into(),
        messages,
        tools: Vec::new(),
        tool_choice: ToolChoice::Auto,
        sampling: SamplingParams {
            temperature: None,
            top_p: None,
            top_k: None,
            min_p: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: None,
            logit_bias: Vec::new(),
            seed: None,
            max_tokens: None,
            min_tokens: 0,
            ignore_eos: false,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            include_stop: false,
            allowed_token_ids: Vec::new(),
        },
        n: 1,
        stream: None,
        logprobs: None,
        prompt_logprobs: None,
        reasoning_effort: None,
        template_kwargs: None,
        add_generation_prompt: true,
        continue_final_message: false,
        keep_special_tokens: false,
        return_token_ids: false,
        cache_salt: None,
        priority: 0,
        ignored: Vec::new(),
    }
}
