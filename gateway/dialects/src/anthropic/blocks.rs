//! `system` and `messages`: turns made of content blocks.
//!
//! One turn of this API can become several messages of ours: each `tool_result` becomes a message of role tool, then
//! follows the rest of the user's content. Texts of one turn are joined by a line feed where the user or a tool
//! speaks, because each block is a text of its own there; texts of the assistant are joined by nothing, because they
//! were one answer.

use std::borrow::Cow;

use crate::packed_thinking::{Thought, packed};
use crate::reasoning_maker::CALL;
use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields::{self, bounded};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, mismatch, short};
use penstock_types::json_text::compacted;
use penstock_types::request::{ImageSource, Message, Part, ReasoningBlock, Role, ToolCall};

/// Prefix of a billing block that Claude Code puts in front of its instructions. The block differs in every request,
/// and left in place it would keep every prompt from sharing a cached prefix; it is dropped.
const BILLING: &str = "x-anthropic-billing-header:";

/// Reads `system`: a string or text blocks.
pub(super) fn system(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    let mut content = Content::default();
    each_block(reader, bounds, false, |block| match block {
        Block::Text(text) if text.starts_with(BILLING) => Ok(()),
        Block::Text(text) => {
            content.add(Part::Text(text));
            Ok(())
        }
        other => Err(misplaced(&other, "instructions are text")),
    })?;
    Ok(content.text)
}

/// Reads the array of messages.
pub(super) fn messages(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Message>, Fault> {
    let mut all = Vec::new();
    reader.array(|reader, index| {
        bounded(index, bounds.messages_max, "messages")?;
        message(reader, bounds, index, &mut all).at(index)
    })?;
    if all.is_empty() {
        return Err(Fault::invalid("must hold at least one message"));
    }
    Ok(all)
}

fn message(reader: &mut Reader<'_>, bounds: &Bounds, index: usize, out: &mut Vec<Message>) -> Result<(), Fault> {
    let (mut role, mut content) = (None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "role" => role = Some(self::role(reader).within("role")?),
            // The shape of the content depends on the role, which may come after it.
            "content" => content = Some(reader.raw()?.text),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let missing = || Fault::invalid("required, but missing");
    let role = role.ok_or_else(missing).within("role")?;
    let content = content.ok_or_else(missing).within("content")?;
    let mut reader = Reader::new(content.as_bytes())?;
    match role {
        Role::Assistant => assistant(&mut reader, bounds, index, out),
        role => user(&mut reader, bounds, role, out),
    }
    .within("content")
}

fn role(reader: &mut Reader<'_>) -> Result<Role, Fault> {
    fields::word(reader, &[("user", Role::User), ("assistant", Role::Assistant), ("system", Role::System)])
}

fn user(reader: &mut Reader<'_>, bounds: &Bounds, role: Role, out: &mut Vec<Message>) -> Result<(), Fault> {
    let (mut content, mut said, mut results) = (Content::default(), false, false);
    each_block(reader, bounds, false, |block| {
        match block {
            Block::Text(text) => content.add(Part::Text(text)),
            Block::Image(source) if role == Role::User => content.add(Part::Image { source, detail: None }),
            Block::ToolResult(message) if role == Role::User => {
                out.push(message);
                results = true;
                return Ok(());
            }
            other => return Err(misplaced(&other, "not allowed in a message of this role")),
        }
        said = true;
        Ok(())
    })?;
    if !said && !results {
        return Err(Fault::invalid("must not be empty"));
    }
    if said {
        out.push(Message { role, content: Some(content.text), parts: content.parts, ..Message::default() });
    }
    Ok(())
}

fn assistant(reader: &mut Reader<'_>, bounds: &Bounds, index: usize, out: &mut Vec<Message>) -> Result<(), Fault> {
    let (mut text, mut thoughts, mut calls): (Option<String>, Vec<Thought>, Vec<ToolCall>) = Default::default();
    let (mut signature, mut reasoning_blocks, mut count) = (None, Vec::new(), 0);
    each_block(reader, bounds, false, |block| {
        let at = count;
        count += 1;
        match block {
            Block::Text(more) => text.get_or_insert_default().push_str(&more),
            Block::Thought(Thought::Plain { signature: Some(opaque), .. }) if opaque.starts_with(CALL) => {
                signature = Some(opaque[CALL.len()..].to_owned());
            }
            Block::Thought(thought) => {
                let (text, signature) = match &thought {
                    Thought::Plain { text, signature } => (Some(text.clone()), signature.clone()),
                    Thought::Redacted(data) => (None, Some(data.clone())),
                };
                reasoning_blocks.push(ReasoningBlock { message: index, block: at, text, signature });
                thoughts.push(thought.without_own_signature());
            }
            Block::ToolUse(call) => {
                bounded(calls.len(), bounds.tool_calls_max, "tool_use blocks")?;
                calls.push(ToolCall { signature: signature.take(), ..call });
            }
            other => return Err(misplaced(&other, "not allowed in a message of the assistant")),
        }
        Ok(())
    })?;
    let (reasoning, reasoning_signature) = packed(thoughts);
    let content = if calls.is_empty() && reasoning.is_none() { text.or(Some(String::new())) } else { text };
    let message = Message {
        role: Role::Assistant,
        content,
        reasoning,
        reasoning_signature,
        reasoning_blocks,
        tool_calls: calls,
        ..Message::default()
    };
    out.push(message);
    Ok(())
}

/// Content of one message while its blocks are read.
#[derive(Default)]
struct Content {
    /// Text of all text blocks so far, joined by line ends.
    text: String,
    /// All parts, filled only if one of them is not text.
    parts: Vec<Part>,
    /// Set when a text block was read, even an empty one.
    has_text: bool,
}

impl Content {
    fn add(&mut self, part: Part) {
        match &part {
            Part::Text(text) => {
                if std::mem::replace(&mut self.has_text, true) {
                    self.text.push('\n');
                }
                self.text.push_str(text);
                if !self.parts.is_empty() {
                    self.parts.push(part);
                }
            }
            Part::Image { .. } => {
                if self.parts.is_empty() && self.has_text {
                    self.parts.push(Part::Text(self.text.clone()));
                }
                self.parts.push(part);
            }
        }
    }
}

/// A content block of a supported type.
enum Block {
    Text(String),
    Image(ImageSource),
    Thought(Thought),
    ToolUse(ToolCall),
    /// Result of a tool, as the message of role tool that carries it.
    ToolResult(Message),
}

fn misplaced(block: &Block, why: &str) -> Fault {
    let kind = match block {
        Block::Text(_) => "text",
        Block::Image(_) => "image",
        Block::Thought(_) => "thinking",
        Block::ToolUse(_) => "tool_use",
        Block::ToolResult(_) => "tool_result",
    };
    Fault::invalid(format!("a \"{kind}\" block: {why}"))
}

/// Reads a content value: a string, which is one text block, or an array of blocks. `nested` is set inside a tool's
/// result, which may hold no further results.
fn each_block(
    reader: &mut Reader<'_>,
    bounds: &Bounds,
    nested: bool,
    mut each: impl FnMut(Block) -> Result<(), Fault>,
) -> Result<(), Fault> {
    match reader.kind()? {
        Kind::String => each(Block::Text(fields::text(reader)?)),
        Kind::Array => reader.array(|reader, index| {
            bounded(index, bounds.parts_max, "content blocks")?;
            block(reader, bounds, nested).and_then(&mut each).at(index)
        }),
        kind => Err(mismatch("a string or an array of blocks", kind)),
    }
}

/// Raw fields of a block. Fields whose shape depends on the block's type stay unparsed, since the type may come after
/// them.
#[derive(Default)]
struct Draft<'a> {
    kind: Option<Cow<'a, str>>,
    text: Option<String>,
    signature: Option<String>,
    data: Option<String>,
    id: Option<String>,
    name: Option<String>,
    failed: bool,
    source: Option<&'a str>,
    input: Option<&'a str>,
    content: Option<&'a str>,
}

fn block(reader: &mut Reader<'_>, bounds: &Bounds, nested: bool) -> Result<Block, Fault> {
    let mut draft = Draft::default();
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "type" => draft.kind = Some(reader.string().within("type")?),
            "text" | "thinking" => draft.text = Some(fields::text(reader).within(&key)?),
            "signature" => draft.signature = Some(fields::text(reader).within("signature")?),
            "data" => draft.data = Some(fields::text(reader).within("data")?),
            "id" | "tool_use_id" => draft.id = Some(fields::name(reader, bounds.name_chars_max).within(&key)?),
            "name" => draft.name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            "is_error" => draft.failed = reader.boolean().within("is_error")?,
            "source" => draft.source = Some(reader.raw()?.text),
            "input" => draft.input = Some(reader.raw()?.text),
            "content" => draft.content = Some(reader.raw()?.text),
            // `cache_control`: where a provider caches; our own prefix cache needs no marks. `citations` and the like.
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    draft.finish(bounds, nested)
}

/// Block types of the published API that are recognized and refused as unsupported.
const UNBUILT: [&str; 16] = [
    "document",
    "search_result",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "tool_reference",
    "container_upload",
    "mcp_tool_use",
    "mcp_tool_result",
    "browser_state",
    "compaction",
    "advisor_tool_result",
];

impl Draft<'_> {
    fn finish(self, bounds: &Bounds, nested: bool) -> Result<Block, Fault> {
        match self.kind.as_deref() {
            Some("text") => Ok(Block::Text(required(self.text, "text")?)),
            Some("image") => {
                let source = required(self.source, "source")?;
                image_source(&mut Reader::new(source.as_bytes())?, bounds).within("source").map(Block::Image)
            }
            Some("thinking") => {
                let signature = self.signature.filter(|signature| !signature.is_empty());
                Ok(Block::Thought(Thought::Plain { text: required(self.text, "thinking")?, signature }))
            }
            Some("redacted_thinking") => Ok(Block::Thought(Thought::Redacted(required(self.data, "data")?))),
            Some("tool_use") => self.tool_use(),
            // Results are not nested: otherwise the innermost text would be read once per level.
            Some("tool_result") if nested => Err(Fault::invalid("not allowed in a tool_result")).within("type"),
            Some("tool_result") => self.tool_result(bounds),
            Some(known) if UNBUILT.contains(&known) => {
                let why =
                    format!("\"{known}\" blocks are not built; text, image, thinking, tool_use and tool_result are");
                Err(Fault::of(ApiErrorKind::UnsupportedValue, why)).within("type")
            }
            Some(other) => Err(Fault::invalid(format!("unknown block type \"{}\"", short(other)))).within("type"),
            None => Err(Fault::invalid("required, but missing")).within("type"),
        }
    }

    fn tool_use(self) -> Result<Block, Fault> {
        let (id, name) = (required(self.id, "id")?, required(self.name, "name")?);
        let input = required(self.input, "input")?;
        Reader::new(input.as_bytes())?.expect(Kind::Object).within("input")?;
        Ok(Block::ToolUse(ToolCall { id, name, arguments: compacted(input), signature: None }))
    }

    fn tool_result(self, bounds: &Bounds) -> Result<Block, Fault> {
        let id = required(self.id, "tool_use_id")?;
        let mut content = Content::default();
        if let Some(text) = self.content {
            let add = |block| match block {
                Block::Text(text) => {
                    content.add(Part::Text(text));
                    Ok(())
                }
                Block::Image(source) => {
                    content.add(Part::Image { source, detail: None });
                    Ok(())
                }
                other => Err(misplaced(&other, "not allowed in a tool_result")),
            };
            each_block(&mut Reader::new(text.as_bytes())?, bounds, true, add).within("content")?;
        }
        Ok(Block::ToolResult(Message {
            role: Role::Tool,
            content: Some(content.text),
            parts: content.parts,
            tool_call_id: Some(id),
            tool_failed: self.failed,
            ..Message::default()
        }))
    }
}

fn required<T>(value: Option<T>, name: &str) -> Result<T, Fault> {
    value.ok_or_else(|| Fault::invalid("required, but missing")).within(name)
}

/// Reads an image source: `{"type":"base64","media_type","data"}` or `{"type":"url","url"}`.
fn image_source(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ImageSource, Fault> {
    const URL_CHARS_MAX: usize = 8_192;
    let (mut kind, mut media, mut data, mut url) = (None, None, None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "type" => kind = Some(fields::string(reader, 64).within("type")?),
            "media_type" => media = Some(fields::name(reader, 64).within("media_type")?),
            "data" => data = Some(fields::text(reader).within("data")?),
            "url" => url = Some(fields::name(reader, URL_CHARS_MAX).within("url")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    match kind.as_deref() {
        Some("base64") => {
            let media_type = required(media, "media_type")?;
            if !media_type.starts_with("image/") {
                return Err(Fault::invalid("must be an image type")).within("media_type");
            }
            Ok(ImageSource::Data { media_type, base64: required(data, "data")? })
        }
        Some("url") => {
            let url = required(url, "url")?;
            match url.starts_with("https://") || url.starts_with("http://") {
                true => Ok(ImageSource::Url(url)),
                false => Err(Fault::invalid("must be an http or https URL")).within("url"),
            }
        }
        Some("file") => {
            Err(Fault::of(ApiErrorKind::UnsupportedValue, "files are not built; base64 and url are")).within("type")
        }
        Some(other) => Err(Fault::invalid(format!("must be base64 or url, got \"{}\"", short(other)))).within("type"),
        None => Err(Fault::invalid("required, but missing")).within("type"),
    }
}
