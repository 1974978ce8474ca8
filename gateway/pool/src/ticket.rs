//! The two ends between a request's handler (on any runtime) and the fleet's actor.
//!
//! Events go through a small queue per ticket, bounded by the token window: the worker may not emit more than the
//! window ahead of what the handler has taken, so the queue holds at most `choices × window` tokens. In the other
//! direction a ticket leaves notes (tokens taken, choices cancelled, dropped) and posts itself to the mailbox. The
//! mailbox holds each ticket's notes at most once and the number of tickets is limited, so it is bounded too, and
//! `Drop` never waits.

use super::job::{Job, PoolEvent};
use penstock_proto::RequestId;
use penstock_proto::frames::Output;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tokio::sync::Notify;

/// Notes that a ticket leaves for the actor: tokens taken, choices cancelled, and its own drop.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// Tokens taken per choice and not yet granted to the worker again: (choice, tokens).
    pub(super) taken: Vec<(u32, u32)>,
    /// Choices whose text is complete, for example by a stop string.
    pub(super) cancelled: Vec<u32>,
    /// The ticket was dropped: the request is to be cancelled.
    pub(super) dropped: bool,
}

#[derive(Default)]
struct Inner {
    events: VecDeque<PoolEvent>,
    waker: Option<Waker>,
    ended: bool,
    notes: Notes,
    in_mailbox: bool,
}

/// Half of a ticket that the actor and the request's handler share: events one way, notes the other.
pub(super) struct Slot {
    pub(super) id: RequestId,
    window: u32,
    /// True once a worker was given the request, also if that worker was lost since.
    is_bound: AtomicBool,
    inner: Mutex<Inner>,
}

/// Message from a request's handler to the pool's actor.
pub(super) enum Post {
    /// A new request, with the slot that its events go to.
    Submit(Box<Job>, Arc<Slot>),
    /// The slot's ticket has notes: tokens taken, choices to cancel, or its drop.
    Notes(Arc<Slot>),
}

/// Queue of messages from the handlers of all requests to the pool's actor.
pub(super) struct Mailbox {
    posts: Mutex<Vec<Post>>,
    pub(super) notify: Notify,
    /// Number of tickets that exist, for the bound on open requests; counted without the actor.
    pub(super) open: AtomicUsize,
    /// Number of calls that wait for the first load of a model on demand; they have no ticket yet.
    pub(super) waking: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mailbox {
    pub(super) fn new() -> Self {
        Self {
            posts: Mutex::new(Vec::new()),
            notify: Notify::new(),
            open: AtomicUsize::new(0),
            waking: AtomicUsize::new(0),
        }
    }

    pub(super) fn post(&self, post: Post) {
        lock(&self.posts).push(post);
        self.notify.notify_one();
    }

    /// Takes all messages that handlers have posted so far, in their order.
    pub(super) fn take(&self) -> Vec<Post> {
        std::mem::take(&mut *lock(&self.posts))
    }
}

impl Slot {
    pub(super) fn new(id: RequestId, window: u32) -> Self {
        Self { id, window, is_bound: AtomicBool::new(false), inner: Mutex::new(Inner::default()) }
    }

    /// Hands an event to the request's handler and wakes it.
    pub(super) fn push(&self, event: PoolEvent) {
        let waker = {
            let mut inner = lock(&self.inner);
            inner.events.push_back(event);
            inner.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Queues an event without waking the handler, which reads it together with the next one.
    pub(super) fn leave(&self, event: PoolEvent) {
        lock(&self.inner).events.push_back(event);
    }

    /// Notes that a worker has been given the request: at once for [`Ticket::is_bound`], with the next event for the
    /// handler, which is not woken.
    pub(super) fn bind(&self, bound: PoolEvent) {
        self.is_bound.store(true, Ordering::Relaxed);
        self.leave(bound);
    }

    /// Ends the stream: the ticket returns `None` after the events still queued.
    pub(super) fn end(&self) {
        let waker = {
            let mut inner = lock(&self.inner);
            inner.ended = true;
            inner.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Takes the notes that the ticket left since the last call, and lets it post again.
    pub(super) fn take_notes(&self) -> Notes {
        let mut inner = lock(&self.inner);
        inner.in_mailbox = false;
        std::mem::take(&mut inner.notes)
    }

    /// Takes the events that the handler has not taken yet.
    #[cfg(test)]
    pub(super) fn take_events(&self) -> Vec<PoolEvent> {
        lock(&self.inner).events.drain(..).collect()
    }

    /// Number of tokens in the queue to the handler, not taken yet.
    pub(super) fn tokens_waiting(&self) -> usize {
        let inner = lock(&self.inner);
        let tokens = |event: &PoolEvent| if let PoolEvent::Output(output) = event { output.tokens.len() } else { 0 };
        inner.events.iter().map(tokens).sum()
    }
}

/// Handle of a request in the pool. Dropping it cancels the request wherever it is: waiting, in prefill, in decode.
pub struct Ticket {
    slot: Arc<Slot>,
    mailbox: Arc<Mailbox>,
}

impl Ticket {
    pub(super) fn new(slot: Arc<Slot>, mailbox: Arc<Mailbox>) -> Self {
        mailbox.open.fetch_add(1, Ordering::Relaxed);
        Self { slot, mailbox }
    }

    /// Number of the request in this gateway, for logs and [`Pool::migrate`](super::Pool::migrate).
    pub fn id(&self) -> RequestId {
        self.slot.id
    }

    /// The next event; `None` after the last. Taking events is the flow control: a handler that stops taking stalls its
    /// own sequences after a window of tokens, and nothing else. Cancel-safe.
    pub async fn next(&mut self) -> Option<PoolEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Poll form of [`Ticket::next`]. Only the last caller's waker is woken.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<PoolEvent>> {
        let event = {
            let mut inner = lock(&self.slot.inner);
            match inner.events.pop_front() {
                Some(event) => event,
                None if inner.ended => return Poll::Ready(None),
                None => {
                    inner.waker = Some(context.waker().clone());
                    return Poll::Pending;
                }
            }
        };
        if let PoolEvent::Output(output) = &event {
            self.took(output);
        }
        Poll::Ready(Some(event))
    }

    /// Frees one choice at the worker because its text is complete. Events of that choice already on their way still come.
    pub fn cancel_choice(&self, index: u32) {
        self.note(|notes| {
            let new = !notes.cancelled.contains(&index);
            if new {
                notes.cancelled.push(index);
            }
            new
        });
    }

    /// Returns true once a worker was given the request, also where [`PoolEvent::Bound`] has not been taken yet: the
    /// prompt is computed, or was.
    pub fn is_bound(&self) -> bool {
        self.slot.is_bound.load(Ordering::Relaxed)
    }

    /// Number of tokens in events that have arrived and that the handler has not taken yet.
    pub fn tokens_waiting(&self) -> usize {
        self.slot.tokens_waiting()
    }

    /// Shows `see` the outputs that have arrived and that the handler has not taken yet, in their order.
    pub fn see_waiting(&self, mut see: impl FnMut(&Output)) {
        let inner = lock(&self.slot.inner);
        for event in &inner.events {
            if let PoolEvent::Output(output) = event {
                see(output);
            }
        }
    }

    /// Notes the tokens taken, and posts them from half a window on: one message for many tokens.
    fn took(&self, output: &Output) {
        let tokens = output.tokens.len() as u32;
        if tokens == 0 || output.finish.is_some() {
            return;
        }
        let half = (self.slot.window / 2).max(1);
        self.note(|notes| {
            let at = notes.taken.iter().position(|(choice, _)| *choice == output.choice).unwrap_or_else(|| {
                notes.taken.push((output.choice, 0));
                notes.taken.len() - 1
            });
            notes.taken[at].1 += tokens;
            notes.taken[at].1 >= half
        });
    }

    /// Changes the notes; posts them when `change` returns true.
    fn note(&self, change: impl FnOnce(&mut Notes) -> bool) {
        let post = {
            let mut inner = lock(&self.slot.inner);
            let post = change(&mut inner.notes) && !inner.in_mailbox;
            inner.in_mailbox |= post;
            post
        };
        if post {
            self.mailbox.post(Post::Notes(Arc::clone(&self.slot)));
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.note(|notes| {
            notes.dropped = true;
            true
        });
        self.mailbox.open.fetch_sub(1, Ordering::Relaxed);
    }
}
