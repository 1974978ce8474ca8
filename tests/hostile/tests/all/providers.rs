//! Providers that fail in every way; the client's view of each failure is in `docs/guide/providers.md`.

use std::time::Duration;

use penstock_config::Overrides;
use penstock_hostile::provider::{Front, Provider, Script, Step};
use penstock_hostile::raw::{Client, Reply, get, post, send};
use penstock_hostile::{PATIENCE, Vacant, eventually, promised};

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

/// Starts provider and gateway, with further keys of the provider's table.
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
    chat_to("big", stream)
}

fn chat_to(model: &str, stream: bool) -> String {
    let body = format!(r#"{{"messages":[{{"role":"user","content":"hi"}}], "model":"{model}","stream":{stream}}}"#);
    let request = post("/v1/chat/completions", &body);
    request.replacen(
        "Host: a\r\n",
        "Host: a\r\nConnection: close\r\nAuthorization: Bearer client\r\nCookie: c=1\r\n",
        1,
    )
}

/// Payload of a chunked answer.
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
    promised(Duration::from_millis(500), async || {
        let (provider, front) = setup(vec![steps.clone()], "").await;
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
        after
    })
    .await;
}

/// Checks the client's view of a failure: status, code, and whether a retry is advised.
#[track_caller]
fn check(reply: &Reply, status: u16, code: &str, retry: &str) {
    let found = (reply.status, reply.header("x-should-retry"), reply.header("x-penstock-error-source"));
    assert_eq!(found, (status, Some(retry), Some("upstream")), "{}", reply.text);
    assert!(reply.text.contains(&format!("\"code\":\"{code}\"")), "{code} in {}", reply.text);
}

/// Sends one request, whole or streamed, to a provider that does `steps` each time.
async fn once(steps: Vec<Step>, stream: bool) -> Reply {
    once_with(steps, stream, "").await
}

async fn once_with(steps: Vec<Step>, stream: bool, keys: &str) -> Reply {
    let (_provider, front) = setup(vec![steps], keys).await;
    send(front.address, chat(stream)).await
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_http_is_refused() {
    let endless = |line: &str| vec![say(line), Step::Repeat(vec![b'a'; 4096], 1000), Step::Hang];
    let garbled = [
        vec![say("SSH-2.0-OpenSSH\r\n\r\n"), Step::Hang],
        endless("HTTP/1.1 200 OK\r\nx: "),
        endless("HTTP/1.1 "),
        vec![say(format!("{HEAD}{}\r\n", "x: 1\r\n".repeat(200)))],
        vec![say(format!("{HEAD}content-length: 2\r\ncontent-length: 3\r\n\r\n{{}}"))],
        vec![say(format!("{HEAD}content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{{}}"))],
        vec![say(format!("{HEAD}content-length: -2\r\n\r\n{{}}"))],
        vec![say(format!("{HEAD}content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{{}}"))],
        vec![say(format!("{HEAD}transfer-encoding: chunked\r\n\r\nzz\r\n")), Step::Hang],
        vec![say("HTTP/1.1 100 Continue\r\n\r\n".repeat(20)), Step::Hang],
        vec![say("HTTP/1.1 304 Not Modified\r\n\r\n"), Step::Hang],
        whole("200 OK", "", "<html>fine</html>"),
        whole("200 OK", "", "{\"choices\":[],"),
    ];
    for steps in garbled {
        let shown = format!("{steps:?}").chars().take(120).collect::<String>();
        let reply = once(steps, false).await;
        assert_eq!(reply.status, 502, "{shown}: {}", reply.text);
        check(&reply, 502, "upstream_garbled", "true");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirects_are_not_followed() {
    let other = Provider::start(vec![whole("200 OK", "", WHOLE)]).await;
    for status in ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"] {
        let location = format!("location: http://{}/v1/chat/completions\r\n", other.address);
        check(&once(whole(status, &location, ""), false).await, 502, "upstream_garbled", "true");
    }
    assert_eq!(other.seen.connections.load(std::sync::atomic::Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interim_answers_are_skipped() {
    let mut steps = vec![say("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")];
    steps.extend(whole("200 OK", "", WHOLE));
    assert_eq!(once(steps, false).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_cannot_be_reached_or_ends_early() {
    let (nobody, key) = (Vacant::new(), "key_env = \"KEY_A\"");
    let text = format!(
        "[[providers]]\nid = \"acme\"\nbase_url = \"http://{}/v1\"\nmodels = [\"big\"]\n{key}\n",
        nobody.address
    );
    let front = Front::start(&text).await;
    check(&send(front.address, chat(false)).await, 502, "upstream_error", "true");
    for stream in [false, true] {
        check(&once(vec![Step::Close], stream).await, 502, "upstream_error", "true");
        check(&once(vec![Step::Reset], stream).await, 502, "upstream_error", "true");
        check(
            &once(vec![say("HTTP/1.1 200 OK\r\ncontent-ty"), Step::Close], stream).await,
            502,
            "upstream_error",
            "true",
        );
    }
    let cut = [
        vec![say(format!("{HEAD}content-length: 50\r\n\r\n{{")), Step::Close],
        vec![say(format!("{HEAD}content-length: 50\r\n\r\n{{")), Step::Reset],
        vec![say(format!("{HEAD}transfer-encoding: chunked\r\n\r\n5\r\n{{\"a\"")), Step::Close],
    ];
    for steps in cut {
        check(&once(steps, false).await, 502, "upstream_truncated", "true");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_are_passed_on_as_they_are() {
    let body = r#"{"error":{"message":"slow down","type":"tokens","param":null,"code":"rate_limit_exceeded"}}"#;
    let reply = once(whole("429 Too Many", "retry-after: 7\r\nx-ratelimit-remaining-tokens: 0\r\n", body), true).await;
    check(&reply, 429, "rate_limit_exceeded", "true");
    assert_eq!((reply.header("retry-after"), reply.header("x-ratelimit-remaining-tokens")), (Some("7"), Some("0")));
    assert!(reply.text.ends_with(body));
    let reply = once(whole("422 Odd", "", r#"{"error":{"message":"no","code":"odd"}}"#), false).await;
    check(&reply, 422, "odd", "false");
    let reply = once(whole("500 Oops", "", "<html>stack trace</html>"), false).await;
    check(&reply, 502, "upstream_error", "true");
    assert!(!reply.text.contains("stack trace"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_key_is_our_business() {
    let body = r#"{"error":{"message":"Incorrect API key provided: sk-aaaa","code":"invalid_api_key"}}"#;
    for status in ["401 Unauthorized", "403 Forbidden"] {
        let reply = once_with(whole(status, "", body), false, "key_env = \"KEY_A\"").await;
        check(&reply, 502, "upstream_auth", "true");
        assert!(!reply.text.contains("sk-aaaa"), "{}", reply.text);
    }
    // Nor are the words about our bill a client's.
    for (status, body) in [
        ("402 Pay", r#"{"error":{"message":"pay invoice 7"}}"#),
        (
            "429 Too Many",
            r#"{"error":{"message":"see invoice 7","type":"insufficient_quota","code":"insufficient_quota"}}"#,
        ),
        (
            "400 Bad",
            r#"{"error":{"message":"see invoice 7","type":"invalid_request_error","code":"blocked_api_access"}}"#,
        ),
    ] {
        let reply = once_with(whole(status, "", body), false, "key_env = \"KEY_A\"").await;
        check(&reply, 429, "insufficient_quota", "true");
        assert!(!reply.text.contains("invoice"), "{}", reply.text);
    }
    let reply =
        once_with(whole("400 Bad", "", r#"{"error":{"message":"echo sk-aaaa"}}"#), false, "key_env = \"KEY_A\"").await;
    assert_eq!(reply.status, 400);
    assert!(!reply.text.contains("sk-aaaa") && reply.text.contains("echo [key]"), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_key_takes_over_from_one_that_is_limited() {
    let script = vec![whole("429 Slow", "retry-after: 60\r\n", "{}"), whole("200 OK", "", WHOLE)];
    let (provider, front) = setup(script, "keys_env = [\"KEY_A\", \"KEY_B\"]").await;
    assert_eq!(send(front.address, chat(false)).await.status, 200);
    assert_eq!(send(front.address, chat(false)).await.status, 200);
    let used: Vec<_> = provider.seen.requests().iter().map(|request| request.contains("sk-aaaa")).collect();
    assert_eq!(used, [true, false, false]);
    let (_provider, front) =
        setup(vec![whole("429 Slow", "retry-after: 60\r\n", "{}")], "keys_env = [\"KEY_A\", \"KEY_B\"]").await;
    assert_eq!(send(front.address, chat(false)).await.status, 429);
    let reply = send(front.address, chat(false)).await;
    check(&reply, 429, "rate_limit_exceeded", "true");
    assert_eq!(reply.header("retry-after"), Some("60"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_account_takes_over_from_one_without_credit() {
    let credit = r#"{"type":"error","error":{"type":"invalid_request_error","message":"Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing."}}"#;
    let good = r#"{"id":"msg_1","type":"message","role":"assistant","content":[{"type":"text","text":"hi"}],"model":"big","stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":7,"output_tokens":1}}"#;
    let body = r#"{"model":"big","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}"#;
    let request = || post("/v1/messages", body).replacen("Host: a\r\n", "Host: a\r\nConnection: close\r\n", 1);
    let keys = "protocol = \"anthropic\"\nkeys_env = [\"KEY_A\", \"KEY_B\"]";
    let (provider, front) = setup(vec![whole("400 Bad", "", credit), whole("200 OK", "", good)], keys).await;
    for _ in 0..3 {
        let reply = send(front.address, request()).await;
        assert_eq!((reply.status, reply.text.contains("\"hi\"")), (200, true), "{}", reply.text);
    }
    let used: Vec<_> = provider.seen.requests().iter().map(|request| request.contains("sk-aaaa")).collect();
    assert_eq!(used, [true, false, false, false], "the account without credit is left alone");
    let (_provider, front) = setup(vec![whole("400 Bad", "", credit)], keys).await;
    let reply = send(front.address, request()).await;
    assert_eq!((reply.status, reply.header("x-penstock-error-source")), (429, Some("upstream")), "{}", reply.text);
    assert!(!reply.text.contains("Billing") && !reply.text.contains("balance"), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_fails_before_its_first_word_has_a_status() {
    let event = "data: {\"error\":{\"message\":\"busy\",\"type\":\"overloaded_error\"}}\n\n";
    let reply = once(vec![sse_head(), chunk(FIRST), chunk(event), Step::Hang], true).await;
    check(&reply, 503, "overloaded", "true");
    let silent = [
        (vec![sse_head(), chunk(FIRST), Step::Close], "upstream_truncated"),
        (vec![sse_head(), chunk(FIRST), say("0\r\n\r\n")], "upstream_truncated"),
        // The last event alone is no answer: forwarded, it would be an empty one.
        (vec![sse_head(), chunk(DONE), say("0\r\n\r\n")], "upstream_truncated"),
        (vec![sse_head(), chunk(FIRST), chunk(DONE), say("0\r\n\r\n")], "upstream_truncated"),
        (vec![sse_head(), chunk("data: <html>\n\n"), Step::Hang], "upstream_garbled"),
        (whole("200 OK", "", WHOLE), "upstream_garbled"),
    ];
    for (steps, code) in silent {
        check(&once(steps, true).await, 502, code, "true");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_fails_later_looks_broken() {
    let event = "data: {\"error\":{\"message\":\"busy\",\"type\":\"overloaded_error\"}}\n\n";
    let endings = [
        (vec![Step::Close], "upstream_truncated"),
        (vec![Step::Reset], "upstream_truncated"),
        (vec![say("0\r\n\r\n")], "upstream_truncated"),
        (vec![chunk(LAST), say("0\r\n\r\n")], "upstream_truncated"),
        (vec![say("zz\r\n"), Step::Hang], "upstream_garbled"),
        (vec![chunk(event), Step::Hang], "overloaded"),
    ];
    for (ending, code) in endings {
        let steps = [vec![sse_head(), chunk(FIRST), chunk(PIECE), Step::Gate], ending].concat();
        let reply = after_a_word(steps, chat(true)).await;
        let text = payload(&reply);
        assert!(reply.status == 200 && text.starts_with(&[FIRST, PIECE].concat()), "{}", reply.text);
        assert!(text.contains(&format!("\"code\":\"{code}\"")) && !text.contains("[DONE]"), "{text}");
        assert!(!reply.is_whole(), "the framing is broken too: {}", reply.text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_complete_answer_needs_no_end_of_its_body() {
    for ending in [Step::Close, Step::Reset] {
        let answer = [FIRST, PIECE, LAST, DONE];
        let steps = [vec![sse_head()], answer.map(chunk).to_vec(), vec![Step::Gate, ending]].concat();
        let reply = after_a_word(steps, chat(true)).await;
        assert_eq!(payload(&reply), answer.concat());
        assert!(reply.is_whole(), "{}", reply.text);
    }
}

/// The client's whole stream from a provider that waits at a gate until the client has its first word.
async fn after_a_word(steps: Vec<Step>, request: String) -> Reply {
    let (provider, front) = setup(vec![steps], "").await;
    let mut client = Client::connect(front.address).await;
    client.send(request).await;
    let mut reply = client.until(Duration::from_secs(10), |text| text.contains("x\"")).await;
    provider.seen.go_on();
    let rest = client.until_closed().await;
    reply.text.push_str(&rest.text);
    reply
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_has_a_limit() {
    let limits = "first_token_timeout_ms = 100\nidle_timeout_ms = 100\nanswer_timeout_ms = 100";
    for stream in [false, true] {
        check(&once_with(vec![Step::Hang], stream, limits).await, 504, "upstream_timeout", "true");
    }
    let body = vec![say(format!("{HEAD}content-length: 50\r\n\r\n{{")), Step::Hang];
    check(&once_with(body, false, limits).await, 504, "upstream_timeout", "true");
    let first = vec![sse_head(), chunk(FIRST), Step::Hang];
    check(&once_with(first, true, limits).await, 504, "upstream_timeout", "true");
    // Keep-alive comments are not content: they do not extend the deadline.
    let alive = vec![sse_head(), Step::Pace(b"4\r\n:hi\n\r\n".to_vec(), 5)];
    check(&once_with(alive, true, limits).await, 504, "upstream_timeout", "true");
    let later = once_with(vec![sse_head(), chunk(PIECE), Step::Hang], true, limits).await;
    assert!(payload(&later).contains("upstream_timeout") && !later.is_whole(), "{}", later.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endless_event_is_cut_off() {
    let line = vec![sse_head(), say("4000000\r\ndata: "), Step::Repeat(vec![b'x'; 1 << 20], 60)];
    // The answer was begun, and is billed: a retry is not advised.
    check(&once_with(line, true, "[stream]\ncommit_ms = 60000").await, 502, "upstream_garbled", "false");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_that_died_is_replaced() {
    // The first connection is closed by the provider after its answer, as a keep-alive timeout would.
    let closing = [whole("200 OK", "", WHOLE), vec![Step::Close]].concat();
    let (provider, front) = setup(vec![closing, whole("200 OK", "", WHOLE)], "").await;
    for _ in 0..3 {
        assert_eq!(send(front.address, chat(false)).await.status, 200);
    }
    assert_eq!(provider.seen.connections.load(std::sync::atomic::Ordering::SeqCst), 2);
    // Here the request itself meets the close: it is sent again, once, on a fresh connection.
    let (provider, front) =
        setup(vec![whole("200 OK", "", WHOLE), vec![Step::Close], whole("200 OK", "", WHOLE)], "").await;
    assert_eq!(send(front.address, chat(false)).await.status, 200);
    assert_eq!(send(front.address, chat(false)).await.status, 200);
    assert_eq!(provider.seen.requests().len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_before_the_request_is_read_is_heard() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let early = tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let mut scratch = [0; 1024];
        let _ = stream.read(&mut scratch).await;
        let body = r#"{"error":{"message":"too much","code":"too_much"}}"#;
        let head =
            format!("HTTP/1.1 413 Large\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).await.expect("written");
        stream.write_all(body.as_bytes()).await.expect("written");
        stream
    });
    let text = format!("[[providers]]\nid = \"acme\"\nbase_url = \"http://{address}/v1\"\nmodels = [\"big\"]\n");
    let front = Front::start(&text).await;
    let body = format!(r#"{{"model":"big","messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(8 << 20));
    let request = post("/v1/chat/completions", &body).replacen("Host: a\r\n", "Host: a\r\nConnection: close\r\n", 1);
    let reply = send(front.address, request).await;
    check(&reply, 413, "too_much", "false");
    drop(early.await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_at_once_are_bounded() {
    let (provider, front) = setup(vec![vec![Step::Hang]], "in_flight_max = 1").await;
    let mut first = Client::connect(front.address).await;
    first.send(chat(false)).await;
    penstock_hostile::eventually("the provider is asked", || !provider.seen.requests().is_empty()).await;
    let reply = send(front.address, chat(false)).await;
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")));
    drop(first);
    penstock_hostile::eventually("the provider sees the end", || provider.seen.left().is_some()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_dialect_is_translated() {
    let (provider, front) = setup(vec![whole("200 OK", "", WHOLE)], "").await;
    let body = r#"{"model":"big","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}"#;
    let request = post("/v1/messages", body).replacen("Host: a\r\n", "Host: a\r\nConnection: close\r\n", 1);
    let reply = send(front.address, request).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert!(reply.text.contains("\"text\":\"hi\"") && reply.text.contains("\"input_tokens\":7"), "{}", reply.text);
    assert!(provider.seen.requests()[0].starts_with("POST /v1/chat/completions "));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gemini_clients_reach_gemini_byte_for_byte() {
    const BODY: &str = r#"{ "contents":[{"parts":[{"text":"hi"}]}], "generationConfig":{"newField":1} }"#;
    const ANSWER: &str = r#"{ "candidates":[{"content":{"parts":[{"text":"ho"}]},"finishReason":"STOP"}],"usageMetadata":{"promptTokenCount":3} }"#;
    let event = format!("data: {ANSWER}\r\n\r\n");
    let stream = vec![sse_head(), chunk(&event), say("0\r\n\r\n")];
    let cut = vec![
        sse_head(),
        chunk("data: {\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"h\"}]}}]}\n\n"),
        say("0\r\n\r\n"),
    ];
    let script = vec![whole("200 OK", "", ANSWER), stream, cut];
    let keys = "protocol = \"gemini\"\nkey_env = \"KEY_A\"";
    let (provider, front) = setup(script, keys).await;
    let ask = |method: &str| {
        post(&format!("/v1beta/models/big:{method}"), BODY).replacen(
            "Host: a\r\n",
            "Host: a\r\nConnection: close\r\nx-goog-api-key: client\r\n",
            1,
        )
    };
    let reply = send(front.address, ask("generateContent")).await;
    assert_eq!(reply.text.split_once("\r\n\r\n").map(|(_, body)| body), Some(ANSWER), "{}", reply.text);
    let reply = send(front.address, ask("streamGenerateContent?alt=sse")).await;
    assert_eq!((payload(&reply), reply.is_whole()), (event, true), "{}", reply.text);
    let reply = send(front.address, ask("streamGenerateContent?alt=sse")).await;
    assert!(!reply.is_whole(), "no finish reason came: {}", reply.text);
    let requests = provider.seen.requests();
    for (request, path) in requests.iter().zip([":generateContent ", ":streamGenerateContent?alt=sse "]) {
        let (head, body) = request.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with(&format!("POST /v1/models/big{path}")), "{head}");
        assert!(head.contains("x-goog-api-key: sk-aaaa") && !head.contains("client"), "{head}");
        assert_eq!(body, BODY);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_translated_stream_that_is_cut_looks_broken() {
    let steps = vec![sse_head(), chunk(FIRST), chunk(PIECE), Step::Gate, Step::Close];
    let body = r#"{"model":"big","max_tokens":5,"stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
    let request = post("/v1/messages", body).replacen("Host: a\r\n", "Host: a\r\nConnection: close\r\n", 1);
    let reply = after_a_word(steps, request).await;
    let text = payload(&reply);
    assert!(text.contains("event: error") && !text.contains("message_stop") && !reply.is_whole(), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_say_what_became_of_requests() {
    let script = vec![whole("200 OK", "", WHOLE), whole("429 Slow", "", "{}"), vec![Step::Hang]];
    let (provider, front) = setup(script, "").await;
    send(front.address, chat(false)).await;
    send(front.address, chat(false)).await;
    let mut client = Client::connect(front.address).await;
    client.send(chat(false)).await;
    penstock_hostile::eventually("the provider is asked", || provider.seen.requests().len() == 3).await;
    drop(client);
    let counted =
        |outcome: &str| format!("penstock_upstream_requests_total{{provider=\"acme\",outcome=\"{outcome}\"}} 1");
    for outcome in ["complete", "rate_limited", "cancelled"] {
        let line = counted(outcome);
        penstock_hostile::eventually(&line, || front.gateway.render_metrics().contains(&line)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_discovered() {
    let list = r#"{"object":"list","data":[{"id":"org/small"},{"id":"tiny"}]}"#;
    let (provider, front) = setup(vec![whole("200 OK", "", list), whole("200 OK", "", WHOLE)], "discover = true").await;
    let models = "GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    let mut reply = send(front.address, models).await;
    for _ in 0..1000 {
        if reply.text.contains("acme/tiny") {
            break;
        }
        reply = send(front.address, models).await;
    }
    assert!(reply.text.contains("\"acme/org/small\"") && reply.text.contains("\"big\""), "{}", reply.text);
    let reply = send(front.address, chat_to("acme/org/small", false)).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let requests = provider.seen.requests();
    assert!(
        requests[0].starts_with("GET /v1/models HTTP/1.1\r\n") && requests[1].contains("\"model\":\"org/small\""),
        "{requests:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_that_nobody_reads_are_passed_on() {
    let audio = vec![say(
        "HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n3\r\nID3\r\n0\r\n\r\n",
    )];
    let (provider, front) = setup(vec![audio, whole("200 OK", "", "{\"text\":\"hi\"}")], "key_env = \"KEY_A\"").await;
    let speech = post("/v1/audio/speech", r#"{"model":"big", "input":"hi"}"#).replacen(
        "Host: a",
        "Host: a\r\nConnection: close",
        1,
    );
    let reply = send(front.address, speech).await;
    assert_eq!((reply.status, reply.header("content-type")), (200, Some("audio/mpeg")), "{}", reply.text);
    assert!(payload(&reply) == "ID3" && reply.is_whole(), "{}", reply.text);
    let form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nbig\r\n--b\r\nContent-Disposition: form-data; name=\"file\"; \
                filename=\"a.wav\"\r\n\r\nRIFF\r\n--b--\r\n";
    let upload = format!(
        "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: multipart/form-data; boundary=b\r\n\
         Content-Length: {}\r\n\r\n{form}",
        form.len()
    );
    let reply = send(front.address, upload).await;
    assert!(reply.status == 200 && reply.text.ends_with("{\"text\":\"hi\"}"), "{}", reply.text);
    let requests = provider.seen.requests();
    assert!(
        requests[0].starts_with("POST /v1/audio/speech ") && requests[0].ends_with(r#"{"model":"big", "input":"hi"}"#),
        "{requests:?}"
    );
    assert!(
        requests[1].contains("content-type: multipart/form-data; boundary=b\r\n") && requests[1].ends_with(form),
        "{requests:?}"
    );
    assert!(requests.iter().all(|request| request.contains("authorization: Bearer sk-aaaa")));
}

/// Of the gateway, of the model and of the client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_that_is_passed_on_has_the_deadlines_of_other_requests() {
    let trickle = vec![
        say("HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: 9000000\r\n\r\n"),
        Step::Pace(b"x".to_vec(), 20),
    ];
    let relayed = "[[models]]\nname = \"short\"\ntimeout_ms = 1500\nto = [{ provider = \"acme\", model = \"big\" }]\n";
    let ask = |model: &str, field: &str| {
        let request = post("/v1/audio/speech", &format!(r#"{{"model":"{model}","input":"hi"}}"#));
        request.replacen("Host: a", &format!("Host: a\r\nConnection: close{field}"), 1)
    };
    for (more, model, field) in [
        ("", "big", "\r\nx-request-timeout-ms: 1500"),
        (relayed, "short", ""),
        ("[server]\nrequest_timeout_ms = 1500\n", "big", ""),
    ] {
        let (provider, front) = setup(vec![trickle.clone(), vec![Step::Hang]], more).await;
        let broken = send(front.address, ask(model, field)).await;
        assert!(broken.status == 200 && broken.closed, "{more} {field}: {}", broken.text);
        eventually("the provider is left", || provider.seen.left().is_some()).await;
        let silent = send(front.address, ask(model, field)).await;
        assert_eq!(silent.status, 504, "{more} {field}: {}", silent.text);
    }
    let (provider, front) = setup(vec![trickle], "").await;
    let odd = send(front.address, ask("big", "\r\nx-request-timeout-ms: soon")).await;
    assert!(odd.status == 400 && odd.text.contains("x-request-timeout-ms"), "{}", odd.text);
    assert!(provider.seen.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_need_a_model_that_is_served() {
    let cut = vec![say("HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: 9\r\n\r\nID3"), Step::Close];
    let (_provider, front) = setup(vec![cut], "").await;
    let ask = async |body: &str| {
        send(front.address, post("/v1/images/generations", body).replacen("Host: a", "Host: a\r\nConnection: close", 1))
            .await
    };
    assert_eq!(ask(r#"{"prompt":"x"}"#).await.status, 400);
    assert_eq!(ask(r#"{"model":"other"}"#).await.status, 404);
    let broken = ask(r#"{"model":"big"}"#).await;
    assert!(
        broken.status == 200 && broken.closed && broken.text.ends_with("ID3"),
        "shorter than it said: {}",
        broken.text
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_websocket_is_a_tunnel() {
    let open = "HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: abc=\r\n\
                sec-websocket-protocol: realtime\r\nsec-websocket-extensions: permessage-deflate\r\n\r\nfirst";
    let (provider, front) =
        setup(vec![vec![say(open), Step::Gate, say(" last"), Step::Close]], "key_env = \"KEY_A\"").await;
    let mut client = Client::connect(front.address).await;
    client
        .send(
            "GET /v1/realtime?model=big HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: realtime, openai-insecure-api-key.sk-client\r\n\
             Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\nAuthorization: Bearer sk-client\r\n\r\n",
        )
        .await;
    let reply = client.until(Duration::from_secs(10), |text| text.ends_with("first")).await;
    assert!(reply.status == 101 && reply.header("sec-websocket-accept") == Some("abc="), "{}", reply.text);
    // The frames are made by what both sides agreed on.
    let agreed = ["sec-websocket-protocol", "sec-websocket-extensions"].map(|name| reply.header(name));
    assert_eq!(agreed, [Some("realtime"), Some("permessage-deflate")], "{}", reply.text);
    let request = &provider.seen.requests()[0];
    assert!(request.contains("sec-websocket-extensions: permessage-deflate; client_max_window_bits\r\n"), "{request}");
    assert!(
        request.starts_with("GET /v1/realtime?model=big HTTP/1.1\r\n")
            && request.contains("sec-websocket-protocol: realtime\r\n"),
        "{request}"
    );
    assert!(request.contains("authorization: Bearer sk-aaaa\r\n") && !request.contains("sk-client"), "{request}");
    provider.seen.go_on();
    assert_eq!(client.until_closed().await.text, " last");
    let plain = get("/v1/realtime?model=big").replacen("Host: a", "Host: a\r\nConnection: close", 1);
    assert_eq!(send(front.address, plain).await.status, 426);
}

/// An open tunnel counts for as long as it lasts, and lasts only while its key has the permission.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_is_held_to_what_its_key_may() {
    let open = "HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: abc=\r\n\r\nfirst";
    let limited = "[[limits]]\nid = \"one\"\nin_flight = 1\nrequests_per_day = 3\n[[keys]]\nid = \"other\"\nkey_env = \"KEY_B\"\n";
    let key = "[[keys]]\nid = \"a\"\nkey_env = \"KEY_A\"\nlimits = [\"one\"]\n";
    let (provider, front) = setup(vec![vec![say(open), Step::Hang]], &format!("{limited}{key}")).await;
    let ask = "GET /v1/realtime?model=big HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
               Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: Bearer sk-aaaa\r\n\r\n";
    let tunnel = async || {
        let mut client = Client::connect(front.address).await;
        client.send(ask).await;
        let reply = client.until(PATIENCE, |text| text.ends_with("first") || text.contains("\"error\"")).await;
        (client, reply)
    };
    let (mut first, reply) = tunnel().await;
    assert_eq!(reply.status, 101, "{}", reply.text);
    let (_, refused) = tunnel().await;
    assert!(refused.status == 429 && refused.text.contains("in_flight"), "{}", refused.text);
    // An operator ends it.
    let live = front.gateway.live.list();
    assert!(front.gateway.live.cancel(live[0].id));
    first.until_closed().await;
    eventually("its place is free", || front.gateway.live.list().is_empty()).await;
    let (mut second, reply) = tunnel().await;
    assert_eq!(reply.status, 101, "{}", reply.text);
    // The key is removed from the config.
    let text = format!(
        "[[providers]]\nid = \"acme\"\nbase_url = \"http://{}/v1\"\nmodels = [\"big\"]\n{limited}",
        provider.address
    );
    let overrides = Overrides { access_log: Some("off".into()), ..Overrides::default() };
    let secret = |_: &str| Some("sk-bbbb".to_owned());
    let config = penstock_config::load(Some(("test.toml", &text)), &overrides, &secret).expect("a valid config");
    front.gateway.swap(config, Vec::new(), front.gateway.serving().providers().to_vec());
    let began = std::time::Instant::now();
    second.until_closed().await;
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    eventually("nothing is left of it", || front.gateway.live.list().is_empty()).await;
    let log = front.gateway.render_metrics();
    assert!(log.contains("penstock_limit_decisions_total{limit=\"one\",decision=\"allowed\"} 2"), "{log}");
}
