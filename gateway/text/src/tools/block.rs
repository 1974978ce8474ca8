//! Formats with a mark in front of JSON objects of a name and arguments, in an array or one after the other:
//!
//! ```text
//! Granite 3:      <|tool_call|>[{"name": …, "arguments": …}, …]         also behind <tool_call>
//! Granite 20B:    <function_call> {"name": …, "arguments": …}
//! MiniMax-M1:     <tool_calls>⏎{"name": …, "arguments": …}⏎</tool_calls>, and arrays (Jamba, Hunyuan)
//! Phi-4 mini:     functools[{"name": …, "arguments": …}, …]
//! ```

use super::{
    Signs,
    frame::{Frame, Head},
    marks::{Unread, optional},
};

pub(super) const GRANITE_OPEN: &str = "<|tool_call|>";
pub(super) const GRANITE_MARKS: [&str; 3] = [GRANITE_OPEN, "<tool_call>", "</tool_call>"];
pub(super) const FUNCTION_OPEN: &str = "<function_call>";
pub(super) const FUNCTION_MARKS: [&str; 1] = [FUNCTION_OPEN];
pub(super) const CALLS_OPEN: &str = "<tool_calls>";
pub(super) const CALLS_CLOSE: &str = "</tool_calls>";
pub(super) const CALLS_MARKS: [&str; 2] = [CALLS_OPEN, CALLS_CLOSE];
pub(super) const PHI_OPEN: &str = "functools[";

const BLOCK: Frame = Frame { head, drops: &["]"], nexts: &[","], items: &["{"], ..Frame::NONE };

pub(super) static GRANITE: Frame = Frame { opens: &[GRANITE_OPEN, "<tool_call>"], ends: &["</tool_call>"], ..BLOCK };
pub(super) static FUNCTION_CALL: Frame = Frame { opens: &[FUNCTION_OPEN], ..BLOCK };
pub(super) static TOOL_CALLS: Frame = Frame { opens: &[CALLS_OPEN], ends: &[CALLS_CLOSE], ..BLOCK };
pub(super) static PHI: Frame = Frame { opens: &[PHI_OPEN], ..BLOCK };

pub(super) fn granite_shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(GRANITE_OPEN)
}

pub(super) fn function_call_shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(FUNCTION_OPEN)
}

pub(super) fn tool_calls_shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains(CALLS_OPEN) && !signs.template.contains("<invoke")
}

pub(super) fn phi_shown_by(signs: &Signs<'_>) -> bool {
    signs.template.contains("functools[")
}

fn head(text: &str, next: bool) -> Result<Head, Unread> {
    let text = text.trim_start();
    let text = if next { text } else { optional(text, "[")?.trim_start() };
    match text.chars().next() {
        None => Err(Unread::More),
        Some('{') => Ok(Head::Object { left: text.len() }),
        Some(_) => Err(Unread::Bad),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        ToolFormat::{Granite, Granite20b, MiniMaxM1, Phi4Mini},
        tests::{check, incomplete},
    };

    #[test]
    fn arrays_and_sequences() {
        let (f, g) = (r#"{"name": "f", "arguments": {"a": 1}}"#, r#"{"name": "g", "arguments": {}}"#);
        let both = [("f", r#"{"a": 1}"#), ("g", "{}")];
        check(Granite, &format!("<|tool_call|>[{f}, {g}]"), "", &both);
        check(Granite, &format!("<tool_call>[{f}, {g}]</tool_call>\n"), "", &both);
        check(Granite20b, &format!("<function_call> {f}\n<function_call> {g}"), "", &both);
        check(MiniMaxM1, &format!("So:\n<tool_calls>\n{f}\n{g}\n</tool_calls>"), "So:", &both);
        check(MiniMaxM1, &format!("<tool_calls>[{f}, {g}]</tool_calls>"), "", &both);
        check(Phi4Mini, &format!("functools[{f}, {g}] done"), " done", &both);
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in
            ["<|tool_call|>", "<|tool_call|>[]", "<|tool_call|>[ {\"x\": 1}]", "<tool_calls> text", "functools.partial"]
        {
            check(Granite, text, text, &[]);
        }
        for text in ["<tool_calls>\n</tool_calls>", "<tool_calls>{\"name\": 1"] {
            check(MiniMaxM1, text, text, &[]);
        }
        incomplete(Granite, "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"a", "", ("f", "{\"a"));
        let one = r#"<|tool_call|>[{"name": "f", "arguments": {}}, oops]"#;
        check(Granite, one, ", oops]", &[("f", "{}")]);
    }
}
