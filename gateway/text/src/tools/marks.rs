//! Search for the first of several fixed strings in a stream of characters.

/// Search state for a few short strings. Cost of a character: the sum of the strings' lengths at worst.
#[derive(Clone, Debug)]
pub(crate) struct Marks {
    marks: &'static [&'static str],
    /// End of the stream that may be the beginning of a mark.
    held: String,
}

impl Marks {
    /// Creates a search. No mark may be empty or the beginning of another.
    pub(crate) fn new(marks: &'static [&'static str]) -> Self {
        Self { marks, held: String::new() }
    }

    /// Takes a character. Text that belongs to no mark goes to `free`; returns the mark that the character completes.
    pub(crate) fn push(&mut self, c: char, free: &mut String) -> Option<&'static str> {
        self.held.push(c);
        while !self.held.is_empty() {
            if let Some(&mark) = self.marks.iter().find(|mark| **mark == self.held) {
                self.held.clear();
                return Some(mark);
            }
            if self.marks.iter().any(|mark| mark.starts_with(&self.held)) {
                return None;
            }
            free.push(self.held.remove(0));
        }
        None
    }

    /// Number of bytes held back because they may be the beginning of one of the searched marker strings.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// Takes the held text; the search starts anew.
    pub(crate) fn take_held(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Verdict on a text that may be the beginning of what a format expects, when that cannot be read from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    /// More text is needed.
    More,
    /// No continuation of the text is what the format expects.
    Bad,
}

/// Text behind `literal`.
pub(crate) fn literal<'a>(text: &'a str, literal: &str) -> Result<&'a str, Unread> {
    match text.strip_prefix(literal) {
        Some(rest) => Ok(rest),
        None if literal.starts_with(text) => Err(Unread::More),
        None => Err(Unread::Bad),
    }
}

/// Text behind `literal`, if it stands in front.
pub(crate) fn optional<'a>(text: &'a str, mark: &str) -> Result<&'a str, Unread> {
    match literal(text, mark) {
        Err(Unread::Bad) => Ok(text),
        read => read,
    }
}

/// Splits a text at the first `end`; every character in front of it must satisfy `allowed`.
pub(crate) fn until<'a>(
    text: &'a str,
    end: &str,
    allowed: impl Fn(char) -> bool,
) -> Result<(&'a str, &'a str), Unread> {
    if let Some((front, rest)) = text.split_once(end) {
        return if front.chars().all(allowed) { Ok((front, rest)) } else { Err(Unread::Bad) };
    }
    // The end of the text may be the beginning of `end`, whose characters need not be allowed.
    let begun = (1..end.len()).rev().filter(|&n| end.is_char_boundary(n)).find(|&n| text.ends_with(&end[..n]));
    let front = &text[..text.len() - begun.unwrap_or(0)];
    Err(if front.chars().all(allowed) { Unread::More } else { Unread::Bad })
}

/// Returns true for the characters of functions' names, dots and slashes of namespaces included.
pub(crate) fn in_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | ':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_complete_mark_is_found() {
        let mut marks = Marks::new(&["<tool>", "<<x", "[T]"]);
        let mut free = String::new();
        let found: Vec<&str> = "a<<tool><<<x<to[T]<t".chars().filter_map(|c| marks.push(c, &mut free)).collect();
        assert_eq!((found, free.as_str()), (vec!["<tool>", "<<x", "[T]"], "a<<<to"));
        assert_eq!((marks.held_bytes(), marks.take_held().as_str()), (2, "<t"));
    }

    #[test]
    fn texts_are_read_as_far_as_they_go() {
        assert_eq!(literal("<a>b", "<a>"), Ok("b"));
        assert_eq!(literal("<", "<a>"), Err(Unread::More));
        assert_eq!(literal("<b", "<a>"), Err(Unread::Bad));
        assert_eq!(until("name\n``", "\n```", in_name), Err(Unread::More));
        assert_eq!(until("name\n```x", "\n```", in_name), Ok(("name", "x")));
        assert_eq!(until("na me", ">", in_name), Err(Unread::Bad));
    }
}
