//! Answers of `/api/chat` and `/api/generate`: lines of JSON, or one object.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};

use crate::answer_json::are_arguments;
use penstock_types::ErrorShape;
use penstock_types::codec::{Elapsed, StreamEncoder, WholeCollector};
use penstock_types::error_body::ollama as error_body;
use penstock_types::event::{ChatEvent, FinishReason, TokenLogprob, Usage};
use penstock_types::json_text::compacted;
use penstock_types::request::TokenNames;
use penstock_types::write;

/// Facts of a request that its answer repeats or is shaped by.
#[derive(Clone)]
pub(super) struct Meta {
    pub(super) model: String,
    /// Time of the answer, `2025-06-15T15:06:40Z`.
    pub(super) created: String,
    /// True for `/api/chat`, whose text is in a message; false for `/api/generate`.
    pub(super) is_chat: bool,
    /// Time since the request was read.
    pub(super) elapsed: Elapsed,
}

/// A call of the model. The API sends calls whole, so its pieces are held.
struct Call {
    id: String,
    name: String,
    arguments: String,
}

/// Content of one line, or of the whole answer.
#[derive(Default)]
struct Piece {
    text: String,
    thinking: String,
    calls: Vec<Call>,
    /// Log-probabilities as JSON text, without the brackets.
    logprobs: BytesMut,
}

impl Piece {
    fn logprobs(&mut self, tokens: &[TokenLogprob]) {
        for token in tokens {
            if !self.logprobs.is_empty() {
                self.logprobs.put_u8(b',');
            }
            write::chat_logprob(&mut self.logprobs, token, TokenNames::Text);
        }
    }

    fn bytes(&self) -> usize {
        let calls: usize =
            self.calls.iter().map(|call| 64 + call.id.len() + call.name.len() + call.arguments.len()).sum();
        self.text.len() + self.thinking.len() + self.logprobs.len() + calls
    }

    /// Moves calls whose arguments are no JSON object into the text: nothing that the model wrote is lost. Arguments lose the
    /// blanks between their tokens: a line end among them would end the line of the answer.
    fn settle_calls(&mut self) {
        let (whole, malformed): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.calls).into_iter().partition(|call| are_arguments(&call.arguments));
        self.calls = whole;
        self.calls.iter_mut().for_each(|call| call.arguments = compacted(&call.arguments));
        malformed.iter().for_each(|call| self.text.push_str(&call.arguments));
    }
}

/// Progress of an answer, beside its text.
#[derive(Default)]
struct Progress {
    finish: Option<FinishReason>,
    usage: Usage,
    /// Times from the request to the first and to the last event with content.
    first: Option<Duration>,
    last: Option<Duration>,
}

impl Progress {
    /// Notes an event; returns false for what is no content of the one choice.
    fn takes(&mut self, event: &ChatEvent, elapsed: &Elapsed) -> bool {
        match event {
            ChatEvent::Usage(usage) => self.usage = *usage,
            ChatEvent::Finish { choice: 0, reason, .. } => self.finish = self.finish.or(Some(*reason)),
            ChatEvent::Text { choice: 0, .. }
            | ChatEvent::Refusal { choice: 0, .. }
            | ChatEvent::Reasoning { choice: 0, .. }
            | ChatEvent::ToolCallStart { choice: 0, .. }
            | ChatEvent::ToolCallArguments { choice: 0, .. } => {
                let now = elapsed.get();
                self.first.get_or_insert(now);
                self.last = Some(now);
                return self.finish.is_none();
            }
            _ => {}
        }
        false
    }
}

/// Writes `{"model":…,"created_at":…` and the piece, without the closing brace.
fn put_head(out: &mut BytesMut, meta: &Meta, piece: &Piece) {
    out.put_slice(b"{\"model\":");
    write::string(out, &meta.model);
    out.put_slice(b",\"created_at\":");
    write::string(out, &meta.created);
    out.put_slice(match meta.is_chat {
        true => b",\"message\":{\"role\":\"assistant\",\"content\":",
        false => b",\"response\":",
    });
    write::string(out, &piece.text);
    if !piece.thinking.is_empty() {
        out.put_slice(b",\"thinking\":");
        write::string(out, &piece.thinking);
    }
    for (index, call) in piece.calls.iter().enumerate() {
        out.put_slice(if index > 0 { b"," } else { b",\"tool_calls\":[" });
        out.put_slice(b"{\"id\":");
        write::string(out, &call.id);
        out.put_slice(b",\"function\":{\"index\":");
        write::integer(out, index as u64);
        out.put_slice(b",\"name\":");
        write::string(out, &call.name);
        out.put_slice(b",\"arguments\":");
        out.put_slice(match call.arguments.trim_ascii() {
            "" => b"{}",
            arguments => arguments.as_bytes(),
        });
        out.put_slice(b"}}");
    }
    out.put_slice(if piece.calls.is_empty() { b"" } else { b"]" });
    out.put_slice(if meta.is_chat { b"}" } else { b"" });
    if !piece.logprobs.is_empty() {
        out.put_slice(b",\"logprobs\":[");
        out.put_slice(&piece.logprobs);
        out.put_u8(b']');
    }
}

/// Writes a line of a stream that goes on.
fn put_line(out: &mut BytesMut, meta: &Meta, piece: &Piece) {
    put_head(out, meta, piece);
    out.put_slice(b",\"done\":false}\n");
}

/// Writes the last line, or the whole answer: the piece, why it ended, times in nanoseconds and counts.
fn put_end(out: &mut BytesMut, meta: &Meta, piece: &Piece, progress: &Progress) {
    put_head(out, meta, piece);
    out.put_slice(match progress.finish {
        Some(FinishReason::Length) => b",\"done\":true,\"done_reason\":\"length\"",
        Some(FinishReason::ContentFilter) => b",\"done\":true,\"done_reason\":\"content_filter\"",
        _ => b",\"done\":true,\"done_reason\":\"stop\"",
    });
    // At least 1 ns: clients divide token counts by these times.
    let nanos = |time: Duration| time.as_nanos().max(1) as u64;
    let now = meta.elapsed.get();
    let first = progress.first.unwrap_or(now);
    let mut count = |name: &str, value: u64| {
        out.put_slice(name.as_bytes());
        write::integer(out, value);
    };
    count(",\"total_duration\":", nanos(now));
    count(",\"load_duration\":", 0);
    count(",\"prompt_eval_count\":", progress.usage.prompt_tokens);
    count(",\"prompt_eval_duration\":", nanos(first));
    count(",\"eval_count\":", progress.usage.completion_tokens);
    count(",\"eval_duration\":", nanos(progress.last.unwrap_or(now).saturating_sub(first)));
    out.put_u8(b'}');
}

/// Encoder of a stream.
pub(super) struct Encoder {
    meta: Meta,
    progress: Progress,
    held: Piece,
    ended: bool,
}

impl Encoder {
    pub(super) fn new(meta: Meta) -> Self {
        Self { meta, progress: Progress::default(), held: Piece::default(), ended: false }
    }
}

impl StreamEncoder for Encoder {
    fn event(&mut self, event: &ChatEvent, out: &mut BytesMut) {
        if !self.progress.takes(event, &self.meta.elapsed) {
            return;
        }
        let mut piece = Piece::default();
        match event {
            ChatEvent::Text { text, logprobs, .. } => {
                piece.text.push_str(text);
                piece.logprobs(logprobs);
            }
            ChatEvent::Refusal { text, .. } => piece.text.push_str(text),
            ChatEvent::Reasoning { text, .. } => piece.thinking.push_str(text),
            _ => return hold(&mut self.held, event),
        }
        if piece.bytes() > 0 {
            put_line(out, &self.meta, &piece);
        }
    }

    fn done(&mut self, out: &mut BytesMut) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let mut held = std::mem::take(&mut self.held);
        held.settle_calls();
        if held.bytes() > 0 {
            put_line(out, &self.meta, &held);
        }
        put_end(out, &self.meta, &Piece::default(), &self.progress);
        out.put_u8(b'\n');
    }

    fn held(&self) -> usize {
        self.held.bytes()
    }

    fn fail(&mut self, _: ErrorShape, message: &str, out: &mut BytesMut) {
        error_body::put_error(out, message);
        out.put_u8(b'\n');
    }
}

/// Adds what an event says of a call.
fn hold(piece: &mut Piece, event: &ChatEvent) {
    match event {
        ChatEvent::ToolCallStart { id, name, .. } => {
            piece.calls.push(Call { id: id.clone(), name: name.clone(), arguments: String::new() });
        }
        ChatEvent::ToolCallArguments { call, json, .. } => {
            if let Some(call) = piece.calls.get_mut(*call as usize) {
                call.arguments.push_str(json);
            }
        }
        _ => {}
    }
}

/// Collector of a whole answer.
pub(super) struct Collector {
    meta: Meta,
    progress: Progress,
    piece: Piece,
}

impl Collector {
    pub(super) fn new(meta: Meta) -> Self {
        Self { meta, progress: Progress::default(), piece: Piece::default() }
    }
}

impl WholeCollector for Collector {
    fn event(&mut self, event: &ChatEvent) {
        if !self.progress.takes(event, &self.meta.elapsed) {
            return;
        }
        match event {
            ChatEvent::Text { text, logprobs, .. } => {
                self.piece.text.push_str(text);
                self.piece.logprobs(logprobs);
            }
            ChatEvent::Refusal { text, .. } => self.piece.text.push_str(text),
            ChatEvent::Reasoning { text, .. } => self.piece.thinking.push_str(text),
            _ => hold(&mut self.piece, event),
        }
    }

    fn bytes(&self) -> usize {
        self.piece.bytes()
    }

    fn finish(mut self: Box<Self>) -> Option<Bytes> {
        self.progress.finish?;
        self.piece.settle_calls();
        let mut out = BytesMut::with_capacity(320 + self.piece.bytes());
        put_end(&mut out, &self.meta, &self.piece, &self.progress);
        Some(out.freeze())
    }
}
