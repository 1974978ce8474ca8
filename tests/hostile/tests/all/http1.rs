//! HTTP/1 that two servers could read differently, or that is not HTTP: one refusal, then a close, and nothing
//! dispatched.

use std::time::{Duration, Instant};

use penstock_hostile::raw::{self, Client};
use penstock_hostile::{Server, promised};

/// Request smuggled behind each hostile one: it must never be answered.
const SECOND: &str = "GET /health HTTP/1.1\r\nHost: a\r\n\r\n";

/// Longest wait of another client for an answer while a request is read that is refused in the end.
async fn longest_wait(server: &Server, attack: String, requests: usize) -> Duration {
    let attack = tokio::spawn(raw::send(server.address, attack));
    let mut client = Client::connect(server.address).await;
    let mut longest = Duration::ZERO;
    for _ in 0..requests {
        let began = Instant::now();
        client.send(raw::get("/health")).await;
        assert_eq!(client.answer().await.status, 200);
        longest = longest.max(began.elapsed());
    }
    let reply = attack.await.expect("no panic");
    assert_eq!(reply.status, 400, "{}", reply.text);
    longest
}

async fn check(server: &Server, bytes: &str, status: u16) {
    let reply = raw::send(server.address, format!("{bytes}{SECOND}")).await;
    assert_eq!((reply.status, reply.answers()), (status, 1), "{bytes:?} got {}", reply.text);
    assert_eq!(reply.header("connection"), Some("close"), "{bytes:?}");
    assert!(reply.header("x-request-id").is_some() && reply.text.contains("\"error\":{\"message\":"), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_are_refused() {
    let server = Server::start("").await;
    let lines = [
        ("Content-Length: 0\r\nTransfer-Encoding: chunked", 400),
        ("Transfer-Encoding: chunked\r\nContent-Length: 0", 400),
        ("Content-Length: 3\r\nContent-Length: 3", 400),
        ("Content-Length: 3\r\nContent-Length: 4", 400),
        ("Content-Length: 3, 3", 400),
        ("Content-Length: -1", 400),
        ("Content-Length: +3", 400),
        ("Content-Length: 0x3", 400),
        ("Content-Length: 18446744073709551616", 400),
        ("content-LENGTH: 3\r\nCONTENT-length: 3", 400),
        ("Transfer-Encoding: chunked, chunked", 400),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", 400),
        ("Transfer-Encoding: identity, chunked", 400),
        ("Transfer-Encoding: xchunked", 501),
        ("Transfer-Encoding: gzip", 501),
        ("Transfer-Encoding : chunked", 400),
        ("Transfer-Encoding\t: chunked", 400),
        ("Transfer-Encoding: \x0bchunked", 400),
        ("X: a\r\n folded", 400),
        ("X: a\rb", 400),
        ("X: a\nY: b", 400),
        ("X: a\0b", 400),
        ("X: a\x01b", 400),
        ("no colon", 400),
        (": no name", 400),
        ("Na me: x", 400),
        ("Host: b", 400),
        ("Upgrade: websocket\r\nConnection: Upgrade", 501),
        ("Expect: something", 417),
    ];
    for (line, status) in lines {
        check(&server, &format!("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{line}\r\n\r\n"), status).await;
    }
    for host in ["", "a b", "a/b", "a,b", "u@a", "a:x", "a?b", "[::1"] {
        check(&server, &format!("GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n"), 400).await;
    }
    for target in
        ["health", "/he alth", "/\x7f", "/\u{e9}", "/%0", "http://b/health", "http://u@a/health", "*", "//", "/#"]
    {
        let status = if target == "//" { 404 } else { 400 };
        if status == 400 {
            check(&server, &format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"), status).await;
        }
    }
    check(&server, "GET /health HTTP/1.1\r\n\r\n", 400).await;
    check(&server, "GET /health\r\n\r\n", 400).await;
    check(&server, "GET /health HTTP/1.1\n\n", 400).await;
    check(&server, "GET /health HTTP/3.0\r\nHost: a\r\n\r\n", 505).await;
    check(&server, "GET  /health HTTP/1.1\r\nHost: a\r\n\r\n", 400).await;
    check(&server, "POST /v1/models HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400).await;
    check(&server, "TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", 501).await;
    check(&server, "CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 501).await;
    check(&server, "\x16\x03\x01\x02\0\x01\0", 400).await;
    assert_eq!(server.puppet.opened(), 0, "nothing malformed reached the upstream");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_are_bounded() {
    let server = Server::start("[server]\nhead_bytes_max = 4096\n").await;
    check(&server, &format!("GET /health HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(5000)), 431).await;
    check(&server, &format!("GET /health HTTP/1.1\r\nHost: a\r\n{}\r\n", "x: y\r\n".repeat(150)), 431).await;
    check(&server, &format!("GET /health HTTP/1.1\r\nHost: a\r\nX: {}", "x".repeat(100_000)), 431).await;
    let server = Server::start("").await;
    check(&server, &format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(10_000)), 414).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunked_bodies_are_refused() {
    let server = Server::start("").await;
    let long_extension = format!("5;{}\r\nhello\r\n0\r\n\r\n", "x".repeat(2000));
    for body in [
        "+5\r\nhello\r\n0\r\n\r\n",
        " 5\r\nhello\r\n0\r\n\r\n",
        "5 \r\nhello\r\n0\r\n\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        "5\nhello\n0\n\n",
        "5\r\nhelloo\r\n0\r\n\r\n",
        "ffffffffffffffff0\r\n",
        "\r\n5\r\nhello\r\n0\r\n\r\n",
        "5;\x01\r\nhello\r\n0\r\n\r\n",
        "0\r\nx\0: y\r\n\r\n",
        &long_extension,
    ] {
        let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
        check(&server, &format!("{head}{body}"), 400).await;
    }
    assert_eq!(server.puppet.opened(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_good_chunked_body_is_served_at_every_split() {
    let server = Server::start("").await;
    let body = r#"{"model":"puppet","messages":[{"role":"user","content":"say 2"}]}"#;
    let (first, second) = body.split_at(20);
    let chunks =
        format!("{:x}\r\n{first}\r\n{:X};a=b\r\n{second}\r\n0\r\nx-trailer: 1\r\n\r\n", first.len(), second.len());
    let text = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}");
    for at in (1..text.len()).step_by(7) {
        let mut client = Client::connect(server.address).await;
        client.stream.set_nodelay(true).expect("nodelay");
        client.send(&text[..at]).await;
        tokio::task::yield_now().await;
        client.send(&text[at..]).await;
        let reply = client.answer().await;
        assert!(reply.status == 200 && reply.text.contains("t0 t1 "), "split at {at}: {}", reply.text);
    }
}

/// The limit is that of the payload, however it is framed, and whatever follows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunked_body_of_the_largest_size_is_served() {
    const BYTES_MAX: usize = 100_000;
    let server = Server::start(&format!("[server]\nbody_bytes_max = {BYTES_MAX}\n")).await;
    let json = r#"{"model":"puppet","messages":[{"role":"user","content":"say 2"}]}"#;
    for (bytes, chunk, status) in
        [(BYTES_MAX, BYTES_MAX, 200), (BYTES_MAX, 1000, 200), (BYTES_MAX - 10, 7000, 200), (BYTES_MAX + 1, 1000, 413)]
    {
        let body = format!("{json}{}", " ".repeat(bytes - json.len()));
        let mut text = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
        for piece in body.as_bytes().chunks(chunk) {
            text += &format!("{:x}\r\n{}\r\n", piece.len(), std::str::from_utf8(piece).expect("text"));
        }
        text += "0\r\n\r\n";
        let mut client = Client::connect(server.address).await;
        client.send(format!("{text}{}", raw::get("/nothing"))).await;
        let reply = client.until(penstock_hostile::PATIENCE, |text| text.contains("\"error\"")).await;
        assert_eq!(reply.status, status, "{bytes} bytes in chunks of {chunk}: {}", reply.text);
        // The next request behind a body that was taken is answered.
        assert_eq!(reply.text.contains("unknown_url"), status == 200, "{bytes} in {chunk}: {}", reply.text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tiny_chunks_cost_no_one_else() {
    let server = Server::start("").await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let flood = format!("{head}{}", "1\r\n \r\n".repeat(400_000));
    promised(Duration::from_secs(1), async || longest_wait(&server, flood.clone(), 20).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_kept_and_pipelines_answered_in_order() {
    let server = Server::start("").await;
    let mut client = Client::connect(server.address).await;
    client.send(format!("{}{}{}", raw::get("/health"), raw::chat("say 1", false), raw::get("/nothing"))).await;
    let reply = client.until(penstock_hostile::PATIENCE, |text| text.contains("unknown_url")).await;
    assert_eq!(reply.answers(), 3, "{}", reply.text);
    let places: Vec<_> = ["\"ok\"", "t0 ", "unknown_url"].iter().map(|needle| reply.text.find(needle)).collect();
    assert!(places.is_sorted() && places[0].is_some(), "{places:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_next_request_waits_while_an_answer_is_made() {
    let server = Server::start("").await;
    let mut client = Client::connect(server.address).await;
    client.send(raw::chat("pace 40", true)).await;
    client.until(penstock_hostile::PATIENCE, |text| text.contains("t2 ")).await;
    let next = raw::get("/health");
    client.send(&next[..9]).await;
    client.send(&next[9..]).await;
    let reply = client.until(penstock_hostile::PATIENCE, |text| text.ends_with("{\"status\":\"ok\"}")).await;
    assert!(reply.text.contains("t39 ") && reply.text.contains("0\r\n\r\nHTTP/1.1 200 OK\r\n"), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sending_ahead_is_bounded() {
    let server = Server::start("").await;
    let mut client = Client::connect(server.address).await;
    client.send(raw::chat("pace 100000", true)).await;
    client.until(penstock_hostile::PATIENCE, |text| text.contains("t0 ")).await;
    client.send(raw::get("/health").repeat(4000)).await;
    client.until_closed().await;
    server.upstream_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_body_of_a_get_is_no_next_request() {
    let server = Server::start("").await;
    for framing in ["Content-Length: 41", "Transfer-Encoding: chunked"] {
        let request = format!("GET /health HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n{}", raw::get("/v1/models"));
        let reply = raw::send(server.address, request).await;
        assert_eq!((reply.status, reply.answers(), reply.header("connection")), (200, 1, Some("close")), "{framing}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_to_head_have_a_head_alone() {
    let server = Server::start("").await;
    let mut client = Client::connect(server.address).await;
    client.send(format!("{}{}", raw::get("/health").replace("GET", "HEAD"), raw::get("/nothing"))).await;
    let reply = client.until(penstock_hostile::PATIENCE, |text| text.contains("unknown_url")).await;
    assert!(reply.header("content-length") == Some("15") && reply.header("date").is_some(), "{}", reply.text);
    assert!(reply.text.contains("\r\n\r\nHTTP/1.1 404 Not Found\r\n"), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_1_0_keeps_a_connection_only_when_asked() {
    let server = Server::start("").await;
    let old = raw::get("/health").replace("HTTP/1.1", "HTTP/1.0");
    let reply = raw::send(server.address, &old).await;
    assert_eq!((reply.status, reply.header("connection")), (200, Some("close")));
    let mut client = Client::connect(server.address).await;
    let kept = old.replace("Host: a", "Host: a\r\nConnection: Keep-Alive");
    for _ in 0..2 {
        client.send(&kept).await;
        let reply = client.answer().await;
        assert_eq!((reply.header("connection"), reply.closed), (Some("keep-alive"), false), "{}", reply.text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_early_answer_with_an_unread_body_closes() {
    let server = Server::start("").await;
    let request = format!("POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{}", raw::get("/health"));
    let reply = raw::send(server.address, request).await;
    assert_eq!((reply.status, reply.answers()), (404, 1), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_are_bounded_one_by_one_and_together() {
    let config = "[server]\nbody_bytes_max = 100000\nbody_memory_bytes_max = 150000\nbody_timeout_ms = 60000\n";
    let server = Server::start(config).await;
    let head =
        |length: usize| format!("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n");
    assert_eq!(raw::send(server.address, head(100_001)).await.status, 413, "before a byte of it is read");
    let chunked = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let reply = raw::send(server.address, format!("{chunked}1ffff\r\n{}", "x".repeat(0x1ffff))).await;
    assert_eq!(reply.status, 413);
    let mut holder = Client::connect(server.address).await;
    holder.send(format!("{}{}", head(100_000), "x".repeat(99_000))).await;
    penstock_hostile::eventually("the holder's bytes are charged", || server.gateway.bodies.bytes_held() >= 98_000)
        .await;
    let reply = raw::send(server.address, format!("{}{}", head(90_000), "x".repeat(90_000))).await;
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")), "{}", reply.text);
    drop(holder);
    penstock_hostile::eventually("the budget is given back", || server.gateway.bodies.bytes_held() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_bounded() {
    let server = Server::start("[server]\nconnections_max = 4\n").await;
    let mut held = Vec::new();
    for number in 1..=4 {
        let mut client = Client::connect(server.address).await;
        client.send(raw::chat("hang", true)).await;
        held.push(client);
        penstock_hostile::eventually("the request is open", || server.puppet.open() == number).await;
    }
    let reply = raw::send(server.address, raw::get("/health")).await;
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")), "{}", reply.text);
    assert!(server.gateway.render_metrics().contains("penstock_connections_refused_total{reason=\"full\"}"));
    held.clear();
    let mut tries = 0;
    loop {
        let mut client = Client::connect(server.address).await;
        client.send(raw::get("/health")).await;
        if client.answer().await.status == 200 {
            break;
        }
        tries += 1;
        assert!(tries < 1000, "closed connections give their slots back");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn absurd_bodies_cost_no_one_else() {
    let server = Server::start("").await;
    let many = |piece: &str, count: usize| vec![piece; count].join(",");
    let bodies = [
        format!(r#"{{"model":"puppet","messages":[{}]}}"#, many(r#"{"role":"user","content":"x"}"#, 400_000)),
        format!(
            r#"{{"model":"puppet","messages":[{{"role":"user","content":[{}]}}]}}"#,
            many(r#"{"type":"text","text":"x"}"#, 400_000)
        ),
        format!("{{{}}}", (0..400_000).map(|at| format!("\"k{at}\":1")).collect::<Vec<_>>().join(",")),
        format!(r#"{{"model":"puppet","messages":{}1{}}}"#, "[".repeat(4_000_000), "]".repeat(4_000_000)),
        format!(r#"{{"model":"puppet","stop":"{}"}}"#, "x".repeat(20_000_000)),
    ];
    for body in bodies {
        let attack = raw::post("/v1/chat/completions", &body).replace("Host: a", "Host: a\r\nConnection: close");
        promised(Duration::from_secs(1), async || longest_wait(&server, attack.clone(), 10).await).await;
    }
    assert_eq!(server.puppet.opened(), 0);
}
