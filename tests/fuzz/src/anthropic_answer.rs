//! Any answer of Anthropic, streamed and whole: no panic; reading at once and byte by byte give the same; the answer
//! is complete or a fault; and its events can be encoded for a client.

use penstock_dialects::anthropic::{Codec, MessageCollector, MessageEncoder};
use penstock_types::{
    ChatEvent, ChatRequest, ProviderCodec, ProviderFault, Request, StreamEncoder, StreamOptions, WholeCollector,
};

fn read(stream: bool, pieces: &mut dyn Iterator<Item = &[u8]>) -> Result<Vec<ChatEvent>, ProviderFault> {
    let mut chat = ChatRequest::new("m".into(), Vec::new());
    chat.stream = stream.then(StreamOptions::default);
    let mut decoder = Codec::default().decoder(&Request::Chat(Box::new(chat)));
    let mut out = Vec::new();
    for piece in pieces {
        decoder.push(piece, &mut out)?;
    }
    decoder.end(&mut out)?;
    assert!(decoder.is_complete());
    Ok(out)
}

pub(crate) fn run(body: &[u8]) {
    for stream in [true, false] {
        let once = read(stream, &mut std::iter::once(body));
        assert_eq!(once, read(stream, &mut body.chunks(1)));
        let Ok(events) = once else { continue };
        let (mut encoder, mut out) = (MessageEncoder::new("1", "m"), bytes::BytesMut::new());
        let mut collector = Box::new(MessageCollector::new("1", "m"));
        for event in &events {
            encoder.event(event, &mut out);
            collector.event(event);
        }
        encoder.done(&mut out);
        let body = collector.finish().expect("it has finished");
        serde_json::from_slice::<serde_json::Value>(&body).expect("an answer is JSON");
    }
    let _ = Codec::default().fault(400, body);
}
