//! Embeddings and rerank at a provider: the requests' bodies, and the answers decoded into events.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::BytesMut;

use super::completion::put_prompts;
use super::{Server, fault, usage};
use crate::answer_body::{Answer, truncated};
use crate::answer_json::{self as value, Object};
use crate::identifiers;
use penstock_types::codec::{FaultClass, ProviderFault};
use penstock_types::error::ApiError;
use penstock_types::event::ChatEvent;
use penstock_types::json::{Fault, Kind, Reader};
use penstock_types::request::{EmbedRequest, RerankRequest};

/// Body of an embedding request. Base64 is asked for, a fourth of the size; numbers are accepted too. Gemini's task
/// type is left out.
pub(super) fn encode_embed(server: Server, request: &EmbedRequest, model: &str) -> Result<Vec<u8>, ApiError> {
    let mut out = BytesMut::with_capacity(512);
    let mut object = Object::open(&mut out);
    object.string("model", model);
    put_prompts(object.key("input"), &request.inputs, "input")?;
    object.string("encoding_format", "base64");
    object.optional_integer("dimensions", request.dimensions);
    let user = request.user.as_deref().map(|user| identifiers::user(server.api(), user));
    object.optional("user", user.as_deref());
    object.close();
    Ok(out.into())
}

/// Body of a rerank request. The gateway itself puts the documents into the answer, so they are not asked for.
pub(super) fn encode_rerank(request: &RerankRequest, model: &str) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(512);
    let mut object = Object::open(&mut out);
    object.string("model", model);
    object.string("query", &request.query);
    object.strings("documents", &request.documents);
    object.optional_integer("top_n", request.top_n);
    object.close();
    out.into()
}

/// Decoder of an answer with vectors.
pub(super) struct VectorReader {
    inputs: usize,
    complete: bool,
}

impl VectorReader {
    /// Creates the decoder for `inputs` texts.
    pub(super) fn new(inputs: usize) -> Self {
        Self { inputs, complete: false }
    }
}

/// Index, where it is given, and values, where they can be read.
type Vector = (Option<u64>, Option<Vec<f32>>);

fn vector(reader: &mut Reader<'_>) -> Result<Vector, Fault> {
    let (mut index, mut values) = (None, None);
    value::fields(reader, |reader, key| {
        match key {
            "index" => index = value::count(reader)?,
            "embedding" => values = embedding(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok((index, values))
}

/// Reads numbers, or base64 of little-endian 32-bit floats.
fn embedding(reader: &mut Reader<'_>) -> Result<Option<Vec<f32>>, Fault> {
    if reader.kind()? == Kind::String {
        let bytes = STANDARD.decode(reader.string()?.as_bytes()).ok();
        return Ok(bytes
            .as_deref()
            .map(<[u8]>::as_chunks::<4>)
            .filter(|(_, rest)| rest.is_empty())
            .map(|(floats, _)| floats.iter().map(|float| f32::from_le_bytes(*float)).collect()));
    }
    let (mut values, mut good) = (Vec::new(), true);
    value::items(reader, |reader, _| {
        match value::number(reader)? {
            Some(number) => values.push(number as f32),
            None => good = false,
        }
        Ok(())
    })?;
    Ok(Some(values).filter(|_| good))
}

impl Answer for VectorReader {
    fn take(&mut self, name: &[u8], json: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        fault::check(name, json)?;
        let (mut vectors, mut counts) = (Vec::new(), None);
        let mut reader = Reader::new(json).map_err(ProviderFault::from)?;
        value::fields(&mut reader, |reader, key| {
            match key {
                "data" => value::items(reader, |reader, _| {
                    vectors.push(vector(reader)?);
                    Ok(())
                })?,
                "usage" => counts = Some(usage::read(reader)?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        reader.end()?;
        let mut sorted = vec![None; self.inputs];
        for (at, (index, values)) in vectors.into_iter().enumerate() {
            let index = index.unwrap_or(at as u64) as usize;
            let good = |values: &Vec<f32>| !values.is_empty() && values.iter().all(|value| value.is_finite());
            if let (Some(place), Some(values)) = (sorted.get_mut(index), values.filter(good)) {
                *place = Some(values);
            }
        }
        for (index, values) in (0..).zip(sorted) {
            let values = values.ok_or_else(|| {
                let message = format!("The provider's answer has no vector for input {index}.");
                ProviderFault::new(FaultClass::Garbled, message)
            })?;
            out.push(ChatEvent::Vector { index, values });
        }
        out.extend(counts.map(ChatEvent::Usage));
        self.complete = true;
        Ok(())
    }

    fn done(&mut self, _: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if self.complete { Ok(()) } else { Err(truncated()) }
    }

    fn cut(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        self.done(out)
    }
}

/// Decoder of an answer with scores.
pub(super) struct ScoreReader {
    documents: usize,
    complete: bool,
}

impl ScoreReader {
    /// Creates the decoder for `documents` documents.
    pub(super) fn new(documents: usize) -> Self {
        Self { documents, complete: false }
    }
}

fn score(reader: &mut Reader<'_>) -> Result<Option<(u64, f64)>, Fault> {
    let (mut index, mut score) = (None, None);
    value::fields(reader, |reader, key| {
        match key {
            "index" => index = value::count(reader)?,
            "relevance_score" | "score" => score = value::number(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(index.zip(score))
}

impl Answer for ScoreReader {
    fn take(&mut self, name: &[u8], json: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        fault::check(name, json)?;
        let (mut scores, mut counts, mut found) = (Vec::new(), None, false);
        let mut list = |reader: &mut Reader<'_>| {
            found = true;
            value::items(reader, |reader, _| {
                scores.extend(score(reader)?);
                Ok(())
            })
        };
        let mut reader = Reader::new(json).map_err(ProviderFault::from)?;
        if reader.kind().map_err(ProviderFault::from)? == Kind::Array {
            list(&mut reader)?; // TEI's
        } else {
            value::fields(&mut reader, |reader, key| {
                match key {
                    "results" | "data" => list(reader)?,
                    "usage" => counts = Some(usage::read(reader)?),
                    "meta" => counts = counts.or(usage::meta(reader)?),
                    _ => reader.skip()?,
                }
                Ok(())
            })?;
        }
        reader.end()?;
        if !found || scores.iter().any(|(index, _)| *index >= self.documents as u64) {
            let message = "The provider's answer is no ranking of the documents.";
            return Err(ProviderFault::new(FaultClass::Garbled, message));
        }
        scores.sort_by(|one, other| other.1.total_cmp(&one.1));
        out.extend(scores.into_iter().map(|(index, score)| ChatEvent::Score { index: index as u32, score }));
        out.extend(counts.map(ChatEvent::Usage));
        self.complete = true;
        Ok(())
    }

    fn done(&mut self, _: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if self.complete { Ok(()) } else { Err(truncated()) }
    }

    fn cut(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        self.done(out)
    }
}
