//! Requests that a web page can make a browser send to a gateway without credentials, and its permissions once the
//! config lists its origin.

use bytes::Bytes;
use h2::client;
use http::Request;
use penstock_auth::route;
use penstock_hostile::raw::{self, Reply};
use penstock_hostile::upstream::MODEL;
use penstock_hostile::{PATIENCE, Server};
use tokio::net::TcpStream;
use tokio::time::timeout;

const LISTED: &str = "[cors]\norigins = [\"https://app.example\"]\n";
const KEY: &str = "[[keys]]\nid = \"a\"\nkey_env = \"A\"\n";

async fn ask(server: &Server, start: &str, fields: &str, body: &str) -> Reply {
    let length = if start.starts_with("POST") { format!("Content-Length: {}\r\n", body.len()) } else { String::new() };
    raw::send(server.address, format!("{start} HTTP/1.1\r\nConnection: close\r\n{length}{fields}\r\n{body}")).await
}

fn body() -> String {
    format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"say 1"}}]}}"#)
}

async fn chat(server: &Server, fields: &str) -> Reply {
    ask(server, "POST /v1/chat/completions", &format!("Host: localhost\r\n{fields}"), &body()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_was_pointed_here_reads_nothing() {
    let server = Server::start("[server]\nhosts = [\"gw.example\"]\n").await;
    let realtime = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";
    let examples = route::examples().into_iter().map(|(method, target)| format!("{method} {target}"));
    let others = ["GET /nothing", "OPTIONS /v1/models", "PUT /v1/models", "GET /"].map(str::to_owned);
    for start in examples.chain(others) {
        let fields = "Host: evil.test:8080\r\nContent-Type: application/json\r\n";
        let more = if start.contains("realtime") { realtime } else { "" };
        let start = if more.is_empty() { start } else { "GET /v1/realtime?model=big".to_owned() };
        let length = if start.starts_with("POST") { "Content-Length: 2\r\n" } else { "" };
        let close = if more.is_empty() { "Connection: close\r\n" } else { "" };
        let request = format!(
            "{start} HTTP/1.1\r\n{close}{length}{fields}{more}\r\n{}",
            if length.is_empty() { "" } else { "{}" }
        );
        let reply = raw::send(server.address, request).await;
        assert_eq!(reply.status, 403, "{start}: {}", reply.text);
        assert!(reply.text.contains("server.hosts"), "{start}: {}", reply.text);
    }
    for host in ["127.0.0.1", "[::1]:1", "localhost:8080", "x.localhost", "gw.example"] {
        let reply = ask(&server, "GET /v1/models", &format!("Host: {host}\r\n"), "").await;
        assert_eq!(reply.status, 200, "{host}: {}", reply.text);
    }
    let anthropic = ask(&server, "POST /v1/messages", "Host: evil.test\r\n", "{}").await;
    assert!(anthropic.text.contains(r#""type":"permission_error""#), "{}", anthropic.text);
    let old = raw::send(server.address, "GET /v1/models HTTP/1.0\r\n\r\n").await;
    assert_eq!(old.status, 200, "HTTP/1.0 without a name is no browser's");
    let old = raw::send(server.address, "GET http://evil.test/v1/models HTTP/1.0\r\n\r\n").await;
    assert_eq!(old.status, 403, "{}", old.text);
    assert!(server.gateway.render_metrics().contains("penstock_pages_refused_total{reason=\"host\"}"));
    assert_eq!(server.puppet.opened(), 0);
}

/// Status of a GET over HTTP/2.
async fn h2(server: &Server, authority: &str, fields: &[(&str, &str)]) -> u16 {
    let stream = TcpStream::connect(server.address).await.expect("connect");
    let (requests, connection) = client::Builder::new().handshake::<_, Bytes>(stream).await.expect("handshake");
    tokio::spawn(async move {
        // Ends with the test.
        let _ = connection.await;
    });
    let mut request = Request::get(format!("http://{authority}/v1/models"));
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    let mut ready = requests.ready().await.expect("ready");
    let (response, _) = ready.send_request(request.body(()).expect("a request"), true).expect("sent");
    timeout(PATIENCE, response).await.expect("in time").expect("an answer").status().as_u16()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_names_its_host_too() {
    let server = Server::start("").await;
    assert_eq!(h2(&server, "localhost:8080", &[]).await, 200);
    assert_eq!(h2(&server, "evil.test", &[]).await, 403);
    assert_eq!(h2(&server, "localhost", &[("host", "localhost")]).await, 200);
    assert_eq!(h2(&server, "localhost", &[("host", "evil.test")]).await, 400, "two hosts");
    assert_eq!(h2(&server, "evil.test", &[("host", "localhost")]).await, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_keys_any_name_will_do() {
    let server = Server::start(KEY).await;
    let key = "Host: public.example\r\nAuthorization: Bearer secret-A\r\n";
    assert_eq!(ask(&server, "GET /v1/models", key, "").await.status, 200);
    assert_eq!(ask(&server, "GET /v1/models", "Host: public.example\r\n", "").await.status, 401);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_spends_nothing() {
    let server = Server::start(LISTED).await;
    let kinds =
        ["", "Content-Type: text/plain;charset=UTF-8\r\n", "Content-Type: application/x-www-form-urlencoded\r\n"];
    let form = "Content-Type: multipart/form-data; boundary=b\r\n";
    let pages = [
        "Origin: https://evil.test\r\n",
        "Origin: null\r\n",
        "Origin: http://localhost:3000\r\n",
        "Sec-Fetch-Site: cross-site\r\n",
    ];
    for page in pages {
        for kind in kinds {
            let reply = chat(&server, &format!("{page}{kind}")).await;
            assert_eq!(reply.status, 403, "{page:?} {kind:?}: {}", reply.text);
            assert_eq!(reply.header("access-control-allow-origin"), None);
        }
        for url in ["/v1/files", "/v1/audio/transcriptions", "/v1/images/edits", "/v1/images/variations"] {
            let upload = format!("Host: localhost\r\n{page}{form}");
            assert_eq!(ask(&server, &format!("POST {url}"), &upload, "--b--").await.status, 403, "{page:?} {url}");
        }
        let cancel = ask(&server, "POST /v1/responses/resp_1/cancel", &format!("Host: localhost\r\n{page}"), "").await;
        assert_eq!(cancel.status, 403, "{}", cancel.text);
        let socket = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";
        let socket = format!("GET /v1/realtime?model=m HTTP/1.1\r\nHost: localhost\r\n{page}{socket}\r\n");
        assert_eq!(raw::send(server.address, socket).await.status, 403, "{page:?}");
    }
    assert_eq!(server.puppet.opened(), 0);
    assert!(server.gateway.render_metrics().contains("penstock_pages_refused_total{reason=\"origin\"}"));
    for kind in kinds {
        assert_eq!(chat(&server, kind).await.status, 200, "a program: {kind:?}");
        let own = format!("Origin: http://localhost\r\nSec-Fetch-Site: same-origin\r\n{kind}");
        assert_eq!(chat(&server, &own).await.status, 200, "the gateway's own page: {kind:?}");
    }
    let json = chat(&server, "Content-Type: application/json\r\nOrigin: https://evil.test\r\n").await;
    assert_eq!((json.status, json.header("access-control-allow-origin")), (200, None), "no browser gets that far");
    assert_eq!(chat(&server, "Content-Type: text/html\r\n").await.status, 415);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listed_page_reads_answers_errors_and_streams() {
    let server = Server::start(&format!("{LISTED}{KEY}")).await;
    let page = "Origin: https://app.example\r\nSec-Fetch-Site: cross-site\r\nContent-Type: application/json\r\n";
    let key = "Authorization: Bearer secret-A\r\n";
    let asked = "Host: localhost\r\nOrigin: https://app.example\r\nAccess-Control-Request-Method: POST\r\n\
                 Access-Control-Request-Headers: authorization,content-type,x-stainless-lang\r\n";
    let preflight = ask(&server, "OPTIONS /v1/chat/completions", asked, "").await;
    assert_eq!(preflight.status, 204, "before authentication: {}", preflight.text);
    for (name, value) in [
        ("access-control-allow-origin", "https://app.example"),
        ("access-control-allow-methods", "GET, POST"),
        ("access-control-allow-headers", "authorization, content-type, x-stainless-lang"),
        ("access-control-max-age", "600"),
    ] {
        assert_eq!(preflight.header(name), Some(value), "{}", preflight.text);
    }
    let readable = |reply: &Reply, status| {
        assert_eq!(reply.status, status, "{}", reply.text);
        assert_eq!(reply.header("access-control-allow-origin"), Some("https://app.example"), "{}", reply.text);
        assert!(reply.header("access-control-expose-headers").is_some_and(|exposed| exposed.contains("x-request-id")));
        assert_eq!(reply.header("vary"), Some("origin"), "{}", reply.text);
    };
    readable(&chat(&server, &format!("{page}{key}")).await, 200);
    readable(&chat(&server, page).await, 401);
    readable(&ask(&server, "GET /nothing", &format!("Host: localhost\r\n{page}{key}"), "").await, 404);
    readable(&ask(&server, "GET /v1/embeddings", &format!("Host: localhost\r\n{page}{key}"), "").await, 405);
    let stream = body().replacen('{', r#"{"stream":true,"#, 1);
    let stream = ask(&server, "POST /v1/chat/completions", &format!("Host: localhost\r\n{page}{key}"), &stream).await;
    readable(&stream, 200);
    assert!(stream.is_whole() && stream.text.contains("[DONE]"), "{}", stream.text);
    let other = ask(&server, "OPTIONS /v1/chat/completions", &asked.replace("app.", "evil."), "").await;
    assert_eq!((other.status, other.header("access-control-allow-origin")), (403, None), "{}", other.text);
    let program = chat(&server, &format!("Content-Type: application/json\r\n{key}")).await;
    assert_eq!((program.status, program.header("vary")), (200, Some("origin")), "caches keep them apart");
}
