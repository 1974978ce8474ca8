//! Any bytes as an answer of Bedrock in two pieces, and any payload in a frame whose checksums fit: no panic.

use penstock_dialects::bedrock::Codec;
use penstock_types::{ChatRequest, ProviderCodec, Request};

const EVENTS: [&str; 6] =
    ["contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop", "metadata", "messageStart"];

fn frame(event: &str, payload: &[u8]) -> Vec<u8> {
    let mut headers = Vec::new();
    for (name, value) in [(":event-type", event), (":message-type", "event")] {
        headers.push(name.len() as u8);
        headers.extend(name.as_bytes());
        headers.push(7);
        headers.extend((value.len() as u16).to_be_bytes());
        headers.extend(value.as_bytes());
    }
    let mut out = ((16 + headers.len() + payload.len()) as u32).to_be_bytes().to_vec();
    out.extend((headers.len() as u32).to_be_bytes());
    out.extend(crc32fast::hash(&out).to_be_bytes());
    out.extend(headers);
    out.extend(payload);
    out.extend(crc32fast::hash(&out).to_be_bytes());
    out
}

pub(crate) fn run(input: &[u8]) {
    let Some((cut, bytes)) = input.split_first() else { return };
    let request = Request::Chat(Box::new(ChatRequest::new("m".into(), Vec::new())));
    let mut events = Vec::new();
    let mut decoder = Codec.decoder(&request);
    let (one, two) = bytes.split_at(usize::from(*cut).min(bytes.len()));
    let read = decoder.push(one, &mut events).and_then(|()| decoder.push(two, &mut events));
    _ = read.and_then(|()| decoder.end(&mut events));
    let mut decoder = Codec.decoder(&request);
    for payload in bytes.split(|byte| *byte == b'\n') {
        let event = EVENTS[usize::from(*cut) % EVENTS.len()];
        if decoder.push(&frame(event, payload), &mut events).is_err() {
            break;
        }
    }
    _ = Codec.fault(400, bytes);
}
