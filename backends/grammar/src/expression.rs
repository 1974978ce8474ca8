//! Expressions and strings of Lark's terminals.

use serde_json::Value;
use std::borrow::Cow;

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
    let escaped = one_line(&unanchored(pattern));
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

/// Part of a regular expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// A backslash and the character behind it; the backslash alone at the end of the text.
    Escape(&'a str),
    /// Beginning of a class, with `^` where the class is negated and with the bracket that stands for itself.
    Open(&'a str),
    /// End of the class that was opened last.
    Close,
    /// A class by name (`[:alpha:]`).
    Named(&'a str),
    /// Any other character.
    Plain(char),
}

/// Parts of a regular expression as Rust's `regex` reads classes: they nest, and a bracket in front stands for itself.
pub(crate) struct Parts<'a> {
    rest: &'a str,
    /// Number of classes around the next part.
    pub(crate) classes: usize,
}

impl<'a> Parts<'a> {
    pub(crate) fn of(pattern: &'a str) -> Self {
        Self { rest: pattern, classes: 0 }
    }

    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        taken
    }
}

impl<'a> Iterator for Parts<'a> {
    type Item = Part<'a>;

    fn next(&mut self) -> Option<Part<'a>> {
        let c = self.rest.chars().next()?;
        Some(match c {
            '\\' => {
                let escaped = self.rest[1..].chars().next().map_or(0, char::len_utf8);
                Part::Escape(self.take(1 + escaped))
            }
            '[' => {
                let name = self.rest.strip_prefix("[:").filter(|_| self.classes > 0);
                let end = name.and_then(|name| name.find(|c: char| c != '^' && !c.is_ascii_alphabetic()));
                if let (Some(name), Some(end)) = (name, end)
                    && name[end..].starts_with(":]")
                {
                    return Some(Part::Named(self.take(end + 4)));
                }
                self.classes += 1;
                let negated = usize::from(self.rest[1..].starts_with('^'));
                let itself = usize::from(self.rest[1 + negated..].starts_with(']'));
                Part::Open(self.take(1 + negated + itself))
            }
            ']' if self.classes > 0 => {
                self.classes -= 1;
                self.take(1);
                Part::Close
            }
            c => {
                self.take(c.len_utf8());
                Part::Plain(c)
            }
        })
    }
}

/// Classes by name in an expression, which are lists of hundreds of ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Classes {
    /// Number of them.
    pub(crate) count: usize,
    /// True if some have characters of several bytes, in large numbers: each becomes dozens of states.
    pub(crate) are_large: bool,
}

impl Classes {
    /// Classes of an expression in which `\w` and `\d` are those of Unicode.
    pub(crate) fn of_unicode(expression: &str) -> Self {
        let is_large = |name: char, classes: usize| match name {
            'd' | 's' => Some(classes > 0),
            'D' | 'p' | 'P' | 'S' | 'w' | 'W' => Some(true),
            _ => None,
        };
        Self::of(expression, is_large)
    }

    /// Classes of a pattern of JSON Schema: all but `\p` and `\P` are those of ASCII.
    pub(crate) fn of_ascii(pattern: &str) -> Self {
        Self::of(pattern, |name, _| matches!(name, 'p' | 'P').then_some(true))
    }

    /// `is_large`: whether the class of that name is large within so many brackets; `None`: it is no class.
    fn of(expression: &str, is_large: impl Fn(char, usize) -> Option<bool>) -> Self {
        let (mut all, mut parts) = (Self { count: 0, are_large: false }, Parts::of(expression));
        while let Some(part) = parts.next() {
            let Part::Escape(escape) = part else { continue };
            if let Some(is_large) = escape.chars().nth(1).and_then(|name| is_large(name, parts.classes)) {
                all.count += 1;
                all.are_large |= is_large;
            }
        }
        all
    }
}

/// Drops `^` in front, behind flags too, and `$` at the end: they say no more than that the whole output matches. They
/// stay where an alternative outside of groups gives them another meaning; the library then refuses them.
pub(crate) fn unanchored(regex: &str) -> Cow<'_, str> {
    let (mut depth, mut parts, mut splits) = (0_i64, Parts::of(regex), false);
    while let Some(part) = parts.next() {
        match part {
            Part::Plain(_) if parts.classes > 0 => {}
            Part::Plain('(') => depth += 1,
            Part::Plain(')') => depth -= 1,
            Part::Plain('|') => splits |= depth == 0,
            _ => {}
        }
    }
    if splits {
        return regex.into();
    }
    let flags = regex.strip_prefix("(?").and_then(|rest| rest.find(|c: char| c != '-' && !c.is_ascii_alphabetic()));
    let (flags, inner) = match flags {
        Some(end) if end > 0 && regex[end + 2..].starts_with(')') => regex.split_at(end + 3),
        _ => ("", regex),
    };
    let inner = inner.strip_prefix('^').unwrap_or(inner);
    let inner = inner.strip_suffix('$').filter(|rest| !ends_in_escape(rest)).unwrap_or(inner);
    if flags.is_empty() { inner.into() } else { format!("{flags}{inner}").into() }
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
            ("^[[:alpha:]|]+$", "[[:alpha:]|]+"),
            ("^[]|]$", "[]|]"),
            ("^[^]|]$", "[^]|]"),
            ("^[a[^b|]|]$", "[a[^b|]|]"),
            (r"^[\]|]$", r"[\]|]"),
            ("^[a]|b$", "^[a]|b$"),
            ("^[[:alpha:]]|b$", "^[[:alpha:]]|b$"),
            ("(?i)^yes$", "(?i)yes"),
            ("(?i-s)^yes", "(?i-s)yes"),
            ("(?i)^a|b$", "(?i)^a|b$"),
            ("(?:^a)$", "(?:^a)"),
            ("ab", "ab"),
        ] {
            assert_eq!(unanchored(regex), want, "{regex}");
        }
    }
}
