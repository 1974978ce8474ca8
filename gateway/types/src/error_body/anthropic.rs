//! Error bodies of the Anthropic API: `{"type":"error","error":{"type","message"},"request_id"}`.

use bytes::{BufMut, BytesMut};

use crate::error_shape::{CONTEXT_LENGTH, ErrorShape};
use crate::write;

/// Opening words of the API's message for a prompt that does not fit: agents compact the conversation when they read
/// it.
const TOO_LONG: &str = "prompt is too long";

/// Value of `error.type` for an HTTP status.
pub fn error_type(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 | 405 => "not_found_error",
        408 | 504 => "timeout_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

/// Body of an error. The parameter at fault is named in the message already, so it has no field.
pub fn error_body(shape: ErrorShape, message: &str, request_id: &str) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(128 + message.len());
    put_error(&mut out, shape, message, Some(request_id));
    out.into()
}

/// Writes the error object; a stream's `error` event has no id.
pub fn put_error(out: &mut BytesMut, shape: ErrorShape, message: &str, request_id: Option<&str>) {
    out.put_slice(b"{\"type\":\"error\",\"error\":{\"type\":");
    write::string(out, error_type(shape.status));
    out.put_slice(b",\"message\":");
    match shape.code == CONTEXT_LENGTH.code && !message.starts_with(TOO_LONG) {
        true => write::string(out, &format!("{TOO_LONG}: {message}")),
        false => write::string(out, message),
    }
    out.put_u8(b'}');
    if let Some(id) = request_id {
        out.put_slice(b",\"request_id\":");
        write::string(out, id);
    }
    out.put_u8(b'}');
}
