//! `messages`: the turns of a conversation.

use std::borrow::Cow;

use super::Bounds;
use super::fields::{self, bounded};
use super::json::{Fault, Kind, Names, Reader, Within, mismatch, short};
use crate::error::ApiErrorKind;
use crate::request::{Message, Role, ToolCall};

/// Reads the array of messages.
pub(super) fn messages(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Message>, Fault> {
    let mut all = Vec::new();
    reader.array(|reader, index| {
        bounded(index, bounds.messages_max, "messages")?;
        all.push(message(reader, bounds).at(index)?);
        Ok(())
    })?;
    if all.is_empty() {
        return Err(Fault::invalid("must hold at least one message"));
    }
    Ok(all)
}

const ROLES: &[(&str, Role)] = &[
    ("system", Role::System),
    ("developer", Role::System),
    ("user", Role::User),
    ("assistant", Role::Assistant),
    ("tool", Role::Tool),
];

#[derive(Default)]
struct Draft {
    role: Option<Role>,
    content: Option<String>,
    name: Option<String>,
    reasoning: Option<String>,
    tool_calls: Vec<ToolCall>,
    tool_call_id: Option<String>,
}

fn message(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Message, Fault> {
    let mut draft = Draft::default();
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        draft.field(reader, &key, bounds).within(&key)
    })?;
    draft.finish()
}

impl Draft {
    fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "role" => self.role = Some(role(reader)?),
            "content" => self.content = Some(content(reader, bounds)?),
            "name" => self.name = Some(fields::name(reader, bounds.name_chars_max)?),
            "reasoning" => self.reasoning = Some(fields::text(reader)?),
            "reasoning_content" => {
                let text = fields::text(reader)?;
                self.reasoning.get_or_insert(text);
            }
            "tool_calls" => self.tool_calls = tool_calls(reader, bounds)?,
            "tool_call_id" => self.tool_call_id = Some(fields::name(reader, bounds.name_chars_max)?),
            "function_call" => {
                return Err(Fault::of(ApiErrorKind::Unsupported, "deprecated and not built; use tool_calls"));
            }
            "audio" => return Err(Fault::of(ApiErrorKind::Unsupported, "only text is built")),
            // `refusal`, `annotations` and whatever else answers carry when clients send them back.
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn finish(self) -> Result<Message, Fault> {
        let role = self.role.ok_or_else(|| Fault::invalid("required, but missing")).within("role")?;
        let assistant = role == Role::Assistant;
        if !self.tool_calls.is_empty() && !assistant {
            return Err(Fault::invalid("only allowed in messages of the assistant")).within("tool_calls");
        }
        if role == Role::Tool && self.tool_call_id.is_none() {
            return Err(Fault::invalid("required in messages of a tool, but missing")).within("tool_call_id");
        }
        let may_be_empty = assistant && (!self.tool_calls.is_empty() || self.reasoning.is_some());
        if self.content.is_none() && !may_be_empty {
            return Err(Fault::invalid("required, but missing or null")).within("content");
        }
        Ok(Message {
            role,
            content: self.content,
            name: self.name,
            reasoning: self.reasoning.filter(|_| assistant),
            tool_calls: self.tool_calls,
            tool_call_id: self.tool_call_id,
        })
    }
}

fn role(reader: &mut Reader<'_>) -> Result<Role, Fault> {
    let given = reader.string()?;
    match ROLES.iter().find(|(word, _)| *word == given) {
        Some((_, role)) => Ok(*role),
        None if given == "function" => {
            Err(Fault::of(ApiErrorKind::UnsupportedValue, "\"function\" is deprecated and not built; use \"tool\""))
        }
        None => Err(Fault::invalid(format!(
            "must be one of system, developer, user, assistant, tool; got \"{}\"",
            short(&given)
        ))),
    }
}

/// A string, or text parts that are joined.
fn content(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    match reader.kind()? {
        Kind::String => fields::text(reader),
        Kind::Array => {
            let mut joined = String::new();
            reader.array(|reader, index| {
                bounded(index, bounds.parts_max, "content parts")?;
                joined.push_str(&part(reader, bounds).at(index)?);
                Ok(())
            })?;
            Ok(joined)
        }
        kind => Err(mismatch("a string or an array of parts", kind)),
    }
}

fn part<'a>(reader: &mut Reader<'a>, bounds: &Bounds) -> Result<Cow<'a, str>, Fault> {
    let (mut kind, mut text) = (None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "type" => kind = Some(reader.string().within("type")?),
            "text" | "refusal" => text = Some(reader.string().within(&key)?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    match kind.as_deref() {
        Some("text" | "input_text" | "output_text" | "refusal") => {
            text.ok_or_else(|| Fault::invalid("required, but missing")).within("text")
        }
        Some(
            media @ ("image_url" | "input_image" | "input_audio" | "audio_url" | "video_url" | "file" | "input_file"),
        ) => Err(Fault::of(ApiErrorKind::UnsupportedValue, format!("\"{media}\" parts are not built; only text is")))
            .within("type"),
        Some(other) => Err(Fault::invalid(format!("unknown part type \"{}\"", short(other)))).within("type"),
        None => Err(Fault::invalid("required, but missing")).within("type"),
    }
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
    let (mut id, mut function) = (None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "id" => id = Some(fields::name(reader, bounds.name_chars_max).within("id")?),
            "type" => function_type(reader).within("type")?,
            "function" => function = Some(called(reader, bounds).within("function")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let id = id.ok_or_else(|| Fault::invalid("required, but missing")).within("id")?;
    let (name, arguments) = function.ok_or_else(|| Fault::invalid("required, but missing")).within("function")?;
    Ok(ToolCall { id, name, arguments })
}

/// `type` of a tool or a call: functions are what is built.
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
