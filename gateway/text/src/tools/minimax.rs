//! MiniMax's formats. M2: `<minimax:tool_call>⏎<invoke name="NAME">⏎<parameter name="KEY">VALUE</parameter>⏎</invoke>⏎
//! </minimax:tool_call>`. M1: `<tool_calls>` with one JSON object a line, as in [`super::block`].

use super::{
    Calls, Format, Make, Signs, ToolFormat,
    frame::{Frame, Head},
    grammar::{Begin, Shape},
    marks::{Unread, in_name, literal, until},
    xml::{Elements, Key, Written, XmlArguments, parameters_grammar},
};

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::MiniMaxM2,
    names: &["minimax_m2", "minimax-m2"],
    shown_by,
    marks: &MARKS,
    make: Make::Framed(&FRAME),
    calls: Calls::Shape(&SHAPE),
};

pub(super) const OPEN: &str = "<minimax:tool_call>";
pub(super) const CLOSE: &str = "</minimax:tool_call>";
pub(super) const MARKS: [&str; 2] = [OPEN, CLOSE];
const INVOKE: &str = "<invoke name=\"";
const INVOKE_CLOSE: &str = "</invoke>";

pub(super) static FRAME: Frame = Frame {
    opens: &[OPEN],
    head,
    arguments: |name, tools| XmlArguments::boxed(&ELEMENTS, name, tools),
    items: &[INVOKE],
    ends: &[CLOSE],
    ..Frame::NONE
};

static ELEMENTS: Elements = Elements {
    opens: &["<parameter name=\"", INVOKE_CLOSE],
    close: INVOKE_CLOSE,
    key,
    value_close: &["</parameter>"],
    lines: false,
};

pub(super) fn shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains("minimax:tool_call>")
}

fn head(text: &str, _next: bool) -> Result<Head, Unread> {
    let (name, rest) = until(literal(text.trim_start(), INVOKE)?, "\">", in_name)?;
    Ok(Head::named(name, rest.len()))
}

fn key(text: &str) -> Result<Key<'_>, Unread> {
    let (name, _) = until(text, "\">", |c| c != '\n')?;
    Ok(Key { name, string: None })
}

pub(super) const SHAPE: Shape = Shape {
    begin: Begin::Mark(OPEN),
    first: "\n",
    next: "",
    close: CLOSE,
    call: |lark, tool| {
        let parameters = parameters_grammar(lark, tool, &WRITTEN)?;
        let open = lark.literal(&format!("{INVOKE}{}\">\n", tool.name));
        Some(format!("{open} {parameters} {}", lark.literal("</invoke>\n")))
    },
};

const WRITTEN: Written =
    Written { open: "<parameter name=\"", string: "\">", json: "\">", line: "", close: "</parameter>", after: "\n" };

#[cfg(test)]
mod tests {
    use super::super::{ToolFormat::MiniMaxM2, tests::check};

    #[test]
    fn several_calls_in_one_block() {
        check(
            MiniMaxM2,
            "Hm.\n\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"city\">San Francisco, CA</parameter>\n<parameter name=\"n\">[1]</parameter>\n</invoke>\n\
             <invoke name=\"g\">\n</invoke>\n</minimax:tool_call>\n",
            "Hm.",
            &[("f", r#"{"city":"San Francisco, CA","n":[1]}"#), ("g", "{}")],
        );
        let text = "<minimax:tool_call>\n<invoke name=f>";
        check(MiniMaxM2, text, text, &[]);
    }
}
