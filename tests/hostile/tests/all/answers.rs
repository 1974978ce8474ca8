//! Answers: whole, streamed, failed before and after their beginning.

use penstock_hostile::Server;
use penstock_hostile::raw::{self, Client};
use tokio::task::JoinSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whole_and_streamed_say_the_same() {
    let server = Server::start("").await;
    let mut client = Client::connect(server.address).await;
    client.send(raw::chat("say 3", false)).await;
    let reply = client.answer().await;
    assert!(reply.status == 200 && reply.text.contains("\"content\":\"t0 t1 t2 \""), "{}", reply.text);
    assert!(reply.header("openai-processing-ms").is_some() && reply.header("x-request-id").is_some());
    client.send(raw::chat("say 3", true)).await;
    let reply = client.until(penstock_hostile::PATIENCE, |text| text.ends_with("0\r\n\r\n")).await;
    for piece in ["t0 ", "t1 ", "t2 ", "\"finish_reason\":\"stop\"", "data: [DONE]"] {
        assert!(reply.text.contains(piece), "{piece} in {}", reply.text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_before_the_first_token_has_its_own_status() {
    let server = Server::start("").await;
    for stream in [true, false] {
        let mut client = Client::connect(server.address).await;
        client.send(raw::chat("refuse", stream)).await;
        let reply = client.answer().await;
        assert_eq!(reply.status, 502, "{}", reply.text);
        assert!(reply.text.contains("\"code\":\"worker_failed\"") && !reply.text.contains("as told"), "{}", reply.text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_stream_looks_broken() {
    let server = Server::start("").await;
    for script in ["break 3", "short 3"] {
        let reply = raw::send(server.address, raw::chat(script, true)).await;
        assert_eq!(reply.status, 200);
        assert!(reply.text.contains("t2 ") && reply.text.contains("data: {\"error\":{"), "{script}: {}", reply.text);
        assert!(!reply.text.contains("[DONE]") && !reply.is_whole(), "{script}: {}", reply.text);
        let mut client = Client::connect(server.address).await;
        client.send(raw::chat(script, false)).await;
        assert!(client.answer().await.status >= 500, "{script}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_answer_that_grows_without_end_is_given_up() {
    let server = Server::start("").await;
    let mut client = Client::connect(server.address).await;
    client.send(raw::chat("flood", false)).await;
    let reply = client.answer().await;
    assert!(reply.status == 413 && reply.text.contains("request_too_large"), "{}", reply.text);
    server.upstream_idle().await;
    let taken = server.puppet.tokens() >> 10;
    assert!((64..=65).contains(&taken), "{taken} MiB were taken");
    client.send(raw::chat("say 1", false)).await;
    assert_eq!(client.answer().await.status, 200, "the connection goes on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_is_one_clients_error() {
    let server = Server::start("").await;
    for stream in [true, false] {
        let mut client = Client::connect(server.address).await;
        client.send(raw::chat("panic", stream)).await;
        let reply = client.answer().await;
        assert!(reply.status == 500 && reply.text.contains("internal_error"), "{}", reply.text);
    }
    server.upstream_idle().await;
    assert!(server.gateway.render_metrics().contains("penstock_panics_total 2"));
    let mut client = Client::connect(server.address).await;
    client.send(raw::chat("say 1", false)).await;
    assert_eq!(client.answer().await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_streams_at_once() {
    let server = Server::start("").await;
    let address = server.address;
    let mut streams = JoinSet::new();
    for _ in 0..64 {
        streams.spawn(async move {
            let mut client = Client::connect(address).await;
            client.send(raw::chat("pace 50", true)).await;
            client.until(penstock_hostile::PATIENCE, |text| text.ends_with("0\r\n\r\n")).await
        });
    }
    while let Some(reply) = streams.join_next().await {
        let reply = reply.expect("no panic");
        assert!(reply.text.contains("t49 ") && reply.text.contains("[DONE]") && reply.is_whole());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_1_0_is_answered_in_its_own_way() {
    let server = Server::start("").await;
    let chat = raw::chat("say 3", true).replace("HTTP/1.1", "HTTP/1.0");
    let reply = raw::send(server.address, chat).await;
    assert!(reply.header("transfer-encoding").is_none() && reply.text.ends_with("data: [DONE]\n\n"), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_asked_for_where_they_are_configured() {
    // SHA-256 of "sk-test".
    let digest = "f3abf2a6cc4f00987743db5f544ba345b4899ae31f326d8ee9c4816de153c9e0";
    let server = Server::start(&format!("[[keys]]\nid = \"a\"\ndigest = \"{digest}\"\n")).await;
    for path in ["/v1/models", "/metrics", "/v1/models/puppet"] {
        let mut client = Client::connect(server.address).await;
        client.send(raw::get(path)).await;
        let reply = client.answer().await;
        assert!(reply.status == 401 && reply.text.contains("invalid_api_key"), "{path}: {}", reply.text);
    }
    let reply = raw::send(server.address, raw::chat("say 1", false)).await;
    assert_eq!((reply.status, server.puppet.opened()), (401, 0), "refused without reading the body");
    let mut client = Client::connect(server.address).await;
    client.send(raw::get("/health")).await;
    assert_eq!(client.answer().await.status, 200);
    client.send(raw::chat("say 1", false).replace("Host: a", "Host: a\r\nAuthorization: Bearer sk-test")).await;
    assert_eq!(client.answer().await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_json_is_refused() {
    let server = Server::start("").await;
    let deep = "[".repeat(200_000);
    for (body, status) in [
        ("", 400),
        ("{", 400),
        ("[]", 400),
        ("nope", 400),
        ("{\"model\":1}", 400),
        (deep.as_str(), 400),
        ("\u{0}", 400),
    ] {
        let mut client = Client::connect(server.address).await;
        client.send(raw::post("/v1/chat/completions", body)).await;
        assert_eq!(client.answer().await.status, status, "{:?}", &body[..body.len().min(20)]);
    }
    let typed = raw::chat("say 1", false).replace("application/json", "text/html");
    assert_eq!(raw::send(server.address, typed).await.status, 415);
    let coded = raw::chat("say 1", false).replace("Content-Type:", "Content-Encoding: gzip\r\nContent-Type:");
    assert_eq!(raw::send(server.address, coded).await.status, 415);
    let unknown = raw::chat("say 1", false).replace("\"puppet\"", "\"muppet\"");
    let mut client = Client::connect(server.address).await;
    client.send(unknown).await;
    let reply = client.answer().await;
    assert!(reply.status == 404 || reply.status == 400, "{}", reply.text);
}
