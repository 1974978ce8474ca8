//! `/api/embed` and the older `/api/embeddings`: texts in, vectors out.

use bytes::{BufMut, Bytes, BytesMut};

use crate::answer_json::floats;
use crate::openai::read_body;
use penstock_types::Bounds;
use penstock_types::ErrorShape;
use penstock_types::codec::{Elapsed, StreamEncoder, WholeCollector};
use penstock_types::error::ApiError;
use penstock_types::error_body::ollama as error_body;
use penstock_types::event::{ChatEvent, Usage};
use penstock_types::fields::{self, bounded};
use penstock_types::json::{Fault, Kind, Reader, Within, mismatch, short};
use penstock_types::request::{EmbedRequest, Prompt};
use penstock_types::write;

/// Decodes a body; with `batch` the texts are `input`, else the one text is `prompt`.
pub(super) fn decode(batch: bool, body: &[u8], bounds: &Bounds) -> Result<EmbedRequest, ApiError> {
    let (mut model, mut inputs, mut dimensions, mut ignored) = (None, None, None, Vec::new());
    let mut truncate = true;
    let read = read_body(body, bounds, |reader, key| {
        match key {
            "model" => model = Some(fields::name(reader, bounds.model_chars_max)?),
            "input" if batch => inputs = Some(self::inputs(reader, bounds)?),
            "prompt" if !batch => inputs = Some(vec![Prompt::Text(fields::text(reader)?)]),
            "dimensions" if batch => dimensions = Some(fields::count(reader, 1..=u32::MAX)?),
            "truncate" if batch => truncate = reader.boolean()?,
            "keep_alive" | "truncate" | "options" => reader.skip()?,
            _ => {
                reader.skip()?;
                if ignored.len() < bounds.ignored_max {
                    ignored.push(short(key));
                }
            }
        }
        Ok(())
    });
    let missing = || Fault::invalid("required, but missing");
    let finish = || {
        read?;
        let model = model.ok_or_else(missing).within("model")?;
        let inputs = inputs.ok_or_else(missing).within(if batch { "input" } else { "prompt" })?;
        Ok(EmbedRequest { model, inputs, dimensions, task: None, truncate, user: None, ignored })
    };
    finish().map_err(Fault::into_error)
}

fn inputs(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Prompt>, Fault> {
    match reader.kind()? {
        Kind::String => Ok(vec![Prompt::Text(fields::text(reader)?)]),
        Kind::Array => {
            let mut all = Vec::new();
            reader.array(|reader, index| {
                bounded(index, bounds.inputs_max, "inputs")?;
                all.push(Prompt::Text(fields::text(reader).at(index)?));
                Ok(())
            })?;
            if all.is_empty() { Err(Fault::invalid("must hold at least one text")) } else { Ok(all) }
        }
        kind => Err(mismatch("a string or an array of strings", kind)),
    }
}

/// Collector of the vectors of an answer.
pub(super) struct Vectors {
    model: String,
    batch: bool,
    elapsed: Elapsed,
    /// JSON text of each vector; empty until the vector arrives.
    vectors: Vec<BytesMut>,
    usage: Usage,
}

impl Vectors {
    pub(super) fn new(model: String, batch: bool, inputs: usize, elapsed: Elapsed) -> Self {
        Self { model, batch, elapsed, vectors: vec![BytesMut::new(); inputs], usage: Usage::default() }
    }

    fn take(&mut self, event: &ChatEvent) {
        match event {
            ChatEvent::Vector { index, values } => {
                if let Some(vector) = self.vectors.get_mut(*index as usize) {
                    vector.clear();
                    floats(vector, values);
                }
            }
            ChatEvent::Usage(usage) => self.usage = *usage,
            _ => {}
        }
    }

    fn body(&self) -> Option<Bytes> {
        if self.vectors.iter().any(BytesMut::is_empty) {
            return None;
        }
        let mut out = BytesMut::with_capacity(128 + self.vectors.iter().map(|vector| vector.len() + 1).sum::<usize>());
        if !self.batch {
            out.put_slice(b"{\"embedding\":");
            out.put_slice(self.vectors.first()?);
            out.put_u8(b'}');
            return Some(out.freeze());
        }
        out.put_slice(b"{\"model\":");
        write::string(&mut out, &self.model);
        out.put_slice(b",\"embeddings\":[");
        for (index, vector) in self.vectors.iter().enumerate() {
            out.put_slice(if index > 0 { b"," } else { b"" });
            out.put_slice(vector);
        }
        out.put_slice(b"],\"total_duration\":");
        write::integer(&mut out, self.elapsed.get().as_nanos() as u64);
        out.put_slice(b",\"load_duration\":0,\"prompt_eval_count\":");
        write::integer(&mut out, self.usage.prompt_tokens);
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
            None => error_body::put_error(out, "The answer ended before it was complete."),
        }
    }

    fn fail(&mut self, _: ErrorShape, message: &str, out: &mut BytesMut) {
        error_body::put_error(out, message);
    }
}
