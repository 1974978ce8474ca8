//! `POST /v1/rerank` (as Jina, Cohere and vLLM shape it) and `POST /v1/score` (vLLM's): documents in, scores out.

use bytes::{Bytes, BytesMut};

use super::chat::read_body;
use super::common::Common;
use super::embeddings::put_usage;
use super::form::{WholeOnly, refuse_stream};
use super::provider::{Object, list};
use super::unbuilt;
use penstock_types::Bounds;
use penstock_types::codec::{AnswerForm, AnswerMeta, Decoded, StreamEncoder, WholeCollector};
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::event::{ChatEvent, Usage};
use penstock_types::fields::{self, bounded};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, mismatch};
use penstock_types::request::{Request, RerankRequest};

/// Decodes `/v1/rerank`, with the form of its answer.
pub fn rerank(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    let mut draft = Draft::new();
    let request = read_body(body, bounds, |reader, key| {
        match key {
            "query" => draft.query = Some(fields::text(reader)?),
            "documents" => draft.documents = Some(documents(reader, bounds)?),
            "top_n" => draft.top_n = Some(fields::count(reader, 1..=u32::MAX)?),
            "return_documents" => draft.return_documents = reader.boolean()?,
            _ => draft.field(reader, key, bounds)?,
        }
        Ok(())
    })
    .and_then(|()| draft.finish("query", "documents"))
    .map_err(Fault::into_error)?;
    Ok(decoded(request, Shape::Rerank))
}

/// Decodes `/v1/score`, with the form of its answer: one text scored against others.
pub fn score(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    let mut draft = Draft::new();
    let request = read_body(body, bounds, |reader, key| {
        match key {
            "text_1" => {
                let mut texts = documents(reader, bounds)?;
                if texts.len() > 1 {
                    let why = "several texts to be compared in pairs are not built; send one request for each";
                    return Err(Fault::of(ApiErrorKind::UnsupportedValue, why));
                }
                draft.query = texts.pop();
            }
            "text_2" => draft.documents = Some(documents(reader, bounds)?),
            _ => draft.field(reader, key, bounds)?,
        }
        Ok(())
    })
    .and_then(|()| draft.finish("text_1", "text_2"))
    .map_err(Fault::into_error)?;
    Ok(decoded(request, Shape::Score))
}

struct Draft {
    common: Common,
    query: Option<String>,
    documents: Option<Vec<String>>,
    top_n: Option<u32>,
    return_documents: bool,
}

impl Draft {
    fn new() -> Self {
        Self { common: Common::new(), query: None, documents: None, top_n: None, return_documents: false }
    }

    fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "model" => self.common.model = Some(fields::name(reader, bounds.model_chars_max)?),
            "user" => _ = fields::string(reader, 512)?,
            "stream" => refuse_stream(reader)?,
            _ => unbuilt::other(&mut self.common, reader, key, bounds)?,
        }
        Ok(())
    }

    fn finish(mut self, query: &str, documents: &str) -> Result<RerankRequest, Fault> {
        Ok(RerankRequest {
            model: self.common.take_model()?,
            query: self.query.ok_or_else(|| Fault::invalid("required, but missing")).within(query)?,
            documents: self.documents.ok_or_else(|| Fault::invalid("required, but missing")).within(documents)?,
            top_n: self.top_n,
            return_documents: self.return_documents,
            ignored: self.common.ignored,
        })
    }
}

/// Reads a text, or a list of texts or `{"text": …}`; at least one.
fn documents(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<String>, Fault> {
    if reader.kind()? == Kind::String {
        return Ok(vec![fields::text(reader)?]);
    }
    let mut all = Vec::new();
    reader.array(|reader, index| {
        bounded(index, bounds.inputs_max, "texts")?;
        all.push(document(reader, bounds).at(index)?);
        Ok(())
    })?;
    if all.is_empty() { Err(Fault::invalid("must not be empty")) } else { Ok(all) }
}

fn document(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    match reader.kind()? {
        Kind::String => return fields::text(reader),
        Kind::Object => {}
        kind => return Err(mismatch("a string or an object with a text", kind)),
    }
    let mut text = None;
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "text" => text = Some(fields::text(reader).within("text")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    text.ok_or_else(|| Fault::invalid("required, but missing")).within("text")
}

#[derive(Clone, Copy)]
enum Shape {
    Rerank,
    Score,
}

fn decoded(request: RerankRequest, shape: Shape) -> Decoded {
    let documents = if request.return_documents { request.documents.clone() } else { Vec::new() };
    let count = request.documents.len();
    let answered = request.top_n.map_or(count, |top| count.min(top as usize));
    let form = RankForm { model: request.model.clone(), shape, documents, count, answered };
    Decoded { request: Request::Rerank(Box::new(request)), form: Box::new(form) }
}

#[derive(Clone)]
struct RankForm {
    model: String,
    shape: Shape,
    /// Documents to repeat in the answer; empty unless asked for.
    documents: Vec<String>,
    count: usize,
    /// Number of documents in the answer.
    answered: usize,
}

impl AnswerForm for RankForm {
    fn choices(&self) -> usize {
        0
    }

    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder> {
        Box::new(WholeOnly::new(self.whole(meta)))
    }

    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector> {
        let scores = vec![None; self.count];
        Box::new(RankCollector { form: self.clone(), meta: meta.clone(), scores, usage: Usage::default() })
    }
}

struct RankCollector {
    form: RankForm,
    meta: AnswerMeta,
    /// Score of each document, by its index in the request; `None` until it has come.
    scores: Vec<Option<f64>>,
    usage: Usage,
}

impl WholeCollector for RankCollector {
    fn event(&mut self, event: &ChatEvent) {
        match event {
            ChatEvent::Score { index, score } => {
                if let Some(place) = self.scores.get_mut(*index as usize) {
                    *place = Some(*score).filter(|score| score.is_finite());
                }
            }
            ChatEvent::Usage(usage) => self.usage = *usage,
            _ => {}
        }
    }

    fn bytes(&self) -> usize {
        self.scores.len() * 16
    }

    fn finish(self: Box<Self>) -> Option<Bytes> {
        let mut scores: Vec<(usize, f64)> =
            self.scores.iter().enumerate().filter_map(|(index, score)| Some((index, (*score)?))).collect();
        if scores.len() < self.form.answered {
            return None;
        }
        let mut out = BytesMut::with_capacity(256 + 64 * scores.len());
        let mut object = Object::open(&mut out);
        match self.form.shape {
            Shape::Rerank => {
                // Best first; of equal scores the earlier document first. The cut is made here because providers
                // without `top_n` score all.
                scores.sort_by(|one, other| other.1.total_cmp(&one.1));
                scores.truncate(self.form.answered);
                object.string("id", &format!("rerank-{}", self.meta.id));
                object.string("object", "list");
                object.string("model", &self.form.model);
                list(object.key("results"), &scores, |out, score| self.put_result(out, score));
            }
            Shape::Score => {
                object.string("id", &format!("score-{}", self.meta.id));
                object.string("object", "list");
                object.integer("created", self.meta.created);
                object.string("model", &self.form.model);
                list(object.key("data"), &scores, |out, (index, score)| {
                    let mut item = Object::open(out);
                    item.integer("index", *index as u64);
                    item.string("object", "score");
                    item.raw("score", &format!("{score:?}"));
                    item.close();
                });
            }
        }
        put_usage(&mut object, &self.usage);
        object.close();
        Some(out.freeze())
    }
}

impl RankCollector {
    fn put_result(&self, out: &mut BytesMut, (index, score): &(usize, f64)) {
        let mut item = Object::open(out);
        item.integer("index", *index as u64);
        item.raw("relevance_score", &format!("{score:?}"));
        if let Some(text) = self.form.documents.get(*index) {
            let mut document = Object::open(item.key("document"));
            document.string("text", text);
            document.close();
        }
        item.close();
    }
}
