//! Any bytes as a body of the Gemini API, and as an answer of it in two pieces: no panic; a body accepted here is
//! accepted by serde_json, and decoded events can be encoded again.

use bytes::BytesMut;
use penstock_dialects::gemini::{Codec, count, embed, generate};
use penstock_types::codec::Framing;
use penstock_types::{AnswerMeta, Bounds, ProviderCodec};
use serde::de::IgnoredAny;

pub(crate) fn run(input: &[u8]) {
    let Some((cut, bytes)) = input.split_first() else { return };
    let bounds = Bounds::default();
    if let Ok(decoded) = generate("m", Framing::Events, bytes, &bounds) {
        serde_json::from_slice::<IgnoredAny>(bytes).expect("accepted, so it is JSON");
        if let Ok(call) = Codec::default().encode(&decoded.request, "m") {
            serde_json::from_slice::<IgnoredAny>(&call.body).expect("a request is JSON");
        }
    }
    _ = count("m", bytes, &bounds);
    _ = embed("m", true, bytes, &bounds);
    let body = br#"{"contents":[{"parts":[{"text":"hi"}]}]}"#;
    let asked = generate("m", Framing::Array, body, &bounds).expect("good");
    let mut decoder = Codec::default().decoder(&asked.request);
    let (one, two) = bytes.split_at(usize::from(*cut).min(bytes.len()));
    let mut events = Vec::new();
    let read = decoder.push(one, &mut events).and_then(|()| decoder.push(two, &mut events));
    _ = read.and_then(|()| decoder.end(&mut events));
    let mut encoder = asked.form.stream(&AnswerMeta::new("r".into(), 1));
    let mut out = BytesMut::new();
    events.iter().for_each(|event| encoder.event(event, &mut out));
    encoder.done(&mut out);
    serde_json::from_slice::<IgnoredAny>(&out).expect("one JSON array");
    _ = Codec::default().fault(400, bytes);
}
