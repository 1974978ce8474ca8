//! A fault in a request, said so that a client can act on it.

/// Which rule of the API a request breaks. The gateway maps it to its own kinds and the dialect to its own body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiErrorKind {
    /// Missing, wrong type, out of range, contradiction.
    Invalid,
    /// A field understood and not built: says so instead of ignoring it.
    Unsupported,
    /// A field that is built, with a value that is not.
    UnsupportedValue,
    /// The prompt and what is asked for do not fit the served context.
    ContextLength,
    /// Larger than a documented bound.
    TooLarge,
}

/// A refused request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Rule broken.
    pub kind: ApiErrorKind,
    /// Path of the parameter, as `messages[2].content`.
    pub param: Option<String>,
    /// For the client; never echoes more than a short piece of its input.
    pub message: String,
}

impl ApiError {
    /// Something missing, of the wrong type, out of range.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind: ApiErrorKind::Invalid, param: Some(param.into()), message: message.into() }
    }

    /// A field understood and not built.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind: ApiErrorKind::Unsupported, param: Some(param.into()), message: message.into() }
    }

    /// A value of a built field that is understood and not built.
    pub fn unsupported_value(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind: ApiErrorKind::UnsupportedValue, param: Some(param.into()), message: message.into() }
    }

    /// The prompt and what is asked for do not fit the served context.
    pub fn context_length(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind: ApiErrorKind::ContextLength, param: Some(param.into()), message: message.into() }
    }

    /// A body that is no JSON object at all: no parameter to blame.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self { kind: ApiErrorKind::Invalid, param: None, message: message.into() }
    }
}
