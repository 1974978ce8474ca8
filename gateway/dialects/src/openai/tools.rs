//! `tools` and `tool_choice`: the functions that the model may call.

use super::messages::function_type;
use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields::{self, bounded, too_many};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, mismatch, short};
use penstock_types::json_text::compacted;
use penstock_types::request::{Tool, ToolChoice};

/// Reads the array of tools.
pub(crate) fn offered_tools(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Tool>, Fault> {
    let mut all: Vec<Tool> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    reader.array(|reader, index| {
        bounded(index, bounds.tools_max, "tools")?;
        let tool = tool(reader, bounds).at(index)?;
        if !seen.insert(tool.name.clone()) {
            return Err(Fault::invalid(format!("function \"{}\" is given twice", short(&tool.name)))).at(index);
        }
        all.push(tool);
        Ok(())
    })?;
    Ok(all)
}

/// Reads the compact JSON text of a tool, bounded in size.
pub(super) fn tool_text(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    reader.expect(Kind::Object)?;
    let raw = reader.raw()?;
    if raw.depth > bounds.tool_depth_max {
        return Err(too_many("levels of nesting", bounds.tool_depth_max));
    }
    let json = compacted(raw.text);
    if json.len() > bounds.tool_bytes_max {
        return Err(too_many("bytes", bounds.tool_bytes_max));
    }
    Ok(json)
}

/// Reads a tool of the Responses API: the function's fields beside `type`.
pub(super) fn flat(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Tool, Fault> {
    let json = tool_text(reader, bounds)?;
    let mut kind = false;
    Reader::new(json.as_bytes())?.object(|reader, key| {
        if key != "type" {
            return reader.skip();
        }
        kind = true;
        function_type(reader).within("type")
    })?;
    if !kind {
        return Err(Fault::invalid("required, but missing")).within("type");
    }
    let Tool { name, description, parameters, strict, .. } = function(&mut Reader::new(json.as_bytes())?, bounds)?;
    Ok(Tool::function(name, description, parameters, strict))
}

/// Reads a tool in two passes: as a whole for its text and size, then its checked fields.
fn tool(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Tool, Fault> {
    let json = tool_text(reader, bounds)?;
    let (mut kind, mut tool) = (false, None);
    let mut names = Names::new(bounds.inner_fields_max);
    Reader::new(json.as_bytes())?.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "type" => {
                function_type(reader).within("type")?;
                kind = true;
            }
            "function" => tool = Some(function(reader, bounds).within("function")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    if !kind {
        return Err(Fault::invalid("required, but missing")).within("type");
    }
    let tool = tool.ok_or_else(|| Fault::invalid("required, but missing")).within("function")?;
    Ok(Tool { json, ..tool })
}

/// Reads the function in a tool; the caller fills in `json`.
pub(super) fn function(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Tool, Fault> {
    let (mut name, mut description, mut parameters, mut strict) = (None, None, None, false);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            "description" => description = Some(fields::text(reader).within("description")?),
            "strict" => strict = reader.boolean().within("strict")?,
            "parameters" => {
                reader.expect(Kind::Object).within("parameters")?;
                // The enclosing tool's text is compact already.
                parameters = Some(reader.raw()?.text.to_owned());
            }
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let name = name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")?;
    Ok(Tool { name, description, parameters, strict, json: String::new() })
}

/// Value of `tool_choice`, before the tools are known.
pub(super) enum Choice {
    None,
    Auto,
    Required,
    Function(String),
    /// Names of the only tools that may be called, and whether a call is demanded.
    Allowed {
        names: Vec<String>,
        required: bool,
    },
    Unbuilt(String),
}

/// Reads the `tool_choice` field: a word, or an object that names a function.
pub(super) fn tool_choice(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Choice, Fault> {
    match reader.kind()? {
        Kind::String => match &*reader.string()? {
            "none" => Ok(Choice::None),
            "auto" => Ok(Choice::Auto),
            "required" => Ok(Choice::Required),
            other => {
                Err(Fault::invalid(format!("must be none, auto, required or an object; got \"{}\"", short(other))))
            }
        },
        Kind::Object => chosen(reader, bounds),
        kind => Err(mismatch("a string or an object", kind)),
    }
}

fn chosen(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Choice, Fault> {
    let (mut kind, mut name, mut only) = (None, None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "type" => kind = Some(fields::name(reader, bounds.name_chars_max).within("type")?),
            "function" => name = Some(chosen_name(reader, bounds).within("function")?),
            "allowed_tools" => only = Some(Allowed::read(reader, bounds).within("allowed_tools")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    match kind.ok_or_else(|| Fault::invalid("required, but missing")).within("type")? {
        kind if kind == "function" => {
            name.map(Choice::Function).ok_or_else(|| Fault::invalid("required, but missing")).within("function")
        }
        kind if kind == "allowed_tools" => {
            let only = only.ok_or_else(|| Fault::invalid("required, but missing"));
            only.and_then(Allowed::finish).within("allowed_tools")
        }
        kind if kind == "custom" => Ok(Choice::Unbuilt(kind)),
        kind => Err(Fault::invalid(format!("unknown type \"{}\"", short(&kind)))).within("type"),
    }
}

/// The tools to which a choice is restricted: `mode` and `tools`. OpenAI's chat completions have them in an object
/// `allowed_tools`, its Responses API in the choice itself.
#[derive(Default)]
pub(super) struct Allowed {
    required: Option<bool>,
    names: Option<Vec<String>>,
}

impl Allowed {
    fn read(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Self, Fault> {
        let mut allowed = Self::default();
        let mut names = Names::new(bounds.inner_fields_max);
        reader.object(|reader, key| {
            names.add(&key)?;
            match allowed.field(reader, &key, bounds)? {
                true => Ok(()),
                false => reader.skip(),
            }
        })?;
        Ok(allowed)
    }

    /// Reads one of the two fields; `false`, with nothing read, if `key` is neither.
    pub(super) fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<bool, Fault> {
        match key {
            "mode" => {
                let words = [("auto", false), ("required", true)];
                self.required = Some(fields::word(reader, &words).within("mode")?);
            }
            "tools" => {
                let mut all: Vec<String> = Vec::new();
                let mut seen = std::collections::HashSet::new();
                let read = reader.array(|reader, index| {
                    bounded(index, bounds.tools_max, "tools")?;
                    let name = allowed_name(reader, bounds).at(index)?;
                    if seen.insert(name.clone()) {
                        all.push(name);
                    }
                    Ok(())
                });
                read.within("tools")?;
                self.names = Some(all);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn finish(self) -> Result<Choice, Fault> {
        let missing = || Fault::invalid("required, but missing");
        let names = self.names.ok_or_else(missing).within("tools")?;
        let required = self.required.ok_or_else(missing).within("mode")?;
        match names.is_empty() {
            true => Err(Fault::invalid("must not be empty")).within("tools"),
            false => Ok(Choice::Allowed { names, required }),
        }
    }
}

/// Reads the name in an allowed tool: `{"type":"function","name":…}`, or with the name in an object `function`.
fn allowed_name(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    let (mut kind, mut name) = (false, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "type" => {
                function_type(reader).within("type")?;
                kind = true;
            }
            "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            "function" => name = Some(chosen_name(reader, bounds).within("function")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    if !kind {
        return Err(Fault::invalid("required, but missing")).within("type");
    }
    name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")
}

fn chosen_name(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    let mut name = None;
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")
}

/// Resolves a choice against the tools.
pub(super) fn resolve(choice: Option<Choice>, tools: &[Tool]) -> Result<ToolChoice, Fault> {
    let unbuilt = |what: &str| Fault::of(ApiErrorKind::UnsupportedValue, format!("{what} is not built"));
    match choice {
        None if tools.is_empty() => Ok(ToolChoice::None),
        None => Ok(ToolChoice::Auto),
        Some(Choice::None) => Ok(ToolChoice::None), // holds without tools too
        Some(_) if tools.is_empty() => Err(Fault::invalid("only allowed with tools")),
        Some(Choice::Auto) => Ok(ToolChoice::Auto),
        Some(Choice::Required) => Ok(ToolChoice::Required),
        Some(Choice::Function(name)) if !tools.iter().any(|tool| tool.name == name) => {
            Err(Fault::invalid(format!("no tool is named \"{}\"", short(&name)))).within("name").within("function")
        }
        Some(Choice::Function(name)) => Ok(ToolChoice::Named(name)),
        Some(Choice::Allowed { names, required }) => {
            let known: std::collections::HashSet<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            match names.iter().find(|name| !known.contains(name.as_str())) {
                Some(name) => Err(Fault::invalid(format!("no tool is named \"{}\"", short(name)))),
                None => Ok(ToolChoice::Allowed { names, required }),
            }
        }
        Some(Choice::Unbuilt(kind)) => Err(unbuilt(&format!("\"{kind}\""))),
    }
}
