//! Requests of the Responses API with their earlier turns, also after a plugin has edited the body.
//!
//! The body names turns (`previous_response_id`, `conversation`) that only the store has. They are read once, in front of
//! the plugins; until the last plugin has run they are kept beside the decoded request, so that an edited body is put
//! behind the same turns. The answer keeps the form that the client asked for.

use std::sync::Arc;

use penstock_dialects::openai::{ResponseForm, ResponsesRequest};
use penstock_store::Turn;
use penstock_types::{AnswerMeta, ApiError, Bounds, ChatRequest, Decoded, Request};

use penstock_base::error::Failure;
use penstock_upstream::answer_memory::{AnswerMemory, Hold};
use penstock_upstream::call::{Call, ReadEdit, off_io};

/// Decoder of a body, without the turns before it.
pub(super) type Read = fn(&[u8], &Bounds) -> Result<ResponsesRequest, ApiError>;

/// Request of a response, with its earlier turns in it.
pub(super) struct Resolved {
    /// Request that a model is asked.
    pub(super) chat: ChatRequest,
    /// Form of the answer.
    pub(super) form: ResponseForm,
    /// Decoder of the body once a plugin has edited it; `None` where no plugin is.
    edits: Option<ReadEdit>,
}

impl Resolved {
    /// Puts the request into its call, whose answer is named by `meta`.
    pub(super) fn put(self, call: &mut Call, meta: AnswerMeta) {
        call.answer_as(meta, Decoded { request: Request::Chat(Box::new(self.chat)), form: Box::new(self.form) });
        self.edits.into_iter().for_each(|edits| call.read_edits_with(edits));
    }
}

/// Bytes of the items of turns, as they are stored.
pub(super) fn bytes_of(turns: &[Turn]) -> usize {
    turns.iter().map(|turn| turn.input.len() + turn.output.len()).sum()
}

/// Charges `memory` for earlier turns of `bytes`: once for their part of the request, and, where plugins may edit the
/// body, once more for the turns that wait for edits.
///
/// # Errors
/// There is no memory for them.
pub(super) fn charged(memory: &AnswerMemory, bytes: usize, has_plugins: bool) -> Result<(Hold, Option<Hold>), Failure> {
    let (mut hold, mut kept) = (memory.hold(), has_plugins.then(|| memory.hold()));
    hold.cover(bytes)?;
    kept.as_mut().map_or(Ok(()), |kept| kept.cover(bytes))?;
    Ok((hold, kept))
}

/// Puts the earlier turns in front of a request. `read` decodes edited bodies; `kept` covers the turns that wait for
/// edits, and is `None` where there are no plugins ([`charged`]). The inner error is the rule that the items break.
///
/// # Errors
/// The work could not be done.
pub(super) async fn resolve(
    request: ResponsesRequest,
    turns: Vec<Turn>,
    read: Read,
    kept: Option<Hold>,
) -> Result<Result<Resolved, ApiError>, Failure> {
    let bytes = bytes_of(&turns);
    let (previous, conversation) = (request.previous_response_id.clone(), request.conversation.clone());
    let work = move || {
        let stored = request.store;
        let resolved = request.resolve(&lists(&turns), stored);
        (resolved, turns)
    };
    let (resolved, turns) = off_io(bytes, work).await?;
    let (chat, form) = match resolved {
        Ok(resolved) => resolved,
        Err(error) => return Ok(Err(error)),
    };
    let Some(kept) = kept else { return Ok(Ok(Resolved { chat, form, edits: None })) };
    let answer = form.clone();
    let edits = move |body: &[u8]| {
        // Charged as long as the turns are here.
        let _charged = &kept;
        let edited = read(body, &Bounds::default())?;
        let names = (edited.previous_response_id.as_ref(), edited.conversation.as_ref());
        let earlier = match names {
            // A body that names no turns holds them: an edited request was written out before, or a plugin wants none.
            (None, None) => Vec::new(),
            names if names == (previous.as_ref(), conversation.as_ref()) => lists(&turns),
            _ => return Err(Failure::internal("a plugin changed previous_response_id or conversation")),
        };
        let (chat, _) = edited.resolve(&earlier, true)?;
        Ok(Decoded { request: Request::Chat(Box::new(chat)), form: Box::new(answer.clone()) })
    };
    Ok(Ok(Resolved { chat, form, edits: Some(Arc::new(edits)) }))
}

/// Decoder for plugins, for a request whose earlier turns only a provider has: it decodes the request's own items
/// alone.
pub(super) fn partial(read: Read) -> ReadEdit {
    Arc::new(move |body| {
        let request = read(body, &Bounds::default())?;
        let stored = request.store;
        let (chat, form) = request.resolve(&[], stored)?;
        Ok(Decoded { request: Request::Chat(Box::new(chat)), form: Box::new(form) })
    })
}

fn lists(turns: &[Turn]) -> Vec<&[u8]> {
    turns.iter().flat_map(|turn| [turn.input.as_ref(), turn.output.as_ref()]).collect()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::HeaderMap;
    use penstock_http::{Body, BodyBudget};
    use penstock_types::Surface;
    use penstock_types::ask::Ask;

    use super::*;

    const BODY: &str = r#"{"model":"m","input":"And you?","previous_response_id":"resp_1","background":true}"#;

    /// A call of [`BODY`] behind one stored turn.
    async fn call() -> Call {
        let turn = Turn {
            input: Bytes::from_static(br#"[{"role":"user","content":"I am Ada."}]"#),
            output: Bytes::from_static(br#"[{"type":"message","role":"assistant","content":"Hello, Ada."}]"#),
        };
        let request = ResponsesRequest::decode(BODY.as_bytes(), &Bounds::default()).expect("a request");
        let kept = Some(AnswerMemory::default().hold());
        let resolved = resolve(request, vec![turn], ResponsesRequest::decode, kept).await.expect("memory");
        let mut call = call_of(BODY).await;
        call.own = true;
        resolved.expect("a conversation").put(&mut call, AnswerMeta::new("1".into(), 1));
        call
    }

    async fn call_of(body: &'static str) -> Call {
        let body =
            Body { bytes: Bytes::from_static(body.as_bytes()), lease: BodyBudget::new(1 << 20, 1 << 20).lease() };
        let (ask, headers) = (Ask::new(Surface::Responses), HeaderMap::new());
        Call::new(ask, body, "req_1".into(), headers, penstock_dialects::decode).await.expect("a call")
    }

    fn texts(decoded: &Decoded) -> (Vec<&str>, Option<f32>) {
        let Request::Chat(chat) = &decoded.request else { panic!("a conversation") };
        (chat.messages.iter().filter_map(|message| message.content.as_deref()).collect(), chat.sampling.temperature)
    }

    async fn edited(body: &'static str) -> Result<Arc<Decoded>, Failure> {
        let mut call = call().await;
        call.set_body(Bytes::from_static(body.as_bytes()), None).await?;
        call.end_edits();
        call.decoded().await
    }

    #[tokio::test]
    async fn an_edited_body_stays_behind_its_turns() {
        let body = r#"{"model":"m","input":"And you, Bob?","previous_response_id":"resp_1","background":true,"temperature":0.5}"#;
        let decoded = edited(body).await.expect("read");
        assert_eq!(texts(&decoded), (vec!["I am Ada.", "Hello, Ada.", "And you, Bob?"], Some(0.5)));
    }

    #[tokio::test]
    async fn a_body_that_names_no_turns_has_those_that_it_holds() {
        let decoded = edited(r#"{"model":"m","input":"Alone."}"#).await.expect("read");
        assert_eq!(texts(&decoded).0, ["Alone."]);
    }

    #[tokio::test]
    async fn without_turns_a_plugin_may_add_what_only_a_provider_knows() {
        let request =
            ResponsesRequest::decode(br#"{"model":"m","input":"Hi"}"#, &Bounds::default()).expect("a request");
        let kept = Some(AnswerMemory::default().hold());
        let resolved =
            resolve(request, Vec::new(), ResponsesRequest::decode, kept).await.expect("done").expect("items");
        let mut call = call_of(r#"{"model":"m","input":"Hi"}"#).await;
        resolved.put(&mut call, AnswerMeta::new("1".into(), 1));
        let body = r#"{"model":"m","input":"Hi","tools":[{"type":"web_search"}]}"#;
        call.set_body(Bytes::from_static(body.as_bytes()), None).await.expect("it goes to a provider as it is");
        call.end_edits();
        assert!(call.decoded().await.is_err(), "whoever has to read it refuses it");
    }

    #[tokio::test]
    async fn no_plugin_goes_on_from_another_response() {
        let refused = edited(r#"{"model":"m","input":"x","previous_response_id":"resp_2"}"#).await.err();
        assert_eq!(refused.map(|failure| failure.status()), Some(500));
    }

    #[tokio::test]
    async fn turns_of_a_provider_are_left_out_for_plugins_and_not_for_upstreams() {
        let mut call = call_of(BODY).await;
        call.unresolved = Some(Box::new(Failure::internal("not here")));
        call.read_edits_with(partial(ResponsesRequest::decode));
        let shown = call.decode_edit(call.body.clone()).await.expect("read");
        assert_eq!(texts(&shown).0, ["And you?"]);
        call.put_decoded(shown);
        assert!(call.decoded().await.is_err() && call.decoded_before().is_some());
    }
}
