//! Parser of formats that put marks around each call: a table of marks, a reader of what stands in front of the
//! arguments, and a reader of the arguments.
//!
//! ```text
//! text ── opening mark ── head: name ── arguments ── tail: next call, or the end of the block ── text
//! ```
//!
//! The text since the opening mark is held until the call's name is known. A head that turns out to be none is text:
//! its mark comes out, and what follows the mark is read anew, so that a malformed call does not hide the next. Blanks
//! in front of a call and behind the last one are dropped: templates write them again. Between text they stay.

use std::sync::Arc;

use super::{
    CallableTool, ToolParser,
    call::{CallObject, CallVerdict},
    json::{JsonScan, Verdict},
    marks::{Marks, Unread},
};
use crate::piece::Pieces;

/// Longest text in front of a call's arguments, in bytes; a longer one is no call.
const HEAD_BYTES_MAX: usize = 512;

/// What stands in front of a call's arguments, as far as it was read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// The name of a call whose arguments begin.
    Named {
        name: String,
        /// Id of the call, where the model writes one.
        id: Option<String>,
        /// Bytes at the end of the head that belong to the arguments.
        left: usize,
    },
    /// The beginning of an object with name and arguments; `left` as above.
    Object { left: usize },
}

impl Head {
    pub(super) fn named(name: &str, left: usize) -> Self {
        Self::Named { name: name.to_owned(), id: None, left }
    }
}

/// Effect of a character on the arguments of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The arguments go on.
    More,
    /// The character ends the arguments and belongs to them.
    Done,
    /// The character does not fit and was not taken.
    Bad,
}

/// Reader of the arguments of one call, behind its announcement.
pub(super) trait Arguments: Send {
    /// Takes a character; what it tells of the arguments goes to `out` as JSON text.
    fn push(&mut self, c: char, out: &mut Pieces) -> Step;
    /// Takes the text that has come out in no form, when the call is given up.
    fn take_raw(&mut self) -> String;
}

/// Description of one format.
#[derive(Clone, Copy)]
pub(super) struct Frame {
    /// Marks that open a call or a block of calls, anywhere in the answer.
    pub(super) opens: &'static [&'static str],
    /// Like `opens`, for marks that count at the beginning of the answer only.
    pub(super) begins: &'static [&'static str],
    /// Reads the text between mark and arguments. The flag is true behind a mark of `nexts` or `items`.
    pub(super) head: fn(&str, bool) -> Result<Head, Unread>,
    /// Reader of the arguments of the named function.
    pub(super) arguments: fn(&str, &Arc<[CallableTool]>) -> Box<dyn Arguments>,
    /// Marks behind a call that are dropped.
    pub(super) drops: &'static [&'static str],
    /// Marks behind a call that stand in front of the next one.
    pub(super) nexts: &'static [&'static str],
    /// Marks behind a call that are the beginning of the next one's head.
    pub(super) items: &'static [&'static str],
    /// Marks that close the block of calls.
    pub(super) ends: &'static [&'static str],
    /// True if only names of the request's tools count: formats whose marks ordinary text may contain.
    pub(super) known_names: bool,
    /// True if the next call may follow without a mark, in front of its name.
    pub(super) bare: bool,
}

impl Frame {
    /// A format without marks, to name only those that a format has.
    pub(super) const NONE: Self = Self {
        opens: &[],
        begins: &[],
        head: |_, _| Err(Unread::Bad),
        arguments: JsonArguments::boxed,
        drops: &[],
        nexts: &[],
        items: &[],
        ends: &[],
        known_names: false,
        bare: false,
    };
}

enum At {
    Text,
    /// Behind an opening mark. `before` is the text in front of the head: blanks and the mark.
    Head {
        before: String,
        head: String,
        next: bool,
    },
    /// In an object with name and arguments.
    Object(CallObject, String),
    Arguments(Box<dyn Arguments>),
    /// Behind a call, with the text since then.
    Tail(String),
    /// Behind a call, with blanks since then that may stand in front of a mark.
    Blanks(String),
}

/// Parser of one answer in a format with marks.
pub(super) struct Framed {
    frame: &'static Frame,
    tools: Arc<[CallableTool]>,
    at: At,
    marks: Marks,
    /// Marks of the beginning of the answer, until that is over.
    begin: Option<Marks>,
    /// Held blanks that may stand in front of a call.
    blanks: String,
    calls: bool,
}

impl Framed {
    pub(super) fn new(frame: &'static Frame, tools: Arc<[CallableTool]>) -> Self {
        Self {
            frame,
            tools,
            at: At::Text,
            marks: Marks::new(frame.opens),
            begin: (!frame.begins.is_empty()).then(|| Marks::new(frame.begins)),
            blanks: String::new(),
            calls: false,
        }
    }

    /// Handles a character outside calls. `end` is the offset behind it.
    fn text(&mut self, end: usize, c: char, out: &mut Pieces) {
        if let Some(begin) = &mut self.begin {
            if begin.held_bytes() == 0 && c.is_whitespace() {
                self.blanks.push(c);
                return;
            }
            let mut free = String::new();
            match begin.push(c, &mut free) {
                Some(mark) if free.is_empty() => {
                    self.begin = None;
                    return self.open(mark);
                }
                // Something else stands in front of the mark.
                Some(mark) => free.push_str(mark),
                None if free.is_empty() => return,
                None => {}
            }
            // The answer begins with something else: what was held is read by the marks of all places.
            free.push_str(&begin.take_held());
            self.begin = None;
            let start = end - free.len();
            return self.replay(start, &free, out);
        }
        let mut free = String::new();
        let found = self.marks.push(c, &mut free);
        let mut at = end - found.map_or(self.marks.held_bytes(), str::len) - free.len();
        for c in free.chars() {
            self.shown(at, c, out);
            at += c.len_utf8();
        }
        if let Some(mark) = found {
            self.open(mark);
        }
    }

    fn open(&mut self, mark: &str) {
        let before = std::mem::take(&mut self.blanks) + mark;
        self.at = At::Head { before, head: String::new(), next: false };
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

    /// Reads a text that stands at `start` again.
    fn replay(&mut self, start: usize, text: &str, out: &mut Pieces) {
        for (index, c) in text.char_indices() {
            self.push(start + index, c, out);
        }
    }

    /// Reads the head; called for each of its characters. `end` is the offset behind it.
    fn head(&mut self, end: usize, before: String, head: String, next: bool, out: &mut Pieces) {
        let read = if head.len() > HEAD_BYTES_MAX { Err(Unread::Bad) } else { (self.frame.head)(&head, next) };
        let (left, at) = match read {
            Err(Unread::More) => {
                self.at = At::Head { before, head, next };
                return;
            }
            Ok(Head::Named { name, id, left }) if self.takes(&name) => {
                out.call_start(&name, id);
                self.calls = true;
                (left, At::Arguments((self.frame.arguments)(&name, &self.tools)))
            }
            Ok(Head::Object { left }) => {
                let mut before = before;
                before.push_str(&head[..head.len() - left]);
                (left, At::Object(CallObject::new(), before))
            }
            Err(Unread::Bad) | Ok(Head::Named { .. }) => {
                let start = end - head.len();
                out.text(start - before.len(), &before);
                self.at = At::Text;
                return self.replay(start, &head, out);
            }
        };
        self.at = at;
        let start = end - left;
        let rest = head[head.len() - left..].to_owned();
        self.replay(start, &rest, out);
    }

    fn takes(&self, name: &str) -> bool {
        let known = self.tools.is_empty() || self.tools.iter().any(|tool| tool.name == name);
        !name.is_empty() && (known || !self.frame.known_names)
    }

    fn object(&mut self, mut call: CallObject, mut before: String, offset: usize, c: char, out: &mut Pieces) {
        let verdict = call.push(c, out);
        if call.is_announced() || verdict == CallVerdict::Done {
            before.clear();
            self.calls = true;
        }
        match verdict {
            CallVerdict::More => self.at = At::Object(call, before),
            CallVerdict::Done => self.at = At::Tail(String::new()),
            CallVerdict::Bad => {
                let text = before + &call.take_raw();
                out.text(offset - text.len(), &text);
                self.at = At::Text;
                self.text(offset + c.len_utf8(), c, out);
            }
        }
    }

    fn arguments(&mut self, mut arguments: Box<dyn Arguments>, offset: usize, c: char, out: &mut Pieces) {
        match arguments.push(c, out) {
            Step::More => self.at = At::Arguments(arguments),
            Step::Done => {
                out.call_end();
                self.at = At::Tail(String::new());
            }
            Step::Bad => {
                let mut text = arguments.take_raw();
                let start = offset - text.len();
                text.push(c);
                self.at = At::Text;
                self.replay(start, &text, out);
            }
        }
    }

    /// Reads the text behind a call; called for each of its characters. `end` is the offset behind it.
    fn tail(&mut self, end: usize, mut tail: String, out: &mut Pieces) {
        let frame = self.frame;
        loop {
            let rest = tail.trim_start();
            let begins = |marks: &[&str]| marks.iter().any(|mark| mark.starts_with(rest));
            let found = |marks: &'static [&'static str]| marks.iter().copied().find(|mark| rest.starts_with(mark));
            if let Some(mark) = found(frame.drops) {
                tail = rest[mark.len()..].to_owned();
                continue;
            }
            if found(frame.ends).is_some() {
                self.at = At::Text;
            } else if found(frame.nexts).is_some() {
                self.at = At::Head { before: tail, head: String::new(), next: true };
            } else if let Some(mark) = found(frame.items) {
                tail.truncate(tail.len() - mark.len());
                self.head(end, tail, mark.to_owned(), true, out);
            } else if frame.bare && rest.starts_with(|c: char| c.is_alphabetic() || c == '_') {
                let item = rest.to_owned();
                tail.truncate(tail.len() - item.len());
                self.head(end, tail, item, true, out);
            } else if [frame.drops, frame.nexts, frame.items, frame.ends].into_iter().any(begins) {
                self.at = if rest.is_empty() { At::Blanks(tail) } else { At::Tail(tail) };
            } else {
                self.at = At::Text;
                self.replay(end - tail.len(), &tail, out);
            }
            return;
        }
    }
}

impl ToolParser for Framed {
    fn push(&mut self, offset: usize, c: char, out: &mut Pieces) {
        let end = offset + c.len_utf8();
        match std::mem::replace(&mut self.at, At::Text) {
            At::Text => self.text(end, c, out),
            At::Head { before, mut head, next } => {
                head.push(c);
                self.head(end, before, head, next, out);
            }
            At::Object(call, before) => self.object(call, before, offset, c, out),
            At::Arguments(arguments) => self.arguments(arguments, offset, c, out),
            // Further blanks say no more; each of them would be read anew.
            At::Blanks(mut blanks) if c.is_whitespace() => {
                blanks.push(c);
                self.at = At::Blanks(blanks);
            }
            At::Tail(mut tail) | At::Blanks(mut tail) => {
                tail.push(c);
                self.tail(end, tail, out);
            }
        }
    }

    fn finish(&mut self, end: usize, out: &mut Pieces) {
        let text = match std::mem::replace(&mut self.at, At::Text) {
            At::Text => {
                let begin = self.begin.as_mut().map(Marks::take_held).unwrap_or_default();
                std::mem::take(&mut self.blanks) + &begin + &self.marks.take_held()
            }
            At::Head { before, head, .. } => before + &head,
            At::Object(mut call, before) => before + &call.take_raw(),
            At::Arguments(mut arguments) => arguments.take_raw(),
            At::Tail(tail) | At::Blanks(tail) => tail,
        };
        // Blanks behind a call are the model's layout.
        if !(self.calls && text.trim().is_empty()) {
            out.text(end - text.len(), &text);
        }
    }

    fn in_call(&self) -> bool {
        match &self.at {
            At::Object(call, _) => call.is_streaming(),
            At::Arguments(_) => true,
            _ => false,
        }
    }
}

/// Reader of arguments that are a JSON object, passed on as written.
#[derive(Debug)]
pub(super) struct JsonArguments(JsonScan, bool);

impl JsonArguments {
    pub(super) fn boxed(_name: &str, _tools: &Arc<[CallableTool]>) -> Box<dyn Arguments> {
        Box::new(Self(JsonScan::new(), false))
    }
}

impl Arguments for JsonArguments {
    fn push(&mut self, c: char, out: &mut Pieces) -> Step {
        if !self.1 && c != '{' {
            return Step::Bad;
        }
        self.1 = true;
        match self.0.push(c) {
            Verdict::Bad | Verdict::EndBefore => Step::Bad,
            verdict => {
                out.call_arguments(c.encode_utf8(&mut [0; 4]));
                if verdict == Verdict::End { Step::Done } else { Step::More }
            }
        }
    }

    fn take_raw(&mut self) -> String {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::{
        ToolFormat::{DeepSeekV31, KimiK2, MiniMaxM2, Olmo3, Qwen3Coder},
        tests::{check, parse},
    };

    #[test]
    fn blanks_behind_a_call_are_read_once() {
        let begun = Instant::now();
        let blanks = " \n".repeat(400_000);
        let call = "<tool_call>\n<function=f>\n</function>";
        for (format, call, close) in [
            (Qwen3Coder, call, "</tool_call>"),
            (Olmo3, "<function_calls>f()", "</function_calls>"),
            (MiniMaxM2, "<minimax:tool_call><invoke name=\"f\"></invoke>", "</minimax:tool_call>"),
            (
                KimiK2,
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
                "<|tool_calls_section_end|>",
            ),
            (
                DeepSeekV31,
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
            ),
        ] {
            for text in [format!("{call}{blanks}"), format!("{call}{blanks}{close}{blanks}")] {
                let answer = parse(format, &text);
                assert_eq!((answer.text.as_str(), answer.calls.len()), ("", 1), "{format:?}");
            }
        }
        // Read anew for each of them, they take half an hour.
        assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
        check(Qwen3Coder, &format!("{call} \n {}", &call["<tool_call>".len()..]), "", &[("f", "{}"), ("f", "{}")]);
        check(Qwen3Coder, &format!("{call} \n x"), " \n x", &[("f", "{}")]);
    }
}
