//! Messages as `system` and `messages` of the Converse API: turns alternate, begin with the user's, hold no blank
//! text.

use bytes::{BufMut, BytesMut};

use super::Family;
use crate::answer_json::Object;
use crate::gemini::provider::contents::put_arguments;
use crate::packed_thinking::{Thought, signed_by};
use crate::reasoning_maker::Maker;
use penstock_types::error::ApiError;
use penstock_types::request::{ChatRequest, ImageSource, Message, Part, Role};
use penstock_types::write;

/// Text sent where the API demands content and a turn has none.
const NOTHING: &str = "(no content)";

/// Turns of a conversation as the JSON text of a Converse request, while they are written.
pub(super) struct Turns {
    /// Blocks of the `system` list as JSON text.
    pub(super) system: BytesMut,
    /// Complete messages as JSON text.
    pub(super) messages: BytesMut,
    /// Functions named by the calls in the conversation.
    pub(super) called: Vec<String>,
    family: Family,
    role: Option<&'static str>,
    /// True if the open message has a block already.
    begun: bool,
}

impl Turns {
    /// Writes the messages of a request.
    pub(super) fn write(chat: &ChatRequest, family: Family) -> Result<Self, ApiError> {
        let (system, messages, called) = (BytesMut::new(), BytesMut::new(), Vec::new());
        let mut turns = Self { system, messages, called, family, role: None, begun: false };
        for (index, message) in chat.messages.iter().enumerate() {
            match message.role {
                Role::System => turns.system(message),
                Role::User => {
                    turns.turn("user");
                    turns.said(index, message)?;
                }
                Role::Assistant => turns.assistant(index, message)?,
                Role::Tool => turns.result(index, message)?,
            }
        }
        turns.close();
        if turns.role.is_none() {
            let why = "messages: Bedrock's API needs a message that is not the system's";
            return Err(ApiError::invalid("messages", why));
        }
        Ok(turns)
    }

    /// Adds a message of the system as a block of its own, wherever it stands in the conversation.
    fn system(&mut self, message: &Message) {
        let Some(text) = message.content.as_deref().filter(|text| !is_blank(text)) else { return };
        if !self.system.is_empty() {
            self.system.put_u8(b',');
        }
        put_text(&mut self.system, text);
    }

    fn close(&mut self) {
        if self.role.is_some() {
            if !self.begun {
                put_text(self.block(), NOTHING);
            }
            self.messages.put_slice(b"]}");
        }
    }

    fn turn(&mut self, role: &'static str) {
        if self.role == Some(role) {
            return;
        }
        if self.role.is_none() && role == "assistant" {
            // A conversation begins with the user.
            self.turn("user");
        }
        self.close();
        if self.role.replace(role).is_some() {
            self.messages.put_u8(b',');
        }
        self.begun = false;
        self.messages.put_slice(b"{\"role\":");
        write::string(&mut self.messages, role);
        self.messages.put_slice(b",\"content\":[");
    }

    /// Buffer for the next block of the open message.
    fn block(&mut self) -> &mut BytesMut {
        if std::mem::replace(&mut self.begun, true) {
            self.messages.put_u8(b',');
        }
        &mut self.messages
    }

    fn said(&mut self, index: usize, message: &Message) -> Result<(), ApiError> {
        if message.parts.is_empty() {
            self.text(message.content.as_deref().unwrap_or_default());
        }
        for part in &message.parts {
            match part {
                Part::Text(text) => self.text(text),
                Part::Image { source, .. } => {
                    put_image(self.block(), source).map_err(|what| wrong_image(index, what))?
                }
            }
        }
        Ok(())
    }

    fn text(&mut self, text: &str) {
        if !is_blank(text) {
            put_text(self.block(), text);
        }
    }

    fn assistant(&mut self, index: usize, message: &Message) -> Result<(), ApiError> {
        self.turn("assistant");
        self.reasoning(message);
        self.said(index, message)?;
        for call in &message.tool_calls {
            if !self.called.contains(&call.name) {
                self.called.push(call.name.clone());
            }
            let mut block = Object::open(self.block());
            let mut inner = Object::open(block.key("toolUse"));
            inner.string("toolUseId", &id(&call.id));
            inner.string("name", &call.name);
            put_arguments(inner.key("input"), &call.arguments);
            inner.close();
            block.close();
        }
        Ok(())
    }

    /// Adds the reasoning of a message. Only Claude takes its reasoning back, with the signature that Anthropic's own
    /// API would give.
    fn reasoning(&mut self, message: &Message) {
        if self.family != Family::Claude {
            return;
        }
        for thought in signed_by(Maker::Anthropic, message) {
            match thought {
                Thought::Redacted(data) => self.redacted(&data),
                // Base64 has no colon: what has one names a maker that is not known here.
                Thought::Plain { signature: Some(signature), .. } if signature.contains(':') => {}
                Thought::Plain { text, signature } => self.thought(&text, &signature.unwrap_or_default()),
            }
        }
    }

    fn thought(&mut self, text: &str, signature: &str) {
        let mut block = Object::open(self.block());
        let mut content = Object::open(block.key("reasoningContent"));
        let mut inner = Object::open(content.key("reasoningText"));
        inner.string("text", text);
        inner.string("signature", signature);
        inner.close();
        content.close();
        block.close();
    }

    fn redacted(&mut self, data: &str) {
        let mut block = Object::open(self.block());
        let mut content = Object::open(block.key("reasoningContent"));
        content.string("redactedContent", data);
        content.close();
        block.close();
    }

    fn result(&mut self, index: usize, message: &Message) -> Result<(), ApiError> {
        self.turn("user");
        let mut block = Object::open(self.block());
        let mut result = Object::open(block.key("toolResult"));
        result.string("toolUseId", &id(message.tool_call_id.as_deref().unwrap_or_default()));
        let content = result.key("content");
        content.put_u8(b'[');
        let whole = message.content.as_deref().unwrap_or_default();
        if message.parts.is_empty() {
            put_text(content, if is_blank(whole) { NOTHING } else { whole });
        }
        for (at, part) in message.parts.iter().enumerate() {
            if at > 0 {
                content.put_u8(b',');
            }
            match part {
                Part::Text(text) => put_text(content, if is_blank(text) { NOTHING } else { text }),
                Part::Image { source, .. } => put_image(content, source).map_err(|what| wrong_image(index, what))?,
            }
        }
        content.put_u8(b']');
        if message.tool_failed {
            result.string("status", "error");
        }
        result.close();
        block.close();
        Ok(())
    }
}

/// Returns true if the text is empty or only space, which the API refuses.
fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

/// Rewrites a call id into the API's form: 64 characters out of letters, digits, `_` and `-`.
fn id(given: &str) -> String {
    const CHARS_MAX: usize = 64;
    let fits = |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | '-');
    let plain: String = given.chars().map(|character| if fits(character) { character } else { '_' }).collect();
    if plain.is_empty() {
        return "_".to_owned();
    }
    if plain.len() <= CHARS_MAX {
        return plain;
    }
    // Long ids differ at their ends as often as at their beginnings, so a checksum replaces the cut part.
    format!("{}-{:08x}", &plain[..CHARS_MAX - 9], crc32fast::hash(given.as_bytes()))
}

/// Writes a content block of text.
fn put_text(out: &mut BytesMut, text: &str) {
    out.put_slice(b"{\"text\":");
    write::string(out, text);
    out.put_u8(b'}');
}

fn put_image(out: &mut BytesMut, source: &ImageSource) -> Result<(), &'static str> {
    let ImageSource::Data { media_type, base64 } = source else {
        return Err("images as data, no URLs");
    };
    let format = match media_type.as_str() {
        "image/png" => "png",
        "image/jpeg" | "image/jpg" => "jpeg",
        "image/gif" => "gif",
        "image/webp" => "webp",
        _ => return Err("images of type png, jpeg, gif and webp"),
    };
    let mut block = Object::open(out);
    let mut image = Object::open(block.key("image"));
    image.string("format", format);
    let mut bytes = Object::open(image.key("source"));
    bytes.string("bytes", base64);
    bytes.close();
    image.close();
    block.close();
    Ok(())
}

fn wrong_image(index: usize, what: &str) -> ApiError {
    let param = format!("messages[{index}].content");
    let why = format!("{param}: Bedrock's API takes {what}");
    ApiError::unsupported_value(param, why)
}
