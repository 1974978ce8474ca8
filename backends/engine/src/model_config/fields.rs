//! Bounded reading of a JSON file's fields; `null` counts as absent. Every error names the file and the field.

use serde_json::{Map, Value};

use super::error::CheckpointError;

/// Fields of one object of a file.
#[derive(Clone)]
pub(crate) struct Fields<'a> {
    file: &'a str,
    path: String,
    map: &'a Map<String, Value>,
    /// Values of absent fields.
    defaults: Option<&'a Map<String, Value>>,
}

/// Parses `bytes` as one JSON object; `file` names it in errors.
pub(crate) fn parse_object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, CheckpointError> {
    // serde_json stops at 128 levels and refuses NaN, Infinity and numbers that overflow.
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(CheckpointError::file(file, "is not a JSON object")),
        Err(error) => Err(CheckpointError::file(file, format!("is not valid JSON: {error}"))),
    }
}

impl<'a> Fields<'a> {
    pub(crate) fn new(file: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { file, path: String::new(), map, defaults: None }
    }

    /// Copy of this reader that takes absent fields (not null ones) from `defaults`.
    pub(crate) fn or(&self, defaults: &'a Map<String, Value>) -> Self {
        Self { defaults: Some(defaults), ..self.clone() }
    }

    /// Error about the field `name`.
    pub(crate) fn refuse(&self, name: &str, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::field(self.file, format!("{}{name}", self.path), reason)
    }

    pub(crate) fn missing(&self, name: &str) -> CheckpointError {
        self.refuse(name, "is missing")
    }

    /// Value of a field; `None` if absent or null.
    pub(crate) fn value(&self, name: &str) -> Option<&'a Value> {
        let found = self.map.get(name).or_else(|| self.defaults?.get(name));
        found.filter(|value| !value.is_null())
    }

    /// Returns true if the key is present, even if its value is null.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// Names of all fields.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    /// Fields of an object inside this one.
    pub(crate) fn object(&self, name: &str) -> Result<Option<Fields<'a>>, CheckpointError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Fields { file: self.file, path: format!("{}{name}.", self.path), map, defaults: None }))
            }
            Some(other) => Err(self.refuse(name, format!("is {}, needs an object", shown(other)))),
        }
    }

    /// Reads an integer in `least..=most`.
    pub(crate) fn integer(&self, name: &str, least: usize, most: usize) -> Result<Option<usize>, CheckpointError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = whole(value).and_then(|n| usize::try_from(n).ok()).filter(|n| (least..=most).contains(n));
        let refused = || self.refuse(name, format!("is {}, needs an integer from {least} to {most}", shown(value)));
        number.map(Some).ok_or_else(refused)
    }

    /// Reads an integer as [`Fields::integer`] does; a missing field is an error.
    pub(crate) fn required(&self, name: &str, least: usize, most: usize) -> Result<usize, CheckpointError> {
        self.integer(name, least, most)?.ok_or_else(|| self.missing(name))
    }

    /// Reads a number in `least..=most`.
    pub(crate) fn number(&self, name: &str, least: f64, most: f64) -> Result<Option<f64>, CheckpointError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = value.as_f64().filter(|n| (least..=most).contains(n));
        let refused = || self.refuse(name, format!("is {}, needs a number from {least} to {most}", shown(value)));
        number.map(Some).ok_or_else(refused)
    }

    pub(crate) fn flag(&self, name: &str, default: bool) -> Result<bool, CheckpointError> {
        let Some(value) = self.value(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.refuse(name, format!("is {}, needs true or false", shown(value))))
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>, CheckpointError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let text = value.as_str().ok_or_else(|| self.refuse(name, format!("is {}, needs a string", shown(value))))?;
        Ok(Some(text))
    }

    /// Reads a list; empty if absent.
    pub(crate) fn list(&self, name: &str) -> Result<&'a [Value], CheckpointError> {
        match self.value(name) {
            None => Ok(&[]),
            Some(Value::Array(list)) => Ok(list),
            Some(other) => Err(self.refuse(name, format!("is {}, needs a list", shown(other)))),
        }
    }

    /// Reads a list of numbers in `least..=most`; `None` if absent.
    pub(crate) fn numbers(&self, name: &str, least: f32, most: f32) -> Result<Option<Vec<f32>>, CheckpointError> {
        if self.value(name).is_none() {
            return Ok(None);
        }
        let one = |value: &Value| {
            let number = value.as_f64().map(|number| number as f32).filter(|number| (least..=most).contains(number));
            number
                .ok_or_else(|| self.refuse(name, format!("has {}, needs numbers from {least} to {most}", shown(value))))
        };
        self.list(name)?.iter().map(one).collect::<Result<_, _>>().map(Some)
    }

    /// Reads token ids: an integer or a list of integers.
    pub(crate) fn token_ids(&self, name: &str) -> Result<Vec<u32>, CheckpointError> {
        let one = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
        let refused = |value: &Value| {
            self.refuse(name, format!("is {}, needs a token id or a list of at most 64 of them", shown(value)))
        };
        match self.value(name) {
            None => Ok(Vec::new()),
            Some(value @ Value::Array(list)) if list.len() <= 64 => {
                list.iter().map(|item| one(item).ok_or_else(|| refused(value))).collect()
            }
            Some(value) => Ok(vec![one(value).ok_or_else(|| refused(value))?]),
        }
    }
}

/// Value as a whole number, also one written as `32768.0`, as in some configs.
fn whole(value: &Value) -> Option<u64> {
    // Up to 2^53 every whole number has an exact float.
    let float = || value.as_f64().filter(|f| f.fract() == 0.0 && (0.0..9e15).contains(f)).map(|f| f as u64);
    value.as_u64().or_else(float)
}

/// Short form of a value, for a message.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(_) => "an object".into(),
        Value::String(text) => format!("\"{}\"", super::error::Shown(text)),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers() {
        let read = |text: &str| whole(&serde_json::from_str(text).expect("json"));
        assert_eq!((read("4096"), read("4096.0"), read("4.096e3")), (Some(4096), Some(4096), Some(4096)));
        for other in ["-1", "-1.0", "0.5", "1e300", "\"1\"", "true", "[1]"] {
            assert_eq!(read(other), None, "{other}");
        }
    }
}
