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

#[cfg(test)]
mod tests {
    use penstock_dialects::{ApiErrorKind, ImageSource, Message, Part, RerankRequest, Tool};

    use super::*;

    fn chat(change: impl FnOnce(&mut ChatRequest)) -> Result<(), ApiError> {
        let message = Message { content: Some("hi".into()), ..Message::default() };
        let mut chat = ChatRequest::new("m".into(), vec![message]);
        change(&mut chat);
        check(&Request::Chat(Box::new(chat)))
    }

    fn tools() -> Vec<Tool> {
        vec![Tool::function("f".into(), None, None, true)]
    }

    #[track_caller]
    fn refused(result: Result<(), ApiError>, param: &str, words: &str) {
        let error = result.expect_err(param);
        assert_eq!((error.kind, error.param.as_deref()), (ApiErrorKind::UnsupportedValue, Some(param)));
        assert!(error.message.starts_with(&format!("{param}: ")) && error.message.contains(words), "{error}");
    }

    #[test]
    fn what_needs_a_grammar_is_refused() {
        for choice in [ToolChoice::Required, ToolChoice::Named("f".into())] {
            let asked = chat(|chat| (chat.tools, chat.tool_choice) = (tools(), choice));
            refused(asked, "tool_choice", "guided decoding");
        }
        refused(chat(|chat| chat.response_format = ResponseFormat::JsonObject), "response_format.type", "json_object");
        let schema =
            ResponseFormat::JsonSchema { name: "x".into(), description: None, schema: "{}".into(), strict: false };
        refused(chat(|chat| chat.response_format = schema), "response_format.type", "json_schema");
    }

    #[test]
    fn images_are_refused_where_they_stand() {
        let image = Part::Image { source: ImageSource::Url("https://h/i".into()), detail: None };
        let seen = chat(|chat| {
            chat.messages.push(Message { parts: vec![image], ..chat.messages[0].clone() });
        });
        refused(seen, "messages[1].content", "no images");
    }

    #[test]
    fn vectors_and_scores_are_refused() {
        let rerank = RerankRequest {
            model: "m".into(),
            query: "q".into(),
            documents: vec!["d".into()],
            top_n: None,
            return_documents: false,
            ignored: Vec::new(),
        };
        refused(check(&Request::Rerank(Box::new(rerank))), "model", "not scores");
    }

    #[test]
    fn what_asks_for_nothing_special_passes() {
        assert_eq!(chat(|_| {}), Ok(()));
        assert_eq!(chat(|chat| (chat.tools, chat.tool_choice) = (tools(), ToolChoice::Auto)), Ok(()));
        let single = |chat: &mut ChatRequest| {
            (chat.tools, chat.tool_choice, chat.parallel_tool_calls) = (tools(), ToolChoice::Auto, false);
        };
        assert_eq!(chat(single), Ok(()), "the answer ends with its first call");
    }
}
