//! Arguments written as elements, one for each parameter (`<parameter=city>Paris</parameter>`), read into JSON.
//!
//! A value that can only be a string comes out as it is written. Other values wait for their end, since only then their
//! type is certain: `5` is a number where the schema says so.

use std::sync::Arc;

use super::{
    CallableTool,
    callable::{Kinds, escape, kinds},
    frame::{Arguments, Step},
    grammar::{ANY_KEY, Lark, Parameters, Part, parameters, string_pattern},
    json::{JsonScan, Verdict},
    marks::{Marks, Unread},
};
use crate::piece::Pieces;

/// Longest name of a parameter with its marks, in bytes.
const KEY_BYTES_MAX: usize = 512;
/// Longest value that waits for its end, in bytes. A longer one is a string, whatever its schema says.
const VALUE_BYTES_MAX: usize = 1 << 20;

/// Key of a parameter, as far as it was read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Key<'a> {
    pub(super) name: &'a str,
    /// Whether the value is a string, where the format itself says it.
    pub(super) string: Option<bool>,
}

/// Way of writing one parameter, for grammars.
pub(super) struct Written {
    /// Text in front of the name.
    pub(super) open: &'static str,
    /// Text between the name and a value that is a string.
    pub(super) string: &'static str,
    /// Text between the name and a value in JSON.
    pub(super) json: &'static str,
    /// Line break of the layout in front of the closing mark.
    pub(super) line: &'static str,
    /// Closing mark of the value.
    pub(super) close: &'static str,
    /// Text behind the parameter.
    pub(super) after: &'static str,
}

/// Rules of a tool's parameters, one after the other in the order of the schema; `None` if they cannot hold a strict
/// tool to its schema.
pub(super) fn parameters_grammar(lark: &mut Lark<'_>, tool: &CallableTool, written: &Written) -> Option<String> {
    let value = |lark: &mut Lark<'_>, part: Part<'_>| {
        if lark.is_full() {
            return Some(String::new());
        }
        if part.kinds() != Kinds::STRING {
            let json = lark.part(part, tool.strict);
            let end = lark.literal(&format!("{}{}{}", written.line, written.close, written.after));
            return Some(format!("{} {json} {end}", lark.literal(written.json)));
        }
        let open = lark.literal(written.string);
        let value = match string_pattern(part, written.close) {
            Ok(None) => format!("{} {}", lark.text_until(written.close), lark.literal(written.after)),
            Ok(Some(pattern)) => {
                lark.pattern_until(&pattern, &format!("{}{}{}", written.line, written.close, written.after))
            }
            Err(()) if tool.strict => return None,
            Err(()) => format!("{} {}", lark.text_until(written.close), lark.literal(written.after)),
        };
        Some(format!("{open} {value}"))
    };
    match parameters(tool)? {
        Parameters::Listed(listed) => {
            let mut all = Vec::new();
            for (name, part, required) in listed {
                let value = value(lark, part)?;
                let one = lark.rule(&format!("{} {value}", lark.literal(&format!("{}{name}", written.open))));
                all.push(if required { one } else { format!("{one}?") });
            }
            Some(all.join(" "))
        }
        Parameters::Any(part) => {
            let value = value(lark, part)?;
            let key = lark.terminal(ANY_KEY);
            let one = lark.rule(&format!("{} {key} {value}", lark.literal(written.open)));
            Some(format!("{one}*"))
        }
    }
}

/// Marks of one format.
pub(super) struct Elements {
    /// Mark that opens a parameter, and the one that closes the call.
    pub(super) opens: &'static [&'static str],
    /// Mark that closes the call; also in `opens`.
    pub(super) close: &'static str,
    /// Reads the text between the opening mark and the value.
    pub(super) key: for<'a> fn(&'a str) -> Result<Key<'a>, Unread>,
    /// Mark that closes a value.
    pub(super) value_close: &'static [&'static str],
    /// True if a line break after and before a value's marks belongs to the marks.
    pub(super) lines: bool,
}

/// Value that waits for its end.
struct Waiting {
    text: String,
    /// State of the value as JSON while it is valid: inside JSON's strings a mark is text.
    json: Option<JsonScan>,
}

impl Waiting {
    fn push(&mut self, c: char) {
        self.text.push(c);
        let goes_on = |json: &mut JsonScan| matches!(json.push(c), Verdict::More);
        if !self.json.as_mut().is_some_and(goes_on) {
            self.json = None;
        }
    }
}

enum At {
    /// In front of a parameter or the closing mark.
    Between(Marks),
    /// In the key. The string is the text behind the opening mark.
    Key(String),
    Value {
        kinds: Kinds,
        key: String,
        close: Marks,
        /// Value of a parameter that is not a string for certain.
        waiting: Option<Waiting>,
        /// True until the first character of the value.
        first: bool,
        /// True if a line break waits that may stand in front of the closing mark.
        line: bool,
    },
}

/// Reader of the arguments of one call.
pub(super) struct XmlArguments {
    elements: &'static Elements,
    name: String,
    tools: Arc<[CallableTool]>,
    at: At,
    begun: bool,
    any: bool,
    /// Text since the last piece that came out.
    raw: String,
}

impl XmlArguments {
    pub(super) fn boxed(elements: &'static Elements, name: &str, tools: &Arc<[CallableTool]>) -> Box<dyn Arguments> {
        Box::new(Self {
            elements,
            name: name.to_owned(),
            tools: tools.clone(),
            at: At::Between(Marks::new(elements.opens)),
            begun: false,
            any: false,
            raw: String::new(),
        })
    }

    fn between(&mut self, mut marks: Marks, c: char, out: &mut Pieces) -> Step {
        if marks.held_bytes() == 0 && c.is_whitespace() {
            self.raw.push(c);
            self.at = At::Between(marks);
            return Step::More;
        }
        let mut free = String::new();
        let found = marks.push(c, &mut free);
        if !free.is_empty() {
            // The character stays with the caller; all in front of it is in `raw`.
            return Step::Bad;
        }
        self.raw.push(c);
        match found {
            Some(mark) if mark == self.elements.close => {
                out.call_arguments("}");
                return Step::Done;
            }
            Some(_) => self.at = At::Key(String::new()),
            None => self.at = At::Between(marks),
        }
        Step::More
    }

    fn key(&mut self, mut text: String, c: char, out: &mut Pieces) -> Step {
        text.push(c);
        let read = if text.len() > KEY_BYTES_MAX { Err(Unread::Bad) } else { (self.elements.key)(&text) };
        match read {
            Err(Unread::Bad) => return Step::Bad,
            Err(Unread::More) => {
                self.raw.push(c);
                self.at = At::Key(text);
            }
            Ok(Key { name, string }) => {
                let kinds = match string {
                    Some(true) => Kinds::STRING,
                    Some(false) => Kinds::ANY,
                    None => kinds(&self.tools, &self.name, name),
                };
                let mut json = String::from(if self.any { ",\"" } else { "\"" });
                self.any = true;
                name.chars().for_each(|c| escape(c, &mut json));
                json.push_str("\":");
                let waiting = if kinds == Kinds::STRING {
                    json.push('"');
                    out.call_arguments(&std::mem::take(&mut json));
                    self.raw.clear();
                    None
                } else {
                    self.raw.push(c);
                    Some(Waiting { text: String::new(), json: Some(JsonScan::new()) })
                };
                let close = Marks::new(self.elements.value_close);
                self.at = At::Value { kinds, key: json, close, waiting, first: true, line: false };
            }
        }
        Step::More
    }

    fn value(&mut self, c: char, out: &mut Pieces) {
        let At::Value { kinds, key, close, waiting, first, line } = &mut self.at else { return };
        let mut free = String::new();
        let mut found = close.push(c, &mut free);
        let mut json = String::new();
        let mut mark = "";
        // Whether the mark is text is known when all in front of it was read.
        let inside = |waiting: &Option<Waiting>, free: &str| {
            let Some(Waiting { json: Some(json), .. }) = waiting else { return false };
            let mut json = json.clone();
            free.chars().all(|c| json.push(c) == Verdict::More) && json.in_text()
        };
        if found.is_some() && inside(waiting, &free) {
            mark = found.take().unwrap_or_default();
        }
        for c in free.chars().chain(mark.chars()) {
            if std::mem::take(first) && c == '\n' && self.elements.lines {
                continue;
            }
            let mut put = |c: char| match waiting {
                Some(value) => value.push(c),
                None => escape(c, &mut json),
            };
            if std::mem::take(line) {
                put('\n');
            }
            if c == '\n' && self.elements.lines {
                *line = true;
            } else {
                put(c);
            }
        }
        if waiting.is_some() {
            self.raw.push(c);
        }
        match waiting {
            Some(value) if found.is_some() => {
                json = std::mem::take(key) + &kinds.json(&value.text);
            }
            Some(value) if value.text.len() > VALUE_BYTES_MAX => {
                json = std::mem::take(key);
                json.push('"');
                value.text.chars().for_each(|c| escape(c, &mut json));
                *waiting = None;
            }
            Some(_) => return,
            None if found.is_some() => json.push('"'),
            None => {}
        }
        out.call_arguments(&json);
        self.raw.clear();
        if found.is_some() {
            self.at = At::Between(Marks::new(self.elements.opens));
        }
    }
}

impl Arguments for XmlArguments {
    fn push(&mut self, c: char, out: &mut Pieces) -> Step {
        if !std::mem::replace(&mut self.begun, true) {
            out.call_arguments("{");
        }
        match std::mem::replace(&mut self.at, At::Key(String::new())) {
            At::Between(marks) => self.between(marks, c, out),
            At::Key(text) => self.key(text, c, out),
            value @ At::Value { .. } => {
                self.at = value;
                self.value(c, out);
                Step::More
            }
        }
    }

    fn take_raw(&mut self) -> String {
        let mut raw = std::mem::take(&mut self.raw);
        if let At::Value { close, waiting: None, line, .. } = &mut self.at {
            if *line {
                raw.push('\n');
            }
            raw.push_str(&close.take_held());
        }
        raw
    }
}
