//! Shared parts of both APIs' streams: the frame around a chunk, the life of each choice, usage, the end.
//!
//! A chunk is `data: {head "choices":[{…}] tail}` and a blank line. The head is made once per stream; a token costs its own bytes and two
//! copies. A stream ends well only if every choice has finished: otherwise the last event is an error and `[DONE]` is not sent.

use bytes::{BufMut, BytesMut};

use super::functions::CallShape;
use penstock_types::error_body::openai::error_event;
use penstock_types::error_shape::{self, ErrorShape};
use penstock_types::event::{FinishReason, StopCause, Usage};
use penstock_types::write;

/// Id, model and kind of a stream or an answer, repeated in each chunk.
pub(super) struct Identity<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'a str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) system_fingerprint: Option<&'a str>,
}

impl Identity<'_> {
    /// Writes the object's head up to and including `"choices":[`.
    pub(super) fn put(&self, out: &mut BytesMut) {
        out.put_slice(b"{\"id\":");
        write::string(out, self.id);
        out.put_slice(b",\"object\":");
        write::string(out, self.object);
        out.put_slice(b",\"created\":");
        write::integer(out, self.created);
        out.put_slice(b",\"model\":");
        write::string(out, self.model);
        out.put_slice(b",\"service_tier\":\"default\",\"system_fingerprint\":");
        write::optional_string(out, self.system_fingerprint);
        out.put_slice(b",\"choices\":[");
    }
}

/// Progress of a choice in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Fresh,
    Open,
    Finished,
}

/// Frame writer of one stream.
pub(super) struct Frames {
    head: BytesMut,
    include_usage: bool,
    continuous_usage: bool,
    usage: Usage,
    /// Counts in the last chunk, for `continuous_usage`.
    said: Usage,
    usage_sent: bool,
    phases: Vec<Phase>,
    ended: bool,
}

impl Frames {
    pub(super) fn new(identity: &Identity<'_>, choices: usize, include_usage: bool, continuous_usage: bool) -> Self {
        let mut head = BytesMut::with_capacity(256);
        head.put_slice(b"data: ");
        identity.put(&mut head);
        Self {
            head,
            include_usage,
            continuous_usage,
            usage: Usage::default(),
            said: Usage::default(),
            usage_sent: false,
            phases: vec![Phase::Fresh; choices],
            ended: false,
        }
    }

    /// Phase of a choice that may still send. `None` for an unknown or finished choice, whose events are not sent to
    /// the client.
    pub(super) fn live(&mut self, choice: u32) -> Option<&mut Phase> {
        if self.ended {
            return None;
        }
        self.phases.get_mut(choice as usize).filter(|phase| **phase != Phase::Finished)
    }

    /// Opens a chunk of one choice, up to and including its index.
    pub(super) fn open(&self, choice: u32, out: &mut BytesMut) {
        out.put_slice(&self.head);
        out.put_slice(b"{\"index\":");
        write::integer(out, u64::from(choice));
    }

    /// Closes a chunk opened by [`Frames::open`]. `prompt_tokens` are added when given.
    pub(super) fn close(&mut self, prompt_tokens: Option<&[u32]>, out: &mut BytesMut) {
        out.put_slice(b"}]");
        if let Some(tokens) = prompt_tokens {
            out.put_slice(b",\"prompt_token_ids\":");
            write::integers(out, tokens);
        }
        if self.include_usage && self.continuous_usage {
            out.put_slice(b",\"usage\":");
            write::usage(out, &self.usage);
            self.said = self.usage;
        } else if self.include_usage {
            out.put_slice(b",\"usage\":null");
        }
        out.put_slice(b"}\n\n");
    }

    /// Sets the counts so far: for `continuous_usage`, and for the last chunk if no usage event comes.
    pub(super) fn set_usage(&mut self, usage: Usage) {
        self.usage = usage;
    }

    /// Closes the chunk that opens a choice, which holds no text: its usage counts the tokens generated up to the chunk before it.
    pub(super) fn close_opening(&mut self, prompt_tokens: Option<&[u32]>, out: &mut BytesMut) {
        let counted = self.usage;
        let Usage { completion_tokens, reasoning_tokens, .. } = self.said;
        self.usage = Usage { completion_tokens, reasoning_tokens, ..counted };
        self.close(prompt_tokens, out);
        self.usage = counted;
    }

    /// Writes the chunk with usage and no choices, if it was asked for and not yet sent.
    pub(super) fn usage_chunk(&mut self, out: &mut BytesMut) {
        if !self.include_usage || self.usage_sent || self.ended {
            return;
        }
        self.usage_sent = true;
        out.put_slice(&self.head);
        out.put_slice(b"],\"usage\":");
        write::usage(out, &self.usage);
        out.put_slice(b"}\n\n");
    }

    /// Ends the stream: `[DONE]` if every choice has finished, an error event otherwise. Later calls add nothing.
    pub(super) fn done(&mut self, out: &mut BytesMut) {
        if self.ended {
            return;
        }
        if self.phases.iter().any(|phase| *phase != Phase::Finished) {
            return self.fail(error_shape::UPSTREAM, "The answer ended before it was complete.", out);
        }
        self.usage_chunk(out);
        self.ended = true;
        out.put_slice(b"data: [DONE]\n\n");
    }

    /// Ends the stream with an error event. Later calls add nothing.
    pub(super) fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut) {
        if !std::mem::replace(&mut self.ended, true) {
            error_event(shape, None, message, out);
        }
    }
}

/// Text of the field `finish_reason` for a reason.
fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::ContentFilter => "content_filter",
    }
}

/// Writes `,"finish_reason":…,"stop_reason":…`. The second is vLLM's field: the stop string or token that was met.
pub(super) fn put_finish(out: &mut BytesMut, reason: FinishReason, stop: Option<&StopCause>, calls: CallShape) {
    out.put_slice(b",\"finish_reason\":");
    write::string(
        out,
        match (reason, calls) {
            (FinishReason::ToolCalls, CallShape::Function) => "function_call",
            _ => finish_reason(reason),
        },
    );
    out.put_slice(b",\"stop_reason\":");
    match stop {
        None => out.put_slice(b"null"),
        Some(StopCause::Text(text)) => write::string(out, text),
        Some(StopCause::Token(token)) => write::integer(out, u64::from(*token)),
    }
}
