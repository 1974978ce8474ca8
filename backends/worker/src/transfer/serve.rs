//! Serving side of a transfer: sends blocks that it has, or computes them first.

use super::lanes::{LanesOut, end};
use super::link::{Fault, GREETING_DEADLINE, Link, Purpose, Question};
use super::memory::{Filled, Lent};
use super::{PREFILL_DEADLINE, Peers};
use crate::inbox::Command;
use crate::listen::{Incoming, Listener};
use crate::strangers::Stranger;
use bytes::Bytes;
use penstock_engine::{Drawing, PageSink, Prefill};
use penstock_proto::frames::Guide;
use penstock_proto::transfer::{
    Alive, Answer, AnswerBody, Ask, AskBody, Computed, End, First, Page, Prefill as WantedPrefill, Refused,
};
use penstock_proto::{GatewayId, WorkId};
use penstock_shm::Ring;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

/// Most pages that wait for one socket.
pub(super) const PAGES_OUT_MAX: usize = 32;

/// Longest time that a place is kept: no asker waits for pages that long.
const PLACE_DEADLINE: Duration = PREFILL_DEADLINE.saturating_add(Duration::from_secs(5));

/// Silence after which a sign of life is sent.
const ALIVE: Duration = Duration::from_millis(250);

/// Age of a step in seconds above which it is no sign of life.
const STEP_SECONDS_MAX: f64 = 20.0;

/// Accepts connections for ever; each connection is a task.
pub(crate) async fn accept(listener: Listener, peers: Arc<Peers>) {
    loop {
        let accepted = match &listener {
            Listener::Unix { listener, .. } => listener.accept().await.map(|(stream, _)| {
                let ours = rustix::process::geteuid().as_raw();
                let known = stream.peer_cred().is_ok_and(|peer| peer.uid() == ours || peer.uid() == 0);
                // Err: out of descriptors; pages go as bytes.
                let socket = stream.as_fd().try_clone_to_owned().ok().filter(|_| peers.shares_memory);
                let (reader, writer) = stream.into_split();
                known.then(|| Caller { incoming: Incoming::Unix(Box::new(reader), Box::new(writer)), socket })
            }),
            Listener::Tcp { listener, .. } => {
                let caller = |stream| Caller { incoming: Incoming::Tcp(stream), socket: None };
                listener.accept().await.map(|(stream, _)| Some(caller(stream)))
            }
        };
        match accepted {
            Ok(Some(caller)) => {
                let (peers, stranger) = (Arc::clone(&peers), peers.strangers.enter());
                tokio::spawn(async move {
                    if let Err(why) = serve(&peers, caller, stranger).await {
                        debug!(%why, "KV transfer from this worker ended early");
                    }
                });
            }
            Ok(None) => debug!("transfer connection refused: the peer runs as another user"),
            Err(error) => {
                warn!(%error, "a transfer connection could not be accepted");
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// An accepted connection of another worker, before its greeting.
struct Caller {
    incoming: Incoming,
    /// Socket of the connection, where descriptors can go beside the bytes; until the greeting.
    socket: Option<OwnedFd>,
}

/// Answers the greeting on a connection and returns the connection's purpose.
async fn greeted(peers: &Peers, caller: Caller) -> Result<(Link, Purpose), Fault> {
    let Caller { incoming, socket } = caller;
    let prove = incoming.must_prove();
    let (reader, writer) = incoming.open(peers.tls.as_ref()).await?;
    let mut link = Link::new(reader, writer);
    let key = peers.key.as_ref().filter(|_| prove);
    if prove && key.is_none() {
        return Err(Fault::Proof);
    }
    let greeting = timeout(GREETING_DEADLINE, link.welcome(peers, key, socket));
    let purpose = greeting.await.map_err(|_| Fault::Late)??;
    Ok((link, purpose))
}

async fn serve(peers: &Arc<Peers>, caller: Caller, stranger: Stranger) -> Result<(), Fault> {
    let (mut link, purpose) = stranger.within(greeted(peers, caller)).await.ok_or(Fault::Displaced)??;
    let Question { body, ring, joining } = match purpose {
        Purpose::Question(question) => *question,
        Purpose::Joins(ticket) => {
            let Some(mut late) = peers.meeting.join(&ticket, link) else { return Ok(()) };
            // The transfer has sent its last page since the welcome.
            return end(&mut late).await;
        }
    };
    let Ok(_place) = peers.served.try_acquire() else {
        return link.answer(AnswerBody::Refused(Refused { message: "too many transfers are under way".into() })).await;
    };
    let (sink, mut stream) = stream(peers, ring, LanesOut::new(peers, joining));
    let (taken, answer) = oneshot::channel();
    let command = match body {
        AskBody::Fetch(fetch) => {
            let hashes = fetch.names().ok_or(Fault::Unexpected)?;
            Command::Send { hashes, sink: Box::new(sink), taken }
        }
        AskBody::Prefill(wanted) | AskBody::AdaptedPrefill(wanted) => {
            let gateway = GatewayId(wanted.gateway);
            compile(peers, wanted.grammar.as_ref()).await;
            Command::Prefill { prefill: Box::new(prefill(wanted)), gateway, sink: Box::new(sink), taken }
        }
        AskBody::Greeting(_) | AskBody::Proof(_) | AskBody::Taken(_) => return Err(Fault::Unexpected),
    };
    peers.tell(command).await?;
    let id = match taken_as(peers, &mut link, answer).await? {
        Ok(id) => id,
        Err(message) => return link.answer(AnswerBody::Refused(Refused { message })).await,
    };
    let sent = timeout(PLACE_DEADLINE, stream.run(peers, &mut link)).await.unwrap_or(Err(Fault::Late));
    if sent.is_err() {
        // The asker is gone, or does not read: the engine stops the work for it.
        let _ = peers.tell(Command::Stop { id }).await;
    }
    sent
}

/// Compiles the grammar of a drawn token, if it is not known yet, so that the engine's thread does not have to.
async fn compile(peers: &Peers, guide: Option<&Guide>) {
    let source = guide.and_then(penstock_engine::source);
    let grammars = peers.about.get().and_then(|about| about.grammars.clone());
    if let Some((grammars, source)) = grammars.zip(source)
        && grammars.peek(&source).is_none()
    {
        // Err: the process is ending. A refusal is remembered, and the engine reports it.
        let _ = tokio::task::spawn_blocking(move || drop(grammars.get(&source))).await;
    }
}

/// Number under which the engine has taken a question, or the reason of its refusal. The engine may be in a step: a
/// question whose asker leaves meanwhile is not begun.
async fn taken_as(
    peers: &Peers,
    link: &mut Link,
    mut answer: oneshot::Receiver<Result<WorkId, String>>,
) -> Result<Result<WorkId, String>, Fault> {
    let why = loop {
        tokio::select! {
            answer = &mut answer => return answer.map_err(|_| Fault::Ending),
            _ = link.incoming.next::<Ask>() => break Fault::Closed,
            () = sleep(ALIVE) => {
                if let Err(why) = live(peers, link).await {
                    break why;
                }
            }
        }
    };
    answer.close();
    // Both may have happened at once.
    if let Ok(Ok(id)) = answer.try_recv() {
        let _ = peers.tell(Command::Stop { id }).await;
    }
    Err(why)
}

/// Sends a sign of life, unless the engine hangs.
async fn live(peers: &Peers, link: &mut Link) -> Result<(), Fault> {
    let age = peers.age.get().map_or(0.0, |age| age.seconds());
    if age < STEP_SECONDS_MAX { link.answer(AnswerBody::Alive(Alive {})).await } else { Ok(()) }
}

fn prefill(wanted: WantedPrefill) -> Prefill {
    let WantedPrefill {
        prompt,
        salt,
        priority,
        turn,
        first,
        blocks,
        choices,
        sampling,
        emitted,
        grammar,
        adapter,
        gateway: _,
    } = wanted;
    let drawing = |sampling| Drawing { sampling, choices, emitted: emitted as usize, grammar };
    Prefill {
        id: WorkId::default(),
        prompt,
        salt,
        priority,
        turn,
        first: first as usize,
        blocks: blocks as usize,
        draw: sampling.map(drawing),
        adapter,
    }
}

/// State that the engine's sink and the socket's task share, beside the queue of pages.
#[derive(Default)]
struct Shared {
    computed: AtomicUsize,
    /// First tokens, drawn and not sent so far.
    first: Mutex<Option<First>>,
    /// Signal that first tokens are there, which do not wait behind pages.
    drawn: Notify,
    complete: AtomicBool,
    /// True if the engine found no room and waits for a nudge.
    is_full: AtomicBool,
}

/// An outgoing page, ready to be sent: block, layer, and filled bytes.
pub(super) struct PageOut {
    pub(super) block: usize,
    pub(super) layer: usize,
    pub(super) bytes: Filled,
}

/// Engine's end of an outgoing transfer: queues pages for the socket's task.
struct Sink {
    pages: mpsc::Sender<PageOut>,
    shared: Arc<Shared>,
    page_bytes: usize,
    ring: Option<Ring>,
}

/// Socket's end of an outgoing transfer: takes pages from the queue and sends them.
struct Stream {
    pages: mpsc::Receiver<PageOut>,
    shared: Arc<Shared>,
    /// Number of `computed` blocks that was sent.
    told: usize,
    lent: Lent,
    lanes: LanesOut,
}

fn stream(peers: &Peers, ring: Option<Ring>, lanes: LanesOut) -> (Sink, Stream) {
    let (sender, pages) = mpsc::channel(PAGES_OUT_MAX);
    let shared = Arc::new(Shared::default());
    let page_bytes = peers.about.get().map_or(0, |about| about.page_bytes);
    let sink = Sink { pages: sender, shared: Arc::clone(&shared), page_bytes, ring };
    (sink, Stream { pages, shared, told: 0, lent: Lent::new(), lanes })
}

impl Sink {
    fn has_place(&self) -> bool {
        self.pages.capacity() > 0 && self.ring.as_ref().is_none_or(Ring::has_free)
    }
}

impl PageSink for Sink {
    fn has_room(&mut self) -> bool {
        if self.has_place() {
            return true;
        }
        self.shared.is_full.store(true, Ordering::SeqCst);
        // Room may have appeared in between, without a nudge.
        self.has_place()
    }

    fn page(&mut self, block: usize, layer: usize, fill: &mut dyn FnMut(&mut [u8])) {
        let mut bytes = Filled::room(self.ring.as_ref(), self.page_bytes);
        fill(&mut bytes);
        // Err: the asker has gone, and the socket's end reports it.
        let _ = self.pages.try_send(PageOut { block, layer, bytes });
    }

    fn computed(&mut self, blocks: usize) {
        self.shared.computed.store(blocks, Ordering::SeqCst);
    }

    fn first(&mut self, first: First) {
        *self.shared.first.lock().unwrap_or_else(PoisonError::into_inner) = Some(first);
        self.shared.drawn.notify_one();
    }

    fn end(&mut self, complete: bool) {
        self.shared.complete.store(complete, Ordering::SeqCst);
    }
}

impl Stream {
    /// Sends pages to the asker until the engine drops its end, or the asker goes away.
    async fn run(&mut self, peers: &Peers, link: &mut Link) -> Result<(), Fault> {
        loop {
            tokio::select! {
                page = timeout(ALIVE, self.pages.recv()) => match page {
                    Ok(Some(page)) => self.page(peers, link, page).await?,
                    Ok(None) => break,
                    Err(_) if self.lent.is_overdue() => return Err(Fault::Slow),
                    Err(_) => {
                        self.tell(link).await?;
                        live(peers, link).await?;
                    }
                },
                changed = self.lanes.change() => changed?,
                () = self.shared.drawn.notified() => self.tell(link).await?,
                said = link.incoming.next::<Ask>() => match said?.body {
                    Some(AskBody::Taken(taken)) => {
                        self.lent.back(&taken)?;
                        self.nudge(peers).await?;
                    }
                    // A second question on a connection is an error and ends it.
                    _ => return Err(Fault::Closed),
                },
            }
        }
        self.lanes.finish().await?;
        self.tell(link).await?;
        let blocks = self.shared.computed.load(Ordering::SeqCst) as u32;
        let complete = self.shared.complete.load(Ordering::SeqCst);
        link.answer(AnswerBody::End(End { blocks, complete })).await
    }

    /// Sends news other than pages: first tokens and computed blocks.
    async fn tell(&mut self, link: &mut Link) -> Result<(), Fault> {
        let first = self.shared.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(first) = first {
            link.answer(AnswerBody::First(first)).await?;
        }
        let computed = self.shared.computed.load(Ordering::SeqCst);
        if computed > self.told {
            self.told = computed;
            link.answer(AnswerBody::Computed(Computed { blocks: computed as u32 })).await?;
        }
        Ok(())
    }

    /// Nudges the engine about new room, if it waits for that.
    async fn nudge(&self, peers: &Peers) -> Result<(), Fault> {
        if self.shared.is_full.swap(false, Ordering::SeqCst) { peers.tell(Command::Nudge).await } else { Ok(()) }
    }

    async fn page(&mut self, peers: &Peers, link: &mut Link, page: PageOut) -> Result<(), Fault> {
        self.nudge(peers).await?;
        // Whether a page was computed before it was sent tells the asker the cost of the link.
        self.tell(link).await?;
        let Some(PageOut { block, layer, bytes }) = self.lanes.deal(page) else { return self.tell(link).await };
        let (block, layer, size) = (block as u32, layer as u32, bytes.len() as u64);
        let page = match bytes {
            Filled::Bytes(bytes) => Page::new(block, layer, Bytes::from(bytes)),
            Filled::Slot(slot) => {
                let page = Page::in_slot(block, layer, slot.number(), &slot);
                self.lent.lend(slot);
                page
            }
        };
        link.outgoing.send(&Answer { body: Some(AnswerBody::Page(page)) }).await?;
        peers.meters.bytes_out.fetch_add(size, Ordering::Relaxed);
        self.tell(link).await
    }
}
