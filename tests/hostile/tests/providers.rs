//! Providers that fail in every way: what the client sees is in `docs/guide/providers.md`.

use std::time::Duration;

use penstock_hostile::provider::{Front, Provider, Script, Step};
use penstock_hostile::raw::{Client, Reply, post, send};

const FIRST: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
const PIECE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":null}]}\n\n";
const LAST: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const COUNTS: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const WHOLE: &str = r#"{ "id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}], "usage":{"prompt_tokens":7,"completion_tokens":1}}"#;

fn say(text: impl Into<String>) -> Step {
    Step::Say(text.into().into_bytes())
}

fn chunk(text: &str) -> Step {
    say(format!("{:x}\r\n{text}\r\n", text.len()))
}

fn sse_head() -> Step {
    say(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-request-id: up_1\r\n\r\n",
    )
}

fn whole(status: &str, fields: &str, body: &str) -> Vec<Step> {
    vec![say(format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{fields}content-length: {}\r\n\r\n{body}",
        body.len()
    ))]
}

/// Provider and gateway, with further keys of the provider's table.
async fn setup(script: Script, keys: &str) -> (Provider, Front) {
    let provider = Provider::start(script).await;
    let text = format!(
        "[[providers]]\nid = \"acme\"\nbase_url = \"http://{}/v1\"\nmodels = [\"big\"]\n{keys}\n",
        provider.address
    );
    let front = Front::start(&text).await;
    (provider, front)
}

fn chat(stream: bool) -> String {
    let body = format!(r#"{{"messages":[{{"role":"user","content":"hi"}}], "model":"big","stream":{stream}}}"#);
    let request = post("/v1/chat/completions", &body);
    request.replacen(
        "Host: a\r\n",
        "Host: a\r\nConnection: close\r\nAuthorization: Bearer client\r\nCookie: c=1\r\n",
        1,
    )
}

/// The payload of a chunked answer.
fn payload(reply: &Reply) -> String {
    let (_, mut rest) = reply.text.split_once("\r\n\r\n").expect("a head");
    let mut out = String::new();
    while let Some((size, tail)) = rest.split_once("\r\n") {
        let Ok(size) = usize::from_str_radix(size, 16) else { break };
        out.push_str(tail.get(..size).unwrap_or(tail));
        rest = tail.get(size + 2..).unwrap_or_default();
    }
    out
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_answer_is_passed_on_byte_for_byte() {
    let (provider, front) =
        setup(vec![whole("200 OK", "x-request-id: up_1\r\nset-cookie: x\r\n", WHOLE)], "key_env = \"KEY_A\"").await;
    let reply = send(front.address, chat(false)).await;
    assert_eq!(
        (reply.status, reply.text.split_once("\r\n\r\n").map(|(_, body)| body)),
        (200, Some(WHOLE)),
        "{}",
        reply.text
    );
    assert_eq!((reply.header("x-upstream-request-id"), reply.header("set-cookie")), (Some("up_1"), None));
    let sent = &provider.seen.requests()[0];
    let (head, body) = sent.split_once("\r\n\r\n").expect("a head");
    assert_eq!(body, r#"{"messages":[{"role":"user","content":"hi"}], "model":"big","stream":false}"#);
    assert!(
        head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n") && head.contains("authorization: Bearer sk-aaaa"),
        "{head}"
    );
    assert!(!head.contains("client") && !head.contains("cookie"), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_is_passed_on_and_its_counts_are_kept() {
    let mut steps = vec![sse_head()];
    steps.extend([FIRST, PIECE, LAST, COUNTS, DONE].map(chunk));
    steps.push(say("0\r\n\r\n"));
    let (provider, front) = setup(vec![steps], "").await;
    let reply = send(front.address, chat(true)).await;
    assert_eq!(payload(&reply), [FIRST, PIECE, LAST, DONE].concat());
    assert!(reply.is_whole());
    assert!(provider.seen.requests()[0].contains(r#"{"stream_options":{"include_usage":true},"messages""#));
    let again = send(front.address, chat(true)).await;
    assert!(again.is_whole());
    assert_eq!(provider.seen.connections.load(std::sync::atomic::Ordering::SeqCst), 1, "the connection is used again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_stops_the_provider() {
    let steps = vec![sse_head(), chunk(FIRST), Step::Pace(format!("{:x}\r\n{PIECE}\r\n", PIECE.len()).into_bytes(), 2)];
    let (provider, front) = setup(vec![steps], "").await;
    let mut client = Client::connect(front.address).await;
    client.send(chat(true)).await;
    let reply = client.until(Duration::from_secs(10), |text| text.matches("\"x\"").count() >= 5).await;
    assert!(reply.text.contains("\"x\""));
    let (before, left) = (provider.seen.paced.load(std::sync::atomic::Ordering::SeqCst), std::time::Instant::now());
    drop(client);
    penstock_hostile::eventually("the provider sees the end", || provider.seen.left().is_some()).await;
    let after = provider.seen.left().expect("seen").duration_since(left);
    let pieces = provider.seen.paced.load(std::sync::atomic::Ordering::SeqCst) - before;
    println!("the provider saw the end after {after:?} and {pieces} pieces");
    assert!(after < Duration::from_millis(500), "{after:?}");
}
