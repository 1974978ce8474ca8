//! Deadlines of a process that stood still: bytes that came in time are taken, however late it looks at them.
//!
//! The runtime of these tests has one thread, which stands still while a client or a provider writes, behind a crowd of
//! other sockets: when it goes on, the deadline has passed, and the runtime does not know yet that the bytes are there.

use std::future::poll_fn;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::Method;
use penstock_hostile::PATIENCE;
use penstock_http::client::{Client, ClientError, Deadlines, Outgoing, Sent, Target};
use penstock_http::connection::{App, Handler};
use penstock_http::exchange::BodyFault;
use penstock_http::head::HeadFault;
use penstock_http::{BodyBudget, Exchange, HttpLimits, Renewed};
use pingora_core::apps::ServerApp;
use pingora_core::listeners::tls::TlsSettings;
use pingora_core::protocols::l4::stream::Stream;
use pingora_core::protocols::{GetSocketDigest, SocketDigest};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Deadlines that have passed whenever the runtime stood still for [`STANDSTILL`].
const DEADLINE: Duration = Duration::from_millis(250);
const STANDSTILL: Duration = Duration::from_millis(600);

/// Both for connections whose first steps are many, and take their time on a loaded machine.
const LONG_DEADLINE: Duration = Duration::from_secs(1);
const LONG_STANDSTILL: Duration = Duration::from_millis(1500);

/// A handler that answers everything.
struct Hasty {
    connections_max: usize,
    deadline: Duration,
}

#[async_trait]
impl Handler for Hasty {
    fn limits(&self) -> Arc<HttpLimits> {
        let deadline = self.deadline;
        let limits = HttpLimits { head_timeout: deadline, idle_timeout: deadline, ..HttpLimits::default() };
        let limits = HttpLimits { body_timeout: deadline, body_rate_bytes_min: 1_000_000, ..limits };
        Arc::new(HttpLimits { connections_max: self.connections_max, ..limits })
    }

    async fn serve(&self, exchange: &mut Exchange) {
        match exchange.read_body(&BodyBudget::new(1 << 30, 1 << 20)).await {
            Ok(_) => drop(exchange.respond(200, &[], "ok".into()).await),
            Err(BodyFault::Refuse(failure)) => drop(exchange.refuse(&failure).await),
            Err(BodyFault::Gone) => {}
        }
    }

    async fn refuse(&self, _: &mut Exchange, _: HeadFault) {}

    fn refused_head(&self, _: HeadFault) {}

    fn connections(&self, _: i64) {}
}

/// A server on this thread, which runs only while the test waits.
pub(crate) struct Standing {
    app: Arc<App<Hasty>>,
    listener: TcpListener,
    shutdown: watch::Sender<bool>,
}

impl Standing {
    pub(crate) async fn start(connections_max: usize) -> Self {
        Self::with(App::new(Arc::new(Hasty { connections_max, deadline: DEADLINE }))).await
    }

    /// A server with time for handshakes: [`LONG_DEADLINE`].
    async fn patient() -> Self {
        Self::with(App::new(Arc::new(Hasty { connections_max: 16, deadline: LONG_DEADLINE }))).await
    }

    /// A patient server behind TLS.
    async fn secured() -> Self {
        let [certificate, key] = ["cert.pem", "key.pem"].map(|name| tls_file(name).display().to_string());
        let mut settings = TlsSettings::intermediate(&certificate, &key).expect("settings");
        settings.enable_h2();
        let app = App::new(Arc::new(Hasty { connections_max: 16, deadline: LONG_DEADLINE }));
        Self::with(app.with_tls(Some(Renewed::new(settings.build())))).await
    }

    async fn with(app: App<Hasty>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        Self { app: Arc::new(app), listener, shutdown: watch::channel(false).0 }
    }

    fn address(&self) -> SocketAddr {
        self.listener.local_addr().expect("an address")
    }

    pub(crate) async fn connect(&self) -> std::net::TcpStream {
        let client = std::net::TcpStream::connect(self.address()).expect("connected");
        let (stream, _) = self.listener.accept().await.expect("accepted");
        // As Pingora's listener does it: TLS is for peers with an address.
        let digest = SocketDigest::from_raw_fd(stream.as_raw_fd());
        let mut stream = Stream::from(stream);
        stream.set_socket_digest(digest);
        self.app.process_new(Box::new(stream), &self.shutdown.subscribe()).await;
        client
    }
}

/// Lets the runtime run until the connections wait for their clients.
pub(crate) async fn settled() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

pub(crate) fn write(client: &mut std::net::TcpStream, text: &str) {
    client.write_all(text.as_bytes()).expect("the kernel takes it");
}

/// Reads the answer that comes within the tests' patience.
pub(crate) async fn answer(mut client: std::net::TcpStream) -> String {
    let read = tokio::task::spawn_blocking(move || {
        client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut text = vec![0; 4096];
        let count = client.read(&mut text).unwrap_or(0);
        String::from_utf8_lossy(&text[..count]).into_owned()
    });
    read.await.expect("no panic")
}

pub(crate) const REQUEST: &str = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";

#[tokio::test(flavor = "current_thread")]
async fn a_head_that_waits_for_its_first_read_is_not_late() {
    let server = Standing::start(16).await;
    let mut client = server.connect().await;
    write(&mut client, REQUEST);
    // Its task has not run so far: the time between accept and the first read does not count.
    std::thread::sleep(STANDSTILL);
    let text = answer(client).await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text:?}");
}

#[tokio::test(flavor = "current_thread")]
async fn a_head_that_came_in_time_is_read_when_its_deadline_has_passed() {
    let server = Standing::start(16).await;
    let mut client = server.connect().await;
    settled().await;
    write(&mut client, REQUEST);
    std::thread::sleep(STANDSTILL);
    let text = answer(client).await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text:?}");
}

/// More sockets than the runtime learns of in two turns of its I/O driver (1,024 each).
const CROWD: usize = 2100;

/// Other sockets of the process, which get bytes at one moment.
struct Crowd {
    theirs: Vec<UnixStream>,
    _ours: Vec<tokio::net::UnixStream>,
}

impl Crowd {
    fn gather() -> Self {
        // Each socket of the crowd takes two descriptors, more than the 1,024 that most shells allow.
        penstock_proxy::descriptors::raise();
        let pair = |_| {
            let (theirs, ours) = UnixStream::pair().expect("a pair");
            ours.set_nonblocking(true).expect("set");
            (theirs, tokio::net::UnixStream::from_std(ours).expect("registered"))
        };
        let (theirs, ours) = (0..CROWD).map(pair).unzip();
        Self { theirs, _ours: ours }
    }

    fn speak(&mut self) {
        self.theirs.iter_mut().for_each(|other| other.write_all(b"x").expect("the kernel takes it"));
    }
}

/// A client sends the first part of a request, and the second while the runtime stands still for longer than any
/// deadline, after a crowd of other sockets of the process has got bytes. It has sent all of it in time.
async fn check_behind_a_crowd(first: &str, second: &str) {
    let mut crowd = Crowd::gather();
    let server = Standing::start(16).await;
    let mut client = server.connect().await;
    settled().await;
    write(&mut client, first);
    settled().await;
    if first == REQUEST {
        assert!(client.read(&mut [0; 4096]).expect("an answer") > 0, "the connection is idle from here on");
    }
    crowd.speak();
    write(&mut client, second);
    std::thread::sleep(STANDSTILL);
    let text = answer(client).await;
    assert!(text.starts_with("HTTP/1.1 200"), "{first:?}, then {second:?}: {text:?}");
}

#[tokio::test(flavor = "current_thread")]
async fn a_head_that_came_in_time_is_read_behind_a_crowd() {
    check_behind_a_crowd("", REQUEST).await;
    check_behind_a_crowd("GET / HT", &REQUEST[8..]).await;
    check_behind_a_crowd(REQUEST, REQUEST).await;
}

#[tokio::test(flavor = "current_thread")]
async fn a_body_that_came_in_time_is_read_behind_a_crowd() {
    let length = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\nabc";
    check_behind_a_crowd(length, "def").await;
    let chunked = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n";
    check_behind_a_crowd(chunked, "0\r\n\r\n").await;
}

/// Reads what comes until it satisfies `enough`; the runtime runs meanwhile.
async fn heard(client: &mut std::net::TcpStream, enough: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    client.set_nonblocking(true).expect("set");
    let mut bytes = Vec::new();
    let read = async {
        while !enough(&bytes) {
            let mut piece = [0; 4096];
            match client.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => bytes.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Err(_) => break,
            }
        }
    };
    // What has come by then is judged by the caller.
    let _ = tokio::time::timeout(PATIENCE, read).await;
    client.set_nonblocking(false).expect("set");
    bytes
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: &[u8] = b"\0\0\0\x04\0\0\0\0\0";
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// HEADERS of a request for `/` of host `a`; `method`: its index in HPACK's table.
fn h2_head(stream: u8, method: u8, flags: u8) -> Vec<u8> {
    let fields = [0x80 | method, 0x86, 0x84, 0x41, 1, b'a'];
    [&[0, 0, 6, 1, flags | END_HEADERS, 0, 0, 0, stream], &fields[..]].concat()
}

fn h2_get(stream: u8) -> Vec<u8> {
    h2_head(stream, 2, END_STREAM)
}

fn h2_post(stream: u8) -> Vec<u8> {
    h2_head(stream, 3, 0)
}

fn h2_data(stream: u8, data: &[u8]) -> Vec<u8> {
    let length = u8::try_from(data.len()).expect("short");
    [&[0, 0, length, 0, END_STREAM, 0, 0, 0, stream], data].concat()
}

/// True if the frames hold an answer to the stream with status 200.
fn h2_answered(mut frames: &[u8], stream: u8) -> bool {
    while let [0, high, low, kind, _, 0, 0, 0, of, rest @ ..] = frames {
        let length = usize::from(*high) << 8 | usize::from(*low);
        let Some((payload, behind)) = rest.split_at_checked(length) else { return false };
        // 0x88: the field `:status: 200` of HPACK's table.
        if (*kind, *of) == (1, stream) && payload.first() == Some(&0x88) {
            return true;
        }
        frames = behind;
    }
    false
}

#[tokio::test(flavor = "current_thread")]
async fn http2_that_came_in_time_is_read_behind_a_crowd() {
    let opened = [PREFACE, SETTINGS].concat();
    let cases = [
        ("nothing before", 1, vec![], [&opened[..], &h2_get(1)].concat()),
        ("half a preface", 1, opened[..12].to_vec(), [&opened[12..], &h2_get(1)].concat()),
        ("a preface", 1, opened.clone(), h2_get(1)),
        ("another request", 3, [&opened[..], &h2_get(1)].concat(), h2_get(3)),
        ("a head", 1, [&opened[..], &h2_post(1)].concat(), h2_data(1, b"abc")),
    ];
    for (what, stream, first, second) in cases {
        let mut crowd = Crowd::gather();
        let server = Standing::patient().await;
        let mut client = server.connect().await;
        settled().await;
        client.write_all(&first).expect("the kernel takes it");
        match stream {
            1 => settled().await,
            _ => {
                assert!(h2_answered(&heard(&mut client, |frames| h2_answered(frames, 1)).await, 1), "idle from here on")
            }
        }
        crowd.speak();
        client.write_all(&second).expect("the kernel takes it");
        std::thread::sleep(LONG_STANDSTILL);
        let frames = heard(&mut client, |frames| h2_answered(frames, stream)).await;
        assert!(h2_answered(&frames, stream), "{what}: {frames:?}");
    }
}

/// A file of the certificate for localhost that the tests of the client have.
fn tls_file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../gateway/http/tests/tls").join(name)
}

fn tls_client() -> rustls::ClientConnection {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(tls_file("cert.pem")).expect("a certificate")).expect("a root");
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    rustls::ClientConnection::new(Arc::new(config), "localhost".try_into().expect("a name")).expect("a client")
}

/// Bytes that the TLS client wants to send now.
fn tls_out(tls: &mut rustls::ClientConnection) -> Vec<u8> {
    let mut bytes = Vec::new();
    while tls.wants_write() {
        tls.write_tls(&mut bytes).expect("memory");
    }
    bytes
}

/// Takes bytes of the server, and returns the plain text in them.
fn tls_in(tls: &mut rustls::ClientConnection, mut bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    while !bytes.is_empty() {
        tls.read_tls(&mut bytes).expect("memory");
        tls.process_new_packets().expect("valid records");
        let mut piece = [0; 4096];
        while let Ok(count @ 1..) = tls.reader().read(&mut piece) {
            plain.extend_from_slice(&piece[..count]);
        }
    }
    plain
}

#[tokio::test(flavor = "current_thread")]
async fn a_handshake_that_came_in_time_is_read_behind_a_crowd() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    for whole_hello in [false, true] {
        let mut crowd = Crowd::gather();
        let server = Standing::secured().await;
        let mut client = server.connect().await;
        settled().await;
        let mut tls = tls_client();
        let hello = tls_out(&mut tls);
        let mut second = hello[10..].to_vec();
        client.write_all(&hello[..10]).expect("the kernel takes it");
        if whole_hello {
            // The server's part of the handshake has come; the client's end of it is what comes late.
            client.write_all(&second).expect("the kernel takes it");
            while tls.is_handshaking() {
                let flight = heard(&mut client, |bytes| !bytes.is_empty()).await;
                assert!(!flight.is_empty(), "the server ended the handshake");
                tls_in(&mut tls, &flight);
            }
            tls.writer().write_all(REQUEST.as_bytes()).expect("memory");
            second = tls_out(&mut tls);
        } else {
            settled().await;
        }
        crowd.speak();
        client.write_all(&second).expect("the kernel takes it");
        std::thread::sleep(LONG_STANDSTILL);
        let mut plain = Vec::new();
        while !plain.starts_with(b"HTTP/1.1 200") {
            let bytes = heard(&mut client, |bytes| !bytes.is_empty()).await;
            assert!(!bytes.is_empty(), "the server ended the connection; whole hello: {whole_hello}");
            if !whole_hello {
                // A record of the handshake, no alert. The client's end of it would come behind the deadline: nothing is
                // promised of that.
                assert_eq!(bytes[0], 22, "{bytes:?}");
                break;
            }
            plain.extend(tls_in(&mut tls, &bytes));
        }
    }
}

/// Sends one request to an upstream, and reads the whole answer.
async fn asked(upstream: SocketAddr) -> Result<String, ClientError> {
    let target = Target::parse(&format!("http://{upstream}")).expect("a target");
    let client = Client::new(target, None).expect("a client");
    let request =
        Outgoing { method: Method::GET, path: "/".into(), headers: vec![], body: vec![], sent: Sent::default() };
    let deadlines = Deadlines { connect: PATIENCE, head: LONG_DEADLINE, silence: LONG_DEADLINE, whole: None };
    let mut response = client.send(&request, &deadlines).await?;
    let mut bytes = Vec::new();
    while poll_fn(|context| response.body.poll_chunk(context, &mut bytes)).await? {}
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[tokio::test(flavor = "current_thread")]
async fn an_answer_that_came_in_time_is_read_behind_a_crowd() {
    let head = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n";
    let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n";
    let whole = format!("{head}abcd");
    for (first, second) in
        [("", whole.as_str()), (&whole[..9], &whole[9..]), (head, "abcd"), (chunked, "2\r\ncd\r\n0\r\n\r\n")]
    {
        let mut crowd = Crowd::gather();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let asking = tokio::spawn(asked(listener.local_addr().expect("an address")));
        let (stream, _) = listener.accept().await.expect("accepted");
        let mut provider = stream.into_std().expect("a socket");
        provider.set_nonblocking(false).expect("set");
        write(&mut provider, first);
        settled().await;
        crowd.speak();
        write(&mut provider, second);
        std::thread::sleep(LONG_STANDSTILL);
        let answer = asking.await.expect("no panic");
        assert_eq!(answer.as_deref().ok(), Some("abcd"), "{first:?}, then {second:?}: {answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_last_look_is_no_second_deadline() {
    let server = Standing::start(4096).await;
    for start in ["GET / HTTP/1.1\r\nHost: a\r\nX: ", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999\r\n\r\n"] {
        let mut client = server.connect().await;
        write(&mut client, start);
        // A byte in each turn of the driver.
        let trickle = tokio::task::spawn_blocking(move || {
            let began = std::time::Instant::now();
            while began.elapsed() < PATIENCE && client.write_all(b"y").is_ok() {
                std::thread::sleep(Duration::from_micros(300));
            }
            began.elapsed()
        });
        let time = trickle.await.expect("no panic");
        assert!(time < Duration::from_secs(5), "{start:?} was heard for {time:?}");
    }
}
