//! Idle connections: the order of eviction when all places are taken; a connection whose bytes have come is never
//! closed.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use penstock_hostile::raw::{self, Client};
use penstock_hostile::{PATIENCE, Server, eventually};
use penstock_http::connection::{App, Handler};
use penstock_http::exchange::BodyFault;
use penstock_http::head::HeadFault;
use penstock_http::places::Bounds;
use penstock_http::{BodyBudget, Exchange, HttpLimits};
use pingora_core::apps::ServerApp;
use pingora_core::protocols::l4::stream::Stream;
use tokio::net::TcpListener;
use tokio::sync::watch;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_end_no_service() {
    let server = Server::start("[server]\nconnections_max = 16\n").await;
    let mut used = Vec::new();
    for number in 0..150 {
        let mut client = Client::connect(server.address).await;
        if number % 3 == 1 {
            client.send(raw::get("/health")).await;
            assert_eq!(client.answer().await.status, 200, "one after the other, each has its answer");
        } else if number % 3 == 2 {
            client.send("GET /hea").await;
        }
        used.push(client);
    }
    let mut kept = Client::connect(server.address).await;
    for _ in 0..5 {
        kept.send(raw::chat("say 1", false)).await;
        assert_eq!(kept.answer().await.status, 200, "on a connection that came last");
        assert_eq!(
            raw::send(server.address, raw::chat("say 1", false).replace("Host: a", "Host: a\r\nConnection: close"))
                .await
                .status,
            200
        );
    }
    let text = server.gateway.render_metrics();
    assert!(text.contains("penstock_connections_refused_total{reason=\"gave_way\"}"), "{text}");
    used[0].until_closed().await;
    drop((used, kept));
    eventually("all places are given back", || server.gateway.metrics.connections_now() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_http2_gives_way_and_busy_does_not() {
    let server = Server::start("[server]\nconnections_max = 2\n").await;
    let mut busy = Client::connect(server.address).await;
    busy.send(raw::chat("hang", true)).await;
    eventually("the request is open", || server.puppet.open() == 1).await;
    let mut silent = Client::connect(server.address).await;
    // Only a preface and settings.
    silent.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    assert!(!silent.until(PATIENCE, |text| !text.is_empty()).await.text.is_empty(), "its settings");
    let mut new = Client::connect(server.address).await;
    new.send(raw::get("/health")).await;
    assert_eq!(new.answer().await.status, 200);
    silent.until_closed().await;
    assert_eq!(server.puppet.open(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loopback_and_proxies_stand_for_many() {
    let server =
        Server::start("[auth]\ntrusted_proxies = [\"10.0.0.0/8\"]\n[server]\naddress_connections_max = 3\n").await;
    let of = |peer: &str| {
        let peer: Option<IpAddr> = peer.parse().ok();
        let Bounds { address_max, address_rate, .. } = server.gateway.bounds(peer);
        (address_max, address_rate)
    };
    for exempt in ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "10.1.2.3", "::ffff:10.1.2.3", "a Unix socket"]
    {
        assert_eq!(of(exempt), (0, 0), "{exempt}");
    }
    for client in ["192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1", "11.0.0.1"] {
        assert_eq!(of(client), (3, 200), "{client}");
    }
}

/// Deadlines that have passed whenever the runtime stood still for [`STANDSTILL`].
const DEADLINE: Duration = Duration::from_millis(50);
const STANDSTILL: Duration = Duration::from_millis(300);

/// A handler that answers everything.
struct Hasty {
    connections_max: usize,
}

#[async_trait]
impl Handler for Hasty {
    fn limits(&self) -> Arc<HttpLimits> {
        let limits = HttpLimits { head_timeout: DEADLINE, idle_timeout: DEADLINE, ..HttpLimits::default() };
        let limits = HttpLimits { body_timeout: DEADLINE, body_rate_bytes_min: 1_000_000, ..limits };
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
struct Standing {
    app: Arc<App<Hasty>>,
    listener: TcpListener,
    shutdown: watch::Sender<bool>,
}

impl Standing {
    async fn start(connections_max: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        Self {
            app: Arc::new(App::new(Arc::new(Hasty { connections_max }))),
            listener,
            shutdown: watch::channel(false).0,
        }
    }

    fn address(&self) -> SocketAddr {
        self.listener.local_addr().expect("an address")
    }

    async fn connect(&self) -> std::net::TcpStream {
        let client = std::net::TcpStream::connect(self.address()).expect("connected");
        let (stream, _) = self.listener.accept().await.expect("accepted");
        self.app.process_new(Box::new(Stream::from(stream)), &self.shutdown.subscribe()).await;
        client
    }
}

/// Lets the runtime run until the connections wait for their clients.
async fn settled() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

fn write(client: &mut std::net::TcpStream, text: &str) {
    client.write_all(text.as_bytes()).expect("the kernel takes it");
}

/// Reads the answer that comes within the tests' patience.
async fn answer(mut client: std::net::TcpStream) -> String {
    let read = tokio::task::spawn_blocking(move || {
        client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut text = vec![0; 4096];
        let count = client.read(&mut text).unwrap_or(0);
        String::from_utf8_lossy(&text[..count]).into_owned()
    });
    read.await.expect("no panic")
}

const REQUEST: &str = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";

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

/// A client sends the first part of a request, and the second while the runtime stands still for longer than any
/// deadline, after a crowd of other sockets of the process has got bytes. It has sent all of it in time.
async fn check_behind_a_crowd(first: &str, second: &str) {
    // Each socket of the crowd takes two descriptors, more than the 1,024 that most shells allow.
    penstock_proxy::descriptors::raise();
    let (others, mut crowd): (Vec<_>, Vec<_>) = (0..CROWD)
        .map(|_| {
            let (theirs, ours) = std::os::unix::net::UnixStream::pair().expect("a pair");
            ours.set_nonblocking(true).expect("set");
            (tokio::net::UnixStream::from_std(ours).expect("registered"), theirs)
        })
        .unzip();
    let server = Standing::start(16).await;
    let mut client = server.connect().await;
    settled().await;
    write(&mut client, first);
    settled().await;
    if first == REQUEST {
        assert!(client.read(&mut [0; 4096]).expect("an answer") > 0, "the connection is idle from here on");
    }
    crowd.iter_mut().for_each(|other| other.write_all(b"x").expect("the kernel takes it"));
    write(&mut client, second);
    std::thread::sleep(STANDSTILL);
    let text = answer(client).await;
    assert!(text.starts_with("HTTP/1.1 200"), "{first:?}, then {second:?}: {text:?}");
    drop(others);
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

#[tokio::test(flavor = "current_thread")]
async fn who_gives_way_is_answered_if_its_request_has_come() {
    let server = Standing::start(1).await;
    let mut first = server.connect().await;
    settled().await;
    write(&mut first, REQUEST);
    // The place is taken before its task could read the bytes.
    let mut second = server.connect().await;
    write(&mut second, REQUEST);
    let text = answer(first).await;
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("connection: close"), "{text:?}");
    let text = answer(second).await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text:?}");
}
