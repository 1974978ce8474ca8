//! Clients that send slowly, read slowly, or leave.

use std::time::{Duration, Instant};

use penstock_hostile::raw::{self, Client};
use penstock_hostile::{Server, eventually, promised};
use tokio::io::AsyncWriteExt;

const SHORT: &str = "[server]\nhead_timeout_ms = 1000\nbody_timeout_ms = 300\nbody_rate_bytes_min = 100000\nidle_timeout_ms = 1000\n\
                     write_stall_ms = 300\n[stream]\nheartbeat_ms = 100\ncommit_ms = 50\n";

/// Sends a byte every 20 ms until the peer closes; returns the time.
async fn trickle(client: &mut Client, bytes: &[u8]) -> Duration {
    let began = Instant::now();
    for byte in bytes {
        if client.stream.write_all(&[*byte]).await.is_err() || began.elapsed() > Duration::from_secs(10) {
            break;
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
            ready = client.stream.readable() => { ready.expect("readable"); break }
        }
    }
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_head_is_cut_however_lively() {
    let server = Server::start(SHORT).await;
    let mut client = Client::connect(server.address).await;
    let head = format!("GET /health HTTP/1.1\r\nHost: a\r\nX: {}", "y".repeat(2000));
    assert!(trickle(&mut client, head.as_bytes()).await < Duration::from_secs(5));
    assert_eq!(client.until_closed().await.status, 408);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_body_is_cut_whatever_its_framing() {
    let server = Server::start(SHORT).await;
    for (framing, start) in [("Content-Length: 5000", ""), ("Transfer-Encoding: chunked", "1388\r\n")] {
        let mut client = Client::connect(server.address).await;
        client.send(format!("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n{start}")).await;
        assert!(trickle(&mut client, &[b' '; 2000]).await < Duration::from_secs(5), "{framing}");
        let reply = client.until_closed().await;
        assert_eq!((reply.status, reply.header("x-should-retry")), (408, Some("true")), "{framing}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fast_start_buys_no_silence() {
    let server = Server::start(SHORT).await;
    // At the minimum rate these bytes would have taken ten seconds.
    for (framing, start) in [("Content-Length: 2000000", ""), ("Transfer-Encoding: chunked", "1e8480\r\n")] {
        let mut client = Client::connect(server.address).await;
        client.send(format!("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n{start}")).await;
        client.send(vec![b' '; 1_000_000]).await;
        let began = Instant::now();
        assert_eq!(client.until_closed().await.status, 408, "{framing}");
        assert!(began.elapsed() < Duration::from_secs(4), "{framing}: {:?}", began.elapsed());
    }
    eventually("the budget is given back", || server.gateway.bodies.bytes_held() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_is_closed() {
    let server = Server::start(SHORT).await;
    assert_eq!(Client::connect(server.address).await.until_closed().await.text, "", "no request, no answer");
    let mut kept = Client::connect(server.address).await;
    kept.send(raw::get("/health")).await;
    let reply = kept.until_closed().await;
    assert_eq!((reply.status, reply.answers()), (200, 1), "idle after its answer");
    let mut preface = Client::connect(server.address).await;
    preface.send("PRI * HTTP/2.0\r\n\r\n").await;
    preface.until_closed().await;
    let mut no_settings = Client::connect(server.address).await;
    no_settings.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    no_settings.until_closed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hundred_slow_clients_cost_no_one_else() {
    let server = Server::start("").await;
    let mut held = Vec::new();
    for number in 0..300 {
        let mut client = Client::connect(server.address).await;
        client
            .send(if number % 2 == 0 {
                "GET /hea"
            } else {
                "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
            })
            .await;
        held.push(client);
    }
    let mut client = Client::connect(server.address).await;
    for _ in 0..20 {
        promised(Duration::from_secs(1), async || {
            let began = Instant::now();
            client.send(raw::chat("say 3", false)).await;
            assert_eq!(client.answer().await.status, 200);
            began.elapsed()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_stops_is_cut_and_slows_only_itself() {
    let server = Server::start(SHORT).await;
    let mut stalled = Client::connect(server.address).await;
    stalled.send(raw::chat("flood", true)).await;
    eventually("the flood began", || server.puppet.tokens() > 0).await;
    server.upstream_idle().await;
    // Only the contents of two socket buffers, not all that the upstream could produce in that time.
    assert!(
        server.puppet.tokens() < 20_000,
        "{} KiB were taken for a reader that reads nothing",
        server.puppet.tokens()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_frees_its_request_in_every_state() {
    let server = Server::start("").await;
    for (script, stream, begun) in
        [("hang", true, false), ("hang", false, false), ("pace 100000", true, true), ("pace 100000", false, false)]
    {
        promised(Duration::from_millis(500), async || {
            let mut client = Client::connect(server.address).await;
            client.send(raw::chat(script, stream)).await;
            eventually("the request is open", || server.puppet.open() == 1).await;
            if begun {
                client.until(Duration::from_secs(10), |text| text.contains("t5 ")).await;
            }
            let began = Instant::now();
            drop(client);
            server.upstream_idle().await;
            began.elapsed()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_charged_until_its_answer_begins() {
    let server = Server::start("").await;
    for size in [20_000, 400_000] {
        let padding = " ".repeat(size);
        let asked = server.puppet.opened();
        let mut waiting = Client::connect(server.address).await;
        waiting.send(raw::chat(&format!("stall {padding}"), false)).await;
        eventually("the upstream is asked", || server.puppet.opened() > asked).await;
        assert!(server.gateway.bodies.bytes_held() >= size, "{}", server.gateway.bodies.bytes_held());
        drop(waiting);
        eventually("the budget is given back", || server.gateway.bodies.bytes_held() == 0).await;
        let mut open = Client::connect(server.address).await;
        open.send(raw::chat(&format!("pace 100000{padding}"), false)).await;
        eventually("the request is open", || server.puppet.open() == 1).await;
        eventually("nobody needs it any more", || server.gateway.bodies.bytes_held() == 0).await;
        drop(open);
        server.upstream_idle().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stray_bytes_do_not_hide_that_a_client_left() {
    let server = Server::start("").await;
    let mut client = Client::connect(server.address).await;
    client.send(raw::chat("hang", false)).await;
    eventually("the request is open", || server.puppet.open() == 1).await;
    client.send("GET").await;
    let mut other = Client::connect(server.address).await;
    for _ in 0..20 {
        other.send(raw::get("/health")).await;
        other.answer().await;
    }
    assert_eq!(server.puppet.open(), 1, "early bytes of a next request are no reason to stop");
    drop(client);
    server.upstream_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_that_leave_leave_nothing() {
    let server = Server::start("").await;
    for _ in 0..5 {
        let mut clients = Vec::new();
        for number in 0..100 {
            let mut client = Client::connect(server.address).await;
            client.send(raw::chat("pace 100000", number % 2 == 0)).await;
            clients.push(client);
        }
        eventually("all are open", || server.puppet.open() == 100).await;
        drop(clients);
        server.upstream_idle().await;
    }
    eventually("no request is in flight", || server.gateway.metrics.in_flight_now() == 0).await;
    assert_eq!(server.gateway.bodies.bytes_held(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_stream_shows_signs_of_life() {
    let server = Server::start(SHORT).await;
    let mut client = Client::connect(server.address).await;
    client.send(raw::chat("hang", true)).await;
    let reply = client.until(Duration::from_secs(10), |text| text.matches(": keep-alive\n\n").count() >= 3).await;
    assert_eq!((reply.status, reply.header("content-type")), (200, Some("text/event-stream; charset=utf-8")));
    assert!(!reply.text.contains("data:"), "nothing that binds");
}
