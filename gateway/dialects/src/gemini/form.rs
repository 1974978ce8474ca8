//! Answer forms of the Gemini API: the encoder and the collector for each request.

use super::answer::{Collector, Encoder, Meta};
use super::chunk::Identity;
use super::embed::{self, Vectors};
use super::request::{self, Generate};
use penstock_types::Bounds;
use penstock_types::codec::{AnswerForm, AnswerMeta, Decoded, Framing, StreamEncoder, WholeCollector};
use penstock_types::error::ApiError;
use penstock_types::request::Request;

/// Decodes `generateContent` and `streamGenerateContent`, with the form of the answer.
pub fn generate(model: &str, framing: Framing, body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    Ok(decoded(request::decode(bare(model), framing != Framing::Whole, body, bounds)?, framing))
}

/// Decodes the body of a `countTokens` request for `model`.
pub fn count(model: &str, body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    Ok(decoded(request::decode_count(bare(model), body, bounds)?, Framing::Whole))
}

/// Decodes `embedContent`, or `batchEmbedContents` if `batch` is set.
pub fn embed(model: &str, batch: bool, body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    let request = embed::decode(bare(model), batch, body, bounds)?;
    let form = EmbedForm { batch, inputs: request.inputs.len() };
    Ok(Decoded { request: Request::Embed(Box::new(request)), form: Box::new(form) })
}

/// Name of a model without the collection prefix `models/`.
pub(super) fn bare(model: &str) -> &str {
    model.strip_prefix("models/").unwrap_or(model)
}

fn decoded(generate: Generate, framing: Framing) -> Decoded {
    let Generate { chat, include_thoughts } = generate;
    let form = GenerateForm(Meta {
        identity: Identity { id: String::new(), model: chat.model.clone() },
        n: chat.n,
        include_thoughts,
        logprobs: chat.logprobs.is_some(),
        array: framing == Framing::Array,
    });
    Decoded { request: Request::Chat(Box::new(chat)), form: Box::new(form) }
}

struct GenerateForm(Meta);

impl GenerateForm {
    fn meta(&self, meta: &AnswerMeta) -> Meta {
        let identity = Identity { id: meta.id.clone(), model: self.0.identity.model.clone() };
        Meta { identity, ..self.0.clone() }
    }
}

impl AnswerForm for GenerateForm {
    fn choices(&self) -> usize {
        self.0.n as usize
    }

    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder> {
        Box::new(Encoder::new(self.meta(meta)))
    }

    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector> {
        Box::new(Collector::new(self.meta(meta)))
    }
}

struct EmbedForm {
    batch: bool,
    inputs: usize,
}

impl AnswerForm for EmbedForm {
    fn choices(&self) -> usize {
        0
    }

    fn stream(&self, _: &AnswerMeta) -> Box<dyn StreamEncoder> {
        Box::new(Vectors::new(self.batch, self.inputs))
    }

    fn whole(&self, _: &AnswerMeta) -> Box<dyn WholeCollector> {
        Box::new(Vectors::new(self.batch, self.inputs))
    }
}
