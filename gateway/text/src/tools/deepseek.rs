//! DeepSeek's formats, of special tokens around a name and a JSON object:
//!
//! ```text
//! V3, R1:  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME⏎```json⏎{…}⏎```<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>
//! V3.1:    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>
//! V3.2:    <｜DSML｜function_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">…
//! ```
//!
//! The first two are told apart by what follows the name's mark, so one reader takes both.

use super::{
    Calls, Format, Make, Signs, ToolFormat,
    frame::{Frame, Head, JsonArguments},
    grammar::{Begin, Shape},
    marks::{Unread, in_name, literal, optional, until},
    xml::{Elements, Key, Written, XmlArguments, parameters_grammar},
};

pub(super) static FORMAT_32: Format = Format {
    format: ToolFormat::DeepSeekV32,
    names: &["deepseek_v32", "deepseekv32"],
    shown_by: dsml_shown_by,
    marks: &DSML_MARKS,
    make: Make::Framed(&DSML_FRAME),
    calls: Calls::Shape(&DSML_SHAPE),
};

pub(super) static FORMAT_3: Format = Format {
    format: ToolFormat::DeepSeekV3,
    names: &["deepseek_v3", "deepseekv3"],
    shown_by: v3_shown_by,
    marks: &MARKS,
    make: Make::Framed(&FRAME),
    calls: Calls::Shape(&V3_SHAPE),
};

pub(super) static FORMAT_31: Format = Format {
    format: ToolFormat::DeepSeekV31,
    names: &["deepseek_v31", "deepseekv31"],
    shown_by: v31_shown_by,
    marks: &MARKS,
    make: Make::Framed(&FRAME),
    calls: Calls::Shape(&V31_SHAPE),
};

pub(super) const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
pub(super) const CALLS_END: &str = "<｜tool▁calls▁end｜>";
pub(super) const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
pub(super) const MARKS: [&str; 5] = [CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR];

pub(super) static FRAME: Frame = Frame {
    opens: &[CALLS_BEGIN, CALL_BEGIN],
    head,
    arguments: JsonArguments::boxed,
    drops: &["```", CALL_END],
    nexts: &[CALL_BEGIN],
    ends: &[CALLS_END],
    ..Frame::NONE
};

pub(super) fn v3_shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(CALL_BEGIN) && signs.template.contains("```json")
}

pub(super) fn v31_shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(CALL_BEGIN)
}

fn head(text: &str, _next: bool) -> Result<Head, Unread> {
    let text = optional(text.trim_start(), CALL_BEGIN)?;
    let (first, text) = until(text, SEPARATOR, in_name)?;
    let object = |rest: &str| if rest.starts_with('{') { Some(rest.len()) } else { None };
    if let Some(left) = object(text.trim_start()) {
        return Ok(Head::named(first, left));
    }
    let (name, text) = until(text.trim_start(), "\n", in_name)?;
    let text = literal(text, "```json")?.trim_start();
    match object(text) {
        Some(left) => Ok(Head::named(name, left)),
        None if text.is_empty() => Err(Unread::More),
        None => Err(Unread::Bad),
    }
}

pub(super) const DSML_OPEN: &str = "<｜DSML｜function_calls>";
pub(super) const DSML_CLOSE: &str = "</｜DSML｜function_calls>";
const DSML_INVOKE: &str = "<｜DSML｜invoke name=\"";
const DSML_INVOKE_END: &str = "</｜DSML｜invoke>";
/// Part of the marks that is a special token of its own.
pub(super) const DSML_MARKS: [&str; 1] = ["｜DSML｜"];

pub(super) static DSML_FRAME: Frame = Frame {
    opens: &[DSML_OPEN],
    head: dsml_head,
    arguments: |name, tools| XmlArguments::boxed(&DSML, name, tools),
    items: &[DSML_INVOKE],
    ends: &[DSML_CLOSE],
    ..Frame::NONE
};

static DSML: Elements = Elements {
    opens: &["<｜DSML｜parameter name=\"", DSML_INVOKE_END],
    close: DSML_INVOKE_END,
    key: dsml_key,
    value_close: &["</｜DSML｜parameter>"],
    lines: false,
};

pub(super) fn dsml_shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains("｜DSML｜")
}

fn dsml_head(text: &str, _next: bool) -> Result<Head, Unread> {
    let (name, rest) = until(literal(text.trim_start(), DSML_INVOKE)?, "\">", in_name)?;
    Ok(Head::named(name, rest.len()))
}

fn dsml_key(text: &str) -> Result<Key<'_>, Unread> {
    let (name, rest) = until(text, "\" string=\"", |c| c != '\n')?;
    match rest {
        "true\">" => Ok(Key { name, string: Some(true) }),
        "false\">" => Ok(Key { name, string: Some(false) }),
        _ if "true\">".starts_with(rest) || "false\">".starts_with(rest) => Err(Unread::More),
        _ => Err(Unread::Bad),
    }
}

pub(super) const V3_SHAPE: Shape = Shape {
    begin: Begin::Mark(CALLS_BEGIN),
    first: CALL_BEGIN,
    next: "\n<｜tool▁call▁begin｜>",
    close: CALLS_END,
    call: |lark, tool| {
        let arguments = lark.arguments(tool);
        let open = lark.literal(&format!("function{SEPARATOR}{}\n```json\n", tool.name));
        Some(format!("{open} {arguments} {}", lark.literal("\n```<｜tool▁call▁end｜>")))
    },
};

pub(super) const V31_SHAPE: Shape = Shape {
    next: CALL_BEGIN,
    call: |lark, tool| {
        let arguments = lark.arguments(tool);
        let open = lark.literal(&format!("{}{SEPARATOR}", tool.name));
        Some(format!("{open} {arguments} {}", lark.literal(CALL_END)))
    },
    ..V3_SHAPE
};

pub(super) const DSML_SHAPE: Shape = Shape {
    begin: Begin::Mark(DSML_OPEN),
    first: "\n",
    next: "",
    close: DSML_CLOSE,
    call: |lark, tool| {
        let parameters = parameters_grammar(lark, tool, &DSML_WRITTEN)?;
        let open = lark.literal(&format!("{DSML_INVOKE}{}\">\n", tool.name));
        Some(format!("{open} {parameters} {}", lark.literal("</｜DSML｜invoke>\n")))
    },
};

const DSML_WRITTEN: Written = Written {
    open: "<｜DSML｜parameter name=\"",
    string: "\" string=\"true\">",
    json: "\" string=\"false\">",
    line: "",
    close: "</｜DSML｜parameter>",
    after: "\n",
};

#[cfg(test)]
mod tests {
    use super::super::{
        ToolFormat::{DeepSeekV3, DeepSeekV31, DeepSeekV32},
        tests::{check, incomplete},
    };

    #[test]
    fn calls_of_each_version() {
        check(
            DeepSeekV3,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜>\n\
             <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            &[("get_weather", r#"{"city": "Paris"}"#), ("f", "{}")],
        );
        check(
            DeepSeekV31,
            "Let me see.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}\
             <｜tool▁call▁end｜><｜tool▁calls▁end｜> ",
            "Let me see.",
            &[("f", r#"{"a": 1}"#), ("g", "{}")],
        );
        check(
            DeepSeekV32,
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">5\n</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"n\" string=\"false\">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            "",
            &[("f", r#"{"a":"5\n","n":[1]}"#)],
        );
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
            "<｜tool▁calls▁begin｜>a b<｜tool▁sep｜>{}",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[]<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```python\n",
        ] {
            check(DeepSeekV3, text, text, &[]);
        }
        check(
            DeepSeekV31,
            "<｜tool▁calls▁begin｜>oops <｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜> so",
            "<｜tool▁calls▁begin｜>oops so",
            &[("f", "{}")],
        );
        incomplete(DeepSeekV31, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": x}", "x}", ("f", "{\"a\": "));
    }
}
