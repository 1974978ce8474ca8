//! Answers that a provider has made and this gateway cannot hold.

use std::future::poll_fn;
use std::sync::Arc;

use http::HeaderMap;
use penstock_types::ask::Ask;
use penstock_types::sse::EVENT_BYTES_MAX;
use penstock_types::{FaultClass, Surface};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use penstock_base::error::Failure;
use penstock_http::client::Target;
use penstock_http::{Body, BodyBudget, HttpLimits};
use penstock_upstream::answer_memory::AnswerBudget;
use penstock_upstream::call::Call;
use penstock_upstream::{ANSWER_BYTES_MAX, AnswerMemory, Origin};

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;
const RESPONSES: &str = r#"{"model":"m","input":"hi"}"#;
const MESSAGES: &str = r#"{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}"#;

/// Address of a provider that answers each request with `body`.
async fn serving(kind: &'static str, body: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            // Small requests come in one write.
            while !request.ends_with(b"}") {
                let mut piece = [0; 4096];
                let count = stream.read(&mut piece).await.expect("a request");
                assert!(count > 0, "the request is cut");
                request.extend_from_slice(&piece[..count]);
            }
            let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n", body.len());
            // The gateway may leave before the end.
            let _ = stream.write_all(head.as_bytes()).await;
            let _ = stream.write_all(&body).await;
        }
    });
    format!("http://{address}/v1")
}

/// Failure of a request of this surface to a provider of OpenAI's chat API, with this memory for answers.
async fn failed(surface: Surface, stream: bool, url: &str, memory: AnswerMemory) -> Failure {
    failed_at(Protocol::OpenAi, surface, stream, url, memory).await
}

/// Failure of a request of this surface to a provider of this protocol, with this memory for answers.
async fn failed_at(protocol: Protocol, surface: Surface, stream: bool, url: &str, memory: AnswerMemory) -> Failure {
    let config = ProviderConfig { protocol, ..ProviderConfig::at(Target::parse(url).expect("a target")) };
    let provider = Provider::new(&config).expect("a provider");
    let body = match surface {
        Surface::Chat => CHAT,
        Surface::Responses => RESPONSES,
        _ => MESSAGES,
    };
    let body = if stream { body.replacen('{', "{\"stream\":true,", 1) } else { body.to_owned() };
    let lease = BodyBudget::new(1 << 20, 1 << 20).lease();
    let body = Body { bytes: body.into(), lease };
    let call = Call::new(Ask::new(surface), body, "req_1".into(), HeaderMap::new(), penstock_dialects::decode).await;
    let origin = Origin { memory, ..Origin::default() };
    let mut events =
        provider.upstream("m", "m").open(Arc::new(call.expect("a call")), origin).await.expect("an answer");
    let mut said = Vec::new();
    loop {
        match poll_fn(|context| events.poll_events(context, &mut said)).await {
            Ok(true) => {}
            Ok(false) => panic!("the answer was held"),
            Err(failure) => return failure,
        }
    }
}

#[tokio::test]
async fn an_answer_without_memory_was_made_all_the_same() {
    let url = serving("application/json", [&b"{\"x\":\""[..], &vec![b'x'; 3 << 20]].concat()).await;
    let events = serving("text/event-stream", [&b"data: {\"x\":\""[..], &vec![b'x'; 3 << 20]].concat()).await;
    let limits = HttpLimits { event_bytes_max: 64 << 20, ..HttpLimits::default() };
    for surface in [Surface::Chat, Surface::Messages] {
        for stream in [false, true] {
            let memory = AnswerMemory::new(&AnswerBudget::new(1 << 20), "", &limits);
            let failure = failed(surface, stream, if stream { &events } else { &url }, memory).await;
            let told = (failure.status(), failure.is_unheld(), failure.should_retry(), failure.source());
            assert_eq!(told, (503, true, false, "gateway"), "{surface:?} {stream}");
            assert!(failure.retry_after.is_none() && !failure.message.contains("Try again"), "{}", failure.message);
        }
    }
}

#[tokio::test]
async fn an_answer_above_its_bound_was_made_all_the_same() {
    let check = async |surface, stream, kind, body: Vec<u8>| {
        let url = serving(kind, body).await;
        let limits = HttpLimits { event_bytes_max: 1 << 20, ..HttpLimits::default() };
        let memory = AnswerMemory::new(&AnswerBudget::new(1 << 30), "", &limits);
        let failure = failed(surface, stream, &url, memory).await;
        let class = failure.upstream.as_ref().map(|upstream| upstream.class);
        let told = (failure.status(), class, failure.should_retry(), failure.source());
        assert_eq!(told, (502, Some(FaultClass::AnswerTooLarge), false, "upstream"), "{surface:?} {stream}");
    };
    let whole = [&b"{\"x\":\""[..], &vec![b'x'; ANSWER_BYTES_MAX + (4 << 20)]].concat();
    check(Surface::Chat, false, "application/json", whole).await;
    for surface in [Surface::Chat, Surface::Messages] {
        let event = [&b"data: {\"x\":\""[..], &vec![b'x'; 2 << 20]].concat();
        check(surface, true, "text/event-stream", event).await;
    }
}

/// At the default limits the bound of the reader of events is met before that of events with images.
#[tokio::test]
async fn an_image_above_every_bound_was_made_all_the_same() {
    let largest = || HttpLimits { event_bytes_max: EVENT_BYTES_MAX, ..HttpLimits::default() };
    for (protocol, surface, head, limits) in [
        (Protocol::OpenAiResponses, Surface::Responses, "", HttpLimits::default()),
        (Protocol::OpenAiResponses, Surface::Chat, "", HttpLimits::default()),
        (Protocol::Gemini, Surface::Chat, "", HttpLimits::default()),
        (Protocol::OpenAi, Surface::Chat, "", largest()),
        (Protocol::Anthropic, Surface::Chat, "event: content_block_start\n", largest()),
    ] {
        let event = [head.as_bytes(), b"data: {\"x\":\"", &vec![b'x'; 33 << 20]].concat();
        let url = serving("text/event-stream", event).await;
        let memory = AnswerMemory::new(&AnswerBudget::new(1 << 30), "", &limits);
        let failure = failed_at(protocol, surface, true, &url, memory).await;
        let class = failure.upstream.as_ref().map(|upstream| upstream.class);
        let told = (failure.status(), class, failure.should_retry(), failure.source());
        assert_eq!(told, (502, Some(FaultClass::AnswerTooLarge), false, "upstream"), "{protocol:?} {surface:?}");
    }
}
