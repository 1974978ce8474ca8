//! Any body of a completion (or detokenize) request: no panic; a refusal is a JSON error; a body accepted here is
//! accepted by serde_json.

use penstock_dialects::openai::{decode_completion, decode_detokenize};
use penstock_types::{Bounds, error_body::openai::refusal};
use serde::de::IgnoredAny;

pub(crate) fn run(body: &[u8]) {
    let bounds = Bounds::default();
    for outcome in [decode_completion(body, &bounds).map(|_| ()), decode_detokenize(body, &bounds).map(|_| ())] {
        match outcome {
            Ok(()) => {
                serde_json::from_slice::<IgnoredAny>(body).expect("accepted, so it is JSON");
            }
            Err(error) => {
                serde_json::from_slice::<serde_json::Value>(&refusal(&error).1).expect("an error body is JSON");
            }
        }
    }
}
