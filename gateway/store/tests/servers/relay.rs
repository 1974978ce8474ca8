//! Relay between a gateway and its server, on Unix sockets, that injects network faults: an answer is lost after the
//! server did its work, or a question arrives after its caller has given up.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Longest wait for the relayed traffic that a test expects.
const PATIENCE: Duration = Duration::from_secs(20);

/// Treatment of questions that contain certain words.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mode {
    Pass,
    /// Lose the answer to the next such question, and the connection with it.
    Lose(String),
    /// Hold back questions that contain these words; without words, all questions.
    Hold(String),
}

/// Fault-injecting relay; ends when dropped.
pub(crate) struct Relay {
    mode: watch::Sender<Mode>,
    /// Number of answers to questions that were held back.
    late: watch::Receiver<u64>,
    /// Number of the connections so far, and of those of them that are silent.
    counts: Arc<[AtomicU64; 2]>,
    task: JoinHandle<()>,
}

impl Relay {
    /// Starts a relay that listens at `from` and connects to `to`.
    pub(crate) fn start(from: &Path, to: &Path) -> Self {
        let listener = UnixListener::bind(from).expect("a socket");
        let (mode, to) = (watch::Sender::new(Mode::Pass), to.to_owned());
        let (told, late) = watch::channel(0);
        let counts = Arc::default();
        let task = tokio::spawn(accept(listener, to, mode.clone(), told, Arc::clone(&counts)));
        Self { mode, late, counts, task }
    }

    /// Loses the answer to the next question with these words, after the server gave it.
    pub(crate) fn lose(&self, words: &str) {
        self.mode.send_replace(Mode::Lose(words.to_owned()));
    }

    /// Holds back questions with these words.
    pub(crate) fn hold(&self, words: &str) {
        self.mode.send_replace(Mode::Hold(words.to_owned()));
    }

    /// Cuts the network: no question arrives, nor the end of a connection.
    pub(crate) fn cut(&self) {
        self.hold("");
    }

    /// Silences the connections that are open, as those to a host that is gone are; new ones are relayed.
    pub(crate) fn abandon(&self) {
        let [count, silent] = &*self.counts;
        silent.store(count.load(Ordering::Acquire), Ordering::Release);
    }

    /// Releases the held questions and waits until the server has answered.
    pub(crate) async fn let_go(&mut self) {
        self.late.mark_unchanged();
        self.mode.send_replace(Mode::Pass);
        timeout(PATIENCE, self.late.changed()).await.expect("in time").expect("an answer");
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(
    listener: UnixListener,
    to: PathBuf,
    mode: watch::Sender<Mode>,
    late: watch::Sender<u64>,
    counts: Arc<[AtomicU64; 2]>,
) {
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        // The server is not there: the client finds its connection closed.
        let Ok(server) = UnixStream::connect(&to).await else { continue };
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        let [loses, waited] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (number, silent) = (counts[0].fetch_add(1, Ordering::AcqRel), counts.clone());
        let is_silent = move || number < silent[1].load(Ordering::Acquire);
        connections.spawn(up(from_client, to_server, mode.clone(), [loses.clone(), waited.clone()], is_silent));
        connections.spawn(down(from_server, to_client, late.clone(), [loses, waited]));
    }
}

/// Forwards questions. Bytes that a client sent before it left still arrive.
async fn up(
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    mode: watch::Sender<Mode>,
    [loses, waited]: [Arc<AtomicBool>; 2],
    is_silent: impl Fn() -> bool,
) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = client.read(&mut bytes).await {
        if is_silent() {
            return std::future::pending().await;
        }
        let has = |words: &str| {
            words.is_empty() || bytes[..count].windows(words.len()).any(|window| window == words.as_bytes())
        };
        let now = mode.borrow().clone();
        match now {
            Mode::Lose(words) if has(&words) => {
                loses.store(true, Ordering::Release);
                mode.send_replace(Mode::Pass);
            }
            Mode::Hold(words) if has(&words) => {
                let passes = mode.subscribe().wait_for(|mode| *mode == Mode::Pass).await.is_ok();
                waited.store(passes, Ordering::Release);
            }
            _ => {}
        }
        if server.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// Forwards the server's answers to the client.
async fn down(
    mut server: OwnedReadHalf,
    mut client: OwnedWriteHalf,
    late: watch::Sender<u64>,
    [loses, waited]: [Arc<AtomicBool>; 2],
) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = server.read(&mut bytes).await {
        if loses.load(Ordering::Acquire) {
            return;
        }
        if waited.swap(false, Ordering::AcqRel) {
            late.send_modify(|count| *count += 1);
        }
        // The client may have left; the server's answers are still read and counted.
        let _ = client.write_all(&bytes[..count]).await;
    }
}
