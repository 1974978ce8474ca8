//! `tools` and `toolConfig`: the functions that the model may call.

use std::collections::HashSet;

use super::fields::{list, object, required, unbuilt, word};
use super::schema::{self, Given};
use penstock_types::Bounds;
use penstock_types::fields::{self, bounded, too_many};
use penstock_types::json::{Fault, Reader, Within, short};
use penstock_types::request::{Tool, ToolChoice};

/// Reads `tools`: the functions of all entries.
pub(super) fn tools(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Tool>, Fault> {
    let mut all: Vec<Tool> = Vec::new();
    let mut seen = HashSet::new();
    list(reader, bounds.tools_max, "tools", |reader| {
        object(reader, bounds.inner_fields_max, |reader, key| {
            if key != "functionDeclarations" {
                return Err(unbuilt("only functionDeclarations are built, not Google's own tools"));
            }
            list(reader, bounds.tools_max, "functions", |reader| {
                bounded(all.len(), bounds.tools_max, "functions")?;
                let tool = function(reader, bounds)?;
                if !seen.insert(tool.name.clone()) {
                    return Err(Fault::invalid(format!("function \"{}\" is given twice", short(&tool.name))));
                }
                all.push(tool);
                Ok(())
            })
        })
    })?;
    Ok(all)
}

fn function(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Tool, Fault> {
    let (mut name, mut description, mut parameters) = (None, None, Given::default());
    object(reader, bounds.inner_fields_max, |reader, key| match key {
        "name" => {
            name = Some(fields::name(reader, bounds.name_chars_max)?);
            Ok(())
        }
        "description" => {
            description = Some(fields::text(reader)?);
            Ok(())
        }
        "parameters" => parameters.set(schema::schema(reader, bounds)?),
        "parametersJsonSchema" => parameters.set(schema::json_schema(reader, bounds)?),
        // `response` describes the result and `behavior` belongs to live sessions: no other API has them.
        _ => reader.skip(),
    })?;
    let tool = Tool::function(required(name, "name")?, description, parameters.take(), false);
    if tool.json.len() > bounds.tool_bytes_max {
        return Err(too_many("bytes", bounds.tool_bytes_max));
    }
    Ok(tool)
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Mode {
    #[default]
    Auto,
    Any,
    None,
    Validated,
}

const MODES: &[(&str, Mode)] = &[
    ("AUTO", Mode::Auto),
    ("ANY", Mode::Any),
    ("NONE", Mode::None),
    ("VALIDATED", Mode::Validated),
    ("MODE_UNSPECIFIED", Mode::Auto),
];

/// Value of `toolConfig`, before the tools are known.
#[derive(Default)]
pub(super) struct Calling {
    mode: Mode,
    allowed: Vec<String>,
}

/// Reads the `toolConfig` object: whether, and which, functions are called.
pub(super) fn tool_config(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Calling, Fault> {
    let mut calling = Calling::default();
    object(reader, bounds.inner_fields_max, |reader, key| {
        if key != "functionCallingConfig" {
            return reader.skip();
        }
        object(reader, bounds.inner_fields_max, |reader, key| {
            match key {
                "mode" => calling.mode = word(reader, MODES)?,
                "allowedFunctionNames" => {
                    calling.allowed = fields::strings(reader, bounds.tools_max, bounds.name_chars_max)?;
                }
                "streamFunctionCallArguments" => {
                    if reader.boolean()? {
                        return Err(unbuilt("calls are sent whole"));
                    }
                }
                _ => reader.skip()?,
            }
            Ok(())
        })
    })?;
    Ok(calling)
}

impl Calling {
    /// Resolves the mode and the allowed names against the tools.
    pub(super) fn resolve(self, tools: &[Tool]) -> Result<ToolChoice, Fault> {
        let limits = !self.allowed.is_empty();
        if limits && !matches!(self.mode, Mode::Any | Mode::Validated) {
            return Err(Fault::invalid("only allowed with mode ANY or VALIDATED")).within("allowedFunctionNames");
        }
        let known: HashSet<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
        if let Some(name) = self.allowed.iter().find(|name| !known.contains(name.as_str())) {
            let why = format!("no function is named \"{}\"", short(name));
            return Err(Fault::invalid(why)).within("allowedFunctionNames");
        }
        let mut seen = HashSet::new();
        let names: Vec<String> = self.allowed.iter().filter(|name| seen.insert(name.as_str())).cloned().collect();
        match (self.mode, names.as_slice()) {
            (Mode::None, _) => Ok(ToolChoice::None),
            (Mode::Any, _) if tools.is_empty() => {
                Err(Fault::invalid("ANY is only allowed with functions")).within("mode")
            }
            (_, _) if tools.is_empty() => Ok(ToolChoice::None),
            (Mode::Any, [only]) => Ok(ToolChoice::Named(only.clone())),
            (Mode::Any, []) => Ok(ToolChoice::Required),
            (Mode::Any, _) => Ok(ToolChoice::Allowed { names, required: true }),
            (Mode::Validated, [_, ..]) => Ok(ToolChoice::Allowed { names, required: false }),
            // VALIDATED also promises that calls match their schemas: `strict` below.
            (Mode::Auto | Mode::Validated, _) => Ok(ToolChoice::Auto),
        }
    }

    /// Returns true if the arguments of calls must match the tools' schemas (mode `VALIDATED`).
    pub(super) fn is_validated(&self) -> bool {
        self.mode == Mode::Validated
    }
}
