//! Llama 3.1 to 3.3 format: the whole answer is one call or several, `{"name": …, "parameters": …}`, with `;`, `,` or
//! blanks between them, sometimes after `<|python_tag|>`. An answer that begins otherwise is text to its end.

use super::{
    Calls, Format, Make, ToolFormat, ToolParser,
    call::{CallObject, CallVerdict},
    grammar::{Begin, Shape},
};
use crate::{literal::Literal, piece::Pieces};

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::Llama3Json,
    names: &["llama3_json", "llama4_json", "llama3"],
    shown_by: shown_by,
    marks: &MARKS,
    make: Make::Own(|| Box::new(Llama3::new())),
    calls: Calls::Shape(&SHAPE),
};

const TAG: &str = "<|python_tag|>";
pub(super) const MARKS: [&str; 1] = [TAG];

/// Returns true if a template is Llama's: its instruction asks for `"parameters"`, and names its interpreter's role or tag.
pub(super) fn shown_by(signs: &super::Signs<'_>) -> bool {
    let template = signs.template;
    template.contains(r#""parameters": "#) && (template.contains(TAG) || template.contains("ipython"))
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
    at: At,
    tag: Literal,
    held: String,
}

impl Llama3 {
    pub(crate) fn new() -> Self {
        Self { at: At::Between, tag: Literal::new(TAG), held: String::new() }
    }

    fn between(&mut self, offset: usize, c: char, out: &mut Pieces) {
        if self.tag.is_idle() {
            if c.is_whitespace() || matches!(c, ';' | ',') {
                self.held.push(c);
                return;
            }
            if c == '{' {
                self.at = At::Call(CallObject::new());
                return self.call(offset, c, out);
            }
        }
        if self.tag.push(c) {
            self.held.push_str(TAG);
        } else if !self.tag.released_is_empty() {
            let text = std::mem::take(&mut self.held) + &self.tag.take_all();
            out.text(offset + c.len_utf8() - text.len(), &text);
            self.at = At::Text;
        }
    }

    fn call(&mut self, offset: usize, c: char, out: &mut Pieces) {
        let At::Call(call) = &mut self.at else { return };
        let verdict = call.push(c, out);
        if call.is_announced() || verdict == CallVerdict::Done {
            self.held.clear();
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
            At::Between => held + &self.tag.take_all(),
            At::Call(call) => held + &call.take_raw(),
            At::Text => held,
        };
        out.text(end - text.len(), &text);
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
    call: |lark, tool| Some(lark.object(tool, "parameters")),
};

#[cfg(test)]
mod tests {
    use super::super::{ToolFormat::Llama3Json, tests::check};

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
        check(Llama3Json, r#"{"name": "f", "parameters": {}} done"#, " done", &[("f", "{}")]);
    }
}
