//! Incremental JSON checker that finds the end of a value, one character at a time.
//!
//! Stricter than counting brackets, since invalid JSON must be found at once. One exception: raw control characters in
//! strings pass, as models write line breaks there and the receiver is the better judge.

/// Deepest nesting; serde_json, which most receivers and this gateway use, reads no deeper.
const DEPTH_MAX: usize = 127;
/// Longest number or word (`true`, `null`) in bytes; a longer one makes the value invalid.
const SCALAR_BYTES_MAX: usize = 128;

/// Effect of a character on the JSON value that is being checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The value is valid so far and not complete.
    More,
    /// The character ends the JSON value and belongs to it.
    End,
    /// The value ended before the character.
    EndBefore,
    /// The character makes the value invalid.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Value,
    /// Behind `[`: a value or `]` follows.
    ValueOrEnd,
    /// Behind `{`: a key or `}` follows.
    KeyOrEnd,
    Key,
    Colon,
    /// Behind a value inside an array or object: a comma or the closing bracket follows.
    After,
    Text {
        key: bool,
    },
    Escape {
        key: bool,
    },
    /// In a `\u` escape, with this many hexadecimal digits still to come.
    Hex {
        key: bool,
        left: u8,
    },
    Scalar,
}

/// Checker of one JSON value that comes character by character.
#[derive(Clone, Debug)]
pub(crate) struct JsonScan {
    at: At,
    /// Brackets that are open, outermost first; true for objects, false for arrays.
    open: Vec<bool>,
    scalar: String,
}

impl JsonScan {
    pub(crate) fn new() -> Self {
        Self { at: At::Value, open: Vec::new(), scalar: String::new() }
    }

    /// Returns true if the value is inside a string or key.
    pub(crate) fn in_text(&self) -> bool {
        matches!(self.at, At::Text { .. } | At::Escape { .. } | At::Hex { .. })
    }

    /// Takes the next character and tells whether the value goes on.
    pub(crate) fn push(&mut self, c: char) -> Verdict {
        match self.at {
            At::Text { key } => self.text(c, key),
            At::Escape { key } => match c {
                'u' => self.go(At::Hex { key, left: 4 }),
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.go(At::Text { key }),
                _ => Verdict::Bad,
            },
            At::Hex { key, left } if c.is_ascii_hexdigit() => {
                self.go(if left == 1 { At::Text { key } } else { At::Hex { key, left: left - 1 } })
            }
            At::Hex { .. } => Verdict::Bad,
            At::Scalar => self.scalar(c),
            _ if matches!(c, ' ' | '\t' | '\n' | '\r') => Verdict::More,
            At::Value => self.value(c),
            At::ValueOrEnd if c == ']' => self.close(false),
            At::ValueOrEnd => self.value(c),
            At::KeyOrEnd if c == '}' => self.close(true),
            At::KeyOrEnd | At::Key if c == '"' => self.go(At::Text { key: true }),
            At::Colon if c == ':' => self.go(At::Value),
            At::After => self.after(c),
            At::KeyOrEnd | At::Key | At::Colon => Verdict::Bad,
        }
    }

    fn go(&mut self, at: At) -> Verdict {
        self.at = at;
        Verdict::More
    }

    fn text(&mut self, c: char, key: bool) -> Verdict {
        match c {
            '\\' => self.go(At::Escape { key }),
            '"' if key => self.go(At::Colon),
            '"' => self.ended(Verdict::End),
            _ => Verdict::More,
        }
    }

    fn value(&mut self, c: char) -> Verdict {
        match c {
            '"' => self.go(At::Text { key: false }),
            '{' | '[' if self.open.len() >= DEPTH_MAX => Verdict::Bad,
            '{' => {
                self.open.push(true);
                self.go(At::KeyOrEnd)
            }
            '[' => {
                self.open.push(false);
                self.go(At::ValueOrEnd)
            }
            '-' | '0'..='9' | 't' | 'f' | 'n' => {
                self.scalar.clear();
                self.scalar.push(c);
                self.go(At::Scalar)
            }
            _ => Verdict::Bad,
        }
    }

    fn after(&mut self, c: char) -> Verdict {
        match (c, self.open.last()) {
            (',', Some(true)) => self.go(At::Key),
            (',', Some(false)) => self.go(At::Value),
            ('}', Some(true)) => self.close(true),
            (']', Some(false)) => self.close(false),
            _ => Verdict::Bad,
        }
    }

    fn scalar(&mut self, c: char) -> Verdict {
        if c.is_ascii_alphanumeric() || matches!(c, '-' | '+' | '.') {
            self.scalar.push(c);
            let word = ["true", "false", "null"].iter().any(|word| word.starts_with(&self.scalar));
            let number = !self.scalar.starts_with(['t', 'f', 'n']) && self.scalar.len() <= SCALAR_BYTES_MAX;
            return if word || number { Verdict::More } else { Verdict::Bad };
        }
        if serde_json::from_str::<&serde_json::value::RawValue>(&self.scalar).is_err() {
            return Verdict::Bad;
        }
        if self.open.is_empty() {
            return Verdict::EndBefore;
        }
        self.at = At::After;
        self.push(c)
    }

    fn close(&mut self, object: bool) -> Verdict {
        if self.open.pop() != Some(object) {
            return Verdict::Bad;
        }
        self.ended(Verdict::End)
    }

    fn ended(&mut self, outermost: Verdict) -> Verdict {
        self.at = At::After;
        if self.open.is_empty() { outermost } else { Verdict::More }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Length in bytes of the value at the front of `text`; `Err` with the offset of the first bad character; `None`
    /// if the value goes on.
    fn scan(text: &str) -> Result<Option<usize>, usize> {
        let mut scan = JsonScan::new();
        for (at, c) in text.char_indices() {
            match scan.push(c) {
                Verdict::More => {}
                Verdict::End => return Ok(Some(at + c.len_utf8())),
                Verdict::EndBefore => return Ok(Some(at)),
                Verdict::Bad => return Err(at),
            }
        }
        Ok(None)
    }

    #[test]
    fn ends_and_faults_are_found_where_they_are() {
        assert_eq!(scan(r#"{"a": [1, -2.5e3, "x\"]}\u00e9", {}], "b": null} tail"#), Ok(Some(48)));
        assert_eq!(scan(r#""text" "#), Ok(Some(6)));
        assert_eq!(scan("12 "), Ok(Some(2)));
        assert_eq!(scan("[]]"), Ok(Some(2)));
        assert_eq!(scan(r#"{"a": 1"#), Ok(None));
        assert_eq!(scan(r#"{"a": tru]"#), Err(9));
        assert_eq!(scan(r#"{"a": 1,}"#), Err(8));
        assert_eq!(scan("{'a': 1}"), Err(1));
        assert_eq!(scan(r#"{"a" 1}"#), Err(5));
        assert_eq!(scan(r#"["\x"]"#), Err(3));
        assert_eq!(scan("[1}"), Err(2));
        assert_eq!(scan("[01]"), Err(3));
        assert_eq!(scan(&"[".repeat(500)), Err(DEPTH_MAX));
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            (-1e9f64..1e9).prop_map(Into::into),
            "[ -~é\"\\\\\n]{0,8}".prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 32, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::vec(("[a-z\"]{0,4}", inner), 0..4)
                    .prop_map(|members| serde_json::Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_value_ends_at_its_end(value in json(), pretty: bool) {
            let text = if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() };
            let shown = format!("{text} x");
            prop_assert_eq!(scan(&shown), Ok(Some(text.len())));
        }

        #[test]
        fn what_is_accepted_is_json(text in r#"[\[\]{}",:0-9a\\ -]{0,12}"#) {
            let shown = format!("{text} ");
            if let Ok(Some(end)) = scan(&shown) {
                prop_assert!(serde_json::from_str::<serde_json::Value>(&shown[..end]).is_ok());
            }
        }
    }
}
