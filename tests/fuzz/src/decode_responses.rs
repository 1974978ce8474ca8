//! Any body of a responses, embeddings, rerank or score request: no panic; a refusal is a JSON error; a body accepted
//! here is accepted by serde_json.

use penstock_dialects::openai::{ResponsesRequest, embeddings, rerank, responses, score};
use penstock_types::{Bounds, error_body::openai::refusal};
use serde::de::IgnoredAny;

pub(crate) fn run(body: &[u8]) {
    let bounds = Bounds::default();
    for decode in [responses, embeddings, rerank, score] {
        match decode(body, &bounds) {
            Ok(_) => {
                serde_json::from_slice::<IgnoredAny>(body).expect("accepted, so it is JSON");
            }
            Err(error) => {
                serde_json::from_slice::<serde_json::Value>(&refusal(&error).1).expect("an error body is JSON");
            }
        }
    }
    if let Ok(request) = ResponsesRequest::decode(body, &bounds) {
        let items = request.input_items();
        serde_json::from_slice::<Vec<serde_json::Value>>(&items).expect("items are a list");
        let _ = request.resolve(&[&items], true);
    }
}
