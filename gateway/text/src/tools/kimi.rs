//! Kimi K2's format: a section of special tokens, where each call's id carries the function's name:
//! `<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…`
//!
//! The id goes to the client as it is, since the template writes it back into the next prompt.

use super::{
    Calls, Format, Make, Signs, ToolFormat,
    frame::{Frame, Head, JsonArguments},
    grammar::{Begin, Shape},
    marks::{Unread, in_name, optional, until},
};

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::KimiK2,
    names: &["kimi_k2"],
    shown_by,
    marks: &MARKS,
    make: Make::Framed(&FRAME),
    calls: Calls::Shape(&SHAPE),
};

pub(super) const SECTION_BEGIN: &str = "<|tool_calls_section_begin|>";
pub(super) const SECTION_END: &str = "<|tool_calls_section_end|>";
pub(super) const CALL_BEGIN: &str = "<|tool_call_begin|>";
pub(super) const CALL_END: &str = "<|tool_call_end|>";
pub(super) const ARGUMENTS: &str = "<|tool_call_argument_begin|>";
pub(super) const MARKS: [&str; 5] = [SECTION_BEGIN, SECTION_END, CALL_BEGIN, CALL_END, ARGUMENTS];

pub(super) static FRAME: Frame = Frame {
    opens: &[SECTION_BEGIN, CALL_BEGIN],
    head,
    arguments: JsonArguments::boxed,
    drops: &[CALL_END],
    nexts: &[CALL_BEGIN],
    ends: &[SECTION_END],
    ..Frame::NONE
};

pub(super) fn shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(SECTION_BEGIN) || signs.template.contains(ARGUMENTS)
}

fn head(text: &str, _next: bool) -> Result<Head, Unread> {
    let text = optional(text.trim_start(), CALL_BEGIN)?.trim_start();
    let (id, rest) = until(text, ARGUMENTS, |c| in_name(c) || c.is_ascii_whitespace())?;
    let rest = rest.trim_start();
    if rest.is_empty() {
        return Err(Unread::More);
    }
    let id = id.trim_end();
    if !rest.starts_with('{') || !id.chars().all(in_name) {
        return Err(Unread::Bad);
    }
    let name = id.strip_prefix("functions.").unwrap_or(id);
    Ok(match name.rsplit_once(':') {
        Some((name, index)) if !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit()) => {
            Head::Named { name: name.to_owned(), id: Some(id.to_owned()), left: rest.len() }
        }
        _ => Head::named(name, rest.len()),
    })
}

pub(super) const SHAPE: Shape = Shape {
    begin: Begin::Mark(SECTION_BEGIN),
    first: CALL_BEGIN,
    next: CALL_BEGIN,
    close: SECTION_END,
    call: |lark, tool| {
        let arguments = lark.arguments(tool);
        let open = lark.literal(&format!("functions.{}:", tool.name));
        let index = lark.terminal("/(0|[1-9][0-9]{0,3})/");
        Some(format!("{open} {index} {} {arguments} {}", lark.literal(ARGUMENTS), lark.literal(CALL_END)))
    },
};

#[cfg(test)]
mod tests {
    use super::super::{ToolFormat::KimiK2, tests::check};

    #[test]
    fn calls_of_a_section() {
        check(
            KimiK2,
            "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Beijing\"}\
             <|tool_call_end|><|tool_call_begin|> functions.a.b:12 <|tool_call_argument_begin|> {}<|tool_call_end|><|tool_calls_section_end|>",
            "I look.",
            &[("get_weather", r#"{"city": "Beijing"}"#), ("a.b", "{}")],
        );
        check(KimiK2, "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", "", &[("f", "{}")]);
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[1]",
            "<|tool_call_begin|>two words<|tool_call_argument_begin|>{}",
        ] {
            check(KimiK2, text, text, &[]);
        }
    }
}
