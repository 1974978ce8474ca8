//! `functions` and `function_call`: the API's older form of tools, with one call per answer.
//!
//! A request in this form becomes one with tools, and its answer is written in the older form again ([`CallShape`]).
//! Calls had no ids: the messages' reader makes them from the position of the message that calls.

use super::tools::{function, tool_text};
use penstock_types::Bounds;
use penstock_types::fields::{self, bounded};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, mismatch, short};
use penstock_types::request::{Tool, ToolChoice};

/// Shape of calls in an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallShape {
    /// A list `tool_calls`, ended by the finish reason `tool_calls`.
    #[default]
    Tools,
    /// One object `function_call`, ended by the finish reason `function_call`, as clients of `functions` read it. The
    /// first call of an answer is written; the shape has no place for others.
    Function,
}

/// Value of `function_call`.
enum Choice {
    None,
    Auto,
    Named(String),
}

/// The two fields while a body is read.
#[derive(Default)]
pub(super) struct Functions {
    functions: Option<Vec<Tool>>,
    choice: Option<Choice>,
}

impl Functions {
    /// Reads `functions`, a list of `{name, description?, parameters?}`.
    pub(super) fn functions(&mut self, reader: &mut Reader<'_>, bounds: &Bounds) -> Result<(), Fault> {
        let mut all: Vec<Tool> = Vec::new();
        let mut seen = std::collections::HashSet::new();
        reader.array(|reader, index| {
            bounded(index, bounds.tools_max, "functions")?;
            let json = tool_text(reader, bounds).at(index)?;
            let read = function(&mut Reader::new(json.as_bytes())?, bounds).at(index)?;
            let Tool { name, description, parameters, strict, .. } = read;
            if !seen.insert(name.clone()) {
                return Err(Fault::invalid(format!("function \"{}\" is given twice", short(&name)))).at(index);
            }
            all.push(Tool::function(name, description, parameters, strict));
            Ok(())
        })?;
        self.functions = Some(all);
        Ok(())
    }

    /// Reads `function_call`: `none`, `auto`, or an object with the name of a function.
    pub(super) fn function_call(&mut self, reader: &mut Reader<'_>, bounds: &Bounds) -> Result<(), Fault> {
        self.choice = Some(match reader.kind()? {
            Kind::String => match fields::word(reader, &[("none", false), ("auto", true)])? {
                true => Choice::Auto,
                false => Choice::None,
            },
            Kind::Object => {
                let (mut names, mut name) = (Names::new(bounds.inner_fields_max), None);
                reader.object(|reader, key| {
                    names.add(&key)?;
                    match &*key {
                        "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
                        _ => reader.skip()?,
                    }
                    Ok(())
                })?;
                Choice::Named(name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")?)
            }
            kind => return Err(mismatch("a string or an object", kind)),
        });
        Ok(())
    }

    /// Shape of the calls in the answer: the older one if the request uses either field.
    pub(super) fn shape(&self) -> CallShape {
        let older = self.functions.is_some() || self.choice.is_some();
        if older { CallShape::Function } else { CallShape::Tools }
    }

    /// Moves the functions into `tools`, which must be empty, and resolves the choice against them. `has_choice` is
    /// set if the request has a `tool_choice` too, which is refused.
    pub(super) fn resolve(self, tools: &mut Vec<Tool>, has_choice: bool) -> Result<ToolChoice, Fault> {
        if !tools.is_empty() {
            let field = if self.functions.is_some() { "functions" } else { "function_call" };
            return Err(Fault::invalid("not allowed with tools")).within(field);
        }
        if has_choice {
            return Err(Fault::invalid("not allowed with functions and function_call")).within("tool_choice");
        }
        *tools = self.functions.unwrap_or_default();
        let choice = match self.choice {
            Some(Choice::None) => ToolChoice::None,
            None if tools.is_empty() => ToolChoice::None,
            Some(_) if tools.is_empty() => {
                return Err(Fault::invalid("only allowed with functions")).within("function_call");
            }
            None | Some(Choice::Auto) => ToolChoice::Auto,
            Some(Choice::Named(name)) if !tools.iter().any(|tool| tool.name == name) => {
                let why = format!("no function is named \"{}\"", short(&name));
                return Err(Fault::invalid(why)).within("name").within("function_call");
            }
            Some(Choice::Named(name)) => ToolChoice::Named(name),
        };
        Ok(choice)
    }
}
