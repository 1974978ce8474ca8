//! Behaviour of a worker towards peers that are not its gateway, and towards gateways that misbehave.

use bytes::{BufMut, BytesMut};
use penstock_fleet_tests::dial::{self, Session};
use penstock_fleet_tests::{Answer, Dir, PATIENCE, Worker, free_port, job, pool, read, read_into, wait_for};
use penstock_pool::{FleetRuntime, PoolConfig, WorkerPhase};
use penstock_proto::frames::*;
use penstock_proto::handshake::{NONCE_BYTES, PoolKey, Proof, Side};
use penstock_proto::{BLOCK_TOKENS, PROTOCOL_VERSION, codec};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

/// One end of a session, driven by hand.
struct Peer<S> {
    stream: S,
    input: BytesMut,
}

impl<S: AsyncReadExt + AsyncWriteExt + Unpin> Peer<S> {
    fn new(stream: S) -> Self {
        Self { stream, input: BytesMut::new() }
    }

    async fn say(&mut self, body: DownBody) {
        let mut bytes = BytesMut::new();
        codec::encode(&Down { body: Some(body) }, &mut bytes).expect("a small frame");
        self.stream.write_all(&bytes).await.expect("the worker reads");
    }

    async fn hello(&mut self, version: u32) {
        self.say(DownBody::Hello(Hello { version, gateway: 1, nonce: Vec::new() })).await;
    }

    /// Reads the next frame; `None` at the end of the stream.
    async fn hear(&mut self) -> Option<Up> {
        loop {
            if let Some(up) = codec::decode(&mut self.input).expect("workers speak the contract") {
                return Some(up);
            }
            match timeout(PATIENCE, self.stream.read_buf(&mut self.input)).await.expect("in time") {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    async fn ready(&mut self) -> Ready {
        loop {
            match self.hear().await.expect("a frame").body {
                Some(UpBody::Ready(ready)) => return ready,
                Some(UpBody::Loading(_)) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    async fn closed(&mut self) -> bool {
        while let Some(up) = self.hear().await {
            assert!(!matches!(up.body, Some(UpBody::Step(_))), "served a stranger");
        }
        true
    }
}

async fn connect(worker: &Worker) -> Peer<UnixStream> {
    let socket = &worker.socket;
    assert!(wait_for(|| socket.exists().then_some(())).await.is_some());
    Peer::new(UnixStream::connect(socket).await.expect("the worker listens"))
}

fn generate(request: u64, prompt: Vec<u32>, window: u32) -> DownBody {
    let job = job([1], 1, 4000);
    DownBody::Generate(Generate {
        request,
        prompt,
        choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
        sampling: Some(job.sampling),
        window,
        ..Default::default()
    })
}

#[tokio::test]
async fn a_session_begins_with_the_truth_and_counts_its_frames() {
    let dir = Dir::new();
    let worker = Worker::start(BINARY, &dir, "a", &["--load-ms", "100"]);
    let mut peer = connect(&worker).await;
    peer.hello(PROTOCOL_VERSION).await;
    let (mut sequence, mut loading) = (0, 0);
    let ready = loop {
        let up = peer.hear().await.expect("a frame");
        assert_eq!(up.sequence, sequence);
        sequence += 1;
        match up.body {
            Some(UpBody::Loading(_)) => loading += 1,
            Some(UpBody::Ready(ready)) => break ready,
            other => panic!("{other:?}"),
        }
    };
    assert!(loading > 0 && ready.epoch != 0 && ready.pid == worker.pid());
    assert_eq!((ready.block_tokens as usize, ready.blocks_total), (BLOCK_TOKENS, 1024));
    // Silence is filled with heartbeats that carry the state.
    let began = Instant::now();
    for _ in 0..3 {
        let up = peer.hear().await.expect("a heartbeat");
        assert_eq!(up.sequence, sequence);
        sequence += 1;
        let Some(UpBody::Step(Step { state: Some(state), .. })) = up.body else { panic!("not a heartbeat") };
        assert_eq!((state.blocks_total, state.running), (1024, 0));
    }
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn a_drain_is_reported_in_the_middle_of_a_step_and_ends_when_its_order_says() {
    let dir = Dir::new();
    let mut worker = Worker::start(BINARY, &dir, "a", &["--step-ms", "20000"]);
    let mut session = Session::with(&worker).await;
    session.say(generate(1, vec![5; 40], 8)).await;
    let age = |step: &Step| step.state.as_ref().expect("always there").step_age_seconds;
    session.until(|step| age(step) > 0.0).await;
    let began = Instant::now();
    session.say(DownBody::Drain(Drain { exit: true, patience_seconds: 1 })).await;
    let told = session.until(|step| step.state.as_ref().is_some_and(|state| state.draining)).await;
    assert!(age(&told) > 0.0, "the step is over: {told:?}");
    assert_eq!(worker.code().await, Some(0));
    assert!(began.elapsed() < Duration::from_secs(15), "its own deadline is 30 s");
}

#[tokio::test]
async fn a_gateway_that_sends_requests_after_its_drain_was_ignored_needs_the_worker() {
    let dir = Dir::new();
    let mut worker = Worker::start(BINARY, &dir, "a", &[]);
    let (mut one, mut two) = (Session::with(&worker).await, Session::with(&worker).await);
    let log = dir.file("a.log");
    let ignored = |times: usize| {
        let read = std::fs::read_to_string(&log).unwrap_or_default();
        (read.matches("drain ignored").count() == times).then_some(())
    };
    let drain = || DownBody::Drain(Drain { exit: true, patience_seconds: 0 });
    one.say(drain()).await;
    assert!(wait_for(|| ignored(1)).await.is_some(), "the other gateway uses the worker");
    assert_eq!(one.run(dial::generate(1, job([5; 40], 1, 10))).await.tokens.len(), 10);
    two.say(drain()).await;
    assert!(wait_for(|| ignored(2)).await.is_some(), "and the first one does after all");
    assert_eq!(one.run(dial::generate(2, job([6; 40], 1, 10))).await.tokens.len(), 10);
    one.say(drain()).await;
    assert_eq!(worker.code().await, Some(0), "nobody needs it any more");
}

#[tokio::test]
async fn two_gateways_may_use_the_same_numbers() {
    let dir = Dir::new();
    let worker = Worker::start(BINARY, &dir, "a", &[]);
    let (mut one, mut two) = (connect(&worker).await, connect(&worker).await);
    for peer in [&mut one, &mut two] {
        peer.hello(PROTOCOL_VERSION).await;
        peer.ready().await;
    }
    one.say(generate(1, vec![5; 40], 8)).await;
    two.say(generate(1, vec![6; 40], 3)).await;
    for (peer, window) in [(&mut one, 8), (&mut two, 3)] {
        let mut tokens = 0;
        while tokens < window {
            let Some(UpBody::Step(step)) = peer.hear().await.expect("a frame").body else { continue };
            assert!(step.outputs.iter().all(|output| output.request == 1));
            tokens += step.outputs.iter().map(|output| output.tokens.len()).sum::<usize>();
        }
        assert_eq!(tokens, window, "its own window, not the other's");
    }
    drop(one);
    // The first gateway's request is gone, the second's stays.
    loop {
        let Some(UpBody::Step(step)) = two.hear().await.expect("a frame").body else { continue };
        let state = step.state.expect("every step has a state");
        if state.running + state.waiting == 1 {
            break;
        }
    }
    two.say(DownBody::Window(Window { request: 1, choice: 0, tokens: 4 })).await;
    let mut more = 0;
    while more < 4 {
        let Some(UpBody::Step(step)) = two.hear().await.expect("a frame").body else { continue };
        more += step.outputs.iter().map(|output| output.tokens.len()).sum::<usize>();
    }
}

#[tokio::test]
async fn strangers_find_a_closed_socket() {
    let dir = Dir::new();
    let worker = Worker::start(BINARY, &dir, "a", &[]);
    let mut oversized = BytesMut::new();
    oversized.put_u32_le(u32::MAX);
    let mut not_a_hello = BytesMut::new();
    codec::encode(&Down { body: Some(DownBody::Drain(Drain { exit: true, patience_seconds: 0 })) }, &mut not_a_hello)
        .expect("encodes");
    let garbage: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        oversized.to_vec(),
        not_a_hello.to_vec(),
        vec![0xff; 4096],
        vec![8, 0, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9],
    ];
    for bytes in garbage {
        let mut peer = connect(&worker).await;
        peer.stream.write_all(&bytes).await.expect("written");
        assert!(peer.closed().await);
    }
    let mut later = connect(&worker).await;
    later.hello(PROTOCOL_VERSION + 1).await;
    let refused = later.hear().await.expect("it says why").body;
    assert!(matches!(&refused, Some(UpBody::Refused(refused)) if refused.message.contains("version")), "{refused:?}");
    assert!(later.closed().await);
    // Garbage in the middle of a session ends this session only.
    let mut peer = connect(&worker).await;
    peer.hello(PROTOCOL_VERSION).await;
    peer.ready().await;
    peer.stream.write_all(&[0xee; 64]).await.expect("written");
    while peer.hear().await.is_some() {}
    let mut peer = connect(&worker).await;
    peer.hello(PROTOCOL_VERSION).await;
    peer.ready().await;
}

#[tokio::test]
async fn silent_strangers_do_not_keep_a_place() {
    let dir = Dir::new();
    let worker = Worker::start(BINARY, &dir, "a", &[]);
    let mut silent = Vec::new();
    for _ in 0..64 {
        silent.push(connect(&worker).await);
    }
    // All places are taken: the next connection is turned away at once.
    let mut surplus = connect(&worker).await;
    assert!(surplus.closed().await);
    // The strangers' time passes, and there is room again.
    let began = Instant::now();
    for peer in &mut silent {
        assert!(peer.closed().await);
    }
    assert!(began.elapsed() < Duration::from_secs(20));
    let mut peer = connect(&worker).await;
    peer.hello(PROTOCOL_VERSION).await;
    peer.ready().await;
}

#[tokio::test]
async fn a_gateway_that_stops_reading_loses_its_session_and_delays_nobody() {
    let dir = Dir::new();
    let runtime = FleetRuntime::start().expect("the fleet runtime starts");
    let worker = Worker::start(BINARY, &dir, "a", &[]);
    let mut stuck = connect(&worker).await;
    stuck.hello(PROTOCOL_VERSION).await;
    stuck.ready().await;
    // No window: the engine never stops for this client, which reads nothing.
    for request in 0..4 {
        stuck.say(generate(request, vec![3; 10], 0)).await;
    }
    let pool = pool(&runtime, &[&worker], |_| {});
    assert!(pool.ready(PATIENCE).await);
    let answer = read(&mut pool.submit(job([1], 1, 500)).expect("taken")).await;
    assert_eq!(answer.tokens[0].len(), 500);
    let log = dir.file("a.log");
    let dropped =
        || std::fs::read_to_string(&log).is_ok_and(|log| log.contains("does not read its frames")).then_some(());
    assert!(wait_for(dropped).await.is_some(), "its session is dropped");
    let gone = || {
        let state = &pool.status().workers[0].state;
        (state.running + state.waiting == 0).then_some(())
    };
    assert!(wait_for(gone).await.is_some(), "and what it asked for is cancelled");
}

#[tokio::test]
async fn a_socket_is_private_and_has_one_worker() {
    use std::os::unix::fs::PermissionsExt;
    let dir = Dir::new();
    let mut first = Worker::start(BINARY, &dir, "a", &[]);
    drop(connect(&first).await);
    let mode = std::fs::metadata(&first.socket).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut second = Worker::start(BINARY, &dir, "a", &[]);
    assert_eq!(second.code().await, Some(1), "the address is in use");
    first.signal(rustix::process::Signal::KILL);
    let _ = first.code().await;
    assert!(first.socket.exists(), "a killed worker leaves its socket");
    let third = Worker::start(BINARY, &dir, "a", &[]);
    let mut peer = wait_for_connection(&third).await;
    peer.hello(PROTOCOL_VERSION).await;
    peer.ready().await;
    // A file that is not a socket is not touched.
    std::fs::write(dir.file("b.sock"), b"precious").expect("written");
    let mut fourth = Worker::start(BINARY, &dir, "b", &[]);
    assert_eq!(fourth.code().await, Some(1));
    assert_eq!(std::fs::read(dir.file("b.sock")).expect("still there"), b"precious");
}

/// Connects to a socket whose file may be left from an earlier worker.
async fn wait_for_connection(worker: &Worker) -> Peer<UnixStream> {
    let until = Instant::now() + PATIENCE;
    loop {
        match UnixStream::connect(&worker.socket).await {
            Ok(stream) => return Peer::new(stream),
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

// ---- TCP ----

struct Remote(Child);

impl Drop for Remote {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn remote(dir: &Dir, key: &str) -> (Remote, u16) {
    std::fs::write(dir.file("key"), key).expect("the key file");
    let port = free_port();
    let child = Command::new(BINARY)
        .args(["--listen", &format!("tcp:127.0.0.1:{port}"), "--key-file"])
        .arg(dir.file("key"))
        .stderr(Stdio::null())
        .spawn()
        .expect("the worker starts");
    let remote = Remote(child);
    let until = Instant::now() + PATIENCE;
    while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        assert!(Instant::now() < until, "the worker listens");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    (remote, port)
}

fn over_tcp(port: u16, key: &str) -> PoolConfig {
    let mut config = PoolConfig::new("far");
    config.connect.push(format!("tcp://127.0.0.1:{port}").parse().expect("an address"));
    config.key = Some(PoolKey::new(key.as_bytes()).expect("a key"));
    config
}

#[tokio::test]
async fn over_tcp_both_ends_prove_the_key() {
    let dir = Dir::new();
    let runtime = FleetRuntime::start().expect("the fleet runtime starts");
    let (_remote, port) = remote(&dir, "a secret of the pool").await;
    let pool = penstock_pool::Pool::start(&runtime, over_tcp(port, "a secret of the pool")).expect("starts");
    assert!(pool.ready(PATIENCE).await);
    let mut ticket = pool.submit(job([1, 2, 3], 2, 50)).expect("taken");
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    assert_eq!(answer.tokens.iter().map(Vec::len).collect::<Vec<_>>(), [50, 50]);

    let wrong = penstock_pool::Pool::start(&runtime, over_tcp(port, "another secret!!")).expect("starts");
    let refused = || {
        matches!(&wrong.status().workers[0].phase, WorkerPhase::Down { why, .. } if why.contains("proof")).then_some(())
    };
    assert!(wait_for(refused).await.is_some(), "{:?}", wrong.status().workers[0]);
}

#[tokio::test]
async fn over_tcp_silent_strangers_keep_nobody_out() {
    let dir = Dir::new();
    let runtime = FleetRuntime::start().expect("the fleet runtime starts");
    // The strangers must not have been closed by their deadline; a machine that pauses for a moment does not do so
    // every time.
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= Duration::from_secs(4)) {
        assert!(took.len() < 5, "{took:?}");
        let (_remote, port) = remote(&dir, "a secret of the pool").await;
        let began = Instant::now();
        let mut silent = Vec::new();
        for _ in 0..100 {
            silent.push(TcpStream::connect(("127.0.0.1", port)).await.expect("it listens"));
        }
        let pool = penstock_pool::Pool::start(&runtime, over_tcp(port, "a secret of the pool")).expect("starts");
        assert!(pool.ready(PATIENCE).await);
        took.push(began.elapsed());
        drop(silent);
    }
}

#[tokio::test]
async fn over_tcp_nobody_without_the_key_is_served() {
    let dir = Dir::new();
    let (_remote, port) = remote(&dir, "a secret of the pool").await;
    let key = PoolKey::new(b"guessed, and wrong").expect("a key");
    let connect = || async { Peer::new(TcpStream::connect(("127.0.0.1", port)).await.expect("it listens")) };
    let nonce = vec![7; NONCE_BYTES];
    let hello = || DownBody::Hello(Hello { version: PROTOCOL_VERSION, gateway: 1, nonce: nonce.clone() });

    let mut guess = connect().await;
    guess.say(hello()).await;
    let Some(UpBody::Challenge(challenge)) = guess.hear().await.expect("a challenge").body else {
        panic!("no challenge")
    };
    assert!(!key.verify(Side::Worker, &nonce, &challenge.nonce, &challenge.proof));
    guess.say(DownBody::Proof(Proof { proof: key.proof(Side::Gateway, &nonce, &challenge.nonce) })).await;
    assert!(guess.closed().await);

    // The worker's own proof, reflected.
    let mut mirror = connect().await;
    mirror.say(hello()).await;
    let Some(UpBody::Challenge(challenge)) = mirror.hear().await.expect("a challenge").body else {
        panic!("no challenge")
    };
    mirror.say(DownBody::Proof(Proof { proof: challenge.proof })).await;
    assert!(mirror.closed().await);

    let mut hasty = connect().await;
    hasty.say(hello()).await;
    hasty.say(generate(1, vec![1], 0)).await;
    let _challenge = hasty.hear().await;
    assert!(hasty.closed().await);
}

#[test]
fn tcp_without_a_key_or_beyond_loopback_does_not_start() {
    let dir = Dir::new();
    std::fs::write(dir.file("key"), "a secret of the pool").expect("the key file");
    let run = |args: &[&str]| {
        let output = Command::new(BINARY).args(args).output().expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let key = dir.file("key").display().to_string();
    let (code, said) = run(&["--listen", "tcp:127.0.0.1:0"]);
    assert!(code == Some(1) && said.contains("pool key"), "{code:?} {said}");
    let (code, said) = run(&["--listen", "tcp:0.0.0.0:0", "--key-file", &key]);
    assert!(code == Some(1) && said.contains("loopback"), "{code:?} {said}");
}
