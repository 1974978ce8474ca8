//! Any body of a responses, embeddings, rerank or score request: no panic; a refusal is a JSON error; a body accepted
//! here is accepted by serde_json.

use penstock_dialects::openai::{
    ResponsesRequest, StoredChat, count_responses, decode_conversation, decode_items, decode_metadata, embeddings,
    named_items, rerank, responses, score, with_metadata,
};
use penstock_types::{Bounds, error_body::openai::refusal};
use serde::de::IgnoredAny;

pub(crate) fn run(body: &[u8]) {
    let bounds = Bounds::default();
    for decode in [responses, count_responses, embeddings, rerank, score] {
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
        if request.resolve(&[&items], true).is_ok() {
            for item in named_items(&items, &mut str::to_owned).expect("what was read as input") {
                serde_json::from_slice::<IgnoredAny>(&item.json).expect("an item of a conversation is JSON");
            }
        }
    }
    kept(body, &bounds);
}

/// Bodies of requests about stored objects: what is accepted is written back as JSON.
fn kept(body: &[u8], bounds: &Bounds) {
    let is_json = |text: &[u8]| {
        serde_json::from_slice::<IgnoredAny>(text).expect("what is shown is JSON");
    };
    let metadata = decode_metadata(body, bounds).ok();
    if let Some(metadata) = &metadata {
        is_json(metadata.as_bytes());
    }
    if let Ok(chat) = StoredChat::read(body, bounds) {
        is_json(&chat.messages);
        is_json(&with_metadata(&chat.document(b"{\"id\":\"\"}", "req_1"), &chat.metadata));
    }
    let items = decode_items(body, bounds, &mut str::to_owned).ok();
    let new = decode_conversation(body, bounds, &mut str::to_owned).ok();
    new.iter().for_each(|new| is_json(new.metadata.as_bytes()));
    items.into_iter().chain(new.map(|new| new.items)).flatten().for_each(|item| is_json(&item.json));
}
