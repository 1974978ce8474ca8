//! A body that is passed on with little of it changed, in pieces of the original.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::Peek;
use crate::write;

/// What changes in a body that is passed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Splice<'a> {
    /// Another name of the model.
    pub model: Option<&'a str>,
    /// The counts of the stream are asked for.
    pub include_usage: bool,
    /// The bound of its output, and the name under which it is put in where there is none.
    pub max_tokens: Option<(u32, &'a str)>,
    /// Counts are written in digits alone: a limit has counted them.
    pub plain_counts: bool,
}

/// What changes, piece by piece.
#[derive(Default)]
struct Edits {
    /// In the place of what stands there.
    replaced: Vec<(Range<usize>, Bytes)>,
    /// Fields that are put in front of all others.
    added: Vec<String>,
}

/// The body with another model name, with another bound of its output, or with the counts of a stream asked for, in pieces of the
/// original; `body` is what `peek` was made from. Nothing else changes, and no name is written that stands there already.
pub fn spliced(body: &Bytes, peek: &Peek, change: Splice<'_>) -> Vec<Bytes> {
    let mut edits = Edits::default();
    if change.include_usage {
        edits.usage(body, peek);
    }
    if let Some((max_tokens, name)) = change.max_tokens {
        edits.bound(peek, max_tokens, name);
    }
    if change.plain_counts {
        let plain = peek.amounts.odd.iter().map(|(at, count)| (at.clone(), Bytes::from(count.to_string())));
        edits.replaced.extend(plain);
    }
    if let (Some(model), Some(at)) = (change.model, &peek.model_at) {
        edits.replaced.push((at.clone(), quoted(model)));
    }
    if !edits.added.is_empty() {
        let comma = if peek.is_empty { "" } else { "," };
        let fields = edits.added.join(",") + comma;
        edits.replaced.push((peek.start..peek.start, fields.into()));
    }
    edits.replaced.sort_by_key(|(at, _)| at.start);
    let mut out = Vec::with_capacity(2 * edits.replaced.len() + 1);
    let mut done = 0;
    for (at, text) in edits.replaced {
        out.push(body.slice(done..at.start));
        out.push(text);
        done = at.end;
    }
    out.push(body.slice(done..));
    out
}

/// The body with another model name at `at`, where it stands in quotes.
pub fn renamed(body: &Bytes, at: &Range<usize>, model: &str) -> Vec<Bytes> {
    vec![body.slice(..at.start), quoted(model), body.slice(at.end..)]
}

fn quoted(model: &str) -> Bytes {
    let mut text = BytesMut::with_capacity(model.len() + 2);
    write::string(&mut text, model);
    text.freeze()
}

impl Edits {
    /// The bound that stands there says `max_tokens`; without one, it takes the place of a null, or is put in under `name`.
    fn bound(&mut self, peek: &Peek, max_tokens: u32, name: &str) {
        let amounts = &peek.amounts;
        let is_gemini = name == "maxOutputTokens";
        // Gemini has one bound, whose names are two spellings; the others have several, of which servers read the first that is no null.
        let null = amounts.nulls.iter().find(|(have, _)| is_gemini || *have == name).map(|(_, at)| at);
        if let Some(at) = amounts.bound_at.as_ref().or(null) {
            self.replaced.push((at.clone(), Bytes::from(max_tokens.to_string())));
            return;
        }
        let field = format!("\"{name}\":{max_tokens}");
        match &amounts.config {
            _ if !is_gemini => self.added.push(field),
            None => self.added.push(format!("\"generationConfig\":{{{field}}}")),
            Some(config) if config.is_null => self.replaced.push((config.at.clone(), format!("{{{field}}}").into())),
            Some(config) => {
                let comma = if config.is_empty { "" } else { "," };
                self.replaced.push((config.at.start + 1..config.at.start + 1, (field + comma).into()));
            }
        }
    }

    /// The least change that makes `stream_options.include_usage` true.
    fn usage(&mut self, body: &Bytes, peek: &Peek) {
        if let Some(at) = &peek.include_usage_at {
            self.replaced.push((at.clone(), Bytes::from_static(b"true")));
            return;
        }
        let Some((at, _)) = &peek.stream_options else {
            self.added.push("\"stream_options\":{\"include_usage\":true}".to_owned());
            return;
        };
        let inner = body[at.clone()].strip_prefix(b"{").and_then(|rest| rest.strip_suffix(b"}"));
        self.replaced.push(match inner.map(<[u8]>::trim_ascii) {
            Some([_, ..]) => (at.start + 1..at.start + 1, Bytes::from_static(b"\"include_usage\":true,")),
            _ => (at.clone(), Bytes::from_static(b"{\"include_usage\":true}")),
        });
    }
}
