//! Answers in another dialect than the client's, decoded into events.

use std::future::poll_fn;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use penstock_types::{AnswerDecoder, ChatEvent, ProviderFault, ServiceTier, Usage};
use tokio::time::Instant;

use super::fields;
use super::passed::{Fail, Passed, Room};
use penstock_base::error::Failure;
use penstock_http::client::{Body, Response};
use penstock_upstream::forward::Passage;
use penstock_upstream::{Course, Events, Facts};

/// Longest wait for the end of a body after its answer is complete, so that the connection can be reused.
const LINGER: Duration = Duration::from_secs(1);

/// Answer in another dialect than the client's, decoded into events as it comes.
pub(super) struct Translated {
    body: Option<Body>,
    decoder: Box<dyn AnswerDecoder>,
    begun: bool,
    usage: Usage,
    headers: Vec<(HeaderName, HeaderValue)>,
    passed: Passed,
    room: Room,
}

impl Translated {
    /// Creates the decoder's state; `first_by`: time by which the first event must arrive.
    pub(super) fn new(
        decoder: Box<dyn AnswerDecoder>,
        response: Response,
        passed: Passed,
        first_by: Option<Instant>,
        room: Room,
    ) -> Self {
        let headers = fields::back(&response.headers);
        let mut body = response.body;
        body.limit(first_by);
        Self { body: Some(body), decoder, begun: false, usage: Usage::default(), headers, passed, room }
    }

    /// Decodes the bytes that arrived; returns whether the answer continues.
    fn take(&mut self, bytes: &[u8], more: bool, out: &mut Vec<ChatEvent>) -> Result<bool, ProviderFault> {
        self.decoder.push(bytes, out)?;
        if more && !self.decoder.is_complete() {
            return Ok(true);
        }
        self.decoder.end(out)?;
        Ok(false)
    }

    fn note(&mut self, events: &[ChatEvent]) {
        for event in events {
            if let ChatEvent::Usage(usage) = event {
                self.usage = *usage;
            }
        }
        if !self.begun && !events.is_empty() {
            self.begun = true;
            self.body.iter_mut().for_each(|body| body.limit(None));
        }
    }
}

impl Events for Translated {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        let before = out.len();
        loop {
            let Some(body) = &mut self.body else { return Poll::Ready(Ok(false)) };
            let mut bytes = Vec::new();
            let more = match ready!(body.poll_chunk(context, &mut bytes)) {
                Ok(more) => more,
                Err(error) => return Poll::Ready(Err(self.passed.cut(&error))),
            };
            // At the end of a body, its bytes and the events decoded from them are in memory together: charge both.
            let held = self.decoder.held();
            let made = if more { 0 } else { held };
            if let Err(Fail::Memory(failure)) = self.room.cover(made, 0, held) {
                return Poll::Ready(Err(failure));
            }
            let taken = self.take(&bytes, more, out);
            self.note(&out[before..]);
            if let Err(Fail::Fault(fault)) = self.room.cover(0, 0, self.decoder.held()) {
                return Poll::Ready(Err(self.passed.fail(fault)));
            }
            match taken {
                Err(fault) => return Poll::Ready(Err(self.passed.fail(fault))),
                Ok(false) => {
                    self.passed.counts(self.usage);
                    self.passed.complete();
                    if let Some(body) = self.body.take().filter(|_| more) {
                        tokio::spawn(finished(body));
                    }
                    return Poll::Ready(Ok(false));
                }
                Ok(true) if out.len() > before => return Poll::Ready(Ok(true)),
                Ok(true) => {}
            }
        }
    }

    fn facts(&self) -> Facts {
        let usage = self.decoder.usage().unwrap_or(self.usage);
        // A translated request names no service tier.
        Facts::reported(usage, Some(ServiceTier::Standard))
    }

    fn course(&self) -> Course {
        // The finish reason is among the events.
        self.passed.course(None)
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &self.headers
    }
}

/// Reads the rest of a body whose answer is complete.
async fn finished(mut body: Body) {
    let rest = async {
        let mut bytes = Vec::new();
        while bytes.is_empty() && poll_fn(|context| body.poll_chunk(context, &mut bytes)).await == Ok(true) {}
    };
    let _ = tokio::time::timeout(LINGER, rest).await;
}
