//! Settings of one entry, read key by key so that every fault is found, not just the first.
//!
//! The host gives the table as JSON and maps the path of a fault to its place in the file afterwards. A key that the
//! plugin does not read is a fault.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use serde_json::{Map, Value};

use crate::host::Endpoint;

/// Environment that settings may refer to: variables, files, and allowed URLs.
pub trait Surroundings {
    /// Value of an environment variable; `None`: not set.
    fn env(&self, name: &str) -> Option<String>;

    /// Checks that a URL may be connected to; an error says why not.
    fn check_url(&self, url: &str) -> Result<(), String>;

    /// Contents of a file of at most `bytes_max` bytes.
    fn file(&self, _path: &str, _bytes_max: usize) -> Result<Bytes, String> {
        Err("files cannot be read here".into())
    }
}

/// Fault of the settings of a plugin, for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingFault {
    /// Path below `settings`: `rules[0].pattern`; empty: the table itself.
    pub path: String,
    /// Description of the fault, with the value that would be right.
    pub message: String,
}

/// Table of settings. On drop, every key that was not read is reported as a fault.
pub struct Settings<'a> {
    values: Option<&'a Map<String, Value>>,
    path: String,
    asked: RefCell<BTreeSet<String>>,
    faults: Rc<RefCell<Vec<SettingFault>>>,
    surroundings: &'a dyn Surroundings,
    open: bool,
}

impl<'a> Settings<'a> {
    /// Reads a table (`None`: an empty one) by `build`; returns its result and all faults.
    pub fn read<T>(
        table: Option<&'a Value>,
        surroundings: &'a dyn Surroundings,
        build: impl FnOnce(&Settings<'a>) -> Option<T>,
    ) -> Result<T, Vec<SettingFault>> {
        let faults = Rc::new(RefCell::new(Vec::new()));
        let values = table.and_then(Value::as_object);
        let settings = Settings {
            values,
            path: String::new(),
            asked: RefCell::default(),
            faults: faults.clone(),
            surroundings,
            open: false,
        };
        if table.is_some() && values.is_none() {
            settings.fault("", "must be a table");
        }
        let made = build(&settings);
        drop(settings);
        let mut faults = faults.take();
        match made {
            Some(made) if faults.is_empty() => Ok(made),
            _ => {
                if faults.is_empty() {
                    faults.push(SettingFault { path: String::new(), message: "cannot be used".into() });
                }
                Err(faults)
            }
        }
    }

    fn inner(&self, values: Option<&'a Map<String, Value>>, path: String) -> Settings<'a> {
        let (faults, surroundings) = (self.faults.clone(), self.surroundings);
        Settings { values, path, asked: RefCell::default(), faults, surroundings, open: false }
    }

    fn at(&self, name: &str) -> String {
        match (self.path.is_empty(), name.is_empty()) {
            (true, _) => name.to_owned(),
            (false, true) => self.path.clone(),
            (false, false) => format!("{}.{name}", self.path),
        }
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(name.to_owned());
        self.values?.get(name)
    }

    /// Records a fault where a required key is missing.
    fn needed<T>(&self, name: &str, read: Option<T>) -> Option<T> {
        if read.is_none() && self.value(name).is_none() {
            self.fault(name, "is missing");
        }
        read
    }

    /// Records a fault of one key; `name` may go on into lists and tables, as `rules[0].pattern`.
    pub fn fault(&self, name: &str, message: impl Into<String>) {
        self.faults.borrow_mut().push(SettingFault { path: self.at(name), message: message.into() });
    }

    /// Returns true if the table has the key.
    pub fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    /// All keys of the table, none of which is a fault: the table is the plugin's own matter.
    pub fn any(&mut self) -> Option<&'a Map<String, Value>> {
        self.open = true;
        self.values
    }

    /// Value of a key, of any type; `None`: no such key.
    pub fn json(&self, name: &str) -> Option<&'a Value> {
        self.value(name)
    }

    /// Value of a key with text that is not empty; another value is a fault.
    pub fn text(&self, name: &str) -> Option<String> {
        match self.value(name)?.as_str() {
            Some(text) if !text.is_empty() => Some(text.to_owned()),
            _ => {
                self.fault(name, "must be text in quotes, not empty");
                None
            }
        }
    }

    /// Value of a required key with text that is not empty; a fault without it.
    pub fn needed_text(&self, name: &str) -> Option<String> {
        self.needed(name, self.text(name))
    }

    /// Value of a key that must be one of some words; the first word where the key is missing or faulty.
    pub fn word<T: Copy>(&self, name: &str, words: &[(&str, T)]) -> T {
        let known = || words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
        let first = words[0].1;
        let Some(value) = self.value(name) else { return first };
        let found = value.as_str().and_then(|text| words.iter().find(|(word, _)| *word == text));
        found.map_or_else(
            || {
                self.fault(name, format!("must be one of {}", known()));
                first
            },
            |(_, value)| *value,
        )
    }

    /// Value of a key with a whole number within `range`; `default` where the key is missing or faulty.
    pub fn number(&self, name: &str, range: RangeInclusive<u64>, default: u64) -> u64 {
        let Some(value) = self.value(name) else { return default };
        match value.as_u64() {
            Some(number) if range.contains(&number) => number,
            _ => {
                self.fault(name, format!("must be a whole number from {} to {}", range.start(), range.end()));
                default
            }
        }
    }

    /// Value of a key with a number within `range`, fraction or not; `default` where the key is missing or faulty.
    pub fn decimal(&self, name: &str, range: RangeInclusive<f64>, default: f64) -> f64 {
        let Some(value) = self.value(name) else { return default };
        match value.as_f64() {
            Some(number) if range.contains(&number) => number,
            _ => {
                self.fault(name, format!("must be a number from {} to {}", range.start(), range.end()));
                default
            }
        }
    }

    /// Value of a key with a number of milliseconds within `range`; `default` where the key is missing or faulty.
    pub fn millis(&self, name: &str, range: RangeInclusive<u64>, default: u64) -> Duration {
        Duration::from_millis(self.number(name, range, default))
    }

    /// Value of a key with `true` or `false`; `default` where the key is missing or faulty.
    pub fn flag(&self, name: &str, default: bool) -> bool {
        let Some(value) = self.value(name) else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.fault(name, "must be true or false");
            default
        })
    }

    /// List of texts, none of them empty; empty without a value.
    pub fn texts(&self, name: &str) -> Vec<String> {
        let Some(value) = self.value(name) else { return Vec::new() };
        let text = |item: &Value| item.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let all: Option<Vec<_>> = value.as_array().and_then(|items| items.iter().map(text).collect());
        all.unwrap_or_else(|| {
            self.fault(name, "must be a list of texts: [\"a\", \"b\"]");
            Vec::new()
        })
    }

    /// Table of texts in the order of the file; empty without a value.
    pub fn text_map(&self, name: &str) -> Vec<(String, String)> {
        let Some(value) = self.value(name) else { return Vec::new() };
        let pair = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
        let all: Option<Vec<_>> = value.as_object().and_then(|table| table.iter().map(pair).collect());
        all.unwrap_or_else(|| {
            self.fault(name, "must be a table of texts: { name = \"text\" }");
            Vec::new()
        })
    }

    /// Table of header fields; empty without a value.
    pub fn headers(&self, name: &str) -> Vec<(HeaderName, HeaderValue)> {
        let read = |(key, value): (String, String)| {
            let field = HeaderName::try_from(&key).ok().zip(HeaderValue::try_from(&value).ok());
            if field.is_none() {
                self.fault(&format!("{name}.{key}"), "is no header field");
            }
            field
        };
        self.text_map(name).into_iter().filter_map(read).collect()
    }

    /// List of names of header fields.
    pub fn header_names(&self, name: &str) -> Vec<HeaderName> {
        let read = |(at, text): (usize, String)| {
            let field = HeaderName::try_from(&text).ok();
            if field.is_none() {
                self.fault(&format!("{name}[{at}]"), "is no name of a header field");
            }
            field
        };
        self.texts(name).into_iter().enumerate().filter_map(read).collect()
    }

    /// Table of that name; an absent one reads as empty.
    pub fn table(&self, name: &str) -> Settings<'a> {
        let value = self.value(name);
        let values = value.and_then(Value::as_object);
        if value.is_some() && values.is_none() {
            self.fault(name, "must be a table: { … }");
        }
        self.inner(values, self.at(name))
    }

    /// Tables in a list; empty without a value.
    pub fn tables(&self, name: &str) -> Vec<Settings<'a>> {
        let Some(value) = self.value(name) else { return Vec::new() };
        let Some(items) = value.as_array() else {
            self.fault(name, "must be a list of tables: [{ … }]");
            return Vec::new();
        };
        let mut out = Vec::new();
        for (at, item) in items.iter().enumerate() {
            match item.as_object() {
                Some(values) => out.push(self.inner(Some(values), self.at(&format!("{name}[{at}]")))),
                None => self.fault(&format!("{name}[{at}]"), "must be a table: { … }"),
            }
        }
        out
    }

    /// URL that may be connected to: `http://`, `https://` or `unix://`.
    pub fn endpoint(&self, name: &str) -> Option<Endpoint> {
        let url = self.text(name)?;
        self.checked(name, &url)
    }

    /// URL that is required and may be connected to.
    pub fn needed_endpoint(&self, name: &str) -> Option<Endpoint> {
        self.needed(name, self.endpoint(name))
    }

    /// Value of a key with a table of URLs: name and endpoint of each.
    pub fn endpoints(&self, name: &str) -> Vec<(String, Endpoint)> {
        let read = |(key, url): (String, String)| Some((key.clone(), self.checked(&format!("{name}.{key}"), &url)?));
        self.text_map(name).into_iter().filter_map(read).collect()
    }

    fn checked(&self, name: &str, url: &str) -> Option<Endpoint> {
        match self.surroundings.check_url(url) {
            Ok(()) => Some(Endpoint::new(url)),
            Err(message) => {
                self.fault(name, message);
                None
            }
        }
    }

    /// Contents of a file, whose path is required.
    pub fn needed_file(&self, name: &str, bytes_max: usize) -> Option<Bytes> {
        let path = self.needed_text(name)?;
        let read = self.surroundings.file(&path, bytes_max);
        read.map_err(|message| self.fault(name, format!("{path}: {message}"))).ok()
    }

    /// Secret, by the name of the environment variable that holds it.
    pub fn secret_env(&self, name: &str) -> Option<String> {
        let variable = self.text(name)?;
        let value = self.surroundings.env(&variable).filter(|value| !value.is_empty());
        if value.is_none() {
            self.fault(name, format!("the environment variable {variable} is not set or empty"));
        }
        value
    }
}

impl Drop for Settings<'_> {
    fn drop(&mut self) {
        if self.open {
            return;
        }
        let asked = self.asked.take();
        // A fault of the whole table hides its unread keys: the builder gave up before it read them.
        if self.faults.borrow().iter().any(|fault| fault.path == self.path) {
            return;
        }
        for name in self.values.into_iter().flat_map(Map::keys).filter(|name| !asked.contains(*name)) {
            let known: Vec<_> = asked.iter().map(String::as_str).collect();
            let known = if known.is_empty() {
                "there are none here".into()
            } else {
                format!("known are: {}", known.join(", "))
            };
            self.fault(name, format!("unknown key; {known}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::Nowhere;

    #[track_caller]
    fn check<T>(table: &Value, build: impl FnOnce(&Settings<'_>) -> Option<T>, faults: &[&str]) {
        let found = Settings::read(Some(table), &Nowhere, build).err().unwrap_or_default();
        let found: Vec<_> = found.iter().map(|fault| format!("{}: {}", fault.path, fault.message)).collect();
        assert_eq!(found, faults);
    }

    #[test]
    fn every_fault_is_named_at_once() {
        let table = json!({
            "a": 7, "b": "x", "n": 11, "rules": [{ "pattern": "", "what": 1 }, 3], "url": "ftp://x", "more": true,
            "secret": "UNSET", "fields": { "x y": "1" },
        });
        let build = |settings: &Settings<'_>| {
            settings.text("a");
            settings.needed_text("missing");
            settings.word("b", &[("one", 1), ("two", 2)]);
            settings.number("n", 0..=10, 1);
            for rule in settings.tables("rules") {
                rule.text("pattern");
            }
            settings.endpoint("url");
            settings.secret_env("secret");
            settings.headers("fields");
            Some(())
        };
        check(
            &table,
            build,
            &[
                "a: must be text in quotes, not empty",
                "missing: is missing",
                "b: must be one of one, two",
                "n: must be a whole number from 0 to 10",
                "rules[1]: must be a table: { … }",
                "rules[0].pattern: must be text in quotes, not empty",
                "rules[0].what: unknown key; known are: pattern",
                "url: must begin with http://",
                "secret: the environment variable UNSET is not set or empty",
                "fields.x y: is no header field",
                "more: unknown key; known are: a, b, fields, missing, n, rules, secret, url",
            ],
        );
    }

    #[test]
    fn what_is_absent_is_the_default() {
        let build = |settings: &Settings<'_>| {
            assert_eq!(settings.word("b", &[("one", 1), ("two", 2)]), 1);
            assert_eq!(settings.number("n", 0..=10, 3), 3);
            assert!(settings.flag("f", true) && settings.texts("t").is_empty());
            assert!(settings.table("u").text("x").is_none());
            Some(())
        };
        assert_eq!(Settings::read(None, &Nowhere, build), Ok(()));
        check(&json!([1]), |_| Some(()), &[": must be a table"]);
        check(&json!({}), |_| None::<()>, &[": cannot be used"]);
    }
}
