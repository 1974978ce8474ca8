//! FunctionGemma's and Gemma 4's formats: `call:NAME{key:value,…}` between marks, with bare keys and with strings
//! between two equal marks (`<escape>`, `<|"|>`).

use super::{
    Signs,
    frame::{Frame, Head},
    loose::{Dialect, LooseArguments},
    marks::{Unread, in_name, literal, until},
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
