//! Errors of the API: one shape for every route.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use penstock_store::StoreError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Refusal of a request, with its status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) code: Code,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
    pub(crate) details: Vec<String>,
    pub(crate) retry_after: Option<u64>,
}

/// Machine-readable error code of the admin API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Code {
    /// A parameter or the body does not match the document.
    Invalid,
    /// No admin key, or an unknown one.
    Unauthorized,
    /// The key's role may not do this, or the page or host may not ask.
    Forbidden,
    /// No such object.
    NotFound,
    /// The path does not take this method.
    MethodNotAllowed,
    /// The object is in a state that does not allow the operation.
    Conflict,
    /// The object has changed since the version that the request names.
    VersionMismatch,
    /// The body is larger than allowed.
    TooLarge,
    /// The body came too slowly.
    Timeout,
    /// The media type of the body is not supported.
    UnsupportedMediaType,
    /// Too many wrong keys, or too many requests at once.
    TooManyRequests,
    /// An internal error.
    Internal,
    /// A part that the operation needs is not available now.
    Unavailable,
}

/// A refusal.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub(crate) struct ErrorBody {
    error: ErrorDetail,
}

/// Content of an error.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ErrorDetail {
    code: Code,
    /// Message for people, with what to do.
    message: String,
    /// Parameter or field at fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    param: Option<String>,
    /// All faults, where there can be several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    details: Vec<String>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: Code, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), param: None, details: Vec::new(), retry_after: None }
    }

    pub(crate) fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.to_owned()), ..Self::new(StatusCode::BAD_REQUEST, Code::Invalid, message) }
    }

    pub(crate) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, Code::Unauthorized, message)
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, Code::Forbidden, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, Code::NotFound, message)
    }

    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, Code::Conflict, message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self { retry_after: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable, message) }
    }

    /// A bug, or a failure below the API: the detail goes to the log alone.
    pub(crate) fn internal(log: &dyn std::fmt::Display) -> Self {
        tracing::error!(error = %log, "a request to the admin API failed");
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            Code::Internal,
            "An internal error occurred; the log has the reason.",
        )
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Busy => Self::unavailable("The store is busy."),
            StoreError::Full => Self::unavailable("The store is full."),
            other => Self::internal(&other),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self { status, code, message, param, details, retry_after } = self;
        let body = ErrorBody { error: ErrorDetail { code, message, param, details } };
        let mut response = (status, Json(body)).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
