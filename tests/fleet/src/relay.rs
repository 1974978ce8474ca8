//! A network between two ends of a Unix socket or of TCP, in one task: it can stop carrying (everything, what is open now, or after so many
//! bytes), carry late, lose packets, or cut a connection in the middle of a frame.

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
    /// The number of a connection, and the bytes that may go back on all of them before it is closed.
    cut_there: Arc<Mutex<Option<(u64, u64)>>>,
    /// Bytes that went back so far.
    returned: Arc<AtomicU64>,
    /// The number of the one that was closed.
    closed: Arc<watch::Sender<Option<u64>>>,
    /// Bytes that may still go back before it holds what is open.
    budget: Arc<AtomicU64>,
    /// Connections so far.
    opened: Arc<AtomicU64>,
    /// Pieces that came back, by connection.
    answers: Arc<Mutex<BTreeMap<u64, u64>>>,
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

    /// A network between the socket `to` and whoever connects to it: it takes its place. It carries bytes, and loses descriptors beside them.
    ///
    /// # Panics
    /// If there is no socket, or it cannot listen.
    pub fn before(to: &Path) -> Self {
        Self::at(to.to_owned(), &moved(to))
    }

    /// The same, within one machine: the descriptor that comes beside the first bytes from the other end goes along.
    ///
    /// # Panics
    /// As [`Self::before`].
    pub fn within(to: &Path) -> Self {
        let behind = Address::Unix(moved(to));
        let listener = UnixListener::bind(to).expect("the relay listens");
        Self::serve(to.to_owned(), Listener::Unix { listener, passes: true }, behind)
    }

    /// A network that leads to the TCP address `to`, and where it listens itself.
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

    /// Where to connect to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Connections that were made so far.
    pub fn opened(&self) -> u64 {
        self.ways.opened.load(Ordering::SeqCst)
    }

    /// Pieces that have come back on the connection of that number, counted from 0.
    pub fn answers(&self, number: u64) -> u64 {
        self.ways.answers.lock().unwrap_or_else(PoisonError::into_inner).get(&number).copied().unwrap_or(0)
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

    /// Closes the connection of that number, counted from 0, when so many bytes more have come back on all of them together.
    pub fn cut_there(&self, number: u64, after: u64) {
        let at = self.ways.returned.load(Ordering::SeqCst) + after;
        *self.ways.cut_there.lock().unwrap_or_else(PoisonError::into_inner) = Some((number, at));
    }

    /// The connection that was closed so.
    pub fn cut(&self) -> Option<u64> {
        *self.ways.closed.borrow()
    }
}

/// Makes room where a socket is, and says where that is now.
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

    /// How many of `count` bytes may go back before it holds.
    fn spend(&self, count: usize) -> usize {
        let spend = |left: u64| (left < u64::MAX).then(|| left.saturating_sub(count as u64));
        match self.budget.fetch_update(Ordering::SeqCst, Ordering::SeqCst, spend) {
            Ok(left) => count.min(left as usize),
            Err(_) => count,
        }
    }

    /// So many bytes have come back on the connection of that number: closes what is to be closed then.
    fn returned(&self, number: u64, bytes: usize) {
        *self.answers.lock().unwrap_or_else(PoisonError::into_inner).entry(number).or_default() += 1;
        let returned = self.returned.fetch_add(bytes as u64, Ordering::SeqCst) + bytes as u64;
        let mut cut = self.cut_there.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((number, _)) = cut.take_if(|(_, at)| returned >= *at) {
            self.closed.send_replace(Some(number));
        }
    }

    /// Until the connection of that number is closed.
    async fn closes(&self, number: u64) {
        let mut closed = self.closed.subscribe();
        // Err: never, since this value has the sender.
        let _ = closed.wait_for(|closed| *closed == Some(number)).await;
    }
}

/// Where it listens.
enum Listener {
    /// `passes`: a descriptor that comes back goes along.
    Unix {
        listener: UnixListener,
        passes: bool,
    },
    Tcp(TcpListener),
}

/// A connection that came in, and its socket where descriptors go along.
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

/// Connects to the other end; with what comes beside its bytes, if that is wanted.
async fn dial(to: &Address, passes: bool) -> std::io::Result<(Reader, Writer, Option<Came>)> {
    match to {
        Address::Unix(path) if passes => {
            penstock_link::dial_unix(path).await.map(|(reader, writer, came)| (reader, writer, Some(came)))
        }
        // A plain stream: what is encrypted is so from end to end.
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
            // A worker that is not there: the connection ends, as it would without a network between.
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

/// How a direction ends.
enum End {
    /// The connection is over.
    Closed,
    /// Who should get it does not read any more; what it has said before is still on its way.
    Unheard,
}

/// One direction of one connection.
struct Way {
    ways: Ways,
    number: u64,
    is_back: bool,
    /// Until something was delivered: where a descriptor goes, and whence it may come.
    beside: Option<(OwnedFd, Came)>,
}

impl Way {
    /// Until either end closes.
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

    /// Sends bytes, or the first of them, with the descriptor that came with them, if one did; says how many.
    fn pass(&mut self, bytes: &[u8]) -> usize {
        let Some((socket, came)) = self.beside.take_if(|_| !bytes.is_empty()) else { return 0 };
        let Some(descriptor) = came.take() else { return 0 };
        // Err: the near end is closed, which the bytes that follow find out.
        penstock_link::send_beside(socket.as_fd(), bytes, descriptor.as_fd()).unwrap_or(0)
    }
}
