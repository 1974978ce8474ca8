//! Answer forms of Ollama's API: the encoder and the collector for each request.

use super::answer::{Collector, Encoder, Meta};
use super::embed::{self, Vectors};
use super::request::{decode_chat, decode_generate};
use crate::anthropic::rfc3339;
use penstock_types::Bounds;
use penstock_types::codec::{AnswerForm, AnswerMeta, Decoded, StreamEncoder, WholeCollector};
use penstock_types::error::ApiError;
use penstock_types::request::Request;

/// Decodes the body of `/api/chat`, with the form of the answer.
///
/// # Errors
/// The first fault in reading order.
pub fn chat(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    Ok(decoded(decode_chat(body, bounds)?, true))
}

/// Decodes the body of `/api/generate`, with the form of the answer.
///
/// # Errors
/// The first fault in reading order.
pub fn generate(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    Ok(decoded(decode_generate(body, bounds)?, false))
}

/// Decodes the body of `/api/embed`, or of the older `/api/embeddings` if not `batch`.
///
/// # Errors
/// The first fault in reading order.
pub fn embed(batch: bool, body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    let request = embed::decode(batch, body, bounds)?;
    let form = EmbedForm { model: request.model.clone(), batch, inputs: request.inputs.len() };
    Ok(Decoded { request: Request::Embed(Box::new(request)), form: Box::new(form) })
}

fn decoded(request: Request, is_chat: bool) -> Decoded {
    let form = Form { model: request.model().to_owned(), is_chat };
    Decoded { request, form: Box::new(form) }
}

struct Form {
    model: String,
    is_chat: bool,
}

impl Form {
    fn meta(&self, meta: &AnswerMeta) -> Meta {
        let (model, created) = (self.model.clone(), rfc3339(meta.created));
        Meta { model, created, is_chat: self.is_chat, elapsed: meta.elapsed.clone() }
    }
}

impl AnswerForm for Form {
    fn choices(&self) -> usize {
        1
    }

    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder> {
        Box::new(Encoder::new(self.meta(meta)))
    }

    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector> {
        Box::new(Collector::new(self.meta(meta)))
    }
}

struct EmbedForm {
    model: String,
    batch: bool,
    inputs: usize,
}

impl EmbedForm {
    fn vectors(&self, meta: &AnswerMeta) -> Box<Vectors> {
        Box::new(Vectors::new(self.model.clone(), self.batch, self.inputs, meta.elapsed.clone()))
    }
}

impl AnswerForm for EmbedForm {
    fn choices(&self) -> usize {
        0
    }

    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder> {
        self.vectors(meta)
    }

    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector> {
        self.vectors(meta)
    }
}
