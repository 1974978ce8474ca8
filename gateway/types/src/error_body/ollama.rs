//! Error bodies of Ollama's API: `{"error": "…"}`.

use bytes::{BufMut, BytesMut};

use crate::write;

/// Body of an error. The status alone says its kind.
pub fn error_body(message: &str) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(16 + message.len());
    put_error(&mut out, message);
    out.into()
}

/// Writes the error object.
pub fn put_error(out: &mut BytesMut, message: &str) {
    out.put_slice(b"{\"error\":");
    write::string(out, message);
    out.put_u8(b'}');
}
