//! Several connections for one transfer between machines: pages go over any connection with room, all else over the
//! first.
//!
//! ```text
//! asker → holder   first: Greeting{ticket}    others: Greeting{ticket, joins}     each proves the pool key like any other
//! holder → asker   first: as ever             others: Page…  End                  in no order between them
//! ```
//! One idea: the further connections carry pages and nothing else. The meaning of pages, the usable blocks and the end
//! stay with the first connection, whose end is sent after the ends of the others; one that breaks ends the transfer.
//! The asker makes the ticket, and the holder knows it before it sends the welcome, so that no connection comes too
//! early. A connection that comes after the end of a short transfer, or cannot be opened, is absent: no page is given
//! to it, and none is missing.

use super::Peers;
use super::ask;
use super::link::{Fault, Link};
use super::serve::PageOut;
use penstock_proto::transfer::{Answer, AnswerBody, End, Page};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::task::JoinSet;
use tracing::debug;

/// Most connections of one transfer.
pub(crate) const STREAMS_MAX: usize = 16;

/// Ticket that names a transfer to its further connections: random, so that no stranger can join.
pub(super) type Ticket = [u8; 16];

/// Part of a connection in a transfer that has several.
#[derive(Clone, Copy)]
pub(super) enum Part {
    /// The first, which carries all control frames; others come with the same ticket.
    First(Ticket),
    /// A further connection, which joins the transfer of this ticket.
    Joins(Ticket),
}

/// Outgoing transfers that further connections may join.
#[derive(Default)]
pub(super) struct Meeting {
    waiting: Mutex<HashMap<Ticket, mpsc::Sender<Link>>>,
}

impl Meeting {
    fn waiting(&self) -> MutexGuard<'_, HashMap<Ticket, mpsc::Sender<Link>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for connections with this ticket; `None` if the ticket exists already.
    pub(super) fn expect(self: &Arc<Self>, ticket: Ticket) -> Option<Joining> {
        let (sender, links) = mpsc::channel(STREAMS_MAX);
        let mut waiting = self.waiting();
        if waiting.contains_key(&ticket) {
            return None;
        }
        waiting.insert(ticket, sender);
        Some(Joining { meeting: Arc::clone(self), ticket, links })
    }

    /// Returns true if an outgoing transfer waits for connections with this ticket.
    pub(super) fn knows(&self, ticket: &Ticket) -> bool {
        self.waiting().contains_key(ticket)
    }

    /// Hands a connection to the transfer that waits for it; gives it back if the transfer takes none any more.
    pub(super) fn join(&self, ticket: &Ticket, link: Link) -> Option<Link> {
        let Some(transfer) = self.waiting().get(ticket).cloned() else { return Some(link) };
        transfer.try_send(link).err().map(TrySendError::into_inner)
    }
}

/// An outgoing transfer that further connections may join, until this is dropped.
pub(super) struct Joining {
    meeting: Arc<Meeting>,
    ticket: Ticket,
    links: mpsc::Receiver<Link>,
}

impl Drop for Joining {
    fn drop(&mut self) {
        self.meeting.waiting().remove(&self.ticket);
    }
}

/// Further connections of the holder, among which outgoing pages are spread.
pub(super) struct LanesOut {
    peers: Arc<Peers>,
    joining: Option<Joining>,
    lanes: Vec<mpsc::Sender<PageOut>>,
    tasks: JoinSet<Result<(), Fault>>,
}

impl LanesOut {
    pub(super) fn new(peers: &Arc<Peers>, joining: Option<Joining>) -> Self {
        Self { peers: Arc::clone(peers), joining, lanes: Vec::new(), tasks: JoinSet::new() }
    }

    /// Waits for a connection to join; Err if one of the joined ones is broken. Never resolves when none is expected.
    /// Cancel-safe.
    pub(super) async fn change(&mut self) -> Result<(), Fault> {
        let Some(joining) = &mut self.joining else { return std::future::pending().await };
        tokio::select! {
            Some(link) = joining.links.recv() => {
                self.add(link);
                Ok(())
            }
            Some(ended) = self.tasks.join_next() => ended.unwrap_or(Err(Fault::Ending)).and(Err(Fault::Closed)),
        }
    }

    fn add(&mut self, link: Link) {
        // One page waits while one is sent.
        let (lane, pages) = mpsc::channel(1);
        if self.lanes.len() + 1 < STREAMS_MAX {
            self.lanes.push(lane);
            self.tasks.spawn(carry(Arc::clone(&self.peers), link, pages));
        }
    }

    /// Gives a page to a connection with room; gives it back if none has room.
    pub(super) fn deal(&self, page: PageOut) -> Option<PageOut> {
        self.lanes
            .iter()
            .try_fold(page, |page, lane| lane.try_send(page).map_or_else(|back| Some(back.into_inner()), |()| None))
    }

    /// Waits until all connections have sent their pages and their ends. Those that have joined since the last page get
    /// their end, too.
    pub(super) async fn finish(&mut self) -> Result<(), Fault> {
        self.joining.iter_mut().for_each(|joining| joining.links.close());
        while let Some(link) = self.joining.as_mut().and_then(|joining| joining.links.try_recv().ok()) {
            self.add(link);
        }
        self.joining = None;
        self.lanes.clear();
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap_or(Err(Fault::Ending))?;
        }
        Ok(())
    }
}

/// Sends pages over one connection, until there are no more.
async fn carry(peers: Arc<Peers>, mut link: Link, mut pages: mpsc::Receiver<PageOut>) -> Result<(), Fault> {
    while let Some(PageOut { block, layer, bytes }) = pages.recv().await {
        let page = Page::new(block as u32, layer as u32, bytes.into_bytes());
        let size = page.bytes.len() as u64;
        link.outgoing.send(&Answer { body: Some(AnswerBody::Page(page)) }).await?;
        peers.meters.bytes_out.fetch_add(size, Ordering::Relaxed);
    }
    end(&mut link).await
}

/// Ends a further connection.
pub(super) async fn end(link: &mut Link) -> Result<(), Fault> {
    link.answer(AnswerBody::End(End { blocks: 0, complete: true })).await
}

/// Further connections of the asker, whose pages come in one queue.
pub(super) struct LanesIn {
    pages: mpsc::Receiver<Page>,
    tasks: JoinSet<Result<(), Fault>>,
}

impl LanesIn {
    /// Opens `count` further connections to `from`, which join the transfer of `ticket`.
    pub(super) fn open(peers: &Arc<Peers>, from: &str, ticket: Ticket, count: usize) -> Self {
        let (sender, pages) = mpsc::channel(1);
        let mut tasks = JoinSet::new();
        for _ in 0..count {
            tasks.spawn(read(Arc::clone(peers), from.to_owned(), ticket, sender.clone()));
        }
        Self { pages, tasks }
    }

    /// Next page of any connection; `None` if all have ended normally or are absent. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Result<Page, Fault>> {
        loop {
            tokio::select! {
                biased;
                Some(page) = self.pages.recv() => return Some(Ok(page)),
                Some(ended) = self.tasks.join_next() => {
                    if let Err(why) = ended.unwrap_or(Err(Fault::Ending)) {
                        return Some(Err(why));
                    }
                }
                else => return None,
            }
        }
    }
}

/// Reads the pages of one further connection into the common queue, to the connection's end. A connection that does not
/// get to join is absent.
async fn read(peers: Arc<Peers>, from: String, ticket: Ticket, pages: mpsc::Sender<Page>) -> Result<(), Fault> {
    let mut link = match ask::greeted(&peers, &from, Some(Part::Joins(ticket))).await {
        Ok((link, _)) => link,
        Err(why) => {
            debug!(%why, "a further connection of a KV transfer could not be opened; its pages go over the others");
            return Ok(());
        }
    };
    loop {
        match link.incoming.next::<Answer>().await?.body {
            Some(AnswerBody::Page(page)) => pages.send(page).await.map_err(|_| Fault::Ending)?,
            Some(AnswerBody::End(_)) => return Ok(()),
            Some(AnswerBody::Refused(refused)) => return Err(Fault::Refused(refused.message)),
            _ => return Err(Fault::Unexpected),
        }
    }
}
