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

/// Form of the answer to a request to `/v1/responses`.
#[derive(Clone, Debug)]
pub struct ResponseForm {
    echo: Arc<Echo>,
    logprobs: bool,
}

impl ResponseForm {
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

    /// Collector of an answer for a store, in parallel with the stream.
    pub fn collector(&self, meta: &AnswerMeta) -> ResponseCollector {
        let output = Output::new(self.echo.clone(), meta.clone(), self.logprobs, false);
        ResponseCollector { output, nowhere: BytesMut::new() }
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
    /// Output buffer that nothing is streamed into; stays empty.
    nowhere: BytesMut,
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
        self.output.event(event, &mut self.nowhere);
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
