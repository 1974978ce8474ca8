//! Small edits of a forwarded body, made of slices of the original.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::Peek;
use crate::write;

/// Edits of a body that is forwarded in the client's own dialect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Splice<'a> {
    /// Name that replaces the model's; `None` keeps it.
    pub model: Option<&'a str>,
    /// True to ask for the stream's counts.
    pub include_usage: bool,
    /// Bound of the output, and the field name under which it is inserted where the body has none.
    pub max_tokens: Option<(u32, &'a str)>,
    /// True to write counts in digits alone, because a limit has counted them.
    pub plain_counts: bool,
}

/// List of edits to a body, from which its pieces are cut.
#[derive(Default)]
struct Edits {
    /// Byte ranges of the original, and the text that replaces each.
    replaced: Vec<(Range<usize>, Bytes)>,
    /// Fields inserted in front of all others.
    added: Vec<String>,
}

/// The body with another model name, another bound of its output, or the stream's counts asked for, as slices of the
/// original; `body` must be the one that `peek` was made from. Nothing else changes, and no name is inserted that
/// exists already.
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

/// The body with another model name at `at`, the range of the quoted name.
pub fn renamed(body: &Bytes, at: &Range<usize>, model: &str) -> Vec<Bytes> {
    vec![body.slice(..at.start), quoted(model), body.slice(at.end..)]
}

fn quoted(model: &str) -> Bytes {
    let mut text = BytesMut::with_capacity(model.len() + 2);
    write::string(&mut text, model);
    text.freeze()
}

impl Edits {
    /// Sets the bound to `max_tokens`: in place of the body's bound, else in place of a null, else inserted under
    /// `name`.
    fn bound(&mut self, peek: &Peek, max_tokens: u32, name: &str) {
        let amounts = &peek.amounts;
        let is_gemini = name == "maxOutputTokens";
        // Gemini has one bound, whose names are two spellings; the other APIs have several, of which servers read the
        // first that is not null.
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

    /// Makes `stream_options.include_usage` true with the smallest edit.
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
