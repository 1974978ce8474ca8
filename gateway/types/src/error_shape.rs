//! HTTP status, type and code of every kind of error, in OpenAI's words; the other dialects translate them.

use crate::error::ApiErrorKind;

/// HTTP status, `type` and `code` of one kind of error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorShape {
    /// Status code of the HTTP response.
    pub status: u16,
    /// Type of the error, `error.type` in the body.
    pub kind: &'static str,
    /// Code of the error, `error.code` in the body; `None` is null.
    pub code: Option<&'static str>,
}

const REQUEST: &str = "invalid_request_error";
const SERVER: &str = "server_error";

const fn shape(status: u16, kind: &'static str, code: Option<&'static str>) -> ErrorShape {
    ErrorShape { status, kind, code }
}

/// A field is missing, of the wrong type, out of range, or contradicts another.
pub const INVALID: ErrorShape = shape(400, REQUEST, None);
/// A known field that is not supported.
pub const UNSUPPORTED_PARAMETER: ErrorShape = shape(400, REQUEST, Some("unsupported_parameter"));
/// A supported field with an unsupported value.
pub const UNSUPPORTED_VALUE: ErrorShape = shape(400, REQUEST, Some("unsupported_value"));
/// A field is larger than its documented bound.
pub const ABOVE_BOUND: ErrorShape = shape(400, REQUEST, Some("above_maximum"));
/// The prompt and the tokens asked for do not fit the served context.
pub const CONTEXT_LENGTH: ErrorShape = shape(400, REQUEST, Some("context_length_exceeded"));
/// No API key, or an unknown one.
pub const INVALID_API_KEY: ErrorShape = shape(401, REQUEST, Some("invalid_api_key"));
/// The API key lacks the permission for the request.
pub const FORBIDDEN: ErrorShape = shape(403, "permission_error", Some("forbidden"));
/// No such model, or none that this key may use.
pub const MODEL_NOT_FOUND: ErrorShape = shape(404, REQUEST, Some("model_not_found"));
/// The API has no such path.
pub const NOT_FOUND: ErrorShape = shape(404, REQUEST, Some("unknown_url"));
/// The path exists, but not with this method.
pub const METHOD_NOT_ALLOWED: ErrorShape = shape(405, REQUEST, Some("method_not_supported"));
/// The client sent its request too slowly.
pub const REQUEST_TIMEOUT: ErrorShape = shape(408, REQUEST, Some("request_timeout"));
/// The body is larger than the listener takes.
pub const BODY_TOO_LARGE: ErrorShape = shape(413, REQUEST, Some("request_too_large"));
/// The body is not `application/json`, or is compressed.
pub const UNSUPPORTED_MEDIA_TYPE: ErrorShape = shape(415, REQUEST, Some("unsupported_media_type"));
/// Too many requests per unit of time, or too many at once.
pub const RATE_LIMIT_REQUESTS: ErrorShape = shape(429, "requests", Some("rate_limit_exceeded"));
/// Too many tokens per unit of time.
pub const RATE_LIMIT_TOKENS: ErrorShape = shape(429, "tokens", Some("rate_limit_exceeded"));
/// A budget of money or a quota is spent, here or at the provider.
pub const QUOTA: ErrorShape = shape(429, "insufficient_quota", Some("insufficient_quota"));
/// Internal error of the gateway.
pub const INTERNAL: ErrorShape = shape(500, SERVER, Some("internal_error"));
/// The upstream (a worker or a provider) failed.
pub const UPSTREAM: ErrorShape = shape(502, SERVER, Some("upstream_error"));
/// Too much queued work to answer in time.
pub const OVERLOADED: ErrorShape = shape(503, SERVER, Some("overloaded"));
/// No upstream that could serve the request is available.
pub const UNAVAILABLE: ErrorShape = shape(503, SERVER, Some("unavailable"));
/// This gateway process is shutting down.
pub const DRAINING: ErrorShape = shape(503, SERVER, Some("draining"));
/// No complete answer within the request's deadline.
pub const TIMEOUT: ErrorShape = shape(504, SERVER, Some("timeout"));

/// The request was cancelled by the gateway (for logs: the client has left).
pub const CANCELLED: ErrorShape = shape(499, REQUEST, Some("cancelled"));

/// Every shape, for tables and tests.
#[rustfmt::skip]
pub const SHAPES: [ErrorShape; 23] = [
    INVALID, UNSUPPORTED_PARAMETER, UNSUPPORTED_VALUE, ABOVE_BOUND, CONTEXT_LENGTH, INVALID_API_KEY, FORBIDDEN,
    MODEL_NOT_FOUND, NOT_FOUND, METHOD_NOT_ALLOWED, REQUEST_TIMEOUT, BODY_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE,
    RATE_LIMIT_REQUESTS, RATE_LIMIT_TOKENS, QUOTA, INTERNAL, UPSTREAM, OVERLOADED, UNAVAILABLE, DRAINING, TIMEOUT,
    CANCELLED,
];

/// Shape of the error body for a refused request of this kind.
pub fn error_shape(kind: ApiErrorKind) -> ErrorShape {
    match kind {
        ApiErrorKind::Invalid => INVALID,
        ApiErrorKind::Unsupported => UNSUPPORTED_PARAMETER,
        ApiErrorKind::UnsupportedValue => UNSUPPORTED_VALUE,
        ApiErrorKind::ContextLength => CONTEXT_LENGTH,
        ApiErrorKind::TooLarge => ABOVE_BOUND,
    }
}
