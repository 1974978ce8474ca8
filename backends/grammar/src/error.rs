//! Reasons why a text is no grammar that can be enforced, and why a sequence cannot go on.

use crate::kind::Kind;
use crate::vocabulary::VocabularyError;

/// Longest message of the library that is repeated, in characters: the message may quote the text.
const MESSAGE_CHARS_MAX: usize = 400;

/// Most characters of a client's name or text that a message repeats.
const SHOWN_CHARS_MAX: usize = 64;

/// Refusal of a grammar's text. Each variant but [`Self::Vocabulary`] is the client's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// A size of the text is above its limit; nothing was compiled.
    #[error("the {kind} has {size} {what}, limit {limit}")]
    TooLarge {
        /// Kind of the text.
        kind: Kind,
        /// Unit of the size: "bytes", "levels", "patterns".
        what: &'static str,
        /// Size of the text.
        size: u64,
        /// Largest size that is accepted.
        limit: u64,
    },
    /// The text takes more work to compile or to follow than is spent on one grammar.
    #[error("the {kind} is too complex: {message}")]
    TooComplex {
        /// Kind of the text.
        kind: Kind,
        /// Limit that was reached, in the library's words.
        message: String,
    },
    /// The text is not valid, or no output at all can satisfy it.
    #[error("the {kind} is not valid: {message}")]
    Malformed {
        /// Kind of the text.
        kind: Kind,
        /// Description of the fault.
        message: String,
    },
    /// The text uses a feature that is refused.
    #[error("the {kind} uses {feature}, which is not supported: {why}")]
    Unsupported {
        /// Kind of the text.
        kind: Kind,
        /// Name of the feature: a keyword, with its place.
        feature: String,
        /// Reason of the refusal.
        why: &'static str,
    },
    /// The model's tokens cannot be held to any grammar.
    #[error("the model's tokens cannot be held to a grammar")]
    Vocabulary(#[source] VocabularyError),
}

impl GrammarError {
    pub(crate) fn malformed(kind: Kind, message: impl std::fmt::Display) -> Self {
        Self::Malformed { kind, message: clip(&message.to_string()) }
    }

    /// Turns an error of the library into the variant that it belongs to.
    pub(crate) fn of_library(kind: Kind, message: &str) -> Self {
        let message = clip(message);
        // The library's errors are texts; these words stand in the messages of its limits.
        let limits = ["fuel", "too large", "too complex", "too many", "exceeded", "limit", "panic"];
        let lower = message.to_lowercase();
        if limits.iter().any(|word| lower.contains(word)) {
            Self::TooComplex { kind, message }
        } else {
            Self::Malformed { kind, message }
        }
    }
}

/// Failure of one sequence's matcher. Other sequences of the same grammar are unaffected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    /// The token does not follow the tokens before it.
    #[error("token {token} does not fit the grammar")]
    Rejected {
        /// Id of the token.
        token: u32,
    },
    /// The next mask takes more work than is spent on one token.
    #[error("the grammar is too complex at this point of the text: {message}")]
    TooComplex {
        /// Limit that was reached, in the library's words.
        message: String,
    },
}

/// Refuses a size above its limit.
pub(crate) fn too_large(kind: Kind, what: &'static str, size: usize, limit: usize) -> Result<(), GrammarError> {
    let (size, limit) = (size as u64, limit as u64);
    if size > limit { Err(GrammarError::TooLarge { kind, what, size, limit }) } else { Ok(()) }
}

/// A client's text for a message: its first characters, as many as the gateway repeats of a name.
pub(crate) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        None => text.to_owned(),
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}

/// A library's message in one line, without its remarks in angle brackets at the end. The middle of a long message,
/// where it quotes the text, is left out.
pub(crate) fn clip(text: &str) -> String {
    let text = text.split("\n<").next().unwrap_or_default().trim();
    let printed: Vec<char> = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let half = MESSAGE_CHARS_MAX / 2;
    if printed.len() <= MESSAGE_CHARS_MAX {
        return printed.into_iter().collect();
    }
    printed[..half].iter().chain(&[' ', '…', ' ']).chain(&printed[printed.len() - half..]).collect()
}
