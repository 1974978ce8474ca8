//! `GET /v1/models` and `GET /v1/models/{id}`.

use bytes::{BufMut, BytesMut};

use penstock_types::write;

/// A model that this gateway serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard {
    /// Name by which requests ask for the model.
    pub id: String,
    /// Creation time in Unix seconds.
    pub created: u64,
    /// Owner of the model, as the list of models names it.
    pub owned_by: String,
    /// Tokens of prompt and answer together, when known (vLLM's `max_model_len`).
    pub context_tokens: Option<u64>,
    /// Task of the model, when known: `generate`, `embed` or `rerank`.
    pub task: Option<&'static str>,
    /// Name of the model that this one is an adapter of, when it is one.
    pub parent: Option<String>,
}

/// JSON body of the list of models, as `GET /v1/models` returns it.
pub fn models_list(models: &[ModelCard]) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(64 + 160 * models.len());
    out.put_slice(b"{\"object\":\"list\",\"data\":[");
    for (index, model) in models.iter().enumerate() {
        if index > 0 {
            out.put_u8(b',');
        }
        put_model(&mut out, model);
    }
    out.put_slice(b"]}");
    out.into()
}

/// JSON body of one model, as `GET /v1/models/{model}` returns it.
pub fn model(model: &ModelCard) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(160);
    put_model(&mut out, model);
    out.into()
}

/// JSON body of the answer to `/v1/responses/input_tokens`.
pub fn count_body(tokens: u64) -> Vec<u8> {
    format!("{{\"object\":\"response.input_tokens\",\"input_tokens\":{tokens}}}").into_bytes()
}

fn put_model(out: &mut BytesMut, model: &ModelCard) {
    out.put_slice(b"{\"id\":");
    write::string(out, &model.id);
    out.put_slice(b",\"object\":\"model\",\"created\":");
    write::integer(out, model.created);
    out.put_slice(b",\"owned_by\":");
    write::string(out, &model.owned_by);
    out.put_slice(b",\"root\":");
    write::string(out, &model.id);
    out.put_slice(b",\"parent\":");
    match &model.parent {
        Some(parent) => write::string(out, parent),
        None => out.put_slice(b"null"),
    }
    if let Some(tokens) = model.context_tokens {
        out.put_slice(b",\"max_model_len\":");
        write::integer(out, tokens);
    }
    if let Some(task) = model.task {
        out.put_slice(b",\"task\":");
        write::string(out, task);
    }
    put_permission(out, model);
    out.put_u8(b'}');
}

/// Writes vLLM's `permission` list, which clients made for vLLM expect on every model.
fn put_permission(out: &mut BytesMut, model: &ModelCard) {
    out.put_slice(b",\"permission\":[{\"id\":");
    write::string(out, &format!("modelperm-{}", model.id));
    out.put_slice(b",\"object\":\"model_permission\",\"created\":");
    write::integer(out, model.created);
    out.put_slice(
        br#","allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]"#,
    );
}
