//! Faults of a client's request, worded so that the client can correct it.

/// Rule of the API that a request breaks. The gateway maps the kind to its own error kinds, and the dialect maps it to
/// its error body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiErrorKind {
    /// Missing, wrong type, out of range, contradiction.
    Invalid,
    /// A known field that is not supported: refused instead of ignored.
    Unsupported,
    /// A supported field with a value that is not supported.
    UnsupportedValue,
    /// The prompt and the tokens asked for do not fit the served context.
    ContextLength,
    /// A part of the request is larger than its documented bound.
    TooLarge,
}

/// Error of a request that was refused before it reached an upstream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Rule that the request broke, which decides the error's code.
    pub kind: ApiErrorKind,
    /// Path of the parameter, such as `messages[2].content`.
    pub param: Option<String>,
    /// Message for the client; repeats at most a short piece of its input.
    pub message: String,
}

impl ApiError {
    /// Error of a value that is missing, of the wrong type or out of range.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind: ApiErrorKind::Invalid, param: Some(param.into()), message: message.into() }
    }

    /// Error of a known field that is not supported.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind: ApiErrorKind::Unsupported, param: Some(param.into()), message: message.into() }
    }

    /// Error of a supported field with an unsupported value.
    pub fn unsupported_value(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind: ApiErrorKind::UnsupportedValue, param: Some(param.into()), message: message.into() }
    }

    /// Error of a prompt that, with the tokens asked for, does not fit the served context.
    pub fn context_length(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind: ApiErrorKind::ContextLength, param: Some(param.into()), message: message.into() }
    }

    /// Error of a body that is not a JSON object, so no parameter is named.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self { kind: ApiErrorKind::Invalid, param: None, message: message.into() }
    }
}
