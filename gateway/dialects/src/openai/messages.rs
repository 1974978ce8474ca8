//! `messages`: the turns of a conversation.

use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields::{self, bounded};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, mismatch, short};
use penstock_types::request::{ImageSource, Message, Part, Role, ToolCall};

/// Reads the array of messages.
pub(super) fn messages(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Message>, Fault> {
    let mut all = Vec::new();
    let mut called = None;
    reader.array(|reader, index| {
        bounded(index, bounds.messages_max, "messages")?;
        all.push(message(reader, bounds).and_then(|draft| draft.finish(index, &mut called)).at(index)?);
        Ok(())
    })?;
    if all.is_empty() {
        return Err(Fault::invalid("must hold at least one message"));
    }
    Ok(all)
}

/// The latest call in the older form (`function_call`) that awaits its result.
struct Called {
    id: String,
    name: String,
}

const ROLES: &[(&str, Role)] = &[
    ("system", Role::System),
    ("developer", Role::System),
    ("user", Role::User),
    ("assistant", Role::Assistant),
    ("tool", Role::Tool),
    ("function", Role::Tool),
];

#[derive(Default)]
struct Draft {
    role: Option<Role>,
    /// Set for the role `function`, the older form of `tool`.
    is_function: bool,
    content: Option<Content>,
    refusal: Option<String>,
    name: Option<String>,
    reasoning: Option<String>,
    tool_calls: Vec<ToolCall>,
    /// Name and arguments of a call in the older form.
    function_call: Option<(String, String)>,
    tool_call_id: Option<String>,
}

fn message(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Draft, Fault> {
    let mut draft = Draft::default();
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        draft.field(reader, &key, bounds).within(&key)
    })?;
    Ok(draft)
}

impl Draft {
    fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "role" => (self.role, self.is_function) = role(reader).map(|(role, older)| (Some(role), older))?,
            "content" => self.content = Some(content(reader, bounds)?),
            "name" => self.name = Some(fields::name(reader, bounds.name_chars_max)?),
            "reasoning" => self.reasoning = Some(fields::text(reader)?),
            "reasoning_content" => {
                let text = fields::text(reader)?;
                self.reasoning.get_or_insert(text);
            }
            "tool_calls" => self.tool_calls = tool_calls(reader, bounds)?,
            "tool_call_id" => self.tool_call_id = Some(fields::name(reader, bounds.name_chars_max)?),
            "function_call" => self.function_call = Some(self::called(reader, bounds)?),
            "audio" => return Err(Fault::of(ApiErrorKind::Unsupported, "only text is built")),
            "refusal" => self.refusal = Some(fields::text(reader)?),
            // `annotations` and other fields of answers, which clients send back.
            _ => reader.skip()?,
        }
        Ok(())
    }

    /// Message `index` of the conversation. `called` is the call in the older form that awaits its result.
    fn finish(mut self, index: usize, called: &mut Option<Called>) -> Result<Message, Fault> {
        let role = self.role.ok_or_else(|| Fault::invalid("required, but missing")).within("role")?;
        let assistant = role == Role::Assistant;
        self.function_call(assistant, index, called)?;
        if self.is_function {
            self.tool_call_id = Some(self.answered(called)?);
        }
        if !self.tool_calls.is_empty() && !assistant {
            return Err(Fault::invalid("only allowed in messages of the assistant")).within("tool_calls");
        }
        if role == Role::Tool && self.tool_call_id.is_none() {
            return Err(Fault::invalid("required in messages of a tool, but missing")).within("tool_call_id");
        }
        if assistant && self.content.is_none() {
            // An answer that declines has its words there, and none as content.
            self.content = self.refusal.take().map(|text| Content { text, parts: Vec::new() });
        }
        let may_be_empty = assistant && (!self.tool_calls.is_empty() || self.reasoning.is_some());
        if self.content.is_none() && !may_be_empty {
            return Err(Fault::invalid("required, but missing or null")).within("content");
        }
        let (content, parts) = match self.content {
            Some(content) => (Some(content.text), content.parts),
            None => (None, Vec::new()),
        };
        if !parts.is_empty() && matches!(role, Role::System | Role::Assistant) {
            return Err(Fault::invalid("images are only allowed in messages of the user and of tools"))
                .within("content");
        }
        Ok(Message {
            role,
            content,
            parts,
            name: self.name,
            reasoning: self.reasoning.filter(|_| assistant),
            reasoning_signature: None,
            reasoning_blocks: Vec::new(),
            tool_calls: self.tool_calls,
            tool_call_id: self.tool_call_id,
            tool_failed: false,
        })
    }

    /// Turns a call in the older form into one with an id, which its result refers to.
    fn function_call(&mut self, assistant: bool, index: usize, called: &mut Option<Called>) -> Result<(), Fault> {
        let Some((name, arguments)) = self.function_call.take() else { return Ok(()) };
        if !assistant {
            return Err(Fault::invalid("only allowed in messages of the assistant")).within("function_call");
        }
        if !self.tool_calls.is_empty() {
            return Err(Fault::invalid("not allowed with tool_calls")).within("function_call");
        }
        let id = format!("call_{index}");
        *called = Some(Called { id: id.clone(), name: name.clone() });
        self.tool_calls.push(ToolCall { id, name, arguments, signature: None });
        Ok(())
    }

    /// Id of the call whose result this message of the role `function` is.
    fn answered(&self, called: &mut Option<Called>) -> Result<String, Fault> {
        let missing = || Fault::invalid("required in messages of a function, but missing");
        let name = self.name.as_ref().ok_or_else(missing).within("name")?;
        match called.take() {
            Some(call) if call.name == *name => Ok(call.id),
            _ => {
                let why = format!("no function_call of \"{}\" awaits a result before this message", short(name));
                Err(Fault::invalid(why)).within("name")
            }
        }
    }
}

/// Reads a role; the flag is set for `function`.
fn role(reader: &mut Reader<'_>) -> Result<(Role, bool), Fault> {
    let given = reader.string()?;
    match ROLES.iter().find(|(word, _)| *word == given) {
        Some((word, role)) => Ok((*role, *word == "function")),
        None => Err(Fault::invalid(format!(
            "must be one of system, developer, user, assistant, tool, function; got \"{}\"",
            short(&given)
        ))),
    }
}

/// Content of a message while it is read.
#[derive(Default)]
pub(super) struct Content {
    /// Text of all text parts so far, joined without a separator.
    pub(super) text: String,
    /// All parts, filled only if one of them is not text.
    pub(super) parts: Vec<Part>,
}

impl Content {
    fn add(&mut self, part: Part) {
        match part {
            Part::Text(text) => {
                self.text.push_str(&text);
                if !self.parts.is_empty() {
                    self.parts.push(Part::Text(text));
                }
            }
            image @ Part::Image { .. } => {
                if self.parts.is_empty() && !self.text.is_empty() {
                    self.parts.push(Part::Text(self.text.clone()));
                }
                self.parts.push(image);
            }
        }
    }
}

/// Reads a content value: a string, or an array of parts.
pub(super) fn content(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Content, Fault> {
    match reader.kind()? {
        Kind::String => Ok(Content { text: fields::text(reader)?, parts: Vec::new() }),
        Kind::Array => {
            let mut all = Content::default();
            reader.array(|reader, index| {
                bounded(index, bounds.parts_max, "content parts")?;
                all.add(part(reader, bounds).at(index)?);
                Ok(())
            })?;
            Ok(all)
        }
        kind => Err(mismatch("a string or an array of parts", kind)),
    }
}

fn part(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Part, Fault> {
    let (mut kind, mut text, mut image, mut detail) = (None, None, None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "type" => kind = Some(reader.string().within("type")?),
            "text" | "refusal" => text = Some(fields::text(reader).within(&key)?),
            "image_url" => image = Some(image_url(reader, bounds).within("image_url")?),
            "detail" => detail = Some(fields::name(reader, DETAIL_CHARS_MAX).within("detail")?),
            "file_id" => {
                return Err(Fault::of(ApiErrorKind::Unsupported, "files are not read; send the data"))
                    .within("file_id");
            }
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    match kind.as_deref() {
        Some("text" | "input_text" | "output_text" | "refusal") => {
            text.map(Part::Text).ok_or_else(|| Fault::invalid("required, but missing")).within("text")
        }
        Some("image_url" | "input_image") => match image {
            Some((source, inner)) => Ok(Part::Image { source, detail: inner.or(detail) }),
            None => Err(Fault::invalid("required, but missing")).within("image_url"),
        },
        Some(media @ ("input_audio" | "audio_url" | "video_url" | "file" | "input_file")) => {
            let why = format!("\"{media}\" parts are not built; text and image_url are");
            Err(Fault::of(ApiErrorKind::UnsupportedValue, why)).within("type")
        }
        Some(other) => Err(Fault::invalid(format!("unknown part type \"{}\"", short(other)))).within("type"),
        None => Err(Fault::invalid("required, but missing")).within("type"),
    }
}

/// Longest `detail` in characters: low, high, auto, and later words.
const DETAIL_CHARS_MAX: usize = 16;

/// Reads an image URL: a string, or `{url, detail?}`.
fn image_url(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<(ImageSource, Option<String>), Fault> {
    match reader.kind()? {
        Kind::String => return Ok((image_source(fields::text(reader)?)?, None)),
        Kind::Object => {}
        kind => return Err(mismatch("a string or an object", kind)),
    }
    let (mut url, mut detail) = (None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "url" => url = Some(fields::text(reader).within("url")?),
            "detail" if reader.kind()? != Kind::Null => {
                detail = Some(fields::name(reader, DETAIL_CHARS_MAX).within("detail")?);
            }
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let url = url.ok_or_else(|| Fault::invalid("required, but missing")).within("url")?;
    Ok((image_source(url).within("url")?, detail))
}

/// Source of an image: the data of a base64 `data:` URL, or any other URL, which the upstream fetches.
pub(crate) fn image_source(url: String) -> Result<ImageSource, Fault> {
    if let Some(rest) = url.strip_prefix("data:") {
        let (kind, base64) = rest
            .split_once(";base64,")
            .ok_or_else(|| Fault::invalid("a data URL must be data:image/TYPE;base64,DATA"))?;
        if !kind.starts_with("image/") || kind.len() > 64 {
            return Err(Fault::invalid("a data URL must hold an image"));
        }
        return Ok(ImageSource::Data { media_type: kind.to_owned(), base64: base64.to_owned() });
    }
    if url.starts_with("https://") || url.starts_with("http://") {
        return Ok(ImageSource::Url(url));
    }
    Err(Fault::invalid("must be an http, https or data URL"))
}

fn tool_calls(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<ToolCall>, Fault> {
    let mut calls = Vec::new();
    reader.array(|reader, index| {
        bounded(index, bounds.tool_calls_max, "tool calls")?;
        calls.push(tool_call(reader, bounds).at(index)?);
        Ok(())
    })?;
    Ok(calls)
}

fn tool_call(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ToolCall, Fault> {
    let (mut id, mut function, mut signature) = (None, None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "extra_content" => signature = thought_signature(reader).within("extra_content")?,
            "id" => id = Some(fields::name(reader, bounds.name_chars_max).within("id")?),
            "type" => function_type(reader).within("type")?,
            "function" => function = Some(called(reader, bounds).within("function")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let id = id.ok_or_else(|| Fault::invalid("required, but missing")).within("id")?;
    let (name, arguments) = function.ok_or_else(|| Fault::invalid("required, but missing")).within("function")?;
    Ok(ToolCall { id, name, arguments, signature })
}

/// Reads `{"google":{"thought_signature":…}}`, the form of Gemini's own OpenAI endpoint.
pub(super) fn thought_signature(reader: &mut Reader<'_>) -> Result<Option<String>, Fault> {
    let mut signature = None;
    if reader.null()? {
        return Ok(None);
    }
    reader.object(|reader, key| {
        if key != "google" || reader.kind()? != Kind::Object {
            return reader.skip();
        }
        reader.object(|reader, key| {
            if key == "thought_signature" && reader.kind()? == Kind::String {
                signature = Some(fields::text(reader)?);
                return Ok(());
            }
            reader.skip()
        })
    })?;
    Ok(signature)
}

/// Checks the `type` of a tool or a call: only functions are supported.
pub(super) fn function_type(reader: &mut Reader<'_>) -> Result<(), Fault> {
    let kind = reader.string()?;
    if kind == "function" {
        return Ok(());
    }
    Err(Fault::of(ApiErrorKind::UnsupportedValue, format!("only \"function\" is built, got \"{}\"", short(&kind))))
}

fn called(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<(String, String), Fault> {
    let (mut name, mut arguments) = (None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            "arguments" => arguments = Some(fields::text(reader).within("arguments")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let name = name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")?;
    let arguments = arguments.ok_or_else(|| Fault::invalid("required, but missing")).within("arguments")?;
    Ok((name, arguments))
}
