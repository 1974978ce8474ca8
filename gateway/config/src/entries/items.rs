//! Tables and values of a TOML text made equal to JSON: what is equal already stays as it is written.

use std::ops::Range;

use serde_json::{Map, Value as Json};
use toml_edit::{Array, ArrayOfTables, InlineTable, Item, Table, TableLike, Value};

use super::{EntryError, MASK, id_of};

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

/// Returns true if a mask stands somewhere in the value.
fn is_masked(value: &Json) -> bool {
    match value {
        Json::String(text) => text == MASK,
        Json::Array(items) => items.iter().any(is_masked),
        Json::Object(fields) => fields.values().any(is_masked),
        _ => false,
    }
}

/// For each element of the middle, the place in `old` of the element that its masks stand for; `None`: it has no masks and
/// no such element. A mask is never given the value of an element of another name: elements with an id or a name go by it,
/// those without one by what they show, or by their place where none has come or gone.
fn partners(old: &[Json], new: &[Json], middle: &Middle, path: &str) -> Result<Vec<Option<usize>>, EntryError> {
    let named = |value: &Json| id_of(value).filter(|id| *id != MASK).map(str::to_owned);
    let places = |list: &[Json], id: &str| -> Vec<usize> {
        list.iter().enumerate().filter(|(_, value)| named(value).as_deref() == Some(id)).map(|(at, _)| at).collect()
    };
    let (from, begin) = (middle.begin..middle.begin + middle.old, middle.begin);
    let mut out: Vec<Option<usize>> = Vec::with_capacity(middle.new);
    for (at, element) in new.iter().enumerate().skip(begin).take(middle.new) {
        let found = match named(element) {
            Some(id) => {
                let (before, after) = (places(old, &id), places(new, &id));
                let nth = after.iter().position(|place| *place == at);
                // Of several by one name none can be told, where one has come or gone.
                nth.filter(|_| before.len() == after.len()).and_then(|nth| before.get(nth).copied())
            }
            None => {
                let mut same = from.clone().filter(|place| old[*place] == *element);
                match (same.next(), same.next()) {
                    (Some(one), None) => Some(one),
                    _ => (old.len() == new.len() && named(&old[at]).is_none()).then_some(at),
                }
            }
        };
        let found = found.filter(|place| from.contains(place) && !out.contains(&Some(*place)));
        if found.is_none() && is_masked(element) {
            return Err(EntryError::Hidden(format!("{path}[{at}]")));
        }
        out.push(found);
    }
    Ok(out)
}

/// Partners of the elements in the middle, where going by their places would give a mask another element's value.
fn moved(old: &[Json], new: &[Json], middle: &Middle, path: &str) -> Result<Option<Vec<Option<usize>>>, EntryError> {
    let changed = &new[middle.begin..middle.begin + middle.new];
    if !changed.iter().any(is_masked) {
        return Ok(None);
    }
    let partners = partners(old, new, middle, path)?;
    let stays = |(at, partner): (usize, &Option<usize>)| {
        !is_masked(&changed[at]) || at < middle.old && *partner == Some(middle.begin + at)
    };
    Ok(if partners.iter().enumerate().all(stays) { None } else { Some(partners) })
}

/// Makes an element of an array equal to `new`.
fn element(own: &mut Value, old: &Json, new: &Json, path: &str) -> Result<(), EntryError> {
    match (own, old, new) {
        (_, old, new) if old == new => Ok(()),
        (Value::InlineTable(own), Json::Object(old), Json::Object(new)) => {
            table(own, old, new, path)?;
            tidied_table(own);
            Ok(())
        }
        (Value::Array(own), Json::Array(old), Json::Array(new)) => array(own, old, new, path),
        (own, _, new) => replace(own, new, path),
    }
}

fn array(own: &mut Array, old: &[Json], new: &[Json], path: &str) -> Result<(), EntryError> {
    let middle = Middle::of(old, new);
    if let Some(partners) = moved(old, new, &middle, path)? {
        let mut all = Vec::with_capacity(middle.new);
        for (at, partner) in (middle.begin..).zip(partners) {
            let path = format!("{path}[{at}]");
            all.push(match partner {
                Some(place) => {
                    let mut kept = own.get(place).cloned().ok_or(EntryError::Spelling)?;
                    element(&mut kept, &old[place], &new[at], &path)?;
                    kept
                }
                None => value(&new[at], &path)?,
            });
        }
        splice(own, middle.begin..middle.begin + middle.old, all);
        return Ok(());
    }
    for at in middle.begin..middle.begin + middle.old.min(middle.new) {
        let path = format!("{path}[{at}]");
        element(own.get_mut(at).ok_or(EntryError::Spelling)?, &old[at], &new[at], &path)?;
    }
    if middle.old != middle.new {
        let kept = middle.begin + middle.old.min(middle.new);
        let fresh = kept..middle.begin + middle.new;
        let fresh: Result<_, _> = fresh.map(|at| value(&new[at], &format!("{path}[{at}]"))).collect();
        splice(own, kept..middle.begin + middle.old, fresh?);
    }
    Ok(())
}

/// Forgets the place in the text of a table and those in it: they are written where they come among the others.
fn unplaced(own: &mut Table) {
    own.set_position(None);
    for (_, item) in own.iter_mut() {
        match item {
            Item::Table(inner) => unplaced(inner),
            Item::ArrayOfTables(inner) => inner.iter_mut().for_each(unplaced),
            _ => {}
        }
    }
}

fn tables(own: &mut ArrayOfTables, old: &[Json], new: &[Json], path: &str) -> Result<(), EntryError> {
    let middle = Middle::of(old, new);
    if let Some(partners) = moved(old, new, &middle, path)? {
        let all: Vec<Table> = own.iter().cloned().collect();
        let mut between = Vec::with_capacity(middle.new);
        for (at, partner) in (middle.begin..).zip(partners) {
            let Json::Object(wanted) = &new[at] else { return Err(EntryError::Spelling) };
            let (mut one, was) = match partner {
                Some(place) => (all.get(place).cloned().ok_or(EntryError::Spelling)?, old[place].as_object()),
                None => (Table::new(), None),
            };
            table(&mut one, was.unwrap_or(&Map::new()), wanted, &format!("{path}[{at}]"))?;
            between.push(one);
        }
        let end = all.iter().skip(middle.begin + middle.old).cloned();
        let mut list: Vec<Table> = all.iter().take(middle.begin).cloned().chain(between).chain(end).collect();
        list.iter_mut().for_each(unplaced);
        *own = list.into_iter().collect();
        return Ok(());
    }
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
        // An element that was there before keeps the comments above it.
        if new.decor().prefix().is_none() {
            new.decor_mut().set_prefix(indent.as_str());
        }
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
