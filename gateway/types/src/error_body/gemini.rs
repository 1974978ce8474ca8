//! Error bodies of the Gemini API: `{"error":{"code","message","status","details"}}`.
//!
//! A refused key is 401 `UNAUTHENTICATED` with the reason `API_KEY_INVALID`. Google itself answers 400
//! `INVALID_ARGUMENT` with that reason; its SDKs decide by the status class, and proxies, logs and other dialects
//! understand 401.

use bytes::{BufMut, BytesMut};

use crate::error_shape::ErrorShape;
use crate::write;

/// Google's canonical code of an HTTP status.
pub fn status_word(status: u16) -> &'static str {
    match status {
        401 => "UNAUTHENTICATED",
        403 => "PERMISSION_DENIED",
        404 | 405 => "NOT_FOUND",
        429 => "RESOURCE_EXHAUSTED",
        499 => "CANCELLED",
        503 => "UNAVAILABLE",
        408 | 504 => "DEADLINE_EXCEEDED",
        400..=498 => "INVALID_ARGUMENT",
        _ => "INTERNAL",
    }
}

/// Body of an error. The parameter at fault is named in the message already, so it has no field.
pub fn error_body(shape: ErrorShape, message: &str) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(224 + message.len());
    put_error(&mut out, shape, message);
    out.into()
}

/// Writes the error object. `details` names the reason in Google's form (`ErrorInfo`): the gateway's own code in
/// capitals.
pub fn put_error(out: &mut BytesMut, shape: ErrorShape, message: &str) {
    out.put_slice(b"{\"error\":{\"code\":");
    write::integer(out, u64::from(shape.status));
    out.put_slice(b",\"message\":");
    write::string(out, message);
    out.put_slice(b",\"status\":");
    write::string(out, status_word(shape.status));
    if let Some(code) = shape.code {
        let reason = match code {
            "invalid_api_key" => "API_KEY_INVALID".to_owned(),
            other => other.to_ascii_uppercase(),
        };
        out.put_slice(b",\"details\":[{\"@type\":\"type.googleapis.com/google.rpc.ErrorInfo\",\"reason\":");
        write::string(out, &reason);
        out.put_slice(b",\"domain\":\"penstock\"}]");
    }
    out.put_slice(b"}}");
}
