//! Answer form of responses: streamed, whole, and stored.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use super::echo::{Echo, ResponseFailure, ResponseStatus, State};
use super::output::Output;
use super::request::ResponsesRequest;
use penstock_types::Bounds;
use penstock_types::ErrorShape;
use penstock_types::codec::{AnswerForm, AnswerMeta, Decoded, StreamEncoder, WholeCollector};
use penstock_types::error::ApiError;
use penstock_types::event::ChatEvent;

/// Decodes `/v1/responses` for a gateway that stores nothing: `previous_response_id`, `background` and references to
/// items are refused, and the answer carries `"store": false`.
pub fn responses(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    let (request, form) = ResponsesRequest::decode(body, bounds)?.alone()?;
    Ok(Decoded { request, form: Box::new(form) })
}

/// Decodes `/v1/responses/input_tokens` for a gateway that stores nothing, as [`responses`] does.
pub fn count_responses(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    let (request, form) = ResponsesRequest::decode_count(body, bounds)?.alone()?;
    Ok(Decoded { request, form: Box::new(form) })
}

/// Form of the answer to a request to `/v1/responses`.
#[derive(Clone, Debug)]
pub struct ResponseForm {
    echo: Arc<Echo>,
    logprobs: bool,
}

impl ResponseForm {
    /// Number of events of a response that is queued in the background, before its first attempt.
    pub const QUEUED_EVENTS: u64 = 2;

    pub(super) fn new(echo: Echo, logprobs: bool) -> Self {
        Self { echo: Arc::new(echo), logprobs }
    }

    /// The resource in a state without an answer: queued, in progress, failed, cancelled. The answer's id in `meta` is
    /// without its prefix `resp_`; `output` holds items joined by commas.
    pub fn resource(
        &self,
        meta: &AnswerMeta,
        status: ResponseStatus,
        output: &[u8],
        failure: Option<&ResponseFailure>,
    ) -> Bytes {
        self.echo.resource(meta, &State { status, output, usage: None, failure })
    }

    /// Events of a response that waits in the background, numbered from 0.
    pub fn queued_events(&self, meta: &AnswerMeta) -> Bytes {
        let mut out = BytesMut::new();
        Output::queue(&self.echo, meta, &mut out);
        out.freeze()
    }

    /// Collector of an answer in the background that also writes the events after those of
    /// [`ResponseForm::queued_events`].
    pub fn telling_collector(&self, meta: &AnswerMeta) -> ResponseCollector {
        let output = Output::queued(self.echo.clone(), meta.clone(), self.logprobs);
        ResponseCollector { output, written: BytesMut::new() }
    }

    /// The last event, with this number, of a response in the background that ends without its answer.
    pub fn closing_event(
        &self,
        meta: &AnswerMeta,
        number: u64,
        status: ResponseStatus,
        failure: Option<&ResponseFailure>,
    ) -> Bytes {
        let mut out = BytesMut::new();
        let mut output = Output::queued(self.echo.clone(), meta.clone(), self.logprobs);
        output.conclude(status, failure, Some(number), &mut out);
        out.freeze()
    }

    /// Collector of an answer for a store, in parallel with the stream.
    pub fn collector(&self, meta: &AnswerMeta) -> ResponseCollector {
        let output = Output::new(self.echo.clone(), meta.clone(), self.logprobs, false);
        ResponseCollector { output, written: BytesMut::new() }
    }
}

impl AnswerForm for ResponseForm {
    fn choices(&self) -> usize {
        1
    }

    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder> {
        Box::new(ResponseEncoder(Output::new(self.echo.clone(), meta.clone(), self.logprobs, true)))
    }

    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector> {
        Box::new(self.collector(meta))
    }
}

struct ResponseEncoder(Output);

impl StreamEncoder for ResponseEncoder {
    fn event(&mut self, event: &ChatEvent, out: &mut BytesMut) {
        self.0.event(event, out);
    }

    fn done(&mut self, out: &mut BytesMut) {
        self.0.done(out);
    }

    fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut) {
        self.0.fail(shape, message, out);
    }
}

/// Collector of events into one response.
pub struct ResponseCollector {
    output: Output,
    /// Events that were written and not taken; empty for a collector that writes none.
    written: BytesMut,
}

/// A response that has ended, ready to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedResponse {
    /// Final state of the response.
    pub status: ResponseStatus,
    /// The Response resource, JSON text.
    pub body: Bytes,
    /// Items of the answer, a JSON list.
    pub output: Bytes,
}

impl ResponseCollector {
    /// Adds an event of the answer.
    pub fn event(&mut self, event: &ChatEvent) {
        self.output.event(event, &mut self.written);
    }

    /// Events written since the last call, as server-sent events.
    pub fn take_events(&mut self) -> Bytes {
        self.written.split().freeze()
    }

    /// Writes the last event, for a response that ends in this state.
    pub fn close(&mut self, status: ResponseStatus, failure: Option<&ResponseFailure>) {
        self.output.conclude(status, failure, None, &mut self.written);
    }

    /// The response; `None` if it has not ended.
    pub fn finished(&self) -> Option<FinishedResponse> {
        let status = self.output.status()?;
        Some(self.ended(status, None))
    }

    /// The response as far as it came, with a failure.
    pub fn failed(&self, status: ResponseStatus, failure: Option<&ResponseFailure>) -> FinishedResponse {
        self.ended(status, failure)
    }

    fn ended(&self, status: ResponseStatus, failure: Option<&ResponseFailure>) -> FinishedResponse {
        let mut body = BytesMut::with_capacity(2_048 + self.output.bytes());
        self.output.put_resource(status, failure, &mut body);
        let items = self.output.items();
        let mut output = BytesMut::with_capacity(items.len() + 2);
        output.put_u8(b'[');
        output.put_slice(&items);
        output.put_u8(b']');
        FinishedResponse { status, body: body.freeze(), output: output.freeze() }
    }
}

impl WholeCollector for ResponseCollector {
    fn event(&mut self, event: &ChatEvent) {
        ResponseCollector::event(self, event);
    }

    fn bytes(&self) -> usize {
        self.output.bytes()
    }

    fn finish(self: Box<Self>) -> Option<Bytes> {
        self.finished().map(|finished| finished.body)
    }
}
