//! `GET /v1beta/models`, `GET /v1beta/models/{model}` and the answer of `countTokens`.

use bytes::{BufMut, BytesMut};

use crate::openai::ModelCard;
use penstock_types::write;

/// Body of `GET /v1beta/models`: all models on one page.
pub fn models_list(models: &[ModelCard]) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(32 + 256 * models.len());
    out.put_slice(b"{\"models\":[");
    for (index, model) in models.iter().enumerate() {
        out.put_slice(if index > 0 { b"," } else { b"" });
        put(&mut out, model);
    }
    out.put_slice(b"]}");
    out.into()
}

/// JSON body of one model, as `GET /v1beta/models/{model}` returns it.
pub fn model(model: &ModelCard) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(256);
    put(&mut out, model);
    out.into()
}

fn put(out: &mut BytesMut, model: &ModelCard) {
    out.put_slice(b"{\"name\":");
    write::string(out, &format!("models/{}", model.id));
    out.put_slice(b",\"baseModelId\":");
    write::string(out, &model.id);
    out.put_slice(b",\"version\":\"1\",\"displayName\":");
    write::string(out, &model.id);
    if let Some(tokens) = model.context_tokens {
        // Prompt and answer share the context.
        out.put_slice(b",\"inputTokenLimit\":");
        write::integer(out, tokens);
        out.put_slice(b",\"outputTokenLimit\":");
        write::integer(out, tokens);
    }
    out.put_slice(b",\"supportedGenerationMethods\":");
    out.put_slice(match model.task {
        Some("embed") => b"[\"embedContent\"]}",
        Some("rerank") => b"[]}",
        _ => b"[\"generateContent\",\"countTokens\"]}",
    });
}

/// Body of the answer to `countTokens`.
pub fn count_body(tokens: u64) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(32);
    out.put_slice(b"{\"totalTokens\":");
    write::integer(&mut out, tokens);
    out.put_u8(b'}');
    out.into()
}
