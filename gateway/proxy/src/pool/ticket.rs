//! The two ends between a request's handler (on any runtime) and the fleet's actor.
//!
//! Events go through a small queue per ticket. Its bound is the token window: the worker may not emit more than the window
//! ahead of what the handler has taken, so the queue holds at most `choices × window` tokens. In the other direction a ticket
//! leaves notes (tokens taken, choices cancelled, dropped) and puts itself into the mailbox once; the mailbox holds each
//! ticket at most once, and the number of tickets is limited, so it is bounded too, and `Drop` never waits.

use super::job::{Job, PoolEvent};
use penstock_proto::frames::Output;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tokio::sync::Notify;

/// What a ticket wants the actor to know.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// Tokens taken per choice, not yet granted again: (choice, tokens).
    pub(super) taken: Vec<(u32, u32)>,
    /// Choices whose text is complete (a stop string matched).
    pub(super) cancelled: Vec<u32>,
    /// The ticket is gone.
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

/// The shared half.
pub(super) struct Slot {
    pub(super) id: u64,
    window: u32,
    inner: Mutex<Inner>,
}

/// What is put into the mailbox.
pub(super) enum Post {
    /// A new request.
    Submit(Box<Job>, Arc<Slot>),
    /// A ticket has notes.
    Notes(Arc<Slot>),
}

/// Where handlers leave posts for the actor.
pub(super) struct Mailbox {
    posts: Mutex<Vec<Post>>,
    pub(super) notify: Notify,
    /// Tickets that exist.
    pub(super) open: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mailbox {
    pub(super) fn new() -> Self {
        Self { posts: Mutex::new(Vec::new()), notify: Notify::new(), open: AtomicUsize::new(0) }
    }

    pub(super) fn post(&self, post: Post) {
        lock(&self.posts).push(post);
        self.notify.notify_one();
    }

    /// All posts so far, in order.
    pub(super) fn take(&self) -> Vec<Post> {
        std::mem::take(&mut *lock(&self.posts))
    }
}

impl Slot {
    pub(super) fn new(id: u64, window: u32) -> Self {
        Self { id, window, inner: Mutex::new(Inner::default()) }
    }

    /// Hands an event to the handler.
    pub(super) fn push(&self, event: PoolEvent) {
        let waker = {
            let mut inner = lock(&self.inner);
            inner.events.push_back(event);
            inner.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Leaves an event that need not be known before the next one.
    pub(super) fn leave(&self, event: PoolEvent) {
        lock(&self.inner).events.push_back(event);
    }

    /// No event will follow.
    pub(super) fn end(&self) {
        let waker = {
            let mut inner = lock(&self.inner);
            inner.ended = true;
            inner.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// The notes so far.
    pub(super) fn take_notes(&self) -> Notes {
        let mut inner = lock(&self.inner);
        inner.in_mailbox = false;
        std::mem::take(&mut inner.notes)
    }

    /// Tokens that wait for the handler.
    pub(super) fn tokens_waiting(&self) -> usize {
        let inner = lock(&self.inner);
        let tokens = |event: &PoolEvent| if let PoolEvent::Output(output) = event { output.tokens.len() } else { 0 };
        inner.events.iter().map(tokens).sum()
    }
}

/// A request in the pool. Dropping it cancels the request wherever it is: waiting, in prefill, in decode.
pub struct Ticket {
    slot: Arc<Slot>,
    mailbox: Arc<Mailbox>,
}

impl Ticket {
    pub(super) fn new(slot: Arc<Slot>, mailbox: Arc<Mailbox>) -> Self {
        mailbox.open.fetch_add(1, Ordering::Relaxed);
        Self { slot, mailbox }
    }

    /// Number of the request in this gateway, for logs.
    pub fn id(&self) -> u64 {
        self.slot.id
    }

    /// The next event; `None` after the last. Taking events is what lets the worker go on: a handler that stops taking stops
    /// its own sequences after a window of tokens, and nothing else. Cancel-safe.
    pub async fn next(&mut self) -> Option<PoolEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`Ticket::next`], for callers that are polled themselves. The last caller's waker is woken.
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

    /// Frees one choice at the worker: its text is complete. Events of it that are on their way still come.
    pub fn cancel_choice(&self, index: u32) {
        self.note(|notes| {
            let new = !notes.cancelled.contains(&index);
            if new {
                notes.cancelled.push(index);
            }
            new
        });
    }

    /// Tokens received and not taken yet.
    pub fn tokens_waiting(&self) -> usize {
        self.slot.tokens_waiting()
    }

    /// Notes what was taken, and passes it on once it is half a window: one message for many tokens.
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

    /// Changes the notes; posts them when `change` says that they are worth it.
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
