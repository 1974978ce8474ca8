//! Events encoded as a stream of the Messages API.
//!
//! The API sends one content block after the other, each under its own index: a block is opened by the first event of
//! its kind and closed by the first event of another kind. Tool calls whose arguments arrive interleaved are put in
//! order: a call that begins while the JSON of the one before is open is held until that JSON is complete.

use std::collections::VecDeque;

use bytes::{BufMut, BytesMut};

use super::answer::{Said, put_message, put_stop, put_usage};
use crate::packed_thinking::put_redacted;
use crate::reasoning_maker::{CALL, REDACTED};
use penstock_types::ErrorShape;
use penstock_types::codec::StreamEncoder;
use penstock_types::error_body::anthropic::put_error;
use penstock_types::error_shape;
use penstock_types::event::{ChatEvent, FinishReason, StopCause, Usage};
use penstock_types::write;

/// Bound of held calls, in bytes; an answer with more fails.
const HELD_BYTES_MAX: usize = 16 << 20;

/// Encoder of events as the server-sent events of one message.
pub struct MessageEncoder {
    id: String,
    model: String,
    usage: Usage,
    started: bool,
    ended: bool,
    /// Index of the next content block in the message, from 0.
    index: u64,
    open: Open,
    held: VecDeque<Held>,
    held_bytes: usize,
    said: Said,
    finish: Option<(FinishReason, Option<StopCause>)>,
}

/// Kind of the content block that is open.
enum Open {
    None,
    Text,
    Thinking,
    Tool { call: u32, json: Nesting },
}

struct Held {
    call: u32,
    id: String,
    name: String,
    json: String,
}

impl Held {
    fn bytes(&self) -> usize {
        self.id.len() + self.name.len() + self.json.len() + 64
    }
}

impl MessageEncoder {
    /// Creates the encoder for one request: `id` without its prefix, `model` as the client named it.
    pub fn new(id: &str, model: &str) -> Self {
        Self {
            id: id.to_owned(),
            model: model.to_owned(),
            usage: Usage::default(),
            started: false,
            ended: false,
            index: 0,
            open: Open::None,
            held: VecDeque::new(),
            held_bytes: 0,
            said: Said::default(),
            finish: None,
        }
    }

    fn start(&mut self, out: &mut BytesMut) {
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        out.put_slice(b"event: message_start\ndata: {\"type\":\"message_start\",\"message\":");
        put_message(out, &self.id, &self.model);
        out.put_slice(b"],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":");
        put_usage(out, &Usage { completion_tokens: 0, reasoning_tokens: 0, ..self.usage });
        out.put_slice(b"}}\n\nevent: ping\ndata: {\"type\":\"ping\"}\n\n");
    }

    fn close(&mut self, out: &mut BytesMut) {
        if matches!(self.open, Open::None) {
            return;
        }
        self.open = Open::None;
        out.put_slice(b"event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":");
        write::integer(out, self.index);
        out.put_slice(b"}\n\n");
        self.index += 1;
    }

    fn begin(&mut self, open: Open, out: &mut BytesMut, block: impl FnOnce(&mut BytesMut)) {
        self.close(out);
        self.open = open;
        out.put_slice(b"event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":");
        write::integer(out, self.index);
        out.put_slice(b",\"content_block\":");
        block(out);
        out.put_slice(b"}\n\n");
    }

    /// Writes a delta of the open block; `kind` and `field` as in `text_delta` and `text`.
    fn delta(&self, kind: &str, field: &str, text: &str, out: &mut BytesMut) {
        out.put_slice(b"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":");
        write::integer(out, self.index);
        out.put_slice(b",\"delta\":{\"type\":\"");
        out.put_slice(kind.as_bytes());
        out.put_slice(b"\",\"");
        out.put_slice(field.as_bytes());
        out.put_slice(b"\":");
        write::string(out, text);
        out.put_slice(b"}}\n\n");
    }

    fn text(&mut self, text: &str, out: &mut BytesMut) {
        if text.is_empty() {
            return;
        }
        self.release_all(out);
        if !matches!(self.open, Open::Text) {
            self.begin(Open::Text, out, |out| out.put_slice(b"{\"type\":\"text\",\"text\":\"\"}"));
        }
        self.delta("text_delta", "text", text, out);
    }

    fn thinking(&mut self, out: &mut BytesMut) {
        self.release_all(out);
        if !matches!(self.open, Open::Thinking) {
            let block = b"{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}";
            self.begin(Open::Thinking, out, |out| out.put_slice(block));
        }
    }

    fn signature(&mut self, signature: &str, out: &mut BytesMut) {
        if let Some(data) = signature.strip_prefix(REDACTED) {
            self.release_all(out);
            // A redacted block is whole at once; only its end follows.
            self.begin(Open::Thinking, out, |out| put_redacted(out, data));
        } else {
            self.thinking(out);
            self.delta("signature_delta", "signature", signature, out);
        }
        self.close(out);
    }

    fn call(&mut self, held: Held, out: &mut BytesMut) {
        self.said.calls = true;
        let waits = matches!(&self.open, Open::Tool { json, .. } if !json.is_complete());
        if waits || !self.held.is_empty() {
            self.held_bytes += held.bytes();
            self.held.push_back(held);
            self.check_held(out);
            return;
        }
        self.open_call(&held, out);
    }

    fn open_call(&mut self, held: &Held, out: &mut BytesMut) {
        self.begin(Open::Tool { call: held.call, json: Nesting::default() }, out, |out| {
            out.put_slice(b"{\"type\":\"tool_use\",\"id\":");
            write::string(out, &held.id);
            out.put_slice(b",\"name\":");
            write::string(out, &held.name);
            out.put_slice(b",\"input\":{}}");
        });
        self.more_of_call(&held.json, out);
    }

    fn more_of_call(&mut self, more: &str, out: &mut BytesMut) {
        if more.is_empty() {
            return;
        }
        self.delta("input_json_delta", "partial_json", more, out);
        if let Open::Tool { json, .. } = &mut self.open {
            json.take(more);
        }
    }

    fn arguments(&mut self, call: u32, more: &str, out: &mut BytesMut) {
        if matches!(&self.open, Open::Tool { call: open, .. } if *open == call) {
            self.more_of_call(more, out);
            while matches!(&self.open, Open::Tool { json, .. } if json.is_complete()) {
                let Some(next) = self.next_held() else { return };
                self.open_call(&next, out);
            }
        } else if let Some(held) = self.held.iter_mut().find(|held| held.call == call) {
            held.json.push_str(more);
            self.held_bytes += more.len();
            self.check_held(out);
        }
    }

    fn check_held(&mut self, out: &mut BytesMut) {
        if self.held_bytes > HELD_BYTES_MAX {
            self.fail(error_shape::UPSTREAM, "The upstream's calls came too far out of order.", out);
        }
    }

    fn next_held(&mut self) -> Option<Held> {
        let next = self.held.pop_front()?;
        self.held_bytes -= next.bytes();
        Some(next)
    }

    /// Sends all held calls: the call that they waited for gets no more arguments.
    fn release_all(&mut self, out: &mut BytesMut) {
        while let Some(next) = self.next_held() {
            self.open_call(&next, out);
        }
    }
}

impl StreamEncoder for MessageEncoder {
    fn event(&mut self, event: &ChatEvent, out: &mut BytesMut) {
        if self.ended {
            return;
        }
        if let ChatEvent::Usage(usage) = event {
            self.usage = *usage;
        }
        if self.finish.is_some() || matches!(event, ChatEvent::Usage(_) | ChatEvent::Prompt { .. }) {
            return;
        }
        self.start(out);
        match event {
            ChatEvent::Text { choice: 0, text, .. } => self.text(text, out),
            ChatEvent::Refusal { choice: 0, text } => {
                self.said.refusal = true;
                self.text(text, out);
            }
            ChatEvent::Reasoning { choice: 0, text } if !text.is_empty() => {
                self.thinking(out);
                self.delta("thinking_delta", "thinking", text, out);
            }
            ChatEvent::ReasoningSignature { choice: 0, signature } => self.signature(signature, out),
            ChatEvent::ToolCallStart { choice: 0, call, id, name, signature } => {
                if let Some(signature) = signature {
                    self.signature(&format!("{CALL}{signature}"), out);
                }
                let held = Held { call: *call, id: id.clone(), name: name.clone(), json: String::new() };
                self.call(held, out);
            }
            ChatEvent::ToolCallArguments { choice: 0, call, json } => self.arguments(*call, json, out),
            ChatEvent::Finish { choice: 0, reason, stop } => {
                self.release_all(out);
                self.close(out);
                self.finish = Some((*reason, stop.clone()));
            }
            _ => {}
        }
    }

    fn set_usage(&mut self, usage: Usage) {
        self.usage = usage;
    }

    fn held(&self) -> usize {
        self.held_bytes
    }

    fn done(&mut self, out: &mut BytesMut) {
        if self.ended {
            return;
        }
        let Some((reason, stop)) = self.finish.take() else {
            return self.fail(error_shape::UPSTREAM, "The answer ended before it was complete.", out);
        };
        self.ended = true;
        out.put_slice(b"event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{");
        put_stop(out, reason, stop.as_ref(), self.said);
        out.put_slice(b"},\"usage\":");
        put_usage(out, &self.usage);
        out.put_slice(b"}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
    }

    fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        out.put_slice(b"event: error\ndata: ");
        put_error(out, shape, message, None);
        out.put_slice(b"\n\n");
    }
}

/// Nesting depth of a JSON object followed through its pieces, to know when the object is complete.
#[derive(Default)]
struct Nesting {
    depth: usize,
    begun: bool,
    in_string: bool,
    escaped: bool,
}

impl Nesting {
    fn take(&mut self, json: &str) {
        for byte in json.bytes() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => {
                    self.depth += 1;
                    self.begun = true;
                }
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.begun && self.depth == 0 && !self.in_string
    }
}
