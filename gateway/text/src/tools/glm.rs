//! GLM-4.5 to 4.7's format: `<tool_call>NAME` and for each parameter `<arg_key>KEY</arg_key>`,
//! `<arg_value>VALUE</arg_value>`, then `</tool_call>`, with or without line breaks in between.

use super::{
    Calls, Format, Make, Signs, ToolFormat,
    frame::{Frame, Head},
    grammar::{Begin, Shape, quoted},
    marks::{Unread, in_name, literal, until},
    xml::{Elements, Key, Written, XmlArguments, parameters_grammar},
};

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::Glm,
    names: &["glm", "glm45", "glm47", "glm4_moe"],
    shown_by,
    marks: &MARKS,
    make: Make::Framed(&FRAME),
    calls: Calls::Shape(&SHAPE),
};

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";
pub(super) const KEY: &str = "<arg_key>";
pub(super) const KEY_CLOSE: &str = "</arg_key>";
pub(super) const VALUE: &str = "<arg_value>";
pub(super) const VALUE_CLOSE: &str = "</arg_value>";
pub(super) const MARKS: [&str; 6] = [OPEN, CLOSE, KEY, KEY_CLOSE, VALUE, VALUE_CLOSE];

pub(super) static FRAME: Frame =
    Frame { opens: &[OPEN], head, arguments: |name, tools| XmlArguments::boxed(&ELEMENTS, name, tools), ..Frame::NONE };

static ELEMENTS: Elements =
    Elements { opens: &[KEY, CLOSE], close: CLOSE, key, value_close: &[VALUE_CLOSE], lines: false };

pub(super) fn shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(KEY)
}

fn head(text: &str, _next: bool) -> Result<Head, Unread> {
    let text = text.trim_start();
    let name_bytes = text.find(|c| !in_name(c)).unwrap_or(text.len());
    let (name, rest) = text.split_at(name_bytes);
    let rest = rest.trim_start();
    if rest.is_empty() {
        return Err(Unread::More);
    }
    let follows = [KEY, CLOSE].map(|mark| literal(rest, mark));
    if name.is_empty() {
        return Err(Unread::Bad);
    }
    if follows.iter().any(Result::is_ok) {
        Ok(Head::named(name, rest.len()))
    } else if follows.contains(&Err(Unread::More)) {
        Err(Unread::More)
    } else {
        Err(Unread::Bad)
    }
}

fn key(text: &str) -> Result<Key<'_>, Unread> {
    let (name, rest) = until(text, KEY_CLOSE, |c| c != '\n')?;
    literal(rest.trim_start(), VALUE)?;
    Ok(Key { name: name.trim(), string: None })
}

pub(super) const SHAPE: Shape = Shape {
    begin: Begin::Mark(OPEN),
    first: "",
    next: "\n<tool_call>",
    close: "",
    call: |lark, tool| {
        let parameters = parameters_grammar(lark, tool, &WRITTEN)?;
        Some(format!("{} {parameters} {}", quoted(&format!("{}\n", tool.name)), lark.literal(CLOSE)))
    },
};

const WRITTEN: Written = Written {
    open: KEY,
    string: "</arg_key>\n<arg_value>",
    json: "</arg_key>\n<arg_value>",
    line: "",
    close: VALUE_CLOSE,
    after: "\n",
};

#[cfg(test)]
mod tests {
    use super::super::{
        ToolFormat::Glm,
        tests::{check, check_typed, incomplete},
    };

    #[test]
    fn calls_with_and_without_line_breaks() {
        let city = "<arg_key>city</arg_key>\n<arg_value>Paris\n</arg_value>\n";
        check(
            Glm,
            &format!("\n<tool_call>get_weather\n{city}</tool_call>"),
            "",
            &[("get_weather", r#"{"city":"Paris\n"}"#)],
        );
        check(
            Glm,
            "Hm.\n<tool_call>f<arg_key>a</arg_key><arg_value>[1, 2]</arg_value><arg_key>b</arg_key><arg_value>x < y</arg_value></tool_call>\n<tool_call>g\n</tool_call>",
            "Hm.",
            &[("f", r#"{"a":[1, 2],"b":"x < y"}"#), ("g", "{}")],
        );
        check_typed(
            Glm,
            r#"{"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}"#,
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
            r#"{"s":"12","n":12}"#,
        );
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "<tool_call>",
            "<tool_call>f",
            "<tool_call>two words</tool_call>",
            "<tool_call>f\n<arg_kez>",
            "<tool_call></tool_call>",
        ] {
            check(Glm, text, text, &[]);
        }
        check(Glm, "<tool_call>a b <tool_call>f</tool_call>", "<tool_call>a b", &[("f", "{}")]);
        incomplete(
            Glm,
            "<tool_call>f<arg_key>a</arg_key><arg_value>[1",
            "<arg_key>a</arg_key><arg_value>[1",
            ("f", "{"),
        );
        incomplete(Glm, "<tool_call>f\n<arg_key>a</arg_key>oops", "<arg_key>a</arg_key>oops", ("f", "{"));
    }
}
