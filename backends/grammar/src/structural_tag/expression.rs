//! Expressions of Lark's terminals.

use serde_json::Value;

/// Any text; and any that is not empty.
pub(super) const ANY: &str = "/(?s:.*)/";
pub(super) const SOME: &str = "/(?s:.+)/";

/// Any text in which `barred`, an expression, matches nowhere.
pub(super) fn without(barred: Option<&str>) -> String {
    barred.map_or_else(|| ANY.to_owned(), |barred| format!("({ANY} & ~({ANY} {barred} {ANY}))"))
}

/// A text as a string of Lark, which has JSON's escapes and refuses the delete character as it is.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A regular expression of the whole text, as Lark writes it.
pub(super) fn regex(pattern: &str) -> String {
    let pattern = crate::source::unanchored(pattern);
    // A slash ends a regular expression of Lark's, and a line break its line.
    let escaped = pattern.replace("\\/", "/").replace('/', "\\/").replace('\n', "\\n").replace('\r', "\\r");
    if escaped.is_empty() { "\"\"".to_owned() } else { format!("/{escaped}/") }
}
