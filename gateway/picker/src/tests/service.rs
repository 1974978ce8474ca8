//! Streams over a real socket: a proxy that breaks off, breaks the protocol, or is cut off. Each request leaves its line.

use std::net::TcpListener as StdTcpListener;
use std::time::Duration;

use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use http::Request;
use serde_json::{Value as Json, json};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant as Deadline, sleep, timeout};

use super::log::{body, request};
use super::*;
use crate::framing::framed;
use crate::messages::{HealthCheckRequest, HealthCheckResponse, ServingStatus};
use crate::server::{Running, Settings, start};

/// Longest wait for what must come: it says that something hangs, not how fast it is.
const PATIENCE: Duration = Duration::from_secs(60);

struct Service {
    double: Arc<Double>,
    running: Running,
    address: SocketAddr,
}

impl Service {
    fn of(double: Double) -> Self {
        let (double, listener) = (Arc::new(double), StdTcpListener::bind("127.0.0.1:0").expect("a port"));
        let address = listener.local_addr().expect("bound");
        let running = start(double.clone(), Settings { listener, tls: None, threads: 1 }).expect("it starts");
        Self { double, running, address }
    }

    /// Lines of the requests that have ended, once there are as many as that. A line too many would be there as well.
    async fn lines(&self, count: usize) -> Vec<Json> {
        let until = Deadline::now() + PATIENCE;
        while self.double.lines.lock().expect("not poisoned").len() < count {
            assert!(Deadline::now() < until, "{count} lines");
            sleep(Duration::from_millis(5)).await;
        }
        std::mem::take(&mut *self.double.lines.lock().expect("not poisoned"))
    }

    async fn told(&self, what: &str) {
        let until = Deadline::now() + PATIENCE;
        while !self.double.told.lock().expect("not poisoned").iter().any(|told| told == what) {
            assert!(Deadline::now() < until, "{what}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Proxy with one connection.
struct Proxy {
    send: SendRequest<Bytes>,
    connection: JoinHandle<()>,
}

impl Proxy {
    async fn of(service: &Service) -> Self {
        let io = TcpStream::connect(service.address).await.expect("it listens");
        let (send, connection) = h2::client::handshake(io).await.expect("HTTP/2");
        let connection = tokio::spawn(async move { drop(connection.await) });
        Self { send, connection }
    }

    /// Opens a stream about a request with these bytes.
    async fn ask(&self, bytes: Vec<u8>, ends: bool) -> (ResponseFuture, SendStream<Bytes>) {
        self.call("envoy.service.ext_proc.v3.ExternalProcessor/Process", bytes, ends).await
    }

    /// Opens a stream of a method with these bytes.
    async fn call(&self, method: &str, bytes: Vec<u8>, ends: bool) -> (ResponseFuture, SendStream<Bytes>) {
        let uri = format!("http://picker/{method}");
        let asked = Request::post(uri).header("content-type", "application/grpc").body(()).expect("a request");
        let (answer, mut stream) =
            self.send.clone().ready().await.expect("open").send_request(asked, false).expect("a stream");
        stream.send_data(bytes.into(), ends).expect("it is sent");
        (answer, stream)
    }
}

fn messages(steps: impl IntoIterator<Item = Step>) -> Vec<u8> {
    steps.into_iter().flat_map(|one| framed(&step(one))).collect()
}

/// Status of a stream that the service ends.
async fn status(answer: ResponseFuture) -> u16 {
    let ended = async {
        let mut answer = answer.await.expect("a head").into_body();
        while let Some(bytes) = answer.data().await {
            let bytes = bytes.expect("replies");
            answer.flow_control().release_capacity(bytes.len()).expect("in the window");
        }
        let trailers = answer.trailers().await.expect("an end").expect("trailers");
        trailers["grpc-status"].to_str().expect("text").parse().expect("a number")
    };
    timeout(PATIENCE, ended).await.expect("the stream ends")
}

/// Waits for the first reply of a stream, which then goes on.
async fn replied(answer: ResponseFuture) -> h2::RecvStream {
    let mut answer = timeout(PATIENCE, answer).await.expect("in time").expect("a head").into_body();
    timeout(PATIENCE, answer.data()).await.expect("in time").expect("a reply").expect("bytes");
    answer
}

#[tokio::test]
async fn a_proxy_that_breaks_the_protocol_is_told_and_its_request_logged() {
    let service = Service::of(double());
    let proxy = Proxy::of(&service).await;
    let vast = head(&[("x", "y".repeat(3 * crate::MESSAGE_BYTES_MAX / 2).as_str())], false);
    for (more, code, error, detail) in [
        (b"\0\0\0\0\x01\xff".to_vec(), 3, "Malformed", "a message cannot be read"),
        (b"\x01\0\0\0\0".to_vec(), 12, "Malformed", "there is no such method, or the message is compressed"),
        (b"\0\0\0\0\x09abc".to_vec(), 3, "Malformed", "a message cannot be read"),
        (messages([Step::ResponseHeaders(vast)]), 8, "TooLarge", "a message is too large"),
    ] {
        let (answer, _) = proxy.ask([messages([request()]), more].concat(), true).await;
        assert_eq!(status(answer).await, code);
        let lines = service.lines(1).await;
        let said = (&lines[0]["end"], &lines[0]["error"], &lines[0]["detail"], &lines[0]["reason"]);
        assert_eq!(said, (&json!("failed"), &json!(error), &json!(detail), &json!("protocol")), "{lines:?}");
        assert_eq!((lines.len(), told(&service.double)), (1, vec!["count  refused protocol".to_owned()]));
        assert_eq!(service.double.bodies.bytes_held(), 0);
    }
    // Without a request there is nothing to log.
    let (answer, _) = proxy.ask(b"\0\0\0\0\x01\xff".to_vec(), true).await;
    assert_eq!((status(answer).await, told(&service.double)), (3, vec!["count  refused protocol".to_owned()]));
    // A length that no message may have, where a body is awaited: the client is told.
    let (answer, _) = proxy.ask([messages([request()]), b"\0\xff\xff\xff\xff".to_vec()].concat(), false).await;
    assert_eq!(status(answer).await, 0);
    assert_eq!(service.lines(1).await[0]["reason"], "too_large");
    service.running.stop(Duration::ZERO);
}

#[tokio::test]
async fn a_proxy_that_leaves_in_whatever_way_leaves_lines() {
    let service = Service::of(double());
    let proxy = Proxy::of(&service).await;
    let whole = || messages([request(), body()]);
    // The proxy ends its half of the stream, or resets the stream.
    let (answer, _) = proxy.ask(whole(), true).await;
    assert_eq!(status(answer).await, 0);
    assert_eq!(service.lines(1).await[0]["end"], "client_gone");
    let (answer, mut stream) = proxy.ask(whole(), false).await;
    let _open = replied(answer).await;
    stream.send_reset(Reason::CANCEL);
    let lines = service.lines(1).await;
    assert_eq!((&lines[0]["end"], &lines[0]["reason"]), (&json!("client_gone"), &json!("cached")));
    // The proxy's connection breaks, with many requests in all states.
    let (mut open, mut silent) = (Vec::new(), Vec::new());
    for n in 0..60 {
        let bytes = if n % 3 == 0 { messages([request()]) } else { whole() };
        let (answer, stream) = proxy.ask(bytes, false).await;
        match n % 3 {
            // Dropped, it would be reset before the service has seen it.
            0 => silent.push((answer, stream)),
            _ => open.push((replied(answer).await, stream)),
        }
    }
    proxy.connection.abort();
    drop((open, silent));
    drop(proxy.send);
    let lines = service.lines(60).await;
    assert_eq!(lines.len(), 60);
    let is_over = |line: &Json| line["end"] == "client_gone" || line["end"] == "cut";
    assert!(lines.iter().all(is_over), "{lines:?}");
    let told = told(&service.double);
    let count = |what: &str| told.iter().filter(|told| *told == what).count();
    assert_eq!((count("count m picked cached"), count("dropped")), (42, 42), "none is in flight");
    service.running.stop(Duration::ZERO);
}

#[tokio::test]
async fn the_end_of_the_process_and_a_panic_leave_lines() {
    // As on a busy machine.
    let service = Service::of(Double { record_takes: Duration::from_millis(500), ..double() });
    let proxy = Proxy::of(&service).await;
    let (answer, _stream) = proxy.ask(messages([request(), body()]), false).await;
    let _open = replied(answer).await;
    service.running.stop(Duration::ZERO);
    let lines = std::mem::take(&mut *service.double.lines.lock().expect("not poisoned"));
    assert_eq!((lines.len(), &lines[0]["end"]), (1, &json!("cut")), "this process has cut it, not the client");

    let service = Service::of(Double { panics: true, ..double() });
    let proxy = Proxy::of(&service).await;
    for _ in 0..3 {
        let (answer, _stream) = proxy.ask(messages([request(), body()]), false).await;
        let ended = async { answer.await?.into_body().data().await.transpose() };
        let ended = timeout(PATIENCE, ended).await.expect("in time");
        assert!(ended.is_err(), "the stream is reset: {ended:?}");
        let lines = service.lines(1).await;
        assert_eq!((&lines[0]["end"], &lines[0]["error"]), (&json!("failed"), &json!("Internal")));
        service.told("panicked").await;
        told(&service.double);
    }
    service.running.stop(Duration::ZERO);
}

#[tokio::test]
async fn of_two_ends_the_sooner_one_counts() {
    for graces in [[30, 0, 0], [0, 30, 30], [30, 30, 0]] {
        let service = Service::of(double());
        let proxy = Proxy::of(&service).await;
        let (answer, _stream) = proxy.ask(messages([request(), body()]), false).await;
        let _open = replied(answer).await;
        let [upgrade, signal, end] = graces.map(Duration::from_secs);
        let began = std::time::Instant::now();
        service.running.leave(upgrade);
        service.running.leave(signal);
        service.running.stop(end);
        assert!(began.elapsed() < Duration::from_secs(25), "{graces:?}: {:?}", began.elapsed());
        let lines = std::mem::take(&mut *service.double.lines.lock().expect("not poisoned"));
        assert_eq!((lines.len(), &lines[0]["end"]), (1, &json!("cut")), "{graces:?}");
    }
}

#[tokio::test]
async fn a_service_that_ends_takes_no_streams_and_waits_for_no_watch() {
    let service = Service::of(double());
    let proxy = Proxy::of(&service).await;
    let said = |status: ServingStatus| framed(&HealthCheckResponse { status: status as i32 });
    let mut watches = Vec::new();
    for name in ["", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"] {
        let asked = framed(&HealthCheckRequest { service: name.into() });
        let (answer, stream) = proxy.call("grpc.health.v1.Health/Watch", asked.to_vec(), false).await;
        let mut watched = timeout(PATIENCE, answer).await.expect("in time").expect("a head").into_body();
        let next = timeout(PATIENCE, watched.data()).await.expect("in time");
        assert_eq!(next.expect("a status").expect("bytes"), said(ServingStatus::Serving), "{name}");
        watches.push((name, watched, stream));
    }
    let (answer, mut stream) = proxy.ask(messages([request(), body()]), false).await;
    let mut open = replied(answer).await;

    service.running.leave(PATIENCE);
    for (name, watched, _stream) in &mut watches {
        let mut next = timeout(PATIENCE, watched.data()).await.expect("in time");
        if *name != "liveness" {
            assert_eq!(next.expect("a status").expect("bytes"), said(ServingStatus::NotServing), "{name}");
            next = timeout(PATIENCE, watched.data()).await.expect("in time");
        }
        assert!(next.is_none(), "the watch of {name:?} ends");
    }
    let until = Deadline::now() + PATIENCE;
    while TcpStream::connect(service.address).await.is_ok() || proxy.send.clone().ready().await.is_ok() {
        assert!(Deadline::now() < until, "new connections and streams are taken");
        sleep(Duration::from_millis(5)).await;
    }
    assert!(service.double.lines.lock().expect("not poisoned").is_empty(), "the open request goes on");
    let ok = head(&[(":status", "200"), ("content-type", "application/json")], false);
    stream.send_data(messages([Step::ResponseHeaders(ok)]).into(), true).expect("it is sent");
    timeout(PATIENCE, open.data()).await.expect("in time").expect("a reply").expect("bytes");
    assert_eq!(service.lines(1).await.len(), 1);
    let began = std::time::Instant::now();
    service.running.stop(PATIENCE);
    assert!(began.elapsed() < PATIENCE / 2, "nothing is open: {:?}", began.elapsed());
}
