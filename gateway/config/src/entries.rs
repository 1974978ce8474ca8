//! Entries of the config's arrays of tables (`[[providers]]`, `[[models]]`, …) as objects: read as JSON, and changed within the text.
//!
//! A change keeps the operator's text: only the stretch of the entry is written anew, and in it only the values that differ, so comments, order
//! and spelling stay. An entry may be written in any way that TOML allows: `[[models]]` with tables below it, dotted keys, inline tables, an
//! inline array of all entries. What a change has made is read again and compared with what was wanted before it is handed out.
//!
//! - `entries/sections.rs`: stretches of the text, from one header to the next
//! - `entries/items.rs`: a table or value of the text made equal to JSON
//!
//! Deliberately absent: checks of the config (a changed text goes through the same checks as a file) and knowledge of secrets. Callers hand in the
//! text with secrets masked; a value that equals its mask stays as it is.

mod items;
mod sections;
#[cfg(test)]
mod tests;

use std::ops::Range;

use serde_json::{Map, Value};
use toml::de::DeTable;
use toml_edit::DocumentMut;

use sections::{Section, sections};

/// Longest id of an entry that is looked for, in bytes.
pub const ID_BYTES_MAX: usize = 1024;
/// Mask of a value that is not shown.
const MASK: &str = "[hidden]";

/// One entry of a table, as it may be shown.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Id of the entry: its `id`, or its `name` without one.
    pub id: String,
    /// Keys and values of the entry; dates are texts.
    pub value: Value,
}

/// Change of one entry.
#[derive(Clone, Copy, Debug)]
pub enum Change<'v> {
    /// The entry is added behind the others of its table; its id is new.
    Create(&'v Map<String, Value>),
    /// The entry gets these keys and no others.
    Replace(&'v Map<String, Value>),
    /// The entry gets these keys; `null` removes one, and the keys of tables within are merged (RFC 7396).
    Merge(&'v Map<String, Value>),
    /// The entry is removed, with the comments directly above it.
    Delete,
}

/// Reason why an entry was not read or changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// The text is no TOML.
    #[error("the config is no TOML: {0}")]
    Syntax(String),
    /// No entry has the id.
    #[error("[[{table}]] has no entry {id:?}")]
    Unknown {
        /// Table of the entry.
        table: String,
        /// Id of the entry.
        id: String,
    },
    /// Another entry has the id.
    #[error("[[{table}]] has an entry {id:?} already")]
    Taken {
        /// Table of the entry.
        table: String,
        /// Id of the entry.
        id: String,
    },
    /// Several entries have the id, so none can be meant.
    #[error("[[{table}]] has several entries {id:?}: give each an id of its own in the config file")]
    Ambiguous {
        /// Table of the entries.
        table: String,
        /// Id of the entries.
        id: String,
    },
    /// The new entry has neither `id` nor `name`.
    #[error("the entry has no id: give it the key id, or name")]
    Unnamed,
    /// A masked value stands at a place that has no value.
    #[error("{0}: the mask of a hidden value is no value: write the value itself, or its file or environment variable")]
    Hidden(String),
    /// A value cannot be written as TOML.
    #[error(
        "{0}: TOML has no such value; a whole number is from -2^63 to 2^63-1, and null only removes a key in a merge patch"
    )]
    Unwritable(String),
    /// The way in which the entry is written cannot be kept by a change.
    #[error("this entry is written in a way that cannot be changed key by key: change the config text as a whole")]
    Spelling,
}

/// Id of an entry: its `id`, or its `name` without one.
pub fn id_of(value: &Value) -> Option<&str> {
    ["id", "name"].iter().find_map(|key| value.get(*key)?.as_str())
}

/// Entries of a table in the order of the text. An entry without an id is left out.
///
/// # Errors
/// The text is no TOML.
pub fn list(text: &str, table: &str) -> Result<Vec<Entry>, EntryError> {
    let values = values(text, table)?.into_iter();
    Ok(values.filter_map(|value| Some(Entry { id: id_of(&value)?.to_owned(), value })).collect())
}

/// Text after one change of the entry `id` of `table`. `shown` is the text with its secrets masked.
///
/// # Errors
/// [`EntryError`].
pub fn changed(text: &str, shown: &str, table: &str, id: &str, change: Change<'_>) -> Result<String, EntryError> {
    let (before, visible) = (values(text, table)?, values(shown, table)?);
    let place = place(&before, table, id)?;
    let unknown = || EntryError::Unknown { table: table.to_owned(), id: id.to_owned() };
    let old = |at: usize| visible.get(at).and_then(Value::as_object).ok_or(EntryError::Spelling);
    let (new, wanted) = match (change, place) {
        (Change::Create(_), Some(_)) => {
            return Err(EntryError::Taken { table: table.to_owned(), id: id.to_owned() });
        }
        (Change::Create(value), None) => (created(text, table, value)?, Some((before.len(), value.clone()))),
        (_, None) => return Err(unknown()),
        (Change::Delete, Some(at)) => (removed(text, table, at)?, None),
        (Change::Replace(value), Some(at)) => (made(text, table, at, old(at)?, value)?, Some((at, value.clone()))),
        (Change::Merge(patch), Some(at)) => {
            let mut wanted = old(at)?.clone();
            merge(&mut wanted, patch);
            (made(text, table, at, old(at)?, &wanted)?, Some((at, wanted)))
        }
    };
    let mut expected = before;
    match (wanted.map(|(at, wanted)| (at, Value::Object(wanted))), place) {
        (Some((at, wanted)), Some(_)) => expected[at] = wanted,
        (Some((_, wanted)), None) => expected.push(wanted),
        (None, Some(at)) => drop(expected.remove(at)),
        (None, None) => {}
    }
    check(text, &new, table, &expected)?;
    Ok(new)
}

/// Merge patch of RFC 7396.
fn merge(target: &mut Map<String, Value>, patch: &Map<String, Value>) {
    for (key, value) in patch {
        match value {
            Value::Null => drop(target.shift_remove(key)),
            Value::Object(patch) => {
                let slot = target.entry(key.clone()).or_insert_with(|| Value::Object(Map::new()));
                if !slot.is_object() {
                    *slot = Value::Object(Map::new());
                }
                if let Value::Object(target) = slot {
                    merge(target, patch);
                }
            }
            value => drop(target.insert(key.clone(), value.clone())),
        }
    }
}

fn parsed(text: &str) -> Result<toml::Table, EntryError> {
    text.parse().map_err(|error: toml::de::Error| EntryError::Syntax(error.message().to_owned()))
}

/// Entries of a table as JSON; empty without the table.
fn values(text: &str, table: &str) -> Result<Vec<Value>, EntryError> {
    let mut root = parsed(text)?;
    match root.remove(table) {
        Some(toml::Value::Array(values)) => Ok(values.into_iter().map(json).collect()),
        _ => Ok(Vec::new()),
    }
}

fn json(value: toml::Value) -> Value {
    match value {
        toml::Value::String(text) => Value::String(text),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => {
            serde_json::Number::from_f64(number).map_or_else(|| Value::String(number.to_string()), Value::Number)
        }
        toml::Value::Boolean(flag) => flag.into(),
        toml::Value::Datetime(moment) => Value::String(moment.to_string()),
        toml::Value::Array(values) => values.into_iter().map(json).collect(),
        toml::Value::Table(table) => Value::Object(table.into_iter().map(|(key, value)| (key, json(value))).collect()),
    }
}

fn place(values: &[Value], table: &str, id: &str) -> Result<Option<usize>, EntryError> {
    let mut found = values.iter().enumerate().filter(|(_, value)| id_of(value) == Some(id)).map(|(at, _)| at);
    match (found.next(), found.next()) {
        (at, None) => Ok(at),
        _ => Err(EntryError::Ambiguous { table: table.to_owned(), id: id.to_owned() }),
    }
}

/// Checks that the new text says what was wanted of this table, and the same as before of all others.
fn check(before: &str, after: &str, table: &str, expected: &[Value]) -> Result<(), EntryError> {
    let (mut old, mut new) = (parsed(before)?, parsed(after).map_err(|_| EntryError::Spelling)?);
    old.remove(table);
    let entries = match new.remove(table) {
        Some(toml::Value::Array(entries)) => entries.into_iter().map(json).collect(),
        Some(_) => return Err(EntryError::Spelling),
        None => Vec::new(),
    };
    let same = entries.len() == expected.len() && entries.iter().zip(expected).all(|(one, other)| is_same(one, other));
    if old == new && same { Ok(()) } else { Err(EntryError::Spelling) }
}

/// Whether a value is the wanted one; a mask stands for any value.
fn is_same(value: &Value, wanted: &Value) -> bool {
    match (value, wanted) {
        (_, Value::String(mask)) if mask == MASK => true,
        (Value::Object(value), Value::Object(wanted)) => {
            value.len() == wanted.len()
                && value.iter().all(|(key, value)| wanted.get(key).is_some_and(|wanted| is_same(value, wanted)))
        }
        (Value::Array(value), Value::Array(wanted)) => {
            value.len() == wanted.len() && value.iter().zip(wanted).all(|(value, wanted)| is_same(value, wanted))
        }
        (value, wanted) => value == wanted,
    }
}

/// Byte ranges of an inline array and of its entries; `None`: the table is written with headers, or is not there.
fn inline(text: &str, table: &str) -> Option<(Range<usize>, Vec<Range<usize>>)> {
    let root = DeTable::parse(text).ok()?;
    let value = root.get_ref().get(table)?;
    let entries = value.get_ref().as_array()?.iter().map(toml::Spanned::span).collect();
    Some((value.span(), entries))
}

/// Sections of the text, and those of each entry that is written with a header.
struct Layout {
    all: Vec<Section>,
    entries: Vec<Vec<usize>>,
}

impl Layout {
    fn of(text: &str, table: &str) -> Self {
        let all = sections(text);
        let mut entries: Vec<Vec<usize>> = Vec::new();
        for (at, section) in
            all.iter().enumerate().filter(|(_, section)| section.path.first().is_some_and(|name| name == table))
        {
            if section.path.len() == 1 {
                entries.push(Vec::new());
            }
            if let Some(entry) = entries.last_mut() {
                entry.push(at);
            }
        }
        Self { all, entries }
    }

    /// Sections of an entry, in the order of the text.
    fn entry(&self, at: usize) -> impl DoubleEndedIterator<Item = &Section> {
        self.entries.get(at).into_iter().flatten().map(|at| &self.all[*at])
    }
}

/// Text whose entry at `at` is as wanted.
fn made(
    text: &str,
    table: &str,
    at: usize,
    shown: &Map<String, Value>,
    wanted: &Map<String, Value>,
) -> Result<String, EntryError> {
    if shown == wanted {
        return Ok(text.to_owned());
    }
    let layout = Layout::of(text, table);
    if layout.entries.is_empty() {
        let (_, spans) = inline(text, table).ok_or(EntryError::Spelling)?;
        let span = spans.get(at).cloned().ok_or(EntryError::Spelling)?;
        let value = edited_value(&text[span.clone()], |item| {
            let own = item.as_table_like_mut().ok_or(EntryError::Spelling)?;
            items::table(own, shown, wanted, "")
        })?;
        return Ok(spliced(text, &[(span, value)]));
    }
    let mut parts: Vec<Range<usize>> = layout.entry(at).map(|section| section.begin..section.end).collect();
    let first = parts.first_mut().ok_or(EntryError::Spelling)?;
    first.start = layout.entry(at).next().map_or(first.start, |section| section.header);
    let own: String = parts.iter().map(|part| &text[part.clone()]).collect();
    let lines = Lines::of(&own);
    let mut document: DocumentMut = lines.plain(&own).parse().map_err(|_| EntryError::Spelling)?;
    let entries = document.get_mut(table).and_then(|item| item.as_array_of_tables_mut()).ok_or(EntryError::Spelling)?;
    items::table(entries.get_mut(0).ok_or(EntryError::Spelling)?, shown, wanted, "")?;
    let mut places: Vec<_> = parts.into_iter().map(|part| (part, String::new())).collect();
    places[0].1 = lines.ended(&document.to_string());
    Ok(spliced(text, &places))
}

fn created(text: &str, table: &str, value: &Map<String, Value>) -> Result<String, EntryError> {
    let layout = Layout::of(text, table);
    if let Some((span, _)) = inline(text, table).filter(|_| layout.entries.is_empty()) {
        let array = edited_value(&text[span.clone()], |item| {
            let array = item.as_array_mut().ok_or(EntryError::Spelling)?;
            items::push(array, items::value(&Value::Object(value.clone()), "")?);
            Ok(())
        })?;
        return Ok(spliced(text, &[(span, array)]));
    }
    let lines = Lines::of(text);
    let at = layout.all.iter().rev().find(|section| section.path.first().is_some_and(|name| name == table));
    let at = at.map_or(text.len(), |section| section.body_end(text));
    let (before, after) = text.split_at(at);
    let mut new = String::new();
    if !before.is_empty() && !before.ends_with('\n') {
        new.push('\n');
    }
    let is_blank_below = after.starts_with(['\n', '\r']);
    // Entries without a blank line between them get none.
    let is_apart = after.is_empty() || is_blank_below || is_blank_above(before);
    if is_apart && !before.is_empty() && !is_blank_above(before) {
        new.push('\n');
    }
    let mut document = DocumentMut::new();
    let mut own = toml_edit::Table::new();
    items::table(&mut own, &Map::new(), value, "")?;
    let mut entries = toml_edit::ArrayOfTables::new();
    entries.push(own);
    document.insert(table, toml_edit::Item::ArrayOfTables(entries));
    new += document.to_string().trim_start();
    if is_apart && !after.is_empty() && !is_blank_below {
        new.push('\n');
    }
    Ok(format!("{before}{}{after}", lines.ended(&new)))
}

fn removed(text: &str, table: &str, at: usize) -> Result<String, EntryError> {
    let layout = Layout::of(text, table);
    if layout.entries.is_empty() {
        let (span, _) = inline(text, table).ok_or(EntryError::Spelling)?;
        let array = edited_value(&text[span.clone()], |item| {
            items::remove(item.as_array_mut().ok_or(EntryError::Spelling)?, at);
            Ok(())
        })?;
        return Ok(spliced(text, &[(span, array)]));
    }
    let mut out = text.to_owned();
    // From the end, so that the places before stay where they are.
    for section in layout.entry(at).rev() {
        let (before, after) = (&text[..section.begin], &out[section.body_end(text)..]);
        let is_apart = before.is_empty() || is_blank_above(before);
        let line = after.strip_prefix('\n').or_else(|| after.strip_prefix("\r\n")).filter(|_| is_apart);
        // One of the two blank lines that were around it goes too.
        let (before, after) = match line {
            Some(after) => (before, after),
            None if after.is_empty() && is_apart => (without_line(before), after),
            None => (before, after),
        };
        out = format!("{before}{after}");
    }
    Ok(out)
}

/// Whether the last line of a text that ends with a line is blank.
fn is_blank_above(text: &str) -> bool {
    text.ends_with("\n\n") || text.ends_with("\n\r\n")
}

fn without_line(text: &str) -> &str {
    text.strip_suffix('\n').map_or(text, |rest| rest.strip_suffix('\r').unwrap_or(rest))
}

/// Value that stands alone in a text, after a change.
fn edited_value(
    own: &str,
    change: impl FnOnce(&mut toml_edit::Item) -> Result<(), EntryError>,
) -> Result<String, EntryError> {
    let lines = Lines::of(own);
    let text = format!("x = {}\n", lines.plain(own));
    let mut document: DocumentMut = text.parse().map_err(|_| EntryError::Spelling)?;
    change(document.get_mut("x").ok_or(EntryError::Spelling)?)?;
    let text = document.to_string();
    let value = text.strip_prefix("x =").and_then(|text| text.strip_suffix('\n')).ok_or(EntryError::Spelling)?;
    Ok(lines.ended(value.trim()))
}

/// Text with other texts at these ranges, which are in order.
fn spliced(text: &str, parts: &[(Range<usize>, String)]) -> String {
    let (mut out, mut done) = (String::with_capacity(text.len()), 0);
    for (at, part) in parts {
        out += &text[done..at.start];
        out += part;
        done = at.end;
    }
    out + &text[done..]
}

/// Line ends of a text; edits are made on `\n`.
#[derive(Clone, Copy)]
struct Lines {
    is_crlf: bool,
}

impl Lines {
    fn of(text: &str) -> Self {
        Self { is_crlf: text.contains("\r\n") }
    }

    fn plain(self, text: &str) -> String {
        if self.is_crlf { text.replace("\r\n", "\n") } else { text.to_owned() }
    }

    fn ended(self, text: &str) -> String {
        if self.is_crlf { text.replace('\n', "\r\n") } else { text.to_owned() }
    }
}
