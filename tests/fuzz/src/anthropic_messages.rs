//! Any body of a Messages request: no panic; a refusal is a JSON error; a body accepted here is accepted by
//! serde_json, and by Anthropic's provider codec, whose body is JSON again.

use penstock_dialects::anthropic::{Codec, decode_count_tokens, decode_messages};
use penstock_types::error_body::anthropic::error_body;
use penstock_types::error_shape::error_shape;
use penstock_types::{Bounds, ProviderCodec, Request};
use serde::de::IgnoredAny;

pub(crate) fn run(body: &[u8]) {
    let bounds = Bounds::default();
    for outcome in [decode_messages(body, &bounds), decode_count_tokens(body, &bounds)] {
        match outcome {
            Ok(chat) => {
                serde_json::from_slice::<IgnoredAny>(body).expect("accepted, so it is JSON");
                if let Ok(call) = Codec::default().encode(&Request::Chat(Box::new(chat)), "m") {
                    serde_json::from_slice::<IgnoredAny>(&call.body).expect("what is asked is JSON");
                }
            }
            Err(error) => {
                let body = error_body(error_shape(error.kind), &error.message, "r");
                serde_json::from_slice::<serde_json::Value>(&body).expect("an error body is JSON");
            }
        }
    }
}
