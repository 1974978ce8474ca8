//! The events of an answer that a limit counts: they carry the reservation, and settle it when they are dropped.

use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_dialects::ChatEvent;

use super::emitted::Emitted;
use super::reservation::{End, Reservation};
use super::told;
use crate::error::Failure;
use crate::upstream::{Course, Events, Facts};

/// An answer that is counted.
pub(crate) struct Governed {
    events: Box<dyn Events>,
    reservation: Reservation,
    end: End,
    emitted: Emitted,
    /// The upstream's with ours, where it has any.
    headers: Vec<(HeaderName, HeaderValue)>,
    is_begun: bool,
}

impl Governed {
    /// Those events, paid for with that.
    pub(crate) fn new(events: Box<dyn Events>, reservation: Reservation) -> Self {
        let mut own = Self {
            events,
            reservation,
            end: End::Gone,
            emitted: Emitted::default(),
            headers: Vec::new(),
            is_begun: false,
        };
        own.merge();
        own
    }
}

impl Governed {
    fn merge(&mut self) {
        let theirs = self.events.headers();
        if !theirs.is_empty() {
            self.headers = told::merged(theirs, self.reservation.fields());
        }
    }
}

impl Events for Governed {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        let before = out.len();
        let polled = self.events.poll_events(context, out);
        out[before..].iter().for_each(|event| self.emitted.add(event));
        match &polled {
            Poll::Ready(Ok(more)) => {
                self.reservation.begun();
                if !more {
                    self.reservation.completed();
                    self.end = End::Complete;
                }
            }
            Poll::Ready(Err(failure)) => {
                self.reservation.failed(failure);
                self.end = End::Failed;
            }
            Poll::Pending => return polled,
        }
        // The upstream's are known from its first event on.
        if !std::mem::replace(&mut self.is_begun, true) {
            self.merge();
        }
        polled
    }

    fn facts(&self) -> Facts {
        let facts = self.events.facts();
        if self.end != End::Complete || facts.prompt_tokens + facts.completion_tokens > 0 {
            return facts;
        }
        self.reservation.used(self.end, facts, &self.events.course(), self.emitted).facts
    }

    fn score(&self, choice: u32) -> Option<f32> {
        self.events.score(choice)
    }

    fn course(&self) -> Course {
        let course = self.events.course();
        let used = self.reservation.used(self.end, self.events.facts(), &course, self.emitted);
        Course { account: Some(self.reservation.account(&used)), ..course }
    }

    fn epilogue(&self) -> Option<Bytes> {
        self.events.epilogue()
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        if self.headers.is_empty() { self.reservation.fields() } else { &self.headers }
    }
}

impl Drop for Governed {
    fn drop(&mut self) {
        let (facts, course) = (self.events.facts(), self.events.course());
        self.reservation.ended(self.end, facts, course, self.emitted);
    }
}
