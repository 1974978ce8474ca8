//! `tools` and `tool_choice`: the functions that the model may call.

use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields::{self, bounded, too_many};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, short};
use penstock_types::json_text::compacted;
use penstock_types::request::{Tool, ToolChoice};

/// Reads the array of tools.
pub(super) fn tools(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Tool>, Fault> {
    let mut all: Vec<Tool> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    reader.array(|reader, index| {
        bounded(index, bounds.tools_max, "tools")?;
        let tool = tool(reader, bounds).at(index)?;
        if !seen.insert(tool.name.clone()) {
            return Err(Fault::invalid(format!("tool \"{}\" is given twice", short(&tool.name)))).at(index);
        }
        all.push(tool);
        Ok(())
    })?;
    Ok(all)
}

fn tool(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Tool, Fault> {
    let (mut kind, mut name, mut description, mut schema, mut strict) = (None, None, None, None, false);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "type" => kind = Some(fields::string(reader, 128).within("type")?),
            "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            "description" => description = Some(fields::text(reader).within("description")?),
            "input_schema" => schema = Some(input_schema(reader, bounds).within("input_schema")?),
            "strict" => strict = reader.boolean().within("strict")?,
            // Caching, streaming and loading hints of the provider: they change no call.
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    if let Some(kind) = kind.filter(|kind| kind != "custom") {
        let why =
            format!("\"{}\" runs at Anthropic's own service; only tools with an input_schema are built", short(&kind));
        return Err(Fault::of(ApiErrorKind::UnsupportedValue, why)).within("type");
    }
    let name = name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")?;
    let schema = schema.ok_or_else(|| Fault::invalid("required, but missing")).within("input_schema")?;
    let tool = Tool::function(name, description, Some(schema), strict);
    if tool.json.len() > bounds.tool_bytes_max {
        return Err(too_many("bytes", bounds.tool_bytes_max));
    }
    Ok(tool)
}

fn input_schema(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    reader.expect(Kind::Object)?;
    let raw = reader.raw()?;
    if raw.depth > bounds.tool_depth_max {
        return Err(too_many("levels of nesting", bounds.tool_depth_max));
    }
    Ok(compacted(raw.text))
}

/// Value of `tool_choice`, before the tools are known.
pub(super) struct Choice {
    choice: ToolChoice,
    parallel: bool,
}

/// Reads the `tool_choice` object: whether, and which, tools are called.
pub(super) fn tool_choice(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Choice, Fault> {
    let (mut kind, mut name, mut parallel) = (None, None, true);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "type" => kind = Some(fields::string(reader, 64).within("type")?),
            "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            "disable_parallel_tool_use" => parallel = !reader.boolean().within("disable_parallel_tool_use")?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let choice = match kind.as_deref() {
        Some("auto") => ToolChoice::Auto,
        Some("any") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        Some("tool") => ToolChoice::Named(name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")?),
        Some(other) => {
            let why = format!("must be one of auto, any, tool, none; got \"{}\"", short(other));
            return Err(Fault::invalid(why)).within("type");
        }
        None => return Err(Fault::invalid("required, but missing")).within("type"),
    };
    Ok(Choice { choice, parallel })
}

const NO_TOOLS: (ToolChoice, bool) = (ToolChoice::None, true);

/// Resolves a choice against the tools; also says whether one answer may hold several calls.
pub(super) fn resolve(choice: Option<Choice>, tools: &[Tool]) -> Result<(ToolChoice, bool), Fault> {
    let Some(Choice { choice, parallel }) = choice else {
        return Ok(if tools.is_empty() { NO_TOOLS } else { (ToolChoice::Auto, true) });
    };
    match choice {
        ToolChoice::None | ToolChoice::Auto if tools.is_empty() => Ok(NO_TOOLS),
        ToolChoice::Required | ToolChoice::Named(_) if tools.is_empty() => {
            Err(Fault::invalid("only allowed with tools"))
        }
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == name) => {
            Err(Fault::invalid(format!("no tool is named \"{}\"", short(&name)))).within("name")
        }
        choice => Ok((choice, parallel)),
    }
}
