//! Answer forms of chat completions and completions: the encoder and the collector for each request.

use bytes::{Bytes, BytesMut};

use super::chat::decode_shaped;
use super::chat_answer::{ChatCollector, ChatEncoder, ChatMeta};
use super::completion_answer::{CompletionCollector, CompletionEncoder, CompletionMeta};
use super::decode_completion;
use penstock_types::Bounds;
use penstock_types::codec::{AnswerForm, AnswerMeta, Decoded, StreamEncoder, WholeCollector};
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::error_body::openai::error_event;
use penstock_types::error_shape::{self, ErrorShape};
use penstock_types::event::{ChatEvent, Usage};
use penstock_types::json::{Fault, Reader};
use penstock_types::request::Request;

/// Decodes `/v1/chat/completions`, with the form of its answer.
pub fn chat(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    let (request, calls) = decode_shaped(body, bounds)?;
    let form = ChatForm(ChatMeta { calls, ..ChatMeta::new(&request, String::new(), 0, None) });
    Ok(Decoded { request: Request::Chat(Box::new(request)), form: Box::new(form) })
}

/// Decodes `/v1/completions`, with the form of its answer.
pub fn completion(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    let request = decode_completion(body, bounds)?;
    let choices = request.prompts.len() * request.best_of.max(request.n) as usize;
    let form = CompletionForm { meta: CompletionMeta::new(&request, String::new(), 0, None), choices };
    Ok(Decoded { request: Request::Complete(Box::new(request)), form: Box::new(form) })
}

/// Reads `stream` of an operation that cannot stream, and refuses `true`.
pub(super) fn refuse_stream(reader: &mut Reader<'_>) -> Result<(), Fault> {
    if reader.boolean()? {
        return Err(Fault::of(ApiErrorKind::UnsupportedValue, "this is answered as a whole"));
    }
    Ok(())
}

/// Stream encoder of an operation that cannot stream: sends the whole answer as one event.
pub(super) struct WholeOnly(Option<Box<dyn WholeCollector>>);

impl WholeOnly {
    pub(super) fn new(collector: Box<dyn WholeCollector>) -> Self {
        Self(Some(collector))
    }
}

impl StreamEncoder for WholeOnly {
    fn event(&mut self, event: &ChatEvent, _: &mut BytesMut) {
        if let Some(collector) = &mut self.0 {
            collector.event(event);
        }
    }

    fn done(&mut self, out: &mut BytesMut) {
        let Some(collector) = self.0.take() else { return };
        match collector.finish() {
            Some(body) => {
                out.extend_from_slice(b"data: ");
                out.extend_from_slice(&body);
                out.extend_from_slice(b"\n\n");
            }
            None => error_event(error_shape::UPSTREAM, None, "The answer ended before it was complete.", out),
        }
    }

    fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut) {
        if self.0.take().is_some() {
            error_event(shape, None, message, out);
        }
    }
}

struct ChatForm(ChatMeta);

impl ChatForm {
    fn meta(&self, meta: &AnswerMeta) -> ChatMeta {
        ChatMeta { id: format!("chatcmpl-{}", meta.id), created: meta.created, ..self.0.clone() }
    }
}

impl AnswerForm for ChatForm {
    fn choices(&self) -> usize {
        self.0.n as usize
    }

    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder> {
        Box::new(ChatEncoder::new(&self.meta(meta)))
    }

    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector> {
        Box::new(ChatCollector::new(self.meta(meta)))
    }
}

struct CompletionForm {
    meta: CompletionMeta,
    choices: usize,
}

impl CompletionForm {
    fn meta(&self, meta: &AnswerMeta) -> CompletionMeta {
        CompletionMeta { id: format!("cmpl-{}", meta.id), created: meta.created, ..self.meta.clone() }
    }
}

impl AnswerForm for CompletionForm {
    fn choices(&self) -> usize {
        self.choices
    }

    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder> {
        Box::new(CompletionEncoder::new(&self.meta(meta)))
    }

    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector> {
        Box::new(CompletionCollector::new(self.meta(meta)))
    }
}

macro_rules! stream_encoder {
    ($encoder:ty) => {
        impl StreamEncoder for $encoder {
            fn event(&mut self, event: &ChatEvent, out: &mut BytesMut) {
                <$encoder>::event(self, event, out);
            }

            fn set_usage(&mut self, usage: Usage) {
                <$encoder>::set_usage(self, usage);
            }

            fn done(&mut self, out: &mut BytesMut) {
                <$encoder>::done(self, out);
            }

            fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut) {
                <$encoder>::fail(self, shape, message, out);
            }
        }
    };
}

stream_encoder!(ChatEncoder);
stream_encoder!(CompletionEncoder);

impl WholeCollector for ChatCollector {
    fn event(&mut self, event: &ChatEvent) {
        ChatCollector::event(self, event);
    }

    fn bytes(&self) -> usize {
        ChatCollector::bytes(self)
    }

    fn finish(self: Box<Self>) -> Option<Bytes> {
        ChatCollector::finish(*self)
    }
}

impl WholeCollector for CompletionCollector {
    fn event(&mut self, event: &ChatEvent) {
        CompletionCollector::event(self, event);
    }

    fn score(&mut self, choice: u32, mean: f32) {
        CompletionCollector::score(self, choice, mean);
    }

    fn bytes(&self) -> usize {
        CompletionCollector::bytes(self)
    }

    fn finish(self: Box<Self>) -> Option<Bytes> {
        CompletionCollector::finish(*self)
    }
}
