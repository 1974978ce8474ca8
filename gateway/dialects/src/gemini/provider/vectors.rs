//! `batchEmbedContents`: the request, and its answer read into vectors.

use bytes::BytesMut;

use super::encode::put_text;
use crate::answer_body::{Answer, truncated};
use crate::answer_json::{self as value, Object};
use penstock_types::codec::{FaultClass, ProviderFault};
use penstock_types::error::ApiError;
use penstock_types::event::{ChatEvent, Usage};
use penstock_types::json::{self, Fault, Kind};
use penstock_types::request::{EmbedRequest, Prompt};

/// Writes the body; `resource` is the model's name with its collection.
pub(super) fn body(request: &EmbedRequest, resource: &str) -> Result<Vec<u8>, ApiError> {
    let mut out = BytesMut::with_capacity(256);
    out.extend_from_slice(b"{\"requests\":[");
    for (index, input) in request.inputs.iter().enumerate() {
        let Prompt::Text(text) = input else {
            let param = format!("input[{index}]");
            let why = format!("{param}: Gemini's API takes text, no token ids");
            return Err(ApiError::unsupported_value(param, why));
        };
        if index > 0 {
            out.extend_from_slice(b",");
        }
        let mut object = Object::open(&mut out);
        object.string("model", resource);
        let mut content = Object::open(object.key("content"));
        let parts = content.key("parts");
        parts.extend_from_slice(b"[");
        put_text(parts, text);
        parts.extend_from_slice(b"]");
        content.close();
        object.optional("taskType", request.task.as_deref());
        object.optional_integer("outputDimensionality", request.dimensions);
        object.close();
    }
    out.extend_from_slice(b"]}");
    Ok(out.into())
}

/// Decoder of an answer with vectors.
pub(super) struct Reader {
    inputs: usize,
    seen: usize,
}

impl Reader {
    /// Creates the decoder for `inputs` texts.
    pub(super) fn new(inputs: usize) -> Self {
        Self { inputs, seen: 0 }
    }
}

impl Answer for Reader {
    fn take(&mut self, _: &[u8], json: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let mut usage = None;
        let mut reader = json::Reader::new(json)?;
        value::fields(&mut reader, |reader, key| match key {
            "embeddings" => value::items(reader, |reader, index| {
                let values = values(reader)?;
                if index < self.inputs && !values.is_empty() {
                    self.seen += 1;
                    out.push(ChatEvent::Vector { index: index as u32, values });
                }
                Ok(())
            }),
            "usageMetadata" => value::fields(reader, |reader, key| match key {
                "promptTokenCount" => {
                    let prompt_tokens = value::count(reader)?.unwrap_or_default();
                    usage = Some(Usage { prompt_tokens, ..Usage::default() });
                    Ok(())
                }
                _ => reader.skip(),
            }),
            _ => reader.skip(),
        })?;
        reader.end()?;
        if self.seen != self.inputs {
            let message = format!("The provider answered {} vectors for {} texts.", self.seen, self.inputs);
            return Err(ProviderFault::new(FaultClass::Garbled, message));
        }
        out.extend(usage.map(ChatEvent::Usage));
        Ok(())
    }

    fn done(&mut self, _: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if self.seen == self.inputs { Ok(()) } else { Err(truncated()) }
    }

    fn cut(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        self.done(out)
    }
}

fn values(reader: &mut json::Reader<'_>) -> Result<Vec<f32>, Fault> {
    let mut values = Vec::new();
    value::fields(reader, |reader, key| match key {
        "values" => value::items(reader, |reader, _| {
            if reader.kind()? != Kind::Number {
                return Err(Fault::invalid("a vector holds what is no number"));
            }
            values.push(value::number(reader)?.unwrap_or_default() as f32);
            Ok(())
        }),
        _ => reader.skip(),
    })?;
    Ok(values)
}
