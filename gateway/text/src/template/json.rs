//! JSON: what requests carry, read with the numbers that Python reads, and `tojson`.

use std::{borrow::Cow, fmt::Write, sync::Arc};

use super::{
    RenderError,
    budget::{Budget, Run, TEXT_BYTES_MAX, fault},
    print,
    value::{Dict, Value},
};

/// A JSON document. Integers keep all their digits, as in Python, where `serde_json` would round them to a float.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads a document.
    ///
    /// # Errors
    /// The message of the reader: what is wrong and where.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(|error| error.to_string())?;
        Reader { text, at: 0 }.value(0)
    }

    /// The document as a template value; `text` is applied to every string, keys too.
    pub(crate) fn value<'a>(&'a self, text: &impl Fn(&'a str) -> Cow<'a, str>) -> Run<Value> {
        let budget = Budget::new();
        self.build(&budget, text)
    }

    fn build<'a>(&'a self, budget: &Budget, text: &impl Fn(&'a str) -> Cow<'a, str>) -> Run<Value> {
        let string = |value: &'a str| Value::Str(Arc::from(text(value).as_ref()));
        Ok(match self {
            Json::Null => Value::None,
            Json::Bool(value) => Value::Bool(*value),
            Json::Int(value) => Value::Int(*value),
            Json::Float(value) => Value::Float(*value),
            Json::Text(value) => string(value),
            Json::Array(items) => {
                budget.list(items.iter().map(|item| item.build(budget, text)).collect::<Run<_>>()?)?
            }
            Json::Object(entries) => {
                let entries = entries.iter().map(|(key, value)| Ok((string(key), value.build(budget, text)?)));
                Value::Dict(Dict::new(budget, entries.collect::<Run<Vec<_>>>()?)?.into())
            }
        })
    }

    /// Field of an object; `None` for other documents and without such a field.
    pub(crate) fn field(&self, name: &str) -> Option<&Json> {
        let Json::Object(entries) = self else { return None };
        entries.iter().rfind(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// All strings of the document, keys of objects too.
    pub(crate) fn strings(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match self {
            Json::Text(text) => Box::new(std::iter::once(text.as_str())),
            Json::Array(items) => Box::new(items.iter().flat_map(Json::strings)),
            Json::Object(entries) => {
                Box::new(entries.iter().flat_map(|(key, value)| std::iter::once(key.as_str()).chain(value.strings())))
            }
            _ => Box::new(std::iter::empty()),
        }
    }
}

/// Deepest nesting that is read, as with `serde_json`.
const DEPTH_MAX: usize = 127;

/// Reader of a text that is known to be JSON, apart from its depth and the escapes in its strings.
struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    /// The next byte that is not white space.
    fn peek(&mut self) -> u8 {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|b| b.is_ascii_whitespace()).count();
        self.text.as_bytes().get(self.at).copied().unwrap_or_default()
    }

    /// The text up to the first byte that `inside` refuses.
    fn take(&mut self, inside: impl Fn(u8) -> bool) -> &'a str {
        let start = self.at;
        self.at += self.text.as_bytes()[start..].iter().take_while(|&&b| inside(b)).count();
        &self.text[start..self.at]
    }

    fn value(&mut self, depth: usize) -> Result<Json, String> {
        if depth > DEPTH_MAX {
            return Err(format!("nested more than {DEPTH_MAX} levels at byte {}", self.at));
        }
        Ok(match self.peek() {
            b'{' => Json::Object(self.members(depth)?),
            b'[' => Json::Array(self.elements(depth)?),
            b'"' => Json::Text(self.string()?),
            b't' | b'f' | b'n' => match self.take(|b| b.is_ascii_alphabetic()) {
                "true" => Json::Bool(true),
                "false" => Json::Bool(false),
                _ => Json::Null,
            },
            _ => {
                let digits = self.take(|b| !b.is_ascii_whitespace() && !matches!(b, b',' | b']' | b'}'));
                let float = || Json::Float(digits.parse().unwrap_or(f64::NAN));
                let whole = !digits.contains(['.', 'e', 'E']);
                if whole { digits.parse().map_or_else(|_| float(), Json::Int) } else { float() }
            }
        })
    }

    fn elements(&mut self, depth: usize) -> Result<Vec<Json>, String> {
        let mut items = Vec::new();
        self.at += 1;
        while self.peek() != b']' {
            items.push(self.value(depth + 1)?);
            self.comma();
        }
        self.at += 1;
        Ok(items)
    }

    fn members(&mut self, depth: usize) -> Result<Vec<(String, Json)>, String> {
        let mut members = Vec::new();
        self.at += 1;
        while self.peek() != b'}' {
            let key = self.string()?;
            self.peek();
            self.at += 1;
            members.push((key, self.value(depth + 1)?));
            self.comma();
        }
        self.at += 1;
        Ok(members)
    }

    fn comma(&mut self) {
        if self.peek() == b',' {
            self.at += 1;
        }
    }

    fn string(&mut self) -> Result<String, String> {
        let start = self.at;
        self.at += 1;
        let bytes = self.text.as_bytes();
        while bytes[self.at] != b'"' {
            self.at += if bytes[self.at] == b'\\' { 2 } else { 1 };
        }
        self.at += 1;
        serde_json::from_str(&self.text[start..self.at]).map_err(|error| format!("string at byte {start}: {error}"))
    }
}

/// Options of `tojson`.
pub(super) struct Style {
    pub(super) ascii: bool,
    pub(super) sort: bool,
    pub(super) indent: Option<String>,
    pub(super) comma: Arc<str>,
    pub(super) colon: Arc<str>,
}

/// Python's `json.dumps` as transformers calls it: HTML characters are not escaped.
pub(super) fn dumps(budget: &Budget, value: &Value, style: &Style) -> Run<Value> {
    let mut writer = Writer { budget, style, out: String::new() };
    writer.value(value, 0)?;
    budget.text(writer.out)
}

/// Text of a value as `tojson` writes it without options.
pub(crate) fn text(budget: &Budget, value: &Value) -> Run<String> {
    let style = Style { ascii: false, sort: false, indent: None, comma: ", ".into(), colon: ": ".into() };
    let mut writer = Writer { budget, style: &style, out: String::new() };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer<'a> {
    budget: &'a Budget,
    style: &'a Style,
    out: String,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Run<()> {
        self.budget.step(1)?;
        if self.out.len() > TEXT_BYTES_MAX {
            return Err(RenderError::TooMuch);
        }
        match value {
            Value::None => self.out.push_str("null"),
            Value::Bool(value) => self.out.push_str(if *value { "true" } else { "false" }),
            Value::Int(value) => write!(self.out, "{value}").expect("writing to a string"),
            Value::Float(value) => self.out.push_str(&json_float(*value)),
            Value::Str(text) | Value::Markup(text) => self.string(text)?,
            Value::Dict(dict) => self.object(dict, depth)?,
            Value::List(seq) | Value::Tuple(seq) => self.array(&seq.items, depth)?,
            _ => return fault(format!("Object of type {} is not JSON serializable", value.kind())),
        }
        Ok(())
    }

    fn string(&mut self, text: &str) -> Run<()> {
        self.budget.scan(2 * text.len())?;
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.style.ascii && !(' '..='~').contains(&c) && !print::is_marker(c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.out, "\\u{unit:04x}").expect("writing to a string");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
        Ok(())
    }

    fn object(&mut self, dict: &Dict, depth: usize) -> Run<()> {
        let mut entries: Vec<&(Value, Value)> = dict.entries.iter().collect();
        if self.style.sort {
            let keyed = entries.iter().enumerate().map(|(place, (key, _))| (key.clone(), Value::Int(place as i128)));
            let sorted = super::compare::sort_by_key(self.budget, keyed.collect(), false)?;
            let place = |value: &Value| if let Value::Int(place) = value { *place as usize } else { 0 };
            entries = sorted.iter().map(|value| &dict.entries[place(value)]).collect();
        }
        self.out.push('{');
        for (index, (key, value)) in entries.into_iter().enumerate() {
            self.separate(index, depth + 1);
            match key {
                Value::Str(text) => self.string(text)?,
                Value::None => self.out.push_str("\"null\""),
                Value::Bool(value) => self.out.push_str(if *value { "\"true\"" } else { "\"false\"" }),
                Value::Int(value) => write!(self.out, "\"{value}\"").expect("writing to a string"),
                Value::Float(value) => write!(self.out, "\"{}\"", json_float(*value)).expect("writing to a string"),
                _ => return fault(format!("keys must be str, int, float, bool or None, not {}", key.kind())),
            }
            self.out.push_str(&self.style.colon);
            self.value(value, depth + 1)?;
        }
        self.close(dict.entries.len(), depth);
        self.out.push('}');
        Ok(())
    }

    fn array(&mut self, items: &[Value], depth: usize) -> Run<()> {
        self.out.push('[');
        for (index, item) in items.iter().enumerate() {
            self.separate(index, depth + 1);
            self.value(item, depth + 1)?;
        }
        self.close(items.len(), depth);
        self.out.push(']');
        Ok(())
    }

    fn separate(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(&self.style.comma);
        }
        self.line(depth);
    }

    fn close(&mut self, count: usize, depth: usize) {
        if count > 0 {
            self.line(depth);
        }
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }
}

fn json_float(value: f64) -> String {
    match value {
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        value if value.is_nan() => "NaN".into(),
        value => print::float(value),
    }
}
