//! Any forwarded body: no panic; an accepted body is a JSON object; another model name and a request for the stream's
//! counts can be inserted, and are then read back.

use bytes::Bytes;
use penstock_types::peek::{Splice, peek, spliced};
use penstock_types::{Bounds, Surface};

const SURFACES: [Option<Surface>; 7] = [
    None,
    Some(Surface::Chat),
    Some(Surface::Completions),
    Some(Surface::Responses),
    Some(Surface::Messages),
    Some(Surface::Generate),
    Some(Surface::OllamaChat),
];

pub(crate) fn run(input: &[u8]) {
    SURFACES.into_iter().for_each(|surface| check(input, surface));
}

fn check(input: &[u8], surface: Option<Surface>) {
    let (body, bounds) = (Bytes::copy_from_slice(input), Bounds::default());
    let Ok(seen) = peek(&body, surface, &bounds) else { return };
    serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&body).expect("accepted, so it is an object");
    let change = Splice { model: Some("other"), include_usage: true, ..Splice::default() };
    let out = spliced(&body, &seen, change).concat();
    let again = peek(&out, surface, &bounds).expect("what is sent is accepted, too");
    assert!(again.stream_options.is_some_and(|(_, usage)| usage), "{}", String::from_utf8_lossy(&out));
    assert_eq!(again.model.as_deref(), seen.model.is_some().then_some("other"));
}
