//! Error bodies of the OpenAI API: `{"error":{"message","type","param","code"}}`, always with all four keys.

use bytes::{BufMut, BytesMut};

use crate::error::ApiError;
use crate::error_shape::{ErrorShape, error_shape};
use crate::write;

/// JSON body of an error; `param` names the field at fault, `None` is null.
pub fn error_body(shape: ErrorShape, param: Option<&str>, message: &str) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(128 + message.len());
    put_error(&mut out, shape, param, message);
    out.into()
}

/// HTTP status and body for a refused request.
pub fn refusal(error: &ApiError) -> (u16, Vec<u8>) {
    let shape = error_shape(error.kind);
    (shape.status, error_body(shape, error.param.as_deref(), &error.message))
}

/// Writes an error after the first byte: the last event of a stream, after which the connection must close without
/// `[DONE]`.
pub fn error_event(shape: ErrorShape, param: Option<&str>, message: &str, out: &mut BytesMut) {
    out.put_slice(b"data: ");
    put_error(out, shape, param, message);
    out.put_slice(b"\n\n");
}

fn put_error(out: &mut BytesMut, shape: ErrorShape, param: Option<&str>, message: &str) {
    out.put_slice(b"{\"error\":{\"message\":");
    write::string(out, message);
    out.put_slice(b",\"type\":");
    write::string(out, shape.kind);
    out.put_slice(b",\"param\":");
    write::optional_string(out, param);
    out.put_slice(b",\"code\":");
    write::optional_string(out, shape.code);
    out.put_slice(b"}}");
}
