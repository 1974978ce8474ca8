//! What can be wrong with a checkpoint's text files.

use penstock_dialects::error::{ApiError, ApiErrorKind};

/// Why a [`crate::TextModel`] cannot be built or used. Names the file and the reason; never more than a short piece of its content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The file is missing or cannot be read.
    #[error("{file}: {reason}")]
    Unreadable {
        /// Name inside the checkpoint folder.
        file: String,
        /// The system's words.
        reason: String,
    },
    /// Larger than its bound; nothing of it was parsed.
    #[error("{file}: {bytes} bytes, at most {limit} are read")]
    TooLarge {
        /// Name inside the checkpoint folder.
        file: &'static str,
        /// Its size.
        bytes: u64,
        /// The bound.
        limit: u64,
    },
    /// The file is not what its name says.
    #[error("{file}: {reason}")]
    Malformed {
        /// Name inside the checkpoint folder.
        file: &'static str,
        /// What is wrong, with a position where there is one.
        reason: String,
    },
    /// The file is sound, but asks for something that is not built.
    #[error("{file}: {what} is not supported")]
    Unsupported {
        /// Name inside the checkpoint folder.
        file: &'static str,
        /// What is not built.
        what: String,
    },
    /// A text that is not worth tokenizing: no context holds it.
    // The first words are those by which clients know an exceeded context, whatever it is counted in.
    #[error(
        "This model's maximum context length is exceeded: the text has {bytes} bytes, and at most {limit} are tokenized. Please reduce \
         its length."
    )]
    TextTooLong {
        /// Its size.
        bytes: usize,
        /// The bound.
        limit: usize,
    },
    /// The tokenizer refused a text.
    #[error("the text cannot be tokenized: {reason}")]
    Encode {
        /// The tokenizer's words.
        reason: String,
    },
}

impl From<TextError> for ApiError {
    /// As a fault of the request's: for errors of `encode`, not of loading.
    fn from(error: TextError) -> Self {
        let kind = match error {
            TextError::TextTooLong { .. } => ApiErrorKind::ContextLength,
            _ => ApiErrorKind::Invalid,
        };
        ApiError { kind, param: None, message: error.to_string() }
    }
}

impl TextError {
    pub(crate) fn malformed(file: &'static str, reason: impl std::fmt::Display) -> Self {
        TextError::Malformed { file, reason: clip(&reason.to_string()) }
    }
}

/// At most 300 characters of a foreign message, on one line: it may quote the file.
pub(crate) fn clip(text: &str) -> String {
    let mut out: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
    if text.chars().nth(300).is_some() {
        out.push('…');
    }
    out
}
