//! What a request may ask of others and our own pools cannot do: refused with the reason, never left out.

use penstock_dialects::{ApiError, ChatRequest, Request, ResponseFormat, ToolChoice};

/// Refuses what no worker of ours can hold.
pub(super) fn check(request: &Request) -> Result<(), ApiError> {
    match request {
        Request::Chat(chat) => check_chat(chat),
        Request::Complete(_) => Ok(()),
        Request::Embed(_) => Err(ApiError::unsupported_value("model", "model: this model makes text, not vectors")),
        Request::Rerank(_) => Err(ApiError::unsupported_value("model", "model: this model makes text, not scores")),
    }
}

fn check_chat(chat: &ChatRequest) -> Result<(), ApiError> {
    let guided = |param: &str, what: &str| {
        let message = format!("{param}: {what} needs guided decoding, which is not built yet");
        Err(ApiError::unsupported_value(param, message))
    };
    match &chat.tool_choice {
        ToolChoice::None | ToolChoice::Auto => {}
        ToolChoice::Required => return guided("tool_choice", "\"required\""),
        ToolChoice::Named(_) => return guided("tool_choice", "a named function"),
    }
    if !chat.parallel_tool_calls && !chat.tools.is_empty() && chat.tool_choice != ToolChoice::None {
        return guided("parallel_tool_calls", "false");
    }
    match &chat.response_format {
        ResponseFormat::Text => {}
        ResponseFormat::JsonObject => return guided("response_format.type", "\"json_object\""),
        ResponseFormat::JsonSchema { .. } => return guided("response_format.type", "\"json_schema\""),
    }
    match chat.messages.iter().position(|message| !message.parts.is_empty()) {
        None => Ok(()),
        Some(at) => {
            let param = format!("messages[{at}].content");
            let message = format!("{param}: this model reads text only, no images");
            Err(ApiError::unsupported_value(param, message))
        }
    }
}
