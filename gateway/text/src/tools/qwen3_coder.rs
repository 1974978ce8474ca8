//! Qwen3-Coder's format, also of Qwen3.5:
//! `<tool_call>⏎<function=NAME>⏎<parameter=KEY>⏎VALUE⏎</parameter>⏎</function>⏎</tool_call>`
//!
//! Seed-OSS has it with other outer marks, and with no line breaks around a value: those there are the value's own.

use super::{
    Calls, Format, Make, Signs, ToolFormat,
    frame::{Frame, Head},
    grammar::{Begin, Shape, quoted},
    marks::{Unread, in_name, literal, until},
    xml::{Elements, Key, Written, XmlArguments, parameters_grammar},
};

pub(super) static SEED_FORMAT: Format = Format {
    format: ToolFormat::SeedOss,
    names: &["seed_oss"],
    shown_by: seed_shown_by,
    marks: &SEED_MARKS,
    make: Make::Framed(&SEED_FRAME),
    calls: Calls::Shape(&SEED_SHAPE),
};

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::Qwen3Coder,
    names: &["qwen3_coder", "qwen3_xml", "mimo"],
    shown_by,
    marks: &MARKS,
    make: Make::Framed(&FRAME),
    calls: Calls::Shape(&SHAPE),
};

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";
pub(super) const SEED_OPEN: &str = "<seed:tool_call>";
pub(super) const SEED_CLOSE: &str = "</seed:tool_call>";
pub(super) const MARKS: [&str; 2] = [OPEN, CLOSE];
pub(super) const SEED_MARKS: [&str; 2] = [SEED_OPEN, SEED_CLOSE];
const FUNCTION: &str = "<function=";
const FUNCTION_CLOSE: &str = "</function>";

pub(super) static FRAME: Frame = Frame {
    opens: &[OPEN],
    head,
    arguments: |name, tools| XmlArguments::boxed(&ELEMENTS, name, tools),
    items: &[FUNCTION],
    ends: &[CLOSE],
    ..Frame::NONE
};

pub(super) static SEED_FRAME: Frame = Frame {
    opens: &[SEED_OPEN],
    arguments: |name, tools| XmlArguments::boxed(&SEED_ELEMENTS, name, tools),
    ends: &[SEED_CLOSE],
    ..FRAME
};

static ELEMENTS: Elements = Elements { lines: true, ..SEED_ELEMENTS };

static SEED_ELEMENTS: Elements = Elements {
    opens: &["<parameter=", FUNCTION_CLOSE],
    close: FUNCTION_CLOSE,
    key,
    value_close: &["</parameter>"],
    lines: false,
};

pub(super) fn shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(FUNCTION) && signs.template.contains(OPEN)
}

pub(super) fn seed_shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(FUNCTION) && signs.template.contains("seed:tool_call>")
}

fn head(text: &str, _next: bool) -> Result<Head, Unread> {
    let (name, rest) = until(literal(text.trim_start(), FUNCTION)?, ">", in_name)?;
    Ok(Head::named(name, rest.len()))
}

fn key(text: &str) -> Result<Key<'_>, Unread> {
    let (name, _) = until(text, ">", |c| c != '\n')?;
    Ok(Key { name, string: None })
}

pub(super) const SHAPE: Shape = Shape {
    begin: Begin::Mark(OPEN),
    first: "\n",
    next: "\n<tool_call>\n",
    close: "",
    call: |lark, tool| {
        let parameters = parameters_grammar(lark, tool, &WRITTEN)?;
        let close = lark.literal("</function>\n</tool_call>");
        Some(format!("{} {parameters} {close}", quoted(&format!("<function={}>\n", tool.name))))
    },
};

pub(super) const SEED_SHAPE: Shape = Shape {
    begin: Begin::Mark(SEED_OPEN),
    next: "\n<seed:tool_call>\n",
    call: |lark, tool| {
        let parameters = parameters_grammar(lark, tool, &SEED_WRITTEN)?;
        let close = lark.literal("</function>\n</seed:tool_call>");
        Some(format!("{} {parameters} {close}", quoted(&format!("<function={}>\n", tool.name))))
    },
    ..SHAPE
};

const WRITTEN: Written =
    Written { open: "<parameter=", string: ">\n", json: ">\n", line: "\n", close: "</parameter>", after: "\n" };
const SEED_WRITTEN: Written = Written { string: ">", json: ">", line: "", ..WRITTEN };

#[cfg(test)]
mod tests {
    use super::super::{
        ToolFormat::{Qwen3Coder, SeedOss},
        tests::{check, check_typed, incomplete},
    };

    #[test]
    fn calls_with_typed_values() {
        check(
            Qwen3Coder,
            "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "Sure.",
            &[("get_weather", r#"{"city":"Paris","days":3}"#)],
        );
        check(
            SeedOss,
            "<seed:tool_call><function=f></function><function=g><parameter=a>x</parameter></function></seed:tool_call>",
            "",
            &[("f", "{}"), ("g", r#"{"a":"x"}"#)],
        );
        check(
            SeedOss,
            "<seed:tool_call><function=f><parameter=a>\n\nx\n</parameter></function></seed:tool_call>",
            "",
            &[("f", r#"{"a":"\n\nx\n"}"#)],
        );
        check_typed(
            Qwen3Coder,
            r#"{"properties": {"s": {"type": "string"}, "b": {"type": "boolean"}, "o": {"type": "object"}, "u": {"type": ["string", "null"]}}}"#,
            "<tool_call><function=f><parameter=s>\n\n 12\n</p\n\n</parameter><parameter=b>True</parameter><parameter=o>{'a': [1]}</parameter>\
             <parameter=u>null</parameter></function></tool_call>",
            r#"{"s":"\n 12\n</p\n","b":true,"o":{"a":[1]},"u":null}"#,
        );
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "<tool_call>",
            "<tool_call>\n{\"name\": \"f\"}",
            "<tool_call><function=>",
            "<tool_call><function=a b>",
            "<function=f>",
        ] {
            check(Qwen3Coder, text, text, &[]);
        }
        check(Qwen3Coder, "<tool_call><tool_call><function=f></function> ok", "<tool_call> ok", &[("f", "{}")]);
        incomplete(Qwen3Coder, "<tool_call><function=f>\noops", "\noops", ("f", "{"));
    }
}
