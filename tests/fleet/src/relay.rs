//! A network between two ends of a Unix socket or of TCP, in one task: it can stop carrying (everything, the
//! connections open now, or after a number of bytes), carry late, lose packets, or cut a connection in the middle of a
//! frame.

use crate::Dir;
use penstock_link::{Came, Reader, Writer};
use penstock_proto::Address;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Mode of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Carry,
    /// Connections with a lower number silently carry nothing; bytes sent meanwhile arrive when the network is mended.
    Hold {
        below: u64,
    },
    /// Everything arrives later by this time.
    Late(Duration),
    /// One of so many pieces is lost and sent again after this time; later pieces wait, as on a TCP connection.
    Lossy(u64, Duration),
}

/// A running relay; ends with the value.
pub struct Relay {
    socket: PathBuf,
    ways: Ways,
    task: JoinHandle<()>,
}

/// State shared by all connections.
#[derive(Clone)]
struct Ways {
    mode: Arc<watch::Sender<Mode>>,
    cut: Arc<AtomicBool>,
    /// Connection to close.
    cut_there: Arc<Mutex<Option<Cut>>>,
    /// Bytes that went back so far.
    returned: Arc<AtomicU64>,
    /// Number of the connection that was closed, and the bytes that had gone back on all since [`Relay::cut_there`].
    closed: Arc<watch::Sender<Option<(u64, u64)>>>,
    /// Bytes that may still go back before the open connections are held.
    budget: Arc<AtomicU64>,
    /// Number of connections so far.
    opened: Arc<AtomicU64>,
    /// Pieces that came back, and their bytes, by connection.
    answers: Arc<Mutex<BTreeMap<u64, (u64, u64)>>>,
    pieces: Arc<AtomicU64>,
}

/// A connection to close, and when.
struct Cut {
    number: u64,
    /// Bytes that have gone back on all connections so far, and that go back before that.
    from: u64,
    after: u64,
    /// Bytes that go back on the connection itself before that.
    own: u64,
}

impl Relay {
    /// Starts a network that leads to the socket `to`.
    ///
    /// # Panics
    /// If it cannot listen.
    pub fn start(dir: &Dir, name: &str, to: &Path) -> Self {
        Self::at(dir.file(&format!("{name}.relay")), to)
    }

    /// Starts a network in the place of the socket `to`, between it and its clients. It carries bytes, and loses
    /// descriptors beside them.
    ///
    /// # Panics
    /// If there is no socket, or it cannot listen.
    pub fn before(to: &Path) -> Self {
        Self::at(to.to_owned(), &moved(to))
    }

    /// Starts a network as [`Self::before`] does, within one machine: the descriptor beside the first bytes from the
    /// other end goes along.
    ///
    /// # Panics
    /// As [`Self::before`].
    pub fn within(to: &Path) -> Self {
        let behind = Address::Unix(moved(to));
        let listener = UnixListener::bind(to).expect("the relay listens");
        Self::serve(to.to_owned(), Listener::Unix { listener, passes: true }, behind)
    }

    /// Starts a network that leads to the TCP address `to`; returns its own address too.
    ///
    /// # Panics
    /// If it cannot listen.
    pub async fn far(to: SocketAddr) -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("the relay listens");
        let address = listener.local_addr().expect("its address");
        let to = format!("tcp://{to}").parse().expect("an address");
        (Self::serve(PathBuf::new(), Listener::Tcp(listener), to), address)
    }

    fn at(socket: PathBuf, to: &Path) -> Self {
        let listener = UnixListener::bind(&socket).expect("the relay listens");
        Self::serve(socket, Listener::Unix { listener, passes: false }, Address::Unix(to.to_owned()))
    }

    fn serve(socket: PathBuf, listener: Listener, to: Address) -> Self {
        let ways = Ways {
            mode: Arc::new(watch::channel(Mode::Carry).0),
            cut: Arc::default(),
            cut_there: Arc::default(),
            returned: Arc::default(),
            closed: Arc::new(watch::channel(None).0),
            budget: Arc::new(AtomicU64::new(u64::MAX)),
            opened: Arc::default(),
            answers: Arc::default(),
            pieces: Arc::default(),
        };
        let task = tokio::spawn(accept(listener, to, ways.clone()));
        Self { socket, ways, task }
    }

    /// Socket to connect to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Number of connections made so far.
    pub fn opened(&self) -> u64 {
        self.ways.opened.load(Ordering::SeqCst)
    }

    /// Number of pieces that have come back on connection `number`, counted from 0.
    pub fn answers(&self, number: u64) -> u64 {
        self.ways.answers.lock().unwrap_or_else(PoisonError::into_inner).get(&number).map_or(0, |(pieces, _)| *pieces)
    }

    /// Silently carries nothing from now on, in either direction.
    pub fn hold(&self) {
        self.ways.mode.send_replace(Mode::Hold { below: u64::MAX });
    }

    /// Holds the connections that are open now; later ones work.
    pub fn hold_open(&self) {
        self.ways.hold_open();
    }

    /// Holds the open connections as soon as `bytes` bytes have come from the other end.
    pub fn hold_after(&self, bytes: u64) {
        self.ways.budget.store(bytes, Ordering::SeqCst);
    }

    /// Returns true if at least one connection is held.
    pub fn is_holding(&self) -> bool {
        matches!(*self.ways.mode.borrow(), Mode::Hold { .. })
    }

    /// Delays everything by `time`.
    pub fn delay(&self, time: Duration) {
        self.ways.mode.send_replace(Mode::Late(time));
    }

    /// Loses one piece in `one_of`, which comes again after `again_after`.
    pub fn lose(&self, one_of: u64, again_after: Duration) {
        self.ways.mode.send_replace(Mode::Lossy(one_of, again_after));
    }

    /// Mends the network; held bytes arrive.
    pub fn mend(&self) {
        self.ways.budget.store(u64::MAX, Ordering::SeqCst);
        self.ways.mode.send_replace(Mode::Carry);
    }

    /// Closes the connection that carries something next, in the middle of it.
    pub fn cut_next(&self) {
        self.ways.cut.store(true, Ordering::Relaxed);
    }

    /// Closes connection `number`, counted from 0, when `after` further bytes have come back on all connections
    /// together, and `own` on that one since it began.
    pub fn cut_there(&self, number: u64, after: u64, own: u64) {
        let from = self.ways.returned.load(Ordering::SeqCst);
        *self.ways.cut_there.lock().unwrap_or_else(PoisonError::into_inner) = Some(Cut { number, from, after, own });
    }

    /// Number of the connection closed by [`Self::cut_there`], and the bytes that had gone back on all connections since that call.
    pub fn cut(&self) -> Option<(u64, u64)> {
        *self.ways.closed.borrow()
    }
}

/// Moves a socket file out of its place, and returns its new path.
fn moved(socket: &Path) -> PathBuf {
    let moved = socket.with_extension("behind");
    std::fs::rename(socket, &moved).expect("the socket is there");
    moved
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

    /// Number of bytes out of `count` that may go back before it holds.
    fn spend(&self, count: usize) -> usize {
        let spend = |left: u64| (left < u64::MAX).then(|| left.saturating_sub(count as u64));
        match self.budget.fetch_update(Ordering::SeqCst, Ordering::SeqCst, spend) {
            Ok(left) => count.min(left as usize),
            Err(_) => count,
        }
    }

    /// Counts bytes that came back on connection `number`, and closes connections that are due.
    fn returned(&self, number: u64, bytes: usize) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let own = answers.entry(number).or_default();
        *own = (own.0 + 1, own.1 + bytes as u64);
        let returned = self.returned.fetch_add(bytes as u64, Ordering::SeqCst) + bytes as u64;
        let own_bytes = |number: u64| answers.get(&number).map_or(0, |(_, bytes)| *bytes);
        let mut cut = self.cut_there.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = |cut: &mut Cut| returned - cut.from >= cut.after && own_bytes(cut.number) >= cut.own;
        if let Some(cut) = cut.take_if(is_due) {
            self.closed.send_replace(Some((cut.number, returned - cut.from)));
        }
    }

    /// Waits until connection `number` is closed.
    async fn closes(&self, number: u64) {
        let mut closed = self.closed.subscribe();
        // Err: impossible, since this value has the sender.
        let _ = closed.wait_for(|closed| closed.is_some_and(|(closed, _)| closed == number)).await;
    }
}

/// Listening end of a relay.
enum Listener {
    /// Unix socket; `passes`: a descriptor that comes back goes along.
    Unix {
        listener: UnixListener,
        passes: bool,
    },
    Tcp(TcpListener),
}

/// An accepted connection, and its socket where descriptors go along.
struct Near {
    reader: Reader,
    writer: Writer,
    socket: Option<OwnedFd>,
}

impl Listener {
    async fn accept(&self) -> std::io::Result<Near> {
        match self {
            Self::Unix { listener, passes } => {
                let (near, _) = listener.accept().await?;
                let socket = if *passes { Some(near.as_fd().try_clone_to_owned()?) } else { None };
                let (reader, writer) = near.into_split();
                Ok(Near { reader: Box::new(reader), writer: Box::new(writer), socket })
            }
            Self::Tcp(listener) => {
                let (reader, writer) = listener.accept().await?.0.into_split();
                Ok(Near { reader: Box::new(reader), writer: Box::new(writer), socket: None })
            }
        }
    }
}

/// Connects to the other end; also receives descriptors if wanted.
async fn dial(to: &Address, passes: bool) -> std::io::Result<(Reader, Writer, Option<Came>)> {
    match to {
        Address::Unix(path) if passes => {
            penstock_link::dial_unix(path).await.map(|(reader, writer, came)| (reader, writer, Some(came)))
        }
        // A plain stream: encryption is end to end.
        _ => penstock_link::dial(to, None).await.map(|(reader, writer)| (reader, writer, None)),
    }
}

async fn accept(listener: Listener, to: Address, ways: Ways) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok(near) = listener.accept().await else { return };
        let (to, ways) = (to.clone(), ways.clone());
        let number = ways.opened.fetch_add(1, Ordering::SeqCst);
        connections.spawn(async move {
            // An absent worker ends the connection, as without a relay.
            let Ok((far_reader, far_writer, came)) = dial(&to, near.socket.is_some()).await else { return };
            let forth = Way { ways: ways.clone(), number, is_back: false, beside: None };
            let back = Way { ways: ways.clone(), number, is_back: true, beside: near.socket.zip(came) };
            tokio::select! {
                () = ways.closes(number) => {}
                End::Closed = forth.carry(near.reader, far_writer) => {}
                _ = back.carry(far_reader, near.writer) => {}
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

/// End of a direction.
enum End {
    /// The connection is over.
    Closed,
    /// The receiver does not read any more; bytes that it has sent before are still in flight.
    Unheard,
}

/// One direction of one connection.
struct Way {
    ways: Ways,
    number: u64,
    is_back: bool,
    /// Until the first delivery: the socket for a descriptor, and its source.
    beside: Option<(OwnedFd, Came)>,
}

impl Way {
    /// Carries bytes until either end closes.
    async fn carry(mut self, mut from: Reader, mut to: Writer) -> End {
        let mut modes = self.ways.mode.subscribe();
        let mut bytes = vec![0; 16 * 1024];
        loop {
            let Ok(count @ 1..) = from.read(&mut bytes).await else { return End::Closed };
            if self.is_back {
                self.ways.returned(self.number, count);
            }
            let (now, later) = bytes[..count].split_at(if self.is_back { self.ways.spend(count) } else { count });
            if let Err(end) = self.deliver(now, &mut to, &mut modes).await {
                return end;
            }
            if !later.is_empty() {
                self.ways.hold_open();
                if let Err(end) = self.deliver(later, &mut to, &mut modes).await {
                    return end;
                }
            }
        }
    }

    async fn deliver(&mut self, bytes: &[u8], to: &mut Writer, modes: &mut watch::Receiver<Mode>) -> Result<(), End> {
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
                modes.wait_for(carries).await.map_err(|_| End::Closed)?;
            }
        }
        let is_cut = self.ways.cut.swap(false, Ordering::Relaxed);
        let carried = if is_cut { bytes.len() / 2 } else { bytes.len() };
        let sent = self.pass(&bytes[..carried]);
        to.write_all(&bytes[sent..carried]).await.map_err(|_| End::Unheard)?;
        if is_cut { Err(End::Closed) } else { Ok(()) }
    }

    /// Sends bytes, or the first of them, with the descriptor that came beside them; returns their number.
    fn pass(&mut self, bytes: &[u8]) -> usize {
        let Some((socket, came)) = self.beside.take_if(|_| !bytes.is_empty()) else { return 0 };
        let Some(descriptor) = came.take() else { return 0 };
        // Err: the near end is closed, which the following bytes find out.
        penstock_link::send_beside(socket.as_fd(), bytes, descriptor.as_fd()).unwrap_or(0)
    }
}
