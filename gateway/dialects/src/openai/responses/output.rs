//! Conversion of a model's events into items of a response: one machine behind streams and whole answers, so that both
//! have the same content.
//!
//! Reasoning, text and each call are items; text and refusal are parts of one message. An item ends when another
//! begins, except a call whose arguments are not complete: calls may arrive interleaved. `response.created` and
//! `response.in_progress` are sent with the first item: until then nothing binds the gateway to an upstream.

use bytes::{BufMut, BytesMut};

use super::echo::{Echo, ResponseFailure, ResponseStatus, State};
use super::events::Events;
use super::items::{Item, ItemBody, ItemStatus, MessagePart, put_text, quoted};
use crate::openai::provider::Balance;
use crate::reasoning_maker::to_responses_client;
use penstock_types::codec::AnswerMeta;
use penstock_types::error_shape::{self, ErrorShape};
use penstock_types::event::{ChatEvent, FinishReason, TokenLogprob, TokenPlace, Usage};
use penstock_types::request::TokenNames;
use penstock_types::write;

/// Bound of one answer, held so that its last event can repeat it, in bytes; a larger answer fails.
const HELD_BYTES_MAX: usize = 64 << 20;

/// One response under construction: its items, and the events that report them.
pub(super) struct Output {
    echo: std::sync::Arc<Echo>,
    meta: AnswerMeta,
    logprobs: bool,
    events: Events,
    begun: bool,
    /// True if the client was told of the response when it was queued.
    queued: bool,
    ended: bool,
    items: Vec<Item>,
    /// Bytes of items that have ended.
    held: usize,
    usage: Option<Usage>,
    finish: Option<FinishReason>,
}

impl Output {
    pub(super) fn new(echo: std::sync::Arc<Echo>, meta: AnswerMeta, logprobs: bool, streamed: bool) -> Self {
        Self {
            echo,
            meta,
            logprobs,
            events: Events::new(streamed),
            begun: false,
            queued: false,
            ended: false,
            items: Vec::new(),
            held: 0,
            usage: None,
            finish: None,
        }
    }

    /// Machine of a response in the background whose events follow those of [`Output::queue`].
    pub(super) fn queued(echo: std::sync::Arc<Echo>, meta: AnswerMeta, logprobs: bool) -> Self {
        Self {
            queued: true,
            events: Events::from(super::ResponseForm::QUEUED_EVENTS),
            ..Self::new(echo, meta, logprobs, true)
        }
    }

    /// Appends the events of a response that waits in the background: it was created, and it is queued.
    pub(super) fn queue(echo: &Echo, meta: &AnswerMeta, out: &mut BytesMut) {
        let mut events = Events::new(true);
        let state = State { status: ResponseStatus::Queued, output: &[], usage: None, failure: None };
        for kind in ["response.created", "response.queued"] {
            events.put(kind, out, |object| echo.put(meta, &state, object.key("response")));
        }
    }

    /// Appends the last event of a response in the background. Later calls add nothing.
    pub(super) fn conclude(
        &mut self,
        status: ResponseStatus,
        failure: Option<&ResponseFailure>,
        number: Option<u64>,
        out: &mut BytesMut,
    ) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        if let Some(number) = number {
            self.events = Events::from(number);
        }
        let kind = match status {
            ResponseStatus::Completed => "response.completed",
            ResponseStatus::Failed => "response.failed",
            // The API has no event for a response that was cancelled: it is incomplete, and its status says why.
            _ => "response.incomplete",
        };
        self.lifecycle(kind, status, failure, out);
    }

    /// Takes an event and appends the stream events for it. Only the first choice is used.
    pub(super) fn event(&mut self, event: &ChatEvent, out: &mut BytesMut) {
        if self.ended {
            return;
        }
        match event {
            ChatEvent::Usage(usage) => self.usage = Some(*usage),
            _ if self.finish.is_some() => {}
            ChatEvent::Text { choice: 0, text, logprobs, .. } => {
                // Log-probabilities belong to a text: tokens outside the text have no place here.
                let shown = |token: &&TokenLogprob| self.logprobs && token.place == TokenPlace::Text;
                let logprobs: Vec<&TokenLogprob> = logprobs.iter().filter(shown).collect();
                if !(text.is_empty() && logprobs.is_empty()) {
                    self.text(false, text, &logprobs, out);
                }
            }
            ChatEvent::Refusal { choice: 0, text } if !text.is_empty() => self.text(true, text, &[], out),
            ChatEvent::Reasoning { choice: 0, text } if !text.is_empty() => self.reasoning(text, out),
            ChatEvent::ReasoningSignature { choice: 0, signature } => self.signature(signature, out),
            ChatEvent::ToolCallStart { choice: 0, call, id, name, signature } => {
                let (call_id, name, signature) = (id.clone(), name.clone(), signature.clone());
                let (arguments, balance) = (BytesMut::new(), Balance::default());
                self.open(ItemBody::Call { call: *call, call_id, name, arguments, balance, signature }, out);
            }
            ChatEvent::ToolCallArguments { choice: 0, call, json } if !json.is_empty() => {
                self.arguments(*call, json, out);
            }
            ChatEvent::Finish { choice: 0, reason, .. } => self.finished(*reason, out),
            _ => {}
        }
        if self.bytes() > HELD_BYTES_MAX {
            self.fail(error_shape::BODY_TOO_LARGE, "The answer grew too large.", out);
        }
    }

    /// Bytes held by the response.
    pub(super) fn bytes(&self) -> usize {
        let open = self.items.iter().filter(|item| item.status == ItemStatus::InProgress);
        self.held + open.map(Item::bytes).sum::<usize>()
    }

    /// Final state; `None` while the response goes on.
    pub(super) fn status(&self) -> Option<ResponseStatus> {
        Some(match self.finish? {
            FinishReason::Stop | FinishReason::ToolCalls => ResponseStatus::Completed,
            FinishReason::Length => ResponseStatus::OutOfTokens,
            FinishReason::ContentFilter => ResponseStatus::Filtered,
        })
    }

    /// Items of the response, joined by commas.
    pub(super) fn items(&self) -> BytesMut {
        let mut out = BytesMut::with_capacity(self.held + 256 * self.items.len());
        for (index, item) in self.items.iter().enumerate() {
            if index > 0 {
                out.put_u8(b',');
            }
            item.put(false, &mut out);
        }
        out
    }

    /// Appends the Response resource in its final state to `out`.
    pub(super) fn put_resource(&self, status: ResponseStatus, failure: Option<&ResponseFailure>, out: &mut BytesMut) {
        let usage = self.usage.unwrap_or_default();
        let usage = Some(&usage).filter(|_| failure.is_none());
        let state = State { status, output: &self.items(), usage, failure };
        self.echo.put(&self.meta, &state, out);
    }

    /// Ends a stream: with the whole response, or with a failure if it is not complete. Later calls add nothing.
    pub(super) fn done(&mut self, out: &mut BytesMut) {
        if self.ended {
            return;
        }
        let Some(status) = self.status() else {
            return self.fail(error_shape::UPSTREAM, "The answer ended before it was complete.", out);
        };
        self.ended = true;
        let kind = if status == ResponseStatus::Completed { "response.completed" } else { "response.incomplete" };
        self.lifecycle(kind, status, None, out);
    }

    /// Ends a stream with an error, then with the failed response. Later calls add nothing.
    pub(super) fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let begun = self.begun;
        self.events.put("error", out, |object| {
            write::optional_string(object.key("code"), shape.code);
            object.string("message", message);
            object.raw("param", "null");
        });
        if begun {
            for item in &mut self.items {
                if item.status == ItemStatus::InProgress {
                    item.status = ItemStatus::Incomplete;
                }
            }
            let code = match shape.code {
                Some("rate_limit_exceeded") => "rate_limit_exceeded",
                Some("content_policy_violation" | "content_filter") => "invalid_prompt",
                _ => "server_error",
            };
            let failure = ResponseFailure { code, message: message.to_owned() };
            self.lifecycle("response.failed", ResponseStatus::Failed, Some(&failure), out);
        }
    }

    fn lifecycle(&mut self, kind: &str, status: ResponseStatus, failure: Option<&ResponseFailure>, out: &mut BytesMut) {
        let mut events = std::mem::replace(&mut self.events, Events::new(false));
        events.put(kind, out, |object| self.put_resource(status, failure, object.key("response")));
        self.events = events;
    }

    fn begin(&mut self, out: &mut BytesMut) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let (echo, meta) = (&self.echo, &self.meta);
        let kinds = ["response.created", "response.in_progress"];
        for kind in &kinds[usize::from(self.queued)..] {
            let state = State { status: ResponseStatus::InProgress, output: &[], usage: None, failure: None };
            self.events.put(kind, out, |object| echo.put(meta, &state, object.key("response")));
        }
    }

    fn finished(&mut self, reason: FinishReason, out: &mut BytesMut) {
        if self.items.is_empty() {
            // The answer was empty: clients expect a message all the same.
            self.text(false, "", &[], out);
        }
        let complete = matches!(reason, FinishReason::Stop | FinishReason::ToolCalls);
        let status = if complete { ItemStatus::Completed } else { ItemStatus::Incomplete };
        for index in 0..self.items.len() {
            self.close(index, status, out);
        }
        self.finish = Some(reason);
    }

    /// Opens a new item at the end of the list.
    fn open(&mut self, body: ItemBody, out: &mut BytesMut) {
        self.begin(out);
        for index in 0..self.items.len() {
            if self.items[index].ends_with_the_next() {
                self.close(index, ItemStatus::Completed, out);
            }
        }
        let prefix = match body {
            ItemBody::Message { .. } => "msg",
            ItemBody::Reasoning { .. } => "rs",
            ItemBody::Call { .. } => "fc",
        };
        let id = format!("{prefix}_{}_{}", self.meta.id, self.items.len());
        let item = Item { id, status: ItemStatus::InProgress, body };
        let at = self.items.len();
        self.events.put("response.output_item.added", out, |object| {
            object.integer("output_index", at as u64);
            item.put(true, object.key("item"));
        });
        self.items.push(item);
    }

    /// The last item of the response, if it is in progress.
    fn current(&mut self) -> Option<&mut Item> {
        self.items.last_mut().filter(|item| item.status == ItemStatus::InProgress)
    }

    fn text(&mut self, refusal: bool, text: &str, logprobs: &[&TokenLogprob], out: &mut BytesMut) {
        if !matches!(self.current(), Some(Item { body: ItemBody::Message { .. }, .. })) {
            self.open(ItemBody::Message { parts: Vec::new() }, out);
        }
        let at = self.items.len() - 1;
        let item = &self.items[at];
        let ItemBody::Message { parts } = &item.body else { return };
        if parts.last().is_none_or(|part| part.refusal != refusal) {
            self.close_part(at, out);
            self.open_part(at, refusal, out);
        }
        let Item { id, body: ItemBody::Message { parts }, .. } = &mut self.items[at] else { return };
        let index = parts.len() - 1;
        let Some(part) = parts.last_mut() else { return };
        write::escaped(&mut part.text, text);
        let from = part.logprobs.len();
        for token in logprobs {
            if !part.logprobs.is_empty() {
                part.logprobs.put_u8(b',');
            }
            write::chat_logprob(&mut part.logprobs, token, TokenNames::Text);
        }
        let new = part.logprobs.get(from..).unwrap_or_default();
        let new = new.strip_prefix(b",").unwrap_or(new);
        if text.is_empty() && new.is_empty() {
            return; // an empty answer: nothing but its part
        }
        let kind = if refusal { "response.refusal.delta" } else { "response.output_text.delta" };
        self.events.put(kind, out, |object| {
            put_place(object, id, at, index);
            object.string("delta", text);
            if !refusal {
                super::items::bracketed(object.key("logprobs"), new);
            }
        });
    }

    fn open_part(&mut self, at: usize, refusal: bool, out: &mut BytesMut) {
        let Item { id, body: ItemBody::Message { parts }, .. } = &mut self.items[at] else { return };
        let part = MessagePart { refusal, ..MessagePart::default() };
        self.events.put("response.content_part.added", out, |object| {
            put_place(object, id, at, parts.len());
            part.put(true, object.key("part"));
        });
        parts.push(part);
    }

    fn close_part(&mut self, at: usize, out: &mut BytesMut) {
        let Item { id, body: ItemBody::Message { parts }, .. } = &self.items[at] else { return };
        let Some(part) = parts.last() else { return };
        let index = parts.len() - 1;
        let kind = if part.refusal { "response.refusal.done" } else { "response.output_text.done" };
        self.events.put(kind, out, |object| {
            put_place(object, id, at, index);
            if part.refusal {
                quoted(object.key("refusal"), &part.text);
            } else {
                quoted(object.key("text"), &part.text);
                super::items::bracketed(object.key("logprobs"), &part.logprobs);
            }
        });
        self.events.put("response.content_part.done", out, |object| {
            put_place(object, id, at, index);
            part.put(false, object.key("part"));
        });
    }

    fn reasoning(&mut self, text: &str, out: &mut BytesMut) {
        if !matches!(self.current(), Some(Item { body: ItemBody::Reasoning { encrypted: None, .. }, .. })) {
            let summary = self.echo.summary.is_some();
            self.open(ItemBody::Reasoning { summary, text: BytesMut::new(), open: false, encrypted: None }, out);
        }
        let at = self.items.len() - 1;
        let Item { id, body: ItemBody::Reasoning { summary, text: held, open, .. }, .. } = &mut self.items[at] else {
            return;
        };
        let summary = *summary;
        if !std::mem::replace(open, true) {
            let kind = if summary { "response.reasoning_summary_part.added" } else { "response.content_part.added" };
            self.events.put(kind, out, |object| {
                put_reasoning_place(object, id, at, summary);
                put_text(object.key("part"), reasoning_type(summary), &[]);
            });
        }
        write::escaped(held, text);
        let kind = if summary { "response.reasoning_summary_text.delta" } else { "response.reasoning_text.delta" };
        self.events.put(kind, out, |object| {
            put_reasoning_place(object, id, at, summary);
            object.string("delta", text);
        });
    }

    /// Handles a signature that the provider wants back. The signature belongs to the reasoning before it; without one
    /// it becomes a reasoning item of its own.
    fn signature(&mut self, signature: &str, out: &mut BytesMut) {
        if !matches!(self.current(), Some(Item { body: ItemBody::Reasoning { encrypted: None, .. }, .. })) {
            let summary = self.echo.summary.is_some();
            self.open(ItemBody::Reasoning { summary, text: BytesMut::new(), open: false, encrypted: None }, out);
        }
        if let Some(Item { body: ItemBody::Reasoning { encrypted, .. }, .. }) = self.items.last_mut() {
            *encrypted = Some(to_responses_client(signature).into_owned());
        }
    }

    fn arguments(&mut self, call: u32, json: &str, out: &mut BytesMut) {
        let found =
            self.items.iter().rposition(|item| matches!(&item.body, ItemBody::Call { call: at, .. } if *at == call));
        let Some(at) = found else { return };
        let item = &mut self.items[at];
        let Item { id, status: ItemStatus::InProgress, body: ItemBody::Call { arguments, balance, .. } } = item else {
            return; // complete, and another item has begun since: space
        };
        write::escaped(arguments, json);
        balance.take(json);
        self.events.put("response.function_call_arguments.delta", out, |object| {
            object.string("item_id", id);
            object.integer("output_index", at as u64);
            object.string("delta", json);
        });
    }

    /// Ends an item that is in progress.
    fn close(&mut self, at: usize, status: ItemStatus, out: &mut BytesMut) {
        if self.items[at].status != ItemStatus::InProgress {
            return;
        }
        match &self.items[at].body {
            ItemBody::Message { .. } => self.close_part(at, out),
            ItemBody::Reasoning { .. } => self.close_reasoning(at, out),
            ItemBody::Call { .. } => self.close_call(at, out),
        }
        let item = &mut self.items[at];
        item.status = status;
        self.held += item.bytes();
        self.events.put("response.output_item.done", out, |object| {
            object.integer("output_index", at as u64);
            item.put(false, object.key("item"));
        });
    }

    fn close_reasoning(&mut self, at: usize, out: &mut BytesMut) {
        let Item { id, body: ItemBody::Reasoning { summary, text, open: true, .. }, .. } = &self.items[at] else {
            return;
        };
        let summary = *summary;
        let (text_done, part_done) = match summary {
            true => ("response.reasoning_summary_text.done", "response.reasoning_summary_part.done"),
            false => ("response.reasoning_text.done", "response.content_part.done"),
        };
        self.events.put(text_done, out, |object| {
            put_reasoning_place(object, id, at, summary);
            quoted(object.key("text"), text);
        });
        self.events.put(part_done, out, |object| {
            put_reasoning_place(object, id, at, summary);
            put_text(object.key("part"), reasoning_type(summary), text);
        });
    }

    fn close_call(&mut self, at: usize, out: &mut BytesMut) {
        let Item { id, body: ItemBody::Call { name, arguments, .. }, .. } = &self.items[at] else { return };
        self.events.put("response.function_call_arguments.done", out, |object| {
            object.string("item_id", id);
            object.integer("output_index", at as u64);
            object.string("name", name);
            quoted(object.key("arguments"), arguments);
        });
    }
}

type Fields<'a> = crate::openai::provider::Object<'a>;

fn put_place(object: &mut Fields<'_>, id: &str, at: usize, part: usize) {
    object.string("item_id", id);
    object.integer("output_index", at as u64);
    object.integer("content_index", part as u64);
}

fn put_reasoning_place(object: &mut Fields<'_>, id: &str, at: usize, summary: bool) {
    object.string("item_id", id);
    object.integer("output_index", at as u64);
    object.integer(if summary { "summary_index" } else { "content_index" }, 0);
}

fn reasoning_type(summary: bool) -> &'static str {
    if summary { "summary_text" } else { "reasoning_text" }
}
