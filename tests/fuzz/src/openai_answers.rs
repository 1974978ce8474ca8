//! Any answer of a provider that speaks OpenAI's APIs: no panic; reading at once and byte by byte give the same; the
//! answer is complete or a fault; and its events can be encoded for a client.

use penstock_dialects::openai::{ChatCodec, ResponsesCodec, chat, completion, embeddings, rerank, responses};
use penstock_types::Bounds;
use penstock_types::{AnswerMeta, ChatEvent, Decoded, ProviderCodec, ProviderFault};

fn read(
    codec: &dyn ProviderCodec,
    decoded: &Decoded,
    pieces: &mut dyn Iterator<Item = &[u8]>,
) -> Result<Vec<ChatEvent>, ProviderFault> {
    let (mut decoder, mut out) = (codec.decoder(&decoded.request), Vec::new());
    for piece in pieces {
        decoder.push(piece, &mut out)?;
    }
    decoder.end(&mut out)?;
    assert!(decoder.is_complete());
    Ok(out)
}

pub(crate) fn run(body: &[u8]) {
    let (chats, bounds) = (ChatCodec::default(), Bounds::default());
    let asked = [
        (
            &chats as &dyn ProviderCodec,
            chat(br#"{"model":"m","n":2,"messages":[{"role":"user","content":"x"}]}"#, &bounds),
        ),
        (&chats, completion(br#"{"model":"m","prompt":"x","logprobs":1}"#, &bounds)),
        (&chats, embeddings(br#"{"model":"m","input":["x","y"]}"#, &bounds)),
        (&chats, rerank(br#"{"model":"m","query":"x","documents":["x","y"],"top_n":1}"#, &bounds)),
        (&ResponsesCodec::default(), responses(br#"{"model":"m","input":"x","top_logprobs":1}"#, &bounds)),
    ];
    for (codec, decoded) in asked {
        let decoded = decoded.expect("a good request");
        let once = read(codec, &decoded, &mut std::iter::once(body));
        assert_eq!(once, read(codec, &decoded, &mut body.chunks(1)));
        codec.fault(400, body);
        let Ok(events) = once else { continue };
        let meta = AnswerMeta::new("1".into(), 1);
        let (mut encoder, mut out) = (decoded.form.stream(&meta), bytes::BytesMut::new());
        let mut collector = decoded.form.whole(&meta);
        for event in &events {
            encoder.event(event, &mut out);
            collector.event(event);
        }
        encoder.done(&mut out);
        if let Some(body) = collector.finish() {
            serde_json::from_slice::<serde_json::Value>(&body).expect("an answer is JSON");
        }
    }
}
