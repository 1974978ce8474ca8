//! `POST /v1/embeddings`: texts in, vectors out.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, Bytes, BytesMut};

use super::chat::read_body;
use super::common::Common;
use super::completion::prompts;
use super::form::{WholeOnly, refuse_stream};
use super::provider::Object;
use super::unbuilt;
use crate::answer_json::floats;
use penstock_types::Bounds;
use penstock_types::codec::{AnswerForm, AnswerMeta, Decoded, StreamEncoder, WholeCollector};
use penstock_types::error::ApiError;
use penstock_types::event::{ChatEvent, Usage};
use penstock_types::fields;
use penstock_types::json::{Fault, Within};
use penstock_types::request::{EmbedRequest, Request};

/// Encoding of vectors in the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VectorFormat {
    /// A JSON list of numbers; the default.
    #[default]
    Float,
    /// Base64 of little-endian 32-bit floats.
    Base64,
}

/// Decodes `/v1/embeddings`, with the form of its answer.
pub fn embeddings(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    let (mut common, mut format) = (Common::new(), VectorFormat::default());
    let (mut inputs, mut dimensions) = (None, None);
    let request = read_body(body, bounds, |reader, key| {
        match key {
            "model" => common.model = Some(fields::name(reader, bounds.model_chars_max)?),
            "input" => inputs = Some(prompts(reader, bounds, bounds.inputs_max)?),
            "dimensions" => dimensions = Some(fields::count(reader, 1..=u32::MAX)?),
            "encoding_format" => {
                let words = [("float", VectorFormat::Float), ("base64", VectorFormat::Base64)];
                format = fields::word(reader, &words)?;
            }
            "user" => common.user = Some(fields::string(reader, 512)?),
            "stream" => refuse_stream(reader)?,
            _ => unbuilt::other(&mut common, reader, key, bounds)?,
        }
        Ok(())
    })
    .and_then(|()| {
        let model = common.take_model()?;
        let inputs = inputs.ok_or_else(|| Fault::invalid("required, but missing")).within("input")?;
        let (user, ignored) = (common.user.take(), std::mem::take(&mut common.ignored));
        Ok(EmbedRequest { model, inputs, dimensions, task: None, truncate: false, user, ignored })
    })
    .map_err(Fault::into_error)?;
    let form = EmbedForm { model: request.model.clone(), inputs: request.inputs.len(), format };
    Ok(Decoded { request: Request::Embed(Box::new(request)), form: Box::new(form) })
}

struct EmbedForm {
    model: String,
    inputs: usize,
    format: VectorFormat,
}

impl AnswerForm for EmbedForm {
    fn choices(&self) -> usize {
        0
    }

    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder> {
        Box::new(WholeOnly::new(self.whole(meta)))
    }

    fn whole(&self, _: &AnswerMeta) -> Box<dyn WholeCollector> {
        let vectors = (0..self.inputs).map(|_| BytesMut::new()).collect();
        Box::new(EmbedCollector { model: self.model.clone(), format: self.format, vectors, usage: Usage::default() })
    }
}

struct EmbedCollector {
    model: String,
    format: VectorFormat,
    /// JSON text of each vector; empty until the vector arrives.
    vectors: Vec<BytesMut>,
    usage: Usage,
}

impl WholeCollector for EmbedCollector {
    fn event(&mut self, event: &ChatEvent) {
        match event {
            ChatEvent::Vector { index, values } => {
                if let Some(place) = self.vectors.get_mut(*index as usize) {
                    place.clear();
                    put_vector(place, self.format, values);
                }
            }
            ChatEvent::Usage(usage) => self.usage = *usage,
            _ => {}
        }
    }

    fn bytes(&self) -> usize {
        self.vectors.iter().map(BytesMut::len).sum()
    }

    fn finish(self: Box<Self>) -> Option<Bytes> {
        let mut out = BytesMut::with_capacity(256 + 64 * self.vectors.len() + self.bytes());
        let mut object = Object::open(&mut out);
        object.string("object", "list");
        let data = object.key("data");
        data.put_u8(b'[');
        for (index, vector) in self.vectors.iter().enumerate() {
            if vector.is_empty() {
                return None;
            }
            if index > 0 {
                data.put_u8(b',');
            }
            let mut item = Object::open(data);
            item.string("object", "embedding");
            item.integer("index", index as u64);
            item.key("embedding").put_slice(vector);
            item.close();
        }
        data.put_u8(b']');
        object.string("model", &self.model);
        put_usage(&mut object, &self.usage);
        object.close();
        Some(out.freeze())
    }
}

fn put_vector(out: &mut BytesMut, format: VectorFormat, values: &[f32]) {
    match format {
        VectorFormat::Float => floats(out, values),
        VectorFormat::Base64 => {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            out.put_u8(b'"');
            out.put_slice(STANDARD.encode(bytes).as_bytes());
            out.put_u8(b'"');
        }
    }
}

/// Writes the `usage` of an operation that generates no tokens.
pub(super) fn put_usage(object: &mut Object<'_>, usage: &Usage) {
    let mut counts = Object::open(object.key("usage"));
    counts.integer("prompt_tokens", usage.prompt_tokens);
    counts.integer("total_tokens", usage.total());
    counts.close();
}
