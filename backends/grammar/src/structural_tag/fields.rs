//! Fields of a structural tag, read with the place of each fault.

use super::TagError;
use crate::error::shown;
use serde_json::{Map, Value};

/// Most elements of one list.
pub(super) const ELEMENTS_MAX: usize = 2048;

pub(super) type Written<T> = Result<T, TagError>;

/// Place of a format in the tag, for messages.
#[derive(Clone)]
pub(super) struct Place(String);

impl Place {
    pub(super) fn root(name: &str) -> Self {
        Self(name.to_owned())
    }

    pub(super) fn field(&self, name: &str) -> Self {
        let dot = if self.0.is_empty() { "" } else { "." };
        Self(format!("{}{dot}{name}", self.0))
    }

    pub(super) fn item(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }

    pub(super) fn fault<T>(&self, what: impl Into<String>) -> Written<T> {
        Err(TagError { at: self.0.clone(), what: what.into() })
    }
}

pub(super) fn object<'v>(value: &'v Value, at: &Place) -> Written<&'v Map<String, Value>> {
    value.as_object().map_or_else(|| at.fault("must be an object"), Ok)
}

pub(super) fn string<'v>(fields: &'v Map<String, Value>, name: &str, at: &Place) -> Written<&'v str> {
    let text = fields.get(name).and_then(Value::as_str);
    text.map_or_else(|| at.field(name).fault("must be a string"), Ok)
}

pub(super) fn list<'v>(fields: &'v Map<String, Value>, name: &str, at: &Place) -> Written<&'v [Value]> {
    match fields.get(name).and_then(Value::as_array) {
        Some(list) if !list.is_empty() && list.len() <= ELEMENTS_MAX => Ok(list),
        _ => at.field(name).fault(format!("must be a list of 1 to {ELEMENTS_MAX} elements")),
    }
}

/// Strings of a list, which may be absent; empty ones are refused, and repeated ones are left out.
pub(super) fn strings(fields: &Map<String, Value>, name: &str, at: &Place) -> Written<Vec<String>> {
    let all = match fields.get(name) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(all)) if all.len() <= ELEMENTS_MAX => all,
        Some(_) => return at.field(name).fault(format!("must be a list of at most {ELEMENTS_MAX} strings")),
    };
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let texts: Option<Vec<String>> = all.iter().map(text).collect();
    texts.map_or_else(|| at.field(name).fault("must be a list of strings that are not empty"), |texts| Ok(once(texts)))
}

/// Each text once, in the order of the first occurrences.
pub(super) fn once(mut texts: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    texts.retain(|text| seen.insert(text.clone()));
    texts
}

pub(super) fn flag(fields: &Map<String, Value>, name: &str, default: bool, at: &Place) -> Written<bool> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => at.field(name).fault("must be a boolean"),
    }
}

/// Refuses fields that would ask for more than is enforced.
pub(super) fn known(fields: &Map<String, Value>, at: &Place, names: &[&str]) -> Written<()> {
    let unknown = |(name, value): &(&String, &Value)| {
        let asks = !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty());
        asks && *name != "type" && !names.contains(&name.as_str())
    };
    match fields.iter().find(unknown) {
        None => Ok(()),
        Some((name, _)) => at.field(&shown(name)).fault("is not supported"),
    }
}
