//! `messages`, and the images beside a text.

use penstock_types::Bounds;
use penstock_types::fields::{self, bounded, too_many};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, short};
use penstock_types::json_text::compacted;
use penstock_types::request::{ImageSource, Message, Part, Role, ToolCall};

const ROLES: [(&str, Role); 5] = [
    ("system", Role::System),
    ("developer", Role::System),
    ("user", Role::User),
    ("assistant", Role::Assistant),
    ("tool", Role::Tool),
];

/// Most calls that wait for their results at once: each result looks for its own among them.
const OPEN_CALLS_MAX: usize = 1024;

/// Reads the array of messages. Calls of this API may have no ids: they get some, and a tool's message without one answers the
/// first call of its name that nobody has answered.
pub(super) fn messages(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Message>, Fault> {
    let (mut all, mut open): (Vec<Message>, Vec<(String, String)>) = (Vec::new(), Vec::new());
    reader.array(|reader, index| {
        bounded(index, bounds.messages_max, "messages")?;
        let message = message(reader, index, &mut open, bounds).at(index)?;
        all.push(message);
        Ok(())
    })?;
    Ok(all)
}

/// `open`: id and name of each call that has no answer yet.
fn message(
    reader: &mut Reader<'_>,
    index: usize,
    open: &mut Vec<(String, String)>,
    bounds: &Bounds,
) -> Result<Message, Fault> {
    let (mut role, mut images, mut tool) = (None, Vec::new(), None);
    let mut message = Message::default();
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        let mut read = || {
            match &*key {
                "role" => role = Some(fields::word(reader, &ROLES)?),
                "content" => message.content = Some(fields::text(reader)?),
                "thinking" => message.reasoning = Some(fields::text(reader)?).filter(|text| !text.is_empty()),
                "images" => images = self::images(reader, bounds)?,
                "tool_calls" => message.tool_calls = calls(reader, index, bounds)?,
                "tool_call_id" => message.tool_call_id = Some(fields::name(reader, bounds.name_chars_max)?),
                "tool_name" | "name" => tool = Some(fields::string(reader, bounds.name_chars_max)?),
                _ => reader.skip()?,
            }
            Ok(())
        };
        read().within(&key)
    })?;
    message.role = role.ok_or_else(|| Fault::invalid("required, but missing")).within("role")?;
    if !images.is_empty() {
        let text = message.content.iter().filter(|text| !text.is_empty()).cloned().map(Part::Text);
        message.parts = text.chain(images).collect();
    }
    open.extend(message.tool_calls.iter().map(|call| (call.id.clone(), call.name.clone())));
    if open.len() > OPEN_CALLS_MAX {
        return Err(too_many("calls without a result", OPEN_CALLS_MAX)).within("tool_calls");
    }
    if message.role == Role::Tool {
        answers(&mut message, tool.as_deref(), open)?;
    }
    Ok(message)
}

/// Finds the call that a tool's message answers.
fn answers(message: &mut Message, tool: Option<&str>, open: &mut Vec<(String, String)>) -> Result<(), Fault> {
    let of_id = |(id, _): &(String, String)| message.tool_call_id.as_ref().is_some_and(|given| given == id);
    let of_name = |(_, name): &(String, String)| tool.is_none_or(|given| given.is_empty() || given == name);
    let found = match message.tool_call_id {
        Some(_) => open.iter().position(of_id),
        None => open.iter().position(of_name),
    };
    match found {
        Some(at) => {
            let (id, name) = open.remove(at);
            (message.tool_call_id, message.name) = (Some(id), Some(name));
            Ok(())
        }
        None if message.tool_call_id.is_some() => Err(Fault::invalid("no call has this id")).within("tool_call_id"),
        None => {
            let name = short(tool.unwrap_or_default());
            Err(Fault::invalid(format!("no call of \"{name}\" waits for a result"))).within("tool_name")
        }
    }
}

fn calls(reader: &mut Reader<'_>, message: usize, bounds: &Bounds) -> Result<Vec<ToolCall>, Fault> {
    let mut all: Vec<ToolCall> = Vec::new();
    reader.array(|reader, index| {
        bounded(index, bounds.tool_calls_max, "calls")?;
        let (id, function) = call(reader, bounds).at(index)?;
        let (name, arguments) =
            function.ok_or_else(|| Fault::invalid("required, but missing")).within("function").at(index)?;
        let id = id.unwrap_or_else(|| format!("call_{message}_{index}"));
        all.push(ToolCall { id, name, arguments, signature: None });
        Ok(())
    })?;
    Ok(all)
}

type Function = (String, String);

fn call(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<(Option<String>, Option<Function>), Fault> {
    let (mut id, mut function) = (None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "id" => id = Some(fields::string(reader, bounds.name_chars_max).within("id")?).filter(|id| !id.is_empty()),
            "function" => function = Some(self::function(reader, bounds).within("function")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok((id, function))
}

fn function(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Function, Fault> {
    let (mut name, mut arguments) = (None, "{}".to_owned());
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            "arguments" => {
                reader.expect(Kind::Object).within("arguments")?;
                arguments = compacted(reader.raw()?.text);
            }
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok((name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")?, arguments))
}

/// Beginnings of images in base64, by which their kind is known: this API does not say it.
const KINDS: [(&str, &str); 4] =
    [("iVBORw0KGgo", "image/png"), ("/9j/", "image/jpeg"), ("R0lGOD", "image/gif"), ("UklGR", "image/webp")];

/// Reads images in base64.
pub(super) fn images(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Part>, Fault> {
    let mut all = Vec::new();
    reader.array(|reader, index| {
        bounded(index, bounds.parts_max, "images")?;
        let base64 = fields::text(reader).at(index)?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=');
        let kind = KINDS.iter().find(|(beginning, _)| base64.starts_with(beginning)).map(|(_, kind)| *kind);
        let Some(media_type) = kind.filter(|_| base64.bytes().all(plain)) else {
            return Err(Fault::invalid("must be a PNG, JPEG, GIF or WebP image in base64")).at(index);
        };
        let source = ImageSource::Data { media_type: media_type.to_owned(), base64 };
        all.push(Part::Image { source, detail: None });
        Ok(())
    })?;
    Ok(all)
}
