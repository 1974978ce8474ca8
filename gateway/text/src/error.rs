//! Errors in a checkpoint's text files.

use penstock_types::error::{ApiError, ApiErrorKind};

/// Reason why a [`crate::TextModel`] cannot be built or used. Names the file and the reason; never repeats more than a
/// short piece of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The file is missing or cannot be read.
    #[error("{file}: {reason}")]
    Unreadable {
        /// Name of the file inside the checkpoint folder.
        file: String,
        /// Message of the operating system about the file.
        reason: String,
    },
    /// The file is larger than its bound; nothing of it was parsed.
    #[error("{file}: {bytes} bytes, at most {limit} are read")]
    TooLarge {
        /// Name of the file inside the checkpoint folder.
        file: &'static str,
        /// Size of the file in bytes.
        bytes: u64,
        /// Largest size in bytes that is read.
        limit: u64,
    },
    /// The file does not have the format that its name says.
    #[error("{file}: {reason}")]
    Malformed {
        /// Name of the file inside the checkpoint folder.
        file: &'static str,
        /// Description of the fault, with a position where there is one.
        reason: String,
    },
    /// The file is valid, but uses a feature that is not supported.
    #[error("{file}: {what} is not supported")]
    Unsupported {
        /// Name of the file inside the checkpoint folder.
        file: &'static str,
        /// Name of the unsupported feature.
        what: String,
    },
    /// The text is too long for any context, and is refused untokenized.
    // The first words are those by which clients recognize an exceeded context, whatever its unit.
    #[error(
        "This model's maximum context length is exceeded: the text has {bytes} bytes, and at most {limit} are tokenized. Please reduce \
         its length."
    )]
    TextTooLong {
        /// Length of the text in bytes.
        bytes: usize,
        /// Longest text in bytes that is tokenized.
        limit: usize,
    },
    /// The tokenizer library refused a text, or panicked over it.
    #[error("the text cannot be tokenized: {reason}")]
    Encode {
        /// Message of the tokenizer library, shortened.
        reason: String,
    },
}

impl From<TextError> for ApiError {
    /// Converts an error of `encode` (not of loading) into a fault of the request.
    fn from(error: TextError) -> Self {
        let kind = match error {
            TextError::TextTooLong { .. } => ApiErrorKind::ContextLength,
            _ => ApiErrorKind::Invalid,
        };
        ApiError { kind, param: None, message: error.to_string() }
    }
}

impl TextError {
    pub(crate) fn gguf(error: penstock_gguf::GgufError) -> Self {
        let reason = penstock_gguf::GgufError { file: String::new(), ..error.clone() }.to_string();
        let reason = reason.strip_prefix(": ").unwrap_or(&reason).to_owned();
        TextError::Unreadable { file: error.file, reason }
    }

    pub(crate) fn malformed(file: &'static str, reason: impl std::fmt::Display) -> Self {
        TextError::Malformed { file, reason: clip(&reason.to_string()) }
    }
}

/// First 300 characters of a library's message, on one line: the message may quote the file.
pub(crate) fn clip(text: &str) -> String {
    let mut out: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
    if text.chars().nth(300).is_some() {
        out.push('…');
    }
    out
}
