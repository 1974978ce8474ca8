//! FunctionGemma's and Gemma 4's formats: `call:NAME{key:value,…}` between marks, with bare keys and with strings
//! between two equal marks (`<escape>`, `<|"|>`).

use std::collections::HashMap;

use penstock_grammar::ANNOTATIONS;
use serde_json::Value;

use super::{
    CallableTool, Calls, Format, Make, Signs, ToolFormat,
    callable::{Kinds, resolved},
    frame::{Frame, Head},
    grammar::{ANY_KEY, Begin, Lark, Parameters, Part, Shape, members, parameters, quoted, string_pattern},
    loose::{Dialect, LooseArguments},
    marks::{Unread, in_name, literal, until},
};

pub(super) static FORMAT_4: Format = Format {
    format: ToolFormat::Gemma4,
    names: &["gemma4"],
    shown_by: shown_by_4,
    marks: &MARKS_4,
    make: Make::Framed(&FRAME_4),
    calls: Calls::Shape(&SHAPE_4),
};

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::FunctionGemma,
    names: &["functiongemma"],
    shown_by,
    marks: &MARKS,
    make: Make::Framed(&FRAME),
    calls: Calls::Shape(&SHAPE),
};

pub(super) const OPEN: &str = "<start_function_call>";
pub(super) const CLOSE: &str = "<end_function_call>";
pub(super) const QUOTE: &str = "<escape>";
pub(super) const MARKS: [&str; 3] = [OPEN, CLOSE, QUOTE];
pub(super) const OPEN_4: &str = "<|tool_call>";
pub(super) const CLOSE_4: &str = "<tool_call|>";
pub(super) const QUOTE_4: &str = "<|\"|>";
pub(super) const MARKS_4: [&str; 3] = [OPEN_4, CLOSE_4, QUOTE_4];

pub(super) static FRAME: Frame = Frame {
    opens: &[OPEN],
    head,
    arguments: |name, tools| Box::new(LooseArguments::new(Dialect::Gemma(&[QUOTE]), name, tools)),
    ends: &[CLOSE],
    ..Frame::NONE
};

pub(super) static FRAME_4: Frame = Frame {
    opens: &[OPEN_4],
    arguments: |name, tools| Box::new(LooseArguments::new(Dialect::Gemma(&[QUOTE_4]), name, tools)),
    ends: &[CLOSE_4],
    ..FRAME
};

pub(super) fn shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(OPEN)
}

pub(super) fn shown_by_4(signs: &Signs<'_>) -> bool {
    signs.template.contains(OPEN_4) && signs.template.contains(CLOSE_4)
}

fn head(text: &str, _next: bool) -> Result<Head, Unread> {
    let (name, rest) = until(literal(text.trim_start(), "call:")?, "{", in_name)?;
    Ok(Head::named(name, rest.len()))
}

pub(super) const SHAPE: Shape = Shape {
    begin: Begin::Mark(OPEN),
    first: "call:",
    next: "<start_function_call>call:",
    close: "",
    call: |lark, tool| call(lark, tool, QUOTE, CLOSE),
};
pub(super) const SHAPE_4: Shape = Shape {
    begin: Begin::Mark(OPEN_4),
    next: "<|tool_call>call:",
    call: |lark, tool| call(lark, tool, QUOTE_4, CLOSE_4),
    ..SHAPE
};

fn call(lark: &mut Lark<'_>, tool: &CallableTool, quote: &'static str, close: &str) -> Option<String> {
    let any = any_value(lark, quote);
    let mut writer = Writer { lark, strict: tool.strict, any, quote, rules: HashMap::new() };
    let arguments = writer.object(&parameters(tool)?, 0)?;
    Some(format!("{} {arguments} {}", quoted(&tool.name), lark.literal(close)))
}

/// Deepest nesting of a schema that rules follow; what is deeper takes any value.
const DEPTH_MAX: u8 = 32;

/// Writer of the rules of one tool's arguments.
struct Writer<'a, 'b> {
    lark: &'a mut Lark<'b>,
    strict: bool,
    /// Rule of any value.
    any: String,
    quote: &'static str,
    /// Rules of the schemas that references reach, by their addresses: a schema may refer to itself.
    rules: HashMap<*const Value, String>,
}

impl Writer<'_, '_> {
    fn object(&mut self, parameters: &Parameters<'_>, depth: u8) -> Option<String> {
        let members = match parameters {
            Parameters::Listed(listed) => {
                let mut members = Vec::new();
                for (name, part, required) in listed {
                    let value = self.value(*part, depth + 1)?;
                    let member = self.lark.rule(&format!("{} {value}", quoted(&format!("{name}:"))));
                    members.push((member, *required));
                }
                self.lark.members(&members, ",")
            }
            Parameters::Any(part) => {
                let (key, value) = (self.lark.terminal(ANY_KEY), self.value(*part, depth + 1)?);
                let one = self.lark.rule(&format!("{key} \":\" {value}"));
                format!("({one} (\",\" {one})*)?")
            }
        };
        Some(self.lark.rule(&format!("\"{{\" {members} \"}}\"")))
    }

    /// A value under a schema; `None` if a strict schema asks for more than rules can hold it to.
    fn value(&mut self, part: Part<'_>, depth: u8) -> Option<String> {
        if self.lark.is_full() {
            return Some(String::new());
        }
        let kinds = part.kinds();
        if depth > DEPTH_MAX {
            return self.anything();
        }
        if kinds == Kinds::STRING {
            return self.string(part);
        }
        if kinds.are_plain() {
            return Some(self.lark.part(part, self.strict));
        }
        let target = match part.target() {
            Some(target) => target,
            None if self.strict => return None,
            None => part.of(resolved(part.schema, part.whole)),
        };
        if std::ptr::eq(target.schema, part.schema) {
            return self.composed(part, depth);
        }
        let address = std::ptr::from_ref(target.schema);
        if let Some(rule) = self.rules.get(&address) {
            return Some(rule.clone());
        }
        let rule = self.lark.rule_name();
        self.rules.insert(address, rule.clone());
        let body = self.composed(target, depth + 1)?;
        self.lark.set_rule(&rule, &body);
        Some(rule)
    }

    /// A list, a map, or a value whose schema says nothing.
    fn composed(&mut self, part: Part<'_>, depth: u8) -> Option<String> {
        let schema = part.schema;
        match schema["type"].as_str() {
            Some("array") if schema.get("prefixItems").is_none() && schema.get("contains").is_none() => {
                let item = match schema.get("items") {
                    Some(items) => self.value(part.of(items), depth + 1)?,
                    None => self.any.clone(),
                };
                let item = self.lark.rule(&item);
                let (least, most) = (schema["minItems"].as_u64().unwrap_or(0), schema["maxItems"].as_u64());
                let items = match most {
                    Some(0) => String::new(),
                    _ => {
                        let more = most.map(|most| (most - 1).to_string()).unwrap_or_default();
                        let some = format!("{item} (\",\" {item}){{{},{more}}}", least.saturating_sub(1));
                        if least == 0 { format!("({some})?") } else { some }
                    }
                };
                Some(self.lark.rule(&format!("\"[\" {items} \"]\"")))
            }
            Some("object") => {
                let members = members(part, self.strict)?;
                self.object(&members, depth)
            }
            _ => match schema {
                Value::Object(schema) if !schema.keys().all(|key| ANNOTATIONS.contains(&key.as_str())) => {
                    self.anything()
                }
                _ => Some(self.any.clone()),
            },
        }
    }

    /// Any value where the schema need not be followed.
    fn anything(&self) -> Option<String> {
        (!self.strict).then(|| self.any.clone())
    }

    fn string(&mut self, part: Part<'_>) -> Option<String> {
        let mark = self.lark.literal(self.quote);
        match string_pattern(part, self.quote) {
            Ok(Some(pattern)) => Some(format!("{mark} {}", self.lark.pattern_until(&pattern, self.quote))),
            Err(()) if self.strict => None,
            Ok(None) | Err(()) => Some(format!("{mark} {}", self.lark.text_until(self.quote))),
        }
    }
}

/// Rule of any value: string, number, word, list or map.
fn any_value(lark: &mut Lark<'_>, quote: &str) -> String {
    let text = format!("{} {}", lark.literal(quote), lark.text_until(quote));
    let key = lark.terminal(ANY_KEY);
    let number = lark.terminal(r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?/");
    let name = lark.rule_name();
    let body = format!(
        "{text} | {number} | \"true\" | \"false\" | \"null\" | \"[\" ({name} (\",\" {name})*)? \"]\" | \"{{\" ({key} \":\" {name} (\",\" {key} \":\" {name})*)? \"}}\""
    );
    lark.set_rule(&name, &body);
    name
}

#[cfg(test)]
mod tests {
    use super::super::{
        ToolFormat::{FunctionGemma, Gemma4},
        tests::{check, check_typed, incomplete},
    };

    #[test]
    fn values_become_json() {
        check(
            FunctionGemma,
            "<start_function_call>call:get_weather{city:<escape>Paris, \"FR\"<escape>,days:3}<end_function_call>",
            "",
            &[("get_weather", r#"{"city":"Paris, \"FR\"","days":3}"#)],
        );
        check(
            Gemma4,
            "<|tool_call>call:f{a:[<|\"|>x<|\"|>,{b:true,c:null}],word:bare text, d: -1.5}<tool_call|><|tool_call>call:g{}<tool_call|>",
            "",
            &[("f", r#"{"a":["x",{"b":true,"c":null}],"word":"bare text","d":-1.5}"#), ("g", "{}")],
        );
        check_typed(
            FunctionGemma,
            r#"{"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}"#,
            "<start_function_call>call:f{n:<escape>5<escape>,s:7}<end_function_call>",
            r#"{"n":5,"s":"7"}"#,
        );
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "<start_function_call>",
            "<start_function_call>call:f",
            "<start_function_call>f{}",
            "<start_function_call>call:a b{}",
        ] {
            check(FunctionGemma, text, text, &[]);
        }
        incomplete(FunctionGemma, "<start_function_call>call:f{a:<escape>x<esc", "<esc", ("f", "{\"a\":\"x"));
        incomplete(FunctionGemma, "<start_function_call>call:f{a}", "a}", ("f", "{"));
    }
}
