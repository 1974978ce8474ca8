//! Connections that clients keep for their next request.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use super::{Api, connect};

/// Sends a head that announces a body, then the body once the answer could have been sent, then another request. Gives the head of the
/// first answer and the second status; 0: the connection ended.
fn two_requests(api: &Api, key: &str, path: &str, body: &[u8]) -> (String, u16) {
    let mut stream = connect(Ipv4Addr::LOCALHOST, api.address);
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    let length = body.len();
    let put = format!(
        "PUT {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(put.as_bytes()).expect("sent");
    std::thread::sleep(Duration::from_millis(200));
    let sent = stream.write_all(body);
    let head = head(&mut stream);
    let next =
        "GET /admin/v1/whoami HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer viewer\r\nconnection: close\r\n\r\n";
    let mut rest = String::new();
    let _ =
        sent.and_then(|()| stream.write_all(next.as_bytes())).and_then(|()| stream.read_to_string(&mut rest).map(drop));
    // The body of the first answer comes first.
    let status = rest.split_once("HTTP/1.1 ").and_then(|(_, next)| next.get(..3)?.parse().ok());
    (head, status.unwrap_or(0))
}

/// Head of an answer, in small letters.
fn head(stream: &mut TcpStream) -> String {
    let (mut text, mut byte) = (Vec::new(), [0]);
    while !text.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count == 1) {
        text.push(byte[0]);
    }
    String::from_utf8(text).expect("text").to_ascii_lowercase()
}

#[test]
fn a_refusal_ends_no_connection_without_saying_so() {
    let api = Api::start();
    let level = br#"{"level": "info"}"#;
    for (key, path, status) in [
        ("owner", "/admin/v1/log-level", 200),
        ("viewer", "/admin/v1/log-level", 403),
        ("nobody", "/admin/v1/log-level", 401),
        ("owner", "/admin/v1/nothing", 404),
    ] {
        let (head, next) = two_requests(&api, key, path, level);
        assert!(head.starts_with(&format!("http/1.1 {status} ")) && !head.contains("connection:"), "{head}");
        assert_eq!(next, 200, "{key}, {path}");
    }
    // More than a refusal takes in: the answer says that it is the last one.
    for key in ["viewer", "nobody"] {
        let (head, _) = two_requests(&api, key, "/admin/v1/log-level", &vec![b' '; 1 << 20]);
        assert!(head.contains("connection: close"), "{head}");
    }
}
