//! Request features that our own pools lack: refused with the reason, never left out in silence.

use penstock_text::{Task, TextModel};
use penstock_types::codec::Surface;
use penstock_types::request::Verbosity;
use penstock_types::{ApiError, ChatRequest, Request};

use super::words::Words;

/// Refuses features that no worker of ours has, by the field's name in the client's API.
pub(super) fn check(request: &Request, surface: Surface, task: &Task) -> Result<(), ApiError> {
    let wanted = match request {
        Request::Chat(_) | Request::Complete(_) => "text",
        Request::Embed(_) => "vectors",
        Request::Rerank(_) => "scores",
    };
    let made = match task {
        Task::Generate => "text",
        Task::Embed(_) => "vectors",
        Task::Rerank(_) => "scores",
    };
    if made != wanted {
        return Err(ApiError::unsupported_value("model", format!("model: this model makes {made}, not {wanted}")));
    }
    match request {
        Request::Chat(chat) => check_chat(chat, surface),
        Request::Complete(_) | Request::Embed(_) | Request::Rerank(_) => Ok(()),
    }
}

/// Refuses parts of messages that no model here reads.
fn check_chat(chat: &ChatRequest, surface: Surface) -> Result<(), ApiError> {
    match chat.messages.iter().position(|message| !message.parts.is_empty()) {
        None => Ok(()),
        Some(at) => {
            // Instructions may stand apart from the messages; then these are counted from another number.
            let param = match surface {
                Surface::Chat => format!("messages[{at}].content"),
                _ => Words::of(surface).messages.to_owned(),
            };
            let message = format!("{param}: this model reads text only, no images");
            Err(ApiError::unsupported_value(param, message))
        }
    }
}

/// Refuses a length of the answer that the model's template has no place for.
pub(super) fn check_verbosity(chat: &ChatRequest, surface: Surface, model: &TextModel) -> Result<(), ApiError> {
    let wished = chat.verbosity.filter(|verbosity| *verbosity != Verbosity::Medium);
    match wished {
        Some(verbosity) if !model.template_reads("verbosity") => {
            let param = if surface == Surface::Responses { "text.verbosity" } else { "verbosity" };
            let message = format!("{param}: this model knows no \"{}\"; say it in a message", verbosity.word());
            Err(ApiError::unsupported_value(param, message))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use penstock_text::VectorRules;
    use penstock_types::{ApiErrorKind, ImageSource, Message, Part, RerankRequest};

    use super::*;

    fn chat(change: impl FnOnce(&mut ChatRequest)) -> Result<(), ApiError> {
        chat_of(Surface::Chat, change)
    }

    fn chat_of(surface: Surface, change: impl FnOnce(&mut ChatRequest)) -> Result<(), ApiError> {
        let message = Message { content: Some("hi".into()), ..Message::default() };
        let mut chat = ChatRequest::new("m".into(), vec![message]);
        change(&mut chat);
        check(&Request::Chat(Box::new(chat)), surface, &Task::Generate)
    }

    #[track_caller]
    fn refused(result: Result<(), ApiError>, param: &str, words: &str) {
        let error = result.expect_err(param);
        assert_eq!((error.kind, error.param.as_deref()), (ApiErrorKind::UnsupportedValue, Some(param)));
        assert!(error.message.starts_with(&format!("{param}: ")) && error.message.contains(words), "{error}");
    }

    #[test]
    fn refusals_name_the_field_of_the_clients_own_api() {
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
    fn what_is_not_the_models_task_is_refused() {
        let rerank = RerankRequest {
            model: "m".into(),
            query: "q".into(),
            documents: vec!["d".into()],
            top_n: None,
            return_documents: false,
            ignored: Vec::new(),
        };
        let (rerank, embeds) = (Request::Rerank(Box::new(rerank)), Task::Embed(VectorRules::default()));
        refused(check(&rerank, Surface::Rerank, &Task::Generate), "model", "makes text, not scores");
        refused(check(&rerank, Surface::Rerank, &embeds), "model", "makes vectors, not scores");
        let message = Message { content: Some("hi".into()), ..Message::default() };
        let chat = Request::Chat(Box::new(ChatRequest::new("m".into(), vec![message])));
        refused(check(&chat, Surface::Messages, &embeds), "model", "makes vectors, not text");
    }

    #[test]
    fn what_asks_for_nothing_special_passes() {
        assert_eq!(chat(|_| {}), Ok(()));
    }
}
