//! Gemini answers: as a stream of chunks ([`Encoder`]) or as one whole answer ([`Collector`]), with the same content.
//!
//! Every chunk is a whole `GenerateContentResponse` with the new parts only. The last chunk carries the finish reason
//! and the counts together, as Google sends them, so the finish of the last choice is held until the counts arrive.

use bytes::{BufMut, Bytes, BytesMut};

use super::chunk::{self, Calls, Identity, Logprobs};
use super::signature::Signed;
use penstock_types::ErrorShape;
use penstock_types::codec::{StreamEncoder, WholeCollector};
use penstock_types::error_body::gemini as error_body;
use penstock_types::error_shape::UPSTREAM;
use penstock_types::event::{ChatEvent, FinishReason, TokenLogprob, Usage};
use penstock_types::write;

/// Values that an answer needs besides its events.
#[derive(Clone, Debug)]
pub(super) struct Meta {
    pub(super) identity: Identity,
    /// Number of choices (`candidateCount`).
    pub(super) n: u32,
    /// True if reasoning is shown to the client, as parts with `thought`.
    pub(super) include_thoughts: bool,
    /// True if log-probabilities were asked for.
    pub(super) logprobs: bool,
    /// True if the stream is one JSON array instead of server-sent events.
    pub(super) array: bool,
}

/// Encoder of a streamed answer: writes its events as Gemini response chunks, in server-sent events or in one JSON
/// array ([`Meta::array`]).
pub(super) struct Encoder {
    meta: Meta,
    choices: Vec<Choice>,
    usage: Usage,
    /// Choice and finish reason of the last choice, held until the counts arrive.
    held: Option<(u32, FinishReason)>,
    begun: bool,
    ended: bool,
}

#[derive(Default)]
struct Choice {
    calls: Calls,
    finished: bool,
}

impl Encoder {
    pub(super) fn new(meta: Meta) -> Self {
        let choices = (0..meta.n).map(|_| Choice::default()).collect();
        Self { meta, choices, usage: Usage::default(), held: None, begun: false, ended: false }
    }

    fn live(&mut self, choice: u32) -> Option<&mut Choice> {
        if self.ended {
            return None;
        }
        self.choices.get_mut(choice as usize).filter(|choice| !choice.finished)
    }

    fn open_frame(&mut self, out: &mut BytesMut) {
        let begun = std::mem::replace(&mut self.begun, true);
        out.put_slice(match (self.meta.array, begun) {
            (false, _) => b"data: ",
            (true, false) => b"[",
            (true, true) => b",\r\n",
        });
    }

    fn close_frame(&self, out: &mut BytesMut) {
        if !self.meta.array {
            out.put_slice(b"\n\n");
        }
    }

    /// Writes one chunk of one choice: `parts` writes inside the list of parts, `rest` after the content.
    fn chunk(
        &mut self,
        choice: u32,
        out: &mut BytesMut,
        parts: impl FnOnce(&mut BytesMut),
        rest: impl FnOnce(&mut BytesMut),
        usage: bool,
    ) {
        self.open_frame(out);
        out.put_slice(b"{\"candidates\":[{\"content\":{\"parts\":[");
        parts(out);
        out.put_slice(b"],\"role\":\"model\"}");
        rest(out);
        out.put_slice(b",\"index\":");
        write::integer(out, u64::from(choice));
        out.put_slice(b"}]");
        if usage {
            chunk::usage(out, &self.usage);
        }
        self.meta.identity.put(out);
        self.close_frame(out);
    }

    /// Writes the complete calls of a choice, before anything else of that choice.
    fn calls(&mut self, choice: u32, end: bool, out: &mut BytesMut) {
        while let Some(part) =
            self.live(choice).filter(|choice| !choice.calls.is_empty()).and_then(|it| it.calls.next(end))
        {
            self.chunk(choice, out, |out| out.put_slice(&part), |_| {}, false);
        }
    }

    fn part(&mut self, choice: u32, out: &mut BytesMut, part: impl FnOnce(&mut BytesMut)) {
        if self.live(choice).is_none() {
            return;
        }
        self.calls(choice, false, out);
        self.chunk(choice, out, part, |_| {}, false);
    }

    fn text(&mut self, choice: u32, text: &str, logprobs: &[TokenLogprob], out: &mut BytesMut) {
        let logprobs = if self.meta.logprobs { logprobs } else { &[] };
        if self.live(choice).is_none() || (text.is_empty() && logprobs.is_empty()) {
            return;
        }
        self.calls(choice, false, out);
        let mut told = Logprobs::default();
        told.add(logprobs);
        self.chunk(choice, out, |out| chunk::text(out, text, false), |out| told.put(out, false), false);
    }

    fn finish(&mut self, choice: u32, reason: FinishReason, out: &mut BytesMut) {
        if self.live(choice).is_none() {
            return;
        }
        self.calls(choice, true, out);
        if let Some(choice) = self.live(choice) {
            choice.finished = true;
        }
        if self.choices.iter().all(|choice| choice.finished) {
            self.held = Some((choice, reason));
            return;
        }
        self.put_finish(choice, reason, false, out);
    }

    fn put_finish(&mut self, choice: u32, reason: FinishReason, usage: bool, out: &mut BytesMut) {
        let malformed =
            self.choices.get(choice as usize).and_then(|choice| choice.calls.malformed()).map(str::to_owned);
        let rest = |out: &mut BytesMut| chunk::finish(out, reason, malformed.as_deref());
        self.chunk(choice, out, |out| chunk::text(out, "", false), rest, usage);
    }

    fn release(&mut self, out: &mut BytesMut) {
        if let Some((choice, reason)) = self.held.take() {
            self.put_finish(choice, reason, true, out);
        }
    }
}

impl StreamEncoder for Encoder {
    fn event(&mut self, event: &ChatEvent, out: &mut BytesMut) {
        match event {
            ChatEvent::Text { choice, text, logprobs, .. } => self.text(*choice, text, logprobs, out),
            ChatEvent::Refusal { choice, text } => self.text(*choice, text, &[], out),
            ChatEvent::Reasoning { choice, text } if self.meta.include_thoughts && !text.is_empty() => {
                self.part(*choice, out, |out| chunk::text(out, text, true));
            }
            ChatEvent::ReasoningSignature { choice, signature } => {
                self.part(*choice, out, |out| chunk::lone_signature(out, signature));
            }
            ChatEvent::ToolCallStart { choice, id, name, signature, .. } => {
                self.calls(*choice, false, out);
                if let Some(choice) = self.live(*choice) {
                    choice.calls.start(id, name, signature.as_deref());
                }
            }
            ChatEvent::ToolCallArguments { choice, call, json } => {
                if let Some(choice) = self.live(*choice) {
                    choice.calls.arguments(*call, json);
                }
            }
            ChatEvent::Finish { choice, reason, .. } => self.finish(*choice, *reason, out),
            ChatEvent::Usage(usage) => {
                self.usage = *usage;
                self.release(out);
            }
            // Thoughts that were not asked for, and events that this API cannot express.
            ChatEvent::Reasoning { .. }
            | ChatEvent::Prompt { .. }
            | ChatEvent::Vector { .. }
            | ChatEvent::Score { .. }
            | ChatEvent::Raw(_) => {}
        }
    }

    fn set_usage(&mut self, usage: Usage) {
        self.usage = usage;
    }

    fn held(&self) -> usize {
        self.choices.iter().map(|choice| choice.calls.held()).sum()
    }

    fn done(&mut self, out: &mut BytesMut) {
        if self.ended {
            return;
        }
        if self.choices.iter().any(|choice| !choice.finished) {
            return self.fail(UPSTREAM, "The answer ended before it was complete.", out);
        }
        self.release(out);
        self.ended = true;
        if self.meta.array {
            out.put_slice(if self.begun { b"]" } else { b"[]" });
        }
    }

    fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.open_frame(out);
        error_body::put_error(out, shape, message);
        self.close_frame(out);
        if self.meta.array {
            out.put_u8(b']');
        }
    }
}

/// Collector of events into one whole answer.
pub(super) struct Collector {
    meta: Meta,
    choices: Vec<Collected>,
    usage: Usage,
}

/// One choice; its parts are kept as JSON text.
#[derive(Default)]
struct Collected {
    parts: BytesMut,
    open: Open,
    calls: Calls,
    logprobs: Logprobs,
    finish: Option<FinishReason>,
}

/// Kind of the last part, to which more text can be added.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Open {
    #[default]
    None,
    Text,
    Thought,
}

impl Collected {
    fn begin(&mut self) {
        self.close(None);
        if !self.parts.is_empty() {
            self.parts.put_u8(b',');
        }
    }

    fn close(&mut self, signature: Option<&str>) {
        let end: &[u8] = match std::mem::take(&mut self.open) {
            Open::None => return,
            Open::Text => b"\"",
            Open::Thought => b"\",\"thought\":true",
        };
        self.parts.put_slice(end);
        if let Some(signature) = signature {
            chunk::thought_signature(&mut self.parts, signature, Signed::Reasoning);
        }
        self.parts.put_u8(b'}');
    }

    fn text(&mut self, kind: Open, text: &str) {
        if text.is_empty() {
            return;
        }
        self.calls(false);
        if self.open != kind {
            self.begin();
            self.parts.put_slice(b"{\"text\":\"");
            self.open = kind;
        }
        write::escaped(&mut self.parts, text);
    }

    fn signature(&mut self, signature: &str) {
        if self.open != Open::None {
            return self.close(Some(signature));
        }
        self.begin();
        chunk::lone_signature(&mut self.parts, signature);
    }

    fn calls(&mut self, end: bool) {
        while let Some(part) = self.calls.next(end) {
            self.begin();
            self.parts.put_slice(&part);
        }
    }

    fn finish(&mut self, reason: FinishReason) {
        self.calls(true);
        self.close(None);
        self.finish = Some(reason);
    }

    fn bytes(&self) -> usize {
        self.parts.len() + self.calls.bytes() + self.logprobs.bytes()
    }

    fn put(&self, index: usize, out: &mut BytesMut) -> Option<()> {
        let reason = self.finish?;
        out.put_slice(b"{\"content\":{");
        if !self.parts.is_empty() {
            out.put_slice(b"\"parts\":[");
            out.put_slice(&self.parts);
            out.put_slice(b"],");
        }
        out.put_slice(b"\"role\":\"model\"}");
        chunk::finish(out, reason, self.calls.malformed());
        self.logprobs.put(out, true);
        out.put_slice(b",\"index\":");
        write::integer(out, index as u64);
        out.put_u8(b'}');
        Some(())
    }
}

impl Collector {
    pub(super) fn new(meta: Meta) -> Self {
        let choices = (0..meta.n).map(|_| Collected::default()).collect();
        Self { meta, choices, usage: Usage::default() }
    }

    fn live(&mut self, choice: u32) -> Option<&mut Collected> {
        self.choices.get_mut(choice as usize).filter(|choice| choice.finish.is_none())
    }
}

impl WholeCollector for Collector {
    fn event(&mut self, event: &ChatEvent) {
        let (logprobs_asked, thoughts) = (self.meta.logprobs, self.meta.include_thoughts);
        let choice = match event {
            ChatEvent::Usage(usage) => {
                self.usage = *usage;
                return;
            }
            ChatEvent::Text { choice, .. }
            | ChatEvent::Refusal { choice, .. }
            | ChatEvent::Reasoning { choice, .. }
            | ChatEvent::ReasoningSignature { choice, .. }
            | ChatEvent::ToolCallStart { choice, .. }
            | ChatEvent::ToolCallArguments { choice, .. }
            | ChatEvent::Finish { choice, .. } => *choice,
            ChatEvent::Prompt { .. } | ChatEvent::Vector { .. } | ChatEvent::Score { .. } | ChatEvent::Raw(_) => return,
        };
        let Some(choice) = self.live(choice) else { return };
        match event {
            ChatEvent::Text { text, logprobs, .. } => {
                choice.text(Open::Text, text);
                choice.logprobs.add(if logprobs_asked { logprobs } else { &[] });
            }
            ChatEvent::Refusal { text, .. } => choice.text(Open::Text, text),
            ChatEvent::Reasoning { text, .. } if thoughts => choice.text(Open::Thought, text),
            ChatEvent::ReasoningSignature { signature, .. } => choice.signature(signature),
            ChatEvent::ToolCallStart { id, name, signature, .. } => {
                choice.calls(false);
                choice.calls.start(id, name, signature.as_deref());
            }
            ChatEvent::ToolCallArguments { call, json, .. } => choice.calls.arguments(*call, json),
            ChatEvent::Finish { reason, .. } => choice.finish(*reason),
            _ => {}
        }
    }

    fn bytes(&self) -> usize {
        self.choices.iter().map(Collected::bytes).sum()
    }

    fn finish(self: Box<Self>) -> Option<Bytes> {
        let mut out = BytesMut::with_capacity(256 + self.bytes());
        out.put_slice(b"{\"candidates\":[");
        for (index, choice) in self.choices.iter().enumerate() {
            if index > 0 {
                out.put_u8(b',');
            }
            choice.put(index, &mut out)?;
        }
        out.put_u8(b']');
        chunk::usage(&mut out, &self.usage);
        self.meta.identity.put(&mut out);
        Some(out.freeze())
    }
}
