//! Text of a grammar from outside, with its kind: the one form in which the gateway sends a grammar and workers take it.

use crate::error::{GrammarError, too_large};
use crate::expression::{quoted, unanchored};
use crate::kind::Kind;
use crate::lark;
use crate::schema::{self, Unenforced};
use llguidance::api::TopLevelGrammar;

/// Longest text of a grammar, in bytes.
pub const TEXT_BYTES_MAX: usize = 256 << 10;
/// Longest regex, in bytes.
const REGEX_BYTES_MAX: usize = 16 << 10;
/// Most choices of [`Kind::Choice`].
const CHOICES_MAX: usize = 4096;

/// Text of a grammar and its kind, unchecked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Form of the text.
    pub kind: Kind,
    /// Text, as the client or the gateway wrote it.
    pub text: String,
}

/// A source in the library's form.
pub(crate) struct Prepared {
    pub(crate) grammar: TopLevelGrammar,
    pub(crate) unenforced: Vec<Unenforced>,
}

impl Source {
    /// A JSON schema as text.
    pub fn json_schema(text: impl Into<String>) -> Self {
        Self { kind: Kind::JsonSchema, text: text.into() }
    }

    /// Any JSON object.
    pub fn json_object() -> Self {
        Self { kind: Kind::JsonObject, text: String::new() }
    }

    /// A regular expression that the whole output matches.
    pub fn regex(text: impl Into<String>) -> Self {
        Self { kind: Kind::Regex, text: text.into() }
    }

    /// A grammar in Lark's syntax.
    pub fn lark(text: impl Into<String>) -> Self {
        Self { kind: Kind::Lark, text: text.into() }
    }

    /// One of several texts.
    pub fn choice<S: Into<String>>(choices: impl IntoIterator<Item = S>) -> Self {
        let choices = choices.into_iter().map(|choice| serde_json::Value::String(choice.into()));
        Self { kind: Kind::Choice, text: serde_json::Value::Array(choices.collect()).to_string() }
    }

    /// Checks the text without a vocabulary, and returns the keywords of its schemas that are not enforced.
    ///
    /// # Errors
    /// [`GrammarError`], as [`crate::Grammar::compile`] returns before it compiles anything.
    pub fn check(&self) -> Result<Vec<Unenforced>, GrammarError> {
        self.prepare().map(|prepared| prepared.unenforced)
    }

    pub(crate) fn prepare(&self) -> Result<Prepared, GrammarError> {
        let Self { kind, text } = self;
        let limit = if *kind == Kind::Regex { REGEX_BYTES_MAX } else { TEXT_BYTES_MAX };
        too_large(*kind, "bytes", text.len(), limit)?;
        let plain = |grammar| Prepared { grammar, unenforced: Vec::new() };
        Ok(match kind {
            Kind::JsonSchema => {
                let (schema, unenforced) = schema::prepare(*kind, text)?;
                Prepared { grammar: TopLevelGrammar::from_json_schema(schema), unenforced }
            }
            Kind::JsonObject => plain(TopLevelGrammar::from_json_schema(schema::any_object())),
            Kind::Regex if text.is_empty() => plain(choice(&[String::new()])),
            Kind::Regex => plain(TopLevelGrammar::from_regex(&unanchored(text))),
            Kind::Lark => {
                let (text, unenforced) = lark::prepare(text)?;
                Prepared { grammar: TopLevelGrammar::from_lark(text), unenforced }
            }
            Kind::Choice => {
                let choices: Vec<String> =
                    serde_json::from_str(text).map_err(|error| GrammarError::malformed(*kind, error))?;
                if choices.is_empty() {
                    return Err(GrammarError::malformed(*kind, "it is empty"));
                }
                too_large(*kind, "choices", choices.len(), CHOICES_MAX)?;
                plain(choice(&choices))
            }
        })
    }
}

fn choice(choices: &[String]) -> TopLevelGrammar {
    let literals: Vec<String> = choices.iter().map(|choice| quoted(choice)).collect();
    TopLevelGrammar::from_lark(format!("start: {}", literals.join(" | ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bounded_before_anything_is_parsed() {
        let long = |kind| Source { kind, text: "x".repeat(TEXT_BYTES_MAX + 1) };
        for kind in [Kind::JsonSchema, Kind::Regex, Kind::Lark, Kind::Choice, Kind::JsonObject] {
            assert!(matches!(long(kind).check(), Err(GrammarError::TooLarge { what: "bytes", .. })), "{kind}");
        }
        assert!(matches!(
            Source::choice((0..=CHOICES_MAX).map(|n| n.to_string())).check(),
            Err(GrammarError::TooLarge { what: "choices", .. })
        ));
        assert!(matches!(Source::choice(Vec::<String>::new()).check(), Err(GrammarError::Malformed { .. })));
    }
}
