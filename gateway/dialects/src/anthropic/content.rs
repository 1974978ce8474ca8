//! Messages as turns of content blocks, for a request to Anthropic.
//!
//! The API has two speakers: instructions stand apart in `system`, results of tools are sent as the user, and
//! neighbouring messages of one speaker become one turn. The API refuses empty text blocks, so none is written.

use bytes::{BufMut, BytesMut};

use super::whole::put_input;
use crate::packed_thinking::{Thought, put_redacted, put_thinking, signed_by};
use crate::reasoning_maker::Maker;
use penstock_types::error::ApiError;
use penstock_types::request::{ChatRequest, ImageSource, Message, Part, Role, ToolCall};
use penstock_types::write;

/// JSON of `system` and `messages`, without the outer brackets.
#[derive(Default)]
pub(super) struct Turns {
    /// Text blocks, separated by commas.
    pub(super) system: BytesMut,
    /// Turns as JSON objects, separated by commas; the last may still be open.
    pub(super) messages: BytesMut,
    /// Role of the turn that is still open.
    open: Option<Role>,
}

impl Turns {
    /// Writes all messages of `chat`.
    ///
    /// # Errors
    /// Fails if the conversation has no content at all.
    pub(super) fn write(chat: &ChatRequest) -> Result<Self, ApiError> {
        let mut turns = Self::default();
        let last = chat.messages.len().saturating_sub(1);
        for (index, message) in chat.messages.iter().enumerate() {
            match message.role {
                Role::System => turns.instructions(message),
                Role::User => turns.parts(Role::User, message),
                Role::Assistant => turns.assistant(message, index == last),
                Role::Tool => turns.result(message),
            }
        }
        if turns.open.is_none() {
            let why = "messages: Anthropic's API needs at least one message with content besides instructions";
            return Err(ApiError::invalid("messages", why));
        }
        turns.messages.put_slice(b"]}");
        Ok(turns)
    }

    fn instructions(&mut self, message: &Message) {
        let Some(text) = message.content.as_deref().filter(|text| !text.trim().is_empty()) else { return };
        if !self.system.is_empty() {
            self.system.put_u8(b',');
        }
        put_text(&mut self.system, text);
    }

    /// Buffer for the next block of `role`: goes on with the open turn, or opens a new one.
    fn block(&mut self, role: Role) -> &mut BytesMut {
        if self.open == Some(role) {
            self.messages.put_u8(b',');
            return &mut self.messages;
        }
        if self.open.replace(role).is_some() {
            self.messages.put_slice(b"]},");
        }
        let opening: &[u8] = match role {
            Role::Assistant => b"{\"role\":\"assistant\",\"content\":[",
            Role::System | Role::User | Role::Tool => b"{\"role\":\"user\",\"content\":[",
        };
        self.messages.put_slice(opening);
        &mut self.messages
    }

    fn parts(&mut self, role: Role, message: &Message) {
        if message.parts.is_empty() {
            self.text(role, message.content.as_deref().unwrap_or_default());
        }
        for part in &message.parts {
            match part {
                Part::Text(text) => self.text(role, text),
                Part::Image { source, .. } => put_image(self.block(role), source),
            }
        }
    }

    fn text(&mut self, role: Role, text: &str) {
        if !text.trim().is_empty() {
            put_text(self.block(role), text);
        }
    }

    /// Writes a turn of the assistant. Reasoning is sent only with a signature of Anthropic's, because the API refuses
    /// it otherwise; a text at the very end loses its trailing space for the same reason.
    fn assistant(&mut self, message: &Message, last: bool) {
        for thought in signed_by(Maker::Anthropic, message) {
            match thought {
                Thought::Redacted(data) => put_redacted(self.block(Role::Assistant), &data),
                Thought::Plain { text, signature } => {
                    put_thinking(self.block(Role::Assistant), &text, &signature.unwrap_or_default());
                }
            }
        }
        let text = message.content.as_deref().unwrap_or_default();
        let ends = last && message.tool_calls.is_empty();
        self.text(Role::Assistant, if ends { text.trim_end() } else { text });
        for call in &message.tool_calls {
            put_call(self.block(Role::Assistant), call);
        }
    }

    fn result(&mut self, message: &Message) {
        let out = self.block(Role::User);
        out.put_slice(b"{\"type\":\"tool_result\",\"tool_use_id\":");
        put_id(out, message.tool_call_id.as_deref().unwrap_or_default());
        let text = message.content.as_deref().unwrap_or_default();
        if message.parts.is_empty() && !text.is_empty() {
            out.put_slice(b",\"content\":");
            write::string(out, text);
        } else if !message.parts.is_empty() {
            let mut before: &[u8] = b",\"content\":[";
            for part in &message.parts {
                if matches!(part, Part::Text(text) if text.trim().is_empty()) {
                    continue;
                }
                out.put_slice(std::mem::replace(&mut before, b","));
                match part {
                    Part::Text(text) => put_text(out, text),
                    Part::Image { source, .. } => put_image(out, source),
                }
            }
            // Parts exist only where an image is among them, so at least one block was written.
            out.put_u8(b']');
        }
        if message.tool_failed {
            out.put_slice(b",\"is_error\":true");
        }
        out.put_u8(b'}');
    }
}

fn put_text(out: &mut BytesMut, text: &str) {
    out.put_slice(b"{\"type\":\"text\",\"text\":");
    write::string(out, text);
    out.put_u8(b'}');
}

fn put_image(out: &mut BytesMut, source: &ImageSource) {
    match source {
        ImageSource::Url(url) => {
            out.put_slice(b"{\"type\":\"image\",\"source\":{\"type\":\"url\",\"url\":");
            write::string(out, url);
        }
        ImageSource::Data { media_type, base64 } => {
            out.put_slice(b"{\"type\":\"image\",\"source\":{\"type\":\"base64\",\"media_type\":");
            write::string(out, media_type);
            out.put_slice(b",\"data\":");
            write::string(out, base64);
        }
    }
    out.put_slice(b"}}");
}

fn put_call(out: &mut BytesMut, call: &ToolCall) {
    out.put_slice(b"{\"type\":\"tool_use\",\"id\":");
    put_id(out, &call.id);
    out.put_slice(b",\"name\":");
    write::string(out, &call.name);
    out.put_slice(b",\"input\":");
    put_input(out, &call.arguments);
    out.put_u8(b'}');
}

/// Writes a call id. The API takes letters, digits, `_` and `-`; any other character of another provider's id becomes
/// `_`, in call and result alike.
fn put_id(out: &mut BytesMut, id: &str) {
    let plain = |character: char| character.is_ascii_alphanumeric() || "_-".contains(character);
    if !id.is_empty() && id.chars().all(plain) {
        return write::string(out, id);
    }
    let mapped: String = id.chars().map(|character| if plain(character) { character } else { '_' }).collect();
    write::string(out, if mapped.is_empty() { "_" } else { &mapped });
}
