//! Error bodies of the public APIs, one module per dialect.

pub mod anthropic;
pub mod gemini;
pub mod ollama;
pub mod openai;

use bytes::{BufMut, BytesMut};

use crate::codec::Dialect;
use crate::error_shape::ErrorShape;

/// JSON body of an error in the form of `dialect`.
pub fn error_body(
    dialect: Dialect,
    shape: ErrorShape,
    param: Option<&str>,
    message: &str,
    request_id: &str,
) -> Vec<u8> {
    match dialect {
        Dialect::OpenAi => openai::error_body(shape, param, message),
        Dialect::Anthropic => anthropic::error_body(shape, message, request_id),
        Dialect::Gemini => gemini::error_body(shape, message),
        Dialect::Ollama => ollama::error_body(message),
    }
}

/// Writes an error as the last event of a stream in `dialect`, for a stream whose encoder has written nothing.
pub fn error_event(dialect: Dialect, shape: ErrorShape, message: &str, out: &mut BytesMut) {
    match dialect {
        Dialect::OpenAi => openai::error_event(shape, None, message, out),
        Dialect::Anthropic => {
            out.put_slice(b"event: error\ndata: ");
            anthropic::put_error(out, shape, message, None);
            out.put_slice(b"\n\n");
        }
        Dialect::Gemini => {
            out.put_slice(b"data: ");
            gemini::put_error(out, shape, message);
            out.put_slice(b"\n\n");
        }
        Dialect::Ollama => {
            ollama::put_error(out, message);
            out.put_u8(b'\n');
        }
    }
}
