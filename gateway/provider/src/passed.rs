//! Answers that are passed through in the provider's own bytes.
//!
//! Events of a stream are held until one of them binds the stream to this upstream
//! ([`penstock_dialects::watch::Seen::content`]): until then another upstream could still answer. From then on each
//! piece is forwarded when it arrives, in whole events. An answer that is not streamed is read completely first, since
//! it could be cut short or be no answer at all.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_dialects::watch::{self, Seen, Watch};
use penstock_types::room::make_room;
use penstock_types::{ChatEvent, FaultClass, FinishReason, ProviderFault, Surface, Usage};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::pace::Paced;
use super::{Outcome, Provider, fields};
use penstock_base::error::Failure;
use penstock_http::client::body::TAKE_BYTES_MAX;
use penstock_http::client::{Body, ClientError, Fault, Response};
use penstock_telemetry::OpenSpan;
use penstock_upstream::ANSWER_BYTES_MAX;
use penstock_upstream::answer_memory::Hold;
use penstock_upstream::forward::Passage;
use penstock_upstream::{Course, Events, Facts};

/// Most bytes of lifecycle events that are held; beyond, they are forwarded before any content.
const HELD_BYTES_MAX: usize = 1 << 20;
/// Size up to which a forwarded piece is not charged to memory; larger ones are held events, charged until written.
const HANDED_BYTES: usize = 2 * TAKE_BYTES_MAX;
/// Longest wait for the end of a body after its answer is complete.
const LINGER: Duration = Duration::from_secs(1);

/// State of every answer in progress: concurrency permit, span, pacing and counting.
pub(super) struct Passed {
    provider: Arc<Provider>,
    _place: OwnedSemaphorePermit,
    span: Option<OpenSpan>,
    /// Permission of the pacer, which the answer's usage settles.
    paced: Option<Paced>,
    counted: bool,
}

impl Passage for Passed {
    fn complete(&mut self) {
        self.count(Outcome::Complete);
    }

    fn cut(&mut self, error: &ClientError) -> Failure {
        // `unanswered` counts this failure.
        self.counted = true;
        self.trace(Outcome::Failed(error.fault.class()));
        self.provider.unanswered(error)
    }
}

impl Passed {
    pub(super) fn new(provider: Arc<Provider>, place: OwnedSemaphorePermit, span: Option<OpenSpan>) -> Self {
        Self { provider, _place: place, span, paced: None, counted: false }
    }

    /// Attaches the pacer's permission, whose token reservation is settled at the request's end.
    pub(super) fn paced(mut self, paced: Option<Paced>) -> Self {
        self.paced = paced;
        self
    }

    /// Course of the request for the access log: this provider, and the finish reason.
    pub(super) fn course(&self, finish: Option<FinishReason>) -> Course {
        Course { target: Some(self.provider.id.clone()), finish, ..Course::default() }
    }

    /// Records the token usage for pacing and the trace.
    pub(super) fn counts(&mut self, usage: Usage) {
        let tokens = usage.total();
        if let Some(paced) = self.paced.as_mut().filter(|_| tokens > 0) {
            paced.used(tokens);
        }
        let Some(span) = &mut self.span else { return };
        span.set("gen_ai.usage.input_tokens", usage.prompt_tokens);
        span.set("gen_ai.usage.output_tokens", usage.completion_tokens);
    }

    /// Counts the answer as failed and returns the failure for the client.
    pub(super) fn failed(mut self, fault: ProviderFault) -> Failure {
        self.fail(fault)
    }

    pub(super) fn fail(&mut self, fault: ProviderFault) -> Failure {
        self.count(Outcome::Failed(fault.class));
        let mut failure = self.provider.told(fault);
        let log = failure.log.take().unwrap_or_default();
        failure.log(format!("{}: in the answer: {log}", self.provider.config.id))
    }

    fn count(&mut self, outcome: Outcome) {
        if !std::mem::replace(&mut self.counted, true) {
            self.provider.counts.add(outcome);
            self.trace(outcome);
        }
    }
}

impl Passed {
    fn trace(&mut self, outcome: Outcome) {
        let Some(span) = &mut self.span else { return };
        span.set("penstock.outcome", outcome.name());
        if let Outcome::Failed(class) = outcome {
            span.set("error.type", outcome.name());
            span.fail(format!("{class:?}"));
        }
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        self.count(Outcome::Cancelled);
    }
}

fn facts(seen: &Seen) -> Facts {
    Facts::reported(seen.usage.unwrap_or_default(), seen.tier)
}

/// Streamed answer in the client's own dialect, passed on as bytes and watched for its usage.
pub(super) struct Stream {
    body: Body,
    watch: Watch,
    /// Events that arrived before the first content.
    held: Vec<Bytes>,
    held_bytes: usize,
    open: bool,
    headers: Vec<(HeaderName, HeaderValue)>,
    passed: Passed,
    room: Room,
}

/// Bounds of the memory that a stream may use: one event's, and the gateway's for answers.
pub(super) struct Room {
    pub(super) hold: Hold,
    pub(super) event_bytes_max: usize,
}

impl Room {
    /// Charges the stream's bytes to the memory for answers. `handed`: bytes being written now, charged until then;
    /// `held`: bytes of the unfinished event; `waiting`: bytes before it.
    ///
    /// # Errors
    /// The event is too large, or the memory is used up.
    pub(super) fn cover(&mut self, handed: usize, waiting: usize, held: usize) -> Result<(), Fail> {
        if held > self.event_bytes_max {
            return Err(Fail::Fault(too_large(self.event_bytes_max)));
        }
        let handed = if handed > HANDED_BYTES { handed } else { 0 };
        self.hold.cover(handed + waiting + held).map_err(|failure| Fail::Memory(failure.unheld()))
    }
}

/// Reason why a stream to a client ends before its answer is complete.
pub(super) enum Fail {
    /// The provider's answer is faulty or ends early.
    Fault(ProviderFault),
    /// Memory of this gateway is used up.
    Memory(Failure),
}

fn too_large(max: usize) -> ProviderFault {
    let message = format!("An event of the upstream's answer is larger than {max} bytes.");
    ProviderFault::new(FaultClass::AnswerTooLarge, message)
}

impl Stream {
    pub(super) fn new(watch: Watch, response: Response, passed: Passed, first_by: Option<Instant>, room: Room) -> Self {
        let headers = fields::back(&response.headers);
        let mut body = response.body;
        body.limit(first_by);
        Self { body, watch, held: Vec::new(), held_bytes: 0, open: false, headers, passed, room }
    }

    /// Forwards the bytes if the stream is bound, else holds them.
    fn hand_out(&mut self, bytes: Option<Bytes>, out: &mut Vec<ChatEvent>) {
        if let Some(bytes) = bytes {
            self.held_bytes += bytes.len();
            self.held.push(bytes);
        }
        if !self.open && (self.watch.seen().content || self.held_bytes > HELD_BYTES_MAX) {
            self.open = true;
            self.body.limit(None);
        }
        if self.open {
            out.extend(self.held.drain(..).map(ChatEvent::Raw));
            self.held_bytes = 0;
        }
    }

    fn take(&mut self, more: bool, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let was_complete = self.watch.seen().complete;
        // A fault is reported after the events before it.
        while let Some(bytes) = self.watch.take()? {
            self.hand_out(Some(bytes), out);
        }
        self.hand_out(None, out);
        if !more {
            let rest = self.watch.end()?;
            self.hand_out(rest, out);
            if !self.open {
                // The rest was only the stream's last event, without any content before it.
                return Err(ProviderFault::new(FaultClass::Truncated, "The answer ended before it had begun."));
            }
        } else if !was_complete && self.watch.seen().complete {
            self.body.set_silence(LINGER);
        }
        Ok(())
    }
}

impl Events for Stream {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        let before = out.len();
        loop {
            let more = match ready!(self.body.poll_chunk(context, self.watch.buffer())) {
                Ok(more) => more,
                // The answer was complete; only its body did not end properly.
                Err(error) if self.watch.seen().complete && matches!(error.fault, Fault::IdleTimeout | Fault::Cut) => {
                    false
                }
                Err(error) => return Poll::Ready(Err(self.passed.cut(&error))),
            };
            let came = self.held_bytes + self.watch.held();
            if let Err(fault) = self.take(more, out) {
                return Poll::Ready(Err(self.passed.fail(fault)));
            }
            let (waiting, held) = (self.held_bytes, self.watch.held());
            match self.room.cover(came.saturating_sub(waiting + held), waiting, held) {
                Ok(()) => {}
                Err(Fail::Fault(fault)) => return Poll::Ready(Err(self.passed.fail(fault))),
                Err(Fail::Memory(failure)) => return Poll::Ready(Err(failure)),
            }
            if !more {
                self.passed.counts(self.watch.seen().usage.unwrap_or_default());
                self.passed.complete();
            }
            if !more || out.len() > before {
                return Poll::Ready(Ok(more));
            }
        }
    }

    fn facts(&self) -> Facts {
        facts(self.watch.seen())
    }

    fn course(&self) -> Course {
        self.passed.course(self.watch.seen().finish)
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &self.headers
    }
}

/// Answer that is read as a whole.
pub(super) struct Whole {
    surface: Surface,
    body: Body,
    bytes: Vec<u8>,
    seen: Seen,
    headers: Vec<(HeaderName, HeaderValue)>,
    passed: Passed,
    /// Memory charge, held until the answer has been written: the writer keeps these events.
    hold: Hold,
}

impl Whole {
    pub(super) fn new(surface: Surface, response: Response, passed: Passed, hold: Hold) -> Self {
        let headers = fields::back(&response.headers);
        Self { surface, body: response.body, bytes: Vec::new(), seen: Seen::default(), headers, passed, hold }
    }
}

impl Events for Whole {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        loop {
            if self.bytes.len() > TAKE_BYTES_MAX {
                make_room(&mut self.bytes, 2 * TAKE_BYTES_MAX);
            }
            let more = ready!(self.body.poll_chunk(context, &mut self.bytes));
            if let Err(failure) = self.hold.cover(self.bytes.len()) {
                return Poll::Ready(Err(failure.unheld()));
            }
            match more {
                Ok(true) if self.bytes.len() <= ANSWER_BYTES_MAX => {}
                Ok(true) => {
                    let message = format!("The upstream's answer is larger than {} MiB.", ANSWER_BYTES_MAX >> 20);
                    return Poll::Ready(Err(self.passed.fail(ProviderFault::new(FaultClass::AnswerTooLarge, message))));
                }
                Ok(false) => break,
                Err(error) => return Poll::Ready(Err(self.passed.cut(&error))),
            }
        }
        match watch::whole(self.surface, &self.bytes) {
            Ok(seen) if seen.complete => self.seen = seen,
            // It may be made and billed, as one that took too long.
            Ok(_) => {
                let message = "The upstream returned an answer that is not finished (queued or in progress), and it cannot be fetched later.";
                return Poll::Ready(Err(self.passed.fail(ProviderFault::new(FaultClass::Timeout, message))));
            }
            Err(fault) => return Poll::Ready(Err(self.passed.fail(fault))),
        }
        self.passed.counts(self.seen.usage.unwrap_or_default());
        self.passed.complete();
        out.push(ChatEvent::Raw(std::mem::take(&mut self.bytes).into()));
        Poll::Ready(Ok(false))
    }

    fn facts(&self) -> Facts {
        facts(&self.seen)
    }

    fn course(&self) -> Course {
        self.passed.course(self.seen.finish)
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &self.headers
    }
}
