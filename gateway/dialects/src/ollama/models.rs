//! `GET /api/tags`, `POST /api/show`, `GET /api/ps` and `GET /api/version`.
//!
//! Facts about a model's file (size, digest, quantization) are not known of every model here: numbers are 0 and texts empty.

use bytes::{BufMut, BytesMut};

use crate::anthropic::rfc3339;
use crate::openai::{ModelCard, read_body};
use penstock_types::Bounds;
use penstock_types::error::ApiError;
use penstock_types::fields;
use penstock_types::json::{Fault, Within};
use penstock_types::write;

const DETAILS: &[u8] = b",\"details\":{\"parent_model\":\"\",\"format\":\"\",\"family\":\"\",\"families\":null,\"parameter_size\":\"\",\"quantization_level\":\"\"}";

/// Body of `GET /api/tags`: every model that the key may use.
pub fn models_list(models: &[ModelCard]) -> Vec<u8> {
    listed(models, |out, model| {
        out.put_slice(b",\"modified_at\":");
        write::string(out, &rfc3339(model.created));
    })
}

/// Body of `GET /api/ps`: the models that are loaded, which stay so.
pub fn running(models: &[ModelCard]) -> Vec<u8> {
    listed(models, |out, model| {
        out.put_slice(b",\"expires_at\":\"9999-12-31T23:59:59Z\",\"size_vram\":0");
        if let Some(tokens) = model.context_tokens {
            out.put_slice(b",\"context_length\":");
            write::integer(out, tokens);
        }
    })
}

fn listed(models: &[ModelCard], more: impl Fn(&mut BytesMut, &ModelCard)) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(32 + 256 * models.len());
    out.put_slice(b"{\"models\":[");
    for (index, model) in models.iter().enumerate() {
        out.put_slice(if index > 0 { b",{\"name\":" } else { b"{\"name\":" });
        write::string(&mut out, &model.id);
        out.put_slice(b",\"model\":");
        write::string(&mut out, &model.id);
        out.put_slice(b",\"size\":0,\"digest\":\"\"");
        out.put_slice(DETAILS);
        more(&mut out, model);
        out.put_u8(b'}');
    }
    out.put_slice(b"]}");
    out.into()
}

/// Body of the answer to `POST /api/show`.
pub fn model(model: &ModelCard) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(512);
    out.put_slice(b"{\"modelfile\":\"\",\"parameters\":\"\",\"template\":\"\"");
    out.put_slice(DETAILS);
    out.put_slice(b",\"model_info\":{\"general.architecture\":\"penstock\"");
    if let Some(tokens) = model.context_tokens {
        out.put_slice(b",\"penstock.context_length\":");
        write::integer(&mut out, tokens);
    }
    out.put_slice(b"},\"capabilities\":");
    out.put_slice(match model.task {
        Some("embed") => b"[\"embedding\"]",
        Some("rerank") => b"[]",
        _ => b"[\"completion\",\"tools\"]",
    });
    out.put_slice(b",\"modified_at\":");
    write::string(&mut out, &rfc3339(model.created));
    out.put_u8(b'}');
    out.into()
}

/// Name of the model that a body of `POST /api/show` asks for.
///
/// # Errors
/// The body is no object with a name.
pub fn model_asked(body: &[u8], bounds: &Bounds) -> Result<String, ApiError> {
    let mut model = None;
    let read = read_body(body, bounds, |reader, key| {
        match key {
            // `name` is what older clients send.
            "model" | "name" => model = Some(fields::name(reader, bounds.model_chars_max)?),
            _ => reader.skip()?,
        }
        Ok(())
    });
    let found = read.and_then(|()| model.ok_or_else(|| Fault::invalid("required, but missing")).within("model"));
    found.map_err(Fault::into_error)
}

/// Body of `GET /api/version`.
pub fn version(version: &str) -> Vec<u8> {
    format!("{{\"version\":\"{version}\"}}").into_bytes()
}
