//! Tables and values of a TOML text made equal to JSON: what is equal already stays as it is written.

use std::ops::Range;

use serde_json::{Map, Value as Json};
use toml_edit::{Array, ArrayOfTables, InlineTable, Item, Table, TableLike, Value};

use super::{EntryError, MASK};

/// Makes a table equal to `wanted`. `shown`: its values, secrets masked.
pub(super) fn table(
    own: &mut dyn TableLike,
    shown: &Map<String, Json>,
    wanted: &Map<String, Json>,
    path: &str,
) -> Result<(), EntryError> {
    let gone = shown.keys().filter(|key| !wanted.contains_key(*key));
    gone.for_each(|key| drop(own.remove(key)));
    for (key, new) in wanted {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let old = shown.get(key);
        if old == Some(new) {
            continue;
        }
        let kept = match (own.get_mut(key), old) {
            (Some(item), Some(old)) => changed(item, old, new, &path)?,
            _ => false,
        };
        if !kept {
            own.remove(key);
            own.insert(key, Item::Value(value(new, &path)?));
        }
    }
    Ok(())
}

/// Makes an item equal to `new`; false: it has to be written anew.
fn changed(item: &mut Item, old: &Json, new: &Json, path: &str) -> Result<bool, EntryError> {
    match (old, new) {
        // Nothing would be written of a table with dotted keys or headers that has lost all its keys.
        (Json::Object(_), Json::Object(new)) if new.is_empty() => return Ok(false),
        (Json::Object(old), Json::Object(new)) => {
            if let Some(inline) = item.as_inline_table_mut() {
                table(inline, old, new, path)?;
                tidied_table(inline);
                return Ok(true);
            }
            let Some(own) = item.as_table_like_mut() else { return Ok(false) };
            table(own, old, new, path)?;
        }
        (Json::Array(old), Json::Array(new)) => match item {
            Item::Value(Value::Array(own)) => array(own, old, new, path)?,
            Item::ArrayOfTables(own) if !new.is_empty() && new.iter().all(Json::is_object) => {
                tables(own, old, new, path)?;
            }
            _ => return Ok(false),
        },
        (_, Json::Object(_)) => return Ok(false),
        _ => {
            let Some(own) = item.as_value_mut() else { return Ok(false) };
            replace(own, new, path)?;
        }
    }
    Ok(true)
}

/// Puts another value in place of one; comments around it stay.
fn replace(own: &mut Value, new: &Json, path: &str) -> Result<(), EntryError> {
    let decor = own.decor().clone();
    *own = value(new, path)?;
    *own.decor_mut() = decor;
    Ok(())
}

/// Stretch of two lists between what both begin and end with.
struct Middle {
    begin: usize,
    old: usize,
    new: usize,
}

impl Middle {
    fn of(old: &[Json], new: &[Json]) -> Self {
        let same = |(old, new): &(&Json, &Json)| old == new;
        let begin = old.iter().zip(new).take_while(same).count();
        let end = old[begin..].iter().rev().zip(new[begin..].iter().rev()).take_while(same).count();
        Self { begin, old: old.len() - begin - end, new: new.len() - begin - end }
    }
}

fn array(own: &mut Array, old: &[Json], new: &[Json], path: &str) -> Result<(), EntryError> {
    let middle = Middle::of(old, new);
    for at in middle.begin..middle.begin + middle.old.min(middle.new) {
        let path = format!("{path}[{at}]");
        let item = own.get_mut(at).ok_or(EntryError::Spelling)?;
        match (item, &old[at], &new[at]) {
            (Value::InlineTable(own), Json::Object(old), Json::Object(new)) => {
                table(own, old, new, &path)?;
                tidied_table(own);
            }
            (Value::Array(own), Json::Array(old), Json::Array(new)) => array(own, old, new, &path)?,
            (own, _, new) => replace(own, new, &path)?,
        }
    }
    if middle.old != middle.new {
        let kept = middle.begin + middle.old.min(middle.new);
        let fresh = kept..middle.begin + middle.new;
        let fresh: Result<_, _> = fresh.map(|at| value(&new[at], &format!("{path}[{at}]"))).collect();
        splice(own, kept..middle.begin + middle.old, fresh?);
    }
    Ok(())
}

fn tables(own: &mut ArrayOfTables, old: &[Json], new: &[Json], path: &str) -> Result<(), EntryError> {
    let middle = Middle::of(old, new);
    for at in middle.begin..middle.begin + middle.old.min(middle.new) {
        if let (Some(own), Json::Object(old), Json::Object(new)) = (own.get_mut(at), &old[at], &new[at]) {
            table(own, old, new, &format!("{path}[{at}]"))?;
        }
    }
    if middle.old != middle.new {
        let kept = middle.begin + middle.old.min(middle.new);
        let mut all: Vec<Table> = own.iter().cloned().collect();
        let end = all.split_off((middle.begin + middle.old).min(all.len()));
        all.truncate(kept);
        for at in kept..middle.begin + middle.new {
            let Json::Object(new) = &new[at] else { return Err(EntryError::Spelling) };
            let mut fresh = Table::new();
            table(&mut fresh, &Map::new(), new, &format!("{path}[{at}]"))?;
            all.push(fresh);
        }
        *own = all.into_iter().chain(end).collect();
    }
    Ok(())
}

/// Adds a value behind the others of an array.
pub(super) fn push(own: &mut Array, new: Value) {
    splice(own, own.len()..own.len(), vec![new]);
}

/// Removes a value of an array.
pub(super) fn remove(own: &mut Array, at: usize) {
    splice(own, at..at + 1, Vec::new());
}

/// Puts values in place of those of a range. The array is gone through once, however long it and the range are.
fn splice(own: &mut Array, range: Range<usize>, new: Vec<Value>) {
    let is_one_line = !Value::from(own.clone()).to_string().contains('\n');
    let like =
        own.get(range.start.saturating_sub(1)).and_then(|like| like.decor().prefix()?.as_str()).unwrap_or_default();
    // A line of its own, where the others have one; their comments are not repeated.
    let indent = like.rsplit_once('\n').map(|(_, indent)| format!("\n{indent}")).unwrap_or_default();
    let mut all: Vec<Value> = own.iter().cloned().collect();
    let end = all.split_off(range.end.min(all.len()));
    all.truncate(range.start);
    own.clear();
    all.into_iter().for_each(|kept| own.push_formatted(kept));
    for mut new in new {
        new.decor_mut().set_prefix(indent.as_str());
        own.push_formatted(new);
    }
    end.into_iter().for_each(|kept| own.push_formatted(kept));
    if own.is_empty() {
        own.set_trailing_comma(false);
    }
    if is_one_line {
        own.fmt();
    }
}

/// Gives an inline table of one line the usual spaces, as keys that came and went have left others.
fn tidied_table(own: &mut InlineTable) {
    if !Value::from(own.clone()).to_string().contains('\n') {
        let decor = own.decor().clone();
        own.fmt();
        *own.decor_mut() = decor;
    }
}

/// New value.
pub(super) fn value(new: &Json, path: &str) -> Result<Value, EntryError> {
    let unwritable = || EntryError::Unwritable(path.to_owned());
    Ok(match new {
        Json::String(text) if text == MASK => return Err(EntryError::Hidden(path.to_owned())),
        Json::Null => return Err(unwritable()),
        Json::Bool(flag) => (*flag).into(),
        Json::Number(number) => match (number.as_i64(), number.is_f64()) {
            (Some(whole), false) => whole.into(),
            (_, true) => number.as_f64().ok_or_else(unwritable)?.into(),
            _ => return Err(unwritable()),
        },
        // On one line: a line end within would be another text where lines end as on Windows.
        Json::String(text) if text.contains('\n') => escaped(text).ok_or_else(unwritable)?,
        Json::String(text) => text.as_str().into(),
        Json::Array(values) => {
            let mut out = Array::new();
            for (at, new) in values.iter().enumerate() {
                out.push(value(new, &format!("{path}[{at}]"))?);
            }
            out.into()
        }
        Json::Object(fields) => {
            let mut out = InlineTable::new();
            for (key, new) in fields {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                out.insert(key, value(new, &path)?);
            }
            out.into()
        }
    })
}

/// Text as one line in double quotes.
fn escaped(text: &str) -> Option<Value> {
    // JSON's escapes are TOML's as well; DEL has to be escaped in TOML alone.
    let text = Json::String(text.to_owned()).to_string().replace('\u{7f}', "\\u007f");
    text.parse().ok()
}
