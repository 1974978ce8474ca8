//! A strict JSON reader: one pass over borrowed text, no tree.
//!
//! A request can be many megabytes of messages, so only kept values are built: strings without escapes are borrowed,
//! unused values are checked and skipped, and callers stop at their bound instead of after the last element. Cost is
//! linear in the bytes read. Stricter than RFC 8259: nesting is at most [`DEPTH_MAX`] levels, a lone surrogate is a
//! fault (it is no text), and so is anything after the value.
//!
//! Deliberately absent: numbers as `f64` only (a seed has 64 bits), recovery, any allocation for a skipped value.

use std::borrow::Cow;

use crate::error::{ApiError, ApiErrorKind};
use crate::json_text::{plain_run, unescaped};

/// Levels of arrays and objects in a body, the body's own object included.
pub const DEPTH_MAX: usize = 64;

/// Error that stops the reading.
#[derive(Debug)]
pub enum Fault {
    /// Not JSON, from byte `at` on.
    Syntax {
        /// Offset of the first byte at fault.
        at: usize,
        /// The defect in words, for the client.
        what: &'static str,
    },
    /// JSON, but not a request. Its `param` grows outwards while the fault travels up ([`Within`]).
    Refused(ApiError),
}

impl Fault {
    /// Makes a fault of the value being read; the caller's [`Within`] adds the name.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::of(ApiErrorKind::Invalid, message)
    }

    /// Makes a fault of any kind, otherwise as [`Fault::invalid`].
    pub fn of(kind: ApiErrorKind, message: impl Into<String>) -> Self {
        Fault::Refused(ApiError { kind, param: None, message: message.into() })
    }

    /// Converts into the error for the client; its message begins with the parameter.
    pub fn into_error(self) -> ApiError {
        match self {
            Fault::Syntax { at, what } => {
                ApiError::malformed(format!("The body is not valid JSON: {what} at byte {at}."))
            }
            Fault::Refused(mut error) => {
                if let Some(param) = &error.param {
                    error.message = format!("{param}: {}", error.message);
                }
                error
            }
        }
    }
}

/// Adds the name of the value being read to a fault that leaves it.
pub trait Within {
    /// Adds the name of an object's field.
    fn within(self, name: &str) -> Self;
    /// Adds the index of an array's element.
    fn at(self, index: usize) -> Self;
}

impl<T> Within for Result<T, Fault> {
    fn within(self, name: &str) -> Self {
        self.map_err(|fault| prefixed(fault, || short(name)))
    }

    fn at(self, index: usize) -> Self {
        self.map_err(|fault| prefixed(fault, || format!("[{index}]")))
    }
}

fn prefixed(fault: Fault, name: impl FnOnce() -> String) -> Fault {
    let Fault::Refused(mut error) = fault else { return fault };
    let mut path = name();
    if let Some(inner) = &error.param {
        if !inner.starts_with('[') {
            path.push('.');
        }
        path.push_str(inner);
    }
    error.param = Some(path);
    Fault::Refused(error)
}

/// First 64 characters of a client's text, safe to repeat in a message.
pub fn short(text: &str) -> String {
    const CHARS: usize = 64;
    match text.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Kind of a JSON value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool,
    /// A number.
    Number,
    /// A string.
    String,
    /// An array.
    Array,
    /// An object.
    Object,
}

impl Kind {
    /// Name of the kind with its article, for error messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Null => "null",
            Kind::Bool => "a boolean",
            Kind::Number => "a number",
            Kind::String => "a string",
            Kind::Array => "an array",
            Kind::Object => "an object",
        }
    }
}

/// A value that was checked and skipped, not parsed.
pub struct Raw<'a> {
    /// Text of the value as it was written, JSON.
    pub text: &'a str,
    /// Levels of nesting in the value; 0 for a scalar.
    pub depth: usize,
}

/// A cursor over the text of one JSON value.
pub struct Reader<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    /// Deepest level since it was last reset by [`Reader::raw`].
    deepest: usize,
}

impl<'a> Reader<'a> {
    /// Creates a reader at the beginning of `body`, which must be UTF-8.
    pub fn new(body: &'a [u8]) -> Result<Self, Fault> {
        match std::str::from_utf8(body) {
            Ok(text) => Ok(Self { text, at: 0, depth: 0, deepest: 0 }),
            Err(error) => Err(Fault::Syntax { at: error.valid_up_to(), what: "invalid UTF-8" }),
        }
    }

    /// Bytes read so far: after [`Reader::kind`], the start of the next value.
    pub fn position(&self) -> usize {
        self.at
    }

    /// The kind of the next value, which stays unread.
    pub fn kind(&mut self) -> Result<Kind, Fault> {
        self.space();
        Ok(match self.next_byte() {
            Some(b'n') => Kind::Null,
            Some(b't' | b'f') => Kind::Bool,
            Some(b'"') => Kind::String,
            Some(b'[') => Kind::Array,
            Some(b'{') => Kind::Object,
            Some(b'-' | b'0'..=b'9') => Kind::Number,
            Some(b'N' | b'I') => return Err(self.syntax("NaN and Infinity are not JSON")),
            Some(_) => return Err(self.syntax("expected a value")),
            None => return Err(self.syntax("unexpected end")),
        })
    }

    /// Refuses the next value unless it is of the `wanted` kind.
    pub fn expect(&mut self, wanted: Kind) -> Result<(), Fault> {
        let kind = self.kind()?;
        if kind == wanted { Ok(()) } else { Err(mismatch(wanted.name(), kind)) }
    }

    /// Reads an object: `field` reads each value. Duplicate names are the caller's business ([`Names`]).
    pub fn object(&mut self, mut field: impl FnMut(&mut Self, Cow<'a, str>) -> Result<(), Fault>) -> Result<(), Fault> {
        self.expect(Kind::Object)?;
        self.open()?;
        if self.closes(b'}') {
            return Ok(());
        }
        loop {
            self.space();
            if self.next_byte() != Some(b'"') {
                return Err(self.syntax("expected a field name in double quotes"));
            }
            let name = self.string()?;
            self.space();
            if self.next_byte() != Some(b':') {
                return Err(self.syntax("expected ':'"));
            }
            self.at += 1;
            field(self, name)?;
            if self.separated(b'}', "expected ',' or '}'")? {
                return Ok(());
            }
        }
    }

    /// Reads an array: `item` reads each element and gets its index.
    pub fn array(&mut self, mut item: impl FnMut(&mut Self, usize) -> Result<(), Fault>) -> Result<(), Fault> {
        self.expect(Kind::Array)?;
        self.open()?;
        if self.closes(b']') {
            return Ok(());
        }
        for index in 0.. {
            item(self, index)?;
            if self.separated(b']', "expected ',' or ']'")? {
                break;
            }
        }
        Ok(())
    }

    /// Reads a string; borrowed unless it has escapes.
    pub fn string(&mut self) -> Result<Cow<'a, str>, Fault> {
        self.expect(Kind::String)?;
        let start = self.at + 1;
        let mut end = start;
        let mut escaped = false;
        loop {
            end += plain_run(&self.text.as_bytes()[end..]);
            match self.text.as_bytes().get(end) {
                Some(b'"') => break,
                Some(b'\\') => {
                    escaped = true;
                    end = (end + 2).min(self.text.len());
                }
                Some(_) => return Err(Fault::Syntax { at: end, what: "a control character in a string" }),
                None => return Err(Fault::Syntax { at: end, what: "unexpected end in a string" }),
            }
        }
        self.at = end + 1;
        // `start` and `end` sit beside ASCII bytes, so they are character boundaries.
        let inner = &self.text[start..end];
        if escaped { unescaped(inner, start).map(Cow::Owned) } else { Ok(Cow::Borrowed(inner)) }
    }

    /// Reads a number and returns its text as the client wrote it.
    pub fn number(&mut self) -> Result<&'a str, Fault> {
        self.expect(Kind::Number)?;
        let start = self.at;
        if self.next_byte() == Some(b'-') {
            self.at += 1;
        }
        match self.next_byte() {
            Some(b'0') => self.at += 1,
            Some(b'1'..=b'9') => self.digits()?,
            Some(b'I') => return Err(self.syntax("NaN and Infinity are not JSON")),
            _ => return Err(self.syntax("expected a digit")),
        }
        if self.next_byte().is_some_and(|byte| byte.is_ascii_digit()) {
            return Err(self.syntax("a number with a leading zero"));
        }
        if self.next_byte() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.next_byte(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.next_byte(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(&self.text[start..self.at])
    }

    /// Reads a boolean, `true` or `false`.
    pub fn boolean(&mut self) -> Result<bool, Fault> {
        self.expect(Kind::Bool)?;
        if self.next_byte() == Some(b't') {
            self.word("true").map(|()| true)
        } else {
            self.word("false").map(|()| false)
        }
    }

    /// Reads the value if it is `null`; false, with nothing read, if it is not.
    pub fn null(&mut self) -> Result<bool, Fault> {
        if self.kind()? != Kind::Null {
            return Ok(false);
        }
        self.word("null").map(|()| true)
    }

    /// Checks any value and skips it.
    pub fn skip(&mut self) -> Result<(), Fault> {
        match self.kind()? {
            Kind::Null => self.word("null"),
            Kind::Bool => self.boolean().map(|_| ()),
            Kind::Number => self.number().map(|_| ()),
            Kind::String => self.string().map(|_| ()),
            Kind::Array => self.array(|reader, _| reader.skip()),
            Kind::Object => self.object(|reader, _| reader.skip()),
        }
    }

    /// Checks any value, skips it and returns its text.
    pub fn raw(&mut self) -> Result<Raw<'a>, Fault> {
        self.kind()?;
        let start = self.at;
        self.deepest = self.depth;
        self.skip()?;
        Ok(Raw { text: &self.text[start..self.at], depth: self.deepest - self.depth })
    }

    /// Refuses anything after the value.
    pub fn end(&mut self) -> Result<(), Fault> {
        self.space();
        if self.at == self.text.len() { Ok(()) } else { Err(self.syntax("something follows the JSON value")) }
    }

    fn next_byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.next_byte(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    fn syntax(&self, what: &'static str) -> Fault {
        Fault::Syntax { at: self.at, what }
    }

    fn open(&mut self) -> Result<(), Fault> {
        if self.depth == DEPTH_MAX {
            return Err(self.syntax("nested deeper than 64 levels"));
        }
        self.at += 1;
        self.depth += 1;
        self.deepest = self.deepest.max(self.depth);
        Ok(())
    }

    fn closes(&mut self, close: u8) -> bool {
        self.space();
        let closes = self.next_byte() == Some(close);
        if closes {
            self.at += 1;
            self.depth -= 1;
        }
        closes
    }

    /// Reads the separator after an element: `true` at the end of the container, `false` after a comma.
    fn separated(&mut self, close: u8, what: &'static str) -> Result<bool, Fault> {
        if self.closes(close) {
            return Ok(true);
        }
        match self.next_byte() {
            Some(b',') => {
                self.at += 1;
                Ok(false)
            }
            Some(_) => Err(self.syntax(what)),
            None => Err(self.syntax("unexpected end")),
        }
    }

    fn digits(&mut self) -> Result<(), Fault> {
        let count = self.text.as_bytes()[self.at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += count;
        if count == 0 { Err(self.syntax("expected a digit")) } else { Ok(()) }
    }

    fn word(&mut self, word: &'static str) -> Result<(), Fault> {
        if !self.text[self.at..].starts_with(word) {
            return Err(self.syntax("expected a value"));
        }
        self.at += word.len();
        Ok(())
    }
}

/// Fault of a value of the wrong kind: "expected a string, got a number".
pub fn mismatch(wanted: &str, kind: Kind) -> Fault {
    Fault::invalid(format!("expected {wanted}, got {}", kind.name()))
}

/// Names met in one object so far: at most `max`, none twice. Each new name is compared with all, so `max` must be
/// small.
pub struct Names<'a> {
    seen: Vec<Cow<'a, str>>,
    max: usize,
}

impl<'a> Names<'a> {
    /// An empty set that takes up to `max` names.
    pub fn new(max: usize) -> Self {
        Self { seen: Vec::new(), max }
    }

    /// Refuses a duplicate name, and a name beyond the bound.
    #[expect(clippy::ptr_arg, reason = "a borrowed name stays borrowed")]
    pub fn add(&mut self, name: &Cow<'a, str>) -> Result<(), Fault> {
        if self.seen.contains(name) {
            return Err(Fault::invalid("this field is given twice")).within(name);
        }
        if self.seen.len() == self.max {
            return Err(Fault::of(ApiErrorKind::TooLarge, format!("more than {} fields in one object", self.max)));
        }
        self.seen.push(name.clone());
        Ok(())
    }
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
