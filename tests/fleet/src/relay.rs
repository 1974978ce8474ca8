//! A network between two ends of a Unix socket, in one task: it can stop carrying (everything, what is open now, or after so many bytes), carry
//! late, lose packets, or cut a connection in the middle of a frame.

use crate::Dir;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What the network does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Carry,
    /// Nothing arrives on connections with a lower number and nobody is told; what was sent meanwhile arrives when it is mended.
    Hold {
        below: u64,
    },
    /// Everything arrives so much later.
    Late(Duration),
    /// One of so many pieces is lost and sent again after so long; what comes behind it waits, as on a TCP connection.
    Lossy(u64, Duration),
}

/// See the module header. Ends with the value.
pub struct Relay {
    socket: PathBuf,
    ways: Ways,
    task: JoinHandle<()>,
}

/// What all connections share.
#[derive(Clone)]
struct Ways {
    mode: Arc<watch::Sender<Mode>>,
    cut: Arc<AtomicBool>,
    /// Bytes that may still go back before it holds what is open.
    budget: Arc<AtomicU64>,
    /// Connections so far.
    opened: Arc<AtomicU64>,
    pieces: Arc<AtomicU64>,
}

impl Relay {
    /// A network that leads to the socket `to`.
    ///
    /// # Panics
    /// If it cannot listen.
    pub fn start(dir: &Dir, name: &str, to: &Path) -> Self {
        Self::at(dir.file(&format!("{name}.relay")), to)
    }

    /// A network between the socket `to` and whoever connects to it: it takes its place.
    ///
    /// # Panics
    /// If there is no socket, or it cannot listen.
    pub fn before(to: &Path) -> Self {
        let moved = to.with_extension("behind");
        std::fs::rename(to, &moved).expect("the socket is there");
        Self::at(to.to_owned(), &moved)
    }

    fn at(socket: PathBuf, to: &Path) -> Self {
        let listener = UnixListener::bind(&socket).expect("the relay listens");
        let ways = Ways {
            mode: Arc::new(watch::channel(Mode::Carry).0),
            cut: Arc::default(),
            budget: Arc::new(AtomicU64::new(u64::MAX)),
            opened: Arc::default(),
            pieces: Arc::default(),
        };
        let task = tokio::spawn(accept(listener, to.to_owned(), ways.clone()));
        Self { socket, ways, task }
    }

    /// Where to connect to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Connections that were made so far.
    pub fn opened(&self) -> u64 {
        self.ways.opened.load(Ordering::SeqCst)
    }

    /// Carries nothing from now on, in neither direction, and tells nobody.
    pub fn hold(&self) {
        self.ways.mode.send_replace(Mode::Hold { below: u64::MAX });
    }

    /// The same for the connections that are open now; those that come work.
    pub fn hold_open(&self) {
        self.ways.hold_open();
    }

    /// The same as soon as so many bytes have come from the other end.
    pub fn hold_after(&self, bytes: u64) {
        self.ways.budget.store(bytes, Ordering::SeqCst);
    }

    /// Whether it carries nothing, on some connection at least.
    pub fn is_holding(&self) -> bool {
        matches!(*self.ways.mode.borrow(), Mode::Hold { .. })
    }

    /// Carries everything so much later.
    pub fn delay(&self, time: Duration) {
        self.ways.mode.send_replace(Mode::Late(time));
    }

    /// Loses one piece of so many, which comes again after so long.
    pub fn lose(&self, one_of: u64, again_after: Duration) {
        self.ways.mode.send_replace(Mode::Lossy(one_of, again_after));
    }

    /// Carries again; what was held arrives.
    pub fn mend(&self) {
        self.ways.budget.store(u64::MAX, Ordering::SeqCst);
        self.ways.mode.send_replace(Mode::Carry);
    }

    /// Closes the connection that carries something next, in the middle of it.
    pub fn cut_next(&self) {
        self.ways.cut.store(true, Ordering::Relaxed);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Ways {
    fn hold_open(&self) {
        self.mode.send_replace(Mode::Hold { below: self.opened.load(Ordering::SeqCst) });
    }

    /// How many of `count` bytes may go back before it holds.
    fn spend(&self, count: usize) -> usize {
        let spend = |left: u64| (left < u64::MAX).then(|| left.saturating_sub(count as u64));
        match self.budget.fetch_update(Ordering::SeqCst, Ordering::SeqCst, spend) {
            Ok(left) => count.min(left as usize),
            Err(_) => count,
        }
    }
}

async fn accept(listener: UnixListener, to: PathBuf, ways: Ways) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok((near, _)) = listener.accept().await else { return };
        let (to, ways) = (to.clone(), ways.clone());
        let number = ways.opened.fetch_add(1, Ordering::SeqCst);
        connections.spawn(async move {
            // A worker that is not there: the connection ends, as it would without a network between.
            let Ok(far) = UnixStream::connect(to).await else { return };
            let (near_reader, near_writer) = near.into_split();
            let (far_reader, far_writer) = far.into_split();
            let [forth, back] = [false, true].map(|is_back| Way { ways: ways.clone(), number, is_back });
            tokio::select! {
                () = forth.carry(near_reader, far_writer) => {}
                () = back.carry(far_reader, near_writer) => {}
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

/// One direction of one connection.
struct Way {
    ways: Ways,
    number: u64,
    is_back: bool,
}

impl Way {
    /// Until either end closes.
    async fn carry(self, mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
        let mut modes = self.ways.mode.subscribe();
        let mut bytes = vec![0; 16 * 1024];
        loop {
            let Ok(count @ 1..) = from.read(&mut bytes).await else { return };
            let (now, later) = bytes[..count].split_at(if self.is_back { self.ways.spend(count) } else { count });
            if !self.deliver(now, &mut to, &mut modes).await {
                return;
            }
            if !later.is_empty() {
                self.ways.hold_open();
                if !self.deliver(later, &mut to, &mut modes).await {
                    return;
                }
            }
        }
    }

    /// False: the connection is over.
    async fn deliver(
        &self,
        bytes: &[u8],
        to: &mut (impl AsyncWrite + Unpin),
        modes: &mut watch::Receiver<Mode>,
    ) -> bool {
        let mode = *modes.borrow_and_update();
        match mode {
            Mode::Carry => {}
            Mode::Late(time) => tokio::time::sleep(time).await,
            Mode::Lossy(one_of, again_after) => {
                if (self.ways.pieces.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(one_of) {
                    tokio::time::sleep(again_after).await;
                }
            }
            Mode::Hold { .. } => {
                let carries = |mode: &Mode| !matches!(mode, Mode::Hold { below } if self.number < *below);
                if modes.wait_for(carries).await.is_err() {
                    return false;
                }
            }
        }
        let is_cut = self.ways.cut.swap(false, Ordering::Relaxed);
        let carried = if is_cut { bytes.len() / 2 } else { bytes.len() };
        to.write_all(&bytes[..carried]).await.is_ok() && !is_cut
    }
}
