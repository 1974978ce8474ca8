//! `embedContent` and `batchEmbedContents`: texts in, vectors out.

use bytes::{BufMut, Bytes, BytesMut};

use super::contents::text_of;
use super::fields::{list, object, required, unbuilt};
use crate::answer_json::floats;
use penstock_types::Bounds;
use penstock_types::ErrorShape;
use penstock_types::codec::{StreamEncoder, WholeCollector};
use penstock_types::error::ApiError;
use penstock_types::error_body::gemini as error_body;
use penstock_types::error_shape::UPSTREAM;
use penstock_types::event::{ChatEvent, Usage};
use penstock_types::fields;
use penstock_types::json::{Fault, Reader, Within, short};
use penstock_types::request::{EmbedRequest, Prompt};
use penstock_types::write;

/// Decodes a body; with `batch` the body holds `requests`.
pub(super) fn decode(model: &str, batch: bool, body: &[u8], bounds: &Bounds) -> Result<EmbedRequest, ApiError> {
    let read = || {
        let mut reader = Reader::new(body)?;
        let wanted = match batch {
            true => requests(&mut reader, model, bounds)?,
            false => vec![wanted(&mut reader, model, bounds)?],
        };
        reader.end()?;
        joined(model, wanted)
    };
    read().map_err(Fault::into_error)
}

/// One text to be embedded.
struct Wanted {
    text: String,
    task: Option<String>,
    dimensions: Option<u32>,
}

fn requests(reader: &mut Reader<'_>, model: &str, bounds: &Bounds) -> Result<Vec<Wanted>, Fault> {
    let mut all = Vec::new();
    object(reader, bounds.fields_max, |reader, key| match key {
        "requests" => list(reader, bounds.prompts_max, "requests", |reader| {
            all.push(wanted(reader, model, bounds)?);
            Ok(())
        }),
        _ => reader.skip(),
    })?;
    if all.is_empty() {
        return Err(Fault::invalid("must hold at least one request")).within("requests");
    }
    Ok(all)
}

fn wanted(reader: &mut Reader<'_>, model: &str, bounds: &Bounds) -> Result<Wanted, Fault> {
    let (mut text, mut task, mut dimensions) = (None, None, None);
    object(reader, bounds.fields_max, |reader, key| {
        match key {
            "content" => text = Some(text_of(reader, bounds)?),
            "taskType" => task = Some(fields::name(reader, bounds.name_chars_max)?),
            "outputDimensionality" => dimensions = Some(fields::count(reader, 1..=u32::MAX)?),
            "title" => return Err(unbuilt("a title is not built: put it into the text")),
            "model" => {
                let given = fields::name(reader, bounds.model_chars_max)?;
                if super::form::bare(&given) != model {
                    let why = format!("the URL asks for \"{}\", this for \"{}\"", short(model), short(&given));
                    return Err(Fault::invalid(why));
                }
            }
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(Wanted { text: required(text, "content")?, task, dimensions })
}

/// Joins the texts into one request. All of them must agree in task and dimensions.
fn joined(model: &str, wanted: Vec<Wanted>) -> Result<EmbedRequest, Fault> {
    let (task, dimensions) = wanted.first().map_or((None, None), |first| (first.task.clone(), first.dimensions));
    let differs = |what: &str, at: usize| {
        let fault = Fault::invalid("must be the same in all requests of a batch");
        Err(fault).within(what).at(at).within("requests")
    };
    for (at, other) in wanted.iter().enumerate() {
        if other.task != task {
            return differs("taskType", at);
        }
        if other.dimensions != dimensions {
            return differs("outputDimensionality", at);
        }
    }
    let inputs = wanted.into_iter().map(|wanted| Prompt::Text(wanted.text)).collect();
    Ok(EmbedRequest {
        model: model.to_owned(),
        inputs,
        dimensions,
        task,
        truncate: false,
        user: None,
        ignored: Vec::new(),
    })
}

/// Collector of the vectors of an answer.
pub(super) struct Vectors {
    batch: bool,
    /// JSON text of each vector; empty until the vector arrives.
    vectors: Vec<BytesMut>,
    usage: Option<Usage>,
}

impl Vectors {
    pub(super) fn new(batch: bool, inputs: usize) -> Self {
        Self { batch, vectors: vec![BytesMut::new(); inputs], usage: None }
    }

    fn take(&mut self, event: &ChatEvent) {
        match event {
            ChatEvent::Vector { index, values } => {
                if let Some(vector) = self.vectors.get_mut(*index as usize) {
                    vector.clear();
                    vector.put_slice(b"{\"values\":");
                    floats(vector, values);
                    vector.put_u8(b'}');
                }
            }
            ChatEvent::Usage(usage) => self.usage = Some(*usage),
            _ => {}
        }
    }

    fn body(&self) -> Option<Bytes> {
        if self.vectors.iter().any(BytesMut::is_empty) {
            return None;
        }
        let mut out = BytesMut::with_capacity(64 + self.vectors.iter().map(|vector| vector.len() + 1).sum::<usize>());
        if self.batch {
            out.put_slice(b"{\"embeddings\":[");
            for (index, vector) in self.vectors.iter().enumerate() {
                out.put_slice(if index > 0 { b"," } else { b"" });
                out.put_slice(vector);
            }
            out.put_u8(b']');
        } else {
            out.put_slice(b"{\"embedding\":");
            out.put_slice(self.vectors.first()?);
        }
        if let Some(usage) = self.usage {
            out.put_slice(b",\"usageMetadata\":{\"promptTokenCount\":");
            write::integer(&mut out, usage.prompt_tokens);
            out.put_slice(b",\"totalTokenCount\":");
            write::integer(&mut out, usage.prompt_tokens);
            out.put_u8(b'}');
        }
        out.put_u8(b'}');
        Some(out.freeze())
    }
}

impl WholeCollector for Vectors {
    fn event(&mut self, event: &ChatEvent) {
        self.take(event);
    }

    fn bytes(&self) -> usize {
        self.vectors.iter().map(BytesMut::len).sum()
    }

    fn finish(self: Box<Self>) -> Option<Bytes> {
        self.body()
    }
}

/// Vectors are not streamed; a stream gets the whole answer as one piece.
impl StreamEncoder for Vectors {
    fn event(&mut self, event: &ChatEvent, _: &mut BytesMut) {
        self.take(event);
    }

    fn done(&mut self, out: &mut BytesMut) {
        match self.body() {
            Some(body) => out.put_slice(&body),
            None => self.fail(UPSTREAM, "The answer ended before it was complete.", out),
        }
    }

    fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut) {
        error_body::put_error(out, shape, message);
    }
}
