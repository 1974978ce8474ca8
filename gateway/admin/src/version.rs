//! Versions of objects that can be changed: given as `ETag`, expected as `If-Match` or in the body.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::Serialize;

use crate::error::{ApiError, Code};

/// Object with a version.
pub(crate) trait Versioned: Serialize {
    fn version(&self) -> u64;
}

/// Answer with the version as `ETag`.
pub(crate) fn tagged(body: impl Versioned) -> Response {
    ([(header::ETAG, tag(body.version()))], Json(body)).into_response()
}

/// Value of `ETag` for a version.
pub(crate) fn tag(version: u64) -> HeaderValue {
    HeaderValue::try_from(format!("\"{version}\"")).unwrap_or(HeaderValue::from_static("\"\""))
}

/// Version that a change expects, from the header or the field.
pub(crate) fn expected(headers: &HeaderMap, field: Option<u64>) -> Result<Option<u64>, ApiError> {
    let header = if_match(headers)?;
    match (header, field) {
        (Some(header), Some(field)) if header != field => {
            Err(ApiError::invalid("expected_version", "expected_version: If-Match says another version"))
        }
        (header, field) => Ok(header.or(field)),
    }
}

/// Checks that the current version is the expected one.
pub(crate) fn check(expected: Option<u64>, current: u64) -> Result<(), ApiError> {
    match expected {
        Some(expected) if expected != current => {
            let message =
                format!("Version {expected} was expected, it is {current}: look at it, then change it again.");
            Err(ApiError::new(StatusCode::PRECONDITION_FAILED, Code::VersionMismatch, message))
        }
        _ => Ok(()),
    }
}

fn if_match(headers: &HeaderMap) -> Result<Option<u64>, ApiError> {
    let Some(value) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(None);
    }
    let version = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).and_then(|text| text.parse().ok());
    version
        .map(Some)
        .ok_or_else(|| ApiError::invalid("if-match", "If-Match: must be the ETag that was given, as \"7\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_expected_by_header_or_field() {
        let with = |header: Option<&'static str>, field| {
            let headers = header.map(|value| (header::IF_MATCH, HeaderValue::from_static(value))).into_iter().collect();
            expected(&headers, field).ok()
        };
        assert_eq!(with(None, None), Some(None));
        assert_eq!(
            (with(Some("\"7\""), None), with(None, Some(7)), with(Some("\"7\""), Some(7))),
            (Some(Some(7)), Some(Some(7)), Some(Some(7)))
        );
        assert_eq!(with(Some("*"), Some(3)), Some(Some(3)));
        assert_eq!((with(Some("7"), None), with(Some("\"7\""), Some(8))), (None, None));
        assert!(check(Some(1), 2).is_err() && check(None, 2).is_ok() && check(Some(2), 2).is_ok());
    }
}
