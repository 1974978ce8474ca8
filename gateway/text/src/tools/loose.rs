//! Arguments written as literals that are not JSON, read into JSON: Python's keyword arguments (`a=1, b='x')`) and
//! Gemma's maps with bare keys (`a:1,b:<escape>x<escape>}`).
//!
//! Both are read by one machine with a stack of open brackets. Strings come out character by character; numbers and
//! words wait for their end.

use std::sync::Arc;

use super::{
    CallableTool,
    callable::{Kinds, escape, kinds},
    frame::{Arguments, Step},
    marks::Marks,
};
use crate::piece::Pieces;

/// Deepest nesting, the arguments themselves included.
const DEPTH_MAX: usize = 127;
/// Longest number, word or key in bytes.
const WORD_BYTES_MAX: usize = 512;
/// Longest string in Gemma's form whose schema asks for another type, in bytes; a longer one stays a string.
const VALUE_BYTES_MAX: usize = 1 << 16;

/// Way of writing strings and keys.
#[derive(Clone, Copy)]
pub(super) enum Dialect {
    /// Python: strings in quotes with escapes, `True`, `None`, keyword arguments.
    Python,
    /// Gemma: strings between two equal marks (as given) without escapes, bare keys.
    Gemma(&'static [&'static str]),
}

/// One open bracket.
struct Level {
    close: char,
    /// Whether keys stand in front of the values.
    keyed: bool,
    items: usize,
}

enum At {
    /// In front of a key, a value without one, or the closing bracket.
    Item,
    /// In a bare key or, in Python's arguments, a word that may turn out to be a value.
    Name(String),
    /// Behind a key in quotes, or blanks behind a bare one (which then is given).
    Colon(Option<String>),
    Value,
    /// Behind a value: a comma or the closing bracket.
    After,
    Word(String),
    /// In a string with escapes, with its quote.
    Quoted {
        quote: char,
        key: bool,
    },
    Escape {
        quote: char,
        key: bool,
    },
    /// In an escape with this many digits left, in this base.
    Digits {
        quote: char,
        key: bool,
        value: u32,
        left: u8,
        base: u32,
    },
    /// In a string between marks; a value of a parameter of other types waits in `waiting`.
    Marked {
        close: Marks,
        waiting: Option<(Kinds, String)>,
    },
    /// In a mark in front of a string.
    Opening(Marks),
}

/// Reader of one call's arguments, behind the opening bracket.
pub(super) struct LooseArguments {
    dialect: Dialect,
    name: String,
    tools: Arc<[CallableTool]>,
    at: At,
    levels: Vec<Level>,
    /// Name of the parameter whose value is read.
    parameter: String,
    /// First half of a character that Python's text escapes in two halves, as JSON does.
    surrogate: Option<u32>,
    /// Text that has come out in no form.
    held: String,
    /// True if the opening bracket has come out.
    begun: bool,
}

impl LooseArguments {
    pub(super) fn new(dialect: Dialect, name: &str, tools: &Arc<[CallableTool]>) -> Self {
        let close = if matches!(dialect, Dialect::Python) { ')' } else { '}' };
        Self {
            dialect,
            name: name.to_owned(),
            tools: tools.clone(),
            at: At::Item,
            levels: vec![Level { close, keyed: true, items: 0 }],
            parameter: String::new(),
            surrogate: None,
            held: String::new(),
            begun: false,
        }
    }

    fn python(&self) -> bool {
        matches!(self.dialect, Dialect::Python)
    }

    fn emit(&mut self, json: &str, out: &mut Pieces) {
        self.held.clear();
        out.call_arguments(json);
    }

    /// Takes a character that tells nothing yet.
    fn hold(&mut self, c: char, at: At) -> Step {
        self.held.push(c);
        self.at = at;
        Step::More
    }

    /// Text in front of the next item: a comma, if one is needed.
    fn separator(&mut self) -> &'static str {
        let Some(level) = self.levels.last_mut() else { return "" };
        level.items += 1;
        if level.items > 1 { "," } else { "" }
    }

    fn keyed(&self) -> bool {
        self.levels.last().is_some_and(|level| level.keyed)
    }

    fn item(&mut self, c: char, out: &mut Pieces) -> Step {
        match c {
            _ if c.is_whitespace() => self.hold(c, At::Item),
            _ if self.levels.last().is_some_and(|level| level.close == c) => self.close(c, out),
            _ if !self.keyed() => self.value(c, out),
            '"' | '\'' if self.levels.len() > 1 || !self.python() => {
                let separator = self.separator();
                self.emit(&format!("{separator}\""), out);
                self.at = At::Quoted { quote: c, key: true };
                Step::More
            }
            _ if in_word(c) && (self.levels.len() == 1 || !self.python()) => self.hold(c, At::Name(c.into())),
            _ if self.levels.len() == 1 && self.python() => self.positional(c, out),
            _ => Step::Bad,
        }
    }

    /// Begins an argument without a name: the parameter of the schema in its place.
    fn positional(&mut self, c: char, out: &mut Pieces) -> Step {
        if !self.place(out) {
            return Step::Bad;
        }
        self.value(c, out)
    }

    /// Emits the key of the argument in the next place; false if the schema names none.
    fn place(&mut self, out: &mut Pieces) -> bool {
        let place = self.levels.first().map_or(0, |level| level.items);
        let tools = self.tools.clone();
        let tool = tools.iter().find(|tool| tool.name == self.name);
        let Some(name) = tool.and_then(|tool| tool.properties()?.keys().nth(place)) else { return false };
        self.key(name, out);
        true
    }

    fn key(&mut self, name: &str, out: &mut Pieces) {
        let mut json = format!("{}\"", self.separator());
        name.chars().for_each(|c| escape(c, &mut json));
        json.push_str("\":");
        name.clone_into(&mut self.parameter);
        self.emit(&json, out);
        self.at = At::Value;
    }

    fn name(&mut self, mut name: String, c: char, out: &mut Pieces) -> Step {
        let assign = if self.python() { '=' } else { ':' };
        if c == assign {
            self.key(&name, out);
            return Step::More;
        }
        if in_word(c) && name.len() < WORD_BYTES_MAX {
            name.push(c);
            return self.hold(c, At::Name(name));
        }
        if c.is_whitespace() {
            return self.hold(c, At::Colon(Some(name)));
        }
        if self.python() && matches!(c, ',' | ')') && word(&name).is_some() {
            // A word in the place of an argument.
            let held = self.held.clone();
            if self.place(out) {
                self.held = held;
                return self.word(&name, c, out);
            }
        }
        Step::Bad
    }

    fn colon(&mut self, name: Option<String>, c: char, out: &mut Pieces) -> Step {
        let assign = if self.python() && self.levels.len() == 1 { '=' } else { ':' };
        if c.is_whitespace() {
            return self.hold(c, At::Colon(name));
        }
        if c != assign {
            return Step::Bad;
        }
        match name {
            Some(name) => self.key(&name, out),
            None => {
                self.emit(":", out);
                self.at = At::Value;
            }
        }
        Step::More
    }

    fn value(&mut self, c: char, out: &mut Pieces) -> Step {
        if c.is_whitespace() {
            return self.hold(c, At::Value);
        }
        // Behind a key the separator is out already.
        let separator = if self.keyed() { "" } else { self.separator() };
        match c {
            '"' | '\'' if self.python() || c == '"' => {
                self.emit(&format!("{separator}\""), out);
                self.at = At::Quoted { quote: c, key: false };
                Step::More
            }
            '[' | '(' | '{' if self.levels.len() < DEPTH_MAX && (self.python() || c != '(') => {
                let keyed = c == '{';
                self.emit(&format!("{separator}{}", if keyed { '{' } else { '[' }), out);
                let close = match c {
                    '[' => ']',
                    '(' => ')',
                    _ => '}',
                };
                self.levels.push(Level { close, keyed, items: 0 });
                self.at = At::Item;
                Step::More
            }
            _ => {
                if let Dialect::Gemma(marks) = self.dialect
                    && marks.iter().any(|mark| mark.starts_with(c))
                {
                    out.call_arguments(separator);
                    let mut open = Marks::new(marks);
                    _ = open.push(c, &mut String::new());
                    return self.hold(c, At::Opening(open));
                }
                if in_word(c) || matches!(c, '+') || (!self.python() && !matches!(c, ',' | '}' | ']' | '{' | '(')) {
                    out.call_arguments(separator);
                    return self.hold(c, At::Word(c.into()));
                }
                Step::Bad
            }
        }
    }

    fn opening(&mut self, mut open: Marks, c: char, out: &mut Pieces) -> Step {
        let Dialect::Gemma(marks) = self.dialect else { return Step::Bad };
        let mut free = String::new();
        if open.push(c, &mut free).is_none() {
            return if free.is_empty() { self.hold(c, At::Opening(open)) } else { Step::Bad };
        }
        let top = self.levels.len() == 1;
        let kinds = if top { kinds(&self.tools, &self.name, &self.parameter) } else { Kinds::STRING };
        let waiting = (kinds != Kinds::STRING && kinds != Kinds::ANY).then(|| (kinds, String::new()));
        if waiting.is_some() {
            self.held.push(c);
        } else {
            self.emit("\"", out);
        }
        self.at = At::Marked { close: Marks::new(marks), waiting };
        Step::More
    }

    fn marked(&mut self, c: char, out: &mut Pieces) -> Step {
        let At::Marked { close, waiting } = &mut self.at else { return Step::Bad };
        let mut free = String::new();
        let found = close.push(c, &mut free).is_some();
        let mut json = String::new();
        match waiting {
            Some((kinds, value)) => {
                value.push_str(&free);
                if found {
                    json = kinds.json(value);
                } else if value.len() > VALUE_BYTES_MAX {
                    json.push('"');
                    value.chars().for_each(|c| escape(c, &mut json));
                    *waiting = None;
                    self.held.clear();
                } else {
                    self.held.push(c);
                    return Step::More;
                }
            }
            None => {
                free.chars().for_each(|c| escape(c, &mut json));
                if found {
                    json.push('"');
                }
            }
        }
        out.call_arguments(&json);
        self.held.clear();
        if found {
            self.at = At::After;
        }
        Step::More
    }

    fn after(&mut self, c: char, out: &mut Pieces) -> Step {
        match c {
            ',' => self.hold(c, At::Item),
            _ if c.is_whitespace() => self.hold(c, At::After),
            _ if self.levels.last().is_some_and(|level| level.close == c) => self.close(c, out),
            _ => Step::Bad,
        }
    }

    fn close(&mut self, _c: char, out: &mut Pieces) -> Step {
        let keyed = self.levels.pop().is_some_and(|level| level.keyed);
        self.emit(if keyed { "}" } else { "]" }, out);
        self.at = At::After;
        if self.levels.is_empty() { Step::Done } else { Step::More }
    }

    /// In a number or word; a character behind it ends it.
    fn in_word(&mut self, mut word: String, c: char, out: &mut Pieces) -> Step {
        let goes_on = if self.python() { in_word(c) || c == '+' } else { !matches!(c, ',' | '}' | ']') };
        if !goes_on {
            return self.word(&word, c, out);
        }
        if word.len() >= WORD_BYTES_MAX {
            return Step::Bad;
        }
        word.push(c);
        self.hold(c, At::Word(word))
    }

    fn word(&mut self, written: &str, c: char, out: &mut Pieces) -> Step {
        let json = match (word(written.trim()), self.dialect) {
            (Some(json), Dialect::Gemma(_)) if self.levels.len() == 1 => {
                let kinds = kinds(&self.tools, &self.name, &self.parameter);
                if kinds == Kinds::STRING { kinds.json(written.trim()) } else { json }
            }
            (Some(json), _) => json,
            // A bare word of Gemma's is a string.
            (None, Dialect::Gemma(_)) => Kinds::STRING.json(written.trim()),
            (None, Dialect::Python) => return Step::Bad,
        };
        self.emit(&json, out);
        self.at = At::After;
        self.after(c, out)
    }

    fn quoted(&mut self, quote: char, key: bool, c: char, out: &mut Pieces) -> Step {
        match c {
            '\\' => return self.hold(c, At::Escape { quote, key }),
            _ if c == quote => {
                self.lone_surrogate(out);
                self.emit("\"", out);
                self.at = if key { At::Colon(None) } else { At::After };
            }
            // A line break ends no string here: models write them, and Python would refuse the text.
            _ => self.character(quote, key, u32::from(c), out),
        }
        Step::More
    }

    /// Emits one character of a string.
    fn character(&mut self, quote: char, key: bool, code: u32, out: &mut Pieces) {
        self.at = At::Quoted { quote, key };
        if let (Some(high), 0xDC00..=0xDFFF) = (self.surrogate, code) {
            self.surrogate = None;
            return self.character(quote, key, 0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00), out);
        }
        self.lone_surrogate(out);
        if (0xD800..=0xDBFF).contains(&code) {
            self.surrogate = Some(code);
            return;
        }
        let mut json = String::new();
        escape(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), &mut json);
        self.emit(&json, out);
    }

    /// Emits a half of a character whose other half does not follow: no text can hold it.
    fn lone_surrogate(&mut self, out: &mut Pieces) {
        if self.surrogate.take().is_some() {
            self.emit("\u{fffd}", out);
        }
    }

    fn escape(&mut self, quote: char, key: bool, c: char, out: &mut Pieces) -> Step {
        let code = match c {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'b' => '\x08',
            'f' => '\x0c',
            'v' => '\x0b',
            'a' => '\x07',
            '\\' | '\'' | '"' | '/' => c,
            '\n' => {
                self.held.clear();
                self.at = At::Quoted { quote, key };
                return Step::More;
            }
            'x' | 'u' | 'U' | '0'..='7' => {
                let (value, left, base) = match c {
                    'x' => (0, 2, 16),
                    'u' => (0, 4, 16),
                    'U' => (0, 8, 16),
                    _ => (c.to_digit(8).unwrap_or(0), 2, 8),
                };
                return self.hold(c, At::Digits { quote, key, value, left, base });
            }
            _ => {
                // Python keeps the backslash of an escape that it does not know.
                self.character(quote, key, u32::from('\\'), out);
                c
            }
        };
        self.character(quote, key, u32::from(code), out);
        Step::More
    }
}

impl Arguments for LooseArguments {
    fn push(&mut self, c: char, out: &mut Pieces) -> Step {
        if !std::mem::replace(&mut self.begun, true) {
            out.call_arguments("{");
        }
        match std::mem::replace(&mut self.at, At::Value) {
            At::Item => self.item(c, out),
            At::Name(name) => self.name(name, c, out),
            At::Colon(name) => self.colon(name, c, out),
            At::Value => self.value(c, out),
            At::After => self.after(c, out),
            At::Word(word) => self.in_word(word, c, out),
            At::Quoted { quote, key } => self.quoted(quote, key, c, out),
            At::Escape { quote, key } => self.escape(quote, key, c, out),
            At::Digits { quote, key, value, left, base } => match c.to_digit(base) {
                Some(digit) => {
                    let value = value.wrapping_mul(base).wrapping_add(digit);
                    if left > 1 {
                        return self.hold(c, At::Digits { quote, key, value, left: left - 1, base });
                    }
                    self.character(quote, key, value, out);
                    Step::More
                }
                // An octal escape may be shorter.
                None if base == 8 => {
                    self.character(quote, key, value, out);
                    self.push(c, out)
                }
                None => Step::Bad,
            },
            at @ At::Marked { .. } => {
                self.at = at;
                self.marked(c, out)
            }
            At::Opening(open) => self.opening(open, c, out),
        }
    }

    fn take_raw(&mut self) -> String {
        let mut raw = std::mem::take(&mut self.held);
        if let At::Marked { close, waiting: None } = &mut self.at {
            raw.push_str(&close.take_held());
        }
        raw
    }
}

fn in_word(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.')
}

/// JSON text of a number or a word of Python's or JSON's; `None` if it is neither.
fn word(written: &str) -> Option<String> {
    match written {
        "True" | "true" => return Some("true".into()),
        "False" | "false" => return Some("false".into()),
        "None" | "null" => return Some("null".into()),
        _ => {}
    }
    if serde_json::from_str::<serde_json::Number>(written).is_ok() {
        return Some(written.into());
    }
    // Python's forms that JSON lacks: `+1`, `.5`, `1.`, `1_000`.
    let plain: String = written.strip_prefix('+').unwrap_or(written).replace('_', "");
    let plain = if let Some(digits) = plain.strip_prefix('.') { format!("0.{digits}") } else { plain };
    let plain = plain.strip_suffix('.').unwrap_or(&plain);
    let digits = plain.starts_with(|c: char| c.is_ascii_digit() || c == '-');
    (digits && serde_json::from_str::<serde_json::Number>(plain).is_ok()).then(|| plain.to_owned())
}

/// JSON text of a whole Python literal, a list, tuple or dictionary; `None` if it is none.
pub(super) fn python_value(text: &str) -> Option<String> {
    let mut reader = LooseArguments::new(Dialect::Python, "", &Arc::from([]));
    // Read as the value of an argument.
    let mut out = Pieces::default();
    reader.at = At::Value;
    reader.begun = true;
    let mut done = false;
    for c in text.chars() {
        if done || reader.push(c, &mut out) != Step::More {
            return None;
        }
        done = reader.levels.len() == 1 && matches!(reader.at, At::After);
    }
    let json = out.arguments();
    (done && serde_json::from_str::<serde::de::IgnoredAny>(&json).is_ok()).then_some(json)
}
