//! Python semantics that templates rely on: JSON with Python's separators, methods of `str`, iterability.

use std::fmt::Write;

use minijinja::{
    Environment, Error, ErrorKind, State, Value as Jinja,
    value::{Kwargs, ValueKind, from_args},
};
use serde_json::Value;

/// Payload that distinguishes an error of `raise_exception` from a fault of the template.
#[derive(Debug)]
struct Refusal(String);

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// Message of `raise_exception`, however deep in macros.
pub(super) fn refusal(error: &Error) -> Option<&str> {
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(Refusal(words)) = inner.downcast_ref() {
            return Some(words);
        }
        source = inner.source();
    }
    None
}

pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Jinja| python_text(value));
    environment.set_formatter(|out, _, value| match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Number => Ok(out.write_str(&python_text(value))?),
        _ => Ok(write!(out, "{value}")?),
    });
    environment.add_function("raise_exception", |message: &str| -> Result<Jinja, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Refusal(message.to_owned())))
    });
    let container = |value: &Jinja| matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String);
    environment.add_test("iterable", move |value: &Jinja| container(value) || value.kind() == ValueKind::Iterable);
    environment.add_test("sequence", move |value: &Jinja| container(value) || value.kind() == ValueKind::Iterable);
}

/// JSON data as a template value; `text` is applied to every string, keys too.
pub(crate) fn jinja_value<'a>(json: &'a Value, text: &impl Fn(&'a str) -> std::borrow::Cow<'a, str>) -> Jinja {
    match json {
        Value::Null => Jinja::from(()),
        Value::Bool(value) => Jinja::from(*value),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Jinja::from(value),
            (_, Some(value)) => Jinja::from(value),
            _ => Jinja::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(value) => Jinja::from(text(value).as_ref()),
        Value::Array(items) => items.iter().map(|item| jinja_value(item, text)).collect(),
        Value::Object(map) => {
            map.iter().map(|(key, value)| (text(key).into_owned(), jinja_value(value, text))).collect()
        }
    }
}

/// Python methods that templates call and that minijinja-contrib leaves out.
fn method(state: &State<'_, '_>, value: &Jinja, name: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args);
    };
    let affix = || -> Result<&str, Error> { Ok(from_args::<(&str,)>(args)?.0) };
    let list = |parts: Vec<&str>| parts.into_iter().map(Jinja::from).collect::<Jinja>();
    match name {
        "removeprefix" => Ok(text.strip_prefix(affix()?).unwrap_or(text).into()),
        "removesuffix" => Ok(text.strip_suffix(affix()?).unwrap_or(text).into()),
        "partition" => {
            let separator = affix()?;
            let (before, after) = text.split_once(separator).unwrap_or((text, ""));
            let found = if before.len() == text.len() { "" } else { separator };
            Ok(list(vec![before, found, after]))
        }
        "rpartition" => {
            let separator = affix()?;
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            let found = if after.len() == text.len() { "" } else { separator };
            Ok(list(vec![before, found, after]))
        }
        "rsplit" => {
            let (separator, most): (&str, Option<usize>) = from_args(args)?;
            let mut parts: Vec<&str> = match most {
                Some(most) => text.rsplitn(most.saturating_add(1), separator).collect(),
                None => text.rsplit(separator).collect(),
            };
            parts.reverse();
            Ok(list(parts))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// `tojson` of transformers: Python's `json.dumps(x, ensure_ascii=False)`, HTML characters unescaped.
#[expect(clippy::needless_pass_by_value, reason = "the signature that minijinja calls")]
fn tojson(value: &Jinja, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Jinja> = options.get("indent")?;
    let indent = match indent {
        Some(indent) if !indent.is_none() => Some(usize::try_from(indent)?.min(16)),
        _ => None,
    };
    let separators: Option<Vec<String>> = options.get::<Option<Jinja>>("separators")?.and_then(|pair| {
        let pair: Vec<String> = pair.try_iter().ok()?.filter_map(|part| part.as_str().map(str::to_owned)).collect();
        (pair.len() == 2).then_some(pair)
    });
    let mut json = Json {
        out: String::new(),
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        comma: if indent.is_some() { ",".into() } else { ", ".into() },
        colon: ": ".into(),
    };
    if let Some([comma, colon]) = separators.as_deref() {
        json.comma.clone_from(comma);
        json.colon.clone_from(colon);
    }
    options.assert_all_used()?;
    json.value(value, 0)?;
    Ok(json.out)
}

struct Json {
    out: String,
    ascii: bool,
    sort: bool,
    indent: Option<usize>,
    comma: String,
    colon: String,
}

impl Json {
    fn value(&mut self, value: &Jinja, depth: usize) -> Result<(), Error> {
        // Deeper than any JSON that a request may carry.
        if depth > 200 {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map => self.object(value, depth)?,
            ValueKind::Seq | ValueKind::Iterable => self.array(value, depth)?,
            kind => return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: {kind} is not JSON"))),
        }
        Ok(())
    }

    fn number(&mut self, value: &Jinja) -> Result<(), Error> {
        if value.is_integer() {
            write!(self.out, "{value}").expect("writing to a string");
        } else {
            self.out.push_str(&python_float(f64::try_from(value.clone())?));
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
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
                // Markers of `control.rs` must stay recognizable: noncharacters are not escaped.
                c if c < ' ' || (self.ascii && !c.is_ascii() && !('\u{FDD0}'..='\u{FDEF}').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.out, "\\u{unit:04x}").expect("writing to a string");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    fn object(&mut self, value: &Jinja, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Jinja> = value.try_iter()?.collect();
        if self.sort {
            keys.sort();
        }
        self.out.push('{');
        for (index, key) in keys.iter().enumerate() {
            self.separate(index, depth + 1);
            match key.as_str() {
                Some(text) => self.string(text),
                None => self.string(&key.to_string()),
            }
            self.out.push_str(&self.colon.clone());
            self.value(&value.get_item(key)?, depth + 1)?;
        }
        self.close(keys.len(), depth);
        self.out.push('}');
        Ok(())
    }

    fn array(&mut self, value: &Jinja, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut count = 0;
        for item in value.try_iter()? {
            self.separate(count, depth + 1);
            self.value(&item, depth + 1)?;
            count += 1;
        }
        self.close(count, depth);
        self.out.push(']');
        Ok(())
    }

    fn separate(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(&self.comma.clone());
        }
        self.line(depth);
    }

    fn close(&mut self, count: usize, depth: usize) {
        if count > 0 {
            self.line(depth);
        }
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }
}

/// Text of a value as Python's `str(value)` writes it.
fn python_text(value: &Jinja) -> String {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Number => python_repr(value, &mut out, 0),
        _ => out = value.to_string(),
    }
    out
}

/// Appends plain data as Python's `repr(value)` writes it.
fn python_repr(value: &Jinja, out: &mut String, depth: usize) {
    if depth > 200 {
        return out.push('…');
    }
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
            out.push(quote);
            for c in text.chars() {
                match c {
                    '\n' => out.push_str("\\n"),
                    '\r' => out.push_str("\\r"),
                    '\t' => out.push_str("\\t"),
                    '\\' => out.push_str("\\\\"),
                    c if c == quote => out.extend(['\\', c]),
                    c => out.push(c),
                }
            }
            out.push(quote);
        }
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                python_repr(&item, out, depth + 1);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                python_repr(&key, out, depth + 1);
                out.push_str(": ");
                python_repr(&value.get_item(&key).unwrap_or_default(), out, depth + 1);
            }
            out.push('}');
        }
        ValueKind::Number if !value.is_integer() => {
            out.push_str(&python_float(f64::try_from(value.clone()).unwrap_or(f64::NAN)));
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// Python's `repr(float)`: shortest digits that read back; exponents below -4 and from 16 on.
fn python_float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            "NaN".into()
        } else if value > 0.0 {
            "Infinity".into()
        } else {
            "-Infinity".into()
        };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the format of {:e}");
    let exponent: i32 = exponent.parse().expect("the format of {:e}");
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}
