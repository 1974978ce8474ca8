//! A scripted provider that counts, and a gateway in front of it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use penstock_config::Overrides;
use penstock_proxy::{Gateway, server};
use penstock_telemetry::AccessLog;
use pingora_core::services::Service as _;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::listening;

/// A step of a connection's answer to one request.
#[derive(Clone, Debug)]
pub enum Step {
    /// Sends these bytes.
    Say(Vec<u8>),
    /// Sends these bytes again and again, until the peer is gone or has received the given number of bytes.
    Repeat(Vec<u8>, usize),
    /// Sends one piece per interval in milliseconds, until the peer is gone.
    Pace(Vec<u8>, u64),
    /// Silence until the test opens the gate ([`Seen::go_on`]).
    Gate,
    /// Silence until the peer is gone.
    Hang,
    /// End of the connection.
    Close,
    /// End of the connection by a reset.
    Reset,
}

/// Answers of a provider to successive requests; the last one is repeated.
pub type Script = Vec<Vec<Step>>;

/// Observations of a provider.
#[derive(Debug, Default)]
pub struct Seen {
    /// Heads and bodies of the requests.
    pub requests: Mutex<Vec<String>>,
    /// Number of connections.
    pub connections: AtomicUsize,
    /// Pieces of [`Step::Pace`] that were written.
    pub paced: AtomicUsize,
    /// Time when the peer was seen to leave.
    pub left: Mutex<Option<Instant>>,
    gate: tokio::sync::Notify,
}

impl Seen {
    /// Requests so far, head and body.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets one [`Step::Gate`] pass.
    pub fn go_on(&self) {
        self.gate.notify_one();
    }

    /// Time when the peer was seen to leave.
    pub fn left(&self) -> Option<Instant> {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A provider on a port of its own.
pub struct Provider {
    /// Address of the provider.
    pub address: SocketAddr,
    /// Observations of the provider.
    pub seen: Arc<Seen>,
    task: JoinHandle<()>,
}

impl Provider {
    /// Starts a provider.
    pub async fn start(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let seen = Arc::new(Seen::default());
        let (script, served) = (Arc::new(script), seen.clone());
        let task = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                stream.set_nodelay(true).expect("a socket option");
                served.connections.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(stream, script.clone(), served.clone()));
            }
        });
        Self { address, seen, task }
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, script: Arc<Script>, seen: Arc<Seen>) {
    let mut left = Vec::new();
    while let Some(request) = request(&mut stream, &mut left).await {
        let number = {
            let mut requests = seen.requests.lock().unwrap_or_else(PoisonError::into_inner);
            requests.push(request);
            requests.len() - 1
        };
        let steps = script.get(number).or(script.last()).expect("a script");
        for step in steps {
            if !take(&mut stream, step, &seen).await {
                *seen.left.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                return;
            }
            match step {
                Step::Close => return,
                Step::Reset => {
                    stream.set_zero_linger().expect("a socket option");
                    return;
                }
                _ => {}
            }
        }
    }
}

/// Performs one step; false if the peer is gone.
async fn take(stream: &mut TcpStream, step: &Step, seen: &Seen) -> bool {
    match step {
        Step::Say(bytes) => stream.write_all(bytes).await.is_ok(),
        Step::Repeat(bytes, count) => {
            for _ in 0..*count {
                if stream.write_all(bytes).await.is_err() {
                    return false;
                }
            }
            true
        }
        Step::Pace(bytes, millis) => {
            let mut scratch = [0; 64];
            loop {
                tokio::select! {
                    read = stream.read(&mut scratch) => if !matches!(read, Ok(1..)) { return false },
                    () = tokio::time::sleep(Duration::from_millis(*millis)) => {
                        if stream.write_all(bytes).await.is_err() {
                            return false;
                        }
                        seen.paced.fetch_add(1, Ordering::SeqCst);
                    }
                }
            }
        }
        Step::Hang => {
            let mut scratch = [0; 64];
            while matches!(stream.read(&mut scratch).await, Ok(1..)) {}
            false
        }
        Step::Gate => {
            seen.gate.notified().await;
            true
        }
        Step::Close | Step::Reset => true,
    }
}

/// Reads one request with a Content-Length.
async fn request(stream: &mut TcpStream, left: &mut Vec<u8>) -> Option<String> {
    let mut scratch = vec![0; 64 * 1024];
    loop {
        let text = String::from_utf8_lossy(left).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length: ")?.trim().parse::<usize>().ok());
            if body.len() >= length.unwrap_or(0) {
                let end = head.len() + 4 + length.unwrap_or(0);
                return Some(String::from_utf8_lossy(&left.drain(..end).collect::<Vec<_>>()).into_owned());
            }
        }
        match stream.read(&mut scratch).await {
            Ok(count @ 1..) => left.extend_from_slice(&scratch[..count]),
            _ => return None,
        }
    }
}

/// A gateway with a config of its own and no pool; it stops when dropped.
pub struct Front {
    /// Address of the listener.
    pub address: SocketAddr,
    /// State of the gateway.
    pub gateway: Arc<Gateway>,
    shutdown: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Front {
    /// Starts a gateway with a config text. The environment variables that it can name are `KEY_A` and `KEY_B`.
    pub async fn start(config_text: &str) -> Self {
        let overrides =
            Overrides { listen: Some("127.0.0.1:0".into()), access_log: Some("off".into()), ..Overrides::default() };
        let env = |name: &str| match name {
            "KEY_A" => Some("sk-aaaa".to_owned()),
            "KEY_B" => Some("sk-bbbb".to_owned()),
            _ => None,
        };
        let mut config =
            penstock_config::load(Some(("test.toml", config_text)), &overrides, &env).expect("a valid config");
        // Host name in the requests of `raw`.
        config.hosts.push("a".into());
        let sockets = listening(&mut config);
        let log = AccessLog::open(&config.access_log).expect("an access log");
        let providers = penstock_provider::all(&config.providers).expect("providers");
        let gateway = Arc::new(Gateway::new(config.clone(), log, Vec::new(), providers));
        penstock_provider::discover::start(gateway.serving().providers());
        let mut service = server::service(gateway.clone(), &config).expect("a service");
        let (shutdown, watching) = watch::channel(false);
        let task = tokio::spawn(async move { service.start_service(Some(sockets), watching, 1).await });
        Self { address: config.listen, gateway, shutdown, task }
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let _ = self.shutdown.send(true);
        self.task.abort();
    }
}
