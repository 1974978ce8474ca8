//! What the gateway must know of a body that it passes on untouched: one borrowed pass over the top level, nothing built.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::Bounds;
use crate::error::ApiError;
use crate::fields;
use crate::json::{Fault, Kind, Names, Reader, Within};
use crate::write;

/// Longest `user` that is looked at; what is longer is passed on all the same.
const USER_BYTES_MAX: usize = 1024;

/// Fields that prompts are made of, in the order in which they come.
const PROMPT: [&[&str]; 3] = [
    &["tools"],
    &["system", "instructions", "systemInstruction", "system_instruction"],
    &["messages", "prompt", "input", "contents"],
];

/// The top level of a request body, as far as routing needs it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peek {
    /// `model`.
    pub model: Option<String>,
    /// Where its value stands in the body, quotes included: to be replaced when an upstream knows the model by another name.
    pub model_at: Option<Range<usize>>,
    /// `stream`.
    pub stream: bool,
    /// Output tokens asked for at most, under whichever of its names.
    pub max_tokens: Option<u32>,
    /// Where these bounds stand.
    pub max_tokens_at: Vec<Range<usize>>,
    /// Answers asked for at once (`n`, `best_of`, Gemini's `candidateCount`); 0: it does not say.
    pub choices: u32,
    /// Prompts of a completion that has several.
    pub prompts: u32,
    /// Gemini's `generationConfig`: where its object stands.
    pub config_at: Option<Range<usize>>,
    /// `user`, when it is text.
    pub user: Option<String>,
    /// `stream_options`: where its value stands, and whether it asks for usage.
    pub stream_options: Option<(Range<usize>, bool)>,
    /// Where the value of its `include_usage` stands.
    pub include_usage_at: Option<Range<usize>>,
    /// Where what makes the prompt stands, in the order in which prompts are made of it: tools, system, messages.
    pub prompt_at: Vec<Range<usize>>,
    /// Just behind the opening brace: where a field can be put in.
    pub start: usize,
    /// Whether the object is empty.
    pub is_empty: bool,
}

/// Reads the top level. Every value is checked to be JSON; a name that stands twice is refused, because two readers could differ
/// about which one counts.
pub fn peek(body: &[u8], bounds: &Bounds) -> Result<Peek, ApiError> {
    read(body, bounds).map_err(Fault::into_error)
}

fn read(body: &[u8], bounds: &Bounds) -> Result<Peek, Fault> {
    let mut reader = Reader::new(body)?;
    let kind = reader.kind()?;
    if kind != Kind::Object {
        return Err(Fault::invalid(format!("The body must be a JSON object, got {}.", kind.name())));
    }
    let mut names = Names::new(bounds.fields_max);
    let mut out = Peek { start: reader.position() + 1, is_empty: true, ..Peek::default() };
    let mut parts: Vec<(usize, Range<usize>)> = Vec::new();
    reader.object(|reader, key| {
        names.add(&key)?;
        out.is_empty = false;
        reader.kind()?;
        let from = reader.position();
        if reader.null()? {
            if key == "stream_options" {
                out.stream_options = Some((from..reader.position(), false));
            }
            return Ok(());
        }
        field(&mut out, reader, &key, bounds).within(&key)?;
        if let Some(place) = PROMPT.iter().position(|names| names.contains(&&*key)) {
            parts.push((place, from..reader.position()));
        }
        Ok(())
    })?;
    reader.end()?;
    parts.sort_by_key(|(place, _)| *place);
    out.prompt_at = parts.into_iter().map(|(_, at)| at).collect();
    Ok(out)
}

fn field(out: &mut Peek, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
    match key {
        "model" => {
            reader.kind()?;
            let from = reader.position();
            out.model = Some(fields::name(reader, bounds.model_chars_max)?);
            out.model_at = Some(from..reader.position());
        }
        "stream" => out.stream = reader.boolean()?,
        "max_completion_tokens" | "max_tokens" | "max_output_tokens" if reader.kind()? == Kind::Number => {
            bound(out, reader)?;
        }
        "n" | "best_of" if reader.kind()? == Kind::Number => out.choices = out.choices.max(count(reader)?),
        "prompt" if reader.kind()? == Kind::Array => reader.array(|reader, _| {
            // Of a prompt that is token ids, every element is a number.
            out.prompts += u32::from(reader.kind()? != Kind::Number);
            reader.skip()
        })?,
        "generationConfig" if reader.kind()? == Kind::Object => {
            let from = reader.position();
            reader.object(|reader, key| match &*key {
                "maxOutputTokens" if reader.kind()? == Kind::Number => bound(out, reader),
                "candidateCount" if reader.kind()? == Kind::Number => {
                    out.choices = out.choices.max(count(reader)?);
                    Ok(())
                }
                _ => reader.skip(),
            })?;
            out.config_at = Some(from..reader.position());
        }
        "stream_options" if reader.kind()? == Kind::Object => {
            let from = reader.position();
            let mut usage = false;
            reader.object(|reader, key| {
                let kind = reader.kind()?;
                let from = reader.position();
                if key != "include_usage" {
                    return reader.skip();
                }
                if out.include_usage_at.is_some() {
                    return Err(Fault::invalid("this field is given twice")).within(&key);
                }
                if kind == Kind::Bool {
                    usage = reader.boolean()?;
                } else {
                    reader.skip()?;
                }
                out.include_usage_at = Some(from..reader.position());
                Ok(())
            })?;
            out.stream_options = Some((from..reader.position(), usage));
        }
        "user" if reader.kind()? == Kind::String => {
            out.user = Some(fields::text(reader)?).filter(|user| user.len() <= USER_BYTES_MAX);
        }
        _ => reader.skip()?,
    }
    Ok(())
}

fn count(reader: &mut Reader<'_>) -> Result<u32, Fault> {
    Ok(reader.number()?.parse::<f64>().map_or(u32::MAX, |value| value as u32))
}

/// A bound of the output.
fn bound(out: &mut Peek, reader: &mut Reader<'_>) -> Result<(), Fault> {
    reader.kind()?;
    let from = reader.position();
    let given = count(reader)?;
    out.max_tokens = Some(out.max_tokens.map_or(given, |other| other.max(given)));
    out.max_tokens_at.push(from..reader.position());
    Ok(())
}

/// What changes in a body that is passed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Splice<'a> {
    /// Another name of the model.
    pub model: Option<&'a str>,
    /// The counts of the stream are asked for.
    pub include_usage: bool,
    /// The bound of its output, and the name under which it is put in where there is none.
    pub max_tokens: Option<(u32, &'a str)>,
}

/// The body with another model name, or with the counts of a stream asked for, in pieces of the original; `body` is what `peek` was
/// made from. Nothing else changes.
pub fn spliced(body: &Bytes, peek: &Peek, change: Splice<'_>) -> Vec<Bytes> {
    let mut edits: Vec<(Range<usize>, Bytes)> = Vec::with_capacity(2);
    if let Some((max_tokens, name)) = change.max_tokens {
        bound_edits(peek, max_tokens, name, &mut edits);
    }
    if let (Some(model), Some(at)) = (change.model, &peek.model_at) {
        let mut text = BytesMut::with_capacity(model.len() + 2);
        write::string(&mut text, model);
        edits.push((at.clone(), text.freeze()));
    }
    if change.include_usage {
        edits.push(usage_edit(body, peek));
    }
    edits.sort_by_key(|(at, _)| at.start);
    let mut out = Vec::with_capacity(2 * edits.len() + 1);
    let mut done = 0;
    for (at, text) in edits {
        out.push(body.slice(done..at.start));
        out.push(text);
        done = at.end;
    }
    out.push(body.slice(done..));
    out
}

/// Every bound that stands there says `max_tokens`; without one, it is put in under `name`.
fn bound_edits(peek: &Peek, max_tokens: u32, name: &str, edits: &mut Vec<(Range<usize>, Bytes)>) {
    let number = max_tokens.to_string();
    if !peek.max_tokens_at.is_empty() {
        edits.extend(peek.max_tokens_at.iter().map(|at| (at.clone(), Bytes::from(number.clone()))));
        return;
    }
    let (field, at) = match (name, &peek.config_at) {
        ("maxOutputTokens", Some(at)) => (format!("\"{name}\":{number}"), at.start + 1),
        ("maxOutputTokens", None) => (format!("\"generationConfig\":{{\"{name}\":{number}}}"), peek.start),
        _ => (format!("\"{name}\":{number}"), peek.start),
    };
    let alone = if at == peek.start { peek.is_empty } else { peek.config_at.as_ref().is_some_and(|at| at.len() == 2) };
    let comma = if alone { "" } else { "," };
    edits.push((at..at, Bytes::from(field + comma)));
}

/// The least change that makes `stream_options.include_usage` true.
fn usage_edit(body: &Bytes, peek: &Peek) -> (Range<usize>, Bytes) {
    if let Some(at) = &peek.include_usage_at {
        return (at.clone(), Bytes::from_static(b"true"));
    }
    let Some((at, _)) = &peek.stream_options else {
        let text = if peek.is_empty {
            &b"\"stream_options\":{\"include_usage\":true}"[..]
        } else {
            b"\"stream_options\":{\"include_usage\":true},"
        };
        return (peek.start..peek.start, Bytes::from_static(text));
    };
    let inner = body[at.clone()].strip_prefix(b"{").and_then(|rest| rest.strip_suffix(b"}")).map(<[u8]>::trim_ascii);
    match inner {
        Some([_, ..]) => (at.start + 1..at.start + 1, Bytes::from_static(b"\"include_usage\":true,")),
        _ => (at.clone(), Bytes::from_static(b"{\"include_usage\":true}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_splice(body: &str, model: Option<&str>, usage: bool, expected: &str) {
        let bytes = Bytes::from(body.to_owned());
        let seen = peek(&bytes, &Bounds::default()).expect("an object");
        let change = Splice { model, include_usage: usage, max_tokens: None };
        let out = spliced(&bytes, &seen, change).concat();
        assert_eq!(String::from_utf8_lossy(&out), expected);
        let again = peek(&out, &Bounds::default()).expect("still an object");
        assert!(!usage || again.stream_options.is_some_and(|(_, usage)| usage), "{expected}");
    }

    #[test]
    fn only_what_must_change_is_changed() {
        check_splice(r#"{ "model": "a","x":1}"#, None, false, r#"{ "model": "a","x":1}"#);
        check_splice(r#"{ "model": "a","x":1}"#, Some("b\""), false, r#"{ "model": "b\"","x":1}"#);
        check_splice(r#"{"model":"a"}"#, Some("b"), true, r#"{"stream_options":{"include_usage":true},"model":"b"}"#);
        check_splice(
            r#"{"stream_options":null,"model":"a"}"#,
            Some("b"),
            true,
            r#"{"stream_options":{"include_usage":true},"model":"b"}"#,
        );
        check_splice(
            r#"{"stream_options":{ },"model":"a"}"#,
            None,
            true,
            r#"{"stream_options":{"include_usage":true},"model":"a"}"#,
        );
        check_splice(r#"{"stream_options":{"x":1}}"#, None, true, r#"{"stream_options":{"include_usage":true,"x":1}}"#);
        check_splice(
            r#"{"stream_options":{"include_usage": false}}"#,
            None,
            true,
            r#"{"stream_options":{"include_usage": true}}"#,
        );
        check_splice(
            r#"{"stream_options":{"include_usage": null,"x":2}}"#,
            None,
            true,
            r#"{"stream_options":{"include_usage": true,"x":2}}"#,
        );
        check_splice("{}", None, true, r#"{"stream_options":{"include_usage":true}}"#);
    }

    #[test]
    fn it_sees_what_routing_needs_and_where() {
        let body = br#" { "messages":[{"model":"no"}], "model" : "a\u0062" ,"stream":true,"max_tokens":7,"stream_options":{"include_usage":true}}"#;
        let seen = peek(body, &Bounds::default()).expect("an object");
        assert_eq!((seen.model.as_deref(), seen.stream, seen.max_tokens), (Some("ab"), true, Some(7)));
        assert_eq!(&body[seen.model_at.expect("there")], br#""a\u0062""#);
        let (at, usage) = seen.stream_options.expect("there");
        assert_eq!((&body[at], usage), (&br#"{"include_usage":true}"#[..], true));
        assert_eq!(seen.start, 2);
    }

    #[test]
    fn what_could_be_read_two_ways_is_refused() {
        for body in [
            &br#"{"model":"a","model":"b"}"#[..],
            b"[]",
            b"{} x",
            b"{\"a\":}",
            b"\xff",
            br#"{"stream":1}"#,
            br#"{"model":7}"#,
            br#"{"stream_options":{"include_usage":true,"include_usage":false}}"#,
        ] {
            assert!(peek(body, &Bounds::default()).is_err(), "{}", String::from_utf8_lossy(body));
        }
        assert_eq!(peek(b"{}", &Bounds::default()).map(|seen| seen.is_empty), Ok(true));
        assert_eq!(peek(br#"{"model":null}"#, &Bounds::default()).map(|seen| seen.model), Ok(None));
    }
}
