//! Asking side of a transfer: connects, greets, asks, and hands every page on to the engine.

use super::lanes::{LanesIn, Part, Ticket};
use super::link::{Fault, GREETING_DEADLINE, Link};
use super::memory::Memory;
use super::{About, Peers};
use crate::config::random;
use crate::inbox::{Command, Health, PageIn, Report};
use penstock_link::Came;
use penstock_proto::transfer::{Answer, AnswerBody, Ask, AskBody, Page};
use penstock_proto::{Address, WorkId};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Silence after which a holder counts as dead: a live one sends ten signs of life in that time.
const SILENCE: Duration = Duration::from_millis(2500);

/// One incoming transfer, from its question to the holder until the report.
pub(crate) struct Errand {
    pub(crate) id: WorkId,
    pub(crate) from: String,
    pub(crate) question: AskBody,
    /// Number of blocks that the question asks for.
    pub(crate) blocks: usize,
    pub(crate) deadline: Duration,
}

/// Counts and times of an incoming transfer, gathered while it runs.
#[derive(Default)]
struct Progress {
    report: Report,
    first: Option<Instant>,
    last: Option<Instant>,
    /// Time at which the holder had computed everything.
    computed: Option<Instant>,
    /// Time of the first page after that; the bytes of later pages are timed from here to the last.
    moving: Option<Instant>,
}

/// Runs an errand to its end and reports the result to the engine's thread.
pub(crate) async fn run(peers: Arc<Peers>, errand: Errand) {
    let mut running = Running { peers: &peers, progress: Some(Progress::default()) };
    let (id, deadline) = (errand.id, errand.deadline);
    let ended = timeout(deadline, transfer(&peers, errand, running.progress.get_or_insert_default())).await;
    let why = ended.unwrap_or(Err(Fault::Late)).err();
    let is_lost = why.as_ref().is_some_and(|why| !matches!(why, Fault::Late | Fault::Ending));
    let health = match &why {
        None | Some(Fault::Partly(_)) => Health::Good,
        Some(Fault::Ending) => Health::Unknown,
        Some(_) => Health::Bad,
    };
    let report = Report { is_lost, health, ..running.end(why.map_or_else(String::new, |why| crate::chain(&why))) };
    // Err: the engine has ended, and the waiting request with it.
    let _ = peers.tell(Command::Received { id, report }).await;
}

/// A transfer in progress. One that is dropped early, because the engine's thread has ended it, is counted too.
struct Running<'p> {
    peers: &'p Peers,
    /// Progress; taken when the transfer has ended.
    progress: Option<Progress>,
}

impl Running<'_> {
    fn end(mut self, why: String) -> Report {
        let report = self.progress.take().unwrap_or_default().end(why);
        let meters = &self.peers.meters;
        meters.received(&report, if report.why.is_empty() { &meters.completed } else { &meters.failed });
        report
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(progress) = self.progress.take() {
            let meters = &self.peers.meters;
            meters.received(&progress.end(String::new()), &meters.cancelled);
        }
    }
}

async fn transfer(peers: &Arc<Peers>, errand: Errand, progress: &mut Progress) -> Result<(), Fault> {
    let about = peers.about.get().ok_or(Fault::Ending)?;
    progress.report.is_prefill = matches!(errand.question, AskBody::Prefill(_) | AskBody::AdaptedPrefill(_));
    let ticket = several(peers, &errand.from)?;
    let (mut link, mut memory) = greeted(peers, &errand.from, ticket.map(Part::First)).await?;
    let more = ticket.map_or(0, |_| peers.streams - 1);
    let mut lanes = LanesIn::open(peers, &errand.from, ticket.unwrap_or_default(), more);
    link.outgoing.send(&Ask { body: Some(errand.question), through_memory: memory.is_some() }).await?;
    let place = Place { id: errand.id, blocks: errand.blocks };
    loop {
        let answer = tokio::select! {
            answer = timeout(SILENCE, link.incoming.next::<Answer>()) => answer.map_err(|_| Fault::Silent)??,
            Some(page) = lanes.next() => {
                take(peers, about, &place, page?, Source::Beside, progress).await?;
                continue;
            }
        };
        match answer.body.ok_or(Fault::Unexpected)? {
            AnswerBody::Page(page) => {
                take(peers, about, &place, page, Source::First(memory.as_mut()), progress).await?;
                if let Some(taken) = memory.as_mut().and_then(Memory::taken) {
                    // Err: the holder has finished, or has died; the next read tells which.
                    let _ = link.say(AskBody::Taken(taken)).await;
                }
            }
            AnswerBody::Computed(computed) => progress.vouch(computed.blocks as usize, errand.blocks),
            AnswerBody::First(first) => peers.tell(Command::First { id: place.id, first }).await?,
            AnswerBody::Alive(_) => {}
            AnswerBody::End(end) => {
                progress.vouch(end.blocks as usize, errand.blocks);
                let all = end.complete && progress.report.vouched == errand.blocks;
                let bytes = (errand.blocks * about.block_bytes) as u64;
                // Once everything is there, nobody waits for connections that still try to join.
                while !(all && progress.report.bytes >= bytes)
                    && let Some(page) = timeout(SILENCE, lanes.next()).await.map_err(|_| Fault::Silent)?
                {
                    take(peers, about, &place, page?, Source::Beside, progress).await?;
                }
                return if all { Ok(()) } else { Err(Fault::Partly(progress.report.vouched)) };
            }
            AnswerBody::Refused(refused) => return Err(Fault::Refused(refused.message)),
            AnswerBody::Challenge(_) | AnswerBody::Welcome(_) => return Err(Fault::Unexpected),
        }
    }
}

/// Transfer of a page, and its number of requested blocks.
struct Place {
    id: WorkId,
    blocks: usize,
}

/// Connection of the transfer on which a page came.
enum Source<'m> {
    /// The first connection, which may have shared memory.
    First(Option<&'m mut Memory>),
    /// One of the further connections, which carry pages only.
    Beside,
}

/// Way by which a page's bytes came: the first socket, shared memory, or a further connection.
#[derive(Clone, Copy)]
enum Way {
    Socket,
    Memory,
    Stream,
}

/// Checks a page and hands it on; waits while the engine is busy.
async fn take(
    peers: &Peers,
    about: &About,
    place: &Place,
    page: Page,
    source: Source<'_>,
    progress: &mut Progress,
) -> Result<(), Fault> {
    progress.arrived();
    let room = Arc::clone(&peers.room).acquire_owned().await.map_err(|_| Fault::Ending)?;
    let way = match &source {
        Source::Beside => Way::Stream,
        Source::First(_) if page.slot.is_some() => Way::Memory,
        Source::First(_) => Way::Socket,
    };
    // Copied out of the slot first, so that the checked bytes are the used ones.
    let page = match source {
        Source::First(Some(memory)) => memory.copy(page)?,
        Source::First(None) | Source::Beside => page,
    };
    let (block, layer) = (page.block as usize, page.layer as usize);
    let fits = block < place.blocks && page.bytes.len() == about.page_bytes;
    if !fits || !page.is_whole() {
        return Err(Fault::BadPage);
    }
    progress.took(page.bytes.len() as u64, way);
    let page = PageIn { id: place.id, block, layer, bytes: page.bytes, _room: room };
    peers.tell(Command::Page(page)).await
}

/// Ticket for a transfer of several connections, where it is to have them: on TCP.
fn several(peers: &Peers, from: &str) -> Result<Option<Ticket>, Fault> {
    let is_far = matches!(from.parse(), Ok(Address::Tcp(_)));
    let ticket = || random().map_err(|error| Fault::Other(error.to_string()));
    if is_far && peers.streams > 1 { ticket().map(Some) } else { Ok(None) }
}

/// Opens a connection to a holder, ready for a question, with the memory that came with it.
pub(super) async fn greeted(peers: &Peers, from: &str, part: Option<Part>) -> Result<(Link, Option<Memory>), Fault> {
    let about = peers.about.get().ok_or(Fault::Ending)?;
    let address = from.parse::<Address>().map_err(|error| Fault::Other(error.to_string()))?;
    let (mut link, came) = connect(peers, &address).await?;
    // On TCP both ends have to prove the pool key.
    let prove = matches!(address, Address::Tcp(_));
    let key = peers.key.as_ref().filter(|_| prove);
    if prove && key.is_none() {
        return Err(Fault::Proof);
    }
    let greeting = timeout(GREETING_DEADLINE, link.greet(about, key, came.as_ref(), part));
    let memory = greeting.await.map_err(|_| Fault::Silent)??;
    Ok((link, memory))
}

async fn connect(peers: &Peers, address: &Address) -> Result<(Link, Option<Came>), Fault> {
    match address {
        Address::Unix(path) if peers.shares_memory => {
            let (reader, writer, came) = penstock_link::dial_unix(path).await?;
            Ok((Link::new(reader, writer), Some(came)))
        }
        _ => {
            let (reader, writer) = penstock_link::dial(address, peers.tls.as_ref()).await?;
            Ok((Link::new(reader, writer), None))
        }
    }
}

impl Progress {
    /// Records the number of requested blocks that the holder vouches for; the number never falls.
    fn vouch(&mut self, blocks: usize, asked: usize) {
        self.report.vouched = self.report.vouched.max(blocks.min(asked));
        if self.report.vouched == asked {
            self.computed.get_or_insert_with(Instant::now);
        }
    }

    /// Records the arrival of a page.
    fn arrived(&mut self) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
    }

    /// Records an accepted page of `bytes` bytes, and the way by which they came.
    fn took(&mut self, bytes: u64, way: Way) {
        self.report.bytes += bytes;
        match way {
            Way::Socket => {}
            Way::Memory => self.report.memory_bytes += bytes,
            Way::Stream => self.report.stream_bytes += bytes,
        }
        match (self.computed, self.moving) {
            (None, _) => {}
            (Some(_), None) => self.moving = self.last,
            (Some(_), Some(_)) => self.report.moved_bytes += bytes,
        }
    }

    fn end(self, why: String) -> Report {
        let Self { report, first, last, computed, moving } = self;
        let (Some(first), Some(last)) = (first, last) else { return Report { why, ..report } };
        let hidden = computed.unwrap_or(last).min(last).saturating_duration_since(first);
        let moved = moving.map_or(Duration::ZERO, |moving| last - moving);
        Report { taken: last - first, hidden, moved, why, ..report }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_speed_of_the_way_is_told_apart_from_waiting_for_the_computing() {
        let mut progress = Progress::default();
        let mut page = |bytes| {
            progress.arrived();
            progress.took(bytes, Way::Stream);
        };
        page(100);
        page(100);
        progress.vouch(2, 3);
        progress.arrived();
        progress.took(100, Way::Memory);
        progress.vouch(3, 3);
        for _ in 0..3 {
            progress.arrived();
            progress.took(100, Way::Memory);
        }
        let report = progress.end(String::new());
        assert_eq!((report.bytes, report.memory_bytes, report.stream_bytes), (600, 400, 200));
        // Of the three pages that came after everything was computed, the first starts the clock for the others.
        assert_eq!(report.moved_bytes, 200);
        assert!(report.moved <= report.taken && report.hidden <= report.taken);
    }

    #[test]
    fn who_holds_all_from_the_start_hides_nothing() {
        let mut progress = Progress::default();
        progress.vouch(4, 4);
        for _ in 0..4 {
            progress.arrived();
            progress.took(10, Way::Socket);
        }
        let report = progress.end(String::new());
        assert_eq!((report.hidden, report.moved, report.moved_bytes), (Duration::ZERO, report.taken, 30));
    }
}
