//! Messages as `contents`: consecutive turns of one speaker become one, since the API wants the answers to all calls
//! of a turn in the next turn.

use bytes::{BufMut, BytesMut};

use super::ThinkingStyle;
use super::encode::put_text;
use crate::answer_json::{Object, is_object};
use crate::gemini::signature::{Signed, googles};
use crate::packed_thinking::{Thought, signed_by};
use crate::reasoning_maker::Maker;
use penstock_types::error::ApiError;
use penstock_types::json::short;
use penstock_types::request::{ChatRequest, ImageSource, Message, Part, Role, ToolCall};
use penstock_types::write;

/// Placeholder that Google accepts as the signature of a call which another model made; without it, Gemini 3 refuses
/// the conversation.
const UNSIGNED: &str = "skip_thought_signature_validator";

/// Turns of a conversation as the JSON text of a Gemini request, while they are written.
#[derive(Default)]
pub(super) struct Turns {
    /// Parts of `systemInstruction` as JSON text.
    system: BytesMut,
    /// Complete contents; the last one may still be open.
    contents: BytesMut,
    speaker: Option<&'static str>,
    /// True if the open content has a part already.
    begun: bool,
    wants_signatures: bool,
    /// True if calls and their results are written without their ids.
    without_ids: bool,
}

impl Turns {
    /// Writes the messages of a request; `without_ids`: calls and their results without ids.
    pub(super) fn write(chat: &ChatRequest, style: ThinkingStyle, without_ids: bool) -> Result<Self, ApiError> {
        let mut turns = Self { wants_signatures: style == ThinkingStyle::Level, without_ids, ..Self::default() };
        for (index, message) in chat.messages.iter().enumerate() {
            match message.role {
                Role::System => turns.system(message),
                Role::User => turns.said("user", message),
                Role::Assistant => turns.model(message),
                Role::Tool => turns.answer(index, message, &chat.messages[..index])?,
            }
        }
        if turns.speaker.is_none() {
            let why = "messages: Gemini's API needs a message that is not the system's";
            return Err(ApiError::invalid("messages", why));
        }
        Ok(turns)
    }

    /// Approximate size of the turns in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.system.len() + self.contents.len()
    }

    /// Writes the fields `systemInstruction` and `contents` into `object`.
    pub(super) fn put(mut self, object: &mut Object<'_>) {
        if !self.system.is_empty() {
            let mut system = Object::open(object.key("systemInstruction"));
            let parts = system.key("parts");
            parts.put_u8(b'[');
            parts.put_slice(&self.system);
            parts.put_u8(b']');
            system.close();
        }
        self.close();
        let contents = object.key("contents");
        contents.put_u8(b'[');
        contents.put_slice(&self.contents);
        contents.put_u8(b']');
    }

    /// Adds a message of the system to the one instruction, wherever it stands in the conversation.
    fn system(&mut self, message: &Message) {
        let Some(text) = message.content.as_deref().filter(|text| !text.is_empty()) else { return };
        if !self.system.is_empty() {
            self.system.put_u8(b',');
        }
        put_text(&mut self.system, text);
    }

    fn close(&mut self) {
        if self.speaker.is_some() {
            // A content without parts is refused by the API.
            if !self.begun {
                put_text(&mut self.contents, "");
            }
            self.contents.put_slice(b"]}");
        }
    }

    fn turn(&mut self, speaker: &'static str) {
        if self.speaker == Some(speaker) {
            return;
        }
        self.close();
        if self.speaker.replace(speaker).is_some() {
            self.contents.put_u8(b',');
        }
        self.begun = false;
        self.contents.put_slice(b"{\"role\":");
        write::string(&mut self.contents, speaker);
        self.contents.put_slice(b",\"parts\":[");
    }

    /// Buffer for the next part of the open content.
    fn part(&mut self) -> &mut BytesMut {
        if std::mem::replace(&mut self.begun, true) {
            self.contents.put_u8(b',');
        }
        &mut self.contents
    }

    fn said(&mut self, speaker: &'static str, message: &Message) {
        self.turn(speaker);
        if message.parts.is_empty() {
            if let Some(text) = message.content.as_deref().filter(|text| !text.is_empty()) {
                put_text(self.part(), text);
            }
            return;
        }
        for part in &message.parts {
            match part {
                Part::Text(text) => put_text(self.part(), text),
                Part::Image { source, .. } => put_image(self.part(), source),
            }
        }
    }

    /// Writes a turn of the model. Reasoning text is left out: Google wants its signature back, not its text.
    fn model(&mut self, message: &Message) {
        self.turn("model");
        // The last one covers the turn's text.
        let signed = signed_by(Maker::Google, message).pop();
        let signature =
            signed.as_ref().and_then(Thought::signature).and_then(|given| googles(given, Signed::Reasoning));
        let text = message.content.as_deref().filter(|text| !text.is_empty());
        if text.is_some() || signature.is_some() {
            let mut part = Object::open(self.part());
            part.string("text", text.unwrap_or_default());
            part.optional("thoughtSignature", signature);
            part.close();
        }
        for (at, call) in message.tool_calls.iter().enumerate() {
            let signature = call.signature.as_deref().and_then(|given| googles(given, Signed::Call));
            // Of parallel calls only the first is signed.
            let unsigned = (self.wants_signatures && at == 0).then_some(UNSIGNED);
            let without_id = self.without_ids;
            put_call(self.part(), call, without_id, signature.or(unsigned));
        }
    }

    /// Writes the answer to a call. The API matches answers by function name, which is looked up in the call.
    fn answer(&mut self, index: usize, message: &Message, before: &[Message]) -> Result<(), ApiError> {
        let id = message.tool_call_id.as_deref().unwrap_or_default();
        let calls = before.iter().rev().flat_map(|message| &message.tool_calls);
        let name =
            calls.into_iter().find(|call| call.id == id).map(|call| call.name.as_str()).or(message.name.as_deref());
        let name = name.ok_or_else(|| {
            let param = format!("messages[{index}].tool_call_id");
            let why = format!("{param}: no call before has the id \"{}\"", short(id));
            ApiError::invalid(param, why)
        })?;
        self.turn("user");
        let id = (!self.without_ids).then_some(id);
        let mut part = Object::open(self.part());
        let mut response = Object::open(part.key("functionResponse"));
        response.optional("id", id);
        response.string("name", name);
        put_returned(response.key("response"), message);
        response.close();
        part.close();
        for part in &message.parts {
            if let Part::Image { source, .. } = part {
                put_image(self.part(), source);
            }
        }
        Ok(())
    }
}

/// Writes `response` as an object: the result itself if it is one, else under `output`; an error under `error`.
fn put_returned(out: &mut BytesMut, message: &Message) {
    let text = message.content.as_deref().unwrap_or_default();
    if !message.tool_failed && is_object(text) {
        return out.put_slice(text.as_bytes());
    }
    let mut object = Object::open(out);
    object.string(if message.tool_failed { "error" } else { "output" }, text);
    object.close();
}

fn put_call(out: &mut BytesMut, call: &ToolCall, without_id: bool, signature: Option<&str>) {
    let mut part = Object::open(out);
    let mut inner = Object::open(part.key("functionCall"));
    inner.optional("id", (!without_id).then_some(call.id.as_str()));
    inner.string("name", &call.name);
    put_arguments(inner.key("args"), &call.arguments);
    inner.close();
    part.optional("thoughtSignature", signature);
    part.close();
}

/// Writes a call's arguments as an object: the empty object if there are none; text that is no object (a model can
/// fail) is kept under a key.
pub(crate) fn put_arguments(out: &mut BytesMut, arguments: &str) {
    match arguments.trim_ascii() {
        "" => out.put_slice(b"{}"),
        given if is_object(given) => out.put_slice(given.as_bytes()),
        given => {
            let mut object = Object::open(out);
            object.string("invalid_json", given);
            object.close();
        }
    }
}

fn put_image(out: &mut BytesMut, source: &ImageSource) {
    let mut part = Object::open(out);
    match source {
        ImageSource::Data { media_type, base64 } => {
            let mut data = Object::open(part.key("inlineData"));
            data.string("mimeType", media_type);
            data.string("data", base64);
            data.close();
        }
        ImageSource::Url(url) => {
            let mut file = Object::open(part.key("fileData"));
            file.optional("mimeType", media_type(url));
            file.string("fileUri", url);
            file.close();
        }
    }
    part.close();
}

/// Media type of an image, from the file extension in its URL.
fn media_type(url: &str) -> Option<&'static str> {
    let path = url.split(['?', '#']).next().unwrap_or_default();
    let (_, end) = path.rsplit_once('.')?;
    Some(match end.to_ascii_lowercase().as_str() {
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "webp" => "image/webp",
        "gif" => "image/gif",
        "heic" => "image/heic",
        "heif" => "image/heif",
        _ => return None,
    })
}
