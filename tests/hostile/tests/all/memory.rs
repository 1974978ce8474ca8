//! Clients that fill the memory for request bodies: one key, or one address where no key is required, leaves half of it
//! to the others.

use std::net::SocketAddr;

use penstock_hostile::raw::{Client, Reply};
use penstock_hostile::{Server, eventually};
use tokio::net::TcpSocket;

const MIB: usize = 1 << 20;
/// Memory for four bodies of the largest size; one key has room for two.
const LIMITS: &str = "[server]\nbody_bytes_max = 1048576\nbody_memory_bytes_max = 4194304\nbody_timeout_ms = 60000\n";
const KEYS: &str = "[[keys]]\nid = \"alice\"\nkey_env = \"ALICE\"\n[[keys]]\nid = \"bob\"\nkey_env = \"BOB\"\n";
const ALICE: &str = "Authorization: Bearer secret-ALICE\r\n";
const BOB: &str = "Authorization: Bearer secret-BOB\r\n";

/// Head of a request with a body of `length` bytes.
fn head(path: &str, fields: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: a\r\n{fields}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
}

async fn from(local: [u8; 4], server: &Server) -> Client {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(SocketAddr::from((local, 0))).expect("an address of the loopback network");
    Client { stream: socket.connect(server.address).await.expect("connect") }
}

/// A client of which all but the last byte of a large body has come.
async fn holder(server: &Server, local: [u8; 4], fields: &str, bytes: usize) -> Client {
    let held = server.gateway.bodies.bytes_held();
    let mut client = from(local, server).await;
    client.send(format!("{}{}", head("/v1/chat/completions", fields, bytes), " ".repeat(bytes - 1))).await;
    eventually("the body is held", || server.gateway.bodies.bytes_held() >= held + bytes).await;
    client
}

async fn asked(server: &Server, local: [u8; 4], path: &str, fields: &str, bytes: usize) -> Reply {
    let mut client = from(local, server).await;
    let turn = r#""max_tokens":9,"messages":[{"role":"user","content":"say 1"#;
    let start = format!(r#"{{"model":"puppet",{turn}"#);
    let body = format!("{start}{}\"}}]}}", " ".repeat(bytes - start.len() - 4));
    client.send(format!("{}{body}", head(path, fields, body.len()))).await;
    client.answer().await
}

/// Checks that a client that holds its share is refused in the dialect of its request, and that others are served, with a largest
/// body too.
async fn check(config: &str, (greedy, its): ([u8; 4], &str), (other, fields): ([u8; 4], &str)) {
    let server = Server::start(&format!("{LIMITS}{config}")).await;
    let mut holders = Vec::new();
    for _ in 0..2 {
        holders.push(holder(&server, greedy, its, MIB).await);
    }
    assert_eq!(server.gateway.bodies.bytes_held(), 2 * MIB);
    for (path, says) in [("/v1/chat/completions", "\"code\":\"overloaded\""), ("/v1/messages", "\"overloaded_error\"")]
    {
        for bytes in [300, 100_000, MIB] {
            let reply = asked(&server, greedy, path, its, bytes).await;
            assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")), "{path} {bytes}: {}", reply.text);
            assert!(reply.text.contains(says) && reply.text.contains("whole share"), "{path}: {}", reply.text);
            assert_eq!(asked(&server, other, path, fields, bytes).await.status, 200, "{path} {bytes}");
        }
    }
    eventually("what others held is given back", || server.gateway.bodies.bytes_held() == 2 * MIB).await;
    holders.pop();
    eventually("a holder's bytes are given back", || server.gateway.bodies.bytes_held() == MIB).await;
    assert_eq!(asked(&server, greedy, "/v1/chat/completions", its, MIB).await.status, 200);
    drop(holders);
    eventually("the budget is given back", || server.gateway.bodies.bytes_held() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_holds_half_of_the_memory_for_bodies_from_wherever_it_sends() {
    check(KEYS, ([127, 0, 0, 1], ALICE), ([127, 0, 0, 1], BOB)).await;
    // From another address, the key is the same.
    let server = Server::start(&format!("{LIMITS}{KEYS}")).await;
    let holders =
        [holder(&server, [127, 0, 0, 1], ALICE, MIB).await, holder(&server, [127, 0, 0, 2], ALICE, MIB).await];
    assert_eq!(asked(&server, [127, 0, 0, 3], "/v1/chat/completions", ALICE, 300).await.status, 503);
    drop(holders);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_holds_half_where_no_key_is_required() {
    check("", ([127, 0, 0, 2], ""), ([127, 0, 0, 3], "")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_behind_a_trusted_proxy_have_shares_of_their_own() {
    let config = "[auth]\ntrusted_proxies = [\"127.0.0.1/32\"]\n";
    let (greedy, other) = ("X-Forwarded-For: 192.0.2.1\r\n", "X-Forwarded-For: 192.0.2.2\r\n");
    check(config, ([127, 0, 0, 1], greedy), ([127, 0, 0, 1], other)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobodys_body_is_read_without_a_key() {
    let server = Server::start(&format!("{LIMITS}{KEYS}")).await;
    for fields in ["", "Authorization: Bearer wrong\r\n"] {
        let mut client = Client::connect(server.address).await;
        client.send(head("/v1/chat/completions", fields, MIB)).await;
        assert_eq!(client.until_closed().await.status, 401, "before a byte of the body has come");
        assert_eq!(server.gateway.bodies.bytes_held(), 0);
    }
}
