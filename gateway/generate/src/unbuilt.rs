//! Request features that our own pools lack: refused with the reason, never left out in silence.

use penstock_types::codec::Surface;
use penstock_types::{ApiError, ChatRequest, Request, ResponseFormat, ToolChoice};

/// Refuses features that no worker of ours has, by the field's name in the client's API.
pub(super) fn check(request: &Request, surface: Surface) -> Result<(), ApiError> {
    match request {
        Request::Chat(chat) => check_chat(chat, surface),
        Request::Complete(complete) => check_format(&complete.response_format, &Words::of(surface)),
        Request::Embed(_) => Err(ApiError::unsupported_value("model", "model: this model makes text, not vectors")),
        Request::Rerank(_) => Err(ApiError::unsupported_value("model", "model: this model makes text, not scores")),
    }
}

/// Names of the request's fields in the client's API.
struct Words {
    /// Field that demands a function call, and the value that demands any.
    calls: (&'static str, &'static str),
    /// Name of the field that names the one function to be called.
    named: &'static str,
    /// Field that demands JSON, and its values for any JSON and for JSON of a schema.
    json: (&'static str, &'static str, &'static str),
    /// Name of the field with the list of messages.
    messages: &'static str,
}

impl Words {
    fn of(surface: Surface) -> Self {
        match surface {
            Surface::Responses => Self {
                calls: ("tool_choice", "\"required\""),
                named: "tool_choice",
                json: ("text.format.type", "\"json_object\"", "\"json_schema\""),
                messages: "input",
            },
            Surface::Messages | Surface::CountTokens => Self {
                calls: ("tool_choice.type", "\"any\""),
                named: "tool_choice.name",
                json: ("output_config.format", "JSON", "\"json_schema\""),
                messages: "messages",
            },
            Surface::Generate | Surface::Embed => Self {
                calls: ("toolConfig.functionCallingConfig.mode", "ANY"),
                named: "toolConfig.functionCallingConfig.allowedFunctionNames",
                json: (
                    "generationConfig.responseMimeType",
                    "\"application/json\"",
                    "\"application/json\" with a schema",
                ),
                messages: "contents",
            },
            Surface::Chat | Surface::Completions | Surface::Embeddings | Surface::Rerank | Surface::Score => Self {
                calls: ("tool_choice", "\"required\""),
                named: "tool_choice",
                json: ("response_format.type", "\"json_object\"", "\"json_schema\""),
                messages: "messages",
            },
        }
    }
}

fn guided(param: &str, what: &str) -> Result<(), ApiError> {
    let message = format!("{param}: {what} needs guided decoding, which is not built yet");
    Err(ApiError::unsupported_value(param, message))
}

fn check_format(format: &ResponseFormat, words: &Words) -> Result<(), ApiError> {
    match format {
        ResponseFormat::Text => Ok(()),
        ResponseFormat::JsonObject => guided(words.json.0, words.json.1),
        ResponseFormat::JsonSchema { .. } => guided(words.json.0, words.json.2),
        ResponseFormat::Regex(_) => guided("structured_outputs.regex", "a regular expression"),
        ResponseFormat::Choice(_) => guided("structured_outputs.choice", "a choice among texts"),
        ResponseFormat::Grammar { .. } => guided("structured_outputs.grammar", "a grammar"),
        ResponseFormat::StructuralTag(_) => guided("structured_outputs.structural_tag", "a structural tag"),
    }
}

fn check_chat(chat: &ChatRequest, surface: Surface) -> Result<(), ApiError> {
    let words = Words::of(surface);
    match &chat.tool_choice {
        ToolChoice::None | ToolChoice::Auto => {}
        ToolChoice::Required => return guided(words.calls.0, words.calls.1),
        ToolChoice::Named(_) => return guided(words.named, "a named function"),
        ToolChoice::Allowed { .. } => return guided(words.named, "a choice among some functions"),
    }
    check_format(&chat.response_format, &words)?;
    match chat.messages.iter().position(|message| !message.parts.is_empty()) {
        None => Ok(()),
        Some(at) => {
            // Instructions may stand apart from the messages; then these are counted from another number.
            let param = match surface {
                Surface::Chat => format!("messages[{at}].content"),
                _ => words.messages.to_owned(),
            };
            let message = format!("{param}: this model reads text only, no images");
            Err(ApiError::unsupported_value(param, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::{ApiErrorKind, ImageSource, Message, Part, RerankRequest, Tool};

    use super::*;

    fn chat(change: impl FnOnce(&mut ChatRequest)) -> Result<(), ApiError> {
        chat_of(Surface::Chat, change)
    }

    fn chat_of(surface: Surface, change: impl FnOnce(&mut ChatRequest)) -> Result<(), ApiError> {
        let message = Message { content: Some("hi".into()), ..Message::default() };
        let mut chat = ChatRequest::new("m".into(), vec![message]);
        change(&mut chat);
        check(&Request::Chat(Box::new(chat)), surface)
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
        let grammar = ResponseFormat::Grammar { text: "root ::= x".into(), syntax: None };
        for (format, param) in [
            (ResponseFormat::Regex("a".into()), "structured_outputs.regex"),
            (ResponseFormat::Choice(vec!["a".into()]), "structured_outputs.choice"),
            (grammar, "structured_outputs.grammar"),
            (ResponseFormat::StructuralTag("{}".into()), "structured_outputs.structural_tag"),
        ] {
            refused(chat(|chat| chat.response_format = format), param, "guided decoding");
        }
        let allowed = ToolChoice::Allowed { names: vec!["f".into()], required: false };
        let asked = chat(|chat| (chat.tools, chat.tool_choice) = (tools(), allowed));
        refused(asked, "tool_choice", "guided decoding");
    }

    #[test]
    fn refusals_name_the_field_of_the_clients_own_api() {
        let required = |chat: &mut ChatRequest| (chat.tools, chat.tool_choice) = (tools(), ToolChoice::Required);
        let json = |chat: &mut ChatRequest| chat.response_format = ResponseFormat::JsonObject;
        refused(chat_of(Surface::Responses, json), "text.format.type", "json_object");
        refused(chat_of(Surface::Messages, json), "output_config.format", "guided decoding");
        refused(chat_of(Surface::Messages, required), "tool_choice.type", "\"any\"");
        refused(chat_of(Surface::Generate, json), "generationConfig.responseMimeType", "application/json");
        refused(chat_of(Surface::Generate, required), "toolConfig.functionCallingConfig.mode", "ANY");
        let image = || Part::Image { source: ImageSource::Url("https://h/i".into()), detail: None };
        for (surface, param) in
            [(Surface::Responses, "input"), (Surface::Messages, "messages"), (Surface::Generate, "contents")]
        {
            refused(chat_of(surface, |chat| chat.messages[0].parts = vec![image()]), param, "no images");
        }
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
        refused(check(&Request::Rerank(Box::new(rerank)), Surface::Rerank), "model", "not scores");
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
