//! Events collected into one whole message, with the same content as the stream.

use bytes::{BufMut, Bytes, BytesMut};

use super::answer::{Said, put_message, put_stop, put_usage};
use crate::packed_thinking::{put_redacted, put_thinking};
use crate::reasoning_maker::{CALL, REDACTED};
use penstock_types::codec::WholeCollector;
use penstock_types::event::{ChatEvent, FinishReason, StopCause, Usage};
use penstock_types::json::{Kind, Reader};
use penstock_types::write;

/// Collector of events into one message.
pub struct MessageCollector {
    id: String,
    model: String,
    blocks: Vec<Block>,
    bytes: usize,
    said: Said,
    finish: Option<(FinishReason, Option<StopCause>)>,
    usage: Usage,
}

enum Block {
    Text(String),
    /// `closed` is set once the block's signature came.
    Thinking {
        text: String,
        signature: String,
        closed: bool,
    },
    Redacted(String),
    Tool {
        call: u32,
        id: String,
        name: String,
        json: String,
    },
}

impl MessageCollector {
    /// Creates the collector for one request: `id` without its prefix, `model` as the client named it.
    pub fn new(id: &str, model: &str) -> Self {
        Self {
            id: id.to_owned(),
            model: model.to_owned(),
            blocks: Vec::new(),
            bytes: 0,
            said: Said::default(),
            finish: None,
            usage: Usage::default(),
        }
    }

    fn text(&mut self, more: &str) {
        match self.blocks.last_mut() {
            _ if more.is_empty() => {}
            Some(Block::Text(text)) => text.push_str(more),
            _ => self.blocks.push(Block::Text(more.to_owned())),
        }
    }

    fn thinking(&mut self, more: &str) {
        match self.blocks.last_mut() {
            _ if more.is_empty() => {}
            Some(Block::Thinking { text, closed: false, .. }) => text.push_str(more),
            _ => self.blocks.push(Block::Thinking { text: more.to_owned(), signature: String::new(), closed: false }),
        }
    }

    fn signature(&mut self, given: &str) {
        if let Some(data) = given.strip_prefix(REDACTED) {
            self.blocks.push(Block::Redacted(data.to_owned()));
            return;
        }
        match self.blocks.last_mut() {
            Some(Block::Thinking { signature, closed: closed @ false, .. }) => {
                signature.push_str(given);
                *closed = true;
            }
            _ => {
                let (text, signature) = (String::new(), given.to_owned());
                self.blocks.push(Block::Thinking { text, signature, closed: true });
            }
        }
    }
}

impl WholeCollector for MessageCollector {
    fn event(&mut self, event: &ChatEvent) {
        if let ChatEvent::Usage(usage) = event {
            self.usage = *usage;
        }
        if self.finish.is_some() {
            return;
        }
        let before = self.blocks.len();
        match event {
            ChatEvent::Text { choice: 0, text, .. } => {
                self.bytes += text.len();
                self.text(text);
            }
            ChatEvent::Refusal { choice: 0, text } => {
                self.bytes += text.len();
                self.said.refusal = true;
                self.text(text);
            }
            ChatEvent::Reasoning { choice: 0, text } => {
                self.bytes += text.len();
                self.thinking(text);
            }
            ChatEvent::ReasoningSignature { choice: 0, signature } => {
                self.bytes += signature.len();
                self.signature(signature);
            }
            ChatEvent::ToolCallStart { choice: 0, call, id, name, signature } => {
                if let Some(signature) = signature {
                    self.bytes += signature.len();
                    self.signature(&format!("{CALL}{signature}"));
                }
                self.said.calls = true;
                self.bytes += id.len() + name.len();
                let (id, name) = (id.clone(), name.clone());
                self.blocks.push(Block::Tool { call: *call, id, name, json: String::new() });
            }
            ChatEvent::ToolCallArguments { choice: 0, call, json: more } => {
                let wanted = self.blocks.iter_mut().rev().find_map(|block| match block {
                    Block::Tool { call: of, json, .. } if of == call => Some(json),
                    _ => None,
                });
                if let Some(json) = wanted {
                    self.bytes += more.len();
                    json.push_str(more);
                }
            }
            ChatEvent::Finish { choice: 0, reason, stop } => self.finish = Some((*reason, stop.clone())),
            _ => {}
        }
        self.bytes += 64 * (self.blocks.len() - before);
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn finish(self: Box<Self>) -> Option<Bytes> {
        let (reason, stop) = self.finish.as_ref()?;
        let mut out = BytesMut::with_capacity(512 + self.bytes + self.bytes / 8);
        put_message(&mut out, &self.id, &self.model);
        for (index, block) in self.blocks.iter().enumerate() {
            if index > 0 {
                out.put_u8(b',');
            }
            block.put(&mut out);
        }
        out.put_slice(b"],");
        put_stop(&mut out, *reason, stop.as_ref(), self.said);
        out.put_slice(b",\"usage\":");
        put_usage(&mut out, &self.usage);
        out.put_u8(b'}');
        Some(out.freeze())
    }
}

impl Block {
    fn put(&self, out: &mut BytesMut) {
        match self {
            Block::Text(text) => {
                out.put_slice(b"{\"type\":\"text\",\"text\":");
                write::string(out, text);
                out.put_u8(b'}');
            }
            Block::Thinking { text, signature, .. } => put_thinking(out, text, signature),
            Block::Redacted(data) => put_redacted(out, data),
            Block::Tool { id, name, json, .. } => {
                out.put_slice(b"{\"type\":\"tool_use\",\"id\":");
                write::string(out, id);
                out.put_slice(b",\"name\":");
                write::string(out, name);
                out.put_slice(b",\"input\":");
                put_input(out, json);
                out.put_u8(b'}');
            }
        }
    }
}

/// Writes a call's input as an object: the model's arguments if they are one, the empty object if there are none.
/// Other text is no input that a tool could take; it is put under a name that no schema has, so that the caller can
/// tell the model.
pub(super) fn put_input(out: &mut BytesMut, json: &str) {
    let is_object = Reader::new(json.as_bytes()).is_ok_and(|mut reader| {
        reader.kind().is_ok_and(|kind| kind == Kind::Object) && reader.skip().and_then(|()| reader.end()).is_ok()
    });
    if is_object {
        out.put_slice(json.trim().as_bytes());
    } else if json.trim().is_empty() {
        out.put_slice(b"{}");
    } else {
        out.put_slice(b"{\"invalid_json\":");
        write::string(out, json);
        out.put_u8(b'}');
    }
}
