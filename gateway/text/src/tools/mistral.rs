//! Mistral format: `[TOOL_CALLS]` and then either an array of `{"name": …, "arguments": …}` (Mistral v3 to v7) or
//! `name[ARGS]{…}` / `name{…}` for each call (v11 and later), in v11's templates with `[CALL_ID]` and an id behind the name. Text
//! stands in front of the calls. An object may have an `id`, too; templates write it behind the arguments, where it comes too late.

use super::{
    CallableTool, Calls, Format, Make, ToolFormat, ToolParser,
    call::{CallObject, CallVerdict},
    grammar::{self, Begin, CallRule, Checkpoint, Shape, quoted},
    json::{JsonScan, Verdict},
};
use crate::{literal::Literal, piece::Pieces};

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::Mistral,
    names: &["mistral"],
    shown_by,
    marks: &MARKS,
    make: Make::Own(|_| Box::new(Mistral::new())),
    calls: Calls::Own(grammar),
};

const OPEN: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";
pub(super) const MARKS: [&str; 3] = [OPEN, ARGS, CALL_ID];
/// Longest name of a function in bytes; a longer one is no call, but text.
const NAME_BYTES_MAX: usize = 256;

pub(super) fn shown_by(signs: &super::Signs<'_>) -> bool {
    let template = signs.template;
    template.contains(OPEN)
}

#[derive(Debug)]
enum At {
    Text,
    /// After the mark: an array or a name follows. The string is the text since the mark, mark included.
    Opened(String),
    /// In the array, in front of an object; the string is text that has not come out.
    Item(String),
    Object(CallObject, String),
    /// In the array, after an object.
    AfterObject,
    /// Behind the mark, in the function's name, the call's id or the `[ARGS]` that follows them.
    Name {
        written: String,
        name: String,
    },
    Arguments(JsonScan),
}

/// Parser of tool calls in Mistral's format, for the text of one answer.
#[derive(Debug)]
pub(crate) struct Mistral {
    at: At,
    open: Literal,
}

impl Mistral {
    pub(crate) fn new() -> Self {
        Self { at: At::Text, open: Literal::new(OPEN) }
    }

    fn text(&mut self, end: usize, c: char, out: &mut Pieces) {
        if self.open.push(c) {
            self.at = At::Opened(OPEN.into());
            return;
        }
        let free = self.open.take_released();
        out.text(end - self.open.held_bytes() - free.len(), &free);
    }

    /// Gives a call up: `written` comes out as text, and `c` is handled as text.
    fn give_up(&mut self, written: &str, offset: usize, c: char, out: &mut Pieces) {
        out.text(offset - written.len(), written);
        self.at = At::Text;
        self.text(offset + c.len_utf8(), c, out);
    }

    fn opened(&mut self, mut written: String, offset: usize, c: char, out: &mut Pieces) {
        match c {
            '[' => {
                written.push(c);
                self.at = At::Item(written);
            }
            _ if c.is_whitespace() => {
                written.push(c);
                self.at = At::Opened(written);
            }
            _ if c.is_alphanumeric() || c == '_' => {
                written.push(c);
                self.at = At::Name { written, name: c.into() };
            }
            _ => self.give_up(&written, offset, c, out),
        }
    }

    fn item(&mut self, mut written: String, offset: usize, c: char, out: &mut Pieces) {
        if c == '{' {
            self.object(CallObject::with_id(), written, offset, c, out);
        } else if c.is_whitespace() {
            written.push(c);
            self.at = At::Item(written);
        } else {
            self.give_up(&written, offset, c, out);
        }
    }

    fn object(&mut self, mut call: CallObject, mut written: String, offset: usize, c: char, out: &mut Pieces) {
        let verdict = call.push(c, out);
        if call.is_announced() {
            written.clear();
        }
        match verdict {
            CallVerdict::More => self.at = At::Object(call, written),
            CallVerdict::Done => self.at = At::AfterObject,
            CallVerdict::Bad => {
                let text = written + &call.take_raw();
                self.give_up(&text, offset, c, out);
            }
        }
    }

    fn name(&mut self, mut written: String, mut name: String, offset: usize, c: char, out: &mut Pieces) {
        let named = name.strip_suffix(ARGS).unwrap_or(&name).trim_end();
        let (named, id) = named.split_once(CALL_ID).map_or((named, None), |(named, id)| (named, Some(id)));
        let is_name = |text: &str| text.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.'));
        if c == '{' && is_name(named) && id.is_none_or(is_name) {
            out.call_start(named, id.filter(|id| !id.is_empty()).map(str::to_owned));
            return self.arguments(JsonScan::new(), offset, c, out);
        }
        if written.len() > NAME_BYTES_MAX
            || !(c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '[' | ']' | ' ' | '\n'))
        {
            return self.give_up(&written, offset, c, out);
        }
        written.push(c);
        name.push(c);
        self.at = At::Name { written, name };
    }

    fn arguments(&mut self, mut scan: JsonScan, offset: usize, c: char, out: &mut Pieces) {
        match scan.push(c) {
            Verdict::Bad => self.give_up("", offset, c, out),
            verdict => {
                out.call_arguments(c.encode_utf8(&mut [0; 4]));
                self.at = At::Arguments(scan);
                if verdict != Verdict::More {
                    out.call_end();
                    self.at = At::Text;
                }
            }
        }
    }
}

impl ToolParser for Mistral {
    fn push(&mut self, offset: usize, c: char, out: &mut Pieces) {
        match std::mem::replace(&mut self.at, At::Text) {
            At::Text => self.text(offset + c.len_utf8(), c, out),
            At::Opened(written) => self.opened(written, offset, c, out),
            At::Item(written) => self.item(written, offset, c, out),
            At::Object(call, written) => self.object(call, written, offset, c, out),
            At::AfterObject => match c {
                ',' => self.at = At::Item(String::new()),
                // The end of the array; all that follows is text.
                ']' => {}
                _ if c.is_whitespace() => self.at = At::AfterObject,
                _ => self.give_up("", offset, c, out),
            },
            At::Name { written, name } => self.name(written, name, offset, c, out),
            At::Arguments(scan) => self.arguments(scan, offset, c, out),
        }
    }

    fn finish(&mut self, end: usize, out: &mut Pieces) {
        let text = match std::mem::replace(&mut self.at, At::Text) {
            At::Text => self.open.take_all(),
            At::Opened(written) | At::Item(written) | At::Name { written, .. } => written,
            At::Object(mut call, written) => written + &call.take_raw(),
            At::AfterObject | At::Arguments(_) => String::new(),
        };
        out.text(end - text.len(), &text);
    }

    fn in_call(&self) -> bool {
        match &self.at {
            At::Object(call, _) => call.is_streaming(),
            At::Arguments(_) => true,
            _ => false,
        }
    }
}

/// Calls in an array, of checkpoints without the mark `[ARGS]`.
pub(super) const ARRAY_SHAPE: Shape = Shape {
    begin: Begin::Mark(OPEN),
    first: "[",
    next: ", ",
    close: "]",
    call: |lark, tool| Some(lark.object(tool, "arguments")),
};

/// Calls by name, of checkpoints that have the mark.
pub(super) const NAMED_SHAPE: Shape = Shape {
    begin: Begin::Mark(OPEN),
    first: "",
    next: OPEN,
    close: "",
    call: |lark, tool| {
        let arguments = lark.arguments(tool);
        Some(format!("{} {} {arguments}", quoted(&tool.name), lark.literal(ARGS)))
    },
};

pub(super) fn grammar(checkpoint: Checkpoint<'_>, tools: &[CallableTool], rule: &CallRule) -> Option<String> {
    let shape = if (checkpoint.token)(ARGS).is_some() { &NAMED_SHAPE } else { &ARRAY_SHAPE };
    grammar::write(checkpoint, shape, &MARKS, tools, rule)
}

#[cfg(test)]
mod tests {
    use super::super::{ToolFormat::Mistral, tests::check};

    #[test]
    fn arrays_of_calls() {
        check(Mistral, r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}]"#, "", &[("f", r#"{"a": [1]}"#)]);
        check(
            Mistral,
            r#"Hm. [TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]"#,
            "Hm. ",
            &[("f", "{}"), ("g", "{}")],
        );
    }

    #[test]
    fn named_calls() {
        check(
            Mistral,
            r#"[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}"#,
            "",
            &[("get_weather", r#"{"city": "Paris"}"#)],
        );
        check(Mistral, r#"[TOOL_CALLS]f{}[TOOL_CALLS]g{"a": 1}"#, "", &[("f", "{}"), ("g", r#"{"a": 1}"#)]);
        check(
            Mistral,
            r#"[TOOL_CALLS]f[CALL_ID]aB3dE6gH9[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}"#,
            "",
            &[("f", r#"{"a": 1}"#), ("g", "{}")],
        );
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "[TOOL_CALLS]",
            "[TOOL",
            "a [b] c",
            "[TOOL_CALLS][1]",
            "[TOOL_CALLS]f(x)",
            "[TOOL_CALLS] [{\"x\": 1}]",
            "[TOOL_CALLS]f[ARG",
            "[TOOL_CALLS]f[CALL_ID]a b[ARGS]",
            "[TOOL_CALLS]f[CALL_ID][x][ARGS]{}",
        ] {
            check(Mistral, text, text, &[]);
        }
    }
}
