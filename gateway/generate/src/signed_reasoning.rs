//! Reasoning that is signed on its way to the client, and checked when it comes back.
//!
//! A block of reasoning that a client sends back is shown to the model only if this gateway, or another gateway of
//! the same store, has signed that text for that tenant and model. A block without a signature is left out; one whose
//! signature is wrong is refused, or left out where conversations come from other models, too.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::task::{Context, Poll};

use http::{HeaderName, HeaderValue};
use penstock_base::error::Failure;
use penstock_types::request::{Message, ReasoningBlock};
use penstock_types::{ApiError, ChatEvent, ChatRequest, Request};
use penstock_upstream::reasoning_signer::{Signer, Signing};
use penstock_upstream::{Course, Events, Facts};

/// Events of an answer, with a signature behind each run of reasoning.
pub(crate) struct SignedEvents {
    events: Box<dyn Events>,
    signer: Signer,
    model: String,
    /// Signatures in the making, by choice.
    open: BTreeMap<u32, Signing>,
}

impl SignedEvents {
    /// Events of `model`, signed by `signer`.
    pub(crate) fn new(events: Box<dyn Events>, signer: Signer, model: String) -> Self {
        Self { events, signer, model, open: BTreeMap::new() }
    }

    fn sign(&mut self, fresh: Vec<ChatEvent>, out: &mut Vec<ChatEvent>) {
        for event in fresh {
            let ended = match &event {
                ChatEvent::Reasoning { choice, text } if !text.is_empty() => {
                    let signing = self.open.entry(*choice).or_insert_with(|| self.signer.begin(&self.model));
                    signing.add(text);
                    None
                }
                ChatEvent::Text { choice, text, .. } if !text.is_empty() => Some(*choice),
                ChatEvent::ToolCallStart { choice, .. } | ChatEvent::Finish { choice, .. } => Some(*choice),
                _ => None,
            };
            let signed = ended.and_then(|choice| Some((choice, self.open.remove(&choice)?)));
            out.extend(
                signed.map(|(choice, signing)| ChatEvent::ReasoningSignature { choice, signature: signing.end() }),
            );
            out.push(event);
        }
    }
}

impl Events for SignedEvents {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        let mut fresh = Vec::new();
        let polled = self.events.poll_events(context, &mut fresh);
        self.sign(fresh, out);
        polled
    }

    fn facts(&self) -> Facts {
        self.events.facts()
    }

    fn facts_at_end(&self) -> Facts {
        self.events.facts_at_end()
    }

    fn score(&self, choice: u32) -> Option<f32> {
        self.events.score(choice)
    }

    fn course(&self) -> Course {
        self.events.course()
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        self.events.headers()
    }
}

/// The request with only that earlier reasoning which is proved to be `model`'s own.
///
/// # Errors
/// A refusal that names the first block whose signature is wrong, unless `drops_foreign`.
pub(crate) fn trusted<'r>(
    request: &'r Request,
    signer: Option<&Signer>,
    model: &str,
    drops_foreign: bool,
) -> Result<Cow<'r, Request>, ApiError> {
    let (Request::Chat(chat), Some(signer)) = (request, signer) else { return Ok(Cow::Borrowed(request)) };
    let mut changed: Option<ChatRequest> = None;
    for (index, message) in chat.messages.iter().enumerate() {
        if message.reasoning_blocks.is_empty() {
            continue;
        }
        let reasoning = proved(message, signer, model, drops_foreign)?;
        if reasoning != message.reasoning {
            let chat = changed.get_or_insert_with(|| (**chat).clone());
            chat.messages[index].reasoning = reasoning;
        }
    }
    Ok(changed.map_or(Cow::Borrowed(request), |chat| Cow::Owned(Request::Chat(Box::new(chat)))))
}

/// Text of a message's reasoning blocks whose signatures are right.
fn proved(message: &Message, signer: &Signer, model: &str, drops_foreign: bool) -> Result<Option<String>, ApiError> {
    let mut texts: Vec<&str> = Vec::new();
    for block in &message.reasoning_blocks {
        match (&block.text, &block.signature) {
            (Some(text), Some(signature)) if signer.is_of(model, text, signature) => texts.push(text),
            (Some(_), None) => {}
            _ if drops_foreign => {}
            _ => return Err(refusal(block)),
        }
    }
    texts.retain(|text| !text.is_empty());
    Ok((!texts.is_empty()).then(|| texts.join("\n\n")))
}

/// Refusal of a block, in the words of Anthropic's API.
fn refusal(block: &ReasoningBlock) -> ApiError {
    let place = format!("messages.{}.content.{}", block.message, block.block);
    let what = match block.text {
        Some(_) => "Invalid `signature` in `thinking` block",
        None => "Invalid `data` in `redacted_thinking` block",
    };
    ApiError::invalid(&place, format!("{place}: {what}"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use penstock_types::FinishReason;
    use penstock_types::request::Role;

    use super::*;

    fn signer() -> Signer {
        Signer::new(Arc::from([7; 32]), "team")
    }

    fn signature(text: &str) -> String {
        let mut signing = signer().begin("m");
        signing.add(text);
        signing.end()
    }

    fn block(at: usize, text: Option<&str>, signature: Option<String>) -> ReasoningBlock {
        ReasoningBlock { message: 1, block: at, text: text.map(str::to_owned), signature }
    }

    /// Reasoning that a model is shown of blocks that came back.
    fn shown(blocks: Vec<ReasoningBlock>, drops_foreign: bool) -> Result<Option<String>, ApiError> {
        let texts: Vec<String> = blocks.iter().filter_map(|block| block.text.clone()).collect();
        let message = Message {
            role: Role::Assistant,
            reasoning: Some(texts.join("\n\n")),
            reasoning_blocks: blocks,
            ..Message::default()
        };
        let request = Request::Chat(Box::new(ChatRequest::new("m".into(), vec![message])));
        let trusted = trusted(&request, Some(&signer()), "m", drops_foreign)?;
        let Request::Chat(chat) = trusted.as_ref() else { panic!("a chat") };
        Ok(chat.messages[0].reasoning.clone())
    }

    #[test]
    fn reasoning_comes_back_as_it_was_or_not_at_all() {
        let good = |at, text| block(at, Some(text), Some(signature(text)));
        assert_eq!(shown(vec![good(0, "a"), good(2, "b")], false), Ok(Some("a\n\nb".into())));
        assert_eq!(shown(vec![good(0, "a"), block(1, Some("b"), None)], false), Ok(Some("a".into())), "unsigned");
        assert_eq!(shown(vec![block(0, Some("a"), None)], false), Ok(None));
        for (blocks, place) in [
            (vec![good(0, "a"), block(3, Some("b"), Some(signature("c")))], "messages.1.content.3"),
            (vec![block(0, Some("b"), Some("EqQBCkYIBxgC".into()))], "messages.1.content.0"),
            (vec![block(1, None, Some("opaque".into()))], "messages.1.content.1"),
        ] {
            let error = shown(blocks.clone(), false).expect_err("refused");
            assert_eq!(error.param.as_deref(), Some(place));
            assert!(error.message.starts_with(&format!("{place}: Invalid `")), "{error}");
            assert!(shown(blocks, true).is_ok());
        }
        assert_eq!(shown(vec![good(0, "a"), block(1, None, Some("opaque".into()))], true), Ok(Some("a".into())));
    }

    #[test]
    fn requests_without_a_signer_stay_as_they_are() {
        let message = Message { reasoning_blocks: vec![block(0, Some("a"), None)], ..Message::default() };
        let request = Request::Chat(Box::new(ChatRequest::new("m".into(), vec![message])));
        assert!(matches!(trusted(&request, None, "m", false), Ok(Cow::Borrowed(_))));
    }

    /// Events of a list, a few at a time.
    struct Listed(Vec<Vec<ChatEvent>>);

    impl Events for Listed {
        fn poll_events(&mut self, _: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
            out.extend(self.0.remove(0));
            Poll::Ready(Ok(!self.0.is_empty()))
        }

        fn facts(&self) -> Facts {
            Facts::default()
        }
    }

    #[test]
    fn each_run_of_reasoning_gets_a_signature() {
        let thought = |choice, text: &str| ChatEvent::Reasoning { choice, text: text.into() };
        let text = |text: &str| ChatEvent::Text { choice: 0, text: text.into(), logprobs: vec![], tokens: vec![] };
        let finish = |choice| ChatEvent::Finish { choice, reason: FinishReason::Stop, stop: None };
        let said = vec![
            vec![thought(0, "a"), thought(1, "x")],
            vec![text(""), thought(0, "b"), text("1"), text("2")],
            vec![thought(0, "c"), finish(0), finish(1)],
        ];
        let mut events = SignedEvents::new(Box::new(Listed(said)), signer(), "m".into());
        let (mut out, mut context) = (Vec::new(), Context::from_waker(std::task::Waker::noop()));
        while matches!(events.poll_events(&mut context, &mut out), Poll::Ready(Ok(true))) {}
        let signed = |choice, text| ChatEvent::ReasoningSignature { choice, signature: signature(text) };
        let want = [
            thought(0, "a"),
            thought(1, "x"),
            text(""),
            thought(0, "b"),
            signed(0, "ab"),
            text("1"),
            text("2"),
            thought(0, "c"),
            signed(0, "c"),
            finish(0),
            signed(1, "x"),
            finish(1),
        ];
        assert_eq!(out, want);
    }
}
