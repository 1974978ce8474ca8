//! Events of an answer that a limit counts: they carry the reservation and settle it on drop.

use std::sync::Arc;
use std::sync::OnceLock;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_types::ChatEvent;

use super::emitted::Emitted;
use super::limit_headers;
use super::reservation::{End, Reservation};
use penstock_base::error::Failure;
use penstock_relay::models::Entry;
use penstock_upstream::call::Call;
use penstock_upstream::{Course, Events, Facts, Open, Origin};

/// Answer whose use settles the request's reservation when it ends.
pub(crate) struct Governed {
    events: Box<dyn Events>,
    reservation: Reservation,
    end: End,
    emitted: Emitted,
    /// Header fields of the upstream merged with ours; built at the first request for them.
    headers: OnceLock<Vec<(HeaderName, HeaderValue)>>,
    is_begun: bool,
}

impl Governed {
    /// Wraps the events of an answer, so that their end settles `reservation`.
    pub(crate) fn new(events: Box<dyn Events>, reservation: Reservation) -> Self {
        let (emitted, headers) = (Emitted::default(), OnceLock::new());
        Self { events, reservation, end: End::Gone, emitted, headers, is_begun: false }
    }
}

impl Events for Governed {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        let before = out.len();
        let polled = self.events.poll_events(context, out);
        // Usage reported with a complete answer replaces the estimate, so its last events need no counting.
        let is_told = matches!(polled, Poll::Ready(Ok(false))) && self.events.facts().is_known();
        if !is_told {
            out[before..].iter().for_each(|event| self.emitted.add(event));
        }
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
        // The upstream's header fields are complete from its first event on.
        if !std::mem::replace(&mut self.is_begun, true) {
            self.headers.take();
        }
        polled
    }

    fn facts(&self) -> Facts {
        let facts = self.events.facts();
        if self.end != End::Complete || facts.is_known() {
            return facts;
        }
        self.reservation.used(self.end, facts, &self.events.course(), self.emitted).facts
    }

    fn facts_at_end(&self) -> Facts {
        if self.end == End::Complete { self.facts() } else { self.events.facts_at_end() }
    }

    fn score(&self, choice: u32) -> Option<f32> {
        self.events.score(choice)
    }

    fn course(&self) -> Course {
        let course = self.events.course();
        let used = self.reservation.used(self.end, self.events.facts_at_end(), &course, self.emitted);
        Course { account: Some(self.reservation.account(&used)), ..course }
    }

    fn epilogue(&self) -> Option<Bytes> {
        self.events.epilogue()
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        match (self.events.headers(), self.reservation.fields()) {
            ([], ours) => ours,
            (theirs, ours) => self.headers.get_or_init(|| limit_headers::merged(theirs, ours)),
        }
    }
}

impl Drop for Governed {
    fn drop(&mut self) {
        let (facts, course) = (self.events.facts_at_end(), self.events.course());
        self.reservation.ended(self.end, facts, course, self.emitted);
    }
}

/// Asks the upstream. The reservation travels with the returned events and is settled when they end.
pub async fn open(
    entry: &Entry,
    call: Arc<Call>,
    origin: Origin,
    mut reservation: Option<Reservation>,
    opener: Option<Box<dyn Open>>,
) -> Result<Box<dyn Events>, Failure> {
    reservation.iter_mut().for_each(|reservation| reservation.goes(&origin.sent));
    let opened = match opener {
        Some(opener) => opener.open(call, origin).await,
        None => entry.upstream.open(call, origin).await,
    };
    match (opened, reservation) {
        (Ok(events), Some(reservation)) => Ok(Box::new(Governed::new(events, reservation))),
        (Err(failure), Some(reservation)) => {
            reservation.refused(&failure);
            Err(failure)
        }
        (opened, None) => opened,
    }
}
