//! Hermes format: `<tool_call>{"name": …, "arguments": …}</tool_call>`, any number of times, anywhere in the answer.
//!
//! Blanks in front of a call and behind the last one are dropped: templates write them again. Between text they stay.

use super::{
    Calls, Format, Make, ToolFormat, ToolParser,
    call::{CallObject, CallVerdict},
    grammar::{Begin, Shape},
};
use crate::{literal::Literal, piece::Pieces};

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::Hermes,
    names: &["hermes", "qwen", "qwen25", "granite4"],
    shown_by,
    marks: &MARKS,
    make: Make::Own(|_| Box::new(Hermes::new())),
    calls: Calls::Shape(&SHAPE),
};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
pub(super) const MARKS: [&str; 2] = [OPEN, CLOSE];

/// Returns true if a template shows the mark with a JSON object in it; Qwen3-Coder writes `<function=…>` inside the same mark,
/// which is another format.
pub(super) fn shown_by(signs: &super::Signs<'_>) -> bool {
    let template = signs.template;
    template.contains(OPEN) && !template.contains("<function=") && !template.contains("<arg_key>")
}

#[derive(Debug)]
enum At {
    Text,
    /// Inside the mark. The string is the text in front of the object: blanks and the mark.
    Call(Box<CallObject>, String),
    /// After the object: the closing mark or another object follows.
    After,
}

/// Parser of tool calls in the Hermes format, for the text of one answer.
#[derive(Debug)]
pub(crate) struct Hermes {
    at: At,
    open: Literal,
    close: Literal,
    /// Held blanks that may stand in front of a call.
    blanks: String,
    calls: bool,
}

impl Hermes {
    pub(crate) fn new() -> Self {
        Self { at: At::Text, open: Literal::new(OPEN), close: Literal::new(CLOSE), blanks: String::new(), calls: false }
    }

    /// Handles a character outside calls. `end` is the offset behind it.
    fn text(&mut self, end: usize, c: char, out: &mut Pieces) {
        if self.open.push(c) {
            let before = std::mem::take(&mut self.blanks) + OPEN;
            self.at = At::Call(Box::new(CallObject::new()), before);
            return;
        }
        let free = self.open.take_released();
        let mut at = end - self.open.held_bytes() - free.len();
        for c in free.chars() {
            self.shown(at, c, out);
            at += c.len_utf8();
        }
    }

    /// Emits a character that is text for sure; blanks still wait for the next character.
    fn shown(&mut self, at: usize, c: char, out: &mut Pieces) {
        if c.is_whitespace() {
            self.blanks.push(c);
        } else {
            out.text(at - self.blanks.len(), &std::mem::take(&mut self.blanks));
            out.text(at, c.encode_utf8(&mut [0; 4]));
        }
    }

    fn call(&mut self, offset: usize, c: char, out: &mut Pieces) {
        let At::Call(call, before) = &mut self.at else { return };
        let verdict = call.push(c, out);
        if call.is_announced() || verdict == CallVerdict::Done {
            before.clear();
            self.calls = true;
        }
        match verdict {
            CallVerdict::More => {}
            CallVerdict::Done => self.at = At::After,
            CallVerdict::Bad => {
                let text = std::mem::take(before) + &call.take_raw();
                out.text(offset - text.len(), &text);
                self.at = At::Text;
                self.text(offset + c.len_utf8(), c, out);
            }
        }
    }

    fn after(&mut self, offset: usize, c: char, out: &mut Pieces) {
        if self.close.is_idle() {
            if c.is_whitespace() {
                self.blanks.push(c);
                return;
            }
            if c == '{' {
                let before = std::mem::take(&mut self.blanks);
                self.at = At::Call(Box::new(CallObject::new()), before);
                return self.call(offset, c, out);
            }
        }
        if self.close.push(c) {
            self.blanks.clear();
            self.at = At::Text;
        } else if !self.close.released_is_empty() {
            // Anything else is text, and the call before it stands.
            let text = self.close.take_all();
            self.at = At::Text;
            let mut at = offset + c.len_utf8() - text.len();
            for c in text.chars() {
                at += c.len_utf8();
                self.text(at, c, out);
            }
        }
    }
}

impl ToolParser for Hermes {
    fn push(&mut self, offset: usize, c: char, out: &mut Pieces) {
        match self.at {
            At::Text => self.text(offset + c.len_utf8(), c, out),
            At::Call(..) => self.call(offset, c, out),
            At::After => self.after(offset, c, out),
        }
    }

    fn finish(&mut self, end: usize, out: &mut Pieces) {
        let at = std::mem::replace(&mut self.at, At::Text);
        let text = match at {
            At::Text => std::mem::take(&mut self.blanks) + &self.open.take_all(),
            At::Call(mut call, before) => before + &call.take_raw(),
            At::After => std::mem::take(&mut self.blanks) + &self.close.take_all(),
        };
        // Blanks behind a call are the model's layout.
        if !(self.calls && text.trim().is_empty()) {
            out.text(end - text.len(), &text);
        }
    }

    fn in_call(&self) -> bool {
        matches!(&self.at, At::Call(call, _) if call.is_streaming())
    }
}

pub(super) const SHAPE: Shape = Shape {
    begin: Begin::Mark(OPEN),
    first: "\n",
    next: "\n</tool_call>\n<tool_call>\n",
    close: "\n</tool_call>",
    call: |lark, tool| Some(lark.object(tool, "arguments")),
};

#[cfg(test)]
mod tests {
    use super::super::{
        ToolFormat::Hermes,
        tests::{Answer, check, parse},
    };

    #[test]
    fn calls_come_out_with_their_arguments_as_written() {
        check(
            Hermes,
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
            "",
            &[("f", "{\"a\": 1}")],
        );
        check(
            Hermes,
            r#"<tool_call>{"name":"f","arguments":{ "x" :"é\u00e9<tool_call>"} }</tool_call>"#,
            "",
            &[("f", r#"{ "x" :"é\u00e9<tool_call>"}"#)],
        );
        check(
            Hermes,
            r#"<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>"#,
            "",
            &[("f", r#"{"a": [1, {}]}"#)],
        );
        check(
            Hermes,
            r#"<tool_call>{"id": 7, "name": "f", "parameters": {}, "x": "y"}</tool_call>"#,
            "",
            &[("f", "{}")],
        );
        check(Hermes, r#"<tool_call>{"name": "f"}</tool_call>"#, "", &[("f", "{}")]);
        check(Hermes, r#"<tool_call>{"name": "f", "arguments": null}</tool_call>"#, "", &[("f", "{}")]);
        check(
            Hermes,
            r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>"#,
            "",
            &[("f", r#"{"a": 1}"#)],
        );
        check(
            Hermes,
            r#"<tool_call>{"arguments": "{\"a\": 1}", "name": "f"}</tool_call>"#,
            "",
            &[("f", r#"{"a": 1}"#)],
        );
    }

    #[test]
    fn several_calls_and_the_text_around_them() {
        let one = r#"<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>"#;
        let calls = [("f", r#"{"a": 1}"#); 2];
        check(Hermes, &format!("{one}\n{one}\n"), "", &calls);
        check(Hermes, &format!("Look.\n\n{one} and {one} done "), "Look. and done", &calls);
        check(
            Hermes,
            r#"<tool_call>{"name": "f", "arguments": {}}
{"name": "g", "arguments": {}}</tool_call>"#,
            "",
            &[("f", "{}"), ("g", "{}")],
        );
        check(Hermes, "  plain < text\n ", "  plain < text\n ", &[]);
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "<tool_call>",
            "<tool_cal",
            "a <tool_call>\nnot json</tool_call> b",
            r#"<tool_call>{"name": "f""#,
            r#"<tool_call>{"name": "f", "arguments": "#,
            r#"<tool_call>{"name": "f", "arguments": [1]}</tool_call>"#,
            r#"<tool_call>{"name": "f", "arguments": "no"}</tool_call>"#,
            r#"<tool_call>{"arguments": {"a": 1}}</tool_call>"#,
            r#"<tool_call>{"name": 5, "arguments": {}}</tool_call>"#,
            r#"<tool_call>{"name": "", "arguments": {}}</tool_call>"#,
            "</tool_call> x",
            "<<tool_call",
            "<tool_call>\n<tool_call>",
        ] {
            check(Hermes, text, text, &[]);
        }
    }

    #[test]
    fn a_malformed_call_does_not_hide_the_next() {
        check(
            Hermes,
            r#"<tool_call>{oops<tool_call>{"name": "f", "arguments": {}}</tool_call>"#,
            "<tool_call>{oops",
            &[("f", "{}")],
        );
    }

    #[test]
    fn what_breaks_off_inside_arguments_is_an_incomplete_call() {
        let cut = parse(Hermes, r#"<tool_call>{"name": "f", "arguments": {"a": "x"#);
        assert_eq!(cut, Answer { text: String::new(), calls: vec![("f".into(), r#"{"a": "x"#.into(), false)] });
        let bad = parse(Hermes, r#"<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call>"#);
        assert_eq!(
            bad,
            Answer { text: "x}}</tool_call>".into(), calls: vec![("f".into(), r#"{"a": "#.into(), false)] }
        );
        // The arguments are complete, and so is the call.
        check(Hermes, r#"<tool_call>{"name": "f", "arguments": {}"#, "", &[("f", "{}")]);
        check(Hermes, r#"<tool_call>{"name": "f", "arguments": {}} so"#, " so", &[("f", "{}")]);
    }
}
