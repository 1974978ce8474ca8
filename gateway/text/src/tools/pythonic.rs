//! Calls written as Python: `[f(a=1, b="x"), g()]` (Llama 4, Llama 3.2 and others), fenced as `tool_code` (Gemma 3), or
//! one a line between `<function_calls>` marks (OLMo 3).
//!
//! Brackets are ordinary text, too. So the bare form counts at the beginning of an answer only, and only with a name
//! of the request's tools.

use super::{
    CallableTool, Calls, Format, Make, Signs, ToolFormat,
    frame::{Frame, Head},
    grammar::{ANY_KEY, Begin, Keywords, Lark, Parameters, Shape, parameters, quoted},
    loose::{Dialect, LooseArguments},
    marks::{Unread, in_name, optional, until},
};

pub(super) static OLMO_FORMAT: Format = Format {
    format: ToolFormat::Olmo3,
    names: &["olmo3"],
    shown_by: olmo_shown_by,
    marks: &OLMO_MARKS,
    make: Make::Framed(&OLMO),
    calls: Calls::Shape(&OLMO_SHAPE),
};

pub(super) static TOOL_CODE_FORMAT: Format = Format {
    format: ToolFormat::ToolCode,
    names: &["tool_code", "gemma3"],
    shown_by: tool_code_shown_by,
    marks: &[],
    make: Make::Framed(&TOOL_CODE),
    calls: Calls::Shape(&TOOL_CODE_SHAPE),
};

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::Pythonic,
    names: &["pythonic", "llama4_pythonic", "llama4"],
    shown_by,
    marks: &MARKS,
    make: Make::Framed(&FRAME),
    calls: Calls::Shape(&SHAPE),
};

pub(super) const PYTHON_START: &str = "<|python_start|>";
pub(super) const PYTHON_END: &str = "<|python_end|>";
pub(super) const MARKS: [&str; 2] = [PYTHON_START, PYTHON_END];
pub(super) const FENCE: &str = "```tool_code";
pub(super) const FENCE_CLOSE: &str = "```";
pub(super) const OLMO_OPEN: &str = "<function_calls>";
pub(super) const OLMO_CLOSE: &str = "</function_calls>";
pub(super) const OLMO_MARKS: [&str; 2] = [OLMO_OPEN, OLMO_CLOSE];

pub(super) static FRAME: Frame = Frame {
    opens: &[PYTHON_START],
    begins: &["[", PYTHON_START],
    head,
    arguments: |name, tools| Box::new(LooseArguments::new(Dialect::Python, name, tools)),
    drops: &["]", PYTHON_END],
    nexts: &[","],
    known_names: true,
    ..Frame::NONE
};

pub(super) static TOOL_CODE: Frame =
    Frame { opens: &[FENCE], begins: &[], drops: &["]", ")", ";"], ends: &[FENCE_CLOSE], bare: true, ..FRAME };

pub(super) static OLMO: Frame = Frame {
    opens: &[OLMO_OPEN],
    begins: &[],
    drops: &["]"],
    ends: &[OLMO_CLOSE],
    bare: true,
    known_names: false,
    ..FRAME
};

pub(super) fn shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains("[func_name1(")
}

pub(super) fn tool_code_shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(FENCE)
}

pub(super) fn olmo_shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(OLMO_OPEN) && !signs.template.contains("<invoke")
}

fn head(text: &str, next: bool) -> Result<Head, Unread> {
    let text = text.trim_start();
    let text = if next { text } else { optional(text, "[")?.trim_start() };
    let text = optional(text, "print(")?;
    if !text.starts_with(|c: char| c.is_alphabetic() || c == '_') {
        return Err(if text.is_empty() { Unread::More } else { Unread::Bad });
    }
    let (name, rest) = until(text, "(", in_name)?;
    Ok(Head::named(name, rest.len()))
}

pub(super) const SHAPE: Shape =
    Shape { begin: Begin::Answer("[", r"/\s*[^\[\s](?s:.*)/"), first: "", next: ", ", close: "]", call };
pub(super) const TOOL_CODE_SHAPE: Shape =
    Shape { begin: Begin::Mark(FENCE), first: "\n", next: "\n", close: "\n```", ..SHAPE };
pub(super) const OLMO_SHAPE: Shape = Shape { begin: Begin::Mark(OLMO_OPEN), next: "\n", close: OLMO_CLOSE, ..SHAPE };

/// A call with keyword arguments. Their values are JSON, whose strings and numbers are Python's, too; a value that is
/// only true or false is written as Python does.
fn call(lark: &mut Lark<'_>, tool: &CallableTool) -> Option<String> {
    let arguments = match parameters(tool)? {
        Parameters::Listed(listed) => {
            let mut members = Vec::new();
            for (name, part, required) in listed {
                let is_plain = |all: Keywords<'_>| {
                    let is_open = !all.contains_key("enum") && !all.contains_key("const");
                    is_open && all.get("type").is_some_and(|kind| *kind == "boolean")
                };
                let value = match !lark.is_full() && part.keywords().is_some_and(is_plain) {
                    true => r#"("True" | "False")"#.to_owned(),
                    false => lark.part(part, tool.strict),
                };
                members.push((lark.rule(&format!("{} {value}", quoted(&format!("{name}=")))), required));
            }
            lark.members(&members, ", ")
        }
        Parameters::Any(part) => {
            let (key, value) = (lark.terminal(ANY_KEY), lark.part(part, tool.strict));
            let one = lark.rule(&format!("{key} \"=\" {value}"));
            format!("({one} (\", \" {one})*)?")
        }
    };
    Some(format!("{} {arguments} \")\"", quoted(&format!("{}(", tool.name))))
}

#[cfg(test)]
mod tests {
    use super::super::{
        ToolFormat::{Olmo3, Pythonic, ToolCode},
        tests::{check, check_typed, incomplete},
    };

    #[test]
    fn values_become_json() {
        check(
            Pythonic,
            "[get_weather(city='Paris', days=3), f()]",
            "",
            &[("get_weather", r#"{"city":"Paris","days":3}"#), ("f", "{}")],
        );
        check(
            Pythonic,
            "<|python_start|>[f(a=[1, -2.5, .5, (True, None,)], b={'k': \"v\", \"w\": {}}, c = \"it's \\\"x\\\"\\n\\u00e9\\x41\\ud83d\\ude00\",)]<|python_end|>",
            "",
            &[("f", r#"{"a":[1,-2.5,0.5,[true,null]],"b":{"k":"v","w":{}},"c":"it's \"x\"\néA😀"}"#)],
        );
        check_typed(
            Pythonic,
            r#"{"properties": {"a": {"type": "string"}, "b": {}, "c": {}}}"#,
            "[f('x', True, 5)]",
            r#"{"a":"x","b":true,"c":5}"#,
        );
        check(
            ToolCode,
            "```tool_code\nf(a=1)\nprint(g(b=\"x\"))\n```\n",
            "",
            &[("f", r#"{"a":1}"#), ("g", r#"{"b":"x"}"#)],
        );
        check(
            Olmo3,
            "Hm <function_calls>f(a=1)\ng(b=2)</function_calls>",
            "Hm",
            &[("f", r#"{"a":1}"#), ("g", r#"{"b":2}"#)],
        );
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "[1] see f(x)",
            "[link](http://x)",
            "see [f(a=1)]",
            "[unknown(a=1)]",
            "[f",
            "[",
            " [ ]",
            "``` tool_code",
            "<|python_start[f(a=1)]",
            "<|python_start|>x = 1",
        ] {
            check_typed(Pythonic, "{}", text, "");
        }
        incomplete(Pythonic, "[f(a=1, b=oops)]", "oops)]", ("f", "{\"a\":1,\"b\":"));
        incomplete(Pythonic, "[f(a='x", "", ("f", "{\"a\":\"x"));
        incomplete(Pythonic, "[f(a=1, bc", ", bc", ("f", "{\"a\":1"));
    }
}
