//! HTTP/2: lying lengths, floods, zero windows.

use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::{self, SendRequest};
use http::Request;
use penstock_hostile::raw::{self, Client};
use penstock_hostile::{PATIENCE, Server, eventually, promised};
use tokio::net::TcpStream;
use tokio::time::timeout;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

async fn connect(server: &Server) -> SendRequest<Bytes> {
    connect_with(server, &mut client::Builder::new()).await
}

async fn connect_with(server: &Server, builder: &mut client::Builder) -> SendRequest<Bytes> {
    let stream = TcpStream::connect(server.address).await.expect("connect");
    let (requests, connection) = builder.handshake(stream).await.expect("handshake");
    tokio::spawn(async move {
        // Ends with the test, or when the server closes.
        let _ = connection.await;
    });
    requests
}

fn chat(script: &str, stream: bool) -> (Request<()>, Bytes) {
    let text = raw::chat(script, stream);
    let body = text.split_once("\r\n\r\n").expect("a body").1.to_owned();
    let request = Request::post("http://a/v1/chat/completions").header("content-length", body.len());
    (request.body(()).expect("a request"), body.into())
}

/// Runs one whole exchange; `None` if it was reset.
async fn ask(requests: &mut SendRequest<Bytes>, script: &str, stream: bool) -> Option<(u16, String)> {
    let (request, body) = chat(script, stream);
    let mut ready = requests.clone().ready().await.ok()?;
    let (response, mut sender) = ready.send_request(request, false).ok()?;
    sender.send_data(body, true).ok()?;
    let response = timeout(PATIENCE, response).await.ok()?.ok()?;
    let (status, mut body, mut text) = (response.status().as_u16(), response.into_body(), Vec::new());
    while let Some(data) = timeout(PATIENCE, body.data()).await.ok()? {
        let data = data.ok()?;
        let _ = body.flow_control().release_capacity(data.len());
        text.extend_from_slice(&data);
    }
    Some((status, String::from_utf8_lossy(&text).into_owned()))
}

/// Number of other clients' requests until one was served in time.
async fn others_are_served(server: &Server) -> usize {
    let mut asked = 0;
    promised(Duration::from_secs(2), async || {
        asked += 1;
        let began = Instant::now();
        let mut client = Client::connect(server.address).await;
        client.send(raw::chat("say 2", false)).await;
        assert_eq!(client.answer().await.status, 200);
        began.elapsed()
    })
    .await;
    asked
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_streams_share_a_connection() {
    let server = Server::start("").await;
    let mut requests = connect(&server).await;
    let (status, text) = ask(&mut requests, "say 3", false).await.expect("an answer");
    assert!(status == 200 && text.contains("t0 t1 t2 "), "{text}");
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let mut requests = requests.clone();
        tasks.spawn(async move { ask(&mut requests, "pace 20", true).await });
    }
    while let Some(answer) = tasks.join_next().await {
        let (status, text) = answer.expect("no panic").expect("an answer");
        assert!(status == 200 && text.contains("t19 ") && text.contains("[DONE]"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_to_head_have_a_head_alone() {
    let server = Server::start("").await;
    let requests = connect(&server).await;
    for (path, status) in [("/health", 200), ("/v1/models", 200), ("/v1/embeddings", 405), ("/nothing", 404)] {
        let request = Request::head(format!("http://a{path}")).body(()).expect("a request");
        let mut ready = requests.clone().ready().await.expect("ready");
        let (response, _) = ready.send_request(request, true).expect("sent");
        let response = timeout(PATIENCE, response).await.expect("in time").expect("an answer");
        assert_eq!(response.status(), status, "{path}");
        let length =
            response.headers().get("content-length").and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        assert!(length.is_some_and(|length| length > 0), "{path}: the length that GET would have");
        let (mut body, mut bytes) = (response.into_body(), 0);
        while let Some(data) = timeout(PATIENCE, body.data()).await.expect("in time") {
            bytes += data.unwrap_or_else(|error| panic!("{path}: {error}")).len();
        }
        assert_eq!(bytes, 0, "{path}");
    }
    others_are_served(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_length_that_lies_is_never_dispatched() {
    let server = Server::start("").await;
    for change in [-5i64, 5] {
        let requests = connect(&server).await;
        let (mut request, body) = chat("say 1", false);
        request.headers_mut().insert("content-length", (body.len() as i64 + change).into());
        let mut ready = requests.ready().await.expect("ready");
        let (response, mut sender) = ready.send_request(request, false).expect("sent");
        let _ = sender.send_data(body, true);
        let outcome = timeout(PATIENCE, response).await.expect("an end");
        assert!(outcome.is_err() || outcome.is_ok_and(|response| response.status().is_client_error()), "{change}");
    }
    assert_eq!(server.puppet.opened(), 0);
    others_are_served(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_stream_is_reset() {
    let server = Server::start("").await;
    let mut requests = connect(&server).await;
    assert_eq!(ask(&mut requests, "break 3", true).await, None);
    assert_eq!(ask(&mut requests, "refuse", true).await.map(|(status, _)| status), Some(502));
    assert_eq!(ask(&mut requests, "say 1", true).await.map(|(status, _)| status), Some(200), "its siblings live");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_frees_the_request() {
    let server = Server::start("").await;
    let requests = connect(&server).await;
    promised(Duration::from_millis(500), async || {
        let (request, body) = chat("hang", true);
        let mut ready = requests.clone().ready().await.expect("ready");
        let (_response, mut sender) = ready.send_request(request, false).expect("sent");
        sender.send_data(body, true).expect("sent");
        eventually("the request is open", || server.puppet.open() == 1).await;
        let began = Instant::now();
        sender.send_reset(h2::Reason::CANCEL);
        server.upstream_idle().await;
        began.elapsed()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_of_zero_is_cut() {
    let server = Server::start("[server]\nwrite_stall_ms = 300\n").await;
    let requests = connect_with(&server, client::Builder::new().initial_window_size(0)).await;
    let (request, body) = chat("flood", true);
    let mut ready = requests.ready().await.expect("ready");
    let (response, mut sender) = ready.send_request(request, false).expect("sent");
    sender.send_data(body, true).expect("sent");
    eventually("the flood began", || server.puppet.opened() == 1).await;
    server.upstream_idle().await;
    assert!(server.puppet.tokens() < 2000, "{} KiB were buffered", server.puppet.tokens());
    drop(response);
}

/// Sends raw frames after the preface and an empty SETTINGS, until the server closes or all are sent; returns the
/// number of other clients' requests as above.
async fn flood(server: &Server, frame: &[u8], count: usize) -> usize {
    let mut client = Client::connect(server.address).await;
    client.send([PREFACE, &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat()).await;
    let burst = frame.repeat(100);
    for _ in 0..count / 100 {
        if timeout(Duration::from_secs(5), tokio::io::AsyncWriteExt::write_all(&mut client.stream, &burst))
            .await
            .is_err()
        {
            // Backpressure: the server stops reading requests that it cannot answer.
            break;
        }
    }
    others_are_served(server).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_frame_floods_harm_no_one() {
    let server = Server::start("").await;
    let mut polite = 0;
    for frame in [
        &[0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8][..],
        &[0, 0, 0, 4, 0, 0, 0, 0, 0],
        &[0, 0, 5, 2, 0, 0, 0, 0, 3, 0, 0, 0, 1, 7],
        &[0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    ] {
        polite += flood(&server, frame, 50_000).await;
    }
    assert_eq!(server.puppet.opened(), polite, "only the polite ones came through");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn continuation_floods_are_cut() {
    let server = Server::start("").await;
    // HEADERS without END_HEADERS on stream 1, then CONTINUATION for ever, each with one literal field.
    let mut client = Client::connect(server.address).await;
    client.send([PREFACE, &[0, 0, 0, 4, 0, 0, 0, 0, 0], &[0, 0, 1, 1, 0, 0, 0, 0, 1, 0x82]].concat()).await;
    let mut field = vec![0x00, 0x01, b'x', 0x7f, 0x81, 0x07];
    field.extend(vec![b'y'; 127 + 0x81 - 0x80 + 7 * 128]);
    let length = field.len() as u32;
    let mut frame = length.to_be_bytes()[1..].to_vec();
    frame.extend([9, 0, 0, 0, 0, 1]);
    frame.extend(&field);
    for _ in 0..2000 {
        if timeout(Duration::from_secs(5), tokio::io::AsyncWriteExt::write_all(&mut client.stream, &frame))
            .await
            .map_or(true, |sent| sent.is_err())
        {
            break;
        }
    }
    assert!(client.until(PATIENCE, |_| false).await.closed, "the connection is cut");
    assert_eq!(server.puppet.opened(), 0);
    others_are_served(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rapid_resets_are_cut() {
    let server = Server::start("").await;
    let mut requests = connect(&server).await;
    let mut sent = 0;
    for _ in 0..20_000 {
        let Ok(Ok(mut ready)) = timeout(Duration::from_secs(2), requests.clone().ready()).await else { break };
        let (request, _) = chat("hang", true);
        let Ok((_, mut sender)) = ready.send_request(request, false) else { break };
        sender.send_reset(h2::Reason::CANCEL);
        sent += 1;
        requests = ready;
        tokio::task::yield_now().await;
    }
    let polite = others_are_served(&server).await;
    // The polite client has its answer a moment before its request is put away.
    server.upstream_idle().await;
    let opened = server.puppet.opened();
    assert!(opened <= polite, "a cancelled request reaches no worker: {opened} after {sent} resets");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tiny_and_empty_data_frames_are_bounded() {
    let server = Server::start("").await;
    let mut polite = 0;
    for size in [0, 1] {
        let requests = connect(&server).await;
        let request = Request::post("http://a/v1/chat/completions").body(()).expect("a request");
        let mut ready = requests.ready().await.expect("ready");
        let (response, mut sender) = ready.send_request(request, false).expect("sent");
        let pump = async {
            for _ in 0..200_000 {
                if sender.send_data(Bytes::from(vec![b' '; size]), false).is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        };
        let _ = timeout(Duration::from_secs(10), pump).await;
        polite += others_are_served(&server).await;
        drop(response);
    }
    server.upstream_idle().await;
    assert_eq!(server.puppet.opened(), polite, "only the polite ones came through");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_follow_the_rules_of_http2() {
    let server = Server::start("").await;
    let requests = connect(&server).await;
    for (name, value, want) in
        [("host", "b", 400), ("x-large", &*"y".repeat(40_000), 431), ("content-length", "x", 400)]
    {
        let request = Request::get("http://a/health").header(name, value).body(()).expect("a request");
        let mut ready = requests.clone().ready().await.expect("ready");
        let (response, _) = ready.send_request(request, true).expect("sent");
        match timeout(PATIENCE, response).await.expect("an end") {
            Ok(response) => assert_eq!(response.status().as_u16(), want, "{name}"),
            Err(error) => assert!(error.is_reset(), "{name}: {error}"),
        }
    }
}
