//! Parsed config text: a TOML document with spans, read key by key so that every fault is found, not just the first.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Fault, Faults, keys};
use penstock_base::clock;

/// Config file while it is read; collects the faults.
pub(super) struct Document<'a> {
    name: &'a str,
    text: &'a str,
    root: Spanned<DeTable<'a>>,
    faults: RefCell<Vec<Fault>>,
    /// Tables whose variables of the environment have to be set; `None`: those of all tables.
    needed: Option<&'a [&'a str]>,
}

/// Reader of one table; when dropped, reports keys of the file that nobody asked for.
pub(super) struct Reader<'d, 'a> {
    document: &'d Document<'a>,
    /// Name of the table in [`keys::TABLES`].
    table: &'static str,
    /// Path of the table for messages, as `pools[0]`.
    path: String,
    values: Option<&'d DeTable<'a>>,
    asked: RefCell<BTreeSet<&'static str>>,
    /// Allowed keys of an inline table, which `keys` does not list.
    inline: Option<&'static [&'static str]>,
    /// Byte range of the table in the file, for the line of a fault; `None`: not in the file.
    span: Option<Range<usize>>,
    /// Set after a fault: the caller may have stopped reading, so keys that were not asked for are no faults.
    is_faulty: Cell<bool>,
}

impl<'a> Document<'a> {
    /// Parses a text; syntax errors are recorded as faults. `needed`: tables whose environment variables have to be
    /// set; `None`: all tables.
    pub(super) fn parse(name: &'a str, text: &'a str, needed: Option<&'a [&'a str]>) -> Self {
        let (root, errors) = DeTable::parse_recoverable(text);
        let document = Self { name, text, root, faults: RefCell::new(Vec::new()), needed };
        for error in errors {
            document.fault(error.span(), "", error.message());
        }
        document
    }

    /// Records a fault at a position of the file.
    pub(super) fn fault(&self, span: Option<Range<usize>>, key: &str, message: impl Into<String>) {
        let line = span.map(|span| self.text[..span.start.min(self.text.len())].matches('\n').count() + 1);
        let place = line.map_or_else(|| self.name.to_owned(), |line| format!("{}:{line}", self.name));
        self.fault_at(&place, key, message);
    }

    /// Records a fault outside the file, as of a command line option.
    pub(super) fn fault_at(&self, place: &str, key: &str, message: impl Into<String>) {
        self.faults.borrow_mut().push(Fault { place: place.to_owned(), key: key.to_owned(), message: message.into() });
    }

    /// Reports top-level names that are not tables of the config.
    pub(super) fn check_tables(&self) {
        for (name, value) in self.root.get_ref() {
            match keys::TABLES.iter().find(|table| table.name == name.get_ref().as_ref()) {
                None => {
                    let known: Vec<_> = keys::TABLES.iter().map(|table| table.name).collect();
                    self.fault(Some(name.span()), name.get_ref(), unknown(name.get_ref(), &known));
                }
                Some(table) if table.many && !value.get_ref().is_array() => {
                    self.fault(Some(name.span()), table.name, format!("must be written [[{}]]", table.name));
                }
                Some(table) if !table.many && !value.get_ref().is_table() => {
                    self.fault(Some(name.span()), table.name, format!("must be a table: [{}]", table.name));
                }
                Some(_) => {}
            }
        }
    }

    /// Reader of the table `[table]`; an absent one reads as empty.
    pub(super) fn table(&self, table: &'static str) -> Reader<'_, 'a> {
        let mut values = Some(self.root.get_ref());
        for name in table.split('.') {
            values = values.and_then(|values| values.get(name)).and_then(|value| value.get_ref().as_table());
        }
        Reader::new(self, table, table.to_owned(), values)
    }

    /// Readers of all tables written `[[table]]`, in the order of the file.
    pub(super) fn tables(&self, table: &'static str) -> Vec<Reader<'_, 'a>> {
        let array = self.root.get_ref().get(table).and_then(|value| value.get_ref().as_array());
        let mut out = Vec::new();
        for (at, value) in array.into_iter().flat_map(|array| array.iter()).enumerate() {
            let path = format!("{table}[{at}]");
            match value.get_ref().as_table() {
                Some(values) => out.push(Reader::new(self, table, path, Some(values))),
                None => self.fault(Some(value.span()), &path, "must be a table"),
            }
        }
        out
    }

    /// Ends the reading: all faults that were recorded, or none.
    pub(super) fn finish(self) -> Result<(), Faults> {
        let faults = self.faults.into_inner();
        if faults.is_empty() { Ok(()) } else { Err(Faults(faults)) }
    }
}

impl<'d, 'a> Reader<'d, 'a> {
    fn new(document: &'d Document<'a>, table: &'static str, path: String, values: Option<&'d DeTable<'a>>) -> Self {
        Self {
            document,
            table,
            path,
            values,
            asked: RefCell::default(),
            inline: None,
            span: None,
            is_faulty: Cell::new(false),
        }
    }

    /// Readers of the inline tables in a list: `name = [{ … }, { … }]`. `names` are their allowed keys, which have no
    /// defaults.
    pub(super) fn inline(&self, name: &'static str, names: &'static [&'static str]) -> Vec<Reader<'d, 'a>> {
        let Some(value) = self.value(name) else { return Vec::new() };
        let Some(items) = value.get_ref().as_array() else {
            self.fault(name, "must be a list of tables: [{ … }]");
            return Vec::new();
        };
        let mut out = Vec::new();
        for (at, item) in items.iter().enumerate() {
            let path = format!("{}.{name}[{at}]", self.path);
            match item.get_ref().as_table() {
                Some(values) => {
                    let mut reader = Self::new(self.document, self.table, path, Some(values));
                    (reader.inline, reader.span) = (Some(names), Some(item.span()));
                    out.push(reader);
                }
                None => self.document.fault(Some(item.span()), &path, "must be a table: { … }"),
            }
        }
        out
    }

    /// Reader of one inline table: `name = { … }`.
    pub(super) fn inline_one(&self, name: &'static str, names: &'static [&'static str]) -> Option<Reader<'d, 'a>> {
        let value = self.value(name)?;
        let Some(values) = value.get_ref().as_table() else {
            self.fault(name, "must be a table: { … }");
            return None;
        };
        let path = format!("{}.{name}", self.path);
        let mut reader = Self::new(self.document, self.table, path, Some(values));
        (reader.inline, reader.span) = (Some(names), Some(value.span()));
        Some(reader)
    }

    /// Table as JSON, for settings that another module interprets.
    pub(super) fn json(&self, name: &'static str) -> Option<serde_json::Value> {
        let value = self.value(name)?;
        if value.get_ref().as_table().is_none() {
            self.fault(name, "must be a table: { … }");
            return None;
        }
        Some(json(value.get_ref()))
    }

    /// Records a fault inside such a table, at the nearest position that the file has: `path` as `rules[0].pattern`.
    pub(super) fn fault_below(&self, name: &'static str, path: &str, message: impl Into<String>) {
        let root = self.values.and_then(|values| values.get(name));
        let span = root.map(|root| nearest(root, path));
        let dot = if path.is_empty() { "" } else { "." };
        match span {
            Some(span) => self.document.fault(Some(span), &format!("{}.{name}{dot}{path}", self.path), message),
            None => self.fault(&format!("{name}{dot}{path}"), message),
        }
    }

    /// Default of a key; keys of inline tables have none.
    fn default_of(&self, name: &str) -> Option<&'static str> {
        if self.inline.is_some() { None } else { keys::default_of(self.table, name) }
    }

    fn value(&self, name: &'static str) -> Option<&'d Spanned<DeValue<'a>>> {
        self.asked.borrow_mut().insert(name);
        self.values?.get(name)
    }

    /// Records a fault of one key and marks the table as faulty.
    pub(super) fn fault(&self, name: &str, message: impl Into<String>) {
        self.is_faulty.set(true);
        let own = self.values.and_then(|values| values.get(name)).map(Spanned::span);
        let first = || self.values.and_then(|values| values.keys().map(Spanned::span).min_by_key(|span| span.start));
        let span = own.or_else(|| self.span.clone()).or_else(first);
        self.document.fault(span, &format!("{}.{name}", self.path), message);
    }

    /// Returns true if variables of the environment that this table names have to be set.
    pub(super) fn needs_variables(&self) -> bool {
        self.document.needed.is_none_or(|needed| needed.contains(&self.table))
    }

    /// Records the fault that the variable of the environment that the key `name` names is not set, where it has to be.
    pub(super) fn unset(&self, name: &str, variable: &str) {
        if self.needs_variables() {
            self.fault(name, format!("the environment variable {variable} is not set"));
        } else {
            // The caller stops reading the table: keys that it did not ask for are no faults.
            self.is_faulty.set(true);
        }
    }

    /// Returns true if the file has the key `name` in this table.
    pub(super) fn has(&self, name: &'static str) -> bool {
        self.value(name).is_some()
    }

    /// Whole number within `range`; without value the default of the key.
    pub(super) fn number(&self, name: &'static str, range: RangeInclusive<u64>) -> u64 {
        let default = self.default_of(name).and_then(|text| text.parse().ok()).unwrap_or(*range.start());
        self.number_or(name, range, default)
    }

    /// Whole number within `range`; without value the caller's default.
    pub(super) fn number_or(&self, name: &'static str, range: RangeInclusive<u64>, default: u64) -> u64 {
        let Some(value) = self.value(name) else { return default };
        let integer = value.get_ref().as_integer();
        let number = integer.and_then(|int| u64::from_str_radix(&int.as_str().replace('_', ""), int.radix()).ok());
        match number {
            Some(number) if range.contains(&number) => number,
            _ => {
                self.fault(name, format!("must be a whole number from {} to {}", range.start(), range.end()));
                default
            }
        }
    }

    /// Non-empty text; `None` without value and default.
    pub(super) fn text(&self, name: &'static str) -> Option<String> {
        let default = || self.default_of(name).map(|text| text.trim_matches('"').to_owned());
        let Some(value) = self.value(name) else { return default() };
        match value.get_ref().as_str() {
            Some(text) if !text.is_empty() => Some(text.to_owned()),
            _ => {
                self.fault(name, "must be text in quotes, not empty");
                default()
            }
        }
    }

    /// Number from 0 to 1,000,000, with or without a fraction.
    pub(super) fn decimal(&self, name: &'static str) -> Option<f64> {
        let value = self.value(name)?.get_ref();
        let float = value.as_float().and_then(|float| float.as_str().replace('_', "").parse().ok());
        let integer = value.as_integer().and_then(|int| int.as_str().replace('_', "").parse().ok());
        let number = float.or(integer).filter(|number| (0.0..=1e6).contains(number));
        if number.is_none() {
            self.fault(name, "must be a number from 0 to 1000000");
        }
        number
    }

    /// Boolean value of the key `name`, `true` or `false`; without value its default.
    pub(super) fn flag(&self, name: &'static str) -> bool {
        let default = self.default_of(name) == Some("true");
        let Some(value) = self.value(name) else { return default };
        value.get_ref().as_bool().unwrap_or_else(|| {
            self.fault(name, "must be true or false");
            default
        })
    }

    /// Time in Unix seconds: a TOML date or date and time, or the same as text.
    pub(super) fn moment(&self, name: &'static str) -> Option<u64> {
        let value = self.value(name)?.get_ref();
        let text = value.as_datetime().map(ToString::to_string).or_else(|| value.as_str().map(str::to_owned));
        let moment = text.as_deref().and_then(clock::parse);
        if moment.is_none() {
            self.fault(name, "is no moment: write 2027-01-31 or 2027-01-31T18:00:00Z");
        }
        moment
    }

    /// List of texts; without value the default, or empty.
    pub(super) fn texts(&self, name: &'static str) -> Vec<String> {
        let Some(value) = self.value(name) else {
            let default = self.default_of(name).unwrap_or_default().trim_matches(['[', ']']);
            return default
                .split(',')
                .map(|text| text.trim().trim_matches('"'))
                .filter(|text| !text.is_empty())
                .map(str::to_owned)
                .collect();
        };
        let items: Option<Vec<_>> = value
            .get_ref()
            .as_array()
            .and_then(|array| array.iter().map(|item| item.get_ref().as_str().map(str::to_owned)).collect());
        items.unwrap_or_else(|| {
            self.fault(name, "must be a list of texts: [\"a\", \"b\"]");
            Vec::new()
        })
    }

    /// Inline table of texts; empty without value.
    pub(super) fn map(&self, name: &'static str) -> Vec<(String, String)> {
        let Some(value) = self.value(name) else { return Vec::new() };
        let pairs: Option<Vec<_>> = value.get_ref().as_table().and_then(|table| {
            let text = |value: &Spanned<DeValue<'_>>| value.get_ref().as_str().map(str::to_owned);
            table.iter().map(|(key, value)| Some((key.get_ref().to_string(), text(value)?))).collect()
        });
        pairs.unwrap_or_else(|| {
            self.fault(name, "must be a table of texts: { name = \"text\" }");
            Vec::new()
        })
    }
}

impl Drop for Reader<'_, '_> {
    fn drop(&mut self) {
        let known: Vec<_> = match self.inline {
            Some(names) => names.to_vec(),
            None => keys::KEYS.iter().filter(|key| key.table == self.table).map(|key| key.name).collect(),
        };
        for name in self.values.into_iter().flat_map(|values| values.keys()) {
            let inner = self.inline.is_none()
                && keys::TABLES.iter().any(|table| {
                    table.name.strip_prefix(self.table).and_then(|rest| rest.strip_prefix('.'))
                        == Some(name.get_ref().as_ref())
                });
            if inner || self.asked.borrow().contains(name.get_ref().as_ref()) {
                continue;
            }
            let message = match known.contains(&name.get_ref().as_ref()) {
                // A fault that is already reported kept this key from being read.
                true if self.is_faulty.get() => continue,
                true => "has no effect here: it goes with another key, which is missing".to_owned(),
                false => unknown(name.get_ref(), &known),
            };
            self.document.fault(Some(name.span()), &format!("{}.{}", self.path, name.get_ref()), message);
        }
    }
}

/// Converts a TOML value to JSON; dates become text.
fn json(value: &DeValue<'_>) -> serde_json::Value {
    use serde_json::Value;
    match value {
        DeValue::String(text) => Value::from(text.as_ref()),
        DeValue::Integer(int) => {
            i64::from_str_radix(&int.as_str().replace('_', ""), int.radix()).map_or(Value::Null, Value::from)
        }
        DeValue::Float(float) => float.as_str().replace('_', "").parse::<f64>().map_or(Value::Null, Value::from),
        DeValue::Boolean(flag) => Value::from(*flag),
        DeValue::Datetime(time) => Value::from(time.to_string()),
        DeValue::Array(items) => items.iter().map(|item| json(item.get_ref())).collect(),
        DeValue::Table(table) => {
            Value::Object(table.iter().map(|(key, value)| (key.get_ref().to_string(), json(value.get_ref()))).collect())
        }
    }
}

/// Span of the deepest element of `path` that exists.
fn nearest(root: &Spanned<DeValue<'_>>, path: &str) -> Range<usize> {
    let (mut at, mut span) = (root, root.span());
    for step in path.split(['.', '[']).filter(|step| !step.is_empty()) {
        let next = match (at.get_ref(), step.trim_end_matches(']').parse::<usize>()) {
            (DeValue::Array(items), Ok(index)) => items.get(index).map(|item| (item, item.span())),
            (DeValue::Table(table), _) => table.get_key_value(step).map(|(key, value)| (value, key.span())),
            _ => None,
        };
        match next {
            Some(found) => (at, span) = found,
            None => break,
        }
    }
    span
}

/// Message for an unknown key; suggests the closest known one.
fn unknown(name: &str, known: &[&str]) -> String {
    let steps = |key: &str| if key.starts_with(name) { 1 } else { distance(name, key) };
    let near = known.iter().map(|key| (steps(key), key)).min().filter(|(steps, _)| *steps <= 3);
    match near {
        Some((_, key)) => format!("unknown key; did you mean {key}?"),
        None => format!("unknown key; known are: {}", known.join(", ")),
    }
}

/// Levenshtein distance of two key names, in characters, for suggestions.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (at, left) in left.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (at, right) in right.iter().enumerate() {
            let change = diagonal + usize::from(left != *right);
            diagonal = row[at + 1];
            row[at + 1] = change.min(row[at] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}
