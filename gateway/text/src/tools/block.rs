//! Formats with a mark in front of JSON objects of a name and arguments, in an array or one after the other:
//!
//! ```text
//! Granite 3:      <|tool_call|>[{"name": …, "arguments": …}, …]         also behind <tool_call>
//! Granite 20B:    <function_call> {"name": …, "arguments": …}
//! MiniMax-M1:     <tool_calls>⏎{"name": …, "arguments": …}⏎</tool_calls>, and arrays (Jamba, Hunyuan)
//! Phi-4 mini:     functools[{"name": …, "arguments": …}, …]                 in vLLM's and SGLang's templates for the model
//!                 <|tool_call|>[{"name": …, "arguments": …}, …]<|/tool_call|>   in its own, and in llama.cpp's
//! ```

use super::{
    Calls, Format, Make, Signs, ToolFormat,
    frame::{Frame, Head},
    grammar::{Begin, Shape},
    marks::{Unread, optional},
};

pub(super) static GRANITE_FORMAT: Format = Format {
    format: ToolFormat::Granite,
    names: &["granite"],
    shown_by: granite_shown_by,
    marks: &GRANITE_MARKS,
    make: Make::Framed(&GRANITE),
    calls: Calls::Shape(&GRANITE_SHAPE),
};

pub(super) static FUNCTION_FORMAT: Format = Format {
    format: ToolFormat::Granite20b,
    names: &["granite_20b", "granite-20b-fc"],
    shown_by: function_call_shown_by,
    marks: &FUNCTION_MARKS,
    make: Make::Framed(&FUNCTION_CALL),
    calls: Calls::Shape(&FUNCTION_SHAPE),
};

pub(super) static CALLS_FORMAT: Format = Format {
    format: ToolFormat::MiniMaxM1,
    names: &["minimax", "minimax_m1", "jamba", "hunyuan_a13b"],
    shown_by: tool_calls_shown_by,
    marks: &CALLS_MARKS,
    make: Make::Framed(&TOOL_CALLS),
    calls: Calls::Shape(&CALLS_SHAPE),
};

pub(super) static PHI_FORMAT: Format = Format {
    format: ToolFormat::Phi4Mini,
    names: &["phi4_mini_json", "phi4_mini"],
    shown_by: phi_shown_by,
    marks: &[],
    make: Make::Framed(&PHI),
    calls: Calls::Shape(&PHI_SHAPE),
};

pub(super) static PHI_MARKED_FORMAT: Format = Format {
    format: ToolFormat::Phi4MiniMarked,
    names: &["phi4_mini_marked"],
    shown_by: phi_marked_shown_by,
    marks: &PHI_CALL_MARKS,
    make: Make::Framed(&PHI_MARKED),
    calls: Calls::Shape(&PHI_MARKED_SHAPE),
};

pub(super) const GRANITE_OPEN: &str = "<|tool_call|>";
pub(super) const GRANITE_MARKS: [&str; 3] = [GRANITE_OPEN, "<tool_call>", "</tool_call>"];
pub(super) const FUNCTION_OPEN: &str = "<function_call>";
pub(super) const FUNCTION_MARKS: [&str; 1] = [FUNCTION_OPEN];
pub(super) const CALLS_OPEN: &str = "<tool_calls>";
pub(super) const CALLS_CLOSE: &str = "</tool_calls>";
pub(super) const CALLS_MARKS: [&str; 2] = [CALLS_OPEN, CALLS_CLOSE];
pub(super) const PHI_OPEN: &str = "functools[";
/// Marks around calls of Phi-4 mini, tokens of the checkpoint.
pub(crate) const PHI_CALL_MARKS: [&str; 2] = [GRANITE_OPEN, "<|/tool_call|>"];

const BLOCK: Frame = Frame { head, drops: &["]"], nexts: &[","], items: &["{"], ..Frame::NONE };

pub(super) static GRANITE: Frame = Frame { opens: &[GRANITE_OPEN, "<tool_call>"], ends: &["</tool_call>"], ..BLOCK };
pub(super) static FUNCTION_CALL: Frame = Frame { opens: &[FUNCTION_OPEN], ..BLOCK };
pub(super) static TOOL_CALLS: Frame = Frame { opens: &[CALLS_OPEN], ends: &[CALLS_CLOSE], ..BLOCK };
pub(super) static PHI: Frame = Frame { opens: &[PHI_OPEN], ..BLOCK };
pub(super) static PHI_MARKED: Frame =
    Frame { opens: &[PHI_CALL_MARKS[0], PHI_OPEN], ends: &[PHI_CALL_MARKS[1]], ..BLOCK };

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

/// The checkpoint's own template has no mark of calls, only the mark of the tools that it takes from a message.
pub(super) fn phi_marked_shown_by(signs: &Signs<'_>) -> bool {
    let has = |mark| signs.template.contains(mark);
    !has(PHI_OPEN) && (has(PHI_CALL_MARKS[1]) || has("<|tool|>") && has("<|/tool|>"))
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

pub(super) const GRANITE_SHAPE: Shape = Shape {
    begin: Begin::Mark(GRANITE_OPEN),
    first: "[",
    next: ", ",
    close: "]",
    call: |lark, tool| Some(lark.object(tool, "arguments")),
};
pub(super) const FUNCTION_SHAPE: Shape =
    Shape { begin: Begin::Mark(FUNCTION_OPEN), first: " ", next: "\n<function_call> ", close: "", ..GRANITE_SHAPE };
pub(super) const CALLS_SHAPE: Shape =
    Shape { begin: Begin::Mark(CALLS_OPEN), first: "\n", next: "\n", close: "\n</tool_calls>", ..GRANITE_SHAPE };
pub(super) const PHI_SHAPE: Shape = Shape { begin: Begin::Mark(PHI_OPEN), first: "", ..GRANITE_SHAPE };
pub(super) const PHI_MARKED_SHAPE: Shape = Shape { close: "]<|/tool_call|>", ..GRANITE_SHAPE };

#[cfg(test)]
mod tests {
    use super::super::{
        ToolFormat::{Granite, Granite20b, MiniMaxM1, Phi4Mini, Phi4MiniMarked},
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
        check(Phi4MiniMarked, &format!("I look.<|tool_call|>[{f}, {g}]<|/tool_call|>"), "I look.", &both);
        check(Phi4MiniMarked, &format!("<|tool_call|>{f}<|/tool_call|><|tool_call|>{g}<|/tool_call|>"), "", &both);
        check(Phi4MiniMarked, &format!("functools[{f}, {g}]"), "", &both);
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
