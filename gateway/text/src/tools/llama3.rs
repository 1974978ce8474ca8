//! Llama 3.1 to 3.3 format: the whole answer is one call or several, `{"name": …, "parameters": …}`, with `;`, `,` or
//! blanks between them, sometimes after `<|python_tag|>`, or between Llama 4's `<|python_start|>` and `<|python_end|>`.
//! An answer that begins otherwise is text to its end.
//!
//! No mark tells a call from an answer in JSON. So an object counts only with the name of a function of the request, and with arguments or
//! parameters.

use std::sync::Arc;

use super::{
    CallableTool, Calls, Format, Make, ToolFormat, ToolParser,
    call::{CallObject, CallVerdict},
    grammar::{Begin, Shape},
    marks::Marks,
};
use crate::piece::Pieces;

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::Llama3Json,
    names: &["llama3_json", "llama4_json", "llama3"],
    shown_by,
    marks: &MARKS,
    make: Make::Own(|tools| Box::new(Llama3::new(tools))),
    calls: Calls::Shape(&SHAPE),
};

const TAG: &str = "<|python_tag|>";
/// Marks between calls, of Llama 3 and 4.
pub(super) const MARKS: [&str; 3] = [TAG, "<|python_start|>", "<|python_end|>"];

/// Returns true if a template is Llama's: its instruction asks for `"parameters"`, and names its interpreter's role or tag.
pub(super) fn shown_by(signs: &super::Signs<'_>) -> bool {
    let template = signs.template;
    template.contains(r#""parameters": "#) && ["ipython"].iter().chain(&MARKS).any(|sign| template.contains(sign))
}

#[derive(Debug)]
enum At {
    /// In front of a call: blanks, separators and the tag are in `held`.
    Between,
    Call(CallObject),
    Text,
}

/// Parser of tool calls in the format of Llama 3, for the text of one answer.
#[derive(Debug)]
pub(crate) struct Llama3 {
    tools: Arc<[CallableTool]>,
    at: At,
    marks: Marks,
    held: String,
    calls: bool,
}

impl Llama3 {
    /// Creates a parser for the functions of a request; with none, every name counts.
    pub(crate) fn new(tools: &Arc<[CallableTool]>) -> Self {
        Self { tools: tools.clone(), at: At::Between, marks: Marks::new(&MARKS), held: String::new(), calls: false }
    }

    fn between(&mut self, offset: usize, c: char, out: &mut Pieces) {
        if self.marks.held_bytes() == 0 {
            if c.is_whitespace() || matches!(c, ';' | ',') {
                self.held.push(c);
                return;
            }
            if c == '{' {
                self.at = At::Call(CallObject::bare(&self.tools));
                return self.call(offset, c, out);
            }
        }
        let mut free = String::new();
        if let Some(mark) = self.marks.push(c, &mut free) {
            self.held.push_str(mark);
        } else if !free.is_empty() {
            let text = std::mem::take(&mut self.held) + &free + &self.marks.take_held();
            out.text(offset + c.len_utf8() - text.len(), &text);
            self.at = At::Text;
        }
    }

    fn call(&mut self, offset: usize, c: char, out: &mut Pieces) {
        let At::Call(call) = &mut self.at else { return };
        let verdict = call.push(c, out);
        if call.is_announced() || verdict == CallVerdict::Done {
            self.held.clear();
            self.calls = true;
        }
        match verdict {
            CallVerdict::More => {}
            CallVerdict::Done => self.at = At::Between,
            CallVerdict::Bad => {
                let text = std::mem::take(&mut self.held) + &call.take_raw();
                out.text(offset - text.len(), &text);
                out.text(offset, c.encode_utf8(&mut [0; 4]));
                self.at = At::Text;
            }
        }
    }
}

impl ToolParser for Llama3 {
    fn push(&mut self, offset: usize, c: char, out: &mut Pieces) {
        match self.at {
            At::Between => self.between(offset, c, out),
            At::Call(_) => self.call(offset, c, out),
            At::Text => out.text(offset, c.encode_utf8(&mut [0; 4])),
        }
    }

    fn finish(&mut self, end: usize, out: &mut Pieces) {
        let held = std::mem::take(&mut self.held);
        let text = match &mut self.at {
            At::Between => held + &self.marks.take_held(),
            At::Call(call) => held + &call.take_raw(),
            At::Text => held,
        };
        // Blanks and the closing mark behind a call are the model's layout.
        if !(self.calls && text.replace(MARKS[2], "").trim().is_empty()) {
            out.text(end - text.len(), &text);
        }
    }

    fn in_call(&self) -> bool {
        matches!(&self.at, At::Call(call) if call.is_streaming())
    }
}

pub(super) const SHAPE: Shape = Shape {
    begin: Begin::Answer("", r"/\s*[^{;,\s](?s:.*)/"),
    first: "",
    next: "; ",
    close: "",
    call: |lark, tool| Some(lark.object_in_lexemes(tool, "parameters")),
};

#[cfg(test)]
mod tests {
    use super::super::{
        ToolFormat::Llama3Json,
        tests::{check, check_unnamed},
    };

    #[test]
    fn an_answer_that_is_calls() {
        check(Llama3Json, r#"{"name": "f", "parameters": {"a": "b"}}"#, "", &[("f", r#"{"a": "b"}"#)]);
        check(Llama3Json, r#"<|python_tag|>{"type": "function", "name": "f", "parameters": {}}"#, "", &[("f", "{}")]);
        check(
            Llama3Json,
            r#"{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}"#,
            "",
            &[("f", "{}"), ("g", "{}")],
        );
    }

    #[test]
    fn an_answer_that_is_not() {
        for text in ["Hello {}", r#"{"a": 1}"#, "<|python", "  ", "<|python_tag|>print(1)", r#"{"name": "f""#] {
            check(Llama3Json, text, text, &[]);
        }
        for text in [
            r#"{"name": "Bob", "age": 3}"#,
            r#"{"age": 3, "name": "Bob"}"#,
            r#"{"name": "Bob", "parameters": {"a": 1}}"#,
            r#"{"parameters": {"a": 1}, "name": "Bob"}"#,
            r#"{"name": "Bob", "arguments": "{\"a\": 1}"}"#,
            r#"{"arguments": "{\"a\": 1}", "name": "Bob"}"#,
            r#"{"name": "f", "age": 3}"#,
            r#"{"age": 3, "name": "f"}"#,
            r#"{"name": "f"}"#,
            r#" {"name": "Bob"}; {"name": "f", "parameters": {}}"#,
            r#"<|python_tag|>{"name": "Bob"}"#,
        ] {
            check(Llama3Json, text, text, &[]);
        }
        let one = r#"{"name": "f", "parameters": {}}"#;
        check(
            Llama3Json,
            &format!(r#"{one}; {{"name": "Bob", "age": 3}}"#),
            r#"; {"name": "Bob", "age": 3}"#,
            &[("f", "{}")],
        );
        check(Llama3Json, r#"{"name": "f", "parameters": null}"#, "", &[("f", "{}")]);
        // Without the request's functions no name is known to be wrong.
        check_unnamed(Llama3Json, r#"{"name": "Bob", "parameters": {"a": 1}}"#, "", &[("Bob", r#"{"a": 1}"#)]);
        let text = r#"{"name": "Bob", "age": 3}"#;
        check_unnamed(Llama3Json, text, text, &[]);
        let llama4 = r#"<|python_start|>{"name": "f", "parameters": {}}<|python_end|>"#;
        check(Llama3Json, llama4, "", &[("f", "{}")]);
        check(Llama3Json, r#"{"name": "f", "parameters": {}} done"#, " done", &[("f", "{}")]);
    }
}
