//! The client of upstreams against sockets: TLS, Unix sockets, names. What providers do wrong is in `tests/hostile`.
//!
//! `tests/tls` holds a certificate for localhost with its key, made for these tests and good for nothing else.

use std::future::poll_fn;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use penstock_http::client::{Client, Deadlines, Fault, Outgoing, Response, Sent, Target};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio_rustls::TlsAcceptor;

fn file(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls").join(name)
}

fn deadlines() -> Deadlines {
    let limit = Duration::from_secs(10);
    Deadlines { connect: limit, head: limit, silence: limit, whole: None }
}

fn request(body: &'static [u8]) -> Outgoing {
    Outgoing {
        method: Method::POST,
        path: "/x".into(),
        headers: Vec::new(),
        body: vec![Bytes::from_static(body)],
        sent: Sent::default(),
    }
}

async fn text(mut response: Response) -> String {
    let mut bytes = Vec::new();
    while poll_fn(|context| response.body.poll_chunk(context, &mut bytes)).await.expect("a body") {}
    String::from_utf8(bytes).expect("text")
}

/// Answers every request on a connection with its length.
async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let mut bytes = Vec::new();
    let mut scratch = vec![0; 64 * 1024];
    loop {
        let head = bytes.windows(4).position(|end| end == b"\r\n\r\n");
        let length = head.and_then(|head| {
            let text = String::from_utf8_lossy(&bytes[..head]).into_owned();
            text.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok())
        });
        if let (Some(head), Some(length)) = (head, length)
            && bytes.len() >= head + 4 + length
        {
            bytes.drain(..head + 4 + length);
            let body = format!("{length}");
            let text = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            if stream.write_all(text.as_bytes()).await.is_err() || stream.flush().await.is_err() {
                return;
            }
            continue;
        }
        match stream.read(&mut scratch).await {
            Ok(count @ 1..) => bytes.extend_from_slice(&scratch[..count]),
            _ => return,
        }
    }
}

/// A TLS server on a port; how many connections it has had is its answer to nobody.
async fn tls_server() -> u16 {
    let certificates: Vec<_> = CertificateDer::pem_file_iter(file("cert.pem"))
        .expect("a file")
        .map(|one| one.expect("a certificate"))
        .collect();
    let key = PrivateKeyDer::from_pem_file(file("key.pem")).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .expect("a config");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                if let Ok(stream) = acceptor.accept(stream).await {
                    answer(stream).await;
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn tls_carries_requests_of_every_size() {
    let port = tls_server().await;
    let target = Target::parse(&format!("https://localhost:{port}/base")).expect("a target");
    let client = Client::new(target, Some(&file("cert.pem"))).expect("a client");
    static LARGE: [u8; 3 << 20] = [b'x'; 3 << 20];
    for (body, length) in [(&b"hi"[..], "2"), (&LARGE, "3145728"), (b"again", "5")] {
        let response = client.send(&request(body), &deadlines()).await.expect("an answer");
        assert_eq!((response.status, text(response).await.as_str()), (200, length));
    }
}

#[tokio::test]
async fn certificates_are_checked() {
    let port = tls_server().await;
    let connect = async |host: &str, ca: Option<&Path>| {
        let target = Target::parse(&format!("https://{host}:{port}")).expect("a target");
        let client = Client::new(target, ca).expect("a client");
        client.send(&request(b"hi"), &deadlines()).await.map(|response| response.status).map_err(|error| error.fault)
    };
    let (own, other) = (file("cert.pem"), file("other.pem"));
    assert_eq!(connect("localhost", Some(&own)).await, Ok(200));
    assert_eq!(connect("127.0.0.1", Some(&own)).await, Ok(200));
    assert_eq!(connect("127.0.0.2", Some(&own)).await, Err(Fault::Connect), "another name");
    assert_eq!(connect("localhost", Some(&other)).await, Err(Fault::Connect), "another root");
    assert_eq!(connect("localhost", None).await, Err(Fault::Connect), "the system's roots");
    let target = Target::parse("https://localhost").expect("a target");
    assert!(Client::new(target, Some(&file("key.pem"))).is_err(), "a file without certificates");
}

#[tokio::test]
async fn plain_http_to_tls_and_tls_to_plain_http_fail() {
    let port = tls_server().await;
    let target = Target::parse(&format!("http://127.0.0.1:{port}")).expect("a target");
    let error =
        Client::new(target, None).expect("a client").send(&request(b"hi"), &deadlines()).await.expect_err("no HTTP");
    assert!(matches!(error.fault, Fault::Garbled | Fault::Closed), "{error:?}");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let _ = stream.write_all(b"HTTP/1.1 400 Bad\r\n\r\n").await;
    });
    let target = Target::parse(&format!("https://localhost:{port}")).expect("a target");
    let client = Client::new(target, Some(&file("cert.pem"))).expect("a client");
    assert_eq!(client.send(&request(b"hi"), &deadlines()).await.expect_err("no TLS").fault, Fault::Connect);
}

#[tokio::test]
async fn unix_sockets_are_asked() {
    let path = std::env::temp_dir().join(format!("penstock-client-{}.sock", std::process::id()));
    let listener = UnixListener::bind(&path).expect("a socket");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream));
        }
    });
    let target = Target::parse(&format!("unix://{}:/v1", path.display())).expect("a target");
    let client = Client::new(target, None).expect("a client");
    for _ in 0..3 {
        let response = client.send(&request(b"four"), &deadlines()).await.expect("an answer");
        assert_eq!(text(response).await, "4");
    }
    std::fs::remove_file(path).expect("removed");
}

#[tokio::test]
async fn a_handshake_that_hangs_has_a_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let target = Target::parse(&format!("https://localhost:{port}")).expect("a target");
    let client = Client::new(target, Some(&file("cert.pem"))).expect("a client");
    let short = Deadlines { connect: Duration::from_millis(50), ..deadlines() };
    let error = client.send(&request(b"hi"), &short).await.expect_err("nobody shakes hands");
    assert_eq!((error.fault, error.fault.is_unsent()), (Fault::ConnectTimeout, true));
    drop(listener);
}
