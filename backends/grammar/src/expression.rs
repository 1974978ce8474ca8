//! Expressions and strings of Lark's terminals.

use serde_json::Value;

/// Any text; and any that is not empty.
pub(crate) const ANY: &str = "/(?s:.*)/";
pub(crate) const SOME: &str = "/(?s:.+)/";

/// Any text in which `barred`, an expression, matches nowhere.
pub(crate) fn without(barred: Option<&str>) -> String {
    barred.map_or_else(|| ANY.to_owned(), |barred| format!("({ANY} & ~({ANY} {barred} {ANY}))"))
}

/// A text as a string of Lark, which has JSON's escapes and refuses the delete character as it is.
pub fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Returns true if a regular expression ends within an escape: what follows it would become a part of it.
pub fn ends_in_escape(pattern: &str) -> bool {
    pattern.chars().rev().take_while(|c| *c == '\\').count() % 2 == 1
}

/// A regular expression of the whole text, as Lark writes it; one that [`ends_in_escape`] has no such form.
pub fn regex(pattern: &str) -> String {
    let escaped = one_line(unanchored(pattern));
    if escaped.is_empty() { "\"\"".to_owned() } else { format!("/{escaped}/") }
}

/// A regular expression without what ends one in Lark: slashes and line breaks are escaped, once each. A character
/// behind a backslash belongs to it, so the slash in `\\/` is one that stands alone.
pub fn one_line(pattern: &str) -> String {
    let (mut out, mut characters) = (String::with_capacity(pattern.len()), pattern.chars());
    while let Some(c) = characters.next() {
        let (escaped, c) = if c == '\\' { (true, characters.next()) } else { (false, Some(c)) };
        match c {
            Some('/') => out.push_str("\\/"),
            Some('\n') => out.push_str("\\n"),
            Some('\r') => out.push_str("\\r"),
            c => out.extend(escaped.then_some('\\').into_iter().chain(c)),
        }
    }
    out
}

/// Drops `^` in front and `$` at the end, which say no more than that the whole output matches. They stay where an
/// alternative outside of groups gives them another meaning; the library then refuses them.
pub(crate) fn unanchored(regex: &str) -> &str {
    let (mut depth, mut in_class, mut escaped, mut split) = (0_i64, false, false, false);
    for c in regex.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class => depth += 1,
            ')' if !in_class => depth -= 1,
            '|' if !in_class && depth == 0 => split = true,
            _ => {}
        }
    }
    if split {
        return regex;
    }
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    let backslashes = |text: &str| text.chars().rev().take_while(|c| *c == '\\').count();
    regex.strip_suffix('$').filter(|rest| backslashes(rest) % 2 == 0).unwrap_or(regex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regular_expression_stays_on_its_line_and_keeps_its_meaning() {
        for (pattern, written) in [
            ("a/b", r"/a\/b/"),
            (r"a\/b", r"/a\/b/"),
            (r"a\\/b", r"/a\\\/b/"),
            (r"a\\\/b", r"/a\\\/b/"),
            (r"[\\/]+", r"/[\\\/]+/"),
            (r"\d\\", r"/\d\\/"),
            ("a\nb\r", r"/a\nb\r/"),
            ("a\\\nb", r"/a\nb/"),
            ("a\\\\\nb", r"/a\\\nb/"),
            ("^a$", "/a/"),
            ("", "\"\""),
        ] {
            assert_eq!(regex(pattern), written, "{pattern:?}");
        }
    }

    #[test]
    fn an_escape_at_the_end_is_told() {
        for (pattern, ends) in [("a\\", true), ("a\\\\", false), ("\\\\\\", true), ("", false), ("a", false)] {
            assert_eq!(ends_in_escape(pattern), ends, "{pattern:?}");
        }
    }

    #[test]
    fn anchors_around_the_whole_are_dropped() {
        for (regex, want) in [
            ("^a+$", "a+"),
            (r"^a\$", r"a\$"),
            (r"a\\$", r"a\\"),
            ("^a|b$", "^a|b$"),
            ("^(a|b)$", "(a|b)"),
            ("^[|]$", "[|]"),
            ("ab", "ab"),
        ] {
            assert_eq!(unanchored(regex), want, "{regex}");
        }
    }
}
