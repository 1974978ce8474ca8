//! Connections that become a WebSocket: the tunnel itself, with a handler that echoes, and requests that ask for it wrongly.

use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use http::{HeaderName, HeaderValue};
use penstock_hostile::PATIENCE;
use penstock_hostile::Server;
use penstock_hostile::raw::{self, Client};
use penstock_http::connection::{App, Handler};
use penstock_http::head::HeadFault;
use penstock_http::{Exchange, HttpLimits};
use pingora_core::apps::ServerApp;
use pingora_core::protocols::l4::stream::Stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;

const ASK: &str = "GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
                   Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

/// Handler that accepts every upgrade and echoes.
struct Echo;

#[async_trait]
impl Handler for Echo {
    fn limits(&self) -> Arc<HttpLimits> {
        Arc::default()
    }

    async fn serve(&self, exchange: &mut Exchange) {
        let accept = (HeaderName::from_static("sec-websocket-accept"), HeaderValue::from_static("x"));
        let Ok(mut tunnel) = exchange.upgrade(&[accept]).await else {
            let _ = exchange.respond(426, &[], "no".into()).await;
            return;
        };
        let mut bytes = tunnel.early.to_vec();
        loop {
            let _ = tunnel.stream.write_all(&bytes).await;
            let _ = tunnel.stream.flush().await;
            bytes.clear();
            if !matches!(tunnel.stream.read_buf(&mut bytes).await, Ok(1..)) {
                return;
            }
        }
    }

    async fn refuse(&self, _: &mut Exchange, _: HeadFault) {}

    fn refused_head(&self, _: HeadFault) {}

    fn connections(&self, _: i64) {}
}

async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    let app = Arc::new(App::new(Arc::new(Echo)));
    tokio::spawn(async move {
        let (_running, shutdown) = watch::channel(false);
        while let Ok((stream, _)) = listener.accept().await {
            app.process_new(Box::new(Stream::from(stream)), &shutdown).await;
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_sent_ahead_and_later_go_through() {
    let mut client = Client::connect(echo().await).await;
    client.send(format!("{ASK}early")).await;
    let reply = client.until(PATIENCE, |text| text.ends_with("early")).await;
    assert_eq!((reply.status, reply.header("sec-websocket-accept")), (101, Some("x")), "{}", reply.text);
    assert_eq!((reply.header("connection"), reply.header("upgrade")), (Some("upgrade"), Some("websocket")));
    assert!(reply.header("transfer-encoding").is_none() && reply.text.ends_with("\r\n\r\nearly"), "{}", reply.text);
    for word in ["one", "two\r\n\r\n"] {
        client.send(word).await;
        assert_eq!(client.until(PATIENCE, |text| text == word).await.text, word);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_request_for_a_websocket_can_become_one() {
    let address = echo().await;
    let plain = raw::send(address, raw::get("/").replace("Host: a", "Host: a\r\nConnection: close")).await;
    assert_eq!(plain.status, 426);
    for (from, to) in [
        ("GET", "POST"),
        ("websocket", "TLS/1.0"),
        ("keep-alive, Upgrade", "keep-alive"),
        ("Host: a", "Host: a\r\nContent-Length: 2"),
        ("Host: a", "Host: a\r\nUpgrade: websocket"),
        ("HTTP/1.1", "HTTP/1.0"),
    ] {
        assert_eq!(raw::send(address, ASK.replace(from, to)).await.status, 501, "{to}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_no_websocket_is_served_the_answer_is_plain_and_closes() {
    let server = Server::start("").await;
    let reply =
        raw::send(server.address, format!("{}{}", ASK.replace("/v1/realtime", "/health"), raw::get("/health"))).await;
    assert_eq!((reply.status, reply.answers(), reply.header("connection")), (200, 1, Some("close")), "{}", reply.text);
}
