//! Doc comments, and the words with which none may begin.

use crate::source::Source;

/// Pronouns and similar words: a doc comment is read alone, so the noun that they stand for is missing.
const PRONOUNS: [&str; 46] = [
    "it",
    "its",
    "they",
    "their",
    "them",
    "that",
    "these",
    "those",
    "the same",
    "the other",
    "the others",
    "of these",
    "of those",
    "of them",
    "of it",
    "of that",
    "one that",
    "one who",
    "one which",
    "one of them",
    "one of these",
    "ones",
    "others",
    "another",
    "both",
    "neither",
    "none",
    "such",
    "who",
    "whose",
    "whom",
    "which",
    "as it",
    "as they",
    "as that",
    "in it",
    "in them",
    "for it",
    "for them",
    "for that",
    "with it",
    "with that",
    "when it",
    "this is",
    "this has",
    "same",
];

/// The first line of one doc comment.
#[derive(Debug)]
pub struct Opening {
    /// Path of the file.
    pub path: String,
    /// Line, from 1.
    pub number: usize,
    /// Text after the slashes.
    pub text: String,
}

impl Opening {
    /// Returns true if the comment begins with a pronoun.
    pub fn is_pronoun(&self) -> bool {
        let text = self.text.to_lowercase();
        PRONOUNS.iter().any(|word| {
            text.strip_prefix(word)
                .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || "_-'`".contains(c)))
        })
    }
}

/// First lines of all doc comments (`///` and `//!`) in `sources`.
pub fn openings(sources: &[Source]) -> Vec<Opening> {
    let mut openings = Vec::new();
    for source in sources {
        let mut before = None;
        for (index, line) in source.lines.iter().enumerate() {
            let line = line.trim_start();
            let kind = ["///", "//!"].into_iter().find(|kind| line.starts_with(kind) && !line.starts_with("////"));
            let text = kind.map_or("", |kind| line[kind.len()..].trim());
            if kind.is_some() && kind != before && !text.is_empty() {
                openings.push(Opening { path: source.path.clone(), number: index + 1, text: text.to_owned() });
            }
            before = kind;
        }
    }
    openings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_word_of_a_comment_counts() {
        let lines = [
            "/// Its size.",
            "fn a() {}",
            "/// Size.",
            "/// It is in bytes.",
            "fn b() {}",
            "/// That, once.",
            "/// Italics.",
        ];
        let source = Source { path: "x.rs".into(), lines: lines.map(str::to_owned).to_vec() };
        let found: Vec<(usize, bool)> = openings(&[source]).iter().map(|o| (o.number, o.is_pronoun())).collect();
        assert_eq!(found, [(1, true), (3, false), (6, true)]);
    }
}
