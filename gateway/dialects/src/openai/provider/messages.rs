//! Messages in the form that OpenAI-compatible providers read.

use bytes::{BufMut, BytesMut};

use super::{ChatCodec, Server};
use crate::answer_json::{Object, list};
use crate::openai::ReasoningNames;
use penstock_types::request::{ImageSource, Message, Part, Role, ToolCall};
use penstock_types::write;

/// Text of a result that is an image, where images are not allowed in results.
const IMAGE_FOLLOWS: &str = "(an image, which follows)";

/// Writes the list of messages. OpenAI itself takes images from the user alone: those of results follow in a message
/// of the user behind the results, which must not be parted from their calls.
pub(super) fn put_all(codec: &ChatCodec, out: &mut BytesMut, messages: &[Message]) {
    out.put_u8(b'[');
    for (index, message) in messages.iter().enumerate() {
        if index > 0 {
            out.put_u8(b',');
        }
        put(codec, out, message);
        let ends = messages.get(index + 1).is_none_or(|next| next.role != Role::Tool);
        if codec.server == Server::OpenAi && message.role == Role::Tool && ends {
            let results = messages[..=index].rsplit(|before| before.role != Role::Tool).next();
            put_images(out, results.unwrap_or_default());
        }
    }
    out.put_u8(b']');
}

/// Writes a comma, and the images of results as a message of the user; nothing where the results have none.
fn put_images(out: &mut BytesMut, results: &[Message]) {
    let mut before: &[u8] = b",{\"role\":\"user\",\"content\":[";
    for result in results {
        let images = result.parts.iter().filter(|part| matches!(part, Part::Image { .. }));
        for (index, image) in images.enumerate() {
            out.put_slice(std::mem::replace(&mut before, b","));
            if index == 0 {
                let id = result.tool_call_id.as_deref().unwrap_or_default();
                put_part(out, &Part::Text(format!("Image of the result of {id}:")));
                out.put_u8(b',');
            }
            put_part(out, image);
        }
    }
    if before == b"," {
        out.put_slice(b"]}");
    }
}

/// Writes one message. Fields that the API lacks are left out: the signature of a reasoning, at OpenAI that of a call, and the
/// mark of a failed call (the call's result says so in words).
fn put(codec: &ChatCodec, out: &mut BytesMut, message: &Message) {
    let mut object = Object::open(out);
    object.string("role", role(message.role));
    match (&message.content, message.parts.is_empty()) {
        (content, false) if codec.server == Server::OpenAi && message.role == Role::Tool => {
            let text = content.as_deref().filter(|text| !text.is_empty());
            object.string("content", text.unwrap_or(IMAGE_FOLLOWS));
        }
        (_, false) => list(object.key("content"), &message.parts, put_part),
        (Some(text), true) => object.string("content", text),
        // A turn of reasoning alone, where the reasoning is left out: null is taken beside calls only.
        (None, true) if message.tool_calls.is_empty() && codec.reasoning.is_none() => object.string("content", ""),
        (None, true) => object.raw("content", "null"),
    }
    object.optional("name", message.name.as_deref());
    if let (Some(reasoning), Some(names)) = (&message.reasoning, codec.reasoning) {
        if names != ReasoningNames::ReasoningContent {
            object.string("reasoning", reasoning);
        }
        if names != ReasoningNames::Reasoning {
            object.string("reasoning_content", reasoning);
        }
    }
    if !message.tool_calls.is_empty() {
        list(object.key("tool_calls"), &message.tool_calls, |out, call| put_call(codec.server, out, call));
    }
    object.optional("tool_call_id", message.tool_call_id.as_deref());
    object.close();
}

fn role(role: Role) -> &'static str {
    match role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    }
}

fn put_part(out: &mut BytesMut, part: &Part) {
    let mut object = Object::open(out);
    match part {
        Part::Text(text) => {
            object.string("type", "text");
            object.string("text", text);
        }
        Part::Image { source, detail } => {
            object.string("type", "image_url");
            let mut image = Object::open(object.key("image_url"));
            put_source(image.key("url"), source);
            image.optional("detail", detail.as_deref());
            image.close();
        }
    }
    object.close();
}

/// Writes an image as a URL in quotes.
pub(crate) fn put_source(out: &mut BytesMut, source: &ImageSource) {
    match source {
        ImageSource::Url(url) => write::string(out, url),
        ImageSource::Data { media_type, base64 } => {
            out.extend_from_slice(b"\"data:");
            write::escaped(out, media_type);
            out.extend_from_slice(b";base64,");
            write::escaped(out, base64);
            out.extend_from_slice(b"\"");
        }
    }
}

fn put_call(server: Server, out: &mut BytesMut, call: &ToolCall) {
    let mut object = Object::open(out);
    object.string("id", &call.id);
    object.string("type", "function");
    let mut function = Object::open(object.key("function"));
    function.string("name", &call.name);
    function.string("arguments", &call.arguments);
    function.close();
    if let Some(signature) = call.signature.as_ref().filter(|_| server == Server::Compatible) {
        put_signature(&mut object, signature);
    }
    object.close();
}

/// Writes `extra_content` of a call, the place of a thought's signature at Gemini's own OpenAI endpoint.
pub(crate) fn put_signature(object: &mut Object<'_>, signature: &str) {
    let mut extra = Object::open(object.key("extra_content"));
    let mut google = Object::open(extra.key("google"));
    google.string("thought_signature", signature);
    google.close();
    extra.close();
}
